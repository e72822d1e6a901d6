package metrics

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/metrics/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
	"github.com/dlqd/dlqd/internal/reconcile"
)

const (
	// sampleInterval is the time between samples. To save writes, a sample without changes is written only every
	// unchangedInterval.
	sampleInterval    = 2 * time.Second
	unchangedInterval = 10 * time.Second
	sampleTimeout     = 30 * time.Second
	// The pause after a sample is pauseFactor times the median duration of the last five samples, at most maxPause.
	pauseFactor = 20
	maxPause    = 30 * time.Second
	// statementTimeout bounds each statement of a sample.
	statementTimeout = 5 * time.Second
	// StaleAfter is the age above which a sample is stale: the longest pause plus the maximum duration of a sample.
	StaleAfter = time.Minute
	// maxRiverQueues and maxRiverJobs bound reads of River's tables. Counting 300,000 jobs takes 52 ms, and counting
	// 10,000 jobs takes 2 ms.
	maxRiverQueues = 100
	maxRiverJobs   = 10_000
	// maxLooked bounds the number of manual entries that dlq.needs_person reads, and the number of failed entries.
	maxLooked = 5_000
)

var errOtherProcess = errors.New("another process has not finished the next one")

// counted is the content of dlq.counters. A hundred queues have 70,000 rows, so bins are JSON lists instead of objects,
// which would be larger.
type counted struct {
	Kinds map[string]map[string]map[string]float64 // by name, queue and label
	Times map[string]map[string]binned             // by name and queue
}

// count groups the rows of dlq.counters. It keeps rows with names of a later version of dlqd; they are not published.
func count(rows []dbsqlc.CountersRow) *counted {
	c := &counted{Kinds: map[string]map[string]map[string]float64{}, Times: map[string]map[string]binned{}}
	for i := range rows {
		row := &rows[i]
		if timeDescs[row.Name] != nil {
			put(c.Times, row.Name, row.Queue, newBinned(row.Labels, row.Values))
			continue
		}
		labels := make(map[string]float64, len(row.Labels))
		for j, label := range row.Labels {
			labels[label] = row.Values[j]
		}
		put(c.Kinds, row.Name, row.Queue, labels)
	}
	return c
}

func put[V any](into map[string]map[string]V, name, queue string, value V) {
	if into[name] == nil {
		into[name] = map[string]V{}
	}
	into[name][queue] = value
}

// sample has the figures of the database except the counters. It stores times instead of ages, so that it changes only
// when something happens.
type sample struct {
	Open      []dbsqlc.DlqRollupBacklog
	Unfiled   []dbsqlc.UnfiledRow
	Oldest    []dbsqlc.OldestOpenRow
	Observed  []dbsqlc.ObservedRow
	Returned  []dbsqlc.ReturnedRow
	Needs     []dbsqlc.NeedsPersonRow
	Stopped   bool
	Restored  bool
	Capture   reconcile.Capture
	Missed    map[string]int64
	Entered   []postgres.Entered
	Defaults  []postgres.Entered
	Until     []dbsqlc.PartitionsUntilRow
	Rollups   dbsqlc.RollupsRow
	Gates     []dbsqlc.GatesRow
	Paces     []dbsqlc.DlqPace
	Runs      []dbsqlc.ReplayRunsRow
	Approvals []dbsqlc.ApprovalsRow
	Processes int64
	Queues    []dbsqlc.RiverQueuesRow
	Jobs      []dbsqlc.RiverJobsRow
	Waiting   []dbsqlc.RiverOldestRow
	Latency   []dbsqlc.RiverLatencyRow
	Sources   []dbsqlc.SourcesRow
	Feeds     []dbsqlc.FeedsRow
}

// Sampler writes the database's figures for the scrapes of all processes, so that a scrape reads one row, however large
// the backlog is. Any number of samplers may run; one works at a time.
type Sampler struct {
	Store   *deadletter.Store
	Schemas postgres.Schemas
	Policy  func() *policy.Policy // policy in force, for needsPersonAfter
	Looked  int                   // maximum number of entries that dlq.needs_person reads; 0 means maxLooked

	rest  background.Rest // computes the pause after failed samples
	until time.Time       // end of the pause after a failed sample
	err   error           // of the last sample
}

// Loop returns the loop that takes samples.
func (s *Sampler) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "metrics", Interval: sampleInterval, Timeout: sampleTimeout, OneProcess: true, Once: background.Each(s.Once),
		Failing: "sampling the database for metrics failed",
	})
}

// Once takes a sample, unless the last sample is recent or another process is taking one. During the pause after a
// failed sample, Once returns that sample's error.
func (s *Sampler) Once(ctx context.Context) error {
	if time.Now().Before(s.until) {
		return s.err
	}
	var began time.Time
	err := s.Store.InTx(ctx, func(tx postgres.DB) error {
		began = time.Now() // the duration excludes the wait for a connection, which costs the database nothing
		return s.sample(ctx, tx, began)
	})
	if s.err = err; err != nil && !began.IsZero() && !errors.Is(err, errOtherProcess) {
		s.rest.Multiple, s.rest.Max = pauseFactor, maxPause
		s.until = time.Now().Add(s.rest.After(time.Since(began)))
	}
	return err
}

