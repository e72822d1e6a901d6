package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/worker"
)

// reclassifyTimeout limits a reclassification. The API answers only when all entries are reclassified.
const reclassifyTimeout = time.Hour

func newReclassify() *cobra.Command {
	var c client
	in := api.ReclassifyAction{}
	cmd := &cobra.Command{
		Use:   "reclassify",
		Short: "Classify open dead letters again, with the current rules",
		Long:  "Dead letters that an operator parked, or that are being redelivered, do not change.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.timeout = reclassifyTimeout
			out, err := call(cmd, &c, api.Reclassify, api.ReclassifyInput{Body: &in})
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "ENTRIES\tFROM\tTO\tALSO\tEXAMPLE")
			moved := 0
			for _, r := range out.Changed {
				moved += r.Entries
				row(r.Entries, decisionText(r.From), decisionText(r.To), strings.Join(r.Also, ", "), r.Example)
			}
			if err := w.Flush(); err != nil {
				return err
			}
			verb := "were reclassified"
			if out.DryRun {
				verb = "would be reclassified"
			}
			_, _ = fmt.Fprintf(cmd.OutOrStdout(), "%d of %d open dead letters %s\n", moved, out.Looked, verb)
			return nil
		},
	}
	c.registerTable(cmd)
	addActor(cmd, &in.Actor, &in.Note)
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "only show what would change")
	return cmd
}

func decisionText(j worker.Judgement) string {
	return j.Class + ", " + j.Strategy + " (" + j.Rule + ")"
}
