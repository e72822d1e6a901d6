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

// bundle is a loop with turns of the test, in a bubble whose time advances while all goroutines
// wait.
type bundle struct {
	*testing.T

	group *background.Group
	loop  *background.Loop
	turns atomic.Int64
	fail  atomic.Pointer[error]
	log   log
}

// log collects what is logged.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// setup returns a loop that is not started, with an interval of one second. Its turns succeed until
// failing sets an error.
func setup(t *testing.T, change func(*background.Config)) *bundle {
	t.Helper()
	b := &bundle{T: t}
	config := background.Config{
		Name: "test", Interval: time.Second, Failing: "nothing is tested",
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

func (b *bundle) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func (b *bundle) failing(err error) { b.fail.Store(&err) }

func (b *bundle) logged() int { return strings.Count(b.log.String(), "nothing is tested") }

func TestLoop_takesATurnAtOnceAndAtItsInterval(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, nil)
		b.start()
		b.pass(0)
		require.EqualValues(t, 1, b.turns.Load())
		b.pass(10 * time.Second)
		require.EqualValues(t, 11, b.turns.Load())
		require.Empty(t, b.loop.Status().Problem)
		b.group.Start() // no effect: it runs
		b.pass(time.Second)
		require.EqualValues(t, 12, b.turns.Load())
		b.stop()
		b.pass(time.Hour)
		require.EqualValues(t, 12, b.turns.Load())
		require.Equal(t, "does not run", b.loop.Status().Problem)
		b.start()
		b.pass(0)
		require.EqualValues(t, 13, b.turns.Load())
		b.stop()
	})
}

func TestLoop_panics(t *testing.T) {
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
		b.pass(10 * time.Second)
		require.Contains(t, b.loop.Status().Problem, "turns in a row have failed")
		require.Contains(t, b.log.String(), "a turn panicked: no such row")
		require.Contains(t, b.log.String(), "background_test.go", "the stack")
		broken.Store(false)
		b.pass(time.Minute)
		require.Empty(t, b.loop.Status().Problem)
		b.stop()
	})
}

func TestLoop_goesOnWhileThereIsMore(t *testing.T) {
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
		b.pass(0)
		require.Zero(t, left)
		b.pass(time.Hour - time.Second)
		require.Empty(t, b.loop.Status().Problem, "it asked for the wait")
		require.Zero(t, left)
		b.stop()
	})
}

func TestLoop_isWoken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, func(c *background.Config) { c.Interval, c.Gather = time.Hour, 20*time.Millisecond })
		b.start()
		b.pass(time.Minute)
		for range 10 {
			b.loop.Wake()
		}
		b.pass(10 * time.Millisecond)
		require.EqualValues(t, 1, b.turns.Load(), "it waits for others")
		b.pass(20 * time.Millisecond)
		require.EqualValues(t, 2, b.turns.Load())
		b.failing(errors.New("away"))
		b.loop.Wake()
		b.pass(100 * time.Millisecond)
		require.EqualValues(t, 3, b.turns.Load())
		b.loop.Wake()
		b.pass(100 * time.Millisecond)
		require.EqualValues(t, 3, b.turns.Load(), "after an error it backs off")
		b.stop()
	})
}

func TestLoop_backsOffAndLogsOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, func(c *background.Config) { c.Interval = 16 * time.Second })
		b.failing(errors.New("port 4711 refused"))
		b.start()
		b.pass(0)
		require.Equal(t, 1, b.logged())
		require.Empty(t, b.loop.Status().Problem)
		b.pass(4 * time.Second) // after about 1 and 2 s
		require.EqualValues(t, 3, b.turns.Load())
		require.Contains(t, b.loop.Status().Problem, "3 turns in a row have failed")
		b.failing(errors.New("port 4712 refused"))
		b.pass(30 * time.Second)
		require.Less(t, b.turns.Load(), int64(8))
		require.Equal(t, 1, b.logged(), "it is the same error")
		b.failing(errors.New("no such table"))
		b.pass(20 * time.Second)
		require.Equal(t, 2, b.logged())
		b.pass(24 * time.Hour)
		require.Greater(t, b.logged(), 10, "it is logged again now and then")
		require.Less(t, b.logged(), 40)
		require.Equal(t, b.turns.Load(), b.loop.Status().Errors)

		b.fail.Store(nil)
		b.pass(20 * time.Second)
		require.Empty(t, b.loop.Status().Problem)
		require.Equal(t, 1, strings.Count(b.log.String(), "works again"))
		logged := b.logged()
		b.failing(errors.New("port 4711 refused"))
		b.pass(20 * time.Second)
		require.Equal(t, logged+1, b.logged(), "it was away")
		b.stop()
	})
}

