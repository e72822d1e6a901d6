// Package metrics is what Prometheus reads: rate, errors and duration of each stage of a message's path, and the
// backlog of dead letters.
package metrics

import (
	"context"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/reconcile"
)

const (
	namespace = "dlqd"
	// How long counts of the database are used again: scrapers come often, and counting a million open entries takes
	// about 0.1 s.
	backlogMaxAge = 5 * time.Second
	// How long a scrape waits for the database before it goes without.
	backlogTimeout = 3 * time.Second
)

// Metrics are the program's metrics.
type Metrics struct {
	registry *prometheus.Registry

	Requests        *prometheus.CounterVec   // operation, code
	RequestSeconds  *prometheus.HistogramVec // operation
	refused         *prometheus.CounterVec   // reason
	Submitted       *prometheus.CounterVec   // queue, outcome
	flushes         *prometheus.CounterVec   // outcome
	flushSeconds    prometheus.Histogram
	flushMessages   prometheus.Histogram
	deliveries      *prometheus.CounterVec   // queue, outcome
	deliverySeconds *prometheus.HistogramVec // queue
	moves           *prometheus.CounterVec   // action
	Reloads         *prometheus.CounterVec   // outcome
	batchSeconds    prometheus.Histogram
}

// New returns metrics in a registry of their own.
func New() *Metrics {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	factory := promauto.With(registry)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return factory.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	seconds := prometheus.ExponentialBuckets(0.0005, 2, 16) // 0.5 ms to 16 s
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return factory.NewHistogram(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: buckets})
	}
	histogramBy := func(name, help, label string) *prometheus.HistogramVec {
		return factory.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: name, Help: help, Buckets: seconds}, []string{label})
	}
	m := &Metrics{
		registry:        registry,
		Requests:        counter("http_requests_total", "Requests to the API, by operation and status code.", "operation", "code"),
		RequestSeconds:  histogramBy("http_request_seconds", "Time to answer a request.", "operation"),
		refused:         counter("http_refused_total", "What was refused before anything looked at it, by reason: host (a name that is not ours), origin (a page of another site), requests (too many at once), rate, bodies (no room), slow (a body), connections (closed at once).", "reason"),
		Submitted:       counter("messages_submitted_total", "Messages submitted, by what became of them: accepted, duplicate, conflict, invalid, refused, overflow, open (its destination's breaker), unworked (no dlqd process delivers its queue), away (one did just now), error.", "queue", "outcome"),
		flushes:         counter("ingest_inserts_total", "Inserts of joined submissions, by outcome: ok, error.", "outcome"),
		flushSeconds:    histogram("ingest_insert_seconds", "Time of one insert with its commit.", seconds),
		flushMessages:   histogram("ingest_insert_messages", "Messages in one insert.", prometheus.ExponentialBuckets(1, 2, 11)),
		deliveries:      counter("deliveries_total", "Deliveries, by how they ended: ok, held (not tried yet), or the class of the error.", "queue", "outcome"),
		deliverySeconds: histogramBy("delivery_seconds", "Time of one delivery.", "queue"),
		moves:           counter("worker_entries_total", "Dead letters that this process's DLQ workers moved: filed, repeated (a further failure of an open one), decided, parked, put_off, redelivered, settled, requeued; and batches that failed: error.", "action"),
		Reloads:         counter("policy_reloads_total", "Reloads of the policy, by outcome: ok, error.", "outcome"),
		batchSeconds:    histogram("worker_batch_seconds", "Time of one batch of a DLQ worker.", seconds),
	}
	for _, reason := range door.Reasons() {
		m.refused.WithLabelValues(reason)
	}
	return m
}

// Refused counts what was refused at the door.
func (m *Metrics) Refused(reason string) { m.refused.WithLabelValues(reason).Inc() }

// ObserveInsert is an ingest.Observer.
func (m *Metrics) ObserveInsert(messages int, took time.Duration, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	m.flushes.WithLabelValues(outcome).Inc()
	m.flushSeconds.Observe(took.Seconds())
	m.flushMessages.Observe(float64(messages))
}

// ObserveDelivery is a delivery.Observer.
func (m *Metrics) ObserveDelivery(queue, outcome string, took time.Duration) {
	m.deliveries.WithLabelValues(queue, outcome).Inc()
	m.deliverySeconds.WithLabelValues(queue).Observe(took.Seconds())
}

