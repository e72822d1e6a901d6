package kafka

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// A share group may copy no records into its topic of dead letters (KIP-1191). Such a dead letter is a reference: it
// has neither key nor value, and its headers name the place of the record that failed. dlqd fetches the record from
// that place.

const (
	// originalTimeout limits the fetch of one record, and originalsTimeout the fetches for a batch of dead letters. If a
	// batch takes longer, its reader fetches none for originalsPause, or a topic that does not answer would delay the
	// dead letters of others.
	originalTimeout  = 5 * time.Second
	originalsTimeout = 15 * time.Second
	originalsPause   = 30 * time.Second
	// clockSkew is how much later than its dead letter a record may seem to be written, by clocks that differ.
	clockSkew = time.Minute
	// contextOriginal is the key in an error's context of the reason why a reference is stored without its record.
	contextOriginal = "original"
)

// Original implements source.Publisher.
func (b *Broker) Original(
	ctx context.Context, cluster string, at source.Origin, died time.Time,
) (source.Message, error) {
	c, err := b.client(cluster)
	if err != nil {
		return source.Message{}, err
	}
	found := originals{client: c.Client, unpacker: b.unpacker}
	record, err := found.fetch(ctx, at, died)
	if err != nil {
		return source.Message{}, err
	}
	message := source.Message{Key: record.Key, Value: record.Value, Time: record.Timestamp}
	for _, header := range record.Headers {
		message.Headers = append(message.Headers, source.Header(header))
	}
	return message, nil
}

// originals fetches records by their place. It has the records of the last fetch, because several dead letters may
// refer to records of one batch.
type originals struct {
	client   *kgo.Client
	unpacker kgo.Decompressor

	place   place
	records []*kgo.Record
	spent   time.Duration // the time of all fetches
}

// fetch returns the record at a place whose dead letter is of the time died. If the topic does not have the record any
// more, the error wraps source.ErrGone.
func (o *originals) fetch(ctx context.Context, at source.Origin, died time.Time) (*kgo.Record, error) {
	from := place{at.Topic, at.Partition}
	if n := len(o.records); n == 0 || o.place != from || at.Offset < o.records[0].Offset ||
		at.Offset > o.records[n-1].Offset {
		began := time.Now()
		ctx, cancel := context.WithTimeout(ctx, originalTimeout)
		defer cancel()
		defer func() { o.spent += time.Since(began) }()
		records, err := o.fetchFrom(ctx, from, at.Offset)
		if err != nil {
			return nil, fmt.Errorf("fetching %s/%d at offset %d: %w", at.Topic, at.Partition, at.Offset, err)
		}
		o.place, o.records = from, records
	}
	i, found := slices.BinarySearchFunc(o.records, at.Offset, func(r *kgo.Record, offset int64) int {
		return cmp.Compare(r.Offset, offset)
	})
	switch {
	case !found || o.records[i].Attrs.IsControl():
		return nil, fmt.Errorf("%w: %s/%d has no record at offset %d any more", source.ErrGone, at.Topic, at.Partition,
			at.Offset)
	case o.records[i].Timestamp.After(died.Add(clockSkew)):
		return nil, fmt.Errorf("%w: %s/%d has a later record at offset %d: the topic was made again", source.ErrGone,
			at.Topic, at.Partition, at.Offset)
	}
	return o.records[i], nil
}

// fetchFrom returns the records of a partition from an offset on, up to the end of the batch with this offset and, if
// the batch is small, of some more. A share group may read uncommitted records, so fetchFrom does, too. If the
// partition does not have the offset, fetchFrom returns no record.
func (o *originals) fetchFrom(ctx context.Context, at place, offset int64) ([]*kgo.Record, error) {
	named := kmsg.NewMetadataRequestTopic()
	named.Topic = new(at.topic)
	metadata := kmsg.NewPtrMetadataRequest()
	metadata.Topics = []kmsg.MetadataRequestTopic{named}
	known, err := o.client.RequestCachedMetadata(ctx, metadata, topicsInterval)
	if err != nil {
		return nil, err
	}
	if len(known.Topics) != 1 {
		return nil, errors.New("the broker's answer has no topic")
	}
	topic := known.Topics[0]
	if err := kerr.ErrorForCode(topic.ErrorCode); errors.Is(err, kerr.UnknownTopicOrPartition) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	partition := slices.IndexFunc(topic.Partitions, func(p kmsg.MetadataResponseTopicPartition) bool {
		return p.Partition == at.partition
	})
	if partition < 0 {
		return nil, nil
	}
	of := kmsg.NewFetchRequestTopicPartition()
	of.Partition, of.FetchOffset, of.PartitionMaxBytes = at.partition, offset, partitionBytes
	in := kmsg.NewFetchRequestTopic()
	in.Topic, in.TopicID, in.Partitions = at.topic, topic.TopicID, []kmsg.FetchRequestTopicPartition{of}
	request := kmsg.NewPtrFetchRequest()
	request.MaxBytes, request.Topics = partitionBytes, []kmsg.FetchRequestTopic{in}
	response, err := request.RequestWith(ctx, o.client.Broker(int(topic.Partitions[partition].Leader)))
	if err != nil {
		return nil, err
	}
	if err := kerr.ErrorForCode(response.ErrorCode); err != nil {
		return nil, err
	}
	if len(response.Topics) != 1 || len(response.Topics[0].Partitions) != 1 {
		return nil, errors.New("the broker's answer has no partition")
	}
	fetched, _ := kgo.ProcessFetchPartition(kgo.ProcessFetchPartitionOpts{
		KeepControlRecords: true, Offset: offset, Topic: at.topic, Partition: at.partition,
	}, &response.Topics[0].Partitions[0], o.unpacker, nil)
	if errors.Is(fetched.Err, kerr.OffsetOutOfRange) {
		return nil, nil
	}
	return fetched.Records, fetched.Err
}

// complete gives a reference the key, the value and the headers of the record that failed, as if the share group had
// copied the record. If that is not possible, the error's context says why. complete returns the size of the record.
func (p *partition) complete(from *originals, record *source.Record) int {
	original := record.Failure.Original
	if p.r.source.Envelope != policy.EnvelopeShare || record.Key != nil || record.Value != nil ||
		original.Partition < 0 || original.Offset < 0 {
		return 0
	}
	err := errors.New("fetching records took too long before")
	if time.Now().After(p.r.originalsFrom()) {
		var found *kgo.Record
		if found, err = from.fetch(p.ctx, original, record.Time); err == nil {
			// Clone: slices of the unpacked batch would keep the batch in memory.
			record.Key, record.Value = bytes.Clone(found.Key), bytes.Clone(found.Value)
			headers := make([]source.Header, 0, len(found.Headers)+len(record.Headers))
			for _, header := range found.Headers {
				headers = append(headers, source.Header{Key: header.Key, Value: bytes.Clone(header.Value)})
			}
			record.Headers = append(headers, record.Headers...)
			record.NotDecoded = ""
			decode(p.ctx, p.r.schemas, p.r.source, record)
		}
		if from.spent > originalsTimeout || errors.Is(err, context.DeadlineExceeded) {
			p.r.pauseOriginals()
		}
		if err == nil {
			return size(found)
		}
	}
	if record.Failure.Error.Context == nil {
		record.Failure.Error.Context = map[string]any{}
	}
	record.Failure.Error.Context[contextOriginal] = err.Error()
	return 0
}

// originalsFrom returns the time from which this reader may fetch records to which dead letters refer.
func (r *reader) originalsFrom() time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.noOriginals
}

func (r *reader) pauseOriginals() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noOriginals = time.Now().Add(originalsPause)
}
