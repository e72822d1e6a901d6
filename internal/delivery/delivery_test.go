package delivery_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

// bundle is a database, an ingester and a River client that delivers to a receiver.
type bundle struct {
	*testing.T

	pool     *pgxpool.Pool
	ingester *ingest.Ingester
	client   *river.Client[pgx.Tx]
	outcomes chan string // of deliveries
}

func setup(t *testing.T, url, queue string) *bundle {
	t.Helper()
	return setupWithRules(t, url, queue, "")
}

func setupWithRules(t *testing.T, url, queue, routing string, changes ...func(*delivery.Config)) *bundle {
	t.Helper()
	pool := postgrestest.Pool(t)
	rules := policytest.Load(t, policytest.Files{
		"retry-policies": fmt.Sprintf("queues: {default: {%s}}\ndestinations: {default: {url: %q, secret: %q}}\n",
			queue, url, secret),
		"dlq-routing": routing,
	})
	planner, err := strategy.NewPlanner(rules, nil)
	require.NoError(t, err)
	logger := slog.New(slog.DiscardHandler)
	b := &bundle{T: t, pool: pool, outcomes: make(chan string, 100)}
	b.ingester, err = ingest.New(ingest.Config{
		Pool: pool, Schemas: postgres.DefaultSchemas(), Policy: planner.Policy, Logger: logger,
	})
	require.NoError(t, err)
	config := delivery.Config{
		Planner: func() *strategy.Planner { return planner }, DB: pool,
		Observe:  func(d delivery.Delivered) { b.outcomes <- d.Outcome },
		Breakers: breaker.New(breaker.Config{DB: pool, Policy: planner.Policy, Actor: "test", Logger: logger}),
		Logger:   logger,
	}
	for _, change := range changes {
		change(&config)
	}
	worker := delivery.NewWorker(config)
	workers := river.NewWorkers()
	river.AddWorker(workers, worker)
	b.client, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues: map[string]river.QueueConfig{"default": {MaxWorkers: 10}}, Workers: workers, Logger: logger, TestOnly: true,
		FetchCooldown: time.Millisecond, FetchPollInterval: 20 * time.Millisecond,
		Middleware: []rivertype.Middleware{riverdlq.NewMiddleware()},
	})
	require.NoError(t, err)
	require.NoError(t, b.client.Start(t.Context()))
	t.Cleanup(func() {
		b.ingester.Stop(context.Background())
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		require.NoError(t, b.client.StopAndCancel(ctx))
		worker.Close()
	})
	return b
}

// deliver submits a message and returns its job once it is in one of the states.
func (b *bundle) deliver(extra string, states ...rivertype.JobState) *rivertype.JobRow {
	b.Helper()
	if !strings.Contains(extra, `"messageId"`) {
		extra += `, "messageId": "msg-1"`
	}
	msg, err := message.Parse([]byte(`{"queue": "default", "kind": "payment.captured", "payload": {"amount": 4200}` +
		extra + `}`))
	require.NoError(b, err)
	receipt, err := b.ingester.Submit(b.Context(), msg,
		ingest.Trace{Parent: "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", State: "vendor=1"})
	require.NoError(b, err)
	var job *rivertype.JobRow
	require.Eventually(b, func() bool {
		job, err = b.client.JobGet(b.Context(), receipt.JobID)
		require.NoError(b, err)
		return slices.Contains(states, job.State)
	}, 5*time.Minute, 5*time.Millisecond)
	return job
}

type structured struct {
	Attempt           int
	Type, Code, Class string
	Message           string
	Context           map[string]any
}

func structuredOf(t *testing.T, job *rivertype.JobRow) structured {
	t.Helper()
	var metadata struct {
		Error structured `json:"dlq:error"`
	}
	require.NoError(t, json.Unmarshal(job.Metadata, &metadata))
	return metadata.Error
}

