package console_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/cdproto/target"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

func TestMain(m *testing.M) {
	code := m.Run()
	browser.stop()
	postgrestest.Stop()
	os.Exit(code)
}

const (
	// waitTimeout limits every wait for a state. It is long, because the test machine may be busy.
	waitTimeout = 5 * time.Minute
	// evaluateTimeout limits a single evaluation in the browser: a page that is being left may never answer.
	evaluateTimeout = 10 * time.Second
	// pollInterval is the interval at which a state is polled.
	pollInterval = 20 * time.Millisecond
)

// browser is shared by all tests. Each test has its own tabs and cookies.
var browser chromium

type chromium struct {
	once   sync.Once
	ctx    context.Context
	cancel []context.CancelFunc
	err    error
}

func (c *chromium) start() (context.Context, error) {
	c.once.Do(func() {
		path := os.Getenv("DLQD_TEST_CHROMIUM")
		// The headless shell takes half the time of a browser's headless mode.
		for _, name := range []string{"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"} {
			if path == "" {
				path, _ = exec.LookPath(name)
			}
		}
		if path == "" {
			c.err = fmt.Errorf("chromium is not on PATH and DLQD_TEST_CHROMIUM is not set; install it with scripts/install.sh " +
				"chromium")
			return
		}
		ctx, cancel := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
			chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.DisableGPU, chromedp.Flag("disable-dev-shm-usage", true),
			chromedp.WSURLReadTimeout(waitTimeout))...)
		c.cancel = append(c.cancel, cancel)
		// WithErrorf drops errors about events that chromedp does not know.
		c.ctx, cancel = chromedp.NewContext(ctx, chromedp.WithErrorf(func(string, ...any) {}))
		c.cancel = append(c.cancel, cancel)
		c.err = chromedp.Run(c.ctx)
	})
	return c.ctx, c.err
}

// stop closes the browser. Killing its process is not enough, because that process may be Debian's wrapper script.
func (c *chromium) stop() {
	if c.ctx != nil {
		_ = chromedp.Cancel(c.ctx)
	}
	for _, cancel := range c.cancel {
		defer cancel()
	}
}

// testServer is a whole dlqd on its own database, with a receiver that answers with the status in a message's payload
// ({"answer": 503}). Once receiverWorks is set, the receiver accepts all messages except those that request 410.
type testServer struct {
	*testing.T

	base          string
	url           string
	pool          *pgxpool.Pool
	receiverWorks *atomic.Bool
	config        server.Config
	stop          func()
}

func open(t *testing.T, change func(*server.Config)) *testServer {
	t.Helper()
	o := &testServer{T: t, url: postgrestest.URL(t), receiverWorks: &atomic.Bool{}}
	o.pool = postgrestest.Open(t, o.url)
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var asks struct {
			Answer  int
			Says    string
			Payload struct {
				Answer int
				Says   string
			}
		}
		raw, _ := io.ReadAll(r.Body)
		_ = json.Unmarshal(raw, &asks)
		status, says := max(asks.Answer, asks.Payload.Answer), asks.Says+asks.Payload.Says
		if status == 0 || o.receiverWorks.Load() && status != http.StatusGone {
			return
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, says)
	}))
	t.Cleanup(receiver.Close)
	rules, err := policy.Default(receiver.URL)
	require.NoError(t, err)
	for _, name := range []string{"payments", "orders"} {
		queue := *rules.Queues["default"]
		rules.Queues[name] = &queue
	}
	for _, queue := range rules.Queues {
		queue.MaxAttempts = 1
	}
	o.config = server.Config{
		DatabaseURL: o.url, Schemas: postgres.DefaultSchemas(), API: true, Process: true, DLQWorkers: true,
		Listen: []string{"127.0.0.1:0"}, Policy: rules, Logger: logger(),
		MaxConns: postgrestest.MaxConns, StopTimeout: 20 * time.Second,
		Measure: func(context.Context) (breaker.Load, error) { return breaker.Load{}, nil },
	}
	if change != nil {
		change(&o.config)
	}
	o.start()
	t.Cleanup(func() { o.stop() })
	return o
}

// in returns the testServer for a subtest.
func (o *testServer) in(t *testing.T) *testServer {
	t.Helper()
	in := *o
	in.T = t
	return &in
}

