package console

import (
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
	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// minEvery and maxEvery bound how often the live parts of a page are made anew.
	minEvery = time.Second
	maxEvery = time.Minute
	// perStatement is how long a page waits for each statement that it takes before it is made anew: an open page costs the database less
	// than one a second, whatever it shows.
	perStatement = 1100 * time.Millisecond
	// maxLive bounds the different pages that one person has live at once, in this process: each is made anew on its own.
	maxLive = 30
	// maxMaking limits how many pages this process renders at once. An act wakes many pages, a page takes up
	// to four connections, and River shares the pool.
	maxMaking = 4
	// renderTimeout bounds one making of them.
	renderTimeout = 15 * time.Second
	// beatEvery is how often a stream sends an event and checks that its viewer is still permitted. The page
	// then says within five seconds that the server or the database does not answer, or that its viewer is
	// signed out.
	beatEvery = time.Second
	// While pages are live, the process asks every reachEvery, once for all streams, whether the database
	// answers within reachTimeout.
	reachEvery   = 1500 * time.Millisecond
	reachTimeout = 2 * time.Second
)

// errUnreachable is what pages show when the database does not answer.
var errUnreachable = errors.New("the database does not answer")

// live makes the live parts of the pages that are open anew, once for all who look at the same page with the same rights: two hundred
// open pages cost the database what one costs.
type live struct {
	render func(ctx context.Context, from *http.Request, address string) (html []byte, every time.Duration, err error)
	reach  func(ctx context.Context) error // fails if the database does not answer; nil: never asked

	mu          sync.Mutex
	topics      map[string]*topic
	making      chan struct{} // limits pages that are being rendered to maxMaking
	reaching    bool          // keepReaching runs
	unreachable error         // of its last question
}

// topic is one page, for those who have the same rights.
type topic struct {
	path     string // of the page, without its parameters
	watchers map[chan event]watcher
	cancel   context.CancelFunc
	wake     chan struct{} // of capacity one: asks for a rendering now
}

// watcher is an open page of a person. A rendering that began before since may be older than the page
// itself, and is not sent to it.
type watcher struct {
	person string
	since  time.Time
}

// event is a rendering of a page.
type event struct {
	at   time.Time // its begin
	html []byte
	sum  uint64
	err  error
}

// watch has events of a page sent to a person, until done is called. It is false where they have too many others open.
func (l *live) watch(ctx context.Context, from *http.Request, person, key, address string) (events chan event, done func(), ok bool) {
	events = make(chan event, 1)
	l.mu.Lock()
	defer l.mu.Unlock()
	others := 0
	for other, t := range l.topics {
		if other == key {
			continue
		}
		for _, who := range t.watchers {
			if who.person == person {
				others++
				break
			}
		}
	}
	if others >= maxLive {
		return nil, nil, false
	}
	t := l.topics[key]
	if t == nil {
		if l.topics == nil {
			l.topics, l.making = map[string]*topic{}, make(chan struct{}, maxMaking)
		}
		shared, cancel := context.WithCancel(context.WithoutCancel(ctx))
		path, _, _ := strings.Cut(address, "?")
		t = &topic{path: path, watchers: map[chan event]watcher{}, cancel: cancel, wake: make(chan struct{}, 1)}
		l.topics[key] = t
		// Deferred: its first rendering must begin after since of this watcher.
		defer func() { go l.run(shared, t, from.Clone(shared), address) }()
	}
	if l.reach != nil && !l.reaching {
		l.reaching = true
		go l.keepReaching(context.WithoutCancel(ctx))
	}
	t.watchers[events] = watcher{person: person, since: time.Now()}
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
		case l.making <- struct{}{}:
		case <-ctx.Done():
			return
		}
		select { // this rendering answers every wake-up so far
		case <-t.wake:
		default:
		}
		began := time.Now()
		timed, cancel := context.WithTimeout(ctx, renderTimeout)
		html, every, err := l.render(timed, from, address)
		cancel()
		<-l.making
		took := time.Since(began)
		t.send(&l.mu, event{at: began, html: html, sum: maphash.Bytes(seed, html), err: err})
		select {
		case <-ctx.Done():
			return
		case <-time.After(min(max(every, minEvery), maxEvery)):
		case <-t.wake:
			select {
			case <-ctx.Done():
				return
			case <-time.After(max(minEvery-took, took)): // a slow page is rendered at most half of the time
			}
		}
	}
}

// send sends a rendering to the watchers whose page is not newer.
func (t *topic) send(mu *sync.Mutex, now event) {
	mu.Lock()
	defer mu.Unlock()
	for events, who := range t.watchers {
		if now.at.Before(who.since) {
			continue // this watcher has woken the topic: the next rendering follows
		}
		select {
		case <-events: // replaces a rendering that was not taken yet
		default:
		}
		events <- now
	}
}

func (t *topic) wakeUp() {
	select {
	case t.wake <- struct{}{}:
	default:
	}
}

// wake asks for renderings of all pages, or of the pages at some paths and below.
func (l *live) wake(paths ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, t := range l.topics {
		if len(paths) == 0 || slices.ContainsFunc(paths, func(path string) bool {
			return t.path == path || strings.HasPrefix(t.path, path+"/")
		}) {
			t.wakeUp()
		}
	}
}

// keepReaching asks whether the database answers until no page is live. When the database answers again,
// all pages are rendered.
func (l *live) keepReaching(ctx context.Context) {
	for {
		timed, cancel := context.WithTimeout(ctx, reachTimeout)
		err := l.reach(timed)
		cancel()
		if err != nil {
			err = errUnreachable
		}
		l.mu.Lock()
		again := l.unreachable != nil && err == nil
		l.unreachable = err
		if len(l.topics) == 0 {
			l.reaching, l.unreachable = false, nil
			l.mu.Unlock()
			return
		}
		l.mu.Unlock()
		if again {
			l.wake()
		}
		time.Sleep(reachEvery)
	}
}

