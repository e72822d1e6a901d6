package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
)

// ViewsPath is the path of saved views.
const ViewsPath = "/api/dlq/views"

// ViewInput names a saved view.
type ViewInput struct {
	Name string `path:"name" minLength:"1" maxLength:"100" doc:"Name of the view." example:"bank outages"`
}

// ViewBody is the content of a saved view.
type ViewBody struct {
	Query   string   `json:"query" maxLength:"4096" doc:"Filter as text: the q of GET /api/dlq/entries." example:"status:manual queue:payments"`
	Columns []string `json:"columns,omitempty" maxItems:"40" doc:"Columns of the list, in order; the default columns if absent." example:"[\"status\",\"errorType\"]"`
	Order   string   `json:"order,omitempty" maxLength:"64" doc:"Order of the list; the default order if absent." example:"oldest"`
	Shared  bool     `json:"shared,omitempty" doc:"Whether other users see the view: those who may see all queues and kinds that its owner may see. Needs the role operator."`
	Actor   string   `json:"actor,omitempty" maxLength:"255" doc:"Owner, if authentication is off; \"api\" if absent."`
}

// ViewsInput names the owner of views.
type ViewsInput struct {
	Actor string `query:"actor" maxLength:"255" doc:"Owner, if authentication is off; \"api\" if absent."`
}

// GetViewInput names a view and its owner.
type GetViewInput struct {
	ViewInput

	Actor string `query:"actor" maxLength:"255" doc:"Owner, if authentication is off; \"api\" if absent."`
}

// ViewsOutputBody lists views.
type ViewsOutputBody struct {
	Views []deadletter.SavedView `json:"views" doc:"The caller's views, then views that others share."`
}

// SaveViewInput is a request to create or replace a view.
type SaveViewInput struct {
	ViewInput

	Body ViewBody
}

// DeleteViewInput is a request to delete a view.
type DeleteViewInput struct {
	ViewInput

	Owner string `query:"owner" maxLength:"255" doc:"Owner of a shared view; needs the role admin. The caller if absent."`
	Actor string `query:"actor" maxLength:"255" doc:"The actor, if authentication is off; \"api\" if absent."`
}

// OrderViewsBody is the order of views.
type OrderViewsBody struct {
	Names []string `json:"names" maxItems:"1000" doc:"Names of views, in their order. The others that the caller sees come after them."`
	Actor string   `json:"actor,omitempty" maxLength:"255" doc:"The actor, if authentication is off; \"api\" if absent."`
}

// OrderViewsInput is a request to order views.
type OrderViewsInput struct{ Body OrderViewsBody }

// Operations on saved views.
var (
	OrderViews = Operation[OrderViewsInput, ViewsOutputBody]{"order-views", http.MethodPost, "/api/dlq/views-order"}
	ListViews  = Operation[ViewsInput, ViewsOutputBody]{"list-views", http.MethodGet, ViewsPath}
	GetView    = Operation[GetViewInput, deadletter.SavedView]{"get-view", http.MethodGet, ViewsPath + "/{name}"}
	SaveView   = Operation[SaveViewInput, deadletter.SavedView]{"save-view", http.MethodPut, ViewsPath + "/{name}"}
	DeleteView = Operation[DeleteViewInput, None]{"delete-view", http.MethodDelete, ViewsPath + "/{name}"}
)

