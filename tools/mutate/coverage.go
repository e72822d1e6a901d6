package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// covered is a test, and the code that the test runs if no code is changed. It is a line of the file of coverage.
type covered struct {
	Key     string   // a hash of the room's code and of the test's file; if it has changed, the test is run again
	Package string   // such as internal/breaker
	Test    string   // "" lists all blocks of the package
	Code    []string // blocks of Go, such as "breaker.go:12.3,14.5", or SQL functions
	Seconds float64
	Failed  bool `json:",omitempty"` // a test that fails without a change kills no mutant
}

var (
	testFunction = regexp.MustCompile(`(?m)^func ((?:Test|Example|Fuzz)\w*)\(`)
	testEnd      = regexp.MustCompile(`^--- (PASS|FAIL|SKIP): (\w+) \(([0-9.]+)s\)`)
	// object matches the beginning of a statement that creates an object, or of a DO block, which may create some.
	object = regexp.MustCompile(`(?m)^(?:CREATE (?:OR REPLACE )?[A-Z]+ (dlq\.\w+)|DO\b)`)
)

// coverage reads from file which code each test runs. It runs the tests that the file lacks, and appends them to the
// file.
func (r *runner) coverage(ctx context.Context, file string) error {
	known := map[string]covered{}
	raw, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	for line := range bytes.Lines(raw) {
		var c covered
		if err := json.Unmarshal(line, &c); err != nil {
			return fmt.Errorf("%s: %w (remove the line)", file, err)
		}
		known[c.Key+c.Package+c.Test] = c
	}
	out, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer out.Close()
	code, err := r.code()
	if err != nil {
		return err
	}
	for _, pkg := range r.packages() {
		var missing []covered
		for _, text := range r.files[pkg] {
			hash := sha256.Sum256(append(slices.Clone(code), text...))
			key := hex.EncodeToString(hash[:8])
			for _, match := range testFunction.FindAllStringSubmatch(text, -1) {
				if match[1] == "TestMain" {
					continue
				}
				c := covered{Key: key, Package: pkg, Test: match[1]}
				if found, ok := known[c.Key+c.Package+c.Test]; ok {
					r.tests = append(r.tests, found)
				} else {
					missing = append(missing, c)
				}
			}
		}
		blocks := covered{Key: hex.EncodeToString(code), Package: pkg}
		if all, ok := known[blocks.Key+pkg]; ok {
			r.blocks = all.Code
		}
		if len(missing) == 0 {
			continue
		}
		find := r.coverGo
		if r.room == codeRoom {
			find = r.coverSQL
		}
		fmt.Printf("%s: finding the code that %d tests run\n", pkg, len(missing))
		if err := find(ctx, pkg, missing, func(c covered) error {
			if c.Failed {
				fmt.Printf("%s: %s fails without a change, so it kills no mutant\n", pkg, c.Test)
			}
			if c.Test == "" {
				c.Key, r.blocks = blocks.Key, c.Code
			} else {
				r.tests = append(r.tests, c)
			}
			return json.NewEncoder(out).Encode(c)
		}); err != nil {
			return err
		}
	}
	return nil
}

