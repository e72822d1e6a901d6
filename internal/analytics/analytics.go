// Package analytics reports what happens to dead letters over time. It reads rollups of the audit trail, so that a
// report need not count all entries or moves. Some reports read more: [Store.MovesLastDay] counts moves that are not in
// the rollups yet, [Store.ByRule] counts recent entries, [Store.Oldest] reads the oldest open entries, and
// [Store.PolicyChanges] reads the audit trail.
package analytics

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/analytics/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Store reads, refreshes and trims the rollups.
type Store struct {
	pool    *pgxpool.Pool
	schemas postgres.Schemas
	db      postgres.DB
	queries *dbsqlc.Queries
}

// NewStore returns a store that uses pool.
func NewStore(pool *pgxpool.Pool, schemas postgres.Schemas) *Store {
	db := schemas.Rendered(pool)
	return &Store{pool: pool, schemas: schemas, db: db, queries: dbsqlc.New(db)}
}

// AsOf returns when the rollups were last refreshed.
func (s *Store) AsOf(ctx context.Context) (time.Time, error) { return s.queries.AsOf(ctx) }

// Moves holds counts of moves.
type Moves = dbsqlc.MovesLastDayRow

// MovesLastDay counts the moves of the last 24 hours, including those that are not in the rollups yet.
func (s *Store) MovesLastDay(ctx context.Context) (Moves, error) { return s.queries.MovesLastDay(ctx) }

// Window selects the data of a report: the length of time before now, and one queue or all queues.
type Window struct {
	Over  time.Duration
	Queue string // all if empty
}

func (w Window) queue() *string {
	if w.Queue == "" {
		return nil
	}
	return &w.Queue
}

// Seconds is a duration in seconds.
type Seconds float64

// ScanInterval converts an interval of Postgres. A day counts as 24 hours.
func (s *Seconds) ScanInterval(v pgtype.Interval) error {
	*s = Seconds((time.Duration(v.Microseconds)*time.Microsecond + time.Duration(v.Days)*24*time.Hour).Seconds())
	return nil
}

// Bucket holds the counts of one minute, hour, day or week.
type Bucket struct {
	Start       time.Time `json:"start" doc:"Start of the bucket." db:"bucket"`
	Captured    int64     `json:"captured" doc:"Number of jobs that became dead letters." db:"captured"`
	Failures    int64     `json:"failures" doc:"Number of failures: captures and failed redeliveries." db:"failures"`
	Redelivered int64     `json:"redelivered" doc:"Number of redeliveries started." db:"redelivered"`
	Succeeded   int64     `json:"succeeded" doc:"Number of redeliveries that succeeded." db:"succeeded"`
	Resolved    int64     `json:"resolved" doc:"Number of entries resolved by a redelivery or an operator." db:"resolved"`
	Failed      int64     `json:"failed" doc:"Number of entries that used up their redeliveries." db:"failed"`
	Archived    int64     `json:"archived" doc:"Number of entries that were discarded or archived by retention." db:"archived"`
	Parked      int64     `json:"parked" doc:"Number of entries that moved to manual." db:"parked"`
	Open        int64     `json:"open" doc:"Number of open entries at the end of the bucket." db:"open"`
}

// Series is a sequence of buckets.
type Series struct {
	Name    string   `json:"name" doc:"Queue or class; \"all\" for the total." example:"payment-processing"`
	Buckets []Bucket `json:"buckets" doc:"Buckets without gaps, oldest first."`
}

// Flow returns the buckets of a window. by is "all" for the total, "queue" or "class". step is minute, hour, day or
// week; if it is empty, it depends on the length of the window.
func (s *Store) Flow(ctx context.Context, w Window, by, step string) ([]Series, error) {
	type row struct {
		Bucket

		Name string `db:"name"`
	}
	var steps *string
	if step != "" {
		steps = &step
	}
	rows, err := query[row](ctx, s, "dlq.flow($1, $2, $3, $4::text::dlq.rollup_step)", w.Over, by, w.queue(), steps)
	series := []Series{}
	for _, r := range rows {
		if n := len(series); n == 0 || series[n-1].Name != r.Name {
			series = append(series, Series{Name: r.Name})
		}
		last := &series[len(series)-1]
		last.Buckets = append(last.Buckets, r.Bucket)
	}
	return series, err
}

