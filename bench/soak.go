package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	soakDuration = 2 * time.Hour
	soakRows     = 12 // rows of the table
	soakLoad     = 0.6
	soakHistory  = 200_000 // entries of the last 90 days, of which retention archives a part
	soakPages    = 200
	soakFailing  = 20 // of so many messages, one is refused
	soakColumn   = 16 // width of a column
)

// soak measures the rate at which the machine can deliver messages, and then sends messages at 60 % of that rate for
// two hours. 5 % of the messages become dead letters. Meanwhile retention archives an older history, 200 pages of the
// console are open, and a transaction holds back vacuum for a twelfth of the time. Each row is a twelfth of the time.
// At the end, each message must have been delivered, or be a dead letter.
func soak(b *bench, scale float64) error {
	duration := time.Duration(float64(soakDuration) * scale)
	dir, err := os.MkdirTemp("", "dlqd-bench-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	program, err := buildProgram(b.ctx, dir)
	if err != nil {
		return err
	}
	return b.withPool(4, func(pool *pgxpool.Pool) error {
		if err := b.reset(pool, true); err != nil {
			return err
		}
		if err := fillHistory(b.ctx, pool, max(int(soakHistory*scale), 1000)); err != nil {
			return err
		}
		if _, err := pool.Exec(b.ctx, "SELECT dlq.rebuild_rollups()"); err != nil {
			return err
		}
		s := soakRun{productionRun: productionRun{
			bench: b, pool: pool, program: program, processes: 1, archive: filepath.Join(dir, "archive"),
		}}
		receiver := httptest.NewServer(http.HandlerFunc(s.receive))
		defer receiver.Close()
		if err := s.start(receiver.URL); err != nil {
			return err
		}
		defer func() {
			for _, c := range s.commands {
				_ = c.Process.Kill()
			}
		}()
		if err := s.run(duration); err != nil {
			return err
		}
		return s.stop()
	})
}

// soakRun is a process under a constant load.
type soakRun struct {
	productionRun

	sent, refused atomic.Int64
	mu            sync.Mutex
	accepted      []time.Duration // of the current row: from the request to the answer
	delivered     []time.Duration // of the current row: from the request to the delivery, of first attempts
}

// soakPayload returns a payload that begins with the time of the request. If the receiver has to refuse the message,
// the payload ends with "refuse".
func soakPayload(refuse bool) string {
	text := time.Now().Format(time.RFC3339Nano) + " " + strings.Repeat("x", 1000)
	if refuse {
		text += "refuse"
	}
	return text
}

func (s *soakRun) receive(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	text := strings.Trim(string(body), "\"\n")
	at, _, _ := strings.Cut(text, " ")
	if sent, err := time.Parse(time.RFC3339Nano, at); err == nil {
		s.mu.Lock()
		s.delivered = append(s.delivered, time.Since(sent))
		s.mu.Unlock()
	}
	if strings.HasSuffix(text, "refuse") {
		w.WriteHeader(http.StatusUnprocessableEntity)
	}
}

func (s *soakRun) run(duration time.Duration) error {
	capacity, err := s.capacity(min(duration/10, time.Minute))
	if err != nil {
		return err
	}
	rate := soakLoad * capacity
	fmt.Printf("capacity %.0f/s; %.0f/s for %v\n\n", capacity, rate, duration)
	s.table.Init(os.Stdout, soakColumn, 0, 2, ' ', tabwriter.AlignRight) // each row is printed when it is complete
	s.row("until", "messages/s", "accepted p50", "p99 ms", "delivered p50", "p99 ms", "dead letters", "dead tuples",
		"database MB", "WAL MB/s", "memory MB", "Postgres CPU %", "dlqd CPU %")
	ctx, cancel := context.WithCancel(s.ctx)
	var pages sync.WaitGroup
	defer pages.Wait()
	defer cancel()
	for range soakPages {
		pages.Go(func() { _ = watchPage(ctx, s.apis[0]+"/events?page=%2F", func() {}) })
	}
	step := duration / soakRows
	for i := range soakRows {
		var reader pgx.Tx
		if i == soakRows/3 {
			if reader, err = s.snapshot(); err != nil {
				return err
			}
		}
		err := s.measureRow(step*time.Duration(i+1), step, rate)
		if reader != nil {
			err = errors.Join(err, reader.Rollback(s.ctx))
		}
		if err != nil {
			return err
		}
	}
	return s.account()
}

// snapshot begins a transaction that keeps vacuum from removing dead tuples.
func (s *soakRun) snapshot() (pgx.Tx, error) {
	tx, err := s.pool.BeginTx(s.ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		return nil, err
	}
	_, err = tx.Exec(s.ctx, "SELECT count(*) FROM pg_class")
	return tx, err
}

// capacity returns the messages per second that are accepted and delivered at full load.
func (s *soakRun) capacity(duration time.Duration) (float64, error) {
	began := time.Now()
	if err := s.send(duration, 0); err != nil {
		return 0, err
	}
	err := s.settle()
	return float64(s.sent.Load()) / time.Since(began).Seconds(), err
}

// send sends messages for the duration, at a rate per second. If the rate is 0, it sends them as fast as possible.
func (s *soakRun) send(duration time.Duration, rate float64) error {
	ctx, cancel := context.WithTimeout(s.ctx, duration)
	defer cancel()
	due := make(chan struct{})
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: productionClients}}
	defer client.CloseIdleConnections()
	failed := make(chan error, productionClients)
	var clients sync.WaitGroup
	for range productionClients {
		clients.Go(func() {
			for range due {
				if err := s.post(client); err != nil {
					failed <- err
					cancel()
					return
				}
			}
		})
	}
	for began, n := time.Now(), 0; ctx.Err() == nil; n++ {
		if rate > 0 {
			time.Sleep(time.Until(began.Add(time.Duration(float64(n) / rate * float64(time.Second)))))
		}
		select {
		case due <- struct{}{}:
		case <-ctx.Done():
		}
	}
	close(due)
	clients.Wait()
	close(failed)
	return <-failed
}

