package server

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/reconcile"
)

// healthTimeout limits the database queries of a health check.
const healthTimeout = 2 * time.Second

// rollupsStaleAfter is the age above which health reports rollups as failed. It equals the limit of the alert
// RollupsLagging.
const rollupsStaleAfter = 5 * time.Minute

// figuresGrace is how long after its start a process ignores the age of figures. After an outage, figures are old until
// the loops have run once.
const figuresGrace = 15 * time.Second

// Ready returns an error if /readyz answers that requests should go to another process.
func (s *Server) Ready(ctx context.Context) error {
	if err := s.ready(); err != nil {
		return err
	}
	return s.reach(ctx)
}

// ready returns an error if requests should go to another process: this process is stopping, or dlqd was detached. The
// only other reason is an unreachable database, which reach checks. Any other problem affects all processes alike.
func (s *Server) ready() error {
	if s.stopping.Load() {
		return errors.New("stopping")
	}
	return s.idle()
}

// reach returns an error if the database does not answer or dlqd was detached. [Server.attachmentLoop] notices a detach
// only after up to two seconds, but a load balancer must send no request here once "dlqd detach" has returned.
func (s *Server) reach(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	installed, err := s.migrator().Capturing(ctx)
	if err != nil {
		s.logger.Error("not ready: the database does not answer", "error", err)
		return errors.New("the database does not answer")
	}
	if !installed {
		return errDetached
	}
	return nil
}

