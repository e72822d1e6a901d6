package policy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"regexp"
	"slices"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/dlqd/dlqd/internal/redact"
)

// Patterns of values that are sensitive in every field; see dlq.pattern in the database.
const (
	PatternCardNumbers = "cardNumbers"
	PatternTokens      = "tokens"
	PatternEmails      = "emails"
)

// pathRoots are the first segments that a sensitive path may have.
var pathRoots = []string{"payload", "headers", "metadata"}

// Masked returns the masking rules in the form of dlq.mask in the database, or {} if there are none.
func (d Data) Masked() json.RawMessage {
	var mask struct {
		Paths    []string `json:"paths,omitempty"` // as the policy writes them, for display
		Where    string   `json:"where,omitempty"`
		Keys     string   `json:"keys,omitempty"`
		Last     []string `json:"last,omitempty"`
		Patterns []string `json:"patterns,omitempty"`
	}
	mask.Paths, mask.Patterns = d.SensitivePaths, d.SensitivePatterns
	var where, keys []string
	known := true
	for _, path := range d.SensitivePaths {
		segments, err := parsePath(path)
		if err != nil {
			continue // checked when the policy was loaded
		}
		where = append(where, wherePath(segments))
		keys = append(keys, keyOf(segments))
		mask.Last = append(mask.Last, strings.ToLower(segments[len(segments)-1]))
		known = known && keyOf(segments) != ""
	}
	if !known {
		mask.Last = nil
	}
	if len(where) > 0 {
		mask.Where = "^(?:" + strings.Join(where, "|") + ")$"
		mask.Keys = strings.Join(keys, "|")
	}
	raw, err := json.Marshal(mask)
	if err != nil {
		panic(err) // strings always marshal
	}
	return raw
}

// parsePath splits a path into segments: a key, * for any key, or "" for any depth.
func parsePath(path string) ([]string, error) {
	segments := strings.Split(strings.ReplaceAll(path, "[*]", ""), ".")
	if root := segments[0]; root != pathRoots[0] && root != pathRoots[1] && root != pathRoots[2] {
		return nil, fmt.Errorf("begins with %q; must be %s", root, strings.Join(pathRoots, ", "))
	}
	for i, segment := range segments {
		switch {
		case segment == "" && i == len(segments)-1:
			return nil, errors.New("ends with a dot")
		case segment == "" && segments[i+1] == "":
			return nil, errors.New("has three dots; two dots match any depth")
		case strings.ContainsAny(segment, "[]"):
			return nil, errors.New("contains an array index; a path matches every element of an array, with [*] or without")
		case strings.Contains(segment, "*") && segment != "*":
			return nil, errors.New("has a * beside other characters; a segment that is only * matches any key")
		}
	}
	return segments, nil
}

// keySeparator joins the keys of a path in the form that the database matches.
const keySeparator = `\u001f`

// wherePath returns a Postgres regular expression for a path of segments whose keys are joined by keySeparator.
func wherePath(segments []string) string {
	var out strings.Builder
	for i, segment := range segments {
		switch {
		case segment == "":
			out.WriteString(keySeparator + "(?:.*" + keySeparator + ")?")
			continue
		case i > 0 && segments[i-1] != "":
			out.WriteString(keySeparator)
		}
		if segment == "*" {
			out.WriteString("[^" + keySeparator + "]*")
		} else {
			out.WriteString(quoteRegexp(segment))
		}
	}
	return out.String()
}

var plainKey = regexp.MustCompile(`^[A-Za-z0-9_ -]+$`)

// keyOf returns a regular expression that matches the text of every JSON document that has a value at the path. It may
// match other texts, too.
func keyOf(segments []string) string {
	last := segments[len(segments)-1]
	if len(segments) == 1 || !plainKey.MatchString(last) {
		return "" // matches every text
	}
	return `"` + quoteRegexp(last) + `": `
}

func quoteRegexp(text string) string {
	var out strings.Builder
	for _, r := range text {
		if r < 0x80 && !plainKey.MatchString(string(r)) {
			out.WriteByte('\\')
		}
		out.WriteRune(r)
	}
	return out.String()
}

func (l *loader) checkSensitive() {
	for i, path := range l.policy.Data.SensitivePaths {
		if _, err := parsePath(path); err != nil {
			l.addf("retry-policies", fmt.Sprintf("data.sensitivePaths[%d]", i), "%q %w", path, err)
		}
	}
}