func answering(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

func TestDeliver_SendsRequest(t *testing.T) {
	t.Parallel()
	var got *http.Request
	var body []byte
	url := answering(t, func(_ http.ResponseWriter, r *http.Request) {
		got = r
		body, _ = io.ReadAll(r.Body)
	})
	b := setup(t, url, "")
	b.deliver(`, "headers": {"X-Tenant": "7"}`, rivertype.JobStateCompleted)
	require.Equal(t, http.MethodPost, got.Method)
	require.JSONEq(t, `{"amount": 4200}`, string(body))
	h := got.Header
	require.Equal(t, "application/json", h.Get("Content-Type"))
	require.Equal(t, "msg-1", h.Get("Webhook-Id"))
	require.Equal(t, "1", h.Get("Dlqd-Attempt"))
	require.Equal(t, "payment.captured", h.Get("Dlqd-Kind"))
	require.Equal(t, "7", h.Get("X-Tenant"))
	require.Equal(t, "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", h.Get("Traceparent"),
		"the trace context is unchanged")
	require.Equal(t, "vendor=1", h.Get("Tracestate"))
	webhook, err := standardwebhooks.NewWebhook(secret)
	require.NoError(t, err)
	require.NoError(t, webhook.Verify(body, h), "the receiver can verify the signature")
	require.Error(t, webhook.Verify([]byte(`{"amount": 1}`), h))
}

// A payload of a queue with "payload: exact" is sent and signed byte for byte.
func TestDeliver_SignsExactPayload(t *testing.T) {
	t.Parallel()
	var headers http.Header
	var body []byte
	b := setup(t, answering(t, func(_ http.ResponseWriter, r *http.Request) {
		headers = r.Header
		body, _ = io.ReadAll(r.Body)
	}), "payload: exact")
	const payload = `{"z" :1e3,"amount":  4200.0 }`
	msg, err := message.Parse([]byte(`{"queue": "default", "kind": "payment.captured", "payload": ` + payload + `}`))
	require.NoError(t, err)
	_, err = b.ingester.Submit(t.Context(), msg, ingest.Trace{})
	require.NoError(t, err)
	require.Equal(t, "ok", <-b.outcomes)
	require.Equal(t, payload, string(body))
	webhook, err := standardwebhooks.NewWebhook(secret)
	require.NoError(t, err)
	require.NoError(t, webhook.Verify([]byte(payload), headers))
}

// The HTTP status decides whether the job is retried, and which class the error has.
func TestDeliver_StatusDecidesRetry(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		status  int
		class   string
		retried bool
	}{
		{408, "transient", true},
		{500, "transient", true},
		{502, "transient", true},
		{501, "transient", true},
		{507, "outage", true},
		{521, "outage", true},
		{529, "outage", true},
		{429, "rate_limited", true},
		{503, "outage", true},
		{504, "outage", true},
		{400, "validation", false},
		{422, "validation", false},
		{401, "unauthorized", false},
		{403, "unauthorized", false},
		{404, "not_found", false},
		{410, "not_found", false},
		{409, "business", false},
		{418, "unknown", true},
	} {
		t.Run(fmt.Sprint(test.status), func(t *testing.T) {
			t.Parallel()
			url := answering(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(test.status) })
			b := setup(t, url, "maxAttempts: 2, backoff: {delay: 1h}")
			job := b.deliver("", rivertype.JobStateRetryable, rivertype.JobStateCancelled, rivertype.JobStateDiscarded)
			if test.retried {
				require.Equal(t, rivertype.JobStateRetryable, job.State)
			} else {
				require.Equal(t, rivertype.JobStateCancelled, job.State)
			}
			require.Equal(t, test.class, <-b.outcomes)
			s := structuredOf(t, job)
			require.Empty(t, s.Class, "the class is decided by the rules each time")
			require.Equal(t, fmt.Sprintf("HTTP_%d", test.status), s.Type)
			require.Equal(t, fmt.Sprint(test.status), s.Code)
			require.EqualValues(t, test.status, s.Context["status"])
		})
	}
}

// The policy's rules decide whether a job is retried or ends at once.
func TestDeliver_RulesDecideRetry(t *testing.T) {
	t.Parallel()
	rules := `rules:
  - {name: eventually, match: {status: 404, kind: payment.*}, class: transient}
  - {name: hopeless, match: {type: HTTP_503, when: 'context.body contains "for ever"'}, class: business}
`
	for status, want := range map[int]rivertype.JobState{
		404: rivertype.JobStateRetryable, 503: rivertype.JobStateCancelled,
	} {
		url := answering(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "closed for ever", status) })
		b := setupWithRules(t, url, "maxAttempts: 2, backoff: {delay: 1h}", rules)
		job := b.deliver("", rivertype.JobStateRetryable, rivertype.JobStateCancelled)
		require.Equal(t, want, job.State, status)
		require.Equal(t, map[int]string{404: "transient", 503: "business"}[status], <-b.outcomes)
	}
}

