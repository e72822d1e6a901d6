package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/api"
)

const testEntry = "0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"

// eachCommand calls fn with every command, except for commands that only group others.
func eachCommand(cmd *cobra.Command, fn func(*cobra.Command)) {
	for _, sub := range cmd.Commands() {
		eachCommand(sub, fn)
	}
	if cmd.Runnable() && (!cmd.HasSubCommands() || cmd.Flags().Lookup("api-url") != nil) {
		fn(cmd)
	}
}

// runWithFakeAPI runs a command. It returns the requests that the command sent to the API and the command's output as
// one text, and the command's error.
func runWithFakeAPI(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var mu sync.Mutex
	var seen bytes.Buffer
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		body, _ := io.ReadAll(r.Body)
		_, _ = fmt.Fprintf(&seen, "%s %s %s\n", r.Method, r.URL, body)
		run := `"run": {"status": "completed"}`
		if bytes.Contains(body, []byte(`"dryRun":true`)) {
			run = `"preview": {"total": 3}`
		}
		_, _ = io.WriteString(w, `{`+run+`, "status": "completed", "total": 3}`)
	}))
	defer api.Close()
	root := newRoot(t.Context())
	root.SetArgs(append(args, "--api-url", api.URL))
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&out)
	err := root.ExecuteContext(t.Context())
	return seen.String() + out.String(), err
}

// otherValue returns a valid value of a flag that differs from the flag's default.
func otherValue(f *pflag.Flag) string {
	switch {
	case f.Value.Type() == "bool":
		return map[string]string{"true": "false", "false": "true"}[f.DefValue]
	case f.Name == "payload-contains", f.Name == "payload", f.Name == "merge-patch":
		return `{"a": 7}`
	case f.Name == "patch":
		return `[{"op": "remove", "path": "/a"}]`
	case f.Name == "id":
		return testEntry
	case f.Name == "format":
		return "csv"
	case f.Name == "since":
		return "2026-11-28T09:00:00Z"
	}
	return "7"
}

func TestFlags_APICommandsUseOrRejectEveryFlag(t *testing.T) {
	t.Parallel()
	needs := map[string][]string{
		"send": {"--kind", "k"}, "automatic on": {"--all"}, "automatic off": {"--all"}, "automatic reset": {"--all"},
		"approvals approve": {"--expect", "6"}, "sources rewind": {"--topic", "t"},
		"feeds rewind": {"--since", "2026-11-28T08:00:00Z"},
	}
	tried := 0
	eachCommand(newRoot(t.Context()), func(cmd *cobra.Command) {
		if cmd.Flags().Lookup("api-url") == nil {
			return
		}
		path := strings.Fields(cmd.CommandPath())[1:]
		if path[0] == "login" { // see login_test.go
			return
		}
		forms := [][]string{nil}
		switch _, argument, _ := strings.Cut(cmd.Use, " "); {
		case strings.HasPrefix(argument, "PAYLOAD"):
			forms = [][]string{{"{}"}}
		case strings.HasPrefix(argument, "["):
			forms = [][]string{nil, {testEntry}}
		case argument != "" && !strings.HasPrefix(argument, "("):
			forms = [][]string{slices.Repeat([]string{testEntry}, len(strings.Fields(argument)))}
		}
		for _, form := range forms {
			base := slices.Concat(path, form, needs[strings.Join(path, " ")])
			if cmd.Flags().Lookup("all") != nil && cmd.Flags().Lookup("status") != nil && len(form) == 0 {
				base = append(base, "--status", "dlq_manual")
			}
			without, err := runWithFakeAPI(t, base...)
			require.NoError(t, err, base)
			cmd.Flags().VisitAll(func(f *pflag.Flag) {
				if f.Name == "help" || f.Name == "api-url" || f.Name == "all-at-once" /* the default without a terminal */ ||
					f.Name == "plain-http" /* TestFlags_PlainHTTPAllowsUnencryptedTokens */ || slices.Contains(base, "--"+f.Name) {
					return
				}
				tried++
				with, err := runWithFakeAPI(t, append(base, "--"+f.Name+"="+otherValue(f))...)
				if err != nil {
					var usage *usageError
					require.ErrorAs(t, err, &usage, "%v --%s", base, f.Name)
					require.NotContains(t, with, "POST /", "%v --%s: the command called the API before it rejected the flag",
						base, f.Name)
					return
				}
				require.NotEqual(t, without, with, "%v: --%s has no effect and is not rejected", base, f.Name)
			})
		}
	})
	require.Greater(t, tried, 200)
}

