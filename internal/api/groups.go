package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/policy"
)

// groupEntries is how many of a group's latest entries are shown with it.
const groupEntries = 20

// GroupPage is one page of failure groups.
type GroupPage struct {
	AsOf   time.Time     `json:"asOf" doc:"What happened until then is counted, exactly."`
	Groups []group.Group `json:"groups" doc:"The groups of this page."`
	Next   string        `json:"next,omitempty" doc:"Cursor of the next page; absent on the last."`
}

// GroupDetail is everything about a failure group.
type GroupDetail struct {
	group.Group

	Former     []string             `json:"former,omitempty" doc:"Fingerprints of the groups of an earlier grouping method with which it goes on, and by which it is found, too: the last 100."`
	WorkerLost int64                `json:"workerLost,omitempty" doc:"Open entries of it that were rescued twice or more (rule worker-lost): their workers died, or they never ended. One of them may be what kills the worker of the others; 10,000 are counted."`
	Shares     []group.Share        `json:"shares" doc:"Of which sources, hosts and versions its last entries are: the ten most of each."`
	Entries    []deadletter.Summary `json:"entries" doc:"Its last entries that are open, or closed within 30 days: 20 at most."`
}

// GroupChange changes a failure group. Absent fields stay as they are.
type GroupChange struct {
	Actor        string     `json:"actor,omitempty" maxLength:"255" doc:"Who says so; \"api\" if absent." example:"kim"`
	Why          string     `json:"why,omitempty" maxLength:"10000" doc:"Why, for the audit trail."`
	Owner        *string    `json:"owner,omitempty" maxLength:"255" doc:"Who looks after it: its open entries are assigned to them, and those that join it are as they are filed. Empty for nobody."`
	Note         *string    `json:"note,omitempty" maxLength:"10000" doc:"What the next person should know. Empty for nothing."`
	Status       string     `json:"status,omitempty" enum:"open,fixed,muted" doc:"fixed: marked as that, and regressed as soon as it fails again; muted needs muteUntil or muteFailures; open: neither fixed nor muted any more."`
	MuteUntil    *time.Time `json:"muteUntil,omitempty" doc:"Nobody is told of it until then."`
	MuteFailures *int64     `json:"muteFailures,omitempty" minimum:"1" maximum:"1000000000" doc:"Nobody is told of it until so many more failures; with muteUntil, until the first of the two."`
}

// GroupChanged is a failure group after a change.
type GroupChanged struct {
	group.Group

	Assigned int        `json:"assigned" doc:"Entries that were given to its owner."`
	Undo     *uuid.UUID `json:"undo,omitempty" doc:"What undoes that, of the entries: POST /api/dlq/undo/{id}."`
}

type groupsInput struct {
	Status     []string `query:"status" enum:"open,fixed,regressed,muted" doc:"Only these."`
	Queue      string   `query:"queue" maxLength:"127" doc:"Only of this queue."`
	ErrorClass string   `query:"errorClass" enum:"transient,rate_limited,outage,validation,malformed,unauthorized,not_found,business,code_bug,unknown" doc:"Only of this class."`
	Owner      string   `query:"owner" maxLength:"255" doc:"Only of this owner; \"nobody\" for those that have none." example:"kim"`
	HasOpen    string   `query:"hasOpen" enum:"true,false" doc:"Only those that have open entries, or have none."`
	Order      string   `query:"order" enum:"latest,open,failures" default:"latest" doc:"Those first that failed last, have the most open entries, or failed most."`
	Over       string   `query:"over" default:"24h" doc:"How far back the trend reaches, such as 24h or 30d." example:"24h"`
	Cursor     string   `query:"cursor" maxLength:"2000" doc:"next of the page before."`
	Limit      int      `query:"limit" minimum:"1" maximum:"200" default:"50" doc:"Groups in a page."`
}

type groupsOutput struct{ Body GroupPage }

// GroupInput names a failure group.
type GroupInput struct {
	Queue       string `path:"queue" maxLength:"255" doc:"Its queue." example:"payments"`
	Fingerprint string `path:"fingerprint" maxLength:"255" doc:"Its fingerprint, or the beginning of it: four characters or more that no other group of the queue begins with." example:"3f2a9c41d07be512"`
}

type groupInput struct {
	GroupInput

	Over string `query:"over" default:"24h" doc:"How far back the trend reaches, such as 24h or 30d." example:"24h"`
}

type groupOutput struct{ Body GroupDetail }

type setGroupInput struct {
	GroupInput

	Body GroupChange
}

type setGroupOutput struct{ Body GroupChanged }

