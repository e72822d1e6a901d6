// Package metrics exposes metrics to Prometheus: rate, errors and duration of each stage of a message's path, and the
// database's figures on dead letters.
//
// There are two kinds of metrics. Each process counts its own work: sum these metrics over the processes. All processes
// serve the same figures of the database, from one row that one of the processes writes: take the maximum of these
// metrics.
package metrics

import (
	"context"
	"log/slog"
	"net/http"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/metrics/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replica"
	"github.com/dlqd/dlqd/internal/worker"
)

const (
	namespace = "dlqd"
	// Native buckets, in addition to the classic ones. Each is at most 1.1 times as wide as the previous one, and a
	// histogram has at most 160.
	nativeFactor     = 1.1
	maxNativeBuckets = 160
	nativeReset      = time.Hour
	// maxBreakers is the maximum number of circuit breakers with series.
	maxBreakers = 200
	// stageApproval names the stage that executes approved requests.
	stageApproval = "approval"
)

// Metrics holds the program's metrics.
type Metrics struct {
	registry *prometheus.Registry

	Requests       *prometheus.CounterVec   // operation, code
	RequestSeconds *prometheus.HistogramVec // operation
	Submitted      *prometheus.CounterVec   // queue, outcome
	Reloads        *prometheus.CounterVec   // outcome

	refused         *prometheus.CounterVec // reason
	inserts         *prometheus.CounterVec // outcome
	insertSeconds   prometheus.Histogram
	insertMessages  prometheus.Histogram
	insertWait      prometheus.Histogram
	deliveries      *prometheus.CounterVec   // queue, destination, outcome
	deliverySeconds *prometheus.HistogramVec // destination, outcome
	deliveryWait    *prometheus.HistogramVec // queue
	moves           *prometheus.CounterVec   // action
	batchSeconds    *prometheus.HistogramVec // action
	stageSeconds    *prometheus.HistogramVec // stage, outcome
	retention       *prometheus.CounterVec   // what
	turns           *prometheus.CounterVec   // loop, outcome
	turnSeconds     *prometheus.HistogramVec // loop
	records         *prometheus.CounterVec   // level
	replicaReads    *prometheus.CounterVec   // outcome
}

// New returns metrics in a new registry.
func New() *Metrics {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	factory := promauto.With(registry)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return factory.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	options := func(name, help string, buckets []float64) prometheus.HistogramOpts {
		return prometheus.HistogramOpts{
			Namespace: namespace, Name: name, Help: help, Buckets: buckets,
			NativeHistogramBucketFactor: nativeFactor, NativeHistogramMaxBucketNumber: maxNativeBuckets,
			NativeHistogramMinResetDuration: nativeReset,
		}
	}
	seconds := prometheus.ExponentialBuckets(0.0005, 2, 16) // 0.5 ms to 16 s
	turns := prometheus.ExponentialBuckets(0.001, 4, 12)    // 1 ms to 70 min
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return factory.NewHistogram(options(name, help, buckets))
	}
	histogramBy := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return factory.NewHistogramVec(options(name, help, buckets), labels)
	}
	m := &Metrics{
		registry: registry,
		Requests: counter("http_requests_total", "Requests to the API, by operation and status code.",
			"operation", "code"),
		RequestSeconds: histogramBy("http_request_seconds", "Time to answer a request.", seconds, "operation"),
		refused: counter("http_refused_total", "Requests and connections that were rejected before their handler, "+
			"by reason: host (unknown host name), origin (page of another site), requests (too many at once), rate, bodies "+
			"(no memory left), slow (slow body), connections (too many).", "reason"),
		Submitted: counter("messages_submitted_total", "Messages submitted, by outcome: accepted, duplicate, "+
			"conflict, invalid, refused, overflow, open (the destination's breaker is open), unworked (no dlqd process "+
			"delivers the queue), away (the dlqd process that delivers the queue is temporarily away), error.",
			"queue", "outcome"),
		inserts:       counter("ingest_inserts_total", "Inserts of joined submissions, by outcome: ok, error.", "outcome"),
		insertSeconds: histogram("ingest_insert_seconds", "Time of one insert with its commit.", seconds),
		insertMessages: histogram("ingest_insert_messages", "Messages in one insert.",
			prometheus.ExponentialBuckets(1, 2, 11)),
		insertWait: histogram("ingest_wait_seconds", "Time from a submission until its insert began, for the "+
			"submission of each insert that waited longest.", seconds),
		deliveries: counter("deliveries_total", "Deliveries, by outcome: ok, held (not attempted yet), or the class "+
			"of the error.", "queue", "destination", "outcome"),
		deliverySeconds: histogramBy("delivery_seconds", "Time of one delivery, without held ones.", seconds,
			"destination", "outcome"),
		deliveryWait: histogramBy("delivery_wait_seconds", "Time from when a job was due until its attempt began, without "+
			"held ones.", seconds, "queue"),
		moves: counter("worker_entries_total", "Dead letters that the DLQ workers of this process handled, by "+
			"action: filed, repeated (a further failure of an open entry), claimed, decided, parked, placed (in a pace), "+
			"put_off (deferred), released (by a gate), redelivered, expired, settled (found ended by the sweep), "+
			"requeued.", "action"),
		batchSeconds: histogramBy("worker_batch_seconds", "Time of one batch of a DLQ worker, by action.", seconds, "action"),
		stageSeconds: histogramBy("stage_seconds", "Time of one step of a stage, by outcome (ok, error): claim (due "+
			"batch), decision (failed batch), pace (reservation), gate (check), approval (execution).",
			seconds, "stage", "outcome"),
		retention: counter("retention_total", "Results of retention: aged_out (failed entries that were archived), "+
			"deleted (entries that were deleted one by one), partitions (months that were dropped), archived (rows that were "+
			"written to the archive).", "what"),
		Reloads: counter("policy_reloads_total", "Reloads of the policy, by outcome: ok, error.", "outcome"),
		turns: counter("loop_turns_total", "Turns of a loop of this process, by outcome: ok, error.",
			"loop", "outcome"),
		turnSeconds: histogramBy("loop_turn_seconds", "Time of one turn of a loop of this process.", turns, "loop"),
		records:     counter("log_records_total", "Log records.", "level"),
		replicaReads: counter("replica_reads_total", "Reads of the API that the read replica may answer, by outcome: "+
			"replica (it answered), or why the primary did: own_act (the replica may lack a change of the viewer), "+
			"masking (it may lack a change of what the policy masks), lag (it lags more than the policy allows), away (it "+
			"does not answer, or does not follow the database's primary), repeated (it failed, or did not "+
			"find what the request names).", "outcome"),
	}
	for _, outcome := range replica.Outcomes() {
		m.replicaReads.WithLabelValues(outcome)
	}
	for _, reason := range door.Reasons() {
		m.refused.WithLabelValues(reason)
	}
	for _, vec := range []*prometheus.CounterVec{m.inserts, m.Reloads} {
		vec.WithLabelValues("ok")
		vec.WithLabelValues("error")
	}
	for _, action := range []string{
		"filed", "repeated", "claimed", "decided", "parked", "placed", "put_off", "released",
		"redelivered", "expired", "settled", "requeued",
	} {
		m.moves.WithLabelValues(action)
	}
	for _, stage := range []string{
		worker.StageClaim, worker.StageDecision, worker.StagePace, worker.StageGate,
		stageApproval,
	} {
		m.stageSeconds.WithLabelValues(stage, "ok")
		m.stageSeconds.WithLabelValues(stage, "error")
	}
	for _, what := range []string{"aged_out", "deleted", "partitions", "archived"} {
		m.retention.WithLabelValues(what)
	}
	registry.MustRegister(buildInfo(), prometheus.NewCounterFunc(prometheus.CounterOpts{
		Namespace: namespace, Name: "panics_total",
		Help: "Panics that this process recovered: of requests, pages, deliveries and loops.",
	}, func() float64 { return float64(background.Panics()) }))
	return m
}

