// Package analytics reports what happens to dead letters over time. It reads rollups of the audit
// trail; no query of it counts entries or moves.
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

// Store reads the rollups.
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

// MovesLastDay counts the moves of the last 24 hours, including moves that are not in the rollups
// yet.
func (s *Store) MovesLastDay(ctx context.Context) (Moves, error) { return s.queries.MovesLastDay(ctx) }

// Window is the period that analytics cover: the time before now, of one queue or of all.
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

// ScanInterval converts an interval of Postgres; a day has 24 hours.
func (s *Seconds) ScanInterval(v pgtype.Interval) error {
	*s = Seconds((time.Duration(v.Microseconds)*time.Microsecond + time.Duration(v.Days)*24*time.Hour).Seconds())
	return nil
}

// Bucket holds the counts of one minute, hour, day or week.
type Bucket struct {
	Start       time.Time `json:"start" doc:"When it begins." db:"bucket"`
	Captured    int64     `json:"captured" doc:"Jobs that became dead letters." db:"captured"`
	Failures    int64     `json:"failures" doc:"Captures, and redeliveries that failed." db:"failures"`
	Redelivered int64     `json:"redelivered" doc:"Redeliveries started." db:"redelivered"`
	Succeeded   int64     `json:"succeeded" doc:"Redeliveries that succeeded." db:"succeeded"`
	Resolved    int64     `json:"resolved" doc:"Entries resolved, by redelivery or by a person." db:"resolved"`
	Failed      int64     `json:"failed" doc:"Entries whose redeliveries are spent." db:"failed"`
	Archived    int64     `json:"archived" doc:"Entries discarded, or aged out." db:"archived"`
	Parked      int64     `json:"parked" doc:"Entries that came to wait for a person." db:"parked"`
	Open        int64     `json:"open" doc:"Open entries at its end." db:"open"`
}

// Series is a sequence of buckets.
type Series struct {
	Name    string   `json:"name" doc:"The queue or the class; \"all\" where it is of all." example:"payment-processing"`
	Buckets []Bucket `json:"buckets" doc:"Oldest first, without gaps."`
}

// Flow returns the buckets of a window, in total ("all") or by "queue" or "class". step is minute,
// hour, day or week; if empty, it is chosen by the length of the window.
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
	Queue          *string  `json:"queue,omitempty" doc:"The queue; absent for all." db:"queue"`
	Open           int64    `json:"open" doc:"Open entries now." db:"open"`
	Pending        int64    `json:"pending" doc:"Of those, in dlq_pending." db:"pending"`
	Processing     int64    `json:"processing" doc:"Of those, in dlq_processing." db:"processing"`
	Manual         int64    `json:"manual" doc:"Of those, in dlq_manual." db:"manual"`
	Captured       int64    `json:"captured" doc:"Jobs that became dead letters." db:"captured"`
	Redelivered    int64    `json:"redelivered" doc:"Redeliveries started." db:"redelivered"`
	Succeeded      int64    `json:"succeeded" doc:"Redeliveries that succeeded." db:"succeeded"`
	Resolved       int64    `json:"resolved" doc:"Entries resolved." db:"resolved"`
	Failed         int64    `json:"failed" doc:"Entries whose redeliveries are spent." db:"failed"`
	Archived       int64    `json:"archived" doc:"Entries discarded, or aged out." db:"archived"`
	Parked         int64    `json:"parked" doc:"Entries that came to wait for a person." db:"parked"`
	ResolutionRate *float64 `json:"resolutionRate,omitempty" doc:"Share of the entries closed that were resolved, 0 to 1; absent where none was closed." db:"resolution_rate"`
	ReplaySuccess  *float64 `json:"replaySuccess,omitempty" doc:"Share of the redeliveries ended that succeeded, 0 to 1; absent where none ended." db:"replay_success"`
}

// Stats returns the figures of each queue, after those of all queues together.
func (s *Store) Stats(ctx context.Context, w Window) ([]QueueStats, error) {
	return query[QueueStats](ctx, s, "dlq.stats($1) WHERE $2::text IS NULL OR queue = $2", w.Over, w.queue())
}

// Times is the distribution of a duration.
type Times struct {
	Queue   *string `json:"queue,omitempty" doc:"The queue; absent for all." db:"queue"`
	Measure string  `json:"measure" enum:"in_dlq,to_recovery" doc:"in_dlq: how long entries were open. to_recovery: how long after its first failure work was done." db:"measure"`
	Entries int64   `json:"entries" doc:"How many entries." db:"entries"`
	Average Seconds `json:"average" doc:"Seconds on average." db:"average"`
	P50     Seconds `json:"p50" doc:"Seconds that half of them took at most; right within 5 %." db:"p50"`
	P95     Seconds `json:"p95" doc:"Seconds that 95 % of them took at most." db:"p95"`
	P99     Seconds `json:"p99" doc:"Seconds that 99 % of them took at most." db:"p99"`
}

