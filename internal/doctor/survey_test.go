package doctor_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

type bundle struct {
	*testing.T

	pool *pgxpool.Pool
}

// setup creates a database with an application's River, without dlqd.
func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{T: t, pool: postgrestest.Open(t, postgrestest.Empty(t))}
	postgrestest.MigrateRiver(t, b.pool, "", 0)
	return b
}

func (b *bundle) exec(sql string) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql)
	require.NoError(b, err)
}

func (b *bundle) survey() *doctor.Survey {
	b.Helper()
	s, err := doctor.TakeSurvey(b.Context(), b.pool, postgres.DefaultSchemas())
	require.NoError(b, err)
	return s
}

func (b *bundle) migrator() *postgres.Migrator {
	return &postgres.Migrator{Pool: b.pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
}

// insertFailures inserts jobs that ended in every possible way, and jobs that have not ended.
func (b *bundle) insertFailures() {
	b.Helper()
	b.exec(`INSERT INTO river_job (queue, kind, args, attempt, max_attempts, state, finalized_at, errors, metadata)
		SELECT 'mailers', 'send_email', '{}', 3, 3, 'discarded', timestamptz '2026-11-14 03:10Z' + n * interval '1 hour',
			ARRAY['{"attempt": 2, "error": "other"}',
				jsonb_build_object('attempt', 3, 'error', 'dial tcp 10.0.0.' || n || ':25: connection refused')], '{}'
					FROM generate_series(1, 5) n`)
	b.exec(`INSERT INTO river_job (queue, kind, args, attempt, max_attempts, state, finalized_at, errors, metadata) VALUES
		('default', 'charge', '{}', 1, 1, 'discarded', '2026-11-14 03:05Z',
			ARRAY['{"attempt": 1, "error": "boom", "trace": "goroutine 1 [running]:\nmain.charge(0x1)\n"}'::jsonb], '{}'),
		('default', 'charge', '{}', 1, 9, 'cancelled', '2026-11-14 09:00Z',
			ARRAY['{"attempt": 1, "error": "JobCancelError: card declined"}'::jsonb], '{}'),
		('default', 'charge', '{}', 2, 9, 'cancelled', '2026-11-14 09:05Z', ARRAY['{"attempt": 2, "error": "x"}'::jsonb],
			'{"dlq:error": {"attempt": 2, "type": "HTTP_429", "code": "429", "message": "slow \u001b[31mdown\nplease", "context": {"status": 429}}}'),
		('default', 'charge', '{}', 0, 9, 'cancelled', '2026-11-15 09:00Z', NULL, '{"cancel_attempted_at": "x"}'),
		('default', 'charge', '{}', 0, 9, 'discarded', '2026-11-15 09:00Z', NULL,
			'{"unique_key_conflict": "scheduler_discarded"}'),
		('default', 'charge', '{}', 1, 9, 'completed', '2026-11-15 09:00Z', NULL, '{}'),
		('default', 'charge', '{}', 0, 9, 'available', NULL, NULL, '{}'),
		('odd', 'odd', '{}', 1, 9, 'discarded', '2026-11-15 09:00Z', ARRAY['7'::jsonb], '{"dlq:error": "no object"}'),
		('odd', 'odd', '{}', 1, 9, 'discarded', '2026-11-15 09:00Z', NULL, '[]')`)
}

// The survey finds the same failures as a backfill, with the classes that dlqd then gives them.
func TestSurvey_FindsFailuresThatBackfillFiles(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.insertFailures()
	s := b.survey()
	require.Equal(t, 14, s.Total)
	require.Equal(t, []doctor.Jobs{
		{Queue: "default", Kind: "charge", States: map[string]int{
			"discarded": 2, "cancelled": 3, "completed": 1, "available": 1,
		}},
		{Queue: "mailers", Kind: "send_email", States: map[string]int{"discarded": 5}},
		{Queue: "odd", Kind: "odd", States: map[string]int{"discarded": 2}},
	}, s.Jobs)
	require.Equal(t, 10, s.Failures.Count)
	require.Equal(t, 1, s.Failures.SingleAttempt)
	require.False(t, s.Failures.More)
	require.Equal(t, "send_email transient 5", fmt.Sprint(s.Failures.Groups[0].Kind, " ", s.Failures.Groups[0].Class, " ",
		s.Failures.Groups[0].Count))
	require.Equal(t, "dial tcp 10.0.0.5:25: connection refused", s.Failures.Groups[0].Message)
	classes := map[string]string{}
	for _, g := range s.Failures.Groups {
		classes[g.Message] = string(g.Class) + " " + g.Strategy
	}
	require.Equal(t, "code_bug manual", classes["boom"])
	require.Equal(t, "business manual", classes["card declined"])
	require.Equal(t, "rate_limited scheduled", classes["slow \x1b[31mdown\nplease"])

	require.NoError(t, b.migrator().Attach(t.Context()))
	require.Equal(t, s, b.survey(), "the same with dlqd installed")
	n, err := b.migrator().Backfill(t.Context(), func(int) {})
	require.NoError(t, err)
	require.Equal(t, s.Failures.Count, n)
	require.Empty(t, b.survey().Failures, "all have dead letters")
}

func TestSurvey_PrintsTables(t *testing.T) {
	t.Parallel()
	b := setup(t)
	printed := func(p func(*bytes.Buffer) error) string {
		var out bytes.Buffer
		require.NoError(t, p(&out))
		return out.String()
	}
	require.Equal(t, "River in schema public has no jobs\n",
		printed(func(out *bytes.Buffer) error { return b.survey().Print(out) }))
	b.insertFailures()
	s := b.survey()
	require.Equal(t, `River in schema public has 14 jobs:
  QUEUE    KIND        AVAILABLE  COMPLETED  CANCELLED  DISCARDED
  default  charge      1          1          3          2
  mailers  send_email  0          0          0          5
  odd      odd         0          0          0          2
10 failures without a dead letter, from 2026-11-14 03:05 UTC to 2026-11-15 09:00 UTC; 1 of them had one attempt. Groups of similar failures:
  JOBS  QUEUE    KIND        CLASS         STRATEGY   LAST                  ERROR
  5     mailers  send_email  transient     immediate  2026-11-14 08:10 UTC  dial tcp 10.0.0.5:25: connection refused
  2     odd      odd         unknown       manual     2026-11-15 09:00 UTC  job was discarded without an error
  1     default  charge      rate_limited  scheduled  2026-11-14 09:05 UTC  slow  [31mdown
  1     default  charge      business      manual     2026-11-14 09:00 UTC  card declined
  1     default  charge      code_bug      manual     2026-11-14 03:05 UTC  boom
`, printed(func(out *bytes.Buffer) error { return s.Print(out) }))

	for range 20 {
		s.Failures.Groups = append(s.Failures.Groups, doctor.Group{Count: 1, Message: strings.Repeat("x", 500)})
		s.Jobs = append(s.Jobs, doctor.Jobs{Queue: "default", Kind: "more"}, doctor.Jobs{Queue: "default", Kind: "more"})
	}
	s.Failures.Count, s.Failures.More, s.MoreJobs = 30, true, true
	long := printed(func(out *bytes.Buffer) error { return s.Print(out) })
	require.Contains(t, long, "has more than 14 jobs. The latest:")
	require.Contains(t, long, "  and 13 more kinds\n")
	require.Contains(t, long, "the latest 30 failures without a dead letter")
	require.Contains(t, long, "  and 15 in 15 smaller groups\n")
	require.Less(t, len(slices.MaxFunc(strings.Split(long, "\n"), func(a, b string) int { return len(a) - len(b) })), 200)
}

func TestNext_PrintsNextSteps(t *testing.T) {
	t.Parallel()
	printed := func(n doctor.Next) string {
		var out bytes.Buffer
		require.NoError(t, n.Print(&out))
		return out.String()
	}
	found := &doctor.Survey{Failures: doctor.Failures{Count: 10}}
	observed := printed(doctor.Next{
		Schemas: postgres.Schemas{DLQ: "letters", River: "jobs"}, Observes: true, Found: found,
	})
	for _, want := range []string{
		"Capture is on: each job that fails from now on", "dlqd observes",
		`"dlqd automatic on"`, "Not filed: 10 failures among River's jobs.",
		`"dlqd attach --schema letters --river-schema jobs --backfill"`,
		"dlqd serve --dlq-workers --api --schema letters --river-schema jobs\n",
	} {
		require.Contains(t, observed, want)
	}
	one := 1
	own := printed(doctor.Next{Schemas: postgres.DefaultSchemas(), Found: found, Backfilled: &one})
	require.Contains(t, own, "Filed: 1 failure from River's jobs. They need manual handling")
	require.NotContains(t, own, "observes")
	require.Contains(t, own, "dlqd serve --dlq-workers --api\n")
	require.Contains(t, printed(doctor.Next{Schemas: postgres.DefaultSchemas()}),
		"Not filed: failures among River's jobs. ")
	require.NotContains(t, printed(doctor.Next{Schemas: postgres.DefaultSchemas(), Found: &doctor.Survey{}}), "iled: ")
}

// The survey waits only briefly for a lock, so it does not delay a migration of the application.
func TestSurvey_WaitsOnlyBrieflyForALock(t *testing.T) {
	t.Parallel()
	b := setup(t)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE river_job IN ACCESS EXCLUSIVE MODE")
	require.NoError(t, err)
	_, err = doctor.TakeSurvey(t.Context(), b.pool, postgres.DefaultSchemas())
	require.ErrorContains(t, err, "survey River's jobs in schema public")
	require.ErrorContains(t, err, "lock timeout")
}
