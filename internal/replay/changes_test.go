package replay_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/replay"
)

func TestChanges_ListsEditedPlaces(t *testing.T) {
	t.Parallel()
	for _, test := range [][3]string{
		{`{"a": 1}`, `{"a":1}`, `null`},
		{
			`{"a": 9007199254740992, "b": null}`, `{"a": 9007199254740993, "c": null}`,
			`[{"op":"replace","path":"/a","was":9007199254740992,"value":9007199254740993},{"op":"remove","path":"/b","was":null},{"op":"add","path":"/c","value":null}]`,
		},
		{
			`{"a/b": [1, {"~": 2}, 3]}`, `{"a/b": [1, {"~": 4}]}`,
			`[{"op":"replace","path":"/a~1b/1/~0","was":2,"value":4},{"op":"remove","path":"/a~1b/2","was":3}]`,
		},
		// Equal apart from escapes.
		{"{\"a\": \"x\u202ey<\", \"b\": null}", `{"a": "\u0078\u202Ey\u003c", "b": null}`, `null`},
		{`["\ud800"]`, `["\ud801"]`, `[{"op":"replace","path":"/0","was":"\ud800","value":"\ud801"}]`},
		{`[1]`, `{"a": 1}`, `[{"op":"replace","path":"","was":[1],"value":{"a": 1}}]`},
	} {
		raw, err := json.Marshal(replay.Changes(json.RawMessage(test[0]), json.RawMessage(test[1])))
		require.NoError(t, err)
		require.JSONEq(t, test[2], string(raw))
	}
}
