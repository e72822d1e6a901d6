-- install_roles runs here and not in 15_roles.sql: it alters functions of all files. When an
-- upgrade has run a file, it keeps the functions that the file changed, and drops others of the
-- same names (internal/postgres/code.go).
SELECT dlq.install_roles();

-- Comments on objects without a place of their own for one: indexes, sequences, columns of views.
-- Indexes of partitions have none; see the index of the table.

DO $$
DECLARE
    v_schema regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'dlq.dead_letter_queue'::regclass);
    v_object record;
BEGIN
    IF (SELECT pg_has_role(n.nspowner, 'USAGE') FROM pg_namespace n WHERE n.oid = v_schema) THEN
        EXECUTE format('COMMENT ON SCHEMA %s IS %L', v_schema, 'dlqd: dead letters of River''s jobs. Look at dlq.entries, change with the functions (\df+), read the trail with dlq.audit().');
    END IF;

    FOR v_object IN
        SELECT x.indexrelid::regclass AS name, coalesce(k.text, CASE WHEN x.indisprimary THEN 'The key.' END) AS text
        FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid
        LEFT JOIN (VALUES
            ('_by_event$', 'Lists: by message, for those that have one.'),
            ('_by_(status|queue|kind|class)$', 'Lists: a page of one value, in order of capture.'),
            ('_by_(type|source|subscriber|code|destination)$',
             'Lists: a page of one value, in order of capture, for those that have one.'),
            ('_by_group$', 'Lists: a failure group of any queue, or those whose fingerprints begin alike.'),
            ('^dead_letter_open_by_former_method$',
             'Open entries of groups of an earlier grouping method, which are moved.'),
            ('^group_aliases_main$', 'The one group that goes on with a former one.'),
            ('^group_aliases_of$', 'The former groups of a group, the last that were learned first.'),
            ('^group_aliases_uncounted$', 'Aliases that the rollups have not taken in.'),
            ('_by_fingerprint$', 'Lists: a failure group, in order of capture.'),
            ('_closed$', 'Retention: entries whose time is over; they come in the order in which they closed.'),
            ('^dead_letter_open_river_job$', 'One open entry a job.'),
            ('^dead_letter_failed_river_job$', 'The entry of a job that is retried outside dlqd, or looked for.'),
            ('^dead_letter_(resolved|archived)_river_job$', 'Entries of a job that is looked for.'),
            ('^dead_letter_open_due$', 'What workers claim: the due entries of each priority, oldest first.'),
            ('^dead_letter_inbox_id$', 'Finds an unfiled entry; not unique, since a failure may come in twice.'),
            ('^dead_letter_open_observed$', 'Observed entries, by what a switch is for.'),
            ('^dead_letter_open_backlog$', 'Counts by status, queue and class, read from the index alone.'),
            ('^dead_letter_open_rescued$', 'Redeliveries under way of jobs that River''s rescuer ended before.'),
            ('^dead_letter_open_waiting$', 'Entries that wait for a condition, for the gate of their queue.'),
            ('^dead_letter_transitions_entry$', 'The trail of an entry.'),
            ('^dead_letter_transitions_people$', 'What people did, the latest first.'),
            ('^dead_letter_transitions_xid$', 'Rollups: what committed since the last look.'),
            ('^acts_capture$', 'Switches of capture, the latest first.'),
            ('^acts_policy$', 'Changes of policy, the latest first.'),
            ('^circuit_breaker_changes_name$', 'The changes of one breaker.'),
            ('^entry_jobs_entry$', 'The jobs of an entry.'),
            ('^job_facts_job$', 'The facts of a job, in their order.'),
            ('^ordered_jobs_job_id', 'The place of a job.'),
            ('^tokens_hash', 'Finds a token.'),
            ('^saved_views_shared$', 'A name is shared once.'),
            ('^sessions_hash', 'Finds a session.'),
            ('^sessions_previous_hash', 'Finds a session by what its cookie held before.'),
            ('^sessions_name$', 'The sessions of somebody.'),
            ('^approvals_open$', 'Requests about which nobody has decided, or that are to be carried out.'),
            ('^replay_runs_active$', 'Runs that have something to do.'),
            ('^replay_run_entries_outcome$', 'Reports: how many ended how.'),
            ('^replay_run_entries_under_way$', 'How many redeliveries of a run are under way.'),
            ('^replay_run_entries_last$', 'The last outcomes of a run, by which it stops itself.'),
            ('^replay_run_entries_next$', 'The entries of a run whose turn is next.'),
            ('^replay_run_entries_behind$', 'The entry of a run that waits for another of its ordering key.'),
            ('^replay_run_entries_detail$', 'What an erasure takes error texts out of.'),
            ('^rollup_groups_trend$', 'The trend of a failure group.')) k (pattern, text) ON c.relname ~ k.pattern AND NOT x.indisprimary
        WHERE c.relnamespace = v_schema AND NOT c.relispartition AND t.relname <> 'schema_migrations' AND (c.relkind = 'I' OR NOT t.relispartition OR t.relname IN ('dead_letter_inbox', 'dead_letter_open'))
    LOOP
        EXECUTE format('COMMENT ON INDEX %s IS %L', v_object.name, v_object.text);
    END LOOP;

    FOR v_object IN
        SELECT c.oid::regclass AS name, CASE c.relname WHEN 'dead_letter_transitions_id_seq' THEN 'Ids of both audit trails: dead_letter_transitions and acts.' ELSE 'Numbers of ' || d.refobjid::regclass || '.' END AS text
        FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0
        WHERE c.relnamespace = v_schema AND c.relkind = 'S' AND c.relname NOT LIKE 'schema_migrations%'
    LOOP
        EXECUTE format('COMMENT ON SEQUENCE %s IS %L', v_object.name, v_object.text);
    END LOOP;

    -- A view's column has the comment listed here, or else that of the table's column of the same name.
    FOR v_object IN
        SELECT c.oid::regclass AS name, a.attname AS of_column, coalesce(k.text, col_description('dlq.dead_letter_queue'::regclass, e.attnum), w.text, col_description('dlq.failure_groups'::regclass, g.attnum), col_description('dlq.group_marks'::regclass, m.attnum), col_description('dlq.rollup_flow'::regclass, f.attnum)) AS text
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        LEFT JOIN (VALUES
            ('entries', 'next', 'What happens next, in words.'),
            ('backlog', 'entries', 'How many.'), ('backlog', 'more', 'There are more of these that nobody has filed yet.'),
            ('backlog_by_class', 'open', 'Open entries at the end of the hour.'), ('backlog_by_class', 'error_class', 'The class; undecided where there is none yet.'),
            ('failures_by_hour', 'weekday', 'Day of the week: 1 is Monday.'), ('failures_by_hour', 'hour', 'Hour of the day, in the session''s time zone.'),
            ('rates_by_hour', 'open', 'Open entries at the end of the hour.'),
            ('error_types', 'share', 'Its share of all, in percent.'), ('noisiest_sources', 'source', 'Who sent the messages.'), ('noisiest_sources', 'share', 'Its share of all, in percent.'),
            ('oldest_entries', 'age', 'For how long it has been open.'), ('groups', 'status', 'open, fixed (marked as that), regressed (it failed after that) or muted.'), ('groups', 'regressed', 'It was marked as fixed, and has failed after that; also while it is muted.'),
            ('groups', 'in_window', 'Failures in the last 24 hours.'), ('groups', 'trend', 'Failures by hour.'), ('groups', 'mute_left', 'After so many more failures the mute ends; null for no number.'), ('groups', 'place', 'Its place in the order, for the next page.'),
            ('top_groups', 'in_window', 'Failures in the last seven days.'), ('top_groups', 'trend', 'Failures by day.'),
            ('replay_success', 'failed', 'Redeliveries that failed.'), ('replay_success', 'success', 'Percent of the redeliveries that ended well.'),
            ('retry_cost', 'attempts_per_capture', 'Attempts for each job that became a dead letter.'), ('retry_cost', 'wasted', 'Percent of all attempts and redeliveries that failed.'),
            ('rollup_lag', 'at', 'The rollups are exact as of then.'), ('rollup_lag', 'behind', 'How long ago that is.'), ('rollup_lag', 'rebuilt_at', 'When they were last made anew.'), ('rollup_lag', 'moves', 'Moves counted since then.'),
            ('time_in_dlq', 'measure', 'in_dlq: how long entries were open. to_recovery: from the first failure until the work was done.'), ('time_in_dlq', 'entries', 'How many entries.'), ('time_in_dlq', 'average', 'On average.'),
            ('time_in_dlq', 'p50', 'Half of them took up to so long.'), ('time_in_dlq', 'p95', '95 % of them.'), ('time_in_dlq', 'p99', '99 % of them.'),
            ('automatic', 'source', 'operator, policy or default: where the switch comes from.'), ('automatic', 'name', 'Name of the queue or class, or pattern of the kind.'), ('automatic', 'at', 'When a person switched it.'),
            ('automatic', 'scope', 'What the switch is for: all, queue, kind, class; or stop.'), ('automatic', 'enabled', 'Whether matching entries are redelivered by themselves.'), ('automatic', 'include', 'What stays a person''s otherwise.'),
            ('automatic', 'actor', 'Who switched it.'), ('automatic', 'note', 'What they said.')) k (of_view, of_column, text) ON k.of_view = c.relname AND k.of_column = a.attname
        LEFT JOIN pg_attribute e ON e.attrelid = 'dlq.dead_letter_queue'::regclass AND e.attname = a.attname AND e.attnum > 0 AND c.relname IN ('entries', 'visible_entries', 'backlog', 'oldest_entries')
        LEFT JOIN pg_attribute f ON f.attrelid = 'dlq.rollup_flow'::regclass AND f.attname = a.attname AND f.attnum > 0
        LEFT JOIN (VALUES
            ('hour', 'The hour''s beginning (UTC).'), ('bucket', 'When the bucket begins (UTC).'), ('queue', 'The queue.'), ('error_class', 'The class.'), ('error_type', 'The type; '''' where the error has none.'), ('failures', 'Captures, and redeliveries that failed.')) w (of_column, text)
            ON w.of_column = a.attname AND c.relname NOT IN ('entries', 'visible_entries')
        LEFT JOIN pg_attribute g ON g.attrelid = 'dlq.failure_groups'::regclass AND g.attname = a.attname AND g.attnum > 0 AND c.relname IN ('groups', 'top_groups')
        LEFT JOIN pg_attribute m ON m.attrelid = 'dlq.group_marks'::regclass AND m.attname = a.attname AND m.attnum > 0 AND c.relname = 'groups'
        WHERE c.relnamespace = v_schema AND c.relkind = 'v'
    LOOP
        EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', v_object.name, v_object.of_column, v_object.text);
    END LOOP;
END
$$;
