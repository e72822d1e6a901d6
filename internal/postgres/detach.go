package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
)

// markers are the keys that dlqd writes into the metadata of River's jobs.
var markers = []string{
	"dlq:entry_id", "dlq:run_id", "dlq:replay", "dlq:trace", "dlq:destination", "dlq:held", "dlq:error",
	"dlq:attempts", "dlq:stage", "dlq:version", "dlq:logical_failure", "dlq:done_by", "dlq:done",
	"dlq:place", "dlq:postponed",
}

// Left is an object or a change that a detach leaves behind, and the commands that remove it.
type Left struct {
	What string
	How  []string // commands for psql
}

// Detached is the result of a detach.
type Detached struct {
	Installation

	Roles []string // dropped with the data
	Left  []Left
}

// ErrNotAttached is returned by [Migrator.Find] if the named schemas hold no dlqd.
var ErrNotAttached = errors.New("not attached")

// Find returns the installation that the caller means. If schemaNamed is set, it considers only installations in dlqd's
// schema of m. If riverNamed is set, it considers only those on River's schema of m, and those whose River is unknown.
// It returns nil if the database has no installation, [ErrNotAttached] if none matches, and another error if several
// match.
func (m *Migrator) Find(ctx context.Context, schemaNamed, riverNamed bool) (*Installation, error) {
	all, err := m.Installations(ctx)
	if err != nil {
		return nil, err
	}
	var fitting []Installation
	var others []string
	for _, i := range all {
		others = append(others, fmt.Sprintf("--schema %s --river-schema %s", i.Schema, i.River))
		if (!schemaNamed || i.Schema == m.Schemas.DLQ) && (!riverNamed || i.River == m.Schemas.River || i.River == "") {
			fitting = append(fitting, i)
		}
	}
	switch {
	case len(all) == 0:
		return nil, nil
	case len(fitting) == 0:
		return nil, fmt.Errorf("%w: there is no dlqd in schema %s on the River in schema %s; found: %s", ErrNotAttached,
			m.Schemas.DLQ, m.Schemas.River, strings.Join(others, ", "))
	case len(fitting) > 1:
		return nil, fmt.Errorf("there is more than one dlqd in this database; choose one: %s", strings.Join(others, ", "))
	}
	return &fitting[0], nil
}

// Detach removes an installation's triggers, functions and views, and returns what remains. It keeps the tables with
// the dead letters, unless dropData is set. This session's role must own dlqd's functions; it need not own River's
// tables.
func (m *Migrator) Detach(ctx context.Context, of Installation, dropData bool) (*Detached, error) {
	ctx = Unbounded(ctx)
	m = &Migrator{Pool: m.Pool, Logger: m.Logger, Schemas: Schemas{DLQ: of.Schema, River: of.River}}
	if m.Schemas.River == "" {
		m.Schemas.River = DefaultRiverSchema
	}
	done := &Detached{Installation: of}
	err := m.exclusively(ctx, func() (err error) {
		if of.Tables && dropData {
			done.Roles, err = m.dropData(ctx, true)
		} else {
			err = m.dropCode(ctx)
		}
		if err != nil {
			return err
		}
		done.Left, err = m.findLeftovers(ctx, of.Tables && !dropData)
		return err
	})
	return done, err
}

// dropData drops all objects in dlqd's schema. If dropSchema is set and this role owns the schema, it drops the schema,
// too. It also drops the roles that dlqd created, unless another dlqd uses them, and returns the dropped roles.
func (m *Migrator) dropData(ctx context.Context, dropSchema bool) ([]string, error) {
	roles := ""
	if has, err := m.hasTable(ctx, m.Schemas.DLQ, "settings"); err != nil {
		return nil, err
	} else if has {
		if roles, err = m.setting(ctx, settingRoles); err != nil {
			return nil, err
		}
	}
	if err := m.dropCode(ctx); err != nil {
		return nil, err
	}
	err := m.withShortLocks(ctx, func(tx pgx.Tx) error {
		var owned bool
		if err := tx.QueryRow(ctx, `SELECT coalesce(bool_and(pg_has_role(nspowner, 'USAGE')), false) FROM pg_namespace
			WHERE nspname = $1`, m.Schemas.DLQ).Scan(&owned); err != nil {
			return err
		}
		if owned && dropSchema {
			_, err := tx.Exec(ctx, "DROP SCHEMA "+m.Schemas.DLQ+" CASCADE")
			return err
		}
		rows, err := tx.Query(ctx, `
			SELECT format('DROP TABLE IF EXISTS %s CASCADE', c.oid::regclass) FROM pg_class c
			JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE n.nspname = $1 AND c.relkind IN ('r', 'p') AND NOT c.relispartition
			UNION ALL
			SELECT format('DROP TYPE IF EXISTS %s CASCADE', t.oid::regtype) FROM pg_type t
			JOIN pg_namespace n ON n.oid = t.typnamespace WHERE n.nspname = $1 AND (t.typtype = 'e'
				OR EXISTS (SELECT FROM pg_class c WHERE c.oid = t.typrelid AND c.relkind = 'c'))`, m.Schemas.DLQ)
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
	})
	if err != nil {
		return nil, err
	}
	var dropped []string
	for role := range strings.SplitSeq(roles, ",") {
		// The drop fails if another dlqd granted a right to the role, or if this session may not drop the role.
		// findLeftovers then reports the role.
		if role == "" {
			continue
		}
		if _, err := m.Pool.Exec(ctx, "DROP ROLE IF EXISTS "+pgx.Identifier{role}.Sanitize()); err == nil {
			dropped = append(dropped, role)
		}
	}
	return dropped, nil
}

