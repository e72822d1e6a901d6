-- name: ActiveReplays :many
-- ActiveReplays returns the running runs. It returns none if the database was restored.
SELECT id FROM dlq.replay_runs WHERE status = 'running' AND NOT (SELECT dlq.is_restored()) ORDER BY id;

-- name: LockReplay :one
-- LockReplay locks a run, so that one process at a time takes its next batch; other processes skip the run. ended and
-- failed count the outcomes of the run's last redeliveries.
SELECT r.id, r.filter, r.newest_first, r.batch_size, r.rate, r.concurrency, r.patch, r.merge_patch,
       coalesce(r.checkpoint, '')::text AS checkpoint, r.stop_at, r.stop_of, r.cursor, r.progressive,
       r.skip_stale, r.skip_superseded, coalesce(r.skips, '{}')::jsonb AS skips, r.for_fix,
       coalesce(r.paces, '{}')::jsonb AS paces, coalesce(r.destination, '')::text AS destination,
       coalesce(r.queue, '')::text AS queue, clock_timestamp()::timestamptz AS now,
       (SELECT count(*) FROM (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = r.id
           AND e.outcome IN ('succeeded', 'failed') AND e.ended_at > r.judged_from
                              ORDER BY e.ended_at DESC LIMIT r.stop_of) l) AS ended,
       (SELECT count(*) FILTER (WHERE l.outcome = 'failed') FROM (SELECT e.outcome FROM dlq.replay_run_entries e
           WHERE e.run_id = r.id AND e.outcome IN ('succeeded', 'failed') AND e.ended_at > r.judged_from
                              ORDER BY e.ended_at DESC LIMIT r.stop_of) l) AS failed
FROM dlq.replay_runs r WHERE r.id = @id AND r.status = 'running' FOR UPDATE OF r SKIP LOCKED;

-- name: ReplayNext :many
-- ReplayNext returns the next entries of a run after its cursor. An entry that waited for its predecessor of the
-- ordering key may be before the cursor.
(SELECT e.entry_id FROM dlq.replay_run_entries e
 WHERE NOT @newest_first::boolean AND e.run_id = @id AND e.job_id IS NULL AND e.outcome IS NULL AND e.behind IS NULL
     AND e.entry_id > coalesce(sqlc.narg('after')::uuid, '00000000-0000-0000-0000-000000000000')
 ORDER BY e.entry_id LIMIT @most::integer)
UNION ALL
(SELECT e.entry_id FROM dlq.replay_run_entries e
 WHERE @newest_first::boolean AND e.run_id = @id AND e.job_id IS NULL AND e.outcome IS NULL AND e.behind IS NULL
     AND e.entry_id < coalesce(sqlc.narg('after')::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
 ORDER BY e.entry_id DESC LIMIT @most::integer);

-- name: NextRescued :many
-- NextRescued returns, for each queue, the first entry of a run that waits because its job was rescued twice or more:
-- such entries are sent one at a time. In a progressive run, the group of the entry must be going, and a group sends no
-- more than its step has places left.
SELECT p.entry_id
FROM (SELECT n.entry_id, n.group_number, row_number() OVER (PARTITION BY n.group_number ORDER BY n.entry_id) AS place
      FROM (SELECT DISTINCT ON (e.queue) w.entry_id, w.group_number
            FROM (SELECT r.entry_id, r.group_number FROM dlq.replay_run_entries r
                  WHERE r.run_id = @id AND r.outcome IS NULL AND r.job_id IS NULL AND r.behind = r.entry_id
                      AND (r.group_number IS NULL OR EXISTS (SELECT FROM dlq.replay_run_groups g
                          WHERE g.run_id = r.run_id AND g.number = r.group_number AND g.state = 'going'
                              AND g.sent < g.quota))
                  ORDER BY r.entry_id LIMIT 1000) w
            LEFT JOIN dlq.dead_letter_queue e ON e.id = w.entry_id
                AND (e.closed_at IS NULL OR e.closed_at >= dlq.captured_at(w.entry_id) - interval '1 day')
            ORDER BY e.queue, w.entry_id) n) p
LEFT JOIN dlq.replay_run_groups g ON g.run_id = @id AND g.number = p.group_number
WHERE p.group_number IS NULL OR p.place <= g.quota - g.sent
ORDER BY p.entry_id
LIMIT @most::integer;

-- name: NextOfGroups :many
-- NextOfGroups returns the next entries of a progressive run: from each group that is going, as many as its step still
-- allows. @only (if not null) and @other_than are queues of groups; '' stands for the group of all other failure
-- groups.
(SELECT e.entry_id FROM dlq.replay_run_groups g CROSS JOIN LATERAL (
     SELECT r.entry_id FROM dlq.replay_run_entries r
     WHERE r.run_id = g.run_id AND r.group_number = g.number AND r.outcome IS NULL AND r.job_id IS NULL
         AND r.behind IS NULL
     ORDER BY r.entry_id LIMIT least(greatest(g.quota - g.sent, 0), @most::integer)) e
 WHERE NOT @newest_first::boolean AND g.run_id = @id AND g.state = 'going'
     AND coalesce(coalesce(g.queue, '') = ANY (sqlc.narg('only')::text[]), true)
     AND coalesce(g.queue, '') <> ALL (@other_than::text[])
 ORDER BY e.entry_id LIMIT @most::integer)
UNION ALL
(SELECT e.entry_id FROM dlq.replay_run_groups g CROSS JOIN LATERAL (
     SELECT r.entry_id FROM dlq.replay_run_entries r
     WHERE r.run_id = g.run_id AND r.group_number = g.number AND r.outcome IS NULL AND r.job_id IS NULL
         AND r.behind IS NULL
     ORDER BY r.entry_id DESC LIMIT least(greatest(g.quota - g.sent, 0), @most::integer)) e
 WHERE @newest_first::boolean AND g.run_id = @id AND g.state = 'going'
     AND coalesce(coalesce(g.queue, '') = ANY (sqlc.narg('only')::text[]), true)
     AND coalesce(g.queue, '') <> ALL (@other_than::text[])
 ORDER BY e.entry_id DESC LIMIT @most::integer);

-- name: KindsToSend :many
-- KindsToSend returns the kinds of application jobs among the next 100 entries of a group.
SELECT DISTINCT e.job_kind FROM dlq.dead_letter_queue e
WHERE e.id = ANY (ARRAY(SELECT r.entry_id FROM dlq.replay_run_entries r
                        WHERE r.run_id = @id AND r.group_number = @number::integer AND r.outcome IS NULL
                            AND r.job_id IS NULL AND r.behind IS NULL
                        ORDER BY r.entry_id LIMIT 100))
    AND e.stage IN ('inbox', 'open', 'failed') AND e.job_kind <> 'dlqd_message'
ORDER BY 1;

-- name: CountSent :exec
-- CountSent adds the given entries, which were just sent, to the counts of their groups.
UPDATE dlq.replay_run_groups g SET sent = g.sent + s.sent,
    active_at = CASE WHEN g.sent > g.succeeded + g.failed THEN g.active_at ELSE clock_timestamp() END
FROM (SELECT e.group_number AS number, count(*) AS sent FROM dlq.replay_run_entries e
      WHERE e.run_id = @id AND e.entry_id = ANY (@ids::uuid[]) AND e.job_id IS NOT NULL GROUP BY e.group_number) s
WHERE g.run_id = @id AND g.number = s.number;

-- name: UnsettledReplays :many
-- UnsettledReplays returns the runs with outcomes that may still have to be judged. It returns none if the database was
-- restored. to_steer says whether a progressive run has outcomes to count or groups to decide about.
SELECT r.id, r.progressive, r.status::text AS status,
    (r.progressive AND (r.status NOT IN ('paused', 'stopped')
        OR EXISTS (SELECT FROM dlq.replay_run_groups g WHERE g.run_id = r.id AND g.state IN ('going', 'ended'))
        OR EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = r.id AND e.group_number IS NOT NULL
            AND e.outcome IS NOT NULL AND NOT e.counted)))::boolean AS to_steer
