package message

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// maxExponent keeps numbers within Postgres's numeric, which jsonb uses: 131,072 digits before the point and 16,383
// after it. A number that long has no use here, and costs its full length once it is written out.
const maxExponent = 1000

// CheckJSON refuses what is not JSON, and JSON that jsonb cannot hold: invalid UTF-8, NUL characters, half a surrogate
// pair, numbers beyond numeric; and nesting deeper than MaxDepth. One pass over the bytes, no allocation.
func CheckJSON(raw []byte) error {
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
		return malformed("", "is not JSON: %v", err)
	}
	depth := 0
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case c == '{' || c == '[':
			if depth++; depth > MaxDepth {
				return malformed(pathAt(raw, i), "is nested deeper than %d levels at byte %d", MaxDepth, i)
			}
		case c == '}' || c == ']':
			depth--
		case c == '"':
			end, err := checkString(raw, i+1)
			if err != nil {
				return err
			}
			i = end
		case c == '-' || c >= '0' && c <= '9':
			end := i + 1
			for end < len(raw) && strings.IndexByte("+-.eE0123456789", raw[end]) >= 0 {
				end++
			}
			if e := bytes.IndexAny(raw[i:end], "eE"); e >= 0 {
				exponent, err := strconv.Atoi(string(raw[i+e+1 : end]))
				if err != nil || exponent > maxExponent || exponent < -maxExponent {
					return malformed(pathAt(raw, i), "has a number at byte %d whose exponent is beyond %d", i, maxExponent)
				}
			}
			if end-i > maxExponent {
				return malformed(pathAt(raw, i), "has a number at byte %d that is longer than %d digits", i, maxExponent)
			}
			i = end - 1
		}
	}
	return nil
}

// checkString checks the valid JSON string that starts at i (after its quote) and returns where its closing quote is.
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
			return 0, malformed(pathAt(raw, i), `has a NUL character (\u0000) at byte %d, which the database cannot hold`, i)
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

// unescape reads \uXXXX; -1 where there is none.
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

// pathAt names the field that a byte of a JSON document is in, such as payload.lines[3].
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
