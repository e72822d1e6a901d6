package kafka

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/sr"
	"github.com/twmb/franz-go/pkg/sr/srfake"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

// withRegistry gives the source of a bundle a registry.
func (b *bundle) withRegistry(url string) *bundle {
	b.policy.Sources.Registries = map[string]*policy.Registry{"main": {Name: "main", URL: url}}
	b.source.Registry = "main"
	return b
}

// framed returns a value with the id of its schema.
func framed(id uint32, body string) []byte {
	return append(binary.BigEndian.AppendUint32([]byte{0}, id), body...)
}

func valuesOf(values ...[]byte) (records []*kgo.Record) {
	for _, value := range values {
		records = append(records, &kgo.Record{Topic: "dlq.a", Value: value})
	}
	return records
}

func seeded(t *testing.T) *srfake.Registry {
	t.Helper()
	fake := srfake.New()
	t.Cleanup(fake.Close)
	fake.SeedSchema("a", 1, 1, sr.Schema{
		Schema: `{"type":"record","name":"O","fields":[{"name":"id","type":"long"},{"name":"error","type":"string"}]}`,
	})
	fake.SeedSchema("b", 1, 2, sr.Schema{
		Schema: `{"type":"array","items":{"type":"enum","name":"E","symbols":["` + strings.Repeat("x", 40) + `"]}}`,
	})
	return fake
}

func TestReader_DecodesValuesOfARegistry(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "dlq.a")).withRegistry(seeded(t).URL())
	b.source.Envelope = policy.EnvelopeJSON
	b.source.ErrorPaths.Message = []string{"error"}
	values := [][]byte{framed(1, "\x02\x06bad"), framed(7, "x"), framed(1, ""), []byte(`{"error":"plain"}`)}
	produce(t, b.producer(t), valuesOf(values...)...)
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == len(values) }, "records")
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	for _, records := range b.ledger.records {
		for i, record := range records {
			require.Equal(t, values[i], record.Value)
		}
		require.JSONEq(t, `{"id":1,"error":"bad"}`, string(records[0].Payload))
		require.Equal(t, "bad", records[0].Failure.Error.Message, "the envelope is in the decoded value")
		require.Equal(t, "schema 7: registry main has no such schema (404)", records[1].NotDecoded)
		require.Equal(t, "schema 1: the value ends early", records[2].NotDecoded)
		require.Nil(t, records[2].Payload)
		require.Nil(t, records[3].Payload)
		require.Empty(t, records[3].NotDecoded)
		require.Equal(t, "plain", records[3].Failure.Error.Message)
	}
}

// Of a registry that does not answer, one lookup ends by its time limit; the other records do not wait.
func TestReader_GoesOnWithoutItsRegistry(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(context.Background())
	silent := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { <-ctx.Done() }))
	t.Cleanup(func() { cancel(); silent.Close() })
	b := setup(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "dlq.a")).withRegistry(silent.URL)
	var values [][]byte
	for id := range uint32(1000) {
		values = append(values, framed(id, "x"))
	}
	produce(t, b.producer(t), valuesOf(values...)...)
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == len(values) }, "records")
	b.ledger.mu.Lock()
	defer b.ledger.mu.Unlock()
	for _, records := range b.ledger.records {
		for i, record := range records {
			require.Equal(t, values[i], record.Value)
			require.Contains(t, record.NotDecoded, "registry main: the registry is not available")
		}
	}
}

// A few bytes can be decoded to a large document, so a batch may have to be stored in parts.
func TestReader_LimitsDecodedBatches(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.NumBrokers(1), kfake.SeedTopics(1, "dlq.a")).withRegistry(seeded(t).URL())
	large := framed(2, string(append(binary.AppendVarint(nil, 120_000), make([]byte, 120_001)...)))
	var mu sync.Mutex
	var batches []int
	b.ledger.before = func(_ context.Context, batch source.Batch) error {
		mu.Lock()
		defer mu.Unlock()
		if len(batch.Records) > 0 {
			batches = append(batches, len(batch.Records))
		}
		return nil
	}
	produce(t, b.producer(t), valuesOf(large, large, []byte("x"), large, []byte("y"))...)
	b.read(t)
	eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 5 }, "records")
	require.Equal(t, []int64{0, 1, 2, 3, 4}, b.ledger.offsets("dlq.a", 0))
	mu.Lock()
	defer mu.Unlock()
	require.Equal(t, []int{1, 1, 2, 1}, batches)
}

func TestBroker_EncodesEdits(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.NumBrokers(1)).withRegistry(seeded(t).URL())
	encode := func(value []byte, edited string) ([]byte, *riverdlq.Error) {
		encoded, err := b.broker(t).Encode(t.Context(), "orders", value, json.RawMessage(edited))
		var failure *riverdlq.Error
		if err != nil {
			require.ErrorAs(t, err, &failure)
		}
		return encoded, failure
	}
	encoded, failure := encode(framed(1, "\x02\x06bad"), `{"id":9007199254740993,"error":""}`)
	require.Nil(t, failure)
	require.Equal(t, framed(1, "\x82\x80\x80\x80\x80\x80\x80\x20\x00"), encoded)
	_, failure = encode(framed(1, "\x02\x06bad"), `{"id":1}`)
	require.Equal(t, "encoding the edited payload: schema 1: payload.error is missing", failure.Message)
	require.Equal(t, riverdlq.ClassValidation, failure.Class)
	require.ErrorIs(t, failure, source.ErrUnpublishable)

	b.withRegistry("http://127.0.0.1:1")
	_, failure = encode(framed(1, "\x02\x06bad"), `{"id":1,"error":""}`)
	require.Equal(t, riverdlq.ClassOutage, failure.Class)
	require.NotErrorIs(t, failure, source.ErrUnpublishable)

	of := protobufSource(t)
	b.source.Envelope, b.source.Descriptor, b.source.MessageType = of.Envelope, of.Descriptor, of.MessageType
	stream := protowire.AppendBytes(protowire.AppendTag(nil, 1, protowire.BytesType), []byte{0, 0xff})
	encoded, failure = encode(stream, `{"stream":"AQ=="}`)
	require.Nil(t, failure)
	require.Equal(t, "\x0a\x01\x01", string(encoded))
	_, failure = encode(stream, `{"nonsense":1}`)
	require.Equal(t, riverdlq.ClassValidation, failure.Class)
}
