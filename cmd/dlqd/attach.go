package main

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/doctor"
	"github.com/dlqd/dlqd/internal/postgres"
)

func newGrants() *cobra.Command {
	var database databaseFlags
	var role string
	var parts []string
	cmd := &cobra.Command{
		Use:   "grants",
		Short: "Print the privileges that dlqd needs on an application's database, as GRANT statements",
		Long: "Grants prints statements that the owner of River's tables runs once, so that dlqd can run as an " +
			"unprivileged role.\n" +
			"It does not connect to a database; --database-url only provides the database's name. \"dlqd attach --dry-run\"\n" +
			"and \"dlqd doctor\" print the privileges that are missing.",
		Example: "  dlqd grants --role dlqd --part attach,dlq-workers,api | psql \"$OWNER_DATABASE_URL\"",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := database.schemas.Validate(); err != nil {
				return &usageError{err}
			}
			if len(parts) == 0 {
				parts = postgres.Parts()
			}
			for _, part := range parts {
				if !slices.Contains(postgres.Parts(), part) {
					return &usageError{fmt.Errorf("--part %s: unknown part (known: %s)", part, strings.Join(postgres.Parts(), ", "))}
				}
			}
			name := `:"DBNAME"` // a psql variable
			if u, err := url.Parse(database.url); err == nil && strings.Trim(u.Path, "/") != "" {
				name = pgx.Identifier{strings.Trim(u.Path, "/")}.Sanitize()
			}
			printGrants(cmd.OutOrStdout(), database.schemas, name, pgx.Identifier{role}.Sanitize(), parts)
			return nil
		},
	}
	cmd.Flags().StringVar(&role, "role", "dlqd", "role that dlqd logs in as")
	cmd.Flags().StringSliceVar(&parts, "part", nil, "only the privileges of these parts: "+
		strings.Join(postgres.Parts(), ", "))
	database.registerURL(cmd)
	database.registerSchemas(cmd)
	return cmd
}

func printGrants(w io.Writer, schemas postgres.Schemas, database, role string, parts []string) {
	printed := map[string]bool{}
	for _, part := range postgres.Parts() {
		if !slices.Contains(parts, part) {
			continue
		}
		headed := false
		for _, right := range postgres.Rights() {
			statement := right.Grant(schemas, database, role)
			if right.Part != part || printed[statement] {
				continue
			}
			printed[statement] = true
			if !headed {
				_, _ = fmt.Fprintf(w, "-- %s\n", part)
				headed = true
			}
			why := right.Why
			if right.Optional {
				why += " (optional)"
			}
			_, _ = fmt.Fprintf(w, "%s -- %s\n", statement, why)
		}
	}
}

func newAttach() *cobra.Command {
	var database databaseFlags
	var backfill, dryRun bool
	cmd := &cobra.Command{
		Use:   "attach",
		Short: "Install dlqd in a database where an application runs River",
		Long: "Attach creates dlqd's schema beside River's tables, and two triggers on river_job. From then on dlqd " +
			"captures\n" +
			"every job that fails for good. The application needs no change, and dlqd redelivers nothing automatically until\n" +
			"an operator switches that on. Run attach again after an upgrade of dlqd. It needs no superuser: \"dlqd grants\"\n" +
			"lists the privileges.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if database.url == "" {
				return &usageError{errors.New("--database-url (or its file, DLQD_DATABASE_URL or DATABASE_URL) must name the " +
					"application's database")}
			}
			return database.withMigrator(cmd, func(m *postgres.Migrator) error {
				plan, err := m.Plan(cmd.Context())
				if err != nil {
					return err
				}
				out := cmd.OutOrStdout()
				if err := plan.Err(); err != nil {
					printMissing(out, plan)
					return fmt.Errorf("cannot attach: %w", err)
				}
				if len(plan.Create)+len(plan.Upgrade) == 0 {
					_, _ = fmt.Fprintln(out, "dlqd is already attached; nothing to create")
				}
				for _, item := range plan.Upgrade {
					_, _ = fmt.Fprintln(out, "upgrade", item)
				}
				for _, item := range plan.Create {
					_, _ = fmt.Fprintln(out, "create", item)
				}
				printMissing(out, plan)
				found := printSurvey(cmd, m)
				if dryRun {
					if backfill && found != nil {
						_, _ = fmt.Fprintf(out, "backfill would record %s jobs that failed before\n",
							atLeast(found.Failures.Count, found.Failures.More))
					}
					return nil
				}
				if err := m.Attach(cmd.Context()); err != nil {
					return err
				}
				_, _ = fmt.Fprintln(out, "attached")
				next := doctor.Next{Schemas: m.Schemas, Found: found}
				if backfill {
					n, err := m.Backfill(cmd.Context(), func(total int) { _, _ = fmt.Fprintf(out, "backfill: %d jobs\n", total) })
					_, _ = fmt.Fprintf(out, "backfill: recorded %d jobs that had failed before\n", n)
					if err != nil {
						return err
					}
					next.Backfilled = &n
				}
				status, err := m.Status(cmd.Context())
				if err != nil {
					return err
				}
				next.Observes = status.Attached
				return next.Print(out)
			})
		},
	}
	database.register(cmd)
	cmd.Flags().BoolVar(&backfill, "backfill", false, "also record jobs that failed before and that River still has; "+
		"they wait for an operator")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only show what would be created or upgraded, and which privileges are "+
		"missing")
	return cmd
}

