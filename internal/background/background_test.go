package background_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
)

// bundle has a loop whose turns the test controls. It runs in a bubble in which time advances while all goroutines
// wait.
type bundle struct {
	*testing.T

	group *background.Group
	loop  *background.Loop
	turns atomic.Int64
	fail  atomic.Pointer[error]
	log   logBuffer
}

// logBuffer collects log output.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logBuffer) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// setup returns a loop that is not started and has an interval of one second. Its turns succeed until failing sets an
// error.
func setup(t *testing.T, change func(*background.Config)) *bundle {
	t.Helper()
	b := &bundle{T: t}
	config := background.Config{
		Name: "test", Interval: time.Second, Failing: "testing failed",
		Once: background.Each(func(context.Context) error {
			b.turns.Add(1)
			if err := b.fail.Load(); err != nil {
				return *err
			}
			return nil
		}),
	}
	if change != nil {
		change(&config)
	}
	b.group = &background.Group{Logger: slog.New(slog.NewTextHandler(&b.log, nil))}
	b.loop = background.New(config)
	b.group.Add(b.loop)
	return b
}

func (b *bundle) start() {
	b.group.Start()
	<-b.loop.Started()
}

func (b *bundle) stop() {
	b.Helper()
	require.NoError(b, b.group.Stop(context.Background()))
}

func (b *bundle) advance(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (b *bundle) failing(err error) { b.fail.Store(&err) }

func (b *bundle) logCount() int { return strings.Count(b.log.String(), "testing failed") }

func TestLoop_RunsAtOnceAndAtItsInterval(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, nil)
		b.start()
		b.advance(0)
		require.EqualValues(t, 1, b.turns.Load())
		b.advance(10 * time.Second)
		require.EqualValues(t, 11, b.turns.Load())
		require.Empty(t, b.loop.Status().Problem)
		b.group.Start() // no effect: the loop is running
		b.advance(time.Second)
		require.EqualValues(t, 12, b.turns.Load())
		b.stop()
		b.advance(time.Hour)
		require.EqualValues(t, 12, b.turns.Load())
		require.Equal(t, "not running", b.loop.Status().Problem)
		b.start()
		b.advance(0)
		require.EqualValues(t, 13, b.turns.Load())
		b.stop()
	})
}

func TestLoop_RecoversFromPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var broken atomic.Bool
		broken.Store(true)
		b := setup(t, func(c *background.Config) {
			c.Once = func(context.Context) (time.Duration, error) {
				if broken.Load() {
					panic("no such row")
				}
				return 0, nil
			}
		})
		b.start()
		b.advance(10 * time.Second)
		require.Contains(t, b.loop.Status().Problem, "turns in a row failed")
		require.Contains(t, b.log.String(), "a turn panicked: no such row")
		require.Contains(t, b.log.String(), "background_test.go", "the stack")
		broken.Store(false)
		b.advance(time.Minute)
		require.Empty(t, b.loop.Status().Problem)
		b.stop()
	})
}

func TestLoop_RunsAgainWhileWorkIsLeft(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		left := 5
		b := setup(t, func(c *background.Config) {
			c.Once = func(context.Context) (time.Duration, error) {
				if left--; left > 0 {
					return background.More, nil
				}
				return time.Hour, nil
			}
		})
		b.start()
		b.advance(0)
		require.Zero(t, left)
		b.advance(time.Hour - time.Second)
		require.Empty(t, b.loop.Status().Problem, "the turn asked for this delay")
		require.Zero(t, left)
		b.stop()
	})
}

func TestLoop_WakeStartsTheNextTurn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, func(c *background.Config) { c.Interval, c.Gather = time.Hour, 20*time.Millisecond })
		b.start()
		b.advance(time.Minute)
		for range 10 {
			b.loop.Wake()
		}
		b.advance(10 * time.Millisecond)
		require.EqualValues(t, 1, b.turns.Load(), "it gathers further wake-ups")
		b.advance(20 * time.Millisecond)
		require.EqualValues(t, 2, b.turns.Load())
		b.failing(errors.New("unavailable"))
		b.loop.Wake()
		b.advance(100 * time.Millisecond)
		require.EqualValues(t, 3, b.turns.Load())
		b.loop.Wake()
		b.advance(100 * time.Millisecond)
		require.EqualValues(t, 3, b.turns.Load(), "a wake-up does not shorten the delay after an error")
		b.stop()
	})
}

func TestLoop_BacksOffAndLogsOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, func(c *background.Config) { c.Interval = 16 * time.Second })
		b.failing(errors.New("port 4711 refused"))
		b.start()
		b.advance(0)
		require.Equal(t, 1, b.logCount())
		require.Empty(t, b.loop.Status().Problem)
		b.advance(4 * time.Second) // after about 1 and 2 s
		require.EqualValues(t, 3, b.turns.Load())
		require.Contains(t, b.loop.Status().Problem, "3 turns in a row failed")
		b.failing(errors.New("port 4712 refused"))
		b.advance(30 * time.Second)
		require.Less(t, b.turns.Load(), int64(8))
		require.Equal(t, 1, b.logCount(), "the same error but for its digits")
		b.failing(errors.New("no such table"))
		b.advance(20 * time.Second)
		require.Equal(t, 2, b.logCount())
		b.advance(24 * time.Hour)
		require.Greater(t, b.logCount(), 10, "a persistent error is logged again")
		require.Less(t, b.logCount(), 40)
		require.Equal(t, b.turns.Load(), b.loop.Status().Errors)

		b.fail.Store(nil)
		b.advance(20 * time.Second)
		require.Empty(t, b.loop.Status().Problem)
		require.Equal(t, 1, strings.Count(b.log.String(), "loop recovered"))
		before := b.logCount()
		b.failing(errors.New("port 4711 refused"))
		b.advance(20 * time.Second)
		require.Equal(t, before+1, b.logCount(), "the error is new again after a success")
		b.stop()
	})
}

