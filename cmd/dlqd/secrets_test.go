package main_test

import (
	"encoding/base64"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
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

// TestSecrets_AreNeverPrinted provokes errors that involve secrets of all kinds. It checks that no output of dlqd
// contains a secret.
func TestSecrets_AreNeverPrinted(t *testing.T) {
	t.Parallel()
	// The receiver's errors repeat the request, as those of many servers do.
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		output := fmt.Sprintf("Cannot %s %s for %s, signed %s", r.Method, r.URL, r.Header.Get("Authorization"),
			r.Header.Get("Webhook-Signature"))
		switch {
		case strings.Contains(r.URL.Path, "problem"):
			w.Header().Set("Content-Type", "application/problem+json")
			w.Header().Set("X-Error-Type", "NO_"+r.URL.String())
			w.WriteHeader(http.StatusUnprocessableEntity)
			_, _ = fmt.Fprintf(w, `{"type": %q, "title": %q, "detail": %q}`, r.URL, output, output)
		case strings.Contains(r.URL.Path, "logical"):
			_, _ = fmt.Fprintf(w, `{"success": false, "why": %q}`, output)
		case strings.Contains(r.URL.Path, "redirect"):
			w.Header().Set("Location", r.URL.String()+"&again")
			w.WriteHeader(http.StatusTemporaryRedirect)
		default:
			http.Error(w, output, http.StatusNotFound)
		}
	}))
	t.Cleanup(receiver.Close)
	host := strings.TrimPrefix(receiver.URL, "http://")
	// Each secret is unique, so that a leaked secret shows where it was used.
	secrets := map[string]string{}
	secret := func(name, value string) string {
		secrets[name] = value
		return value
	}
	signing := base64.StdEncoding.EncodeToString(
		[]byte(secret("signing key as it is", "signing-key-of-32-bytes-or-so-1234")))
	secret("signing key", signing)
	filed := base64.StdEncoding.EncodeToString([]byte("another-signing-key-of-32-bytes-or-so"))
	secret("filed signing key", filed)
	former := base64.StdEncoding.EncodeToString([]byte("the-former-signing-key-of-32-bytes-or-so"))
	secret("former signing key", former)
	filed = "whsec_" + filed + "\nwhsec_" + former
	destinations := map[string]string{}
	for _, name := range []string{"plain", "problem", "logical", "redirect"} {
		destinations[name] = fmt.Sprintf("http://user-%s:%s@%s/%s/%s?key=%s", name,
			secret(name+" password", "pAssw0rd-"+name), host, name, secret(name+" path", "T0ken-"+name),
			secret(name+" query", "qu3ry-"+name))
	}
	destinations["refused"] = fmt.Sprintf("http://%s:x@127.0.0.1:1/%s?%s", secret("refused user", "us3rtoken"),
		secret("refused path", "REFUSEDPATHTOKEN"), secret("refused query", "refusedquery9"))
	destinations["nowhere"] = fmt.Sprintf("http://a:%s@nowhere.invalid/%s", secret("nowhere password", "pAssw0rd-nowhere"),
		secret("nowhere path", "0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"))
	var queues, places strings.Builder
	for name, at := range destinations {
		_, _ = fmt.Fprintf(&queues, "  %s: {destination: %s, maxAttempts: 1}\n", name, name)
		_, _ = fmt.Fprintf(&places, "  %s: {url: %q, secret: %s, probe: {url: %q, every: 100ms}}\n", name, at, signing,
			at+"&p="+secret(name+" probe", "pr0be-"+name))
	}
	content := "queues:\n" + queues.String() + "  filed: {destination: filed, maxAttempts: 1}\ndestinations:\n" +
		places.String() + "  filed: {urlFile: filed.url, secretFile: filed.key}\n"
	dir := policytest.Dir(t, policytest.Files{"retry-policies": content, "access": "authentication: [tokens, " +
		"oidc]\noidc: {issuer: 'http://127.0.0.1:1', clientID: dlqd, clientSecretFile: client.key}\n"})
	write := func(dir, name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text+"\n"), 0o600))
		return path
	}
	write(dir, "filed.url", receiver.URL+"/"+secret("filed path", "wordsonlysecret")+"?q="+
		secret("filed query", "filedquery"))
	write(dir, "filed.key", filed)
	write(dir, "client.key", secret("client's secret", "cl1ent-secret-of-the-console"))
	at := postgrestest.URL(t)
	u, err := url.Parse(at)
	require.NoError(t, err)
	u.User = url.UserPassword(u.User.Username(), secret("database password", "pAssw0rd-database"))
	urlFile := write(t.TempDir(), "database", u.String())

	token := secret("token", regexp.MustCompile(`dlqd_\S+`).FindString(ok(t, "tokens", "create", "--name", "kim", "--role",
		"admin", "--database-url-file", urlFile)))
	require.NotEmpty(t, token)

	var out strings.Builder
	shows := func(want string) { // a failure does not print the whole output
		if !strings.Contains(out.String(), want) {
			t.Errorf("no output contains %s", want)
		}
	}
	runs := func(args ...string) {
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Env = append(os.Environ(), "DLQD_DATABASE_URL="+u.String(), "DLQD_DESTINATION="+destinations["plain"],
			"DLQD_TOKEN="+token)
		output, _ := cmd.CombinedOutput()
		_, _ = fmt.Fprintf(&out, "dlqd\n%s\n", output)
	}
	s := serve(t, "--database-url-file", urlFile, "--config-dir", dir, "--log-level", "debug", "--replica-url-file",
		write(t.TempDir(), "replica", "postgres://u:"+secret("replica's password", "pAssw0rd-replica")+"@127.0.0.1:1/x"))
	arguments, err := exec.CommandContext(t.Context(), "ps", "-o", "args=", "-p",
		fmt.Sprint(s.cmd.Process.Pid)).CombinedOutput()
	require.NoError(t, err, string(arguments))
	require.Contains(t, string(arguments), "--database-url-file")
	out.Write(arguments)
	ask := func(method, path, body, token string) *http.Response {
		request, err := http.NewRequestWithContext(t.Context(), method, s.api+path, strings.NewReader(body))
		require.NoError(t, err)
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("Authorization", "Bearer "+token)
		response, err := http.DefaultClient.Do(request)
		require.NoError(t, err)
		return response
	}
	signIn, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.api+"/sign-in",
		strings.NewReader("token="+token))
	require.NoError(t, err)
	signIn.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	signedIn, err := (&http.Client{CheckRedirect: func(*http.Request,
		[]*http.Request,
	) error {
		return http.ErrUseLastResponse
	}}).Do(signIn)
	require.NoError(t, err)
	require.NoError(t, signedIn.Body.Close())
	require.Len(t, signedIn.Cookies(), 1)
	secret("session", signedIn.Cookies()[0].Value)
	get := func(path string) string {
		response := ask(http.MethodGet, path, "", token)
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		_, _ = fmt.Fprintf(&out, "GET %s\n%s\n", path, body)
		return string(body)
	}
	names := []string{"plain", "problem", "logical", "redirect", "refused", "nowhere", "filed"}
	for _, name := range names {
		response := ask(http.MethodPost, "/api/messages",
			fmt.Sprintf(`{"messageId": %q, "queue": %q, "kind": "k", "payload": 1}`, name, name), token)
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusAccepted, response.StatusCode)
	}
	id := regexp.MustCompile(`"id": ?"([0-9a-f-]{36})"`)
	for _, name := range names {
		var position string
		require.Eventually(t, func() bool {
			position = get("/api/messages/" + name)
			return strings.Contains(position, "dead-lettered") || strings.Contains(position, `"completed"`)
		}, 5*time.Minute, 50*time.Millisecond, name)
		if match := id.FindStringSubmatch(position); match != nil {
			runs("show", match[1], "--api-url", s.api)
			runs("show", match[1], "--api-url", s.api, "--json")
		}
	}
	// Reload an invalid policy, and a policy with other secrets.
	other := policytest.Dir(t,
		policytest.Files{"retry-policies": strings.ReplaceAll(content, "T0ken-plain", secret("other token", "T0ken-other"))})
	write(other, "filed.url", receiver.URL+"/"+secret("other filed path", "otherwordsonly"))
	write(other, "filed.key", filed)
	for _, wrong := range []string{
		strings.Replace(content, "http://user-plain", "ftp://user-plain", 1),
		strings.Replace(content, "maxAttempts: 1", "maxAttempts: many", 1), content + "  x: {url: [",
	} {
		broken := policytest.Dir(t, policytest.Files{"retry-policies": wrong})
		runs("config", "check", broken)
		runs("config", "show", "--config-dir", broken)
		runs("doctor", "--config-dir", broken)
	}
	policyFile := filepath.Join(dir, "retry-policies.yaml")
	require.NoError(t, os.WriteFile(policyFile,
		[]byte(strings.Replace(content, "http://user-plain", "ftp://user-plain", 1)), 0o600))
	reloadFails := func() bool { return strings.Contains(s.log.String(), "reloading the policy failed") }
	require.Eventually(t, reloadFails, time.Minute,
		50*time.Millisecond)
	get("/api/health")
	require.NoError(t, os.WriteFile(policyFile, []byte(content), 0o600))
	runs("config", "show", "--config-dir", dir)
	shows("retry-policies destinations.plain.url = http://***@" + host + "/plain/***?key=***")
	runs("config", "show")
	runs("config", "diff", dir, other)
	shows("retry-policies destinations.plain.url: http://***@" + host + "/plain/***?key=***, in its hidden part")
	runs("config", "check", dir)
	for _, path := range []string{
		"/metrics", "/api/health", "/api/dlq/entries?limit=100", "/api/dlq/audit",
		"/api/circuit-breakers", "/api/queues", "/api/dlq/analytics/groups", "/debug/pprof/cmdline", "/debug/vars",
	} {
		get(path)
	}
	mistyped := secret("mistyped token", token[:len(token)-4]+"9999")
	response := ask(http.MethodGet, "/api/dlq/entries", "", mistyped)
	require.Equal(t, http.StatusUnauthorized, response.StatusCode)
	_, err = io.Copy(&out, response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	runs("tokens", "list")
	runs("tokens", "revoke", mistyped)
	// Use databases that cannot be reached, and invalid command lines.
	password := secret("another password", "pAssw0rd-another")
	for _, at := range []string{
		"postgres://u:" + password + "@127.0.0.1:1/x?connect_timeout=1", "postgres://u:" + password + "%zz@127.0.0.1/x",
		"postgres://127.0.0.1:1/x?connect_timeout=1&password=" + password,
		"postgres://127.0.0.1/x?sslmode=bogus&password=" + password, "host=127.0.0.1 port=1 connect_timeout=1 password=" +
			password, "host=127.0.0.1 sslmode=bogus password='" + password + "'",
		"postgres//u:" + password + "@127.0.0.1/x", "postgres://u:" + password + "@[bad/x",
	} {
		runs("migrate", "status", "--database-url", at)
		runs("doctor", "--config-dir", dir, "--replica-url", at)
		runs("serve", "--archive", "none", "--database-wait", "1500ms", "--database-url-file",
			write(t.TempDir(), "database", at))
	}
	runs("serve", "--databse-url=postgres://u:"+password+"@h/x")
	runs("postgres://u:" + password + "@h/x")
	runs("serve", "postgres://u:"+password+"@h/x")
	runs("serve", "--archive", "s3://"+password+"@bucket?secret="+password+"&nonsense=1")
	runs("serve", "--help")
	runs("migrate", "status")
	runs("doctor", "--config-dir", dir)
	runs("psql", "-At", "-c", `SELECT row_to_json(e) FROM dead_letter_queue e`, "-c", `SELECT row_to_json(j)
		FROM river_job j`, "-c", `SELECT row_to_json(t) FROM dead_letter_transitions t`, "-c",
		`SELECT row_to_json(t) FROM tokens t`, "-c", `SELECT row_to_json(s) FROM sessions s`)
	shows(`"name":"kim"`)
	shows(`"kind":"dlqd_message"`)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGQUIT)) // dlqd prints the stacks of all goroutines
	<-s.read
	require.Contains(t, s.log.String(), "goroutine")
	out.WriteString(s.log.String())
	for name, value := range secrets {
		text := out.String()
		if at := strings.Index(text, value); at >= 0 {
			t.Errorf("%s: …%s…", name, text[max(0, at-300):min(len(text), at+200)])
		}
	}
}
