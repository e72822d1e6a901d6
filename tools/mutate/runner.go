package main

import (
	"bufio"
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
	// functionsVariable equals postgrestest.FunctionsVariable.
	functionsVariable = "DLQD_TEST_FUNCTIONS"
	// templateTest is a test of codeTests[0] that uses a database.
	templateTest = "TestReservePlaces_UnusedStreamStartsNow"
	// The tests of a mutant may take patience times as long as the tests of the unchanged code, plus slack. If they take
	// longer, the mutant counts as killed.
	patience = 5
	slack    = 20 * time.Second
)

// codeTests are the packages with tests of SQL functions. The tests of internal/server are too slow.
var codeTests = strings.Fields(`internal/deadletter internal/worker internal/facts internal/reconcile
	internal/replay internal/host internal/breaker internal/retention internal/group internal/analytics
	internal/automatic internal/restored internal/approval internal/metrics internal/delivery
	internal/process`)

// first is how many tests run at first for a mutant: they kill most mutants.
const first = 4

// mostSeconds limits the tests that are run for a mutant of db/code, because nearly every test calls some functions.
// The durations of the tests without a change are added up; the tests after the sum has reached mostSeconds are not
// run. So a mutant survives if only those tests would kill it.
const mostSeconds = 90

var failure = regexp.MustCompile(`^\s*--- FAIL: (\S+)|^(panic|fatal error):`)

// runner runs the tests of a room.
type runner struct {
	room     string
	cover    string              // file of coverage
	dir      string              // directory of built tests; "" until the first mutant
	built    map[string]bool     // packages of which dir has the tests of the unchanged Go code
	files    map[string][]string // texts of the files with tests of each package
	tests    []covered           // all tests of the room's packages
	blocks   []string            // of a room of Go
	kills    map[string]int      // how many mutants each test has killed
	template string              // the database that tests copy
}

func (r *runner) packages() []string {
	if r.room == codeRoom {
		return codeTests
	}
	return []string{r.room}
}

func (r *runner) close() { _ = os.RemoveAll(r.dir) }

// readTests reads the room's tests and returns a hash of them.
func (r *runner) readTests() (string, error) {
	hash := sha256.New()
	r.files = map[string][]string{}
	for _, pkg := range r.packages() {
		files, err := filepath.Glob(filepath.Join(pkg, "*_test.go"))
		if err != nil {
			return "", err
		}
		for _, file := range files {
			raw, err := os.ReadFile(file)
			if err != nil {
				return "", err
			}
			_, _ = hash.Write(raw)
			r.files[pkg] = append(r.files[pkg], string(raw))
		}
	}
	return hex.EncodeToString(hash.Sum(nil)[:8]), nil
}

// start finds which code each test runs, unless it has done so before.
func (r *runner) start(ctx context.Context) (err error) {
	if r.dir != "" {
		return nil
	}
	if r.dir, err = os.MkdirTemp("", "mutate-"); err != nil {
		return err
	}
	r.built = map[string]bool{}
	if r.room == codeRoom {
		// Any test with a database creates the template.
		if err := r.buildOnce(ctx, codeTests[0]); err != nil {
			return err
		}
		if _, err := r.alone(ctx, codeTests[0], []covered{{Test: templateTest}}, nil); err != nil {
			return err
		}
		if err := r.findTemplate(ctx); err != nil {
			return err
		}
	}
	return r.coverage(ctx, r.cover)
}

// run returns the verdict about a mutant, and the test that killed it, or how many tests passed.
func (r *runner) run(ctx context.Context, m Mutant) (verdict, by string, err error) {
	if err := r.start(ctx); err != nil {
		return "", "", err
	}
	tests := r.covering(m)
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
	if len(tests) == 0 {
		return survived, "no test runs it", nil
	}
	count := r.affordable(tests)
	start := min(first, count)
	for _, batch := range [][]covered{tests[:start], tests[start:count]} {
		for _, pkg := range r.packages() {
			those := slices.Collect(func(yield func(covered) bool) {
				for _, c := range batch {
					if c.Package == pkg && !yield(c) {
						return
					}
				}
			})
			if len(those) == 0 {
				continue
			}
			if r.room == codeRoom {
				if err := r.buildOnce(ctx, pkg); err != nil {
					return "", "", err
				}
			}
			if by, err := r.test(ctx, pkg, those); by != "" || err != nil {
				return killed, by, err
			}
		}
	}
	return survived, fmt.Sprintf("%d of %d tests that run it passed", count, len(tests)), nil
}

