package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
)

// reportCommand returns a command that prints a report. The flags of the command set the parameters of the report.
func reportCommand[In, Row any](operation api.Operation[In, api.Report[Row]], name, short string,
	flags func(*cobra.Command, *In), write func(cmd *cobra.Command, rows []Row) error,
) *cobra.Command {
	var c client
	var in In
	cmd := &cobra.Command{
		Use: name, Short: short, Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, operation, in)
			if err != nil || c.asJSON {
				return err
			}
			return write(cmd, out.Rows)
		},
	}
	flags(cmd, &in)
	c.registerTable(cmd)
	return cmd
}

func newHeatMap() *cobra.Command {
	return reportCommand(api.GetHeatMap, "heat-map", "Draw failures by weekday and hour", func(
		cmd *cobra.Command, in *api.HeatMapInput,
	) {
		cmd.Flags().StringVar(&in.Over, "over", "28d", "how far back, such as 7d or 28d")
		cmd.Flags().StringVar(&in.Queue, "queue", "", "only this queue")
		cmd.Flags().StringVar(&in.Timezone, "timezone", "UTC", "time zone of weekdays and hours, such as Europe/Paris")
	}, func(cmd *cobra.Command, cells []analytics.Cell) error {
		w, row := table(cmd, "\t0     6     12    18\tSUM")
		var week [7][24]int64
		var worst analytics.Cell
		for _, c := range cells {
			week[c.Weekday-1][c.Hour] = c.Failures
			if c.Failures > worst.Failures {
				worst = c
			}
		}
		days := []string{"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"}
		for i, day := range days {
			sum := int64(0)
			for _, n := range week[i] {
				sum += n
			}
			row(day, bars(week[i][:], worst.Failures), sum)
		}
		if err := w.Flush(); err != nil || worst.Failures == 0 {
			return err
		}
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "\nmost: %d, %s from %02d:00 to %02d:00, in %s\n", worst.Failures,
			days[worst.Weekday-1]+"s", worst.Hour, (worst.Hour+1)%24, cmd.Flag("timezone").Value)
		return err
	})
}

func newOldest() *cobra.Command {
	const short = "List the dead letters that have been open longest"
	return reportCommand(api.GetOldest, "oldest", short, func(cmd *cobra.Command, in *api.LimitInput) {
		cmd.Flags().IntVar(&in.Limit, "limit", 20, "maximum number of rows")
	}, func(cmd *cobra.Command, rows []analytics.Oldest) error {
		w, row := table(cmd, "OPEN FOR\tID\tSTATUS\tQUEUE\tKIND\tCLASS\tTYPE\tASSIGNED TO")
		for _, o := range rows {
			row(formatSeconds(o.Age), o.ID, strings.TrimPrefix(o.Status, "dlq_"), o.Queue, o.Kind, text(o.ErrorClass),
				text(o.ErrorType), text(o.AssignedTo))
		}
		return w.Flush()
	})
}

func newPolicies() *cobra.Command {
	return reportCommand(api.GetPolicies, "policies", "List policy versions and when each came into force", func(
		cmd *cobra.Command, in *api.OverInput,
	) {
		cmd.Flags().StringVar(&in.Over, "over", "7d", "how far back, such as 24h or 30d")
	}, func(cmd *cobra.Command, rows []analytics.PolicyChange) error {
		w, row := table(cmd, "IN FORCE SINCE\tVERSION")
		for _, p := range rows {
			row(stamp(p.At), p.Version)
		}
		return w.Flush()
	})
}

func newSources() *cobra.Command {
	return reportCommand(api.GetSources, "sources", "List the sources with the most failures", func(
		cmd *cobra.Command, in *api.SourcesInput,
	) {
		cmd.Flags().StringVar(&in.Over, "over", "7d", "how far back, such as 24h or 30d")
		cmd.Flags().IntVar(&in.Limit, "limit", 20, "maximum number of rows")
	}, func(cmd *cobra.Command, rows []analytics.Source) error {
		w, row := table(cmd, "CAPTURED\tSHARE\tSOURCE")
		for _, s := range rows {
			row(s.Captured, percent(s.Share), s.Source)
		}
		return w.Flush()
	})
}
