package postgres

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	backfillBatch = 1000

	// removeTimeout bounds the removal of an installation that failed.
	removeTimeout = time.Minute
)

// Plan describes what [Migrator.Attach] would do.
type Plan struct {
	Create  []string // objects to create, for display
	Upgrade []string // parts of an older installation to upgrade, for display
	// Refusals are the reasons why Attach would break the application or this dlqd. Each also says how to remove the
	// cause.
	Refusals []string
	// Missing lists rights that Attach needs. Later lists rights that other parts need; a serving dlqd reports these,
	// too.
	Missing, Later []MissingRight
	Role           string // of this session
}

// Err returns the refusals and missing rights as one error, or nil if the plan can be carried out.
func (p *Plan) Err() error {
	var errs []error
	for _, refusal := range p.Refusals {
		errs = append(errs, errors.New(refusal))
	}
	if len(p.Missing) > 0 {
		errs = append(errs, &MissingRightsError{p.Role, p.Missing})
	}
	return errors.Join(errs...)
}

// Plan returns the changes that Attach would make, or the reasons that prevent them. Without a reason and without
// changes, the schema is current, or a newer dlqd installed it. Plan changes nothing.
func (m *Migrator) Plan(ctx context.Context) (*Plan, error) {
	p := &Plan{}
	var err error
	if p.Role, p.Missing, err = m.MissingRights(ctx, PartAttach); err != nil {
		return nil, err
	}
	if _, p.Later, err = m.MissingRights(ctx, PartDLQWorkers, PartAPI, PartProcess, PartDoctor); err != nil {
		return nil, err
	}
	if p.Refusals, err = m.refusals(ctx); err != nil {
		return nil, err
	}
	if len(p.Missing) > 0 || len(p.Refusals) > 0 { // the schema cannot be read, or is not dlqd's
		return p, nil
	}
	status, err := m.status(ctx)
	if err != nil {
		return nil, err
	}
	if err := status.refusal(m.Schemas.DLQ); err != nil {
		p.Refusals = append(p.Refusals, err.Error())
		return p, nil
	}
	if status.Newer() {
		return p, nil
	}
	if refusal, err := m.unknownTables(ctx, status); err != nil {
		return nil, err
	} else if refusal != "" {
		p.Refusals = append(p.Refusals, refusal)
		return p, nil
	}
	if status.RiverVersion < oldestRiver {
		p.Refusals = append(p.Refusals, fmt.Sprintf("River's tables are at version %d; dlqd needs %d or newer: run River's "+
			"migrations first", status.RiverVersion, oldestRiver))
		return p, nil
	}
	older := status.Version > 0
	if older && status.Version < status.Latest {
		p.Upgrade = append(p.Upgrade, fmt.Sprintf("schema %s from version %d to version %d", m.Schemas.DLQ, status.Version,
			status.Latest))
	} else if status.Version < status.Latest {
		p.Create = append(p.Create,
			"schema "+m.Schemas.DLQ,
			m.Schemas.Render("table dlq.dead_letter_queue, partitioned by stage; closed entries by month"),
			m.Schemas.Render("table dlq.dead_letter_transitions, partitioned by month"),
			m.Schemas.Render("tables dlq.job_facts, dlq.entry_jobs, dlq.retired_jobs, dlq.reconcile_looks, "+
				"dlq.reconcile_findings"),
			m.Schemas.Render("tables dlq.circuit_breakers, dlq.circuit_breaker_changes, dlq.automatic_switches, "+
				"dlq.automatic_changes, dlq.gates, dlq.paces, dlq.ordered_jobs"),
			m.Schemas.Render("tables dlq.sources, dlq.source_positions, dlq.source_progress, dlq.source_deliveries, "+
				"dlq.feeds, dlq.feed_records"),
			m.Schemas.Render("tables dlq.replay_runs, dlq.replay_run_groups, dlq.replay_run_entries, dlq.failure_groups, "+
				"dlq.destination_traffic, dlq.group_aliases, dlq.group_marks, dlq.deploys, dlq.saved_views, dlq.reviews"),
			m.Schemas.Render("tables dlq.acts, dlq.duties, dlq.operations, dlq.operation_unchanged, dlq.approvals, "+
				"dlq.approval_entries, dlq.erasures, dlq.restored_partitions, dlq.archived_partitions"),
			m.Schemas.Render("tables dlq.processes, dlq.settings, dlq.schema_migrations, dlq.tokens, dlq.sessions, "+
				"dlq.role_scopes, dlq.last_acts, dlq.counters, dlq.metrics_sample, dlq.rollup_*"))
	}
	if !status.codeCurrent || !status.triggersCurrent {
		code := "functions and views in schema " + m.Schemas.DLQ + ", and triggers on its tables"
		if older {
			p.Upgrade = append(p.Upgrade, code)
		} else {
			p.Create = append(p.Create, code, "roles dlq_reader, dlq_operator and dlq_admin, if this role may create roles")
		}
	}
	if !status.riverTriggersCurrent {
		p.Create = append(p.Create,
			m.Schemas.Render("trigger dlq_capture on river.river_job (fires when a job is discarded, or cancelled by its "+
				"worker)"),
			m.Schemas.Render("trigger dlq_follow on river.river_job (fires when a discarded or cancelled job is retried)"))
	}
	return p, nil
}

