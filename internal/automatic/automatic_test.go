package automatic_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/automatic/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// operatorSwitch is a switch that an operator sets with dlq.set_automatic.
type operatorSwitch struct {
	scope, name string
	enabled     bool
	include     []string
}

var (
	job          = automatic.Entry{Queue: "mails", Kind: "report.daily", Class: "transient", JobKind: "report.daily"}
	messageEntry = automatic.Entry{Queue: "mails", Kind: "report.daily", Class: "transient", JobKind: message.JobKind}
)

func with(e automatic.Entry, change func(*automatic.Entry)) automatic.Entry {
	change(&e)
	return e
}

// This is the table of decisions. Go, which workers use, and SQL, which operators see, must make the same decision for
// each row.
func TestSwitches(t *testing.T) {
	t.Parallel()
	single := with(job, func(e *automatic.Entry) { e.SingleAttempt = true })
	old := with(job, func(e *automatic.Entry) { e.Backfilled = true })
	both := with(old, func(e *automatic.Entry) { e.SingleAttempt = true })
	pool := postgrestest.Pool(t)
	for _, test := range []struct {
		name       string
		attached   bool
		policy     string
		sets       []operatorSwitch
		stopped    bool
		entry      automatic.Entry
		on         bool
		manualRule string
	}{
		{name: "River of dlqd", entry: job, on: true},
		{name: "attached River", attached: true, entry: job},
		{name: "message on an attached River", attached: true, entry: messageEntry, on: true},
		{name: "switched on for all", attached: true, sets: []operatorSwitch{{"all", "", true, nil}}, entry: job, on: true},
		{name: "for its queue", attached: true, sets: []operatorSwitch{{"queue", "mails", true, nil}}, entry: job, on: true},
		{name: "for another queue", attached: true, sets: []operatorSwitch{{"queue", "mail", true, nil}}, entry: job},
		{name: "for its kind", attached: true, sets: []operatorSwitch{{"kind", "report.*", true, nil}}, entry: job, on: true},
		{name: "for another kind", attached: true, sets: []operatorSwitch{{"kind", "report_*", true, nil}}, entry: job},
		{
			name: "for its class", attached: true, sets: []operatorSwitch{{"class", "transient", true, nil}},
			entry: job, on: true,
		},
		{name: "off wins", attached: true, sets: []operatorSwitch{
			{"queue", "mails", true, nil},
			{"class", "transient", false, nil},
		}, entry: job},
		{
			name: "off wins over all", sets: []operatorSwitch{{"all", "", true, nil}, {"kind", "*daily", false, nil}},
			entry: job,
		},
		{name: "off for all, on for its queue", sets: []operatorSwitch{
			{"all", "", false, nil},
			{"queue", "mails", true, nil},
		}, entry: job, on: true},
		{name: "off for all, by an operator", sets: []operatorSwitch{{"all", "", false, nil}}, entry: messageEntry},
		{
			name: "off for its queue", attached: true, sets: []operatorSwitch{{"queue", "mails", false, nil}},
			entry: messageEntry,
		},
		{name: "by policy", attached: true, policy: "queues: {mails: {enabled: true}}", entry: job, on: true},
		{
			name: "an operator's switch overrides the policy", attached: true, policy: "queues: {mails: {enabled: true}}",
			sets: []operatorSwitch{{"queue", "mails", false, nil}}, entry: job,
		},
		{
			name: "on by policy, a class off by an operator", policy: "all: {enabled: true}",
			sets: []operatorSwitch{{"class", "transient", false, nil}}, entry: job,
		},
		{name: "policy off", policy: "all: {enabled: false}", entry: messageEntry},
		{name: "stopped", sets: []operatorSwitch{{"queue", "mails", true, nil}}, stopped: true, entry: job},
		{name: "stopped, message", stopped: true, entry: messageEntry},
		{name: "one attempt", entry: single, on: true, manualRule: "single-attempt"},
		{
			name: "one attempt, included", sets: []operatorSwitch{{"all", "", true, []string{"single-attempt"}}},
			entry: single, on: true,
		},
		{
			name:  "one attempt, included for another queue",
			sets:  []operatorSwitch{{"queue", "mail", true, []string{"single-attempt"}}},
			entry: single, on: true, manualRule: "single-attempt",
		},
		{
			name: "one attempt, backfilled is included", policy: "all: {enabled: true, include: [backfilled]}", entry: single,
			on: true, manualRule: "single-attempt",
		},
		{
			name: "one attempt, unparked by an operator", entry: with(single, func(e *automatic.Entry) { e.Unparked = true }),
			on: true,
		},
		{
			name: "one attempt of a message", entry: with(messageEntry, func(e *automatic.Entry) { e.SingleAttempt = true }),
			on: true,
		},
		{name: "backfilled", attached: true, entry: old, manualRule: "backfilled"},
		{name: "backfilled, included by policy", attached: true, policy: "kinds: {'report.*': {enabled: true, include: " +
			"[backfilled]}}", entry: old, on: true},
		{
			name: "both, one is included", sets: []operatorSwitch{{"kind", "report.*", true, []string{"backfilled"}}},
			entry: both, on: true, manualRule: "single-attempt",
		},
		{
			name: "both are included, by two switches", policy: "all: {enabled: true, include: [backfilled]}",
			sets: []operatorSwitch{{"queue", "mails", true, []string{"single-attempt"}}}, entry: both, on: true,
		},
		{
			name: "included, and off by another switch", policy: "all: {enabled: true, include: [backfilled]}",
			sets: []operatorSwitch{{"queue", "mails", false, nil}}, entry: old,
		},
	} {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		// Without this rollback, closing the pool would wait for tx if the test fails.
		t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) })
		db := postgres.DefaultSchemas().Rendered(tx)
		q := dbsqlc.New(db)
		files := policytest.Files{}
		if test.policy != "" {
			files["dlq-routing"] = "automatic: {" + test.policy + "}\n"
		}
		p := policytest.Load(t, files)
		if test.attached {
			_, err := tx.Exec(t.Context(), "UPDATE dlq.settings SET value = 'attached' WHERE key = 'river'")
			require.NoError(t, err)
		}
		for _, s := range test.sets {
			require.NoError(t, q.SetAutomatic(t.Context(), dbsqlc.SetAutomaticParams{
				Scope: s.scope, Name: s.name, Enabled: s.enabled, Include: append([]string{}, s.include...), Actor: "kim",
			}), test.name)
		}
		if test.stopped {
			require.NoError(t, q.StopAutomatic(t.Context(), dbsqlc.StopAutomaticParams{Actor: "kim"}))
		}
		require.NoError(t, automatic.Publish(t.Context(), db, p))

		switches, err := automatic.Read(t.Context(), db, p)
		require.NoError(t, err)
		require.Equal(t, test.stopped, switches.Stopped != nil, test.name)
		verdict := switches.Of(&test.entry)
		require.Equal(t, test.manualRule, verdict.ManualRule, test.name)
		require.Equal(t, test.on && test.manualRule == "", verdict.On, test.name)
		require.NotEmpty(t, verdict.Reason, test.name)
		var bySQL bool
		require.NoError(t, tx.QueryRow(t.Context(), "SELECT dlq.automatic_for($1, $2, $3, $4)", test.entry.Queue,
			test.entry.Kind, test.entry.Class, test.entry.JobKind).Scan(&bySQL))
		require.Equal(t, test.on, bySQL, "%s: SQL does not check for manual handling", test.name)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// An operator's change leaves a row in the audit trail. Invalid changes are rejected.
