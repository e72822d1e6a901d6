// Package console serves dlqd's web pages. A page calls the operations of the API within the
// process as its viewer. The console has no access rules of its own: the API decides permissions,
// masking and approvals.
package console

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
)

// Config configures the console.
type Config struct {
	// API serves the operations of the API as the principal in the request's context (access.From). It
	// does not authenticate.
	API http.Handler
	// NotServed serves requests that are neither for a page nor for the API.
	NotServed http.Handler
	// Policy returns the current policy. Environment is the environment that the policy is loaded for.
	Policy      func() *policy.Policy
	Environment string
	// SignInWays reports how a browser can sign in: with a token of dlqd, through the OpenID Connect provider, or
	// both. It is nil if authentication is off.
	SignInWays func() (tokens, provider bool)
	// RiverUI is the address of River UI, for links to jobs; "" if there is none.
	RiverUI string
	// Ready, if not nil, returns an error while the process should get no traffic. Event streams end when it returns an
	// error.
	Ready func() error
	// Reach returns an error if the database does not answer.
	Reach func(ctx context.Context) error
	// Requests returns a text that changes whenever a request for approval is made, decided or ended. If it is nil,
	// pages show no notices of requests.
	Requests func(ctx context.Context) (string, error)
	Logger   *slog.Logger
}

// Console serves the pages.
type Console struct {
	Config

	mux       *http.ServeMux
	templates *templates
	live      live
	sidebar   sidebarCache
	counts    countCache
	requests  requestCache
	reference apiReference
}

// New returns the console. Requests must be authenticated already: the principal is in their
// context.
func New(config Config) *Console {
	c := &Console{Config: config, mux: http.NewServeMux(), templates: parsed()}
	c.live.render, c.live.ping = c.renderLive, config.Reach
	c.page("/{$}", c.overview)
	c.page("/dead-letters", c.deadLetters)
	c.page("/dead-letters/{id}", c.deadLetter)
	c.action("/views", c.saveView)
	c.action("/views/{name}/delete", c.deleteView)
	c.action("/views/{name}/move", c.moveView)
	c.page("/dead-letters/export", c.exportForm)
	c.mux.HandleFunc("POST /dead-letters/export", c.export)
	c.mux.HandleFunc("GET /chart/{file}", c.backlogFile)
	c.page("/bulk", c.bulkPreview)
	c.action("/bulk", c.bulkDo)
	c.action("/dead-letters/{id}/act", c.act)
	c.action("/dead-letters/{id}/assign", c.assign)
	c.action("/dead-letters/{id}/edit", c.edit)
	c.action("/dead-letters/{id}/reveal", c.reveal)
	c.page("/dead-letters/{id}/reveal", c.revealed)
	c.action("/undo/{operation}", c.undo)
	c.page("/operations/{id}", c.operation)
	c.page("/groups", c.groups)
	c.action("/groups", c.actOnGroups)
	c.page("/groups/{queue}/{fingerprint}", c.group)
	c.action("/groups/{queue}/{fingerprint}", c.setGroup)
	c.mux.HandleFunc("GET /groups/{queue}/{fingerprint}/chart/{file}", c.failuresFile)
	c.page("/review", c.review)
	c.page("/queues", c.queues)
	c.action("/queues/act", c.actOnQueue)
	c.page("/sources", c.sources)
	c.action("/sources/act", c.actOnSource)
	c.action("/sources/feed", c.actOnFeed)
	c.page("/jobs", c.jobs)
	c.page("/jobs/{id}", c.job)
	c.action("/jobs/{id}/act", c.actOnJob)
	c.page("/messages/{id}", c.message)
	c.page("/search", c.search)
	c.page("/replays", c.replays)
	c.page("/replays/new", c.newReplay)
	c.page("/replays/calibration", c.calibration)
	c.page("/replays/{id}", c.replayRun)
	c.action("/replays/{id}/steer", c.controlRun)
	c.page("/approvals", c.approvals)
	c.page("/approvals/{id}", c.approval)
	c.action("/approvals/{id}/decide", c.decide)
	c.page("/audit", c.audit)
	c.page("/access", c.access)
	c.action("/access/sessions", c.endSessions)
	c.action("/access/tokens", c.changeTokens)
	c.action("/zone", c.setZone)
	c.page("/policy", c.policy)
	c.action("/policy", c.previewPolicy)
	c.page("/docs", c.docs)
	c.mux.HandleFunc("GET /docs/try", c.tryOperation)
	c.page("/system", c.system)
	c.action("/system/checks", c.checks)
	c.action("/system/automatic", c.switchAutomatic)
	c.action("/system/restored", c.resumeRestored)

	c.mux.HandleFunc("GET /sign-in", func(w http.ResponseWriter, r *http.Request) { c.signIn(w, r, http.StatusOK, "") })
	c.mux.HandleFunc("GET /events", c.events)
	c.mux.Handle("GET /static/", static())
	c.mux.HandleFunc("GET /static/environment/{file}", environmentSheet)
	c.mux.HandleFunc("/", c.notFound)
	return c
}

