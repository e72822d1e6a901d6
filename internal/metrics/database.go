package metrics

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/dlqd/dlqd/internal/metrics/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/reconcile"
)

const (
	// readTimeout is how long a scrape waits for the database. After that time it serves the last sample.
	readTimeout = 3 * time.Second
	// maxSampleAge is the age up to which the last sample is served while the database does not answer, so that alerts
	// continue. Without this limit, a single process that lost its connection to the database would keep alerts whose
	// cause is gone.
	maxSampleAge = time.Hour
	// otherQueue is the label for the sum of all queues that have no series of their own.
	otherQueue = "other"
	// maxQueues is the number of queues with series of their own. When so many queues have series, a further queue gets
	// none. Queues of the policy and queues in dlq.counters always have series.
	maxQueues = 100
)

// Descriptions of the database's metrics. Every process serves the same values.
var (
	described []*prometheus.Desc

	// These names are common on dashboards of dead-letter queues.
	jobsDesc      = desc("dlq_jobs_total", "Jobs that became dead letters.", "queue")
	sizeDesc      = desc("dlq_size", "Open dead letters: pending, processing and manual.", "queue")
	retriedDesc   = desc("dlq_retry_success_total", "Redeliveries that succeeded.", "queue")
	permanentDesc = desc("dlq_permanent_failures_total", "Dead letters that used up their redeliveries (dlq_failed).",
		"queue")
	timeToRetryDesc = desc("dlq_time_to_retry_seconds", "Time from the capture of a dead letter until the start of a "+
		"redelivery.", "queue")

	capturedDesc = desc("dlqd_dead_letters_captured_total", "Jobs that became dead letters, by error class at filing.",
		"queue", "error_class")
	failuresDesc = desc("dlqd_failures_total",
		"Captures and failed redeliveries; redeliveries by the class of the entry when it was sent.", "queue", "error_class")
	typesDesc = desc("dlqd_failures_by_type_total", "Captures and failed redeliveries by error type: the 20 most "+
		"frequent of a queue, the rest as other; none for errors without a type.", "queue", "error_type")
	startedDesc = desc("dlqd_redeliveries_total", "Redeliveries started.", "queue", "error_class")
	endedDesc   = desc("dlqd_redeliveries_ended_total",
		"Redeliveries that ended, by outcome (succeeded, failed) and by the class of the entry when it was sent.",
		"queue", "error_class", "outcome")
	closedDesc = desc("dlqd_dead_letters_closed_total", "Dead letters that were closed, by outcome: resolved, failed "+
		"(used up its redeliveries), archived (discarded, expired, or erased while open).", "queue", "error_class", "outcome")
	parkedDesc = desc("dlqd_dead_letters_parked_total", "Dead letters that moved to manual.", "queue", "error_class")
	sweptDesc  = desc("dlqd_leases_expired_total", "Dead letters that the sweep moved because the job of their "+
		"redelivery was deleted or had ended without being captured.", "queue")
	inDLQDesc    = desc("dlqd_time_in_dlq_seconds", "Time from the capture of a dead letter until it was closed.", "queue")
	recoveryDesc = desc("dlqd_time_to_recovery_seconds", "Time from the first failure of a job until its work was "+
		"completed.", "queue")
	filingDesc = desc("dlqd_time_to_filing_seconds", "Time from a failure until a worker filed it, without backfilled "+
		"failures.", "queue")
	changesDesc = desc("dlqd_circuit_breaker_changes_total", "State changes of circuit breakers, by new state.",
		"name", "to")

	entriesDesc  = desc("dlqd_dead_letters", "Open dead letters.", "status", "queue", "error_class")
	observedDesc = desc("dlqd_dead_letters_observed", "Pending dead letters for which automatic redelivery is off; up "+
		"to 10,000 of a queue are counted.", "queue")
	returnedDesc = desc("dlqd_dead_letters_returned", "Dead letters whose record is published again, while their "+
		"consumer group is not known to be past it; up to 10,000 are counted.", "queue")
	needsDesc = desc("dlqd_needs_person",
		"Dead letters that have been manual or failed for longer than needsPersonAfter (monitoring.yaml), without those of "+
			"muted groups; absent if there is none.", "queue", "error_class")
	oldestDesc = desc("dlqd_dead_letter_oldest_seconds", "Age of the oldest open dead letter; 0 if there is none.",
		"queue")
	queueUpDesc = desc("dlqd_queue_up", "Whether a queue is within its limits (monitoring.yaml), as in /api/health.",
		"queue")
	maxOpenDesc = desc("dlqd_alert_max_open", "Alert threshold for the number of open dead letters of a queue "+
		"(monitoring.yaml).", "queue")
	maxAgeDesc = desc("dlqd_alert_max_age_seconds", "Alert threshold for the age of the oldest open dead letter of a "+
		"queue (monitoring.yaml).", "queue")
	restoredDesc = desc("dlqd_restored", "Whether dlqd sends nothing because the database was restored to an earlier "+
		"time: 1 until an operator resumes it.")
	stoppedDesc = desc("dlqd_automatic_stopped", "Whether an operator stopped all automatic redelivery: 1 until it is "+
		"resumed.")
	captureDesc = desc("dlqd_capture", "1 for the active mode of capture (on, off, strict) and the state of its "+
		"triggers (enabled, disabled, missing).", "mode", "triggers")
	missedDesc = desc("dlqd_reconciled_entries_total", "Failures that capture missed and the reconciler filed, by "+
		"cause: capture_off, trigger_missing, trigger_disabled, missed (capture skipped the job or was bypassed).", "why")
	unfiledDesc = desc("dlqd_unfiled_entries", "Unfiled entries; up to 10,000 are counted.")
	waitingDesc = desc("dlqd_unfiled_oldest_seconds", "Age of the oldest unfiled entry; 0 if there is none.")
	factsDesc   = desc("dlqd_unapplied_facts", "Facts (ends of redeliveries and retries made outside dlqd) that are "+
		"not applied yet; up to 10,000 are counted.")
	factsAgeDesc = desc("dlqd_unapplied_oldest_seconds", "Age of the oldest unapplied fact; 0 if there is none.")
	rowsDesc     = desc("dlqd_dead_letters_entered_total", "Rows inserted into a partition, from the statistics of "+
		"Postgres, which a crash may reset. inbox: captured. open: filed, or replayed from dlq_failed.", "partition")
	defaultsDesc = desc("dlqd_default_partition_rows", "Rows in default partitions, which receive rows of months "+
		"without a partition; up to 10,000 are counted.", "partition")
	untilDesc = desc("dlqd_partitions_until_timestamp_seconds", "End of a table's last partition, in seconds since "+
		"1970; partitions are created two months ahead.", "table")
	lagDesc    = desc("dlqd_rollup_lag_seconds", "Age of the rollups, and so of analytics and counters.")
	movesDesc  = desc("dlqd_rollup_moves", "Moves that the rollups have counted since their last rebuild.")
	sampleDesc = desc("dlqd_sample_age_seconds", "Age of the sample from which the metrics of the database are served.")
	gatesDesc  = desc("dlqd_gates", "Gates, each of which releases entries that wait for the same condition, by "+
		"state: probing, shut, open.", "state")
	paceDesc = desc("dlqd_pace_reserved_seconds", "Time for which a pace of redeliveries is reserved ahead; 0 if "+
		"the next one may be sent at once.", "name")
	runsDesc   = desc("dlqd_replay_runs", "Replay runs, by status.", "status")
	runsOfDesc = desc("dlqd_replay_run_entries", "Entries of the replay runs that have not ended: selected (total), "+
		"redelivered (replayed) and skipped.", "state")
	approvalDesc = desc("dlqd_approvals", "Requests for approval, by state.", "operation", "state")
	processDesc  = desc("dlqd_processes", "dlqd processes that use the database.")
	riverDesc    = desc("dlqd_river_jobs", "Jobs of River's queues, by state; up to 10,000 of each are counted.",
		"queue", "state")
	riverAgeDesc = desc("dlqd_river_oldest_job_seconds", "Wait of the oldest available job; 0 if there is none.", "queue")
	latencyDesc  = desc("dlqd_river_latency_seconds", "Average wait of the running jobs before they started; absent if "+
		"none is running.", "queue")
	pausedDesc = desc("dlqd_river_queue_paused", "Whether a queue is paused.", "queue")
	lagOfDesc  = desc("dlqd_source_lag", "Offsets of a source's partitions that are not read yet.", "source")
	marginDesc = desc("dlqd_source_margin", "Offsets between the oldest record that the broker has and the next to read: "+
		"the fewest of a source's partitions that have records to read; absent if none has.", "source")
	storedDesc  = desc("dlqd_source_records_total", "Records of a source that were stored.", "source")
	holesDesc   = desc("dlqd_source_holes_total", "Offsets of a source's partitions that had no record.", "source")
	lostDesc    = desc("dlqd_source_lost_total", "Offsets that the broker did not have any more, or that an operator skipped.", "source")
	failingDesc = desc("dlqd_source_failing", "Partitions and topics of a source that fail.", "source")
	runningDesc = desc("dlqd_source_running", "Whether a process reads a source.", "source")
	heldDesc    = desc("dlqd_source_paused", "Whether an operator paused a source.", "source")
	behindDesc  = desc("dlqd_source_stalled_seconds", "Time for which a partition of a source has had records to read "+
		"without progress, the longest of all; 0 if there is none.", "source")
	progressDesc = desc("dlqd_source_progress_timestamp_seconds", "When a position of a source last moved, in "+
		"seconds since 1970; absent before the first time.", "source")
	feedDesc      = desc("dlqd_feed_published_total", "Dead letters of a feed that the broker has acknowledged.", "feed")
	refusedDesc   = desc("dlqd_feed_failed_total", "Dead letters of a feed that could not be published.", "feed")
	unsentDesc    = desc("dlqd_feed_waiting", "Dead letters of a feed that are not published yet.", "feed")
	unsentAgeDesc = desc("dlqd_feed_lag_seconds", "Time for which the first of them has waited; 0 if there is none.",
		"feed")
	feedErrorDesc = desc("dlqd_feed_failing", "Whether publishing to a topic of a feed fails.", "feed")
	feedRunDesc   = desc("dlqd_feed_running", "Whether a process looks for the dead letters of a feed.", "feed")
	feedHeldDesc  = desc("dlqd_feed_paused", "Whether an operator paused a feed.", "feed")
	upDesc        = desc("dlqd_database_up", "Whether the database answered this scrape; if not, the other metrics of the "+
		"database are from the last sample.")
)

