package server_test

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

const aMessage = `{"queue": "default", "kind": "order.placed", "payload": {"n": 1}}`

// ask sends a request with headers, which may include "Host".
func (b *bundle) ask(client *http.Client, method, url, body string, headers ...string) *http.Response {
	b.Helper()
	request, err := http.NewRequestWithContext(b.Context(), method, url, strings.NewReader(body))
	require.NoError(b, err)
	request.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
		if headers[i] == "Host" {
			request.Host = headers[i+1]
		}
	}
	response, err := client.Do(request)
	require.NoError(b, err)
	_, err = io.Copy(io.Discard, response.Body)
	require.NoError(b, err)
	require.NoError(b, response.Body.Close())
	return response
}

// dial opens a connection and writes the beginning of a request.
func (b *bundle) dial(format string, args ...any) net.Conn {
	b.Helper()
	conn, err := (&net.Dialer{}).DialContext(b.Context(), "tcp", strings.TrimPrefix(b.base, "http://"))
	require.NoError(b, err)
	b.Cleanup(func() { _ = conn.Close() })
	_, err = fmt.Fprintf(conn, format, args...)
	require.NoError(b, err)
	return conn
}

func (b *bundle) metric(want string) {
	b.Helper()
	require.Eventually(b, func() bool {
		_, out, _ := b.call("GET", "/metrics", "")
		return strings.Contains(out["text"].(string), want)
	}, 5*time.Minute, 50*time.Millisecond, want)
}

// This is DNS rebinding: if the host name of a page resolves to this machine, the page has the API's origin for a
// browser. Origin and Sec-Fetch-Site are then the same as for dlqd's own pages.
func TestDoor_RefusesReboundNames(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "s")
	b := setup(t, options{config: func(c *server.Config) {
		c.Door.Hosts = []string{"dlqd.example"}
		c.Listen = append(c.Listen, "unix:"+socket)
	}})
	_, port, err := net.SplitHostPort(strings.TrimPrefix(b.base, "http://"))
	require.NoError(t, err)
	evil := "evil.example:" + port
	for _, ask := range [][3]string{
		{"GET", "/api/dlq/entries", ""},
		{"POST", "/api/messages", aMessage},
		{"POST", "/api/dlq/export", `{"filter": {}}`},
		{"POST", "/api/dlq/erasures", `{"filter": {"queue": ["default"]}, "note": "x"}`},
		{"GET", "/metrics", ""},
		{"GET", "/docs", ""},
		{"GET", "/", ""},
		{"GET", "/api/dlq/audit", ""},
	} {
		response := b.ask(http.DefaultClient, ask[0], b.base+ask[1], ask[2], "Host", evil, "Origin", "http://"+evil,
			"Sec-Fetch-Site", "same-origin")
		require.Equal(t, http.StatusMisdirectedRequest, response.StatusCode, ask)
		require.Equal(t, "application/problem+json", response.Header.Get("Content-Type"))
	}
	require.Zero(t, b.count("SELECT count(*) FROM river_job"))
	// If the request line has a host, dlqd checks that host and not the Host header.
	conn := b.dial("GET http://%s/api/dlq/entries HTTP/1.1\r\nHost: localhost\r\n\r\n", evil)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusMisdirectedRequest, response.StatusCode)
	require.Equal(t, 200, b.ask(http.DefaultClient, "GET", b.base+"/api/dlq/entries", "", "Host",
		"dlqd.example").StatusCode)
	bySocket := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	require.Equal(t, 200, b.ask(bySocket, "GET", "http://any.example/api/dlq/entries", "").StatusCode)
	b.metric(`dlqd_http_refused_total{reason="host"} 9`)
}

func TestDoor_SetsHeadersOnEveryResponse(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	for _, ask := range [][3]string{
		{"GET", "/api/dlq/entries", ""},
		{"POST", "/api/messages", aMessage},
		{"POST", "/api/messages", "{"},
		{"POST", "/api/dlq/export", `{"filter": {}}`},
		{"GET", "/api/dlq/entries/nonsense", ""},
		{"GET", "/metrics", ""},
		{"GET", "/docs", ""},
		{"GET", "/openapi.json", ""},
		{"GET", "/nothing", ""},
		{"DELETE", "/api/messages", ""},
		{"GET", "/livez", ""},
	} {
		header := b.ask(http.DefaultClient, ask[0], b.base+ask[1], ask[2]).Header
		require.Equal(t, "nosniff", header.Get("X-Content-Type-Options"), ask)
		require.Equal(t, "no-referrer", header.Get("Referrer-Policy"), ask)
		require.Contains(t, header.Get("Content-Security-Policy"), "default-src 'none'", ask)
		require.Contains(t, header.Get("Content-Security-Policy"), "frame-ancestors 'none'", ask)
		require.Equal(t, "no-store", header.Get("Cache-Control"), ask)
	}
}

