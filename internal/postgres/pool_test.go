package postgres_test

import (
	"context"
	"net"
	"net/url"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// The first host of a URL may be a server that was lost: it may still accept connections, but never answers.
func TestOpen_SkipsHostThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	lost, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = lost.Close() })
	u, err := url.Parse(postgrestest.NewProxy(t, postgrestest.URL(t)).URL)
	require.NoError(t, err)
	u.Host = lost.Addr().String() + "," + u.Host
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // less than pgx's default timeout for one host
	defer cancel()
	pool, err := postgres.Open(ctx, u.String(), 2)
	require.NoError(t, err)
	pool.Close()
}
