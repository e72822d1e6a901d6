package demo

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

const (
	messages = 400
	senders  = 8
	// maxFaultDuration bounds how long the receiver fails, if the demo does not end the failures earlier.
	maxFaultDuration = 5 * time.Minute
	// settleTimeout bounds the time until each message is delivered or its dead letter is decided.
	settleTimeout = time.Minute
	watchInterval = 200 * time.Millisecond
	stopTimeout   = 10 * time.Second
)

// ErrCountMismatch means that a message is missing from the counts, was not accepted, or is still in progress.
var ErrCountMismatch = errors.New("the demo's message counts do not match")

// Options configure a demo.
type Options struct {
	Program     string // path of this program
	PostgresBin string // directory of the Postgres programs; if empty, they are searched for
	// Alerts makes the demo show alerts. Without it, the demo shows what happens to messages.
	Alerts bool
}

// Run runs the demo and prints events to out.
func Run(ctx, hard context.Context, options Options, out io.Writer) error {
	dir, err := os.MkdirTemp("", "dlqd-demo-")
	if err != nil {
		return err
	}
	// The server may run as another user, who must be able to pass through this directory to the server's data.
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // it can be entered, not read
		return err
	}
	d := &demo{out: out, dir: dir, program: options.Program}
	faults, breakers := maxFaultDuration, demoBreakers
	if options.Alerts {
		faults, breakers = alertFaultDuration, alertBreakers
	}
	receiver, stopReceiver, err := d.startReceiver(ctx, faults)
	if err != nil {
		return err
	}
	defer stopReceiver()
	rules, err := d.writePolicy(receiver, breakers)
	if err != nil {
		return err
	}
	logFile, err := os.Create(filepath.Join(dir, "dlqd.log"))
	if err != nil {
		return err
	}
	defer func() { _ = logFile.Close() }()

	d.printf("starting dlqd with a temporary Postgres in %s", dir)
	s, err := server.Start(ctx, server.Config{
		DataDir: filepath.Join(dir, "data"), PostgresBin: options.PostgresBin, Schemas: postgres.DefaultSchemas(),
		API: true, Process: true, DLQWorkers: true, Listen: []string{"127.0.0.1:0"},
		Policy: rules, PollInterval: watchInterval, StopTimeout: stopTimeout,
		Logger: slog.New(slog.NewTextHandler(logFile, nil)),
	})
	if err != nil {
		return err
	}
	runCtx, stop := context.WithCancel(ctx)
	stopped := make(chan error, 1)
	go func() { stopped <- s.Wait(runCtx, hard) }()

	d.api, d.pool = s.Addresses()[0], s.Pool()
	if options.Alerts {
		err = d.runAlerts(ctx)
	} else {
		err = d.run(ctx, receiver.url)
	}
	stop()
	err = errors.Join(err, <-stopped)
	if err == nil {
		d.printNextSteps(receiver.url)
	}
	return err
}

type demo struct {
	out     io.Writer
	dir     string
	program string
	api     string
	pool    *pgxpool.Pool

	accepted atomic.Int64
}

func (d *demo) printf(format string, args ...any) { _, _ = fmt.Fprintf(d.out, format+"\n", args...) }

type receiverAddresses struct{ url, refusing string }

// startReceiver starts the receiver as a separate process, like a real receiver.
func (d *demo) startReceiver(ctx context.Context, faults time.Duration) (receiverAddresses, func(), error) {
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, d.program, "receiver", "--listen", "127.0.0.1:0", "--troubles", faults.String()) //nolint:gosec // this program itself
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = stopTimeout
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		cancel()
		return receiverAddresses{}, nil, err
	}
	if err := cmd.Start(); err != nil {
		cancel()
		return receiverAddresses{}, nil, err
	}
	stop := func() {
		cancel()
		_ = cmd.Wait()
	}
	lines := bufio.NewScanner(stdout)
	var found []string
	for len(found) < 2 && lines.Scan() {
		if _, url, ok := strings.Cut(lines.Text(), "http://"); ok {
			found = append(found, "http://"+url)
		}
	}
	if len(found) < 2 {
		stop()
		return receiverAddresses{}, nil, errors.New("the receiver did not start")
	}
	return receiverAddresses{found[0], found[1]}, stop, nil
}

