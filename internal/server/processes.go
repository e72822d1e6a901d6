package server

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
)

// newProcess is this process, in the eyes of the others.
func (s *Server) newProcess() *process.Process {
	return process.New(process.Config{
		Queries: s.store.Queries(), Name: postgres.ProcessName(), Version: api.Version, Parts: s.parts(), Queues: s.worked,
	})
}

// register tells the other processes on the database that this one is there, now and for as long as it runs.
func (s *Server) register(ctx, work context.Context) error {
	if err := s.process.Once(ctx); err != nil {
		return err
	}
	s.background.Go(func() {
		ticker := time.NewTicker(process.Interval)
		defer ticker.Stop()
		for {
			select {
			case <-work.Done():
				return
			case <-ticker.C:
			}
			s.announce(work)
		}
	})
	return nil
}

// announce tells the other processes what changed.
func (s *Server) announce(ctx context.Context) {
	if err := s.process.Once(ctx); err != nil && ctx.Err() == nil {
		s.logger.Error("other processes were not told that this one is there; the next round tries again", "error", err)
	}
}

// parts are what this process runs, by the names of their flags.
func (s *Server) parts() []string {
	var parts []string
	for _, part := range []struct {
		name string
		on   bool
	}{{"api", s.config.API}, {"process", s.config.Process}, {"dlq-workers", s.config.DLQWorkers}} {
		if part.on {
			parts = append(parts, part.name)
		}
	}
	return parts
}

// noteWorked notes which queues River's client works, for those who ask meanwhile.
func (s *Server) noteWorked(worked map[string]int) {
	names := slices.Sorted(maps.Keys(worked))
	s.workedQueues.Store(&names)
}

// worked are the queues whose messages this process delivers at the moment.
func (s *Server) worked() []string {
	if s.river == nil {
		return nil
	}
	select {
	case <-s.river.Stopped():
		return nil
	default:
		return *s.workedQueues.Load()
	}
}

// logMode says in which mode dlqd starts, and what that means.
func (s *Server) logMode() {
	if s.attached {
		s.logger.Info("mode: observing an application's River: jobs that fail are captured and judged, and sent again only by a person or where automatic is on", "river", "attached", "mode", "observing", "parts", s.parts())
		return
	}
	s.logger.Info("mode: automatic on dlqd's own River: dead letters are sent again by their strategies", "river", "own", "mode", "automatic", "parts", s.parts())
}