// TestFlags_PlainHTTPAllowsUnencryptedTokens checks that a client sends a token over http only to this machine, unless
// --plain-http is given.
func TestFlags_PlainHTTPAllowsUnencryptedTokens(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(file, []byte("x"), 0o600))
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // nothing is sent
	for flag, refused := range map[string]bool{"--plain-http=false": true, "--plain-http": false} {
		root := newRoot(t.Context())
		root.SetArgs([]string{"list", "--api-url", "http://192.0.2.1:1", "--token-file", file, flag})
		root.SetOut(io.Discard)
		root.SetErr(io.Discard)
		err := root.ExecuteContext(ctx)
		require.Error(t, err)
		require.Equal(t, refused, strings.Contains(err.Error(), "--plain-http allows it"), err)
	}
}

// TestFlags_OtherCommandsHaveKnownFlags lists the flags of the commands that do not call the API, and the tests that
// use the flags. A new flag makes the test fail until the list has the flag.
func TestFlags_OtherCommandsHaveKnownFlags(t *testing.T) {
	t.Parallel()
	const (
		// TestFlags_DatabaseURLExcludesEmbeddedServer
		database = "data-dir database-url database-url-file postgres-bin river-schema schema"
		policy   = "config-dir destination env" // TestFlags_DestinationsOfPolicyExcludeDestination, config_test.go
	)
	known := map[string]string{
		// TestFlags_ServeRejectsFlagsWithoutEffect, main_test.go
		"serve": database + " " + policy + " allowed-host allowed-origin api archive database-wait dlq-workers insecure listen " +
			"log-format log-level max-body-bytes max-connections max-conns max-requests otlp-endpoint poll-interval poll-only " +
			"process rate-limit replica-url replica-url-file river-ui stop-timeout tls-cert tls-client-ca tls-key",
		"demo":            "alerts postgres-bin",
		"receiver":        "listen troubles",
		"alerts render":   "console-url runbook-url", // alerts_test.go
		"config check":    "env",
		"config diff":     "env",
		"config schema":   "",
		"config show":     policy,
		"config test":     policy,
		"migrate up":      database + " own-river",
		"migrate down":    database + " to",
		"migrate status":  database,
		"grants":          "database-url database-url-file part river-schema role schema", // attach_test.go
		"attach":          database + " backfill dry-run",
		"detach":          database + " drop-data",
		"archive list":    "archive data-dir json", // archive_test.go
		"archive verify":  database + " archive",
		"archive show":    "archive audit data-dir",
		"archive restore": database + " archive id keep note",
		"capture status":  database + " json",
		"capture on":      database + " actor limit note",
		"capture off":     database + " actor note",
		"capture strict":  database + " actor limit note",
		"doctor":          database + " " + policy + " json replica-url replica-url-file", // doctor_test.go
		"psql":            database,
		"openapi":         "json",
		"sources test":    "env json records",                                           // TestBroker_TriesASourceWithoutStoring
		"version":         "json",                                                       // version_test.go
		"tokens create":   database + " actor expires kind name note queue role source", // tokens_test.go
		"tokens list":     database + " json",
		"tokens revoke":   database + " actor note",
		"tokens rotate":   database + " actor expires keep",
	}
	eachCommand(newRoot(t.Context()), func(cmd *cobra.Command) {
		if cmd.Flags().Lookup("api-url") != nil {
			return
		}
		var names []string
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" {
				names = append(names, f.Name)
			}
		})
		path := strings.Join(strings.Fields(cmd.CommandPath())[1:], " ")
		want := strings.Fields(known[path])
		slices.Sort(want)
		require.Equal(t, want, append([]string{}, names...), path)
	})
}

