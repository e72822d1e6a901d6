// Package background is what runs behind the requests: loops that make one turn again and again, in a group that starts
// them, stops them by a deadline, and says how each is.
package background

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"strings"
	"sync"
	"time"
	"unicode"
)

const (
	// DefaultTimeout bounds a turn whose loop says nothing else.
	DefaultTimeout = 30 * time.Second
	// DefaultRetry is how long after a turn that failed the next one begins.
	DefaultRetry = time.Second
	// More is what a turn returns after which there is more to do: the next one follows at once.
	More = time.Duration(-1)

	// patienceIntervals is for how many intervals a loop may be without success.
	patienceIntervals = 3
	// patienceFailures is how many turns in a row may fail.
	patienceFailures = 3
	// finishTime is how long a stop lets a turn go on that is to finish.
	finishTime = time.Second
	// returnTime is how long a turn gets to return after its context was cancelled, where the stop's deadline has passed.
	returnTime = 100 * time.Millisecond
	// idleInterval is how often an idle loop asks whether it may go on, unless its own interval is shorter.
	idleInterval = time.Second
	// backoffJitter is the share of the time between turns that fail by which it varies, so that processes that failed
	// together do not come back together.
	backoffJitter = 0.25
	// An error that stays is logged at first and after logAgain, and then ever more rarely, up to maxLogAgain.
	logAgain    = time.Minute
	maxLogAgain = time.Hour
	// maxSeen bounds how many different errors are told apart until a turn succeeds again.
	maxSeen = 10
)

// Config says what a [Loop] does.
type Config struct {
	// Name is the loop's, in health, metrics and log.
	Name string
	// Interval is between the beginnings of two turns.
	Interval time.Duration
	// Timeout bounds a turn; 0 means DefaultTimeout.
	Timeout time.Duration
	// Retry is how long after a turn that failed the next one begins, jittered. It doubles up to the interval while turns go on
	// failing, and no wake-up cuts it short. 0 means DefaultRetry, or the interval where that is shorter.
	Retry time.Duration
	// Patience is how long the loop may be without success and count as healthy; 0 means three intervals.
	Patience time.Duration
	// Gather is how long a wake-up waits for others before the turn begins.
	Gather time.Duration
	// Finish has a stop let the turn that is under way end by itself, for a second. Otherwise its context is cancelled at
	// once.
	Finish bool
	// OneProcess says that of all processes on a database one makes a turn at a time, and Once of the others does nothing.
	OneProcess bool
	// WhenIdle has the loop make its turns also while the group is idle: it finds out whether the others may go on.
	WhenIdle bool
	// Failing says what does not happen while turns fail, for the log.
	Failing string
	// Once is one turn. It returns how long to wait from its end until the next: 0 for the interval, More for not at all.
	Once func(ctx context.Context) (time.Duration, error)
	// End gives back what turns have held on to; nil for nothing. It is called when the loop has ended.
	End func()
}

// Each is a turn that is always followed by the next at the interval.
func Each(once func(ctx context.Context) error) func(context.Context) (time.Duration, error) {
	return func(ctx context.Context) (time.Duration, error) { return 0, once(ctx) }
}

// Status is how a loop is.
type Status struct {
	Name        string
	OneProcess  bool
	LastSuccess time.Time // zero before the first
	TurnSince   time.Time // of the turn that is under way; zero where none is
	Errors      int64     // turns that failed, since the process began
	Idle        string    // why it makes no turns; empty where it makes them
	Problem     string    // why it is unhealthy; empty where it is healthy
}

// Loop makes one turn again and again. It can be started and stopped any number of times, from any goroutine.
type Loop struct {
	config Config
	wake   chan struct{}

	life sync.Mutex // held to start it, and to tell it to stop
	run  *run       // the last one; nil before the first

	stack string // of the last turn, if it panicked; for who makes turns alone

	mu          sync.Mutex // guards the rest
	running     bool
	since       time.Time     // without success: the last one, or when it began
	wait        time.Duration // that the last success asked for
	lastSuccess time.Time
	turnSince   time.Time
	errors      int64
	failures    int // in a row
	idle        string
	seen        map[string]bool // errors that were logged since the last success, without their digits
	logNext     time.Time
	logAfter    time.Duration
}

