package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime/metrics"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"golang.org/x/sync/errgroup"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/kafka"
	"github.com/dlqd/dlqd/internal/message"
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
	kafkaWriters    = 4   // as many as write batches of a source concurrently in internal/kafka
)

// kafkaErrors are the errors that insertFailing uses.
var kafkaErrors = []string{
	"dial tcp 10.0.0.7:443: connection refused", "unexpected status 503", "card was declined",
}

// kafkaBench measures three things: how fast records of a topic are stored, compared with a bare consumer that inserts
// the same rows; how fast they are filed and decided, compared with failed jobs of River; and the memory of a catch-up.
// The topic belongs to kfake in this process, which uses a part of the processors while records are read.
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

// fillTopic starts a cluster with a topic that has dead letters of Spring Kafka.
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
	done    chan struct{} // closed when all records are stored
}

// Append implements source.Appender.
func (s *countingStore) Append(ctx context.Context, batch source.Batch) (source.Stored, error) {
	stored, err := s.Store.Append(ctx, batch)
	if n := int64(stored.Entries); err == nil && n > 0 && s.records.Add(n) == s.all {
		close(s.done)
	}
	return stored, err
}

// storedRate returns how many records a source stores per second. It also returns the maximum size of live objects, in
// bytes, beyond the size with the filled topic alone.
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

// liveMemory returns the size, in bytes, of the objects that the last garbage collection found in use.
func liveMemory() int64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return int64(sample[0].Value.Uint64())
}

// bareRate returns how many records per second a consumer without dlqd stores. For each batch it uses one transaction,
// in which it inserts by COPY the rows that dlqd would insert, into a table with the same columns and indexes, and
// moves the position. It checks neither the position nor the texts, and does not search for records that dlqd
// published.
func (b *bench) bareRate(records int) (rate float64, err error) {
	cluster, err := b.fillTopic(records)
	if err != nil {
		return 0, err
	}
	defer cluster.Close()
	err = b.withPool(2*kafkaWriters, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		if _, err := pool.Exec(b.ctx, `
			CREATE TABLE bare_records (LIKE dlq.dead_letter_inbox INCLUDING ALL);
			CREATE TABLE bare_positions (LIKE dlq.source_positions INCLUDING ALL)`); err != nil {
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
			fetched.EachTopic(func(topic kgo.FetchTopic) {
				for _, p := range topic.Partitions {
					stored += len(p.Records)
					writers.Go(func() error {
						for batch := range slices.Chunk(p.Records, kafkaBatch) {
							if err := insertBare(b.ctx, pool, topic.TopicID, batch); err != nil {
								return err
							}
						}
						return nil
					})
				}
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

// bareJobs numbers the rows that the bare consumer inserts.
var bareJobs atomic.Int64

// bareColumns are the columns that dlq.store_records sets.
var bareColumns = []string{
	"id", "event_id", "river_job_id", "job_created_at", "queue", "kind", "job_kind", "source", "ordering_key", "priority",
	"original_event", "error_message", "retry_history", "retry_count", "max_retries", "metadata", "next_retry_at",
	"captured_by", "first_failed_at", "last_failed_at", "record",
}

func insertBare(ctx context.Context, pool *pgxpool.Pool, topicID uuid.UUID, records []*kgo.Record) error {
	rows := make([][]any, len(records))
	for i, record := range records {
		var err error
		if rows[i], err = bareRow(topicID, record); err != nil {
			return err
		}
	}
	last := records[len(records)-1]
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, ok := tx.Conn().TypeMap().TypeForName("dlq.record"); !ok {
			record, err := tx.Conn().LoadType(ctx, "dlq.record")
			if err != nil {
				return err
			}
			tx.Conn().TypeMap().RegisterType(record)
		}
		if _, err := tx.CopyFrom(ctx, pgx.Identifier{"bare_records"}, bareColumns, pgx.CopyFromRows(rows)); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `
			INSERT INTO bare_positions AS p (cluster, topic_id, partition, topic, source, queue, first_offset, next_offset,
				records)
			VALUES ('main', $1, $2, $3, 'bench', 'bench', $4, $5, $6)
			ON CONFLICT (cluster, topic_id, partition) DO UPDATE SET next_offset = excluded.next_offset,
				records = p.records + excluded.records, updated_at = now()`,
			topicID, last.Partition, last.Topic, records[0].Offset, last.Offset+1, len(records))
		return err
	})
}

// bareRow returns the row that dlqd would store for a record.
func bareRow(topicID uuid.UUID, record *kgo.Record) ([]any, error) {
	named := map[string]string{}
	keys, values := make([][]byte, 0, len(record.Headers)), make([][]byte, 0, len(record.Headers))
	for _, header := range record.Headers {
		named[header.Key] = string(header.Value)
		keys, values = append(keys, []byte(header.Key)), append(values, header.Value)
	}
	id, err := uuid.NewV7()
	if err != nil {
		return nil, err
	}
	messageID := fmt.Sprintf("%s/%d/%d", record.Topic, record.Partition, record.Offset)
	event, err := message.Message{
		MessageID: messageID, Queue: "bench", EventKind: "bench", Payload: record.Value, Source: "bench",
		OrderingKey: string(record.Key), Headers: named,
	}.Args()
	if err != nil {
		return nil, err
	}
	failure, group := named["kafka_dlt-exception-message"], named["kafka_dlt-original-consumer-group"]
	history, err := json.Marshal([]map[string]any{{"at": record.Timestamp, "attempt": 1, "error": failure, "trace": ""}})
	if err != nil {
		return nil, err
	}
	metadata, err := json.Marshal(map[string]any{riverdlq.MetadataKey: map[string]any{
		"attempt": 1, "type": named["kafka_dlt-exception-fqcn"], "message": failure,
		"context": map[string]any{"record": map[string]any{
			"cluster": "main", "topic": record.Topic, "partition": record.Partition, "offset": record.Offset,
			"time": record.Timestamp, "form": source.FormJSON, "group": group,
			"originalTopic": named["kafka_dlt-original-topic"],
		}},
	}})
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(record.Value)
	return []any{
		id, messageID, -bareJobs.Add(1), record.Timestamp, "bench", "bench", message.JobKind, "bench",
		string(record.Key), 1, json.RawMessage(event), failure, json.RawMessage(history), 1, 2, json.RawMessage(metadata),
		time.Now(), "source", record.Timestamp, record.Timestamp,
		pgtype.CompositeFields{
			"main", record.Topic, topicID, record.Partition, record.Offset, record.Timestamp, group, nil,
			named["kafka_dlt-original-topic"], nil, nil, source.FormJSON, len(record.Value), sum[:], record.Key,
			record.Value, keys, values,
		},
	}, nil
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
