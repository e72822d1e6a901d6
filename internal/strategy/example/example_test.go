// Package example_test adds a fifth strategy to dlqd, as docs/extending.md describes.
package example_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/strategy/strategies"
)

// doubling redelivers after the first delay of the plan. Each further delay is twice as long as the one before.
type doubling struct{}

func (doubling) First(e *strategy.Entry, plan *policy.Plan, now time.Time) (time.Time, string) {
	delay := e.RetryAfter
	if len(plan.Delays) > 0 {
		delay = max(delay, plan.Delays[0]<<min(e.RetryCount, 20))
	}
	if at := e.LastFailedAt.Add(delay); at.After(now) {
		return at, ""
	}
	return now, ""
}

func (doubling) Due(*strategy.Entry, *policy.Plan, time.Time) strategy.Verdict {
	return strategy.Verdict{Redeliver: true}
}

func TestMain(m *testing.M) {
	strategy.Add("doubling", "Redelivers after the first of the delays, then after twice as long each time.", doubling{})
	postgrestest.Main(m)
}

// migration is the only statement of the migration that a new strategy needs.
const migration = "ALTER TYPE dlq.strategy ADD VALUE 'doubling'"

const routing = `
strategies: {doubling: {delays: [20ms], maxRetries: 7}}
classes: {transient: {strategy: doubling}}
kinds: {slow.*: {plan: {delays: [1h]}}}
`

func TestAdd_StrategyDecidesMovesAndIsShown(t *testing.T) {
	t.Parallel()
	url := postgrestest.URL(t)
	pool := postgrestest.Open(t, url)
	query := func(sql string) []string {
		rows, err := pool.Query(t.Context(), sql)
		require.NoError(t, err)
		all, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return all
	}
	const labels = "SELECT enumlabel::text FROM pg_enum WHERE enumtypid = 'dlq.strategy'::regtype ORDER BY enumsortorder"
	require.Equal(t, strategies.Names()[:len(strategies.Names())-1], query(labels), "the list in Go differs from the enum")
	const files = "SELECT oid::text || ' ' || relfilenode::text FROM pg_class WHERE relfilenode <> 0 AND oid >= 16384 ORDER BY oid"
	before := query(files)
	_, err := pool.Exec(t.Context(), migration)
	require.NoError(t, err)
	require.Equal(t, strategies.Names(), query(labels))
	require.Equal(t, before, query(files), "the migration rewrote a table or an index")

	var failures atomic.Int64
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if bytes.Contains(body, []byte("slowly")) || failures.Add(1) <= 3 {
			w.WriteHeader(http.StatusBadGateway)
		}
	}))
	t.Cleanup(receiver.Close)
	rules, err := policy.Load(policy.Source{Destination: receiver.URL, Dir: policytest.Dir(t, policytest.Files{
		"dlq-routing": routing, "retry-policies": "defaults: {maxAttempts: 1}\n",
	})})
	require.NoError(t, err)
	base := start(t, url, rules)

	for id, status := range map[string]deadletter.Status{"quickly": deadletter.Resolved, "slowly": deadletter.Pending} {
		kind := map[string]string{"quickly": "order", "slowly": "slow.order"}[id]
		call(t, "POST", base+"/api/messages",
			`{"messageId": "`+id+`", "queue": "default", "kind": "`+kind+`", "payload": {"goes": "`+id+`"}}`, nil)
		var position struct{ DeadLetter struct{ ID string } }
		var entry struct {
			deadletter.Entry

			Transitions []deadletter.Transition
		}
		require.Eventually(t, func() bool {
			call(t, "GET", base+"/api/messages/"+id, "", &position)
			if position.DeadLetter.ID == "" {
				return false
			}
			call(t, "GET", base+"/api/dlq/entries/"+position.DeadLetter.ID, "", &entry)
			return entry.Status == status && entry.Strategy != nil
		}, 5*time.Minute, 20*time.Millisecond, id)
		require.Equal(t, "doubling", *entry.Strategy)
		require.Contains(t, call(t, "GET", base+"/dead-letters/"+position.DeadLetter.ID, "", nil), "doubling")
		if status == deadletter.Pending {
			require.WithinDuration(t, entry.LastFailedAt.Add(time.Hour), *entry.NextRetryAt, time.Millisecond)
			require.Contains(t, *entry.Next, "will be sent again at ")
			continue
		}
		require.EqualValues(t, 3, entry.DLQRetryCount)
		for _, move := range entry.Transitions {
			if move.Strategy != nil { // nil after a failed redelivery, until the next decision
				require.Equal(t, "doubling", *move.Strategy)
			}
		}
	}

	var list struct{ Entries []deadletter.Summary }
	call(t, "GET", base+"/api/dlq/entries?q=strategy:doubling", "", &list)
	require.Len(t, list.Entries, 2)
	call(t, "GET", base+"/api/dlq/entries?q=strategy:immediate", "", &list)
	require.Empty(t, list.Entries)
	var completed struct{ Completions []struct{ Insert string } }
	call(t, "GET", base+"/api/dlq/filter?q=strategy:dou", "", &completed)
	require.Equal(t, []struct{ Insert string }{{"doubling"}}, completed.Completions)
	var selected struct{ Chosen int }
	call(t, "POST", base+"/api/dlq/bulk",
		`{"do": "discard", "filter": {"strategy": ["doubling"]}, "dryRun": true}`, &selected)
	require.Equal(t, 2, selected.Chosen, "a filter given as JSON does not know the strategy")
}

func TestAdd_PolicyKnowsStrategy(t *testing.T) {
	t.Parallel()
	_, err := policy.Load(policy.Source{Destination: policytest.Destination, Dir: policytest.Dir(t, policytest.Files{
		"dlq-routing": "classes: {unknown: {strategy: nonsense}}\nstrategies: {manual: {delays: [1s]}}\n",
	})})
	require.ErrorContains(t, err, "is nonsense; must be one of immediate, scheduled, conditional, manual, doubling")
	require.ErrorContains(t, err, "strategies.manual: unknown field (known: conditional, doubling, immediate, scheduled)")
	schema, err := policy.Schema("dlq-routing")
	require.NoError(t, err)
	require.Contains(t, string(schema), "then after twice as long each time.")
}

// start starts a complete dlqd, and returns the address of its API.
func start(t *testing.T, url string, rules *policy.Policy) string {
	t.Helper()
	s, err := server.Start(t.Context(), server.Config{
		DatabaseURL: url, Schemas: postgres.DefaultSchemas(), API: true, Process: true, DLQWorkers: true,
		Listen: []string{"127.0.0.1:0"}, Policy: rules, Logger: slog.New(slog.DiscardHandler),
		MaxConns: postgrestest.MaxConns, StopTimeout: 20 * time.Second,
		Measure: func(context.Context) (breaker.Load, error) { return breaker.Load{}, nil },
	})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- s.Wait(ctx, context.Background()) }()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-stopped)
	})
	return s.Addresses()[0]
}

// call sends a request and returns the answer. If out is not nil, call decodes the answer into it.
func call(t *testing.T, method, address, body string, out any) string {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, address, bytes.NewReader([]byte(body)))
	require.NoError(t, err)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.Less(t, response.StatusCode, 300, string(raw))
	if out != nil {
		require.NoError(t, json.Unmarshal(raw, out), string(raw))
	}
	return string(raw)
}
