package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/dlqd/dlqd/internal/policy"
)

var (
	policyDesc   = prometheus.NewDesc("dlqd_policy_info", "The policy that is in force: 1.", []string{"version"}, nil)
	upToDateDesc = prometheus.NewDesc("dlqd_policy_up_to_date", "Whether the policy in force is that of the files: 0 after a reload that failed.", nil, nil)
	maxOpenDesc  = prometheus.NewDesc("dlqd_alert_max_open", "Open dead letters of a queue beyond which people want to be told (monitoring.yaml).", []string{"queue"}, nil)
	maxAgeDesc   = prometheus.NewDesc("dlqd_alert_max_age_seconds", "Age of a queue's oldest open dead letter beyond which people want to be told (monitoring.yaml).", []string{"queue"}, nil)
)

// policyState reads the policy at every scrape.
type policyState struct {
	current  func() *policy.Policy
	upToDate func() bool
}

func (s *policyState) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{policyDesc, upToDateDesc, maxOpenDesc, maxAgeDesc} {
		ch <- d
	}
}

func (s *policyState) Collect(ch chan<- prometheus.Metric) {
	p := s.current()
	ch <- prometheus.MustNewConstMetric(policyDesc, prometheus.GaugeValue, 1, p.Version())
	ch <- prometheus.MustNewConstMetric(upToDateDesc, prometheus.GaugeValue, truth(s.upToDate()))
	for _, queue := range p.QueueNames() {
		alert := p.Alert(queue)
		ch <- prometheus.MustNewConstMetric(maxOpenDesc, prometheus.GaugeValue, float64(alert.MaxOpen), queue)
		ch <- prometheus.MustNewConstMetric(maxAgeDesc, prometheus.GaugeValue, alert.MaxAge.Seconds(), queue)
	}
}
