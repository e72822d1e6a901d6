package deploy

import (
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// RulesFile is the name of the alerts in [Files].
const RulesFile = "prometheus/rules.yaml"

// Links are where alerts link to.
type Links struct {
	// Consoles are URLs of consoles by scrape job; that of "" is for the jobs that are not named. Where it is missing, it is the external label
	// dlqd_url of Prometheus.
	Consoles map[string]string
	// Runbooks are URLs of runbooks in the same way. {name} in one stands for the runbook's name, which goes to the end of others. Where that of
	// "" is missing, the console serves them.
	Runbooks map[string]string
}

const (
	externalURL = "{{ $externalLabels.dlqd_url }}"
	nameInURL   = "{name}"
)

var (
	runbookLink = regexp.MustCompile(regexp.QuoteMeta(externalURL) + `/runbooks/([a-z-]+)`)
	jobName     = regexp.MustCompile(`^[A-Za-z0-9_.:/-]+$`)
)

// Render returns the alerts with their links.
func Render(links Links) ([]byte, error) {
	raw, err := Files.ReadFile(RulesFile)
	if err != nil {
		return nil, err
	}
	for _, urls := range []map[string]string{links.Consoles, links.Runbooks} {
		for job, to := range urls {
			if err := checkLink(job, to); err != nil {
				return nil, err
			}
		}
	}
	text := runbookLink.ReplaceAllStringFunc(string(raw), func(link string) string {
		name := runbookLink.FindStringSubmatch(link)[1]
		return byJob(links.Runbooks, link, func(to string) string {
			if strings.Contains(to, nameInURL) {
				return strings.ReplaceAll(to, nameInURL, name)
			}
			return strings.TrimSuffix(to, "/") + "/" + name
		})
	})
	return []byte(strings.ReplaceAll(text, externalURL, byJob(links.Consoles, externalURL, func(to string) string { return strings.TrimSuffix(to, "/") }))), nil
}

// byJob is the text, or template, of what a link is by scrape job.
func byJob(urls map[string]string, otherwise string, link func(to string) string) string {
	if to, ok := urls[""]; ok {
		otherwise = link(to)
	}
	var text strings.Builder
	open := 0
	for _, job := range slices.Sorted(maps.Keys(urls)) {
		if job == "" {
			continue
		}
		if open++; open == 1 {
			text.WriteString("{{ if ")
		} else {
			text.WriteString("{{ else if ")
		}
		fmt.Fprintf(&text, "eq $labels.job %q }}%s", job, link(urls[job]))
	}
	if open == 0 {
		return otherwise
	}
	return text.String() + "{{ else }}" + otherwise + "{{ end }}"
}

// checkLink refuses what would not be a link, or would end the template or the text of YAML that it stands in.
func checkLink(job, to string) error {
	if job != "" && !jobName.MatchString(job) {
		return fmt.Errorf("%q is not the name of a scrape job", job)
	}
	parsed, err := url.Parse(strings.ReplaceAll(to, nameInURL, "name"))
	if err != nil || parsed.Scheme != "http" && parsed.Scheme != "https" || parsed.Host == "" || strings.ContainsAny(strings.ReplaceAll(to, nameInURL, ""), "{}'\"\\ \t\r\n") {
		return fmt.Errorf("%q is not a URL that an alert can link to (http or https)", to)
	}
	return nil
}
