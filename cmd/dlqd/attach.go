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

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/survey"
)

func newGrants() *cobra.Command {
	var database databaseFlags
	var role string
	var parts []string
	cmd := &cobra.Command{
		Use:   "grants",
		Short: "Print the rights that dlqd needs on an application's database, as GRANT statements",
		Long: "Grants prints what somebody who owns River's tables runs once, so that dlqd can work as a plain role. It asks no database;\n" +
			"--database-url is for the database's name alone. \"dlqd attach --dry-run\" and \"dlqd doctor\" say which of them are missing.",
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
					return &usageError{fmt.Errorf("--part %s: there is no such part (there are: %s)", part, strings.Join(postgres.Parts(), ", "))}
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
	cmd.Flags().StringVar(&role, "role", "dlqd", "the role that dlqd logs in as")
	cmd.Flags().StringSliceVar(&parts, "part", nil, "only for these parts: "+strings.Join(postgres.Parts(), ", "))
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
		Short: "Put dlqd on a database where an application runs River",
		Long: "Attach creates dlqd's schema beside River's tables, and two triggers on river_job. From then on every job that\n" +
			"ends as a failure is captured; the application needs no change, and nothing is sent back by itself until somebody\n" +
			"says so. Run it again after an upgrade of dlqd. It needs no superuser: \"dlqd grants\" lists the rights.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if database.url == "" {
				return &usageError{errors.New("--database-url (or its file, DLQD_DATABASE_URL or DATABASE_URL) must name the application's database")}
			}
			return database.withMigrator(cmd, func(m *postgres.Migrator) error {
				plan, err := m.Plan(cmd.Context())
				if err != nil {
					return err
				}
				out := cmd.OutOrStdout()
				if err := plan.Err(); err != nil {
					printLater(out, plan)
					return fmt.Errorf("attach is refused: %w", err)
				}
				if len(plan.Create) == 0 {
					_, _ = fmt.Fprintln(out, "dlqd is attached already; nothing to create")
				}
				for _, item := range plan.Create {
					_, _ = fmt.Fprintln(out, "create", item)
				}
				printLater(out, plan)
				found := lookOver(cmd, m)
				if dryRun {
					if backfill && found != nil {
						_, _ = fmt.Fprintf(out, "backfill would take in %s jobs that failed before\n", atLeast(found.Failures.Count, found.Failures.More))
					}
					return nil
				}
				if err := m.Attach(cmd.Context()); err != nil {
					return err
				}
				_, _ = fmt.Fprintln(out, "attached")
				next := survey.Next{Schemas: m.Schemas, Found: found}
				if backfill {
					n, err := m.Backfill(cmd.Context(), func(total int) { _, _ = fmt.Fprintf(out, "backfill: %d jobs\n", total) })
					_, _ = fmt.Fprintf(out, "backfill: took in %d jobs that had failed before\n", n)
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
	cmd.Flags().BoolVar(&backfill, "backfill", false, "also take in jobs that failed before and that River still keeps; they wait for a person")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would be created, and which rights are missing")
	return cmd
}

func atLeast(n int, more bool) string {
	if more {
		return fmt.Sprintf("%d or more", n)
	}
	return strconv.Itoa(n)
}

// printLater prints the rights that the role lacks for parts other than attach.
func printLater(w io.Writer, plan *postgres.Plan) {
	if len(plan.Later) > 0 {
		_, _ = fmt.Fprintf(w, "role %s lacks rights that other parts than attach need:\n", plan.Role)
	}
	for _, right := range plan.Later {
		part := right.Part
		if right.Optional {
			part += ", optional"
		}
		_, _ = fmt.Fprintf(w, "  %s -- %s: to %s\n", right.GrantSQL, part, right.Why)
	}
}

// lookOver prints and returns a survey of River's jobs. An error is only printed: attach works
// without the survey.
func lookOver(cmd *cobra.Command, m *postgres.Migrator) *survey.Survey {
	found, err := survey.Run(cmd.Context(), m.Pool, m.Schemas)
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
		Short: "Take dlqd out of a database again",
		Long: "Detach removes dlqd's triggers, functions and views. Its tables stay, with the dead letters in them, unless --drop-data.\n" +
			"It finds what is attached by the database's catalog; --schema or --river-schema say which, where there are several.\n" +
			"What it leaves, it says, with the command that removes it. A dlqd that serves meanwhile becomes unready and idle.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if database.url == "" {
				return &usageError{errors.New("--database-url (or its file, DLQD_DATABASE_URL or DATABASE_URL) must name the application's database")}
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
					_, _ = fmt.Fprintf(out, "detached from %s.river_job: triggers %s are gone, and the functions and views of schema %s\n", done.River, strings.Join(done.Triggers, ", "), done.Schema)
				} else {
					_, _ = fmt.Fprintf(out, "no trigger was on River's table; the functions and views of schema %s are gone\n", done.Schema)
				}
				if dropData {
					_, _ = fmt.Fprintln(out, "its data is gone")
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
	cmd.Flags().BoolVar(&dropData, "drop-data", false, "also drop dlqd's tables, all dead letters in them, and the roles that it made")
	return cmd
}
