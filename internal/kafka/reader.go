package kafka

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/registry"
	"github.com/dlqd/dlqd/internal/source"
)

const (
	// fetchBytes limits a fetch, and partitionBytes the data of one partition in a fetch. A single batch of records may
	// be larger.
	fetchBytes     = 8 << 20
	partitionBytes = 1 << 20
	// fetches limits the fetches that are in flight or in memory. Each broker answers one at a time.
	fetches = 4
	// fetchWait is how long a broker waits for records before it answers. A partition that begins or continues has to
	// wait for the next fetch.
	fetchWait = 500 * time.Millisecond
	// batchBytes limits the unpacked size of a compressed batch. Kafka limits only the compressed size: 1 MiB can unpack
	// to 1 GiB of zeros.
	batchBytes = 128 << 20
	// queuedBytes limits the memory of queued records, of all partitions together, and queuedPartitionBytes the memory of
	// one partition's records. The records of one fetch may come on top.
	queuedBytes          = 64 << 20
	queuedPartitionBytes = 4 << 20
	// appenders limits the partitions of a source that use the database concurrently.
	appenders = 4
	// topicsInterval is the time between two checks for topics that appeared, vanished or were created again.
	topicsInterval = 15 * time.Second
	// topicsTimeout limits one such check.
	topicsTimeout = 30 * time.Second
	// pollTime limits the wait for records, so that offsets are committed even if no records arrive.
	pollTime = time.Second
	// commitInterval is the time between two commits of the consumer group's offsets. commitTimeout limits one commit.
	commitInterval = 2 * time.Second
	commitTimeout  = 5 * time.Second
	// leaveTimeout limits the request to leave the consumer group. If the group does not receive it, it waits for the
	// session timeout before it reassigns the partitions.
	leaveTimeout = 3 * time.Second
	// unread is the offset from which a partition is fetched while its position is unknown. It is beyond the end of any
	// partition, so such a fetch returns no record.
	unread = int64(1) << 62
)

// errTopics ends the run of a reader if a topic vanished or was created again: a Kafka client never reads a topic that
// was created again.
var errTopics = errors.New("a topic vanished or was made again")

// place names a partition.
type place struct {
	topic     string
	partition int32
}

// topic is a topic of a source.
type topic struct {
	id         uuid.UUID
	partitions int32
	missed     bool // the last check did not find the topic
}

// reader reads a source until its topics change.
type reader struct {
	source *policy.TopicSource
	into   source.Appender
	admin  *kgo.Client // for requests about topics and offsets
	client *kgo.Client // for fetches
	every  time.Duration
	old    partitions // partitions that "from: latest" applies to
	// valueType is the type of the records' values. It is nil unless the envelope is protobuf.
	valueType protoreflect.MessageDescriptor
	unpacker  *unpacker
	schemas   *registry.Registry // nil if the source has none

	ctx  context.Context
	end  context.CancelCauseFunc
	work sync.WaitGroup

	trouble atomic.Bool // an error of the whole source was reported

	using chan struct{} // one element for each partition that uses the database
	look  chan struct{} // wakes the check for topics
	room  chan struct{} // woken when records were stored and their memory is free

	mu         sync.Mutex
	topics     map[string]topic
	refused    map[string]error // why topics cannot be read
	partitions map[place]*partition
	begun      []*partition // partitions whose position is known and that the next poll begins to fetch
	queued     int          // memory of queued records, in bytes
	stopPoll   context.CancelFunc
	commits    map[string]map[int32]kgo.EpochOffset // offsets that are not committed yet
	committed  time.Time
	// noOriginals is the time until which the reader fetches no record to which a dead letter refers.
	noOriginals time.Time
}

// Read reads a source until ctx is done, or until the cluster's topics cannot be listed.
func (b *Broker) Read(ctx context.Context, s *policy.TopicSource, into source.Appender) error {
	return b.read(ctx, s, into, topicsInterval)
}

func (b *Broker) read(ctx context.Context, s *policy.TopicSource, into source.Appender, every time.Duration) error {
	admin, err := b.client(s.Cluster)
	if err != nil {
		return err
	}
	opts, err := options(b.policy.Sources.Clusters[s.Cluster])
	if err != nil {
		return err
	}
	for {
		err := b.readTopics(ctx, s, into, admin.Client, opts, every)
		if ctx.Err() != nil {
			return nil //nolint:nilerr // the reading was ended
		}
		if !errors.Is(err, errTopics) {
			return err
		}
	}
}

