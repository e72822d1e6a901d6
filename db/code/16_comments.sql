-- install_roles alters functions of all files, so it runs in the last file. After an upgrade has run
-- a file, it drops functions that have the name of a function that the file created or altered, but
-- were not created or altered by the file themselves (internal/postgres/code.go).
SELECT dlq.install_roles();

-- Comments on tables, columns and types of frozen migrations, which replace the original comments.
COMMENT ON TYPE dlq.dead_letter_status IS
    'State of a dead letter. Open: dlq_pending, dlq_processing, dlq_manual. Published again: dlq_returned. Closed: '
    'dlq_resolved, dlq_failed, dlq_archived. dlq.allowed_moves() lists the allowed moves.';
COMMENT ON TYPE dlq.dead_letter_stage IS
    'Partition of a dead letter. inbox: its job has just ended, and no DLQ worker has filed it yet. The others '
    'follow from the status.';
COMMENT ON TYPE dlq.strategy IS
    'Strategy of a dead letter, which decides when it is redelivered; manual: an operator decides.';
COMMENT ON TYPE dlq.resolution_strategy IS
    'How a dead letter was closed: redelivered by a worker, replayed by an operator, resolved by an operator '
    'outside dlqd, discarded, or expired because the work was out of date.';
COMMENT ON TYPE dlq.breaker_state IS
    'closed: deliveries pass. open: no delivery passes until open_until. half_open: a few probes pass.';
COMMENT ON TYPE dlq.replay_status IS
    'running; paused or cancelled by an operator; completed (no entries are left); stopped (too many redeliveries '
    'failed).';
COMMENT ON TYPE dlq.rollup_step IS
    'Length of a rollup''s buckets. Minutes stay for three days, hours for 400 days, days and weeks for ever. '
    'Rollups by error type, source or failure group stay for a shorter time: see dlq.trim_rollups().';

-- COMMENT ON takes a lock that conflicts with VACUUM and with other changes of the table. If another
-- session has locked a table, the table keeps its comments until the next upgrade.
DO $$
DECLARE
    v_schema regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'dlq.dead_letter_queue'::regclass);
    v_wait   constant text := current_setting('lock_timeout');
    v_table  record;
