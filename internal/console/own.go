package console

import (
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// requestsInterval is the interval at which a process with open pages checks, once for all pages, whether requests
	// for approval have changed. A viewer sees a change after at most this interval and one beat of the page's stream,
	// less than five seconds in all.
	requestsInterval = 2 * time.Second
	// requestsTimeout limits the time of a check for changes, and of reading the requests after a change.
	requestsTimeout = time.Second
	// requestsMaxAge is the age from which requests are read again even if no change was found.
	requestsMaxAge = time.Minute
	// outcomePeriod is how long after a request has ended pages show its outcome to a requester who has not seen it.
	outcomePeriod = 7 * 24 * time.Hour
)

// own has the parts of a page that only its viewer sees. All other parts are the same for viewers with the same
// permissions.
type own struct {
	Waiting int            // number of requests for approval that the viewer may approve
	Ended   []approvalView // ended requests of the viewer whose outcome the viewer has not seen
}

// Count formats Waiting for the navigation and the title; "" for 0.
func (o own) Count() string {
	if o.Waiting == 0 {
		return ""
	}
	return number(o.Waiting)
}

// requestCache caches requests for approval for all pages of a process. After a change, it reads the requests once for
// all viewers with the same permissions.
type requestCache struct {
	reading singleflight.Group

	mu      sync.Mutex
	version string // see Config.Requests
	checked time.Time
	lists   map[string]requestList // by permissions
}

type requestList struct {
	version  string
	at       time.Time
	requests []*approval.Approval
}

// invalidate makes the next page check for changes.
func (c *requestCache) invalidate() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.checked = time.Time{}
}

// own returns the parts of a page that only its viewer sees. The page is the one at the request's address or, for an
// event stream, the page that the stream is for.
func (c *requestCache) own(in *request) (o own) {
	me := in.me()
	if in.console.Requests == nil || me.Via == access.ViaNothing || !me.May(access.Operator) {
		return o
	}
	page := in.URL.Path
	if page == "/events" {
		page, _, _ = strings.Cut(in.URL.Query().Get("page"), "?")
	}
	seen := seenOutcomes(in.Request)
	for _, a := range c.list(in) {
		switch {
		case mayApprove(me, a):
			o.Waiting++
		case page == "/approvals" || page == "/approvals/"+a.ID.String(): // the page itself shows the outcome
		case isOutcomeFor(me, a) && !slices.Contains(seen, outcomeKey(a)):
			o.Ended = append(o.Ended, approvalView{a})
		}
	}
	return o
}

// list returns the waiting requests and the latest other ones that the viewer may see. If they cannot be read, list
// returns the result of the last successful read.
func (c *requestCache) list(in *request) []*approval.Approval {
	version, key := c.check(in), permissionsKey(in.me())
	c.mu.Lock()
	known, ok := c.lists[key]
	c.mu.Unlock()
	if ok && known.version == version && time.Since(known.at) < requestsMaxAge {
		return known.requests
	}
	found, err, _ := c.reading.Do("list "+version+" "+key, func() (any, error) {
		ctx, cancel := c.sharedContext(in)
		defer cancel()
		in := &request{Request: in.WithContext(ctx), console: in.console}
		list := requestList{version: version, at: time.Now()}
		waiting, _, err := callIfAllowed(in, api.ListApprovals, api.ApprovalsInput{
			State: approval.Requested, Limit: 500,
		})
		if err != nil {
			return nil, err
		}
		latest, _, err := callIfAllowed(in, api.ListApprovals, api.ApprovalsInput{})
		if err != nil {
			return nil, err
		}
		list.requests = slices.Concat(waiting.Approvals, slices.DeleteFunc(latest.Approvals,
			func(a *approval.Approval) bool { return a.State == approval.Requested }))
		c.mu.Lock()
		defer c.mu.Unlock()
		maps.DeleteFunc(c.lists, func(_ string, l requestList) bool { return time.Since(l.at) > requestsMaxAge })
		if c.lists == nil {
			c.lists = map[string]requestList{}
		}
		c.lists[key] = list
		return list.requests, nil
	})
	if err != nil {
		return known.requests
	}
	requests, _ := found.([]*approval.Approval)
	return requests
}

