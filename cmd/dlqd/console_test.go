package main_test

import (
	"bytes"
	"context"
	"html"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

var copied = regexp.MustCompile(`<li><span>([^<]+)</span><code data-copy="([^"]*)">`)

// TestConsole_CopiedCommandsRun checks each text that a page of the console has for copying: a command, SQL for an
// operator, and curl. The text runs without changes and finds the entries that the page shows.
func TestConsole_CopiedCommandsRun(t *testing.T) {
	t.Parallel()
	const queue = "it's $HOME; `id`"
	p := newDeployment(t, map[string]string{"dlq-routing": "rules:\n  - {name: theirs, match: {status: 422}, class: " +
		"validation}\n"}, "")
	p.serve()
	p.answers(func(w http.ResponseWriter, d delivery) {
		w.Header().Set("X-Error-Type", "it's \"$HOME\"")
		w.WriteHeader(http.StatusUnprocessableEntity)
	})
	p.send(3, "order.placed", `{"customer": "it's $HOME"}`, `"orderingKey": "it's \"$HOME\""`)
	p.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) VALUES ('order.sent', '{}', '` +
		strings.ReplaceAll(queue, "'", "''") + `', 1, 'running')`)
	p.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
		errors = ARRAY['{"error": "it''s $HOME"}'::jsonb] WHERE kind = 'order.sent'`)
	p.await("4", decided)
	one := func(sql string) string {
		var value string
		require.NoError(t, p.pool.QueryRow(t.Context(), sql).Scan(&value), sql)
		return value
	}
	first := one("SELECT id::text FROM dlq.dead_letter_open WHERE kind = 'order.placed' ORDER BY id LIMIT 1")
	second := one("SELECT id::text FROM dlq.dead_letter_open WHERE kind = 'order.placed' ORDER BY id OFFSET 1 LIMIT 1")
	odd := one("SELECT id::text FROM dlq.dead_letter_open WHERE kind = 'order.sent'")
	group := one("SELECT fingerprint FROM dlq.dead_letter_open WHERE kind = 'order.sent'")
	p.exec(`SELECT dlq.act_where('note', '{"kind": "order.placed"}', 'kim', 'it''s $HOME')`)
	p.exec(`SELECT dlq.request_approval('bulk', '{"do": "discard", "filter": {"kind": "order.placed"}}', 'it''s $HOME', 'kim')`)
	p.exec(`SELECT dlq.replay_pause(dlq.replay_start('{"kind": "order.placed"}', p_actor => 'kim', p_force => true), 'kim')`)
	p.exec(postgrestest.RefreshRollups)
	operation, approval, run := one("SELECT id::text FROM dlq.operations"), one("SELECT id::text FROM dlq.approvals"),
		one("SELECT id::text FROM dlq.replay_runs")
	list := func(path string, query ...string) string {
		values := url.Values{}
		for i := 0; i < len(query); i += 2 {
			values.Add(query[i], query[i+1])
		}
		return path + "?" + values.Encode()
	}
	operator, err := pgx.Connect(t.Context(), postgrestest.WithUser(p.url, p.logins[""]))
	require.NoError(t, err)
	t.Cleanup(func() { _ = operator.Close(context.Background()) })
	env := append(os.Environ(), "PATH="+filepath.Dir(program)+":"+os.Getenv("PATH"), "DLQD_API="+p.dlqd.api,
		"DLQD_DATABASE_URL="+p.url)
	all := []string{"command", "SQL", "curl"}
	for path, page := range map[string]struct {
		ways  []string
		finds []string // texts in the output of each of the ways
		not   string   // a text that is in none of the outputs
	}{
		"/":             {all, []string{queue}, ""},
		"/dead-letters": {all, []string{first, second, odd}, ""},
		list("/dead-letters", "q", `key:"it's \"$HOME\"" payload.customer:"it's $HOME"`): {all, []string{first, second}, odd},
		list("/dead-letters", "q", `"it's $HOME" kind:order.*`, "order", "oldest"):       {all, []string{odd}, first},
		"/dead-letters/" + odd:   {all, []string{odd}, first},
		"/dead-letters/" + first: {all, []string{first}, odd},
		"/groups":                {all, []string{group}, ""},
		list("/groups", "queue", queue, "status", "open", "order", "open", "over", "7d", "owner", "nobody"): {
			all,
			[]string{group},
			"",
		},
		"/groups/" + url.PathEscape(queue) + "/" + group: {all, []string{group, odd}, first},
		"/review": {all, []string{first, odd}, ""},
		list("/review", "whose", "nobody", "q", "queue:"+strconv.Quote(queue)): {all, []string{odd}, first},
		list("/bulk", "all", "1", "do", "discard", "q", "queue:"+strconv.Quote(queue)): {
			all,
			[]string{queue},
			"default",
		},
		list("/bulk", "all", "1", "do", "assign", "assignee", "it's $HOME"): {
			all,
			[]string{queue, "default"},
			"",
		},
		list("/bulk", "all", "1", "do", "tag", "q", "kind:order.placed"): {
			all,
			[]string{"default"},
			queue,
		},
		list("/bulk", "all", "1", "do", "tag", "q", "kind:order.placed", "tags", "one, two-2"): {
			all,
			[]string{"default"},
			queue,
		},
		list("/bulk", "all", "1", "do", "note", "q", "kind:order.placed"): {
			[]string{"SQL", "curl"},
			[]string{"default"},
			queue,
		},
		list("/bulk", "do", "replay", "id", first, "id", second, "rate", "5", "order", "newest"): {
			all,
			[]string{"default"},
			queue,
		},
		"/operations/" + operation:     {all, []string{operation, first}, odd},
		"/approvals":                   {all, []string{approval}, ""},
		"/approvals/" + approval:       {all, []string{approval}, ""},
		"/replays":                     {all, []string{run}, ""},
		"/replays/" + run:              {all, []string{"paused"}, ""},
		"/audit":                       {all, []string{run}, odd},
		"/audit?people=true&each=true": {all, []string{first}, odd},
		list("/audit", "queue", queue): {all, []string{odd}, first},
		"/queues":                      {all, []string{"default"}, ""},
		"/policy":                      {[]string{"SQL", "curl"}, []string{"theirs"}, ""},
		"/access":                      {[]string{"command", "curl"}, nil, ""},
		"/system":                      {append(slices.Clone(all), "checks"), nil, ""},
		"/docs":                        {[]string{"command", "curl"}, []string{"/api/dlq/entries"}, ""},
	} {
		t.Run(path, func(t *testing.T) {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.dlqd.api+path, nil)
			require.NoError(t, err)
			request.Header.Set("Accept", "text/html")
			response, err := http.DefaultClient.Do(request)
			require.NoError(t, err)
			raw, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			require.Equal(t, http.StatusOK, response.StatusCode)
			if path == "/dead-letters/"+first {
				require.Contains(t, string(raw),
					`<a href="/policy#rule-theirs">theirs</a> <code class="faint">dlq-routing.yaml:2</code>`)
			}
			ways := []string{}
			for _, found := range copied.FindAllStringSubmatch(string(raw), -1) {
				name, text := found[1], html.UnescapeString(found[2])
				ways = append(ways, name)
				var out string
				if name == "SQL" {
					results, err := operator.PgConn().Exec(t.Context(), text).ReadAll()
					require.NoError(t, err, text)
					for _, result := range results {
						for _, row := range result.Rows {
							out += string(bytes.Join(row, []byte(" "))) + "\n"
						}
					}
				} else {
					cmd := exec.CommandContext(t.Context(), "bash", "-euc", text)
					cmd.Env = env
					printed, err := cmd.CombinedOutput()
					out = string(printed)
					if name == "checks" { // the checks fail if they find something
						require.Contains(t, out, "schema")
						continue
					}
					require.NoError(t, err, "%s: %s\n%s", name, text, out)
				}
				require.NotRegexp(t, `(?m)^\{("\$schema":"[^"]*",)?"title":`, out, text)
				for _, word := range page.finds {
					require.Contains(t, out, word, "%s: %s", name, text)
				}
				if page.not != "" {
					require.NotContains(t, out, page.not, "%s: %s", name, text)
				}
			}
			require.Equal(t, page.ways, ways)
		})
	}
	require.Equal(t, "4", one("SELECT count(*)::text FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"),
		"a copied text changed an entry")
}
