package api

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
)

// PolicyInForce is the policy in force.
type PolicyInForce struct {
	Version  string          `json:"version" doc:"Git commit of the files (with -dirty-… if they were changed since), or a hash of the values in force."`
	Rules    []PolicyRule    `json:"rules" doc:"Rules that classify errors, in order: the first match decides."`
	Settings []PolicySetting `json:"settings" doc:"Every value in force. Secrets are hidden."`
}

// PolicyRule is a rule and its place in the policy's files.
type PolicyRule struct {
	Name  string       `json:"name" doc:"Name of the rule."`
	Class string       `json:"class,omitempty" doc:"Class that the rule assigns; absent: a later rule or the built-in table chooses it."`
	Match policy.Match `json:"match" doc:"Conditions, all of which an error must match."`
	Does  string       `json:"does,omitempty" doc:"Strategy that the rule assigns; absent: that of the kind, queue or class."`
	From  string       `json:"from" doc:"File and line."`
	Text  string       `json:"text" doc:"The whole rule, as written in the file; empty if it names queues that the caller may not see."`
}

// PolicySetting is one value in force.
type PolicySetting struct {
	File  string `json:"file" doc:"File of the policy, without extension."`
	Path  string `json:"path" doc:"Path of the value in the file." example:"queues.orders.timeout"`
	Value string `json:"value" doc:"Value, as the file would spell it."`
	From  string `json:"from" doc:"File and line, or \"built in\"."`
}

// SampleError is an error on which the caller tries the rules.
type SampleError struct {
	Type    string          `json:"type,omitempty" maxLength:"255" doc:"Type of the error." example:"TIMEOUT_ERROR"`
	Code    string          `json:"code,omitempty" maxLength:"255" doc:"Its code."`
	Message string          `json:"message,omitempty" maxLength:"8192" doc:"Its message."`
	Status  int             `json:"status,omitempty" minimum:"100" maximum:"599" doc:"HTTP status of the response."`
	Panic   bool            `json:"panic,omitempty" doc:"The worker panicked."`
	Class   string          `json:"class,omitempty" enum:"transient,rate_limited,outage,validation,malformed,unauthorized,not_found,business,code_bug,unknown" doc:"Class that the worker reported."`
	Kind    string          `json:"kind,omitempty" maxLength:"255" doc:"Kind of the message or job."`
	Queue   string          `json:"queue,omitempty" maxLength:"127" doc:"Queue of the message or job."`
	Source  string          `json:"source,omitempty" maxLength:"255" doc:"Source of the message."`
	Payload json.RawMessage `json:"payload,omitempty" doc:"Payload, for rules that match it."`
}

// SampleJudgement is the policy's decision on a sample error.
type SampleJudgement struct {
	Class      string      `json:"class" doc:"Class of the error."`
	Rule       string      `json:"rule,omitempty" doc:"Rule that chose the class; absent if the built-in table chose it."`
	Strategy   string      `json:"strategy" doc:"Strategy: what happens next."`
	Reason     string      `json:"reason,omitempty" doc:"Reason for the strategy."`
	WaitingFor string      `json:"waitingFor,omitempty" doc:"What the dead letter would wait for besides a time."`
	Times      []time.Time `json:"times" doc:"Times of the redeliveries if the error occurred now and after each redelivery; empty for manual handling. The times are approximate because of jitter."`
	Assignee   string      `json:"assignee,omitempty" doc:"Assignee of the dead letter."`
	Tags       []string    `json:"tags,omitempty" doc:"Tags of the dead letter."`
}

// PolicyDraft is a proposed change of one file of the policy.
type PolicyDraft struct {
	File string `json:"file" maxLength:"255" doc:"File to replace, without extension; with its folder for a file of an environment." example:"dlq-routing"`
	Text string `json:"text" maxLength:"131072" doc:"Complete new content of the file: YAML or JSON."`
}

// PolicyPreview is the effect of a proposed change.
type PolicyPreview struct {
	Values    []string          `json:"values" doc:"Values that differ from those in force."`
	Behaviour []string          `json:"behaviour" doc:"Changes of behaviour, by queue and class."`
	Looked    int               `json:"looked" doc:"Number of open dead letters that both policies classified: the newest, except those that an operator parked."`
	More      bool              `json:"more,omitempty" doc:"Whether there are more, which were not compared."`
	Changed   []worker.Rejudged `json:"changed" doc:"Changed decisions, most frequent first. Both policies are evaluated without masked data and without the switches of automatic redelivery."`
}

const (
	// maxTimes is the maximum number of times in a decision.
	maxTimes = 10
	// maxSampled is the maximum number of open dead letters on which a draft is tried, and sampleBudget is the maximum
	// time for that.
	maxSampled   = 1000
	samplePage   = 100
	sampleBudget = 2 * time.Second
	// maxDraftSettings is the maximum number of values of a draft. The time and memory of the comparison with the policy
	// in force grow with that number.
	maxDraftSettings = 10_000
)

