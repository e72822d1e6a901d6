package process_test

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/process"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// counted counts the queries to a database.
type counted struct {
	*pgxpool.Pool

	queries atomic.Int64
}

func (c *counted) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	c.queries.Add(1)
	return c.Pool.Query(ctx, sql, args...)
}

type bundle struct {
	*testing.T

	db       *counted
	rendered postgres.DB
	queues   *process.Queues
}

func setup(t *testing.T) *bundle {
	t.Helper()
	b := &bundle{T: t, db: &counted{Pool: postgrestest.Pool(t)}}
	b.rendered = postgres.DefaultSchemas().Rendered(b.db)
	b.queues = process.NewQueues(b.rendered)
	return b
}

func (b *bundle) start(queues ...string) *process.Process {
	b.Helper()
	p := process.New(process.Config{
		DB: b.rendered, Name: "host/1", Version: "1", Parts: []string{"process"}, Queues: func() []string { return queues },
	})
	require.NoError(b, p.Once(b.Context()))
	return p
}

func (b *bundle) exec(sql string) {
	b.Helper()
	_, err := b.db.Exec(b.Context(), sql)
	require.NoError(b, err)
}

func (b *bundle) lookup(queue string) (process.Work, []string) {
	b.Helper()
	work, worked, err := b.queues.Lookup(b.Context(), queue)
	require.NoError(b, err)
	return work, worked
}

func TestQueues_LookupFollowsProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	work, worked := b.lookup("mail")
	require.Equal(t, process.Unworked, work)
	require.Empty(t, worked)

	first := b.start("mail", "push")
	b.start("billing")
	work, _ = b.lookup("mail")
	require.Equal(t, process.Worked, work, "the database is queried again before a queue counts as unworked")
	work, worked = b.lookup("other")
	require.Equal(t, process.Unworked, work)
	require.Equal(t, []string{"billing", "mail", "push"}, worked)

	require.NoError(t, first.Stop(t.Context()))
	require.NoError(t, first.Once(t.Context()), "a late heartbeat does not undo the stop")
	b.queues = process.NewQueues(b.rendered)
	work, worked = b.lookup("mail")
	require.Equal(t, process.Away, work)
	require.Equal(t, []string{"billing"}, worked)

	b.exec("UPDATE dlq.processes SET seen_at = now() - interval '2 minutes' WHERE 'billing' = ANY (queues)")
	b.queues = process.NewQueues(b.rendered)
	work, worked = b.lookup("billing")
	require.Equal(t, process.Away, work, "its process died")
	require.Empty(t, worked)

	b.exec("UPDATE dlq.processes SET seen_at = now() - interval '20 minutes'")
	work, _ = b.lookup("mail")
	require.Equal(t, process.Unworked, work, "too long ago to be a restart")

	second := b.start("mail")
	work, _ = b.lookup("mail")
	require.Equal(t, process.Worked, work)
	b.exec("UPDATE dlq.processes SET seen_at = now() - interval '25 hours' WHERE stopped_at IS NOT NULL")
	require.NoError(t, second.Once(t.Context()))
	var n int
	require.NoError(t, b.db.QueryRow(t.Context(), "SELECT count(*) FROM dlq.processes").Scan(&n))
	require.Equal(t, 2, n, "processes that ended a day ago are deleted")
}

func TestQueues_ConcurrentLookupsShareAQuery(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.start("mail")
	const calls = 200
	answers := make(chan process.Work, calls)
	for range calls {
		go func() {
			work, _, _ := b.queues.Lookup(context.Background(), "mail")
			answers <- work
		}()
	}
	for range calls {
		require.Equal(t, process.Worked, <-answers)
	}
	require.Less(t, b.db.queries.Load(), int64(calls/2))
}

func TestQueues_ErrorsAreNotCached(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("ALTER TABLE dlq.processes RENAME TO elsewhere")
	_, _, err := b.queues.Lookup(t.Context(), "mail")
	require.ErrorContains(t, err, `look up which process works queue "mail"`)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err = b.queues.Lookup(ctx, "mail")
	require.Error(t, err)
	b.exec("ALTER TABLE dlq.elsewhere RENAME TO processes")
	b.start("mail")
	work, _ := b.lookup("mail")
	require.Equal(t, process.Worked, work, "the error is not cached")
}
