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
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/deadletter"
)

// retentionTimeout bounds how long an erasure waits for the end of a retention round or of another erasure.
const retentionTimeout = time.Hour

// ErrIncomplete means that an erasure was completed in the database, but not in the whole archive.
var ErrIncomplete = errors.New("the data was erased from the database, but not from the whole archive; erase again")

// EraseEverywhere erases the data that a filter selects from the database and, if a is not nil, from the archive. It
// returns the record of the erasure.
func EraseEverywhere(ctx context.Context, store *deadletter.Store, a *Archive, filter json.RawMessage,
	act deadletter.Act,
) (deadletter.Erasure, error) {
	record, err := store.Erase(ctx, filter, act)
	if err != nil {
		return record, err
	}
	jobs := int64(0)
	if a != nil {
		at := a.String()
		done, err := a.Erase(ctx, store, record.ID, filter)
		if err != nil {
			err = fmt.Errorf("erasure %s: %w: %w", record.ID, ErrIncomplete, err)
			return record, errors.Join(err, store.CheckErased(ctx, &record))
		}
		record.Archived, record.Archives, record.Archive, jobs = done.Entries, done.Units, &at, done.Jobs
	}
	if err := store.FinishErasure(ctx, &record, jobs); err != nil {
		return record, err
	}
	err = store.CheckErased(ctx, &record)
	return record, err
}

// Erase erases the data that a filter selects from every unit. It changes entries as [deadletter.Store.Erase] does.
// From moves it removes the details, assignees and tags. A changed unit first gets new files, then a manifest that
// names them and the erasure. Then the old files are deleted. So the unit is complete at any time. If an erasure is
// interrupted, repeating it also deletes the files that remained.
//
// Retention and other erasures wait meanwhile. If a unit cannot be read or written, Erase continues with the others and
// returns an error that names the unit. A later erasure completes it. Erase also fails if another process writes the
// archive for longer than retentionTimeout.
func (a *Archive) Erase(ctx context.Context, store *deadletter.Store, erasure uuid.UUID,
	filter json.RawMessage,
) (done Erased, err error) {
	ran, err := RunExclusive(ctx, store, retentionTimeout, func(ctx context.Context) error {
		units, incomplete, err := a.Units(ctx)
		if err != nil {
			return err
		}
		failed, err := a.Missing(ctx, store, units)
		if err != nil {
			return err
		}
		// No other process writes now, so files without a manifest belong to a unit whose writing was interrupted. They may
		// contain the person's data until the next retention round writes the unit again.
		failed = append(failed, incomplete...)
		// forEach runs fn on all units for which no earlier fn has failed.
		forEach := func(fn func(m *Manifest) error) error {
			left := units[:0]
			for _, m := range units {
				if err := fn(&m); err != nil {
					failed = append(failed, err)
				} else {
					left = append(left, m)
				}
			}
			units = left
			return ctx.Err()
		}
		// An entry and its moves may be in different units, because months of the audit trail are archived separately. The
		// entry may also still be in the database.
		erased := map[uuid.UUID]json.RawMessage{}
		if err := forEach(func(m *Manifest) error {
			done.Units++
			return a.batches(ctx, m, func([]byte) (bool, error) { return true, nil }, func(batch []json.RawMessage) error {
				rows, err := store.EraseRows(ctx, batch, filter)
				if err != nil || len(rows) == 0 {
					return err
				}
				maps.Copy(erased, rows)
				jobs, err := store.EraseArchived(ctx, slices.Collect(maps.Values(rows)))
				done.Jobs += int64(jobs)
				return err
			})
		}); err != nil {
			return err
		}
		if err := forEach(func(m *Manifest) error { return a.addErasedInDatabase(ctx, store, m, erased) }); err != nil {
			return err
		}
		if err := forEach(func(m *Manifest) error {
			n, err := a.rewrite(ctx, m, erasure, erased)
			done.Entries += n
			return err
		}); err != nil {
			return err
		}
		if err := a.deleteUnnamed(ctx, units); err != nil {
			failed = append(failed, err)
		}
		return errors.Join(failed...)
	})
	if err == nil && !ran {
		err = fmt.Errorf("archive %s: another process has been writing to it for %s; erase again later", a, retentionTimeout)
	}
	return done, err
}

// Erased counts the results of an erasure of the archive.
type Erased struct {
	Entries int64 // erased entries
	Units   int64 // units that were searched
	Jobs    int64 // jobs of erased entries that River still had
}

