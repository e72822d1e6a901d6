package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// productionMessages is the number of messages in one run. Each has a payload of 1 KB.
	productionMessages = 20_000
	// productionClients is the number of clients, each of which submits one message at a time.
	productionClients = 64
	clockTicks        = 100 // a second, in /proc (USER_HZ)
)

// production measures the figures in docs/production.md: messages per second, connections, WAL, disk, processor time
// and memory. It uses 1, 2 and 4 processes for messages that are delivered, and 1 process for messages that become dead
// letters.
func production(b *bench, scale float64) error {
	dir, err := os.MkdirTemp("", "dlqd-bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program, err := buildProgram(b.ctx, dir)
	if err != nil {
		return err
	}
	b.row("processes", "messages/s", "dlqd: CPU ms/1,000", "Postgres: CPU ms/1,000", "WAL bytes each", "disk bytes each",
		"connections: idle", "most", "memory: idle MB", "most", "answers")
	n := max(int(productionMessages*scale), productionClients)
	return b.withPool(4, func(pool *pgxpool.Pool) error {
		for _, fails := range []bool{false, true} {
			for _, processes := range []int{1, 2, 4} {
				if fails && processes > 1 {
					continue
				}
				if err := b.reset(pool, true); err != nil {
					return err
				}
				p := productionRun{
					bench: b, pool: pool, program: program, processes: processes, messages: n, fails: fails,
					archive: "none",
				}
				if err := p.run(); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// buildProgram builds dlqd in a directory, and returns its path.
func buildProgram(ctx context.Context, dir string) (string, error) {
	program := filepath.Join(dir, "dlqd")
	build := exec.CommandContext(ctx, "go", "build", "-ldflags=-w", "-o", program, //nolint:gosec // in its own directory
		"github.com/dlqd/dlqd/cmd/dlqd")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as "make build" does
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build: %w: %s", err, out)
	}
	return program, nil
}

// productionRun is one row of the table.
type productionRun struct {
	*bench

	pool      *pgxpool.Pool
	program   string
	processes int
	messages  int
	fails     bool   // every message becomes a dead letter
	archive   string // directory, or "none"

	commands []*exec.Cmd
	apis     []string
}

func (p *productionRun) run() error {
	var answers atomic.Int64
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		answers.Add(1)
		if p.fails {
			w.WriteHeader(http.StatusUnprocessableEntity)
		}
	}))
	defer receiver.Close()
	if err := p.start(receiver.URL); err != nil {
		return err
	}
	defer func() {
		for _, c := range p.commands {
			_ = c.Process.Kill()
		}
	}()
	const sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'served'"
	if _, err := p.pool.Exec(p.ctx, "CHECKPOINT"); err != nil {
		return err
	}
	time.Sleep(5 * time.Second) // wait until the start is over
	idle, err := p.count(sessions)
	if err != nil {
		return err
	}
	idleMemory := p.memory()
	before, err := p.sizes()
	if err != nil {
		return err
	}
	cpu := p.serverTime()
	mine := p.processTime()
	began := time.Now()
	submitted := make(chan error, 1)
	go func() { submitted <- p.submit() }()
	most, mostMemory := idle, idleMemory
	want := map[bool]string{
		false: "SELECT count(*) FROM river_job WHERE state = 'completed'",
		true:  "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual'",
	}[p.fails]
	for {
		done, err := p.count(want)
		if err != nil {
			return err
		}
		now, err := p.count(sessions)
		if err != nil {
			return err
		}
		most, mostMemory = max(most, now), max(mostMemory, p.memory())
		if done >= p.messages {
			break
		}
		select {
		case err := <-submitted:
			if err != nil {
				return err
			}
		case <-time.After(200 * time.Millisecond):
		}
	}
	took := time.Since(began)
	mine = p.processTime() - mine
	cpu = p.serverTime() - cpu
	after, err := p.sizes()
	if err != nil {
		return err
	}
	thousands := float64(p.messages) / 1000
	p.row(p.processes, fmt.Sprintf("%.0f", float64(p.messages)/took.Seconds()),
		fmt.Sprintf("%.0f", mine.Seconds()*1000/thousands), fmt.Sprintf("%.0f", cpu.Seconds()*1000/thousands),
		(after.wal-before.wal)/int64(p.messages), (after.disk-before.disk)/int64(p.messages),
		idle/p.processes, most/p.processes, idleMemory, mostMemory,
		map[bool]string{false: "200", true: "422: dead letters"}[p.fails])
	return p.stop()
}

// start starts the processes and waits until each process is ready.
func (p *productionRun) start(receiver string) error {
	for range p.processes {
		listener, err := (&net.ListenConfig{}).Listen(p.ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		address := listener.Addr().String()
		if err := listener.Close(); err != nil {
			return err
		}
		cmd := exec.CommandContext(p.ctx, p.program, "serve", "--listen", address, //nolint:gosec // built above
			"--database-url", p.server.URL()+"&application_name=served", "--destination", receiver, "--archive", p.archive,
			"--log-level", "error")
		cmd.Stderr = os.Stderr
		if err := cmd.Start(); err != nil {
			return err
		}
		p.commands, p.apis = append(p.commands, cmd), append(p.apis, "http://"+address)
		if err := eventually(p.ctx, func() bool {
			response, err := http.Get("http://" + address + "/readyz") //nolint:noctx // on this machine
			return err == nil && response.Body.Close() == nil && response.StatusCode == http.StatusOK
		}); err != nil {
			return fmt.Errorf("%s: %w", address, err)
		}
	}
	return nil
}

func eventually(ctx context.Context, is func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for !is() {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
	return nil
}

func (p *productionRun) stop() error {
	var all error
	for _, c := range p.commands {
		all = errors.Join(all, c.Process.Signal(syscall.SIGTERM), c.Wait())
	}
	return all
}

func (p *productionRun) submit() error {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: productionClients}}
	text := strings.Repeat("x", 1000)
	var next, failed atomic.Int64
	var clients sync.WaitGroup
	for c := range productionClients {
		clients.Go(func() {
			for {
				n := next.Add(1)
				if n > int64(p.messages) {
					return
				}
				body := fmt.Sprintf(`{"messageId": "m%d", "queue": "default", "kind": "k", "payload": %q}`, n, text)
				api := p.apis[c%len(p.apis)] + "/api/messages"
				response, err := client.Post(api, "application/json", strings.NewReader(body)) //nolint:noctx
				if err != nil {
					failed.Add(1)
					continue
				}
				_, _ = io.Copy(io.Discard, response.Body)
				_ = response.Body.Close()
				if response.StatusCode != http.StatusAccepted {
					failed.Add(1)
				}
			}
		})
	}
	clients.Wait()
	if failed.Load() > 0 {
		return fmt.Errorf("%d of %d messages were not accepted", failed.Load(), p.messages)
	}
	return nil
}

func (p *productionRun) count(sql string) (n int, err error) {
	err = p.pool.QueryRow(p.ctx, sql).Scan(&n)
	return n, err
}

// sizes has the bytes of WAL since the server was created, and the bytes of the database.
type sizes struct{ wal, disk int64 }

func (p *productionRun) sizes() (s sizes, err error) {
	err = p.pool.QueryRow(p.ctx, `SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::bigint,
		pg_database_size(current_database())`).Scan(&s.wal, &s.disk)
	return s, err
}

// memory returns the mean resident memory of the processes in MB.
func (p *productionRun) memory() int {
	kilobytes := 0
	for _, c := range p.commands {
		raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.Process.Pid))
		_, rest, _ := strings.Cut(string(raw), "VmRSS:")
		if fields := strings.Fields(rest); len(fields) > 0 {
			n, _ := strconv.Atoi(fields[0])
			kilobytes += n
		}
	}
	return kilobytes / len(p.commands) / 1000
}

