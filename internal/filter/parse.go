package filter

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/message"
)

// MaxBytes is the maximum length, in bytes, of a text that Parse accepts.
const MaxBytes = 4096

// Term is a part of a text: a field with its values, or a word. Positions count characters (Unicode
// code points).
type Term struct {
	Field   string   `json:"field,omitempty" doc:"Field of the term. A word without a field is in error, an id in id."`
	Values  []string `json:"values,omitempty" doc:"Values of the term, as they were read."`
	From    int      `json:"from" doc:"Start of the term, in characters."`
	To      int      `json:"to" doc:"End of the term, in characters."`
	Problem string   `json:"problem,omitempty" doc:"Why the term is invalid, and how to fix it; absent for a valid term."`
	Suggest []string `json:"suggest,omitempty" doc:"Terms that the user may have meant."`
}

// Error lists the terms of a text that cannot be parsed.
type Error struct {
	Text  string
	Terms []Term // terms with a problem
}

func (e *Error) Error() string {
	parts := make([]string, len(e.Terms))
	runes := []rune(strings.ToValidUTF8(e.Text, "\uFFFD"))
	for i, t := range e.Terms {
		word := string(runes[min(t.From, len(runes)):min(t.To, len(runes))])
		if utf8.RuneCountInString(word) > 80 {
			word = string([]rune(word)[:80]) + "…"
		}
		parts[i] = fmt.Sprintf("%s (at %d): %s", word, t.From+1, t.Problem)
	}
	return "filter: " + strings.Join(parts, "; ")
}

// Parse returns the filter that a text describes. me is the name of the caller, or empty if unknown. The error is an
// [*Error].
func Parse(text, me string) (Filter, error) {
	f, terms := Read(text, me)
	terms = slices.DeleteFunc(terms, func(t Term) bool { return t.Problem == "" })
	if len(terms) > 0 {
		return Filter{}, &Error{Text: text, Terms: terms}
	}
	return f, nil
}

// Read returns the filter of the valid terms, and all terms with their problems.
func Read(text, me string) (Filter, []Term) {
	r := &parser{text: text, me: me}
	switch {
	case len(text) > MaxBytes:
		return r.filter, []Term{{
			To:      utf8.RuneCountInString(text),
			Problem: fmt.Sprintf("a filter has at most %d bytes; this one has %d", MaxBytes, len(text)),
		}}
	case !utf8.ValidString(text) || strings.ContainsRune(text, 0):
		return r.filter, []Term{{To: utf8.RuneCountInString(text), Problem: "the text has a NUL character or invalid UTF-8"}}
	}
	var terms []Term
	for r.skipBlanks(); r.at < len(r.text); r.skipBlanks() {
		from := r.at
		t, err := r.term()
		if err != nil {
			t.Problem = err.Error()
			if nearest := (*suggestion)(nil); errors.As(err, &nearest) {
				t.Suggest = nearest.words
			}
			r.skipTerm()
		}
		t.From, t.To = utf8.RuneCountInString(text[:from]), utf8.RuneCountInString(text[:r.at])
		terms = append(terms, t)
	}
	return r.filter, terms
}

// suggestion is a problem with proposed replacements.
type suggestion struct {
	problem string
	words   []string
}

func (s *suggestion) Error() string { return s.problem }

// value is a value of a term.
type value struct {
	text   string
	quoted bool // whether the value is quoted; then words such as me or nobody have no special meaning
}

type parser struct {
	text     string
	me       string
	at       int // position in bytes
	filter   Filter
	unclosed bool // a quote is not closed
}

func (r *parser) rest() string { return r.text[r.at:] }

func (r *parser) skipBlanks() {
	r.at = len(r.text) - len(strings.TrimLeftFunc(r.rest(), unicode.IsSpace))
}

// skipTerm moves to the end of an invalid term.
func (r *parser) skipTerm() {
	if i := strings.IndexFunc(r.rest(), unicode.IsSpace); i >= 0 {
		r.at += i
	} else {
		r.at = len(r.text)
	}
}

