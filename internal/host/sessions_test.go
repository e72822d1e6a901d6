package host_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"
)

// TestHost_CapturesUnderAnySetting checks that capture works under any setting of the application's session.
func TestHost_CapturesUnderAnySetting(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	h.exec(h.admin, `CREATE SCHEMA hostile; GRANT ALL ON SCHEMA hostile TO PUBLIC`)
	for _, sql := range []string{
		// Objects with the names that dlqd's functions use. They would hide dlqd's own objects if the functions looked
		// names up in the application's search_path.
		`CREATE FUNCTION %s.no(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE FUNCTION %s.no(jsonb, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE FUNCTION %s.no(bigint,
			bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE FUNCTION %s.starts_with(text,
			text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE FUNCTION %s.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE FUNCTION %s.set_config(text, text,
			boolean) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE FUNCTION %s.current_setting(text,
			boolean) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE FUNCTION %s.cardinality(jsonb[]) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE FUNCTION %s.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'hostile'; END $$`,
		`CREATE OPERATOR %s.= (LEFTARG = text, RIGHTARG = text, FUNCTION = %[1]s.no)`,
		`CREATE OPERATOR %s.? (LEFTARG = jsonb, RIGHTARG = text, FUNCTION = %[1]s.no)`,
		`CREATE OPERATOR %s.> (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = %[1]s.no)`,
		`CREATE TABLE %s.dead_letter_inbox (id uuid CHECK (false))`,
		`CREATE TABLE %s.job_facts (job_id bigint CHECK (false))`,
	} {
		h.exec(h.admin, fmt.Sprintf(sql, "hostile"))
	}
	settings := []string{
		"search_path = hostile, pg_catalog, public", "search_path = ''", "search_path = pg_temp, hostile, public",
		"DateStyle = 'SQL, DMY'", "DateStyle = 'German'", "DateStyle = 'Postgres, YMD'",
		"IntervalStyle = 'sql_standard'", "IntervalStyle = 'iso_8601'", "IntervalStyle = 'postgres_verbose'",
		"TimeZone = 'Pacific/Kiritimati'", "TimeZone = '<X>+167'",
		"TimeZone = 'Asia/Kathmandu'", "extra_float_digits = -15", "extra_float_digits = 3",
		"standard_conforming_strings = off", "backslash_quote = off", "escape_string_warning = on",
		"transform_null_equals = on", "array_nulls = off", "bytea_output = escape", "xmloption = document",
		"plan_cache_mode = force_generic_plan", "plan_cache_mode = force_custom_plan",
		"quote_all_identifiers = on", "client_encoding = 'SQL_ASCII'",
		"enable_indexscan = off", "enable_seqscan = off", "jit = on", "work_mem = 64", "constraint_exclusion = off",
		"row_security = off", "check_function_bodies = off",
		"default_toast_compression = pglz", "default_tablespace = ''", "lc_numeric = 'C'",
		"statement_timeout = '5s'", "statement_timeout = '1min'", "statement_timeout = '2h'",
		"statement_timeout = '3d'", "statement_timeout = 4999", "lock_timeout = '50ms'",
		"idle_in_transaction_session_timeout = '2s'", "idle_session_timeout = '1h'",
		"dlq.capture = 'garbage'", "dlq.capture = ''", "dlq.capture = '99999999999999999999 99999999999999999999'",
		"dlq.capture_facts = 'garbage'", "dlq.follow = 'garbage'", "dlq.origin = ''",
		"default_transaction_isolation = 'repeatable read'", "default_transaction_isolation = 'serializable'",
		"default_transaction_deferrable = on", "synchronous_commit = off",
		"client_min_messages = error", "application_name = ''", "vacuum_cost_delay = 100", "temp_buffers = 100",
		"cursor_tuple_fraction = 0", "from_collapse_limit = 1", "geqo_threshold = 2", "geqo_seed = 1",
	}
	batches := h.prepare(len(settings))
	for i, setting := range settings {
		app := h.application(setting)
		if strings.HasPrefix(setting, "search_path") {
			// This setting changes the search_path, by which River's driver finds its tables. So the test uses plain SQL.
			execute := func(sql string, args ...any) {
				t.Helper()
				_, err := app.Exec(t.Context(), sql, append([]any{pgx.QueryExecModeSimpleProtocol}, args...)...)
				require.NoError(t, err, setting)
			}
			execute("CREATE TEMP TABLE dead_letter_inbox (id uuid CHECK (false)); CREATE TEMP TABLE river_job (id bigint)")
			for kind, id := range batches[i].ids {
				switch kind {
				case retried:
					execute("UPDATE public.river_job SET state = 'available', finalized_at = NULL WHERE id OPERATOR(pg_catalog.=) $1",
						id)
				case fails, failsAgain, redeliveryFails:
					execute(`UPDATE public.river_job SET state = 'discarded', finalized_at = pg_catalog.now(),
						errors = pg_catalog.array_append(errors, '{}') WHERE id OPERATOR(pg_catalog.=) $1`, id)
				case cancels:
					execute(`UPDATE public.river_job SET state = 'cancelled', finalized_at = pg_catalog.now(),
						errors = pg_catalog.array_append(errors, '{}') WHERE id OPERATOR(pg_catalog.=) $1`, id)
				default:
					execute(`UPDATE public.river_job SET state = 'completed', finalized_at = pg_catalog.now()
						WHERE id OPERATOR(pg_catalog.=) $1`, id)
				}
			}
			require.Empty(t, app.takeWarnings(), setting)
		} else {
			require.Empty(t, app.run(batches[i], setting), setting)
		}
		require.True(t, h.captured(batches[i]), setting)
		app.Close()
	}
}

