package deadletter_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func TestStore_ReturnsErrorOfEachStatement(t *testing.T) {
	t.Parallel()
	b := setup(t, succeed)
	scope := `[{}]`
	fail := func(do func(ctx context.Context, s *deadletter.Store) error) {
		t.Helper()
		postgrestest.FailEach(t, b.pool, func(pool *pgxpool.Pool) error {
			ctx := postgres.WithScope(deadletter.WithOrigin(t.Context(), "a test"), scope)
			return do(ctx, deadletter.NewStore(pool, postgres.DefaultSchemas()))
		})
	}
	all := json.RawMessage(`{}`)
	id := b.createEntry().ID
	operation := deadletter.NewOperation()
	var erasure deadletter.Erasure

	get := func(ctx context.Context, s *deadletter.Store) error {
		_, _, err := s.Get(ctx, id)
		return err
	}
	fail(get)
	for _, f := range []filter.Filter{{}, {ErrorMessage: []string{"x"}}} {
		f.Status = []string{string(deadletter.Manual)} // only open entries, because closed ones take many statements
		for _, budget := range []time.Duration{0, time.Hour} {
			fail(func(ctx context.Context, s *deadletter.Store) error {
				_, err := s.Search(ctx, deadletter.Page{Filter: f, Limit: 10}, budget)
				return err
			})
			fail(func(ctx context.Context, s *deadletter.Store) error {
				_, _, err := s.CountWithin(ctx, f, 10, budget)
				return err
			})
		}
	}
	b.exec(moveSQL("dlq_archived"), id)
	fail(get)
	for _, do := range []func(ctx context.Context, s *deadletter.Store) error{
		func(ctx context.Context, s *deadletter.Store) error {
			_, _, err := s.Reveal(ctx, id, kim)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, _, _, err := s.Revealed(ctx, id, "kim")
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.List(ctx, deadletter.Page{Limit: 10})
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.Summaries(ctx, []uuid.UUID{id}, time.Time{})
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.FindEntries(ctx, all, nil)
			return err
		},
	} {
		fail(do)
	}

	scope = ""
	for _, do := range []func(ctx context.Context, s *deadletter.Store) error{
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.FilterValues(ctx, "queue", "", 10)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.Audit(ctx, deadletter.AuditFilter{}, 10, deadletter.AuditCursor{})
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.Count(ctx, all, true)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.CountUpTo(ctx, all, true, 10)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.Preview(ctx, all)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.Backlog(ctx)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.OldestOpen(ctx)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.SchemaVersion(ctx)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.SweepRedeliveries(ctx, uuid.Nil)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.SelectsAll(ctx, all)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.Erasures(ctx, 10)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.WereErased(ctx, []uuid.UUID{id})
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			return s.EnsureMonth(ctx, "dlq_resolved", time.Now())
		},
		func(ctx context.Context, s *deadletter.Store) error {
			return s.Protect(ctx, []string{"error_message"}, json.RawMessage(`[]`))
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.RecordExport(ctx, all, true, kim)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := deadletter.ReservePlaces(ctx, s.DB(), "a stream", 1, 1, time.Now(), nil)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			ctx = deadletter.WithApproval(postgres.WithScope(ctx, `[{}]`), uuid.New())
			return s.Record(ctx, "a thing", "changed", kim, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT 1")
				return err
			})
		},
		func(ctx context.Context, s *deadletter.Store) error { return s.Reopen(ctx, id, kim) },
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.ReviewNext(ctx, []uuid.UUID{id}, "kim")
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			return s.ReadReviews(ctx, &deadletter.Summary{ID: id, Status: deadletter.Manual})
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, _, err := s.Bulk(ctx, deadletter.Bulk{
				Action: "unpark", Filter: all, All: true, Act: deadletter.Act{Actor: "kim", Operation: operation},
			})
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, _, err := s.Operation(ctx, operation, nil, 10)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.Undo(ctx, operation, kim)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			return s.SaveView(ctx, &deadletter.SavedView{Name: "a view", Query: "queue:default"}, "kim")
		},
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.SavedView(ctx, "a view", "kim")
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error {
			return s.OrderViews(ctx, []string{"a view"}, "kim")
		},
		func(ctx context.Context, s *deadletter.Store) error { return s.DeleteView(ctx, "a view", "", "kim") },
		func(ctx context.Context, s *deadletter.Store) error {
			_, err := s.Replay(ctx, id, deadletter.Replay{Act: kim, Force: true})
			return err
		},
		func(ctx context.Context, s *deadletter.Store) (err error) {
			erasure, err = s.Erase(ctx, json.RawMessage(`{"queue": ["default"]}`), kim)
			return err
		},
		func(ctx context.Context, s *deadletter.Store) error { return s.FinishErasure(ctx, &erasure, 0) },
		func(ctx context.Context, s *deadletter.Store) error { return s.CheckErased(ctx, &erasure) },
	} {
		fail(do)
	}
}
