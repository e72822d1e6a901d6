package main

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
)

// reportCommand is a command that prints one of the API's reports: "path" is below /api/dlq/analytics/, and flags with values become
// its parameters.
func reportCommand[T any](path, short string, flags func(*cobra.Command), print func(cmd *cobra.Command, rows []T) error) *cobra.Command {
	var c client
	cmd := &cobra.Command{Use: path, Short: short, Args: cobra.NoArgs}
	flags(cmd)
	var names []string
	for _, name := range []string{"over", "queue", "timezone", "limit"} {
		if cmd.Flags().Lookup(name) != nil {
			names = append(names, name)
		}
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		query := url.Values{}
		for _, name := range names {
			if value := cmd.Flags().Lookup(name).Value.String(); value != "" {
				query.Set(name, value)
			}
		}
		var out api.Report[T]
		if err := c.call(cmd, http.MethodGet, "/api/dlq/analytics/"+path+"?"+query.Encode(), nil, &out); err != nil || c.asJSON {
			return err
		}
		return print(cmd, out.Rows)
	}
	c.register(cmd)
	return cmd
}

func newHeatMap() *cobra.Command {
	return reportCommand("heat-map", "Draw failures by weekday and hour", func(cmd *cobra.Command) {
		cmd.Flags().String("over", "28d", "how far back, such as 7d or 28d")
		cmd.Flags().String("queue", "", "of this queue alone")
		cmd.Flags().String("timezone", "UTC", "whose weekdays and hours, such as Europe/Paris")
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
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "\nmost: %d, %s from %02d:00 to %02d:00, in %s\n", worst.Failures, days[worst.Weekday-1]+"s", worst.Hour, (worst.Hour+1)%24, cmd.Flag("timezone").Value)
		return err
	})
}

func newOldest() *cobra.Command {
	return reportCommand("oldest", "List what has been open for the longest", func(cmd *cobra.Command) {
		cmd.Flags().Int("limit", 20, "how many at most")
	}, func(cmd *cobra.Command, rows []analytics.Oldest) error {
		w, row := table(cmd, "OPEN FOR\tID\tSTATUS\tQUEUE\tKIND\tCLASS\tTYPE\tASSIGNED TO")
		for _, o := range rows {
			row(took(o.Age), o.ID, strings.TrimPrefix(o.Status, "dlq_"), o.Queue, o.Kind, text(o.ErrorClass), text(o.ErrorType), text(o.AssignedTo))
		}
		return w.Flush()
	})
}

func newSources() *cobra.Command {
	return reportCommand("sources", "List who sends the most of what fails", func(cmd *cobra.Command) {
		cmd.Flags().String("over", "7d", "how far back, such as 24h or 30d")
		cmd.Flags().Int("limit", 20, "how many at most")
	}, func(cmd *cobra.Command, rows []analytics.Source) error {
		w, row := table(cmd, "CAPTURED\tSHARE\tSOURCE")
		for _, s := range rows {
			row(s.Captured, percent(s.Share), s.Source)
		}
		return w.Flush()
	})
}
