package deadletter_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// undoBundle is a database with dead letters that are filed, decided and pending.
type undoBundle struct {
	*testing.T

	pool  *pgxpool.Pool
	store *deadletter.Store
}

func setupUndo(t *testing.T) *undoBundle {
	t.Helper()
	pool := postgrestest.Pool(t)
	return &undoBundle{T: t, pool: pool, store: deadletter.NewStore(pool, postgres.DefaultSchemas())}
}

func (b *undoBundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err, sql)
}

// createEntries creates n pending dead letters of a queue that wait for a condition.
func (b *undoBundle) createEntries(queue string, n int) (ids []uuid.UUID) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state, tags) SELECT 'k', '{}', $1, 1, 1,
		'running', '{first}' FROM generate_series(1, $2)`, queue, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'`)
	b.exec(`SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))`)
	b.exec(`UPDATE dlq.dead_letter_queue SET strategy = 'conditional', rule = 'outages', error_class = 'outage',
		next_retry_at = '2030-01-01Z', waiting_for = 'condition: breaker', move = '{"actor": "worker:1", "reason": "judged"}'
			WHERE queue = $1`, queue)
	require.NoError(b, b.pool.QueryRow(b.Context(), `SELECT array_agg(id ORDER BY id) FROM dlq.dead_letter_queue
		WHERE queue = $1`, queue).Scan(&ids))
	return ids
}

// state returns as text all fields of an entry that an operation can change.
func (b *undoBundle) state(id uuid.UUID) (text string) {
	b.Helper()
	require.NoError(b, b.pool.QueryRow(b.Context(), `SELECT concat_ws(' ', status, strategy, rule,
		next_retry_at AT TIME ZONE 'UTC', waiting_for, parked_by, assigned_to, tags, notes) FROM dlq.dead_letter_queue
			WHERE id = $1`, id).Scan(&text))
	return text
}

func (b *undoBundle) bulk(action, filter string, also deadletter.Bulk) (operation uuid.UUID, changed int) {
	b.Helper()
	also.Action, also.Filter = action, json.RawMessage(filter)
	also.Act.Actor, also.Act.Operation = "kim", deadletter.NewOperation()
	_, changed, err := b.store.Bulk(deadletter.WithOrigin(b.Context(), "API, from a test"), also)
	require.NoError(b, err)
	return also.Act.Operation, changed
}

func (b *undoBundle) undo(operation uuid.UUID) *deadletter.Undone {
	b.Helper()
	undone, err := b.store.Undo(deadletter.WithOrigin(b.Context(), "API, from a test"), operation,
		deadletter.Act{Actor: "anna", Note: "a mistake"})
	require.NoError(b, err)
	return undone
}

