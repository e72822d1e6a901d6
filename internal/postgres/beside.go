package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/version"
)

const (
	// oldestProgram is the schema version of the oldest dlqd release that works on the schema of this program.
	// docs/versions.md lists the releases. CONTRIBUTING.md says which changes require a higher value.
	oldestProgram = 28

	// settingOldestProgram and settingProgram are keys of dlq.settings. Their values are the constant oldestProgram and
	// the version of the dlqd that installed the schema.
	settingOldestProgram = "oldest_program"
	settingProgram       = "program"

	// heartbeatWait is longer than two heartbeats of a running dlqd (process.Interval).
	heartbeatWait = 12 * time.Second
	heartbeatPoll = 200 * time.Millisecond
)

// ErrSchemaNew is returned by [Migrator.Check] if a newer dlqd installed the schema and this program does not work on
// that schema.
var ErrSchemaNew = errors.New("database schema is too new for this dlqd")

// ErrNotComparable is returned by [Migrator.Drift] if a newer dlqd installed the schema.
var ErrNotComparable = errors.New("a newer dlqd installed the schema")

// Newer reports whether a newer dlqd installed the schema. This program does not change such a schema.
func (s MigrationStatus) Newer() bool { return s.Version > s.Latest }

// refusal returns an [ErrSchemaNew] if this dlqd does not work on the schema, and nil otherwise. A schema without
// settingOldestProgram was installed by dlqd 0.1, or is not completely installed.
func (s MigrationStatus) refusal(schema string) error {
	by := "a newer dlqd"
	if s.Program != "" {
		by = "dlqd " + s.Program
	}
	switch {
	case s.Oldest > s.Latest:
		return fmt.Errorf("%w: %s brought schema %s to version %d, which needs a dlqd for version %d or newer; this dlqd "+
			"%s is for version %d: run the newer one", ErrSchemaNew, by, schema, s.Version, s.Oldest, version.String(), s.Latest)
	case s.Newer() && s.Oldest == 0:
		return fmt.Errorf("%w: schema %s is at version %d, and this dlqd %s supports up to %d; run a newer dlqd",
			ErrSchemaNew, schema, s.Version, version.String(), s.Latest)
	case s.Newer() && !s.CodeInstalled:
		return fmt.Errorf("%w: %s brought schema %s to version %d, and its functions are missing: run \"dlqd migrate up\" or "+
			"\"dlqd attach\" of that dlqd", ErrSchemaNew, by, schema, s.Version)
	}
	return nil
}

// Fit describes the schema for an operator: up to date, or newer and compatible.
func (s MigrationStatus) Fit() string {
	if s.Newer() {
		return fmt.Sprintf("version %d of dlqd %s, on which this dlqd (version %d) works", s.Version, s.Program, s.Latest)
	}
	return "up to date"
}

// recordOldest records which programs work on the schema of this program. It runs before the tables change, so that an
// older program that starts meanwhile refuses the schema. It runs again after the first migration, which creates
// dlq.settings.
func (m *Migrator) recordOldest(ctx context.Context) error {
	if has, err := m.hasTable(ctx, m.Schemas.DLQ, "settings"); err != nil || !has {
		return err
	}
	_, err := m.Pool.Exec(ctx, m.Schemas.Render(`INSERT INTO dlq.settings AS s (key, value)
		VALUES ('`+settingOldestProgram+`', $1), ('`+settingProgram+`', $2)
		ON CONFLICT (key) DO UPDATE SET value = excluded.value, updated_at = now() WHERE s.value <> excluded.value`),
		strconv.Itoa(oldestProgram), version.String())
	return err
}

// runningProcess is a row of dlq.processes.
type runningProcess struct {
	name, version string
	seenAt        time.Time
}

// awaitOlder returns an error if a dlqd is running that does not work on the schema of this program. It waits up to
// heartbeatWait, unless the installed schema is new enough for all running programs. The row of a process in
// dlq.processes remains after the process has ended. So only a process whose heartbeat advances counts as running.
func (m *Migrator) awaitOlder(ctx context.Context, s *MigrationStatus) error {
	if s.Version == 0 || s.Version >= oldestProgram {
		return nil
	}
	before, err := m.processes(ctx)
	if err != nil || len(before) == 0 {
		return err
	}
	m.Logger.InfoContext(ctx, "waiting to see whether a dlqd of an older version runs", "wait", heartbeatWait)
	for deadline := time.Now().Add(heartbeatWait); time.Now().Before(deadline); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(heartbeatPoll):
		}
		now, err := m.processes(ctx)
		if err != nil {
			return err
		}
		var running []string
		for id, p := range now {
			if p.seenAt.After(before[id].seenAt) {
				running = append(running, fmt.Sprintf("%s (dlqd %s)", p.name, p.version))
			}
		}
		if len(running) > 0 {
			slices.Sort(running)
			return fmt.Errorf("dlqd %s cannot run beside programs for a schema version below %d: stop %s, and run this again; "+
				"nothing was changed", version.String(), oldestProgram, strings.Join(running, ", "))
		}
	}
	return nil
}

// processes returns the processes with a heartbeat in the last minute, which may still be running.
func (m *Migrator) processes(ctx context.Context) (map[uuid.UUID]runningProcess, error) {
	rows, err := m.Pool.Query(ctx, m.Schemas.Render(`SELECT p.id, p.name, p.version, p.seen_at FROM dlq.processes p
		WHERE p.seen_at > now() - interval '1 minute'`))
	if err != nil {
		return nil, err
	}
	found := map[uuid.UUID]runningProcess{}
	var id uuid.UUID
	var p runningProcess
	_, err = pgx.ForEachRow(rows, []any{&id, &p.name, &p.version, &p.seenAt}, func() error {
		found[id] = p
		return nil
	})
	return found, err
}
