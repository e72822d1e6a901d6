package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

const (
	// maxBatch limits the records of a batch, and maxBatchBytes their size.
	maxBatch      = 500
	maxBatchBytes = 4 << 20
	// firstRetry is the delay after the first error of a partition. It doubles with each further error, up to lastRetry.
	firstRetry = 250 * time.Millisecond
	lastRetry  = 30 * time.Second
	// oldest and newest are the timestamps with which Kafka is asked for the first offset and the end of a partition.
	oldest = int64(-2)
	newest = int64(-1)
	// recordBytes is the estimated memory of a record without its key, value and headers.
	recordBytes = 200
)

// errLost says that the broker removed records that were not read.
var errLost = errors.New("the broker removed records before they were read")

// partition is a partition that is assigned to a reader. At most one goroutine works on a partition. The goroutine
// finds the position, stores fetched records, and starts over after an error.
type partition struct {
	r      *reader
	id     source.Partition
	ctx    context.Context // done when the reader loses the partition
	cancel context.CancelFunc

	// Only the partition's goroutine uses the following fields.
	errors int                        // number of consecutive errors
	err    error                      // the last error; nil once a batch is stored or all records are read
	limit  int                        // records of the next batch: one after an error, to find the record that causes it
	poison *kgo.ErrDecompressTooLarge // the batch that cannot be unpacked

	// reader.mu guards the following fields.
	added   bool  // without a consumer group: the client was told to fetch the partition
	reading bool  // the partition is fetched from its position
	paused  bool  // fetching is paused because the queue is full
	working bool  // the goroutine runs
	next    int64 // position
	fetched int64 // offset after the last record in the queue
	end     int64 // end of the partition; records of open transactions do not count
	start   int64 // the oldest offset that the broker has
	queue   []*kgo.Record
	bytes   int   // memory of the queue
	failure error // error of a fetch; handled once the queue is stored
}

func (p *partition) place() place { return place{p.id.Topic, p.id.Partition} }

// begin finds the position, and starts fetching the partition from there.
func (p *partition) begin() {
	for {
		var next, end int64
		err := background.Guard(func() (err error) {
			next, end, err = p.position()
			return err
		})
		if p.ctx.Err() != nil {
			return
		}
		if err == nil && p.poison != nil && next == p.next {
			err = p.poisoned() // fails until an operator moves the position, which starts a new reader
		}
		if err == nil {
			p.poison = nil
			p.r.mu.Lock()
			p.next, p.fetched, p.end, p.failure, p.working = next, next, end, nil, false
			p.r.begun = append(p.r.begun, p)
			if p.r.source.ConsumerGroup != "" { // the previous owner of the partition may not have committed the position
				set(p.r.commits, p.place(), kgo.EpochOffset{Epoch: -1, Offset: next})
			}
			if p.r.stopPoll != nil {
				p.r.stopPoll()
			}
			p.r.mu.Unlock()
			if next >= end {
				p.err = nil
			}
			p.progress(next, end, p.err, "")
			return
		}
		if !p.retry(err) {
			return
		}
	}
}

// position returns where to read, and the end of the partition. It creates a missing position, and records offsets that
// the broker no longer has as lost. It returns an error if the position is after the end.
func (p *partition) position() (next, end int64, err error) {
	if !p.use() {
		return 0, 0, p.ctx.Err()
	}
	defer p.release()
	next, known, err := p.r.into.Position(p.ctx, p.id)
	if err != nil {
		return 0, 0, err
	}
	start, end, err := p.bounds()
	if err != nil {
		return 0, 0, err
	}
	p.r.mu.Lock()
	p.start = start
	p.r.mu.Unlock()
	switch {
	case !known && p.r.source.From == policy.FromLatest && p.id.Partition < p.r.old[p.id.TopicID]:
		next, err = p.append(source.Batch{First: end, Next: end, Start: true})
	case !known:
		next, err = p.append(source.Batch{First: start, Next: start, Start: true})
	case next < start:
		next, err = p.append(source.Batch{First: next, Next: start, Lost: true})
	case next > end:
		err = fmt.Errorf("the position is %d, but the partition ends at %d: the cluster lost records: "+
			"dlqd sources rewind %s --topic %s --partition %d --offset %d", next, end, p.r.source.Name, p.id.Topic,
			p.id.Partition, end)
	}
	return next, end, err
}

// append stores a batch without records, and returns the position.
func (p *partition) append(batch source.Batch) (int64, error) {
	batch.Partition, batch.Source = p.id, p.r.source.Name
	stored, err := p.r.into.Append(p.ctx, batch)
	return stored.Next, err
}

// bounds returns the first offset of the partition, and the offset after its last record. Records of open transactions
// do not count.
func (p *partition) bounds() (start, end int64, err error) {
	for _, bound := range []struct {
		timestamp int64
		offset    *int64
	}{{oldest, &start}, {newest, &end}} {
		offset, err := listOffset(p.ctx, p.r.admin, p.id.Topic, p.id.Partition, bound.timestamp)
		if err != nil {
			return 0, 0, err
		}
		*bound.offset = offset
	}
	return start, end, nil
}

