package strategy

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/robfig/cron/v3"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/riverdlq"
)

// Names of the strategies, as in the database.
const (
	Immediate   = "immediate"
	Scheduled   = "scheduled"
	Conditional = "conditional"
	Manual      = "manual"
)

// waitLimit is how long an entry waits for a condition before a worker looks at it again although nothing released it.
const waitLimit = time.Hour

// unknownDelay is when to look again at an entry whose strategy this program does not know.
const unknownDelay = time.Minute

// Strategy is one way of bringing an entry back. Another is added by implementing it and naming it in [NewPlanner];
// neither the worker nor the database changes.
type Strategy interface {
	// First says when a worker should look at an entry that this strategy was just chosen for, and what the entry waits
	// for besides the time, if anything.
	First(e *Entry, plan *policy.Plan, now time.Time) (at time.Time, waitingFor string)
	// Due says, of an entry whose time has come, whether to redeliver it now or when to look again, and why.
	Due(e *Entry, plan *policy.Plan, now time.Time) Verdict
}

// Conditions says what keeps redeliveries into a queue from making sense now; "" where nothing does.
type Conditions interface {
	Unmet(queue, destination string, c *policy.Conditions) string
}

// Entry is what a strategy knows of a dead letter.
type Entry struct {
	Facts

	ID           uuid.UUID
	Trace        string
	Before       riverdlq.Class // what it was taken for before it failed this time; empty if that says nothing of it
	Rule         string         // that decided last
	WaitingFor   string         // besides the time
	RetryCount   int            // redeliveries made so far
	LastFailedAt time.Time      // what delays count from
	RetryAfter   time.Duration  // what the destination asked for when it failed; 0 if nothing
	Rescues      int            // attempts of its jobs that River's rescuer ended; 0 for messages, whose worker is dlqd itself
	Together     int            // other jobs that the rescuer discarded with its last one
}

// Verdict is what to do with an entry that is due.
type Verdict struct {
	Redeliver  bool
	Again      time.Time // when to look again, if not Redeliver
	WaitingFor string    // what it waits for besides the time
	Reason     string
}

// Decision is what was decided of an entry that failed.
type Decision struct {
	Class       riverdlq.Class
	Rule        string
	Strategy    string
	Next        time.Time // zero for a person's
	WaitingFor  string
	MaxRetries  int // redeliveries after which a failure closes it; 0 leaves what it has
	Priority    int // 0 leaves what it has
	Tags        []string
	Assignee    string
	Reason      string
	Fingerprint string
}

// Planner chooses strategies by a policy.
type Planner struct {
	policy     *policy.Policy
	rules      []rule
	budget     time.Duration // of the rules, for one error
	conditions Conditions
	strategies map[string]Strategy
}

// NewPlanner returns the planner of a policy. conditions may be nil: they hold, then. The error names every rule that is
// wrong, with file and line.
func NewPlanner(p *policy.Policy, conditions Conditions) (*Planner, error) {
	rules, err := compileRules(p)
	if err != nil {
		return nil, err
	}
	planner := &Planner{policy: p, rules: rules, budget: DefaultBudget, conditions: conditions}
	immediate := immediate{random: drawn}
	planner.strategies = map[string]Strategy{
		Immediate:   &immediate,
		Scheduled:   &scheduled{immediate},
		Conditional: &conditional{immediate},
	}
	return planner, nil
}

// Policy is the policy that the planner goes by.
func (p *Planner) Policy() *policy.Policy { return p.policy }

// Plan is what happens to an entry of a class, of a kind, in a queue, that a rule chose: what the rule does not say comes
// from the kind's plan for the class, the kind's, the queue's for the class, the queue's, the class's, and the strategy's.
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
	switch plan.Strategy {
	case Immediate:
		fill(&plan, &routing.Strategies.Immediate)
	case Scheduled:
		fill(&plan, &routing.Strategies.Scheduled)
	case Conditional:
		fill(&plan, &routing.Strategies.Conditional)
	}
	return plan
}

// fill gives a plan what it does not say itself.
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

// Decide says what happens next to an entry that was just captured, or has failed again.
func (p *Planner) Decide(e *Entry, now time.Time) Decision {
	class, name, rule := p.Classify(e.Facts)
	reason := "class " + string(class) + " (rule " + name + ")"
	if name == stuckJob && e.Before != "" {
		// A worker that was cut off says nothing of the work: what was known before does.
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
	} else if s, ok := p.strategies[plan.Strategy]; ok {
		d.Next, d.WaitingFor = s.First(e, &plan, now)
	} else {
		d.Reason += " needs a person"
	}
	return d
}

// ManyRescues is how many rescues of an application's entry need a person. One is a worker that was killed, by a deployment or for want of memory; a job that is
// rescued again may be what kills its workers, and every job that runs beside it.
const ManyRescues = 2

// workerLost says what is known of an entry that River's rescuer ended again and again.
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

// Due says what to do with a decided entry whose time has come. Its conditions are asked then, and one whose conditions do not
// hold waits without being looked at: the worker's gates release it.
func (p *Planner) Due(e *Entry, name string, now time.Time) Verdict {
	s, ok := p.strategies[name]
	if !ok {
		// Another version of dlqd chose it. Leave it to that one, and say so.
		return Verdict{Again: now.Add(unknownDelay), Reason: "this dlqd does not know the strategy " + name}
	}
	plan := p.planOf(e)
	unmet := p.unmet(e, &plan)
	if unmet != "" {
		unmet = conditionPrefix + unmet
	} else if WaitsForCondition(e.WaitingFor) {
		unmet = e.WaitingFor // a gate lets it through when its turn comes
	}
	if unmet != "" {
		return Verdict{Again: now.Add(waitLimit), WaitingFor: unmet, Reason: "waits for " + strings.TrimPrefix(unmet, conditionPrefix)}
	}
	return s.Due(e, &plan, now)
}

