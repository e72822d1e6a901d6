// Package breaker implements the circuit breakers of destinations and River queues. From its own deliveries, each
// process decides whether to open the closed breaker of a destination. Postgres shares the state of breakers: every
// process reads it each second, half-open probes are counted over all processes, and the state survives a restart. The
// package also measures the other conditions of redeliveries ([Conditions]).
package breaker

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/failsafe-go/failsafe-go/circuitbreaker"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// State is the state of a breaker.
type State string

// The states of a breaker.
const (
	Closed   State = "closed"    // deliveries pass
	Open     State = "open"      // no delivery passes until the open period ends
	HalfOpen State = "half_open" // a few probes pass
)

const (
	// DefaultSyncInterval is how often a process reads the shared state.
	DefaultSyncInterval = time.Second
	// forcedRetryAfter is the wait that [Breakers.State] returns for a breaker that stays open until an operator resets
	// it.
	forcedRetryAfter = time.Minute
	// writeTimeout limits the write that opens a breaker, because a delivery waits for that write.
	writeTimeout = 5 * time.Second
	// syncTimeout limits one [Breakers.Sync] of the loop.
	syncTimeout = 5 * time.Second
	// probeGrace is how long a probe keeps its place after its timeout. It equals the grace in dlq.take_probe.
	probeGrace = 10 * time.Second
)

// DestinationPrefix precedes the destination's name in a breaker's name.
const DestinationPrefix = "destination:"

// Config configures [Breakers].
type Config struct {
	DB       postgres.DB // renders schema names in queries
	Policy   func() *policy.Policy
	Actor    string // the name of this process in the log of breaker changes
	Logger   *slog.Logger
	Interval time.Duration    // time between reads of the shared state; 0 means DefaultSyncInterval
	Now      func() time.Time // nil means time.Now
}

// Breakers has all breakers as this process knows them.
type Breakers struct {
	config  Config
	queries *dbsqlc.Queries

	mu        sync.Mutex
	shared    map[string]dbsqlc.BreakersRow       // the shared state as last read, by name
	local     map[string]*local                   // by name
	ramps     map[string]*ramp                    // of breakers that have opened, by name
	unwritten map[string]dbsqlc.OpenBreakerParams // openings of this process that are not in the database yet, by name
}

// local counts this process's deliveries to a destination while the destination's breaker is closed.
type local struct {
	settings policy.Breaker
	window   circuitbreaker.CircuitBreaker[any] // only counts; it never opens, because it would open on a success, too
	streak   circuitbreaker.CircuitBreaker[any] // nil if consecutive failures do not open the breaker
}

// New returns breakers without any state; see [Breakers.Sync] and [Breakers.Loop].
func New(config Config) *Breakers {
	config.Interval = cmp.Or(config.Interval, DefaultSyncInterval)
	if config.Now == nil {
		config.Now = time.Now
	}
	return &Breakers{
		config: config, queries: dbsqlc.New(config.DB),
		shared: map[string]dbsqlc.BreakersRow{}, local: map[string]*local{}, ramps: map[string]*ramp{},
		unwritten: map[string]dbsqlc.OpenBreakerParams{},
	}
}

// Loop returns the loop that calls [Breakers.Sync].
func (b *Breakers) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "circuit-breakers", Interval: b.config.Interval, Timeout: syncTimeout, Once: background.Each(b.Sync),
		Failing: "circuit breakers: reading the shared state failed",
	})
}

