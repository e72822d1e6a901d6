package group_test

import (
	"context"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

type bundle struct {
	*testing.T

	pool  *pgxpool.Pool
	store *group.Store
	jobs  int
}

func setup(t *testing.T) *bundle {
	t.Helper()
	pool := postgrestest.Pool(t)
	return &bundle{T: t, pool: pool, store: &group.Store{Store: deadletter.NewStore(pool, postgres.DefaultSchemas())}}
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err, sql)
}

func (b *bundle) text(sql string, args ...any) (text string) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), "SELECT coalesce(("+sql+")::text, '')", args...).Scan(&text), sql)
	return text
}

// fail makes a job of a queue fail at the given time, and files the dead letter into a group, as a DLQ worker does.
func (b *bundle) fail(queue, fingerprint string, at time.Time, metadata, attemptedBy string) (id string) {
	b.Helper()
	b.jobs++
	kind := "k" + strconv.Itoa(b.jobs)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state, attempted_by)
		VALUES ($2, '{}', $1, 5, 5, 'running', ARRAY[$3])`, queue, kind, attemptedBy)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = $2, metadata = $3,
		errors = ARRAY[jsonb_build_object('error', 'timed out', 'attempt', attempt)] WHERE kind = $1`, kind, at, metadata)
	b.exec(`SELECT dlq.file_as(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE kind = $1), 'worker:1', NULL,
		'{dlq_manual}', '{manual}', '{outage}', '{r}', ARRAY[$2])`, kind, fingerprint)
	return b.text(`SELECT id FROM dlq.dead_letter_queue WHERE kind = $1`, kind)
}

func (b *bundle) refresh() {
	b.Helper()
	b.exec(postgrestest.RefreshRollups)
}

func (b *bundle) get(queue, fingerprint string) *group.Group {
	b.Helper()
	b.refresh()
	g, err := b.store.Get(b.Context(), queue, fingerprint, 24*time.Hour)
	require.NoError(b, err)
	return g
}

func (b *bundle) set(queue, fingerprint string, change group.Change) int {
	b.Helper()
	n, err := b.store.Set(deadletter.WithOrigin(b.Context(), "API, from a test"), queue, fingerprint, change,
		deadletter.Act{Actor: "kim", Note: "ticket 7"})
	require.NoError(b, err)
	return n
}

