package retention_test

import (
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
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

// After an erasure, no table and no file contains data of the erased person. That includes edits in the audit trail, in
// the database and in the archive, and runs whose filter names the person.
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
	b.exec(postgrestest.RefreshRollups)
	// The first entry is only in the archive, except for its job. The second entry is closed, and its moves are in the
	// archive. The other entries are open.
	b.exec(`SELECT dlq.act_on('assign', ARRAY[$1::uuid, $2::uuid], 'kim', NULL, '{"assignee": "zaphod"}')`, id(1), id(2))
	b.exec(`SELECT dlq.act_on('tag', ARRAY[$1::uuid, $2::uuid], 'kim', NULL, '{"tags": ["zaphod"]}')`, id(1), id(2))
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

// The move of an entry that was deleted without an archive cannot be found by filter. So an edit in the audit trail is
// removed when its entry is deleted.
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

// An erasure includes failures that capture missed. They are not filed after the erasure.
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

// plantEntry creates a closed dead letter with a word in each column that a sender, a receiver or an operator fills.
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

// An erasure also erases the ids of the message and the name of the assignee. dlq.traces finds the data that remains,
// and other entries that name the person.
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

// ownColumns are the columns of dlqd's tables, and of river_job, without text of a sender, a receiver or an operator's
// note. They have names of queues, policies and users, states, hashes, and texts of dlqd. The table in the runbook
// lists the columns with such text.
var ownColumns = map[string]string{
	"approvals": "operation by_queue state actor on_behalf_of token_by origin scope decided_by " +
		"forecast skips",
	"acts":                    "actor db_user origin config_version",
	"archived_partitions":     "partition_name archive",
	"automatic_changes":       "scope name include actor db_user origin",
	"automatic_switches":      "scope name include actor",
	"circuit_breaker_changes": "name actor db_user",
	"circuit_breakers":        "name changed_by",
	"counters":                "name queue",
	"dead_letter_queue": "queue job_kind error_class reported_class fingerprint rule waiting_for locked_by parked_by " +
		"resolved_by config_version move captured_by",
	"dead_letter_transitions": "actor db_user rule queue error_class config_version from_class left_group joined_group " +
		"origin",
	"deploys":             "queue version actor",
	"destination_traffic": "destination",
	"duties":              "name",
	"entry_jobs":          "destination",
	"erasures":            "actor db_user origin filter_sha256 fields archive",
	"failure_groups":      "queue fingerprint error_class",
	"feed_records":        "feed queue cluster topic failure",
	"feeds":               "name cluster topic error",
	"gates":               "name state",
	"group_aliases":       "queue former fingerprint",
	"group_marks":         "queue fingerprint fixed_by fixed_in muted_by updated_by inherited_from",
	"job_facts":           "fact db_user",
	"metrics_sample":      "sample",
	"operation_unchanged": "reason",
	"operations":          "action actor db_user origin scope unchanged",
	"last_acts":           "actor",
	"ordered_jobs":        "queue",
	"paces":               "name",
	"processes":           "name version parts queues",
	"reconcile_findings":  "why",
	"reconcile_looks":     "look cursor_state triggers triggers_before",
	"replay_run_entries":  "outcome error_class fingerprint was queue taken_by reason version",
	"replay_run_groups":   "queue fingerprint known state reason",
	"replay_runs":         "scope queue destination actor origin reason forecast result checkpoint skips figures paces",
	"restored_partitions": "partition_name",
	"river_job":           "kind queue attempted_by",
	"reviews":             "actor",
	"role_scopes":         "role queues kinds",
	"rollup_backlog":      "queue error_class",
	"rollup_errors":       "queue",
	"rollup_flow":         "scope queue error_class",
	"rollup_groups":       "queue fingerprint",
	"rollup_times":        "measure scope queue",
	"saved_views":         "owner columns sort scope",
	"sessions":            "name via issuer subject groups address agent",
	"settings":            "key value",
	"source_deliveries":   "queue cluster topic consumer_group came_back",
	"source_positions":    "cluster topic source queue",
	"source_progress":     "source cluster topic queue state error",
	"sources":             "name cluster queue paused_by",
	"tokens":              "name role queues kinds sources created_by revoked_by",
}

// listedColumns returns the columns that the runbook lists as erased, and those that it lists as kept, by the names
// that dlq.traces uses.
func listedColumns(t *testing.T) (erased, stays []string) {
	t.Helper()
	page, err := os.ReadFile("../../runbooks/customer-data-gone.md")
	require.NoError(t, err)
	name := regexp.MustCompile("`(\\w+)`")
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, "|")
		if len(cells) != 5 || !name.MatchString(cells[1]) {
			continue
		}
		table := "dlq." + name.FindStringSubmatch(cells[1])[1]
		if table == "dlq.river_job" {
			table = "public.river_job"
		}
		for i, into := range []*[]string{&erased, &stays} {
			for _, column := range name.FindAllStringSubmatch(cells[2+i], -1) {
				*into = append(*into, table+"."+column[1])
			}
		}
	}
	return erased, stays
}

