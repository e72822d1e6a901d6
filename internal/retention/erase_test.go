package retention_test

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// find returns the tables of the catalog, and the lines of the archive, that contain a word.
func (b *bundle) find(word string) (where []string) {
	b.Helper()
	rows, err := b.pool.Query(b.Context(), `SELECT c.oid::regclass::text FROM pg_class c
		JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind = 'r' AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\_%'`)
	require.NoError(b, err)
	var tables []string
	for rows.Next() {
		var table string
		require.NoError(b, rows.Scan(&table))
		tables = append(tables, table)
	}
	require.NoError(b, rows.Err())
	require.Contains(b, tables, "river_job")
	require.Contains(b, tables, "dlq.replay_runs")
	for _, table := range tables {
		if n := b.count("SELECT count(*) FROM "+table+" t WHERE position($1 IN t::text) > 0", word); n > 0 {
			where = append(where, fmt.Sprintf("%s: %d", table, n))
		}
	}
	units, _, err := b.cold.Units(b.Context())
	require.NoError(b, err)
	for _, m := range units {
		look := func(line []byte) error {
			if strings.Contains(string(line), word) {
				where = append(where, m.Unit+": "+string(line))
			}
			return nil
		}
		require.NoError(b, b.cold.Entries(b.Context(), &m, look))
		require.NoError(b, b.cold.Audit(b.Context(), &m, look))
	}
	return where
}

// erase erases as the API does.
func (b *bundle) erase(filter string) deadletter.Erasure {
	b.Helper()
	store := b.keeper.Store
	e, err := store.Erase(b.Context(), json.RawMessage(filter), deadletter.Act{Actor: "kim", Note: "request 42"})
	require.NoError(b, err)
	done, err := b.cold.Erase(b.Context(), store, e.ID, json.RawMessage(filter))
	require.NoError(b, err)
	e.Archived, e.Archives = done.Entries, done.Units
	require.NoError(b, store.FinishErasure(b.Context(), &e, done.Jobs))
	require.NoError(b, store.CheckErased(b.Context(), &e))
	return e
}

