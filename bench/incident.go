package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

// Causes for which messages of the incident become dead letters. The receiver does the first half of a message's work
// even if it answers with an error. So each replay that fails again repeats that half for nothing.
const (
	causeBug        = "BUG"        // the cause is fixed before the replay
	causeWeak       = "WEAK"       // the destination takes only weakLimit requests a second
	causeData       = "DATA"       // the message never succeeds
	causeSuperseded = "SUPERSEDED" // a later message with the same key has done the work
	causeStale      = "STALE"      // the message expired before the replay
	live            = "LIVE"       // not dead letters: other traffic to the weak destination
)

var causes = []string{causeBug, causeWeak, causeData, causeSuperseded, causeStale}

const (
	weakLimit   = 50 // requests a second that the weak destination takes
	weakOutage  = 3 * time.Second
	livePerSec  = 10
	askedRate   = 200 // entries a second that the operator requests
	carefulRate = 25  // the rate after the operator has seen the weak destination fail
	patience    = 10 * time.Minute
)

// incidentReceiver does the work of the incident's messages, and counts requests.
type incidentReceiver struct {
	mu        sync.Mutex
	mended    bool
	downUntil time.Time
	second    time.Time
	inSecond  int

	recovered map[string]bool // messages that can succeed and have succeeded
	wasted    map[string]int  // requests that only repeated or undid work, by cause
	peak      int             // maximum number of requests to the weak destination in one second
	liveSeen  int
	liveBad   int
}

