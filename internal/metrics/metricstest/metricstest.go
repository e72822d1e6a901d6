// Package metricstest creates data for measuring metrics.
package metricstest

// FillCounters is a statement that gives $1 queues ("queue_0" …) the counters of years of use: all
// classes, 20 error types and the rest, and times from a second to a month (to filing: a
// millisecond to a second).
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
	UNION ALL SELECT t.name, n::text FROM unnest('{in_dlq,to_recovery,to_retry}'::text[]) t (name) CROSS JOIN generate_series(0, 170) n
	UNION ALL SELECT 'to_filing', n::text FROM generate_series(-80, 0) n) c
UNION ALL
SELECT t.name, 'queue_' || q, 'seconds', random() * 1e9
FROM generate_series(0, $1 - 1) q CROSS JOIN unnest('{in_dlq,to_recovery,to_retry,to_filing}'::text[]) t (name)
ON CONFLICT (name, queue, label) DO UPDATE SET value = excluded.value`
