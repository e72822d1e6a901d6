package reconcile_test

import (
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/reconcile"
)

var discard = slog.New(slog.DiscardHandler)

func (b *testBundle) migrator() *postgres.Migrator {
	return &postgres.Migrator{Pool: b.pool, Schemas: postgres.DefaultSchemas(), Logger: discard}
}

func (b *testBundle) set(mode string) *reconcile.Switched {
	b.Helper()
	done, err := reconcile.SetCapture(b.Context(), postgres.DefaultSchemas().Rendered(b.pool),
		reconcile.Switch{Mode: mode, Actor: "kim", Note: "stuck"})
	require.NoError(b, err)
	require.Equal(b, mode, done.Mode)
	return done
}

func (b *testBundle) status() *reconcile.Capture {
	b.Helper()
	s, err := reconcile.ReadCapture(b.Context(), postgres.DefaultSchemas().Rendered(b.pool))
	require.NoError(b, err)
	return s
}

func TestSetCapture_SwitchesMode(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.Equal(t, "on", b.status().Summary())
	open, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = open.Exec(t.Context(), fail, b.insertJob())
	require.NoError(t, err)

	done := b.set(reconcile.ModeOff)
	require.True(t, done.Recorded)
	require.Equal(t, 1, done.Writing)
	require.Contains(t, done.Message, "1 open transactions have written jobs")
	require.Contains(t, done.Message, "filed every minute by dlqd serve")
	_, err = open.Exec(t.Context(), "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE id = $1",
		b.insertJob())
	require.NoError(t, err)
	require.NoError(t, open.Commit(t.Context()))
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"),
		"the switch applies to the next statement of an open transaction")
	s := b.status()
	require.Regexp(t, `^off \(by kim at .*: stuck\)$`, s.Summary())
	require.Empty(t, s.Problem(), "a mode that an operator chose is not a problem")
	require.Equal(t, 1, b.scan(b.pool, false))
	require.Contains(t, b.status().Summary(), "filed 1 failures that capture missed within 24 hours (1 capture_off)")

	b.set(reconcile.ModeOn)
	b.exec(fail, b.insertJob())
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, 2, b.count(`SELECT count(*) FROM dlq.acts WHERE subject = 'capture' AND actor = 'kim'
		AND origin <> ''`))
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.set_capture('maybe')")
	require.ErrorContains(t, err, "capture: invalid mode maybe")

	b.exec("ALTER TABLE river_job DISABLE TRIGGER dlq_follow")
	require.Contains(t, b.status().Problem(), "the triggers on River's table are disabled")
	b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, at)
		VALUES (1, now(), 'retried', now() - interval '2 minutes')`)
	require.Contains(t, b.status().Problem(), "facts have been unapplied since")
}

// An operator can switch capture while all tables are locked. Only the record of the operator's name is skipped.
func TestSetCapture_WorksWhileTablesAreLocked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), `DO $$ DECLARE r regclass; BEGIN
		FOR r IN SELECT c.oid FROM pg_class c WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p') LOOP
			EXECUTE 'LOCK TABLE ' || r || ' IN ACCESS EXCLUSIVE MODE';
		END LOOP;
		LOCK TABLE river_job IN ACCESS EXCLUSIVE MODE;
	END $$`)
	require.NoError(t, err)
	done := b.set(reconcile.ModeOff)
	require.False(t, done.Recorded)
	require.Equal(t, "off", b.status().Mode)
	require.Nil(t, b.status().Unfiled)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Nil(t, b.status().ChangedAt, "the switch was not recorded")
	b.exec(fail, b.insertJob())
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
}

func TestSetCapture_RunsConcurrently(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var all sync.WaitGroup
	errs := make([]error, 8)
	for i := range errs {
		all.Go(func() {
			for n := range 10 {
				if _, err := b.pool.Exec(t.Context(), "SELECT dlq.set_capture($1)",
					[]string{"on", "off", "strict"}[(i+n)%3]); err != nil {
					errs[i] = err
				}
			}
		})
	}
	all.Wait()
	for _, err := range errs {
		require.NoError(t, err)
	}
	require.Equal(t, 80, b.count("SELECT count(*) FROM dlq.acts WHERE subject = 'capture'"))
}

// A switch of capture survives an upgrade, and a detach and attach of dlqd.
func TestSetCapture_SurvivesUpgrade(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("SELECT dlq.set_capture('strict', '2 seconds')")
	m := b.migrator()
	b.exec("UPDATE dlq.settings SET value = 'older' WHERE key = 'code_version'")
	require.NoError(t, m.Up(t.Context()))
	require.Equal(t, "strict", b.status().Mode)
	found, err := m.Find(t.Context(), false, false)
	require.NoError(t, err)
	_, err = m.Detach(t.Context(), *found, false)
	require.NoError(t, err)
	require.NoError(t, m.Up(t.Context()))
	require.Equal(t, "strict", b.status().Mode)
	require.Equal(t, "00:00:02", b.status().Limit)
}

func TestLoop_FilesMissedFailures(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.execWithoutTriggers(fail, b.insertJob())
	loop := reconcile.New(reconcile.Config{DB: postgres.DefaultSchemas().Rendered(b.pool), Logger: discard}).Loop()
	group := background.Group{Logger: discard}
	group.Add(loop)
	group.Start()
	require.Eventually(t, func() bool { return b.count("SELECT count(*) FROM dlq.dead_letter_queue") == 1 }, time.Minute,
		50*time.Millisecond)
	require.NoError(t, group.Stop(t.Context()))
}
