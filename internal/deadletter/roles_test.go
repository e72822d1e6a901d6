package deadletter_test

import (
	"context"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// asRole runs fn in a session of a new login with one of dlqd's roles, and returns the login's name. Roles belong to
// the server, so each test has its own login.
func asRole(t *testing.T, url, role string, fn func(*pgx.Conn)) string {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	admin, err := pgx.Connect(ctx, postgrestest.Superuser(t, url))
	require.NoError(t, err)
	login := role + "_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	_, err = admin.Exec(ctx, "CREATE ROLE "+login+" LOGIN IN ROLE "+role)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(ctx, "DROP ROLE "+login)
		require.NoError(t, err)
		_ = admin.Close(ctx)
	})
	conn, err := pgx.Connect(ctx, postgrestest.WithUser(url, login))
	require.NoError(t, err)
	defer func() { _ = conn.Close(ctx) }()
	fn(conn)
	return login
}

type session struct {
	*testing.T

	conn *pgx.Conn
}

func (s *session) can(sql string) {
	s.Helper()
	_, err := s.conn.Exec(s.Context(), sql)
	require.NoError(s, err, sql)
}

func (s *session) cannot(sql string) {
	s.Helper()
	_, err := s.conn.Exec(s.Context(), sql)
	require.ErrorContains(s, err, "42501", sql) // insufficient_privilege
}

func (s *session) text(sql string) string {
	s.Helper()
	var text *string
	require.NoError(s, s.conn.QueryRow(s.Context(), sql).Scan(&text), sql)
	if text == nil {
		return "(null)"
	}
	return *text
}

