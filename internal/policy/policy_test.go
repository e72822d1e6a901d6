package policy_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
)

const secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

func load(t *testing.T, files policytest.Files, env string) (*policy.Policy, string, error) {
	t.Helper()
	dir := policytest.Dir(t, files)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "bank.secret"), []byte(secret+"\n"), 0o600))
	p, err := policy.Load(policy.Source{Dir: dir, Env: env, Destination: policytest.Destination})
	return p, dir, err
}

func TestDefault(t *testing.T) {
	t.Parallel()
	p, err := policy.Default("http://a.example/")
	require.NoError(t, err)
	require.Equal(t, []string{"default"}, p.QueueNames())
	q := p.Queues["default"]
	require.Equal(t, policy.Queue{
		Name: "default", MaxAttempts: 3,
		Backoff: policy.Backoff{Kind: "exponential", Delay: time.Second}, Timeout: 30 * time.Second,
		Destination: "default", WhenOpen: "reject", Payload: "parsed",
		Retention: policy.Retention{
			Resolved: 30 * 24 * time.Hour, Failed: 90 * 24 * time.Hour, Archived: 365 * 24 * time.Hour,
		},
	}, *q)
	require.Equal(t, "http://a.example/", p.Destinations["default"].URL)
	require.Equal(t, policy.Breaker{
		Enabled: true, FailureRate: 50, Window: time.Minute, MinimumCount: 10,
		ConsecutiveFailures: 20, OpenFor: 30 * time.Second, Probes: 10, SuccessRate: 80,
	}, p.Breaker("default"))
	require.Equal(t, 100, p.Concurrency("default"))
	require.Equal(t, []time.Duration{time.Minute, 5 * time.Minute, 15 * time.Minute, 30 * time.Minute, time.Hour},
		p.Routing.Strategies["immediate"].Delays)
	require.False(t, p.SmartRetryOn("default"))
	for _, s := range p.Settings() {
		if s.Path == "destinations.default.url" {
			require.Equal(t, "--destination", s.Origin)
		} else {
			require.Equal(t, "built in", s.Origin, s.Path)
		}
	}
}

func TestLoad_MergesOverlaysByKey(t *testing.T) {
	t.Parallel()
	p, dir, err := load(t, policytest.Files{
		"retry-policies": `defaults: {maxAttempts: 7}
queues:
  payments: {backoff: {kind: fixed, delay: 3s}, timeout: 2m, destination: bank}
  orders:
    destination: bank
    ordering: true
destinations:
  bank: {url: "https://bank.example/hook", secretFile: bank.secret}
`,
		"worker-pool": "queues: {payments: {concurrency: 7}}\n",
		"environments/prod/retry-policies": `queues:
  payments:
    timeout: 90s
destinations:
  bank: {redeliveriesPerSecond: 5}
`,
		"environments/prod/dlq-routing": "strategies: {immediate: {delays: [5s]}}\n",
	}, "prod")
	require.NoError(t, err)
	q := p.Queues["payments"]
	require.Equal(t, 90*time.Second, q.Timeout)
	require.Equal(t, policy.Backoff{Kind: "fixed", Delay: 3 * time.Second}, q.Backoff)
	require.Equal(t, 7, q.MaxAttempts, "the file's defaults do not apply to the queue")
	require.True(t, p.Queues["orders"].Ordering)
	require.Equal(t, 7, p.Concurrency("payments"))
	require.Equal(t, 100, p.Concurrency("orders"))
	require.Equal(t, policy.Pace{Name: "destination:bank", PerSecond: 5}, p.PaceOf("orders"))
	require.Equal(t, policy.Pace{Name: "queue:elsewhere", PerSecond: 100}, p.PaceOf("elsewhere"))
	require.Equal(t, []time.Duration{5 * time.Second}, p.Routing.Strategies["immediate"].Delays)
	require.Equal(t, 5, p.Routing.Strategies["immediate"].MaxRetries, "an overlay changed a value that it does not set")
	require.Equal(t, 90*time.Second, p.MaxTimeout())
	require.NotNil(t, p.Destinations["bank"].Signer())
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		require.NotContains(t, fmt.Sprintf(format, *p.Destinations["bank"]), "MfKQ", "a secret is printed")
	}

	origins := map[string]string{}
	for _, s := range p.Settings() {
		origins[s.Path] = s.Origin
		require.NotContains(t, s.String(), "MfKQ")
	}
	require.Equal(t, dir+"/environments/prod/retry-policies.yaml:3", origins["queues.payments.timeout"])
	require.Equal(t, dir+"/retry-policies.yaml:3", origins["queues.payments.backoff.delay"])
	require.Equal(t, dir+"/retry-policies.yaml:1", origins["queues.orders.maxAttempts"],
		"the origin of an inherited value is not the defaults")
	require.Equal(t, "built in", origins["queues.orders.whenOpen"])
}

