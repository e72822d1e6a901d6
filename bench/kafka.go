package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime/metrics"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/kafka"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
)

const (
	kafkaTopic      = "dlq.bench"
	kafkaPartitions = 8
	kafkaBatch      = 500 // of records, as in internal/kafka
	kafkaWriters    = 4   // as many as write a source's batches at a time
)

// kafkaErrors are the errors of insertFailing.
var kafkaErrors = []string{
	"dial tcp 10.0.0.7:443: connection refused", "unexpected status 503", "card was declined",
}

// kafkaBench measures how fast records of a topic are stored, beside a bare consumer that inserts as many rows; how
// fast they are filed and decided, beside failed jobs of River; and the memory of a catch-up. The topic is one of kfake
// in this process, which takes a part of the processors while records are read.
func kafkaBench(b *bench, scale float64) error {
	records := int(100_000 * scale)
	b.row("records of 1 KB", "stored/s", "bare consumer/s", "ratio")
	stored, bare, ratio, err := b.pairs(
		func() (float64, error) {
			rate, _, err := b.storedRate(records)
			return rate, err
		},
		func() (float64, error) { return b.bareRate(records) })
	if err != nil {
		return err
	}
	b.row(records, thousands(stored), thousands(bare), fmt.Sprintf("%.2f", ratio))
	b.newTable("batches of 500", "records filed and decided/s", "River's failures/s", "ratio")
	filed, river, ratio, err := b.pairs(
		func() (float64, error) { return b.recordFilingRate(records) },
		func() (float64, error) {
			rate, _, err := b.filingRate(records, kafkaBatch, viaCapture)
			return rate, err
		})
	if err != nil {
		return err
	}
	b.row(records, thousands(filed), thousands(river), fmt.Sprintf("%.2f", ratio))
	b.newTable("catch-up", "seconds", "records/s", "most memory beside the topic, MiB")
	rate, memory, err := b.storedRate(int(1_000_000 * scale))
	if err != nil {
		return err
	}
	b.row(int(1_000_000*scale), fmt.Sprintf("%.0f", 1_000_000*scale/rate), thousands(rate), memory>>20)
	return nil
}

// kafkaPolicy returns a policy with a source.
func kafkaPolicy(brokers []string) (*policy.Policy, error) {
	dir, err := os.MkdirTemp("", "dlqd-kafka-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	text := fmt.Sprintf("clusters: {main: {brokers: [%s]}}\n"+
		"sources: {bench: {cluster: main, topics: [%s], envelope: spring, replayTo: retry}}\n",
		strings.Join(brokers, ", "), kafkaTopic)
	if err := os.WriteFile(filepath.Join(dir, "sources.yaml"), []byte(text), 0o600); err != nil {
		return nil, err
	}
	return policy.Load(policy.Source{Dir: dir, Destination: "http://127.0.0.1:1/"})
}

// fillTopic starts a cluster whose topic has dead letters of Spring Kafka.
func (b *bench) fillTopic(records int) (*kfake.Cluster, error) {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(kafkaPartitions, kafkaTopic))
	if err != nil {
		return nil, err
	}
	client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.MaxBufferedRecords(kafkaBatch))
	if err != nil {
		cluster.Close()
		return nil, err
	}
	defer client.Close()
	blob := strings.Repeat("x", 900)
	var failed atomic.Pointer[error]
	for i := range records {
		client.Produce(b.ctx, &kgo.Record{
			Topic: kafkaTopic, Key: fmt.Appendf(nil, "key_%d", i), Value: fmt.Appendf(nil, `{"blob": %q, "n": %d}`, blob, i),
			Headers: []kgo.RecordHeader{
				{Key: "kafka_dlt-original-topic", Value: []byte("orders")},
				{Key: "kafka_dlt-original-consumer-group", Value: []byte("payments")},
				{Key: "kafka_dlt-exception-fqcn", Value: []byte("com.shop.Failure")},
				{Key: "kafka_dlt-exception-message", Value: []byte(kafkaErrors[i%len(kafkaErrors)])},
			},
		}, func(_ *kgo.Record, err error) {
			if err != nil {
				failed.Store(&err)
			}
		})
	}
	err = client.Flush(b.ctx)
	if p := failed.Load(); p != nil {
		err = *p
	}
	if err != nil {
		cluster.Close()
		return nil, err
	}
	return cluster, nil
}