// TestHost_CapturesInAnyTransaction checks that the rows of capture commit, are prepared and roll back with the
// application's transaction.
func TestHost_CapturesInAnyTransaction(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		batches := h.prepare(5)
		app := h.application()
		in := func(run func(tx pgx.Tx), end string) {
			tx, err := app.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			run(tx)
			h.exec(tx, end)
			_ = tx.Rollback(t.Context()) // tells pgx that the transaction has ended
		}
		ends := func(tx pgx.Tx, j jobs) {
			river := riverpgxv5.New(nil).UnwrapExecutor(tx)
			require.NoError(t, complete(t.Context(), river, j))
			require.NoError(t, retry(t.Context(), river, j))
		}
		in(func(tx pgx.Tx) { ends(tx, batches[0]); ends(tx, batches[1]) }, "COMMIT")
		require.True(t, h.captured(batches[0]))
		require.True(t, h.captured(batches[1]))

		in(func(tx pgx.Tx) { ends(tx, batches[2]) }, "PREPARE TRANSACTION 'x"+h.Database+"'")
		require.False(t, h.captured(batches[2]))
		h.exec(app, "COMMIT PREPARED 'x"+h.Database+"'")
		require.True(t, h.captured(batches[2]))

		in(func(tx pgx.Tx) {
			h.exec(tx, "SAVEPOINT a")
			ends(tx, batches[3])
			h.exec(tx, "ROLLBACK TO a")
			ends(tx, batches[4])
			h.exec(tx, "SAVEPOINT b")
			ends(tx, batches[3])
			h.exec(tx, "RELEASE b")
			h.exec(tx, "ROLLBACK TO a")
			h.exec(tx, "SAVEPOINT b")
			ends(tx, batches[4])
		}, "COMMIT")
		require.Zero(t, h.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE river_job_id = ANY ($1)",
			batches[3].list()))
		require.True(t, h.captured(batches[4]))
		require.Empty(t, app.takeWarnings())

		in(func(tx pgx.Tx) { ends(tx, batches[3]) }, "ROLLBACK")
		require.Zero(t, h.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE river_job_id = ANY ($1)",
			batches[3].list()))
	}
}

// TestHost_CausesNoSerializationFailure checks that capture's reads cause no conflict between two unrelated
// SERIALIZABLE transactions.
func TestHost_CausesNoSerializationFailure(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	batches := h.prepare(1000) // far apart in River's index
	h.exec(h.admin, "ANALYZE river_job")
	h.exec(h.admin, "DELETE FROM dlq.entry_jobs WHERE job_id <> $1 AND job_id <> $2", batches[1].ids[redelivered],
		batches[999].ids[redelivered])
	var txs []pgx.Tx
	for _, j := range []jobs{batches[1], batches[999]} {
		tx, err := h.application().BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.Serializable})
		require.NoError(t, err)
		h.exec(tx, "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off")
		h.exec(tx, `UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = errors || '{}'::jsonb
			WHERE id = $1`, j.ids[failsAgain])
		txs = append(txs, tx)
	}
	for i, j := range []jobs{batches[1], batches[999]} {
		h.exec(txs[i], "UPDATE river_job SET state = 'completed', finalized_at = now() WHERE id = $1", j.ids[redelivered])
	}
	for _, tx := range txs {
		require.NoError(t, tx.Commit(t.Context()))
	}
}