// createRoleEntries creates four parked dead letters. It returns the database's URL, and a pool that connects as the
// owner.
func createRoleEntries(t *testing.T) (string, *pgxpool.Pool) {
	t.Helper()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	for _, sql := range []string{
		`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', '{"card": "4242"}', 'q', 1, 'running'
			FROM generate_series(1, 4)`,
		`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "no money"}'::jsonb]`,
		`SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'owner')`,
		`SELECT dlq.refresh_rollups()`,
	} {
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	return url, pool
}

// writes are statements that every role is denied: a role can write only through functions.
var writes = []string{
	"UPDATE dlq.dead_letter_queue SET notes = 'x'", "DELETE FROM dlq.dead_letter_queue",
	"INSERT INTO dlq.dead_letter_open (id) VALUES (gen_random_uuid())", "TRUNCATE dlq.dead_letter_open",
	"UPDATE dlq.dead_letter_transitions SET note = 'x'", "DELETE FROM dlq.dead_letter_transitions",
	"TRUNCATE dlq.dead_letter_transitions", "UPDATE dlq.dead_letter_transitions SET detail = '{\"erased\": true}'",
	`INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind)
		VALUES (gen_random_uuid(), 'dlq_manual', 'x', 'q', 'k')`,
	"UPDATE dlq.settings SET value = ''", "UPDATE dlq.erasures SET note = ''",
	"DELETE FROM dlq.replay_runs", "DELETE FROM dlq.rollup_flow",
	"SELECT dlq.redeliver('{}', 'x', 'x')", "SELECT dlq.file('{}')", "SELECT dlq.apply_facts()",
	"SELECT dlq.protect('{}')", "SELECT dlq.install_roles()", "DROP TABLE dlq.dead_letter_queue",
	"SELECT * FROM river_job", "CREATE TABLE dlq.created ()",
}

func TestRoles_ReaderSeesNoPayloads(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	asRole(t, url, "dlq_reader", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		for _, sql := range []string{
			"SELECT id, status, error_message, tags FROM dlq.dead_letter_queue", "SELECT * FROM dlq.entries",
			"SELECT * FROM dlq.find('{\"queue\": \"q\"}')", "SELECT * FROM dlq.preview('{}')",
			"SELECT * FROM dlq.stats()", "SELECT * FROM dlq.flow()", "SELECT * FROM dlq.times()",
			"SELECT * FROM dlq.top_groups()", "SELECT * FROM dlq.error_types()", "SELECT * FROM dlq.heat_map()",
			"SELECT * FROM dlq.noisiest_sources()", "SELECT * FROM dlq.replay_success()",
			"SELECT * FROM dlq.retry_cost()", "SELECT * FROM dlq.oldest_entries()", "SELECT * FROM dlq.rates_by_hour",
			"SELECT * FROM dlq.backlog", "SELECT * FROM dlq.failures_by_hour", "SELECT * FROM dlq.time_in_dlq",
			"SELECT * FROM dlq.rollup_lag", "SELECT * FROM dlq.audit()", "SELECT id, status, note FROM dlq.replay_runs",
			"SELECT * FROM dlq.circuit_breakers", "SELECT * FROM dlq.erasures", "SELECT * FROM dlq.capture_status()",
		} {
			s.can(sql)
		}
		require.Equal(t, "4", s.text("SELECT count(*)::text FROM dlq.oldest_entries()"))
		require.Equal(t, "(null)", s.text("SELECT original_event::text FROM dlq.find('{}', 1)"))
		require.Equal(t, "no money", s.text("SELECT error_message FROM dlq.entries LIMIT 1"))
		for _, sql := range append([]string{
			"SELECT original_event FROM dlq.dead_letter_queue", "SELECT * FROM dlq.dead_letter_queue",
			"SELECT * FROM dlq.dead_letter_open",
			"SELECT detail FROM dlq.dead_letter_transitions", "SELECT patch FROM dlq.replay_runs",
			"SELECT id FROM dlq.dead_letter_queue WHERE original_event @> '{\"card\": \"4242\"}'",
			"SELECT dlq.discard((SELECT id FROM dlq.dead_letter_queue LIMIT 1))", "SELECT dlq.replay_start('{}', p_all => true)",
			"CALL dlq.erase('{\"queue\": \"q\"}', 'x')", "SELECT dlq.rebuild_rollups()",
		}, writes...) {
			s.cannot(sql)
		}
		_, err := conn.Exec(t.Context(), "SELECT * FROM dlq.find('{\"payload\": {\"card\": \"4242\"}}')")
		require.ErrorContains(t, err, "DLQ06", "a reader cannot filter by a hidden column")
	})

	// Another policy hides other columns.
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	require.NoError(t, store.Protect(t.Context(), []string{"error_message", "tags"}, []byte("{}")))
	asRole(t, url, "dlq_reader", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		require.JSONEq(t, `{"card": "4242"}`, s.text("SELECT original_event::text FROM dlq.dead_letter_queue LIMIT 1"))
		require.Equal(t, "(null)", s.text("SELECT error_message FROM dlq.entries LIMIT 1"))
		s.cannot("SELECT error_message FROM dlq.dead_letter_queue")
		s.cannot("SELECT title FROM dlq.failure_groups")
		s.cannot("SELECT job FROM dlq.job_facts")
		s.can("SELECT * FROM dlq.capture_status()")
	})
}

