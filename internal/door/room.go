package door

import (
	"net"
	"sync"
)

// Room is a limited amount of something: requests at once, connections, bytes of bodies. A client
// may hold at most as much as is left free. A single client can therefore have half of the room,
// each of two clients a third, and the next client always finds some, without a count of clients.
type Room struct {
	mu    sync.Mutex
	free  int64
	holds map[string]int64
}

// NewRoom returns a room of the given size.
func NewRoom(size int64) *Room { return &Room{free: size, holds: map[string]int64{}} }

// Take takes n for a client and reports whether it could: the client may then hold no more than is
// left free.
func (r *Room) Take(client string, n int64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	holds := r.holds[client] + n
	if holds > r.free-n {
		return false
	}
	r.free -= n
	r.holds[client] = holds
	return true
}

// Give gives back n that a client took.
func (r *Room) Give(client string, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free += n
	if r.holds[client] -= n; r.holds[client] == 0 {
		delete(r.holds, client)
	}
}

// DefaultMaxConnections bounds the connections to the API. A single address may have half of them:
// see [Room].
const DefaultMaxConnections = 8192

// Listener limits the connections of a listener by a room, which it may share with others. It
// closes excess connections at once.
func Listener(inner net.Listener, room *Room, refused func(reason string)) net.Listener {
	return &listener{inner, room, refused}
}

type listener struct {
	net.Listener

	room    *Room
	refused func(reason string)
}

func (l *listener) Accept() (net.Conn, error) {
	for {
		inner, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		peer := peerOf(inner.RemoteAddr().String())
		if l.room.Take(peer, 1) {
			return &conn{Conn: inner, gone: sync.OnceFunc(func() { l.room.Give(peer, 1) })}, nil
		}
		_ = inner.Close()
		l.refused(RefusedConnections)
	}
}

type conn struct {
	net.Conn

	gone func()
}

func (c *conn) Close() error {
	c.gone()
	return c.Conn.Close()
}
