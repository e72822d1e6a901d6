// Package deploy has the files with which others watch dlqd, so that "dlqd demo --alerts" can show them at work.
package deploy

import "embed"

// Files are the examples for Prometheus and Alertmanager.
//
//go:embed prometheus/prometheus.yaml prometheus/rules.yaml alertmanager.yaml dlqd.tmpl
var Files embed.FS
