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
	var people bool
	var limit int
	cmd := &cobra.Command{
		Use:   "audit",
		Short: "Search the audit trail: who did what to which dead letter, when, from where and why",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			query := url.Values{"limit": {strconv.Itoa(limit)}}
			for name, value := range filters {
				if *value != "" {
					query.Set(name, *value)
				}
			}
			if people {
				query.Set("people", "true")
			}
			var page api.AuditPage
			if err := c.call(cmd, http.MethodGet, "/api/dlq/audit?"+query.Encode(), nil, &page); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "AT\tBY\tFROM WHERE\tENTRY\tFROM\tTO\tWHAT\tNOTE\tPOLICY")
			for _, m := range page.Moves {
				row(stamp(m.At), m.Actor, text(m.Origin), text(m.EntryID), text(m.FromStatus), text(m.ToStatus), text(m.Reason), text(m.Note), text(m.ConfigVersion))
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
		{"actor", "actor", "what this person or worker did"},
		{"db-user", "dbUser", "what this database user did"},
		{"origin", "origin", "from where, or a part of it, such as an address"},
		{"id", "entryId", "what was done to this entry"},
		{"queue", "queue", "to entries of this queue"},
		{"kind", "kind", "to entries of this kind"},
		{"from", "from", "from this state"},
		{"to", "to", "to this state"},
		{"text", "text", "with these words in reason or note"},
		{"policy", "configVersion", "under this version of the policy"},
		{"after", "after", "at or after (RFC 3339)"},
		{"before", "before", "before (RFC 3339)"},
		{"cursor", "cursor", "where the page before ended"},
	} {
		filters[f.name] = cmd.Flags().String(f.flag, "", f.help)
	}
	cmd.Flags().BoolVar(&people, "people", false, "what people did, and not dlqd by itself")
	cmd.Flags().IntVar(&limit, "limit", 50, "moves in a page, at most 500")
	return cmd
}

func newErase() *cobra.Command {
	var c client
	var filter filterFlags
	var in api.EraseRequest
	cmd := &cobra.Command{
		Use:   "erase [FILTER]",
		Short: "Erase somebody's data from dead letters, their jobs and the archive",
		Long: "Payloads, error texts, metadata, subscriber, tags and notes go, of the entries that a filter and the flags choose; open and failed ones are\n" +
			"archived. A record stays that says that it was done, and not whose data it was.",
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
			if err := c.confirmed(cmd, "/api/dlq/erasures", &in, &in.Expect, &out); err != nil || c.asJSON {
				return err
			}
			if out.DryRun {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d dead letters of the database are chosen; nothing was changed, and the archive was not looked through\n", out.Entries)
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "erasure %s: %d dead letters and %d jobs of the database, %d dead letters in %d units of the archive\n", out.ID, out.Entries, out.Jobs, out.Archived, out.Archives)
			if out.UnderWay > 0 {
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "%d dead letters or replay runs were left, because they are under way, or somebody holds them: erase again when that has ended\n", out.UnderWay)
			}
			return err
		},
	}
	c.register(cmd)
	filter.register(cmd)
	cmd.Flags().StringVar(&in.Note, "note", "", "why, such as the number of the request")
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "only count the dead letters of the database")
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
				row(stamp(e.At), e.ID, e.Actor, text(e.Note), strings.Join(e.Fields, ","), e.Entries, e.Jobs, e.UnderWay, e.Archived, e.Archives, e.FinishedAt != nil)
			}
			return w.Flush()
		},
	}
	c.register(cmd)
	return cmd
}