// requireRejected requires that dlqd rejects a command line with an error that contains reason.
func requireRejected(t *testing.T, reason string, args ...string) {
	t.Helper()
	root := newRoot(t.Context())
	root.SetArgs(args)
	root.SetOut(io.Discard)
	root.SetErr(io.Discard)
	err := root.ExecuteContext(t.Context())
	require.ErrorContains(t, err, reason, args)
	require.Equal(t, exitUsage, exitCode(err), args)
}

// TestFlags_WordMistakesWithoutGo checks that dlqd prints a mistake in a command line once, and without the words of
// Go's packages.
func TestFlags_WordMistakesWithoutGo(t *testing.T) {
	t.Parallel()
	for reason, args := range map[string][]string{
		"--limit abc: must be a whole number":                     {"list", "--limit", "abc"},
		"--rate x: must be a number":                              {"replay", "--rate", "x"},
		"--stop-timeout 5: must be a duration":                    {"serve", "--stop-timeout", "5"},
		"--all x: must be true or false":                          {"replay", "--all=x"},
		"xyz is not the id of a dead letter":                      {"show", "xyz"},
		"--until soon: must be a time":                            {"groups", "mute", "q", "g", "--until", "soon"},
		"--for long: must be a duration":                          {"groups", "mute", "q", "g", "--for", "long"},
		"--payload: {x is not valid JSON":                         {"replay", testEntry, "--payload", "{x"},
		"--patch: must be a JSON Patch":                           {"replay", testEntry, "--patch", "{}"},
		"--listen localhost: must be host:port or unix:PATH":      {"serve", "--listen", "localhost"},
		"--listen 127.0.0.1:99999: port 99999 is neither":         {"serve", "--listen", "127.0.0.1:99999"},
		"wrong number of arguments: 0; usage: dlqd show ID":       {"show"},
		"nowhere: there is no such directory":                     {"config", "diff", "nowhere", "."},
		"--listen unix:/nowhere/dlqd.sock: must be unix: and the": {"serve", "--listen", "unix:/nowhere/dlqd.sock"},
	} {
		if args[0] == "serve" {
			dir := t.TempDir()
			requireRejected(t, reason, append(args, "--data-dir", filepath.Join(dir, "data"))...)
			require.NoDirExists(t, filepath.Join(dir, "data"), "Postgres has not been started")
			continue
		}
		requireRejected(t, reason, args...)
	}
}

func TestAPIError_SaysEachMistakeOnce(t *testing.T) {
	t.Parallel()
	for want, problem := range map[string]*api.Problem{
		"query.limit: expected number <= 500": {
			Detail: "validation failed",
			Errors: []api.ProblemCause{{Location: "query.limit", Message: "expected number <= 500"}},
		},
		"filter: a (at 1): unknown": {
			Detail: "filter: a (at 1): unknown", Errors: []api.ProblemCause{{Location: "query.q", Message: "unknown"}},
		},
		"path.id: x is not an id, such as " + exampleID: {
			Detail: "validation failed", Errors: []api.ProblemCause{{
				Location: "path.id", Message: "expected string to be RFC 4122 uuid: invalid UUID length: 1",
				Value: json.RawMessage(`"x"`),
			}},
		},
		"no such thing": {Detail: "no such thing"},
	} {
		require.Equal(t, want, (&apiError{problem}).Error())
	}
}

func TestFlags_DatabaseURLExcludesEmbeddedServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	url := "--database-url=postgres://127.0.0.1:1/x"
	eachCommand(newRoot(t.Context()), func(cmd *cobra.Command) {
		path := strings.Fields(cmd.CommandPath())[1:]
		if cmd.Flags().Lookup("database-url") == nil || cmd.Flags().Lookup("data-dir") == nil {
			return
		}
		args := append(slices.Clone(path), url)
		if strings.Contains(cmd.Use, " ID") {
			args = append(args, "x")
		}
		if path[0] == "archive" || path[0] == "serve" {
			args = append(args, "--archive", dir)
		}
		if path[0] != "archive" { // archive restore first reads the unit
			requireRejected(t, "--data-dir has no effect if --database-url", append(args, "--data-dir", dir)...)
			if path[0] != "psql" {
				requireRejected(t, "--postgres-bin has no effect if --database-url", append(args, "--postgres-bin", dir)...)
			}
		}
	})
	for _, args := range [][]string{{"migrate", "status"}, {"migrate", "down"}, {"doctor"}, {"psql"}, {"capture", "off"}} {
		requireRejected(t, "there is no database", append(args, "--database-url=", "--data-dir", dir+"/mistyped")...)
		require.NoDirExists(t, dir+"/mistyped", "the data directory was created")
	}
	requireRejected(t, "--data-dir has no effect if --archive", "archive", "list", "--archive", dir, "--data-dir", dir)
}

