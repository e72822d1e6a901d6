package server_test

import (
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// consoleRequests has, for each operation, the console's requests that carry it out: pages (GET) and forms (POST, with
// the fields as a query). A request needs the same role and scope as its operation, and has the same {id}.
var consoleRequests = map[string][]string{
	"whoami":                 {"GET /", "GET /access", "GET /replays/new", "POST /zone?zone=UTC"},
	"list-entries":           {"GET /dead-letters", "GET /review", "GET /search?q=order"},
	"get-entry":              {"GET /dead-letters/{id}"},
	"reveal-entry":           {"POST /dead-letters/{id}/reveal?note=n"},
	"get-revealed-entry":     {"GET /dead-letters/{id}/reveal"},
	"replay-entry":           {"POST /dead-letters/{id}/act?do=replay", "POST /dead-letters/{id}/edit?payload=1"},
	"discard-entry":          {"POST /dead-letters/{id}/act?do=discard"},
	"expire-entry":           {"POST /dead-letters/{id}/act?do=expire"},
	"resolve-entry":          {"POST /dead-letters/{id}/act?do=resolve"},
	"park-entry":             {"POST /dead-letters/{id}/act?do=park"},
	"unpark-entry":           {"POST /dead-letters/{id}/act?do=unpark"},
	"reopen-entry":           {"POST /dead-letters/{id}/act?do=reopen"},
	"get-stats":              {"GET /system"},
	"get-operation":          {"GET /operations/{id}"},
	"undo":                   {"POST /undo/{id}"},
	"list-groups":            {"GET /groups"},
	"get-group":              {"GET /groups/{id}/same"},
	"set-group":              {"POST /groups/{id}/same?do=open", "POST /groups?do=open&group={id}/same"},
	"save-view":              {"POST /views?name=of+the+walk&q=status:manual"},
	"order-views":            {"POST /views/of%20the%20walk/move?to=up"},
	"delete-view":            {"POST /views/none/delete"},
	"list-replays":           {"GET /replays"},
	"get-replay-calibration": {"GET /replays/calibration"},
	"get-replay":             {"GET /replays/{id}"},
	"get-replay-report":      {"GET /replays/{id}"},
	"start-replay":           {"GET /bulk?do=replay&all=1", "GET /replays/new?q=status:manual"},
	"pause-replay":           {"POST /replays/{id}/steer?do=pause"},
	"resume-replay":          {"POST /replays/{id}/steer?do=resume"},
	"go-on-replay":           {"POST /replays/{id}/steer?do=go-on"},
	"back-replay":            {"POST /replays/{id}/steer?do=back"},
	"end-replay":             {"POST /replays/{id}/steer?do=end"},
	"set-replay-rate":        {"POST /replays/{id}/steer?do=rate&rate=0.002"},
	"cancel-replay":          {"POST /replays/{id}/steer?do=cancel"},
	"list-approvals":         {"GET /approvals"},
	"get-approval":           {"GET /approvals/{id}"},
	"approve":                {"POST /approvals/{id}/decide?do=approve&expect=9"},
	"refuse":                 {"POST /approvals/{id}/decide?do=refuse"},
	"withdraw":               {"POST /approvals/{id}/decide?do=withdraw"},
	"search-audit":           {"GET /audit"},
	"list-queues":            {"GET /queues"},
	"pause-queue":            {"POST /queues/act?do=pause&name={id}"},
	"list-sources":           {"GET /sources"},
	"pause-source":           {"POST /sources/act?do=pause&name={id}"},
	"resume-source":          {"POST /sources/act?do=resume&name={id}"},
	"pause-feed":             {"POST /sources/feed?do=pause&name=none"},
	"resume-feed":            {"POST /sources/feed?do=resume&name=none"},
	"export": {
		"GET /dead-letters/export", "POST /dead-letters/export?format=csv", "POST /dead-letters/export?format=ndjson",
	},
	"list-jobs":             {"GET /jobs"},
	"get-job":               {"GET /jobs/{id}"},
	"cancel-job":            {"POST /jobs/{id}/act?do=cancel"},
	"retry-job":             {"POST /jobs/{id}/act?do=retry"},
	"get-message":           {"GET /messages/none"},
	"resume-queue":          {"POST /queues/act?do=resume&name={id}"},
	"stop-automatic":        {"POST /system/automatic?do=stop"},
	"resume-automatic":      {"POST /system/automatic?do=resume"},
	"resume-restored":       {"POST /system/restored"},
	"end-session":           {"POST /access/sessions?id=0198a0b0-0000-7000-8000-000000000000"},
	"end-sessions":          {"POST /access/sessions"},
	"create-token":          {"POST /access/tokens?name=walker&role=sender"},
	"revoke-token":          {"POST /access/tokens?revoke=0198a0b0-0000-7000-8000-000000000000"},
	"get-policy":            {"GET /policy"},
	"test-policy":           {"GET /policy?status=503"},
	"preview-policy":        {"POST /policy?file=dlq-routing&text="},
	"examine":               {"POST /system/checks"},
	"livez":                 {"GET /docs"},
	"open-circuit-breaker":  {"POST /queues/act?do=open&name=queue:{id}"},
	"reset-circuit-breaker": {"POST /queues/act?do=reset&name=queue:{id}"},
	"bulk": {
		"GET /bulk?do=park&all=1", "POST /bulk?do=note&all=1&note=n",
		"POST /dead-letters/0198a0b0-0000-7000-8000-000000000000/assign?assignee=kim",
	},
}

// doorRequest is a request that carries out an operation, through the API or through the console.
type doorRequest struct {
	operation

	page bool // a page or a form of the console
}

// doors returns every request that carries out an operation, both the API's requests and the console's.
func doors() []doorRequest {
	var all []doorRequest
	for _, o := range operations {
		all = append(all, doorRequest{o, false})
		for _, text := range consoleRequests[o.id] {
			request := doorRequest{o, true}
			request.method, request.path, _ = strings.Cut(text, " ")
			request.body = ""
			if request.method == http.MethodPost {
				request.path, request.body, _ = strings.Cut(request.path, "?")
			}
			all = append(all, request)
		}
	}
	return all
}

// through sends a request with target as its {id}. It returns the status and the text that the caller sees: the answer
// of the API or the page, and for a form the message and the redirect.
func (b *scopeBundle) through(token string, r *doorRequest, target string) (int, string) {
	b.Helper()
	path := strings.ReplaceAll(r.path, "{id}", target)
	switch {
	case !r.page:
		return b.as(token, r.method, path, r.body)
	case r.method == http.MethodGet:
		return b.browse(token, path)
	}
	form, err := url.ParseQuery(strings.ReplaceAll(r.body, "{id}", url.QueryEscape(target)))
	require.NoError(b, err)
	status, told, to := b.send(token, path, form)
	return status, told + to
}

// consoleRequests has every page and every form of the console.
func TestDoors_ListEveryPageAndForm(t *testing.T) {
	t.Parallel()
	source, err := os.ReadFile("../console/console.go")
	require.NoError(t, err)
	routes := regexp.MustCompile(`c\.(page|action)\("([^"]+)"`).FindAllStringSubmatch(string(source), -1)
	require.NotEmpty(t, routes)
	for id := range consoleRequests {
		known := false
		for _, o := range operations {
			known = known || o.id == id
		}
		require.True(t, known, "no such operation: %s", id)
	}
	for _, route := range routes {
		method := map[string]string{"page": http.MethodGet, "action": http.MethodPost}[route[1]]
		pattern := strings.TrimSuffix(route[2], "{$}")
		matches := regexp.MustCompile("^" + regexp.MustCompile(`\{[a-z]+\}`).ReplaceAllString(pattern, "[^/]+") + "$")
		found := false
		for _, r := range doors() {
			path, _, _ := strings.Cut(r.path, "?")
			found = found || r.page && r.method == method && matches.MatchString(path)
		}
		require.True(t, found, "no request of consoleRequests is for %s %s", method, route[2])
	}
}