// The test puts a person's name into every column that a sender, a receiver or an operator fills. The runbook lists
// these columns. After an erasure, the columns listed as erased have no trace of the person, and the others do. A new
// column must be in one of the lists.
func TestErase_RunbookListsEveryColumn(t *testing.T) {
	t.Parallel()
	b := setup(t)
	erased, stays := listedColumns(t)
	listed := slices.Concat(erased, stays)

	rows, err := b.pool.Query(t.Context(), `SELECT n.nspname || '.' || c.relname || '.' || a.attname
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
		JOIN pg_type y ON y.oid = a.atttypid LEFT JOIN pg_type i ON i.oid = y.typelem AND y.typcategory = 'A'
		WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND (n.nspname = 'dlq' OR c.oid = 'river_job'::regclass)
			AND coalesce(i.typname, y.typname) IN ('text', 'varchar', 'bpchar', 'name', 'json', 'jsonb', 'xml', 'citext')`)
	require.NoError(t, err)
	columns, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	known := slices.Clone(listed)
	for table, names := range ownColumns {
		schema := "dlq."
		if table == "river_job" {
			schema = "public."
		}
		for column := range strings.FieldsSeq(names) {
			known = append(known, schema+table+"."+column)
		}
	}
	require.ElementsMatch(t, columns, known, "list each column with texts in the runbook, or in ownColumns")

	b.plantEverywhere("zaphod")
	traces := func() []string {
		rows, err := b.pool.Query(t.Context(), "SELECT table_name || '.' || column_name FROM dlq.traces('{zaphod}')")
		require.NoError(t, err)
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return found
	}
	require.ElementsMatch(t, listed, traces())
	e := b.erase(`{"payload": {"customer": "zaphod"}}`)
	require.NotNil(t, e.FinishedAt)
	require.ElementsMatch(t, stays, traces())

	// The answer lists where else the operator has to look for data of the erased entries.
	var leaves []string
	for _, l := range e.Leaves {
		leaves = append(leaves, l.Table)
		require.EqualValues(t, l.Rows, b.count("SELECT count(*) FROM ("+l.Query+") q"), l.Query)
	}
	require.Subset(t, leaves, []string{
		"dead_letter_queue", "dead_letter_transitions", "rollup_errors", "rollup_sources", "counters", "failure_groups",
		"group_marks",
	})
}