// totalDescs are the totals by queue, keyed by their name in dlq.counters.
var totalDescs = map[string]*prometheus.Desc{
	"captured": jobsDesc, "succeeded": retriedDesc, "failed": permanentDesc, "swept": sweptDesc,
}

// timeDescs are the histograms, keyed by their name in dlq.counters.
var timeDescs = map[string]*prometheus.Desc{
	"in_dlq": inDLQDesc, "to_recovery": recoveryDesc, "to_retry": timeToRetryDesc, "to_filing": filingDesc,
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(name, help, labels, nil)
	described = append(described, d)
	return d
}

// database publishes the database's sample. A scrape reads one row. It reads the sample in that row only if the sample
// has changed.
type database struct {
	queries *dbsqlc.Queries
	policy  func() *policy.Policy
	logger  *slog.Logger
	down    atomic.Bool // whether the database did not answer the last scrape
	last    atomic.Pointer[Sample]
}

func (*database) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range described {
		ch <- d
	}
}

func (d *database) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), readTimeout)
	defer cancel()
	s, err := readSample(ctx, d.queries, d.last.Load())
	gauge(ch, upDesc, boolValue(err == nil))
	switch {
	case err == nil:
		if d.down.Swap(false) {
			d.logger.Info("metrics: the database answers again")
		}
		d.last.Store(s)
	case !d.down.Swap(true):
		d.logger.Warn("metrics: reading the sample from the database failed", "error", err)
		fallthrough
	default:
		if s = d.last.Load().atPresent(); s.now.Sub(s.at) > maxSampleAge {
			return
		}
	}
	(&publisher{Sample: s, ch: ch, policy: d.policy()}).publish()
}