// Durations that are minutes in production are seconds in the demo.
const (
	demoBreakers = "defaults: {consecutiveFailures: 10, openFor: 1s}\n"
	demoRouting  = `strategies:
  immediate: {delays: [1s, 1s, 1s, 2s, 2s]}
  scheduled: {delays: [1s, 1s, 1s, 2s, 2s]}
  # The demo's own load is on this machine.
  conditional: {delays: [1s, 1s, 1s, 2s, 2s], conditions: {cpuBelow: 0, memoryBelow: 0}}
`
)

func (d *demo) writePolicy(r receiverAddresses, breakers string) (*policy.Policy, error) {
	var queues strings.Builder
	queues.WriteString("# Written by the demo: one queue for each service, with short times to watch them pass.\n" +
		"defaults: {backoff: {delay: 200ms}, timeout: 1s, whenOpen: accept}\nqueues:\n")
	services := []string{"payments", "orders", "invoices", "notifications", "documents", "exports"}
	for _, service := range services {
		_, _ = fmt.Fprintf(&queues, "  %s: {destination: %s}\n", service, service)
	}
	queues.WriteString("destinations:\n")
	for _, service := range services {
		address := r.url
		if service == "exports" {
			address = r.refusing
		}
		_, _ = fmt.Fprintf(&queues, "  %s: {url: \"%s/%s\"}\n", service, address, service)
	}
	dir := filepath.Join(d.dir, "config")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	for name, text := range map[string]string{
		"retry-policies": queues.String(), "circuit-breaker": breakers,
		"dlq-routing": demoRouting, "worker-pool": "defaults: {concurrency: 20}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	return policy.Load(policy.Source{Dir: dir})
}

func (d *demo) run(ctx context.Context, receiver string) error {
	d.printf("sending %d messages to six services; exports refuses connections, the others behave like real services",
		messages)
	sent := make(chan error, 1)
	go func() { sent <- d.send(ctx) }()
	if err := d.watch(ctx, receiver, sent); err != nil {
		return err
	}
	return d.summary(ctx, receiver)
}

func (d *demo) send(ctx context.Context) error {
	var failed atomic.Pointer[error]
	var wg sync.WaitGroup
	for sender := range senders {
		wg.Go(func() {
			for i := sender; i < messages && failed.Load() == nil; i += senders {
				if err := d.post(ctx, example(i)); err != nil {
					failed.Store(&err)
					return
				}
				d.accepted.Add(1)
			}
		})
	}
	wg.Wait()
	if err := failed.Load(); err != nil {
		return *err
	}
	return nil
}

// example returns a realistic message.
func example(i int) map[string]any {
	customer := fmt.Sprintf("cus_%04d", rand.IntN(500))
	amount := 100 + rand.IntN(20_000)
	kinds := []struct {
		queue, kind string
		payload     map[string]any
	}{
		{"payments", "payment.captured", map[string]any{
			"paymentId": fmt.Sprintf("pay_%06d", i), "customer": customer, "amount": amount, "currency": "EUR",
		}},
		{"orders", "order.placed", map[string]any{
			"orderId": fmt.Sprintf("ord_%06d", i), "customer": customer,
			"lines": []map[string]any{{"sku": "A-81", "quantity": 1 + rand.IntN(5)}},
		}},
		{"invoices", "invoice.issued", map[string]any{
			"invoiceId": fmt.Sprintf("inv_%06d", i), "customer": customer, "total": amount,
		}},
		{"notifications", "notification.requested", map[string]any{
			"to": customer + "@example.com", "template": "order-shipped",
		}},
		{"documents", "document.uploaded", map[string]any{"documentId": fmt.Sprintf("doc_%06d", i), "bytes": amount * 100}},
		{"payments", "payment.refunded", map[string]any{"paymentId": fmt.Sprintf("pay_%06d", i), "amount": amount}},
		{"exports", "export.finished", map[string]any{"exportId": fmt.Sprintf("exp_%06d", i), "rows": amount}},
	}
	k := kinds[i%len(kinds)]
	return map[string]any{
		"messageId": fmt.Sprintf("demo-%06d", i), "queue": k.queue, "kind": k.kind, "payload": k.payload, "source": "demo",
	}
}

func (d *demo) post(ctx context.Context, message map[string]any) error {
	raw, err := json.Marshal(message)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, d.api+"/api/messages", bytes.NewReader(raw))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusAccepted {
		body, _ := io.ReadAll(response.Body)
		return fmt.Errorf("submission: %s: %s", response.Status, body)
	}
	return nil
}

