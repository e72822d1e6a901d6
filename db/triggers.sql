-- The triggers on dlqd's own tables, which call functions of db/code, and who reads which rows. dlqd
-- runs this file only if triggers are missing or the file has changed: the statements lock the tables
-- against writers for a moment, and capture skips failures of that moment. Each paragraph is a
-- transaction, so that a try waits for the locks of few tables: with the locks of all tables in one
-- transaction, each of 25 tries failed on a busy database.

-- A redelivery whose row is as dlq.on_move would leave it needs only the audit row that dlq.on_moves writes: the call
-- of dlq.on_move would be a tenth of its cost. The last two conditions are those of dlq.moves_in_batch, which roles
-- that may update the table may not be allowed to call.
CREATE OR REPLACE TRIGGER dead_letter_move BEFORE UPDATE ON dlq.dead_letter_queue
    FOR EACH ROW
    WHEN ((OLD.status IS DISTINCT FROM NEW.status OR OLD.next_retry_at IS DISTINCT FROM NEW.next_retry_at
           OR OLD.closed_at IS DISTINCT FROM NEW.closed_at OR OLD.id IS DISTINCT FROM NEW.id
           OR OLD.river_job_id IS DISTINCT FROM NEW.river_job_id OR NEW.move IS NOT NULL
           OR OLD.stage = 'inbox' OR OLD.stage IS DISTINCT FROM NEW.stage)
          AND (OLD.status IN ('dlq_pending', 'dlq_manual') AND NEW.status = 'dlq_processing'
               AND OLD.stage = 'open' AND NEW.stage = 'open' AND NEW.id = OLD.id
               AND NEW.river_job_id = OLD.river_job_id AND NEW.ordering_key IS NULL AND NEW.move IS NULL
               AND NEW.next_retry_at IS NULL AND NEW.waiting_for IS NULL AND NEW.parked_by IS NULL
               AND NEW.closed_at IS NULL AND NEW.updated_at = now()
               AND coalesce(current_setting('dlq.moves', true), '') <> ''
               AND has_table_privilege(coalesce(nullif(current_setting('role', true), 'none'), session_user)::name,
                   'dlq.dead_letter_queue'::regclass, 'TRIGGER WITH GRANT OPTION')) IS NOT TRUE)
    EXECUTE FUNCTION dlq.on_move();
-- An open entry is in the open partition. A statement names that partition or the root. These triggers are in one
-- transaction with dlq.on_move's: a move has one audit row, from either function.
CREATE OR REPLACE TRIGGER dead_letter_moves AFTER UPDATE ON dlq.dead_letter_queue
    REFERENCING OLD TABLE AS was NEW TABLE AS came FOR EACH STATEMENT
    WHEN (current_setting('dlq.moves', true) <> '') EXECUTE FUNCTION dlq.on_moves();
CREATE OR REPLACE TRIGGER dead_letter_moves AFTER UPDATE ON dlq.dead_letter_open
    REFERENCING OLD TABLE AS was NEW TABLE AS came FOR EACH STATEMENT
    WHEN (current_setting('dlq.moves', true) <> '') EXECUTE FUNCTION dlq.on_moves();

-- Only statements that set these columns pay for the comparison.
CREATE OR REPLACE TRIGGER dead_letter_content BEFORE UPDATE OF original_event, error_message ON dlq.dead_letter_queue
    FOR EACH ROW
    WHEN (NEW.move IS NULL AND OLD.status = NEW.status
          AND (OLD.original_event IS DISTINCT FROM NEW.original_event
               OR OLD.error_message IS DISTINCT FROM NEW.error_message))
    EXECUTE FUNCTION dlq.on_content();

CREATE OR REPLACE TRIGGER dead_letter_enter BEFORE INSERT ON dlq.dead_letter_open
    FOR EACH ROW WHEN (NEW.status <> 'dlq_pending') EXECUTE FUNCTION dlq.on_enter();

CREATE OR REPLACE TRIGGER dead_letter_enter BEFORE INSERT ON dlq.dead_letter_resolved
    FOR EACH ROW EXECUTE FUNCTION dlq.on_enter();

CREATE OR REPLACE TRIGGER dead_letter_enter BEFORE INSERT ON dlq.dead_letter_failed
    FOR EACH ROW EXECUTE FUNCTION dlq.on_enter();

CREATE OR REPLACE TRIGGER dead_letter_enter BEFORE INSERT ON dlq.dead_letter_archived
    FOR EACH ROW EXECUTE FUNCTION dlq.on_enter();

CREATE OR REPLACE TRIGGER dead_letter_enter BEFORE INSERT ON dlq.dead_letter_returned
    FOR EACH ROW EXECUTE FUNCTION dlq.on_enter();

