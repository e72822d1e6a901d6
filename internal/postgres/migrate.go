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
	"strconv"
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
	// settingTriggers and settingRiverTriggers hold hashes of the installed triggers on dlqd's and
	// on River's tables.
	settingTriggers      = "triggers"
	settingRiverTriggers = "river_triggers"
	// settingRiverSchema holds the name of the schema of the River that this dlqd uses.
	settingRiverSchema = "river_schema"
	// settingRoles lists the roles that dlqd created.
	settingRoles = "roles_made"
	// settingRiver says who owns River: dlqd (riverOwn) or an application (riverAttached).
	settingRiver  = "river"
	riverOwn      = "own"
	riverAttached = "attached"

	// MigrationTable is goose's table, in dlqd's schema.
	MigrationTable = "schema_migrations"

	// codeLockTimeout bounds how long a change of tables, triggers or functions waits for a lock before it is retried.
	// Statements on an application's jobs queue behind that wait, so it must not exceed the time limit of capture. It is
	// shorter than Postgres' deadlock_timeout (1 s), so that Postgres never cancels the application's statement to
	// resolve a deadlock.
	codeLockTimeout = "200ms"
	codeTries       = 25
	codePause       = 500 * time.Millisecond // between tries, up to twice as long

	// exclusiveTimeout bounds the wait for another dlqd that is migrating the database.
	exclusiveTimeout = "2min"

	// oldestRiver is the first version of River's schema with all columns that redeliveries write.
	oldestRiver = 6
)

// ErrSchemaOld is returned by [Migrator.Check] if the database's schema is older than the one that this program
// installs, or is incomplete.
var ErrSchemaOld = errors.New("database schema is not up to date")

// Migrator installs River's and dlqd's schemas in a database, and removes dlqd's.
type Migrator struct {
	Pool    *pgxpool.Pool
	Schemas Schemas
	Logger  *slog.Logger
	// OwnRiver lets Up treat an existing River as dlqd's River. If it is false, Up fails on a River whose owner is not
	// recorded, because an application may own it.
	OwnRiver bool
	// Tries bounds the attempts of a change that other sessions' locks block. 0 means 25, about half a minute.
	Tries int
	// Concurrently builds all indexes without blocking writes. If it is false, only indexes on tables above 32 MB are
	// built that way.
	Concurrently bool
}

// MigrationStatus is the state of a database's schemas.
type MigrationStatus struct {
	RiverVersion, RiverLatest int
	Version, Latest           int64
	CodeInstalled             bool // functions, views and triggers are those of this program or of a newer one
	// Oldest is the schema version of the oldest program that works on the schema. Program is the version of the dlqd
	// that installed the schema. They are 0 and "" if they were not recorded.
	Oldest   int64
	Program  string
	Attached bool // River belongs to another application

	codeCurrent, triggersCurrent, riverTriggersCurrent bool // the parts of CodeInstalled
}

// Current reports whether the database is up to date.
func (s MigrationStatus) Current() bool {
	return s.RiverVersion >= s.RiverLatest && s.Version == s.Latest && s.CodeInstalled
}

