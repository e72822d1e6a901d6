package main_test

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

var policyBlock = regexp.MustCompile("(?s)```yaml ([a-z-]+)\n(.*?)```")

// TestDocs_PolicyExamplesAreValid checks the policy files in the docs, tests the samples there and runs the commands
// there.
func TestDocs_PolicyExamplesAreValid(t *testing.T) {
	t.Parallel()
	for _, page := range []string{"policy", "rules", "strategies", "login"} {
		t.Run(page, func(t *testing.T) {
			t.Parallel()
			raw, err := os.ReadFile("../../docs/" + page + ".md")
			require.NoError(t, err)
			files := policytest.Files{}
			samples := ""
			for _, block := range policyBlock.FindAllStringSubmatch(string(raw), -1) {
				if block[1] == "samples" {
					samples = block[2]
					continue
				}
				files[block[1]] = block[2]
			}
			require.NotEmpty(t, files)
			dir := policytest.Dir(t, files)
			require.NoError(t, os.WriteFile(filepath.Join(dir, "shop.secret"), []byte("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
				0o600))
			require.Contains(t, ok(t, "config", "check", dir), "ok, version")
			if samples != "" {
				file := filepath.Join(dir, "docs.samples.yaml")
				require.NoError(t, os.WriteFile(file, []byte(samples), 0o600))
				require.Contains(t, ok(t, "config", "test", "--config-dir", dir, file), "2 samples")
			}
			for _, block := range testedBlock.FindAllStringSubmatch(string(raw), -1) {
				cmd := exec.CommandContext(t.Context(), "bash", "-euc", strings.ReplaceAll(block[1], "bin/dlqd", program))
				cmd.Dir = "../.."
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, string(out))
			}
		})
	}
}

// TestConfigCheck_ExampleIsValid checks that the example in config/ is valid in every environment, and that the
// example's rules match its samples.
func TestConfigCheck_ExampleIsValid(t *testing.T) {
	t.Parallel()
	out := ok(t, "config", "check", "../../config")
	for _, env := range []string{"", " --env dev", " --env staging", " --env prod"} {
		require.Contains(t, out, "../../config"+env+": ok")
	}
	out = ok(t, "config", "test", "--config-dir", "../../config", "../../config/dlq-routing.samples.yaml")
	for _, class := range []string{
		"transient", "rate_limited", "outage", "validation", "malformed", "unauthorized",
		"not_found", "business", "code_bug", "unknown",
	} {
		require.Contains(t, out, class)
	}
	out = ok(t, "config", "show", "--config-dir", "../../config", "--env", "prod")
	require.Regexp(t, `queues.order-processing.backoff.delay = 3s +../../config/retry-policies.yaml:6`, out)
	require.Regexp(t, `destinations.payments.url = https://payments.example.com/hooks/dlqd +../../config/environments/prod/retry-policies.yaml:4`, out)
	require.Regexp(t, `strategies.immediate.maxRetries = 5 +built in`, out)
}

func TestConfigCheck_PrintsEachMistakeOnce(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{"monitoring": "defaults: {maxOpen: many}\n"})
	for _, env := range []string{"prod", "dev"} {
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "environments", env), 0o700))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "environments", "prod", "worker-pool.yaml"),
		[]byte("defaults: {concurrency: none}\n"), 0o600))
	_, stderr, code := run(t, "config", "check", dir)
	require.Equal(t, 1, code)
	require.Equal(t, 1, strings.Count(stderr, "monitoring.yaml:1"), stderr)
	require.Equal(t, 1, strings.Count(stderr, "worker-pool.yaml:1"), stderr)
}

func TestConfigCheck_NamesFileAndLine(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{"dlq-routing": "rules:\n- name: a\n  match: {message: '('}\n  class: " +
		"outage\n- name: b\n  match: {when: 'context.'}\n  class: outage\n- {name: c, match: {}, class: outage}\n- {name: " +
		"d, match: {status: 9xx}, class: outage}\n"})
	_, stderr, code := run(t, "config", "check", dir)
	require.Equal(t, 1, code)
	for _, want := range []string{
		"dlq-routing.yaml:3: rules[0].match.message: error parsing regexp",
		"dlq-routing.yaml:6: rules[1].match.when: unexpected end",
		"dlq-routing.yaml:8: rules[2].match: matches every error",
		`dlq-routing.yaml:9: rules[3].match.status: "9xx" is not an HTTP status`,
	} {
		require.Contains(t, stderr, want)
	}
	_, stderr, code = run(t, "serve", "--config-dir", dir, "--database-url", postgrestest.URL(t))
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "rules[0].match.message")
}