BEGIN
    PERFORM set_config('lock_timeout', '1ms', true);
    FOR v_table IN
        SELECT string_agg(
                   CASE WHEN k.of_column IS NULL THEN format('COMMENT ON TABLE %s IS %L', c.oid::regclass, k.text)
                        ELSE format('COMMENT ON COLUMN %s.%I IS %L', c.oid::regclass, k.of_column, k.text) END,
                   '; ') AS comments
        FROM (VALUES
            ('dead_letter_queue', NULL,
             'Jobs that ended as failures, and the state of each. Change entries with the functions of this '
             'schema (dlq.replay, dlq.discard, dlq.expire, dlq.resolve, dlq.park): a trigger rejects moves that the state '
             'table does not allow.'),
            ('dead_letter_queue', 'id',
             'UUID version 7, made of the time of the failure and the job''s id (dlq.entry_id). Sorts by time; '
             'one failure has one id.'),
            ('dead_letter_queue', 'kind', 'Kind of the message, or of the job if dlqd did not submit it.'),
            ('dead_letter_queue', 'job_kind', 'River''s kind of the job; redeliveries have the same.'),
            ('dead_letter_queue', 'job_created_at',
             'When River created the job. A job is identified by (id, created_at), because ids repeat if a '
             'sequence is restarted.'),
            ('dead_letter_queue', 'subscriber_id',
             'The subscriber that the message concerns, as named in the message.'),
            ('dead_letter_queue', 'source', 'The sender of the message, as named in the message.'),
            ('dead_letter_queue', 'original_event', 'The args of the job. Only an erasure changes them.'),
            ('dead_letter_queue', 'edited_event',
             'The args that redeliveries carry instead of original_event; null unless an operator edited the '
             'entry.'),
            ('dead_letter_queue', 'error_message', 'The error of the last attempt, in full.'),
            ('dead_letter_queue', 'error_type', 'Type of the error, as named by the worker or the destination.'),
            ('dead_letter_queue', 'error_context', 'Details that the worker recorded with the error.'),
            ('dead_letter_queue', 'reported_class', 'The class that the failed worker gave the error; null if none.'),
            ('dead_letter_queue', 'retry_history',
             'The attempts of the job as recorded by River. If they are long: at, attempt and the first 4,000 '
             'characters of error.'),
            ('dead_letter_queue', 'max_retries', 'The number of attempts that the job was allowed.'),
            ('dead_letter_queue', 'dlq_max_retries',
             'The limit of redeliveries: a redelivery that fails after that many closes the entry as dlq_failed.'),
            ('dead_letter_queue', 'status', 'State of the entry; see dlq.allowed_moves().'),
            ('dead_letter_queue', 'strategy', 'The strategy of the next step; null while undecided.'),
            ('dead_letter_queue', 'next_retry_at', 'When a worker handles a pending entry next.'),
            ('dead_letter_queue', 'waiting_for',
             'The condition that a pending entry waits for besides next_retry_at, when a worker last checked: '
             '"automatic" (automatic redelivery is off for it: it is observed), "condition: ...", "pace" (its '
             'place in the pace of its destination), "order" (an earlier entry of its ordering key), "run" (a '
             'progressive replay run that has not ended). Null: only the time.'),
            ('dead_letter_queue', 'order_place',
             'Place of the message in the order of its key (dlq.ordered_jobs), which it gets back if it is '
             'replayed or reopened. Null in a queue that is not ordered.'),
            ('dead_letter_queue', 'locked_by', 'The worker or operator that started the redelivery.'),
            ('dead_letter_queue', 'locked_at', 'When the redelivery started.'),
            ('dead_letter_queue', 'parked_by',
             'The actor that parked an entry in dlq_manual; null if its class requires manual handling.'),
            ('dead_letter_queue', 'assigned_to', 'The person responsible for the entry.'),
            ('dead_letter_queue', 'notes', 'The last note of an operator.'),
            ('dead_letter_queue', 'resolved_by', 'The actor that closed the entry.'),
            ('dead_letter_queue', 'resolution_notes', 'The note of the actor that closed the entry.'),
            ('dead_letter_queue', 'resolution_timestamp', 'When the entry was closed.'),
            ('dead_letter_queue', 'unique_key',
             'River''s unique key of the original job. A replay checks it, to not run the same work twice.'),
            ('dead_letter_queue', 'unique_states', 'The job states in which River enforces unique_key.'),
            ('dead_letter_queue', 'move',
             'Set by the statement that moves the entry ({"actor", "reason", "note", "detail"}); a trigger copies '
             'it to dead_letter_transitions. Null in stored rows.'),
            ('dead_letter_queue', 'captured_by',
             'capture (the trigger, when the job ended), source (it is a record of a topic), or backfill or reconciler '
             '(found among the jobs that River keeps).'),
            ('dead_letter_queue', 'updated_at', 'When the entry last moved.'),
            ('dead_letter_queue', 'closed_at', 'When the entry was closed; null while it is open.'),
            ('dead_letter_queue', 'filed_at',
             'When the entry was filed: described, classified and written to the audit trail. Null while it is in '
             'the inbox.'),
            ('dead_letter_inbox', NULL,
             'Entries that no DLQ worker has filed yet: dlq_pending, undecided. An application''s transaction '
             'writes only here and to job_facts.'),
            ('dead_letter_resolved', NULL, 'Entries whose work was done, by month of closing.'),
            ('dead_letter_failed', NULL, 'Entries whose DLQ retries are used up, by month of closing.'),
            ('dead_letter_archived', NULL, 'Entries that were discarded, expired or aged out, by month of closing.'),
            ('dead_letter_resolved_default', NULL,
             'Rows of months without a partition; dlq.ensure_partitions() creates it and moves the rows.'),
            ('dead_letter_failed_default', NULL,
             'Rows of months without a partition; dlq.ensure_partitions() creates it and moves the rows.'),
            ('dead_letter_archived_default', NULL,
             'Rows of months without a partition; dlq.ensure_partitions() creates it and moves the rows.'),
            ('dead_letter_transitions_default', NULL,
             'Rows of months without a partition; dlq.ensure_partitions() creates it and moves the rows.'),
            ('dead_letter_transitions', 'at', 'When the move was made (wall clock, not start of the transaction).'),
            ('dead_letter_transitions', 'to_status', 'The state after the move.'),
            ('dead_letter_transitions', 'actor',
             'The actor of the move: an operator, a worker, or the trigger that recorded the end of a job.'),
            ('dead_letter_transitions', 'reason',
             'The reason of the move.'),
            ('dead_letter_transitions', 'note', 'The note of the operator.'),
            ('dead_letter_transitions', 'next_retry_at', 'When a worker handles the entry next.'),
            ('dead_letter_transitions', 'river_job_id', 'The job that the move concerns.'),
            ('dead_letter_transitions', 'config_version',
             'Version of the policy that decided the entry last; for an operator''s move, the version in force at '
             'the time.'),
            ('dead_letter_transitions', 'xid',
             'The transaction of the move: rollups count moves that committed between two snapshots.'),
            ('dead_letter_transitions', 'error_type',
             'Type of the error, for moves that record a failure ('''' if it has none); otherwise null.'),
            ('dead_letter_transitions', 'source', 'Source of the message; set for captures.'),
            ('dead_letter_transitions', 'attempts', 'The number of attempts of the job; set for captures.'),
            ('dead_letter_transitions', 'first_failed_at',
             'When the first attempt failed; set for moves that close the entry.'),
            ('dead_letter_transitions', 'left_group', 'Fingerprint of the failure group that the entry left.'),
            ('dead_letter_transitions', 'joined_group',
             'Fingerprint of the failure group that the entry joined. A group has only open entries.'),
            ('dead_letter_transitions', 'origin', 'Origin of an operator''s move; null for moves of dlqd itself.'),
            ('dead_letter_transitions', 'failed_at',
             'When the job failed; set for moves that record a failure. Analytics count by it (at is when it was '
             'filed).'),
            ('dead_letter_transitions', 'id',
             'Identifies the move. Each session caches a range of ids, so they are not in the order of time.'),
            ('dead_letter_transitions', 'operation',
             'The operation (dlq.operations) that the move belongs to. Null for moves of dlqd itself, and for '
             'replays: their run or note identifies them.'),
            ('job_facts', NULL,
             'Ends of redeliveries, and retries made outside dlqd, that no dlqd process has applied yet: see '
             'dlq.apply_facts().'),
            ('job_facts', 'job_created_at', 'When River created the job.'),
            ('job_facts', 'at', 'When the fact happened; the facts of a job are applied in this order.'),
            ('job_facts', 'fact',
             'completed, discarded, cancelled: how the job ended. retried: the job was run again outside dlqd. '
             'following: a retry was applied, but the running job could not be marked, so dlqd polls it until it '
             'ends. closed: an operator closed the entry; dlqd handles its jobs that wait to run. returned: a record '
             'that was published for the entry came back as a dead letter (job_id is its own). refused: the '
             'database refuses to apply the fact; dlqd tries again every minute, and job has the fact, the '
             'refusal and its time.'),
            ('job_facts', 'entry_id',
             'The entry of the job if dlqd made or follows the job, or the entry of the failure after which the '
             'job was retried; otherwise null.'),
            ('job_facts', 'job', 'A failed job: state, attempt, finalized_at, errors (the last one) and metadata.'),
            ('entry_jobs', NULL,
             'The jobs of each entry: its redeliveries, and its original job once that was retried outside dlqd. '
             'This table, not the marker in a job''s metadata, is authoritative: applications copy metadata. Rows '
             'are deleted after River has deleted the job.'),
            ('entry_jobs', 'job_created_at', 'When River created the job.'),
            ('entry_jobs', 'run_id', 'The replay run that made the redelivery; null if none did.'),
            ('entry_jobs', 'destination',
             'The destination of the redelivery if it is not that of its queue; otherwise null.'),
            ('retired_jobs', 'job_created_at', 'When River created the job.'),
            ('reconcile_looks', NULL,
             'Progress of the reconciler''s scans of the jobs that River keeps: recent (every minute), whole '
             '(every hour) and backfill (on request). See dlq.reconcile().'),
            ('reconcile_looks', 'look', 'The scan.'),
            ('reconcile_looks', 'since',
             'recent: earlier failures are known, and no earlier transaction can still commit. whole: earlier '
             'failures are from before dlqd was attached; only a backfill files them.'),
            ('reconcile_looks', 'seen_at',
             'recent: when a complete scan began; since advances to it once the transactions of that time have '
             'ended.'),
            ('reconcile_looks', 'seen_xid',
             'The transaction in which the scan of seen_at began: transactions that ran then have lower ids.'),
            ('reconcile_looks', 'began_at', 'When the current scan began; null between two scans.'),
            ('reconcile_looks', 'from_at', 'The finalized_at at which the current scan began.'),
            ('reconcile_looks', 'began_xmin',
             'The oldest transaction, prepared ones included, that ran when the current scan began.'),
            ('reconcile_looks', 'began_xid',
             'The transaction in which the current scan began: transactions that ran then have lower ids.'),
            ('reconcile_looks', 'cursor_state', 'Position of the current scan: state of the last job that it read.'),
            ('reconcile_looks', 'cursor_at',
             'Position of the current scan: finalized_at of the last job that it read.'),
            ('reconcile_looks', 'cursor_id', 'Position of the current scan: id of the last job that it read.'),
            ('reconcile_looks', 'skipped',
             'The current scan skipped a job that another session had locked, so it does not count as complete.'),
            ('reconcile_looks', 'triggers', 'dlq.trigger_state() when the last scan began.'),
            ('reconcile_looks', 'triggers_before', 'dlq.trigger_state() when the scan before the last one began.'),
            ('reconcile_looks', 'done_at', 'When the last scan ended.'),
            ('reconcile_findings', NULL,
             'The number of failures that capture missed and the reconciler filed, by hour and cause.'),
            ('reconcile_findings', 'hour', 'Start of the hour in which the failures were filed.'),
            ('reconcile_findings', 'why',
             'capture_off, trigger_missing or trigger_disabled (when the scan that found the failure, or the scan '
             'before it, began), or missed: capture skipped the job, or was bypassed (session_replication_role, COPY, a '
             'restore).'),
            ('reconcile_findings', 'entries', 'Number of failures.'),
            ('settings', NULL,
             'State of this installation: code_version (hash of the installed db/code), triggers and '
             'river_triggers (hashes of the triggers on dlqd''s and River''s tables), river (own, or attached if '
             'River belongs to an application, whose clients lead its maintenance), and what dlqd publishes of '
             'the policy.'),
            ('settings', 'key', 'Name of the value.'),
            ('settings', 'value', 'The value.'),
            ('settings', 'updated_at', 'When the value was set.'),
            ('circuit_breakers', NULL,
             'Circuit breakers that have ever opened, shared by all dlqd processes. Change them with '
             'dlq.open_breaker and dlq.reset_breaker.'),
            ('circuit_breakers', 'state', 'State of the breaker.'),
            ('circuit_breakers', 'open_until',
             'When an open breaker becomes half-open; null if an operator opened it without a time.'),
            ('circuit_breakers', 'forced', 'Whether an operator opened the breaker.'),
            ('circuit_breakers', 'epoch',
             'Number of half-open periods, so that a late outcome of a probe does not count in a later period.'),
            ('circuit_breakers', 'probes_started', 'Probes of this half-open period, over all processes.'),
            ('circuit_breakers', 'probes_succeeded', 'Probes of this half-open period that succeeded.'),
            ('circuit_breakers', 'probes_failed', 'Probes of this half-open period that failed.'),
            ('circuit_breakers', 'paused', 'Whether the breaker has paused its River queue.'),
            ('circuit_breakers', 'reason',
             'Reason of the state.'),
            ('circuit_breakers', 'changed_by', 'The process or operator that changed the state.'),
            ('circuit_breaker_changes', NULL, 'The changes of circuit breakers, one row for each.'),
            ('circuit_breaker_changes', 'at', 'When the state changed.'),
            ('circuit_breaker_changes', 'from_state', 'The state before; null if the breaker had never opened.'),
            ('circuit_breaker_changes', 'to_state', 'The state after.'),
            ('circuit_breaker_changes', 'reason',
             'Reason of the change.'),
            ('circuit_breaker_changes', 'actor', 'The process or operator that made the change.'),
            ('paces', NULL, 'The reserved part of each pace of redeliveries: see dlq.reserve_pace.'),
            ('paces', 'free_at', 'The next free place.'),
            ('gates', NULL,
             'Gates release a few of the entries that wait together as probes, and the rest if the probes '
             'succeed. A gate without a row releases probes at the next check of its conditions.'),
            ('gates', 'state',
             'probing: probes are under way. shut: the probes failed, and the gate releases new ones at until. open: '
             'the probes succeeded, and the gate releases the other entries.'),
            ('gates', 'probes', 'The entries that were released as probes.'),
            ('gates', 'started_at', 'When the probes were released, or when an open gate last released entries.'),
            ('ordered_jobs', NULL,
             'Messages with an orderingKey, in ordered queues, whose work may not be done yet: a job waits for '
             'the earlier ones of its key.'),
            ('ordered_jobs', 'place', 'Place in the order: the order of submission.'),
            ('ordered_jobs', 'job_id', 'The job of the message.'),
            ('ordered_jobs', 'job_created_at', 'When River created the job.'),
            ('replay_runs', NULL,
             'Replay runs and their reports. Start one with dlq.replay_start; control it with dlq.replay_pause, '
             'dlq.replay_resume, dlq.replay_cancel and dlq.replay_set_rate.'),
            ('replay_runs', 'filter', 'The filter of the run; see dlq.find.'),
            ('replay_runs', 'scope',
             'The scope of the caller who started the run: [{"queues": ["payments*"], "kinds": []}]; null for no '
             'limit.'),
            ('replay_runs', 'newest_first', 'Whether the run goes from the newest entry to the oldest.'),
            ('replay_runs', 'rate', 'Entries per second; null for no limit.'),
            ('replay_runs', 'stepped_at',
             'When the run last sent entries; null before the first time since it was started or resumed.'),
            ('replay_runs', 'sending',
             'Seconds spent sending: without pauses, and without the time before the first entry and after the '
             'last one.'),
            ('replay_runs', 'queue', 'The queue of the redeliveries; null for the entries'' own queues.'),
            ('replay_runs', 'destination', 'The destination of the redeliveries; null for those of their queues.'),
            ('replay_runs', 'force', 'Whether entries are replayed although an equal job is live or has ended.'),
            ('replay_runs', 'stop_at', 'The run stops if this percentage of the last stop_of outcomes are failures.'),
            ('replay_runs', 'stop_of', 'The number of outcomes that stop_at considers.'),
            ('replay_runs', 'note', 'The note of the operator.'),
            ('replay_runs', 'actor', 'The actor that started the run.'),
            ('replay_runs', 'reason',
             'Reason of the state.'),
            ('replay_runs', 'judged_from',
             'stop_at considers outcomes from this time on: the start of the run, or when it was resumed.'),
            ('replay_runs', 'cursor', 'Position of the run: the last entry that it handled.'),
            ('replay_runs', 'total', 'The number of entries that the filter matched at the start.'),
            ('replay_runs', 'replayed', 'The number of entries sent so far.'),
            ('replay_runs', 'skipped',
             'The number of entries skipped: they had moved, have an equal job that is live, or the patch does '
             'not apply.'),
            ('replay_runs', 'batch_size',
             'Entries per step. A run without rate or concurrency commits steps together, up to 500 entries.'),
            ('replay_runs', 'origin', 'Origin of the request that started the run.'),
            ('replay_runs', 'id', 'UUID version 7: sorts by start.'),
            ('replay_runs', 'status', 'State of the run.'),
            ('replay_runs', 'created_at', 'When the run was started.'),
            ('replay_runs', 'updated_at', 'When the run last advanced or was changed.'),
            ('replay_runs', 'finished_at', 'When the run ended; null until then.'),
            ('replay_runs', 'forecast',
             'The result of a dry run at the start: entries, seconds, entries by queue, warnings, estimates, and how '
             'many entries will recover. Null if the '
             'run was started by SQL.'),
            ('replay_run_entries', NULL,
             'The entries of a replay run, selected at its start, and the outcome of each.'),
            ('replay_run_entries', 'job_id', 'The redelivery; null if the entry was skipped or is not handled yet.'),
            ('replay_run_entries', 'leads', 'Whether another entry of the run waits for this one.'),
            ('replay_run_entries', 'outcome',
             'succeeded, failed or skipped; null while the entry waits or its redelivery has not ended.'),
            ('replay_run_entries', 'detail', 'The error, or why the entry was skipped.'),
            ('replay_run_entries', 'reason',
             'Why the entry was skipped, as an identifier that does not change: moved, stale, superseded, patch, '
             'checkpoint, held, ordering_key, live_job, done_job, open_entry, busy, resolved, group_ended or rejected. '
             'Of a failure: process_lost, or null.'),
            ('rollup_state', NULL, 'Progress of the rollups: one row, written by dlq.refresh_rollups().'),
            ('rollup_state', 'one', 'Always true: there is one row.'),
            ('rollup_state', 'snapshot', 'Moves of transactions that are visible in this snapshot are counted.'),
            ('rollup_state', 'at', 'When the snapshot was taken: the rollups are exact as of this time.'),
            ('rollup_state', 'since', 'Moves before this time are all counted.'),
            ('rollup_state', 'rebuilt_at', 'When the rollups were last rebuilt.'),
            ('rollup_state', 'moves', 'Moves counted since the rebuild.'),
            ('rollup_flow', 'scope',
             'The kind of the row: all entries, one queue, one class, or one class of one queue.'),
            ('rollup_flow', 'bucket', 'Start of the bucket (UTC).'),
            ('rollup_flow', 'queue', 'The queue; '''' in rows for all queues.'),
            ('rollup_flow', 'error_class',
             'The class after the move (undecided if none yet); '''' in rows for all classes.'),
            ('rollup_flow', 'attempts', 'Attempts of the captured jobs.'),
            ('rollup_flow', 'resolved', 'Entries resolved, by a redelivery or an operator.'),
            ('rollup_flow', 'failed', 'Entries whose redeliveries are used up.'),
            ('rollup_flow', 'archived', 'Entries discarded, expired or aged out.'),
            ('rollup_flow', 'parked', 'Entries that moved to dlq_manual.'),
            ('rollup_flow', 'open_change', 'Change of the number of open entries.'),
            ('rollup_backlog', 'error_class', 'The class; undecided if none yet.'),
            ('rollup_times', NULL,
             'Rollup: histograms of how long entries were open (in_dlq), and of the time from the first failure '
             'until the work was done (to_recovery). Read it with dlq.times().'),
            ('rollup_times', 'bin',
             'Times of at most 1.1 ^ bin seconds and more than 1.1 ^ (bin - 1): percentiles are exact within 5 %.'),
            ('rollup_times', 'entries', 'Number of entries.'),
            ('rollup_times', 'seconds', 'Sum of the times of the entries, for exact averages.'),
            ('rollup_times', 'scope', 'The kind of the row: all entries, or one queue.'),
            ('rollup_times', 'bucket', 'Start of the bucket (UTC).'),
            ('rollup_times', 'queue', 'The queue; '''' in rows for all queues.'),
            ('rollup_errors', 'error_type',
             'The type; '''' if the error has none; other for types beyond dlq.most_names().'),
            ('rollup_errors', 'bucket', 'Start of the bucket (UTC).'),
            ('rollup_sources', 'source', 'The sender of the messages.'),
            ('rollup_sources', 'bucket', 'Start of the bucket (UTC).'),
            ('rollup_groups', 'bucket', 'Start of the bucket (UTC). Minutes are kept for seven hours.'),
            ('failure_groups', NULL,
             'Rollup: failure groups, each the entries of a queue that failed for the same reason.'),
            ('failure_groups', 'title', 'First line of the first error, masked.'),
            ('failure_groups', 'error_type', 'Type of the first error.'),
            ('failure_groups', 'error_class', 'Class of the last entry.'),
            ('failure_groups', 'first_seen', 'When the first entry joined the group.'),
            ('failure_groups', 'last_seen', 'When the last entry of the group failed.'),
            ('failure_groups', 'open', 'Number of open entries.'),
            ('failure_groups', 'sample', 'The last entry.'),
            ('restored_partitions', NULL,
             'Months into which entries were restored from the archive. Retention does not drop them before '
             'until.'),
            ('restored_partitions', 'until', 'When retention may drop the partition.'),
            ('erasures', NULL,
             'The erasures of personal data, one row for each: that it was done, how far, and by whose request; '
             'not whose data it was.'),
            ('erasures', 'actor', 'The actor of the erasure.'),
            ('erasures', 'origin', 'Origin of the request.'),
            ('erasures', 'note', 'The reason, such as the number of a request.'),
            ('erasures', 'filter_sha256',
             'SHA-256 of the filter, which names the person. With the filter, it proves that the erasure was '
             'done.'),
            ('erasures', 'fields', 'The fields of the filter.'),
            ('erasures', 'entries', 'Entries erased in the database.'),
            ('erasures', 'jobs', 'River jobs erased.'),
            ('erasures', 'under_way',
             'Entries skipped because a redelivery was under way or another session had locked them, and replay '
             'runs and approvals that had not ended. Repeat the erasure when they have.'),
            ('erasures', 'archived', 'Entries erased in archives.'),
            ('erasures', 'archives', 'Archives searched.'),
            ('erasures', 'archive', 'Address of the archive; null if none was searched.'),
            ('erasures', 'finished_at', 'When the erasure was complete; null until then.'),
            ('erasures', 'at', 'When the erasure began.'),
            ('automatic_switches', NULL,
             'Switches of automatic redelivery set by operators; they override the policy''s section automatic. '
             'Change them with dlq.set_automatic, dlq.reset_automatic, dlq.stop_automatic and '
             'dlq.resume_automatic.'),
            ('automatic_switches', 'scope',
             'Scope of the switch: all entries, a queue, a kind (* matches any text) or a class. stop: stops all '
             'automatic redelivery.'),
            ('automatic_switches', 'enabled',
             'Whether matching entries are redelivered automatically. If several switches match, one that is off '
             'wins; the switch for all applies if no other matches.'),
            ('automatic_switches', 'include',
             'Entries that need manual handling otherwise: backfilled, and single-attempt (their jobs had one '
             'attempt).'),
            ('automatic_switches', 'at', 'When the switch was set.'),
            ('automatic_switches', 'actor', 'The operator that set the switch.'),
            ('automatic_switches', 'note', 'The note of the operator.'),
            ('automatic_changes', NULL,
             'The audit trail of dlq.automatic_switches, append-only: one row for each change.'),
            ('automatic_changes', 'at', 'When the switch was changed.'),
            ('automatic_changes', 'enabled',
             'The new setting; null if the switch was deleted, so that the policy applies again (for stop: '
             'automatic redelivery resumes).'),
            ('automatic_changes', 'include', 'The new value of include.'),
            ('automatic_changes', 'actor', 'The actor of the change.'),
            ('automatic_changes', 'origin', 'Origin of the change.'),
            ('automatic_changes', 'note', 'The note of the actor.'),
            ('processes', NULL,
             'The dlqd processes that serve on this database. Each updates its row every few seconds.'),
            ('processes', 'id', 'Created by the process when it starts.'),
            ('processes', 'parts', 'Parts that the process runs: api, process, dlq-workers.'),
            ('processes', 'seen_at', 'When the process last updated its row.'),
            ('processes', 'stopped_at', 'When the process stopped cleanly; null while it runs, or if it died.'),
            ('acts', NULL,
             'The audit trail of changes that are not moves of entries: of replay runs, circuit breakers, queues, '
             'switches and partitions. Append-only. dlq.audit() shows both trails. The mode of capture in force '
             'is that of dlq.capture_mode().'),
            ('acts', 'id', 'Identifies the row; dead_letter_transitions uses the same sequence.'),
            ('acts', 'at', 'When the change was made.'),
            ('acts', 'act', 'The change.'),
            ('acts', 'actor', 'The actor of the change.'),
            ('acts', 'origin', 'Origin of the change; null for changes of dlqd itself.'),
            ('acts', 'note', 'The note of the actor.'),
            ('acts', 'detail', 'More about the change, such as the new rate of a replay run.'),
            ('acts', 'config_version', 'Version of the policy in force at the time.'),
            ('archived_partitions', NULL,
             'Months that are in the archive and in the database. dlq.drop_partition compares the two.'),
            ('archived_partitions', 'rows', 'The number of archived rows.'),
            ('archived_partitions', 'archive', 'Address of the archive.'),
            ('archived_partitions', 'at', 'When the month was archived.'),
            ('duties', NULL,
             'Duties: work that one process at a time does, over several transactions, such as retention and '
             'erasures, which write the archive.'),
            ('duties', 'name', 'The duty.'),
            ('duties', 'holder', 'The process that has the duty: an id for this time only.'),
            ('duties', 'until', 'When another process may take the duty, unless the holder renews it.'),
            ('tokens', NULL, 'API tokens. A token is shown once, when it is created; the table has its hash.'),
            ('tokens', 'id', 'UUID version 7 of the time of creation.'),
            ('tokens', 'name', 'The holder: the actor of requests with this token.'),
            ('tokens', 'role',
             'Role of the token: a role of the database, or sender (submits messages) or metrics (reads metrics '
             'and health).'),
            ('tokens', 'queues', 'Patterns of queues that the token is limited to; empty for all.'),
            ('tokens', 'kinds', 'Patterns of kinds of messages and jobs that the token is limited to; empty for all.'),
            ('tokens', 'sources', 'Patterns of sources that a sender is limited to; empty for all.'),
            ('tokens', 'note', 'Purpose of the token.'),
            ('tokens', 'created_by', 'The actor that created the token.'),
            ('tokens', 'created_at', 'When the token was created.'),
            ('tokens', 'expires_at', 'When the token expires; null for never.'),
            ('tokens', 'used_at', 'When the token was last used, within about a minute.'),
            ('tokens', 'revoked_at',
             'When the token stops being valid; for a rotated token this may be in the future.'),
            ('tokens', 'revoked_by', 'The actor that revoked the token.'),
            ('role_scopes', NULL,
             'The queues and kinds that members of a database role are limited to. A user with several roles sees '
             'what any of their rows allows; a user without a row is not limited. Change it with '
             'dlq.set_role_scope.'),
            ('role_scopes', 'queues', 'Patterns of queues, in which * matches any text; empty for all.'),
            ('role_scopes', 'kinds', 'Patterns of kinds, in which * matches any text; empty for all.'),
            ('approvals', NULL,
             'Requests for operations that need a second person (access.yaml: approvals). Create one with '
             'dlq.request_approval; decide it with dlq.approve, dlq.refuse_approval or dlq.withdraw_approval.'),
            ('approvals', 'id', 'UUID version 7 of the time of the request.'),
            ('approvals', 'operation',
             'The operation: replay (a replay run), bulk (one action on many entries), erase, cancel (of a job) or export.'),
            ('approvals', 'request', 'The request: its filter, and the other arguments of the operation.'),
            ('approvals', 'entries', 'The number of entries that the filter matched at the time of the request.'),
            ('approvals', 'by_queue',
             'The number of entries that the filter matched at the time of the request, by queue.'),
            ('approvals', 'state',
             'requested; then approved, until dlqd has carried it out: done or failed; or refused, withdrawn or '
             'expired.'),
            ('approvals', 'actor', 'The requester; also the actor of the operation.'),
            ('approvals', 'on_behalf_of', 'The person for whom the requester acts, as named by the requester.'),
            ('approvals', 'token_by', 'The creator of the requester''s token.'),
            ('approvals', 'origin', 'Origin of the request.'),
            ('approvals', 'note', 'The reason of the request.'),
            ('approvals', 'scope', 'The scope of the requester, which also limits the operation; null for no limit.'),
            ('approvals', 'requested_at', 'When the request was made.'),
            ('approvals', 'forecast',
             'The preview of a replay run when it was requested; null if it was requested in SQL.'),
            ('approvals', 'skips',
             'The work that a replay run skips because of the policy at the request: see replay_runs.skips.'),
            ('approvals', 'expires_at', 'When the request expires.'),
            ('approvals', 'decided_by', 'The actor that approved, refused or withdrew the request.'),
            ('approvals', 'decided_at', 'When the request was decided.'),
            ('approvals', 'decision', 'The note on the decision.'),
            ('approvals', 'frozen',
             'The number of entries that the filter matched at approval: only these are changed.'),
            ('approvals', 'taken_until', 'How long the request is reserved for the process that carries it out.'),
            ('approvals', 'changed', 'The number of entries that were changed; the others had moved.'),
            ('approvals', 'outcome', 'The resulting replay run or erasure.'),
            ('approvals', 'problem', 'Why the operation failed.'),
            ('approvals', 'ended_at', 'When the request was done, failed, refused, withdrawn or expired.'),
            ('approval_entries', NULL, 'The entries that an approval covers.'),
            ('approval_entries', 'done_at',
             'When the entry was handled: changed, or found to have moved. Null until then, and for replay runs '
             'and erasures.'),
            ('group_marks', NULL,
             'Marks of operators on failure groups. Read them with dlq.groups; change them with dlq.set_group and '
             'dlq.assign_group.'),
            ('group_marks', 'owner',
             'The owner. Open entries of the group are assigned to the owner, and so are entries that join it later.'),
            ('group_marks', 'note', 'Note for other operators.'),
            ('group_marks', 'fixed_at',
             'When the group was marked as fixed; later failures make it regressed. Null if it is not marked.'),
            ('group_marks', 'fixed_by', 'The actor that marked the group as fixed.'),
            ('group_marks', 'fixed_in',
             'The version with the fix; null if it was not named. Failures of earlier versions are no regression.'),
            ('group_marks', 'fix_deployed_at',
             'When a version with the fix was reported to run; null until then, and after a rollback.'),
            ('group_marks', 'fix_run', 'The replay run that the policy started after the fix was deployed.'),
            ('group_marks', 'fix_request', 'The request for approval that the policy made for this replay run.'),
            ('group_marks', 'muted_at',
             'When the group was muted, which stops notifications about it; null if it is not muted.'),
            ('group_marks', 'muted_by', 'The actor that muted the group.'),
            ('group_marks', 'mute_until', 'When the mute ends; null for no time.'),
            ('group_marks', 'mute_upto',
             'The mute also ends when the group has this many failures in all; null for no number.'),
            ('group_marks', 'updated_at', 'When an operator last changed the marks.'),
            ('group_marks', 'updated_by', 'The operator that last changed the marks.'),
            ('saved_views', NULL,
             'Saved lists of dead letters, private or shared. Read them with dlq.views(); change them with '
             'dlq.save_view and dlq.delete_view.'),
            ('saved_views', 'owner', 'The creator of the view.'),
            ('saved_views', 'name', 'Name, unique among the views of the owner and among shared ones.'),
            ('saved_views', 'query', 'The query, as typed.'),
            ('saved_views', 'columns', 'Columns shown, in this order; empty for the default.'),
            ('saved_views', 'sort', 'Sort order; empty for the default.'),
            ('saved_views', 'shared', 'Whether other users see the view.'),
            ('saved_views', 'scope',
             'The scope of the owner: only users with at least this scope see the view. Null for no limit.'),
            ('saved_views', 'created_at', 'When the view was created.'),
            ('saved_views', 'updated_at', 'When the view was last changed.'),
            ('operations', NULL,
             'Bulk changes by operators: discard, expire, resolve, park, unpark, reopen, assign, tag, note, purge, undo. '
             'dead_letter_transitions.operation refers to them for changed entries, operation_unchanged lists the '
             'others. Undo them with dlq.undo.'),
            ('operations', 'id', 'UUID version 7 of the start.'),
            ('operations', 'action', 'The action.'),
            ('operations', 'filter', 'The filter that selected the entries; null if the caller listed them.'),
            ('operations', 'args', 'Further arguments: assignee, tags.'),
            ('operations', 'actor', 'The actor of the operation.'),
            ('operations', 'origin', 'Origin of the request.'),
            ('operations', 'note', 'The note of the actor.'),
            ('operations', 'scope', 'The scope of the actor; null for no limit.'),
            ('operations', 'undoes', 'The operation that this one undoes; otherwise null.'),
            ('operations', 'started_at', 'When the operation began.'),
            ('operations', 'last_at', 'When the last batch of the operation ended.'),
            ('operations', 'looked', 'The number of entries that the operation selected.'),
            ('operations', 'changed', 'The number of entries that the operation changed.'),
            ('operations', 'unchanged', 'The reasons for unchanged entries, with the number for each reason.'),
            ('operation_unchanged', NULL,
             'Entries that an operation selected and did not change, at most 10,000 for each operation.'),
            ('operation_unchanged', 'reason',
             'Why the entry was not changed.'),
            ('sessions', NULL,
             'Browser sessions. The cookie has the secret; the table has its hash. The policy sets how long '
             'sessions last (access.yaml: sessions).'),
            ('sessions', 'id',
             'UUID version 7 of the time of sign-in, to list and end the session. It does not authenticate.'),
            ('sessions', 'hash', 'SHA-256 of the cookie.'),
            ('sessions', 'previous_hash', 'SHA-256 of the previous cookie.'),
            ('sessions', 'previous_until',
             'When the previous cookie expires: a minute after the new one was first used. Null until then.'),
            ('sessions', 'rotated_at', 'When the cookie was last replaced.'),
            ('sessions', 'name', 'The user: the actor of their requests.'),
            ('sessions', 'via', 'How the user signed in: by a token, or by the OpenID Connect provider.'),
            ('sessions', 'token_id', 'The token of the session, which sets its role and its end.'),
            ('sessions', 'subject', 'The provider''s id of the user.'),
            ('sessions', 'groups', 'Groups of the user, as given by the provider at sign-in.'),
            ('sessions', 'address', 'Address from which the user signed in.'),
            ('sessions', 'agent', 'User agent of the browser.'),
            ('sessions', 'created_at', 'When the user signed in.'),
            ('sessions', 'seen_at', 'When the session was last used, within about a minute.'),
            ('counters', NULL,
             'Totals of what happened to dead letters since dlqd was installed. They never decrease, even after '
             'retention and trimming. dlq.count_moves() adds to them at each refresh of the rollups; /metrics '
             'serves them.'),
            ('counters', 'name',
             'captured, failures, redelivered, succeeded, failed_again, resolved, failed, archived and parked '
             '(label: the class), swept, error_type (label: the type), breaker (queue: the circuit breaker; '
             'label: the new state), or a time: in_dlq, to_recovery, to_retry and to_filing (label: seconds for '
             'their sum, or n for times of at most 2 ^ (n / 8) seconds and more than 2 ^ ((n - 1) / 8)).'),
            ('counters', 'queue', 'The queue; other for queues beyond dlq.most_counted_queues().'),
            ('counters', 'label',
             'The second key of the counter, see name; other for error types beyond dlq.most_counted_types() of a '
             'queue.'),
            ('counters', 'value', 'The count; seconds for a sum of times.'),
            ('metrics_sample', NULL,
             'The sample: figures of the database for the metrics, in one row. One process at a time writes it '
             'every few seconds; each process reads it at each scrape. Unlogged: empty after a crash, until the '
             'next sample.'),
            ('metrics_sample', 'one', 'Always true: there is one row.'),
            ('metrics_sample', 'at', 'When the sample was taken.'),
            ('metrics_sample', 'counters',
             'dlq.counters by name and queue: times as [seconds, first n, counts of n, n + 1, …], others by '
             'label. In a column of its own, so that it is only written when it changes.'),
            ('metrics_sample', 'sample', 'The other figures, by queue and class: see internal/metrics.')
            ) k (of_table, of_column, text)
        JOIN pg_class c ON c.relnamespace = v_schema AND c.relname = k.of_table
        LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = k.of_column
        WHERE k.text IS DISTINCT FROM CASE WHEN k.of_column IS NULL THEN obj_description(c.oid, 'pg_class')
                                           ELSE col_description(c.oid, a.attnum) END
        GROUP BY c.oid
    LOOP
        BEGIN
            EXECUTE v_table.comments;
        EXCEPTION WHEN lock_not_available THEN
            NULL;
        END;
    END LOOP;
    PERFORM set_config('lock_timeout', v_wait, true);
END
$$;

-- Comments on objects that no file of db/code creates by name: indexes, sequences, columns of views.
-- Indexes of partitions have no comment; the index of the parent table has it.

DO $$
DECLARE
    v_schema regnamespace := (SELECT c.relnamespace FROM pg_class c WHERE c.oid = 'dlq.dead_letter_queue'::regclass);
    v_object record;
BEGIN
    IF (SELECT pg_has_role(n.nspowner, 'USAGE') FROM pg_namespace n WHERE n.oid = v_schema) THEN
        EXECUTE format('COMMENT ON SCHEMA %s IS %L', v_schema,
            'dlqd: dead letters of River''s jobs. Read them in dlq.entries, change them with the functions (\df+), and read the audit trail with dlq.audit().');
    END IF;

    FOR v_object IN
        SELECT x.indexrelid::regclass AS name,
            coalesce(k.text, CASE WHEN x.indisprimary THEN 'Primary key.' END) AS text
        FROM pg_index x JOIN pg_class c ON c.oid = x.indexrelid JOIN pg_class t ON t.oid = x.indrelid
        LEFT JOIN (VALUES
            ('_by_event$', 'Lists: entries of a message.'),
            ('_by_(status|queue|kind|class)$', 'Lists: a page of entries with one value, in order of capture.'),
            ('_by_(type|source|subscriber|code|destination)$',
             'Lists: a page of entries with one value, in order of capture. Without entries that have none.'),
            ('_by_group$',
             'Lists: entries of a failure group in any queue, by its fingerprint or the first characters.'),
            ('^dead_letter_open_by_former_method$',
             'Open entries in groups of an earlier grouping method, which dlq.regroup moves.'),
            ('^group_aliases_main$', 'The group that continues a former one; there is one.'),
            ('^group_aliases_of$', 'The former groups of a group, the latest alias first.'),
            ('^group_aliases_uncounted$', 'Aliases that the rollups have not counted yet.'),
            ('_closed$', 'Retention: expired entries. Rows are in the order of closing, which suits BRIN.'),
            ('^dead_letter_open_river_job$', 'A job has at most one open entry.'),
            ('^dead_letter_failed_river_job$', 'Finds the entry of a job: for retries outside dlqd, and for lists.'),
            ('^dead_letter_returned_due$', 'Returned entries, in the order in which they were returned.'),
            ('^dead_letter_(resolved|archived|returned)_river_job$', 'Lists: entries of a job.'),
            ('^dead_letter_open_due$', 'Due entries of each priority, oldest first, for the claims of workers.'),
            ('^dead_letter_inbox_id$', 'Finds an unfiled entry. Not unique, because a failure may be captured twice.'),
            ('^dead_letter_open_observed$', 'Observed entries, by queue, kind and class, for the switches.'),
            ('^dead_letter_open_backlog$', 'Counts by status, queue and class, read from the index alone.'),
            ('^dead_letter_open_groups$',
             'Open entries of a failure group, in order of capture; counts and samples of groups, from the index '
             'alone.'),
            ('^dead_letter_open_rescued$', 'Redeliveries under way of entries whose jobs were rescued before.'),
            ('^dead_letter_open_waiting$', 'Entries that wait for a condition, for the gate of their queue.'),
            ('^dead_letter_transitions_entry$', 'The audit trail of an entry.'),
            ('^dead_letter_transitions_people$', 'Moves of operators, the latest first.'),
            ('^dead_letter_transitions_xid$', 'Rollups: moves that committed since the last refresh.'),
            ('^acts_archive$', 'What the audit trail says is in an archive, by unit.'),
            ('^operations_last_at$', 'Operations by time, for the audit trail by operation.'),
            ('^dead_letter_transitions_single$',
                'Moves of users that belong to no operation and no replay run, for the audit trail by operation.'),
            ('^acts_capture$', 'Switches of capture, the latest first.'),
            ('^acts_policy$', 'Changes of policy, the latest first.'),
            ('^circuit_breaker_changes_name$', 'The changes of one breaker.'),
            ('^entry_jobs_entry$', 'The jobs of an entry.'),
            ('^job_facts_job$', 'The facts of a job, in their order.'),
            ('^ordered_jobs_job_id', 'The place of a job.'),
            ('^tokens_hash', 'Finds a token.'),
            ('^saved_views_shared$', 'The names of shared views are unique.'),
            ('^sessions_hash', 'Finds a session.'),
            ('^sessions_previous_hash', 'Finds a session by its previous cookie.'),
            ('^sessions_name$', 'The sessions of a user.'),
            ('^approvals_open$', 'Requests that are undecided or not yet carried out.'),
            ('^replay_runs_active$', 'Runs that have not ended.'),
            ('^replay_run_entries_outcome$', 'Reports: the number of entries by outcome.'),
            ('^replay_run_entries_under_way$', 'Redeliveries of a run that are under way.'),
            ('^replay_run_entries_last$', 'The last outcomes of a run, for its stop_at.'),
            ('^replay_run_entries_next$', 'The next entries of a run.'),
            ('^replay_run_entries_behind$', 'The entry of a run that waits for another of its ordering key.'),
            ('^replay_run_entries_detail$', 'Entries with error texts, for erasures.'),
            ('^replay_run_entries_group$', 'Outcomes of a failure group in all runs, the latest first.'),
            ('^replay_run_entries_step$', 'The next entries of a group of a progressive run.'),
            ('^replay_run_entries_uncounted$', 'Outcomes of a progressive run that are not counted yet.'),
            ('^replay_run_entries_unjudged$', 'Failures of a run that are not judged yet.'),
            ('^group_marks_fixed_in$', 'Failure groups that are fixed in a version.'),
            ('^replay_runs_unsettled$', 'Runs whose outcomes may still come.'),
            ('^acts_runs$', 'The acts on a replay run.'),
            ('^feed_records_id_key$', 'The record of a feed that a source reads.'),
            ('^feed_records_entry_id_feed_key$', 'Where an entry was published.'),
            ('^feed_records_waiting$', 'Records that are not published yet.'),
            ('^feed_records_at$', 'Retention: records that are remembered no longer.'),
            ('^destination_traffic_at$', 'Deletes old counts of deliveries.'),
            ('^source_deliveries_at$', 'Retention: deliveries that are remembered no longer.'),
            ('^source_deliveries_came_back$', 'The delivery of a record that is read again.'),
            ('^source_deliveries_place$', 'The delivery of a record, by where the broker stored it.'),
            ('^source_deliveries_content$',
             'Deliveries by what was published, for records that come back without headers.'),
            ('^source_deliveries_unread$', 'Deliveries that the consumer group is not known to be past.'),
            ('^source_deliveries_read$', 'Deliveries that the consumer group is past, for the quiet time.'),
            ('^source_deliveries_entry$', 'The deliveries of an entry.'),
            ('^source_deliveries_job_id_job_created_at_key$', 'The delivery of a job.'),
            ('^rollup_groups_trend$', 'The trend of a failure group.')) k (pattern, text) ON c.relname ~ k.pattern
                AND NOT x.indisprimary
        WHERE c.relnamespace = v_schema AND NOT c.relispartition AND t.relname <> 'schema_migrations'
            AND (c.relkind = 'I' OR NOT t.relispartition OR t.relname IN ('dead_letter_inbox', 'dead_letter_open',
                'dead_letter_returned'))
    LOOP
        EXECUTE format('COMMENT ON INDEX %s IS %L', v_object.name, v_object.text);
    END LOOP;

    FOR v_object IN
        SELECT c.oid::regclass AS name,
            CASE c.relname WHEN 'dead_letter_transitions_id_seq'
                THEN 'Ids of both audit trails: dead_letter_transitions and acts.' ELSE 'Numbers of '
                    || d.refobjid::regclass || '.' END AS text
        FROM pg_class c JOIN pg_depend d ON d.objid = c.oid AND d.deptype IN ('a', 'i') AND d.refobjsubid > 0
        WHERE c.relnamespace = v_schema AND c.relkind = 'S' AND c.relname NOT LIKE 'schema_migrations%'
    LOOP
        EXECUTE format('COMMENT ON SEQUENCE %s IS %L', v_object.name, v_object.text);
    END LOOP;

    -- A view's column has the comment listed here, or else that of the table's column of the same name.
    FOR v_object IN
        SELECT c.oid::regclass AS name, a.attname AS of_column,
            coalesce(k.text, col_description('dlq.dead_letter_queue'::regclass, e.attnum), w.text,
                col_description('dlq.failure_groups'::regclass, g.attnum), col_description('dlq.group_marks'::regclass,
                    m.attnum), col_description('dlq.rollup_flow'::regclass, f.attnum)) AS text
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
        LEFT JOIN (VALUES
            ('entries', 'next', 'The next step, as text.'),
            ('backlog', 'entries', 'Number of entries.'),
            ('backlog', 'more', 'Whether there are further unfiled entries.'),
            ('backlog_by_class', 'open', 'Open entries at the end of the hour.'),
            ('backlog_by_class', 'error_class', 'The class; undecided if none yet.'),
            ('failures_by_hour', 'weekday', 'Day of the week: 1 is Monday.'),
            ('failures_by_hour', 'hour', 'Hour of the day, in the session''s time zone.'),
            ('rates_by_hour', 'open', 'Open entries at the end of the hour.'),
            ('error_types', 'share', 'Share of all failures, 0 to 1.'),
            ('noisiest_sources', 'source', 'The sender of the messages.'),
            ('noisiest_sources', 'share', 'Share of all captures that name a source, 0 to 1.'),
            ('oldest_entries', 'age', 'How long the entry has been open.'),
            ('groups', 'status', 'open, fixed (marked as fixed), regressed (failed after that) or muted.'),
            ('groups', 'regressed', 'Whether the group failed after it was marked as fixed; also true while it is muted.'),
            ('groups', 'in_window', 'Failures in the last 24 hours.'), ('groups', 'trend', 'Failures by hour.'),
            ('groups', 'mute_left', 'The mute ends after this many more failures; null for no number.'),
            ('groups', 'place', 'Position in the order, for the next page.'),
            ('top_groups', 'in_window', 'Failures in the last seven days.'),
            ('top_groups', 'trend', 'Failures by day.'),
            ('replay_success', 'failed', 'Redeliveries that failed.'),
            ('replay_success', 'success', 'Share of the ended redeliveries that succeeded, 0 to 1.'),
            ('retry_cost', 'attempts_per_capture', 'Attempts for each job that became a dead letter.'),
            ('retry_cost', 'wasted', 'Share of all attempts and redeliveries that failed, 0 to 1.'),
            ('rollup_lag', 'at', 'The rollups are exact as of this time.'),
            ('rollup_lag', 'behind', 'Age of the rollups.'),
            ('rollup_lag', 'rebuilt_at', 'When the rollups were last rebuilt.'),
            ('rollup_lag', 'moves', 'Moves counted since the rebuild.'),
            ('time_in_dlq', 'measure',
                'in_dlq: how long entries were open. to_recovery: from the first failure until the work was done.'),
                    ('time_in_dlq', 'entries', 'Number of entries.'), ('time_in_dlq', 'average', 'Average time.'),
            ('time_in_dlq', 'p50', 'Median time.'), ('time_in_dlq', 'p95', '95th percentile.'),
            ('time_in_dlq', 'p99', '99th percentile.'),
            ('automatic', 'source', 'Source of the switch: operator, policy or default.'),
            ('automatic', 'name', 'Name of the queue or class, or pattern of the kind.'),
            ('automatic', 'at', 'When an operator set the switch.'),
            ('automatic', 'scope', 'Scope of the switch: all, queue, kind or class; or stop.'),
            ('automatic', 'enabled', 'Whether matching entries are redelivered automatically.'),
            ('automatic', 'include', 'Entries that need manual handling otherwise.'),
            ('automatic', 'actor', 'The operator that set the switch.'),
            ('automatic', 'note', 'The note of the operator.')) k (of_view, of_column, text) ON k.of_view = c.relname
                AND k.of_column = a.attname
        LEFT JOIN pg_attribute e ON e.attrelid = 'dlq.dead_letter_queue'::regclass AND e.attname = a.attname
            AND e.attnum > 0 AND c.relname IN ('entries', 'visible_entries', 'backlog', 'oldest_entries')
        LEFT JOIN pg_attribute f ON f.attrelid = 'dlq.rollup_flow'::regclass AND f.attname = a.attname AND f.attnum > 0
        LEFT JOIN (VALUES
            ('hour', 'Start of the hour (UTC).'), ('bucket', 'Start of the bucket (UTC).'), ('queue', 'The queue.'),
            ('error_class', 'The class.'), ('error_type', 'The type; '''' if the error has none.'),
            ('failures', 'Captures, and redeliveries that failed.')) w (of_column, text)
            ON w.of_column = a.attname AND c.relname NOT IN ('entries', 'visible_entries')
        LEFT JOIN pg_attribute g ON g.attrelid = 'dlq.failure_groups'::regclass AND g.attname = a.attname
            AND g.attnum > 0 AND c.relname IN ('groups', 'top_groups')
        LEFT JOIN pg_attribute m ON m.attrelid = 'dlq.group_marks'::regclass AND m.attname = a.attname AND m.attnum > 0
            AND c.relname = 'groups'
        WHERE c.relnamespace = v_schema AND c.relkind = 'v'
    LOOP
        EXECUTE format('COMMENT ON COLUMN %s.%I IS %L', v_object.name, v_object.of_column, v_object.text);
    END LOOP;
END
$$;
