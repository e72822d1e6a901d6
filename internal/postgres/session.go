package postgres

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
)

// What dlqd needs of a session:
//
//   - row_security off: a job that a policy hides would look like one that is gone, so that is an error instead.
//   - read committed: what a worker reads after it has its locks must be what is committed by then, and what dlqd reads must
//     not make conflicts of the application's SERIALIZABLE transactions.
//   - jit off: plans without sequential scans have costs that make Postgres compile them for seconds, and run them for
//     milliseconds.
//
// Parameters at the start of a session say so for statements outside of transactions. Behind a
// pooler that refuses them a session belongs to its other clients, too: there each statement runs
// in a transaction of its own, whose settings end with it, in the one round trip that it takes
// anyway, and so do those of transactions.
var sessionParameters = map[string]string{
	"row_security": "off", "jit": "off", "default_transaction_isolation": "read committed",
}

const (
	beginIsolated = "BEGIN ISOLATION LEVEL READ COMMITTED"
	localSettings = "; SET LOCAL row_security = off; SET LOCAL jit = off"
	// settingsQuery is localSettings as one statement of the extended protocol.
	settingsQuery = "SELECT set_config('row_security', 'off', true), set_config('jit', 'off', true)"
)

// BeginQuery begins a transaction with the settings that dlqd needs, and more of them, such as "lock_timeout = '2s'".
func BeginQuery(more ...string) string { return begin("", more) }

// BeginReadOnlyQuery is [BeginQuery] for a transaction that changes nothing.
func BeginReadOnlyQuery(more ...string) string { return begin(" READ ONLY", more) }

func begin(mode string, more []string) string {
	return strings.Join(append([]string{beginIsolated + mode + localSettings}, more...), "; SET LOCAL ")
}

// BeginFunc runs fn in a transaction with the settings that dlqd needs, which only sessions behind
// a pooler do not have.
func BeginFunc(ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx) error) error {
	options := pgx.TxOptions{}
	if IsPooled(pool) {
		options.BeginQuery = BeginQuery()
	}
	return pgx.BeginTxFunc(ctx, pool, options, fn)
}

// IsPooled reports whether a pool's connections have no settings of their own, since a pooler refuses them.
func IsPooled(pool *pgxpool.Pool) bool {
	_, has := pool.Config().ConnConfig.RuntimeParams["row_security"]
	return !has
}

// Statements returns a pool for statements outside of transactions, each with the settings that dlqd needs.
func Statements(pool *pgxpool.Pool) DB {
	if IsPooled(pool) {
		return singly{pool: pool}
	}
	return pool
}

// singly runs each statement in a transaction of its own, with settings of that transaction, in one
// round trip. A statement that no transaction may hold (CALL of a procedure that commits, REINDEX
// CONCURRENTLY) goes to the pool itself.
type singly struct {
	pool *pgxpool.Pool
	more string // a query that makes further settings
	args []any  // its arguments
}

func (s singly) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	rows, err := s.Query(ctx, sql, args...)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	rows.Close()
	return rows.CommandTag(), rows.Err()
}

func (s singly) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := s.Query(ctx, sql, args...)
	return singleRow{rows, err}
}

func (s singly) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	for len(args) > 0 { // a batch runs in the connection's mode, which is none that prepares statements where a pooler is
		if _, mode := args[0].(pgx.QueryExecMode); !mode {
			break
		}
		args = args[1:]
	}
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{BeginQuery: beginIsolated})
	batch.Queue(settingsQuery)
	if s.more != "" {
		batch.Queue(s.more, s.args...)
	}
	batch.Queue(sql, args...)
	batch.Queue("COMMIT")
	rows := &singleRows{ctx: ctx, conn: conn, results: conn.SendBatch(ctx, batch)}
	for range batch.Len() - 2 {
		if _, err := rows.results.Exec(); err != nil {
			rows.end()
			return nil, err
		}
	}
	if rows.Rows, err = rows.results.Query(); err != nil {
		rows.end()
		return nil, err
	}
	return rows, nil
}

// singleRows are the rows of a statement, and its transaction, which ends with them.
type singleRows struct {
	pgx.Rows

	ctx     context.Context //nolint:containedctx // of the statement
	conn    *pgxpool.Conn
	results pgx.BatchResults // nil once it has ended
	err     error
}

func (r *singleRows) end() {
	if r.results == nil {
		return
	}
	r.err, r.results = r.results.Close(), nil
	if !r.conn.Conn().IsClosed() && r.conn.Conn().PgConn().TxStatus() != 'I' { // it failed
		_, _ = r.conn.Exec(context.WithoutCancel(r.ctx), "ROLLBACK") // on an error the pool closes the connection
	}
	r.conn.Release()
}

func (r *singleRows) Close() {
	r.Rows.Close()
	r.end()
}

func (r *singleRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *singleRows) Err() error {
	if err := r.Rows.Err(); err != nil {
		return err
	}
	return r.err
}

// singleRow is the first of some rows, or why there are none.
type singleRow struct {
	rows pgx.Rows
	err  error
}

func (r singleRow) Scan(into ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(into...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// NewDriver returns River's driver on a pool, with the settings that dlqd needs.
func NewDriver(pool *pgxpool.Pool) *Driver {
	return &Driver{Driver: riverpgxv5.New(pool), pool: pool, pooled: IsPooled(pool)}
}

// Driver is River's driver. Behind a pooler its statements run as those of [Statements] do.
type Driver struct {
	*riverpgxv5.Driver

	pool   *pgxpool.Pool
	pooled bool
}

// GetExecutor implements riverdriver.Driver.
func (d *Driver) GetExecutor() riverdriver.Executor {
	plain := d.Driver.GetExecutor()
	if !d.pooled {
		return plain
	}
	return executor{d.UnwrapExecutor(singleTx{singly: singly{pool: d.pool}}), plain}
}

// executor is River's, but for statements that no transaction may hold.
type executor struct {
	riverdriver.Executor

	plain riverdriver.Executor
}

func (e executor) IndexDropIfExists(ctx context.Context, params *riverdriver.IndexDropIfExistsParams) error {
	return e.plain.IndexDropIfExists(ctx, params)
}

func (e executor) IndexReindex(ctx context.Context, params *riverdriver.IndexReindexParams) error {
	return e.plain.IndexReindex(ctx, params)
}

// singleTx is what River's driver takes for a transaction: statements each in one of its own.
type singleTx struct {
	pgx.Tx // of which the driver uses nothing else
	singly
}

func (t singleTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return t.singly.Exec(ctx, sql, args...)
}

func (t singleTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return t.singly.Query(ctx, sql, args...)
}

func (t singleTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return t.singly.QueryRow(ctx, sql, args...)
}

func (t singleTx) Begin(ctx context.Context) (pgx.Tx, error) {
	return t.pool.BeginTx(ctx, pgx.TxOptions{BeginQuery: BeginQuery()})
}

func (t singleTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string,
	rows pgx.CopyFromSource,
) (n int64, err error) {
	err = BeginFunc(ctx, t.pool, func(tx pgx.Tx) error {
		n, err = tx.CopyFrom(ctx, table, columns, rows)
		return err
	})
	return n, err
}

// Config lets the driver see in which mode statements run.
func (t singleTx) Config() *pgxpool.Config { return t.pool.Config() }

// namesExecMode reports whether a URL says how statements are run: pgx takes that out of what it parses.
func namesExecMode(url string) bool { return strings.Contains(url, "default_query_exec_mode") }
