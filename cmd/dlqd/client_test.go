package main

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/replay"
)

func TestPrintable(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain €":                       "plain €",
		"\x1b[31mred\nline\tb":          " [31mred line b",
		"user\u202etxt.exe":             `user\u202etxt.exe`,
		"a\u2066b\u2069c\u200fd":        `a\u2066b\u2069c\u200fd`,
		"zero\u200bwidth\u2028line":     `zero\u200bwidth\u2028line`,
		"eight bits \x9b31m, C1 \u009b": "eight bits \uFFFD31m, C1  ",
	} {
		require.Equal(t, want, printable(in))
	}
	require.Equal(t, "a b\n\\u202ec", printLines("a\x07b\n\u202ec"))
}

func TestDurationText(t *testing.T) {
	t.Parallel()
	require.Empty(t, durationText(&replay.Preview{}))
	require.Equal(t, ", in less than a second", durationText(&replay.Preview{Total: 7, Seconds: 0.0007}))
	require.Equal(t, ", in about 42s", durationText(&replay.Preview{Total: 7, Seconds: 42.1}))
	require.Equal(t, "2026-11-21T10:00:00Z", stamp(time.Date(2026, 11, 21, 12, 0, 0, 0, time.FixedZone("", 7200))))
}
