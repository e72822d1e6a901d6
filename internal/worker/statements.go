package worker

import "github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"

// Statements whose cost must not grow with the number of dead letters. Tests read their plans with EXPLAIN.
// Beside each stand its parameters.
const (
	ClaimSQL         = dbsqlc.ClaimDue      // read messages, now or null, entries
	WaitingQueuesSQL = dbsqlc.WaitingQueues // none
	ClaimWaitingSQL  = dbsqlc.ClaimWaiting  // kinds, classes, rules, queue, entries
	StuckGroupsSQL   = dbsqlc.StuckGroups   // groups
	GroupFailuresSQL = dbsqlc.GroupFailures // queue, fingerprint, first id
	ClaimStuckSQL    = dbsqlc.ClaimStuck    // queue, fingerprint, before, classes, after, entries
)
