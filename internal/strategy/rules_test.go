package strategy

import (
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"pgregory.net/rapid"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

func plannerOf(t *testing.T, routing string) *Planner {
	t.Helper()
	p, err := NewPlanner(policytest.Load(t, policytest.Files{"dlq-routing": routing}), nil)
	require.NoError(t, err)
	return p
}

func TestRules_FirstMatchWins(t *testing.T) {
	t.Parallel()
	p := plannerOf(t, `
rules:
  - {name: exact, match: {type: CardDeclined, code: [51, "05"]}, class: business}
  - {name: glob, match: {type: "*Declined"}, class: validation}
  - {name: text, match: {message: '(?i)^out of .* today'}, class: outage}
  - {name: kind, match: {kind: payment.*, queue: [a, b]}, class: malformed}
  - {name: source, match: {source: legacy-*, status: [418, 5xx]}, class: rate_limited}
  - {name: when, match: {when: 'context.region == "eu" && context.tries > 2 && status == 0 && len(message) < 100'}, class: transient}
  - {name: bug, match: {message: known bug}, class: unknown}
  - {name: call, match: {code: [ABORTED, "*late"]}, class: business}
  - {name: account, match: {when: 'context.account == 9007199254740993 || context.ids[0] == "12345678901234567891"'}, class: unknown}
`)
	for _, test := range []struct {
		facts Facts
		rule  string
	}{
		{Facts{Type: "CardDeclined", Code: "51"}, "exact"},
		{Facts{Type: "CardDeclined", Code: "05"}, "exact"},
		{Facts{Type: "CardDeclined", Code: "5"}, "glob"},
		{Facts{Type: "my.CardDeclined"}, "glob"},
		{Facts{Type: "Declined: no"}, "business"}, // a line of the built-in table
		{Facts{Message: "Out of order today"}, "text"},
		{Facts{Message: "We are out of order today"}, "none"},
		{Facts{Kind: "payment.captured", Queue: "b"}, "kind"},
		{Facts{Kind: "payment.captured", Queue: "c"}, "none"},
		{Facts{Source: "legacy-shop", Context: json.RawMessage(`{"status": 503}`)}, "source"},
		{Facts{Source: "legacy-shop", Code: "418"}, "source"},
		{Facts{Source: "legacy-shop", Code: "404"}, "http-status"},
		{Facts{Context: json.RawMessage(`{"region": "eu", "tries": 3}`)}, "when"},
		{Facts{Context: json.RawMessage(`{"region": "eu", "tries": 2}`)}, "none"},
		// an expression that fails does not match
		{Facts{Context: json.RawMessage(`{"region": "eu", "tries": "many"}`)}, "none"},
		{Facts{Context: json.RawMessage(`["eu"]`)}, "none"},
		{Facts{Context: json.RawMessage(`{"account": 9007199254740993}`)}, "account"},
		{Facts{Context: json.RawMessage(`{"account": 9007199254740992}`)}, "none"}, // equal as a float64
		{Facts{Context: json.RawMessage(`{"ids": [12345678901234567891]}`)}, "account"},
		{Facts{Context: json.RawMessage(`{"ids": [12345678901234567890]}`)}, "none"},
		{Facts{Context: json.RawMessage(`{"grpcStatus": "ABORTED"}`)}, "call"},
		// Rules read only the first maxMatchBytes of a gRPC status, as they do with every text.
		{Facts{Context: json.RawMessage(`{"grpcStatus": "` + strings.Repeat("x", maxMatchBytes) + `late"}`)}, "none"},
		{Facts{}, "none"},
		{Facts{Class: riverdlq.ClassOutage, Message: "a known bug"}, "bug"}, // rules come before the worker's class
		{Facts{Panic: true, Message: "a known bug"}, "bug"},
	} {
		_, rule, _ := p.Classify(test.facts)
		require.Equal(t, test.rule, rule, "%+v", test.facts)
	}
}

func TestPlan_NarrowestScopeWins(t *testing.T) {
	t.Parallel()
	p := plannerOf(t, `
rules:
  - {name: r, match: {message: x}, class: transient, plan: {maxRetries: 9}}
strategies:
  immediate: {maxRetries: 4, delays: [1s]}
  conditional: {conditions: {cpuBelow: 50}}
classes:
  transient: {jitter: 0.5}
  unknown: {strategy: conditional, conditions: {probes: 2}}
queues:
  mails: {maxRetries: 2, classes: {transient: {strategy: scheduled, hours: [5]}}}
`)
	rule := p.ruleNamed("r")
	got := p.Plan("transient", "orders", "", nil)
	require.Equal(t, Immediate, got.Strategy, "a plan keeps fields that a narrower one does not set")
	require.Equal(t, 4, got.MaxRetries)
	require.InDelta(t, 0.5, *got.Jitter, 0)
	require.Equal(t, []time.Duration{time.Second}, got.Delays)
	got = p.Plan("transient", "mails", "", nil)
	require.Equal(t, Scheduled, got.Strategy)
	require.Equal(t, []int{5}, got.Hours)
	require.Equal(t, 2, got.MaxRetries)
	require.Equal(t, 9, p.Plan("transient", "mails", "", rule).MaxRetries)
	got = p.Plan("unknown", "orders", "", nil)
	require.InDelta(t, 50, *got.Conditions.CPUBelow, 0, "conditions are filled key by key")
	require.InDelta(t, 85, *got.Conditions.MemoryBelow, 0)
	require.True(t, *got.Conditions.Breaker)
	require.Equal(t, 2, got.Conditions.Probes)
	require.Equal(t, Manual, p.Plan("nonsense", "orders", "", nil).Strategy)
}

// Operators write the rules, and errors are untrusted. In spite of that, every error gets a class.
func TestClassify_EveryErrorGetsAClass(t *testing.T) {
	t.Parallel()
	p := plannerOf(t, `
rules:
  - {name: nested, match: {message: '(a+)+$', type: '*a*a*a*a*b'}, class: outage}
  - {name: deep, match: {when: 'context.a.b.c == "x" || lower(string(context.x)) == "y" || message contains "z"'}, class: business}
`)
	rapid.Check(t, func(rt *rapid.T) {
		f := Facts{
			Type: rapid.String().Draw(rt, "type"), Code: rapid.String().Draw(rt, "code"),
			Message: rapid.String().Draw(rt, "message"),
			Context: json.RawMessage(rapid.SampledFrom([]string{
				"", "{", "null", "[]", `{"a": 1}`, `{"a": {"b": []}}`,
				`{"x": {"y": 1}}`, `{"status": 1e99}`, `{"status": "503"}`,
			}).Draw(rt, "context")),
		}
		class, rule, _ := p.Classify(f)
		require.Contains(rt, riverdlq.Classes(), class)
		require.NotEmpty(rt, rule)
	})
	for name, f := range map[string]Facts{
		"a pattern with exponential backtracking": {
			Type:    strings.Repeat("a", 1<<20),
			Message: strings.Repeat("a", 1<<20) + "!",
		},
		"a large context": {Context: json.RawMessage(`{"a": "` + strings.Repeat("x", 1<<20) + `"}`)},
	} {
		class, _, _ := p.Classify(f)
		require.Equal(t, riverdlq.ClassUnknown, class, name)
	}
}

func TestRules_RejectUnboundedExpressions(t *testing.T) {
	t.Parallel()
	for _, expression := range []string{
		`any(1..1000000000, # > 5)`, `map([1], # * 2) == [2]`, `repeat("x", 1000000000) == ""`, `reduce(1..10, #acc + #) > 3`,
		`filter(context.list, # > 1) == []`, `1..1000000000 == [1]`, `message matches context.pattern`,
		strings.Repeat(`context.a == 1 || `, 100) + "true", `message + "x"`,
	} {
		_, err := compileExpression(expression)
		require.Error(t, err, expression)
	}
	_, err := compileExpression(`message matches "^a+$" && context["some key"] in [1, 2] && context?.a?.b contains "x"`)
	require.NoError(t, err)
}

func TestNextHour_HandlesDaylightSavingChanges(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ now, want string }{
		{"2026-11-21T10:00:00Z", "2026-11-22T01:00:00Z"}, // 02:00 in Berlin, the next day
		{"2026-11-22T01:00:00Z", "2026-11-22T02:00:00Z"}, // 02:00 has begun: 03:00
		{"2026-11-22T02:10:00Z", "2026-11-23T01:00:00Z"},
		{"2026-03-28T23:00:00Z", "2026-03-29T01:00:00Z"}, // there is no 02:00 on this day: 03:00
		{"2026-10-24T22:10:00Z", "2026-10-25T00:00:00Z"}, // 02:00, summer time
		{"2026-10-25T00:10:00Z", "2026-10-25T01:00:00Z"}, // 02:00 again, winter time
		{"2026-10-25T01:10:00Z", "2026-10-25T02:00:00Z"}, // 03:00
	} {
		now, err := time.Parse(time.RFC3339, test.now)
		require.NoError(t, err)
		require.Equal(t, test.want, NextHour([]int{2, 3}, "Europe/Berlin", now).UTC().Format(time.RFC3339), test.now)
	}
	require.True(t, NextHour(nil, "UTC", time.Now()).IsZero())
}

