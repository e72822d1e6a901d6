// Package group reads and changes failure groups. A group has the entries of one queue that failed for the same reason.
// It may have an owner, a note, a mark as fixed, and a mute.
package group

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/group/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Statuses of a [Group].
const (
	Open      = "open"      // not marked as fixed
	Fixed     = "fixed"     // marked as fixed, and no failure since
	Regressed = "regressed" // failed after it was marked as fixed
	Muted     = "muted"     // no notifications for now
)

// Group is a failure group.
type Group struct {
	Queue       string     `json:"queue" doc:"Queue of the group." db:"queue"`
	Fingerprint string     `json:"fingerprint" doc:"Fingerprint, which identifies the group within the queue." db:"fingerprint"`
	Title       *string    `json:"title,omitempty" doc:"Title, from the first error." db:"title"`
	ErrorType   *string    `json:"errorType,omitempty" doc:"Type of the first error." db:"error_type"`
	ErrorClass  *string    `json:"errorClass,omitempty" doc:"Class of the latest entry." db:"error_class"`
	Status      string     `json:"status" enum:"open,fixed,regressed,muted" doc:"open; fixed: marked as fixed; regressed: failed after it was marked as fixed; muted: sends no notifications until a time or a number of failures." db:"status"`
	Regressed   bool       `json:"regressed" doc:"Whether the group failed after it was marked as fixed; also set while the group is muted." db:"regressed"`
	Owner       *string    `json:"owner,omitempty" doc:"Owner, to whom new entries are assigned as they are filed." db:"owner"`
	Note        *string    `json:"note,omitempty" doc:"Note for other operators." db:"note"`
	Open        int64      `json:"open" doc:"Number of open entries." db:"open"`
	Failures    int64      `json:"failures" doc:"Total number of failures: captures and failed redeliveries." db:"failures"`
	InWindow    int64      `json:"inWindow" doc:"Number of failures in the window." db:"in_window"`
	Trend       []int64    `json:"trend" doc:"Number of failures per minute (windows up to an hour), five minutes (up to six hours), hour (up to a day), day (up to 35 days) or week, oldest first." db:"trend"`
	FirstSeen   time.Time  `json:"firstSeen" doc:"Time of the first failure." db:"first_seen"`
	LastSeen    time.Time  `json:"lastSeen" doc:"Time of the latest failure." db:"last_seen"`
	FixedAt     *time.Time `json:"fixedAt,omitempty" doc:"Time at which the group was marked as fixed." db:"fixed_at"`
	FixedBy     *string    `json:"fixedBy,omitempty" doc:"User that marked it as fixed." db:"fixed_by"`
	MutedAt     *time.Time `json:"mutedAt,omitempty" doc:"Time at which the group was muted; absent if it is not muted." db:"muted_at"`
	MutedBy     *string    `json:"mutedBy,omitempty" doc:"User that muted the group." db:"muted_by"`
	MuteUntil   *time.Time `json:"muteUntil,omitempty" doc:"Time at which the mute ends." db:"mute_until"`
	MuteLeft    *int64     `json:"muteLeft,omitempty" doc:"Number of further failures after which the mute ends." db:"mute_left"`
	UpdatedAt   *time.Time `json:"updatedAt,omitempty" doc:"Time of the last change by an operator." db:"updated_at"`
	UpdatedBy   *string    `json:"updatedBy,omitempty" doc:"User that made the last change." db:"updated_by"`
	Sample      *uuid.UUID `json:"sample,omitempty" doc:"Id of the latest entry." db:"sample"`
	Place       int64      `json:"-" db:"place"`
}

// Share is the share of one source, host or version in a group's last entries.
type Share struct {
	By      string  `json:"by" enum:"source,host,version" doc:"Kind of share."`
	Name    string  `json:"name" doc:"Name of the source, host or version."`
	Entries int64   `json:"entries" doc:"Number of entries with that name, among the latest 200 that are open or were closed within 30 days."`
	Share   float64 `json:"share" doc:"Share of those entries, 0 to 1."`
}

// Fix says in which version a group is fixed, and whether a version with the fix was deployed.
type Fix struct {
	FixedIn    string     `json:"fixedIn" doc:"Version in which the group is fixed." example:"4.2.0"`
	Deployed   string     `json:"deployed,omitempty" doc:"Version that works the queue, as reported last; absent if none was reported."`
	DeployedAt *time.Time `json:"deployedAt,omitempty" doc:"Time at which a version with the fix was reported; absent while none runs."`
	Run        *uuid.UUID `json:"run,omitempty" doc:"Replay run that the policy started since then (replayWhenFixed)."`
	Request    *uuid.UUID `json:"request,omitempty" doc:"Request for approval of that run."`
	Waiting    int64      `json:"waiting,omitempty" doc:"Dead letters of the group from before a version with the fix ran, which can be replayed. Counted up to 10,000."`
	Query      string     `json:"query,omitempty" doc:"Filter that selects these dead letters, for a replay run."`
}

