package reconcile_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

type testBundle struct {
	*testing.T

	pool *pgxpool.Pool
}

func setup(t *testing.T) *testBundle {
	t.Helper()
	return &testBundle{t, postgrestest.Pool(t)}
}

func (b *testBundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

func (b *testBundle) count(sql string, args ...any) int {
	b.Helper()
	var n int
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&n))
	return n
}

// job has the application insert a job that runs.
func (b *testBundle) job() (id int64) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), `INSERT INTO river_job (kind, args, max_attempts, state, attempt, tags, metadata, unique_key, unique_states)
		VALUES ('mail', '{"n": 1}', 3, 'running', 3, '{a,b}', '{"k": 1}', decode(md5(random()::text), 'hex'), B'11110101') RETURNING id`).Scan(&id))
	return id
}

const fail = `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(), errors = errors || jsonb_build_object('error', 'timeout', 'attempt', 3) WHERE id = $1`

// bypassed runs a statement past the triggers.
func (b *testBundle) bypassed(sql string, args ...any) {
	b.Helper()
	base := postgrestest.Superuser(b, b.pool.Config().ConnString())
	conn, err := pgx.Connect(b.Context(), base)
	require.NoError(b, err)
	defer func() { _ = conn.Close(context.WithoutCancel(b.Context())) }()
	_, err = conn.Exec(b.Context(), "SET session_replication_role = replica")
	require.NoError(b, err)
	_, err = conn.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

// look makes a whole look, or one at what is recent, to its end.
func (b *testBundle) look(db postgres.DB, whole bool) (filed int) {
	b.Helper()
	for {
		var n int
		var done bool
		require.NoError(b, db.QueryRow(b.Context(), "SELECT * FROM dlq.reconcile(2, $1)", whole).Scan(&n, &done))
		filed += n
		if done {
			return filed
		}
	}
}

func TestReconcile_filesWhatCaptureWouldHave(t *testing.T) {
	t.Parallel()
	b := setup(t)
	captured, missed := b.job(), b.job()
	b.exec(fail, captured)
	b.bypassed(fail, missed)
	b.exec("UPDATE river_job SET finalized_at = (SELECT finalized_at FROM river_job WHERE id = $1), created_at = (SELECT created_at FROM river_job WHERE id = $1), unique_key = NULL WHERE id = $2", captured, missed)
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	require.Equal(t, 1, b.look(b.pool, false))
	require.Zero(t, b.look(b.pool, false))
	require.Zero(t, b.look(b.pool, true))
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE stage = 'inbox'"))
	rows, err := b.pool.Query(t.Context(), `SELECT (to_jsonb(e) - '{id,river_job_id,created_at,updated_at,next_retry_at,captured_by,unique_key}'::text[])::text FROM dlq.dead_letter_queue e`)
	require.NoError(t, err)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, texts[0], texts[1])
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE captured_by = 'reconciler' AND id = dlq.entry_id(river_job_id, last_failed_at) AND river_job_id = $1", missed))
	require.Equal(t, 1, b.count("SELECT entries FROM dlq.reconcile_findings WHERE why = 'missed'"))
}
