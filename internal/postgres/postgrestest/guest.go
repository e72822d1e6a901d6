package postgrestest

import (
	"context"
	"fmt"
	"log/slog"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
)

// Guest is a database where an application runs River, as a stranger would find it: four roles, none a superuser, none a
// member of another, none owning another's schema.
type Guest struct {
	Owner    string // URL of the role that owns the database and River's tables
	App      string // of the application's, which may read and write those tables
	DLQD     string // of dlqd's, which has no rights yet but to connect
	Operator string // of a person's, who has the role dlq_operator
	Admin    string // of the server's superuser

	DLQDRole string // name of dlqd's role
}

// NewGuest makes a database with River in schema public, and its roles.
func NewGuest(tb testing.TB) *Guest {
	tb.Helper()
	base := withRoles(tb)
	ctx := tb.Context()
	suffix := randomName()
	owner, app, dlqd, operator := "owner_"+suffix, "app_"+suffix, "dlqd_"+suffix, "operator_"+suffix
	database := "guest_" + suffix
	admin(ctx, tb, base, fmt.Sprintf("CREATE ROLE %s LOGIN; CREATE ROLE %s LOGIN; CREATE ROLE %s LOGIN; CREATE ROLE %s LOGIN IN ROLE dlq_operator", owner, app, dlqd, operator))
	tb.Cleanup(func() {
		admin(context.WithoutCancel(ctx), tb, base, fmt.Sprintf("DROP ROLE %s, %s, %s, %s", owner, app, dlqd, operator))
	})
	admin(ctx, tb, base, fmt.Sprintf("CREATE DATABASE %s TEMPLATE template0 OWNER %s", database, owner))
	tb.Cleanup(func() {
		admin(context.WithoutCancel(ctx), tb, base, "DROP DATABASE IF EXISTS "+database+" WITH (FORCE)")
	})
	as := func(name string) string { return WithDatabase(WithUser(base, name), database) }
	g := &Guest{Owner: as(owner), App: as(app), DLQD: as(dlqd), Operator: as(operator), Admin: WithDatabase(base, database), DLQDRole: dlqd}
	pool := Open(tb, g.Owner)
	MigrateRiver(tb, pool, "", 0)
	_, err := pool.Exec(ctx, fmt.Sprintf("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO %[1]s; GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO %[1]s", app))
	require.NoError(tb, err)
	return g
}

// Grant gives dlqd's role all that docs/attach.md lists, as River's owner, who owns the database too.
func (g *Guest) Grant(tb testing.TB, schemas postgres.Schemas) {
	tb.Helper()
	conn, err := pgx.Connect(tb.Context(), g.Owner)
	require.NoError(tb, err)
	defer func() { _ = conn.Close(context.WithoutCancel(tb.Context())) }()
	for _, right := range postgres.Rights() {
		if !right.Optional { // that one is the server's administrator's to give
			_, err := conn.Exec(tb.Context(), right.Grant(schemas, conn.Config().Database, g.DLQDRole))
			require.NoError(tb, err)
		}
	}
}

// MigrateRiver brings River's schema to a version, up or down: 0 is its newest, -1 none at all. Empty is schema public.
func MigrateRiver(tb testing.TB, pool *pgxpool.Pool, schema string, version int) {
	tb.Helper()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: schema, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(tb, err)
	direction := rivermigrate.DirectionUp
	if applied, err := migrator.ExistingVersions(tb.Context()); err == nil && version != 0 && len(applied) > 0 && applied[len(applied)-1].Version > version {
		direction = rivermigrate.DirectionDown
	}
	_, err = migrator.Migrate(tb.Context(), direction, &rivermigrate.MigrateOpts{TargetVersion: version})
	require.NoError(tb, err)
}
