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

// Guest is an application's database with River, before dlqd is attached. It has four roles: none
// is a superuser, a member of another one, or the owner of another one's schema.
type Guest struct {
	Owner    string // URL of the role that owns the database and River's tables
	App      string // of the application's role, which can read and write those tables
	DLQD     string // of dlqd's role, which can only connect at first
	Operator string // of an operator, who has the role dlq_operator
	Admin    string // of the server's superuser

	DLQDRole string // name of dlqd's role
}

// NewGuest creates a database with River in schema public, and its roles.
func NewGuest(tb testing.TB) *Guest {
	tb.Helper()
	base := withRoles(tb)
	ctx := tb.Context()
	suffix := randomName()
	owner, app, dlqd, operator := "owner_"+suffix, "app_"+suffix, "dlqd_"+suffix, "operator_"+suffix
	database := "guest_" + suffix
	admin(ctx, tb, base, fmt.Sprintf("CREATE ROLE %s LOGIN; CREATE ROLE %s LOGIN; CREATE ROLE %s LOGIN; CREATE ROLE %s "+
		"LOGIN IN ROLE dlq_operator", owner, app, dlqd, operator))
	tb.Cleanup(func() {
		admin(context.WithoutCancel(ctx), tb, base, fmt.Sprintf("DROP ROLE %s, %s, %s, %s", owner, app, dlqd, operator))
	})
	admin(ctx, tb, base, fmt.Sprintf("CREATE DATABASE %s TEMPLATE template0 OWNER %s", database, owner))
	tb.Cleanup(func() {
		admin(context.WithoutCancel(ctx), tb, base, "DROP DATABASE IF EXISTS "+database+" WITH (FORCE)")
	})
	as := func(name string) string { return WithDatabase(WithUser(base, name), database) }
	g := &Guest{
		Owner: as(owner), App: as(app), DLQD: as(dlqd), Operator: as(operator),
		Admin: WithDatabase(base, database), DLQDRole: dlqd,
	}
	pool := Open(tb, g.Owner)
	MigrateRiver(tb, pool, "", 0)
	_, err := pool.Exec(ctx, fmt.Sprintf(`GRANT SELECT, INSERT, UPDATE,
		DELETE ON ALL TABLES IN SCHEMA public TO %[1]s; GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO %[1]s`, app))
	require.NoError(tb, err)
	return g
}

// Grant grants dlqd's role all required rights of docs/attach.md, as the owner of River's tables
// and the database.
func (g *Guest) Grant(tb testing.TB, schemas postgres.Schemas) {
	tb.Helper()
	conn, err := pgx.Connect(tb.Context(), g.Owner)
	require.NoError(tb, err)
	defer func() { _ = conn.Close(context.WithoutCancel(tb.Context())) }()
	for _, right := range postgres.Rights() {
		if !right.Optional { // granting pg_read_all_stats takes the server's administrator
			_, err := conn.Exec(tb.Context(), right.Grant(schemas, conn.Config().Database, g.DLQDRole))
			require.NoError(tb, err)
		}
	}
}

// MigrateRiver migrates River's schema to a version, up or down: 0 is the newest, -1 drops it. An
// empty schema means public.
func MigrateRiver(tb testing.TB, pool *pgxpool.Pool, schema string, version int) {
	tb.Helper()
	migrator, err := rivermigrate.New(riverpgxv5.New(pool),
		&rivermigrate.Config{Schema: schema, Logger: slog.New(slog.DiscardHandler)})
	require.NoError(tb, err)
	direction := rivermigrate.DirectionUp
	if applied, err := migrator.ExistingVersions(tb.Context()); err == nil && version != 0 && len(applied) > 0 &&
		applied[len(applied)-1].Version > version {
		direction = rivermigrate.DirectionDown
	}
	_, err = migrator.Migrate(tb.Context(), direction, &rivermigrate.MigrateOpts{TargetVersion: version})
	require.NoError(tb, err)
}
