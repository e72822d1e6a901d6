package filter_test

import (
	"encoding/json"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dlqd/dlqd/internal/filter"
)

const (
	anID    = "0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"
	otherID = "0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3d"
)

// texts maps texts of the language to filters.
var texts = map[string]string{
	"":                                   `{}`,
	"status:manual":                      `{"status":["dlq_manual"]}`,
	"status:dlq_manual,failed":           `{"status":["dlq_manual","dlq_failed"]}`,
	"status:open":                        `{"status":["dlq_pending","dlq_processing","dlq_manual"]}`,
	"status:closed":                      `{"status":["dlq_returned","dlq_resolved","dlq_failed","dlq_archived"]}`,
	"topic:dlq.* node:scoring":           `{"topic":["dlq.*"],"node":["scoring"]}`,
	"partition:0 offset:0,812":           `{"partition":[0],"offset":[0,812]}`,
	"queue:a,b queue:c":                  `{"queue":["a","b","c"]}`,
	"QUEUE:a kind:order.*":               `{"queue":["a"],"kind":["order.*"]}`,
	`queue:"a b","c,d" tag:x`:            `{"queue":["a b","c,d"],"tags":["x"]}`,
	`type:"say \"no\"" code:"a\\b\c"`:    `{"errorType":["say \"no\""],"errorCode":["a\\b\\c"]}`,
	"class:outage,unknown code:503":      `{"errorClass":["outage","unknown"],"errorCode":["503"]}`,
	`"timed out" bank`:                   `{"errorMessage":["timed out","bank"]}`,
	"error:timeout at 10:30":             `{"errorMessage":["timeout","at","10:30"]}`,
	"group:3f2a":                         `{"fingerprint":["3f2a"]}`,
	"rule:transport strategy:manual":     `{"rule":["transport"],"strategy":["manual"]}`,
	"waiting:condition,pace":             `{"waitingFor":["condition","pace"]}`,
	"stage:redelivery":                   `{"failedIn":["redelivery"]}`,
	"assigned:kim,nobody,me":             `{"assignee":["kim","","ann"]}`,
	`assigned:"nobody","me"`:             `{"assignee":["nobody","me"]}`,
	"source:shop subscriber:cus_81":      `{"source":["shop"],"subscriberId":["cus_81"]}`,
	"key:order-81":                       `{"orderingKey":["order-81"]}`,
	"message:pay-1 job:4711,4712":        `{"messageId":["pay-1"],"jobId":[4711,4712]}`,
	anID + " id:" + otherID:              `{"ids":["` + anID + `","` + otherID + `"]}`,
	"rest:" + anID + " again:" + otherID: `{"rest":["` + anID + `"],"again":["` + otherID + `"]}`,
	"after:2026-11-20":                   `{"after":"2026-11-20T00:00:00Z"}`,
	"before:2026-11-20T08:00":            `{"before":"2026-11-20T08:00:00Z"}`,
	"after:2026-11-20T08:00:01+01:00":    `{"after":"2026-11-20T08:00:01+01:00"}`,
	"failed:2026-11-20":                  `{"after":"2026-11-20T00:00:00Z","before":"2026-11-21T00:00:00Z"}`,
	"failed:2026-11-20..2026-11-21":      `{"after":"2026-11-20T00:00:00Z","before":"2026-11-22T00:00:00Z"}`,
	"failed:2026-11-20T08:00..":          `{"after":"2026-11-20T08:00:00Z"}`,
	"failed:..2026-11-20":                `{"before":"2026-11-21T00:00:00Z"}`,
	"age:>2d":                            `{"minAge":"2 days"}`,
	"age:<30m age:>=1h30m":               `{"minAge":"1 hour 30 minutes","maxAge":"30 minutes"}`,
	`age:"<2 mons"`:                      `{"maxAge":"2 mons"}`,
	"attempts:3":                         `{"minRetryCount":3,"maxRetryCount":3}`,
	"attempts:>3":                        `{"minRetryCount":4}`,
	"attempts:<=3":                       `{"maxRetryCount":3}`,
	"attempts:2..4":                      `{"minRetryCount":2,"maxRetryCount":4}`,
	"attempts:>1 attempts:<5":            `{"minRetryCount":2,"maxRetryCount":4}`,
	"payload.customer:42":                `{"payloadAt":[{"path":["customer"],"values":["42"]}]}`,
	"payload.customer.id:42,43 payload.customer.id:44 payload.x:y": `{"payloadAt":[{"path":["customer","id"],"values":["42","43","44"]},{"path":["x"],"values":["y"]}]}`,
	`payload."a.b"."say \"\"".c:"x y"`:                             `{"payloadAt":[{"path":["a.b","say \"\"","c"],"values":["x y"]}]}`,
	`payload:{"customer": {"id": 9007199254740993}} queue:a`:       `{"queue":["a"],"payload":{"customer":{"id":9007199254740993}}}`,
	"  status:manual\t\n queue:payments  ":                         `{"status":["dlq_manual"],"queue":["payments"]}`,
	`""`:                                                           `problem at 1-3: the text is empty`,
	"qeueu:payments":                                               `problem at 1-15: unknown field qeueu; did you mean queue? suggest queue:payments or "qeueu:payments"`,
	"queue:a errorType:x":                                          `problem at 9-20: unknown field errorType: use type suggest type:x`,
	"orderingKey:x":                                                `problem at 1-14: unknown field orderingKey: use key suggest key:x`,
	"tags:x":                                                       `problem at 1-7: unknown field tags: use tag suggest tag:x`,
	"see http://example.com/":                                      `problem at 5-24: unknown field http (fields: status, queue, suggest "http://example.com/"`,
	"class:outtage":                                                `problem at 1-14: unknown class "outtage"; did you mean outage? (values: transient, suggest class:outage`,
	"ä status:lost":                                                `problem at 3-14: unknown status "lost"`,
	"-queue:a":                                                     `problem at 1-9: a term cannot be negated`,
	`error:"timed out`:                                             `problem at 1-17: the closing quote is missing`,
	`error:"timed"out`:                                             `problem at 1-17: expected a blank or a comma after the closing quote`,
	"queue:":                                                       `problem at 1-7: the value is missing`,
	"queue:a,":                                                     `problem at 1-9: the value is missing`,
	"queue:,a":                                                     `problem at 1-9: the value is missing`,
	"id:7":                                                         `problem at 1-5: an id has the form 0199`,
	"job:x":                                                        `problem at 1-6: job takes a number of at least 1`,
	"partition:-1":                                                 `problem at 1-13: partition takes a number of at least 0`,
	"partition:2147483648":                                         `problem at 1-21: partition takes a number of at most 2147483647`,
	"job:99999999999999999999":                                     `problem at 1-25: job takes a number`,
	"after:soon":                                                   `problem at 1-11: invalid time "soon"`,
	"before:2026-13-01":                                            `problem at 1-18: invalid time "2026-13-01"`,
	"after:0000-01-01":                                             `problem at 1-17: invalid time "0000-01-01"`,
	"failed:..":                                                    `problem at 1-10: failed takes a day or a range`,
	"failed:2026-11-20T08:00":                                      `problem at 1-24: failed takes a day`,
	"after:2026-11-20 failed:2026-11-20":                           `problem at 18-35: this limit is already set`,
	"after:2026-11-20,2026-11-21":                                  `problem at 1-28: after takes only one value`,
	"age:2d":                                                       `problem at 1-7: age takes > or <`,
	"age:>soon":                                                    `problem at 1-10: invalid duration "soon": must be like 30m`,
	"attempts:many":                                                `problem at 1-14: attempts takes a number`,
	"attempts:<0":                                                  `problem at 1-12: attempts cannot be less than 0`,
	"attempts:>2147483647":                                         `problem at 1-21: attempts cannot be more than`,
	"attempts:3 attempts:4":                                        `problem at 12-22: this limit is already set`,
	"payload:42":                                                   `problem at 1-11: payload takes a path of keys, as in payload.customer:42`,
	"payload.customer":                                             `problem at 1-17: payload takes a path of keys`,
	`payload:{"a": }`:                                              `problem at 1-14: payload: invalid JSON`,
	`payload:{"a":1} payload:{"b":1}`:                              `problem at 17-32: payload: JSON is allowed only once`,
	"assigned:me":                                                  `problem at 1-12: me needs authentication`,
	strings.Repeat("x", 5000):                                      `problem at 1-5001: a filter has at most 4096 bytes`,
	"a\x00b":                                                       `problem at 1-4: the text has a NUL character`,
	"\xff":                                                         `problem at 1-2: the text has a NUL character`,
	`payload:{"a":"` + `\u0000` + `"} x:y`:                         `problem at 1-`,
}

