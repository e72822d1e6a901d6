package postgres

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sort"
	"strings"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/dlqd/dlqd/db"
)

const (
	settingCodeVersion = "code_version"
	// Whose River this is: riverOwn or riverAttached.
	settingRiver  = "river"
	riverOwn      = "own"
	riverAttached = "attached"

	// MigrationTable is goose's table, in dlqd's schema.
	MigrationTable = "schema_migrations"

	// How long installing triggers waits for river_job before it gives up: an application's jobs queue behind it.
	installLockTimeout = "5s"

	backfillBatch = 1000
)

// ErrSchemaOld is returned by [Migrator.Check] when the database's schema is not the one this program was built for.
var ErrSchemaOld = errors.New("database schema is not up to date")

// Migrator installs River's schema and dlqd's in one database, and takes dlqd's out again.
type Migrator struct {
	Pool    *pgxpool.Pool
	Schemas Schemas
	Logger  *slog.Logger
	// OwnRiver says that a River which is there already is dlqd's own, and no application's.
	OwnRiver bool
}

// MigrationStatus is where a database stands.
type MigrationStatus struct {
	RiverVersion, RiverLatest int
	Version, Latest           int64
	CodeInstalled             bool // functions, views and triggers are those of this program
	Attached                  bool // River belongs to another application
}

// Current reports whether nothing is left to do.
func (s MigrationStatus) Current() bool {
	return s.RiverVersion >= s.RiverLatest && s.Version == s.Latest && s.CodeInstalled
}

// Up applies River's migrations and dlqd's, and installs dlqd's functions, views and triggers.
func (m *Migrator) Up(ctx context.Context) error {
	return m.exclusively(ctx, func() error {
		status, err := m.status(ctx)
		if err != nil {
			return err
		}
		if status.Attached {
			return m.install(ctx, riverAttached)
		}
		// dlqd's client leads on its own River, and a leader discards stuck jobs of kinds it does not know.
		if status.RiverVersion > 0 && status.Version == 0 && !m.OwnRiver {
			return fmt.Errorf("there is a River in schema %q of this database already: if an application runs on it, use \"dlqd attach\"; if it is dlqd's own, use \"dlqd migrate up --own-river\"", m.Schemas.River)
		}
		if err := m.createSchema(ctx, m.Schemas.River); err != nil {
			return err
		}
		if err := m.migrateRiver(ctx, rivermigrate.DirectionUp); err != nil {
			return err
		}
		return m.install(ctx, riverOwn)
	})
}

// Attach installs dlqd beside a River that an application owns. River's own tables are left as they are.
func (m *Migrator) Attach(ctx context.Context) error {
	return m.exclusively(ctx, func() error {
		version, err := m.riverVersion(ctx)
		if err != nil {
			return err
		}
		if version == 0 {
			return fmt.Errorf("there is no River in schema %q of this database: name its schema with --river-schema, or run \"dlqd migrate up\" to make a new one", m.Schemas.River)
		}
		return m.install(ctx, riverAttached)
	})
}

// Backfill takes in jobs that failed before capture was installed. It returns how many.
func (m *Migrator) Backfill(ctx context.Context, progress func(total int)) (int, error) {
	total := 0
	for {
		var n int
		if err := m.Pool.QueryRow(ctx, m.Schemas.Render("SELECT dlq.backfill($1)"), backfillBatch).Scan(&n); err != nil {
			return total, fmt.Errorf("backfill after %d jobs: %w", total, err)
		}
		total += n
		if n == 0 {
			return total, nil
		}
		progress(total)
	}
}

// Detach removes dlqd's triggers, functions and views. Its tables stay, unless dropData.
func (m *Migrator) Detach(ctx context.Context, dropData bool) error {
	return m.exclusively(ctx, func() error {
		known, err := m.hasTable(ctx, m.Schemas.DLQ, "settings")
		if err != nil {
			return err
		}
		return m.inTx(ctx, func(tx pgx.Tx) error {
			if err := m.dropCode(ctx, tx); err != nil {
				return err
			}
			switch {
			case dropData:
				_, err = tx.Exec(ctx, "DROP SCHEMA IF EXISTS "+m.Schemas.DLQ+" CASCADE")
			case known:
				_, err = tx.Exec(ctx, m.Schemas.Render("DELETE FROM dlq.settings WHERE key = $1"), settingCodeVersion)
			}
			return err
		})
	})
}

