// Package doctor checks for problems that develop slowly: missing triggers, missing partitions, transactions that hold
// back vacuum, a River without a leader. It gives a remedy for each. Before dlqd is attached, it surveys the jobs of an
// application's River. The package changes no data.
package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/postgres"
)

// Limits of the checks. A check reports a problem above its limit; below minDaysAhead, it reports one, too. minDeadRows
// and maxDrift do not decide alone whether there is a problem.
const (
	maxClockSkew      = 2 * time.Second
	maxTransactionAge = 10 * time.Minute
	maxSlotLag        = int64(1) << 30 // bytes of WAL
	maxDeadShare      = 0.3            // of a table's rows, once there are minDeadRows
	minDeadRows       = 10_000
	maxOverdue        = time.Hour // of an available job
	maxScanAge        = 5 * time.Minute
	maxUnfiledAge     = time.Minute
	minDaysAhead      = 2 // of partitions of the audit trail and of closed entries
	maxRollupLag      = 5 * time.Minute
	maxDrift          = 20 // listed differences
)

// Finding is the result of one check.
type Finding struct {
	Name   string `json:"name" doc:"The name of the check."`
	OK     bool   `json:"ok" doc:"Whether the check found no problem."`
	Detail string `json:"detail" doc:"The result of the check."`
	Do     string `json:"do,omitempty" doc:"The remedy, if the check found a problem."`
}

// Texts of findings whose check could not run.
const (
	checkFailed   = "could not be checked: "
	useOtherRole  = "run doctor as a role that has the rights"
	checkDatabase = "check that the database is available"
)

// check is one query, with the interpretation of its result.
type check struct {
	name string
	// sql returns one row: a number and a text about it.
	sql string
	bad func(n float64) bool
	// ok and found are formats for number and text; do is the remedy.
	ok, found, do string
}

// oldestTransaction selects the age and the process of the oldest transaction that is older than a number of seconds.
// The operator = selects transactions of dlqd, and <> those of other programs.
const oldestTransaction = `SELECT coalesce(extract(epoch FROM max(now() - xact_start)), 0)::float8,
	coalesce((array_agg('pid ' || pid || ', ' || coalesce(application_name, '') ORDER BY xact_start))[1], '')
	FROM pg_stat_activity WHERE coalesce(application_name,
		'') %s '` + postgres.ApplicationName +
	`' AND xact_start < now() - interval '%d seconds' AND backend_type = 'client backend'`

