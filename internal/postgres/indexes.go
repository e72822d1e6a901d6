package postgres

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// concurrently begins the section of a migration whose indexes are built outside the migration's transaction, without
// blocking writes. The section has only CREATE INDEX statements, and each ends at the end of a line. The section ends
// where the migration's Down begins.
const concurrently = "-- +dlqd concurrently\n"

var createIndex = regexp.MustCompile(`(?ms)^CREATE INDEX (\w+) ON (\S+) (.+?);$`)

// withoutIndexes returns the part of a migration that goose runs: all but the section that begins with the line in the
// constant concurrently.
func withoutIndexes(migration string) string {
	begin := strings.Index(migration, concurrently)
	if begin < 0 {
		return migration
	}
	_, down, _ := strings.Cut(migration[begin:], "-- +goose Down")
	return migration[:begin] + "-- +goose Down" + down
}

// buildIndexes builds the indexes that migrations list in sections that begin with the line concurrently, if an index
// is missing or invalid. An interrupted build leaves an invalid index. An index of a partitioned table is built for
// each partition and then attached. Builds on tables above smallTable do not block writes.
func (m *Migrator) buildIndexes(ctx context.Context) error {
	migrations, err := migrationFiles()
	if err != nil {
		return err
	}
	for _, file := range migrations {
		_, indexes, _ := strings.Cut(file.up(), concurrently)
		for _, index := range createIndex.FindAllStringSubmatch(m.Schemas.Render(indexes), -1) {
			if err := m.buildIndex(ctx, index[1], index[2], index[3]); err != nil {
				return fmt.Errorf("index %s: %w", index[1], err)
			}
		}
	}
	return nil
}

const (
	// smallTable is the size of a table, in bytes, up to which an index is built in a transaction that blocks writes,
	// unless Migrator.Concurrently is set. Such a build takes less than 200 ms. Unlike CREATE INDEX CONCURRENTLY, it does
	// not wait for older transactions.
	smallTable = 32 << 20
	// indexTimeout bounds one build. CREATE INDEX CONCURRENTLY waits for all older transactions of the database.
	indexTimeout = 30 * time.Minute
)

// indexState is the state of an index and its table.
type indexState struct {
	Found, Valid bool
	Bytes        int64 // of the table with its partitions
	Partitioned  bool
}

func (m *Migrator) buildIndex(ctx context.Context, name, table, definition string) error {
	state, err := m.indexState(ctx, name, table)
	if err != nil || state.Valid {
		return err
	}
	switch {
	case !state.Found && state.Bytes <= smallTable && !m.Concurrently:
		return m.indexInTx(ctx, fmt.Sprintf("CREATE INDEX %s ON %s %s", name, table, definition))
	case !state.Partitioned:
		return m.indexConcurrently(ctx, state.Found, name, table, definition)
	case !state.Found:
		// Partitions that are created after this statement get the index.
		if err := m.indexInTx(ctx, fmt.Sprintf("CREATE INDEX %s ON ONLY %s %s", name, table, definition)); err != nil {
			return err
		}
	}
	rows, err := m.Pool.Query(ctx, `
		SELECT t.inhrelid::regclass::text, c.relname::text FROM pg_inherits t JOIN pg_class c ON c.oid = t.inhrelid
		WHERE t.inhparent = $1::regclass
		  AND NOT EXISTS (SELECT FROM pg_inherits i JOIN pg_index x ON x.indexrelid = i.inhrelid
		                  WHERE i.inhparent = $2::regclass AND x.indrelid = t.inhrelid)
		ORDER BY c.relname`, table, m.Schemas.DLQ+"."+name)
	if err != nil {
		return err
	}
	type partition struct{ Table, Name string }
	partitions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[partition])
	if err != nil {
		return err
	}
	_, parent, _ := strings.Cut(table, ".")
	for _, p := range partitions {
		child := p.Name + strings.TrimPrefix(name, parent)
		state, err := m.indexState(ctx, child, p.Table)
		if err == nil && !state.Valid {
			err = m.indexConcurrently(ctx, state.Found, child, p.Table, definition)
		}
		if err == nil {
			attach := fmt.Sprintf("ALTER INDEX %[1]s.%[2]s ATTACH PARTITION %[1]s.%[3]s", m.Schemas.DLQ, name, child)
			err = m.indexInTx(ctx, attach)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", child, err)
		}
	}
	return nil
}

func (m *Migrator) indexState(ctx context.Context, name, table string) (s indexState, err error) {
	err = m.Pool.QueryRow(ctx, `
		SELECT x.indexrelid IS NOT NULL, coalesce(x.indisvalid, false), c.relkind = 'p',
		       (SELECT coalesce(sum(pg_relation_size(t.relid)), 0) FROM pg_partition_tree(c.oid) t)::bigint
		FROM pg_class c LEFT JOIN pg_index x ON x.indexrelid = to_regclass($1)
		WHERE c.oid = $2::regclass`, m.Schemas.DLQ+"."+name, table).Scan(&s.Found, &s.Valid, &s.Partitioned, &s.Bytes)
	return s, err
}

func (m *Migrator) indexInTx(ctx context.Context, statement string) error {
	return m.withShortLocks(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, statement)
		return err
	})
}

// indexConcurrently builds the index of a table that is not partitioned, without blocking writes.
// If found is set, it first drops the invalid index that an earlier build left.
func (m *Migrator) indexConcurrently(ctx context.Context, found bool, name, table, definition string) error {
	ctx, cancel := context.WithTimeout(ctx, indexTimeout)
	defer cancel()
	if found {
		if _, err := m.Pool.Exec(ctx, "DROP INDEX CONCURRENTLY "+m.Schemas.DLQ+"."+name); err != nil {
			return err
		}
	}
	m.Logger.InfoContext(ctx, "building an index without blocking writes", "index", name, "table", table)
	_, err := m.Pool.Exec(ctx, fmt.Sprintf("CREATE INDEX CONCURRENTLY %s ON %s %s", name, table, definition))
	return err
}
