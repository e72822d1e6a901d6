// Command mutate measures how many faults the tests notice. It changes the code of a room in one place (a mutant), runs
// the room's tests, and counts the mutants that make a test fail or take too long (killed). The others survive: either
// a test is missing, or the change makes no difference (equivalent).
//
// A room is a package of internal/, or db/code, the SQL functions. mutate does not change the work tree: "go test
// -overlay" builds a mutant of Go, and a mutant of SQL replaces functions in the template of the tests' databases. At
// first it finds out what code each test runs. So for a mutant, only the tests that run its code are run. It is started
// with "make mutate".
package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// z is the quantile of the normal distribution for a two-sided interval with a confidence of 90 %.
const z = 1.6449

// equivalentFile lists mutants that no test can kill. Each line has file, change and reason, separated by tabs.
const equivalentFile = "tools/mutate/equivalent.txt"

// Mutant is one change of one file.
type Mutant struct {
	File     string
	Line     int
	Position position // of the change
	Change   string   // the changed lines on one line, as "git diff --word-diff" marks them
	Source   []byte   // the whole file with the change
	Sum      string   // a hash of Source
}

// newMutant returns the mutant in which replacement replaces source[start:end].
func newMutant(file string, source []byte, start, end int, replacement string) Mutant {
	mutated := slices.Concat(source[:start], []byte(replacement), source[end:])
	from := bytes.LastIndexByte(source[:start], '\n') + 1
	to := len(source)
	if i := bytes.IndexByte(source[end:], '\n'); i >= 0 {
		to = end + i
	}
	change := fmt.Sprintf("%s[-%s-]{+%s+}%s", source[from:start], source[start:end], replacement, source[end:to])
	sum := sha256.Sum256(mutated)
	line := bytes.Count(source[:start], []byte("\n")) + 1
	return Mutant{
		File: file, Line: line, Position: position{line, start - from + 1}, Source: mutated,
		Change: strings.Join(strings.Fields(change), " "), Sum: hex.EncodeToString(sum[:8]),
	}
}

// Verdicts about a mutant. Only killed and survived mutants count.
const (
	killed   = "killed"
	survived = "survived"
	invalid  = "invalid" // does not compile, or Postgres refuses its functions
)

// result is a line of the file of results.
type result struct {
	File, Change, Sum string
	Line              int
	Verdict           string
	By                string `json:",omitempty"` // the first test that failed, "timeout", or how many passed
	Tests             string // a hash of the room's tests and queries; when they have changed, a survivor is run again
	Seconds           float64
}

func main() {
	seed := flag.Uint64("seed", 1, "selects the sample; take a new one after adding tests for survivors")
	count := flag.Int("count", 60, "mutants of each room, not counting invalid and equivalent ones")
	file := flag.String("results", "bin/mutants.jsonl", "file of results; a mutant that it lists is not run again")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, *seed, *count, *file, flag.Args())
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, seed uint64, count int, file string, rooms []string) error {
	known, err := readResults(file)
	if err != nil {
		return err
	}
	equivalent, err := os.ReadFile(equivalentFile)
	if err != nil {
		return err
	}
	out, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer out.Close()
	var reports []string
	for _, room := range rooms {
		mutants, err := candidates(room)
		if err != nil {
			return err
		}
		s := sample{
			out: out, cover: file + ".coverage", known: known, equivalent: string(equivalent),
			mutants: shuffled(mutants, seed, room),
		}
		err = s.take(ctx, room, count)
		reports = append(reports, s.report(room))
		if err != nil {
			fmt.Println(strings.Join(reports, "\n"))
			return fmt.Errorf("%s: %w", room, err)
		}
	}
	fmt.Println(strings.Join(reports, "\n"))
	return nil
}

// readResults returns the last result of each mutant, by [Mutant.Sum].
func readResults(file string) (map[string]result, error) {
	raw, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	known := map[string]result{}
	for line := range bytes.Lines(raw) {
		var r result
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, fmt.Errorf("%s: %w (remove the line)", file, err)
		}
		known[r.Sum] = r
	}
	return known, nil
}