// Sync reads the shared state. It first writes the openings that it could not write to the database before.
func (b *Breakers) Sync(ctx context.Context) error {
	rows, err := b.queries.Breakers(ctx)
	if err != nil {
		return err
	}
	written, err := b.writeUnwritten(ctx, rows)
	if err != nil {
		return err
	}
	if written {
		if rows, err = b.queries.Breakers(ctx); err != nil {
			return err
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, row := range rows {
		was := cmp.Or(b.shared[row.Name].State, string(Closed))
		if was != row.State {
			b.config.Logger.Warn("circuit breaker changed", "breaker", row.Name, "from", was, "to", row.State, "reason",
				row.Reason, "actor", row.ChangedBy)
			delete(b.local, row.Name) // the local counts are from before this change
			if was == string(Closed) {
				b.fall(row.Name)
			}
		}
		b.shared[row.Name] = row
	}
	maps.DeleteFunc(b.shared, func(name string, _ dbsqlc.BreakersRow) bool {
		_, unwritten := b.unwritten[name]
		return !unwritten && !slices.ContainsFunc(rows, func(r dbsqlc.BreakersRow) bool { return r.Name == name })
	})
	return nil
}

// writeUnwritten writes the openings that could not be written when they happened. It drops an opening if the breaker
// has changed since, because an operator has reset it or another process has opened it. It reports whether it wrote an
// opening.
func (b *Breakers) writeUnwritten(ctx context.Context, rows []dbsqlc.BreakersRow) (written bool, err error) {
	b.mu.Lock()
	unwritten := maps.Clone(b.unwritten)
	b.mu.Unlock()
	for name, params := range unwritten {
		changed := slices.ContainsFunc(rows,
			func(r dbsqlc.BreakersRow) bool { return r.Name == name && r.Since.After(params.Now) })
		if !changed {
			if _, err := b.queries.OpenBreaker(ctx, params); err != nil {
				return written, err
			}
			written = true
		}
		b.dropUnwritten(name)
	}
	return written, nil
}

// State returns the state of a breaker. For an open breaker it also returns the time until a probe may pass, 0 if one
// may pass now, or forcedRetryAfter if the breaker stays open until an operator resets it.
func (b *Breakers) State(name string) (State, time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.state(name)
}

func (b *Breakers) state(name string) (State, time.Duration) {
	row, ok := b.shared[name]
	switch {
	case !ok:
		return Closed, 0
	case State(row.State) == Open && row.OpenUntil == nil:
		return Open, forcedRetryAfter
	case State(row.State) == Open:
		return Open, max(row.OpenUntil.Sub(b.config.Now()), 0)
	}
	return State(row.State), 0
}

// Permit is the permission for one delivery. After the delivery, the caller calls Done, unless the delivery was cut off
// and does not show whether the destination is available.
type Permit struct {
	breakers *Breakers
	name     string
	settings policy.Breaker
	epoch    int64     // the half-open period of a probe; 0 for a delivery through a closed breaker
	until    time.Time // when the probe loses its place if it has not reported
}

// Allow returns a permit for a delivery to a destination, or nil if the breaker allows none now. A probe that does not
// report within timeout and probeGrace loses its place to another probe. Allow fails if the database cannot be reached
// while the breaker is not closed.
func (b *Breakers) Allow(ctx context.Context, destination string, timeout time.Duration) (*Permit, error) {
	name := DestinationPrefix + destination
	permit := &Permit{breakers: b, name: name, settings: b.config.Policy().Breaker(destination)}
	b.mu.Lock()
	state, wait := b.state(name)
	row := b.shared[name]
	b.mu.Unlock()
	switch {
	case state == Closed:
		return permit, nil
	case wait > 0:
		return nil, nil
	// Every held message calls Allow, so Allow does not query the database if no place can be free.
	case state == HalfOpen && placesLeft(&row, permit.settings.Probes, b.config.Now()) == 0:
		return nil, nil
	}
	now := b.config.Now().Truncate(time.Microsecond) // Postgres stores microseconds
	permit.until = now.Add(timeout + probeGrace)
	epoch, err := b.queries.TakeProbe(ctx, dbsqlc.TakeProbeParams{
		Name: name, Probes: int32(permit.settings.Probes), OpenFor: permit.settings.OpenFor,
		Actor: b.config.Actor, Now: now, Timeout: timeout,
	})
	if err != nil {
		return nil, fmt.Errorf("circuit breaker %s: %w", name, err)
	}
	if epoch == 0 {
		return nil, b.Sync(ctx) // the breaker has just changed, or all places for probes are taken
	}
	permit.epoch = epoch
	return permit, nil
}

// placesLeft returns how many more probes a half-open breaker allows now. dlq.take_probe counts in the same way.
func placesLeft(row *dbsqlc.BreakersRow, probes int, now time.Time) int {
	places := max(probes-int(row.ProbesSucceeded)-int(row.ProbesFailed), 1)
	for _, until := range row.ProbesUntil {
		if until.After(now) {
			places--
		}
	}
	return max(places, 0)
}

// Done records the outcome of the delivery. ok is true if the destination was available, even if it rejected the
// message. If Done cannot store the outcome, it only logs the error: the delivery was made and must not fail.
func (p *Permit) Done(ctx context.Context, ok bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), writeTimeout)
	defer cancel()
	b := p.breakers
	var err error
	if p.epoch == 0 {
		b.countForRamp(p.name, ok)
	}
	if p.epoch != 0 { // a probe
		_, err = b.queries.ReportProbe(ctx, dbsqlc.ReportProbeParams{
			Name: p.name, Epoch: p.epoch, Ok: ok, Probes: int32(p.settings.Probes), SuccessRate: p.settings.SuccessRate,
			OpenFor: p.settings.OpenFor, Actor: b.config.Actor, Now: b.config.Now(), Until: p.until,
		})
		if err == nil {
			err = b.Sync(ctx)
		}
	} else if p.settings.Enabled {
		if opening := b.count(p, ok); opening != nil {
			if _, err = b.queries.OpenBreaker(ctx, *opening); err == nil {
				b.dropUnwritten(p.name)
			}
		}
	}
	if err != nil {
		b.config.Logger.Error("circuit breaker: storing the outcome of a delivery failed", "breaker", p.name, "error", err)
	}
}