// listOffset returns the offset of the first record at or after a timestamp, or for oldest and newest a bound of the
// partition. It returns -1 if there is no such record. Records of open transactions do not count.
func listOffset(ctx context.Context, client *kgo.Client, topic string, partition int32, timestamp int64) (
	int64, error,
) {
	of := kmsg.NewListOffsetsRequestTopicPartition()
	of.Partition, of.Timestamp = partition, timestamp
	in := kmsg.NewListOffsetsRequestTopic()
	in.Topic, in.Partitions = topic, []kmsg.ListOffsetsRequestTopicPartition{of}
	request := kmsg.NewPtrListOffsetsRequest()
	request.ReplicaID, request.IsolationLevel, request.Topics = -1, 1, []kmsg.ListOffsetsRequestTopic{in}
	response, err := request.RequestWith(ctx, client)
	if err != nil {
		return 0, fmt.Errorf("listing offsets: %w", err)
	}
	if len(response.Topics) != 1 || len(response.Topics[0].Partitions) != 1 {
		return 0, errors.New("listing offsets: the broker's answer has no offset")
	}
	answer := response.Topics[0].Partitions[0]
	if err := kerr.ErrorForCode(answer.ErrorCode); err != nil {
		return 0, fmt.Errorf("listing offsets: %w", err)
	}
	return answer.Offset, nil
}

// receive queues fetched records. It returns true if fetching must pause because the queue is full. The caller holds
// reader.mu.
func (p *partition) receive(fetched kgo.FetchPartition) (pause bool) {
	switch {
	case fetched.Err != nil:
		p.failure = fetched.Err
	case fetched.LogStartOffset > p.fetched:
		p.failure = errLost
	default:
		p.start = max(p.start, fetched.LogStartOffset)
		p.end = max(p.fetched, fetched.LastStableOffset)
		if fetched.LastStableOffset < 0 {
			p.end = fetched.HighWatermark
		}
		for _, record := range fetched.Records {
			p.queue = append(p.queue, record)
			p.fetched = record.Offset + 1
			p.count(size(record))
		}
	}
	pause = !p.paused && (p.failure != nil || p.bytes > queuedPartitionBytes)
	p.paused = p.paused || pause
	if p.failure != nil {
		p.reading = false
	}
	return pause
}

// size returns the memory of a record.
func size(record *kgo.Record) int {
	bytes := recordBytes + len(record.Key) + len(record.Value)
	for _, header := range record.Headers {
		bytes += len(header.Key) + len(header.Value)
	}
	return bytes
}

// count adds bytes to the memory in use. The caller holds reader.mu.
func (p *partition) count(bytes int) {
	p.bytes += bytes
	p.r.queued += bytes
	if bytes < 0 {
		wake(p.r.room)
	}
}

// clear empties the queue. The caller holds reader.mu.
func (p *partition) clear() {
	p.queue, p.reading = nil, false
	p.count(-p.bytes)
}

// work stores the queue in batches. After an error it starts over at the position in the database.
func (p *partition) work() {
	for {
		if !p.use() { // wait before a batch leaves the queue, because the size of the queue limits the memory
			return
		}
		p.r.mu.Lock()
		records := p.take()
		if len(records) == 0 {
			p.release()
			err := p.failure
			p.working = err != nil
			resume := err == nil && p.paused
			if resume {
				p.paused = false
			}
			p.r.mu.Unlock()
			if err != nil && p.fail(err) {
				p.begin()
			}
			if resume && p.ctx.Err() == nil {
				p.r.client.ResumeFetchPartitions(map[string][]int32{p.id.Topic: {p.id.Partition}})
			}
			return
		}
		batch := source.Batch{
			Partition: p.id, Source: p.r.source.Name, First: p.next, Next: records[len(records)-1].Offset + 1,
		}
		p.r.mu.Unlock()
		err := background.Guard(func() error { return p.store(batch, records) })
		p.release()
		if p.ctx.Err() != nil {
			return
		}
		if err != nil {
			if p.fail(err) {
				p.begin()
			}
			return
		}
		p.stored(batch)
	}
}

