package strategy

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/robfig/cron/v3"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy/strategies"
)

// The built-in strategies.
const (
	Immediate   = strategies.Immediate
	Scheduled   = strategies.Scheduled
	Conditional = strategies.Conditional
	Manual      = strategies.Manual
)

// waitLimit is the time after which a worker checks an entry that waits for a condition again, if no gate has released
// the entry before.
const waitLimit = time.Hour

// unknownDelay is the time after which a worker checks an entry again if this version of dlqd does not know the entry's
// strategy.
const unknownDelay = time.Minute

// Strategy decides when an entry is redelivered. A new strategy needs a name in internal/strategy/strategies, an
// element of implementations, and a label of the enum dlq.strategy, which a migration adds; see docs/extending.md.
type Strategy interface {
	// First returns the time at which a worker should check an entry that has just got this strategy. waitingFor says
	// what else the entry waits for; it is "" for nothing.
	First(e *Entry, plan *policy.Plan, now time.Time) (at time.Time, waitingFor string)
	// Due decides whether an entry whose time has come is redelivered now or checked again later.
	Due(e *Entry, plan *policy.Plan, now time.Time) Verdict
}

// implementations has the strategies by name. Manual has no implementation. Conditional has the same one as Immediate,
// because [Planner.Due] checks the conditions.
var implementations = map[string]Strategy{
	Immediate:   &immediate{random: randomOf},
	Scheduled:   &scheduled{immediate{random: randomOf}},
	Conditional: &immediate{random: randomOf},
}

// Add adds a strategy that is not built in. It must be called before the first policy is read. defaults describes the
// strategy's defaults in the schema of dlq-routing.yaml; it is empty if the strategy has none. Add panics if a strategy
// with the name exists.
func Add(name, defaults string, s Strategy) {
	if slices.Contains(strategies.Names(), name) {
		panic("strategy " + name + " exists already")
	}
	strategies.Add(strategies.Strategy{Name: name, Defaults: defaults})
	implementations[name] = s
}

// Conditions reports why redeliveries to a destination should wait now. Unmet returns "" if every condition is met. An
// empty destination means the destination of the queue.
type Conditions interface {
	Unmet(queue, destination string, c *policy.Conditions) string
}

// Entry is the part of a dead letter that a strategy reads.
type Entry struct {
	Facts

	ID           uuid.UUID
	Trace        string
	Before       riverdlq.Class // the class before this failure; empty if it is not known
	Rule         string         // the rule that last decided about the entry
	WaitingFor   string         // what the entry waits for in addition to its time; "" for nothing
	RetryCount   int            // redeliveries made so far
	LastFailedAt time.Time      // delays count from this time
	RetryAfter   time.Duration  // the destination's Retry-After at the last failure; 0 for none
	Rescues      int            // attempts that River's rescuer ended; 0 for messages, whose worker is dlqd itself
	Together     int            // other jobs that the rescuer discarded at the same time as this entry's job
}

// Verdict is the decision about an entry whose time has come.
type Verdict struct {
	Redeliver  bool
	Again      time.Time // time of the next check, unless Redeliver
	WaitingFor string    // what the entry waits for in addition to Again; "" for nothing
	Reason     string    // why the entry is not redelivered now, unless Redeliver
}

// Decision is the decision about an entry that failed.
type Decision struct {
	Class       riverdlq.Class
	Rule        string
	Strategy    string
	Next        time.Time // the time of the next check; zero if the entry needs manual handling
	WaitingFor  string
	MaxRetries  int // the number of redeliveries after which a failure closes the entry; 0 for no change
	Priority    int // 0 for no change
	Tags        []string
	Assignee    string
	Reason      string
	Fingerprint string
}

// Planner chooses strategies by a policy.
type Planner struct {
	policy     *policy.Policy
	rules      []rule
	budget     time.Duration // for all rules and one error
	conditions Conditions
}

