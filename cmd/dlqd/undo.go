package main

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// sayUndo prints the command that undoes an operation, if it can be undone.
func sayUndo(cmd *cobra.Command, operation *uuid.UUID) {
	if operation != nil {
		sayf(cmd.OutOrStdout(), "undo: dlqd undo %s\n", *operation)
	}
}

func newUndo() *cobra.Command {
	var c client
	var in api.Action
	cmd := &cobra.Command{
		Use: "undo OPERATION", Short: "Undo a discard, resolve, park, unpark, assign, tag or note, of one dead letter or of many",
		Long: "Dead letters that are still where it put them go back; the others have moved on, and are left. What was discarded or resolved comes to a person.", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Actor = actor()
			c.timeout = bulkTimeout
			var out deadletter.Undone
			if err := c.call(cmd, http.MethodPost, "/api/dlq/undo/"+url.PathEscape(args[0]), in, &out); err != nil || c.asJSON {
				return err
			}
			sayf(cmd.OutOrStdout(), "undone: %d of %d dead letters\n", out.Changed, out.Looked)
			for _, status := range slices.Sorted(maps.Keys(out.Became)) {
				sayf(cmd.OutOrStdout(), "  %d are %s\n", out.Became[status], status)
			}
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&in.Note, "note", "", "why")
	return cmd
}

func newOperation() *cobra.Command {
	var c client
	var cursor string
	var limit int
	cmd := &cobra.Command{
		Use: "operation OPERATION", Short: "Show what somebody did in one go: by which filter, to which dead letters, and why it left others", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			query := url.Values{"limit": {strconv.Itoa(limit)}}
			if cursor != "" {
				query.Set("cursor", cursor)
			}
			var o api.OperationDetail
			if err := c.call(cmd, http.MethodGet, "/api/dlq/operations/"+url.PathEscape(args[0])+"?"+query.Encode(), nil, &o); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "operation\t"+o.ID.String())
			row("what", o.Action)
			row("filter", string(o.Filter))
			row("by", o.Actor)
			row("note", o.Note)
			row("from, to", stamp(o.StartedAt)+", "+stamp(o.LastAt))
			row("changed", strconv.FormatInt(o.Changed, 10)+" of "+strconv.FormatInt(o.Looked, 10))
			if left, err := json.Marshal(o.Unchanged); err == nil {
				row("left", string(left))
			}
			if err := w.Flush(); err != nil {
				return err
			}
			w, row = table(cmd, "\nDEAD LETTER\tCHANGED\tWHAT, OR WHY NOT")
			for _, e := range o.Entries {
				row(e.ID, map[bool]string{true: "yes", false: "no"}[e.Changed], e.Reason)
			}
			if err := w.Flush(); err != nil || o.Next == "" {
				return err
			}
			sayf(cmd.ErrOrStderr(), "more: --cursor %s\n", o.Next)
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&cursor, "cursor", "", "where the page before ended")
	cmd.Flags().IntVar(&limit, "limit", 100, "dead letters in a page, at most 1000")
	return cmd
}
