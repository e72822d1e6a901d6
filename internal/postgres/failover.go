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

// serverOf returns a name for the server that a connection goes to: when it started, which no two servers share, and
// since when it has statistics, because it starts those anew after the crash of a backend, and keeps its start time. A
// server that crashed may have lost what it had acknowledged, too. It asks once for each connection, since a connection
// ends with its server. It returns "" if the server does not say.
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

// OnServer runs fn with the means to run statements on one server, and the name of that server, or "" if it is not
// known. It is not known behind a pooler, whose connections outlive their servers. db is no transaction: each of its
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
