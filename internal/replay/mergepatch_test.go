package replay

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestMergePatch_FollowsRFC7396(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ target, patch, want string }{
		// RFC 7396, appendix A
		{`{"a":"b"}`, `{"a":"c"}`, `{"a":"c"}`},
		{`{"a":"b"}`, `{"b":"c"}`, `{"a":"b","b":"c"}`},
		{`{"a":"b"}`, `{"a":null}`, `{}`},
		{`{"a":"b","b":"c"}`, `{"a":null}`, `{"b":"c"}`},
		{`{"a":["b"]}`, `{"a":"c"}`, `{"a":"c"}`},
		{`{"a":"c"}`, `{"a":["b"]}`, `{"a":["b"]}`},
		{`{"a":{"b":"c"}}`, `{"a":{"b":"d","c":null}}`, `{"a":{"b":"d"}}`},
		{`{"a":[{"b":"c"}]}`, `{"a":[1]}`, `{"a":[1]}`},
		{`["a","b"]`, `["c","d"]`, `["c","d"]`},
		{`{"a":"b"}`, `["c"]`, `["c"]`},
		{`{"a":"foo"}`, `null`, `null`},
		{`{"a":"foo"}`, `"bar"`, `"bar"`},
		{`{"e":null}`, `{"a":1}`, `{"e":null,"a":1}`},
		{`[1,2]`, `{"a":"b","c":null}`, `{"a":"b"}`},
		{`{}`, `{"a":{"bb":{"ccc":null}}}`, `{"a":{"bb":{}}}`},
		// section 3
		{
			`{"title":"Goodbye!","author":{"givenName":"John","familyName":"Doe"},"tags":["example","sample"],"content":"This will be unchanged"}`,
			`{"title":"Hello!","phoneNumber":"+01-123-456-7890","author":{"familyName":null},"tags":["example"]}`,
			`{"title":"Hello!","author":{"givenName":"John"},"tags":["example"],"content":"This will be unchanged","phoneNumber":"+01-123-456-7890"}`,
		},
		// nulls inside arrays are values
		{`{"a":1}`, `{"a":[{"b":null,"c":[null]},null]}`, `{"a":[{"b":null,"c":[null]},null]}`},
		{`[]`, `[{"b":null}]`, `[{"b":null}]`},
		// values that the patch does not name keep their text
		{
			`{"z": 1.0, "b": [1e3, 9007199254740993], "a": {"x": 1.50, "y": 0}}`, `{"a":{"y":null},"n":9007199254740993}`,
			`{"z":1.0,"b":[1e3, 9007199254740993],"a":{"x":1.50},"n":9007199254740993}`,
		},
		{`{"a": null, "b": 1}`, `{"a": {"x": null}}`, `{"a":{},"b":1}`},
	} {
		got, err := mergePatch(json.RawMessage(c.target), json.RawMessage(c.patch))
		require.NoError(t, err)
		require.Equal(t, c.want, string(got), "%s with %s", c.target, c.patch)
		require.True(t, json.Valid(got))
	}
	for _, patch := range []string{`null`, `{"a": "\u0000"}`, `{"a": 1, "a": null}`} {
		require.ErrorContains(t, (&Patch{MergePatch: json.RawMessage(patch)}).Validate(), "mergePatch: ", patch)
	}
}
