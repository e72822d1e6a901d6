package server

import (
	"context"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
)

// automaticHealth says whether dead letters are redelivered by themselves, or observed. Neither is a fault.
func (s *Server) automaticHealth(ctx context.Context) api.Part {
	part := api.Part{Name: "automatic", OK: true, Detail: "unknown"}
	if switches, err := automatic.Read(ctx, s.store.DB(), s.policy()); err == nil { // what is wrong is another part's to say
		part.Detail = switches.Summary()
	}
	return part
}