// The notes name the person differently from the filter. The rows with these notes were selected by the entry's queue.
// After the erasure, each such note is gone, or the answer lists its row.
func TestErase_ListsNotesThatNameOtherwise(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state)
		VALUES ('k', '{"customer": "cus_81"}', 'payments', 1, 'running')`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb],
		metadata = '{"dlq:error": {"attempt": 1, "type": "Zaphod is unknown"}}' WHERE state = 'running'`)
	b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'kim', 'about Zaphod')")
	b.exec("UPDATE dlq.dead_letter_queue SET fingerprint = 'f00d', move = '{\"actor\": \"worker:1\", \"reason\": \"judged\"}'")
	b.exec(postgrestest.RefreshRollups)
	const filter = `{"queue": ["payments"]}`
	b.exec("SELECT dlq.act_where('note', $1, 'kim', 'about Zaphod')", filter)
	b.exec("SELECT dlq.replay_cancel(dlq.replay_start($1, 'kim', 'about Zaphod', p_force => true))", filter)
	request := `dlq.request_approval('bulk', jsonb_build_object('do', 'discard', 'filter', $1::jsonb), 'about Zaphod', $2)`
	b.exec("SELECT dlq.refuse_approval("+request+", 'said Zaphod', 'ann')", filter, "kim")
	b.exec("SELECT dlq.approve("+request+", 1, 'said Zaphod', 'ann')", filter, "lee")
	b.exec("SELECT dlq.end_approval(id, 0) FROM dlq.approvals WHERE state = 'approved'")
	b.exec("SELECT dlq.set_group('payments', 'f00d', '{\"owner\": \"kim\", \"note\": \"about Zaphod\"}', 'kim')")
	e := b.erase(`{"payload": {"customer": "cus_81"}}`)
	require.NotNil(t, e.FinishedAt)
	rows, err := b.pool.Query(t.Context(), "SELECT table_name, row_count FROM dlq.traces('{Zaphod}') WHERE table_name <> 'dlq.acts'")
	require.NoError(t, err)
	stay := map[string]int64{}
	var table string
	var n int64
	_, err = pgx.ForEachRow(rows, []any{&table, &n}, func() error { stay[table] = n; return nil })
	require.NoError(t, err)
	require.Contains(t, stay, "dlq.operations")
	for table, n := range stay {
		at := slices.IndexFunc(e.Leaves, func(l deadletter.Leaves) bool { return "dlq."+l.Table == table })
		require.GreaterOrEqual(t, at, 0, "the answer does not name %s", table)
		require.LessOrEqual(t, n, e.Leaves[at].Rows, "the answer's query does not find all rows of %s", table)
		require.EqualValues(t, e.Leaves[at].Rows, b.count("SELECT count(*) FROM ("+e.Leaves[at].Query+") q"))
	}
}

