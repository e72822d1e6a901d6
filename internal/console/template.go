package console

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html/template"
	"io/fs"
	"math"
	"mime"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf16"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
)

// html/template escapes each value for the place where it is shown, so that the content of a message stays text. Unlike
// other template engines, html/template needs no code generator.

//go:embed templates/*.html
var templateFiles embed.FS

//go:embed static/*
var staticFiles embed.FS

// assets maps the names of static files to their addresses. An address contains a hash of the
// content, so that browsers may cache it forever.
var assets, assetNames = func() (addresses, names map[string]string) {
	addresses, names = map[string]string{}, map[string]string{}
	_ = fs.WalkDir(staticFiles, "static", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		raw, err := staticFiles.ReadFile(name)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(raw)
		base := path.Base(name)
		address := "/static/" + hex.EncodeToString(sum[:6]) + "/" + base
		addresses[base], names[address] = address, name
		return nil
	})
	return addresses, names
}()

func static() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, err := staticFiles.ReadFile(assetNames[r.URL.Path])
		if err != nil {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", mime.TypeByExtension(path.Ext(r.URL.Path)))
		w.Header().Set("Cache-Control", "public, max-age=31536000, immutable")
		w.Header().Set("Vary", "Accept-Encoding")
		if acceptsGzip(r) {
			w.Header().Set("Content-Encoding", "gzip")
			raw = compressedAssets()[r.URL.Path]
		}
		_, _ = w.Write(raw)
	})
}

// templates has the templates of the pages. Each time zone has its own copies, whose functions show times in that zone.
type templates struct {
	parsed map[string]*template.Template // by page; never executed, because then they could not be cloned

	mu    sync.Mutex
	zoned map[string]*template.Template // by page and zone
}

// maxZoned limits the number of cached templates. It is enough for some twenty zones.
const maxZoned = 600

