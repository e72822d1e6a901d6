package archive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
)

// retentionTimeout bounds how long an erasure waits for a round of retention to end.
const retentionTimeout = time.Hour

// ErrNotAll is of an erasure that was done in the database, and not in all of the archive.
var ErrNotAll = errors.New("the data was erased from the database, but not from all of the archive; erase again")

// EraseEverywhere takes the data of whoever a filter names out of the database, and out of the archive if there is one (a is not nil).
// It returns the record of it.
func EraseEverywhere(ctx context.Context, store *deadletter.Store, a *Archive, filter json.RawMessage, act deadletter.Act) (deadletter.Erasure, error) {
	record, err := store.Erase(ctx, filter, act)
	if err != nil {
		return record, err
	}
	jobs := int64(0)
	if a != nil {
		at := a.String()
		done, err := a.Erase(ctx, store, record.ID, filter)
		if err != nil {
			return record, fmt.Errorf("erasure %s: %w: %w", record.ID, ErrNotAll, err)
		}
		record.Archived, record.Archives, record.Archive, jobs = done.Entries, done.Units, &at, done.Jobs
	}
	return record, store.FinishErasure(ctx, &record, jobs)
}

// Erase takes the data of whoever a filter names out of every unit: of entries, what [deadletter.Store.Erase] takes out of
// those in the database; of moves, the details. A unit that changes gets new files, then a manifest that names them and the
// erasure, and then loses the old ones, so that it is whole at every moment. An erasure that is cut short is done again;
// whatever files it left behind go then. No retention and no other erasure writes the archive meanwhile.
func (a *Archive) Erase(ctx context.Context, store *deadletter.Store, erasure uuid.UUID, filter json.RawMessage) (done Erased, err error) {
	ran, err := Exclusively(ctx, store, retentionTimeout, func(ctx context.Context) error {
		all, err := a.Units(ctx)
		if err != nil {
			return err
		}
		done.Units = int64(len(all))
		// An entry's moves may be in another unit than the entry, and the entry in the database: months of the audit trail are
		// their own.
		erased := map[uuid.UUID]json.RawMessage{}
		for _, m := range all {
			if err := a.batches(ctx, &m, func([]byte) (bool, error) { return true, nil }, func(batch []json.RawMessage) error {
				rows, err := store.EraseRows(ctx, batch, filter)
				if err != nil || len(rows) == 0 {
					return err
				}
				maps.Copy(erased, rows)
				jobs, err := store.EraseArchived(ctx, slices.Collect(maps.Values(rows)))
				done.Jobs += int64(jobs)
				return err
			}); err != nil {
				return err
			}
		}
		for _, m := range all {
			if err := a.erasedInDatabase(ctx, store, &m, erased); err != nil {
				return err
			}
		}
		for i := range all {
			n, err := a.rewrite(ctx, &all[i], erasure, erased)
			done.Entries += n
			if err != nil {
				return err
			}
		}
		return a.deleteUnnamed(ctx, all)
	})
	if err == nil && !ran {
		err = fmt.Errorf("archive %s: another process has been writing it for %s", a, retentionTimeout)
	}
	return done, err
}

// Erased is what an erasure of the archive came to.
type Erased struct {
	Entries int64 // that were erased
	Units   int64 // that were looked through
	Jobs    int64 // of those entries, which River still had
}

// erasedInDatabase adds entries whose moves a unit has, with details, and that were erased in the database, by this erasure or
// an earlier one: nil in place of a line.
func (a *Archive) erasedInDatabase(ctx context.Context, store *deadletter.Store, m *Manifest, erased map[uuid.UUID]json.RawMessage) error {
	ids := map[uuid.UUID]bool{}
	ask := func() error {
		were, err := store.WereErased(ctx, slices.Collect(maps.Keys(ids)))
		for _, id := range were {
			erased[id] = nil
		}
		clear(ids)
		return err
	}
	if err := a.Audit(ctx, m, func(line []byte) error {
		entry, has, err := detailOf(line)
		if _, known := erased[entry]; err != nil || !has || known {
			return err
		}
		if ids[entry] = true; len(ids) < page {
			return nil
		}
		return ask()
	}); err != nil || len(ids) == 0 {
		return err
	}
	return ask()
}

// entryID is the id of an entry's line.
func entryID(line []byte) (uuid.UUID, error) {
	var e struct {
		ID uuid.UUID `json:"id"`
	}
	err := json.Unmarshal(line, &e)
	return e.ID, err
}