// fieldLike matches the name of a field and a colon. It does not match 10:30, which is a word.
var fieldLike = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_.+/-]*:`)

func (r *parser) term() (Term, error) {
	rest := r.rest()
	if isPayload(rest) {
		return r.payload()
	}
	if name := fieldLike.FindString(rest); name != "" {
		name = strings.TrimSuffix(name, ":")
		d := lookup(strings.ToLower(name))
		if d == nil {
			return Term{Field: name}, unknownField(name, rest)
		}
		r.at += len(name) + 1
		t := Term{Field: d.name}
		values, err := r.values()
		if err != nil {
			return t, err
		}
		for _, v := range values {
			t.Values = append(t.Values, v.text)
		}
		return t, r.set(d, values)
	}
	if rest[0] == '-' {
		return Term{}, errors.New("a term cannot be negated; quote a word that starts with -")
	}
	v, err := r.word(false)
	t := Term{Field: "error", Values: []string{v.text}}
	if err != nil {
		return t, err
	}
	if id, err := uuid.Parse(v.text); err == nil && !v.quoted && len(v.text) == 36 {
		t.Field = "id"
		r.filter.IDs = append(r.filter.IDs, id.String())
		return t, nil
	}
	return t, r.set(lookup("error"), []value{v})
}

// values reads a comma-separated list of values.
func (r *parser) values() ([]value, error) {
	var out []value
	for {
		v, err := r.word(true)
		if err != nil {
			return out, err
		}
		out = append(out, v)
		if !strings.HasPrefix(r.rest(), ",") {
			return out, nil
		}
		r.at++
	}
}

// word reads a value: in quotes, or up to a blank. If listed is set, an unquoted value also ends at a comma. It returns
// an error if there is no value or the closing quote is missing.
func (r *parser) word(listed bool) (value, error) {
	rest := r.rest()
	if !strings.HasPrefix(rest, `"`) {
		end := strings.IndexFunc(rest, func(c rune) bool { return unicode.IsSpace(c) || listed && c == ',' })
		if end < 0 {
			end = len(rest)
		}
		if end == 0 {
			return value{}, errors.New(`the value is missing ("" is the empty value)`)
		}
		r.at += end
		return value{text: rest[:end]}, nil
	}
	var out strings.Builder
	for i := 1; i < len(rest); i++ {
		switch {
		case rest[i] == '\\' && i+1 < len(rest) && (rest[i+1] == '"' || rest[i+1] == '\\'):
			i++
			out.WriteByte(rest[i])
		case rest[i] == '"':
			r.at += i + 1
			after, _ := utf8.DecodeRuneInString(r.rest())
			if r.rest() != "" && !unicode.IsSpace(after) && (!listed || after != ',') {
				return value{}, errors.New(`expected a blank or a comma after the closing quote; write a quote within quotes as \"`)
			}
			return value{text: out.String(), quoted: true}, nil
		default:
			out.WriteByte(rest[i])
		}
	}
	r.at, r.unclosed = len(r.text), true
	return value{text: out.String(), quoted: true}, errors.New("the closing quote is missing")
}

func (d *field) number(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < d.least {
		return 0, fmt.Errorf("%s takes a number of at least %d", d.name, d.least)
	}
	if d.most > 0 && n > d.most {
		return 0, fmt.Errorf("%s takes a number of at most %d", d.name, d.most)
	}
	return n, nil
}