// readTopics reads with one client, until ctx is done or reading fails. It returns errTopics if a topic has vanished or
// was created again.
func (b *Broker) readTopics(
	ctx context.Context, s *policy.TopicSource, into source.Appender, admin *kgo.Client, opts []kgo.Opt,
	every time.Duration,
) error {
	r := &reader{
		source: s, into: into, admin: admin, every: every, unpacker: b.unpacker,
		schemas: b.registries[s.Registry],
		using:   make(chan struct{}, appenders), look: make(chan struct{}, 1), room: make(chan struct{}, 1),
		topics: map[string]topic{}, refused: map[string]error{}, partitions: map[place]*partition{},
		commits: map[string]map[int32]kgo.EpochOffset{},
	}
	var err error
	if r.valueType, err = valueType(s); err != nil {
		return fmt.Errorf("source %s: %w", s.Name, err)
	}
	r.ctx, r.end = context.WithCancelCause(ctx)
	defer r.end(nil)
	opts = append(slices.Clip(opts),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.KeepControlRecords(), // control records move the position past the end of a transaction
		kgo.FetchMaxBytes(fetchBytes), kgo.FetchMaxPartitionBytes(partitionBytes),
		kgo.MaxConcurrentFetches(fetches), kgo.FetchMaxWait(fetchWait),
		kgo.WithDecompressor(b.unpacker),
		kgo.ConsumeResetOffset(kgo.NoResetOffset()), // partition.position decides instead, and records lost offsets
		kgo.MetadataMinAge(time.Second), kgo.MetadataMaxAge(2*topicsInterval),
	)
	if s.ConsumerGroup != "" {
		opts = append(opts, kgo.ConsumerGroup(s.ConsumerGroup), kgo.Balancers(kgo.CooperativeStickyBalancer()),
			kgo.DisableAutoCommit(),
			kgo.OnPartitionsAssigned(func(_ context.Context, client *kgo.Client, assigned map[string][]int32) {
				r.assign(client, assigned)
			}),
			kgo.OnPartitionsRevoked(r.revoke),
			kgo.OnPartitionsLost(func(_ context.Context, _ *kgo.Client, lost map[string][]int32) { r.drop(lost) }),
			kgo.AdjustFetchOffsetsFn(ignoreCommitted))
	}
	found, err := r.listTopics()
	if err != nil {
		r.report(source.Partition{Partition: source.Unknown}, err)
		return err
	}
	r.report(source.Partition{Partition: source.Unknown}, nil)
	r.old = b.partitionsBefore(s.Name, found)
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return fmt.Errorf("cluster %s: %w", s.Cluster, err)
	}
	r.client = client
	defer r.close()
	r.consume(found)
	r.run(r.watchTopics)
	return r.poll()
}

// run runs f in a goroutine of the reader. A panic ends the reader; the caller of Read starts it again.
func (r *reader) run(f func()) {
	r.work.Go(func() {
		if err := background.Guard(func() error { f(); return nil }); err != nil {
			r.end(err)
		}
	})
}

// ignoreCommitted keeps partitions from starting at the offset that the group has committed: the position in the
// database counts.
func ignoreCommitted(
	_ context.Context, offsets map[string]map[int32]kgo.Offset,
) (map[string]map[int32]kgo.Offset, error) {
	for _, partitions := range offsets {
		for number := range partitions {
			partitions[number] = kgo.NewOffset().At(unread)
		}
	}
	return offsets, nil
}

// close ends the run: it stops the work and waits until the work has stopped. If the source has a consumer group, close
// commits the last offsets and leaves the group, so that other members get the partitions.
func (r *reader) close() {
	r.end(nil)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.ctx), leaveTimeout)
	defer cancel()
	if r.source.ConsumerGroup != "" {
		r.commitSync(ctx)
		_ = r.client.LeaveGroupContext(ctx)
	}
	r.client.Close()
	r.work.Wait()
}

// poll hands fetched records to their partitions.
func (r *reader) poll() error {
	for {
		r.waitForRoom()
		ctx, cancel := context.WithTimeout(r.ctx, pollTime)
		r.beginFetches(cancel)
		fetched := r.client.PollRecords(ctx, 0)
		cancel()
		if r.ctx.Err() != nil {
			return context.Cause(r.ctx)
		}
		fetched.EachTopic(func(t kgo.FetchTopic) {
			for _, p := range t.Partitions {
				r.receive(t.Topic, t.TopicID, p)
			}
		})
		r.commit()
	}
}

// waitForRoom waits until enough queued records have been stored.
func (r *reader) waitForRoom() {
	for {
		r.mu.Lock()
		full := r.queued > queuedBytes
		r.mu.Unlock()
		if !full {
			return
		}
		select {
		case <-r.room:
		case <-r.ctx.Done():
			return
		}
	}
}

