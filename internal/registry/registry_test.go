package registry

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/sr"
	"github.com/twmb/franz-go/pkg/sr/srfake"

	"github.com/dlqd/dlqd/internal/policy"
)

func open(tb testing.TB, url string) *Registry {
	tb.Helper()
	r, err := New(&policy.Registry{Name: "main", URL: url}, nil)
	require.NoError(tb, err)
	tb.Cleanup(r.Close)
	return r
}

// framed returns a value with the id of its schema.
func framed(id uint32, body string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, id), body...)
}

// handler answers with one schema.
func handler(schema sr.Schema) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(schema) }
}

func serve(tb testing.TB, h http.Handler) *Registry {
	tb.Helper()
	server := httptest.NewServer(h)
	tb.Cleanup(server.Close)
	return open(tb, server.URL)
}

// srfake is franz-go's registry in memory.
func TestRegistry_DecodesByReferences(t *testing.T) {
	t.Parallel()
	fake := srfake.New()
	t.Cleanup(fake.Close)
	fake.SeedSchema("money-value", 1, 1, sr.Schema{
		Schema: `{"type":"record","name":"a.Money","fields":[{"name":"cents","type":"long"}]}`,
	})
	fake.SeedSchema("orders-value", 1, 2, sr.Schema{
		Schema:     `{"type":"record","name":"a.Order","fields":[{"name":"price","type":"a.Money"}]}`,
		References: []sr.SchemaReference{{Name: "a.Money", Subject: "money-value", Version: 1}},
	})
	fake.SeedSchema("money-proto", 1, 3, sr.Schema{Type: sr.TypeProtobuf, Schema: money})
	fake.SeedSchema("orders-proto", 1, 4, sr.Schema{
		Type: sr.TypeProtobuf, Schema: orderProto,
		References: []sr.SchemaReference{{Name: "shop/money.proto", Subject: "money-proto", Version: 1}},
	})
	fake.SeedSchema("orders-json", 1, 5, sr.Schema{Type: sr.TypeJSON, Schema: `{"type":"object"}`})
	r := open(t, fake.URL())
	for _, c := range []struct {
		value    []byte
		document string
	}{
		{framed(2, "\xc8\x01"), `{"price":{"cents":100}}`},
		{framed(4, "\x00"+orderBytes), orderJSON},
		{framed(5, " {\"a\": 1.50}\n"), `{"a": 1.50}`},
		{[]byte(`{"a":1}`), ""},
		{[]byte{0, 1}, ""},
		{nil, ""},
	} {
		document, err := r.Decode(t.Context(), c.value)
		require.NoError(t, err)
		require.Equal(t, c.document, string(document))
	}
	_, err := r.Decode(t.Context(), framed(9, ""))
	require.EqualError(t, err, "schema 9: registry main has no such schema (404)")
	_, err = r.Decode(t.Context(), framed(2, ""))
	require.EqualError(t, err, "schema 2: the value ends early")
}

