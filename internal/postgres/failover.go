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

// serverKey is the key of a connection's server in its custom data.
const serverKey = "dlqd.server"

// serverOf returns a name for the server of a connection: the time at which the server started, which no two servers
// share, and the time from which its statistics count. After the crash of a backend, a server keeps its start time and
// starts new statistics, so its name changes: it, too, may have lost commits that it had acknowledged. serverOf asks
// once for each connection, because a connection ends with its server. It returns "" if the server does not report the
// times.
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
// if it is not known, as behind a pooler, whose connections outlive their servers. db is no transaction: each of its
// statements is a transaction, with dlqd's settings.
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

// pooledConn is another name for the field that a connection embeds: Conn is a method.
type pooledConn = pgxpool.Conn
