package server

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
	"github.com/dlqd/dlqd/internal/restored"
)

// register tells the other processes on the database that this one is there, now and for as long as it runs, and compares the
// server with the one that dlqd ran on before. Nothing is sent before that, and no job of its may run: see process.Rescue.
func (s *Server) register(ctx context.Context) error {
	// A pool of their own for the two loops of process: if requests used up the common pool, other processes
	// would take this one for dead.
	config := s.pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = 2, 0, 0
	var err error
	if s.presencePool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	s.process = process.New(process.Config{
		DB: s.config.Schemas.Rendered(s.presencePool), Logger: s.logger,
		Name: postgres.ProcessName(), Version: api.Version, Parts: s.parts(),
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
	guard := restored.New(restored.Config{
		Schemas: s.config.Schemas, Process: s.process.ID(), Name: postgres.ProcessName(), Logger: s.logger,
	}, s.pool)
	if err := guard.Look(ctx, s.pool); err != nil {
		return fmt.Errorf("whether the database was restored: %w", err)
	}
	s.guard.Store(guard)
	s.loops.Add(s.presence, guard.Loop(), s.process.Rescue())
	return nil
}

// connected compares the server before a new connection is used: it may have been restored since the last one. A connection on which
// that fails is used all the same: each transaction that sends asks again (dlq.may_send), and health needs a connection.
func (s *Server) connected(ctx context.Context, conn *pgx.Conn) {
	guard := s.guard.Load()
	if guard == nil || s.idle() != nil {
		return
	}
	if err := guard.Look(ctx, conn); err != nil {
		s.logger.WarnContext(ctx, "whether the database was restored is not known", "error", err)
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
