package console_test

import (
	"io"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// pages returns the addresses of the console's pages, for the data of seed.
func pages(o *testServer, id, group string) []string {
	o.Helper()
	list := []string{}
	for _, of := range []string{"/replays/", "/approvals/", "/operations/"} {
		table := map[string]string{"/replays/": "replay_runs", "/approvals/": "approvals", "/operations/": "operations"}[of]
		list = append(list, of+o.text("SELECT id::text FROM dlq."+table+" ORDER BY id LIMIT 1"))
	}
	return append(list,
		"/", "/dead-letters", listOf("status:manual"), listOf("queue:"), "/dead-letters/"+id,
		"/dead-letters/nobody", "/bulk?all=1&q=status:manual", "/bulk?all=1&do=replay&q=status:manual",
		"/bulk?all=1&do=discard&q=queue:payments", "/groups", group, "/review", "/replays", "/replays/new",
		"/replays/calibration", "/replays/new?q=status:manual", "/queues", "/sources", "/policy", "/approvals",
		"/jobs", "/jobs?queue=payments&state=cancelled", "/search", "/search?q=pay", "/dead-letters/export?q=queue:payments",
		"/jobs/"+o.text("SELECT min(id)::text FROM river_job"), "/messages/seed-manual",
		"/audit", "/access", "/system", "/docs", "/sign-in", "/nowhere",
	)
}

// seed creates entries that are pending, manual, resolved, discarded and replayed.
func seed(o *testServer) {
	o.submit("payments", "seed-manual", "payment.captured", map[string]any{
		"answer": 422, "says": "amount is missing", "customer": "42", "lines": []any{1, 2, map[string]any{"sku": "A-1"}},
	})
	o.submit("orders", "seed-gone", "order.placed", map[string]any{"answer": 404})
	o.submit("payments", "seed-outage", "payment.captured", map[string]any{"answer": 503})
	o.fail("reports", "report.daily", "runtime error: index out of range [3] with length 3", 40)
	o.entry("seed-manual", "dlq_manual")
	o.entry("seed-gone", "dlq_manual")
	o.exec("SELECT dlq.discard(id, 'kim', 'not wanted') FROM dlq.dead_letter_queue WHERE event_id = 'seed-gone'")
	o.doAll("kim", "seen", `{"kind": "report.daily"}`)
	o.exec(`INSERT INTO dlq.replay_runs
		SELECT (jsonb_populate_record(r, jsonb_build_object('id', dlq.uuid_v7(), 'status', 'completed', 'finished_at', now(),
			'unsettled', false, 'result', $1::jsonb))).* FROM dlq.replay_runs r LIMIT 1`, `[
		{"queue": "payments", "fingerprint": "3f2a9c41d07be5120001", "entries": 1204, "recover": 1100, "low": 1020, "high": 1150,
			"recovered": 1096, "failed": 108},
		{"queue": "reports.of.every.region.at.night", "fingerprint": "3f2a9c41d07be5120002", "entries": 40, "recover": 31,
			"low": 26, "high": 36, "recovered": 3, "failed": 37},
		{"queue": "orders", "fingerprint": "3f2a9c41d07be5120003", "entries": 7, "recover": 2, "low": 0, "high": 4,
			"recovered": 1, "failed": 0}]`)
	o.exec(`INSERT INTO dlq.sources (name, cluster, queue, seen_at, paused_at, paused_by) VALUES
		('nodes', 'main', 'nodes', now() + interval '1 hour', NULL, NULL), ('shop', 'main', 'shop', NULL, now(), 'kim')`)
	o.exec(`INSERT INTO dlq.source_progress (source, cluster, queue, topic, partition, state, next_offset, end_offset, error,
		error_at) VALUES ('nodes', 'main', 'nodes', 'dlq.prod.scoring', 0, 'failing', 812, 900,
		'TOPIC_AUTHORIZATION_FAILED: Not authorized to access topics', now()),
		('nodes', 'main', 'nodes', 'dlq.prod.parsing', 1, 'caught_up', 77, 77, NULL, NULL)`)
	o.exec(`INSERT INTO dlq.feeds (name, cluster, topic, at, records, published, failed, error, error_at) VALUES
		('dead-letters', 'main', 'dead-letters.{queue}', now() + interval '1 hour', 52130, 51902, 3,
			'TOPIC_AUTHORIZATION_FAILED: Not authorized to access topics', now()),
		('warehouse', 'main', 'warehouse.dead-letters', now() + interval '1 hour', 12, 12, 0, NULL, NULL)`)
}

// doAll adds a note to many entries, requests an approval to discard them, and starts and pauses a
// replay run.
func (o *testServer) doAll(actor, note, filter string) {
	o.Helper()
	o.exec("SELECT dlq.act_where('note', $1, $2, $3)", filter, actor, note)
	o.exec("SELECT dlq.request_approval('bulk', jsonb_build_object('do', 'discard', 'filter', $1::jsonb), $2, $3)",
		filter, note, actor)
	o.exec("SELECT dlq.replay_pause(dlq.replay_start($1::jsonb, p_note => $2, p_actor => $3, p_force => true), $3)",
		filter, note, actor)
}

// titleRow returns the faults of a page's title row: the page has exactly one h1, which is visible, and at most one
// main action.
const titleRow = `(() => {
	const titles = [...document.querySelectorAll("h1")].filter(h => h.checkVisibility());
	const seen = titles[0]?.getBoundingClientRect();
	if (titles.length !== 1) return titles.length + " visible h1";
	if (!titles[0].innerText.trim() || seen.width < 20 || seen.height < 10) return "the h1 is empty or hidden";
	if (!titles[0].closest(".page-title")) return "the h1 is in no title row";
	if (document.querySelectorAll(".page-title .primary").length > 1) return "several main actions";
	return "";
})()`

// sideways returns the elements that are wider than the window.
const sideways = `(() => {
	const wide = document.documentElement.clientWidth, out = [];
	if (document.documentElement.scrollWidth > wide) {
		for (const e of document.querySelectorAll("body *")) {
			const r = e.getBoundingClientRect();
			if (r.right > wide + 1 && r.width > 0 && e.checkVisibility()) out.push(e.tagName + "." + e.className + "#" + e.id + " to " + Math.round(r.right));
		}
		out.unshift("the page is " + document.documentElement.scrollWidth + " wide");
	}
	return out.slice(0, 6).join(", ");
})()`

// smallTargets returns the buttons, tabs and choices of a phone's page that are less than 44 pixels high.
const smallTargets = `[...document.querySelectorAll("main :is(button, .button, .tabs a, .windows a, .quiet-link)")]
	.filter(e => e.checkVisibility() && !e.closest(".hide") && e.getBoundingClientRect().height < 43.5)
	.map(e => e.innerText.trim() + " " + Math.round(e.getBoundingClientRect().height)).slice(0, 6).join(", ")`

// outOfOrder returns the parts of a page's head that are shown above a part that precedes them in the source. The tab
// key and screen readers follow the source.
const outOfOrder = `[...document.querySelectorAll(".page-head :is(h1, .lead, a, button, summary, input, select)")]
	.filter(e => e.checkVisibility()).filter((e, i, all) => i > 0 &&
		e.getBoundingClientRect().bottom <= all[i - 1].getBoundingClientRect().top)
	.map(e => e.innerText.trim()).slice(0, 3).join(", ")`

// splitTexts returns the links of lists in which the text next to a bold part would become a separate column.
const splitTexts = `[...document.querySelectorAll(".rows a")].filter(a => getComputedStyle(a).display.includes("flex") &&
	a.querySelector(":scope > b") && [...a.childNodes].some(part => part.nodeType === 3 && part.data.trim()))
	.map(a => a.innerText.trim()).slice(0, 3).join(", ")`

// TestPages checks that every page loads without errors or warnings of the browser, that no page scrolls sideways at
// any width, and that text has enough contrast in light and dark.
func TestPages(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	seed(o)
	id := o.entry("seed-manual", "dlq_manual")
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_queue WHERE id = $1", id)
	all := pages(o, id, group)
	tab := func(t *testing.T) *tab {
		t.Helper()
		t.Parallel()
		b := o.in(t).tab()
		b.allow("the server responded with a status of 404")
		b.allow("the server responded with a status of 422")
		return b
	}

	t.Run("widths", func(t *testing.T) {
		b := tab(t)
		for _, path := range all {
			b.open(path)
			require.NotEmpty(t, b.value("document.title"), path)
			require.NotContains(t, b.texts("main"), "rendering this page failed", path)
			if wrong := b.value(titleRow); wrong != "" {
				t.Errorf("%s: %s", path, wrong)
			}
			for _, width := range []int64{360, 720, 820, 1440, 2560} { // 720 is 1440 at a zoom of 200 %
				b.size(width, 900)
				if wide := b.value(sideways); wide != "" {
					t.Errorf("%s at %d: %s", path, width, wide)
				}
				if above := b.value(outOfOrder); above != "" {
					t.Errorf("%s at %d: out of order: %s", path, width, above)
				}
				if split := b.value(splitTexts); split != "" {
					t.Errorf("%s at %d: split into columns: %s", path, width, split)
				}
				if small := b.value(smallTargets); width < 640 && small != "" {
					t.Errorf("%s at %d: less than 44 px high: %s", path, width, small)
				}
			}
		}
	})
	t.Run("contrast", func(t *testing.T) {
		b := tab(t)
		for _, path := range all {
			b.open(path)
			for _, theme := range []string{"light", "dark"} {
				b.theme(theme)
				if faint := b.value(faintTexts); faint != "" {
					t.Errorf("%s in %s: %s", path, theme, faint)
				}
			}
		}
	})
	t.Run("all", func(t *testing.T) {
		t.Parallel()
		routes, err := os.ReadFile("../../cmd/dlqd/testdata/surface/urls.txt")
		require.NoError(t, err)
		for _, route := range regexp.MustCompile(`(?m)^page "([^"]+)"`).FindAllStringSubmatch(string(routes), -1) {
			pattern := regexp.MustCompile("^" + regexp.MustCompile(`\{[^}]+\}`).ReplaceAllString(
				strings.Replace(route[1], "{$}", "", 1), `[^/]+`) + `(\?.*)?$`)
			if route[1] != "/dead-letters/{id}/reveal" { // this page needs a form, and only its viewer sees it
				require.True(t, slices.ContainsFunc(all, pattern.MatchString), "pages lacks %s", route[1])
			}
		}
	})
	t.Run("time", func(t *testing.T) { chooseTimes(tab(t), group) })
	t.Run("look up", func(t *testing.T) { lookUp(tab(t)) })
	t.Run("policy", func(t *testing.T) {
		t.Parallel()
		for _, path := range all {
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, o.base+path, nil)
			require.NoError(t, err)
			request.Header.Set("Accept", "text/html")
			response, err := http.DefaultClient.Do(request)
			require.NoError(t, err)
			raw, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			header := response.Header.Get("Content-Security-Policy")
			require.Contains(t, header, "default-src 'none'", path)
			require.NotContains(t, header, "unsafe", path)
			require.NotRegexp(t, `(?i)<style|<script(?:[^>]*>[^<])|\sstyle=|\son[a-z]+=|https?://[a-z0-9.-]+/[^"]*\.(?:js|css)`,
				string(raw), path)
			require.Less(t, len(raw), 300<<10, path)
		}
	})
}

