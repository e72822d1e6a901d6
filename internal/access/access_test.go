package access_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os/user"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

func TestRole_IncludesLowerRoles(t *testing.T) {
	t.Parallel()
	may := map[access.Role][]access.Role{
		access.Reader:   {access.Reader, access.Metrics},
		access.Operator: {access.Reader, access.Operator, access.Metrics, access.Sender},
		access.Admin:    {access.Reader, access.Operator, access.Admin, access.Metrics, access.Sender},
		access.Sender:   {access.Sender},
		access.Metrics:  {access.Metrics},
	}
	for _, role := range append(access.Roles(), "stranger", "") {
		for _, other := range access.Roles() {
			require.Equal(t, slices.Contains(may[role], other), role.Includes(other), "%s includes %s", role, other)
		}
		require.False(t, role.Includes("stranger"), role)
	}
}

func TestPrincipal_MayForMatchesPatterns(t *testing.T) {
	t.Parallel()
	p := &access.Principal{Grants: []access.Grant{
		{Role: access.Reader},
		{Role: access.Operator, Queues: []string{"payments*", "orders"}, Kinds: []string{"*.refund*"}},
		{Role: access.Sender, Sources: []string{"shop"}},
	}}
	require.True(t, p.MayEverywhere(access.Reader))
	require.True(t, p.May(access.Operator))
	require.False(t, p.MayEverywhere(access.Operator))
	require.False(t, p.May(access.Admin))
	for _, c := range []struct {
		role                access.Role
		queue, kind, source string
		may                 bool
	}{
		{access.Reader, "anything", "any.kind", "", true},
		{access.Operator, "payments", "card.refund", "", true},
		{access.Operator, "payments-eu", "card.refund.partial", "", true},
		{access.Operator, "payment", "card.refund", "", false},
		{access.Operator, "orders", "card.charge", "", false},
		{access.Operator, "orders-eu", "card.refund", "", false},
		{access.Sender, "q", "k", "shop", true},
		{access.Sender, "q", "k", "", false},
		{access.Sender, "orders", "card.refund", "another", true}, // operators are senders, too
	} {
		require.Equal(t, c.may, p.MayFor(c.role, c.queue, c.kind, c.source), "%+v", c)
	}
	for pattern, texts := range map[string]map[string]bool{
		"*": {"": true, "x": true}, "a*b": {"ab": true, "axb": true, "a": false, "abc": false},
		"a*b*c": {"abc": true, "acb": false, "abbc": true, "axbxc": true},
		"aa*aa": {"aaa": false, "aaaa": true}, "a": {"a": true, "A": false},
	} {
		for text, matches := range texts {
			one := &access.Principal{Grants: []access.Grant{{Role: access.Reader, Queues: []string{pattern}}}}
			require.Equal(t, matches, one.MayFor(access.Reader, text, "", ""), "%s ~ %s", text, pattern)
		}
	}
}

type bundle struct {
	*testing.T

	pool  *pgxpool.Pool
	store *access.Store
}

func setup(t *testing.T) *bundle {
	t.Helper()
	pool := postgrestest.Open(t, postgrestest.URL(t))
	return &bundle{t, pool, access.NewStore(pool, postgres.DefaultSchemas())}
}

func (b *bundle) token(t access.Token) (secret, id string) {
	b.Helper()
	secret, err := b.store.Create(b.Context(), &t, "kim")
	require.NoError(b, err)
	return secret, t.ID
}

// send sends a request, with token unless it is empty, and with further headers. It returns the status and the body,
// which names the caller.
func (b *bundle) send(url, token string, headers ...string) (status int, caller string) {
	b.Helper()
	client := http.DefaultClient
	if path, ok := strings.CutPrefix(url, "unix:"); ok {
		url = "http://dlqd"
		client = &http.Client{Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "unix", path)
			},
		}}
	}
	r, err := http.NewRequestWithContext(b.Context(), http.MethodGet, url, nil)
	require.NoError(b, err)
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	for i := 0; i < len(headers); i += 2 {
		r.Header.Add(headers[i], headers[i+1])
	}
	response, err := client.Do(r)
	require.NoError(b, err)
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	require.NoError(b, err)
	return response.StatusCode, string(body)
}