// of returns the template of a page in a time zone, or an error if there is no such page.
func (t *templates) of(page string, zone *time.Location) (*template.Template, error) {
	parsed := t.parsed[page]
	if parsed == nil {
		return nil, fmt.Errorf("template %q does not exist", page)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	key := page + " " + zone.String()
	if known := t.zoned[key]; known != nil {
		return known, nil
	}
	made, err := parsed.Clone()
	if err != nil {
		return nil, err
	}
	if t.zoned == nil || len(t.zoned) >= maxZoned {
		t.zoned = map[string]*template.Template{}
	}
	t.zoned[key] = made.Funcs(template.FuncMap{
		"exact": func(value any) string { return timeOf(value).In(zone).Format(exactLayout) },
		"clock": func(value any) string { return timeOf(value).In(zone).Format(clockLayout) },
	})
	return made, nil
}

// parsed returns the templates, each page with the layout and the shared parts. All consoles of a
// process share them: parsing takes 10 ms, and html/template escapes a page at its first use.
var parsed = sync.OnceValue(func() *templates {
	shared := template.Must(template.New("").Funcs(functions).ParseFS(templateFiles, "templates/frame.html",
		"templates/parts.html", "templates/entry.html"))
	pages := map[string]*template.Template{}
	names, err := fs.Glob(templateFiles, "templates/*.html")
	if err != nil {
		panic(err)
	}
	for _, name := range names {
		page := strings.TrimSuffix(path.Base(name), ".html")
		if page == "frame" || page == "parts" || page == "entry" {
			continue
		}
		pages[page] = template.Must(template.Must(shared.Clone()).ParseFS(templateFiles, name))
	}
	return &templates{parsed: pages}
})

func (t *templates) page(out *bytes.Buffer, f *frame) error { return t.execute(out, f, "frame") }
func (t *templates) live(out *bytes.Buffer, f *frame) error { return t.execute(out, f, "live") }

// source renders the section with the time of a page's data.
func (t *templates) source(out *bytes.Buffer, f *frame) error { return t.execute(out, f, "source") }

func (t *templates) own(out *bytes.Buffer, o own) error {
	page, err := t.of("approvals", time.UTC) // this template shows no times
	if err != nil {
		return err
	}
	return page.ExecuteTemplate(out, "own", o)
}

func (t *templates) execute(out *bytes.Buffer, f *frame, name string) error {
	page, err := t.of(f.Template, f.Zone)
	if err != nil {
		return err
	}
	return page.ExecuteTemplate(out, name, f)
}

// functions are the functions of the templates.
var functions = template.FuncMap{
	"ago": ago, "in": until, "exact": iso, "clock": iso, // templates.of replaces exact and clock
	"iso": iso, "lasted": lasted,
	"sourceMark": sourceMark, "number": number, "percent": percent, "plural": plural,
	"short": short, "status": statusOf, "class": classOf, "text": visible, "clip": clip,
	"first": firstLine, "icon": icon, "deref": deref, "dict": dict, "query": query,
	"json": pretty, "editable": editable, "join": strings.Join, "add": func(a, b int) int { return a + b },
	"args": args, "spark": spark, "seg": url.PathEscape, "now": time.Now, "where": whereInWords,
	"noticed": noticed, "cause": headlineOf, "browser": browserInWords, "origin": originInWords, "upper": upper,
}

// mark is how a state is shown: a sign and a word, never colour alone.
type mark struct{ Name, Word, Sign, Hue string }

var marks = map[deadletter.Status]mark{
	deadletter.Pending:    {"pending", "pending", "◷", "neutral"},
	deadletter.Processing: {"processing", "processing", "◐", "info"},
	deadletter.Manual:     {"manual", "needs a person", "◆", "warn"},
	deadletter.Returned:   {"returned", "returned", "↩", "info"},
	deadletter.Resolved:   {"resolved", "resolved", "✓", "ok"},
	deadletter.Failed:     {"failed", "failed", "✕", "bad"},
	deadletter.Archived:   {"archived", "archived", "▢", "faint"},
}

// statusOf returns the mark of a status of any type.
func statusOf(status any) mark {
	name := fmt.Sprint(deref(status))
	if m, ok := marks[deadletter.Status(name)]; ok {
		return m
	}
	return mark{name, name, "·", "neutral"}
}

// classes maps each error class to its letter and a short description.
var classes = map[string][2]string{
	"transient": {"T", "temporary"}, "rate_limited": {"L", "the receiver limits the rate"},
	"outage":     {"O", "the receiver is down"},
	"validation": {"V", "the receiver rejects the content"},
	"malformed":  {"M", "cannot be parsed"}, "unauthorized": {"U", "not authorized"},
	"not_found": {"N", "the addressed object does not exist"},
	"business":  {"B", "rejected for a business reason"}, "code_bug": {"C", "a bug in the code"},
	"unknown": {"?", "cause unknown"},
}

func classOf(class any) map[string]string {
	name := fmt.Sprint(deref(class))
	if name == "" || name == "undecided" {
		return map[string]string{"Name": "undecided", "Letter": "·", "Means": "no DLQ worker has classified it yet"}
	}
	c, ok := classes[name]
	if !ok {
		c = [2]string{strings.ToUpper(name[:1]), ""}
	}
	return map[string]string{"Name": strings.ReplaceAll(name, "_", " "), "Letter": c[0], "Means": c[1]}
}

// deref returns the value that a pointer points to. For nil it returns "", or the zero time for a *time.Time. Other
// values are returned unchanged.
func deref(value any) any {
	switch v := value.(type) {
	case nil:
		return ""
	case *string:
		if v == nil {
			return ""
		}
		return *v
	case *deadletter.Status:
		if v == nil {
			return ""
		}
		return *v
	case *int64:
		if v == nil {
			return ""
		}
		return *v
	case *float64:
		if v == nil {
			return ""
		}
		return *v
	case *time.Time:
		if v == nil {
			return time.Time{}
		}
		return *v
	}
	return value
}

func timeOf(value any) time.Time {
	t, _ := deref(value).(time.Time)
	return t
}

func iso(value any) string { return timeOf(value).UTC().Format(time.RFC3339) }

// ago returns how long ago a time was. console.js keeps the text current.
func ago(value any) string {
	t := timeOf(value)
	if t.IsZero() {
		return "never"
	}
	since := time.Since(t)
	if since < 0 {
		return until(value)
	}
	if since < 10*time.Second {
		return "just now"
	}
	return lasted(since) + " ago"
}

func until(value any) string {
	t := timeOf(value)
	if t.IsZero() {
		return "never"
	}
	left := time.Until(t)
	if left <= 0 {
		return "now"
	}
	return "in " + lasted(left)
}

// lasted formats a duration, or a number of seconds.
func lasted(value any) string {
	var d time.Duration
	switch v := value.(type) {
	case time.Duration:
		d = v
	case float64:
		d = time.Duration(v * float64(time.Second))
	case fmt.Stringer:
		return v.String()
	default:
		f, err := strconv.ParseFloat(fmt.Sprint(v), 64)
		if err != nil {
			return fmt.Sprint(v)
		}
		d = time.Duration(f * float64(time.Second))
	}
	switch {
	case d < time.Millisecond:
		return "under 1 ms"
	case d < time.Second:
		return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
	case d < time.Minute:
		return strconv.Itoa(int(d.Seconds())) + " s"
	case d < time.Hour:
		return strconv.Itoa(int(d.Minutes())) + " min"
	case d < 48*time.Hour:
		if m := int(d.Minutes()) % 60; m > 0 && d < 10*time.Hour {
			return fmt.Sprintf("%d h %d min", int(d.Hours()), m)
		}
		return strconv.Itoa(int(d.Hours())) + " h"
	default:
		return strconv.Itoa(int(d.Hours()/24)) + " d"
	}
}

// digitsOf removes the separators of thousands from a number that was typed or copied.
func digitsOf(text string) string {
	return strings.NewReplacer(" ", "", ",", "", thin, "").Replace(text)
}

// parsedNumber parses a number that JSON can represent.
func parsedNumber(text string) (n float64, ok bool) {
	n, err := strconv.ParseFloat(text, 64)
	return n, err == nil && !math.IsNaN(n) && !math.IsInf(n, 0)
}

// thin is a narrow no-break space, which separates thousands.
const thin = "\u202f"

// number formats a number with separated thousands.
func number(value any) string {
	text := fmt.Sprint(deref(value))
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		f, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return text
		}
		if f < 100 {
			return strconv.FormatFloat(math.Round(f*10)/10, 'f', -1, 64)
		}
		n = int64(math.Round(f))
	}
	sign, digits := "", strconv.FormatInt(n, 10)
	if n < 0 {
		sign, digits = "−", digits[1:]
	}
	var parts []string
	for len(digits) > 3 {
		parts = append([]string{digits[len(digits)-3:]}, parts...)
		digits = digits[:len(digits)-3]
	}
	return sign + strings.Join(append([]string{digits}, parts...), thin)
}

