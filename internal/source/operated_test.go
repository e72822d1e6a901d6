package source_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/source"
)

// at0 returns a batch whose records have the same times on each call, as records of a topic do.
func (b *bundle) at0(first, next int64, offsets ...int64) source.Batch {
	batch := b.batch(first, next, offsets...)
	for i := range batch.Records {
		batch.Records[i].Time = time.UnixMilli(1_700_000_000_000 + batch.Records[i].Offset)
	}
	return batch
}

func TestRewind_DoublesNoEntry(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, b.store.Publish(t.Context()))
	batch := b.at0(10, 20, 10, 11, 13, 19)
	batch.Start = true
	_, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	ledger := `SELECT next_offset || ' ' || records || ' ' || holes || ' ' || lost FROM dlq.source_positions`
	require.Equal(t, "20 4 6 0", b.one(ledger))
	// One entry is deleted by retention.
	b.exec(`SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_queue WHERE (record)."offset" = 11`)
	b.exec(`SELECT dlq.delete_entries(array_agg(id)) FROM dlq.dead_letter_queue WHERE (record)."offset" = 11`)

	rewound, err := b.store.Rewind(t.Context(), "orders", "dlt", 1, 11, false, "kim", "again")
	require.NoError(t, err)
	require.Equal(t, &source.Rewound{Before: 20, Next: 11}, rewound)
	var moved *source.PositionError
	_, err = b.store.Append(t.Context(), b.at0(20, 21, 20)) // a batch of a reader that does not know the new position yet
	require.ErrorAs(t, err, &moved)
	require.EqualValues(t, 11, moved.Next)

	stored, err := b.store.Append(t.Context(), b.at0(11, 22, 11, 13, 19, 20))
	require.NoError(t, err)
	require.Equal(t, source.Stored{Next: 22, Entries: 2, Skipped: 2}, stored)
	require.Equal(t, "10,11,13,19,20", b.one(
		`SELECT string_agg((record)."offset"::text, ',' ORDER BY (record)."offset") FROM dlq.dead_letter_queue`))
	require.Equal(t, "22 6 7 0", b.one(ledger), "two records and a hole more")

	// The cluster lost its last records, and other records have their offsets now.
	_, err = b.store.Rewind(t.Context(), "orders", "dlt", 1, 19, false, "kim", "")
	require.NoError(t, err)
	other := b.at0(19, 21, 19, 20)
	other.Records[0].Time = time.Now()
	other.Records[1].Value = []byte(`{"b": 2}`)
	stored, err = b.store.Append(t.Context(), other)
	require.NoError(t, err)
	require.Equal(t, 2, stored.Entries, "not those that are stored")

	require.Equal(t, "rewound again 20 11", b.one(`SELECT act || ' ' || note || ' ' || (detail ->> 'before') || ' '
		|| (detail ->> 'next') FROM dlq.acts WHERE subject = 'source orders' AND note = 'again'`))
}

func TestRewind_SkipsOnlyIfTold(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, b.store.Publish(t.Context()))
	batch := b.at0(0, 2, 0)
	batch.Start = true
	_, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	_, err = b.store.Rewind(t.Context(), "orders", "dlt", 1, 5, false, "kim", "")
	require.ErrorIs(t, err, deadletter.ErrInvalid)
	_, err = b.store.Rewind(t.Context(), "orders", "dlt", 1, -1, false, "kim", "")
	require.ErrorIs(t, err, deadletter.ErrInvalid)
	_, err = b.store.Rewind(t.Context(), "orders", "dlt", 7, 0, false, "kim", "")
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	_, err = b.store.Rewind(t.Context(), "none", "dlt", 1, 0, false, "kim", "")
	require.ErrorIs(t, err, deadletter.ErrNotFound)
	_, err = b.store.Rewind(t.Context(), "orders", "dlt", 1, 5, true, "kim", "")
	require.NoError(t, err)
	require.Equal(t, "5 3 offsets skipped", b.one(`SELECT p.next_offset || ' ' || p.lost || ' ' || a.act
		FROM dlq.source_positions p, dlq.acts a WHERE a.subject = 'source orders'`))
}

