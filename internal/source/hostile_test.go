package source_test

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/source"
)

func TestAppend_TakesAnyTime(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for i, at := range []time.Time{
		time.UnixMilli(-1), time.UnixMilli(math.MaxInt64), time.UnixMilli(math.MinInt64), time.UnixMilli(0),
		{},
		time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(0, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2200, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			b.at.Partition = int32(2 * i)
			batch := b.batch(0, 1, 0)
			batch.Start, batch.Records[0].Time = true, at
			_, err := b.store.Append(t.Context(), batch)
			require.NoError(t, err)
			b.at.Partition++
			batch = b.batch(0, 1, 0)
			batch.Start, batch.Records[0].Failure.At = true, at
			batch.Records[0].Failure.Attempts = []source.Attempt{{At: at, Error: "x"}}
			_, err = b.store.Append(t.Context(), batch)
			require.NoError(t, err)
		})
	}
}

func TestAppend_KeepsTheTextsBesideARefusedRecord(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
		$$BEGIN IF NEW.error_message = 'bad' THEN RAISE EXCEPTION 'no'; END IF; RETURN NEW; END$$`)
	b.exec(`CREATE TRIGGER refuse BEFORE INSERT ON dlq.dead_letter_inbox FOR EACH ROW EXECUTE FUNCTION refuse()`)
	batch := b.batch(0, 6, 0, 1, 2, 3, 4)
	batch.Start, batch.Records[2].Failure.Error.Message = true, "bad"
	stored, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	require.Equal(t, source.Stored{Next: 6, Entries: 5}, stored)
	require.Equal(t, "broken,broken,the database cannot hold the texts of this record,broken,broken", b.one(
		`SELECT string_agg(error_message, ',' ORDER BY (record)."offset") FROM dlq.dead_letter_queue`))
	require.Equal(t, "1", b.one("SELECT holes::text FROM dlq.source_positions"))
}

func TestAppend_TakesHugeTexts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	huge := strings.Repeat("x\u00e9'\"\\", 300_000)
	batch := b.batch(0, 1, 0)
	r := &batch.Records[0]
	batch.Start, batch.Topic = true, strings.Repeat("t", 249)
	r.Key = []byte(huge)
	r.Failure = source.Failure{
		Kind: huge, Group: huge, Node: huge, Trace: huge,
		Original: source.Origin{Topic: huge, Partition: math.MaxInt32, Offset: math.MaxInt64},
	}
	r.Failure.Error.Type, r.Failure.Error.Code, r.Failure.Error.Title, r.Failure.Error.Message = huge, huge, huge, huge
	for range 200 {
		r.Headers = append(r.Headers, source.Header{Key: huge[:1000], Value: []byte(huge[:10000])})
	}
	_, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
}