// ServeHTTP serves a page, an action, a download, a stream of events or a static file.
func (c *Console) ServeHTTP(w http.ResponseWriter, r *http.Request) { c.mux.ServeHTTP(w, r) }

// pagesOf maps the tag of an operation to the pages that show what the operation changes.
// Operations with other tags may change any page, because every page shows counts.
var pagesOf = map[string][]string{
	"review":      {"/review", "/dead-letters"},
	"saved views": {"/dead-letters", "/audit"},
	"sessions":    {"/access", "/audit"},
	"tokens":      {"/access", "/audit"},
}

// Changed requests a rendering of the open pages that may show the changes of an operation with this tag. The API calls
// Changed after each successful operation that may have changed data, also if a page called the operation.
func (c *Console) Changed(tag string) {
	paths := pagesOf[tag]
	if paths == nil {
		c.sidebar.invalidate()
		c.counts.invalidate()
		c.requests.invalidate()
	}
	c.live.wake(paths...)
}

// contentSecurityPolicy lets a browser load and run only the console's own files.
const contentSecurityPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; " +
	"connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// request is a request for a page or an action.
type request struct {
	*http.Request

	console *Console
	now     time.Time
	frame   *frame
}

// view is the content of a page.
type view struct {
	// Template is the name of the file in templates/, without its extension.
	Template string
	Title    string
	Data     any
	// Interval is the render interval of the page's live sections; 0 if the page is not live.
	Interval time.Duration
	// Status is the HTTP status; 0 means 200.
	Status int
	// Live is the address of the page's live sections. "" means the address of the page.
	Live string
	// Secret means that the page contains a secret, and is not compressed.
	Secret bool
	// Until is the time after which the page must not show its content. Zero means no limit.
	Until time.Time
	// Section is the path of the navigation item to highlight; "" if the path of the page determines it.
	Section string
	// To, if not "", is the path of another page of the console, to which the browser is redirected.
	To string
	// Seen has an outcomeKey for each request for approval whose outcome the page shows to its requester.
	Seen []string
}

// page registers a page.
func (c *Console) page(pattern string, show func(*request) (*view, error)) {
	c.mux.HandleFunc("GET "+pattern, func(w http.ResponseWriter, r *http.Request) {
		in := c.request(r)
		if in.frame.hasSidebar() {
			c.sidebar.refresh(in) // read concurrently with the page's own data
		}
		v, err := recovered(show, in)
		if err == nil && v.To != "" {
			http.Redirect(w, r, v.To, http.StatusSeeOther)
			return
		}
		c.answer(w, in, v, err)
	})
}

// done is the result of an action: where the browser goes next, and the message shown there.
type done struct {
	To    string
	Flash flash
	// View, if not nil, is shown instead of a redirect, for example a preview.
	View *view
	// Made, if not nil, is a token that the page at To shows once.
	Made *madeToken
	// Cookie, if not nil, is a setting of the browser.
	Cookie *http.Cookie
}