// recorder is a broker that counts its readers.
type recorder struct{ reading atomic.Int32 }

func (*recorder) Publish(context.Context, source.Target, source.Message) (source.Acknowledgement, error) {
	return source.Acknowledgement{}, nil
}

func (*recorder) Original(context.Context, string, source.Origin, time.Time) (source.Message, error) {
	return source.Message{}, source.ErrGone
}

func (*recorder) Encode(context.Context, string, []byte, json.RawMessage) ([]byte, error) {
	return nil, errors.ErrUnsupported
}

func (*recorder) OffsetAt(context.Context, *policy.TopicSource, string, int32, time.Time) (int64, error) {
	return 0, nil
}

func (*recorder) Try(context.Context, *policy.TopicSource, int) (*source.Trial, error) {
	return nil, errors.ErrUnsupported
}

func (r *recorder) Read(ctx context.Context, _ *policy.TopicSource, _ source.Appender) error {
	r.reading.Add(1)
	<-ctx.Done()
	r.reading.Add(-1)
	return nil
}

func (*recorder) Committed(context.Context, string, string) ([]source.Committed, error) {
	return nil, nil
}

func (*recorder) Groups(context.Context, string, []string) (map[string][]string, error) {
	return nil, nil
}

func (*recorder) Close() {}

// follow runs the loop of one process, which starts and stops readers.
func (b *bundle) follow(open source.Open, p func() *policy.Policy, logger *slog.Logger) {
	b.Helper()
	client := &source.Client{
		Open: open, Policy: p, Store: &source.Store{DB: b.store.DB, Policy: p, Logger: logger}, Logger: logger,
	}
	loops := &background.Group{Logger: logger}
	loops.Add(client.Loop())
	loops.Start()
	b.Cleanup(func() { require.NoError(b, loops.Stop(context.Background())) })
}

func TestPause_StopsTheReadersOfAllProcesses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, b.store.Publish(t.Context()))
	list := func() string {
		sources, err := b.store.List(t.Context())
		require.NoError(t, err)
		partitions, err := b.store.Partitions(t.Context(), "")
		require.NoError(t, err)
		require.Len(t, sources, 1)
		require.Len(t, partitions, 1, "a source that has reported nothing is listed, too")
		require.Equal(t, sources[0].State, partitions[0].State)
		return sources[0].State
	}
	require.Equal(t, source.StateWaiting, list())
	brokers := []*recorder{{}, {}}
	for _, broker := range brokers {
		b.follow(func(*policy.Policy) (source.Broker, error) { return broker, nil }, b.store.Policy, b.store.Logger)
	}
	awaitReaders := func(n int32) {
		t.Helper()
		require.Eventually(t, func() bool {
			return brokers[0].reading.Load() == n && brokers[1].reading.Load() == n
		}, 3*time.Minute, 20*time.Millisecond)
	}
	awaitReaders(1)
	changed, err := b.store.Pause(t.Context(), "orders", "kim", "maintenance")
	require.NoError(t, err)
	require.True(t, changed)
	awaitReaders(0)
	require.Equal(t, source.StatePaused, list())
	changed, err = b.store.Pause(t.Context(), "orders", "pat", "")
	require.NoError(t, err)
	require.False(t, changed)
	changed, err = b.store.Resume(t.Context(), "orders", "kim", "")
	require.NoError(t, err)
	require.True(t, changed)
	awaitReaders(1)
	require.Equal(t, "paused by kim: maintenance,resumed by kim: ", b.one(`SELECT string_agg(act || ' by ' || actor || ': '
		|| coalesce(note, ''), ',' ORDER BY id) FROM dlq.acts WHERE subject = 'source orders'`))
	_, err = b.store.Pause(t.Context(), "none", "kim", "")
	require.ErrorIs(t, err, deadletter.ErrNotFound)
}

