package replay

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/dlqd/dlqd/internal/message"
)

// Change is an edit of one place in a payload, in terms of JSON Patch (RFC 6902).
type Change struct {
	Op    string          `json:"op" enum:"add,remove,replace" doc:"What is done."`
	Path  string          `json:"path" doc:"Where, as a JSON Pointer (RFC 6901) into the payload; empty for all of it."`
	Was   json.RawMessage `json:"was,omitempty" doc:"What was there."`
	Value json.RawMessage `json:"value,omitempty" doc:"What is there instead."`
}

// Payload returns the part of an event that patches apply to: a message's payload as it is
// delivered, or the args of an application's job.
func Payload(jobKind string, event json.RawMessage) (json.RawMessage, error) {
	if jobKind != message.JobKind {
		return event, nil
	}
	var m struct {
		Payload     json.RawMessage `json:"payload"`
		PayloadText string          `json:"payloadText"`
	}
	if err := json.Unmarshal(event, &m); err != nil {
		return nil, err
	}
	return message.Message{Payload: m.Payload, PayloadText: m.PayloadText}.Body(), nil
}

// Changes returns the changes from one document to another, ordered by path.
func Changes(before, after json.RawMessage) []Change { return changes(nil, "", before, after) }

func changes(so []Change, path string, before, after json.RawMessage) []Change {
	if bytes.Equal(compact(before), compact(after)) || sameText(before, after) {
		return so
	}
	var was, is map[string]json.RawMessage
	var wasList, isList []json.RawMessage
	switch {
	case object(before, &was) && object(after, &is):
		names := maps.Clone(was)
		maps.Copy(names, is)
		for _, name := range slices.Sorted(maps.Keys(names)) {
			so = change(so, path+"/"+strings.NewReplacer("~", "~0", "/", "~1").Replace(name), was[name], is[name])
		}
	case list(before, &wasList) && list(after, &isList):
		for i := range max(len(wasList), len(isList)) {
			var a, b json.RawMessage
			if i < len(wasList) {
				a = wasList[i]
			}
			if i < len(isList) {
				b = isList[i]
			}
			so = change(so, path+"/"+strconv.Itoa(i), a, b)
		}
	default:
		so = append(so, Change{Op: "replace", Path: path, Was: before, Value: after})
	}
	return so
}

// change appends the changes of one place; nil means that nothing is there.
func change(so []Change, path string, before, after json.RawMessage) []Change {
	switch {
	case before == nil:
		return append(so, Change{Op: "add", Path: path, Value: after})
	case after == nil:
		return append(so, Change{Op: "remove", Path: path, Was: before})
	}
	return changes(so, path, before, after)
}

func compact(raw json.RawMessage) []byte {
	var out bytes.Buffer
	_ = json.Compact(&out, raw) // cannot fail: raw is valid JSON
	return out.Bytes()
}

// sameText reports whether both are the same string, possibly with different escapes.
func sameText(a, b json.RawMessage) bool {
	var textA, textB *string
	if json.Unmarshal(a, &textA) != nil || json.Unmarshal(b, &textB) != nil || textA == nil || textB == nil {
		return false
	}
	return *textA == *textB && !strings.ContainsRune(*textA, utf8.RuneError) // invalid surrogates all decode to RuneError
}

func object(raw json.RawMessage, into *map[string]json.RawMessage) bool {
	return bytes.HasPrefix(bytes.TrimSpace(raw), []byte("{")) && json.Unmarshal(raw, into) == nil
}

func list(raw json.RawMessage, into *[]json.RawMessage) bool {
	return bytes.HasPrefix(bytes.TrimSpace(raw), []byte("[")) && json.Unmarshal(raw, into) == nil
}
