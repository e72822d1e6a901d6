package api

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/worker"
	"github.com/dlqd/dlqd/riverdlq"
)

// PolicyInForce is the policy in force.
type PolicyInForce struct {
	Version  string          `json:"version" doc:"The Git commit of its files (-dirty-…: they were changed since), or a hash of what is in force."`
	Rules    []PolicyRule    `json:"rules" doc:"The rules that classify errors, in order: the first that matches decides."`
	Settings []PolicySetting `json:"settings" doc:"Every value in force. Secrets are hidden."`
}

// PolicyRule is a rule and its place in the policy's files.
type PolicyRule struct {
	Name  string       `json:"name" doc:"The rule."`
	Class string       `json:"class,omitempty" doc:"The class that it gives; absent: the rules that follow, or the built-in table, choose it."`
	Match policy.Match `json:"match" doc:"What errors it matches: all that is given."`
	Does  string       `json:"does,omitempty" doc:"The strategy that it chooses; absent: that of the kind, queue or class."`
	From  string       `json:"from" doc:"File and line."`
	Text  string       `json:"text" doc:"All of it, as the file has it."`
}

// PolicySetting is one value in force.
type PolicySetting struct {
	File  string `json:"file" doc:"Its file, without an ending."`
	Path  string `json:"path" doc:"Where in it." example:"queues.orders.timeout"`
	Value string `json:"value" doc:"As the file would have it."`
	From  string `json:"from" doc:"File and line, or built in."`
}

// SampleError is an error to try the rules on.
type SampleError struct {
	Type    string          `json:"type,omitempty" maxLength:"255" doc:"Type of the error." example:"TIMEOUT_ERROR"`
	Code    string          `json:"code,omitempty" maxLength:"255" doc:"Its code."`
	Message string          `json:"message,omitempty" maxLength:"8192" doc:"Its message."`
	Status  int             `json:"status,omitempty" minimum:"100" maximum:"599" doc:"The HTTP status that was answered."`
	Panic   bool            `json:"panic,omitempty" doc:"The worker panicked."`
	Class   string          `json:"class,omitempty" enum:"transient,rate_limited,outage,validation,malformed,unauthorized,not_found,business,code_bug,unknown" doc:"What the worker called it."`
	Kind    string          `json:"kind,omitempty" maxLength:"255" doc:"Of the message or job."`
	Queue   string          `json:"queue,omitempty" maxLength:"127" doc:"Its queue."`
	Source  string          `json:"source,omitempty" maxLength:"255" doc:"Its source."`
	Payload json.RawMessage `json:"payload,omitempty" doc:"Its payload, for rules that look at it."`
}

// SampleJudgement is how the policy judges an error.
type SampleJudgement struct {
	Class      string      `json:"class" doc:"The class."`
	Rule       string      `json:"rule,omitempty" doc:"The rule that chose it; absent where the built-in table did."`
	Strategy   string      `json:"strategy" doc:"What happens next."`
	Reason     string      `json:"reason,omitempty" doc:"Why."`
	WaitingFor string      `json:"waitingFor,omitempty" doc:"What it would wait for besides the time."`
	Times      []time.Time `json:"times" doc:"When it would be looked at if it failed now, and again each time; empty where a person decides. They are jittered: about."`
	Assignee   string      `json:"assignee,omitempty" doc:"Who would look after it."`
	Tags       []string    `json:"tags,omitempty" doc:"Tags that it would get."`
}

// PolicyDraft is a proposed change of one file of the policy.
type PolicyDraft struct {
	File string `json:"file" maxLength:"255" doc:"The file that it would be in place of, without an ending; one of the environment's with its folder." example:"dlq-routing"`
	Text string `json:"text" maxLength:"131072" doc:"All of the file, as it would be: YAML or JSON."`
}

// PolicyPreview is the effect of a proposed change.
type PolicyPreview struct {
	Values    []string          `json:"values" doc:"The values that differ from those in force."`
	Behaviour []string          `json:"behaviour" doc:"What would be done otherwise, with which errors, in which queues."`
	Looked    int               `json:"looked" doc:"Open dead letters that both policies were asked about: the newest, but for those that a person has parked."`
	More      bool              `json:"more,omitempty" doc:"There are more, which were not looked at."`
	Changed   []worker.Rejudged `json:"changed" doc:"Those of which they think otherwise, the most first. (Neither sees what is masked, or automatic redelivery that is switched off.)"`
}

const (
	// maxTimes is the maximum number of times in a judgement.
	maxTimes = 10
	// maxSampled is how many open dead letters a draft is tried on, and sampleBudget the maximum
	// time for it.
	maxSampled   = 1000
	samplePage   = 100
	sampleBudget = 2 * time.Second
	// maxDraftSettings is the maximum number of a draft's values. The time and memory to compare a
	// draft with the policy in force grow with it.
	maxDraftSettings = 10_000
)

