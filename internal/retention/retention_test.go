package retention_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/archive"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/retention"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

type bundle struct {
	*testing.T

	pool   *pgxpool.Pool
	keeper *retention.Keeper
	now    time.Time
	cold   *archive.Archive
}

func setup(t *testing.T) *bundle {
	t.Helper()
	rules := policytest.Load(t, policytest.Files{"retry-policies": `
defaults: {retention: {resolved: 30d, failed: 90d, archived: 365d}}
queues:
  mails: {destination: d, retention: {resolved: 7d}}
  payments: {destination: d, retention: {resolved: 60d}}
destinations: {d: {url: "http://127.0.0.1:1/"}}
`})
	b := &bundle{T: t, pool: postgrestest.Pool(t), now: time.Now()}
	var err error
	b.cold, err = archive.Open(t.Context(), t.TempDir())
	require.NoError(t, err)
	t.Cleanup(func() { _ = b.cold.Close() })
	b.keeper = &retention.Keeper{
		Store:   deadletter.NewStore(b.pool, postgres.DefaultSchemas()),
		Archive: b.cold, Policy: func() *policy.Policy { return rules },
		Logger: slog.New(slog.DiscardHandler), Now: func() time.Time { return b.now },
	}
	return b
}

func (b *bundle) count(sql string, args ...any) int {
	b.Helper()
	var n int
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&n))
	return n
}

func (b *bundle) text(sql string, args ...any) string {
	b.Helper()
	var text string
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&text))
	return text
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

// createClosed creates n closed dead letters of a queue.
func (b *bundle) createClosed(n int, queue, status string) {
	b.Helper()
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'k', '{}', $1, 1, 'running'
		FROM generate_series(1, $2)`, queue, n)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "x"}'::jsonb]
		WHERE state = 'running'`)
	if status == "dlq_archived" {
		b.exec(`SELECT dlq.act_on('discard', ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'),
			'kim')`)
		return
	}
	// These are the moves of a redelivery and of its end.
	b.exec(`UPDATE dlq.dead_letter_queue SET status = 'dlq_processing', redelivery_job_id = river_job_id,
		move = '{"actor": "worker:1", "reason": "redelivered"}' WHERE status = 'dlq_pending'`)
	b.exec("UPDATE dlq.dead_letter_queue SET status = $1::dlq.dead_letter_status WHERE status = 'dlq_processing'", status)
}

func (b *bundle) run() retention.Done {
	b.Helper()
	done, err := b.keeper.Run(b.Context())
	require.NoError(b, err)
	return done
}

func (b *bundle) countIn(status string) int {
	b.Helper()
	return b.count("SELECT count(*) FROM dlq.dead_letter_queue WHERE status = $1::dlq.dead_letter_status", status)
}

