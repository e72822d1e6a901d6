package postgres_test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/strategy"
)

// formerGroup is a failure group that grouping method 1 formed, with the causes of its errors.
type formerGroup struct {
	queue, fingerprint string
	causes             []string // if more than one, the current method separates them
	state              string   // status, set by operators
	closed             bool     // all its entries are closed
	was                *group.Group
	entries            int
}

// statuses selects the distinct statuses of the entries of a table, whose name is appended.
const statuses = "SELECT string_agg(DISTINCT status::text, ' ' ORDER BY status::text) FROM "

// declined and noFunds are two responses in the form that a dlqd with grouping method 1 recorded.
var (
	declined = answer402("card declined", "CARD_DECLINED")
	noFunds  = answer402("no funds", "INSUFFICIENT_FUNDS")
)

// word returns a word for n, of letters only: digits are not part of a cause.
func word(n int) (text string) {
	for range 4 {
		text += string(rune('k' + n%10))
		n /= 10
	}
	return text
}

// A database with 200 failure groups, in every status and with entries in every state, is upgraded. Afterwards each
// group continues and can be found by its old fingerprint. No group is shown as new or as failing again. An older dlqd
// that runs beside the new one does not change that.
func TestUpgrade_KeepsFailureGroups(t *testing.T) {
	t.Parallel()
	g := frozenGuest(t, "00008")
	// On a busy machine, a thousand failures in one statement may take longer than capture's limit.
	execute(t, g.dlqd, "SELECT dlq.set_capture('on', '1 hour', 'kim')")
	all := make([]*formerGroup, 200)
	states := []string{"open", "fixed", "regressed", "muted"}
	for i := range all {
		f := &formerGroup{
			queue: []string{"payments", "mails"}[i%2], fingerprint: fmt.Sprintf("%016x", 0xf00d0000+i),
			causes: []string{"lost " + word(i)}, state: states[i/2%4],
		}
		switch i / 8 % 4 {
		case 1: // the same cause as the group with an index 32 lower
			if i/8%8 == 5 {
				f.causes = all[i-32].causes
			}
		case 2:
			f.causes = append(f.causes, "refused "+word(i))
		case 3:
			f.closed = true
		}
		if i == 22 || i == 23 { // responses of receivers: method 1 put all causes into one group
			const message = "POST http://bank.example/pay: 402 Payment Required"
			f.fingerprint = strategy.FingerprintByMessage("HTTP_402", message, "")
			f.causes = []string{declined, noFunds}
		}
		all[i] = f
	}
	g.fileFormer(all, "pending,processing,manual,resolved,failed,archived", time.Now().Add(-48*time.Hour))
	g.moveFormer(all)
	groups := &group.Store{Store: deadletter.NewStore(g.dlqd, postgres.DefaultSchemas())}
	for _, f := range all {
		change := map[string]any{"owner": "owner of " + f.fingerprint, "note": "note of " + f.fingerprint}
		switch f.state {
		case "fixed", "regressed":
			change["status"] = "fixed"
		case "muted":
			change["muteUntil"] = time.Now().Add(time.Hour)
		}
		raw, err := json.Marshal(change)
		require.NoError(t, err)
		execute(t, g.dlqd, fmt.Sprintf("SELECT dlq.set_group('%s', '%s', '%s', 'kim')", f.queue, f.fingerprint, raw))
	}
	var again []*formerGroup
	for _, f := range all {
		if f.state == "regressed" {
			again = append(again, f)
		}
	}
	g.fileFormer(again, "again", time.Now())
	closed := literal(all, func(f *formerGroup) bool { return f.closed })
	execute(t, g.dlqd, "SELECT dlq.discard(id, 'kim') FROM dlq.dead_letter_open o "+
		"WHERE kind = 'again' AND fingerprint = ANY ("+closed+")")
	execute(t, g.dlqd, postgrestest.RefreshRollups)
	for _, f := range all {
		was, err := groups.Get(t.Context(), f.queue, f.fingerprint, 7*24*time.Hour)
		require.NoError(t, err)
		require.Equal(t, f.state, was.Status, f)
		f.was = was
		f.entries = count(t, g.dlqd, fmt.Sprintf(
			"SELECT count(*) FROM dlq.dead_letter_queue WHERE fingerprint = '%s' AND queue = '%s'", f.fingerprint, f.queue))
	}
	moves := g.text("SELECT max(id) FROM dlq.dead_letter_transitions")
	upgraded := time.Now()

	require.NoError(t, g.migrator.Up(t.Context()))
	r := &group.Regrouper{Store: groups, Logger: slog.New(slog.DiscardHandler), Actor: "worker:new"}
	require.Eventually(t, func() bool { return r.AliasMarked(t.Context()) == nil }, 5*time.Minute, time.Millisecond)
	execute(t, g.dlqd, postgrestest.RefreshRollups)

	// Compare the groups before the entries are moved, and after each step.
	present := map[string][]*formerGroup{} // by queue and fingerprint
	for _, f := range all {
		for _, cause := range f.causes {
			key := f.queue + " " + currentFingerprint(cause)
			present[key] = append(present[key], f)
		}
	}
	kinds := map[string]int{}
	check := func(when string) {
		t.Helper()
		list, _, err := groups.List(t.Context(), group.Filter{Order: "latest", Over: 7 * 24 * time.Hour, Limit: 1000})
		require.NoError(t, err)
		open := int64(0)
		for i := range list {
			now := &list[i]
			from := present[now.Queue+" "+now.Fingerprint]
			require.NotEmpty(t, from, "%s: %v is the present name of a group", when, now)
			open += now.Open
			require.True(t, now.FirstSeen.Before(upgraded.Add(-time.Hour)), "%s: %v looks new", when, now)
			require.True(t, now.LastSeen.Before(upgraded), "%s: %v looks as if it had failed again", when, now)
			require.NotNil(t, now.Owner)
			require.NotNil(t, now.Note)
			if f := from[0]; len(from) == 1 && len(f.causes) == 1 {
				kinds["one to one, "+f.state]++
				was := *f.was
				was.Fingerprint, was.Sample, now.Sample = now.Fingerprint, nil, nil
				require.Equal(t, &was, now, when)
				continue
			}
			require.Equal(t, group.Open, now.Status, "%s: %v", when, now)
			for _, f := range from {
				kinds[map[bool]string{true: "joined, ", false: "split, "}[len(from) > 1]+f.state]++
				require.Contains(t, *now.Note, "note of "+f.fingerprint)
				mark := map[string]string{
					"fixed": ", marked as fixed by kim", "regressed": ", marked as fixed by kim", "muted": ", muted by kim",
				}[f.state]
				noted := strings.Contains(*now.Note, "was part of "+f.fingerprint+mark)
				require.Equal(t, mark != "", noted, "%s: %v", when, now)
			}
		}
		require.LessOrEqual(t, len(list), len(present), when)
		require.EqualValues(t, count(t, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_open"), open, when)
	}
	check("learned")
	for wait := time.Duration(1); wait > 0; {
		var err error
		wait, err = r.Once(t.Context())
		require.NoError(t, err)
		execute(t, g.dlqd, postgrestest.RefreshRollups)
		check("on the way")
	}
	require.Len(t, kinds, 12, "%v", kinds)
	list, _, err := groups.List(t.Context(), group.Filter{Order: "latest", Over: time.Hour, Limit: 1000})
	require.NoError(t, err)
	require.Len(t, list, len(present))
	require.Zero(t, count(t, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_open WHERE length(fingerprint) = 16"))
	require.Equal(t, "dlq_manual dlq_pending dlq_processing", g.text(statuses+"dlq.dead_letter_open"))
	for cause, title := range map[string]string{noFunds: "no funds", declined: "card declined"} {
		now, err := groups.Get(t.Context(), "payments", currentFingerprint(cause), time.Hour)
		require.NoError(t, err)
		require.Contains(t, *now.Title, title)
		require.NotContains(t, *now.Title, "http")
	}
	require.Zero(t, count(t, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_transitions "+
		"WHERE id > "+moves+" AND from_status IS DISTINCT FROM to_status"))

	// Links and saved filters work with the old and with the new fingerprint.
	for _, f := range all {
		now, err := groups.Get(t.Context(), f.queue, f.fingerprint, time.Hour)
		require.NoError(t, err)
		require.Contains(t, present, now.Queue+" "+now.Fingerprint)
		for _, name := range []string{f.fingerprint, now.Fingerprint} {
			found := count(t, g.dlqd, fmt.Sprintf(
				`SELECT count(*) FROM dlq.find_ids('{"fingerprint": "%s", "queue": "%s"}', 1000)`, name, f.queue))
			if len(f.causes) == 1 || name != now.Fingerprint {
				require.GreaterOrEqual(t, found, f.entries, name)
			}
		}
	}

	// An older dlqd files and decides entries while the new one runs.
	var open []*formerGroup
	for _, f := range all {
		if len(f.causes) == 1 && len(present[f.queue+" "+currentFingerprint(f.causes[0])]) == 1 && f.state == "muted" {
			open = append(open, f)
		}
	}
	for range 3 {
		g.fileFormer(open, "beside", upgraded.Add(-time.Minute))
		execute(t, g.dlqd, postgrestest.RefreshRollups)
		for _, f := range open {
			for _, name := range []string{f.fingerprint, currentFingerprint(f.causes[0])} {
				marks, err := groups.Marks(t.Context(), []group.Key{{Queue: f.queue, Fingerprint: name}})
				require.NoError(t, err)
				require.True(t, marks[group.Key{Queue: f.queue, Fingerprint: name}].Muted, "muted by either name")
			}
			now, err := groups.Get(t.Context(), f.queue, f.fingerprint, time.Hour)
			require.NoError(t, err)
			require.Equal(t, group.Muted, now.Status)
			require.Equal(t, currentFingerprint(f.causes[0]), now.Fingerprint)
		}
		list, _, err := groups.List(t.Context(), group.Filter{Order: "latest", Over: time.Hour, Limit: 1000})
		require.NoError(t, err)
		require.Len(t, list, len(present))
		_, err = r.Once(t.Context())
		require.NoError(t, err)
	}
	require.Zero(t, count(t, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_open WHERE length(fingerprint) = 16"))

	groupsNow := `SELECT string_agg(concat_ws(' ', queue, fingerprint, failures, open, first_seen, last_seen), E'\n'
		ORDER BY queue, fingerprint) FROM dlq.groups(p_limit => 1000)`
	execute(t, g.dlqd, postgrestest.RefreshRollups)
	before := g.text(groupsNow)
	execute(t, g.dlqd, "SELECT dlq.rebuild_rollups()")
	require.Equal(t, before, g.text(groupsNow), "the rollups match the audit trail")
	t.Log(kinds)
}

// recorded is an error in the form that dlqd's delivery records.
type recorded struct {
	Attempt int             `json:"attempt"`
	Type    string          `json:"type"`
	Code    string          `json:"code"`
	Message string          `json:"message"`
	Context json.RawMessage `json:"context"`
}

// answer402 returns a response with status 402 in the form that a dlqd with grouping method 1 recorded.
func answer402(message, code string) string {
	return fmt.Sprintf(`{"attempt": 3, "type": "HTTP_402", "code": "402", `+
		`"message": "POST http://bank.example/pay: 402 Payment Required", `+
		`"context": {"status": 402, "body": "{\"error\": \"%s\", \"code\": \"%s\"}"}}`, message, code)
}

// currentFingerprint returns the fingerprint of an error by the current method. cause is an application's error text,
// or a recorded response in JSON.
func currentFingerprint(cause string) string {
	r := recorded{Message: cause}
	if strings.HasPrefix(cause, "{") {
		if err := json.Unmarshal([]byte(cause), &r); err != nil {
			panic(err)
		}
	}
	return strategy.Fingerprint(&strategy.Failure{Type: r.Type, Code: r.Code, Message: r.Message, Context: r.Context})
}

// literal returns, as an SQL array, the fingerprints of the groups that the function selects.
func literal(groups []*formerGroup, which func(*formerGroup) bool) string {
	of := []string{}
	for _, f := range groups {
		if which(f) {
			of = append(of, f.fingerprint)
		}
	}
	return "'{" + strings.Join(of, ",") + "}'"
}

// fileFormer makes jobs of each kind fail with each cause of the groups, and files the failures as a dlqd with grouping
// method 1 does.
func (g *guest) fileFormer(groups []*formerGroup, kinds string, at time.Time) {
	g.Helper()
	type failure struct {
		Queue, Former, Message, Kind string
	}
	var failures []failure
	for _, f := range groups {
		for _, cause := range f.causes {
			for kind := range strings.SplitSeq(kinds, ",") {
				if kind == "failed" && strings.HasPrefix(cause, "{") {
					continue // a redelivery records an error of its own
				}
				failures = append(failures, failure{f.queue, f.fingerprint, cause, kind})
			}
		}
	}
	raw, err := json.Marshal(failures)
	require.NoError(g, err)
	_, err = g.app.Exec(g.Context(), `INSERT INTO river_job (kind, args, queue, max_attempts, state, metadata)
		SELECT f->>'Kind', '{}', f->>'Queue', 3, 'running', jsonb_build_object('former', f->>'Former', 'message',
			f->>'Message')
			|| CASE WHEN f->>'Message' LIKE '{%' THEN jsonb_build_object('dlq:error', (f->>'Message')::jsonb)
			        ELSE '{}' END
		FROM jsonb_array_elements($1::jsonb) f`, string(raw))
	require.NoError(g, err)
	_, err = g.app.Exec(g.Context(), `UPDATE river_job SET state = 'discarded', finalized_at = $1, attempt = 3,
		errors = ARRAY[jsonb_build_object('error', metadata->>'message', 'attempt', 3, 'at', $1::timestamptz)]
		WHERE state = 'running'`, at)
	require.NoError(g, err)
	require.Equal(g, len(failures), count(g.T, g.dlqd, "SELECT count(*) FROM dlq.dead_letter_inbox"))
	_, err = g.dlqd.Exec(g.Context(), `SELECT dlq.file_as(array_agg(i.id), 'worker:old', NULL,
			array_agg(CASE i.kind WHEN 'pending' THEN 'dlq_pending' ELSE 'dlq_manual' END),
			array_agg(CASE i.kind WHEN 'pending' THEN 'scheduled' ELSE 'manual' END),
			array_agg('outage'::text), array_agg('r'::text), array_agg(i.metadata->>'former'),
			array_agg(now() + interval '1 day'))
		FROM dlq.dead_letter_inbox i`)
	require.NoError(g, err)
}

// moveFormer moves each entry into the state that the kind of its job names, and closes the entries of closed groups.
func (g *guest) moveFormer(groups []*formerGroup) {
	g.Helper()
	act := func(where, function string) {
		execute(g.T, g.dlqd, "SELECT dlq."+function+"(id, 'kim', 'so') FROM dlq.dead_letter_open WHERE "+where)
	}
	execute(g.T, g.dlqd, "UPDATE dlq.dead_letter_queue SET dlq_max_retries = 1 WHERE kind = 'failed'")
	act("kind = 'resolved'", "resolve")
	act("kind = 'archived'", "discard")
	closed := literal(groups, func(f *formerGroup) bool { return f.closed })
	act("kind IN ('pending', 'processing', 'manual') AND fingerprint = ANY ("+closed+")", "discard")
	act("kind IN ('processing', 'failed')", "replay")
	execute(g.T, g.app, `UPDATE river_job SET state = 'discarded', finalized_at = now(), attempt = 1,
		errors = ARRAY[jsonb_build_object('error', metadata->>'message', 'attempt', 1)]
		WHERE kind = 'failed' AND state = 'available'`)
	execute(g.T, g.dlqd, "SELECT dlq.apply_facts()")
	execute(g.T, g.dlqd, postgrestest.RefreshRollups)
	require.Equal(g, "dlq_archived dlq_failed dlq_manual dlq_pending dlq_processing dlq_resolved",
		g.text(statuses+"dlq.dead_letter_queue"))
}
