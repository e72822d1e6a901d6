package access_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestStore_ReturnsErrorOfEachStatement(t *testing.T) {
	t.Parallel()
	b := setup(t)
	fail := func(do func(s *access.Store) error) {
		t.Helper()
		postgrestest.FailEach(t, b.pool, func(pool *pgxpool.Pool) error {
			return do(access.NewStore(pool, postgres.DefaultSchemas()))
		})
	}
	_, old := b.token(access.Token{Name: "old", Role: access.Reader})
	secret, id := b.token(access.Token{Name: "app", Role: access.Operator})
	b.console(rules(access.Rules{Ways: []string{"tokens"}}), false).browser().signIn(secret)
	fail(func(s *access.Store) error {
		_, err := s.Create(t.Context(), &access.Token{Name: "another", Role: access.Reader}, "kim")
		return err
	})
	fail(func(s *access.Store) error {
		_, err := s.List(t.Context())
		return err
	})
	fail(func(s *access.Store) error { return s.Revoke(t.Context(), old, "kim", "") })
	fail(func(s *access.Store) error {
		_, err := s.Sessions(t.Context(), "app", access.SessionLimits{})
		return err
	})
	fail(func(s *access.Store) error { return s.TrimSessions(t.Context(), access.SessionLimits{}) })
	fail(func(s *access.Store) error {
		_, err := s.End(t.Context(), access.Ending{Name: "app", By: "kim"})
		return err
	})
	fail(func(s *access.Store) error {
		_, _, err := s.Rotate(t.Context(), id, "kim", time.Minute, nil)
		return err
	})
}
