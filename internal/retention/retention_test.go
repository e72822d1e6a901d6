package retention_test

import (
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/retention"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

type bundle struct {
	*testing.T

	pool   *pgxpool.Pool
	keeper *retention.Keeper
	now    time.Time
}

func setup(t *testing.T) *bundle {
	t.Helper()
	rules := policytest.Load(t, policytest.Files{"retry-policies": `
defaults: {retention: {resolved: 30d, failed: 90d, archived: 365d}}
queues:
  mails: {destination: d, retention: {resolved: 7d}}
  payments: {destination: d, retention: {resolved: 60d}}
destinations: {d: {url: "http://127.0.0.1:1/"}}
`})
	b := &bundle{T: t, pool: postgrestest.Pool(t), now: time.Now()}
	b.keeper = &retention.Keeper{
		Store: deadletter.NewStore(b.pool, postgres.DefaultSchemas()), Policy: func() *policy.Policy { return rules },
		Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return b.now },
	}
	return b
}

func (b *bundle) count(sql string, args ...any) int {
	b.Helper()
	var n int
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&n))
	return n
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

// closed makes n dead letters of a queue that are closed.
func (b *bundle) closed(n int, queue, status string) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', '{}', $1, 1, 'running' FROM generate_series(1, $2)`, queue, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "x"}'::jsonb] WHERE state = 'running'`)
	if status == "dlq_archived" {
		b.exec("SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_open WHERE status = 'dlq_pending'), 'kim')")
		return
	}
	b.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE status = 'dlq_pending'")
	b.exec("SELECT dlq.replay(id) FROM dlq.dead_letter_open WHERE status = 'dlq_pending'")
	b.exec("UPDATE river_job SET state = $1::river_job_state, finalized_at = now() WHERE state = 'available'", map[string]string{"dlq_resolved": "completed", "dlq_failed": "discarded"}[status])
}

func (b *bundle) run() map[string]int64 {
	b.Helper()
	done, err := b.keeper.Run(b.Context())
	require.NoError(b, err)
	return done
}

func (b *bundle) in(status string) int {
	b.Helper()
	return b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = $1::dlq.dead_letter_status", status)
}

func TestKeeper(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.closed(5, "mails", "dlq_resolved")
	b.closed(4, "payments", "dlq_resolved")
	b.closed(3, "elsewhere", "dlq_resolved") // a queue of an application's: the defaults
	b.closed(2, "mails", "dlq_failed")
	b.closed(2, "payments", "dlq_archived")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('k', '{}', 'mails', 1, 'running')`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'`)
	require.Empty(t, b.run(), "nothing is past its time")

	b.now = b.now.Add(8 * 24 * time.Hour)
	require.Equal(t, map[string]int64{"deleted": 5}, b.run(), "the shorter period of one queue")
	b.now = b.now.Add(25 * 24 * time.Hour)
	require.Equal(t, map[string]int64{"deleted": 3}, b.run())
	require.Equal(t, 4, b.in("dlq_resolved"))

	month := b.count("SELECT count(*) FROM pg_inherits WHERE inhparent = 'dlq.dead_letter_resolved'::regclass")
	b.now = b.now.Add(60 * 24 * time.Hour)
	done := b.run()
	require.Contains(t, done, "dropped", "a month that is past every queue's period goes whole")
	require.Zero(t, b.in("dlq_resolved"))
	require.Less(t, b.count("SELECT count(*) FROM pg_inherits WHERE inhparent = 'dlq.dead_letter_resolved'::regclass"), month)
	require.EqualValues(t, 2, done["archived"], "failed entries are archived after 90 days")
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE actor = 'retention' AND reason = 'aged out' AND from_status = 'dlq_failed' AND to_status = 'dlq_archived'"))
	require.Equal(t, 4, b.in("dlq_archived"))
	require.Equal(t, 1, b.in("dlq_pending"), "open entries are kept for ever")

	b.now = b.now.Add(400 * 24 * time.Hour)
	b.run()
	require.Zero(t, b.in("dlq_archived"))
	require.Equal(t, 1, b.in("dlq_pending"))
	b.exec("SELECT dlq.ensure_partitions()") // a dropped month of today is made again
	b.closed(1, "mails", "dlq_resolved")
	require.Equal(t, 2, b.in("dlq_resolved"), "that one, and the one that was open")
}

// An entry whose partition is missing goes to the default one, which is drained when the partition is made.
func TestPartitions_theDefaultOneIsDrained(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`SELECT dlq.ensure_partitions()`)
	b.exec(`DO $$ DECLARE p text; BEGIN
		FOR p IN SELECT inhrelid::regclass FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
			WHERE inhparent IN ('dlq.dead_letter_resolved'::regclass, 'dlq.dead_letter_transitions'::regclass) AND relname ~ '[0-9]$'
		LOOP EXECUTE 'DROP TABLE ' || p; END LOOP; END $$`)
	b.closed(3, "mails", "dlq_resolved")
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_resolved_default"))
	moves := b.count("SELECT count(*) FROM dlq.dead_letter_transitions_default")
	require.Positive(t, moves)
	b.exec(`SELECT dlq.ensure_partitions()`)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_resolved_default"))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_transitions_default"))
	require.Equal(t, 3, b.in("dlq_resolved"), "none is lost")
	require.Equal(t, moves, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"))
}
