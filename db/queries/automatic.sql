-- name: TryLockAutomatic :one
-- TryLockAutomatic takes a shared lock, which every transaction that redelivers automatically holds from before it
-- reads the switches until it commits. A change of a switch waits until no transaction holds the lock; a stop waits at
-- most 5 s. TryLockAutomatic returns false while a switch is being changed.
SELECT pg_try_advisory_xact_lock_shared(hashtextextended('dlq.automatic', 0)) AS locked;

-- name: AutomaticSwitches :many
-- AutomaticSwitches returns the switches that operators have set. Each row also says whether River belongs to an
-- application. Without switches it returns one row with an empty scope. The condition on scope lets Postgres use the
-- index, because a worker's transaction disables sequential scans.
SELECT (coalesce(r.value, '') = 'attached')::boolean AS attached, coalesce(s.scope, '')::text AS scope,
       coalesce(s.name, '')::text AS name,
       coalesce(s.enabled, false)::boolean AS enabled, coalesce(s.include, '{}')::text[] AS include, s.at,
       coalesce(s.actor, '')::text AS actor, coalesce(s.note, '')::text AS note
FROM (SELECT max(t.value) AS value FROM dlq.settings t WHERE t.key = 'river') r
LEFT JOIN dlq.automatic_switches s ON s.scope IN ('stop', 'all', 'queue', 'kind', 'class')
ORDER BY s.scope, s.name;

-- name: AutomaticStop :one
-- AutomaticStop returns the stop of all automatic redelivery and its time, or no row. If an operator stopped automatic
-- redelivery and the database was also restored, it returns the stop of the restore.
SELECT s.at, s.actor, coalesce(s.note, '')::text AS note, (s.name = 'restored')::boolean AS restored,
       (s.name = '' OR (SELECT count(*) FROM dlq.automatic_switches o WHERE o.scope = 'stop') > 1)::boolean AS by_person
FROM dlq.automatic_switches s WHERE s.scope = 'stop' ORDER BY s.name DESC LIMIT 1;

-- name: AutomaticChanges :many
SELECT c.at, c.scope, c.name, c.enabled, coalesce(c.include, '{}')::text[] AS include, c.actor, c.db_user,
    c.origin, c.note
FROM dlq.automatic_changes c ORDER BY c.id DESC LIMIT @most::integer;

-- name: CheckAutomatic :exec
-- CheckAutomatic raises DLQ04 for an invalid switch.
SELECT dlq.check_automatic(@scope::text, @name::text, @enabled::boolean, @include::text[]);

-- name: SetAutomatic :exec
SELECT dlq.set_automatic(@scope::text, @name::text, @enabled::boolean, @include::text[], @actor::text,
    nullif(@note::text, ''));

-- name: ResetAutomatic :one
SELECT dlq.reset_automatic(@scope::text, @name::text, @actor::text, nullif(@note::text, ''))::boolean AS existed;

-- name: StopAutomatic :exec
SELECT dlq.stop_automatic(@actor::text, nullif(@note::text, ''));

-- name: ResumeAutomatic :one
SELECT dlq.resume_automatic(@actor::text, nullif(@note::text, ''))::boolean AS existed;

-- name: PublishAutomatic :exec
-- PublishAutomatic writes the policy's switches of automatic redelivery to dlq.settings, where the
-- view dlq.automatic reads them.
INSERT INTO dlq.settings AS s (key, value) VALUES ('automatic', @value::text)
ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now() WHERE s.value <> excluded.value;

-- name: CountObserved :many
-- CountObserved counts observed entries by queue, kind of job, kind and class. due counts the entries that would be
-- sent at once.
SELECT e.queue, e.job_kind, e.kind, e.error_class::text AS error_class, count(*) AS entries,
    count(*) FILTER (WHERE e.next_retry_at <= now()) AS due
FROM dlq.dead_letter_open e
WHERE e.status = 'dlq_pending' AND e.waiting_for = 'automatic'
    AND ((SELECT dlq.scope()) IS NULL OR dlq.in_patterns(e.queue, e.kind, (SELECT dlq.scope_patterns(dlq.scope()))))
GROUP BY e.queue, e.job_kind, e.kind, e.error_class
ORDER BY e.queue, e.job_kind, e.kind, e.error_class;

-- name: CountObservedUpTo :one
SELECT count(*) FROM (
    SELECT FROM dlq.dead_letter_open e
    WHERE e.status = 'dlq_pending' AND e.waiting_for = 'automatic'
        AND ((SELECT dlq.scope()) IS NULL OR dlq.in_patterns(e.queue, e.kind, (SELECT dlq.scope_patterns(dlq.scope()))))
    LIMIT @most) o;

-- name: CountManualByRule :many
-- CountManualByRule counts entries that are manual because of the rule backfilled or single-attempt, not because of
-- their class. captured_by and single_attempt say why the rule applies.
SELECT e.queue, e.job_kind, e.kind, coalesce(e.error_class, '')::text AS error_class, e.captured_by,
    (e.max_retries = 1)::boolean AS single_attempt, count(*) AS entries
FROM dlq.dead_letter_open e
WHERE e.status = 'dlq_manual' AND e.parked_by IS NULL AND e.rule IN ('backfilled', 'single-attempt')
GROUP BY 1, 2, 3, 4, 5, 6 ORDER BY 1, 2, 3, 4, 5, 6;
