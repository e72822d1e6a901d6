package source

import (
	"context"
	"errors"
	"time"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source/internal/dbsqlc"
)

// Reading is the state of a source: the totals of its partitions.
type Reading struct {
	Name       string     `json:"name" doc:"Name of the source in the policy."`
	Cluster    string     `json:"cluster" doc:"Name of the cluster in the policy."`
	Queue      string     `json:"queue" doc:"Queue of its entries."`
	State      string     `json:"state" enum:"reading,caught_up,failing,waiting,paused,removed" doc:"What its readers do. waiting: no process reads it. removed: the policy has no such source any more."`
	Partitions int64      `json:"partitions" doc:"Partitions that are read."`
	Failing    int64      `json:"failing" doc:"Partitions and topics that fail."`
	Lag        int64      `json:"lag" doc:"Offsets that are not read yet."`
	Records    int64      `json:"records" doc:"Records that were stored."`
	Holes      int64      `json:"holes" doc:"Offsets that had no record."`
	Lost       int64      `json:"lost" doc:"Offsets that the broker did not have any more, or that were skipped."`
	Error      string     `json:"error,omitempty" doc:"The error that has lasted longest."`
	MovedAt    *time.Time `json:"movedAt,omitempty" doc:"When a position last moved."`
	PausedAt   *time.Time `json:"pausedAt,omitempty" doc:"When it was paused."`
	PausedBy   string     `json:"pausedBy,omitempty" doc:"Who paused it."`
}

// PartitionStatus is the state of one partition that a source reads. If a report concerns a whole topic or source, it
// is the state of that topic or source.
type PartitionStatus struct {
	Source    string     `json:"source" doc:"Name of the source in the policy."`
	Cluster   string     `json:"cluster" doc:"Name of the cluster in the policy."`
	Topic     string     `json:"topic" doc:"Name of the topic; empty for the source itself."`
	Partition int32      `json:"partition" doc:"Partition of the topic; -1 for the topic or the source itself."`
	Queue     string     `json:"queue" doc:"Queue of its entries."`
	State     string     `json:"state" enum:"reading,caught_up,failing,waiting,paused,removed" doc:"What its reader does. waiting: no process reads it. removed: the policy has no such source any more."`
	Next      *int64     `json:"next,omitempty" doc:"The offset that is read next."`
	Start     *int64     `json:"start,omitempty" doc:"The oldest offset that the broker has."`
	Lag       *int64     `json:"lag,omitempty" doc:"Offsets that are not read yet."`
	Records   int64      `json:"records" doc:"Records that were stored."`
	Holes     int64      `json:"holes" doc:"Offsets that had no record."`
	Lost      int64      `json:"lost" doc:"Offsets that the broker did not have any more, or that were skipped."`
	Error     string     `json:"error,omitempty" doc:"The last error."`
	ErrorAt   *time.Time `json:"errorAt,omitempty" doc:"When that error occurred first."`
	At        time.Time  `json:"at" doc:"When the reader reported this."`
	MovedAt   *time.Time `json:"movedAt,omitempty" doc:"When the position last moved."`
}

// List returns the sources in the caller's scope.
func (s *Store) List(ctx context.Context) ([]Reading, error) {
	rows, err := dbsqlc.New(s.DB).ListSources(ctx)
	if err != nil {
		return nil, err
	}
	list := make([]Reading, len(rows))
	for i := range rows {
		r := &rows[i]
		list[i] = Reading{
			Name: r.Name, Cluster: r.Cluster, Queue: r.Queue, State: StateCaughtUp, Partitions: r.Partitions,
			Failing: r.Failing, Lag: r.Lag, Records: r.Records, Holes: r.Holes, Lost: r.Lost, Error: r.Error,
			MovedAt: timeOf(r.MovedAt), PausedBy: r.PausedBy, PausedAt: timeOf(r.PausedAt),
		}
		switch {
		case r.Removed:
			list[i].State = StateRemoved
		case r.Paused:
			list[i].State = StatePaused
		case !r.Running:
			list[i].State = StateWaiting
		case r.Failing > 0:
			list[i].State = StateFailing
		case r.Lag > 0:
			list[i].State = StateReading
		}
	}
	return list, nil
}

// Partitions returns the state of the partitions of a source, or of all (""), in the caller's scope.
func (s *Store) Partitions(ctx context.Context, source string) ([]PartitionStatus, error) {
	rows, err := dbsqlc.New(s.DB).ListPartitions(ctx, source)
	if err != nil {
		return nil, err
	}
	list := make([]PartitionStatus, len(rows))
	for i := range rows {
		r := &rows[i]
		list[i] = PartitionStatus{
			Source: r.Source, Cluster: r.Cluster, Topic: r.Topic, Partition: r.Partition, Queue: r.Queue, State: r.State,
			Records: r.Records, Holes: r.Holes, Lost: r.Lost, Error: r.Error, At: r.At, MovedAt: timeOf(r.MovedAt),
		}
		if r.NextOffset >= 0 {
			list[i].Next = &r.NextOffset
			if lag := r.EndOffset - r.NextOffset; r.EndOffset >= 0 {
				lag = max(lag, 0)
				list[i].Lag = &lag
			}
		}
		if r.StartOffset >= 0 {
			list[i].Start = &r.StartOffset
		}
		if r.Error != "" {
			list[i].ErrorAt = &r.ErrorAt
		}
	}
	return list, nil
}

// timeOf returns nil for the Unix epoch, which stands for no time.
func timeOf(at time.Time) *time.Time {
	if at.Unix() == 0 {
		return nil
	}
	return &at
}