// snapshot has the numbers of messages by state at one moment.
type snapshot struct {
	Completed, Live                                        int64 // jobs of messages without a dead letter
	Pending, Processing, Manual, Resolved, Failed, Archive int64
}

func (s snapshot) open() int64   { return s.Pending + s.Processing + s.Manual }
func (s snapshot) closed() int64 { return s.Resolved + s.Failed + s.Archive }
func (s snapshot) settled() bool { return s.Live+s.Pending+s.Processing == 0 }
func (s snapshot) total() int64  { return s.Completed + s.open() + s.closed() }

func (d *demo) snapshot(ctx context.Context) (snapshot, error) {
	rows, err := d.pool.Query(ctx, `
		SELECT (SELECT count(*) FROM river_job WHERE kind = 'dlqd_message' AND NOT metadata ? 'dlq:entry_id'
			AND NOT metadata ? 'dlq:done_by' AND state = 'completed'),
		       (SELECT count(*) FROM river_job WHERE kind = 'dlqd_message' AND NOT metadata ? 'dlq:entry_id'
		       	AND finalized_at IS NULL),
		       count(*) FILTER (WHERE status = 'dlq_pending'), count(*) FILTER (WHERE status = 'dlq_processing'),
		       count(*) FILTER (WHERE status = 'dlq_manual'), count(*) FILTER (WHERE status = 'dlq_resolved'),
		       count(*) FILTER (WHERE status = 'dlq_failed'), count(*) FILTER (WHERE status = 'dlq_archived')
		FROM dlq.dead_letter_queue`)
	if err != nil {
		return snapshot{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[snapshot])
}

// watch prints events. It ends the receiver's failures once their effects are visible. It returns when no message is in
// progress, or after settleTimeout.
func (d *demo) watch(ctx context.Context, receiver string, sent <-chan error) error {
	ctx, cancel := context.WithTimeout(ctx, settleTimeout)
	defer cancel()
	ticker := time.NewTicker(watchInterval)
	defer ticker.Stop()
	events := eventPrinter{demo: d, started: time.Now(), printed: map[string]bool{}}
	allSent, recovered := false, false
	for {
		select {
		case err := <-sent:
			if err != nil {
				return err
			}
			allSent = true
		case <-ctx.Done():
		case <-ticker.C:
		}
		s, err := d.snapshot(ctx)
		if err == nil {
			err = events.printNew(ctx)
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			return nil // the summary shows the messages that are still in progress
		}
		if err != nil {
			return err
		}
		if !recovered && allSent && events.opened && s.Pending > 0 {
			events.printf("the receiver recovers")
			if err := d.recover(ctx, receiver); err != nil {
				return err
			}
			recovered = true
		}
		if recovered && s.settled() && events.closed {
			return nil
		}
	}
}

// eventPrinter prints the first event of each kind.
type eventPrinter struct {
	*demo

	started        time.Time
	printed        map[string]bool // by the event's key
	opened, closed bool            // whether the circuit breaker of exports has opened, and closed again
}

func (s *eventPrinter) printf(format string, args ...any) {
	s.demo.printf("%5.1f s  "+format, append([]any{time.Since(s.started).Seconds()}, args...)...)
}

// event is one line of output. Only the first event with a key is printed.
type event struct{ Key, Line string }

// printNew prints the events since the last call.
func (s *eventPrinter) printNew(ctx context.Context) error {
	rows, err := s.pool.Query(ctx, `
		(SELECT DISTINCT ON (error_class) 'class ' || error_class AS key,
		        format('%s: "%s" is %s: such dead letters %s', queue, error_message, error_class,
		               CASE WHEN status = 'dlq_manual' THEN 'wait for an operator' ELSE 'are redelivered automatically' END)
		 FROM dlq.dead_letter_queue WHERE error_class IS NOT NULL ORDER BY error_class, created_at)
		UNION ALL
		(SELECT DISTINCT ON (name, to_state) name || ' ' || to_state,
		        CASE to_state
		            WHEN 'open' THEN format('the circuit breaker of %s opens (%s): its messages wait', name, reason)
		            ELSE format('the circuit breaker of %s closes: its waiting messages are sent', name) END
		 FROM dlq.circuit_breaker_changes WHERE to_state <> 'half_open' ORDER BY name, to_state, at)
		UNION ALL
		(SELECT 'resolved', format('%s: the first dead letter is redelivered and resolved', queue)
		 FROM dlq.dead_letter_queue WHERE status = 'dlq_resolved' LIMIT 1)`)
	if err != nil {
		return err
	}
	events, err := pgx.CollectRows(rows, pgx.RowToStructByPos[event])
	if err != nil {
		return err
	}
	for _, e := range events {
		if s.printed[e.Key] {
			continue
		}
		s.printed[e.Key] = true
		s.printf("%s", e.Line)
	}
	s.opened, s.closed = s.printed["destination:exports open"], s.printed["destination:exports closed"]
	return nil
}

// recover ends the receiver's failures.
func (d *demo) recover(ctx context.Context, receiver string) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, receiver+"/recover", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	return response.Body.Close()
}

