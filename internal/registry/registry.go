// Package registry decodes and encodes values whose schema is in a schema registry: Avro, Protobuf and JSON Schema. It
// speaks the REST API of Confluent's Schema Registry, which Redpanda, Karapace and Apicurio have, too.
//
// Such a value begins with a zero byte and the id of its schema (4 bytes, big-endian):
// https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format
//
// Values and schemas are untrusted. Their sizes, depths and numbers are limited, and so is the time that a reader waits
// for a registry.
package registry

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/sr"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
)

const (
	// headerBytes is the length of the zero byte and the id.
	headerBytes = 5
	// The JSON of a value has at most jsonBytes and jsonGrowth times the size of the value, and maxJSONBytes in all: a few
	// bytes of a value can stand for long names and many items.
	jsonBytes    = 256 << 10
	jsonGrowth   = 64
	maxJSONBytes = 16 << 20
	// maxDepth limits the nesting of schemas and values.
	maxDepth = 100

	// maxSchemaBytes limits the text of a schema with all schemas that it refers to, and maxReferences their number.
	maxSchemaBytes = 1 << 20
	maxReferences  = 100
	// maxAnswerBytes limits an answer of a registry, in which the text of a schema is a JSON string with escapes.
	maxAnswerBytes = 4 << 20
	// cachedSchemas and cachedBytes limit the schemas in memory, by number and by the length of their texts.
	cachedSchemas = 1000
	cachedBytes   = 4 << 20

	// lookupTimeout limits the lookup of a schema with all schemas that it refers to.
	lookupTimeout = 5 * time.Second
	// lookupTime is the time that lookups may take at once, and lookupShare the share of the time, 1 in lookupShare,
	// that they may take in the long run. The last lookup may exceed the limit by lookupTimeout. So neither a registry
	// that does not answer nor a topic with many wrong ids stops a reader.
	lookupTime  = 5 * time.Second
	lookupShare = 10
	// unavailableFor is how long a schema is not looked up again after an error of the registry, and unknownFor after
	// the registry's answer that it has no such schema, or after a schema that cannot be used.
	unavailableFor = 30 * time.Second
	unknownFor     = 5 * time.Minute
	// maxErrorBytes limits the text of an error.
	maxErrorBytes = 200
)

// ErrUnavailable is wrapped by errors that a repeat may help: the registry does not answer, or refuses the login.
var ErrUnavailable = errors.New("the registry is not available")

// errSpent is the error of a lookup that is left out because lookups took too much time.
var errSpent = errors.New("lookups took too long; the schema is looked up again later")

// errTooLarge is the error of a value whose JSON would exceed maxJSON.
var errTooLarge = errors.New("the JSON of the value would be too large")

// maxJSON returns the limit of the JSON of a value with a size.
func maxJSON(size int) int { return min(jsonBytes+jsonGrowth*size, maxJSONBytes) }

// codec decodes and encodes the part of a value after its header.
type codec interface {
	// decode returns the value as JSON.
	decode(body []byte) (json.RawMessage, error)
	// encode returns the value of an edited document. body is the value before the edit.
	encode(body []byte, edited json.RawMessage) ([]byte, error)
}

// cached is the result of a lookup.
type cached struct {
	codec codec // nil after an error
	bytes int
	err   error
	until time.Time // when the error is forgotten
}

// Registry is the client of a schema registry. It caches schemas, which never change once they have an id.
type Registry struct {
	name   string
	client *sr.Client
	http   *http.Client
	turn   chan struct{} // holds an element during a lookup

	mu      sync.Mutex
	schemas map[uint32]*cached
	bytes   int           // of all schemas
	left    time.Duration // time that lookups may take; may be negative
	at      time.Time     // when left was computed
}

