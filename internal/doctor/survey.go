package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
)

const (
	// maxJobs is the maximum number of jobs that are counted, latest first (measured: 0.5 s).
	maxJobs = 200_000
	// maxFailures is the maximum number of discarded jobs that are examined, latest first. The same limit applies to
	// cancelled jobs.
	maxFailures = 10_000
	// topGroups is how many groups of similar failures are listed.
	topGroups = 10
	// timeout bounds each statement. lockTimeout bounds the statement's wait for a lock.
	timeout     = 10 * time.Second
	lockTimeout = 2 * time.Second
	// maxMessage is the maximum number of characters of an error that are shown.
	maxMessage = 100
)

// Survey is the summary of an application's River for "dlqd attach".
type Survey struct {
	Schema   string // River's schema
	Jobs     []Jobs // by queue and kind
	Total    int    // number of the jobs counted in Jobs
	MoreJobs bool   // the limit of counted jobs was reached: older jobs may exist
	Failures Failures
}

// Jobs counts the jobs of a kind in a queue, by state.
type Jobs struct {
	Queue, Kind string
	States      map[string]int
}

// Failures describes the jobs in River's tables that ended as failures and have no dead letter.
type Failures struct {
	Count         int
	SingleAttempt int // jobs among Count that were allowed only one attempt
	Since, Until  time.Time
	More          bool    // older jobs were not examined
	Groups        []Group // groups of similar failures, largest first
}

// Group is a set of similar failures: they have the same queue, kind and fingerprint.
type Group struct {
	Queue, Kind, Fingerprint string
	Count                    int
	Last                     time.Time
	Class                    riverdlq.Class // by the built-in policy
	Strategy                 string         // for new failures of this kind, by the built-in policy
	Message                  string         // of the latest failure
}

// states are River's job states, in the order in which a job passes through them.
var states = []string{
	"available", "pending", "scheduled", "running", "retryable", "completed",
	"cancelled", "discarded",
}

// TakeSurvey surveys the jobs of a River. It only reads, and its queries are bounded in time and rows. It does not
// require an installed dlqd.
func TakeSurvey(ctx context.Context, pool *pgxpool.Pool, schemas postgres.Schemas) (*Survey, error) {
	s := &Survey{Schema: schemas.River}
	for _, query := range []func(context.Context, postgres.DB) error{s.countJobs, s.groupFailures} {
		if err := read(ctx, pool, func(tx pgx.Tx) error { return query(ctx, schemas.Rendered(tx)) }); err != nil {
			return nil, fmt.Errorf("survey River's jobs in schema %s: %w", schemas.River, err)
		}
	}
	return s, nil
}

// read runs a query in a read-only transaction with timeouts.
func read(ctx context.Context, pool *pgxpool.Pool, query func(pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{BeginQuery: postgres.BeginReadOnlyQuery()}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT set_config('statement_timeout', $1::bigint::text, true), "+
			"set_config('lock_timeout', $2::bigint::text, true)",
			timeout.Milliseconds(), lockTimeout.Milliseconds()); err != nil {
			return err
		}
		return query(tx)
	})
}

func (s *Survey) countJobs(ctx context.Context, db postgres.DB) error {
	rows, err := db.Query(ctx, `
		SELECT j.queue, j.kind, j.state::text, count(*)
		FROM (SELECT queue, kind, state FROM river.river_job ORDER BY id DESC LIMIT $1) j
		GROUP BY j.queue, j.kind, j.state ORDER BY j.queue, j.kind`, maxJobs)
	if err != nil {
		return err
	}
	var queue, kind, state string
	var n int
	_, err = pgx.ForEachRow(rows, []any{&queue, &kind, &state, &n}, func() error {
		if last := len(s.Jobs) - 1; last < 0 || s.Jobs[last].Queue != queue || s.Jobs[last].Kind != kind {
			s.Jobs = append(s.Jobs, Jobs{Queue: queue, Kind: kind, States: map[string]int{}})
		}
		s.Jobs[len(s.Jobs)-1].States[state] = n
		s.Total += n
		return nil
	})
	s.MoreJobs = s.Total == maxJobs
	return err
}

