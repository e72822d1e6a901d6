package server_test

import (
	"context"
	"slices"
	"sync"
	"testing"
)

// shared is the dlqd of [sharedServer].
var shared sharedBundle

// sharedBundle is a dlqd that outlives the test that starts it.
type sharedBundle struct {
	mu  sync.Mutex
	b   *bundle // nil while it is not running
	end []func()
}

// sharedServer returns a dlqd with default options that several tests use at once, because each start takes 0.6 s of
// processor time. Its receiver accepts every message. A test that uses it submits messages only with random ids. The
// test does not count rows of other tests, create dead letters, read metrics, stop the server, or change the policy, a
// switch or a queue.
func sharedServer(t *testing.T) *bundle {
	t.Helper()
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.b == nil {
		shared.b = start(lasting{t}, options{})
	}
	b := *shared.b
	b.T, b.stop = t, nil
	return &b
}

// stop stops the shared dlqd, if it runs, and deletes its database.
func (s *sharedBundle) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, end := range slices.Backward(s.end) {
		end()
	}
	s.b, s.end = nil, nil
}

// lasting is a test whose cleanups run when the shared dlqd stops.
type lasting struct{ testing.TB }

func (lasting) Context() context.Context { return context.Background() }

func (lasting) Cleanup(end func()) { shared.end = append(shared.end, end) }