// A body that a client announces but does not send uses no quota.
func TestDoor_AnnouncedBodiesTakeNoRoom(t *testing.T) {
	t.Parallel()
	b := setup(t, options{})
	for range 40 {
		b.dial("POST /api/messages/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
			"16777215\r\n\r\n{")
	}
	for i := range 20 {
		b.submit(fmt.Sprintf("m%d", i))
	}
}

// A client that sends too slowly, or not at all, is disconnected, and its quota becomes free.
func TestDoor_DisconnectsSlowSenders(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.BodyGrace = 200 * time.Millisecond }})
	conn := b.dial("POST /api/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: " +
		"1000\r\n\r\n")
	cut := make(chan struct{})
	go func() {
		defer close(cut)
		for range time.Tick(20 * time.Millisecond) { // one byte every 20 ms
			if _, err := conn.Write([]byte(" ")); err != nil {
				return
			}
		}
	}()
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusRequestTimeout, response.StatusCode)
	<-cut
	b.metric(`dlqd_http_refused_total{reason="slow"} 1`)
	b.submit("m1")
}

// Once the body has arrived, the response may take any time.
func TestDoor_AllowsSlowResponses(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.BodyGrace = 50 * time.Millisecond }})
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE river_job IN SHARE MODE")
	require.NoError(t, err)
	answered := make(chan int, 1)
	go func() { answered <- b.ask(http.DefaultClient, "POST", b.base+"/api/messages", aMessage).StatusCode }()
	b.metric("dlqd_ingest_pending_messages 1")
	_, err = tx.Exec(t.Context(), "SELECT pg_sleep(0.2)")
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, http.StatusAccepted, <-answered)
}

// One client cannot use the whole quota of requests or bodies.
func TestDoor_LimitsTheShareOfAClient(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) {
		c.Door.MaxRequests = 8
		c.MaxBodiesBytes = 1 << 20
		c.Door.Client = func(r *http.Request) string { return r.Header.Get("Test-Client") }
	}})
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE river_job IN SHARE MODE")
	require.NoError(t, err)
	answers := make(chan int, 4)
	for range 4 {
		go func() {
			answers <- b.ask(http.DefaultClient, "POST", b.base+"/api/messages", aMessage, "Test-Client", "greedy").StatusCode
		}()
	}
	b.metric("dlqd_ingest_pending_messages 4")
	refused := b.ask(http.DefaultClient, "POST", b.base+"/api/messages", aMessage, "Test-Client", "greedy")
	require.Equal(t, http.StatusTooManyRequests, refused.StatusCode)
	require.Equal(t, "1", refused.Header.Get("Retry-After"))
	require.Equal(t, 200, b.ask(http.DefaultClient, "GET", b.base+"/api/dlq/entries", "", "Test-Client",
		"other").StatusCode)
	require.Equal(t, 200, b.ask(http.DefaultClient, "GET", b.base+"/livez", "", "Test-Client", "greedy").StatusCode)
	require.NotEqual(t, http.StatusTooManyRequests, // the status may be 503: a busy machine may be unready
		b.ask(http.DefaultClient, "GET", b.base+"/readyz", "", "Test-Client", "greedy").StatusCode)
	require.NoError(t, tx.Rollback(t.Context()))
	for range 4 { // 503: a busy machine took longer than a message may wait for the lock
		require.Contains(t, []int{http.StatusAccepted, http.StatusServiceUnavailable}, <-answers)
	}
	big := fmt.Sprintf(`{"queue": "default", "kind": "k", "payload": %q}`, strings.Repeat("x", 700_000))
	refused = b.ask(http.DefaultClient, "POST", b.base+"/api/messages", big, "Test-Client", "greedy")
	require.Equal(t, http.StatusTooManyRequests, refused.StatusCode)
	b.metric(`dlqd_http_refused_total{reason="bodies"} 1`)
	b.metric(`dlqd_http_refused_total{reason="requests"} 1`)
}