func (s *Sampler) sample(ctx context.Context, tx postgres.DB, began time.Time) error {
	queries := dbsqlc.New(tx)
	last, err := queries.SampleDue(ctx, dbsqlc.SampleDueParams{
		Every: sampleInterval / 2, Most: maxPause, Timeout: strconv.FormatInt(statementTimeout.Milliseconds(), 10),
	})
	if err != nil {
		return err
	}
	if !last.Taken {
		if last.Due && last.Age > StaleAfter {
			return fmt.Errorf("the sample is %s old: %w", last.Age.Truncate(time.Second), errOtherProcess)
		}
		return nil
	}
	rows, err := queries.Counters(ctx)
	if err != nil {
		return err
	}
	taken, err := s.readAll(ctx, tx)
	if err != nil {
		return err
	}
	counters, err := json.Marshal(count(rows)) //nolint:musttag // dlqd's own row: its names are the fields'
	if err != nil {
		return err
	}
	sample, err := json.Marshal(taken) //nolint:musttag // likewise
	if err != nil {
		return err
	}
	return queries.WriteSample(ctx, dbsqlc.WriteSampleParams{
		Took: time.Since(began), Counters: counters, Sample: sample, Unchanged: unchangedInterval,
	})
}

func (s *Sampler) readAll(ctx context.Context, tx postgres.DB) (*sample, error) {
	queries := dbsqlc.New(tx)
	var t sample
	r := reader{}
	read(&r, &t.Open, func() ([]dbsqlc.DlqRollupBacklog, error) { return queries.OpenEntries(ctx) })
	read(&r, &t.Unfiled, func() ([]dbsqlc.UnfiledRow, error) { return queries.Unfiled(ctx) })
	read(&r, &t.Oldest, func() ([]dbsqlc.OldestOpenRow, error) { return queries.OldestOpen(ctx) })
	read(&r, &t.Observed, func() ([]dbsqlc.ObservedRow, error) { return queries.Observed(ctx) })
	read(&r, &t.Returned, func() ([]dbsqlc.ReturnedRow, error) { return queries.Returned(ctx) })
	read(&r, &t.Needs, func() ([]dbsqlc.NeedsPersonRow, error) { return queries.NeedsPerson(ctx, s.needsPersonParams()) })
	var stop *automatic.Stop
	read(&r, &stop, func() (*automatic.Stop, error) { return automatic.ReadStop(ctx, tx) })
	t.Restored = stop != nil && stop.Restored
	t.Stopped = stop != nil && stop.ByPerson
	read(&r, &t.Capture, func() (reconcile.Capture, error) { return readCapture(ctx, tx) })
	read(&r, &t.Missed, func() (map[string]int64, error) { return reconcile.Missed(ctx, tx) })
	read(&r, &t.Entered, func() ([]postgres.Entered, error) { return postgres.RowsEntered(ctx, tx, s.Schemas) })
	read(&r, &t.Defaults, func() ([]postgres.Entered, error) { return postgres.RowsInDefaults(ctx, tx) })
	read(&r, &t.Until, func() ([]dbsqlc.PartitionsUntilRow, error) { return queries.PartitionsUntil(ctx) })
	read(&r, &t.Rollups, func() (dbsqlc.RollupsRow, error) { return queries.Rollups(ctx) })
	read(&r, &t.Gates, func() ([]dbsqlc.GatesRow, error) { return queries.Gates(ctx) })
	read(&r, &t.Paces, func() ([]dbsqlc.DlqPace, error) { return queries.Paces(ctx) })
	read(&r, &t.Runs, func() ([]dbsqlc.ReplayRunsRow, error) { return queries.ReplayRuns(ctx) })
	read(&r, &t.Approvals, func() ([]dbsqlc.ApprovalsRow, error) { return queries.Approvals(ctx) })
	read(&r, &t.Processes, func() (int64, error) { return queries.Processes(ctx, process.LiveFor) })
	read(&r, &t.Queues, func() ([]dbsqlc.RiverQueuesRow, error) { return queries.RiverQueues(ctx, maxRiverQueues) })
	names := make([]string, len(t.Queues))
	for i, q := range t.Queues {
		names[i] = q.Name
	}
	read(&r, &t.Jobs, func() ([]dbsqlc.RiverJobsRow, error) {
		return queries.RiverJobs(ctx, dbsqlc.RiverJobsParams{Queues: names, Most: maxRiverJobs})
	})
	read(&r, &t.Waiting, func() ([]dbsqlc.RiverOldestRow, error) { return queries.RiverOldest(ctx, names) })
	read(&r, &t.Latency, func() ([]dbsqlc.RiverLatencyRow, error) { return queries.RiverLatency(ctx, names) })
	read(&r, &t.Sources, func() ([]dbsqlc.SourcesRow, error) { return queries.Sources(ctx) })
	read(&r, &t.Feeds, func() ([]dbsqlc.FeedsRow, error) { return queries.Feeds(ctx) })
	return &t, r.err
}

// needsPersonParams returns the policy's durations after which an entry counts for dlqd_needs_person.
func (s *Sampler) needsPersonParams() dbsqlc.NeedsPersonParams {
	monitoring := s.Policy().Monitoring
	params := dbsqlc.NeedsPersonParams{
		After: monitoring.Defaults.NeedsPersonAfter, Most: int32(cmp.Or(s.Looked, maxLooked)),
	}
	for queue, alert := range monitoring.Queues {
		params.Queues = append(params.Queues, queue)
		params.Afters = append(params.Afters, alert.NeedsPersonAfter)
	}
	return params
}

// reader keeps the first error of several reads and skips all later reads.
type reader struct{ err error }

func read[T any](r *reader, into *T, from func() (T, error)) {
	if r.err == nil {
		*into, r.err = from()
	}
}

func readCapture(ctx context.Context, db postgres.DB) (reconcile.Capture, error) {
	status, err := reconcile.ReadCapture(ctx, db)
	if err != nil {
		return reconcile.Capture{}, err
	}
	return *status, nil
}
