package server

import (
	"context"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
)

// register tells the other processes on the database that this one is there, now and for as long as it runs. No job of
// its may run before: see process.Rescue.
func (s *Server) register(ctx context.Context) error {
	s.process = process.New(process.Config{
		DB: s.store.DB(), Name: postgres.ProcessName(), Version: api.Version, Parts: s.parts(), Logger: s.logger,
		Queues: func() []string {
			if s.river == nil {
				return nil
			}
			return s.river.Worked()
		},
	})
	if err := s.process.Once(ctx); err != nil {
		return err
	}
	s.presence = s.process.Loop()
	s.loops.Add(s.presence, s.process.Rescue())
	return nil
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
