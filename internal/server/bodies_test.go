package server_test

import (
	"encoding/json"
	"io"
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
)

// Every operation answers an empty body, null and a body of the wrong type without a 500.
func TestAPI_EmptyAndWrongBodiesCauseNoServerError(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusNotFound)})
	b.submit("m1")
	entry := b.parked("m1")
	raw, err := api.OpenAPI()
	require.NoError(t, err)
	var document struct {
		Paths map[string]map[string]json.RawMessage
	}
	require.NoError(t, json.Unmarshal(raw, &document))
	parameter := regexp.MustCompile(`\{[^}]*\}`)
	operations := 0
	for path, methods := range document.Paths {
		for method, operation := range methods {
			if method == "get" || method == "parameters" {
				continue
			}
			operations++
			url := b.base + parameter.ReplaceAllStringFunc(path, func(name string) string {
				if name == "{id}" {
					return entry
				}
				return "default"
			})
			for _, body := range []string{"", "null", "{}", "[]"} {
				request, err := http.NewRequestWithContext(t.Context(), strings.ToUpper(method), url, strings.NewReader(body))
				require.NoError(t, err)
				request.Header.Set("Content-Type", "application/json")
				response, err := http.DefaultClient.Do(request)
				require.NoError(t, err, "%s %s %q: %s", method, path, body, operation)
				answer, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				require.NotEqual(t, http.StatusInternalServerError, response.StatusCode, "%s %s %q: %s", method, path, body, answer)
			}
		}
	}
	require.Greater(t, operations, 30)
}