// findLeftovers returns the objects and changes that remain after a detach, with statements that remove them. tables
// means that the detach has left the tables.
func (m *Migrator) findLeftovers(ctx context.Context, tables bool) ([]Left, error) {
	var left []Left
	var schema, owned bool
	if err := m.Pool.QueryRow(ctx, `SELECT count(*) > 0, coalesce(bool_and(pg_has_role(nspowner, 'USAGE')), false)
		FROM pg_namespace WHERE nspname = $1`, m.Schemas.DLQ).Scan(&schema, &owned); err != nil {
		return nil, err
	}
	switch {
	case tables:
		left = append(left, Left{
			"the tables of schema " + m.Schemas.DLQ + ", with the dead letters in them",
			[]string{"DROP SCHEMA " + m.Schemas.DLQ + " CASCADE; -- or: dlqd detach --drop-data"},
		})
	case schema && !owned:
		left = append(left, Left{
			"the empty schema " + m.Schemas.DLQ + ", which another role owns",
			[]string{"DROP SCHEMA " + m.Schemas.DLQ + ";"},
		})
	}
	rows, err := m.Pool.Query(ctx, `SELECT rolname::text FROM pg_roles
		WHERE rolname IN ('dlq_reader', 'dlq_operator', 'dlq_admin') ORDER BY 1`)
	if err != nil {
		return nil, err
	}
	roles, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, err
	}
	if len(roles) > 0 {
		left = append(left, Left{"roles " + strings.Join(roles, ", ") + ", which all installations of dlqd on this " +
			"server share", []string{"DROP ROLE " + strings.Join(roles, ", ") + "; -- if no other dlqd uses them"}})
	}
	granted, err := m.findGrants(ctx)
	if err != nil {
		return nil, err
	}
	left = append(left, granted...)
	marked, err := m.findMarkers(ctx)
	return append(left, marked...), err
}

// findGrants returns the rights on River's schema and on this database that were granted to this role for dlqd.
func (m *Migrator) findGrants(ctx context.Context) ([]Left, error) {
	rows, err := m.Pool.Query(ctx, `
		SELECT format('REVOKE ALL ON %s FROM %I;', o.kind || ' ' || o.name, current_user)
		FROM (SELECT CASE c.relkind WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END AS kind,
			format('%I.%I', n.nspname, c.relname) AS name, c.relowner AS owner, c.relacl AS acl
		      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname LIKE 'river\_%'
		      UNION ALL SELECT 'SCHEMA', quote_ident(n.nspname), n.nspowner, n.nspacl FROM pg_namespace n WHERE n.nspname = $1
		      UNION ALL SELECT 'DATABASE', quote_ident(d.datname), d.datdba, d.datacl FROM pg_database d
		      WHERE d.datname = current_database()) o
		WHERE o.owner <> current_user::regrole
			AND EXISTS (SELECT FROM aclexplode(o.acl) a WHERE a.grantee = current_user::regrole)
		ORDER BY o.kind, o.name`, m.Schemas.River)
	if err != nil {
		return nil, err
	}
	revokes, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || len(revokes) == 0 {
		return nil, err
	}
	return []Left{{
		"rights of this role on River's tables and this database (revoke them if only dlqd uses this role)",
		revokes,
	}}, nil
}

// findMarkers returns traces of dlqd in River's jobs: markers in metadata, and undelivered messages. It counts up to
// 100,000 of each. If it cannot count them, the result says so, and there is no error.
func (m *Migrator) findMarkers(ctx context.Context) ([]Left, error) {
	has, err := m.hasTable(ctx, m.Schemas.River, "river_job")
	if err != nil || !has {
		return nil, err
	}
	job := m.Schemas.River + ".river_job"
	var jobs, messages int
	// Counts stop at 100,000, because River's table may be large. The first count uses River's index on metadata.
	if err := m.Pool.QueryRow(ctx, `SELECT
		(SELECT count(*) FROM (SELECT FROM `+job+` WHERE metadata ?| $1 LIMIT 100000) j),
		(SELECT count(*) FROM (SELECT FROM `+job+` WHERE kind = 'dlqd_message' AND finalized_at IS NULL LIMIT 100000) j)`,
		markers).Scan(&jobs, &messages); err != nil {
		return []Left{{"markers in the metadata of jobs, which could not be counted: " + err.Error(), nil}}, nil //nolint:nilerr // the text reports it
	}
	var left []Left
	if jobs > 0 {
		keys := "'{" + strings.Join(markers, ",") + "}'::text[]"
		left = append(left, Left{
			fmt.Sprintf("markers in the metadata of %d jobs, until River deletes the jobs", jobs),
			[]string{
				"UPDATE " + job + " SET metadata = metadata - " + keys + " WHERE id IN (SELECT id FROM " + job +
					" WHERE metadata ?| " + keys + " LIMIT 1000); -- repeat until it prints UPDATE 0",
			},
		})
	}
	if messages > 0 {
		left = append(left, Left{fmt.Sprintf("%d messages that were submitted to dlqd and are not delivered: no worker "+
			"handles their kind now", messages), []string{
			"DELETE FROM " + job + " WHERE kind = 'dlqd_message' AND state <> 'running';",
		}})
	}
	return left, nil
}
