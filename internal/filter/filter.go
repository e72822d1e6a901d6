// Package filter implements the language in which users select dead letters, such as
//
//	status:manual queue:payments kind:order.* payload.customer:42 age:>2d "timed out"
//
// It converts such a text to a filter: the JSON from which dlq.filter_where builds a condition. Console, CLI, API and
// SQL use the same filter. docs/filter.md describes the language.
package filter

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/dlqd/dlqd/internal/strategy/strategies"
)

// Filter selects the dead letters that match all of its fields. An empty filter selects all.
type Filter struct {
	Status        []string `json:"status,omitempty" enum:"dlq_pending,dlq_processing,dlq_manual,dlq_returned,dlq_resolved,dlq_failed,dlq_archived" doc:"In one of these states."`
	Queue         []string `json:"queue,omitempty" doc:"In one of these queues; * stands for any text."`
	Kind          []string `json:"kind,omitempty" doc:"Of one of these kinds; * stands for any text." example:"[\"payment.*\"]"`
	ErrorClass    []string `json:"errorClass,omitempty" doc:"Of one of these classes."`
	ErrorType     []string `json:"errorType,omitempty" doc:"With one of these error types."`
	ErrorCode     []string `json:"errorCode,omitempty" doc:"With one of these error codes."`
	Destination   []string `json:"destination,omitempty" doc:"Failed in a delivery to one of these destinations."`
	ErrorMessage  []string `json:"errorMessage,omitempty" doc:"Error text contains all of these texts, ignoring case."`
	Fingerprint   []string `json:"fingerprint,omitempty" doc:"In one of these failure groups: fingerprints, or their first characters."`
	Rule          []string `json:"rule,omitempty" doc:"Class and strategy chosen by one of these rules."`
	Strategy      []string `json:"strategy,omitempty" doc:"With one of these strategies."`
	WaitingFor    []string `json:"waitingFor,omitempty" enum:"automatic,condition,pace,order,run" doc:"Pending and waiting for one of these besides a time: automatic redelivery to be switched on, a condition, a place in the pace, earlier messages of the ordering key, or a progressive replay run."`
	FailedIn      []string `json:"failedIn,omitempty" enum:"job,redelivery" doc:"Last failure: of the job itself, or of a redelivery."`
	Assignee      []string `json:"assignee,omitempty" doc:"Assigned to one of these; \"\" selects unassigned entries."`
	Source        []string `json:"source,omitempty" doc:"Of one of these sources."`
	Topic         []string `json:"topic,omitempty" doc:"Records that were read from one of these topics, or failed in it; * stands for any text."`
	Partition     []int64  `json:"partition,omitempty" minimum:"0" maximum:"2147483647" doc:"Records that were read from one of these partitions."`
	Offset        []int64  `json:"offset,omitempty" minimum:"0" doc:"Records that were read at one of these offsets."`
	Node          []string `json:"node,omitempty" doc:"Records that failed in one of these nodes of a pipeline."`
	SubscriberID  []string `json:"subscriberId,omitempty" doc:"Of one of these subscribers."`
	OrderingKey   []string `json:"orderingKey,omitempty" doc:"With one of these ordering keys."`
	Tags          []string `json:"tags,omitempty" doc:"With all of these tags."`
	IDs           []string `json:"ids,omitempty" format:"uuid" doc:"One of these entries."`
	MessageID     []string `json:"messageId,omitempty" doc:"Of one of these messages."`
	JobID         []int64  `json:"jobId,omitempty" doc:"With one of these jobs as its job or redelivery."`
	Rest          []string `json:"rest,omitempty" format:"uuid" doc:"Not sent by one of these replay runs: skipped, held, or not sent yet."`
	Again         []string `json:"again,omitempty" format:"uuid" doc:"Failed again in one of these replay runs."`
	After         string   `json:"after,omitempty" format:"date-time" doc:"Captured at or after this time."`
	Before        string   `json:"before,omitempty" format:"date-time" doc:"Captured before this time."`
	MinAge        string   `json:"minAge,omitempty" doc:"Captured at least this long ago, such as 2 days." example:"30 minutes"`
	MaxAge        string   `json:"maxAge,omitempty" doc:"Captured at most this long ago, such as 2 days." example:"2 days"`
	MinRetryCount *int     `json:"minRetryCount,omitempty" minimum:"0" maximum:"2147483647" doc:"With at least this many redeliveries."`
	MaxRetryCount *int     `json:"maxRetryCount,omitempty" minimum:"0" maximum:"2147483647" doc:"With at most this many redeliveries."`
	// Payload stays raw, and the database compares it: decoding would change a number beyond 2^53.
	Payload   json.RawMessage `json:"payload,omitempty" doc:"Payload contains this JSON."`
	PayloadAt []Place         `json:"payloadAt,omitempty" doc:"Payload has one of the values at each of these paths."`
}

