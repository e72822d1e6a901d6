package message_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/message"
)

func TestParse_AcceptsValidMessages(t *testing.T) {
	t.Parallel()
	msg, err := message.Parse([]byte(`{
		"messageId": "pay-1", "queue": "default", "kind": "payment.captured", "payload": {"€": [1, null, "\ud83d\ude00"]},
		"source": "shop", "subscriberId": "sub_1", "priority": 4, "tags": ["abc"], "headers": {"X-Tenant": "7"},
		"metadata": {"a": 1}, "scheduledAt": "2030-01-31T09:00:00+01:00"}`))
	require.NoError(t, err)
	require.Equal(t, "pay-1", msg.MessageID)
	require.False(t, msg.HasGeneratedID())
	require.Equal(t, 4, msg.Priority)
	require.Equal(t, "2030-01-31 08:00:00 +0000 UTC", msg.ScheduledAt.String())
	require.Equal(t, "dlqd_message", msg.Kind())

	msg, err = message.Parse([]byte(`{"queue": "default", "kind": "k", "payload": null}`))
	require.NoError(t, err)
	require.Len(t, msg.MessageID, 36)
	require.True(t, msg.HasGeneratedID())
}

func TestParse_RejectsInvalidMessages(t *testing.T) {
	t.Parallel()
	with := func(field, value string) string {
		fields := map[string]string{"queue": `"default"`, "kind": `"k"`, "payload": `{}`}
		fields[field] = value
		var parts []string
		for k, v := range fields {
			parts = append(parts, `"`+k+`": `+v)
		}
		return "{" + strings.Join(parts, ", ") + "}"
	}
	deep := strings.Repeat("[", 100) + strings.Repeat("]", 100)
	for name, test := range map[string]struct{ body, field, want string }{
		"empty":                  {"", "", "is empty"},
		"not JSON":               {"{", "", "is not JSON"},
		"two documents":          {"{} {}", "", "is not JSON"},
		"array":                  {"[]", "", "must be"},
		"no queue":               {`{"kind": "k", "payload": 1}`, "queue", "is required"},
		"no kind":                {`{"queue": "q", "payload": 1}`, "kind", "is required"},
		"no payload":             {`{"queue": "q", "kind": "k"}`, "payload", "is required"},
		"unknown field":          {with("prioritty", "1"), "prioritty", "unknown field"},
		"kind with spaces":       {with("kind", `"a b"`), "kind", "words joined by dots"},
		"kind too long":          {with("kind", `"`+strings.Repeat("k", 128)+`"`), "kind", "127"},
		"id with a slash":        {with("messageId", `"a/b"`), "messageId", "letters, digits"},
		"id of a wrong type":     {with("messageId", `7`), "messageId", "must be a string"},
		"negative priority":      {with("priority", "-1"), "priority", "is -1; must be 1"},
		"priority 0":             {with("priority", "0"), "priority", "is 0; must be 1"},
		"priority 5":             {with("priority", "5"), "priority", "is 5; must be 1"},
		"priority of a half":     {with("priority", "1.5"), "priority", "must be a whole number"},
		"priority as text":       {with("priority", `"high"`), "priority", "must be a whole number"},
		"date in a wrong form":   {with("scheduledAt", `"31.12.2030"`), "scheduledAt", "RFC 3339"},
		"impossible date":        {with("scheduledAt", `"2030-02-30T00:00:00Z"`), "scheduledAt", "RFC 3339"},
		"expiry in a wrong form": {with("expiresAt", `"tomorrow"`), "expiresAt", "RFC 3339"},
		"date before time":       {with("scheduledAt", `"0001-01-01T00:00:00Z"`), "scheduledAt", "RFC 3339"},
		"date after time":        {with("scheduledAt", `"9999-12-31T23:59:59-14:00"`), "scheduledAt", "RFC 3339"},
		"date as a number":       {with("scheduledAt", `1893456000`), "scheduledAt", "must be a string"},
		"tag too short":          {with("tags", `["ok-1", "a"]`), "tags[1]", "must be 3 to 255"},
		"tag with a comma":       {with("tags", `["a,b,c"]`), "tags[0]", "must be 3 to 255"},
		"tags as text":           {with("tags", `"abc"`), "tags", "must be an array"},
		"metadata as an array":   {with("metadata", `[1]`), "metadata", "must be an object"},
		"invalid header name":    {with("headers", `{"a b": "c"}`), "headers", "not a valid HTTP header name"},
		"invalid header value":   {with("headers", `{"A": "b\r\nEvil: 1"}`), "headers.A", "not a valid HTTP header value"},
		"reserved header":        {with("headers", `{"webhook-signature": "x"}`), "headers.webhook-signature", "set by dlqd"},
		"source too long":        {with("source", `"`+strings.Repeat("s", 256)+`"`), "source", "at most 255"},
		"too deep":               {with("payload", deep), "payload" + strings.Repeat("[0]", 63), "nested deeper than 64"},
		"NUL":                    {with("payload", `{"a": [1, {"b": "a\u0000b"}]}`), "payload.a[1].b", "NUL character"},
		"NUL in a key":           {with("payload", `{"a": 1, "\u0000": 1}`), "payload.a", "NUL character"},
		"invalid UTF-8":          {with("payload", "\"\xff\""), "payload", "invalid UTF-8 at byte"},
		"half a surrogate":       {with("payload", `"\ud800"`), "payload", "half a surrogate"},
		"other half":             {with("source", `"\udc00"`), "source", "half a surrogate"},
		"huge number":            {with("payload", `[{}, [], 1e400000]`), "payload[2]", "exponent"},
		"tiny number":            {with("payload", `1E-99999999999999999999`), "payload", "exponent"},
		"too deep for Go": {
			with("payload", strings.Repeat("[", 20000)+strings.Repeat("]", 20000)), "",
			"nested deeper than 64",
		},
		"numbers that grow":  {with("payload", "["+strings.Repeat("1e1000,", 50_000)+"0]"), "payload[1400]", "written out"},
		"the same key twice": {with("payload", `{"a": {"b": 1, "c": 2, "\u0062": 3}}`), "payload.a.c", `the key "b" twice`},
		"a field twice":      {`{"queue": "a", "queue": "b", "kind": "k", "payload": 1}`, "queue", `the key "queue" twice`},
		"key twice of many":  {with("payload", "{"+manyKeys(100)+`, "k7": 1}`), "payload.k99", `the key "k7" twice`},
		"a field in capitals": {
			`{"queue": "a", "kind": "k", "payload": 1, "Priority": 1}`, "Priority",
			`unknown field; use "priority"`,
		},
		"long number": {with("payload", strings.Repeat("9", 2000)), "payload", "longer than"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := message.Parse([]byte(test.body))
			var invalid *message.InvalidError
			require.ErrorAs(t, err, &invalid)
			require.Len(t, invalid.Fields, 1, err)
			require.Equal(t, test.field, invalid.Fields[0].Field)
			require.Contains(t, invalid.Fields[0].Message, test.want)
		})
	}
}