// Sample has the database's figures and their time.
type Sample struct {
	counted
	sample

	at, now time.Time // by the database's clock; at is zero if no sample exists yet
	read    time.Time // when now was read, by this process's clock
}

// atPresent returns the sample with its clock advanced to the present. For a nil sample it returns an empty one. It
// does not query the database.
func (s *Sample) atPresent() *Sample {
	if s == nil {
		return &Sample{}
	}
	aged := *s
	aged.now = s.now.Add(time.Since(s.read))
	return &aged
}

// ReadSample reads the current sample.
func ReadSample(ctx context.Context, db postgres.DB) (*Sample, error) {
	return readSample(ctx, dbsqlc.New(db), nil)
}

// readSample reads the current sample. If known is not nil and is still the current sample, readSample reuses its
// content.
func readSample(ctx context.Context, queries *dbsqlc.Queries, known *Sample) (*Sample, error) {
	if known == nil {
		known = &Sample{}
	}
	row, err := queries.ReadSample(ctx, known.at)
	if err != nil {
		return nil, err
	}
	s := &Sample{counted: known.counted, sample: known.sample, at: row.At, now: row.Now, read: time.Now()}
	if row.At.Equal(known.at) {
		return s, nil
	}
	s.counted, s.sample = counted{}, sample{}
	if err := json.Unmarshal(row.Counters, &s.counted); err != nil { //nolint:musttag // dlqd's own row: its names are the fields'
		return nil, err
	}
	return s, json.Unmarshal(row.Sample, &s.sample) //nolint:musttag // likewise
}