// A group is open until it is marked as fixed. A later failure makes it regressed. A mute ends
// automatically.
func TestGroup_StatusFollowsMarks(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail("payments", "aaaa1111", time.Now().Add(-time.Hour), "{}", "a")
	b.refresh()
	status := func(want string, regressed bool) *group.Group {
		t.Helper()
		g := b.get("payments", "aaaa") // a prefix is enough
		require.Equal(t, want, g.Status)
		require.Equal(t, regressed, g.Regressed)
		return g
	}
	g := status(group.Open, false)
	require.EqualValues(t, 1, g.Open)
	require.Equal(t, "timed out", *g.Title)
	require.Len(t, g.Trend, 25)
	require.EqualValues(t, 1, g.InWindow)

	b.set("payments", "aaaa1111", group.Change{Note: new("the bank is fixing it"), Status: group.Fixed})
	g = status(group.Fixed, false)
	require.Equal(t, "kim", *g.FixedBy)
	require.Equal(t, "the bank is fixing it", *g.Note)
	b.fail("payments", "aaaa1111", time.Now().Add(-time.Minute), "{}", "a") // failed before the mark, filed after it
	status(group.Fixed, false)
	b.fail("payments", "aaaa1111", time.Now(), "{}", "a")
	status(group.Regressed, true)

	// A mute until a time.
	b.set("payments", "aaaa1111", group.Change{Status: group.Muted, MuteUntil: new(time.Now().Add(time.Hour))})
	g = status(group.Muted, true)
	require.Equal(t, "kim", *g.MutedBy)
	b.exec("UPDATE dlq.group_marks SET mute_until = now() - interval '1 second'")
	require.Nil(t, status(group.Regressed, true).MutedAt, "the mute ended automatically")

	// A mute until a number of failures or a time.
	b.set("payments", "aaaa1111", group.Change{MuteFailures: new(int64(2)), MuteUntil: new(time.Now().Add(time.Hour))})
	require.EqualValues(t, 2, *status(group.Muted, true).MuteLeft)
	muted, err := b.store.MutedEntries(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 3, muted)
	b.fail("payments", "aaaa1111", time.Now(), "{}", "a")
	require.EqualValues(t, 1, *status(group.Muted, true).MuteLeft)
	marks, err := b.store.Marks(t.Context(), []group.Key{
		{Queue: "payments", Fingerprint: "aaaa1111"},
		{Queue: "payments", Fingerprint: "none"},
	})
	require.NoError(t, err)
	require.Equal(t, map[group.Key]group.Mark{{Queue: "payments", Fingerprint: "aaaa1111"}: {Muted: true, Fixed: true}},
		marks)
	b.fail("payments", "aaaa1111", time.Now(), "{}", "a")
	status(group.Regressed, true)
	muted, err = b.store.MutedEntries(t.Context())
	require.NoError(t, err)
	require.Zero(t, muted)

	b.set("payments", "aaaa1111", group.Change{Status: group.Open})
	require.Nil(t, status(group.Open, false).FixedAt)
	require.Equal(t, "the bank is fixing it", *b.get("payments", "aaaa1111").Note, "fields that were not changed stay")

	require.Equal(t, "noted, marked as fixed|muted|muted|opened",
		b.text(`SELECT string_agg(act, '|' ORDER BY at, id) FROM dlq.acts WHERE subject = 'group payments aaaa1111'
			AND actor = 'kim' AND note = 'ticket 7' AND origin = 'API, from a test'`))
	require.Equal(t, "open 5", b.text("SELECT status || ' ' || open FROM dlq.groups"), "through psql")

	// Invalid changes: no such group, an ambiguous prefix, and empty or contradictory changes.
	b.fail("payments", "aaaa2222", time.Now(), "{}", "a")
	b.refresh()
	for _, c := range []struct {
		fingerprint string
		change      group.Change
		kind        error
	}{
		{"bbbb", group.Change{Status: group.Open}, deadletter.ErrNotFound},
		{"aaa", group.Change{Status: group.Open}, deadletter.ErrNotFound},
		{"aaaa", group.Change{Status: group.Open}, deadletter.ErrInvalid},
		{"aaaa1111", group.Change{}, deadletter.ErrInvalid},
		{"aaaa1111", group.Change{Status: group.Muted}, deadletter.ErrInvalid},
		{"aaaa1111", group.Change{MuteUntil: new(time.Now().Add(-time.Hour))}, deadletter.ErrInvalid},
		{"aaaa1111", group.Change{Status: group.Fixed, MuteFailures: new(int64(3))}, deadletter.ErrInvalid},
		{"aaaa1111", group.Change{Status: "gone"}, deadletter.ErrInvalid},
		{"aaaa1111", group.Change{MuteFailures: new(int64(0))}, deadletter.ErrInvalid},
	} {
		_, err := b.store.Set(t.Context(), "payments", c.fingerprint, c.change, deadletter.Act{Actor: "kim"})
		require.ErrorIs(t, err, c.kind, "%+v", c)
	}
}

