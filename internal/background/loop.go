// Package background runs the background loops of a process. A loop runs one turn again and again.
// A group starts loops, stops them by a deadline and reports their status.
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
	// DefaultTimeout bounds a turn if the loop sets no timeout.
	DefaultTimeout = 30 * time.Second
	// DefaultRetry is the delay after the first failed turn if the loop sets no Retry, and at most the interval.
	DefaultRetry = time.Second
	// More is the delay that a turn returns if work is left. The next turn then begins at once.
	More = time.Duration(-1)

	// patienceIntervals is the number of intervals without a success after which a loop is unhealthy.
	patienceIntervals = 3
	// patienceFailures is the number of consecutive failures after which a loop is unhealthy.
	patienceFailures = 3
	// finishTime bounds how long a stop waits for a turn that may finish (see Finish in [Config]).
	finishTime = time.Second
	// returnTime is how long a stop waits for a cancelled turn to return after the deadline of the stop.
	returnTime = 100 * time.Millisecond
	// idleInterval is the time between calls of Idle by an idle loop, unless the loop's interval is shorter.
	idleInterval = time.Second
	// backoffJitter is the share by which the delay after a failure varies, so that processes that failed together do not
	// all retry at the same time.
	backoffJitter = 0.25
	// An error that persists is logged at once, again after logAgain, and then at growing intervals, up to maxLogAgain.
	logAgain    = time.Minute
	maxLogAgain = time.Hour
	// maxLogged is the maximum number of distinct errors that a loop remembers until a turn succeeds.
	maxLogged = 10
)

// Config configures a [Loop].
type Config struct {
	// Name identifies the loop in the health report, in metrics and in the log.
	Name string
	// Interval is the time between the starts of two turns. It is different if a turn takes longer, fails or returns
	// another delay, or if the loop is woken.
	Interval time.Duration
	// Timeout bounds a turn; 0 means DefaultTimeout.
	Timeout time.Duration
	// Retry is the delay after a failed turn, with jitter. While turns fail, the delay doubles up to the interval, and
	// Wake does not shorten it. 0 means DefaultRetry, or the interval if that is shorter.
	Retry time.Duration
	// Patience is how long the loop stays healthy without a success; 0 means three intervals.
	Patience time.Duration
	// Gather is how long the loop waits after a wake-up for further wake-ups before the turn starts.
	Gather time.Duration
	// Finish lets the current turn finish when the loop is stopped, for up to a second. If Finish is false, a stop
	// cancels the turn's context at once.
	Finish bool
	// OneProcess says that only one process of a database at a time does the work of a turn. In the other processes, Once
	// does nothing.
	OneProcess bool
	// WhenIdle lets the loop run while the group is idle, so that it can find out whether the other loops may continue.
	WhenIdle bool
	// Failing is the log message of a failed turn. It says what failed and, if an operator would not expect it, the
	// effect until a turn succeeds.
	Failing string
	// Once runs one turn. It returns the delay from the turn's end to the next turn. 0 means the interval, and More means
	// no delay.
	Once func(ctx context.Context) (time.Duration, error)
	// End, if not nil, is called after the loop has ended, to release resources of its turns.
	End func()
}

// Each returns a Once that always uses the loop's interval as the delay.
func Each(once func(ctx context.Context) error) func(context.Context) (time.Duration, error) {
	return func(ctx context.Context) (time.Duration, error) { return 0, once(ctx) }
}

// Status is the status of a loop.
type Status struct {
	Name        string
	OneProcess  bool
	LastSuccess time.Time // zero before the first success
	TurnSince   time.Time // start of the current turn; zero if there is none
	Errors      int64     // failed turns since the process started
	Idle        string    // reason why the loop runs no turns; empty if it runs them
	Problem     string    // reason why the loop is unhealthy; empty if it is healthy
}

