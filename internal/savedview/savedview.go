// Package savedview stores named lists of dead letters. Users see their own views and those that
// others share.
package savedview

import (
	"context"
	"time"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/savedview/internal/dbsqlc"
)

// SavedView is a named filter of dead letters, with its columns and order.
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

// Store reads and writes saved views.
type Store struct {
	Store *deadletter.Store
}

// List returns the views of actor, then those that others share.
func (s *Store) List(ctx context.Context, actor string) ([]SavedView, error) {
	rows, err := dbsqlc.New(s.Store.DB()).Views(ctx, actor)
	views := make([]SavedView, len(rows))
	for i, r := range rows {
		views[i] = SavedView{
			Name: r.Name, Owner: r.Owner, Query: r.Query, Columns: r.Columns, Order: r.Sort,
			Shared: r.Shared, CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt,
		}
	}
	return views, deadletter.AsMoveError(err)
}

// Get returns the view of a name that actor owns, or else one that others share.
func (s *Store) Get(ctx context.Context, name, actor string) (*SavedView, error) {
	views, err := s.List(ctx, actor)
	if err != nil {
		return nil, err
	}
	for i := range views {
		if views[i].Name == name {
			return &views[i], nil
		}
	}
	return nil, &deadletter.MoveError{Kind: deadletter.ErrNotFound, Detail: "saved view " + name + ": not found"}
}

// Save creates or replaces actor's view of a name. It reads Name, Query, Columns, Order and Shared
// of v.
func (s *Store) Save(ctx context.Context, v *SavedView, actor string) error {
	columns := v.Columns
	if columns == nil {
		columns = []string{}
	}
	return deadletter.AsMoveError(s.Store.InTx(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).Save(ctx, dbsqlc.SaveParams{
			Name: v.Name, Query: v.Query, Columns: columns, Sort: v.Order, Shared: v.Shared, Actor: actor,
		})
	}))
}

// Delete deletes a view of actor or, if owner is not "", one that owner shares. The latter needs
// the role admin.
func (s *Store) Delete(ctx context.Context, name, owner, actor string) error {
	return deadletter.AsMoveError(s.Store.InTx(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).Delete(ctx, dbsqlc.DeleteParams{Name: name, Owner: owner, Actor: actor})
	}))
}