DROP TRIGGER IF EXISTS dead_letter_delete ON dlq.dead_letter_queue;
CREATE TRIGGER dead_letter_delete AFTER DELETE ON dlq.dead_letter_queue
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION dlq.on_delete();

CREATE OR REPLACE TRIGGER dead_letter_insert AFTER INSERT ON dlq.dead_letter_queue
    REFERENCING NEW TABLE AS came FOR EACH STATEMENT EXECUTE FUNCTION dlq.on_insert();

DROP TRIGGER IF EXISTS dead_letter_delete ON dlq.dead_letter_open;
CREATE TRIGGER dead_letter_delete AFTER DELETE ON dlq.dead_letter_open
    REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION dlq.on_delete();

CREATE OR REPLACE TRIGGER dead_letter_truncate BEFORE TRUNCATE ON dlq.dead_letter_queue
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('it would delete open entries');

CREATE OR REPLACE TRIGGER dead_letter_truncate BEFORE TRUNCATE ON dlq.dead_letter_open
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('it would delete open entries');

CREATE OR REPLACE TRIGGER dead_letter_truncate BEFORE TRUNCATE ON dlq.dead_letter_inbox
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('it would delete open entries');

CREATE OR REPLACE TRIGGER transitions_append_only BEFORE DELETE OR TRUNCATE ON dlq.dead_letter_transitions
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('the audit trail is append-only');

CREATE OR REPLACE TRIGGER transitions_rewrite BEFORE UPDATE ON dlq.dead_letter_transitions
    FOR EACH ROW EXECUTE FUNCTION dlq.on_rewrite();

CREATE OR REPLACE TRIGGER acts_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON dlq.acts
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('the audit trail is append-only');

CREATE OR REPLACE TRIGGER operations_kept BEFORE UPDATE OR DELETE ON dlq.operations
    FOR EACH ROW EXECUTE FUNCTION dlq.on_operation();

CREATE OR REPLACE TRIGGER operations_truncate BEFORE TRUNCATE ON dlq.operations
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('the audit trail is append-only');

CREATE OR REPLACE TRIGGER erasures_kept BEFORE DELETE OR TRUNCATE ON dlq.erasures
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.refuse('records of erasures are permanent');

CREATE OR REPLACE TRIGGER erasures_progress BEFORE UPDATE ON dlq.erasures
    FOR EACH ROW EXECUTE FUNCTION dlq.on_erasure();

CREATE OR REPLACE TRIGGER role_scope_change AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON dlq.role_scopes
    FOR EACH STATEMENT EXECUTE FUNCTION dlq.on_role_scope();

-- Partitions and their parents. For new partitions, dlq.ensure_partition does the same.
SELECT dlq.guard_partition(relid, 'dlq.dead_letter_resolved')
FROM pg_partition_tree('dlq.dead_letter_resolved');

SELECT dlq.guard_partition(relid, 'dlq.dead_letter_failed')
FROM pg_partition_tree('dlq.dead_letter_failed');

SELECT dlq.guard_partition(relid, 'dlq.dead_letter_archived')
FROM pg_partition_tree('dlq.dead_letter_archived');

SELECT dlq.guard_partition(relid, 'dlq.dead_letter_returned')
FROM pg_partition_tree('dlq.dead_letter_returned');

SELECT dlq.guard_partition(relid, 'dlq.dead_letter_transitions')
FROM pg_partition_tree('dlq.dead_letter_transitions');

DO $$
DECLARE
    v_trigger record;
BEGIN
    FOR v_trigger IN
        SELECT t.tgname, t.tgrelid::regclass AS name, k.text
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
        JOIN (VALUES ('dead_letter_move', 'Rejects moves that the state table does not allow, and writes audit rows.'),
            ('dead_letter_moves', 'Writes the audit rows of moves that dlqd makes in one statement.'),
            ('dead_letter_content', 'Rejects changes of payloads and errors without an audit row.'),
            ('dead_letter_enter', 'Rejects new entries that are not dlq_pending.'),
            ('dead_letter_insert', 'Rejects new entries that are neither dlq_pending nor have an audit row.'),
                     ('dead_letter_delete', 'Rejects the deletion of open and failed entries.'),
                     ('dead_letter_truncate', 'Rejects TRUNCATE.'),
                     ('transitions_append_only', 'The audit trail is append-only.'),
                     ('transitions_rewrite', 'The audit trail is append-only, except that dlq.erase removes data.'),
                     ('acts_append_only', 'The audit trail is append-only.'),
                     ('operations_kept', 'Operations are part of the audit trail.'),
                     ('operations_truncate', 'Rejects TRUNCATE.'),
                     ('role_scope_change', 'Makes dlq.visible_entries a security barrier while any role has a scope.'),
                     ('erasures_kept', 'Records of erasures are permanent.'),
                     ('erasures_progress', 'Of the record of an erasure, only the progress can change.')) k (name, text)
                         ON k.name = t.tgname
        WHERE c.relnamespace = (SELECT q.relnamespace FROM pg_class q WHERE q.oid = 'dlq.dead_letter_queue'::regclass)
            AND t.tgparentid = 0 AND NOT t.tgisinternal
    LOOP
        EXECUTE format('COMMENT ON TRIGGER %I ON %s IS %L', v_trigger.tgname, v_trigger.name, v_trigger.text);
    END LOOP;
