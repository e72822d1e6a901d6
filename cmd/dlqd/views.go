package main

import (
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
)

func newViews() *cobra.Command {
	cmd := &cobra.Command{
		Use: "views", Short: "List saved views; save and delete them (\"dlqd list --view\" shows one)", Args: cobra.NoArgs,
	}
	var c client
	list := &cobra.Command{
		Use: "list", Short: "List your saved views, and those that others share", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.ListViews, api.ViewsInput{Actor: actor()})
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "NAME\tQUERY\tOWNER\tSHARED\tORDER\tCOLUMNS")
			for _, v := range out.Views {
				row(v.Name, v.Query, v.Owner, map[bool]string{true: "yes", false: "no"}[v.Shared], v.Order,
					strings.Join(v.Columns, ","))
			}
			return w.Flush()
		},
	}
	addDefaultList(cmd, list, &c, "views", "name")
	cmd.AddCommand(newSaveView(), newDeleteView())
	return cmd
}

// getViewInput returns the input that asks for the current user's view called name.
func getViewInput(name string) api.GetViewInput {
	return api.GetViewInput{ViewInput: api.ViewInput{Name: name}, Actor: actor()}
}

func newSaveView() *cobra.Command {
	var c client
	var in api.ViewBody
	cmd := &cobra.Command{
		Use: "save NAME QUERY", Short: "Save a filter under a name, or change a saved view", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Query, in.Actor = args[1], actor()
			v, err := call(cmd, &c, api.SaveView, api.SaveViewInput{ViewInput: api.ViewInput{Name: args[0]}, Body: in})
			if err != nil || c.asJSON {
				return err
			}
			printSafef(cmd.OutOrStdout(), "saved: dlqd list --view '%s'\n", v.Name)
			return nil
		},
	}
	c.register(cmd)
	cmd.Flags().StringSliceVar(&in.Columns, "columns", nil, "columns that the console shows, in this order")
	cmd.Flags().StringVar(&in.Order, "order", "", "newest or oldest, for which entries come first")
	cmd.Flags().BoolVar(&in.Shared, "shared", false, "other users see the view too")
	return cmd
}

func newDeleteView() *cobra.Command {
	var c client
	var owner string
	cmd := &cobra.Command{
		Use: "delete NAME", Short: "Delete a saved view", Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := call(cmd, &c, api.DeleteView, api.DeleteViewInput{
				ViewInput: api.ViewInput{Name: args[0]}, Owner: owner, Actor: actor(),
			})
			return err
		},
	}
	c.registerURL(cmd)
	cmd.Flags().StringVar(&owner, "owner", "", "owner of a shared view to delete (admins only)")
	return cmd
}
