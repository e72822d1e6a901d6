package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/riverdlq"
)

const (
	peersSource = "bench/peers" // below the working directory
	peersDir    = "bin/peers"   // directory in which the peers are installed
)

// peers are the job queues with which dlqd is compared. Peers without redis use Postgres.
var peers = []struct {
	name, argument string
	redis, node    bool
}{
	{"asynq", "asynq", true, false},
	{"Bull", "bull", true, true},
	{"BullMQ", "bullmq", true, true},
	{"pg-boss", "pg-boss", false, true},
	{"graphile-worker", "graphile-worker", false, true},
}

// peersBench measures dlqd and its peers in turn. It measures jobs of 1 KB that a server stores durably, with one job
// in each POST, over 64 connections; and no-op jobs that a process works.
func peersBench(b *bench, scale float64) error {
	messages, jobs := int64(20_000*scale), int(20_000*scale)
	missing := installPeers(b.ctx)
	results := map[string][2][]float64{}
	for round := range b.rounds {
		for i := range len(peers) + 1 {
			i = (i + round) % (len(peers) + 1)
			name := "dlqd"
			var rates [2]float64
			var err error
			switch {
			case i == len(peers):
				var l load
				if l, err = b.measure("dlqd", 64, messages, false); err == nil {
					rates[0] = l.rate
					rates[1], err = b.measureWork(jobs, true, false, riverdlq.NewMiddleware())()
				}
			case missing[peers[i].name] != nil:
				continue
			default:
				name = peers[i].name
				if rates[0], err = b.withPeer(i, func(command []string) (float64, error) {
					return postToPeer(b.ctx, command, messages)
				}); err == nil {
					rates[1], err = b.withPeer(i, func(command []string) (float64, error) {
						return workWithPeer(b.ctx, command, jobs)
					})
				}
			}
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			r := results[name]
			for n := range r {
				r[n] = append(r[n], rates[n])
			}
			results[name] = r
		}
	}
	b.row("peer and task", "dlqd/s", "peer/s", "ratio")
	for _, p := range peers {
		for n, task := range []string{"posts", "no-op jobs"} {
			if missing[p.name] != nil {
				continue
			}
			ours, theirs := results["dlqd"][n], results[p.name][n]
			ratios := make([]float64, b.rounds)
			for round := range ratios {
				ratios[round] = ours[round] / theirs[round]
			}
			b.row(p.name+": "+task, thousands(median(ours)), thousands(median(theirs)), fmt.Sprintf("%.2f", median(ratios)))
		}
	}
	if err := b.table.Flush(); err != nil {
		return err
	}
	fmt.Println()
	for _, p := range peers {
		if missing[p.name] != nil {
			fmt.Println(p.name + notInstalled + missing[p.name].Error())
		}
	}
	return nil
}

// installPeers installs the peers below peersDir. It returns the errors of those that it could not install, by name.
func installPeers(ctx context.Context) map[string]error {
	install := func(dir, program string, args ...string) error {
		cmd := exec.CommandContext(ctx, program, args...) //nolint:gosec // of the calls below
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err != nil {
			last := strings.TrimSpace(string(out))
			last = strings.Join(strings.Fields(last[strings.LastIndex(last, "\n")+1:]), " ")
			return fmt.Errorf("%s %s: %w: %s", program, args[0], err, last)
		}
		return nil
	}
	dir, err := filepath.Abs(peersDir)
	if err == nil {
		err = os.MkdirAll(dir, 0o755) //nolint:gosec // programs for all users
	}
	redisErr := errors.Join(err, install("", "scripts/install.sh", "redis-server"))
	asynqErr := errors.Join(err, install(peersSource, "go", "build", "-o", filepath.Join(dir, "asynq"), "."))
	node := filepath.Join(dir, "node")
	nodeErr := errors.Join(err, os.RemoveAll(node), os.CopyFS(node, os.DirFS(filepath.Join(peersSource, "node"))))
	if nodeErr == nil {
		nodeErr = install(node, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	}
	missing := map[string]error{}
	for _, p := range peers {
		reason := asynqErr
		if p.node {
			reason = nodeErr
		}
		if p.redis && reason == nil {
			reason = redisErr
		}
		missing[p.name] = reason
	}
	return missing
}

// withPeer empties the peer's database, and calls run with the command of the peer. run appends the last argument to
// the command.
func (b *bench) withPeer(i int, run func(command []string) (float64, error)) (rate float64, err error) {
	command := []string{filepath.Join(peersDir, "asynq"), peers[i].argument}
	if peers[i].node {
		command = []string{"node", filepath.Join(peersDir, "node", "peer.js"), peers[i].argument}
	}
	if !peers[i].redis {
		err = b.withPool(4, func(pool *pgxpool.Pool) error {
			if err := b.reset(pool, false); err != nil {
				return err
			}
			rate, err = run(append(command, b.server.URL()))
			return err
		})
		return rate, err
	}
	dir, err := os.MkdirTemp("", "dlqd-bench-redis-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	socket := filepath.Join(dir, "redis.sock")
	redis := exec.CommandContext(b.ctx, "redis-server", "--port", "0", "--unixsocket", socket, //nolint:gosec // own paths
		"--dir", dir, "--appendonly", "yes", "--appendfsync", "always", "--save", "")
	if err := redis.Start(); err != nil {
		return 0, err
	}
	defer func() {
		_ = redis.Process.Kill()
		_ = redis.Wait()
	}()
	for range 500 {
		var conn net.Conn
		if conn, err = (&net.Dialer{}).DialContext(b.ctx, "unix", socket); err == nil {
			_ = conn.Close()
			return run(append(command, socket))
		}
		time.Sleep(10 * time.Millisecond)
	}
	return 0, fmt.Errorf("redis-server did not start: %w", err)
}

// postToPeer starts the peer as a server, sends messages to the server, and returns how many it stored per second.
func postToPeer(ctx context.Context, command []string, messages int64) (float64, error) {
	command = append(command, "serve")
	server, err := startProcess(exec.CommandContext(ctx, command[0], command[1:]...)) //nolint:gosec // a peer
	if err != nil {
		return 0, err
	}
	start := time.Now()
	_, err = sendMessages(ctx, server, 64, messages)
	took := time.Since(start)
	_ = server.stdin.Close()
	stored := ""
	if server.lines.Scan() { // the number of stored jobs
		stored = server.lines.Text()
	}
	server.stop()
	if err == nil && stored != strconv.FormatInt(messages, 10) {
		err = fmt.Errorf("%d messages were accepted (202), %q are stored", messages, stored)
	}
	return float64(messages) / took.Seconds(), err
}

// workWithPeer makes the peer insert jobs and then work them. It returns how many jobs the peer works per second.
func workWithPeer(ctx context.Context, command []string, jobs int) (float64, error) {
	command = append(command, strconv.Itoa(jobs))
	cmd := exec.CommandContext(ctx, command[0], command[1:]...) //nolint:gosec // a peer
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(string(out)), 64)
}