func TestRegistry_EncodesEditsWithTheirSchema(t *testing.T) {
	t.Parallel()
	r := serve(t, http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		schema := sr.Schema{Schema: order}
		switch {
		case strings.HasSuffix(request.URL.Path, "/2"):
			schema = sr.Schema{Type: sr.TypeProtobuf, Schema: events}
		case strings.HasSuffix(request.URL.Path, "/3"):
			schema = sr.Schema{Type: sr.TypeJSON, Schema: `{"type":"object","properties":{"a":{"type":"integer"}}}`}
		case strings.HasSuffix(request.URL.Path, "/4"):
			schema = sr.Schema{Schema: `{"type":"record","name":"O","fields":[{"name":"id","type":"long"}]}`}
		}
		_ = json.NewEncoder(w).Encode(schema)
	}))
	for _, c := range []struct{ value, edited, encoded string }{
		{"0000000004" + "02", `{"id":9007199254740993}`, "0000000004" + "8280808080808020"},
		{"0000000002" + "040200" + "089601", `{"n": 151}`, "0000000002" + "040200" + "089701"},
		{
			"0000000003" + hex.EncodeToString([]byte(`{"a":1}`)), `{"a": 2}`,
			"0000000003" + hex.EncodeToString([]byte(`{"a": 2}`)),
		},
	} {
		value, err := hex.DecodeString(c.value)
		require.NoError(t, err)
		encoded, err := r.Encode(t.Context(), value, json.RawMessage(c.edited))
		require.NoError(t, err)
		require.Equal(t, c.encoded, hex.EncodeToString(encoded))
		require.Equal(t, c.value, hex.EncodeToString(value), "the value before the edit stays")
	}
	_, err := r.Encode(t.Context(), framed(4, "\x02"), json.RawMessage(`{"id":"x"}`))
	require.EqualError(t, err, "schema 4: payload.id is not a value of type long")
	_, err = r.Encode(t.Context(), framed(3, "{}"), json.RawMessage(`{"a":"secret"}`))
	require.EqualError(t, err, "schema 3: the payload does not match its schema: /a: type")
	_, err = r.Encode(t.Context(), []byte("x"), json.RawMessage(`{}`))
	require.ErrorContains(t, err, "no id of a schema")
}

func TestRegistry_AsksOnceForASchema(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	r := serve(t, http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if asked.Add(1); strings.HasSuffix(request.URL.Path, "/1") {
			handler(sr.Schema{Schema: `"long"`})(w, request)
			return
		}
		w.WriteHeader(http.StatusInternalServerError)
	}))
	for range 10 {
		document, err := r.Decode(t.Context(), framed(1, "\x02"))
		require.NoError(t, err)
		require.Equal(t, "1", string(document))
		_, err = r.Decode(t.Context(), framed(2, "\x02"))
		require.ErrorIs(t, err, ErrUnavailable)
		require.EqualError(t, err, "schema 2: registry main: the registry is not available: status 500")
	}
	require.EqualValues(t, 2, asked.Load())
	_, err := r.Encode(t.Context(), framed(2, "\x02"), json.RawMessage("2"))
	require.ErrorIs(t, err, ErrUnavailable)
	require.EqualValues(t, 3, asked.Load(), "an edit asks again")
}

// A topic with many wrong ids must not stop the reader, and neither must a registry that does not answer.
func TestRegistry_LimitsTheTimeOfLookups(t *testing.T) {
	t.Parallel()
	var asked atomic.Int32
	r := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		w.WriteHeader(http.StatusNotFound)
	}))
	_, err := r.Decode(t.Context(), framed(1, ""))
	require.ErrorContains(t, err, "404")
	r.mu.Lock()
	require.Less(t, r.left, lookupTime)
	r.left = -time.Hour
	r.mu.Unlock()
	for id := range uint32(100) {
		_, err = r.Decode(t.Context(), framed(id+2, ""))
		require.ErrorIs(t, err, errSpent)
	}
	require.EqualValues(t, 1, asked.Load())

	ctx, cancel := context.WithCancel(t.Context())
	silent := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, request *http.Request) {
		cancel()
		<-request.Context().Done()
	}))
	_, err = silent.Decode(ctx, framed(1, ""))
	require.ErrorIs(t, err, context.Canceled)
	require.Empty(t, silent.schemas, "the end of the reader says nothing about the registry")
}

// A writer of a topic may write any id.
func TestRegistry_KeepsSchemasAndForgetsWrongIDs(t *testing.T) {
	t.Parallel()
	r := &Registry{schemas: map[uint32]*cached{}}
	good := &cached{bytes: 1}
	r.remember(0, good, 0)
	for id := range uint32(20 * cachedSchemas) {
		r.remember(id+1, &cached{err: errSpent}, 0)
	}
	require.Same(t, good, r.known(0, false))
	require.LessOrEqual(t, len(r.schemas), cachedSchemas)
}

