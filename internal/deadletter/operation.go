package deadletter

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Operation is one action of an operator on any number of entries.
type Operation struct {
	ID        uuid.UUID        `json:"id" doc:"UUIDv7."`
	Action    string           `json:"action" doc:"Action: discard, expire, resolve, park, unpark, reopen, assign, tag, note, purge or undo."`
	Filter    json.RawMessage  `json:"filter,omitempty" doc:"Filter that selected the entries; absent if they were selected by id, or if the caller may not see it."`
	Args      json.RawMessage  `json:"args,omitempty" doc:"Parameters of the action: assignee, tags."`
	Actor     string           `json:"actor" doc:"User that started it."`
	DBUser    string           `json:"dbUser" doc:"Database user of the session."`
	Origin    string           `json:"origin,omitempty" doc:"Interface and address that it came from."`
	Note      string           `json:"note,omitempty" doc:"Note of the user."`
	Undoes    *uuid.UUID       `json:"undoes,omitempty" doc:"The operation that it undoes."`
	StartedAt time.Time        `json:"startedAt" doc:"Time at which it started."`
	LastAt    time.Time        `json:"lastAt" doc:"Time of its last batch."`
	Looked    int64            `json:"looked" doc:"Number of entries that it selected."`
	Changed   int64            `json:"changed" doc:"Number of entries that it changed."`
	Unchanged map[string]int64 `json:"unchanged" doc:"Number of entries that it left unchanged, by reason."`
}

// Touched is an entry that an operation selected.
type Touched struct {
	ID      uuid.UUID `json:"id" doc:"The entry."`
	Changed bool      `json:"changed" doc:"Whether the operation changed the entry."`
	Reason  string    `json:"reason" doc:"Change of the entry, or the reason why it was left unchanged."`
}

// Operation returns an operation and a page of up to most of the entries that it selected. The page begins after the
// entry after, or with the first entry if after is nil. Of the entries that an operation left unchanged, the database
// stores at most 10,000. Operation fails with [ErrNotFound] if the caller may not see the operation.
func (s *Store) Operation(ctx context.Context, id uuid.UUID, after *uuid.UUID,
	most int,
) (*Operation, []Touched, error) {
	row, err := s.queries.Operation(ctx, id)
	if err != nil {
		return nil, nil, AsMoveError(err)
	}
	o := &Operation{
		ID: row.ID, Action: row.Action, Filter: row.Filter, Args: row.Args,
		Actor: row.Actor, DBUser: row.DBUser, Origin: row.Origin, Note: row.Note,
		StartedAt: row.StartedAt, LastAt: row.LastAt, Looked: row.Looked, Changed: row.Changed,
	}
	if row.Undoes != uuid.Nil {
		o.Undoes = &row.Undoes
	}
	if err := json.Unmarshal(row.Unchanged, &o.Unchanged); err != nil {
		return nil, nil, err
	}
	rows, err := s.queries.OperationEntries(ctx, dbsqlc.OperationEntriesParams{ID: id, Most: int32(most), After: after})
	touched := make([]Touched, len(rows))
	for i, r := range rows {
		touched[i] = Touched{ID: r.EntryID, Changed: r.Changed, Reason: r.Reason}
	}
	return o, touched, AsMoveError(err)
}

// Undone is the result of undoing an operation.
type Undone struct {
	Operation uuid.UUID        `json:"operation" doc:"Id of the undo, which is an operation itself."`
	Looked    int              `json:"looked" doc:"Number of entries that the operation had changed."`
	Changed   int              `json:"changed" doc:"Number of entries that were reverted; the others have changed since."`
	Became    map[string]int64 `json:"became" doc:"Number of reverted entries by their status now. Discarded and resolved entries return to dlq_manual."`
}

// Undo reverts an operation on the entries that have not changed since the operation. It works in batches with one
// transaction each. If Undo is interrupted, the batches that are done stay reverted.
func (s *Store) Undo(ctx context.Context, operation uuid.UUID, act Act) (*Undone, error) {
	out := &Undone{Operation: act.operation(), Became: map[string]int64{}}
	params := dbsqlc.UndoParams{
		Operation: operation, Actor: act.Actor, Note: act.Note, Most: bulkBatch, Undo: out.Operation,
	}
	for {
		var row dbsqlc.UndoRow
		if err := s.move(ctx, func(tx postgres.DB) (err error) {
			row, err = dbsqlc.New(tx).Undo(ctx, params)
			return err
		}); err != nil {
			return out, err
		}
		var became map[string]int64
		if err := json.Unmarshal(row.Became, &became); err != nil {
			return out, err
		}
		for status, n := range became {
			out.Became[status] += n
		}
		out.Looked, out.Changed = out.Looked+int(row.Looked), out.Changed+int(row.Changed)
		if row.Looked < bulkBatch {
			return out, nil
		}
		params.After, params.AfterID = &row.Last, row.LastID
	}
}
