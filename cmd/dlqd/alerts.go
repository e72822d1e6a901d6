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
		Short: "Print the alerts for Prometheus, with links to your console and runbooks",
	}
	var consoles, runbooks []string
	render := &cobra.Command{
		Use:   "render",
		Short: "Print the rules for Prometheus",
		Long: `The rules of deploy/prometheus/rules.yaml, with the links that alerts have. A URL is for all scrape jobs, or for one: JOB=URL. Without
--console-url, alerts link to what the external label dlqd_url of Prometheus says; without --runbook-url, to the runbooks that
the console serves, which are not there while dlqd is down.`,
		Example: "dlqd alerts render --console-url https://dlqd.example --console-url dlqd-eu=https://dlqd.eu.example --runbook-url 'https://git.example/runbooks/{name}.md'",
		Args:    cobra.NoArgs,
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
	render.Flags().StringArrayVar(&consoles, "console-url", nil, "URL of the console, or JOB=URL of one scrape job's; may be repeated")
	render.Flags().StringArrayVar(&runbooks, "runbook-url", nil, "URL of the runbooks, or JOB=URL; {name} stands for the runbook's name, which goes to the end of others; may be repeated")
	cmd.AddCommand(render)
	return cmd
}

// linksByJob reads URL and JOB=URL. (A URL may have = in it, after its colon.)
func linksByJob(flag string, given []string) (map[string]string, error) {
	links := map[string]string{}
	for _, link := range given {
		job, to, of := strings.Cut(link, "=")
		if !of || strings.Contains(job, "://") {
			job, to = "", link
		}
		if _, twice := links[job]; twice {
			return nil, &usageError{fmt.Errorf("%s is given twice for the same job: %s", flag, link)}
		}
		links[job] = to
	}
	return links, nil
}
