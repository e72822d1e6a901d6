package postgres

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/db"
)

// catalogSQL lists the objects of dlqd's schema ($1) and dlqd's triggers in River's schema ($2), each with its
// definition and, for an object that belongs to a table, the table. The list omits objects that partitions inherit from
// their table, and the functions that dlq.set_capture creates.
//
//nolint:dupword // a column and the table that it is of
const catalogSQL = `
WITH tables AS (
    SELECT c.oid, c.relname, c.relkind, c.relpersistence, c.relrowsecurity FROM pg_class c
    JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind IN ('r', 'p')
)
SELECT 'table ' || c.relname, c.relname::text, concat_ws(' ', c.relkind, c.relpersistence, CASE
	WHEN c.relrowsecurity THEN 'with row level security' END) FROM tables c
UNION ALL
SELECT 'column ' || c.relname || '.' || a.attname, c.relname, concat_ws(' ', format_type(a.atttypid, a.atttypmod), CASE
	WHEN a.attnotnull THEN 'NOT NULL' END, nullif(a.attidentity, ''), nullif(a.attgenerated, ''),
		pg_get_expr(d.adbin, d.adrelid))
FROM tables c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped LEFT
JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
UNION ALL
SELECT 'constraint ' || k.conname || ' on ' || c.relname, c.relname, pg_get_constraintdef(k.oid) FROM tables c
JOIN pg_constraint k ON k.conrelid = c.oid AND k.contype IN ('c', 'f', 'p', 'u', 'x') AND k.conparentid = 0
	AND k.conislocal
UNION ALL
SELECT 'index ' || i.relname, c.relname, pg_get_indexdef(i.oid) || CASE WHEN x.indisvalid THEN ''
	ELSE ' (not valid)' END FROM tables c JOIN pg_index x ON x.indrelid = c.oid JOIN pg_class i ON i.oid = x.indexrelid
		AND NOT i.relispartition
UNION ALL
SELECT 'trigger ' || t.tgname || ' on ' || c.relname, c.relname, pg_get_triggerdef(t.oid) || CASE t.tgenabled
	WHEN 'D' THEN ' (disabled)' WHEN 'R' THEN ' (for replicas only)' ELSE '' END
FROM tables c JOIN pg_trigger t ON t.tgrelid = c.oid AND NOT t.tgisinternal AND t.tgparentid = 0
UNION ALL
SELECT 'trigger ' || t.tgname || ' on ' || c.relname, c.relname, pg_get_triggerdef(t.oid) || CASE t.tgenabled
	WHEN 'D' THEN ' (disabled)' WHEN 'R' THEN ' (for replicas only)' ELSE '' END
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace f ON f.oid = p.pronamespace
WHERE n.nspname = $2 AND f.nspname = $1
UNION ALL
SELECT 'rule ' || r.rulename || ' on ' || c.relname, c.relname, pg_get_ruledef(r.oid) FROM tables c
JOIN pg_rewrite r ON r.ev_class = c.oid
UNION ALL
SELECT 'view ' || c.relname, '', pg_get_viewdef(c.oid) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind = 'v'
UNION ALL
SELECT CASE p.prokind WHEN 'p' THEN 'procedure '
	ELSE 'function ' END || p.proname || '(' || pg_get_function_identity_arguments(p.oid) || ')', '',
		pg_get_functiondef(p.oid)
FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1 AND p.prokind IN ('f', 'p') AND p.proname NOT IN ('capture_mode', 'capture_limit') -- which dlq.set_capture writes
UNION ALL
SELECT 'type ' || t.typname, '', string_agg(e.enumlabel, ', ' ORDER BY e.enumsortorder) FROM pg_type t
JOIN pg_namespace n ON n.oid = t.typnamespace JOIN pg_enum e ON e.enumtypid = t.oid WHERE n.nspname = $1
GROUP BY t.typname`