// Down takes back dlqd's last migration. Functions, views and triggers go first: they are of the newer tables. Once
// no migration of dlqd's is left, and River was made by [Migrator.Up], River's tables go too.
func (m *Migrator) Down(ctx context.Context) error {
	return m.exclusively(ctx, func() error {
		status, err := m.status(ctx)
		if err != nil {
			return err
		}
		if err := m.inTx(ctx, func(tx pgx.Tx) error { return m.dropCode(ctx, tx) }); err != nil {
			return err
		}
		if status.Version == 0 {
			if status.Attached || status.RiverVersion == 0 {
				return nil
			}
			return m.migrateRiver(ctx, rivermigrate.DirectionDown)
		}
		return m.withGoose(func(p *goose.Provider) error {
			_, err := p.Down(ctx)
			return err
		})
	})
}

// Status says where the database stands.
func (m *Migrator) Status(ctx context.Context) (MigrationStatus, error) { return m.status(ctx) }

// Check returns [ErrSchemaOld], with the command that mends it, unless the schema is the one of this program.
func (m *Migrator) Check(ctx context.Context) error {
	status, err := m.status(ctx)
	if err != nil {
		return err
	}
	command := "dlqd migrate up"
	if status.Attached {
		command = "dlqd attach"
	}
	switch {
	case status.Version > status.Latest:
		return fmt.Errorf("%w: it is at version %d and this dlqd knows up to %d; run a newer dlqd", ErrSchemaOld, status.Version, status.Latest)
	case !status.Attached && status.RiverVersion < status.RiverLatest, status.Version < status.Latest, !status.CodeInstalled:
		return fmt.Errorf("%w: River %d of %d, dlqd %d of %d, functions current: %t; run %q with the same --database-url",
			ErrSchemaOld, status.RiverVersion, status.RiverLatest, status.Version, status.Latest, status.CodeInstalled, command)
	}
	return nil
}

// install brings dlqd's schema up to date. Whose River it is, is settled by the first call.
func (m *Migrator) install(ctx context.Context, river string) error {
	if err := m.createSchema(ctx, m.Schemas.DLQ); err != nil {
		return err
	}
	if err := m.withGoose(func(p *goose.Provider) error {
		_, err := p.Up(ctx)
		return err
	}); err != nil {
		return err
	}
	if _, err := m.Pool.Exec(ctx, m.Schemas.Render("INSERT INTO dlq.settings (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING"), settingRiver, river); err != nil {
		return err
	}
	code, version := m.code()
	if installed, err := m.setting(ctx, settingCodeVersion); err != nil || installed == version {
		return err
	}
	if err := m.inTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '"+installLockTimeout+"'"); err != nil {
			return err
		}
		for _, file := range code {
			if _, err := tx.Exec(ctx, file.sql); err != nil {
				return fmt.Errorf("%s: %w%s", file.name, err, position(err, file.sql))
			}
		}
		_, err := tx.Exec(ctx, m.Schemas.Render(`INSERT INTO dlq.settings (key, value) VALUES ($1, $2)
			ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now()`), settingCodeVersion, version)
		return err
	}); err != nil {
		return fmt.Errorf("install functions and triggers: %w", err)
	}
	_, err := m.Pool.Exec(ctx, m.Schemas.Render("SELECT dlq.ensure_partitions(), dlq.refresh_rollups()"))
	return err
}

type codeFile struct{ name, sql string }

// code returns the rendered files in order, and a hash of them.
func (m *Migrator) code() ([]codeFile, string) {
	names, err := fs.Glob(db.Code, "code/*.sql")
	if err != nil {
		panic(err) // the pattern is constant
	}
	sort.Strings(names)
	hash := sha256.New()
	files := make([]codeFile, len(names))
	for i, name := range names {
		raw, err := db.Code.ReadFile(name)
		if err != nil {
			panic(err) // embedded
		}
		files[i] = codeFile{name: name, sql: m.Schemas.Render(string(raw))}
		hash.Write([]byte(files[i].sql))
	}
	return files, hex.EncodeToString(hash.Sum(nil))[:16]
}