// SampleInput is an error to classify.
type SampleInput struct{ Body SampleError }

// DraftInput is a draft of the policy.
type DraftInput struct{ Body PolicyDraft }

// Operations on the policy.
var (
	GetPolicy     = Operation[None, PolicyInForce]{"get-policy", http.MethodGet, "/api/policy"}
	TestPolicy    = Operation[SampleInput, SampleJudgement]{"test-policy", http.MethodPost, "/api/policy/test"}
	PreviewPolicy = Operation[DraftInput, PolicyPreview]{"preview-policy", http.MethodPost, "/api/policy/preview"}
)

func (s *service) registerPolicy(api huma.API) {
	tags := []string{policyTag}
	get := huma.Operation{
		Tags:        tags,
		Summary:     "Get the policy in force, with the file and line of each value",
		Description: "A caller who is limited to some queues gets what decides about all queues, or only about theirs.",
		Errors:      []int{503},
	}
	example(&get, http.StatusOK, PolicyInForce{
		Version: "3d5ebe1c5944", Rules: []PolicyRule{{
			Name: "bank-down", Class: "outage",
			Match: policy.Match{Status: policy.Words{"503"}}, Does: "conditional",
			From: "dlq-routing.yaml:2", Text: "{name: bank-down, match: {status: 503}, class: outage}",
		}},
		Settings: []PolicySetting{{File: "retry-policies", Path: "defaults.timeout", Value: "10s", From: "built in"}},
	})
	register(s, api, GetPolicy, get, func(ctx context.Context, _ *None) (*PolicyInForce, error) {
		return policyInForce(s.Planner().Policy(), access.ScopeOf(ctx)), nil
	})

	test := huma.Operation{
		Tags: tags, Summary: "Try an error on the policy in force", Errors: []int{400, 422, 503},
	}
	example(&test, http.StatusOK, SampleJudgement{
		Class: "outage", Rule: "bank-down", Strategy: "conditional",
		Times: []time.Time{time.Date(2026, 3, 2, 8, 1, 0, 0, time.UTC)},
	})
	register(s, api, TestPolicy, test, func(_ context.Context, in *SampleInput) (*SampleJudgement, error) {
		return classify(s.Planner(), &in.Body, time.Now()), nil
	})

	preview := huma.Operation{
		Tags: tags, Summary: "Preview a change of the policy",
		Description: "Checks a new version of a file and compares it with the policy in force: values, behaviour, and " +
			"decisions for the newest open dead letters. Nothing is stored. An invalid file answers 422, with one error " +
			"for each mistake, with file and line. Answers 409 while another preview is in progress.",
		Errors: []int{400, 409, 413, 422, 503}, MaxBodyBytes: 1 << 20,
	}
	example(&preview, http.StatusOK, PolicyPreview{
		Values:    []string{"dlq-routing classes.unknown.strategy: manual -> immediate"},
		Behaviour: []string{"every queue, class unknown: strategy manual -> immediate"}, Looked: 412,
		Changed: []worker.Rejudged{{
			From: worker.Judgement{Class: "unknown", Rule: "none", Strategy: "manual"},
			To:   worker.Judgement{Class: "unknown", Rule: "none", Strategy: "immediate"}, Also: []string{}, Entries: 31,
		}},
	})
	register(s, api, PreviewPolicy, preview, s.previewPolicy)
}