const (
	maxSensitiveValues = 100 // with more values, whole texts are masked, as in dlq.sensitive_values
	minSensitiveLength = 4   // bytes; shorter values occur inside words
	maxMaskedDepth     = 70  // levels of an event
)

// Mask returns a function that masks a text by the policy: it masks matches of the patterns, and the values at
// sensitive paths of an event, because an error may repeat these values. The event has the keys payload, headers and
// metadata. The function also finds values in the forms that JSON and HTML give them. If the event has more than
// maxSensitiveValues such values, the function hides the whole text.
func (d *Data) Mask(event func() map[string]any) func(text string) string {
	var values []string
	whole := false
	if len(d.SensitivePaths) > 0 {
		paths := make([][]string, 0, len(d.SensitivePaths))
		for _, path := range d.SensitivePaths {
			if segments, err := parsePath(path); err == nil { // checked when the policy was loaded
				paths = append(paths, segments)
			}
		}
		collectValues(event(), nil, paths, false, &values)
		whole = len(values) > maxSensitiveValues
		for _, value := range values {
			values = append(values, encodedForms(value)...)
		}
	}
	return func(text string) string {
		if whole && text != "" {
			return redact.Hidden
		}
		text = redact.Hide(text, values...)
		if slices.Contains(d.SensitivePatterns, PatternEmails) {
			text = redact.Emails(text)
		}
		if slices.Contains(d.SensitivePatterns, PatternTokens) {
			text = redact.Tokens(text)
		}
		if slices.Contains(d.SensitivePatterns, PatternCardNumbers) {
			text = redact.CardNumbers(text)
		}
		return text
	}
}

// collectValues adds to values the texts and numbers of at least minSensitiveLength bytes at and below the given paths
// of a document, down to maxMaskedDepth. It stops once it has more than maxSensitiveValues.
func collectValues(node any, at []string, paths [][]string, found bool, values *[]string) {
	if len(*values) > maxSensitiveValues || len(at) > maxMaskedDepth {
		return
	}
	found = found || len(at) > 0 && slices.ContainsFunc(paths, func(path []string) bool { return matchPath(path, at) })
	add := func(value string) {
		if found && len(value) >= minSensitiveLength && !slices.Contains(*values, value) {
			*values = append(*values, value)
		}
	}
	switch node := node.(type) {
	case map[string]any:
		for name, value := range node {
			collectValues(value, append(slices.Clip(at), name), paths, found, values)
		}
	case []any:
		for _, value := range node {
			collectValues(value, at, paths, found, values)
		}
	case string:
		add(node)
	case json.Number:
		add(node.String())
	}
}

// encodedForms returns further forms in which receivers may write a value: JSON with and without escaped <, > and &,
// JSON in ASCII, and HTML.
func encodedForms(value string) []string {
	var forms []string
	add := func(form string) {
		if form != value && !slices.Contains(forms, form) {
			forms = append(forms, form)
		}
	}
	var plain bytes.Buffer
	encoder := json.NewEncoder(&plain)
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(value); err == nil {
		inner := plain.String()[1 : plain.Len()-2] // without the quotes and the newline
		add(inner)
		add(ascii(inner, `\u%04x`))
		add(ascii(inner, `\u%04X`))
	}
	if escaped, err := json.Marshal(value); err == nil {
		add(string(escaped[1 : len(escaped)-1]))
	}
	add(html.EscapeString(value))
	return forms
}

// ascii returns a JSON text in which characters beyond ASCII are escaped.
func ascii(text, escape string) string {
	var out strings.Builder
	for _, r := range text {
		if r < utf8.RuneSelf {
			out.WriteRune(r)
			continue
		}
		for _, unit := range utf16.Encode([]rune{r}) {
			_, _ = fmt.Fprintf(&out, escape, unit)
		}
	}
	return out.String()
}

// matchPath reports whether keys match a path. Upper and lower case are the same. In a path, * stands for any key, and
// an empty segment for any number of keys.
func matchPath(path, keys []string) bool {
	switch {
	case len(path) == 0:
		return len(keys) == 0
	case path[0] == "":
		return matchPath(path[1:], keys) || len(keys) > 0 && matchPath(path, keys[1:])
	case len(keys) == 0:
		return false
	}
	return (path[0] == "*" || strings.EqualFold(path[0], keys[0])) && matchPath(path[1:], keys[1:])
}
