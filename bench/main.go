// Command bench measures dlqd and prints tables. If a benchmark has a baseline, it measures dlqd and the baseline in
// one run on one machine.
//
//	go run ./bench ingest       single-message POSTs, beside River's fastest insert behind net/http; -beside PROGRAM
//	                            measures another build of this benchmark too
//	go run ./bench access       the same POSTs with a token, beside a server without authentication
//	go run ./bench processing   no-op jobs, beside bare River
//	go run ./bench capture      cost of capture for jobs that succeed and jobs that fail, beside River without it
//	go run ./bench replay       runs that replay many entries, beside claiming them, inserting as many jobs with River's
//	                            client and updating each, and beside these inserts alone
//	go run ./bench retries      facts of 100,000 jobs that one statement retries outside dlqd
//	go run ./bench retention    a month of a million entries: dropped, archived and dropped, or deleted; and captures
//	go run ./bench analytics    each question at 10,000,000 entries and 30,000,000 moves; cost of rollups for captures
//	go run ./bench console      each page of the console at 10,000,000 entries, and the database load of open pages
//	go run ./bench metrics      cost of a scrape and a sample, with counters of years and up to 1,000,000 open entries
//	go run ./bench outage       ten minutes of outage of one of three destinations; -scale 0.1 for one minute
//	go run ./bench incident     20,000 dead letters with five causes: requests that fail again in an ordinary and in a
//	                            progressive run; later rounds are progressive only, and have other numbers of messages
//	go run ./bench filing       failures filed and decided per second, and the time from a job's commit to the decision
//	go run ./bench indexes      what each list index of the open partition costs filing; times of its lists without it
//	go run ./bench growth       the main paths and reads at 10,000 to 10,000,000 entries: whether their cost grows with
//	                            the history
//	go run ./bench soak         two hours at 60 % of the capacity, 5 % of it dead letters: what changes with time
//	go run ./bench production   connections, WAL, disk, processor time and memory of 1, 2 and 4 processes
//	go run ./bench kafka        records of a topic (of kfake) stored, beside a bare consumer that inserts the same rows;
//	                            filed and decided, beside River's failures; the memory of a catch-up of 1,000,000
//	go run ./bench compare X    benchmark X of this build and of another one (-beside PROGRAM) in turn, and what changed;
//	                            see README.md
//	go run ./bench suite X…     benchmarks X of this list (by default those that have a place in it) and one table of
//	                            their rates, beside baselines and peers; see README.md
//	go run ./bench peers        posts and no-op jobs of asynq, Bull, BullMQ, pg-boss and graphile-worker
//	go run ./bench claim        claim, decide and redeliver from 1,000,000 open entries; plans of the claim and the lists
//
// Postgres is dlqd's embedded server with its settings and fsync on. The server, dlqd and the load share the machine.
// Not measured: networks, several machines, other disks, and payloads other than 1 KB (except in capture).
package main

import (
	"context"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"text/tabwriter"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/dlqd/dlqd/internal/postgres"
)

var quiet = slog.New(slog.DiscardHandler)

type bench struct {
	ctx       context.Context
	rounds    int
	server    *postgres.Embedded
	table     *tabwriter.Writer
	templates []string // databases that reset copies
	beside    string   // another build of this program, or ""
	profile   string   // file for a CPU profile, or ""
}

var runs = map[string]func(*bench, float64) error{
	"ingest":     ingestBench,
	"metrics":    metricsBench,
	"access":     accessBench,
	"peers":      peersBench,
	"processing": processing,
	"production": production,
	"capture":    capture,
	"claim":      claim,
	"console":    consoleBench,
	"filing":     filing,
	"outage":     outage,
	"replay":     replayBench,
	"retention":  retentionBench,
	"retries":    retriesBench,
	"analytics":  analyticsBench,
	"incident":   incidentBench,
	"growth":     growth,
	"soak":       soak,
	"kafka":      kafkaBench,
	"indexes":    indexStudy,
}

