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
		Short: "Create, list, rotate and revoke API tokens",
		Long: "A token identifies a caller of the API and gives it a role, in the queues and for the kinds that match. A " +
			"token is\n" +
			"shown once, when it is created; the database stores a hash. These commands connect to the database, so they need\n" +
			"no token: a role that may write dlqd's tables creates the first token, and can create one when every other\n" +
			"sign-in fails. The policy enables tokens (access.yaml: authentication: [tokens]).",
	}
	cmd.AddCommand(newTokensCreate(), newTokensList(), newTokensRevoke(), newTokensRotate())
	return cmd
}

// tokenCommand returns a command that calls run with the tokens of a database.
func tokenCommand(use, short string, args cobra.PositionalArgs, run func(cmd *cobra.Command, tokens *access.Store,
	args []string) error,
) *cobra.Command {
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
	const short = "Create a token and print it; it cannot be shown again"
	cmd := tokenCommand("create", short, cobra.NoArgs, func(cmd *cobra.Command, tokens *access.Store, _ []string) error {
		if token.Name == "" || role == "" {
			return &usageError{errors.New("--name and --role are required")}
		}
		for flag, patterns := range map[string][]string{"queue": token.Queues, "kind": token.Kinds, "source": token.Sources} {
			if cmd.Flags().Changed(flag) && len(patterns) == 0 { // an empty variable in a script, for example
				return &usageError{fmt.Errorf("--%s is empty: omit it to allow every %s", flag, flag)}
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
	flags.StringVar(&token.Name, "name", "", "name of the holder, recorded as the actor in the audit trail")
	flags.StringVar(&role, "role", "", "reader, operator, admin, sender (submits messages) or metrics (reads metrics "+
		"and health)")
	flags.StringSliceVar(&token.Queues, "queue", nil, "limit to queues that match; * matches any text; repeatable")
	flags.StringSliceVar(&token.Kinds, "kind", nil, "limit to kinds that match; repeatable")
	flags.StringSliceVar(&token.Sources, "source", nil, "limit a sender to sources that match; repeatable")
	flags.DurationVar(&life, "expires", defaultTokenLife, "lifetime; 0 means that it does not expire")
	flags.StringVar(&token.Note, "note", "", "purpose of the token")
	flags.StringVar(&by, "actor", actor(), "name recorded as the actor")
	return cmd
}

func expiry(life time.Duration) (*time.Time, error) {
	if life < 0 {
		return nil, &usageError{errors.New("--expires: must not be negative; 0 means that the token does not expire")}
	}
	if life == 0 {
		return nil, nil //nolint:nilnil // it never expires
	}
	at := time.Now().Add(life)
	return &at, nil
}

// printSecret prints the token's secret on standard output, which can become a file or a variable. It prints a
// description of the token on standard error.
func printSecret(cmd *cobra.Command, token *access.Token, secret string) error {
	expires := "does not expire"
	if token.ExpiresAt != nil {
		expires = "expires " + token.ExpiresAt.Format(time.RFC3339)
	}
	_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "token %s of %s, %s %s, %s; it cannot be shown again\n",
		token.ID, printable(token.Name), token.Role, printable(scopeText(token)), expires)
	_, err := fmt.Fprintln(cmd.OutOrStdout(), secret)
	return err
}

func newTokensList() *cobra.Command {
	var asJSON bool
	cmd := tokenCommand("list", "List tokens, including expired and revoked ones", cobra.NoArgs,
		func(cmd *cobra.Command, tokens *access.Store, _ []string) error {
			all, err := tokens.List(cmd.Context())
			if err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(all)
			}
			w, row := table(cmd, "ID\tNAME\tROLE\tSCOPE\tSTATE\tEXPIRES\tUSED\tNOTE")
			for _, t := range all {
				expires, used := "never", "never"
				if t.ExpiresAt != nil {
					expires = t.ExpiresAt.Format(time.RFC3339)
				}
				if t.UsedAt != nil {
					used = ago(*t.UsedAt)
				}
				row(t.ID, t.Name, t.Role, scopeText(&t), t.State(time.Now()), expires, used, t.Note)
			}
			return w.Flush()
		})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// scopeText describes the scope of a token.
func scopeText(t *access.Token) string {
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
	cmd := tokenCommand("revoke ID", "Revoke a token; every process rejects it within five seconds", cobra.ExactArgs(1),
		func(cmd *cobra.Command, tokens *access.Store, args []string) error {
			if err := tokens.Revoke(cmd.Context(), args[0], by, note); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "token %s is revoked\n", args[0])
			return err
		})
	addActor(cmd, &by, &note)
	return cmd
}

func newTokensRotate() *cobra.Command {
	var by string
	var keep, life time.Duration
	cmd := tokenCommand("rotate ID", "Create a token that replaces another, which stays valid for a while",
		cobra.ExactArgs(1), func(cmd *cobra.Command, tokens *access.Store, args []string) error {
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
	cmd.Flags().DurationVar(&keep, "keep", time.Hour, "how long the old token stays valid")
	cmd.Flags().DurationVar(&life, "expires", defaultTokenLife, "lifetime of the new token; 0 means that it does "+
		"not expire")
	cmd.Flags().StringVar(&by, "actor", actor(), "name recorded as the actor")
	return cmd
}
