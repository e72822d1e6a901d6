package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"unicode"

	"github.com/mattn/go-runewidth"
	"github.com/spf13/cobra"
	"github.com/vbauerster/mpb/v8/cwriter"
)

// tableGap is the number of blanks between two columns.
const tableGap = 2

// minColumn is the smallest width to which a column is shortened.
const minColumn = 12

// columns measures texts as a terminal shows them: Chinese characters and emoji take two columns, and combining
// characters none.
var columns = &runewidth.Condition{StrictEmojiNeutral: true}

// textTable collects rows and prints them in columns. On a terminal, it shortens the widest columns of a list so that a
// row fits a line, if the command has -o wide. If that is not enough, it leaves out some columns. All values are
// complete with -o wide, without a terminal, and in a table of names and values.
type textTable struct {
	out   io.Writer
	width int // of a line; 0 for no limit
	title string
	rows  [][]string
}

// table returns a table and a function that adds a row. header has the titles of the columns, separated by tabs. The
// titles of a list, which may be shortened, are in capitals.
func table(cmd *cobra.Command, header string) (t *textTable, row func(cells ...any)) {
	header, title := strings.TrimLeft(header, "\n"), header[:len(header)-len(strings.TrimLeft(header, "\n"))]
	t = &textTable{out: cmd.OutOrStdout(), title: title, rows: [][]string{strings.Split(header, "\t")}}
	if flag := cmd.Flags().Lookup("output"); flag != nil {
		if o, ok := flag.Value.(*output); ok && o.table && o.format != outputWide {
			t.width = terminalWidth(t.out)
		}
	}
	if !strings.ContainsFunc(t.rows[0][0], unicode.IsUpper) || strings.ContainsFunc(t.rows[0][0], unicode.IsLower) {
		t.width = 0
	}
	return t, func(cells ...any) {
		texts := make([]string, len(cells))
		for i, cell := range cells {
			texts[i] = printable(fmt.Sprint(cell))
		}
		t.rows = append(t.rows, texts)
	}
}

// terminalWidth returns the width of the terminal that out writes to, in columns. If out is not a terminal, it returns
// 0.
func terminalWidth(out io.Writer) int {
	file, ok := out.(*os.File)
	if !ok || !cwriter.IsTerminal(int(file.Fd())) {
		return 0
	}
	width, _, err := cwriter.GetSize(int(file.Fd()))
	if err != nil {
		return 0
	}
	return width
}

// Flush prints the table. If the table is wider than the terminal, Flush first removes extraColumns, one after the
// other, until it fits.
func (t *textTable) Flush() error {
	widths := t.widths()
	for _, extra := range append(slices.Clone(extraColumns), "") {
		if t.width == 0 || t.fit(widths) || extra == "" {
			break
		}
		if i := slices.Index(t.rows[0], extra); i >= 0 {
			t.remove(i)
		}
		widths = t.widths()
	}
	var text strings.Builder
	text.WriteString(t.title)
	for _, cells := range t.rows {
		var line strings.Builder
		for i, cell := range cells {
			cell = columns.Truncate(cell, widths[i], "…")
			line.WriteString(cell)
			if i < len(cells)-1 {
				line.WriteString(strings.Repeat(" ", widths[i]-columns.StringWidth(cell)+tableGap))
			}
		}
		text.WriteString(strings.TrimRight(line.String(), " ") + "\n")
	}
	_, err := io.WriteString(t.out, text.String())
	return err
}

// widths returns the width of each column.
func (t *textTable) widths() (widths []int) {
	for _, cells := range t.rows {
		for i, cell := range cells {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], columns.StringWidth(cell))
		}
	}
	return widths
}

// remove removes a column.
func (t *textTable) remove(column int) {
	for i, cells := range t.rows {
		if column < len(cells) {
			t.rows[i] = slices.Delete(cells, column, column+1)
		}
	}
}

// fit shortens the widest columns until a row fits the width of the table. No column becomes narrower than its title or
// minColumn. fit does not shorten the columns of wholeColumns. If the row is still too wide, fit returns false.
func (t *textTable) fit(widths []int) bool {
	over := tableGap*(len(widths)-1) - t.width
	for _, width := range widths {
		over += width
	}
	for ; over > 0; over-- {
		widest := -1
		for i, width := range widths {
			title := ""
			if i < len(t.rows[0]) {
				title = t.rows[0][i]
			}
			if slices.Contains(wholeColumns, title) || width <= max(minColumn, columns.StringWidth(title)) {
				continue
			}
			if widest < 0 || width > widths[widest] {
				widest = i
			}
		}
		if widest < 0 {
			return false
		}
		widths[widest]--
	}
	return true
}

// extraColumns are the titles of the columns that a table leaves out on a narrow terminal, in this order.
var extraColumns = []string{
	"POLICY", "ORIGIN", "ON BEHALF OF", "FIRST SEEN", "DECIDED BY", "TREND", "CLASS", "NEXT", "TYPE", "KIND",
}

// wholeColumns are the titles of the columns that are never shortened: other commands take their values, or a shortened
// value would mean nothing.
var wholeColumns = []string{"ID", "GROUP", "NAME", "QUEUE", "DEAD LETTER", "ENTRY", "TREND"}
