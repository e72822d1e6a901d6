package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// ratiosFile has the ratios of the last release, one on each line: benchmark, row, column, value.
const ratiosFile = "bench/ratios.tsv"

// cell is the place of a figure in a benchmark's tables. If the figure is a ratio, column also names the baseline: the
// column before the ratio.
type cell struct{ row, column string }

func (c cell) isRatio() bool { return strings.HasSuffix(c.column, " ratio") }

// compareBuilds runs a benchmark of this build and of another one in turn. It prints how each figure changed, and the
// ratios of the last release. If write is set, the ratios of this build replace those in ratiosFile.
func compareBuilds(ctx context.Context, other, name string, rounds int, args []string, write bool) error {
	if other == "" || runs[name] == nil {
		return errors.New("usage: bench -beside PROGRAM [-rounds N] [-scale F] [-write] compare BENCHMARK")
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	builds := []string{other, self}
	var order []cell
	var figures [2]map[cell][]float64
	for i := range figures {
		figures[i] = map[cell][]float64{}
	}
	for round := range rounds {
		for i := range builds {
			i = (i + round) % len(builds)
			cmd := exec.CommandContext(ctx, builds[i], //nolint:gosec // builds that the caller names
				slices.Concat([]string{"-rounds", "1"}, args, []string{name})...)
			cmd.Stderr = os.Stderr
			out, err := cmd.Output()
			if err != nil {
				return fmt.Errorf("%s %s: %w", builds[i], name, err)
			}
			cells, values := readTables(string(out))
			if order == nil {
				order = cells
			}
			for c, value := range values {
				figures[i][c] = append(figures[i][c], value)
			}
		}
	}
	released, err := readRatios(name)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 3, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(table, "row\tfigure\tlast release\tother build\tthis build\tchange\tlowest\thighest\t")
	for _, c := range order {
		before, now := figures[0][c], figures[1][c]
		if len(before) != rounds || len(now) != rounds {
			continue // only one of the builds has this figure
		}
		changes := make([]float64, rounds)
		for i := range changes {
			changes[i] = (now[i]/before[i] - 1) * 100
		}
		last := ""
		if value, ok := released[c]; ok {
			last = formatFigure(value)
		}
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%+.0f %%\t%+.0f %%\t%+.0f %%\t\n", c.row, c.column, last,
			formatFigure(median(before)), formatFigure(median(now)), median(changes), slices.Min(changes),
			slices.Max(changes))
	}
	if err := table.Flush(); err != nil || !write {
		return err
	}
	return writeRatios(name, order, figures[1])
}

func formatFigure(v float64) string {
	if math.Abs(v) < 10 {
		return strconv.FormatFloat(v, 'f', 2, 64)
	}
	return thousands(v)
}

var gap = regexp.MustCompile(` {2,}`)

// readTables returns the figures in a benchmark's output, and their order. A line with a single cell ends a table. The
// first line of a table has the names of the columns.
func readTables(out string) (order []cell, values map[cell]float64) {
	values = map[cell]float64{}
	var columns []string
	for line := range strings.Lines(out) {
		cells := gap.Split(strings.TrimSpace(line), -1)
		if len(cells) < 2 {
			columns = nil
			continue
		}
		if columns == nil {
			columns = cells
			for i := len(columns) - 1; i > 0; i-- {
				if columns[i] == "ratio" {
					columns[i] = columns[i-1] + " ratio"
				}
			}
			continue
		}
		for i := 1; i < min(len(cells), len(columns)); i++ {
			value, err := strconv.ParseFloat(strings.ReplaceAll(cells[i], ",", ""), 64)
			c := cell{row: cells[0], column: columns[i]}
			if _, found := values[c]; err == nil && !found {
				order = append(order, c)
				values[c] = value
			}
		}
	}
	return order, values
}

// ratioLines returns the lines of ratiosFile.
func ratioLines() ([][]string, error) {
	file, err := os.Open(ratiosFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	var lines [][]string
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		lines = append(lines, strings.Split(scanner.Text(), "\t"))
	}
	return lines, scanner.Err()
}

func readRatios(name string) (map[cell]float64, error) {
	lines, err := ratioLines()
	ratios := map[cell]float64{}
	for _, line := range lines {
		if len(line) != 4 || line[0] != name {
			continue
		}
		value, err := strconv.ParseFloat(line[3], 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", ratiosFile, err)
		}
		ratios[cell{row: line[1], column: line[2]}] = value
	}
	return ratios, err
}

func writeRatios(name string, order []cell, figures map[cell][]float64) error {
	lines, err := ratioLines()
	if err != nil {
		return err
	}
	lines = slices.DeleteFunc(lines, func(line []string) bool { return line[0] == name })
	for _, c := range order {
		if c.isRatio() && len(figures[c]) > 0 {
			lines = append(lines, []string{name, c.row, c.column, strconv.FormatFloat(median(figures[c]), 'f', 2, 64)})
		}
	}
	var text strings.Builder
	for _, line := range lines {
		text.WriteString(strings.Join(line, "\t") + "\n")
	}
	return os.WriteFile(ratiosFile, []byte(text.String()), 0o644) //nolint:gosec // a file of the repository
}