// code returns a hash of the room's code without tests.
func (r *runner) code() ([]byte, error) {
	files, err := filepath.Glob(filepath.Join(r.room, "*"))
	if err != nil {
		return nil, err
	}
	hash := sha256.New()
	for _, file := range files {
		if !strings.HasSuffix(file, ".sql") && !strings.HasSuffix(file, ".go") || strings.HasSuffix(file, "_test.go") {
			continue
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		_, _ = hash.Write(raw)
	}
	return hash.Sum(nil)[:8], nil
}

// coverGo runs each test alone, with Go's coverage.
func (r *runner) coverGo(ctx context.Context, pkg string, tests []covered, add func(covered) error) error {
	if output, err := r.build(ctx, pkg, "{}", "-cover"); err != nil {
		return fmt.Errorf("building the tests of %s: %w\n%s", pkg, err, output)
	}
	profile, err := filepath.Abs(filepath.Join(r.dir, "profile"))
	if err != nil {
		return err
	}
	listed := false
	for _, c := range tests {
		_ = os.Remove(profile)
		ends, err := r.alone(ctx, pkg, []covered{c}, nil, "-test.coverprofile="+profile)
		if err != nil {
			return err
		}
		raw, err := os.ReadFile(profile)
		if err != nil && !os.IsNotExist(err) { // a test that ends the process writes no profile
			return err
		}
		all := covered{Package: pkg}
		for line := range strings.Lines(string(raw)) {
			block, count, _ := strings.Cut(filepath.Base(strings.TrimSpace(line)), " ")
			if !strings.Contains(block, ".go:") {
				continue
			}
			all.Code = append(all.Code, block)
			if !strings.HasSuffix(count, " 0") {
				c.Code = append(c.Code, block)
			}
		}
		if !listed && len(all.Code) > 0 {
			listed = true
			if err := add(all); err != nil {
				return err
			}
		}
		c.Seconds, c.Failed = ends[c.Test].Seconds, ends[c.Test].Failed
		if err := add(c); err != nil {
			return err
		}
	}
	return nil
}

// coverSQL runs the tests of a package together. Each test writes the SQL functions whose calls Postgres counted in the
// test's database. Postgres does not count the calls of a function that it inlines. It does not inline a function with
// a setting, so the functions of the template get a setting.
func (r *runner) coverSQL(ctx context.Context, pkg string, tests []covered, add func(covered) error) error {
	if err := r.buildOnce(ctx, pkg); err != nil {
		return err
	}
	if err := r.countCalls(ctx); err != nil {
		return err
	}
	file, err := filepath.Abs(filepath.Join(r.dir, "functions"))
	if err != nil {
		return err
	}
	_ = os.Remove(file)
	ends, err := r.alone(ctx, pkg, tests, append(os.Environ(), functionsVariable+"="+file))
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(file)
	if err != nil && !os.IsNotExist(err) { // perhaps no test has a database
		return err
	}
	functions := map[string][]string{}
	for line := range strings.Lines(string(raw)) {
		if fields := strings.Fields(line); len(fields) > 0 {
			name, _, _ := strings.Cut(fields[0], "/")
			functions[name] = append(functions[name], fields[1:]...)
		}
	}
	for _, c := range tests {
		c.Seconds, c.Failed = ends[c.Test].Seconds, ends[c.Test].Failed
		c.Code = functions[c.Test]
		slices.Sort(c.Code)
		c.Code = slices.Compact(c.Code)
		if err := add(c); err != nil {
			return err
		}
	}
	return r.resetTemplate(ctx)
}

// alone runs tests of the unchanged code in one process, and returns how each ended.
func (r *runner) alone(
	ctx context.Context, pkg string, tests []covered, environment []string, args ...string,
) (map[string]covered, error) {
	cmd := exec.CommandContext(ctx, r.binary(pkg),
		append(r.arguments(pkg, tests), append(args, "-test.v", "-test.timeout=20m")...)...)
	cmd.Dir, cmd.Env = pkg, environment
	output, _ := cmd.CombinedOutput() // the lines of tests have the failures
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	ends := map[string]covered{}
	for _, c := range tests {
		ends[c.Test] = covered{Failed: true} // if the process ends before the test
	}
	lines := bufio.NewScanner(bytes.NewReader(output))
	lines.Buffer(nil, len(output)+1)
	for lines.Scan() {
		if match := testEnd.FindStringSubmatch(lines.Text()); match != nil {
			var seconds float64
			_, _ = fmt.Sscan(match[3], &seconds)
			ends[match[2]] = covered{Seconds: seconds, Failed: match[1] == "FAIL"}
		}
	}
	return ends, lines.Err()
}

// covering returns the tests that run the code which a mutant changes. First come the tests that killed most mutants,
// then those whose file names the function, then those that run little other code.
func (r *runner) covering(m Mutant) (tests []covered) {
	runs, name := r.runsSQL(m)
	if r.room != codeRoom {
		runs = r.runsGo(m)
	}
	for _, c := range r.tests {
		if !c.Failed && runs(c) {
			tests = append(tests, c)
		}
	}
	names := map[string]bool{}
	for _, files := range r.files {
		for _, text := range files {
			if name == "" || !strings.Contains(text, name) {
				continue
			}
			for _, match := range testFunction.FindAllStringSubmatch(text, -1) {
				names[match[1]] = true
			}
		}
	}
	rank := func(c covered) int {
		if names[c.Test] {
			return 0
		}
		return 1
	}
	slices.SortStableFunc(tests, func(a, b covered) int {
		return cmp.Or(cmp.Compare(r.kills[b.Test], r.kills[a.Test]), cmp.Compare(rank(a), rank(b)),
			cmp.Compare(len(a.Code), len(b.Code)))
	})
	return tests
}

// runsSQL returns a function that reports whether a test calls the SQL function which a mutant changes, and the
// function's name. Postgres does not count the uses of views, so a test counts as using a view if a file of the test's
// package names the view.
func (r *runner) runsSQL(m Mutant) (runs func(covered) bool, name string) {
	own, kind := "", ""
	for _, match := range object.FindAllSubmatchIndex(m.Source, -1) {
		after := bytes.Count(m.Source[:match[0]], []byte("\n")) >= m.Line
		if after && own != "" {
			break
		}
		own = ""
		if match[2] >= 0 {
			own, kind = string(m.Source[match[2]:match[3]]), string(m.Source[match[0]:match[2]])
		}
		if after {
			break // the mutant is in a DO block that creates functions, before the first of them
		}
	}
	name = strings.TrimPrefix(own, "dlq.")
	if !strings.Contains(kind, "FUNCTION") && !strings.Contains(kind, "PROCEDURE") {
		return func(c covered) bool {
			return len(c.Code) > 0 && slices.ContainsFunc(r.files[c.Package],
				func(text string) bool { return strings.Contains(text, own) })
		}, name
	}
	return func(c covered) bool { return slices.Contains(c.Code, own) }, name
}

// runsGo returns a function that reports whether a test runs the block which a mutant changes. A place outside of
// blocks, such as the condition of a case, counts as run if the test runs a block of the same function. A place outside
// of functions always counts as run.
func (r *runner) runsGo(m Mutant) func(covered) bool {
	file := filepath.Base(m.File)
	within := func(from, to position) map[string]bool {
		found := map[string]bool{}
		for _, block := range r.blocks {
			name, span, _ := strings.Cut(block, ":")
			var start, end position
			_, err := fmt.Sscanf(span, "%d.%d,%d.%d", &start.line, &start.column, &end.line, &end.column)
			if err == nil && name == file && !to.before(start) && from.before(end) {
				found[block] = true
			}
		}
		return found
	}
	blocks := within(m.Position, m.Position)
	if len(blocks) == 0 {
		from, to := function(m)
		if to.line == 0 {
			return func(covered) bool { return true }
		}
		blocks = within(from, to)
	}
	return func(c covered) bool {
		return slices.ContainsFunc(c.Code, func(block string) bool { return blocks[block] })
	}
}

// position is a line and a column of a file. Both begin at 1.
type position struct{ line, column int }

func (p position) before(q position) bool {
	return p.line < q.line || p.line == q.line && p.column < q.column
}

// function returns the beginning and the end of the function that a mutant changes, or zero if the mutant is outside of
// functions.
func function(m Mutant) (from, to position) {
	files := token.NewFileSet()
	tree, err := parser.ParseFile(files, m.File, m.Source, parser.SkipObjectResolution)
	if err != nil {
		return from, to
	}
	for _, declaration := range tree.Decls {
		start, end := files.Position(declaration.Pos()), files.Position(declaration.End())
		if _, ok := declaration.(*ast.FuncDecl); ok && start.Line <= m.Line && m.Line <= end.Line {
			return position{start.Line, start.Column}, position{end.Line, end.Column}
		}
	}
	return from, to
}