// Times returns how long entries were open and how long recovery took, by queue or in total.
func (s *Store) Times(ctx context.Context, w Window, by string) ([]Times, error) {
	return query[Times](ctx, s, "dlq.times($1, $2, $3)", w.Over, by, w.queue())
}

// ErrorType is the frequency of an error type.
type ErrorType struct {
	ErrorType string   `json:"errorType" doc:"The type; empty where the error has none." db:"error_type"`
	Failures  int64    `json:"failures" doc:"Captures and failed redeliveries." db:"failures"`
	Share     *float64 `json:"share,omitempty" doc:"Of all failures, 0 to 1." db:"share"`
}

// ErrorTypes returns the types with the most failures.
func (s *Store) ErrorTypes(ctx context.Context, w Window, most int) ([]ErrorType, error) {
	return query[ErrorType](ctx, s, "dlq.error_types($1, $2, $3)", w.Over, w.queue(), most)
}

// TopGroup is a failure group (see the package group) in a window: entries of a queue that failed
// with the same cause.
type TopGroup struct {
	Queue       string     `json:"queue" doc:"Its queue." db:"queue"`
	Fingerprint string     `json:"fingerprint" doc:"Identifies it, with the queue." db:"fingerprint"`
	Title       *string    `json:"title,omitempty" doc:"What its first error said." db:"title"`
	ErrorType   *string    `json:"errorType,omitempty" doc:"Type of that error." db:"error_type"`
	ErrorClass  *string    `json:"errorClass,omitempty" doc:"Class of its last entry." db:"error_class"`
	InWindow    int64      `json:"inWindow" doc:"Failures in the window." db:"in_window"`
	Trend       []int64    `json:"trend" doc:"Failures in each hour (windows of up to a day), day (up to 35) or week, oldest first." db:"trend"`
	Failures    int64      `json:"failures" doc:"Failures in all." db:"failures"`
	Open        int64      `json:"open" doc:"Open entries now." db:"open"`
	FirstSeen   time.Time  `json:"firstSeen" doc:"When an entry first joined it." db:"first_seen"`
	LastSeen    time.Time  `json:"lastSeen" doc:"When one last did." db:"last_seen"`
	Sample      *uuid.UUID `json:"sample,omitempty" doc:"Its last entry." db:"sample"`
}

// TopGroups returns the failure groups with the most failures.
func (s *Store) TopGroups(ctx context.Context, w Window, most int) ([]TopGroup, error) {
	return query[TopGroup](ctx, s, "dlq.top_groups($1, $2, $3)", w.Over, w.queue(), most)
}

// Cell is one hour of one weekday.
type Cell struct {
	Weekday  int   `json:"weekday" doc:"1 is Monday, 7 Sunday." db:"weekday"`
	Hour     int   `json:"hour" doc:"0 to 23." db:"hour"`
	Failures int64 `json:"failures" doc:"Captures and failed redeliveries." db:"failures"`
}

// HeatMap returns the failures by weekday and hour in a time zone, in 168 cells.
func (s *Store) HeatMap(ctx context.Context, w Window, zone string) ([]Cell, error) {
	return query[Cell](ctx, s, "dlq.heat_map($1, $2, $3)", w.Over, zone, w.queue())
}

// ReplaySuccess counts the outcomes of redeliveries of one class and queue.
type ReplaySuccess struct {
	Queue       string   `json:"queue" doc:"The queue." db:"queue"`
	ErrorClass  string   `json:"errorClass" doc:"The class that the entries had when they were sent." db:"error_class"`
	Redelivered int64    `json:"redelivered" doc:"Started." db:"redelivered"`
	Succeeded   int64    `json:"succeeded" doc:"Succeeded." db:"succeeded"`
	Failed      int64    `json:"failed" doc:"Failed." db:"failed"`
	Success     *float64 `json:"success,omitempty" doc:"Share of those ended that succeeded, 0 to 1." db:"success"`
}

// ReplaySuccess returns the outcomes of redeliveries by queue and class.
func (s *Store) ReplaySuccess(ctx context.Context, w Window) ([]ReplaySuccess, error) {
	return query[ReplaySuccess](ctx, s, "dlq.replay_success($1) WHERE $2::text IS NULL OR queue = $2", w.Over, w.queue())
}

