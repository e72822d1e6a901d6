package strategy

import (
	"math/rand/v2"
	"time"

	"github.com/dlqd/dlqd/riverdlq"
)

// Names of the strategies, as in the database.
const (
	Immediate = "immediate"
	Manual    = "manual"
)

// Strategy is one way of bringing an entry back. Another is added by implementing it and naming its classes in
// [NewPlanner]; neither the worker nor the database changes.
type Strategy interface {
	// Name is what the entry's strategy column holds.
	Name() string
	// First says when a worker should look at an entry that this strategy was just chosen for.
	First(e Entry, now time.Time) time.Time
	// Due says, of an entry whose time has come, whether to redeliver it now or when to look again, and why.
	Due(e Entry, now time.Time) Verdict
}

// Entry is what a strategy knows of a dead letter.
type Entry struct {
	Facts

	Trace        string
	Queue        string
	RetryCount   int       // redeliveries made so far
	LastFailedAt time.Time // what delays count from
}

// Verdict is what to do with an entry that is due.
type Verdict struct {
	Redeliver bool
	Again     time.Time // when to look again, if not Redeliver
	Reason    string
}

// Decision is what was decided of an entry that failed.
type Decision struct {
	Class       riverdlq.Class
	Rule        string
	Strategy    string
	Next        time.Time // zero for a person's
	Reason      string
	Fingerprint string
}

// Planner chooses strategies.
type Planner struct {
	byClass map[riverdlq.Class]Strategy
	byName  map[string]Strategy
}

// NewPlanner returns the built-in choice: what may heal by itself is retried after each of the delays in turn, and the
// rest is a person's.
func NewPlanner(delays []time.Duration) *Planner {
	immediate := &immediate{delays: delays, jitter: rand.Float64}
	p := &Planner{
		byClass: map[riverdlq.Class]Strategy{
			riverdlq.ClassTransient:   immediate,
			riverdlq.ClassRateLimited: immediate,
			riverdlq.ClassOutage:      immediate,
		},
		byName: map[string]Strategy{},
	}
	for _, s := range p.byClass {
		p.byName[s.Name()] = s
	}
	return p
}

// Decide says what happens next to an entry that was just captured, or has failed again.
func (p *Planner) Decide(e Entry, now time.Time) Decision {
	class, rule := Classify(e.Facts)
	d := Decision{Class: class, Rule: rule, Fingerprint: Fingerprint(e.Type, e.Message, e.Trace)}
	s, ok := p.byClass[class]
	if !ok {
		d.Strategy = Manual
		d.Reason = "class " + string(class) + " needs a person"
		return d
	}
	d.Strategy = s.Name()
	d.Next = s.First(e, now)
	d.Reason = "class " + string(class) + " (rule " + rule + ")"
	return d
}

// Due says what to do with a decided entry whose time has come.
func (p *Planner) Due(e Entry, name string, now time.Time) Verdict {
	s, ok := p.byName[name]
	if !ok {
		// Another version of dlqd chose it. Leave it to that one, and say so.
		return Verdict{Again: now.Add(time.Minute), Reason: "this dlqd does not know the strategy " + name}
	}
	return s.Due(e, now)
}

// ImmediateDelays are the delays after each failure in the DLQ: 1, 5, 15, 30 and 60 minutes.
func ImmediateDelays() []time.Duration {
	return []time.Duration{time.Minute, 5 * time.Minute, 15 * time.Minute, 30 * time.Minute, time.Hour}
}

// jitterShare spreads entries that failed together: a delay is longer by up to this share of itself.
const jitterShare = 0.2

// immediate retries after a delay that grows with every failure.
type immediate struct {
	delays []time.Duration
	jitter func() float64 // in [0, 1)
}

func (*immediate) Name() string { return Immediate }

func (s *immediate) First(e Entry, now time.Time) time.Time {
	delay := s.delays[min(e.RetryCount, len(s.delays)-1)]
	at := e.LastFailedAt.Add(delay + time.Duration(jitterShare*s.jitter()*float64(delay)))
	if at.Before(now) {
		return now // it failed long ago: dlqd was down, or the job was taken in late
	}
	return at
}

func (*immediate) Due(Entry, time.Time) Verdict { return Verdict{Redeliver: true, Reason: "due"} }
