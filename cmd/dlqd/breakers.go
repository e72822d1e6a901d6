package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/breaker"
)

func newBreakers() *cobra.Command {
	var list client
	cmd := &cobra.Command{
		Use:   "breakers",
		Short: "List circuit breakers; open and reset them",
		Args:  cobra.NoArgs,
	}
	show := &cobra.Command{
		Use:   "list",
		Short: "List circuit breakers with their states",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &list, api.ListBreakers, api.None{})
			if err != nil || list.asJSON {
				return err
			}
			w, row := table(cmd, "NAME\tSTATE\tSINCE\tLAST TRIED\tFAILING\tREASON")
			for _, b := range out.Breakers {
				since, tried := "-", "-"
				if b.Since != nil {
					since = ago(*b.Since)
				}
				if b.LastTried != nil {
					tried = ago(*b.LastTried)
				}
				row(b.Name, b.State, since, tried, fmt.Sprintf("%.0f %% of %d", b.FailureRate, b.Deliveries), b.Reason)
			}
			return w.Flush()
		},
	}
	addDefaultList(cmd, show, &list, "breakers", "name")

	change := func(verb, short string, flags func(*cobra.Command, *api.OpenAction)) {
		var c client
		in := api.OpenAction{}
		sub := &cobra.Command{
			Use:   verb + " NAME",
			Short: short,
			Long:  "NAME is the name of a destination, or queue:NAME for a River queue.",
			Args:  cobra.ExactArgs(1),
			RunE: func(cmd *cobra.Command, args []string) error {
				name := args[0]
				if !strings.Contains(name, ":") {
					name = breaker.DestinationPrefix + name
				}
				var out *breaker.Status
				var err error
				if named := (api.BreakerInput{Name: name}); verb == "reset" {
					out, err = call(cmd, &c, api.ResetBreaker, api.ResetBreakerInput{BreakerInput: named, Body: &in.Action})
				} else {
					out, err = call(cmd, &c, api.OpenBreaker, api.OpenBreakerInput{BreakerInput: named, Body: &in})
				}
				if err != nil || c.asJSON {
					return err
				}
				printSafef(cmd.OutOrStdout(), "%s is %s\n", out.Name, out.State)
				return nil
			},
		}
		c.register(sub)
		addActor(sub, &in.Actor, &in.Note)
		if flags != nil {
			flags(sub, &in)
		}
		cmd.AddCommand(sub)
	}
	change("open", "Open a circuit breaker: nothing is delivered to its destination",
		func(cmd *cobra.Command, in *api.OpenAction) {
			cmd.Flags().StringVar(&in.For, "for", "", "how long, such as 10m; until a reset if empty")
		})
	change("reset", "Close a circuit breaker", nil)
	return cmd
}
