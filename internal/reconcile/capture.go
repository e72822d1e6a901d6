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

// unseenFor is the age above which an unfiled failure or an unapplied fact is a problem. DLQ
// workers look every 50 ms.
const unseenFor = time.Minute

// Capture is the state of capture. Fields that could not be read within a moment, because another
// session locks a table, are absent.
type Capture struct {
	Mode      string     `json:"mode" enum:"on,off,strict" doc:"on: a failure is captured in the transaction that ends its job, or by the reconciler where that would hold the application up. off: only the reconciler files failures. strict: a job cannot end as a failure unless its dead letter can be written."`
	Limit     string     `json:"limit" doc:"How long capture may work in one statement of the application." example:"00:00:00.25"`
	ChangedAt *time.Time `json:"changedAt,omitempty" doc:"When it was switched; absent where it never was, or who did it could not be recorded."`
	ChangedBy string     `json:"changedBy,omitempty" doc:"Who switched it."`
	Note      string     `json:"note,omitempty" doc:"Why."`
	Triggers  string     `json:"triggers" enum:"enabled,disabled,missing" doc:"Whether dlqd's triggers on River's table are there, and enabled."`
	Writing   int        `json:"writing" doc:"Open transactions that have written jobs: what their statement under way ends is still treated as before a switch."`

	Unfiled      *int64     `json:"unfiled,omitempty" doc:"Entries that no DLQ worker has filed yet, counted up to 10,000."`
	UnfiledSince *time.Time `json:"unfiledSince,omitempty" doc:"When the oldest of them was captured."`
	Facts        *int64     `json:"facts,omitempty" doc:"Ends of redeliveries, and retries made outside dlqd, that no process has applied yet, counted up to 10,000."`
	FactsSince   *time.Time `json:"factsSince,omitempty" doc:"When the oldest of them happened."`

	LookedAt    *time.Time       `json:"lookedAt,omitempty" doc:"When the reconciler last looked for recent failures that capture missed."`
	LookedAtAll *time.Time       `json:"lookedAtAll,omitempty" doc:"When it last looked at all that River keeps."`
	Missed      int64            `json:"missed" doc:"Failures that it filed within 24 hours."`
	MissedBy    map[string]int64 `json:"missedBy,omitempty" doc:"The same by cause: capture_off, trigger_missing, trigger_disabled, missed (capture gave way, or was bypassed)."`
	MissedAt    *time.Time       `json:"missedAt,omitempty" doc:"When it filed the last of them."`
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

// Problem describes what is wrong with capture; empty if nothing is. Missed failures are not a
// problem: the reconciler filed them.
func (s *Capture) Problem() string {
	var wrong []string
	if s.Triggers != TriggersEnabled {
		wrong = append(wrong, "the triggers on River's table are "+s.Triggers+": failures are filed late, by the reconciler")
	}
	for _, waits := range []struct {
		what  string
		since *time.Time
	}{{"an entry waits to be filed", s.UnfiledSince}, {"an end of a redelivery or a retry waits to be applied", s.FactsSince}} {
		if waits.since != nil && time.Since(*waits.since) > unseenFor {
			wrong = append(wrong, waits.what+" since "+waits.since.UTC().Format(time.RFC3339))
		}
	}
	return strings.Join(wrong, "; ")
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
		for why, n := range s.MissedBy {
			causes = append(causes, fmt.Sprintf("%d %s", n, why))
		}
		slices.Sort(causes)
		text += fmt.Sprintf("; the reconciler filed %d failures within 24 hours that it had missed (%s)", s.Missed, strings.Join(causes, ", "))
	}
	return text
}

// Switched is the result of a switch of capture.
type Switched struct {
	Mode     string `json:"mode" enum:"on,off,strict" doc:"What holds now."`
	Writing  int    `json:"writing" doc:"Open transactions that have written jobs: what their statement under way ends is still treated as before."`
	Recorded bool   `json:"recorded" doc:"Who did it was recorded: not where somebody holds that table."`
	Message  string `json:"message" doc:"What that means, and whether what is missed meanwhile is filed later."`
}

// Switch is a request to switch capture.
type Switch struct {
	Mode  string
	Limit time.Duration // how long capture may work in one statement; 0 keeps the current limit
	Actor string
	Note  string
}

// SetCapture switches capture. It does not wait for table locks.
func SetCapture(ctx context.Context, db postgres.DB, s Switch) (*Switched, error) {
	var limit *time.Duration
	if s.Limit != 0 {
		limit = &s.Limit
	}
	row, err := dbsqlc.New(db).SetCapture(ctx, dbsqlc.SetCaptureParams{Mode: s.Mode, TimeLimit: limit, Actor: s.Actor, Note: s.Note})
	if err != nil {
		return nil, err
	}
	return &Switched{Mode: row.Mode, Writing: int(row.Writing), Recorded: row.Recorded, Message: row.Message}, nil
}

// Causes returns the causes for which capture misses failures, as the reconciler distinguishes
// them.
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