var checks = []check{
	{
		"triggers", `SELECT count(*) FILTER (WHERE t.tgenabled NOT IN ('O', 'A'))::float8 + 10 * (2 - count(*)),
			coalesce(string_agg(t.tgname || CASE t.tgenabled WHEN 'D' THEN ' is disabled'
				WHEN 'R' THEN ' is enabled for replicas only' ELSE ' is enabled' END, ', ' ORDER BY t.tgname), 'neither exists')
			FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
			WHERE t.tgrelid = dlq.job_table() AND t.tgname IN ('dlq_capture', 'dlq_follow')
			AND p.pronamespace = (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'dlq.settings'::regclass)`,
		func(n float64) bool { return n > 0 },
		"dlq_capture and dlq_follow exist and are enabled. If a migration of River changes the type of state or metadata, " +
			"run \"dlqd detach\" before it and \"dlqd attach --backfill\" after it",
		"dlq_capture and dlq_follow must exist and be enabled: %[2]s. " +
			"The reconciler files failures late, and dlqd does not follow retries made outside it",
		"create missing triggers: dlqd migrate up (or dlqd attach); " +
			"enable disabled ones as the owner of River's table: ALTER TABLE river_job ENABLE TRIGGER …",
	},
	{
		"scopes", `SELECT count(*)::float8, coalesce(string_agg(DISTINCT s.role::text, ', '), '') FROM dlq.role_scopes s
			WHERE NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = s.role)`,
		func(n float64) bool { return n > 0 },
		"each scope belongs to an existing role", "scopes belong to roles that do not exist: %[2]s. " +
			"Users of a role that was renamed or dropped are not limited",
		"set the scope of the role's new name with dlq.set_role_scope, and remove the old one: dlq.set_role_scope('…', NULL)",
	},
	{
		"grants", `SELECT count(*)::float8,
			coalesce(string_agg(DISTINCT CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_get_userbyid(a.grantee) END, ', '), '')
			FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
			WHERE c.relnamespace = (SELECT q.relnamespace FROM pg_class q WHERE q.oid = 'dlq.settings'::regclass)
				AND c.relkind IN ('r', 'p') AND (c.relispartition OR c.relname IN ('tokens', 'sessions'))
			AND a.grantee <> c.relowner`,
		func(n float64) bool { return n > 0 },
		"only their owner may read partitions, tokens and sessions", "%[2]s may read partitions, tokens or sessions, " +
			"where the policy's sensitive columns are not hidden",
		"for each of these roles: REVOKE ALL ON ALL TABLES IN SCHEMA dlq FROM …; GRANT dlq_reader TO …",
	},
	{
		"capture", `SELECT (c.mode <> 'on')::integer::float8,
			c.mode || coalesce(', by ' || c.changed_by || ' since ' || to_char(c.changed_at AT TIME ZONE 'UTC',
				'YYYY-MM-DD HH24:MI') || ' UTC' || coalesce(': ' || c.note, ''), '') FROM dlq.capture_status() c`,
		func(n float64) bool { return n > 0 },
		"on", "is %[2]s", "if capture should be on: dlqd capture on",
	},
	{
		"reconciler", `SELECT coalesce(extract(epoch FROM now() - c.looked_at), 0)::float8,
			CASE WHEN c.looked_at IS NULL THEN 'no scan yet'
				ELSE 'last scan at ' || to_char(c.looked_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || ' UTC' END
			|| CASE WHEN c.missed > 0 THEN '; in the last 24 hours it filed failures that capture missed: ' || (SELECT string_agg(m.value || ' ' || m.key, ', ' ORDER BY m.key) FROM jsonb_each_text(c.missed_by) m) ELSE '' END
			FROM dlq.capture_status() c`,
		func(n float64) bool { return n > maxScanAge.Seconds() },
		"%[2]s", "has not scanned for %.0[1]f s (%[2]s)",
		"check that dlqd serve runs, and see its log: it scans every minute. To scan now: SELECT * FROM dlq.reconcile()",
	},
	{
		"filing", `SELECT coalesce(extract(epoch FROM clock_timestamp() - least(c.unfiled_since, c.facts_since)), 0)::float8,
			format('%s failures to file, since %s; %s facts to apply (ends of redeliveries, retries made outside dlqd), since %s', c.unfiled, coalesce(c.unfiled_since::text, '-'), c.facts, coalesce(c.facts_since::text, '-')) FROM dlq.capture_status() c`,
		func(n float64) bool { return n > maxUnfiledAge.Seconds() },
		"up to date (%[2]s)", "is behind: %[2]s",
		"run dlqd serve --dlq-workers, and see its log. " +
			"To see which sessions block others: SELECT pg_blocking_pids(pid), * FROM pg_stat_activity",
	},
	{
		"dlqd's triggers", `SELECT count(*)::float8,
			coalesce(string_agg(t.tgname || ' on ' || c.relname, ', ' ORDER BY c.relname, t.tgname), '') FROM pg_trigger t
				JOIN pg_class c ON c.oid = t.tgrelid
			WHERE c.relnamespace = (SELECT s.relnamespace FROM pg_class s WHERE s.oid = 'dlq.settings'::regclass)
				AND NOT t.tgisinternal AND t.tgenabled NOT IN ('O', 'A')`,
		func(n float64) bool { return n > 0 },
		"are enabled", "are not enabled: %[2]s. Moves are not checked, or leave no audit row",
		"as the owner of dlqd's schema: ALTER TABLE … ENABLE TRIGGER …. The audit trail lacks the moves made meanwhile",
	},
	{
		"partitions", `SELECT min(p.ahead)::float8, (array_agg(p.parent ORDER BY p.ahead))[1] FROM (
				SELECT s.parent::regclass::text AS parent,
					coalesce(extract(epoch FROM max(dlq.partition_end(i.inhrelid)) - now()) / 86400, 0) AS ahead
				FROM unnest(ARRAY['dlq.dead_letter_transitions', 'dlq.dead_letter_resolved', 'dlq.dead_letter_failed',
					'dlq.dead_letter_archived']) s (parent)
				LEFT JOIN pg_inherits i ON i.inhparent = s.parent::regclass
				GROUP BY s.parent) p`,
		func(n float64) bool { return n < minDaysAhead },
		"exist %.0[1]f days ahead", "of %[2]s exist only %.1[1]f days ahead",
		"check that dlqd serve runs, and see its log: it creates partitions every hour. " +
			"To create them now: CALL dlq.ensure_partitions()",
	},
	{
		"rollups", `SELECT coalesce((SELECT extract(epoch FROM now() - s.at) FROM dlq.rollup_state s), 1e9)::float8, ''`,
		func(n float64) bool { return n > maxRollupLag.Seconds() },
		"analytics are %.0[1]f s behind", "analytics are %.0[1]f s behind",
		"check that dlqd serve runs, and see its log: it refreshes the rollups every second. " +
			"To refresh them now: SELECT dlq.refresh_rollups()",
	},
	{
		"default partitions", `SELECT ((SELECT count(*) FROM dlq.dead_letter_transitions_default) + (SELECT count(*)
			FROM dlq.dead_letter_resolved_default)
			+ (SELECT count(*) FROM dlq.dead_letter_failed_default) + (SELECT count(*)
				FROM dlq.dead_letter_archived_default))::float8, ''`,
		func(n float64) bool { return n > 0 },
		"empty", "hold %.0[1]f rows whose partition was missing when they were written",
		"move them to the partitions of their months: CALL dlq.ensure_partitions()",
	},
	{
		"transactions", fmt.Sprintf(oldestTransaction, "<>", int(maxTransactionAge.Seconds())),
		func(n float64) bool { return n > 0 },
		"none is older than ten minutes", "one has been open for %.0[1]f s (%[2]s): vacuum cannot remove dead rows meanwhile",
		"end it: SELECT pg_terminate_backend(pid)",
	},
	{
		"dlqd's transactions", fmt.Sprintf(oldestTransaction, "=", int(maxTransactionAge.Seconds())),
		func(n float64) bool { return n > 0 },
		"none is older than ten minutes", "one has been open for %.0[1]f s (%[2]s): vacuum cannot remove dead rows meanwhile",
		"see the log of that dlqd: wait for a migration, an erasure or a backfill; restart a process that hangs",
	},
	{
		"replication", `SELECT (r.commit = 'off' OR r.commit <> 'local' AND r.names <> '' AND r.standbys = 0)::integer::float8,
			CASE WHEN r.commit = 'off' THEN
				'synchronous_commit is off: after a crash, messages and moves that were acknowledged may be missing'
			WHEN r.commit <> 'local' AND r.names <> '' THEN format('synchronous: a commit waits for standbys '
				'(synchronous_standby_names = %L, synchronous_commit = %s); %s', r.names, r.commit, r.connected)
			WHEN r.standbys > 0 THEN 'asynchronous: what is acknowledged may be missing after a promotion; ' || r.connected
			ELSE 'no standby is connected' END
			FROM (SELECT current_setting('synchronous_commit'), current_setting('synchronous_standby_names'), s.n,
				s.n || CASE s.n WHEN 1 THEN ' standby is' ELSE ' standbys are' END || ' connected'
				FROM (SELECT count(*) FROM pg_stat_replication) s (n)) r (commit, names, standbys, connected)`,
		func(n float64) bool { return n > 0 },
		"%[2]s", "%[2]s",
		"for dlqd's role: ALTER ROLE … SET synchronous_commit = on. If commits wait for a standby that is gone: start it, " +
			"or change synchronous_standby_names (ALTER SYSTEM, then pg_reload_conf)",
	},
	{
		"replication slots", `SELECT coalesce(max(pg_wal_lsn_diff(CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn()
			ELSE pg_current_wal_lsn() END, restart_lsn)), 0)::float8,
			coalesce((array_agg(slot_name::text ORDER BY restart_lsn))[1], '') FROM pg_replication_slots
				WHERE restart_lsn IS NOT NULL`,
		func(n float64) bool { return n > float64(maxSlotLag) },
		"none retains more than 1 GiB of WAL", "slot %[2]s retains %.0[1]f bytes of WAL",
		"start its consumer, or drop it: SELECT pg_drop_replication_slot(name)",
	},
	{
		"dead rows", fmt.Sprintf(`SELECT coalesce(max(n_dead_tup::float8 / greatest(n_live_tup + n_dead_tup, 1)), 0)::float8,
			coalesce((array_agg(relname::text ORDER BY n_dead_tup DESC))[1], '')
			FROM pg_stat_user_tables WHERE n_dead_tup > %d
				AND (relid = 'river.river_job'::regclass OR schemaname = (SELECT c.relnamespace::regnamespace::text FROM pg_class c
					WHERE c.oid = 'dlq.settings'::regclass))
						AND n_dead_tup > %f * (n_live_tup + n_dead_tup)`, minDeadRows, maxDeadShare),
		func(n float64) bool { return n > 0 },
		"vacuum keeps up", "a table has a share of %.2[1]f dead rows; %[2]s has the most of them",
		"VACUUM (ANALYZE) the table; if that does not help, see the checks transactions and replication slots",
	},
	{
		"River's leader", `SELECT count(*)::float8, coalesce(max(leader_id), '') FROM river.river_leader
			WHERE expires_at > now()`,
		func(n float64) bool { return n == 0 },
		"%[2]s", "there is none: River schedules, rescues and cleans no jobs",
		"run a River client that may become leader: dlqd serve --process if River belongs to dlqd, " +
			"else a client of the application",
	},
	{
		"jobs", fmt.Sprintf(`SELECT count(*)::float8, coalesce(min(queue), '')
			FROM (SELECT queue FROM river.river_job WHERE state = 'available'
				AND scheduled_at < now() - interval '%d seconds' LIMIT 1000) j`, int(maxOverdue.Seconds())),
		func(n float64) bool { return n > 0 },
		"no available job has waited for more than an hour", "%.0[1]f available jobs " +
			"have waited for more than an hour (queue %[2]s)",
		"check that a client works that queue, that the queue is not paused (river_queue.paused_at), " +
			"and that its concurrency suffices",
	},
	{
		"facts", `SELECT count(*)::float8, '' FROM dlq.job_facts WHERE at < now() - interval '1 minute'
			AND fact <> 'following'`,
		func(n float64) bool { return n > 0 },
		"applied within a minute", "%.0[1]f ends of redeliveries and retries made outside dlqd " +
			"have waited for more than a minute to be applied to their entries",
		"run dlqd serve --dlq-workers, or SELECT dlq.apply_facts(); check whether an open transaction locks those entries",
	},
	{
		"circuit breakers", `SELECT count(*)::float8, coalesce(string_agg(name, ', '), '') FROM dlq.circuit_breakers
			WHERE forced`,
		func(n float64) bool { return n > 0 },
		"no operator holds one open", "an operator holds open: %[2]s",
		"if they should close: dlqd breakers reset NAME",
	},
	{
		"automatic redelivery", `SELECT count(s.scope)::float8,
			coalesce('by ' || max(s.actor) || ' at ' || to_char(max(s.at) AT TIME ZONE 'UTC',
				'YYYY-MM-DD HH24:MI') || ' UTC' || coalesce(': ' || max(s.note), ''), '')
			FROM dlq.automatic_switches s WHERE s.scope = 'stop' AND s.name = ''`,
		func(n float64) bool { return n > 0 },
		"not stopped", "all of it is stopped, %[2]s",
		"if it should continue: dlqd automatic resume",
	},
	{
		"restored", `SELECT count(s.scope)::float8, coalesce(max(s.note), '') FROM dlq.automatic_switches s
			WHERE s.scope = 'stop' AND s.name = 'restored'`,
		func(n float64) bool { return n > 0 },
		"no restore of the database is detected",
		"the database was restored, and dlqd holds what it may have sent before: %[2]s",
		"dlqd restored shows what may be sent a second time: compare it with the receivers, then run dlqd restored resume",
	},
}

