package console

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
)

// nothing is a database of which only the statements count.
type nothing struct{}

func (nothing) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, nil
}
func (nothing) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, nil } //nolint:nilnil // nobody reads them
func (nothing) QueryRow(context.Context, string, ...any) pgx.Row        { return nil }

// However often a page wants to be made anew, it costs the database less than a statement a second.
func TestLive_statementsASecond(t *testing.T) {
	t.Parallel()
	db := postgres.DefaultSchemas().Rendered(nothing{})
	c := &Console{mux: http.NewServeMux()}
	c.mux.HandleFunc("GET /page", func(w http.ResponseWriter, r *http.Request) {
		shared, _ := isLive(r.Context())
		shared.every = 2 * time.Second
		for range len(r.URL.Query()["statement"]) {
			_, _ = db.Exec(r.Context(), "SELECT 1")
		}
		w.WriteHeader(http.StatusOK)
	})
	from := httptest.NewRequest(http.MethodGet, "/events", nil)
	for address, want := range map[string]time.Duration{"/page": 2 * time.Second, "/page?statement=1": 2 * time.Second, "/page?statement=1&statement=2&statement=3": 3 * perStatement} {
		_, every, err := c.renderLive(t.Context(), from, address)
		require.NoError(t, err)
		require.Equal(t, want, every, address)
	}
	require.Greater(t, perStatement, time.Second)
}

// A page that panics while it is live ends nothing but itself: no server stands around it that would catch that.
func TestLive_panics(t *testing.T) {
	t.Parallel()
	c := &Console{Config: Config{Logger: slog.New(slog.DiscardHandler)}, mux: http.NewServeMux()}
	c.mux.HandleFunc("GET /page", func(http.ResponseWriter, *http.Request) { panic("no such row") })
	c.live.render = c.renderLive
	events, done, ok := c.live.watch(t.Context(), httptest.NewRequest(http.MethodGet, "/events", nil), "kim", "/page", "/page")
	require.True(t, ok)
	defer done()
	require.EqualError(t, (<-events).err, "the page failed")
}

// One person has so many pages live at once, and streams of one page as they like; what a page does not look at makes no page of its own.
func TestLive_boundPerPerson(t *testing.T) {
	t.Parallel()
	l := &live{render: func(ctx context.Context, _ *http.Request, _ string) ([]byte, time.Duration, error) {
		return nil, time.Minute, ctx.Err()
	}}
	from := httptest.NewRequest(http.MethodGet, "/events", nil)
	watch := func(person, address string) (func(), bool) {
		_, done, ok := l.watch(t.Context(), from, person, address, address)
		return done, ok
	}
	var all []func()
	for i := range maxLive {
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
	require.True(t, ok, "one was closed")
	for _, end := range append(all[1:], done) {
		end()
	}
	require.Empty(t, l.topics)

	for address, want := range map[string]string{
		"/replays?n=1": "/replays", "/dead-letters?x=1&q=a%3Ab&order=oldest#rows": "/dead-letters?order=oldest&q=a%3Ab", "/dead-letters?column=queue&column=class": "/dead-letters?column=queue&column=class",
		"/audit?entryId=1&utm=2": "/audit?entryId=1", "/%61ccess": "/%61ccess",
	} {
		require.Equal(t, want, canonical(address))
	}
}
