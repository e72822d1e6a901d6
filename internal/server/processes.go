package server

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
	"github.com/dlqd/dlqd/internal/restored"
	"github.com/dlqd/dlqd/internal/version"
)

// register announces this process to the other processes for as long as it runs, and checks whether the database was
// restored. Both must happen before anything is sent and before a job runs; see process.Rescue.
func (s *Server) register(ctx context.Context) error {
	// The heartbeats and the rescue of messages have a pool of their own. If requests used up a common pool, other
	// processes would consider this one dead.
	config := s.pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = 2, 0, 0
	var err error
	if s.presencePool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return err
	}
	s.process = process.New(process.Config{
		DB: s.config.Schemas.Rendered(s.presencePool), Logger: s.logger,
		Name: postgres.ProcessName(), Version: version.String(), Parts: s.parts(),
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
	if err := guard.Check(ctx, s.pool); err != nil {
		return fmt.Errorf("check whether the database was restored: %w", err)
	}
	s.guard.Store(guard)
	s.loops.Add(s.presence, guard.Loop(), s.process.Rescue())
	return nil
}

// checkRestored checks, before a new connection is used, whether the database was restored. If the check fails, the
// connection is used anyway: health needs a connection, and each transaction that sends checks again (dlq.may_send).
func (s *Server) checkRestored(ctx context.Context, conn *pgx.Conn) {
	guard := s.guard.Load()
	if guard == nil || s.idle() != nil {
		return
	}
	if err := guard.Check(ctx, conn); err != nil {
		s.logger.WarnContext(ctx, "checking whether the database was restored failed", "error", err)
	}
}

// parts returns the names of the parts that run in this process, as the flags of "dlqd serve" name them.
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