// sourceChecks check the sources, which read records of topics.
var sourceChecks = []check{
	{
		"sources", `SELECT count(*)::float8, coalesce(string_agg(f.source || CASE
				WHEN NOT f.running THEN ' is read by no process'
				WHEN f.error IS NOT NULL THEN format(' fails since %s UTC: %s', to_char(f.failing_since AT TIME ZONE 'UTC',
					'YYYY-MM-DD HH24:MI'), left(f.error, 300))
				ELSE format(' has %s offsets to read, and no progress since %s UTC', f.lag,
					to_char(f.behind_since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')) END, '; ' ORDER BY f.source), '')
			FROM dlq.source_figures() f WHERE NOT f.removed AND NOT f.paused AND (f.error IS NOT NULL
				OR NOT f.running OR f.behind_since < now() - interval '10 minutes')`,
		func(n float64) bool { return n > 0 },
		"each is read", "%[2]s",
		"dlqd sources list shows partitions and errors; run dlqd-full serve --dlq-workers with the policy that has the " +
			"source. To leave a source unread: dlqd sources pause NAME",
	},
	{
		"feeds", `SELECT count(*)::float8, coalesce(string_agg(f.feed || CASE
				WHEN NOT f.running THEN ' is published by no process'
				WHEN f.error IS NOT NULL THEN format(' fails since %s UTC: %s', to_char(f.error_at AT TIME ZONE 'UTC',
					'YYYY-MM-DD HH24:MI'), left(f.error, 300))
				ELSE format(' has %s entries to publish, the first since %s UTC', f.waiting,
					to_char(f.waiting_since AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')) END, '; ' ORDER BY f.feed), '')
			FROM dlq.feed_figures() f WHERE f.paused_at IS NULL AND (f.error IS NOT NULL OR NOT f.running
				OR f.waiting_since < now() - interval '10 minutes')`,
		func(n float64) bool { return n > 0 },
		"each is published", "%[2]s",
		"dlqd feeds list shows errors; run dlqd-full serve --dlq-workers with the policy that has the feed. To hold a " +
			"feed: dlqd feeds pause NAME",
	},
	{
		"lost records", `SELECT count(*)::float8, coalesce(string_agg(format('%s/%s of %s: %s to %s', a.detail ->> 'topic',
				a.detail ->> 'partition', substr(a.subject, 8), a.detail ->> 'first', (a.detail ->> 'next')::bigint - 1), '; '
				ORDER BY a.at), '')
			FROM (SELECT * FROM dlq.acts l WHERE l.act = 'offsets lost' AND l.at > now() - interval '7 days'
				ORDER BY l.at DESC LIMIT 10) a`,
		func(n float64) bool { return n > 0 },
		"the brokers had all offsets in the last 7 days", "brokers had deleted records before they were read: %[2]s",
		"increase the retention of these topics, and find out what delayed reading: \"dlqd audit\" lists the times",
	},
	{
		"removed sources", `SELECT count(*)::float8, coalesce(string_agg(format('%s (queue %s)', f.source, f.queue), ', '
				ORDER BY f.source), '')
			FROM dlq.source_figures() f WHERE f.removed
				AND (EXISTS (SELECT FROM dlq.dead_letter_open e WHERE e.queue = f.queue AND (e.record).topic IS NOT NULL)
					OR EXISTS (SELECT FROM dlq.dead_letter_returned e WHERE e.queue = f.queue))`,
		func(n float64) bool { return n > 0 },
		"none has open or returned entries", "the policy no longer has these sources; their records cannot be published, and " +
			"their returned entries stay: %[2]s",
		"put the source back into sources.yaml, or resolve or discard the entries of the queue",
	},
}

