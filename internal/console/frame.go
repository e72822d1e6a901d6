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
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replay"
)

// section is a part of the console, as the rail lists it.
type section struct {
	Name, Path, Icon, Key string
	Role                  access.Role // who sees it; "" for everybody
	Current               bool
}

// sections are the parts of the console. Key follows g.
func sections() []section {
	return []section{
		{Name: "Overview", Path: "/", Icon: "overview", Key: "o"},
		{Name: "Dead letters", Path: "/dead-letters", Icon: "letters", Key: "d"},
		{Name: "Groups", Path: "/groups", Icon: "groups", Key: "g"},
		{Name: "Review", Path: "/review", Icon: "review", Key: "r"},
		{Name: "Replays", Path: "/replays", Icon: "replays", Key: "p"},
		{Name: "Queues", Path: "/queues", Icon: "queues", Key: "q"},
		{Name: "Policy", Path: "/policy", Icon: "policy", Key: "y"},
		{Name: "Approvals", Path: "/approvals", Icon: "approvals", Key: "v", Role: access.Operator},
		{Name: "Audit", Path: "/audit", Icon: "audit", Key: "a"},
		{Name: "Access", Path: "/access", Icon: "access", Key: "c"},
		{Name: "System", Path: "/system", Icon: "system", Key: "s"},
		{Name: "API", Path: "/docs", Icon: "api", Key: "i"},
	}
}

// frame is what is around each page.
type frame struct {
	view
	surroundings

	Path     string // with the query: the page's address
	Sections []section
	Who      *access.Principal
	Role     access.Role
	// Environment is the policy's; production is made unmistakable.
	Environment string
	Theme       string // light or dark; "" as the system has it
	Flash       flash
	Assets      map[string]string
	Bare        bool // the page alone, for who has not signed in
}

// trouble is something that is wrong now.
type trouble struct{ Text, To string }

func newFrame(in *request) *frame {
	f := &frame{Path: in.URL.RequestURI(), Who: in.me(), Assets: assets, Environment: in.console.Environment}
	f.Role = f.Who.RoleName()
	if cookie, err := in.Cookie("dlqd-theme"); err == nil && (cookie.Value == "light" || cookie.Value == "dark") {
		f.Theme = cookie.Value
	}
	return f
}

// complete looks up what is around the page.
func (f *frame) complete(in *request) {
	if f.Bare {
		return
	}
	for _, s := range sections() {
		if s.Role != "" && !f.Who.May(s.Role) {
			continue
		}
		path := in.URL.Path
		s.Current = path == s.Path || s.Path != "/" && strings.HasPrefix(path, s.Path+"/") || f.Section == s.Path
		f.Sections = append(f.Sections, s)
	}
	f.lookAround(in)
}

func (f *frame) lookAround(in *request) {
	if !f.Bare && f.Who.May(access.Reader) {
		f.surroundings = in.console.around.get(in)
	}
}

// surroundings are what every page says of the whole: how it is, for who may see that.
type surroundings struct {
	at        time.Time
	Observing bool            // nothing is redelivered by itself
	Stopped   *automatic.Stop // somebody stopped all automatic redelivery
	Troubles  []trouble       // what is wrong now, in a line on every page
	// Counts are what waits in parts of the console, by their icons: "" where nothing does.
	Counts map[string]string
}

// around keeps surroundings for a moment, for all who have the same rights.
type around struct {
	looking singleflight.Group

	mu        sync.Mutex
	known     map[string]surroundings
	forgotten time.Time // until when what somebody did may not be seen yet: what was known before is not asked for
}

const (
	// aroundAge is how old surroundings are when they are looked up anew. Where that takes longer than aroundWait, pages have what is known, up to
	// aroundKept. Live parts are nobody's first look, and look nothing up before that.
	aroundAge  = 5 * time.Second
	aroundKept = 30 * time.Second
	aroundWait = 25 * time.Millisecond
	// aroundReach is how soon all numbers are of after what somebody did: where there are many entries, they are those of rollups.
	aroundReach = 2 * time.Second
	// aroundTimeout bounds how long a page waits for each part of them.
	aroundTimeout = 3 * time.Second
)

func (a *around) get(in *request) surroundings {
	rights := rightsOf(in.me())
	a.mu.Lock()
	maps.DeleteFunc(a.known, func(_ string, s surroundings) bool { return time.Since(s.at) > aroundKept })
	known, ok := a.known[rights]
	forgotten := a.forgotten
	a.mu.Unlock()
	ok = ok && known.at.After(forgotten)
	if _, live := isLive(in.Context()); ok && (live || time.Since(known.at) <= aroundAge) {
		return known
	}
	looked := a.looking.DoChan(rights+forgotten.String(), func() (any, error) { // nobody waits for a look from before
		defer func() {
			if p := recover(); p != nil {
				in.console.Logger.Error("console: what is around a page cannot be looked up", "path", in.URL.Path, "error", background.Panicked(p))
			}
		}()
		ctx, _ := postgres.Counting(context.WithoutCancel(in.Context())) // others have it, too, and what it takes is not the page's
		at := time.Now()
		s := *look(&request{Request: in.WithContext(ctx), console: in.console}, &known)
		s.at = at
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.known == nil {
			a.known = map[string]surroundings{}
		}
		a.known[rights] = s
		return s, nil
	})
	wait := time.Duration(math.MaxInt64)
	if ok {
		wait = aroundWait
	}
	select {
	case found := <-looked:
		s, _ := found.Val.(surroundings)
		return s
	case <-time.After(wait):
		return known
	}
}