// QueueStats is the current state of a queue, and its counts over a window.
type QueueStats struct {
	Queue          *string  `json:"queue,omitempty" doc:"Queue; absent for the total." db:"queue"`
	Open           int64    `json:"open" doc:"Number of open entries now." db:"open"`
	Pending        int64    `json:"pending" doc:"Number of open entries in dlq_pending." db:"pending"`
	Processing     int64    `json:"processing" doc:"Number of open entries in dlq_processing." db:"processing"`
	Manual         int64    `json:"manual" doc:"Number of open entries in dlq_manual." db:"manual"`
	Captured       int64    `json:"captured" doc:"Number of jobs that became dead letters." db:"captured"`
	Redelivered    int64    `json:"redelivered" doc:"Number of redeliveries started." db:"redelivered"`
	Succeeded      int64    `json:"succeeded" doc:"Number of redeliveries that succeeded." db:"succeeded"`
	Resolved       int64    `json:"resolved" doc:"Number of entries resolved." db:"resolved"`
	Failed         int64    `json:"failed" doc:"Number of entries that used up their redeliveries." db:"failed"`
	Archived       int64    `json:"archived" doc:"Number of entries that were discarded or archived by retention." db:"archived"`
	Parked         int64    `json:"parked" doc:"Number of entries that moved to manual." db:"parked"`
	ResolutionRate *float64 `json:"resolutionRate,omitempty" doc:"Share of closed entries that were resolved, 0 to 1; absent if none was closed." db:"resolution_rate"`
	ReplaySuccess  *float64 `json:"replaySuccess,omitempty" doc:"Share of ended redeliveries that succeeded, 0 to 1; absent if none ended." db:"replay_success"`
}

// Stats returns first the figures of all queues together, and then those of each queue.
func (s *Store) Stats(ctx context.Context, w Window) ([]QueueStats, error) {
	return query[QueueStats](ctx, s, "dlq.stats($1) WHERE $2::text IS NULL OR queue = $2", w.Over, w.queue())
}

// Times is the distribution of a duration.
type Times struct {
	Queue   *string `json:"queue,omitempty" doc:"Queue; absent for the total." db:"queue"`
	Measure string  `json:"measure" enum:"in_dlq,to_recovery" doc:"in_dlq: time from capture until an entry was closed. to_recovery: time from the first failure until the work was done." db:"measure"`
	Entries int64   `json:"entries" doc:"Number of entries." db:"entries"`
	Average Seconds `json:"average" doc:"Average in seconds." db:"average"`
	P50     Seconds `json:"p50" doc:"Median in seconds, within 5 %." db:"p50"`
	P95     Seconds `json:"p95" doc:"95th percentile in seconds, within 5 %." db:"p95"`
	P99     Seconds `json:"p99" doc:"99th percentile in seconds, within 5 %." db:"p99"`
}

// Times returns how long entries were open and how long recovery took, by queue or in total.
func (s *Store) Times(ctx context.Context, w Window, by string) ([]Times, error) {
	return query[Times](ctx, s, "dlq.times($1, $2, $3)", w.Over, by, w.queue())
}

// ErrorType is the number of failures with an error type.
type ErrorType struct {
	ErrorType string   `json:"errorType" doc:"Error type; empty for errors without a type." db:"error_type"`
	Failures  int64    `json:"failures" doc:"Number of failures: captures and failed redeliveries." db:"failures"`
	Share     *float64 `json:"share,omitempty" doc:"Share of all failures, 0 to 1." db:"share"`
}

// ErrorTypes returns the types with the most failures.
func (s *Store) ErrorTypes(ctx context.Context, w Window, most int) ([]ErrorType, error) {
	return query[ErrorType](ctx, s, "dlq.error_types($1, $2, $3)", w.Over, w.queue(), most)
}

