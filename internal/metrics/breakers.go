package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dlqd/dlqd/internal/breaker"
)

var (
	breakerDesc          = prometheus.NewDesc("dlqd_circuit_breaker_state", "Where a circuit breaker stands: 1 for the state that it is in.", []string{"name", "state"}, nil)
	breakerStatesInOrder = []breaker.State{breaker.Closed, breaker.Open, breaker.HalfOpen}
)

// breakerStates reads the breakers at every scrape.
type breakerStates struct{ breakers *breaker.Breakers }

func (breakerStates) Describe(ch chan<- *prometheus.Desc) { ch <- breakerDesc }

func (s breakerStates) Collect(ch chan<- prometheus.Metric) {
	for _, status := range s.breakers.List() {
		for _, state := range breakerStatesInOrder {
			ch <- prometheus.MustNewConstMetric(breakerDesc, prometheus.GaugeValue, truth(status.State == state), status.Name, string(state))
		}
	}
}

func truth(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