// percent formats a share from 0 to 1.
func percent(value any) string {
	switch v := value.(type) {
	case *float64:
		if v == nil {
			return "–"
		}
		return percent(*v)
	case float64:
		if v > 0 && v < 0.01 {
			return "<" + thin + "1" + thin + "%"
		}
		return strconv.Itoa(int(math.Floor(v*100+0.5))) + thin + "%"
	}
	return fmt.Sprint(value)
}

// plural formats a number with its noun: plural 2 "dead letter" is "2 dead letters".
func plural(value any, noun string, more ...string) string {
	n := number(value)
	if n == "1" {
		return "1 " + noun
	}
	if len(more) > 0 {
		return n + " " + more[0]
	}
	return n + " " + noun + "s"
}

// short abbreviates an id in the middle.
func short(value any) string {
	text := fmt.Sprint(deref(value))
	if id, err := uuid.Parse(text); err == nil {
		text = id.String()
		return text[:8] + "…" + text[len(text)-6:]
	}
	if len(text) > 18 {
		return text[:8] + "…" + text[len(text)-6:]
	}
	return text
}

// clip returns the beginning of a text.
func clip(most int, value any) string {
	runes := []rune(fmt.Sprint(deref(value)))
	if len(runes) <= most {
		return string(runes)
	}
	return string(runes[:most-1]) + "…"
}

func firstLine(value any) string {
	line, _, _ := strings.Cut(strings.TrimSpace(fmt.Sprint(deref(value))), "\n")
	return line
}

// run is a piece of a text: plain, or the name of a hidden character.
type run struct {
	Text   string
	Hidden bool
}

// isHidden reports whether a character is invisible or changes the direction of text.
func isHidden(r rune) bool {
	return r != '\n' && r != '\t' && unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)
}

// joinsEmoji reports whether a character is a zero-width joiner between two parts of an emoji.
func joinsEmoji(text []rune, at int) bool {
	const joiner, style, firstTone, lastTone = '\u200d', '\ufe0f', '\U0001f3fb', '\U0001f3ff'
	if text[at] != joiner || at == 0 || at == len(text)-1 {
		return false
	}
	before := text[at-1]
	return unicode.Is(unicode.So, text[at+1]) &&
		(unicode.Is(unicode.So, before) || before == style || before >= firstTone && before <= lastTone)
}