func TestPublish_MarksRemovedSources(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, b.store.Publish(t.Context()))
	none := &policy.Policy{}
	store := &source.Store{DB: b.store.DB, Policy: func() *policy.Policy { return none }, Logger: b.store.Logger}
	require.NoError(t, store.Publish(t.Context()))
	sources, err := b.store.List(t.Context())
	require.NoError(t, err)
	require.Equal(t, source.StateRemoved, sources[0].State)
	require.NoError(t, b.store.Publish(t.Context()))
	sources, err = b.store.List(t.Context())
	require.NoError(t, err)
	require.Equal(t, source.StateWaiting, sources[0].State)
}

// A published record that failed again, and was read again from the source, has no entry of its own. After a rewind,
// dlqd still recognizes it by its row of dlq.source_deliveries.
func TestRewind_KnowsRecordsThatCameBack(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, b.store.Publish(t.Context()))
	start := b.at0(0, 1, 0)
	start.Start = true
	_, err := b.store.Append(t.Context(), start)
	require.NoError(t, err)
	entry := b.one("SELECT id::text FROM dlq.dead_letter_inbox")
	b.exec("SELECT dlq.file(ARRAY[$1::uuid])", entry)
	b.publish(entry, 7)
	// A record recognized by its place; a record published twice; one recognized by its hash; an equal record that dlqd
	// did not publish; and a hole.
	rest := func() source.Batch {
		batch := b.at0(1, 6, 1, 2, 3, 4)
		for i, offset := range []int64{7, 7, source.Unknown, source.Unknown} {
			batch.Records[i].Failure.Original = source.Origin{Topic: "in", Partition: 1, Offset: offset}
		}
		return batch
	}
	batch := rest()
	batch.Records, batch.Next = batch.Records[:2], 3
	stored, err := b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	require.Equal(t, source.Stored{Next: 3, Returned: 2}, stored)
	b.exec("SELECT dlq.apply_facts()")
	b.publish(entry, 8)
	batch = rest()
	batch.Records, batch.First = batch.Records[2:], 3
	stored, err = b.store.Append(t.Context(), batch)
	require.NoError(t, err)
	require.Equal(t, source.Stored{Next: 6, Returned: 1, Entries: 1}, stored)
	b.exec("SELECT dlq.apply_facts()")

	all := "SELECT string_agg(jsonb_array_length(retry_history) || ' ' || status, ', ' ORDER BY id) FROM dlq.dead_letter_queue"
	before := b.one(all)
	_, err = b.store.Rewind(t.Context(), "orders", "dlt", 1, 0, false, "kim", "")
	require.NoError(t, err)
	again := rest()
	again.First, again.Records = 0, append(b.at0(0, 1, 0).Records, again.Records...)
	stored, err = b.store.Append(t.Context(), again)
	require.NoError(t, err)
	require.Equal(t, source.Stored{Next: 6, Skipped: 5}, stored)
	b.exec("SELECT dlq.apply_facts()")
	require.Equal(t, before, b.one(all))
	require.Equal(t, "5 1 0", b.one("SELECT records || ' ' || holes || ' ' || lost FROM dlq.source_positions"))

	// No consumer has read a record that was skipped.
	b.publish(entry, 9)
	_, err = b.store.Rewind(t.Context(), "orders", "dlt", 1, 8, true, "kim", "")
	require.NoError(t, err)
	_, err = b.store.Rewind(t.Context(), "orders", "dlt", 1, 6, false, "kim", "")
	require.NoError(t, err)
	skipped := b.at0(6, 8, 6, 7)
	id := b.one("SELECT id::text FROM dlq.source_deliveries ORDER BY at DESC LIMIT 1")
	skipped.Records[0].Headers = []source.Header{{Key: source.HeaderDelivery, Value: []byte(id)}}
	skipped.Records[1].Failure.Original = source.Origin{Topic: "in", Partition: 1, Offset: 9}
	stored, err = b.store.Append(t.Context(), skipped)
	require.NoError(t, err)
	require.Equal(t, source.Stored{Next: 8, Returned: 2}, stored)
}

// faulty is a broker whose first reader panics.
type faulty struct {
	recorder

	panicked atomic.Bool
}

func (f *faulty) Read(ctx context.Context, s *policy.TopicSource, into source.Appender) error {
	if f.panicked.CompareAndSwap(false, true) {
		panic("a fault of the program")
	}
	return f.recorder.Read(ctx, s, into)
}