// affordable returns how many of a mutant's tests are run.
func (r *runner) affordable(tests []covered) int {
	seconds := 0.0
	for i, c := range tests {
		if seconds += c.Seconds; r.room == codeRoom && seconds > mostSeconds && i > 0 {
			return i
		}
	}
	return len(tests)
}

// buildOnce builds the tests of a package without a change, unless it has done so before.
func (r *runner) buildOnce(ctx context.Context, pkg string) error {
	if r.built[pkg] {
		return nil
	}
	if output, err := r.build(ctx, pkg, "{}"); err != nil {
		return fmt.Errorf("building the tests of %s: %w\n%s", pkg, err, output)
	}
	r.built[pkg] = true
	return nil
}

// build builds the tests of a package with an overlay. No test needs cgo.
func (r *runner) build(ctx context.Context, pkg, overlay string, flags ...string) (output []byte, err error) {
	file := filepath.Join(r.dir, "overlay.json")
	if err := os.WriteFile(file, []byte(overlay), 0o600); err != nil {
		return nil, err
	}
	args := append([]string{"test", "-c", "-vet=off", "-ldflags=-w", "-overlay", file, "-o", r.binary(pkg)}, flags...)
	cmd := exec.CommandContext(ctx, "go", append(args, "./"+pkg)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	return cmd.CombinedOutput()
}

func (r *runner) binary(pkg string) string {
	return filepath.Join(r.dir, strings.ReplaceAll(pkg, "/", "-")+".test")
}

// arguments returns the arguments with which the built tests of a package run only the given tests.
func (r *runner) arguments(pkg string, tests []covered) []string {
	names := make([]string, len(tests))
	for i, c := range tests {
		names[i] = c.Test
	}
	args := []string{"-test.run=^(" + strings.Join(names, "|") + ")$", "-test.parallel=3"}
	usesRapid := func(text string) bool { return strings.Contains(text, `"pgregory.net/rapid"`) }
	if slices.ContainsFunc(r.files[pkg], usesRapid) {
		// Do not search for a smaller counterexample, and write no file with it.
		args = append(args, "-rapid.shrinktime=0s", "-rapid.nofailfile")
	}
	return args
}

// test runs tests of a package. It returns the first test that failed, "timeout", or "". At the first failure it ends
// the process, because -failfast does not stop parallel tests that have begun. Then it drops the databases that the
// process left.
func (r *runner) test(ctx context.Context, pkg string, tests []covered) (by string, err error) {
	limit := slack
	for _, c := range tests {
		limit += time.Duration(patience * c.Seconds * float64(time.Second))
	}
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(limited, r.binary(pkg),
		append(r.arguments(pkg, tests), "-test.failfast", "-test.timeout=0")...)
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

// as connects to a database of the shared server, runs fn, and disconnects. Without a role it connects as the server's
// superuser, and without a database to the one of the server's URL.
func as(ctx context.Context, role, database string, fn func(*pgx.Conn) error) error {
	address, err := url.Parse(os.Getenv(urlVariable))
	if err != nil || address.Host == "" && address.RawQuery == "" {
		return fmt.Errorf("%s is not the URL of a server: run it by make mutate", urlVariable)
	}
	if role != "" {
		address.User = url.User(role)
	}
	if database != "" {
		address.Path = "/" + database
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

// countCalls makes Postgres count the calls of all functions in copies of the template, until resetTemplate.
func (r *runner) countCalls(ctx context.Context) error {
	err := as(ctx, "", "", func(conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, "ALTER SYSTEM SET track_functions = 'all'")
		if err == nil {
			_, err = conn.Exec(ctx, "SELECT pg_reload_conf()")
		}
		return err
	})
	if err != nil {
		return err
	}
	return as(ctx, "", r.template, func(conn *pgx.Conn) error { // an owner of functions may not set such a parameter
		_, err := conn.Exec(ctx, `DO $$
			DECLARE v_function regprocedure;
			BEGIN
				FOR v_function IN SELECT p.oid FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
					WHERE p.pronamespace = 'dlq'::regnamespace AND p.prokind = 'f' AND l.lanname = 'sql' LOOP
					EXECUTE format('ALTER FUNCTION %s SET mutate.counted = 1', v_function);
				END LOOP;
			END $$`)
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