FROM dlq.replay_runs r
WHERE r.unsettled AND NOT (SELECT dlq.is_restored()) ORDER BY r.id;

-- name: UnjudgedFailures :many
-- UnjudgedFailures returns failed redeliveries of a run that have not been judged. has_failure says whether the entry
-- still has the failure of this redelivery; if not, the other columns are empty. The columns are those of the worker's
-- ClaimDue.
SELECT r.entry_id, (e.id IS NOT NULL)::boolean AS has_failure, coalesce(e.queue, '')::text AS queue,
       coalesce(e.kind, '')::text AS kind, coalesce(e.source, '')::text AS source,
       coalesce(dlq.judged_message(e.error_message), '')::text AS error_message,
       coalesce(e.error_type, '')::text AS error_type, coalesce(e.error_code, '')::text AS error_code,
       coalesce(e.error_title, '')::text AS error_title, coalesce(e.error_class, '')::text AS error_class,
       coalesce(e.reported_class, '')::text AS reported_class,
       coalesce(dlq.trace_ends(e.error_stack_trace), '')::text AS error_stack_trace,
       dlq.judged_context(e.error_context)::jsonb AS error_context, coalesce(e.job_kind, '')::text AS job_kind,
       CASE WHEN @read_messages::boolean THEN dlq.judged_event(coalesce(e.edited_event, e.original_event)) END::jsonb
           AS message
FROM (SELECT u.entry_id, u.job_id FROM dlq.replay_run_entries u
      WHERE u.run_id = @id AND u.outcome = 'failed' AND u.error_class IS NULL
      ORDER BY u.entry_id LIMIT @most::integer) r
LEFT JOIN dlq.dead_letter_queue e ON e.id = r.entry_id AND e.stage <> 'inbox'
    AND (e.closed_at IS NULL OR e.closed_at >= dlq.captured_at(r.entry_id) - interval '1 day')
    AND e.replay_attempts -> -1 -> 'jobId' = to_jsonb(r.job_id);

-- name: WriteJudgements :exec
-- WriteJudgements writes the class and the fingerprint of failures. The redeliveries @lost were lost with their
-- process.
UPDATE dlq.replay_run_entries r SET error_class = d.error_class, fingerprint = nullif(d.fingerprint, ''),
    reason = CASE WHEN r.entry_id = ANY (@lost::uuid[]) THEN 'process_lost' END
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@error_classes::text[]) AS error_class,
          unnest(@fingerprints::text[]) AS fingerprint) d
WHERE r.run_id = @run AND r.entry_id = d.id AND r.outcome = 'failed' AND r.error_class IS NULL;

-- name: LockProgressive :one
-- LockProgressive locks a run, so that one process at a time decides about its groups; other processes skip the run.
SELECT r.id, r.status::text AS status, extract(epoch FROM r.step_deadline)::float8 AS step_deadline,
    coalesce(r.destination, '')::text AS destination, coalesce(r.queue, '')::text AS queue, r.created_at,
    coalesce(r.rate, 0)::float8 AS rate, coalesce(r.paces, '{}')::jsonb AS paces,
    clock_timestamp()::timestamptz AS now