func TestFlags_ServeRejectsFlagsWithoutEffect(t *testing.T) {
	t.Parallel()
	url := "--database-url=postgres://127.0.0.1:1/x"
	requireRejected(t, "--insecure has no effect without --api or --listen", "serve", url, "--dlq-workers", "--insecure")
	requireRejected(t, "--max-body-bytes has no effect without --api", "serve", url, "--dlq-workers", "--listen",
		"127.0.0.1:0", "--max-body-bytes", "7")
	for _, flag := range []string{
		"--allowed-host=a", "--allowed-origin=https://a", "--rate-limit=1/s", "--max-requests=7",
		"--max-connections=7", "--tls-cert=a", "--tls-key=a", "--tls-client-ca=a",
	} {
		name, _, _ := strings.Cut(flag, "=")
		// covered by the tests TestDoor_… of internal/server
		requireRejected(t, name+" has no effect without --api", "serve", url, "--process", flag)
	}
	requireRejected(t, "--tls-cert and --tls-key must be set together", "serve", url, "--tls-cert", "a")
	requireRejected(t, "--tls-client-ca needs --tls-cert", "serve", url, "--tls-client-ca", "a")
	requireRejected(t, `--rate-limit "7": must be requests/time`, "serve", url, "--rate-limit", "7")
	requireRejected(t, `--allowed-host "a:80": must be a host name`, "serve", url, "--allowed-host", "a:80")
	requireRejected(t, `--allowed-origin "*": must be scheme://host`, "serve", url, "--allowed-origin", "*")
	requireRejected(t, "--otlp-endpoint: must be the http or https URL of a collector", "serve", url, "--otlp-endpoint",
		"localhost:4318")
	requireRejected(t, "--river-ui: must be the http or https URL", "serve", url, "--river-ui", "javascript:alert(1)")
	requireRejected(t, "--otlp-endpoint: must not contain a password",
		"serve", url, "--otlp-endpoint", "http://a:b@localhost:4318")
	requireRejected(t, "--database-url-file has no effect with --database-url", "serve", url,
		"--database-url-file", os.Args[0])
	replica := "--replica-url=postgres://127.0.0.1:1/y"
	requireRejected(t, "--replica-url has no effect without --api", "serve", url, "--process", replica)
	requireRejected(t, "--replica-url has no effect with an embedded Postgres", "serve", "--database-url=", replica)
	requireRejected(t, "--replica-url-file has no effect with --replica-url", "serve", url, replica,
		"--replica-url-file", os.Args[0])
	requireRejected(t, "--poll-interval has no effect without --dlq-workers", "serve", url, "--api", "--process",
		"--poll-interval", "7s")
	requireRejected(t, "--poll-only has no effect without --process and --dlq-workers", "serve", url,
		"--api", "--poll-only")
}

func TestFlags_DestinationsOfPolicyExcludeDestination(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "retry-policies.yaml"),
		[]byte("queues: {q: {destination: d}}\ndestinations: {d: {url: 'http://127.0.0.1:7/'}}\n"), 0o600))
	for _, args := range [][]string{{"serve", "--database-url=postgres://127.0.0.1:1/x"}, {"config", "show"}} {
		requireRejected(t, "--destination has no effect if the policy names its destinations",
			append(args, "--config-dir", dir, "--destination", "http://127.0.0.1:8/")...)
	}
}