// faintTexts returns the texts whose contrast to their background, as painted, is below 4.5 (WCAG
// 2.2, 1.4.3). Disabled elements are exempt.
const faintTexts = `(() => {
	const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
	canvas.canvas.width = canvas.canvas.height = 1;
	const known = new Map();
	const rgba = color => {
		if (!known.has(color)) {
			canvas.clearRect(0, 0, 1, 1);
			canvas.fillStyle = color;
			canvas.fillRect(0, 0, 1, 1);
			known.set(color, [...canvas.getImageData(0, 0, 1, 1).data].map((c, i) => i === 3 ? c / 255 : c));
		}
		return known.get(color);
	};
	const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
	const behind = e => {
		const layers = [];
		for (; e; e = e.parentElement) {
			const color = rgba(getComputedStyle(e).backgroundColor);
			if (color[3] > 0) layers.push(color);
			if (color[3] === 1) break;
		}
		return layers.reduceRight((under, top) => over(top, under), [255, 255, 255, 1]);
	};
	const luminance = color => {
		const [r, g, b] = color.map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
		return 0.2126 * r + 0.7152 * g + 0.0722 * b;
	};
	const out = new Set();
	const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
	for (let node; node = walk.nextNode();) {
		const e = node.parentElement;
		if (!node.data.trim() || !e.checkVisibility({ opacityProperty: true, visibilityProperty: true }) || e.closest(".hide, :disabled, [aria-disabled=true], title, .skip, textarea")) continue;
		const style = getComputedStyle(e), ground = behind(e);
		const ink = over(rgba(e instanceof SVGElement ? style.fill : style.color), ground);
		const [a, b] = [luminance(ink), luminance(ground)].sort((x, y) => y - x);
		const contrast = (a + 0.05) / (b + 0.05);
		if (contrast < 4.5) out.add(e.tagName.toLowerCase() + "." + (e.getAttribute("class") ?? "") + " " + JSON.stringify(node.data.trim().slice(0, 30)) + " " + contrast.toFixed(2));
	}
	return [...out].slice(0, 8).join("; ");
})()`