func TestLoad_JSON(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "monitoring.json"),
		[]byte("{\n  \"$schema\": \"x\",\n  \"defaults\": {\"maxOpen\": 5, \"maxAge\": \"2d\"}\n}\n"), 0o600))
	p, err := policy.Load(policy.Source{Dir: dir, Destination: policytest.Destination})
	require.NoError(t, err)
	require.Equal(t, policy.Alert{MaxOpen: 5, MaxAge: 48 * time.Hour, NeedsPersonAfter: 15 * time.Minute},
		p.Alert("default"))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "monitoring.yaml"), nil, 0o600))
	_, err = policy.Load(policy.Source{Dir: dir, Destination: policytest.Destination})
	require.ErrorContains(t, err, "both exist; remove one")
}

func TestLoad_OIDC(t *testing.T) {
	t.Parallel()
	rules := policytest.Load(t, policytest.Files{"access": `authentication: [tokens, oidc]
oidc: {issuer: "https://login.example.com", clientID: dlqd-cli}
grants: [{groups: [ops], role: operator}]
`}).Access.Rules()
	require.Equal(t, access.OIDC{
		Issuer: "https://login.example.com", ClientID: "dlqd-cli", Audiences: []string{"dlqd-cli"},
		GroupsClaim: "groups", Scopes: []string{"openid", "profile", "email", "offline_access"},
	}, rules.OIDC)
	rules = policytest.Load(t,
		policytest.Files{"access": "oidc: {clientID: a, audience: b, usernameClaim: sub}"}).Access.Rules()
	require.Equal(t, []string{"b"}, rules.OIDC.Audiences)
}

func TestLoad_Approvals(t *testing.T) {
	t.Parallel()
	a := policytest.Load(t, policytest.Files{}).Access
	require.EqualValues(t, 1000, a.ExpectAbove)
	raw, err := a.Approvals.Published()
	require.NoError(t, err)
	require.JSONEq(t, `{"rules": [], "seconds": 86400}`, string(raw))
	next := policytest.Load(t, policytest.Files{"access": "authentication: [tokens]\napprovals: {expire: 2h, rules: " +
		"[{operations: [discard], queues: ['pay*'], above: 7}, {operations: [erase]}]}"})
	raw, err = next.Access.Approvals.Published()
	require.NoError(t, err)
	require.JSONEq(t, `{"rules": [{"operations": ["discard"], "queues": ["pay*"], "above": 7}, {"operations": ["erase"], "above": 0}], "seconds": 7200}`, string(raw))
	var lines []string
	for _, c := range policy.Diff(policytest.Load(t, policytest.Files{"access": "authentication: [tokens]"}), next) {
		lines = append(lines, c.String())
	}
	require.Equal(t, []string{
		"access approvals.expire: 24h -> 2h", "access approvals.rules = [] (removed)",
		"access approvals.rules[0] = {above: 7, operations: [discard], queues: [pay*]} (new)",
		"access approvals.rules[1] = {operations: [erase]} (new)",
	}, lines)
}

