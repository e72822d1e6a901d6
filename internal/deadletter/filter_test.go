package deadletter_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// A filter accepts times of any year; Go's zero time is in year 1. An action whose filter selects every entry is
// rejected, unless the caller confirms the action.
func TestFilter_AcceptsTimesOfAnyYear(t *testing.T) {
	t.Parallel()
	_, pool := createRoleEntries(t)
	s := ownerSession(t, pool)
	store := deadletter.NewStore(pool, postgres.DefaultSchemas())
	const none, all = "0", "4"
	for filter, want := range map[string]string{
		`{"before": "0001-01-01T00:00:00Z"}`: none, `{"before": "1960-01-01"}`: none,
		`{"before": "1969-12-31T23:59:59Z"}`: none, `{"before": "-infinity"}`: none, `{"before": "4713-01-01 BC"}`: none,
		`{"before": "9999-12-31T23:59:59Z"}`: all, `{"before": "20000-01-01"}`: all,
		`{"before": "294276-01-01"}`: all, `{"before": "infinity"}`: all, `{"before": "2100-01-01"}`: all,
		`{"after": "0001-01-01T00:00:00Z"}`: all, `{"after": "1960-01-01"}`: all,
		`{"after": "1970-01-01Z"}`: all, `{"after": "-infinity"}`: all,
		`{"after": "9999-12-31T23:59:59Z"}`: none, `{"after": "20000-01-01"}`: none,
		`{"after": "294276-01-01"}`: none, `{"after": "infinity"}`: none,
		`{"maxAge": "100 years"}`: all, `{"maxAge": "5000 years"}`: all, `{"maxAge": "1 hour"}`: all,
		`{"after": "2020-01-01"}`: all, `{"before": "2020-01-01"}`: none,
		`{"maxRetryCount": 2147483647}`: all,
		`{"status": ["dlq_pending", "dlq_processing", "dlq_manual", "dlq_returned", "dlq_resolved", "dlq_failed", ` +
			`"dlq_archived"]}`: all,
	} {
		require.Equal(t, want, s.text("SELECT count(*)::text FROM dlq.find_ids('"+filter+"', 100)"), filter)
		require.Equal(t, want, s.text("SELECT coalesce(sum(entries), 0)::text FROM dlq.preview('"+filter+"')"), filter)
		_, err := pool.Exec(t.Context(), "SELECT dlq.act_where('note', $1::text::jsonb, p_note => 'x')", filter)
		if meant := want == none || strings.Contains(filter, "1 hour") || strings.Contains(filter, "2020"); meant {
			require.NoError(t, err, filter)
		} else {
			require.ErrorContains(t, err, "matches every entry", filter)
			_, err = pool.Exec(t.Context(), "SELECT dlq.erase_begin($1::text::jsonb, 'x')", filter)
			require.ErrorContains(t, err, "matches the data of every person", filter)
		}
	}
	for _, filter := range []string{
		`{"maxAge": "-5 days"}`, `{"maxAge": "a while"}`, `{"maxAge": "999999999999 years"}`,
		`{"after": "soon"}`, `{"before": "2020-13-01"}`, `{"minRetryCount": 99999999999}`,
		`{"minRetryCount": "x"}`, `{"status": "dlq_lost"}`, `{"ids": ["x"]}`, `{"after": "300000-01-01"}`,
	} {
		for _, sql := range []string{
			"SELECT dlq.act_where('note', $1::text::jsonb)",
			"SELECT dlq.find_ids($1::text::jsonb, 10)", "SELECT dlq.preview($1::text::jsonb)",
		} {
			_, err := pool.Exec(t.Context(), sql, filter)
			require.ErrorContains(t, err, "DLQ04", "%s %s", sql, filter)
		}
	}
	for year, want := range map[int][2]int{1: {0, 4}, 1960: {0, 4}, 9999: {4, 0}, 20000: {4, 0}} {
		at := time.Date(year, 2, 1, 0, 0, 0, 0, time.UTC)
		before, err := store.List(t.Context(),
			deadletter.Page{Filter: filter.Filter{Before: at.Format(time.RFC3339Nano)}, Limit: 10})
		require.NoError(t, err)
		after, err := store.List(t.Context(),
			deadletter.Page{Filter: filter.Filter{After: at.Format(time.RFC3339Nano)}, Limit: 10})
		require.NoError(t, err)
		require.Equal(t, want, [2]int{len(before), len(after)}, fmt.Sprint(year))
	}
}
