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

// The decisions of a batch are collected in rows and written by one statement per kind, with one
// array per column. A single array of JSON would take half as long again (docs/decisions.md).

// column returns one column of rows.
func column[R, V any](rows []R, of func(*R) V) []V {
	values := make([]V, len(rows))
	for i := range rows {
		values[i] = of(&rows[i])
	}
	return values
}

// decision is the decision on an entry that was just judged.
type decision struct {
	strategy.Decision

	row *dbsqlc.ClaimDueRow
}

// status returns the state that the entry gets.
func (d *decision) status() string {
	if d.Strategy == strategy.Manual {
		return string(deadletter.Manual)
	}
	return string(deadletter.Pending)
}

// tags returns the tags to add, as a JSON array.
func (d *decision) tags() json.RawMessage {
	tags, _ := json.Marshal(append([]string{}, d.Tags...)) //nolint:errchkjson // strings
	return tags
}

// decisions are the decisions of a batch.
type decisions []decision

// add adds the decision on an entry and returns its action: "decided" or "parked".
func (d *decisions) add(row *dbsqlc.ClaimDueRow, of *strategy.Decision) string {
	*d = append(*d, decision{*of, row})
	if of.Strategy == strategy.Manual {
		return "parked"
	}
	return "decided"
}

// write writes the decisions, if there are any.
func (d *decisions) write(ctx context.Context, tx transaction, act deadletter.Act, configVersion string) error {
	if len(*d) == 0 {
		return nil
	}
	c := d.columns()
	d.recordParked(&tx, c.Ids)
	return tx.move(ctx, act, c.Ids, c.Reasons, func() error {
		return tx.Decide(ctx, dbsqlc.DecideParams{
			Actor: act.Actor, Note: act.Note, ConfigVersion: configVersion, Ids: c.Ids,
			Statuses: c.Statuses, Strategies: c.Strategies, ErrorClasses: c.ErrorClasses,
			Rules: c.Rules, Fingerprints: c.Fingerprints, NextRetryAts: c.NextRetryAts,
			WaitingFors: c.WaitingFors, MaxRetries: c.MaxRetries,
			Priorities: c.Priorities, Tags: c.Tags, Assignees: c.Assignees, Reasons: c.Reasons,
		})
	})
}

// file files the entries and returns the ids of the filed ones. It leaves out entries whose jobs already have an open
// entry.
func (d *decisions) file(ctx context.Context, tx transaction, actor, configVersion string) ([]uuid.UUID, error) {
	params := d.columns()
	params.Actor, params.ConfigVersion = actor, configVersion
	filed, err := tx.FileDecided(ctx, params)
	d.recordParked(&tx, filed)
	return filed, err
}

// recordParked appends to tx.parked the moved entries that became manual and were not manual before.
func (d *decisions) recordParked(tx *transaction, moved []uuid.UUID) {
	isMoved := make(map[uuid.UUID]bool, len(moved))
	for _, id := range moved {
		isMoved[id] = true
	}
	for i := range *d {
		r := &(*d)[i]
		if r.Strategy == strategy.Manual && r.row.Strategy != strategy.Manual && isMoved[r.row.ID] {
			tx.addParked(Parked{r.row.ID, r.row.Queue, r.row.Kind, string(r.Class), r.Rule, r.Fingerprint})
		}
	}
}

// columns returns the decisions as one array per column.
func (d *decisions) columns() dbsqlc.FileDecidedParams {
	return dbsqlc.FileDecidedParams{
		Ids:          column(*d, func(r *decision) uuid.UUID { return r.row.ID }),
		Statuses:     column(*d, (*decision).status),
		Strategies:   column(*d, func(r *decision) string { return r.Strategy }),
		ErrorClasses: column(*d, func(r *decision) string { return string(r.Class) }),
		Rules:        column(*d, func(r *decision) string { return r.Rule }),
		Fingerprints: column(*d, func(r *decision) string { return r.Fingerprint }),
		NextRetryAts: column(*d, func(r *decision) time.Time { return r.Next }),
		WaitingFors:  column(*d, func(r *decision) string { return r.WaitingFor }),
		MaxRetries:   column(*d, func(r *decision) int32 { return int32(r.MaxRetries) }),
		Priorities:   column(*d, func(r *decision) int16 { return int16(r.Priority) }),
		Tags:         column(*d, (*decision).tags),
		Assignees:    column(*d, func(r *decision) string { return r.Assignee }),
		Reasons:      column(*d, func(r *decision) string { return r.Reason }),
	}
}