// An entry failed before the off-peak hour, and is decided within that hour. It is redelivered in the rest of the hour.
func TestScheduled_UsesRestOfCurrentHour(t *testing.T) {
	t.Parallel()
	night := func(clock string) time.Time {
		at, err := time.Parse(time.RFC3339, "2026-11-22T"+clock+":00Z")
		require.NoError(t, err)
		return at
	}
	for _, test := range []struct {
		failed, judged string
		random         float64
		want           time.Time
	}{
		{"01:50", "02:10", 0.5, night("02:30")},
		{"01:50", "02:30", 0.5, night("02:30")},
		{"01:50", "02:31", 0.5, night("02:30").AddDate(0, 0, 1)}, // the entry's random time within the hour is over
		{"02:05", "02:10", 0.5, night("02:30").AddDate(0, 0, 1)}, // the entry failed within the hour
		{"01:50", "03:10", 0.99, night("02:59").AddDate(0, 0, 1)},
	} {
		s := &scheduled{immediate{random: func(*Entry) float64 { return test.random }}}
		at, waitingFor := s.First(&Entry{LastFailedAt: night(test.failed)}, &policy.Plan{Hours: []int{2}}, night(test.judged))
		require.Empty(t, waitingFor)
		require.Equal(t, test.want, at.UTC().Truncate(time.Minute), "%+v", test)
	}
}

