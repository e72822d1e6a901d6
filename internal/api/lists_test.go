package api_test

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/metrics"
)

// In every operation, a parameter that takes one value is refused if the request repeats it. The error has the
// parameter's name.
func TestParameters_RefuseASecondValue(t *testing.T) {
	t.Parallel()
	handler := api.New(api.Config{Metrics: metrics.New(), Logger: slog.New(slog.DiscardHandler)})
	raw, err := api.OpenAPI()
	require.NoError(t, err)
	var document struct {
		Paths map[string]map[string]struct {
			Parameters []struct {
				Name, In string
				Schema   struct{ Type any }
			}
		}
	}
	require.NoError(t, json.Unmarshal(raw, &document))
	single := 0
	for path, operations := range document.Paths {
		for method, operation := range operations {
			for _, p := range operation.Parameters {
				if kind, ok := p.Schema.Type.(string); p.In != "query" || !ok || kind == "array" {
					continue
				}
				single++
				address := strings.NewReplacer("{", "", "}", "").Replace(path) + "?" + p.Name + "=1&" + p.Name + "=1"
				request := httptest.NewRequestWithContext(t.Context(), strings.ToUpper(method), "http://localhost"+address, http.NoBody)
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, request)
				require.Equal(t, http.StatusUnprocessableEntity, w.Code, address)
				require.Contains(t, w.Body.String(), `"location":"query.`+p.Name+`"`, address)
				require.Contains(t, w.Body.String(), "given 2 times", address)
			}
		}
	}
	require.Greater(t, single, 40)
}