END
$$;

-- Readers of a table see the rows in their scope (dlq.scope). The owner sees all rows: dlqd works,
-- and capture writes, as the owner. Rows that belong to no queue are visible only to readers without
-- a scope.
SELECT dlq.fence_table(relid, 'dlq.in_patterns(queue, kind, (SELECT dlq.scope_patterns(dlq.scope())))')
FROM pg_partition_tree('dlq.dead_letter_queue');

SELECT dlq.fence_table(relid, 'dlq.in_patterns(queue, kind, (SELECT dlq.scope_patterns(dlq.scope())))')
FROM pg_partition_tree('dlq.dead_letter_transitions');

SELECT dlq.fence_table('dlq.acts', 'dlq.act_in_scope(subject, (SELECT dlq.scope()))');

SELECT dlq.fence_table('dlq.circuit_breakers', 'dlq.breaker_in_scope(name, (SELECT dlq.scope()))');
SELECT dlq.fence_table('dlq.circuit_breaker_changes', 'dlq.breaker_in_scope(name, (SELECT dlq.scope()))');

SELECT dlq.fence_table('dlq.replay_runs', 'dlq.scope_within(scope, (SELECT dlq.scope()))');
SELECT dlq.fence_table('dlq.replay_run_entries', 'EXISTS (SELECT FROM dlq.replay_runs r WHERE r.id = run_id)');
SELECT dlq.fence_table('dlq.replay_run_groups', 'EXISTS (SELECT FROM dlq.replay_runs r WHERE r.id = run_id)');

SELECT dlq.fence_table('dlq.operations', 'dlq.scope_within(scope, (SELECT dlq.scope()))');
SELECT dlq.fence_table('dlq.operation_unchanged', 'EXISTS (SELECT FROM dlq.operations o WHERE o.id = operation_id)');

SELECT dlq.fence_table('dlq.approvals', 'dlq.scope_within(scope, (SELECT dlq.scope()))');
SELECT dlq.fence_table('dlq.approval_entries', 'EXISTS (SELECT FROM dlq.approvals a WHERE a.id = approval_id)');

SELECT dlq.fence_table('dlq.rollup_flow', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.rollup_backlog', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.rollup_times', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.rollup_errors', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.rollup_groups', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');

SELECT dlq.fence_table('dlq.failure_groups', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.group_aliases', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.group_marks', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');

SELECT dlq.fence_table('dlq.deploys',
    'queue = '''' OR dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');

SELECT dlq.fence_table('dlq.ordered_jobs', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');

SELECT dlq.fence_table('dlq.source_positions',
    'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.source_progress', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.sources', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.source_deliveries',
    'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');
SELECT dlq.fence_table('dlq.feed_records', 'dlq.in_patterns(queue, NULL, (SELECT dlq.scope_patterns(dlq.scope())))');

SELECT dlq.fence_table('dlq.rollup_sources', NULL);

SELECT dlq.fence_table('dlq.counters', NULL);

SELECT dlq.fence_table('dlq.metrics_sample', NULL);

SELECT dlq.fence_table('dlq.job_facts', NULL);

SELECT dlq.fence_table('dlq.entry_jobs', NULL);

SELECT dlq.fence_table('dlq.retired_jobs', NULL);

SELECT dlq.fence_table('dlq.erasures', NULL);
SELECT dlq.fence_table('dlq.reconcile_findings', NULL);
SELECT dlq.fence_table('dlq.reconcile_looks', NULL);
SELECT dlq.fence_table('dlq.automatic_changes', NULL);

SELECT dlq.fence_table('dlq.gates', NULL);

SELECT dlq.fence_table('dlq.paces', NULL);

SELECT dlq.fence_table('dlq.destination_traffic', NULL);

SELECT dlq.fence_table('dlq.role_scopes', NULL);

ALTER TABLE dlq.saved_views ENABLE ROW LEVEL SECURITY; -- roles read saved views through dlq.views alone

-- Only the owner reads these, even after a GRANT on all tables of the schema.
ALTER TABLE dlq.tokens ENABLE ROW LEVEL SECURITY;

ALTER TABLE dlq.sessions ENABLE ROW LEVEL SECURITY;