// TestConfig_NeedsNoSecrets checks a policy, compares it with another and tests it without the files with secrets: a
// reviewer does not have them.
func TestConfig_NeedsNoSecrets(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{
		"retry-policies": "queues: {orders: {destination: shop}, mails: {destination: mailer}}\ndestinations:\n" +
			"  shop: {url: 'https://shop.example.com/', secretFile: shop.secret}\n  mailer: {urlFile: mailer.url}\n",
		"access": "authentication: [oidc]\noidc: {issuer: 'https://login.example.com', clientID: dlqd, " +
			"clientSecretFile: oidc.secret}\n",
	})
	samples := filepath.Join(dir, "x.samples.yaml")
	require.NoError(t, os.WriteFile(samples, []byte("- {name: a, queue: mails, answer: {status: 503}, expect: {class: "+
		"outage}}\n- {name: b, queue: orders, answer: {status: 422}, expect: {class: validation}}\n"), 0o600))
	stdout, stderr, code := run(t, "config", "check", dir)
	require.Zero(t, code, stderr)
	require.Contains(t, stdout, "ok, version")
	for _, want := range []string{
		"retry-policies.yaml:3: destinations.shop.secretFile: ", "retry-policies.yaml:4: destinations.mailer.urlFile: ",
		"access.yaml:2: oidc.clientSecretFile: ",
	} {
		require.Contains(t, stderr, want)
	}
	require.Contains(t, ok(t, "config", "test", "--config-dir", dir, samples), "2 samples")
	_, stderr, code = run(t, "serve", "--config-dir", dir, "--database-url", postgrestest.URL(t))
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "shop.secret")

	temporary := t.TempDir()
	diff := func(args ...string) (string, int) {
		cmd := exec.CommandContext(t.Context(), program, append([]string{"config", "diff"}, args...)...)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), "TMPDIR="+temporary)
		out, _ := cmd.CombinedOutput()
		left, err := os.ReadDir(temporary)
		require.NoError(t, err)
		require.Empty(t, left, "a diff leaves no files")
		return string(out), cmd.ProcessState.ExitCode()
	}
	for _, args := range [][]string{
		{"init", "--quiet"}, {"add", "."}, {"-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "policy"},
	} {
		require.NoError(t, exec.CommandContext(t.Context(), "git", append([]string{"-C", dir}, args...)...).Run())
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "shop.secret"), []byte("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
		0o600))
	out, code := diff("HEAD:.", ".")
	require.Zero(t, code, out)
	require.Equal(t, "no difference\n", out)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "monitoring.yaml"), []byte("defaults: {maxOpen: many}"), 0o600))
	out, code = diff("HEAD:.", ".")
	require.Equal(t, 1, code)
	require.Contains(t, out, "monitoring.yaml:1")
	require.NoError(t, exec.CommandContext(t.Context(), "git", "-C", dir, "add", "monitoring.yaml").Run())
	require.NoError(t, exec.CommandContext(t.Context(), "git", "-C", dir, "-c", "user.name=t", "-c",
		"user.email=t@example.com", "commit", "-qm", "mistake").Run())
	out, code = diff("HEAD:.", "HEAD~1:.")
	require.Equal(t, 1, code)
	require.Contains(t, out, "HEAD:./monitoring.yaml:1", "it names the revision")
}

