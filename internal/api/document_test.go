package api_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
)

// Client generators make a field of a request required if the field has a default, and make each caller check an array
// that may be null. So the document has neither such defaults nor such arrays. Linters require that an operation
// without authentication is declared as such.
func TestOpenAPI_SuitsGenerators(t *testing.T) {
	t.Parallel()
	raw, err := api.OpenAPI()
	require.NoError(t, err)
	var document struct {
		Paths      map[string]map[string]map[string]any
		Components struct{ Schemas map[string]any }
	}
	require.NoError(t, json.Unmarshal(raw, &document))
	for path, operations := range document.Paths {
		for method, operation := range operations {
			security, ok := operation["security"].([]any)
			require.True(t, ok, "%s %s says which authentication it needs", method, path)
			public := path == "/livez" || path == "/readyz" || path == "/api/login"
			require.Equal(t, public, len(security) == 0, "%s %s", method, path)
		}
	}
	var walk func(schema any, at string)
	walk = func(schema any, at string) {
		fields, ok := schema.(map[string]any)
		if !ok {
			return
		}
		if !strings.HasPrefix(at, "ErrorModel") { // RFC 9457 defines a default for type
			require.NotContains(t, fields, "default", at)
		}
		require.NotEqual(t, "[array null]", fmt.Sprint(fields["type"]), at)
		walk(fields["items"], at+"[]")
		walk(fields["additionalProperties"], at+"{}")
		properties, _ := fields["properties"].(map[string]any)
		for name, property := range properties {
			walk(property, at+"."+name)
		}
	}
	for name, schema := range document.Components.Schemas {
		walk(schema, name)
	}
}
