package console

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/postgres"
)

// emptyDB is a database without rows.
type emptyDB struct{}

func (emptyDB) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, nil
}
func (emptyDB) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, nil } //nolint:nilnil // the test reads no rows
func (emptyDB) QueryRow(context.Context, string, ...any) pgx.Row        { return nil }

// TestLive_LimitsStatementsPerSecond checks that a page costs the database less than one statement per
// second, even if it asks for a shorter render interval.
func TestLive_LimitsStatementsPerSecond(t *testing.T) {
	t.Parallel()
	db := postgres.DefaultSchemas().Rendered(emptyDB{})
	c := &Console{mux: http.NewServeMux()}
	c.mux.HandleFunc("GET /page", func(w http.ResponseWriter, r *http.Request) {
		shared, _ := isLive(r.Context())
		shared.interval = 2 * time.Second
		for range len(r.URL.Query()["statement"]) {
			_, _ = db.Exec(r.Context(), "SELECT 1")
		}
		w.WriteHeader(http.StatusOK)
	})
	from := httptest.NewRequest(http.MethodGet, "/events", nil)
	for address, want := range map[string]time.Duration{
		"/page": 2 * time.Second, "/page?statement=1": 2 * time.Second,
		"/page?statement=1&statement=2&statement=3": 3 * intervalPerStatement,
	} {
		made, err := c.renderLive(t.Context(), from, address)
		require.NoError(t, err)
		require.Equal(t, want, made.every, address)
	}
	require.Greater(t, intervalPerStatement, time.Second)
}

// TestLive_RecoversPanics checks that a panic of a live page ends only its rendering: no HTTP server
// recovers it.
func TestLive_RecoversPanics(t *testing.T) {
	t.Parallel()
	c := &Console{Config: Config{Logger: slog.New(slog.DiscardHandler)}, mux: http.NewServeMux()}
	c.mux.HandleFunc("GET /page", func(http.ResponseWriter, *http.Request) { panic("no such row") })
	c.live.render = c.renderLive
	events, done, ok := c.live.watch(t.Context(), httptest.NewRequest(http.MethodGet, "/events", nil),
		"kim", "/page", "/page")
	require.True(t, ok)
	defer done()
	require.EqualError(t, (<-events).err, "rendering the page failed")
}

// TestLive_LimitsPagesPerUser checks that the distinct live pages of a user are limited, but not the streams of one
// page. Parameters that a page does not read do not make a distinct page.
func TestLive_LimitsPagesPerUser(t *testing.T) {
	t.Parallel()
	l := &live{render: func(ctx context.Context, _ *http.Request, _ string) (rendering, error) {
		return rendering{every: time.Minute}, ctx.Err()
	}}
	from := httptest.NewRequest(http.MethodGet, "/events", nil)
	watch := func(person, address string) (func(), bool) {
		_, done, ok := l.watch(t.Context(), from, person, address, address)
		return done, ok
	}
	var all []func()
	for i := range maxPagesPerUser {
		done, ok := watch("kim", "/groups?over="+strconv.Itoa(i))
		require.True(t, ok)
		all = append(all, done)
	}
	_, ok := watch("kim", "/queues")
	require.False(t, ok)
	for _, other := range [][2]string{{"kim", "/groups?over=1"}, {"lee", "/queues"}} {
		done, ok := watch(other[0], other[1])
		require.True(t, ok, other)
		all = append(all, done)
	}
	all[0]()
	done, ok := watch("kim", "/queues")
	require.True(t, ok, "a closed page frees its place")
	for _, end := range append(all[1:], done) {
		end()
	}
	require.Empty(t, l.topics)

	for address, want := range map[string]string{
		"/replays?n=1": "/replays", "/dead-letters?x=1&q=a%3Ab&order=oldest#rows": "/dead-letters?order=oldest&q=a%3Ab",
		"/dead-letters?column=queue&column=class": "/dead-letters?column=queue&column=class",
		"/audit?entryId=1&utm=2":                  "/audit?entryId=1", "/%61ccess": "/%61ccess",
		"/jobs?queue=a&state=completed":   "/jobs?queue=a&state=completed",
		"/audit?day=2026-11-24&each=true": "/audit?day=2026-11-24&each=true",
	} {
		require.Equal(t, want, canonical(address))
	}
}

