package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
)

// versionInterval is how often to check whether changed files have been committed.
const versionInterval = 2 * time.Second

// protectTimeout limits publishing the policy to the database.
const protectTimeout = 10 * time.Second

// Reload reads the policy again and puts all of it in force, or none of it: if a file is invalid,
// the old policy stays in force, and log, health and metrics report it.
func (s *Server) Reload(ctx context.Context) error {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	old := s.policy()
	next, err := policy.Load(s.config.Source)
	if err == nil {
		err = goneError(old, next)
	}
	var planner *strategy.Planner
	if err == nil {
		planner, err = strategy.NewPlanner(next, s.conditions)
	}
	if err != nil {
		s.reloadErr.Store(&err)
		s.metrics.Reloads.WithLabelValues("error").Inc()
		s.logger.Error("policy: not reloaded; the old one stays in force", "policy", old.Version(), "error", err)
		return err
	}
	s.reloadErr.Store(nil)
	s.planner.Store(planner)
	if rules := s.rules(); len(next.Access.Authentication) == 0 && len(rules.Ways) > 0 {
		s.logger.Error("policy: access.yaml says no more how callers are known; they are as before, until a restart", "authentication", rules.Ways)
	}
	s.protect(ctx)
	s.metrics.Reloads.WithLabelValues("ok").Inc()
	s.logger.Info("policy: reloaded", "from", old.Version(), "to", next.Version(), "changes", len(policy.Diff(old, next)))
	if s.queues != nil {
		s.queues.Wake()
	}
	return nil
}

// goneError returns an error if files that old was read from are missing in next.
func goneError(old, next *policy.Policy) error {
	if gone := old.Gone(next); gone != "" {
		return fmt.Errorf("%s: gone, or empty, and without it the built-in defaults would be in force; put it back, or a file with {} in its place, or start dlqd anew", gone)
	}
	return nil
}

// protect publishes to the database which data is sensitive, the policy's version and its approval
// rules. After a failure, [Server.attachment] tries again.
func (s *Server) protect(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, protectTimeout)
	defer cancel()
	approvals, err := s.policy().Access.Approvals.Published()
	if err == nil {
		err = errors.Join(s.store.Protect(ctx, s.policy().Data.SensitiveColumns, s.policy().Data.Masked()), s.store.PublishPolicy(ctx, s.policy().Version(), approvals))
	}
	if failed := s.unpublished.Swap(err != nil); err != nil && !failed {
		s.logger.Error("policy: what it says is sensitive, or needs a second person, is not in force in the database, whose user must own dlqd's schema; it is tried again", "error", err)
	}
}

// draft returns the planner of the policy with text in place of one of its files. Its errors
// contain no path of this machine.
func (s *Server) draft(file, text string) (*strategy.Planner, error) {
	next, err := s.policy().Draft(s.config.Source, file, text)
	if err == nil {
		err = goneError(s.policy(), next)
	}
	if err == nil {
		var planner *strategy.Planner
		if planner, err = strategy.NewPlanner(next, s.conditions); err == nil {
			return planner, nil
		}
	}
	said := strings.TrimPrefix(err.Error(), "policy "+cmp.Or(s.config.Source.Dir, "(built in)")+": ")
	if dir := s.config.Source.Dir; dir != "" {
		said = strings.ReplaceAll(said, filepath.Clean(dir)+string(filepath.Separator), "")
	}
	return nil, errors.New(said)
}