// No table and no file contains data of an erased person afterwards: not the edits in the trail, in
// the database and in the archive, nor the runs whose filter names the person.
func TestErase_RemovesAllData(t *testing.T) {
	t.Parallel()
	b := setup(t)
	// An exact payload is stored twice.
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('dlqd_message',
		'{"messageId": "m1", "kind": "k", "queue": "payments", "payload": {"customer": "zaphod"}, "payloadText": "{ \"customer\" : \"zaphod\" }"}', 'payments', 1, 'running')`)
	for _, customer := range []string{"zaphod", "trillian"} {
		b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, tags)
			SELECT 'k', jsonb_build_object('customer', $1::text, 'n', i), 'payments', 1, 'running', ARRAY[$1]
			FROM generate_series(1, 5) i`, customer)
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
			errors = ARRAY[jsonb_build_object('error', $1 || ' is unknown', 'attempt', 1)],
			metadata = jsonb_build_object('dlq:error', jsonb_build_object('attempt', 0, 'type', 'T', 'message',
				$1 || ' is unknown', 'context', jsonb_build_object('name', $1))) WHERE state = 'running'`, customer)
	}
	b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim')")
	id := func(n int) string {
		return b.text(`SELECT id::text FROM dlq.dead_letter_queue
			WHERE original_event @> jsonb_build_object('customer', 'zaphod', 'n', $1::int)`, n)
	}
	fails := func() {
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
			errors = ARRAY['{"error": "zaphod was refused", "attempt": 1}'::jsonb] WHERE state = 'available'`)
		b.exec("SELECT dlq.apply_facts()")
		b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_open WHERE status = 'dlq_pending'), 'kim')")
	}
	for n := 1; n <= 3; n++ {
		b.exec("SELECT dlq.replay($1, 'kim', NULL, '{\"customer\": \"zaphod\", \"address\": \"zaphod''s street\"}')", id(n))
		fails()
	}
	b.exec("SELECT dlq.replay(id, 'kim', p_payload_text => '{\"customer\": \"zaphod\" }') FROM dlq.dead_letter_open " +
		"WHERE event_id = 'm1'")
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_open
		WHERE edited_event ->> 'payloadText' = '{"customer": "zaphod" }'`))
	fails()
	run := b.text(`SELECT dlq.replay_start('{"payload": {"customer": "zaphod"}}', 'kim', 'ticket 7', p_merge_patch => '{"name": "zaphod"}', p_force => true)::text`)
	b.exec("SELECT dlq.replay_step($1, ARRAY[$2::uuid])", run, id(4))
	fails()
	b.exec("SELECT dlq.replay_start('{\"tags\": [\"trillian\"]}', 'kim', 'hers', p_force => true)")
	for _, customer := range []string{"zaphod", "trillian"} {
		b.exec(`SELECT dlq.replay_cancel(dlq.replay_start(jsonb_build_object('payloadAt', jsonb_build_array(jsonb_build_object('path', ARRAY['customer'], 'values', ARRAY[$1::text]))), 'kim', p_force => true))`, customer)
	}
	b.exec("INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, job) SELECT river_job_id, "+
		"job_created_at, 'refused', id, '{\"state\": \"discarded\", \"errors\": [{\"error\": \"zaphod\"}]}' FROM "+
		"dlq.dead_letter_queue WHERE id = $1", id(5))
	b.exec(`UPDATE dlq.dead_letter_queue SET fingerprint = md5(original_event::text),
		move = '{"actor": "worker:1", "reason": "judged"}' WHERE status = 'dlq_manual'`)
	b.exec(`INSERT INTO dlq.group_marks (queue, fingerprint, note, updated_by)
		VALUES ('payments', 'f', 'zaphod complained', 'kim'), ('payments', 'g', 'trillian did not', 'kim')`)
	b.exec("SELECT dlq.save_view('bank', 'payload.customer:zaphod', p_actor => 'kim')")
	b.exec(`SELECT dlq.save_view('in a text', 'status:manual "mail queue:zaphod bounced"', p_actor => 'kim')`)
	b.exec(`SELECT dlq.replay_cancel(dlq.replay_start('{"errorMessage": ["no zaphod here"]}', 'kim', p_force => true))`)
	b.exec("SELECT dlq.save_view('hers', 'payload.customer:trillian', p_actor => 'kim')")
	b.exec("SELECT dlq.refresh_rollups()")
	// The first entry is only in the archive, except for its job. The second is closed, and its
	// moves are in the archive. The others are open.
	b.exec("SELECT dlq.act_on('assign', ARRAY[$1::uuid, $2::uuid], 'kim', NULL, '{\"assignee\": \"zaphod\"}')", id(1), id(2))
	b.exec("SELECT dlq.act_on('tag', ARRAY[$1::uuid, $2::uuid], 'kim', NULL, '{\"tags\": [\"zaphod\"]}')", id(1), id(2))
	b.exec("SELECT dlq.act_on('resolve', ARRAY[$1::uuid, $2::uuid], 'kim')", id(1), id(2))
	first := uuid.MustParse(id(1))
	ids, hashes, err := b.cold.Rows(t.Context(), b.keeper.Store, archive.Manifest{Unit: "entries_1"}, []uuid.UUID{first})
	require.NoError(t, err)
	require.Equal(t, 1, b.count("SELECT dlq.delete_entries($1, $2)", ids, hashes))
	trail := time.Now().UTC().Format("dead_letter_transitions_200601")
	_, err = b.cold.Partition(t.Context(), b.keeper.Store, archive.Manifest{Unit: trail, Partition: trail}, true)
	require.NoError(t, err)
	before := strings.Join(b.find("zaphod"), "\n")
	for _, table := range []string{
		"dead_letter_open", "dead_letter_resolved", "dead_letter_transitions", "replay_runs",
		"replay_run_entries", "failure_groups", "group_marks", "saved_views", "job_facts", "river_job",
		"entries_1", trail + ": {",
	} {
		require.Contains(t, before, table, "the test needs data in this table")
	}
	jobs := b.count("SELECT count(*) FROM river_job WHERE args::text LIKE '%zaphod%'")

	const filter = `{"payloadAt": [{"path": ["customer"], "values": ["zaphod"]}]}`
	e := b.erase(filter)
	require.Positive(t, e.UnderWay, "the run has not ended")
	require.Nil(t, e.FinishedAt, "entries were skipped")
	b.exec("SELECT dlq.replay_cancel($1)", run)
	e = b.erase(filter)
	require.Zero(t, e.UnderWay)
	require.NotNil(t, e.FinishedAt)
	require.Empty(t, b.find("zaphod"))
	require.Subset(t, b.find("trillian"), []string{"dlq.group_marks: 1", "dlq.saved_views: 1"})
	require.Equal(t, jobs, b.count("SELECT count(*) FROM river_job WHERE args = '{\"erased\": true}'"))
	require.Equal(t, 3, b.count(`SELECT count(*) FROM dlq.replay_runs WHERE filter @> '{"erased": true}'`))
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.replay_runs WHERE filter::text LIKE '%trillian%'"),
		"a run that filters by the path alone identifies no person")
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions
		WHERE detail = jsonb_build_object('run', $1::text, 'erased', true)`, run), "the run that made the move stays")
}