// NewPlanner returns the planner of a policy. If conditions is nil, all conditions count as met. The error names every
// invalid rule, with file and line.
func NewPlanner(p *policy.Policy, conditions Conditions) (*Planner, error) {
	rules, err := compileRules(p)
	if err != nil {
		return nil, err
	}
	return &Planner{policy: p, rules: rules, budget: DefaultBudget, conditions: conditions}, nil
}

// Policy returns the policy that the planner applies.
func (p *Planner) Policy() *policy.Policy { return p.policy }

// Plan returns the plan for an entry of a class, queue and kind that matched rule, which is nil for none. Each field
// comes from the first of these that sets the field: the rule, the kind's plan for the class, the kind's plan, the
// kind's maxRetries, the queue's plan for the class, the queue's plan, the queue's maxRetries, the class's plan, and
// the defaults of the strategy. If no plan sets a strategy, the strategy is Manual.
func (p *Planner) Plan(class riverdlq.Class, queue, kind string, rule *policy.Rule) policy.Plan {
	routing := &p.policy.Routing
	var layers []*policy.Plan
	if rule != nil {
		layers = append(layers, &rule.Plan)
	}
	if k := p.policy.KindRouting(kind); k != nil {
		layers = append(layers, k.Classes[string(class)], k.Plan, &policy.Plan{MaxRetries: k.MaxRetries})
	}
	if q := routing.Queues[queue]; q != nil {
		layers = append(layers, q.Classes[string(class)], q.Plan, &policy.Plan{MaxRetries: q.MaxRetries})
	}
	layers = append(layers, routing.Classes[string(class)])
	plan := policy.Plan{}
	for _, layer := range layers {
		fill(&plan, layer)
	}
	plan.Strategy = cmp.Or(plan.Strategy, Manual)
	fill(&plan, routing.Strategies[plan.Strategy])
	return plan
}

// fill sets each field that is empty in plan to the field of from.
func fill(plan, from *policy.Plan) {
	if from == nil {
		return
	}
	plan.Strategy = cmp.Or(plan.Strategy, from.Strategy)
	plan.TimeZone = cmp.Or(plan.TimeZone, from.TimeZone)
	plan.MaxRetries = cmp.Or(plan.MaxRetries, from.MaxRetries)
	plan.Jitter = cmp.Or(plan.Jitter, from.Jitter)
	if from.Conditions != nil {
		c := policy.Conditions{}
		if plan.Conditions != nil {
			c = *plan.Conditions
		}
		c.Breaker = cmp.Or(c.Breaker, from.Conditions.Breaker)
		c.Probe = cmp.Or(c.Probe, from.Conditions.Probe)
		c.CPUBelow = cmp.Or(c.CPUBelow, from.Conditions.CPUBelow)
		c.MemoryBelow = cmp.Or(c.MemoryBelow, from.Conditions.MemoryBelow)
		c.ConnectionsBelow = cmp.Or(c.ConnectionsBelow, from.Conditions.ConnectionsBelow)
		c.Probes = cmp.Or(c.Probes, from.Conditions.Probes)
		plan.Conditions = &c
	}
	if plan.Delays == nil {
		plan.Delays = from.Delays
	}
	if plan.Hours == nil {
		plan.Hours = from.Hours
	}
}

// Decide returns the decision about an entry that was just captured or has failed again.
func (p *Planner) Decide(e *Entry, now time.Time) Decision {
	class, name, rule := p.Classify(e.Facts)
	reason := "class " + string(class) + " (rule " + name + ")"
	if name == stuckJob && e.Before != "" {
		// The rescuer's error does not say why the work failed, so the entry stays in the class that it had before.
		class, reason = e.Before, "class "+string(e.Before)+", as before (rule "+name+")"
	}
	plan := p.Plan(class, e.Queue, e.Kind, rule)
	d := Decision{
		Class: class, Rule: name, Strategy: plan.Strategy, MaxRetries: plan.MaxRetries,
		Fingerprint: Fingerprint(e.Failure(e.Trace)),
		Reason:      reason,
	}
	if rule != nil {
		d.Priority, d.Tags, d.Assignee = rule.Priority, rule.Tags, rule.Assignee
	}
	if e.Rescues >= ManyRescues {
		d.Strategy, d.Rule = Manual, policy.RuleWorkerLost
		d.Reason += ": " + workerLost(e)
	} else if s, ok := implementations[plan.Strategy]; ok {
		d.Next, d.WaitingFor = s.First(e, &plan, now)
	} else {
		d.Reason += " needs a person"
	}
	return d
}

