package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

func newDoctor() *cobra.Command {
	var database databaseFlags
	var source policyFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look for what goes wrong slowly, and say what to do",
		Long: "Doctor looks at the schema, triggers, partitions, long transactions, replication slots, dead rows, River's state, leases,\n" +
			"clocks and the policy. It changes nothing, and fails where something is wrong.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var findings []doctor.Finding
			err := database.withMigrator(cmd, func(m *postgres.Migrator) error {
				findings = doctor.Examine(cmd.Context(), m)
				return nil
			})
			if err != nil {
				return err
			}
			findings = append(findings, examinePolicy(source.source()))
			wrong := 0
			w, row := table(cmd, "\tCHECK\tFOUND")
			for _, f := range findings {
				mark := "ok"
				if !f.OK {
					mark = "WRONG"
					wrong++
				}
				row(mark, f.Name, f.Detail)
				if !f.OK {
					row("", "", "do: "+f.Do)
				}
			}
			if asJSON {
				err = json.NewEncoder(cmd.OutOrStdout()).Encode(map[string]any{"findings": findings})
			} else {
				err = w.Flush()
			}
			if err == nil && wrong > 0 {
				err = fmt.Errorf("%d of %d checks found something wrong", wrong, len(findings))
			}
			return err
		},
	}
	database.register(cmd)
	source.register(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	return cmd
}

func examinePolicy(source policy.Source) doctor.Finding {
	planner, err := loadRuled(source)
	if err != nil {
		return doctor.Finding{Name: "policy", Detail: err.Error(), Do: "mend the files; dlqd config check says the same"}
	}
	return doctor.Finding{Name: "policy", OK: true, Detail: "version " + planner.Policy().Version()}
}