// Place is a path in payloads, with the accepted values.
type Place struct {
	Path   []string `json:"path" minItems:"1" maxItems:"64" doc:"Keys, outermost first. Arrays along the path are searched." example:"[\"customer\",\"id\"]"`
	Values []string `json:"values" minItems:"1" doc:"Accepted values, as text: strings, numbers or booleans." example:"[\"42\"]"`
}

// JSON returns the filter in the form that the database reads.
func (f *Filter) JSON() json.RawMessage {
	raw, err := json.Marshal(f)
	if err != nil {
		panic(err) // only an invalid Payload fails, and Payload was decoded or parsed
	}
	return raw
}

// FromJSON decodes a filter in the form that the database reads. In place of a list, it accepts a single value.
func FromJSON(raw json.RawMessage) (Filter, error) {
	var f Filter
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return f, fmt.Errorf("filter: must be a JSON object: %w", err)
	}
	for name, value := range fields {
		if i := slices.IndexFunc(table, func(d field) bool { return d.json == name }); i >= 0 &&
			(table[i].words != nil || table[i].numbers != nil) && !bytes.HasPrefix(value, []byte("[")) {
			fields[name] = slices.Concat([]byte("["), value, []byte("]"))
		}
	}
	listed, err := json.Marshal(fields)
	if err != nil {
		return f, err
	}
	decoder := json.NewDecoder(bytes.NewReader(listed))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&f); err != nil {
		return f, fmt.Errorf("filter: %w", err)
	}
	return f, nil
}

// Merge returns the filter that selects the dead letters that both a and b select. It returns an error if a field is
// set in both.
func Merge(a, b Filter) (Filter, error) {
	var out Filter
	fields := map[string]json.RawMessage{}
	var twice []string
	for _, f := range []Filter{a, b} {
		var of map[string]json.RawMessage
		if err := json.Unmarshal(f.JSON(), &of); err != nil {
			return out, err
		}
		for name, value := range of {
			if fields[name] != nil {
				twice = append(twice, name)
			}
			fields[name] = value
		}
	}
	if len(twice) > 0 {
		slices.Sort(twice)
		return out, errors.New("filter: " + strings.Join(twice, ", ") + ": set both in the text and as a field")
	}
	raw, err := json.Marshal(fields)
	if err != nil {
		return out, err
	}
	return out, json.Unmarshal(raw, &out)
}

// field is a field of the language, with the part of a filter that the field sets.
type field struct {
	name    string // in the language
	json    string // name in the filter's JSON, if the field sets exactly one
	doc     string
	example string
	values  func() []string // the only values; nil if any value is allowed
	words   func(*Filter) *[]string
	numbers func(*Filter) *[]int64
	least   int64 // the least number
	most    int64 // the greatest number; 0 for no limit
	// read parses one value. It is set, instead of words and numbers, for fields whose values have a syntax of their own.
	// The field payload has no such function, because the parser reads its path, too.
	read func(*Filter, value) error
}