// beginFetches starts fetching the partitions whose position has become known since the last poll. It runs between two
// polls, so that no record from before a seek arrives after it. stopPoll ends the poll that follows.
func (r *reader) beginFetches(stopPoll context.CancelFunc) {
	seeks, first := map[string]map[int32]kgo.EpochOffset{}, map[string]map[int32]kgo.Offset{}
	places := map[string][]int32{}
	r.mu.Lock()
	r.stopPoll = stopPoll
	for _, p := range r.begun {
		if r.partitions[p.place()] != p { // the reader lost the partition meanwhile
			continue
		}
		p.reading, p.paused = true, false
		if r.source.ConsumerGroup == "" && !p.added {
			p.added = true
			set(first, p.place(), kgo.NewOffset().At(p.next))
		} else {
			set(seeks, p.place(), kgo.EpochOffset{Epoch: -1, Offset: p.next})
		}
		places[p.id.Topic] = append(places[p.id.Topic], p.id.Partition)
	}
	r.begun = nil
	r.mu.Unlock()
	if len(places) == 0 {
		return
	}
	r.client.SetOffsets(seeks)
	r.client.AddConsumePartitions(first)
	r.client.ResumeFetchPartitions(places)
}

// set sets the value of a partition.
func set[T any](values map[string]map[int32]T, at place, value T) {
	if values[at.topic] == nil {
		values[at.topic] = map[int32]T{}
	}
	values[at.topic][at.partition] = value
}

// receive queues the records that were fetched from a partition. It drops records of partitions that the reader does
// not read, and ends the run if the topic was created again.
func (r *reader) receive(name string, id uuid.UUID, fetched kgo.FetchPartition) {
	if name == "" { // an error of the whole client
		err := fetched.Err
		if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded) {
			r.trouble.Store(true)
			r.report(source.Partition{Partition: source.Unknown}, err)
		}
		return
	}
	r.mu.Lock()
	p := r.partitions[place{name, fetched.Partition}]
	if p == nil || !p.reading {
		r.mu.Unlock()
		return
	}
	if id != uuid.Nil && id != p.id.TopicID {
		r.mu.Unlock()
		r.end(errTopics)
		return
	}
	pause := p.receive(fetched)
	if !p.working && (len(p.queue) > 0 || p.failure != nil) {
		p.working = true
		r.run(p.work)
	}
	r.mu.Unlock()
	if pause {
		r.client.PauseFetchPartitions(map[string][]int32{name: {fetched.Partition}})
	}
	if errors.Is(fetched.Err, kerr.UnknownTopicID) || errors.Is(fetched.Err, kerr.UnknownTopicOrPartition) {
		wake(r.look)
	}
}

// assign starts reading partitions. A partition is not fetched before its position is known.
func (r *reader) assign(client *kgo.Client, assigned map[string][]int32) {
	client.PauseFetchPartitions(assigned)
	if r.trouble.Swap(false) {
		r.report(source.Partition{Partition: source.Unknown}, nil)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, partitions := range assigned {
		for _, number := range partitions {
			p := &partition{
				r:  r,
				id: source.Partition{Cluster: r.source.Cluster, Topic: name, TopicID: r.topics[name].id, Partition: number},
			}
			p.ctx, p.cancel = context.WithCancel(r.ctx) //nolint:fatcontext // each partition has its own
			r.partitions[p.place()] = p
			r.run(p.begin)
		}
	}
}

// revoke stops reading partitions that the group assigns to another member.
func (r *reader) revoke(ctx context.Context, _ *kgo.Client, revoked map[string][]int32) {
	if len(revoked) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	r.commitSync(ctx)
	r.drop(revoked)
}

// drop removes partitions and their queued records. If a batch of them is being stored, the position in the database
// keeps it from being stored twice.
func (r *reader) drop(lost map[string][]int32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, partitions := range lost {
		for _, number := range partitions {
			at := place{name, number}
			if p := r.partitions[at]; p != nil {
				p.cancel()
				p.clear()
				delete(r.partitions, at)
				delete(r.commits[name], number)
			}
		}
	}
}

// commit commits the positions to the group every commitInterval. Tools that show the lag read them; dlqd does not.
func (r *reader) commit() {
	r.mu.Lock()
	if len(r.commits) == 0 || time.Since(r.committed) < commitInterval {
		r.mu.Unlock()
		return
	}
	offsets := r.commits
	r.commits, r.committed = map[string]map[int32]kgo.EpochOffset{}, time.Now()
	r.mu.Unlock()
	r.run(func() {
		ctx, cancel := context.WithTimeout(r.ctx, commitTimeout)
		defer cancel()
		r.write(ctx, offsets)
	})
}

func (r *reader) commitSync(ctx context.Context) {
	r.mu.Lock()
	offsets := r.commits
	r.commits = map[string]map[int32]kgo.EpochOffset{}
	r.mu.Unlock()
	if len(offsets) > 0 {
		r.write(ctx, offsets)
	}
}

// write commits offsets to the group. Offsets that the group refuses are committed again with later ones.
func (r *reader) write(ctx context.Context, offsets map[string]map[int32]kgo.EpochOffset) {
	r.client.CommitOffsetsSync(ctx, offsets,
		func(_ *kgo.Client, _ *kmsg.OffsetCommitRequest, response *kmsg.OffsetCommitResponse, err error) {
			if err == nil {
				for _, t := range response.Topics {
					for _, p := range t.Partitions {
						err = errors.Join(err, kerr.ErrorForCode(p.ErrorCode))
					}
				}
			}
			if err == nil {
				return
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			for name, partitions := range offsets {
				for number, offset := range partitions {
					at := place{name, number}
					if _, later := r.commits[name][number]; !later && r.partitions[at] != nil {
						set(r.commits, at, offset)
					}
				}
			}
		})
}

// watchTopics checks regularly whether topics have changed.
func (r *reader) watchTopics() {
	ticker := time.NewTicker(r.every)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-r.look:
		case <-r.ctx.Done():
			return
		}
		found, err := r.listTopics()
		if err != nil {
			r.trouble.Store(true)
			r.report(source.Partition{Partition: source.Unknown}, err)
			continue
		}
		if r.trouble.Swap(false) {
			r.report(source.Partition{Partition: source.Unknown}, nil)
		}
		r.consume(found)
	}
}

