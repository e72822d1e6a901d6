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

// A progressive run that strains a destination gets a lower rate for this destination. The rate changes by additive
// increase and multiplicative decrease, as in TCP's congestion control (RFC 5681).
const (
	// paceFall is the divisor of the rate when the run strains the destination.
	paceFall = 2
	// paceRises sets the size of an increase: the rate before the first decrease, divided by paceRises.
	paceRises = 10
	// paceUsed is the share of the rate that the run must have used before the rate rises. A rate that is not used does
	// not show what the destination can take.
	paceUsed = 0.8
	// paceLeast bounds the decrease: the rate is at least the rate before the first decrease, divided by paceLeast.
	paceLeast = 64
	// unlimitedPace is used for a run without a rate: the rate before the first decrease, in entries per second, is at
	// least this. The few deliveries of a canary do not show how many the destination can take.
	unlimitedPace = 10
)

// pace is the rate of a progressive run to one destination.
type pace struct {
	Rate float64   `json:"rate,omitempty"` // entries per second; 0 means the rate of the run
	Of   float64   `json:"of,omitempty"`   // the rate before the first decrease
	From time.Time `json:"from"`           // the next decision ignores deliveries before this time
	Fell time.Time `json:"fell,omitzero"`  // redeliveries that took their place before this time take another one
}

// Decisions about a rate, as the audit trail names them.
const (
	actLowered = "rate lowered"
	actRaised  = "rate raised"
)

// decide returns the next pace of a run to a destination, given the strain s of recent deliveries, with the act and its
// reason for the audit trail. If the pace does not change, act is "". most is the rate of the run, or 0.
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
		if next.From, next.Fell = now, now; next.Rate == p.Rate {
			return p, "", ""
		}
		return next, actLowered, fmt.Sprintf("the rate of %s was lowered from %s %s a second: %s", destination, was,
			perSecond(next.Rate), s.Reason)
	case p.Rate > 0 && s.Closed.After(p.From) && s.Taken >= paceUsed*p.Rate:
		next.Rate, next.From = p.Rate+p.Of/paceRises, s.Closed
		shown := next.Rate
		if most > 0 && next.Rate >= most {
			next.Rate, shown = 0, most
		}
		return next, actRaised, fmt.Sprintf("the rate of %s was raised from %s to %s a second: it took %s a second",
			destination, perSecond(p.Rate), perSecond(shown), perSecond(s.Taken))
	}
	return p, "", ""
}

func perSecond(rate float64) string {
	words := PlainWords()
	return words.rate(rate)
}

// adapt lowers or raises a progressive run's rate to each destination according to the destination's answers and
// breaker. It does nothing if Strain is nil.
func (r *Runner) adapt(ctx context.Context, tx transaction, run *dbsqlc.LockProgressiveRow) error {
	if r.Strain == nil {
		return nil
	}
	paces, err := pacesOf(run.Paces)
	if err != nil {
		return err
	}
	now := r.clock(run.Now)
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
			Fell: act == actLowered,
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

// part is a set of groups of a progressive run that share a lowered rate, because they go to the same destination.
type part struct {
	destination string
	rate        float64
	queues      []string // queues of the groups; "" is the group of all other failure groups; nil means all groups
}

// parts returns the parts of a progressive run whose rate is lowered, the slowest first. The group of all other failure
// groups can go to any destination, so it belongs to the slowest part.
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

// destinationOf returns the destination of a run's redeliveries in a queue: the destination of the run, or else of the
// queue; "" if there is none.
func destinationOf(p *policy.Policy, destination, queue string) string {
	if q := p.Queues[queue]; q != nil && destination == "" {
		return q.Destination
	}
	return destination
}

// nextOfGroups returns the next entries of a progressive run: first the entries of each part, as many as its rate
// allows, then entries of other groups. wait is the time until a part may send again, or 0 if no part has to wait. It
// returns up to most entries.
func (r *Runner) nextOfGroups(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow, most int,
) (ids []uuid.UUID, wait time.Duration, err error) {
	parts, err := r.parts(run)
	if err != nil {
		return nil, 0, err
	}
	next := dbsqlc.NextOfGroupsParams{ID: run.ID, NewestFirst: run.NewestFirst, OtherThan: []string{}, Most: int32(most)}
	for _, part := range parts {
		places, until, err := r.placesOf(ctx, tx, run, &part, most-len(ids))
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

// placesOf returns how many entries of a part may be sent now, at most most. If none may, it returns the time after
// which to ask again.
func (r *Runner) placesOf(ctx context.Context, tx transaction, run *dbsqlc.LockReplayRow, part *part, most int,
) (places int, wait time.Duration, err error) {
	step, now := paceStep, r.clock(run.Now)
	name := "replay:" + run.ID.String() + ":" + part.destination
	slots, err := deadletter.ReservePlaces(ctx, tx, name, part.rate, most, now, &step)
	if err != nil || slots.Granted > 0 {
		return slots.Granted, 0, err
	}
	return 0, min(max(slots.First.Sub(now)-step, soon), idle), nil
}