func (s *service) registerGroups(api huma.API) {
	tags := []string{"failure groups"}
	const path = "/api/dlq/groups"
	seen := time.Date(2026, 11, 22, 2, 14, 0, 0, time.UTC)
	title, class, owner := "503 from bank.example", "outage", "kim"
	shown := group.Group{
		Queue: "payments", Fingerprint: "3f2a9c41d07be512", Title: &title, ErrorClass: &class, Status: group.Open, Owner: &owner, Open: 150, Failures: 412, InWindow: 412,
		Trend: []int64{0, 150, 262}, FirstSeen: seen, LastSeen: seen.Add(2 * time.Hour),
	}
	list := huma.Operation{
		OperationID: "list-groups", Method: http.MethodGet, Path: path, Tags: tags, Summary: "List failure groups",
		Description: "Entries of a queue that failed for the same reason, what people say of them, and how they go on.", Errors: []int{403, 422, 503},
	}
	example(&list, http.StatusOK, GroupPage{AsOf: seen.Add(2 * time.Hour), Groups: []group.Group{shown}})
	huma.Register(api, list, s.listGroups)

	get := huma.Operation{
		OperationID: "get-group", Method: http.MethodGet, Path: path + "/{queue}/{fingerprint}", Tags: tags,
		Summary: "A failure group, where its last entries come from, and these", Errors: []int{403, 404, 422, 503},
	}
	example(&get, http.StatusOK, GroupDetail{Group: shown, Shares: []group.Share{{By: "host", Name: "app-2", Entries: 120, Share: 0.8}}, Entries: []deadletter.Summary{}})
	huma.Register(api, get, s.getGroup)

	set := huma.Operation{
		OperationID: "set-group", Method: http.MethodPatch, Path: path + "/{queue}/{fingerprint}", Tags: tags,
		Summary: "Assign a failure group, note something, mark it as fixed, mute it",
		Description: "What people say of a group is in the audit trail (group QUEUE FINGERPRINT). Nobody is told of entries that come into a muted group, and they are not counted as needing a " +
			"person (GET /api/dlq/stats); it ends by itself.",
		Errors: []int{400, 403, 404, 422, 503},
	}
	example(&set, http.StatusOK, GroupChanged{Group: shown, Assigned: 150})
	huma.Register(api, set, s.setGroup)
}

func (s *service) listGroups(ctx context.Context, in *groupsInput) (*groupsOutput, error) {
	w, err := (&WindowInput{Over: in.Over}).window()
	if err != nil {
		return nil, err
	}
	f := group.Filter{Queue: in.Queue, ErrorClass: in.ErrorClass, Statuses: in.Status, Order: in.Order, Over: w.Over, Cursor: in.Cursor, Limit: in.Limit}
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
	out := &groupsOutput{}
	if out.Body.AsOf, err = s.Analytics.AsOf(ctx); err == nil {
		out.Body.Groups, out.Body.Next, err = s.Groups.List(ctx, f)
	}
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}

func (s *service) getGroup(ctx context.Context, in *groupInput) (*groupOutput, error) {
	w, err := (&WindowInput{Over: in.Over}).window()
	if err != nil {
		return nil, err
	}
	g, err := s.Groups.Get(ctx, in.Queue, in.Fingerprint, w.Over)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	out := &groupOutput{Body: GroupDetail{Group: *g}}
	if out.Body.Former, err = s.Groups.Former(ctx, g); err == nil {
		out.Body.Shares, err = s.Groups.Shares(ctx, g)
	}
	if err == nil {
		out.Body.Entries, err = s.Groups.LastEntries(ctx, g, groupEntries)
	}
	if err == nil {
		out.Body.WorkerLost, err = s.workerLost(ctx, g)
	}
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}

// workerLost returns the number of a group's open entries whose worker died repeatedly.
func (s *service) workerLost(ctx context.Context, g *group.Group) (int64, error) {
	lost := filter.Filter{
		Status: []string{string(deadletter.Pending), string(deadletter.Manual), string(deadletter.Processing)}, Queue: []string{g.Queue}, Fingerprint: []string{g.Fingerprint},
		Rule: []string{policy.RuleWorkerLost},
	}
	n, _, err := s.Store.CountWithin(ctx, lost, MostCounted, countBudget)
	return int64(n), err
}

func (s *service) setGroup(ctx context.Context, in *setGroupInput) (*setGroupOutput, error) {
	body := &in.Body
	change := group.Change{Owner: body.Owner, Note: body.Note, Status: body.Status, MuteUntil: body.MuteUntil, MuteFailures: body.MuteFailures}
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
	out := &setGroupOutput{Body: GroupChanged{Group: *g, Assigned: assigned}}
	if assigned > 0 {
		out.Body.Undo = &act.Operation
	}
	return out, nil
}
