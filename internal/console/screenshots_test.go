package console_test

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestScreenshots takes the screenshots of the README and docs ("make screenshots"). It checks nothing.
func TestScreenshots(t *testing.T) {
	dir := os.Getenv("DLQD_SCREENSHOTS")
	if dir == "" {
		t.Skip("DLQD_SCREENSHOTS is not set: make screenshots")
	}
	require.NoError(t, os.MkdirAll(dir, 0o755))
	o := open(t, nil)
	stage(o)
	letter := o.entry("pay-8", "dlq_manual")
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_queue WHERE id = $1", letter)
	b := o.tab()
	b.open("/bulk?all=1&do=replay&q=queue:orders")
	b.fill("textarea[name=note]", "release 83 mends the price")
	b.follow("form.split button.primary")
	run, _ := b.value("location.pathname").(string)
	b.waitForText("24 recovered, 2 failed again of 26")
	o.exec(postgrestest.RefreshRollups)
	for _, shot := range []struct{ name, path string }{
		{"overview", "/"},
		{"dead-letters", listOf("queue:payments")},
		{"dead-letter", "/dead-letters/" + letter},
		{"group", group},
		{"review", "/review"},
		{"replay", run},
	} {
		for _, look := range []struct {
			name, theme   string
			width, height int64
		}{{"", "light", 1440, 900}, {"-dark", "dark", 1440, 900}, {"-phone", "light", 390, 844}} {
			b.size(look.width, look.height)
			b.theme(look.theme)
			b.open(shot.path)
			b.until(live)
			var raw []byte
			b.run(chromedp.CaptureScreenshot(&raw))
			small := palette(t, raw)
			require.Less(t, len(small), 200<<10, shot.name)
			require.NoError(t, os.WriteFile(filepath.Join(dir, shot.name+look.name+".png"), small, 0o644))
		}
	}
}

// TestScreenshots_OfEveryPage takes screenshots of every page at three widths, in light and dark ("make screenshots
// ALL=DIR"), for people to look at. It checks nothing.
func TestScreenshots_OfEveryPage(t *testing.T) {
	dir := os.Getenv("DLQD_SCREENSHOTS_ALL")
	if dir == "" {
		t.Skip("DLQD_SCREENSHOTS_ALL is not set: make screenshots ALL=DIR")
	}
	require.NoError(t, os.MkdirAll(dir, 0o755))
	o := open(t, nil)
	seed(o)
	stage(o)
	id := o.entry("seed-manual", "dlq_manual")
	group := o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_queue WHERE event_id = 'pay-8'")
	b := o.tab()
	b.allow("status of 4")
	for i, path := range pages(o, id, group) {
		name := strings.Trim(regexp.MustCompile(`[^a-z]+`).ReplaceAllString(path, "-"), "-")
		for _, theme := range []string{"light", "dark"} {
			for _, width := range []int64{390, 820, 1440} {
				b.size(width, 900)
				b.theme(theme)
				b.open(path)
				var raw []byte
				b.run(chromedp.FullScreenshot(&raw, 100))
				file := fmt.Sprintf("%02d-%s-%d-%s.png", i, name, width, theme)
				require.NoError(t, os.WriteFile(filepath.Join(dir, file), raw, 0o644))
			}
		}
	}
}

