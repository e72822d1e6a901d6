package archive

import (
	"context"
	"fmt"
	"time"
)

// Unit is a unit that is being written.
type Unit struct {
	archive  *Archive
	manifest Manifest
	entries  *fileWriter
	audit    *fileWriter
	suffix   string // part of the file names: a rewritten unit gets new files, which its manifest names
}

// NewUnit begins a unit. The unit exists in the archive only after [Unit.Close].
func (a *Archive) NewUnit(m Manifest) *Unit { return &Unit{archive: a, manifest: m} }

// Entry adds an entry that was closed at the given time.
func (u *Unit) Entry(ctx context.Context, line string, closedAt time.Time) error {
	u.extendPeriod(closedAt)
	return u.add(ctx, &u.entries, entriesName, line)
}

// Move adds a move. For a move in a month of the audit trail, at extends the period of the unit. For a move of an entry
// in the unit, at is zero.
func (u *Unit) Move(ctx context.Context, line string, at time.Time) error {
	if !at.IsZero() {
		u.extendPeriod(at)
	}
	return u.add(ctx, &u.audit, auditName, line)
}

func (u *Unit) extendPeriod(at time.Time) {
	if u.manifest.From.IsZero() || at.Before(u.manifest.From) {
		u.manifest.From = at
	}
	if at.After(u.manifest.To) {
		u.manifest.To = at
	}
}

func (u *Unit) add(ctx context.Context, f **fileWriter, name, line string) (err error) {
	if *f == nil {
		if *f, err = u.archive.createFile(ctx, u.manifest.Unit, name+u.suffix+dataSuffix); err != nil {
			return err
		}
	}
	if err := (*f).line(line); err != nil {
		return fmt.Errorf("archive %s: %s: %w", u.archive, u.manifest.Unit, err)
	}
	return nil
}

// Close completes the files, reads them back and writes the manifest. It writes nothing for an empty unit.
func (u *Unit) Close(ctx context.Context) (*Manifest, error) {
	if err := u.closeFiles(); err != nil {
		return nil, err
	}
	if u.manifest.Entries == nil && u.manifest.Audit == nil {
		return &u.manifest, nil
	}
	if err := u.archive.Verify(ctx, &u.manifest); err != nil {
		return nil, err
	}
	if err := u.archive.putManifest(ctx, &u.manifest); err != nil {
		return nil, fmt.Errorf("archive %s: %s: manifest: %w", u.archive, u.manifest.Unit, err)
	}
	return &u.manifest, nil
}

func (u *Unit) closeFiles() (err error) {
	for _, f := range []struct {
		writer **fileWriter
		file   **File
	}{{&u.entries, &u.manifest.Entries}, {&u.audit, &u.manifest.Audit}} {
		if *f.writer == nil {
			continue
		}
		if *f.file, err = (*f.writer).close(); err != nil {
			*f.writer = nil
			u.Abandon()
			return fmt.Errorf("archive %s: %s: %w", u.archive, u.manifest.Unit, err)
		}
		*f.writer = nil
	}
	return nil
}

// Abandon discards the unit. It does nothing after Close.
func (u *Unit) Abandon() {
	for _, f := range []**fileWriter{&u.entries, &u.audit} {
		if *f != nil {
			(*f).object.abandon()
			*f = nil
		}
	}
}
