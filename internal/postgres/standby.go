package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	// standbyAcquire bounds how long a read waits for a connection to a standby. If a read gets none, the primary answers
	// it.
	standbyAcquire = time.Second
	// standbyLockTimeout bounds how long a statement waits for a lock that the standby holds while it replays a change of
	// a table. If the replay is paused, the standby may hold such a lock for any length of time.
	standbyLockTimeout = "1s"
)

// Server identifies a server and one of its databases.
type Server struct {
	System     string // the system identifier, which is the same for a server and its standbys
	Database   int64  // the oid of the database, which is the same on standbys
	InRecovery bool   // whether the server is a standby
	Started    string // the start time of the server, which no other server shares
}

// ServerOf returns the server that db is connected to.
func ServerOf(ctx context.Context, db DB) (s Server, err error) {
	err = db.QueryRow(ctx, `SELECT (SELECT c.system_identifier::text FROM pg_control_system() c),
		(SELECT d.oid::bigint FROM pg_database d WHERE d.datname = current_database()), pg_is_in_recovery(),
		extract(epoch FROM pg_postmaster_start_time())::text`, pgx.QueryExecModeExec).
		Scan(&s.System, &s.Database, &s.InRecovery, &s.Started)
	return s, err
}

var (
	// ErrNotStandby means that a server is not a standby of the primary.
	ErrNotStandby = errors.New("the server is not a standby of the database")
	// ErrOtherDatabase is an ErrNotStandby: the server or the database is not a copy of the primary's.
	ErrOtherDatabase = fmt.Errorf("%w: it is another database", ErrNotStandby)
)

// CheckStandbyOf returns an [ErrOtherDatabase] if s is not a copy of the primary's database, and an [ErrNotStandby] if
// s is a copy but not a standby.
func (s Server) CheckStandbyOf(primary Server) error {
	switch {
	case s.System != primary.System:
		return fmt.Errorf("%w: its system identifier is %s, and the database's is %s", ErrOtherDatabase, s.System,
			primary.System)
	case s.Database != primary.Database:
		return fmt.Errorf("%w: its oid is %d, and the database's is %d", ErrOtherDatabase, s.Database, primary.Database)
	case !s.InRecovery:
		return fmt.Errorf("%w: it is a primary", ErrNotStandby)
	}
	return nil
}

// Standby is a connection pool to a standby, for reads only.
type Standby struct {
	Pool *pgxpool.Pool

	statements DB
}

// OpenStandby opens a pool to a standby. The pool calls check with each new connection and refuses the connection if
// check returns an error. If the URL has several hosts, the pool uses the first standby. The pool has up to maxConns
// connections; 0 stands for the URL's pool_max_conns or [DefaultMaxConns].
func OpenStandby(ctx context.Context, url string, maxConns int32,
	check func(context.Context, *pgx.Conn) error,
) (*Standby, error) {
	pool, err := openPool(ctx, url, poolOptions{
		name: "replica", maxConns: maxConns, tracer: standbyTracer{timeouts{DefaultTimeout}}, connected: check,
		choose: followStandby, parameters: map[string]string{"lock_timeout": standbyLockTimeout},
	})
	if err != nil {
		return nil, err
	}
	return &Standby{Pool: pool, statements: statementsOf(pool, standbySettingsQuery)}, nil
}

// followStandby makes a connection to several hosts choose a standby.
func followStandby(config *pgx.ConnConfig) {
	if config.ValidateConnect == nil && slices.ContainsFunc(config.Fallbacks, func(f *pgconn.FallbackConfig) bool {
		return f.Host != config.Host || f.Port != config.Port // as in followPrimary
	}) {
		config.ValidateConnect = pgconn.ValidateConnectTargetSessionAttrsStandby
	}
	config.ConnectTimeout = cmp.Or(config.ConnectTimeout, hostTimeout)
}

// Position is the point in the WAL that a server has written or replayed. Positions on different timelines cannot be
// compared.
type Position struct {
	Timeline int64
	Bytes    int64
}

// CheckFollows returns an [ErrNotStandby] if a standby at p is not on the timeline of the primary. After a failover, a
// server on another timeline follows the old primary, or is the old primary itself. Such a server may have replayed
// more bytes than the new primary has written, but with other content.
func (p Position) CheckFollows(primary Position) error {
	if p.Timeline != primary.Timeline {
		return fmt.Errorf("%w: it is on timeline %d, and the database is on timeline %d", ErrNotStandby, p.Timeline,
			primary.Timeline)
	}
	return nil
}

// PositionOf returns the timeline and the WAL insert position of a primary.
func PositionOf(ctx context.Context, db DB) (p Position, err error) {
	err = db.QueryRow(ctx, `SELECT ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::bigint,
		pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint`, pgx.QueryExecModeExec).Scan(&p.Timeline, &p.Bytes)
	return p, err
}

