package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/redact"
)

// DefaultMaxConns is the size of a pool whose URL has no pool_max_conns. River's client and the API share the pool.
const DefaultMaxConns = 20

// hostTimeout bounds an attempt to connect to one of several hosts, unless the URL has a connect_timeout. pgx's default
// of two minutes is longer than a failover takes, and each new connection would wait that long for a host that is gone.
const hostTimeout = 3 * time.Second

// ApplicationName is the application_name of dlqd's sessions, unless the URL sets another.
const ApplicationName = "dlqd"

// ProcessName returns the name of this process in the database: host and process id.
func ProcessName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

// Open opens a pool and checks that the server answers and has a supported version. Errors do not contain the passwords
// of url. The pool has up to maxConns connections; 0 stands for the URL's pool_max_conns or [DefaultMaxConns].
// Statements of the pool have a time limit: see [DefaultTimeout].
func Open(ctx context.Context, url string, maxConns int32) (*pgxpool.Pool, error) {
	return openLimited(ctx, url, maxConns, DefaultTimeout, nil)
}

// OpenWith is [Open] for a pool that calls connected with each new connection before its first use.
func OpenWith(ctx context.Context, url string, maxConns int32,
	connected func(context.Context, *pgx.Conn),
) (*pgxpool.Pool, error) {
	return openLimited(ctx, url, maxConns, DefaultTimeout, connected)
}

// namesMaxConns reports whether a URL sets pool_max_conns, which pgxpool removes from the
// configuration that it parses.
func namesMaxConns(url string) bool {
	config, err := pgx.ParseConfig(url)
	return err == nil && config.RuntimeParams["pool_max_conns"] != ""
}

// OutsidePool runs fn in a transaction on a connection outside the pool. It is for a transaction that holds a lock
// while the pool's connections do the work. If that transaction took a connection of a small pool, the work could wait
// for that connection forever.
func OutsidePool(ctx context.Context, pool *pgxpool.Pool, fn func(tx pgx.Tx) error) error {
	conn, err := pgx.ConnectConfig(ctx, pool.Config().ConnConfig)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{BeginQuery: BeginQuery()}, fn)
}

func parse(url string) (*pgxpool.Config, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, errors.New("database URL: " + redact.Text(err.Error()))
	}
	return config, nil
}

// errStandby means that a host does not accept writes, or that none of several hosts does.
var errStandby = errors.New("the server is a standby")

// followPrimary makes a connection to several hosts choose the host that accepts writes, because dlqd cannot work on a
// standby.
func followPrimary(config *pgx.ConnConfig) {
	accepts := config.ValidateConnect // not nil if the URL has target_session_attrs
	if slices.ContainsFunc(config.Fallbacks, func(f *pgconn.FallbackConfig) bool {
		return f.Host != config.Host || f.Port != config.Port // others differ only in TLS settings
	}) {
		if accepts == nil {
			accepts = pgconn.ValidateConnectTargetSessionAttrsReadWrite
		}
		config.ConnectTimeout = cmp.Or(config.ConnectTimeout, hostTimeout)
	}
	if accepts == nil {
		return
	}
	config.ValidateConnect = func(ctx context.Context, conn *pgconn.PgConn) error {
		if err := accepts(ctx, conn); err != nil {
			return fmt.Errorf("%w: %w", errStandby, err)
		}
		return nil
	}
}

func openLimited(ctx context.Context, url string, maxConns int32, limit time.Duration,
	connected func(context.Context, *pgx.Conn),
) (*pgxpool.Pool, error) {
	options := poolOptions{name: "database", maxConns: maxConns, tracer: timeouts{limit}, choose: followPrimary}
	if connected != nil {
		options.connected = func(ctx context.Context, conn *pgx.Conn) error {
			connected(ctx, conn)
			return nil
		}
	}
	return openPool(ctx, url, options)
}

// poolOptions configure a pool beyond its URL.
type poolOptions struct {
	name     string // of the server, for errors
	maxConns int32  // 0 means the URL's pool_max_conns, or DefaultMaxConns
	tracer   pgx.QueryTracer
	// connected, if not nil, is called with each new connection. If it returns an error, the pool refuses the connection.
	connected func(context.Context, *pgx.Conn) error
	choose    func(*pgx.ConnConfig) // chooses among several hosts
	// parameters are session settings in addition to sessionParameters. Behind a pooler, each transaction sets them.
	parameters map[string]string
}

func openPool(ctx context.Context, url string, options poolOptions) (*pgxpool.Pool, error) {
	config, err := parse(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = cmp.Or(options.maxConns, config.MaxConns)
	if options.maxConns == 0 && !namesMaxConns(url) {
		config.MaxConns = DefaultMaxConns
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = ApplicationName
	}
	options.choose(config.ConnConfig)
	config.ConnConfig.Tracer = options.tracer
	parameters := maps.Clone(sessionParameters)
	maps.Copy(parameters, options.parameters)
	maps.Copy(config.ConnConfig.RuntimeParams, parameters)
	config.AfterConnect = options.connected
	pool, version, err := open(ctx, config)
	if refusesParameter(err) {
		maps.DeleteFunc(config.ConnConfig.RuntimeParams, func(name, _ string) bool { return parameters[name] != "" })
		if !namesExecMode(url) { // behind a pooler, a prepared statement would stay in a shared session
			config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe
		}
		pool, version, err = open(ctx, config)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", options.name, err)
	}
	if version < OldestVersion {
		pool.Close()
		return nil, fmt.Errorf("%s: Postgres %d is too old: dlqd needs %d or newer", options.name, version, OldestVersion)
	}
	return pool, nil
}

func open(ctx context.Context, config *pgxpool.Config) (pool *pgxpool.Pool, version int, err error) {
	if pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, 0, err
	}
	const query = "SELECT current_setting('server_version_num')::int / 10000, current_setting('row_security')"
	var rowSecurity string
	err = pool.QueryRow(ctx, query, pgx.QueryExecModeExec).Scan(&version, &rowSecurity)
	if wanted := config.ConnConfig.RuntimeParams["row_security"]; err == nil && wanted != "" && rowSecurity != wanted {
		err = errIgnored
	}
	if err != nil {
		pool.Close()
		return nil, 0, err
	}
	return pool, version, nil
}

// errIgnored means that a pooler drops session parameters (ignore_startup_parameters).
var errIgnored = errors.New("the pooler ignores session parameters")

// refusesParameter reports whether an error comes from a pooler that refuses or ignores session
// parameters.
func refusesParameter(err error) bool {
	var pgErr *pgconn.PgError
	return errors.Is(err, errIgnored) ||
		errors.As(err, &pgErr) && strings.Contains(pgErr.Message, "unsupported startup parameter")
}