func (s *service) previewPolicy(ctx context.Context, in *DraftInput) (*PolicyPreview, error) {
	if !slices.Contains(s.DraftFiles, in.Body.File) {
		return nil, huma.Error422UnprocessableEntity("unknown file of the policy", &huma.ErrorDetail{
			Location: "body.file", Message: "must be one of " + strings.Join(s.DraftFiles, ", "), Value: in.Body.File,
		})
	}
	if !s.previewing.TryLock() {
		return nil, huma.Error409Conflict("another preview of a policy change is in progress; try again")
	}
	defer s.previewing.Unlock()
	next, err := s.Draft(in.Body.File, in.Body.Text)
	if err != nil {
		var mistakes []error
		for line := range strings.SplitSeq(err.Error(), "\n") {
			mistakes = append(mistakes, &huma.ErrorDetail{Location: "body.text", Message: line})
		}
		return nil, huma.Error422UnprocessableEntity("the file is invalid", mistakes...)
	}
	if n := len(next.Policy().Settings()); n > maxDraftSettings {
		return nil, huma.Error422UnprocessableEntity(fmt.Sprintf("the draft has %d values, and a preview takes at most %d; "+
			"compare the files with \"dlqd config diff\"", n, maxDraftSettings))
	}
	inForce := s.Planner()
	out := &PolicyPreview{
		Values: []string{}, Behaviour: append([]string{}, strategy.BehaviourDiff(inForce, next)...),
		Changed: []worker.Rejudged{},
	}
	for _, c := range policy.Diff(inForce.Policy(), next.Policy()) {
		out.Values = append(out.Values, c.String())
	}
	if err := s.compareOnOpen(ctx, inForce, next, out); err != nil {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}

// compareOnOpen compares the decisions of two policies on the newest open dead letters, up to maxSampled and within
// sampleBudget; out.More reports whether it left some out. It evaluates the rules on the data that the caller may see:
// a rule that matched a masked value would reveal that value.
func (s *service) compareOnOpen(ctx context.Context, inForce, next *strategy.Planner, out *PolicyPreview) error {
	changes := map[[2]worker.Judgement]*worker.Rejudged{}
	until := time.Now().Add(sampleBudget)
	page := deadletter.Page{
		Filter: filter.Filter{Status: []string{string(deadletter.Pending), string(deadletter.Manual)}}, Limit: samplePage,
	}
	for {
		list, err := s.Store.List(ctx, page)
		if err != nil {
			return err
		}
		if len(list) == 0 {
			break
		}
		chosen := filter.Filter{IDs: make([]string, len(list))}
		for i := range list {
			chosen.IDs[i] = list[i].ID.String()
		}
		page.Cursor = list[len(list)-1].ID
		entries, err := s.Store.FindEntries(ctx, chosen.JSON(), nil)
		if err != nil {
			return err
		}
		now := time.Now()
		for i := range entries {
			if err := ctx.Err(); err != nil {
				return err
			}
			if out.More = time.Now().After(until); out.More {
				break
			}
			e := &entries[i]
			if e.ParkedBy != nil || !e.Status.Open() { // parked by an operator or a worker, or closed meanwhile
				continue
			}
			out.Looked++
			facts := factsOf(e)
			rescues := 0
			// An entry with the rule worker-lost keeps that rule, which no rule of a policy overrides.
			if text(e.Rule) == policy.RuleWorkerLost {
				rescues = strategy.ManyRescues
			}
			var decisions [2]worker.Judgement
			for k, planner := range []*strategy.Planner{inForce, next} {
				d := planner.Decide(&strategy.Entry{
					Facts: facts, ID: e.ID, Rule: text(e.Rule), RetryCount: int(e.DLQRetryCount),
					LastFailedAt: e.LastFailedAt, Rescues: rescues,
				}, now)
				decisions[k] = worker.Judgement{Class: string(d.Class), Rule: d.Rule, Strategy: d.Strategy}
			}
			if decisions[0] == decisions[1] {
				continue
			}
			if changes[decisions] == nil {
				changes[decisions] = &worker.Rejudged{From: decisions[0], To: decisions[1], Also: []string{}, Example: e.ID}
			}
			changes[decisions].Entries++
		}
		if out.More = out.More || len(list) == samplePage &&
			(out.Looked >= maxSampled || time.Now().After(until)); out.More || len(list) < samplePage {
			break
		}
	}
	for _, c := range changes {
		out.Changed = append(out.Changed, *c)
	}
	slices.SortFunc(out.Changed, func(a, b worker.Rejudged) int {
		return cmp.Or(cmp.Compare(b.Entries, a.Entries), cmp.Compare(a.Example.String(), b.Example.String()))
	})
	return nil
}

// factsOf returns the facts about an entry that rules evaluate, limited to data that the caller may see.
func factsOf(e *deadletter.Entry) strategy.Facts {
	event := e.OriginalEvent
	if e.EditedEvent != nil {
		event = e.EditedEvent
	}
	of := struct {
		Payload json.RawMessage   `json:"payload"`
		Headers map[string]string `json:"headers"`
	}{Payload: event}
	if e.JobKind == message.JobKind {
		of.Payload = nil
		_ = json.Unmarshal(event, &of) // an event edited into another form has no payload and no headers
	}
	return strategy.Facts{
		Type: text(e.ErrorType), Code: text(e.ErrorCode), Title: text(e.ErrorTitle), Message: text(e.ErrorMessage),
		Class:   riverdlq.Class(text(e.ReportedClass)),
		Panic:   strategy.IsPanic(text(e.ErrorStackTrace), text(e.ErrorType), e.RiverJobID < 0), // < 0: a record
		Context: e.ErrorContext, Kind: e.Kind, Queue: e.Queue,
		Source: text(e.Source), Payload: of.Payload, Headers: of.Headers,
	}
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// policyInForce returns the parts of a policy that a caller with the given scope may see.
func policyInForce(p *policy.Policy, scope access.Scope) *PolicyInForce {
	queues := slices.Concat(p.QueueNames(), slices.Collect(maps.Keys(p.Routing.Queues)),
		slices.Collect(maps.Keys(p.Workers.Queues)), slices.Collect(maps.Keys(p.Monitoring.Queues)),
		slices.Collect(maps.Keys(p.Breakers.RiverQueues)))
	for _, part := range scope {
		queues = append(queues, part.Queues...)
	}
	out := &PolicyInForce{Version: p.Version(), Rules: []PolicyRule{}, Settings: []PolicySetting{}}
	texts := map[string]string{}
	for _, setting := range p.Settings() {
		text := setting.Text()
		texts[setting.File+" "+setting.Path] = text
		if scope != nil && !concerns(p, scope, queues, &setting) {
			continue
		}
		out.Settings = append(out.Settings, PolicySetting{
			File: setting.File, Path: setting.Path, Value: text, From: p.Place(setting.Origin),
		})
	}
	for i, rule := range p.Routing.Rules {
		path := fmt.Sprintf("rules[%d]", i)
		shown, text := rule.Match, texts["dlq-routing "+path]
		if scope != nil && len(rule.Match.Queue) > 0 {
			shown.Queue = nil
			for _, pattern := range rule.Match.Queue {
				if slices.ContainsFunc(queues, func(name string) bool {
					return scope.HasQueue(name) && policy.MatchPattern(pattern, name)
				}) {
					shown.Queue = append(shown.Queue, pattern)
				}
			}
			if len(shown.Queue) == 0 {
				continue
			}
			if len(shown.Queue) < len(rule.Match.Queue) {
				text = ""
			}
		}
		out.Rules = append(out.Rules, PolicyRule{
			Name: rule.Name, Class: rule.Class, Match: shown, Does: rule.Plan.Strategy,
			From: p.Place(p.Where("dlq-routing", path)), Text: text,
		})
	}
	return out
}

// concerns reports whether a caller with a limited scope may see a setting: the setting applies to all queues, or only
// to queues of the scope.
func concerns(p *policy.Policy, scope access.Scope, queues []string, s *policy.Setting) bool {
	part, rest, _ := strings.Cut(s.Path, ".")
	switch s.File + " " + part {
	case "dlq-routing classes", "dlq-routing strategies", "dlq-routing smartRetry", "dlq-routing redeliveriesPerSecond",
		"circuit-breaker defaults", "worker-pool defaults", "monitoring defaults":
		return true
	case "retry-policies queues", "dlq-routing queues", "worker-pool queues", "monitoring queues",
		"circuit-breaker riverQueues":
		return ofNames(rest, queues, scope.HasQueue)
	case "retry-policies destinations", "circuit-breaker destinations":
		return ofNames(rest, slices.Collect(maps.Keys(p.Destinations)), func(destination string) bool {
			users := p.QueuesOf(destination)
			return len(users) > 0 && !slices.ContainsFunc(users, func(queue string) bool { return !scope.HasQueue(queue) })
		})
	}
	return false
}

// ofNames reports whether a path begins with one of the names, and shown returns true for all names with which it
// begins. A path may begin with several names, because names may contain dots.
func ofNames(path string, names []string, shown func(name string) bool) bool {
	found := false
	for _, name := range names {
		if path == name || strings.HasPrefix(path, name+".") {
			if !shown(name) {
				return false
			}
			found = true
		}
	}
	return found
}

// classify returns a planner's decision on an error that occurs now. It also returns the times of the redeliveries, if
// each of them fails with the same error.
func classify(planner *strategy.Planner, in *SampleError, now time.Time) *SampleJudgement {
	facts := strategy.Facts{
		Type: in.Type, Code: in.Code, Message: in.Message, Panic: in.Panic, Class: riverdlq.Class(in.Class),
		Kind: in.Kind, Queue: in.Queue, Source: in.Source, Payload: in.Payload,
	}
	if in.Status > 0 {
		facts.Context = json.RawMessage(fmt.Sprintf(`{"status": %d}`, in.Status))
	}
	e := &strategy.Entry{Facts: facts, LastFailedAt: now}
	d := planner.Decide(e, now)
	out := &SampleJudgement{
		Class: string(d.Class), Rule: d.Rule, Strategy: d.Strategy, Reason: d.Reason,
		WaitingFor: d.WaitingFor, Times: []time.Time{}, Assignee: d.Assignee, Tags: d.Tags,
	}
	most := d.MaxRetries
	if most == 0 {
		most = 5 // the default maxRetries of an entry
	}
	for ; !d.Next.IsZero() && len(out.Times) < min(most, maxTimes); d = planner.Decide(e, e.LastFailedAt) {
		out.Times = append(out.Times, d.Next)
		e.RetryCount++
		e.Rule, e.LastFailedAt = d.Rule, d.Next
	}
	return out
}