FROM dlq.replay_runs r WHERE r.id = @id AND r.unsettled FOR UPDATE OF r SKIP LOCKED;

-- name: TakeOutcomes :many
-- TakeOutcomes marks outcomes of a progressive run as counted, the earliest first, and returns them. The outcome of a
-- redelivery that was lost with its process is lost.
WITH due AS MATERIALIZED (
    SELECT e.entry_id FROM dlq.replay_run_entries e
    WHERE e.run_id = @id AND e.group_number IS NOT NULL AND e.outcome IS NOT NULL AND NOT e.counted
        AND (e.outcome <> 'failed' OR e.error_class IS NOT NULL)
    ORDER BY e.ended_at, e.entry_id LIMIT @most::integer
), taken AS (
    UPDATE dlq.replay_run_entries e SET counted = true FROM due
    WHERE e.run_id = @id AND e.entry_id = due.entry_id
    RETURNING e.entry_id, e.group_number, e.outcome, e.ended_at, e.fingerprint, e.error_class, e.reason
)
SELECT t.group_number::integer AS number,
    CASE WHEN t.outcome = 'failed' AND t.reason = 'process_lost' THEN 'lost' ELSE t.outcome END::text AS outcome,
    coalesce(t.fingerprint, '')::text AS fingerprint,
    coalesce(t.error_class, '')::text AS error_class
FROM taken t ORDER BY t.ended_at, t.entry_id;

-- name: RunGroups :many
-- RunGroups returns the groups of a progressive run. quiet is the number of seconds since the last outcome.
SELECT g.number, coalesce(g.queue, '')::text AS queue, coalesce(g.fingerprint, '')::text AS fingerprint,
    coalesce(g.error_type, '')::text AS error_type,
    coalesce(dlq.title_of_group(g.queue, g.fingerprint), '')::text AS title, g.known, g.state,
    coalesce(g.reason, '')::text AS reason, g.step, g.quota, g.entries, g.sent, g.skipped, g.succeeded, g.failed,
    g.from_succeeded, g.from_failed, g.let_go_at,
    extract(epoch FROM clock_timestamp() - g.active_at)::float8 AS quiet
FROM dlq.replay_run_groups g WHERE g.run_id = @id ORDER BY g.number;

-- name: SaveGroup :one
-- SaveGroup writes the counts of a group. The test of the group ignores lost redeliveries, and its step sends other
-- entries for the first @most_lost of them. It returns the quota.
UPDATE dlq.replay_run_groups g SET succeeded = @succeeded, failed = @failed, skipped = @skipped,
    active_at = clock_timestamp(), from_failed = g.from_failed + @lost::bigint,
    quota = greatest(g.quota, least(g.quota + @lost::bigint, g.entries - @skipped,
        dlq.replay_quota(g.entries - @skipped, g.step) + @most_lost::bigint))
WHERE g.run_id = @id AND g.number = @number
RETURNING g.quota;

-- name: MoveGroup :exec
SELECT dlq.replay_group_move(@id::uuid, @number::integer, @move::text, @actor::text, @reason::text);

-- name: Postponed :one
-- Postponed counts redeliveries of a group that are made again later, because their destination asked for fewer
-- requests, and returns when the first and the last of them are due.
SELECT count(*) AS redeliveries, coalesce(min(j.scheduled_at), 'epoch')::timestamptz AS first,
    coalesce(max(j.scheduled_at), 'epoch')::timestamptz AS last
FROM dlq.replay_run_entries e JOIN river.river_job j ON j.id = e.job_id
WHERE e.run_id = @id AND e.group_number = @number::integer AND e.outcome IS NULL AND e.job_id IS NOT NULL
    AND j.state IN ('available', 'scheduled') AND j.metadata ? 'dlq:postponed';

-- name: SetPace :exec
-- SetPace writes the pace of a run to a destination, and records the decision. If the rate falls, no place that was
-- taken at the greater rate counts any more (see dlq.run_place).
WITH paced AS (UPDATE dlq.replay_runs SET paces = coalesce(paces, '{}') || @pace::jsonb WHERE id = @id),
freed AS (DELETE FROM dlq.paces
    WHERE @fell::boolean AND name = 'replay:' || @id::uuid || ':' || @destination::text)
SELECT dlq.record_act('replay run ' || @id::uuid, @act::text, @actor::text, @reason::text,
    jsonb_build_object('destination', @destination::text, 'reason', @reason::text));

-- name: SkipEnded :one
-- SkipEnded skips entries of groups that an operator ended, and returns how many. An entry that waits for a predecessor
-- in another group is skipped once the predecessor has ended.
WITH next AS MATERIALIZED (
    (SELECT e.entry_id, g.reason FROM dlq.replay_run_groups g CROSS JOIN LATERAL (
         SELECT r.entry_id FROM dlq.replay_run_entries r
         WHERE r.run_id = g.run_id AND r.group_number = g.number AND r.outcome IS NULL AND r.job_id IS NULL
             AND r.behind IS NULL
         ORDER BY r.entry_id LIMIT @most::integer) e
     WHERE g.run_id = @id AND g.state = 'ended' LIMIT @most::integer)
    UNION ALL
    SELECT r.entry_id, g.reason FROM dlq.replay_run_groups g
    JOIN dlq.replay_run_entries r ON r.run_id = g.run_id AND r.behind = r.entry_id AND r.group_number = g.number
        AND r.outcome IS NULL AND r.job_id IS NULL
    WHERE g.run_id = @id AND g.state = 'ended'
), skipped AS (
    UPDATE dlq.replay_run_entries r SET outcome = 'skipped', ended_at = clock_timestamp(), behind = NULL,
        detail = 'its group was ended: ' || n.reason, reason = 'group_ended'
    FROM next n WHERE r.run_id = @id AND r.entry_id = n.entry_id
    RETURNING r.entry_id
), counted AS (
    UPDATE dlq.replay_runs r SET skipped = r.skipped + (SELECT count(*) FROM skipped)
    WHERE r.id = @id AND EXISTS (SELECT FROM skipped)
)
SELECT count(*) FROM skipped;