// buildInfo returns a gauge whose labels are the program's version, revision and Go version.
func buildInfo() prometheus.Collector {
	labels := prometheus.Labels{"version": "unknown", "revision": "unknown", "go_version": "unknown"}
	if info, ok := debug.ReadBuildInfo(); ok {
		labels["version"], labels["go_version"] = info.Main.Version, info.GoVersion
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				labels["revision"] = s.Value
			}
		}
	}
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: namespace, Name: "build_info", Help: "Build of the program: 1.", ConstLabels: labels,
	}, func() float64 { return 1 })
}

// Refused counts, by reason, a request or connection that was refused before a handler got it.
func (m *Metrics) Refused(reason string) { m.refused.WithLabelValues(reason).Inc() }

// ObserveInsert counts an insert; it is an ingest.Observer.
func (m *Metrics) ObserveInsert(messages int, waited, took time.Duration, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	m.inserts.WithLabelValues(outcome).Inc()
	m.insertWait.Observe(waited.Seconds())
	m.insertSeconds.Observe(took.Seconds())
	m.insertMessages.Observe(float64(messages))
}

// ObserveDelivery counts a delivery. Unless the delivery only held its message, ObserveDelivery also records the wait
// and the duration. It is a delivery.Observer.
func (m *Metrics) ObserveDelivery(d delivery.Delivered) {
	m.deliveries.WithLabelValues(d.Queue, d.Destination, d.Outcome).Inc()
	if d.Outcome != delivery.OutcomeHeld {
		m.deliveryWait.WithLabelValues(d.Queue).Observe(d.Waited.Seconds())
		m.deliverySeconds.WithLabelValues(d.Destination, d.Outcome).Observe(d.Took.Seconds())
	}
}

// ObserveWorker counts the entries of a worker's action. If took is not 0, it records took as the duration of the
// action's transaction. It is a worker.Observer.
func (m *Metrics) ObserveWorker(action string, entries int, took time.Duration) {
	m.moves.WithLabelValues(action).Add(float64(entries))
	if took > 0 {
		m.batchSeconds.WithLabelValues(action).Observe(took.Seconds())
	}
}