func TestScheduled_RetriesWithinOffPeakHours(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		random := rapid.Float64Range(0, 0.9999).Draw(rt, "random")
		p := &scheduled{immediate{random: func(*Entry) float64 { return random }}}
		zone := rapid.SampledFrom([]string{
			"UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe",
			"Asia/Kathmandu", "Pacific/Apia",
		}).Draw(rt, "zone")
		hours := rapid.SliceOfNDistinct(rapid.IntRange(0, 23), 1, 5, rapid.ID).Draw(rt, "hours")
		now := time.Unix(rapid.Int64Range(1_700_000_000, 1_900_000_000).Draw(rt, "now"), 0)
		policyPlan := policy.Plan{Hours: hours, TimeZone: zone}
		failed := now.Add(-time.Duration(rapid.Int64Range(0, int64(3*time.Hour)).Draw(rt, "age")))
		at, _ := p.First(&Entry{LastFailedAt: failed}, &policyPlan, now)
		if soon, _ := p.First(&Entry{LastFailedAt: failed}, &policyPlan, failed); !soon.Before(now) {
			require.Equal(rt, soon, at, "a later decision gives the same time if that has not passed")
		}
		location, err := time.LoadLocation(zone)
		require.NoError(rt, err)
		require.False(rt, at.Before(now))
		require.Less(rt, at.Sub(now), 50*time.Hour, "an hour that is skipped comes the next day")
		begins := at.In(location).Truncate(time.Minute)
		for begins.Minute() != 0 || !slices.Contains(hours, begins.Hour()) {
			begins = begins.Add(-time.Minute)
			require.Less(rt, at.Sub(begins), 2*time.Hour, "%s is in none of the hours %v", at.In(location), hours)
		}
	})
}

