package postgres

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Parts of dlqd that need rights on objects that dlqd does not own.
const (
	PartAttach     = "attach"
	PartDLQWorkers = "dlq-workers"
	PartAPI        = "api"
	PartProcess    = "process"
	PartDoctor     = "doctor"
)

// Parts lists the parts in the order in which an installation needs them.
func Parts() []string { return []string{PartAttach, PartDLQWorkers, PartAPI, PartProcess, PartDoctor} }

// Right is a privilege that a part of dlqd needs on an object that dlqd does not own. All rights together are enough
// for dlqd: its role is no superuser, does not own River's tables, and is not a member of a role that does.
type Right struct {
	Part       string
	On         string // database, schema, table, sequence or role
	Object     string // name in River's schema, or of a role; empty for the database and for the schema itself
	Privileges []string
	Why        string
	// Optional is set if the part works without the right, but does less.
	Optional bool
}

// Rights lists what each part needs on an application's database. All other parts also need the
// rights of PartAttach.
func Rights() []Right {
	return []Right{
		{
			Part: PartAttach, On: "database", Privileges: []string{"CREATE"},
			Why: "create the schema of dlqd's tables; not needed once it exists",
		},
		{Part: PartAttach, On: "schema", Privileges: []string{"USAGE"}, Why: "use River's tables"},
		{
			Part: PartAttach, On: "table", Object: "river_job", Privileges: []string{"TRIGGER"},
			Why: "run capture in the transactions that end jobs",
		},
		{
			Part: PartAttach, On: "table", Object: "river_job", Privileges: []string{"SELECT", "UPDATE"},
			Why: "read and lock jobs: missed failures, redeliveries in progress, jobs retried elsewhere, erasures",
		},
		{
			Part: PartAttach, On: "table", Object: "river_migration", Privileges: []string{"SELECT"},
			Why: "read River's version",
		},
		{Part: PartDLQWorkers, On: "table", Object: "river_job", Privileges: []string{"INSERT"}, Why: "insert redeliveries"},
		{
			Part: PartDLQWorkers, On: "table", Object: "river_job", Privileges: []string{"DELETE"}, Optional: true,
			Why: "delete failed redeliveries after the dead letter records them, so that River UI lists one job for each " +
				"dead letter",
		},
		{
			Part: PartDLQWorkers, On: "sequence", Object: "river_job_id_seq", Privileges: []string{"USAGE"},
			Why: "assign ids to these jobs",
		},
		{
			Part: PartDLQWorkers, On: "table", Object: "river_queue", Privileges: []string{"SELECT", "UPDATE"},
			Why: "list queues; pause and resume them for an operator or a circuit breaker of the policy",
		},
		{
			Part: PartAPI, On: "table", Object: "river_job", Privileges: []string{"INSERT"},
			Why: "replay dead letters and accept messages",
		},
		{
			Part: PartAPI, On: "sequence", Object: "river_job_id_seq", Privileges: []string{"USAGE"},
			Why: "assign ids to these jobs",
		},
		{
			Part: PartAPI, On: "table", Object: "river_queue", Privileges: []string{"SELECT", "UPDATE"},
			Why: "list queues; pause and resume them",
		},
		{
			Part: PartProcess, On: "table", Object: "river_queue", Privileges: []string{"SELECT", "INSERT", "UPDATE"},
			Why: "deliver messages: River's client reports the queues that it works",
		},
		{
			Part: PartDoctor, On: "table", Object: "river_leader", Privileges: []string{"SELECT"},
			Why: "check whether River has a leader",
		},
		{
			Part: PartDoctor, On: "role", Object: "pg_read_all_stats", Privileges: []string{"MEMBER"}, Optional: true,
			Why: "see transactions of other users that hold back vacuum",
		},
	}
}

// Grant returns the statement that grants the right to a role. The caller quotes database.
func (r *Right) Grant(schemas Schemas, database, role string) string {
	privileges := strings.Join(r.Privileges, ", ")
	switch r.On {
	case "database":
		return fmt.Sprintf("GRANT %s ON DATABASE %s TO %s;", privileges, database, role)
	case "schema":
		return fmt.Sprintf("GRANT %s ON SCHEMA %s TO %s;", privileges, schemas.River, role)
	case "role":
		return fmt.Sprintf("GRANT %s TO %s;", r.Object, role)
	}
	return fmt.Sprintf("GRANT %s ON %s %s.%s TO %s;", privileges, strings.ToUpper(r.On), schemas.River, r.Object, role)
}

