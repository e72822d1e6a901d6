package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/survey"
)

func newMigrate() *cobra.Command {
	cmd := &cobra.Command{Use: "migrate", Short: "Bring the database's schema up to date, or take it back"}
	sub := func(use, short string, run func(cmd *cobra.Command, m *postgres.Migrator) error) {
		var database databaseFlags
		c := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			return database.withMigrator(cmd.Context(), func(m *postgres.Migrator) error { return run(cmd, m) })
		}}
		database.register(c)
		if use == "up" {
			c.Flags().BoolVar(&database.ownRiver, "own-river", false, "the River that is there already is dlqd's own, and no application's")
		}
		cmd.AddCommand(c)
	}
	sub("up", "Apply River's migrations and dlqd's", func(cmd *cobra.Command, m *postgres.Migrator) error {
		if err := m.Up(cmd.Context()); err != nil {
			return err
		}
		return printStatus(cmd, m)
	})
	sub("down", "Take back dlqd's last migration; River's too, once none of dlqd's is left", func(cmd *cobra.Command, m *postgres.Migrator) error {
		if err := m.Down(cmd.Context()); err != nil {
			return err
		}
		return printStatus(cmd, m)
	})
	sub("status", "Say where the schema stands", printStatus)
	return cmd
}

func printStatus(cmd *cobra.Command, m *postgres.Migrator) error {
	s, err := m.Status(cmd.Context())
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	_, _ = fmt.Fprintf(out, "River (schema %s): version %d of %d\n", m.Schemas.River, s.RiverVersion, s.RiverLatest)
	_, _ = fmt.Fprintf(out, "dlqd (schema %s): version %d of %d; functions and triggers current: %t\n", m.Schemas.DLQ, s.Version, s.Latest, s.CodeInstalled)
	if s.Attached {
		_, _ = fmt.Fprintln(out, "attached: River belongs to another application")
	}
	if s.Current() {
		_, _ = fmt.Fprintln(out, "up to date")
	}
	return nil
}

func newAttach() *cobra.Command {
	var database databaseFlags
	var backfill, dryRun bool
	cmd := &cobra.Command{
		Use:   "attach",
		Short: "Put dlqd on a database where an application runs River",
		Long: "Attach creates dlqd's schema beside River's tables, and two triggers on river_job. From then on every job that\n" +
			"ends as a failure is captured; the application needs no change. Run it again after an upgrade of dlqd.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if database.url == "" {
				return &usageError{errors.New("--database-url (or DATABASE_URL) must name the application's database")}
			}
			return database.withMigrator(cmd.Context(), func(m *postgres.Migrator) error {
				out := cmd.OutOrStdout()
				plan, err := m.Plan(cmd.Context())
				if err != nil {
					return err
				}
				if len(plan) == 0 {
					_, _ = fmt.Fprintln(out, "dlqd is attached already; nothing to create")
				}
				for _, item := range plan {
					_, _ = fmt.Fprintln(out, "create", item)
				}
				found := lookOver(cmd, m)
				if dryRun {
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
	cmd.Flags().BoolVar(&backfill, "backfill", false, "also take in jobs that failed before and that River still keeps")
	cmd.Flags().BoolVar(&dryRun, "dry-run", false, "only say what would be created")
	return cmd
}

// lookOver says what jobs River keeps, and returns it. Where that cannot be looked at, dlqd can be attached all the same.
func lookOver(cmd *cobra.Command, m *postgres.Migrator) *survey.Survey {
	found, err := survey.Look(cmd.Context(), m.Pool, m.Schemas)
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
		Long:  "Detach removes dlqd's triggers, functions and views. Its tables stay, with the dead letters in them, unless --drop-data.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if database.url == "" {
				return &usageError{errors.New("--database-url (or DATABASE_URL) must name the application's database")}
			}
			return database.withMigrator(cmd.Context(), func(m *postgres.Migrator) error {
				if err := m.Detach(cmd.Context(), dropData); err != nil {
					return err
				}
				left := "its tables stay in schema " + m.Schemas.DLQ
				if dropData {
					left = "its data is gone"
				}
				_, _ = fmt.Fprintln(cmd.OutOrStdout(), "detached;", left)
				return nil
			})
		},
	}
	database.register(cmd)
	cmd.Flags().BoolVar(&dropData, "drop-data", false, "also drop dlqd's tables and all dead letters in them")
	return cmd
}

func newPsql() *cobra.Command {
	var database databaseFlags
	cmd := &cobra.Command{
		Use:   "psql [flags] [-- psql's arguments]",
		Short: "Open psql on the database",
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := database.schemas.Validate(); err != nil {
				return &usageError{err}
			}
			psql, err := findPsql(cmd, database.postgresBin)
			if err != nil {
				return err
			}
			url, stop, err := database.reach(cmd.Context(), newLogger(nil))
			if err != nil {
				return err
			}
			// Ctrl-C in psql cancels a query; it is not for us.
			child := exec.Command(psql, append([]string{"--dbname", url}, args...)...) //nolint:gosec,noctx // psql, as asked
			child.Env = append(os.Environ(), "PGOPTIONS=-c search_path="+database.schemas.DLQ+","+database.schemas.River)
			child.Stdin, child.Stdout, child.Stderr = os.Stdin, cmd.OutOrStdout(), cmd.ErrOrStderr()
			return errors.Join(child.Run(), stop())
		},
	}
	database.register(cmd)
	return cmd
}

func findPsql(cmd *cobra.Command, bin string) (string, error) {
	if bin == "" {
		if path, err := exec.LookPath("psql"); err == nil {
			return path, nil
		}
	}
	binaries, err := postgres.FindBinaries(cmd.Context(), bin, 0)
	if err != nil {
		return "", err
	}
	path := filepath.Join(binaries.Dir, "psql")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("no psql on PATH or in %s: install a Postgres client", binaries.Dir)
	}
	return path, nil
}

func newOpenAPI() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "openapi",
		Short: "Print the API's OpenAPI document",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			yaml, json, err := api.OpenAPI()
			if err != nil {
				return err
			}
			if asJSON {
				yaml = json
			}
			_, err = cmd.OutOrStdout().Write(yaml)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON instead of YAML")
	return cmd
}
