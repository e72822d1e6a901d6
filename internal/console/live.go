package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// minInterval and maxInterval limit the render interval of a page's live sections.
	minInterval = time.Second
	maxInterval = time.Minute
	// intervalPerStatement times the number of SQL statements of a page is its minimum render interval.
	// An open page therefore costs the database less than one statement per second.
	intervalPerStatement = 1100 * time.Millisecond
	// maxPagesPerUser limits the number of distinct live pages of one user in this process.
	maxPagesPerUser = 30
	// maxRenderings limits the number of pages that this process renders at once. An action wakes many
	// pages, a page takes up to four connections, and River shares the pool.
	maxRenderings = 4
	// renderTimeout limits the time of one rendering.
	renderTimeout = 15 * time.Second
	// beatInterval is the time between two events of a stream; before each event, the stream checks that its viewer is
	// still permitted. Because of the events, a page shows within five seconds that the server or the database does not
	// answer, or that the viewer is signed out.
	beatInterval = time.Second
	// While pages are live, the process checks every pingInterval that the database answers within pingTimeout. All
	// streams share this check.
	pingInterval = 1500 * time.Millisecond
	pingTimeout  = 2 * time.Second
)

// errUnreachable is shown on pages while the database does not answer.
var errUnreachable = errors.New("the database does not answer")

// live renders the live sections of open pages. Viewers of the same page with the same permissions
// share one rendering, so two hundred open pages cost the database the same as one.
type live struct {
	render func(ctx context.Context, from *http.Request, address string) (rendering, error)
	ping   func(ctx context.Context) error // returns an error if the database does not answer; if nil, this is not checked

	mu          sync.Mutex
	topics      map[string]*topic
	renderSlots chan struct{} // semaphore of maxRenderings renderings
	pinging     bool          // whether pingDatabase runs
	unreachable error         // result of the last check
}

// topic is an open page, shared by viewers with the same permissions.
type topic struct {
	path     string // path of the page, without its parameters
	watchers map[chan event]watcher
	changed  time.Time // when an action in this process last changed what the page shows; zero for never
	cancel   context.CancelFunc
	wake     chan struct{} // of capacity one: requests a rendering now
}

// watcher is an open page of a user. A rendering that began before since may be older than the page, so it is not sent.
type watcher struct {
	user  string
	actor string // the user's name in the audit trail
	since time.Time
}

// rendering is the live sections of a page.
type rendering struct {
	html []byte
	// asOf is the time of the data; zero means the time of the rendering. source is the section that shows asOf to
	// viewers.
	asOf   time.Time
	source string
	every  time.Duration // the render interval
}

// event is a rendering of a page.
type event struct {
	rendering

	at  time.Time // when the rendering began
	sum uint64
	err error
}

// watch subscribes a user to the renderings of a page until done is called. It returns false if the
// user has maxPagesPerUser other pages open.
func (l *live) watch(ctx context.Context, from *http.Request, user, key,
	address string,
) (events chan event, done func(), ok bool) {
	events = make(chan event, 1)
	l.mu.Lock()
	defer l.mu.Unlock()
	others := 0
	for other, t := range l.topics {
		if other == key {
			continue
		}
		for _, who := range t.watchers {
			if who.user == user {
				others++
				break
			}
		}
	}
	if others >= maxPagesPerUser {
		return nil, nil, false
	}
	t := l.topics[key]
	if t == nil {
		if l.topics == nil {
			l.topics, l.renderSlots = map[string]*topic{}, make(chan struct{}, maxRenderings)
		}
		shared, cancel := context.WithCancel(context.WithoutCancel(ctx))
		path, _, _ := strings.Cut(address, "?")
		t = &topic{path: path, watchers: map[chan event]watcher{}, cancel: cancel, wake: make(chan struct{}, 1)}
		l.topics[key] = t
		// Deferred, because the first rendering must begin after since of this watcher.
		defer func() { go l.run(shared, t, from.Clone(shared), address) }()
	}
	if l.ping != nil && !l.pinging {
		l.pinging = true
		go l.pingDatabase(context.WithoutCancel(ctx))
	}
	t.watchers[events] = watcher{user: user, actor: access.From(ctx).Name, since: time.Now()}
	t.wakeUp()
	return events, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(t.watchers, events)
		if len(t.watchers) == 0 {
			t.cancel()
			if l.topics[key] == t {
				delete(l.topics, key)
			}
		}
	}, true
}

var seed = maphash.MakeSeed()

