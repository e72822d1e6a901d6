package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"gonum.org/v1/gonum/mathext"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// A progressive run tests each failure group with a sequential test (Wald, 1945). From the share of successes, the test
// decides whether the cause of the group is fixed.
const (
	// fixedShare and brokenShare are the shares of successes between which the test decides.
	fixedShare, brokenShare = 0.95, 0.5
	// testError is the probability that the test decides wrongly, in either direction, and the error probability of
	// upperBound.
	testError = 0.05
	// boundFrom is the number of outcomes from which a group is also held if upperBound is below fixedShare.
	boundFrom = 100
	// DefaultStepDeadline is the time without an outcome after which a group with redeliveries in progress is held.
	DefaultStepDeadline = 15 * time.Minute
	// ProgressiveAbove is the number of entries above which the console, and the command line at a terminal, start a
	// progressive run unless told otherwise.
	ProgressiveAbove = 100
	// watchGap is the longest time between two turns in which a process still counts as watching a run. One turn takes
	// less.
	watchGap = turnTimeout
	// lostReplaced is how many lost redeliveries of a step are replaced by other entries, so that the test gets as many
	// outcomes as without the loss.
	lostReplaced = 5
	// outcomesAtOnce limits the outcomes that one transaction counts.
	outcomesAtOnce = 2000
)

// Weights of a success and of a failure, and the bounds of the weighted sum at which the test decides.
var (
	successWeight = math.Log(fixedShare / brokenShare)
	failureWeight = math.Log((1 - fixedShare) / (1 - brokenShare))
	fixedBound    = math.Log((1 - testError) / testError)
	brokenBound   = -fixedBound
)

// tally counts outcomes.
type tally struct{ succeeded, failed int64 }

func (t tally) of() int64 { return t.succeeded + t.failed }

// evidence returns the logarithm of the likelihood ratio: how much more likely the outcomes are in a fixed group than
// in a broken one.
func (t tally) evidence() float64 {
	return float64(t.succeeded)*successWeight + float64(t.failed)*failureWeight
}

// upperBound returns the exact (Clopper-Pearson) upper bound of the share of successes. If the true share were greater,
// the probability of so few successes would be less than testError.
func (t tally) upperBound() float64 {
	if t.failed == 0 {
		return 1
	}
	return mathext.InvRegIncBeta(float64(t.succeeded+1), float64(t.failed), 1-testError)
}

func (t tally) String() string {
	return fmt.Sprintf("%d of %d recovered, evidence %+.2f", t.succeeded, t.of(), t.evidence())
}

// breakerClosed is the condition that the destination of a group must meet, or the group is held.
var breakerClosed = &policy.Conditions{Breaker: new(true)}

// Moves of a group: see dlq.replay_group_move.
const (
	moveNext = "next"
	moveHold = "hold"
	moveStop = "stop"
	moveDone = "done"
)

// States of a group.
const (
	groupGoing   = "going"
	groupHeld    = "held"
	groupStopped = "stopped"
	groupDone    = "done"
	groupEnded   = "ended"
)

// stepNames are the names of the steps.
var stepNames = []string{"the canary", "the step to 10 %", "the step to 50 %", "the step to 100 %"}

func stepName(step int32) string { return stepNames[min(max(int(step), 0), len(stepNames)-1)] }

// group is a group of a progressive run with the outcomes that this turn counted.
type group struct {
	dbsqlc.RunGroupsRow

	counted bool             // this turn counted outcomes
	lost    int64            // failures that this turn counted and that say nothing about the group, see isLost
	stop    *tally           // the outcomes at which the test decided that the group is broken
	unknown map[string]int64 // new failures by fingerprint
	class   string           // class of one of these failures
}

// test returns the outcomes since the group's current test began.
func (g *group) test() tally { return tally{g.Succeeded - g.FromSucceeded, g.Failed - g.FromFailed} }

// underWay returns the number of redeliveries without a counted outcome.
func (g *group) underWay() int64 { return max(g.Sent-g.Succeeded-g.Failed, 0) }

// left returns the number of entries that are neither sent nor skipped.
func (g *group) left() int64 { return max(g.Entries-g.Skipped-g.Sent, 0) }