func TestDoor_LimitsConnections(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.MaxConnections = 8 }})
	var conns []net.Conn
	for range 4 {
		conns = append(conns, b.dial("GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"))
		_, err := conns[len(conns)-1].Read(make([]byte, 1))
		require.NoError(t, err)
	}
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(b.base, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err, "the connection is closed")
	require.NoError(t, conns[0].Close())
	require.Eventually(t, func() bool {
		response, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get(b.base + "/metrics")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		raw, err := io.ReadAll(response.Body)
		return err == nil && strings.Contains(string(raw), `dlqd_http_refused_total{reason="connections"}`)
	}, 5*time.Minute, 50*time.Millisecond)
}

func TestDoor_LimitsTheRateOfRequests(t *testing.T) {
	t.Parallel()
	b := setup(t, options{config: func(c *server.Config) { c.Door.Rate = door.Rate{Requests: 3, Per: time.Hour} }})
	for i := range 5 {
		response := b.ask(http.DefaultClient, "POST", b.base+"/api/messages", aMessage)
		require.Equal(t, map[bool]int{true: 202, false: 429}[i < 3], response.StatusCode)
		require.Equal(t, `"requests";q=3;w=3600`, response.Header.Get("Ratelimit-Policy"))
		require.Equal(t, i >= 3, response.Header.Get("Retry-After") != "")
	}
	b.metric(`dlqd_http_refused_total{reason="rate"} 2`)
}

func TestDoor_LimitsHeaders(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	conn := b.dial("GET /livez HTTP/1.1\r\nHost: localhost\r\nX: %s\r\n\r\n", strings.Repeat("x", 80<<10))
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, response.StatusCode)
}

// URLs of pages may be long: a filter of 4 KB (12 KB percent-encoded), alone, with a note of 10,000 characters or with
// 500 entry ids, and in the URL of the page's events. A URL of 80 KB is refused.
func TestDoor_ServesLongURLs(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	filter := url.QueryEscape(strings.Repeat("ü", 2048)) // 4 KB, and 12 KB in a URL
	for _, path := range []string{
		"/dead-letters?q=" + filter, "/bulk?all=1&do=replay&q=" + filter + "&note=" + strings.Repeat("x", 10_000),
		"/api/dlq/entries?q=" + filter,
		"/bulk?do=discard&q=" + filter + strings.Repeat("&id="+uuid.NewString(), 500),
	} {
		conn := b.dial("GET %s HTTP/1.1\r\nHost: localhost\r\nAccept: text/html\r\n\r\n", path)
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err, path[:40])
		require.NoError(t, response.Body.Close())
		require.Equal(t, http.StatusOK, response.StatusCode, path[:40])
	}
	events := b.dial("GET /events?page=%s HTTP/1.1\r\nHost: localhost\r\n\r\n", url.QueryEscape("/dead-letters?q="+filter))
	response, err := http.ReadResponse(bufio.NewReader(events), nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, response.StatusCode)
	require.NoError(t, events.Close())
	conn := b.dial("GET /dead-letters?q=%s HTTP/1.1\r\nHost: localhost\r\n\r\n", strings.Repeat("x", 80<<10))
	response, err = http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusRequestHeaderFieldsTooLarge, response.StatusCode)
}

// authority is a certificate authority.
type authority struct {
	*testing.T

	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	a := &authority{T: t}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "CA"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	a.cert, err = x509.ParseCertificate(raw)
	require.NoError(t, err)
	a.key, a.pem = key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw})
	return a
}

func (a *authority) issue(name string) (cert, key []byte) {
	a.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(a, err)
	raw, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"localhost", proxyHost}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}, a.cert, &k.PublicKey, a.key)
	require.NoError(a, err)
	rawKey, err := x509.MarshalECPrivateKey(k)
	require.NoError(a, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw}),
		pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: rawKey})
}

