package deploy_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// rule is an alert in rules.yaml.
type rule struct {
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	For         string            `yaml:"for"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

func rules(t *testing.T) []rule {
	t.Helper()
	var file struct {
		Groups []struct {
			Rules []rule `yaml:"rules"`
		} `yaml:"groups"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "prometheus/rules.yaml")), &file))
	var all []rule
	for _, group := range file.Groups {
		all = append(all, group.Rules...)
	}
	require.NotEmpty(t, all)
	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(raw)
}

// run runs a program that scripts/install.sh installs (prometheus alertmanager).
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	require.NoError(t, err, "%s %s\n%s", name, strings.Join(args, " "), out)
	return string(out)
}

// TestRules checks that each alert has a severity, texts, a link to a page, a runbook with the same first steps, a unit
// test, and a line in the documentation.
func TestRules(t *testing.T) {
	t.Parallel()
	run(t, "promtool", "check", "config", "prometheus/prometheus.yaml")
	run(t, "promtool", "check", "rules", "prometheus/rules.yaml")
	run(t, "promtool", "test", "rules", "prometheus/rules_test.yaml", "prometheus/rules_fast_test.yaml")
	tests, docs := read(t, "prometheus/rules_test.yaml"), read(t, "../docs/alerts.md")
	for _, r := range rules(t) {
		require.Contains(t, []string{"warning", "critical"}, r.Labels["severity"], r.Alert)
		for _, annotation := range []string{"summary", "description"} {
			require.NotEmpty(t, r.Annotations[annotation], r.Alert)
		}
		require.Regexp(t, `^\{\{ \$externalLabels\.dlqd_url \}\}/`, r.Annotations["page_url"], r.Alert)
		runbook, ok := strings.CutPrefix(r.Annotations["runbook_url"], "{{ $externalLabels.dlqd_url }}/runbooks/")
		require.True(t, ok, r.Alert)
		text := read(t, "../runbooks/"+runbook+".md")
		require.Contains(t, text, "`"+r.Alert+"`", "its runbook does not name the alert")
		require.Len(t, strings.Split(r.Annotations["first_steps"], "\n"), 3, r.Alert)
		require.Contains(t, text, "**First.**\n\n"+r.Annotations["first_steps"]+"\n\n",
			"its runbook has other first steps: %s", r.Alert)
		require.Contains(t, tests, `ALERTS{alertname="`+r.Alert+`", alertstate="firing"`)
		require.Contains(t, docs, "| `"+r.Alert+"` | "+r.Labels["severity"]+" |")
	}
	documented := regexp.MustCompile("(?m)^\\| `\\w+` \\| (warning|critical) \\|").FindAllString(docs, -1)
	require.Len(t, documented, len(rules(t)))
}

// TestAlertmanager_Routes checks which receivers get which alerts.
func TestAlertmanager_Routes(t *testing.T) {
	t.Parallel()
	run(t, "amtool", "check-config", "alertmanager.yaml")
	for labels, want := range map[string]string{
		"alertname=DLQQueueSize severity=warning queue=orders":             "team-chat",
		"alertname=DlqdDown severity=critical":                             "on-call,on-call-opsgenie",
		"alertname=DLQQueueSize severity=warning queue=payments":           "payments-mail,team-chat",
		"alertname=DLQOldestEntry severity=critical queue=payments-refund": "payments-mail,on-call,on-call-opsgenie",
		"alertname=CircuitBreakerOpen severity=warning":                    "team-chat",
		"alertname=DLQMetricsStale severity=critical":                      "on-call,on-call-opsgenie",
		"alertname=DLQNeedsPerson severity=warning queue=payments":         "payments-mail,team-chat",
	} {
		out := run(t, "amtool", append([]string{"config", "routes", "test", "--config.file=alertmanager.yaml"},
			strings.Fields(labels)...)...)
		lines := strings.Split(strings.TrimSpace(out), "\n")
		require.Equal(t, want, strings.TrimSpace(lines[len(lines)-1]), labels)
	}
}