// check returns the version of the requests, at most requestsInterval old. If the version cannot be read, check returns
// the last known one.
func (c *requestCache) check(in *request) string {
	c.mu.Lock()
	version, isFresh := c.version, time.Since(c.checked) < requestsInterval
	c.mu.Unlock()
	if isFresh {
		return version
	}
	found, _, _ := c.reading.Do("version", func() (any, error) {
		ctx, cancel := c.sharedContext(in)
		defer cancel()
		began := time.Now()
		now, err := in.console.Requests(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.checked = began
		if err == nil {
			c.version = now
		}
		return c.version, nil
	})
	version, _ = found.(string)
	return version
}

// sharedContext returns a context for statements whose result other pages share. The end of this request does not
// cancel these statements, and they do not count as statements of the request.
func (c *requestCache) sharedContext(in *request) (context.Context, context.CancelFunc) {
	ctx, _ := postgres.Counting(context.WithoutCancel(in.Context()))
	return context.WithTimeout(ctx, requestsTimeout)
}

// mayApprove reports whether the viewer may approve a request that the API has listed. It need not check the viewer's
// scope, because the API lists only requests in the scope. dlq.approve makes the decision; pages only predict it.
func mayApprove(me *access.Principal, a *approval.Approval) bool {
	if a.State != approval.Requested || !time.Now().Before(a.ExpiresAt) || a.RequestedBy(me.Name, me.TokenBy) {
		return false
	}
	var request struct {
		ToDestination *string `json:"toDestination"`
	}
	_ = json.Unmarshal(a.Request, &request)
	admin, everywhere := a.Needs()
	switch {
	case everywhere:
		return me.MayEverywhere(access.Admin)
	case request.ToDestination != nil: // a destination does not belong to a queue
		return me.MayEverywhere(access.Operator)
	case admin:
		of := map[string]int64{}
		_ = json.Unmarshal(a.ByQueue, &of)
		for queue := range of {
			if !me.MayIn(access.Admin, queue) {
				return false
			}
		}
		return me.May(access.Admin)
	}
	return true
}

// isOutcomeFor reports whether pages show the viewer the outcome of a request: it ended within outcomePeriod, the
// viewer made it or it was made on the viewer's behalf, and the viewer did not decide it.
func isOutcomeFor(me *access.Principal, a *approval.Approval) bool {
	isMine := strings.EqualFold(a.Actor, me.Name) || a.OnBehalfOf != nil && strings.EqualFold(*a.OnBehalfOf, me.Name)
	return isMine && a.EndedAt != nil && time.Since(*a.EndedAt) < outcomePeriod &&
		(a.DecidedBy == nil || !strings.EqualFold(*a.DecidedBy, me.Name))
}

// seenCookie has the keys of the outcomes that the user has seen in this browser.
const seenCookie = "dlqd-seen"

// maxSeen limits the number of keys in the cookie. Older ones are dropped.
const maxSeen = 60

// outcomeKey returns the last digits of a request's id, which are random and identify the request in the cookie.
func outcomeKey(a *approval.Approval) string { return a.ID.String()[24:] }

func seenOutcomes(r *http.Request) []string {
	cookie, err := r.Cookie(seenCookie)
	if err != nil || cookie.Value == "" {
		return nil
	}
	return strings.Split(cookie.Value, ".")
}

// markSeen adds outcomes to the cookie, which has the latest maxSeen.
func markSeen(w http.ResponseWriter, r *http.Request, keys []string) {
	seen := seenOutcomes(r)
	all := slices.Clone(seen)
	for _, key := range keys {
		if !slices.Contains(all, key) {
			all = append(all, key)
		}
	}
	if len(all) == len(seen) {
		return
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // secure where the connection is
		Name: seenCookie, Value: strings.Join(all[max(0, len(all)-maxSeen):], "."), Path: "/",
		MaxAge: int(outcomePeriod.Seconds()), HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode,
	})
}

// outcomesFor returns the keys of outcomes that the page shows and that are meant for the viewer.
func outcomesFor(me *access.Principal, requests ...*approval.Approval) (keys []string) {
	for _, a := range requests {
		if isOutcomeFor(me, a) {
			keys = append(keys, outcomeKey(a))
		}
	}
	return keys
}

// ownSections returns the live sections that only this viewer's page has, or "".
func (c *Console) ownSections(r *http.Request) string {
	if c.Requests == nil {
		return ""
	}
	var html bytes.Buffer
	if err := c.templates.own(&html, c.requests.own(c.request(r))); err != nil {
		c.Logger.Error("console: rendering the viewer's sections failed", "error", err)
		return ""
	}
	return html.String()
}
