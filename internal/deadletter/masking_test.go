package deadletter_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// Values that must not appear in any output.
const (
	cardNumber = "4111111111111111"
	email      = "kim@example.com"
	token      = "dlqd_0123456789abcdefABCDEF0123456789"
	iban       = "DE02120300000000202051"
	apiKey     = "X-Key-of-the-shop"
	pin        = "7351"
)

var secrets = []string{cardNumber, email, token, iban, apiKey, pin}

func maskingPolicy() policy.Data {
	return policy.Data{
		SensitivePaths: []string{
			"payload.card.number", "payload.card.pin", "payload..email", "payload.accounts[*].iban",
			"headers.X-Api-Key", "metadata.customer",
		},
		SensitivePatterns: []string{policy.PatternCardNumbers, policy.PatternTokens},
	}
}

// Go masks the answers of destinations, and SQL masks the data that it returns. Both mask the same email addresses.
func TestMask_HidesAddresses(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Open(t, postgrestest.URL(t))
	data := policy.Data{SensitivePatterns: []string{policy.PatternEmails}}
	mask := string(data.Masked())
	for in, want := range map[string]string{
		"no such mailbox: <Kim.Lee+x@mail.example.co.uk>.": "no such mailbox: <***>.",
		"GET /users?email=kim%40example.com&page=2":        "GET /users?email=***&page=2",
		"k@x.co":                          "***",
		"pkg@1.2.3, root@localhost, @kim": "pkg@1.2.3, root@localhost, @kim",
		strings.Repeat("a@", 100_000):     strings.Repeat("a@", 100_000),
	} {
		require.Equal(t, want, data.Mask(nil)(in))
		var out string
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT dlq.masked_text($1, $2)", in, mask).Scan(&out))
		require.Equal(t, want, out)
	}
	var out string
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT dlq.masked_json($1, 'payload', $2)::text",
		`{"to": ["k@x.co", {"by": "Kim <kim@example.com>"}], "k@x.co": 1, "n": 1.50}`, mask).Scan(&out))
	require.JSONEq(t, `{"to": ["***", {"by": "Kim <***>"}], "***": 1, "n": 1.50}`, out)
}

