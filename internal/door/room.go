package door

import (
	"net"
	"sync"
)

// Room is something of which there is only so much: requests at once, connections, bytes of bodies. What a client holds of it may
// not be more than what is left free. So one client alone may have half of it, each of two a third, and whoever comes next
// finds some: nobody has to be told who else is asking.
type Room struct {
	mu    sync.Mutex
	free  int64
	holds map[string]int64
}

// NewRoom returns a room of a size.
func NewRoom(size int64) *Room { return &Room{free: size, holds: map[string]int64{}} }

// Take takes some of the room for a client, if that leaves as much free as it then holds.
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

// Give gives back what a client took.
func (r *Room) Give(client string, n int64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.free += n
	if r.holds[client] -= n; r.holds[client] == 0 {
		delete(r.holds, client)
	}
}

// DefaultMaxConnections bounds the connections to the API. One address alone may have half of them: see [Room].
const DefaultMaxConnections = 8192

// Listener bounds the connections of a listener, in a room that it may share with others. What is too much is closed at once.
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