// TestDashboard_MatchesSchema validates the dashboard against the types that Grafana publishes (testdata/README.md),
// and the dashboard's panels against the options of their plugins.
func TestDashboard_MatchesSchema(t *testing.T) {
	t.Parallel()
	var schemas map[string]any
	require.NoError(t, json.Unmarshal([]byte(read(t, "testdata/grafana-schema.json")), &schemas))
	check := func(schema string, value any, about string) {
		t.Helper()
		require.Contains(t, schemas, schema)
		compiler := jsonschema.NewCompiler()
		require.NoError(t, compiler.AddResource(schema, schemas[schema]))
		compiled, err := compiler.Compile(schema)
		require.NoError(t, err)
		require.NoError(t, compiled.Validate(value), about)
	}
	var dashboard map[string]any
	require.NoError(t, json.Unmarshal([]byte(read(t, "grafana/dlqd.json")), &dashboard))
	// The query fields of an annotation belong to its data source, which publishes no schema.
	for _, annotation := range dashboard["annotations"].(map[string]any)["list"].([]any) {
		for _, own := range []string{"expr", "step", "titleFormat", "textFormat", "tagKeys", "useValueForTime"} {
			require.Contains(t, annotation, own)
			delete(annotation.(map[string]any), own)
		}
	}
	check("dashboard", dashboard, "the dashboard")
	custom := map[string]bool{"timeseries": true, "heatmap": true, "state-timeline": true}
	ids := map[any]bool{}
	for _, each := range dashboard["panels"].([]any) {
		panel := each.(map[string]any)
		about := fmt.Sprint(panel["title"])
		require.False(t, ids[panel["id"]], about)
		ids[panel["id"]] = true
		kind := panel["type"].(string)
		if kind == "row" {
			check("row", panel, about)
			continue
		}
		check("panel", panel, about)
		plugin := strings.ReplaceAll(kind, "-", "")
		check(plugin+"-options", panel["options"], about)
		if custom[kind] {
			check(plugin+"-custom", panel["fieldConfig"].(map[string]any)["defaults"].(map[string]any)["custom"], about)
		}
	}
}

// TestManifests_AreCurrent compares the chart's files with the hash of the files from which deploy/kubernetes was
// rendered. "make trial-chart" compares the manifests themselves, which requires Helm's libraries.
func TestManifests_AreCurrent(t *testing.T) {
	t.Parallel()
	const chart = "helm/dlqd"
	require.Equal(t, read(t, "prometheus/rules.yaml"), read(t, chart+"/files/rules.yaml"), "make manifests")
	hash := sha256.New()
	require.NoError(t, filepath.WalkDir(chart, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		raw := read(t, path)
		_, err = fmt.Fprintf(hash, "%s %d\n%s", strings.TrimPrefix(path, chart+"/"), len(raw), raw)
		return err
	}))
	for _, name := range []string{"dlqd", "migration", "monitoring"} {
		require.Contains(t, read(t, "kubernetes/"+name+".yaml"), fmt.Sprintf("\n# chart: %x\n", hash.Sum(nil)),
			"the chart has changed: make manifests")
	}
}

// TestCompose checks the configuration that compose.yaml contains for Prometheus and Alertmanager.
func TestCompose(t *testing.T) {
	t.Parallel()
	var compose struct {
		Configs map[string]struct{ Content string } `yaml:"configs"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "compose.yaml")), &compose))
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	write("rules.yaml", read(t, "prometheus/rules.yaml"))
	run(t, "promtool", "check", "config", write("prometheus.yml", compose.Configs["prometheus"].Content))
	run(t, "amtool", "check-config", write("alertmanager.yml", compose.Configs["alertmanager"].Content))
	for _, name := range []string{"grafana-datasource", "grafana-dashboards"} {
		var provisioning map[string]any
		require.NoError(t, yaml.Unmarshal([]byte(compose.Configs[name].Content), &provisioning))
		require.Equal(t, 1, provisioning["apiVersion"])
	}
}
