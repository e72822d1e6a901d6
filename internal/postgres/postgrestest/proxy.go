package postgrestest

import (
	"cmp"
	"net"
	"net/url"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
)

// Proxy is a listener in front of a database. Between Hold and Release it forwards nothing, so that the database or the
// network seems to hang.
type Proxy struct {
	URL string // of the database, through the proxy

	held sync.RWMutex
}

// NewProxy starts a proxy in front of the database whose URL is direct. The proxy stops at the end of the test.
func NewProxy(tb testing.TB, direct string) *Proxy {
	tb.Helper()
	config, err := pgx.ParseConfig(direct)
	require.NoError(tb, err)
	network, address := pgconn.NetworkAddress(config.Host, config.Port)
	listener, err := (&net.ListenConfig{}).Listen(tb.Context(), "tcp", "127.0.0.1:0")
	require.NoError(tb, err)
	tb.Cleanup(func() { _ = listener.Close() })
	p := &Proxy{URL: (&url.URL{
		Scheme: "postgres", User: url.UserPassword(config.User, config.Password), Host: listener.Addr().String(),
		Path: "/" + config.Database, RawQuery: "sslmode=disable",
	}).String()}
	go func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				far, err := (&net.Dialer{}).DialContext(tb.Context(), network, address)
				if err != nil {
					_ = near.Close()
					return
				}
				go p.pass(near, far)
				p.pass(far, near)
			}()
		}
	}()
	return p
}

// Hold stops the proxy from forwarding, until Release.
func (p *Proxy) Hold() { p.held.Lock() }

// Release ends Hold.
func (p *Proxy) Release() { p.held.Unlock() }

func (p *Proxy) pass(from, to net.Conn) {
	defer func() { _ = from.Close() }()
	defer func() { _ = to.Close() }()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		p.held.RLock()
		if n > 0 {
			_, failed := to.Write(buffer[:n])
			err = cmp.Or(err, failed)
		}
		p.held.RUnlock()
		if err != nil {
			return
		}
	}
}