func (s *service) registerViews(api huma.API) {
	tags := []string{"saved views"}
	createdAt := time.Date(2026, 11, 22, 10, 0, 0, 0, time.UTC)
	shown := deadletter.SavedView{
		Name: "bank outages", Owner: "kim", Query: "class:outage queue:payments",
		Columns: []string{}, Shared: true, CreatedAt: createdAt, UpdatedAt: createdAt,
	}
	list := huma.Operation{
		Tags:    tags,
		Summary: "List the caller's saved views, and those that others share", Errors: []int{422, 503},
	}
	example(&list, http.StatusOK, map[string]any{"views": []deadletter.SavedView{shown}})
	register(s, api, ListViews, list, func(ctx context.Context, in *ViewsInput) (out *ViewsOutputBody, err error) {
		out = &ViewsOutputBody{}
		if out.Views, err = s.Store.SavedViews(ctx, (&Action{Actor: in.Actor}).person(ctx).Actor); err != nil {
			return nil, s.problem(ctx, err)
		}
		return out, nil
	})

	get := huma.Operation{
		Tags: tags, Summary: "Get a saved view", Errors: []int{404, 422, 503},
	}
	example(&get, http.StatusOK, shown)
	register(s, api, GetView, get, func(ctx context.Context, in *GetViewInput) (*deadletter.SavedView, error) {
		return s.view(ctx, in.Name, in.Actor)
	})

	save := huma.Operation{
		Tags: tags, Summary: "Create or replace a saved view",
		Description: "A user has at most 100 views. Answers 409 if another user shares a view of the same name.",
		Errors:      []int{400, 403, 409, 422, 503},
	}
	example(&save, http.StatusOK, shown)
	register(s, api, SaveView, save, func(ctx context.Context, in *SaveViewInput) (*deadletter.SavedView, error) {
		if in.Body.Shared {
			var err error
			if ctx, err = s.limitTo(ctx, need{access.Operator, true}); err != nil {
				return nil, err
			}
		}
		// Refuse a query that the list of entries would refuse.
		if _, err := mergeText(ctx, filter.Filter{}, "body.query", in.Body.Query); err != nil {
			return nil, err
		}
		v := deadletter.SavedView{
			Name: in.Name, Query: in.Body.Query, Columns: in.Body.Columns, Order: in.Body.Order, Shared: in.Body.Shared,
		}
		if err := s.Store.SaveView(ctx, &v, (&Action{Actor: in.Body.Actor}).person(ctx).Actor); err != nil {
			return nil, s.problem(ctx, err)
		}
		return s.view(ctx, in.Name, in.Body.Actor)
	})

	order := huma.Operation{
		Tags: tags, Summary: "Order the saved views",
		Description: "A shared view has the same place for all users who see it.", Errors: []int{400, 403, 422, 503},
	}
	example(&order, http.StatusOK, map[string]any{"views": []deadletter.SavedView{shown}})
	register(s, api, OrderViews, order, func(ctx context.Context, in *OrderViewsInput) (out *ViewsOutputBody, err error) {
		actor := (&Action{Actor: in.Body.Actor}).person(ctx).Actor
		if err := s.Store.OrderViews(ctx, in.Body.Names, actor); err != nil {
			return nil, s.problem(ctx, err)
		}
		out = &ViewsOutputBody{}
		if out.Views, err = s.Store.SavedViews(ctx, actor); err != nil {
			return nil, s.problem(ctx, err)
		}
		return out, nil
	})

	remove := huma.Operation{
		Tags:    tags,
		Summary: "Delete a saved view", DefaultStatus: http.StatusNoContent, Errors: []int{403, 404, 422, 503},
	}
	huma.Register(api, DeleteView.describe(remove), func(ctx context.Context, in *DeleteViewInput) (*None, error) {
		actor := (&Action{Actor: in.Actor}).person(ctx).Actor
		if in.Owner != "" && in.Owner != actor {
			var err error
			if ctx, err = s.limitTo(ctx, need{access.Admin, false}); err != nil {
				return nil, err
			}
		}
		if err := s.carryOut(ctx, func(ctx context.Context) error {
			return s.Store.DeleteView(ctx, in.Name, in.Owner, actor)
		}); err != nil {
			return nil, s.problem(ctx, err)
		}
		return nil, nil //nolint:nilnil // no content
	})
}

func (s *service) view(ctx context.Context, name, actor string) (*deadletter.SavedView, error) {
	v, err := s.Store.SavedView(ctx, name, (&Action{Actor: actor}).person(ctx).Actor)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return v, nil
}