// Loop runs one turn again and again. Any goroutine may start and stop it, any number of times.
type Loop struct {
	config Config
	wake   chan struct{}

	life sync.Mutex // guards run
	run  *run       // the latest run; nil before the first

	stack string // stack of the last turn, if that turn panicked; used only by the loop's goroutine

	mu          sync.Mutex // guards the fields below
	running     bool
	since       time.Time     // when the time without success began: the last success, or the start of the loop
	wait        time.Duration // the delay that the last successful turn returned
	lastSuccess time.Time
	turnSince   time.Time
	errors      int64
	failures    int // number of consecutive failures
	idle        string
	logged      map[string]bool // texts of errors, without digits, that were logged since the last success
	logNext     time.Time
	logAfter    time.Duration
}

// run is one run of a loop, from its start to its end.
type run struct {
	stopCtx     context.Context // done when no further turn may start
	requestStop context.CancelFunc
	turnCtx     context.Context // parent of the turns' contexts
	cancelTurn  context.CancelFunc
	started     chan struct{}
	ended       chan struct{}
}

// New returns a loop that is not started.
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

// Name returns the loop's name.
func (l *Loop) Name() string { return l.config.Name }

// Wake makes the next turn start at once or, during a turn, when that turn has ended. If Gather is set, the turn starts
// that much later. Wake shortens neither the delay after a failed turn nor the wait of an idle loop. It never blocks.
func (l *Loop) Wake() {
	select {
	case l.wake <- struct{}{}:
	default: // another wake-up is pending
	}
}

// start starts the loop for a group, unless the loop is running.
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
	r.stopCtx, r.requestStop = context.WithCancel(context.Background())
	r.turnCtx, r.cancelTurn = context.WithCancel(context.Background())
	l.run = r
	l.mu.Lock()
	l.running, l.since, l.wait, l.failures, l.idle, l.logged = true, time.Now(), 0, 0, "", nil
	l.mu.Unlock()
	go l.loop(r, group)
}

// Started returns a channel that is closed when the loop has begun. The loop must have been started.
func (l *Loop) Started() <-chan struct{} {
	l.life.Lock()
	defer l.life.Unlock()
	return l.run.started
}

// Stop prevents further turns, cancels the current one (see Finish in [Config]), and waits until the loop has ended. If
// the turn has not returned shortly after ctx is done, Stop does not wait any longer, and returns an error that names
// the loop.
func (l *Loop) Stop(ctx context.Context) error {
	l.life.Lock()
	r := l.run
	l.life.Unlock()
	if r == nil {
		return nil
	}
	r.requestStop()
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
	r.cancelTurn()
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
		return fmt.Errorf("loop %s: the turn did not end in time", l.config.Name)
	}
}

func (l *Loop) loop(r *run, group *Group) {
	defer close(r.ended)
	defer r.cancelTurn()
	defer func() {
		if l.config.End != nil {
			l.config.End()
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.running = false
	}()
	close(r.started)
	for r.stopCtx.Err() == nil {
		wait, wake := l.turn(r, group)
		if wait > 0 {
			l.pause(r, wait, wake)
		}
	}
}

// pause waits for the next turn. A nil wake never ends the wait.
func (l *Loop) pause(r *run, wait time.Duration, wake <-chan struct{}) {
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-r.stopCtx.Done():
	case <-timer.C:
	case <-wake:
		if l.config.Gather > 0 {
			l.pause(r, l.config.Gather, nil)
		}
	}
}

