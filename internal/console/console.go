// Package console is dlqd's pages: what people see in a browser. Each page asks the API's operations, within the process, as the person
// who looks at it. So it has no rule of its own: who may do what, what is masked, and what needs a second person is said once, there.
package console

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy"
)

// Config is what the console needs.
type Config struct {
	// API answers the API's operations for who is in the context of a request (access.From). It does not ask who that is.
	API http.Handler
	// NotServed answers what is neither a page nor of the API.
	NotServed http.Handler
	// Policy is the policy in force, and Environment the environment that it is of.
	Policy      func() *policy.Policy
	Environment string
	// SignInWays says how one signs in with a browser: by a token of dlqd's, at the OpenID Connect provider; nil where nobody
	// signs in.
	SignInWays func() (tokens, provider bool)
	// RiverUI is the address of River UI, for links to jobs; "" for none.
	RiverUI string
	// Ready says why nobody should be sent here, if so: streams of events end then.
	Ready func() error
	// Reach fails if the database does not answer.
	Reach  func(ctx context.Context) error
	Logger *slog.Logger
}

// Console serves the pages.
type Console struct {
	Config

	mux       *http.ServeMux
	templates templates
	live      live
	around    around
	described described
}

// New returns the console. Requests have come through the door, and bear who makes them.
func New(config Config) *Console {
	c := &Console{Config: config, mux: http.NewServeMux(), templates: parse()}
	c.live.render, c.live.reach = c.renderLive, config.Reach
	c.page("/{$}", c.overview)
	c.page("/dead-letters", c.deadLetters)
	c.page("/dead-letters/{id}", c.deadLetter)
	c.action("/views", c.saveView)
	c.action("/views/{name}/delete", c.deleteView)
	c.page("/bulk", c.bulkPreview)
	c.action("/bulk", c.bulkDo)
	c.action("/dead-letters/{id}/act", c.act)
	c.action("/dead-letters/{id}/assign", c.assign)
	c.action("/dead-letters/{id}/edit", c.edit)
	c.action("/dead-letters/{id}/reveal", c.reveal)
	c.action("/undo/{operation}", c.undo)
	c.page("/operations/{id}", c.operation)
	c.page("/groups", c.groups)
	c.page("/groups/{queue}/{fingerprint}", c.group)
	c.action("/groups/{queue}/{fingerprint}", c.setGroup)
	c.page("/review", c.review)
	c.page("/queues", c.queues)
	c.action("/queues/act", c.actOnQueue)
	c.page("/replays", c.replays)
	c.page("/replays/new", c.newReplay)
	c.page("/replays/{id}", c.replayRun)
	c.action("/replays/{id}/steer", c.steer)
	c.page("/approvals", c.approvals)
	c.page("/approvals/{id}", c.approval)
	c.action("/approvals/{id}/decide", c.decide)
	c.page("/audit", c.audit)
	c.page("/access", c.access)
	c.action("/access/sessions", c.endSessions)
	c.action("/access/tokens", c.changeTokens)
	c.page("/policy", c.policy)
	c.action("/policy", c.previewPolicy)
	c.page("/docs", c.docs)
	c.mux.HandleFunc("GET /docs/try", c.tryIt)
	c.page("/system", c.system)
	c.action("/system/checks", c.checks)
	c.action("/system/automatic", c.steerAutomatic)
	c.action("/system/restored", c.resumeRestored)

	c.mux.HandleFunc("GET /sign-in", func(w http.ResponseWriter, r *http.Request) { c.signIn(w, r, http.StatusOK, "") })
	c.mux.HandleFunc("GET /events", c.events)
	c.mux.Handle("GET /static/", static())
	c.mux.HandleFunc("/", c.notFound)
	return c
}

// ServeHTTP answers with a page.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) { c.mux.ServeHTTP(w, r) }

// pagesOf has, by the tag of an operation, the pages that show what the operation changes. What other
// operations change, any page may show: each has counts around it.
var pagesOf = map[string][]string{
	"saved views": {"/dead-letters", "/audit"},
	"sessions":    {"/access", "/audit"},
	"tokens":      {"/access", "/audit"},
}

// Acted has the pages rendered that show what an operation with a tag has changed. It is called for acts of
// pages too, which are clients of the API.
func (c *Console) Acted(tag string) {
	paths := pagesOf[tag]
	if paths == nil {
		c.around.forget()
	}
	c.live.wake(paths...)
}

// contentSecurityPolicy keeps a browser from loading or running anything that is not the console's own.
const contentSecurityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// request is one request for a page, or for something that a page does.
type request struct {
	*http.Request

	console *Console
	now     time.Time
	frame   *frame
}