// dropCode removes all triggers that call a function of dlqd's schema, then its views and functions.
func (m *Migrator) dropCode(ctx context.Context, tx pgx.Tx) error {
	if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '"+installLockTimeout+"'"); err != nil {
		return err
	}
	rows, err := tx.Query(ctx, `
		SELECT format('DROP TRIGGER IF EXISTS %I ON %s', t.tgname, t.tgrelid::regclass)
		FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = $1 AND NOT t.tgisinternal AND t.tgparentid = 0
		UNION ALL
		SELECT format('DROP VIEW IF EXISTS %s CASCADE', c.oid::regclass)
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind = 'v'
		UNION ALL
		SELECT format('DROP FUNCTION IF EXISTS %s CASCADE', p.oid::regprocedure)
		FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1`, m.Schemas.DLQ)
	if err != nil {
		return err
	}
	drops, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, drop := range drops {
		if _, err := tx.Exec(ctx, drop); err != nil {
			return fmt.Errorf("%s: %w", drop, err)
		}
	}
	return nil
}

func (m *Migrator) status(ctx context.Context) (MigrationStatus, error) {
	var s MigrationStatus
	var err error
	if s.RiverVersion, err = m.riverVersion(ctx); err != nil {
		return s, err
	}
	migrations, err := rivermigrate.New(riverpgxv5.New(m.Pool), &rivermigrate.Config{Schema: m.Schemas.River, Logger: m.Logger})
	if err != nil {
		return s, err
	}
	for _, v := range migrations.AllVersions() {
		s.RiverLatest = max(s.RiverLatest, v.Version)
	}
	names, err := fs.Glob(db.Migrations, "migrations/*.sql")
	if err != nil {
		return s, err
	}
	s.Latest = int64(len(names))
	if has, err := m.hasTable(ctx, m.Schemas.DLQ, MigrationTable); err != nil || !has {
		return s, err
	}
	if err := m.Pool.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM "+m.Schemas.DLQ+"."+MigrationTable+" WHERE is_applied").Scan(&s.Version); err != nil {
		return s, err
	}
	if s.Version == 0 {
		return s, nil
	}
	installed, err := m.setting(ctx, settingCodeVersion)
	if err != nil {
		return s, err
	}
	_, version := m.code()
	s.CodeInstalled = installed == version
	river, err := m.setting(ctx, settingRiver)
	s.Attached = river == riverAttached
	return s, err
}

func (m *Migrator) riverVersion(ctx context.Context) (int, error) {
	has, err := m.hasTable(ctx, m.Schemas.River, "river_migration")
	if err != nil || !has {
		return 0, err
	}
	var version int
	err = m.Pool.QueryRow(ctx, "SELECT coalesce(max(version), 0) FROM "+m.Schemas.River+".river_migration").Scan(&version)
	return version, err
}

func (m *Migrator) migrateRiver(ctx context.Context, direction rivermigrate.Direction) error {
	river, err := rivermigrate.New(riverpgxv5.New(m.Pool), &rivermigrate.Config{Schema: m.Schemas.River, Logger: m.Logger})
	if err != nil {
		return err
	}
	opts := &rivermigrate.MigrateOpts{}
	if direction == rivermigrate.DirectionDown {
		opts.TargetVersion = -1
	}
	if _, err := river.Migrate(ctx, direction, opts); err != nil {
		return fmt.Errorf("migrate River %s: %w", direction, err)
	}
	return nil
}

func (m *Migrator) withGoose(run func(*goose.Provider) error) error {
	rendered := fstest.MapFS{}
	names, err := fs.Glob(db.Migrations, "migrations/*.sql")
	if err != nil {
		return err
	}
	for _, name := range names {
		raw, err := db.Migrations.ReadFile(name)
		if err != nil {
			return err
		}
		rendered[strings.TrimPrefix(name, "migrations/")] = &fstest.MapFile{Data: []byte(m.Schemas.Render(string(raw)))}
	}
	sqlDB := stdlib.OpenDBFromPool(m.Pool)
	defer func(sqlDB *sql.DB) { _ = sqlDB.Close() }(sqlDB)
	store, err := database.NewStore(database.DialectPostgres, m.Schemas.DLQ+"."+MigrationTable)
	if err != nil {
		return err
	}
	provider, err := goose.NewProvider("", sqlDB, rendered, goose.WithStore(store), goose.WithDisableGlobalRegistry(true))
	if err != nil {
		return err
	}
	return run(provider)
}

