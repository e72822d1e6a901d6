package main_test

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// scenario is what a runbook is for: what is in the database before, what its blocks print, and what has become of it.
type scenario struct {
	file   string // where it is not a runbook's
	failed []failed
	before string            // SQL
	prints []string          // patterns, over all that the blocks print
	waits  string            // what its block marked "wait" comes to print
	after  map[string]string // SQL that returns one value, and that value
}

// failed is a message that has died.
type failed struct {
	n                               int
	kind, errorType, class, payload string
}

var scenarios = map[string]scenario{
	"dlq-grows-fast": {
		failed: []failed{{5, "order.placed", "PRICE_MISSING", "transient", `{}`}, {1, "x.y", "OTHER", "validation", `{}`}},
		prints: []string{`dlq_pending +\| default +\| transient +\| +5`, `5 \| default \| order.placed \| PRICE_MISSING`, `5 \| +5 \|`, `dlq_manual \| +5`},
		after:  map[string]string{"SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'returned to the automatic path' AND note = 'mended'": "5"},
	},
	"destination-down": {
		failed: []failed{{2, "order.placed", "HTTP_503", "outage", `{}`}},
		prints: []string{`destination:default \| open +\| t +\| t`},
		after:  map[string]string{"SELECT state::text FROM dlq.circuit_breakers": "closed", "SELECT count(*) FROM dlq.circuit_breaker_changes": "2"},
	},
	"deploy-broke-a-kind": {
		failed: []failed{{9, "order.placed", "PRICE_MISSING", "code_bug", `{"order": 1}`}, {2, "order.placed", "OTHER", "validation", `{}`}},
		prints: []string{`order.placed \| PRICE_MISSING \| +9`, `default \| PRICE_MISSING \| under 1 hour \| +9`},
		waits:  `completed .*\| +\d \| +\d \| +0 \| +\d \| +0`,
		after: map[string]string{
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE error_type = 'PRICE_MISSING' AND status = 'dlq_resolved'":             "9",
			"SELECT count(*) >= 6 FROM dlq.dead_letter_queue WHERE edited_event @> '{\"payload\": {\"order\": 1, \"price\": 100}}'": "t",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE original_event @> '{\"payload\": {\"price\": 100}}'":                  "0",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'":                                                "2",
		},
	},
	"poison-message": {
		failed: []failed{{1, "document.uploaded", "WORKER_DIED", "transient", `{"document": "doc_1", "attachment": "x"}`}},
		prints: []string{`WORKER_DIED`, `job \d+ failed`},
		waits:  `dlq_resolved \| .*"attachment": "x".* \| .*"attachment": null`,
		after:  map[string]string{"SELECT count(*) FROM dlq.dead_letter_transitions WHERE note LIKE '%ticket 4711'": "1"},
	},
	"replay-since-a-time": {
		failed: []failed{{6, "order.placed", "T", "validation", `{}`}},
		before: "INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at) SELECT 'dlqd_message', jsonb_build_object('messageId', 'done' || i, 'queue', 'default', 'kind', 'k', 'payload', i), 'default', 3, 'completed', now() FROM generate_series(1, 3) i",
		prints: []string{`default \| T +\| under 1 hour \| +6`, `default \| +3 \|`, `run_again.*\n-+\n +3`},
		waits:  `completed \| +6 \| +6 \| +0`,
		after: map[string]string{
			"SELECT count(*) FROM river_job WHERE metadata @> '{\"dlq:run_again\": \"incident 81\"}' AND state <> 'discarded'": "6",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'":                                         "6",
		},
	},
	"stuck-in-processing": {
		failed: []failed{{1, "order.placed", "T", "validation", `{}`}},
		before: `INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('elsewhere', '{}', 'nobody', 1, 'running');
			UPDATE river_job SET state = 'discarded', finalized_at = now() WHERE kind = 'elsewhere'; SELECT dlq.replay(id) FROM dlq.find('{"kind": "elsewhere"}');
			SELECT dlq.replay(id) FROM dlq.find('{"kind": "elsewhere"}', 0); DELETE FROM river_job WHERE kind = 'elsewhere' AND state = 'available'`,
		prints: []string{`\| +0 \| +1`, `without_a_job.*\n-+\n +0`},
		after:  map[string]string{"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_processing'": "0"},
	},
	"partitions-and-disk": {
		failed: []failed{{3, "order.placed", "T", "validation", `{}`}},
		prints: []string{`dead_letter_open`, `audit trail \|`, `made_ahead.*\n-+\n +t`, `UNIT +ENTRIES`},
		after:  map[string]string{"SELECT to_regclass('dlq.dead_letter_resolved_' || to_char(now() + interval '3 months', 'YYYYMM')) IS NOT NULL": "t"},
	},
	"river-is-slow": {
		prints: []string{`dlq_capture \| t`, `dlq_follow +\| t`, `VACUUM`, `overdue.*\n-+\n +0`},
	},
	"restored-from-backup": {
		failed: []failed{{1, "payment.captured", "T", "transient", `{"paymentId": "pay_1"}`}, {1, "payment.captured", "T", "transient", `{"paymentId": "pay_2"}`}},
		prints: []string{`knows_until`, `2 \| +2 \|`, `1 \| +1 \|`, `still_parked.*\n-+\n +0`},
		after: map[string]string{
			"SELECT status::text FROM dlq.dead_letter_queue WHERE original_event @> '{\"payload\": {\"paymentId\": \"pay_1\"}}'":                      "dlq_resolved",
			"SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'returned to the automatic path' AND note = 'the bank does not have it'": "1",
		},
	},
	"bad-policy": {
		failed: []failed{{3, "order.placed", "HTTP_503", "validation", `{}`}},
		prints: []string{`worker +\| validation +\| manual +\| +3`, `would be judged anew`, `3 \| +3 \|`},
		after:  map[string]string{"SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'returned to the automatic path' AND note = 'policy reverted'": "3"},
	},
	"customer-data-gone": {
		failed: []failed{{2, "order.placed", "T", "validation", `{"customer": "cus_81"}`}, {1, "order.placed", "T", "validation", `{"customer": "cus_8"}`}},
		before: `INSERT INTO river_job (kind, args, queue, max_attempts, state, finalized_at) VALUES ('dlqd_message', '{"messageId": "done", "queue": "default", "kind": "k", "payload": {"customer": "cus_81"}}', 'default', 3, 'completed', now())`,
		prints: []string{`dlq_manual \| +2`, `discarded \| +2`, `2 dead letters of the database are chosen`, `2 dead letters and 2 jobs of the database, 0 dead letters in 0 units`, `deleted.*\n-+\n +\d`, `0 \| +0 \| +2`, `\| +2 \| +2 \| +0 \| +0 \| +0 \| t +\| t`},
		after:  map[string]string{"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived' AND original_event = '{\"erased\": true}'": "2", "SELECT count(*) FROM river_job WHERE args::text LIKE '%cus_81%'": "0"},
	},
}