// recreateListSQL lists statements that recreate the views and SQL functions of a schema ($1) from the definitions that
// Postgres prints. A restored dump recreates them in the same way. A printed definition may differ from the original
// text: Postgres names unnamed columns (in a branch of a UNION, in a subquery) and then prints the names. Postgres
// prints a function whose body is a string unchanged.
const recreateListSQL = `
SELECT format('CREATE OR REPLACE VIEW %s AS %s', c.oid::regclass, pg_get_viewdef(c.oid))
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relkind = 'v'
UNION ALL
SELECT pg_get_functiondef(p.oid) FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1
	AND p.prosqlbody IS NOT NULL`

// object is a database object with its table and definition.
type object struct{ name, table, definition string }

// driftLocks is how many locks of the server's lock table must be free before a comparison. A comparison takes up to
// 722 locks (measured).
const driftLocks = 1000

// ErrManyLocks is returned by [Migrator.Drift] if too few of the server's locks are free.
var ErrManyLocks = errors.New("the server has too few free locks now (max_locks_per_transaction)")

// errRollback rolls back the transaction that created a schema for comparison.
var errRollback = errors.New("comparison finished")

// Drift compares dlqd's schema with a fresh schema, which Drift creates from this program's migrations and code in a
// transaction that it rolls back. It lists objects that are missing or different. It also lists objects that were added
// to dlqd's tables and can reject a row: columns, constraints, triggers, rules and unique indexes. Drift returns
// [ErrNotComparable] if a newer dlqd installed the schema, and [ErrManyLocks] if too few locks are free.
func (m *Migrator) Drift(ctx context.Context) ([]string, error) {
	ctx = Unbounded(ctx)
	if status, err := m.status(ctx); err != nil {
		return nil, err
	} else if status.Newer() {
		return nil, ErrNotComparable
	}
	var is, should, recreated map[string]object
	err := m.inTx(ctx, func(tx pgx.Tx) (err error) {
		var free bool
		if err := tx.QueryRow(ctx, `SELECT (SELECT count(*)
			FROM pg_locks) + $1 < current_setting('max_locks_per_transaction')::integer
			* (current_setting('max_connections')::integer + current_setting('max_prepared_transactions')::integer)`,
			driftLocks).Scan(&free); err != nil {
			return err
		}
		if !free {
			return ErrManyLocks
		}
		if is, err = m.catalog(ctx, tx, m.Schemas); err != nil {
			return err
		}
		var id string
		if err := tx.QueryRow(ctx, "SELECT pg_backend_pid()::text").Scan(&id); err != nil {
			return err
		}
		fresh := Schemas{DLQ: "dlqd_doctor_" + id, River: "dlqd_doctor_" + id + "_river"}
		if err := m.createFresh(ctx, tx, fresh); err != nil {
			return err
		}
		if should, err = m.catalog(ctx, tx, fresh); err != nil {
			return err
		}
		if err := recreate(ctx, tx, fresh.DLQ); err != nil {
			return err
		}
		if recreated, err = m.catalog(ctx, tx, fresh); err != nil {
			return err
		}
		return errRollback
	})
	if !errors.Is(err, errRollback) {
		return nil, err
	}
	// Objects of a database that was restored from a dump have the recreated definitions. These count as equal.
	for name, object := range is {
		if as, there := recreated[name]; there && as.definition == object.definition {
			should[name] = as
		}
	}
	return differences(should, is), nil
}

// createFresh creates a fresh dlqd schema in the same database as the installed one. Its triggers on river_job are
// created on a copy of that table, in a separate schema.
func (m *Migrator) createFresh(ctx context.Context, tx pgx.Tx, fresh Schemas) error {
	if _, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = '2s'; CREATE SCHEMA %[1]s; CREATE SCHEMA %[2]s; "+
		"CREATE TABLE %[2]s.river_job (LIKE %[3]s.river_job)", fresh.DLQ, fresh.River, m.Schemas.River)); err != nil {
		return err
	}
	names, err := fs.Glob(db.Migrations, "migrations/*.sql")
	if err != nil {
		return err
	}
	within := Schemas{DLQ: fresh.DLQ, River: m.Schemas.River}
	var migrations codePart
	for _, name := range names {
		raw, err := db.Migrations.ReadFile(name)
		if err != nil {
			return err
		}
		up, _, _ := strings.Cut(string(raw), "-- +goose Down")
		migrations.files = append(migrations.files, codeFile{name, within.Render(up)})
	}
	foldLabels(migrations.files)
	code := newCode(within)
	for _, part := range []codePart{
		migrations, code.routines, code.triggers,
		newCodePart(fresh, codeFile{"river_triggers.sql", db.RiverTriggers}),
	} {
		if err := part.run(ctx, tx); err != nil {
			return err
		}
	}
	return nil
}

