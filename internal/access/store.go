package access

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/access/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Store stores tokens and sessions.
type Store struct {
	pool    *pgxpool.Pool
	schemas postgres.Schemas
	queries *dbsqlc.Queries
	origin  string // recorded in the audit trail; empty for the address of the database session
}

// From returns a copy of the store that records origin in the audit trail.
func (s *Store) From(origin string) *Store {
	from := *s
	from.origin = origin
	return &from
}

// NewStore returns the store of a database.
func NewStore(pool *pgxpool.Pool, schemas postgres.Schemas) *Store {
	return &Store{pool: pool, schemas: schemas, queries: dbsqlc.New(schemas.Rendered(pool))}
}

// ErrNoToken means that no token has the id, that the token is already revoked or, for [Store.Rotate], that the token
// is not active.
var ErrNoToken = errors.New("no valid token has this id")

// Create creates a token with the given name, grant, note and expiry, and returns its secret. The
// secret cannot be retrieved later.
func (s *Store) Create(ctx context.Context, t *Token, by string) (secret string, err error) {
	err = s.withAudit(ctx, &auditRow{"tokens", "made", by, "", t.Note, t}, func(q *dbsqlc.Queries) error {
		secret, err = insert(ctx, q, t, by)
		return err
	})
	return secret, err
}

// Check returns an error if the name or the grant of a new token is invalid.
func (t *Token) Check() error {
	if err := checkName(t.Name); err != nil {
		return err
	}
	return CheckGrant(t.grant())
}

func insert(ctx context.Context, q *dbsqlc.Queries, t *Token, by string) (string, error) {
	if err := t.Check(); err != nil {
		return "", err
	}
	secret, hash, err := newSecret(secretPrefix)
	if err != nil {
		return "", err
	}
	id := uuid.Must(uuid.NewV7())
	t.ID, t.CreatedBy, t.CreatedAt = id.String(), by, time.Now()
	return secret, q.InsertToken(ctx, dbsqlc.InsertTokenParams{
		ID: id, Name: t.Name, Hash: hash, Role: string(t.Role),
		Queues: nonNil(t.Queues), Kinds: nonNil(t.Kinds), Sources: nonNil(t.Sources),
		Note: t.Note, CreatedBy: by, ExpiresAt: t.ExpiresAt,
	})
}

func nonNil(patterns []string) []string { return append([]string{}, patterns...) }

// List returns all tokens, including expired and revoked ones, the oldest first.
func (s *Store) List(ctx context.Context) ([]Token, error) {
	rows, err := s.queries.Tokens(ctx)
	tokens := make([]Token, len(rows))
	for i, r := range rows {
		tokens[i] = Token{
			ID: r.ID.String(), Name: r.Name, Role: Role(r.Role), Queues: r.Queues,
			Kinds: r.Kinds, Sources: r.Sources, Note: r.Note, CreatedBy: r.CreatedBy, CreatedAt: r.CreatedAt,
			ExpiresAt: r.ExpiresAt, UsedAt: r.UsedAt, RevokedAt: r.RevokedAt, RevokedBy: r.RevokedBy,
		}
	}
	return tokens, err
}

// Revoke revokes a token. All processes refuse the token within five seconds. It fails with [ErrNoToken] if there is no
// such token.
func (s *Store) Revoke(ctx context.Context, id, by, note string) error {
	return s.withAudit(ctx, &auditRow{"tokens", "revoked", by, "", note, map[string]string{"id": id}},
		func(q *dbsqlc.Queries) error {
			return revoke(ctx, q, id, by, 0)
		})
}

func revoke(ctx context.Context, q *dbsqlc.Queries, id, by string, after time.Duration) error {
	parsed, err := uuid.Parse(id)
	if err != nil {
		// The message does not contain id: a caller may pass the token itself by mistake.
		return errors.New("invalid token id: \"dlqd tokens list\" lists the ids")
	}
	n, err := q.RevokeToken(ctx, dbsqlc.RevokeTokenParams{ID: parsed, RevokedBy: &by, After: after})
	if err == nil && n == 0 {
		err = fmt.Errorf("%w: %s", ErrNoToken, id)
	}
	return err
}

// Rotate creates a token with the name, grant and note of the active token with the id, and returns the new token and
// its secret. The new token expires at expiresAt, or never if that is nil. The old token stays valid for the duration
// keep. Rotate fails with [ErrNoToken] if no active token has the id.
func (s *Store) Rotate(ctx context.Context, id, by string, keep time.Duration,
	expiresAt *time.Time,
) (t *Token, secret string, err error) {
	err = s.withAudit(ctx, &auditRow{"tokens", "rotated", by, "", "", map[string]string{"id": id}},
		func(q *dbsqlc.Queries) error {
			tokens, err := s.List(ctx)
			if err != nil {
				return err
			}
			for _, old := range tokens {
				if old.ID == id && old.State(time.Now()) == "active" {
					t = &old
				}
			}
			if t == nil {
				return fmt.Errorf("%w: %s", ErrNoToken, id)
			}
			if err := revoke(ctx, q, id, by, keep); err != nil {
				return err
			}
			t.ExpiresAt, t.UsedAt = expiresAt, nil
			secret, err = insert(ctx, q, t, by)
			return err
		})
	return t, secret, err
}

// auditRow is the content of an audit row.
type auditRow struct {
	subject, act, by string
	origin           string // empty for the address of the database session
	note             string
	detail           any
}

// withAudit runs do and writes the audit row in the same transaction.
func (s *Store) withAudit(ctx context.Context, a *auditRow, do func(q *dbsqlc.Queries) error) error {
	return postgres.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		q := dbsqlc.New(s.schemas.Rendered(tx))
		if err := do(q); err != nil {
			return err
		}
		raw, err := json.Marshal(a.detail)
		if err != nil {
			return err
		}
		if err := q.SetOrigin(ctx, cmp.Or(a.origin, s.origin)); err != nil {
			return err
		}
		return q.RecordAct(ctx, dbsqlc.RecordActParams{
			Subject: a.subject, Act: a.act, Actor: a.by, Note: a.note, Detail: raw,
		})
	})
}

// find returns the holder of the valid token with the hash, or nil if there is none. It records the use of the token,
// at most once a minute.
func (s *Store) find(ctx context.Context, hash []byte) (*Principal, error) {
	row, err := s.queries.FindToken(ctx, hash)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil //nolint:nilnil // no such token
	}
	if err != nil {
		return nil, err
	}
	if row.UsedAt == nil || time.Since(*row.UsedAt) > time.Minute {
		if err := s.queries.TouchToken(ctx, row.ID); err != nil && ctx.Err() != nil {
			return nil, err
		}
	}
	return &Principal{
		Name: row.Name, Via: ViaToken, TokenBy: row.CreatedBy,
		Grants: []Grant{{Role: Role(row.Role), Queues: row.Queues, Kinds: row.Kinds, Sources: row.Sources}},
	}, nil
}
