package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// limit names the server without dlqd with which intake is compared: see [limitHandler].
const limit = "limit"

// ingestBench sends single messages of 1 KB with ids over 64 and 256 connections. Each connection sends its next
// request after the answer to the previous one. The measured servers are dlqd's API, the limit and, with -beside, the
// API of another build of this benchmark.
func ingestBench(b *bench, scale float64) error {
	subjects := []string{"dlqd", limit}
	if b.beside != "" {
		subjects = append(subjects, "other build")
	}
	messages := int64(40_000 * scale)
	b.row("connections and server", "messages/s", "of the limit", "p50 ms", "p99 ms", "CPU ms per 1,000: server",
		"Postgres")
	for _, connections := range []int{64, 256} {
		results := map[string][]load{}
		for round := range b.rounds {
			for n := range subjects {
				subject := subjects[(n+round)%len(subjects)]
				l, err := b.measure(subject, connections, messages, false)
				if err != nil {
					return fmt.Errorf("%s: %w", subject, err)
				}
				results[subject] = append(results[subject], l)
			}
		}
		of := func(subject string, value func(load) float64) float64 {
			values := make([]float64, 0, len(results[subject]))
			for _, l := range results[subject] {
				values = append(values, value(l))
			}
			return median(values)
		}
		for _, subject := range subjects {
			var ratios []float64
			for round, l := range results[subject] {
				ratios = append(ratios, l.rate/results[limit][round].rate)
			}
			b.row(fmt.Sprintf("%d %s", connections, subject), thousands(of(subject, func(l load) float64 { return l.rate })),
				fmt.Sprintf("%.2f", median(ratios)),
				fmt.Sprintf("%.1f", of(subject, func(l load) float64 { return l.p50 })),
				fmt.Sprintf("%.1f", of(subject, func(l load) float64 { return l.p99 })),
				fmt.Sprintf("%.0f", of(subject, func(l load) float64 { return l.server })),
				fmt.Sprintf("%.0f", of(subject, func(l load) float64 { return l.postgres })))
		}
	}
	return nil
}

// accessBench sends the same messages with a token, and without authentication to another server.
func accessBench(b *bench, scale float64) error {
	messages := int64(40_000 * scale)
	b.row("connections", "with a token, inserts/s", "without, inserts/s", "ratio")
	const connections = 64
	run := func(token bool) func() (float64, error) {
		return func() (float64, error) {
			l, err := b.measure("dlqd", connections, messages, token)
			return l.rate, err
		}
	}
	with, without, ratio, err := b.pairs(run(true), run(false))
	if err == nil {
		b.row(connections, thousands(with), thousands(without), fmt.Sprintf("%.2f", ratio))
	}
	return err
}

// load has the measurements of one server.
type load struct {
	rate             float64 // messages a second
	p50, p99         float64 // ms
	server, postgres float64 // ms of CPU per thousand messages
}

// measure empties the database and measures a server (measureServer).
func (b *bench) measure(subject string, connections int, messages int64, withToken bool) (l load, err error) {
	err = b.withPool(4, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		l, err = b.measureServer(pool, subject, connections, messages, withToken)
		return err
	})
	return l, err
}

// measureServer starts a server in a separate process, sends messages to it, and checks that all are stored.
func (b *bench) measureServer(pool *pgxpool.Pool, subject string, connections int, messages int64, withToken bool,
) (l load, err error) {
	const stored = "SELECT count(*) FROM river_job"
	var existing, found int64
	if err := pool.QueryRow(b.ctx, stored).Scan(&existing); err != nil {
		return l, err
	}
	server, err := b.startServer(subject, withToken)
	if err != nil {
		return l, err
	}
	postmaster, err := b.postmaster(pool)
	if err != nil {
		return l, err
	}
	before := postgresCPU(postmaster)
	start := time.Now()
	latencies, err := sendMessages(b.ctx, server, connections, messages)
	took := time.Since(start)
	cpu := postgresCPU(postmaster) - before
	if used := server.stop(); err == nil {
		l = load{
			rate: float64(messages) / took.Seconds(), p50: latencies[len(latencies)/2].Seconds() * 1000,
			p99:    latencies[len(latencies)*99/100].Seconds() * 1000,
			server: perThousand(used, messages), postgres: perThousand(cpu, messages),
		}
	}
	if err := errors.Join(err, pool.QueryRow(b.ctx, stored).Scan(&found)); err != nil {
		return l, err
	}
	if found-existing != messages {
		return l, fmt.Errorf("%d messages were accepted (202), %d are stored", messages, found-existing)
	}
	return l, nil
}

func perThousand(used time.Duration, messages int64) float64 {
	return used.Seconds() * 1000 / float64(messages) * 1000
}

