package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/riverdlq"
)

// PolicyInForce is the policy that is in force.
type PolicyInForce struct {
	Version  string          `json:"version" doc:"The Git commit of its files (-dirty: they were changed since), or a hash of what is in force."`
	Rules    []PolicyRule    `json:"rules" doc:"The rules that classify errors, in order: the first that matches decides."`
	Settings []PolicySetting `json:"settings" doc:"Every value in force. Secrets are hidden."`
}

// PolicyRule is a rule, and where it is written.
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

// SampleJudgement is what the policy makes of an error.
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

// maxTimes bounds the times that a judgement names.
const maxTimes = 10

type policyOutput struct{ Body PolicyInForce }

type sampleInput struct{ Body SampleError }

type judgementOutput struct{ Body SampleJudgement }

func (s *service) registerPolicy(api huma.API) {
	tags := []string{"policy"}
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

// judge is what a planner makes of an error that fails now, and again each time that it is redelivered.
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
		most = 5 // as an entry has that nobody says otherwise of
	}
	for ; !d.Next.IsZero() && len(out.Times) < min(most, maxTimes); d = planner.Decide(e, e.LastFailedAt) {
		out.Times = append(out.Times, d.Next)
		e.RetryCount++
		e.Rule, e.LastFailedAt = d.Rule, d.Next
	}
	return out
}