-- name: Unsettled :one
-- Unsettled returns whether a run still waits for outcomes or has failures that are not judged yet. It is false for a
-- run that was settled before or that an earlier version of dlqd started.
SELECT (r.unsettled AND (r.status IN ('running', 'paused', 'stopped')
     OR EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = r.id AND e.outcome IS NULL
         AND e.job_id IS NOT NULL)
     OR EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = r.id AND e.outcome = 'failed'
         AND e.error_class IS NULL)
     OR EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = r.id AND e.group_number IS NOT NULL
         AND e.outcome IS NOT NULL AND NOT e.counted)))::boolean AS unsettled
FROM dlq.replay_runs r WHERE r.id = @id;

-- name: Settle :exec
UPDATE dlq.replay_runs SET unsettled = false, result = dlq.replay_result(@id::uuid),
    figures = dlq.replay_figures(@id::uuid)
WHERE id = @id;

-- name: ReleaseFailed :many
-- ReleaseFailed makes entries due that wait for the end of a run or group (0 stands for any group): entries that failed
-- again, and entries that the run did not send. It skips locked entries, which come due later by themselves. It returns
-- the last entry that it looked at, or no row if there is none after @after.
WITH page AS MATERIALIZED (
    SELECT e.entry_id FROM dlq.replay_run_entries e
    WHERE e.run_id = @id AND (e.outcome = 'failed' OR e.job_id IS NULL) AND e.entry_id > @after::uuid
        AND @group_number::integer IN (0, e.group_number)
    ORDER BY e.entry_id LIMIT @most::integer
), locked AS MATERIALIZED (
    SELECT o.id FROM dlq.dead_letter_open o JOIN page p ON p.entry_id = o.id
    WHERE o.status = 'dlq_pending' AND o.waiting_for = 'run'
    ORDER BY o.id FOR UPDATE OF o SKIP LOCKED
), released AS (
    UPDATE dlq.dead_letter_open o SET waiting_for = NULL, next_retry_at = now(),
        move = jsonb_build_object('actor', @actor::text, 'reason', CASE @group_number::integer
            WHEN 0 THEN 'replay run ' || @id::uuid || ' has ended'
            ELSE 'group ' || @group_number::integer || ' of replay run ' || @id::uuid || ' was ended' END)
    FROM locked l WHERE o.id = l.id
)
SELECT p.entry_id FROM page p ORDER BY p.entry_id DESC LIMIT 1;

-- name: RunDecisions :many
-- RunDecisions returns the last decisions about groups of a run and about its rate to a destination (group 0), the
-- newest first.
SELECT a.at, a.act, a.actor,
    coalesce(dlq.masked_text(nullif(a.note, a.detail ->> 'reason'), dlq.mask(false)), '')::text AS note,
    coalesce((a.detail ->> 'group')::integer, 0)::integer AS number, coalesce(a.detail ->> 'reason', '')::text AS reason
FROM dlq.acts a
WHERE a.subject = 'replay run ' || @id::uuid AND a.subject LIKE 'replay run %' AND a.detail ?| '{group,destination}'
ORDER BY a.at DESC, a.id DESC LIMIT @most::integer;

-- name: SteerReplay :exec
SELECT CASE @verb::text
    WHEN 'go-on' THEN dlq.replay_go_on(@id::uuid, sqlc.narg('groups')::integer[], @actor::text, nullif(@note::text, ''))
    WHEN 'back' THEN dlq.replay_back(@id::uuid, sqlc.narg('groups')::integer[], @actor::text, nullif(@note::text, ''))
    ELSE dlq.replay_end(@id::uuid, sqlc.narg('groups')::integer[], @actor::text, nullif(@note::text, '')) END;

-- name: FindIDs :many
SELECT f.id::uuid AS id FROM dlq.find_ids(@filter::jsonb, @max_entries::integer, NULL, @newest_first::boolean) f (id);

-- name: GroupOutcomes :many
-- GroupOutcomes counts the outcomes of the last redeliveries of failure groups in replay runs.
SELECT o.queue::text AS queue, o.fingerprint::text AS fingerprint, o.since::timestamptz AS since,
    o.recovered::bigint AS recovered, o.failed::bigint AS failed, o.recovered_before::bigint AS recovered_before,
    o.failed_before::bigint AS failed_before, coalesce(o.version, '')::text AS version
FROM dlq.group_outcomes(@queues::text[], @fingerprints::text[]) o;

-- name: NeedsApproval :one
-- NeedsApproval returns why a run needs a second person, or ''.
SELECT dlq.needs_approval(@operations::text[], jsonb_build_object('filter', @filter::jsonb)
    || jsonb_strip_nulls(jsonb_build_object('queue', nullif(@queue::text, ''))))::text AS why;

