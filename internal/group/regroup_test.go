package group_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/strategy"
)

// find counts the entries that a filter for a failure group selects.
const find = "SELECT count(*) FROM dlq.find_ids(jsonb_build_object('fingerprint', $1::text), 100)"

// formerFingerprint returns the fingerprint of a group that method 1 formed.
func formerFingerprint(n int) string { return fmt.Sprintf("%016x", 0xf000+n) }

// currentFingerprint returns the fingerprint that the current method computes for an error message of an application's
// job.
func currentFingerprint(message string) string {
	return strategy.Fingerprint(&strategy.Failure{Message: message})
}

// failAs makes a job of a queue fail with a message, and files it into the group with a fingerprint.
func (b *bundle) failAs(queue, fingerprint, message string, at time.Time) (id string) {
	b.Helper()
	b.jobs++
	kind := fmt.Sprint("m", b.jobs)
	b.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, state)
		VALUES ($2, '{}', $1, 5, 5, 'running')`, queue, kind)
	b.exec(`UPDATE river_job SET state = 'discarded', finalized_at = $2,
		errors = ARRAY[jsonb_build_object('error', $3::text, 'attempt', attempt)] WHERE kind = $1`, kind, at, message)
	b.exec(`SELECT dlq.file_as(ARRAY(SELECT id FROM dlq.dead_letter_queue WHERE kind = $1), 'worker:1', NULL,
		'{dlq_manual}', '{manual}', '{outage}', '{r}', ARRAY[$2])`, kind, fingerprint)
	return b.text(`SELECT id FROM dlq.dead_letter_queue WHERE kind = $1`, kind)
}

func (b *bundle) regrouper() *group.Regrouper {
	return &group.Regrouper{Store: b.store, Logger: slog.New(slog.DiscardHandler), Actor: "worker:1"}
}

// regroup moves entries until none can be moved.
func (b *bundle) regroup() {
	b.Helper()
	b.refresh()
	r := b.regrouper()
	for {
		wait, err := r.Once(b.Context())
		require.NoError(b, err)
		if wait == 0 {
			break
		}
	}
	b.refresh()
}

// requireConsistent compares the rollups of groups with the entries, and then with rollups rebuilt from the audit
// trail.
func (b *bundle) requireConsistent() {
	b.Helper()
	require.Empty(b, b.text(`SELECT string_agg(d::text, ', ') FROM (
		SELECT e.queue, coalesce(a.fingerprint, e.fingerprint), count(*) FROM dlq.dead_letter_open e
		LEFT JOIN dlq.group_aliases a ON a.main AND a.queue = e.queue AND a.former = e.fingerprint GROUP BY 1, 2
		EXCEPT SELECT queue, fingerprint, open FROM dlq.failure_groups) d`), "uncounted open entries")
	require.Equal(b, b.text("SELECT count(*) FROM dlq.dead_letter_open"),
		b.text("SELECT coalesce(sum(open), 0) FROM dlq.failure_groups"))
	rollups := func() string {
		return b.text(`SELECT string_agg(line, E'\n' ORDER BY line) FROM (
			SELECT to_jsonb(r)::text FROM dlq.rollup_groups r
			UNION ALL
			SELECT concat_ws(' ', 'group', queue, fingerprint, failures, open, first_seen, last_seen)
			FROM dlq.failure_groups g
			WHERE NOT EXISTS (SELECT FROM dlq.group_aliases a WHERE a.queue = g.queue AND a.former = g.fingerprint)) l (line)`)
	}
	before := rollups()
	b.exec("SELECT dlq.rebuild_rollups()")
	require.Equal(b, before, rollups(), "after a rebuild")
}

func (b *bundle) groups() []group.Group {
	b.Helper()
	all, _, err := b.store.List(b.Context(), group.Filter{Order: "latest", Over: 24 * time.Hour, Limit: 200})
	require.NoError(b, err)
	return all
}

// A former group corresponds to exactly one new group, which inherits everything that is known of the former one.
func TestRegroup_KeepsStateOfFormerGroup(t *testing.T) {
	t.Parallel()
	b := setup(t)
	seen := time.Now().Add(-50 * time.Hour).Truncate(time.Millisecond)
	states := []string{"open", "fixed", "regressed", "muted"}
	for i, state := range states {
		b.failAs("payments", formerFingerprint(i), "lost "+state, seen)
		closed := b.failAs("payments", formerFingerprint(i), "lost "+state, seen.Add(time.Hour))
		b.exec("SELECT dlq.resolve($1, 'kim', 'done')", closed)
		b.refresh()
		b.set("payments", formerFingerprint(i), group.Change{Owner: new("anna" + state), Note: new("note of " + state)})
		switch state {
		case "fixed", "regressed":
			b.set("payments", formerFingerprint(i), group.Change{Status: group.Fixed})
		case "muted":
			until := time.Now().Add(time.Hour)
			change := group.Change{Status: group.Muted, MuteFailures: new(int64(5)), MuteUntil: &until}
			b.set("payments", formerFingerprint(i), change)
		}
	}
	b.failAs("payments", formerFingerprint(2), "lost regressed", time.Now())
	before := map[string]*group.Group{}
	for i, state := range states {
		before[state] = b.get("payments", formerFingerprint(i))
		require.Equal(t, state, before[state].Status)
	}
	changed := b.text("SELECT max(updated_at) FROM dlq.dead_letter_open")
	trail := b.text("SELECT count(*) FROM dlq.dead_letter_transitions")

	b.regroup()
	require.Equal(t, changed, b.text("SELECT max(updated_at) FROM dlq.dead_letter_open"))
	require.Equal(t, trail, b.text("SELECT count(*) FROM dlq.dead_letter_transitions"), "regrouping is not a move")
	require.Equal(t, "5", b.text("SELECT count(*) FROM dlq.dead_letter_open WHERE length(fingerprint) = 20"))
	const ofMethod1 = "SELECT count(*) FROM dlq.dead_letter_queue WHERE length(fingerprint) = 16"
	require.Equal(t, "4", b.text(ofMethod1), "closed entries")
	require.Len(t, b.groups(), len(states))
	for i, state := range states {
		g := b.get("payments", formerFingerprint(i)) // a link from before the regrouping
		was := *before[state]
		require.Equal(t, currentFingerprint("lost "+state), g.Fingerprint)
		was.Fingerprint, was.Sample, g.Sample = g.Fingerprint, nil, nil
		require.Equal(t, &was, g)
		for _, name := range []string{formerFingerprint(i), currentFingerprint("lost " + state)} {
			entries := map[bool]int{true: 3, false: 2}[state == "regressed"]
			require.Equal(t, strconv.Itoa(entries), b.text(find, name), "either name finds open and closed entries")
			latest, _, err := b.store.Latest(t.Context(), g, 20)
			require.NoError(t, err)
			require.Len(t, latest, entries)
		}
	}
	require.Equal(t, "9", b.text(`SELECT count(*) FROM dlq.find_ids(
		jsonb_build_object('fingerprint', $1::text, 'queue', 'payments'),
			100)`, formerFingerprint(0)[:10]), "a prefix finds them")
	require.Equal(t, "2", b.text(find, currentFingerprint("lost open")[:16]), "a prefix may have 16 digits")
	marks, err := b.store.Marks(t.Context(), []group.Key{
		{Queue: "payments", Fingerprint: currentFingerprint("lost muted")},
		{Queue: "payments", Fingerprint: formerFingerprint(3)},
	})
	require.NoError(t, err)
	for _, mark := range marks {
		require.Equal(t, group.Mark{Owner: "annamuted", Muted: true}, mark)
	}
	require.Len(t, marks, 2)
	muted, err := b.store.MutedEntries(t.Context())
	require.NoError(t, err)
	require.EqualValues(t, 1, muted)
	b.failAs("payments", currentFingerprint("lost open"), "lost open", time.Now())
	require.Equal(t, "annaopen", b.text("SELECT assigned_to FROM dlq.dead_letter_open ORDER BY id DESC LIMIT 1"))
	require.Equal(t, "goes on with a former group", b.text(
		"SELECT act FROM dlq.acts WHERE subject = $1 AND origin IS NULL", "group payments "+currentFingerprint("lost muted")))

	// A change under a former fingerprint applies to the new group. A process that knows only the former fingerprint also
	// sees the change.
	b.set("payments", formerFingerprint(3), group.Change{Status: group.Open, Owner: new("bert")})
	require.Equal(t, group.Open, b.get("payments", currentFingerprint("lost muted")).Status)
	marks, err = b.store.Marks(t.Context(), []group.Key{{Queue: "payments", Fingerprint: formerFingerprint(3)}})
	require.NoError(t, err)
	require.Equal(t, group.Mark{Owner: "bert"}, marks[group.Key{Queue: "payments", Fingerprint: formerFingerprint(3)}])
	b.requireConsistent()
	b.exec("SELECT dlq.trim_rollups()")
	require.Equal(t, group.Fixed, b.get("payments", formerFingerprint(1)).Status)
}

// Regrouping, like filing, reads both ends of a long trace: Python prints the failing frame last.
func TestRegroup_ReadsBothEndsOfTrace(t *testing.T) {
	t.Parallel()
	b := setup(t)
	trace := "Traceback (most recent call last):\n" +
		strings.Repeat("  File \"/venv/lib/python3.12/site-packages/x/y.py\", line 1, in go\n    x\n", 400) +
		"  File \"/app/shop/prices.py\", line 7, in find\n    x\nKeyError: 'x'\n"
	id := b.failAs("payments", formerFingerprint(1), "lost", time.Now())
	b.exec("UPDATE dlq.dead_letter_queue SET error_stack_trace = $2 WHERE id = $1", id, trace)
	b.regroup()
	filed := strategy.Fingerprint(&strategy.Failure{Message: "lost", Trace: b.text("SELECT dlq.trace_ends($1)", trace)})
	require.Equal(t, filed, b.text("SELECT fingerprint FROM dlq.dead_letter_open"))
}

// A new group always inherits owner and note. If groups are split or joined, it does not inherit a mute or a mark as
// fixed.
func TestRegroup_SplitsAndJoins(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := time.Now().Add(-30 * time.Hour)
	for i := range 3 { // one muted group had two causes
		b.failAs("payments", formerFingerprint(1), "card declined", at)
		if i < 2 {
			b.failAs("payments", formerFingerprint(1), "no funds", at.Add(time.Hour))
		}
	}
	b.failAs("payments", formerFingerprint(2), "lost", at) // two groups had one cause; one of them is fixed
	b.failAs("payments", formerFingerprint(3), "lost", at.Add(-time.Hour))
	b.refresh()
	until := time.Now().Add(time.Hour)
	b.set("payments", formerFingerprint(1), group.Change{
		Owner: new("anna"), Note: new("the bank"), Status: group.Muted, MuteUntil: &until,
	})
	b.set("payments", formerFingerprint(2), group.Change{Owner: new("bert"), Status: group.Fixed})
	b.set("payments", formerFingerprint(3), group.Change{Note: new("seldom")})
	first := map[int]time.Time{}
	for i := 1; i <= 3; i++ {
		first[i] = b.get("payments", formerFingerprint(i)).FirstSeen
	}

	b.regroup()
	require.Len(t, b.groups(), 3)
	for message, open := range map[string]int64{"card declined": 3, "no funds": 2} {
		g := b.get("payments", currentFingerprint(message))
		require.Equal(t, group.Open, g.Status)
		require.Equal(t, "anna", *g.Owner)
		require.Equal(t, "the bank\nwas part of "+formerFingerprint(1)+", muted by kim", *g.Note)
		require.Equal(t, open, g.Open)
		require.GreaterOrEqual(t, g.Failures, g.Open)
		require.Equal(t, first[1], g.FirstSeen, "the group keeps its first failure")
		require.Equal(t, message, *g.Title)
		require.WithinDuration(t, at, g.LastSeen, 2*time.Hour, "the group keeps its latest failure")
	}
	g := b.get("payments", currentFingerprint("lost"))
	require.Equal(t, group.Open, g.Status)
	require.Equal(t, "bert", *g.Owner)
	require.Contains(t, *g.Note, "was part of "+formerFingerprint(2)+", marked as fixed by kim")
	require.Contains(t, *g.Note, "seldom")
	require.EqualValues(t, 2, g.Failures)
	require.Equal(t, first[3], g.FirstSeen)
	require.Equal(t, "5", b.text(find, formerFingerprint(1)), "the former fingerprint finds both parts")
	require.Equal(t, "0", b.text("SELECT dlq.muted_entries()"))
	b.requireConsistent()

	// A group that is found later joins a group that inherited a mute. The mute ends, unless an operator has muted the
	// new group since.
	for i, message := range []string{"slow", "gone"} {
		b.failAs("mails", formerFingerprint(10+i), message, at)
		b.refresh()
		b.set("mails", formerFingerprint(10+i), group.Change{Status: group.Muted, MuteUntil: &until})
		b.regroup()
		require.Equal(t, group.Muted, b.get("mails", currentFingerprint(message)).Status)
		if message == "gone" {
			b.set("mails", currentFingerprint(message), group.Change{Status: group.Muted, MuteUntil: &until})
		}
		b.failAs("mails", formerFingerprint(20+i), message, at)
		b.regroup()
	}
	g = b.get("mails", currentFingerprint("slow"))
	require.Equal(t, group.Open, g.Status)
	require.Equal(t, "was part of "+formerFingerprint(10)+", muted by kim", *g.Note)
	require.Equal(t, group.Muted, b.get("mails", currentFingerprint("gone")).Status)
	b.requireConsistent()
}

// A group without open entries gets the fingerprint of its last entries. A group whose entries are deleted stays
// unchanged.
func TestRegroup_KeepsStateOfClosedGroups(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := time.Now().Add(-time.Hour)
	for i, message := range []string{"lost", "slow", "gone"} {
		id := b.failAs("payments", formerFingerprint(i), message, at)
		b.refresh()
		b.set("payments", formerFingerprint(i), group.Change{Status: group.Fixed, Owner: new("anna")})
		b.exec("SELECT dlq.resolve($1, 'kim', 'done')", id)
		if message == "gone" {
			b.exec("SELECT dlq.delete_entries(ARRAY[$1::uuid])", id)
		}
	}
	b.refresh()
	require.NoError(t, b.regrouper().AliasMarked(t.Context()))
	b.failAs("payments", currentFingerprint("lost"), "lost", time.Now()) // the first failure that a new process files
	g := b.get("payments", currentFingerprint("lost"))
	require.Equal(t, group.Regressed, g.Status, "the failure is newer than the mark")
	require.EqualValues(t, 2, g.Failures)
	require.Equal(t, "anna", b.text("SELECT assigned_to FROM dlq.dead_letter_open"))
	require.Equal(t, group.Fixed, b.get("payments", currentFingerprint("slow")).Status)
	b.regroup()
	require.Equal(t, formerFingerprint(2), b.get("payments", formerFingerprint(2)).Fingerprint)
	b.requireConsistent()
}

// A process of an earlier version files and decides entries while a new one runs. Lists show a single group with a
// stable state.
func TestRegroup_WorksBesideEarlierVersion(t *testing.T) {
	t.Parallel()
	b := setup(t)
	at := time.Now().Add(-time.Hour)
	b.failAs("payments", formerFingerprint(1), "lost", at)
	b.refresh()
	until := time.Now().Add(time.Hour)
	b.set("payments", formerFingerprint(1), group.Change{Status: group.Muted, MuteUntil: &until, Owner: new("anna")})
	b.regroup()
	for i := range 6 {
		as := formerFingerprint(1)
		if i%2 == 0 {
			as = currentFingerprint("lost")
		}
		b.failAs("payments", as, "lost", at.Add(time.Minute))
		b.refresh()
		all := b.groups()
		require.Len(t, all, 1)
		require.Equal(t, currentFingerprint("lost"), all[0].Fingerprint)
		require.Equal(t, group.Muted, all[0].Status)
		require.EqualValues(t, i+2, all[0].Open)
		require.EqualValues(t, i+2, all[0].Failures)
		muted, err := b.store.MutedEntries(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, i+2, muted)
		if i == 3 {
			b.regroup()
		}
	}
	// A reclassification by the earlier version sets the former fingerprints again. The entries are moved again, and the
	// group stays unchanged.
	b.exec(`UPDATE dlq.dead_letter_queue SET fingerprint = $1, move = '{"actor": "worker:1", "reason": "reclassified"}'
		WHERE status = 'dlq_manual' AND length(fingerprint) = 20`, formerFingerprint(1))
	b.refresh()
	require.EqualValues(t, 7, b.groups()[0].Open)
	b.regroup()
	require.EqualValues(t, 7, b.groups()[0].Open)
	require.Equal(t, "0", b.text("SELECT count(*) FROM dlq.dead_letter_open WHERE length(fingerprint) = 16"))
	require.Equal(t, "7", b.text("SELECT count(*) FROM dlq.dead_letter_open WHERE assigned_to = 'anna'"))
	b.requireConsistent()
}

// Entries of the group "other", which collects entries beyond the maximum number of groups, move to their new groups.
func TestRegroup_MovesEntriesFromOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	b.exec(`INSERT INTO dlq.failure_groups (queue, fingerprint, first_seen, last_seen)
		SELECT 'payments', 'full' || lpad(i::text, 16, '0'), now(), now() FROM generate_series(1, 10000) i`)
	for i := range 4 {
		b.failAs("payments", formerFingerprint(i), "lost", time.Now())
	}
	b.refresh()
	require.Equal(t, "4", b.text("SELECT open FROM dlq.failure_groups WHERE fingerprint = 'other'"))
	b.regroup()
	const ofMethod1 = "SELECT count(*) FROM dlq.dead_letter_open WHERE length(fingerprint) = 16"
	require.Equal(t, "4", b.text(ofMethod1), "entries stay until the rollups have counted them")
	b.exec("UPDATE dlq.dead_letter_open SET updated_at = now() - interval '1 hour'")
	b.exec("DELETE FROM dlq.failure_groups WHERE fingerprint LIKE 'full%'")
	b.regroup()
	require.Equal(t, "0", b.text("SELECT open FROM dlq.failure_groups WHERE fingerprint = 'other'"))
	require.EqualValues(t, 4, b.get("payments", currentFingerprint("lost")).Open)
	require.Equal(t, "0", b.text("SELECT count(*) FROM dlq.group_aliases"))
}

// An entry that failed again after it was read is not moved to the group of its earlier error.
func TestRegroup_SkipsEntriesThatFailedAgain(t *testing.T) {
	t.Parallel()
	b := setup(t)
	id := b.failAs("payments", formerFingerprint(1), "lost", time.Now())
	b.exec("UPDATE dlq.dead_letter_open SET updated_at = now() - interval '1 hour'")
	b.refresh()
	regroup := func(read string) string {
		return b.text(`SELECT dlq.regroup(ARRAY[$1::uuid], ARRAY[$2], ARRAY[$3],
			ARRAY[last_failed_at - $4::interval], 'worker:1') FROM dlq.dead_letter_open`,
			id, formerFingerprint(1), currentFingerprint("lost"), read)
	}
	require.Equal(t, "0", regroup("1 second"))
	require.Equal(t, formerFingerprint(1), b.text("SELECT fingerprint FROM dlq.dead_letter_open"))
	require.Equal(t, "1", regroup("0"))
}

// If another session holds an entry, the batch does not wait for the entry. The next turn moves it.
func TestRegroup_SkipsLockedEntries(t *testing.T) {
	t.Parallel()
	b := setup(t)
	ids := []string{}
	for range 2 {
		ids = append(ids, b.failAs("payments", formerFingerprint(1), "lost", time.Now()))
	}
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.WithoutCancel(t.Context())) }()
	_, err = tx.Exec(t.Context(), "SELECT FROM dlq.dead_letter_open WHERE id = $1 FOR UPDATE", ids[0])
	require.NoError(t, err)
	b.regroup()
	require.Equal(t, formerFingerprint(1), b.text("SELECT fingerprint FROM dlq.dead_letter_open WHERE id = $1", ids[0]))
	require.Equal(t, currentFingerprint("lost"),
		b.text("SELECT fingerprint FROM dlq.dead_letter_open WHERE id = $1", ids[1]))
	require.EqualValues(t, 2, b.get("payments", formerFingerprint(1)).Open)
	require.NoError(t, tx.Rollback(t.Context()))
	b.regroup()
	b.requireConsistent()
}

// Processes of both methods file, decide, close and reopen entries at random, some in transactions that stay open.
// Meanwhile aliases are recorded, entries are moved and rollups are refreshed. In the end, the rollups match the
// entries.
func TestRegroup_KeepsCountsConsistent(t *testing.T) {
	t.Parallel()
	steps := strings.Fields("fail fail fail close reopen judge commit regroup regroup refresh refresh")
	for seed := range uint64(8) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			t.Parallel()
			b := setup(t)
			random := rand.New(rand.NewPCG(seed, 1))
			r := b.regrouper()
			var late pgx.Tx
			commit := func() {
				if late != nil {
					require.NoError(t, late.Commit(t.Context()))
				}
				late = nil
			}
			entry := func(status string) string {
				return b.text(`SELECT id FROM dlq.dead_letter_queue
					WHERE stage <> 'inbox' AND status = $1::text::dlq.dead_letter_status
					ORDER BY md5(id::text || $2) LIMIT 1`, status, strconv.Itoa(random.IntN(100)))
			}
			for range 40 {
				message := []string{"card declined", "no funds", "lost"}[random.IntN(3)]
				as := currentFingerprint(message)
				if random.IntN(2) == 0 {
					as = formerFingerprint(random.IntN(3))
				}
				step := steps[random.IntN(len(steps))]
				t.Log(step, message, as)
				switch step {
				case "fail":
					b.failAs("payments", as, message, time.Now().Add(-time.Duration(random.IntN(100))*time.Hour))
				case "close":
					if id := entry("dlq_manual"); id != "" {
						commit()
						b.exec("SELECT dlq.resolve($1, 'kim', 'done')", id)
					}
				case "reopen":
					if id := entry("dlq_resolved"); id != "" {
						b.exec("SELECT dlq.reopen($1, 'kim', 'again')", id)
					}
				case "judge":
					if id := entry("dlq_manual"); id != "" {
						commit()
						var err error
						late, err = b.pool.Begin(t.Context())
						require.NoError(t, err)
						_, err = late.Exec(t.Context(), `UPDATE dlq.dead_letter_queue SET fingerprint = $2,
							move = '{"actor": "worker:1", "reason": "reclassified"}' WHERE id = $1`, id, as)
						require.NoError(t, err)
					}
				case "commit":
					commit()
				case "regroup":
					_, err := r.Once(t.Context())
					require.NoError(t, err)
				case "refresh":
					b.refresh()
				}
			}
			commit()
			for range 2 { // the second refresh counts the aliases that the first turn recorded
				b.regroup()
			}
			require.Equal(t, "0", b.text("SELECT count(*) FROM dlq.dead_letter_open WHERE length(fingerprint) = 16"))
			b.requireConsistent()
			for _, g := range b.groups() {
				// No entry of the group exists from which its new fingerprint could be derived.
				if strategy.MethodOf(g.Fingerprint) != strategy.GroupingMethod {
					const entries = "SELECT count(*) FROM dlq.dead_letter_queue WHERE fingerprint = $1"
					require.Equal(t, "0", b.text(entries, g.Fingerprint), g)
				}
			}
		})
	}
}