func TestDeliver_ReadsProblemDocumentsAndErrorHeaders(t *testing.T) {
	t.Parallel()
	url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/problem+json; charset=utf-8")
		w.Header().Set("X-Error-Code", "51")
		w.WriteHeader(http.StatusConflict)
		_, _ = io.WriteString(w, `{"type": "https://bank.example/declined", "title": "Declined", "detail": "insufficient \u0000 funds \ud800"}`)
	})
	job := setup(t, url, "").deliver("", rivertype.JobStateCancelled)
	s := structuredOf(t, job)
	require.Equal(t, "https://bank.example/declined", s.Type)
	require.Equal(t, "51", s.Code)
	require.Contains(t, s.Message, "409 Conflict: Declined: insufficient \uFFFD funds \uFFFD")

	url = answering(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Error-Type", "OutOfStock")
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = w.Write([]byte{0, 0xff, 'x'})
	})
	s = structuredOf(t, setup(t, url, "").deliver("", rivertype.JobStateCancelled))
	require.Equal(t, "OutOfStock", s.Type)
	require.Equal(t, "\uFFFD\uFFFDx", s.Context["body"])
}

// A destination may name the class of its error. An unknown class is ignored.
func TestDeliver_DestinationSetsClass(t *testing.T) {
	t.Parallel()
	for header, want := range map[string]rivertype.JobState{
		"transient": rivertype.JobStateRetryable,
		"nonsense":  rivertype.JobStateCancelled,
	} {
		url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Error-Class", header)
			w.Header().Set("X-Error-Type", "ValidationError")
			w.WriteHeader(http.StatusUnprocessableEntity)
		})
		b := setup(t, url, "maxAttempts: 2, backoff: {delay: 1h}")
		job := b.deliver("", rivertype.JobStateRetryable, rivertype.JobStateCancelled)
		require.Equal(t, want, job.State, header)
		class := map[string]string{"transient": "transient", "nonsense": "validation"}[header]
		require.Equal(t, class, <-b.outcomes)
	}
}

// If a receiver reports its own bug with a 500, the message is not sent again: it would fail each time.
func TestDeliver_ReceiverBugEndsJob(t *testing.T) {
	t.Parallel()
	url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Error-Type", "TypeError")
		w.WriteHeader(http.StatusInternalServerError)
	})
	b := setup(t, url, "maxAttempts: 2, backoff: {delay: 1h}")
	b.deliver("", rivertype.JobStateCancelled)
	require.Equal(t, "code_bug", <-b.outcomes)
}

func TestDeliver_WaitsForRetryAfter(t *testing.T) {
	t.Parallel()
	for _, header := range []string{"900", time.Now().Add(15 * time.Minute).UTC().Format(http.TimeFormat)} {
		url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", header)
			w.WriteHeader(http.StatusTooManyRequests)
		})
		job := setup(t, url, "backoff: {delay: 10s}").deliver("", rivertype.JobStateRetryable)
		require.WithinDuration(t, time.Now().Add(15*time.Minute), job.ScheduledAt, time.Minute)
	}
}