func (r *incidentReceiver) ServeHTTP(w http.ResponseWriter, in *http.Request) {
	raw, err := io.ReadAll(in.Body)
	var message struct {
		Cause string `json:"cause"`
	}
	if err != nil || json.Unmarshal(raw, &message) != nil {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.mended && message.Cause != live && message.Cause != "" {
		w.Header().Set("X-Error-Type", message.Cause)
		w.Header().Set("X-Error-Class", "business")
		w.WriteHeader(http.StatusUnprocessableEntity)
		return
	}
	switch message.Cause {
	case causeWeak, live:
		now := time.Now()
		if now.Sub(r.second) > time.Second {
			r.second, r.inSecond = now, 0
		}
		r.inSecond++
		r.peak = max(r.peak, r.inSecond)
		if r.inSecond > weakLimit {
			r.downUntil = now.Add(weakOutage)
		}
		down := now.Before(r.downUntil)
		if message.Cause == live {
			r.liveSeen++
			if down {
				r.liveBad++
			}
		}
		if down {
			if message.Cause == causeWeak {
				r.wasted[message.Cause]++
			}
			w.WriteHeader(http.StatusServiceUnavailable)
			return
		}
	case causeData:
		r.wasted[message.Cause]++
		w.Header().Set("X-Error-Type", message.Cause)
		w.Header().Set("X-Error-Class", "business")
		w.WriteHeader(http.StatusUnprocessableEntity)
		return
	case causeSuperseded, causeStale:
		r.wasted[message.Cause]++
		return
	}
	if message.Cause == causeBug || message.Cause == causeWeak {
		r.recovered[in.Header.Get("Webhook-Id")] = true
	}
}

// incident is one incident with one way of replaying its messages, and the cost of the replay.
type incident struct {
	b     *bench
	api   string
	pool  *pgxpool.Pool
	plant *incidentReceiver
	sizes map[string]int

	acts     []string          // actions of the operator
	decided  map[string]string // for each cause, the first state of its group other than going
	took     time.Duration
	complete bool
}

// incidentBench makes messages fail for good, for five causes. It replays them in two ways: all at once, and
// progressively without messages that are out of date or superseded.
func incidentBench(b *bench, scale float64) error {
	fmt.Printf("The operator asks for %d/s. The weak destination takes %d requests a second, and then fails for %s.\n\n",
		askedRate, weakLimit, weakOutage)
	verdicts := verdicts{}
	for round := range b.rounds {
		sizes := incidentSizes(uint64(round), int(20_000*scale))
		b.newTable("seed", "replay", "dead letters", "recovered", "in", "wasted: data", "weak", "superseded", "stale",
			"peak/s at weak", "live failed", "groups held or stopped", "acts of the operator")
		for _, progressive := range []bool{false, true} {
			if round > 0 && !progressive {
				continue // the other sizes only test whether the decisions are right
			}
			i, err := b.incident(sizes, progressive)
			if err != nil {
				return err
			}
			i.print(round, progressive)
			if progressive && round > 0 {
				verdicts.add(i)
			}
		}
	}
	verdicts.print(b)
	return nil
}

// verdicts counts, by cause, how many groups got a right decision in a progressive replay, and how many a wrong one.
type verdicts map[string]*struct{ right, wrong int }

// add judges the decisions of an incident. Groups of messages that never succeed must be held or stopped. The group of
// the weak destination must be held or stopped if the destination refused one of the run's requests. All other groups
// must go on.
func (v verdicts) add(i *incident) {
	i.plant.mu.Lock()
	defer i.plant.mu.Unlock()
	for _, cause := range causes {
		want, state := "go", i.decided[cause]
		switch {
		case i.sizes[cause] == 0:
			continue
		case cause == causeData, cause == causeWeak && i.plant.wasted[causeWeak] > 0:
			want = "hold or stop"
		}
		of := cause + ": " + want
		if v[of] == nil {
			v[of] = &struct{ right, wrong int }{}
		}
		if (state != "") == (want != "go") {
			v[of].right++
		} else {
			v[of].wrong++
		}
	}
}

func (v verdicts) print(b *bench) {
	if len(v) == 0 {
		return
	}
	b.newTable("group of the seeds above 0", "right", "wrong")
	for _, of := range slices.Sorted(maps.Keys(v)) {
		b.row(of, v[of].right, v[of].wrong)
	}
}

// incidentSizes returns the number of messages of each cause. The first seed gives the sizes in docs/replay.md.
func incidentSizes(seed uint64, total int) map[string]int {
	shares := map[string]float64{
		causeBug: 0.4, causeWeak: 0.2, causeData: 0.2, causeSuperseded: 0.1, causeStale: 0.1,
	}
	if seed > 0 {
		random := rand.New(rand.NewPCG(seed, 1))
		sum := 0.0
		for _, cause := range causes {
			shares[cause] = random.ExpFloat64()
			sum += shares[cause]
		}
		for _, cause := range causes {
			shares[cause] /= sum
		}
	}
	sizes := map[string]int{}
	for cause, share := range shares {
		sizes[cause] = int(share * float64(total))
	}
	return sizes
}

func (b *bench) incident(sizes map[string]int, progressive bool) (i *incident, err error) {
	i = &incident{
		b: b, sizes: sizes, decided: map[string]string{},
		plant: &incidentReceiver{recovered: map[string]bool{}, wasted: map[string]int{}},
	}
	receiver := httptest.NewServer(i.plant)
	defer receiver.Close()
	dir, err := os.MkdirTemp("", "dlqd-incident-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	for name, text := range map[string]string{
		"retry-policies": fmt.Sprintf("defaults: {whenOpen: accept}\n"+
			"queues:\n  orders: {destination: orders}\n  bank: {destination: bank}\n"+
			"destinations:\n  orders: {url: %[1]q}\n  bank: {url: %[1]q}\n", receiver.URL),
		"dlq-routing": "strategies: {conditional: {conditions: {cpuBelow: 0, memoryBelow: 0}}}\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name+".yaml"), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	rules, err := policy.Load(policy.Source{Dir: dir})
	if err != nil {
		return nil, err
	}
	return i, b.withPool(8, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		i.pool = pool
		s, err := server.Start(b.ctx, server.Config{
			DatabaseURL: b.server.URL(), Schemas: postgres.DefaultSchemas(), API: true, Process: true, DLQWorkers: true,
			Listen: []string{"127.0.0.1:0"}, Policy: rules, Logger: quiet, MaxConns: 30,
		})
		if err != nil {
			return err
		}
		i.api = s.Addresses()[0]
		running, stop := context.WithCancel(b.ctx)
		stopped := make(chan error, 1)
		go func() { stopped <- s.Wait(running, b.ctx) }()
		err = i.run(progressive)
		stop()
		return errors.Join(err, <-stopped)
	})
}

// run submits the messages, which fail, then fixes the bug and replays.
func (i *incident) run(progressive bool) error {
	total := 0
	for _, cause := range slices.Sorted(maps.Keys(i.sizes)) {
		total += i.sizes[cause]
		if err := i.submit(cause, i.sizes[cause]); err != nil {
			return err
		}
	}
	if err := i.wait(func() (bool, error) {
		return i.isCount(total, `SELECT count(*) FROM dlq.dead_letter_open
			WHERE status = 'dlq_manual' AND fingerprint IS NOT NULL`)
	}); err != nil {
		return fmt.Errorf("waiting for %d dead letters: %w", total, err)
	}
	i.plant.mu.Lock()
	i.plant.mended = true
	i.plant.mu.Unlock()
	// Later messages with the same keys succeed.
	if err := i.submit("", i.sizes[causeSuperseded]); err != nil {
		return err
	}
	if err := i.wait(func() (bool, error) {
		return i.isCount(i.sizes[causeSuperseded], "SELECT count(*) FROM river_job WHERE state = 'completed'")
	}); err != nil {
		return err
	}
	ctx, stop := context.WithCancel(i.b.ctx)
	defer stop()
	traffic := make(chan error, 1)
	go func() { traffic <- i.traffic(ctx) }()
	start := time.Now()
	if err := i.operate(progressive); err != nil {
		return err
	}
	i.took = time.Since(start)
	stop()
	return <-traffic
}

// submit sends messages of a cause. The cause "" stands for the later messages with the keys of superseded ones.
func (i *incident) submit(cause string, n int) error {
	expires := time.Now().Add(2 * time.Second)
	var group errgroup.Group
	group.SetLimit(senders)
	for k := range n {
		queue, more := "orders", fmt.Sprintf(`, "messageId": "m%s-%d"`, cause, k) // submitted once, even if repeated
		switch cause {
		case live:
			queue, more = "bank", ""
		case causeWeak:
			queue = "bank"
		case causeSuperseded, "":
			more += fmt.Sprintf(`, "orderingKey": "k%d"`, k)
		case causeStale:
			more += fmt.Sprintf(`, "expiresAt": %q`, expires.Format(time.RFC3339))
		}
		group.Go(func() error {
			return i.call(http.MethodPost, "/api/messages",
				fmt.Sprintf(`{"queue": %q, "kind": "incident", "payload": {"cause": %q, "n": %d}%s}`, queue, cause, k, more), nil)
		})
	}
	return group.Wait()
}

// traffic sends other messages to the weak destination until ctx ends.
func (i *incident) traffic(ctx context.Context) error {
	for limiter := rate.NewLimiter(livePerSec, 1); limiter.Wait(ctx) == nil; {
		if err := i.submit(live, 1); err != nil {
			return err
		}
	}
	return nil
}

// incidentRun has the fields of a replay run that the operator sees.
type incidentRun struct {
	ID, Status string
	Groups     []struct {
		Number    int32
		State     string
		ErrorType string
	}
}

// start starts a run of the entries that a filter chooses.
func (i *incident) start(name, filter string, perSecond, entries int, progressive bool) (incidentRun, error) {
	body := fmt.Sprintf(`{"filter": {"q": %q}, "all": true, "force": true, "rate": %d, "expect": %d`, filter, perSecond,
		entries)
	if progressive {
		body += `, "progressive": true, "skipStale": true, "skipSuperseded": true`
	}
	var started struct{ Run incidentRun }
	err := i.act(name, "/api/dlq/replay", body+"}", &started)
	return started.Run, err
}

// startAgain starts a run of the entries that failed in a run because the destination was down. Without it, they would
// wait for the delay of the policy, which is minutes. It does nothing if there are none.
func (i *incident) startAgain(run *incidentRun, progressive bool) error {
	filter, perSecond := "again:"+run.ID+" class:outage", askedRate
	if slices.Contains(i.acts, "rate") {
		perSecond = carefulRate
	}
	var dry struct{ Preview struct{ Total int } }
	err := i.call(http.MethodPost, "/api/dlq/replay", fmt.Sprintf(`{"filter": {"q": %q}, "dryRun": true}`, filter), &dry)
	if err != nil || dry.Preview.Total == 0 {
		return err
	}
	next, err := i.start("again", filter, perSecond, dry.Preview.Total, progressive)
	if err == nil {
		*run = next
	}
	return err
}

// operate replays as an operator would, until every message that can succeed has succeeded.
func (i *incident) operate(progressive bool) error {
	run, err := i.start("start", "", askedRate, i.total(), progressive)
	if err != nil {
		return err
	}
	deadline := time.Now().Add(patience)
	for !i.isRecovered() {
		if time.Now().After(deadline) {
			return nil // print reports that the recovery is not complete
		}
		time.Sleep(time.Second)
		path := "/api/dlq/replays/" + run.ID
		if err := i.call(http.MethodGet, path, "", &run); err != nil {
			return err
		}
		if err := i.decide(&run, path); err != nil {
			return err
		}
		switch {
		case run.Status == "completed":
			if err := i.startAgain(&run, progressive); err != nil {
				return err
			}
		case !progressive && run.Status == "stopped":
			if err := i.act("resume", path+"/resume", "", nil); err != nil {
				return err
			}
		}
	}
	i.complete = true
	return nil
}

// decide ends held groups whose data is wrong. It continues other held groups at a lower rate, once the breaker has
// closed.
func (i *incident) decide(run *incidentRun, path string) error {
	for _, g := range run.Groups {
		if g.State != "held" && g.State != "stopped" {
			continue
		}
		if i.decided[g.ErrorType] == "" {
			i.decided[g.ErrorType] = g.State
		}
		verb := "end"
		if g.ErrorType != causeData && g.ErrorType != "" {
			if open, err := i.isBreakerOpen(); err != nil {
				return err
			} else if open {
				continue
			}
			verb = "go-on"
			if !slices.Contains(i.acts, "rate") {
				if err := i.act("rate", path+"/rate", fmt.Sprintf(`{"rate": %d}`, carefulRate), nil); err != nil {
					return err
				}
			}
		}
		if err := i.act(verb, path+"/"+verb, fmt.Sprintf(`{"groups": [%d]}`, g.Number), nil); err != nil {
			return err
		}
	}
	return nil
}

// isBreakerOpen reports whether the weak destination's circuit breaker is not closed.
func (i *incident) isBreakerOpen() (bool, error) {
	var list struct {
		Breakers []struct{ Name, State string }
	}
	err := i.call(http.MethodGet, "/api/circuit-breakers", "", &list)
	for _, b := range list.Breakers {
		if b.Name == "destination:bank" && b.State != "closed" {
			return true, err
		}
	}
	return false, err
}

func (i *incident) total() (n int) {
	for _, size := range i.sizes {
		n += size
	}
	return n
}

func (i *incident) isRecovered() bool {
	i.plant.mu.Lock()
	defer i.plant.mu.Unlock()
	return len(i.plant.recovered) == i.sizes[causeBug]+i.sizes[causeWeak]
}

func (i *incident) isCount(n int, sql string) (bool, error) {
	var count int
	err := i.pool.QueryRow(i.b.ctx, sql).Scan(&count)
	return count == n, err
}

func (i *incident) wait(done func() (bool, error)) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		if ok, err := done(); ok || err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return errors.New("took more than " + patience.String())
		}
	}
}

