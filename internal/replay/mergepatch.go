package replay

import (
	"bytes"
	"encoding/json"
)

// member is a name and a value of a JSON object. The value has its original text.
type member struct {
	name  string
	value json.RawMessage
}

// members returns the members of a JSON object in order; ok is false for any other JSON value.
func members(raw json.RawMessage) (all []member, ok bool, err error) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	first, err := decoder.Token()
	if err != nil || first != json.Delim('{') {
		return nil, false, err
	}
	for decoder.More() {
		name, err := decoder.Token()
		if err != nil {
			return nil, false, err
		}
		m := member{}
		m.name, _ = name.(string) // a name is always a string
		if err := decoder.Decode(&m.value); err != nil {
			return nil, false, err
		}
		all = append(all, m)
	}
	return all, true, nil
}

// mergePatch implements RFC 7396, section 2. Values that the patch does not name keep their order and
// their text, so that no digit of a number is lost. It is used instead of evanphx/json-patch, which
// drops nulls inside arrays of the patch; the RFC keeps them. Names in the patch must be unique.
func mergePatch(target, patch json.RawMessage) (json.RawMessage, error) {
	changes, ok, err := members(patch)
	if err != nil || !ok {
		return patch, err
	}
	into, _, err := members(target) // empty if the target is not an object
	if err != nil {
		return nil, err
	}
	at := make(map[string]int, len(into))
	for i, m := range into {
		at[m.name] = i
	}
	for _, change := range changes {
		i, there := at[change.name]
		switch {
		case string(change.value) == "null" && there:
			into[i].value = nil
		case string(change.value) == "null":
		default:
			if !there {
				i = len(into)
				into = append(into, member{name: change.name, value: json.RawMessage("null")})
			}
			if into[i].value, err = mergePatch(into[i].value, change.value); err != nil {
				return nil, err
			}
		}
	}
	out := bytes.NewBufferString("{")
	for _, m := range into {
		if m.value == nil {
			continue // removed
		}
		if out.Len() > 1 {
			out.WriteByte(',')
		}
		name, err := json.Marshal(m.name)
		if err != nil {
			return nil, err
		}
		out.Write(name)
		out.WriteByte(':')
		out.Write(m.value)
	}
	out.WriteByte('}')
	return out.Bytes(), nil
}
