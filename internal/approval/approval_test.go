package approval_test

import (
	"encoding/json"
	"log/slog"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/replay"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// testBundle is a database with three parked dead letters of the queue payments.
type testBundle struct {
	*testing.T

	pool   *pgxpool.Pool
	store  *approval.Store
	runner *approval.Runner
}

func setup(t *testing.T) *testBundle {
	t.Helper()
	pool := postgrestest.Pool(t)
	entries := deadletter.NewStore(pool, postgres.DefaultSchemas())
	b := &testBundle{
		T: t, pool: pool, store: &approval.Store{Store: entries},
		runner: &approval.Runner{Store: entries, Logger: slog.New(slog.DiscardHandler)},
	}
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', jsonb_build_object('n', i),
		'payments', 1, 'running' FROM generate_series(1, 3) i`)
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{\"error\": \"x\"}'::jsonb]")
	b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'test')")
	return b
}

func (b *testBundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

func (b *testBundle) ids() (ids []uuid.UUID) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(),
		"SELECT array_agg(id ORDER BY id) FROM dlq.dead_letter_queue").Scan(&ids))
	return ids
}

func by(name string) approval.Person {
	return approval.Person{Act: deadletter.Act{Actor: name, Note: name + "'s note"}}
}

// request requests a bulk action on the entries that a filter selects.
func (b *testBundle) request(do, filter, actor string) *approval.Approval {
	b.Helper()
	a, existing, err := b.store.Request(b.Context(), approval.Bulk,
		map[string]any{"do": do, "filter": json.RawMessage(filter)}, by(actor))
	require.NoError(b, err)
	require.False(b, existing)
	return a
}

func (b *testBundle) state(id uuid.UUID) string {
	b.Helper()
	a, err := b.store.Get(b.Context(), id)
	require.NoError(b, err)
	return a.State
}

const payments = `{"queue": ["payments"]}`

// An approver sees which work the requested run skips: the work that the policy skipped at the request, except the work
// that the request asks to send. Later policies do not change this.
func TestStore_ShowsWhatARunSkips(t *testing.T) {
	t.Parallel()
	b := setup(t)
	publish := func(skips string) {
		b.exec("SELECT dlq.publish_policy('v', '{}', 'worker:test', $1)", skips)
	}
	publish(`{"stale": {"queues": ["payments"]}, "superseded": {"kinds": {"k": true}}}`)
	a, _, err := b.store.Request(t.Context(), approval.Replay, &replay.Request{
		Filter: json.RawMessage(payments), SkipSuperseded: new(false),
	}, by("kim"))
	require.NoError(t, err)
	publish(`{}`)
	a, err = b.store.Get(t.Context(), a.ID)
	require.NoError(t, err)
	require.Equal(t, policy.Skips{Stale: &policy.Skip{Queues: []string{"payments"}}}, a.Skips)
	require.Equal(t, []string{
		"the policy skips work that is out of date, of queues payments", "the run sends work that a later job has done",
	}, a.SkipTexts())
	raw, err := json.Marshal(a)
	require.NoError(t, err)
	require.Contains(t, string(raw), `"skips":{"stale":{"queues":["payments"]}}`)
	require.Empty(t, b.request("discard", payments, "kim").SkipTexts())
}

func TestStore_ShowsALimitedCallerNoOtherQueue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec("SELECT dlq.publish_policy('v', '{}', 'worker:test', $1)",
		`{"stale": {"queues": ["payments", "secret"]}, "superseded": {"queues": ["secret"], "kinds": {"secret": true}}}`)
	limited, err := access.Limit(t.Context(), access.Scope{{Queues: []string{"payments"}}})
	require.NoError(t, err)
	a, _, err := b.store.Request(limited, approval.Replay, &replay.Request{Filter: json.RawMessage(payments)}, by("kim"))
	require.NoError(t, err)
	require.Equal(t, policy.Skips{Stale: &policy.Skip{Queues: []string{"payments"}}}, a.Skips)
	var inSQL string
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT skips FROM dlq.approvals WHERE id = $1", a.ID).Scan(&inSQL))
	require.JSONEq(t, `{"stale": {"queues": ["payments"]}}`, inSQL)
}

// Once another person has approved a request, it is carried out in the name of the requester.
func TestStore_RequiresASecondPerson(t *testing.T) {
	t.Parallel()
	b := setup(t)
	a := b.request("discard", payments, "kim")
	require.Equal(t, approval.Requested, a.State)
	require.EqualValues(t, 3, a.Entries)
	require.Equal(t, "discard", a.Do())
	require.True(t, a.RequestedBy("KIM", ""))
	require.True(t, a.RequestedBy("lee", "kim"), "a token that the requester created")
	require.False(t, a.RequestedBy("lee", ""))

	again, existing, err := b.store.Request(t.Context(), approval.Bulk,
		map[string]any{"do": "discard", "filter": json.RawMessage(payments)}, by("ann"))
	require.NoError(t, err)
	require.True(t, existing)
	require.Equal(t, a.ID, again.ID)

	require.ErrorIs(t, b.store.Approve(t.Context(), a.ID, 3, by("kim")), deadletter.ErrForbidden)
	require.ErrorIs(t, b.store.Approve(t.Context(), a.ID, 2, by("lee")), deadletter.ErrUnhealthy, "more than were seen")
	worked, err := b.runner.RunOnce(t.Context())
	require.NoError(t, err)
	require.False(t, worked, "it is not approved")
	require.NoError(t, b.store.Approve(t.Context(), a.ID, 3, by("lee")))
	worked, err = b.runner.RunOnce(t.Context())
	require.NoError(t, err)
	require.True(t, worked)
	a, err = b.store.Get(t.Context(), a.ID)
	require.NoError(t, err)
	require.Equal(t, "done", a.State)
	require.EqualValues(t, 3, *a.Changed)
	var actors string
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT string_agg(DISTINCT actor, ',') FROM dlq.dead_letter_transitions
		WHERE to_status = 'dlq_archived'`).Scan(&actors))
	require.Equal(t, "kim", actors)
}

