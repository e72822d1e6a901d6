package message

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxExponent is the largest exponent of a number, positive or negative, and the maximum length of a number in
// characters. No message needs larger numbers, and jsonb writes out all of their digits. The limits of Postgres'
// numeric, which jsonb uses, are far higher: 131,072 digits before the point, 16,383 after it.
const maxExponent = 1000

// maxGrowth limits the bytes that a document may gain when jsonb writes its numbers out, as a multiple
// of its length: 1e1000 is six bytes that become 1,001. A document may always gain minGrowth bytes.
const (
	maxGrowth = 4
	minGrowth = 64 << 10
)

// fewKeys is the number of keys in an object up to which keys are compared one by one instead of in a map.
const fewKeys = 24

// CheckJSON returns an [*InvalidError] for text that is not JSON, and for JSON that jsonb cannot hold
// or would change: invalid UTF-8, NUL characters, half a surrogate pair, numbers that are too large or
// grow too much when written out, the same key twice in an object, and nesting deeper than MaxDepth.
// It does not decode the document, and allocates only for large objects and escaped keys.
func CheckJSON(raw []byte) error { return check(raw, nil) }

// check does what CheckJSON does. It also calls onKey, if not nil, with each key and its depth.
func check(raw []byte, onKey func(depth int, key []byte) error) error {
	s := scanner{raw: raw, onKey: onKey}
	return s.document()
}

// field is a member of an object.
type field struct {
	name  []byte // without quotes and escapes
	value []byte // as in the document
}

// scanner reads a document once. It checks the grammar and the further rules of CheckJSON.
type scanner struct {
	raw    []byte
	onKey  func(depth int, key []byte) error // may be nil
	keep   bool                              // whether to fill fields with the members of the outermost object
	fields []field

	keys   [][]byte // keys of all open objects, the outermost object first
	growth int      // number of digits that writing out the numbers so far may add
}

// errGrammar is replaced by the error of [wellFormed], which names the place of the mistake.
var errGrammar = malformed("", "is not JSON")

func (s *scanner) document() error {
	if !utf8.Valid(s.raw) {
		return wellFormed(s.raw)
	}
	end, err := s.value(s.skipSpace(0), 0)
	if err == nil && s.skipSpace(end) < len(s.raw) {
		err = errGrammar
	}
	if err == nil {
		return nil
	}
	if grammar := wellFormed(s.raw); grammar != nil {
		return grammar
	}
	return err
}

// at returns the byte at an index, or 0 behind the end.
func (s *scanner) at(i int) byte {
	if i < len(s.raw) {
		return s.raw[i]
	}
	return 0
}

func (s *scanner) skipSpace(i int) int {
	for i < len(s.raw) && (s.raw[i] == ' ' || s.raw[i] == '\n' || s.raw[i] == '\r' || s.raw[i] == '\t') {
		i++
	}
	return i
}

// value returns the end of the value that begins at i. The other methods do the same for one type of value each.
func (s *scanner) value(i, depth int) (end int, err error) {
	switch c := s.at(i); {
	case c == '"':
		return s.text(i)
	case c == '{' || c == '[':
		if depth++; depth > MaxDepth {
			return 0, malformed(pathAt(s.raw, i), "is nested deeper than %d levels at byte %d", MaxDepth, i)
		}
		if c == '{' {
			return s.object(i, depth)
		}
		return s.array(i, depth)
	case c == '-' || c >= '0' && c <= '9':
		return s.number(i)
	}
	for _, literal := range []string{"true", "false", "null"} {
		if bytes.HasPrefix(s.raw[min(i, len(s.raw)):], []byte(literal)) {
			return i + len(literal), nil
		}
	}
	return 0, errGrammar
}

func (s *scanner) object(i, depth int) (end int, err error) {
	set := keySet{first: len(s.keys)}
	i = s.skipSpace(i + 1)
	if s.at(i) == '}' {
		return i + 1, nil
	}
	for {
		if s.at(i) != '"' {
			return 0, errGrammar
		}
		end, err := s.text(i)
		if err != nil {
			return 0, err
		}
		key := unquoted(s.raw[i:end])
		if set.has(s.keys, key) {
			return 0, malformed(pathAt(s.raw, i), "has the key %q twice, at byte %d", shortened(key), i)
		}
		s.keys = append(s.keys, key)
		if s.onKey != nil {
			if err := s.onKey(depth, key); err != nil {
				return 0, err
			}
		}
		if i = s.skipSpace(end); s.at(i) != ':' {
			return 0, errGrammar
		}
		i = s.skipSpace(i + 1)
		if end, err = s.value(i, depth); err != nil {
			return 0, err
		}
		if s.keep && depth == 1 {
			s.fields = append(s.fields, field{key, s.raw[i:end]})
		}
		switch i = s.skipSpace(end); s.at(i) {
		case ',':
			i = s.skipSpace(i + 1)
		case '}':
			s.keys = s.keys[:set.first]
			return i + 1, nil
		default:
			return 0, errGrammar
		}
	}
}

