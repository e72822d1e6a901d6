package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// suiteNames are the benchmarks of the suite, in the order in which it runs them.
var suiteNames = []string{"ingest", "replay", "claim", "filing", "capture", "processing", "peers"}

// suiteScale is the scale with which the suite runs a benchmark; it is 1 for the others. So no benchmark has more than
// 200,000 rows.
var suiteScale = map[string]float64{"replay": 0.25, "claim": 0.2}

// notInstalled is printed after the name of a peer that cannot be measured, and before the reason.
const notInstalled = "  not installed: "

// comparison is a figure of dlqd, and the baseline of the same run. baseline is zero if there is none.
type comparison struct{ dlqd, baseline cell }

// runSuite runs the benchmarks in turn, each once in a round, and prints one table at the end. Meanwhile the tables of
// the benchmarks go to standard error.
func runSuite(ctx context.Context, names []string, rounds int, scale float64, bin string) error {
	if len(names) == 0 {
		names = suiteNames
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	outputs := map[string][]string{}
	var failed error
	for range rounds {
		for _, name := range names {
			share := scale
			if s, ok := suiteScale[name]; ok {
				share *= s
			}
			var out bytes.Buffer
			cmd := exec.CommandContext(ctx, self, "-rounds", "1", //nolint:gosec // this program
				"-scale", strconv.FormatFloat(share, 'g', -1, 64), "-postgres-bin", bin, name)
			cmd.Stdout, cmd.Stderr = io.MultiWriter(os.Stderr, &out), os.Stderr
			if err := cmd.Run(); err != nil {
				failed = errors.Join(failed, fmt.Errorf("%s: %w", name, err))
				continue
			}
			outputs[name] = append(outputs[name], out.String())
		}
	}
	return errors.Join(printSuite(os.Stdout, names, outputs), failed)
}

// printSuite prints the table of the suite. outputs has the outputs of each benchmark, one for each round.
func printSuite(w io.Writer, names []string, outputs map[string][]string) error {
	table := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	_, _ = fmt.Fprintln(table, "path\trow\tdlqd\t\tbeside\t\tratio\tspread")
	for _, name := range names {
		if len(outputs[name]) == 0 {
			_, _ = fmt.Fprintf(table, "%s\tfailed\n", name)
			continue
		}
		var rounds []map[cell]float64
		for _, out := range outputs[name] {
			_, values := readTables(out)
			rounds = append(rounds, values)
		}
		order, _ := readTables(outputs[name][0])
		for _, c := range comparisons(order) {
			var ours, theirs, ratios []float64
			for _, values := range rounds {
				our, ok := values[c.dlqd]
				their, found := values[c.baseline]
				if !ok || !found && c.baseline != (cell{}) {
					continue
				}
				ours, theirs, ratios = append(ours, our), append(theirs, their), append(ratios, our/their)
			}
			if len(ours) == 0 {
				continue
			}
			_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s", name, c.dlqd.row, formatFigure(median(ours)), c.dlqd.column)
			if c.baseline != (cell{}) {
				beside := c.baseline.column
				if c.baseline.row != c.dlqd.row {
					beside = c.baseline.row
				}
				_, _ = fmt.Fprintf(table, "\t%s\t%s\t%.2f\t%.2f–%.2f", formatFigure(median(theirs)), beside, median(ratios),
					slices.Min(ratios), slices.Max(ratios))
			}
			_, _ = fmt.Fprintln(table)
		}
		for line := range strings.Lines(outputs[name][0]) {
			if peer, reason, found := strings.Cut(strings.TrimSpace(line), notInstalled); found {
				_, _ = fmt.Fprintf(table, "%s\t%s\tnot installed: %s\n", name, peer, reason)
			}
		}
	}
	return table.Flush()
}

// comparisons returns the figures of a benchmark that the suite shows:
//   - for each ratio, the first figure of its row, with the figure before the ratio as the baseline;
//   - for each figure of a row "… dlqd", the figure of the row "… limit" as the baseline;
//   - rates that have no baseline.
func comparisons(order []cell) []comparison {
	var found []comparison
	var used []cell
	add := func(c comparison) {
		found, used = append(found, c), append(used, c.dlqd, c.baseline)
	}
	var first cell
	for _, c := range order {
		if c.row != first.row {
			first = c
		}
		if c.isRatio() {
			add(comparison{first, cell{c.row, strings.TrimSuffix(c.column, " ratio")}})
		}
		if connections, isDLQD := strings.CutSuffix(c.row, " dlqd"); isDLQD {
			limit := cell{connections + " limit", c.column}
			if slices.Contains(order, limit) && c.column != "of the limit" {
				add(comparison{c, limit})
			}
		}
	}
	for _, c := range order {
		if strings.HasSuffix(c.column, "/s") && !slices.Contains(used, c) {
			found = append(found, comparison{dlqd: c})
		}
	}
	return found
}
