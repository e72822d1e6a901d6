package server_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/server"
)

// hostileRequest is a request of the hostile set, and the answers that it may get.
type hostileRequest struct {
	name         string
	method, path string
	header       http.Header
	body         string
	hidden       []string // texts that the answer must not contain
	statuses     []int    // allowed statuses; if empty, all except success and 5xx
	page         bool     // of the console: its answers are pages
}

// busy is the result of send for the status 503. On a busy machine the database may take too long; a client then sends
// the request again.
const busy = "is answered with a server error: 503"

// late is a field of a list whose search reached its time limit. The list's cursor may then be the id of an entry that
// the caller may not see.
const late = `"searchedTo"`

// send sends the request. It returns a description of the mistake in the answer, or "" if there is none.
func (h *hostileRequest) send(ctx context.Context, base string) string {
	u, err := url.Parse(base)
	if err != nil {
		return err.Error()
	}
	path, query, _ := strings.Cut(h.path, "?")
	u.Opaque, u.RawQuery = path, query // the path is sent as it is written
	if strings.HasPrefix(path, "//") {
		u.Opaque = "//" + u.Host + path
	}
	request := (&http.Request{
		Method: h.method, URL: u, Host: u.Host, Header: http.Header{"Content-Type": {"application/json"}},
		Body: io.NopCloser(strings.NewReader(h.body)), ContentLength: int64(len(h.body)),
	}).WithContext(ctx)
	for name, values := range h.header {
		request.Header[name] = values
		if name == "Host" {
			request.Host = values[0]
		}
	}
	response, err := hostileTransport.RoundTrip(request)
	if strings.HasPrefix(h.name, "large") && (errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)) {
		return "" // refused before the whole request was sent
	}
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	stream := strings.Contains(response.Header.Get("Content-Type"), "event-stream")
	raw := make([]byte, 4096)
	if stream { // one event at most
		n, _ := response.Body.Read(raw)
		raw = raw[:n]
	} else if raw, err = io.ReadAll(response.Body); err != nil {
		return err.Error()
	}
	var all bytes.Buffer
	fmt.Fprintf(&all, "%d %v\n%s", response.StatusCode, response.Header, raw)
	answer := all.String()
	switch status := response.StatusCode; {
	case status >= 500 && !slices.Contains(h.statuses, status):
		return "is answered with a server error: " + answer
	case len(h.statuses) == 0 && status < 300, len(h.statuses) > 0 && !slices.Contains(h.statuses, status):
		return "is answered with " + answer
	case strings.HasPrefix(string(raw), fmt.Sprintf("%d %s", status, http.StatusText(status))) &&
		(status == http.StatusBadRequest || status == http.StatusRequestHeaderFieldsTooLarge):
		return "" // an answer of net/http, before any code of dlqd runs
	case h.page && strings.HasPrefix(response.Header.Get("Content-Type"), "text/html"):
	case strings.HasPrefix(h.path, "/api/health"): // has the same document for a status of 503
	case status >= 400 && h.method != http.MethodHead && response.Header.Get("Content-Type") != "application/problem+json":
		return "is no problem document: " + answer
	case status == http.StatusUnauthorized && response.Header.Get("WWW-Authenticate") == "":
		return "401 without WWW-Authenticate: " + answer
	case response.Header.Get("Cache-Control") != "no-store":
		return "may be cached: " + answer
	}
	// An answer may repeat text of the request. One of the two may have an id with hyphens, and the other the same id
	// without.
	same := strings.NewReplacer("-", "")
	sent := same.Replace(strings.ToLower(h.path + h.body))
	internals := []string{"goroutine ", ".go:", "panic", "SQLSTATE", "pgconn", "river_job"}
	if h.page { // the form for testing rules contains the word panic
		internals = slices.DeleteFunc(internals, func(word string) bool { return word == "panic" })
	}
	for _, word := range append(internals, h.hidden...) {
		if strings.Contains(answer, word) && !strings.Contains(sent, same.Replace(strings.ToLower(word))) {
			return "contains " + word + ": " + answer
		}
	}
	return ""
}

