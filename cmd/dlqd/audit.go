package main

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
)

func newAudit() *cobra.Command {
	var c client
	filters := map[string]*string{}
	var manualOnly bool
	var limit int
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Search the audit trail: who changed which dead letter, when, from where and why",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			query := url.Values{"limit": {strconv.Itoa(limit)}}
			for name, value := range filters {
				if *value != "" {
					query.Set(name, *value)
				}
			}
			if manualOnly {
				query.Set("people", "true")
			}
			var page api.AuditPage
			if err := c.call(cmd, http.MethodGet, "/api/dlq/audit?"+query.Encode(), nil, &page); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "AT\tACTOR\tORIGIN\tENTRY\tFROM\tTO\tREASON\tNOTE\tPOLICY")
			for _, m := range page.Moves {
				row(stamp(m.At), m.Actor, text(m.Origin), text(m.EntryID), text(m.FromStatus), text(m.ToStatus), text(m.Reason),
					text(m.Note), text(m.ConfigVersion))
			}
			if err := w.Flush(); err != nil || page.Next == "" {
				return err
			}
			_, err := fmt.Fprintln(cmd.ErrOrStderr(), "more: --cursor", page.Next)
			return err
		},
	}
	c.register(cmd)
	for _, f := range []struct{ flag, name, help string }{
		{"actor", "actor", "only changes by this actor"},
		{"db-user", "dbUser", "only changes by this database user"},
		{"origin", "origin", "only changes from this origin, or part of it, such as an address"},
		{"id", "entryId", "only changes of this entry"},
		{"queue", "queue", "only entries of this queue"},
		{"kind", "kind", "only entries of this kind"},
		{"from", "from", "only changes from this state"},
		{"to", "to", "only changes to this state"},
		{"text", "text", "only changes with these words in the reason or note"},
		{"policy", "configVersion", "only changes under this version of the policy"},
		{"after", "after", "only changes at or after this time (RFC 3339)"},
		{"before", "before", "only changes before this time (RFC 3339)"},
		{"cursor", "cursor", "cursor that the previous page printed"},
	} {
		filters[f.name] = cmd.Flags().String(f.flag, "", f.help)
	}
	cmd.Flags().BoolVar(&manualOnly, "people", false, "only changes by people, not by dlqd")
	cmd.Flags().IntVar(&limit, "limit", 50, "moves per page, at most 500")
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
			"and the flags select. It archives those that are open or failed. A record of the erasure stays, without the data.",
		Example: `  dlqd erase --payload-contains '{"customer": "cus_81"}' --note "request 42"`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := isID(args); err != nil {
				return err
			}
			var err error
			if in.Filter, err = filter.filter(args); err != nil {
				return err
			}
			in.Actor = actor()
			c.timeout = bulkTimeout
			var out api.EraseAnswer
			if err := c.callConfirmed(cmd, "/api/dlq/erasures", &in, &in.Expect, &out); err != nil || c.asJSON {
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
			var out struct {
				Erasures []deadletter.Erasure `json:"erasures"`
			}
			if err := c.call(cmd, http.MethodGet, "/api/dlq/erasures?limit=200", nil, &out); err != nil || c.asJSON {
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
	c.register(cmd)
	return cmd
}
