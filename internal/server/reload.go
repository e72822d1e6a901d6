package server

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/riverqueue/river"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
)

// settleTime gathers the changes of one checkout: files are written one after another.
const settleTime = 300 * time.Millisecond

// watchPolicy reads the policy again when its files change. A file system that tells nothing (some network ones) leaves
// it to SIGHUP.
func (s *Server) watchPolicy(ctx context.Context) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("policy: cannot watch files: %w", err)
	}
	dirs := []string{s.config.Source.Dir}
	if s.config.Source.Env != "" {
		dirs = append(dirs, filepath.Join(s.config.Source.Dir, policy.EnvironmentsDir, s.config.Source.Env))
	}
	for _, dir := range dirs {
		if err := watcher.Add(dir); err != nil {
			_ = watcher.Close()
			return fmt.Errorf("policy: cannot watch %s: %w", dir, err)
		}
	}
	s.background.Go(func() {
		defer func() { _ = watcher.Close() }()
		settle := time.NewTimer(0)
		<-settle.C
		for {
			select {
			case <-ctx.Done():
				return
			case event := <-watcher.Events:
				if event.Op != fsnotify.Chmod {
					settle.Reset(settleTime)
				}
			case err := <-watcher.Errors:
				s.logger.Warn("policy: watching files", "error", err)
			case <-settle.C:
				_ = s.Reload() // it says itself what went wrong
			}
		}
	})
	return nil
}

// Reload reads the policy again and puts it in force, all of it or nothing: where a file is wrong, the policy that was in
// force stays, and log, health and metrics say so.
func (s *Server) Reload() error {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	old := s.policy()
	next, err := policy.Load(s.config.Source)
	var planner *strategy.Planner
	if err == nil {
		planner, err = strategy.NewPlanner(next, s.conditions)
	}
	if err != nil {
		s.reloadErr.Store(&err)
		s.metrics.Reloads.WithLabelValues("error").Inc()
		s.logger.Error("policy: not reloaded; the old one stays in force", "in_force", old.Version(), "error", err)
		return err
	}
	s.reloadErr.Store(nil)
	s.planner.Store(planner)
	s.protect(context.Background()) //nolint:contextcheck // a reload is nobody's request
	s.metrics.Reloads.WithLabelValues("ok").Inc()
	s.logger.Info("policy: reloaded", "from", old.Version(), "to", next.Version(), "changes", len(policy.Diff(old, next)))
	select {
	case s.queuesChanged <- struct{}{}:
	default: // it will be looked at
	}
	return nil
}

// changeQueues has River's client work the queues of the policy in force, whenever that changes. Removing a queue waits
// for its running jobs, however long: meanwhile the others go on, and so do reloads.
func (s *Server) changeQueues(ctx context.Context, worked map[string]int) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.queuesChanged:
		}
		for again := true; again; {
			again = s.changeQueue(ctx, worked)
		}
	}
}

// changeQueue makes one change that is due, those that need not wait first. It reports whether it made one.
func (s *Server) changeQueue(ctx context.Context, worked map[string]int) bool {
	p := s.policy()
	for _, name := range p.QueueNames() {
		if _, known := worked[name]; known {
			continue
		}
		if err := s.river.Queues().Add(name, river.QueueConfig{MaxWorkers: p.Concurrency(name)}); err != nil {
			s.logger.Error("policy: a queue is not worked", "queue", name, "error", err)
		}
		worked[name] = p.Concurrency(name)
		return true
	}
	s.noteWorked(worked)
	s.announce(ctx)
	for name, concurrency := range worked {
		if p.Queues[name] != nil && p.Concurrency(name) == concurrency {
			continue
		}
		if err := s.river.Queues().Remove(ctx, name); err != nil {
			if ctx.Err() == nil {
				s.logger.Error("policy: a queue is worked as before", "queue", name, "error", err)
			}
			return false
		}
		delete(worked, name) // it is added again, if the policy has it still
		return true
	}
	return false
}

// policyHealth says which policy is in force, and whether it is the one in the files.
func (s *Server) policyHealth() api.Part {
	part := api.Part{Name: "policy", OK: true, Detail: "version " + s.policy().Version()}
	if err := s.reloadErr.Load(); err != nil {
		part.OK = false
		part.Detail += " stays in force; the files are wrong: " + (*err).Error()
	}
	return part
}