func TestPlan_KindOverridesQueue(t *testing.T) {
	t.Parallel()
	p := plannerOfFiles(t, policytest.Files{"dlq-routing": `
queues:
  mails: {plan: {strategy: scheduled, maxRetries: 2}, classes: {outage: {strategy: conditional}}}
kinds:
  "report.*": {plan: {strategy: immediate, delays: [7s]}, classes: {code_bug: {strategy: manual}}, maxRetries: 4}
rules:
  - {name: r, match: {kind: report.daily}, plan: {strategy: conditional}}
`})
	require.Equal(t, Scheduled, p.Plan("unknown", "mails", "k", nil).Strategy, "the queue's plan applies to every class")
	require.Equal(t, 2, p.Plan("unknown", "mails", "k", nil).MaxRetries)
	require.Equal(t, Conditional, p.Plan("outage", "mails", "k", nil).Strategy,
		"the queue's plan for the class overrides it")
	got := p.Plan("outage", "mails", "report.daily", nil)
	require.Equal(t, Immediate, got.Strategy, "the kind's plan overrides the queue's")
	require.Equal(t, []time.Duration{7 * time.Second}, got.Delays)
	require.Equal(t, 4, got.MaxRetries)
	require.Equal(t, Manual, p.Plan("code_bug", "mails", "report.daily", nil).Strategy,
		"the kind's plan for the class overrides it")
	require.Equal(t, Conditional, p.Plan("code_bug", "mails", "report.daily", p.ruleNamed("r")).Strategy,
		"the rule's plan overrides all")
}

// A rule without a class decides what happens next, while later rules or the table decide the class.
func TestRules_RuleWithoutClassLeavesClassToLaterRules(t *testing.T) {
	t.Parallel()
	p := plannerOfFiles(t, policytest.Files{"dlq-routing": `
rules:
  - {name: nightly, match: {kind: "report.*"}, plan: {strategy: scheduled}, tags: [night]}
  - {name: second, match: {kind: "report.*"}, plan: {strategy: immediate}}
  - {name: declined, match: {message: declined}, class: business, plan: {strategy: immediate}}
`})
	now := time.Now()
	d := p.Decide(&Entry{Facts: Facts{Kind: "report.daily", Message: "declined"}, LastFailedAt: now}, now)
	require.Equal(t, "business", string(d.Class))
	require.Equal(t, "nightly", d.Rule)
	require.Equal(t, Scheduled, d.Strategy)
	require.Equal(t, []string{"night"}, d.Tags)
	d = p.Decide(&Entry{Facts: Facts{Kind: "report.daily", Message: "connection refused"}, LastFailedAt: now}, now)
	require.Equal(t, "transient", string(d.Class), "class of the built-in table")
	require.Equal(t, "nightly", d.Rule)
	d = p.Decide(&Entry{Facts: Facts{Kind: "mail", Message: "declined"}, LastFailedAt: now}, now)
	require.Equal(t, "declined", d.Rule)
}

// The delay of a conditional entry starts when the entry fails, even if the entry's conditions are not met at that
// time.
func TestConditional_DelayStartsAtFailure(t *testing.T) {
	t.Parallel()
	for _, unmet := range []string{"", "the machine is busy"} {
		p, err := NewPlanner(policytest.Load(t, nil), fakeConditions(unmet))
		require.NoError(t, err)
		now := time.Now()
		d := p.Decide(&Entry{Facts: Facts{Class: "outage"}, LastFailedAt: now}, now)
		require.Equal(t, Conditional, d.Strategy)
		require.Empty(t, d.WaitingFor, unmet)
		require.GreaterOrEqual(t, d.Next.Sub(now), time.Minute, unmet)
		require.LessOrEqual(t, d.Next.Sub(now), 73*time.Second, unmet)
	}
}

// After one rescue, the class decides. After the second one, an operator decides, and the class does not change.
func TestDecide_ParksRepeatedlyRescuedJobs(t *testing.T) {
	t.Parallel()
	p, now := plannerOfFiles(t, nil), time.Now()
	stuck := Facts{Message: "Stuck job rescued by JobRescuer"}
	for rescues, want := range map[int]struct{ strategy, rule string }{
		1: {Immediate, "stuck-job"}, 2: {Manual, policy.RuleWorkerLost}, 7: {Manual, policy.RuleWorkerLost},
	} {
		d := p.Decide(&Entry{Facts: stuck, Rescues: rescues, LastFailedAt: now}, now)
		require.Equal(t, "transient", string(d.Class), rescues)
		require.Equal(t, want.rule, d.Rule, rescues)
		require.Equal(t, want.strategy, d.Strategy, rescues)
	}
}

func plannerOfFiles(t *testing.T, files policytest.Files) *Planner {
	t.Helper()
	p, err := NewPlanner(policytest.Load(t, files), nil)
	require.NoError(t, err)
	return p
}

