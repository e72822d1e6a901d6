package main

import (
	"net/http"
	"net/url"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

func newQueues() *cobra.Command {
	cmd := &cobra.Command{Use: "queues", Short: "List queues; pause and resume them", Args: cobra.NoArgs}
	var c client
	list := &cobra.Command{
		Use: "list", Short: "List queues with their jobs and dead letters", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var out struct {
				Queues []api.Queue `json:"queues"`
			}
			if err := c.call(cmd, http.MethodGet, "/api/queues", nil, &out); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "QUEUE\tPAUSED\tAVAILABLE\tRUNNING\tRETRYABLE\tSCHEDULED\tHELD\tDEAD LETTERS")
			for _, q := range out.Queues {
				paused := "-"
				if q.PausedAt != nil {
					paused = ago(*q.PausedAt)
				}
				row(q.Name, paused, q.Available, q.Running, q.Retryable, q.Scheduled, q.Held, q.DeadLetters)
			}
			return w.Flush()
		},
	}
	addDefaultList(cmd, list, &c)
	for _, verb := range []struct{ name, short, done string }{
		{"pause", "Pause a queue: no River client works its jobs", "is paused"},
		{"resume", "Resume a paused queue", "is resumed"},
	} {
		var c client
		var note string
		sub := &cobra.Command{
			Use: verb.name + " QUEUE", Short: verb.short, Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				var q api.Queue
				if err := c.call(cmd, http.MethodPost, "/api/queues/"+url.PathEscape(args[0])+"/"+verb.name,
					api.Action{Actor: actor(), Note: note}, &q); err != nil || c.asJSON {
					return err
				}
				printSafef(cmd.OutOrStdout(), "queue %s %s\n", q.Name, verb.done)
				return nil
			},
		}
		c.register(sub)
		sub.Flags().StringVar(&note, "note", "", "reason")
		cmd.AddCommand(sub)
	}
	return cmd
}