// A move whose entry was deleted without an archive cannot be found by filter, so an edit in the
// trail is removed with its entry.
func TestErase_RemovesEditsOfDeletedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for range 2 {
		b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
			VALUES ('k', '{"customer": "arthur"}', 'payments', 1, 'running')`)
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'`)
		b.exec("SELECT dlq.replay(id, 'kim', NULL, '{\"customer\": \"zaphod\"}') FROM dlq.find('{\"status\": " +
			"\"dlq_pending\"}')")
		b.exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE state = 'available'")
		b.exec("SELECT dlq.apply_facts()")
	}
	b.exec("DELETE FROM river_job")
	require.Equal(t, 2, b.countIn("dlq_resolved"))
	b.exec("SELECT dlq.act_on('purge', ARRAY(SELECT id FROM dlq.dead_letter_queue ORDER BY id LIMIT 1), 'kim')")
	b.exec("SELECT dlq.drop_partition($1)", time.Now().UTC().Format("dead_letter_resolved_200601"))
	require.Empty(t, b.find("zaphod"))
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'edited and replayed' "+
		"AND detail = '{\"erased\": true}'"))
}

// Failures that capture missed are found before an erasure, and not filed after it.
func TestErase_IncludesMissedFailures(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, erase := range []func(filter string){
		func(filter string) { require.NotNil(t, b.erase(filter).FinishedAt) },
		func(filter string) { b.exec("CALL dlq.erase($1, 'ticket 7')", filter) },
	} {
		b.exec("SELECT dlq.set_capture('off')")
		b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
			VALUES ('k', '{"customer": "zaphod"}', 'payments', 1, 'running')`)
		b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
			errors = ARRAY['{"error": "zaphod is unknown", "attempt": 1}'::jsonb] WHERE state = 'running'`)
		b.exec("SELECT dlq.set_capture('on')")
		erase(`{"payload": {"customer": "zaphod"}}`)
		b.exec("SELECT dlq.reconcile(p_whole => true)")
		b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
		require.Empty(t, b.find("zaphod"))
	}
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE original_event @> '{\"erased\": true}'"))
}