// A turn that heeds its context fails at its timeout; a turn that does not, hangs.
func TestLoop_withoutSuccessIsUnhealthy(t *testing.T) {
	t.Parallel()
	for name, heeds := range map[string]bool{"fails": true, "hangs": false} {
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
						if heeds {
							<-ctx.Done()
							return ctx.Err()
						}
						<-release
						return nil
					})
				})
				b.start()
				b.pass(time.Minute)
				blocked.Store(true)
				b.pass(2500 * time.Millisecond)
				require.Empty(t, b.loop.Status().Problem)
				b.pass(time.Second)
				require.Contains(t, b.loop.Status().Problem, "without success since", "three intervals have passed")
				b.pass(8 * time.Second)
				if heeds {
					require.Contains(t, b.log.String(), "a turn did not end within 10s")
					b.stop()
					return
				}
				require.Contains(t, b.loop.Status().Problem, "a turn hangs, since")
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				require.EqualError(t, b.group.Stop(ctx), "test: a turn did not end in time")
				b.group.Start() // must not start the loop a second time
				close(release)
				b.pass(0)
				b.start()
				b.pass(0)
				require.Empty(t, b.loop.Status().Problem)
				b.stop()
			})
		})
	}
}

func TestLoop_atAStop(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		finish bool
		turn   time.Duration
		ends   bool
		took   time.Duration
	}{
		"is cut short":          {finish: false, turn: time.Minute, ends: false, took: 0},
		"ends by itself":        {finish: true, turn: 500 * time.Millisecond, ends: true, took: 500 * time.Millisecond},
		"is cut short after 1s": {finish: true, turn: time.Minute, ends: false, took: time.Second},
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
				b.pass(0)
				start := time.Now()
				b.stop()
				require.Equal(t, test.took, time.Since(start))
				require.Equal(t, test.ends, ended)
				require.True(t, closed)
				require.Zero(t, b.loop.Status().Errors, "a stop is no error")
				require.Empty(t, b.log.String())
			})
		})
	}
}

func TestGroup_idles(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var why atomic.Pointer[error]
		b := setup(t, func(c *background.Config) { c.Interval = time.Minute })
		var looks atomic.Int64
		b.group.Add(background.New(background.Config{Name: "look", Interval: time.Second, WhenIdle: true, Once: background.Each(func(context.Context) error { looks.Add(1); return nil })}))
		b.group.Idle = func() error {
			if err := why.Load(); err != nil {
				return *err
			}
			return nil
		}
		b.start()
		b.pass(0)
		require.EqualValues(t, 1, b.turns.Load())
		detached := errors.New("dlqd was detached")
		why.Store(&detached)
		b.pass(time.Hour)
		require.EqualValues(t, 1, b.turns.Load())
		require.EqualValues(t, 3601, looks.Load())
		status := b.loop.Status()
		require.Equal(t, "dlqd was detached", status.Idle)
		require.Empty(t, status.Problem)
		why.Store(nil)
		b.pass(time.Second)
		require.EqualValues(t, 2, b.turns.Load())
		require.Empty(t, b.loop.Status().Idle)
		require.Empty(t, b.log.String())
		b.stop()
	})
}

// TestGroup_stress starts, wakes and stops loops concurrently: no loop runs two turns at a time,
// and after the last stop none runs.
func TestGroup_stress(t *testing.T) {
	t.Parallel()
	group := &background.Group{Logger: slog.New(slog.DiscardHandler)}
	const n = 10
	var under [n]atomic.Int64
	for i := range n {
		group.Add(background.New(background.Config{
			Name: fmt.Sprint("loop ", i), Interval: time.Millisecond, Finish: i%2 == 0,
			Once: func(ctx context.Context) (time.Duration, error) {
				if under[i].Add(1) > 1 {
					panic("two turns at a time")
				}
				defer under[i].Add(-1)
				if i%2 != 0 && rand.IntN(10) == 0 {
					<-ctx.Done()
				}
				return []time.Duration{0, background.More}[rand.IntN(2)], ctx.Err()
			},
		}))
	}
	var everybody sync.WaitGroup
	for range 8 {
		everybody.Go(func() {
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
	everybody.Wait()
	require.NoError(t, group.Stop(t.Context()))
	for i, status := range group.Statuses() {
		require.Contains(t, []string{"", "does not run"}, status.Problem)
		require.Zero(t, under[i].Load())
	}
}