// addErasedInDatabase adds entries to erased, with the value nil: entries that this or an earlier erasure erased in the
// database, and whose moves in this unit have personal data.
func (a *Archive) addErasedInDatabase(ctx context.Context, store *deadletter.Store, m *Manifest,
	erased map[uuid.UUID]json.RawMessage,
) error {
	ids := map[uuid.UUID]bool{}
	lookUp := func() error {
		erasedIDs, err := store.WereErased(ctx, slices.Collect(maps.Keys(ids)))
		for _, id := range erasedIDs {
			erased[id] = nil
		}
		clear(ids)
		return err
	}
	if err := a.Audit(ctx, m, func(line []byte) error {
		entry, has, err := parseMove(line)
		if _, known := erased[entry]; err != nil || !has || known {
			return err
		}
		if ids[entry] = true; len(ids) < page {
			return nil
		}
		return lookUp()
	}); err != nil || len(ids) == 0 {
		return err
	}
	return lookUp()
}

// entryID returns the id of an entry's line.
func entryID(line []byte) (uuid.UUID, error) {
	var e struct {
		ID uuid.UUID `json:"id"`
	}
	err := json.Unmarshal(line, &e)
	return e.ID, err
}

// parseMove returns the entry of a move's line. has reports whether the move has personal data: a detail, an assignee
// or tags. The id of the replay run in the detail is not personal data.
func parseMove(line []byte) (entry uuid.UUID, has bool, err error) {
	var t struct {
		EntryID uuid.UUID                  `json:"entry_id"`
		Detail  map[string]json.RawMessage `json:"detail"`
		Reason  string                     `json:"reason"`
	}
	err = json.Unmarshal(line, &t)
	delete(t.Detail, "run")
	delete(t.Detail, "erased")
	return t.EntryID, len(t.Detail) > 0 || reasonWithoutNames(t.Reason) != t.Reason, err
}

// reasonWithoutNames returns the reason of a move without the assignee or the tags, as dlq.reason_without_names does.
func reasonWithoutNames(reason string) string {
	switch {
	case strings.HasPrefix(reason, "assigned to ") && reason != "assigned to nobody":
		return "assigned"
	case strings.HasPrefix(reason, "tagged "):
		return "tagged"
	}
	return reason
}

// countErased counts the erased entries in a unit, and the moves of erased entries that have personal data.
func (a *Archive) countErased(ctx context.Context, m *Manifest,
	erased map[uuid.UUID]json.RawMessage,
) (entries, moves int64, err error) {
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
		entry, has, err := parseMove(line)
		if _, isErased := erased[entry]; has && isErased {
			moves++
		}
		return err
	})
	return entries, moves, err
}

// rewrite replaces a unit with data of erased entries, and sets m to the new manifest. It returns the number of erased
// entries in the unit. It does nothing for a unit without such data.
func (a *Archive) rewrite(ctx context.Context, m *Manifest, erasure uuid.UUID,
	erased map[uuid.UUID]json.RawMessage,
) (int64, error) {
	if len(erased) == 0 {
		return 0, nil
	}
	entries, moves, err := a.countErased(ctx, m, erased)
	if err != nil || entries+moves == 0 {
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
		entry, has, err := parseMove(line)
		if err != nil {
			return err
		}
		if _, isErased := erased[entry]; has && isErased {
			if line, err = eraseMove(line); err != nil {
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

// eraseMove removes the detail and the names in the reason from a move's line, as dlq.erase_trail does. It keeps the id
// of the replay run in the detail.
func eraseMove(line []byte) ([]byte, error) {
	var t struct {
		Detail map[string]json.RawMessage `json:"detail"`
		Reason *string                    `json:"reason"`
	}
	var row map[string]json.RawMessage
	err := errors.Join(json.Unmarshal(line, &t), json.Unmarshal(line, &row))
	if err != nil {
		return nil, err
	}
	if t.Detail != nil {
		left := map[string]json.RawMessage{"erased": json.RawMessage("true")}
		if run, has := t.Detail["run"]; has {
			left["run"] = run
		}
		if row["detail"], err = json.Marshal(left); err != nil {
			return nil, err
		}
	}
	if t.Reason != nil {
		if row["reason"], err = json.Marshal(reasonWithoutNames(*t.Reason)); err != nil {
			return nil, err
		}
	}
	return json.Marshal(row)
}

// deleteUnnamed deletes files in the folders of complete units that the units' manifests do not name. Such files remain
// when this erasure, or an interrupted one, has rewritten a unit.
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
			return fmt.Errorf("archive %s: delete %s, which was replaced: %w", a, object.Key, err)
		}
	}
}
