// Command flaky reads the events of a run of gotestsum, which repeats failed tests one by one. It prints the tests that
// failed first and then passed. It exits with 1 if there was any other failure, or if no test ran.
//
// gotestsum v1.13.0 accepts a package whose process ended early, or whose TestMain failed, if the tests that it repeats
// pass. Other tests of that package may not have run at all.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
)

func main() {
	events, err := os.Open(os.Getenv("GOTESTSUM_JSONFILE")) // gotestsum sets the variable for its --post-run-command
	if err == nil {
		err = report(os.Stdout, events)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// event is an event of "go test -json".
type event struct{ Action, Package, Test string }

// results has the results of a package. A subtest counts as a part of its test.
type results struct {
	name          string
	ended, failed bool // of the first run; the other runs repeat one test each
	running       int
	tests, flaky  []string
	failing       []string
}

// report prints flaky tests. It returns an error if the run does not count as passed.
func report(w io.Writer, events io.Reader) error {
	var packages []*results
	byName := map[string]*results{}
	for decoder := json.NewDecoder(events); ; {
		var e event
		if err := decoder.Decode(&e); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return fmt.Errorf("read the events of the tests: %w", err)
		}
		if e.Package == "" || strings.Contains(e.Test, "/") {
			continue
		}
		r := byName[e.Package]
		if r == nil {
			r = &results{name: e.Package}
			byName[e.Package] = r
			packages = append(packages, r)
		}
		r.add(e)
	}
	tests := 0
	var errs []error
	for _, r := range packages {
		tests += len(r.tests)
		for _, test := range r.flaky {
			fmt.Fprintf(w, "flaky: %s %s failed first, and passed alone\n", r.name, test)
		}
		errs = append(errs, r.err())
	}
	if tests == 0 {
		errs = append(errs, errors.New("no test ran"))
	}
	return errors.Join(errs...)
}

func (r *results) add(e event) {
	ended := e.Action == "pass" || e.Action == "fail" || e.Action == "skip"
	switch {
	case r.ended:
		if i := slices.Index(r.failing, e.Test); i >= 0 && e.Action == "pass" {
			r.failing = slices.Delete(r.failing, i, i+1)
			r.flaky = append(r.flaky, e.Test)
		}
	case e.Test == "":
		r.ended, r.failed = ended, e.Action == "fail"
	case e.Action == "run":
		r.running++
	case ended:
		r.running--
		r.tests = append(r.tests, e.Test)
		if e.Action == "fail" {
			r.failing = append(r.failing, e.Test)
		}
	}
}

func (r *results) err() error {
	switch {
	case len(r.failing) > 0:
		return fmt.Errorf("%s failed: %s", r.name, strings.Join(r.failing, ", "))
	case !r.ended, r.running > 0:
		return fmt.Errorf("%s failed: its process ended early, after %d tests", r.name, len(r.tests))
	case r.failed && len(r.flaky) == 0:
		return fmt.Errorf("%s failed outside of its tests", r.name)
	}
	return nil
}
