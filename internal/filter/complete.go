package filter

import (
	"slices"
	"strings"
)

// Typing is the part of a text at the cursor, and the range that a completion replaces. Positions count characters.
type Typing struct {
	Field  string // field whose value the user is typing; empty for a field's name or a word
	Prefix string
	From   int
	To     int
}

// At returns the part of a text at the cursor position at. It returns false if that part cannot be completed.
func At(text string, at int) (Typing, bool) {
	runes := []rune(text)
	at = max(min(at, len(runes)), 0)
	_, terms := Read(text, "me")
	i := slices.IndexFunc(terms, func(t Term) bool { return t.From <= at && at <= t.To })
	if len(text) > MaxBytes || i < 0 {
		return Typing{From: at, To: at}, len(text) <= MaxBytes
	}
	from, to := terms[i].From, terms[i].To
	typed := string(runes[from:at])
	name, values, isField := strings.Cut(typed, ":")
	if !isField {
		if strings.Contains(string(runes[at:to]), ":") { // the name of a field that already has values
			to = from + len([]rune(strings.SplitN(string(runes[from:to]), ":", 2)[0])) + 1
		}
		return Typing{Prefix: typed, From: from, To: to}, !strings.ContainsAny(typed, `"-`)
	}
	d := lookup(strings.ToLower(name))
	if d == nil || d.name == "payload" {
		return Typing{}, false
	}
	begins, quoted := 0, false // start of the last value, and whether that value is quoted
	for i := 0; i < len(values); i++ {
		switch {
		case quoted && values[i] == '\\':
			i++
		case values[i] == '"' && (quoted || i == begins):
			quoted = !quoted
		case values[i] == ',' && !quoted:
			begins = i + 1
		}
	}
	t := Typing{
		Field: d.name, Prefix: unquote.Replace(strings.TrimPrefix(values[begins:], `"`)),
		From: at - len([]rune(values[begins:])), To: at,
	}
	for t.To < to && runes[t.To] != ',' {
		t.To++
	}
	return t, true
}

// Complete returns the fields or values of the language that begin with the prefix, in the order of the language.
func (t *Typing) Complete() []Field {
	var out []Field
	prefix := strings.ToLower(t.Prefix)
	if t.Field == "" {
		for _, f := range Fields() {
			if strings.HasPrefix(f.Name, prefix) {
				out = append(out, f)
			}
		}
		return out
	}
	var words []string
	if d := lookup(t.Field); d.values != nil {
		words = d.values()
	} else if t.Field == "assigned" {
		words = []string{"me", "nobody"}
	}
	for _, w := range words {
		if strings.HasPrefix(w, prefix) {
			out = append(out, Field{Name: w})
		}
	}
	return out
}

// Insert returns the text that a completion inserts for a name. If ofLanguage is set, the name is a word of the
// language, such as me or nobody. Otherwise the name is a value. A value that is spelled like such a word is quoted.
func (t *Typing) Insert(name string, ofLanguage bool) string {
	switch {
	case t.Field == "" && name == "payload":
		return "payload."
	case t.Field == "":
		return name + ":"
	case t.Field == "assigned" && !ofLanguage && (name == "me" || name == "nobody"):
		return quote(name)
	}
	return quoteIfNeeded(name)
}
