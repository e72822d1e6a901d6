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
	Action    string           `json:"action" doc:"What was done: discard, resolve, park, unpark, reopen, assign, tag, note, purge or undo."`
	Filter    json.RawMessage  `json:"filter,omitempty" doc:"Which entries it was for; absent where they were named, and for who may not see it."`
	Args      json.RawMessage  `json:"args,omitempty" doc:"More about it: assignee, tags."`
	Actor     string           `json:"actor" doc:"Who did it."`
	DBUser    string           `json:"dbUser" doc:"Database user of the session."`
	Origin    string           `json:"origin,omitempty" doc:"From where."`
	Note      string           `json:"note,omitempty" doc:"What they said."`
	Undoes    *uuid.UUID       `json:"undoes,omitempty" doc:"The operation that it undid."`
	StartedAt time.Time        `json:"startedAt" doc:"When it began."`
	LastAt    time.Time        `json:"lastAt" doc:"When its last batch was done."`
	Looked    int64            `json:"looked" doc:"How many entries it was for."`
	Changed   int64            `json:"changed" doc:"How many of them it changed."`
	Unchanged map[string]int64 `json:"unchanged" doc:"Why it left the others, with how many for each reason."`
}

// Touched is an entry that an operation looked at.
type Touched struct {
	ID      uuid.UUID `json:"id" doc:"The entry."`
	Changed bool      `json:"changed" doc:"Whether it was changed."`
	Reason  string    `json:"reason" doc:"What was done to it, or why it was left."`
}

// Operation returns an operation and a page of the entries that it looked at, after an entry. Of
// the entries that it left unchanged, 10,000 are kept.
func (s *Store) Operation(ctx context.Context, id uuid.UUID, after *uuid.UUID, most int) (*Operation, []Touched, error) {
	row, err := s.queries.Operation(ctx, id)
	if err != nil {
		return nil, nil, Named(err)
	}
	o := &Operation{
		ID: row.ID, Action: row.Action, Filter: row.Filter, Args: row.Args, Actor: row.Actor, DBUser: row.DbUser, Origin: row.Origin, Note: row.Note,
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
	return o, touched, Named(err)
}

// Undone is the result of undoing an operation.
type Undone struct {
	Operation uuid.UUID        `json:"operation" doc:"The operation that the undoing is."`
	Looked    int              `json:"looked" doc:"Entries that the operation had changed."`
	Changed   int              `json:"changed" doc:"Entries that were put back; the others have moved on since."`
	Became    map[string]int64 `json:"became" doc:"Where those that were put back stand now. What was discarded or resolved is in dlq_manual, with a person."`
}

// Undo reverts the entries that are still as an operation left them, in batches with one
// transaction each: if it is interrupted, the batches before are reverted.
func (s *Store) Undo(ctx context.Context, operation uuid.UUID, act Act) (*Undone, error) {
	out := &Undone{Operation: act.operation(), Became: map[string]int64{}}
	params := dbsqlc.UndoParams{Operation: operation, Actor: act.Actor, Note: act.Note, Most: bulkBatch, Undo: out.Operation}
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
