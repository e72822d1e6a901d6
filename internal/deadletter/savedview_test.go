package deadletter_test

import (
	"context"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// A user sees the user's own views and shared ones. Views are saved, changed and deleted by name, and a user can have
// only a limited number.
func TestSavedViews_AreSavedSharedAndDeleted(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	s := deadletter.NewStore(pool, postgres.DefaultSchemas())
	save := func(ctx context.Context, actor, name, query string, shared bool) error {
		return s.SaveView(ctx, &deadletter.SavedView{
			Name: name, Query: query, Columns: []string{"status", "errorType"}, Order: "oldest", Shared: shared,
		}, actor)
	}
	names := func(ctx context.Context, actor string) (names []string) {
		t.Helper()
		views, err := s.SavedViews(ctx, actor)
		require.NoError(t, err)
		for _, v := range views {
			names = append(names, v.Owner+"/"+v.Name)
		}
		return names
	}
	ctx := t.Context()
	require.NoError(t, save(ctx, "kim", "mine", "status:manual", false))
	require.NoError(t, save(ctx, "kim", "ours", "class:outage", true))
	require.NoError(t, save(ctx, "kim", "customer", "payload.customer:42", true))
	require.NoError(t, save(ctx, "anna", "mine", "queue:mails", false))
	require.Equal(t, []string{"kim/customer", "kim/mine", "kim/ours"}, names(ctx, "kim"))
	require.Equal(t, []string{"anna/mine", "kim/customer", "kim/ours"}, names(ctx, "anna"))
	require.Equal(t, []string{"kim/ours"}, names(postgres.AsReader(ctx), "ben"),
		"a view with a filter that the reader may not use is hidden")
	require.NoError(t, save(ctx, "kim", "customer", "queue:a key:cus_42", true))
	require.Equal(t, []string{"kim/ours"}, names(postgres.AsReader(ctx), "ben"))
	v, err := s.SavedView(ctx, "mine", "anna")
	require.NoError(t, err)
	require.Equal(t, "queue:mails", v.Query)
	require.Equal(t, []string{"status", "errorType"}, v.Columns)
	require.Equal(t, "oldest", v.Order)

	require.ErrorIs(t, save(ctx, "anna", "ours", "x", true), deadletter.ErrNotAllowed,
		"another user shares a view of this name")
	require.NoError(t, save(ctx, "anna", "ours", "queue:a", false))
	v, err = s.SavedView(ctx, "ours", "anna")
	require.NoError(t, err)
	require.Equal(t, "queue:a", v.Query, "the user's own view comes before a shared one")
	require.NoError(t, s.OrderViews(ctx, []string{"ours"}, "ben"))
	v, err = s.SavedView(ctx, "ours", "anna")
	require.NoError(t, err)
	require.Equal(t, "queue:a", v.Query, "also if only the shared one has a place")
	require.NoError(t, save(ctx, "kim", "mine", "status:pending", false))
	v, err = s.SavedView(ctx, "mine", "kim")
	require.NoError(t, err)
	require.Equal(t, "status:pending", v.Query)

	// A user sees a shared view only if the user's scope contains the view's scope.
	limited := postgres.WithScope(ctx, `[{"queues": ["mail*"]}]`)
	require.NoError(t, save(limited, "cleo", "mails", "queue:mails", true))
	require.Equal(t, []string{"cleo/mails"}, names(postgres.WithScope(ctx, `[{"queues": ["mail*", "pay"]}]`), "dan"))
	require.Empty(t, names(postgres.WithScope(ctx, `[{"queues": ["pay"]}]`), "dan"))

	require.ErrorIs(t, s.DeleteView(ctx, "mine", "", "ben"), deadletter.ErrNotFound)
	require.ErrorIs(t, s.DeleteView(ctx, "mine", "kim", "ben"), deadletter.ErrNotFound, "the view is not shared")
	require.NoError(t, s.DeleteView(ctx, "ours", "kim", "ben"), "an admin deletes a shared view")
	require.NoError(t, s.DeleteView(ctx, "mine", "", "kim"))
	_, err = s.SavedView(ctx, "mine", "kim")
	require.ErrorIs(t, err, deadletter.ErrNotFound)

	for _, bad := range []deadletter.SavedView{
		{Name: ""},
		{Name: " x"},
		{Name: "a\nb"},
		{Name: strings.Repeat("x", 101)},
		{Name: "x", Query: strings.Repeat("x", 4097)},
		{Name: "x", Columns: []string{"<b>"}},
	} {
		require.ErrorIs(t, s.SaveView(ctx, &bad, "kim"), deadletter.ErrInvalid, "%q", bad.Name)
	}
	for i := range 99 {
		require.NoError(t, save(ctx, "kim", "view "+strconv.Itoa(i), "", false))
	}
	require.ErrorIs(t, save(ctx, "kim", "one more", "", false), deadletter.ErrInvalid)
	require.NoError(t, save(ctx, "kim", "view 7", "queue:x", false), "a change adds no view")
	var acts string
	require.NoError(t, pool.QueryRow(ctx, `SELECT string_agg(actor || ' ' || act, '|' ORDER BY at, id) FROM dlq.acts
		WHERE subject = 'saved view ours'`).Scan(&acts))
	require.Equal(t, "kim saved, and shared|anna saved|ben deleted", acts)
}

// If a view has values for sensitive paths, they are masked for users other than the owner, as in filters.
func TestSavedViews_MaskSensitiveValuesForOthers(t *testing.T) {
	t.Parallel()
	pool := postgrestest.Pool(t)
	s := deadletter.NewStore(pool, postgres.DefaultSchemas())
	for name, query := range map[string]string{
		"list":   `queue:a payload.customer.email:kim@example.com,"anna b@example.com" status:manual`,
		"quoted": `-payload."customer"."email":x payload.customer."email":"y \" z" class:outage`,
		"upper":  `PAYLOAD.customer.Email:kim payload.customer.id:42`,
		"json":   `queue:a payload:{"customer": {"email": "kim@example.com"}}`,
		"array":  `payload.customer.0.email:kim`,
	} {
		require.NoError(t, s.SaveView(t.Context(), &deadletter.SavedView{Name: name, Query: query, Shared: true}, "kim"))
	}
	shown := func(actor string) map[string]string {
		views, err := s.SavedViews(t.Context(), actor)
		require.NoError(t, err)
		queries := map[string]string{}
		for _, v := range views {
			queries[v.Name] = v.Query
		}
		return queries
	}
	plain := shown("kim")
	require.Equal(t, plain, shown("anna"), "nothing is sensitive")
	require.NoError(t, s.Protect(t.Context(), []string{},
		policy.Data{SensitivePaths: []string{"payload.customer.email"}}.Masked()))
	require.Equal(t, plain, shown("kim"))
	require.Equal(t, map[string]string{
		"list":   `queue:a payload.customer.email:"***" status:manual`,
		"quoted": `-payload."customer"."email":"***" payload.customer."email":"***" class:outage`,
		"upper":  `PAYLOAD.customer.Email:"***" payload.customer.id:42`,
		"json":   `queue:a payload:"***"`,
		"array":  `payload.customer.0.email:"***"`,
	}, shown("anna"))
}
