package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/time/rate"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

// destinations are the three destinations of the drill. The destination broken is down for a while.
var destinations = []string{"orders", "payments", "mails"}

const broken = "payments"

// outageParams are the parameters of the drill.
type outageParams struct {
	perSecond      int           // messages per second to all destinations together
	before, outage time.Duration // first phase, and at least second phase; the third lasts until all is delivered
	whileDown      int           // minimum number of messages to the broken destination while it is down
	periods        int           // minimum number of half-open periods while it is down
	slot           time.Duration // length of a slot of the curve
	breaker        string        // circuit-breaker.yaml
	pace           int           // redeliveries and releases per second, to each destination
	concurrency    int           // concurrent deliveries of each queue; 0 for the default
}

// slot has the figures of one section of the curve.
type slot struct {
	delivered map[string]int
	failed    int             // failed attempts at the broken destination
	others    []time.Duration // from submission to delivery, at the other destinations
}

// outageReport is the result of the drill.
type outageReport struct {
	sent, delivered map[string]int // by destination
	repeats         int
	attempts        int          // failed attempts at the broken destination
	sentWhileDown   atomic.Int64 // to the broken destination
	probes          int          // half-open periods
	captured        int          // messages that became dead letters
	unresolved      int          // dead letters that are parked or failed
	p50, p99        map[string][3]time.Duration
	recovery        time.Duration // from the end of the outage until no message was held or waited for a retry
	peak            int           // maximum number of deliveries to the broken destination in one second
	released        int           // maximum number of messages to the broken destination released in one second
	curve           []slot
	slot            time.Duration
}

// receivers receives the messages of all destinations.
type receivers struct {
	start time.Time
	slot  time.Duration
	phase atomic.Int32 // 0 before, 1 during, 2 after the outage

	mu        sync.Mutex
	curve     []slot
	seen      map[string]bool
	repeats   int
	attempts  int
	delivered map[string]int
	latencies map[string]*[3][]time.Duration
	seconds   map[int]int // deliveries to the broken destination, by second
}

func (r *receivers) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	now := time.Now()
	var message struct {
		Sent int64 `json:"sent"`
	}
	body, err := io.ReadAll(req.Body)
	if err != nil || json.Unmarshal(body, &message) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	name := req.URL.Path[1:]
	phase := r.phase.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	for at := int(now.Sub(r.start) / r.slot); at >= len(r.curve); {
		r.curve = append(r.curve, slot{delivered: map[string]int{}})
	}
	point := &r.curve[len(r.curve)-1]
	if name == broken && phase == 1 {
		r.attempts++
		point.failed++
		w.WriteHeader(http.StatusServiceUnavailable)
		return
	}
	id := req.Header.Get("Webhook-Id")
	if r.seen[id] {
		r.repeats++
		return
	}
	r.seen[id] = true
	r.delivered[name]++
	point.delivered[name]++
	if name == broken {
		r.seconds[int(now.Sub(r.start)/time.Second)]++
	}
	took := now.Sub(time.Unix(0, message.Sent))
	lists := r.latencies[name]
	lists[phase] = append(lists[phase], took)
	if name != broken {
		point.others = append(point.others, took)
	}
}

// outage runs the drill: it sends messages to three destinations, one of which is down for a while.
func outage(b *bench, scale float64) error {
	p := outageParams{
		perSecond: 500, outage: time.Duration(float64(10*time.Minute) * scale),
		before: max(time.Duration(float64(2*time.Minute)*scale), 5*time.Second),
		pace:   500,
	}
	p.slot = max(p.outage/20, time.Second)
	fmt.Printf("%d messages/s to %d destinations; after %s one of them answers 503 for %s\n\n", p.perSecond,
		len(destinations), p.before, p.outage)
	return b.withPool(8, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		report, err := runOutage(b.ctx, b.server.URL(), pool, p)
		if err != nil {
			return err
		}
		report.print(b)
		return report.checkTargets(p)
	})
}

// checkTargets returns an error that lists the figures that miss their targets. The targets apply to a machine that
// does nothing else, so TestOutage does not check them.
func (o *outageReport) checkTargets(p outageParams) error {
	var errs []error
	check := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	check(maps.Equal(o.sent, o.delivered), "sent %v, delivered %v", o.sent, o.delivered)
	check(o.unresolved == 0, "%d dead letters are parked or failed", o.unresolved)
	check(o.share() < 0.01, "attempts at the broken destination: %.2f %% of its messages, not below 1 %%", 100*o.share())
	check(o.released <= 2*(p.pace+1), "%d messages were released in one second, at a limit of %d", o.released, p.pace)
	for _, name := range destinations {
		if p99 := o.p99[name]; name != broken {
			check(p99[1] < 3*p99[0]+2*time.Second, "p99 of %s: %s before the outage, %s during it", name, p99[0], p99[1])
		}
	}
	return errors.Join(errs...)
}

