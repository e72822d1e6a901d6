package console_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestHostileMessage checks that every page shows a hostile message as text: no part of the message becomes an element,
// runs as a script, is fetched, or imitates other text.
func TestHostileMessage(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	const evil = `<script>window.evil=1</script><img src=x onerror=window.evil=1><svg onload=window.evil=1>"'><b class=evil>{{.}}</b>&lt;i&gt;` +
		"\u202egnp.exe\u2066\u200b\u0007\u001b[31m javascript:alert(1) " +
		"\u2028</textarea></pre></script><style>*{display:none}</style>"
	o.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, attempted_at, state, tags, metadata)
		VALUES (left($1, 120), jsonb_build_object($1::text, $1::text, 'deep', jsonb_build_array($1::text)), 'payments', 1, 1,
			now(), 'running', ARRAY['tag-' || left($1, 60)], jsonb_build_object('dlq:error',
			jsonb_build_object('attempt', 1, 'type', left($1, 120), 'code', left($1, 60), 'message', $1::text, 'context',
				jsonb_build_object('c', $1::text)), 'own', $1::text))`, evil)
	o.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY[jsonb_build_object('at', now(), 'attempt', 1, 'error', $1::text, 'trace', 'panic: ' || $1::text || E'\n\ngoroutine 1:\nmain.' || $1::text || E'()\n\t/app/' || $1::text || '.go:12')]`, evil)
	o.eventually(1, "SELECT count(*) FROM dlq.dead_letter_open")
	id := o.text("SELECT id::text FROM dlq.dead_letter_open")
	o.exec("SELECT dlq.act_on('note', ARRAY[$1::uuid], $2, $2)", id, evil)
	o.exec("SELECT dlq.act_on('assign', ARRAY[$1::uuid], 'kim', NULL, jsonb_build_object('assignee', left($2, 200)))",
		id, evil)
	o.eventually(0, "SELECT count(*) FROM dlq.dead_letter_inbox")

	o.doAll(evil, evil, `{"queue": "payments"}`)
	o.exec(postgrestest.RefreshRollups)

	b := o.tab()
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_queue")
	shown := map[string]bool{"/": true, "/dead-letters": true, "/dead-letters/" + id: true, group: true, "/review": true}
	for _, path := range append(pages(o, id, group), listOf(evil), listOf(`error:"<script>"`), "/bulk?do=replay&id="+id,
		"/bulk?do=assign&id="+id, "/<script>x") {
		b.allow("status of 4")
		b.open(path)
		require.Nil(t, b.value("window.evil"), path)
		require.InDelta(t, 0, b.value(
			`document.querySelectorAll("b.evil, img, script:not([src]), style, body svg[onload], main script").length`), 0, path)
		require.Equal(t, true, b.value(`getComputedStyle(document.querySelector("main")).display !== "none"`), path)
		require.Equal(t, false, b.value(
			`/[\u202a-\u202e\u2066-\u2069\u200b\u0007\u001b\u2028]/.test([...document.querySelectorAll("body *")].flatMap(e => [...e.childNodes]).filter(n => n.nodeType === 3).map(n => n.data).join(""))`), "%s shows invisible characters", path)
		if shown[path] {
			require.Contains(t, b.texts("main"), "U+202E", path)
		}
	}
}