type policyOutput struct{ Body PolicyInForce }

type sampleInput struct{ Body SampleError }

type draftInput struct{ Body PolicyDraft }

type policyPreviewOutput struct{ Body PolicyPreview }

type judgementOutput struct{ Body SampleJudgement }

func (s *service) registerPolicy(api huma.API) {
	tags := []string{policyTag}
	get := huma.Operation{
		OperationID: "get-policy", Method: http.MethodGet, Path: "/api/policy", Tags: tags, Summary: "The policy in force, and from which file and line each value is", Errors: []int{503},
	}
	example(&get, http.StatusOK, PolicyInForce{
		Version: "3d5ebe1c5944", Rules: []PolicyRule{{Name: "bank-down", Class: "outage", Match: policy.Match{Status: policy.Words{"503"}}, Does: "conditional", From: "dlq-routing.yaml:2", Text: "{name: bank-down, match: {status: 503}, class: outage}"}},
		Settings: []PolicySetting{{File: "retry-policies", Path: "defaults.timeout", Value: "10s", From: "built in"}},
	})
	huma.Register(api, get, func(context.Context, *struct{}) (*policyOutput, error) {
		return &policyOutput{policyInForce(s.Planner().Policy())}, nil
	})

	test := huma.Operation{
		OperationID: "test-policy", Method: http.MethodPost, Path: "/api/policy/test", Tags: tags, Summary: "Try an error on the policy in force: class, rule, strategy and times", Errors: []int{400, 422, 503},
	}
	example(&test, http.StatusOK, SampleJudgement{Class: "outage", Rule: "bank-down", Strategy: "conditional", Times: []time.Time{time.Date(2026, 3, 2, 8, 1, 0, 0, time.UTC)}})
	huma.Register(api, test, func(_ context.Context, in *sampleInput) (*judgementOutput, error) {
		return &judgementOutput{judge(s.Planner(), &in.Body, time.Now())}, nil
	})

	preview := huma.Operation{
		OperationID: "preview-policy", Method: http.MethodPost, Path: "/api/policy/preview", Tags: tags, Summary: "What a change of the policy would do",
		Description: "Checks a file as it would be, and says what differs from what is in force: values, behaviour, and what becomes of the newest open dead letters. Nothing is kept. " +
			"Each mistake of the file is an error of its own, with file and line (422). One is made at a time (409).",
		Errors: []int{400, 409, 413, 422, 503}, MaxBodyBytes: 1 << 20,
	}
	example(&preview, http.StatusOK, PolicyPreview{
		Values: []string{"dlq-routing classes.unknown.strategy: manual -> immediate"}, Behaviour: []string{"every queue, class unknown: strategy manual -> immediate"}, Looked: 412,
		Changed: []worker.Rejudged{{From: worker.Judgement{Class: "unknown", Rule: "none", Strategy: "manual"}, To: worker.Judgement{Class: "unknown", Rule: "none", Strategy: "immediate"}, Also: []string{}, Entries: 31}},
	})
	huma.Register(api, preview, s.previewPolicy)
}

func (s *service) previewPolicy(ctx context.Context, in *draftInput) (*policyPreviewOutput, error) {
	if !slices.Contains(s.DraftFiles, in.Body.File) {
		return nil, huma.Error422UnprocessableEntity("there is no such file of a policy", &huma.ErrorDetail{Location: "body.file", Message: "there are: " + strings.Join(s.DraftFiles, ", "), Value: in.Body.File})
	}
	if !s.previewing.TryLock() {
		return nil, huma.Error409Conflict("a change of the policy is being tried for somebody else just now")
	}
	defer s.previewing.Unlock()
	next, err := s.Draft(in.Body.File, in.Body.Text)
	if err != nil {
		var mistakes []error
		for line := range strings.SplitSeq(err.Error(), "\n") {
			mistakes = append(mistakes, &huma.ErrorDetail{Location: "body.text", Message: line})
		}
		return nil, huma.Error422UnprocessableEntity("the file would be refused", mistakes...)
	}
	if n := len(next.Policy().Settings()); n > maxDraftSettings {
		return nil, huma.Error422UnprocessableEntity(fmt.Sprintf("a draft of %d values is too large to be tried here, which takes up to %d; dlqd config diff compares them where the files are", n, maxDraftSettings))
	}
	inForce := s.Planner()
	out := &policyPreviewOutput{PolicyPreview{Values: []string{}, Behaviour: strategy.BehaviourDiff(inForce, next), Changed: []worker.Rejudged{}}}
	for _, c := range policy.Diff(inForce.Policy(), next.Policy()) {
		out.Body.Values = append(out.Body.Values, c.String())
	}
	if err := s.tryOnOpen(ctx, inForce, next, &out.Body); err != nil {
		return nil, s.problem(ctx, err)
	}
	return out, nil
}