// If a destination asks for fewer requests, a redelivery of a progressive run is made again later. Any other redelivery
// fails.
func TestDeliver_PostponesWhatAProgressiveRunSendsTooFast(t *testing.T) {
	t.Parallel()
	url := answering(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Dlqd-Run-Id") != "" {
			w.Header().Set("Retry-After", "900")
			w.WriteHeader(http.StatusTooManyRequests)
		}
	})
	b := setup(t, url, "backoff: {delay: 10s}")
	job := b.deliver("", rivertype.JobStateCompleted)
	require.Equal(t, delivery.OutcomeOK, <-b.outcomes)
	for _, test := range []struct {
		progressive        bool
		status             string
		snoozes, postponed int
		state              string
	}{
		{true, "running", 0, 0, "scheduled"},
		{true, "running", 9, 9, "scheduled"},
		{true, "running", 10, 0, "scheduled"}, // it was held ten times
		{true, "running", 10, 10, "discarded"},
		{true, "cancelled", 0, 0, "discarded"},
		{false, "running", 0, 0, "discarded"},
	} {
		run := uuid.New()
		_, err := b.pool.Exec(t.Context(), `INSERT INTO dlq.replay_runs (id, filter, actor, total, status, progressive)
			VALUES ($1, '{}', 'kim', 1, $2::dlq.replay_status, $3)`, run, test.status, test.progressive)
		require.NoError(t, err)
		var id int64
		require.NoError(t, b.pool.QueryRow(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, metadata)
			SELECT kind, args, queue, 1, jsonb_build_object('dlq:run_id', $2::uuid, 'snoozes', $3::int,
				'dlq:postponed', $4::int)
			FROM river_job WHERE id = $1 RETURNING id`, job.ID, run, test.snoozes, test.postponed).Scan(&id))
		require.Equal(t, "rate_limited", <-b.outcomes)
		require.Eventually(t, func() bool {
			var state string
			err := b.pool.QueryRow(t.Context(), `SELECT state FROM river_job WHERE id = $1
				AND (state <> 'scheduled' OR scheduled_at > now() + interval '14 minutes')`, id).Scan(&state)
			return err == nil && state == test.state
		}, time.Minute, 10*time.Millisecond, "%+v", test)
	}
}

// Each attempt of a redelivery takes a place in the pace of its progressive run to the destination. The run has taken
// the place of the first attempt.
func TestDeliver_TakesAPlaceOfItsRunForEachAttempt(t *testing.T) {
	t.Parallel()
	b := setup(t, answering(t, func(http.ResponseWriter, *http.Request) {}), "maxAttempts: 2")
	job, run := b.deliver("", rivertype.JobStateCompleted), uuid.New()
	require.Equal(t, delivery.OutcomeOK, <-b.outcomes)
	exec := func(sql string, args ...any) {
		_, err := b.pool.Exec(t.Context(), sql, args...)
		require.NoError(t, err)
	}
	exec(`INSERT INTO dlq.replay_runs (id, filter, actor, total, progressive, rate, paces)
		VALUES ($1, '{}', 'kim', 4, true, 0.01, '{"default": {"rate": 0.001, "of": 1, "from": "2026-11-29T08:00:00Z"}}')`,
		run)
	// redeliver makes a redelivery with a number of earlier attempts and snoozes, and returns the outcome of the next one.
	redeliver := func(attempts, snoozes int) (id int64, outcome string) {
		require.NoError(t, b.pool.QueryRow(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, attempt,
				metadata)
			SELECT kind, args, queue, max_attempts, $3, jsonb_build_object('dlq:run_id', $2::uuid, 'snoozes', $4::int)
			FROM river_job WHERE id = $1 RETURNING id`, job.ID, run, attempts, snoozes).Scan(&id))
		return id, <-b.outcomes
	}
	// placeOf returns the place of a redelivery that waits, once the place was taken after the given time.
	placeOf := func(id int64, after time.Time) (at, taken time.Time) {
		require.Eventually(t, func() bool {
			err := b.pool.QueryRow(t.Context(), `SELECT (metadata -> 'dlq:place' ->> 'at')::timestamptz,
					(metadata -> 'dlq:place' ->> 'taken')::timestamptz
				FROM river_job WHERE id = $1 AND state = 'scheduled' AND metadata ->> 'dlq:place' IS NOT NULL`, id).
				Scan(&at, &taken)
			return err == nil && !taken.Before(after)
		}, time.Minute, 10*time.Millisecond)
		return at, taken
	}
	again := func(id int64) string {
		exec("UPDATE river_job SET state = 'available', scheduled_at = now() WHERE id = $1", id)
		return <-b.outcomes
	}
	_, outcome := redeliver(0, 0)
	require.Equal(t, delivery.OutcomeOK, outcome)
	_, outcome = redeliver(0, 1)
	require.Equal(t, delivery.OutcomeOK, outcome, "the first place is now")
	second, outcome := redeliver(0, 1)
	require.Equal(t, delivery.OutcomeHeld, outcome)
	third, outcome := redeliver(1, 0)
	require.Equal(t, delivery.OutcomeHeld, outcome)
	at, taken := placeOf(second, time.Time{})
	require.InDelta(t, 1000, at.Sub(taken).Seconds(), 100)
	later, _ := placeOf(third, time.Time{})
	require.InDelta(t, 1000, later.Sub(at).Seconds(), 1)

	// A redelivery keeps its place until the run becomes slower. Then it takes another one.
	require.Equal(t, delivery.OutcomeHeld, again(second))
	kept, _ := placeOf(second, taken)
	require.WithinDuration(t, at, kept, 0)
	fell := taken.Add(time.Microsecond)
	exec(`UPDATE dlq.replay_runs SET paces = jsonb_set(paces, '{default,fell}', to_jsonb($1::timestamptz))`, fell)
	require.Equal(t, delivery.OutcomeHeld, again(second))
	lost, takenAgain := placeOf(second, fell)
	require.InDelta(t, 1000, lost.Sub(later).Seconds(), 1)

	// A redelivery that misses its place takes another one, once.
	miss := func(id int64) {
		exec(`UPDATE river_job SET metadata = jsonb_set(metadata, '{dlq:place,at}', to_jsonb(now() - interval '1 hour'))
			WHERE id = $1`, id)
	}
	miss(second)
	require.Equal(t, delivery.OutcomeHeld, again(second))
	missed, _ := placeOf(second, takenAgain.Add(time.Microsecond))
	require.InDelta(t, 1000, missed.Sub(lost).Seconds(), 1)
	miss(second)
	require.Equal(t, delivery.OutcomeOK, again(second))

	// After the end of the run, none waits.
	exec("UPDATE dlq.replay_runs SET status = 'cancelled'")
	require.Equal(t, delivery.OutcomeOK, again(third))
}