func TestConfigCheck_WarnsOfUnknownQueues(t *testing.T) {
	t.Parallel()
	files := policytest.Files{
		"retry-policies":  "queues: {orders: {destination: shop}}\ndestinations: {shop: {url: 'https://shop.example.com/'}}\n",
		"circuit-breaker": "riverQueues: {mailers: {openFor: 60s}}\n",
		"dlq-routing": "rules:\n- {name: a, match: {queue: ordres}, class: outage}\n- {name: b, match: {queue: [ord*, " +
			"mailers]}, class: outage}\nqueues:\n  ordrs: {maxRetries: 2}\nautomatic:\n  queues: {odrers: {enabled: true}}\n",
		"monitoring": "queues: {orderz: {maxOpen: 3}}\n",
		"access": "authentication: [tokens]\ngrants: [{groups: [g], role: reader, queues: [order-*]}]\n" +
			"approvals: {rules: [{operations: [purge], queues: [oders]}]}\n",
	}
	_, stderr, code := run(t, "config", "check", policytest.Dir(t, files))
	require.Zero(t, code, stderr)
	for _, want := range []string{
		`dlq-routing.yaml:2: rules[0].match.queue: no queue of this policy has the name "ordres"`,
		`dlq-routing.yaml:5: queues.ordrs: `, `dlq-routing.yaml:7: automatic.queues.odrers: `,
		`monitoring.yaml:1: queues.orderz: `, `access.yaml:2: grants[0].queues: `,
		`access.yaml:3: approvals.rules[0].queues: `,
	} {
		require.Contains(t, stderr, want)
	}
	require.NotContains(t, stderr, "rules[1]")
	_, stderr, code = run(t, "config", "check", policytest.Dir(t, policytest.Files{
		"retry-policies":  "queues: {orders: {destination: shp}}\ndestinations: {shop: {url: 'https://shop.example.com/'}}\n",
		"circuit-breaker": "destinations: {shpo: {openFor: 60s}}\n",
	}))
	require.Equal(t, 1, code, "unknown destinations")
	require.Contains(t, stderr, `retry-policies.yaml:1: queues.orders.destination: unknown destination "shp"`)
	require.Contains(t, stderr, "circuit-breaker.yaml:1: destinations.shpo: unknown destination")
	delete(files, "retry-policies") // then each name may be a queue of an application
	_, stderr, code = run(t, "config", "check", policytest.Dir(t, files))
	require.Zero(t, code, stderr)
	require.Empty(t, stderr)
}

func TestConfigTest_FailsOnUnexpectedDecision(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "x.samples.yaml")
	require.NoError(t, os.WriteFile(file, []byte("- {name: a, answer: {status: 503}, expect: {class: transient, "+
		"strategy: immediate}}\n- {name: b, answer: {status: 429}}\n"), 0o600))
	stdout, stderr, code := run(t, "config", "test", file)
	require.Equal(t, 1, code)
	require.Contains(t, stdout, "expected class transient; expected strategy immediate")
	require.Contains(t, stderr, "1 of 2 samples have an unexpected class, rule or strategy")
	require.NoError(t, os.WriteFile(file, []byte("- {nam: a}"), 0o600))
	_, stderr, code = run(t, "config", "test", file)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "field nam not found")
}

func TestConfigDiff_ListsChangedBehaviour(t *testing.T) {
	t.Parallel()
	old := policytest.Dir(t, policytest.Files{"dlq-routing": "rules:\n- {name: a, match: {status: 404}, class: " +
		"outage}\n- {name: b, match: {status: 405}, class: outage}\n- {name: gone, match: {status: 406}, class: outage}\n"})
	files := policytest.Files{"dlq-routing": "rules:\n- {name: b, match: {status: 405}, class: outage}\n- {name: a, " +
		"match: {status: 404}, class: business}\n- {name: new, match: {kind: x.*}, class: outage}\n" +
		"classes: {unknown: {strategy: immediate, delays: [30m]}}\nqueues: {mails: {maxRetries: 2}}\n"}
	next := policytest.Dir(t, files)
	out := ok(t, "config", "diff", old, next)
	for _, want := range []string{
		"classes.unknown.strategy: manual -> immediate",
		"every queue, class unknown: strategy manual -> immediate, delays [] -> [30m]",
		"queue mails, class transient, rate_limited, outage: maxRetries 5 -> 2",
		"rule a: class outage -> business, plan.strategy conditional -> manual",
		"rule new: new: name new, match.kind [x.*], class outage, ",
		"rule gone: removed", "rules: order [a, b, gone] -> [b, a, new]",
	} {
		require.Contains(t, out, want)
	}
	require.Equal(t, "no difference\n", ok(t, "config", "diff", next, next))

	// Compare the policy with a revision of the Git repository in the working directory.
	git := func(args ...string) {
		cmd := exec.CommandContext(t.Context(), "git",
			append([]string{"-c", "user.name=t", "-c", "user.email=t@example.com"}, args...)...)
		cmd.Dir = old
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
	}
	git("init", "--quiet")
	git("add", ".")
	git("commit", "--quiet", "-m", "policy")
	require.NoError(t, os.WriteFile(filepath.Join(old, "monitoring.yaml"), []byte("defaults: {maxOpen: 7}"), 0o600))
	cmd := exec.CommandContext(t.Context(), program, "config", "diff", "HEAD:.", ".")
	cmd.Dir = old
	diff, err := cmd.CombinedOutput()
	require.NoError(t, err, string(diff))
	require.Equal(t, "Values:\n  monitoring defaults.maxOpen: 1000 -> 7\nBehaviour:\n  other queues: maxOpen 1000 -> "+
		"7\n  queue default: maxOpen 1000 -> 7\n", string(diff))
}

