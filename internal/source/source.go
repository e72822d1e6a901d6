// Package source stores dead letters that come from other systems than River: records of a broker's topics. The package
// knows no broker: a [Broker] reads and publishes. See docs/sources.md.
package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

// Headers of records that dlqd publishes. A [Store] adds them to a [Message]; a [Broker] adds none of them.
const (
	HeaderEntry    = "dlqd-entry"       // the entry's id
	HeaderDelivery = "dlqd-delivery-id" // the redelivery's id; equal in a repeat of the same redelivery
	HeaderReplay   = "dlqd-replay"      // the replay run's id
	HeaderFeed     = "dlqd-feed"        // the feed's name, of records that a feed publishes
)

// Unknown stands for a partition or offset of an [Origin] that the envelope does not have.
const Unknown = -1

// ErrUnpublishable is wrapped by errors of Publish that a repeat cannot help: the record is too
// large for its topic, or the topic does not exist.
var ErrUnpublishable = errors.New("the record cannot be published")

// ErrGone is wrapped by errors of Original if the topic does not have the record any more.
var ErrGone = errors.New("gone")

// Header is one header of a record. A key may occur more than once.
type Header struct {
	Key   string
	Value []byte // nil is null
}

// Partition identifies the partition from which a batch was read. If a topic is deleted and created again, its TopicID
// changes.
type Partition struct {
	Cluster   string // name of the cluster in the policy
	Topic     string
	TopicID   uuid.UUID
	Partition int32
}

// Batch has the records that a reader read from a partition, from offset First up to but not including Next.
type Batch struct {
	Partition

	Source  string // name of the source in the policy
	First   int64  // the reader's position before the batch
	Next    int64  // the position after the batch; offsets without a record are holes
	Records []Record
	// Start permits Append to create the position, because the reader begins to read the partition at First. An existing
	// position stays as it is.
	Start bool
	// Lost means that the broker no longer has the offsets from First to Next, for example because retention removed
	// them. Such a batch has no records.
	Lost bool
}

// Record is a dead letter that a reader read.
type Record struct {
	Offset  int64
	Time    time.Time
	Key     []byte // nil is null
	Value   []byte // nil is null
	Headers []Header
	Failure Failure
	// Payload, if not nil, is the value as JSON, which the reader decoded (Avro, Protobuf, JSON Schema). If it is nil, the
	// store shows the value if it is JSON or text.
	Payload json.RawMessage
	// NotDecoded, if not empty, says why a value with a schema is not decoded. Readers show it instead of the value.
	NotDecoded string
}

// Failure is the data about a failure in the envelope of a record. Empty fields are unknown.
type Failure struct {
	Kind     string // kind of the entry; if empty, the policy's source sets it
	Group    string // the consumer group that failed
	Node     string // the node of a pipeline that failed
	Original Origin // where the record was when it failed
	// Error is the last error. The store sets its attempt.
	Error    riverdlq.Error
	Trace    string    // stack trace
	At       time.Time // time of the failure; zero: the time of the record
	Attempts []Attempt // attempts before the last, oldest first
	// Malformed, if not empty, says why the envelope or the value does not decode. The entry gets the
	// class malformed.
	Malformed string
}

// Attempt is an earlier failed attempt.
type Attempt struct {
	At    time.Time
	Error string
	Trace string
}

// Origin is the place of a record.
type Origin struct {
	Topic     string
	TopicID   uuid.UUID // of the topic that has this name now; zero if unknown
	Partition int32     // Unknown if not known
	Offset    int64     // Unknown if not known
}

// Appender stores the records that a reader reads. [Store] implements it.
type Appender interface {
	// Position returns the offset to read next. ok is false if the partition was never read or its position was lost. The
	// reader then begins where the policy's source says (From), with a batch whose Start is set.
	Position(ctx context.Context, partition Partition) (next int64, ok bool, err error)
	// Append stores a batch and moves the position to batch.Next, in one transaction, or in several if the database
	// refuses a record. It skips records below the position: they are stored already. It returns a *PositionError if the
	// batch begins above the position, or if there is no position and batch.Start is false; the reader then reads again
	// from PositionError.Next. After any other error, part of the batch may be stored: the reader asks for the position,
	// and may send the same batch again.
	Append(ctx context.Context, batch Batch) (Stored, error)
	// Progress records the state of a reader's partition, at most once a second. It does not wait for
	// the database and reports no error.
	Progress(progress Progress)
}

// Stored is the result of Append.
type Stored struct {
	Next     int64 // the position now; above batch.Next if another reader was faster
	Entries  int   // new entries
	Returned int   // records that dlqd had published and that failed again
	Skipped  int   // records that were stored before
}

// PositionError is returned for a batch that does not begin at the position of its partition.
type PositionError struct {
	Partition

	First int64 // first offset of the batch
	Next  int64 // the position to read from, if Known
	Known bool  // false: there is no position
}