// Queue is the number and the age of a queue's open entries.
type Queue struct {
	Open   int64
	Oldest time.Duration // age of the oldest open entry; 0 if no entry is open
}

// asOf returns the present time, but at most maxPause after the sample. Ages of states that pass within seconds are
// computed until asOf: a failure that was unfiled when the sample was taken has probably been filed since.
func (s *Sample) asOf() time.Time {
	if until := s.at.Add(maxPause); s.now.After(until) {
		return until
	}
	return s.now
}

// Ages returns the ages of the sample and of the rollups. An age is 0 if there is no sample or no rollup yet.
func Ages(ctx context.Context, db postgres.DB) (sample, rollups time.Duration, err error) {
	row, err := dbsqlc.New(db).Ages(ctx)
	return row.Sample, row.Rollups, err
}

// QueueSizes returns a Queue for each queue, by name. Queues without open entries may be missing.
func (s *Sample) QueueSizes() map[string]Queue {
	sizes := map[string]Queue{}
	add := func(name string, entries int64, since time.Time) {
		q := sizes[name]
		q.Open += entries
		if !since.IsZero() {
			q.Oldest = max(q.Oldest, s.now.Sub(since))
		}
		sizes[name] = q
	}
	for _, o := range s.Open {
		add(o.Queue, o.Pending+o.Processing+o.Manual, time.Time{})
	}
	for _, u := range s.Unfiled {
		add(u.Queue, u.Entries, u.Since)
	}
	for _, o := range s.Oldest {
		add(o.Queue, 0, o.Since)
	}
	return sizes
}

// publisher converts a sample to metrics.
type publisher struct {
	*Sample

	ch     chan<- prometheus.Metric
	policy *policy.Policy
	shown  map[string]bool // queues with series
}

// queue returns the label of a queue. It is the queue's name if the queue has series, or if maxQueues leaves room for
// one more. Otherwise it is otherQueue.
func (p *publisher) queue(name string) string {
	if p.shown[name] {
		return name
	}
	if len(p.shown) < maxQueues {
		p.shown[name] = true
		return name
	}
	return otherQueue
}

