package postgres

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"sort"
	"strings"
	"sync"
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
	// Hashes of the triggers on dlqd's own tables and on River's, as installed.
	settingTriggers      = "triggers"
	settingRiverTriggers = "river_triggers"
	// Schema of the River that this dlqd is on.
	settingRiverSchema = "river_schema"
	// Roles that dlqd made.
	settingRoles = "roles_made"
	// Whose River this is: riverOwn or riverAttached.
	settingRiver  = "river"
	riverOwn      = "own"
	riverAttached = "attached"

	// MigrationTable is goose's table, in dlqd's schema.
	MigrationTable = "schema_migrations"

	// How long a statement that changes tables, triggers or functions waits for a lock before it gives way and is tried again:
	// an application's jobs queue behind it meanwhile, no longer than capture itself may take. It is shorter than Postgres's
	// deadlock_timeout (1 s), so that in a deadlock it is never the application that is ended.
	codeLockTimeout = "200ms"
	codeTries       = 25
	codePause       = 500 * time.Millisecond // between tries, up to twice as long

	// How long to wait for another dlqd that migrates.
	exclusiveTimeout = "2min"

	// River's version that has all the columns that redeliveries write.
	oldestRiver = 6
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
	// Tries of a change that meets locks of others; 0 means 25, which is half a minute.
	Tries int
	// Concurrently builds indexes without blocking writes on tables of any size; otherwise on those above 32 MB.
	Concurrently bool
}

// MigrationStatus is where a database stands.
type MigrationStatus struct {
	RiverVersion, RiverLatest int
	Version, Latest           int64
	CodeInstalled             bool // functions, views and triggers are those of this program
	Attached                  bool // River belongs to another application

	codeCurrent, triggersCurrent, riverTriggersCurrent bool // which CodeInstalled is made of
}

// Current reports whether nothing is left to do.
func (s MigrationStatus) Current() bool {
	return s.RiverVersion >= s.RiverLatest && s.Version == s.Latest && s.CodeInstalled
}

// Up applies River's migrations and dlqd's, and installs dlqd's functions, views and triggers.
func (m *Migrator) Up(ctx context.Context) error {
	ctx = Unbounded(ctx)
	return m.exclusively(ctx, func() error {
		status, err := m.status(ctx)
		if err != nil {
			return err
		}
		if refusal, err := m.unknownTables(ctx, status); err != nil {
			return err
		} else if refusal != "" {
			return errors.New(refusal)
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
		if err := m.migrateRiver(ctx); err != nil {
			return err
		}
		return m.install(ctx, riverOwn)
	})
}

// Down reverts dlqd's last migration. It first drops functions, views and triggers, which depend on
// the newer tables. River's tables and their jobs stay: an application may use them.
func (m *Migrator) Down(ctx context.Context) error {
	ctx = Unbounded(ctx)
	return m.exclusively(ctx, func() error {
		status, err := m.status(ctx)
		if err != nil {
			return err
		}
		if refusal, err := m.unknownTables(ctx, status); err != nil {
			return err
		} else if refusal != "" {
			return errors.New(refusal)
		}
		if status.Version == 0 {
			return nil
		}
		if err := m.dropCode(ctx); err != nil {
			return err
		}
		return m.again(ctx, func() error {
			return m.withGoose(func(p *goose.Provider) error {
				_, err := p.Down(ctx)
				return err
			})
		})
	})
}

// Installed reports whether dlqd's functions are in the database, of whatever version: detach takes them out.
func (m *Migrator) Installed(ctx context.Context) (bool, error) {
	known, err := m.hasTable(ctx, m.Schemas.DLQ, "settings")
	if err != nil || !known {
		return false, err
	}
	if code, err := m.setting(ctx, settingCodeVersion); err != nil || code == "" {
		return false, err
	}
	return m.Capturing(ctx) // what is recorded may be gone
}

// Capturing reports whether the function of the capture trigger is in the database, which detach
// drops first. It reads the catalog alone, which needs no right on dlqd's schema.
func (m *Migrator) Capturing(ctx context.Context) (there bool, err error) {
	err = m.Pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.proname = 'capture')", m.Schemas.DLQ).Scan(&there)
	return there, err
}

