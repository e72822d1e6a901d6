package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
)

// versionInterval is how often to check whether changed files have been committed.
const versionInterval = 2 * time.Second

// publishTimeout limits publishing the policy to the database.
const publishTimeout = 10 * time.Second

// Reload reads the policy again and puts all of it in force, or none of it: if a file is invalid or missing, the old
// policy stays in force, and log, health and metrics report the error.
func (s *Server) Reload(ctx context.Context) error {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	old := s.policy()
	next, err := policy.Load(s.config.Source)
	if err == nil {
		err = s.checkMissingFiles(old, next)
	}
	if err == nil {
		err = s.config.CheckSources(next)
	}
	var planner *strategy.Planner
	if err == nil {
		planner, err = strategy.NewPlanner(next, s.conditions)
	}
	if err != nil {
		s.reloadErr.Store(&err)
		s.metrics.Reloads.WithLabelValues("error").Inc()
		s.logger.Error("reloading the policy failed; the old one stays in force", "policy", old.Version(), "error", err)
		return err
	}
	s.reloadErr.Store(nil)
	s.planner.Store(planner)
	if rules := s.rules(); len(next.Access.Authentication) == 0 && len(rules.Ways) > 0 {
		s.logger.Error("access.yaml no longer configures authentication; the previous ways apply until a restart",
			"authentication", rules.Ways)
	}
	s.publishPolicy(ctx)
	s.metrics.Reloads.WithLabelValues("ok").Inc()
	s.logger.Info("policy reloaded", "from", old.Version(), "to", next.Version(), "changes", len(policy.Diff(old, next)))
	s.logSecrets(old, next)
	if s.queues != nil {
		s.queues.Wake()
	}
	return nil
}

// logSecrets logs each destination whose signing secrets a reload changed, without the secrets.
func (s *Server) logSecrets(old, next *policy.Policy) {
	for _, name := range slices.Sorted(maps.Keys(next.Destinations)) {
		former, d := old.Destinations[name], next.Destinations[name]
		if former == nil || former.Secret == d.Secret {
			continue
		}
		event := "signing secrets changed"
		total, added := d.SecretsSince(former)
		if added > 0 {
			event = "new signing secret in force"
		}
		s.logger.Info(event, "destination", name, "secrets", total, "added", added, "path",
			cmp.Or(d.SecretFile, next.Where("retry-policies", "destinations."+name+".secret")))
	}
}

// missingFilesError is the error of a reload if files from which the policy in force was read are missing or empty.
type missingFilesError struct{ files string }

func (e *missingFilesError) Error() string {
	return e.files + ": missing or empty; restore it. To use the built-in defaults instead, commit the removal in Git, " +
		"write {} to the file, or restart dlqd"
}

// checkMissingFiles returns an error if files from which old was read are missing in next, unless their removal is
// committed in Git. A committed removal is deliberate, such as the revert of the commit that added the file.
func (s *Server) checkMissingFiles(old, next *policy.Policy) error {
	if missing := old.Gone(next); missing != "" && !s.config.Source.Committed() {
		return &missingFilesError{missing}
	}
	return nil
}

// reloadCommitted reloads the policy if its files have been committed since they were last loaded or refused. A commit
// changes no file, so [policy.Watch] does not notice it.
func (s *Server) reloadCommitted(ctx context.Context) error {
	removed := false
	if err := s.reloadErr.Load(); err != nil {
		_, missing := errors.AsType[*missingFilesError](*err)
		if !missing && s.config.Source.Env == "" { // without its directory, an environment is unknown
			_, err := os.Stat(s.config.Source.Dir)
			missing = errors.Is(err, fs.ErrNotExist)
		}
		removed = missing && s.config.Source.Committed()
	}
	if removed || s.policy().Committed() {
		return s.Reload(ctx)
	}
	return nil
}

// publishPolicy writes to the database which data is sensitive, the policy's version, its approval rules, the work that
// replay runs skip, where jobs have ordering keys, and the policy's sources and feeds. After a failure,
// [Server.attachmentLoop] calls it again.
func (s *Server) publishPolicy(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, publishTimeout)
	defer cancel()
	p := s.policy()
	approvals, err := p.Access.Approvals.Published()
	skips, invalidSkips := json.Marshal(p.Skips())
	keys, invalidKeys := json.Marshal(p.OrderingKeys())
	if err = errors.Join(err, invalidSkips, invalidKeys); err == nil {
		protected := s.store.Protect(ctx, p.Data.SensitiveColumns, p.Data.Masked())
		if protected == nil {
			s.published.Store(p)
		}
		err = errors.Join(protected, s.store.PublishPolicy(ctx, p.Version(), approvals, skips, keys),
			s.sourceStore().Publish(ctx))
	}
	if failed := s.unpublished.Swap(err != nil); err != nil && !failed {
		s.logger.Error("publishing the policy's masking and approval rules to the database failed and is retried; "+
			"dlqd's role must own its schema", "error", err)
	}
}

// draft returns the planner of the policy with text in place of one of its files. Its errors name the policy's files
// without their directory on this machine.
func (s *Server) draft(file, text string) (*strategy.Planner, error) {
	next, err := s.policy().Draft(s.config.Source, file, text)
	if err == nil {
		err = s.checkMissingFiles(s.policy(), next)
	}
	if err == nil {
		var planner *strategy.Planner
		if planner, err = strategy.NewPlanner(next, s.conditions); err == nil {
			return planner, nil
		}
	}
	message := strings.TrimPrefix(err.Error(), "policy "+cmp.Or(s.config.Source.Dir, "(built in)")+": ")
	if dir := s.config.Source.Dir; dir != "" {
		message = strings.ReplaceAll(message, filepath.Clean(dir)+string(filepath.Separator), "")
	}
	return nil, errors.New(message)
}