func TestRegistry_LimitsItsCache(t *testing.T) {
	t.Parallel()
	long := fmt.Sprintf(`{"type":"record","name":"r","doc":%q,"fields":[]}`, strings.Repeat("x", maxSchemaBytes-100))
	r := serve(t, http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		schema := sr.Schema{Schema: `"long"`}
		if strings.HasPrefix(request.URL.Path, "/schemas/ids/100") {
			schema.Schema = long
		}
		_ = json.NewEncoder(w).Encode(schema)
	}))
	for id := range uint32(cachedSchemas + 10) {
		r.mu.Lock()
		r.left = lookupTime
		r.mu.Unlock()
		_, err := r.Decode(t.Context(), framed(id, "\x02"))
		if id/10 != 100 && id != 100 {
			require.NoError(t, err)
		}
	}
	bytes := 0
	for _, known := range r.schemas {
		bytes += known.bytes
	}
	require.LessOrEqual(t, len(r.schemas), cachedSchemas)
	require.LessOrEqual(t, bytes, cachedBytes)
	require.Equal(t, bytes, r.bytes)
}

func TestRegistry_RefusesHostileAnswers(t *testing.T) {
	t.Parallel()
	many := make([]sr.SchemaReference, 200)
	for i := range many {
		many[i] = sr.SchemaReference{Name: fmt.Sprint(i), Subject: fmt.Sprint(i), Version: 1}
	}
	for says, h := range map[string]http.HandlerFunc{
		"the answer has more than 4194304 bytes": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(make([]byte, 5<<20))
		},
		"the schema has more than 1048576 bytes": handler(sr.Schema{Schema: strings.Repeat(" ", 2<<20) + `"int"`}),
		"refers to more than 100 others":         handler(sr.Schema{Schema: `"int"`, References: many}),
		"deeper than 100": handler(sr.Schema{
			Type: sr.TypeProtobuf, Schema: strings.Repeat("message A {", 101),
		}),
		"the answer is not a schema": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write([]byte("<html>"))
		},
		"status 302": http.RedirectHandler("http://127.0.0.1:1/", http.StatusFound).ServeHTTP,
		"status 401": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write([]byte(`{"error_code":401,"message":"hunter2 is wrong"}`))
		},
		"unexpected EOF": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = w.Write([]byte("{"))
		},
	} {
		_, err := serve(t, h).Decode(t.Context(), framed(1, "\x02"))
		if says == "unexpected EOF" {
			says = "the answer is not a schema"
		}
		require.ErrorContains(t, err, says)
		require.NotContains(t, err.Error(), "hunter2")
	}
	// Schemas that refer to each other: the second is looked up once.
	var asked atomic.Int32
	r := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Add(1)
		_ = json.NewEncoder(w).Encode(sr.Schema{
			Schema:     fmt.Sprintf(`{"type":"enum","name":"E%d","symbols":["A"]}`, asked.Load()),
			References: []sr.SchemaReference{{Name: "a", Subject: "a", Version: 1}},
		})
	}))
	document, err := r.Decode(t.Context(), framed(1, "\x00"))
	require.NoError(t, err)
	require.Equal(t, `"A"`, string(document))
	require.EqualValues(t, 2, asked.Load())
	// A registry that is away.
	_, err = open(t, "http://127.0.0.1:1").Decode(t.Context(), framed(1, ""))
	require.ErrorIs(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "connection refused")
}

func TestRegistry_LogsIn(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ user, password, want string }{
		{"kim", "hunter2", "Basic a2ltOmh1bnRlcjI="}, {"", "t0ken", "Bearer t0ken"}, {"", "", ""},
	} {
		fake := srfake.New(srfake.WithAuth(c.want))
		if c.want == "" {
			fake = srfake.New()
		}
		t.Cleanup(fake.Close)
		fake.SeedSchema("a", 1, 1, sr.Schema{Schema: `"long"`})
		r, err := New(&policy.Registry{
			Name: "main", URL: fake.URL(), Username: c.user, Password: policy.Secret(c.password),
		}, nil)
		require.NoError(t, err)
		t.Cleanup(r.Close)
		document, err := r.Decode(t.Context(), framed(1, "\x02"))
		require.NoError(t, err)
		require.Equal(t, "1", string(document))
	}
}