// Load reports every mistake with file, line, field and the allowed values.
func TestLoad_ReportsMistakesWithLines(t *testing.T) {
	t.Parallel()
	destination := "destinations: {d: {url: 'http://x'}}\n"
	for _, test := range []struct{ file, text, want string }{
		{"access", "authentication: [oidc]", "access.yaml:1: authentication: oidc requires oidc.issuer"},
		{"access", "authentication: [oidc]\noidc: {issuer: 'https://login.example.com'}", "and oidc.clientID"},
		{
			"access", "oidc:\n  issuer: http://login.example.com",
			`access.yaml:2: oidc.issuer: "http://login.example.com" must be https, or http on this machine`,
		},
		{"access", "oidc: {scopes: [email]}", "access.yaml:1: oidc.scopes: must contain openid"},
		{"access", "oidc: {audience: ['']}", "oidc.audience: contains an empty audience"},
		{"access", "oidc: {clientSecret: x}", "oidc.clientSecret: unknown field (known: audience, clientID, " +
			"clientSecretFile, groupsClaim, issuer, scopes, usernameClaim)"},
		{"access", "approvals:\n  rules: [{operations: [discard]}]", "access.yaml:2: approvals.rules: approvals require " +
			"authentication"},
		{"access", "approvals: {rules: [{operations: [park]}]}", "approvals.rules[0].operations[0]: is park; must be one " +
			"of replay,"},
		{"access", "approvals: {rules: [{queues: [a]}]}", "approvals.rules[0]: operations is required"},
		{"access", "approvals: {rules: [{operations: [erase], above: -1}]}", "approvals.rules[0].above: "},
		{"access", "authentication: [tokens]\napprovals: {rules: [{operations: [erase], queues: ['']}]}", "is not a pattern"},
		{"access", "approvals: {expire: 5s}", "access.yaml:1: approvals.expire: is 5s; must be 1m0s to 720h0m0s"},
		{"monitoring", "console:\n  color: red", `monitoring.yaml:2: console.color: "red" is not a colour, such as "#b91c1c"`},
		{"monitoring", "console: {color: '#b91c1'}", `console.color: "#b91c1" is not a colour`},
		{"retry-policies", "queues: [", "retry-policies.yaml:1: did not find"},
		{"retry-policies", "queues: []", "retry-policies.yaml:1: queues: is of type array; must be object"},
		{"retry-policies", "- a", "retry-policies.yaml:1: must be a mapping"},
		{"retry-policies", "a: 1\n---\nb: 1", "retry-policies.yaml:2: contains more than one document"},
		{"retry-policies", "queues: {a: {}, a: {}}", "retry-policies.yaml:1: mapping key \"a\" already defined"},
		{
			"retry-policies", "defaults: {timeout: 1s}\nqueues:\n  2024: {}",
			"retry-policies.yaml:3: the name 2024 must be a string: put it in quotes",
		},
		{
			"retry-policies", "queues:\n  a:\n    timeout: \"\"",
			`retry-policies.yaml:3: queues.a.timeout: "" is not a duration, such as 30s`,
		},
		{
			"retry-policies", "queues:\n  a:\n    timeout: 99999999999999h",
			`retry-policies.yaml:3: queues.a.timeout: "99999999999999h" is too long`,
		},
		{"retry-policies", "queues:\n  a:\n    attempts: 3", "retry-policies.yaml:3: queues.a.attempts: unknown field " +
			"(known: backoff, deadLetterLogicalFailures, destination, maxAttempts,"},
		{"retry-policies", "queues:\n  a:\n    maxAttempts: many", "retry-policies.yaml:3: queues.a.maxAttempts: is of " +
			"type string; must be integer"},
		{"retry-policies", "queues:\n  a: {maxAttempts: 5000}", "retry-policies.yaml:2: queues.a.maxAttempts: is 5000; " +
			"must be at most 1000"},
		{"retry-policies", "queues: {a: {whenOpen: hold}}", "queues.a.whenOpen: is hold; must be one of reject, accept"},
		{"retry-policies", "queues: {a: {timeout: soon}}", `queues.a.timeout: "soon" is not a duration, such as 30s`},
		{"retry-policies", "queues: {a: {timeout: 30}}", "queues.a.timeout: is of type number; must be string"},
		{
			"retry-policies", destination + "queues:\n  a:\n    timeout: 2h\n    destination: d",
			"retry-policies.yaml:4: queues.a.timeout: is 2h0m0s; must be 1ms to 1h0m0s",
		},
		{
			"retry-policies", destination + "queues:\n  a: {destination: b}",
			`retry-policies.yaml:3: queues.a.destination: unknown destination "b" (known: d)`,
		},
		{
			"retry-policies", destination + "queues: {a: {destination: d, retention: {resolved: 30s}}}",
			"queues.a.retention.resolved: is 30s; must be 1h0m0s to",
		},
		{"retry-policies", destination + "queues: {'A b': {destination: d}}", "queues.A b: a queue's name"},
		{"retry-policies", "destinations: {d: {url: 'ftp://x'}}", "destinations.d.url: must be an http or https URL"},
		{"retry-policies", "destinations: {d: {}}", "destinations.d: url is required"},
		{"retry-policies", "destinations: {d: {url: 'http://x', secret: '!'}}", "destinations.d.secret: must be base64"},
		{
			"retry-policies", "destinations: {d: {url: 'http://x', secret: QUFBQQ==}}",
			"destinations.d.secret: has 4 bytes; must have at least 24",
		},
		{"retry-policies", "destinations: {d: {url: 'http://x', secretFile: gone}}", "destinations.d.secretFile:"},
		{"access", "oidc: {clientSecretFile: gone}", "oidc.clientSecretFile:"},
		{"access", "sessions: {idle: 1m}", "sessions.idle:"},
		{"access", "sessions: {absolute: 400d}", "sessions.absolute:"},
		{"retry-policies", "destinations: {d: {urlFile: gone}}", "destinations.d.urlFile:"},
		{"retry-policies", "destinations: {d: {urlFile: bank.secret}}", "destinations.d.urlFile: must be an http or " +
			"https URL"},
		{
			"retry-policies", "destinations: {d: {url: 'http://x', urlFile: bank.secret}}",
			"destinations.d: has url and urlFile; remove one",
		},
		{
			"retry-policies", "destinations: {d: {url: 'grpc://x:1/shop.v1.Payments'}}",
			"destinations.d.url: must be grpc://host:port/package.Service/Method",
		},
		{
			"retry-policies", "destinations: {d: {url: 'http://x', descriptorFile: shop.binpb}}",
			"destinations.d.descriptorFile: is for gRPC methods",
		},
		{
			"retry-policies", "destinations: {d: {url: 'grpc://x:1/a.B/C', descriptorFile: gone}}",
			"destinations.d.descriptorFile: open ",
		},
		{
			"retry-policies", "destinations: {d: {url: 'grpc://x:1/a.B/C', descriptorFile: bank.secret}}",
			"must be a FileDescriptorSet",
		},
		{
			"retry-policies", "destinations: {d: {url: 'http://x', probe: {url: here}}}",
			"destinations.d.probe.url: must be an http or https URL",
		},
		{
			"retry-policies", destination + "data:\n  sensitivePaths: [card.number]",
			`data.sensitivePaths[0]: "card.number" begins with "card"; must be payload, headers, metadata`,
		},
		{
			"retry-policies", destination + "data: {sensitivePaths: [payload.a, 'payload.b.']}",
			`data.sensitivePaths[1]: "payload.b." ends with a dot`,
		},
		{
			"retry-policies", destination + "data: {sensitivePaths: ['payload...b']}",
			"has three dots; two dots match any depth",
		},
		{"retry-policies", destination + "data: {sensitivePaths: ['payload.a[0].b']}", "contains an array index"},
		{"retry-policies", destination + "data: {sensitivePaths: ['payload.a*']}", "has a * beside other characters"},
		{"retry-policies", destination + "data: {sensitivePatterns: [phones]}", "data.sensitivePatterns"},
		{"circuit-breaker", "destinations: {nowhere: {}}", "circuit-breaker.yaml:1: destinations.nowhere: unknown " +
			"destination (known: default)"},
		{"circuit-breaker", "riverQueues: {default: {}}", "riverQueues.default: dlqd delivers this queue"},
		{"circuit-breaker", "defaults: {failureRate: 120}", "defaults.failureRate: is 120; must be at most 100"},
		{"circuit-breaker", "defaults: {window: 1ms}", "defaults.window: is 1ms; must be 1s to 1h0m0s"},
		{"worker-pool", "queues: {nowhere: {concurrency: 1}}", "queues.nowhere: unknown queue (known: default)"},
		{"dlq-routing", "redeliveriesPerSecond: 1e-300", "redeliveriesPerSecond: is 1e-300; must be 0 (no limit), or 0.001 " +
			"or more"},
		{
			"retry-policies", "destinations: {bank: {url: 'http://x/', redeliveriesPerSecond: 1e-9}}",
			"destinations.bank.redeliveriesPerSecond: is 1e-09; must be 0 (no limit), or 0.001 or more",
		},
		{"dlq-routing", "classes: {transent: {strategy: manual}}", "classes.transent: unknown class (known: transient,"},
		{"dlq-routing", "classes: {transient: {strategy: later}}", "classes.transient.strategy: is later; must be one of " +
			"immediate, scheduled, conditional, manual"},
		{
			"dlq-routing", "strategies: {scheduled: {timeZone: Mars/Base}}",
			`strategies.scheduled.timeZone: "Mars/Base" is not a time zone`,
		},
		{"dlq-routing", "strategies: {scheduled: {hours: [24]}}", "strategies.scheduled.hours[0]: is 24; must be 0 to 23"},
		{
			"dlq-routing", "kinds: {charge: {orderingKey: customer..id}}",
			`kinds.charge.orderingKey: "customer..id" has an empty key`,
		},
		{
			"dlq-routing", `queues: {default: {orderingKey: "customer\0id"}}`,
			`queues.default.orderingKey: "customer\x00id" has a NUL character`,
		},
		{"dlq-routing", `kinds: {"a\0b": {orderingKey: id}}`, `kinds: "a\x00b" has a NUL character`},
		{"dlq-routing", "strategies: {immediate: {delays: [0s]}}", "strategies.immediate.delays[0]: is 0s; must be 1ms to"},
		{
			"dlq-routing", "rules:\n- {name: a, match: {}, class: outage}\n- {name: a, match: {}, class: outage}",
			`dlq-routing.yaml:3: rules[1].name: "a" is also the name of another rule`,
		},
		{"dlq-routing", "rules: [{match: {}}]", "rules[0]: name is required"},
		{"dlq-routing", "rules:\n- {name: a, match: {kind: k}}", "dlq-routing.yaml:2: rules[0]: has no effect: set a " +
			"class, a plan"},
		{
			"dlq-routing", "rules: [{name: backfilled, match: {kind: k}, class: outage}]",
			`rules[0].name: "backfilled" is reserved by dlqd`,
		},
		{"dlq-routing", "queues:\n  a:\n    plan: {strategy: soon}", "dlq-routing.yaml:3: queues.a.plan.strategy: is soon; " +
			"must be one of immediate, scheduled, conditional, manual"},
		{
			"dlq-routing", "kinds: {'report.*': {plan: {delays: [0s]}}}",
			"kinds.report.*.plan.delays[0]: is 0s; must be 1ms to",
		},
		{
			"dlq-routing", "kinds: {report: {classes: {bug: {strategy: manual}}}}",
			"kinds.report.classes.bug: unknown class (known: transient,",
		},
		{"dlq-routing", "automatic: {classes: {bug: {enabled: true}}}", "automatic.classes.bug: unknown class (known: " +
			"transient,"},
		{"dlq-routing", "queues:\n  default:\n    classes: {outag: {strategy: manual}}\nstrategies:\n  scheduled: " +
			"{timeZone: UTC}", "dlq-routing.yaml:3: queues.default.classes.outag: unknown class (known: transient,"},
		{
			"dlq-routing", "rules:\n- &q {name: a, match: {kind: k}, class: bug}\n- {<<: *q, name: b}",
			"dlq-routing.yaml:2: rules[1].class: is bug; must be one of transient,",
		},
		{"dlq-routing", "automatic: {all: {}}", "automatic.all: enabled is required"},
		{
			"dlq-routing", "automatic:\n  queues:\n    mailers: {enabled: true, include: [old]}",
			"dlq-routing.yaml:3: automatic.queues.mailers.include[0]: is old; must be one of backfilled, single-attempt",
		},
		{"dlq-routing", "automatic: {kind: {}}", "automatic.kind: unknown field (known: all, classes, kinds, queues)"},
		{
			"dlq-routing", "rules: [{name: a, match: {}, class: outage, tags: [no]}]",
			`rules[0].tags[0]: "no" must be 3 to 255`,
		},
		{"dlq-routing", "smartRetry: {classes: [bug]}", "smartRetry.classes[0]: is bug; must be one of transient, " +
			"rate_limited,"},
		{
			"dlq-routing", "rules: [{name: '', match: {kind: k}, class: outage}]",
			"rules[0].name: has 0 characters; must have at least 1",
		},
		{
			"dlq-routing", "rules: [{name: a, match: {message: '" + strings.Repeat("x", 1001) + "'}, class: outage}]",
			"rules[0].match.message: has 1001 characters; must have at most 1000",
		},
		{"retry-policy", "{}", "retry-policy.yaml is not a file of a policy (known: retry-policies,"},
	} {
		_, _, err := load(t, policytest.Files{test.file: test.text}, "")
		require.ErrorContains(t, err, test.want, test.text)
		for line := range strings.Lines(err.Error()) {
			require.Regexp(t, `\.yaml:[0-9]+: |is not a file of a policy`, line)
		}
	}
	_, _, err := load(t, policytest.Files{"environments/prod/monitoring": ""}, "production")
	require.ErrorContains(t, err, `unknown environment "production" (known: prod)`)
	_, _, err = load(t, nil, "../x")
	require.ErrorContains(t, err, "unknown environment")
	_, err = policy.Load(policy.Source{Dir: filepath.Join(t.TempDir(), "gone")})
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestVersion(t *testing.T) {
	t.Parallel()
	a, err := policy.Default("http://a/")
	require.NoError(t, err)
	again, err := policy.Default("http://a/")
	require.NoError(t, err)
	b, err := policy.Default("http://b/")
	require.NoError(t, err)
	require.Equal(t, a.Version(), again.Version())
	require.NotEqual(t, a.Version(), b.Version(), "the version does not depend on the content")

	dir := policytest.Dir(t, policytest.Files{"monitoring": "defaults: {maxOpen: 1}"})
	version := func() string {
		p, err := policy.Load(policy.Source{Dir: dir, Destination: policytest.Destination})
		require.NoError(t, err)
		return p.Version()
	}
	git := func(args ...string) string {
		out, err := exec.Command("git", append([]string{"-C", dir, "-c", "user.name=t", "-c", "user.email=t@example.com"},
			args...)...).CombinedOutput()
		require.NoError(t, err, string(out))
		return strings.TrimSpace(string(out))
	}
	hash := version()
	git("init", "--quiet")
	require.Equal(t, hash, version(), "files that Git does not track change the version")
	git("add", ".")
	git("commit", "--quiet", "-m", "policy")
	commit := git("rev-parse", "--short=12", "HEAD")
	require.Equal(t, commit, version())
	require.NoError(t, os.WriteFile(filepath.Join(dir, "monitoring.yaml"), []byte("defaults: {maxOpen: 2}"), 0o600))
	changed := version()
	require.Regexp(t, "^"+commit+"-dirty-[0-9a-f]{6}$", changed)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "monitoring.yaml"), []byte("defaults: {maxOpen: 3}"), 0o600))
	require.NotEqual(t, changed, version(), "a change of a file does not change the version")
	loaded, err := policy.Load(policy.Source{Dir: dir, Destination: policytest.Destination})
	require.NoError(t, err)
	require.False(t, loaded.Committed())
	git("commit", "--quiet", "--all", "-m", "more")
	require.True(t, loaded.Committed())
	require.Equal(t, git("rev-parse", "--short=12", "HEAD"), version())

	// "git status" writes a stale index, under a lock that would make an operator's "git add" fail.
	index := filepath.Join(dir, ".git", "index")
	require.NoError(t, os.Chtimes(filepath.Join(dir, "monitoring.yaml"), time.Time{}, time.Now().Add(-time.Hour)))
	before, err := os.ReadFile(index)
	require.NoError(t, err)
	version()
	after, err := os.ReadFile(index)
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// On a busy machine, Git may not answer in time. The version is then a hash until Git answers.
func TestVersion_IsAskedAgain(t *testing.T) {
	dir := policytest.Dir(t, policytest.Files{"monitoring": "defaults: {maxOpen: 1}"})
	for _, args := range [][]string{{"init", "--quiet"}, {"add", "."}, {
		"-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "--quiet", "-m", "policy",
	}} {
		out, err := exec.Command("git", append([]string{"-C", dir}, args...)...).CombinedOutput()
		require.NoError(t, err, string(out))
	}
	path, slow := os.Getenv("PATH"), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(slow, "git"), []byte("#!/bin/sh\nexec sleep 60\n"), 0o700))
	t.Setenv("PATH", slow+string(os.PathListSeparator)+path)
	loaded, err := policy.Load(policy.Source{Dir: dir, Destination: policytest.Destination})
	require.NoError(t, err)
	require.False(t, loaded.Committed())
	t.Setenv("PATH", path)
	require.True(t, loaded.Committed())
}