// action registers a form action. An error of the client is shown on the page that sent the form.
func (c *Console) action(pattern string, do func(*request) (*done, error)) {
	c.mux.HandleFunc("POST "+pattern, func(w http.ResponseWriter, r *http.Request) {
		in := c.request(r)
		r.Body = http.MaxBytesReader(w, r.Body, maxFormBytes)
		if err := r.ParseForm(); err != nil {
			c.answer(w, in, nil, &api.Problem{
				Status: http.StatusRequestEntityTooLarge, Title: "Invalid form",
				Detail: "the form is malformed, or larger than 4 MiB",
			})
			return
		}
		d, err := recovered(do, in)
		switch problem, is := errors.AsType[*api.Problem](err); {
		case err == nil && d.View != nil:
			c.answer(w, in, d.View, nil)
		case err == nil:
			setFlash(w, r, d.Flash)
			if d.Made != nil {
				d.Made.keep(w, r)
			}
			if d.Cookie != nil {
				http.SetCookie(w, d.Cookie)
			}
			http.Redirect(w, r, d.To, http.StatusSeeOther)
		case is && !mayPass(problem.Status) && access.LocalPath(r.PostFormValue("from")):
			setFlash(w, r, flash{Bad: true, Text: problem.Error()})
			http.Redirect(w, r, r.PostFormValue("from"), http.StatusSeeOther) //nolint:gosec // access.LocalPath has checked it
		default:
			c.answer(w, in, nil, err)
		}
	})
}

// recovered calls a page or an action, and turns a panic into an error, so that the browser gets an error page.
func recovered[T any](do func(*request) (T, error), in *request) (out T, err error) {
	defer func() {
		p := recover()
		if p == http.ErrAbortHandler { //nolint:errorlint,err113 // as net/http compares it
			panic(p)
		}
		if p != nil {
			err = background.Panicked(p)
		}
	}()
	return do(in)
}

// mayPass reports whether a request that was refused with this status may succeed if the browser sends it again
// unchanged.
func mayPass(status int) bool {
	return status == http.StatusTooManyRequests || status >= http.StatusInternalServerError
}

// maxFormBytes limits the body of a form: the largest payload, URL-encoded.
const maxFormBytes = 4 << 20

func (c *Console) request(r *http.Request) *request {
	in := &request{Request: r, console: c, now: time.Now()}
	in.frame = newFrame(in)
	return in
}

// answer writes the page, or an error page if err is not nil.
func (c *Console) answer(w http.ResponseWriter, in *request, v *view, err error) {
	if err != nil {
		v = c.errorPage(in, err)
	}
	in.frame.view = *v
	var page bytes.Buffer
	shared, isShared := isLive(in.Context())
	if isShared {
		shared.interval = v.Interval
		if shared.asOf = in.frame.AsOf(); !shared.asOf.IsZero() {
			if err = c.templates.source(&page, in.frame); err == nil {
				shared.source = page.String()
				page.Reset()
			}
		}
		in.frame.loadSidebar(in)
		err = cmp.Or(err, c.templates.live(&page, in.frame))
	} else {
		markSeen(w, in.Request, v.Seen)
		in.frame.Flash = takeFlash(w, in.Request)
		in.frame.complete(in)
		if v.Secret {
			access.SetCookie(w, in.Request, madeCookie, "", 0)
		}
		err = c.templates.page(&page, in.frame)
		if err == nil && in.Method == http.MethodGet && v.Status == 0 {
			fillTyped(w, in.Request, &page)
		}
	}
	if err != nil {
		c.Logger.Error("console: rendering a page failed", "path", in.URL.Path, "error", err)
		http.Error(w, "rendering this page failed; see the log of dlqd", http.StatusInternalServerError)
		return
	}
	header := w.Header()
	header.Set("Content-Type", "text/html; charset=utf-8")
	header.Set("Content-Security-Policy", contentSecurityPolicy)
	answer := page.Bytes()
	if len(answer) >= minCompressed && mayCompress(in.Request, v) && acceptsGzip(in.Request) {
		header.Set("Content-Encoding", "gzip")
		answer = compressed(answer)
	}
	w.WriteHeader(cmp.Or(v.Status, http.StatusOK))
	_, _ = w.Write(answer)
}

// errorPage returns the error page. Errors other than API problems are logged.
func (c *Console) errorPage(in *request, err error) *view {
	problem, ok := errors.AsType[*api.Problem](err)
	if !ok {
		if in.Context().Err() == nil {
			c.Logger.Error("console: loading a page failed", "path", in.URL.Path, "error", err)
		}
		problem = &api.Problem{
			Status: http.StatusInternalServerError, Title: "Internal error",
			Detail: "loading this page failed; see the log of dlqd",
		}
	}
	if in.Method == http.MethodGet && namesNothing(problem) {
		problem = &api.Problem{Status: http.StatusNotFound, Detail: "There is no page " + in.URL.Path + "."}
	}
	if problem.Status == http.StatusForbidden && in.me().Via != "" && !in.me().May(access.Reader) {
		return c.noRole(in, &view{Title: heading(problem), Status: problem.Status})
	}
	return &view{
		Template: "error", Title: heading(problem), Status: problem.Status, Data: &failure{problem, refusedForm(in, problem)},
	}
}