// Up applies dlqd's migrations and installs dlqd's functions, views and triggers. Before that, it applies River's
// migrations, unless an application owns River. Up returns an error, and changes nothing, if a newer dlqd installed the
// schema, or if there is a River that dlqd did not create and OwnRiver is not set.
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
		if status.Newer() {
			return status.refusal(m.Schemas.DLQ)
		}
		if status.Attached {
			return m.install(ctx, riverAttached)
		}
		// dlqd's client can become the leader of a River that dlqd owns. River's leader discards stuck jobs of kinds that
		// the client does not know, such as an application's.
		if status.RiverVersion > 0 && status.Version == 0 && !m.OwnRiver {
			return fmt.Errorf("schema %q of this database already has a River: if an application uses it, run \"dlqd "+
				"attach\"; if it belongs to dlqd, run \"dlqd migrate up --own-river\"", m.Schemas.River)
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

// Down reverts dlqd's last migration. Before that, it drops functions, views and triggers, because they depend on the
// newer tables. Down keeps River's tables and jobs: an application may use them.
func (m *Migrator) Down(ctx context.Context) error {
	return m.revert(ctx, func(p *goose.Provider) error {
		_, err := p.Down(ctx)
		return err
	})
}

// DownTo reverts all migrations after a version, as [Migrator.Down] reverts one.
func (m *Migrator) DownTo(ctx context.Context, to int64) error {
	return m.revert(ctx, func(p *goose.Provider) error {
		_, err := p.DownTo(ctx, to)
		return err
	})
}

func (m *Migrator) revert(ctx context.Context, down func(*goose.Provider) error) error {
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
		if status.Newer() {
			return fmt.Errorf("schema %s is at version %d, and this dlqd has the migrations up to %d: run \"dlqd migrate down\" "+
				"of dlqd %s; nothing was changed", m.Schemas.DLQ, status.Version, status.Latest,
				cmp.Or(status.Program, "that installed it"))
		}
		if err := m.dropCode(ctx); err != nil {
			return err
		}
		// The setting records that the next installation is not the first on this River. The reconciler then files the jobs
		// that fail between Down and that installation.
		if err := m.set(ctx, m.Pool, settingRiverTriggers, "reverted"); err != nil {
			return err
		}
		return m.retryLocked(ctx, func() error { return m.withGoose(down) })
	})
}

// Installed reports whether dlqd's functions, of any version, are in the database. It returns false after a detach,
// which drops the functions.
func (m *Migrator) Installed(ctx context.Context) (bool, error) {
	known, err := m.hasTable(ctx, m.Schemas.DLQ, "settings")
	if err != nil || !known {
		return false, err
	}
	if code, err := m.setting(ctx, settingCodeVersion); err != nil || code == "" {
		return false, err
	}
	return m.Capturing(ctx) // the settings may be out of date
}

