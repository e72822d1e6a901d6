package server_test

import (
	"bufio"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

// stream is an open event stream.
type stream struct {
	*testing.T

	header http.Header
	lines  *bufio.Scanner
}

// streams opens every event stream of a server: a live page, and a replay run that is paused. cookie is the cookie of a
// session, or "" for none.
func (b *bundle) streams(cookie string) map[string]*stream {
	b.Helper()
	run := uuid.NewString()
	b.exec("INSERT INTO dlq.replay_runs (id, filter, actor, total, status) " +
		"VALUES ('" + run + "', '{}', 'kim', 1, 'paused')")
	open := map[string]*stream{}
	for _, path := range []string{"/events?page=/groups", "/api/dlq/replays/" + run + "/events"} {
		request, err := http.NewRequestWithContext(b.Context(), http.MethodGet, b.base+path, http.NoBody)
		require.NoError(b, err)
		request.Header.Set("Sec-Fetch-Site", "same-origin")
		request.Header.Set("Cookie", cookie)
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
		require.NotEqual(s, "event: ended", s.lines.Text(), why)
		if strings.HasPrefix(s.lines.Text(), "data:") {
			return
		}
	}
	require.Fail(s, "the stream ended", why)
}

// nginx buffers an answer unless a header of the answer forbids it. Buffered events would come in bursts, minutes late.
func TestStreams_AreNotBufferedByProxies(t *testing.T) {
	t.Parallel()
	for path, s := range sharedServer(t).streams("") {
		require.Equal(t, "text/event-stream", s.header.Get("Content-Type"), path)
		require.Equal(t, "no", s.header.Get("X-Accel-Buffering"), path)
		s.next(path)
	}
}

// A proxy closes a stream that sends nothing, so dlqd sends events even while the database does not answer. The stream
// of a signed-in viewer continues, too, although dlqd cannot check the session then.
func TestStreams_GoOnWithoutDatabase(t *testing.T) {
	t.Parallel()
	for _, signedIn := range []bool{false, true} {
		t.Run(fmt.Sprintf("signed in %t", signedIn), func(t *testing.T) {
			t.Parallel()
			var database *postgrestest.Proxy
			b := setup(t, options{config: func(c *server.Config) {
				database = postgrestest.NewProxy(t, c.DatabaseURL)
				c.DatabaseURL = database.URL
				if signedIn {
					c.Source = policy.Source{
						Dir:         policytest.Dir(t, policytest.Files{"access": "authentication: [tokens]"}),
						Destination: policytest.Destination,
					}
					var err error
					c.Policy, err = policy.Load(c.Source)
					require.NoError(t, err)
				}
			}})
			cookie := ""
			if signedIn {
				cookie = b.signIn("kim", access.Reader).cookie
			}
			streams := b.streams(cookie)
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
			for path, s := range streams {
				for range 3 {
					s.next(path)
				}
			}
		})
	}
}