// A redelivery is not postponed if an operator has ended its group, or if the rules end what the answer says.
func TestDeliver_PostponesNothingThatIsToEnd(t *testing.T) {
	t.Parallel()
	url := answering(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Dlqd-Run-Id") != "" {
			w.Header().Set("Retry-After", "900")
			w.WriteHeader(http.StatusTooManyRequests)
		}
	})
	for _, test := range []struct{ group, routing, state string }{
		{"held", "", "scheduled"},
		{"ended", "", "discarded"},
		{"going", "rules: [{name: quota, match: {status: 429}, class: business}]\n", "cancelled"},
	} {
		b := setupWithRules(t, url, "backoff: {delay: 10s}", test.routing)
		job := b.deliver("", rivertype.JobStateCompleted)
		run, entry := uuid.New(), uuid.New()
		_, err := b.pool.Exec(t.Context(), `WITH run AS (INSERT INTO dlq.replay_runs (id, filter, actor, total, progressive)
				VALUES ($1, '{}', 'kim', 1, true)), chosen AS (
				INSERT INTO dlq.replay_run_entries (run_id, entry_id, group_number) VALUES ($1, $2, 1))
			INSERT INTO dlq.replay_run_groups (run_id, number, entries, quota, state) VALUES ($1, 1, 1, 1, $3)`,
			run, entry, test.group)
		require.NoError(t, err)
		var id int64
		require.NoError(t, b.pool.QueryRow(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, metadata)
			SELECT kind, args, queue, 1, jsonb_build_object('dlq:run_id', $2::uuid, 'dlq:entry_id', $3::uuid)
			FROM river_job WHERE id = $1 RETURNING id`, job.ID, run, entry).Scan(&id))
		require.Eventually(t, func() bool {
			var state string
			err := b.pool.QueryRow(t.Context(), "SELECT state FROM river_job WHERE id = $1", id).Scan(&state)
			return err == nil && state == test.state
		}, time.Minute, 10*time.Millisecond, "%+v", test)
	}
}

// A Retry-After of zero or in the past does not use up all attempts at once.
func TestDeliver_RetryAfterDoesNotShortenBackoff(t *testing.T) {
	t.Parallel()
	for _, header := range []string{"0", "1", time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat)} {
		url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", header)
			w.WriteHeader(http.StatusTooManyRequests)
		})
		job := setup(t, url, "backoff: {delay: 1h}").deliver("", rivertype.JobStateRetryable)
		require.WithinDuration(t, time.Now().Add(time.Hour), job.ScheduledAt, 15*time.Minute, header)
	}
}

// The transaction that completes an ordered message removes the message's place and releases the next message of the
// key.
func TestDeliver_CompletionReleasesNextOfKey(t *testing.T) {
	t.Parallel()
	answer := make(chan struct{})
	url := answering(t, func(_ http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Webhook-Id") == "msg-1" {
			<-answer
		}
	})
	b := setup(t, url, "ordering: true")
	first := b.deliver(`, "orderingKey": "a"`, rivertype.JobStateRunning)
	b.deliver(`, "orderingKey": "a", "messageId": "msg-2"`, rivertype.JobStateScheduled)
	close(answer)
	var held, places int
	require.Eventually(t, func() bool {
		var completed bool
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM river_job WHERE id = $1
			AND state = 'completed'), (SELECT count(*) FROM river_job WHERE metadata ? 'dlq:held'),
			(SELECT count(*) FROM dlq.ordered_jobs WHERE job_id = $1)`, first.ID).Scan(&completed, &held, &places))
		return completed
	}, 5*time.Minute, time.Millisecond)
	require.Zero(t, held)
	require.Zero(t, places)
}

// A delivered message is completed even if releasing the next message of its key fails.
func TestDeliver_CompletesJobIfReleasingNextFails(t *testing.T) {
	t.Parallel()
	var taken atomic.Int64
	url := answering(t, func(http.ResponseWriter, *http.Request) { taken.Add(1) })
	b := setup(t, url, "ordering: true")
	_, err := b.pool.Exec(t.Context(), `CREATE
		OR REPLACE FUNCTION dlq.leave_order(p_job bigint,
			p_created_at timestamptz) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'away'; END $$`)
	require.NoError(t, err)
	job := b.deliver(`, "orderingKey": "a"`, rivertype.JobStateCompleted, rivertype.JobStateRetryable)
	require.Equal(t, rivertype.JobStateCompleted, job.State)
	require.EqualValues(t, 1, taken.Load())
}

