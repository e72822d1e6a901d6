package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/postgres"
)

// defaultTokenLife is the default lifetime of a token.
const defaultTokenLife = 90 * 24 * time.Hour

func newTokens() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "tokens",
		Short: "Make keys to the API, list and revoke them",
		Long: "A token says who calls the API, and what they may do: a role, in the queues and for the kinds that match. It is shown once, when it is made;\n" +
			"the database has a hash. These commands go to the database, so they need no token themselves: whoever may write dlqd's tables makes the first\n" +
			"one, and gets in where nothing else works. The policy says that tokens count (access.yaml: authentication: [tokens]).",
	}
	cmd.AddCommand(newTokensCreate(), newTokensList(), newTokensRevoke(), newTokensRotate())
	return cmd
}

// tokenCommand returns a command on the tokens of a database.
func tokenCommand(use, short string, args cobra.PositionalArgs, run func(cmd *cobra.Command, tokens *access.Store, args []string) error) *cobra.Command {
	var database databaseFlags
	cmd := &cobra.Command{Use: use, Short: short, Args: args, RunE: func(cmd *cobra.Command, args []string) error {
		return database.withMigrator(cmd, func(m *postgres.Migrator) error {
			if err := m.Check(cmd.Context()); err != nil {
				return err
			}
			return run(cmd, access.NewStore(m.Pool, m.Schemas), args)
		})
	}}
	database.register(cmd)
	return cmd
}

func newTokensCreate() *cobra.Command {
	var token access.Token
	var role, by string
	var life time.Duration
	cmd := tokenCommand("create", "Make a token, and print it: the only time that anybody sees it", cobra.NoArgs, func(cmd *cobra.Command, tokens *access.Store, _ []string) error {
		if token.Name == "" || role == "" {
			return &usageError{errors.New("a token is somebody's, and for something: --name and --role")}
		}
		for flag, patterns := range map[string][]string{"queue": token.Queues, "kind": token.Kinds, "source": token.Sources} {
			if cmd.Flags().Changed(flag) && len(patterns) == 0 { // for example an empty variable in a script
				return &usageError{fmt.Errorf("--%s is empty: leave it out for every %s", flag, flag)}
			}
		}
		var err error
		if token.ExpiresAt, err = expiry(life); err != nil {
			return err
		}
		token.Role = access.Role(role)
		secret, err := tokens.Create(cmd.Context(), &token, by)
		if err != nil {
			return err
		}
		return printSecret(cmd, &token, secret)
	})
	flags := cmd.Flags()
	flags.StringVar(&token.Name, "name", "", "who holds it: the actor in the audit trail")
	flags.StringVar(&role, "role", "", "reader, operator, admin, sender (submits messages) or metrics (reads metrics and health)")
	flags.StringSliceVar(&token.Queues, "queue", nil, "only in queues that match; * stands for any text; may be given again")
	flags.StringSliceVar(&token.Kinds, "kind", nil, "only for kinds that match; may be given again")
	flags.StringSliceVar(&token.Sources, "source", nil, "a sender submits only as sources that match; may be given again")
	flags.DurationVar(&life, "expires", defaultTokenLife, "how long it is good; 0 for ever")
	flags.StringVar(&token.Note, "note", "", "what it is for")
	flags.StringVar(&by, "actor", actor(), "who makes it")
	return cmd
}

func expiry(life time.Duration) (*time.Time, error) {
	if life < 0 {
		return nil, &usageError{errors.New("--expires: must not be negative; 0 is for ever")}
	}
	if life == 0 {
		return nil, nil //nolint:nilnil // never
	}
	at := time.Now().Add(life)
	return &at, nil
}

// printSecret prints the token on standard output, for files and variables, and its description on
// standard error.
func printSecret(cmd *cobra.Command, token *access.Token, secret string) error {
	until := "for ever"
	if token.ExpiresAt != nil {
		until = "until " + token.ExpiresAt.Format(time.RFC3339)
	}
	_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "token %s of %s, %s %s, %s; it is not shown again\n", token.ID, printable(token.Name), token.Role, printable(where(token)), until)
	_, err := fmt.Fprintln(cmd.OutOrStdout(), secret)
	return err
}

func newTokensList() *cobra.Command {
	var asJSON bool
	cmd := tokenCommand("list", "List tokens, those included that are good no more", cobra.NoArgs, func(cmd *cobra.Command, tokens *access.Store, _ []string) error {
		all, err := tokens.List(cmd.Context())
		if err != nil {
			return err
		}
		if asJSON {
			return json.NewEncoder(cmd.OutOrStdout()).Encode(all)
		}
		w, row := table(cmd, "ID\tNAME\tROLE\tWHERE\tSTATE\tEXPIRES\tUSED\tNOTE")
		for _, t := range all {
			expires, used := "never", "never"
			if t.ExpiresAt != nil {
				expires = t.ExpiresAt.Format(time.RFC3339)
			}
			if t.UsedAt != nil {
				used = ago(*t.UsedAt)
			}
			row(t.ID, t.Name, t.Role, where(&t), t.State(time.Now()), expires, used, t.Note)
		}
		return w.Flush()
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "as JSON")
	return cmd
}

// where describes the scope of a token.
func where(t *access.Token) string {
	var parts []string
	for _, limit := range []struct {
		name     string
		patterns []string
	}{{"queue", t.Queues}, {"kind", t.Kinds}, {"source", t.Sources}} {
		if len(limit.patterns) > 0 {
			parts = append(parts, limit.name+" "+strings.Join(limit.patterns, ", "))
		}
	}
	if len(parts) == 0 {
		return "everywhere"
	}
	return strings.Join(parts, "; ")
}

func newTokensRevoke() *cobra.Command {
	var by, note string
	cmd := tokenCommand("revoke ID", "Have a token refused, within five seconds by every process", cobra.ExactArgs(1), func(cmd *cobra.Command, tokens *access.Store, args []string) error {
		if err := tokens.Revoke(cmd.Context(), args[0], by, note); err != nil {
			return err
		}
		_, err := fmt.Fprintf(cmd.OutOrStdout(), "token %s is revoked\n", args[0])
		return err
	})
	cmd.Flags().StringVar(&by, "actor", actor(), "who does it")
	cmd.Flags().StringVar(&note, "note", "", "why")
	return cmd
}

func newTokensRotate() *cobra.Command {
	var by string
	var keep, life time.Duration
	cmd := tokenCommand("rotate ID", "Make a token in place of another one, which is good for a while longer", cobra.ExactArgs(1), func(cmd *cobra.Command, tokens *access.Store, args []string) error {
		until, err := expiry(life)
		if err != nil {
			return err
		}
		token, secret, err := tokens.Rotate(cmd.Context(), args[0], by, keep, until)
		if err != nil {
			return err
		}
		return printSecret(cmd, token, secret)
	})
	cmd.Flags().DurationVar(&keep, "keep", time.Hour, "how long the old one is good")
	cmd.Flags().DurationVar(&life, "expires", defaultTokenLife, "how long the new one is good; 0 for ever")
	cmd.Flags().StringVar(&by, "actor", actor(), "who does it")
	return cmd
}