func (l *live) run(ctx context.Context, t *topic, from *http.Request, address string) {
	for {
		select {
		case l.renderSlots <- struct{}{}:
		case <-ctx.Done():
			return
		}
		select { // this rendering answers all wake-ups so far
		case <-t.wake:
		default:
		}
		actors, changed := t.audience(&l.mu)
		began := time.Now()
		timed, cancel := context.WithTimeout(api.WithViewers(ctx, actors), renderTimeout)
		made, err := l.render(timed, from, address)
		cancel()
		<-l.renderSlots
		took := time.Since(began)
		if err != nil && l.databaseError() != nil {
			took = 0 // the database caused the delay, not the page
		}
		t.send(&l.mu, event{rendering: made, at: began, sum: maphash.Bytes(seed, made.html), err: err})
		if !made.asOf.IsZero() && made.asOf.Before(changed) { // the replica may lack what an action changed
			made.every = max(minInterval, took)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(max(made.every, minInterval), maxInterval)):
		case <-t.wake:
			select {
			case <-ctx.Done():
				return
			case <-time.After(max(minInterval-took, took)): // a slow page renders at most half of the time
			}
		}
	}
}

// send sends a rendering to each watcher whose page is older than the rendering.
func (t *topic) send(mu *sync.Mutex, now event) {
	mu.Lock()
	defer mu.Unlock()
	for events, who := range t.watchers {
		if now.at.Before(who.since) {
			continue // the page is newer; its topic was woken, so another rendering follows
		}
		select {
		case <-events: // drop a rendering that the watcher has not read yet
		default:
		}
		events <- now
	}
}

// audience returns the names of the users who watch the page, and when an action last changed it.
func (t *topic) audience(mu *sync.Mutex) (actors []string, changed time.Time) {
	mu.Lock()
	defer mu.Unlock()
	for _, who := range t.watchers {
		actors = append(actors, who.actor)
	}
	slices.Sort(actors)
	return slices.Compact(actors), t.changed
}

func (t *topic) wakeUp() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// wake requests a rendering of all pages, or of the pages at or below the given paths.
func (l *live) wake(paths ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.topics {
		if len(paths) == 0 || slices.ContainsFunc(paths, func(path string) bool {
			return t.path == path || strings.HasPrefix(t.path, path+"/")
		}) {
			t.changed = time.Now()
			t.wakeUp()
		}
	}
}

// pingDatabase checks the database as long as pages are live. It wakes all pages when the database answers again.
func (l *live) pingDatabase(ctx context.Context) {
	for {
		timed, cancel := context.WithTimeout(ctx, pingTimeout)
		err := l.ping(timed)
		cancel()
		if err != nil {
			err = errUnreachable
		}
		l.mu.Lock()
		again := l.unreachable != nil && err == nil
		l.unreachable = err
		if len(l.topics) == 0 {
			l.pinging, l.unreachable = false, nil
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		if again {
			l.wake()
		}
		time.Sleep(pingInterval)
	}
}

// databaseError returns why pages cannot be rendered at the moment, or nil.
func (l *live) databaseError() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.unreachable
}

// mayWatch reports whether the viewer is still authenticated. It returns an error if the database does not answer.
func (c *Console) mayWatch(ctx context.Context) (bool, error) {
	if err := c.live.databaseError(); err != nil {
		return false, err
	}
	return access.StillAuthenticated(ctx)
}

// events streams the live sections of a page as they change. A rendering shows the same as loading the page would. If
// the request names no page, the stream only reports that the viewer is signed out.
func (c *Console) events(w http.ResponseWriter, r *http.Request) {
	address := r.URL.Query().Get("page")
	if address != "" && (!access.LocalPath(address) || strings.HasPrefix(address, "/events")) {
		c.answer(w, c.request(r), nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Invalid page", Detail: "page must be the path of a page",
		})
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // nginx passes on each event at once
	w.WriteHeader(http.StatusOK)
	control := http.NewResponseController(w)
	_ = control.Flush()
	send := func(name, data string) bool {
		_, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", name, strings.ReplaceAll(data, "\n", "\ndata: "))
		return err == nil && control.Flush() == nil
	}
	var watched chan event // nil: the page is not live
	if address != "" {
		p := access.From(r.Context())
		address = canonical(address)
		events, done, ok := c.live.watch(r.Context(), r, p.Via+" "+p.Name,
			permissionsKey(p)+viewerKey(address, p)+zoneOf(r).String()+address, address)
		switch {
		case ok:
			defer done()
			watched = events
		case !send("refused", fmt.Sprintf("you have %d live pages; this one reloads every minute", maxPagesPerUser)):
			return
		}
	}
	var fresh *event // a rendering that has not been sent yet
	var shown uint64
	var failed error              // error of the latest rendering
	var told string               // the viewer's own sections that were sent last
	var source, toldSource string // see rendering.source
	beat := time.NewTicker(beatInterval)
	defer beat.Stop()
	for {
		select {
		case <-r.Context().Done():
			return
		case e := <-watched:
			fresh = &e
		case <-access.SessionsEnded(r.Context()):
		case <-beat.C:
		}
		if c.Ready != nil && c.Ready() != nil {
			return
		}
		still, err := c.mayWatch(r.Context())
		if err == nil && !still {
			send("ended", "")
			return
		}
		if err != nil { // also if the viewer's session cannot be checked
			if !send("trouble", errUnreachable.Error()) {
				return
			}
			continue
		}
		if fresh != nil {
			failed = fresh.err
		}
		var sent bool
		switch {
		case failed != nil:
			sent = send("trouble", failed.Error())
		case fresh == nil:
			sent = send("beat", "")
		case fresh.sum == shown:
			sent = send("same", fresh.at.UTC().Format(time.RFC3339))
		default:
			shown = fresh.sum
			_, err = fmt.Fprintf(w, "id: %s\n", fresh.at.UTC().Format(time.RFC3339))
			sent = err == nil && send("page", string(fresh.html))
		}
		if fresh != nil && fresh.err == nil && (fresh.source != "" || source != "") {
			source = cmp.Or(fresh.source, primarySource)
		}
		if sent && source != toldSource {
			toldSource = source
			sent = send("source", source)
		}
		fresh = nil
		if sections := c.ownSections(r); sent && sections != told {
			told = sections
			sent = send("own", told)
		}
		if !sent {
			return
		}
	}
}