// count adds an outcome. It sets stop once so many outcomes are failures that the group must stop. isKnown reports
// whether an entry of the run was in this failure group before.
func (g *group) count(o *dbsqlc.TakeOutcomesRow, isKnown func(fingerprint string) bool) {
	g.counted, g.Quiet = true, 0
	switch o.Outcome {
	case "succeeded":
		g.Succeeded++
	case "skipped":
		g.Skipped++
	case "lost":
		g.Failed++
		g.FromFailed++ // the test ignores it
		g.lost++
	default:
		g.Failed++
		// If an entry had no failure group, its new failure may be the same as the old one, so it does not count as new.
		hadNone := g.Fingerprint == "" && g.Queue != ""
		if o.Fingerprint != "" && !hadNone && !isKnown(o.Fingerprint) {
			if g.unknown == nil {
				g.unknown = map[string]int64{}
			}
			g.unknown[o.Fingerprint]++
			g.class = o.ErrorClass
		}
	}
	if t := g.test(); g.stop == nil && t.evidence() <= brokenBound {
		g.stop = &t
	}
}

// decide returns the move of a group and its reason, or "". watched is how long this process has watched the run: a
// time in which dlqd did not run does not count as time without outcomes. unmet, if not empty, is the reason to hold
// the group: its destination is not available, or other deliveries or jobs became worse.
func (g *group) decide(watched, deadline time.Duration, unmet string) (move, reason string) {
	if g.State != groupGoing {
		return "", ""
	}
	test, step := g.test(), stepName(g.Step)
	if g.left() == 0 {
		if g.underWay() > 0 {
			return "", ""
		}
		reason = fmt.Sprintf("done: of %d sent, %d recovered and %d failed again; %d were skipped", g.Sent, g.Succeeded,
			g.Failed, g.Skipped)
		return moveDone, reason
	}
	switch {
	case len(g.unknown) > 0:
		return moveHold, "held in " + step + ": " + g.newFailures()
	case g.stop != nil:
		return moveStop, fmt.Sprintf("stopped in %s: %d of %d failed again, evidence %+.2f is below %+.2f: its cause is not "+
			"fixed", step, g.stop.failed, g.stop.of(), g.stop.evidence(), brokenBound)
	case test.of() >= boundFrom && test.upperBound() < fixedShare:
		return moveHold, fmt.Sprintf("held in %s: %d of %d recovered, a share of at most %.1f %%, below the %g %% of a fixed "+
			"cause", step, test.succeeded, test.of(), 100*test.upperBound(), 100*fixedShare)
	case unmet != "":
		return moveHold, "held in " + step + ": " + unmet
	case g.underWay() > 0:
		if min(g.Quiet, watched.Seconds()) > deadline.Seconds() {
			return moveHold, fmt.Sprintf("held in %s: no outcome for %s, although %d of %d sent are under way", step,
				deadline, g.underWay(), g.Sent)
		}
	case g.Sent < min(g.Quota, g.Entries-g.Skipped):
		// the step has entries left to send
	case test.evidence() >= fixedBound:
		return moveNext, fmt.Sprintf("goes on after %s: %s, at least %+.2f", step, test, fixedBound)
	default:
		return moveHold, fmt.Sprintf("held at the end of %s: %s, between %+.2f and %+.2f: undecided", step, test,
			brokenBound, fixedBound)
	}
	return "", ""
}

// newFailures describes failures in groups in which no entry of the run was at the start.
func (g *group) newFailures() string {
	total := int64(0)
	for _, n := range g.unknown {
		total += n
	}
	names := slices.Sorted(maps.Keys(g.unknown))
	others := ""
	if len(names) > 3 {
		names, others = names[:3], fmt.Sprintf(" and %d others", len(g.unknown)-3)
	}
	return fmt.Sprintf("%d of %d failed in a new way: failure group %s%s, class %s", total, g.Succeeded+g.Failed,
		strings.Join(names, ", "), others, g.class)
}

// mostHeld returns a reason to stop the run if most entries that are left belong to held or stopped groups; otherwise
// "".
func mostHeld(groups []group) string {
	var left, held, waiting int64
	for i := range groups {
		switch g := &groups[i]; g.State {
		case groupGoing:
			left += g.left()
		case groupHeld, groupStopped:
			left, held = left+g.left(), held+g.left()
			waiting++
		}
	}
	if 2*held <= left {
		return ""
	}
	groupsOf := fmt.Sprintf("%d groups that are", waiting)
	if waiting == 1 {
		groupsOf = "1 group that is"
	}
	return fmt.Sprintf("%d of the %d dead letters that are left are in %s held or stopped", held, left, groupsOf)
}

