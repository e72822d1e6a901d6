package console_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestEdit_RequiresCheckpointChoice edits a resumable job, whose page shows the step after which it
// resumes.
func TestEdit_RequiresCheckpointChoice(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.fail("orders", "order", "card is wrong", 2)
	o.exec(`UPDATE dlq.dead_letter_queue SET metadata = '{"river:resumable_step": "charge"}'
		WHERE river_job_id = (SELECT min(river_job_id) FROM dlq.dead_letter_queue)`)
	id := o.text("SELECT id::text FROM dlq.dead_letter_open WHERE metadata ? 'river:resumable_step'")
	b := o.tab()
	b.open("/dead-letters/" + id)
	b.waitForText("When redelivered, it resumes after step charge.")
	b.click(".edit summary")
	b.fill(".edit textarea", `{"n": 12}`)
	b.follow(".edit button")
	b.waitForText("The job has completed some of its steps")
	require.Equal(t, true, b.value(`!document.querySelector("form.panel").checkValidity()`),
		"the form does not require a choice")
	b.click("input[name=checkpoint][value=discard]")
	b.follow("button[name=confirmed]")
	b.waitForText("Replayed with edits as job")
	require.Equal(t, 1, o.count(`SELECT count(*) FROM dlq.dead_letter_transitions WHERE entry_id = $1
		AND detail @> '{"checkpoint": "discard"}'`, id))

	// A job without a checkpoint shows no choice.
	id = o.text("SELECT id::text FROM dlq.dead_letter_open WHERE NOT metadata ? 'river:resumable_step'")
	b.open("/dead-letters/" + id)
	b.click(".edit summary")
	b.fill(".edit textarea", `{"n": 12}`)
	b.follow(".edit button")
	b.waitForText("Replay with these changes")
	require.Equal(t, false, b.value(`!!document.querySelector("input[name=checkpoint]")`))
}

// TestGroup_ShowsLostWorkers shows a group of jobs, one of which may kill its worker.
func TestGroup_ShowsLostWorkers(t *testing.T) {
	t.Parallel()
	o := open(t, nil)
	o.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, attempted_at, state, metadata)
		SELECT 'render', '{}', 'video', 3, 3, now(), 'running', '{"river:rescue_count": 3}' FROM generate_series(1, 100)`)
	o.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
		errors = ARRAY['{"error": "Stuck job rescued by JobRescuer", "attempt": 3}'::jsonb] WHERE state = 'running'`)
	o.eventually(100, "SELECT count(*) FROM dlq.dead_letter_open WHERE rule = 'worker-lost'")
	o.exec(postgrestest.RefreshRollups)
	b := o.tab()
	b.open(o.text("SELECT '/groups/' || queue || '/' || fingerprint FROM dlq.dead_letter_open LIMIT 1"))
	b.waitForText("100 dead letters were rescued twice or more")
	b.follow("#worker-lost a")
	b.waitForText("100 match")
	b.open("/dead-letters/" + o.text("SELECT id::text FROM dlq.dead_letter_open LIMIT 1"))
	b.waitForText("its worker died, or the job never ended, twice or more")
	b.waitForText("3 times; rescued together with 99 others")
}
