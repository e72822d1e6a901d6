package deadletter_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

var kim = deadletter.Act{Actor: "kim", Note: "a note"}

// createEntry creates a dead letter and returns it.
func (b *bundle) createEntry() *deadletter.Entry {
	b.Helper()
	b.endBySQL(b.insert(nil), "discarded")
	entry, _ := b.entry()
	return entry
}

// moveTo moves an entry to a state in as few allowed moves as possible.
func (b *bundle) moveTo(id uuid.UUID, status deadletter.Status) {
	b.Helper()
	ways := map[deadletter.Status][]string{
		deadletter.Pending:    {},
		deadletter.Processing: {"dlq_processing"},
		deadletter.Manual:     {"dlq_manual"},
		deadletter.Resolved:   {"dlq_processing", "dlq_resolved"},
		deadletter.Failed:     {"dlq_processing", "dlq_failed"},
		deadletter.Archived:   {"dlq_archived"},
	}
	for _, step := range ways[status] {
		b.exec(moveSQL(step), id)
	}
}

var statuses = []deadletter.Status{
	deadletter.Pending, deadletter.Processing, deadletter.Manual, deadletter.Resolved,
	deadletter.Failed, deadletter.Archived,
}

// moveSQL returns an UPDATE that moves an entry, as an operator might write it in psql.
func moveSQL(to string) string {
	job, due := "NULL", "next_retry_at"
	if to == "dlq_processing" {
		job = "river_job_id"
	}
	if to == "dlq_pending" {
		due = "now()"
	}
	return fmt.Sprintf(`UPDATE dlq.dead_letter_queue SET status = '%s', redelivery_job_id = %s, next_retry_at = %s
		WHERE id = $1`, to, job, due)
}

// The database enforces the state table of docs/state_machine.md in every session.
func TestMoves_FollowStateTable(t *testing.T) {
	t.Parallel()
	allowed := map[deadletter.Status]string{
		deadletter.Pending:    "dlq_processing dlq_pending dlq_manual dlq_resolved dlq_archived",
		deadletter.Processing: "dlq_resolved dlq_pending dlq_failed dlq_manual",
		deadletter.Manual:     "dlq_processing dlq_pending dlq_resolved dlq_archived",
		deadletter.Failed:     "dlq_processing dlq_resolved dlq_archived",
		deadletter.Resolved:   "dlq_manual",
		deadletter.Archived:   "dlq_manual",
	}
	for _, from := range statuses {
		for _, to := range statuses {
			if from == to && to != deadletter.Pending {
				continue // only pending entries may move to the state that they have
			}
			t.Run(fmt.Sprintf("%s to %s", from, to), func(t *testing.T) {
				t.Parallel()
				b := setup(t, succeed)
				id := b.createEntry().ID
				b.moveTo(id, from)
				before, trail := b.entry()
				_, err := b.pool.Exec(t.Context(), moveSQL(string(to)), id)
				after, newTrail := b.entry()
				if !strings.Contains(" "+allowed[from]+" ", " "+string(to)+" ") {
					require.ErrorContains(t, err, "cannot move from "+string(from)+" to "+string(to))
					require.Equal(t, before, after)
					require.Len(t, newTrail, len(trail))
					return
				}
				require.NoError(t, err)
				require.Equal(t, to, after.Status)
				require.Len(t, newTrail, len(trail)+1, "every move leaves an audit row")
				last := newTrail[len(newTrail)-1]
				require.Equal(t, from, *last.FromStatus)
				require.Equal(t, to, last.ToStatus)
				require.Equal(t, last.DBUser, last.Actor, "without an actor, the actor is the database user")
				require.Equal(t, !to.Open(), after.ClosedAt != nil)
				require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE move IS NOT NULL"))
			})
		}
	}
}