// namesNothing reports whether the API refused a part of an operation's path, which comes from the page's address.
func namesNothing(problem *api.Problem) bool {
	return slices.ContainsFunc(problem.Errors, func(cause api.ProblemCause) bool {
		return cause.Location == "path" || strings.HasPrefix(cause.Location, "path.")
	})
}

// failure is an error page.
type failure struct {
	*api.Problem

	Again *again // nil if there is no form to send again
}

// again is a form that was not handled, or whose answer was lost. The page shows what the user typed, and can send the
// whole form again.
type again struct {
	Action string
	Typed  url.Values // fields that the user typed, to show
	Fields url.Values // all fields, to send
	// Page is the address of the page where the user can check whether the form was handled: the database may have
	// committed before the connection was lost. It is "" if the form was refused before its handler ran.
	Page string
}

// refusedForm returns the form of a refused request that may succeed if it is sent again. It returns nil for other
// requests.
func refusedForm(in *request, problem *api.Problem) *again {
	if in.Method != http.MethodPost || !mayPass(problem.Status) {
		return nil
	}
	t := typedIn(in.Request)
	if len(in.PostForm) == 0 {
		return nil
	}
	shown := url.Values{}
	for name := range t.Fields {
		shown[name] = []string{in.formText(name)}
	}
	a := &again{Action: t.Action, Typed: shown, Fields: in.PostForm}
	if problem.Status >= http.StatusInternalServerError && !in.frame.Bare { // not for a request that Unavailable answers
		a.Page = in.console.pageOf(in.Request)
	}
	return a
}

// Unavailable shows why a browser's request was not handled. It reads nothing from the database. The page shows
// what the user typed into the request's form, and can send the form again.
func (c *Console) Unavailable(w http.ResponseWriter, r *http.Request, status int, why string) {
	in := c.request(r)
	in.frame.Bare = true
	c.answer(w, in, nil, &api.Problem{Status: status, Title: http.StatusText(status), Detail: why})
}

func (c *Console) notFound(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet || !strings.Contains(r.Header.Get("Accept"), "text/html") {
		c.NotServed.ServeHTTP(w, r)
		return
	}
	c.answer(w, c.request(r), nil,
		&api.Problem{Status: http.StatusNotFound, Detail: "There is no page " + r.URL.Path + "."})
}

// pageOf returns the address of the page from which the form of a request was sent. This is the nearest page above the
// form's address. If the field from of the form has the same path, pageOf returns from, which also has the page's
// query. If there is no page above the form's address, pageOf uses from alone.
func (c *Console) pageOf(r *http.Request) string {
	nearest := "/"
	for at := r.URL.EscapedPath(); at != "/" && at != "."; at = path.Dir(at) {
		page, err := http.NewRequestWithContext(r.Context(), http.MethodGet, at, http.NoBody) //nolint:gosec // it is never sent
		if err != nil {
			break
		}
		if _, pattern := c.mux.Handler(page); strings.HasPrefix(pattern, "GET ") && access.ReturnTo(at) == at {
			nearest = at
			break
		}
	}
	from := r.PostFormValue("from")
	if nearest == "/bulk" { // its address selects the dead letters
		selected := url.Values{}
		for _, name := range []string{"q", "id", "all", "do", "new"} {
			if values := r.PostForm[name]; len(values) > 0 {
				selected[name] = values
			}
		}
		return nearest + "?" + selected.Encode()
	}
	if at, _, _ := strings.Cut(from, "?"); access.ReturnTo(from) == from && (nearest == "/" || at == nearest) {
		return from
	}
	return nearest
}

// me returns the viewer.
func (in *request) me() *access.Principal { return access.From(in.Context()) }

// actor returns the viewer's name in the audit trail.
func (in *request) actor() string {
	if in.me().Via == access.ViaNothing {
		return "api"
	}
	return in.me().Name
}
