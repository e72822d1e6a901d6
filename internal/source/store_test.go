package source_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

type bundle struct {
	*testing.T

	pool  *pgxpool.Pool
	store *source.Store
	at    source.Partition
}

func setup(t *testing.T) *bundle {
	t.Helper()
	p := policytest.Load(t, policytest.Files{"sources": `
clusters: {main: {brokers: [127.0.0.1:9]}}
sources: {orders: {cluster: main, topics: [dlt], maxRecordBytes: 2000}}
`})
	pool := postgrestest.Pool(t)
	return &bundle{
		T: t, pool: pool, at: source.Partition{Cluster: "main", Topic: "dlt", TopicID: uuid.New(), Partition: 1},
		store: &source.Store{
			DB: postgres.DefaultSchemas().Rendered(pool), Policy: func() *policy.Policy { return p },
			Logger: slog.New(slog.DiscardHandler),
		},
	}
}

func (b *bundle) one(sql string, args ...any) string {
	b.Helper()
	var got string
	require.NoError(b, b.pool.QueryRow(b.Context(), sql, args...).Scan(&got))
	return got
}

func (b *bundle) exec(sql string, args ...any) {
	b.Helper()
	_, err := b.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

func (b *bundle) batch(first, next int64, offsets ...int64) source.Batch {
	batch := source.Batch{Partition: b.at, Source: "orders", First: first, Next: next}
	for _, offset := range offsets {
		batch.Records = append(batch.Records, source.Record{
			Offset: offset, Time: time.Now(), Key: []byte("k"), Value: []byte(`{"a": 1}`),
			Failure: source.Failure{Error: riverdlq.Error{Type: "T", Message: "broken"}},
		})
	}
	return batch
}

// Four readers read the same partition at once. Their batches are random, some of their writes are cancelled, and
// some start again. Each record of the partition becomes one entry.
func TestAppend_StoresEachRecordOnce(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const end = 400
	var records []int64 // offsets that are not in this list are holes
	for offset := range int64(end) {
		if rand.IntN(10) > 0 {
			records = append(records, offset)
		}
	}
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			next, known := int64(0), false
			for next < end && t.Context().Err() == nil {
				until := min(next+1+rand.Int64N(40), end)
				batch := b.batch(next, until)
				for _, offset := range records {
					if offset >= next && offset < until {
						batch.Records = append(batch.Records, b.batch(next, until, offset).Records...)
					}
				}
				batch.Start = !known && next == 0
				ctx, cancel := context.WithCancel(t.Context())
				if rand.IntN(3) == 0 {
					time.AfterFunc(time.Duration(rand.IntN(5000))*time.Microsecond, cancel)
				}
				stored, err := b.store.Append(ctx, batch)
				cancel()
				var position *source.PositionError
				switch {
				case err == nil:
					next, known = stored.Next, true
				case errors.As(err, &position) && position.Known:
					next, known = position.Next, true
				default: // the batch may or may not be stored: the reader sends it again, or asks for the position
					if rand.IntN(2) == 0 {
						if at, ok, err := b.store.Position(t.Context(), b.at); err == nil && ok {
							next = at
						}
					}
				}
			}
		})
	}
	readers.Wait()
	require.Equal(t, "400", b.one("SELECT next_offset::text FROM dlq.source_positions"))
	require.Equal(t, len(records), end-atoi(t, b.one("SELECT holes::text FROM dlq.source_positions")))
	require.Equal(t, len(records), atoi(t, b.one("SELECT count(*)::text FROM dlq.dead_letter_queue")))
	require.Equal(t, len(records), atoi(t, b.one(`SELECT count(DISTINCT (record)."offset")::text FROM dlq.dead_letter_queue`)))
}

func atoi(t *testing.T, text string) (n int) {
	t.Helper()
	for _, c := range text {
		n = 10*n + int(c-'0')
	}
	return n
}

func TestAppend_StoresNothingIfThePositionIsGone(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var position *source.PositionError
	_, err := b.store.Append(t.Context(), b.batch(5, 6, 5))
	require.ErrorAs(t, err, &position)
	require.False(t, position.Known)

	batch := b.batch(5, 6, 5)
	batch.Start = true
	stored, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	require.Equal(t, source.Stored{Next: 6, Entries: 1}, stored)

	_, err = b.store.Append(t.Context(), b.batch(7, 8, 7))
	require.ErrorAs(t, err, &position)
	require.True(t, position.Known)
	require.EqualValues(t, 6, position.Next)
	batch = b.batch(7, 8, 7)
	batch.Start = true // a batch of a reader that began elsewhere
	_, err = b.store.Append(t.Context(), batch)
	require.ErrorAs(t, err, &position)

	b.exec("DELETE FROM dlq.source_positions") // as after a restore of an older state
	_, err = b.store.Append(t.Context(), b.batch(6, 7, 6))
	require.ErrorAs(t, err, &position)
	require.False(t, position.Known)
	require.Equal(t, "1", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"))
}

func TestPosition_OutlivesEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	batch := b.batch(0, 3, 0, 2)
	batch.Start = true
	_, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	b.exec("SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_queue")
	b.exec("SELECT dlq.delete_entries(array_agg(id)) FROM dlq.dead_letter_queue")
	require.Equal(t, "0", b.one("SELECT count(*)::text FROM dlq.dead_letter_queue"))

	stored, err := b.store.Append(t.Context(), b.batch(0, 4, 0, 2, 3)) // the group's offsets were lost
	require.NoError(t, err)
	require.Equal(t, source.Stored{Next: 4, Entries: 1, Skipped: 2}, stored)

	b.at.TopicID = uuid.New() // the topic is created again: the same name and offsets, other records
	batch = b.batch(0, 1, 0)
	batch.Start = true
	stored, err = b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	require.Equal(t, 1, stored.Entries)
}