// runOutage runs the drill on a database with dlqd's schema.
func runOutage(ctx context.Context, url string, pool *pgxpool.Pool, p outageParams) (*outageReport, error) {
	r := &receivers{
		start: time.Now(), slot: p.slot, seen: map[string]bool{}, delivered: map[string]int{},
		seconds: map[int]int{}, latencies: map[string]*[3][]time.Duration{},
	}
	for _, name := range destinations {
		r.latencies[name] = &[3][]time.Duration{}
	}
	receiver := httptest.NewServer(r)
	defer receiver.Close()
	rules, remove, err := outagePolicy(receiver.URL, p)
	if err != nil {
		return nil, err
	}
	defer remove()
	s, err := server.Start(ctx, server.Config{
		DatabaseURL: url, Schemas: postgres.DefaultSchemas(), API: true,
		Process: true, DLQWorkers: true, Listen: []string{"127.0.0.1:0"},
		Policy: rules, Logger: quiet, MaxConns: 30,
	})
	if err != nil {
		return nil, err
	}
	running, stop := context.WithCancel(ctx)
	stopped := make(chan error, 1)
	go func() { stopped <- s.Wait(running, ctx) }()
	report, err := drill(ctx, s.Addresses()[0], pool, r, p)
	stop()
	return report, errors.Join(err, <-stopped)
}

func outagePolicy(url string, p outageParams) (rules *policy.Policy, remove func(), err error) {
	dir, err := os.MkdirTemp("", "dlqd-outage-")
	if err != nil {
		return nil, nil, err
	}
	remove = func() { _ = os.RemoveAll(dir) }
	var queues, targets bytes.Buffer
	for _, name := range destinations {
		_, _ = fmt.Fprintf(&queues, "  %s: {destination: %s}\n", name, name)
		_, _ = fmt.Fprintf(&targets, "  %s: {url: \"%s/%s\", redeliveriesPerSecond: %d}\n", name, url, name, p.pace)
	}
	for name, text := range map[string]string{
		"retry-policies":  "defaults: {whenOpen: accept}\nqueues:\n" + queues.String() + "destinations:\n" + targets.String(),
		"circuit-breaker": p.breaker,
		"worker-pool":     fmt.Sprintf("defaults: {concurrency: %d}\n", cmp.Or(p.concurrency, 100)),
		// The limits on processor and memory are off, because the load and the receivers run on the same machine.
		"dlq-routing": "strategies: {conditional: {conditions: {cpuBelow: 0, memoryBelow: 0}}}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600); err != nil {
			return nil, remove, err
		}
	}
	rules, err = policy.Load(policy.Source{Dir: dir})
	return rules, remove, err
}

// halfOpen is a query that counts half-open periods.
const halfOpen = "SELECT count(*) FROM dlq.circuit_breaker_changes WHERE to_state = 'half_open'"

func drill(ctx context.Context, api string, pool *pgxpool.Pool, r *receivers, p outageParams) (*outageReport, error) {
	report := &outageReport{
		sent: map[string]int{}, slot: p.slot, p50: map[string][3]time.Duration{}, p99: map[string][3]time.Duration{},
	}
	sending, stopSending := context.WithCancel(ctx)
	sent := make(chan error, 1)
	go func() { sent <- report.send(sending, api, r, p.perSecond) }()
	wait := func(d time.Duration) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-sent:
			return fmt.Errorf("sending messages failed: %w", err)
		case <-time.After(d):
			return nil
		}
	}
	defer stopSending()
	if err := wait(p.before); err != nil {
		return nil, err
	}
	r.phase.Store(1)
	if err := wait(p.outage); err != nil {
		return nil, err
	}
	for periods := -1; periods < p.periods || report.sentWhileDown.Load() < int64(p.whileDown); {
		if err := wait(100 * time.Millisecond); err != nil {
			return nil, err
		}
		if err := pool.QueryRow(ctx, halfOpen).Scan(&periods); err != nil {
			return nil, err
		}
	}
	r.phase.Store(2)
	up := time.Now()
	// Continue to send messages while held messages are released, until no message is held or waits for a retry and every
	// dead letter is closed or parked.
	for {
		if err := wait(time.Second); err != nil {
			return nil, err
		}
		var behind int
		if err := pool.QueryRow(ctx, `SELECT (SELECT count(*) FROM river_job WHERE state IN ('scheduled', 'retryable')
			AND queue = $1)
			+ (SELECT count(*) FROM dlq.dead_letter_open WHERE status <> 'dlq_manual')`, broken).Scan(&behind); err != nil {
			return nil, err
		}
		if behind == 0 {
			break
		}
	}
	report.recovery = time.Since(up)
	stopSending()
	if err := <-sent; err != nil {
		return nil, err
	}
	for open := 1; open > 0; time.Sleep(100 * time.Millisecond) {
		if err := pool.QueryRow(ctx, "SELECT count(*) FROM river_job WHERE finalized_at IS NULL").Scan(&open); err != nil {
			return nil, err
		}
	}
	return report, report.collect(ctx, pool, r)
}

// senders is the maximum number of concurrent requests.
const senders = 64

