package main

import (
	"encoding/json"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/worker"
)

// reclassifyTimeout bounds a reclassification, which answers when all entries are judged.
const reclassifyTimeout = time.Hour

func mustJSON(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		return nil // what YAML can hold and JSON cannot, such as a map with a list as key
	}
	return raw
}

func newReclassify() *cobra.Command {
	var c client
	in := api.ReclassifyAction{}
	cmd := &cobra.Command{
		Use:   "reclassify",
		Short: "Judge open dead letters anew, by the rules that are in force",
		Long:  "Dead letters that a person has parked, or that are being redelivered, are left alone.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c.timeout = reclassifyTimeout
			var out worker.Reclassified
			if err := c.call(cmd, "POST", "/api/dlq/reclassify", in, &out); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "ENTRIES\tFROM\tTO\tEXAMPLE")
			moved := 0
			for _, r := range out.Changed {
				moved += r.Entries
				row(r.Entries, judgement(r.From), judgement(r.To), r.Example)
			}
			if err := w.Flush(); err != nil {
				return err
			}
			verb := "were judged anew"
			if out.DryRun {
				verb = "would be judged anew"
			}
			_, _ = fmt.Fprintf(cmd.OutOrStdout(), "%d of %d open dead letters %s\n", moved, out.Looked, verb)
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&in.Actor, "actor", actor(), "who does it")
	cmd.Flags().StringVar(&in.Note, "note", "", "why")
	cmd.Flags().BoolVar(&in.DryRun, "dry-run", false, "only say what would change")
	return cmd
}

func judgement(j worker.Judgement) string { return j.Class + ", " + j.Strategy + " (" + j.Rule + ")" }

func newBreakers() *cobra.Command {
	cmd := &cobra.Command{Use: "breakers", Short: "See and steer circuit breakers"}
	var list client
	show := &cobra.Command{
		Use:   "list",
		Short: "Say where every circuit breaker stands",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var out struct {
				Breakers []breaker.Status `json:"breakers"`
			}
			if err := list.call(cmd, "GET", "/api/circuit-breakers", nil, &out); err != nil || list.asJSON {
				return err
			}
			w, row := table(cmd, "NAME\tSTATE\tSINCE\tFAILING\tREASON")
			for _, b := range out.Breakers {
				since := "-"
				if b.Since != nil {
					since = ago(*b.Since)
				}
				row(b.Name, b.State, since, fmt.Sprintf("%.0f %% of %d", b.FailureRate, b.Deliveries), shorten(b.Reason, 60))
			}
			return w.Flush()
		},
	}
	list.register(show)
	cmd.AddCommand(show)

	change := func(verb, short string, flags func(*cobra.Command, *api.OpenAction)) {
		var c client
		in := api.OpenAction{}
		sub := &cobra.Command{
			Use:   verb + " NAME",
			Short: short,
			Long:  "NAME is a destination's, or queue: and the name of a River queue.",
			Args:  cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				name := args[0]
				if !strings.Contains(name, ":") {
					name = breaker.DestinationPrefix + name
				}
				var body any = in
				if verb == "reset" {
					body = in.Action
				}
				var out breaker.Status
				if err := c.call(cmd, "POST", "/api/circuit-breakers/"+url.PathEscape(name)+"/"+verb, body, &out); err != nil || c.asJSON {
					return err
				}
				_, _ = fmt.Fprintf(cmd.OutOrStdout(), "%s is %s\n", out.Name, out.State)
				return nil
			},
		}
		c.register(sub)
		sub.Flags().StringVar(&in.Actor, "actor", actor(), "who does it")
		sub.Flags().StringVar(&in.Note, "note", "", "why")
		if flags != nil {
			flags(sub, &in)
		}
		cmd.AddCommand(sub)
	}
	change("open", "Open a circuit breaker: nothing is delivered to its destination", func(cmd *cobra.Command, in *api.OpenAction) {
		cmd.Flags().StringVar(&in.For, "for", "", "how long, such as 10m; until it is reset if absent")
	})
	change("reset", "Close a circuit breaker", nil)
	return cmd
}