// Publish writes the policy's sources and feeds to the database.
func (s *Store) Publish(ctx context.Context) error {
	params := dbsqlc.PublishSourcesParams{Names: []string{}, Clusters: []string{}, Queues: []string{}}
	p := s.Policy()
	for _, name := range p.SourceNames() {
		source := p.Sources.Sources[name]
		params.Names = append(params.Names, name)
		params.Clusters = append(params.Clusters, source.Cluster)
		params.Queues = append(params.Queues, source.Queue)
	}
	feeds := dbsqlc.PublishFeedsParams{Names: []string{}, Clusters: []string{}, Topics: []string{}}
	for _, name := range p.FeedNames() {
		feed := p.Sources.Feeds[name]
		feeds.Names = append(feeds.Names, name)
		feeds.Clusters = append(feeds.Clusters, feed.Cluster)
		feeds.Topics = append(feeds.Topics, feed.Topic)
	}
	return errors.Join(dbsqlc.New(s.DB).PublishSources(ctx, params), dbsqlc.New(s.DB).PublishFeeds(ctx, feeds))
}

// see records that this process reads sources, and returns the state of each source: whether it is paused, and how
// often it was changed.
func (s *Store) see(ctx context.Context, of policy.Sources) ([]dbsqlc.SeeSourcesRow, error) {
	names := make([]string, 0, len(of.Sources))
	for name := range of.Sources {
		names = append(names, name)
	}
	return dbsqlc.New(s.DB).SeeSources(ctx, names)
}

// Pause stops the reading of a source in all processes. It returns false if it is paused already.
func (s *Store) Pause(ctx context.Context, source, actor, note string) (changed bool, err error) {
	changed, err = dbsqlc.New(s.DB).PauseSource(ctx, dbsqlc.PauseSourceParams{
		Source: source, Actor: actor, Note: note, Origin: deadletter.Origin(ctx),
	})
	return changed, deadletter.AsMoveError(err)
}

// Resume resumes the reading of a source. It returns false if it is not paused.
func (s *Store) Resume(ctx context.Context, source, actor, note string) (changed bool, err error) {
	changed, err = dbsqlc.New(s.DB).ResumeSource(ctx, dbsqlc.ResumeSourceParams{
		Source: source, Actor: actor, Note: note, Origin: deadletter.Origin(ctx),
	})
	return changed, deadletter.AsMoveError(err)
}

// Rewound is the result of moving a position.
type Rewound struct {
	Before int64 `json:"before" doc:"The position before."`
	Next   int64 `json:"next" doc:"The offset that is read next."`
}

// Rewind moves the position of a partition back or, if skip is true, forward.
func (s *Store) Rewind(
	ctx context.Context, source, topic string, partition int32, offset int64, skip bool, actor, note string,
) (*Rewound, error) {
	row, err := dbsqlc.New(s.DB).RewindSource(ctx, dbsqlc.RewindSourceParams{
		Source: source, Topic: topic, Partition: partition, ToOffset: offset, IsSkip: skip, Actor: actor, Note: note,
		Origin: deadletter.Origin(ctx),
	})
	if err != nil {
		return nil, deadletter.AsMoveError(err)
	}
	return &Rewound{row.Before, row.Next}, nil
}

// Trial has some records of a source, read without storing anything.
type Trial struct {
	Source string       `json:"source"`
	Topics []TrialTopic `json:"topics"`
}

// TrialTopic is a topic of a Trial.
type TrialTopic struct {
	Topic      string        `json:"topic"`
	Partitions int           `json:"partitions"`
	Offsets    int64         `json:"offsets"` // number of offsets from the oldest record to the end
	Allowed    []string      `json:"allowed,omitempty"`
	Error      string        `json:"error,omitempty"`
	Records    []TrialRecord `json:"records,omitempty"`
}

// TrialRecord is a record as it would be stored, without its value and headers.
type TrialRecord struct {
	Partition int32  `json:"partition"`
	Offset    int64  `json:"offset"`
	Kind      string `json:"kind"`
	Form      string `json:"form"`
	Size      int    `json:"size"`
	Type      string `json:"type,omitempty"`
	Error     string `json:"error,omitempty"`
	Malformed string `json:"malformed,omitempty"`
	// NotDecoded says why a value with a schema is not decoded.
	NotDecoded string `json:"notDecoded,omitempty"`
	Original   string `json:"original,omitempty"`
	ReplayTo   string `json:"replayTo,omitempty"` // if empty, dlqd would refuse its redelivery
}

// Try describes a record as it would be stored.
func Try(p *policy.Policy, source *policy.TopicSource, topic string, partition int32, r *Record) TrialRecord {
	form, _ := r.payload(source.MaxRecordBytes, false)
	target, _ := p.TargetOf(source, topic, r.Failure.Original.Topic)
	kind := r.Failure.Kind
	if kind == "" {
		kind = source.KindOf(topic, r.Failure.Original.Topic)
	}
	return TrialRecord{
		Partition: partition, Offset: r.Offset, Kind: kind, Form: form, Size: len(r.Value), Type: r.Failure.Error.Type,
		Error: r.Failure.Error.Message, Malformed: r.Failure.Malformed, Original: r.Failure.Original.Topic,
		ReplayTo: target, NotDecoded: r.NotDecoded,
	}
}

// TryWithin tries a source for a limited time.
func TryWithin(
	ctx context.Context, broker Broker, source *policy.TopicSource, records int, limit time.Duration,
) (*Trial, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return broker.Try(ctx, source, records)
}
