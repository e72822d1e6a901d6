package door

import (
	"net"
	"sync"
)

// Quota shares a limited resource among clients: concurrent requests, connections, bytes of bodies. A client may hold
// at most as much as is left free. So a single client can have half of the quota, and each of two clients a third. A
// further client always gets some. The quota does not need to know the number of clients.
type Quota struct {
	mu   sync.Mutex
	free int64
	held map[string]int64
}

// NewQuota returns a quota of the given size.
func NewQuota(size int64) *Quota { return &Quota{free: size, held: map[string]int64{}} }

// Acquire takes n for a client and returns true, if the client then holds no more than is left free. Otherwise it takes
// nothing and returns false.
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

// Release returns n, which a client has acquired, to the quota.
func (r *Quota) Release(client string, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free += n
	if r.held[client] -= n; r.held[client] == 0 {
		delete(r.held, client)
	}
}

// DefaultMaxConnections bounds the number of connections to the API. A single address may have half of them: see
// [Quota].
const DefaultMaxConnections = 8192

// Listener limits the connections of a listener by a quota, which several listeners may share. It closes excess
// connections at once and calls refused with the reason.
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