// count counts a delivery. If the breaker should open, it returns the opening, and nil otherwise. Only a failed
// delivery opens the breaker.
func (b *Breakers) count(p *Permit, ok bool) *dbsqlc.OpenBreakerParams {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := b.localOf(p.name, p.settings)
	if ok {
		l.window.RecordSuccess()
		if l.streak != nil {
			l.streak.RecordSuccess()
		}
		return nil
	}
	l.window.RecordFailure()
	if l.streak != nil {
		l.streak.RecordFailure()
	}
	var reason string
	counted := l.window.Metrics()
	switch {
	case l.streak != nil && l.streak.IsOpen():
		reason = fmt.Sprintf("%d consecutive failures", l.settings.ConsecutiveFailures)
	case counted.Executions() >= l.settings.MinimumCount &&
		100*float64(counted.Failures()) >= l.settings.FailureRate*float64(counted.Executions()):
		reason = fmt.Sprintf("%d of %d deliveries in the last %s failed (limit %g %%)", counted.Failures(),
			counted.Executions(), l.settings.Window, l.settings.FailureRate)
	default:
		return nil
	}
	delete(b.local, p.name)
	if state, _ := b.state(p.name); state != Closed {
		return nil // the delivery began before the breaker opened
	}
	// This process treats the breaker as open from now on, even if the database does not answer.
	now := b.config.Now()
	until := now.Add(l.settings.OpenFor)
	b.shared[p.name] = dbsqlc.BreakersRow{
		Name: p.name, State: string(Open), Since: now, TroubleSince: &now, OpenUntil: &until,
		Reason: reason, ChangedBy: b.config.Actor,
	}
	b.fall(p.name)
	b.config.Logger.Warn("circuit breaker changed", "breaker", p.name, "from", string(Closed), "to", string(Open),
		"reason", reason)
	opening := dbsqlc.OpenBreakerParams{
		Name: p.name, Actor: b.config.Actor, Reason: reason, For: &l.settings.OpenFor, Now: now,
	}
	b.unwritten[p.name] = opening
	return &opening
}

// dropUnwritten drops the unwritten opening of a breaker. It reports whether there was one.
func (b *Breakers) dropUnwritten(name string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, was := b.unwritten[name]
	delete(b.unwritten, name)
	return was
}

func (b *Breakers) localOf(name string, settings policy.Breaker) *local {
	if l := b.local[name]; l != nil && l.settings == settings {
		return l
	}
	l := &local{
		settings: settings,
		window:   circuitbreaker.NewBuilder[any]().WithFailureRateThreshold(1, math.MaxUint, settings.Window).Build(),
	}
	if settings.ConsecutiveFailures > 0 {
		l.streak = circuitbreaker.NewBuilder[any]().WithFailureThreshold(settings.ConsecutiveFailures).WithDelay(
			time.Hour).Build()
	}
	b.local[name] = l
	return l
}