// store stores a batch of fetched records, in several parts if decoded values and records that references refer to are
// more than maxBatchBytes: the size of the queue does not limit these bytes.
func (p *partition) store(batch source.Batch, records []*kgo.Record) error {
	ids := map[string]uuid.UUID{} // ids of the topics in which records failed, by name
	from := originals{client: p.r.admin, unpacker: p.r.unpacker}
	more := 0 // bytes of decoded values and of records that references refer to
	for i, fetched := range records {
		if fetched.Attrs.IsControl() {
			continue
		}
		record := recordOf(p.ctx, p.r.source, p.r.valueType, p.r.schemas, fetched)
		if original := &record.Failure.Original; original.Offset >= 0 {
			id, known := ids[original.Topic]
			if !known {
				id = topicID(p.ctx, p.r.admin, original.Topic)
				ids[original.Topic] = id
			}
			original.TopicID = id
		}
		more += p.complete(&from, &record)
		more += len(record.Payload)
		batch.Records = append(batch.Records, record)
		if more >= maxBatchBytes && i+1 < len(records) {
			part := batch
			part.Next = fetched.Offset + 1
			if _, err := p.r.into.Append(p.ctx, part); err != nil {
				return err
			}
			batch.First, batch.Records, more = part.Next, nil, 0
		}
	}
	_, err := p.r.into.Append(p.ctx, batch)
	return err
}

// take removes the next batch from the queue. The caller holds reader.mu.
func (p *partition) take() []*kgo.Record {
	if p.limit == 0 {
		p.limit = maxBatch
	}
	var taken, bytes int
	for taken < len(p.queue) && taken < p.limit && (taken == 0 || bytes < maxBatchBytes) {
		bytes += size(p.queue[taken])
		taken++
	}
	records := slices.Clone(p.queue[:taken])
	clear(p.queue[:taken]) // otherwise the array would keep the records in memory
	p.queue = p.queue[taken:]
	p.count(-bytes)
	return records
}

// stored moves the position past a batch.
func (p *partition) stored(batch source.Batch) {
	p.errors, p.err, p.limit = 0, nil, min(2*p.limit, maxBatch)
	p.r.mu.Lock()
	p.next = batch.Next
	end := p.end
	if p.r.source.ConsumerGroup != "" {
		set(p.r.commits, p.place(), kgo.EpochOffset{Epoch: -1, Offset: batch.Next})
	}
	p.r.mu.Unlock()
	p.progress(batch.Next, end, nil, "")
}

// fail stops fetching the partition after an error, and waits before fetching may start again. It returns false if the
// reader lost the partition.
func (p *partition) fail(err error) bool {
	p.r.mu.Lock()
	p.clear()
	p.paused, p.working = true, true
	p.r.mu.Unlock()
	p.r.client.PauseFetchPartitions(map[string][]int32{p.id.Topic: {p.id.Partition}})
	if errors.Is(err, errMemory) {
		return p.wait(firstRetry)
	}
	p.limit = 1
	if errors.As(err, &p.poison) {
		err = p.poisoned()
	}
	var moved *source.PositionError
	if p.errors == 0 && (errors.As(err, &moved) || errors.Is(err, errLost) || errors.Is(err, kerr.OffsetOutOfRange)) {
		p.errors++
		return p.ctx.Err() == nil // the next position shows what happened
	}
	return p.retry(err)
}

// poisoned returns the error for a batch that cannot be unpacked, with the remedy.
func (p *partition) poisoned() error {
	return fmt.Errorf("the batch of records from offset %d to %d unpacks to more than %d MiB: "+
		"read it with another tool, then skip it: "+
		"dlqd sources rewind %s --topic %s --partition %d --offset %d --skip", p.poison.Offset, p.poison.NextOffset-1,
		batchBytes>>20, p.r.source.Name, p.id.Topic, p.id.Partition, p.poison.NextOffset)
}

// retry reports an error and waits. It returns false if the reader lost the partition.
func (p *partition) retry(err error) bool {
	p.r.mu.Lock()
	next, end := p.next, p.end
	p.r.mu.Unlock()
	var stack string
	if panicked, ok := errors.AsType[*background.PanicError](err); ok {
		err, stack = fmt.Errorf("panicked: %v", panicked.Value), panicked.Stack
	}
	p.err = err
	p.progress(next, end, err, stack)
	p.errors++
	return p.wait(min(firstRetry<<min(p.errors-1, 10), lastRetry))
}

// wait waits. It returns false if the reader loses the partition meanwhile.
func (p *partition) wait(delay time.Duration) bool {
	timer := time.NewTimer(delay)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// progress reports the state of the partition. stack, if not empty, is the stack of a panic; it is reported once.
func (p *partition) progress(next, end int64, err error, stack string) {
	p.r.mu.Lock()
	start := p.start
	p.r.mu.Unlock()
	progress := source.Progress{
		Partition: p.id, Source: p.r.source.Name, State: source.StateReading, Next: next, End: max(next, end), Start: start,
		Stack: stack,
	}
	switch {
	case err != nil:
		progress.State, progress.Error = source.StateFailing, err.Error()
	case next >= end:
		progress.State = source.StateCaughtUp
	}
	p.r.into.Progress(progress)
}

// use waits until the partition may use the database. It returns false if the reader lost the partition.
func (p *partition) use() bool {
	select {
	case p.r.using <- struct{}{}:
		return true
	case <-p.ctx.Done():
		return false
	}
}

func (p *partition) release() { <-p.r.using }