// set adds the values of a field to the filter.
func (r *parser) set(d *field, values []value) error {
	f := &r.filter
	if d.read != nil {
		if len(values) > 1 {
			return errors.New(d.name + " takes only one value")
		}
		return d.read(f, values[0])
	}
	for _, v := range values {
		text := v.text
		switch {
		case d.numbers != nil:
			n, err := d.number(text)
			if err != nil {
				return err
			}
			*d.numbers(f) = append(*d.numbers(f), n)
			continue
		case d.name == "id":
			id, err := uuid.Parse(text)
			if err != nil {
				return errors.New("an id has the form " + strings.TrimPrefix(d.example, "id:"))
			}
			text = id.String()
		case d.name == "error" && text == "", d.name == "group" && text == "":
			return errors.New("the text is empty")
		case d.name == "assigned" && !v.quoted && text == "nobody":
			text = ""
		case d.name == "assigned" && !v.quoted && text == "me":
			if r.me == "" {
				return errors.New(`me needs authentication: use the name (for a user named me: assigned:"me")`)
			}
			text = r.me
		case d.name == "status":
			if text = strings.TrimPrefix(text, "dlq_"); text == "open" || text == "closed" {
				of := openStates
				if text == "closed" {
					of = states[len(openStates):]
				}
				for _, s := range of {
					f.Status = append(f.Status, "dlq_"+s)
				}
				continue
			}
		}
		if d.values != nil && !slices.Contains(d.values(), text) {
			return unknownValue(d, text)
		}
		if d.name == "status" {
			text = "dlq_" + text
		}
		*d.words(f) = append(*d.words(f), text)
	}
	return nil
}

// place matches a payload path, and placeKey one of its keys. A key with a dot, colon, quote or blank is quoted.
var (
	place    = regexp.MustCompile(`^(?i:payload)((?:\.(?:"(?:[^"\\]|\\.)*"|[^\s".:]+))+):`)
	placeKey = regexp.MustCompile(`\.("(?:[^"\\]|\\.)*"|[^\s".:]+)`)
)

func isPayload(rest string) bool {
	const name = "payload"
	return len(rest) > len(name) && strings.EqualFold(rest[:len(name)], name) &&
		(rest[len(name)] == '.' || rest[len(name)] == ':')
}

var unquote = strings.NewReplacer(`\"`, `"`, `\\`, `\`)

func (r *parser) payload() (Term, error) {
	t := Term{Field: "payload"}
	rest := r.rest()
	const usage = `payload takes a path of keys, as in payload.customer:42, or JSON, as in payload:{"customer": 42}`
	if rest[len("payload")] == ':' {
		r.at += len("payload:")
		if next := r.rest(); next == "" || !strings.ContainsAny(next[:1], "{[") {
			return t, errors.New(usage)
		}
		decoder := json.NewDecoder(strings.NewReader(r.rest()))
		var raw json.RawMessage
		if err := decoder.Decode(&raw); err != nil {
			return t, errors.New("payload: invalid JSON")
		}
		r.at += int(decoder.InputOffset())
		if after, _ := utf8.DecodeRuneInString(r.rest()); r.rest() != "" && !unicode.IsSpace(after) {
			return t, errors.New("payload: expected a blank after the JSON")
		}
		t.Values = []string{string(raw)}
		if err := message.CheckJSON(raw); err != nil {
			return t, fmt.Errorf("payload: %w", err)
		}
		if r.filter.Payload != nil {
			return t, errors.New("payload: JSON is allowed only once; paths can be repeated")
		}
		r.filter.Payload = raw
		return t, nil
	}
	found := place.FindStringSubmatch(rest)
	if found == nil {
		return t, errors.New(usage)
	}
	p := Place{}
	for _, key := range placeKey.FindAllStringSubmatch(found[1], -1) {
		text := key[1]
		if strings.HasPrefix(text, `"`) {
			text = unquote.Replace(text[1 : len(text)-1])
		}
		p.Path = append(p.Path, text)
	}
	if len(p.Path) > maxPath {
		return t, fmt.Errorf("a path has at most %d keys", maxPath)
	}
	t.Field = strings.TrimSuffix(found[0], ":")
	r.at += len(found[0])
	values, err := r.values()
	if err != nil {
		return t, err
	}
	for _, v := range values {
		p.Values = append(p.Values, v.text)
	}
	t.Values = p.Values
	for i := range r.filter.PayloadAt { // if a path occurs again, its values are alternatives
		if at := &r.filter.PayloadAt[i]; slices.Equal(at.Path, p.Path) {
			at.Values = append(at.Values, p.Values...)
			return t, nil
		}
	}
	r.filter.PayloadAt = append(r.filter.PayloadAt, p)
	return t, nil
}

