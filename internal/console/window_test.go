package console

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
)

// asked returns a request for a page by a viewer in a time zone.
func asked(address, zone string) *request {
	r := httptest.NewRequest(http.MethodGet, address, nil)
	r.AddCookie(&http.Cookie{Name: zoneCookie, Value: zone})
	return &request{Request: r, now: time.Date(2026, 11, 25, 23, 30, 0, 0, time.UTC)}
}

// TestRange_ReplacesTimes checks that the time range in an address replaces the times of the filter, in UTC.
func TestRange_ReplacesTimes(t *testing.T) {
	t.Parallel()
	const typed = "&from=2026-11-20T08:00&to=2026-11-20T09:00"
	for _, want := range []struct{ zone, query, filter string }{
		{"UTC", "queue:payments", "queue:payments failed:2026-11-20T08:00Z..2026-11-20T09:00Z"},
		{"Europe/Paris", `age:>2d "timed  out" after:2026-11-01`, `"timed  out" failed:2026-11-20T07:00Z..2026-11-20T08:00Z`},
		{"Mars/Olympus", "failed:2026-11-01", "failed:2026-11-20T08:00Z..2026-11-20T09:00Z"},
		{"UTC", "colour:red failed:2026-11-01", "colour:red failed:2026-11-20T08:00Z..2026-11-20T09:00Z"},
	} {
		got, problem := asked("/dead-letters?q="+typed, want.zone).ranged(want.query)
		require.Nil(t, problem)
		require.Equal(t, want.filter, got)
	}
	got, problem := asked("/dead-letters?from=2026-11-20T08:00:30Z", "Europe/Paris").ranged("")
	require.Nil(t, problem)
	require.Equal(t, "failed:2026-11-20T08:00:30Z..", got)
	_, problem = asked("/dead-letters?from=noon", "UTC").ranged("")
	require.ErrorContains(t, problem, "invalid time noon")

	require.Equal(t, "Last 6 h", asked("/", "UTC").timeRange("queue:a age:<6h", "/dead-letters").Words)
	require.Equal(t, "Any time", asked("/", "UTC").timeRange("queue:a", "/dead-letters").Words)
	of := asked("/", "Europe/Paris").timeRange("failed:2026-11-20T08:00Z..", "/dead-letters")
	require.Equal(t, []string{"20 Nov 09:00 CET – …", "2026-11-20T09:00", ""}, []string{of.Words, of.From, of.To})
}

// TestWindow_JoinsBuckets checks that the minutes of six hours become buckets of five minutes.
func TestWindow_JoinsBuckets(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 11, 25, 9, 3, 0, 0, time.UTC)
	var minutes []analytics.Bucket
	for i := range 9 {
		minutes = append(minutes, analytics.Bucket{
			Start: start.Add(time.Duration(i) * time.Minute), Captured: 1, Open: int64(i),
		})
	}
	got := merged(minutes, 5*time.Minute)
	require.Equal(t, []analytics.Bucket{
		{Start: start.Add(-3 * time.Minute), Captured: 2, Open: 1},
		{Start: start.Add(2 * time.Minute), Captured: 5, Open: 6},
		{Start: start.Add(7 * time.Minute), Captured: 2, Open: 8},
	}, got)
	require.Equal(t, "24h", windowOf("3 weeks", "24h").Over)
	for age, want := range map[time.Duration]string{
		time.Minute: "1h", 5 * time.Hour: "6h", 20 * time.Hour: "24h", 40 * time.Hour: "7d", 1000 * time.Hour: "7d",
	} {
		require.Equal(t, want, fitting(age, windowOf("7d", "7d")).Over, "the trend of a group of this age")
	}
	require.Equal(t, time.Date(2026, 11, 26, 0, 0, 0, 0, time.FixedZone("", 3600)).Unix(),
		asked("/", "Europe/Paris").today().Unix(), "the day of the viewer has begun already")
}

// TestPage_ShowsPanics checks that a panic of a page or an action is answered with an error page.
func TestPage_ShowsPanics(t *testing.T) {
	t.Parallel()
	c := New(Config{API: http.NotFoundHandler(), NotServed: http.NotFoundHandler(), Logger: slog.New(slog.DiscardHandler)})
	c.page("/panics", func(*request) (*view, error) { panic("no such row") })
	c.action("/panics", func(*request) (*done, error) { panic("no such row") })
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		w := httptest.NewRecorder()
		c.ServeHTTP(w, httptest.NewRequest(method, "/panics", nil))
		require.Equal(t, http.StatusInternalServerError, w.Code)
		require.Equal(t, "text/html; charset=utf-8", w.Header().Get("Content-Type"))
		require.Contains(t, w.Body.String(), "loading this page failed; see the log of dlqd")
		require.NotContains(t, w.Body.String(), "no such row")
	}
}

// TestCounted_MarksBounds checks that a count that stopped at its limit is shown as a lower bound.
func TestCounted_MarksBounds(t *testing.T) {
	t.Parallel()
	page, err := parsed().of("deadletters", time.UTC)
	require.NoError(t, err)
	for _, of := range []api.Count{{Entries: 999}, {Entries: 999, AtLeast: true}} {
		var out strings.Builder
		require.NoError(t, page.ExecuteTemplate(&out, "counted", &of))
		require.Equal(t, map[bool]string{false: "999", true: "999+"}[of.AtLeast], out.String())
	}
}

// TestQueues_TeachWithoutBreakers renders the page for a system without queues and breakers. A policy with a
// destination always has both.
func TestQueues_TeachWithoutBreakers(t *testing.T) {
	t.Parallel()
	page, err := parsed().of("queues", time.UTC)
	require.NoError(t, err)
	var out strings.Builder
	require.NoError(t, page.ExecuteTemplate(&out, "main", &frame{view: view{Data: &queues{}}}))
	require.Equal(t, 2, strings.Count(out.String(), `class="example"`), out.String())
	require.Contains(t, out.String(), "riverQueues:\n  mailers:")
}