func TestMask_HidesSensitiveValues(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Open(t, postgrestest.URL(t))
	mask := string(maskingPolicy().Masked())
	values := string(policy.Data{SensitivePaths: []string{
		"payload.*.id", "metadata", "payload.a.b..c.d",
		"payload.a b.c+d",
	}}.Masked())
	for name, c := range map[string]struct{ mask, kind, in, out string }{
		"paths": {
			mask, "k",
			`{"card": {"number": 4111111111111111, "brand": "visa"}, "a": [{"Email": "a@b.c"}], "n": 1.50}`,
			`{"card": {"number": "***", "brand": "visa"}, "a": [{"Email": "***"}], "n": 1.50}`,
		},
		"dlqd message": {
			mask, "dlqd_message",
			`{"payload": {"accounts": [{"iban": 1}, {"iban": [2]}]}, "headers": {"x-api-key": "x"}, "iban": 3}`,
			`{"payload": {"accounts": [{"iban": "***"}, {"iban": "***"}]}, "headers": {"x-api-key": "***"}, "iban": 3}`,
		},
		"other paths": {
			mask, "k", `{"number": "x", "x": {"card": {"number": "y"}}, "cards": {"number": 1}}`,
			`{"number": "x", "x": {"card": {"number": "y"}}, "cards": {"number": 1}}`,
		},
		"whole objects": {
			mask, "k", `{"email": {"work": "a", "home": null}, "card": "x"}`,
			`{"email": "***", "card": "x"}`,
		},
		"any key": {
			values, "k", `{"a": {"id": 1}, "b": {"id": 2, "c": 3}, "c": {"c": {"id": 4}}}`,
			`{"a": {"id": "***"}, "b": {"id": "***", "c": 3}, "c": {"c": {"id": 4}}}`,
		},
		"depth in the middle": {
			values, "k", `{"a": {"b": {"x": {"c": {"d": 1}}, "c": {"d": 2}}, "c": {"d": 3}}}`,
			`{"a": {"b": {"x": {"c": {"d": "***"}}, "c": {"d": "***"}}, "c": {"d": 3}}}`,
		},
		"keys with punctuation": {values, "k", `{"a b": {"c+d": 1, "ccd": 2}}`, `{"a b": {"c+d": "***", "ccd": 2}}`},
		"a separator in a key": {
			values, "k", `{"a": {"x\u001fy": {"id": 1}}, "z\u001fz": {"id": 2}}`,
			`{"a": {"x\u001fy": {"id": 1}}, "z\u001fz": {"id": "***"}}`,
		},
		"patterns": {
			mask, "k",
			`{"t": "see Bearer abcdefgh12345 and 4111 1111 1111 1111 12/27", "c": 4111111111111111, "4111-1111-1111-1111": 1}`,
			`{"t": "see *** and *** 12/27", "c": "***", "***": 1}`,
		},
		"numbers other than cards": {
			mask, "k",
			`{"a": 4111111111111112, "b": 1764000000123, "c": "14111111111111111", "d": 41111111111111110000}`,
			`{"a": 4111111111111112, "b": 1764000000123, "c": "14111111111111111", "d": 41111111111111110000}`,
		},
		"payload text": {
			mask, "dlqd_message", `{"payload": {"email": "a@b.c"}, "payloadText": "{ \"email\": \"a@b.c\" }"}`,
			`{"payload": {"email": "***"}, "payloadText": "***"}`,
		},
		"no mask": {`{}`, "k", `{"email": "x"}`, `{"email": "x"}`},
	} {
		var out string
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT dlq.masked_json($1, dlq.event_path($2), nullif($3::jsonb, "+
			"'{}'))::text", c.in, c.kind, c.mask).Scan(&out), name)
		var want string
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT $1::jsonb::text", c.out).Scan(&want))
		require.Equal(t, want, out, name)
	}
	// A number in a pointer stands for a key or an array index.
	for pointer, want := range map[string]string{
		"/7/id": `"***"`, "/7/id/x": `"***"`, "/0/7/id": `"***"`, "/7/name": `"x"`, "/7/7": `{"a": "x", "id": "***"}`,
	} {
		var out string
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT dlq.masked_at($1, CASE $1
			WHEN '/7/7' THEN '{"id": "y", "a": "x"}' ELSE '"x"' END::jsonb, $2)::text`, pointer, values).Scan(&out), pointer)
		require.Equal(t, want, out, pointer)
	}
	// If a filter has values for a sensitive path, these values are masked.
	var filtered string
	require.NoError(t, pool.QueryRow(t.Context(),
		`SELECT dlq.masked_detail('{"filter": {"payloadAt": [{"path": ["card", "number"], "values": ["x", 1]}, {"path": ["n"], "values": ["y"]}, {"path": "card", "values": ["x"]}]}}', $1)::text`, mask).Scan(&filtered))
	require.JSONEq(t, `{"filter": {"payloadAt": [{"path": ["card", "number"], "values": ["***", "***"]}, {"path": ["n"], "values": ["y"]}, "***"]}}`, filtered)
	// These values exceed the limits of masking: depth, size, and number of matches.
	for name, in := range map[string]string{
		"deep":   strings.Repeat(`{"a":[`, 3000) + `"` + token + `"` + strings.Repeat("]}", 3000),
		"large":  `["` + strings.Repeat("x", 1_100_000) + `", "` + token + `"]`,
		"cards":  `["` + strings.Repeat("4111111111111111 5500005555555559 ", 20_000) + `"]`,
		"emails": "[" + strings.Repeat(`{"email": "a@b.c"},`, 20_000) + `{"email": "b@c.d"}]`,
	} {
		var out string
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT dlq.masked_json($1, 'payload', $2)::text", in, mask).Scan(&out),
			name)
		for _, secret := range []string{token, "4111111111111111", "@b.c"} {
			require.NotContains(t, out, secret, name)
		}
	}
	// A large list of arrays must not take long.
	large := `{"email":"zz@zz.org","l":[` + strings.Repeat(`["zz@zz.org",0],`, 60_000) + `0]}`
	var whole bool
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT dlq.sensitive_values($1, NULL, NULL, 'k', $2) = "+
		"ARRAY[NULL]::text[]", large, mask).Scan(&whole))
	require.True(t, whole, "the value is masked without being searched")
	// If one sensitive value is a prefix of another, the longer one is masked completely. With more than a hundred
	// sensitive values, the whole text is masked.
	var text string
	require.NoError(t, pool.QueryRow(t.Context(),
		`SELECT dlq.masked_text('of abcd and abcdefgh', $1, dlq.sensitive_values('{"email": ["abcd", "abcdefgh"]}', NULL, NULL, 'k', $1))`, mask).Scan(&text))
	require.Equal(t, "of *** and ***", text)
	for n, want := range map[int]string{100: "nothing of them", 101: "***"} {
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT dlq.masked_text('nothing of them', $1, dlq.sensitive_values(
			(SELECT jsonb_build_object('email', jsonb_agg('user' || i)) FROM generate_series(1, $2) i), NULL, NULL, 'k',
				$1))`, mask, n).Scan(&text))
		require.Equal(t, want, text, n)
	}
	// Tokens of many issuers are masked.
	for _, text := range []string{
		token, "sk_live_51H8abcdEFGH", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJraW0ifQ.c2lnbmF0dXJl",
		"AKIAIOSFODNN7EXAMPLE", "ghp_abcdefghijklmnopqrstuvwxyz0123456789", "xoxb-1234567890-abcdef",
		"Authorization: Basic a2ltOnNlY3JldA==", "3782 822463 10005", "378282246310005", "5500-0055-5555-5559",
	} {
		var out string
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT dlq.masked_text('a ' || $1::text || ' z', $2)",
			text, mask).Scan(&out))
		require.Contains(t, []string{"a *** z", "a *** z", "a Authorization: *** z", "a ***"}, out, text)
	}
}

