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
	var replica replicaFlags
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Check the database and the policy for problems, and print what to do about them",
		Long: "Doctor checks the schema and its objects, triggers, partitions, long transactions, replication slots, dead\n" +
			"rows, River's state, redeliveries, clocks, the read replica and the policy. It changes nothing. It fails if it finds a problem.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := replica.check(cmd); err != nil {
				return err
			}
			var findings []doctor.Finding
			err := database.withMigrator(cmd, func(m *postgres.Migrator) error {
				findings = append(doctor.Examine(cmd.Context(), m), doctor.Replica(cmd.Context(), m.Pool, replica.url)...)
				return nil
			})
			if err != nil {
				return err
			}
			findings = append(findings, examinePolicy(source.source()))
			problems := 0
			w, row := table(cmd, "\tCHECK\tFOUND")
			for _, f := range findings {
				mark := "ok"
				if !f.OK {
					mark = "WRONG"
					problems++
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
			if err == nil && problems > 0 {
				err = fmt.Errorf("%d of %d checks found a problem", problems, len(findings))
			}
			return err
		},
	}
	database.register(cmd)
	replica.register(cmd)
	source.register(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func examinePolicy(source policy.Source) doctor.Finding {
	planner, err := loadPlanner(source)
	if err != nil {
		return doctor.Finding{Name: "policy", Detail: err.Error(), Do: "correct the policy's files; \"dlqd config check\" " +
			"checks them"}
	}
	return doctor.Finding{Name: "policy", OK: true, Detail: "version " + planner.Policy().Version()}
}
