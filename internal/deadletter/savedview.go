package deadletter

import (
	"context"
	"time"

	"github.com/dlqd/dlqd/internal/deadletter/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// SavedView is a named filter of dead letters, with the columns and the order of the list. Users see their own views
// and the views that others share.
type SavedView struct {
	Name      string    `json:"name" doc:"Name of the view." example:"bank outages"`
	Owner     string    `json:"owner" doc:"Owner of the view." example:"kim"`
	Query     string    `json:"query" doc:"Filter as text: the q of GET /api/dlq/entries." example:"status:manual queue:payments"`
	Columns   []string  `json:"columns" doc:"Columns of the list, in order; empty for the default columns."`
	Order     string    `json:"order,omitempty" doc:"Order of the list; absent for the default order."`
	Shared    bool      `json:"shared" doc:"Whether other users see the view."`
	CreatedAt time.Time `json:"createdAt" doc:"When the view was created."`
	UpdatedAt time.Time `json:"updatedAt" doc:"When the view was last changed."`
}

// SavedViews returns the views of actor and the views that others share, in the order that [Store.OrderViews] sets.
func (s *Store) SavedViews(ctx context.Context, actor string) ([]SavedView, error) {
	rows, err := dbsqlc.New(s.DB()).Views(ctx, actor)
	views := make([]SavedView, len(rows))
	for i, r := range rows {
		views[i] = SavedView(r)
	}
	return views, AsMoveError(err)
}

// SavedView returns actor's view with a name or, if there is none, a shared one. It fails with [ErrNotFound] if there
// is neither.
func (s *Store) SavedView(ctx context.Context, name, actor string) (*SavedView, error) {
	views, err := s.SavedViews(ctx, actor)
	if err != nil {
		return nil, err
	}
	// The order of the views says nothing about the owner: a shared view with a place comes before actor's views.
	var shared *SavedView
	for i := range views {
		switch v := &views[i]; {
		case v.Name != name:
		case v.Owner == actor:
			return v, nil
		case shared == nil:
			shared = v
		}
	}
	if shared == nil {
		return nil, &MoveError{Kind: ErrNotFound, Detail: "saved view " + name + ": not found"}
	}
	return shared, nil
}

// SaveView creates or replaces actor's view with the name v.Name. It reads only Name, Query, Columns, Order and Shared
// of v.
func (s *Store) SaveView(ctx context.Context, v *SavedView, actor string) error {
	columns := v.Columns
	if columns == nil {
		columns = []string{}
	}
	return AsMoveError(s.InTx(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).SaveView(ctx, dbsqlc.SaveViewParams{
			Name: v.Name, Query: v.Query, Columns: columns, Sort: v.Order, Shared: v.Shared, Actor: actor,
		})
	}))
}

// DeleteView deletes a view of actor or, if owner is not "", a view that owner shares. To delete another user's view,
// actor needs the role admin.
func (s *Store) DeleteView(ctx context.Context, name, owner, actor string) error {
	return AsMoveError(s.InTx(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).DeleteView(ctx, dbsqlc.DeleteViewParams{Name: name, Owner: owner, Actor: actor})
	}))
}

// OrderViews puts the views that actor sees in the order of names. Views that names does not list come last.
func (s *Store) OrderViews(ctx context.Context, names []string, actor string) error {
	if names == nil {
		names = []string{}
	}
	return AsMoveError(s.InTx(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).OrderViews(ctx, dbsqlc.OrderViewsParams{Names: names, Actor: actor})
	}))
}
