package metrics_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/metrics/metricstest"
)

var (
	named       = regexp.MustCompile(`\bdlqd?_[a-z_]+\b`)
	statuses    = regexp.MustCompile(`^dlq_(pending|processing|manual|resolved|failed|archived)$`)
	histogramOf = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// TestDocs_ListEveryMetric compares the tables of docs/metrics.md with the metrics that a process serves. The tables
// must list exactly these metrics, with their labels and help. The queries in docs/metrics.md must use no other names.
func TestDocs_ListEveryMetric(t *testing.T) {
	t.Parallel()
	served, names := map[string]bool{}, map[string]bool{}
	for _, metric := range metricstest.Served(t) {
		labels := metric.LabelsInText
		if metric.Constant {
			labels = "version, revision, go_version"
		}
		labels = strings.Join(strings.FieldsFunc(labels, func(r rune) bool { return r == ',' || r == ' ' }), ", ")
		served["| `"+metric.Name+"` | "+labels+" | "+strings.ReplaceAll(metric.Help, `\"`, `"`)+" |"] = true
		names[metric.Name] = true
	}
	require.Greater(t, len(served), 70)
	raw, err := os.ReadFile("../../docs/metrics.md")
	require.NoError(t, err)
	_, tables, ok := strings.Cut(string(raw), "\n## All of them\n")
	require.True(t, ok)
	written := map[string]bool{}
	for line := range strings.Lines(tables) {
		if strings.HasPrefix(line, "| `dlq") {
			written[strings.TrimSpace(line)] = true
		}
	}
	for line := range strings.Lines(string(raw)) {
		for _, name := range named.FindAllString(line, -1) {
			if statuses.MatchString(name) {
				continue
			}
			require.True(t, names[name] || names[histogramOf.ReplaceAllString(name, "")], "%s is not a metric: %s", name, line)
		}
	}
	require.Equal(t, slices.Sorted(maps.Keys(served)), slices.Sorted(maps.Keys(written)))
}