func TestRoles_OperatorMovesEntries(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	login := asRole(t, url, "dlq_operator", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		require.JSONEq(t, `{"card": "4242"}`,
			s.text("SELECT original_event::text FROM dlq.find('{\"payload\": {\"card\": \"4242\"}}', 1)"))
		const one = "(SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_manual' ORDER BY id LIMIT 1)"
		for _, sql := range []string{
			"SELECT dlq.replay(" + one + ", p_note => 'again')", "SELECT dlq.discard(" + one + ")",
			"SELECT dlq.assign(" + one + ", 'kim')", "SELECT dlq.note(" + one + ", 'seen')", "SELECT dlq.resolve(" + one + ")",
			"SELECT dlq.unpark(" + one + ")", "SELECT dlq.act_where('tag', '{\"queue\": \"q\"}', p_args => '{\"tags\": " +
				"[\"ttt\"]}')", "SELECT dlq.replay_start('{\"queue\": \"q\"}', p_rate => 5, p_force => true)",
			"SELECT dlq.replay_set_rate(id, 10) FROM dlq.replay_runs",
			"SELECT dlq.replay_pause(id) FROM dlq.replay_runs", "SELECT dlq.replay_cancel(id) FROM dlq.replay_runs",
			"SELECT * FROM dlq.sweep_redeliveries()",
			"SELECT dlq.open_breaker('queue:q', 'me', 'why')", "SELECT dlq.refresh_rollups()",
		} {
			s.can(sql)
		}
		for _, sql := range append([]string{
			"SELECT dlq.act_where('purge', '{\"queue\": \"q\"}', p_args => '{\"force\": true}')",
			"CALL dlq.erase('{\"queue\": \"q\"}', 'x')", "SELECT dlq.drop_partition('dead_letter_resolved_202001')",
			"SELECT dlq.delete_entries('{}')", "SELECT dlq.rebuild_rollups()", "CALL dlq.ensure_partitions()",
		}, writes...) {
			s.cannot(sql)
		}
	})
	var moves, origins int
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT count(*), count(origin) FROM dlq.dead_letter_transitions
		WHERE db_user = $1 AND actor = $1`, login).Scan(&moves, &origins))
	require.Equal(t, 10, moves, "six moves and notes, and a tag on each of four entries")
	require.Equal(t, moves, origins)
}

func TestRoles_AdminPurgesAndErases(t *testing.T) {
	t.Parallel()
	url, _ := createRoleEntries(t)
	asRole(t, url, "dlq_admin", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		for _, sql := range []string{
			"SELECT dlq.act_where('purge', '{\"queue\": \"q\"}', p_args => '{\"force\": true}', p_limit => 1)",
			"CALL dlq.erase('{\"payload\": {\"card\": \"4242\"}}', 'ticket 9')",
			"SELECT dlq.rebuild_rollups()", "CALL dlq.ensure_partitions()",
		} {
			s.can(sql)
		}
		require.Equal(t, "3", s.text("SELECT entries::text FROM dlq.erasures"))
		for _, sql := range writes {
			s.cannot(sql)
		}
	})
}

// In SQL the actor is the database user. If the user names another actor, the audit trail has that name as the person
// for whom the user acts.
func TestRoles_ActorIsTheDatabaseUser(t *testing.T) {
	t.Parallel()
	url, pool := createRoleEntries(t)
	const one = "(SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_manual' ORDER BY id LIMIT 1)"
	login := asRole(t, url, "dlq_admin", func(conn *pgx.Conn) {
		s := &session{T: t, conn: conn}
		for _, sql := range []string{
			"SELECT dlq.note(" + one + ", 'seen', 'worker:x')", "SELECT dlq.unpark(" + one + ", 'sweep')",
			"SELECT dlq.park((SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'), 'capture')",
			"SELECT dlq.resolve(" + one + ", 'worker:x')",
			"SELECT dlq.reopen((SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'), 'retention')",
			"SELECT dlq.replay(" + one + ", 'reconciler')", "SELECT dlq.replay_start('{\"queue\": \"q\"}', 'worker:x', " +
				"p_force => true)", "SELECT dlq.replay_pause(id, 'sweep') FROM dlq.replay_runs",
			"SELECT dlq.open_breaker('queue:q', 'worker:x')", "SELECT dlq.reset_breaker('queue:q', 'worker:x')",
			"SELECT dlq.stop_automatic('worker:x')", "SELECT dlq.set_capture('on', p_actor => 'worker:x')",
			"CALL dlq.erase('{\"tags\": [\"x\"]}', 'n', 'worker:x')",
			"SELECT dlq.set_role_scope('dlq_reader', '[{\"queues\": [\"q\"]}]', 'n', 'worker:x')",
			"SELECT dlq.act_where('tag', '{\"queue\": \"q\"}', 'worker:x', p_args => '{\"tags\": [\"ttt\"]}')",
		} {
			s.can(sql)
		}
	})
	for _, sql := range []string{
		"SELECT count(*) FROM dlq.dead_letter_transitions WHERE actor <> $1 AND db_user = $1",
		`SELECT count(*) FROM dlq.dead_letter_transitions WHERE actor = $1
			AND (origin IS NULL OR origin NOT LIKE 'SQL, from %, on behalf of %')`,
		"SELECT count(*) FROM dlq.acts WHERE db_user = $1 AND (actor <> $1 OR origin NOT LIKE 'SQL, from %, on behalf of %')",
		`SELECT count(*) FROM dlq.dead_letter_queue WHERE resolved_by <> $1 OR (parked_by <> $1 AND parked_by <> 'owner')
			OR locked_by <> $1`, "SELECT count(*) FROM dlq.replay_runs WHERE actor <> $1 OR reason <> 'paused by ' || $1",
		"SELECT count(*) FROM dlq.circuit_breakers WHERE changed_by <> $1",
		"SELECT count(*) FROM dlq.circuit_breaker_changes WHERE actor <> $1",
		"SELECT count(*) FROM dlq.automatic_changes WHERE actor <> $1",
		"SELECT count(*) FROM dlq.automatic_switches WHERE actor <> $1",
		"SELECT count(*) FROM dlq.erasures WHERE actor <> $1",
	} {
		var n int
		require.NoError(t, pool.QueryRow(t.Context(), sql, login).Scan(&n))
		require.Zero(t, n, sql)
	}
	var actions int
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM dlq.audit('{\"people\": true}', 500) WHERE "+
		"actor = $1", login).Scan(&actions))
	require.Equal(t, 17, actions, "six moves and notes, four tags, seven acts")

	// The owner may give any name as the actor, even a name that dlqd uses for itself.
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	for _, sql := range []string{
		"SELECT set_config('dlq.origin', 'API, from 10.0.0.7', true)",
		"SELECT dlq.note(" + one + ", 'x', 'worker:x')",
	} {
		_, err = tx.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	var origin string
	require.NoError(t, tx.QueryRow(t.Context(),
		"SELECT origin FROM dlq.dead_letter_transitions WHERE actor = 'worker:x'").Scan(&origin))
	require.Equal(t, "API, from 10.0.0.7", origin)
}

// If a query calls dlq.ids_in_scope, the planner also calls that function, once for each partition and index. So dlqd's
// functions call it before their queries.
func TestScope_IsReadBeforeQueries(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	postgrestest.Alter(t, url, "SET track_functions = 'all'")
	pool := postgrestest.Open(t, url)
	const id = "'01900000-0000-7000-8000-000000000001'"
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	called := func() (calls int) {
		_, err := conn.Exec(t.Context(), "SELECT pg_stat_force_next_flush()")
		require.NoError(t, err)
		require.NoError(t, conn.QueryRow(t.Context(), `SELECT coalesce(sum(calls), 0)
			FROM pg_stat_user_functions WHERE funcname = 'ids_in_scope'`).Scan(&calls))
		return calls
	}
	for _, statement := range []string{
		"SELECT dlq.discard(" + id + ", 'kim', 'gone')",
		"SELECT dlq.reopen(" + id + ", 'kim', 'not done')",
		"SELECT dlq.replay(" + id + ", 'kim')",
		"SELECT dlq.delete_entries(ARRAY[" + id + "]::uuid[])",
		"CALL dlq.reveal(" + id + ", 'ticket 1')",
	} {
		before := called()
		_, _ = conn.Exec(t.Context(), statement) // most functions fail, because there is no such entry
		calls := called() - before
		require.Less(t, calls, 5, statement)
		require.Positive(t, calls, statement)
	}
}