// ObserveWorker is a worker.Observer.
func (m *Metrics) ObserveWorker(action string, entries int, took time.Duration) {
	m.moves.WithLabelValues(action).Add(float64(entries))
	if took > 0 {
		m.batchSeconds.Observe(took.Seconds())
	}
}

// WatchPending publishes what waits for its commit.
func (m *Metrics) WatchPending(pending func() (messages, bytes int64)) {
	gauge := func(name, help string, value func() float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help}, value))
	}
	gauge("ingest_pending_messages", "Messages that wait for their commit.", func() float64 { n, _ := pending(); return float64(n) })
	gauge("ingest_pending_bytes", "Bytes of their payloads.", func() float64 { _, n := pending(); return float64(n) })
}

// WatchBacklog publishes what the database knows of dead letters.
func (m *Metrics) WatchBacklog(store *deadletter.Store, schemas postgres.Schemas, logger *slog.Logger) {
	m.registry.MustRegister(&backlog{store: store, schemas: schemas, logger: logger})
}

// WatchPolicy publishes which policy is in force, whether it is that of the files, and the limits that it sets.
func (m *Metrics) WatchPolicy(current func() *policy.Policy, upToDate func() bool) {
	m.registry.MustRegister(&policyState{current: current, upToDate: upToDate})
}

// WatchBreakers publishes where circuit breakers stand.
func (m *Metrics) WatchBreakers(breakers *breaker.Breakers) {
	m.registry.MustRegister(breakerStates{breakers})
}

// WatchLoops publishes how the loops are.
func (m *Metrics) WatchLoops(statuses func() []background.Status) {
	m.registry.MustRegister(loopStates{statuses})
}

// Gatherer has the metrics.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// Handler serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{Registry: m.registry})
}

var (
	entriesDesc  = prometheus.NewDesc("dlqd_dead_letters", "Open dead letters, by status, queue and class.", []string{"status", "queue", "error_class"}, nil)
	oldestDesc   = prometheus.NewDesc("dlqd_dead_letter_oldest_seconds", "Age of the oldest open dead letter; 0 where there is none.", nil, nil)
	observedDesc = prometheus.NewDesc("dlqd_dead_letters_observed", "Pending dead letters that are not redelivered by themselves, because that is off for them, by queue.", []string{"queue"}, nil)
	stoppedDesc  = prometheus.NewDesc("dlqd_automatic_stopped", "Whether a person stopped all automatic redelivery: 1 until it is lifted.", nil, nil)
	missedDesc   = prometheus.NewDesc("dlqd_reconciled_entries_total", "Failures that capture missed and the reconciler filed, by all processes, by cause: capture_off, trigger_missing, trigger_disabled, missed (capture gave way, or was bypassed).", []string{"why"}, nil)
	captureDesc  = prometheus.NewDesc("dlqd_capture", "1 for the mode of capture that holds (on, off, strict) and the state of its triggers (enabled, disabled, missing).", []string{"mode", "triggers"}, nil)
	unfiledDesc  = prometheus.NewDesc("dlqd_unfiled_entries", "Captured entries that no DLQ worker has filed yet, counted up to 10,000.", nil, nil)
	waitingDesc  = prometheus.NewDesc("dlqd_unfiled_oldest_seconds", "Age of the oldest of them; 0 where there is none.", nil, nil)
	factsDesc    = prometheus.NewDesc("dlqd_unapplied_facts", "Ends of redeliveries, and retries made outside dlqd, that no process has applied yet, counted up to 10,000.", nil, nil)
	factsAgeDesc = prometheus.NewDesc("dlqd_unapplied_oldest_seconds", "Age of the oldest of them; 0 where there is none.", nil, nil)
	rowsDesc     = prometheus.NewDesc("dlqd_dead_letters_entered_total", "Rows that entered a partition, by all processes, as Postgres counts them (its own restarts and crashes may reset it). inbox: captured. open: filed, or replayed from dlq_failed.", []string{"partition"}, nil)
	defaultsDesc = prometheus.NewDesc("dlqd_default_partition_rows", "Rows that went to default partitions, because the month's own was missing, counted up to 10,000.", []string{"partition"}, nil)
	upDesc       = prometheus.NewDesc("dlqd_database_up", "Whether the database answered this scrape.", nil, nil)
)

// backlog reads counts from the database, at most once in backlogMaxAge.
type backlog struct {
	store   *deadletter.Store
	schemas postgres.Schemas
	logger  *slog.Logger

	mu   sync.Mutex
	at   time.Time
	last []prometheus.Metric
}