// serverProcess is the process of a server under measurement.
type serverProcess struct {
	cmd         *exec.Cmd
	stdin       io.Closer // the server stops when its stdin is closed
	lines       *bufio.Scanner
	address     string
	credentials string // a header, or ""
}

// startServer starts this program, or the program of -beside, as a server.
func (b *bench) startServer(subject string, withToken bool) (*serverProcess, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if subject == "other build" {
		program, subject = b.beside, "dlqd"
	}
	args := []string{"-server", subject, "-server-url", b.server.URL()}
	if withToken {
		args = append(args, "-server-token")
	}
	if subject == "dlqd" && program != b.beside && b.profile != "" {
		args = append(args, "-profile", b.profile)
	}
	return startProcess(exec.CommandContext(b.ctx, program, args...)) //nolint:gosec // of the command line
}

// startProcess starts a server, and reads the address and the credentials that the server prints.
func startProcess(cmd *exec.Cmd) (*serverProcess, error) {
	s := &serverProcess{cmd: cmd}
	s.cmd.Stderr = os.Stderr
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if s.stdin, err = s.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	s.lines = bufio.NewScanner(stdout)
	for _, into := range []*string{&s.address, &s.credentials} {
		if !s.lines.Scan() {
			s.stop()
			return nil, errors.New("the server did not start")
		}
		*into = s.lines.Text()
	}
	return s, nil
}

// stop stops the server and returns its CPU time.
func (s *serverProcess) stop() time.Duration {
	_ = s.stdin.Close()
	_ = s.cmd.Wait()
	return s.cmd.ProcessState.UserTime() + s.cmd.ProcessState.SystemTime()
}

// postmaster returns the process id of the Postgres server.
func (b *bench) postmaster(pool *pgxpool.Pool) (pid int, err error) {
	err = pool.QueryRow(b.ctx, `SELECT split_part(pg_read_file('postmaster.pid'), E'\n', 1)::int`).Scan(&pid)
	return pid, err
}

// postgresCPU returns the CPU time of a Postgres server's processes, from Linux's /proc; elsewhere 0.
func postgresCPU(postmaster int) time.Duration {
	var all time.Duration
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		raw, err := os.ReadFile(path)
		if err != nil {
			continue // the process has ended
		}
		_, rest, _ := strings.Cut(string(raw), ") ")
		fields := strings.Fields(rest)
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if len(fields) < 15 || pid != postmaster && fields[1] != strconv.Itoa(postmaster) {
			continue
		}
		times := fields[11:13] // utime and stime
		if pid == postmaster {
			times = fields[11:15] // including processes that have ended
		}
		for _, ticks := range times {
			n, _ := strconv.Atoi(ticks)
			all += time.Duration(n) * 10 * time.Millisecond // USER_HZ is 100
		}
	}
	return all
}

// serve runs a server until its standard input ends.
func serve(ctx context.Context, subject, url, profile string, withToken bool) error {
	if profile != "" {
		file, err := os.Create(profile)
		if err != nil {
			return err
		}
		defer func() { _ = file.Close() }()
		if err := pprof.StartCPUProfile(file); err != nil {
			return err
		}
		defer pprof.StopCPUProfile()
	}
	pool, err := postgres.Open(ctx, url, postgres.DefaultMaxConns)
	if err != nil {
		return err
	}
	defer pool.Close()
	handler, credentials, stop, err := apiHandler(ctx, pool, withToken)
	if subject == limit {
		handler, stop, err = limitHandler(ctx, pool)
	}
	if err != nil {
		return err
	}
	defer stop()
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: handler}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()
	fmt.Println(listener.Addr())
	fmt.Println(credentials)
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

func apiHandler(ctx context.Context, pool *pgxpool.Pool, withToken bool,
) (handler http.Handler, credentials string, stop func(), err error) {
	rules, err := policy.Default("http://127.0.0.1:1/")
	if err != nil {
		return nil, "", nil, err
	}
	var authenticator *access.Authenticator
	if withToken {
		rules.Access.Authentication = []string{"tokens"}
		tokens := access.NewStore(pool, postgres.DefaultSchemas())
		secret, err := tokens.Create(ctx, &access.Token{Name: "bench", Role: access.Sender, Queues: []string{"default"}},
			"bench")
		if err != nil {
			return nil, "", nil, err
		}
		authenticator = &access.Authenticator{Tokens: tokens, Rules: rules.Access.Rules}
		credentials = "Authorization: Bearer " + secret
	}
	ingester, err := ingest.New(ingest.Config{
		Pool: pool, Schemas: postgres.DefaultSchemas(), Policy: func() *policy.Policy { return rules }, Logger: quiet,
	})
	if err != nil {
		return nil, "", nil, err
	}
	return api.New(api.Config{
		Access: authenticator, Ingester: ingester,
		Store: deadletter.NewStore(pool, postgres.DefaultSchemas()), Metrics: metrics.New(), Logger: quiet,
	}), credentials, func() { ingester.Stop(ctx) }, nil
}