func (p *publisher) publish() {
	if p.at.IsZero() { // publish no counters: counters that restart at 0 would look like a reset
		return
	}
	p.shown = map[string]bool{}
	for queue := range p.Kinds["captured"] {
		p.shown[queue] = true
	}
	for _, name := range p.policy.QueueNames() {
		p.shown[name] = true
	}
	for _, q := range p.Queues { // so that rate() sees the first burst of a queue as an increase from 0
		p.queue(q.Name)
	}
	p.publishCounters()
	p.publishBacklog()
	p.publishInstallation()
	p.publishRiver()
	p.publishSources()
	p.publishFeeds()
}

// publishCounters publishes the values that only increase. Queues of the policy have series from the start. So do
// River's other queues, up to maxQueues.
func (p *publisher) publishCounters() {
	for name, queues := range p.Kinds {
		for queue, labels := range queues {
			p.publishKind(name, queue, labels)
		}
	}
	for queue := range p.shown {
		for name, d := range totalDescs {
			total := 0.0
			for _, n := range p.Kinds[name][queue] {
				total += n
			}
			counter(p.ch, d, total, queue)
		}
		for name, d := range timeDescs {
			first := firstBucket
			if d == filingDesc {
				first = firstShortBucket
			}
			p.ch <- newHistogram(d, first, p.Times[name][queue], queue)
		}
	}
	for _, why := range reconcile.Causes() {
		counter(p.ch, missedDesc, float64(p.Missed[why]), why)
	}
	for _, e := range p.Entered {
		counter(p.ch, rowsDesc, e.Rows, e.Partition)
	}
}

// publishKind publishes the counters of one name and queue, with a series for each label. It publishes nothing for a
// name that this version of dlqd does not know.
func (p *publisher) publishKind(name, queue string, labels map[string]float64) {
	var d *prometheus.Desc
	var more []string
	switch name {
	case "captured":
		d = capturedDesc
	case "failures":
		d = failuresDesc
	case "redelivered":
		d = startedDesc
	case "succeeded":
		d, more = endedDesc, []string{"succeeded"}
	case "failed_again":
		d, more = endedDesc, []string{"failed"}
	case "resolved", "archived", "failed":
		d, more = closedDesc, []string{name}
	case "parked":
		d = parkedDesc
	case "error_type":
		d = typesDesc
		// Applications choose error types. A type may be "none", which is the label of errors without a type.
		if n, has := labels[""]; has {
			labels = maps.Clone(labels)
			delete(labels, "")
			labels["none"] += n
		}
	case "breaker":
		d = changesDesc
	default:
		return // a total by queue, or a name of a later version of dlqd
	}
	for label, n := range labels {
		counter(p.ch, d, n, slices.Concat([]string{queue, label}, more)...)
	}
}

// publishBacklog publishes the numbers and ages of open entries, the alert thresholds of queues, and the numbers of
// entries that wait for an operator, are observed, or were returned.
func (p *publisher) publishBacklog() {
	type group struct{ status, queue, class string }
	open := map[group]int64{}
	add := func(status, queue, class string, n int64) {
		if n > 0 {
			open[group{status, p.queue(queue), class}] += n
		}
	}
	for _, o := range p.Open {
		add("dlq_pending", o.Queue, o.ErrorClass, o.Pending)
		add("dlq_processing", o.Queue, o.ErrorClass, o.Processing)
		add("dlq_manual", o.Queue, o.ErrorClass, o.Manual)
	}
	for _, u := range p.Unfiled {
		add("dlq_pending", u.Queue, "undecided", u.Entries)
	}
	for g, n := range open {
		gauge(p.ch, entriesDesc, float64(n), g.status, g.queue, g.class)
	}

	sizes := map[string]Queue{}
	for name, q := range p.QueueSizes() {
		label := p.queue(name)
		of := sizes[label]
		sizes[label] = Queue{of.Open + q.Open, max(of.Oldest, q.Oldest)}
	}
	for queue := range p.shown {
		gauge(p.ch, sizeDesc, float64(sizes[queue].Open), queue)
		gauge(p.ch, oldestDesc, sizes[queue].Oldest.Seconds(), queue)
		alert := p.policy.Alert(queue)
		gauge(p.ch, maxOpenDesc, float64(alert.MaxOpen), queue)
		gauge(p.ch, maxAgeDesc, alert.MaxAge.Seconds(), queue)
		problems, _ := alert.Judge(sizes[queue].Open, sizes[queue].Oldest)
		gauge(p.ch, queueUpDesc, boolValue(len(problems) == 0), queue)
	}
	if of, ok := sizes[otherQueue]; ok && !p.shown[otherQueue] {
		gauge(p.ch, sizeDesc, float64(of.Open), otherQueue)
		gauge(p.ch, oldestDesc, of.Oldest.Seconds(), otherQueue)
	}
	needs := map[[2]string]int64{}
	for _, n := range p.Needs {
		needs[[2]string{p.queue(n.Queue), n.ErrorClass}] += n.Entries
	}
	for of, n := range needs {
		gauge(p.ch, needsDesc, float64(n), of[0], of[1])
	}
	observed := map[string]int64{}
	for _, o := range p.Observed {
		observed[p.queue(o.Queue)] += o.Entries
	}
	for queue, n := range observed {
		gauge(p.ch, observedDesc, float64(n), queue)
	}
	returned := map[string]int64{}
	for _, r := range p.Returned {
		returned[p.queue(r.Queue)] += r.Entries
	}
	for queue, n := range returned {
		gauge(p.ch, returnedDesc, float64(n), queue)
	}
}