// start starts the server, or starts it again at the same address.
func (o *testServer) start() {
	o.Helper()
	s, err := server.Start(context.WithoutCancel(o.Context()), o.config)
	require.NoError(o, err)
	o.base = s.Addresses()[0]
	o.config.Listen = []string{strings.TrimPrefix(o.base, "http://")}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- s.Wait(ctx, context.Background()) }()
	o.stop = sync.OnceFunc(func() {
		cancel()
		require.NoError(o, <-stopped)
	})
}

func (o *testServer) exec(sql string, args ...any) {
	o.Helper()
	_, err := o.pool.Exec(o.Context(), sql, args...)
	require.NoError(o, err, sql)
}

func (o *testServer) count(sql string, args ...any) (n int) {
	o.Helper()
	require.NoError(o, o.pool.QueryRow(o.Context(), sql, args...).Scan(&n), sql)
	return n
}

func (o *testServer) text(sql string, args ...any) (text string) {
	o.Helper()
	require.NoError(o, o.pool.QueryRow(o.Context(), sql, args...).Scan(&text), sql)
	return text
}

// eventually waits until a count reaches want.
func (o *testServer) eventually(want int, sql string, args ...any) {
	o.Helper()
	require.Eventually(o, func() bool { return o.count(sql, args...) == want }, waitTimeout, 50*time.Millisecond,
		"%s: want %d", sql, want)
}

// submit submits a message as a client does.
func (o *testServer) submit(queue, id, kind string, payload any) {
	o.Helper()
	body, err := json.Marshal(map[string]any{"messageId": id, "queue": queue, "kind": kind, "payload": payload})
	require.NoError(o, err)
	o.post(string(body))
}

// post submits a message given as JSON.
func (o *testServer) post(body string) {
	o.Helper()
	request, err := http.NewRequestWithContext(o.Context(), http.MethodPost, o.base+"/api/messages",
		strings.NewReader(body))
	require.NoError(o, err)
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	require.NoError(o, err)
	defer response.Body.Close()
	raw, _ := io.ReadAll(response.Body)
	require.Equal(o, http.StatusAccepted, response.StatusCode, string(raw))
}

// entry waits until a message has a dead letter with the status, and returns its id.
func (o *testServer) entry(message, status string) string {
	o.Helper()
	o.eventually(1, "SELECT count(*) FROM dlq.dead_letter_queue WHERE event_id = $1 AND status = $2 AND stage <> 'inbox'",
		message, status)
	return o.text("SELECT id::text FROM dlq.dead_letter_queue WHERE event_id = $1", message)
}

// fail inserts n jobs of an application and ends them as discarded in one statement, so that the trigger captures them.
// It waits until they are filed.
func (o *testServer) fail(queue, kind, problem string, n int) {
	o.Helper()
	const filed = "SELECT count(*) FROM dlq.dead_letter_open WHERE queue = $1 AND kind = $2"
	before := o.count(filed, queue, kind)
	failure, err := json.Marshal(map[string]any{"at": time.Now().UTC(), "attempt": 1, "error": problem, "trace": ""})
	require.NoError(o, err)
	o.exec(`INSERT INTO river_job (kind, args, queue, max_attempts, attempt, attempted_at, state)
		SELECT $2, jsonb_build_object('customer', i % 100, 'n', i), $1, 1, 1, now(), 'running'
		FROM generate_series(1, $3::int) i`, queue, kind, n)
	o.exec(`UPDATE river_job SET state = 'discarded', finalized_at = clock_timestamp(), errors = ARRAY[$3::jsonb]
		WHERE queue = $1 AND kind = $2 AND state = 'running'`, queue, kind, string(failure))
	o.eventually(before+n, filed, queue, kind)
}

// token creates a token.
func (o *testServer) token(name string, role access.Role) string {
	o.Helper()
	secret, err := access.NewStore(o.pool, postgres.DefaultSchemas()).Create(o.Context(),
		&access.Token{Name: name, Role: role}, "test")
	require.NoError(o, err)
	return secret
}

func withTokens(c *server.Config) { c.Policy.Access.Authentication = []string{"tokens"} }