var hostileTransport = &http.Transport{MaxIdleConnsPerHost: 16, DisableCompression: true}

// The test sends more than a thousand requests for data and actions to which the caller has no right.
func TestHostileRequests_GetNoAccess(t *testing.T) {
	t.Parallel()
	log := &lockedBuffer{}
	b := scopeSetup(t, func(c *server.Config) {
		c.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	})
	bearer := func(token string) http.Header { return http.Header{"Authorization": {"Bearer " + token}} }
	var secrets []string
	token := func(role access.Role, scope int) string {
		secret := b.token(role, scopes[scope].scope)
		secrets = append(secrets, secret)
		// This request makes the token known to the process, before failed attempts of other requests limit lookups of
		// tokens.
		status, out := b.as(secret, "GET", "/api/whoami", "")
		require.Equal(t, http.StatusOK, status, out)
		return secret
	}
	var set []hostileRequest
	add := func(h hostileRequest) { set = append(set, h) }
	const payScope, kindScope, noScope = 1, 3, 5
	limited := token(access.Admin, payScope)
	everything := token(access.Admin, 0)
	const elsewhere = "mailqueue/order.paid"

	// Operations × roles × scopes, with ids outside the scope: 404, or 403 if the role or the scope
	// does not suffice for any id.
	for _, scope := range []int{0, payScope, kindScope, noScope} {
		for _, role := range access.Roles() {
			if scope > payScope && role != access.Admin || role == access.Metrics && scope != 0 {
				continue // scopes work the same for all roles; metrics has no scope
			}
			secret, hidden := token(role, scope), b.hidden(scope)
			for _, o := range doors() {
				may := o.role == "" || role.Includes(o.role)
				targets := []string{""}
				switch o.targetType {
				case "entry":
					targets = []string{b.ids[elsewhere], b.ids["pay_eu/user.mail"], uuid.Nil.String()}
				case "job":
					targets = []string{b.jobs[elsewhere], b.jobs["pay_eu/user.mail"], "7999999999"}
				case "queue":
					targets = []string{"mailqueue", "pay_eu%00", "*"}
				case "approval":
					targets = []string{b.approvals["mailqueue"], b.ids[elsewhere]}
				case "run", "stream":
					targets = []string{b.runs["mailqueue"], b.ids[elsewhere]}
				case "operation":
					targets = []string{b.done["mailqueue"], b.ids[elsewhere]}
				}
				for _, target := range targets {
					h := hostileRequest{
						name: fmt.Sprintf("%s of %s: %s %s", role, scopes[scope].name, o.id, target), method: o.method,
						path: strings.ReplaceAll(o.path, "{id}", target), header: bearer(secret),
						body: strings.ReplaceAll(o.body, "{id}", target), hidden: hidden, page: o.page,
					}
					if o.page {
						h.header.Set("Content-Type", "application/x-www-form-urlencoded")
					}
					everywhere := scopes[scope].scope == nil || o.need == "" || o.need == "queues" && scopes[scope].byQueue
					theirs := scopes[scope].scope == nil || slices.ContainsFunc(scopes[scope].entries,
						func(name string) bool { return b.ids[name] == target || b.jobs[name] == target })
					switch {
					case o.targetType == "open":
						h.statuses = []int{200}
					case o.page && o.path == "/system" && role == access.Metrics: // shows the health
						h.statuses = []int{200}
					case !may, !everywhere:
						h.statuses = []int{403}
						if o.page && target != "" { // a form may first read its target, which is not found
							h.statuses = []int{403, 404}
						}
						if strings.Contains(target, "%00") {
							h.statuses = []int{400, 403, 404, 422}
						}
					case o.targetType == "queue" && o.method == http.MethodGet && scopes[scope].scope == nil:
						h.statuses = []int{200, 400, 404, 422}
					case o.method != http.MethodGet && (theirs || o.targetType == "" && scopes[scope].scope == nil):
						continue // allowed
					case (o.targetType == "entry" || o.targetType == "job") && !theirs, o.targetType == "queue",
						(o.targetType == "run" || o.targetType == "operation" || o.targetType == "approval") &&
							scopes[scope].scope != nil, o.targetType == "none":
						h.statuses = []int{404}
						if strings.Contains(target, "%00") {
							h.statuses = []int{400, 404, 422}
						}
					default:
						h.statuses = []int{200, 202, 404, 422}
						if o.id == "get-health" { // on a busy machine a loop may be late
							h.statuses = append(h.statuses, http.StatusServiceUnavailable)
						}
						if o.page {
							h.statuses = append(h.statuses, http.StatusSeeOther)
						}
					}
					add(h)
				}
			}
		}
	}

	// These requests name things outside the scope: in filters, in cursors, and in other ways.
	entry, run := b.ids[elsewhere], b.runs["mailqueue"]
	_, first := b.as(everything, "GET", "/api/dlq/audit?limit=1", "")
	_, cursor, _ := strings.Cut(first, `"next":"`)
	cursor, _, _ = strings.Cut(cursor, `"`)
	encoded := base64.RawURLEncoding.EncodeToString([]byte(`{"scope":[],"id":"` + entry + `"}`))
	for _, c := range []string{
		entry, strings.ToUpper(entry), strings.ReplaceAll(entry, "-", ""), "{" + entry + "}", "urn:uuid:" + entry,
		entry[:35], entry + "0", uuid.Max.String(), uuid.Nil.String(), run, cursor, cursor + "0", cursor[1:],
		"0-0", "-1-1", "99999999999999999-999999999999999999", "1-" + strings.Repeat("9", 19),
		encoded, "'%20OR%20true--", "%00", "..%2f..", "%F0%9F%92%A9", "[]", "null",
	} {
		for _, path := range []string{
			"/api/dlq/entries?limit=1&cursor=", "/api/dlq/entries?order=oldest&cursor=",
			"/api/dlq/audit?cursor=", "/api/dlq/audit?entryId=", "/api/dlq/entries?queue=mailqueue&cursor=", "/api/dlq/entries/",
			"/api/dlq/replays/", "/api/messages/", "/api/jobs/", "/api/jobs?queue=mailqueue&state=discarded&cursor=",
		} {
			add(hostileRequest{
				name: "cursor " + c, method: "GET", path: path + c, header: bearer(limited),
				hidden: b.hidden(payScope), statuses: []int{200, 400, 404, 422},
			})
		}
	}
	for _, query := range []string{
		"/api/dlq/entries?queue=mailqueue", "/api/dlq/entries?queue=*",
		"/api/dlq/entries?queue=pay_eu&queue=mailqueue", "/api/dlq/entries?scope=",
		"/api/dlq/entries?scope=%5B%7B%7D%5D", "/api/dlq/entries?dlq.scope=null", "/api/dlq/stats?queue=mailqueue",
		"/api/dlq/audit?queue=mailqueue", "/api/dlq/audit?text=mailqueue", "/api/dlq/audit?entryId=" + entry,
		"/api/dlq/audit?actor=kim", "/api/dlq/audit?people=true", "/api/dlq/audit?origin=a",
		"/api/dlq/analytics/flow?queue=mailqueue", "/api/dlq/analytics/flow?by=queue",
		"/api/dlq/analytics/times?by=queue", "/api/dlq/analytics/groups?queue=mailqueue",
		"/api/dlq/analytics/oldest?limit=100", "/api/dlq/analytics/heat-map?queue=mailqueue",
		"/api/dlq/analytics/error-types", "/api/dlq/analytics/retry-cost", "/api/dlq/analytics/replays",
		"/api/circuit-breakers", "/api/queues", "/api/dlq/replays?limit=100",
	} {
		add(hostileRequest{
			name: "query", method: "GET", path: query, header: bearer(limited),
			hidden: b.hidden(payScope), statuses: []int{200, 400, 404, 422},
		})
	}
	for _, filter := range []string{
		`{}`, `{"ids": ["` + entry + `"]}`, `{"queue": ["mailqueue"]}`, `{"queue": "mailqueue"}`,
		`{"queue": ["*"]}`, `{"kind": ["*"]}`, `{"payload": {"secret": "payload of mailqueueorder.paid"}}`,
		`{"scope": null}`, `{"scope": [], "all": true}`,
		`{"queue": ["mailqueue' OR true --"]}`, `{"fingerprint": ["x"]}`,
		`{"errorType": ["'); SELECT set_config('dlq.scope', '', false); --"]}`,
		`{"status": ["dlq_manual", "dlq_archived"]}`, `{"after": "1970-01-01T00:00:00Z"}`,
	} {
		for _, request := range [][2]string{
			{"/api/dlq/export", `{"filter": %s}`},
			{"/api/dlq/export", `{"filter": %s, "format": "csv"}`},
			{"/api/dlq/bulk", `{"do": "discard", "filter": %s, "all": true, "dryRun": true}`},
			{"/api/dlq/bulk", `{"do": "purge", "filter": %s, "all": true, "dryRun": true}`},
			{"/api/dlq/replay", `{"filter": %s, "all": true, "dryRun": true}`},
			{"/api/dlq/replay", `{"filter": %s, "all": true, "dryRun": true, "queue": "pay_eu"}`},
			{"/api/dlq/erasures", `{"filter": %s, "note": "n", "dryRun": true}`},
			{"/api/dlq/reclassify", `{"filter": %s, "dryRun": true}`},
		} {
			add(hostileRequest{name: "filter", method: "POST", path: request[0], body: strings.ReplaceAll(request[1], "%s",
				filter), header: bearer(limited), hidden: b.hidden(payScope), statuses: []int{200, 400, 403, 422}})
		}
	}

	// Headers that claim another caller or host, in addition to the headers that dlqd reads.
	spoofs := []http.Header{
		{"Authorization": {"Bearer " + limited, "Bearer " + everything}},
		{"Authorization": {"Bearer " + everything, "Bearer " + limited}},
		{"Authorization": {"Bearer " + limited, ""}},
		{"Authorization": {"Bearer " + everything + ", Bearer " + limited}},
		{"Authorization": {"Bearer " + everything + "\tx"}},
		{"Authorization": {"Basic " + base64.StdEncoding.EncodeToString([]byte("admin:"+everything))}},
		{"Authorization": {everything}},
		{"Authorization": {"Bearer"}},
		{"Authorization": {"Token " + everything}},
		{"Cookie": {"token=" + everything + "; Authorization=Bearer " + everything}},
		{"X-Api-Key": {everything}},
		{"Proxy-Authorization": {"Bearer " + everything}},
		{"X-Authorization": {"Bearer " + everything}},
		{"X-Forwarded-For": {"127.0.0.1"}},
		{"X-Forwarded-User": {"kim"}},
		{"X-Remote-User": {"kim"}, "X-Remote-Groups": {"admin"}},
		{"Remote-User": {"root"}},
		{"X-Auth-Request-User": {"kim"}},
		{"X-Real-Ip": {"::1"}},
		{"Forwarded": {`for=127.0.0.1;host=localhost`}},
		{"X-Ssl-Client-Cert": {"CN=kim"}},
	}
	for _, spoof := range spoofs {
		for _, path := range []string{"/api/dlq/entries", "/api/whoami", "/metrics", "/api/health"} {
			add(hostileRequest{
				name: fmt.Sprint("spoof ", spoof), method: "GET", path: path, header: spoof,
				hidden: append(b.hidden(noScope), "token-"), statuses: []int{401, 429},
			})
		}
	}
	for _, header := range []http.Header{
		{"X-Original-Url": {"/api/dlq/erasures"}},
		{"X-Rewrite-Url": {"/api/health"}},
		{"X-Http-Method-Override": {"DELETE"}},
		{"X-Forwarded-Host": {"evil.example"}},
		{"X-Forwarded-Prefix": {"//evil.example"}},
		{"X-Forwarded-Proto": {"javascript"}},
		{"Accept": {"text/html"}},
		{"Accept": {"application/cbor"}},
		{"Range": {"bytes=0-10"}},
		{"If-None-Match": {"*"}},
		{"Traceparent": {"00-" + strings.Repeat("f", 300)}},
	} {
		maps.Copy(header, bearer(limited))
		for _, path := range []string{"/api/dlq/entries", "/api/dlq/entries/" + entry, "/api/queues", "/api/dlq/audit"} {
			add(hostileRequest{
				name: fmt.Sprint(header), method: "GET", path: path, header: header,
				hidden: append(b.hidden(payScope), "evil.example"), statuses: []int{200, 404, 406},
			})
		}
	}
	for _, host := range []string{
		"evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "169.254.169.254",
		"localhost@evil.example", "evil.example:80", "[::ffff:8.8.8.8]", "0.0.0.0",
	} {
		for _, path := range []string{"/api/dlq/entries", "/livez", "/metrics", "/docs", "/openapi.json"} {
			header := bearer(everything)
			header["Host"] = []string{host}
			add(hostileRequest{
				name: "host " + host, method: "GET", path: path, header: header,
				hidden: b.hidden(noScope), statuses: []int{400, 421},
			})
		}
	}
	for _, origin := range []string{"https://evil.example", "null", "http://localhost:1"} {
		for _, path := range []string{
			"/api/dlq/export", "/api/dlq/replay", "/api/messages", "/bulk", "/queues/act",
		} {
			header := bearer(everything)
			header["Origin"], header["Sec-Fetch-Site"] = []string{origin}, []string{"cross-site"}
			add(hostileRequest{
				name: "origin " + origin, method: "POST", path: path, header: header,
				body: `{"filter": {}}`, hidden: b.hidden(noScope), statuses: []int{403},
			})
		}
	}

	// Methods and other spellings of paths.
	for _, method := range []string{
		"HEAD", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND",
		"get", "GETT", "DEBUG",
	} {
		for _, path := range []string{
			"/api/dlq/entries", "/api/dlq/entries/" + entry,
			"/api/dlq/entries/" + entry + "/discard", "/api/dlq/replays/" + run, "/api/dlq/erasures",
			"/api/queues/mailqueue/pause", "/metrics", "/api/health", "/", "/openapi.json",
		} {
			add(hostileRequest{
				name: "method", method: method, path: path, header: bearer(limited),
				hidden: b.hidden(payScope), statuses: []int{200, 403, 404, 405},
			})
		}
	}
	for _, path := range []string{
		"//api/dlq/entries", "/api//dlq/entries", "/api/dlq//entries/" + entry, "/livez/../api/dlq/entries",
		"/livez/..%2fapi/dlq/entries", "/livez;/api/dlq/entries", "/livez/..;/api/dlq/entries",
		"/./api/dlq/entries", "/api/./dlq/entries", "/api/login/../dlq/entries",
		"/api/login%2f..%2fdlq%2fentries", "/api%2fdlq%2fentries", "/api/dlq%2fentries",
		"/api/dlq/entries%2f" + entry, "/api/dlq/entries/%2e%2e/entries", "/api/dlq/entries/" + entry + "%00",
		"/api/dlq/entries/" + entry + ";x=y", "/api/dlq/entries/" + entry + "/", "/API/DLQ/ENTRIES",
		"/api/dlq/entries.json", "/api/dlq/entries/", "/api/dlq/entries/..", "/metrics/", "//metrics", "/metrics/..",
		"/livez/../metrics", "/%6detrics", "/metrics%00", "/metrics;", "/docs/../metrics", "/docs/../../etc/passwd",
		"/docs%2f..%2f..%2fetc%2fpasswd", "/openapi.json/../api/queues", "/.git/config", "/debug/pprof/",
		"/debug/pprof/heap", "/debug/vars", "/%", "/%zz", "/api/queues/..%2fpay_eu", "/api/queues/mailqueue%2fpause",
		"/api/dlq/replays/" + run + "/events%2f", "/\\..\\api", "/api/dlq/entries?%00", "/api/dlq/entries%3flimit=1",
		"/livez%20", "/readyz%0d%0aX-Evil:%201", "//evil.example/api/queues",
		"/\\evil.example", "/api/whoami#", "/api/login/",
	} {
		for _, header := range []http.Header{{}, bearer(limited)} {
			h := hostileRequest{
				name: "path", method: "GET", path: path, header: header, hidden: append(b.hidden(payScope), "root:"),
				statuses: []int{301, 307, 308, 400, 403, 404, 405, 422},
			}
			if len(header) == 0 {
				h.hidden, h.statuses = append(b.hidden(noScope), "root:"), []int{301, 307, 308, 400, 401, 403, 404, 405, 422, 429}
			} else if strings.HasPrefix(path, "/api/dlq/entries?") || path == "/api/whoami#" {
				h.statuses = append(h.statuses, 200)
			}
			add(h)
		}
	}

	// Requests that are too large.
	large := strings.Repeat("x", 200_000)
	add(hostileRequest{
		name: "large token", method: "GET", path: "/api/queues",
		header: bearer("dlqd_" + large[:60_000]), statuses: []int{401, 429},
	})
	for _, o := range operations {
		if o.method == "POST" && !strings.Contains(o.path, "{id}") {
			add(hostileRequest{
				name: "large body without a token", method: o.method, path: o.path,
				body: `{"x": "` + large + `"}`, statuses: []int{401, 429},
			})
			add(hostileRequest{
				name: "large body", method: o.method, path: o.path, body: `{"x": "` + large + `"}`,
				header: bearer(limited), hidden: b.hidden(payScope), statuses: []int{400, 403, 413, 422},
			})
		}
	}

	// Invalid credentials.
	revoked, expired, rotated := token(access.Admin, 0), token(access.Admin, 0), token(access.Admin, 0)
	id := func(secret string) (id string) {
		require.NoError(t, b.pool.QueryRow(t.Context(), `SELECT id::text FROM dlq.tokens
			WHERE hash = sha256($1::text::bytea)`, secret).Scan(&id))
		return id
	}
	require.NoError(t, b.tokens.Revoke(t.Context(), id(revoked), "kim", ""))
	_, err := b.pool.Exec(t.Context(), "UPDATE dlq.tokens SET expires_at = now() - interval '1 second' WHERE id = $1",
		id(expired))
	require.NoError(t, err)
	_, next, err := b.tokens.Rotate(t.Context(), id(rotated), "kim", 0, nil)
	require.NoError(t, err)
	changed := time.Now()
	secrets = append(secrets, next)
	flipped := []byte(everything)
	flipped[10] ^= 1
	var bad []hostileRequest
	for i, secret := range []string{
		revoked, expired, rotated, everything[:40], everything + "a", string(flipped),
		strings.ToLower(everything), strings.ToUpper(everything), "dlqd_", "null", "undefined", "", "*", "' OR 1=1 --",
		id(everything), "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9.", everything + everything,
	} {
		for j, o := range doors() {
			if o.targetType == "open" || o.id == "get-login" || i > 2 && i%3 != j%3 {
				continue
			}
			path := strings.NewReplacer("/circuit-breakers/queue:{id}", "/circuit-breakers/queue:mailqueue", "/queues/{id}",
				"/queues/mailqueue", "/replays/{id}", "/replays/"+run, "{id}", entry).Replace(o.path)
			bad = append(bad, hostileRequest{
				name: "token " + secret, method: o.method, path: path, body: o.body,
				header: bearer(secret), hidden: b.hidden(noScope), statuses: []int{401, 429}, page: o.page,
			})
		}
	}

	const moves = `SELECT count(*) FROM dlq.dead_letter_transitions WHERE from_status <> to_status OR queue = 'mailqueue'
		AND actor <> 'kim' AND kind = 'user.mail'`
	before := b.count(moves)
	var mu sync.Mutex
	var wrong []string
	sendAll := func(set []hostileRequest) {
		var group errgroup.Group
		group.SetLimit(8)
		for i := range set {
			set[i].hidden = append(slices.Clone(set[i].hidden), secrets...)
			group.Go(func() error {
				problem := set[i].send(t.Context(), b.base)
				for tries := 1; tries < 100 && (strings.Contains(problem, busy) || strings.Contains(problem, late)); tries++ {
					problem = set[i].send(t.Context(), b.base)
				}
				if problem != "" {
					mu.Lock()
					defer mu.Unlock()
					wrong = append(wrong, fmt.Sprintf("%s: %s %s %s\n\t%s", set[i].name, set[i].method, set[i].path,
						set[i].body[:min(len(set[i].body), 200)], problem[:min(len(problem), 600)]))
				}
				return nil
			})
		}
		require.NoError(t, group.Wait())
	}
	// A token is revoked while requests use the token. After five seconds, no request with the token succeeds, on any
	// connection.
	used, stop := token(access.Reader, 0), make(chan struct{})
	var last atomic.Int64
	var users errgroup.Group
	for range 8 {
		users.Go(func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				began := time.Now()
				request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, b.base+"/api/dlq/entries?limit=1", nil)
				if err != nil {
					return err
				}
				request.Header.Set("Authorization", "Bearer "+used)
				response, err := hostileTransport.RoundTrip(request)
				if err != nil {
					return err
				}
				_, err = io.Copy(io.Discard, response.Body)
				if err := errors.Join(err, response.Body.Close()); err != nil {
					return err
				}
				if response.StatusCode == http.StatusOK {
					for was := last.Load(); began.UnixNano() > was && !last.CompareAndSwap(was, began.UnixNano()); was = last.Load() {
					}
				}
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	require.Eventually(t, func() bool { return last.Load() != 0 }, 5*time.Minute, time.Millisecond)
	require.NoError(t, b.tokens.Revoke(t.Context(), id(used), "kim", ""))
	revokedAt := time.Now()
	sendAll(set)
	time.Sleep(time.Until(changed.Add(5 * time.Second)))
	sendAll(bad)
	time.Sleep(time.Until(revokedAt.Add(6 * time.Second)))
	close(stop)
	require.NoError(t, users.Wait())
	require.Less(t, time.Unix(0, last.Load()).Sub(revokedAt), 5*time.Second, "a revoked token must stop working")

	t.Log(len(set)+len(bad), "requests")
	require.Greater(t, len(set)+len(bad), 1000)
	require.Empty(t, wrong, "%d of %d:\n%s", len(wrong), len(set)+len(bad),
		strings.Join(wrong[:min(len(wrong), 20)], "\n"))
	require.Equal(t, before, b.count(moves), "no entry moved, and no entry outside all scopes got a note")
	for _, secret := range secrets {
		require.NotContains(t, log.String(), secret)
	}
	require.NotContains(t, log.String(), "payload of ")
	for line := range strings.Lines(log.String()) { // on a busy machine a statement may reach its limit of time
		require.False(t, strings.Contains(line, "level=ERROR") && !strings.Contains(line, "SQLSTATE 57014"), line)
	}
}
