-- name: FilterWhere :one
SELECT dlq.filter_where(@filter::jsonb)::text AS condition;

-- name: FilterBounds :one
-- FilterBounds returns the range of ids that a filter can select: first <= id < below. The nil UUID means no bound.
SELECT coalesce(b.first, '00000000-0000-0000-0000-000000000000')::uuid AS first,
    coalesce(b.below, '00000000-0000-0000-0000-000000000000')::uuid AS below FROM dlq.filter_bounds(@filter::jsonb) b;

-- name: FilterValues :many
-- FilterValues returns completions for the value of a filter's field.
SELECT v.value::text AS value, coalesce(v.note, '')::text AS note
FROM dlq.filter_values(@field::text, @prefix::text, @most::integer) v;

-- name: Backlog :many
-- Backlog counts the open entries in the caller's scope by status, queue and class. Without a scope, up to 20,000 filed
-- entries are counted from the index dead_letter_open_backlog alone. If there are more, the counts come from the
-- rollups, which are about a second old and at most ten, or older if there were no moves since. Unfiled failures that
-- will become entries are counted up to 10,000; more is true if that limit was reached.
WITH size AS MATERIALIZED (SELECT coalesce(sum(r.pending + r.processing + r.manual), 0) > 20000
    AND (SELECT s.at > now() - interval '10 seconds' OR NOT dlq.has_moves(s.snapshot, txid_current_snapshot(), s.since)
         FROM dlq.rollup_state s) AS large FROM dlq.rollup_backlog r)
SELECT b.status::text AS status, b.queue::text AS queue, b.error_class::text AS error_class,
    sum(b.entries)::bigint AS entries, bool_or(b.more)::boolean AS more
FROM (
    SELECT o.status, o.queue, coalesce(o.error_class, 'undecided') AS error_class, count(*) AS entries, false AS more
    FROM dlq.dead_letter_open o WHERE (SELECT dlq.scope()) IS NULL AND NOT (SELECT large FROM size) GROUP BY o.status,
        o.queue, o.error_class
    UNION ALL
    SELECT s.status, r.queue, r.error_class, s.entries, false
    FROM dlq.rollup_backlog r CROSS JOIN LATERAL (VALUES ('dlq_pending'::dlq.dead_letter_status, r.pending),
        ('dlq_processing', r.processing), ('dlq_manual', r.manual)) s (status, entries)
    WHERE (SELECT dlq.scope()) IS NULL AND (SELECT large FROM size) AND s.entries > 0
    UNION ALL
    SELECT o.status, o.queue, coalesce(o.error_class, 'undecided'), count(*), false
    FROM dlq.dead_letter_open o WHERE (SELECT dlq.scope()) IS NOT NULL
        AND dlq.in_patterns(o.queue, o.kind, (SELECT dlq.scope_patterns(dlq.scope()))) GROUP BY o.status,
            o.queue, o.error_class
    UNION ALL
    SELECT 'dlq_pending', u.queue, 'undecided', count(*), sum(count(*)) OVER () >= 10000
    FROM (SELECT i.queue FROM dlq.dead_letter_inbox i
          WHERE NOT dlq.is_repeat(i.river_job_id, i.job_created_at)
              AND ((SELECT dlq.scope()) IS NULL
                  OR dlq.in_patterns(i.queue, i.kind, (SELECT dlq.scope_patterns(dlq.scope()))))
          LIMIT 10000) u
    GROUP BY u.queue
) b
GROUP BY b.status, b.queue, b.error_class
ORDER BY b.status, b.queue, b.error_class;

-- name: OldestOpen :one
SELECT created_at FROM dlq.dead_letter_queue WHERE stage IN ('inbox', 'open')
    AND ((SELECT dlq.scope()) IS NULL OR dlq.in_patterns(queue, kind, (SELECT dlq.scope_patterns(dlq.scope()))))
        ORDER BY id LIMIT 1;

-- name: EnsureMonth :one
SELECT dlq.ensure_partition(('dlq.dead_letter_' || substr(@status::text, 5))::regclass,
    @month::timestamptz)::boolean AS exists;

-- name: RestoreEntries :one
SELECT dlq.restore_entries(@entries::jsonb, @until::timestamptz, @actor::text,
    nullif(@note::text, ''))::integer AS entries;

-- name: ActWhere :one
-- ActWhere applies an action to the next batch of the entries that a filter selects.
SELECT coalesce(a.looked, 0)::integer AS looked, coalesce(a.changed, 0)::integer AS changed,
    coalesce(a.last, '00000000-0000-0000-0000-000000000000')::uuid AS last, a.operation::uuid AS operation
