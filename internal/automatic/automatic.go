// Package automatic says which dead letters dlqd redelivers by itself, and which it only observes: by the switches of the
// policy, those that people set, and whose River it is.
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

// What a switch is for.
const (
	ScopeAll   = "all"
	ScopeQueue = "queue"
	ScopeKind  = "kind"
	ScopeClass = "class"
	// ScopeStop is of the switch that stops all automatic redelivery.
	ScopeStop = "stop"
)

// nameRestored is the name of the stop that dlqd itself makes in a database that was restored.
const nameRestored = "restored"

// Where a switch comes from.
const (
	FromDefault  = "default"
	FromPolicy   = "policy"
	FromOperator = "operator"
)

// CapturedByBackfill is dead_letter_queue.captured_by of an entry whose job failed before capture was there.
const CapturedByBackfill = "backfill"

// Switch is one switch that is in force.
type Switch struct {
	Scope   string     `json:"scope" enum:"all,queue,kind,class" doc:"What it is for: all dead letters, a queue, a kind or a class."`
	Name    string     `json:"name,omitempty" doc:"Name of the queue or class, or pattern of the kind; absent for all." example:"mailers"`
	Enabled bool       `json:"enabled" doc:"Whether matching dead letters are redelivered by themselves."`
	Include []string   `json:"include,omitempty" enum:"backfilled,single-attempt" doc:"What it names besides: dead letters that stay a person's otherwise."`
	Source  string     `json:"source,omitempty" enum:"default,policy,operator" doc:"Where it comes from."`
	At      *time.Time `json:"at,omitempty" doc:"When an operator switched it."`
	Actor   string     `json:"actor,omitempty" doc:"Who did."`
	Note    string     `json:"note,omitempty" doc:"Why."`
}

// String is the switch as a person says it: queue mailers.
func (s *Switch) String() string { return strings.TrimSpace(s.Scope + " " + s.Name) }

// Stop is a stop of all automatic redelivery: a person's, or dlqd's own in a database that was restored.
type Stop struct {
	At    time.Time `json:"at" doc:"When."`
	Actor string    `json:"actor" doc:"Who."`
	Note  string    `json:"note,omitempty" doc:"Why."`
	// Restored is of the stop that dlqd itself makes.
	Restored bool `json:"restored,omitempty" doc:"dlqd found the database restored to an earlier moment: replay runs, and messages from before, are held, too, until a person lets them go on (resume-restored)."`
	// ByPerson is of a person's stop, also beside dlqd's own.
	ByPerson bool `json:"byPerson,omitempty" doc:"A person stopped it, perhaps besides: their stop stays when a restored database goes on (resume-automatic)."`
}

// String says it on one line.
func (s *Stop) String() string {
	if s.Restored {
		text := "the database was restored: replay runs, redeliveries and messages from before are held since " + s.At.UTC().Format("2006-01-02 15:04 UTC") +
			" (" + s.Note + "); dlqd restored shows what may be sent a second time, and lets it go on"
		if s.ByPerson {
			text += "; a person stopped all automatic redelivery, too, and that stays"
		}
		return text
	}
	text := "all automatic redelivery was stopped by " + s.Actor + " at " + s.At.UTC().Format("2006-01-02 15:04 UTC")
	if s.Note != "" {
		text += " (" + s.Note + ")"
	}
	return text + "; dlqd automatic resume lifts that"
}

// Switches are those in force.
type Switches struct {
	// Stopped is nil unless all automatic redelivery is stopped.
	Stopped *Stop
	// Attached says that an application owns River: what no switch matches is observed.
	Attached bool
	list     []Switch // by scope and name
}

// Entry is what switches know of a dead letter.
type Entry struct {
	Queue, Kind, Class string
	JobKind            string // River's kind of the job
	Backfilled         bool   // its job failed before capture was there
	SingleAttempt      bool   // its job was allowed one attempt
	Unparked           bool   // a person returned it to the automatic path
}

// Verdict is what the switches say of a dead letter.
type Verdict struct {
	On bool
	// Reserved is set where it is a person's, on or off: the rule that says so, policy.RuleBackfilled or
	// policy.RuleSingleAttempt.
	Reserved string
	Reason   string
}

// TryLock keeps the switches as they are until a transaction ends. Whatever redelivers by itself takes it before it reads
// them. It reports false where one is being changed.
func TryLock(ctx context.Context, tx postgres.DB) (bool, error) {
	return dbsqlc.New(tx).TryLockAutomatic(ctx)
}

// CountObserved counts up to so many observed entries.
func CountObserved(ctx context.Context, db postgres.DB, most int32) (int64, error) {
	return dbsqlc.New(db).CountObservedUpTo(ctx, most)
}

// Read reads the switches in force.
func Read(ctx context.Context, db postgres.DB, p *policy.Policy) (*Switches, error) {
	rows, err := dbsqlc.New(db).AutomaticSwitches(ctx)
	if err != nil {
		return nil, fmt.Errorf("automatic switches: %w", err)
	}
	return InForce(p, rows), nil
}