func (p *Planner) planOf(e *Entry) policy.Plan {
	return p.Plan(e.Class, e.Queue, e.Kind, p.ruleNamed(e.Rule))
}

// Unmet says what an entry that waits for its conditions still waits for; "" where they hold.
func (p *Planner) Unmet(e *Entry) string {
	plan := p.planOf(e)
	return p.unmet(e, &plan)
}

// breakerClosed is the condition of every plan that does not say otherwise: what is sent to a destination whose breaker is open
// would only be held there, with a redelivery spent.
var breakerClosed = &policy.Conditions{Breaker: new(true)}

func (p *Planner) unmet(e *Entry, plan *policy.Plan) string {
	if plan.Conditions == nil || plan.Conditions.Breaker == nil {
		if unmet := p.UnmetBy(e.Queue, "", breakerClosed); unmet != "" {
			return unmet
		}
	}
	return p.UnmetBy(e.Queue, "", plan.Conditions)
}

// UnmetBreaker says that the breaker is open which a queue's redeliveries would meet; "" where it is not.
func (p *Planner) UnmetBreaker(queue string) string { return p.UnmetBy(queue, "", breakerClosed) }

// UnmetBy says which of some conditions do not hold for what is sent from a queue to a destination, "" for the queue's own; "" where
// all do.
func (p *Planner) UnmetBy(queue, destination string, c *policy.Conditions) string {
	if p.conditions == nil || c == nil {
		return ""
	}
	return p.conditions.Unmet(queue, destination, c)
}

// Probes is how many of a queue's entries are tried first when their conditions hold again.
func (p *Planner) Probes(e *Entry) int {
	for _, c := range []*policy.Conditions{p.planOf(e).Conditions, p.policy.Routing.Strategies.Conditional.Conditions} {
		if c != nil && c.Probes > 0 {
			return c.Probes
		}
	}
	return 1
}

// immediate retries after a delay that grows with every failure.
type immediate struct {
	random func(*Entry) float64 // in [0, 1)
}

// drawn is a number in [0, 1) that is an entry's own for this redelivery: judged anew, it comes to the same time.
func drawn(e *Entry) float64 {
	return rand.New(rand.NewPCG(binary.BigEndian.Uint64(e.ID[:8])+uint64(e.RetryCount), binary.BigEndian.Uint64(e.ID[8:]))).Float64()
}

func (s *immediate) First(e *Entry, plan *policy.Plan, now time.Time) (time.Time, string) {
	return s.after(e, plan, now), ""
}

// after is the plan's delay after the failure, but no sooner than the destination asked for.
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
		return now // it failed long ago: dlqd was down, or the job was taken in late
	}
	return at
}

func (*immediate) Due(*Entry, *policy.Plan, time.Time) Verdict {
	return Verdict{Redeliver: true, Reason: "due"}
}

// scheduled retries when the destination asked to be left alone until, or else in the next off-peak hour, anywhere within
// it, so that entries do not all land at once.
type scheduled struct{ immediate }

func (s *scheduled) First(e *Entry, plan *policy.Plan, now time.Time) (time.Time, string) {
	if e.RetryAfter > 0 {
		return s.after(e, plan, now), ""
	}
	for _, after := range []time.Time{e.LastFailedAt, now} { // now: dlqd was down, or the job was taken in late
		hour := NextHour(plan.Hours, plan.TimeZone, after)
		if at := hour.Add(time.Duration(s.random(e) * float64(time.Hour))); !hour.IsZero() && !at.Before(now) {
			return at, ""
		}
	}
	return s.after(e, plan, now), ""
}

// NextHour is when the next of the hours begins in a time zone, after now; zero where there is no hour. On the days when
// clocks change, an hour that does not come is passed over, and one that comes twice counts twice.
func NextHour(hours []int, zone string, now time.Time) time.Time {
	texts := make([]string, len(hours))
	for i, hour := range hours {
		texts[i] = strconv.Itoa(hour)
	}
	schedule, err := cron.ParseStandard("CRON_TZ=" + cmp.Or(zone, "UTC") + " 0 " + strings.Join(texts, ",") + " * * *")
	if err != nil {
		return time.Time{} // no hour; those of a policy, and its zones, were checked
	}
	return schedule.Next(now)
}

// conditional retries like immediate, with conditions of its own.
type conditional struct{ immediate }

func (*conditional) Due(*Entry, *policy.Plan, time.Time) Verdict {
	return Verdict{Redeliver: true, Reason: "due, and its conditions hold"}
}

// What an entry waits for besides the time: that automatic redelivery is switched on for it, its place in its
// destination's pace, an earlier entry of its ordering key, or a condition, which follows the prefix.
const (
	WaitsForAutomatic = "automatic"
	WaitsForPace      = "pace"
	WaitsForOrder     = "order"
	conditionPrefix   = "condition: "
)

// WaitsForCondition reports whether an entry waits for a condition.
func WaitsForCondition(waitingFor string) bool { return strings.HasPrefix(waitingFor, conditionPrefix) }
