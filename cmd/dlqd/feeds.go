package main

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/source"
)

func newFeeds() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "feeds",
		Short: "List, pause and rewind the feeds: topics that dlqd publishes dead letters to",
		Args:  cobra.NoArgs,
	}
	list := &cobra.Command{
		Use:   "list",
		Short: "List the feeds, with what each has published and has yet to publish",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.ListSources, api.None{})
			if err != nil || c.asJSON {
				return err
			}
			return printFeeds(cmd, out.Feeds)
		},
	}
	addDefaultList(cmd, list, &c, "feeds", "name")
	send := func(operation api.Operation[api.FeedActionInput, source.FeedStatus]) sendAction {
		return func(cmd *cobra.Command, c *client, name string, body *api.Action) (state string, err error) {
			out, err := call(cmd, c, operation, api.FeedActionInput{FeedInput: api.FeedInput{Name: name}, Body: body})
			if err == nil {
				state = out.State
			}
			return state, err
		}
	}
	cmd.AddCommand(
		newPauseOrResume("pause", "Stop the publication of a feed", send(api.PauseFeed)),
		newPauseOrResume("resume", "Continue the publication of a feed", send(api.ResumeFeed)),
		newRewindFeed(),
	)
	return cmd
}

func newRewindFeed() *cobra.Command {
	var c client
	var in api.FeedRewindAction
	var since string
	cmd := &cobra.Command{
		Use:   "rewind NAME",
		Short: "Publish the records of a feed again",
		Long: "The records have the ids that they had before. Records that could not be published are tried again. A record\n" +
			"whose entry was deleted is not published.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if in.Since, err = time.Parse(time.RFC3339, since); err != nil {
				return &usageError{fmt.Errorf("--since %q: not a time such as 2026-11-28T08:00:00Z", since)}
			}
			out, err := call(cmd, &c, api.RewindFeed, api.FeedRewindInput{FeedInput: api.FeedInput{Name: args[0]}, Body: in})
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "records that are published again: %d\n", out.Records)
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&since, "since", "", "when the feed found the first entry, such as 2026-11-28T08:00:00Z")
	addActor(cmd, &in.Actor, &in.Note)
	_ = cmd.MarkFlagRequired("since")
	return cmd
}
