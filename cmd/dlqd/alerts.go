package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/deploy"
)

func newAlerts() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "alerts",
		Short: "Print the alerting rules for Prometheus, with links to your console and runbooks",
	}
	var consoles, runbooks []string
	render := &cobra.Command{
		Use:   "render",
		Short: "Print the alerting rules for Prometheus",
		Long: `Render prints the rules of deploy/prometheus/rules.yaml and fills in the links of the alerts. URL applies to all
scrape jobs, JOB=URL to one. Without --console-url, alerts link to Prometheus's external label dlqd_url. Without
--runbook-url, they link to the runbooks of the console, which are unavailable while dlqd is down.`,
		Example: "dlqd alerts render --console-url https://dlqd.example --console-url dlqd-eu=https://dlqd.eu.example \\\n" +
			"  --runbook-url 'https://git.example/runbooks/{name}.md'",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var links deploy.Links
			var err error
			if links.Consoles, err = linksByJob("--console-url", consoles); err != nil {
				return err
			}
			if links.Runbooks, err = linksByJob("--runbook-url", runbooks); err != nil {
				return err
			}
			rules, err := deploy.Render(links)
			if err != nil {
				return &usageError{err}
			}
			_, err = cmd.OutOrStdout().Write(rules)
			return err
		},
	}
	render.Flags().StringArrayVar(&consoles, "console-url", nil,
		"URL of the console, or JOB=URL for one scrape job; may be repeated")
	render.Flags().StringArrayVar(&runbooks, "runbook-url", nil,
		"URL of the runbooks, or JOB=URL for one scrape job; {name} is replaced by the runbook's name, which is appended if "+
			"{name} is missing; may be repeated")
	cmd.AddCommand(render)
	return cmd
}

// linksByJob parses links of the form URL or JOB=URL. The URL may contain = after its first colon.
func linksByJob(flag string, given []string) (map[string]string, error) {
	links := map[string]string{}
	for _, link := range given {
		job, to, hasJob := strings.Cut(link, "=")
		if !hasJob || strings.Contains(job, "://") {
			job, to = "", link
		}
		if _, twice := links[job]; twice {
			return nil, &usageError{fmt.Errorf("%s: two URLs for the same job: %s", flag, link)}
		}
		links[job] = to
	}
	return links, nil
}
