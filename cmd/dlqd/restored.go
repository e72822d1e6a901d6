package main

import (
	"net/http"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

func newRestored() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "restored",
		Short: "Say whether the database was restored to an earlier moment, and what may be sent a second time; let it go on",
		Long: "A database that was restored does not know what was sent since. Where dlqd finds itself on one, it holds replay runs, redeliveries\n" +
			"and messages from before, until \"dlqd restored resume\". New messages are delivered, and so is what a person replays one by one;\n" +
			"new dead letters wait with the others.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var said api.Restored
			if err := c.call(cmd, http.MethodGet, "/api/dlq/restored", nil, &said); err != nil || c.asJSON {
				return err
			}
			return printRestored(cmd, &said)
		},
	}
	c.register(cmd)
	cmd.AddCommand(newRestoredResume())
	return cmd
}

func newRestoredResume() *cobra.Command {
	var c client
	var in api.AutomaticAction
	cmd := &cobra.Command{
		Use: "resume", Short: "Let a restored database go on: what is held is sent", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var out api.RestoredResumed
			if err := c.call(cmd, http.MethodPost, "/api/dlq/restored/resume", in, &out); err != nil || c.asJSON {
				return err
			}
			if err := printRestored(cmd, &out.Restored); err != nil {
				return err
			}
			switch {
			case out.DryRun:
				sayf(cmd.OutOrStdout(), "nothing was changed (--dry-run)\n")
			case out.Hold != nil:
				sayf(cmd.OutOrStdout(), "it goes on\n")
			}
			return nil
		},
	}
	c.registerAutomatic(cmd, &in)
	cmd.Flags().Lookup("dry-run").Usage = "only say what may be sent a second time"
	return cmd
}

func printRestored(cmd *cobra.Command, said *api.Restored) error {
	if said.Hold == nil {
		sayf(cmd.OutOrStdout(), "nothing is held: the database is the one that dlqd knows\n")
		return nil
	}
	sayStopped(cmd.OutOrStdout(), said.Hold)
	w, row := table(cmd, "MAY GO A SECOND TIME\tHOW MANY\tHELD\tWHICH")
	for _, r := range said.MayRepeat {
		row(r.What, r.Items, map[bool]string{true: "yes", false: "no"}[r.Held], r.Detail)
	}
	return w.Flush()
}
