package delivery_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// failedOver has messages that processes deliver while a standby is promoted.
type failedOver struct {
	*late

	servers *postgrestest.Replicated
}

func setupFailedOver(t *testing.T, messages ...string) *failedOver {
	t.Helper()
	servers := postgrestest.NewReplicated(t, false)
	servers.Migrate().Close()
	return &failedOver{setupLateIn(t, postgrestest.Open(t, servers.URL), "", "Webhook-Id", messages...), servers}
}

// fail promotes the standby, and waits until the pool has a connection to it.
func (f *failedOver) fail() {
	f.Helper()
	f.servers.Fail()
	require.Eventually(f, func() bool {
		_, err := f.pool.Exec(f.Context(), "CREATE TABLE IF NOT EXISTS promoted ()")
		return err == nil
	}, 5*time.Minute, 50*time.Millisecond)
}

// resubmit submits a message whose job gets the given id, because River assigns ids again after a failover.
func (f *failedOver) resubmit(message string, id int64) {
	f.Helper()
	_, err := f.pool.Exec(f.Context(), "SELECT setval(pg_get_serial_sequence('river_job', 'id'), $1, false)", id)
	require.NoError(f, err)
	require.Equal(f, id, f.submitAs(message, ""))
}

func (f *failedOver) awaitArrival(message string) {
	f.Helper()
	select {
	case arrived := <-f.arrived:
		require.Equal(f, message, arrived)
	case <-time.After(5 * time.Minute):
		require.Fail(f, "no request for "+message)
	}
}

func (f *failedOver) awaitState(id int64, state rivertype.JobState) {
	f.Helper()
	require.Eventually(f, func() bool {
		var found rivertype.JobState
		err := f.pool.QueryRow(f.Context(), "SELECT state FROM river_job WHERE id = $1", id).Scan(&found)
		return err == nil && found == state
	}, 5*time.Minute, 20*time.Millisecond)
}

// After the promotion of a standby that lagged, River assigns ids again. The outcome of a message that the standby does
// not have does not affect the new message with the same job id.
func TestLateAttempt_DoesNotAffectMessageWithSameID(t *testing.T) {
	t.Parallel()
	f := setupFailedOver(t, "success", "failure", "retry", "new-success", "new-failure", "new-retry")
	f.run(0)
	f.servers.Lag()
	ids := map[string]int64{}
	for _, lost := range []string{"success", "failure", "retry"} {
		ids[lost] = f.submitAs(lost, "")
		f.awaitArrival(lost)
	}
	f.stopFetching(0)
	f.fail()
	f.run(1)
	for lost, id := range ids {
		f.resubmit("new-"+lost, id)
		f.awaitArrival("new-" + lost)
	}
	f.answers["success"] <- http.StatusOK
	f.answers["failure"] <- http.StatusUnprocessableEntity
	f.answers["retry"] <- http.StatusInternalServerError
	for range ids {
		<-f.ended[0]
	}
	f.halt(0) // stopping the client flushes the outcomes of its jobs
	for lost, id := range ids {
		job := f.job(id)
		require.Equal(t, rivertype.JobStateRunning, job.State, lost)
		require.Empty(t, job.Errors, lost)
		f.answers["new-"+lost] <- http.StatusOK
		f.awaitState(id, rivertype.JobStateCompleted)
		require.Equal(t, 1, f.job(id).Attempt, lost)
	}
}

// While a process still delivers a lost message, a new message gets the same job id. The process delivers the new
// message afterwards.
func TestFetch_WithholdsIDsInUse(t *testing.T) {
	t.Parallel()
	f := setupFailedOver(t, "lost", "new")
	f.run(0)
	f.servers.Lag()
	id := f.submitAs("lost", "")
	f.awaitArrival("lost")
	f.fail()
	f.resubmit("new", id)
	f.awaitState(id, rivertype.JobStateRunning)
	require.Empty(t, f.arrived)
	f.answers["lost"] <- http.StatusUnprocessableEntity
	f.awaitArrival("new")
	f.answers["new"] <- http.StatusOK
	f.awaitState(id, rivertype.JobStateCompleted)
	require.Equal(t, 1, f.count("SELECT attempt FROM river_job"))
	require.Zero(t, f.count("SELECT cardinality(coalesce(errors, '{}')) FROM river_job"))
}

// A promoted standby may have the fetch of a message, but not the message's outcome. The client puts that job back.
func TestFetch_PutsBackJobsAfterFailover(t *testing.T) {
	t.Parallel()
	f := setupFailedOver(t, "delivered")
	f.run(0)
	id := f.submitAs("delivered", "")
	f.awaitArrival("delivered")
	f.servers.CatchUp()
	f.servers.Lag()
	f.answers["delivered"] <- http.StatusOK
	f.awaitState(id, rivertype.JobStateCompleted)
	f.fail()
	f.awaitArrival("delivered")
	f.answers["delivered"] <- http.StatusOK
	f.awaitState(id, rivertype.JobStateCompleted)
	require.Equal(t, 1, f.count("SELECT attempt FROM river_job"))
}
