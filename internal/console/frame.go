package console

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"maps"
	"math"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
)

// section is an item of the navigation.
type section struct {
	Name, Path, Icon, Key string
	Role                  access.Role // required role; "" if none is required
	Current               bool
}

// sections returns the items of the navigation. The keys g and then Key open a section.
func sections() []section {
	return []section{
		{Name: "Overview", Path: "/", Icon: "overview", Key: "o"},
		{Name: "Dead letters", Path: "/dead-letters", Icon: "letters", Key: "d", Role: access.Reader},
		{Name: "Groups", Path: "/groups", Icon: "groups", Key: "g", Role: access.Reader},
		{Name: "Review", Path: "/review", Icon: "review", Key: "r", Role: access.Reader},
		{Name: "Replays", Path: "/replays", Icon: "replays", Key: "p", Role: access.Reader},
		{Name: "Queues", Path: "/queues", Icon: "queues", Key: "q", Role: access.Reader},
		{Name: "Sources", Path: "/sources", Icon: "sources", Key: "t", Role: access.Reader},
		{Name: "Policy", Path: "/policy", Icon: "policy", Key: "y", Role: access.Reader},
		{Name: "Approvals", Path: "/approvals", Icon: "approvals", Key: "v", Role: access.Operator},
		{Name: "Audit", Path: "/audit", Icon: "audit", Key: "a", Role: access.Reader},
		{Name: "Access", Path: "/access", Icon: "access", Key: "c"},
		{Name: "System", Path: "/system", Icon: "system", Key: "s", Role: access.Metrics},
		{Name: "API", Path: "/docs", Icon: "api", Key: "i"},
	}
}

// frame is the data of the layout around each page.
type frame struct {
	view
	sidebar

	Own      own    // sections for this viewer only
	Path     string // the page's address, with the query
	Page     string // Path or, for the answer to a form, the address of the page that has the form
	Sections []section
	Who      *access.Principal
	Role     access.Role
	// Environment is the policy's environment. Production is highlighted.
	Environment string
	Style       string         // address of the style sheet of the environment's colour; "" if it has no colour
	Zone        *time.Location // time zone of the times on the page
	Theme       string         // light, dark, or "" for the system's preference
	Flash       flash
	Assets      map[string]string
	Bare        bool // no navigation: the visitor is not signed in

	mu   sync.Mutex
	asOf time.Time // see AsOf
}

// AsOf returns the time of the oldest data on the page that came from the read replica. It is zero if no data did.
func (f *frame) AsOf() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asOf
}

