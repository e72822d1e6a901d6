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

// sessionParameters are the settings that dlqd needs:
//
//   - row_security off: a job hidden by a policy would look deleted; reading it fails instead.
//   - read committed: after a worker has got its locks, it must read the rows that were committed before; and dlqd's
//     reads must not cause serialization failures in SERIALIZABLE transactions of the application.
//   - jit off: plans without sequential scans have such high estimated costs that Postgres would compile them for
//     seconds, and then run them for milliseconds.
//
// Without a transaction pooler, the settings are set when a session starts. A transaction pooler refuses them and
// shares the session with other clients. Behind such a pooler, each transaction sets them for itself, and a single
// statement gets its own transaction in the same round trip.
var sessionParameters = map[string]string{
	"row_security": "off", "jit": "off", "default_transaction_isolation": "read committed",
}

const (
	beginIsolated = "BEGIN ISOLATION LEVEL READ COMMITTED"
	localSettings = "; SET LOCAL row_security = off; SET LOCAL jit = off"
	// settingsQuery has the settings of localSettings in one statement: the extended protocol allows one statement at a
	// time.
	settingsQuery = "SELECT set_config('row_security', 'off', true), set_config('jit', 'off', true)"
	// standbySettingsQuery is settingsQuery for a standby.
	standbySettingsQuery = settingsQuery + ", set_config('lock_timeout', '" + standbyLockTimeout + "', true)"
)

// BeginQuery returns a statement that begins a transaction with dlqd's settings and more, such as
// "lock_timeout = '2s'".
func BeginQuery(more ...string) string { return begin("", more) }

// BeginReadOnlyQuery is [BeginQuery] for a read-only transaction.
func BeginReadOnlyQuery(more ...string) string { return begin(" READ ONLY", more) }

func begin(mode string, more []string) string {
	return strings.Join(append([]string{beginIsolated + mode + localSettings}, more...), "; SET LOCAL ")
}

// BeginFunc runs fn in a transaction with dlqd's settings.
func BeginFunc(ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx) error) error {
	options := pgx.TxOptions{}
	if IsPooled(pool) { // without a pooler, the session already has the settings
		options.BeginQuery = BeginQuery()
	}
	return pgx.BeginTxFunc(ctx, pool, options, fn)
}

// IsPooled reports whether the pool connects through a pooler that does not pass session parameters to the server.
func IsPooled(pool *pgxpool.Pool) bool {
	_, has := pool.Config().ConnConfig.RuntimeParams["row_security"]
	return !has
}

// Statements returns a DB for single statements, each with dlqd's settings. A statement whose context was made by
// [Standby.Read] runs on the standby.
func Statements(pool *pgxpool.Pool) DB { return readable{statementsOf(pool, settingsQuery)} }

func statementsOf(pool *pgxpool.Pool, settings string) DB {
	if IsPooled(pool) {
		return singleStatements{pool: pool, settings: settings}
	}
	return pool
}

// readable runs a statement on a primary's pool or, if the statement's context comes from [Standby.Read], on the
// standby.
type readable struct{ primary DB }

func (r readable) in(ctx context.Context) DB {
	if read := standbyReadOf(ctx); read != nil {
		return read.standby.statements
	}
	return r.primary
}

func (r readable) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return r.in(ctx).Exec(ctx, sql, args...)
}

func (r readable) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return r.in(ctx).Query(ctx, sql, args...)
}

func (r readable) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return r.in(ctx).QueryRow(ctx, sql, args...)
}

// singleStatements runs each statement in a separate transaction with dlqd's settings, in one round trip. Statements
// that cannot run in a transaction, such as CALL of a procedure that commits or REINDEX CONCURRENTLY, must run on the
// pool itself.
type singleStatements struct {
	pool     *pgxpool.Pool
	settings string // settingsQuery or standbySettingsQuery
	more     string // a query for further settings, or ""
	args     []any  // arguments of more
}

func (s singleStatements) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	rows, err := s.Query(ctx, sql, args...)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	rows.Close()
	return rows.CommandTag(), rows.Err()
}

func (s singleStatements) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, err := s.Query(ctx, sql, args...)
	return singleRow{rows, err}
}

func (s singleStatements) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	// A batch runs in the exec mode of its connection, which behind a pooler prepares no statements. So an exec mode
	// among the arguments is dropped.
	for len(args) > 0 {
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
	batch.Queue(s.settings)
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

// singleRows are the rows of a statement. The statement's transaction ends when the rows are closed or read to their
// end.
type singleRows struct {
	pgx.Rows

	ctx     context.Context //nolint:containedctx // of the statement
	conn    *pgxpool.Conn
	results pgx.BatchResults // nil after the end of the transaction
	err     error
}

func (r *singleRows) end() {
	if r.results == nil {
		return
	}
	r.err, r.results = r.results.Close(), nil
	if !r.conn.Conn().IsClosed() && r.conn.Conn().PgConn().TxStatus() != 'I' { // the statement failed
		_, _ = r.conn.Exec(context.WithoutCancel(r.ctx), "ROLLBACK") // if this fails, the pool closes the connection
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

// singleRow is the first row of a query, or the query's error.
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

// NewDriver returns River's driver on a pool. Its statements have dlqd's settings.
func NewDriver(pool *pgxpool.Pool) *Driver {
	return &Driver{Driver: riverpgxv5.New(pool), pool: pool, pooled: IsPooled(pool)}
}

// Driver is River's driver. Behind a pooler it runs statements as [Statements] does.
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
	return executor{d.UnwrapExecutor(d.single()), plain}
}

func (d *Driver) single() singleTx {
	return singleTx{singleStatements: singleStatements{pool: d.pool, settings: settingsQuery}}
}

// executor is River's executor. Statements that cannot run in a transaction go to plain.
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

// singleTx is a pgx.Tx that runs each statement in a separate transaction. River's driver uses it as its database.
type singleTx struct {
	unusedTx
	singleStatements
}

// unusedTx has the methods of a pgx.Tx that the driver does not call. It is embedded one level deeper than
// singleStatements, so methods of singleStatements hide methods of unusedTx with the same name.
type unusedTx struct{ pgx.Tx }

func (t singleTx) Begin(ctx context.Context) (pgx.Tx, error) {
	return t.pool.BeginTx(ctx, pgx.TxOptions{BeginQuery: BeginQuery()})
}

func (t singleTx) CopyFrom(
	ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource,
) (n int64, err error) {
	err = BeginFunc(ctx, t.pool, func(tx pgx.Tx) error {
		n, err = tx.CopyFrom(ctx, table, columns, rows)
		return err
	})
	return n, err
}

// Config returns the configuration of the pool, from which River's driver reads the exec mode.
func (t singleTx) Config() *pgxpool.Config { return t.pool.Config() }

// namesExecMode reports whether a URL sets default_query_exec_mode. It searches the text, because pgx removes the
// parameter when it parses a URL.
func namesExecMode(url string) bool { return strings.Contains(url, "default_query_exec_mode") }
