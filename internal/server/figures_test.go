package server_test

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A failed redelivery of a message counts for the class that the dead letter had when the redelivery was sent, in the
// API and in the metrics.
func TestFigures_FailedReplayCountsForTheClassWhenSent(t *testing.T) {
	t.Parallel()
	b := setup(t, options{receiver: answering(http.StatusUnprocessableEntity)})
	b.submit("m1")
	entry := b.awaitMessage("m1", "dead-lettered")["deadLetter"].(map[string]any)["id"].(string)
	b.awaitEntry(entry, "dlq_manual")
	status, out, _ := b.call("POST", "/api/dlq/entries/"+entry+"/replay", `{}`)
	require.Equal(t, http.StatusAccepted, status, out)
	require.Eventually(t, func() bool {
		return b.count("SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND dlq_retry_count = 1") == 1
	}, 5*time.Minute, 50*time.Millisecond)
	require.Eventually(t, func() bool {
		_, out, _ = b.call("GET", "/api/dlq/analytics/replays", "")
		raw, err := json.Marshal(out)
		require.NoError(t, err)
		return strings.Contains(string(raw),
			`"errorClass":"validation","failed":1,"queue":"default","redelivered":1,"succeeded":0,"success":0}]`)
	}, 5*time.Minute, 50*time.Millisecond, "%v", out)
	require.Eventually(t, func() bool {
		_, out, _ = b.call("GET", "/metrics", "")
		return strings.Contains(out["text"].(string),
			`dlqd_redeliveries_ended_total{error_class="validation",outcome="failed",queue="default"} 1`)
	}, 5*time.Minute, 50*time.Millisecond)
	require.NotContains(t, out["text"], `dlqd_redeliveries_ended_total{error_class="undecided",outcome="failed"`)
}
