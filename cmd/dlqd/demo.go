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
		Short: "Run a 20-second demonstration with a temporary Postgres and a practice receiver",
		Long: "Demo sends a few hundred messages to a receiver with realistic faults. Dead letters get a strategy, a " +
			"circuit\n" +
			"breaker opens, the receiver recovers, the breaker closes, and waiting messages are sent. At the end, demo counts\n" +
			"where each message went. With --alerts, it also starts Prometheus and Alertmanager, breaks a destination, and\n" +
			"prints when each alert fired and which notification went to which receiver.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if options.Program, err = os.Executable(); err != nil {
				return err
			}
			return demo.Run(cmd.Context(), hard, options, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&options.PostgresBin, "postgres-bin", "", "directory of the Postgres programs; searched for "+
		"if empty")
	cmd.Flags().BoolVar(&options.Alerts, "alerts", false, "demonstrate alerts; needs Prometheus and Alertmanager "+
		"installed")
	return cmd
}

func newReceiver() *cobra.Command {
	var listen string
	var faults time.Duration
	cmd := &cobra.Command{
		Use:   "receiver",
		Short: "Run a practice receiver",
		Long: "Receiver accepts deliveries. / accepts every message. /payments, /orders, /invoices, /notifications and\n" +
			"/documents behave like real services: they reject, decline, are slow, hang, close connections, limit the rate\n" +
			"and are down for a while. /count returns the number of accepted messages; POST /recover ends the temporary faults.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return demo.NewReceiver(faults).Serve(cmd.Context(), listen, func(url, refusing string) {
				_, _ = fmt.Fprintf(cmd.OutOrStdout(), "receiver at %s\nrefusing for %s at %s\n", url, faults, refusing)
			})
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:9090", "address")
	cmd.Flags().DurationVar(&faults, "troubles", demo.FaultDuration, "how long temporary faults last")
	return cmd
}