// steer counts the judged outcomes of a progressive run, adapts its rates and moves its groups. It stops the run if
// most of the entries that are left belong to held or stopped groups, or if the run can send nothing until an operator
// decides. It does nothing if another process is steering the run. It reports whether there may be more outcomes to
// count or entries to skip. It returns the groups that an operator ended and whose entries are skipped.
func (r *Runner) steer(ctx context.Context, id uuid.UUID) (more bool, ended []int32, err error) {
	err = inTx(ctx, r.store, func(tx transaction) error {
		more, ended = false, nil
		run, err := tx.LockProgressive(ctx, id)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil // another process decides
		}
		if err != nil {
			return err
		}
		groups, err := r.countOutcomes(ctx, tx, id, &more)
		if err != nil {
			return err
		}
		if run.Status == "running" {
			if err := r.adapt(ctx, tx, &run); err != nil {
				return err
			}
		}
		moved, err := r.moveGroups(ctx, tx, &run, groups, more)
		if err != nil || hasEnded(&run) || more && !moved {
			return err
		}
		if !more {
			if n, err := tx.SkipEnded(ctx, dbsqlc.SkipEndedParams{ID: id, Most: outcomesAtOnce}); err != nil || n > 0 {
				more = true
				return err
			}
			for i := range groups {
				if groups[i].State == groupEnded {
					ended = append(ended, groups[i].Number)
				}
			}
		}
		if run.Status != "running" {
			return nil
		}
		reason := mostHeld(groups)
		if !moved {
			reason, err = stuck(ctx, tx, id, groups)
		}
		if err != nil || reason == "" {
			return err
		}
		reason += "; let them go on, send them back a step or end them, or cancel the run"
		r.logger.Warn("replay run stopped", "run", id, "reason", reason)
		return tx.EndReplay(ctx, dbsqlc.EndReplayParams{ID: id, Status: "stopped", Reason: reason})
	})
	return more, ended, err
}

// countOutcomes adds at most outcomesAtOnce new outcomes to the groups of a run, and returns the groups. It sets *more
// to whether there may be further outcomes.
func (r *Runner) countOutcomes(ctx context.Context, tx transaction, id uuid.UUID, more *bool) ([]group, error) {
	rows, err := tx.RunGroups(ctx, id)
	if err != nil {
		return nil, err
	}
	groups, at := make([]group, len(rows)), map[int32]*group{}
	for i := range rows {
		groups[i] = group{RunGroupsRow: rows[i]}
		at[rows[i].Number] = &groups[i]
	}
	outcomes, err := tx.TakeOutcomes(ctx, dbsqlc.TakeOutcomesParams{ID: id, Most: r.outcomesAtOnce})
	if err != nil {
		return nil, err
	}
	*more = len(outcomes) == int(r.outcomesAtOnce)
	isKnown := func(fingerprint string) bool {
		return slices.ContainsFunc(groups, func(g group) bool { return slices.Contains(g.Known, fingerprint) })
	}
	for i := range outcomes {
		if g := at[outcomes[i].Number]; g != nil {
			g.count(&outcomes[i], isKnown)
		}
	}
	for i := range groups {
		if g := &groups[i]; g.counted {
			g.Quota, err = tx.SaveGroup(ctx, dbsqlc.SaveGroupParams{
				ID: id, Number: g.Number, Succeeded: g.Succeeded, Failed: g.Failed, Skipped: g.Skipped, Lost: g.lost,
				MostLost: lostReplaced,
			})
			if err != nil {
				return nil, err
			}
		}
	}
	return groups, nil
}

// watched is an interval in which this process looked at a run without gaps of more than watchGap.
type watched struct{ since, last time.Time }

// watch returns how long the process has watched a run.
func (r *Runner) watch(id uuid.UUID, now time.Time) time.Duration {
	w := r.watched[id]
	if now.Sub(w.last) > watchGap {
		w.since = now
	}
	w.last = now
	r.watched[id] = w
	return now.Sub(w.since)
}

func hasEnded(run *dbsqlc.LockProgressiveRow) bool {
	return run.Status == "completed" || run.Status == "cancelled"
}