func atLeast(n int, more bool) string {
	if more {
		return fmt.Sprintf("%d or more", n)
	}
	return strconv.Itoa(n)
}

// printMissing prints the privileges that the role does not have and that only other parts than attach need.
func printMissing(w io.Writer, plan *postgres.Plan) {
	if len(plan.Later) > 0 {
		_, _ = fmt.Fprintf(w, "role %s lacks privileges for parts other than attach:\n", plan.Role)
	}
	for _, right := range plan.Later {
		part := right.Part
		if right.Optional {
			part += ", optional"
		}
		_, _ = fmt.Fprintf(w, "  %s -- %s: to %s\n", right.GrantSQL, part, right.Why)
	}
}

// printSurvey prints a survey of River's jobs and returns it. If the survey fails, printSurvey prints the error and
// does not return it, because attach works without the survey.
func printSurvey(cmd *cobra.Command, m *postgres.Migrator) *doctor.Survey {
	found, err := doctor.TakeSurvey(cmd.Context(), m.Pool, m.Schemas)
	if err == nil {
		err = found.Print(cmd.OutOrStdout())
	}
	if err != nil {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "dlqd:", err)
	}
	return found
}

func newDetach() *cobra.Command {
	var database databaseFlags
	var dropData bool
	cmd := &cobra.Command{
		Use:   "detach",
		Short: "Remove dlqd from a database",
		Long: "Detach removes dlqd's triggers, functions and views. Its tables and the dead letters in them stay, unless\n" +
			"--drop-data is given. Detach finds the installation in the database's catalog; if there are several, --schema or\n" +
			"--river-schema selects one. It lists each object that stays, with the command that removes it. A running\n" +
			"\"dlqd serve\" becomes unready and idle.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if database.url == "" {
				return &usageError{errors.New("--database-url (or its file, DLQD_DATABASE_URL or DATABASE_URL) must name the " +
					"application's database")}
			}
			return database.withMigrator(cmd, func(m *postgres.Migrator) error {
				out := cmd.OutOrStdout()
				found, err := m.Find(cmd.Context(), cmd.Flags().Changed("schema"), cmd.Flags().Changed("river-schema"))
				if err != nil {
					return err
				}
				if found == nil {
					_, _ = fmt.Fprintln(out, "no dlqd is attached to this database; nothing to remove")
					return nil
				}
				done, err := m.Detach(cmd.Context(), *found, dropData)
				if err != nil {
					return err
				}
				if len(done.Triggers) > 0 {
					_, _ = fmt.Fprintf(out, "detached from %s.river_job: dropped triggers %s, and the functions and views of "+
						"schema %s\n",
						done.River, strings.Join(done.Triggers, ", "), done.Schema)
				} else {
					_, _ = fmt.Fprintf(out, "River's table had no trigger; dropped the functions and views of schema %s\n",
						done.Schema)
				}
				if dropData {
					_, _ = fmt.Fprintln(out, "dropped its data")
				}
				if len(done.Roles) > 0 {
					_, _ = fmt.Fprintln(out, "dropped roles "+strings.Join(done.Roles, ", "))
				}
				for _, left := range done.Left {
					_, _ = fmt.Fprintln(out, "stays:", left.What)
					for _, how := range left.How {
						_, _ = fmt.Fprintln(out, "  to remove: "+how)
					}
				}
				return nil
			})
		},
	}
	database.register(cmd)
	cmd.Flags().BoolVar(&dropData, "drop-data", false, "also drop dlqd's tables with all dead letters, and the roles "+
		"that dlqd created")
	return cmd
}