// Store reads and changes groups.
type Store struct {
	Store *deadletter.Store
}

func (s *Store) queries() *dbsqlc.Queries { return dbsqlc.New(s.Store.DB()) }

// Filter selects groups, their order and a page of them. An empty field, up to HasOpen, selects all groups.
// Limit must be at least 1.
type Filter struct {
	Queue       string
	Fingerprint string
	ErrorClass  string
	Statuses    []string
	Owner       *string // "" for groups without an owner
	HasOpen     *bool
	Order       string        // latest, open, failures, newest, status or owner
	Over        time.Duration // window of the counts
	Cursor      string
	Limit       int
}

// List returns a page of groups, and the cursor of the next page, or "" if there is no next page. It returns a
// MoveError for an invalid cursor, order or limit.
func (s *Store) List(ctx context.Context, f Filter) (groups []Group, next string, err error) {
	if f.Limit < 1 {
		return nil, "", &deadletter.MoveError{
			Kind: deadletter.ErrInvalid, Detail: fmt.Sprintf("groups: the limit %d is not at least 1", f.Limit),
		}
	}
	filter := map[string]any{}
	for key, value := range map[string]string{"queue": f.Queue, "fingerprint": f.Fingerprint, "errorClass": f.ErrorClass} {
		if value != "" {
			filter[key] = value
		}
	}
	if len(f.Statuses) > 0 {
		filter["status"] = f.Statuses
	}
	if f.Owner != nil {
		filter["owner"] = *f.Owner
	}
	if f.HasOpen != nil {
		filter["hasOpen"] = *f.HasOpen
	}
	var after json.RawMessage
	if f.Cursor != "" {
		if after, err = readCursor(f.Cursor); err != nil {
			return nil, "", err
		}
	}
	rows, err := s.Store.DB().Query(ctx, "SELECT "+postgres.ColumnsOf[Group]()+" FROM dlq.groups($1, $2, $3, $4, $5)",
		filter, f.Limit+1, f.Order, after, f.Over)
	if err != nil {
		return nil, "", deadletter.AsMoveError(err)
	}
	if groups, err = pgx.CollectRows(rows, pgx.RowToStructByName[Group]); err != nil {
		return nil, "", deadletter.AsMoveError(err)
	}
	if len(groups) > f.Limit {
		groups = groups[:f.Limit]
		last := &groups[f.Limit-1]
		raw, err := json.Marshal([]any{last.Place, last.Queue, last.Fingerprint, last.Owner})
		return groups, base64.RawURLEncoding.EncodeToString(raw), err
	}
	return groups, "", nil
}

func readCursor(cursor string) (json.RawMessage, error) {
	var place int64
	var queue, fingerprint string
	var owner *string
	raw, err := base64.RawURLEncoding.DecodeString(cursor)
	if err == nil {
		err = json.Unmarshal(raw, &[]any{&place, &queue, &fingerprint, &owner})
	}
	if err != nil {
		return nil, &deadletter.MoveError{
			Kind: deadletter.ErrInvalid, Detail: "groups: invalid cursor", Hint: "Use the cursor of the previous page.",
		}
	}
	return json.Marshal([]any{place, queue, fingerprint, owner})
}

// Get returns a group of a queue, by its fingerprint or a prefix of the fingerprint. The group's counts cover the time
// over before now.
func (s *Store) Get(ctx context.Context, queue, fingerprint string, over time.Duration) (*Group, error) {
	whole, err := s.queries().OneGroup(ctx, dbsqlc.OneGroupParams{Queue: queue, Fingerprint: fingerprint})
	if err != nil {
		return nil, deadletter.AsMoveError(err)
	}
	found, _, err := s.List(ctx, Filter{Queue: queue, Fingerprint: whole, Order: "latest", Over: over, Limit: 1})
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, &deadletter.MoveError{
			Kind:   deadletter.ErrNotFound,
			Detail: fmt.Sprintf("failure group %s of queue %s: there is no such group", fingerprint, queue),
		}
	}
	return &found[0], nil
}

// Former returns the fingerprints that a group had in earlier grouping methods, at most the last 100.
func (s *Store) Former(ctx context.Context, g *Group) ([]string, error) {
	names, err := s.queries().GroupNames(ctx, dbsqlc.GroupNamesParams{Queue: g.Queue, Fingerprint: g.Fingerprint})
	return slices.DeleteFunc(names, func(name string) bool { return name == g.Fingerprint }), deadletter.AsMoveError(err)
}

// sharedEntries is the number of latest entries of a group from which its shares are computed.
const sharedEntries = 200

