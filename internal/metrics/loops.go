package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dlqd/dlqd/internal/background"
)

var (
	loopSuccessDesc = prometheus.NewDesc("dlqd_loop_last_success_timestamp_seconds", "When a turn of a loop of this process succeeded last, in seconds since 1970; 0 before the first.", []string{"loop"}, nil)
	loopErrorsDesc  = prometheus.NewDesc("dlqd_loop_errors_total", "Turns of a loop of this process that failed.", []string{"loop"}, nil)
	loopHealthyDesc = prometheus.NewDesc("dlqd_loop_healthy", "Whether a loop of this process works: 0 where turns in a row fail, one hangs, or none has succeeded for three intervals.", []string{"loop"}, nil)
)

// loopStates asks the loops at every scrape.
type loopStates struct {
	statuses func() []background.Status
}

func (loopStates) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{loopSuccessDesc, loopErrorsDesc, loopHealthyDesc} {
		ch <- d
	}
}

func (s loopStates) Collect(ch chan<- prometheus.Metric) {
	for _, status := range s.statuses() {
		seconds := 0.0
		if !status.LastSuccess.IsZero() {
			seconds = float64(status.LastSuccess.UnixMilli()) / 1000
		}
		ch <- prometheus.MustNewConstMetric(loopSuccessDesc, prometheus.GaugeValue, seconds, status.Name)
		ch <- prometheus.MustNewConstMetric(loopErrorsDesc, prometheus.CounterValue, float64(status.Errors), status.Name)
		ch <- prometheus.MustNewConstMetric(loopHealthyDesc, prometheus.GaugeValue, truth(status.Problem == ""), status.Name)
	}
}
