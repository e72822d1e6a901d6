package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/policy"
)

// groupEntries is the number of a group's latest entries in the answer.
const groupEntries = 20

// GroupPage is one page of failure groups.
type GroupPage struct {
	AsOf   time.Time     `json:"asOf" doc:"Counts include all events before this time."`
	Groups []group.Group `json:"groups" doc:"Groups of this page."`
	Next   string        `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// GroupDetail is everything about a failure group.
type GroupDetail struct {
	group.Group

	Former     []string             `json:"former,omitempty" doc:"Fingerprints of its predecessors from earlier grouping methods, by which it is also found: the last 100."`
	Fix        *group.Fix           `json:"fix,omitempty" doc:"The version in which the group is fixed, if it was marked as fixed in one."`
	WorkerLost int64                `json:"workerLost,omitempty" doc:"Open entries of the group that were rescued twice or more (rule worker-lost): their workers died, or the jobs never ended. One of them may be the job that kills the worker of the others. Counted up to 10,000."`
	Shares     []group.Share        `json:"shares" doc:"Shares of sources, hosts and versions in its last entries: the ten largest of each."`
	Entries    []deadletter.Summary `json:"entries" doc:"Its last entries that are open or were closed within 30 days: at most 20."`
}

// GroupChange changes a failure group. Absent fields stay as they are.
type GroupChange struct {
	Actor        string     `json:"actor,omitempty" maxLength:"255" doc:"Without authentication: the actor, \"api\" if absent. With authentication: the person on whose behalf the caller acts." example:"kim"`
	Why          string     `json:"why,omitempty" maxLength:"10000" doc:"Reason, for the audit trail."`
	Owner        *string    `json:"owner,omitempty" maxLength:"255" doc:"Owner of the group. Its open entries are assigned to the owner, and so are new ones when they are filed. Empty to remove the owner."`
	Note         *string    `json:"note,omitempty" maxLength:"10000" doc:"Note for other operators. Empty to remove it."`
	Status       string     `json:"status,omitempty" enum:"open,fixed,muted" doc:"fixed: becomes regressed at the next failure. muted: needs muteUntil or muteFailures. open: removes fixed and muted."`
	FixedIn      string     `json:"fixedIn,omitempty" maxLength:"255" doc:"With the status fixed: the version with the fix. Failures make the group regressed only from when a deploy of that version, or of a later one, is reported (POST /api/deploys)." example:"4.2.0"`
	MuteUntil    *time.Time `json:"muteUntil,omitempty" doc:"No notifications for the group until this time."`
	MuteFailures *int64     `json:"muteFailures,omitempty" minimum:"1" maximum:"1000000000" doc:"No notifications until the group has this many more failures; with muteUntil, until the first of the two."`
}

// GroupChanged is a failure group after a change.
type GroupChanged struct {
	group.Group

	Assigned int        `json:"assigned" doc:"Entries that were assigned to the owner."`
	Undo     *uuid.UUID `json:"undo,omitempty" doc:"Id of the assignment, for POST /api/dlq/undo/{id}."`
}

// GroupsInput selects failure groups.
type GroupsInput struct {
	Status      []string `query:"status" enum:"open,fixed,regressed,muted" doc:"Only groups in these states: several values are separated by commas, or the parameter is repeated."`
	Queue       string   `query:"queue" maxLength:"127" doc:"Only groups of this queue."`
	ErrorClass  string   `query:"errorClass" enum:"transient,rate_limited,outage,validation,malformed,unauthorized,not_found,business,code_bug,unknown" doc:"Only groups of this class."`
	Owner       string   `query:"owner" maxLength:"255" doc:"Only groups of this owner; \"nobody\" for groups without an owner." example:"kim"`
	HasOpen     string   `query:"hasOpen" enum:"true,false" doc:"Only groups with open entries (true), or without (false)."`
	Order       string   `query:"order" enum:"latest,open,failures,newest,status,owner" default:"latest" doc:"First the groups with the latest failure, the most open entries, or the most failures, or the newest ones; or by status (regressed, open, muted, fixed) or owner."`
	Over        string   `query:"over" default:"24h" doc:"Length of the trend, such as 24h or 30d." example:"24h"`
	Cursor      string   `query:"cursor" maxLength:"2000" doc:"next of the previous page."`
	Limit       int      `query:"limit" minimum:"1" maximum:"200" default:"50" doc:"Groups in a page."`
	Fingerprint string   `query:"fingerprint" maxLength:"255" doc:"Only the group with this fingerprint."`
}

// GroupInput names a failure group.
type GroupInput struct {
	Queue       string `path:"queue" maxLength:"255" doc:"Queue of the group." example:"payments"`
	Fingerprint string `path:"fingerprint" maxLength:"255" doc:"Fingerprint of the group, or its first characters: at least four, and not those of another group of the queue." example:"3f2a9c41d07be512"`
}

// GetGroupInput names a failure group and the length of its trend.
type GetGroupInput struct {
	GroupInput

	Over string `query:"over" default:"24h" doc:"Length of the trend, such as 24h or 30d." example:"24h"`
}

// SetGroupInput is a request to change a failure group.
type SetGroupInput struct {
	GroupInput

	Body GroupChange
}

// Deploy reports that a version works queues from now on.
type Deploy struct {
	Action

	Version string   `json:"version" minLength:"1" maxLength:"255" doc:"The version. Semantic versions (4.2.0) are ordered as such, others by the order of their first deploys." example:"4.2.0"`
	Queues  []string `json:"queues,omitempty" maxItems:"100" doc:"The queues that it works; all if absent." example:"[\"payments\"]"`
}

// DeployInput is a request to report a deploy.
type DeployInput struct{ Body Deploy }

// Deployed is a deploy that was recorded.
type Deployed struct {
	Version string   `json:"version" doc:"The version." example:"4.2.0"`
	Queues  []string `json:"queues,omitempty" doc:"The queues that it works. Absent: all."`
}

// Operations on failure groups.
var (
	ListGroups = Operation[GroupsInput, GroupPage]{"list-groups", http.MethodGet, "/api/dlq/groups"}
	GetGroup   = Operation[GetGroupInput, GroupDetail]{
		"get-group", http.MethodGet, "/api/dlq/groups/{queue}/{fingerprint}",
	}
	SetGroup = Operation[SetGroupInput, GroupChanged]{
		"set-group", http.MethodPatch, "/api/dlq/groups/{queue}/{fingerprint}",
	}
	RecordDeploy = Operation[DeployInput, Deployed]{"record-deploy", http.MethodPost, "/api/deploys"}
)

func (s *service) registerGroups(api huma.API) {
	tags := []string{"failure groups"}
	seen := time.Date(2026, 11, 22, 2, 14, 0, 0, time.UTC)
	title, class, owner := "503 from bank.example", "outage", "kim"
	shown := group.Group{
		Queue: "payments", Fingerprint: "3f2a9c41d07be512", Title: &title, ErrorClass: &class,
		Status: group.Open, Owner: &owner, Open: 150, Failures: 412, InWindow: 412,
		Trend: []int64{0, 150, 262}, FirstSeen: seen, LastSeen: seen.Add(2 * time.Hour),
	}
	list := huma.Operation{
		Tags: tags, Summary: "List failure groups",
		Description: "Groups the entries of a queue by the cause of their error, with owner, note, state and trend.",
		Errors:      []int{403, 422, 503},
	}
	example(&list, http.StatusOK, GroupPage{AsOf: seen.Add(2 * time.Hour), Groups: []group.Group{shown}})
	register(s, api, ListGroups, list, s.listGroups)

	get := huma.Operation{
		Tags:    tags,
		Summary: "Get a failure group, with its last entries and their origins", Errors: []int{403, 404, 422, 503},
	}
	example(&get, http.StatusOK,
		GroupDetail{
			Group: shown, Shares: []group.Share{{By: "host", Name: "app-2", Entries: 120, Share: 0.8}},
			Entries: []deadletter.Summary{},
		})
	register(s, api, GetGroup, get, s.getGroup)

	set := huma.Operation{
		Tags:    tags,
		Summary: "Assign, annotate, mute or mark as fixed a failure group",
		Description: "Changes are recorded in the audit trail (group QUEUE FINGERPRINT). New entries of a muted group " +
			"cause no notifications and are not counted in needsPerson (GET /api/dlq/stats). Muting ends automatically.",
		Errors: []int{400, 403, 404, 422, 503},
	}
	example(&set, http.StatusOK, GroupChanged{Group: shown, Assigned: 150})
	register(s, api, SetGroup, set, s.setGroup)

	deploy := huma.Operation{
		Tags: tags, Summary: "Report a deploy",
		Description: "The version works the queues from now on. A failure group that is fixed in this version or an earlier " +
			"one then offers a replay run of its earlier dead letters; with replayWhenFixed of the policy, dlqd starts the " +
			"run. Report a deploy when all workers have the version. An earlier version again is a rollback.",
		Errors: []int{400, 403, 422, 503},
	}
	example(&deploy, http.StatusOK, Deployed{Version: "4.2.0"})
	register(s, api, RecordDeploy, deploy, func(ctx context.Context, in *DeployInput) (*Deployed, error) {
		if err := s.Groups.RecordDeploy(ctx, in.Body.Version, in.Body.Queues, in.Body.act(ctx)); err != nil {
			return nil, s.problem(ctx, err)
		}
		return &Deployed{in.Body.Version, in.Body.Queues}, nil
	})
}

func (s *service) listGroups(ctx context.Context, in *GroupsInput) (*GroupPage, error) {
	w, err := (&WindowInput{Over: in.Over}).window()
	if err != nil {
		return nil, err
	}
	f := group.Filter{
		Queue: in.Queue, Fingerprint: in.Fingerprint, ErrorClass: in.ErrorClass, Statuses: in.Status,
		Order: in.Order, Over: w.Over, Cursor: in.Cursor, Limit: in.Limit,
	}
	if in.Owner != "" {
		owner := in.Owner
		if owner == "nobody" {
			owner = ""
		}
		f.Owner = &owner
	}
	if in.HasOpen != "" {
		open := in.HasOpen == "true"
		f.HasOpen = &open
	}
	out := &GroupPage{}
	if out.AsOf, err = s.Analytics.AsOf(ctx); err == nil {
		out.Groups, out.Next, err = s.Groups.List(ctx, f)
	}
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}

func (s *service) getGroup(ctx context.Context, in *GetGroupInput) (*GroupDetail, error) {
	w, err := (&WindowInput{Over: in.Over}).window()
	if err != nil {
		return nil, err
	}
	g, err := s.Groups.Get(ctx, in.Queue, in.Fingerprint, w.Over)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	out := &GroupDetail{Group: *g}
	if err := background.Together(3,
		func() (err error) { out.Entries, out.Shares, err = s.Groups.Latest(ctx, g, groupEntries); return err },
		func() (err error) { out.WorkerLost, err = s.workerLost(ctx, g); return err },
		func() (err error) { out.Former, err = s.Groups.Former(ctx, g); return err },
		func() (err error) { out.Fix, err = s.fix(ctx, g); return err },
	); err != nil {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}

// workerLost returns the number of a group's open entries whose job lost its worker, or did not end, at least twice. It
// counts up to MostCounted, and for at most countBudget.
func (s *service) workerLost(ctx context.Context, g *group.Group) (int64, error) {
	lost := filter.Filter{
		Status: []string{string(deadletter.Pending), string(deadletter.Manual), string(deadletter.Processing)},
		Queue:  []string{g.Queue}, Fingerprint: []string{g.Fingerprint},
		Rule: []string{policy.RuleWorkerLost},
	}
	n, _, err := s.Store.CountWithin(ctx, lost, MostCounted, countBudget)
	return int64(n), err
}

// fix returns the version in which a group is fixed, or nil if no version was named. If a version with the fix was
// deployed, the result has the number of entries from before the deploy that can be replayed, up to MostCounted.
func (s *service) fix(ctx context.Context, g *group.Group) (*group.Fix, error) {
	fix, err := s.Groups.Fix(ctx, g)
	if err != nil || fix == nil || fix.DeployedAt == nil {
		return fix, err
	}
	waiting := filter.Filter{
		Status: []string{string(deadletter.Pending), string(deadletter.Manual), string(deadletter.Failed)},
		Queue:  []string{g.Queue}, Fingerprint: []string{g.Fingerprint}, Before: fix.DeployedAt.UTC().Format(time.RFC3339Nano),
	}
	n, _, err := s.Store.CountWithin(ctx, waiting, MostCounted, countBudget)
	fix.Waiting, fix.Query = int64(n), waiting.Print()
	return fix, err
}

func (s *service) setGroup(ctx context.Context, in *SetGroupInput) (*GroupChanged, error) {
	body := &in.Body
	change := group.Change{
		Owner: body.Owner, Note: body.Note, Status: body.Status, FixedIn: body.FixedIn, MuteUntil: body.MuteUntil,
		MuteFailures: body.MuteFailures,
	}
	act := (&Action{Actor: body.Actor, Note: body.Why}).act(ctx)
	act.Operation = deadletter.NewOperation()
	assigned, err := s.Groups.Set(ctx, in.Queue, in.Fingerprint, change, act)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	g, err := s.Groups.Get(ctx, in.Queue, in.Fingerprint, 24*time.Hour)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	out := &GroupChanged{Group: *g, Assigned: assigned}
	if assigned > 0 {
		out.Undo = &act.Operation
	}
	return out, nil
}