// tryOnOpen compares how two policies judge the newest open dead letters. It reads them as the
// caller sees them, because a rule that matched a masked value would reveal it.
func (s *service) tryOnOpen(ctx context.Context, inForce, next *strategy.Planner, out *PolicyPreview) error {
	changes := map[[2]worker.Judgement]*worker.Rejudged{}
	until := time.Now().Add(sampleBudget)
	page := deadletter.Page{Filter: filter.Filter{Status: []string{string(deadletter.Pending), string(deadletter.Manual)}}, Limit: samplePage}
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
			if e.ParkedBy != nil || !e.Status.Open() { // parked by a person, or closed since it was listed
				continue
			}
			out.Looked++
			facts := factsOf(e)
			rescues := 0
			// No rule of the policy overrides worker-lost.
			if text(e.Rule) == policy.RuleWorkerLost {
				rescues = strategy.ManyRescues
			}
			var made [2]worker.Judgement
			for k, planner := range []*strategy.Planner{inForce, next} {
				d := planner.Decide(&strategy.Entry{Facts: facts, ID: e.ID, Rule: text(e.Rule), RetryCount: int(e.DLQRetryCount), LastFailedAt: e.LastFailedAt, Rescues: rescues}, now)
				made[k] = worker.Judgement{Class: string(d.Class), Rule: d.Rule, Strategy: d.Strategy}
			}
			if made[0] == made[1] {
				continue
			}
			if changes[made] == nil {
				changes[made] = &worker.Rejudged{From: made[0], To: made[1], Also: []string{}, Example: e.ID}
			}
			changes[made].Entries++
		}
		if out.More = out.More || len(list) == samplePage && (out.Looked >= maxSampled || time.Now().After(until)); out.More || len(list) < samplePage {
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

// factsOf returns an entry's facts for rules, as far as the caller sees them.
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
		Class: riverdlq.Class(text(e.ReportedClass)), Panic: text(e.ErrorStackTrace) != "",
		Context: e.ErrorContext, Kind: e.Kind, Queue: e.Queue, Source: text(e.Source), Payload: of.Payload, Headers: of.Headers,
	}
}

func text(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func policyInForce(p *policy.Policy) PolicyInForce {
	out := PolicyInForce{Version: p.Version(), Rules: []PolicyRule{}, Settings: []PolicySetting{}}
	texts := map[string]string{}
	for _, setting := range p.Settings() {
		text := setting.Text()
		texts[setting.File+" "+setting.Path] = text
		out.Settings = append(out.Settings, PolicySetting{File: setting.File, Path: setting.Path, Value: text, From: p.Place(setting.Origin)})
	}
	for i, rule := range p.Routing.Rules {
		path := fmt.Sprintf("rules[%d]", i)
		out.Rules = append(out.Rules, PolicyRule{
			Name: rule.Name, Class: rule.Class, Match: rule.Match, Does: rule.Plan.Strategy, From: p.Place(p.Where("dlq-routing", path)), Text: texts["dlq-routing "+path],
		})
	}
	return out
}

// judge returns how a planner judges an error that fails now, and again after each redelivery.
func judge(planner *strategy.Planner, in *SampleError, now time.Time) SampleJudgement {
	facts := strategy.Facts{
		Type: in.Type, Code: in.Code, Message: in.Message, Panic: in.Panic, Class: riverdlq.Class(in.Class), Kind: in.Kind, Queue: in.Queue, Source: in.Source, Payload: in.Payload,
	}
	if in.Status > 0 {
		facts.Context = json.RawMessage(fmt.Sprintf(`{"status": %d}`, in.Status))
	}
	e := &strategy.Entry{Facts: facts, LastFailedAt: now}
	d := planner.Decide(e, now)
	out := SampleJudgement{Class: string(d.Class), Rule: d.Rule, Strategy: d.Strategy, Reason: d.Reason, WaitingFor: d.WaitingFor, Times: []time.Time{}, Assignee: d.Assignee, Tags: d.Tags}
	most := d.MaxRetries
	if most == 0 {
		most = 5 // the default of an entry
	}
	for ; !d.Next.IsZero() && len(out.Times) < min(most, maxTimes); d = planner.Decide(e, e.LastFailedAt) {
		out.Times = append(out.Times, d.Next)
		e.RetryCount++
		e.Rule, e.LastFailedAt = d.Rule, d.Next
	}
	return out
}
