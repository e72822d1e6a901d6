package main

import (
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/savedview"
)

func newViews() *cobra.Command {
	cmd := &cobra.Command{
		Use: "views", Short: "List saved views; save and delete them (\"dlqd list --view\" shows one)", Args: cobra.NoArgs,
	}
	var c client
	list := &cobra.Command{
		Use: "list", Short: "List your saved views, and those that others share", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var out struct {
				Views []savedview.SavedView `json:"views"`
			}
			if err := c.call(cmd, http.MethodGet, api.ViewsPath+"?"+url.Values{"actor": {actor()}}.Encode(), nil,
				&out); err != nil || c.asJSON {
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
	addDefaultList(cmd, list, &c)
	cmd.AddCommand(newSaveView(), newDeleteView())
	return cmd
}

// viewPath returns the API's path of a view of the current user.
func viewPath(name string, query url.Values) string {
	query.Set("actor", actor())
	return api.ViewsPath + "/" + url.PathEscape(name) + "?" + query.Encode()
}

func newSaveView() *cobra.Command {
	var c client
	var in api.ViewBody
	cmd := &cobra.Command{
		Use: "save NAME QUERY", Short: "Save a filter under a name, or change a saved view", Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			in.Query, in.Actor = args[1], actor()
			var v savedview.SavedView
			if err := c.call(cmd, http.MethodPut, api.ViewsPath+"/"+url.PathEscape(args[0]), in, &v); err != nil || c.asJSON {
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
			query := url.Values{}
			if owner != "" {
				query.Set("owner", owner)
			}
			_, err := c.raw(cmd, http.MethodDelete, viewPath(args[0], query), nil)
			return err
		},
	}
	c.registerURL(cmd)
	cmd.Flags().StringVar(&owner, "owner", "", "owner of a shared view to delete (admins only)")
	return cmd
}

// applyView copies the filter and order of a saved view to the query of a list.
func (c *client) applyView(cmd *cobra.Command, name string, query url.Values) error {
	var v savedview.SavedView
	plain := *c
	plain.asJSON = false
	if err := plain.call(cmd, http.MethodGet, viewPath(name, url.Values{}), nil, &v); err != nil {
		return err
	}
	query.Set("q", v.Query)
	if v.Order != "" {
		query.Set("order", v.Order)
	}
	return nil
}
