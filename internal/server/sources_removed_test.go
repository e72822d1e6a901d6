package server_test

import (
	"log/slog"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/source"
)

// The policy has no source any more, but retry-policies.yaml keeps the source's queue with an HTTP destination. dlqd
// does not send the source's records there.
func TestSources_SendNoRecordElsewhereOnceRemoved(t *testing.T) {
	t.Parallel()
	var requests atomic.Int32
	b := setup(t, options{
		receiver: func(http.ResponseWriter, *http.Request) { requests.Add(1) },
		config: func(c *server.Config) {
			orders := *c.Policy.Queues["default"]
			orders.Name = "orders"
			c.Policy.Queues["orders"] = &orders
		},
	})
	before := policytest.Load(t, policytest.Files{"sources": sourcesYAML})
	store := &source.Store{
		DB: postgres.DefaultSchemas().Rendered(b.pool), Policy: func() *policy.Policy { return before },
		Logger: slog.New(slog.DiscardHandler),
	}
	_, err := store.Append(t.Context(), source.Batch{
		Partition: source.Partition{Cluster: "main", Topic: "dlq.prod.pay", TopicID: uuid.New()}, Source: "orders",
		Next: 1, Start: true, Records: []source.Record{{Time: time.Now(), Value: []byte(`{"a": 1}`)}},
	})
	require.NoError(t, err)
	b.await("1", "SELECT count(*)::text FROM dlq.dead_letter_queue WHERE stage = 'open'")
	id := b.one("SELECT id::text FROM dlq.dead_letter_queue")
	b.sendBack(id)
	b.await("dlq_manual true", `SELECT status || ' ' || (error_message LIKE '%no source with the queue orders any more%')
		FROM dlq.dead_letter_queue WHERE id = $1`, id)
	require.Zero(t, requests.Load())
}