// publishInstallation publishes the state of dlqd in the database, such as the ages of sample and rollups, capture and
// its backlogs, partitions, gates, paces, replay runs, approvals and processes.
func (p *publisher) publishInstallation() {
	gauge(p.ch, sampleDesc, p.now.Sub(p.at).Seconds())
	gauge(p.ch, lagDesc, p.age(p.Rollups.At))
	gauge(p.ch, movesDesc, float64(p.Rollups.Moves))
	gauge(p.ch, stoppedDesc, boolValue(p.Stopped))
	gauge(p.ch, restoredDesc, boolValue(p.Restored))
	gauge(p.ch, captureDesc, 1, p.Capture.Mode, p.Capture.Triggers)
	for _, backlog := range []struct {
		count, age *prometheus.Desc
		n          *int64
		since      *time.Time
	}{
		{unfiledDesc, waitingDesc, p.Capture.Unfiled, p.Capture.UnfiledSince},
		{factsDesc, factsAgeDesc, p.Capture.Facts, p.Capture.FactsSince},
	} {
		if backlog.n == nil { // another session had locked the table of this backlog
			continue
		}
		age := 0.0
		if backlog.since != nil {
			age = p.age(*backlog.since)
		}
		gauge(p.ch, backlog.count, float64(*backlog.n))
		gauge(p.ch, backlog.age, age)
	}
	for _, d := range p.Defaults {
		gauge(p.ch, defaultsDesc, d.Rows, d.Partition)
	}
	for _, u := range p.Until {
		gauge(p.ch, untilDesc, float64(u.Until.Unix()), u.Of)
	}
	gates := map[string]float64{"probing": 0, "shut": 0, "open": 0}
	for _, g := range p.Gates {
		gates[g.State] = float64(g.Gates)
	}
	for _, state := range slices.Sorted(maps.Keys(gates)) {
		gauge(p.ch, gatesDesc, gates[state], state)
	}
	for _, pace := range p.Paces {
		gauge(p.ch, paceDesc, max(0, pace.FreeAt.Sub(p.now).Seconds()), pace.Name)
	}
	runs, total, replayed, skipped := map[string]int64{
		"running": 0, "paused": 0, "completed": 0, "cancelled": 0, "stopped": 0,
	}, int64(0), int64(0), int64(0)
	for _, r := range p.Runs {
		runs[r.Status] = r.Runs
		total, replayed, skipped = total+r.Total, replayed+r.Replayed, skipped+r.Skipped
	}
	for _, status := range slices.Sorted(maps.Keys(runs)) {
		gauge(p.ch, runsDesc, float64(runs[status]), status)
	}
	gauge(p.ch, runsOfDesc, float64(total), "total")
	gauge(p.ch, runsOfDesc, float64(replayed), "replayed")
	gauge(p.ch, runsOfDesc, float64(skipped), "skipped")
	approvals := map[[2]string]int64{}
	for _, operation := range []string{"replay", "bulk", "erase", "export"} {
		approvals[[2]string{operation, "requested"}] = 0
		approvals[[2]string{operation, "approved"}] = 0
	}
	for _, a := range p.Approvals {
		approvals[[2]string{a.Operation, a.State}] = a.Requests
	}
	for of, n := range approvals {
		gauge(p.ch, approvalDesc, float64(n), of[0], of[1])
	}
	gauge(p.ch, processDesc, float64(p.Processes))
}