// Undo reverts every kind of operation. It skips entries that have changed since the operation.
func TestUndo_RevertsEveryAction(t *testing.T) {
	t.Parallel()
	b := setupUndo(t)
	other := b.createEntries("mails", 1)[0]
	for i, c := range []struct {
		action string
		before string // SQL, for the entry $1
		also   deadletter.Bulk
		after  string // state of a reverted entry; empty: the state before the operation
		moved  string // SQL that changes an entry after the operation
	}{
		{
			"discard", "",
			deadletter.Bulk{Act: deadletter.Act{Note: "gone"}},
			"dlq_manual manual outages anna {first} a mistake", "SELECT dlq.reopen($1)",
		},
		{
			"expire", "",
			deadletter.Bulk{Act: deadletter.Act{Note: "too late"}},
			"dlq_manual manual outages anna {first} a mistake", "SELECT dlq.reopen($1)",
		},
		{
			"resolve", "SELECT dlq.park($1, 'ben')",
			deadletter.Bulk{},
			"dlq_manual manual outages anna {first} a mistake",
			"SELECT dlq.reopen($1)",
		},
		{
			"park", "SELECT dlq.note($1, 'before')",
			deadletter.Bulk{Act: deadletter.Act{Note: "wait"}},
			"",
			"SELECT dlq.unpark($1)",
		},
		{
			"unpark", "SELECT dlq.park($1, 'ben', 'why')",
			deadletter.Bulk{Act: deadletter.Act{Note: "go"}},
			"",
			"SELECT dlq.park($1)",
		},
		{"assign", "SELECT dlq.assign($1, 'ben')", deadletter.Bulk{Assignee: "cleo"}, "", "SELECT dlq.assign($1, 'dan')"},
		{
			"assign", "",
			deadletter.Bulk{Assignee: "cleo", Act: deadletter.Act{Note: "yours"}},
			"",
			"SELECT dlq.assign($1, NULL)",
		},
		{
			"tag", "",
			deadletter.Bulk{Tags: []string{"first", "bank"}},
			"",
			"UPDATE dlq.dead_letter_queue SET tags = '{first}' WHERE id = $1",
		},
		{
			"note", "SELECT dlq.note($1, 'before')",
			deadletter.Bulk{Act: deadletter.Act{Note: "after"}},
			"",
			"SELECT dlq.note($1, 'later')",
		},
	} {
		t.Run(fmt.Sprint(i, " ", c.action), func(t *testing.T) {
			queue := fmt.Sprint("payments", i)
			filter := fmt.Sprintf(`{"queue": %q}`, queue)
			ids := b.createEntries(queue, 3)
			if c.before != "" {
				for _, id := range ids {
					b.exec(c.before, id)
				}
			}
			was, elsewhere := b.state(ids[0]), b.state(other)
			operation, changed := b.bulk(c.action, filter, c.also)
			require.Equal(t, 3, changed)
			operated := b.state(ids[0])
			require.NotEqual(t, was, operated)
			b.exec(c.moved, ids[2]) // after the operation
			moved := b.state(ids[2])

			undone := b.undo(operation)
			require.Equal(t, 3, undone.Looked)
			require.Equal(t, 2, undone.Changed)
			after := c.after
			if after == "" {
				after = was
			}
			require.Equal(t, after, b.state(ids[0]))
			require.Equal(t, after, b.state(ids[1]))
			require.Equal(t, moved, b.state(ids[2]), "it has moved on since")
			require.Equal(t, elsewhere, b.state(other))
			status, _, _ := strings.Cut(after, " ")
			require.Equal(t, map[string]int64{status: 2}, undone.Became)

			again := b.undo(operation)
			require.Zero(t, again.Changed, "an operation is undone once")
			_, err := b.store.Undo(t.Context(), undone.Operation, deadletter.Act{Actor: "kim"})
			require.ErrorIs(t, err, deadletter.ErrNotAllowed, "an undo cannot be undone")

			// Both the operation and its undo can be read back.
			o, touched, err := b.store.Operation(t.Context(), operation, nil, 10)
			require.NoError(t, err)
			require.Equal(t, c.action, o.Action)
			require.JSONEq(t, filter, string(o.Filter))
			require.Equal(t, []any{"kim", "API, from a test", int64(3), int64(3)}, []any{o.Actor, o.Origin, o.Looked, o.Changed})
			require.Len(t, touched, 3)
			o, touched, err = b.store.Operation(t.Context(), undone.Operation, nil, 10)
			require.NoError(t, err)
			require.Equal(t, operation, *o.Undoes)
			require.Equal(t, map[string]int64{"it has moved on since": 1}, o.Unchanged)
			require.Equal(t, []any{"undo", "anna", int64(3), int64(2)}, []any{o.Action, o.Actor, o.Looked, o.Changed})
			require.Len(t, touched, 3)
			require.False(t, touched[2].Changed)
			rows, err := b.store.Audit(t.Context(), deadletter.AuditFilter{Operation: undone.Operation.String()}, 10,
				deadletter.AuditCursor{})
			require.NoError(t, err)
			require.Len(t, rows, 2)
		})
	}
}