func (d *demo) summary(ctx context.Context, receiver string) error {
	s, err := d.snapshot(ctx)
	if err != nil {
		return err
	}
	rows, err := d.pool.Query(ctx, `
		SELECT coalesce(error_class, 'undecided'), count(*) FILTER (WHERE dlq.is_open(status)),
		       count(*) FILTER (WHERE status = 'dlq_resolved'), count(*) FILTER (WHERE status = 'dlq_failed'),
		       string_agg(DISTINCT error_type, ', ')
		FROM dlq.dead_letter_queue GROUP BY 1 ORDER BY 1`)
	if err != nil {
		return err
	}
	type classRow struct {
		Class                  string
		Open, Resolved, Failed int64
		Types                  *string
	}
	classes, err := pgx.CollectRows(rows, pgx.RowToStructByPos[classRow])
	if err != nil {
		return err
	}
	d.printf("")
	w := tabwriter.NewWriter(d.out, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, "CLASS\tOPEN\tRESOLVED\tFAILED\tERRORS")
	for _, c := range classes {
		types := ""
		if c.Types != nil {
			types = *c.Types
		}
		_, _ = fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%s\n", c.Class, c.Open, c.Resolved, c.Failed, types)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	received, err := d.receiverCount(ctx, receiver)
	if err != nil {
		return err
	}
	accepted := d.accepted.Load()
	d.printf("")
	d.printf("accepted %d = completed %d + open dead letters %d + closed dead letters %d (+ in progress %d)",
		accepted, s.Completed, s.open(), s.closed(), s.Live)
	d.printf("the receiver accepted %d messages: completed %d + resolved %d (and %d repeats: delivery is at least once)",
		received.Messages, s.Completed, s.Resolved, received.Repeats)
	// The receiver may have accepted more messages than dlqd counts, if an answer came too late.
	if accepted != messages || s.total() != accepted || s.Live != 0 || int64(received.Messages) < s.Completed+s.Resolved {
		return ErrCountMismatch
	}
	d.printf("every message is accounted for")
	return nil
}

func (d *demo) receiverCount(ctx context.Context, receiver string) (Count, error) {
	var c Count
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, receiver+"/count", nil)
	if err != nil {
		return c, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return c, err
	}
	defer func() { _ = response.Body.Close() }()
	return c, json.NewDecoder(response.Body).Decode(&c)
}

// printNextSteps prints commands for the demo's data. The receiver ends with the demo, so replays fail until another
// receiver runs at its address.
func (d *demo) printNextSteps(receiver string) {
	data := filepath.Join(d.dir, "data")
	d.printf("\nTry next, with the data of this demo:")
	d.printf("  %s receiver --listen %s --troubles 0s", d.program, strings.TrimPrefix(receiver, "http://"))
	d.printf("      gets what you replay; and, in another terminal:")
	d.printf("  %s serve --data-dir %s --config-dir %s", d.program, data, filepath.Join(d.dir, "config"))
	d.printf("      then open http://%s (what fails, and why)", server.DefaultListen)
	d.printf("      and, in a third terminal: %s list --status dlq_manual; %s show ID; %s replay ID", d.program,
		d.program, d.program)
	d.printf("  %s psql --data-dir %s -c 'SELECT * FROM dlq.backlog'", d.program, data)
	d.printf("  rm -rf %s when you are done", d.dir)
}
