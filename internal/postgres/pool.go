package postgres

import (
	"context"
	"fmt"
	"os"

	"github.com/jackc/pgx/v5/pgxpool"
)

// DefaultMaxConns bounds a pool whose URL names no pool_max_conns: River's completer, fetches and the API share it.
const DefaultMaxConns = 20

// ProcessName names this process in what it writes to the database: host and process id.
func ProcessName() string {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}

// Open opens a pool and makes sure that the server answers and is of a supported version. Passwords in url do not
// appear in errors (pgx redacts them).
func Open(ctx context.Context, url string, maxConns int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, fmt.Errorf("database URL: %w", err)
	}
	if maxConns > 0 {
		config.MaxConns = maxConns
	}
	if config.ConnConfig.RuntimeParams["application_name"] == "" {
		config.ConnConfig.RuntimeParams["application_name"] = "dlqd"
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("database: %w", err)
	}
	var version int
	if err := pool.QueryRow(ctx, "SELECT current_setting('server_version_num')::int / 10000").Scan(&version); err != nil {
		pool.Close()
		return nil, fmt.Errorf("database: %w", err)
	}
	if version < OldestVersion {
		pool.Close()
		return nil, fmt.Errorf("database: Postgres %d is too old: dlqd needs %d or newer", version, OldestVersion)
	}
	return pool, nil
}