// tab is a tab of the browser, with the cookies of one user.
type tab struct {
	*testing.T

	o   *testServer
	ctx context.Context //nolint:containedctx // it is the tab

	mu        sync.Mutex
	clicks    int // number of clicks and filled fields
	scriptOff bool
	began     time.Time // when an incident began
	problems  []string  // errors and warnings of the browser
	allowed   []string  // parts of problems that the test provokes
}

func (o *testServer) tab() *tab {
	t := o.T
	t.Helper()
	parent, err := browser.start()
	require.NoError(t, err)
	var id target.ID
	var profile cdp.BrowserContextID
	require.NoError(t, chromedp.Run(parent, chromedp.ActionFunc(func(ctx context.Context) (err error) {
		ctx = cdp.WithExecutor(ctx, chromedp.FromContext(ctx).Browser)
		if profile, err = target.CreateBrowserContext().Do(ctx); err != nil {
			return err
		}
		id, err = target.CreateTarget("about:blank").WithBrowserContextID(profile).WithNewWindow(true).Do(ctx)
		return err
	})))
	ctx, cancel := chromedp.NewContext(parent, chromedp.WithTargetID(id))
	b := &tab{T: t, o: o, ctx: ctx}
	t.Cleanup(func() {
		b.mu.Lock()
		problems := b.problems
		b.mu.Unlock()
		cancel()
		_ = chromedp.Run(parent, chromedp.ActionFunc(func(ctx context.Context) error {
			return target.DisposeBrowserContext(profile).Do(cdp.WithExecutor(ctx, chromedp.FromContext(ctx).Browser))
		}))
		for _, problem := range problems {
			if !t.Failed() && !b.isAllowed(problem) {
				t.Errorf("browser: %s", problem)
			}
		}
	})
	chromedp.ListenTarget(ctx, func(event any) {
		switch e := event.(type) {
		case *runtime.EventExceptionThrown:
			b.addProblem(e.ExceptionDetails.Error())
		case *runtime.EventConsoleAPICalled:
			if e.Type == runtime.APITypeError || e.Type == runtime.APITypeWarning || e.Type == runtime.APITypeAssert {
				for _, arg := range e.Args {
					b.addProblem("console: " + string(arg.Value))
				}
			}
		case *log.EventEntryAdded: // includes violations of the Content-Security-Policy
			if e.Entry.Level == log.LevelError || e.Entry.Level == log.LevelWarning || e.Entry.Source == log.SourceSecurity {
				b.addProblem(e.Entry.Text + " " + e.Entry.URL)
			}
		case *page.EventJavascriptDialogOpening:
			b.addProblem("dialog: " + e.Message)
			go func() { _ = chromedp.Run(ctx, page.HandleJavaScriptDialog(false)) }()
		}
	})
	// no timeout: chromedp closes the tab when the context of its first Run ends
	require.NoError(t, chromedp.Run(ctx, log.Enable(), runtime.Enable(), page.Enable()))
	b.size(1440, 900)
	return b
}

func (b *tab) addProblem(problem string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.problems = append(b.problems, problem)
}

// allow permits problems that contain part, because the test provokes them.
func (b *tab) allow(part string) { b.allowed = append(b.allowed, part) }

func (b *tab) isAllowed(problem string) bool {
	for _, part := range b.allowed {
		if strings.Contains(problem, part) {
			return true
		}
	}
	return false
}

func (b *tab) run(actions ...chromedp.Action) {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, waitTimeout)
	defer cancel()
	require.NoError(b, chromedp.Run(ctx, actions...))
}

// size sets the size of the window.
func (b *tab) size(width, height int64) {
	b.Helper()
	b.run(emulation.SetDeviceMetricsOverride(width, height, 1, width < 600))
}

// theme sets the system's preference: light or dark.
func (b *tab) theme(name string) {
	b.Helper()
	b.run(emulation.SetEmulatedMedia().WithFeatures(
		[]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: name}}))
}

// script switches the page's own scripts on or off from the next page on.
func (b *tab) script(on bool) {
	b.Helper()
	b.run(emulation.SetScriptExecutionDisabled(!on))
	b.scriptOff = !on
}

