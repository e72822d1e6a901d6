package main

import (
	"strconv"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

func newTopicSources() *cobra.Command {
	var list client
	cmd := &cobra.Command{
		Use:   "sources",
		Short: "List the topics whose dead letters dlqd reads",
		Args:  cobra.NoArgs,
	}
	show := &cobra.Command{
		Use:   "list",
		Short: "List the partitions of topics that dlqd reads, with position and lag",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &list, api.ListSources, api.None{})
			if err != nil || list.asJSON {
				return err
			}
			w, row := table(cmd, "SOURCE\tTOPIC\tPARTITION\tSTATE\tNEXT\tLAG\tRECORDS\tLOST\tSEEN\tERROR")
			number := func(n *int64) string {
				if n == nil {
					return "-"
				}
				return strconv.FormatInt(*n, 10)
			}
			for i := range out.Partitions {
				p := &out.Partitions[i]
				partition := "-"
				if p.Partition >= 0 {
					partition = strconv.Itoa(int(p.Partition))
				}
				row(p.Source, p.Topic, partition, p.State, number(p.Next), number(p.Lag), p.Records, p.Lost, ago(p.At), p.Error)
			}
			return w.Flush()
		},
	}
	addDefaultList(cmd, show, &list, "partitions", "source")
	return cmd
}
