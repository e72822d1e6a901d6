// Package automatic decides which dead letters dlqd redelivers automatically and which it only observes. The decision
// depends on the policy's switches, the operators' switches, and whether an application owns River.
package automatic

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/automatic/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Scopes of a switch: the entries to which it applies.
const (
	ScopeAll   = "all"
	ScopeQueue = "queue"
	ScopeKind  = "kind"
	ScopeClass = "class"
	// ScopeStop is the scope of the switch that stops all automatic redelivery.
	ScopeStop = "stop"
)

// nameRestored is the name of the stop that dlqd sets when it detects a restored database.
const nameRestored = "restored"

// Sources of a switch: where it was set.
const (
	FromDefault  = "default"
	FromPolicy   = "policy"
	FromOperator = "operator"
)

// CapturedByBackfill is the value of dead_letter_queue.captured_by for an entry whose job failed before capture was
// installed.
const CapturedByBackfill = "backfill"

// Switch is a switch in force.
type Switch struct {
	Scope   string     `json:"scope" enum:"all,queue,kind,class" doc:"What the switch applies to: all dead letters, a queue, a kind or a class."`
	Name    string     `json:"name,omitempty" doc:"Name of the queue or class, or pattern of the kind; absent for all." example:"mailers"`
	Enabled bool       `json:"enabled" doc:"Whether matching dead letters are redelivered automatically."`
	Include []string   `json:"include,omitempty" enum:"backfilled,single-attempt" doc:"Dead letters that the switch includes: without it, they need manual handling."`
	Source  string     `json:"source,omitempty" enum:"default,policy,operator" doc:"Where the switch is set."`
	At      *time.Time `json:"at,omitempty" doc:"When an operator set the switch."`
	Actor   string     `json:"actor,omitempty" doc:"Operator who set the switch."`
	Note    string     `json:"note,omitempty" doc:"Reason that the operator gave."`
}

// String returns the scope and the name, for example "queue mailers".
func (s *Switch) String() string { return strings.TrimSpace(s.Scope + " " + s.Name) }

// Stop is a stop of all automatic redelivery. An operator sets it, or dlqd does after it has detected a restored
// database.
type Stop struct {
	At    time.Time `json:"at" doc:"Time of the stop."`
	Actor string    `json:"actor" doc:"Who stopped automatic redelivery."`
	Note  string    `json:"note,omitempty" doc:"Reason of the stop."`
	// Restored is set if dlqd stopped automatic redelivery.
	Restored bool `json:"restored,omitempty" doc:"dlqd detected that the database was restored to an earlier time. Replay runs and messages from before are held too, until an operator resumes them (resume-restored)."`
	// ByPerson is set if an operator stopped automatic redelivery, possibly in addition to dlqd.
	ByPerson bool `json:"byPerson,omitempty" doc:"An operator stopped automatic redelivery, possibly in addition to dlqd. That stop stays after resume-restored, until resume-automatic."`
}

// String describes the stop in one line.
func (s *Stop) String() string {
	if s.Restored {
		text := "the database was restored: replay runs, redeliveries and messages from before are held since " +
			s.At.UTC().Format("2006-01-02 15:04 UTC") +
			" (" + s.Note + "); \"dlqd restored\" lists what may be sent twice, \"dlqd restored resume\" releases it"
		if s.ByPerson {
			text += "; an operator stopped all automatic redelivery too, and that stop stays"
		}
		return text
	}
	text := "all automatic redelivery was stopped by " + s.Actor + " at " + s.At.UTC().Format("2006-01-02 15:04 UTC")
	if s.Note != "" {
		text += " (" + s.Note + ")"
	}
	return text + "; resume it with: dlqd automatic resume"
}

// Switches are the switches in force.
type Switches struct {
	// Stopped is the stop in force, or nil if automatic redelivery is not stopped.
	Stopped *Stop
	// Attached is set if an application owns River. An entry of an application's job that no switch matches is then
	// observed.
	Attached bool
	list     []Switch // by scope and name
}