// TestLive_SendsNewViewersNothingOlder checks that a new viewer of a page gets no rendering that is older than
// the page that the viewer just loaded.
func TestLive_SendsNewViewersNothingOlder(t *testing.T) {
	t.Parallel()
	var made atomic.Int64
	going := make(chan struct{})
	l := &live{render: func(ctx context.Context, _ *http.Request, _ string) (rendering, error) {
		n := made.Add(1)
		if n == 2 { // in progress while the third viewer subscribes
			select {
			case <-going:
			case <-ctx.Done():
			}
		}
		return rendering{html: []byte(strconv.FormatInt(n, 10)), every: time.Hour}, nil
	}}
	from := httptest.NewRequest(http.MethodGet, "/events", nil)
	watch := func(person string) chan event {
		events, done, ok := l.watch(t.Context(), from, person, "/page", "/page")
		require.True(t, ok)
		t.Cleanup(done)
		return events
	}
	first := watch("kim")
	require.Equal(t, "1", string((<-first).html))
	second := watch("ann") // starts the second rendering
	require.Eventually(t, func() bool { return made.Load() == 2 }, 5*time.Minute, time.Millisecond)
	third := watch("lee")
	close(going)
	require.Equal(t, "2", string((<-second).html))
	require.Equal(t, "3", string((<-third).html), "the second rendering began before lee opened the page")
}

// pages opens pages for one viewer.
func pages(t *testing.T, c *Console, addresses ...string) (all []chan event) {
	t.Helper()
	for _, address := range addresses {
		from := httptest.NewRequest(http.MethodGet, "/events", nil)
		events, done, ok := c.live.watch(t.Context(), from, "kim", address, address)
		require.True(t, ok)
		t.Cleanup(done)
		all = append(all, events)
	}
	return all
}

// TestLive_RendersAfterActions checks that an action wakes open pages before they are due.
func TestLive_RendersAfterActions(t *testing.T) {
	t.Parallel()
	var made atomic.Int64
	c := &Console{Config: Config{Logger: slog.New(slog.DiscardHandler)}}
	c.live.render = func(context.Context, *http.Request, string) (rendering, error) {
		return rendering{html: []byte(strconv.FormatInt(made.Add(1), 10)), every: time.Hour}, nil
	}
	events := pages(t, c, "/page")[0]
	require.Equal(t, "1", string((<-events).html))
	c.Changed("dead letters")
	require.Equal(t, "2", string((<-events).html))
}

// TestLive_RendersOnlyAffectedPages checks that an action wakes only the pages that may show it.
func TestLive_RendersOnlyAffectedPages(t *testing.T) {
	t.Parallel()
	for tag, want := range map[string][]string{
		"tokens": {"/access", "/access/x", "/audit"}, "saved views": {"/audit", "/dead-letters"},
		"queues": {"/", "/access", "/access/x", "/accessible", "/audit", "/dead-letters"},
	} {
		c := &Console{}
		c.live.topics = map[string]*topic{}
		for _, path := range []string{"/", "/access", "/access/x", "/accessible", "/audit", "/dead-letters"} {
			c.live.topics[path] = &topic{path: path, wake: make(chan struct{}, 1)}
		}
		c.Changed(tag)
		var woken []string
		for path, t := range c.live.topics {
			if len(t.wake) > 0 {
				woken = append(woken, path)
			}
		}
		require.ElementsMatch(t, want, woken, tag)
	}
}

