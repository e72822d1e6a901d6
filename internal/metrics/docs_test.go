package metrics_test

import (
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/metrics"
)

var (
	// description matches the text of a prometheus.Desc.
	description = regexp.MustCompile(`^Desc\{fqName: "(dlqd?_\w+)", help: "((?:[^"\\]|\\.)*)", unit: "[a-z]*", constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	named       = regexp.MustCompile(`\bdlqd?_[a-z_]+\b`)
	statuses    = regexp.MustCompile(`^dlq_(pending|processing|manual|resolved|failed|archived)$`)
	histogramOf = regexp.MustCompile(`_(bucket|sum|count)$`)
)

// TestDocs_listEveryMetric compares the tables of docs/metrics.md with the metrics that a process
// serves: the tables list exactly these metrics with their labels and help, and queries use no
// other names.
func TestDocs_listEveryMetric(t *testing.T) {
	t.Parallel()
	m := metrics.New()
	m.WatchDatabase(nil, nil, slog.New(slog.DiscardHandler))
	m.WatchPool(nil)
	m.WatchPolicy(nil, nil)
	m.WatchBreakers((*breaker.Breakers)(nil))
	m.WatchLoops(func() []background.Status { return nil })
	m.WatchPending(func() (messages, bytes int64) { return 0, 0 })
	registry, ok := m.Gatherer().(*prometheus.Registry)
	require.True(t, ok)
	described := make(chan *prometheus.Desc, 1000)
	registry.Describe(described)
	close(described)
	served, names := map[string]bool{}, map[string]bool{}
	for d := range described {
		match := description.FindStringSubmatch(d.String())
		if match == nil {
			continue // a metric of the Go runtime
		}
		labels := match[4]
		if match[3] != "" {
			labels = "version, revision, go_version"
		}
		served["| `"+match[1]+"` | "+strings.Join(strings.FieldsFunc(labels, func(r rune) bool { return r == ',' || r == ' ' }), ", ")+" | "+strings.ReplaceAll(match[2], `\"`, `"`)+" |"] = true
		names[match[1]] = true
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
			require.True(t, names[name] || names[histogramOf.ReplaceAllString(name, "")], "%s is no metric: %s", name, line)
		}
	}
	require.Equal(t, slices.Sorted(maps.Keys(served)), slices.Sorted(maps.Keys(written)))
}