// act sends a request of the operator and records the action. If the server answers 503, the operator looks again
// before the next try, because the server may have carried out the request.
func (i *incident) act(name, path, body string, answer any) error {
	i.acts = append(i.acts, name)
	status, err := i.callOnce(http.MethodPost, path, body, answer)
	if status == http.StatusServiceUnavailable && answer == nil {
		return nil
	}
	return err
}

// call sends a request. It repeats the request while the server answers 503: the database is busy.
func (i *incident) call(method, path, body string, answer any) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Second) {
		status, err := i.callOnce(method, path, body, answer)
		if status != http.StatusServiceUnavailable || time.Now().After(deadline) {
			return err
		}
	}
}

func (i *incident) callOnce(method, path, body string, answer any) (status int, err error) {
	request, err := http.NewRequestWithContext(i.b.ctx, method, i.api+path, bytes.NewBufferString(body))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, err
	}
	defer func() { _ = response.Body.Close() }()
	raw, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode >= http.StatusBadRequest {
		return response.StatusCode, errors.Join(fmt.Errorf("%s %s answered %s: %s", method, path, response.Status, raw), err)
	}
	if answer == nil {
		return response.StatusCode, nil
	}
	return response.StatusCode, json.Unmarshal(raw, answer)
}

func (i *incident) print(seed int, progressive bool) {
	i.plant.mu.Lock()
	defer i.plant.mu.Unlock()
	name := "all at once"
	if progressive {
		name = "progressive"
	}
	took := fmt.Sprintf("%.0f s", i.took.Seconds())
	if !i.complete {
		took = "not in " + patience.String()
	}
	w := i.plant.wasted
	i.b.row(seed, name, i.total(), fmt.Sprintf("%d of %d", len(i.plant.recovered), i.sizes[causeBug]+i.sizes[causeWeak]),
		took, w[causeData], w[causeWeak], w[causeSuperseded], w[causeStale], i.plant.peak,
		fmt.Sprintf("%d of %d", i.plant.liveBad, i.plant.liveSeen), fmt.Sprint(i.decided)[len("map"):],
		fmt.Sprint(len(i.acts), " ", summary(i.acts)))
}

// summary counts how often each action occurs.
func summary(acts []string) map[string]int {
	counts := map[string]int{}
	for _, act := range acts {
		counts[act]++
	}
	return counts
}
