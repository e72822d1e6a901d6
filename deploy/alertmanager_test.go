package deploy_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/dlqd/dlqd/internal/alerting"
)

// alertmanager is an Alertmanager with the configuration of deploy/. Tests post alerts to it.
type alertmanager struct {
	*testing.T

	stack     *alerting.Stack
	receivers *alerting.Receivers
}

func newAlertmanager(t *testing.T) *alertmanager {
	t.Helper()
	receivers, err := alerting.NewReceivers(t.Context(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, receivers.Close()) })
	// Prometheus has no targets in this test, and waits an hour before it alerts about that.
	stack, err := alerting.Start(t.Context(), alerting.Config{
		Dir: t.TempDir(), Targets: []string{}, Console: "http://dlqd.example",
		Interval: time.Second, For: time.Hour, Receivers: receivers,
	})
	require.NoError(t, err)
	t.Cleanup(stack.Stop)
	return &alertmanager{T: t, stack: stack, receivers: receivers}
}

// post sends alerts to Alertmanager, as firing or as resolved. Each alert is a text with its name and its labels:
// "DlqdDown severity=critical job=dlqd".
func (a *alertmanager) post(resolved bool, alerts ...string) {
	a.Helper()
	var list []any
	for _, alert := range alerts {
		labels := map[string]string{}
		for i, word := range strings.Fields(alert) {
			name, value, _ := strings.Cut(word, "=")
			if i == 0 {
				name, value = "alertname", word
			}
			labels[name] = value
		}
		ends := time.Now().Add(time.Hour)
		if resolved {
			ends = time.Now()
		}
		annotations := map[string]string{"summary": labels["alertname"] + " of " + labels["loop"]}
		list = append(list, map[string]any{"labels": labels, "annotations": annotations, "endsAt": ends})
	}
	raw, err := json.Marshal(list)
	require.NoError(a, err)
	response, err := http.Post(a.stack.Alertmanager+"/api/v2/alerts", "application/json", bytes.NewReader(raw))
	require.NoError(a, err)
	defer response.Body.Close()
	require.Equal(a, http.StatusOK, response.StatusCode)
}

// count returns the number of notifications that a receiver got for a firing alert, and the number of later
// notifications that resolved an incident of that alert.
func (a *alertmanager) count(receiver, alert string) (fired, resolved int) {
	incidents := map[string]bool{}
	for _, n := range a.receivers.Notifications() {
		switch {
		case n.Receiver != receiver:
		case !n.Resolved && strings.Contains(n.Text+n.Title, alert):
			incidents[n.Incident] = true
			fired++
		case n.Resolved && incidents[n.Incident]:
			resolved++
		}
	}
	return fired, resolved
}

func (a *alertmanager) awaitCount(receiver, alert string, fired, resolved int) {
	a.Helper()
	require.Eventually(a, func() bool {
		f, o := a.count(receiver, alert)
		return f == fired && o == resolved
	}, waitTimeout, 50*time.Millisecond, "%s of %s: %v", receiver, alert, a.receivers.Notifications())
}

// TestAlertmanager_ResolvesEachTrigger checks that PagerDuty and Opsgenie get a resolve for each trigger, even while
// another alert that explains the incident is firing.
func TestAlertmanager_ResolvesEachTrigger(t *testing.T) {
	t.Parallel()
	a := newAlertmanager(t)
	const (
		stale = "DLQMetricsStale severity=critical job=dlqd"
		down  = "DlqdDatabaseDown severity=critical job=dlqd instance=a"
	)
	for n := 1; n <= 3; n++ {
		a.post(false, stale)
		a.awaitCount("pagerduty", "DLQMetricsStale", n, n-1)
		a.awaitCount("opsgenie", "DLQMetricsStale", n, n-1)
		a.post(false, down)
		a.awaitCount("pagerduty", "DlqdDatabaseDown", n, n-1)
		a.post(true, stale)
		a.awaitCount("pagerduty", "DLQMetricsStale", n, n)
		a.awaitCount("opsgenie", "DLQMetricsStale", n, n)
		a.post(true, down)
		a.awaitCount("pagerduty", "DlqdDatabaseDown", n, n)
	}
}

// TestAlertmanager_InhibitsExplainedLoops checks that DlqdLoopFailing is inhibited by an alert about its process or its
// database, and not by an alert about another process. DLQMetricsStale inhibits DlqdLoopFailing for the metrics loop of
// every process.
func TestAlertmanager_InhibitsExplainedLoops(t *testing.T) {
	t.Parallel()
	a := newAlertmanager(t)
	failing := func(instance, loop string) string {
		return fmt.Sprintf("DlqdLoopFailing severity=warning job=dlqd instance=%s loop=%s", instance, loop)
	}
	a.post(false, "DlqdDatabaseDown severity=critical job=dlqd instance=a",
		"DlqdDown severity=critical job=dlqd instance=b", "DLQMetricsStale severity=critical job=dlqd")
	a.awaitCount("pagerduty", "DlqdDown", 1, 0)
	a.awaitCount("pagerduty", "DlqdDatabaseDown", 1, 0)
	a.awaitCount("pagerduty", "DLQMetricsStale", 1, 0)
	a.post(false, failing("a", "gates"), failing("b", "gates"), failing("c", "metrics"))
	a.post(false, failing("d", "gates"))
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(a.receivers.Notifications(), func(n alerting.Notification) bool {
			return n.Receiver == "slack" && strings.Contains(n.Text, "DlqdLoopFailing of gates")
		})
	}, waitTimeout, 50*time.Millisecond)
	for _, n := range a.receivers.Notifications() {
		if n.Receiver == "slack" {
			require.Equal(t, 1, strings.Count(n.Text, "DlqdLoopFailing of"), "another loop than that of d is notified: %s",
				n.Text)
		}
	}
}

// TestAlertmanager_NeverInhibitsCriticalAlerts checks that alertmanager.yaml sends critical alerts at once and their
// changes every minute, and inhibits none of them. The reason: Alertmanager sends no resolve for an alert that ends
// while it is inhibited.
func TestAlertmanager_NeverInhibitsCriticalAlerts(t *testing.T) {
	t.Parallel()
	var config struct {
		Route struct {
			Routes []struct {
				Matchers []string      `yaml:"matchers"`
				Wait     time.Duration `yaml:"group_wait"`
				Interval time.Duration `yaml:"group_interval"`
			} `yaml:"routes"`
		} `yaml:"route"`
		Inhibit []struct {
			Target []string `yaml:"target_matchers"`
		} `yaml:"inhibit_rules"`
	}
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "alertmanager.yaml")), &config))
	critical := 0
	for _, route := range config.Route.Routes {
		if slices.Contains(route.Matchers, `severity="critical"`) {
			critical++
			require.Zero(t, route.Wait)
			require.Equal(t, time.Minute, route.Interval)
		}
	}
	require.Equal(t, 2, critical)
	require.NotEmpty(t, config.Inhibit)
	for _, r := range rules(t) {
		for _, inhibited := range config.Inhibit {
			if r.Labels["severity"] == "critical" {
				require.NotContains(t, strings.Join(inhibited.Target, " "), r.Alert)
			}
		}
	}
}