// TestHost_LimitsTheTimeOfCapture checks that capture stops at its time limit or, if that is less, at half of the
// session's statement_timeout, and that it skips jobs that are too large.
func TestHost_LimitsTheTimeOfCapture(t *testing.T) {
	t.Parallel()
	h := newHost(t)
	left := func(app *application, n, bytes int) int {
		t.Helper()
		h.exec(h.admin, `INSERT INTO river_job (kind, args, max_attempts, state)
			SELECT 'storm', x, 1, 'running' FROM (SELECT jsonb_build_object('x', string_agg(md5(i::text), '')) AS x
			FROM generate_series(0, $2 / 32) i) x, generate_series(1, $1::integer)`, n, bytes)
		before := h.count("SELECT count(*) FROM dlq.dead_letter_inbox")
		h.exec(app, `UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp() WHERE kind = 'storm'
			AND state = 'running'`)
		return n - h.count("SELECT count(*) FROM dlq.dead_letter_inbox") + before
	}
	app := h.application()
	h.exec(h.admin, "SELECT dlq.set_capture('on', '1 min')")
	require.Zero(t, left(app, 40, 1<<20), "payloads of 1 MB")
	require.Empty(t, app.takeWarnings())
	h.exec(h.admin, "SELECT dlq.set_capture('on', '5 ms')")
	require.NotZero(t, left(app, 40, 1<<20))
	require.Len(t, app.takeWarnings(), 1)
	h.exec(h.admin, "SELECT dlq.set_capture('on', '1 ms')")
	require.NotZero(t, left(app, 2000, 1))
	require.Len(t, app.takeWarnings(), 1)

	// If half of the session's statement_timeout is less than the limit, it applies instead. Capture stores in a setting
	// of the transaction when the statement began and until when it may work on the statement.
	h.exec(h.admin, "SELECT dlq.set_capture('on', '1 min')")
	h.exec(h.admin, "INSERT INTO river_job (kind, args, max_attempts, state) VALUES ('timed', '{}', 1, 'running')")
	h.exec(app, "SET statement_timeout = '40s'")
	tx, err := app.Begin(t.Context())
	require.NoError(t, err)
	h.exec(tx, "UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp() WHERE kind = 'timed'")
	var may float64
	require.NoError(t, tx.QueryRow(t.Context(), `SELECT (split_part(s, ' ', 2)::float8 - split_part(s, ' ',
		1)::float8) / 1e6 FROM current_setting('dlq.capture') s`).Scan(&may))
	require.InDelta(t, 20, may, 0.001, "seconds")
	require.NoError(t, tx.Commit(t.Context()))
	h.exec(app, "RESET statement_timeout")

	// One job alone is too large.
	require.Equal(t, 1, left(app, 1, 12<<20))
	require.Contains(t, app.takeWarnings()[0], "too large")
	// The value is small when stored, because it is compressed, and too large when it is decompressed.
	h.exec(app, `INSERT INTO river_job (kind, args, max_attempts, state, errors)
		VALUES ('log', '{}', 1, 'running', ARRAY[jsonb_build_object('attempt', 1, 'error', repeat('x y', 5000000))])`)
	require.Less(t, h.count("SELECT pg_column_size(errors) FROM river_job WHERE kind = 'log'"), 1<<20)
	h.exec(app, "UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp() WHERE kind = 'log'")
	require.Contains(t, app.takeWarnings()[0], "too large")
	require.Zero(t, left(app, 1, 1<<20), "in this statement alone")
	h.exec(h.admin, "SELECT dlq.set_capture('strict')")
	require.Zero(t, left(app, 1, 12<<20))
	require.Empty(t, app.takeWarnings())

	// One statement of the application may run the trigger's function many times.
	h.exec(h.admin, "SELECT dlq.set_capture('on', '1 min')")
	h.exec(h.admin, `INSERT INTO river_job (kind, args, max_attempts, state) SELECT 'loop', '{}', 1, 'running'
		FROM generate_series(1, 300)`)
	h.exec(app, `DO $$ DECLARE v bigint; BEGIN FOR v IN SELECT id FROM river_job WHERE kind = 'loop' LOOP
		BEGIN
			UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp() WHERE id = v;
			IF v % 3 = 0 THEN RAISE EXCEPTION 'no'; END IF;
		EXCEPTION WHEN raise_exception THEN NULL;
		END;
	END LOOP; END $$`)
	require.Equal(t, 200, h.count("SELECT count(*) FROM dlq.dead_letter_inbox WHERE kind = 'loop'"))
	require.Empty(t, app.takeWarnings())
}