// Where says which database it is: its name, the server's address and version, and as whom it is used.
func (m *Migrator) Where(ctx context.Context) (string, error) {
	var text string
	err := m.Pool.QueryRow(ctx, `SELECT format('%s at %s, as %s; Postgres %s', current_database(), coalesce(host(inet_server_addr()), 'a local socket'), current_user, current_setting('server_version'))`).Scan(&text)
	return text, err
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
	if status.Attached || status.Version == 0 && status.RiverVersion > 0 { // a River without dlqd is an application's, until somebody says otherwise
		command = "dlqd attach"
	}
	if status.Version != status.Latest || !status.CodeInstalled {
		if refusal, err := m.unknownTables(ctx, status); err != nil {
			return err
		} else if refusal != "" {
			return fmt.Errorf("%w: %s", ErrSchemaOld, refusal)
		}
	}
	if !status.Attached && status.RiverVersion < status.RiverLatest || status.Version < status.Latest ||
		!status.CodeInstalled {
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
	if err := m.again(ctx, func() error {
		return m.withGoose(func(p *goose.Provider) error {
			_, err := p.Up(ctx)
			return err
		})
	}); err != nil {
		return err
	}
	if err := m.buildIndexes(ctx); err != nil {
		return err
	}
	for key, value := range map[string]string{settingRiver: river, settingRiverSchema: m.Schemas.River} {
		if _, err := m.Pool.Exec(ctx, m.Schemas.Render("INSERT INTO dlq.settings (key, value) VALUES ($1, $2) ON CONFLICT (key) DO NOTHING"), key, value); err != nil {
			return err
		}
	}
	status, err := m.status(ctx)
	if err != nil {
		return err
	}
	code := m.code()
	// Functions first: there is no moment in which a trigger calls one that is not there.
	if !status.codeCurrent {
		if err := m.inShortLocks(ctx, func(tx pgx.Tx) error {
			if err := m.installCode(ctx, tx, code.routines.files); err != nil {
				return err
			}
			return m.set(ctx, tx, settingCodeVersion, code.routines.version)
		}); err != nil {
			return fmt.Errorf("install functions: %w", err)
		}
	}
	if !status.triggersCurrent {
		if err := m.inShortLocks(ctx, func(tx pgx.Tx) error {
			if err := code.triggers.run(ctx, tx); err != nil {
				return err
			}
			return m.set(ctx, tx, settingTriggers, code.triggers.version)
		}); err != nil {
			return fmt.Errorf("install triggers: %w", err)
		}
	}
	if !status.riverTriggersCurrent {
		if err := m.installRiverTriggers(ctx, river); err != nil {
			return fmt.Errorf("install triggers on %s.river_job: %w", m.Schemas.River, err)
		}
	}
	if err := m.rememberTaken(ctx); err != nil {
		return fmt.Errorf("record what dead letters had taken in: %w", err)
	}
	// Roles each time: somebody may have made them meanwhile.
	if _, err := m.Pool.Exec(ctx, m.Schemas.Render("SELECT dlq.install_roles()")); err != nil {
		return fmt.Errorf("install roles: %w", err)
	}
	if err := EnsurePartitions(ctx, m.Pool, m.Schemas); err != nil {
		return err
	}
	_, err = m.Pool.Exec(ctx, m.Schemas.Render("SELECT dlq.refresh_rollups()"))
	return err
}

// rememberTaken records what entries took in before schema version 9. The reconciler, whose turns are bounded, then adds
// what has changed since.
func (m *Migrator) rememberTaken(ctx context.Context) error {
	return m.inTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, m.Schemas.Render("SET LOCAL statement_timeout = 0; SELECT dlq.remember_taken()"))
		return err
	})
}