// Examine runs all checks. It first runs the checks on which all others depend. It runs the others only if dlqd works
// on the schema.
func Examine(ctx context.Context, m *postgres.Migrator) []Finding {
	findings := []Finding{database(ctx, m), rights(ctx, m), rowSecurity(ctx, m)}
	fit, err := m.Fit(ctx)
	if err != nil {
		return append(findings, Finding{
			Name: "schema", Detail: err.Error(),
			Do: "follow the message; the other checks need a schema that this dlqd works on",
		})
	}
	findings = append(findings, Finding{Name: "schema", OK: true, Detail: fit}, clock(ctx, m))
	for _, c := range slices.Concat(checks, sourceChecks) {
		findings = append(findings, c.run(ctx, m))
	}
	return append(findings, objects(ctx, m))
}

// replicaTimeout bounds the check of the read replica.
const replicaTimeout = 5 * time.Second

// Replica checks the read replica at url: it must be a standby of the pool's database, and its lag must be small.
// Replica returns no finding for an empty url.
func Replica(ctx context.Context, pool *pgxpool.Pool, url string) []Finding {
	if url == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, replicaTimeout)
	defer cancel()
	f := Finding{Name: "replica"}
	lag, err := replicaLag(ctx, pool, url)
	switch {
	case errors.Is(err, postgres.ErrNotStandby):
		f.Detail, f.Do = err.Error(), "make it a standby that follows the primary, or correct --replica-url: the primary "+
			"answers its reads"
	case err != nil:
		f.Detail, f.Do = checkFailed+err.Error(), "check that the replica is available; the primary answers its reads"
	case lag > maxSlotLag:
		f.Detail = fmt.Sprintf("is %d bytes of WAL behind the primary, which answers its reads", lag)
		f.Do = "on the replica, see pg_stat_wal_receiver, and pg_get_wal_replay_pause_state(); a long query delays the " +
			"replay for max_standby_streaming_delay"
	default:
		f.OK, f.Detail = true, fmt.Sprintf("is a standby of this database, %d bytes of WAL behind it", lag)
	}
	return []Finding{f}
}

