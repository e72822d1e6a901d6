package worker

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// listenTurn limits one wait for a NOTIFY. After it the listener pings the connection, because a dead connection
	// reports no error by itself.
	listenTurn = 10 * time.Second
	// listenRetry is the pause before listening again after the connection broke.
	listenRetry = 5 * time.Second
	// closeTimeout bounds the closing of a connection.
	closeTimeout = 200 * time.Millisecond
)

// listener wakes the worker on every NOTIFY. Without it, entries wait for the next poll.
type listener struct {
	pool   *pgxpool.Pool
	topic  string
	notify func()
	conn   *pgx.Conn // nil while not listening
}

// once waits for one NOTIFY. It keeps its connection for the next call.
func (l *listener) once(ctx context.Context) (time.Duration, error) {
	if l.conn == nil {
		if err := l.open(ctx); err != nil {
			return 0, err
		}
		l.notify() // catch up on notifications sent before
	}
	wait, cancel := context.WithTimeout(ctx, listenTurn)
	defer cancel()
	_, err := l.conn.WaitForNotification(wait)
	switch {
	case err == nil:
		l.notify()
	case errors.Is(wait.Err(), context.DeadlineExceeded) && ctx.Err() == nil:
		err = l.conn.Ping(ctx)
	}
	if err != nil {
		l.close()
	}
	return background.More, err
}

func (l *listener) open(ctx context.Context) error {
	var err error
	if l.conn, err = postgres.Listen(ctx, l.pool, l.topic); err != nil {
		l.close()
	}
	return err
}

func (l *listener) close() {
	if l.conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	_ = l.conn.Close(ctx)
	l.conn = nil
}