// plantEntry creates a closed dead letter that has a word in each column that a sender, a receiver or an
// operator fills.
func (b *bundle) plantEntry(word string) (id string) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, tags)
		VALUES ('dlqd_message', jsonb_build_object('messageId', $1::text, 'kind', 'k', 'queue', 'payments', 'source', $1,
			'payload', jsonb_build_object('customer', $1), 'subscriberId', $1, 'orderingKey', $1), 'payments', 1, 'running',
			ARRAY[$1])`, word)
	b.exec(`UPDATE river_job SET state = 'discarded', attempt = 1, finalized_at = now(),
		errors = ARRAY[jsonb_build_object('error', $1 || ' is unknown', 'attempt', 1)],
		metadata = jsonb_build_object('dlq:error', jsonb_build_object('attempt', 1, 'type', 'T', 'code', $1::text,
			'message', $1 || ' is unknown', 'context', jsonb_build_object('name', $1))) WHERE state = 'running'`, word)
	b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'), 'kim')")
	id = b.text("SELECT id::text FROM dlq.dead_letter_open WHERE event_id = $1", word)
	b.exec("SELECT dlq.act_on('assign', ARRAY[$1::uuid], 'kim', NULL, jsonb_build_object('assignee', $2::text))", id, word)
	return id
}

// What identifies the message and who looks after it is erased, too. dlq.traces finds what stays, and
// other entries that name the person.
func TestErase_TracesFindWhatStays(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.plantEntry("zaphod")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('k', '{}', 'payments', 1, 'running')`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
		errors = ARRAY['{"error": "a friend of zaphod", "attempt": 1}'::jsonb] WHERE state = 'running'`)
	traces := func() (found []string) {
		rows, err := b.pool.Query(t.Context(), "SELECT table_name || '.' || column_name FROM dlq.traces('{zaphod}') ORDER BY 1")
		require.NoError(t, err)
		found, err = pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return found
	}
	before := traces()
	for _, column := range []string{
		"event_id", "source", "error_code", "assigned_to", "subscriber_id", "ordering_key", "tags", "original_event",
	} {
		require.Contains(t, before, "dlq.dead_letter_queue."+column)
	}
	require.Contains(t, before, "public.river_job.args")
	e := b.erase(`{"payload": {"customer": "zaphod"}}`)
	require.NotNil(t, e.FinishedAt)
	require.Empty(t, e.Unanalyzed)
	after := traces()
	require.Contains(t, after, "dlq.dead_letter_queue.error_message", "another entry")
	require.Subset(t, []string{
		"dlq.dead_letter_queue.error_message", "dlq.dead_letter_queue.error_title", "dlq.dead_letter_queue.retry_history",
		"dlq.dead_letter_transitions.source", "public.river_job.errors",
	}, after)
}

// The planner's statistics keep frequent values of columns. An erasure replaces them.
func TestErase_ReplacesStatistics(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, tags)
		SELECT 'k', '{"customer": "zaphod"}', 'payments', 1, 'running', ARRAY['zaphod'] FROM generate_series(1, 5)`)
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'")
	b.exec("SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim')")
	b.exec("ANALYZE river_job")
	b.exec("ANALYZE dlq.dead_letter_queue")
	kept := func() int {
		return b.count(`SELECT count(*) FROM pg_stats WHERE schemaname IN ('dlq', 'public')
			AND concat_ws(' ', most_common_vals, most_common_elems) LIKE '%zaphod%'`)
	}
	require.Positive(t, kept())
	b.erase(`{"payload": {"customer": "zaphod"}}`)
	require.Zero(t, kept())
}

// An entry whose job failed by a clock that was days ahead closed before the time in its id. When that
// time has passed, the entry is in an older month than its id says.
func TestErase_IncludesEntriesOfFastClocks(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
		VALUES ('k', '{"customer": "zaphod"}', 'payments', 1, 'running')`)
	b.exec("UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'")
	b.exec("SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim')")
	row := b.text(`SELECT jsonb_agg(to_jsonb(e) || jsonb_build_object('closed_at', now() - interval '3 days'))::text
		FROM dlq.dead_letter_queue e`)
	b.exec("DELETE FROM river_job") // otherwise the failure of the deleted entry is filed again
	b.exec("DELETE FROM dlq.dead_letter_archived")
	b.exec("SELECT dlq.restore_entries($1::jsonb, now() + interval '1 day', 'kim')", row)
	e := b.erase(`{"payload": {"customer": "zaphod"}}`)
	require.EqualValues(t, 1, e.Entries)
	require.NotNil(t, e.FinishedAt)
	require.Empty(t, b.find("zaphod"))
}

// A value counts as a name where it stands alone, not where it is the beginning of another number.
func TestErase_MatchesWholeNames(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for text, named := range map[string]bool{
		"cus_8": true, "called cus_8.": true, "payload.id:cus_8 queue:q": true, `"cus_8"`: true, "cus_81": false,
		"cus_8x": true, "xcus_8": true, "refund 47110": false, "refund4711": true, "Müllers": true, "cus 8": false,
		"kim+1@example.com wrote": true, "kim11@example.com": false, "Zoë": true, "Zoëlle": true, "": false,
	} {
		require.Equal(t, strconv.FormatBool(named),
			b.text(`SELECT dlq.names($1, '{cus_8,4711,kim+1@example.com,Zoë,Müller}')::text`, text), text)
	}
}
