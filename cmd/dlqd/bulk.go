package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

// bulkTimeout limits a request about many dead letters. The API's answer ends only when the API has processed all of
// them.
const bulkTimeout = time.Hour

// newMove returns a command that moves one dead letter, or all that match a filter.
func newMove(name, short string) *cobra.Command {
	var c client
	var filter filterFlags
	var in api.BulkRequest
	cmd := &cobra.Command{
		Use:   name + " [ID | FILTER]",
		Short: short + ", or all that match a filter",
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Actor = actor()
			one, err := isID(args)
			if err != nil {
				return err
			}
			if one {
				if err := allowOnlyFlags(cmd, "with an ID", "note"); err != nil {
					return err
				}
				return c.move(cmd, args[0], name, &in.Action)
			}
			in.Do = name
			return c.bulk(cmd, args, &in, &filter)
		},
	}
	c.register(cmd)
	registerBulk(cmd, &in, &filter)
	return cmd
}

func registerBulk(cmd *cobra.Command, in *api.BulkRequest, filter *filterFlags) {
	filter.register(cmd)
	cmd.Flags().StringVar(&in.Note, "note", "", "reason")
	cmd.Flags().BoolVar(&in.All, "all", false, "select all dead letters")
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "only show how many dead letters match")
	registerExpect(cmd, &in.Expect)
}

// newBulk returns a command for a bulk action that has no endpoint for a single entry. The command sends ids as a
// filter.
func newBulk(name, short string, flags func(*cobra.Command, *api.BulkRequest)) *cobra.Command {
	var c client
	var filter filterFlags
	in := api.BulkRequest{Do: name}
	cmd := &cobra.Command{
		Use: name + " [FILTER]", Short: short,
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := isID(args); err != nil {
				return err
			}
			in.Actor = actor()
			return c.bulk(cmd, args, &in, &filter)
		},
	}
	c.register(cmd)
	registerBulk(cmd, &in, &filter)
	flags(cmd, &in)
	return cmd
}

func newBulks() []*cobra.Command {
	return []*cobra.Command{
		newBulk("assign", "Assign dead letters to a user", func(cmd *cobra.Command, in *api.BulkRequest) {
			cmd.Flags().StringVar(&in.Assignee, "to", "", "user to assign them to; empty removes the assignment")
		}),
		newBulk("tag", "Add tags to dead letters", func(cmd *cobra.Command, in *api.BulkRequest) {
			cmd.Flags().StringSliceVar(&in.Tags, "add", nil, "tags to add")
		}),
		newBulk("purge", "Delete closed dead letters", func(cmd *cobra.Command, in *api.BulkRequest) {
			cmd.Flags().BoolVar(&in.Force, "force", false, "also delete open and failed ones")
		}),
		newExport(),
	}
}

func (c *client) bulk(cmd *cobra.Command, args []string, in *api.BulkRequest, flags *filterFlags) error {
	var err error
	if in.Filter, err = flags.requiredFilter(args, in.All); err != nil {
		return err
	}
	c.timeout = bulkTimeout
	input := api.BulkInput{Body: *in}
	out, err := callConfirmed(cmd, c, api.Bulk, &input, &input.Body.Expect)
	if err != nil || c.asJSON {
		return err
	}
	if out.Chosen == 0 {
		c.noteUnknownQueues(cmd, in.Filter.Q, in.Filter.Queue...)
	}
	if !out.DryRun {
		_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s: %d of %d dead letters\n", in.Do, out.Changed, out.Chosen)
		printUndo(cmd, out.Undo)
		return err
	}
	_, _ = fmt.Fprintf(cmd.OutOrStdout(), "%d dead letters match; nothing was changed\n", out.Chosen)
	printSplit(cmd, "queue", out.ByQueue)
	printSplit(cmd, "error type", out.ByType)
	return nil
}

// printSplit prints the number of entries for each value of a property. by names the property.
func printSplit(cmd *cobra.Command, by string, counts map[string]int64) {
	width := 0
	for key := range counts {
		width = max(width, utf8.RuneCountInString(cmp.Or(key, "(none)")))
	}
	for _, key := range slices.Sorted(maps.Keys(counts)) {
		printSafef(cmd.OutOrStdout(), "  %-10s  %-*s  %d\n", by, width, cmp.Or(key, "(none)"), counts[key])
	}
}

func newExport() *cobra.Command {
	var c client
	var filter filterFlags
	var format, reveal, approved string
	cmd := &cobra.Command{
		Use:   "export [FILTER]",
		Short: "Print dead letters as NDJSON or CSV",
		RunE: func(cmd *cobra.Command, args []string) error {
			selected, err := filter.filter(args)
			if err != nil {
				return err
			}
			in := api.ExportInputBody{Filter: selected, Format: format}
			if approved != "" {
				id, err := uuid.Parse(approved)
				if err != nil {
					return &usageError{fmt.Errorf("--approval %s: must be the id of a request", approved)}
				}
				in.Approval = &id
			}
			if cmd.Flags().Changed("reveal") {
				in.Reveal, in.Note, in.Actor = true, reveal, actor()
			}
			c.timeout = bulkTimeout
			response, err := do(cmd, &c, api.Export, api.ExportInput{Body: in})
			if err != nil {
				return err
			}
			defer func() { _ = response.Body.Close() }()
			if response.StatusCode != http.StatusOK {
				raw, err := io.ReadAll(response.Body)
				if err != nil {
					return err
				}
				_, err = api.Export.Answer(response.StatusCode, response.Header, raw)
				return commandError(err)
			}
			if _, err := io.Copy(cmd.OutOrStdout(), response.Body); err != nil {
				return errors.Join(errors.New("the export is incomplete"), err)
			}
			return nil
		},
	}
	c.registerURL(cmd)
	filter.register(cmd)
	cmd.Flags().StringVar(&format, "format", "ndjson", "ndjson or csv")
	cmd.Flags().StringVar(&approved, "approval", "", "print what this approved request for an export selected")
	cmd.Flags().StringVar(&reveal, "reveal", "", "print masked values unmasked; REASON goes to the audit trail")
	return cmd
}
