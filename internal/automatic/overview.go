package automatic

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/dlqd/dlqd/internal/automatic/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// maxChanges is the maximum number of recent changes in an overview.
const maxChanges = 20

// ObservedGroup counts observed entries that all switches treat equally.
type ObservedGroup struct {
	Queue      string `json:"queue" doc:"Queue of the entries."`
	Kind       string `json:"kind" doc:"Kind of the entries."`
	ErrorClass string `json:"errorClass" doc:"Error class of the entries."`
	Entries    int64  `json:"entries" doc:"Number of entries."`
	Due        int64  `json:"due" doc:"Number of these entries that are due now; the others are due later."`
	On         bool   `json:"on" doc:"Whether automatic redelivery is on for these entries: they are about to be redelivered."`
}

// SwitchChange is a row of the audit trail of switches.
type SwitchChange struct {
	At      time.Time `json:"at" doc:"Time of the change."`
	Scope   string    `json:"scope" enum:"stop,all,queue,kind,class" doc:"What the switch applies to. stop: all automatic redelivery was stopped or resumed; with the name restored, dlqd stopped it because the database was restored."`
	Name    string    `json:"name,omitempty" doc:"Name of the queue or class, or pattern of the kind."`
	Enabled *bool     `json:"enabled,omitempty" doc:"New value of the switch; absent if the switch was removed."`
	Include []string  `json:"include,omitempty" doc:"Which of backfilled and single-attempt dead letters the switch included."`
	Actor   string    `json:"actor" doc:"Who changed the switch."`
	DBUser  string    `json:"dbUser" doc:"Database user of the session."`
	Origin  *string   `json:"origin,omitempty" doc:"Where the change came from."`
	Note    *string   `json:"note,omitempty" doc:"Reason that was given."`
}

// Overview is the state of automatic redelivery.
type Overview struct {
	Stopped  *Stop           `json:"stopped,omitempty" doc:"The stop of all automatic redelivery; absent if none is in force."`
	Attached bool            `json:"attached" doc:"Whether an application owns River. If so, dead letters that no switch applies to are observed."`
	Switches []Switch        `json:"switches" doc:"The switches in force, by scope and name. Of the matching switches, one that is off wins. The switch for all applies if no other matches."`
	Observed []ObservedGroup `json:"observed" doc:"Dead letters that are classified but not redelivered automatically, by queue, kind and class."`
	Changes  []SwitchChange  `json:"changes" doc:"The latest changes of switches, newest first."`
}

// ReadOverview reads the state of automatic redelivery, with the latest maxChanges changes of switches. Its duration
// grows with the number of observed entries.
func ReadOverview(ctx context.Context, db postgres.DB, p *policy.Policy) (*Overview, error) {
	switches, err := Read(ctx, db, p)
	if err != nil {
		return nil, err
	}
	rows, err := dbsqlc.New(db).CountObserved(ctx)
	if err != nil {
		return nil, err
	}
	changes, err := dbsqlc.New(db).AutomaticChanges(ctx, maxChanges)
	if err != nil {
		return nil, err
	}
	overview := &Overview{
		Stopped: switches.Stopped, Attached: switches.Attached, Switches: switches.List(),
		Observed: []ObservedGroup{}, Changes: []SwitchChange{},
	}
	for i := range rows {
		r := &rows[i]
		on := switches.Of(&Entry{Queue: r.Queue, Kind: r.Kind, Class: r.ErrorClass, JobKind: r.JobKind}).On
		overview.Observed = append(overview.Observed, ObservedGroup{
			Queue: r.Queue, Kind: r.Kind, ErrorClass: r.ErrorClass, Entries: r.Entries, Due: r.Due, On: on,
		})
	}
	for _, c := range changes {
		overview.Changes = append(overview.Changes, SwitchChange(c))
	}
	return overview, nil
}

// Going counts observed entries that a change of the switches of automatic redelivery would release.
type Going struct {
	ObservedGroup

	PerSecond float64    `json:"perSecond" doc:"Redeliveries per second of the queue; 0 means no limit."`
	Until     *time.Time `json:"until,omitempty" doc:"When the entries that are due now are redelivered, at that pace; absent if none is due."`
}

// Staying counts entries that a change of switches would not release.
type Staying struct {
	Queue      string `json:"queue" doc:"Queue of the entries."`
	Kind       string `json:"kind" doc:"Kind of the entries."`
	ErrorClass string `json:"errorClass" doc:"Error class of the entries."`
	Entries    int64  `json:"entries" doc:"Number of entries."`
	Why        string `json:"why" doc:"Why the entries stay."`
}

// Preview is the effect of a change of switches on the current entries.
type Preview struct {
	Goes  []Going   `json:"goes" doc:"Observed dead letters that the change releases, by queue, kind and class."`
	Stays []Staying `json:"stays" doc:"Dead letters that the change does not release: observed ones, and those that need manual handling because they were backfilled or their job had one attempt."`
}

// addStaying adds entries to the group that stays for the same reason, or adds a new group.
func (p *Preview) addStaying(s Staying) {
	for i := range p.Stays {
		same := &p.Stays[i]
		if same.Queue == s.Queue && same.Kind == s.Kind && same.ErrorClass == s.ErrorClass && same.Why == s.Why {
			same.Entries += s.Entries
			return
		}
	}
	p.Stays = append(p.Stays, s)
}

