package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/metrics"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// ingestBench sends single messages of 1 KB over 64 and 256 connections, each request after the
// answer to the previous one.
func ingestBench(b *bench, scale float64) error {
	seconds := time.Duration(8 * scale * float64(time.Second))
	b.row("connections", "joined inserts/s", "p50 ms", "p99 ms", "one insert per request/s", "ratio")
	for _, connections := range []int{64, 256} {
		var p50, p99 []float64
		run := func(group, flushers int, conns int32, record bool) func() (float64, error) {
			return func() (rate float64, err error) {
				err = b.withPool(conns, func(pool *pgxpool.Pool) error {
					if err := b.reset(pool, true); err != nil {
						return err
					}
					r, latencies, err := post(b.ctx, pool, group, flushers, connections, seconds, false)
					if record && err == nil {
						p50 = append(p50, latencies[len(latencies)/2].Seconds()*1000)
						p99 = append(p99, latencies[len(latencies)*99/100].Seconds()*1000)
					}
					rate = r
					return err
				})
				return rate, err
			}
		}
		joined, single, ratio, err := b.pairs(
			run(ingest.DefaultMaxGroup, ingest.DefaultFlushers, postgres.DefaultMaxConns, true),
			run(1, connections, 64, false))
		if err != nil {
			return err
		}
		b.row(connections, thousands(joined), fmt.Sprintf("%.1f", median(p50)), fmt.Sprintf("%.1f", median(p99)),
			thousands(single), fmt.Sprintf("%.2f", ratio))
	}
	return nil
}

// accessBench sends the same messages with a token, beside a server without authentication.
func accessBench(b *bench, scale float64) error {
	seconds := time.Duration(8 * scale * float64(time.Second))
	b.row("connections", "with a token, inserts/s", "without, inserts/s", "ratio")
	const connections = 64
	run := func(token bool) func() (float64, error) {
		return func() (rate float64, err error) {
			err = b.withPool(postgres.DefaultMaxConns, func(pool *pgxpool.Pool) error {
				if err := b.reset(pool, true); err != nil {
					return err
				}
				rate, _, err = post(b.ctx, pool, ingest.DefaultMaxGroup, ingest.DefaultFlushers, connections, seconds, token)
				return err
			})
			return rate, err
		}
	}
	with, without, ratio, err := b.pairs(run(true), run(false))
	if err == nil {
		b.row(connections, thousands(with), thousands(without), fmt.Sprintf("%.2f", ratio))
	}
	return err
}

func post(ctx context.Context, pool *pgxpool.Pool, group, flushers, connections int, length time.Duration,
	withToken bool,
) (float64, []time.Duration, error) {
	rules, err := policy.Default("http://127.0.0.1:1/")
	if err != nil {
		return 0, nil, err
	}
	var authenticator *access.Authenticator
	var credentials string
	if withToken {
		rules.Access.Authentication = []string{"tokens"}
		tokens := access.NewStore(pool, postgres.DefaultSchemas())
		secret, err := tokens.Create(ctx, &access.Token{Name: "bench", Role: access.Sender, Queues: []string{"default"}},
			"bench")
		if err != nil {
			return 0, nil, err
		}
		authenticator = &access.Authenticator{Tokens: tokens, Rules: rules.Access.Rules}
		credentials = "Authorization: Bearer " + secret + "\r\n"
	}
	ingester, err := ingest.New(ingest.Config{
		Pool: pool, Schemas: postgres.DefaultSchemas(), Policy: func() *policy.Policy { return rules },
		Logger: quiet, MaxGroup: group, Flushers: flushers,
	})
	if err != nil {
		return 0, nil, err
	}
	defer ingester.Stop(ctx)
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, nil, err
	}
	server := &http.Server{ReadHeaderTimeout: time.Minute, Handler: api.New(api.Config{
		Access: authenticator, Ingester: ingester,
		Store: deadletter.NewStore(pool, postgres.DefaultSchemas()), Metrics: metrics.New(), Logger: quiet,
	})}
	go func() { _ = server.Serve(listener) }()
	defer func() { _ = server.Close() }()

	body := `{"queue": "default", "kind": "payment.captured", "source": "bench", "payload": {"blob": "` +
		strings.Repeat("x", 900) + `"}}`
	request := fmt.Appendf(nil, "POST /api/messages HTTP/1.1\r\nHost: localhost\r\n%sContent-Type: "+
		"application/json\r\nContent-Length: %d\r\n\r\n%s", credentials, len(body), body)
	var wg sync.WaitGroup
	results := make([][]time.Duration, connections)
	errs := make([]error, connections)
	start := time.Now()
	for i := range connections {
		wg.Go(func() { results[i], errs[i] = sendRequests(ctx, listener.Addr().String(), request, start.Add(length)) })
	}
	wg.Wait()
	took := time.Since(start)
	all := slices.Concat(results...)
	slices.Sort(all)
	var stored float64
	if err := errors.Join(errors.Join(errs...), pool.QueryRow(ctx, "SELECT count(*) FROM river_job").Scan(&stored)); err !=
		nil {
		return 0, nil, err
	}
	if int(stored) != len(all) {
		return 0, nil, fmt.Errorf("%d messages were accepted (202), %.0f are stored", len(all), stored)
	}
	return stored / took.Seconds(), all, nil
}

// sendRequests sends one request after the other on one connection. It does as little work as possible,
// because the load shares the machine with the measured server.
func sendRequests(ctx context.Context, address string, request []byte, until time.Time) ([]time.Duration, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	reader := bufio.NewReader(conn)
	var latencies []time.Duration
	for {
		start := time.Now()
		if start.After(until) {
			return latencies, nil
		}
		if _, err := conn.Write(request); err != nil {
			return nil, err
		}
		if err := readResponse(reader); err != nil {
			return nil, err
		}
		latencies = append(latencies, time.Since(start))
	}
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
