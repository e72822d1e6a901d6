package demo

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/alerting"
)

const (
	// alertFaultDuration is how long a destination refuses connections after the start of the demo. It is long enough for
	// an alert to fire.
	alertFaultDuration = 40 * time.Second
	alertBreakers      = "defaults: {consecutiveFailures: 10, openFor: 8s}\n"
	// alertInterval is the time between two scrapes, and between two evaluations of the rules. A rule fires after
	// alertFor.
	alertInterval = time.Second
	alertFor      = 6 * time.Second // Prometheus needs 5 s to discover its targets
	// alertTimeout bounds the duration of the demo of alerts.
	alertTimeout = 2 * time.Minute
)

// errNotNotified means that the expected notifications did not arrive.
var errNotNotified = errors.New("the notifications that the destination is down and that it is back did not arrive")

// runAlerts lets a destination fail while Prometheus and Alertmanager monitor dlqd. It prints when each alert fires,
// and each notification that is sent.
func (d *demo) runAlerts(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, alertTimeout)
	defer cancel()
	notifications := make(chan alerting.Notification, 1000)
	receivers, err := alerting.NewReceivers(ctx, func(n alerting.Notification) {
		select {
		case notifications <- n:
		default:
		}
	})
	if err != nil {
		return err
	}
	defer func() { _ = receivers.Close() }()
	dir := filepath.Join(d.dir, "monitoring")
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return err
	}
	_, address, _ := strings.Cut(d.api, "://")
	stack, err := alerting.Start(ctx, alerting.Config{
		Dir: dir, Targets: []string{address}, Console: d.api, Interval: alertInterval, For: alertFor, Receivers: receivers,
	})
	if err != nil {
		return err
	}
	defer stack.Stop()
	d.printf("started Prometheus at %s and Alertmanager at %s with the files of deploy/; rules fire after %s; logs "+
		"are in %s",
		stack.Prometheus, stack.Alertmanager, alertFor, dir)
	d.printf("sending %d messages; the destination exports refuses connections for %s", messages, alertFaultDuration)
	started := time.Now()
	if err := d.send(ctx); err != nil {
		return err
	}
	return d.followAlerts(ctx, started, stack, notifications)
}

// followAlerts prints events until two notifications have arrived: that the breaker's alert is firing, and that it is
// resolved.
func (d *demo) followAlerts(ctx context.Context, started time.Time, stack *alerting.Stack,
	notifications <-chan alerting.Notification,
) error {
	const (
		breaker = "CircuitBreakerOpen"
		indent  = "             "
	)
	at := func() string { return fmt.Sprintf("%5.1f s  ", time.Since(started).Seconds()) }
	firing, described := map[string]bool{}, map[string]bool{}
	printFiring := func() error {
		alerts, err := stack.Alerts(ctx)
		if err != nil {
			return err
		}
		now := map[string]bool{}
		for _, a := range alerts {
			if a.State != "firing" {
				continue
			}
			key := fmt.Sprint(a.Labels) // without the value, which changes
			if now[key] = true; !firing[key] {
				d.printf("%sfiring: %s (%s): %s", at(), a.Labels["alertname"], a.Labels["severity"], a.Annotations["summary"])
			}
		}
		firing = now
		return nil
	}
	ticker := time.NewTicker(alertInterval / 2)
	defer ticker.Stop()
	down := false
	for {
		select {
		case <-ctx.Done():
			return errors.Join(errNotNotified, ctx.Err())
		case n := <-notifications:
			// An alert fires before its notification is sent. Query Prometheus now, so that the line about the alert is
			// printed first.
			if err := printFiring(); err != nil {
				return err
			}
			if n.Title == "" { // Opsgenie closes an incident by the incident's key, without a title
				continue
			}
			d.printf("%snotified %s: %s", at(), n.Receiver, n.Title)
			name, _, _ := strings.Cut(n.Text[strings.LastIndexByte(n.Text, '(')+1:], ")")
			if !described[name] {
				described[name] = true
				d.printf("%s", indent+strings.ReplaceAll(strings.TrimSpace(n.Text), "\n", "\n"+indent))
			}
			switch resolved := strings.HasPrefix(n.Title, "Resolved: "); {
			case !strings.Contains(n.Text, "("+breaker+")") || !strings.Contains(n.Title, "destination:exports"):
			case resolved && down:
				return nil
			case !resolved:
				down = true
			}
		case <-ticker.C:
			if err := printFiring(); err != nil {
				return err
			}
		}
	}
}
