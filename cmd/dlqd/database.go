package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/postgres"
)

func newMigrate() *cobra.Command {
	cmd := &cobra.Command{Use: "migrate", Short: "Apply or revert migrations of the database's schema"}
	var to int64
	sub := func(use, short string, run func(cmd *cobra.Command, m *postgres.Migrator) error) {
		var database databaseFlags
		c := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
			return database.withMigrator(cmd, func(m *postgres.Migrator) error { return run(cmd, m) })
		}}
		database.register(c)
		if use == "up" {
			database.createDataDir = true
			c.Flags().BoolVar(&database.ownRiver, "own-river", false, "the existing River tables belong to dlqd, not to an "+
				"application")
		}
		if use == "down" {
			c.Flags().Int64Var(&to, "to", 0, "version that the schema has afterwards, such as the one of an older dlqd "+
				"(\"dlqd version\" prints it)")
		}
		cmd.AddCommand(c)
	}
	sub("up", "Apply River's migrations and dlqd's", func(cmd *cobra.Command, m *postgres.Migrator) error {
		if err := m.Up(cmd.Context()); err != nil {
			return err
		}
		return printStatus(cmd, m)
	})
	sub("down", "Revert dlqd's last migration, or those after a version; River's tables stay",
		func(cmd *cobra.Command, m *postgres.Migrator) error {
			down := m.Down
			if cmd.Flags().Changed("to") {
				if to < 1 {
					return &usageError{fmt.Errorf("--to %d: must be at least 1, the first version", to)}
				}
				down = func(ctx context.Context) error { return m.DownTo(ctx, to) }
			}
			if err := down(cmd.Context()); err != nil {
				return err
			}
			return printStatus(cmd, m)
		})
	sub("status", "Show the schema's version", printStatus)
	return cmd
}

func printStatus(cmd *cobra.Command, m *postgres.Migrator) error {
	s, err := m.Status(cmd.Context())
	if err != nil {
		return err
	}
	where, err := m.Where(cmd.Context())
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	_, _ = fmt.Fprintf(out, "database %s\n", where)
	_, _ = fmt.Fprintf(out, "River (schema %s): version %d of %d\n", m.Schemas.River, s.RiverVersion, s.RiverLatest)
	if s.Newer() {
		_, _ = fmt.Fprintf(out, "dlqd (schema %s): version %d, installed by dlqd %s; this dlqd is for version %d; programs for "+
			"version %d or newer work on it\n", m.Schemas.DLQ, s.Version, s.Program, s.Latest, s.Oldest)
	} else {
		_, _ = fmt.Fprintf(out, "dlqd (schema %s): version %d of %d; functions and triggers current: %t\n", m.Schemas.DLQ,
			s.Version, s.Latest, s.CodeInstalled)
	}
	if s.Attached {
		_, _ = fmt.Fprintln(out, "attached: River belongs to another application")
	}
	if s.Current() {
		_, _ = fmt.Fprintln(out, "up to date")
	}
	return nil
}

func newPsql() *cobra.Command {
	database := databaseFlags{allowedWithURL: []string{"postgres-bin"}}
	cmd := &cobra.Command{
		Use:                "psql [flags] [psql's arguments]",
		Short:              "Open psql on the database",
		Long:               "Arguments that are not flags of this command go to psql. All arguments after -- go to psql.",
		Example:            "  dlqd psql -c 'SELECT * FROM dlq.backlog'",
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			own, args := splitPsqlArguments(cmd.Flags(), args)
			if slices.Contains(own, "--help") {
				return cmd.Help()
			}
			if err := cmd.Flags().Parse(own); err != nil {
				return &usageError{err}
			}
			if err := database.check(cmd); err != nil {
				return err
			}
			psql, err := findPsql(cmd, database.postgresBin)
			if err != nil {
				return err
			}
			url, stop, err := database.ensureRunning(cmd.Context(), newLogger(nil))
			if err != nil {
				return err
			}
			// psql runs without cmd's context: in psql, Ctrl-C cancels a query, and must not end psql.
			url, password, err := postgres.ForPsql(url)
			if err != nil {
				return errors.Join(err, stop())
			}
			child := exec.Command(psql, append([]string{"--dbname", url}, args...)...) //nolint:gosec,noctx // psql, as asked
			child.Env = os.Environ()
			if password != "" { // not as an argument: other users of this machine can read the arguments
				child.Env = append(child.Env, "PGPASSWORD="+password)
			}
			child.Env = append(child.Env, "PGOPTIONS=-c search_path="+database.schemas.DLQ+","+database.schemas.River)
			child.Stdin, child.Stdout, child.Stderr = os.Stdin, cmd.OutOrStdout(), cmd.ErrOrStderr()
			err = child.Run()
			stopped := stop()
			if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.Exited() && stopped == nil {
				return &childError{exit.ExitCode()}
			}
			return errors.Join(err, stopped)
		},
	}
	database.register(cmd)
	return cmd
}

// psqlOptionsWithValue are psql's short options whose value is the next argument.
const psqlOptionsWithValue = "cdfvoFRPLThpU"

// splitPsqlArguments separates this command's own flags from the arguments of psql.
func splitPsqlArguments(flags *pflag.FlagSet, args []string) (own, psql []string) {
	for i := 0; i < len(args); i++ {
		arg := args[i]
		name, _, hasValue := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		takesNext := i+1 < len(args)
		switch {
		case arg == "--":
			return own, append(psql, args[i+1:]...)
		case arg == "--help":
			own = append(own, arg)
		case strings.HasPrefix(arg, "--") && flags.Lookup(name) != nil:
			own = append(own, arg)
			if !hasValue && takesNext {
				i++
				own = append(own, args[i])
			}
		default:
			psql = append(psql, arg)
			if len(arg) == 2 && arg[0] == '-' && strings.Contains(psqlOptionsWithValue, arg[1:]) && takesNext {
				i++
				psql = append(psql, args[i])
			}
		}
	}
	return own, psql
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
			document := api.OpenAPIYAML
			if asJSON {
				document = api.OpenAPI
			}
			raw, err := document()
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(raw)
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON instead of YAML")
	return cmd
}
