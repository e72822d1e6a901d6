package api_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/metrics"
)

// console has pages that panic.
type console struct{}

func (console) Changed(string) {}

func (console) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/begun":
		_, _ = io.WriteString(w, "half of ")
		_ = http.NewResponseController(w).Flush()
		panic("a page")
	case "/aborted":
		panic(http.ErrAbortHandler)
	}
	panic("a page")
}

func (console) SignInFailed(http.ResponseWriter, *http.Request, int, string) {}
func (console) Unavailable(http.ResponseWriter, *http.Request, int, string)  {}

var panics = regexp.MustCompile(`(?m)^dlqd_panics_total (\d+)$`)

func TestPanic_AnswersProblemAndIsCounted(t *testing.T) { //nolint:paralleltest // the count is the process's
	var log strings.Builder
	server := httptest.NewServer(api.New(api.Config{
		Metrics: metrics.New(), Logger: slog.New(slog.NewTextHandler(&log, nil)),
		Health:  func(context.Context) []api.Part { panic("a part") },
		Console: func(http.Handler, http.Handler) api.Console { return console{} },
	}))
	defer server.Close()
	count := func() int {
		response, err := http.Get(server.URL + "/metrics")
		require.NoError(t, err)
		defer func() { _ = response.Body.Close() }()
		raw, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		found := panics.FindSubmatch(raw)
		require.NotNil(t, found, "the metric exists before the first panic")
		n, err := strconv.Atoi(string(found[1]))
		require.NoError(t, err)
		return n
	}
	before := count()
	for i, path := range []string{"/api/health", "/page"} {
		response, err := http.Get(server.URL + path)
		require.NoError(t, err, path)
		var problem map[string]any
		require.NoError(t, json.NewDecoder(response.Body).Decode(&problem), path)
		require.NoError(t, response.Body.Close())
		require.Equal(t, "application/problem+json", response.Header.Get("Content-Type"), path)
		require.Equal(t, http.StatusInternalServerError, response.StatusCode, path)
		require.InDelta(t, http.StatusInternalServerError, problem["status"], 0)
		require.NotContains(t, problem["detail"], "a pa", "the panic's text is only in the log")
		require.Equal(t, before+i+1, count(), path)
	}
	require.Contains(t, log.String(), `error="a part"`)
	require.Contains(t, log.String(), "panics_test.go", "with its stack")

	// If part of the response was sent, the client must see that the response is incomplete.
	response, err := http.Get(server.URL + "/begun")
	if err == nil {
		_, err = io.ReadAll(response.Body)
		_ = response.Body.Close()
	}
	require.Error(t, err)
	require.Equal(t, before+3, count())
	_, err = http.Get(server.URL + "/aborted")
	require.Error(t, err)
	require.Equal(t, before+3, count(), "an aborted handler does not count as a panic")
	raw, err := api.OpenAPI()
	require.NoError(t, err)
	require.NotEmpty(t, raw)
}

// A body with required fields is itself required.
func TestOpenAPI_RequiresBodiesWithRequiredFields(t *testing.T) {
	t.Parallel()
	raw, err := api.OpenAPI()
	require.NoError(t, err)
	var document struct {
		Paths map[string]map[string]struct {
			RequestBody *struct {
				Required bool
				Content  map[string]struct {
					Schema struct {
						Ref string `json:"$ref"`
					}
				}
			}
		}
		Components struct {
			Schemas map[string]struct{ Required []string }
		}
	}
	require.NoError(t, json.Unmarshal(raw, &document))
	bodies := 0
	for path, operations := range document.Paths {
		for method, operation := range operations {
			if operation.RequestBody == nil {
				continue
			}
			for _, content := range operation.RequestBody.Content {
				schema, ok := document.Components.Schemas[strings.TrimPrefix(content.Schema.Ref, "#/components/schemas/")]
				require.True(t, ok, path)
				if len(schema.Required) > 0 {
					bodies++
					require.True(t, operation.RequestBody.Required, "%s %s needs %v", method, path, schema.Required)
				}
			}
		}
	}
	require.Greater(t, bodies, 5)
}