// refusals returns the reasons why attaching would fail later or break the application.
func (m *Migrator) refusals(ctx context.Context) ([]string, error) {
	river, dlq := m.Schemas.River, m.Schemas.DLQ
	has, err := m.hasTable(ctx, river, "river_job")
	if err != nil {
		return nil, err
	}
	if !has {
		return []string{fmt.Sprintf("there is no River in schema %q of this database: name its schema with --river-schema, "+
			"or run \"dlqd migrate up\" to create one", river)}, nil
	}
	var refusals []string
	hidden, err := m.Hidden(ctx)
	if err != nil {
		return nil, err
	}
	if len(hidden) > 0 {
		refusals = append(refusals, fmt.Sprintf("row level security hides rows of %s from this role, and hidden jobs would "+
			"look deleted: run ALTER ROLE … BYPASSRLS, or attach as a role that has it", strings.Join(hidden, ", ")))
	}
	// Detach can drop dlqd's whole schema, so the schema must contain only objects of dlqd.
	foreign, err := m.foreignObjects(ctx)
	if err != nil {
		return nil, err
	}
	if len(foreign) > 0 {
		refusals = append(refusals, fmt.Sprintf("schema %s has objects that are not dlqd's (%s): dlqd needs a separate "+
			"schema, choose another with --schema", dlq, strings.Join(foreign, ", ")))
	}
	all, err := m.Installations(ctx)
	if err != nil {
		return nil, err
	}
	for _, i := range all {
		switch {
		case i.Schema == dlq && i.River != river:
			refusals = append(refusals,
				fmt.Sprintf("schema %s has the dlqd of the River in schema %s: choose another schema with --schema", dlq, i.River))
		case i.Schema != dlq && i.River == river && len(i.Triggers) > 0:
			refusals = append(refusals, fmt.Sprintf("the River in schema %s already has a dlqd in schema %s: use it with "+
				"--schema %s, or remove it with \"dlqd detach --schema %s\"", river, i.Schema, i.Schema, i.Schema))
		}
	}
	return refusals, nil
}

