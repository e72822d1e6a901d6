package deadletter

import (
	"context"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Review says that an entry was handed out to an operator for a decision. It ends after two minutes, with a move of the
// entry, or when another entry is handed out to the operator. Other operators can act on the entry, too.
type Review struct {
	Actor string    `json:"actor" doc:"The operator." example:"lee"`
	At    time.Time `json:"at" doc:"When the entry was handed out. The review ends with a move of the entry, after two minutes, or when the operator is handed out another entry."`
}

// ReviewNext ends actor's review, and hands out to actor the first of the given entries that is in dlq_manual and that
// no other operator has in review. It returns uuid.Nil if there is no such entry.
func (s *Store) ReviewNext(ctx context.Context, ids []uuid.UUID, actor string) (id uuid.UUID, err error) {
	err = s.InTx(ctx, func(tx postgres.DB) (err error) {
		id, err = dbsqlc.New(tx).ReviewNext(ctx, dbsqlc.ReviewNextParams{Ids: ids, Actor: actor})
		return err
	})
	return id, AsMoveError(err)
}

// ReadReviews sets the field Review of the given entries that are in dlq_manual.
func (s *Store) ReadReviews(ctx context.Context, entries ...*Summary) error {
	ids := make([]uuid.UUID, 0, len(entries))
	for _, e := range entries {
		if e.Status == Manual {
			ids = append(ids, e.ID)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	rows, err := s.queries.InReview(ctx, ids)
	for _, r := range rows {
		for _, e := range entries {
			if e.ID == r.EntryID {
				e.Review = &Review{Actor: r.Actor, At: r.At}
			}
		}
	}
	return err
}