-- name: Events :many
-- Events returns the events that redeliveries of entries would carry, in the order of the ids.
SELECT e.id, e.job_kind, coalesce(e.edited_event, e.original_event)::jsonb AS event,
    coalesce(e.edited_event::text, '')::text AS edited, dlq.has_checkpoint(e.metadata)::boolean AS resumes
        FROM dlq.dead_letter_queue e
WHERE e.id = ANY (@ids::uuid[])
    AND ((SELECT dlq.scope()) IS NULL OR dlq.in_patterns(e.queue, e.kind, (SELECT dlq.scope_patterns(dlq.scope()))))
ORDER BY array_position(@ids::uuid[], e.id);

-- name: Checkpoints :many
-- Checkpoints returns the masked metadata of those of the given entries that have a checkpoint and are in the caller's
-- scope. It returns nothing if the column metadata is hidden from the caller.
SELECT e.id, coalesce(dlq.masked_json(e.metadata, 'metadata', dlq.mask(false)), '{}')::jsonb AS metadata
FROM dlq.dead_letter_queue e
WHERE e.id = ANY (@ids::uuid[]) AND dlq.has_checkpoint(e.metadata) AND NOT 'metadata' = ANY (dlq.hidden_columns())
  AND ((SELECT dlq.scope()) IS NULL OR dlq.in_patterns(e.queue, e.kind, (SELECT dlq.scope_patterns(dlq.scope()))));

-- name: CountCheckpoints :one
-- CountCheckpoints counts the entries with a checkpoint that a filter selects.
SELECT dlq.count_checkpoints(@filter::jsonb)::bigint AS entries;

-- name: IsMasked :one
SELECT (dlq.mask(false) IS NOT NULL)::boolean AS masked;

-- name: MaskText :one
-- MaskText masks a text that may have any content, such as an error of a broker.
SELECT dlq.masked_text(@text::text, dlq.mask(false))::text AS masked;

-- name: MaskSample :one
-- MaskSample masks the event of a redelivery and the changes of an edit. Without an edit, patched is JSON null.
SELECT dlq.masked_event(@event::jsonb, @job_kind::text, m.mask)::jsonb AS event,
       dlq.masked_event(@patched::jsonb, @job_kind::text, m.mask)::jsonb AS patched,
       dlq.masked_detail(jsonb_build_object('changes', @changes::jsonb), m.mask)::jsonb AS details
FROM (SELECT dlq.mask(false) AS mask) m;

-- name: Places :many
SELECT e.id, e.queue, e.kind FROM dlq.dead_letter_queue e
WHERE e.id = ANY (@ids::uuid[]) AND e.stage IN ('inbox', 'open', 'failed')
    AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(@ids::uuid[]));

-- name: Expiries :many
SELECT e.id::uuid AS id, e.queue::text AS queue, e.kind::text AS kind, e.due_at::timestamptz AS due_at,
    e.expires_at::text AS expires_at
FROM dlq.expiries(@ids::uuid[]) e;

-- name: HowFar :many
SELECT h.what::text AS what, h.stage::text AS stage, h.entries::bigint AS entries FROM dlq.how_far(@ids::uuid[]) h;

-- name: BeforeReplay :many
-- BeforeReplay returns data about entries that matters before a replay. seconds is the duration of the last attempt, or
-- -1 if it is unknown.
SELECT b.entry_id::uuid AS entry_id, coalesce(b.seconds, -1)::float8 AS seconds, b.attempts::bigint AS attempts,
    b.checkpoint::boolean AS checkpoint, b.other_run::boolean AS other_run, b.live_job::boolean AS live_job,
    b.behind::boolean AS behind, b.assigned_to::text AS assigned_to, b.parked_by::text AS parked_by,
    b.in_review::text AS in_review
FROM dlq.before_replay(@ids::uuid[]) b;

-- name: CountKeyed :one
-- CountKeyed counts the entries that are jobs of applications with an ordering key.
SELECT dlq.count_keyed(@ids::uuid[])::bigint AS entries;

-- name: CountBehind :one
-- CountBehind counts the entries that are behind an earlier job of their ordering key that the filter selects.
SELECT dlq.count_behind(@filter::jsonb, @ids::uuid[])::bigint AS entries;

-- name: ReplayEnds :one
SELECT coalesce(e.earliest, 0)::float8 AS earliest, coalesce(e.latest, 0)::float8 AS latest,
    coalesce(e.not_known, '')::text AS not_known
FROM dlq.replay_ends(@entries::bigint, @seconds::float8[], @rate::float8, @concurrency::float8,
    nullif(@workers::float8, 0), @progressive::boolean) e;

-- name: Superseded :many
-- Superseded returns the entries whose work a later job has done, and the entries for which this is not known.
SELECT s.entry_id::uuid AS entry_id, s.known::boolean AS known, coalesce(s.job_id, 0)::bigint AS job_id,
    coalesce(s.same, '')::text AS same
FROM dlq.superseded(@ids::uuid[]) s WHERE s.job_id IS NOT NULL OR NOT s.known;

-- name: SaveBeforeLookup :exec
-- SaveBeforeLookup and BackBeforeLookup enclose the search for later work, so that the transaction continues if
-- Postgres cancels the search.
SAVEPOINT lookup;

-- name: BackBeforeLookup :exec
ROLLBACK TO SAVEPOINT lookup;

-- name: LimitStatements :exec
-- LimitStatements sets the statement_timeout of the transaction.
SELECT set_config('statement_timeout', @timeout::text, true);