// MissingRight is a right that this session's role does not have.
type MissingRight struct {
	Right

	GrantSQL string
}

// MissingRightsError says that this session's role lacks rights for an operation.
type MissingRightsError struct {
	Role    string
	Missing []MissingRight
}

func (e *MissingRightsError) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "role %s lacks rights; nothing was changed. Run as a role that may grant them:", e.Role)
	for _, m := range e.Missing {
		text.WriteString("\n  " + m.GrantSQL + " -- to " + m.Why)
	}
	return text.String()
}

// MissingRights checks which rights of parts this session's role lacks. It needs no right on a table that this version
// of River does not have.
func (m *Migrator) MissingRights(ctx context.Context,
	parts ...string,
) (role string, missing []MissingRight, err error) {
	var database string
	var hasSchema, ownSchema bool
	// has_table_privilege fails for a name in a schema that this role may not use, so read the catalog, which every role
	// may read.
	if err := m.Pool.QueryRow(ctx, `
		SELECT quote_ident(current_user), quote_ident(current_database()), n.oid IS NOT NULL,
		       coalesce(has_schema_privilege(n.oid, 'USAGE') AND has_schema_privilege(n.oid, 'CREATE'), false)
		FROM (VALUES (1)) one LEFT JOIN pg_namespace n ON n.nspname = $1`, m.Schemas.DLQ).Scan(&role, &database, &hasSchema,
		&ownSchema); err != nil {
		return "", nil, err
	}
	for _, right := range Rights() {
		if !slices.Contains(parts, right.Part) {
			continue
		}
		if right.On == "database" && hasSchema {
			if !ownSchema {
				missing = append(missing,
					MissingRight{right, fmt.Sprintf("GRANT USAGE, CREATE ON SCHEMA %s TO %s;", m.Schemas.DLQ, role)})
			}
			continue
		}
		lacking := right
		lacking.Privileges = nil
		for _, privilege := range right.Privileges {
			has, err := m.has(ctx, &right, privilege)
			if err != nil {
				return "", nil, fmt.Errorf("right to %s %s %s: %w", privilege, right.On, right.Object, err)
			}
			if !has {
				lacking.Privileges = append(lacking.Privileges, privilege)
			}
		}
		if len(lacking.Privileges) > 0 {
			missing = append(missing, MissingRight{lacking, lacking.Grant(m.Schemas, database, role)})
		}
	}
	return role, missing, nil
}

func (m *Migrator) has(ctx context.Context, right *Right, privilege string) (bool, error) {
	var has bool
	var row pgx.Row
	switch right.On {
	case "database":
		row = m.Pool.QueryRow(ctx, "SELECT has_database_privilege(current_database(), $1)", privilege)
	case "schema":
		row = m.Pool.QueryRow(ctx, `SELECT coalesce(bool_and(has_schema_privilege(oid, $2)), true) FROM pg_namespace
			WHERE nspname = $1`, m.Schemas.River, privilege)
	case "role":
		row = m.Pool.QueryRow(ctx, "SELECT pg_has_role($1, 'USAGE')", right.Object)
	case "sequence":
		row = m.Pool.QueryRow(ctx, `SELECT coalesce(bool_and(has_sequence_privilege(c.oid, $3)), true)
			FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2
				AND c.relkind = 'S'`, m.Schemas.River, right.Object, privilege)
	default:
		row = m.Pool.QueryRow(ctx, `SELECT coalesce(bool_and(has_table_privilege(c.oid, $3)), true)
			FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1
				AND c.relname = $2`, m.Schemas.River, right.Object, privilege)
	}
	return has, row.Scan(&has)
}

// Hidden lists the tables of River in which row level security hides rows from this session. A hidden job would look
// like a deleted one, so dlqd works with row_security off, with which reading such a table is an error.
func (m *Migrator) Hidden(ctx context.Context) ([]string, error) {
	rows, err := m.Pool.Query(ctx, `
		SELECT c.relname::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname IN ('river_job', 'river_queue', 'river_leader', 'river_migration')
			AND row_security_active(c.oid) ORDER BY 1`, m.Schemas.River)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
