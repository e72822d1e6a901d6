package main

import (
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
			var now *api.LogLevel
			var err error
			if len(args) == 1 {
				now, err = call(cmd, &c, api.SetLogLevel, api.SetLogLevelInput{Body: api.LogLevel{Level: args[0]}})
			} else {
				now, err = call(cmd, &c, api.GetLogLevel, api.None{})
			}
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "%s\n", now.Level)
			return nil
		},
	}
	c.register(cmd)
	return cmd
}