// queueHealth returns, by name, the health of the policy's queues and of other queues with open entries. It returns no
// queue if the database does not answer.
func (s *Server) queueHealth(ctx context.Context) []api.QueueHealth {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	queues := []api.QueueHealth{}
	sample, err := metrics.ReadSample(ctx, s.store.DB())
	if err != nil {
		return queues // the part "database" reports this error
	}
	sizes := sample.QueueSizes()
	p := s.policy()
	for _, name := range p.QueueNames() {
		if _, has := sizes[name]; !has {
			sizes[name] = metrics.Queue{}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(sizes)) {
		size, limits := sizes[name], p.Alert(name)
		reasons, warnings := limits.Judge(size.Open, size.Oldest)
		q := api.QueueHealth{
			Queue: name, Status: "up", Reasons: append([]string{}, reasons...), Warnings: append([]string{}, warnings...),
			Open: size.Open, OldestSeconds: size.Oldest.Seconds(),
			MaxOpen: int64(limits.MaxOpen), MaxAgeSeconds: limits.MaxAge.Seconds(),
		}
		if len(reasons) > 0 {
			q.Status = "down"
		}
		queues = append(queues, q)
	}
	return queues
}

// health returns the health of each part and loop that runs in this process.
func (s *Server) health(ctx context.Context) []api.Part {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	start := time.Now()
	database := api.Part{Name: "database", OK: true}
	if err := s.pool.Ping(ctx); err != nil {
		database.OK, database.Detail = false, "does not answer; see the log"
		s.logger.Error("health: the database does not answer", "error", err)
	} else {
		database.Detail = fmt.Sprintf("answered in %.1f ms", float64(time.Since(start).Microseconds())/1000)
	}
	parts := []api.Part{database}
	if s.embedded != nil {
		part := api.Part{Name: "embedded-postgres", OK: true, Detail: "runs"}
		select {
		case <-s.embedded.Exited():
			part.OK, part.Detail = false, "has exited"
		default:
		}
		parts = append(parts, part)
	}
	schema := api.Part{Name: "schema", OK: true}
	if database.OK {
		var err error
		if schema.Detail, err = s.migrator().Fit(ctx); err != nil {
			schema.OK, schema.Detail = false, err.Error()
		}
	} else {
		schema.OK, schema.Detail = false, "unknown"
	}
	parts = append(parts, schema, s.policyHealth(), s.accessHealth(), s.automaticHealth(ctx), s.restoredHealth(),
		s.captureHealth(ctx))
	if s.ingester != nil {
		messages, bytes := s.ingester.Pending()
		parts = append(parts, api.Part{
			Name: "ingest", OK: messages < int64(cmp.Or(s.config.MaxPending, ingest.DefaultMaxPending)) &&
				bytes < ingest.DefaultMaxPendingBytes,
			Detail: fmt.Sprintf("%d messages (%d bytes) wait for their commit", messages, bytes),
		})
	}
	if s.river != nil {
		part := api.Part{Name: "processing", OK: true, Detail: fmt.Sprintf("delivers %d queues", len(s.river.Worked()))}
		if shared := s.river.Shared(); len(shared) > 0 {
			part.Detail += "; other clients work " + strings.Join(shared, ", ") + ", which dlqd therefore does not deliver"
		}
		select {
		case <-s.river.Stopped():
			part.OK, part.Detail = false, "has stopped"
		default:
		}
		parts = append(parts, part)
	}
	for _, status := range s.loops.Statuses() {
		parts = append(parts, loopPart(&status))
	}
	if i := slices.IndexFunc(parts, func(p api.Part) bool { return p.Name == "replica" }); i >= 0 && s.replica != nil {
		parts[i].OK, parts[i].Detail = s.replica.Status()
	}
	s.checkAges(ctx, parts)
	return parts
}

// checkAges marks the loops "metrics" and "rollups" as failed if the figures that they update are too old. Any process
// may update the figures, so all processes report their age.
func (s *Server) checkAges(ctx context.Context, parts []api.Part) {
	if time.Since(s.began) < figuresGrace {
		return
	}
	sample, rollups, err := metrics.Ages(ctx, s.store.DB())
	if err != nil {
		return // the part "database" reports this error
	}
	for _, figures := range []struct {
		loop, name  string
		age, maxAge time.Duration
	}{
		{"metrics", "the sample of the database for the metrics", sample, metrics.StaleAfter},
		{"rollups", "the data of counters and analytics", rollups, rollupsStaleAfter},
	} {
		i := slices.IndexFunc(parts, func(p api.Part) bool { return p.Name == figures.loop })
		if i >= 0 && figures.age > figures.maxAge && s.idle() == nil {
			parts[i].OK, parts[i].Detail = false, fmt.Sprintf("%s is %s old", figures.name, figures.age.Truncate(time.Second))
		}
	}
}

func loopPart(status *background.Status) api.Part {
	part := api.Part{Name: status.Name, OK: status.Problem == ""}
	if !status.LastSuccess.IsZero() {
		at := status.LastSuccess.UTC()
		part.LastSuccess = &at
	}
	switch {
	case !part.OK:
		part.Detail = status.Problem
	case status.Idle != "":
		part.Detail = "idle: " + status.Idle
	case status.LastSuccess.IsZero():
		part.Detail = "started; no turn has succeeded yet"
	default:
		part.Detail = "last success " + status.LastSuccess.UTC().Format(time.RFC3339)
	}
	if status.OneProcess {
		part.Detail += "; runs in one process at a time"
	}
	return part
}

// captureHealth returns the health of capture. Capture is also healthy if an operator switched it off, or if the
// reconciler found failures that it had missed.
func (s *Server) captureHealth(ctx context.Context) api.Part {
	part := api.Part{Name: "capture", OK: true, Detail: "unknown"}
	status, err := reconcile.ReadCapture(ctx, s.store.DB())
	if err != nil {
		return part // other parts report this error
	}
	part.Detail = status.Summary()
	if problem := status.Problem(); problem != "" {
		part.OK, part.Detail = false, part.Detail+"; "+problem
	}
	return part
}

// policyHealth returns the version of the policy in force, and whether the last reload failed.
func (s *Server) policyHealth() api.Part {
	part := api.Part{Name: "policy", OK: true, Detail: "version " + s.policy().Version()}
	if s.unpublished.Load() {
		part.Detail += "; its masking and approval rules are not yet in force in the database"
	}
	if err := s.reloadErr.Load(); err != nil {
		part.OK = false
		part.Detail += " stays in force; the files are invalid: " + (*err).Error()
	}
	return part
}