// An operation of many batches is read page by page and undone, although it could not change some of its entries. The
// same holds for operations in psql.
func TestUndo_RevertsManyBatches(t *testing.T) {
	t.Parallel()
	b := setupUndo(t)
	ids := b.createEntries("payments", 1203)
	b.exec("SELECT dlq.act_on('park', $1, 'ben')", ids[1200:])
	operation, changed := b.bulk("park", `{"queue": "payments"}`, deadletter.Bulk{Tags: nil})
	require.Equal(t, 1200, changed)
	o, touched, err := b.store.Operation(t.Context(), operation, nil, 1000)
	require.NoError(t, err)
	require.EqualValues(t, 1203, o.Looked)
	require.Equal(t, map[string]int64{"cannot park from dlq_manual": 3}, o.Unchanged)
	require.Len(t, touched, 1000)
	_, rest, err := b.store.Operation(t.Context(), operation, &touched[999].ID, 1000)
	require.NoError(t, err)
	require.Len(t, rest, 203)
	require.Equal(t, deadletter.Touched{ID: ids[1202], Changed: false, Reason: "cannot park from dlq_manual"}, rest[202])
	undone := b.undo(operation)
	require.Equal(t, []any{1200, 1200, map[string]int64{"dlq_pending": 1200}},
		[]any{undone.Looked, undone.Changed, undone.Became})

	// In psql, each call of dlq.act_where is an operation.
	var done uuid.UUID
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT operation
		FROM dlq.act_where('discard', '{"queue": "payments", "status": "dlq_pending"}', 'kim', p_limit => NULL)`).Scan(&done))
	var back int
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT changed FROM dlq.undo($1)", done).Scan(&back))
	require.Equal(t, 1200, back)
	b.exec("SELECT dlq.discard($1)", ids[0])
	b.exec("SELECT dlq.undo((SELECT id FROM dlq.operations ORDER BY id DESC LIMIT 1))")
	require.True(t, strings.HasPrefix(b.state(ids[0]), "dlq_manual"))

	// A caller with a scope sees and undoes only operations that were limited to that scope or a narrower one. A caller
	// cannot continue another caller's operation.
	_, _, err = b.store.Operation(postgres.WithScope(t.Context(), `[{"queues": ["payments"]}]`), operation, nil, 10)
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	_, err = b.store.Undo(postgres.WithScope(t.Context(), `[{"queues": ["payments"]}]`), operation,
		deadletter.Act{Actor: "dan"})
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	_, err = b.store.Undo(t.Context(), uuid.New(), deadletter.Act{Actor: "dan"})
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	_, _, err = b.store.Bulk(t.Context(), deadletter.Bulk{
		Action: "park", Filter: json.RawMessage(`{"queue": "payments"}`),
		Act: deadletter.Act{Actor: "dan", Operation: operation},
	})
	require.ErrorIs(t, err, deadletter.ErrInvalid)
	purged, n := b.bulk("purge", fmt.Sprintf(`{"ids": [%q]}`, ids[0]), deadletter.Bulk{Force: true})
	require.Equal(t, 1, n)
	_, err = b.store.Undo(t.Context(), purged, deadletter.Act{Actor: "dan"})
	require.ErrorIs(t, err, deadletter.ErrNotAllowed)
}

// An erasure removes personal data from operations. An undo skips erased entries.
func TestUndo_SkipsErasedEntries(t *testing.T) {
	t.Parallel()
	b := setupUndo(t)
	id := b.createEntries("payments", 1)[0]
	b.exec(`UPDATE dlq.dead_letter_queue SET original_event = '{"customer": "cus-4711"}', notes = 'of cus-4711',
		move = '{"actor": "kim"}' WHERE id = $1`, id)
	found, _ := b.bulk("note", `{"payload": {"customer": "cus-4711"}}`,
		deadletter.Bulk{Act: deadletter.Act{Note: "called cus-4711"}})
	assigned, _ := b.bulk("assign", `{"queue": "payments"}`, deadletter.Bulk{Assignee: "cleo"})
	b.exec(`CALL dlq.erase('{"payload": {"customer": "cus-4711"}}', 'request 1', 'kim')`)
	o, _, err := b.store.Operation(t.Context(), found, nil, 10)
	require.NoError(t, err)
	require.JSONEq(t, `{"erased": true}`, string(o.Filter))
	require.Empty(t, o.Note)
	require.Zero(t, b.undo(found).Changed)
	require.Zero(t, b.undo(assigned).Changed)
	o, _, err = b.store.Operation(t.Context(), assigned, nil, 10)
	require.NoError(t, err)
	require.JSONEq(t, `{"queue": "payments"}`, string(o.Filter), "the filter identifies no person")
	var left int
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM dlq.dead_letter_transitions WHERE entry_id = $1
		AND detail::text LIKE '%4711%'`, id).Scan(&left))
	require.Zero(t, left)
}