// maxPath is the maximum depth of a message's payload.
const maxPath = 64

func unknownField(name, rest string) error {
	word := rest
	if i := strings.IndexFunc(rest, unicode.IsSpace); i >= 0 {
		word = rest[:i]
	}
	quoted := quote(word)
	for _, d := range table {
		if strings.EqualFold(d.json, name) || d.name+"s" == name {
			return &suggestion{"unknown field " + name + ": use " + d.name, []string{d.name + word[len(name):]}}
		}
	}
	names := make([]string, len(table))
	for i, d := range table {
		names[i] = d.name
	}
	if near := nearest(strings.ToLower(name), names); near != "" {
		return &suggestion{
			"unknown field " + name + "; did you mean " + near + "? (to search for it in errors, quote it)",
			[]string{near + word[len(name):], quoted},
		}
	}
	return &suggestion{"unknown field " + name + " (fields: " + strings.Join(names, ", ") + "); to search for it in " +
		"errors, quote it", []string{quoted}}
}

func unknownValue(d *field, text string) error {
	problem := fmt.Sprintf("unknown %s %q", d.name, text)
	list := " (values: " + strings.Join(d.values(), ", ") + ")"
	if near := nearest(strings.ToLower(text), d.values()); near != "" {
		return &suggestion{problem + "; did you mean " + near + "?" + list, []string{d.name + ":" + near}}
	}
	return errors.New(problem + list)
}

// nearest returns the word that the user probably meant by text, or "" if none is similar.
func nearest(text string, words []string) (near string) {
	least := 1 + min(len(text)/3, 2)
	for _, w := range words {
		if len(text) >= 3 && strings.HasPrefix(w, text) {
			return w
		}
		if n := distance(text, w); n < least || n == least && near == "" {
			near, least = w, n
		}
	}
	return near
}

// distance returns the number of edits between two words: insertions, deletions, replacements, and swaps of neighbours
// (optimal string alignment). The language has no word above 40 bytes, so such words count as different.
func distance(a, b string) int {
	if len(a) > 40 || len(b) > 40 {
		return 40
	}
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			other := 1
			if a[i-1] == b[j-1] {
				other = 0
			}
			d[i][j] = min(d[i-1][j]+1, d[i][j-1]+1, d[i-1][j-1]+other)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}

var errAlreadySet = errors.New("this limit is already set")

func setOnce(into *string, text string) error {
	if *into != "" {
		return errAlreadySet
	}
	*into = text
	return nil
}

// times lists the accepted layouts of a time. A time without a zone is UTC.
var times = []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02T15:04Z07:00", "2006-01-02T15:04"}

// readTime returns the time that a text describes. If the text is a day, from is the beginning of the day and until is
// its end. Otherwise both are the time.
func readTime(text string) (from, until time.Time, err error) {
	problem := fmt.Errorf("invalid time %q: must be like 2026-11-20, 2026-11-20T08:00 (UTC) or 2026-11-20T08:00:00+01:00",
		text)
	at, err := time.Parse(time.DateOnly, text)
	if err == nil {
		from, until = at, at.AddDate(0, 0, 1)
	} else {
		for _, layout := range times {
			if at, err = time.Parse(layout, text); err == nil {
				from, until = at, at
				break
			}
		}
	}
	if err != nil || from.UTC().Year() < 1 || until.UTC().Year() > 9999 {
		return from, until, problem
	}
	return from, until, nil
}

func formatTime(t time.Time) string { return t.Format(time.RFC3339Nano) }

func readAfter(f *Filter, v value) error {
	from, _, err := readTime(v.text)
	if err != nil {
		return err
	}
	return setOnce(&f.After, formatTime(from))
}

func readBefore(f *Filter, v value) error {
	from, _, err := readTime(v.text)
	if err != nil {
		return err
	}
	return setOnce(&f.Before, formatTime(from))
}