func manyKeys(n int) string {
	keys := make([]string, n)
	for i := range keys {
		keys[i] = fmt.Sprintf(`"k%d": {"a": 1, "k%d": [{"a": 1}]}`, i, i)
	}
	return strings.Join(keys, ", ")
}

func TestCheckJSON_AllowsEqualKeysInDifferentObjects(t *testing.T) {
	t.Parallel()
	require.NoError(t, message.CheckJSON([]byte(`[{"a": {"a": [{"a": 1}, {"a": "a"}]}, "b": "a"}, {"a": 1}, "a", "a", {`+
		manyKeys(300)+`}]`)))
	require.NoError(t, message.CheckJSON([]byte(`[`+strings.Repeat("1.25e-9,", 100_000)+`0]`)), "measurements")
}

func BenchmarkCheckJSON(b *testing.B) {
	raw := []byte(`{"queue": "q", "kind": "k", "payload": {` + manyKeys(30) + `}}`)
	b.SetBytes(int64(len(raw)))
	for b.Loop() {
		if err := message.CheckJSON(raw); err != nil {
			b.Fatal(err)
		}
	}
}

func TestParse_ReportsEveryInvalidField(t *testing.T) {
	t.Parallel()
	_, err := message.Parse([]byte(`{"priority": 9, "payload": 1}`))
	var invalid *message.InvalidError
	require.ErrorAs(t, err, &invalid)
	require.Len(t, invalid.Fields, 3)
}

func TestParse_AcceptsEscapedBackslash(t *testing.T) {
	t.Parallel()
	_, err := message.Parse([]byte(`{"queue": "q", "kind": "k", "payload": "\\u0000 \\ud800"}`))
	require.NoError(t, err)
}

func TestParseBatch_RejectsInvalidBatches(t *testing.T) {
	t.Parallel()
	good := `{"queue": "q", "kind": "k", "payload": 1}`
	messages, err := message.ParseBatch([]byte(`{"messages": [`+good+`,`+good+`]}`), 10, 1<<20)
	require.NoError(t, err)
	require.Len(t, messages, 2)

	for body, want := range map[string]string{
		`{"messages": []}`: "has 0 messages",
		`{"messages": [` + good + `,` + good + `,` + good +
			`]}`: "has 3 messages",
		`{"messages": [` + good +
			`, {"queue": "q", "kind": "k", "payload": 1, "priority": 7}]}`: "messages[1].priority: is 7",
		`{"messages": [{"messageId": "a", "queue": "q", "kind": "k", "payload": 1}, {"messageId": "a", "queue": "q", "kind": "k", "payload": 2}]}`: "messages[1].messageId: is also the id of messages[0]",
		`{"messages": [` + good + `, {"queue": "q", "kind": "k", "payload": "` + strings.Repeat("x", 300) +
			`"}]}`: "messages[1]: is 342 bytes long; at most 200",
		`{"messages": [{"queue": "q", "Queue": "r", "kind": "k", "payload": 1}]}`: `Queue: unknown field; use "queue"`,
		`{"message": []}`: "message: unknown field",
	} {
		_, err := message.ParseBatch([]byte(body), 2, 200)
		require.ErrorContains(t, err, want)
	}
}