func TestSwitches_ChangesAreAudited(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	text := func(sql string) (text string) {
		require.NoError(t, pool.QueryRow(t.Context(), sql).Scan(&text), sql)
		return text
	}
	for _, sql := range []string{
		"SELECT dlq.set_automatic('queue', 'mails', true, '{single-attempt}', 'kim', 'tried it')",
		"SELECT dlq.set_automatic('queue', 'mails', false, p_actor => 'ada')",
		"SELECT dlq.reset_automatic('queue', 'mails', 'kim')", "SELECT dlq.reset_automatic('queue', 'mails', 'kim')",
		"SELECT dlq.stop_automatic('kim', 'a release')", "SELECT dlq.resume_automatic('kim')",
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err, sql)
	}
	require.Equal(t, "queue mails true {single-attempt} kim tried it|queue mails false {} ada -|queue mails - - kim "+
		"-|stop  true {} kim a release|stop  - - kim -",
		text(`SELECT string_agg(concat_ws(' ', scope, name, coalesce(enabled::text, '-'), coalesce(include::text, '-'), actor,
			coalesce(note, '-')), '|' ORDER BY id) FROM dlq.automatic_changes`))
	require.Equal(t, "0", text("SELECT count(*)::text FROM dlq.automatic_changes WHERE origin IS NULL OR db_user IS NULL"))
	require.Equal(t, "all  t default",
		text("SELECT string_agg(concat_ws(' ', scope, name, enabled, source), '|') FROM dlq.automatic"))
	for sql, want := range map[string]string{
		"SELECT dlq.set_automatic('topic', 'x', true)":                  `there is no switch for topic "x"`,
		"SELECT dlq.set_automatic('all', 'x', true)":                    `there is no switch for all "x"`,
		"SELECT dlq.set_automatic('queue', '', true)":                   `there is no switch for queue`,
		"SELECT dlq.set_automatic('class', 'bug', true)":                `there is no class "bug"`,
		"SELECT dlq.set_automatic('queue', 'x', true, '{old}')":         "invalid include {old}",
		"SELECT dlq.set_automatic('queue', 'x', false, '{backfilled}')": "invalid include {backfilled}",
		"SELECT dlq.reset_automatic('stop', '')":                        "there is no switch for stop",
		"UPDATE dlq.automatic_changes SET actor = 'nobody'":             "append-only",
		"DELETE FROM dlq.automatic_changes":                             "append-only",
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.ErrorContains(t, err, want, sql)
	}
}

// A change waits for transactions that redeliver by the old switches. It fails if one of them does not end in time. A
// stop takes effect in any case.
func TestSwitches_ChangeWaitsAtMostFiveSeconds(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	locked, err := dbsqlc.New(postgres.DefaultSchemas().Rendered(tx)).TryLockAutomatic(t.Context())
	require.NoError(t, err)
	require.True(t, locked)
	start := time.Now()
	_, err = pool.Exec(t.Context(), "SELECT dlq.set_automatic('all', '', true)")
	require.ErrorContains(t, err, "did not end within 5 s")
	require.ErrorContains(t, err, "DLQ05")
	require.GreaterOrEqual(t, time.Since(start), 5*time.Second)
	_, err = pool.Exec(t.Context(), "SELECT dlq.stop_automatic('kim')")
	require.NoError(t, err)
	stop, err := automatic.ReadStop(t.Context(), postgres.DefaultSchemas().Rendered(pool))
	require.NoError(t, err)
	require.Equal(t, "kim", stop.Actor)
}
