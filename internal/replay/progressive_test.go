package replay

import (
	"math"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

func TestTally_TellsFixedFromBroken(t *testing.T) {
	t.Parallel()
	require.InDelta(t, 0.64, successWeight, 0.005)
	require.InDelta(t, -2.30, failureWeight, 0.005)
	require.InDelta(t, 2.94, fixedBound, 0.005)
	for _, test := range []struct {
		succeeded, failed int64
		want              string
	}{
		{5, 0, "fixed"},
		{4, 0, ""},
		{9, 1, "fixed"},
		{8, 1, ""},
		{0, 2, "broken"},
		{0, 1, ""},
		{2, 2, "broken"},
		{3, 2, ""},
		{4, 1, ""},
	} {
		evidence, got := tally{test.succeeded, test.failed}.evidence(), ""
		switch {
		case evidence >= fixedBound:
			got = "fixed"
		case evidence <= brokenBound:
			got = "broken"
		}
		require.Equal(t, test.want, got, "%d of %d recovered", test.succeeded, test.succeeded+test.failed)
	}
}

func TestTally_UpperBoundIsExact(t *testing.T) {
	t.Parallel()
	require.InDelta(t, 1, tally{7, 0}.upperBound(), 0)
	require.InDelta(t, 1-math.Pow(0.05, 0.1), tally{0, 10}.upperBound(), 1e-9)
	require.InDelta(t, math.Pow(0.95, 0.1), tally{9, 1}.upperBound(), 1e-9)
	require.InDelta(t, 0.7776, tally{5, 5}.upperBound(), 1e-4, "tables of Clopper and Pearson, 90 %, two-sided")
	for _, of := range []tally{{90, 10}, {91, 9}, {900, 100}, {3, 47}} {
		// If this were the true share, the probability of so few successes would be testError.
		share, sum := of.upperBound(), 0.0
		for k := range of.succeeded + 1 {
			all, _ := math.Lgamma(float64(of.of() + 1))
			some, _ := math.Lgamma(float64(k + 1))
			others, _ := math.Lgamma(float64(of.of() - k + 1))
			sum += math.Exp(all - some - others + float64(k)*math.Log(share) + float64(of.of()-k)*math.Log(1-share))
		}
		require.InDelta(t, testError, sum, 1e-9, "%d of %d", of.succeeded, of.of())
	}
	require.Less(t, tally{90, 10}.upperBound(), fixedShare)
	require.Greater(t, tally{91, 9}.upperBound(), fixedShare)
}

func TestGroup_Decides(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		group    dbsqlc.RunGroupsRow
		outcomes string // s: succeeded, f: failed as before, n: failed in a new way, k: skipped, l: lost with its process
		unmet    string
		quiet    time.Duration
		move     string
		reason   string
	}{
		"goes on after 5 of 5": {
			dbsqlc.RunGroupsRow{Quota: 5, Entries: 100, Sent: 5},
			"sssss", "", 0, moveNext,
			"goes on after the canary: 5 of 5 recovered, evidence +3.21, at least +2.94",
		},
		"goes on after 9 of 10": {
			dbsqlc.RunGroupsRow{Step: 1, Quota: 10, Entries: 100, Sent: 10},
			"ssssfsssss", "", 0, moveNext,
			"goes on after the step to 10 %: 9 of 10 recovered, evidence +3.47, at least +2.94",
		},
		"is undecided after 4 of 5": {
			dbsqlc.RunGroupsRow{Quota: 5, Entries: 100, Sent: 5},
			"ssfss", "", 0, moveHold,
			"held at the end of the canary: 4 of 5 recovered, evidence +0.26, between -2.94 and +2.94: undecided",
		},
		"stops when its first two fail": {
			dbsqlc.RunGroupsRow{Quota: 5, Entries: 100, Sent: 5},
			"ff", "", 0, moveStop,
			"stopped in the canary: 2 of 2 failed again, evidence -4.61 is below -2.94: its cause is not fixed",
		},
		"stops although later outcomes succeed": {
			dbsqlc.RunGroupsRow{Quota: 5, Entries: 100, Sent: 5}, "ffsss", "", 0, moveStop, "stopped in the canary",
		},
		"waits for outcomes": {dbsqlc.RunGroupsRow{Quota: 5, Entries: 100, Sent: 5}, "ssss", "", time.Minute, "", ""},
		"is held by the deadline, and never passes": {
			dbsqlc.RunGroupsRow{Quota: 5, Entries: 100, Sent: 5},
			"", "", time.Hour, moveHold,
			"held in the canary: no outcome for 15m0s, although 5 of 5 sent are under way",
		},
		"is held with most outcomes there": {
			dbsqlc.RunGroupsRow{Step: 1, Quota: 10, Entries: 100, Sent: 10, Succeeded: 9},
			"", "", time.Hour, moveHold,
			"held in the step to 10 %: no outcome for 15m0s, although 1 of 10 sent are under way",
		},
		"is held by a new failure": {
			dbsqlc.RunGroupsRow{Step: 2, Quota: 50, Entries: 100, Sent: 50, Succeeded: 40},
			"snn", "", 0, moveHold,
			"held in the step to 50 %: 2 of 43 failed in a new way: failure group new, class outage",
		},
		"is not held by a new failure if its entries had no failure group": {
			dbsqlc.RunGroupsRow{Queue: "a", Step: 2, Quota: 50, Entries: 100, Sent: 50, Succeeded: 40},
			"sns", "", 0, "", "",
		},
		"is held by a new failure if its entries had one": {
			dbsqlc.RunGroupsRow{Queue: "a", Fingerprint: "old", Step: 2, Quota: 50, Entries: 100, Sent: 50, Succeeded: 40},
			"sns", "", 0, moveHold, "1 of 43 failed in a new way",
		},
		"is held by the exact bound from 100 on": {
			dbsqlc.RunGroupsRow{Step: 3, Quota: 1000, Entries: 1000, Sent: 300, Succeeded: 90, Failed: 9},
			"f", "", 0,
			moveHold,
			"held in the step to 100 %: 90 of 100 recovered, a share of at most 94.5 %, below the 95 % of a fixed cause",
		},
		"is not held by the exact bound before": {
			dbsqlc.RunGroupsRow{Step: 3, Quota: 1000, Entries: 1000, Sent: 300, Succeeded: 89, Failed: 9}, "f", "", 0, "", "",
		},
		"is held by a breaker": {
			dbsqlc.RunGroupsRow{Step: 1, Quota: 10, Entries: 100, Sent: 7, Succeeded: 5},
			"s", "breaker x is open", 0, moveHold,
			"held in the step to 10 %: breaker x is open",
		},
		"counts from when an operator let it go on": {
			dbsqlc.RunGroupsRow{
				Step: 1, Quota: 15, Entries: 100, Sent: 15, Succeeded: 3, Failed: 2, FromSucceeded: 3, FromFailed: 2,
			}, "ssssssssss", "", 0, moveNext, "10 of 10 recovered",
		},
		"is done when nothing is left": {
			dbsqlc.RunGroupsRow{Quota: 3, Entries: 4, Sent: 3},
			"ksfn", "", 0, moveDone,
			"done: of 3 sent, 1 recovered and 2 failed again; 1 were skipped",
		},
		"ignores what was lost with its process": {
			dbsqlc.RunGroupsRow{Quota: 7, Entries: 100, Sent: 7},
			"lsslsss", "", 0, moveNext, "goes on after the canary: 5 of 5 recovered",
		},
		"counts what was lost as ended": {
			dbsqlc.RunGroupsRow{Quota: 3, Entries: 3, Sent: 3}, "lss", "", 0, moveDone, "2 recovered and 1 failed again",
		},
		"waits while its last are under way": {
			dbsqlc.RunGroupsRow{Quota: 3, Entries: 3, Sent: 3}, "ff", "", time.Hour, "", "",
		},
		"sends the rest of its step": {dbsqlc.RunGroupsRow{Quota: 10, Entries: 100, Sent: 5}, "sssss", "", 0, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := group{RunGroupsRow: test.group}
			g.State, g.Quiet = groupGoing, test.quiet.Seconds()
			for _, o := range test.outcomes {
				row := &dbsqlc.TakeOutcomesRow{Outcome: "succeeded"}
				switch o {
				case 'f':
					row.Outcome, row.Fingerprint = "failed", "old"
				case 'n':
					row.Outcome, row.Fingerprint, row.ErrorClass = "failed", "new", "outage"
				case 'k':
					row.Outcome = "skipped"
				case 'l':
					row.Outcome, row.ErrorClass = "lost", "business"
				}
				g.count(row, func(fingerprint string) bool { return fingerprint == "old" })
			}
			move, reason := g.decide(test.quiet, DefaultStepDeadline, test.unmet)
			require.Equal(t, test.move, move, reason)
			require.Contains(t, reason, test.reason)
			g.State = groupHeld
			move, _ = g.decide(test.quiet, DefaultStepDeadline, test.unmet)
			require.Empty(t, move, "an operator decides")
		})
	}
}