func TestParse_ReadsEveryField(t *testing.T) {
	t.Parallel()
	for text, want := range texts {
		me := "ann"
		if text == "assigned:me" {
			me = ""
		}
		got, err := filter.Parse(text, me)
		problem, isProblem := strings.CutPrefix(want, "problem at ")
		if !isProblem {
			require.NoError(t, err, text)
			require.JSONEq(t, want, string(got.JSON()), text)
			continue
		}
		var wrong *filter.Error
		require.ErrorAs(t, err, &wrong, text)
		term := wrong.Terms[0]
		found := strconv.Itoa(term.From+1) + "-" + strconv.Itoa(term.To+1) + ": " + term.Problem
		problem, suggest, _ := strings.Cut(problem, " suggest ")
		require.True(t, strings.HasPrefix(found, problem), "%s: %s, want %s", text, found, problem)
		require.Equal(t, suggest, strings.Join(term.Suggest, " or "), text)
	}
}

// Read returns the filter of the valid terms of a text, together with the problems of the others.
func TestRead_ReturnsValidPartAndProblems(t *testing.T) {
	t.Parallel()
	f, terms := filter.Read(`queue:a qeueu:b "timed out" class:x`, "")
	require.JSONEq(t, `{"queue":["a"],"errorMessage":["timed out"]}`, string(f.JSON()))
	require.Len(t, terms, 4)
	require.Equal(t, filter.Term{Field: "queue", Values: []string{"a"}, From: 0, To: 7}, terms[0])
	require.Equal(t, filter.Term{Field: "error", Values: []string{"timed out"}, From: 16, To: 27}, terms[2])
	require.NotEmpty(t, terms[1].Problem)
	require.NotEmpty(t, terms[3].Problem)
	_, err := filter.Parse(`qeueu:b class:x`, "")
	require.EqualError(t, err,
		`filter: qeueu:b (at 1): unknown field qeueu; did you mean queue? (to search for it in errors, quote it); class:x (at 9): unknown class "x" (values: transient, rate_limited, outage, validation, malformed, unauthorized, not_found, business, code_bug, unknown)`)
}