// Capturing reports whether the function of the capture trigger exists. Detach drops that function first. Capturing
// reads only the catalog, so it needs no right on dlqd's schema.
func (m *Migrator) Capturing(ctx context.Context) (there bool, err error) {
	err = m.Pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = $1 AND p.proname = 'capture')`, m.Schemas.DLQ).Scan(&there)
	return there, err
}

// Where describes the database: its name, the server's address and version, and this session's
// role.
func (m *Migrator) Where(ctx context.Context) (string, error) {
	var text string
	err := m.Pool.QueryRow(ctx,
		`SELECT format('%s at %s, as %s; Postgres %s', current_database(), coalesce(host(inet_server_addr()), 'a local socket'), current_user, current_setting('server_version'))`).Scan(&text)
	return text, err
}

// Status returns the state of the database's schemas.
func (m *Migrator) Status(ctx context.Context) (MigrationStatus, error) { return m.status(ctx) }

// Check returns an error unless this program works on the schema: [ErrSchemaOld], with the command to run, or
// [ErrSchemaNew].
func (m *Migrator) Check(ctx context.Context) error {
	_, err := m.Fit(ctx)
	return err
}

// Fit is [Migrator.Check], and also returns a description of the schema.
func (m *Migrator) Fit(ctx context.Context) (string, error) {
	status, err := m.status(ctx)
	if err != nil {
		return "", err
	}
	return status.Fit(), m.check(ctx, status)
}

func (m *Migrator) check(ctx context.Context, status MigrationStatus) error {
	if err := status.refusal(m.Schemas.DLQ); err != nil {
		return err
	}
	command := "dlqd migrate up"
	// If River is installed without dlqd, an application owns River.
	if status.Attached || status.Version == 0 && status.RiverVersion > 0 {
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

// install brings dlqd's schema up to date. Its first call on a database records who owns River. Later calls do not
// change that record.
func (m *Migrator) install(ctx context.Context, river string) error {
	status, err := m.status(ctx)
	if err != nil {
		return err
	}
	if err := m.awaitOlder(ctx, &status); err != nil {
		return err
	}
	if err := m.createSchema(ctx, m.Schemas.DLQ); err != nil {
		return err
	}
	if err := m.recordOldest(ctx); err != nil {
		return err
	}
	if err := m.retryLocked(ctx, func() error {
		return m.withGoose(func(p *goose.Provider) error {
			_, err := p.Up(ctx)
			return err
		})
	}); err != nil {
		return err
	}
	if err := m.recordOldest(ctx); err != nil {
		return err
	}
	if err := m.buildIndexes(ctx); err != nil {
		return err
	}
	for key, value := range map[string]string{settingRiver: river, settingRiverSchema: m.Schemas.River} {
		if _, err := m.Pool.Exec(ctx, m.Schemas.Render(`INSERT INTO dlq.settings (key, value) VALUES ($1, $2)
			ON CONFLICT (key) DO NOTHING`), key, value); err != nil {
			return err
		}
	}
	if status, err = m.status(ctx); err != nil {
		return err
	}
	code := m.code()
	// Functions come first, so that no trigger calls a missing function.
	if !status.codeCurrent {
		if err := m.withShortLocks(ctx, func(tx pgx.Tx) error {
			if err := m.installCode(ctx, tx, code.routines.files); err != nil {
				return err
			}
			return m.set(ctx, tx, settingCodeVersion, code.routines.version)
		}); err != nil {
			return fmt.Errorf("install functions: %w", err)
		}
	}
	if !status.triggersCurrent {
		if err := m.installTriggers(ctx, code.triggers); err != nil {
			return fmt.Errorf("install triggers: %w", err)
		}
	}
	if !status.riverTriggersCurrent {
		if err := m.installRiverTriggers(ctx, river); err != nil {
			return fmt.Errorf("install triggers on %s.river_job: %w", m.Schemas.River, err)
		}
	}
	if err := m.recordFiled(ctx); err != nil {
		return fmt.Errorf("record the failures in existing dead letters: %w", err)
	}
	// An administrator may have created the roles since the last call.
	if _, err := m.Pool.Exec(ctx, m.Schemas.Render("SELECT dlq.install_roles()")); err != nil {
		return fmt.Errorf("install roles: %w", err)
	}
	if err := EnsurePartitions(ctx, m.Pool, m.Schemas); err != nil {
		return err
	}
	_, err = m.Pool.Exec(ctx, m.Schemas.Render("SELECT dlq.refresh_rollups()"))
	return err
}

// recordFiled records the failures of entries that were filed before schema version 9. It runs without a statement
// timeout. Later runs of the reconciler, which have a timeout, record the failures that are missing by then.
func (m *Migrator) recordFiled(ctx context.Context) error {
	return m.inTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, m.Schemas.Render("SET LOCAL statement_timeout = 0; SELECT dlq.remember_taken()"))
		return err
	})
}

// installTriggers runs each paragraph of triggers.sql in its own transaction: a single transaction would need the locks
// of all tables at once. If a paragraph fails, the triggers do not count as current, and the next call runs all
// paragraphs again.
func (m *Migrator) installTriggers(ctx context.Context, triggers codePart) error {
	for _, file := range triggers.files {
		for paragraph := range strings.SplitSeq(file.sql, "\n\n") {
			part := codePart{files: []codeFile{{file.name, paragraph}}}
			if err := m.withShortLocks(ctx, func(tx pgx.Tx) error { return part.run(ctx, tx) }); err != nil {
				return err
			}
		}
	}
	return m.set(ctx, m.Pool, settingTriggers, triggers.version)
}

// installRiverTriggers creates the triggers on River's table, which start capture. If an application's River never had
// them before, the reconciler does not file failures from before this time; only a backfill does.
func (m *Migrator) installRiverTriggers(ctx context.Context, river string) error {
	triggers := m.code().riverTriggers
	before, err := m.setting(ctx, settingRiverTriggers)
	if err != nil {
		return err
	}
	return m.withShortLocks(ctx, func(tx pgx.Tx) error {
		if before == "" && river == riverAttached {
			if _, err := tx.Exec(ctx, m.Schemas.Render(`INSERT INTO dlq.reconcile_looks (look, since) VALUES ('whole', now())
				ON CONFLICT (look) DO UPDATE SET since = now()`)); err != nil {
				return err
			}
		}
		if err := triggers.run(ctx, tx); err != nil {
			return err
		}
		return m.set(ctx, tx, settingRiverTriggers, triggers.version)
	})
}

// withShortLocks runs a change of the schema in a transaction with a short lock timeout. While other sessions hold the
// locks, it retries the transaction, at most m.Tries times.
func (m *Migrator) withShortLocks(ctx context.Context, run func(tx pgx.Tx) error) error {
	return m.retryLocked(ctx, func() error {
		return m.inTx(ctx, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "SET LOCAL lock_timeout = '"+codeLockTimeout+"'"); err != nil {
				return err
			}
			return run(tx)
		})
	})
}

// tupleUpdated is the message of the error (XX000) that Postgres reports for a GRANT or a change of a function if
// another transaction changed the same object first.
const tupleUpdated = "tuple concurrently updated"

// retryLocked runs a change, and runs it again after a lock timeout, a deadlock or a concurrent change of the same
// object. It makes at most m.Tries attempts, by default codeTries.
func (m *Migrator) retryLocked(ctx context.Context, run func() error) error {
	for try := 1; ; try++ {
		err := run()
		var pgErr *pgconn.PgError
		if !errors.As(err, &pgErr) || pgErr.Code != "55P03" && pgErr.Code != "40P01" && pgErr.Message != tupleUpdated {
			return err
		}
		if try >= cmp.Or(m.Tries, codeTries) {
			return fmt.Errorf("other sessions still hold locks on the tables after %d tries: %w; see pg_locks, and try "+
				"again later", try, err)
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

// codePart is a set of SQL files that are installed together.
type codePart struct {
	files   []codeFile // in order
	version string     // hash of the files
	creates []string   // names of functions and views, and of triggers with their tables
}

// code is the rendered SQL that dlqd installs besides its tables.
type code struct{ routines, triggers, riverTriggers codePart }

var codeCache sync.Map // Schemas to *code; a process uses few schemas

// code returns the code for the migrator's schemas. It is cached, because rendering and parsing
// take some 50 ms.
func (m *Migrator) code() *code {
	if cached, ok := codeCache.Load(m.Schemas); ok {
		return cached.(*code) //nolint:forcetypeassert // only these are stored
	}
	made := newCode(m.Schemas)
	codeCache.Store(m.Schemas, made)
	return made
}

func newCode(schemas Schemas) *code {
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
		newCodePart(schemas, files...),
		newCodePart(schemas, codeFile{"triggers.sql", db.Triggers}),
		newCodePart(schemas, codeFile{"river_triggers.sql", db.RiverTriggers}),
	}
}

func newCodePart(schemas Schemas, files ...codeFile) codePart {
	hash := sha256.New()
	part := codePart{files: files}
	for i := range files {
		sql := schemas.Render(files[i].sql)
		files[i].sql = sql
		hash.Write([]byte(withoutComments(sql)))
		for _, at := range lines(sql, "CREATE ") {
			statement, _, _ := strings.Cut(sql[at:], ";")
			if match := routinePattern.FindStringSubmatch(statement); match != nil {
				part.creates = append(part.creates, match[1])
			} else if match := triggerPattern.FindStringSubmatch(statement); match != nil {
				part.creates = append(part.creates, match[1]+" on "+match[2])
			}
		}
	}
	part.version = hex.EncodeToString(hash.Sum(nil))[:16]
	return part
}

// withoutComments returns SQL without comments, COMMENT ON statements and layout. The version of SQL code is a hash of
// its result, so a changed comment does not require an upgrade of a database. withoutComments does not use a regular
// expression, which would take 1 s with the race detector.
func withoutComments(sql string) string {
	sql, _ = splitComments(sql)
	var out strings.Builder
	out.Grow(len(sql))
	for len(sql) > 0 {
		end, layout := 1, false
		switch {
		case sql[0] == '\'':
			if closing := strings.IndexByte(sql[1:], '\''); closing >= 0 {
				end = closing + 2 // a doubled quote begins the next part
			}
		case strings.IndexByte(" \t\n\r\f", sql[0]) >= 0:
			end, layout = len(sql)-len(strings.TrimLeft(sql, " \t\n\r\f")), true
		case strings.HasPrefix(sql, "--"):
			if end = strings.IndexByte(sql, '\n'); end < 0 {
				end = len(sql)
			}
			layout = true
		default:
			if end = strings.IndexAny(sql[1:], "' \t\n\r\f-") + 1; end == 0 {
				end = len(sql)
			}
		}
		if !layout {
			out.WriteString(sql[:end])
		} else if !strings.HasSuffix(out.String(), " ") {
			out.WriteByte(' ')
		}
		sql = sql[end:]
	}
	return out.String()
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
	routinePattern = regexp.MustCompile(`^CREATE OR REPLACE (?:FUNCTION|PROCEDURE|VIEW) \w+\.(\w+)`)
	triggerPattern = regexp.MustCompile(`^CREATE (?:OR REPLACE )?TRIGGER (\w+) [^;]*? ON \w+\.(\w+)`)
)

// dropCode drops dlqd's functions, triggers and views. It drops functions with CASCADE to remove their triggers: DROP
// TRIGGER requires owning the table, and DROP FUNCTION only requires owning the function. It drops the triggers on
// River's table first, in a separate transaction that locks the table only briefly.
func (m *Migrator) dropCode(ctx context.Context) error {
	const ofRiver = "p.proname IN ('capture', 'follow') AND p.prorettype = 'trigger'::regtype"
	if err := m.drop(ctx, settingRiverTriggers, `
		SELECT format('DROP ROUTINE IF EXISTS %s CASCADE', p.oid::regprocedure)
		FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND `+ofRiver); err != nil {
		return err
	}
	return m.drop(ctx, settingCodeVersion+","+settingTriggers+","+settingOldestProgram+","+settingProgram, `
		SELECT d.drop FROM (
			SELECT format('DROP VIEW IF EXISTS %s CASCADE', c.oid::regclass), 1
			FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind = 'v'
			UNION ALL
			SELECT format('DROP ROUTINE IF EXISTS %s CASCADE', p.oid::regprocedure), 2
			FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1) d (drop, step) ORDER BY d.step`)
}

// drop runs the statements that a query returns, and deletes the settings that describe the dropped objects.
func (m *Migrator) drop(ctx context.Context, settings, query string) error {
	return m.withShortLocks(ctx, func(tx pgx.Tx) error {
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
		// A serving dlqd reads these settings to find out whether it is attached.
		if known, err := hasTable(ctx, tx, m.Schemas.DLQ, "settings"); err != nil || !known {
			return err
		}
		_, err = tx.Exec(ctx, m.Schemas.Render("DELETE FROM dlq.settings WHERE key = ANY (string_to_array($1, ','))"),
			settings)
		return err
	})
}

// LatestVersion returns the version of the schema that this program installs.
func LatestVersion() (int64, error) {
	names, err := fs.Glob(db.Migrations, "migrations/*.sql")
	if err != nil {
		return 0, err
	}
	// File names are in the order of the versions, because the numbers have leading zeros. Numbers may be missing.
	return goose.NumericComponent(names[len(names)-1])
}

func (m *Migrator) status(ctx context.Context) (MigrationStatus, error) {
	var s MigrationStatus
	var err error
	if s.RiverVersion, err = m.riverVersion(ctx); err != nil {
		return s, err
	}
	migrations, err := rivermigrate.New(riverpgxv5.New(m.Pool),
		&rivermigrate.Config{Schema: m.Schemas.River, Logger: m.Logger})
	if err != nil {
		return s, err
	}
	for _, v := range migrations.AllVersions() {
		s.RiverLatest = max(s.RiverLatest, v.Version)
	}
	if s.Latest, err = LatestVersion(); err != nil {
		return s, err
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
	var river, oldest string
	// Check the catalog as well as the settings: functions may have been dropped, or River's table recreated. This
	// program does not know the code of a newer dlqd, so on a newer schema any version counts as current.
	err = m.Pool.QueryRow(ctx, m.Schemas.Render(`
		WITH installed AS (
			SELECT p.proname AS name FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $4
			UNION ALL
			SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $4
				AND c.relkind = 'v'
			UNION ALL
			SELECT t.tgname || ' on ' || c.relname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
			JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $4
		)
		SELECT coalesce(bool_or(s.key = '`+settingCodeVersion+
		`' AND (s.value = $1 OR $8)), false) AND ($8 OR NOT EXISTS (SELECT unnest($6::text[]) EXCEPT SELECT i.name FROM installed i)),
		       coalesce(bool_or(s.key = '`+settingTriggers+
		`' AND (s.value = $5 OR $8)), false) AND ($8 OR NOT EXISTS (SELECT unnest($7::text[])
		           EXCEPT SELECT i.name FROM installed i)),
		       coalesce(bool_or(s.key = '`+settingRiverTriggers+`' AND (s.value = $2 OR $8)), false)
		           AND (SELECT count(*) = 2 FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
		           	JOIN pg_namespace n ON n.oid = c.relnamespace
		                JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace f ON f.oid = p.pronamespace
		                WHERE n.nspname = $3 AND c.relname = 'river_job' AND f.nspname = $4
		                	AND t.tgname IN ('dlq_capture', 'dlq_follow')),
		       coalesce(max(s.value) FILTER (WHERE s.key = '`+settingRiver+`'), ''),
		       coalesce(max(s.value) FILTER (WHERE s.key = '`+settingOldestProgram+`'), '0'),
		       coalesce(max(s.value) FILTER (WHERE s.key = '`+settingProgram+`'), '')
		FROM dlq.settings s`), code.routines.version, code.riverTriggers.version, m.Schemas.River, m.Schemas.DLQ,
		code.triggers.version, code.routines.creates, code.triggers.creates, s.Newer()).
		Scan(&s.codeCurrent, &s.triggersCurrent, &s.riverTriggersCurrent, &river, &oldest, &s.Program)
	if err != nil {
		return s, err
	}
	if s.Oldest, err = strconv.ParseInt(oldest, 10, 64); err != nil {
		return s, fmt.Errorf("setting %s: %w", settingOldestProgram, err)
	}
	s.CodeInstalled = s.codeCurrent && s.triggersCurrent && s.riverTriggersCurrent
	s.Attached = river == riverAttached
	return s, nil
}