// The owner of a group becomes the assignee of its open entries, and of each entry that joins the group later by any
// path. If an operator assigns a single entry later, that assignment stays.
func TestGroup_AssignsEntriesToOwner(t *testing.T) {
	t.Parallel()
	b := setup(t)
	now := time.Now()
	first, closed, elsewhere := b.fail("payments", "aaaa1111", now, "{}", "a"),
		b.fail("payments", "aaaa1111", now, "{}", "a"), b.fail("mails", "aaaa1111", now, "{}", "a")
	b.exec("SELECT dlq.discard($1)", closed)
	b.refresh()
	require.Equal(t, 1, b.set("payments", "aaaa1111", group.Change{Owner: new("anna")}))
	assignee := func(id string) string {
		return b.text("SELECT assigned_to FROM dlq.dead_letter_queue WHERE id = $1", id)
	}
	require.Equal(t, []string{"anna", "", ""}, []string{assignee(first), assignee(closed), assignee(elsewhere)})
	joined := b.fail("payments", "aaaa1111", now, "{}", "a")
	require.Equal(t, "anna", assignee(joined))
	require.Equal(t, "anna", *b.get("payments", "aaaa1111").Owner)

	b.exec("SELECT dlq.assign($1, 'ben')", joined)
	require.Equal(t, "2", b.text("SELECT dlq.assign_group('payments', 'aaaa1111', 'cleo', 'kim')"), "through psql")
	require.Equal(t, []string{"cleo", "cleo"}, []string{assignee(first), assignee(joined)})
	require.Equal(t, 2, b.set("payments", "aaaa1111", group.Change{Owner: new("")}))
	require.Empty(t, assignee(first))
	require.Empty(t, assignee(b.fail("payments", "aaaa1111", now, "{}", "a")))
	require.Equal(t, "assigned to anna|assigned to cleo|assigned to nobody",
		b.text("SELECT string_agg(act, '|' ORDER BY at, id) FROM dlq.acts WHERE subject LIKE 'group %'"))
	require.Equal(t, "assigned to anna|assigned to cleo|assigned to nobody",
		b.text(`SELECT string_agg(reason, '|' ORDER BY at, id) FROM dlq.dead_letter_transitions WHERE entry_id = $1
			AND reason LIKE 'assigned%'`, first))
}

// A list of groups has pages, an order, and filters by queue, status and owner.
func TestGroup_ListPagesAndFilters(t *testing.T) {
	t.Parallel()
	b := setup(t)
	now := time.Now()
	for i := range 7 {
		for range 7 - i {
			b.fail("payments", "group-"+strconv.Itoa(i), now.Add(-time.Duration(i)*time.Minute), "{}", "a")
		}
	}
	b.fail("mails", "group-0", now, "{}", "a")
	b.refresh()
	b.set("payments", "group-1", group.Change{Owner: new("anna")})
	b.set("payments", "group-2", group.Change{Status: group.Fixed})
	list := func(f group.Filter) (names []string) {
		t.Helper()
		f.Over, f.Limit = 24*time.Hour, 3
		if f.Order == "" {
			f.Order = "latest"
		}
		for {
			page, next, err := b.store.List(t.Context(), f)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page), 3)
			for _, g := range page {
				names = append(names, g.Queue[:1]+g.Fingerprint[6:])
			}
			if f.Cursor = next; next == "" {
				return names
			}
		}
	}
	require.Equal(t, []string{"m0", "p0", "p1", "p2", "p3", "p4", "p5", "p6"}, list(group.Filter{}))
	require.Equal(t, []string{"p0", "p1", "p2", "p3", "p4", "p5", "m0", "p6"}, list(group.Filter{Order: "open"}))
	require.Equal(t, []string{"p0", "p1", "p2", "p3", "p4", "p5", "p6"},
		list(group.Filter{Queue: "payments", Order: "failures"}))
	require.Equal(t, []string{"p1", "m0", "p0", "p2", "p3", "p4", "p5", "p6"}, list(group.Filter{Order: "owner"}))
	require.Equal(t, []string{"m0", "p0", "p1", "p3", "p4", "p5", "p6", "p2"}, list(group.Filter{Order: "status"}))
	b.exec(`UPDATE dlq.failure_groups SET first_seen = now() - '1 hour'::interval * (7 - right(fingerprint, 1)::integer)`)
	require.Equal(t, []string{"p6", "p5", "p4", "p3", "p2", "p1", "m0", "p0"}, list(group.Filter{Order: "newest"}))
	require.Equal(t, []string{"p1"}, list(group.Filter{Owner: new("anna")}))
	require.Len(t, list(group.Filter{Owner: new("")}), 7)
	require.Equal(t, []string{"p2"}, list(group.Filter{Statuses: []string{group.Fixed, group.Regressed}}))
	require.Empty(t, list(group.Filter{HasOpen: new(false)}))
	require.Empty(t, list(group.Filter{ErrorClass: "business"}))
	for _, cursor := range []string{"x", "WzEsMl0", "e30"} {
		_, _, err := b.store.List(t.Context(), group.Filter{Order: "latest", Over: time.Hour, Limit: 3, Cursor: cursor})
		require.ErrorIs(t, err, deadletter.ErrInvalid)
	}
	for _, limit := range []int{0, -1} {
		_, _, err := b.store.List(t.Context(), group.Filter{Order: "latest", Over: time.Hour, Limit: limit})
		require.ErrorIs(t, err, deadletter.ErrInvalid, "%d", limit)
	}
	// A scope limited to queues shows the groups of these queues. A scope limited to kinds is rejected.
	ctx := postgres.WithScope(t.Context(), `[{"queues": ["mail*"]}]`)
	page, _, err := b.store.List(ctx, group.Filter{Order: "latest", Over: time.Hour, Limit: 10})
	require.NoError(t, err)
	require.Len(t, page, 1)
	_, err = b.store.Get(ctx, "payments", "group-0", time.Hour)
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	_, err = b.store.Set(ctx, "payments", "group-0", group.Change{Status: group.Fixed}, deadletter.Act{Actor: "kim"})
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	_, _, err = b.store.List(postgres.WithScope(t.Context(), `[{"kinds": ["k*"]}]`),
		group.Filter{Order: "latest", Over: time.Hour, Limit: 10})
	require.ErrorIs(t, err, deadletter.ErrForbidden)
}