// replicaLag returns the lag of the replica at url, in bytes of WAL.
func replicaLag(ctx context.Context, pool *pgxpool.Pool, url string) (int64, error) {
	primary, err := postgres.ServerOf(ctx, pool)
	if err != nil {
		return 0, err
	}
	standby, err := postgres.OpenStandby(ctx, url, 1, func(ctx context.Context, conn *pgx.Conn) error {
		server, err := postgres.ServerOf(ctx, conn)
		if err != nil {
			return err
		}
		return server.CheckStandbyOf(primary)
	})
	if err != nil {
		return 0, err
	}
	defer standby.Pool.Close()
	// Read the standby's position before the primary's. Otherwise the primary's position could be the older one.
	replayed, err := standby.Position(ctx)
	if err != nil {
		return 0, err
	}
	written, err := postgres.PositionOf(ctx, pool)
	if err == nil {
		err = replayed.CheckFollows(written)
	}
	return max(written.Bytes-replayed.Bytes, 0), err
}

func (c *check) run(ctx context.Context, m *postgres.Migrator) Finding {
	var n float64
	var text string
	if err := m.Pool.QueryRow(ctx, m.Schemas.Render(c.sql), pgx.QueryExecModeSimpleProtocol).Scan(&n, &text); err != nil {
		return Finding{Name: c.name, Detail: checkFailed + err.Error(), Do: useOtherRole}
	}
	if c.bad(n) {
		return Finding{Name: c.name, Detail: detail(m.Schemas.Render(c.found), n, text), Do: m.Schemas.Render(c.do)}
	}
	return Finding{Name: c.name, OK: true, Detail: detail(m.Schemas.Render(c.ok), n, text)}
}

