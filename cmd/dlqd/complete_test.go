package main

import (
	"testing"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// Two values that begin alike, such as error types that a receiver chose, would be evaluated by bash at the
// second completion.
func TestCompletions_LeaveOutWhatAShellRuns(t *testing.T) {
	t.Parallel()
	values := []string{
		"CARD_DECLINED", "`touch x`a", "$(touch x)b", "a;touch x", "a|b", "a&b", "a>b", "a\\b", "\x1b]0;x\a", "a\tb", "timed out",
	}
	require.Equal(t, []cobra.Completion{"CARD_DECLINED\tan error\x20", "timed out\tan error\x20"},
		completions(values, func(value *string) (string, string) { return *value, "an error\n" }))
}