// Oldest is an entry that has been open for long.
type Oldest struct {
	ID         uuid.UUID `json:"id" doc:"The entry." db:"id"`
	Age        Seconds   `json:"age" doc:"Seconds since its capture." db:"age"`
	Status     string    `json:"status" doc:"Where it stands." db:"status"`
	Queue      string    `json:"queue" doc:"Its queue." db:"queue"`
	Kind       string    `json:"kind" doc:"Its kind." db:"kind"`
	ErrorClass *string   `json:"errorClass,omitempty" doc:"Its class." db:"error_class"`
	ErrorType  *string   `json:"errorType,omitempty" doc:"Type of its error." db:"error_type"`
	AssignedTo *string   `json:"assignedTo,omitempty" doc:"Who looks after it." db:"assigned_to"`
}

// Oldest returns the entries that have been open longest.
func (s *Store) Oldest(ctx context.Context, most int) ([]Oldest, error) {
	return query[Oldest](ctx, s, "dlq.oldest_entries($1)", most)
}

// Source is a sender of messages that failed.
type Source struct {
	Source   string   `json:"source" doc:"Who sent them." db:"source"`
	Captured int64    `json:"captured" doc:"How many became dead letters." db:"captured"`
	Share    *float64 `json:"share,omitempty" doc:"Of those that name a source, 0 to 1." db:"share"`
}

// NoisiestSources returns the sources with the most captures.
func (s *Store) NoisiestSources(ctx context.Context, w Window, most int) ([]Source, error) {
	return query[Source](ctx, s, "dlq.noisiest_sources($1, $2)", w.Over, most)
}

// RetryCost is the cost of retries in a queue.
type RetryCost struct {
	Queue              string   `json:"queue" doc:"The queue." db:"queue"`
	Captured           int64    `json:"captured" doc:"Jobs that became dead letters." db:"captured"`
	Attempts           int64    `json:"attempts" doc:"Attempts that they had made." db:"attempts"`
	Redelivered        int64    `json:"redelivered" doc:"Redeliveries started." db:"redelivered"`
	Succeeded          int64    `json:"succeeded" doc:"Redeliveries that succeeded." db:"succeeded"`
	Resolved           int64    `json:"resolved" doc:"Entries resolved." db:"resolved"`
	AttemptsPerCapture *float64 `json:"attemptsPerCapture,omitempty" doc:"Attempts for each capture." db:"attempts_per_capture"`
	Wasted             *float64 `json:"wasted,omitempty" doc:"Share of attempts and redeliveries that failed, 0 to 1." db:"wasted"`
}

// RetryCost returns the cost of retries by queue, highest first.
func (s *Store) RetryCost(ctx context.Context, w Window) ([]RetryCost, error) {
	return query[RetryCost](ctx, s, "dlq.retry_cost($1) WHERE $2::text IS NULL OR queue = $2", w.Over, w.queue())
}

// PolicyChange is the activation of another version of the policy.
type PolicyChange struct {
	At      time.Time `json:"at" doc:"When the first process had it in force." db:"at"`
	Version string    `json:"version" doc:"The Git commit of its files (-dirty-…: they were changed since), or a hash of what it says." db:"version"`
}

// PolicyChanges returns the policies that became active in a window, latest first.
func (s *Store) PolicyChanges(ctx context.Context, w Window) ([]PolicyChange, error) {
	return query[PolicyChange](ctx, s, "dlq.policy_changes($1)", w.Over)
}

// RuleCount is the number of dead letters that a rule classified.
type RuleCount struct {
	Rule    string `json:"rule" doc:"The rule." db:"rule"`
	Entries int64  `json:"entries" doc:"How many it judged last." db:"entries"`
	More    bool   `json:"more,omitempty" doc:"More came in the window than are looked at: these are of the newest 5,000, of all queues together." db:"more"`
}

// ByRule counts the newest dead letters of a window by the rule that classified them last.
func (s *Store) ByRule(ctx context.Context, w Window) ([]RuleCount, error) {
	return query[RuleCount](ctx, s, "dlq.by_rule($1)", w.Over)
}

// query reads the rows of one of dlqd's functions. Its columns must match the fields of T exactly.
func query[T any](ctx context.Context, s *Store, from string, args ...any) ([]T, error) {
	rows, err := s.db.Query(ctx, "SELECT * FROM "+from, args...) //nolint:unqueryvet // see above
	if err != nil {
		return nil, deadletter.AsMoveError(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[T])
	return got, deadletter.AsMoveError(err)
}