func (p *publisher) publishRiver() {
	waiting := map[string]float64{}
	for _, w := range p.Waiting {
		waiting[w.Queue] = p.age(w.Since)
	}
	for _, q := range p.Queues {
		gauge(p.ch, pausedDesc, boolValue(q.Paused), q.Name)
		gauge(p.ch, riverAgeDesc, waiting[q.Name], q.Name)
	}
	for _, j := range p.Jobs {
		gauge(p.ch, riverDesc, float64(j.Jobs), j.Queue, j.State)
	}
	for _, l := range p.Latency {
		gauge(p.ch, latencyDesc, l.Seconds, l.Queue)
	}
}

func (p *publisher) publishSources() {
	for i := range p.Sources {
		s := &p.Sources[i]
		gauge(p.ch, lagOfDesc, float64(s.Lag), s.Source)
		counter(p.ch, storedDesc, float64(s.Records), s.Source)
		counter(p.ch, holesDesc, float64(s.Holes), s.Source)
		counter(p.ch, lostDesc, float64(s.Lost), s.Source)
		gauge(p.ch, failingDesc, float64(s.Failing), s.Source)
		gauge(p.ch, runningDesc, boolValue(s.Running), s.Source)
		gauge(p.ch, heldDesc, boolValue(s.Paused), s.Source)
		stalled := 0.0
		if s.BehindSince.Unix() > 0 && !s.Paused {
			stalled = p.age(s.BehindSince)
		}
		gauge(p.ch, behindDesc, stalled, s.Source)
		if s.Margin >= 0 {
			gauge(p.ch, marginDesc, float64(s.Margin), s.Source)
		}
		if s.MovedAt.Unix() > 0 {
			gauge(p.ch, progressDesc, float64(s.MovedAt.UnixMilli())/1000, s.Source)
		}
	}
}

func (p *publisher) publishFeeds() {
	for i := range p.Feeds {
		f := &p.Feeds[i]
		counter(p.ch, feedDesc, float64(f.Published), f.Feed)
		counter(p.ch, refusedDesc, float64(f.Failed), f.Feed)
		gauge(p.ch, unsentDesc, float64(f.Waiting), f.Feed)
		lag := 0.0
		if f.WaitingSince.Unix() > 0 {
			lag = p.age(f.WaitingSince)
		}
		gauge(p.ch, unsentAgeDesc, lag, f.Feed)
		gauge(p.ch, feedErrorDesc, boolValue(f.Failing), f.Feed)
		gauge(p.ch, feedRunDesc, boolValue(f.Running), f.Feed)
		gauge(p.ch, feedHeldDesc, boolValue(f.Paused), f.Feed)
	}
}

// age returns the time from since until asOf, both by the database's clock.
func (p *publisher) age(since time.Time) float64 { return max(0, p.asOf().Sub(since).Seconds()) }

func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	ch <- constant(d, prometheus.GaugeValue, value, labels)
}

func counter(ch chan<- prometheus.Metric, d *prometheus.Desc, value float64, labels ...string) {
	ch <- constant(d, prometheus.CounterValue, value, labels)
}

// constant returns a metric of this scrape. Applications choose names of queues and error types. A name that is not
// valid UTF-8 gives an invalid metric, which alone is missing from the scrape.
func constant(d *prometheus.Desc, kind prometheus.ValueType, value float64, labels []string) prometheus.Metric {
	m, err := prometheus.NewConstMetric(d, kind, value, labels...)
	if err != nil {
		return prometheus.NewInvalidMetric(d, fmt.Errorf("%v: %w", labels, err))
	}
	return m
}

func boolValue(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}