func TestDiff(t *testing.T) {
	t.Parallel()
	old := policytest.Load(t, policytest.Files{
		"monitoring": "queues: {a: {maxOpen: 1}}", "dlq-routing": "classes: {outage: {delays: [1m]}}",
	})
	next := policytest.Load(t, policytest.Files{
		"monitoring": "queues: {a: {maxOpen: 2}}", "worker-pool": "queues: {default: {concurrency: 3}}",
		"retry-policies": "data: {sensitivePaths: [payload..email]}",
	})
	var lines []string
	for _, c := range policy.Diff(old, next) {
		lines = append(lines, c.String())
	}
	require.Equal(t, []string{
		"dlq-routing classes.outage.delays = [1m] (removed)",
		"monitoring queues.a.maxOpen: 1 -> 2",
		"retry-policies data.sensitivePaths: [] -> [payload..email]",
		"worker-pool queues.default.concurrency = 3 (new)",
	}, lines)
	require.Empty(t, policy.Diff(next, next))
}

func TestParseDuration(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{
		"30d": 720 * time.Hour, "1d12h": 36 * time.Hour, "90s": 90 * time.Second, "1.5h": 90 * time.Minute,
	} {
		d, err := policy.ParseDuration(text)
		require.NoError(t, err, text)
		require.Equal(t, want, d)
	}
	for _, text := range []string{"", "d", "xd", "-1d", "1d1", "99999999999d"} {
		_, err := policy.ParseDuration(text)
		require.Error(t, err, text)
	}
}