// plantEverywhere creates a closed dead letter, and actions of operators on it, with a word in each column that a
// sender, a receiver or an operator fills.
func (b *bundle) plantEverywhere(word string) {
	b.Helper()
	fail := func() {
		b.exec(`UPDATE river_job SET state = 'discarded', attempt = 1, finalized_at = now(),
			errors = ARRAY[jsonb_build_object('error', $1 || ' is unknown', 'trace', $1 || '.go:1', 'attempt', 1)],
			metadata = metadata || jsonb_build_object('name', $1::text, 'dlq:error', jsonb_build_object('attempt', 1,
				'type', $1, 'code', $1, 'title', $1, 'message', $1 || ' is unknown',
				'context', jsonb_build_object('destination', $1, 'url', 'http://' || $1 || '/')))
			WHERE state IN ('running', 'available')`, word)
		b.exec("SELECT dlq.apply_facts()")
		b.exec("SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'), 'kim')")
	}
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state, tags) VALUES ('dlqd_message',
		jsonb_build_object('messageId', $1::text, 'kind', $1, 'queue', 'payments', 'source', $1, 'subscriberId', $1,
			'orderingKey', $1, 'payload', jsonb_build_object('customer', $1)), 'payments', 1, 'running', ARRAY[$1])`, word)
	fail()
	id := b.text("SELECT id::text FROM dlq.dead_letter_open WHERE event_id = $1", word)
	b.exec("SELECT dlq.replay($1, 'kim', $2, jsonb_build_object('customer', $2::text))", id, word)
	fail()
	b.exec(`UPDATE dlq.dead_letter_queue SET fingerprint = md5($1), move = '{"actor": "worker:1", "reason": "judged"}'
		WHERE status = 'dlq_manual'`, word)
	b.exec(postgrestest.RefreshRollups)
	for action, args := range map[string]string{"assign": "assignee", "tag": "tags"} {
		b.exec(`SELECT dlq.act_on($1, ARRAY[$2::uuid], 'kim', $3, jsonb_build_object($4::text,
			CASE $4 WHEN 'tags' THEN jsonb_build_array($3::text) ELSE to_jsonb($3::text) END))`, action, id, word, args)
	}
	filter := fmt.Sprintf(`{"payload": {"customer": %q}}`, word)
	b.exec("SELECT dlq.act_where('note', $1, 'kim', $2)", filter, word)
	for _, patch := range []string{
		"p_patch => '[{\"op\": \"add\", \"path\": \"/name\", \"value\": \"%s\"}]'",
		"p_merge_patch => '{\"name\": \"%s\"}'",
	} {
		b.exec("SELECT dlq.replay_cancel(dlq.replay_start($1, 'kim', $2, p_force => true, p_progressive => true, "+
			fmt.Sprintf(patch, word)+"))", filter, word)
	}
	b.exec("UPDATE dlq.replay_run_entries SET detail = $1", word)
	b.exec(`SELECT dlq.refuse_approval(dlq.request_approval('bulk', jsonb_build_object('do', 'discard', 'filter',
		$1::jsonb), $2, 'kim'), $2, 'ann')`, filter, word)
	b.exec("UPDATE dlq.approvals SET problem = $1", word)
	b.exec(`SELECT dlq.set_group(g.queue, g.fingerprint, jsonb_build_object('owner', $1::text, 'note', $1), 'kim', $1)
		FROM dlq.failure_groups g`, word)
	b.exec("SELECT dlq.save_view($1, 'payload.customer:' || $1, p_actor => 'kim')", word)
	b.exec("SELECT dlq.act_on('resolve', ARRAY[$1::uuid], 'kim', $2)", id, word)

	b.exec(`INSERT INTO dlq.job_facts (job_id, job_created_at, fact, entry_id, job) SELECT river_job_id, job_created_at,
		'refused', id, jsonb_build_object('state', 'discarded', 'errors', jsonb_build_array(jsonb_build_object('error',
		$1::text))) FROM dlq.dead_letter_queue`, word)
	b.exec(`INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at)
		SELECT queue, $1, river_job_id, job_created_at FROM dlq.dead_letter_queue`, word)
	b.exec(`INSERT INTO dlq.group_aliases (queue, former, fingerprint, main, title)
		SELECT queue, 'former', fingerprint, true, $1 FROM dlq.failure_groups`, word)
	b.exec("SELECT dlq.open_breaker('destination:d', 'kim', $1)", word)
	b.exec("SELECT dlq.set_automatic('queue', 'payments', true, p_actor => 'kim', p_note => $1)", word)
	b.exec(`INSERT INTO dlq.tokens (id, name, hash, role, note, created_by)
		VALUES (gen_random_uuid(), 'kim', sha256(''), 'reader', $1, 'kim')`, word)
	b.exec(`INSERT INTO dlq.erasures (id, actor, note, filter_sha256, fields)
		VALUES (gen_random_uuid(), 'kim', $1, '', '{}')`, word)
	b.exec(`INSERT INTO dlq.metrics_sample (at, took, counters, sample)
		SELECT now(), '1s', json_agg(c), '{}' FROM dlq.counters c`)
}

// The planner's statistics contain frequent values of columns. An erasure replaces these statistics.
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

// The clock of a job's worker was days ahead, so the entry was closed before the time of failure in its id. When that
// time has passed, the entry is in an older month than its id suggests.
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

// An erasure matches a value only as a whole, not as the beginning of a longer number.
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
