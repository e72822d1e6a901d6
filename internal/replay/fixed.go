package replay

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/version"
)

const (
	// fixesInterval is the time between two searches for failure groups whose fix is deployed.
	fixesInterval = 15 * time.Second
	// fixesAtOnce limits the groups of one search. The next search continues after the last of them.
	fixesAtOnce = 100
	// fixSample is the number of a group's oldest entries that are checked: a run starts only if the policy may send one
	// of them.
	fixSample = 1000
	// maxFixWait is the longest wait between tries to start a run that was refused. The first wait is fixesInterval, and
	// each further wait is twice as long, because each try costs a preview.
	maxFixWait = 15 * time.Minute
	// policyActor is the actor of runs that the policy starts.
	policyActor = "policy"
)

// FixedGroup is a failure group with the version that fixes it.
type FixedGroup struct {
	Queue       string `json:"queue"`
	Fingerprint string `json:"fingerprint"`
}

// record stores which run was started for the fix of this group. It returns a MoveError if the fix no longer runs. For
// a nil group, it does nothing.
func (g *FixedGroup) record(ctx context.Context, tx transaction, run uuid.UUID) error {
	if g == nil {
		return nil
	}
	if err := tx.SetForFix(ctx, run); err != nil {
		return err
	}
	isSet, err := tx.SetFix(ctx, dbsqlc.SetFixParams{Queue: g.Queue, Fingerprint: g.Fingerprint, Run: &run})
	if err == nil && !isSet {
		return &deadletter.MoveError{
			Kind: deadletter.ErrNotAllowed, Detail: "replay run not started: the fix for which it was requested does not run",
			Hint: "The version was rolled back, the group was marked again, or the request is not the policy's.",
		}
	}
	return err
}

// Fixes starts progressive replay runs of failure groups that are fixed in a version, once this version or a later one
// is deployed. It does so only in queues whose policy sets replayWhenFixed. Several processes may run Fixes: one of
// them starts the run of a group. If the policy requires a second person, Fixes requests approval instead of starting
// the run.
type Fixes struct {
	Replayer *Replayer
	Logger   *slog.Logger
	// MaySend, if not nil, is called in the transaction that starts a run (restored.Guard.MaySend).
	MaySend func(ctx context.Context, tx postgres.DB) (bool, error)

	after   []string // queue and fingerprint of the last group of the previous search; nil if that search reached the end
	refused map[FixedGroup]refusal
}

// refusal is the reason why the run of a group did not start, and the time of the next try.
type refusal struct {
	reason string
	wait   time.Duration // since the last try
	until  time.Time     // the next try
}

// Loop returns the loop that starts runs.
func (f *Fixes) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "fixes", Interval: fixesInterval, Timeout: turnTimeout, Patience: turnTimeout,
		Failing: "starting replay runs of fixed failure groups failed",
		Once:    background.Each(f.RunOnce),
	})
}

// RunOnce reads from completed jobs which versions work the queues of fixed groups. It then starts, or requests, a run
// for each group whose fix is deployed. One call reads at most fixesAtOnce groups, and the next call continues after
// them. If a run is refused, for example because of an open breaker, RunOnce logs the reason once and tries again after
// growing waits.
func (f *Fixes) RunOnce(ctx context.Context) error {
	if err := dbsqlc.New(f.Replayer.Store.DB()).LearnVersions(ctx); err != nil {
		return err
	}
	queues := f.Replayer.Planner().Policy().ReplaysWhenFixed()
	if len(queues) == 0 {
		return nil
	}
	groups, err := dbsqlc.New(f.Replayer.Store.DB()).FixedGroups(ctx, dbsqlc.FixedGroupsParams{
		Queues: queues, After: f.after, Most: fixesAtOnce,
	})
	if err != nil {
		return err
	}
	if f.after == nil && len(groups) < fixesAtOnce { // this search saw all groups
		maps.DeleteFunc(f.refused, func(g FixedGroup, _ refusal) bool {
			return !slices.ContainsFunc(groups, func(row dbsqlc.FixedGroupsRow) bool {
				return g == FixedGroup{row.Queue, row.Fingerprint}
			})
		})
	}
	f.after = nil
	if len(groups) == fixesAtOnce {
		last := &groups[fixesAtOnce-1]
		f.after = []string{last.Queue, last.Fingerprint}
	}
	var errs []error
	for i := range groups {
		g := &groups[i]
		if time.Now().Before(f.refused[FixedGroup{g.Queue, g.Fingerprint}].until) {
			continue
		}
		err := f.start(ctx, g)
		if refused, ok := errors.AsType[*deadletter.MoveError](err); ok {
			f.refuse(g, refused.Error())
			continue
		}
		if err == nil {
			delete(f.refused, FixedGroup{g.Queue, g.Fingerprint})
		}
		if err != nil && !errors.Is(err, errNotNow) && !postgres.IsLocked(err) && !postgres.IsCollision(err) {
			errs = append(errs, fmt.Errorf("failure group %s of queue %s: %w", g.Fingerprint, g.Queue, err))
		}
	}
	return errors.Join(errs...)
}

