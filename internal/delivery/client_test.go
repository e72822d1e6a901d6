package delivery_test

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/strategy"
)

// River's client accepts every policy that loads. policy.Load refuses all others, with file and line.
func TestNewClient_AcceptsEveryLoadedPolicy(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	long := strings.Repeat("q", 64)
	taken := 0
	for _, c := range []struct {
		queue       string
		concurrency int
	}{
		{"a", 1},
		{long, 10_000},
		{long + "q", 1},
		{strings.Repeat("payments-", 9) + "later", 1},
		{"a", 10_001},
		{"a", 0},
		{"a_b-c", 1},
		{"A", 1},
		{"a__b", 1},
		{"a-", 1},
		{"a|b", 1},
		{"a.b", 1},
		{"ä", 1},
	} {
		dir := t.TempDir()
		for name, text := range map[string]string{
			"retry-policies": "destinations:\n  d:\n    url: http://127.0.0.1:1/\n" +
				fmt.Sprintf("queues:\n  %q:\n    destination: d\n", c.queue),
			"worker-pool": fmt.Sprintf("queues:\n  %q:\n    concurrency: %d\n", c.queue, c.concurrency),
		} {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600))
		}
		rules, err := policy.Load(policy.Source{Dir: dir})
		if err != nil {
			require.Regexp(t, `(retry-policies|worker-pool)\.yaml:\d+: `, err.Error(), "%v", c)
			continue
		}
		taken++
		planner, err := strategy.NewPlanner(rules, nil)
		require.NoError(t, err)
		logger := slog.New(slog.DiscardHandler)
		worker := delivery.NewWorker(delivery.Config{Planner: func() *strategy.Planner { return planner }, Logger: logger})
		_, err = delivery.NewClient(t.Context(), delivery.ClientConfig{
			Pool: pool, Schemas: postgres.DefaultSchemas(), Policy: func() *policy.Policy { return rules },
			Worker: worker, Logger: logger,
		})
		require.NoError(t, err, "%v", c)
	}
	require.GreaterOrEqual(t, taken, 3)
}
