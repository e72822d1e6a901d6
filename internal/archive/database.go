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

	"github.com/dlqd/dlqd/internal/archive/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// page bounds the number of rows that one transaction reads, and pageBytes their approximate size. A jsonb array, in
	// which rows are sent back to the database, holds at most 256 MB.
	page      = 1000
	pageBytes = 16 << 20
	// fetch is the number of rows that one FETCH reads. It is small, because a row may have 10 MB. If rows are smaller
	// than smallRow on average, FETCH reads ten times as many.
	fetch    = 10
	smallRow = 16 << 10
)

// Archived describes a partition of which all rows are in the archive.
type Archived struct {
	Rows    int64
	Hash    string // sum of hashtextextended(row::text, 0); dlq.drop_partition compares it with the partition's
	Written int64  // rows that were not in the archive before
}

// Partition writes the rows of a partition to the archive. It skips rows whose line is already in the archive: an
// earlier round wrote them, or they were restored from the archive. Partition reads in short transactions, so rows can
// change meanwhile. dlq.drop_partition checks by count and hash that no row has changed.
func (a *Archive) Partition(ctx context.Context, store *deadletter.Store, m Manifest, isAudit bool) (*Archived, error) {
	recorded, err := a.recordedUnits(ctx, store)
	if err != nil {
		return nil, err
	}
	free, taken, err := a.freeName(ctx, m.Unit, recorded)
	if err != nil {
		return nil, err
	}
	known := map[[16]byte]bool{}
	read := a.Entries
	if isAudit {
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

	archived, sum := &Archived{}, new(big.Int)
	after := row{ID: uuid.Nil}
	for {
		start := time.Now()
		var fresh []row
		var moves []string
		more := false
		if err := store.InTx(ctx, func(tx postgres.DB) error {
			rows, left, err := readPage(ctx, tx, m.Partition, isAudit, after)
			if err != nil {
				return err
			}
			if more = left; more {
				after = rows[len(rows)-1]
			}
			for _, r := range rows {
				sum.Add(sum, big.NewInt(r.Hash))
				archived.Rows++
				if len(known) == 0 || !known[digest([]byte(r.Line))] {
					fresh = append(fresh, r)
				}
			}
			if !isAudit {
				moves, err = readMoves(ctx, tx, fresh)
			}
			return err
		}); err != nil {
			return nil, err
		}
		// The transaction has ended before the write, because the archive may be slow.
		archived.Written += int64(len(fresh))
		if err := unit.write(ctx, fresh, moves, isAudit); err != nil {
			return nil, err
		}
		if !more {
			break
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(time.Since(start)): // leave half of the time to other work
		}
	}
	archived.Hash = sum.String()
	written, err := unit.Close(ctx)
	if err != nil {
		return nil, err
	}
	// Also record the earlier units: a process may have ended after it wrote a unit and before it recorded it.
	return archived, a.record(ctx, store, append(taken, *written)...)
}

// Rows writes a unit with the given closed entries, up to a page, and their moves. It returns the ids of the entries
// that it wrote and the hashes of their rows.
func (a *Archive) Rows(ctx context.Context, store *deadletter.Store, m Manifest,
	ids []uuid.UUID,
) (written []uuid.UUID, hashes []int64, err error) {
	recorded, err := a.recordedUnits(ctx, store)
	if err != nil {
		return nil, nil, err
	}
	if m.Unit, _, err = a.freeName(ctx, m.Unit, recorded); err != nil {
		return nil, nil, err
	}
	var rows []row
	var moves []string
	if err := store.InTx(ctx, func(tx postgres.DB) (err error) {
		if rows, _, err = readRows(ctx, tx, `SELECT 0::bigint AS seq, e.id, e.closed_at AS at,
			hashtextextended(e::text, 0) AS hash, to_jsonb(e)::text AS line FROM dlq.dead_letter_queue e WHERE e.id = ANY ($1)
				AND e.closed_at IS NOT NULL ORDER BY e.id`, ids); err != nil {
			return err
		}
		moves, err = readMoves(ctx, tx, rows)
		return err
	}); err != nil {
		return nil, nil, err
	}
	unit := a.NewUnit(m)
	defer unit.Abandon()
	if err := unit.write(ctx, rows, moves, false); err != nil {
		return nil, nil, err
	}
	for _, r := range rows {
		written, hashes = append(written, r.ID), append(hashes, r.Hash)
	}
	closed, err := unit.Close(ctx)
	if err != nil {
		return nil, nil, err
	}
	return written, hashes, a.record(ctx, store, *closed)
}

// record records units in the database's audit trail. It runs before the rows of the units are deleted from the
// database.
func (a *Archive) record(ctx context.Context, store *deadletter.Store, units ...Manifest) error {
	in, err := a.Recorded(ctx, store)
	if err != nil {
		return err
	}
	for _, m := range units {
		if m.rows() == 0 { // an empty unit is not written
			continue
		}
		if err := dbsqlc.New(store.DB()).RecordUnit(ctx, dbsqlc.RecordUnitParams{
			Unit: m.Unit, Archive: a.String(), Spellings: in.Spellings, ArchivedRows: m.rows(),
		}); err != nil {
			return fmt.Errorf("archive %s: %s: record the unit: %w", a, m.Unit, err)
		}
	}
	return nil
}

// recordedUnits returns the names of the units that, according to the database, are in the archive.
func (a *Archive) recordedUnits(ctx context.Context, store *deadletter.Store) (map[string]bool, error) {
	in, err := a.Recorded(ctx, store)
	if err != nil {
		return nil, err
	}
	all, err := dbsqlc.New(store.DB()).RecordedUnits(ctx, in.Spellings)
	names := map[string]bool{}
	for _, r := range all {
		names[r.Name] = true
	}
	return names, err
}

// Recorded says which units the database's audit trail records, in this and in other archives.
type Recorded struct {
	Spellings []string // the recorded locations that are this archive; the first is a.String()
	Units     int64    // number of units and partitions in this archive
	Elsewhere []string // other locations, each with the number of units and partitions there
}

// Recorded returns the records of the database's audit trail about this archive and others.
func (a *Archive) Recorded(ctx context.Context, store *deadletter.Store) (*Recorded, error) {
	all, err := dbsqlc.New(store.DB()).RecordedArchives(ctx)
	if err != nil {
		return nil, err
	}
	r := &Recorded{Spellings: []string{a.String()}}
	for _, other := range all {
		if !a.isAt(other.Archive) {
			r.Elsewhere = append(r.Elsewhere, fmt.Sprintf("%s (%d)", other.Archive, other.Units))
			continue
		}
		r.Units += other.Units
		r.Spellings = append(r.Spellings, other.Archive)
	}
	return r, nil
}

// Missing compares units, a list of the archive's units, with the units and dropped partitions that the database's
// audit trail records as archived. It returns an error for each recorded one that the list lacks or has with fewer
// rows. It ignores units that were written after the list was made, and units whose removal the owner of the schema has
// recorded.
func (a *Archive) Missing(ctx context.Context, store *deadletter.Store, units []Manifest) (missing []error, err error) {
	in, err := a.Recorded(ctx, store)
	if err != nil {
		return nil, err
	}
	recorded, err := dbsqlc.New(store.DB()).RecordedUnits(ctx, in.Spellings)
	if err != nil {
		return nil, err
	}
	if missing = a.lacking(recorded, units); len(missing) == 0 {
		return nil, nil
	}
	if units, _, err = a.Units(ctx); err != nil {
		return nil, err
	}
	return a.lacking(recorded, units), nil
}

// lacking returns an error for each recorded unit and partition that the list units lacks or has with fewer rows.
func (a *Archive) lacking(recorded []dbsqlc.RecordedUnitsRow, units []Manifest) (missing []error) {
	inUnit, ofPartition, removed := map[string]int64{}, map[string]int64{}, map[string]bool{}
	for _, m := range units {
		inUnit[m.Unit] += m.rows()
		rows := m.Entries
		if rows == nil { // the partition is a month of the audit trail
			rows = m.Audit
		}
		if rows != nil {
			ofPartition[m.Partition] += rows.Lines
		}
	}
	for _, r := range recorded { // sorted, so that a removed unit comes before the partition of the same name
		if r.IsRemoved || r.IsPartition && removed[r.Name] {
			removed[r.Name] = true
			continue
		}
		what, has := "unit", inUnit[r.Name]
		if r.IsPartition {
			what, has = "partition", ofPartition[r.Name]
		}
		if has < r.ArchivedRows {
			missing = append(missing, fmt.Errorf("archive %s: %s %s: has %d rows; the database says that it was archived "+
				"with %d, on %s", a, what, r.Name, has, r.ArchivedRows, r.At.UTC().Format(time.DateOnly)))
		}
	}
	return missing
}

// row is a row of a partition: an entry with its ID, or a move with its Seq and At.
type row struct {
	Seq  int64
	ID   uuid.UUID
	At   time.Time
	Hash int64
	Line string
}

func readPage(ctx context.Context, tx postgres.DB, partition string, isAudit bool,
	after row,
) (rows []row, more bool, err error) {
	table := "dlq." + pgx.Identifier{partition}.Sanitize()
	if isAudit {
		return readRows(ctx, tx, "SELECT e.id AS seq, e.entry_id AS id, e.at, hashtextextended(e::text, 0) AS hash, "+
			"to_jsonb(e)::text AS line FROM "+table+" e WHERE (e.at, e.id) > ($2, $1) ORDER BY e.at, e.id", after.Seq, after.At)
	}
	return readRows(ctx, tx, "SELECT 0::bigint AS seq, e.id, e.closed_at AS at, hashtextextended(e::text, 0) AS hash, "+
		"to_jsonb(e)::text AS line FROM "+table+" e WHERE e.id > $1 ORDER BY e.id", after.ID)
}

// readRows reads the first rows of a query through a cursor, up to a page in rows and bytes. more reports that the
// query may have further rows.
func readRows(ctx context.Context, tx postgres.DB, query string, args ...any) (all []row, more bool, err error) {
	if err := setUTC(ctx, tx); err != nil {
		return nil, false, err
	}
	if _, err := tx.Exec(ctx, "DECLARE page NO SCROLL CURSOR FOR "+query, args...); err != nil {
		return nil, false, err
	}
	for size, n := 0, fetch; len(all) < page && size < pageBytes; {
		got, err := tx.Query(ctx, fmt.Sprintf("FETCH %d FROM page", n))
		if err != nil {
			return nil, false, err
		}
		rows, err := pgx.CollectRows(got, pgx.RowToStructByName[row])
		if err != nil {
			return nil, false, err
		}
		all = append(all, rows...)
		for _, r := range rows {
			size += len(r.Line)
		}
		if len(rows) < n {
			return all, false, nil
		}
		if n = fetch; size < len(all)*smallRow {
			n = min(10*fetch, page-len(all))
		}
	}
	return all, true, nil
}

// setUTC makes rows print times in UTC, regardless of the session's time zone, because lines and hashes are compared.
func setUTC(ctx context.Context, tx postgres.DB) error {
	_, err := tx.Exec(ctx, "SET LOCAL timezone = 'UTC'")
	return err
}

// readMoves returns the moves of entries. The entries are sorted by id. readMoves searches from the time of the first
// entry's capture.
func readMoves(ctx context.Context, tx postgres.DB, rows []row) ([]string, error) {
	if len(rows) == 0 {
		return nil, nil
	}
	ids := make([]uuid.UUID, len(rows))
	for i, r := range rows {
		ids[i] = r.ID
	}
	moves, err := tx.Query(ctx, `SELECT to_jsonb(t)::text FROM dlq.dead_letter_transitions t
		WHERE t.entry_id = ANY ($1) AND t.at >= $2 ORDER BY t.entry_id, t.at, t.id`, ids, deadletter.ClosedSince(ids[0]))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(moves, pgx.RowTo[string])
}

// write adds entries and their moves to the unit. If isAudit is set, the rows themselves are moves.
func (u *Unit) write(ctx context.Context, rows []row, moves []string, isAudit bool) error {
	for _, r := range rows {
		add := u.Entry
		if isAudit {
			add = u.Move
		}
		if err := add(ctx, r.Line, r.At); err != nil {
			return err
		}
	}
	for _, line := range moves {
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

// Restore returns a unit's entries to the database: all if only is uuid.Nil, otherwise the entry with the id only. It
// fails if the unit does not have that entry. Restore protects the entries from retention until the given time. Entries
// that exist in the database are not changed. Restore checks the unit before it writes, and writes in one transaction.
// It returns the number of restored entries.
func (a *Archive) Restore(ctx context.Context, store *deadletter.Store, m *Manifest, only uuid.UUID, until time.Time,
	act deadletter.Act,
) (restored int, err error) {
	type month struct {
		status string
		begin  time.Time
	}
	found, months := only == uuid.Nil, map[month]bool{}
	if err := a.Entries(ctx, m, func(line []byte) error {
		var e struct {
			ID       uuid.UUID `json:"id"`
			Status   string    `json:"status"`
			ClosedAt time.Time `json:"closed_at"`
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		if only == uuid.Nil || e.ID == only {
			at := e.ClosedAt.UTC()
			months[month{e.Status, time.Date(at.Year(), at.Month(), 1, 0, 0, 0, 0, time.UTC)}] = true
			found = true
		}
		return nil
	}); err != nil {
		return 0, err
	}
	if !found {
		return 0, fmt.Errorf("archive %s: %s: there is no entry %s in the unit", a, m.Unit, only)
	}
	for month := range months {
		if err := store.EnsureMonth(ctx, month.status, month.begin); err != nil {
			return 0, err
		}
	}
	return store.RestoreEntries(ctx, until, act, func(restore func(entries json.RawMessage) error) error {
		return a.batches(ctx, m, func(line []byte) (bool, error) {
			id, err := entryID(line)
			return only == uuid.Nil || id == only, err
		}, func(batch []json.RawMessage) error {
			raw, err := json.Marshal(batch)
			if err != nil {
				return err
			}
			return restore(raw)
		})
	})
}

// batches calls each with the entries of a unit for which accept returns true. The batches are bounded in rows and
// bytes.
func (a *Archive) batches(ctx context.Context, m *Manifest, accept func(line []byte) (bool, error),
	each func([]json.RawMessage) error,
) error {
	var batch []json.RawMessage
	size := 0
	if err := a.Entries(ctx, m, func(line []byte) error {
		accepted, err := accept(line)
		if err != nil || !accepted {
			return err
		}
		batch = append(batch, bytes.Clone(line))
		if size += len(line); len(batch) < page && size < pageBytes {
			return nil
		}
		full := batch
		batch, size = nil, 0
		return each(full)
	}); err != nil || len(batch) == 0 {
		return err
	}
	return each(batch)
}