// refuse logs why the run of a group did not start, if that has changed, and delays the next try.
func (f *Fixes) refuse(g *dbsqlc.FixedGroupsRow, reason string) {
	if f.refused == nil {
		f.refused = map[FixedGroup]refusal{}
	}
	group := FixedGroup{g.Queue, g.Fingerprint}
	last, known := f.refused[group]
	next := refusal{reason: reason, wait: min(max(2*last.wait, fixesInterval), maxFixWait)}
	next.until = time.Now().Add(next.wait)
	f.refused[group] = next
	if known && last.reason == reason {
		return
	}
	f.Logger.Warn("replay run of a fixed failure group not started", "queue", g.Queue, "fingerprint", g.Fingerprint,
		"reason", reason)
}

// errNotNow means that the run must not start now, or that another process has started it.
var errNotNow = errors.New("not now")

func (f *Fixes) start(ctx context.Context, g *dbsqlc.FixedGroupsRow) error {
	filter, err := json.Marshal(map[string]any{
		"queue": []string{g.Queue}, "fingerprint": []string{g.Fingerprint},
		"before": g.FixDeployedAt.UTC().Format(time.RFC3339Nano),
	})
	if err != nil {
		return err
	}
	request := &Request{
		Filter: filter, Progressive: true, ForFix: &FixedGroup{g.Queue, g.Fingerprint},
		Act: deadletter.Act{Actor: policyActor, Note: "fixed in " + g.FixedIn + ", which is deployed"},
	}
	// Without an origin, the database regards a change as one of dlqd itself, which needs no approval. The scope lets the
	// operators of the queue see and approve the run.
	ctx = deadletter.WithOrigin(ctx, "policy, replayWhenFixed of queue "+g.Queue)
	scope, err := json.Marshal([]map[string][]string{{"queues": {g.Queue}, "kinds": {}}})
	if err != nil {
		return err
	}
	ctx = postgres.WithScope(ctx, string(scope))
	mayStart := func(tx transaction) error { return f.mayStart(ctx, tx, g, filter) }
	if err := inTx(ctx, f.Replayer.Store, mayStart); err != nil {
		return err // check before the preview, which costs more
	}
	run, err := f.Replayer.start(ctx, request, mayStart)
	switch {
	case errors.Is(err, deadletter.ErrApproval):
		return f.request(ctx, g, request)
	case err != nil:
		return err
	}
	f.Logger.Info("replay run of a fixed failure group started", "run", run.ID, "queue", g.Queue,
		"fingerprint", g.Fingerprint, "fixed_in", g.FixedIn)
	return nil
}

// request requests approval of the run of a group, if the run may start (mayStart).
func (f *Fixes) request(ctx context.Context, g *dbsqlc.FixedGroupsRow, request *Request) error {
	raw, err := json.Marshal(request)
	if err != nil {
		return err
	}
	return inTx(ctx, f.Replayer.Store, func(tx transaction) error {
		if err := f.mayStart(ctx, tx, g, request.Filter); err != nil {
			return err
		}
		id, err := tx.RequestReplay(ctx, dbsqlc.RequestReplayParams{
			Request: raw, Note: request.Act.Note, Actor: policyActor,
		})
		if err != nil {
			return err
		}
		if forecast, err := json.Marshal(request.Forecast); err != nil {
			return err
		} else if err := tx.ForecastApproval(ctx, dbsqlc.ForecastApprovalParams{ID: id, Forecast: forecast}); err != nil {
			return err
		}
		f.Logger.Info("replay run of a fixed failure group requested", "approval", id, "queue", g.Queue,
			"fingerprint", g.Fingerprint, "fixed_in", g.FixedIn)
		_, err = tx.SetFix(ctx, dbsqlc.SetFixParams{Queue: g.Queue, Fingerprint: g.Fingerprint, Request: &id})
		return err
	})
}