FROM dlq.act_where(@action::text, @filter::jsonb, @actor::text, nullif(@note::text, ''), @args::jsonb,
    @all_entries::boolean, @max_entries::integer, sqlc.narg('after')::uuid, @below::uuid) a;

-- name: NewID :one
-- NewID returns an id with the current time. It is greater than the ids of entries that failed earlier, if the clocks
-- agree.
SELECT dlq.uuid_v7()::uuid AS id;

-- name: Preview :many
SELECT p.queue::text AS queue, p.error_type::text AS error_type, p.age::text AS age, p.entries::bigint AS entries
FROM dlq.preview(@filter::jsonb) p;

-- name: CountUpTo :one
-- CountUpTo counts the entries that a filter selects, up to @most. With @replayable, it counts only entries that a
-- replay run would take.
SELECT count(*) FROM dlq.find_ids(CASE WHEN @replayable::boolean THEN dlq.replayable(@filter::jsonb)
    ELSE @filter::jsonb END, @most::integer);

-- name: Count :one
SELECT coalesce(sum(p.entries), 0)::bigint AS entries
FROM dlq.preview(CASE WHEN @replayable::boolean THEN dlq.replayable(@filter::jsonb) ELSE @filter::jsonb END) p;

-- name: Replay :one
SELECT dlq.replay(@id::uuid, @actor::text, nullif(@note::text, ''), NULL, @force::boolean,
    nullif(@destination::text, ''), nullif(@payload::text, ''), nullif(@checkpoint::text, ''))::bigint AS job;

-- name: Move :exec
-- Move makes an operator's move of one entry (discard, expire, resolve, park, unpark or reopen), and records it as an
-- operation.
SELECT dlq.act_on_one(@verb::text, @id::uuid, @actor::text, nullif(@note::text, ''),
    jsonb_build_object('operation', @operation::uuid));

-- name: Undo :one
-- Undo undoes the next batch of an operation.
SELECT u.looked::integer AS looked, u.changed::integer AS changed, u.became::jsonb AS became,
    coalesce(u.last, 'epoch')::timestamptz AS last, coalesce(u.last_id, 0)::bigint AS last_id
FROM dlq.undo(@operation::uuid, nullif(@note::text, ''), @actor::text, @most::integer, sqlc.narg('after')::timestamptz,
    @after_id::bigint, @undo::uuid) u;

-- name: Operation :one
SELECT o.id::uuid AS id, o.action::text AS action, o.filter::jsonb AS filter, o.args::jsonb AS args,
       o.actor::text AS actor, o.db_user::text AS db_user, coalesce(o.origin, '')::text AS origin,
       coalesce(o.note, '')::text AS note, coalesce(o.undoes, '00000000-0000-0000-0000-000000000000')::uuid AS undoes,
       o.started_at::timestamptz AS started_at, o.last_at::timestamptz AS last_at, o.looked::bigint AS looked,
       o.changed::bigint AS changed, o.unchanged::jsonb AS unchanged
FROM dlq.operation(@id::uuid) o;

-- name: OperationEntries :many
SELECT e.entry_id::uuid AS entry_id, e.changed::boolean AS changed, coalesce(e.reason, '')::text AS reason
FROM dlq.operation_entries(@id::uuid, @most::integer, sqlc.narg('after')::uuid) e;

-- name: Redeliver :many
-- Redeliver makes jobs for entries that the transaction has claimed. For an entry without a new job, verdict says why.
SELECT r.entry_id::uuid AS entry_id, r.verdict::text AS verdict, coalesce(r.job_id, 0)::bigint AS job_id
FROM dlq.redeliver(@ids::uuid[], @actor::text, @reason::text, p_config_version => nullif(@config_version::text, '')) r;

-- name: SweepRedeliveries :one
SELECT l.looked::integer AS looked, coalesce(l.last, '00000000-0000-0000-0000-000000000000')::uuid AS last,
    l.settled::integer AS settled, l.requeued::integer AS requeued
FROM dlq.sweep_redeliveries(1000, @after::uuid) l;

-- name: Protect :exec
-- Protect hides columns from the role dlq_reader, and masked values from every role but dlqd's, if
-- the settings have changed.
SELECT dlq.protect(@columns::text[], @masked::jsonb) WHERE NOT EXISTS (
    SELECT FROM dlq.settings s WHERE s.key = 'sensitive_columns' AND s.value = array_to_string(@columns::text[], ','))
    OR NOT EXISTS (SELECT FROM dlq.settings s WHERE s.key = 'sensitive' AND s.value = (@masked::jsonb)::text);

-- name: RecordReveal :exec
SELECT dlq.record_reveal(@id::uuid, @note::text, @actor::text);