// countingStore counts the stored records.
type countingStore struct {
	*source.Store

	records atomic.Int64
	all     int64
	done    chan struct{} // closed once all are stored
}

// Append implements source.Appender.
func (s *countingStore) Append(ctx context.Context, batch source.Batch) (source.Stored, error) {
	stored, err := s.Store.Append(ctx, batch)
	if n := int64(stored.Entries); err == nil && n > 0 && s.records.Add(n) == s.all {
		close(s.done)
	}
	return stored, err
}

// storedRate returns how many records a source stores per second, and the most live memory beside that of the filled
// topic.
func (b *bench) storedRate(records int) (rate float64, memory int64, err error) {
	cluster, err := b.fillTopic(records)
	if err != nil {
		return 0, 0, err
	}
	defer cluster.Close()
	rules, err := kafkaPolicy(cluster.ListenAddrs())
	if err != nil {
		return 0, 0, err
	}
	err = b.withPool(2*kafkaWriters, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		store := &countingStore{
			Store: &source.Store{
				DB: postgres.DefaultSchemas().Rendered(pool), Policy: func() *policy.Policy { return rules }, Logger: quiet,
			},
			all: int64(records), done: make(chan struct{}),
		}
		broker, err := kafka.Open(rules)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithCancel(b.ctx)
		ended := make(chan error, 1)
		before, most := liveMemory(), int64(0)
		start := time.Now()
		go func() { ended <- broker.Read(ctx, rules.Sources.Sources["bench"], store) }()
		defer func() {
			cancel()
			<-ended //nolint:errcheck // the reader was cancelled
			broker.Close()
		}()
		look := time.NewTicker(100 * time.Millisecond)
		defer look.Stop()
		for {
			select {
			case <-look.C:
				most = max(most, liveMemory()-before)
			case err := <-ended:
				ended <- err
				return fmt.Errorf("the reader ended after %d records: %w", store.records.Load(), err)
			case <-store.done:
				rate, memory = float64(records)/time.Since(start).Seconds(), most
				return nil
			}
		}
	})
	return rate, memory, err
}

// liveMemory returns the bytes of objects that the last garbage collection found in use.
func liveMemory() int64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return int64(sample[0].Value.Uint64())
}

// bareRate returns how many records a second a consumer without dlqd stores, with a row for each and the position in
// the same transaction.
func (b *bench) bareRate(records int) (rate float64, err error) {
	cluster, err := b.fillTopic(records)
	if err != nil {
		return 0, err
	}
	defer cluster.Close()
	err = b.withPool(2*kafkaWriters, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, false); err != nil {
			return err
		}
		if _, err := pool.Exec(b.ctx, `
			CREATE TABLE bare_records (topic text, partition integer, "offset" bigint, at timestamptz, key bytea, value bytea,
				headers jsonb, PRIMARY KEY (topic, partition, "offset"));
			CREATE TABLE bare_positions (topic text, partition integer, next bigint, PRIMARY KEY (topic, partition))`); err != nil {
			return err
		}
		start := time.Now()
		client, err := kgo.NewClient(kgo.SeedBrokers(cluster.ListenAddrs()...), kgo.ConsumeTopics(kafkaTopic))
		if err != nil {
			return err
		}
		defer client.Close()
		for stored := 0; stored < records; {
			fetched := client.PollRecords(b.ctx, 4*kafkaPartitions*kafkaBatch)
			if err := fetched.Err(); err != nil {
				return err
			}
			var writers errgroup.Group
			writers.SetLimit(kafkaWriters)
			fetched.EachPartition(func(p kgo.FetchTopicPartition) {
				stored += len(p.Records)
				writers.Go(func() error {
					for rest := p.Records; len(rest) > 0; {
						n := min(len(rest), kafkaBatch)
						if err := insertBare(b.ctx, pool, rest[:n]); err != nil {
							return err
						}
						rest = rest[n:]
					}
					return nil
				})
			})
			if err := writers.Wait(); err != nil {
				return err
			}
		}
		rate = float64(records) / time.Since(start).Seconds()
		return nil
	})
	return rate, err
}