// view is what a page shows.
type view struct {
	// Template names the file in templates/, without its ending.
	Template string
	Title    string
	Data     any
	// Every is how often the page's live parts are made anew; 0 for never.
	Every time.Duration
	// Status is that of the answer; 0 means 200.
	Status int
	// Live is the address of the page's live parts, where it says more than the page's.
	Live string
	// Section is the part of the rail that is marked, where the path does not say it.
	Section string
}

// page serves a page at a pattern.
func (c *Console) page(pattern string, show func(*request) (*view, error)) {
	c.mux.HandleFunc("GET "+pattern, func(w http.ResponseWriter, r *http.Request) {
		in := c.request(r)
		v, err := show(in)
		c.answer(w, in, v, err)
	})
}

// done is where somebody goes who has done something, and what they are told there.
type done struct {
	To    string
	Flash flash
	// View is shown instead, where what was sent is to be looked at again.
	View *view
}

// action serves what a page's forms do. An error is told on the page that the form was on.
func (c *Console) action(pattern string, do func(*request) (*done, error)) {
	c.mux.HandleFunc("POST "+pattern, func(w http.ResponseWriter, r *http.Request) {
		in := c.request(r)
		r.Body = http.MaxBytesReader(w, r.Body, maxFormBytes)
		if err := r.ParseForm(); err != nil {
			c.answer(w, in, nil, &Problem{Status: http.StatusRequestEntityTooLarge, Title: "Too large", Detail: "what the form sent is not a form, or is too large"})
			return
		}
		d, err := do(in)
		switch problem, is := errors.AsType[*Problem](err); {
		case err == nil && d.View != nil:
			c.answer(w, in, d.View, nil)
		case err == nil:
			setFlash(w, r, d.Flash)
			http.Redirect(w, r, d.To, http.StatusSeeOther)
		case is && problem.Status < http.StatusInternalServerError && access.LocalPath(r.PostFormValue("from")):
			setFlash(w, r, flash{Bad: true, Text: problem.Error()})
			http.Redirect(w, r, r.PostFormValue("from"), http.StatusSeeOther) //nolint:gosec // access.LocalPath has looked at it
		default:
			c.answer(w, in, nil, err)
		}
	})
}

// maxFormBytes bounds what a form may send: a payload of the largest size, as a form writes it.
const maxFormBytes = 4 << 20

func (c *Console) request(r *http.Request) *request {
	in := &request{Request: r, console: c, now: time.Now()}
	in.frame = newFrame(in)
	return in
}

// answer answers with a page, or says what went wrong.
func (c *Console) answer(w http.ResponseWriter, in *request, v *view, err error) {
	if err != nil {
		v = c.trouble(in, err)
	}
	in.frame.view = *v
	var page bytes.Buffer
	shared, isShared := isLive(in.Context())
	if isShared {
		shared.every = v.Every
		in.frame.lookAround(in)
		err = c.templates.live(&page, in.frame)
	} else {
		in.frame.Flash = takeFlash(w, in.Request)
		in.frame.complete(in)
		err = c.templates.page(&page, in.frame)
	}
	if err != nil {
		c.Logger.Error("console: a page cannot be made", "path", in.URL.Path, "error", err)
		http.Error(w, "this page cannot be made; the log says why", http.StatusInternalServerError)
		return
	}
	header := w.Header()
	header.Set("Content-Type", "text/html; charset=utf-8")
	header.Set("Content-Security-Policy", contentSecurityPolicy)
	w.WriteHeader(cmp.Or(v.Status, http.StatusOK))
	_, _ = w.Write(page.Bytes())
}

// trouble is the page that says what went wrong.
func (c *Console) trouble(in *request, err error) *view {
	problem, ok := errors.AsType[*Problem](err)
	if !ok {
		if in.Context().Err() == nil {
			c.Logger.Error("console: a page failed", "path", in.URL.Path, "error", err)
		}
		problem = &Problem{Status: http.StatusInternalServerError, Title: "Something is wrong in dlqd", Detail: "its log says what"}
	}
	return &view{Template: "trouble", Title: problem.heading(), Status: problem.Status, Data: problem}
}

func (c *Console) notFound(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet || !strings.Contains(r.Header.Get("Accept"), "text/html") {
		c.NotServed.ServeHTTP(w, r)
		return
	}
	c.answer(w, c.request(r), nil, &Problem{Status: http.StatusNotFound, Title: "No such page", Detail: "there is no page " + r.URL.Path})
}

// me is who looks.
func (in *request) me() *access.Principal { return access.From(in.Context()) }