// A message that was in the backup of a restored database may have been delivered since, so dlqd holds it.
func TestDeliver_HoldsMessagesOfARestoredDatabase(t *testing.T) {
	t.Parallel()
	var taken atomic.Int64
	url := answering(t, func(http.ResponseWriter, *http.Request) { taken.Add(1) })
	b := setupWithRules(t, url, "", "", func(c *delivery.Config) {
		c.Holds = func(createdAt time.Time) bool { return !createdAt.IsZero() }
	})
	job := b.deliver("", rivertype.JobStateScheduled, rivertype.JobStateCompleted)
	require.Equal(t, rivertype.JobStateScheduled, job.State)
	require.Contains(t, string(job.Metadata), `"dlq:held": "`+delivery.HeldForRestored+`"`)
	require.Zero(t, taken.Load())
}

// A Retry-After delays the next attempt by an hour at most. The error records the full value, for the redelivery of the
// dead letter.
func TestDeliver_RecordsFullRetryAfter(t *testing.T) {
	t.Parallel()
	for header, seconds := range map[string]float64{
		"86400": 86400, "99999999999999": 9223372036, time.Now().Add(48 * time.Hour).UTC().Format(http.TimeFormat): 172800,
	} {
		url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Retry-After", header)
			w.WriteHeader(http.StatusTooManyRequests)
		})
		job := setup(t, url, "backoff: {delay: 10s}").deliver("", rivertype.JobStateRetryable)
		require.WithinDuration(t, time.Now().Add(time.Hour), job.ScheduledAt, time.Minute)
		require.InDelta(t, seconds, structuredOf(t, job).Context["retryAfterSeconds"], 60)
	}
}

func TestDeliver_RecordsLogicalFailure(t *testing.T) {
	t.Parallel()
	url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"success": false, "reason": "closed"}`)
	})
	job := setup(t, url, "").deliver("", rivertype.JobStateCompleted)
	require.Contains(t, string(job.Metadata), `closed`)
	require.Contains(t, string(job.Metadata), delivery.LogicalFailureKey)

	b := setup(t, url, "deadLetterLogicalFailures: true")
	job = b.deliver("", rivertype.JobStateCancelled)
	require.Equal(t, "LOGICAL_FAILURE", structuredOf(t, job).Type)
	var n int
	_, err := b.pool.Exec(t.Context(), "SELECT dlq.file(ARRAY(SELECT id FROM dlq.dead_letter_queue))")
	require.NoError(t, err)
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT count(*) FROM dlq.dead_letter_queue
		WHERE error_class = 'business' AND kind = 'payment.captured' AND event_id = 'msg-1'`).Scan(&n))
	require.Equal(t, 1, n)
}

func TestDeliver_TypesOfTransportErrors(t *testing.T) {
	t.Parallel()
	other, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = other.Close() }()
	// The local address of this connection refuses connections: its port is used and has no listener.
	taken, err := net.Dial("tcp", other.Addr().String())
	require.NoError(t, err)
	defer func() { _ = taken.Close() }()
	refusing := "http://user:hunter2@" + taken.LocalAddr().String() + "/?token=hunter2"
	for name, test := range map[string]struct {
		url     string
		want    string
		timeout string
	}{
		"connection refused": {refusing, delivery.TypeConnectionRefused, "1m"},
		"no answer": {answering(t, func(_ http.ResponseWriter, r *http.Request) {
			_, _ = io.Copy(io.Discard, r.Body) // only then the server notices that the client hangs up
			select {
			case <-r.Context().Done():
			case <-time.After(20 * time.Second):
			}
		}), delivery.TypeTimeout, "300ms"},
		"connection closed": {answering(t, func(w http.ResponseWriter, _ *http.Request) {
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_ = conn.Close()
			}
		}), delivery.TypeConnectionReset, "1m"},
		"no such host": {"http://no-such-host.invalid/", delivery.TypeDNS, "1m"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, test.url, "timeout: "+test.timeout+", backoff: {delay: 1h}")
			job := b.deliver("", rivertype.JobStateRetryable)
			s := structuredOf(t, job)
			require.Equal(t, test.want, s.Type)
			require.Equal(t, "transient", <-b.outcomes)
			require.NotContains(t, string(job.Metadata)+job.Errors[0].Error, "hunter2")
		})
	}
}