// mayStart locks the group's fix and returns nil if the run may start. It returns errNotNow if another process holds
// the lock, the run was already started, several versions of dlqd are running, MaySend returns false, automatic
// redelivery is stopped or being switched, or the policy may send none of the group's oldest entries.
func (f *Fixes) mayStart(ctx context.Context, tx transaction, g *dbsqlc.FixedGroupsRow, filter json.RawMessage) error {
	for _, may := range []func() (bool, error){
		func() (bool, error) {
			if f.MaySend == nil {
				return true, nil
			}
			return f.MaySend(ctx, tx.DB)
		},
		func() (bool, error) { return automatic.TryLock(ctx, tx.DB) },
		func() (bool, error) {
			return tx.TakeFix(ctx, dbsqlc.TakeFixParams{
				Queue: g.Queue, Fingerprint: g.Fingerprint, DeployedAt: g.FixDeployedAt, Program: version.String(),
			})
		},
		func() (bool, error) {
			replayable, err := tx.Replayable(ctx, filter)
			if err != nil {
				return false, err
			}
			ids, err := tx.FindIDs(ctx, dbsqlc.FindIDsParams{Filter: replayable, MaxEntries: fixSample})
			if err != nil {
				return false, err
			}
			held, err := notForPolicy(ctx, tx, f.Replayer.Planner().Policy(), filter, ids)
			return len(held) < len(ids), err
		},
	} {
		if ok, err := may(); err != nil {
			return err
		} else if !ok {
			return errNotNow
		}
	}
	return nil
}

// maySendFix reports whether a run that the policy started may send. It may not while automatic redelivery is stopped
// or being switched. If the fix is no longer deployed, maySendFix ends the run.
func (r *Runner) maySendFix(ctx context.Context, tx transaction, run uuid.UUID) (bool, error) {
	if runs, err := tx.FixRuns(ctx, run); err != nil {
		return false, err
	} else if !runs {
		const reason = "the fix no longer runs: its version was rolled back, or the group was marked again"
		r.logger.Warn("replay run of a fixed failure group ended", "run", run, "reason", reason)
		return false, tx.EndReplay(ctx, dbsqlc.EndReplayParams{ID: run, Status: "cancelled", Reason: reason})
	}
	if locked, err := automatic.TryLock(ctx, tx.DB); err != nil || !locked {
		return false, err
	}
	switches, err := automatic.Read(ctx, tx.DB, r.planner().Policy())
	return err == nil && switches.Stopped == nil, err
}

// notForPolicy returns the entries that a run started by the policy must leave out, with the reason of each: entries
// that need an operator, entries that an operator works on, entries that dlqd does not redeliver automatically, and
// entries of another failure group (they may have changed groups). filter is the filter of the run.
func notForPolicy(ctx context.Context, tx transaction, p *policy.Policy, filter json.RawMessage,
	ids []uuid.UUID,
) (map[uuid.UUID]string, error) {
	var of struct {
		Fingerprint []string `json:"fingerprint"`
	}
	if err := json.Unmarshal(filter, &of); err != nil {
		return nil, err
	}
	switches, err := automatic.Read(ctx, tx.DB, p)
	if err != nil {
		return nil, err
	}
	rows, err := tx.FixEntries(ctx, ids)
	if err != nil {
		return nil, err
	}
	reasons := map[uuid.UUID]string{}
	for i := range rows {
		if why := heldFromPolicy(&rows[i], of.Fingerprint, switches); why != "" {
			reasons[rows[i].ID] = why
		}
	}
	return reasons, nil
}

// heldFromPolicy returns why a run started by the policy must leave out an entry, or "".
func heldFromPolicy(e *dbsqlc.FixEntriesRow, fingerprints []string, switches *automatic.Switches) string {
	verdict := switches.Of(&automatic.Entry{
		Queue: e.Queue, Kind: e.Kind, Class: e.ErrorClass, JobKind: e.JobKind,
		Backfilled:    e.CapturedBy == automatic.CapturedByBackfill,
		SingleAttempt: e.MaxRetries == 1, Unparked: e.Rule == policy.RuleUnparked,
	})
	switch {
	case len(fingerprints) != 1 || e.Fingerprint != fingerprints[0]:
		return "it is in another failure group: " + e.Fingerprint
	case e.ParkedBy != "":
		return "an operator has it: parked by " + e.ParkedBy
	case e.AssignedTo != "":
		return "an operator has it: assigned to " + e.AssignedTo
	case e.InReview != "":
		return "an operator has it: in review by " + e.InReview
	case e.Rule == policy.RuleBackfilled || e.Rule == policy.RuleSingleAttempt || e.Rule == policy.RuleWorkerLost ||
		e.Rule == policy.RuleTooSlow:
		return "it needs an operator: rule " + e.Rule
	case verdict.ManualRule != "":
		return "it needs an operator: " + verdict.Reason
	case !verdict.On:
		return "dlqd does not redeliver it automatically: " + verdict.Reason
	}
	return ""
}