// foreignObjects returns up to five objects in dlqd's schema that are not dlqd's. It returns none if dlqd has started
// to install itself there.
func (m *Migrator) foreignObjects(ctx context.Context) ([]string, error) {
	rows, err := m.Pool.Query(ctx, `
		WITH schema AS (SELECT n.oid FROM pg_namespace n WHERE n.nspname = $1), things AS (
			SELECT c.relname::text AS name FROM pg_class c JOIN schema s ON s.oid = c.relnamespace
			WHERE c.relkind NOT IN ('i', 'I', 't', 'c')
			UNION SELECT p.proname || '()' FROM pg_proc p JOIN schema s ON s.oid = p.pronamespace
			UNION SELECT y.typname FROM pg_type y JOIN schema s ON s.oid = y.typnamespace WHERE y.typtype IN ('d', 'e', 'r')
				OR y.typtype = 'c' AND EXISTS (SELECT FROM pg_class c WHERE c.oid = y.typrelid AND c.relkind = 'c')
		)
		SELECT name FROM things
		WHERE NOT EXISTS (SELECT FROM pg_class c JOIN schema s ON s.oid = c.relnamespace
		JOIN pg_attribute a ON a.attrelid = c.oid
			WHERE c.relname = '`+MigrationTable+`' AND a.attname = 'is_applied')
		ORDER BY 1 LIMIT 5`, m.Schemas.DLQ)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

// Attach installs dlqd beside an application's River, or upgrades an existing installation. Attach adds two triggers to
// River's tables and leaves these tables otherwise unchanged. If a first installation fails, Attach removes the objects
// that it created. It does not change a schema that a newer dlqd installed.
func (m *Migrator) Attach(ctx context.Context) error {
	ctx = Unbounded(ctx)
	return m.exclusively(ctx, func() error {
		plan, err := m.Plan(ctx)
		if err != nil {
			return err
		}
		if err := plan.Err(); err != nil {
			return err
		}
		if status, err := m.status(ctx); err != nil || status.Newer() {
			return err
		}
		hadSchema, err := m.hasSchema(ctx, m.Schemas.DLQ)
		if err != nil {
			return err
		}
		had, err := m.hasTable(ctx, m.Schemas.DLQ, "settings")
		if err != nil {
			return err
		}
		if err = m.install(ctx, riverAttached); err == nil || had {
			return err
		}
		removeCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		if _, undoErr := m.dropData(removeCtx, !hadSchema); undoErr != nil {
			return fmt.Errorf("%w; removing the partial installation failed (run \"dlqd detach --drop-data\"): %w", err, undoErr)
		}
		return fmt.Errorf("%w; the partial installation was removed", err)
	})
}

// Backfill appends to the inbox the jobs that failed before capture was installed, and returns their number. After each
// batch, Backfill calls progress with the number so far.
func (m *Migrator) Backfill(ctx context.Context, progress func(total int)) (int, error) {
	total, db := 0, m.Schemas.Rendered(m.Pool)
	for {
		var n int
		if err := db.QueryRow(ctx, "SELECT dlq.backfill($1)", backfillBatch).Scan(&n); err != nil {
			return total, fmt.Errorf("backfill after %d jobs: %w", total, err)
		}
		total += n
		if n == 0 {
			return total, nil
		}
		progress(total)
	}
}

// Installation is an installation of dlqd in this database.
type Installation struct {
	Schema   string   // of the tables of this dlqd
	River    string   // schema of the River to which this dlqd is attached; empty if unknown
	Triggers []string // on that River's river_job
	Tables   bool     // dlqd's tables exist
}

// Installations searches the catalog for all installations in this database. It finds an installation by triggers on
// any river_job whose function is in the installation's schema, or by the tables in that schema. River is "" if there
// are no triggers and this role may not read dlqd's settings.
func (m *Migrator) Installations(ctx context.Context) ([]Installation, error) {
	rows, err := m.Pool.Query(ctx, `
		WITH triggers AS (
			SELECT f.nspname AS schema, n.nspname AS river, array_agg(t.tgname::text ORDER BY t.tgname) AS triggers
			FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
			JOIN pg_proc p ON p.oid = t.tgfoid JOIN pg_namespace f ON f.oid = p.pronamespace
			WHERE c.relname = 'river_job' AND t.tgname IN ('dlq_capture', 'dlq_follow') AND 'dlq_' || p.proname = t.tgname
				AND NOT t.tgisinternal
			GROUP BY 1, 2
		), tables AS (
			SELECT n.nspname AS schema FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE c.relname = 'settings' AND c.relkind = 'r' OR c.relname IN ('dead_letter_queue', 'dead_letter_transitions')
				AND c.relkind = 'p'
			   OR c.relname = '`+MigrationTable+
		`' AND c.relkind = 'r' AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'is_applied')
			GROUP BY 1 HAVING count(*) = 4
		)
		SELECT coalesce(t.schema, d.schema)::text, coalesce(t.river, '')::text, coalesce(t.triggers, '{}'),
			d.schema IS NOT NULL
		FROM triggers t FULL JOIN tables d ON d.schema = t.schema ORDER BY 1, 2`)
	if err != nil {
		return nil, err
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Installation])
	if err != nil {
		return nil, err
	}
	for i := range all {
		if all[i].River != "" {
			continue
		}
		// Without triggers, only dlqd's settings may name the River schema. This role may not be allowed to read them.
		of := Schemas{DLQ: all[i].Schema, River: m.Schemas.River}
		var readable bool
		if err := m.Pool.QueryRow(ctx, `SELECT has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT')
			FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1
				AND c.relname = 'settings'`, of.DLQ).Scan(&readable); err != nil {
			return nil, err
		}
		if !readable {
			continue
		}
		err := m.Pool.QueryRow(ctx, "SELECT value FROM "+pgx.Identifier{of.DLQ, "settings"}.Sanitize()+" WHERE key = $1",
			settingRiverSchema).Scan(&all[i].River)
		if err != nil && !errors.Is(err, pgx.ErrNoRows) {
			return nil, err
		}
	}
	return all, nil
}