// A request ends when an approver refuses it, its requester withdraws it, or it expires.
func TestStore_EndsRequests(t *testing.T) {
	t.Parallel()
	b := setup(t)
	refused := b.request("discard", payments, "kim")
	require.NoError(t, b.store.Refuse(t.Context(), refused.ID, by("lee").Act))
	require.Equal(t, "refused", b.state(refused.ID))
	require.ErrorIs(t, b.store.Approve(t.Context(), refused.ID, 3, by("lee")), deadletter.ErrNotAllowed)

	withdrawn := b.request("discard", payments, "kim")
	require.Error(t, b.store.Withdraw(t.Context(), withdrawn.ID, by("lee").Act), "only the requester withdraws")
	require.NoError(t, b.store.Withdraw(t.Context(), withdrawn.ID, by("kim").Act))
	require.Equal(t, "withdrawn", b.state(withdrawn.ID))

	late := b.request("discard", payments, "kim")
	b.exec("UPDATE dlq.approvals SET expires_at = now() WHERE id = $1", late.ID)
	require.Equal(t, approval.Expired, b.state(late.ID), "before the runner has written it")
	_, err := b.runner.RunOnce(t.Context())
	require.NoError(t, err)
	expired, err := b.store.List(t.Context(), approval.Expired, 10)
	require.NoError(t, err)
	require.Len(t, expired, 1)
	_, err = b.store.Get(t.Context(), uuid.New())
	require.ErrorIs(t, err, deadletter.ErrNotFound)
}

// ListFor returns the waiting requests that select one of the given entries, latest first, up to a
// limit.
func TestStore_ListsRequestsForEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := b.ids()
	first := b.request("discard", payments, "kim")
	second := b.request("resolve", payments, "kim")
	b.request("discard", `{"queue": ["mails"]}`, "kim")
	list, err := b.store.ListFor(t.Context(), ids[:2], 50)
	require.NoError(t, err)
	require.Len(t, list, 2)
	require.Equal(t, []uuid.UUID{second.ID, first.ID}, []uuid.UUID{list[0].ID, list[1].ID})
	require.ElementsMatch(t, ids[:2], list[0].Selects)
	list, err = b.store.ListFor(t.Context(), ids, 1)
	require.NoError(t, err)
	require.Len(t, list, 1)
	require.Equal(t, second.ID, list[0].ID)
}

// A request that was made with SQL and cannot be decoded fails, and the next request is executed. If a process dies,
// another one executes its request after the lease has ended.
func TestRunner_GoesOnAfterAFailure(t *testing.T) {
	t.Parallel()
	b := setup(t)
	bad := b.request("discard", payments, "kim")
	require.NoError(t, b.store.Approve(t.Context(), bad.ID, 3, by("lee")))
	b.exec("SELECT FROM dlq.take_approval('1 hour')")
	good := b.request("resolve", payments, "kim")
	require.NoError(t, b.store.Approve(t.Context(), good.ID, 3, by("lee")))
	worked, err := b.runner.RunOnce(t.Context())
	require.NoError(t, err)
	require.True(t, worked)
	require.Equal(t, "done", b.state(good.ID))
	require.Equal(t, approval.Approved, b.state(bad.ID), "another process has it")
	b.exec("UPDATE dlq.approvals SET taken_until = now(), request = '{\"do\": 7}' WHERE id = $1", bad.ID)
	worked, err = b.runner.RunOnce(t.Context())
	require.NoError(t, err)
	require.True(t, worked)
	failed, err := b.store.Get(t.Context(), bad.ID)
	require.NoError(t, err)
	require.Equal(t, "failed", failed.State)
	require.Contains(t, failed.Problem, "cannot be decoded")
}

// If the database was restored, an approved request may have been carried out after the backup. So the request waits
// for an operator.
func TestRunner_WaitsInARestoredDatabase(t *testing.T) {
	t.Parallel()
	b := setup(t)
	request := b.request("discard", payments, "kim")
	require.NoError(t, b.store.Approve(t.Context(), request.ID, 3, by("lee")))
	b.exec("SELECT dlq.hold_restored('ann', 'the snapshot of 04:00')")
	worked, err := b.runner.RunOnce(t.Context())
	require.NoError(t, err)
	require.False(t, worked)
	require.Equal(t, approval.Approved, b.state(request.ID))
	b.exec("SELECT dlq.resume_restored('ann', 'compared')")
	worked, err = b.runner.RunOnce(t.Context())
	require.NoError(t, err)
	require.True(t, worked)
	require.Equal(t, "done", b.state(request.ID))
}