// aFilter draws any filter that the database accepts.
func aFilter(t *rapid.T) filter.Filter {
	var f filter.Filter
	word := rapid.OneOf(rapid.StringMatching(`[a-z0-9_.*-]{1,8}`), rapid.StringMatching(`[ -~]{0,10}`),
		rapid.StringMatching(`[\pL "\\,:\t\n]{0,6}`),
		rapid.SampledFrom([]string{"me", "nobody", "open", "-x", `"`, `\`, ",", "a:b"}))
	text := word.Filter(func(s string) bool { return s != "" })
	list := func(of *rapid.Generator[string], name string) []string {
		return rapid.SliceOfN(of, 0, 3).Draw(t, name)
	}
	enum := func(words ...string) *rapid.Generator[string] { return rapid.SampledFrom(words) }
	f.Status = list(enum("dlq_pending", "dlq_processing", "dlq_manual", "dlq_returned", "dlq_resolved", "dlq_failed",
		"dlq_archived"), "status")
	f.Queue, f.Kind, f.ErrorType, f.ErrorCode = list(word, "queue"), list(word, "kind"), list(word, "type"),
		list(word, "code")
	f.ErrorClass = list(enum("transient", "outage", "code_bug"), "class")
	f.ErrorMessage, f.Fingerprint = list(text, "error"), list(text, "group")
	f.Rule, f.Assignee, f.Source, f.SubscriberID, f.OrderingKey = list(word, "rule"), list(word, "assignee"),
		list(word, "source"), list(word, "subscriber"), list(word, "key")
	f.Tags, f.MessageID = list(word, "tags"), list(word, "message")
	f.Strategy, f.WaitingFor, f.FailedIn = list(enum("immediate", "manual"), "strategy"),
		list(enum("automatic", "pace"), "waiting"), list(enum("job", "redelivery"), "stage")
	f.IDs = list(enum(anID, otherID, uuid.Nil.String()), "ids")
	f.JobID = rapid.SliceOfN(rapid.Int64Min(1), 0, 3).Draw(t, "job")
	when := enum("", "2026-11-20T00:00:00Z", "2026-11-20T08:00:00.5+01:00", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z")
	f.After, f.Before = when.Draw(t, "after"), when.Draw(t, "before")
	long := enum("", "2 days", "1 day", "1 days", "1 hour 30 minutes", "2 mons", "04:00:00", "a \"while\"", "0")
	f.MinAge, f.MaxAge = long.Draw(t, "minAge"), long.Draw(t, "maxAge")
	if n := rapid.IntRange(-5, 1<<31-1).Draw(t, "least"); n >= 0 {
		f.MinRetryCount = &n
	}
	if n := rapid.IntRange(-5, 1<<31-1).Draw(t, "most"); n >= 0 {
		f.MaxRetryCount = &n
	}
	seen := map[string]bool{}
	for range rapid.IntRange(0, 3).Draw(t, "places") {
		p := filter.Place{
			Path: rapid.SliceOfN(word, 1, 3).Draw(t, "path"), Values: rapid.SliceOfN(word, 1, 3).Draw(t, "values"),
		}
		if key := strings.Join(p.Path, "\x00"); !seen[key] {
			seen[key] = true
			f.PayloadAt = append(f.PayloadAt, p)
		}
	}
	f.Payload = json.RawMessage(enum("", `{"a":[1,{"b c":"d \" e"}]}`, `[9007199254740993]`, `{}`).Draw(t, "payload"))
	if len(f.Payload) == 0 {
		f.Payload = nil
	}
	return f
}

// Parsing a printed filter returns the same filter.
func TestPrint_ParsesBack(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		f := aFilter(t)
		text := f.Print()
		if len(text) > filter.MaxBytes {
			t.Skip()
		}
		back, err := filter.Parse(text, "")
		require.NoError(t, err, text)
		require.Equal(t, string(f.JSON()), string(back.JSON()), text)
		require.Equal(t, text, back.Print())

		again, err := filter.FromJSON(f.JSON())
		require.NoError(t, err)
		require.Equal(t, string(f.JSON()), string(again.JSON()))
		merged, err := filter.Merge(f, filter.Filter{})
		require.NoError(t, err)
		require.Equal(t, string(f.JSON()), string(merged.JSON()))
	})
}

// For any text, each term is read or has a problem with its position. The filter of the valid terms can be printed as a
// text with the same meaning.
func TestRead_CoversAnyText(t *testing.T) {
	t.Parallel()
	words := slices.Collect(func(yield func(string) bool) {
		for text := range texts {
			if !yield(text) {
				return
			}
		}
	})
	slices.Sort(words)
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Join(rapid.SliceOfN(rapid.OneOf(rapid.String(),
			rapid.StringMatching(`[a-z]{0,9}[:."\\,{}\[\]<>=-]{0,3}[ -~]{0,6}`), rapid.SampledFrom(words)), 0, 5).Draw(t,
			"words"), rapid.SampledFrom([]string{" ", "", ",", ":"}).Draw(t, "between"))
		if cut := rapid.IntRange(0, len(text)).Draw(t, "cut"); rapid.Bool().Draw(t, "isCut") {
			text = text[:cut]
		}
		f, terms := filter.Read(text, "kim")
		length, last, understood := len([]rune(text)), 0, true
		for _, term := range terms {
			require.True(t, last <= term.From && term.From < term.To && term.To <= length, "%q: %v", text, term)
			last = term.To
			understood = understood && term.Problem == ""
		}
		if !understood {
			_, err := filter.Parse(text, "kim")
			require.Error(t, err)
			require.NotEmpty(t, err.Error())
			return
		}
		if printed := f.Print(); len(printed) <= filter.MaxBytes {
			back, err := filter.Parse(printed, "kim")
			require.NoError(t, err, "%q: %q", text, printed)
			require.JSONEq(t, string(f.JSON()), string(back.JSON()), text)
		}
	})
}