// trouble returns why pages cannot be rendered at the moment, or nil.
func (l *live) trouble() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.unreachable
}

// events streams a page's live parts as they change. What it makes is what the page itself would show to the same person.
func (c *Console) events(w http.ResponseWriter, r *http.Request) {
	address := r.URL.Query().Get("page")
	if !access.LocalPath(address) || strings.HasPrefix(address, "/events") {
		c.answer(w, c.request(r), nil, &Problem{Status: http.StatusUnprocessableEntity, Title: "No such page", Detail: "page is the path of a page"})
		return
	}
	p := access.From(r.Context())
	address = canonical(address)
	w.Header().Set("Content-Type", "text/event-stream")
	w.WriteHeader(http.StatusOK)
	control := http.NewResponseController(w)
	_ = control.Flush()
	watched, done, ok := c.live.watch(r.Context(), r, p.Via+" "+p.Name, rightsOf(p)+personal(address, p)+address, address)
	if !ok { // (a status other than 200 would say nothing to the page's script.)
		_, _ = fmt.Fprintf(w, "event: refused\ndata: %d of your pages are live; this one is loaded anew each minute\n\n", maxLive)
		return
	}
	defer done()
	var shown uint64
	var failed error // of the latest rendering
	beat := time.NewTicker(beatEvery)
	defer beat.Stop()
	say := func(name, data string) bool {
		_, err := fmt.Fprintf(w, "event: %s\ndata: %s\n\n", name, strings.ReplaceAll(data, "\n", "\ndata: "))
		return err == nil && control.Flush() == nil
	}
	for {
		var fresh *event
		select {
		case <-r.Context().Done():
			return
		case e := <-watched:
			fresh = &e
		case <-beat.C:
		}
		if c.Ready != nil && c.Ready() != nil {
			return
		}
		// Without the database, access.Still would fail for everyone.
		if trouble := c.live.trouble(); trouble != nil && fresh == nil {
			if !say("trouble", trouble.Error()) {
				return
			}
			continue
		}
		if !access.Still(r.Context()) {
			say("ended", "")
			return
		}
		if fresh != nil {
			failed = fresh.err
		}
		var sent bool
		switch {
		case failed != nil:
			sent = say("trouble", failed.Error())
		case fresh == nil:
			sent = say("beat", "")
		case fresh.sum == shown:
			sent = say("same", fresh.at.UTC().Format(time.RFC3339))
		default:
			shown = fresh.sum
			_, err := fmt.Fprintf(w, "id: %s\n", fresh.at.UTC().Format(time.RFC3339))
			sent = err == nil && say("page", string(fresh.html))
		}
		if !sent {
			return
		}
	}
}

// parameters are those that live pages look at. Others change nothing, and make no page of their own.
var parameters = func() []string {
	ofAudit := auditFields()
	names := make([]string, len(ofAudit))
	for i, f := range ofAudit {
		names[i] = f.Name
	}
	return slices.Concat(names, []string{"q", "order", "cursor", "column", "outcome", "status", "queue", "owner", "over", "hasOpen", "whose", "at", "people"})
}()

// canonical is an address in one way of writing, with the parameters alone that a page looks at.
func canonical(address string) string {
	u, err := url.Parse(address)
	if err != nil {
		return address // access.LocalPath has parsed it
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

// shared are the pages that show the same to all who have the same rights, unless their address speaks of me.
var shared = regexp.MustCompile(`^/(|dead-letters(/[0-9a-f-]{36})?|groups(/[^/]+/[^/]+)?|queues|replays(/[0-9a-f-]{36})?)$`)

// personal is whose page it is; "" where it is anybody's with the same rights.
func personal(address string, p *access.Principal) string {
	u, err := url.Parse(address)
	if err == nil && u.EscapedPath() == u.Path && shared.MatchString(u.Path) {
		if query, err := url.QueryUnescape(u.RawQuery); err == nil && !strings.Contains(strings.ToLower(query), "me") {
			return ""
		}
	}
	return p.Via + " " + p.Name
}

// renderLive makes the main part of the page at an address, for who is in ctx. A page that panics is an error: nobody else would catch it, as
// net/http does for a page that is loaded.
func (c *Console) renderLive(ctx context.Context, from *http.Request, address string) (html []byte, every time.Duration, err error) {
	defer func() {
		if p := recover(); p != nil {
			c.Logger.Error("a page panicked", "path", address, "error", background.Panicked(p))
			html, every, err = nil, maxEvery, errors.New("the page failed")
		}
	}()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil) //nolint:gosec // it goes nowhere: a handler of this process is called
	if err != nil {
		return nil, maxEvery, err
	}
	r.RemoteAddr, r.Host = from.RemoteAddr, from.Host
	r.Header.Set("User-Agent", from.UserAgent())
	w := &liveResponse{response: response{header: http.Header{}}}
	ctx, statements := postgres.Counting(ctx)
	c.mux.ServeHTTP(w, r.WithContext(context.WithValue(ctx, liveKey{}, w)))
	if w.status >= http.StatusBadRequest {
		return nil, maxEvery, fmt.Errorf("the page answers %d", w.status)
	}
	return w.Bytes(), max(w.every, time.Duration(statements.Load())*perStatement), nil
}

type liveKey struct{}

// liveResponse is the live parts of a page, and how often they are to be made.
type liveResponse struct {
	response

	every time.Duration
}

// isLive reports whether only the live parts of a page are asked for.
func isLive(ctx context.Context) (*liveResponse, bool) {
	w, ok := ctx.Value(liveKey{}).(*liveResponse)
	return w, ok
}