// addedLabel matches a statement that adds a label to an enum.
var addedLabel = regexp.MustCompile(`ALTER TYPE (\S+) ADD VALUE IF NOT EXISTS ('\w+')(?: AFTER ('\w+'))?;`)

// foldLabels moves labels that later migrations add to an enum into the statement that creates the enum. Here all
// migrations run in one transaction, and a transaction cannot use a label that it has added itself.
func foldLabels(files []codeFile) {
	for _, file := range files {
		for _, added := range addedLabel.FindAllStringSubmatch(file.sql, -1) {
			create := "CREATE TYPE " + added[1] + " AS ENUM ("
			for i := range files {
				before, list, found := strings.Cut(files[i].sql, create)
				if !found {
					continue
				}
				labels, after, _ := strings.Cut(list, ");")
				if added[3] == "" {
					labels = strings.TrimRight(labels, " \n") + "\n, " + added[2] // the last line may end in a comment
				} else {
					labels = strings.Replace(labels, added[3], added[3]+", "+added[2], 1)
				}
				files[i].sql = before + create + labels + ");" + after
			}
		}
	}
}

// recreate recreates a schema's views and SQL functions from the definitions that Postgres prints.
func recreate(ctx context.Context, tx pgx.Tx, schema string) error {
	rows, err := tx.Query(ctx, recreateListSQL, schema)
	if err != nil {
		return err
	}
	statements, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, strings.Join(statements, ";\n"))
	return err
}

// catalog returns the objects of the dlqd schema of in, by name. In their definitions, the schema names of in are
// replaced by those of m.
func (m *Migrator) catalog(ctx context.Context, tx pgx.Tx, in Schemas) (map[string]object, error) {
	if _, err := tx.Exec(ctx, "SET LOCAL search_path = pg_catalog"); err != nil { // Postgres then prints qualified names
		return nil, err
	}
	rows, err := tx.Query(ctx, catalogSQL, in.DLQ, in.River)
	if err != nil {
		return nil, err
	}
	// River's schema is replaced first, because its name begins with that of dlqd's schema.
	rename := func(text string) string { return text }
	if in != m.Schemas {
		rename = strings.NewReplacer(in.River, m.Schemas.River, in.DLQ, m.Schemas.DLQ).Replace
	}
	found := map[string]object{}
	var name, table, definition string
	_, err = pgx.ForEachRow(rows, []any{&name, &table, &definition}, func() error {
		name := rename(name)
		found[name] = object{name, table, rename(definition)}
		return nil
	})
	return found, err
}

func differences(should, is map[string]object) []string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(should)) {
		switch now, there := is[name]; {
		case !there:
			list = append(list, name+" is missing")
		case now.definition != should[name].definition && strings.HasPrefix(now.definition, should[name].definition+" ("):
			list = append(list, name+" is "+strings.TrimSuffix(strings.TrimPrefix(now.definition, should[name].definition+" ("),
				")"))
		case now.definition != should[name].definition:
			list = append(list, name+" is different")
		}
	}
	for _, name := range slices.Sorted(maps.Keys(is)) {
		object := is[name]
		_, known := should[name]
		_, ours := should["table "+object.table]
		switch kind, _, _ := strings.Cut(name, " "); {
		case known:
		// An added object of these kinds can reject a row.
		case ours && (slices.Contains([]string{"column", "constraint", "trigger", "rule"}, kind) ||
			strings.HasPrefix(object.definition, "CREATE UNIQUE INDEX ")):
			list = append(list, name+" was added")
		}
	}
	return list
}
