package server_test

import (
	"bufio"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// stream is an open event stream.
type stream struct {
	*testing.T

	header http.Header
	lines  *bufio.Scanner
}

// streams opens every event stream of a server: a live page, and a replay run that is paused.
func (b *bundle) streams() map[string]*stream {
	b.Helper()
	const run = "0198a0b0-0000-7000-8000-000000000000"
	b.exec("INSERT INTO dlq.replay_runs (id, filter, actor, total, status) " +
		"VALUES ('" + run + "', '{}', 'kim', 1, 'paused')")
	open := map[string]*stream{}
	for _, path := range []string{"/events?page=/groups", "/api/dlq/replays/" + run + "/events"} {
		request, err := http.NewRequestWithContext(b.Context(), http.MethodGet, b.base+path, http.NoBody)
		require.NoError(b, err)
		response, err := http.DefaultClient.Do(request)
		require.NoError(b, err)
		b.Cleanup(func() { _ = response.Body.Close() })
		require.Equal(b, http.StatusOK, response.StatusCode)
		open[path] = &stream{b.T, response.Header, bufio.NewScanner(response.Body)}
	}
	return open
}

// next waits for the next event.
func (s *stream) next(why string) {
	s.Helper()
	for s.lines.Scan() {
		if strings.HasPrefix(s.lines.Text(), "data:") {
			return
		}
	}
	require.Fail(s, "the stream ended", why)
}

// nginx buffers answers unless they forbid it: the events would come in bursts, minutes late.
func TestStreams_AreNotBufferedByProxies(t *testing.T) {
	t.Parallel()
	for path, s := range setup(t, options{}).streams() {
		require.Equal(t, "text/event-stream", s.header.Get("Content-Type"), path)
		require.Equal(t, "no", s.header.Get("X-Accel-Buffering"), path)
		s.next(path)
	}
}

// A proxy closes a stream that sends nothing, so dlqd sends events even while the database does not answer.
func TestStreams_GoOnWithoutDatabase(t *testing.T) {
	t.Parallel()
	var database *postgrestest.Proxy
	b := setup(t, options{config: func(c *server.Config) {
		database = postgrestest.NewProxy(t, c.DatabaseURL)
		c.DatabaseURL = database.URL
	}})
	streams := b.streams()
	for path, s := range streams {
		s.next(path)
	}
	database.Hold()
	release := sync.OnceFunc(database.Release)
	defer release()
	for path, s := range streams {
		for range 3 { // the first ones may have been sent before
			s.next(path)
		}
	}
	release()
}