func TestKeeper_EnforcesPeriods(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(5, "mails", "dlq_resolved")
	b.createClosed(4, "payments", "dlq_resolved")
	b.createClosed(3, "elsewhere", "dlq_resolved") // a queue of an application: the defaults apply
	b.createClosed(2, "mails", "dlq_failed")
	b.createClosed(2, "payments", "dlq_archived")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('k', '{}', 'mails', 1, 'running')`)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE state = 'running'`)
	require.Zero(t, b.run(), "no period has ended")

	b.now = b.now.Add(8 * 24 * time.Hour)
	require.Equal(t, retention.Done{Deleted: 5, Archived: 5}, b.run(), "the period of the queue mails has ended")
	b.now = b.now.Add(25 * 24 * time.Hour)
	require.Equal(t, retention.Done{Deleted: 3, Archived: 3}, b.run())
	require.Equal(t, 4, b.countIn("dlq_resolved"))
	b.now = b.now.Add(28 * 24 * time.Hour)
	require.Zero(t, b.run(), "61 days: the longest period has ended, but the month cannot be dropped yet")

	month := b.count("SELECT count(*) FROM pg_inherits WHERE inhparent = 'dlq.dead_letter_resolved'::regclass")
	b.now = b.now.Add(32 * 24 * time.Hour)
	done := b.run()
	require.Positive(t, done.Dropped, "a month is dropped once the periods of all queues have ended")
	require.Equal(t, 4, done.Archived)
	require.Zero(t, done.Deleted)
	require.Zero(t, b.countIn("dlq_resolved"))
	require.Less(t, b.count("SELECT count(*) FROM pg_inherits WHERE inhparent = 'dlq.dead_letter_resolved'::regclass"),
		month)
	require.Equal(t, 2, done.AgedOut, "failed entries are archived after 90 days")
	b.now = b.now.Add(40 * 24 * time.Hour)
	failedMonths := b.count("SELECT count(*) FROM pg_inherits WHERE inhparent = 'dlq.dead_letter_failed'::regclass")
	require.Zero(t, b.run().AgedOut)
	require.Less(t, b.count("SELECT count(*) FROM pg_inherits WHERE inhparent = 'dlq.dead_letter_failed'::regclass"),
		failedMonths, "empty months are dropped")
	b.now = b.now.Add(-40 * 24 * time.Hour)
	require.Equal(t, 2, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE actor = 'retention'
		AND reason = 'aged out' AND from_status = 'dlq_failed' AND to_status = 'dlq_archived'`))
	require.Equal(t, 4, b.countIn("dlq_archived"))
	require.Equal(t, 1, b.countIn("dlq_pending"), "open entries stay")

	b.now = b.now.Add(400 * 24 * time.Hour)
	b.run()
	require.Zero(t, b.countIn("dlq_archived"))
	require.Equal(t, 1, b.countIn("dlq_pending"))
	b.exec("CALL dlq.ensure_partitions()") // creates the dropped month of today again
	b.createClosed(1, "mails", "dlq_resolved")
	require.Equal(t, 2, b.countIn("dlq_resolved"), "the new entry and the one that was open")
}

// A failed entry moves to dlq_archived after the period of its own queue, not after the shortest period of all queues.
func TestAgeOut_UsesPeriodOfQueue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(2, "mails", "dlq_failed")
	b.createClosed(3, "payments", "dlq_failed")
	b.createClosed(4, "elsewhere", "dlq_failed")
	agedOut := func(after time.Duration) int {
		return b.count(`SELECT dlq.age_out('{"defaults": {"failed": "90 days"}, "queues": {"mails": {"failed": "10 days"}, "payments": {"failed": "120 days"}}}', p_now => $1)`, b.now.Add(after))
	}
	require.Zero(t, agedOut(9*24*time.Hour))
	require.Equal(t, 2, agedOut(11*24*time.Hour))
	require.Zero(t, agedOut(11*24*time.Hour))
	require.Equal(t, 4, agedOut(91*24*time.Hour))
	require.Equal(t, 3, agedOut(121*24*time.Hour))
	require.Zero(t, b.countIn("dlq_failed"))
}

// An entry that has changed since it was archived is not deleted, because the archive has an older version.
func TestDeleteEntries_SkipsChangedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(2, "mails", "dlq_resolved")
	b.exec("CREATE TABLE archived AS SELECT e.id, hashtextextended(e::text, 0) AS hash FROM dlq.dead_letter_queue e")
	changed := b.text("SELECT max(id::text) FROM archived")
	b.exec(`SELECT dlq.act_on('tag', ARRAY[$1::uuid], 'kim', NULL, '{"tags": ["seen"]}')`, changed)
	require.Equal(t, 1, b.count(`SELECT dlq.delete_entries(array_agg(a.id), array_agg(a.hash), 'retention')
		FROM archived a`))
	require.Equal(t, changed, b.text("SELECT string_agg(id::text, ' ') FROM dlq.dead_letter_queue"))
}

// Restored entries are kept until the latest requested time, and no longer.
func TestRestoreEntries_KeepsUntilLatestTime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(2, "mails", "dlq_resolved")
	restore := func(days int) {
		b.exec("SELECT dlq.restore_entries((SELECT jsonb_agg(to_jsonb(e)) FROM dlq.dead_letter_queue e), $1, 'kim')",
			b.now.AddDate(0, 0, days))
	}
	expired := func(days int) int {
		return b.count(`SELECT count(*)
			FROM dlq.expired_entries('{"defaults": {"resolved": "30 days", "archived": "365 days"}, "queues": {"mails": {"resolved": "7 days"}}}', p_now => $1)`, b.now.AddDate(0, 0, days))
	}
	require.Equal(t, 2, expired(8))
	restore(20)
	restore(10)
	require.Zero(t, expired(8))
	require.Zero(t, expired(19), "the entries are kept until the 20th day")
	require.Equal(t, 2, expired(21))
}

// An entry whose partition is missing goes to the default partition. The creation of the partition moves the entry
// there.
func TestPartitions_DrainDefaultPartition(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`CALL dlq.ensure_partitions()`)
	b.exec(`DO $$ DECLARE p text; BEGIN
		FOR p IN SELECT inhrelid::regclass FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
			WHERE inhparent IN ('dlq.dead_letter_resolved'::regclass, 'dlq.dead_letter_transitions'::regclass)
				AND relname ~ '[0-9]$'
		LOOP EXECUTE 'DROP TABLE ' || p; END LOOP; END $$`)
	b.createClosed(3, "mails", "dlq_resolved")
	require.Equal(t, 3, b.count("SELECT count(*) FROM dlq.dead_letter_resolved_default"))
	moves := b.count("SELECT count(*) FROM dlq.dead_letter_transitions_default")
	require.Positive(t, moves)
	b.exec(`CALL dlq.ensure_partitions()`)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_resolved_default"))
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_transitions_default"))
	require.Equal(t, 3, b.countIn("dlq_resolved"), "no entry is lost")
	require.Equal(t, moves, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"))
}

// units returns the archive's units by partition.
func (b *bundle) units() map[string][]archive.Manifest {
	b.Helper()
	units, _, err := b.cold.Units(b.Context())
	require.NoError(b, err)
	by := map[string][]archive.Manifest{}
	for _, m := range units {
		require.NoError(b, b.cold.Verify(b.Context(), &m))
		by[m.Partition] = append(by[m.Partition], m)
	}
	return by
}

func TestArchive_RestoresEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(3, "payments", "dlq_resolved")
	month := time.Now().UTC().Format("dead_letter_resolved_200601")
	before := b.text("SELECT jsonb_agg(to_jsonb(e) ORDER BY id)::text FROM dlq.dead_letter_queue e")
	id := uuid.MustParse(b.text("SELECT max(id::text) FROM dlq.dead_letter_queue"))
	// The test's time is in the middle of a month, so that no month ends during the test.
	y, m0, _ := time.Now().UTC().Date()
	b.now = time.Date(y, m0+4, 10, 12, 0, 0, 0, time.UTC)
	require.Equal(t, 3, b.run().Archived)
	require.Zero(t, b.countIn("dlq_resolved"))
	m := b.units()[month][0]
	require.EqualValues(t, 3, m.Entries.Lines)
	require.EqualValues(t, 9, m.Audit.Lines, "captured, redelivered, resolved")
	require.WithinDuration(t, time.Now(), m.From, time.Minute)
	require.NotEmpty(t, m.Policy)

	// A restored entry equals the archived one, and stays until the requested time.
	n, err := b.cold.Restore(t.Context(), b.keeper.Store, &m, id, b.now.Add(time.Hour),
		deadletter.Act{Actor: "kim", Note: "ticket 7"})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Contains(t, before, b.text("SELECT to_jsonb(e)::text FROM dlq.dead_letter_queue e"))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE entry_id = $1 AND actor = 'kim'
		AND reason = 'restored from the archive' AND note = 'ticket 7'`, id))
	require.Zero(t, b.run(), "the restored entry stays")
	n, err = b.cold.Restore(t.Context(), b.keeper.Store, &m, uuid.Nil, b.now.Add(2*time.Hour),
		deadletter.Act{Actor: "kim"})
	require.NoError(t, err)
	require.Equal(t, 2, n, "all entries except the one that is present")
	require.Equal(t, before, b.text("SELECT jsonb_agg(to_jsonb(e) ORDER BY id)::text FROM dlq.dead_letter_queue e"))
	_, err = b.cold.Restore(t.Context(), b.keeper.Store, &m, uuid.New(), b.now, deadletter.Act{Actor: "kim"})
	require.ErrorContains(t, err, "there is no entry")

	// One entry was tagged meanwhile. Only that entry is archived again.
	b.exec("SELECT dlq.act_on('tag', ARRAY[$1::uuid], 'kim', NULL, '{\"tags\": [\"seen\"]}')", id)
	b.now = b.now.Add(3 * time.Hour)
	done := b.run()
	require.Equal(t, 1, done.Dropped)
	require.Equal(t, 1, done.Archived)
	require.Len(t, b.units()[month], 2)
	require.Equal(t, month+"~2", b.units()[month][1].Unit)
	require.Zero(t, b.countIn("dlq_resolved"))
}