// Position returns the point up to which a standby has replayed the primary's WAL. A standby that has just followed the
// primary to a new timeline reports the old timeline until it has written a page with changes of the new one. That
// takes some seconds under load, or until the next restartpoint. Position fails with [ErrNotStandby] if the standby was
// promoted.
func (s *Standby) Position(ctx context.Context) (p Position, err error) {
	var isStandby bool
	var replayed *int64
	err = s.Pool.QueryRow(ctx, `SELECT pg_is_in_recovery(), pg_wal_lsn_diff(pg_last_wal_replay_lsn(), '0/0')::bigint,
		greatest((SELECT c.timeline_id FROM pg_control_checkpoint() c),
			(SELECT r.min_recovery_end_timeline FROM pg_control_recovery() r))::bigint`,
		pgx.QueryExecModeExec).Scan(&isStandby, &replayed, &p.Timeline)
	switch {
	case err != nil:
		return Position{}, err
	case !isStandby || replayed == nil:
		return Position{}, fmt.Errorf("%w: it was promoted", ErrNotStandby)
	}
	p.Bytes = *replayed
	return p, nil
}

// StandbyError means that a standby failed to answer a read, for example because of a lost connection, or because the
// standby cancelled a statement that conflicted with the replay. The primary can answer the read.
type StandbyError struct{ Err error }

func (e *StandbyError) Error() string { return "the standby: " + e.Err.Error() }

func (e *StandbyError) Unwrap() error { return e.Err }

// Read calls run with a context in which [Statements] and [ReadPool] use the standby instead of the primary. It returns
// run's error. If the standby failed, it returns a [*StandbyError], and the data that run has read may be incomplete.
func (s *Standby) Read(ctx context.Context, run func(context.Context) error) error {
	r := &standbyRead{standby: s}
	err := run(context.WithValue(ctx, standbyKey{}, r))
	if failed := r.failed.Load(); failed != nil {
		return &StandbyError{*failed}
	}
	if cancelled := r.cancelled.Load(); cancelled != nil && err != nil {
		return &StandbyError{*cancelled}
	}
	return err
}

// StandbyFailed reports whether the standby that ctx reads from has failed or has cancelled a statement.
func StandbyFailed(ctx context.Context) bool {
	r := standbyReadOf(ctx)
	return r != nil && (r.failed.Load() != nil || r.cancelled.Load() != nil)
}

// ReadPool returns the pool for a transaction that only reads: the standby's pool in a context of [Standby.Read], and
// otherwise pool.
func ReadPool(ctx context.Context, pool *pgxpool.Pool) *pgxpool.Pool {
	if r := standbyReadOf(ctx); r != nil {
		return r.standby.Pool
	}
	return pool
}

type standbyKey struct{}

// standbyRead is one call of [Standby.Read], with the first error of the statements in that call.
type standbyRead struct {
	standby *Standby
	failed  atomic.Pointer[error]
	// cancelled is set if a statement was cancelled. A cancelled statement is no failure of the standby if the read set a
	// statement_timeout and handles its error, as searches do.
	cancelled atomic.Pointer[error]
}

func standbyReadOf(ctx context.Context) *standbyRead {
	r, _ := ctx.Value(standbyKey{}).(*standbyRead)
	return r
}

// noteFailure records an error of a statement or of a connection. It ignores errors that the primary would return, too:
// refusals by dlqd's functions, and invalid values.
func noteFailure(ctx context.Context, err error) {
	r := standbyReadOf(ctx)
	if r == nil || err == nil || errors.Is(err, pgx.ErrNoRows) {
		return
	}
	into := &r.failed
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		switch {
		case strings.HasPrefix(pgErr.Code, "DLQ"), strings.HasPrefix(pgErr.Code, "22"):
			return
		case pgErr.Code == "57014":
			into = &r.cancelled
		}
	}
	into.CompareAndSwap(nil, &err)
}

// standbyTracer gives statements a deadline, as timeouts does, and records failures.
type standbyTracer struct{ timeouts }

func (t standbyTracer) TraceQueryEnd(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryEndData) {
	noteFailure(ctx, data.Err)
	t.timeouts.TraceQueryEnd(ctx, conn, data)
}

func (standbyTracer) TraceBatchQuery(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	noteFailure(ctx, data.Err)
}

func (t standbyTracer) TraceBatchEnd(ctx context.Context, conn *pgx.Conn, data pgx.TraceBatchEndData) {
	noteFailure(ctx, data.Err)
	t.timeouts.TraceBatchEnd(ctx, conn, data)
}

func (standbyTracer) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool,
	_ pgxpool.TraceAcquireStartData,
) context.Context {
	with, cancel := context.WithTimeout(ctx, standbyAcquire)
	return limited{with, cancel}
}

func (t standbyTracer) TraceAcquireEnd(ctx context.Context, pool *pgxpool.Pool, data pgxpool.TraceAcquireEndData) {
	noteFailure(ctx, data.Err)
	t.timeouts.TraceAcquireEnd(ctx, pool, data)
}
