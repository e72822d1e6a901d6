package server

import (
	"context"
	"time"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
)

// sharedQueuesTimeout bounds the question which queues the application works.
const sharedQueuesTimeout = 2 * time.Second

// register tells the other processes on the database that this one is there, now and for as long as it runs.
func (s *Server) register(ctx context.Context) error {
	var worked func() []string
	if s.river != nil {
		worked = s.river.Worked
	}
	s.process = process.New(process.Config{
		Queries: s.store.Queries(), Name: postgres.ProcessName(), Version: api.Version, Parts: s.parts(), Queues: worked,
	})
	if err := s.process.Once(ctx); err != nil {
		return err
	}
	s.presence = s.process.Loop()
	s.loops.Add(s.presence)
	return nil
}

// warnOfSharedQueues says which queues this process works that the application's jobs are in. Clients of the application fetch
// every job of their queues, and fail a message for a kind that they do not know. It is advice: whatever fails here is only logged.
func (s *Server) warnOfSharedQueues(ctx context.Context) {
	if !s.attached || s.river == nil {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, sharedQueuesTimeout)
	defer cancel()
	queues, err := s.store.Queries().ApplicationQueues(ctx, s.river.Worked())
	if err != nil {
		s.logger.Warn("which queues the application works is not known", "error", err)
	}
	for _, queue := range queues {
		s.logger.Warn("the application's jobs are in this queue, too: its clients may fetch messages, and fail them for a kind that they do not know; deliver messages in queues of their own", "queue", queue)
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

// logMode says in which mode dlqd starts, what that means, and what the switches of automatic redelivery make of it.
func (s *Server) logMode(ctx context.Context) {
	automatic := s.automaticHealth(ctx).Detail
	if s.attached {
		s.logger.Info("mode: observing an application's River: jobs that fail are captured and judged, and sent again only by a person or where automatic is on", "river", "attached", "mode", "observing", "automatic", automatic, "parts", s.parts())
		return
	}
	s.logger.Info("mode: automatic on dlqd's own River: dead letters are sent again by their strategies", "river", "own", "mode", "automatic", "automatic", automatic, "parts", s.parts())
}