// The edits and destinations of a run, and the text of an exact payload, are archived and restored.
func TestArchive_KeepsEditsAndTexts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const text = `{"z" : 1.0,  "<&>":[1e3 ]}`
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state) VALUES ('dlqd_message',
		jsonb_build_object('messageId', 'm1', 'kind', 'k', 'queue', 'payments', 'payload', $1::jsonb, 'payloadText',
			$2::text), 'payments', 1, 1, 'running')`, text, text)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb]`)
	b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	id := uuid.MustParse(b.text("SELECT id::text FROM dlq.dead_letter_queue"))
	run := b.text(`SELECT dlq.replay_start('{}', p_all => true, p_merge_patch => '{"n": 9007199254740993}', p_destination => 'd', p_force => true)::text`)
	b.exec("SELECT dlq.replay_step($1, ARRAY[$2::uuid])", run, id)
	b.exec("UPDATE river_job SET state = 'completed', finalized_at = now() WHERE state = 'available'")
	b.exec("SELECT dlq.apply_facts()")
	require.Equal(t, 1, b.countIn("dlq_resolved"))
	require.Equal(t, 1, b.count(`SELECT count(*) FROM dlq.dead_letter_queue
		WHERE replay_attempts @> '[{"destination": "d", "outcome": "completed"}]'`))

	y, m0, _ := time.Now().UTC().Date()
	month := time.Now().UTC().Format("dead_letter_resolved_200601")
	b.now = time.Date(y, m0+4, 10, 12, 0, 0, 0, time.UTC)
	require.Equal(t, 1, b.run().Archived)
	m := b.units()[month][0]
	var details []string
	require.NoError(t, b.cold.Audit(t.Context(), &m, func(line []byte) error {
		var move struct {
			Detail *struct {
				Run, Destination string
				MergePatch       json.RawMessage
			}
		}
		require.NoError(t, json.Unmarshal(line, &move))
		if move.Detail != nil {
			details = append(details, move.Detail.Run+" "+move.Detail.Destination+" "+string(move.Detail.MergePatch))
		}
		return nil
	}))
	require.Equal(t, []string{run + ` d {"n": 9007199254740993}`}, details)
	n, err := b.cold.Restore(t.Context(), b.keeper.Store, &m, id, b.now.Add(time.Hour), deadletter.Act{Actor: "kim"})
	require.NoError(t, err)
	require.Equal(t, 1, n)
	require.Equal(t, text, b.text("SELECT original_event ->> 'payloadText' FROM dlq.dead_letter_queue")) //nolint:testifylint // byte for byte
}