func readFailed(f *Filter, v value) error {
	first, last, isRange := strings.Cut(v.text, "..")
	if !isRange {
		last = first
		if _, err := time.Parse(time.DateOnly, first); err != nil {
			return errors.New("failed takes a day (failed:2026-11-20) or a range (failed:2026-11-20T08:00..2026-11-20T09:00)")
		}
	}
	if first == "" && last == "" {
		return errors.New("failed takes a day or a range, of which one end may be omitted")
	}
	if first != "" {
		from, _, err := readTime(first)
		if err != nil {
			return err
		}
		if err := setOnce(&f.After, formatTime(from)); err != nil {
			return err
		}
	}
	if last == "" {
		return nil
	}
	_, until, err := readTime(last)
	if err != nil {
		return err
	}
	return setOnce(&f.Before, formatTime(until))
}

// units are the units of time, with their names in Postgres.
var units = []struct{ letter, name string }{
	{"w", "week"},
	{"d", "day"},
	{"h", "hour"},
	{"m", "minute"},
	{"s", "second"},
}

var (
	duration = regexp.MustCompile(`^(?:[0-9]{1,7}[wdhms])+$`)
	part     = regexp.MustCompile(`([0-9]+)([wdhms])`)
)

// readDuration converts a duration such as 1d12h to the form of Postgres: 1 day 12 hours.
func readDuration(text string) (string, error) {
	if !duration.MatchString(text) {
		return "", fmt.Errorf("invalid duration %q: must be like 30m, 2d or 1d12h (s, m, h, d, w)", text)
	}
	var out []string
	for _, found := range part.FindAllStringSubmatch(text, -1) {
		for _, u := range units {
			if u.letter == found[2] {
				name := u.name
				if found[1] != "1" {
					name += "s"
				}
				out = append(out, found[1]+" "+name)
			}
		}
	}
	return strings.Join(out, " "), nil
}

func readAge(f *Filter, v value) error {
	text, into := v.text, &f.MinAge
	switch {
	case strings.HasPrefix(text, ">"):
	case strings.HasPrefix(text, "<"):
		into = &f.MaxAge
	default:
		return errors.New("age takes > or < and a duration: age:>2d, age:<30m")
	}
	text = strings.TrimPrefix(text[1:], "=")
	if !v.quoted { // a quoted value is already an interval in the syntax of Postgres
		var err error
		if text, err = readDuration(text); err != nil {
			return err
		}
	}
	if text == "" {
		return errors.New("the duration is missing")
	}
	return setOnce(into, text)
}

var counts = regexp.MustCompile(`^(?:(>=?|<=?|)([0-9]{1,10})|([0-9]{1,10})\.\.([0-9]{1,10}))$`)

func readAttempts(f *Filter, v value) error {
	found := counts.FindStringSubmatch(v.text)
	if found == nil {
		return errors.New("attempts takes a number: attempts:3, attempts:>3, attempts:<=2, attempts:2..4")
	}
	number := func(text string) int { n, _ := strconv.Atoi(text); return n }
	least, most := -1, -1
	switch n := number(found[2]); {
	case found[2] == "":
		least, most = number(found[3]), number(found[4])
	case found[1] == "":
		least, most = n, n
	case found[1] == ">":
		least = n + 1
	case found[1] == ">=":
		least = n
	case found[1] == "<":
		if most = n - 1; most < 0 {
			return errors.New("attempts cannot be less than 0")
		}
	case found[1] == "<=":
		most = n
	}
	if max(least, most) > maxAttempts {
		return fmt.Errorf("attempts cannot be more than %d", maxAttempts)
	}
	for _, bound := range []struct {
		into **int
		n    int
	}{{&f.MinRetryCount, least}, {&f.MaxRetryCount, most}} {
		if bound.n < 0 {
			continue
		}
		if *bound.into != nil {
			return errAlreadySet
		}
		*bound.into = &bound.n
	}
	return nil
}

// maxAttempts is the maximum value of the column in the database.
const maxAttempts = 1<<31 - 1