// riverVersion returns the version of River's schema, or 0 if River is not installed. If river_migration is missing
// because other tools migrate River, riverVersion derives the version from the tables and columns that exist.
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
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
			AND NOT a.attisdropped
		WHERE n.nspname = $1 AND c.relname IN ('river_notification', 'river_job',
			'river_queue')`, m.Schemas.River).Scan(&version)
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
		text := addLockTimeout(withoutIndexes(m.Schemas.Render(file.text)))
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

// addLockTimeout gives a migration a short lock timeout, up and down.
func addLockTimeout(migration string) string {
	const wait = "SET LOCAL lock_timeout = '" + codeLockTimeout + "';\n"
	return strings.NewReplacer("-- +goose Up\n", "-- +goose Up\n"+wait, "-- +goose Down\n",
		"-- +goose Down\n"+wait).Replace(migration)
}

// exclusively runs a migration while it holds an advisory lock, so that two migrations never run at once. The lock
// belongs to a transaction, so it also works behind a transaction pooler.
func (m *Migrator) exclusively(ctx context.Context, run func() error) error {
	if err := m.Schemas.Validate(); err != nil {
		return err
	}
	return OutsidePool(ctx, m.Pool, func(tx pgx.Tx) error {
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
		return err // CREATE SCHEMA IF NOT EXISTS fails without the right to create, even if the schema exists
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
	// to_regclass fails for a name in a schema that this role may not use, so read the catalog.
	err := db.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2)`, schema, table).Scan(&has)
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

// PartitionInterval is how often a serving process creates partitions. Partitions exist two months ahead, so rows go to
// a default partition only if creation has failed for that long.
const PartitionInterval = time.Hour

// EnsurePartitions creates the partitions of this month and the next two.
func EnsurePartitions(ctx context.Context, pool *pgxpool.Pool, schemas Schemas) error {
	_, err := pool.Exec(ctx, schemas.Render("CALL dlq.ensure_partitions()"))
	return err
}

// position returns the line of sql at which Postgres found an error, as " (line n)". It returns "" if the error has no
// position.
func position(err error, sql string) string {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) || pgErr.Position <= 0 || int(pgErr.Position) > len(sql) {
		return ""
	}
	return fmt.Sprintf(" (line %d)", 1+strings.Count(sql[:pgErr.Position], "\n"))
}

// SchemaVersion returns the version of dlqd's schema, which is the number of the last migration applied. The schema
// must exist.
func SchemaVersion(ctx context.Context, db DB) (version int64, err error) {
	err = db.QueryRow(ctx, "SELECT coalesce(max(version_id), 0) FROM dlq."+MigrationTable+" WHERE is_applied").Scan(
		&version)
	return version, err
}