// With returns the switches as they would be after a change. If enabled is nil, the change removes the operator's
// switch, so that the policy's switch or the default applies.
func (s *Switches) With(p *policy.Policy, scope, name string, enabled *bool, include []string) *Switches {
	next := &Switches{Stopped: s.Stopped, Attached: s.Attached}
	if scope == ScopeStop {
		next.Stopped = nil
		switch {
		case s.Stopped != nil && s.Stopped.Restored: // only "dlqd restored resume" can end this stop
			held := *s.Stopped
			held.ByPerson = enabled != nil
			next.Stopped = &held
		case enabled != nil:
			next.Stopped = &Stop{}
		}
		next.list = s.List()
		return next
	}
	if enabled != nil {
		next.list = append(next.list, Switch{
			Scope: scope, Name: name, Enabled: *enabled, Include: include, Source: FromOperator,
		})
	}
	for _, other := range s.list {
		if other.Source == FromOperator && (other.Scope != scope || other.Name != name) {
			next.list = append(next.list, other)
		}
	}
	next.addDefaults(p)
	return next
}

// Preview returns the effect of these switches on the current entries.
func (s *Switches) Preview(ctx context.Context, db postgres.DB, p *policy.Policy, now time.Time) (*Preview, error) {
	preview := &Preview{Goes: []Going{}, Stays: []Staying{}}
	observed, err := dbsqlc.New(db).CountObserved(ctx)
	if err != nil {
		return nil, err
	}
	free := map[string]time.Time{} // the time from which each pace has room again
	for i := range observed {
		r := &observed[i]
		v := s.Of(&Entry{Queue: r.Queue, Kind: r.Kind, Class: r.ErrorClass, JobKind: r.JobKind})
		if !v.On {
			preview.addStaying(Staying{
				Queue: r.Queue, Kind: r.Kind, ErrorClass: r.ErrorClass, Entries: r.Entries, Why: v.Reason,
			})
			continue
		}
		pace := p.PaceOf(r.Queue)
		going := Going{ObservedGroup: ObservedGroup{
			Queue: r.Queue, Kind: r.Kind, ErrorClass: r.ErrorClass, Entries: r.Entries, Due: r.Due, On: true,
		}, PerSecond: pace.PerSecond}
		if r.Due > 0 {
			until := now
			if pace.PerSecond > 0 {
				if at, ok := free[pace.Name]; ok {
					until = at
				}
				until = until.Add(time.Duration(float64(r.Due) / pace.PerSecond * float64(time.Second)))
				free[pace.Name] = until
			}
			going.Until = &until
		}
		preview.Goes = append(preview.Goes, going)
	}
	manual, err := dbsqlc.New(db).CountManualByRule(ctx)
	if err != nil {
		return nil, err
	}
	for i := range manual {
		r := &manual[i]
		e := Entry{
			Queue: r.Queue, Kind: r.Kind, Class: r.ErrorClass, JobKind: r.JobKind,
			Backfilled: r.CapturedBy == CapturedByBackfill, SingleAttempt: r.SingleAttempt,
		}
		v := s.Of(&e)
		why := v.Reason
		if v.ManualRule == "" {
			why = "included from now on; dlqd reclassify releases the entries that are parked already"
		}
		preview.addStaying(Staying{Queue: r.Queue, Kind: r.Kind, ErrorClass: r.ErrorClass, Entries: r.Entries, Why: why})
	}
	return preview, nil
}

// Check returns an error if a change is invalid.
func Check(ctx context.Context, db postgres.DB, scope, name string, enabled *bool, include []string) error {
	if scope == ScopeStop {
		return nil
	}
	return dbsqlc.New(db).CheckAutomatic(ctx, dbsqlc.CheckAutomaticParams{
		Scope: scope, Name: name, Enabled: enabled == nil || *enabled, Include: append([]string{}, include...),
	})
}

// Change changes the switch for all, a queue, a kind or a class, or stops or resumes all automatic redelivery
// (ScopeStop). If enabled is nil, Change removes the switch. When Change returns, all processes use the new switches.
// Exception: a stop also succeeds if a worker's transaction does not end within 5 s. That transaction may still
// redeliver.
func Change(ctx context.Context, db postgres.DB, scope, name string, enabled *bool, include []string, actor,
	note string,
) error {
	var err error
	switch {
	case scope == ScopeStop && enabled != nil:
		err = dbsqlc.New(db).StopAutomatic(ctx, dbsqlc.StopAutomaticParams{Actor: actor, Note: note})
	case scope == ScopeStop:
		_, err = dbsqlc.New(db).ResumeAutomatic(ctx, dbsqlc.ResumeAutomaticParams{Actor: actor, Note: note})
	case enabled != nil:
		err = dbsqlc.New(db).SetAutomatic(ctx, dbsqlc.SetAutomaticParams{
			Scope: scope, Name: name, Enabled: *enabled, Include: append([]string{}, include...), Actor: actor, Note: note,
		})
	default:
		_, err = dbsqlc.New(db).ResetAutomatic(ctx, dbsqlc.ResetAutomaticParams{
			Scope: scope, Name: name, Actor: actor, Note: note,
		})
	}
	if err != nil {
		return fmt.Errorf("change automatic redelivery: %w", err)
	}
	return nil
}

// onForAll reports whether automatic redelivery is on for entries that match no switch for a queue, kind or class.
func (s *Switches) onForAll() bool {
	return slices.ContainsFunc(s.list, func(o Switch) bool { return o.Scope == ScopeAll && o.Enabled })
}

// Summary describes the state of automatic redelivery in one line.
func (s *Switches) Summary() string {
	if s.Stopped != nil {
		return s.Stopped.String()
	}
	narrow := len(s.list) - 1
	text := "observing: dead letters are classified and shown, and not redelivered automatically"
	if s.onForAll() {
		text = "on: dead letters are redelivered automatically"
	}
	if narrow > 0 {
		text += fmt.Sprintf("; switches for single queues, kinds or classes: %d (see dlqd automatic)", narrow)
	}
	return text
}
