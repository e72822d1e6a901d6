package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/version"
)

func newVersion() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version of dlqd, of its schema and of River",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			schema, err := postgres.LatestVersion()
			if err != nil {
				return err
			}
			build, out := version.Read(), cmd.OutOrStdout()
			if asJSON {
				return json.NewEncoder(out).Encode(struct {
					version.Build

					// Schema is the version of the schema after "dlqd migrate up" or "dlqd attach".
					Schema int64 `json:"schema"`
				}{build, schema})
			}
			_, err = fmt.Fprintf(out, "dlqd    %s\ncommit  %s\nGo      %s\nschema  %d\nRiver   %s; riverdlq is tested with %s\n",
				build.Version, build.Commit, build.Go, schema, build.River.Library, strings.Join(build.River.Tested, ", "))
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
