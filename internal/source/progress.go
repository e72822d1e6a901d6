package source

import (
	"context"

	"github.com/dlqd/dlqd/internal/source/internal/dbsqlc"
)

// place identifies the partition, topic or source that a reader's report describes.
type place struct {
	source, topic string
	partition     int32
}

// Progress implements [Appender].
func (s *Store) Progress(p Progress) {
	if p.Stack != "" {
		s.Logger.Error("reading a partition panicked", "source", p.Source, "topic", p.Topic,
			"partition", p.Partition.Partition, "error", p.Error, "stack", p.Stack)
	}
	p.Error, p.Stack = storable(p.Error), ""
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.progress == nil {
		s.progress = map[place]Progress{}
	}
	s.progress[place{p.Source, p.Topic, p.Partition.Partition}] = p
}

// writeProgress writes the reports of readers since the last call. It leaves out sources that the policy no longer has.
// If it fails, reports are lost.
func (s *Store) writeProgress(ctx context.Context) error {
	s.mu.Lock()
	reports := s.progress
	s.progress = nil
	s.mu.Unlock()
	bySource := map[string]*dbsqlc.ReportProgressParams{}
	for _, r := range reports {
		source := s.Policy().Sources.Sources[r.Source]
		if source == nil {
			continue // a new policy no longer has the source
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
		params.Starts = append(params.Starts, r.Start)
	}
	for _, params := range bySource {
		if err := dbsqlc.New(s.DB).ReportProgress(ctx, *params); err != nil {
			return err
		}
	}
	return nil
}