-- name: RecordExport :exec
SELECT dlq.record_export(@filter::jsonb, @revealed::boolean, @actor::text, nullif(@note::text, ''));

-- name: ChoosesAll :one
SELECT dlq.chooses_all(@filter::jsonb)::boolean AS everything;

-- name: PublishPolicy :exec
-- PublishPolicy writes the version of the current policy, which audit rows contain, the operations that need approval,
-- which dlq.require_approval reads, the work that replay runs skip by default, and where jobs have their ordering keys.
SELECT dlq.publish_policy(@version::text, @approvals::text, @actor::text, @skips::text, @keys::text);

-- name: RecordAct :exec
SELECT dlq.record_act(@subject::text, @act::text, @actor::text, nullif(@note::text, ''));

-- name: BeginErasure :one
SELECT dlq.erase_begin(@filter::jsonb, nullif(@note::text, ''), @actor::text)::uuid AS id, now()::timestamptz AS at;

-- name: ReconcileAll :one
-- ReconcileAll scans a batch of the jobs that River keeps. It returns true if the scan is done and began at @since or
-- later: all earlier failures are filed then.
SELECT (r.done AND r.began_at >= @since::timestamptz)::boolean AS done FROM dlq.reconcile(p_whole => true) r;

-- name: EraseStep :one
-- EraseStep erases the next batch. It returns the nil UUID if none is left.
SELECT coalesce(dlq.erase_step(@erasure::uuid, @filter::jsonb, sqlc.narg('after')::uuid),
    '00000000-0000-0000-0000-000000000000')::uuid AS last;

-- name: FinishErasure :one
-- FinishErasure adds the results of the erasure in archives to the record of an erasure. If some data was skipped
-- (under_way: entries that were locked or being redelivered, and replay runs or approvals that had not ended),
-- finished_at stays null.
UPDATE dlq.erasures SET archived = @archived, archives = @archives, archive = @archive, jobs = jobs + @jobs,
    finished_at = CASE WHEN under_way = 0 THEN clock_timestamp() END
WHERE id = @id RETURNING jobs, finished_at;

-- name: EraseStatistics :one
SELECT dlq.erase_statistics(@erasure::uuid)::text[] AS tables;

-- name: EraseArchived :one
SELECT dlq.erase_archived(@entries::jsonb)::integer AS jobs;

-- name: WereErased :many
SELECT e.id::uuid AS id FROM dlq.were_erased(@ids::uuid[]) e (id);

-- name: EraseRows :many
-- EraseRows takes rows of the archive and returns the ones that a filter selects, without the data that an erasure
-- removes.
SELECT r.id::uuid AS id, r.line::text AS line FROM dlq.erase_rows(@entries::jsonb, @filter::jsonb) r;

-- name: ClosedMonths :many
-- ClosedMonths returns the months of closed entries, newest first. ahead is true for a month that begins in the future,
-- so that no entry has closed in it, even if the clocks of machines differ.
SELECT m.stage::text AS stage, m.begins_at::timestamptz AS begins_at,
    (m.begins_at > now() + interval '1 day')::boolean AS ahead
FROM dlq.closed_months() m;

-- name: Views :many
SELECT v.name::text AS name, v.owner::text AS owner, v.query::text AS query, v.columns::text[] AS columns,
    v.sort::text AS "order", v.shared::boolean AS shared, v.created_at::timestamptz AS created_at,
    v.updated_at::timestamptz AS updated_at
FROM dlq.views(@actor::text) v;

-- name: OrderViews :exec
SELECT dlq.order_views(@names::text[], @actor::text);

-- name: SaveView :exec
SELECT dlq.save_view(@name::text, @query::text, @columns::text[], @sort::text, @shared::boolean, @actor::text);

-- name: DeleteView :exec
SELECT dlq.delete_view(@name::text, nullif(@owner::text, ''), @actor::text);

-- name: ReviewNext :one
-- ReviewNext hands out one of these entries to an operator. It returns the nil UUID if none is free.
SELECT coalesce(dlq.review_next(@ids::uuid[], @actor::text), '00000000-0000-0000-0000-000000000000')::uuid AS id;

-- name: InReview :many
SELECT r.entry_id::uuid AS entry_id, r.actor::text AS actor, r.at::timestamptz AS at
FROM dlq.in_review(@ids::uuid[]) r;

-- name: ReservePace :one
-- ReservePace reserves places in a stream of redeliveries that all processes share.
SELECT p.first_at::timestamptz AS first_at, p.granted::integer AS granted
FROM dlq.reserve_pace(@name::text, @rate::float8, @count::integer, @now::timestamptz, sqlc.narg('within')::interval) p;