// noteAsOf records the time of the data in an answer of the API.
func (f *frame) noteAsOf(header http.Header) {
	at, err := time.Parse(time.RFC3339Nano, header.Get(api.AsOfHeader))
	if err != nil || f == nil { // the primary answered, or the answer is for the sidebar
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.asOf.IsZero() || at.Before(f.asOf) {
		f.asOf = at
	}
}

// warning is a current problem, with the path of a page about it.
type warning struct{ Text, To string }

func newFrame(in *request) *frame {
	f := &frame{
		Path: in.URL.RequestURI(), Who: in.me(), Assets: assets, Environment: in.console.Environment,
		Zone: in.zone(),
	}
	f.Role = f.Who.RoleName()
	if in.console.Policy != nil {
		f.Style = environmentStyle(in.console.Policy().Monitoring.Console.Color)
	}
	if cookie, err := in.Cookie("dlqd-theme"); err == nil && (cookie.Value == "light" || cookie.Value == "dark") {
		f.Theme = cookie.Value
	}
	return f
}

// complete fills in the page, the navigation and the sidebar.
func (f *frame) complete(in *request) {
	f.Page = f.Path
	if in.Method == http.MethodPost {
		f.Page = in.console.pageOf(in.Request)
	}
	if f.Bare {
		return
	}
	for _, s := range sections() {
		// A visitor who is not signed in also sees the sections, unless Bare is set: their pages lead to the sign-in.
		if visitor := f.Who.Via == "" && s.Role != access.Operator; s.Role != "" && !f.Who.May(s.Role) && !visitor {
			continue
		}
		path := in.URL.Path
		s.Current = path == s.Path || s.Path != "/" && strings.HasPrefix(path, s.Path+"/") || f.Section == s.Path
		f.Sections = append(f.Sections, s)
	}
	f.loadSidebar(in)
	f.Own = in.console.requests.own(in)
}

func (f *frame) loadSidebar(in *request) {
	if f.hasSidebar() {
		f.sidebar = in.console.sidebar.get(in)
	}
}

// hasSidebar reports whether the page shows the state of the whole system.
func (f *frame) hasSidebar() bool { return !f.Bare && f.Who.May(access.Reader) }

// sidebar is the state of the whole system that every page shows. It has only what the viewer may see.
type sidebar struct {
	at        time.Time
	Observing bool            // all automatic redelivery is off
	Stopped   *automatic.Stop // not nil while all automatic redelivery is stopped
	Warnings  []warning       // shown in a line on every page
	// Counts maps the icon of a section to the number of items that wait there; "" for none.
	Counts map[string]string
	// ByStatus is the number of open dead letters by status; nil if it is not known.
	ByStatus map[string]int64
}

// sidebarCache caches sidebars, shared by viewers with the same permissions.
type sidebarCache struct {
	reading singleflight.Group

	mu            sync.Mutex
	cached        map[string]sidebar
	invalidBefore time.Time // sidebars read before may miss the latest action, and are not used
}

const (
	// A page load refreshes a sidebar that is older than sidebarMaxAge. If the refresh has not ended sidebarWait after
	// the request began, the page shows the cached sidebar, unless that is older than sidebarRetention. Live renderings
	// use a cached sidebar without a refresh.
	sidebarMaxAge    = 5 * time.Second
	sidebarRetention = 30 * time.Second
	sidebarWait      = 25 * time.Millisecond
	// countsDelay is the time after an action until all counts include it. With many entries, counts
	// come from rollups.
	countsDelay = 2 * time.Second
	// sidebarTimeout limits the time for each part of the sidebar.
	sidebarTimeout = 3 * time.Second
)

// get returns the sidebar for a viewer: the cached one, if reading it again takes longer than sidebarWait after the
// request began. If none is cached, get waits.
func (a *sidebarCache) get(in *request) sidebar {
	known, ok, reading := a.refresh(in)
	if reading == nil {
		return known
	}
	wait := time.Duration(math.MaxInt64)
	if ok {
		wait = sidebarWait - time.Since(in.now)
	}
	select {
	case found := <-reading:
		s, _ := found.Val.(sidebar)
		return s
	case <-time.After(wait):
		return known
	}
}

// refresh returns the cached sidebar for a viewer. ok is false if there is none, or if it may miss the latest action.
// If the sidebar is missing or old, refresh starts to read it and returns a channel that receives the new one;
// otherwise the channel is nil.
func (a *sidebarCache) refresh(in *request) (known sidebar, ok bool, reading <-chan singleflight.Result) {
	key := permissionsKey(in.me())
	a.mu.Lock()
	maps.DeleteFunc(a.cached, func(_ string, s sidebar) bool { return time.Since(s.at) > sidebarRetention })
	known, ok = a.cached[key]
	invalidBefore := a.invalidBefore
	a.mu.Unlock()
	ok = ok && known.at.After(invalidBefore)
	if _, live := isLive(in.Context()); ok && (live || time.Since(known.at) <= sidebarMaxAge) {
		return known, ok, nil
	}
	// The key includes invalidBefore, so that this request does not join a reading that began before the
	// latest action.
	return known, ok, a.reading.DoChan(key+invalidBefore.String(), func() (any, error) {
		defer func() {
			if p := recover(); p != nil {
				in.console.Logger.Error("console: reading the navigation and the warnings failed", "path", in.URL.Path, "error",
					background.Panicked(p))
			}
		}()
		// Several requests share the result: reading must not end with this request, and its statements
		// are not counted as statements of this request.
		ctx, _ := postgres.Counting(context.WithoutCancel(in.Context()))
		at := time.Now()
		s := *readSidebar(&request{Request: in.WithContext(ctx), console: in.console}, &known)
		s.at = at
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.cached == nil {
			a.cached = map[string]sidebar{}
		}
		a.cached[key] = s
		return s, nil
	})
}

// invalidate stops the use of cached sidebars after an action.
func (a *sidebarCache) invalidate() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.invalidBefore = time.Now().Add(countsDelay)
}

