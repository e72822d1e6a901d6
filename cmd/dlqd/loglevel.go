package main

import (
	"net/http"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

func newLogLevel() *cobra.Command {
	var c client
	cmd := &cobra.Command{
		Use:   "log-level [debug|info|warn|error]",
		Short: "Show or change the log level of the dlqd process that answers, until that process stops",
		Args:  cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			method, change := http.MethodGet, any(nil)
			if len(args) == 1 {
				method, change = http.MethodPut, api.LogLevel{Level: args[0]}
			}
			var now api.LogLevel
			if err := c.call(cmd, method, "/api/log-level", change, &now); err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "%s\n", now.Level)
			return nil
		},
	}
	c.register(cmd)
	return cmd
}
