// Package deploy embeds the example configuration for monitoring dlqd, and renders its alerts with the links of an
// installation. "dlqd demo --alerts" runs Prometheus and Alertmanager with this configuration.
package deploy

import "embed"

// Files are the examples for Prometheus and Alertmanager, with the alerts and the texts of their notifications.
//
//go:embed prometheus/prometheus.yaml prometheus/rules.yaml alertmanager.yaml dlqd.tmpl
var Files embed.FS
