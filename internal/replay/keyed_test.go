package replay_test

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/replay"
)

const keyedPolicy = `
queues:
  a: {orderingKey: customer.id}
kinds:
  refund: {orderingKey: "customer id"}
  refund.kept: {staleAfter: 1h}
`

// failCustomers makes n jobs of each customer fail, in a failure group of their own, in the reverse order of their ids.
func (b *bundle) failCustomers(customers, n int) {
	b.Helper()
	b.registerQueue("a")
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, state) SELECT 'charge',
		jsonb_build_object('customer', jsonb_build_object('id', c), 'n', i), 'a', 1, 'running'
		FROM generate_series(1, $2) i CROSS JOIN generate_series(1, $1) c ORDER BY i, c`, customers, n)
	b.exec(`UPDATE river_job SET state = 'discarded', attempt = 1,
		finalized_at = now() - id * interval '1 s', errors = ARRAY['{"error": "x", "attempt": 1}'::jsonb]
		WHERE state = 'running'`)
	b.file()
}

// A job whose args have the policy's ordering key goes only after the success of the one that was inserted before it.
func TestRun_KeepsOrderOfKeyedJobs(t *testing.T) {
	t.Parallel()
	for _, progressive := range []bool{false, true} {
		b := setup(t)
		b.publish(keyedPolicy)
		b.failCustomers(3, 4)
		b.fail(2, "a", "T") // without a key
		run := b.start(replay.Request{All: true, Progressive: progressive, NewestFirst: progressive})
		require.EqualValues(t, 14, run.Total)
		require.EqualValues(t, 12, run.KeyedJobs)
		for range 12 {
			b.turn()
			require.Zero(t, b.count(`SELECT count(*) FROM (SELECT FROM river_job WHERE state = 'available' AND args ? 'customer'
				GROUP BY args -> 'customer' HAVING count(*) > 1) twice`))
			b.exec(`UPDATE river_job SET finalized_at = now(), attempt = 1,
				state = CASE WHEN args @> '{"customer": {"id": 2}, "n": 2}' THEN 'discarded' ELSE 'completed'
					END::river_job_state,
				errors = CASE WHEN args @> '{"customer": {"id": 2}, "n": 2}' THEN ARRAY['{"error": "x", "attempt": 1}'::jsonb] END
				WHERE state = 'available'`)
			_, _ = b.pool.Exec(t.Context(), "SELECT dlq.replay_go_on($1)", run.ID) // fails if no group is held
		}
		got := b.get(run)
		require.Equal(t, "completed", got.Status)
		require.EqualValues(t, 12, got.Replayed)
		require.EqualValues(t, 2, got.Skipped)
		require.Equal(t, 2, b.count(`SELECT count(*) FROM dlq.replay_run_entries x JOIN dlq.dead_letter_queue e
			ON e.id = x.entry_id WHERE x.reason = 'ordering_key' AND e.original_event @> '{"customer": {"id": 2}}'
			AND e.original_event ->> 'n' IN ('3', '4') AND x.detail LIKE 'an earlier one of its ordering key failed again%'`))
		require.Zero(t, b.count(`SELECT count(*) FROM (SELECT e.original_event ->> 'n' AS n,
			lag(e.original_event ->> 'n') OVER (PARTITION BY e.original_event -> 'customer' ORDER BY x.sent_at) AS before
			FROM dlq.replay_run_entries x JOIN dlq.dead_letter_queue e ON e.id = x.entry_id
			WHERE x.job_id IS NOT NULL AND e.original_event ? 'customer') o WHERE n < before`))
	}
}

// The path of a kind, with the longest pattern, comes before the queue's. A kind without a path has the queue's. Only a
// string, a number or a boolean is a key.
func TestJobKey_OfKindAndQueue(t *testing.T) {
	t.Parallel()
	b := setup(t)
	key := func(kind, queue, args string) (key *string) {
		t.Helper()
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT dlq.job_key()").Scan(&key))
		if key == nil {
			return nil
		}
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT "+*key+` FROM (SELECT 'k' AS job_kind, NULL AS ordering_key,
			$1::text AS kind, $2::text AS queue, $3::jsonb AS original_event) e`, kind, queue, args).Scan(&key))
		return key
	}
	require.Nil(t, key("refund", "a", `{"customer": {"id": 1}}`))
	b.publish(keyedPolicy)
	const both = `{"customer": {"id": 1}, "customer id": "x"}`
	require.Equal(t, "1", *key("charge", "a", both))
	require.Equal(t, "x", *key("refund", "a", both))
	require.Equal(t, "1", *key("refund.kept", "a", both))
	require.Nil(t, key("charge", "b", both))
	for _, args := range []string{
		`{}`, `{"customer": 1}`, `{"customer": {"id": {"a": 1}}}`, `{"customer": {"id": null}}`,
		`{"customer": {"id": ""}}`, `{"erased": true}`,
	} {
		require.Nil(t, key("charge", "a", args), args)
	}
	b.publish("{}")
	require.Nil(t, key("charge", "a", both))
}

func TestPreview_CountsKeyedJobs(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.failCustomers(3, 4)
	estimates := func(filter string) map[string]int64 {
		t.Helper()
		preview, err := b.replayer.Preview(t.Context(), &replay.Request{Filter: json.RawMessage(filter)})
		require.NoError(t, err)
		counts := map[string]int64{}
		for _, e := range preview.Estimates {
			counts[e.What] = e.Entries
		}
		return counts
	}
	require.NotContains(t, estimates(`{"queue": "a"}`), "keyed")
	b.publish(keyedPolicy)
	counts := estimates(`{"queue": "a"}`)
	require.EqualValues(t, 12, counts["keyed"])
	require.EqualValues(t, 9, counts["behind_job"])
	counts = estimates(`{"payload": {"n": 3}}`)
	require.EqualValues(t, 3, counts["keyed"])
	require.NotContains(t, counts, "behind_job", "earlier jobs are not among the entries")
	require.Equal(t, 9, b.count(`SELECT entries FROM dlq.preview_replay('{"queue": "a"}') WHERE what = 'behind_job'`))
	require.Equal(t, "12 of 12 have an ordering key in the args, whose order the run keeps; live jobs of the key pass, "+
		"and sequences of River Pro are left to River",
		replay.Estimate{What: "keyed", Entries: 12, Sampled: 12}.Text(replay.PlainWords(), 12))
}