func (b *backlog) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{entriesDesc, observedDesc, stoppedDesc, oldestDesc, missedDesc, captureDesc, unfiledDesc, waitingDesc, factsDesc, factsAgeDesc, rowsDesc, defaultsDesc, upDesc} {
		ch <- d
	}
}

func (b *backlog) Collect(ch chan<- prometheus.Metric) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if time.Since(b.at) > backlogMaxAge {
		ctx, cancel := context.WithTimeout(context.Background(), backlogTimeout)
		defer cancel()
		read, err := b.read(ctx)
		up := 1.0
		if err != nil {
			b.logger.Warn("metrics: cannot count dead letters", "error", err)
			up, read = 0, nil
		}
		b.last = slices.Concat(read, []prometheus.Metric{prometheus.MustNewConstMetric(upDesc, prometheus.GaugeValue, up)})
		b.at = time.Now()
	}
	for _, m := range b.last {
		ch <- m
	}
}

func (b *backlog) read(ctx context.Context) ([]prometheus.Metric, error) {
	rows, err := b.store.Backlog(ctx)
	if err != nil {
		return nil, err
	}
	var read []prometheus.Metric
	for _, r := range rows {
		read = append(read, prometheus.MustNewConstMetric(entriesDesc, prometheus.GaugeValue, float64(r.Entries), r.Status, r.Queue, r.ErrorClass))
	}
	observed, err := automatic.CountObserved(ctx, b.store.DB())
	if err != nil {
		return nil, err
	}
	for _, r := range observed {
		read = append(read, prometheus.MustNewConstMetric(observedDesc, prometheus.GaugeValue, float64(r.Entries), r.Queue))
	}
	stop, err := automatic.ReadStop(ctx, b.store.DB())
	if err != nil {
		return nil, err
	}
	read = append(read, prometheus.MustNewConstMetric(stoppedDesc, prometheus.GaugeValue, truth(stop != nil)))
	oldest, err := b.store.OldestOpen(ctx)
	if err != nil {
		return nil, err
	}
	age := 0.0
	if oldest != nil {
		age = time.Since(*oldest).Seconds()
	}
	read = append(read, prometheus.MustNewConstMetric(oldestDesc, prometheus.GaugeValue, age))

	captured, err := b.readCapture(ctx)
	if err != nil {
		return nil, err
	}
	read = append(read, captured...)

	entered, err := postgres.RowsEntered(ctx, b.store.DB(), b.schemas)
	if err != nil {
		return nil, err
	}
	for _, e := range entered {
		read = append(read, prometheus.MustNewConstMetric(rowsDesc, prometheus.CounterValue, e.Rows, e.Partition))
	}
	strays, err := postgres.RowsInDefaults(ctx, b.store.DB())
	if err != nil {
		return nil, err
	}
	for _, d := range strays {
		read = append(read, prometheus.MustNewConstMetric(defaultsDesc, prometheus.GaugeValue, d.Rows, d.Partition))
	}
	return read, nil
}

// readCapture reads how capture is.
func (b *backlog) readCapture(ctx context.Context) ([]prometheus.Metric, error) {
	status, err := reconcile.ReadCapture(ctx, b.store.DB())
	if err != nil {
		return nil, err
	}
	missed, err := reconcile.Missed(ctx, b.store.DB())
	if err != nil {
		return nil, err
	}
	read := []prometheus.Metric{prometheus.MustNewConstMetric(captureDesc, prometheus.GaugeValue, 1, status.Mode, status.Triggers)}
	for _, why := range reconcile.Causes() {
		read = append(read, prometheus.MustNewConstMetric(missedDesc, prometheus.CounterValue, float64(missed[why]), why))
	}
	for _, waiting := range []struct {
		count, age *prometheus.Desc
		n          *int64
		since      *time.Time
	}{{unfiledDesc, waitingDesc, status.Unfiled, status.UnfiledSince}, {factsDesc, factsAgeDesc, status.Facts, status.FactsSince}} {
		if waiting.n == nil { // somebody holds the table
			continue
		}
		age := 0.0
		if waiting.since != nil {
			age = time.Since(*waiting.since).Seconds()
		}
		read = append(read, prometheus.MustNewConstMetric(waiting.count, prometheus.GaugeValue, float64(*waiting.n)), prometheus.MustNewConstMetric(waiting.age, prometheus.GaugeValue, age))
	}
	return read, nil
}