// serve starts a server on TCP and on a Unix socket. The server answers each request with its caller.
func (b *bundle) serve(a *access.Authenticator) (url, socket string) {
	b.Helper()
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p, err := a.Authenticate(r)
		if err != nil {
			http.Error(w, err.Error(),
				map[bool]int{true: http.StatusUnauthorized, false: http.StatusServiceUnavailable}[access.IsRefusal(err)])
			return
		}
		_, _ = fmt.Fprintf(w, "%s %s %s", p.Via, p.Name, p.RoleName())
	})
	server := httptest.NewUnstartedServer(handler)
	server.Config.ConnContext = access.ConnContext
	server.Start()
	b.Cleanup(server.Close)
	socket = filepath.Join(b.TempDir(), "s")
	listener, err := (&net.ListenConfig{}).Listen(b.Context(), "unix", socket)
	require.NoError(b, err)
	local := &http.Server{Handler: handler, ConnContext: access.ConnContext, ReadHeaderTimeout: time.Minute}
	go func() { _ = local.Serve(listener) }()
	b.Cleanup(func() { _ = local.Close() })
	return server.URL, "unix:" + socket
}

func rules(r access.Rules) func() access.Rules { return func() access.Rules { return r } }

func TestTokens_AuthenticateUntilRevoked(t *testing.T) {
	t.Parallel()
	b := setup(t)
	url, _ := b.serve(&access.Authenticator{Tokens: b.store, Rules: rules(access.Rules{Ways: []string{"tokens"}})})
	secret, id := b.token(access.Token{Name: "ci", Role: access.Operator, Queues: []string{"payments*"}, Note: "deploys"})
	require.Regexp(t, `^dlqd_[0-9A-Za-z]{36}$`, secret)
	status, caller := b.send(url, secret)
	require.Equal(t, 200, status, caller)
	require.Equal(t, "token ci operator", caller)

	// The database stores only a hash.
	var rows string
	require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT string_agg(t::text, ' ') || (SELECT string_agg(a::text, ' ')
		FROM dlq.acts a) FROM dlq.tokens t`).Scan(&rows))
	require.NotContains(t, rows, secret[5:20])
	require.Contains(t, rows, "deploys", "the audit trail has the note")

	for name, bad := range map[string]string{
		"none": "", "another's": secret[:10] + map[bool]string{true: "y", false: "x"}[secret[10] == 'x'] + secret[11:],
		"cut": secret[:len(secret)-1], "made up": "dlqd_" + strings.Repeat("a", 36),
		"long": strings.Repeat(secret, 100), "a JWT": "eyJhbGciOiJub25lIn0.e30.",
	} {
		status, _ = b.send(url, bad)
		require.Equal(t, 401, status, name)
	}

	expired := time.Now().Add(-time.Second)
	old, _ := b.token(access.Token{Name: "old", Role: access.Admin, ExpiresAt: &expired})
	status, _ = b.send(url, old)
	require.Equal(t, 401, status)

	rotated, next, err := b.store.Rotate(t.Context(), id, "kim", time.Hour, nil)
	require.NoError(t, err)
	require.Equal(t, []string{"payments*"}, rotated.Queues)
	for _, s := range []string{secret, next} {
		status, _ = b.send(url, s)
		require.Equal(t, 200, status, "after a rotation both tokens are valid")
	}
	require.NoError(t, b.store.Revoke(t.Context(), id, "kim", "it leaked"))
	require.NoError(t, b.store.Revoke(t.Context(), rotated.ID, "kim", "it leaked"))
	require.ErrorIs(t, b.store.Revoke(t.Context(), rotated.ID, "kim", "again"), access.ErrNoToken)
	for _, s := range []string{secret, next} {
		require.Eventually(t, func() bool { status, _ := b.send(url, s); return status == 401 }, time.Minute,
			50*time.Millisecond)
	}
	tokens, err := b.store.List(t.Context())
	require.NoError(t, err)
	require.Len(t, tokens, 3)
	for _, token := range tokens {
		require.Contains(t, []string{"revoked", "expired"}, token.State(time.Now()))
	}
	require.NotNil(t, tokens[0].UsedAt)
}

// A process caches the lookup of a token for several requests. In the test, a token is used while it is revoked: after
// the first refusal, the token stays refused.
func TestTokens_StayRefusedAfterRevocation(t *testing.T) {
	t.Parallel()
	b := setup(t)
	url, _ := b.serve(&access.Authenticator{Tokens: b.store, Rules: rules(access.Rules{Ways: []string{"tokens"}})})
	secret, id := b.token(access.Token{Name: "ci", Role: access.Reader})
	status, _ := b.send(url, secret)
	require.Equal(t, 200, status)
	var refused atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		for !refused.Load() {
			status, _ := b.send(url, secret)
			refused.Store(status == 401)
		}
	}()
	require.NoError(t, b.store.Revoke(t.Context(), id, "kim", ""))
	<-done
	for range 50 {
		status, _ = b.send(url, secret)
		require.Equal(t, 401, status, "a refused token stays refused")
	}
}

func TestTokens_RejectInvalidGrants(t *testing.T) {
	t.Parallel()
	b := setup(t)
	for want, token := range map[string]access.Token{
		"1 to 255 bytes":           {Role: access.Reader},
		"cannot be printed":        {Name: "\x1b[31mkim", Role: access.Reader},
		"unknown role":             {Name: "x", Role: "root"},
		"worker:1 is reserved":     {Name: "worker:1", Role: access.Reader},
		"source is reserved":       {Name: "source", Role: access.Reader},
		"policy is reserved":       {Name: "policy", Role: access.Reader},
		"only for the role sender": {Name: "x", Role: access.Reader, Sources: []string{"a"}},
		"cannot be limited":        {Name: "x", Role: access.Metrics, Queues: []string{"a"}},
		"invalid pattern":          {Name: "x", Role: access.Reader, Kinds: []string{""}},
	} {
		_, err := b.store.Create(t.Context(), &token, "kim")
		require.ErrorContains(t, err, want)
	}
	require.ErrorContains(t, b.store.Revoke(t.Context(), "nonsense", "kim", ""), "invalid token id")
}

// After too many failed attempts from an address, dlqd answers further ones with the time to wait. Valid tokens from
// the address still work.
func TestTokens_LimitFailedAttempts(t *testing.T) {
	t.Parallel()
	b := setup(t)
	url, _ := b.serve(&access.Authenticator{Tokens: b.store, Rules: rules(access.Rules{Ways: []string{"tokens"}})})
	good, _ := b.token(access.Token{Name: "ci", Role: access.Reader})
	status, _ := b.send(url, good)
	require.Equal(t, 200, status)
	var caller string
	for range 25 {
		status, caller = b.send(url, "dlqd_"+strings.Repeat("b", 36))
		require.Equal(t, 401, status)
	}
	require.Contains(t, caller, "too many failed sign-ins")
	fresh, _ := b.token(access.Token{Name: "new", Role: access.Reader})
	for _, token := range []string{good, fresh} { // this process has not looked up the second one yet
		status, caller = b.send(url, token)
		require.Equal(t, 200, status, caller)
	}
}

// Recording a token's last use does not wait for another transaction.
func TestTokens_DoNotWaitForLockedRow(t *testing.T) {
	t.Parallel()
	b := setup(t)
	url, _ := b.serve(&access.Authenticator{Tokens: b.store, Rules: rules(access.Rules{Ways: []string{"tokens"}})})
	secret, _ := b.token(access.Token{Name: "ci", Role: access.Reader})
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), "UPDATE dlq.tokens SET note = 'x'")
	require.NoError(t, err)
	status, caller := b.send(url, secret)
	require.Equal(t, 200, status, caller)
}

// The pattern * means every queue.
func TestPrincipal_StarMatchesEveryQueue(t *testing.T) {
	t.Parallel()
	p := &access.Principal{Grants: []access.Grant{{Role: access.Operator, Queues: []string{"*"}}}}
	require.True(t, p.MayEverywhere(access.Reader))
	require.Nil(t, p.Scope(access.Reader))
}

// The proxy's headers count only from the proxy's addresses.
func TestProxy_IsTrustedOnlyFromItsAddresses(t *testing.T) {
	t.Parallel()
	b := setup(t)
	here := access.Proxy{
		From:       []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")},
		UserHeader: "X-User", GroupsHeader: "X-Groups",
	}
	grants := []access.UserGrant{
		{Grant: access.Grant{Role: access.Operator}, Groups: []string{"oncall"}},
		{Grant: access.Grant{Role: access.Admin}, Users: []string{"kim"}},
		{Grant: access.Grant{Role: access.Admin}, OSUsers: []string{"anna"}},
	}
	url, socket := b.serve(&access.Authenticator{
		Tokens: b.store, Rules: rules(access.Rules{Ways: []string{"proxy"}, Proxy: here, Grants: grants}),
	})
	for _, c := range []struct {
		headers []string
		want    string
	}{
		{[]string{"X-User", "kim"}, "proxy kim admin"},
		{[]string{"X-User", "anna", "X-Groups", "staff, oncall"}, "proxy anna operator"},
		{[]string{"X-User", "anna"}, "proxy anna "},
		{nil, access.ErrUnknown.Error() + "\n"},
		{[]string{"X-User", ""}, access.ErrUnknown.Error() + "\n"},
		{[]string{"X-User", "capture"}, access.ErrUnknown.Error() + "\n"},
		// The proxy sent a header, and the client sent the same header:
		{[]string{"X-User", "anna", "X-User", "kim"}, access.ErrUnknown.Error() + "\n"},
		{[]string{"X-User", "anna", "X-Groups", "staff", "X-Groups", "oncall"}, access.ErrUnknown.Error() + "\n"},
		{[]string{"X-User", "an\u202ena"}, access.ErrUnknown.Error() + "\n"},
	} {
		_, caller := b.send(url, "", c.headers...)
		require.Equal(t, c.want, caller, "%v", c.headers)
	}
	status, _ := b.send(socket, "", "X-User", "kim")
	require.Equal(t, 401, status, "the proxy does not connect through the socket")

	away := here
	away.From = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	url, _ = b.serve(&access.Authenticator{
		Tokens: b.store, Rules: rules(access.Rules{Ways: []string{"proxy", "tokens"}, Proxy: away, Grants: grants}),
	})
	status, _ = b.send(url, "", "X-User", "kim", "X-Forwarded-For", "192.0.2.1")
	require.Equal(t, 401, status)
}

func TestSocket_AuthenticatesOSUser(t *testing.T) {
	t.Parallel()
	b := setup(t)
	me, err := user.Current()
	require.NoError(t, err)
	grants := []access.UserGrant{
		{Grant: access.Grant{Role: access.Operator}, OSUsers: []string{me.Username}},
		{Grant: access.Grant{Role: access.Admin}, Users: []string{me.Username}},
	}
	url, socket := b.serve(&access.Authenticator{
		Tokens: b.store, Rules: rules(access.Rules{Ways: []string{"socket"}, Grants: grants}),
	})
	_, caller := b.send(socket, "")
	require.Equal(t, "socket "+me.Username+" operator", caller)
	status, _ := b.send(url, "")
	require.Equal(t, 401, status)
}

// Without authentication, every caller has all rights if Open is set, and none otherwise.
func TestAuthenticate_AllowsEveryCallerOnlyIfOpen(t *testing.T) {
	t.Parallel()
	b := setup(t)
	url, _ := b.serve(&access.Authenticator{Rules: rules(access.Rules{}), Open: true})
	_, caller := b.send(url, "")
	require.Equal(t, "  admin", caller)
	url, _ = b.serve(&access.Authenticator{Rules: rules(access.Rules{})})
	status, _ := b.send(url, "")
	require.Equal(t, 401, status)
}

// A slow database does not lock out operators: a lookup may take longer than tokenTTL, for which its result is cached.
func TestTokens_WaitForSlowDatabase(t *testing.T) {
	t.Parallel()
	b := setup(t)
	url, _ := b.serve(&access.Authenticator{Tokens: b.store, Rules: rules(access.Rules{Ways: []string{"tokens"}})})
	secret, _ := b.token(access.Token{Name: "ci", Role: access.Reader})
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	_, err = tx.Exec(t.Context(), "LOCK TABLE dlq.tokens")
	require.NoError(t, err)
	answered := make(chan int)
	go func() {
		status, _ := b.send(url, secret)
		answered <- status
	}()
	require.Eventually(t, func() bool {
		var waiting bool
		err := b.pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock'
			AND datname = current_database() AND clock_timestamp() - query_start > interval '4 s')`).Scan(&waiting)
		return err == nil && waiting
	}, time.Minute, 50*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, 200, <-answered)
}

// While the database is unavailable, the answer to a token is neither success nor a refusal, but 503.
func TestTokens_NeitherAcceptedNorRefusedWithoutDatabase(t *testing.T) {
	t.Parallel()
	b := setup(t)
	pool := postgrestest.Open(t, postgrestest.URL(t))
	url, _ := b.serve(&access.Authenticator{
		Tokens: access.NewStore(pool, postgres.DefaultSchemas()), Rules: rules(access.Rules{Ways: []string{"tokens"}}),
	})
	secret, _ := b.token(access.Token{Name: "ci", Role: access.Reader})
	pool.Close()
	status, caller := b.send(url, secret)
	require.Equal(t, 503, status, caller)
}