-- name: LastHour :many
-- LastHour counts redeliveries and failures of queues in the last hour, from the rollups. It leaves out queues of which
-- the caller may see only some kinds.
SELECT f.queue, sum(f.redelivered)::bigint AS redelivered, sum(f.failures)::bigint AS failures
FROM dlq.rollup_flow f
WHERE f.step = 'minute' AND f.scope = 'queue' AND f.bucket >= now() - interval '1 hour'
    AND f.queue = ANY (@queues::text[])
    AND dlq.in_patterns(f.queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))
GROUP BY f.queue;

-- name: DestinationHours :many
-- DestinationHours counts the deliveries of all processes to destinations in the last hour. It has no row for a
-- destination without counted deliveries.
SELECT h.destination::text AS destination, h.deliveries::bigint AS deliveries, h.failures::bigint AS failures,
       h.most_per_second::float8 AS most_per_second
FROM dlq.destination_hours(@destinations::text[]) h;

-- name: ConcernedSubscribers :one
SELECT s.entries::bigint AS entries, s.subscribers::bigint AS subscribers, s.largest::jsonb AS largest
FROM dlq.concerned_subscribers(@ids::uuid[]) s;

-- name: UnworkedKinds :many
-- UnworkedKinds returns the kinds of entries that no worker seems to know.
SELECT k.kind::text AS kind, k.unknown::bigint AS unknown, k.entries::bigint AS entries
FROM dlq.unworked_kinds(@ids::uuid[]) k;

-- name: CountNotKnown :exec
-- CountNotKnown counts the given entries that were sent although it is not known whether later work has superseded
-- them.
UPDATE dlq.replay_runs r SET not_known = r.not_known + (SELECT count(*) FROM dlq.replay_run_entries e
    WHERE e.run_id = @id AND e.entry_id = ANY (@ids::uuid[]) AND e.job_id IS NOT NULL)
WHERE r.id = @id;

-- name: EditEvents :exec
UPDATE dlq.dead_letter_queue e SET edited_event = d.event
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@events::jsonb[]) AS event) d
WHERE e.id = d.id AND e.status IN ('dlq_pending', 'dlq_manual', 'dlq_failed');

-- name: UndoEdits :exec
-- UndoEdits restores the payload of entries that a run edited but did not send, so that no other redelivery carries the
-- run's patch. It also restores the payload of an entry whose own job the run follows, because that job has the
-- original payload. An empty text in @befores means that the entry had no edited payload before.
UPDATE dlq.dead_letter_queue e SET edited_event = nullif(d.before, '')::jsonb
FROM (SELECT unnest(@ids::uuid[]) AS id, unnest(@befores::text[]) AS before) d
JOIN dlq.replay_run_entries r ON r.run_id = @run::uuid AND r.entry_id = d.id
WHERE e.id = d.id AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(@ids::uuid[]))
    AND (r.job_id IS NULL OR r.job_id = e.river_job_id);

-- name: ReplayStep :exec
-- ReplayStep redelivers a batch of a run. It skips the entries in @skipped, each with its own reason.
SELECT dlq.replay_step(@id::uuid, @ids::uuid[], @skipped::uuid[], @why::text[], @reasons::text[]);

-- name: EndReplay :exec
SELECT dlq.replay_move(@id::uuid, '{running}', (@status::text)::dlq.replay_status, @reason::text);

-- name: ReplayUnderWay :one
SELECT count(*) FROM dlq.replay_run_entries WHERE run_id = @id AND outcome IS NULL AND job_id IS NOT NULL;

-- name: ReplayUnfinished :one
-- ReplayUnfinished returns whether a run has redeliveries in progress, entries left to send, or failures that are not
-- judged yet.
SELECT (EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = @id AND e.outcome IS NULL
    AND e.job_id IS NOT NULL)
     OR EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = @id AND e.outcome IS NULL AND e.job_id IS NULL
         AND e.behind IS NULL)
     OR EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = @id AND e.outcome IS NULL
         AND e.behind IS NOT NULL)
     OR EXISTS (SELECT FROM dlq.replay_run_entries e WHERE e.run_id = @id AND e.outcome = 'failed'
         AND e.error_class IS NULL))::boolean AS unfinished;

-- name: CheckDestination :exec
SELECT dlq.check_destination(@filter::jsonb, nullif(@destination::text, ''));

-- name: RecordOrigins :many
-- RecordOrigins returns the places where the records of a filter's entries failed, up to 1,000. An unknown value is
-- empty.
SELECT o.queue::text AS queue, o.topic::text AS topic, coalesce(o.original_topic, '')::text AS original_topic,
    coalesce(o.consumer_group, '')::text AS consumer_group
FROM dlq.record_origins(@filter::jsonb) o;

-- name: UnworkedQueues :one
SELECT dlq.unworked_queues(@queues::text[])::text[] AS queues;

-- name: SetForecast :exec
UPDATE dlq.replay_runs SET forecast = @forecast::jsonb WHERE id = @id;