// Entry is the part of a dead letter on which switches depend.
type Entry struct {
	Queue, Kind, Class string
	JobKind            string // River's kind of the job
	Backfilled         bool   // the job failed before capture was installed
	SingleAttempt      bool   // the job was limited to one attempt
	Unparked           bool   // an operator unparked the entry
}

// Verdict is the decision of the switches on a dead letter.
type Verdict struct {
	On bool
	// ManualRule, if not empty, is the rule by which the entry needs manual handling:
	// policy.RuleBackfilled or policy.RuleSingleAttempt. On is then false.
	ManualRule string
	Reason     string
}

// TryLock keeps the switches unchanged until a transaction ends. Exception: a stop waits at most 5 s for the
// transaction; see [Change]. Transactions that redeliver automatically take this lock before they read the switches.
// TryLock returns false while a switch is being changed.
func TryLock(ctx context.Context, tx postgres.DB) (bool, error) {
	return dbsqlc.New(tx).TryLockAutomatic(ctx)
}

// CountObserved counts observed entries, up to most.
func CountObserved(ctx context.Context, db postgres.DB, most int32) (int64, error) {
	return dbsqlc.New(db).CountObservedUpTo(ctx, most)
}

// Read reads the switches in force.
func Read(ctx context.Context, db postgres.DB, p *policy.Policy) (*Switches, error) {
	rows, err := dbsqlc.New(db).AutomaticSwitches(ctx)
	if err != nil {
		return nil, fmt.Errorf("read the switches of automatic redelivery: %w", err)
	}
	return InForce(p, rows), nil
}

// InForce returns the switches of operators, and the switches of the policy that these do not override.
func InForce(p *policy.Policy, rows []dbsqlc.AutomaticSwitchesRow) *Switches {
	s := &Switches{}
	for i := range rows {
		row := &rows[i]
		s.Attached = row.Attached
		switch row.Scope {
		case "": // neither a switch nor a stop is set: the row only says whether River is attached
		case ScopeStop:
			byPerson := row.Name != nameRestored || s.Stopped != nil
			if s.Stopped == nil || row.Name == nameRestored {
				s.Stopped = &Stop{At: *row.At, Actor: row.Actor, Note: row.Note, Restored: row.Name == nameRestored}
			}
			s.Stopped.ByPerson = byPerson
		default:
			s.list = append(s.list, Switch{
				Scope: row.Scope, Name: row.Name, Enabled: row.Enabled, Include: row.Include,
				Source: FromOperator, At: row.At, Actor: row.Actor, Note: row.Note,
			})
		}
	}
	s.addDefaults(p)
	return s
}

// addDefaults adds the policy's switches and the default, unless a switch of an operator overrides them.
func (s *Switches) addDefaults(p *policy.Policy) {
	for _, added := range append(policySwitches(p), Switch{Scope: ScopeAll, Enabled: !s.Attached, Source: FromDefault}) {
		if !slices.ContainsFunc(s.list, func(o Switch) bool { return o.Scope == added.Scope && o.Name == added.Name }) {
			s.list = append(s.list, added)
		}
	}
	slices.SortFunc(s.list, func(a, b Switch) int { return strings.Compare(a.Scope+" "+a.Name, b.Scope+" "+b.Name) })
}

// policySwitches returns the switches of a policy.
func policySwitches(p *policy.Policy) []Switch {
	a := &p.Routing.Automatic
	var list []Switch
	for _, m := range []struct {
		scope    string
		switches map[string]*policy.Switch
	}{{ScopeQueue, a.Queues}, {ScopeKind, a.Kinds}, {ScopeClass, a.Classes}} {
		for _, name := range slices.Sorted(maps.Keys(m.switches)) {
			list = append(list, Switch{
				Scope: m.scope, Name: name, Enabled: m.switches[name].Enabled,
				Include: m.switches[name].Include, Source: FromPolicy,
			})
		}
	}
	if a.All != nil {
		list = append(list, Switch{Scope: ScopeAll, Enabled: a.All.Enabled, Include: a.All.Include, Source: FromPolicy})
	}
	return list
}

