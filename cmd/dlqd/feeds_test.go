package main_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/source"
)

// fed is a record that a feed published, and the entry's number in the test.
type fed struct {
	*kgo.Record

	delivery string
	n        int
}

// TestFeed_ContinuesAfterKills kills the process that publishes a feed twice: before the broker has a record of the
// first batch, and after the broker has acknowledged the second batch and before the database has recorded that. Each
// entry is published at least once, entries with the same key in order. Batches that were recorded are not repeated.
func TestFeed_ContinuesAfterKills(t *testing.T) {
	t.Parallel()
	const entries, batch = 240, 100 // batch equals feedBatch of package source
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(4, "orders.DLT", "dlq.orders"))
	require.NoError(t, err)
	t.Cleanup(cluster.Close)
	o := &ordered{T: t, url: postgrestest.URL(t), config: dataDir(t)}
	o.pool = postgrestest.Open(t, o.url)
	require.NoError(t, os.WriteFile(filepath.Join(o.config, "sources.yaml"), fmt.Appendf(nil, `
clusters:
  main: {brokers: [%q]}
sources:
  orders: {cluster: main, topics: ["*.DLT"]}
feeds:
  deaths: {cluster: main, queues: [orders], topic: "dlq.{queue}", view: operator}
`, cluster.ListenAddrs()[0]), 0o600))
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.ConsumeTopics("dlq.orders"))
	require.NoError(t, err)
	t.Cleanup(client.Close)
	published := func() (records int64) {
		ends, err := kadm.NewClient(client).ListEndOffsets(t.Context(), "dlq.orders")
		require.NoError(t, err)
		ends.Each(func(end kadm.ListedOffset) { records += end.Offset })
		return records
	}
	exec := func(sql string) {
		_, err := o.pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	kill := func(s *served) {
		require.NoError(t, s.cmd.Process.Kill())
		_ = s.cmd.Wait()
		// End the killed process's sessions that wait for a lock, so that they write nothing later. Release its duty, which
		// would otherwise expire within a minute.
		exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`)
		exec("DELETE FROM dlq.duties WHERE name = 'feeds'")
	}

	// The entries wait while the feed is paused, so that the batches are full.
	first := o.serve(o.url)
	exec("SELECT dlq.pause_feed('deaths')")
	for n := range entries {
		client.Produce(t.Context(), &kgo.Record{
			Topic: "orders.DLT", Key: fmt.Append(nil, "key", n%7), Value: fmt.Appendf(nil, `{"n": %d}`, n),
		}, nil)
	}
	require.NoError(t, client.Flush(t.Context()))
	require.Eventually(t, func() bool { return o.count("SELECT count(*) FROM dlq.feed_records") == entries },
		5*time.Minute, 50*time.Millisecond)
	var refuse atomic.Bool
	refuse.Store(true)
	refused := make(chan struct{}, 1)
	cluster.ControlKey(int16(kmsg.Produce), func(kmsg.Request) (kmsg.Response, error, bool) {
		cluster.KeepControl()
		if !refuse.Load() {
			return nil, nil, false
		}
		select {
		case refused <- struct{}{}:
		default:
		}
		return nil, errors.New("the connection is cut"), true
	})
	exec("SELECT dlq.resume_feed('deaths')")
	<-refused
	kill(first)
	require.Zero(t, published())
	require.Equal(t, entries, o.count("SELECT waiting FROM dlq.feed_figures()"))
	refuse.Store(false)

	tx, err := o.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), `SELECT FROM dlq.feed_records WHERE place >= (
		SELECT place FROM dlq.feed_records ORDER BY place OFFSET $1 LIMIT 1) FOR UPDATE`, batch)
	require.NoError(t, err)
	second := o.serve(o.url)
	require.Eventually(t, func() bool {
		return o.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
			AND cardinality(pg_blocking_pids(pid)) > 0 AND query ~ 'mark_feed'`) > 0
	}, 5*time.Minute, 10*time.Millisecond)
	kill(second)
	require.NoError(t, tx.Rollback(t.Context()))
	require.GreaterOrEqual(t, published(), int64(2*batch))
	require.Equal(t, entries-batch, o.count("SELECT waiting FROM dlq.feed_figures()"), "the first batch is recorded")

	third := o.serve(o.url)
	require.Eventually(t, func() bool { return o.count("SELECT waiting FROM dlq.feed_figures()") == 0 },
		5*time.Minute, 50*time.Millisecond)
	require.Equal(t, entries, o.count("SELECT published FROM dlq.feed_figures()"))
	byKey, times := map[string][]fed{}, map[int]int{}
	deliveries := map[string]string{} // by entry
	for left := published(); left > 0; {
		fetched := client.PollFetches(t.Context())
		require.NoError(t, fetched.Err())
		for _, r := range fetched.Records() {
			var entry struct {
				ID            string
				OriginalEvent struct{ Payload struct{ N int } }
			}
			require.NoError(t, json.Unmarshal(r.Value, &entry))
			of := fed{Record: r, n: entry.OriginalEvent.Payload.N}
			for _, h := range r.Headers {
				if h.Key == source.HeaderDelivery {
					of.delivery = string(h.Value)
				}
			}
			if before, ok := deliveries[entry.ID]; ok {
				require.Equal(t, before, of.delivery, "a repeat has the same id")
			}
			deliveries[entry.ID] = of.delivery
			times[of.n]++
			byKey[string(r.Key)] = append(byKey[string(r.Key)], of)
			left--
		}
	}
	require.Len(t, times, entries)
	places := map[string]int{} // by delivery: the entry's place in the feed, from 0
	rows, err := o.pool.Query(t.Context(), "SELECT id::text FROM dlq.feed_records ORDER BY place")
	require.NoError(t, err)
	for rows.Next() {
		var id string
		require.NoError(t, rows.Scan(&id))
		places[id] = len(places)
	}
	require.NoError(t, rows.Err())
	for key, records := range byKey {
		var once []int
		last := 0 // the place of the last record
		for _, r := range records {
			place := places[r.delivery]
			if !slices.Contains(once, r.n) {
				once = append(once, r.n)
			}
			if place < batch || place >= 2*batch {
				require.Equal(t, 1, times[r.n], "%s: only the second batch is repeated", key)
			} else {
				require.Less(t, last, 2*batch, "%s: a repeat is not behind a later batch", key)
			}
			last = place
		}
		require.True(t, slices.IsSorted(once), "%s: %v", key, once)
	}
	// The entry names a place at which the broker has its record.
	for id, delivery := range deliveries {
		response, err := http.Get(third.api + "/api/dlq/entries/" + id)
		require.NoError(t, err)
		var entry struct{ Published []source.Published }
		require.NoError(t, json.NewDecoder(response.Body).Decode(&entry))
		require.NoError(t, response.Body.Close())
		require.Len(t, entry.Published, 1)
		at := entry.Published[0]
		require.NotNil(t, at.Offset)
		require.True(t, slices.ContainsFunc(slices.Concat(slices.Collect(maps.Values(byKey))...), func(r fed) bool {
			return r.delivery == delivery && r.Partition == *at.Partition && r.Offset == *at.Offset
		}), at.Place())
	}
	require.Regexp(t, `KIND +TOPIC +PARTITION +OFFSET +NODE +CLASS`, ok(t, "list", "--api-url", third.api, "--limit", "1"))
	require.Zero(t, third.stop(syscall.SIGTERM), third.log.String())
}
