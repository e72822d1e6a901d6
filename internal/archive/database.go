package archive

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/big"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// page is how many rows are read in one transaction.
const page = 1000

// Held is what a partition holds, all of which is in the archive.
type Held struct {
	Rows    int64
	Hash    string // sum of hashtextextended(row::text, 0), which dlq.drop_partition compares
	Written int64  // of the rows, how many were not in the archive before
}

// Partition writes what a partition holds to the archive, but for rows that are there already, from an earlier round or
// because they were restored: their lines are compared. Rows are read in short transactions; that none has changed
// meanwhile is for dlq.drop_partition to see.
func (a *Archive) Partition(ctx context.Context, store *deadletter.Store, m Manifest, ofAudit bool) (*Held, error) {
	free, taken, err := a.freeName(ctx, m.Unit)
	if err != nil {
		return nil, err
	}
	known := map[[16]byte]bool{}
	read := a.Entries
	if ofAudit {
		read = a.Audit
	}
	for _, old := range taken {
		if err := read(ctx, &old, func(line []byte) error { known[digest(line)] = true; return nil }); err != nil {
			return nil, err
		}
	}
	m.Unit = free
	unit := a.NewUnit(m)
	defer unit.Abandon()

	held, sum := &Held{}, new(big.Int)
	after := row{ID: uuid.Nil}
	for {
		start := time.Now()
		var rows []row
		if err := store.InTx(ctx, func(tx postgres.DB) error {
			if rows, err = readPage(ctx, tx, m.Partition, ofAudit, after); err != nil {
				return err
			}
			var fresh []row
			for _, r := range rows {
				sum.Add(sum, big.NewInt(r.Hash))
				held.Rows++
				if len(known) == 0 || !known[digest([]byte(r.Line))] {
					fresh = append(fresh, r)
				}
			}
			held.Written += int64(len(fresh))
			if ofAudit {
				for _, r := range fresh {
					if err := unit.Move(ctx, r.Line, r.At); err != nil {
						return err
					}
				}
				return nil
			}
			return unit.rows(ctx, tx, fresh)
		}); err != nil {
			return nil, err
		}
		if len(rows) < page {
			break
		}
		after = rows[len(rows)-1]
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Since(start)): // half of the time is the others'
		}
	}
	held.Hash = sum.String()
	_, err = unit.Close(ctx)
	return held, err
}

// Rows writes a unit of some entries and their moves.
func (a *Archive) Rows(ctx context.Context, tx postgres.DB, m Manifest, ids []uuid.UUID) error {
	unit := a.NewUnit(m)
	defer unit.Abandon()
	if err := utc(ctx, tx); err != nil {
		return err
	}
	got, err := tx.Query(ctx, "SELECT 0::bigint AS seq, e.id, e.closed_at AS at, 0::bigint AS hash, to_jsonb(e)::text AS line FROM dlq.dead_letter_queue e WHERE e.id = ANY ($1) ORDER BY e.id", ids)
	if err != nil {
		return err
	}
	rows, err := pgx.CollectRows(got, pgx.RowToStructByName[row])
	if err != nil {
		return err
	}
	if err := unit.rows(ctx, tx, rows); err != nil {
		return err
	}
	_, err = unit.Close(ctx)
	return err
}

// row is a row of a partition: an entry, or a move (whose key is seq and at).
type row struct {
	Seq  int64
	ID   uuid.UUID
	At   time.Time
	Hash int64
	Line string
}

func readPage(ctx context.Context, tx postgres.DB, partition string, ofAudit bool, after row) ([]row, error) {
	if err := utc(ctx, tx); err != nil {
		return nil, err
	}
	table := "dlq." + pgx.Identifier{partition}.Sanitize()
	sql := "SELECT 0::bigint AS seq, e.id, e.closed_at AS at, hashtextextended(e::text, 0) AS hash, to_jsonb(e)::text AS line FROM " + table + " e WHERE e.id > $1 ORDER BY e.id LIMIT $2"
	args := []any{after.ID, page}
	if ofAudit {
		sql = "SELECT e.id AS seq, e.entry_id AS id, e.at, hashtextextended(e::text, 0) AS hash, to_jsonb(e)::text AS line FROM " + table + " e WHERE (e.id, e.at) > ($1, $2) ORDER BY e.id, e.at LIMIT $3"
		args = []any{after.Seq, after.At, page}
	}
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[row])
}

// utc has times written in one way, whatever the session's zone: lines and hashes are compared.
func utc(ctx context.Context, tx postgres.DB) error {
	_, err := tx.Exec(ctx, "SET LOCAL timezone = 'UTC'")
	return err
}

// rows adds entries, in the order of their ids, and their moves since the first of them was captured.
func (u *Unit) rows(ctx context.Context, tx postgres.DB, rows []row) error {
	if len(rows) == 0 {
		return nil
	}
	ids := make([]uuid.UUID, len(rows))
	for i, r := range rows {
		ids[i] = r.ID
		if err := u.Entry(ctx, r.Line, r.At); err != nil {
			return err
		}
	}
	moves, err := tx.Query(ctx, `SELECT to_jsonb(t)::text FROM dlq.dead_letter_transitions t
		WHERE t.entry_id = ANY ($1) AND t.at >= $2 ORDER BY t.entry_id, t.at, t.id`, ids, deadletter.ClosedSince(ids[0]))
	if err != nil {
		return err
	}
	lines, err := pgx.CollectRows(moves, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, line := range lines {
		if err := u.Move(ctx, line, time.Time{}); err != nil {
			return err
		}
	}
	return nil
}

func digest(line []byte) (d [16]byte) {
	sum := sha256.Sum256(line)
	copy(d[:], sum[:])
	return d
}

// Restore brings a unit's entries back into the database, or the one of an id, and has retention leave them until a time.
// Entries that are there are left alone. It returns how many it brought.
func (a *Archive) Restore(ctx context.Context, store *deadletter.Store, m *Manifest, only uuid.UUID, until time.Time, act deadletter.Act) (restored int, err error) {
	found := false
	err = a.batches(ctx, m, func(line []byte) (bool, error) {
		if only == uuid.Nil {
			return true, nil
		}
		id, err := entryID(line)
		found = found || id == only
		return id == only, err
	}, func(batch []json.RawMessage) error {
		raw, err := json.Marshal(batch)
		if err != nil {
			return err
		}
		n, err := store.RestoreEntries(ctx, raw, until, act)
		restored += n
		return err
	})
	if err == nil && !found && only != uuid.Nil {
		err = fmt.Errorf("archive %s: %s: there is no entry %s in it", a, m.Unit, only)
	}
	return restored, err
}

// batches calls each with the entries of a unit that keep chooses, a page at a time.
func (a *Archive) batches(ctx context.Context, m *Manifest, keep func(line []byte) (bool, error), each func([]json.RawMessage) error) error {
	var batch []json.RawMessage
	if err := a.Entries(ctx, m, func(line []byte) error {
		kept, err := keep(line)
		if err != nil || !kept {
			return err
		}
		if batch = append(batch, bytes.Clone(line)); len(batch) < page {
			return nil
		}
		full := batch
		batch = nil
		return each(full)
	}); err != nil || len(batch) == 0 {
		return err
	}
	return each(batch)
}