// Shares use the data that the application reported or, if there is none, River's data.
func TestGroup_SharesByHostAndVersion(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const client = "app-2_2026_11_22T10_00_00_123456"
	b.fail("payments", "aaaa1111", time.Now(), `{"version": "v82", "host": "app-1"}`, client)
	b.fail("payments", "aaaa1111", time.Now(), `{"release": "v82"}`, client)
	b.fail("payments", "aaaa1111", time.Now(),
		`{"dlq:error": {"attempt": 5, "message": "timed out", "context": {"version": "v83"}}}`, client)
	closed := b.fail("payments", "aaaa1111", time.Now(), `{}`, "workers")
	b.exec("SELECT dlq.discard($1)", closed)
	b.refresh()
	shares := func(ctx context.Context) (got []string) {
		t.Helper()
		_, rows, err := b.store.Latest(ctx, &group.Group{Queue: "payments", Fingerprint: "aaaa1111"}, 2)
		require.NoError(t, err)
		for _, s := range rows {
			got = append(got, s.By+" "+s.Name+" "+strconv.FormatInt(s.Entries, 10))
			require.InDelta(t, float64(s.Entries)/4, s.Share, 0.001)
		}
		return got
	}
	require.Equal(t, []string{"host app-2 2", "host app-1 1", "host workers 1", "version v82 2", "version v83 1"},
		shares(t.Context()))
	require.Equal(t, []string{"host app-2 3", "host workers 1"}, shares(postgres.AsReader(t.Context())),
		"a reader sees neither the error context nor metadata")
	last, _, err := b.store.Latest(t.Context(), &group.Group{Queue: "payments", Fingerprint: "aaaa1111"}, 2)
	require.NoError(t, err)
	require.Len(t, last, 2)
	require.Equal(t, uuid.MustParse(closed), last[0].ID)
	require.Equal(t, "5", b.text("SELECT count(*) FROM dlq.group_shares('payments', 'aaaa1111')"), "through psql")
}

// A process of dlqd delivered the message. The process's River client has the id of the process.
func TestGroup_SharesByHostOfProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	known, gone := uuid.NewString(), uuid.NewString()
	b.exec("INSERT INTO dlq.processes (id, name, version, parts) VALUES ($1, 'app-9/4711', '1', '{process}')", known)
	b.fail("payments", "aaaa1111", time.Now(), "{}", known)
	b.fail("payments", "aaaa1111", time.Now(), "{}", gone)
	b.refresh()
	_, rows, err := b.store.Latest(t.Context(), &group.Group{Queue: "payments", Fingerprint: "aaaa1111"}, 2)
	require.NoError(t, err)
	require.Len(t, rows, 1)
	require.Equal(t, "app-9", rows[0].Name)
}

// Get returns the error of a failed query, for example if the request was cancelled. It must not panic.
func TestGet_ReturnsErrors(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.fail("orders", "group_1", time.Now(), "{}", "host")
	b.refresh()
	b.exec("ALTER FUNCTION dlq.groups RENAME TO groups_elsewhere")
	_, err := b.store.Get(t.Context(), "orders", "group_1", time.Hour)
	require.ErrorContains(t, err, "dlq.groups")
}