// candidates returns all mutants of a room (a package, or db/code). It omits tests and generated files.
func candidates(room string) (all []Mutant, err error) {
	files, err := filepath.Glob(filepath.Join(room, "*"))
	for _, file := range files {
		source, readErr := os.ReadFile(file)
		switch {
		case file == "db/code/16_comments.sql": // the file contains only comments on objects
			continue
		case strings.HasSuffix(file, ".sql"):
			all = append(all, mutateSQL(file, source)...)
		case strings.HasSuffix(file, ".go") && !strings.HasSuffix(file, "_test.go"):
			mutants, parseErr := mutateGo(file, source)
			all = append(all, mutants...)
			err = errors.Join(err, parseErr)
		default:
			continue
		}
		err = errors.Join(err, readErr)
	}
	if len(all) == 0 && err == nil {
		err = fmt.Errorf("%s: nothing to change (a room is internal/NAME or db/code)", room)
	}
	return all, err
}

// shuffled returns a room's mutants in the order in which a sample takes them. The same seed and code give the same
// order.
func shuffled(mutants []Mutant, seed uint64, room string) []Mutant {
	name := fnv.New64a()
	_, _ = name.Write([]byte(room))
	random := rand.New(rand.NewPCG(seed, name.Sum64()))
	random.Shuffle(len(mutants), func(i, j int) { mutants[i], mutants[j] = mutants[j], mutants[i] })
	return mutants
}

// sample has the mutants of a room, and the results of those that were run.
type sample struct {
	out        *os.File
	cover      string // file of coverage
	known      map[string]result
	equivalent string
	mutants    []Mutant // in the order of the sample

	killed, invalid, skipped int
	survivors                []result
}

// take runs mutants until count of them were killed or have survived, or until none is left. It skips equivalent
// mutants and does not run a mutant again whose result is known.
func (s *sample) take(ctx context.Context, room string, count int) error {
	r := runner{room: room, cover: s.cover, kills: map[string]int{}}
	defer r.close()
	for _, done := range s.known {
		if done.Verdict == killed && filepath.Dir(done.File) == room {
			r.kills[done.By]++
		}
	}
	tests, err := r.readTests()
	if err != nil {
		return err
	}
	for _, m := range s.mutants {
		if s.killed+len(s.survivors) >= count {
			break
		}
		if strings.Contains(s.equivalent, m.File+"\t"+m.Change+"\t") {
			s.skipped++
			continue
		}
		done, found := s.known[m.Sum]
		if !found || done.Verdict == survived && done.Tests != tests {
			start := time.Now()
			done = result{File: m.File, Change: m.Change, Sum: m.Sum, Line: m.Line, Tests: tests}
			if done.Verdict, done.By, err = r.run(ctx, m); err != nil {
				return err
			}
			if done.Verdict == killed {
				r.kills[done.By]++
			}
			done.Seconds = math.Round(time.Since(start).Seconds()*10) / 10
			if err := json.NewEncoder(s.out).Encode(done); err != nil {
				return err
			}
			fmt.Printf("%s\t%s:%d\t%s\t%s\t%gs\n", done.Verdict, m.File, m.Line, m.Change, done.By, done.Seconds)
		}
		switch done.Verdict {
		case killed:
			s.killed++
		case survived:
			s.survivors = append(s.survivors, done)
		default:
			s.invalid++
		}
	}
	return nil
}

func (s *sample) report(room string) string {
	var b strings.Builder
	n := s.killed + len(s.survivors)
	low, high := wilson(s.killed, n)
	fmt.Fprintf(&b, "%s: score %.2f (90 %% interval %.2f to %.2f): %d of %d mutants killed; "+
		"not counted: %d invalid, %d equivalent; %d places to change\n",
		room, float64(s.killed)/float64(max(n, 1)), low, high, s.killed, n, s.invalid, s.skipped, len(s.mutants))
	for _, m := range s.survivors {
		fmt.Fprintf(&b, "  %s:%d: %s (%s)\n", m.File, m.Line, m.Change, m.By)
	}
	return b.String()
}

// wilson returns the score interval of Wilson (1927) for a share of k in n, with a confidence of 90 %.
func wilson(k, n int) (low, high float64) {
	if n == 0 {
		return 0, 1
	}
	count, share := float64(n), float64(k)/float64(n)
	middle := share + z*z/(2*count)
	half := z * math.Sqrt(share*(1-share)/count+z*z/(4*count*count))
	return (middle - half) / (1 + z*z/count), (middle + half) / (1 + z*z/count)
}
