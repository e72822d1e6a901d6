package main_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestOutput_FormatsAndCompletions runs the commands on a dlqd with one dead letter.
func TestOutput_FormatsAndCompletions(t *testing.T) {
	t.Parallel()
	receiver := startReceiver(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = w.Write([]byte(`{"error": {"code": "INVALID_IBAN", "message": "` + strings.Repeat("no IBAN ", 12) + `"}}`))
	})
	s := serve(t, "--database-url", postgrestest.URL(t), "--destination", receiver)
	api := func(args ...string) string { return ok(t, append(args, "--api-url", s.api)...) }
	api("send", "--kind", "payment.captured", `{"amount": 12345678901234567890, "note": "yes"}`)
	var id string
	require.Eventually(t, func() bool {
		id = strings.TrimSpace(api("list", "-o", "name", "--status", "dlq_manual"))
		return id != ""
	}, 5*time.Minute, 50*time.Millisecond)

	require.JSONEq(t, api("show", id, "--json"), api("show", id, "-o", "json"))
	text := api("show", id, "-o", "yaml")
	require.Contains(t, text, "amount: 12345678901234567890", "digits stay")
	var fromYAML, fromJSON struct {
		ID    string
		Event struct {
			Payload struct{ Note string }
		} `json:"originalEvent" yaml:"originalEvent"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(text), &fromYAML))
	require.NoError(t, json.Unmarshal([]byte(api("show", id, "-o", "json")), &fromJSON))
	require.Equal(t, fromJSON, fromYAML)
	require.Equal(t, id+"\n", api("show", id, "-o", "name"))
	require.Contains(t, api("list"), strings.Repeat("no IBAN ", 11), "without a terminal, values are complete")
	require.Equal(t, "default\n", api("queues", "-o", "name"))
	var group []string // a queue and a fingerprint, the arguments of groups show
	require.Eventually(t, func() bool {
		group = strings.Fields(api("groups", "-o", "name"))
		return len(group) == 2
	}, 5*time.Minute, 50*time.Millisecond)
	require.Equal(t, strings.Join(group, " ")+"\n", api("groups", "show", group[0], group[1], "-o", "name"))
	_, stderr, code := run(t, "list", "-o", "name", "--limit", "1", "--api-url", s.api)
	require.Zero(t, code)
	require.Empty(t, stderr, "one entry is the last page")
	_, stderr, code = run(t, "list", "-o", "xml")
	require.Equal(t, 2, code)
	require.Equal(t, "dlqd: --output xml: must be json, yaml, wide, name\n", stderr)
	_, stderr, code = run(t, "discard", id, "-o", "wide")
	require.Equal(t, 2, code)
	require.Equal(t, "dlqd: --output wide: must be json, yaml\n", stderr)

	for _, args := range [][]string{
		{"list", "--queue", "no-such-queue"},
		{"list", "queue:no-such-queue"},
		{"groups", "--queue", "no-such-queue"},
		{"discard", "--queue", "no-such-queue", "--dry-run"},
		{"replay", "queue:no-such-queue", "--dry-run"},
		{"audit", "--queue", "no-such-queue"},
		{"stats", "--queue", "no-such-queue"},
	} {
		_, stderr, code := run(t, append(args, "--api-url", s.api)...)
		require.Zero(t, code, "%v: %s", args, stderr)
		require.Contains(t, stderr, "there is no queue no-such-queue (queues: default)", args)
	}
	_, stderr, _ = run(t, "list", "--queue", "default", "--status", "dlq_failed", "--api-url", s.api)
	require.Empty(t, stderr)

	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"list", "--queue", ""}, "default"},
		{[]string{"discard", "--queue", "x,def"}, "x,default"},
		{[]string{"list", "--kind", "pay"}, "payment.captured"},
		{[]string{"list", "--status", ""}, "dlq_manual"},
		{[]string{"list", "--status", "dlq_failed,"}, "dlq_failed,dlq_manual"},
		{[]string{"groups", "--status", ""}, "regressed"},
		{[]string{"list", "--error-class", "val"}, "validation"},
		{[]string{"list", "-o", ""}, "wide"},
		{[]string{"list", "status:man"}, "status:manual"},
		{[]string{"replay", "queue:def"}, "queue:default"},
		{[]string{"queues", "pause", ""}, "default"},
		{[]string{"groups", "show", ""}, "default"},
		{[]string{"groups", "show", "default", ""}, group[1]},
		{[]string{"breakers", "open", ""}, "default"},
		{[]string{"show", ""}, id},
	} {
		args := slices.Insert(slices.Clone(test.args), len(test.args)-1, "--api-url="+s.api)
		if strings.HasPrefix(test.args[len(test.args)-2], "-") { // insert before the flag, whose value must follow it
			args = slices.Concat(test.args[:len(test.args)-2], []string{"--api-url=" + s.api}, test.args[len(test.args)-2:])
		}
		out := ok(t, append([]string{"__complete"}, args...)...)
		var values []string
		for line := range strings.Lines(out) {
			value, _, _ := strings.Cut(strings.TrimSpace(line), "\t")
			values = append(values, strings.TrimSpace(value))
		}
		require.Contains(t, values, test.want, "%v: %s", test.args, out)
	}
}
