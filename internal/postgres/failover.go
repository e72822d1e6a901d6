package postgres

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/puddle/v2"
	"github.com/riverqueue/river/riverdriver"
)

// serverKey is the key under which a connection's custom data holds the name of its server.
const serverKey = "dlqd.server"

// serverOf returns a name for the server of a connection. The name has two times: the server's start time, which no two
// servers share, and the time since which the server counts statistics. After the crash of a backend, a server keeps
// its start time and starts new statistics, so its name changes. That is intended: such a server, too, may have lost
// commits that it had acknowledged. serverOf queries each connection only once, because a connection ends with its
// server. It returns "" if the server does not report the times.
func serverOf(ctx context.Context, conn *pgx.Conn) (string, error) {
	data := conn.PgConn().CustomData()
	if known, has := data[serverKey].(string); has {
		return known, nil
	}
	var server string
	err := conn.QueryRow(ctx, "SELECT concat_ws(' ', extract(epoch FROM pg_postmaster_start_time()), "+
		"extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time()))", pgx.QueryExecModeExec).Scan(&server)
	if _, refused := errors.AsType[*pgconn.PgError](err); err != nil && !refused {
		return "", err
	}
	data[serverKey] = server
	return server, nil
}

// OnServer calls fn with a db that runs all statements on one server, and with the name of that server. The name is ""
// if it is unknown, for example behind a pooler, whose connections survive a change of the server. db is not a
// transaction: each of its statements runs in a transaction of its own, with dlqd's settings.
func (d *Driver) OnServer(ctx context.Context, fn func(db pgx.Tx, server string) error) error {
	if d.pooled {
		return fn(d.single(), "")
	}
	conn, err := d.pool.Acquire(ctx)
	if errors.Is(err, puddle.ErrClosedPool) {
		return riverdriver.ErrClosedPool // which River's completer does not retry
	}
	if err != nil {
		return err
	}
	defer conn.Release()
	server, err := serverOf(ctx, conn.Conn())
	if err != nil {
		return err
	}
	return fn(connection{pooledConn: conn}, server)
}

// connection is a pgx.Tx for River's driver that runs its statements on one connection.
type connection struct {
	unusedTx
	*pooledConn
}

// pooledConn renames the embedded field of connection: a field Conn would collide with the method Conn.
type pooledConn = pgxpool.Conn