// objects compares all objects in dlqd's schema with the objects that this program would create. The finding is OK if
// they cannot be compared: if the role lacks a right, the server is a standby, too few locks are free, or a newer dlqd
// installed the schema. It names at most maxDrift differences.
func objects(ctx context.Context, m *postgres.Migrator) Finding {
	const name = "tables and functions"
	drift, err := m.Drift(ctx)
	// 42501: the role lacks the right. 25006: the server is read-only.
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && (pgErr.Code == "42501" || pgErr.Code == "25006") {
		return Finding{Name: name, OK: true, Detail: "not compared with those of this dlqd, which needs a primary " +
			"server and " +
			"the right to create a temporary schema: " + pgErr.Message}
	}
	switch {
	case errors.Is(err, postgres.ErrManyLocks), errors.Is(err, postgres.ErrNotComparable):
		return Finding{Name: name, OK: true, Detail: "not compared with those of this dlqd: " + err.Error()}
	case err != nil:
		return Finding{
			Name: name, Detail: "comparing them with those of this dlqd failed: " + err.Error(),
			Do: "follow the message",
		}
	case len(drift) > 0:
		more := ""
		if len(drift) > maxDrift {
			more = fmt.Sprintf(" and %d more", len(drift)-maxDrift)
			drift = drift[:maxDrift]
		}
		return Finding{
			Name: name, Detail: "differ from those of this dlqd: " + strings.Join(drift, "; ") + more,
			Do: "undo the changes: of functions, views and triggers with dlqd detach, " +
				"then dlqd migrate up (or dlqd attach); of tables by hand",
		}
	}
	return Finding{Name: name, OK: true, Detail: "match those of this dlqd"}
}