func TestDeliver_FollowsRedirectsOnSameHostOnly(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var elsewhere int
	other := answering(t, func(http.ResponseWriter, *http.Request) { mu.Lock(); elsewhere++; mu.Unlock() })
	url := answering(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/away":
			http.Redirect(w, r, other, http.StatusTemporaryRedirect)
		case "/get":
			http.Redirect(w, r, "/ok", http.StatusFound)
		case "/moved":
			http.Redirect(w, r, "/ok", http.StatusPermanentRedirect)
		case "/ok":
			body, _ := io.ReadAll(r.Body)
			if r.Method != http.MethodPost || len(body) == 0 {
				w.WriteHeader(http.StatusBadRequest)
			}
		}
	})
	require.Equal(t, "HTTP_307",
		structuredOf(t, setup(t, url+"/away", "backoff: {delay: 1h}").deliver("", rivertype.JobStateRetryable)).Type)
	require.Zero(t, elsewhere, "the payload is sent to no other host")
	require.Equal(t, "HTTP_302",
		structuredOf(t, setup(t, url+"/get", "backoff: {delay: 1h}").deliver("", rivertype.JobStateRetryable)).Type)
	setup(t, url+"/moved", "").deliver("", rivertype.JobStateCompleted)
}

func TestDeliver_EndlessAnswerFailsByStatus(t *testing.T) {
	t.Parallel()
	url := answering(t, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusInternalServerError)
		for r.Context().Err() == nil {
			if _, err := io.WriteString(w, strings.Repeat("x", 1<<16)); err != nil {
				return
			}
		}
	})
	job := setup(t, url, "backoff: {delay: 1h}").deliver("", rivertype.JobStateRetryable)
	require.Equal(t, "HTTP_500", structuredOf(t, job).Type, "an endless body does not hide the status")
}

// A destination that switches protocols could keep the connection open for ever, so its answer is a failure.
func TestDeliver_SwitchingProtocolsIsFailure(t *testing.T) {
	t.Parallel()
	done := make(chan struct{})
	t.Cleanup(func() { close(done) })
	url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, buffered, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		_, _ = buffered.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_ = buffered.Flush()
		<-done
	})
	job := setup(t, url, "timeout: 5m, maxAttempts: 1").deliver("", rivertype.JobStateDiscarded)
	require.Equal(t, "HTTP_101", structuredOf(t, job).Type)
}

func TestDeliver_ReusesConnections(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	connections := map[string]int{}
	url := answering(t, func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		connections[r.RemoteAddr]++
		mu.Unlock()
	})
	b := setup(t, url, "")
	for i := range 10 {
		b.deliver(fmt.Sprintf(`, "messageId": "m-%d"`, i), rivertype.JobStateCompleted)
	}
	require.Len(t, connections, 1)
}

func TestBackoff(t *testing.T) {
	t.Parallel()
	for attempt, want := range map[int]time.Duration{
		1: time.Second, 2: 2 * time.Second, 3: 4 * time.Second, 10: 512 * time.Second,
	} {
		require.Equal(t, want*8/10, delivery.Backoff(policy.Backoff{Delay: time.Second}, attempt, 0))
		require.Equal(t, want, delivery.Backoff(policy.Backoff{Delay: time.Second}, attempt, 0.5))
		require.Less(t, delivery.Backoff(policy.Backoff{Delay: time.Second}, attempt, 0.999), want*12/10)
	}
	require.LessOrEqual(t, delivery.Backoff(policy.Backoff{Delay: time.Hour}, 1000, 0.9), 29*time.Hour,
		"the backoff is bounded")
	require.Equal(t, 5*time.Second,
		delivery.Backoff(policy.Backoff{Kind: policy.BackoffFixed, Delay: 5 * time.Second}, 7, 0.5))
}

// A rule with the strategy manual applies from the first attempt on: the receiver may have booked the payment, so the
// message is not sent again. The rule matches the payload and the headers, which are not part of the error.
func TestDeliver_ManualPlanAppliesToFirstAttempt(t *testing.T) {
	t.Parallel()
	var requests atomic.Int32
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		requests.Add(1)
		w.WriteHeader(http.StatusGatewayTimeout)
	}))
	t.Cleanup(receiver.Close)
	b := setupWithRules(t, receiver.URL, "maxAttempts: 5, backoff: {kind: fixed, delay: 1ms}",
		"rules: [{name: large-amount-timeout, match: {status: 504, when: 'payload.amount > 1000 && headers[\"x-region\"] "+
			"== \"eu\"'}, class: transient, plan: {strategy: manual}}]")
	job := b.deliver(`, "headers": {"X-Region": "eu"}`, rivertype.JobStateCancelled, rivertype.JobStateDiscarded)
	require.Equal(t, rivertype.JobStateCancelled, job.State)
	require.Equal(t, int32(1), requests.Load(), "sent once")
	require.Equal(t, "transient", <-b.outcomes)
}