// New returns a client of a registry. It does not connect. secure, if not nil, configures TLS.
func New(of *policy.Registry, secure *tls.Config) (*Registry, error) {
	transport := &http.Transport{
		Proxy: http.ProxyFromEnvironment, TLSClientConfig: secure, TLSHandshakeTimeout: lookupTimeout,
		MaxIdleConns: 2, IdleConnTimeout: time.Minute, ForceAttemptHTTP2: true, MaxResponseHeaderBytes: 64 << 10,
	}
	r := &Registry{
		name: of.Name, turn: make(chan struct{}, 1), schemas: map[uint32]*cached{}, left: lookupTime, at: time.Now(),
		http: &http.Client{
			Transport: limited{transport}, Timeout: lookupTimeout,
			CheckRedirect: func(*http.Request, []*http.Request) error {
				return http.ErrUseLastResponse // a redirect would carry the password to another address
			},
		},
	}
	opts := []sr.ClientOpt{sr.URLs(of.URL), sr.HTTPClient(r.http), sr.UserAgent("dlqd")}
	switch {
	case of.Username != "":
		opts = append(opts, sr.BasicAuth(of.Username, string(of.Password)))
	case of.Password != "":
		opts = append(opts, sr.BearerToken(string(of.Password)))
	}
	var err error
	r.client, err = sr.NewClient(opts...)
	return r, err
}

// Close closes the connections.
func (r *Registry) Close() { r.http.CloseIdleConnections() }

// limited limits the answers that a transport returns.
type limited struct{ *http.Transport }

// RoundTrip implements [http.RoundTripper].
func (l limited) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := l.Transport.RoundTrip(request)
	if response != nil {
		response.Body = http.MaxBytesReader(nil, response.Body, maxAnswerBytes)
	}
	return response, err
}

// IDOf returns the id of a value's schema. It returns false if the value does not begin with a zero byte and an id.
func IDOf(value []byte) (id uint32, ok bool) {
	if len(value) < headerBytes || value[0] != 0 {
		return 0, false
	}
	return binary.BigEndian.Uint32(value[1:]), true
}

