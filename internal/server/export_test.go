package server

import "github.com/dlqd/dlqd/internal/background"

// Loops are what the server runs in the background.
func (s *Server) Loops() *background.Group { return &s.loops }
