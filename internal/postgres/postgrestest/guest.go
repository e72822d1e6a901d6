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

// Guest is a database of an application with River, to which dlqd can be attached. Its four roles are not superusers
// and not members of one another, and none owns another role's schema.
type Guest struct {
	Owner    string // URL of the role that owns the database and River's tables
	App      string // of the application's role, which can read and write those tables
	DLQD     string // of dlqd's role, which can only connect at first
	Operator string // of an operator, who has the role dlq_operator
	Admin    string // of the server's superuser

	DLQDRole string // name of dlqd's role
	Database string // name of the database
}

// sharedGuestRoles are the roles of the guests of [AttachedGuest].
var sharedGuestRoles = guestRoles{"guest_owner", "guest_app", "guest_dlqd", "guest_operator"}

type guestRoles struct{ owner, app, dlqd, operator string }

// NewGuest creates a database with River in schema public, and its roles.
func NewGuest(tb testing.TB) *Guest {
	tb.Helper()
	base := withRoles(tb)
	ctx := tb.Context()
	suffix := randomName()
	roles := guestRoles{"owner_" + suffix, "app_" + suffix, "dlqd_" + suffix, "operator_" + suffix}
	admin(ctx, tb, base, fmt.Sprintf("CREATE ROLE %s LOGIN; CREATE ROLE %s LOGIN; CREATE ROLE %s LOGIN; CREATE ROLE %s "+
		"LOGIN IN ROLE dlq_operator", roles.owner, roles.app, roles.dlqd, roles.operator))
	tb.Cleanup(func() {
		admin(context.WithoutCancel(ctx), tb, base,
			fmt.Sprintf("DROP ROLE %s, %s, %s, %s", roles.owner, roles.app, roles.dlqd, roles.operator))
	})
	g := newGuest(base, createDatabase(tb, base, "guest_"+suffix, "template0", roles.owner), roles)
	g.installRiver(tb)
	return g
}

// AttachedGuest returns a guest to which dlqd is attached. The guest is a copy of a template, because attaching takes 3
// s of processor time with the race detector. All guests of AttachedGuest have the same roles. A test that changes a
// role needs [NewGuest].
func AttachedGuest(tb testing.TB) *Guest {
	tb.Helper()
	base := withRoles(tb)
	from := template(tb, &server.attached, "attached_", sharedGuestRoles.owner, func(database string) {
		g := newGuest(base, database, sharedGuestRoles)
		g.installRiver(tb)
		g.Grant(tb, postgres.DefaultSchemas())
		g.Attach(tb)
	})
	database := createDatabase(tb, base, "guest_"+randomName(), from, sharedGuestRoles.owner)
	g := newGuest(base, database, sharedGuestRoles)
	g.Grant(tb, postgres.DefaultSchemas()) // a copy does not have the privileges on the database
	return g
}

func newGuest(base, database string, roles guestRoles) *Guest {
	as := func(name string) string { return WithDatabase(WithUser(base, name), database) }
	return &Guest{
		Owner: as(roles.owner), App: as(roles.app), DLQD: as(roles.dlqd), Operator: as(roles.operator),
		Admin: WithDatabase(base, database), DLQDRole: roles.dlqd, Database: database,
	}
}

// installRiver installs River as the owner, and grants the application's role the privileges on River's tables.
func (g *Guest) installRiver(tb testing.TB) {
	tb.Helper()
	pool, err := postgres.Open(tb.Context(), g.Owner, 4)
	require.NoError(tb, err)
	defer pool.Close()
	MigrateRiver(tb, pool, "", 0)
	_, err = pool.Exec(tb.Context(), fmt.Sprintf(`GRANT SELECT, INSERT, UPDATE,
		DELETE ON ALL TABLES IN SCHEMA public TO %[1]s; GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO %[1]s`,
		parse(g.App).User.Username()))
	require.NoError(tb, err)
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

// Attach runs attach as dlqd's role.
func (g *Guest) Attach(tb testing.TB) {
	tb.Helper()
	pool, err := postgres.Open(tb.Context(), g.DLQD, 4)
	require.NoError(tb, err)
	defer pool.Close()
	migrator := &postgres.Migrator{Pool: pool, Schemas: postgres.DefaultSchemas(), Logger: slog.New(slog.DiscardHandler)}
	require.NoError(tb, migrator.Attach(tb.Context()))
	allowSlowCapture(tb, pool)
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