// TopGroup is a failure group (see package group) in a window: the entries of a queue that failed for the same reason.
type TopGroup struct {
	Queue       string     `json:"queue" doc:"Queue." db:"queue"`
	Fingerprint string     `json:"fingerprint" doc:"Fingerprint, which identifies the group within the queue." db:"fingerprint"`
	Title       *string    `json:"title,omitempty" doc:"Title, from the first error." db:"title"`
	ErrorType   *string    `json:"errorType,omitempty" doc:"Type of the first error." db:"error_type"`
	ErrorClass  *string    `json:"errorClass,omitempty" doc:"Class of the latest entry." db:"error_class"`
	InWindow    int64      `json:"inWindow" doc:"Number of failures in the window." db:"in_window"`
	Trend       []int64    `json:"trend" doc:"Number of failures per minute (windows up to an hour), five minutes (up to six hours), hour (up to a day), day (up to 35 days) or week, oldest first." db:"trend"`
	Failures    int64      `json:"failures" doc:"Total number of failures." db:"failures"`
	Open        int64      `json:"open" doc:"Number of open entries now." db:"open"`
	FirstSeen   time.Time  `json:"firstSeen" doc:"Time of the first failure." db:"first_seen"`
	LastSeen    time.Time  `json:"lastSeen" doc:"Time of the latest failure." db:"last_seen"`
	Sample      *uuid.UUID `json:"sample,omitempty" doc:"Id of the latest entry." db:"sample"`
}

// TopGroups returns the failure groups with the most failures.
func (s *Store) TopGroups(ctx context.Context, w Window, most int) ([]TopGroup, error) {
	return query[TopGroup](ctx, s, "dlq.top_groups($1, $2, $3)", w.Over, w.queue(), most)
}

// Cell has the failures of one hour of one weekday.
type Cell struct {
	Weekday  int   `json:"weekday" doc:"Weekday, from 1 (Monday) to 7 (Sunday)." db:"weekday"`
	Hour     int   `json:"hour" doc:"Hour, 0 to 23." db:"hour"`
	Failures int64 `json:"failures" doc:"Number of failures: captures and failed redeliveries." db:"failures"`
}

// HeatMap returns the failures by weekday and hour in a time zone, in 168 cells.
func (s *Store) HeatMap(ctx context.Context, w Window, zone string) ([]Cell, error) {
	return query[Cell](ctx, s, "dlq.heat_map($1, $2, $3)", w.Over, zone, w.queue())
}

// ReplaySuccess counts the outcomes of redeliveries of one class and queue.
type ReplaySuccess struct {
	Queue       string   `json:"queue" doc:"Queue." db:"queue"`
	ErrorClass  string   `json:"errorClass" doc:"Class of the entries when they were redelivered." db:"error_class"`
	Redelivered int64    `json:"redelivered" doc:"Number of redeliveries started." db:"redelivered"`
	Succeeded   int64    `json:"succeeded" doc:"Number of redeliveries that succeeded." db:"succeeded"`
	Failed      int64    `json:"failed" doc:"Number of redeliveries that failed." db:"failed"`
	Success     *float64 `json:"success,omitempty" doc:"Share of ended redeliveries that succeeded, 0 to 1." db:"success"`
}

// ReplaySuccess returns the outcomes of redeliveries by queue and class.
func (s *Store) ReplaySuccess(ctx context.Context, w Window) ([]ReplaySuccess, error) {
	return query[ReplaySuccess](ctx, s, "dlq.replay_success($1) WHERE $2::text IS NULL OR queue = $2", w.Over, w.queue())
}

// Oldest is an entry that has been open for long.
type Oldest struct {
	ID         uuid.UUID `json:"id" doc:"Id of the entry." db:"id"`
	Age        Seconds   `json:"age" doc:"Time since capture, in seconds." db:"age"`
	Status     string    `json:"status" doc:"State of the entry." db:"status"`
	Queue      string    `json:"queue" doc:"Queue." db:"queue"`
	Kind       string    `json:"kind" doc:"Kind." db:"kind"`
	ErrorClass *string   `json:"errorClass,omitempty" doc:"Class of the error." db:"error_class"`
	ErrorType  *string   `json:"errorType,omitempty" doc:"Type of the error." db:"error_type"`
	AssignedTo *string   `json:"assignedTo,omitempty" doc:"Assignee." db:"assigned_to"`
}