func TestMoves_RejectDeletesAndForgery(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createEntry().ID
	for name, test := range map[string]struct{ sql, want string }{
		"delete an open entry": {
			"DELETE FROM dlq.dead_letter_queue WHERE id = '" + id.String() + "'",
			"only resolved and archived entries can be deleted",
		},
		"delete from the partition": {
			"DELETE FROM dlq.dead_letter_open",
			"only resolved and archived entries can be deleted",
		},
		"truncate":                    {"TRUNCATE dlq.dead_letter_queue", "not allowed"},
		"truncate the partition":      {"TRUNCATE dlq.dead_letter_open", "not allowed"},
		"change the id":               {"UPDATE dlq.dead_letter_queue SET id = gen_random_uuid()", "cannot be changed"},
		"change the job":              {"UPDATE dlq.dead_letter_queue SET river_job_id = 99", "cannot be changed"},
		"rewrite the audit trail":     {"UPDATE dlq.dead_letter_transitions SET actor = 'nobody'", "append-only"},
		"delete from the audit trail": {"DELETE FROM dlq.dead_letter_transitions", "append-only"},
		"insert an entry that is closed": {`INSERT INTO dlq.dead_letter_queue (id, river_job_id, job_created_at, queue, kind,
			job_kind, priority, original_event, status, stage, closed_at, first_failed_at, last_failed_at)
				VALUES (gen_random_uuid(), 1, now(), 'q', 'k', 'k', 1, '{}', 'dlq_resolved', 'resolved', now(), now(),
					now())`, "must be dlq_pending"},
	} {
		_, err := b.pool.Exec(t.Context(), test.sql)
		require.ErrorContains(t, err, test.want, name)
	}
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
}

func TestMoves_ParkResolveAndUnpark(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	ctx := t.Context()
	id := b.createEntry().ID

	var move *deadletter.MoveError
	err := b.store.Resolve(ctx, id, kim)
	require.ErrorAs(t, err, &move)
	require.ErrorIs(t, err, deadletter.ErrNotAllowed)
	require.Contains(t, err.Error(), "cannot resolve from dlq_pending (allowed: ")

	require.NoError(t, b.store.Park(ctx, id, kim))
	require.ErrorIs(t, b.store.Park(ctx, id, kim), deadletter.ErrNotAllowed)
	require.NoError(t, b.store.Unpark(ctx, id, kim))
	entry, _ := b.entry()
	require.Equal(t, "immediate", *entry.Strategy)
	require.NoError(t, b.store.Park(ctx, id, kim))
	require.NoError(t, b.store.Resolve(ctx, id, kim))
	entry, trail := b.entry()
	require.Equal(t, deadletter.Resolved, entry.Status)
	require.Equal(t, "manual_resolution", *entry.ResolutionStrategy)
	require.Equal(t, "kim", *entry.ResolvedBy)
	require.Equal(t, "a note", *entry.ResolutionNotes)
	require.Equal(t, "kim", trail[len(trail)-1].Actor)
	require.Equal(t, "a note", *trail[len(trail)-1].Note)
	require.ErrorIs(t, b.store.Discard(ctx, id, kim), deadletter.ErrNotAllowed)
	_, err = b.store.Replay(ctx, id, deadletter.Replay{Act: kim})
	require.ErrorIs(t, err, deadletter.ErrNotAllowed)
	require.Contains(t, err.Error(), "cannot replay from dlq_resolved (allowed: dlq_pending, dlq_manual, dlq_failed, "+
		"dlq_returned)")

	require.ErrorIs(t, b.store.Park(ctx, uuid.New(), kim), deadletter.ErrNotFound)
	_, _, err = b.store.Get(ctx, uuid.New())
	require.ErrorIs(t, err, deadletter.ErrNotFound)
}

