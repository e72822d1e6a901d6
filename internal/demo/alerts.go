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
	// alertTroubles is how long a destination refuses connections in the demo of alerts, from its start on: long enough to be told of.
	alertTroubles = 40 * time.Second
	alertBreakers = "defaults: {consecutiveFailures: 10, openFor: 8s}\n"
	// alertInterval is between two scrapes and two evaluations. Rules fire after alertFor.
	alertInterval = time.Second
	alertFor      = 6 * time.Second // Prometheus needs 5 s to know whom to scrape
	// alertTimeout is how long everything may take.
	alertTimeout = 2 * time.Minute
)

// errNotTold says that the demo of alerts did not show what it is for.
var errNotTold = errors.New("nobody was told that the destination is down, and that it is back")

// runAlerts breaks a destination under the eyes of a Prometheus and an Alertmanager, and prints which alert fired when, and what was sent
// to whom.
func (d *demo) runAlerts(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, alertTimeout)
	defer cancel()
	told := make(chan alerting.Notification, 1000)
	receivers, err := alerting.NewReceivers(ctx, func(n alerting.Notification) {
		select {
		case told <- n:
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
	stack, err := alerting.Start(ctx, alerting.Config{Dir: dir, Targets: []string{address}, Console: d.api, Interval: alertInterval, For: alertFor, Receivers: receivers})
	if err != nil {
		return err
	}
	defer stack.Stop()
	d.sayf("Prometheus is at %s, Alertmanager at %s, with the files of deploy/ (quicker: rules fire after %s); logs are in %s", stack.Prometheus, stack.Alertmanager, alertFor, dir)
	d.sayf("sending %d messages, of which those for exports meet a destination that refuses connections for a while", messages)
	started := time.Now()
	if err := d.send(ctx); err != nil {
		return err
	}
	return d.followAlerts(ctx, started, stack, told)
}

// followAlerts prints what happens until a breaker's alert has fired and is over.
func (d *demo) followAlerts(ctx context.Context, started time.Time, stack *alerting.Stack, told <-chan alerting.Notification) error {
	const (
		breaker = "CircuitBreakerOpen"
		indent  = "             "
	)
	at := func() string { return fmt.Sprintf("%5.1f s  ", time.Since(started).Seconds()) }
	firing, read := map[string]bool{}, map[string]bool{}
	look := func() error {
		alerts, err := stack.Alerts(ctx)
		if err != nil {
			return err
		}
		now := map[string]bool{}
		for _, a := range alerts {
			if a.State != "firing" {
				continue
			}
			which := fmt.Sprint(a.Labels) // without the value, which changes
			if now[which] = true; !firing[which] {
				d.sayf("%sfires: %s (%s): %s", at(), a.Labels["alertname"], a.Labels["severity"], a.Annotations["summary"])
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
			return errors.Join(errNotTold, ctx.Err())
		case n := <-told:
			// An alert fires before it is sent, so its line is printed first: ask Prometheus now.
			if err := look(); err != nil {
				return err
			}
			if n.Title == "" { // Opsgenie's end of an incident has its key alone
				continue
			}
			d.sayf("%s%s was sent: %s", at(), n.Receiver, n.Title)
			name, _, _ := strings.Cut(n.Text[strings.LastIndexByte(n.Text, '(')+1:], ")")
			if !read[name] {
				read[name] = true
				d.sayf("%s", indent+strings.ReplaceAll(strings.TrimSpace(n.Text), "\n", "\n"+indent))
			}
			switch over := strings.HasPrefix(n.Title, "Over: "); {
			case !strings.Contains(n.Text, "("+breaker+")") || !strings.Contains(n.Title, "destination:exports"):
			case over && down:
				return nil
			case !over:
				down = true
			}
		case <-ticker.C:
			if err := look(); err != nil {
				return err
			}
		}
	}
}
