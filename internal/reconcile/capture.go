package reconcile

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/reconcile/internal/dbsqlc"
)

// Modes of capture.
const (
	ModeOn     = "on"
	ModeOff    = "off"
	ModeStrict = "strict"
)

// States of dlqd's triggers on River's table.
const (
	TriggersEnabled  = "enabled"
	TriggersDisabled = "disabled"
	TriggersMissing  = "missing"
)

// overdueAfter is the age above which an unfiled failure or an unapplied fact is a problem. Loops read both every 50
// ms.
const overdueAfter = time.Minute

// Capture is the state of capture. A field is absent if another session locks the table from which it is read.
type Capture struct {
	Mode      string     `json:"mode" enum:"on,off,strict" doc:"on: a failure is captured in the transaction that ends its job; if capture would have to wait, it skips the job and the reconciler files the failure. off: only the reconciler files failures. strict: a job cannot end as a failure unless its dead letter can be written."`
	Limit     string     `json:"limit" doc:"Time limit for capture in one statement of the application." example:"00:00:00.25"`
	ChangedAt *time.Time `json:"changedAt,omitempty" doc:"Time of the last switch; absent if capture was never switched, or if the switch could not be recorded."`
	ChangedBy string     `json:"changedBy,omitempty" doc:"User that switched it."`
	Note      string     `json:"note,omitempty" doc:"Reason for the switch."`
	Triggers  string     `json:"triggers" enum:"enabled,disabled,missing" doc:"State of dlqd's triggers on River's table."`
	Writing   int        `json:"writing" doc:"Number of open transactions that have written jobs. After a switch, jobs that their current statement ends are still handled in the previous mode."`

	Unfiled      *int64     `json:"unfiled,omitempty" doc:"Number of unfiled entries, counted up to 10,000."`
	UnfiledSince *time.Time `json:"unfiledSince,omitempty" doc:"Time of capture of the oldest unfiled entry."`
	Facts        *int64     `json:"facts,omitempty" doc:"Number of facts (ends of redeliveries and retries made outside dlqd) that are not applied yet, counted up to 10,000."`
	FactsSince   *time.Time `json:"factsSince,omitempty" doc:"Time of the oldest of these facts."`

	LookedAt    *time.Time       `json:"lookedAt,omitempty" doc:"Time of the reconciler's last scan of recent jobs for missed failures."`
	LookedAtAll *time.Time       `json:"lookedAtAll,omitempty" doc:"Time of the reconciler's last scan of all jobs."`
	Missed      int64            `json:"missed" doc:"Number of missed failures that the reconciler filed within the last 24 hours."`
	MissedBy    map[string]int64 `json:"missedBy,omitempty" doc:"These failures by cause: capture_off, trigger_missing, trigger_disabled, missed (capture skipped the job or was bypassed)."`
	MissedAt    *time.Time       `json:"missedAt,omitempty" doc:"Time at which the reconciler filed the last of them."`
}

// ReadCapture reads the state of capture.
func ReadCapture(ctx context.Context, db postgres.DB) (*Capture, error) {
	raw, err := dbsqlc.New(db).CaptureStatus(ctx)
	if err != nil {
		return nil, err
	}
	var s Capture
	return &s, json.Unmarshal(raw, &s)
}

// Problem describes the problems of capture. It returns "" if there are none. A missed failure is not a problem,
// because the reconciler has filed it.
func (s *Capture) Problem() string {
	var problems []string
	if s.Triggers != TriggersEnabled {
		problems = append(problems, "the triggers on River's table are "+s.Triggers+": only the reconciler files "+
			"failures, later")
	}
	for _, backlog := range []struct {
		problem string
		since   *time.Time
	}{{"entries have been unfiled", s.UnfiledSince}, {"facts have been unapplied", s.FactsSince}} {
		if backlog.since != nil && time.Since(*backlog.since) > overdueAfter {
			problems = append(problems, backlog.problem+" since "+backlog.since.UTC().Format(time.RFC3339))
		}
	}
	return strings.Join(problems, "; ")
}

// Summary describes capture in one line.
func (s *Capture) Summary() string {
	text := s.Mode
	if s.ChangedAt != nil {
		text += fmt.Sprintf(" (by %s at %s", s.ChangedBy, s.ChangedAt.UTC().Format(time.RFC3339))
		if s.Note != "" {
			text += ": " + s.Note
		}
		text += ")"
	}
	if s.Missed > 0 {
		causes := make([]string, 0, len(s.MissedBy))
		for cause, n := range s.MissedBy {
			causes = append(causes, fmt.Sprintf("%d %s", n, cause))
		}
		slices.Sort(causes)
		text += fmt.Sprintf("; the reconciler filed %d failures that capture missed within 24 hours (%s)", s.Missed,
			strings.Join(causes, ", "))
	}
	return text
}

// Switched is the result of a switch of capture.
type Switched struct {
	Mode     string `json:"mode" enum:"on,off,strict" doc:"Active mode."`
	Writing  int    `json:"writing" doc:"Number of open transactions that have written jobs. Jobs that their current statement ends are still handled in the previous mode."`
	Recorded bool   `json:"recorded" doc:"Whether the switch was written to the audit trail; false if another session locks its table."`
	Message  string `json:"message" doc:"Effect of the mode, and whether failures that capture misses are filed later."`
}

// Switch is a request to switch capture.
type Switch struct {
	Mode  string
	Limit time.Duration // how long capture may work in one statement; 0 keeps the current limit
	Actor string
	Note  string
}

// SetCapture switches capture. It does not wait for locks of tables.
func SetCapture(ctx context.Context, db postgres.DB, s Switch) (*Switched, error) {
	var limit *time.Duration
	if s.Limit != 0 {
		limit = &s.Limit
	}
	row, err := dbsqlc.New(db).SetCapture(ctx, dbsqlc.SetCaptureParams{
		Mode: s.Mode, TimeLimit: limit, Actor: s.Actor, Note: s.Note,
	})
	if err != nil {
		return nil, err
	}
	return &Switched{Mode: row.Mode, Writing: int(row.Writing), Recorded: row.Recorded, Message: row.Message}, nil
}

// Causes returns the causes for which capture misses failures, as the reconciler counts them.
func Causes() []string {
	return []string{"capture_off", "trigger_missing", "trigger_disabled", "missed"}
}

// Missed counts the failures that the reconciler filed, by cause, since dlqd was installed.
func Missed(ctx context.Context, db postgres.DB) (map[string]int64, error) {
	rows, err := dbsqlc.New(db).ReconcileFindings(ctx)
	if err != nil {
		return nil, err
	}
	missed := map[string]int64{}
	for _, r := range rows {
		missed[r.Why] = r.Entries
	}
	return missed, nil
}