// An undo does not change a later assignment, unless that assignment was undone itself.
func TestUndo_KeepsLaterAssignments(t *testing.T) {
	t.Parallel()
	b := setupUndo(t)
	b.createEntries("payments", 2)
	first, _ := b.bulk("assign", `{"queue": "payments"}`, deadletter.Bulk{Assignee: "dan"})
	second, _ := b.bulk("assign", `{"queue": "payments"}`, deadletter.Bulk{Assignee: "eve"})
	require.Zero(t, b.undo(first).Changed)
	require.Equal(t, 2, b.undo(second).Changed)
	require.Equal(t, 2, b.undo(first).Changed)
	require.Zero(t, b.undo(first).Changed)
}

// An operation can be undone only once. A second undo does not revert a later action with the same effect.
func TestUndo_IgnoresUndoneOperations(t *testing.T) {
	t.Parallel()
	b := setupUndo(t)
	ids := b.createEntries("payments", 2)
	const payments = `{"queue": "payments"}`
	tagged, _ := b.bulk("tag", payments, deadletter.Bulk{Tags: []string{"bank"}})
	noted, _ := b.bulk("note", payments, deadletter.Bulk{Act: deadletter.Act{Note: "the bank is down"}})
	require.Equal(t, 2, b.undo(noted).Changed)
	require.Equal(t, 2, b.undo(tagged).Changed)
	_, changed := b.bulk("park", payments,
		deadletter.Bulk{Tags: []string{"bank"}, Act: deadletter.Act{Note: "the bank is down"}})
	require.Equal(t, 2, changed)
	parked := b.state(ids[0])
	require.Contains(t, parked, "bank")
	require.Zero(t, b.undo(tagged).Changed)
	require.Zero(t, b.undo(noted).Changed)
	require.Equal(t, parked, b.state(ids[0]))
	require.Equal(t, parked, b.state(ids[1]))
}

// An undo does not change a later note. A later note does not prevent the undo of a park or an unpark, because the
// entry has not moved since.
func TestUndo_KeepsLaterNotes(t *testing.T) {
	t.Parallel()
	for _, action := range []string{"park", "unpark"} {
		b := setupUndo(t)
		id := b.createEntries("payments", 1)[0]
		if action == "unpark" {
			b.exec("SELECT dlq.park($1, 'ben')", id)
		}
		b.exec("SELECT dlq.note($1, 'before')", id)
		was := b.state(id)
		operation, changed := b.bulk(action, `{"queue": "payments"}`,
			deadletter.Bulk{Act: deadletter.Act{Note: "by mistake"}})
		require.Equal(t, 1, changed)
		b.exec("SELECT dlq.note($1, 'the bank called')", id)
		require.Equal(t, 1, b.undo(operation).Changed, action)
		require.Equal(t, strings.Replace(was, "before", "the bank called", 1), b.state(id), action)
	}
}

