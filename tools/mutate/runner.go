package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	codeRoom = "db/code"
	// testRole owns the tests' databases; it equals postgrestest.Role.
	testRole = "dlqd_test"
	// urlVariable names the environment variable with the URL of the server that all mutants share.
	urlVariable = "DLQD_TEST_DATABASE_URL"
	// The tests of a mutant may take patience times as long as the tests of the unchanged code, plus slack. If they take
	// longer, the mutant counts as killed.
	patience = 5
	slack    = 10 * time.Second
)

// codeTests are the packages with tests of SQL functions. The tests of internal/server are too slow.
var codeTests = strings.Fields(`internal/deadletter internal/worker internal/facts internal/reconcile
	internal/replay internal/host internal/breaker internal/retention internal/group internal/analytics
	internal/automatic internal/restored internal/approval internal/metrics internal/delivery
	internal/process`)

// nearest is how many packages of codeTests run for a mutant of db/code. They are the packages whose tests and queries
// name the changed function most often. So a mutant survives if only the tests of other packages would kill it.
const nearest = 4

var (
	failure  = regexp.MustCompile(`^\s*--- FAIL: (\S+)|^(panic|fatal error):`)
	function = regexp.MustCompile(`(?m)^CREATE OR REPLACE [A-Z]+ (dlq\.\w+)`)
)

// runner runs the tests of a room.
type runner struct {
	room     string
	dir      string                   // directory of built tests; "" until the first mutant
	limits   map[string]time.Duration // time limits of packages whose tests have passed on the unchanged code
	sources  map[string]string        // text of the tests and queries of each package
	template string                   // the database that tests copy
}

func (r *runner) packages() []string {
	if r.room == codeRoom {
		return codeTests
	}
	return []string{r.room}
}

func (r *runner) close() { _ = os.RemoveAll(r.dir) }

// readTests reads the room's tests and queries, and returns a hash of them.
func (r *runner) readTests() (string, error) {
	hash := sha256.New()
	r.sources = map[string]string{}
	for _, pkg := range r.packages() {
		files, err := filepath.Glob(filepath.Join(pkg, "*_test.go"))
		if err != nil {
			return "", err
		}
		for _, file := range append(files, "db/queries/"+filepath.Base(pkg)+".sql") {
			raw, err := os.ReadFile(file)
			if err != nil && !errors.Is(err, os.ErrNotExist) { // a package may have no queries
				return "", err
			}
			_, _ = hash.Write(raw)
			r.sources[pkg] += string(raw)
		}
	}
	return hex.EncodeToString(hash.Sum(nil)[:8]), nil
}

// start builds the tests of packages and runs them on the unchanged code, unless it has done so before. It sets the
// time limits for mutants.
func (r *runner) start(ctx context.Context, packages []string) (err error) {
	if r.dir == "" {
		r.limits = map[string]time.Duration{}
		if r.dir, err = os.MkdirTemp("", "mutate-"); err != nil {
			return err
		}
	}
	for _, pkg := range packages {
		if r.limits[pkg] > 0 {
			continue
		}
		if output, err := r.build(ctx, pkg, "{}"); err != nil {
			return fmt.Errorf("building the tests of %s: %w\n%s", pkg, err, output)
		}
		if err := r.resetTemplate(ctx); err != nil {
			return err
		}
		start := time.Now()
		by, err := r.test(ctx, pkg, 10*time.Minute)
		if err != nil {
			return err
		}
		if by != "" {
			return fmt.Errorf("%s fails without a change: %s", pkg, by)
		}
		r.limits[pkg] = patience*time.Since(start) + slack
		fmt.Printf("%s passes without a change in %.1fs\n", pkg, time.Since(start).Seconds())
	}
	if r.room == codeRoom && r.template == "" {
		return r.findTemplate(ctx)
	}
	return nil
}

// run returns the verdict about a mutant, and the test that killed it.
func (r *runner) run(ctx context.Context, m Mutant) (verdict, by string, err error) {
	packages := r.packages()
	if r.room == codeRoom {
		packages = slices.Clone(packages)
		slices.SortStableFunc(packages, func(a, b string) int { return r.near(m, b) - r.near(m, a) })
		packages = packages[:nearest]
	}
	if err := r.start(ctx, packages); err != nil {
		return "", "", err
	}
	if r.room == codeRoom {
		if ok, err := r.install(ctx, m); err != nil || !ok {
			return invalid, "", err
		}
	} else {
		changed := filepath.Join(r.dir, "changed.go")
		path, err := filepath.Abs(m.File)
		overlay, marshalErr := json.Marshal(map[string]any{"Replace": map[string]string{path: changed}})
		if err := errors.Join(err, marshalErr, os.WriteFile(changed, m.Source, 0o600)); err != nil {
			return "", "", err
		}
		if _, err := r.build(ctx, r.room, string(overlay)); err != nil {
			return invalid, "", ctx.Err()
		}
	}
	for _, pkg := range packages {
		if by, err := r.test(ctx, pkg, r.limits[pkg]); by != "" || err != nil {
			return killed, by, err
		}
	}
	return survived, "", nil
}

