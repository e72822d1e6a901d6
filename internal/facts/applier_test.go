package facts_test

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/facts"
	"github.com/dlqd/dlqd/internal/postgres"
)

// answers is a database whose answers and times the test sets. It runs in a bubble of synctest.
type answers struct {
	postgres.DB

	applied []int32       // by call; 0 for further calls
	errs    []error       // by call; nil for further calls
	takes   time.Duration // the time of a call
	pages   int64         // the size of the table of facts

	mu        sync.Mutex
	calls     []call
	cancelled int // calls whose context was done before their end
}

// call has the parameters of a call of dlq.apply_facts.
type call struct {
	fromPage int64
	careful  bool
}

func (a *answers) QueryRow(ctx context.Context, _ string, args ...any) pgx.Row {
	a.mu.Lock()
	n := len(a.calls)
	a.calls = append(a.calls, call{args[2].(int64), args[3].(bool)})
	a.mu.Unlock()
	select {
	case <-time.After(a.takes):
	case <-ctx.Done():
		a.cancelled++
	}
	r := row{pages: a.pages}
	if n < len(a.applied) {
		r.applied = a.applied[n]
	}
	if n < len(a.errs) {
		r.err = a.errs[n]
	}
	return r
}

// answering is a store whose database is answers.
type answering struct{ db *answers }

func (s answering) DB() postgres.DB { return s.db }

type row struct {
	applied int32
	pages   int64
	err     error
}

func (r row) Scan(into ...any) error {
	*into[0].(*int32), *into[1].(*int64) = r.applied, r.pages
	return r.err
}

// A turn reads only the end of a table that takes long to read. Every ten seconds it reads the whole table, and every
// minute it retries rejected facts.
func TestApplier_ReadsTheEndOfALargeTable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &answers{pages: 1000}
		a := &facts.Applier{Store: answering{db}}
		begin := time.Now()
		once := func(at, takes time.Duration) call {
			t.Helper()
			time.Sleep(time.Until(begin.Add(at)))
			db.takes = takes
			_, err := a.Once(t.Context())
			require.NoError(t, err)
			return db.calls[len(db.calls)-1]
		}
		whole, end := call{0, false}, call{1000 - 256, false}
		require.Equal(t, call{0, true}, once(0, 20*time.Millisecond))
		require.Equal(t, end, once(time.Second, time.Millisecond))
		require.Equal(t, end, once(2*time.Second, time.Millisecond), "the end says nothing about the whole table")
		require.Equal(t, end, once(10*time.Second, time.Millisecond))
		require.Equal(t, whole, once(10*time.Second+2*time.Millisecond, 19*time.Millisecond))
		require.Equal(t, whole, once(11*time.Second, 30*time.Millisecond), "reading it was quick")
		require.Equal(t, end, once(12*time.Second, 0))
		require.Equal(t, whole, once(55*time.Second, 30*time.Millisecond))
		require.Equal(t, end, once(60*time.Second, 0))
		require.Equal(t, call{0, true}, once(60*time.Second+1, 30*time.Millisecond))
		require.Equal(t, end, once(61*time.Second, 0))
		require.Equal(t, call{0, true}, once(121*time.Second, 30*time.Millisecond))

		db.applied = make([]int32, 99)
		db.applied[len(db.calls)] = 100
		require.Equal(t, whole, once(140*time.Second, 119*time.Millisecond))
		require.Equal(t, whole, once(141*time.Second, 0), "applying takes 1 ms for each fact")
		db.pages = 10
		require.Equal(t, whole, once(142*time.Second, 30*time.Millisecond))
		require.Equal(t, whole, once(143*time.Second, 30*time.Millisecond), "the table is short")
	})
}

func TestApplier_RetriesAfterErrors(t *testing.T) {
	t.Parallel()
	coded := func(code string) error { return &pgconn.PgError{Code: code} }
	refusal, locked, collision, other := coded("23514"), coded("55P03"), coded("40001"), coded("42501")
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, test := range []struct {
		name    string
		errs    []error
		careful []bool
		ctx     context.Context
		want    error
	}{
		{name: "success", careful: []bool{false}},
		{name: "refusal", errs: []error{refusal}, careful: []bool{false, true}},
		{name: "lock", errs: []error{locked}, careful: []bool{false, true}},
		{name: "refusal of one fact", errs: []error{refusal, refusal}, careful: []bool{false, true}, want: refusal},
		{name: "collision", errs: []error{collision}, careful: []bool{false, false}},
		{
			name: "collisions", errs: []error{collision, collision, collision, collision, collision, nil},
			careful: []bool{false, false, false, false, false}, want: collision,
		},
		{name: "stopped", errs: []error{collision}, careful: []bool{false}, ctx: cancelled, want: collision},
		{name: "another error", errs: []error{other}, careful: []bool{false}, want: other},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			db := &answers{errs: test.errs}
			ctx := test.ctx
			if ctx == nil {
				ctx = t.Context()
			}
			require.ErrorIs(t, facts.ApplyRun(ctx, answering{db}, uuid.New()), test.want)
			var careful []bool
			for _, c := range db.calls {
				careful = append(careful, c.careful)
			}
			require.Equal(t, test.careful, careful)
		})
	}
}

func TestApplier_AppliesUntilNoneIsLeft(t *testing.T) {
	t.Parallel()
	for name, all := range map[string]func(*answers) error{
		"all":        func(db *answers) error { return (&facts.Applier{Store: answering{db}}).All(t.Context()) },
		"of one run": func(db *answers) error { return facts.ApplyRun(t.Context(), answering{db}, uuid.New()) },
	} {
		db := &answers{applied: []int32{500, 3, 0, 1}}
		require.NoError(t, all(db), name)
		require.Len(t, db.calls, 3, name)

		failed := errors.New("the connection was lost")
		db = &answers{applied: []int32{500, 3, 0}, errs: []error{nil, failed}}
		require.ErrorIs(t, all(db), failed, name)
		require.Len(t, db.calls, 2, name)
	}
}

// The next turn follows at once if a turn applied a full batch, and otherwise after 50 ms. A stop lets the turn finish.
func TestLoop_ContinuesAfterAFullBatch(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &answers{applied: []int32{500, 500, 499}, takes: 10 * time.Millisecond}
		group := &background.Group{Logger: slog.New(slog.DiscardHandler)}
		group.Add((&facts.Applier{Store: answering{db}}).Loop())
		group.Start()
		count := func(at time.Duration) int {
			t.Helper()
			time.Sleep(at)
			synctest.Wait()
			db.mu.Lock()
			defer db.mu.Unlock()
			return len(db.calls)
		}
		require.Equal(t, 3, count(79*time.Millisecond))
		require.Equal(t, 4, count(6*time.Millisecond), "the fourth turn has begun")
		require.NoError(t, group.Stop(context.WithoutCancel(t.Context())))
		require.Zero(t, db.cancelled)
		require.Len(t, db.calls, 4)

		db.errs = []error{nil, nil, nil, nil, errors.New("the connection was lost")}
		group.Start()
		require.Equal(t, 5, count(300*time.Millisecond), "after an error, the pause is longer")
		require.NoError(t, group.Stop(context.WithoutCancel(t.Context())))
	})
}