// ManyRescues is the number of rescues from which on an application's entry needs manual handling. If a job was rescued
// once, a deployment or a lack of memory has probably killed its worker. A job that is rescued again may itself kill
// its worker, and with it every job that runs in the same process.
const ManyRescues = 2

// workerLost describes the rescues of an entry for the reason of a decision.
func workerLost(e *Entry) string {
	text := fmt.Sprintf("its worker died, or it never ended, %d times", e.Rescues)
	switch {
	case e.Together == 1:
		text += "; rescued together with 1 other"
	case e.Together > 1:
		text += fmt.Sprintf("; rescued together with %d others", e.Together)
	}
	return text
}

// Due decides about an entry whose time has come. It checks the conditions first. If a condition is unmet, the entry
// waits until a gate of the worker releases it. Due checks such an entry again after waitLimit. If the conditions are
// met by then, the entry still waits for the gate. An entry with a strategy that this version does not know waits for
// unknownDelay.
func (p *Planner) Due(e *Entry, name string, now time.Time) Verdict {
	s, ok := implementations[name]
	if !ok {
		// Another version of dlqd chose the strategy. Leave the entry to that version.
		return Verdict{Again: now.Add(unknownDelay), Reason: "this version of dlqd does not know strategy " + name}
	}
	plan := p.planOf(e)
	unmet := p.unmet(e, &plan)
	if unmet != "" {
		unmet = conditionPrefix + unmet
	} else if WaitsForCondition(e.WaitingFor) {
		unmet = e.WaitingFor // still waits: gates release such entries, a few at a time
	}
	if unmet != "" {
		return Verdict{
			Again: now.Add(waitLimit), WaitingFor: unmet, Reason: "waits for " + strings.TrimPrefix(unmet, conditionPrefix),
		}
	}
	return s.Due(e, &plan, now)
}

func (p *Planner) planOf(e *Entry) policy.Plan {
	return p.Plan(e.Class, e.Queue, e.Kind, p.ruleNamed(e.Rule))
}

// Unmet returns an unmet condition of an entry's plan, or "" if all conditions are met.
func (p *Planner) Unmet(e *Entry) string {
	plan := p.planOf(e)
	return p.unmet(e, &plan)
}

// breakerClosed is a condition of every plan that does not set Breaker. While the breaker of a destination is open, a
// redelivery would only be held, but would count as one of the entry's redeliveries.
var breakerClosed = &policy.Conditions{Breaker: new(true)}

func (p *Planner) unmet(e *Entry, plan *policy.Plan) string {
	if plan.Conditions == nil || plan.Conditions.Breaker == nil {
		if unmet := p.UnmetBy(e.Queue, "", breakerClosed); unmet != "" {
			return unmet
		}
	}
	return p.UnmetBy(e.Queue, "", plan.Conditions)
}

// UnmetBreaker returns the unmet condition if the breaker of a queue's destination is open, or "" if it is not.
func (p *Planner) UnmetBreaker(queue string) string { return p.UnmetBy(queue, "", breakerClosed) }

// UnmetBy returns which condition of c is unmet for redeliveries from a queue to a destination, or "" if all are met.
// The destination "" means the destination of the queue.
func (p *Planner) UnmetBy(queue, destination string, c *policy.Conditions) string {
	if p.conditions == nil || c == nil {
		return ""
	}
	return p.conditions.Unmet(queue, destination, c)
}

// Probes returns how many of the entries that wait for the same conditions as e are sent as probes once the conditions
// are met.
func (p *Planner) Probes(e *Entry) int {
	plan := p.planOf(e)
	fill(&plan, p.policy.Routing.Strategies[Conditional])
	if c := plan.Conditions; c != nil {
		return max(c.Probes, 1)
	}
	return 1
}

