package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/redact"
)

// DefaultMaxConns bounds a pool whose URL names no pool_max_conns: River's completer, fetches and the API share it.
const DefaultMaxConns = 20

// ApplicationName is what dlqd's sessions call themselves, unless the URL says otherwise.
const ApplicationName = "dlqd"

// ProcessName names this process in what it writes to the database: host and process id.
func ProcessName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

// Open opens a pool and makes sure that the server answers and is of a supported version. Passwords in url do not
// appear in errors. The pool has up to maxConns connections; for 0, the URL's pool_max_conns or
// [DefaultMaxConns]. Statements of the pool have a deadline: see [DefaultTimeout].
func Open(ctx context.Context, url string, maxConns int32) (*pgxpool.Pool, error) {
	return openLimited(ctx, url, maxConns, DefaultTimeout, nil)
}

// OpenWith is Open for a pool that calls connected with each new connection before anything else uses it.
func OpenWith(ctx context.Context, url string, maxConns int32, connected func(context.Context, *pgx.Conn)) (*pgxpool.Pool, error) {
	return openLimited(ctx, url, maxConns, DefaultTimeout, connected)
}

// namesMaxConns reports whether a URL says how many connections a pool may have: pgxpool takes that out of what it parses.
func namesMaxConns(url string) bool {
	config, err := pgx.ParseConfig(url)
	return err == nil && config.RuntimeParams["pool_max_conns"] != ""
}

// Beside runs fn in a transaction on a connection of its own, which is none of the pool's: what holds a lock while the pool does the
// work must not take a connection from it, or a small pool waits for itself for ever.
func Beside(ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx) error) error {
	conn, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return pgx.BeginFunc(ctx, conn, fn)
}

func parse(url string) (*pgxpool.Config, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, errors.New("database URL: " + redact.Text(err.Error()))
	}
	return config, nil
}

func openLimited(ctx context.Context, url string, maxConns int32, limit time.Duration, connected func(context.Context, *pgx.Conn)) (*pgxpool.Pool, error) {
	config, err := parse(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = cmp.Or(maxConns, config.MaxConns)
	if maxConns == 0 && !namesMaxConns(url) {
		config.MaxConns = DefaultMaxConns
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = ApplicationName
	}
	config.ConnConfig.Tracer = timeouts{limit}
	// A job that a policy hides would look like one that is gone: with row_security off, that is an error instead. And what dlqd
	// reads must not make conflicts of the application's SERIALIZABLE transactions, where that is the database's default.
	config.ConnConfig.RuntimeParams["row_security"] = "off"
	config.ConnConfig.RuntimeParams["default_transaction_isolation"] = "read committed"
	// Plans without sequential scans have costs that make Postgres compile them, for seconds, and run them for milliseconds.
	config.ConnConfig.RuntimeParams["jit"] = "off"
	if connected != nil {
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			connected(ctx, conn)
			return nil
		}
	}
	pool, version, err := open(ctx, config)
	if refusesParameter(err) { // a pooler that knows but a few: as good, where it gives each client a session
		delete(config.ConnConfig.RuntimeParams, "row_security")
		delete(config.ConnConfig.RuntimeParams, "default_transaction_isolation")
		delete(config.ConnConfig.RuntimeParams, "jit")
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, "SET row_security = off; SET default_transaction_isolation = 'read committed'; SET jit = off")
			if err == nil && connected != nil {
				connected(ctx, conn)
			}
			return err
		}
		pool, version, err = open(ctx, config)
	}
	if err != nil {
		return nil, fmt.Errorf("database: %w", err)
	}
	if version < OldestVersion {
		pool.Close()
		return nil, fmt.Errorf("database: Postgres %d is too old: dlqd needs %d or newer", version, OldestVersion)
	}
	return pool, nil
}

func open(ctx context.Context, config *pgxpool.Config) (pool *pgxpool.Pool, version int, err error) {
	if pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, 0, err
	}
	if err = pool.QueryRow(ctx, "SELECT current_setting('server_version_num')::int / 10000").Scan(&version); err != nil {
		pool.Close()
		return nil, 0, err
	}
	return pool, version, nil
}

// refusesParameter recognises PgBouncer's answer to a parameter at the start of a session that it does not know.
func refusesParameter(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && strings.Contains(pgErr.Message, "unsupported startup parameter")
}
