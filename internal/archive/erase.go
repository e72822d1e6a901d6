package archive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"path"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/archive/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// retentionTimeout bounds how long an erasure waits for a round of retention to end.
const retentionTimeout = time.Hour

// erasedDetail is what is left of what an edit put into a payload.
var erasedDetail = json.RawMessage(`{"erased": true}`)

// Erase takes the data of whoever a filter names out of every unit: of entries, what [deadletter.Store.Erase] takes out of
// those in the database; of moves, the details. A unit that changes gets new files, then a manifest that names them and the
// erasure, and then loses the old ones, so that it is whole at every moment. An erasure that is cut short is done again;
// whatever files it left behind go then. No retention and no other erasure writes the archive meanwhile.
// It returns how many entries it erased and how many units it looked through.
func (a *Archive) Erase(ctx context.Context, store *deadletter.Store, erasure uuid.UUID, filter json.RawMessage) (entries int64, units int, err error) {
	err = store.InTx(ctx, func(tx postgres.DB) error {
		if err := waitForRetention(ctx, tx); err != nil {
			return err
		}
		all, err := a.Units(ctx)
		if err != nil {
			return err
		}
		units = len(all)
		// An entry's moves may be in another unit than the entry: months of the audit trail are their own.
		erased := map[uuid.UUID]json.RawMessage{}
		for _, m := range all {
			if err := a.batches(ctx, &m, func([]byte) (bool, error) { return true, nil }, func(batch []json.RawMessage) error {
				rows, err := store.EraseRows(ctx, batch, filter)
				maps.Copy(erased, rows)
				return err
			}); err != nil {
				return err
			}
		}
		for i := range all {
			n, err := a.rewrite(ctx, &all[i], erasure, erased)
			entries += n
			if err != nil {
				return err
			}
		}
		return a.deleteUnnamed(ctx, all)
	})
	return entries, units, err
}

func waitForRetention(ctx context.Context, tx postgres.DB) error {
	ctx, cancel := context.WithTimeout(ctx, retentionTimeout)
	defer cancel()
	return dbsqlc.New(tx).WaitForRetention(ctx)
}

// entryID is the id of an entry's line.
func entryID(line []byte) (uuid.UUID, error) {
	var e struct {
		ID uuid.UUID `json:"id"`
	}
	err := json.Unmarshal(line, &e)
	return e.ID, err
}

// detailOf says whose move a line is, and whether it has a detail.
func detailOf(line []byte) (entry uuid.UUID, has bool, err error) {
	var t struct {
		EntryID uuid.UUID       `json:"entry_id"`
		Detail  json.RawMessage `json:"detail"`
	}
	err = json.Unmarshal(line, &t)
	return t.EntryID, len(t.Detail) > 0 && string(t.Detail) != "null", err
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
		if has && erased[entry] != nil {
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
		if has && erased[entry] != nil {
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

func withoutDetail(line []byte) ([]byte, error) {
	var row map[string]json.RawMessage
	if err := json.Unmarshal(line, &row); err != nil {
		return nil, err
	}
	row["detail"] = erasedDetail
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