// detailOf says whose move a line is, and whether it has a detail that may be personal: which run made it is not.
func detailOf(line []byte) (entry uuid.UUID, has bool, err error) {
	var t struct {
		EntryID uuid.UUID                  `json:"entry_id"`
		Detail  map[string]json.RawMessage `json:"detail"`
	}
	err = json.Unmarshal(line, &t)
	delete(t.Detail, "run")
	delete(t.Detail, "erased")
	return t.EntryID, len(t.Detail) > 0, err
}

// holds counts what a unit holds of erased entries: the entries, and details of their moves.
func (a *Archive) holds(ctx context.Context, m *Manifest, erased map[uuid.UUID]json.RawMessage) (entries, details int64, err error) {
	if err := a.Entries(ctx, m, func(line []byte) error {
		id, err := entryID(line)
		if erased[id] != nil {
			entries++
		}
		return err
	}); err != nil {
		return 0, 0, err
	}
	err = a.Audit(ctx, m, func(line []byte) error {
		entry, has, err := detailOf(line)
		if _, of := erased[entry]; has && of {
			details++
		}
		return err
	})
	return entries, details, err
}

// rewrite writes a unit anew, if it holds anything of erased entries, and returns how many entries that were. m becomes its
// new manifest.
func (a *Archive) rewrite(ctx context.Context, m *Manifest, erasure uuid.UUID, erased map[uuid.UUID]json.RawMessage) (int64, error) {
	if len(erased) == 0 {
		return 0, nil
	}
	entries, details, err := a.holds(ctx, m, erased)
	if err != nil || entries+details == 0 {
		return 0, err
	}
	unit := a.NewUnit(*m)
	unit.manifest.Entries, unit.manifest.Audit = nil, nil
	unit.manifest.Erasures = append(unit.manifest.Erasures, Erasure{ID: erasure, At: time.Now().UTC(), Entries: entries})
	unit.suffix = "-" + erasure.String()
	defer unit.Abandon()
	if err := a.Entries(ctx, m, func(line []byte) error {
		id, err := entryID(line)
		if err != nil {
			return err
		}
		if blank := erased[id]; blank != nil {
			line = blank
		}
		return unit.add(ctx, &unit.entries, entriesName, string(line))
	}); err != nil {
		return 0, err
	}
	if err := a.Audit(ctx, m, func(line []byte) error {
		entry, has, err := detailOf(line)
		if err != nil {
			return err
		}
		if _, of := erased[entry]; has && of {
			if line, err = withoutDetail(line); err != nil {
				return err
			}
		}
		return unit.add(ctx, &unit.audit, auditName, string(line))
	}); err != nil {
		return 0, err
	}
	rewritten, err := unit.Close(ctx)
	if err == nil {
		*m = *rewritten
	}
	return entries, err
}

// withoutDetail takes what an edit put into a payload out of a line, and leaves which run made it.
func withoutDetail(line []byte) ([]byte, error) {
	var row map[string]json.RawMessage
	if err := json.Unmarshal(line, &row); err != nil {
		return nil, err
	}
	var detail map[string]json.RawMessage
	if err := json.Unmarshal(row["detail"], &detail); err != nil {
		return nil, err
	}
	left := map[string]json.RawMessage{"erased": json.RawMessage("true")}
	if run, has := detail["run"]; has {
		left["run"] = run
	}
	var err error
	if row["detail"], err = json.Marshal(left); err != nil {
		return nil, err
	}
	return json.Marshal(row)
}

// deleteUnnamed deletes files in the folders of whole units that their manifests do not name: what units held before they
// were rewritten, by this erasure or by one that was cut short.
func (a *Archive) deleteUnnamed(ctx context.Context, units []Manifest) error {
	named := map[string]bool{}
	for _, m := range units {
		named[path.Join(m.Unit, manifestName)] = true
		for _, f := range []*File{m.Entries, m.Audit} {
			if f != nil {
				named[path.Join(m.Unit, f.Name)] = true
			}
		}
	}
	list := a.bucket.List(nil)
	for {
		object, err := list.Next(ctx)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("archive %s: %w", a, err)
		}
		if named[object.Key] || !named[path.Join(path.Dir(object.Key), manifestName)] {
			continue
		}
		if err := a.bucket.Delete(ctx, object.Key); err != nil {
			return fmt.Errorf("archive %s: %s was rewritten, but could not be deleted: %w", a, object.Key, err)
		}
	}
}
