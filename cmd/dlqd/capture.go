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
		Short: "Show the state of capture; switch it off and on",
		Long: "Capture runs in the application's transactions: it records each failed job in dlqd's inbox. These commands " +
			"connect\n" +
			"to the database, so they work without a running dlqd. They wait for no table lock, so they work while\n" +
			"applications are stuck.",
	}
	var database databaseFlags
	var asJSON bool
	status := &cobra.Command{
		Use: "status", Short: "Show the state of capture, its backlog and the reconciler's last scan", Args: cobra.NoArgs,
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
	status.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.AddCommand(status,
		newCaptureSwitch(reconcile.ModeOn, "Capture each failure in the transaction that ends the job; skip capture where "+
			"it would delay the application"),
		newCaptureSwitch(reconcile.ModeOff, "Do nothing in the application's transactions; the reconciler files failures "+
			"while River keeps the jobs"),
		newCaptureSwitch(reconcile.ModeStrict, "Capture every failure: a job cannot end as failed unless capture records it"))
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
			row(n.what, "unknown: another session holds a lock on the table")
		} else {
			row(n.what, *n.n)
		}
	}
	scanned := "not yet"
	if s.LookedAt != nil {
		scanned = ago(*s.LookedAt)
	}
	row("last reconciler scan", scanned)
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
					_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "dlqd: warning: the change is not in the audit trail: another session "+
						"holds a lock on dlq.acts or dlq.settings")
				}
				return nil
			})
		},
	}
	database.register(cmd)
	addActor(cmd, &change.Actor, &change.Note)
	if mode != reconcile.ModeOff {
		cmd.Flags().DurationVar(&change.Limit, "limit", 0, "how long capture may take per statement of the application; 0 "+
			"leaves the limit unchanged")
	}
	return cmd
}
