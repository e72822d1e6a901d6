package metrics

import (
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
)

// State of this process, published without a query.
var (
	breakerDesc = prometheus.NewDesc("dlqd_circuit_breaker_state", "Where a circuit breaker stands: 1 for the state that it is in.", []string{"name", "state"}, nil)

	loopSuccessDesc = prometheus.NewDesc("dlqd_loop_last_success_timestamp_seconds", "When a turn of a loop of this process succeeded last, in seconds since 1970; 0 before the first.", []string{"loop"}, nil)
	loopHealthyDesc = prometheus.NewDesc("dlqd_loop_healthy", "Whether a loop of this process works: 0 where turns in a row fail, one hangs, or none has succeeded for three intervals.", []string{"loop"}, nil)

	policyDesc   = prometheus.NewDesc("dlqd_policy_info", "The policy that is in force: 1.", []string{"version"}, nil)
	upToDateDesc = prometheus.NewDesc("dlqd_policy_up_to_date", "Whether the policy in force is that of the files: 0 after a reload that failed.", nil, nil)

	connectionsDesc = prometheus.NewDesc("dlqd_pool_connections", "Connections of the pool to the database: idle, used, opening.", []string{"state"}, nil)
	maxConnsDesc    = prometheus.NewDesc("dlqd_pool_max_connections", "The most connections that the pool may have.", nil, nil)
	acquiresDesc    = prometheus.NewDesc("dlqd_pool_acquires_total", "Connections that were taken from the pool.", nil, nil)
	waitedDesc      = prometheus.NewDesc("dlqd_pool_acquires_waited_total", "Those that had to be waited for, since none was idle.", nil, nil)
	canceledDesc    = prometheus.NewDesc("dlqd_pool_acquires_canceled_total", "Those that somebody gave up waiting for.", nil, nil)
	waitTimeDesc    = prometheus.NewDesc("dlqd_pool_acquire_wait_seconds_total", "Time spent waiting for connections.", nil, nil)
)

// breakerStates reads the breakers at each scrape.
type breakerStates struct{ breakers *breaker.Breakers }

func (breakerStates) Describe(ch chan<- *prometheus.Desc) { ch <- breakerDesc }

func (s breakerStates) Collect(ch chan<- prometheus.Metric) {
	for i, status := range s.breakers.List() {
		if i == maxBreakers {
			return
		}
		for _, state := range []breaker.State{breaker.Closed, breaker.Open, breaker.HalfOpen} {
			gauge(ch, breakerDesc, truth(status.State == state), status.Name, string(state))
		}
	}
}

// loopStates reads the loops' status at each scrape.
type loopStates struct {
	statuses func() []background.Status
}

func (loopStates) Describe(ch chan<- *prometheus.Desc) {
	ch <- loopSuccessDesc
	ch <- loopHealthyDesc
}

func (s loopStates) Collect(ch chan<- prometheus.Metric) {
	for _, status := range s.statuses() {
		seconds := 0.0
		if !status.LastSuccess.IsZero() {
			seconds = float64(status.LastSuccess.UnixMilli()) / 1000
		}
		gauge(ch, loopSuccessDesc, seconds, status.Name)
		gauge(ch, loopHealthyDesc, truth(status.Problem == ""), status.Name)
	}
}

// policyState reads the policy at each scrape.
type policyState struct {
	current   func() *policy.Policy
	upToDate  func() bool
	submitted *prometheus.CounterVec
}

// refusals are the outcomes that the alert IntakeRefused counts.
var refusals = []string{"overflow", "unworked", "away", "error"}

func (s *policyState) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{policyDesc, upToDateDesc} {
		ch <- d
	}
}

func (s *policyState) Collect(ch chan<- prometheus.Metric) {
	p := s.current()
	gauge(ch, policyDesc, 1, p.Version())
	gauge(ch, upToDateDesc, truth(s.upToDate()))
	for _, queue := range p.QueueNames() {
		for _, outcome := range refusals { // increase() needs a 0 before the first
			s.submitted.WithLabelValues(queue, outcome)
		}
	}
}

// poolState reads the pool's statistics at each scrape.
type poolState struct{ pool *pgxpool.Pool }

func (poolState) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{connectionsDesc, maxConnsDesc, acquiresDesc, waitedDesc, canceledDesc, waitTimeDesc} {
		ch <- d
	}
}

func (s poolState) Collect(ch chan<- prometheus.Metric) {
	stat := s.pool.Stat()
	gauge(ch, connectionsDesc, float64(stat.IdleConns()), "idle")
	gauge(ch, connectionsDesc, float64(stat.AcquiredConns()), "used")
	gauge(ch, connectionsDesc, float64(stat.ConstructingConns()), "opening")
	gauge(ch, maxConnsDesc, float64(stat.MaxConns()))
	counter(ch, acquiresDesc, float64(stat.AcquireCount()))
	counter(ch, waitedDesc, float64(stat.EmptyAcquireCount()))
	counter(ch, canceledDesc, float64(stat.CanceledAcquireCount()))
	counter(ch, waitTimeDesc, stat.EmptyAcquireWaitTime().Seconds())
}
