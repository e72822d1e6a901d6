package main

import (
	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

func newSessions() *cobra.Command {
	cmd := &cobra.Command{Use: "sessions", Short: "List and end browser sessions", Args: cobra.NoArgs}
	var c client
	var name string
	list := &cobra.Command{
		Use: "list", Short: "List your sessions or, as an admin, those of all users, newest first", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.ListSessions, api.SessionsInput{Name: name})
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "ID\tNAME\tBY\tFROM\tSIGNED IN\tSEEN\tUNTIL\tBROWSER")
			for _, s := range out.Sessions {
				row(s.ID, s.Name, s.Via, s.Address, stamp(s.CreatedAt), ago(s.SeenAt), stamp(s.ExpiresAt), s.Agent)
			}
			return w.Flush()
		},
	}
	addDefaultList(cmd, list, &c, "sessions", "id")
	for _, f := range []*cobra.Command{cmd, list} {
		f.Flags().StringVar(&name, "name", "", "only sessions of this user")
	}
	cmd.AddCommand(newSessionsEnd(), newSessionsEndAll())
	return cmd
}

func newSessionsEnd() *cobra.Command {
	var c client
	var note string
	cmd := &cobra.Command{
		Use: "end ID", Short: "End a session; every process rejects it within five seconds", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := call(cmd, &c, api.EndSession, api.EndSessionInput{ID: args[0], Note: note})
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "session %s has ended\n", args[0])
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&note, "note", "", "reason")
	return cmd
}

func newSessionsEndAll() *cobra.Command {
	var c client
	var in api.EndSessions
	cmd := &cobra.Command{
		Use: "end-all", Short: "End all your sessions or, as an admin, those of another user", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.EndAllSessions, api.EndAllSessionsInput{Body: &in})
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "%d sessions have ended\n", out.Ended)
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringVar(&in.Name, "name", "", "user whose sessions end (admins only); yourself if empty")
	cmd.Flags().StringVar(&in.Note, "note", "", "reason")
	return cmd
}
