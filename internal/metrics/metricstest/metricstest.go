// Package metricstest creates data for measurements of metrics, and lists the metrics of a process.
package metricstest

import (
	"log/slog"
	"regexp"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/metrics"
)

// Metric describes a metric that a process serves.
type Metric struct {
	Name, Help   string
	Constant     bool   // whether each label has the same value in all series of a process
	LabelsInText string // in the form of prometheus.Desc
}

// description matches the text of a prometheus.Desc.
var description = regexp.MustCompile(`^Desc\{fqName: "(dlqd?_\w+)", help: "((?:[^"\\]|\\.)*)", ` +
	`unit: "[a-z]*", constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)

// Served returns the metrics that a process serves, without metrics of the Go runtime.
func Served(tb testing.TB) []Metric {
	tb.Helper()
	m := metrics.New()
	m.WatchDatabase(nil, nil, slog.New(slog.DiscardHandler))
	m.WatchPool(nil)
	m.WatchReplica(nil, nil)
	m.WatchPolicy(nil, nil)
	m.WatchBreakers((*breaker.Breakers)(nil))
	m.WatchLoops(func() []background.Status { return nil })
	m.WatchPending(func() (messages, bytes int64) { return 0, 0 })
	registry, ok := m.Gatherer().(*prometheus.Registry)
	require.True(tb, ok)
	described := make(chan *prometheus.Desc, 1000)
	registry.Describe(described)
	close(described)
	var served []Metric
	for d := range described {
		if match := description.FindStringSubmatch(d.String()); match != nil {
			served = append(served, Metric{match[1], match[2], match[3] != "", match[4]})
		}
	}
	return served
}

// FillCounters is a statement that gives $1 queues ("queue_0" …) the counters of years of use: all classes, 20 error
// types and "other", and times from a second to a month. Times to filing are a millisecond to a second.
const FillCounters = `
INSERT INTO dlq.counters (name, queue, label, value)
SELECT c.name, 'queue_' || q, c.label, floor(random() * 10000) + 1
FROM generate_series(0, $1 - 1) q
CROSS JOIN (
	SELECT k.name, l.label
	FROM unnest('{captured,failures,redelivered,succeeded,failed_again,resolved,failed,archived,parked}'::text[]) k (name)
	CROSS JOIN unnest('{transient,rate_limited,outage,validation,malformed,unauthorized,not_found,business,code_bug,unknown,undecided}'::text[]) l (label)
	UNION ALL SELECT 'swept', ''
	UNION ALL SELECT 'error_type', 'PaymentGatewayError' || n FROM generate_series(1, 20) n
	UNION ALL SELECT 'error_type', 'other'
	UNION ALL SELECT t.name, n::text FROM unnest('{in_dlq,to_recovery,to_retry}'::text[]) t (name) CROSS
	JOIN generate_series(0, 170) n
	UNION ALL SELECT 'to_filing', n::text FROM generate_series(-80, 0) n) c
UNION ALL
SELECT t.name, 'queue_' || q, 'seconds', random() * 1e9
FROM generate_series(0, $1 - 1) q CROSS JOIN unnest('{in_dlq,to_recovery,to_retry,to_filing}'::text[]) t (name)
ON CONFLICT (name, queue, label) DO UPDATE SET value = excluded.value`