// installRiverTriggers puts the triggers on River's table, by which capture begins. What failed before that, on a River of an
// application's, is not the reconciler's to file: a backfill takes it in, if somebody says so.
func (m *Migrator) installRiverTriggers(ctx context.Context, river string) error {
	triggers := m.code().riverTriggers
	before, err := m.setting(ctx, settingRiverTriggers)
	if err != nil {
		return err
	}
	return m.inShortLocks(ctx, func(tx pgx.Tx) error {
		if before == "" && river == riverAttached {
			if _, err := tx.Exec(ctx, m.Schemas.Render("INSERT INTO dlq.reconcile_looks (look, since) VALUES ('whole', now()) ON CONFLICT (look) DO UPDATE SET since = now()")); err != nil {
				return err
			}
		}
		if err := triggers.run(ctx, tx); err != nil {
			return err
		}
		return m.set(ctx, tx, settingRiverTriggers, triggers.version)
	})
}

// inShortLocks runs a change of code in a transaction that waits for no lock for long, again while others hold one.
func (m *Migrator) inShortLocks(ctx context.Context, run func(tx pgx.Tx) error) error {
	return m.again(ctx, func() error {
		return m.inTx(ctx, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '"+codeLockTimeout+"'"); err != nil {
				return err
			}
			return run(tx)
		})
	})
}

// tupleUpdated is how a GRANT fails, or a change of a function, that another one of the same object comes before (XX000).
const tupleUpdated = "tuple concurrently updated"