// parameters are the query parameters that pages read. canonical drops all other parameters, so that they create no
// separate topic.
var parameters = func() []string {
	ofAudit := auditFields(&api.AuditInput{})
	names := make([]string, len(ofAudit))
	for i, f := range ofAudit {
		names[i] = f.Name
	}
	return slices.Concat(names, []string{
		"q", "order", "cursor", "column", "outcome", "status", "queue", "owner", "over",
		"hasOpen", "whose", "at", "people", "state", "each", "day",
	})
}()

// canonical returns an address in a normal form, with only the parameters that pages read.
func canonical(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return address // unreachable: access.LocalPath has parsed it
	}
	query := u.Query()
	for name := range query {
		if !slices.Contains(parameters, name) {
			delete(query, name)
		}
	}
	u.RawQuery, u.Fragment, u.RawFragment = query.Encode(), "", ""
	return u.String()
}

// sharedPages matches the pages that look the same to all viewers with the same permissions, unless
// their filter contains "me".
var sharedPages = regexp.MustCompile(
	`^/(|dead-letters(/[0-9a-f-]{36})?|groups(/[^/]+/[^/]+)?|queues|replays(/[0-9a-f-]{36})?)$`)

// viewerKey returns a key for the viewer if the page depends on the viewer, or "" if it only depends
// on permissions.
func viewerKey(address string, p *access.Principal) string {
	u, err := url.Parse(address)
	if err == nil && u.EscapedPath() == u.Path && sharedPages.MatchString(u.Path) {
		if query, err := url.QueryUnescape(u.RawQuery); err == nil && !strings.Contains(strings.ToLower(query), "me") {
			return ""
		}
	}
	return p.Via + " " + p.Name
}

// primarySource is an empty section in place of the one about the replica's age, for a page with data of the primary.
const primarySource = `<div id="source" data-live></div>`

// renderLive renders the live sections of the page at an address for the principal in ctx. A panic
// becomes an error: a rendering runs outside of net/http, which would recover it.
func (c *Console) renderLive(ctx context.Context, from *http.Request, address string) (made rendering, err error) {
	defer func() {
		if p := recover(); p != nil {
			c.Logger.Error("console: rendering a live page panicked", "path", address, "error", background.Panicked(p))
			made, err = rendering{every: maxInterval}, errors.New("rendering the page failed")
		}
	}()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil) //nolint:gosec // a handler of this process serves it
	if err != nil {
		return rendering{every: maxInterval}, err
	}
	r.RemoteAddr, r.Host = from.RemoteAddr, from.Host
	r.Header.Set("User-Agent", from.UserAgent())
	r.AddCookie(&http.Cookie{Name: zoneCookie, Value: zoneOf(from).String()}) //nolint:gosec // of a request
	w := &liveResponse{response: response{header: http.Header{}}}
	ctx, statements := postgres.Counting(ctx)
	c.mux.ServeHTTP(w, r.WithContext(context.WithValue(ctx, liveKey{}, w)))
	if w.status >= http.StatusBadRequest {
		if ctx.Err() != nil {
			return rendering{every: maxInterval}, fmt.Errorf("the page took longer than %s", lasted(renderTimeout))
		}
		return rendering{every: maxInterval}, fmt.Errorf("the page responds with status %d", w.status)
	}
	every := max(w.interval, time.Duration(statements.Load())*intervalPerStatement)
	return rendering{html: w.Bytes(), asOf: w.asOf, source: w.source, every: every}, nil
}

type liveKey struct{}

// liveResponse is a rendering of live sections and its render interval.
type liveResponse struct {
	response

	interval time.Duration
	asOf     time.Time // see rendering
	source   string
}

// isLive returns the response for the live sections of a page, and whether the request is for these sections only.
func isLive(ctx context.Context) (*liveResponse, bool) {
	w, ok := ctx.Value(liveKey{}).(*liveResponse)
	return w, ok
}