// ObserveStage records the duration and outcome of a stage, for worker.Config.ObserveStage.
func (m *Metrics) ObserveStage(stage string, took time.Duration, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	m.stageSeconds.WithLabelValues(stage, outcome).Observe(took.Seconds())
}

// ObserveApproval records the execution of an approved request, for approval.Runner.Observe.
func (m *Metrics) ObserveApproval(took time.Duration, err error) {
	m.ObserveStage(stageApproval, took, err)
}

// ObserveRetention counts the results of a retention round.
func (m *Metrics) ObserveRetention(what string, n int) {
	m.retention.WithLabelValues(what).Add(float64(n))
}

// ObserveTurn counts a turn of a loop, for background.Group.Observe.
func (m *Metrics) ObserveTurn(loop string, took time.Duration, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	m.turns.WithLabelValues(loop, outcome).Inc()
	m.turnSeconds.WithLabelValues(loop).Observe(took.Seconds())
}

// Logged returns a handler that counts log records and passes them to next.
func (m *Metrics) Logged(next slog.Handler) slog.Handler {
	for _, level := range logLevels {
		m.records.WithLabelValues(level)
	}
	return countingHandler{next, m.records}
}

var logLevels = []string{"debug", "info", "warn", "error"}

// countingHandler counts records by level.
type countingHandler struct {
	slog.Handler

	records *prometheus.CounterVec
}

func (h countingHandler) Handle(ctx context.Context, r slog.Record) error {
	level := "error"
	switch {
	case r.Level < slog.LevelInfo:
		level = "debug"
	case r.Level < slog.LevelWarn:
		level = "info"
	case r.Level < slog.LevelError:
		level = "warn"
	}
	h.records.WithLabelValues(level).Inc()
	return h.Handler.Handle(ctx, r)
}

func (h countingHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return countingHandler{h.Handler.WithAttrs(attrs), h.records}
}

func (h countingHandler) WithGroup(name string) slog.Handler {
	return countingHandler{h.Handler.WithGroup(name), h.records}
}

// WatchPending publishes the number and the bytes of submissions that wait for their commit.
func (m *Metrics) WatchPending(pending func() (messages, bytes int64)) {
	gauge := func(name, help string, value func() float64) {
		m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: namespace, Name: name, Help: help},
			value))
	}
	gauge("ingest_pending_messages", "Messages that wait for their commit.",
		func() float64 { n, _ := pending(); return float64(n) })
	gauge("ingest_pending_bytes", "Bytes of the payloads of messages that wait for their commit.",
		func() float64 { _, n := pending(); return float64(n) })
}

// WatchDatabase publishes the last sample of the database.
func (m *Metrics) WatchDatabase(db postgres.DB, current func() *policy.Policy, logger *slog.Logger) {
	m.registry.MustRegister(&database{queries: dbsqlc.New(db), policy: current, logger: logger})
}

// WatchPool publishes the usage of a connection pool.
func (m *Metrics) WatchPool(pool *pgxpool.Pool) { m.registry.MustRegister(poolState{pool}) }

// ObserveReplica counts the outcome of a read for which the read replica was considered, for replica.Config.Observe.
func (m *Metrics) ObserveReplica(outcome string) { m.replicaReads.WithLabelValues(outcome).Inc() }

// WatchReplica publishes whether the read replica may answer reads, and the age of its data. asOf returns the time of
// that data.
func (m *Metrics) WatchReplica(up func() bool, asOf func() time.Time) {
	m.registry.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: namespace, Name: "replica_up",
		Help: "1 if the read replica may answer reads; 0 if the primary answers all of them. Only with --replica-url.",
	}, func() float64 {
		if up() {
			return 1
		}
		return 0
	}), prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: namespace, Name: "replica_age_seconds",
		Help: "Age of the read replica's data, to about two seconds: how long ago the primary was where the replica is; " +
			"-1 if that is unknown. Only with --replica-url.",
	}, func() float64 {
		at := asOf()
		if at.IsZero() {
			return -1
		}
		return time.Since(at).Seconds()
	}))
}

// WatchPolicy publishes which policy is in force, and whether it matches the files.
func (m *Metrics) WatchPolicy(current func() *policy.Policy, upToDate func() bool) {
	m.registry.MustRegister(&policyState{current: current, upToDate: upToDate, submitted: m.Submitted})
}

// WatchBreakers publishes the states of circuit breakers.
func (m *Metrics) WatchBreakers(breakers *breaker.Breakers) {
	m.registry.MustRegister(breakerStates{breakers})
}

// WatchLoops publishes the health of the loops.
func (m *Metrics) WatchLoops(statuses func() []background.Status) {
	for _, status := range statuses() { // rate() of errors needs a 0 before the first error
		m.turns.WithLabelValues(status.Name, "ok")
		m.turns.WithLabelValues(status.Name, "error")
	}
	m.registry.MustRegister(loopStates{statuses})
}

// Gatherer returns the source of the metrics.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// Handler serves the metrics. If a metric cannot be collected, the scrape omits it and
// promhttp_metric_handler_errors_total counts it.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry,
		promhttp.HandlerOpts{Registry: m.registry, ErrorHandling: promhttp.ContinueOnError})
}