// TestMoves_RefusalSaysWhoMovedTheEntry checks that a refusal names the move that brought the entry to its state, as
// the caller sees that move in the audit trail.
func TestMoves_RefusalSaysWhoMovedTheEntry(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	id := b.createEntry().ID
	require.EqualError(t, b.store.Resolve(t.Context(), id, kim), "dead letter "+id.String()+": cannot resolve from "+
		"dlq_pending (allowed: dlq_manual, dlq_returned). Allowed from dlq_pending: replay, discard, expire, park.",
		"it was only captured")
	require.NoError(t, b.store.Park(t.Context(), id, kim))
	lee := deadletter.Act{Actor: "lee", Note: "ticket 4711, card 4242424242424242"}
	require.NoError(t, b.store.Resolve(t.Context(), id, lee))
	b.exec("SELECT dlq.note($1, 'not a move', 'pat')", id)
	_, trail := b.entry()
	resolved := trail[len(trail)-2]
	require.Equal(t, deadletter.Resolved, resolved.ToStatus)
	refused := func(ctx context.Context, said string) {
		t.Helper()
		err := b.store.Discard(ctx, id, kim)
		require.ErrorIs(t, err, deadletter.ErrNotAllowed)
		require.Equal(t, "dead letter "+id.String()+": cannot discard from dlq_resolved (allowed: dlq_pending, dlq_manual, "+
			"dlq_failed, dlq_returned). lee resolved it at "+resolved.At.UTC().Format(time.RFC3339)+said+
			". Allowed from dlq_resolved: reopen.", err.Error())
	}
	refused(t.Context(), `: "ticket 4711, card 4242424242424242"`)
	require.NoError(t, b.store.Protect(t.Context(), []string{"notes"},
		policy.Data{SensitivePatterns: []string{"cardNumbers"}}.Masked()))
	refused(t.Context(), `: "ticket 4711, card ***"`)
	refused(postgres.AsReader(t.Context()), "")
	_, shown, err := b.store.Get(t.Context(), id)
	require.NoError(t, err)
	_, hidden, err := b.store.Get(postgres.AsReader(t.Context()), id)
	require.NoError(t, err)
	require.Len(t, hidden, len(shown))
	require.Equal(t, "not a move", *shown[len(shown)-1].Note)
	for i := range hidden {
		require.Nil(t, hidden[i].Note, "the trail hides notes, too")
	}
	reader := `SELECT coalesce(string_agg(a.note, ' '), '') FROM set_config('dlq.sight', 'reader', true), dlq.audit($1) a`
	for _, filter := range []string{`{"entryId": "` + id.String() + `"}`, `{"text": "4711"}`} {
		var notes string
		require.NoError(t, b.pool.QueryRow(t.Context(), reader, filter).Scan(&notes))
		require.Empty(t, notes, filter)
	}
	err = b.store.Discard(postgres.WithScope(t.Context(), `[{"queues": ["elsewhere"]}]`), id, kim)
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	require.NotContains(t, err.Error(), "lee")
}

func TestReplay_ResolvesWhenJobCompletes(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	entry := b.createEntry()
	job, err := b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	row, err := b.client.JobGet(t.Context(), job)
	require.NoError(t, err)
	require.Equal(t, "test_job", row.Kind)
	require.JSONEq(t, `{"value": "x"}`, string(row.EncodedArgs))
	require.Equal(t, 1, row.MaxAttempts)
	require.Contains(t, string(row.Metadata), entry.ID.String())

	_, err = b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Act: kim})
	require.ErrorIs(t, err, deadletter.ErrNotAllowed, "a redelivery is in progress")

	b.start()
	b.await(job, rivertype.JobStateCompleted)
	after, trail := b.entry()
	require.Equal(t, deadletter.Resolved, after.Status)
	require.Equal(t, "manual_retry", *after.ResolutionStrategy)
	require.Len(t, trail, 3)
	var attempts []struct {
		JobID          int64 `json:"jobId"`
		Actor, Outcome string
	}
	require.NoError(t, json.Unmarshal(after.ReplayAttempts, &attempts))
	require.Len(t, attempts, 1)
	require.Equal(t, job, attempts[0].JobID)
	require.Equal(t, "completed", attempts[0].Outcome)
}

func TestReplay_EditKeepsOriginal(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	entry := b.createEntry()
	job, err := b.store.Replay(t.Context(), entry.ID, deadletter.Replay{
		Payload: json.RawMessage(`{"value": "mended"}`), Act: kim,
	})
	require.NoError(t, err)
	row, err := b.client.JobGet(t.Context(), job)
	require.NoError(t, err)
	require.JSONEq(t, `{"value": "mended"}`, string(row.EncodedArgs))
	after, trail := b.entry()
	require.JSONEq(t, `{"value": "x"}`, string(after.OriginalEvent))
	require.JSONEq(t, `{"value": "mended"}`, string(after.EditedEvent))
	require.JSONEq(t, `{"payload": {"value": "mended"}}`, string(trail[len(trail)-1].Detail))
}

