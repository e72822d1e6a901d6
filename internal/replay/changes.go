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
	Op    string          `json:"op" enum:"add,remove,replace" doc:"JSON Patch operation."`
	Path  string          `json:"path" doc:"Place in the payload as a JSON Pointer (RFC 6901); empty for the whole payload."`
	Was   json.RawMessage `json:"was,omitempty" doc:"Value before the change."`
	Value json.RawMessage `json:"value,omitempty" doc:"Value after the change."`
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

func changes(list []Change, path string, before, after json.RawMessage) []Change {
	if bytes.Equal(compact(before), compact(after)) || sameText(before, after) {
		return list
	}
	var oldFields, newFields map[string]json.RawMessage
	var oldItems, newItems []json.RawMessage
	switch {
	case object(before, &oldFields) && object(after, &newFields):
		names := maps.Clone(oldFields)
		maps.Copy(names, newFields)
		for _, name := range slices.Sorted(maps.Keys(names)) {
			place := path + "/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(name)
			list = change(list, place, oldFields[name], newFields[name])
		}
	case array(before, &oldItems) && array(after, &newItems):
		for i := range max(len(oldItems), len(newItems)) {
			var a, b json.RawMessage
			if i < len(oldItems) {
				a = oldItems[i]
			}
			if i < len(newItems) {
				b = newItems[i]
			}
			list = change(list, path+"/"+strconv.Itoa(i), a, b)
		}
	default:
		list = append(list, Change{Op: "replace", Path: path, Was: before, Value: after})
	}
	return list
}

// change appends the changes of one place; nil means that the place has no value.
func change(list []Change, path string, before, after json.RawMessage) []Change {
	switch {
	case before == nil:
		return append(list, Change{Op: "add", Path: path, Value: after})
	case after == nil:
		return append(list, Change{Op: "remove", Path: path, Was: before})
	}
	return changes(list, path, before, after)
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

func array(raw json.RawMessage, into *[]json.RawMessage) bool {
	return bytes.HasPrefix(bytes.TrimSpace(raw), []byte("[")) && json.Unmarshal(raw, into) == nil
}
