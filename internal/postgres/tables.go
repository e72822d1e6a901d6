package postgres

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/pressly/goose/v3"
)

// maxNamedColumns bounds how many missing columns an error names.
const maxNamedColumns = 5

// commentedColumn matches the columns that a migration creates: each has a comment
// (TestSchema_HasComments).
var commentedColumn = regexp.MustCompile(`(?m)^COMMENT ON COLUMN dlq\.(\w+\.\w+) IS`)

// unknownTables returns the reason why this program cannot upgrade or revert the tables of dlqd's schema, or "" if it
// can, if there are none, or if a newer dlqd installed them.
//
// Before they were frozen, migrations could still change, so a version number alone does not identify a database's
// tables. All columns that the applied migrations create must exist.
func (m *Migrator) unknownTables(ctx context.Context, status MigrationStatus) (refusal string, err error) {
	if status.Version == 0 || status.Newer() { // this program does not know the tables of a newer schema
		return "", nil
	}
	columns, err := columnsOf(status.Version)
	if err != nil {
		return "", err
	}
	rows, err := m.Pool.Query(ctx, `
		SELECT w.name FROM unnest($2::text[]) w (name)
		EXCEPT
		SELECT c.relname || '.' || a.attname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped WHERE n.nspname = $1
		ORDER BY 1`, m.Schemas.DLQ, columns)
	if err != nil {
		return "", err
	}
	missing, err := pgx.CollectRows(rows, pgx.RowTo[string])
	switch {
	case err != nil:
		return "", err
	case len(missing) > 0:
		more := ""
		if len(missing) > maxNamedColumns {
			more = fmt.Sprintf(" and %d more", len(missing)-maxNamedColumns)
			missing = missing[:maxNamedColumns]
		}
		return fmt.Sprintf("the tables in schema %[1]s were created by a dlqd older than any that this one upgrades "+
			"(columns %[2]s%[3]s are missing); nothing was changed. "+
			"Continue with the dlqd that created them; or start again, "+
			"beside the old tables with \"dlqd detach --schema %[1]s\" and then --schema with another name, "+
			"or in their place with \"dlqd detach --schema %[1]s --drop-data\". "+
			"\"dlqd attach --backfill\" then files the failed jobs that River still has",
			m.Schemas.DLQ, strings.Join(missing, ", "), more), nil
	}
	return "", nil
}

// columnsOf returns the columns that the migrations up to version create, as "table.column".
func columnsOf(version int64) ([]string, error) {
	migrations, err := migrationFiles()
	if err != nil {
		return nil, err
	}
	var columns []string
	for _, file := range migrations {
		if number, err := goose.NumericComponent(file.name); err != nil || number > version {
			return columns, err
		}
		for _, match := range commentedColumn.FindAllStringSubmatch(file.up(), -1) {
			columns = append(columns, match[1])
		}
	}
	return columns, nil
}