func TestReplay_RejectedReplayEditsNothing(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	opts := &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true}}
	id := b.insert(opts)
	b.endBySQL(id, "discarded")
	twin := b.insert(opts)
	entry, _ := b.entry()
	_, err := b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Payload: json.RawMessage(`{}`), Act: kim})
	require.ErrorIs(t, err, deadletter.ErrLiveJob)
	require.Contains(t, err.Error(), fmt.Sprintf("job %d with the same unique key is live", twin))
	after, _ := b.entry()
	require.Nil(t, after.EditedEvent)
	require.Equal(t, deadletter.Pending, after.Status)
	_, err = b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Force: true, Act: kim})
	require.NoError(t, err)
}

func TestReplay_CountsOutcomeOnce(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	entry := b.createEntry()
	job, err := b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	b.endBySQL(job, "completed")
	b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id) SELECT id, created_at, 'completed', $2
		FROM river_job WHERE id = $1`, job, entry.ID)
	after, trail := b.entry()
	require.Equal(t, deadletter.Resolved, after.Status)
	require.Len(t, trail, 3, "the second fact leaves no audit row")
}

func TestReplay_RecordsCancelledJob(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	entry := b.createEntry()
	job, err := b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Act: kim})
	require.NoError(t, err)
	_, err = b.client.JobCancel(t.Context(), job)
	require.NoError(t, err)
	after, _ := b.entry()
	require.Equal(t, deadletter.Pending, after.Status)
	require.Equal(t, "cancelled", *after.ErrorType)
}

func TestSweep_ReturnsEntriesWithoutJobs(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	entry := b.createEntry()
	replay := func() int64 {
		job, err := b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Act: kim})
		require.NoError(t, err)
		return job
	}
	sweep := func() deadletter.Sweep {
		found, err := b.store.SweepRedeliveries(t.Context(), uuid.Nil)
		require.NoError(t, err)
		return found
	}

	job := replay()
	require.Equal(t, deadletter.Sweep{Looked: 1, Last: entry.ID}, sweep(), "a waiting job has no deadline")
	after, _ := b.entry()
	require.Equal(t, job, *after.RedeliveryJobID)

	b.exec("DELETE FROM river_job WHERE id = $1", job)
	require.Equal(t, deadletter.Sweep{Looked: 1, Last: entry.ID, Requeued: 1}, sweep())
	after, trail := b.entry()
	require.Equal(t, deadletter.Pending, after.Status)
	require.Contains(t, *trail[len(trail)-1].Reason, "is gone")

	job = replay()
	b.exec("ALTER TABLE river_job DISABLE TRIGGER dlq_capture")
	b.endBySQL(job, "completed") // capture does not see this
	b.exec("ALTER TABLE river_job ENABLE TRIGGER dlq_capture")
	require.Equal(t, deadletter.Sweep{Looked: 1, Last: entry.ID, Settled: 1}, sweep())
	after, _ = b.entry()
	require.Equal(t, deadletter.Resolved, after.Status)
}

func TestList_PagesAndFilters(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	const n = 25
	for i := range n {
		id := b.insert(&river.InsertOpts{Queue: []string{"red", "blue"}[i%2]})
		b.exec(`UPDATE river_job SET kind = $2 WHERE id = $1`, id, fmt.Sprintf("kind_%d", i%5))
		b.endBySQL(id, "discarded")
	}
	b.exec(`UPDATE dlq.dead_letter_queue SET source = 'shop', error_type = 'TIMEOUT_ERROR', error_code = 'NO_FUNDS',
		destination = 'bank', error_class = 'transient' WHERE kind = 'kind_1'`)
	list := func(f deadletter.Page) []deadletter.Summary {
		t.Helper()
		f.Limit = max(f.Limit, 1)
		page, err := b.store.List(t.Context(), f)
		require.NoError(t, err)
		return page
	}
	for _, oldest := range []bool{false, true} {
		var all []deadletter.Summary
		f := deadletter.Page{Limit: 7, Oldest: oldest}
		for {
			page := list(f)
			if len(page) == 0 {
				break
			}
			all = append(all, page...)
			f.Cursor = page[len(page)-1].ID
		}
		require.Len(t, all, n)
		seen := map[uuid.UUID]bool{}
		for i, e := range all {
			require.False(t, seen[e.ID])
			seen[e.ID] = true
			if i > 0 {
				require.Equal(t, oldest, all[i-1].CreatedAt.Before(e.CreatedAt))
			}
		}
	}
	require.Len(t, list(deadletter.Page{Filter: filter.Filter{Queue: []string{"red"}}, Limit: 100}), 13)
	require.Len(t, list(deadletter.Page{Filter: filter.Filter{Kind: []string{"kind_1"}}, Limit: 100}), 5)
	require.Len(t, list(deadletter.Page{Filter: filter.Filter{
		Source: []string{"shop"}, ErrorType: []string{"TIMEOUT_ERROR"}, ErrorClass: []string{"transient"},
	}, Limit: 100}), 5)
	require.Len(t, list(deadletter.Page{Filter: filter.Filter{
		ErrorCode:   []string{"NO_FUNDS"},
		Destination: []string{"bank", "shop"},
	}, Limit: 100}), 5)
	require.Empty(t, list(deadletter.Page{Filter: filter.Filter{Destination: []string{"shop"}}, Limit: 100}))
	require.Len(t, list(deadletter.Page{Filter: filter.Filter{Status: []string{"dlq_pending"}}, Limit: 100}), n)
	require.Empty(t, list(deadletter.Page{
		Filter: filter.Filter{Status: []string{"dlq_manual", "dlq_failed"}}, Limit: 100,
	}))
	require.Empty(t, list(deadletter.Page{Filter: filter.Filter{Before: time.Now().Add(-time.Hour).Format(
		time.RFC3339Nano)}, Limit: 100}))
	require.Len(t, list(deadletter.Page{Filter: filter.Filter{
		After:  time.Now().Add(-time.Hour).Format(time.RFC3339Nano),
		Before: time.Now().Add(time.Hour).Format(time.RFC3339Nano),
	}, Limit: 100}), n)
	_, err := b.store.List(t.Context(), deadletter.Page{})
	require.ErrorIs(t, err, deadletter.ErrInvalid)
	_, err = b.store.Search(t.Context(), deadletter.Page{}, time.Minute)
	require.ErrorIs(t, err, deadletter.ErrInvalid)
}

// TestPlans_UseIndexes checks the plans of the claim and of lists. There are so many rows that a sequential scan would
// cost more than an index.
func TestPlans_UseIndexes(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	b.exec(`INSERT INTO dlq.dead_letter_queue (id, river_job_id, job_created_at, stage, queue, kind, job_kind,
		priority, original_event, error_class, error_type, error_code, destination, source, fingerprint,
			next_retry_at, first_failed_at, last_failed_at)
		SELECT dlq.uuid_v7(), i, now(), 'open', 'queue_' || i % 10, 'kind_' || i % 50, 'k', 1 + i % 4, '{}',
			(ARRAY['transient','outage','validation'])[1 + i % 3],
			'TYPE_' || i % 20, 'CODE_' || i % 20, 'destination_' || i % 20, 'source_' || i % 30,
			substr(md5((i % 1000)::text), 1, 16), now() + (i % 2000 - 1000) * interval '1 second', now(), now()
		FROM generate_series(1, 20000) i`)
	b.exec("VACUUM ANALYZE dlq.dead_letter_queue")

	explain := func(sql string, args ...any) string {
		rows, err := b.pool.Query(t.Context(), "EXPLAIN "+sql, args...)
		require.NoError(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return strings.Join(lines, "\n")
	}
	for index, p := range map[string]deadletter.Page{
		"dead_letter_open_pkey":           {},
		"dead_letter_open_by_queue":       {Filter: filter.Filter{Queue: []string{"no_such_queue"}}},
		"dead_letter_open_by_kind":        {Filter: filter.Filter{Kind: []string{"kind_7"}}},
		"dead_letter_open_by_class":       {Filter: filter.Filter{ErrorClass: []string{"business"}}},
		"dead_letter_open_by_type":        {Filter: filter.Filter{ErrorType: []string{"NO_SUCH_TYPE"}}},
		"dead_letter_open_by_code":        {Filter: filter.Filter{ErrorCode: []string{"NO_SUCH_CODE"}}},
		"dead_letter_open_by_destination": {Filter: filter.Filter{Destination: []string{"nowhere"}}},
		"dead_letter_open_by_group":       {Filter: filter.Filter{Fingerprint: []string{"c4ca"}}},
		"dead_letter_open_by_source":      {Filter: filter.Filter{Source: []string{"nobody"}}, Oldest: true},
	} {
		p.Limit = 50
		chosen, err := b.store.Where(t.Context(), &p.Filter)
		require.NoError(t, err)
		sql, args := b.store.ListSQL(t.Context(), p, chosen, deadletter.OpenPart())
		plan := explain(sql, args...)
		require.Contains(t, plan, index)
		require.NotContains(t, plan, "Seq Scan on dead_letter_open")
	}
	plan := explain(`SELECT d.id FROM (VALUES (1), (2), (3), (4)) AS p (priority) CROSS JOIN LATERAL (
		SELECT e.id FROM dlq.dead_letter_open e WHERE e.status = 'dlq_pending' AND e.waiting_for IS DISTINCT FROM 'automatic'
			AND e.priority = p.priority AND e.next_retry_at <= now()
		ORDER BY e.next_retry_at, e.id LIMIT 100 FOR UPDATE SKIP LOCKED) d LIMIT 100`)
	require.Contains(t, plan, "dead_letter_open_due")
	require.NotContains(t, plan, "Seq Scan")
	require.NotContains(t, plan, "Sort")
}

// TestMoves_StayLegalUnderContention moves the same entries concurrently. No move may be lost, made twice or illegal.
func TestMoves_StayLegalUnderContention(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	for range 5 {
		b.endBySQL(b.insert(nil), "discarded")
	}
	list, err := b.store.List(t.Context(), deadletter.Page{Limit: 10})
	require.NoError(t, err)
	errs := make(chan error, 8)
	for range cap(errs) {
		go func() {
			for range 60 {
				id := list[rand.IntN(len(list))].ID
				var err error
				switch rand.IntN(4) {
				case 0:
					err = b.store.Park(t.Context(), id, kim)
				case 1:
					err = b.store.Unpark(t.Context(), id, kim)
				case 2:
					var job int64
					if job, err = b.store.Replay(t.Context(), id, deadletter.Replay{Act: kim}); err == nil {
						_, err = b.pool.Exec(t.Context(), "UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE id = $1",
							job)
					}
				case 3:
					_, err = b.store.SweepRedeliveries(t.Context(), uuid.Nil)
				}
				var move *deadletter.MoveError
				if err != nil && !asMove(err, &move) {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
	require.Equal(t, 5, b.count("SELECT count(*) FROM dlq.dead_letter_queue"))
	// The audit trail is a chain: each move starts in the status in which the previous move ended.
	require.Zero(t, b.count(`SELECT count(*) FROM (
		SELECT from_status, lag(to_status) OVER (PARTITION BY entry_id ORDER BY at, id) AS before
		FROM dlq.dead_letter_transitions) c
		WHERE from_status IS DISTINCT FROM before`))
	require.Zero(t, b.count(`SELECT count(*) FROM dlq.dead_letter_queue e WHERE status IS DISTINCT FROM (
		SELECT to_status FROM dlq.dead_letter_transitions t WHERE t.entry_id = e.id ORDER BY at DESC, id DESC LIMIT 1)`))
}

func asMove(err error, move **deadletter.MoveError) bool { return errors.As(err, move) }

func TestReopen_MovesClosedEntriesToManual(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	entry := b.createEntry()
	require.ErrorContains(t, b.store.Reopen(t.Context(), entry.ID, kim),
		"cannot reopen from dlq_pending (allowed: dlq_resolved, dlq_archived, dlq_returned)")
	require.NoError(t, b.store.Discard(t.Context(), entry.ID, kim))
	require.NoError(t, b.store.Reopen(t.Context(), entry.ID, kim))
	after, trail := b.entry()
	require.Equal(t, deadletter.Manual, after.Status)
	require.Nil(t, after.ClosedAt)
	require.Equal(t, "reopened", *trail[len(trail)-1].Reason)
	_, err := b.store.Replay(t.Context(), entry.ID, deadletter.Replay{Act: kim})
	require.NoError(t, err)

	// An erased entry cannot be reopened.
	b = setup(t, succeed)
	erased := b.createEntry()
	b.exec("CALL dlq.erase(jsonb_build_object('ids', jsonb_build_array($1::text)), 'ticket 9')", erased.ID)
	require.ErrorContains(t, b.store.Reopen(t.Context(), erased.ID, kim), "cannot be reopened: its payload was erased")
}