// FuzzCheckJSON checks that text which passes CheckJSON is JSON that decodes, except for numbers that float64 cannot
// represent.
func FuzzCheckJSON(f *testing.F) {
	for _, seed := range []string{
		`{"a": "\u0000"}`, `[1e5, "\ud83d\ude00", "\\"]`, `"\ud800\u0041"`,
		`-0.5e-3`, "\"\xff\"",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		err := message.CheckJSON(raw)
		var invalid *message.InvalidError
		if err != nil && !errors.As(err, &invalid) {
			t.Fatal(err)
		}
		var v any
		if err == nil && json.Unmarshal(raw, &v) != nil && !strings.Contains(json.Unmarshal(raw, &v).Error(), "float64") {
			t.Fatalf("%q passes and does not decode: %v", raw, json.Unmarshal(raw, &v))
		}
	})
}

func TestArgs_EqualsMarshaledMessage(t *testing.T) {
	t.Parallel()
	for _, raw := range []string{
		`{"messageId": "m", "queue": "q", "kind": "k", "payload": {"payload":  0, "a": "<&>\"payload\":0"}}`,
		`{"messageId": "m", "queue": "\"payload\":0", "kind": "k", "payload": null, "metadata": {"payload": 0}}`,
		`{"queue": "q", "kind": "k", "payload": [1.50, "é"], "tags": ["abc"], "orderingKey": "\"payload\":0"}`,
	} {
		msg, err := message.Parse([]byte(raw))
		require.NoError(t, err)
		for _, m := range []message.Message{*msg, msg.Exact()} {
			want, err := json.Marshal(m)
			require.NoError(t, err)
			got, err := m.Args()
			require.NoError(t, err)
			require.JSONEq(t, string(want), got)
		}
	}
	got, err := message.Message{MessageID: "m"}.Args()
	require.NoError(t, err)
	require.JSONEq(t, `{"messageId": "m", "queue": "", "kind": "", "payload": null}`, got)
}

func TestArgs_HasAllFields(t *testing.T) {
	t.Parallel()
	var m message.Message
	now := time.Now()
	for i, field := range reflect.Indirect(reflect.ValueOf(&m)).Fields() {
		if !field.CanSet() {
			continue
		}
		switch value := field.Addr().Interface().(type) {
		case *string:
			*value = "a<é" + i.Name
		case *int:
			*value = 3
		case *json.RawMessage:
			*value = json.RawMessage(`{"a": "` + i.Name + `"}`)
		case *[]string:
			*value = []string{"abc"}
		case *map[string]string:
			*value = map[string]string{"A": "b"}
		case **time.Time:
			*value = &now
		default:
			t.Fatalf("%s: unknown type %T", i.Name, value)
		}
	}
	want, err := json.Marshal(m)
	require.NoError(t, err)
	got, err := m.Args()
	require.NoError(t, err)
	require.JSONEq(t, string(want), got)
}

func TestParse_ChecksIDsAndKinds(t *testing.T) {
	t.Parallel()
	for text, valid := range map[string]struct{ id, kind bool }{
		"a": {true, true}, "a.b-c_d": {true, true}, "a.b:c~d@e+f=g-h": {true, false}, "-a": {false, true},
		"a..b": {true, false}, ".a": {false, false}, "a.": {true, false}, "é": {false, false}, "a\\n": {false, false},
	} {
		for field, ok := range map[string]bool{"messageId": valid.id, "kind": valid.kind} {
			fields := map[string]string{"messageId": "m", "kind": "k"}
			fields[field] = text
			_, err := message.Parse([]byte(`{"messageId": "` + fields["messageId"] + `", "kind": "` + fields["kind"] +
				`", "queue": "q", "payload": 1}`))
			require.Equal(t, ok, err == nil, "%s %q: %v", field, text, err)
		}
	}
}

func TestParseBatch_RefusesNumbersThatGrowTooMuch(t *testing.T) {
	t.Parallel()
	large := `{"queue": "default", "kind": "k", "payload": [` + strings.Repeat("1e1000, ", 100) + `1]}`
	small := `{"queue": "default", "kind": "k", "payload": "` + strings.Repeat("x", 100_000) + `"}`
	_, alone := message.Parse([]byte(large))
	require.ErrorContains(t, alone, "payload[65]: has numbers up to byte")
	_, err := message.ParseBatch([]byte(`{"messages": [`+small+`, `+large+`]}`), 2, 1<<20)
	require.ErrorContains(t, err, "messages[1].payload[65]: has numbers up to byte")
}
