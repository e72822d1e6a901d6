package source

import (
	"context"
	"time"

	"github.com/dlqd/dlqd/internal/source/internal/dbsqlc"
)

// place is what a report of a reader is about.
type place struct {
	source, topic string
	partition     int32
}

// Progress implements [Appender].
func (s *Store) Progress(p Progress) {
	p.Error = storable(p.Error)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.progress == nil {
		s.progress = map[place]Progress{}
	}
	s.progress[place{p.Source, p.Topic, p.Partition.Partition}] = p
}

// writeProgress writes what readers have reported since it was last called.
func (s *Store) writeProgress(ctx context.Context) error {
	s.mu.Lock()
	reports := s.progress
	s.progress = nil
	s.mu.Unlock()
	bySource := map[string]*dbsqlc.ReportProgressParams{}
	for _, r := range reports {
		source := s.Policy().Sources.Sources[r.Source]
		if source == nil {
			continue // the policy has changed
		}
		params := bySource[r.Source]
		if params == nil {
			params = &dbsqlc.ReportProgressParams{Source: r.Source, Cluster: source.Cluster, Queue: source.Queue}
			bySource[r.Source] = params
		}
		params.Topics = append(params.Topics, r.Topic)
		params.Partitions = append(params.Partitions, r.Partition.Partition)
		params.States = append(params.States, r.State)
		params.Nexts = append(params.Nexts, r.Next)
		params.Ends = append(params.Ends, r.End)
		params.Errors = append(params.Errors, r.Error)
	}
	for _, params := range bySource {
		if err := dbsqlc.New(s.DB).ReportProgress(ctx, *params); err != nil {
			return err
		}
	}
	return nil
}

// PartitionStatus is the state of one partition that a source reads, or of a topic or the whole source.
type PartitionStatus struct {
	Source    string     `json:"source" doc:"Name of the source in the policy."`
	Cluster   string     `json:"cluster" doc:"Name of the cluster in the policy."`
	Topic     string     `json:"topic" doc:"Name of the topic; empty for the source itself."`
	Partition int32      `json:"partition" doc:"Partition of the topic; -1 for the topic or the source itself."`
	Queue     string     `json:"queue" doc:"Queue of its entries."`
	State     string     `json:"state" enum:"reading,caught_up,failing" doc:"What its reader does."`
	Next      *int64     `json:"next,omitempty" doc:"The offset that is read next."`
	Lag       *int64     `json:"lag,omitempty" doc:"Offsets that are not read yet."`
	Records   int64      `json:"records" doc:"Records that were stored."`
	Holes     int64      `json:"holes" doc:"Offsets that had no record."`
	Lost      int64      `json:"lost" doc:"Offsets that the broker did not have any more."`
	Error     string     `json:"error,omitempty" doc:"The last error."`
	ErrorAt   *time.Time `json:"errorAt,omitempty" doc:"When that error occurred first."`
	At        time.Time  `json:"at" doc:"When the reader reported this."`
}

// List returns the state of the partitions of all sources in the caller's scope.
func (s *Store) List(ctx context.Context) ([]PartitionStatus, error) {
	rows, err := dbsqlc.New(s.DB).ListPartitions(ctx)
	if err != nil {
		return nil, err
	}
	list := make([]PartitionStatus, len(rows))
	for i := range rows {
		r := &rows[i]
		list[i] = PartitionStatus{
			Source: r.Source, Cluster: r.Cluster, Topic: r.Topic, Partition: r.Partition, Queue: r.Queue, State: r.State,
			Records: r.Records, Holes: r.Holes, Lost: r.Lost, Error: r.Error, At: r.At,
		}
		if r.NextOffset >= 0 {
			list[i].Next = &r.NextOffset
			if lag := r.EndOffset - r.NextOffset; r.EndOffset >= 0 {
				lag = max(lag, 0)
				list[i].Lag = &lag
			}
		}
		if r.Error != "" {
			list[i].ErrorAt = &r.ErrorAt
		}
	}
	return list, nil
}