// again runs a change until no lock of others is in its way.
func (m *Migrator) again(ctx context.Context, run func() error) error {
	for try := 1; ; try++ {
		err := run()
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "55P03" && pgErr.Code != "40P01" && pgErr.Message != tupleUpdated {
			return err
		}
		if try >= cmp.Or(m.Tries, codeTries) {
			return fmt.Errorf("others hold locks on the tables, after %d tries: %w; see pg_locks, and try again when it is quieter", try, err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(codePause + rand.N(codePause)):
		}
	}
}

func (m *Migrator) set(ctx context.Context, db DB, key, value string) error {
	_, err := db.Exec(ctx, m.Schemas.Render(`INSERT INTO dlq.settings (key, value) VALUES ($1, $2)
		ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now()`), key, value)
	return err
}

type codeFile struct{ name, sql string }

// codePart is SQL that is installed as one.
type codePart struct {
	files   []codeFile // in order
	version string     // a hash of them
	makes   []string   // names of functions and views, and triggers with their tables
}

// code is what dlqd has in a database beside its tables, rendered.
type code struct{ routines, triggers, riverTriggers codePart }

var codeCache sync.Map // of Schemas to *code: of the few that a process works in

// code returns the code of the migrator's schemas: to render it, and to find what it makes, takes some 50 ms.
func (m *Migrator) code() *code {
	if cached, ok := codeCache.Load(m.Schemas); ok {
		return cached.(*code) //nolint:forcetypeassert // only these are stored
	}
	made := makeCode(m.Schemas)
	codeCache.Store(m.Schemas, made)
	return made
}

func makeCode(schemas Schemas) *code {
	names, err := fs.Glob(db.Code, "code/*.sql")
	if err != nil {
		panic(err) // the pattern is constant
	}
	sort.Strings(names)
	files := make([]codeFile, len(names))
	for i, name := range names {
		raw, err := db.Code.ReadFile(name)
		if err != nil {
			panic(err) // embedded
		}
		files[i] = codeFile{name, string(raw)}
	}
	return &code{
		makePart(schemas, files...),
		makePart(schemas, codeFile{"triggers.sql", db.Triggers}),
		makePart(schemas, codeFile{"river_triggers.sql", db.RiverTriggers}),
	}
}

func makePart(schemas Schemas, files ...codeFile) codePart {
	hash := sha256.New()
	part := codePart{files: files}
	for i := range files {
		sql := schemas.Render(files[i].sql)
		files[i].sql = sql
		hash.Write([]byte(withoutComments(sql)))
		for _, match := range madeRoutine.FindAllStringSubmatch(sql, -1) {
			part.makes = append(part.makes, match[1])
		}
		for _, match := range madeTrigger.FindAllStringSubmatch(sql, -1) {
			part.makes = append(part.makes, match[1]+" on "+match[2])
		}
	}
	part.version = hex.EncodeToString(hash.Sum(nil))[:16]
	return part
}

// sqlLayout matches comments and blanks, and literals, which are left alone.
var sqlLayout = regexp.MustCompile(`'(?:[^']|'')*'|(?:\s+|--[^\n]*)+`)

// withoutComments returns the part of SQL code that its version depends on: without comments, COMMENT ON statements and
// layout, so that a change of words alone needs no upgrade of a database.
func withoutComments(sql string) string {
	return sqlLayout.ReplaceAllStringFunc(madeComment.ReplaceAllString(sql, ""), func(token string) string {
		if strings.HasPrefix(token, "'") {
			return token
		}
		return " "
	})
}

func (p codePart) run(ctx context.Context, tx pgx.Tx) error {
	for _, file := range p.files {
		if _, err := tx.Exec(ctx, file.sql); err != nil {
			return fmt.Errorf("%s: %w%s", file.name, err, position(err, file.sql))
		}
	}
	return nil
}

var (
	madeRoutine = regexp.MustCompile(`(?m)^CREATE OR REPLACE (?:FUNCTION|PROCEDURE|VIEW) \w+\.(\w+)`)
	madeTrigger = regexp.MustCompile(`(?m)^CREATE (?:OR REPLACE )?TRIGGER (\w+) [^;]*? ON \w+\.(\w+)`)
)

// dropCode removes dlqd's functions, and with them the triggers that call them, and its views. Triggers go by CASCADE: to
// drop one by its name takes the owner of the table, to drop its function takes the function's. Those on River's table go
// first, in a transaction of their own: it is locked for the moment that this takes, and for nothing else.
func (m *Migrator) dropCode(ctx context.Context) error {
	const ofRiver = "p.proname IN ('capture', 'follow') AND p.prorettype = 'trigger'::regtype"
	if err := m.drop(ctx, settingRiverTriggers, `
		SELECT format('DROP ROUTINE IF EXISTS %s CASCADE', p.oid::regprocedure)
		FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND `+ofRiver); err != nil {
		return err
	}
	return m.drop(ctx, settingCodeVersion+","+settingTriggers, `
		SELECT d.drop FROM (
			SELECT format('DROP VIEW IF EXISTS %s CASCADE', c.oid::regclass), 1
			FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind = 'v'
			UNION ALL
			SELECT format('DROP ROUTINE IF EXISTS %s CASCADE', p.oid::regprocedure), 2
			FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1) d (drop, step) ORDER BY d.step`)
}

// drop runs the statements that a query makes, and forgets the settings that speak of what they drop.
func (m *Migrator) drop(ctx context.Context, settings, query string) error {
	return m.inShortLocks(ctx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, query, m.Schemas.DLQ)
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
		// A dlqd that serves sees by this that it is detached.
		if known, err := hasTable(ctx, tx, m.Schemas.DLQ, "settings"); err != nil || !known {
			return err
		}
		_, err = tx.Exec(ctx, m.Schemas.Render("DELETE FROM dlq.settings WHERE key = ANY (string_to_array($1, ','))"), settings)
		return err
	})
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
	if len(names) > 0 { // in order: their numbers have leading zeros, and may leave gaps
		if s.Latest, err = goose.NumericComponent(names[len(names)-1]); err != nil {
			return s, err
		}
	}
	if has, err := m.hasTable(ctx, m.Schemas.DLQ, MigrationTable); err != nil || !has {
		return s, err
	}
	if s.Version, err = SchemaVersion(ctx, m.Schemas.Rendered(m.Pool)); err != nil {
		return s, err
	}
	if s.Version == 0 {
		return s, nil
	}
	code := m.code()
	var river string
	// What is recorded is looked for, too: somebody may have dropped it, or made River's table anew.
	err = m.Pool.QueryRow(ctx, m.Schemas.Render(`
		WITH installed AS (
			SELECT p.proname AS name FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $4
			UNION ALL
			SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $4 AND c.relkind = 'v'
			UNION ALL
			SELECT t.tgname || ' on ' || c.relname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $4
		)
		SELECT coalesce(bool_or(s.key = '`+settingCodeVersion+`' AND s.value = $1), false) AND NOT EXISTS (SELECT unnest($6::text[]) EXCEPT SELECT i.name FROM installed i),
		       coalesce(bool_or(s.key = '`+settingTriggers+`' AND s.value = $5), false) AND NOT EXISTS (SELECT unnest($7::text[]) EXCEPT SELECT i.name FROM installed i),
		       coalesce(bool_or(s.key = '`+settingRiverTriggers+`' AND s.value = $2), false)
		           AND (SELECT count(*) = 2 FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
		                JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace f ON f.oid = p.pronamespace
		                WHERE n.nspname = $3 AND c.relname = 'river_job' AND f.nspname = $4 AND t.tgname IN ('dlq_capture', 'dlq_follow')),
		       coalesce(max(s.value) FILTER (WHERE s.key = '`+settingRiver+`'), '')
		FROM dlq.settings s`), code.routines.version, code.riverTriggers.version, m.Schemas.River, m.Schemas.DLQ, code.triggers.version, code.routines.makes, code.triggers.makes).
		Scan(&s.codeCurrent, &s.triggersCurrent, &s.riverTriggersCurrent, &river)
	s.CodeInstalled = s.codeCurrent && s.triggersCurrent && s.riverTriggersCurrent
	s.Attached = river == riverAttached
	return s, err
}