// TestFlags_SingleEntryCommandsRejectBulkFlags checks that a command with the id of a dead letter rejects flags that
// select many.
func TestFlags_SingleEntryCommandsRejectBulkFlags(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"discard", "expire", "resolve", "park", "unpark", "reopen", "replay"} {
		for _, flag := range []string{"--all", "--queue=payments", "--id=" + testEntry} {
			requests, err := runWithFakeAPI(t, verb, testEntry, flag)
			require.ErrorContains(t, err, "has no effect with an ID", "%s %s", verb, flag)
			require.Empty(t, requests)
		}
	}
	for _, verb := range []string{"discard", "expire", "resolve", "park", "unpark", "reopen"} {
		requests, err := runWithFakeAPI(t, verb, testEntry, "--dry-run")
		require.ErrorContains(t, err, "--dry-run has no effect with an ID")
		require.Empty(t, requests)
	}
	for _, flag := range []string{"--to-queue=q", "--rate=5", "--detach", "--newest-first"} {
		requests, err := runWithFakeAPI(t, "replay", testEntry, flag)
		require.ErrorContains(t, err, "has no effect with an ID", flag)
		require.Empty(t, requests)
	}
	for _, flag := range []string{"--patch=[]", "--merge-patch={}"} {
		requests, err := runWithFakeAPI(t, "replay", testEntry, "--payload={}", flag)
		require.ErrorContains(t, err, "has no effect with --payload", flag)
		require.Empty(t, requests)
	}
	_, err := runWithFakeAPI(t, "replay", "--all", "--payload={}")
	require.ErrorContains(t, err, "--payload has no effect without an ID")
}

// A limit of 0 is a usage error, and so are flags that exclude each other. Commands on a single entry accept the flags
// of the connection.
func TestFlags_CommonFlags(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"list", "--limit", "0"}, "--limit 0: must be at least 1"},
		{[]string{"list", "--json", "-o", "yaml"}, "--output has no effect with --json"},
		{[]string{"replay", testEntry, "--resume", "--from-start"}, "--from-start has no effect with --resume"},
	} {
		requests, err := runWithFakeAPI(t, test.args...)
		var usage *usageError
		require.ErrorAs(t, err, &usage, test.args)
		require.EqualError(t, err, test.want)
		require.Empty(t, requests)
	}
	token := filepath.Join(t.TempDir(), "token")
	require.NoError(t, os.WriteFile(token, []byte("x"), 0o600))
	for _, verb := range []string{"discard", "replay"} {
		requests, err := runWithFakeAPI(t, verb, testEntry, "--token-file", token)
		require.NoError(t, err)
		require.Contains(t, requests, "POST /api/dlq/entries/"+testEntry)
	}
}

func TestCommands_UnknownSubcommandFails(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"breakers", "opne", "a"},
		{"migrate", "upp"},
		{"archive", "lst"},
		{"config", "chek"},
		{"replays", "pase"},
		{"queues", "puse"},
		{"capture", "of"},
	} {
		root := newRoot(t.Context())
		root.SetArgs(args)
		root.SetOut(io.Discard)
		root.SetErr(io.Discard)
		require.Error(t, root.ExecuteContext(t.Context()), args)
	}
}

// TestFlags_JSONNumbersKeepTheirDigits checks that numbers in JSON reach the API with the digits that the user typed.
func TestFlags_JSONNumbersKeepTheirDigits(t *testing.T) {
	t.Parallel()
	const document = `{"acct":9007199254740993,"sum":0.12345678901234567890123}`
	for _, args := range [][]string{
		{"replay", "--payload-contains", document},
		{"discard", "--payload-contains", document},
		{"erase", "--payload-contains", document},
		{"export", "--payload-contains", document},
		{"replay", "--all", "--merge-patch", document},
		{"replay", "--all", "--patch", `[{"op":"add","path":"","value":` + document + `}]`},
		{"replay", testEntry, "--payload", document},
		{"send", "--kind", "k", document},
	} {
		requests, err := runWithFakeAPI(t, args...)
		require.NoError(t, err, args)
		require.Contains(t, requests, document, args)
	}
	const spaced = `{ "b" : 1.0,"a":"<&>" }` // a delivery sends exactly these bytes
	for _, args := range [][]string{{"replay", testEntry, "--payload", spaced}, {"send", "--kind", "k", spaced}} {
		requests, err := runWithFakeAPI(t, args...)
		require.NoError(t, err, args)
		require.Contains(t, requests, `"payload":`+spaced+"}", args)
	}
}
