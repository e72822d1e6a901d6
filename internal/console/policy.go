package console

import (
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/policy"
)

type policyPage struct {
	Sentence string
	Policy   api.PolicyInForce
	Problem  string // why the current files could not be loaded
	Files    []policyFile
	Form     url.Values
	Tried    *api.SampleJudgement // the policy's decision on the error in the form
	TryError *api.Problem
	Classes  []string
	Copies   []copyText

	Today      map[string]int64 // number of today's dead letters by the rule that decided them
	TodayMore  bool             // Today counts only the newest entries
	DraftFiles []string
	WhyNot     string             // why the viewer may not preview a change
	WhyNotTest string             // why the viewer cannot test an error and sees only a part of the policy
	Draft      url.Values         // the change that the viewer entered
	Preview    *api.PolicyPreview // effect of the change
	DraftError *api.Problem
}

// policyFile is the settings of one file.
type policyFile struct {
	Name     string
	Settings []api.PolicySetting
	Own      int // number of settings that are not built in
}

func (c *Console) policy(in *request) (*view, error) {
	_, v, err := c.policyPage(in)
	return v, err
}

// previewPolicy shows the effect of a change of the policy.
func (c *Console) previewPolicy(in *request) (*done, error) {
	p, v, err := c.policyPage(in)
	if err != nil {
		return nil, err
	}
	p.Draft = in.PostForm
	p.Preview, err = call(in, api.PreviewPolicy, api.DraftInput{
		Body: api.PolicyDraft{File: p.Draft.Get("file"), Text: p.Draft.Get("text")},
	})
	if problem, ok := errors.AsType[*api.Problem](err); ok && problem.Status < http.StatusInternalServerError {
		p.Preview, p.DraftError, v.Status, err = nil, problem, problem.Status, nil
	}
	return &done{View: v}, err
}

func (c *Console) policyPage(in *request) (*policyPage, *view, error) {
	p := &policyPage{
		WhyNot:     missingRoleIn(in.me(), access.Operator, ""),
		WhyNotTest: missingRoleIn(in.me(), access.Reader, ""), Form: in.URL.Query(),
		DraftFiles: policy.Source{Env: c.Environment}.DraftFiles(),
		Copies: copies("", "SELECT dlq.policy_version(); SELECT * FROM dlq.policy_changes('7 days'); SELECT * FROM dlq.by_rule('24 hours');", //nolint:unqueryvet // for people
			in.curl(api.GetPolicy.Path, address(api.GetPolicies, api.OverInput{Over: "7d"}),
				address(api.GetRules, api.OverInput{Over: "24h"}))),
	}
	inForce, err := call(in, api.GetPolicy, api.None{})
	if err != nil {
		return nil, nil, err
	}
	p.Policy = *inForce
	for name := range classes {
		p.Classes = append(p.Classes, name)
	}
	slices.Sort(p.Classes)
	for _, s := range p.Policy.Settings {
		if n := len(p.Files); n == 0 || p.Files[n-1].Name != s.File {
			p.Files = append(p.Files, policyFile{Name: s.File})
		}
		f := &p.Files[len(p.Files)-1]
		f.Settings = append(f.Settings, s)
		if s.From != "built in" {
			f.Own++
		}
	}
	midnight := in.today()
	var rules api.Report[analytics.RuleCount]
	var health api.Health
	if err := inParallel(
		readIfAllowed(in, api.GetRules,
			api.OverInput{Over: strconv.Itoa(int(in.now.Sub(midnight).Minutes())+1) + "m"}, &rules),
		readIfAllowed(in, api.GetHealth, api.None{}, &health),
	); err != nil {
		return nil, nil, err
	}
	p.Today = map[string]int64{}
	for _, r := range rules.Rows {
		p.Today[r.Rule], p.TodayMore = r.Entries, r.More
	}
	for _, part := range health.Parts {
		if part.Name == "policy" && !part.OK {
			p.Problem = part.Detail
		}
	}
	v := &view{Template: "policy", Title: "Policy", Data: p}
	if len(p.Form) > 0 {
		if err := p.testError(in); err != nil {
			return nil, nil, err
		}
	}
	if p.TryError != nil {
		v.Status = p.TryError.Status
	}
	p.Sentence = p.summary()
	return p, v, nil
}

// testError asks the API for the policy's decision on the error in the form.
func (p *policyPage) testError(in *request) error {
	sample := api.SampleError{
		Type: p.Form.Get("type"), Code: p.Form.Get("code"), Message: p.Form.Get("message"), Class: p.Form.Get("class"),
		Kind: p.Form.Get("kind"), Queue: p.Form.Get("queue"), Source: p.Form.Get("source"),
		Panic: p.Form.Get("panic") != "",
	}
	if text := strings.TrimSpace(p.Form.Get("status")); text != "" {
		var err error
		if sample.Status, err = strconv.Atoi(text); err != nil || sample.Status == 0 {
			p.TryError = &api.Problem{Status: http.StatusUnprocessableEntity, Detail: "the HTTP status must be a number, " +
				"such as 503"}
			return nil //nolint:nilerr // the page shows it
		}
	}
	if text := strings.TrimSpace(p.Form.Get("payload")); text != "" {
		if !json.Valid([]byte(text)) {
			p.TryError = &api.Problem{Status: http.StatusUnprocessableEntity, Detail: "the payload is not JSON"}
			return nil
		}
		sample.Payload = json.RawMessage(text)
	}
	var err error
	p.Tried, err = call(in, api.TestPolicy, api.SampleInput{Body: sample})
	if problem, ok := errors.AsType[*api.Problem](err); ok && problem.Status < http.StatusInternalServerError {
		p.Tried, p.TryError = nil, problem
		return nil
	}
	return err
}

func (p *policyPage) summary() string {
	own := 0
	for _, f := range p.Files {
		own += f.Own
	}
	text := "Version " + p.Policy.Version + " is in force: " + plural(len(p.Policy.Rules), "rule") + " and " +
		plural(own, "value") + " from files; other values are built in."
	if p.WhyNotTest != "" {
		text += " The page shows what applies to all queues or to yours."
	}
	if p.Problem != "" {
		text = "The files have errors and are not in force. " + text
	}
	return text
}

// Own reports whether a rule is in the policy's files rather than built in.
func (p *policyPage) Own(rule string) bool {
	return slices.ContainsFunc(p.Policy.Rules, func(r api.PolicyRule) bool { return r.Name == rule })
}

// MatchWords describes the conditions of a rule, in order.
func (p *policyPage) MatchWords(r api.PolicyRule) []string {
	var words []string
	for _, w := range []struct {
		name  string
		texts []string
	}{
		{"type", r.Match.Type},
		{"code", r.Match.Code},
		{"status", r.Match.Status},
		{"kind", r.Match.Kind},
		{"queue", r.Match.Queue},
		{"source", r.Match.Source},
		{"message contains", one(r.Match.Message)},
		{"when", one(r.Match.When)},
	} {
		if len(w.texts) > 0 {
			words = append(words, w.name+" "+strings.Join(w.texts, " or "))
		}
	}
	return words
}

func one(text string) []string {
	if text == "" {
		return nil
	}
	return []string{text}
}
