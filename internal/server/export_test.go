package server

import "github.com/dlqd/dlqd/internal/background"

// Loops returns the server's background loops.
func (s *Server) Loops() *background.Group { return &s.loops }