// waitingEntry is an entry that waits until a time and, if WaitingFor is not empty, also for that condition.
type waitingEntry struct {
	ID         uuid.UUID
	Until      time.Time
	WaitingFor string
	Reason     string
}

// manualEntry is an entry that needs manual handling.
type manualEntry struct {
	ID      uuid.UUID
	Rule    string // the rule of automatic redelivery that requires it; only for ParkByRule
	Reason  string
	Refusal string // database error; may contain personal data, so an erasure removes it
}

// deferred collects decided entries that are not redelivered now.
type deferred struct {
	waiting []waitingEntry
	manual  []manualEntry
}

// wait defers an entry until a time and, if waitingFor is not empty, also for that condition.
func (d *deferred) wait(id uuid.UUID, until time.Time, waitingFor, reason string) {
	d.waiting = append(d.waiting, waitingEntry{id, until, waitingFor, reason})
}

// deferUnlessAutomatic defers an entry if automatic redelivery is off for it. If a rule requires manual handling, the
// entry becomes manual; otherwise it is observed. It reports whether it deferred the entry.
func (d *deferred) deferUnlessAutomatic(id uuid.UUID, next time.Time, v automatic.Verdict) bool {
	switch {
	case v.ManualRule != "":
		d.manual = append(d.manual, manualEntry{ID: id, Rule: v.ManualRule, Reason: v.Reason})
	case !v.On:
		d.wait(id, next, strategy.WaitsForAutomatic, "observed: "+v.Reason)
	default:
		return false
	}
	return true
}

// write writes the collected entries, if there are any: it postpones those that wait, and parks those that need manual
// handling.
func (d *deferred) write(ctx context.Context, tx transaction, actor string, counts map[string]int) error {
	if n := len(d.waiting); n > 0 {
		params := dbsqlc.PostponeParams{
			Actor: actor, ConfigVersion: tx.version,
			Ids:          column(d.waiting, func(r *waitingEntry) uuid.UUID { return r.ID }),
			WaitingFors:  column(d.waiting, func(r *waitingEntry) string { return r.WaitingFor }),
			NextRetryAts: column(d.waiting, func(r *waitingEntry) time.Time { return r.Until }),
			Reasons:      column(d.waiting, func(r *waitingEntry) string { return r.Reason }),
		}
		if err := tx.move(ctx, deadletter.Act{Actor: actor}, params.Ids, params.Reasons, func() error {
			return tx.Postpone(ctx, params)
		}); err != nil {
			return fmt.Errorf("defer: %w", err)
		}
		counts["put_off"] += n
	}
	if n := len(d.manual); n > 0 {
		rows, err := tx.ParkByRule(ctx, dbsqlc.ParkByRuleParams{
			Actor: actor, ConfigVersion: tx.version,
			Ids:     column(d.manual, func(r *manualEntry) uuid.UUID { return r.ID }),
			Rules:   column(d.manual, func(r *manualEntry) string { return r.Rule }),
			Reasons: column(d.manual, func(r *manualEntry) string { return r.Reason }),
		})
		if err != nil {
			return fmt.Errorf("park: %w", err)
		}
		tx.addParked(column(rows, func(r *dbsqlc.ParkByRuleRow) Parked { return Parked(*r) })...)
		counts["parked"] += n
	}
	return nil
}

// park moves entries to manual. Each entry has its own reason.
func park(ctx context.Context, tx transaction, actor string, entries []manualEntry) error {
	if len(entries) == 0 {
		return nil
	}
	rows, err := tx.Park(ctx, dbsqlc.ParkParams{
		Actor: actor, ConfigVersion: tx.version,
		Ids:      column(entries, func(r *manualEntry) uuid.UUID { return r.ID }),
		Reasons:  column(entries, func(r *manualEntry) string { return r.Reason }),
		Refusals: column(entries, func(r *manualEntry) string { return r.Refusal }),
	})
	if err != nil {
		return fmt.Errorf("park: %w", err)
	}
	tx.addParked(column(rows, func(r *dbsqlc.ParkRow) Parked { return Parked(*r) })...)
	return nil
}
