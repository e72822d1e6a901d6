package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

func newAudit() *cobra.Command {
	var c client
	var in api.AuditInput
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Search the audit trail: who changed which dead letter, when, from where and why",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			page, err := call(cmd, &c, api.SearchAudit, in)
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "AT\tACTOR\tORIGIN\tENTRY\tFROM\tTO\tREASON\tNOTE\tPOLICY")
			for _, m := range page.Moves {
				row(stamp(m.At), m.Actor, text(m.Origin), text(m.EntryID), text(m.FromStatus), text(m.ToStatus), text(m.Reason),
					text(m.Note), text(m.ConfigVersion))
			}
			if len(page.Moves) == 0 {
				c.noteUnknownQueues(cmd, "", in.Queue)
			}
			if err := w.Flush(); err != nil || page.Next == "" {
				return err
			}
			_, err = fmt.Fprintln(cmd.ErrOrStderr(), "more: --cursor", page.Next)
			return err
		},
	}
	c.registerNamed(cmd, "moves", "entryId")
	for _, f := range []struct {
		into       *string
		flag, help string
	}{
		{&in.Actor, "actor", "only changes by this actor"},
		{&in.DBUser, "db-user", "only changes by this database user"},
		{&in.Origin, "origin", "only changes from this origin, or part of it, such as an address"},
		{&in.EntryID, "id", "only changes of this entry"},
		{&in.Queue, "queue", "only entries of this queue"},
		{&in.Kind, "kind", "only entries of this kind"},
		{&in.From, "from", "only changes from this state"},
		{&in.To, "to", "only changes to this state"},
		{&in.Text, "text", "only changes with these words in the reason or note"},
		{&in.ConfigVersion, "policy", "only changes under this version of the policy"},
		{&in.After, "after", "only changes at or after this time (RFC 3339)"},
		{&in.Before, "before", "only changes before this time (RFC 3339)"},
		{&in.Cursor, "cursor", "cursor that the previous page printed"},
	} {
		cmd.Flags().StringVar(f.into, f.flag, "", f.help)
	}
	cmd.Flags().BoolVar(&in.People, "people", false, "only changes by people, not by dlqd")
	cmd.Flags().BoolVar(&in.Grouped, "grouped", false, "one row for each operation, not for each of its dead letters")
	cmd.Flags().IntVar(&in.Limit, "limit", 50, "moves per page, at most 500")
	return cmd
}

func newErase() *cobra.Command {
	var c client
	var filter filterFlags
	var in api.EraseRequest
	cmd := &cobra.Command{
		Use:   "erase [FILTER]",
		Short: "Erase personal data from dead letters, their jobs and the archive",
		Long: "Erase removes payloads, error texts, metadata, subscriber, tags and notes from the dead letters that the " +
			"filter\n" +
			"and the flags select. It archives those that are open or failed. A record of the erasure stays, without the data.\n" +
			"Erase prints the rows of reports and of the audit trail that may still name the person, as queries that list them.",
		Example: `  dlqd erase --payload-contains '{"customer": "cus_81"}' --note "request 42"`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := isID(args); err != nil {
				return err
			}
			var err error
			if in.Filter, err = filter.filter(args); err != nil {
				return err
			}
			if in.DryRun && in.Note == "" { // the API requires a note, which a dry run does not record
				in.Note = "dry run"
			}
			in.Actor = actor()
			c.timeout = bulkTimeout
			input := api.EraseInput{Body: in}
			out, err := callConfirmed(cmd, &c, api.Erase, &input, &input.Body.Expect)
			if err != nil || c.asJSON {
				return err
			}
			if out.DryRun {
				_, err = fmt.Fprintf(cmd.OutOrStdout(),
					"%d dead letters in the database match; nothing was changed, and the archive was not searched\n", out.Entries)
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(),
				"erasure %s: erased %d dead letters and %d jobs in the database, %d dead letters in %d units of the archive\n",
				out.ID, out.Entries, out.Jobs, out.Archived, out.Archives)
			if out.UnderWay > 0 {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "not erased: %d dead letters or replay runs that are in progress, or "+
					"locked by "+
					"another session; run the command again later\n", out.UnderWay)
			}
			for _, l := range out.Leaves {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "stays, and may name the person: %d rows of %s (%s): %s\n",
					l.Rows, l.Table, strings.Join(l.Columns, ", "), l.Query)
			}
			if out.Entries+out.Archived > 0 {
				_, err = fmt.Fprintln(cmd.OutOrStdout(), "to find a name in any table, also in other dead letters, call "+
					"dlq.traces('{NAME}') as dlqd's database owner")
			}
			if len(out.Unanalyzed) > 0 {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "not analyzed: %s; their statistics may still have erased values, until "+
					"their owner runs ANALYZE\n", strings.Join(out.Unanalyzed, ", "))
			}
			return err
		},
	}
	c.register(cmd)
	filter.register(cmd)
	cmd.Flags().StringVar(&in.Note, "note", "", "reason, such as the number of the request")
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "only count the matching dead letters in the database")
	registerExpect(cmd, &in.Expect)
	return cmd
}

func newErasures() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use: "erasures", Short: "List the records of erasures", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.ListErasures, api.LimitInput{Limit: 200})
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "AT\tID\tBY\tNOTE\tFIELDS\tENTRIES\tJOBS\tLEFT\tARCHIVED\tUNITS\tDONE")
			for _, e := range out.Erasures {
				row(stamp(e.At), e.ID, e.Actor, text(e.Note), strings.Join(e.Fields, ","), e.Entries, e.Jobs, e.UnderWay,
					e.Archived, e.Archives, e.FinishedAt != nil)
			}
			return w.Flush()
		},
	}
	c.registerNamed(cmd, "erasures", "id")
	return cmd
}