// InForce are the switches of a policy, with those that people set in their place.
func InForce(p *policy.Policy, rows []dbsqlc.AutomaticSwitchesRow) *Switches {
	s := &Switches{}
	for i := range rows {
		row := &rows[i]
		s.Attached = row.Attached
		note := ""
		if row.Note != nil {
			note = *row.Note
		}
		switch row.Scope {
		case "": // nobody switched anything
		case ScopeStop:
			byPerson := row.Name != nameRestored || s.Stopped != nil
			if s.Stopped == nil || row.Name == nameRestored {
				s.Stopped = &Stop{At: *row.At, Actor: row.Actor, Note: note, Restored: row.Name == nameRestored}
			}
			s.Stopped.ByPerson = byPerson
		default:
			s.list = append(s.list, Switch{Scope: row.Scope, Name: row.Name, Enabled: row.Enabled, Include: row.Include, Source: FromOperator, At: row.At, Actor: row.Actor, Note: note})
		}
	}
	s.complete(p)
	return s
}

// complete adds the switches of the policy, and the default, where no person's is in their place.
func (s *Switches) complete(p *policy.Policy) {
	for _, one := range append(ofPolicy(p), Switch{Scope: ScopeAll, Enabled: !s.Attached, Source: FromDefault}) {
		if !slices.ContainsFunc(s.list, func(o Switch) bool { return o.Scope == one.Scope && o.Name == one.Name }) {
			s.list = append(s.list, one)
		}
	}
	slices.SortFunc(s.list, func(a, b Switch) int { return strings.Compare(a.Scope+" "+a.Name, b.Scope+" "+b.Name) })
}

// ofPolicy are the switches of a policy.
func ofPolicy(p *policy.Policy) []Switch {
	a := &p.Routing.Automatic
	var list []Switch
	for _, m := range []struct {
		scope    string
		switches map[string]*policy.Switch
	}{{ScopeQueue, a.Queues}, {ScopeKind, a.Kinds}, {ScopeClass, a.Classes}} {
		for _, name := range slices.Sorted(maps.Keys(m.switches)) {
			list = append(list, Switch{Scope: m.scope, Name: name, Enabled: m.switches[name].Enabled, Include: m.switches[name].Include, Source: FromPolicy})
		}
	}
	if a.All != nil {
		list = append(list, Switch{Scope: ScopeAll, Enabled: a.All.Enabled, Include: a.All.Include, Source: FromPolicy})
	}
	return list
}

// Publish tells people who look by SQL what the policy says.
func Publish(ctx context.Context, db postgres.DB, p *policy.Policy) error {
	raw, err := json.Marshal(append([]Switch{}, ofPolicy(p)...))
	if err != nil {
		return err
	}
	return dbsqlc.New(db).PublishAutomatic(ctx, string(raw))
}

// ReadStop returns the stop of all automatic redelivery, nil where there is none.
func ReadStop(ctx context.Context, db postgres.DB) (*Stop, error) {
	row, err := dbsqlc.New(db).AutomaticStop(ctx)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // nobody did
	}
	if err != nil {
		return nil, err
	}
	stop := &Stop{At: row.At, Actor: row.Actor, Restored: row.Restored, ByPerson: row.ByPerson}
	if row.Note != nil {
		stop.Note = *row.Note
	}
	return stop, nil
}

// List are all switches in force, by scope and name.
func (s *Switches) List() []Switch { return slices.Clone(s.list) }

// matches reports whether a switch other than the one for all is for an entry.
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

// Of says whether an entry is redelivered by itself.
//
// An application's job that was backfilled, or was allowed one attempt, is a person's, unless a switch that is on and
// matches it names that. Of the switches for a queue, kind or class that match, one that is off wins; where none matches,
// the one for all counts. Messages that dlqd itself delivers are its own: neither the first, nor the default of a River
// that an application owns, is for them. (dlq.automatic_for says the same of on and off.)
func (s *Switches) Of(e *Entry) Verdict {
	own := e.JobKind == message.JobKind
	if rule := s.reserved(e); rule != "" && !own && !e.Unparked {
		reason := "its job had one attempt: whether it may run twice is a person's decision"
		if rule == policy.RuleBackfilled {
			reason = "its job failed before dlqd was there: whether it is still wanted is a person's decision"
		}
		return Verdict{Reserved: rule, Reason: reason}
	}
	if s.Stopped != nil {
		reason := "all automatic redelivery is stopped"
		if s.Stopped.Restored {
			reason = "held, since the database was restored"
		} else if s.Stopped.Actor != "" { // it is only looked at what a stop would do
			reason += " by " + s.Stopped.Actor
		}
		return Verdict{Reason: reason}
	}
	var on *Switch
	for i := range s.list {
		one := &s.list[i]
		switch {
		case one.matches(e) && !one.Enabled:
			return Verdict{Reason: "automatic is off for " + one.String()}
		case one.matches(e), one.Scope == ScopeAll && on == nil:
			on = one
		}
	}
	if !on.Enabled && (!own || on.Source != FromDefault) {
		return Verdict{Reason: "automatic is off"}
	}
	return Verdict{On: true, Reason: "automatic is on"}
}

// reserved names the rule by which an entry is a person's, "" where switches include it.
func (s *Switches) reserved(e *Entry) string {
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
