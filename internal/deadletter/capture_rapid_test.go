package deadletter_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dlqd/dlqd/internal/deadletter"
)

// anyJSON generates JSON values of any shape. Many of its keys and texts are ones that capture reads.
func anyJSON(depth int) *rapid.Generator[any] {
	text := rapid.Custom(func(t *rapid.T) string {
		s := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{
			"", "JobCancelError: ", "2026-13-45T99:99:99Z", "infinity",
			"0198a0b0-0000-7000-8000-000000000000", "transient", strings.Repeat("x", 9000),
		})).Draw(t, "text")
		return strings.ReplaceAll(s, "\x00", "") // jsonb has no NUL
	})
	scalars := []*rapid.Generator[any]{
		rapid.Just[any](nil), rapid.Map(rapid.Bool(), func(v bool) any { return v }),
		rapid.Map(rapid.Int64(), func(v int64) any { return v }),
		rapid.Map(rapid.Float64(), func(v float64) any { return v }), rapid.Map(text, func(v string) any { return v }),
	}
	if depth == 0 {
		return rapid.OneOf(scalars...)
	}
	key := rapid.OneOf(rapid.SampledFrom([]string{
		"error", "attempt", "at", "trace", "dlq:error", "dlq:entry_id", "type", "code", "class", "message", "context",
		"cancel_attempted_at", "messageId", "kind", "source", "subscriberId",
	}), text)
	return rapid.OneOf(append(scalars,
		rapid.Map(rapid.SliceOfN(anyJSON(depth-1), 0, 4), func(v []any) any { return v }),
		rapid.Map(rapid.MapOfN(key, anyJSON(depth-1), 0, 6), func(v map[string]any) any { return v }),
	)...)
}

// A job with any data can be discarded. It gets one dead letter, which can be read and replayed.
func TestCapture_NeverRaises(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	rapid.Check(t, func(rt *rapid.T) {
		draw := func(name string) string {
			raw, err := json.Marshal(anyJSON(3).Draw(rt, name))
			require.NoError(rt, err)
			return string(raw)
		}
		var errs []string
		for range rapid.IntRange(0, 3).Draw(rt, "errors") {
			errs = append(errs, draw("error"))
		}
		id := b.insert(nil)
		kind := rapid.SampledFrom([]string{"test_job", "dlqd_message"}).Draw(rt, "kind")
		_, err := b.pool.Exec(t.Context(), `UPDATE river_job SET kind = $2, args = $3::jsonb, metadata = $4::jsonb,
			errors = $5::text[]::jsonb[],
			attempt = $6, state = 'running'
				WHERE id = $1`, id, kind, draw("args"), draw("metadata"), errs, rapid.Int16Range(0, 25).Draw(rt, "attempt"))
		require.NoError(rt, err)
		finalized := rapid.SampledFrom([]string{"now", "infinity", "-infinity", "294276-01-01Z", "4000-01-01 BC"}).Draw(rt,
			"finalized")
		tags := rapid.SampledFrom([]string{"{}", "{abc,NULL}", "{{a,b},{c,d}}"}).Draw(rt, "tags")
		_, err = b.pool.Exec(t.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = $2::text::timestamptz,
			tags = $3::text::varchar[] WHERE id = $1`, id, finalized, tags)
		require.NoError(rt, err)
		rows, err := b.pool.Query(t.Context(), "SELECT id FROM dlq.dead_letter_queue WHERE river_job_id = $1", id)
		require.NoError(rt, err)
		entryID, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[uuid.UUID])
		require.NoError(rt, err)
		_, _, err = b.store.Get(t.Context(), entryID)
		require.NoError(rt, err, "reading the unfiled entry")
		_, err = b.pool.Exec(t.Context(), "SELECT dlq.file(ARRAY[$1::uuid])", entryID)
		require.NoError(rt, err, "filing the entry")
		entry, _, err := b.store.Get(t.Context(), entryID)
		require.NoError(rt, err)
		require.NotEmpty(rt, entry.ErrorMessage)
		_, err = json.Marshal(entry)
		require.NoError(rt, err, "encoding the entry")
		job, err := b.store.Replay(t.Context(), entryID, deadletter.Replay{Force: true, Act: kim})
		require.NoError(rt, err, "replaying the entry")
		entry, _, err = b.store.Get(t.Context(), entryID)
		require.NoError(rt, err)
		require.Equal(rt, job, *entry.RedeliveryJobID)
	})
}