// FailureOf returns the facts that a delivery over the network records for the same answer.
func TestFailureOf_MatchesRecordedFailure(t *testing.T) {
	t.Parallel()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	for name, test := range map[string]struct {
		url    string
		answer delivery.Answer
	}{
		"an answer": {answer: delivery.Answer{Status: 409, Headers: map[string]string{
			"X-Error-Type": "CardDeclined", "Retry-After": "7", "Content-Type": "text/plain",
		}, Body: "no"}},
		"a problem": {answer: delivery.Answer{
			Status: 422, Headers: map[string]string{"Content-Type": "application/problem+json"},
			Body: `{"type": "https://bank.example/x", "title": "No"}`,
		}},
		"refused": {
			url:    "http://" + gone.Addr().String() + "/",
			answer: delivery.Answer{Failure: delivery.TypeConnectionRefused},
		},
	} {
		url := test.url
		if url == "" {
			url = answering(t, func(w http.ResponseWriter, _ *http.Request) {
				for name, value := range test.answer.Headers {
					w.Header().Set(name, value)
				}
				w.WriteHeader(test.answer.Status)
				_, _ = io.WriteString(w, test.answer.Body)
			})
		}
		job := setup(t, url, "maxAttempts: 2, backoff: {delay: 1h}").deliver("", rivertype.JobStateRetryable,
			rivertype.JobStateCancelled)
		real := structuredOf(t, job)
		destination := &policy.Destination{Name: "default", URL: url}
		m := &message.Message{MessageID: "m", Queue: "default", Payload: json.RawMessage("{}")}
		queue := &policy.Queue{Timeout: time.Second}
		facts, err := delivery.FailureOf(t.Context(), &policy.Data{}, queue, destination, m, &test.answer)
		require.NoError(t, err, name)
		require.Equal(t, []string{real.Type, real.Code}, []string{facts.Type, facts.Code}, name)
		var context map[string]any
		require.NoError(t, json.Unmarshal(facts.Context, &context))
		require.Equal(t, real.Context, context, name)
	}
	destination, answer := &policy.Destination{URL: "http://x"}, &delivery.Answer{Failure: "BAD_LUCK"}
	_, err = delivery.FailureOf(t.Context(), &policy.Data{}, &policy.Queue{}, destination, &message.Message{}, answer)
	require.ErrorContains(t, err, "known: CONNECTION_ERROR,")
}

// A receiver may report its version. dlqd ignores a value that does not have the form of a version.
func TestDeliver_KeepsTheVersionOfTheReceiver(t *testing.T) {
	t.Parallel()
	for reported, kept := range map[string]string{
		"4.2.0": "4.2.0", strings.Repeat("9", 101): "", "4.2 <script>": "", "4.2\u00e9": "", "": "",
	} {
		url := answering(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Dlqd-Version", reported)
			if r.Header.Get("Webhook-Id") == "fails" {
				w.WriteHeader(http.StatusUnprocessableEntity)
			}
		})
		b := setup(t, url, "")
		for _, job := range []*rivertype.JobRow{
			b.deliver(`, "messageId": "works"`, rivertype.JobStateCompleted),
			b.deliver(`, "messageId": "fails"`, rivertype.JobStateCancelled),
		} {
			var metadata map[string]any
			require.NoError(t, json.Unmarshal(job.Metadata, &metadata))
			if kept == "" {
				require.NotContains(t, metadata, riverdlq.VersionKey)
			} else {
				require.Equal(t, kept, metadata[riverdlq.VersionKey])
			}
		}
	}
}

// An operator sends a message to another destination. dlqd does not record the version that this destination reports,
// because it is not the version of the queue's destination.
func TestDeliver_IgnoresTheVersionOfAnotherDestination(t *testing.T) {
	t.Parallel()
	url := answering(t, func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("Dlqd-Version", "9.9.9") })
	b := setup(t, url, "")
	var metadata string
	require.NoError(t, b.pool.QueryRow(t.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, metadata)
		VALUES ('dlqd_message', '{"messageId": "m", "kind": "k", "payload": 1}', 'default', 1, '{"dlq:destination": "default"}')
		RETURNING metadata`).Scan(&metadata))
	require.Eventually(t, func() bool {
		var state string
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT state, metadata FROM river_job").Scan(&state, &metadata))
		return state == "completed"
	}, 5*time.Minute, 5*time.Millisecond)
	require.NotContains(t, metadata, riverdlq.VersionKey)
}