// Time in which no process of dlqd ran does not count as time without outcomes.
func TestGroup_CountsSilenceWhileWatched(t *testing.T) {
	t.Parallel()
	r, id, now := &Runner{watched: map[uuid.UUID]watched{}}, uuid.New(), time.Now()
	g := group{RunGroupsRow: dbsqlc.RunGroupsRow{Quota: 5, Entries: 100, Sent: 5, State: groupGoing, Quiet: 3600}}
	decide := func(after time.Duration) string {
		move, _ := g.decide(r.watch(id, now.Add(after)), DefaultStepDeadline, "")
		return move
	}
	require.Empty(t, decide(0), "the process has just begun")
	for after := time.Second; after <= DefaultStepDeadline; after += time.Second {
		require.Empty(t, decide(after))
	}
	require.Equal(t, moveHold, decide(DefaultStepDeadline+time.Second))
	require.Empty(t, decide(2*DefaultStepDeadline), "it was away")
}

func TestMostHeld_StopsWhenMostIsHeld(t *testing.T) {
	t.Parallel()
	of := func(state string, entries, sent int64) group {
		return group{RunGroupsRow: dbsqlc.RunGroupsRow{State: state, Entries: entries, Sent: sent}}
	}
	require.Empty(t, mostHeld([]group{of(groupGoing, 100, 5), of(groupHeld, 100, 5)}), "half is not most")
	require.Equal(t, "100 of the 195 dead letters that are left are in 2 groups that are held or stopped",
		mostHeld([]group{of(groupGoing, 100, 5), of(groupHeld, 55, 5), of(groupStopped, 55, 5), of(groupDone, 500, 500)}))
	require.Empty(t, mostHeld([]group{of(groupDone, 100, 100)}))
	require.Contains(t, mostHeld([]group{of(groupDone, 100, 100), of(groupHeld, 6, 5)}), "are in 1 group that is held")
}
