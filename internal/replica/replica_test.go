package replica_test

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/replica"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// bundle has a Replica that reads from a real streaming standby.
type bundle struct {
	*testing.T

	servers *postgrestest.Replicated
	pool    *pgxpool.Pool // of the primary
	db      postgres.DB
	replica *replica.Replica
	config  replica.Config
	maxLag  atomic.Int64

	mu       sync.Mutex
	outcomes map[string]int
}

// setup starts servers, and opens a Replica at the URL that url returns.
func setup(t *testing.T, url func(*postgrestest.Replicated) string) *bundle {
	t.Helper()
	servers := postgrestest.NewReplicated(t, false)
	b := &bundle{T: t, servers: servers, pool: servers.Migrate(), outcomes: map[string]int{}}
	logger := slog.New(slog.DiscardHandler)
	schemas := postgres.DefaultSchemas()
	b.exec("CREATE TABLE reads (n integer)")
	b.exec("INSERT INTO reads VALUES (1)")
	b.servers.CatchUp()
	b.db = schemas.Rendered(b.pool)
	b.config = replica.Config{
		Primary: b.pool, Schemas: schemas, URL: url(servers), Logger: logger,
		MaxLag: func() time.Duration { return time.Duration(b.maxLag.Load()) },
		Observe: func(outcome string) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.outcomes[outcome]++
		},
	}
	b.maxLag.Store(int64(time.Hour))
	var err error
	b.replica, err = replica.Open(t.Context(), b.config)
	require.NoError(t, err)
	loops := &background.Group{Logger: logger}
	loops.Add(b.replica.Loop())
	loops.Start()
	t.Cleanup(func() {
		_ = loops.Stop(context.WithoutCancel(t.Context()))
		b.replica.Close()
	})
	return b
}

func direct(servers *postgrestest.Replicated) string { return servers.StandbyURL }

func (b *bundle) exec(sql string) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql)
	require.NoError(b, err, sql)
}

// read reads for an actor and reports whether the standby answered.
func (b *bundle) read(actor string) (standby bool, asOf time.Time) {
	b.Helper()
	asOf, err := b.replica.Read(b.Context(), []string{actor}, func(ctx context.Context) error {
		return b.db.QueryRow(ctx, "SELECT pg_is_in_recovery()").Scan(&standby)
	})
	require.NoError(b, err)
	require.Equal(b, standby, !asOf.IsZero(), "an answer from the standby says of when it is")
	return standby, asOf
}

// await waits until the standby answers reads, if standby is true, or else until the primary answers them.
func (b *bundle) await(standby bool) {
	b.Helper()
	require.Eventually(b, func() bool {
		by, _ := b.read("await")
		return by == standby
	}, 2*time.Minute, 20*time.Millisecond)
}

// answers reports whether the standby answers a read whose answer the actors see.
func answers(t *testing.T, db postgres.DB, r *replica.Replica, actors ...string) (standby bool) {
	t.Helper()
	_, err := r.Read(t.Context(), actors, func(ctx context.Context) error {
		return db.QueryRow(ctx, "SELECT pg_is_in_recovery()").Scan(&standby)
	})
	require.NoError(t, err)
	return standby
}

func (b *bundle) count(outcome string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.outcomes[outcome]
}

// repeats runs a statement on the standby, and calls meanwhile while the statement runs there. It checks that the read
// is repeated once, on the primary.
func (b *bundle) repeats(statement string, meanwhile func()) {
	b.Helper()
	b.await(true)
	before := b.count(replica.Repeated)
	var calls []bool // whether each call was on the standby
	asOf, err := b.replica.Read(b.Context(), []string{"kim"}, func(ctx context.Context) error {
		standby := false
		if err := b.db.QueryRow(ctx, "SELECT pg_is_in_recovery()").Scan(&standby); err != nil {
			return err
		}
		calls = append(calls, standby)
		if !standby {
			return nil
		}
		if meanwhile != nil {
			go meanwhile()
		}
		_, err := b.db.Exec(ctx, statement)
		return err
	})
	require.NoError(b, err)
	require.True(b, asOf.IsZero())
	require.Equal(b, []bool{true, false}, calls)
	require.Equal(b, before+1, b.count(replica.Repeated))
}

const slow = "SELECT pg_sleep(600), n FROM reads"

// running returns a statement that waits until a backend runs the statement slow, and then calls the function does with
// the backend's process id.
func running(does string) string {
	return "DO $$ BEGIN WHILE (SELECT count(" + does + "(pid)) = 0 FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep(600)%' " +
		"AND wait_event = 'PgSleep') LOOP PERFORM pg_sleep(0.01), pg_stat_clear_snapshot(); END LOOP; END $$"
}

