package policy

import (
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
)

// Patterns by which something is sensitive wherever it is: see dlq.pattern.
const (
	PatternCardNumbers = "cardNumbers"
	PatternTokens      = "tokens"
)

// pathRoots is what a sensitive path can begin with.
var pathRoots = []string{"payload", "headers", "metadata"}

// Masked is what the database masks, as dlq.mask has it; {} for nothing.
func (d Data) Masked() json.RawMessage {
	var mask struct {
		Paths    []string `json:"paths,omitempty"` // as the policy has them, for whoever looks
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
			continue // it was checked
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
		panic(err) // texts
	}
	return raw
}

// parsePath takes a path apart: names of keys, * for any, and "" between two of them for any depth.
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
			return nil, errors.New("has three dots; two stand for any depth")
		case strings.ContainsAny(segment, "[]"):
			return nil, errors.New("names a place of an array; what is in arrays is found by the keys alone, or with [*]")
		case strings.Contains(segment, "*") && segment != "*":
			return nil, errors.New("has a * beside other characters; alone, it stands for any key")
		}
	}
	return segments, nil
}

// separator of keys in the paths that the database looks at.
const keySeparator = `\u001f`

// wherePath is a regular expression of Postgres's for paths.
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

// keyOf is a regular expression that the text of every JSON matches which has something at a path.
func keyOf(segments []string) string {
	last := segments[len(segments)-1]
	if len(segments) == 1 || !plainKey.MatchString(last) {
		return "" // which all match
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
			l.badf("retry-policies", fmt.Sprintf("data.sensitivePaths[%d]", i), "%q %w", path, err)
		}
	}
}