func (o *outageReport) send(ctx context.Context, api string, r *receivers, perSecond int) error {
	limiter := rate.NewLimiter(rate.Limit(perSecond), 1)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: senders}}
	defer client.CloseIdleConnections()
	var next atomic.Int64
	var mu sync.Mutex
	var wg sync.WaitGroup
	errs := make([]error, senders)
	for i := range senders {
		wg.Go(func() {
			for limiter.Wait(ctx) == nil {
				n := next.Add(1)
				name := destinations[n%int64(len(destinations))]
				body := fmt.Sprintf(`{"messageId": "m%d", "queue": %q, "kind": "drill", "payload": {"sent": %d}}`, n, name,
					time.Now().UnixNano())
				response, err := client.Post(api+"/api/messages", "application/json", bytes.NewBufferString(body)) //nolint:noctx // a request that was sent must be answered
				if err != nil {
					errs[i] = err
					return
				}
				_, _ = io.Copy(io.Discard, response.Body)
				_ = response.Body.Close()
				if response.StatusCode != http.StatusAccepted {
					errs[i] = fmt.Errorf("the API answered %s", response.Status)
					return
				}
				mu.Lock()
				o.sent[name]++
				mu.Unlock()
				if name == broken && r.phase.Load() == 1 {
					o.sentWhileDown.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (o *outageReport) collect(ctx context.Context, pool *pgxpool.Pool, r *receivers) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	o.delivered, o.repeats, o.attempts, o.curve = r.delivered, r.repeats, r.attempts, r.curve
	for _, n := range r.seconds {
		o.peak = max(o.peak, n)
	}
	for name, lists := range r.latencies {
		var p50, p99 [3]time.Duration
		for phase, list := range lists {
			p50[phase], p99[phase] = quantile(list, 50), quantile(list, 99)
		}
		o.p50[name], o.p99[name] = p50, p99
	}
	// The scheduled_at of a message that was held is the time of its release.
	if err := pool.QueryRow(ctx, `SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM river_job
		WHERE queue = $1 AND kind = 'dlqd_message' AND NOT metadata ? 'dlq:entry_id'
			AND scheduled_at > created_at + interval '100 ms'
		GROUP BY date_trunc('second', scheduled_at)) s`, broken).Scan(&o.released); err != nil {
		return err
	}
	return pool.QueryRow(ctx, `SELECT (`+halfOpen+`),
		(SELECT count(*) FROM dlq.dead_letter_queue), (SELECT count(*) FROM dlq.dead_letter_queue
			WHERE status IN ('dlq_manual', 'dlq_failed'))`).Scan(&o.probes, &o.captured, &o.unresolved)
}

func (o *outageReport) print(b *bench) {
	fmt.Println("Over time: delivered messages, failed attempts at the broken destination, p99 from submission to " +
		"delivery of the others")
	b.row("from", destinations[0], broken+" (broken)", destinations[2], "failed attempts", "p99 of the others")
	for i, point := range o.curve {
		b.row((time.Duration(i) * o.slot).String(), point.delivered[destinations[0]], point.delivered[broken],
			point.delivered[destinations[2]], point.failed, millis(quantile(point.others, 99)))
	}
	_ = b.table.Flush()
	fmt.Println()
	b.row("submission to delivery", "p50 before", "p99 before", "p50 during the outage", "p99 during the outage",
		"ratio of p99", "p99 after")
	for _, name := range destinations {
		p50, p99 := o.p50[name], o.p99[name]
		ratio := "-"
		if p99[1] > 0 {
			ratio = fmt.Sprintf("%.2f", float64(p99[1])/float64(p99[0]))
		}
		b.row(name, millis(p50[0]), millis(p99[0]), millis(p50[1]), millis(p99[1]), ratio, millis(p99[2]))
	}
	_ = b.table.Flush()
	fmt.Println()
	for _, name := range destinations {
		fmt.Printf("%s: %d sent, %d delivered\n", name, o.sent[name], o.delivered[name])
	}
	fmt.Printf("attempts at the broken destination during the outage: %d for %d messages, %.2f %%; %d half-open periods\n",
		o.attempts, o.sentWhileDown.Load(), 100*o.share(), o.probes)
	fmt.Printf("dead letters: %d, of which %d are not resolved; repeats: %d\n", o.captured, o.unresolved, o.repeats)
	fmt.Printf("all held messages were delivered %.0f s after the end of the outage; at most %d deliveries and %d "+
		"releases per second\n",
		o.recovery.Seconds(), o.peak, o.released)
}

// share returns the number of attempts at the broken destination, divided by the number of messages that were sent to
// it during the outage.
func (o *outageReport) share() float64 {
	return float64(o.attempts) / float64(max(o.sentWhileDown.Load(), 1))
}

// quantile sorts a list and returns the given percentile, or 0 if the list is empty.
func quantile(list []time.Duration, percent int) time.Duration {
	if len(list) == 0 {
		return 0
	}
	slices.Sort(list)
	return list[len(list)*percent/100]
}

func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }
