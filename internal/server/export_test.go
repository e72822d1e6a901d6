package server

import (
	"context"

	"github.com/dlqd/dlqd/internal/background"
)

// Loops returns the server's background loops.
func (s *Server) Loops() *background.Group { return &s.loops }

// ReloadCommitted reloads the policy after a commit.
func (s *Server) ReloadCommitted(ctx context.Context) error { return s.reloadCommitted(ctx) }
