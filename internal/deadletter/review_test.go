package deadletter_test

import (
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// TestReview_EndsWithMoveTimeOrNext checks when an entry is handed out again: after it was moved and moved back, after
// two minutes, and after another entry was handed out to its operator.
func TestReview_EndsWithMoveTimeOrNext(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	for range 2 {
		b.endBySQL(b.insert(nil), "discarded")
	}
	b.processInbox()
	b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'pat')")
	list, err := b.store.List(t.Context(), deadletter.Page{Oldest: true, Limit: 10})
	require.NoError(t, err)
	require.Len(t, list, 2)
	one, two := list[0].ID, list[1].ID
	next := func(actor string, ids ...uuid.UUID) uuid.UUID {
		t.Helper()
		id, err := b.store.ReviewNext(t.Context(), ids, actor)
		require.NoError(t, err)
		return id
	}
	reviewer := func(id uuid.UUID) string {
		t.Helper()
		e, _, err := b.store.Get(t.Context(), id)
		require.NoError(t, err)
		require.NoError(t, b.store.ReadReviews(t.Context(), &e.Summary))
		if e.Review == nil {
			return ""
		}
		return e.Review.Actor
	}
	require.Equal(t, one, next("lee", one, two))
	require.Equal(t, two, next("kim", one, two))
	require.Equal(t, "lee kim", reviewer(one)+" "+reviewer(two))
	require.Equal(t, uuid.Nil, next("ann", one, two))
	require.Equal(t, one, next("lee", one, two), "an own entry stays")

	require.Equal(t, uuid.Nil, next("kim", one), "kim went on, and got none")
	require.Empty(t, reviewer(two))
	require.Equal(t, two, next("ann", one, two))

	require.NoError(t, b.store.Resolve(t.Context(), one, kim), "a review is no lock")
	require.Empty(t, reviewer(one))
	require.Equal(t, uuid.Nil, next("kim", one), "it needs no person")
	require.NoError(t, b.store.Reopen(t.Context(), one, kim))
	require.Empty(t, reviewer(one))
	require.Equal(t, one, next("kim", one, two))

	b.exec("UPDATE dlq.dead_letter_open SET updated_at = updated_at - interval '1 hour'")
	b.exec("UPDATE dlq.reviews SET at = at - interval '1 minute'")
	require.Equal(t, "kim ann", reviewer(one)+" "+reviewer(two))
	b.exec("UPDATE dlq.reviews SET at = at - interval '1 minute'")
	require.Empty(t, reviewer(one)+reviewer(two))
	require.Equal(t, one, next("lee", one, two))

	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.reviews"))
	b.exec("UPDATE dlq.reviews SET at = at - interval '1 hour' WHERE actor <> 'lee'")
	b.exec("SELECT dlq.forget_old()")
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.reviews"), "names do not stay")
}

// TestReview_WaitsForNoSession checks that a session is delayed neither by a transaction that is handing out an entry
// nor by an open transaction of an operator.
func TestReview_WaitsForNoSession(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	for range 3 {
		b.endBySQL(b.insert(nil), "discarded")
	}
	b.processInbox()
	b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'pat')")
	list, err := b.store.List(t.Context(), deadletter.Page{Oldest: true, Limit: 10})
	require.NoError(t, err)
	ids := []uuid.UUID{list[0].ID, list[1].ID, list[2].ID}
	require.NoError(t, b.store.InTx(t.Context(), func(tx postgres.DB) error {
		_, err := tx.Exec(t.Context(), "SELECT dlq.resolve($1, 'pat')", ids[2])
		require.NoError(t, err)
		var first, second uuid.UUID
		require.NoError(t, tx.QueryRow(t.Context(), "SELECT dlq.review_next($1, 'lee')", ids).Scan(&first))
		require.Equal(t, ids[0], first)
		second, err = b.store.ReviewNext(t.Context(), ids, "kim")
		require.NoError(t, err)
		require.Equal(t, ids[1], second)
		third, err := b.store.ReviewNext(t.Context(), ids[2:], "ann")
		require.NoError(t, err)
		require.Equal(t, ids[2], third, "pat has not committed")
		return nil
	}))
}