// A partition is not dropped if it changes after it was archived, or if archiving it fails.
func TestArchive_DropsOnlyArchivedPartitions(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(3, "payments", "dlq_resolved")
	month := time.Now().UTC().Format("dead_letter_resolved_200601")
	held, err := b.cold.Partition(t.Context(), b.keeper.Store, archive.Manifest{Unit: month, Partition: month}, false)
	require.NoError(t, err)
	b.exec(`UPDATE dlq.dead_letter_queue SET notes = 'late'
		WHERE id = (SELECT max(id::text)::uuid FROM dlq.dead_letter_queue)`)
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.drop_partition($1, $2, $3::text::numeric)", month, held.Rows, held.Hash)
	require.ErrorContains(t, err, "has changed since it was archived")
	require.Equal(t, 3, b.countIn("dlq_resolved"))

	require.NoError(t, b.cold.Close())
	y, m0, _ := time.Now().UTC().Date()
	b.now = time.Date(y, m0+3, 10, 12, 0, 0, 0, time.UTC)
	_, err = b.keeper.Run(t.Context())
	require.ErrorContains(t, err, "not dropped")
	require.Equal(t, 3, b.countIn("dlq_resolved"))
	_, err = b.pool.Exec(t.Context(), "SELECT dlq.drop_partition('dead_letter_open')")
	require.ErrorContains(t, err, "there is no such month")

	b.keeper.Archive = nil
	require.Equal(t, retention.Done{Dropped: 1}, b.run(), "without an archive, rows are dropped unarchived")
}