type fakeConditions string

func (u fakeConditions) Unmet(_, _ string, _ *policy.Conditions) string { return string(u) }

// Rules read a message with exact integers. They read only the beginning of long texts, as patterns do.
func TestRules_MatchPayloadAndHeaders(t *testing.T) {
	t.Parallel()
	p := plannerOf(t, `
rules:
  - {name: account, match: {when: 'payload.account == 9007199254740993'}, class: business}
  - {name: large, match: {when: 'payload.amount > 10000'}, class: outage}
  - {name: eu, match: {when: 'headers["x-region"] == "eu"'}, class: outage}
  - {name: list, match: {when: 'payload[1].id == "b"'}, class: outage}
  - {name: cut, match: {when: 'len(payload.long) == 8192 && len(context.long) == 8192 && len(headers.long) == 8192 && len(kind) == 8192'}, class: outage}
  - {name: end, match: {when: 'payload.end matches "b$"'}, class: outage}
  - {name: joined, match: {when: 'payload.end + payload.end matches "ab"'}, class: outage}
`)
	require.True(t, p.ReadsMessages())
	require.False(t, plannerOf(t,
		"rules: [{name: r, match: {when: 'context.payload == 1'}, class: outage}]").ReadsMessages())
	long := strings.Repeat("a", 9000)
	for _, test := range []struct {
		facts Facts
		rule  string
	}{
		{Facts{Payload: json.RawMessage(`{"account": 9007199254740993}`)}, "account"},
		{Facts{Payload: json.RawMessage(`{"account": 9007199254740992}`)}, "none"},
		{Facts{Payload: json.RawMessage(`{"amount": 10000.5}`)}, "large"},
		{Facts{Payload: json.RawMessage(`{"amount": 1e999}`)}, "large"},
		{Facts{Payload: json.RawMessage(`{"amount": 10000}`)}, "none"},
		{Facts{Payload: json.RawMessage(`[{"id": "a"}, {"id": "b"}]`)}, "list"},
		{Facts{Headers: map[string]string{"X-Region": "eu"}}, "eu"},
		{Facts{
			Payload: json.RawMessage(`{"long": "` + long + `"}`),
			Context: json.RawMessage(`{"long": "` + long + `"}`), Headers: map[string]string{"Long": long}, Kind: long,
		}, "cut"},
		{Facts{Payload: json.RawMessage(`{"end": "aab"}`)}, "end"},
		{Facts{Payload: json.RawMessage(`{"end": "` + strings.Repeat("a", 8191) + `ba"}`)}, "end"},
		{Facts{Payload: json.RawMessage(`{"end": "` + strings.Repeat("a", 8192) + `b"}`)}, "none"},
		{Facts{Payload: json.RawMessage(`{"end": "a` + strings.Repeat("b", 5000) + `a"}`)}, "joined"},
		// too large
		{Facts{Payload: json.RawMessage(`{"amount": 20000, "x": "` + strings.Repeat("x", 1<<17) + `"}`)}, "none"},
	} {
		_, rule, _ := p.Classify(test.facts)
		require.Equal(t, test.rule, rule, "%.100s", test.facts.Payload)
	}
}

// The check of a policy rejects slow patterns, with file and line. If rules are slow nevertheless, the entry is parked.
func TestRules_LimitTime(t *testing.T) {
	t.Parallel()
	for routing, want := range map[string]string{
		"rules:\n- name: r\n  match: {message: '(x?){900}y'}\n  class: outage\n":                     "dlq-routing.yaml:3: rules[0].match.message: the pattern is too slow: it has",
		"rules:\n- name: r\n  match:\n    when: 'message matches \"(x?){900}y\"'\n  class: outage\n": "dlq-routing.yaml:4: rules[0].match.when: the pattern is too slow: it has",
		"rules:\n" + strings.Repeat("- {name: NAME, match: {message: '(x?){200}y'}, class: outage}\n",
			40): "dlq-routing.yaml:1: rules: have patterns of",
		"rules:\n" + strings.Repeat("- {name: NAME, match: {when: 'message matches \"(x?){200}y\"'}, class: outage}\n",
			40): "at most 25000",
	} {
		for i := range 40 {
			routing = strings.Replace(routing, "NAME", "r"+strconv.Itoa(i), 1)
		}
		_, err := NewPlanner(policytest.Load(t, policytest.Files{"dlq-routing": routing}), nil)
		require.ErrorContains(t, err, want)
	}
	p := plannerOf(t, `
rules:
  - {name: kind, match: {kind: known}, class: outage}
  - {name: text, match: {message: x}, class: outage}
`)
	p.budget = 0
	now := time.Now()
	d := p.Decide(&Entry{Facts: Facts{Message: "connection refused"}, LastFailedAt: now}, now)
	require.Equal(t, []string{"unknown", policy.RuleTooSlow, Manual}, []string{string(d.Class), d.Rule, d.Strategy})
	class, _, rule := p.Classify(Facts{Message: "connection refused"})
	require.True(t, p.Ends(class, rule), "the job is not run again")
	_, name, _ := p.Classify(Facts{Kind: "known"})
	require.Equal(t, "kind", name, "rules without patterns are still matched")
	require.Contains(t, policy.ReservedRules(), policy.RuleTooSlow)
}

