// Package alerting runs the Prometheus and the Alertmanager that are installed on this machine. They monitor a dlqd on
// free ports, with the files of deploy/ and shorter durations. "dlqd demo --alerts" uses the package, and so does the
// test that makes each alert fire.
package alerting

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/dlqd/dlqd/deploy"
)

// startTimeout bounds the time until Prometheus and Alertmanager are ready.
const startTimeout = time.Minute

// Config configures [Start].
type Config struct {
	// Dir is the directory for the programs' configuration, data and logs.
	Dir string
	// Targets are the addresses (host:port) of dlqd's processes. Console is the URL to which alerts link.
	Targets []string
	Console string
	// Interval is the time between two scrapes, and between two evaluations of the rules. For replaces the "for"
	// durations of the rules.
	Interval, For time.Duration
	// Receivers stand in for PagerDuty, Opsgenie, Slack and the mail server.
	Receivers *Receivers
}

// Stack is a running Prometheus and Alertmanager.
type Stack struct {
	// Prometheus and Alertmanager are the URLs of the two programs.
	Prometheus, Alertmanager string

	stop    context.CancelFunc
	running []*exec.Cmd
}

// alertmanagerNames are the names of Alertmanager's program: in Debian, and upstream.
var alertmanagerNames = []string{"prometheus-alertmanager", "alertmanager"}

// Start starts both programs and waits until they are ready. If one of them fails, it stops both. It returns an error
// if a program is not found.
func Start(ctx context.Context, config Config) (*Stack, error) {
	prometheus, err := findProgram("prometheus")
	if err != nil {
		return nil, err
	}
	alertmanager, err := findProgram(alertmanagerNames...)
	if err != nil {
		return nil, err
	}
	ports, err := freePorts(ctx, 2)
	if err != nil {
		return nil, err
	}
	if err := writeFiles(&config, ports[1]); err != nil {
		return nil, err
	}
	at := func(name string) string { return filepath.Join(config.Dir, name) }
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	s := &Stack{Prometheus: "http://" + ports[0], Alertmanager: "http://" + ports[1], stop: stop}
	for _, program := range [][]string{
		{
			alertmanager, "--config.file=" + at("alertmanager.yaml"), "--storage.path=" + at("alertmanager-data"),
			"--web.listen-address=" + ports[1], "--cluster.listen-address=", "--log.level=warn",
		},
		{
			prometheus, "--config.file=" + at("prometheus.yaml"), "--storage.tsdb.path=" + at("prometheus-data"),
			"--web.listen-address=" + ports[0], "--log.level=warn",
		},
	} {
		if err := s.run(running, at(filepath.Base(program[0])+".log"), program); err != nil {
			s.Stop()
			return nil, err
		}
	}
	for _, url := range []string{s.Alertmanager, s.Prometheus} {
		if err := awaitReady(ctx, url+"/-/ready"); err != nil {
			s.Stop()
			return nil, fmt.Errorf("%w; logs are in %s", err, config.Dir)
		}
	}
	return s, nil
}

// Stop stops both programs.
func (s *Stack) Stop() {
	s.stop()
	for _, cmd := range s.running {
		_ = cmd.Wait() // the context has killed the process
	}
}

func (s *Stack) run(ctx context.Context, logPath string, program []string) error {
	log, err := os.Create(logPath)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()                          // the program has its own handle
	cmd := exec.CommandContext(ctx, program[0], program[1:]...) //nolint:gosec // programs of the system
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	s.running = append(s.running, cmd)
	return nil
}

func findProgram(names ...string) (string, error) {
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not installed: run scripts/install.sh prometheus alertmanager",
		strings.Join(names, " or "))
}

// freePorts returns addresses that are currently unused.
func freePorts(ctx context.Context, n int) ([]string, error) {
	var addresses []string
	var errs []error
	for range n {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		defer func() { errs = append(errs, listener.Close()) }() // close at the end, so that the ports differ
		addresses = append(addresses, listener.Addr().String())
	}
	return addresses, errors.Join(errs...)
}