// Months of the audit trail are archived and dropped as months of entries are. A damaged unit is detected.
func TestArchive_IncludesAuditTrail(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(3, "payments", "dlq_resolved")
	moves := b.count("SELECT count(*) FROM dlq.dead_letter_transitions")
	b.now = b.now.Add(1200 * 24 * time.Hour)
	b.run()
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_transitions"))
	day := time.Now().UTC().Format("dead_letter_transitions_200601")
	m := b.units()[day][0]
	require.EqualValues(t, moves, m.Audit.Lines)
	require.Nil(t, m.Entries)
	found := 0
	require.NoError(t, b.cold.Audit(t.Context(), &m, func(line []byte) error {
		if strings.Contains(string(line), `"to_status": "dlq_resolved"`) {
			found++
		}
		return nil
	}))
	require.Equal(t, 3, found)

	dir := b.cold.String()
	file := filepath.Join(dir, day, m.Audit.Name)
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	for name, bad := range map[string][]byte{
		"truncated": raw[:len(raw)/2], "longer": append(bytes.Clone(raw), raw...), "empty": nil,
	} {
		require.NoError(t, os.WriteFile(file, bad, 0o600))
		require.ErrorContains(t, b.cold.Verify(t.Context(), &m), day, name)
	}
}

// TestArchive_WorksWithS3 archives, erases and restores in an object store.
func TestArchive_WorksWithS3(t *testing.T) {
	// During uploads, no transaction is open and no connection is in use.
	var pool atomic.Pointer[pgxpool.Pool]
	var held atomic.Int64
	s3 := gofakes3.New(s3mem.New(), gofakes3.WithAutoBucket(true)).Server()
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if pool := pool.Load(); pool != nil {
			held.Add(int64(pool.Stat().AcquiredConns()))
		}
		s3.ServeHTTP(w, r)
	}))
	t.Cleanup(store.Close)
	t.Setenv("AWS_ACCESS_KEY_ID", "a")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	b := setup(t)
	var err error
	b.cold, err = archive.Open(t.Context(), "s3://cold?region=eu-west-1&use_path_style=true&endpoint="+
		url.QueryEscape(store.URL)+"&prefix=dlqd/")
	require.NoError(t, err)
	require.Equal(t, "s3://cold?prefix=dlqd/", b.cold.String())
	b.keeper.Archive = b.cold
	pool.Store(b.pool)
	b.createClosed(3, "payments", "dlq_resolved")
	b.createClosed(2, "mails", "dlq_resolved")
	b.exec("DELETE FROM river_job")
	b.now = b.now.Add(10 * 24 * time.Hour)
	done := b.run()
	require.Equal(t, 2, done.Deleted, "the queue mails has a shorter period, so its entries are deleted one by one")
	require.Equal(t, 2, done.Archived)
	b.now = b.now.Add(90 * 24 * time.Hour)
	require.Equal(t, 3, b.run().Archived)
	b.erase(`{"payload": {"customer": "zaphod"}}`)
	require.Zero(t, held.Load())
	month := time.Now().UTC().Format("dead_letter_resolved_200601")
	m := b.units()[month][0]
	n, err := b.cold.Restore(t.Context(), b.keeper.Store, &m, uuid.Nil, b.now.Add(time.Hour), deadletter.Act{Actor: "kim"})
	require.NoError(t, err)
	require.Equal(t, 3, n)
}