// exclusively keeps two migrations from running at once. A transaction-level lock works behind a transaction pooler too.
func (m *Migrator) exclusively(ctx context.Context, run func() error) error {
	if err := m.Schemas.Validate(); err != nil {
		return err
	}
	return m.inTx(ctx, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtextextended('dlqd migrate', 0))"); err != nil {
			return err
		}
		return run()
	})
}

func (m *Migrator) inTx(ctx context.Context, run func(pgx.Tx) error) error {
	return pgx.BeginFunc(ctx, m.Pool, run)
}

func (m *Migrator) createSchema(ctx context.Context, name string) error {
	var has bool
	if err := m.Pool.QueryRow(ctx, "SELECT to_regnamespace($1) IS NOT NULL", name).Scan(&has); err != nil || has {
		return err // CREATE SCHEMA IF NOT EXISTS wants the right to create even where it does nothing
	}
	if _, err := m.Pool.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+name); err != nil {
		return fmt.Errorf("create schema %s: %w", name, err)
	}
	return nil
}

func (m *Migrator) hasTable(ctx context.Context, schema, table string) (bool, error) {
	var has bool
	err := m.Pool.QueryRow(ctx, "SELECT to_regclass($1) IS NOT NULL", schema+"."+table).Scan(&has)
	return has, err
}

func (m *Migrator) setting(ctx context.Context, key string) (string, error) {
	var value string
	err := m.Pool.QueryRow(ctx, m.Schemas.Render("SELECT value FROM dlq.settings WHERE key = $1"), key).Scan(&value)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil
	}
	return value, err
}

// Plan lists, for people, what Attach will create.
func (m *Migrator) Plan(ctx context.Context) ([]string, error) {
	status, err := m.status(ctx)
	if err != nil {
		return nil, err
	}
	var plan []string
	if status.Version < status.Latest {
		plan = append(plan,
			"schema "+m.Schemas.DLQ,
			m.Schemas.Render("table dlq.dead_letter_queue, partitioned by status; closed entries by month"),
			m.Schemas.Render("table dlq.dead_letter_transitions, partitioned by day"),
			m.Schemas.Render("tables dlq.circuit_breakers, dlq.circuit_breaker_changes, dlq.gates, dlq.paces, dlq.ordered_jobs, dlq.settings, dlq.replay_runs, dlq.replay_run_entries,"),
			m.Schemas.Render("  dlq.rollup_*, dlq.failure_groups, dlq.erasures, dlq.restored_partitions"))
	}
	if !status.CodeInstalled {
		plan = append(plan,
			"functions and views in schema "+m.Schemas.DLQ,
			"roles dlq_reader, dlq_operator and dlq_admin, if this user may make roles",
			m.Schemas.Render("trigger dlq_capture on river.river_job (fires when a job is discarded, or cancelled by its worker)"),
			m.Schemas.Render("trigger dlq_follow on river.river_job (fires when a discarded or cancelled job is retried)"))
	}
	return plan, nil
}

// PartitionInterval is how often a program that serves makes partitions ahead: a week of days is made each time, so
// many rounds may fail before rows go to a default partition.
const PartitionInterval = time.Hour

// EnsurePartitions makes the partitions of the coming days and months.
func EnsurePartitions(ctx context.Context, pool *pgxpool.Pool, schemas Schemas) error {
	_, err := pool.Exec(ctx, schemas.Render("SELECT dlq.ensure_partitions()"))
	return err
}

// position points at where in a file Postgres found an error.
func position(err error, sql string) string {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Position <= 0 || int(pgErr.Position) > len(sql) {
		return ""
	}
	return fmt.Sprintf(" (line %d)", 1+strings.Count(sql[:pgErr.Position], "\n"))
}