func FuzzRead(f *testing.F) {
	for text := range texts {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		chosen, err := filter.Parse(text, "kim")
		if err != nil {
			require.NotEmpty(t, err.Error())
			return
		}
		_ = chosen.Print()
	})
}

func TestFromJSON(t *testing.T) {
	t.Parallel()
	f, err := filter.FromJSON(json.RawMessage(`{"status": "dlq_manual", "jobId": 7, "kind": ["a"], "payload": {"x": 1}}`))
	require.NoError(t, err)
	require.Equal(t, `status:manual kind:a job:7 payload:{"x":1}`, f.Print())
	for _, raw := range []string{`[]`, `{"qeueu": ["x"]}`, `{"queue": 7}`, `x`} {
		_, err := filter.FromJSON(json.RawMessage(raw))
		require.Error(t, err, raw)
	}
}

func TestMerge(t *testing.T) {
	t.Parallel()
	a, b := filter.Filter{Queue: []string{"a"}}, filter.Filter{Kind: []string{"k"}}
	out, err := filter.Merge(a, b)
	require.NoError(t, err)
	require.Equal(t, "queue:a kind:k", out.Print())
	_, err = filter.Merge(a, a)
	require.ErrorContains(t, err, "queue: set both in the text and as a field")
}

// The language has a field for every field of the filter.
func TestFields_CoverTheFilter(t *testing.T) {
	t.Parallel()
	fields := filter.Fields()
	for of := range reflect.TypeFor[filter.Filter]().Fields() {
		name, _, _ := strings.Cut(of.Tag.Get("json"), ",")
		switch name {
		case "minAge", "maxAge", "minRetryCount", "maxRetryCount", "payloadAt": // age, attempts, payload
			continue
		}
		require.True(t, slices.ContainsFunc(fields, func(f filter.Field) bool { return f.JSON == name }), name)
	}
	for _, f := range fields {
		parsed, err := filter.Parse(f.Example, "kim")
		require.NoError(t, err, f.Example)
		require.NotEqual(t, "{}", string(parsed.JSON()))
	}
}

