package registry

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestJSONSchema_ChecksEdits(t *testing.T) {
	t.Parallel()
	of := func(texts ...string) *jsonSchema {
		s := &jsonSchema{}
		for _, text := range texts {
			s.texts = append(s.texts, schemaText{name: "money.json", text: text})
		}
		return s
	}
	money := `{"type":"object","required":["cents"],"properties":{"cents":{"type":"integer"}}}`
	byReference := of(money, `{"properties":{"price":{"$ref":"money.json"},"next":{"$ref":"#"}}}`)
	for _, c := range []struct {
		schema         *jsonSchema
		document, says string
	}{
		{of(money), `{"cents":9007199254740993}`, ""},
		{of(money), `{}`, "/: required"},
		{of(money), `{"cents":1.5}`, "/cents: type"},
		{of("true"), `1`, ""},
		{of("false"), `1`, "does not match"},
		{byReference, `{"price":{"cents":1},"next":{"price":{"cents":2}}}`, ""},
		{byReference, `{"next":{"price":{"cents":"x"}}}`, "/next/price/cents: type"},
		{of(`{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#"}}}`), `1`, "schema"}, // a cycle
		{of(`{"$ref":"file:///etc/passwd"}`), `1`, "the registry has no reference to it"},
		{of(`{"$ref":"http://127.0.0.1:1/"}`), `1`, "the registry has no reference to it"},
		{of(`{"pattern":"(x{1000}){1000}"}`), `"x"`, "cannot be used"},
		{of(`{`), `1`, "cannot be used"},
		{of(`{"type":7}`), `1`, "cannot be used"},
	} {
		encoded, err := c.schema.encode(nil, json.RawMessage(c.document))
		if c.says == "" {
			require.NoError(t, err)
			require.Equal(t, c.document, string(encoded))
			continue
		}
		require.ErrorContains(t, err, c.says)
	}
	_, err := of(money).decode([]byte("{"))
	require.EqualError(t, err, "the value is not JSON")
}

// Who can write to the registry chooses the schema. It must not stop the process that publishes an edit.
func TestJSONSchema_LimitsHostileSchemas(t *testing.T) {
	t.Parallel()
	doubled := func(leaf, draft string) string {
		var defs strings.Builder
		for i := range 60 {
			fmt.Fprintf(&defs, `"a%d":{"anyOf":[{"$ref":"#/$defs/a%d"},{"$ref":"#/$defs/a%d"}]},`, i, i+1, i+1)
		}
		return `{"$schema":"` + draft + `","$ref":"#/$defs/a0","$defs":{` + defs.String() + `"a60":` + leaf + `}}`
	}
	const draft7, draft2020 = "http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"
	deep := strings.Repeat(`[`, 60) + strings.Repeat(`]`, 60)
	for _, c := range []struct{ schema, document, says string }{
		{doubled(`{"type":"object"}`, draft7), `1`, "takes too long"},
		{doubled(`{"type":"object"}`, draft2020), `1`, "takes too long"},
		{doubled(`false`, draft2020), `1`, "takes too long"},
		{`{"allOf":[{"items":{"$ref":"#"}},{"items":{"$ref":"#"}}]}`, deep, "takes too long"},
		{`{"minimum":1e999999}`, `1`, "a number is too long"},
		{`{"maximum":-1.7976931348623157e+308,"multipleOf":5e-324}`, `1`, "/: maximum"},
		{`{"examples":[` + strings.Repeat("{},", maxObjects) + `{}]}`, `1`, "objects and arrays"},
		{`{"$dynamicRef":"#a","$defs":{"a":{"$dynamicAnchor":"a"}}}`, `1`, "is not fixed"},
	} {
		_, err := (&jsonSchema{texts: []schemaText{{text: c.schema}}}).encode(nil, json.RawMessage(c.document))
		require.ErrorContains(t, err, c.says)
	}
}
