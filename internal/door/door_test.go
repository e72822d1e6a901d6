package door_test

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/door"
)

func guard(config door.Config) http.Handler {
	config.Client = door.Peer
	return door.Guard(config, door.Limit(config, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
}

func TestGuard_RefusesUnknownHosts(t *testing.T) {
	t.Parallel()
	handler := guard(door.Config{Hosts: append(door.HostsOf([]string{
		"dlqd.internal:7353", "0.0.0.0:80", ":80",
		"unix:/run/x:1", "[fe80::1%eth0]:80",
	}), "Public.Example", "10.9.8.7")})
	tcp := &net.TCPAddr{IP: net.ParseIP("192.0.2.1"), Port: 7353}
	for host, want := range map[string]int{
		"localhost": 200, "localhost:7353": 200, "LOCALHOST.": 200, "127.0.0.1:7353": 200,
		"127.9.9.9": 200, "[::1]:7353": 200, "[::1]": 200, "[::ffff:127.0.0.1]": 200,
		"192.0.2.1": 200, "192.0.2.1:80": 200, "dlqd.internal": 200,
		"public.example": 200, "PUBLIC.example.:443": 200, "10.9.8.7": 200,
		"": 421, "evil.example": 421, "evil.example:7353": 421, "127.0.0.1.evil.example": 421,
		"localhost.evil.example": 421, "0.0.0.0": 421, "[::]": 421,
		"192.0.2.2": 421, "dlqd.internal.evil.example": 421, "x.dlqd.internal": 421, "localhost@evil.example": 421,
		"evil.example#localhost": 421, "2130706433": 421, "0x7f.1": 421, "unix": 421,
	} {
		request := httptest.NewRequest(http.MethodGet, "/", nil)
		request.Host = host
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer,
			request.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey, net.Addr(tcp))))
		require.Equal(t, want, answer.Code, "%q", host)
		require.Equal(t, "nosniff", answer.Header().Get("X-Content-Type-Options"))

		answer = httptest.NewRecorder()
		handler.ServeHTTP(answer, request.WithContext(context.WithValue(t.Context(), http.LocalAddrContextKey,
			net.Addr(&net.UnixAddr{Net: "unix", Name: "/run/x"}))))
		require.Equal(t, 200, answer.Code, "%q, through a Unix socket", host)
	}
	for _, config := range []door.Config{
		{Hosts: []string{""}},
		{Hosts: []string{"a:80"}},
		{Hosts: []string{"*"}},
		{Hosts: []string{"http://a"}},
		{Origins: []string{"*"}},
		{Origins: []string{"null"}},
		{Origins: []string{"console.example"}},
		{Origins: []string{"https://a/"}},
		{Origins: []string{"https://*.a"}},
		{Origins: []string{"https://u@a"}},
	} {
		require.Error(t, config.Check(), "%v", config)
	}
	require.NoError(t, (&door.Config{
		Hosts: []string{"a.b", "10.0.0.1", "::1"}, Origins: []string{"https://a", "http://localhost:3000"},
	}).Check())
}

func TestGuard_RefusesOtherOrigins(t *testing.T) {
	t.Parallel()
	send := func(handler http.Handler, method, origin, site string) *httptest.ResponseRecorder {
		request := httptest.NewRequest(method, "/api/messages", nil)
		request.Host = "localhost"
		request.Header.Set("Origin", origin)
		request.Header.Set("Sec-Fetch-Site", site)
		if method == http.MethodOptions {
			request.Header.Set("Access-Control-Request-Method", http.MethodPost)
			request.Header.Set("Access-Control-Request-Headers", "content-type")
		}
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		return answer
	}
	closed, open := guard(door.Config{}), guard(door.Config{Origins: []string{"https://console.example"}})
	for _, method := range []string{"GET", "POST", "OPTIONS"} {
		for _, handler := range []http.Handler{closed, open} {
			answer := send(handler, method, "https://evil.example", "cross-site")
			require.Empty(t, answer.Header().Get("Access-Control-Allow-Origin"), method)
			if method == "POST" {
				require.Equal(t, 403, answer.Code)
			}
		}
		require.Empty(t, send(closed, method, "https://console.example", "cross-site").Header().Get(
			"Access-Control-Allow-Origin"))
		answer := send(open, method, "https://console.example", "cross-site")
		require.Less(t, answer.Code, 300, method)
		require.Equal(t, "https://console.example", answer.Header().Get("Access-Control-Allow-Origin"))
		require.Empty(t, answer.Header().Get("Access-Control-Allow-Credentials"))
	}
}

func TestQuota_LeavesSharesToOthers(t *testing.T) {
	t.Parallel()
	quota := door.NewQuota(12)
	acquireAll := func(client string) (acquired int) {
		for quota.Acquire(client, 1) {
			acquired++
		}
		return acquired
	}
	require.Equal(t, 6, acquireAll("a"), "a single client gets half")
	require.Equal(t, 3, acquireAll("b"), "the second client gets half of the rest")
	require.Equal(t, 1, acquireAll("c"))
	require.Zero(t, acquireAll("a"), "the client holds more than is free")
	quota.Release("a", 6)
	require.Equal(t, 3, acquireAll("c"))
	require.False(t, quota.Acquire("d", 6))
	quota.Release("b", 3)
	quota.Release("c", 4)
	require.True(t, quota.Acquire("d", 6))
}

func TestRate_LimitsEachClient(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]door.Rate{
		"": {}, "100/s": {100, time.Second}, "600/m": {600, time.Minute},
		"1/h": {1, time.Hour}, "50/10s": {50, 10 * time.Second},
	} {
		got, err := door.ParseRate(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got)
	}
	for _, text := range []string{"100", "100/", "/s", "0/s", "-1/s", "1/ms", "1/x", "1/s/s", "1.5/s", "1/48h"} {
		_, err := door.ParseRate(text)
		require.Error(t, err, text)
	}
	handler := guard(door.Config{Rate: door.Rate{Requests: 2, Per: time.Hour}})
	send := func(path, peer string) *httptest.ResponseRecorder {
		request := httptest.NewRequest(http.MethodGet, path, nil)
		request.Host, request.RemoteAddr = "localhost", peer
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		return answer
	}
	first := send("/a", "192.0.2.1:1000")
	require.Equal(t, 200, first.Code)
	require.Equal(t, `"requests";q=2;w=3600`, first.Header().Get("Ratelimit-Policy"))
	require.Equal(t, `"requests";r=1;t=1800`, first.Header().Get("Ratelimit"))
	require.Equal(t, 200, send("/a", "192.0.2.1:1001").Code)
	refused := send("/a", "192.0.2.1:1002")
	require.Equal(t, 429, refused.Code)
	require.Equal(t, "application/problem+json", refused.Header().Get("Content-Type"))
	require.Contains(t, refused.Header().Get("Ratelimit"), `"requests";r=0;t=`)
	require.Regexp(t, `^1(800|799)$`, refused.Header().Get("Retry-After"))
	require.Equal(t, 200, send("/livez", "192.0.2.1:1002").Code)
	require.Equal(t, 200, send("/a", "192.0.2.2:1000").Code)

	for i, peer := range []string{"[2001:db8::1]:1", "[2001:db8::2]:1", "[2001:db8:0:0:ffff::3]:1"} { // one network
		require.Equal(t, map[bool]int{true: 200, false: 429}[i < 2], send("/a", peer).Code)
	}
	require.Equal(t, 200, send("/a", "[2001:db8:0:1::1]:1").Code)
}