// riverVersion is the version of River's schema; 0 where there is none. Who migrates River by tools of their own has no
// river_migration: what is there says the version, then.
func (m *Migrator) riverVersion(ctx context.Context) (int, error) {
	has, err := m.hasTable(ctx, m.Schemas.River, "river_migration")
	if err != nil {
		return 0, err
	}
	var version int
	if has {
		err = m.Pool.QueryRow(ctx, "SELECT coalesce(max(version), 0) FROM "+m.Schemas.River+".river_migration").Scan(&version)
	}
	if err != nil || version > 1 {
		return version, err
	}
	err = m.Pool.QueryRow(ctx, `
		SELECT CASE WHEN bool_or(c.relname = 'river_notification') THEN 8
		            WHEN bool_or(c.relname = 'river_job' AND a.attname = 'unique_states') THEN 6
		            WHEN bool_or(c.relname = 'river_job' AND a.attname = 'unique_key') THEN 5
		            WHEN bool_or(c.relname = 'river_queue') THEN 4
		            WHEN bool_or(c.relname = 'river_job') THEN 2 ELSE 0 END
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid AND NOT a.attisdropped
		WHERE n.nspname = $1 AND c.relname IN ('river_notification', 'river_job', 'river_queue')`, m.Schemas.River).Scan(&version)
	return version, err
}

func (m *Migrator) migrateRiver(ctx context.Context) error {
	river, err := rivermigrate.New(riverpgxv5.New(m.Pool), &rivermigrate.Config{Schema: m.Schemas.River, Logger: m.Logger})
	if err != nil {
		return err
	}
	if _, err := river.Migrate(ctx, rivermigrate.DirectionUp, nil); err != nil {
		return fmt.Errorf("migrate River: %w", err)
	}
	return nil
}

