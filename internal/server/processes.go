package server

import (
	"context"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
)

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

// logMode says in which mode dlqd starts, and what that means.
func (s *Server) logMode(ctx context.Context) error {
	switches, err := automatic.Read(ctx, s.store.Queries(), s.policy())
	if err != nil {
		return err
	}
	river, mode := "own", "observing"
	if s.attached {
		river = "attached"
	}
	if switches.OnForAll() {
		mode = "automatic"
	}
	text := map[string]string{
		"own automatic":      "automatic on dlqd's own River: dead letters are sent again by their strategies",
		"own observing":      "observing on dlqd's own River: dead letters are judged, and sent again only by a person or where automatic is on",
		"attached automatic": "automatic on an application's River: jobs that fail are captured, judged, and sent again by their strategies, but where automatic is off",
		"attached observing": "observing an application's River: jobs that fail are captured and judged, and sent again only by a person or where automatic is on",
	}[river+" "+mode]
	s.logger.Info("mode: "+text, "river", river, "mode", mode, "parts", s.parts())
	if switches.Stopped != nil {
		s.logger.Warn(switches.Stopped.String())
	}
	return nil
}