// TestLive_LimitsConcurrentRenderings checks that only few of the pages that an action wakes are rendered at the same
// time.
func TestLive_LimitsConcurrentRenderings(t *testing.T) {
	t.Parallel()
	var making, most, made atomic.Int64
	c := &Console{Config: Config{Logger: slog.New(slog.DiscardHandler)}}
	c.live.render = func(context.Context, *http.Request, string) (rendering, error) {
		now := making.Add(1)
		defer making.Add(-1)
		for before := most.Load(); now > before && !most.CompareAndSwap(before, now); before = most.Load() {
		}
		time.Sleep(10 * time.Millisecond)
		return rendering{html: []byte(strconv.FormatInt(made.Add(1), 10)), every: time.Hour}, nil
	}
	var addresses []string
	for i := range 5 * maxRenderings {
		addresses = append(addresses, "/page?at="+strconv.Itoa(i))
	}
	all := pages(t, c, addresses...)
	for range 2 {
		for _, events := range all {
			require.NoError(t, (<-events).err)
		}
		c.Changed("queues")
	}
	require.LessOrEqual(t, most.Load(), int64(maxRenderings))
}

// TestLive_RendersSoonAfterAnOutage checks that a page is rendered as soon as the database answers again. The time for
// which the database delayed a rendering does not lengthen the page's render interval.
func TestLive_RendersSoonAfterAnOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		t.Cleanup(func() { time.Sleep(pingTimeout + pingInterval) }) // until the ping ends, once no page is live
		var lost atomic.Bool
		query := func(ctx context.Context) error {
			if lost.Load() {
				<-ctx.Done()
			}
			return ctx.Err()
		}
		c := &Console{Config: Config{Logger: slog.New(slog.DiscardHandler)}}
		c.live.ping = query
		c.live.render = func(ctx context.Context, _ *http.Request, _ string) (rendering, error) {
			return rendering{every: time.Hour}, query(ctx)
		}
		events := pages(t, c, "/page")[0]
		require.NoError(t, (<-events).err)
		lost.Store(true)
		c.Changed("dead letters")
		require.Error(t, (<-events).err)
		lost.Store(false)
		recovered := time.Now()
		require.NoError(t, (<-events).err)
		require.Less(t, time.Since(recovered), renderTimeout)
	})
}

// TestLive_ReportsProblems checks that a stream reports an unreachable database, its recovery and
// the viewer's sign-out before the page is due.
func TestLive_ReportsProblems(t *testing.T) {
	t.Parallel()
	var lost, out atomic.Bool
	ended := make(chan struct{})
	c := &Console{Config: Config{Logger: slog.New(slog.DiscardHandler)}, mux: http.NewServeMux()}
	c.live.render = func(context.Context, *http.Request, string) (rendering, error) {
		return rendering{html: []byte("the page"), every: time.Hour}, nil
	}
	c.live.ping = func(context.Context) error {
		if lost.Load() {
			return context.DeadlineExceeded
		}
		return nil
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := access.WithReauthentication(r.Context(), func() (*access.Principal, error) {
			if out.Load() {
				return nil, access.ErrRefused
			}
			return access.From(r.Context()), nil
		}, func() <-chan struct{} { return ended })
		c.events(w, r.WithContext(ctx))
	}))
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL+"/events?page=/page", http.NoBody)
	require.NoError(t, err)
	answer, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer answer.Body.Close()
	lines := bufio.NewScanner(answer.Body)
	next := func(event, data string) {
		for lines.Scan() {
			if lines.Text() == "event: "+event {
				require.True(t, lines.Scan())
				require.Contains(t, lines.Text(), "data: "+data)
				return
			}
		}
		require.Fail(t, "the stream ended", event)
	}
	next("page", "the page")
	next("beat", "")
	lost.Store(true)
	next("trouble", "the database does not answer")
	lost.Store(false)
	next("same", "")
	out.Store(true)
	close(ended)
	next("ended", "")
	rest, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Empty(t, strings.TrimSpace(string(rest)), "the stream has more events")
}