var (
	states     = []string{"pending", "processing", "manual", "returned", "resolved", "failed", "archived"}
	openStates = states[:3]
	classes    = []string{
		"transient", "rate_limited", "outage", "validation", "malformed", "unauthorized", "not_found",
		"business", "code_bug", "unknown",
	}
)

func oneOf(values ...string) func() []string { return func() []string { return values } }

// table has all fields, in the order in which Print writes them.
var table = []field{
	{
		name: "status", json: "status", doc: "State. open and closed select all open and all closed states.",
		example: "status:manual,failed", values: oneOf(slices.Concat(states, []string{"open", "closed"})...),
		words: func(f *Filter) *[]string { return &f.Status },
	},
	{
		name: "queue", json: "queue", doc: "Queue; * stands for any text.", example: "queue:payments",
		words: func(f *Filter) *[]string { return &f.Queue },
	},
	{
		name: "kind", json: "kind", doc: "Kind of the message or job; * stands for any text.", example: "kind:order.*",
		words: func(f *Filter) *[]string { return &f.Kind },
	},
	{
		name: "class", json: "errorClass", doc: "Class of the error.", example: "class:outage", values: oneOf(classes...),
		words: func(f *Filter) *[]string { return &f.ErrorClass },
	},
	{
		name: "type", json: "errorType", doc: "Type of the error.", example: "type:TIMEOUT_ERROR",
		words: func(f *Filter) *[]string { return &f.ErrorType },
	},
	{
		name: "code", json: "errorCode", doc: "Code of the error.", example: "code:INSUFFICIENT_FUNDS",
		words: func(f *Filter) *[]string { return &f.ErrorCode },
	},
	{
		name: "destination", json: "destination", doc: "Destination to which the failed delivery went.",
		example: "destination:bank", words: func(f *Filter) *[]string { return &f.Destination },
	},
	{name: "error", json: "errorMessage", doc: "Text in the error message; several must all match. A word without a " +
		"field is the same.", example: `error:"timed out"`, words: func(f *Filter) *[]string { return &f.ErrorMessage }},
	{
		name: "group", json: "fingerprint", doc: "Failure group: its fingerprint or the first characters. A fingerprint of " +
			"an earlier grouping method also finds the group.", example: "group:3f2a",
		words: func(f *Filter) *[]string { return &f.Fingerprint },
	},
	{
		name: "rule", json: "rule", doc: "Rule that chose class and strategy.", example: "rule:transport",
		words: func(f *Filter) *[]string { return &f.Rule },
	},
	{
		name: "strategy", json: "strategy", doc: "Strategy: what happens next.", example: "strategy:conditional",
		values: strategies.Names,
		words:  func(f *Filter) *[]string { return &f.Strategy },
	},
	{
		name: "waiting", json: "waitingFor", doc: "What a pending entry waits for besides a time.",
		example: "waiting:condition", values: oneOf("automatic", "condition", "pace", "order", "run"),
		words: func(f *Filter) *[]string { return &f.WaitingFor },
	},
	{
		name: "stage", json: "failedIn", doc: "Last failure: of the job itself, or of a redelivery.",
		example: "stage:redelivery", values: oneOf("job", "redelivery"),
		words: func(f *Filter) *[]string { return &f.FailedIn },
	},
	{
		name: "assigned", json: "assignee", doc: "Assignee: a name, nobody, or me.", example: "assigned:nobody",
		words: func(f *Filter) *[]string { return &f.Assignee },
	},
	{
		name: "source", json: "source", doc: "Source of the message.", example: "source:shop",
		words: func(f *Filter) *[]string { return &f.Source },
	},
	{
		name: "topic", json: "topic", doc: "Topic that the record was read from, or failed in; * stands for any text.",
		example: "topic:dlq.prod.*", words: func(f *Filter) *[]string { return &f.Topic },
	},
	{
		name: "partition", json: "partition", doc: "Partition that the record was read from.", example: "partition:3",
		numbers: func(f *Filter) *[]int64 { return &f.Partition }, most: math.MaxInt32,
	},
	{
		name: "offset", json: "offset", doc: "Offset that the record was read at.", example: "offset:812",
		numbers: func(f *Filter) *[]int64 { return &f.Offset },
	},
	{
		name: "node", json: "node", doc: "Node of a pipeline that the record failed in.", example: "node:scoring",
		words: func(f *Filter) *[]string { return &f.Node },
	},
	{
		name: "subscriber", json: "subscriberId", doc: "Subscriber whom the message concerns.", example: "subscriber:cus_81",
		words: func(f *Filter) *[]string { return &f.SubscriberID },
	},
	{
		name: "key", json: "orderingKey", doc: "Ordering key of the message.", example: "key:order-81",
		words: func(f *Filter) *[]string { return &f.OrderingKey },
	},
	{
		name: "tag", json: "tags", doc: "Tag; several must all match.", example: "tag:incident-81",
		words: func(f *Filter) *[]string { return &f.Tags },
	},
	{
		name: "id", json: "ids", doc: "Id of the entry. An id without a field is the same.",
		example: "id:0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c", words: func(f *Filter) *[]string { return &f.IDs },
	},
	{
		name: "message", json: "messageId", doc: "Id of the message.", example: "message:pay-1",
		words: func(f *Filter) *[]string { return &f.MessageID },
	},
	{
		name: "job", json: "jobId", doc: "Id of the job, or of a redelivery.", example: "job:4711",
		numbers: func(f *Filter) *[]int64 { return &f.JobID }, least: 1,
	},
	{
		name: "rest", json: "rest", doc: "Replay run that has not sent the entry: it skipped or held it, or ended before.",
		example: "rest:0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c", words: func(f *Filter) *[]string { return &f.Rest },
	},
	{
		name: "again", json: "again", doc: "Replay run in which the redelivery of the entry failed.",
		example: "again:0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c", words: func(f *Filter) *[]string { return &f.Again },
	},
	{
		name: "after", json: "after", doc: "Captured at or after a date or time (UTC unless it has a zone).",
		example: "after:2026-11-20T08:00", read: readAfter,
	},
	{
		name: "before", json: "before", doc: "Captured before a date or time.", example: "before:2026-11-21",
		read: readBefore,
	},
	{
		name: "failed", doc: "Captured on a day, or in a range of days or times; either end may be omitted.",
		example: "failed:2026-11-20..2026-11-21", read: readFailed,
	},
	{
		name: "age", doc: "Captured more (>) or less (<) than this long ago; units are s, m, h, d and w.", example: "age:>2d",
		read: readAge,
	},
	{
		name: "attempts", doc: "Number of redeliveries: a number, >, >=, <, <=, or a range.", example: "attempts:>3",
		read: readAttempts,
	},
	{
		name: "payload", json: "payload", doc: "Value at a path of keys in the payload, or JSON that the payload contains.",
		example: "payload.customer:42",
	},
}

// Field describes a field of the language.
type Field struct {
	Name    string   `json:"name" doc:"Name of the field."`
	Doc     string   `json:"doc" doc:"Description."`
	Example string   `json:"example" doc:"Example of a term."`
	Values  []string `json:"values,omitempty" doc:"Allowed values; absent if any value is allowed."`
	JSON    string   `json:"-"` // name in the filter's JSON, if the field sets exactly one
}

// Fields returns the fields of the language.
func Fields() []Field {
	out := make([]Field, len(table))
	for i, d := range table {
		out[i] = Field{Name: d.name, Doc: d.doc, Example: d.example, JSON: d.json}
		if d.values != nil {
			out[i].Values = d.values()
		}
	}
	return out
}

func lookup(name string) *field {
	if i := slices.IndexFunc(table, func(d field) bool { return d.name == name }); i >= 0 {
		return &table[i]
	}
	return nil
}