func awaitReady(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for {
		if err := get(ctx, url, nil); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready", url)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// get requests a URL. Unless into is nil, it decodes the JSON answer into the value that into points to.
func get(ctx context.Context, url string, into any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s: %s", url, response.Status, body)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(body, into)
}

// Alert is an alert that is pending or firing.
type Alert struct {
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
	State       string            `json:"state"` // pending or firing
	ActiveAt    time.Time         `json:"activeAt"`
}

// Alerts returns the alerts that are currently pending or firing in Prometheus.
func (s *Stack) Alerts(ctx context.Context) ([]Alert, error) {
	var answer struct {
		Data struct {
			Alerts []Alert `json:"alerts"`
		} `json:"data"`
	}
	err := get(ctx, s.Prometheus+"/api/v1/alerts", &answer)
	return answer.Data.Alerts, err
}

// Series returns the number of series that a query had at any time in the last over. step is the time between two
// evaluations of the query.
func (s *Stack) Series(ctx context.Context, query string, over, step time.Duration) (int, error) {
	var answer struct {
		Data struct {
			Result []json.RawMessage `json:"result"`
		} `json:"data"`
	}
	now := time.Now()
	seconds := func(t time.Time) string { return fmt.Sprintf("%.3f", float64(t.UnixMilli())/1000) }
	values := url.Values{
		"query": {query}, "start": {seconds(now.Add(-over))}, "end": {seconds(now)}, "step": {fmt.Sprint(step.Seconds())},
	}
	err := get(ctx, s.Prometheus+"/api/v1/query_range?"+values.Encode(), &answer)
	return len(answer.Data.Result), err
}

// writeFiles writes the files of deploy/ with this stack's addresses and durations.
func writeFiles(config *Config, alertmanager string) error {
	write := func(name string, content any) error {
		raw, err := yaml.Marshal(content)
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(config.Dir, name), raw, 0o600)
	}
	read := func(name string) (node, error) {
		raw, err := deploy.Files.ReadFile(name)
		if err != nil {
			return nil, err
		}
		var content node
		return content, yaml.NewDecoder(bytes.NewReader(raw)).Decode(&content)
	}
	rules, err := read("prometheus/rules.yaml")
	if err != nil {
		return err
	}
	for group := range rules.each("groups") {
		for rule := range group.each("rules") {
			if _, waits := rule["for"]; waits {
				rule["for"] = config.For.String()
			}
		}
	}
	scrape, err := read("prometheus/prometheus.yaml")
	if err != nil {
		return err
	}
	global := scrape.in("global")
	global["scrape_interval"], global["evaluation_interval"], global["scrape_timeout"] = config.Interval.String(),
		config.Interval.String(), config.Interval.String()
	global.in("external_labels")["dlqd_url"] = config.Console
	for job := range scrape.each("scrape_configs") {
		job["static_configs"] = []node{{"targets": config.Targets}}
	}
	for to := range scrape.in("alerting").each("alertmanagers") {
		to["static_configs"] = []node{{"targets": []string{alertmanager}}}
	}
	routes, err := read("alertmanager.yaml")
	if err != nil {
		return err
	}
	if err := config.Receivers.replaceReceivers(routes, config.Dir); err != nil {
		return err
	}
	texts, err := deploy.Files.ReadFile("dlqd.tmpl")
	if err != nil {
		return err
	}
	return errors.Join(
		write("rules.yaml", rules), write("prometheus.yaml", scrape), write("alertmanager.yaml", routes),
		os.WriteFile(filepath.Join(config.Dir, "dlqd.tmpl"), texts, 0o600),
	)
}

// node is a mapping of a YAML file.
type node map[string]any

// in returns the mapping at a key.
func (n node) in(key string) node {
	inner, _ := n[key].(node)
	return inner
}

// each iterates over the mappings of a list.
func (n node) each(key string) func(func(node) bool) {
	list, _ := n[key].([]any)
	return func(yield func(node) bool) {
		_ = slices.ContainsFunc(list, func(item any) bool {
			inner, ok := item.(node)
			return ok && !yield(inner)
		})
	}
}
