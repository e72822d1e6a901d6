package replay

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// A progressive run that strains a destination sends to it at a rate of its own: additive increase, multiplicative
// decrease, as TCP's congestion control (RFC 5681).
const (
	// paceFall is the divisor of the rate when the run strains the destination.
	paceFall = 2
	// paceRises is in how many steps the rate rises by as much as it was at first.
	paceRises = 10
	// paceLeast is by how much the first rate is divided at most.
	paceLeast = 64
	// unlimitedPace is the first rate, in entries per second, of a run without a rate whose destination got fewer
	// deliveries: those of a canary do not show what it takes.
	unlimitedPace = 10
)

// pace is how fast a progressive run sends to a destination.
type pace struct {
	Rate float64   `json:"rate,omitempty"` // entries per second; 0: that of the run
	Of   float64   `json:"of,omitempty"`   // the rate that it was first lowered from
	From time.Time `json:"from"`           // deliveries before do not count for the next decision
}

// Acts of a pace in the audit trail.
const (
	actLowered = "rate lowered"
	actRaised  = "rate raised"
)

// decide returns the pace of a run to a destination after the deliveries of s, the act and its reason; no act if it
// does not change. most is the rate of the run; 0 without one.
func (p pace) decide(destination string, most float64, s *breaker.Strain, now time.Time,
) (next pace, act, reason string) {
	next = p
	switch {
	case s.Reason != "":
		was := perSecond(cmp.Or(p.Rate, most)) + " to"
		if next.Rate = cmp.Or(p.Rate, most); next.Rate == 0 {
			was, next.Rate = "no limit to", max(s.PerSecond, unlimitedPace)
		}
		if p.Rate == 0 {
			next.Of = next.Rate
		}
		next.Rate = max(next.Rate/paceFall, next.Of/paceLeast)
		if next.From = now; next.Rate == p.Rate {
			return p, "", ""
		}
		return next, actLowered, fmt.Sprintf("the rate of %s was lowered from %s %s a second: %s", destination, was,
			perSecond(next.Rate), s.Reason)
	case p.Rate > 0 && s.Closed.After(p.From):
		next.Rate, next.From = p.Rate+p.Of/paceRises, s.Closed
		shown := next.Rate
		if most > 0 && next.Rate >= most {
			next.Rate, shown = 0, most
		}
		return next, actRaised, fmt.Sprintf("the rate of %s was raised from %s to %s a second: it took %s a second",
			destination, perSecond(p.Rate), perSecond(shown), perSecond(s.PerSecond))
	}
	return p, "", ""
}

func perSecond(rate float64) string {
	words := PlainWords()
	return words.rate(rate)
}

// adapt lowers and raises the rates of a progressive run by what destinations answered.
func (r *Runner) adapt(ctx context.Context, tx transaction, run *dbsqlc.LockProgressiveRow) error {
	if r.Strain == nil {
		return nil
	}
	paces, err := pacesOf(run.Paces)
	if err != nil {
		return err
	}
	now := r.now()
	destinations, err := r.Reached(ctx, run.ID, now)
	if err != nil {
		return err
	}
	for _, destination := range destinations {
		was := paces[destination]
		strain, err := r.Strain(ctx, destination, run.ID, run.CreatedAt, was.From, now)
		if err != nil {
			return err
		}
		if strain.Reason == "" && strain.PerSecond > 0 {
			strain.Reason = r.planner().UnmetBy("", destination, breakerClosed)
		}
		next, act, reason := was.decide(destination, run.Rate, &strain, now)
		if act == "" {
			continue
		}
		changed, err := json.Marshal(map[string]pace{destination: next})
		if err != nil {
			return err
		}
		if err := tx.SetPace(ctx, dbsqlc.SetPaceParams{
			ID: run.ID, Pace: changed, Act: act, Actor: r.actor, Destination: destination, Reason: reason,
		}); err != nil {
			return err
		}
	}
	return nil
}

func pacesOf(raw json.RawMessage) (paces map[string]pace, err error) {
	paces = map[string]pace{}
	return paces, json.Unmarshal(raw, &paces)
}

// part are groups of a progressive run that are sent at a rate of their own.
type part struct {
	destination string
	rate        float64
	queues      []string // "" for the group of all others; nil for all groups
}

// parts returns the parts of a progressive run whose rate is lowered, the slowest first. The group of all others, which
// may go to any destination, belongs to the slowest.
func (r *Runner) parts(run *dbsqlc.LockReplayRow) (parts []part, err error) {
	paces, err := pacesOf(run.Paces)
	if err != nil {
		return nil, err
	}
	p := r.planner().Policy()
	only := destinationOf(p, run.Destination, run.Queue)
	for _, destination := range slices.Sorted(maps.Keys(paces)) {
		rate := paces[destination].Rate
		if rate == 0 || run.Rate != nil && rate >= *run.Rate || only != "" && destination != only {
			continue
		}
		if only != "" {
			return []part{{destination: destination, rate: rate}}, nil
		}
		parts = append(parts, part{destination, rate, p.QueuesOf(destination)})
	}
	slices.SortStableFunc(parts, func(a, b part) int { return cmp.Compare(a.rate, b.rate) })
	if len(parts) > 0 {
		parts[0].queues = append(parts[0].queues, "")
	}
	return parts, nil
}

// destinationOf returns the destination to which all redeliveries of a run, or those of a queue, go; "" if there is
// none.
func destinationOf(p *policy.Policy, destination, queue string) string {
	if q := p.Queues[queue]; q != nil && destination == "" {
		return q.Destination
	}
	return destination
}

// nextOfGroups returns the next entries of a progressive run: those of each part that its rate allows, then others.
// wait is the time until a part that may not be sent now is tried again; 0 if there is none.
func (r *Runner) nextOfGroups(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow, most int,
) (ids []uuid.UUID, wait time.Duration, err error) {
	parts, err := r.parts(run)
	if err != nil {
		return nil, 0, err
	}
	next := dbsqlc.NextOfGroupsParams{ID: run.ID, NewestFirst: run.NewestFirst, OtherThan: []string{}, Most: int32(most)}
	for _, part := range parts {
		places, until, err := r.placesOf(ctx, tx, run.ID, &part, most-len(ids))
		if err != nil {
			return nil, 0, err
		}
		if until > 0 {
			wait = cmp.Or(min(wait, until), until)
		} else {
			found, err := tx.NextOfGroups(ctx, dbsqlc.NextOfGroupsParams{
				ID: run.ID, NewestFirst: run.NewestFirst, Only: part.queues, OtherThan: []string{}, Most: int32(places),
			})
			if err != nil {
				return nil, 0, err
			}
			ids = append(ids, found...)
		}
		if part.queues == nil {
			return ids, wait, nil
		}
		next.OtherThan, next.Most = append(next.OtherThan, part.queues...), int32(most-len(ids))
	}
	others, err := tx.NextOfGroups(ctx, next)
	return append(ids, others...), wait, err
}

// placesOf returns how many entries of a part may be sent now or, if none may, after which time to ask again.
func (r *Runner) placesOf(ctx context.Context, tx transaction, id uuid.UUID, part *part, most int,
) (places int, wait time.Duration, err error) {
	step, now := paceStep, r.now()
	name := "replay:" + id.String() + ":" + part.destination
	slots, err := deadletter.ReservePlaces(ctx, tx, name, part.rate, most, now, &step)
	if err != nil || slots.Granted > 0 {
		return slots.Granted, 0, err
	}
	return 0, min(max(slots.First.Sub(now)-step, soon), idle), nil
}
