package filter

import (
	"bytes"
	"encoding/json"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
)

// Print returns a text from which [Parse] returns an equal filter.
func (f *Filter) Print() string {
	var terms []string
	add := func(name string, values ...string) {
		terms = append(terms, name+":"+strings.Join(values, ","))
	}
	for _, d := range table {
		switch {
		case d.name == "status" && len(f.Status) > 0:
			add(d.name, printStates(f.Status)...)
		case d.name == "error":
			for _, text := range f.ErrorMessage {
				terms = append(terms, quote(text))
			}
		case d.name == "assigned" && len(f.Assignee) > 0:
			add(d.name, mapSlice(f.Assignee, func(name string) string {
				switch name {
				case "":
					return "nobody"
				case "me", "nobody":
					return quote(name)
				}
				return quoteIfNeeded(name)
			})...)
		case d.words != nil && len(*d.words(f)) > 0:
			add(d.name, mapSlice(*d.words(f), quoteIfNeeded)...)
		case d.numbers != nil && len(*d.numbers(f)) > 0:
			add(d.name, mapSlice(*d.numbers(f), func(n int64) string { return strconv.FormatInt(n, 10) })...)
		case d.name == "after" && f.After != "":
			add(d.name, printTime(f.After))
		case d.name == "before" && f.Before != "":
			add(d.name, printTime(f.Before))
		case d.name == "age":
			if f.MinAge != "" {
				add(d.name, printAge(">", f.MinAge))
			}
			if f.MaxAge != "" {
				add(d.name, printAge("<", f.MaxAge))
			}
		case d.name == "attempts":
			switch least, most := f.MinRetryCount, f.MaxRetryCount; {
			case least != nil && most != nil && *least == *most:
				add(d.name, strconv.Itoa(*least))
			case least != nil && most != nil:
				add(d.name, strconv.Itoa(*least)+".."+strconv.Itoa(*most))
			case least != nil:
				add(d.name, ">="+strconv.Itoa(*least))
			case most != nil:
				add(d.name, "<="+strconv.Itoa(*most))
			}
		case d.name == "payload":
			for _, p := range f.PayloadAt {
				add(strings.Join(append([]string{d.name}, mapSlice(p.Path, printKey)...), "."),
					mapSlice(p.Values, quoteIfNeeded)...)
			}
			if f.Payload != nil {
				add(d.name, printJSON(f.Payload))
			}
		}
	}
	return strings.Join(terms, " ")
}

func mapSlice[T any](values []T, text func(T) string) []string {
	out := make([]string, len(values))
	for i, v := range values {
		out[i] = text(v)
	}
	return out
}

// quoteIfNeeded returns a value without quotes if the parser reads it as one value, and otherwise in quotes.
func quoteIfNeeded(text string) string {
	if text == "" || text[0] == '"' || strings.ContainsFunc(text, func(c rune) bool {
		return unicode.IsSpace(c) ||
			c == ',' || !unicode.IsPrint(c)
	}) {
		return quote(text)
	}
	return text
}

func quote(text string) string {
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(text) + `"`
}

func printStates(of []string) []string {
	short := mapSlice(of, func(s string) string { return strings.TrimPrefix(s, "dlq_") })
	switch {
	case slices.Equal(short, openStates):
		return []string{"open"}
	case slices.Equal(short, states[len(openStates):]):
		return []string{"closed"}
	}
	return mapSlice(short, quoteIfNeeded)
}

// printTime writes the beginning of a UTC day as a date, and other times in full.
func printTime(text string) string {
	if day, ok := strings.CutSuffix(text, "T00:00:00Z"); ok {
		return day
	}
	return quoteIfNeeded(text)
}

// printAge returns an age in the short form, if the parser reads the same age from it. Otherwise it returns the age in
// quotes, in the form of Postgres.
func printAge(sign, text string) string {
	short := text
	for _, u := range units {
		short = regexp.MustCompile(` `+u.name+`s?\b ?`).ReplaceAllString(short, u.letter)
	}
	if back, err := readDuration(short); err == nil && back == text {
		return sign + short
	}
	return quote(sign + text)
}

var plainKey = regexp.MustCompile(`^[^\s".:\\]+$`)

func printKey(key string) string {
	if plainKey.MatchString(key) {
		return key
	}
	return quote(key)
}

func printJSON(raw json.RawMessage) string {
	var out bytes.Buffer
	if err := json.Compact(&out, raw); err != nil {
		return string(raw)
	}
	return out.String()
}