// Publish writes the policy's switches to the database, where the view dlq.automatic reads them.
func Publish(ctx context.Context, db postgres.DB, p *policy.Policy) error {
	raw, err := json.Marshal(append([]Switch{}, policySwitches(p)...))
	if err != nil {
		return err
	}
	return dbsqlc.New(db).PublishAutomatic(ctx, string(raw))
}

// ReadStop returns the stop of all automatic redelivery, or nil if there is none.
func ReadStop(ctx context.Context, db postgres.DB) (*Stop, error) {
	row, err := dbsqlc.New(db).AutomaticStop(ctx)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // no stop is in force
	}
	if err != nil {
		return nil, err
	}
	stop := Stop(row)
	return &stop, nil
}

// List returns all switches in force, ordered by scope and name.
func (s *Switches) List() []Switch { return slices.Clone(s.list) }

// matches reports whether a switch for a queue, kind or class matches an entry.
func (s *Switch) matches(e *Entry) bool {
	switch s.Scope {
	case ScopeQueue:
		return s.Name == e.Queue
	case ScopeKind:
		return policy.MatchPattern(s.Name, e.Kind)
	case ScopeClass:
		return s.Name == e.Class
	}
	return false
}

// Of returns whether an entry is redelivered automatically:
//
//  1. An entry of an application's job that was backfilled or limited to one attempt needs manual handling. Exceptions:
//     a matching switch that is on includes such entries, or an operator unparked the entry.
//  2. A stop overrides all switches.
//  3. If a matching switch for a queue, kind or class is off, the entry is not redelivered. Otherwise, if a matching
//     one is on, the entry is redelivered.
//  4. If no such switch matches, the switch for all decides.
//
// Two rules do not apply to messages, which dlqd delivers: the first rule, and the default of an attached River.
// dlq.automatic_for makes the same decision in SQL, without the first rule.
func (s *Switches) Of(e *Entry) Verdict {
	isMessage := e.JobKind == message.JobKind
	if rule := s.manualRule(e); rule != "" && !isMessage && !e.Unparked {
		reason := "its job had one attempt; an operator decides whether it may run again"
		if rule == policy.RuleBackfilled {
			reason = "its job failed before dlqd was attached; an operator decides whether it is still wanted"
		}
		return Verdict{ManualRule: rule, Reason: reason}
	}
	if s.Stopped != nil {
		reason := "all automatic redelivery is stopped"
		if s.Stopped.Restored {
			reason = "held because the database was restored"
		} else if s.Stopped.Actor != "" { // empty in the preview of a stop
			reason += " by " + s.Stopped.Actor
		}
		return Verdict{Reason: reason}
	}
	var on *Switch
	for i := range s.list {
		candidate := &s.list[i]
		switch {
		case candidate.matches(e) && !candidate.Enabled:
			return Verdict{Reason: "automatic redelivery is off for " + candidate.String()}
		case candidate.matches(e), candidate.Scope == ScopeAll && on == nil:
			on = candidate
		}
	}
	if !on.Enabled && (!isMessage || on.Source != FromDefault) {
		return Verdict{Reason: "automatic redelivery is off"}
	}
	return Verdict{On: true, Reason: "automatic redelivery is on"}
}

// manualRule returns the rule by which an entry needs manual handling, or "" if a switch includes the entry or no such
// rule applies.
func (s *Switches) manualRule(e *Entry) string {
	included := func(name string) bool {
		return slices.ContainsFunc(s.list, func(o Switch) bool {
			return o.Enabled && (o.Scope == ScopeAll || o.matches(e)) && slices.Contains(o.Include, name)
		})
	}
	switch {
	case e.Backfilled && !included(policy.RuleBackfilled):
		return policy.RuleBackfilled
	case e.SingleAttempt && !included(policy.RuleSingleAttempt):
		return policy.RuleSingleAttempt
	}
	return ""
}
