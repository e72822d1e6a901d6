package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

// What comes of a batch is gathered in rows, and written in one statement for each kind: db/queries/worker.sql reads the
// rows as JSON.

// decision is what happens to an entry that was just judged.
type decision struct {
	ID          uuid.UUID         `json:"id"`
	Status      deadletter.Status `json:"status"`
	Strategy    string            `json:"strategy"`
	Class       string            `json:"error_class"`
	Rule        string            `json:"rule"`
	Fingerprint string            `json:"fingerprint"`
	Next        time.Time         `json:"next_retry_at"`
	WaitingFor  string            `json:"waiting_for"`
	MaxRetries  int               `json:"max_retries"` // 0: as many as before
	Priority    int               `json:"priority"`    // 0: the same
	Tags        []string          `json:"tags,omitempty"`
	Assignee    string            `json:"assignee"`
	Reason      string            `json:"reason"`
}

// decisions are those of a batch.
type decisions []decision

// add gathers the decision on an entry, and returns what it comes to: "decided" or "parked".
func (d *decisions) add(id uuid.UUID, of *strategy.Decision) string {
	status, action := deadletter.Pending, "decided"
	if of.Strategy == strategy.Manual {
		status, action = deadletter.Manual, "parked"
	}
	*d = append(*d, decision{
		ID: id, Status: status, Strategy: of.Strategy, Class: string(of.Class), Rule: of.Rule, Fingerprint: of.Fingerprint, Next: of.Next,
		WaitingFor: of.WaitingFor, MaxRetries: of.MaxRetries, Priority: of.Priority, Tags: of.Tags, Assignee: of.Assignee, Reason: of.Reason,
	})
	return action
}

// write writes what was gathered, if anything.
func (d decisions) write(ctx context.Context, tx transaction, act deadletter.Act, configVersion string) error {
	if len(d) == 0 {
		return nil
	}
	rows, err := json.Marshal(d)
	if err != nil {
		return err
	}
	return tx.Decide(ctx, dbsqlc.DecideParams{Decisions: rows, Actor: act.Actor, Note: act.Note, ConfigVersion: configVersion})
}

// waiting is an entry that waits until a time, and for something else if that is not empty.
type waiting struct {
	ID         uuid.UUID `json:"id"`
	Until      time.Time `json:"next_retry_at"`
	WaitingFor string    `json:"waiting_for"`
	Reason     string    `json:"reason"`
}

// reserved is an entry that is a person's.
type reserved struct {
	ID     uuid.UUID `json:"id"`
	Rule   string    `json:"rule,omitempty"` // that says so, although its class does not
	Reason string    `json:"reason"`
}

// aside are decided entries that do not go now.
type aside struct {
	waiting  []waiting
	reserved []reserved
}

// wait has an entry wait until a time, and for something else if that is not empty.
func (a *aside) wait(id uuid.UUID, until time.Time, waitingFor, reason string) {
	a.waiting = append(a.waiting, waiting{id, until, waitingFor, reason})
}

// unlessOn puts an entry aside, unless it may go by itself: it is observed, or a person's. It reports whether it did.
func (a *aside) unlessOn(id uuid.UUID, next time.Time, v automatic.Verdict) bool {
	switch {
	case v.Reserved != "":
		a.reserved = append(a.reserved, reserved{id, v.Reserved, v.Reason})
	case !v.On:
		a.wait(id, next, strategy.WaitsForAutomatic, "observed: "+v.Reason)
	default:
		return false
	}
	return true
}

// write writes what was gathered, if anything.
func (a *aside) write(ctx context.Context, tx transaction, actor string, counts map[string]int) error {
	if n := len(a.waiting); n > 0 {
		rows, err := json.Marshal(a.waiting)
		if err != nil {
			return err
		}
		if err := tx.PutOff(ctx, dbsqlc.PutOffParams{Entries: rows, Actor: actor}); err != nil {
			return fmt.Errorf("put off: %w", err)
		}
		counts["put_off"] += n
	}
	if n := len(a.reserved); n > 0 {
		rows, err := json.Marshal(a.reserved)
		if err != nil {
			return err
		}
		if err := tx.Reserve(ctx, dbsqlc.ReserveParams{Entries: rows, Actor: actor}); err != nil {
			return fmt.Errorf("park: %w", err)
		}
		counts["parked"] += n
	}
	return nil
}

// park leaves entries to a person, each for its own reason.
func park(ctx context.Context, tx transaction, actor string, entries []reserved) error {
	if len(entries) == 0 {
		return nil
	}
	rows, err := json.Marshal(entries)
	if err != nil {
		return err
	}
	if err := tx.Park(ctx, dbsqlc.ParkParams{Entries: rows, Actor: actor}); err != nil {
		return fmt.Errorf("park: %w", err)
	}
	return nil
}
