package console

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
)

// section is a part of the console, as the rail lists it.
type section struct {
	Name, Path, Icon, Key string
	Role                  access.Role // who sees it; "" for everybody
	Current               bool
	Count                 int64
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

	Path     string // with the query: the page's address
	Sections []section
	Who      *access.Principal
	Role     access.Role
	// Environment is the policy's; production is made unmistakable.
	Environment string
	Observing   bool            // nothing is redelivered by itself
	Stopped     *automatic.Stop // somebody stopped all automatic redelivery
	Troubles    []trouble       // what fires now, in a line on every page
	Theme       string          // light or dark; "" as the system has it
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

// complete looks up what every page shows around itself. What cannot be had is left out: a page that explains trouble must not fail by it.
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
	if !f.Who.May(access.Reader) {
		return
	}
	var switches automatic.Overview
	if ok, err := in.may("/api/dlq/automatic", nil, &switches); ok && err == nil {
		f.Stopped = switches.Stopped
		f.Observing = switches.Attached && !anyOn(switches.Switches)
	}
	var health api.Health
	if ok, err := in.may("/api/health", nil, &health); ok && err == nil {
		for _, part := range health.Parts {
			if !part.OK {
				f.Troubles = append(f.Troubles, trouble{part.Name + ": " + part.Detail, "/system"})
			}
		}
	}
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
	http.SetCookie(w, &http.Cookie{
		Name: flashCookie, Value: base64.RawURLEncoding.EncodeToString(raw), Path: "/", MaxAge: 60, HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode,
	})
}

func takeFlash(w http.ResponseWriter, r *http.Request) (f flash) {
	cookie, err := r.Cookie(flashCookie)
	if err != nil {
		return f
	}
	raw, err := base64.RawURLEncoding.DecodeString(cookie.Value)
	if err != nil || json.Unmarshal(raw, &f) != nil || !localPath(f.To) {
		f.To = ""
	}
	http.SetCookie(w, &http.Cookie{Name: flashCookie, Path: "/", MaxAge: -1, HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode})
	return f
}

// Events is where the page's live parts come from.
func (f *frame) Events() string {
	if f.Every == 0 {
		return ""
	}
	return "/events?page=" + url.QueryEscape(f.Path)
}
