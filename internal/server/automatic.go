package server

import (
	"context"
	"time"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
)

// logMode says in which mode dlqd starts, and what that means.
func (s *Server) logMode(ctx context.Context) {
	river := "River here is dlqd's own"
	if s.attached {
		river = "River here is an application's: jobs that fail are captured and judged; dlqd automatic on has them sent again by themselves, a person's replay works"
	}
	s.logger.Info(river, "automatic", s.automaticHealth(ctx).Detail, "parts", s.parts())
}

// restoredHealth says whether the database was restored: a person must look.
func (s *Server) restoredHealth() api.Part {
	if hold := s.guard.Load().Held(); hold != nil {
		return api.Part{Name: "restored", Detail: "the database was restored, and what dlqd would send is held since " + hold.At.UTC().Format(time.RFC3339) + ": " + hold.Note}
	}
	return api.Part{Name: "restored", OK: true, Detail: "the server is the one that dlqd knows"}
}

// automaticHealth says whether dead letters are redelivered by themselves, or observed. Neither is a fault.
func (s *Server) automaticHealth(ctx context.Context) api.Part {
	part := api.Part{Name: "automatic", OK: true, Detail: "unknown"}
	if switches, err := automatic.Read(ctx, s.store.DB(), s.policy()); err == nil { // what is wrong is another part's to say
		part.Detail = switches.Summary()
	}
	return part
}
