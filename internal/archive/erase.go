package archive

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
)

// erasedDetail is what is left of what an edit put into a payload.
var erasedDetail = json.RawMessage(`{"erased": true}`)

// Erase takes the data of whoever a filter names out of every unit: of entries, what [deadletter.Store.Erase] takes out of
// those in the database; of moves, the details. A unit that changes gets new files, then a manifest that names them and the
// erasure, and then loses the old ones, so that it is whole at every moment. An erasure that is cut short is done again.
// It returns how many entries it erased and how many units it looked through.
func (a *Archive) Erase(ctx context.Context, store *deadletter.Store, erasure uuid.UUID, filter json.RawMessage) (entries int64, units int, err error) {
	all, err := a.Units(ctx)
	if err != nil {
		return 0, 0, err
	}
	// An entry's moves may be in another unit than the entry: days of the audit trail are their own.
	erased := map[uuid.UUID]json.RawMessage{}
	for _, m := range all {
		if err := a.matches(ctx, store, &m, filter, erased); err != nil {
			return 0, 0, err
		}
	}
	if len(erased) == 0 {
		return 0, len(all), nil
	}
	for _, m := range all {
		n, err := a.rewrite(ctx, &m, erasure, erased)
		entries += n
		if err != nil {
			return entries, len(all), err
		}
	}
	return entries, len(all), nil
}

// matches adds the entries of a unit that the filter chooses, as they will be.
func (a *Archive) matches(ctx context.Context, store *deadletter.Store, m *Manifest, filter json.RawMessage, erased map[uuid.UUID]json.RawMessage) error {
	var batch []json.RawMessage
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		rows, err := store.EraseRows(ctx, batch, filter)
		maps.Copy(erased, rows)
		batch = batch[:0]
		return err
	}
	if err := a.Entries(ctx, m, func(line []byte) error {
		if batch = append(batch, append(json.RawMessage(nil), line...)); len(batch) < page {
			return nil
		}
		return flush()
	}); err != nil {
		return err
	}
	return flush()
}

// rewrite writes a unit anew, if it holds anything of erased entries.
func (a *Archive) rewrite(ctx context.Context, m *Manifest, erasure uuid.UUID, erased map[uuid.UUID]json.RawMessage) (entries int64, err error) {
	unit := a.NewUnit(*m)
	unit.manifest.Entries, unit.manifest.Audit = nil, nil
	unit.suffix = "-" + erasure.String()
	defer unit.Abandon()
	details := 0
	if err := a.Entries(ctx, m, func(line []byte) error {
		var e struct {
			ID uuid.UUID `json:"id"`
		}
		if err := json.Unmarshal(line, &e); err != nil {
			return err
		}
		if blank := erased[e.ID]; blank != nil {
			entries++
			line = blank
		}
		return unit.add(ctx, &unit.entries, entriesName, string(line))
	}); err != nil {
		return 0, err
	}
	if err := a.Audit(ctx, m, func(line []byte) error {
		var t struct {
			EntryID uuid.UUID       `json:"entry_id"`
			Detail  json.RawMessage `json:"detail"`
		}
		if err := json.Unmarshal(line, &t); err != nil {
			return err
		}
		if erased[t.EntryID] != nil && len(t.Detail) > 0 && string(t.Detail) != "null" {
			details++
			var row map[string]json.RawMessage
			if err := json.Unmarshal(line, &row); err != nil {
				return err
			}
			row["detail"] = erasedDetail
			if line, err = json.Marshal(row); err != nil {
				return err
			}
		}
		return unit.add(ctx, &unit.audit, auditName, string(line))
	}); err != nil {
		return 0, err
	}
	if entries == 0 && details == 0 {
		return 0, nil
	}
	unit.manifest.Erasures = append(unit.manifest.Erasures, Erasure{ID: erasure, At: time.Now().UTC(), Entries: entries})
	if _, err := unit.Close(ctx); err != nil {
		return 0, err
	}
	for _, old := range []*File{m.Entries, m.Audit} {
		if old == nil {
			continue
		}
		if err := a.bucket.Delete(ctx, path.Join(m.Unit, old.Name)); err != nil {
			return entries, fmt.Errorf("archive %s: %s/%s was rewritten, but could not be deleted: %w", a, m.Unit, old.Name, err)
		}
	}
	return entries, nil
}