// listTopics returns the source's topics that the cluster has now. It leaves out topics for which the cluster returns
// an error, and records the error in refused.
func (r *reader) listTopics() (map[string]topic, error) {
	ctx, cancel := context.WithTimeout(r.ctx, topicsTimeout)
	defer cancel()
	request := kmsg.NewPtrMetadataRequest() // without names: all topics
	if !slices.ContainsFunc(r.source.Topics, func(name string) bool { return strings.Contains(name, "*") }) {
		for _, name := range r.source.Topics {
			named := kmsg.NewMetadataRequestTopic()
			named.Topic = new(name)
			request.Topics = append(request.Topics, named)
		}
	}
	response, err := request.RequestWith(ctx, r.admin)
	if err != nil {
		return nil, fmt.Errorf("cluster %s: listing topics: %w", r.source.Cluster, err)
	}
	found := map[string]topic{}
	for _, t := range response.Topics {
		if t.Topic == nil || !r.source.Topics.Match(*t.Topic) {
			continue
		}
		err := kerr.ErrorForCode(t.ErrorCode)
		r.refuse(*t.Topic, err)
		if err == nil {
			id := uuid.UUID(t.TopicID)
			if id == uuid.Nil { // before Kafka 2.8 topics have no id; derive one, because positions are stored by id
				id = uuid.NewSHA1(uuid.NameSpaceURL, []byte("kafka-topic:"+*t.Topic))
			}
			found[*t.Topic] = topic{id: id, partitions: int32(len(t.Partitions))}
		}
	}
	return found, nil
}

// refuse reports that a topic cannot be read, or that it can be read again.
func (r *reader) refuse(name string, err error) {
	r.mu.Lock()
	before := r.refused[name]
	delete(r.refused, name)
	if err != nil {
		r.refused[name] = err
	}
	r.mu.Unlock()
	if err != nil || before != nil {
		r.report(source.Partition{Topic: name, Partition: source.Unknown}, err)
	}
}

// consume starts reading new topics and partitions. It ends the run if a known topic was created again, or was not
// found in two checks.
func (r *reader) consume(found map[string]topic) {
	added := map[string][]int32{}
	r.mu.Lock()
	for name, known := range r.topics {
		now, ok := found[name]
		refused := r.refused[name]
		missed := !ok && (refused == nil || errors.Is(refused, kerr.UnknownTopicOrPartition))
		if ok && now.id != known.id || missed && known.missed {
			r.mu.Unlock()
			r.end(errTopics)
			return
		}
		known.missed = missed
		r.topics[name] = known
	}
	for name, now := range found {
		for number := r.topics[name].partitions; number < now.partitions; number++ {
			added[name] = append(added[name], number)
		}
		now.partitions = max(now.partitions, r.topics[name].partitions)
		r.topics[name] = now
	}
	r.mu.Unlock()
	switch {
	case len(added) == 0:
	case r.source.ConsumerGroup == "":
		r.assign(r.client, added)
	default:
		r.client.AddConsumeTopics(slices.Collect(maps.Keys(added))...)
	}
}

// report records an error of a topic, or of the whole source; nil clears it.
func (r *reader) report(of source.Partition, err error) {
	of.Cluster = r.source.Cluster
	progress := source.Progress{
		Partition: of, Source: r.source.Name, State: source.StateReading,
		Next: source.Unknown, End: source.Unknown, Start: source.Unknown,
	}
	if err != nil {
		progress.State, progress.Error = source.StateFailing, err.Error()
	}
	r.into.Progress(progress)
}

// wake sends to a channel with a buffer of one element. If the buffer is full, it does nothing.
func wake(channel chan struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}