// docs/filter.md describes the fields in the same words as the code.
func TestFields_MatchTheDocumentation(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/filter.md")
	require.NoError(t, err)
	var want strings.Builder
	want.WriteString("| field | example | |\n|---|---|---|\n")
	for _, f := range filter.Fields() {
		doc := f.Doc
		if f.Values != nil {
			doc += " One of " + strings.Join(f.Values, ", ") + "."
		}
		want.WriteString("| `" + f.Name + "` | `" + f.Example + "` | " + doc + " |\n")
	}
	require.Contains(t, string(page), want.String(), "docs/filter.md must have this table:\n"+want.String())
}

// In each case, | marks the cursor.
func TestAt(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"|":                       ":<>",
		"qu|":                     ":qu<qu>",
		"queue:a |":               ":<>",
		"queue:a st| kind:b":      ":st<st>",
		"qu|eue:a":                ":qu<queue:>",
		"queue:|":                 "queue:<>",
		"queue:pay|":              "queue:pay<pay>",
		"queue:a,b|c,d":           "queue:b<bc>",
		`queue:"a b|`:             `queue:a b<"a b>`,
		`ä queue:"x,y",p| kind:b`: "queue:p<p>",
		"QUEUE:p|":                "queue:p<p>",
		"nothing:x|":              "none",
		`"timed o|`:               "none",
		"payload.a:|":             "none",
	} {
		before, after, _ := strings.Cut(text, "|")
		typing, ok := filter.At(before+after, len([]rune(before)))
		got := "none"
		if ok {
			got = typing.Field + ":" + typing.Prefix + "<" + string([]rune(before + after)[typing.From:typing.To]) + ">"
		}
		require.Equal(t, want, got, text)
	}
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.String(), rapid.StringMatching(`([a-z]{0,5}[:,"\\ ]){0,6}`)).Draw(t, "text")
		typing, ok := filter.At(text, rapid.IntRange(-3, 40).Draw(t, "at"))
		require.True(t, !ok || 0 <= typing.From && typing.From <= typing.To && typing.To <= len([]rune(text)))
		if ok {
			for _, f := range typing.Complete() {
				require.NotEmpty(t, typing.Insert(f.Name, true))
			}
		}
	})
}