// Decode returns a value as JSON. The error says why the value is not decoded; it has no data of the value. For a value
// without the id of a schema, Decode returns nil.
func (r *Registry) Decode(ctx context.Context, value []byte) (json.RawMessage, error) {
	id, ok := IDOf(value)
	if !ok {
		return nil, nil
	}
	c, err := r.codec(ctx, id, false)
	var document json.RawMessage
	if err == nil {
		err = guard(func() (err error) {
			document, err = c.decode(value[headerBytes:])
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("schema %d: %w", id, err)
	}
	return document, nil
}

// Encode returns the value of an edited document, with the schema of the value before the edit.
func (r *Registry) Encode(ctx context.Context, value []byte, edited json.RawMessage) ([]byte, error) {
	id, ok := IDOf(value)
	if !ok {
		return nil, errors.New("the record's value has no id of a schema")
	}
	c, err := r.codec(ctx, id, true)
	var body []byte
	if err == nil {
		err = guard(func() (err error) {
			body, err = c.encode(value[headerBytes:], edited)
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("schema %d: %w", id, err)
	}
	return append(value[:headerBytes:headerBytes], body...), nil
}

// codec returns the codec of a schema. If patient is set, an earlier error and the time that lookups took do not count.
func (r *Registry) codec(ctx context.Context, id uint32, patient bool) (codec, error) {
	if known := r.known(id, patient); known != nil {
		return known.codec, known.err
	}
	select {
	case r.turn <- struct{}{}:
		defer func() { <-r.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if known := r.known(id, patient); known != nil { // another reader looked it up meanwhile
		return known.codec, known.err
	}
	if !r.mayLook() && !patient {
		return nil, fmt.Errorf("registry %s: %w: %w", r.name, ErrUnavailable, errSpent)
	}
	within, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	found := &cached{}
	began := time.Now()
	found.err = guard(func() error { return r.look(within, id, found) })
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	r.remember(id, found, time.Since(began))
	return found.codec, found.err
}

// known returns the result of an earlier lookup, or nil.
func (r *Registry) known(id uint32, patient bool) *cached {
	r.mu.Lock()
	defer r.mu.Unlock()
	known := r.schemas[id]
	if known == nil || known.err != nil && (patient || time.Now().After(known.until)) {
		return nil
	}
	return known
}

// mayLook reports whether lookups have time left.
func (r *Registry) mayLook() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	r.left = min(lookupTime, r.left+now.Sub(r.at)/lookupShare)
	r.at = now
	return r.left > 0
}

// remember caches the result of a lookup. It removes others, which are looked up again, if there are too many: errors
// first, or a topic with many wrong ids would remove the schemas that are used.
func (r *Registry) remember(id uint32, found *cached, took time.Duration) {
	if found.err != nil {
		wait := unknownFor
		if errors.Is(found.err, ErrUnavailable) {
			wait = unavailableFor
		}
		found.until = time.Now().Add(wait)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left -= took
	r.forget(id)
	for _, all := range []bool{false, true} {
		for other, known := range r.schemas {
			if len(r.schemas) < cachedSchemas && r.bytes+found.bytes <= cachedBytes {
				break
			}
			if all || known.err != nil {
				r.forget(other)
			}
		}
	}
	r.schemas[id] = found
	r.bytes += found.bytes
}

// forget removes a schema from the cache. The caller holds r.mu.
func (r *Registry) forget(id uint32) {
	if known := r.schemas[id]; known != nil {
		r.bytes -= known.bytes
		delete(r.schemas, id)
	}
}

// schemaText is the text of a schema, with the name by which others refer to it.
type schemaText struct{ name, text string }

// look looks a schema up.
func (r *Registry) look(ctx context.Context, id uint32, found *cached) error {
	main, err := r.client.SchemaByID(ctx, int(id))
	if err != nil {
		return r.failed(err)
	}
	texts := &texts{registry: r, seen: map[sr.SchemaReference]bool{}}
	if err := texts.add(ctx, schemaText{text: main.Schema}, main.References, 0); err != nil {
		return err
	}
	switch main.Type {
	case sr.TypeAvro:
		found.codec, err = newAvro(texts.all)
	case sr.TypeProtobuf:
		found.codec, err = newProtobuf(texts.all)
	case sr.TypeJSON:
		found.codec, err = &jsonSchema{texts: texts.all}, nil
	default:
		err = errors.New("the schema is neither Avro nor Protobuf nor JSON Schema")
	}
	if err != nil {
		found.codec = nil
		return fmt.Errorf("the schema cannot be used: %s", short(err))
	}
	found.bytes = texts.bytes
	return nil
}

// texts collects the texts of a schema and of all schemas that it refers to. A text comes after those it refers to,
// unless they form a cycle.
type texts struct {
	registry *Registry
	seen     map[sr.SchemaReference]bool
	all      []schemaText
	bytes    int
}

func (t *texts) add(ctx context.Context, one schemaText, references []sr.SchemaReference, depth int) error {
	if t.bytes += len(one.text); t.bytes > maxSchemaBytes {
		return fmt.Errorf("the schema has more than %d bytes", maxSchemaBytes)
	}
	for _, reference := range references {
		if t.seen[reference] {
			continue
		}
		if t.seen[reference] = true; len(t.seen) > maxReferences || depth == maxDepth {
			return fmt.Errorf("the schema refers to more than %d others", maxReferences)
		}
		other, err := t.registry.client.SchemaByVersion(ctx, reference.Subject, reference.Version)
		if err != nil {
			return t.registry.failed(err)
		}
		if err := t.add(ctx, schemaText{reference.Name, other.Schema.Schema}, other.References, depth+1); err != nil {
			return err
		}
	}
	t.all = append(t.all, one)
	return nil
}

// failed returns the error of a request. It has no text of the registry's answer, in which a hostile one could repeat
// the password.
func (r *Registry) failed(err error) error {
	if refused, ok := errors.AsType[*sr.ResponseError](err); ok {
		if refused.StatusCode == http.StatusNotFound {
			return fmt.Errorf("registry %s has no such schema (404)", r.name)
		}
		return fmt.Errorf("registry %s: %w: status %d", r.name, ErrUnavailable, refused.StatusCode)
	}
	if large, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return fmt.Errorf("registry %s: the answer has more than %d bytes", r.name, large.Limit)
	}
	if request, ok := errors.AsType[*url.Error](err); ok { // omit the URL, which is in the text
		return fmt.Errorf("registry %s: %w: %s", r.name, ErrUnavailable, short(request.Err))
	}
	return fmt.Errorf("registry %s: %w: the answer is not a schema", r.name, ErrUnavailable)
}

// guard calls f and returns a panic as an error: schemas come from outside.
func guard(f func() error) error {
	err := background.Guard(f)
	if panicked, ok := errors.AsType[*background.PanicError](err); ok {
		return fmt.Errorf("panicked: %.100v", panicked.Value)
	}
	return err
}

// short returns the beginning of an error's text.
func short(err error) string {
	text := strings.ToValidUTF8(err.Error(), "\uFFFD")
	if len(text) > maxErrorBytes {
		text = strings.ToValidUTF8(text[:maxErrorBytes], "") + "…"
	}
	return text
}
