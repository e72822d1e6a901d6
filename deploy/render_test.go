package deploy_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/deploy"
)

// TestRender_LinksByJob checks that rendered rules equal rules.yaml, with links by scrape job.
func TestRender_LinksByJob(t *testing.T) {
	t.Parallel()
	as, err := deploy.Render(deploy.Links{})
	require.NoError(t, err)
	require.Equal(t, read(t, deploy.RulesFile), string(as), "rules changed without links")

	rendered, err := deploy.Render(deploy.Links{
		Consoles: map[string]string{
			"": "https://dlqd.example/", "dlqd-eu": "https://eu.example", "dlqd-us": "https://us.example",
		},
		Runbooks: map[string]string{"": "https://git.example/{name}.md"},
	})
	require.NoError(t, err)
	require.NotContains(t, string(rendered), "externalLabels")
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rules.yaml"), rendered, 0o600))
	run(t, "promtool", "check", "rules", filepath.Join(dir, "rules.yaml"))
	var steps string
	for _, r := range rules(t) {
		if r.Alert == "DLQQueueSize" {
			steps = strings.ReplaceAll(r.Annotations["first_steps"], "\n", "\\n")
		}
	}
	test := `rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'dlq_size{job="dlqd", instance="a", queue="q"}', values: '127x20'}
      - {series: 'dlq_size{job="dlqd-eu", instance="a", queue="q"}', values: '127x20'}
      - {series: 'dlq_size{job="dlqd-us", instance="a", queue="q"}', values: '127x20'}
    alert_rule_test:
      - alertname: DLQQueueSize
        eval_time: 15m
        exp_alerts:
`
	for job, console := range map[string]string{
		"dlqd": "https://dlqd.example", "dlqd-eu": "https://eu.example", "dlqd-us": "https://us.example",
	} {
		test += `          - exp_labels: {job: ` + job + `, queue: q, severity: warning}
            exp_annotations:
              summary: '127 dead letters of queue q are open'
              description: 'For at least 10 minutes, queue q has had more than 100 open dead letters: 127 now. Check which of them dlqd redelivers later (after a breaker closes, or off-peak) and which wait for an operator.'
              first_steps: "` + strings.ReplaceAll(steps, `"`, `\"`) + `"
              page_url: '` + console + `/dead-letters?q=queue:q'
              runbook_url: 'https://git.example/dlq-grows-fast.md'
`
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "test.yaml"), []byte(test), 0o600))
	run(t, "promtool", "test", "rules", filepath.Join(dir, "test.yaml"))

	rendered, err = deploy.Render(deploy.Links{Runbooks: map[string]string{"dlqd-eu": "https://eu.example/runbooks"}})
	require.NoError(t, err)
	require.Contains(t, string(rendered),
		`runbook_url: '{{ if eq $labels.job "dlqd-eu" }}https://eu.example/runbooks/bad-policy`+
			`{{ else }}{{ $externalLabels.dlqd_url }}/runbooks/bad-policy{{ end }}'`)
}

func TestRender_RejectsInvalidLinks(t *testing.T) {
	t.Parallel()
	for job, to := range map[string]string{
		"a": "dlqd.example", "b": "javascript:alert(1)", "c": "https://x/{{ .Labels }}", "d": "https://x/'y",
		`e"`: "https://x", "f": "https://", "g": "https://x/?a=b", "h": "https://x/#a",
	} {
		_, err := deploy.Render(deploy.Links{Consoles: map[string]string{job: to}})
		require.Error(t, err, "%s=%s", job, to)
		_, err = deploy.Render(deploy.Links{Runbooks: map[string]string{job: to}})
		require.Error(t, err, "%s=%s", job, to)
	}
	_, err := deploy.Render(deploy.Links{Consoles: map[string]string{"": "https://x/{name}"}})
	require.Error(t, err, "{name} is accepted in a console URL")
}