// stage creates data that resembles a shop's day.
func stage(o *testServer) {
	o.Helper()
	const waiting = "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'"
	before := o.count(waiting)
	for i := range 34 {
		o.submit("payments", fmt.Sprintf("pay-%d", i), "payment.captured", map[string]any{
			"answer": []int{422, 422, 402, 404}[i%4], "says": `{"error": "amount must be positive"}`,
			"customer": map[string]any{"id": fmt.Sprintf("cus_%d", 80+i%5), "country": "DE"},
			"amount":   -100 * i, "currency": "EUR",
			"lines": []any{map[string]any{"sku": "A-17", "count": 2}, map[string]any{"sku": "B-4", "count": 1}},
		})
	}
	for i := range 26 {
		answer := 400
		if i < 2 {
			answer = 410
		}
		o.submit("orders", fmt.Sprintf("order-%d", i), "order.placed",
			map[string]any{"answer": answer, "says": "price is missing", "order": 4711 + i, "shop": "north"})
	}
	o.fail("reports", "report.daily", "runtime error: index out of range [3] with length 3", 9)
	o.eventually(before+69, waiting)
	o.receiverWorks.Store(true)
	o.exec(postgrestest.RefreshRollups)
	// The rollups of the previous day: an outage in the morning, which ended.
	o.exec(`INSERT INTO dlq.rollup_flow (step, scope, bucket, queue, error_class, captured, failures, resolved,
		open_change)
		SELECT 'hour', 'class', date_trunc('hour', now()) - make_interval(hours => h), '', class, captured, captured,
			resolved, captured - resolved
		FROM (VALUES (15, 'outage', 40, 0), (14, 'outage', 130, 4), (13, 'outage', 90, 30), (12, 'outage', 20, 90),
			(11, 'outage', 0, 110), (10, 'outage', 0, 46),
			(18, 'transient', 12, 4), (16, 'transient', 9, 14), (9, 'transient', 22, 6), (8, 'transient', 15, 20),
				(6, 'transient', 8, 17), (3, 'transient', 14, 10), (2, 'transient', 6, 9),
			(20, 'validation', 6, 2), (17, 'validation', 3, 5), (7, 'validation', 8, 3), (4, 'validation', 5, 9)) v (h, class,
				captured, resolved)
		ON CONFLICT DO NOTHING`)
	o.exec(`INSERT INTO dlq.rollup_groups (step, bucket, queue, fingerprint, failures)
		SELECT 'hour', date_trunc('hour', now()) - make_interval(hours => h), g.queue, g.fingerprint,
			1 + (h * 7 + length(g.title)) % 6 FROM dlq.failure_groups g, generate_series(1, 20, 2) h ON CONFLICT DO NOTHING`)
	o.exec(`UPDATE dlq.failure_groups g SET first_seen = now() - interval '20 hours',
		failures = (SELECT sum(r.failures) FROM dlq.rollup_groups r WHERE r.queue = g.queue
			AND r.fingerprint = g.fingerprint AND r.step = 'hour')`)
}

// palette reduces an image to its 256 most frequent colours. A page has few; the others are
// antialiased edges of letters.
func palette(t *testing.T, raw []byte) []byte {
	t.Helper()
	full, err := png.Decode(bytes.NewReader(raw))
	require.NoError(t, err)
	count := map[color.RGBA]int{}
	at := func(x, y int) color.RGBA {
		c, _ := color.RGBAModel.Convert(full.At(x, y)).(color.RGBA)
		six := func(v uint8) uint8 { return uint8((int(v)*63 + 127) / 255 * 255 / 63) }
		return color.RGBA{six(c.R), six(c.G), six(c.B), 255}
	}
	size := full.Bounds()
	for y := size.Min.Y; y < size.Max.Y; y++ {
		for x := size.Min.X; x < size.Max.X; x++ {
			count[at(x, y)]++
		}
	}
	colours := make([]color.RGBA, 0, len(count))
	for c := range count {
		colours = append(colours, c)
	}
	slices.SortFunc(colours, func(a, b color.RGBA) int { return count[b] - count[a] })
	var few color.Palette
	for _, c := range colours[:min(len(colours), 256)] {
		few = append(few, c)
	}
	nearest := map[color.RGBA]uint8{}
	out := image.NewPaletted(size, few)
	for y := size.Min.Y; y < size.Max.Y; y++ {
		for x := size.Min.X; x < size.Max.X; x++ {
			c := at(x, y)
			i, known := nearest[c]
			if !known {
				i = uint8(few.Index(c))
				nearest[c] = i
			}
			out.SetColorIndex(x, y, i)
		}
	}
	var small bytes.Buffer
	require.NoError(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&small, out))
	return small.Bytes()
}