-- name: RunsByID :many
-- RunsByID returns runs, the newest first. The caller knows the final outcomes of the runs in @known: for these,
-- succeeded and failed are not counted and are -1.
SELECT r.id, r.status::text AS status, (r.status = 'running' AND (SELECT dlq.is_restored()))::boolean AS held,
       r.newest_first, r.batch_size, r.rate, r.concurrency, r.queue, r.destination, r.force,
       coalesce(dlq.masked_text(r.note, dlq.mask(false)), '')::text AS note, r.actor,
       coalesce(r.checkpoint, '')::text AS checkpoint,
       CASE WHEN dlq.hidden_columns() && dlq.filtered_columns()
           THEN jsonb_build_object('filter', r.filter - (dlq.personal_filters() || '{errorMessage}'))
           ELSE dlq.masked_detail(jsonb_build_object('filter', r.filter)
               || CASE WHEN r.patch IS NULL THEN '{}' ELSE jsonb_build_object('patch', r.patch) END
               || CASE WHEN r.merge_patch IS NULL THEN '{}' ELSE jsonb_build_object('mergePatch', r.merge_patch) END,
               dlq.mask(false)) END::jsonb AS details,
       coalesce(r.reason, '')::text AS reason, r.total, r.replayed, r.skipped, r.sending, r.created_at, r.updated_at,
       r.finished_at, coalesce(r.origin, '')::text AS origin, coalesce(r.forecast, 'null')::jsonb AS forecast,
       r.progressive, extract(epoch FROM r.step_deadline)::float8 AS step_deadline, r.skip_stale, r.skip_superseded,
       r.not_known, r.keyed_jobs, coalesce(r.skips, '{}')::jsonb AS skips, coalesce(r.figures, '[]')::jsonb AS figures,
       CASE WHEN r.id = ANY (@known::uuid[]) THEN -1 ELSE (SELECT count(*) FROM dlq.replay_run_entries e
           WHERE e.run_id = r.id AND e.outcome = 'succeeded') END::bigint AS succeeded,
       CASE WHEN r.id = ANY (@known::uuid[]) THEN -1 ELSE (SELECT count(*) FROM dlq.replay_run_entries e
           WHERE e.run_id = r.id AND e.outcome = 'failed') END::bigint AS failed
FROM dlq.replay_runs r WHERE r.id = ANY (@ids::uuid[]) AND dlq.scope_within(r.scope, dlq.scope()) ORDER BY r.id DESC;

-- name: ReplayRuns :many
SELECT id FROM dlq.replay_runs r WHERE dlq.scope_within(r.scope, (SELECT dlq.scope()))
ORDER BY id DESC LIMIT @most::integer;

-- name: ReplayEntries :many
-- ReplayEntries returns a page of a run's entries with the outcome of each, the last captured first. to_go means that
-- the redelivery is in progress, or that the entry has not been sent.
WITH page AS MATERIALIZED (
    SELECT x.entry_id, coalesce(x.outcome, 'to_go') AS outcome, x.detail, x.job_id, x.ended_at, x.group_number,
        x.error_class, x.fingerprint, x.was, x.sent_at, x.taken_by,
        CASE x.closed_as::text WHEN 'expired' THEN 'expired' ELSE dlq.closure_of(x.outcome, x.job_id, x.was,
            x.fingerprint, x.taken_by, r.status = 'cancelled') END AS closure
    FROM dlq.replay_runs r JOIN dlq.replay_run_entries x ON x.run_id = r.id
    WHERE r.id = @id AND dlq.scope_within(r.scope, dlq.scope())
      AND (@outcome::text = '' OR x.outcome = @outcome::text OR @outcome::text = 'to_go' AND x.outcome IS NULL)
      AND (sqlc.narg('before')::uuid IS NULL OR x.entry_id < sqlc.narg('before')::uuid)
    ORDER BY x.entry_id DESC LIMIT @most::integer
)
SELECT p.entry_id AS id, p.outcome::text AS outcome, p.job_id, p.ended_at, p.group_number,
       coalesce(p.error_class, '')::text AS error_class, coalesce(p.fingerprint, '')::text AS failed_as,
       p.closure::text AS closure, p.sent_at, coalesce(p.taken_by, '')::text AS taken_by,
       coalesce(p.was, '')::text AS was,
       CASE WHEN dlq.hidden_columns() && ARRAY['error_message'] OR m.mask IS NOT NULL AND e.id IS NULL THEN ''
            WHEN m.mask IS NULL THEN coalesce(p.detail, '')
            ELSE coalesce(dlq.masked_text(p.detail, m.mask, dlq.sensitive_values(e.original_event, e.edited_event,
                e.metadata, e.job_kind, m.mask)), '') END::text AS detail,
       coalesce(e.status::text, '')::text AS status, coalesce(e.queue, '')::text AS queue,
       coalesce(e.kind, '')::text AS kind, coalesce(e.fingerprint, '')::text AS fingerprint
FROM page p CROSS JOIN (SELECT dlq.mask(false) AS mask) m
LEFT JOIN dlq.dead_letter_queue e ON e.id = p.entry_id
    AND (e.closed_at IS NULL OR e.closed_at >= dlq.closed_since(ARRAY(SELECT l.entry_id FROM page l)))
ORDER BY p.entry_id DESC;

-- name: RunReport :many
-- RunReport counts the entries of a run by closure: first in all, then by failure group at the start. since is 1970 if
-- no redelivery is in progress.
SELECT t.is_total::boolean AS is_total, coalesce(t.was, '')::text AS was, t.closure::text AS closure,
    coalesce(t.what, '')::text AS what, t.entries::bigint AS entries, coalesce(t.since, 'epoch')::timestamptz AS since,
    t.median::float8 AS median, t.slowest::float8 AS slowest, coalesce(t.queue, '')::text AS queue,
    coalesce(t.error_type, '')::text AS error_type,
    coalesce(dlq.title_of_group(t.queue, t.was), '')::text AS title, coalesce(t.reason, '')::text AS reason,
    t.requests::bigint AS requests, t.worked::float8 AS worked
FROM dlq.run_report(@id::uuid, @most::integer) t;