// A client certificate authenticates its holder. A grant may list the certificate's common name or one of its
// alternative names.
func TestDoor_AuthenticatesByCertificate(t *testing.T) {
	t.Parallel()
	a, clients := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	files := door.CertificateFiles{
		Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), ClientCA: filepath.Join(dir, "ca.pem"),
	}
	cert, key := a.issue("server")
	for path, content := range map[string][]byte{files.Cert: cert, files.Key: key, files.ClientCA: clients.pem} {
		require.NoError(t, os.WriteFile(path, content, 0o600))
	}
	b := setup(t, options{config: func(c *server.Config) {
		c.TLS = files
		c.Policy.Access.Authentication = []string{"certificates"}
		c.Policy.Access.Grants = []policy.Grant{
			{Certificates: []string{"billing"}, Role: "sender", Kinds: []string{"order.*"}},
			{Certificates: []string{"localhost"}, Role: "metrics"}, // an alternative name of every certificate
			{Users: []string{"mallory"}, Groups: []string{"mallory"}, OSUsers: []string{"mallory"}, Role: "admin"},
		}
	}})
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(a.pem))
	// TestDoor_ServesTLS covers certificates of another authority.
	as := func(certificates ...tls.Certificate) func(method, path, body string, headers ...string) int {
		transport := &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certificates}, ForceAttemptHTTP2: true,
		}
		defer transport.CloseIdleConnections()
		client := &http.Client{Transport: transport}
		return func(method, path, body string, headers ...string) int {
			return b.ask(client, method, b.base+path, body, headers...).StatusCode
		}
	}
	issue := func(name string) tls.Certificate {
		pair, err := tls.X509KeyPair(clients.issue(name))
		require.NoError(t, err)
		return pair
	}
	billing, mallory, worker, anonymous := as(issue("billing")), as(issue("mallory")), as(issue("worker:1")), as()
	require.Equal(t, 202, billing("POST", "/api/messages", aMessage))
	require.Equal(t, 403, billing("POST", "/api/messages", strings.ReplaceAll(aMessage, "order.placed", "user.mail")))
	require.Equal(t, 403, billing("GET", "/api/dlq/entries", ""))
	require.Equal(t, 200, billing("GET", "/metrics", ""))
	require.Equal(t, 403, mallory("POST", "/api/messages", aMessage), "grants to users, groups and OS users do not "+
		"apply to certificates")
	require.Equal(t, 200, mallory("GET", "/metrics", ""))
	require.Equal(t, 200, worker("GET", "/api/whoami", ""), "identified by its other name, as dlqd reserves worker:1")
	for _, header := range []string{
		"Authorization", "X-Forwarded-Client-Cert", "X-Ssl-Client-Cert",
		"X-Client-Cert-Subject",
	} {
		require.Equal(t, 401, anonymous("POST", "/api/messages", aMessage, header, "CN=billing"), header)
	}
	require.Equal(t, 1, b.count("SELECT count(*) FROM river_job"))

	rules, err := policy.Default("http://127.0.0.1:9/")
	require.NoError(t, err)
	rules.Access.Authentication = []string{"certificates"}
	_, err = server.Start(t.Context(), server.Config{
		DatabaseURL: b.url, Schemas: postgres.DefaultSchemas(), API: true, Policy: rules,
		Listen: []string{"127.0.0.1:0"}, Logger: slog.New(slog.DiscardHandler), StopTimeout: 20 * time.Second,
	})
	require.ErrorContains(t, err, "--tls-client-ca")
}

