package delivery_test

import (
	"context"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"
)

// receive is the receiver of docs/delivery.md.
func receive(db *pgxpool.Pool, work func(context.Context, pgx.Tx, []byte) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		payload, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
		if err == nil {
			err = pgx.BeginFunc(r.Context(), db, func(tx pgx.Tx) error {
				seen, err := tx.Exec(r.Context(),
					"INSERT INTO seen_messages (id) VALUES ($1) ON CONFLICT DO NOTHING", r.Header.Get("Webhook-Id"))
				if err != nil || seen.RowsAffected() == 0 {
					return err // nil for a repeated message: its work is done
				}
				return work(r.Context(), tx, payload)
			})
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
}

func TestReceiver_IsTheDocumentedOne(t *testing.T) {
	t.Parallel()
	document, err := os.ReadFile("../../docs/delivery.md")
	require.NoError(t, err)
	_, code, found := strings.Cut(string(document), "```go\n")
	require.True(t, found)
	code, _, _ = strings.Cut(code, "```")
	source, err := os.ReadFile("repeats_test.go")
	require.NoError(t, err)
	require.Contains(t, string(source), "\n"+code)
	require.Contains(t, code, "func receive(")
}

// The documented receivers in other languages compile, together with the code that each of them expects from its
// caller.
func TestReceiver_CompilesInEachLanguage(t *testing.T) {
	t.Parallel()
	document, err := os.ReadFile("../../docs/delivery.md")
	require.NoError(t, err)
	for _, language := range []struct {
		name, file, before, after string
		compile                   []string
	}{
		{"python", "receive.py", "", "", []string{"python3", "-m", "py_compile"}},
		{
			"typescript", "receive.ts", "type Work = (db: PoolClient, payload: unknown) => Promise<void>;\n" +
				"interface PoolClient { query(sql: string, values?: unknown[]): Promise<{ rowCount: number | null }> }\n",
			"",
			[]string{"tsc", "--strict", "--noEmit", "--target", "es2022"},
		},
		{
			"java", "Receive.java", "import java.sql.Connection;\nclass Receive {\n" +
				"interface Work { void run(Connection db, byte[] payload) throws Exception; }\n",
			"}\n",
			[]string{"javac", "-Xlint:all", "-Werror"},
		},
		{"ruby", "receive.rb", "", "", []string{"ruby", "-wc"}},
	} {
		t.Run(language.name, func(t *testing.T) {
			t.Parallel()
			_, code, found := strings.Cut(string(document), "```"+language.name+"\n")
			require.True(t, found)
			code, _, _ = strings.Cut(code, "```")
			require.Contains(t, code, "INSERT INTO seen_messages (id) VALUES")
			if _, err := exec.LookPath(language.compile[0]); err != nil {
				t.Skip(language.compile[0] + " is not installed")
			}
			file := filepath.Join(t.TempDir(), language.file)
			require.NoError(t, os.WriteFile(file, []byte(language.before+code+language.after), 0o600))
			output, err := exec.CommandContext(t.Context(), language.compile[0],
				append(language.compile[1:], file)...).CombinedOutput()
			require.NoError(t, err, "%s", output)
		})
	}
}

// A redelivery has the id of its message and its own number. The answer to the first redelivery is lost: the receiver
// recognizes the second one by the id and does not repeat the work.
func TestDeliver_NumbersRedeliveries(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var numbers, ids []string
	var receiver http.HandlerFunc
	url := answering(t, func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		ids, numbers = append(ids, r.Header.Get("Webhook-Id")), append(numbers, r.Header.Get("Dlqd-Replay"))
		switch r.Header.Get("Dlqd-Replay") {
		case "": // refuses the message
			w.WriteHeader(http.StatusUnprocessableEntity)
		case "1": // does the work; its answer is lost
			receiver(discarded{w}, r)
			w.WriteHeader(http.StatusUnprocessableEntity)
		default:
			receiver(w, r)
		}
	})
	b := setup(t, url, "maxAttempts: 1")
	exec := func(sql string) {
		_, err := b.pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	exec("CREATE TABLE seen_messages (id text PRIMARY KEY, at timestamptz NOT NULL DEFAULT now())")
	exec("CREATE TABLE effects (payload jsonb)")
	mu.Lock()
	receiver = receive(b.pool, func(ctx context.Context, tx pgx.Tx, payload []byte) error {
		_, err := tx.Exec(ctx, "INSERT INTO effects VALUES ($1)", payload)
		return err
	})
	mu.Unlock()
	b.deliver("", rivertype.JobStateDiscarded, rivertype.JobStateCancelled)
	for _, want := range []string{"dlq_pending", "dlq_resolved"} {
		exec("SELECT dlq.replay(id, 'kim') FROM dlq.dead_letter_queue")
		require.Eventually(t, func() bool {
			exec("SELECT dlq.apply_facts()")
			var status string
			require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT status FROM dlq.dead_letter_queue").Scan(&status))
			return status == want
		}, 5*time.Minute, 5*time.Millisecond)
	}
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, []string{"", "1", "2"}, numbers)
	require.Equal(t, []string{"msg-1", "msg-1", "msg-1"}, ids)
	var effects int
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT count(*) FROM effects").Scan(&effects))
	require.Equal(t, 1, effects)
}

// discarded is a ResponseWriter that sends nothing.
type discarded struct{ http.ResponseWriter }

func (discarded) WriteHeader(int)             {}
func (discarded) Write(p []byte) (int, error) { return len(p), nil }