// turn runs one turn. It returns the delay before the next turn, and the channel that may shorten the delay, or nil.
func (l *Loop) turn(r *run, group *Group) (time.Duration, <-chan struct{}) {
	if group.Idle != nil && !l.config.WhenIdle {
		why := group.Idle()
		l.setIdle(why)
		if why != nil {
			return min(l.config.Interval, idleInterval), nil
		}
	}
	start := time.Now()
	l.mu.Lock()
	l.turnSince = start
	l.mu.Unlock()
	ctx, cancel := context.WithTimeout(r.turnCtx, l.config.Timeout)
	wait, err := l.once(ctx)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("a turn did not end within %s: %w", l.config.Timeout, err)
	}
	cancel()
	if group.Observe != nil && (err == nil || r.turnCtx.Err() == nil) { // skip a turn that a stop cancelled
		group.Observe(l.config.Name, time.Since(start), err)
	}

	l.mu.Lock()
	defer l.mu.Unlock()
	l.turnSince = time.Time{}
	switch {
	case err != nil && r.turnCtx.Err() != nil: // a stop cancelled the turn
		return 0, nil
	case err != nil:
		return l.recordFailure(group.Logger, err), nil
	}
	if wait == 0 {
		wait = l.config.Interval - time.Since(start)
	}
	wait = max(wait, 0)
	l.recordSuccess(group.Logger, wait)
	return wait, l.wake
}

// once runs a turn. If the turn panics, once returns the panic as an error, so that the rest of the process continues.
func (l *Loop) once(ctx context.Context) (wait time.Duration, err error) {
	defer func() {
		if p := recover(); p != nil {
			panicked := Panicked(p)
			err, l.stack = fmt.Errorf("a turn panicked: %v", p), panicked.Stack
		}
	}()
	return l.config.Once(ctx)
}

// setIdle records whether the loop is idle. Time in which the loop is idle does not count as time without a success.
func (l *Loop) setIdle(why error) {
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

func (l *Loop) recordSuccess(logger *slog.Logger, wait time.Duration) {
	if l.failures > 0 {
		logger.Info("loop recovered", "loop", l.config.Name, "failed_turns", l.failures, "last_success", l.lastSuccess)
	}
	l.lastSuccess = time.Now()
	l.since, l.wait = l.lastSuccess, wait
	l.failures, l.logged = 0, nil
}

// recordFailure records a failed turn and returns the delay before the next one.
func (l *Loop) recordFailure(logger *slog.Logger, err error) time.Duration {
	l.errors++
	l.failures++
	if l.shouldLog(err, time.Now()) {
		if l.stack != "" {
			logger = logger.With("stack", l.stack)
		}
		logger.Error(cmp.Or(l.config.Failing, "loop turn failed"), "loop", l.config.Name,
			"failed_turns", l.failures, "error", err)
	}
	l.stack = ""
	wait := l.config.Retry
	for i := 1; i < l.failures && wait < l.config.Interval; i++ {
		wait = min(2*wait, l.config.Interval)
	}
	return time.Duration(float64(wait) * (1 + backoffJitter*(2*mathrand.Float64()-1)))
}

// shouldLog reports whether to log an error: the error is new, or it persists and was not logged for some time.
func (l *Loop) shouldLog(err error, now time.Time) bool {
	text := strings.Map(func(c rune) rune {
		if unicode.IsDigit(c) { // digits of ports, process ids and times differ each time
			return -1
		}
		return c
	}, err.Error())
	switch {
	case l.logged == nil:
		l.logged, l.logAfter = map[string]bool{}, logAgain
	case !l.logged[text] && len(l.logged) < maxLogged:
	case now.Before(l.logNext):
		return false
	default:
		l.logAfter = min(2*l.logAfter, maxLogAgain)
	}
	l.logged[text] = true
	l.logNext = now.Add(l.logAfter)
	return true
}

// Status returns the current status of the loop.
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
		return "not running"
	case !l.turnSince.IsZero() && now.Sub(l.turnSince) > l.config.Timeout:
		return fmt.Sprintf("a turn hangs: it started at %s and has a timeout of %s",
			l.turnSince.UTC().Format(time.RFC3339), l.config.Timeout)
	case l.idle != "":
		return ""
	case l.failures >= patienceFailures:
		return fmt.Sprintf("%d turns in a row failed; see the log", l.failures)
	case now.Sub(l.since) > patience:
		return "no turn has succeeded since " + l.since.UTC().Format(time.RFC3339)
	}
	return ""
}