// dlqd's records of past operations are deleted after a time.
func TestKeeper_DeletesOldReports(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.createClosed(3, "payments", "dlq_resolved")
	for _, sql := range []string{
		"SELECT dlq.replay_cancel(dlq.replay_start('{\"queue\": \"payments\"}', p_force => true))",
		"SELECT dlq.replay_start('{\"queue\": \"payments\"}', p_force => true)",
		`INSERT INTO dlq.replay_run_entries (run_id, entry_id, outcome) SELECT r.id, gen_random_uuid(), 'skipped'
			FROM dlq.replay_runs r CROSS JOIN generate_series(1, 2500)`,
		`INSERT INTO dlq.operations (id, action, actor) SELECT gen_random_uuid(), 'discard', 'kim'
			FROM generate_series(1, 2500)`,
		`INSERT INTO dlq.operation_unchanged (operation_id, entry_id, reason) SELECT o.id, gen_random_uuid(), 'gone'
			FROM (SELECT id FROM dlq.operations LIMIT 1) o CROSS JOIN generate_series(1, 2500)`,
		"SELECT dlq.refuse_approval(dlq.request_approval('bulk', '{\"do\": \"discard\", \"filter\": {\"queue\": " +
			"\"payments\"}}'))", "SELECT dlq.request_approval('bulk', '{\"do\": \"discard\", \"filter\": {\"queue\": " +
			"\"payments\"}}')",
		`INSERT INTO dlq.approval_entries (approval_id, entry_id) SELECT a.id, gen_random_uuid() FROM dlq.approvals a CROSS
			JOIN generate_series(1, 2500)`,
		"SELECT dlq.open_breaker('destination:d')", "SELECT dlq.reset_breaker('destination:d')",
		"INSERT INTO dlq.gates (name, state, started_at) VALUES ('smart:payments:f', 'open', now())",
		"INSERT INTO dlq.paces (name, free_at) VALUES ('replay:x', now())",
		"SELECT dlq.rebuild_rollups()",
		"INSERT INTO dlq.failure_groups (queue, fingerprint, first_seen, last_seen) VALUES ('payments', 'f', now(), now())",
		`INSERT INTO dlq.rollup_errors (step, bucket, queue, error_type, failures) SELECT s, date_trunc('week', now()),
			'payments', 'T' || i, 1 FROM unnest('{hour,day,week}'::dlq.rollup_step[]) s, generate_series(1, 100) i`,
	} {
		b.exec(sql)
	}
	left := func() string {
		return b.text(`SELECT concat_ws(' ', (SELECT count(*) FROM dlq.replay_runs),
			(SELECT count(*) FROM dlq.replay_run_entries), (SELECT count(*) FROM dlq.circuit_breaker_changes),
			(SELECT count(*) FROM dlq.gates), (SELECT count(*) FROM dlq.paces), (SELECT count(*) FROM dlq.failure_groups),
				(SELECT count(*) FROM dlq.rollup_errors WHERE error_type LIKE 'T%'),
			(SELECT count(*) FROM dlq.operations), (SELECT count(*) FROM dlq.operation_unchanged),
				(SELECT count(*) FROM dlq.approvals), (SELECT count(*) FROM dlq.approval_entries))`)
	}
	after := func(days int) string {
		b.now = time.Now().AddDate(0, 0, days)
		b.run()
		b.exec("SELECT dlq.trim_rollups($1)", b.now)
		return left()
	}
	require.Equal(t, "2 5000 2 1 1 1 300 2500 2500 2 5000", left())
	require.Equal(t, "2 5000 2 1 0 1 300 2500 2500 2 5000", after(2))
	require.Equal(t, "2 5000 2 0 0 1 200 2500 2500 2 5000", after(45))
	require.Equal(t, "1 2500 2 0 0 0 100 0 0 1 2500", after(410), "open runs and open requests stay")
	_, err := b.pool.Exec(t.Context(), "DELETE FROM dlq.circuit_breaker_changes")
	require.ErrorContains(t, err, "append-only")
	b.exec(`INSERT INTO dlq.circuit_breaker_changes (at, name, to_state)
		VALUES (now() - interval '1101 days', 'destination:d', 'open')`)
	b.now = time.Now()
	b.run()
	require.Equal(t, 2, b.count("SELECT count(*) FROM dlq.circuit_breaker_changes"))
}

// If another session reads a month for a long time, the round waits for that lock once, not once for each month.
func TestKeeper_StopsAtFirstLock(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for _, month := range []string{"2020-01-01Z", "2020-02-01Z"} {
		b.exec("SELECT dlq.ensure_partition('dlq.dead_letter_resolved', '" + month + "')")
	}
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.dead_letter_resolved IN ACCESS SHARE MODE")
	require.NoError(t, err)
	_, err = b.keeper.Run(t.Context())
	require.ErrorContains(t, err, "dead_letter_resolved_202001")
	require.NotContains(t, err.Error(), "dead_letter_resolved_202002")
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, 2, b.run().Dropped)
}

// The partition of the current month is created before those of earlier and later months.
func TestPartitions_CreatesCurrentMonthFirst(t *testing.T) {
	t.Parallel()
	b := setup(t)
	now := time.Now().UTC()
	b.exec("DROP TABLE dlq.dead_letter_transitions_" + now.Format("200601"))
	b.exec("DROP TABLE dlq.dead_letter_resolved_" + now.AddDate(0, 0, 1-now.Day()).AddDate(0, 1, 0).Format("200601"))
	b.exec(`INSERT INTO dlq.dead_letter_transitions (at, entry_id, to_status, actor, queue, kind)
		VALUES ('2020-01-07', gen_random_uuid(), 'dlq_pending', 'a', 'q', 'k')`)
	require.Equal(t, "dead_letter_transitions_"+now.Format("200601")+" dead_letter_transitions_202001 "+
		"dead_letter_resolved_"+now.AddDate(0, 0, 1-now.Day()).AddDate(0, 1, 0).Format("200601"),
		b.text("SELECT string_agg(name, ' ') FROM dlq.missing_partitions()"))
}
