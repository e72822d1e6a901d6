package door

import (
	"net"
	"sync"
)

// Quota shares a limited resource among clients: concurrent requests, connections, bytes of bodies.
// A client may hold at most as much as is left free. A single client can therefore have half of the
// quota, each of two clients a third, and the next client always gets some, without a count of
// clients.
type Quota struct {
	mu   sync.Mutex
	free int64
	held map[string]int64
}

// NewQuota returns a quota of the given size.
func NewQuota(size int64) *Quota { return &Quota{free: size, held: map[string]int64{}} }

// Acquire takes n for a client and reports whether it could: the client may then hold no more than is
// left free.
func (r *Quota) Acquire(client string, n int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	held := r.held[client] + n
	if held > r.free-n {
		return false
	}
	r.free -= n
	r.held[client] = held
	return true
}

// Release returns n that a client acquired.
func (r *Quota) Release(client string, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free += n
	if r.held[client] -= n; r.held[client] == 0 {
		delete(r.held, client)
	}
}

// DefaultMaxConnections bounds the connections to the API. A single address may have half of them:
// see [Quota].
const DefaultMaxConnections = 8192

// Listener limits the connections of a listener by a quota, which it may share with others. It
// closes excess connections at once.
func Listener(inner net.Listener, quota *Quota, refused func(reason string)) net.Listener {
	return &listener{inner, quota, refused}
}

type listener struct {
	net.Listener

	quota   *Quota
	refused func(reason string)
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		inner, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer := peerOf(inner.RemoteAddr().String())
		if l.quota.Acquire(peer, 1) {
			return &conn{Conn: inner, release: sync.OnceFunc(func() { l.quota.Release(peer, 1) })}, nil
		}
		_ = inner.Close()
		l.refused(RefusedConnections)
	}
}

type conn struct {
	net.Conn

	release func()
}

func (c *conn) Close() error {
	c.release()
	return c.Conn.Close()
}
