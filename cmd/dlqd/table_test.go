package main

import (
	"bytes"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// A list is as wide as the terminal, and its ids stay complete. In a wide terminal, or without a terminal, all values
// are complete.
func TestTable_UsesTheWidthOfTheTerminal(t *testing.T) {
	t.Parallel()
	message := strings.Repeat("the connection was reset ", 8)
	lines := func(width int, header string) []string {
		var out bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		w, row := table(cmd, header)
		if width > 0 && w.width == 0 && strings.HasPrefix(header, "ID") {
			w.width = width
		}
		row(testEntry, "manual", message, "retry")
		require.NoError(t, w.Flush())
		return strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	}
	const header = "ID\tSTATUS\tERROR\tNEXT"
	for _, width := range []int{0, 300} {
		require.Contains(t, lines(width, header)[1], message+"  retry")
	}
	for _, width := range []int{100, 80} {
		line := lines(width, header)[1]
		require.Equal(t, width, utf8.RuneCountInString(line), line)
		require.Contains(t, line, testEntry)
		require.Contains(t, line, "…  retry")
	}
	require.Contains(t, lines(20, header)[1], testEntry, "ids are kept in a narrow terminal")
	require.Contains(t, lines(80, "dead letter\tx")[1], message, "tables of names and values are complete")
}

// A terminal of 80 columns is too narrow for every column of a list, so the table leaves out the least important
// columns.
func TestTable_LeavesColumnsOut(t *testing.T) {
	t.Parallel()
	lines := func(width int) []string {
		var out bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		w, row := table(cmd, "ID\tSTATUS\tQUEUE\tKIND\tCLASS\tTYPE\tFAILED\tERROR\tNEXT")
		w.width = width
		row(testEntry, "manual", "payments", "payment.captured", "validation", "https://bank.example/errors/amount", "5s ago",
			"422 Unprocessable Entity: amount must be positive", "needs a person: class validation")
		row(testEntry, "manual", "payments", "k", "unknown", "T", "5s ago", "x", "-")
		require.NoError(t, w.Flush())
		return strings.Split(out.String(), "\n")
	}
	for _, line := range lines(80) {
		require.LessOrEqual(t, columns.StringWidth(line), 80, line)
	}
	require.Equal(t, []string{"ID", "STATUS", "QUEUE", "FAILED", "ERROR"}, strings.Fields(lines(80)[0]))
	require.Contains(t, lines(80)[1], "422 Unprocess")
	require.Len(t, strings.Fields(lines(140)[0]), 9)
	require.Len(t, strings.Fields(lines(0)[0]), 9)
}

// In a terminal, a Chinese character takes two columns, and a combining character none.
func TestTable_AlignsWideCharacters(t *testing.T) {
	t.Parallel()
	for _, message := range []string{strings.Repeat("支付失敗", 30), strings.Repeat("Björn ", 40)} {
		var out bytes.Buffer
		cmd := &cobra.Command{}
		cmd.SetOut(&out)
		w, row := table(cmd, "ID\tERROR\tNEXT")
		w.width = 80
		row("a", message, "retry")
		row("b", "short", "retry")
		require.NoError(t, w.Flush())
		lines := strings.Split(out.String(), "\n")
		require.LessOrEqual(t, columns.StringWidth(lines[1]), 80, lines[1])
		require.Equal(t, columns.StringWidth(lines[2]), columns.StringWidth(lines[1]), out.String())
	}
}
