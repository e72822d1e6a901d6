package reconcile_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// retry has a person retry a job in River UI: River's JobRetry. attempt is what the client that fetches it adds.
func (b *testBundle) retry(id int64) {
	b.Helper()
	b.exec(`UPDATE river_job SET state = 'available', finalized_at = NULL, scheduled_at = now(), metadata = metadata - 'cancel_attempted_at',
		max_attempts = CASE WHEN attempt = max_attempts THEN max_attempts + 1 ELSE max_attempts END WHERE id = $1 AND state <> 'running'`, id)
}

// failAt has a job run and fail as River's completer does, with a finalized_at.
func (b *testBundle) failAt(id int64, at string) {
	b.Helper()
	b.exec("UPDATE river_job SET state = 'running', attempt = attempt + 1, attempted_at = now() WHERE id = $1", id)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = `+at+`,
		errors = errors || jsonb_build_object('at', clock_timestamp(), 'attempt', attempt, 'error', 'timeout', 'trace', '') WHERE id = $1`, id)
}

// settle has dlqd do all that is to be done, automatic redelivery included.
func (b *testBundle) settle() {
	b.Helper()
	for range 3 {
		b.exec("SELECT dlq.apply_facts()")
		b.exec("SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_inbox))")
	}
	require.Zero(b, b.count("SELECT count(*) FROM dlq.dead_letter_inbox"))
	require.Zero(b, b.count("SELECT count(*) FROM dlq.job_facts WHERE fact <> 'following'"))
}

func (b *testBundle) discard() {
	b.Helper()
	b.exec("SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_open")
}

func (b *testBundle) entries() int { return b.count("SELECT count(*) FROM dlq.dead_letter_queue") }

// taken is how many failures are in entries: an entry's own, and those that were folded into it.
func (b *testBundle) taken() int {
	return b.count("SELECT count(*) FROM dlq.dead_letter_transitions WHERE failed_at IS NOT NULL")
}

// lost looks at all that River keeps, as recent and as a whole and as a backfill, and files what that finds. It returns how many.
func (b *testBundle) lost() int {
	b.Helper()
	n := b.look(b.pool, false) + b.look(b.pool, true) + b.count("SELECT dlq.backfill()")
	b.settle()
	return n
}

// A job fails, its entry is discarded, a person retries the job, it fails again into the same entry, which is discarded again.
func (b *testBundle) twiceDiscarded(first, second string) (id int64) {
	b.Helper()
	id = b.job()
	b.failAt(id, first)
	b.settle()
	b.discard()
	b.retry(id)
	b.settle()
	require.Equal(b, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE rule = 'done-twice'"))
	b.failAt(id, second)
	b.settle()
	require.Equal(b, 1, b.entries())
	require.Equal(b, 2, b.taken())
	b.discard()
	return id
}

func TestKnown_FoldedFailureOfClosedEntryIsNotFiledAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.twiceDiscarded("clock_timestamp()", "clock_timestamp()")
	require.Zero(t, b.lost())
	require.Equal(t, 1, b.entries())

	// It is retried once more: that is of the entry, too. What it fails with then is taken in, once.
	b.retry(id)
	b.settle()
	require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE rule = 'done-twice'"))
	b.failAt(id, "clock_timestamp()")
	b.settle()
	require.Equal(t, 3, b.taken())
	b.discard()
	require.Zero(t, b.lost())

	// A newer failure, which no trigger saw, is filed, and once.
	b.exec("SELECT dlq.set_capture('off')")
	b.retry(id)
	b.failAt(id, "clock_timestamp()")
	b.exec("SELECT dlq.set_capture('on')")
	require.Equal(t, 1, b.lost())
	require.Equal(t, 2, b.entries())
	require.Zero(t, b.lost())
	b.discard()
	require.Zero(t, b.lost())
}

// River's clients have clocks of their own: what failed later may say that it failed earlier.
func TestKnown_NewerFailureWithEarlierClockIsFiled(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.twiceDiscarded("clock_timestamp()", "clock_timestamp() - interval '10 minutes'")
	require.Zero(t, b.lost())
	b.exec("SELECT dlq.set_capture('off')")
	b.retry(id)
	b.failAt(id, "clock_timestamp() - interval '20 minutes'")
	b.exec("SELECT dlq.set_capture('on')")
	require.Equal(t, 1, b.lost())
	require.Zero(t, b.lost())
}

// All failures of a job whose finalized_at is no time have one id.
func TestKnown_FailuresWithoutATime(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"infinity", "294276-01-01", "2100-01-01"} {
		t.Run(at, func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			at := "'" + at + "'::timestamptz"
			id := b.twiceDiscarded(at, at)
			require.Zero(t, b.lost())
			// A newer one, past a closed entry that has its id.
			b.exec("SELECT dlq.set_capture('off')")
			b.retry(id)
			b.failAt(id, at)
			b.exec("SELECT dlq.set_capture('on')")
			require.Equal(t, 1, b.lost())
			require.Equal(t, 2, b.entries())
			require.Equal(t, 2, b.count("SELECT count(DISTINCT id) FROM dlq.dead_letter_queue"))
			require.Zero(t, b.lost())
			b.discard()
			require.Zero(t, b.lost())
			b.retry(id)
			b.settle()
			require.Equal(t, 1, b.count("SELECT count(*) FROM dlq.dead_letter_open"))
			b.failAt(id, at)
			b.settle()
			b.discard()
			require.Zero(t, b.lost())
			b.exec("SELECT dlq.delete_entries(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
			require.Zero(t, b.lost())
			// Two that wait in the inbox at once, and the same id of another job.
			b.retry(id)
			b.failAt(id, at)
			b.exec("DELETE FROM dlq.job_facts")
			b.retry(id)
			b.exec("DELETE FROM dlq.job_facts")
			b.failAt(id, at)
			before := b.taken()
			b.settle()
			require.Equal(t, before+2, b.taken())
			b.discard()
			b.exec("DELETE FROM river_job WHERE id = $1", id)
			b.exec("INSERT INTO river_job (id, kind, args, max_attempts, attempt, state, errors) VALUES ($1, 'mail', '{}', 25, (SELECT max(retry_count) FROM dlq.dead_letter_queue) - 1, 'running', '{}')", id)
			b.failAt(id, at)
			n := b.entries()
			b.settle()
			require.Equal(t, n+1, b.entries())
			b.discard()
			require.Zero(t, b.lost())
		})
	}
}
