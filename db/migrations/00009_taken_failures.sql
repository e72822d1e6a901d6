-- +goose Up
-- dlq.retired_jobs gets one row for each failure that the id of an entry does not identify. Before, it
-- had one row for each job: existing rows get the zero UUID, which stands for all failures of the job
-- until then.
ALTER TABLE dlq.retired_jobs
    ADD COLUMN failure  uuid NOT NULL DEFAULT '00000000-0000-0000-0000-000000000000',
    ADD COLUMN attempt  integer NOT NULL DEFAULT 0,
    ADD COLUMN entry_id uuid,
    DROP CONSTRAINT retired_jobs_pkey,
    ADD CONSTRAINT retired_jobs_pkey PRIMARY KEY (job_id, job_created_at, failure, attempt);
COMMENT ON TABLE dlq.retired_jobs IS
    'Failures that are recorded in an entry, but not identified by the entry''s id: further failures of its '
    'job, failures whose finalized_at is not a possible time (such as infinity), and those of entries that were '
    'deleted while River still had the job. They are never filed again: see dlq.known_failure(). Rows are '
    'deleted after River has deleted the job.';
COMMENT ON COLUMN dlq.retired_jobs.at IS 'When the failure was recorded in the entry, or the entry was deleted.';
COMMENT ON COLUMN dlq.retired_jobs.failure IS
    'The failure: dlq.entry_id() of the job and its finalized_at. The zero UUID, in rows from before schema '
    'version 9, stands for all failures of the job until then.';
COMMENT ON COLUMN dlq.retired_jobs.attempt IS
    'The job''s attempt that failed. It distinguishes failures whose finalized_at is not a possible time, '
    'because these share an id.';
COMMENT ON COLUMN dlq.retired_jobs.entry_id IS 'The entry that the failure was recorded in.';
-- dlq.remember_taken() adds the failures that were recorded in entries before. It runs before the
-- reconciler's next scan.
INSERT INTO dlq.settings (key, value)
SELECT 'remember_taken', 'upgrade' WHERE EXISTS (SELECT FROM dlq.dead_letter_queue);

-- +goose Down
DELETE FROM dlq.settings WHERE key = 'remember_taken';
DELETE FROM dlq.retired_jobs r USING dlq.retired_jobs o
WHERE o.job_id = r.job_id AND o.job_created_at = r.job_created_at AND (o.at, o.failure, o.attempt) > (r.at, r.failure, r.attempt);
ALTER TABLE dlq.retired_jobs
    DROP CONSTRAINT retired_jobs_pkey,
    DROP COLUMN failure,
    DROP COLUMN attempt,
    DROP COLUMN entry_id,
    ADD CONSTRAINT retired_jobs_pkey PRIMARY KEY (job_id, job_created_at);
COMMENT ON TABLE dlq.retired_jobs IS 'Jobs whose entries were purged or retired while River still had the job: they are never filed again. Rows go when River has deleted the job.';
COMMENT ON COLUMN dlq.retired_jobs.at IS 'When its entry went.';