func (s *scanner) array(i, depth int) (end int, err error) {
	i = s.skipSpace(i + 1)
	if s.at(i) == ']' {
		return i + 1, nil
	}
	for {
		if end, err = s.value(i, depth); err != nil {
			return 0, err
		}
		switch i = s.skipSpace(end); s.at(i) {
		case ',':
			i = s.skipSpace(i + 1)
		case ']':
			return i + 1, nil
		default:
			return 0, errGrammar
		}
	}
}

// ordinary has the bytes that need no escape in a string. Bytes above 127 have been checked as UTF-8.
var ordinary = func() (table [256]bool) {
	for c := range table {
		table[c] = c >= ' ' && c != '"' && c != '\\'
	}
	return table
}()

func (s *scanner) text(i int) (end int, err error) {
	for i++; i < len(s.raw); {
		switch c := s.raw[i]; {
		case ordinary[c]:
			i++
		case c == '"':
			return i + 1, nil
		case c != '\\':
			return 0, errGrammar
		case s.at(i+1) == 'u':
			if i, err = s.escape(i); err != nil {
				return 0, err
			}
		case strings.IndexByte(`"\/bfnrt`, s.at(i+1)) >= 0:
			i += 2
		default:
			return 0, errGrammar
		}
	}
	return 0, errGrammar
}

// escape returns the end of a \uXXXX escape, or of both escapes of a surrogate pair.
func (s *scanner) escape(i int) (end int, err error) {
	switch r := unescape(s.raw[i:]); {
	case r < 0:
		return 0, errGrammar
	case r == 0:
		return 0, malformed(pathAt(s.raw, i), `has a NUL character (\u0000) at byte %d, which the database cannot store`, i)
	case r >= 0xDC00 && r <= 0xDFFF:
		return 0, malformed(pathAt(s.raw, i), `has half a surrogate pair (\u%04x) at byte %d`, r, i)
	case r >= 0xD800 && r <= 0xDBFF:
		if low := unescape(s.raw[i+6:]); low < 0xDC00 || low > 0xDFFF {
			return 0, malformed(pathAt(s.raw, i), `has half a surrogate pair (\u%04x) at byte %d`, r, i)
		}
		return i + 12, nil
	}
	return i + 6, nil
}

func (s *scanner) number(i int) (end int, err error) {
	digits := func(from int) (end int, found bool) {
		for end = from; s.at(end) >= '0' && s.at(end) <= '9'; {
			end++
		}
		return end, end > from
	}
	end = i
	if s.at(end) == '-' {
		end++
	}
	first := end
	end, ok := digits(first)
	ok = ok && (s.raw[first] != '0' || end == first+1)
	if ok && s.at(end) == '.' {
		end, ok = digits(end + 1)
	}
	if ok && (s.at(end) == 'e' || s.at(end) == 'E') {
		if end++; s.at(end) == '+' || s.at(end) == '-' {
			end++
		}
		end, ok = digits(end)
	}
	if !ok {
		return 0, errGrammar
	}
	exponent, err := checkNumber(s.raw, i, end)
	if err != nil {
		return 0, err
	}
	if s.growth += exponent; exponent > 0 && s.growth > max(maxGrowth*len(s.raw), minGrowth) {
		return 0, malformed(pathAt(s.raw, i), "has numbers up to byte %d that make it more than %d times as long when their "+
			"exponents are written out", i, maxGrowth)
	}
	return end, nil
}

// checkNumber returns the maximum number of digits that writing out the exponent adds to a number.
func checkNumber(raw []byte, at, end int) (exponent int, err error) {
	if e := bytes.IndexAny(raw[at:end], "eE"); e >= 0 {
		exponent, err = strconv.Atoi(string(raw[at+e+1 : end]))
		if exponent = max(exponent, -exponent); err != nil || exponent > maxExponent {
			return 0, malformed(pathAt(raw, at), "has a number at byte %d with an exponent above %d", at, maxExponent)
		}
	}
	if end-at > maxExponent {
		return 0, malformed(pathAt(raw, at), "has a number at byte %d that is longer than %d digits", at, maxExponent)
	}
	return exponent, nil
}