// createSensitiveEntries creates a database with dead letters that have a secret in each field that may be masked. It
// returns the database's URL, and a store of it.
func createSensitiveEntries(t *testing.T) (string, *deadletter.Store) {
	t.Helper()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	require.NoError(t, store.Protect(t.Context(), []string{}, maskingPolicy().Masked()))
	payload := fmt.Sprintf(`{"amount": 4200, "card": {"number": %q, "pin": %s}, "people": [{"email": %q}], "accounts": [{"iban": %q}], "free": "token %s"}`, cardNumber, pin, email, iban, token)
	message := fmt.Sprintf(`{"messageId": "m1", "kind": "order.paid", "queue": "q", "payload": %s, "headers": {"X-Api-Key": %q}, "orderingKey": %q, "subscriberId": %q, "payloadText": %s}`,
		payload, apiKey, email, email, quoteJSON(t, payload))
	text := fmt.Sprintf("card %s of %s <%s> refused for %s: PIN %s; Authorization: Bearer %s", cardNumber, email,
		email, iban, pin, token)
	for _, sql := range []struct {
		sql  string
		args []any
	}{
		{`INSERT INTO river_job (kind, args, queue, max_attempts, state, metadata)
			VALUES ('dlqd_message', $1, 'q', 1, 'running', jsonb_build_object('customer', $2::text)),
				('order.paid', $3, 'q', 1, 'running', '{}')`, []any{message, email, payload}},
		{
			`UPDATE river_job SET state = 'discarded', finalized_at = now(), metadata = metadata || jsonb_build_object('dlq:error', jsonb_build_object('attempt', attempt, 'message', $1::text, 'type', 'DECLINED', 'context', jsonb_build_object('card', $1::text))),
			errors = ARRAY[jsonb_build_object('error', $1::text, 'attempt', attempt, 'trace', 'panic: ' || $1::text)]`,
			[]any{text},
		},
		{
			`SELECT dlq.act_on('park', ARRAY(SELECT id FROM dlq.dead_letter_queue), 'owner', 'talked about ' || $1::text)`,
			[]any{cardNumber},
		},
		{`SELECT dlq.refresh_rollups()`, nil},
		{`SELECT dlq.replay_start(jsonb_build_object('payload', jsonb_build_object('card', jsonb_build_object('number', $1::text))), p_patch => jsonb_build_array(jsonb_build_object('op', 'replace', 'path', '/card', 'value', $2::jsonb)), p_force => true, p_rate => 0.001, p_note => $1)`, []any{cardNumber, fmt.Sprintf(`{"number": %q, "pin": %s}`, cardNumber, pin)}},
		{`SELECT dlq.request_approval('replay', jsonb_build_object('filter', '{}'::jsonb, 'all', true, 'mergePatch', $1::jsonb), 'card ' || $2::text)`, []any{payload, cardNumber}},
		{
			`INSERT INTO dlq.ordered_jobs (queue, ordering_key, job_id, job_created_at) VALUES ('q', $1, 99, now())`,
			[]any{email},
		},
		{`SELECT dlq.open_breaker('queue:q', 'kim', 'card ' || $1::text), dlq.set_automatic('queue', 'q', false, '{}', 'kim', 'card ' || $1::text)`, []any{cardNumber}},
		{
			`SELECT dlq.replay(id, 'kim', 'card ' || $2::text, $1::jsonb) FROM dlq.dead_letter_queue`,
			[]any{payload, cardNumber},
		},
	} {
		_, err := pool.Exec(t.Context(), sql.sql, sql.args...)
		require.NoError(t, err, sql.sql)
	}
	return url, store
}