// readSidebar reads the sidebar, with a timeout for each part. If a part fails, it keeps its previous value: a page
// that explains a problem must not fail because of the same problem.
func readSidebar(in *request, before *sidebar) *sidebar {
	var s sidebar
	var review, replays string
	count := func(n int64) string {
		if n == 0 {
			return ""
		}
		return number(n)
	}
	part := func(find func(in *request) error, otherwise func()) func() error {
		return func() error {
			ctx, cancel := context.WithTimeout(in.Context(), sidebarTimeout)
			defer cancel()
			if find(&request{Request: in.WithContext(ctx), console: in.console}) != nil {
				otherwise()
			}
			return nil
		}
	}
	_ = inParallel(
		part(func(in *request) error {
			switches, ok, err := callIfAllowed(in, api.GetAutomatic, api.None{})
			s.Observing = ok && switches.Attached && !anyOn(switches.Switches)
			return err
		}, func() { s.Observing = before.Observing }),
		part(func(in *request) error {
			stats, _, err := callIfAllowed(in, api.GetStats, api.None{})
			s.Stopped, s.ByStatus, review = stats.AutomaticStopped, stats.ByStatus, count(stats.NeedsPerson)
			return err
		}, func() { s.Stopped, s.ByStatus, review = before.Stopped, before.ByStatus, before.Counts["review"] }),
		part(func(in *request) error {
			runs, _, err := callIfAllowed(in, api.ListReplays, api.None{})
			runs.Runs = slices.DeleteFunc(runs.Runs, func(r *replay.Run) bool { return r.Status != "running" })
			replays = count(int64(len(runs.Runs)))
			return err
		}, func() { replays = before.Counts["replays"] }),
		part(func(in *request) error {
			health, _, err := callIfAllowed(in, api.GetHealth, api.None{})
			s.Warnings = warningsOf(health)
			return err
		}, func() { s.Warnings = before.Warnings }),
	)
	s.Counts = map[string]string{"review": review, "replays": replays}
	return &s
}

// inTime replaces error texts of Go's context package in the state of a part.
var inTime = strings.NewReplacer("timeout: context deadline exceeded", "no answer in time",
	"context deadline exceeded", "no answer in time")

func warningsOf(health *api.Health) (list []warning) {
	for _, part := range health.Parts {
		if !part.OK {
			list = append(list, warning{part.Name + ": " + inTime.Replace(part.Detail), "/system"})
		}
	}
	for i := range health.Queues {
		if q := &health.Queues[i]; len(q.Reasons) > 0 {
			list = append(list, warning{
				q.Queue + ": " + reasonsInWords(q.Reasons),
				"/dead-letters?q=" + url.QueryEscape(query("status", "open", "queue", q.Queue)),
			})
		}
	}
	return list
}

// sizeReason and ageReason match the API's reasons for a queue with too many dead letters, or with too old ones.
var (
	sizeReason = regexp.MustCompile(`^size (\d+) exceeds (\d+)$`)
	ageReason  = regexp.MustCompile(`^the oldest is open for (\S+), which exceeds (\S+)$`)
)