// migrationFile is a migration of package db.
type migrationFile struct {
	name string // without its folder
	text string
}

// up returns the part of a migration that applies it.
func (f migrationFile) up() string {
	up, _, _ := strings.Cut(f.text, "-- +goose Down")
	return up
}

// migrationFiles returns the migrations in their order.
func migrationFiles() ([]migrationFile, error) {
	names, err := fs.Glob(db.Migrations, "migrations/*.sql")
	if err != nil {
		return nil, err
	}
	files := make([]migrationFile, 0, len(names))
	for _, name := range names {
		raw, err := db.Migrations.ReadFile(name)
		if err != nil {
			return nil, err
		}
		files = append(files, migrationFile{strings.TrimPrefix(name, "migrations/"), string(raw)})
	}
	return files, nil
}

func (m *Migrator) withGoose(run func(*goose.Provider) error) error {
	migrations, err := migrationFiles()
	if err != nil {
		return err
	}
	rendered := fstest.MapFS{}
	for _, file := range migrations {
		text := inShortLocks(withoutIndexes(m.Schemas.Render(file.text)))
		rendered[file.name] = &fstest.MapFile{Data: []byte(text)}
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

// inShortLocks has a migration wait for no lock for long, either way.
func inShortLocks(migration string) string {
	const wait = "SET LOCAL lock_timeout = '" + codeLockTimeout + "';\n"
	return strings.NewReplacer("-- +goose Up\n", "-- +goose Up\n"+wait, "-- +goose Down\n", "-- +goose Down\n"+wait).Replace(migration)
}

// exclusively keeps two migrations from running at once. A transaction-level lock works behind a transaction pooler too.
func (m *Migrator) exclusively(ctx context.Context, run func() error) error {
	if err := m.Schemas.Validate(); err != nil {
		return err
	}
	return Beside(ctx, m.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '"+exclusiveTimeout+"'"); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtextextended('dlqd migrate', 0))"); err != nil {
			return fmt.Errorf("another dlqd is migrating this database: %w", err)
		}
		return run()
	})
}

func (m *Migrator) inTx(ctx context.Context, run func(pgx.Tx) error) error {
	return BeginFunc(ctx, m.Pool, run)
}

func (m *Migrator) createSchema(ctx context.Context, name string) error {
	if has, err := m.hasSchema(ctx, name); err != nil || has {
		return err // CREATE SCHEMA IF NOT EXISTS wants the right to create even where it does nothing
	}
	if _, err := m.Pool.Exec(ctx, "CREATE SCHEMA IF NOT EXISTS "+name); err != nil {
		return fmt.Errorf("create schema %s: %w", name, err)
	}
	return nil
}

func (m *Migrator) hasSchema(ctx context.Context, name string) (bool, error) {
	var has bool
	err := m.Pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", name).Scan(&has)
	return has, err
}

func (m *Migrator) hasTable(ctx context.Context, schema, table string) (bool, error) {
	return hasTable(ctx, m.Pool, schema, table)
}

func hasTable(ctx context.Context, db DB, schema, table string) (bool, error) {
	var has bool
	// By the catalog: to_regclass of a name in a schema that one may not use is an error.
	err := db.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2)", schema, table).Scan(&has)
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

// PartitionInterval is how often a program that serves makes partitions ahead: two months are, so many rounds may fail before
// rows go to a default partition.
const PartitionInterval = time.Hour

// EnsurePartitions makes the partitions of this month and the coming ones.
func EnsurePartitions(ctx context.Context, pool *pgxpool.Pool, schemas Schemas) error {
	_, err := pool.Exec(ctx, schemas.Render("CALL dlq.ensure_partitions()"))
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

// SchemaVersion is the version of dlqd's schema, which must be there: the number of its last migration.
func SchemaVersion(ctx context.Context, db DB) (version int64, err error) {
	err = db.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM dlq."+MigrationTable+" WHERE is_applied").Scan(&version)
	return version, err
}
