package deadletter_test

import (
	"slices"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// Each filter field selects the same entries in lists and in SQL, whether the entries are open, closed or unfiled.
func TestFilter_FieldsSelectSameEntriesEverywhere(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	exec := func(sql string) {
		t.Helper()
		_, err := pool.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	// Job 1 waits, 2 is parked, 3 is closed, 4 is a message, and 5 has just failed.
	exec(`WITH e (n, status, stage, queue, kind, job_kind, event, class, type, code, message, fingerprint, rule, strategy,
		waiting, attempts, assigned, source, subscriber, key, tags, event_id, failed, replays) AS (VALUES
			(1, 'dlq_pending', 'open', 'payments', 'order.paid', 'order.paid',
				'{"customer": {"id": 42}, "items": [{"sku": "a"}, {"sku": "b"}]}', 'outage', 'HTTP_503', '503',
					'Bank said: 100% "busy"', '3f2a000000000001', 'http', 'conditional', 'condition: breaker', 0, NULL, NULL, NULL,
						NULL, '{}', NULL, '2025-11-20 10:00Z', '[]'),
			(2, 'dlq_manual', 'open', 'mail_out', 'user.mail', 'user.mail', '{"customer": {"id": "42"}, "a.b": true}',
				'validation', 'HTTP_422', NULL, 'timed out_x', '3f2b000000000002', 'schema', 'manual', NULL, 3, 'kim', NULL, NULL,
					NULL, '{vip,eu}', NULL, '2025-11-21 23:59Z', '[{"jobId": 77, "outcome": "discarded"}]'),
			(3, 'dlq_resolved', 'resolved', 'payments', 'order.sent', 'order.sent', '{"customer": {"id": 43}}', 'outage',
				'HTTP_503', '503', 'TIMED OUT at bank', '9999000000000003', 'http', 'immediate', NULL, 1, 'nobody', NULL, NULL,
					'order-81', '{vip}', NULL, '2025-11-22 10:00Z', '[{"jobId": 78, "outcome": "completed"}]'),
			(4, 'dlq_pending', 'open', 'default', 'order.paid', 'dlqd_message',
				'{"kind": "order.paid", "payload": {"customer": {"id": 42}, "n": null}}', 'transient', NULL, NULL, NULL, NULL, 'x',
					'immediate', 'pace', 5, NULL, 'shop', 'cus_81', 'order-81', '{}', 'pay-1', '2025-11-23 10:00Z', '[]')
		), noted AS (
			INSERT INTO dlq.dead_letter_transitions (entry_id, to_status, actor, queue, kind)
			SELECT dlq.entry_id(n, failed::timestamptz), status::dlq.dead_letter_status, 'restored', queue, kind FROM e
		)
		INSERT INTO dlq.dead_letter_queue (id, river_job_id, job_created_at, priority, status, stage, queue, kind, job_kind,
			original_event, error_class, error_type, error_code, error_message, fingerprint, rule, strategy,
			waiting_for, dlq_retry_count, assigned_to, source, subscriber_id, ordering_key, tags, event_id, replay_attempts,
				first_failed_at, last_failed_at, created_at, closed_at, next_retry_at, move)
		SELECT dlq.entry_id(n, failed::timestamptz), n, failed::timestamptz, 1, status::dlq.dead_letter_status,
			stage::dlq.dead_letter_stage, queue, kind, job_kind, event::jsonb, class, type, code, message, fingerprint, rule,
				strategy::dlq.strategy,
			waiting, attempts, assigned, source, subscriber, key, tags::text[], event_id, replays::jsonb, failed::timestamptz,
				failed::timestamptz, failed::timestamptz, CASE WHEN stage = 'resolved' THEN failed::timestamptz END, now(),
					'{"moved": true}' FROM e`)
	exec(`INSERT INTO dlq.entry_jobs (job_id, job_created_at, entry_id) SELECT 77, now(), id FROM dlq.dead_letter_queue
		WHERE river_job_id = 2`)
	exec(`INSERT INTO river_job (id, kind, args, queue, max_attempts, state)
		VALUES (5, 'order.new', '{"customer": {"id": 42}}', 'payments', 1, 'running')`)
	exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(), errors = ARRAY['{"error": "timed out"}'::jsonb]`)

	for text, want := range map[string][]int64{
		"":                                    {1, 2, 3, 4, 5},
		"status:pending":                      {1, 4, 5},
		"status:manual,resolved":              {2, 3},
		"status:open":                         {1, 2, 4, 5},
		"status:closed":                       {3},
		"queue:payments":                      {1, 3, 5},
		"queue:payments,default":              {1, 3, 4, 5},
		"queue:pay*,mail_*":                   {1, 2, 3, 5},
		"queue:m_il*":                         nil,
		"kind:order.paid":                     {1, 4},
		"kind:order.*":                        {1, 3, 4, 5},
		"kind:order.* queue:payments":         {1, 3, 5},
		"class:outage,validation":             {1, 2, 3},
		"type:HTTP_503 code:503":              {1, 3},
		`"timed out"`:                         {2, 3, 5},
		`"timed out" bank`:                    {3},
		"timed bank":                          {3},
		`error:100%`:                          {1},
		`error:out_x`:                         {2},
		`error:t_med`:                         nil,
		`error:"\"busy\""`:                    {1},
		"group:3f2a":                          {1},
		"group:3f2":                           {1, 2},
		"group:3f2a000000000001,9999":         {1, 3},
		"group:9999000000000003":              {3},
		"group:zz":                            nil,
		"rule:http,x":                         {1, 3, 4},
		"strategy:immediate":                  {3, 4},
		"waiting:condition":                   {1},
		"waiting:condition,pace":              {1, 4},
		"stage:redelivery":                    {2},
		"stage:job":                           {1, 3, 4, 5},
		"assigned:kim":                        {2},
		"assigned:nobody":                     {1, 4, 5},
		`assigned:"nobody",me`:                {2, 3},
		"assigned:nobody,kim":                 {1, 2, 4, 5},
		"source:shop":                         {4},
		"subscriber:cus_81 message:pay-1":     {4},
		"key:order-81":                        {3, 4},
		"key:order-8,x":                       nil,
		"key:order-81,x status:closed":        {3},
		"tag:vip":                             {2, 3},
		"tag:vip,eu":                          {2},
		"job:1,77":                            {1, 2},
		"job:5":                               {5},
		"failed:2025-11-20":                   {1},
		"failed:2025-11-20..2025-11-21":       {1, 2},
		"failed:2025-11-21T23:00..2025-11-22": {2, 3},
		"before:2025-11-21":                   {1},
		"attempts:>1":                         {2, 4},
		"attempts:1..3":                       {2, 3},
		"attempts:0":                          {1, 5},
		"age:<200000w":                        {1, 2, 3, 4, 5},
		"age:>200000w":                        nil,
		"payload.customer.id:42":              {1, 2, 4, 5},
		"payload.customer.id:42,43":           {1, 2, 3, 4, 5},
		`payload.items.sku:b`:                 {1},
		`payload."a.b":true`:                  {2},
		`payload.customer.id:42 payload.items.sku:a`:                       {1},
		`payload.kind:order.paid`:                                          nil,
		`payload:{"customer":{"id":42}}`:                                   {1, 4, 5},
		`payload:{"items":[{"sku":"b"}]}`:                                  {1},
		`payload."say \"x\" \\ $.customer".id:42`:                          nil,
		`queue:"'; DROP TABLE x; --"`:                                      nil,
		`kind:"%"`:                                                         nil,
		`queue:payments status:pending class:outage error:busy group:3f2a`: {1},
	} {
		f, err := filter.Parse(text, "kim")
		require.NoError(t, err, text)
		list, err := store.List(t.Context(), deadletter.Page{Filter: f, Limit: 10})
		require.NoError(t, err, text)
		var listed []int64
		for _, e := range list {
			listed = append(listed, e.RiverJobID)
		}
		slices.Sort(listed)
		require.Equal(t, want, listed, text)
		for _, sql := range []string{
			"SELECT e.river_job_id FROM dlq.find_ids($1, 10) f JOIN dlq.dead_letter_queue e ON e.id = f ORDER BY 1",
			"SELECT river_job_id FROM dlq.find($1) ORDER BY 1",
		} {
			rows, err := pool.Query(t.Context(), sql, f.JSON())
			require.NoError(t, err, text)
			found, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			require.NoError(t, err, text)
			require.Equal(t, want, slices.Clip(append([]int64(nil), found...)), "%s: %s", text, sql)
		}
		selectsAll, err := store.SelectsAll(t.Context(), f.JSON())
		require.NoError(t, err)
		require.Equal(t, text == "" || text == "age:<200000w", selectsAll, text)
	}
	for _, text := range []string{
		"stage:job,redelivery", "queue:*", "kind:**,x status:open,closed",
		"age:>0s", `payload:{}`,
	} {
		f, err := filter.Parse(text, "kim")
		require.NoError(t, err, text)
		selectsAll, err := store.SelectsAll(t.Context(), f.JSON())
		require.NoError(t, err)
		require.True(t, selectsAll, text)
	}
	// Every function that takes a filter rejects an invalid one.
	for _, raw := range []string{
		`{"errorMessage": ""}`, `{"fingerprint": [""]}`, `{"waitingFor": "godot"}`, `{"failedIn": ["x"]}`,
		`{"strategy": "x"}`, `{"jobId": ["x"]}`, `{"minAge": "-1 day"}`,
		`{"payloadAt": {}}`, `{"payloadAt": []}`, `{"payloadAt": "x"}`,
		`{"payloadAt": [{"path": [], "values": ["x"]}]}`, `{"payloadAt": [{"path": "x", "values": ["x"]}]}`,
		`{"payloadAt": [{"path": ["x"]}]}`, `{"payloadAt": ["x"]}`, `{"q": "x"}`, `[]`, `"x"`,
	} {
		for _, sql := range []string{"SELECT dlq.find_ids($1::text::jsonb, 10)", "SELECT dlq.preview($1::text::jsonb)"} {
			_, err := pool.Exec(t.Context(), sql, raw)
			require.ErrorContains(t, err, "DLQ04", "%s %s", sql, raw)
		}
	}
	_, err := store.List(t.Context(),
		deadletter.Page{Filter: filter.Filter{IDs: []string{uuid.NewString(), "x"}}, Limit: 1})
	require.Error(t, err)
}
