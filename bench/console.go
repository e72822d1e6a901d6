package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
)

const (
	consoleRequests = 200
	consoleWatchers = 200
	watchDuration   = 30 * time.Second
)

// consoleBench requests each page of the console many times, with ten million entries and their moves in the database.
// It measures the requests, first paints, and the database load of open pages.
func consoleBench(b *bench, scale float64) error {
	return b.withPool(8, func(pool *pgxpool.Pool) error {
		entries := int(10_000_000 * scale)
		if err := b.fillOnce(pool, entries); err != nil {
			return err
		}
		rules, err := policy.Default("http://127.0.0.1:9")
		if err != nil {
			return err
		}
		s, err := server.Start(b.ctx, server.Config{
			DatabaseURL: b.server.URL(), Schemas: postgres.DefaultSchemas(), API: true,
			Listen: []string{"127.0.0.1:0"}, Policy: rules, Logger: quiet, StopTimeout: 10 * time.Second,
		})
		if err != nil {
			return err
		}
		ctx, stop := context.WithCancel(b.ctx)
		stopped := make(chan error, 1)
		go func() { stopped <- s.Wait(ctx, b.ctx) }()
		err = errors.Join(measurePages(b, pool, s.Addresses()[0], entries), watchPages(b, pool, s.Addresses()[0]))
		stop()
		return errors.Join(err, <-stopped)
	})
}

// fillOnce inserts a history of entries, with rollups. It does nothing if the database of -keep has that history from
// an earlier run.
func (b *bench) fillOnce(pool *pgxpool.Pool, entries int) error {
	mark := fmt.Sprintf("%d entries", entries)
	var existing string
	if err := pool.QueryRow(b.ctx, "SELECT coalesce(obj_description('public'::regnamespace), '')").Scan(
		&existing); err != nil {
		return err
	}
	if existing == mark {
		return (&postgres.Migrator{Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: quiet}).Up(b.ctx)
	}
	if err := b.reset(pool, true); err != nil {
		return err
	}
	if err := fillHistory(b.ctx, pool, entries); err != nil {
		return err
	}
	for _, sql := range []string{
		"SELECT dlq.rebuild_rollups()", "VACUUM ANALYZE",
		"COMMENT ON SCHEMA public IS '" + mark + "'",
	} {
		if _, err := pool.Exec(b.ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// measurePages prints for each page how long a request takes, its size, and its first paint.
func measurePages(b *bench, pool *pgxpool.Pool, base string, entries int) error {
	var id, queue, fingerprint string
	if err := pool.QueryRow(b.ctx, `SELECT id, queue, fingerprint FROM dlq.dead_letter_open WHERE status = 'dlq_manual'
		ORDER BY id DESC LIMIT 1`).Scan(&id, &queue, &fingerprint); err != nil {
		return err
	}
	list := func(q string) string { return "/dead-letters?q=" + url.QueryEscape(q) }
	pages := []string{
		"/", "/dead-letters", list("status:manual"), list("status:resolved queue:queue_3"),
		list("class:outage queue:queue_1"), list("group:" + fingerprint), list(`"connection refused"`), "/dead-letters/" + id,
		"/groups", "/groups/" + queue + "/" + fingerprint, "/review", "/replays", "/replays/new",
		"/queues", "/policy", "/audit", "/audit?people=true", "/approvals", "/access", "/system", "/docs",
	}
	paints, err := firstPaints(b.ctx, base, pages)
	if err != nil {
		return err
	}
	b.newTable("page, at "+thousands(float64(entries))+" entries", "p50 ms", "p99 ms", "kB",
		"first contentful paint ms, CPU slowed to a quarter")
	for _, page := range pages {
		took := make([]time.Duration, consoleRequests)
		size := 0
		for i := range took {
			start := time.Now()
			n, status, err := fetchPage(b.ctx, base+page)
			if err != nil {
				return err
			}
			if status != http.StatusOK {
				return fmt.Errorf("%s: status %d", page, status)
			}
			took[i], size = time.Since(start), n
		}
		slices.Sort(took)
		b.row(page, milliseconds(took[len(took)/2]), milliseconds(took[len(took)*99/100]), size/1000, int(paints[page]))
	}
	return nil
}

func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.1f", float64(d.Microseconds())/1000)
}

func fetchPage(ctx context.Context, address string) (size, status int, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return 0, 0, err
	}
	request.Header.Set("Accept", "text/html")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, 0, err
	}
	defer func() { _ = response.Body.Close() }()
	n, err := io.Copy(io.Discard, response.Body)
	return int(n), response.StatusCode, err
}

// watchPages prints the database's transactions per second with no open page, with one, and with many.
func watchPages(b *bench, pool *pgxpool.Pool, base string) error {
	b.newTable("open pages", "transactions/s: overview", "list", "dead letter", "replays", "running replay run")
	var id string
	if err := pool.QueryRow(b.ctx, "SELECT id FROM dlq.dead_letter_open WHERE status = 'dlq_manual' LIMIT 1").Scan(
		&id); err != nil {
		return err
	}
	var run string // a replay run that stays active, because no worker is running
	if err := pool.QueryRow(b.ctx, "SELECT dlq.replay_start(jsonb_build_object('ids', jsonb_build_array($1::text)), "+
		"'bench', p_rate => 0.001, p_force => true)", id).Scan(&run); err != nil {
		return err
	}
	defer func() { _, _ = pool.Exec(b.ctx, "SELECT dlq.replay_cancel($1)", run) }()
	for _, watchers := range []int{0, 1, consoleWatchers} {
		cells := []any{watchers}
		for _, page := range []string{
			"/", "/dead-letters?q=status:manual", "/dead-letters/" + id, "/replays",
			"/replays/" + run,
		} {
			rate, err := transactionsWhile(b.ctx, pool, base, page, watchers)
			if err != nil {
				return err
			}
			cells = append(cells, fmt.Sprintf("%.2f", rate))
		}
		b.row(cells...)
	}
	return nil
}

func transactionsWhile(ctx context.Context, pool *pgxpool.Pool, base, page string, watchers int) (float64, error) {
	ctx, cancel := context.WithCancel(ctx)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	var begun sync.WaitGroup
	failed := make(chan error, watchers)
	for range watchers {
		begun.Add(1)
		watching.Go(func() {
			once := sync.OnceFunc(begun.Done)
			defer once()
			if err := watchPage(ctx, base+"/events?page="+url.QueryEscape(page), once); err != nil && ctx.Err() == nil {
				failed <- err
			}
		})
	}
	begun.Wait()
	count := func() (n int64, err error) {
		// Sessions report their transactions to the statistics within a second.
		return n, pool.QueryRow(ctx, `SELECT xact_commit + xact_rollback FROM pg_stat_database
			WHERE datname = current_database()`).Scan(&n)
	}
	before, err := count()
	if err != nil {
		return 0, err
	}
	select {
	case err := <-failed:
		return 0, err
	case <-time.After(watchDuration):
	}
	after, err := count()
	return float64(after-before) / watchDuration.Seconds(), err
}

func watchPage(ctx context.Context, address string, begun func()) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode != http.StatusOK || !strings.HasPrefix(response.Header.Get("Content-Type"),
		"text/event-stream") {
		return fmt.Errorf("%s: %s", address, response.Status)
	}
	lines := bufio.NewReader(response.Body)
	for {
		if _, err := lines.ReadString('\n'); err != nil {
			return err
		}
		begun()
	}
}