// near returns how often the tests and queries of a package name the function that a mutant changes. The other
// functions of the same file count, too, but less.
func (r *runner) near(m Mutant, pkg string) (n int) {
	own, names := "", map[string]bool{}
	for _, match := range function.FindAllSubmatchIndex(m.Source, -1) {
		name := string(m.Source[match[2]:match[3]]) + "("
		names[name] = true
		if bytes.Count(m.Source[:match[0]], []byte("\n")) < m.Line {
			own = name
		}
	}
	for name := range names {
		count := strings.Count(r.sources[pkg], name)
		if name == own {
			count *= 100
		}
		n += count
	}
	return n
}

// build builds the tests of a package with an overlay.
func (r *runner) build(ctx context.Context, pkg, overlay string) (output []byte, err error) {
	file := filepath.Join(r.dir, "overlay.json")
	if err := os.WriteFile(file, []byte(overlay), 0o600); err != nil {
		return nil, err
	}
	return exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-ldflags=-w", "-overlay", file,
		"-o", r.binary(pkg), "./"+pkg).CombinedOutput()
}

func (r *runner) binary(pkg string) string {
	return filepath.Join(r.dir, strings.ReplaceAll(pkg, "/", "-")+".test")
}

// test runs the built tests of a package. It returns the first test that failed, "timeout", or "". At the first failure
// it ends the process, because -failfast does not stop parallel tests that have begun. Then it drops the databases that
// the process left.
func (r *runner) test(ctx context.Context, pkg string, limit time.Duration) (by string, err error) {
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	args := []string{"-test.failfast", "-test.timeout=0", "-test.parallel=3"}
	if strings.Contains(r.sources[pkg], `"pgregory.net/rapid"`) {
		// Do not search for a smaller counterexample, and write no file with it.
		args = append(args, "-rapid.shrinktime=0s", "-rapid.nofailfile")
	}
	cmd := exec.CommandContext(limited, r.binary(pkg), args...)
	cmd.Dir = pkg
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second
	output, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	cmd.Stderr = cmd.Stdout
	if err := cmd.Start(); err != nil {
		return "", err
	}
	lines := bufio.NewReader(output)
	for err == nil {
		var line string
		line, err = lines.ReadString('\n')
		if match := failure.FindStringSubmatch(line); match != nil && by == "" {
			by = match[1] + match[2]
			cancel()
		}
	}
	err = cmd.Wait()
	switch {
	case ctx.Err() != nil:
		return "", ctx.Err()
	case by == "" && limited.Err() != nil:
		by = "timeout"
	case by == "" && err != nil:
		by = err.Error()
	}
	if by != "" {
		err = r.dropDatabases(ctx)
	}
	return by, err
}

// as connects to a database of the shared server, runs fn, and disconnects.
func as(ctx context.Context, role, database string, fn func(*pgx.Conn) error) error {
	address, err := url.Parse(os.Getenv(urlVariable))
	if err != nil || address.Host == "" && address.RawQuery == "" {
		return fmt.Errorf("%s is not the URL of a server: run it by make mutate", urlVariable)
	}
	if role != "" {
		address.User, address.Path = url.User(role), "/"+database
	}
	conn, err := pgx.Connect(ctx, address.String())
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	return fn(conn)
}

func names(ctx context.Context, conn *pgx.Conn, pattern string) ([]string, error) {
	rows, err := conn.Query(ctx, "SELECT datname FROM pg_database WHERE datname LIKE $1", pattern)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func (r *runner) dropDatabases(ctx context.Context) error {
	return as(ctx, "", "", func(conn *pgx.Conn) error {
		left, err := names(ctx, conn, `test\_%`)
		for _, name := range left {
			_, dropErr := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
			err = errors.Join(err, dropErr)
		}
		return err
	})
}

// findTemplate finds the template that the tests have created, and copies it under the name "unchanged".
func (r *runner) findTemplate(ctx context.Context) error {
	return as(ctx, "", "", func(conn *pgx.Conn) error {
		found, err := names(ctx, conn, `template\_%`)
		if err == nil && len(found) != 1 {
			err = fmt.Errorf("the server has %d templates of tests: run it with a new server, by make mutate", len(found))
		}
		if err != nil {
			return err
		}
		r.template = found[0]
		_, err = conn.Exec(ctx, "CREATE DATABASE unchanged TEMPLATE "+r.template+" OWNER "+testRole)
		return err
	})
}

// resetTemplate recreates the template without a mutant.
func (r *runner) resetTemplate(ctx context.Context) error {
	if r.template == "" {
		return nil
	}
	return as(ctx, "", "", func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+r.template+" WITH (FORCE)")
		if err == nil {
			_, err = conn.Exec(ctx, "CREATE DATABASE "+r.template+" TEMPLATE unchanged OWNER "+testRole)
		}
		return err
	})
}

// install replaces the functions of a mutant's file in the template. It returns false if Postgres refuses them.
func (r *runner) install(ctx context.Context, m Mutant) (ok bool, err error) {
	if err := r.resetTemplate(ctx); err != nil {
		return false, err
	}
	err = as(ctx, testRole, r.template, func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, string(m.Source))
		return err
	})
	var refusal interface{ SQLState() string }
	if errors.As(err, &refusal) {
		return false, nil
	}
	return err == nil, err
}
