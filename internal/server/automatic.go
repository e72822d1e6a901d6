package server

import (
	"context"
	"time"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
)

// logMode logs the mode in which dlqd starts.
func (s *Server) logMode(ctx context.Context) {
	river := "River belongs to dlqd"
	if s.attached {
		river = "River belongs to an application; \"dlqd automatic on\" enables automatic redelivery"
	}
	s.logger.Info(river, "automatic", s.automaticHealth(ctx).Detail, "parts", s.parts())
}

// restoredHealth reports a restored database as failed until an operator, who must check it, resumes sending.
func (s *Server) restoredHealth() api.Part {
	if hold := s.guard.Load().Held(); hold != nil {
		return api.Part{Name: "restored", Detail: "the database was restored; since " + hold.At.UTC().Format(time.RFC3339) +
			" dlqd holds what it may have sent before: " + hold.Note}
	}
	return api.Part{Name: "restored", OK: true, Detail: "no restore of the database is detected"}
}

// automaticHealth reports whether dead letters are redelivered automatically or only observed. Both
// are healthy.
func (s *Server) automaticHealth(ctx context.Context) api.Part {
	part := api.Part{Name: "automatic", OK: true, Detail: "unknown"}
	// If the switches cannot be read, other parts report the error.
	if switches, err := automatic.Read(ctx, s.store.DB(), s.policy()); err == nil {
		part.Detail = switches.Summary()
	}
	return part
}