// immediate redelivers after the delays of the plan: the first redelivery after the first delay, the second after the
// second, and so on. The last delay also applies to all further redeliveries.
type immediate struct {
	random func(*Entry) float64 // in [0, 1)
}

// randomOf returns a number in [0, 1) that depends only on the entry and its retry count. So a second decision about
// the same redelivery gets the same time.
func randomOf(e *Entry) float64 {
	return rand.New(rand.NewPCG(binary.BigEndian.Uint64(e.ID[:8])+uint64(e.RetryCount),
		binary.BigEndian.Uint64(e.ID[8:]))).Float64()
}

func (s *immediate) First(e *Entry, plan *policy.Plan, now time.Time) (time.Time, string) {
	return s.after(e, plan, now), ""
}

// after returns the time of the last failure plus a delay and jitter, at the earliest now. The delay is the plan's or,
// if that is longer, the destination's Retry-After.
func (s *immediate) after(e *Entry, plan *policy.Plan, now time.Time) time.Time {
	delay := e.RetryAfter
	if n := len(plan.Delays); n > 0 {
		delay = max(delay, plan.Delays[min(e.RetryCount, n-1)])
	}
	if plan.Jitter != nil {
		delay += time.Duration(*plan.Jitter * s.random(e) * float64(delay))
	}
	at := e.LastFailedAt.Add(delay)
	if at.Before(now) {
		return now // the delay is over: dlqd was down, or the job was filed late
	}
	return at
}

func (*immediate) Due(*Entry, *policy.Plan, time.Time) Verdict {
	return Verdict{Redeliver: true}
}

// scheduled redelivers at a random time within the next off-peak hour, so that entries do not all arrive at once. If
// the destination sent a Retry-After, or the plan has no hours, it redelivers as immediate does.
type scheduled struct{ immediate }

func (s *scheduled) First(e *Entry, plan *policy.Plan, now time.Time) (time.Time, string) {
	if e.RetryAfter > 0 {
		return s.after(e, plan, now), ""
	}
	for _, after := range []time.Time{e.LastFailedAt, now} { // count from now if the first hour after the failure is over
		hour := NextHour(plan.Hours, plan.TimeZone, after)
		if at := hour.Add(time.Duration(s.random(e) * float64(time.Hour))); !hour.IsZero() && !at.Before(now) {
			return at, ""
		}
	}
	return s.after(e, plan, now), ""
}

// NextHour returns the beginning of the next of the given hours in a time zone, after now. It returns zero if there are
// no hours, or if the zone is invalid. When clocks change, an hour that is skipped does not count, and an hour that is
// repeated counts twice.
func NextHour(hours []int, zone string, now time.Time) time.Time {
	texts := make([]string, len(hours))
	for i, hour := range hours {
		texts[i] = strconv.Itoa(hour)
	}
	schedule, err := cron.ParseStandard("CRON_TZ=" + cmp.Or(zone, "UTC") + " 0 " + strings.Join(texts, ",") + " * * *")
	if err != nil {
		return time.Time{} // no hours, or an invalid zone, which a checked policy does not have
	}
	return schedule.Next(now)
}

// The values of WaitingFor:
//
//   - WaitsForAutomatic: automatic redelivery is switched off for the entry.
//   - WaitsForPace: the entry waits for its place in the rate of its destination or of an application's queue.
//   - WaitsForOrder: earlier work with the entry's ordering key is not done. Or the entry's job was rescued several
//     times, and another redelivery of such a job is running.
//   - WaitsForRun: a progressive replay run that has not ended holds the entry.
//   - conditionPrefix and a text: the entry waits for the condition that the text names.
const (
	WaitsForAutomatic = "automatic"
	WaitsForPace      = "pace"
	WaitsForOrder     = "order"
	WaitsForRun       = "run"
	conditionPrefix   = "condition: "
)

// WaitsForCondition reports whether waitingFor names a condition.
func WaitsForCondition(waitingFor string) bool { return strings.HasPrefix(waitingFor, conditionPrefix) }