// moveGroups decides about each group, sets its new state, and reports whether any group has moved. If there are more
// outcomes to count, it decides only about groups with a new failure or a decision to stop: the next turn would not see
// these.
func (r *Runner) moveGroups(ctx context.Context, tx transaction, run *dbsqlc.LockProgressiveRow,
	groups []group, more bool,
) (moved bool, err error) {
	watched, deadline := r.watch(run.ID, time.Now()), time.Duration(run.StepDeadline*float64(time.Second))
	for i := range groups {
		g := &groups[i]
		if more && len(g.unknown) == 0 && g.stop == nil {
			continue
		}
		unmet, unknown := "", ""
		queue := cmp.Or(run.Queue, g.Queue) // "" for the group of all other failure groups, which has several queues
		if g.State == groupGoing {
			if queue != "" || run.Destination != "" {
				unmet = r.planner().UnmetBy(queue, run.Destination, breakerClosed)
			}
			if unmet == "" {
				if unmet, unknown, err = r.harm(ctx, tx, run, g, queue, r.clock(run.Now)); err != nil {
					return moved, err
				}
			}
		}
		move, reason := g.decide(watched, deadline, unmet)
		if move == moveNext && unknown != "" {
			reason += "; " + unknown
		}
		if move == "" || hasEnded(run) && move != moveDone {
			continue
		}
		if move == moveHold && g.underWay() > 0 {
			refused, err := tx.Postponed(ctx, dbsqlc.PostponedParams{ID: run.ID, Number: g.Number})
			if err != nil {
				return moved, err
			}
			reason += refusals(&refused)
		}
		if err := tx.MoveGroup(ctx, dbsqlc.MoveGroupParams{
			ID: run.ID, Number: g.Number, Move: move, Actor: r.actor, Reason: reason,
		}); err != nil {
			return moved, err
		}
		moved = true
		g.State = map[string]string{
			moveNext: groupGoing, moveHold: groupHeld, moveStop: groupStopped, moveDone: groupDone,
		}[move]
		if move == moveHold || move == moveStop {
			r.logger.Warn("replay run: a group is held", "run", run.ID, "group", g.Number, "reason", reason)
		}
	}
	return moved, nil
}

// refusals describes redeliveries of a group that their destination refused as too many requests; "" if there are none.
func refusals(p *dbsqlc.PostponedRow) string {
	if p.Redeliveries == 0 {
		return ""
	}
	return fmt.Sprintf("; the destination asked for fewer requests (429 or Retry-After) in answer to %d of the "+
		"redeliveries under way, which are sent again from %s to %s", p.Redeliveries, p.First.UTC().Format(time.RFC3339),
		p.Last.UTC().Format(time.RFC3339))
}

// harm describes how other deliveries to the group's destination, or other jobs of the kinds that the group sends next,
// have become worse since the run began; worse is "" if they have not. unknown describes comparisons that are not
// possible. Deliveries and jobs that ended before an operator last let the group go on do not count again.
func (r *Runner) harm(ctx context.Context, tx transaction, run *dbsqlc.LockProgressiveRow, g *group, queue string,
	now time.Time,
) (worse, unknown string, err error) {
	from := run.CreatedAt
	if g.LetGoAt != nil {
		from = *g.LetGoAt
	}
	destination := destinationOf(r.planner().Policy(), run.Destination, queue)
	if r.Worse != nil && destination != "" {
		worse, unknown, err = r.Worse(ctx, destination, run.ID, run.CreatedAt, from, now)
	}
	if r.JobsWorse == nil || worse != "" || err != nil {
		return worse, unknown, err
	}
	kinds, err := tx.KindsToSend(ctx, dbsqlc.KindsToSendParams{ID: run.ID, Number: g.Number})
	for _, kind := range kinds {
		var also string
		if worse, also, err = r.JobsWorse(ctx, kind, run.ID, run.CreatedAt, from, now); worse != "" || err != nil {
			break
		}
		unknown = cmp.Or(unknown, also)
	}
	return worse, unknown, err
}

// stuck returns why a run cannot send anything until an operator decides; otherwise "".
func stuck(ctx context.Context, tx transaction, id uuid.UUID, groups []group) (string, error) {
	held := false
	for i := range groups {
		if groups[i].underWay() > 0 {
			return "", nil
		}
		held = held || groups[i].left() > 0 && (groups[i].State == groupHeld || groups[i].State == groupStopped)
	}
	if !held {
		return "", nil
	}
	next, err := tx.NextOfGroups(ctx, dbsqlc.NextOfGroupsParams{ID: id, OtherThan: []string{}, Most: 1})
	if err != nil || len(next) > 0 {
		return "", err
	}
	rescued, err := tx.NextRescued(ctx, dbsqlc.NextRescuedParams{ID: id, Most: 1})
	if err != nil || len(rescued) > 0 {
		return "", err
	}
	return "all dead letters that are left are held, or wait behind one that is held", nil
}