// run is one run of a loop, from its start to its end.
type run struct {
	stop    context.Context // done once no turn may begin any more
	cancel  context.CancelFunc
	turns   context.Context // of the turns
	cut     context.CancelFunc
	started chan struct{}
	ended   chan struct{}
}

// New returns a loop that does not run yet.
func New(config Config) *Loop {
	if config.Timeout == 0 {
		config.Timeout = DefaultTimeout
	}
	if config.Retry == 0 {
		config.Retry = min(DefaultRetry, config.Interval)
	}
	if config.Patience == 0 {
		config.Patience = patienceIntervals * config.Interval
	}
	return &Loop{config: config, wake: make(chan struct{}, 1)}
}

// Name is the loop's.
func (l *Loop) Name() string { return l.config.Name }

// Wake has the next turn begin now. It never blocks.
func (l *Loop) Wake() {
	select {
	case l.wake <- struct{}{}:
	default: // somebody has
	}
}

// start starts the loop of a group, unless it runs.
func (l *Loop) start(group *Group) {
	l.life.Lock()
	defer l.life.Unlock()
	if l.run != nil {
		select {
		case <-l.run.ended:
		default:
			return
		}
	}
	r := &run{started: make(chan struct{}), ended: make(chan struct{})}
	r.stop, r.cancel = context.WithCancel(context.Background())
	r.turns, r.cut = context.WithCancel(context.Background())
	l.run = r
	l.mu.Lock()
	l.running, l.since, l.wait, l.failures, l.idle, l.seen = true, time.Now(), 0, 0, "", nil
	l.mu.Unlock()
	go l.loop(r, group)
}

// Started is closed when the loop, which was started, has begun.
func (l *Loop) Started() <-chan struct{} {
	l.life.Lock()
	defer l.life.Unlock()
	return l.run.started
}

// Stop lets no turn begin any more, and waits until the loop has ended. When ctx is done, the turn that is under way is
// cut short; one that does not heed that is left behind, and named in the error.
func (l *Loop) Stop(ctx context.Context) error {
	l.life.Lock()
	r := l.run
	l.life.Unlock()
	if r == nil {
		return nil
	}
	r.cancel()
	if l.config.Finish {
		finish := time.NewTimer(finishTime)
		defer finish.Stop()
		select {
		case <-r.ended:
			return nil
		case <-finish.C:
		case <-ctx.Done():
		}
	}
	r.cut()
	select {
	case <-r.ended:
		return nil
	case <-ctx.Done():
	}
	last := time.NewTimer(returnTime)
	defer last.Stop()
	select {
	case <-r.ended:
		return nil
	case <-last.C:
		return fmt.Errorf("%s: a turn did not end in time", l.config.Name)
	}
}

func (l *Loop) loop(r *run, group *Group) {
	defer close(r.ended)
	defer r.cut()
	defer func() {
		if l.config.End != nil {
			l.config.End()
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.running = false
	}()
	close(r.started)
	for r.stop.Err() == nil {
		wait, wake := l.turn(r, group)
		if wait > 0 {
			l.pause(r, wait, wake)
		}
	}
}

// pause waits until the next turn. A nil wake is one that never comes.
func (l *Loop) pause(r *run, wait time.Duration, wake <-chan struct{}) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-r.stop.Done():
	case <-timer.C:
	case <-wake:
		if l.config.Gather > 0 {
			l.pause(r, l.config.Gather, nil)
		}
	}
}

// turn makes one turn, and returns how long to wait until the next, and what may cut that short.
func (l *Loop) turn(r *run, group *Group) (time.Duration, <-chan struct{}) {
	if group.Idle != nil && !l.config.WhenIdle {
		why := group.Idle()
		l.rest(why)
		if why != nil {
			return min(l.config.Interval, idleInterval), nil
		}
	}
	start := time.Now()
	l.mu.Lock()
	l.turnSince = start
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(r.turns, l.config.Timeout)
	wait, err := l.once(ctx)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("a turn did not end within %s: %w", l.config.Timeout, err)
	}
	cancel()
	if group.Observe != nil && (err == nil || r.turns.Err() == nil) { // not what was cut short
		group.Observe(l.config.Name, time.Since(start), err)
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	l.turnSince = time.Time{}
	switch {
	case err != nil && r.turns.Err() != nil: // it was cut short
		return 0, nil
	case err != nil:
		return l.failed(group.Logger, err), nil
	}
	if wait == 0 {
		wait = l.config.Interval - time.Since(start)
	}
	wait = max(wait, 0)
	l.succeeded(group.Logger, wait)
	return wait, l.wake
}