// limitHandler does the least work with which a server can make the same promise. It decodes the message, joins
// concurrent messages into one River InsertManyFast (COPY) with River's unique key, and answers after the commit. It
// validates nothing. A repeated messageId makes the insert of all joined messages fail.
func limitHandler(ctx context.Context, pool *pgxpool.Pool) (http.Handler, func(), error) {
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Logger: quiet})
	if err != nil {
		return nil, nil, err
	}
	type waiting struct {
		args message.Message
		done chan error
	}
	queue := make(chan waiting, ingest.DefaultMaxPending)
	var flushers sync.WaitGroup
	for range ingest.DefaultFlushers {
		flushers.Go(func() {
			for first := range queue {
				group := []waiting{first}
				for len(group) < ingest.DefaultMaxGroup && len(queue) > 0 {
					select {
					case next := <-queue:
						group = append(group, next)
						continue
					default: // the other flusher took the message
					}
					break
				}
				params := make([]river.InsertManyParams, len(group))
				for n, w := range group {
					params[n] = river.InsertManyParams{Args: w.args, InsertOpts: &river.InsertOpts{
						MaxAttempts: 3, Queue: w.args.Queue,
						UniqueOpts: river.UniqueOpts{ByArgs: true, ByState: rivertype.JobStates()},
					}}
				}
				_, err := client.InsertManyFast(ctx, params)
				for _, w := range group {
					w.done <- err
				}
			}
		})
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		submitted := waiting{done: make(chan error, 1)}
		if err := json.NewDecoder(r.Body).Decode(&submitted.args); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		queue <- submitted
		if err := <-submitted.done; err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusAccepted)
		_, _ = fmt.Fprintf(w, `{"messageId": %q}`, submitted.args.MessageID)
	})
	return handler, func() { close(queue); flushers.Wait() }, nil
}

// sendMessages sends the given number of messages over the given number of connections. It returns the latencies,
// sorted.
func sendMessages(ctx context.Context, server *serverProcess, connections int, messages int64,
) ([]time.Duration, error) {
	credentials := server.credentials
	if credentials != "" {
		credentials += "\r\n"
	}
	const firstID = 1_000_000_000_000 // all ids have the same length
	body := fmt.Sprintf(`{"messageId": "%d", "queue": "default", "kind": "payment.captured", "source": "bench", `+
		`"payload": {"blob": "%s"}}`, firstID, strings.Repeat("x", 880))
	request := fmt.Appendf(nil, "POST /api/messages HTTP/1.1\r\nHost: localhost\r\n%sContent-Type: "+
		"application/json\r\nContent-Length: %d\r\n\r\n%s", credentials, len(body), body)
	id := bytes.Index(request, strconv.AppendInt(nil, firstID, 10))
	var sent atomic.Int64
	var wg sync.WaitGroup
	results := make([][]time.Duration, connections)
	errs := make([]error, connections)
	for i := range connections {
		wg.Go(func() {
			own := bytes.Clone(request)
			results[i], errs[i] = sendRequests(ctx, server.address, own, func() bool {
				n := sent.Add(1)
				strconv.AppendInt(own[id:id], firstID+n, 10)
				return n <= messages
			})
		})
	}
	wg.Wait()
	all := slices.Concat(results...)
	slices.Sort(all)
	return all, errors.Join(errs...)
}

// sendRequests sends one request after the other on one connection, as long as next returns true. next may change the
// request. sendRequests does as little work as possible, because it shares the machine with the measured server.
func sendRequests(ctx context.Context, address string, request []byte, next func() bool) ([]time.Duration, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	reader := bufio.NewReader(conn)
	var latencies []time.Duration
	for next() {
		start := time.Now()
		if _, err := conn.Write(request); err != nil {
			return nil, err
		}
		if err := readResponse(reader); err != nil {
			return nil, err
		}
		latencies = append(latencies, time.Since(start))
	}
	return latencies, nil
}

func readResponse(r *bufio.Reader) error {
	status, err := r.ReadSlice('\n')
	if err != nil {
		return err
	}
	if !bytes.Contains(status, []byte(" 202 ")) {
		return fmt.Errorf("unexpected response %q", status)
	}
	length := 0
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(line) <= 2 {
			break
		}
		if value, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			if length, err = strconv.Atoi(string(bytes.TrimSpace(value))); err != nil {
				return err
			}
		}
	}
	_, err = io.CopyN(io.Discard, r, int64(length))
	return err
}
