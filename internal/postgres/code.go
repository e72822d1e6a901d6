package postgres

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

var (
	viewPattern = regexp.MustCompile(`(?m)^CREATE OR REPLACE VIEW (\S+)`)
	// dropPattern matches the DROP statement in an error's hint. Postgres translates the text around the statement, but
	// not the statement.
	dropPattern = regexp.MustCompile(`DROP (?:FUNCTION|PROCEDURE|ROUTINE) [^;]*\)`)
)

// installCode creates or replaces functions and views. If parameters, results or columns have changed, CREATE OR
// REPLACE fails; installCode then drops the older function or view and tries again. It also drops older functions that
// have the name of a new one.
func (m *Migrator) installCode(ctx context.Context, tx pgx.Tx, files []codeFile) error {
	for _, file := range files {
		before, err := m.routines(ctx, tx)
		if err != nil {
			return err
		}
		sql, comments := splitComments(file.sql) // COMMENT ON FUNCTION requires a unique name
		for range maxDrops {
			err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, sql)
				return err
			})
			drop := dropBefore(err, sql)
			if drop == "" {
				break
			}
			if _, err := tx.Exec(ctx, drop); err != nil {
				return fmt.Errorf("%s: %s, which has changed: %w", file.name, drop, err)
			}
		}
		if err != nil {
			return fmt.Errorf("%s: %w%s", file.name, err, position(err, sql))
		}
		if err := m.dropOlder(ctx, tx, before); err != nil {
			return fmt.Errorf("%s: %w", file.name, err)
		}
		if _, err := tx.Exec(ctx, strings.Join(comments, "\n")); err != nil {
			return fmt.Errorf("%s: %w", file.name, err)
		}
	}
	return nil
}

// lines returns the positions in sql of lines with a prefix. A regular expression would take a hundred times as long:
// 0.5 s at the start of each program and test binary with the race detector.
func lines(sql, prefix string) (at []int) {
	if strings.HasPrefix(sql, prefix) {
		at = append(at, 0)
	}
	for i := 0; ; {
		next := strings.Index(sql[i:], "\n"+prefix)
		if next < 0 {
			return at
		}
		i += next + 1
		at = append(at, i)
	}
}

// splitComments separates the COMMENT ON statements from the other SQL statements.
func splitComments(sql string) (others string, comments []string) {
	var out strings.Builder
	end := 0
	for _, at := range lines(sql, "COMMENT ON ") {
		if length := commentLength(sql[at:]); at >= end && length > 0 {
			out.WriteString(sql[end:at])
			end = at + length
			comments = append(comments, sql[at:end])
		}
	}
	out.WriteString(sql[end:])
	return out.String(), comments
}

// commentLength returns the length in bytes of the COMMENT ON statement at the beginning of sql, or 0 if the statement
// has no text.
func commentLength(sql string) int {
	at := strings.IndexAny(sql, "';")
	for at >= 0 && at < len(sql) && sql[at] == '\'' { // a doubled quote begins another string
		closing := strings.IndexByte(sql[at+1:], '\'')
		if closing < 0 {
			return 0
		}
		at += closing + 2
		at = len(sql) - len(strings.TrimLeft(sql[at:], " \t\n\r\f"))
		if at < len(sql) && sql[at] == ';' {
			return at + 1
		}
	}
	return 0
}

// dropOlder drops each function that existed before and has the same name as a function that was just created, but a
// different signature.
func (m *Migrator) dropOlder(ctx context.Context, tx pgx.Tx, before map[uint32]routine) error {
	after, err := m.routines(ctx, tx)
	if err != nil {
		return err
	}
	created := map[string]bool{}
	for oid, r := range after {
		created[r.name] = created[r.name] || before[oid] != r
	}
	for oid, r := range after {
		if created[r.name] && before[oid] == r {
			if _, err := tx.Exec(ctx, "DROP ROUTINE "+r.signature); err != nil {
				return fmt.Errorf("drop %s of an earlier version: %w", r.signature, err)
			}
		}
	}
	return nil
}

// maxDrops bounds the drops of older functions and views that one file may require.
const maxDrops = 100

// dropBefore returns the statement that must run before installCode tries failed code again, or "" if no drop helps.
func dropBefore(err error, code string) string {
	var pgErr *pgconn.PgError
	if !errors.As(err, &pgErr) {
		return ""
	}
	switch pgErr.Code {
	case "42P13": // the result of a function, or the name of a parameter, has changed
		return dropPattern.FindString(pgErr.Hint)
	case "42P16": // the columns of a view have changed
		var views []string
		for _, match := range viewPattern.FindAllStringSubmatch(code, -1) {
			views = append(views, match[1])
		}
		if len(views) > 0 {
			return "DROP VIEW IF EXISTS " + strings.Join(views, ", ")
		}
	}
	return ""
}

// routine is a function or procedure of dlqd's schema. Its version changes whenever the routine is replaced.
type routine struct{ name, signature, version string }

func (m *Migrator) routines(ctx context.Context, tx pgx.Tx) (map[uint32]routine, error) {
	rows, err := tx.Query(ctx, `SELECT p.oid, p.proname::text, p.oid::regprocedure::text, p.xmin::text || p.ctid::text
		FROM pg_proc p WHERE p.pronamespace = to_regnamespace($1)`, pgx.Identifier{m.Schemas.DLQ}.Sanitize())
	if err != nil {
		return nil, err
	}
	found := map[uint32]routine{}
	var oid uint32
	var r routine
	_, err = pgx.ForEachRow(rows, []any{&oid, &r.name, &r.signature, &r.version}, func() error {
		found[oid] = r
		return nil
	})
	return found, err
}
