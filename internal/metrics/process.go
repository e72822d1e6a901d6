package metrics

import (
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
)

// Metrics of this process's state, which are published without a query.
var (
	breakerDesc = prometheus.NewDesc("dlqd_circuit_breaker_state", "State of a circuit breaker: 1 for the current state.",
		[]string{"name", "state"}, nil)

	loopSuccessDesc = prometheus.NewDesc("dlqd_loop_last_success_timestamp_seconds", "Time of the last successful turn "+
		"of a loop of this process, in seconds since 1970; 0 before the first.", []string{"loop"}, nil)
	loopHealthyDesc = prometheus.NewDesc("dlqd_loop_healthy", "Whether a loop of this process is healthy: 0 if several "+
		"turns in a row failed, one hangs, or none has succeeded for three intervals.", []string{"loop"}, nil)

	policyDesc   = prometheus.NewDesc("dlqd_policy_info", "Active policy: 1.", []string{"version"}, nil)
	upToDateDesc = prometheus.NewDesc("dlqd_policy_up_to_date", "Whether the active policy matches the files: 0 after a "+
		"failed reload.", nil, nil)

	connectionsDesc = prometheus.NewDesc("dlqd_pool_connections", "Connections of the pool to the database: idle, used, "+
		"opening.", []string{"state"}, nil)
	maxConnsDesc = prometheus.NewDesc("dlqd_pool_max_connections", "Maximum number of connections in the pool.", nil, nil)
	acquiresDesc = prometheus.NewDesc("dlqd_pool_acquires_total", "Connections acquired from the pool.", nil, nil)
	waitedDesc   = prometheus.NewDesc("dlqd_pool_acquires_waited_total",
		"Acquires that waited because no connection was idle.", nil, nil)
	canceledDesc = prometheus.NewDesc("dlqd_pool_acquires_canceled_total", "Waits for a connection that were cancelled.",
		nil, nil)
	waitTimeDesc = prometheus.NewDesc("dlqd_pool_acquire_wait_seconds_total", "Time spent waiting for connections.",
		nil, nil)
)

// breakerStates publishes the states of the breakers at each scrape.
type breakerStates struct{ breakers *breaker.Breakers }

func (breakerStates) Describe(ch chan<- *prometheus.Desc) { ch <- breakerDesc }

func (s breakerStates) Collect(ch chan<- prometheus.Metric) {
	for i, status := range s.breakers.List() {
		if i == maxBreakers {
			return
		}
		for _, state := range []breaker.State{breaker.Closed, breaker.Open, breaker.HalfOpen} {
			gauge(ch, breakerDesc, boolValue(status.State == state), status.Name, string(state))
		}
	}
}

// loopStates publishes the status of the loops at each scrape.
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
		gauge(ch, loopHealthyDesc, boolValue(status.Problem == ""), status.Name)
	}
}

// policyState publishes the state of the policy at each scrape.
type policyState struct {
	current   func() *policy.Policy
	upToDate  func() bool
	submitted *prometheus.CounterVec
}

// refusedOutcomes are the outcomes that the alert IntakeRefused counts.
var refusedOutcomes = []string{"overflow", "unworked", "away", "error"}

func (s *policyState) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{policyDesc, upToDateDesc} {
		ch <- d
	}
}

func (s *policyState) Collect(ch chan<- prometheus.Metric) {
	p := s.current()
	gauge(ch, policyDesc, 1, p.Version())
	gauge(ch, upToDateDesc, boolValue(s.upToDate()))
	for _, queue := range p.QueueNames() {
		for _, outcome := range refusedOutcomes { // increase() needs a 0 before the first
			s.submitted.WithLabelValues(queue, outcome)
		}
	}
}

// poolState publishes the pool's statistics at each scrape.
type poolState struct{ pool *pgxpool.Pool }

func (poolState) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		connectionsDesc, maxConnsDesc, acquiresDesc, waitedDesc,
		canceledDesc, waitTimeDesc,
	} {
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