// TestReplica_ChoosesServer checks which server answers reads while the standby lags, lacks changes, refuses
// statements, hangs and is promoted. The steps share two servers. The last step promotes the standby.
func TestReplica_ChoosesServer(t *testing.T) {
	t.Parallel()
	b := setup(t, direct)
	b.await(true)

	t.Log("an idle primary: the data is of now")
	since := time.Now()
	require.Eventually(t, func() bool {
		standby, asOf := b.read("kim")
		return standby && asOf.After(since)
	}, time.Minute, 20*time.Millisecond)

	t.Log("an actor's reads have the actor's last change")
	var another *replica.Replica
	require.Eventually(t, func() bool {
		var err error
		another, err = replica.Open(t.Context(), b.config)
		require.NoError(t, err)
		t.Cleanup(another.Close)
		ok, _ := another.Status()
		return ok
	}, time.Minute, 20*time.Millisecond)
	b.servers.Pause()
	b.exec("INSERT INTO reads VALUES (2)")
	b.replica.Acted(t.Context(), "kim")
	own, other := 0, 0
	for actor, n := range map[string]*int{"kim": &own, "lee": &other} {
		_, err := b.replica.Read(t.Context(), []string{actor}, func(ctx context.Context) error {
			return b.db.QueryRow(ctx, "SELECT count(*) FROM reads").Scan(n)
		})
		require.NoError(t, err)
	}
	require.Equal(t, 2, own)
	require.Equal(t, 1, other, "another viewer may see the data before")
	require.False(t, answers(t, b.db, b.replica, "lee", "kim"), "an answer for both has the changes of both")
	require.True(t, answers(t, b.db, another, "lee"))
	require.False(t, answers(t, b.db, another, "kim"), "another process knows of the change, too")

	t.Log("a standby that lags too much")
	b.maxLag.Store(int64(2 * time.Second))
	b.await(false)
	require.Positive(t, b.count(replica.Lag))
	ok, detail := b.replica.Status()
	require.False(t, ok)
	require.Regexp(t, `lags .* and the policy allows 2s; the primary answers`, detail)
	b.maxLag.Store(int64(time.Hour))
	b.servers.Resume()
	b.await(true)

	t.Log("a mask holds at once")
	b.servers.Pause()
	b.exec("SELECT dlq.protect('{notes}', '{}')")
	require.False(t, answers(t, b.db, b.replica, "lee"))
	require.Positive(t, b.count(replica.Masking))
	b.servers.Resume()
	b.await(true)
	require.Eventually(t, func() bool { standby, _ := b.read("kim"); return standby }, time.Minute, 20*time.Millisecond)

	t.Log("statements that the standby cancels or refuses are repeated on the primary")
	b.servers.Exec("ALTER SYSTEM SET max_standby_streaming_delay = 0")
	b.servers.Exec("SELECT pg_reload_conf()")
	b.repeats(slow, func() { // a recovery conflict: 40001
		b.servers.Exec(running("abs"))
		_, _ = b.pool.Exec(t.Context(), "TRUNCATE reads; INSERT INTO reads VALUES (3)")
	})
	b.repeats(slow, func() { b.servers.Exec(running("pg_cancel_backend")) })    // 57014
	b.repeats(slow, func() { b.servers.Exec(running("pg_terminate_backend")) }) // 57P01
	b.repeats("INSERT INTO reads VALUES (4)", nil)                              // 25006: the standby writes nothing

	t.Log("what the standby does not find is looked for on the primary")
	b.await(true)
	repeated := b.count(replica.Repeated)
	asOf, err := b.replica.Read(t.Context(), []string{"kim"}, func(ctx context.Context) error {
		standby := false
		if err := b.db.QueryRow(ctx, "SELECT pg_is_in_recovery()").Scan(&standby); err != nil {
			return err
		}
		if standby {
			return pgx.ErrNoRows
		}
		return nil
	})
	require.NoError(t, err)
	require.True(t, asOf.IsZero())
	require.Equal(t, repeated+1, b.count(replica.Repeated))

	t.Log("a lock that a paused replay holds is not waited for")
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "TRUNCATE reads")
	require.NoError(t, err)
	b.exec("CREATE TABLE more ()") // the commit also flushes the WAL record of TRUNCATE's lock
	b.servers.CatchUp()
	b.servers.Pause()
	require.NoError(t, tx.Commit(t.Context()))
	b.repeats("SELECT n FROM reads", nil)
	b.servers.Resume()

	t.Log("a timeout that the read expects is no failure")
	b.await(true)
	calls := 0
	_, err = b.replica.Read(t.Context(), []string{"kim"}, func(ctx context.Context) error {
		calls++
		err := pgx.BeginFunc(ctx, postgres.ReadPool(ctx, b.pool), func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SET LOCAL statement_timeout = 1; SELECT pg_sleep(600)")
			return err
		})
		require.ErrorContains(t, err, "57014")
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, 1, calls)

	t.Log("a standby that hangs, with a read under way")
	b.exec("INSERT INTO reads VALUES (5)")
	b.servers.CatchUp()
	b.repeats(slow, func() {
		b.servers.Exec(running("abs"))
		b.servers.Hang()
	})
	b.await(false)
	_, detail = b.replica.Status()
	require.Equal(t, "does not answer; the primary answers its reads", detail)
	b.servers.Answer()
	b.await(true)

	t.Log("a standby that was promoted")
	b.servers.Promote()
	require.Eventually(t, func() bool {
		ok, detail = b.replica.Status()
		return !ok && strings.Contains(detail, "not a standby of the database: it was promoted")
	}, time.Minute, 20*time.Millisecond)
	require.False(t, answers(t, b.db, b.replica, "kim"))
	promoted, err := replica.Open(t.Context(), b.config)
	require.NoError(t, err, "dlqd starts")
	defer promoted.Close()
	require.False(t, answers(t, b.db, promoted, "kim"))
}

