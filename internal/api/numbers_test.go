package api

import (
	"encoding/json"
	"log/slog"
	"reflect"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/replay"
)

const anyNumber = `-?[1-9][0-9]{0,40}(\.[0-9]{1,30})?(e-?[1-9][0-9]?)?`

// Go decodes a number in an interface into a float64, which changes numbers beyond 2^53. The API passes on clients'
// JSON unchanged, so no type of a request or response contains an interface.
func TestNumbers_NoAPITypeDecodesClientJSON(t *testing.T) {
	t.Parallel()
	_, _, api := build(Config{Metrics: metrics.New(), Logger: slog.New(slog.DiscardHandler)})
	registry := api.OpenAPI().Components.Schemas
	seen := map[reflect.Type]bool{}
	var visit func(path string, of reflect.Type)
	visit = func(path string, of reflect.Type) {
		if seen[of] {
			return
		}
		seen[of] = true
		require.NotEqual(t, reflect.Interface, of.Kind(), path)
		switch of.Kind() { //nolint:exhaustive // the others hold no other types
		case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
			visit(path+"[]", of.Elem())
		case reflect.Struct:
			for f := range of.Fields() {
				if f.IsExported() {
					visit(path+"."+f.Name, f.Type)
				}
			}
		}
	}
	for name := range registry.Map() {
		if name == "ErrorModel" || name == "ErrorDetail" { // the value of an error is the refused one
			continue
		}
		visit(name, registry.TypeFromRef("#/components/schemas/"+name))
	}
	require.Contains(t, seen, reflect.TypeFor[EntryFilter]())
	require.Contains(t, seen, reflect.TypeFor[Submission]())
}

// Wherever the API accepts JSON of clients, it passes numbers on unchanged.
func TestNumbers_AreUnchanged(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		number := rapid.StringMatching(anyNumber).Draw(rt, "number")
		document := `{"a":[` + number + `],"b":{"c":` + number + `}}`
		through := func(in string, into any) string {
			require.NoError(rt, json.Unmarshal([]byte(in), into))
			out, err := json.Marshal(into)
			require.NoError(rt, err)
			return string(out)
		}
		filter := `{"payload":` + document + `}`
		require.Equal(rt, filter, through(filter, &EntryFilter{}))
		require.Contains(rt, through(`{"do":"discard","filter":`+filter+`}`, &BulkRequest{}), document)
		require.Contains(rt, through(`{"filter":`+filter+`}`, &EraseRequest{}), document)
		require.Contains(rt, through(`{"filter":{},"mergePatch":`+document+`}`, &ReplayRequest{}), document)
		require.Contains(rt, through(`{"filter":{},"patch":[{"op":"add","path":"/a","value":`+document+`}]}`,
			&ReplayRequest{}), document)
		require.Contains(rt, through(`{"payload":`+document+`}`, &ReplayAction{}), document)
		require.Contains(rt, through(`{"queue":"q","kind":"k","payload":`+document+`,"metadata":`+document+`}`,
			&Submission{}), document)

		msg, err := message.Parse([]byte(`{"queue":"q","kind":"k","payload":` + document + `,"metadata":` + document + `}`))
		require.NoError(rt, err)
		require.Equal(rt, document, string(msg.Payload))
		require.Equal(rt, document, string(msg.Metadata))

		event := json.RawMessage(`{"kind":"k","payload":` + document + `}`)
		for _, patch := range []replay.Patch{
			{MergePatch: json.RawMessage(`{"d":` + number + `}`)},
			{JSONPatch: json.RawMessage(`[{"op":"add","path":"/d","value":` + number + `}]`)},
		} {
			out, err := patch.Event(message.JobKind, event)
			require.NoError(rt, err)
			require.Equal(rt, `{"kind":"k","payload":{"a":[`+number+`],"b":{"c":`+number+`},"d":`+number+`}}`, string(out))
		}
	})
}
