package main_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAlertsRender_FillsInLinks(t *testing.T) {
	t.Parallel()
	out := ok(t, "alerts", "render", "--runbook-url", "https://git.example/?page={name}.md",
		"--console-url", "https://dlqd.example/", "--console-url", "dlqd-eu=https://eu.example")
	require.Contains(t, out, `page_url: '{{ if eq $labels.job "dlqd-eu" }}https://eu.example`+
		`{{ else }}https://dlqd.example{{ end }}/system'`)
	require.Contains(t, out, "runbook_url: 'https://git.example/?page=dlqd-is-down.md'")
	for _, wrong := range [][]string{
		{"--console-url", "dlqd.example"},
		{"--console-url", "https://a", "--console-url", "https://b"},
		{"--console-url", "https://dlqd.example/?a=b"},
	} {
		_, stderr, code := run(t, append([]string{"alerts", "render"}, wrong...)...)
		require.Equal(t, 2, code, stderr)
	}
}