func (p *productionRun) processTime() (sum time.Duration) {
	for _, c := range p.commands {
		sum += processorTime(c.Process.Pid, false)
	}
	return sum
}

// serverTime returns the processor time of Postgres: of the postmaster, its children, and children that have ended.
func (p *productionRun) serverTime() time.Duration {
	raw, err := os.ReadFile(filepath.Join(p.dataDirectory(), "postmaster.pid"))
	if err != nil {
		return 0
	}
	postmaster, _ := strconv.Atoi(strings.SplitN(string(raw), "\n", 2)[0])
	sum := processorTime(postmaster, true)
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", postmaster, postmaster))
	for child := range strings.FieldsSeq(string(children)) {
		pid, _ := strconv.Atoi(child)
		sum += processorTime(pid, false)
	}
	return sum
}

func (p *productionRun) dataDirectory() (dir string) {
	conn, err := postgres.Open(p.ctx, p.server.URL(), 1)
	if err != nil {
		return ""
	}
	defer conn.Close()
	_ = conn.QueryRow(p.ctx, "SHOW data_directory").Scan(&dir)
	return dir
}

// processorTime returns the processor time of a process. If withEnded is set, it includes the process's children that
// have ended (proc(5)).
func processorTime(pid int, withEnded bool) time.Duration {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	const user = 11 // utime, stime, cutime, cstime
	ticks := 0
	last := user + 2
	if withEnded {
		last = user + 4
	}
	for _, field := range fields[user:last] {
		n, _ := strconv.Atoi(field)
		ticks += n
	}
	return time.Duration(ticks) * time.Second / clockTicks
}