// Oldest returns the entries that have been open for the longest time, at most most.
func (s *Store) Oldest(ctx context.Context, most int) ([]Oldest, error) {
	return query[Oldest](ctx, s, "dlq.oldest_entries($1)", most)
}

// Source is a sender of messages that failed.
type Source struct {
	Source   string   `json:"source" doc:"Sender of the messages." db:"source"`
	Captured int64    `json:"captured" doc:"Number of messages that became dead letters." db:"captured"`
	Share    *float64 `json:"share,omitempty" doc:"Share of the captures with a source, 0 to 1." db:"share"`
}

// NoisiestSources returns the sources with the most captures.
func (s *Store) NoisiestSources(ctx context.Context, w Window, most int) ([]Source, error) {
	return query[Source](ctx, s, "dlq.noisiest_sources($1, $2)", w.Over, most)
}

// RetryCost is the cost of retries in a queue.
type RetryCost struct {
	Queue              string   `json:"queue" doc:"Queue." db:"queue"`
	Captured           int64    `json:"captured" doc:"Number of jobs that became dead letters." db:"captured"`
	Attempts           int64    `json:"attempts" doc:"Number of attempts of these jobs before they failed." db:"attempts"`
	Redelivered        int64    `json:"redelivered" doc:"Number of redeliveries started." db:"redelivered"`
	Succeeded          int64    `json:"succeeded" doc:"Number of redeliveries that succeeded." db:"succeeded"`
	Resolved           int64    `json:"resolved" doc:"Number of entries resolved." db:"resolved"`
	AttemptsPerCapture *float64 `json:"attemptsPerCapture,omitempty" doc:"Attempts per capture." db:"attempts_per_capture"`
	Wasted             *float64 `json:"wasted,omitempty" doc:"Share of attempts and redeliveries that failed, 0 to 1." db:"wasted"`
}

// RetryCost returns the cost of retries by queue, highest first.
func (s *Store) RetryCost(ctx context.Context, w Window) ([]RetryCost, error) {
	return query[RetryCost](ctx, s, "dlq.retry_cost($1) WHERE $2::text IS NULL OR queue = $2", w.Over, w.queue())
}

// PolicyChange records that another version of the policy came into force.
type PolicyChange struct {
	At      time.Time `json:"at" doc:"Time at which the first process activated the version." db:"at"`
	Version string    `json:"version" doc:"Git commit of the policy files (with -dirty-… if they have uncommitted changes), or a hash of their content." db:"version"`
}

// PolicyChanges returns the policies that became active in a window, latest first.
func (s *Store) PolicyChanges(ctx context.Context, w Window) ([]PolicyChange, error) {
	return query[PolicyChange](ctx, s, "dlq.policy_changes($1)", w.Over)
}

// RuleCount is the number of dead letters that a rule classified.
type RuleCount struct {
	Rule    string `json:"rule" doc:"Name of the rule." db:"rule"`
	Entries int64  `json:"entries" doc:"Number of entries that the rule classified last." db:"entries"`
	More    bool   `json:"more,omitempty" doc:"Whether the window has more entries than the newest 5,000 of all queues, which are counted." db:"more"`
}

// ByRule counts the newest dead letters of a window by the rule that classified them last.
func (s *Store) ByRule(ctx context.Context, w Window) ([]RuleCount, error) {
	return query[RuleCount](ctx, s, "dlq.by_rule($1)", w.Over)
}

// query reads the rows of one of dlqd's functions.
func query[T any](ctx context.Context, s *Store, from string, args ...any) ([]T, error) {
	rows, err := s.db.Query(ctx, "SELECT "+postgres.ColumnsOf[T]()+" FROM "+from, args...)
	if err != nil {
		return nil, deadletter.AsMoveError(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[T])
	return got, deadletter.AsMoveError(err)
}