// TestOpen_RefusesOtherDatabases checks that Open refuses the URL of another server or of another database. Open
// accepts the primary itself and a server that does not answer, but no read goes to them.
func TestOpen_RefusesOtherDatabases(t *testing.T) {
	t.Parallel()
	b := setup(t, direct)
	other := postgrestest.URL(t)
	for url, why := range map[string]string{
		other: "its system identifier is",
		strings.Replace(b.servers.StandbyURL, "/replicated", "/postgres", 1): "its oid is",
	} {
		config := b.config
		config.URL = url
		_, err := replica.Open(t.Context(), config)
		require.ErrorIs(t, err, postgres.ErrOtherDatabase)
		require.ErrorContains(t, err, why)
	}
	for _, url := range []string{b.servers.PrimaryURL, "postgres://absent@127.0.0.1:1/none?connect_timeout=1"} {
		config := b.config
		config.URL = url
		r, err := replica.Open(t.Context(), config)
		require.NoError(t, err)
		defer r.Close()
		ok, _ := r.Status()
		require.False(t, ok)
		require.False(t, answers(t, b.db, r))
	}
}

// TestReplica_RefusesOtherTimelines tries to read from the old primary after a failover. The old primary runs as a
// standby again, but it does not follow the new primary, and its position in the WAL is ahead of the new primary's.
func TestReplica_RefusesOtherTimelines(t *testing.T) {
	t.Parallel()
	servers := postgrestest.NewReplicated(t, false)
	old := servers.Migrate()
	servers.Lag()
	_, err := old.Exec(t.Context(), "CREATE TABLE lost AS SELECT repeat('x', 1000) FROM generate_series(1, 10000)")
	require.NoError(t, err)
	servers.Fail()
	primary := postgrestest.Open(t, servers.StandbyURL)
	config := replica.Config{
		Primary: primary, Schemas: postgres.DefaultSchemas(), URL: servers.Return(),
		MaxLag: func() time.Duration { return time.Hour }, Logger: slog.New(slog.DiscardHandler),
	}
	require.Eventually(t, func() bool { // on a busy machine, the server may not answer in time
		r, err := replica.Open(t.Context(), config)
		require.NoError(t, err)
		defer r.Close()
		ok, detail := r.Status()
		require.False(t, ok)
		require.False(t, answers(t, postgres.DefaultSchemas().Rendered(primary), r, "kim"))
		return strings.Contains(detail, "it is on timeline 1, and the database is on timeline 2")
	}, 2*time.Minute, 20*time.Millisecond)
}

// TestReplica_ReadsThroughPooler reads through a PgBouncer that pools transactions. dlqd's settings then apply to each
// statement instead of the session.
func TestReplica_ReadsThroughPooler(t *testing.T) {
	t.Parallel()
	b := setup(t, (*postgrestest.Replicated).Pooler)
	b.await(true)
	for _, ctx := range []context.Context{t.Context(), postgres.AsReader(t.Context())} {
		var settings string
		asOf, err := b.replica.Read(ctx, []string{"kim"}, func(ctx context.Context) error {
			return b.db.QueryRow(ctx, `SELECT concat_ws(' ', current_setting('row_security'), current_setting('jit'),
				current_setting('lock_timeout'))`).Scan(&settings)
		})
		require.NoError(t, err)
		require.False(t, asOf.IsZero())
		require.Equal(t, "off off 1s", settings)
	}
}