// forget has the next pages look: somebody has done something.
func (a *around) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forgotten = time.Now().Add(aroundReach)
}

// look looks up what every page shows around itself, in time for each part of it. What cannot be had stays as it was: a page that
// explains trouble must not fail by it.
func look(in *request, before *surroundings) *surroundings {
	var s surroundings
	var review, replays, approvals string
	count := func(n int64) string {
		if n == 0 {
			return ""
		}
		return number(n)
	}
	part := func(find func(in *request) error, otherwise func()) func() error {
		return func() error {
			ctx, cancel := context.WithTimeout(in.Context(), aroundTimeout)
			defer cancel()
			if find(&request{Request: in.WithContext(ctx), console: in.console}) != nil {
				otherwise()
			}
			return nil
		}
	}
	_ = together(
		part(func(in *request) error {
			var switches automatic.Overview
			ok, err := in.may("/api/dlq/automatic", nil, &switches)
			s.Observing = ok && switches.Attached && !anyOn(switches.Switches)
			return err
		}, func() { s.Observing = before.Observing }),
		part(func(in *request) error {
			var stats api.Stats
			_, err := in.may("/api/dlq/stats", nil, &stats)
			s.Stopped, review = stats.AutomaticStopped, count(stats.NeedsPerson)
			return err
		}, func() { s.Stopped, review = before.Stopped, before.Counts["review"] }),
		part(func(in *request) error {
			var runs struct {
				Runs []*replay.Run `json:"runs"`
			}
			_, err := in.may("/api/dlq/replays", nil, &runs)
			runs.Runs = slices.DeleteFunc(runs.Runs, func(r *replay.Run) bool { return r.Status != "running" })
			replays = count(int64(len(runs.Runs)))
			return err
		}, func() { replays = before.Counts["replays"] }),
		part(func(in *request) error {
			var asked struct {
				Approvals []*approval.Approval `json:"approvals"`
			}
			_, err := in.may("/api/dlq/approvals", url.Values{"state": {"requested"}, "limit": {"500"}}, &asked)
			approvals = count(int64(len(asked.Approvals)))
			return err
		}, func() { approvals = before.Counts["approvals"] }),
		part(func(in *request) error {
			var health api.Health
			_, err := in.may("/api/health", nil, &health)
			s.Troubles = troubles(&health)
			return err
		}, func() { s.Troubles = before.Troubles }),
	)
	s.Counts = map[string]string{"review": review, "replays": replays, "approvals": approvals}
	return &s
}

func troubles(health *api.Health) (list []trouble) {
	for _, part := range health.Parts {
		if !part.OK {
			list = append(list, trouble{part.Name + ": " + part.Detail, "/system"})
		}
	}
	for i := range health.Queues {
		if q := &health.Queues[i]; len(q.Reasons) > 0 {
			list = append(list, trouble{"queue " + q.Queue + ": " + strings.Join(q.Reasons, ", "), "/dead-letters?q=" + url.QueryEscape(query("status", "open", "queue", q.Queue))})
		}
	}
	return list
}

func anyOn(switches []automatic.Switch) bool {
	for _, s := range switches {
		if s.Enabled {
			return true
		}
	}
	return false
}

// flash is what somebody is told on the next page, about what they did on this one.
type flash struct {
	Text string `json:"t,omitempty"`
	Bad  bool   `json:"b,omitempty"`
	Undo string `json:"u,omitempty"` // the operation that can be undone
	To   string `json:"l,omitempty"` // where there is more about it
}

const flashCookie = "dlqd-flash"

// maxFlash bounds what a flash says, in bytes: it travels in a cookie.
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
		Name: flashCookie, Value: base64.RawURLEncoding.EncodeToString(raw), Path: "/", MaxAge: 60, HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode,
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

// Events is where the page's live parts come from.
func (f *frame) Events() string {
	if f.Every == 0 {
		return ""
	}
	return "/events?page=" + url.QueryEscape(cmp.Or(f.Live, f.Path))
}

// rightsOf names what somebody may do: those who may do the same see the same.
func rightsOf(p *access.Principal) string {
	raw, err := json.Marshal(p.Grants) //nolint:musttag // nobody reads it
	if err != nil {
		return p.Via + " " + p.Name
	}
	return string(raw)
}