// open opens a page. If the page is a list whose search stopped before it found a row, open reloads it.
func (b *tab) open(path string) {
	b.Helper()
	b.await("the rows of "+path, func() bool {
		b.run(chromedp.Navigate(b.o.base + path))
		return b.value(`document.body.innerText.includes("Continue the search") &&
			document.querySelector("[data-row]") === null`) == false
	})
}

// rows waits until the list has n rows. If the search stopped early, as it may on a busy machine, rows reloads the
// page.
func (b *tab) rows(n int) {
	b.Helper()
	b.reloadUntil(fmt.Sprintf(`document.querySelectorAll("[data-row]").length === %d`, n), "Continue the search")
}

// reloadUntil waits until an expression is true in the page. While the page shows the text outOfTime, reloadUntil
// reloads it.
func (b *tab) reloadUntil(expression, outOfTime string) {
	b.Helper()
	b.await(expression, func() bool {
		var is, stopped bool
		if b.tryEvaluate("!!("+expression+")", &is) && is {
			return true
		}
		if b.tryEvaluate(fmt.Sprintf("document.body.innerText.includes(%s)", quoted(outOfTime)), &stopped) && stopped {
			b.run(chromedp.Reload())
		}
		return false
	})
}

// waitForTextOf waits until the first element that matches a selector has this text.
func (b *tab) waitForTextOf(selector, text string) {
	b.Helper()
	b.until(fmt.Sprintf(`document.querySelector(%s)?.innerText === %s`, quoted(selector), quoted(text)))
}

// completed waits until the filter has this text and shows its completions.
func (b *tab) completed(text string) {
	b.Helper()
	const both = `[document.querySelector("[data-filter]").value, document.querySelector("#completions:not([hidden])")?.dataset.for]`
	b.until(both + ".every(text => text === " + quoted(text) + ")")
}

// signIn signs in with a token on the sign-in page.
func (b *tab) signIn(secret string) {
	b.Helper()
	b.open("/sign-in")
	b.fill("input[name=token]", secret)
	b.navigate(func() { b.press(kb.Enter) })
	b.until(`location.pathname === "/"`)
}

// value evaluates an expression in the page.
func (b *tab) value(expression string) any {
	b.Helper()
	var value any
	b.run(chromedp.Evaluate(expression, &value))
	return value
}

func (b *tab) texts(selector string) string {
	b.Helper()
	text, _ := b.value(fmt.Sprintf("[...document.querySelectorAll(%q)].map(e => e.innerText).join('\\n')",
		selector)).(string)
	return text
}

// tryEvaluate evaluates an expression in the page. It returns false if the page is being left.
func (b *tab) tryEvaluate(expression string, result any) bool {
	ctx, cancel := context.WithTimeout(b.ctx, evaluateTimeout)
	defer cancel()
	return chromedp.Run(ctx, chromedp.Evaluate(expression, result)) == nil
}

// await waits until done returns true.
func (b *tab) await(what string, done func() bool) {
	b.Helper()
	for until := time.Now().Add(waitTimeout); !done(); time.Sleep(pollInterval) {
		if time.Now().After(until) {
			require.FailNow(b, "timed out", "%s; the page: %s", what, b.now())
		}
	}
}

// until waits until an expression is true in the page. The page may change meanwhile.
func (b *tab) until(expression string) {
	b.Helper()
	b.await(expression, func() bool {
		var is bool
		return b.tryEvaluate("!!("+expression+")", &is) && is
	})
}

// now returns the content of the page, for failure messages.
func (b *tab) now() (text string) {
	b.tryEvaluate(`location.href + " " + document.readyState + "\n" + (document.querySelector(".flash, .trouble-page, .sign-in, main") ?? document.body).innerText.replace(/\s+/g, " ").slice(0, 900)`, &text)
	return text
}

// waitForText waits until the page shows a text.
func (b *tab) waitForText(text string) {
	b.Helper()
	b.until(fmt.Sprintf("document.body.innerText.includes(%s)", quoted(text)))
}

func quoted(text string) string {
	raw, err := json.Marshal(text)
	if err != nil {
		panic(err) // unreachable for a string
	}
	return string(raw)
}

// navigate runs an action that leads to another page, and waits until that page is loaded.
func (b *tab) navigate(act func()) {
	b.Helper()
	b.value("void (window.pageBefore = true)")
	act()
	b.until(`!window.pageBefore && document.readyState === "complete"`)
}

