package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/reconcile"
)

func newCapture() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "capture",
		Short: "Say how capture is; switch it off and on",
		Long: "Capture is what dlqd does inside of the application's transactions: it appends a job that failed to the dead letters. These commands go to\n" +
			"the database, so they work where no dlqd serves, and wait for no lock on a table, so they work while applications are stuck.",
	}
	var database databaseFlags
	var asJSON bool
	status := &cobra.Command{
		Use: "status", Short: "Say how capture is, and what the reconciler found that it had missed", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return database.withMigrator(cmd, func(m *postgres.Migrator) error {
				s, err := reconcile.ReadCapture(cmd.Context(), m.Schemas.Rendered(m.Pool))
				if err != nil {
					return err
				}
				if asJSON {
					return json.NewEncoder(cmd.OutOrStdout()).Encode(s)
				}
				return printCapture(cmd, s)
			})
		},
	}
	database.register(status)
	status.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	cmd.AddCommand(status,
		newCaptureSwitch(reconcile.ModeOn, "Capture failures in the transactions that end jobs"),
		newCaptureSwitch(reconcile.ModeOff, "Do nothing in the application's transactions; failures are filed later, as long as River keeps the jobs"),
		newCaptureSwitch(reconcile.ModeStrict, "Let no job end as a failure unless its dead letter can be written"))
	return cmd
}

func printCapture(cmd *cobra.Command, s *reconcile.Capture) error {
	w, row := table(cmd, "CAPTURE\t"+s.Summary())
	row("limit", s.Limit+" of a statement")
	row("triggers", s.Triggers)
	for _, n := range []struct {
		what string
		n    *int64
	}{{"unfiled entries", s.Unfiled}, {"unapplied facts", s.Facts}} {
		if n.n == nil {
			row(n.what, "unknown: somebody holds the table")
		} else {
			row(n.what, *n.n)
		}
	}
	looked := "not yet"
	if s.LookedAt != nil {
		looked = ago(*s.LookedAt)
	}
	row("reconciler looked", looked)
	if problem := s.Problem(); problem != "" {
		row("WRONG", problem)
	}
	return w.Flush()
}

func newCaptureSwitch(mode, short string) *cobra.Command {
	var database databaseFlags
	change := reconcile.Switch{Mode: mode}
	cmd := &cobra.Command{
		Use: mode, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return database.withMigrator(cmd, func(m *postgres.Migrator) error {
				done, err := reconcile.SetCapture(cmd.Context(), m.Schemas.Rendered(m.Pool), change)
				if err != nil {
					return err
				}
				_, _ = fmt.Fprintf(cmd.OutOrStdout(), "capture is %s. %s\n", done.Mode, done.Message)
				if !done.Recorded {
					_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "dlqd: who did it could not be recorded: the audit trail could not be written (somebody holds dlq.acts, or dlq.settings)")
				}
				return nil
			})
		},
	}
	database.register(cmd)
	cmd.Flags().StringVar(&change.Actor, "actor", actor(), "who does it")
	cmd.Flags().StringVar(&change.Note, "note", "", "why")
	if mode != reconcile.ModeOff {
		cmd.Flags().DurationVar(&change.Limit, "limit", 0, "how long capture may work in one statement of the application; 0 for what holds")
	}
	return cmd
}
