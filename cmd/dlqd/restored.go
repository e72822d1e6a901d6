package main

import (
	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

func newRestored() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "restored",
		Short: "Show whether the database was restored from a backup, and which deliveries may be repeated",
		Long: "A restored database has no record of deliveries made after its backup. When dlqd detects that its " +
			"database was\n" +
			"restored, it holds replay runs, redeliveries and messages from before the restore, until \"dlqd restored " +
			"resume\".\n" +
			"It still delivers new messages, and dead letters that an operator replays one by one. New dead letters wait with\n" +
			"the others.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			restored, err := call(cmd, &c, api.GetRestored, api.None{})
			if err != nil || c.asJSON {
				return err
			}
			return printRestored(cmd, restored)
		},
	}
	c.registerTable(cmd)
	cmd.AddCommand(newRestoredResume())
	return cmd
}

func newRestoredResume() *cobra.Command {
	var c client
	var in api.AutomaticAction
	cmd := &cobra.Command{
		Use: "resume", Short: "Release the deliveries that dlqd holds since the database was restored", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.ResumeRestored, api.AutomaticInput{Body: &in})
			if err != nil || c.asJSON {
				return err
			}
			if err := printRestored(cmd, &out.Restored); err != nil {
				return err
			}
			switch {
			case out.DryRun:
				printSafef(cmd.OutOrStdout(), "nothing was changed (--dry-run)\n")
			case out.Hold != nil:
				printSafef(cmd.OutOrStdout(), "resumed: dlqd sends the deliveries that it held\n")
			}
			return nil
		},
	}
	c.registerAutomatic(cmd, &in)
	cmd.Flags().Lookup("dry-run").Usage = "only show which deliveries may be repeated"
	return cmd
}

func printRestored(cmd *cobra.Command, restored *api.Restored) error {
	if restored.Hold == nil {
		printSafef(cmd.OutOrStdout(), "nothing is held: the database was not restored\n")
		return nil
	}
	printStop(cmd.OutOrStdout(), restored.Hold)
	w, row := table(cmd, "MAY BE REPEATED\tCOUNT\tHELD\tDETAIL")
	for _, r := range restored.MayRepeat {
		row(r.What, r.Items, map[bool]string{true: "yes", false: "no"}[r.Held], r.Detail)
	}
	return w.Flush()
}
