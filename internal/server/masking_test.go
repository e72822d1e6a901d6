package server_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// secrets are the values in the message that must not appear in answers and logs.
var secrets = []string{
	"4111111111111111", "kim@example.com", "dlqd_0123456789abcdefABCDEF0123456789",
	"DE02120300000000202051", "key-of-the-shop", "sk_live_51H8abcdEFGH",
}

const sensitivePayload = `{"amount": 4200, "card": {"number": "4111111111111111"}, "people": [{"email": "kim@example.com"}], "accounts": [{"iban": "DE02120300000000202051"}],
	"free": ["see 4111 1111 1111 1111, Bearer dlqd_0123456789abcdefABCDEF0123456789"]}`

type logged struct {
	sync.Mutex
	strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.Lock()
	defer l.Unlock()
	return l.Builder.Write(p)
}

func (l *logged) text() string {
	l.Lock()
	defer l.Unlock()
	return l.String()
}

// The message contains secrets in every place, and the receiver's answer repeats all of them. No operation and no log
// shows a secret, except to an operator who gives a reason.
func TestMask_NoOperationShowsASecret(t *testing.T) {
	t.Parallel()
	log := &logged{}
	b := &scopeBundle{bundle: setup(t, options{
		receiver: func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusUnprocessableEntity)
			_, _ = fmt.Fprintf(w, "refused: card %s, IBAN %s of %s <%s>; key %s; token %s", secrets[0], secrets[3], secrets[1],
				secrets[1], secrets[4], secrets[5])
		},
		config: func(c *server.Config) {
			c.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			c.Policy.Access.Authentication = []string{"tokens"}
			c.Policy.Data.SensitiveColumns = []string{}
			c.Policy.Data.SensitivePaths = []string{
				"payload.card.number", "payload..email", "payload.accounts[*].iban",
				"headers.X-Api-Key",
			}
			c.Policy.Data.SensitivePatterns = []string{policy.PatternCardNumbers, policy.PatternTokens}
		},
	})}
	b.tokens = access.NewStore(b.pool, postgres.DefaultSchemas())
	reader, operator, admin := b.token(access.Reader, nil), b.token(access.Operator, nil), b.token(access.Admin, nil)
	status, out := b.as(admin, "POST", "/api/messages",
		`{"messageId": "m1", "queue": "default", "kind": "order.paid", "payload": `+sensitivePayload+
			`, "headers": {"X-Api-Key": "key-of-the-shop"},
		"subscriberId": "kim@example.com", "orderingKey": "kim@example.com"}`)
	require.Equal(t, http.StatusAccepted, status, out)
	_, err := b.pool.Exec(t.Context(), "INSERT INTO dlq.sources (name, cluster, queue) VALUES ('default', 'c', 'default')")
	require.NoError(t, err)
	var id string
	require.Eventually(t, func() bool {
		err := b.pool.QueryRow(t.Context(), "SELECT id::text FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'").Scan(
			&id)
		return err == nil
	}, 5*time.Minute, 50*time.Millisecond)
	kept := b.text(
		"SELECT concat_ws(' ', error_message, error_context, retry_history, metadata) FROM dlq.dead_letter_queue")
	require.Contains(t, kept, "refused: card ***, IBAN ***", "the receiver's answer is kept with masked values")

	check := func(what, out string) {
		t.Helper()
		for _, secret := range secrets {
			require.NotContains(t, out, secret, what)
		}
	}
	// The edit contains a sensitive value, and the filter of the run a secret.
	status, out = b.as(operator, "POST", "/api/dlq/replay",
		`{"filter": {"payload": {"card": {"number": "4111111111111111"}}}, "dryRun": true, "mergePatch": {"card": {"number": "5500005555555559"}}}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Contains(t, out, `"total":1`)
	require.NotContains(t, out, "5500005555555559")
	check("dry run", out)
	// A patch that copies or tests a secret does not reveal it.
	status, out = b.as(operator, "POST", "/api/dlq/replay",
		`{"filter": {"ids": ["`+id+
			`"]}, "dryRun": true, "patch": [{"op": "copy", "from": "/card", "path": "/a"}, {"op": "copy", "from": "", "path": "/b"}]}`)
	require.Equal(t, http.StatusOK, status, out)
	require.Contains(t, out, `"path":"/a"`)
	check("dry run of a copy", out)
	// A value shown as *** is never sent as ***.
	for _, edit := range []string{
		`{"payload": {"card": {"number": "***"}}}`,
		`{"mergePatch": {"card": {"number": "***"}}}`,
	} {
		status, out = b.as(operator, "POST", "/api/dlq/entries/"+id+"/replay", edit)
		require.Equal(t, http.StatusUnprocessableEntity, status, out)
		require.Contains(t, out, "contains ***, which stands for a masked value")
	}
	for _, number := range []string{"4111111111111111", "5500005555555559", "***"} {
		status, out = b.as(operator, "POST", "/api/dlq/entries/"+id+"/replay",
			`{"patch": [{"op": "test", "path": "/card/number", "value": "`+number+`"}]}`)
		require.Equal(t, http.StatusUnprocessableEntity, status, number+out)
	}
	status, out = b.as(operator, "POST", "/api/dlq/replay",
		`{"filter": {"payload": {"card": {"number": "4111111111111111"}}}, "rate": 0.001, "force": true, "note": "card 4111111111111111", "patch": [{"op": "replace", "path": "/card", "value": {"number": "4111111111111111"}}]}`)
	require.Equal(t, http.StatusAccepted, status, out)
	check("start", out)
	var answer struct{ Run struct{ ID string } }
	require.NoError(t, json.Unmarshal([]byte(out), &answer))
	status, out = b.as(operator, "POST", "/api/dlq/replays/"+answer.Run.ID+"/cancel", "")
	require.Equal(t, http.StatusOK, status, out)
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'") == 1
	}, 5*time.Minute, 50*time.Millisecond)
	status, out = b.as(operator, "POST", "/api/dlq/entries/"+id+"/replay",
		`{"mergePatch": {"card": {"number": "5500005555555559"}, "accounts": []}, "note": "for kim, 4111111111111111"}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Contains(t, out, `"/card/number"`)
	require.NotContains(t, out, "5500005555555559")
	check("replay", out)
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND dlq_retry_count > 0") == 1
	}, 5*time.Minute, 50*time.Millisecond)
	_, err = b.pool.Exec(t.Context(), postgrestest.RefreshRollups)
	require.NoError(t, err)
	approvalID := b.text(`SELECT dlq.request_approval('replay', '{"filter": {"payload": {"card": {"number": "4111111111111111"}}}, "mergePatch": {"card": {"number": "4111111111111111"}}, "patch": [{"op": "replace", "path": "/card", "value": {"number": "4111111111111111"}}]}', 'card 4111111111111111', 'kim')::text`)

	status, out = b.as(operator, "POST", "/api/dlq/bulk", `{"do": "note", "filter": {"ids": ["`+id+
		`"]}, "note": "card 4111111111111111"}`)
	require.Equal(t, http.StatusOK, status, out)
	failures := b.text("SELECT fingerprint FROM dlq.failure_groups WHERE queue = 'default' ORDER BY fingerprint LIMIT 1")
	job := b.text("SELECT river_job_id::text FROM dlq.dead_letter_queue")
	var noted struct{ Undo string }
	require.NoError(t, json.Unmarshal([]byte(out), &noted))

	for role, token := range map[string]string{"reader": reader, "operator": operator, "admin": admin} {
		for _, o := range doors() {
			if o.targetType == "open" || o.id == "get-login" || o.id == "get-view" || o.method != "GET" && o.id != "export" {
				continue
			}
			target := map[string]string{
				"entry": id, "run": answer.Run.ID, "stream": answer.Run.ID,
				"queue": "default", "approval": approvalID, "operation": noted.Undo, "job": job,
			}[o.targetType]
			path := strings.NewReplacer("{id}/same", target+"/"+failures, "{id}", target, "messages/none", "messages/m1",
				"queue=pay_eu&state=discarded", "queue=default&state=cancelled").Replace(o.path)
			o.path = path
			status, out := b.through(token, &o, target)
			if o.role == "" || access.Role(role).Includes(o.role) {
				require.Less(t, status, 400, o.id+" "+path+out)
			}
			check(role+" "+o.id+" "+path, out)
			if o.id == "get-entry" {
				require.Contains(t, out, `4200`, "other values are shown")
			}
		}
		status, out := b.as(token, "GET", "/metrics", "")
		require.Equal(t, http.StatusOK, status)
		check("metrics", out)
		_, out = b.browse(token, "/jobs?queue=default&state=cancelled")
		has(t, out, "/jobs/"+job)
		check("jobs", out)
		check("csv", func() string {
			_, out := b.as(token, "POST", "/api/dlq/export", `{"filter": {}, "format": "csv"}`)
			return out
		}())
	}
	require.Equal(t, 1, b.count(`SELECT least(count(*), 1) FROM dlq.acts WHERE subject = 'export' AND act = 'exported'
		AND origin IS NOT NULL`), "exports of masked values leave audit rows, too")
	check("log", log.text())
	require.Contains(t, log.text(), "Job cancelled explicitly", "the log says that a job failed, without its error")

	// Revealing requires a reason and the role operator, and leaves an audit row.
	reveal := "/api/dlq/entries/" + id + "/reveal"
	for body, want := range map[string]int{``: 422, `{}`: 422, `{"note": ""}`: 422, `{"note": " "}`: 422} {
		status, out = b.as(operator, "POST", reveal, body)
		require.GreaterOrEqual(t, status, 400, out)
		require.LessOrEqual(t, status, want, out)
		check("without a reason", out)
	}
	status, out = b.as(reader, "POST", reveal, `{"note": "curious"}`)
	require.Equal(t, http.StatusForbidden, status, out)
	status, out = b.as(b.token(access.Operator, access.Scope{{Queues: []string{"other"}}}), "POST", reveal,
		`{"note": "curious"}`)
	require.Equal(t, http.StatusNotFound, status, out)
	status, out = b.as(operator, "POST", "/api/dlq/export", `{"filter": {}, "reveal": true}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	status, out = b.as(operator, "POST", "/api/dlq/export", `{"filter": {}, "note": "x"}`)
	require.Equal(t, http.StatusUnprocessableEntity, status, out)
	require.Zero(t, b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'revealed'")+b.count(
		"SELECT count(*) FROM dlq.acts WHERE act = 'revealed'"))

	status, out = b.as(operator, "POST", reveal, `{"note": "ticket 7"}`)
	require.Equal(t, http.StatusOK, status, out)
	// Only the receiver's answer contains the last secret, and dlqd does not store the secrets of an answer.
	for _, secret := range secrets[:len(secrets)-1] {
		require.Contains(t, out, secret)
	}
	// Afterwards the same person sees the entry unmasked again, for a time and without another audit row.
	const reveals = "SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'revealed'"
	for range 2 {
		status, out = b.as(operator, "GET", reveal, "")
		require.Equal(t, http.StatusOK, status, out)
		require.Contains(t, out, secrets[0])
		require.Contains(t, out, `"revealedUntil"`)
	}
	status, out = b.browse(operator, "/dead-letters/"+id+"/reveal")
	require.Equal(t, http.StatusOK, status)
	has(t, out, secrets[0])
	has(t, out, "data-seconds-left")
	status, out = b.as(b.token(access.Admin, nil), "GET", reveal, "")
	require.Equal(t, http.StatusOK, status, out)
	check("another person", out)
	status, out = b.as(operator, "GET", strings.TrimSuffix(reveal, "/reveal"), "")
	require.Equal(t, http.StatusOK, status, out)
	check("an entry that is revealed elsewhere", out)
	require.Equal(t, 1, b.count(reveals))
	status, _, to := b.send(operator, "/dead-letters/"+id+"/reveal", url.Values{"note": {"ticket 9"}})
	require.Equal(t, []any{http.StatusSeeOther, "/dead-letters/" + id + "/reveal"}, []any{status, to})
	require.Equal(t, 2, b.count(reveals))
	superuser, err := pgx.Connect(t.Context(), postgrestest.Superuser(t, b.url))
	require.NoError(t, err)
	defer superuser.Close(t.Context())
	_, err = superuser.Exec(t.Context(), "SET session_replication_role = replica")
	require.NoError(t, err)
	_, err = superuser.Exec(t.Context(),
		"UPDATE dlq.dead_letter_transitions SET at = at - interval '11 minutes' WHERE reason = 'revealed'")
	require.NoError(t, err)
	status, out = b.as(operator, "GET", reveal, "")
	require.Equal(t, http.StatusOK, status, out)
	check("after the end", out)
	require.NotContains(t, out, `"revealedUntil"`)

	status, out = b.as(operator, "POST", "/api/dlq/export",
		`{"filter": {"queue": ["default"]}, "reveal": true, "note": "ticket 8"}`)
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, out, secrets[0])
	status, out = b.as(reader, "GET", "/api/dlq/audit?text=ticket", "")
	require.Equal(t, http.StatusOK, status)
	for _, want := range []string{
		"ticket 7", "ticket 8", `"reason":"revealed"`, `"reason":"export: revealed"`,
		`"entries":1`, id,
	} {
		require.Contains(t, out, want)
	}

	// The published policy decides which values are masked. Values that a new policy does not mask are visible again.
	require.NoError(t, pgx.BeginFunc(t.Context(), b.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), "SELECT dlq.protect('{}', '{}')")
		return err
	}))
	_, out = b.as(operator, "GET", "/api/dlq/entries/"+id, "")
	require.Contains(t, out, secrets[0])
}

// Columns that the policy hides from readers are hidden in the API, too.
func TestMask_HidesColumnsFromReaders(t *testing.T) {
	t.Parallel()
	b := scopeSetup(t)
	id := b.ids["pay_eu/order.paid"]
	for token, sees := range map[string]bool{
		b.token(access.Reader, nil): false, b.token(access.Operator, nil): true,
		b.token(access.Reader, access.Scope{{Queues: []string{"pay_eu"}}}):   false,
		b.token(access.Operator, access.Scope{{Queues: []string{"pay_eu"}}}): true,
	} {
		_, out := b.as(token, "GET", "/api/dlq/entries/"+id, "")
		require.Equal(t, sees, strings.Contains(out, "payload of pay_euorder.paid"), out)
		require.Contains(t, out, "secret of pay_euorder.paid", "the default policy does not hide error texts")
	}
	_, err := b.pool.Exec(t.Context(), "SELECT dlq.protect('{error_message,retry_history,notes}')")
	require.NoError(t, err)
	reader := b.token(access.Reader, nil)
	for _, path := range []string{
		"/api/dlq/entries/" + id, "/api/dlq/entries", "/api/dlq/analytics/groups",
		"/api/dlq/replays/" + b.runs["pay_eu"],
	} {
		status, out := b.as(reader, "GET", path, "")
		require.Equal(t, http.StatusOK, status)
		require.NotContains(t, out, "secret of", path)
	}
}
