package worker

import "github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"

// Statements whose cost must not grow with the number of dead letters: benchmarks read their plans with EXPLAIN. The
// comments list the parameters.
const (
	ClaimSQL         = dbsqlc.ClaimDue      // read_messages, now (null: the database's), max_entries
	WaitingQueuesSQL = dbsqlc.WaitingQueues // none
	ClaimWaitingSQL  = dbsqlc.ClaimWaiting  // kinds, error_classes, rules, queue, max_entries
	StuckGroupsSQL   = dbsqlc.StuckGroups   // most
	GroupFailuresSQL = dbsqlc.GroupFailures // queue, fingerprint, since
	ClaimStuckSQL    = dbsqlc.ClaimStuck    // queue, fingerprint, before, classes, after, most
)
