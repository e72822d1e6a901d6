package main

import (
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
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

func TestPreview_PrintsWhatToExpect(t *testing.T) {
	t.Parallel()
	expect := &replay.Expectation{
		Tried: 22, Untried: 3, Recover: 17, Low: 12, High: 21,
		Groups: []replay.GroupExpectation{{
			Queue: "a", Fingerprint: "c0ffee", Entries: 22, Since: time.Date(2026, 11, 21, 10, 0, 0, 0, time.UTC),
			Recovered: 7, Failed: 2, FailedBefore: 30, Recover: 17, Low: 12, High: 21,
		}},
	}
	var out strings.Builder
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	load := []replay.Load{{Queue: "a", Destination: "psp", Entries: 25, PerSecond: []float64{4, 12.5}, Failures: 7}}
	require.NoError(t, printPreview(cmd, &replay.Preview{
		Total: 25, Expect: expect, Load: load,
		Unworked: []replay.UnworkedKind{{Kind: "sync", Unknown: 3, Sampled: 4}}, Estimates: []replay.Estimate{
			{What: "ran_long", Entries: 12, Low: 12, High: 12, Sampled: 25},
		},
	}))
	for _, line := range []string{
		"12 of 25 ran for more than 5s before the failure, and may have done something\n",
		"about 17 of 22 (12 to 21, 80 % interval) will recover, as far as earlier replay runs",
		"c0ffee in a: 7 of 9 recovered since 2026-11-21 10:00 UTC, 0 of 30 before; of 22, about 17 (12 to 21) will\n",
		"no earlier replay run has outcomes of the failure groups of 3: they were never tried\n",
		"no worker seems to know kind sync: inferred from 3 of 4 last attempts, with the latest of them\n",
		"queue a of destination psp gets 25, at most 12.5 per second; in the last hour, 0 were redelivered and 7 failed\n",
	} {
		require.Contains(t, out.String(), line)
	}
	out.Reset()
	require.NoError(t, printRun(cmd, &replay.Run{Forecast: &replay.Forecast{Expect: expect}}))
	require.Contains(t, out.String(), "forecast: about 17 of 22 (12 to 21, 80 % interval) will recover\n")
}

func TestCalibration_Prints(t *testing.T) {
	t.Parallel()
	var out strings.Builder
	cmd := &cobra.Command{}
	cmd.SetOut(&out)
	require.NoError(t, printCalibration(cmd, &replay.Calibration{}))
	require.Equal(t, "no forecast of an ended replay run can be judged yet\n", out.String())
	out.Reset()
	require.NoError(t, printCalibration(cmd, &replay.Calibration{
		Groups: 6, Judged: 5, Held: 4, Expected: 50, Recovered: 48,
		Latest: []replay.CalibrationGroup{{
			Fingerprint: "c0ffee", Entries: 22, Expected: 17, Low: 12, High: 21, Recovered: 18,
			Judged: true, Held: true, Queue: "a",
		}},
	}))
	require.Contains(t, out.String(),
		"4 of 5 forecasts of a failure group held their 80 % interval (80 %): 50 expected to recover, 48 did\n")
	require.Contains(t, out.String(), "1 are not judged")
	require.Regexp(t, `c0ffee +22 +17 +12 to 21 +18 +yes +a`, out.String())
}