func TestDoor_ServesTLS(t *testing.T) {
	t.Parallel()
	a, clients := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	files := door.CertificateFiles{
		Cert: filepath.Join(dir, "cert.pem"), Key: filepath.Join(dir, "key.pem"), ClientCA: filepath.Join(dir, "ca.pem"),
	}
	write := func(path string, content []byte) { require.NoError(t, os.WriteFile(path, content, 0o600)) }
	cert, key := a.issue("first")
	write(files.Cert, cert)
	write(files.Key, key)
	write(files.ClientCA, clients.pem)
	socket := filepath.Join(t.TempDir(), "s")
	var subject atomic.Value
	b := setup(t, options{config: func(c *server.Config) {
		c.TLS = files
		c.Listen = append(c.Listen, "unix:"+socket)
		c.Door.Client = func(r *http.Request) string {
			name := ""
			if certificate := door.ClientCertificate(r); certificate != nil {
				name = certificate.Subject.String()
			}
			subject.Store(name)
			return "all"
		}
	}})
	require.True(t, strings.HasPrefix(b.base, "https://"), b.base)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(a.pem))
	client := func(config *tls.Config) *http.Client {
		config.RootCAs = roots
		// Keep-alives stay on: with DisableKeepAlives, an HTTP/2 client sometimes closes a
		// connection that it is using.
		transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: true}
		t.Cleanup(transport.CloseIdleConnections)
		return &http.Client{Transport: transport}
	}
	plain := client(&tls.Config{})
	response := b.ask(plain, "POST", b.base+"/api/messages", aMessage)
	require.Equal(t, http.StatusAccepted, response.StatusCode)
	require.Equal(t, 2, response.ProtoMajor)
	require.Empty(t, subject.Load())
	require.Equal(t, http.StatusMisdirectedRequest, b.ask(plain, "GET", b.base+"/api/dlq/entries", "", "Host",
		"evil.example").StatusCode)

	_, err := client(&tls.Config{MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}).Get(b.base + "/livez")
	require.Error(t, err)
	require.Equal(t, 200, b.ask(client(&tls.Config{MaxVersion: tls.VersionTLS12}), "GET", b.base+"/livez", "").StatusCode)
	answer, err := http.Get(strings.Replace(b.base, "https:", "http:", 1) + "/livez")
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	require.Equal(t, http.StatusBadRequest, answer.StatusCode)
	bySocket := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		},
	}}
	require.Equal(t, 200, b.ask(bySocket, "GET", "http://dlqd/livez", "").StatusCode)

	// The subject of a client certificate identifies the client. Another authority's certificate is
	// refused.
	known, err := tls.X509KeyPair(clients.issue("billing"))
	require.NoError(t, err)
	stranger, err := tls.X509KeyPair(newAuthority(t).issue("billing"))
	require.NoError(t, err)
	require.Equal(t, 200, b.ask(client(&tls.Config{Certificates: []tls.Certificate{known}}), "GET",
		b.base+"/api/dlq/entries", "").StatusCode)
	require.Equal(t, "CN=billing", subject.Load())
	_, err = client(&tls.Config{GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate,
		error,
	) {
		return &stranger, nil
	}}).Get(b.base + "/livez")
	require.Error(t, err)

	// Changed files are read again. Files that do not match each other are logged and change
	// nothing.
	shown := func() string {
		conn, err := (&tls.Dialer{Config: &tls.Config{RootCAs: roots}}).DialContext(t.Context(), "tcp",
			strings.TrimPrefix(b.base, "https://"))
		require.NoError(t, err)
		defer conn.Close()
		return conn.(*tls.Conn).ConnectionState().PeerCertificates[0].Subject.CommonName
	}
	require.Equal(t, "first", shown())
	cert, key = a.issue("second")
	write(files.Cert, cert)
	require.Eventually(t, func() bool {
		response, err := plain.Get(b.base + "/metrics")
		require.NoError(t, err)
		defer response.Body.Close()
		raw, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		return strings.Contains(string(raw), `dlqd_loop_turns_total{loop="certificates",outcome="error"}`) &&
			!strings.Contains(string(raw), `dlqd_loop_turns_total{loop="certificates",outcome="error"} 0`)
	}, 5*time.Minute, 50*time.Millisecond)
	require.Equal(t, "first", shown())
	write(files.Key, key)
	require.Eventually(t, func() bool { return shown() == "second" }, 5*time.Minute, 50*time.Millisecond)
	write(files.ClientCA, a.pem)
	require.Eventually(t, func() bool {
		_, err := client(&tls.Config{GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate,
			error,
		) {
			return &known, nil
		}}).Get(b.base + "/livez")
		return err != nil
	}, 5*time.Minute, 50*time.Millisecond, "its authority is no longer trusted")
}

// If a request has both Content-Length and Transfer-Encoding, the body is the request's chunks. dlqd does not read
// another request from the bytes after the chunks, as docs/security.md says.
func TestDoor_DropsContentLengthBesideTransferEncoding(t *testing.T) {
	t.Parallel()
	b := sharedServer(t)
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(b.base, "http://"))
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	id := uuid.NewString()
	body := fmt.Sprintf(`{"messageId": %q, "queue": "default", "kind": "k", "payload": 1}`, id)
	_, err = fmt.Fprintf(conn, "POST /api/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"+
		"Content-Length: 4\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", len(body), body)
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	require.Equal(t, http.StatusAccepted, response.StatusCode)
	b.awaitMessage(id, "completed")
}