func main() {
	rounds := flag.Int("rounds", 3, "number of rounds; bench prints the median")
	scale := flag.Float64("scale", 1, "share of the full amount of work")
	bin := flag.String("postgres-bin", "", "directory of the Postgres programs")
	keep := flag.String("keep", "", "directory for the database, which is kept; console fills it once and reuses it")
	beside := flag.String("beside", "", "another build of this program, whose server ingest measures too")
	server := flag.String("server", "", "used by ingest: serve dlqd or limit until standard input ends")
	serverURL := flag.String("server-url", "", "database of -server")
	profile := flag.String("profile", "", "file for the CPU profile of dlqd's server in the last run of ingest")
	serverToken := flag.Bool("server-token", false, "-server requires a token")
	write := flag.Bool("write", false, "used by compare: write the ratios of this build to "+ratiosFile)
	flag.Parse()
	if *server != "" {
		if err := serve(context.Background(), *server, *serverURL, *profile, *serverToken); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	if flag.Arg(0) == "compare" {
		args := []string{"-scale", strconv.FormatFloat(*scale, 'g', -1, 64), "-postgres-bin", *bin}
		if err := compareBuilds(context.Background(), *beside, flag.Arg(1), *rounds, args, *write); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	if flag.Arg(0) == "suite" {
		if err := runSuite(context.Background(), flag.Args()[1:], *rounds, *scale, *bin); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	run := runs[flag.Arg(0)]
	if run == nil {
		fmt.Fprintln(os.Stderr, "usage: bench [-rounds N] [-scale F] "+
			"ingest|access|processing|capture|claim|compare|console|filing|growth|incident|indexes|kafka|metrics|outage|"+
			"peers|production|replay|"+
			"retention|retries|soak|suite|analytics")
		os.Exit(2)
	}
	if err := start(run, *rounds, *scale, *bin, *keep, *beside, *profile); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func start(run func(*bench, float64) error, rounds int, scale float64, bin, keep, beside, profile string) error {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	dir := keep
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "dlqd-bench-"); err != nil {
			return err
		}
		defer func() { _ = os.RemoveAll(dir) }()
	} else if err := os.MkdirAll(dir, 0o711); err != nil { //nolint:gosec // the server's user goes through
		return err
	}
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // the server's user goes through
		return err
	}
	server, err := postgres.StartEmbedded(ctx, postgres.EmbeddedConfig{
		DataDir: filepath.Join(dir, "data"), BinDir: bin, Logger: quiet,
	})
	if err != nil {
		return err
	}
	defer func() { _ = server.Stop() }()
	b := &bench{
		ctx: postgres.Unbounded(ctx), rounds: rounds, server: server, beside: beside, profile: profile,
		table: tabwriter.NewWriter(os.Stdout, 0, 0, 3, ' ', tabwriter.AlignRight),
	}
	var version string
	if err := b.withPool(2, func(pool *pgxpool.Pool) error {
		return pool.QueryRow(ctx, "SELECT current_setting('server_version')").Scan(&version)
	}); err != nil {
		return err
	}
	fmt.Printf("%d CPUs, %s/%s, %s, Postgres %s, fsync on, %d rounds (median)\n\n", runtime.NumCPU(), runtime.GOOS,
		runtime.GOARCH, runtime.Version(), version, rounds)
	if err := run(b, scale); err != nil {
		return err
	}
	return b.table.Flush()
}

// newTable prints the table so far and begins a new one.
func (b *bench) newTable(cells ...any) {
	_ = b.table.Flush()
	fmt.Println()
	b.row(cells...)
}

func (b *bench) row(cells ...any) {
	for _, c := range cells {
		_, _ = fmt.Fprintf(b.table, "%v\t", c)
	}
	_, _ = fmt.Fprintln(b.table)
}

func (b *bench) withPool(conns int32, run func(*pgxpool.Pool) error) error {
	pool, err := postgres.Open(b.ctx, b.server.URL(), max(conns, 4)) // Detach takes three connections
	if err != nil {
		return err
	}
	defer pool.Close()
	return run(pool)
}

// reset replaces the database by a copy of a template. The template has River's tables and, if withDLQ is set, dlqd's.
// The first reset with a template creates it.
func (b *bench) reset(pool *pgxpool.Pool, withDLQ bool) error {
	config := pool.Config().Copy()
	database := config.ConnConfig.Database
	template := database + "_river"
	if withDLQ {
		template = database + "_dlqd"
	}
	config.ConnConfig.Database = "postgres"
	admin, err := pgx.ConnectConfig(b.ctx, config.ConnConfig)
	if err != nil {
		return err
	}
	defer func() { _ = admin.Close(b.ctx) }()
	create := func(database, from string) error {
		if _, err := admin.Exec(b.ctx, "DROP DATABASE IF EXISTS "+database+" WITH (FORCE)"); err != nil {
			return err
		}
		_, err := admin.Exec(b.ctx, "CREATE DATABASE "+database+" TEMPLATE "+from)
		return err
	}
	if !slices.Contains(b.templates, template) {
		if err := create(template, "template0"); err != nil {
			return err
		}
		config.ConnConfig.Database = template
		if err := migrate(b.ctx, config, withDLQ); err != nil {
			return err
		}
		b.templates = append(b.templates, template)
	}
	if err := create(database, template); err != nil {
		return err
	}
	pool.Reset() // the pool's sessions have ended
	_, err = admin.Exec(b.ctx, "CHECKPOINT")
	return err
}

// migrate installs River's tables and, if withDLQ is set, dlqd's, in an empty database.
func migrate(ctx context.Context, config *pgxpool.Config, withDLQ bool) error {
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	if !withDLQ {
		river, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Logger: quiet})
		if err != nil {
			return err
		}
		_, err = river.Migrate(ctx, rivermigrate.DirectionUp, nil)
		return err
	}
	m := &postgres.Migrator{Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: quiet}
	if err := m.Up(ctx); err != nil {
		return err
	}
	// Capture must not skip jobs on a slow machine, as it would with the default limit, because all of its work is
	// measured.
	_, err = pool.Exec(ctx, "SELECT dlq.set_capture('on', '1 min')")
	return err
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}

// pairs runs two measurements in alternating order. It returns the median of each, and the median of their ratio.
func (b *bench) pairs(subject, baseline func() (float64, error)) (s, base, ratio float64, err error) {
	var ss, bs, rs []float64
	for round := range b.rounds {
		var x, y float64
		runs := []func() error{
			func() (err error) { y, err = baseline(); return err },
			func() (err error) { x, err = subject(); return err },
		}
		if round%2 == 1 {
			slices.Reverse(runs)
		}
		for _, run := range runs {
			if err := run(); err != nil {
				return 0, 0, 0, err
			}
		}
		ss, bs, rs = append(ss, x), append(bs, y), append(rs, x/y)
	}
	return median(ss), median(bs), median(rs), nil
}

func thousands(v float64) string {
	n := fmt.Sprintf("%.0f", v)
	for i := len(n) - 3; i > 0; i -= 3 {
		n = n[:i] + "," + n[i:]
	}
	return n
}

func explain(ctx context.Context, pool *pgxpool.Pool, sql string, args ...any) ([]string, error) {
	rows, err := pool.Query(ctx, "EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, SUMMARY ON) "+sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