func (s *soakRun) post(client *http.Client) error {
	n := s.sent.Add(1)
	refuse := n%soakFailing == 0
	body := fmt.Sprintf(`{"messageId": "m%d", "queue": "default", "kind": "k", "payload": %q}`, n, soakPayload(refuse))
	began := time.Now()
	response, err := client.Post(s.apis[0]+"/api/messages", "application/json", strings.NewReader(body)) //nolint:noctx
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, response.Body)
	if err := response.Body.Close(); err != nil {
		return err
	}
	if response.StatusCode != http.StatusAccepted {
		return fmt.Errorf("message %d: %s", n, response.Status)
	}
	if refuse {
		s.refused.Add(1)
	}
	s.mu.Lock()
	s.accepted = append(s.accepted, time.Since(began))
	s.mu.Unlock()
	return nil
}

// measureRow sends messages for the duration step, and prints a row. until is the time at the row's end.
func (s *soakRun) measureRow(until, step time.Duration, rate float64) error {
	s.mu.Lock()
	s.accepted, s.delivered = nil, nil
	s.mu.Unlock()
	before, err := s.sizes()
	if err != nil {
		return err
	}
	sent, served, used, began := s.sent.Load(), s.serverTime(), s.processTime(), time.Now()
	if err := s.send(step, rate); err != nil {
		return err
	}
	took := time.Since(began)
	after, err := s.sizes()
	if err != nil {
		return err
	}
	var letters, tuples int64
	if err := s.pool.QueryRow(s.ctx, `SELECT (SELECT count(*) FROM dlq.dead_letter_open),
		(SELECT sum(n_dead_tup) FROM pg_stat_user_tables)::bigint`).Scan(&letters, &tuples); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	cells := []any{until, thousands(float64(s.sent.Load()-sent) / took.Seconds())}
	for _, times := range [][]time.Duration{s.accepted, s.delivered} {
		slices.Sort(times)
		if len(times) == 0 {
			return errors.New("no message was accepted or delivered")
		}
		cells = append(cells, milliseconds(times[len(times)/2]), milliseconds(times[len(times)*99/100]))
	}
	s.row(append(cells, thousands(float64(letters)), thousands(float64(tuples)), after.disk/1_000_000,
		fmt.Sprintf("%.1f", float64(after.wal-before.wal)/1e6/took.Seconds()), s.memory(),
		fmt.Sprintf("%.0f", 100*(s.serverTime()-served).Seconds()/took.Seconds()),
		fmt.Sprintf("%.0f", 100*(s.processTime()-used).Seconds()/took.Seconds()))...)
	return s.table.Flush()
}

// settle waits until no message waits or runs.
func (s *soakRun) settle() error {
	return eventually(s.ctx, func() bool {
		n, err := s.count("SELECT count(*) FROM river_job WHERE state NOT IN ('completed', 'discarded', 'cancelled')")
		return err == nil && n == 0
	})
}

// account checks that each message was delivered or is a dead letter, once.
func (s *soakRun) account() error {
	if err := s.settle(); err != nil {
		return err
	}
	const letters = "SELECT count(*) FROM dlq.dead_letter_open WHERE queue = 'default'"
	if err := eventually(s.ctx, func() bool {
		n, err := s.count(letters)
		return err == nil && n == int(s.refused.Load())
	}); err != nil {
		n, _ := s.count(letters)
		return fmt.Errorf("%d dead letters of %d refused messages", n, s.refused.Load())
	}
	completed, err := s.count("SELECT count(*) FROM river_job WHERE state = 'completed'")
	if want := int(s.sent.Load() - s.refused.Load()); err == nil && completed != want {
		err = fmt.Errorf("%d of %d messages were delivered", completed, want)
	}
	fmt.Printf("\n%d messages: %d delivered, %d dead letters\n", s.sent.Load(), completed, s.refused.Load())
	return err
}