func quoteJSON(t *testing.T, text string) string {
	t.Helper()
	raw, err := json.Marshal(text)
	require.NoError(t, err)
	return string(raw)
}

// The test reads every table and calls every function that a role may use. It finds them in the catalog, so that new
// ones are included.
func TestMask_CoversEveryTableAndFunction(t *testing.T) {
	t.Parallel()
	url, store := createSensitiveEntries(t)
	found := 0
	for _, role := range []string{"dlq_reader", "dlq_operator", "dlq_admin"} {
		asRole(t, url, role, func(conn *pgx.Conn) {
			ctx := t.Context()
			look := func(sql string, args ...any) string {
				rows, err := conn.Query(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
				require.NoError(t, err, sql)
				all, err := pgx.CollectRows(rows, pgx.RowTo[*string])
				if err != nil {
					require.Regexp(t, "22023|DLQ02|DLQ04", err.Error(), sql) // the argument is not a valid filter or id here
				}
				var out strings.Builder
				for _, row := range all {
					if row != nil {
						out.WriteString(*row + "\n")
					}
				}
				for _, secret := range secrets {
					require.NotContains(t, out.String(), secret, role+": "+sql)
				}
				return out.String()
			}
			for sql := range strings.SplitSeq(strings.TrimSpace(look(`
				SELECT format('SELECT (SELECT jsonb_agg(x)::text FROM (SELECT %s FROM dlq.%I LIMIT 100) x)',
					string_agg(quote_ident(a.attname), ', '), c.relname)
				FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
				WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
					AND has_column_privilege(c.oid, a.attnum, 'SELECT') GROUP BY c.relname`)), "\n") {
				if look(sql) != "" {
					found++
				}
			}
			// Call the functions without arguments, and those with a filter or an id as the only argument without a default.
			for call := range strings.SplitSeq(strings.TrimSpace(look(`
				SELECT format('SELECT jsonb_agg(f)::text FROM dlq.%I(%s) f', p.proname, CASE
					WHEN p.pronargs = p.pronargdefaults THEN '' WHEN p.proargtypes[0] = 'jsonb'::regtype THEN '''{}'''
					ELSE '(SELECT id FROM dlq.dead_letter_queue LIMIT 1)' END)
				FROM pg_proc p WHERE p.pronamespace = 'dlq'::regnamespace AND p.prokind = 'f' AND p.provolatile <> 'v'
					AND has_function_privilege(p.oid, 'EXECUTE')
				AND (p.pronargs = p.pronargdefaults OR p.pronargs = p.pronargdefaults + 1
				AND p.proargtypes[0] IN ('jsonb'::regtype, 'uuid'::regtype)) AND p.proname <> 'revealed'`)), "\n") {
				look(call)
			}
			look("SELECT entries::text FROM dlq.entries")
			require.Contains(t, look("SELECT jsonb_agg(e)::text FROM dlq.entries e"), "4200", "other values are visible")
			// A search for a masked value finds nothing.
			ask := `SELECT id::text FROM dlq.entries WHERE original_event::text LIKE '%' || $1 || '%'
				OR error_message LIKE '%' || $1 || '%'`
			require.Empty(t, look(ask, cardNumber))
			for _, sql := range []string{
				"SELECT * FROM dlq.find($1)", "SELECT * FROM dlq.preview($1)",
				"SELECT dlq.find_ids($1, 1)",
			} {
				for _, filter := range []string{
					`{"payload": {"card": {"number": "` + cardNumber + `"}}}`,
					`{"orderingKey": "` + email + `"}`,
				} {
					_, err := conn.Exec(ctx, sql, filter)
					if role == "dlq_reader" {
						require.ErrorContains(t, err, "DLQ06", sql)
					} else {
						require.NoError(t, err, sql)
					}
				}
			}
			for _, sql := range []string{
				"SELECT original_event FROM dlq.dead_letter_queue",
				"SELECT detail FROM dlq.dead_letter_transitions", "SELECT error_message FROM dlq.dead_letter_open",
				"SELECT patch FROM dlq.replay_runs", "SELECT dlq.protect('{}')",
			} {
				_, err := conn.Exec(ctx, sql)
				require.ErrorContains(t, err, "42501", role+sql)
			}
		})
	}
	require.Greater(t, found, 40)

	// For operators and readers, the reads of Store return no more than SQL does. With a reason they return everything,
	// and the audit trail has the actor.
	ctx := t.Context()
	act := deadletter.Act{Actor: "kim", Note: "ticket 7"}
	read := func(ctx context.Context) string {
		list, err := store.List(ctx, deadletter.Page{Limit: 10})
		require.NoError(t, err)
		require.Len(t, list, 2)
		var out []any
		for _, e := range list {
			entry, trail, err := store.Get(ctx, e.ID)
			require.NoError(t, err)
			out = append(out, e, entry, trail)
		}
		found, err := store.FindEntries(ctx, json.RawMessage("{}"), nil)
		require.NoError(t, err)
		audit, err := store.Audit(ctx, deadletter.AuditFilter{}, 100, deadletter.AuditCursor{})
		require.NoError(t, err)
		raw, err := json.Marshal(append(out, found, audit))
		require.NoError(t, err)
		return string(raw)
	}
	for _, out := range []string{read(ctx), read(postgres.AsReader(ctx))} {
		for _, secret := range secrets {
			require.NotContains(t, out, secret)
		}
		require.Contains(t, out, "4200")
	}
	id := firstID(t, store)
	_, _, err := store.Reveal(ctx, id, deadletter.Act{Actor: "kim", Note: " "})
	require.ErrorIs(t, err, deadletter.ErrInvalid)
	_, _, err = store.Reveal(ctx, uuid.New(), act)
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	entry, trail, err := store.Reveal(ctx, id, act)
	require.NoError(t, err)
	require.Contains(t, string(entry.OriginalEvent), cardNumber)
	require.Contains(t, *entry.ErrorMessage, email)
	last := trail[len(trail)-1]
	require.Equal(t, []string{"kim", "revealed", "ticket 7"}, []string{last.Actor, *last.Reason, *last.Note})
	_, err = store.RecordExport(ctx, json.RawMessage(`{"queue": "q"}`), true, deadletter.Act{Actor: "kim"})
	require.ErrorIs(t, err, deadletter.ErrInvalid)
	all, err := store.RecordExport(ctx, json.RawMessage(`{"queue": "q"}`), true, act)
	require.NoError(t, err)
	found2, err := store.FindEntries(all, json.RawMessage(`{"queue": "q"}`), nil)
	require.NoError(t, err)
	require.Len(t, found2, 2)
	require.Contains(t, string(found2[0].OriginalEvent), cardNumber)
	audit, err := store.Audit(ctx, deadletter.AuditFilter{Text: "export"}, 1, deadletter.AuditCursor{})
	require.NoError(t, err)
	require.JSONEq(t, `{"filter": {"queue": "q"}, "entries": 2}`, string(audit[0].Detail))
}

func TestReveal_RecordsEachUseInSQL(t *testing.T) {
	t.Parallel()
	url, store := createSensitiveEntries(t)
	id := firstID(t, store).String()
	asRole(t, url, "dlq_reader", func(conn *pgx.Conn) {
		for _, sql := range []string{
			"CALL dlq.reveal('" + id + "', 'why')", "SELECT dlq.revealed('" + id + "')",
			"SELECT dlq.record_reveal('" + id + "', 'why')",
		} {
			_, err := conn.Exec(t.Context(), sql)
			require.ErrorContains(t, err, "42501")
		}
	})
	login := asRole(t, url, "dlq_operator", func(conn *pgx.Conn) {
		ctx := t.Context()
		fails := func(state string, statements ...string) {
			for i, sql := range statements {
				_, err := conn.Exec(ctx, sql)
				if i < len(statements)-1 {
					require.NoError(t, err, sql)
				} else {
					require.ErrorContains(t, err, state, sql)
				}
			}
			_, err := conn.Exec(ctx, "ROLLBACK")
			require.NoError(t, err)
		}
		fails("DLQ04", "CALL dlq.reveal('"+id+"', '')")
		fails("DLQ02", "CALL dlq.reveal('"+uuid.NewString()+"', 'why')")
		fails("DLQ06", "SELECT dlq.revealed('"+id+"')")
		// A reveal returns nothing if its audit row could be rolled back.
		fails("2D000", "BEGIN", "CALL dlq.reveal('"+id+"', 'why')")
		fails("DLQ06", "BEGIN", "SELECT dlq.record_reveal('"+id+"', 'why')", "SELECT dlq.revealed('"+id+"')")
		fails("DLQ06", "BEGIN", "SAVEPOINT s", "SELECT dlq.record_reveal('"+id+"', 'why')", "RELEASE s",
			"SELECT dlq.revealed('"+id+"')")
		var count int
		require.NoError(t, conn.QueryRow(ctx, "SELECT count(*) FROM dlq.audit('{\"text\": \"revealed\"}')").Scan(&count))
		require.Zero(t, count)
		var entry string
		require.NoError(t, conn.QueryRow(ctx, "CALL dlq.reveal('"+id+"', 'ticket 7')").Scan(&entry))
		require.Contains(t, entry, cardNumber)
		require.Contains(t, entry, email)

		// A reason is valid for one reveal only. Each reveal writes an audit row.
		reveals := func() (n int) {
			require.NoError(t, conn.QueryRow(ctx,
				"SELECT count(*) FROM dlq.audit('{\"text\": \"revealed\"}')").Scan(&n))
			return n
		}
		require.Equal(t, 1, reveals())
		fails("DLQ06", "SELECT dlq.revealed('"+id+"')")
		fails("DLQ06", "BEGIN", "SELECT dlq.revealed('"+id+"')")
		fails("DLQ06", "SELECT dlq.record_reveal('"+id+"', 'why')", "SELECT dlq.revealed('"+id+"')")
		const forgedCall = `DO $do$ DECLARE p_entry jsonb; p_id uuid := '%s'; BEGIN p_entry := dlq.revealed(p_id)%s; END $do$`
		fails("DLQ06", fmt.Sprintf(forgedCall, id, ""))
		fails("DLQ06", fmt.Sprintf(forgedCall, id,
			" || jsonb_build_object('\"\nPL/pgSQL function dlq.reveal(uuid,text,jsonb) line 5 at assignment', (SELECT 1))"))
		require.Equal(t, 2, reveals())
		_, err := conn.Exec(ctx,
			"DO $do$ DECLARE e jsonb; BEGIN CALL dlq.reveal('"+id+"', 'ticket 8', e); "+
				"CALL dlq.reveal('"+id+"', 'ticket 9', e); END $do$")
		require.NoError(t, err)
		require.Equal(t, 4, reveals())
	})
	asRole(t, url, "dlq_operator", func(conn *pgx.Conn) { // with the search_path of "dlqd psql"
		_, err := conn.Exec(t.Context(), "SET search_path = dlq, public")
		require.NoError(t, err)
		var entry string
		require.NoError(t, conn.QueryRow(t.Context(), "CALL reveal('"+id+"', 'ticket 10')").Scan(&entry))
		require.Contains(t, entry, cardNumber)
		_, err = conn.Exec(t.Context(), "SELECT revealed('"+id+"')")
		require.ErrorContains(t, err, "DLQ06")
	})
	asRole(t, url, "dlq_operator", func(conn *pgx.Conn) {
		_, err := conn.Exec(t.Context(), "SELECT dlq.revealed('"+id+"')")
		require.ErrorContains(t, err, "DLQ06", "a reveal of another session does not count")
	})
	moves, err := store.Audit(t.Context(), deadletter.AuditFilter{Text: "revealed"}, 10, deadletter.AuditCursor{})
	require.NoError(t, err)
	require.Len(t, moves, 5)
	require.Equal(t, []string{login, "ticket 7", id}, []string{moves[4].Actor, *moves[4].Note, moves[4].EntryID.String()})
}

func firstID(t *testing.T, store *deadletter.Store) uuid.UUID {
	t.Helper()
	entries, err := store.List(t.Context(), deadletter.Page{Limit: 1})
	require.NoError(t, err)
	require.Len(t, entries, 1)
	return entries[0].ID
}