var runbookBlock = regexp.MustCompile("(?s)```(sql|sh)( wait)?\n(.*?)```")

// TestRunbooks runs every block of every runbook, in the state that the runbook is for.
func TestRunbooks(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../runbooks/*.md")
	require.NoError(t, err)
	index, err := os.ReadFile("../../runbooks/README.md")
	require.NoError(t, err)
	require.Len(t, files, len(scenarios)+1, "each has a scenario")
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Contains(t, string(index), "("+name+".md)")
			s.file = "../../runbooks/" + name + ".md"
			text, err := os.ReadFile(s.file)
			require.NoError(t, err)
			require.NotRegexp(t, `(FROM|JOIN|UPDATE) (dlq\.)?dead_letter_(open|inbox)\b`, string(text), "what nobody has filed yet is in another partition")
			runRunbook(t, &s)
		})
	}
}

// TestDocs_replay runs the commands of the page on replays in the same way.
func TestDocs_replay(t *testing.T) {
	t.Parallel()
	runRunbook(t, &scenario{
		file: "../../docs/replay.md",
		failed: []failed{
			{4, "payment.captured", "TIMEOUT_ERROR", "code_bug", `{"amount": 1}`}, {1, "order.placed", "T", "business", `{}`},
		},
		prints: []string{`4 dead letters would be replayed`, `add /currency: "EUR"`, `timeouts raised`},
		after: map[string]string{
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved' AND kind = 'payment.captured'": "4",
			"SELECT count(*) FROM dlq.dead_letter_open WHERE assigned_to = 'kim' AND notes = 'waits for the bank'":   "1",
			"SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed'":                                        "2",
		},
	})
}

// TestDocs_analytics and TestDocs_operations run the blocks of those pages.
func TestDocs_analytics(t *testing.T) {
	t.Parallel()
	runRunbook(t, &scenario{
		file:   "../../docs/analytics.md",
		failed: []failed{{3, "payment.captured", "TIMEOUT_ERROR", "code_bug", `{"amount": 1}`}},
		before: "DO $$ BEGIN WHILE dlq.refresh_rollups() IS NULL LOOP PERFORM pg_sleep(0.01); END LOOP; END $$", // dlqd may be at it
		prints: []string{`captured +[▁█]+ +3`, `day +▁*█▁* +3\n`, `most: 3, .*days from \d\d:00 to \d\d:00, in Europe/Paris`, `[\d.]+m?s +[0-9a-f-]{36} +manual +default +payment.captured +code_bug +TIMEOUT_ERROR +-`, `\n3 +100.0 % +shop`, `default +3 +[▁█]+ +3`, `default \| it failed +\| +3 \| {0,.*3} \| +3`, `rebuild_rollups`, `TIMEOUT_ERROR \| +3 \| +1`},
	})
}

func TestDocs_operations(t *testing.T) {
	t.Parallel()
	runRunbook(t, &scenario{
		file:   "../../docs/operations.md",
		failed: []failed{{1, "payment.captured", "T", "code_bug", `{}`}},
		before: "SELECT dlq.discard(id, 'kim', 'of no use') FROM dlq.dead_letter_open",
		prints: []string{`UNIT +ENTRIES`, `kim .*discarded +of no use`, `kim +\| .*\| discarded \| of no use`},
	})
}

func runRunbook(t *testing.T, s *scenario) {
	t.Helper()
	raw, err := os.ReadFile(s.file)
	require.NoError(t, err)
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	receiver := answering(t, func(http.ResponseWriter, *http.Request) {})
	cold := t.TempDir()
	logins := map[string]string{"": login(t, url, "dlq_operator"), "dlq_admin": login(t, url, "dlq_admin"), "the owner of River's tables": url}
	dlqd := serve(t, "--database-url", url, "--destination", receiver, "--archive", cold)
	for _, f := range s.failed {
		_, err := pool.Exec(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, state, attempt)
			SELECT 'dlqd_message', jsonb_build_object('messageId', md5(random()::text), 'queue', 'default', 'kind', $2::text, 'source', 'shop', 'payload', $3::jsonb), 'default', 3, 'running', 3
			FROM generate_series(1, $1) i`, f.n, f.kind, f.payload)
		require.NoError(t, err)
		_, err = pool.Exec(t.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "it failed", "attempt": 3}'::jsonb],
			metadata = jsonb_build_object('dlq:error', jsonb_build_object('attempt', 3, 'type', $1::text, 'class', $2::text, 'message', 'it failed')) WHERE state = 'running'`, f.errorType, f.class)
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		var undecided int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_pending' AND strategy IS NULL").Scan(&undecided))
		return undecided == 0
	}, 30*time.Second, 20*time.Millisecond)
	if s.before != "" {
		_, err := pool.Exec(t.Context(), s.before)
		require.NoError(t, err)
	}

	printed := ""
	for _, block := range runbookBlock.FindAllStringSubmatch(string(raw), -1) {
		language, wait, text := block[1], block[2] != "", block[3]
		role := ""
		if first := regexp.MustCompile(`^-- as (.*)\n`).FindStringSubmatch(text); first != nil {
			role = first[1]
		}
		as, known := logins[role]
		require.True(t, known, "role %q", role)
		once := func() string {
			cmd := exec.CommandContext(t.Context(), program, "psql", "--database-url", as, "--", "-X", "-v", "ON_ERROR_STOP=1", "-f", "-")
			cmd.Stdin = strings.NewReader(text)
			if language == "sh" {
				cmd = exec.CommandContext(t.Context(), "bash", "-euc", strings.ReplaceAll(strings.ReplaceAll(text, "dlqd archive ", "dlqd archive --archive "+cold+" "), "dlqd ", program+" "))
			}
			cmd.Env = append(os.Environ(), "DLQD_API="+dlqd.api, "PAGER=")
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s\n%s", text, out)
			require.NotContains(t, string(out), "permission denied", text)
			return string(out)
		}
		if !wait {
			printed += once()
			continue
		}
		require.NotEmpty(t, s.waits)
		last := ""
		require.Eventually(t, func() bool {
			last = once()
			return regexp.MustCompile(s.waits).MatchString(last)
		}, 30*time.Second, 100*time.Millisecond, "last: %s", &last)
	}
	for _, pattern := range s.prints {
		require.Regexp(t, pattern, printed)
	}
	for sql, want := range s.after {
		var got string
		require.Eventually(t, func() bool {
			require.NoError(t, pool.QueryRow(t.Context(), "SELECT ("+sql+")::text").Scan(&got))
			return got == want || want == "t" && got == "true"
		}, 30*time.Second, 50*time.Millisecond, "%s is %s", sql, &got)
	}
	require.Zero(t, dlqd.stop(syscall.SIGTERM))
}

// login is a database URL of a new user who has one of dlqd's roles.
func login(t *testing.T, url, role string) string {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	admin, err := pgx.Connect(ctx, postgrestest.Superuser(t, url))
	require.NoError(t, err)
	name := role + "_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	_, err = admin.Exec(ctx, "CREATE ROLE "+name+" LOGIN IN ROLE "+role)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(ctx, "DROP ROLE "+name)
		require.NoError(t, err)
		_ = admin.Close(ctx)
	})
	return postgrestest.WithUser(url, name)
}