-- name: DiffRuns :many
-- DiffRuns counts the entries that are in both runs by their failure group at the start and their closure in each run.
SELECT t.was::text AS was, t.before::text AS before, t.after::text AS after, t.entries::bigint AS entries
FROM dlq.diff_runs(@a::uuid, @b::uuid, @most::integer) t;

-- name: Calibration :many
SELECT c.run_id::uuid AS run_id, c.queue::text AS queue, c.fingerprint::text AS fingerprint,
    c.entries::bigint AS entries, c.recover::bigint AS recover, c.low::bigint AS low, c.high::bigint AS high,
    c.recovered::bigint AS recovered, c.failed::bigint AS failed, c.judged::boolean AS judged, c.held::boolean AS held
FROM dlq.replay_calibration() c;

-- name: FigureCalibration :many
SELECT c.what::text AS what, c.runs::bigint AS runs, c.held::bigint AS held, c.forecast::float8 AS forecast,
    c.actual::float8 AS actual, c.off::float8 AS off
FROM dlq.replay_figure_calibration() c;

-- name: Replayable :one
SELECT dlq.replayable(@filter::jsonb)::jsonb AS filter;

-- name: CountGroups :many
-- CountGroups counts the entries that a filter selects, and returns a random sample of them.
SELECT c.queue::text AS queue, c.fingerprint::text AS fingerprint, c.error_type::text AS error_type,
    c.age::text AS age, c.entries::bigint AS entries, c.sample::uuid[] AS sample
FROM dlq.count_groups(@filter::jsonb, @most::integer) c;

-- name: StartReplay :one
SELECT dlq.replay_start(@filter::jsonb, @actor::text, nullif(@note::text, ''), @all_entries::boolean,
    @newest_first::boolean, @batch_size::integer,
    nullif(@rate::float8, 0), nullif(@concurrency::integer, 0), sqlc.narg('patch')::jsonb,
    sqlc.narg('merge_patch')::jsonb, nullif(@queue::text, ''), @force::boolean,
    @stop_at::float8, @stop_of::integer, nullif(@destination::text, ''), nullif(@checkpoint::text, ''),
    @progressive::boolean, make_interval(secs => @step_deadline::float8), sqlc.narg('skip_stale')::boolean,
    sqlc.narg('skip_superseded')::boolean)::uuid AS id;

-- name: MoveReplay :exec
SELECT CASE @verb::text
    WHEN 'pause' THEN dlq.replay_pause(@id::uuid, @actor::text)
    WHEN 'resume' THEN dlq.replay_resume(@id::uuid, @actor::text)
    ELSE dlq.replay_cancel(@id::uuid, @actor::text) END;

-- name: SetReplayRate :exec
SELECT dlq.replay_set_rate(@id::uuid, nullif(@rate::float8, 0), @actor::text);

-- name: LearnVersions :exec
SELECT dlq.learn_versions();

-- name: FixedGroups :many
-- FixedGroups returns groups whose fix is deployed and for which the policy has not started a replay run yet.
SELECT g.queue::text AS queue, g.fingerprint::text AS fingerprint, g.fixed_in::text AS fixed_in,
       g.fix_deployed_at::timestamptz AS fix_deployed_at
FROM dlq.fixed_groups(@queues::text[], sqlc.narg('after')::text[], @most::integer) g;

-- name: TakeFix :one
SELECT dlq.take_fix(@queue::text, @fingerprint::text, @deployed_at::timestamptz, @program::text)::boolean AS taken;

-- name: SetFix :one
SELECT dlq.set_fix(@queue::text, @fingerprint::text, sqlc.narg('run')::uuid,
    sqlc.narg('request')::uuid)::boolean AS is_set;

-- name: FixRuns :one
SELECT dlq.fix_runs(@id::uuid)::boolean AS runs;

-- name: SkipDefaults :one
-- SkipDefaults returns the work that a run skips because of the policy. It has only the choices that the request leaves
-- open. For a caller with a scope, it has only choices that apply to the given queues and kinds.
SELECT coalesce(dlq.applying_skips(dlq.skip_defaults(sqlc.narg('stale')::boolean, sqlc.narg('superseded')::boolean),
    @queues::text[], @kinds::text[]), '{}')::jsonb AS skips;

-- name: SetForFix :exec
UPDATE dlq.replay_runs SET for_fix = true WHERE id = @id;

-- name: RequestReplay :one
SELECT dlq.request_approval('replay', @request::jsonb, @note::text, @actor::text)::uuid AS id;

-- name: FixEntries :many
-- FixEntries returns the columns that decide whether a run started by the policy may send an entry. in_review is the
-- operator who reviews the entry.
SELECT e.id, e.queue, e.kind, coalesce(e.error_class, '')::text AS error_class, e.job_kind,
       coalesce(e.captured_by, '')::text AS captured_by, e.max_retries, coalesce(e.rule, '')::text AS rule,
       coalesce(e.fingerprint, '')::text AS fingerprint, coalesce(e.parked_by, '')::text AS parked_by,
       coalesce(e.assigned_to, '')::text AS assigned_to, coalesce(r.actor, '')::text AS in_review
FROM dlq.dead_letter_queue e
LEFT JOIN dlq.in_review(@ids::uuid[]) r ON r.entry_id = e.id
WHERE e.id = ANY (@ids::uuid[]) AND e.stage IN ('open', 'failed');

-- name: ApprovedForecast :one
-- ApprovedForecast returns the forecast of the request that this transaction carries out, or null.
SELECT coalesce(dlq.approved_forecast(), 'null')::jsonb AS forecast;

-- name: ForecastApproval :exec
SELECT dlq.forecast_approval(@id::uuid, @forecast::jsonb);
