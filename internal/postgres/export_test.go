package postgres

import (
	"context"
	"fmt"

	"github.com/pressly/goose/v3"
)

// Abandon leaves the server running and releases the data directory, as the death of the process does.
func (e *Embedded) Abandon() error { return e.lock.Unlock() }

// OldestProgram is the schema version of the oldest program that works on the schema of this program.
const OldestProgram = oldestProgram

// OldestProgramText is [OldestProgram] in the form of the numbers of migration files.
func OldestProgramText() string { return fmt.Sprintf("%05d", oldestProgram) }

// WithoutComments returns the text whose hash is the version of the functions.
var WithoutComments = withoutComments

// OpenLimited is [Open] with a given timeout for statements.
var OpenLimited = openLimited

// UpTo creates dlqd's tables with the migrations up to version, and no functions.
func (m *Migrator) UpTo(ctx context.Context, version int64) error {
	if err := m.createSchema(ctx, m.Schemas.DLQ); err != nil {
		return err
	}
	return m.withGoose(func(p *goose.Provider) error {
		_, err := p.UpTo(ctx, version)
		return err
	})
}
