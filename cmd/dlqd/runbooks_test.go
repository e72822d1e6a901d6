package main_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// scenario is the situation that a runbook is for. It has the steps that create the situation, patterns of the text
// that the runbook's blocks print, and the state after the blocks.
type scenario struct {
	file   string            // path of the document, if it is not a runbook
	policy map[string]string // files of the policy; they replace the default files of the same name
	// hasReplica lets dlqd read from a standby.
	hasReplica bool
	setUp      func(*deployment)
	steps      []step
	prints     []string          // patterns for the output of the blocks not marked "wait"
	waits      string            // pattern for the last output of a block marked "wait"
	after      map[string]string // queries that return one value, each with that value
	check      func(*deployment)
}

// step is an event just before the test runs the runbook's block that contains the text before. do makes it happen: the
// receiver is repaired, the policy is reverted, dlqd starts again, or time passes.
type step struct {
	before string
	do     func(*deployment)
}

var scenarios = map[string]scenario{
	// The receiver fails at each message of one kind. Many messages of this kind arrive.
	"dlq-grows-fast": {
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, d delivery) {
				w.Header().Set("X-Error-Type", map[bool]string{true: "PRICE_MISSING", false: "OTHER"}[d.kind == "order.placed"])
				w.WriteHeader(map[bool]int{true: 500, false: 422}[d.kind == "order.placed"])
			})
			p.send(5, "order.placed", `{}`)
			p.send(1, "x.y", `{}`)
			p.await("6", decided)
		},
		steps: []step{{"'unpark'", func(p *deployment) {
			p.exec("UPDATE dlq.dead_letter_queue SET next_retry_at = now() WHERE status = 'dlq_pending'") // a minute passes
			require.Equal(p, 10, p.requestCount("order.placed"), "parked entries are sent")
			p.answers(nil)
		}}},
		prints: []string{
			`dlq_pending +\| default +\| transient +\| +5`, `5 \| default \| order.placed \| PRICE_MISSING`,
			`5 \| +5 \|`, `dlq_manual \| +5`,
		},
		after: map[string]string{
			"SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'returned to the automatic path' AND note = 'mended'":    "5",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE error_type = 'PRICE_MISSING' AND status = 'dlq_resolved'":               "5",
			"SELECT string_agg(kind, ',') FROM dlq.dead_letter_queue WHERE status IN ('dlq_pending', 'dlq_processing', 'dlq_manual')": "x.y",
		},
		check: func(p *deployment) { require.Equal(p, 15, p.requestCount("order.placed")) },
	},
	// The receiver answers 503 until it is repaired.
	"destination-down": {
		policy: map[string]string{
			"retry-policies": "queues: {default: {maxAttempts: 2, backoff: {kind: fixed, delay: 20ms}, whenOpen: " +
				"accept}}\ndestinations: {default: {url: RECEIVER}}\n",
			"circuit-breaker": "defaults: {consecutiveFailures: 6, openFor: 1h}\n",
			"dlq-routing": "strategies: {conditional: {delays: [1s], conditions: {cpuBelow: 0, memoryBelow: 0, " +
				"connectionsBelow: 0}}}\n",
		},
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, _ delivery) { w.WriteHeader(http.StatusServiceUnavailable) })
			p.send(2, "order.placed", `{}`)
			p.await("2", decided)
			p.send(10, "order.placed", `{}`)
			p.await("open", "SELECT state FROM dlq.circuit_breakers WHERE name = 'destination:default'")
			p.send(3, "order.placed", `{}`) // dlqd accepts the messages and holds them
			p.await("0", "SELECT count(*) FROM river_job WHERE state IN ('available', 'running', 'retryable')")
			p.await("t", "SELECT bool_and(waiting_for LIKE 'condition: %') FROM dlq.dead_letter_queue")
			p.requestsBefore = p.requestCount("order.placed")
		},
		steps: []step{{"reset_breaker", func(p *deployment) {
			require.Equal(p, p.requestsBefore, p.requestCount("order.placed"), "no attempt is made while it is open")
			p.answers(nil)
		}}},
		prints: []string{
			`destination:default \| open `,
			`default \| condition: circuit breaker destination:default is open \| +\d`,
			`default \| +\d`, `destination:default \| open +\| t +\| t`,
		},
		after: map[string]string{
			"SELECT state::text FROM dlq.circuit_breakers":                                                     "closed",
			"SELECT count(*) FROM dlq.circuit_breaker_changes":                                                 "3",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE status <> 'dlq_resolved'":                        "0",
			"SELECT count(*) FROM river_job WHERE state IN ('available', 'running', 'retryable', 'scheduled')": "0",
		},
		check: func(p *deployment) { require.Equal(p, 15, p.acceptedCount("order.placed")) },
	},
	// Since the deployment of a new version, the receiver requires a field that no client sends.
	"deploy-broke-a-kind": {
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, d delivery) {
				w.Header().Set("X-Error-Type", map[bool]string{true: "OTHER", false: "PRICE_MISSING"}[d.body == `"other"`])
				w.WriteHeader(http.StatusUnprocessableEntity)
			})
			p.send(9, "order.placed", `{"order": 1}`)
			p.send(2, "order.placed", `"other"`)
			p.await("11", decided)
		},
		steps:  []step{{"SELECT dlq.replay(id", func(p *deployment) { p.answers(nil) }}}, // the receiver is rolled back
		prints: []string{`order.placed \| PRICE_MISSING \| +9`, `default \| PRICE_MISSING \| under 1 hour \| +9`},
		waits:  `completed .*\| +\d \| +\d \| +0 \| +\d \| +0`,
		after: map[string]string{
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE error_type = 'PRICE_MISSING' AND status = 'dlq_resolved'":             "9",
			"SELECT count(*) >= 6 FROM dlq.dead_letter_queue WHERE edited_event @> '{\"payload\": {\"order\": 1, \"price\": 100}}'": "t",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE original_event @> '{\"payload\": {\"price\": 100}}'":                  "0",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'":                                                "2",
		},
		check: func(p *deployment) { require.Equal(p, 9, p.acceptedCount("order.placed")) },
	},
	// The replica does not replay the WAL.
	"replica-not-read": {
		policy:     map[string]string{"monitoring": "replica: {maxLag: 5s}\n"},
		hasReplica: true,
		setUp: func(p *deployment) {
			p.awaitMetric("dlqd_replica_up 1")
			p.servers.Pause()
			p.awaitMetric("dlqd_replica_up 0")
		},
		prints: []string{`paused \| +1 \| `, ` +1 \| [0-9A-F]+/`},
		waits:  `dlqd_replica_up 1`,
	},
	// An operator paused a source.
	"source-stands-still": {
		setUp: func(p *deployment) {
			p.exec("INSERT INTO dlq.sources (name, cluster, queue) VALUES ('orders', 'main', 'orders')")
			p.exec("SELECT dlq.pause_source('orders')")
			p.awaitMetric(`dlqd_source_paused{source="orders"} 1`)
		},
		prints: []string{`orders +\| +20`},
		waits:  `dlqd_source_paused\{source="orders"\} 0`,
		after:  map[string]string{"SELECT count(*) FROM dlq.acts WHERE act = 'resumed' AND note = 'the cluster is back'": "1"},
	},
	// A message kills each process that works on this message.
	"poison-message": {
		setUp: func(p *deployment) {
			arrived := make(chan struct{}, 10)
			p.answers(func(_ http.ResponseWriter, d delivery) {
				if strings.Contains(d.body, `"attachment": "x"`) {
					arrived <- struct{}{}
					<-d.gone
				}
			})
			p.send(1, "document.uploaded", `{"document": "doc_1", "attachment": "x"}`)
			for range 2 {
				<-arrived
				p.kill()
				// Make the job so old that River rescues it, and let the new process become River's leader at once.
				p.exec(`UPDATE river_job SET attempted_at = now() - interval '2 hours' WHERE state = 'running'; DELETE
					FROM river_leader`)
				p.serve()
			}
			p.await("1", decided)
		},
		prints: []string{`document.uploaded .*Stuck job rescued`, `document.uploaded`},
		waits:  `dlq_resolved \| .*"attachment": "x".* \| .*"attachment": null`,
		after:  map[string]string{"SELECT count(*) FROM dlq.dead_letter_transitions WHERE note LIKE '%ticket 4711'": "1"},
		check:  func(p *deployment) { require.Equal(p, 1, p.acceptedCount("document.uploaded")) },
	},
	// The receiver lost the messages that it had accepted, and refused later ones.
	"replay-since-a-time": {
		policy: map[string]string{"retry-policies": "queues: {default: {ordering: true}}\ndestinations: {default: {url: " +
			"RECEIVER}}\n"},
		setUp: func(p *deployment) {
			for i := range 3 {
				p.send(1, "stock.changed", fmt.Sprint(i), `"orderingKey": "A-81"`)
			}
			p.await("3", "SELECT count(*) FROM river_job WHERE state = 'completed'")
			p.answers(func(w http.ResponseWriter, _ delivery) {
				w.Header().Set("X-Error-Type", "T")
				w.WriteHeader(http.StatusUnprocessableEntity)
			})
			for i := range 6 {
				p.send(1, "order.placed", fmt.Sprint(i))
				p.await(fmt.Sprint(i+1), decided)
			}
		},
		steps:  []step{{"dlq.replay_start", func(p *deployment) { p.answers(nil); p.forget() }}}, // the receiver is restored
		prints: []string{`default \| T +\| under 1 hour \| +6`, `default \| +3 \|`, `run_again.*\n-+\n +3`},
		waits:  `completed \| +6 \| +6 \| +0`,
		after: map[string]string{
			`SELECT count(*) FROM river_job
				WHERE metadata @> '{"dlq:run_again": "incident 81"}' AND state = 'completed'`: "6",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'": "6",
		},
		check: func(p *deployment) {
			require.Equal(p, []string{"0", "1", "2", "3", "4", "5"}, p.bodies("order.placed"))
			require.Equal(p, []string{"0", "1", "2"}, p.bodies("stock.changed"))
		},
	},
	// Of three redeliveries, one has a killed worker, one a deleted job, and one a paused queue.
	"stuck-in-processing": {
		policy: map[string]string{"retry-policies": "queues: {default: {maxAttempts: 2}, other: {}}\ndestinations: " +
			"{default: {url: RECEIVER}}\n"},
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, _ delivery) { w.WriteHeader(http.StatusUnprocessableEntity) })
			p.send(1, "killed", `1`)
			p.send(1, "deleted", `1`, `"queue": "other"`)
			p.send(1, "paused", `1`, `"queue": "other"`)
			p.await("3", decided)
			arrived := make(chan struct{}, 1)
			p.answers(func(_ http.ResponseWriter, d delivery) { arrived <- struct{}{}; <-d.gone })
			ok(p.T, "queues", "pause", "other", "--api-url", p.dlqd.api)
			p.exec("SELECT dlq.replay(id) FROM dlq.dead_letter_queue")
			<-arrived
			p.kill()
			p.answers(nil)
			// Make the job so old that River rescues it.
			p.exec(`UPDATE river_job SET attempted_at = now() - interval '2 hours' WHERE state = 'running'; DELETE
				FROM river_leader`)
			p.serve()
			p.exec("DELETE FROM river_job WHERE state = 'available' AND args ->> 'kind' = 'deleted'")
		},
		prints: []string{`other +\| 20`, `without_a_job.*\n-+\n +0`},
		after: map[string]string{
			"SELECT string_agg(kind, ',') FROM dlq.dead_letter_queue WHERE status = 'dlq_processing'": "paused",
			`SELECT string_agg(DISTINCT status::text, ',') FROM dlq.dead_letter_queue
				WHERE kind IN ('killed', 'deleted')`: "dlq_manual",
		},
		check: func(p *deployment) {
			ok(p.T, "queues", "resume", "other", "--api-url", p.dlqd.api)
			p.await("dlq_resolved", "SELECT status FROM dlq.dead_letter_queue WHERE kind = 'paused'")
		},
	},
	// Monthly partitions are missing, so rows went to the default partitions.
	"partitions-and-disk": {
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, _ delivery) { w.WriteHeader(http.StatusUnprocessableEntity) })
			p.send(3, "order.placed", `{}`)
			p.await("3", decided)
			postgrestest.ExecUndisturbed(p, p.pool, `DO $$ BEGIN EXECUTE format('DROP TABLE dlq.dead_letter_resolved_%s, dlq.dead_letter_transitions_%s', to_char(now(), 'YYYYMM'), to_char(now() + interval '1 month', 'YYYYMM')); END $$`)
			p.exec("SELECT dlq.resolve(id, 'kim', 'by hand') FROM dlq.dead_letter_queue")
			p.await("3", "SELECT count(*) FROM dlq.dead_letter_resolved_default")
		},
		prints: []string{
			`dead_letter_open`, `audit trail +\| +0`, `resolved[^|]*\| +3`, `made_ahead.*\n-+\n +t`,
			`UNIT +ENTRIES`,
		},
		after: map[string]string{
			"SELECT to_regclass('dlq.dead_letter_resolved_' || to_char(now() + interval '3 months', 'YYYYMM')) IS NOT NULL": "t",
			"SELECT sum(entries) FROM dlq.default_partition_rows()":                                                         "0",
			"SELECT count(*) FROM dlq.dead_letter_resolved":                                                                 "3",
		},
	},
	// Workers hang, a queue has more jobs than workers, and an old open transaction blocks River.
	"river-is-slow": {
		policy: map[string]string{
			"retry-policies": "queues: {default: {timeout: 5m}}\ndestinations: {default: {url: RECEIVER}}\n",
			"worker-pool":    "queues: {default: {concurrency: 2}}\n",
		},
		setUp: func(p *deployment) {
			hung, wake := make(chan struct{}, 20), make(chan struct{})
			p.answers(func(http.ResponseWriter, delivery) { hung <- struct{}{}; <-wake })
			p.send(12, "order.placed", `{}`)
			<-hung
			<-hung
			p.exec("UPDATE river_job SET scheduled_at = now() - interval '2 hours' WHERE state = 'available'")
			holder, err := p.pool.Begin(context.WithoutCancel(p.Context()))
			require.NoError(p, err)
			_, err = holder.Exec(p.Context(), "LOCK TABLE river_job IN SHARE MODE")
			require.NoError(p, err)
			p.Cleanup(func() { _ = holder.Rollback(context.Background()) })
			p.wake = func() { close(wake) }
			go func() {
				_, _ = p.pool.Exec(context.WithoutCancel(p.Context()), `UPDATE river_job SET priority = priority
					WHERE state = 'available'`)
			}()
			p.await("t", `SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = current_database()
				AND cardinality(pg_blocking_pids(pid)) > 0`)
			p.await("10", "SELECT count(*) FROM dlq.jobs('{\"overdue\": \"1 hour\"}')")
		},
		steps: []step{{"VACUUM", func(p *deployment) {
			p.exec(`SELECT pg_terminate_backend(b.pid) FROM pg_stat_activity a, unnest(pg_blocking_pids(a.pid)) b (pid)
				WHERE a.datname = current_database()`)
			p.wake()
		}}},
		prints: []string{
			`available \| default \| +10`, `running +\| default \| +2`, `\{\d+`, `dlq_capture \| t`,
			`dlq_follow +\| t`, `VACUUM`,
		},
		waits: `overdue.*\n-+\n +0`,
		after: map[string]string{"SELECT count(*) FROM river_job WHERE state = 'completed'": "12"},
		check: func(p *deployment) { require.Equal(p, 12, p.acceptedCount("order.placed")) },
	},
	// The database is dumped, and dlqd continues. Then the dump is restored to another database.
	"restored-from-backup": {
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, d delivery) {
				w.WriteHeader(map[bool]int{true: 422, false: 500}[strings.Contains(d.body, "pay_3")])
			})
			for i := range 3 {
				p.send(1, "payment.captured", fmt.Sprintf(`{"paymentId": "pay_%d"}`, i+1))
			}
			p.await("3", decided)
			arrived, answer := make(chan struct{}, 1), make(chan struct{})
			p.answers(func(_ http.ResponseWriter, d delivery) {
				if strings.Contains(d.body, "pay_3") {
					arrived <- struct{}{}
					<-answer
				}
			})
			p.exec("SELECT dlq.replay(id) FROM dlq.find('{\"payload\": {\"paymentId\": \"pay_3\"}}')")
			<-arrived
			backup := filepath.Join(p.TempDir(), "backup")
			p.command("pg_dump", "--format=custom", "--file", backup, p.url)
			close(answer)
			p.exec("SELECT dlq.replay(id) FROM dlq.find('{\"payload\": {\"paymentId\": \"pay_1\"}}')")
			p.await("2", "SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'")
			p.kill()
			p.url = postgrestest.Empty(p)
			p.pool = postgrestest.Open(p, p.url)
			p.command("pg_restore", "--no-comments", "--exit-on-error", "--dbname", p.url, backup)
			p.await("2", "SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_pending'")
			// The restore takes so long that the entries are due.
			p.exec("UPDATE dlq.dead_letter_queue SET next_retry_at = now() WHERE status = 'dlq_pending'")
			p.forget()
			p.serve()
			// dlqd holds the redeliveries.
			p.await("2", "SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_pending' AND waiting_for = 'automatic'")
			require.Empty(p, p.bodies("payment.captured"))
		},
		steps: []step{{"dlq.resume_restored", func(p *deployment) {
			require.Empty(p, p.bodies("payment.captured"), "held entries were sent before the resume")
		}}},
		prints: []string{
			`20.* \| this is another database of the same server; its last record is of 20`,
			`redelivery of a message +\| t +\| +1`, `dead letter that goes by itself +\| t +\| +2 \| 2 of them are due`,
			`(running|scheduled|available) \| default \| +1`,
			`payment.captured \| 20.* \| (running|scheduled|available)`, `2 \| +2 \|`, `1 \| +1 \|`, `f +\| +0`,
		},
		after: map[string]string{
			"SELECT resolution_notes FROM dlq.dead_letter_queue WHERE original_event @> '{\"payload\": {\"paymentId\": \"pay_1\"}}'": "the bank has it",
			`SELECT status FROM dlq.dead_letter_queue
				WHERE original_event @> '{"payload": {"paymentId": "pay_2"}}'`: "dlq_resolved",
			"SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'returned to the automatic path' AND note = 'the bank does not have it'": "1",
		},
		check: func(p *deployment) {
			require.Equal(p, []string{`{"paymentId": "pay_2"}`}, p.bodies("payment.captured"),
				"a payment that the bank has is sent again")
		},
	},
	// While a receiver was down, an operator stopped all automatic redelivery.
	"automatic-stopped": {
		policy: map[string]string{"dlq-routing": "strategies: {immediate: {delays: [100ms]}}\n"},
		setUp: func(p *deployment) {
			p.exec("SELECT dlq.stop_automatic('kim', 'the bank asked for it')")
			p.answers(func(w http.ResponseWriter, _ delivery) { w.WriteHeader(http.StatusInternalServerError) })
			p.send(3, "order.placed", `{}`)
			p.await("3", decided)
			p.await("3", "SELECT count(*) FROM dlq.dead_letter_queue WHERE next_retry_at <= now()")
			p.answers(nil)
		},
		prints: []string{`kim +\| the bank asked for it`, `default \| transient +\| +3`},
		waits:  `overdue.*\n-+\n +0`,
		after:  map[string]string{"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'": "3"},
	},
	// An operator switched capture off, and jobs fail.
	"capture-missing": {
		setUp: func(p *deployment) {
			p.exec("SELECT dlq.set_capture('off', p_actor => 'kim', p_note => 'disk full')")
			p.answers(func(w http.ResponseWriter, _ delivery) { w.WriteHeader(http.StatusUnprocessableEntity) })
			p.send(2, "order.placed", `{}`)
			p.await("2", "SELECT count(*) FROM river_job WHERE state = 'cancelled'")
			holder, err := p.pool.Begin(context.WithoutCancel(p.Context()))
			require.NoError(p, err)
			_, err = holder.Exec(p.Context(), "LOCK TABLE dlq.job_facts IN SHARE MODE")
			require.NoError(p, err)
			p.wake = func() { require.NoError(p, holder.Rollback(context.Background())) }
		},
		steps: []step{{"dlq.set_capture('on'", func(p *deployment) { p.wake() }}},
		prints: []string{
			`off +\| enabled +\| .*\| kim +\| disk full`, `job_facts +\| +ShareLock`,
			`on +\| Failures are captured`, `on +\| enabled`,
		},
		after: map[string]string{"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_manual'": "2"},
		check: func(p *deployment) {
			p.send(1, "order.placed", `{}`)
			p.await("3", decided)
		},
	},
	// The policy classifies a permanent error as transient, and a run replays other entries in vain.
	"few-are-resolved": {
		policy: map[string]string{"dlq-routing": "strategies: {immediate: {delays: [100ms, 1h]}}\n"},
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, _ delivery) {
				w.Header().Set("X-Error-Type", "LEDGER_CLOSED")
				w.WriteHeader(http.StatusInternalServerError)
			})
			p.send(4, "payment.booked", `{}`)
			p.await("4", `SELECT count(*) FROM dlq.dead_letter_queue WHERE dlq_retry_count = 1 AND status = 'dlq_pending'
				AND next_retry_at > now() + interval '1 minute'`)
			// Start a run of three entries of another queue. The run is so slow that entries are left when the operator
			// pauses the run.
			p.exec("INSERT INTO river_job (kind, queue, args, max_attempts, attempt, state) " +
				"SELECT 'app', 'elsewhere', '{}', 1, 1, 'running' FROM generate_series(1, 3)")
			p.exec(`UPDATE river_job SET state = 'discarded', finalized_at = now(),
				errors = ARRAY['{"error": "no", "attempt": 1}'::jsonb] WHERE queue = 'elsewhere'`)
			p.await("3", "SELECT count(*) FROM dlq.dead_letter_queue WHERE queue = 'elsewhere' AND status = 'dlq_manual'")
			p.exec(`SELECT dlq.replay_start('{"queue": ["elsewhere"]}', p_note => 'in vain', p_rate => 0.001, p_force => true)`)
			// dlqd may refresh the rollups at the same time.
			p.exec(postgrestest.RefreshRollups)
			p.answers(nil)
		},
		prints: []string{
			`default +\| +4 \| +0 \| +4 \| +4 \| +0`, `default +\| transient +\| LEDGER_CLOSED \| +4 \| +1`,
			`default +\| payment.booked \| dlq_pending`, `dlq_manual \| +4`,
		},
		after: map[string]string{"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved'": "4"},
	},
	// dlqd was killed. The application's jobs continue to run, and fail.
	"dlqd-is-down": {
		setUp: func(p *deployment) {
			p.kill()
			p.exec(`INSERT INTO river_job (kind, queue, args, max_attempts, attempt, state, errors, metadata, finalized_at,
				attempted_at)
				SELECT 'dlqd_message', 'default', '{"messageId": "m1", "queue": "default", "kind": "order.placed", "payload": 1}',
					1, 1, 'discarded', ARRAY['{"error": "no", "attempt": 1, "at": "2026-01-01T00:00:00Z"}'::jsonb], '{}', now(), now()
						FROM generate_series(1, 1)`)
		},
		steps:  []step{{"AS counted", (*deployment).serve}},
		prints: []string{`behind`},
		waits:  `0 \| +0 \| t`,
	},
	// A commit of the policy makes a rule classify outages as validation errors.
	"bad-policy": {
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, _ delivery) { w.WriteHeader(http.StatusServiceUnavailable) })
			p.git("init", "--quiet")
			p.write("dlq-routing.yaml", "rules: []\n")
			p.git("add", "--all")
			p.git("commit", "--quiet", "--message", "first")
			p.write("dlq-routing.yaml", "rules: [{name: all-mistakes, match: {status: 503}, class: validation}]\n")
			p.git("add", "--all")
			p.git("commit", "--quiet", "--message", "bad")
			p.inForce()
			p.send(3, "order.placed", `{}`)
			p.await("3", "SELECT count(*) FROM dlq.dead_letter_queue WHERE rule = 'all-mistakes' AND status = 'dlq_manual'")
		},
		steps: []step{
			{"dlqd reclassify", func(p *deployment) { p.revert() }},
			{"'unpark'", func(p *deployment) {
				p.await("3", "SELECT count(*) FROM dlq.dead_letter_queue WHERE error_class = 'outage' AND status = 'dlq_pending'")
				p.revert() // restores the bad rule, to follow the steps for psql
				p.send(2, "order.placed", `{}`)
				p.await("2", "SELECT count(*) FROM dlq.dead_letter_queue WHERE rule = 'all-mistakes' AND status = 'dlq_manual'")
				p.revert()
			}},
		},
		prints: []string{`all-mistakes +\| validation +\| manual +\| +3`, `would be reclassified`, `2 \| +2 \|`},
		after: map[string]string{
			"SELECT count(*) FROM dlq.dead_letter_transitions WHERE reason = 'returned to the automatic path' AND note = 'policy reverted'": "2",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE error_class = 'outage' AND status = 'dlq_pending'":                            "5",
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE rule = 'all-mistakes'":                                                        "0",
		},
	},
	// A receiver refuses messages and repeats a customer's data in its answers. It has also accepted another message with
	// data of that customer.
	"customer-data-gone": {
		setUp: func(p *deployment) {
			p.answers(func(w http.ResponseWriter, d delivery) {
				if d.kind == "order.placed" {
					w.Header().Set("Content-Type", "application/problem+json")
					w.WriteHeader(http.StatusUnprocessableEntity)
					_, _ = fmt.Fprintf(w, `{"type": "T", "detail": "no address: %s"}`, strings.ReplaceAll(d.body, `"`, "'"))
				}
			})
			p.send(2, "order.placed", `{"customer": "cus_81"}`, `"subscriberId": "cus_81"`, `"orderingKey": "cus_81"`,
				`"tags": ["cus_81"]`)
			p.send(1, "order.placed", `{"customer": "cus_9"}`)
			p.send(1, "k", `{"customer": "cus_81"}`)
			p.await("3", decided)
			p.await("1", "SELECT count(*) FROM river_job WHERE state = 'completed'")
			p.exec("SELECT dlq.park(id, 'kim') FROM dlq.find('{\"status\": \"dlq_pending\"}')")
			require.Contains(p, p.dump(), "no address: {'customer': 'cus_81'}")
		},
		prints: []string{
			`dlq_manual \| +2`, `cancelled \| +2`, `2 dead letters in the database match`,
			`2 dead letters and 2 jobs in the database, 0 dead letters in 0 units`,
			`deleted.*\n-+\n +\d`, `0 \| +0 \| +2`, `\| +2 \| +2 \| +0 \| +0 \| +0 \| t +\| t`,
		},
		after: map[string]string{"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_archived' AND original_event = '{\"erased\": true}'": "2"},
		check: func(p *deployment) {
			require.NotContains(p, p.dump(), "cus_81")
			require.Contains(p, p.dump(), "cus_9")
		},
	},
}