// detail formats a number and a text. The extra argument permits formats that use neither.
func detail(format string, n float64, text string) string {
	return fmt.Sprintf(format+"%[3]s", n, text, "")
}

// clock compares the database's clock with this machine's clock, because both decide which entries are due.
func clock(ctx context.Context, m *postgres.Migrator) Finding {
	var there time.Time
	start := time.Now()
	if err := m.Pool.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&there); err != nil {
		return Finding{Name: "clock", Detail: checkFailed + err.Error(), Do: checkDatabase}
	}
	middle := start.Add(time.Since(start) / 2)
	skew := there.Sub(middle)
	if skew.Abs() > maxClockSkew {
		return Finding{
			Name:   "clock",
			Detail: fmt.Sprintf("the database's clock is %s off this machine's", skew.Round(time.Millisecond)),
			Do:     "synchronize both by NTP",
		}
	}
	return Finding{
		Name: "clock", OK: true,
		Detail: fmt.Sprintf("%s off the database's clock", skew.Abs().Round(time.Millisecond)),
	}
}

// database reports which database was checked.
func database(ctx context.Context, m *postgres.Migrator) Finding {
	text, err := m.Where(ctx)
	if err != nil {
		return Finding{Name: "database", Detail: checkFailed + err.Error(), Do: checkDatabase}
	}
	return Finding{Name: "database", OK: true, Detail: fmt.Sprintf("%s; River in schema %s, dlqd in schema %s", text,
		m.Schemas.River, m.Schemas.DLQ)}
}

// rights checks every right that the parts of dlqd need (docs/attach.md).
func rights(ctx context.Context, m *postgres.Migrator) Finding {
	role, missing, err := m.MissingRights(ctx, postgres.Parts()...)
	if err != nil {
		return Finding{Name: "rights", Detail: checkFailed + err.Error(), Do: useOtherRole}
	}
	var lacking, grants []string
	held := []string{"role " + role + " has all that are required"}
	for _, m := range missing {
		if m.Optional {
			what := m.Object
			if m.On != "role" {
				what = strings.Join(m.Privileges, ", ") + " on " + m.Object
			}
			held = append(held, "without "+what+" it does not "+m.Why)
			continue
		}
		lacking = append(lacking, m.Part+": to "+m.Why)
		grants = append(grants, m.GrantSQL)
	}
	if len(lacking) > 0 {
		return Finding{
			Name: "rights", Detail: "role " + role + " lacks rights for " + strings.Join(lacking, "; "),
			Do: strings.Join(grants, " "),
		}
	}
	return Finding{Name: "rights", OK: true, Detail: strings.Join(held, "; ")}
}

// rowSecurity reports tables in which row level security hides jobs from dlqd.
func rowSecurity(ctx context.Context, m *postgres.Migrator) Finding {
	tables, err := m.Hidden(ctx)
	if err != nil {
		return Finding{Name: "row level security", Detail: checkFailed + err.Error(), Do: useOtherRole}
	}
	if len(tables) > 0 {
		return Finding{
			Name: "row level security", Detail: "hides rows of " + strings.Join(tables, ", ") +
				" from dlqd, so that everything but capture fails",
			Do: "for dlqd's role: ALTER ROLE … BYPASSRLS",
		}
	}
	return Finding{Name: "row level security", OK: true, Detail: "hides none of River's rows from dlqd"}
}