// Each name without * finds its own line, and each text its own line or an earlier one. No other line has the same name
// or text.
func TestTable_EveryEntryFindsItsLine(t *testing.T) {
	t.Parallel()
	for _, lines := range [][]line{table, weak} {
		x, seen := newIndex(lines), map[string]string{}
		for i, l := range lines {
			for _, name := range listOf(l.names) {
				require.Empty(t, seen["name "+name], "%s: name %q is in another line", l.rule, name)
				seen["name "+name] = l.rule
				require.Equal(t, strings.ToLower(name), name)
				if !strings.Contains(name, "*") {
					require.Equal(t, l.rule, x.ofName(strings.ReplaceAll(name, " ", "_")).rule, name)
				}
			}
			for _, text := range listOf(l.texts) {
				require.Empty(t, seen["text "+text], "%s: text %q is in another line", l.rule, text)
				seen["text "+text] = l.rule
				require.LessOrEqual(t, strings.Count(text, "…"), 1, "more than one … makes matching slow: %q", text)
				w := wordsOf(strings.ReplaceAll(text, "…", "x"))
				require.LessOrEqual(t, x.texts.find(w, 0), i, "%s: %q", l.rule, text)
			}
		}
	}
}

// Every line of the built-in table has a sample. So has every status that the documentation lists for a class.
func TestSamples_CoverEveryLineOfTheTable(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../config/dlq-routing.samples.yaml")
	require.NoError(t, err)
	var samples []struct {
		Answer struct {
			Status  int    `yaml:"status"`
			Failure string `yaml:"failure"`
		} `yaml:"answer"`
		Error struct {
			Message string `yaml:"message"`
			Code    string `yaml:"code"`
		} `yaml:"error"`
		Expect struct {
			Class string `yaml:"class"`
			Rule  string `yaml:"rule"`
		} `yaml:"expect"`
	}
	require.NoError(t, yaml.Unmarshal(raw, &samples))
	lines, statuses, codes := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for _, s := range samples {
		lines[s.Expect.Rule+" "+s.Expect.Class] = true
		statuses[strconv.Itoa(s.Answer.Status)+" "+s.Expect.Class] = true
		for name := range grpcClasses {
			if strings.Contains(strings.ToLower(strings.ReplaceAll(s.Error.Message+s.Error.Code, "_", "")), name) {
				codes[name+" "+s.Expect.Class] = true
			}
		}
	}
	for _, l := range append(slices.Clone(table), weak...) {
		require.True(t, lines[l.rule+" "+string(l.class)], "no sample of %s", l.rule)
	}
	for _, line := range []string{"panic code_bug", "worker transient", "none unknown"} {
		require.True(t, lines[line], "no sample of %s", line)
	}
	for name, class := range grpcClasses {
		require.True(t, codes[name+" "+string(class)], "no sample of gRPC's %s", name)
	}
	docs, err := os.ReadFile("../../docs/rules.md")
	require.NoError(t, err)
	_, table, _ := strings.Cut(string(docs), "## The built-in table")
	found := 0
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| ([^|]*) \\|").FindAllStringSubmatch(table, -1) {
		for _, status := range regexp.MustCompile(`\b[45]\d\d\b`).FindAllString(row[2], -1) {
			found++
			require.True(t, statuses[status+" "+row[1]], "no sample of %s, %s", status, row[1])
		}
	}
	require.Greater(t, found, 12)
}