// Status is a breaker's state for the API and the console.
type Status struct {
	Name            string     `json:"name" doc:"Name of the breaker: destination: and the destination's name, or queue: and the name of a River queue." example:"destination:payments"`
	State           State      `json:"state" enum:"closed,open,half_open" doc:"closed: deliveries pass. open: no delivery passes. half_open: a few probes pass."`
	Since           *time.Time `json:"since,omitempty" doc:"When the breaker closed; if it is open or half-open, when it was last closed. Absent if it has never opened."`
	LastTried       *time.Time `json:"lastTriedAt,omitempty" doc:"When the last probe of an open or half-open breaker began; absent if none began since it opened."`
	OpenUntil       *time.Time `json:"openUntil,omitempty" doc:"When an open breaker lets probes through; absent if an operator opened it until it is reset."`
	Forced          bool       `json:"forced" doc:"Whether an operator opened the breaker."`
	ProbesSucceeded int        `json:"probesSucceeded" doc:"Successful probes of the current or last half-open period."`
	ProbesFailed    int        `json:"probesFailed" doc:"Failed probes of the current or last half-open period."`
	Deliveries      int        `json:"deliveries" doc:"Deliveries that this process counts in the window."`
	FailureRate     float64    `json:"failureRate" doc:"Percentage of these deliveries that failed."`
	Reason          string     `json:"reason,omitempty" doc:"Why the breaker is in this state."`
	ChangedBy       string     `json:"changedBy,omitempty" doc:"Process or operator that changed the state."`
}

// List returns the policy's breakers, and all other breakers that have ever opened.
func (b *Breakers) List() []Status {
	p := b.config.Policy()
	b.mu.Lock()
	defer b.mu.Unlock()
	names := map[string]bool{}
	for name := range p.Destinations {
		names[DestinationPrefix+name] = true
	}
	for name := range p.Breakers.RiverQueues {
		names[QueuePrefix+name] = true
	}
	for name := range b.shared {
		names[name] = true
	}
	list := make([]Status, 0, len(names))
	for name := range names {
		status := Status{Name: name, State: Closed}
		if row, ok := b.shared[name]; ok {
			status = Status{
				Name: name, State: State(row.State), Since: cmp.Or(row.TroubleSince, &row.Since),
				LastTried: row.LastTriedAt, OpenUntil: row.OpenUntil, Forced: row.Forced,
				ProbesSucceeded: int(row.ProbesSucceeded), ProbesFailed: int(row.ProbesFailed),
				Reason: row.Reason, ChangedBy: row.ChangedBy,
			}
		}
		if l := b.local[name]; l != nil {
			metrics := l.window.Metrics()
			status.Deliveries, status.FailureRate = int(metrics.Executions()), 100*metrics.FailureRate()
		}
		list = append(list, status)
	}
	slices.SortFunc(list, func(a, c Status) int { return strings.Compare(a.Name, c.Name) })
	return list
}

// Find returns the breaker with a name from [Breakers.List], or false if there is none.
func (b *Breakers) Find(name string) (Status, bool) {
	list := b.List()
	i := slices.IndexFunc(list, func(s Status) bool { return s.Name == name })
	if i < 0 {
		return Status{}, false
	}
	return list[i], true
}

// ForceOpen opens a breaker for an operator, for the given duration; 0 means until an operator resets it.
func (b *Breakers) ForceOpen(ctx context.Context, name, actor, reason string, during time.Duration) error {
	params := dbsqlc.OpenBreakerParams{
		Name: name, Actor: actor, Reason: cmp.Or(reason, "opened by an operator"),
		Forced: true, Origin: deadletter.Origin(ctx), Now: b.config.Now(),
	}
	if during > 0 {
		params.For = &during
	}
	if _, err := b.queries.OpenBreaker(ctx, params); err != nil {
		return err
	}
	return b.Sync(ctx)
}

// Reset closes a breaker for an operator. It reports whether the breaker was open or half-open before.
func (b *Breakers) Reset(ctx context.Context, name, actor, reason string) (bool, error) {
	was, err := b.queries.ResetBreaker(ctx, dbsqlc.ResetBreakerParams{
		Name: name, Actor: actor, Reason: cmp.Or(reason, "reset by an operator"),
		Origin: deadletter.Origin(ctx), Now: b.config.Now(),
	})
	if err != nil {
		return false, err
	}
	was = b.dropUnwritten(name) || was // perhaps only this process knew that the breaker was open
	return was, b.Sync(ctx)
}