// decided counts the filed entries for which a worker has decided the strategy.
const decided = "SELECT count(*) FROM dlq.dead_letter_queue WHERE stage <> 'inbox' AND strategy IS NOT NULL"

var runbookBlock = regexp.MustCompile("(?s)```(sql|sh)( wait)?\n(.*?)```")

// TestRunbooks runs every block of every runbook in the situation that the runbook is for.
func TestRunbooks(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../runbooks/*.md")
	require.NoError(t, err)
	index, err := os.ReadFile("../../runbooks/README.md")
	require.NoError(t, err)
	require.Len(t, files, len(scenarios)+1, "every runbook has a scenario")
	for name, s := range scenarios {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Contains(t, string(index), "("+name+".md)")
			s.file = "../../runbooks/" + name + ".md"
			text, err := os.ReadFile(s.file)
			require.NoError(t, err)
			require.NotRegexp(t, `(FROM|JOIN|UPDATE) (dlq\.)?dead_letter_(open|inbox)\b`, string(text),
				"the block misses unfiled entries, which are in another partition")
			runRunbook(t, &s)
		})
	}
}

// TestDocs_Replay runs the blocks of docs/replay.md in the same way as TestRunbooks runs the blocks of a runbook.
func TestDocs_Replay(t *testing.T) {
	t.Parallel()
	runRunbook(t, &scenario{
		file: "../../docs/replay.md",
		setUp: func(p *deployment) {
			p.refuses(4, 422, "payment.captured", "TIMEOUT_ERROR", `{"amount": 1}`)
			p.refuses(1, 409, "order.placed", "T", `{}`)
		},
		prints: []string{`4 dead letters would be replayed`, `add /currency: "EUR"`, `timeouts raised`},
		after: map[string]string{
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved' AND kind = 'payment.captured'": "4",
			"SELECT count(*) FROM dlq.dead_letter_open WHERE assigned_to = 'kim' AND notes = 'waits for the bank'":   "1",
			"SELECT count(*) FROM dlq.replay_runs WHERE status = 'completed'":                                        "2",
		},
	})
}

// TestDocs_Analytics runs the blocks of docs/analytics.md.
func TestDocs_Analytics(t *testing.T) {
	t.Parallel()
	runRunbook(t, &scenario{
		file: "../../docs/analytics.md",
		setUp: func(p *deployment) {
			p.refuses(3, 422, "payment.captured", "TIMEOUT_ERROR", `{"amount": 1}`)
			// dlqd may be refreshing the rollups at the same time.
			p.exec(postgrestest.RefreshRollups)
		},
		prints: []string{
			`captured +[▁█]+ +3`, `day +▁*█▁* +3\n`, `most: 3, .*days from \d\d:00 to \d\d:00, in Europe/Paris`,
			`[\d.]+m?s +[0-9a-f-]{36} +pending +default +payment.captured +transient +TIMEOUT_ERROR +-`,
			`\n3 +100.0 % +shop`, `default +3 +[▁█]+ +0 +3`,
			`default \| 422 Unprocessable Entity \| +3 \| {0,.*3} \| +3`, `rebuild_rollups`, `TIMEOUT_ERROR \| +3 \| +1`,
		},
	})
}

// TestDocs_Operations runs the blocks of docs/operations.md.
func TestDocs_Operations(t *testing.T) {
	t.Parallel()
	runRunbook(t, &scenario{
		file: "../../docs/operations.md",
		setUp: func(p *deployment) {
			p.refuses(1, 422, "payment.captured", "T", `{}`)
			p.exec("SELECT dlq.discard(id, 'kim', 'of no use') FROM dlq.dead_letter_open")
		},
		prints: []string{`UNIT +ENTRIES`, `kim .*discarded +of no use`, `kim +\| .*\| discarded \| of no use`},
	})
}

func runRunbook(t *testing.T, s *scenario) {
	t.Helper()
	raw, err := os.ReadFile(s.file)
	require.NoError(t, err)
	url := ""
	var servers *postgrestest.Replicated
	if s.hasReplica {
		servers = postgrestest.NewReplicated(t, false)
		servers.Migrate()
		url = servers.PrimaryURL
	}
	p := newDeployment(t, s.policy, url)
	p.servers = servers
	p.serve()
	s.setUp(p)

	printed := ""
	steps := s.steps
	for _, block := range runbookBlock.FindAllStringSubmatch(string(raw), -1) {
		language, wait, text := block[1], block[2] != "", block[3]
		if len(steps) > 0 && strings.Contains(text, steps[0].before) {
			steps[0].do(p)
			steps = steps[1:]
		}
		if !wait {
			printed += p.block(language, text)
			continue
		}
		require.NotEmpty(t, s.waits)
		last := ""
		require.Eventually(t, func() bool {
			last = p.block(language, text)
			return regexp.MustCompile(s.waits).MatchString(last)
		}, 5*time.Minute, 100*time.Millisecond, "last: %s", &last)
	}
	require.Empty(t, steps, "no block contains the text of these steps")
	for _, pattern := range s.prints {
		require.Regexp(t, pattern, printed)
	}
	for sql, want := range s.after {
		p.await(want, sql)
	}
	if s.check != nil {
		s.check(p)
	}
	require.Zero(t, p.dlqd.stop(syscall.SIGTERM))
}

// deployment is a database with a running dlqd and a receiver. Each deployment has its own policy. A test can change
// the receiver's answers.
type deployment struct {
	*testing.T

	url            string
	servers        *postgrestest.Replicated // nil without a replica
	pool           *pgxpool.Pool
	dlqd           *served
	archive        string // directory
	config         string // the policy's directory
	logins         map[string]string
	sent           int
	requestsBefore int
	wake           func()

	mu       sync.Mutex
	answer   func(http.ResponseWriter, delivery)
	requests []delivery
}

// delivery is a request to the receiver, with the status of the receiver's answer.
type delivery struct {
	id, kind, body string
	gone           <-chan struct{} // closed when the sender has closed the connection
	status         int
}

// newDeployment creates a deployment on the database at url, or on a new database if url is empty.
func newDeployment(t *testing.T, files map[string]string, url string) *deployment {
	t.Helper()
	if url == "" {
		url = postgrestest.URL(t)
	}
	p := &deployment{
		T: t, url: url, pool: postgrestest.Open(t, url), archive: t.TempDir(), config: t.TempDir(),
		logins: map[string]string{
			"": login(t, url, "dlq_operator"), "dlq_admin": login(t, url, "dlq_admin"),
			"the owner of River's tables": postgrestest.Role,
		},
	}
	receiver := startReceiver(t, p.receive)
	for name, text := range map[string]string{ // short backoff, and no breaker
		"retry-policies": "queues: {default: {maxAttempts: 2, backoff: {kind: fixed, delay: 20ms}}}\ndestinations: " +
			"{default: {url: RECEIVER}}\n",
		"circuit-breaker": "defaults: {consecutiveFailures: 0, minimumCount: 1000}\n",
	} {
		p.write(name+".yaml", strings.ReplaceAll(cmp.Or(files[name], text), "RECEIVER", receiver))
	}
	for name, text := range files {
		if name != "retry-policies" && name != "circuit-breaker" {
			p.write(name+".yaml", text)
		}
	}
	return p
}

func (p *deployment) receive(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	d := delivery{
		id: r.Header.Get("Webhook-Id"), kind: r.Header.Get("Dlqd-Kind"),
		body: string(body), gone: r.Context().Done(), status: http.StatusOK,
	}
	p.mu.Lock()
	answer := p.answer
	p.mu.Unlock()
	if answer != nil {
		recorder := httptest.NewRecorder()
		answer(recorder, d)
		d.status = recorder.Code
		maps.Copy(w.Header(), recorder.Header())
		defer func() { w.WriteHeader(recorder.Code); _, _ = w.Write(recorder.Body.Bytes()) }()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = append(p.requests, d)
}

// answers sets the function with which the receiver answers. If answer is nil, the receiver answers 200.
func (p *deployment) answers(answer func(http.ResponseWriter, delivery)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.answer = answer
}

// forget deletes the receiver's record of past requests.
func (p *deployment) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = nil
}

// requestCount returns the number of requests of a kind.
func (p *deployment) requestCount(kind string) (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range p.requests {
		if d.kind == kind {
			n++
		}
	}
	return n
}

// acceptedCount returns the number of messages of a kind that the receiver accepted. A message that it accepted twice
// counts once.
func (p *deployment) acceptedCount(kind string) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	ids := map[string]bool{}
	for _, d := range p.requests {
		if d.kind == kind && d.status == http.StatusOK {
			ids[d.id] = true
		}
	}
	return len(ids)
}

// bodies returns the bodies of the requests of a kind that the receiver accepted, in the order of arrival.
func (p *deployment) bodies(kind string) (bodies []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, d := range p.requests {
		if d.kind == kind && d.status == http.StatusOK {
			bodies = append(bodies, d.body)
		}
	}
	return bodies
}

// send submits n messages to the API. fields are additional JSON fields of each message.
func (p *deployment) send(n int, kind, payload string, fields ...string) {
	p.Helper()
	for range n {
		p.sent++
		body := fmt.Sprintf(`{"messageId": "m%d", "kind": %q, "source": "shop", "payload": %s`, p.sent, kind, payload)
		queue := `"queue": "default"`
		for _, field := range fields {
			if strings.HasPrefix(field, `"queue"`) {
				queue = field
			} else {
				body += ", " + field
			}
		}
		response, err := http.Post(p.dlqd.api+"/api/messages", "application/json", strings.NewReader(body+", "+queue+"}"))
		require.NoError(p, err)
		answer, _ := io.ReadAll(response.Body)
		_ = response.Body.Close()
		require.Equal(p, http.StatusAccepted, response.StatusCode, string(answer))
	}
}

// refuses submits n messages that the receiver refuses, and waits until the failures are filed and decided.
func (p *deployment) refuses(n, status int, kind, errorType, payload string) {
	p.Helper()
	p.answers(func(w http.ResponseWriter, _ delivery) {
		w.Header().Set("X-Error-Type", errorType)
		w.WriteHeader(status)
	})
	p.send(n, kind, payload)
	p.await(strconv.Itoa(p.sent), decided)
	p.answers(nil)
}

func (p *deployment) serve() {
	p.Helper()
	args := []string{"--database-url", p.url, "--config-dir", p.config, "--archive", p.archive}
	if p.servers != nil {
		args = append(args, "--replica-url", p.servers.StandbyURL)
	}
	p.dlqd = serve(p.T, args...)
}

// kill kills dlqd with SIGKILL.
func (p *deployment) kill() {
	p.Helper()
	require.NoError(p, p.dlqd.cmd.Process.Kill())
	_ = p.dlqd.cmd.Wait()
}

func (p *deployment) exec(sql string) {
	p.Helper()
	_, err := p.pool.Exec(p.Context(), sql)
	require.NoError(p, err)
}

// await waits until the value that a query returns is want, as text.
func (p *deployment) await(want, sql string) {
	p.Helper()
	var got strings.Builder
	require.Eventually(p, func() bool {
		var value string
		require.NoError(p, p.pool.QueryRow(p.Context(), "SELECT coalesce(("+sql+")::text, '')").Scan(&value))
		got.Reset()
		got.WriteString(value)
		return value == want || want == "t" && value == "true"
	}, 5*time.Minute, 50*time.Millisecond, "%s: %s, not %s\n%s", sql, &got, want, p.dlqd.log)
}

// awaitMetric waits until dlqd serves the line, a metric with its value.
func (p *deployment) awaitMetric(line string) {
	p.Helper()
	require.Eventually(p, func() bool {
		response, err := http.Get(p.dlqd.api + "/metrics")
		require.NoError(p, err)
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		require.NoError(p, err)
		return strings.Contains(string(text), "\n"+line+"\n")
	}, 5*time.Minute, 50*time.Millisecond, line)
}

// block runs a block of a runbook and returns the output. If the first line of a block of SQL is "-- as ROLE", block
// runs it as this role.
func (p *deployment) block(language, text string) string {
	p.Helper()
	role := ""
	if first := regexp.MustCompile(`^-- as (.*)\n`).FindStringSubmatch(text); first != nil {
		role = first[1]
	}
	as, known := p.logins[role]
	url := postgrestest.WithUser(p.url, as)
	if p.servers != nil && role == "a superuser on the replica" {
		url, known = postgrestest.Superuser(p, p.servers.StandbyURL), true
	}
	require.True(p, known, "role %q", role)
	cmd := exec.CommandContext(p.Context(), program, "psql", "--database-url", url, "--",
		"-X", "-v", "ON_ERROR_STOP=1", "-f", "-")
	cmd.Stdin = strings.NewReader(text)
	if language == "sh" {
		cmd = exec.CommandContext(p.Context(), "bash", "-euc",
			strings.ReplaceAll(strings.ReplaceAll(text, "dlqd archive ", "dlqd archive --archive "+p.archive+" "),
				"dlqd ", program+" "))
	}
	cmd.Env = append(os.Environ(), "DLQD_API="+p.dlqd.api, "PAGER=")
	out, err := cmd.CombinedOutput()
	require.NoError(p, err, "%s\n%s", text, out)
	require.NotContains(p, string(out), "permission denied", text)
	return string(out)
}

func (p *deployment) command(name string, args ...string) string {
	p.Helper()
	out, err := exec.CommandContext(p.Context(), name, args...).CombinedOutput()
	require.NoError(p, err, "%s\n%s", name, out)
	return string(out)
}

// dump returns all data of the database as text.
func (p *deployment) dump() string {
	p.Helper()
	return p.command("pg_dump", "--data-only", p.url)
}

func (p *deployment) write(file, text string) {
	p.Helper()
	require.NoError(p, os.WriteFile(filepath.Join(p.config, file), []byte(text), 0o600))
}

func (p *deployment) git(args ...string) string {
	p.Helper()
	return p.command("git", append([]string{
		"-C", p.config, "-c", "user.name=kim", "-c", "user.email=kim@example.com",
		"-c", "commit.gpgsign=false",
	}, args...)...)
}

// revert reverts the last commit of the policy and waits until the reverted policy is in force.
func (p *deployment) revert() {
	p.Helper()
	p.git("revert", "--no-edit", "HEAD")
	p.inForce()
}

func (p *deployment) inForce() {
	p.Helper()
	commit := strings.TrimSpace(p.git("rev-parse", "HEAD"))[:7]
	p.await("t", "SELECT bool_or(value LIKE '"+commit+"%' AND value NOT LIKE '%-dirty') FROM dlq.settings WHERE key = "+
		"'policy_version'")
}

// login creates a database user in one of dlqd's roles and returns its name.
func login(t *testing.T, url, role string) string {
	t.Helper()
	ctx := context.WithoutCancel(t.Context())
	admin, err := pgx.Connect(ctx, postgrestest.Superuser(t, url))
	require.NoError(t, err)
	name := role + "_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	_, err = admin.Exec(ctx, "CREATE ROLE "+name+" LOGIN IN ROLE "+role)
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(ctx, "DROP ROLE "+name)
		require.NoError(t, err)
		_ = admin.Close(ctx)
	})
	return name
}
