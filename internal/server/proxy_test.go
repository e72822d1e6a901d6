package server_test

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/server"
)

// proxyHost is the public name in docs/proxies.md.
const proxyHost = "dlqd.example.com"

// startNginx starts nginx in front of b with the server block of docs/proxies.md, but with the given HTTP version to
// dlqd (the document has 1.1; nginx's default is 1.0) and with buffers for more than a minute of events. It returns a
// client that reaches nginx as https://dlqd.example.com. If nginx is not installed, startNginx skips the test.
func startNginx(t *testing.T, b *bundle, version string) *http.Client {
	t.Helper()
	program, err := exec.LookPath("nginx")
	if err != nil {
		if program = "/usr/sbin/nginx"; exec.CommandContext(t.Context(), program, "-v").Run() != nil {
			t.Skip("nginx is not installed: scripts/install.sh nginx installs it")
		}
	}
	document, err := os.ReadFile("../../docs/proxies.md")
	require.NoError(t, err)
	_, block, _ := strings.Cut(string(document), "```nginx\n")
	block, _, _ = strings.Cut(block, "```")
	dir, err := os.MkdirTemp("", "nginx") // a socket's path must be short
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	ca := newAuthority(t)
	cert, key := ca.issue(proxyHost)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "dlqd.pem"), cert, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "dlqd.key"), key, 0o600))
	socket := filepath.Join(dir, "s")
	for _, change := range [][2]string{
		{"listen 443 ssl;\n\thttp2 on;", "listen unix:" + socket + " ssl http2;"}, // this form also works before nginx 1.25.1
		{"/etc/nginx/", dir + "/"},
		{"http://127.0.0.1:7353", b.base},
		{"proxy_http_version 1.1;", "proxy_http_version " + version + "; proxy_buffer_size 256k; proxy_buffers 8 256k; " +
			"proxy_busy_buffers_size 512k;"},
	} {
		require.Contains(t, block, change[0], "docs/proxies.md")
		block = strings.ReplaceAll(block, change[0], change[1])
	}
	paths := ""
	for _, kind := range []string{"client_body", "proxy", "fastcgi", "uwsgi", "scgi"} {
		paths += kind + "_temp_path " + dir + "/" + kind + ";\n"
	}
	config := filepath.Join(dir, "nginx.conf")
	require.NoError(t, os.WriteFile(config, []byte("daemon off;\nmaster_process off;\npid "+dir+
		"/pid;\nerror_log stderr;\nevents {}\nhttp {\naccess_log off;\n"+paths+block+"}\n"), 0o600))
	nginx := exec.CommandContext(context.WithoutCancel(t.Context()), program, "-p", dir, "-c", config)
	var log strings.Builder
	nginx.Stderr = &log
	nginx.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	require.NoError(t, nginx.Start())
	t.Cleanup(func() {
		_ = nginx.Process.Signal(syscall.SIGTERM)
		_ = nginx.Wait()
		if t.Failed() {
			t.Log(log.String())
		}
	})
	require.Eventually(t, func() bool {
		conn, err := (&net.Dialer{}).DialContext(t.Context(), "unix", socket)
		if err == nil {
			_ = conn.Close()
		}
		return err == nil
	}, 5*time.Minute, 10*time.Millisecond)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca.pem))
	jar, err := cookiejar.New(nil)
	require.NoError(t, err)
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
		TLSClientConfig:   &tls.Config{RootCAs: roots, ServerName: proxyHost},
		ForceAttemptHTTP2: true, DisableCompression: true,
	}
	t.Cleanup(transport.CloseIdleConnections)
	// Without a timeout, a request for a stream would never return if nginx buffered the stream's header.
	return &http.Client{Transport: transport, Jar: jar, Timeout: time.Minute}
}

// TestProxy_Nginx uses the console through a real nginx, as docs/proxies.md configures it, over HTTP/2: sign-in,
// forms, compressed pages, event streams that are not buffered, and their end on sign-out.
func TestProxy_Nginx(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"1.1", "1.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			testNginx(t, version)
		})
	}
}

// testNginx uses the console through an nginx that speaks the given HTTP version to dlqd.
func testNginx(t *testing.T, version string) {
	t.Helper()
	b, secret := setupAdmin(t, func(c *server.Config) { c.Door.Hosts = []string{proxyHost} })
	client := startNginx(t, b, version)
	send := func(method, path string, form url.Values, headers ...string) *http.Response {
		t.Helper()
		request, err := http.NewRequestWithContext(t.Context(), method, "https://"+proxyHost+path,
			strings.NewReader(form.Encode()))
		require.NoError(t, err)
		request.Header.Set("Accept", "text/html")
		request.Header.Set("Sec-Fetch-Site", "same-origin")
		if form != nil {
			request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			request.Header.Set("Origin", "https://"+proxyHost)
		}
		for i := 0; i < len(headers); i += 2 {
			request.Header.Set(headers[i], headers[i+1])
		}
		response, err := client.Do(request)
		require.NoError(t, err)
		t.Cleanup(func() { _ = response.Body.Close() })
		return response
	}
	text := func(r *http.Response) string {
		raw, err := io.ReadAll(r.Body)
		require.NoError(t, err)
		return string(raw)
	}
	signedIn := send("POST", "/sign-in", url.Values{"token": {secret}, "to": {"/groups"}})
	require.Equal(t, http.StatusOK, signedIn.StatusCode, text(signedIn))
	require.Equal(t, "/groups", signedIn.Request.URL.Path)
	require.Equal(t, 2, signedIn.ProtoMajor)
	var cookies []string
	for _, cookie := range client.Jar.Cookies(&url.URL{Scheme: "https", Host: proxyHost, Path: "/"}) {
		cookies = append(cookies, cookie.Name)
	}
	require.Contains(t, cookies, "__Host-dlqd", "the cookie is not for https alone")
	made := send("POST", "/access/tokens", url.Values{"name": {"ci"}, "role": {"reader"}})
	has(t, text(made), "Token created")
	packed := send("GET", "/policy", nil, "Accept-Encoding", "gzip")
	require.Equal(t, "gzip", packed.Header.Get("Content-Encoding"))

	// Events come one by one. With HTTP/1.0 and nginx's default buffering, they would stop after the first.
	const run = "0198a0b0-0000-7000-8000-000000000000"
	b.exec("INSERT INTO dlq.replay_runs (id, filter, actor, total, status) " +
		"VALUES ('" + run + "', '{}', 'kim', 1, 'paused')")
	var live *http.Response
	for _, path := range []string{"/api/dlq/replays/" + run + "/events", "/events?page=/groups"} {
		live = send("GET", path, nil, "Accept", "text/event-stream")
		require.Equal(t, http.StatusOK, live.StatusCode)
		lines := bufio.NewScanner(live.Body)
		lines.Buffer(nil, 1<<20)
		for range 5 {
			(&stream{T: t, lines: lines}).next(path)
		}
	}
	ended := make(chan error, 1)
	go func() { _, err := io.Copy(io.Discard, live.Body); ended <- err }()
	require.Equal(t, "/sign-in", send("POST", "/sign-out", url.Values{}).Request.URL.Path)
	err := <-ended // nil, or an error if nginx resets the stream
	require.False(t, os.IsTimeout(err), "the event stream goes on after the sign-out")
	require.Equal(t, "/sign-in", send("GET", "/groups", nil).Request.URL.Path)
}
