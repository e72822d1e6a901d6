package postgres_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/db"
	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// codeSetting returns the version of the functions that dlq.settings records.
func codeSetting(t *testing.T, pool *pgxpool.Pool) (value string) {
	t.Helper()
	const sql = "SELECT value FROM dlq.settings WHERE key = 'code_version'"
	require.NoError(t, pool.QueryRow(t.Context(), sql).Scan(&value))
	return value
}

func TestMigrator_WorksOnANewerSchema(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	m := newMigrator(pool)
	status, err := m.Status(t.Context())
	require.NoError(t, err)
	require.LessOrEqual(t, status.Oldest, status.Latest, "a program works on its own schema")
	latest := status.Latest
	postgrestest.Newer(t, pool, latest)

	fit, err := m.Fit(t.Context())
	require.NoError(t, err)
	require.Contains(t, fit, "of dlqd 0.9.0, on which this dlqd")
	before := catalog(t, pool)
	require.NoError(t, m.Up(t.Context()), "an older program leaves the schema as it is")
	require.NoError(t, m.Attach(t.Context()))
	require.Equal(t, before, catalog(t, pool))
	require.Equal(t, "newer", codeSetting(t, pool))
	for _, f := range doctor.Examine(t.Context(), m) {
		if f.Name == "schema" || f.Name == "tables and functions" {
			require.True(t, f.OK, "%s: %s", f.Name, f.Detail)
		}
	}
	require.ErrorContains(t, m.Down(t.Context()), `run "dlqd migrate down" of dlqd 0.9.0`)
	require.ErrorContains(t, m.DownTo(t.Context(), latest-1), `run "dlqd migrate down" of dlqd 0.9.0`)

	// A detach has removed the functions of a newer dlqd.
	execute(t, pool, "DELETE FROM dlq.settings WHERE key = 'code_version'")
	require.ErrorContains(t, m.Check(t.Context()), "its functions are missing")
}

func TestMigrator_RefusesASchemaThatIsTooNew(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	m := newMigrator(pool)
	latest, err := postgres.LatestVersion()
	require.NoError(t, err)
	postgrestest.Newer(t, pool, latest+1)
	for name, err := range map[string]error{
		"check": m.Check(t.Context()), "up": m.Up(t.Context()), "attach": m.Attach(t.Context()),
	} {
		require.ErrorContains(t, err, "dlqd 0.9.0 brought schema dlq to version", name)
		require.ErrorContains(t, err, "run the newer one", name)
	}
	require.ErrorIs(t, m.Check(t.Context()), postgres.ErrSchemaNew)
	require.Equal(t, "newer", codeSetting(t, pool))

	// Before it migrates, a newer dlqd records which programs work on its schema.
	execute(t, pool, "DELETE FROM dlq.schema_migrations WHERE version_id = $1", latest+1)
	require.ErrorIs(t, m.Check(t.Context()), postgres.ErrSchemaNew)
}

// An upgrade is refused while a program is running that does not work on the new schema.
func TestMigrator_WaitsForOlderPrograms(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Open(t, postgrestest.Empty(t))
	m := newMigrator(pool)
	m.OwnRiver = true
	require.NoError(t, m.Up(t.Context()))
	require.NoError(t, m.DownTo(t.Context(), postgres.OldestProgram-1))
	execute(t, pool, `INSERT INTO dlq.processes (id, name, version, parts, queues)
		VALUES ('00000000-0000-4000-8000-000000000001', 'host/7', '0.1.0', '{api}', '{}')`)
	beats, stop := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(beats)
		for {
			select {
			case <-stop:
				return
			case <-time.After(50 * time.Millisecond):
				_, _ = pool.Exec(t.Context(), "UPDATE dlq.processes SET seen_at = clock_timestamp()")
			}
		}
	}()
	err := m.Up(t.Context())
	require.ErrorContains(t, err, "stop host/7 (dlqd 0.1.0), and run this again")
	status, err := m.Status(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, postgres.OldestProgram-1, status.Version, "nothing was changed")
	close(stop)
	<-beats
	require.NoError(t, m.Up(t.Context()), "a process that has ended is still registered")
	require.NoError(t, m.Check(t.Context()))
}

// statementPattern matches the statements in the files that sqlc generates.
var statementPattern = regexp.MustCompile("(?s)= `(-- name: (\\w+) :\\w+\n.*?)`\n")

// TestUpgrade_KeepsStatements prepares statements on the schema of this program: those of this program, and those of
// each release that can run at the same time. It fails if a name, a type or a parameter is missing.
func TestUpgrade_KeepsStatements(t *testing.T) {
	t.Parallel()
	programs := map[string]string{}
	files, err := filepath.Glob("../*/internal/dbsqlc/*.sql.go")
	require.NoError(t, err)
	var own strings.Builder
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		own.Write(text)
	}
	programs["this program"] = own.String()
	frozen, err := filepath.Glob("testdata/frozen/*.statements.gz")
	require.NoError(t, err)
	for _, file := range frozen {
		if version := strings.TrimSuffix(filepath.Base(file), ".statements.gz"); version >= postgres.OldestProgramText() {
			programs[version] = gunzip(t, file)
		}
	}
	pool := postgrestest.Pool(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	for version, text := range programs {
		statements := statementPattern.FindAllStringSubmatch(text, -1)
		require.Greater(t, len(statements), 100, version)
		for _, s := range statements {
			_, err := conn.Conn().PgConn().Prepare(t.Context(), "", postgres.DefaultSchemas().Render(s[1]), nil)
			require.NoError(t, err, "%s: %s", version, s[2])
		}
	}
}

// A program compares schema versions to find out whether functions are newer than its own. "make freeze" stores the
// functions of a release. Functions that have changed since then need a migration with a new number.
func TestFreeze_FunctionsHaveANumber(t *testing.T) {
	t.Parallel()
	latest, err := postgres.LatestVersion()
	require.NoError(t, err)
	file := fmt.Sprintf("testdata/frozen/%05d.sql.gz", latest)
	if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
		t.Skip("the last migration is not frozen")
	}
	names, err := fs.Glob(db.Code, "code/*.sql")
	require.NoError(t, err)
	var now strings.Builder
	for _, name := range names {
		text, err := db.Code.ReadFile(name)
		require.NoError(t, err)
		now.Write(text)
	}
	now.WriteString(db.Triggers + db.RiverTriggers)
	require.Equal(t, postgres.WithoutComments(gunzip(t, file)), postgres.WithoutComments(now.String()),
		"functions or triggers differ from those that were frozen with migration %05d: add a migration with the next number, "+
			"if need be one that changes nothing", latest)
}
