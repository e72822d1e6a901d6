package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/policy"
)

// noteUnknownQueues prints which of the queues that a filter names do not exist. Commands call it after the filter has
// selected nothing. queues and q, the filter's text, are the parts of the filter that name queues.
func (c *client) noteUnknownQueues(cmd *cobra.Command, q string, queues ...string) {
	if read, err := filter.Parse(q, "me"); err == nil {
		queues = slices.Concat(queues, read.Queue)
	}
	queues = slices.DeleteFunc(queues, func(name string) bool { return name == "" })
	if len(queues) == 0 {
		return
	}
	out := ask(c, cmd, api.ListQueues, api.QueuesInput{})
	if len(out.Queues) == 0 { // the call failed
		return
	}
	names := make([]string, len(out.Queues))
	for i := range out.Queues {
		names[i] = out.Queues[i].Name
	}
	for _, queue := range queues {
		if !slices.ContainsFunc(names, func(name string) bool { return policy.MatchPattern(queue, name) }) {
			printSafef(cmd.ErrOrStderr(), "there is no queue %s (queues: %s)\n", queue, strings.Join(names, ", "))
		}
	}
}

func newQueues() *cobra.Command {
	cmd := &cobra.Command{Use: "queues", Short: "List queues; pause and resume them", Args: cobra.NoArgs}
	var c client
	list := &cobra.Command{
		Use: "list", Short: "List queues with their jobs and dead letters", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.ListQueues, api.QueuesInput{})
			if err != nil || c.asJSON {
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
	addDefaultList(cmd, list, &c, "queues", "name")
	for _, verb := range []struct {
		name, short, done string
		operation         api.Operation[api.QueueActionInput, api.Queue]
	}{
		{"pause", "Pause a queue: no River client works its jobs", "is paused", api.PauseQueue},
		{"resume", "Resume a paused queue", "is resumed", api.ResumeQueue},
	} {
		var c client
		var note string
		sub := &cobra.Command{
			Use: verb.name + " QUEUE", Short: verb.short, Args: cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				q, err := call(cmd, &c, verb.operation, api.QueueActionInput{
					QueueInput: api.QueueInput{Name: args[0]}, Body: &api.Action{Actor: actor(), Note: note},
				})
				if err != nil || c.asJSON {
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