// Error implements error.
func (e *PositionError) Error() string {
	if !e.Known {
		return fmt.Sprintf("%s/%d of cluster %s: there is no position; the reader has to start again", e.Topic,
			e.Partition.Partition, e.Cluster)
	}
	return fmt.Sprintf("%s/%d of cluster %s: the batch begins at offset %d, the position is %d: read again from there",
		e.Topic, e.Partition.Partition, e.Cluster, e.First, e.Next)
}

// States of a partition's reader.
const (
	StateReading  = "reading"
	StateCaughtUp = "caught_up"
	StateFailing  = "failing"
)

// States of a partition that dlqd derives; readers do not report them.
const (
	StateWaiting = "waiting" // no process reads the partition
	StatePaused  = "paused"
	StateRemoved = "removed" // the policy no longer has the source
)

// StatePublishing is the state of a feed that has entries to publish.
const StatePublishing = "publishing"

// Progress is the state of a partition's reader. If an error concerns the whole source or topic, TopicID may be zero,
// and Partition is Unknown.
type Progress struct {
	Partition

	Source string
	State  string // StateReading, StateCaughtUp or StateFailing
	Next   int64  // the position
	End    int64  // the offset after the partition's last record; Unknown if not known
	Start  int64  // the oldest offset that the broker has; Unknown if not known
	Error  string // last error, without secrets; empty clears it
	Stack  string // stack of a panic, for the log
}

// Target is where a record is published.
type Target struct {
	Source    string // name of the source in the policy
	Cluster   string // name of the cluster in the policy
	Topic     string
	Partition int32 // partition of the original record; if it is Unknown or does not exist now, the key decides
}

// Message is a record to publish. Headers has the headers of the stored record, without headers that dlqd added
// earlier, followed by dlqd's headers for this publication. The broker removes the headers of its envelopes, and adds
// Time as a header, because the published record has the time of its publication.
type Message struct {
	Key     []byte // nil is null
	Value   []byte // nil is null
	Headers []Header
	Time    time.Time // of the stored record
}

// Acknowledgement is where the broker stored a published record.
type Acknowledgement struct {
	TopicID   uuid.UUID // zero if not known
	Partition int32
	Offset    int64
}

// Committed is the offset that a consumer group reads next in a partition.
type Committed struct {
	Topic     string
	Partition int32
	Offset    int64
}

// Publisher publishes records, and fetches those that have to be published and are not in the database.
type Publisher interface {
	// Publish returns after all in-sync replicas have acknowledged the record. If it returns an error that does not wrap
	// ErrUnpublishable, the record may or may not be stored. If the error is a *riverdlq.Error, its class and type are
	// used.
	Publish(ctx context.Context, target Target, message Message) (Acknowledgement, error)
	// Original returns the record at a place of a cluster, to which a dead letter of the time died refers. If the topic
	// does not have the record any more, the error wraps ErrGone.
	Original(ctx context.Context, cluster string, at Origin, died time.Time) (Message, error)
	// Encode returns the value of an edited payload. value is the value of the record, which a reader of the source
	// decoded: the edited value has the same schema. Errors are as those of Publish.
	Encode(ctx context.Context, source string, value []byte, edited json.RawMessage) ([]byte, error)
}

// Broker is the client of a kind of broker. It is created for one policy, and closed once no reader uses it.
type Broker interface {
	Publisher

	// OffsetAt returns the offset of the first record of a partition whose time is at or after a time. If there is no
	// such record, it returns the offset of the next record to come.
	OffsetAt(ctx context.Context, source *policy.TopicSource, topic string, partition int32, at time.Time) (int64, error)
	// Try connects as a reader does and reads some records. It stores nothing.
	Try(ctx context.Context, source *policy.TopicSource, records int) (*Trial, error)
	// Read reads a source until ctx is done or reading is not possible. It returns nil if ctx is done. After an error,
	// the caller calls Read again after a pause. An error of one topic or partition does not end Read; Read reports it
	// with Progress.
	Read(ctx context.Context, source *policy.TopicSource, into Appender) error
	// Committed returns the offsets that a consumer group has committed, that is, the offsets that the group reads next.
	// For a group that does not exist it returns none. It changes nothing at the broker.
	Committed(ctx context.Context, cluster, group string) ([]Committed, error)
	// Groups returns the consumer groups of each topic: groups with a member that reads the topic, and groups for which
	// the broker still has an offset in the topic. It changes nothing at the broker.
	Groups(ctx context.Context, cluster string, topics []string) (map[string][]string, error)
	// Close disconnects, after Read and Publish have returned.
	Close()
}

// Open returns a client for the policy's clusters. It does not connect.
type Open func(p *policy.Policy) (Broker, error)

// Check returns an error if the policy has sources or feeds and the program was built without Kafka, that is, if open
// is nil.
func (open Open) Check(p *policy.Policy) error {
	if open != nil || len(p.Sources.Sources)+len(p.Sources.Feeds) == 0 {
		return nil
	}
	return errors.New("sources.yaml: this program has no Kafka: use dlqd-full of the same release")
}