// reasonsInWords describes why a queue is down: "100,387 dead letters (limit 1,000)".
func reasonsInWords(reasons []string) string {
	words := make([]string, len(reasons))
	for i, reason := range reasons {
		words[i] = reason
		if found := sizeReason.FindStringSubmatch(reason); found != nil {
			words[i] = plural(found[1], "dead letter") + " (limit " + number(found[2]) + ")"
		} else if found := ageReason.FindStringSubmatch(reason); found != nil {
			age, wrong := time.ParseDuration(found[1])
			limit, err := time.ParseDuration(found[2])
			if wrong == nil && err == nil {
				words[i] = "the oldest is open for " + lasted(age) + " (limit " + lasted(limit) + ")"
			}
		}
	}
	return strings.Join(words, ", ")
}

func anyOn(switches []automatic.Switch) bool {
	for _, s := range switches {
		if s.Enabled {
			return true
		}
	}
	return false
}

// flash is a message about an action, shown on the next page.
type flash struct {
	Text string `json:"t,omitempty"`
	Bad  bool   `json:"b,omitempty"`
	Undo string `json:"u,omitempty"` // id of an operation that can be undone; "" if there is none
	To   string `json:"l,omitempty"` // link to a page about the action
}

const flashCookie = "dlqd-flash"

// maxFlash limits the text of a flash in bytes: it is stored in a cookie.
const maxFlash = 1500

func setFlash(w http.ResponseWriter, r *http.Request, f flash) {
	if f.Text == "" {
		return
	}
	f.Text = strings.ToValidUTF8(f.Text[:min(len(f.Text), maxFlash)], "")
	raw, err := json.Marshal(f)
	if err != nil {
		return
	}
	http.SetCookie(w, &http.Cookie{ //nolint:gosec // secure where the connection is
		Name: flashCookie, Value: base64.RawURLEncoding.EncodeToString(raw), Path: "/",
		MaxAge: 60, HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode,
	})
}

func takeFlash(w http.ResponseWriter, r *http.Request) (f flash) {
	cookie, err := r.Cookie(flashCookie)
	if err != nil {
		return f
	}
	raw, err := base64.RawURLEncoding.DecodeString(cookie.Value)
	if err != nil || json.Unmarshal(raw, &f) != nil || !access.LocalPath(f.To) {
		f.To = ""
	}
	http.SetCookie(w, &http.Cookie{Name: flashCookie, Path: "/", MaxAge: -1, HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode}) //nolint:gosec // likewise
	return f
}

// Events returns the address of the page's event stream. If the page has no live sections but the viewer has a session,
// the stream only reports the end of the session. With neither live sections nor a session, Events returns "".
func (f *frame) Events() string {
	switch {
	case f.Interval == 0 && f.Who.Session != "":
		return "/events"
	case f.Interval == 0:
		return ""
	}
	return "/events?page=" + url.QueryEscape(cmp.Or(f.Live, f.Path))
}

// ZoneName returns the name of the viewer's time zone, for the script; "" for UTC.
func (f *frame) ZoneName() string {
	if f.Zone == time.UTC {
		return ""
	}
	return f.Zone.String()
}

// ZoneWord returns the abbreviation of the viewer's time zone now.
func (f *frame) ZoneWord() string { return time.Now().In(f.Zone).Format("MST") }

// SecondsLeft returns the time until Until, rounded up. It is 0 if the page has no such time.
func (f *frame) SecondsLeft() int {
	if f.Until.IsZero() {
		return 0
	}
	return max(0, int(time.Until(f.Until).Seconds())) + 1
}

// permissionsKey returns a key for the viewer's permissions. Viewers with the same key see the same
// pages.
func permissionsKey(p *access.Principal) string {
	raw, err := json.Marshal(p.Grants) //nolint:musttag // only a key
	if err != nil {
		return p.Via + " " + p.Name
	}
	return string(raw)
}