func insertBare(ctx context.Context, pool *pgxpool.Pool, records []*kgo.Record) error {
	var offsets []int64
	var times []time.Time
	var keys, values [][]byte
	var headers []json.RawMessage
	for _, record := range records {
		offsets, times = append(offsets, record.Offset), append(times, record.Timestamp)
		keys, values = append(keys, record.Key), append(values, record.Value)
		named := map[string]string{}
		for _, header := range record.Headers {
			named[header.Key] = string(header.Value)
		}
		raw, err := json.Marshal(named)
		if err != nil {
			return err
		}
		headers = append(headers, raw)
	}
	last := records[len(records)-1]
	_, err := pool.Exec(ctx, `
		WITH inserted AS (
			INSERT INTO bare_records SELECT $1, $2, u.* FROM unnest($3::bigint[], $4::timestamptz[], $5::bytea[],
				$6::bytea[], $7::jsonb[]) u
		)
		INSERT INTO bare_positions VALUES ($1, $2, $8) ON CONFLICT (topic, partition) DO UPDATE SET next = excluded.next`,
		last.Topic, last.Partition, offsets, times, keys, values, headers, last.Offset+1)
	return err
}

// recordFilingRate returns how many stored records a DLQ worker files and decides per second.
func (b *bench) recordFilingRate(records int) (rate float64, err error) {
	rules, err := kafkaPolicy([]string{"127.0.0.1:1"})
	if err != nil {
		return 0, err
	}
	planner, err := strategy.NewPlanner(rules, nil)
	if err != nil {
		return 0, err
	}
	err = b.withPool(2*kafkaWriters, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		store := &source.Store{
			DB: postgres.DefaultSchemas().Rendered(pool), Policy: func() *policy.Policy { return rules }, Logger: quiet,
		}
		if err := storeRecords(b.ctx, store, records); err != nil {
			return err
		}
		if _, err := pool.Exec(b.ctx, "CHECKPOINT"); err != nil {
			return err
		}
		w := worker.New(worker.Config{
			Store:   deadletter.NewStore(pool, postgres.DefaultSchemas()),
			Planner: func() *strategy.Planner { return planner }, Logger: quiet, BatchSize: kafkaBatch,
		})
		start := time.Now()
		for more := true; more; {
			if more, err = w.File(b.ctx); err != nil {
				return err
			}
		}
		rate = float64(records) / time.Since(start).Seconds()
		var filed int
		if err := pool.QueryRow(b.ctx, "SELECT count(*) FROM dlq.dead_letter_open WHERE strategy IS NOT NULL").Scan(
			&filed); err != nil {
			return err
		}
		if filed != records {
			return fmt.Errorf("filed %d of %d records", filed, records)
		}
		return nil
	})
	return rate, err
}

// storeRecords stores records with the payloads and errors of insertFailing.
func storeRecords(ctx context.Context, store *source.Store, records int) error {
	at := source.Partition{Cluster: "main", Topic: kafkaTopic, TopicID: uuid.New()}
	blob := strings.Repeat("x", 900)
	for first := 0; first < records; first += kafkaBatch {
		batch := source.Batch{
			Partition: at, Source: "bench", First: int64(first), Next: int64(min(first+kafkaBatch, records)),
			Start: first == 0,
		}
		for i := batch.First; i < batch.Next; i++ {
			batch.Records = append(batch.Records, source.Record{
				Offset: i, Time: time.Now(), Key: fmt.Appendf(nil, "key_%d", i),
				Value: fmt.Appendf(nil, `{"blob": %q, "n": %d}`, blob, i),
				Failure: source.Failure{
					Kind: fmt.Sprintf("kind_%d", i%50), Error: riverdlq.Error{Message: kafkaErrors[i%int64(len(kafkaErrors))]},
					Original: source.Origin{Partition: source.Unknown, Offset: source.Unknown},
				},
			})
		}
		if _, err := store.Append(ctx, batch); err != nil {
			return err
		}
	}
	return nil
}
