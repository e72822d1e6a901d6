package registry

import (
	"encoding/json"
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