// Latest returns a group's last entries, at most most, that are open or were closed within 30 days. It also returns the
// shares of sources, hosts and versions in the last 200 of these entries.
func (s *Store) Latest(ctx context.Context, g *Group, most int) (
	entries []deadletter.Summary, shares []Share, err error,
) {
	ids, err := s.queries().LastEntries(ctx, dbsqlc.LastEntriesParams{
		Queue: g.Queue, Fingerprint: g.Fingerprint, Most: sharedEntries,
	})
	if err != nil {
		return nil, nil, deadletter.AsMoveError(err)
	}
	err = background.Together(2,
		func() (err error) {
			entries, err = s.Store.Summaries(ctx, ids[:min(len(ids), most)], time.Now().AddDate(0, 0, -31))
			return err
		},
		func() error {
			rows, err := s.queries().Shares(ctx, ids)
			shares = make([]Share, len(rows))
			for i, r := range rows {
				shares[i] = Share(r)
			}
			return deadletter.AsMoveError(err)
		})
	return entries, shares, err
}

// Fix returns the version in which a group is fixed, or nil if no version was named.
func (s *Store) Fix(ctx context.Context, g *Group) (*Fix, error) {
	rows, err := s.queries().GroupFix(ctx, dbsqlc.GroupFixParams{Queue: g.Queue, Fingerprint: g.Fingerprint})
	if err != nil || len(rows) == 0 {
		return nil, deadletter.AsMoveError(err)
	}
	r := &rows[0]
	f := &Fix{FixedIn: r.FixedIn, Deployed: r.DeployedVersion, DeployedAt: r.FixDeployedAt}
	if f.DeployedAt != nil { // after a rollback, the run belongs to a version that no longer runs
		f.Run, f.Request = r.FixRun, r.FixRequest
	}
	return f, nil
}

// RecordDeploy records that a version works queues from now on. If queues is nil, it works all queues.
func (s *Store) RecordDeploy(ctx context.Context, version string, queues []string, act deadletter.Act) error {
	return deadletter.AsMoveError(s.Store.InTx(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).RecordDeploy(ctx, dbsqlc.RecordDeployParams{
			Version: version, Queues: queues, Actor: act.Actor, Note: act.Note,
		})
	}))
}

// Change is a change of a group. Fields that are nil or "" stay unchanged, except that a pointer to "" removes the
// value.
type Change struct {
	Owner        *string    `json:"owner,omitempty"` // "" removes the owner
	Note         *string    `json:"note,omitempty"`  // "" removes the note
	Status       string     `json:"status,omitempty"`
	FixedIn      string     `json:"fixedIn,omitempty"` // the version with the fix, with the status fixed
	MuteUntil    *time.Time `json:"muteUntil,omitempty"`
	MuteFailures *int64     `json:"muteFailures,omitempty"`
}

// Set changes a group. If it sets the owner, it assigns the group's open entries to the owner, in batches. If it
// removes the owner, it removes the assignee of the open entries. Entries that are filed later are assigned when they
// are filed. Set returns the number of open entries whose assignee it changed.
func (s *Store) Set(ctx context.Context, queue, fingerprint string, change Change,
	act deadletter.Act,
) (assigned int, err error) {
	raw, err := json.Marshal(change)
	if err != nil {
		return 0, err
	}
	if err := s.Store.InTx(ctx, func(tx postgres.DB) (err error) {
		fingerprint, err = dbsqlc.New(tx).SetGroup(ctx, dbsqlc.SetGroupParams{
			Queue: queue, Fingerprint: fingerprint, Changes: raw, Actor: act.Actor, Why: act.Note,
		})
		return err
	}); err != nil || change.Owner == nil {
		return 0, deadletter.AsMoveError(err)
	}
	filter, err := json.Marshal(map[string]any{
		"queue": queue, "fingerprint": fingerprint,
		"status": []deadletter.Status{deadletter.Pending, deadletter.Processing, deadletter.Manual},
	})
	if err != nil {
		return 0, err
	}
	_, assigned, err = s.Store.Bulk(ctx, deadletter.Bulk{
		Action: "assign", Filter: filter, Assignee: *change.Owner, Act: act,
	})
	return assigned, err
}

// MutedEntries returns the number of manual entries in muted groups.
func (s *Store) MutedEntries(ctx context.Context) (int64, error) {
	return s.queries().MutedEntries(ctx)
}

// Mark has the settings of operators for a group.
type Mark struct {
	Owner string
	Muted bool
	Fixed bool // marked as fixed: a later failure makes the group regressed
}

// Key identifies a group.
type Key struct{ Queue, Fingerprint string }

// Marks returns what operators have set for the given groups: owner, muted, fixed. A group for which nothing is set may
// be absent from the map.
func (s *Store) Marks(ctx context.Context, keys []Key) (map[Key]Mark, error) {
	params := dbsqlc.MarksParams{}
	for _, k := range keys {
		params.Queues = append(params.Queues, k.Queue)
		params.Fingerprints = append(params.Fingerprints, k.Fingerprint)
	}
	rows, err := s.queries().Marks(ctx, params)
	marks := map[Key]Mark{}
	for _, r := range rows {
		marks[Key{r.Queue, r.Fingerprint}] = Mark{Owner: r.Owner, Muted: r.Muted, Fixed: r.Fixed}
	}
	return marks, err
}
