package deploy

import (
	"fmt"
	"maps"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// RulesFile is the name in [Files] of the file with the alerts.
const RulesFile = "prometheus/rules.yaml"

// Links are the addresses to which alerts link, by the name of the scrape job. The key "" applies to jobs without a key
// of their own.
type Links struct {
	// Consoles are URLs of consoles. The default for "" is the external label dlqd_url of Prometheus.
	Consoles map[string]string
	// Runbooks are URLs of runbooks. {name} stands for the runbook's name. If {name} is missing, the name is appended.
	// The default for "" is the console's URL, because the console serves the runbooks.
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

// Render returns the file of the alerts with the given links.
func Render(links Links) ([]byte, error) {
	raw, err := Files.ReadFile(RulesFile)
	if err != nil {
		return nil, err
	}
	for job, to := range links.Consoles {
		if err := checkLink(job, to, true); err != nil {
			return nil, err
		}
	}
	for job, to := range links.Runbooks {
		named := strings.ReplaceAll(to, nameInURL, "name")
		if err := checkLink(job, named, named == to); err != nil {
			return nil, err
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
	console := byJob(links.Consoles, externalURL, func(to string) string { return strings.TrimSuffix(to, "/") })
	return []byte(strings.ReplaceAll(text, externalURL, console)), nil
}

// byJob returns link(urls[""]), or the parameter otherwise if urls has no key "". If urls has keys of jobs, byJob
// returns a template that chooses the link by the alert's label job. link turns a URL of urls into the text that
// replaces the link of the rules.
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

// checkLink rejects texts that are not links, and texts that would end the template or the YAML text around them. If a
// path is appended to the link, checkLink also rejects a query or a fragment.
func checkLink(job, to string, appended bool) error {
	if job != "" && !jobName.MatchString(job) {
		return fmt.Errorf("%q is not the name of a scrape job", job)
	}
	parsed, err := url.Parse(to)
	switch {
	case err != nil, parsed.Scheme != "http" && parsed.Scheme != "https", parsed.Host == "",
		strings.ContainsAny(to, "{}'\"\\ \t\r\n"):
		return fmt.Errorf("%q is not a URL that an alert can link to (http or https)", to)
	case appended && strings.ContainsAny(to, "?#"):
		return fmt.Errorf("%q has a query or a fragment, after which no path can follow", to)
	}
	return nil
}