// visible splits a text at control characters, invisible characters, and characters that change the direction of text,
// so that one message cannot look like another.
func visible(value any) []run {
	var runs []run
	var plain strings.Builder
	flush := func() {
		if plain.Len() > 0 {
			runs = append(runs, run{Text: plain.String()})
			plain.Reset()
		}
	}
	text := []rune(fmt.Sprint(deref(value)))
	for i, r := range text {
		if !isHidden(r) || joinsEmoji(text, i) {
			plain.WriteRune(r)
			continue
		}
		flush()
		runs = append(runs, run{Text: fmt.Sprintf("U+%04X", r), Hidden: true})
	}
	flush()
	return runs
}

// noticeTime matches the time in the error of a refused move ("kim resolved it at 2026-11-22T10:00:00Z") and in the
// problem of a loop ("no turn has succeeded since 2026-11-22T10:00:00Z").
var noticeTime = regexp.MustCompile(`(?:\bat |\b(since ))(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)`)

// piece is a piece of a notice: text, or a time that is shown relative to now.
type piece struct {
	Text string
	At   time.Time
}

// noticed splits a notice at its times.
func noticed(text string) (pieces []piece) {
	text = strings.Replace(text, "no turn has succeeded", "has not succeeded", 1) // viewers do not know the term turn
	for {
		found := noticeTime.FindStringSubmatchIndex(text)
		if found == nil {
			return append(pieces, piece{Text: text})
		}
		pieces = append(pieces, piece{Text: text[:max(found[0], found[3])]}) // keep "since", drop "at"
		if at, err := time.Parse(time.RFC3339, text[found[4]:found[5]]); err == nil {
			pieces = append(pieces, piece{At: at})
		} else {
			pieces = append(pieces, piece{Text: text[found[0]:found[1]]})
		}
		text = text[found[1]:]
	}
}

const (
	// maxShown limits how much of a document a page shows, in bytes. The API returns the whole document.
	maxShown = 64 << 10
	// maxDepth is the maximum nesting of a document that is indented: each level indents every line
	// below it.
	maxDepth = 64
)

// depthOf returns the nesting depth of JSON.
func depthOf(raw []byte) (deepest int) {
	depth, text := 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case text && c == '\\':
			i++
		case c == '"':
			text = !text
		case !text && (c == '{' || c == '['):
			depth++
			deepest = max(deepest, depth)
		case !text && (c == '}' || c == ']'):
			depth--
		}
	}
	return deepest
}

// pretty indents JSON and changes nothing else: numbers stay as written.
func pretty(raw json.RawMessage) string {
	if len(raw) == 0 {
		return ""
	}
	var out bytes.Buffer
	if len(raw) > maxShown {
		return strings.ToValidUTF8(string(raw[:maxShown]), "") + "…"
	}
	if depthOf(raw) > maxDepth || json.Indent(&out, raw, "", "  ") != nil {
		return string(raw)
	}
	return out.String()
}

// editable returns JSON to be edited: hidden characters are replaced by equivalent JSON escapes.
func editable(text string) string {
	var out strings.Builder
	for _, r := range text {
		switch {
		case !isHidden(r) || r == '\r': // in JSON, \r is only white space between values
			out.WriteRune(r)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&out, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	return out.String()
}

// dict makes a map, to pass several values to a template.
func dict(pairs ...any) (map[string]any, error) {
	if len(pairs)%2 != 0 {
		return nil, fmt.Errorf("dict: odd number of arguments: %d", len(pairs))
	}
	m := map[string]any{}
	for i := 0; i < len(pairs); i += 2 {
		m[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return m, nil
}

func args(values ...any) []any { return values }

// query returns a filter for the list from fields and values. It omits fields with an empty value.
func query(parts ...any) string {
	var words []string
	for i := 0; i+1 < len(parts); i += 2 {
		value := fmt.Sprint(deref(parts[i+1]))
		if value == "" {
			continue
		}
		words = append(words, fmt.Sprint(parts[i])+":"+quoted(value))
	}
	return strings.Join(words, " ")
}

// quoted returns a value as the filter language expects it, in quotes if necessary.
func quoted(value string) string {
	if value != "" && !strings.ContainsFunc(value, func(r rune) bool {
		return unicode.IsSpace(r) ||
			strings.ContainsRune(`"\,:()<>`, r)
	}) {
		return value
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(value) + `"`
}

// icon returns one of the icons of the layout.
func icon(name string) template.HTML {
	return template.HTML(`<svg class="icon" aria-hidden="true"><use href="#i-` + template.HTMLEscapeString(name) + `"/></svg>`) //nolint:gosec // escaped
}