// A turn that returns when its context is cancelled fails at its timeout. If it does not return, the loop reports that
// the turn hangs.
func TestLoop_IsUnhealthyWithoutSuccess(t *testing.T) {
	t.Parallel()
	for name, returnsOnCancel := range map[string]bool{"fails": true, "hangs": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				release, blocked := make(chan struct{}), atomic.Bool{}
				b := setup(t, func(c *background.Config) {
					c.Timeout = 10 * time.Second
					c.Once = background.Each(func(ctx context.Context) error {
						if !blocked.Load() {
							return nil
						}
						if returnsOnCancel {
							<-ctx.Done()
							return ctx.Err()
						}
						<-release
						return nil
					})
				})
				b.start()
				b.advance(time.Minute)
				blocked.Store(true)
				b.advance(2500 * time.Millisecond)
				require.Empty(t, b.loop.Status().Problem)
				b.advance(time.Second)
				require.Contains(t, b.loop.Status().Problem, "no turn has succeeded since", "three intervals have passed")
				b.advance(8 * time.Second)
				if returnsOnCancel {
					require.Contains(t, b.log.String(), "a turn did not end within 10s")
					b.stop()
					return
				}
				require.Contains(t, b.loop.Status().Problem, "a turn hangs: it started at ")
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				require.EqualError(t, b.group.Stop(ctx), "loop test: the turn did not end in time")
				b.group.Start() // must not start a second run of the loop
				close(release)
				b.advance(0)
				b.start()
				b.advance(0)
				require.Empty(t, b.loop.Status().Problem)
				b.stop()
			})
		})
	}
}

func TestLoop_StopFinishesOrCancelsTheTurn(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		finish bool
		turn   time.Duration
		ends   bool
		took   time.Duration
	}{
		"cancels the turn at once":   {finish: false, turn: time.Minute, ends: false, took: 0},
		"lets the turn end":          {finish: true, turn: 500 * time.Millisecond, ends: true, took: 500 * time.Millisecond},
		"cancels the turn after 1 s": {finish: true, turn: time.Minute, ends: false, took: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var ended, closed bool
				b := setup(t, func(c *background.Config) {
					c.Timeout, c.Finish = time.Hour, test.finish
					c.End = func() { closed = true }
					c.Once = background.Each(func(ctx context.Context) error {
						select {
						case <-time.After(test.turn):
							ended = true
							return nil
						case <-ctx.Done():
							return ctx.Err()
						}
					})
				})
				b.start()
				b.advance(0)
				start := time.Now()
				b.stop()
				require.Equal(t, test.took, time.Since(start))
				require.Equal(t, test.ends, ended)
				require.True(t, closed)
				require.Zero(t, b.loop.Status().Errors, "a cancelled turn is no error")
				require.Empty(t, b.log.String())
			})
		})
	}
}

func TestGroup_IdleLoopsRunNoTurns(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var idle atomic.Pointer[error]
		b := setup(t, func(c *background.Config) { c.Interval = time.Minute })
		var looks atomic.Int64
		b.group.Add(background.New(background.Config{
			Name: "look", Interval: time.Second, WhenIdle: true,
			Once: background.Each(func(context.Context) error { looks.Add(1); return nil }),
		}))
		b.group.Idle = func() error {
			if err := idle.Load(); err != nil {
				return *err
			}
			return nil
		}
		b.start()
		b.advance(0)
		require.EqualValues(t, 1, b.turns.Load())
		detached := errors.New("dlqd was detached")
		idle.Store(&detached)
		b.advance(time.Hour)
		require.EqualValues(t, 1, b.turns.Load())
		require.EqualValues(t, 3601, looks.Load())
		status := b.loop.Status()
		require.Equal(t, "dlqd was detached", status.Idle)
		require.Empty(t, status.Problem)
		idle.Store(nil)
		b.advance(time.Second)
		require.EqualValues(t, 2, b.turns.Load())
		require.Empty(t, b.loop.Status().Idle)
		require.Empty(t, b.log.String())
		b.stop()
	})
}

// TestGroup_ConcurrentStartsAndStops starts, wakes and stops loops concurrently. No loop runs two turns at a time, and
// after the last stop no loop runs.
func TestGroup_ConcurrentStartsAndStops(t *testing.T) {
	t.Parallel()
	group := &background.Group{Logger: slog.New(slog.DiscardHandler)}
	const n = 10
	var running [n]atomic.Int64
	for i := range n {
		group.Add(background.New(background.Config{
			Name: fmt.Sprint("loop ", i), Interval: time.Millisecond, Finish: i%2 == 0,
			Once: func(ctx context.Context) (time.Duration, error) {
				if running[i].Add(1) > 1 {
					panic("two turns at a time")
				}
				defer running[i].Add(-1)
				if i%2 != 0 && rand.IntN(10) == 0 {
					<-ctx.Done()
				}
				return []time.Duration{0, background.More}[rand.IntN(2)], ctx.Err()
			},
		}))
	}
	var callers sync.WaitGroup
	for range 8 {
		callers.Go(func() {
			for range 50 {
				switch rand.IntN(4) {
				case 0:
					_ = group.Stop(t.Context())
				case 1:
					for _, l := range group.Loops() {
						l.Wake()
						_ = l.Status()
					}
				default:
					group.Start()
				}
			}
		})
	}
	callers.Wait()
	require.NoError(t, group.Stop(t.Context()))
	for i, status := range group.Statuses() {
		require.Contains(t, []string{"", "not running"}, status.Problem)
		require.Zero(t, running[i].Load())
	}
}