// wellFormed returns an error for invalid UTF-8, for text that is not JSON, and for JSON that is nested deeper than
// encoding/json allows.
func wellFormed(raw []byte) error {
	if !utf8.Valid(raw) {
		at := 0
		for at < len(raw) {
			r, size := utf8.DecodeRune(raw[at:])
			if r == utf8.RuneError && size == 1 {
				break
			}
			at += size
		}
		return malformed(pathAt(raw, at), "has invalid UTF-8 at byte %d", at)
	}
	if !json.Valid(raw) {
		var into json.RawMessage
		err := json.Unmarshal(raw, &into)
		if len(bytes.TrimSpace(raw)) == 0 {
			return malformed("", "is empty; must be a JSON object")
		}
		if err != nil && strings.Contains(err.Error(), "exceeded max depth") { // encoding/json's own limit
			return malformed("", "is nested deeper than %d levels", MaxDepth)
		}
		return malformed("", "is not JSON: %v", err)
	}
	return nil
}

// keySet has the keys of an object that is being read.
type keySet struct {
	first int                 // index of its first key
	many  map[string]struct{} // its keys, if there are fewKeys or more
}

// has reports whether an object already has a key. keys has the keys of all open objects; the keys of this object come
// last.
func (s *keySet) has(keys [][]byte, key []byte) bool {
	keysOfObject := keys[s.first:]
	if len(keysOfObject) < fewKeys {
		for _, k := range keysOfObject {
			if bytes.Equal(k, key) {
				return true
			}
		}
		return false
	}
	if s.many == nil {
		s.many = make(map[string]struct{}, 2*len(keysOfObject))
		for _, k := range keysOfObject {
			s.many[string(k)] = struct{}{}
		}
	}
	if _, known := s.many[string(key)]; known {
		return true
	}
	s.many[string(key)] = struct{}{}
	return false
}

// checkKeyCase returns a check of keys at a depth. It refuses a key that differs from a field's name only in case:
// encoding/json would accept "Queue" for "queue", and other decoders would not.
func checkKeyCase(at int) func(depth int, key []byte) error {
	return func(depth int, key []byte) error {
		if depth != at || fieldNames[string(key)] {
			return nil
		}
		for name := range fieldNames {
			if strings.EqualFold(name, string(key)) {
				return malformed(string(key), "unknown field; use %q", name)
			}
		}
		return nil
	}
}

// fieldNames has the JSON names of a message's fields.
var fieldNames = func() map[string]bool {
	names := map[string]bool{}
	for field := range reflect.TypeFor[Message]().Fields() {
		if name, _, _ := strings.Cut(field.Tag.Get("json"), ","); name != "" {
			names[name] = true
		}
	}
	return names
}()

// unquoted returns the text of a valid JSON string.
func unquoted(raw []byte) []byte {
	if bytes.IndexByte(raw, '\\') < 0 {
		return raw[1 : len(raw)-1]
	}
	var text string
	_ = json.Unmarshal(raw, &text) // cannot fail: raw is valid
	return []byte(text)
}

// shortened returns a client's text for an error message, cut to 100 bytes.
func shortened[T string | []byte](text T) string {
	const most = 100
	if len(text) <= most {
		return string(text)
	}
	return strings.ToValidUTF8(string(text[:most]), "") + "…"
}

// unescape returns the code unit of the \uXXXX at the start of raw, or -1 if there is none.
func unescape(raw []byte) int {
	if len(raw) < 6 || raw[0] != '\\' || raw[1] != 'u' {
		return -1
	}
	n, err := strconv.ParseUint(string(raw[2:6]), 16, 32)
	if err != nil {
		return -1
	}
	return int(n)
}

// pathAt returns the path of the field that contains a byte of a JSON document, such as
// payload.lines[3].
func pathAt(raw []byte, offset int) string {
	type level struct {
		array bool
		index int
		key   string
		isKey bool // the next token of an object is a key
	}
	var levels []level
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	for {
		token, err := decoder.Token()
		if err != nil || int(decoder.InputOffset()) > offset {
			break
		}
		delim, _ := token.(json.Delim)
		if delim == '}' || delim == ']' {
			levels = levels[:len(levels)-1]
		}
		if len(levels) > 0 && delim != '{' && delim != '[' {
			switch top := &levels[len(levels)-1]; {
			case top.array:
				top.index++
			case top.isKey:
				top.key, _ = token.(string)
				top.isKey = false
			default:
				top.isKey = true
			}
		}
		if delim == '{' || delim == '[' {
			levels = append(levels, level{array: delim == '[', isKey: delim == '{'})
		}
	}
	var path strings.Builder
	for _, l := range levels {
		switch {
		case l.array:
			_, _ = fmt.Fprintf(&path, "[%d]", l.index)
		case l.key != "":
			if path.Len() > 0 {
				path.WriteByte('.')
			}
			path.WriteString(l.key)
		}
	}
	return path.String()
}