// The batches of two operations interleave. Undoing the later operation restores the values that the earlier one set.
func TestUndo_RestoresInterleavedOperations(t *testing.T) {
	t.Parallel()
	b := setupUndo(t)
	b.createEntries("mails", 1)
	id := b.createEntries("payments", 1)[0]
	dan, eve := deadletter.NewOperation(), deadletter.NewOperation()
	for _, batch := range []struct {
		operation       uuid.UUID
		assignee, queue string
	}{{dan, "dan", "mails"}, {eve, "eve", "mails"}, {dan, "dan", "payments"}, {eve, "eve", "payments"}} {
		filter := json.RawMessage(fmt.Sprintf(`{"queue": %q}`, batch.queue))
		_, changed, err := b.store.Bulk(t.Context(), deadletter.Bulk{
			Action: "assign", Assignee: batch.assignee, Filter: filter,
			Act: deadletter.Act{Actor: "kim", Operation: batch.operation},
		})
		require.NoError(t, err)
		require.Equal(t, 1, changed)
	}
	require.Contains(t, b.state(id), " eve ")
	require.Zero(t, b.undo(dan).Changed, "the later operation still applies")
	require.Equal(t, 2, b.undo(eve).Changed)
	require.Contains(t, b.state(id), " dan ")
}

// An operation whose changes all have the same timestamp is undone page by page, for any page size.
func TestUndo_PagesThroughEqualTimestamps(t *testing.T) {
	t.Parallel()
	b := setupUndo(t)
	ids := b.createEntries("payments", 5)
	operation, changed := b.bulk("park", `{"queue": "payments"}`, deadletter.Bulk{})
	require.Equal(t, 5, changed)
	b.exec("ALTER TABLE dlq.dead_letter_transitions DISABLE TRIGGER USER")
	b.exec("UPDATE dlq.dead_letter_transitions SET at = (SELECT o.last_at FROM dlq.operations o) WHERE operation = $1",
		operation)
	b.exec("ALTER TABLE dlq.dead_letter_transitions ENABLE TRIGGER USER")
	b.exec(`DO $$
		DECLARE v_of uuid := (SELECT id
			FROM dlq.operations); v_as uuid; v_looked integer; v_last timestamptz; v_last_id bigint;
		BEGIN
			LOOP
				SELECT u.operation, u.looked, u.last, u.last_id INTO v_as, v_looked, v_last, v_last_id
				FROM dlq.undo(v_of, p_limit => 2, p_after => v_last, p_after_id => v_last_id, p_as => v_as) u;
				EXIT WHEN v_looked = 0;
			END LOOP;
		END $$`)
	for _, id := range ids {
		require.True(t, strings.HasPrefix(b.state(id), "dlq_pending"), b.state(id))
	}
	require.Zero(t, b.undo(operation).Changed)
}

// An erased entry cannot be reopened, neither directly nor by an undo.
func TestReopen_RejectsErasedEntries(t *testing.T) {
	t.Parallel()
	b := setupUndo(t)
	id := b.createEntries("payments", 1)[0]
	b.exec(`UPDATE dlq.dead_letter_queue SET original_event = '{"customer": "cus-4711"}', move = '{"actor": "kim"}'
		WHERE id = $1`, id)
	operation, changed := b.bulk("discard", `{"queue": "payments"}`, deadletter.Bulk{})
	require.Equal(t, 1, changed)
	b.exec(`CALL dlq.erase('{"payload": {"customer": "cus-4711"}}', 'request 1', 'kim')`)
	_, err := b.pool.Exec(t.Context(), "SELECT dlq.reopen($1)", id)
	require.ErrorContains(t, err, "its payload was erased")
	require.Zero(t, b.undo(operation).Changed)
	require.True(t, strings.HasPrefix(b.state(id), "dlq_archived"), b.state(id))
}
