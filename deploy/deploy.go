// Package deploy embeds the example configuration for monitoring dlqd. "dlqd demo --alerts" runs
// it.
package deploy

import "embed"

// Files are the examples for Prometheus and Alertmanager.
//
//go:embed prometheus/prometheus.yaml prometheus/rules.yaml alertmanager.yaml dlqd.tmpl
var Files embed.FS
