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

// maxExponent is the largest exponent of a number, positive or negative, and the largest length of a
// number in characters. Larger numbers have no use here, and jsonb writes out all of their digits. The
// limits of Postgres' numeric, which jsonb uses, are far higher: 131,072 digits before the point,
// 16,383 after it.
const maxExponent = 1000

// maxGrowth limits the bytes that a document may gain when jsonb writes its numbers out, as a multiple
// of its length: 1e1000 is six bytes that become 1,001. A document may always gain minGrowth bytes.
const (
	maxGrowth = 4
	minGrowth = 64 << 10
)

// fewKeys is the number of keys of an object up to which they are compared one by one, not kept in
// a map.
const fewKeys = 24

// CheckJSON returns an [*InvalidError] for text that is not JSON, and for JSON that jsonb cannot hold
// or would change: invalid UTF-8, NUL characters, half a surrogate pair, numbers that are too large or
// grow too much when written out, the same key twice in an object, and nesting deeper than MaxDepth.
// It does not decode the document, and allocates only for large objects and escaped keys.
func CheckJSON(raw []byte) error { return check(raw, nil) }

// check does what CheckJSON does. It also calls onKey, if not nil, with each key and its depth.
func check(raw []byte, onKey func(depth int, key []byte) error) error {
	if err := wellFormed(raw); err != nil {
		return err
	}
	depth, growth := 0, 0
	var objects [MaxDepth + 1]keySet
	keys := make([][]byte, 0, 128) // of the open objects, one after the other
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case c == '{' || c == '[':
			if depth++; depth > MaxDepth {
				return malformed(pathAt(raw, i), "is nested deeper than %d levels at byte %d", MaxDepth, i)
			}
			objects[depth] = keySet{object: c == '{', awaitsKey: c == '{', first: len(keys)}
		case c == '}' || c == ']':
			keys = keys[:objects[depth].first]
			depth--
		case c == ',':
			objects[depth].awaitsKey = objects[depth].object
		case c == '"':
			end, err := checkString(raw, i+1)
			if err != nil {
				return err
			}
			if objects[depth].awaitsKey {
				objects[depth].awaitsKey = false
				key := unquoted(raw[i : end+1])
				if objects[depth].has(keys, key) {
					return malformed(pathAt(raw, i), "has the key %q twice, at byte %d", shortened(key), i)
				}
				keys = append(keys, key)
				if onKey != nil {
					if err := onKey(depth, key); err != nil {
						return err
					}
				}
			}
			i = end
		case c == '-' || c >= '0' && c <= '9':
			end, exponent, err := checkNumber(raw, i)
			if err != nil {
				return err
			}
			if growth += exponent; exponent > 0 && growth > max(maxGrowth*len(raw), minGrowth) {
				return malformed(pathAt(raw, i), "has numbers up to byte %d that make it more than %d times as long when their "+
					"exponents are written out", i, maxGrowth)
			}
			i = end - 1
		}
	}
	return nil
}

// checkNumber returns the end of the number that begins at a byte, and by how many digits at most the
// number becomes longer when its exponent is written out.
func checkNumber(raw []byte, at int) (end, exponent int, err error) {
	end = at + 1
	for end < len(raw) && strings.IndexByte("+-.eE0123456789", raw[end]) >= 0 {
		end++
	}
	if e := bytes.IndexAny(raw[at:end], "eE"); e >= 0 {
		exponent, err = strconv.Atoi(string(raw[at+e+1 : end]))
		if exponent = max(exponent, -exponent); err != nil || exponent > maxExponent {
			return 0, 0, malformed(pathAt(raw, at), "has a number at byte %d with an exponent above %d", at, maxExponent)
		}
	}
	if end-at > maxExponent {
		return 0, 0, malformed(pathAt(raw, at), "has a number at byte %d that is longer than %d digits", at, maxExponent)
	}
	return end, exponent, nil
}

// wellFormed returns an error for invalid UTF-8, and for text that is not JSON.
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

// keySet is the state of an object, or array, that is being read.
type keySet struct {
	object, awaitsKey bool
	first             int                 // index of its first key
	many              map[string]struct{} // its keys, if there are fewKeys or more
}

// has reports whether an object already has a key. keys has the keys of all open objects; those of
// this object come last.
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

// checkKeyCase returns a check that refuses keys at a depth that differ from a field's name only in
// case. encoding/json would take "Queue" for "queue", and other decoders would not.
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
	_ = json.Unmarshal(raw, &text) // it is valid
	return []byte(text)
}

// shortened returns a client's text for an error message: its first 100 bytes if it is longer.
func shortened[T string | []byte](text T) string {
	const most = 100
	if len(text) <= most {
		return string(text)
	}
	return strings.ToValidUTF8(string(text[:most]), "") + "…"
}

// checkString checks the valid JSON string whose text starts at i, and returns the index of its
// closing quote.
func checkString(raw []byte, i int) (int, error) {
	for raw[i] != '"' {
		if raw[i] != '\\' {
			i++
			continue
		}
		if raw[i+1] != 'u' {
			i += 2
			continue
		}
		switch r := unescape(raw[i:]); {
		case r == 0:
			return 0, malformed(pathAt(raw, i), `has a NUL character (\u0000) at byte %d, which the database cannot store`, i)
		case r >= 0xDC00 && r <= 0xDFFF:
			return 0, malformed(pathAt(raw, i), `has half a surrogate pair (\u%04x) at byte %d`, r, i)
		case r >= 0xD800 && r <= 0xDBFF:
			if low := unescape(raw[i+6:]); low < 0xDC00 || low > 0xDFFF {
				return 0, malformed(pathAt(raw, i), `has half a surrogate pair (\u%04x) at byte %d`, r, i)
			}
			i += 6
		}
		i += 6
	}
	return i, nil
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
