package protocol_test

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/protocol"
)

// compare requires that the database and the model have the same state.
func (d *database) compare() {
	d.Helper()
	require.Equal(d, d.expected(), d.actual(), d.trace())
}

// expected returns the model's state as text.
func (d *database) expected() string {
	s := &d.state
	var lines []string
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	name := func(prefix string, i int8) string {
		if i < 0 {
			return ""
		}
		return fmt.Sprintf("%s%d", prefix, i)
	}
	for i := range s.NJobs {
		j := &s.Jobs[i]
		if j.State == protocol.Gone {
			add("job %d gone entry=%s", i, name("e", j.Entry))
			continue
		}
		add("job %d %s mark=%s done=%t key=%t entry=%s", i, j.State, name("e", j.Mark),
			j.Done && j.State == protocol.Completed, j.Keyed, name("e", j.Entry))
	}
	for e := range s.NFailures {
		entry := &s.Entries[e]
		if entry.Status < protocol.Pending || entry.Status > protocol.Archived {
			continue
		}
		waits := ""
		if entry.Status == protocol.Processing {
			waits = name("id", entry.Waits)
		}
		failed := []string{}
		for f := range s.NFailures {
			if entry.Known&(1<<f) != 0 {
				failed = append(failed, name("f", f))
			}
		}
		add("entry %d %s job=%d waits=%s last=f%d failures=%s decided=%t twice=%t tries=%d", e, entry.Status, entry.Job,
			waits, entry.Last, strings.Join(failed, ","),
			entry.Status != protocol.Pending || entry.Decided, entry.DoneTwice, entry.Tries)
	}
	for f := range s.NFailures {
		if by := s.Failures[f].TakenBy; by >= 0 {
			add("taken f%d by=%s", f, name("e", by))
		}
	}
	for i := range s.NInbox {
		add("inbox f%d reconciler=%t", s.Inbox[i].Failure, s.Inbox[i].Reconciler)
	}
	for i := range s.NFacts {
		f := &s.Facts[i]
		add("fact %s job=%d entry=%s failure=%s", f.Kind, f.Job, name("e", f.Entry), name("f", f.Failure))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// actual returns the state of the database in the form of expected. Jobs, entries and failures have the numbers of the
// model.
func (d *database) actual() string {
	d.Helper()
	created := make([]time.Time, len(d.jobs))
	ids := make([]int64, len(d.jobs))
	numbers := make([]int, len(d.jobs)) // the model's numbers of the jobs' ids
	for i, j := range d.jobs {
		created[i], ids[i], numbers[i] = j.created, j.id, int(d.state.Jobs[i].ID)
	}
	ats, entries := make([]time.Time, len(d.failures)), make([]uuid.UUID, len(d.failures))
	for f := range d.failures {
		ats[f], entries[f] = d.failures[f].at, d.failures[f].id
	}
	rows, err := d.conn(observer).Query(d.ctx, `WITH j AS (SELECT id, created_at, number, n - 1 AS i
		FROM unnest($1::bigint[], $2::timestamptz[], $3::integer[]) WITH ORDINALITY u (id, created_at, number, n)),
		f AS (SELECT at, id, n - 1 AS i FROM unnest($4::timestamptz[], $5::uuid[]) WITH ORDINALITY u (at, id, n))
		SELECT CASE WHEN r.id IS NULL THEN format('job %s gone entry=%s', j.i, 'e' || e.i)
			ELSE format('job %s %s mark=%s done=%s key=%s entry=%s', j.i, r.state, 'e' || m.i,
				dlq.is_superseded(r.state::text, r.attempt, r.metadata)::text, (r.unique_key IS NOT NULL)::text,
				'e' || e.i) END AS line
		FROM j LEFT JOIN river_job r USING (id, created_at) LEFT JOIN f m ON m.id::text = r.metadata ->> 'dlq:entry_id'
		LEFT JOIN dlq.entry_jobs k ON k.job_id = j.id AND k.job_created_at = j.created_at LEFT JOIN f e ON e.id = k.entry_id
		UNION ALL
		SELECT format('taken f%s by=%s', f.i, 'e' || e.i) FROM dlq.retired_jobs t JOIN f ON f.id = t.failure LEFT
		JOIN f e ON e.id = t.entry_id
		UNION ALL
		SELECT format('entry %s %s job=%s waits=%s last=%s failures=%s decided=%s twice=%s tries=%s', f.i,
			substr(e.status::text, 5), j.i, 'id' || w.number, 'f' || l.i,
			(SELECT string_agg(DISTINCT 'f' || k.i, ',' ORDER BY 'f' || k.i) FROM dlq.dead_letter_transitions t
			JOIN f k ON k.at = t.failed_at WHERE t.entry_id = e.id
				AND t.reason !~ 'which the entry does not wait for'), -- those are counted, and not taken in
			(e.status <> 'dlq_pending' OR e.strategy IS NOT NULL)::text, (e.rule IS NOT DISTINCT FROM 'done-twice')::text,
				e.dlq_retry_count)
		FROM dlq.dead_letter_queue e LEFT JOIN f ON f.id = e.id LEFT JOIN j ON j.id = e.river_job_id
			AND j.created_at = e.job_created_at LEFT JOIN f l ON l.at = e.last_failed_at
		LEFT JOIN LATERAL (SELECT j.number FROM j WHERE j.id = e.redelivery_job_id LIMIT 1) w ON true
		WHERE e.stage <> 'inbox'
		UNION ALL
		SELECT format('inbox f%s reconciler=%s', f.i, (i.captured_by = 'reconciler')::text) FROM dlq.dead_letter_inbox i LEFT
		JOIN f ON f.id = i.id
		UNION ALL
		SELECT format('fact %s job=%s entry=%s failure=%s', x.fact, j.i, 'e' || e.i, 'f' || l.i)
		FROM dlq.job_facts x LEFT JOIN j ON j.id = x.job_id AND j.created_at = x.job_created_at LEFT
		JOIN f e ON e.id = x.entry_id LEFT JOIN f l ON l.at = (x.job ->> 'finalized_at')::timestamptz`,
		ids, created, numbers, ats, entries)
	require.NoError(d, err)
	var lines []string
	for rows.Next() {
		var line string
		require.NoError(d, rows.Scan(&line))
		lines = append(lines, line)
	}
	require.NoError(d, rows.Err())
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
