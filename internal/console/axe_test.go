package console_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// TestAxe checks that npm's axe-core finds no problem on any page: in the light and the dark theme, at the widths of a
// desktop, a tablet and a phone, and at a zoom of 200 %, with every <details> open. DLQD_TEST_AXE is the directory
// where npm has installed axe-core (npm install --prefix DIR axe-core); .ci/run sets it. Where the test is skipped,
// TestPages and TestKeyboard check part of this.
func TestAxe(t *testing.T) {
	t.Parallel()
	installed := os.Getenv("DLQD_TEST_AXE")
	if installed == "" {
		t.Skip("DLQD_TEST_AXE is not set")
	}
	axe, err := os.ReadFile(filepath.Join(installed, "node_modules", "axe-core", "axe.min.js"))
	require.NoError(t, err)
	o := open(t, nil)
	seed(o)
	id := o.entry("seed-manual", "dlq_manual")
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_queue WHERE id = $1", id)
	b := o.tab()
	b.allow("status of 4")
	const colours = `runOnly: ["color-contrast", "link-in-text-block"], `
	for _, path := range pages(o, id, group) {
		b.open(path)
		b.value(string(axe) + `; document.querySelectorAll("main details").forEach(d => d.open = true); 0`)
		for _, look := range []struct {
			theme string
			width int64
			scale float64
			rules string
		}{
			{"light", 1440, 1, ""},
			{"dark", 1440, 1, colours},
			{"dark", 820, 1, colours},
			{"light", 820, 1, `runOnly: ["color-contrast", "target-size"], `},
			{"light", 720, 2, `runOnly: ["target-size", "scrollable-region-focusable"], `}, // 1440 at 200 %
			{"dark", 390, 1, colours},
			{"light", 390, 1, ""},
		} {
			b.theme(look.theme)
			b.run(emulation.SetDeviceMetricsOverride(look.width, 900, look.scale, look.width < 600))
			var found string
			b.run(chromedp.Evaluate(`axe.run(document, {`+look.rules+
				`resultTypes: ["violations"]}).then(r => JSON.stringify(r.violations.map(v => ({id: v.id, help: v.help, nodes: v.nodes.slice(0, 4).map(n => n.html.slice(0, 160) + " " + (n.any[0]?.message ?? n.all[0]?.message ?? n.none[0]?.message ?? ""))}))))`, &found,
				func(p *runtime.EvaluateParams) *runtime.EvaluateParams { return p.WithAwaitPromise(true) }))
			var violations []struct {
				ID, Help string
				Nodes    []string
			}
			require.NoError(t, json.Unmarshal([]byte(found), &violations))
			for _, v := range violations {
				t.Errorf("%s in %s at %d: %s: %s\n  %s", path, look.theme, look.width, v.ID, v.Help, strings.Join(v.Nodes, "\n  "))
			}
		}
	}
}
