package facts_test

import (
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// applyAll applies facts in batches, or one by one if careful, until none is left that can be applied.
func (b *bundle) applyAll(careful bool) {
	b.Helper()
	for b.count("SELECT dlq.apply_facts(p_careful => $1)", careful) > 0 {
	}
}

// Most retries are applied as a set; retries with special cases are applied one by one. The result must be the same as
// if all were applied one by one.
func TestApply_SetOfRetriesEqualsOneByOne(t *testing.T) {
	t.Parallel()
	retried := func(careful bool) string {
		b := setup(t)
		b.exec("REVOKE DELETE ON river_job FROM " + postgrestest.Role)
		var jobs []int64
		var ids []uuid.UUID
		for range 14 {
			job, id := b.createEntry()
			jobs, ids = append(jobs, job), append(ids, id)
			b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id)
		}
		unfiled, _ := b.createEntry()
		require.NoError(t, b.store.Park(t.Context(), ids[1], kim))
		b.exec("UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE id = $1", ids[2])
		redeliveries := []int64{b.replay(ids[2]), b.replay(ids[3]), b.replay(ids[4])}
		b.endJob(redeliveries[0], "discarded") // uses up the retries of its entry
		b.endJob(redeliveries[1], "discarded")
		b.applyAll(true)
		b.exec("SELECT dlq.discard($1, 'kim')", ids[5])
		for _, job := range append(jobs, unfiled, redeliveries[1]) {
			b.retry(job)
		}
		b.exec("UPDATE dlq.job_facts SET db_user = 'another_user' WHERE job_id = $1", jobs[6])
		for _, job := range jobs[7:12] {
			b.startJob(job)
		}
		b.endJob(jobs[8], "completed")
		b.endJob(jobs[9], "discarded")
		b.exec("SELECT dlq.set_capture('off')")
		b.endJob(jobs[10], "discarded")
		b.endJob(jobs[11], "cancelled")
		b.exec("SELECT dlq.reconcile()")
		b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox WHERE river_job_id = $1))", jobs[11])
		b.exec("SELECT dlq.set_capture('on')")
		b.exec("UPDATE river_job SET id = -id WHERE id = $1", jobs[12])
		b.applyAll(careful)
		return b.text(`SELECT string_agg(concat_ws(' ', e.river_job_id, e.status, e.redelivery_job_id, e.locked_by,
				e.dlq_retry_count, j.state, j.metadata ? 'dlq:entry_id', m.entry_id = e.id, t.trail, f.facts), E'\n'
				ORDER BY e.river_job_id, e.stage)
			FROM dlq.dead_letter_queue e
			LEFT JOIN river_job j ON j.id = e.river_job_id
			LEFT JOIN dlq.entry_jobs m ON m.job_id = e.river_job_id
			CROSS JOIN LATERAL (SELECT string_agg(concat_ws(', ', from_status, to_status, actor, reason, origin,
				config_version, river_job_id), '; ' ORDER BY at, id) AS trail
				FROM dlq.dead_letter_transitions WHERE entry_id = e.id) t
			CROSS JOIN LATERAL (SELECT string_agg(fact, ' ') AS facts FROM dlq.job_facts
				WHERE job_id = e.river_job_id) f`)
	}
	set, single := retried(false), retried(true)
	require.Equal(t, single, set)
	require.Contains(t, set, "River, as another_user")
	require.Contains(t, set, "which is gone")
	require.Contains(t, set, "done twice?")
	require.Contains(t, set, "its failure is known")
	require.Contains(t, set, "following")
}

// If the application rejects the marker of one job, the other jobs still get their markers.
func TestApply_MarksOtherJobsIfOneIsRefused(t *testing.T) {
	t.Parallel()
	b := setup(t)
	var jobs []int64
	for range 3 {
		job, id := b.createEntry()
		b.exec("SELECT dlq.file(ARRAY[$1::uuid])", id)
		b.retry(job)
		jobs = append(jobs, job)
	}
	b.exec(fmt.Sprintf("ALTER TABLE river_job ADD CHECK (id <> %d OR NOT metadata ? 'dlq:entry_id')", jobs[1]))
	b.applyAll(false)
	for i, job := range jobs {
		marked := b.count("SELECT count(*) FROM river_job WHERE id = $1 AND metadata ? 'dlq:entry_id'", job)
		require.Equal(t, i != 1, marked == 1)
		require.Equal(t, job, *b.entry(b.entryOf(job)).RedeliveryJobID)
	}
	require.EqualValues(t, 1, b.countFacts(), "the job without a marker is followed")
	b.startJob(jobs[1])
	b.endJob(jobs[1], "completed")
	b.applyAll(false)
	require.Equal(t, "dlq_resolved", b.text("SELECT status FROM dlq.dead_letter_queue WHERE river_job_id = $1", jobs[1]))
}