// click clicks the first element that matches a selector, as a mouse does. A live section may move meanwhile, so click
// checks which element it has pressed. If it is another element, click releases the button elsewhere and tries again.
// It also tries again if the element moves before the release.
func (b *tab) click(selector string) {
	b.Helper()
	b.clicks++
	find := "document.querySelector(" + quoted(selector) + ")"
	if text, is := strings.CutPrefix(selector, byText); is {
		find = ofText(text)
	}
	b.await("a click of "+selector, func() bool {
		var at []float64
		if !b.tryEvaluate(fmt.Sprintf(placeOf, find), &at) || len(at) != 2 {
			return false
		}
		b.run(mouse(input.MousePressed, at[0], at[1]))
		var pressed bool
		if !b.tryEvaluate(`window.aim?.matches(":active") ?? false`, &pressed) || !pressed {
			b.run(mouse(input.MouseReleased, 0, 0))
			return false
		}
		ctx, cancel := context.WithTimeout(b.ctx, evaluateTimeout)
		defer cancel()
		_ = chromedp.Run(ctx, mouse(input.MouseReleased, at[0], at[1])) // a page that is being left may not answer
		var missed bool                                                 // without scripts, no event reports a missed click
		return b.scriptOff || !b.tryEvaluate("window.clicked === false", &missed) || !missed
	})
}

// placeOf returns the middle of an element in the window, or nothing if the element is hidden or
// covered.
const placeOf = `(() => {
	const found = %s;
	if (!found?.checkVisibility()) return [];
	found.scrollIntoView({block: "center"});
	const {x, y, width, height} = found.getClientRects()[0] ?? {};
	const at = [x + width / 2, y + height / 2];
	window.aim = found;
	window.clicked = false;
	found.addEventListener("click", () => window.clicked = true);
	return found.contains(document.elementFromPoint(...at)) ? at : [];
})()`

func mouse(what input.MouseType, x, y float64) chromedp.Action {
	return input.DispatchMouseEvent(what, x, y).WithButton(input.Left).WithClickCount(1)
}

// follow clicks an element that leads to another page, and waits until that page is loaded.
func (b *tab) follow(selector string) {
	b.Helper()
	b.navigate(func() { b.click(selector) })
}

// byText is the prefix of selectors that match an element by its text.
const byText = "the text "

// button returns a selector of a button or link by its text, for click and follow.
func (b *tab) button(text string) string {
	b.Helper()
	b.until(ofText(text))
	return byText + text
}

// ofText returns an expression that finds a button or link by its text.
func ofText(text string) string {
	return fmt.Sprintf(`[...document.querySelectorAll("main button, main a, main summary, .flash button, .flash a, .top button")].find(e => e.checkVisibility() && e.innerText.trim().startsWith(%s))`, quoted(text))
}

// fill replaces the content of a field.
func (b *tab) fill(selector, text string) {
	b.Helper()
	b.click(selector)
	field := "document.querySelector(" + quoted(selector) + ")"
	b.until("document.activeElement === " + field)
	b.value(field + ".select()")
	b.run(insert(text))
	b.until(field + ".value === " + quoted(text))
}

// insert types a text into the focused element.
func insert(text string) chromedp.Action { return input.InsertText(text) }

// press presses keys one after the other.
func (b *tab) press(keys string) {
	b.Helper()
	for _, key := range keys {
		events := kb.Encode(key)
		if len(events) == 3 { // the key's text is part of its keydown, so a page that handles the key can suppress it
			events[0].Text, events[0].UnmodifiedText = events[1].Text, events[1].UnmodifiedText
			events = slices.Delete(events, 1, 2)
		}
		for _, event := range events {
			b.run(event)
		}
	}
}

func listOf(q string) string { return "/dead-letters?q=" + url.QueryEscape(q) }

// logger discards the servers' logs, or writes them to standard error with DLQD_TEST_LOG=1.
func logger() *slog.Logger {
	if os.Getenv("DLQD_TEST_LOG") != "" {
		return slog.New(slog.NewTextHandler(os.Stderr, nil))
	}
	return slog.New(slog.DiscardHandler)
}