func TestAppend_RecordsLostOffsets(t *testing.T) {
	t.Parallel()
	b := setup(t)
	batch := b.batch(0, 1, 0)
	batch.Start = true
	_, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	batch = b.batch(1, 100)
	batch.Lost = true
	_, err = b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	require.Equal(t, "100 0 99", b.one("SELECT next_offset || ' ' || holes || ' ' || lost FROM dlq.source_positions"))
	require.Equal(t, "1 100", b.one(
		"SELECT (detail ->> 'first') || ' ' || (detail ->> 'next') FROM dlq.acts WHERE act = 'offsets lost'"))
}

func TestAppend_KeepsBytesOfAnyRecord(t *testing.T) {
	t.Parallel()
	b := setup(t)
	secret := "pat@example.org"
	values := [][]byte{
		[]byte(`{"a": 1,  "b": 1e2}`), []byte("plain"), nil,
		{},
		{0xff, 0, 1},
		[]byte("\x00" + secret),
		[]byte(`{"a": "\u0000", "email": "` + secret + `"}`), []byte(`{"email": "` + secret + `", "email": 1}`),
		bytes.Repeat([]byte("x"), 2001), []byte(`12345678901234567890123`),
	}
	forms := []string{"json", "text", "null", "text", "binary", "binary", "binary", "binary", "absent", "json"}
	batch := b.batch(0, int64(len(values)))
	batch.Start = true
	for i, value := range values {
		batch.Records = append(batch.Records, source.Record{
			Offset: int64(i), Time: time.Now(), Key: value, Value: value,
			Headers: []source.Header{{Key: "a", Value: []byte{byte(i)}}, {Key: "a"}, {Key: "\xff\x00", Value: []byte{}}},
			Failure: source.Failure{
				Error: riverdlq.Error{Type: "T\x00", Message: "m\xff\x00", Context: map[string]any{"a": "\x00"}}, Trace: "t\x00",
				Original: source.Origin{Topic: "o\x00", Partition: source.Unknown, Offset: 7}, Attempts: []source.Attempt{{Error: "\x00"}},
			},
		})
	}
	_, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	for i, value := range values {
		var key, got []byte
		var keys, headers [][]byte
		var form, event string
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT (record).form, (record).key, (record).value,
			(record).header_keys, (record).header_values, original_event::text FROM dlq.dead_letter_queue
			WHERE (record)."offset" = $1`, i).Scan(&form, &key, &got, &keys, &headers, &event))
		require.Equal(t, forms[i], form)
		require.Equal(t, value, key)
		if form != "absent" {
			require.Equal(t, value, got)
		} else {
			require.Nil(t, got)
			require.Contains(t, event, `"bytes": 2001`)
		}
		require.Equal(t, [][]byte{[]byte("a"), []byte("a"), []byte("\xff\x00")}, keys)
		require.Equal(t, [][]byte{{byte(i)}, nil, {}}, headers)
		require.NotContains(t, event, secret, "masks find nothing in bytes, so bytes are not shown")
	}
}

func TestAppendRecords_StoresBatchesOfOlderProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	record := `{"offset": 7, "at": "2026-11-20T10:00:00Z", "failed_at": "2026-11-20T10:00:01Z", "delivery_id": null,
		"message_id": "dlt/1/7", "kind": "orders", "ordering_key": "k", "event": {"payload": 1}, "error": "broken",
		"errors": [{"attempt": 1, "error": "broken"}], "attempts": 1, "metadata": {"a": 1}, "consumer_group": "g",
		"node": null, "original_topic": "o", "original_topic_id": null, "original_partition": 3,
		"original_offset": null, "form": "json", "size": 1, "sha256": "ff", "content": "fe",
		"headers": [["YQ==", "Yg=="], ["YQ==", null]]}`
	require.Equal(t, "(t,8,1,0,0)", b.one(`SELECT dlq.append_records('orders', 'q', 'main', 'dlt', $1, 1, 7, 8, true, false,
		false, ARRAY[$2]::jsonb[], '{k}', '{"1"}')::text`, b.at.TopicID, record))
	require.Equal(t, `q dlt/1/7 orders k broken {"payload": 1} [{"error": "broken", "attempt": 1}] {"a": 1} `+
		`2026-11-20 10:00:01+00 (main,dlt,`+b.at.TopicID.String()+`,1,7,"2026-11-20 10:00:00+00",g,,o,3,,json,1,`+
		`"\\xff","\\x6b","\\x31","{""\\\\x61"",""\\\\x61""}","{""\\\\x62"",NULL}")`,
		b.one(`SELECT concat_ws(' ', queue, event_id, kind, ordering_key, error_message, original_event, retry_history,
			metadata, last_failed_at, record) FROM dlq.dead_letter_inbox`))
	require.Equal(t, "(t,9,0,0,0)", b.one(`SELECT dlq.append_records('orders', 'q', 'main', 'dlt', $1, 1, 8, 9, false, true,
		false, '{}', '{}', '{}')::text`, b.at.TopicID))
}