// once makes a turn. One that panics has failed: what else the process does goes on.
func (l *Loop) once(ctx context.Context) (wait time.Duration, err error) {
	defer func() {
		if p := recover(); p != nil {
			panicked := Panicked(p)
			err, l.stack = fmt.Errorf("a turn panicked: %v", p), panicked.Stack
		}
	}()
	return l.config.Once(ctx)
}

// rest takes in whether the loop is idle. When it goes on, it has not been silent meanwhile.
func (l *Loop) rest(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if why != nil {
		l.idle = why.Error()
		return
	}
	if l.idle != "" {
		l.idle, l.since, l.wait, l.failures = "", time.Now(), 0, 0
	}
}

func (l *Loop) succeeded(logger *slog.Logger, wait time.Duration) {
	if l.failures > 0 {
		logger.Info("works again", "loop", l.config.Name, "failed_turns", l.failures, "last_success", l.lastSuccess)
	}
	l.lastSuccess = time.Now()
	l.since, l.wait = l.lastSuccess, wait
	l.failures, l.seen = 0, nil
}

// failed takes in that a turn failed, and returns how long to wait until the next.
func (l *Loop) failed(logger *slog.Logger, err error) time.Duration {
	l.errors++
	l.failures++
	if l.worthLogging(err, time.Now()) {
		if l.stack != "" {
			logger = logger.With("stack", l.stack)
		}
		logger.Error(cmp.Or(l.config.Failing, "a turn failed"), "loop", l.config.Name, "failed_turns", l.failures, "error", err)
	}
	l.stack = ""
	wait := l.config.Retry
	for i := 1; i < l.failures && wait < l.config.Interval; i++ {
		wait = min(2*wait, l.config.Interval)
	}
	return time.Duration(float64(wait) * (1 + backoffJitter*(2*mathrand.Float64()-1)))
}

// worthLogging says whether to log an error: one that was not there before, and one that is still there after a while.
func (l *Loop) worthLogging(err error, now time.Time) bool {
	text := strings.Map(func(c rune) rune {
		if unicode.IsDigit(c) { // ports, process ids and times
			return -1
		}
		return c
	}, err.Error())
	switch {
	case l.seen == nil:
		l.seen, l.logAfter = map[string]bool{}, logAgain
	case !l.seen[text] && len(l.seen) < maxSeen:
	case now.Before(l.logNext):
		return false
	default:
		l.logAfter = min(2*l.logAfter, maxLogAgain)
	}
	l.seen[text] = true
	l.logNext = now.Add(l.logAfter)
	return true
}

// Status is how the loop is now.
func (l *Loop) Status() Status {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Status{
		Name: l.config.Name, OneProcess: l.config.OneProcess, LastSuccess: l.lastSuccess, TurnSince: l.turnSince,
		Errors: l.errors, Idle: l.idle, Problem: l.problem(time.Now()),
	}
}

func (l *Loop) problem(now time.Time) string {
	patience := l.config.Patience + max(l.wait-l.config.Interval, 0)
	switch {
	case !l.running:
		return "does not run"
	case !l.turnSince.IsZero() && now.Sub(l.turnSince) > l.config.Timeout:
		return "a turn hangs, since " + l.turnSince.UTC().Format(time.RFC3339)
	case l.idle != "":
		return ""
	case l.failures >= patienceFailures:
		return fmt.Sprintf("%d turns in a row have failed; the log says why", l.failures)
	case now.Sub(l.since) > patience:
		return "without success since " + l.since.UTC().Format(time.RFC3339)
	}
	return ""
}