// TestReclassify_AppliesChangedRules corrects a wrong rule, reloads the policy with SIGHUP and
// reclassifies the open entries.
func TestReclassify_AppliesChangedRules(t *testing.T) {
	t.Parallel()
	receiver := startReceiver(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	dir := policytest.Dir(t, policytest.Files{"retry-policies": "queues: {default: {maxAttempts: 1}}\ndestinations: " +
		"{default: {url: \"" + receiver + "\"}}\n"})
	s := serve(t, "--database-url", postgrestest.URL(t), "--config-dir", dir)
	api := "--api-url=" + s.api
	ok(t, "send", api, "--kind", "tea.ordered", `{"cups": 2}`)
	list := func(status string) []any {
		var page map[string]any
		require.NoError(t, json.Unmarshal([]byte(ok(t, "list", api, "--json", "--status", status)), &page))
		return page["entries"].([]any)
	}
	require.Eventually(t, func() bool { return len(list("dlq_manual")) == 1 }, 5*time.Minute, 50*time.Millisecond)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "dlq-routing.yaml"),
		[]byte("rules: [{name: teapot, match: {status: 418}, class: rate_limited}]"), 0o600))
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGHUP))
	require.Eventually(t, func() bool { return strings.Contains(s.log.String(), "policy reloaded") }, time.Minute,
		50*time.Millisecond)
	require.Contains(t, ok(t, "reclassify", api, "--dry-run"), "1 of 1 open dead letters would be reclassified")
	require.Len(t, list("dlq_manual"), 1)
	out := ok(t, "reclassify", api, "--note", "teapots are busy")
	require.Regexp(t, `1 +unknown, manual \(none\) +rate_limited, scheduled \(teapot\)`, out)
	require.Len(t, list("dlq_pending"), 1)

	// A commit of the changed files changes the policy's version, but none of the files.
	git := func(args ...string) string {
		out, err := exec.CommandContext(t.Context(), "git",
			append([]string{"-C", dir, "-c", "user.name=t", "-c", "user.email=t@example.com"}, args...)...).Output()
		require.NoError(t, err)
		return strings.TrimSpace(string(out))
	}
	git("init", "--quiet")
	git("commit", "--quiet", "--allow-empty", "-m", "empty")
	git("add", ".")
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGHUP))
	empty := git("rev-parse", "--short=12", "HEAD")
	require.Eventually(t, func() bool { return strings.Contains(s.log.String(), empty+"-dirty") }, time.Minute,
		50*time.Millisecond)
	git("commit", "--quiet", "-m", "policy")
	committed := git("rev-parse", "--short=12", "HEAD")
	require.Eventually(t, func() bool { return strings.Contains(s.log.String(), "to="+committed) }, time.Minute,
		50*time.Millisecond)

	require.Contains(t, ok(t, "breakers", "list", api), "destination:default  closed")
	require.Equal(t, "destination:default is open\n", ok(t, "breakers", "open", "default", "--for", "10m",
		"--note", "teapots", api))
	_, stderr, code := run(t, "send", api, "--kind", "tea.ordered", `{}`)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, "circuit breaker of its destination default is open")
	require.Equal(t, "destination:default is closed\n", ok(t, "breakers", "reset", "default", api))
	_, stderr, code = run(t, "breakers", "open", "nowhere", api)
	require.Equal(t, 1, code)
	require.Contains(t, stderr, `circuit breaker "destination:nowhere" not found`)
	require.Zero(t, s.stop(syscall.SIGTERM))
}

// TestConfigCheck_RejectsQueueNamesThatRiverRejects checks that "config check" rejects queue names that River's client
// rejects. Otherwise they would be rejected only when dlqd starts to serve.
func TestConfigCheck_RejectsQueueNamesThatRiverRejects(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	name := strings.Repeat("payments-", 9) + "later"
	text := "destinations:\n  d:\n    url: http://127.0.0.1:1/\nqueues:\n  " + name + ":\n    destination: d\n"
	require.NoError(t, os.WriteFile(filepath.Join(dir, "retry-policies.yaml"), []byte(text), 0o600))
	_, stderr, code := run(t, "config", "check", dir)
	require.NotZero(t, code)
	require.Contains(t, stderr,
		"retry-policies.yaml:5: queues."+name+": a queue's name has at most 64 characters; this one has 86")
}
