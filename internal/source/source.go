// Package source stores dead letters that come from elsewhere than River: records of a broker's
// topics. It knows no broker: a [Broker] reads and publishes. See docs/sources.md.
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

// Headers of records that dlqd publishes. A [Store] adds them to a [Message]; a broker does not.
const (
	HeaderEntry    = "dlqd-entry"       // the entry's id
	HeaderDelivery = "dlqd-delivery-id" // the redelivery's id; equal in a repeat of the same redelivery
	HeaderReplay   = "dlqd-replay"      // the replay run's id
	HeaderFeed     = "dlqd-feed"        // the feed's name, of records that a feed publishes
)

// Unknown is the partition or offset of an [Origin] that an envelope does not name.
const Unknown = -1

// ErrUnpublishable is wrapped by errors of Publish that a repeat cannot help: the record is too
// large for its topic, or the topic does not exist.
var ErrUnpublishable = errors.New("the record cannot be published")

// Header is one header of a record. A key may occur more than once.
type Header struct {
	Key   string
	Value []byte // nil is null
}

// Partition identifies the partition that a batch was read from. A topic that is deleted and made
// again has another TopicID.
type Partition struct {
	Cluster   string // name of the cluster in the policy
	Topic     string
	TopicID   uuid.UUID
	Partition int32
}

// Batch is what a reader read from a partition, from offset First to the one before Next.
type Batch struct {
	Partition

	Source  string // name of the source in the policy
	First   int64  // the position that the reader had before
	Next    int64  // the position after the batch; what lies between two records are holes
	Records []Record
	// Start permits to make the position, because the reader begins to read the partition at First.
	// A position that exists is not changed by it.
	Start bool
	// Lost says that the broker no longer has the offsets from First to Next, for example because
	// retention removed them. Such a batch has no records.
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
	// Payload, if not nil, is the value as JSON, decoded by the reader (Avro, Protobuf). Without it,
	// the store shows a value that is JSON or text.
	Payload json.RawMessage
}

// Failure is what an envelope says about a record: where it failed, and why. Empty fields are not
// known.
type Failure struct {
	Kind     string // of the entry; empty: the policy's source says it
	Group    string // the consumer group that failed
	Node     string // the node of a pipeline that failed
	Original Origin // where the record was when it failed
	// Error is the last error. Its attempt is set by the store.
	Error    riverdlq.Error
	Trace    string    // stack trace
	At       time.Time // when it failed; zero: the record's time
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
	TopicID   uuid.UUID // of the topic that has the name now; zero if not known
	Partition int32     // Unknown if not known
	Offset    int64     // Unknown if not known
}

// Appender stores what a reader reads. [Store] implements it.
type Appender interface {
	// Position returns the offset to read next. Without ok the partition was never read, or its
	// position was lost: the reader begins where the policy's source says (From), with a batch whose
	// Start is set.
	Position(ctx context.Context, partition Partition) (next int64, ok bool, err error)
	// Append stores a batch and moves the position to batch.Next, in one transaction, or in several if the
	// database refuses a record: after an error, the reader asks for the position. It skips records
	// below the position, which are stored already. It returns a *PositionError if the batch begins
	// above the position, or if there is no position and batch.Start is false: then the reader reads
	// again from there. After an error of another kind, the same batch may be sent again.
	Append(ctx context.Context, batch Batch) (Stored, error)
	// Progress records the state of a reader's partition, at most once a second. It does not wait for
	// the database and reports no error.
	Progress(progress Progress)
}

// Stored says what Append stored.
type Stored struct {
	Next     int64 // the position now; it may be above batch.Next if another reader was faster
	Entries  int   // new entries
	Returned int   // records that dlqd had published and that failed again
	Skipped  int   // records that were stored before
}

// PositionError refuses a batch that does not begin at its partition's position.
type PositionError struct {
	Partition

	First int64 // the batch's first offset
	Next  int64 // the position to read from
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

// States of a partition that no reader reports.
const (
	StateWaiting = "waiting" // no process reads it
	StatePaused  = "paused"
	StateRemoved = "removed" // the policy has no such source any more
)

// StatePublishing is the state of a feed that has entries to publish.
const StatePublishing = "publishing"

// Progress is the state of a reader. TopicID may be zero and Partition Unknown if the error concerns
// the whole source or topic.
type Progress struct {
	Partition

	Source string
	State  string // StateReading, StateCaughtUp or StateFailing
	Next   int64  // the position
	End    int64  // the offset after the partition's last record; Unknown if not known
	Start  int64  // the oldest offset that the broker has; Unknown if not known
	Error  string // last error, without secrets; empty clears it
	Stack  string // if the error is a panic: for the log
}

// Target is where a record is published.
type Target struct {
	Source    string // name of the source in the policy
	Cluster   string // name of the cluster in the policy
	Topic     string
	Partition int32 // of the original; Unknown: by key. A partition that does not exist now: by key.
}

// Message is a record to publish. Headers are those of the stored record, without earlier ones of dlqd,
// followed by those of dlqd. The broker removes those of its envelopes, and records Time in a header of
// its own: the published record has the time of its publication.
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

// Publisher publishes records.
type Publisher interface {
	// Publish returns after all in-sync replicas have acknowledged the record. Its error says nothing
	// about whether the record was stored, unless it wraps ErrUnpublishable. An error may be a
	// *riverdlq.Error, whose class and type are then used.
	Publish(ctx context.Context, target Target, message Message) (Acknowledgement, error)
}

// Broker is the client of a kind of broker. It is made for one policy, and closed once no reader of
// that policy is left.
type Broker interface {
	Publisher

	// OffsetAt returns the offset of the first record of a partition whose time is at or after a time: that of the
	// next record to come if there is none.
	OffsetAt(ctx context.Context, source *policy.TopicSource, topic string, partition int32, at time.Time) (int64, error)
	// Try connects as a reader does and reads some records, without storing anything.
	Try(ctx context.Context, source *policy.TopicSource, records int) (*Trial, error)
	// Read reads a source until ctx is done or reading is not possible. It returns nil if ctx is done.
	// The caller starts it again after a pause. An error of one topic or partition does not end it: it
	// is reported with Progress.
	Read(ctx context.Context, source *policy.TopicSource, into Appender) error
	// Committed returns the offsets that a consumer group has committed: those that it reads next. A group
	// that does not exist has none. It only reads.
	Committed(ctx context.Context, cluster, group string) ([]Committed, error)
	// Groups returns the consumer groups of topics: those with a member that reads the topic, or with an offset
	// in it that the broker has not forgotten. It only reads.
	Groups(ctx context.Context, cluster string, topics []string) (map[string][]string, error)
	// Close disconnects, after Read and Publish have returned.
	Close()
}

// Open makes the client of the policy's clusters. It does not connect.
type Open func(p *policy.Policy) (Broker, error)

// Check returns an error if the policy has sources or feeds and the program was built without Kafka, that is, if open
// is nil.
func (open Open) Check(p *policy.Policy) error {
	if open != nil || len(p.Sources.Sources)+len(p.Sources.Feeds) == 0 {
		return nil
	}
	return errors.New("sources.yaml: this program has no Kafka: use dlqd-full of the same release")
}
