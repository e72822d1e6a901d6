package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/demo"
)

func newDemo(hard context.Context) *cobra.Command {
	var options demo.Options
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show what dlqd does in twenty seconds, on a Postgres and a receiver of its own",
		Long: "Demo sends a few hundred messages to a receiver with real troubles: dead letters are decided, a circuit\n" +
			"breaker opens, the receiver recovers, the breaker closes, and waiting messages are sent. It ends with an\n" +
			"account that adds up. With --alerts it starts Prometheus and Alertmanager beside itself, breaks a destination,\n" +
			"and prints which alert fired when and what was sent to whom.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if options.Program, err = os.Executable(); err != nil {
				return err
			}
			return demo.Run(cmd.Context(), hard, options, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&options.PostgresBin, "postgres-bin", "", "directory of the Postgres programs; looked for if empty")
	cmd.Flags().BoolVar(&options.Alerts, "alerts", false, "show alerts: Prometheus and Alertmanager have to be installed")
	return cmd
}

func newReceiver() *cobra.Command {
	var listen string
	var troubles time.Duration
	cmd := &cobra.Command{
		Use:   "receiver",
		Short: "Run a practice receiver",
		Long: "Receiver takes deliveries. / takes everything; /payments, /orders, /invoices, /notifications and /documents\n" +
			"behave like real services: they reject, decline, are slow, hang, hang up, limit the rate and are down for a while.\n" +
			"/count says how many messages it has taken; POST /recover ends what passes of the troubles.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return demo.NewReceiver(troubles).Serve(cmd.Context(), listen, func(url, refusing string) {
				_, _ = fmt.Fprintf(cmd.OutOrStdout(), "receiver at %s\nrefusing for %s at %s\n", url, troubles, refusing)
			})
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:9090", "address")
	cmd.Flags().DurationVar(&troubles, "troubles", demo.Troubles, "how long passing troubles last")
	return cmd
}