func TestMatchPattern(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		pattern string
		yes, no []string
	}{
		{"report", []string{"report"}, []string{"", "reports", "a report"}},
		{"report.*", []string{"report.", "report.daily", "report.a.b"}, []string{"report", "reports.daily"}},
		{"*", []string{"", "a", "a\nb"}, nil},
		{"*Declined", []string{"Declined", "CardDeclined", "Declined Declined"}, []string{"DeclinedX", "declined"}},
		{"a*b*c", []string{"abc", "axbxc", "abbcc", "abcbc"}, []string{"ac", "acb", "ab"}},
		{"ab*ba", []string{"abba", "abxba"}, []string{"aba"}},
		{"a.c%_*", []string{"a.c%_", "a.c%_d"}, []string{"abc%_", "a.cd_"}},
	} {
		for _, text := range test.yes {
			require.True(t, policy.MatchPattern(test.pattern, text), "%s %q", test.pattern, text)
		}
		for _, text := range test.no {
			require.False(t, policy.MatchPattern(test.pattern, text), "%s %q", test.pattern, text)
		}
	}
}

func TestKindRouting(t *testing.T) {
	t.Parallel()
	p := policytest.Load(t, policytest.Files{"dlq-routing": "kinds: {'report.*': {maxRetries: 1}, 'report.daily.*': " +
		"{maxRetries: 2}, '*': {maxRetries: 3}}\n" +
		"automatic: {all: {enabled: true}, kinds: {'report.*': {enabled: true, include: [single-attempt]}}}\n"})
	require.Equal(t, 1, p.KindRouting("report.weekly").MaxRetries)
	require.Equal(t, 2, p.KindRouting("report.daily.eu").MaxRetries, "the longest pattern does not win")
	require.Equal(t, 3, p.KindRouting("mail").MaxRetries)
	require.Nil(t, policytest.Load(t, nil).KindRouting("mail"))
	require.Equal(t, policy.Automatic{
		All:   &policy.Switch{Enabled: true},
		Kinds: map[string]*policy.Switch{"report.*": {Enabled: true, Include: []string{"single-attempt"}}},
	}, p.Routing.Automatic)
}

func TestAlert_Judge(t *testing.T) {
	t.Parallel()
	alert := policy.Alert{MaxOpen: 100, MaxAge: time.Hour}
	for _, test := range []struct {
		open               int64
		oldest             time.Duration
		problems, warnings []string
	}{
		{79, 47 * time.Minute, nil, nil},
		{80, 0, nil, []string{"size 80 is 80 % of 100"}},
		{100, 48 * time.Minute, nil, []string{"size 100 is 100 % of 100", "the oldest is open for 48m0s, 80 % of 1h0m0s"}},
		{127, 61 * time.Minute, []string{"size 127 exceeds 100", "the oldest is open for 1h1m0s, which exceeds 1h0m0s"}, nil},
	} {
		problems, warnings := alert.Judge(test.open, test.oldest)
		require.Equal(t, test.problems, problems)
		require.Equal(t, test.warnings, warnings)
	}
	problems, _ := (policy.Alert{}).Judge(1, time.Hour)
	require.Equal(t, []string{"size 1 exceeds 0"}, problems)
}