// failures selects the jobs that dlq.backfill would record, among the latest $1 discarded and $1 cancelled jobs. The
// caller appends excludeKnown or excludeFiled if dlqd is installed. dlqd's functions may not be installed, so the query
// repeats the definition of a failure (dlq.look_for_failures) and its description (dlq.describe_failure).
const failures = `
	WITH latest AS (
		(SELECT id, created_at, queue, kind, args, state, attempt, max_attempts, finalized_at, errors, metadata
			FROM river.river_job
		 WHERE state = 'discarded' AND finalized_at IS NOT NULL ORDER BY finalized_at DESC LIMIT $1)
		UNION ALL
		(SELECT id, created_at, queue, kind, args, state, attempt, max_attempts, finalized_at, errors, metadata
			FROM river.river_job
		 WHERE state = 'cancelled' AND finalized_at IS NOT NULL ORDER BY finalized_at DESC LIMIT $1)
	), failed AS (
		SELECT id, created_at, queue, kind, args, state, attempt, max_attempts, finalized_at, metadata,
			errors[cardinality(errors)] AS last FROM latest
		WHERE state = 'discarded' AND NOT metadata @> '{"unique_key_conflict": "scheduler_discarded"}'
		   OR state = 'cancelled' AND NOT metadata ? 'cancel_attempted_at' AND cardinality(errors) > 0
	), described AS (
		SELECT id, created_at, queue, kind, args, state, attempt, max_attempts, finalized_at, last,
		       CASE WHEN coalesce(last ->> 'trace', '') = ''
		       	AND metadata #> '{dlq:error,attempt}' = coalesce(last -> 'attempt', to_jsonb(attempt))
		            THEN metadata -> 'dlq:error' END AS reported
		FROM failed
	)
	SELECT d.queue, coalesce(CASE WHEN d.kind = 'dlqd_message' THEN left(d.args ->> 'kind', 255) END, d.kind),
		d.max_attempts = 1, d.finalized_at, d.state::text,
	       left(coalesce(d.reported ->> 'message', regexp_replace(d.last ->> 'error', '^JobCancelError: ', ''), ''),
	       	10000), left(coalesce(d.last ->> 'trace', ''), 32000),
	       coalesce(left(d.reported ->> 'type', 255), ''), coalesce(left(d.reported ->> 'code', 255), ''),
	       	coalesce(left(d.reported ->> 'class', 255), ''),
	       CASE WHEN pg_column_size(d.reported -> 'context') <= 60000 THEN d.reported -> 'context' END
	FROM described d`

// excludeKnown excludes failures that dlqd knows. excludeFiled does so without dlqd's functions. It is used if dlqd's
// tables exist and its functions are missing or older.
const (
	excludeKnown = `
	WHERE (SELECT k.known FROM dlq.known_failure(d.id, d.created_at, dlq.entry_id(d.id, d.finalized_at),
		d.attempt::integer, d.finalized_at) k) IS NULL`
	excludeFiled = ` WHERE NOT EXISTS (SELECT FROM dlq.dead_letter_queue e WHERE e.river_job_id = d.id
		AND e.job_created_at = d.created_at)`
)

// hasOlder reports whether River has more ended jobs than the query failures examines.
const hasOlder = `
	SELECT EXISTS (SELECT FROM river.river_job WHERE state = 'discarded' AND finalized_at IS NOT NULL OFFSET $1)
	    OR EXISTS (SELECT FROM river.river_job WHERE state = 'cancelled' AND finalized_at IS NOT NULL OFFSET $1)`

// failure is a row of the query failures.
type failure struct {
	strategy.Facts

	singleAttempt bool
	at            time.Time
	state, trace  string
}

func (s *Survey) groupFailures(ctx context.Context, db postgres.DB) error {
	builtIn, err := policy.Default("http://127.0.0.1/") // the destination does not affect a class
	if err != nil {
		return err
	}
	planner, err := strategy.NewPlanner(builtIn, nil)
	if err != nil {
		return err
	}
	sql := failures
	var tables, functions bool
	if err := db.QueryRow(ctx, "SELECT to_regclass('dlq.dead_letter_queue') IS NOT NULL, "+
		"to_regprocedure('dlq.known_failure(bigint, timestamptz, uuid, integer, timestamptz)') IS NOT NULL").Scan(&tables,
		&functions); err != nil {
		return err
	}
	switch {
	case functions:
		sql += excludeKnown
	case tables:
		sql += excludeFiled
	}
	rows, err := db.Query(ctx, sql, maxFailures)
	if err != nil {
		return err
	}
	groups := map[[3]string]*Group{}
	var f failure
	var context *json.RawMessage
	_, err = pgx.ForEachRow(rows, []any{
		&f.Queue, &f.Kind, &f.singleAttempt, &f.at, &f.state, &f.Message, &f.trace,
		&f.Type, &f.Code, (*string)(&f.Class), &context,
	}, func() error {
		f.Context = nil
		if context != nil {
			f.Context = *context
		}
		s.Failures.add(&f, groups, planner)
		return nil
	})
	if err != nil {
		return err
	}
	for _, g := range groups {
		s.Failures.Groups = append(s.Failures.Groups, *g)
	}
	slices.SortFunc(s.Failures.Groups, func(a, b Group) int { return cmp.Or(b.Count-a.Count, b.Last.Compare(a.Last)) })
	return db.QueryRow(ctx, hasOlder, maxFailures).Scan(&s.Failures.More)
}

func (all *Failures) add(f *failure, groups map[[3]string]*Group, planner *strategy.Planner) {
	if f.Message == "" {
		f.Message = "job was " + f.state + " without an error"
	}
	if f.Panic = f.trace != ""; f.Panic {
		f.Type = "panic"
	}
	all.Count++
	if f.singleAttempt {
		all.SingleAttempt++
	}
	if all.Since.IsZero() || f.at.Before(all.Since) {
		all.Since = f.at
	}
	if f.at.After(all.Until) {
		all.Until = f.at
	}
	key := [3]string{f.Queue, f.Kind, strategy.Fingerprint(f.Failure(f.trace))}
	g := groups[key]
	if g == nil {
		g = &Group{Queue: f.Queue, Kind: f.Kind, Fingerprint: key[2]}
		groups[key] = g
	}
	g.Count++
	if f.at.After(g.Last) {
		class, _, rule := planner.Classify(f.Facts)
		g.Last, g.Message = f.at, f.Message
		g.Class, g.Strategy = class, planner.Plan(class, f.Queue, f.Kind, rule).Strategy
	}
}