// errorLog receives the "error" attributes of log records.
type errorLog chan string

func (errorLog) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelError }

func (e errorLog) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "error" {
			e <- a.Value.String()
		}
		return true
	})
	return nil
}

func (e errorLog) WithAttrs([]slog.Attr) slog.Handler { return e }

func (e errorLog) WithGroup(string) slog.Handler { return e }

func TestClient_ReadsAgainAfterAPanic(t *testing.T) {
	t.Parallel()
	b := setup(t)
	require.NoError(t, b.store.Publish(t.Context()))
	broker := &faulty{}
	logged := make(errorLog, 1)
	before := background.Panics()
	b.follow(func(*policy.Policy) (source.Broker, error) { return broker, nil }, b.store.Policy, slog.New(logged))
	require.Contains(t, <-logged, "(*faulty).Read", "the stack")
	require.Greater(t, background.Panics(), before)
	require.Eventually(t, func() bool { return broker.reading.Load() == 1 }, 3*time.Minute, 20*time.Millisecond)
	require.Equal(t, "panicked: a fault of the program", b.one("SELECT error FROM dlq.source_progress"))
}

// A change of the policy restarts only the readers of the sources that it changes.
func TestClient_RestartsWhatChanged(t *testing.T) {
	t.Parallel()
	b := setup(t)
	const clusters = "clusters: {main: {brokers: [127.0.0.1:9]}, other: {brokers: [127.0.0.1:9]}"
	var current atomic.Pointer[policy.Policy]
	use := func(yaml string) { current.Store(policytest.Load(t, policytest.Files{"sources": yaml})) }
	const sources = "}\nsources:\n  a: {cluster: main, topics: [a]}\n  b: {cluster: other, topics: [b]}\n"
	use(clusters + sources)
	log := &openings{}
	b.follow(log.open, current.Load, slog.New(slog.DiscardHandler))
	log.await(t, "open 1", "1 reads a", "1 reads b")
	// A feed has no readers, so a changed feed restarts none.
	use(clusters + sources + "feeds: {f: {cluster: main, queues: [x], topic: x}}\n")
	use(clusters + ", third: {brokers: [127.0.0.1:9]}" + sources + "feeds: {f: {cluster: third, queues: [x], topic: x}}\n")
	log.await(t, "open 2")
	use(clusters + "}\nsources:\n  a: {cluster: main, topics: [a]}\n  b: {cluster: other, topics: [b, c]}\n")
	log.await(t, "open 3", "1 left b", "3 reads b", "close 2")
	use("clusters: {main: {brokers: [127.0.0.1:8]}}\nsources:\n  a: {cluster: main, topics: [a]}\n")
	log.await(t, "open 4", "1 left a", "3 left b", "4 reads a", "close 1", "close 3")
	use("{}")
	log.await(t, "4 left a", "close 4")
}

// openings records the opening and closing of brokers.
type openings struct {
	mu     sync.Mutex
	opened int
	log    []string
}

func (o *openings) addf(format string, args ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.log = append(o.log, fmt.Sprintf(format, args...))
}

// await waits for these events, in any order, and fails if any other event happens.
func (o *openings) await(t *testing.T, want ...string) {
	t.Helper()
	require.Eventually(t, func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return len(o.log) >= len(want)
	}, 3*time.Minute, 20*time.Millisecond, want)
	o.mu.Lock()
	defer o.mu.Unlock()
	require.ElementsMatch(t, want, o.log)
	o.log = nil
}

func (o *openings) open(*policy.Policy) (source.Broker, error) {
	o.mu.Lock()
	o.opened++
	n := o.opened
	o.mu.Unlock()
	o.addf("open %d", n)
	return &opened{of: o, number: n}, nil
}

type opened struct {
	recorder

	of     *openings
	number int
}

func (o *opened) Read(ctx context.Context, s *policy.TopicSource, _ source.Appender) error {
	o.of.addf("%d reads %s", o.number, s.Name)
	<-ctx.Done()
	o.of.addf("%d left %s", o.number, s.Name)
	return nil
}

func (o *opened) Close() { o.of.addf("close %d", o.number) }
