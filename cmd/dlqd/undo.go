package main

import (
	"encoding/json"
	"maps"
	"slices"
	"strconv"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

// printUndo prints the command that undoes an operation. If operation is nil, the operation cannot be undone, and
// printUndo prints nothing.
func printUndo(cmd *cobra.Command, operation *uuid.UUID) {
	if operation != nil {
		printSafef(cmd.OutOrStdout(), "undo: dlqd undo %s\n", *operation)
	}
}

func newUndo() *cobra.Command {
	var c client
	var in api.Action
	cmd := &cobra.Command{
		Use:   "undo OPERATION",
		Short: "Undo a discard, expire, resolve, park, unpark, assign, tag or note, of one dead letter or of many",
		Long: "Undo reverts the dead letters that are still as the operation left them. The others have changed since and " +
			"stay.\n" +
			"A discarded, expired or resolved dead letter becomes dlq_manual: it waits for an operator.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Actor = actor()
			c.timeout = bulkTimeout
			out, err := call(cmd, &c, api.Undo, api.UndoInput{OperationInput: api.OperationInput{ID: args[0]}, Body: &in})
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "undone: %d of %d dead letters\n", out.Changed, out.Looked)
			for _, status := range slices.Sorted(maps.Keys(out.Became)) {
				printSafef(cmd.OutOrStdout(), "  %d are %s\n", out.Became[status], status)
			}
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&in.Note, "note", "", "reason")
	return cmd
}

func newOperation() *cobra.Command {
	var c client
	var in api.GetOperationInput
	cmd := &cobra.Command{
		Use:   "operation OPERATION",
		Short: "Show a bulk operation: its filter, the dead letters it changed, and why others did not change",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.ID = args[0]
			o, err := call(cmd, &c, api.GetOperation, in)
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "operation\t"+o.ID.String())
			row("action", o.Action)
			row("filter", string(o.Filter))
			row("by", o.Actor)
			row("note", o.Note)
			row("from, to", stamp(o.StartedAt)+", "+stamp(o.LastAt))
			row("changed", strconv.FormatInt(o.Changed, 10)+" of "+strconv.FormatInt(o.Looked, 10))
			if unchanged, err := json.Marshal(o.Unchanged); err == nil {
				row("unchanged", string(unchanged))
			}
			if err := w.Flush(); err != nil {
				return err
			}
			w, row = table(cmd, "\nDEAD LETTER\tCHANGED\tREASON")
			for _, e := range o.Entries {
				row(e.ID, map[bool]string{true: "yes", false: "no"}[e.Changed], e.Reason)
			}
			if err := w.Flush(); err != nil || o.Next == "" {
				return err
			}
			printSafef(cmd.ErrOrStderr(), "more: --cursor %s\n", o.Next)
			return nil
		},
	}
	c.registerNamed(cmd, "entries", "id")
	cmd.Flags().StringVar(&in.Cursor, "cursor", "", "cursor that the previous page printed")
	cmd.Flags().IntVar(&in.Limit, "limit", 100, "dead letters per page, at most 1000")
	return cmd
}
