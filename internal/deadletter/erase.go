package deadletter

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/deadletter/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Erasure is the record of an erasure.
type Erasure struct {
	ID           uuid.UUID  `json:"id" doc:"Identifies the erasure." db:"id"`
	At           time.Time  `json:"at" doc:"Time at which the erasure started." db:"at"`
	Actor        string     `json:"actor" doc:"User that started it." db:"actor"`
	DBUser       string     `json:"dbUser" doc:"Database user of the session." db:"db_user"`
	Origin       *string    `json:"origin,omitempty" doc:"Interface and address that it came from." db:"origin"`
	Note         *string    `json:"note,omitempty" doc:"Reason that the user gave." db:"note"`
	FilterSHA256 string     `json:"filterSha256" doc:"SHA-256 of the filter. The filter itself is not stored, because it identifies the person." db:"filter_sha256"`
	Fields       []string   `json:"fields" doc:"Fields that the filter uses." db:"fields"`
	Entries      int64      `json:"entries" doc:"Entries erased from the database." db:"entries"`
	Jobs         int64      `json:"jobs" doc:"River jobs whose data was erased." db:"jobs"`
	UnderWay     int64      `json:"underWay" doc:"Entries that were skipped because a redelivery was in progress or another session held them, plus replay runs and requests for approval that had not ended. Repeat the erasure when they have ended." db:"under_way"`
	Archived     int64      `json:"archived" doc:"Entries erased from the archive." db:"archived"`
	Archives     int64      `json:"archives" doc:"Units of the archive that were searched." db:"archives"`
	Archive      *string    `json:"archive,omitempty" doc:"Location of the archive; absent if none was searched." db:"archive"`
	FinishedAt   *time.Time `json:"finishedAt,omitempty" doc:"Time at which the erasure finished; absent while it runs, and if entries were skipped." db:"finished_at"`
	Leaves       []Leaves   `json:"leaves,omitempty" doc:"Rows that the erasure left and that may name the person. Only in the answer to the erasure." db:"-"`
	Unanalyzed   []string   `json:"unanalyzed,omitempty" doc:"Tables whose statistics may still have erased values, because dlqd may not analyze them, or another session held them; their owner runs ANALYZE. Only in the answer to the erasure." db:"-"`
}

// Leaves describes rows of a table that an erasure did not change, but that may still name the person.
type Leaves struct {
	Table   string   `json:"table" doc:"Table of the database." db:"table_name"`
	Columns []string `json:"columns" doc:"Its columns with texts of senders, receivers and operators." db:"columns"`
	Rows    int64    `json:"rows" doc:"Number of rows that belong to erased entries." db:"row_count"`
	Query   string   `json:"query" doc:"SQL query that lists the rows." db:"query"`
}

const erasureColumns = "id, at, actor, db_user, origin, note, filter_sha256, fields, entries, jobs, under_way, " +
	"archived, archives, archive, finished_at"

// eraseTimeout limits the duration of an erasure.
const eraseTimeout = time.Hour

// Erase erases from the database the data of the entries that a filter selects, in batches with one transaction each.
// It first files the failures that capture missed. It returns the record of the erasure. If Erase is interrupted, also
// by its eraseTimeout, only some batches are erased, and the caller has to run it again.
func (s *Store) Erase(ctx context.Context, filter json.RawMessage, act Act) (e Erasure, err error) {
	ctx, cancel := context.WithTimeout(ctx, eraseTimeout)
	defer cancel()
	if err := s.move(ctx, func(tx postgres.DB) (err error) {
		begun, err := dbsqlc.New(tx).BeginErasure(ctx, dbsqlc.BeginErasureParams{
			Filter: filter, Note: act.Note, Actor: act.Actor,
		})
		e.ID, e.At = begun.ID, begun.At
		return err
	}); err != nil {
		return e, err
	}
	// Otherwise failures that capture missed would be filed after the erasure.
	for filed := false; !filed; {
		if filed, err = s.queries.ReconcileAll(ctx, e.At); err != nil {
			return e, err
		}
	}
	var after *uuid.UUID
	for {
		if err := s.move(ctx, func(tx postgres.DB) error {
			last, err := dbsqlc.New(tx).EraseStep(ctx, dbsqlc.EraseStepParams{Erasure: e.ID, Filter: filter, After: after})
			if err == nil {
				after = &last
			}
			return err
		}); err != nil {
			return e, err
		}
		if *after == uuid.Nil {
			break
		}
	}
	rows, err := s.db.Query(ctx, "SELECT "+erasureColumns+" FROM dlq.erasures WHERE id = $1", e.ID)
	if err != nil {
		return e, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Erasure])
}

// FinishErasure adds to the record of an erasure what was erased in archives, and the number of jobs that were erased
// for archived entries. It marks the erasure as finished, unless entries or jobs were skipped (UnderWay).
func (s *Store) FinishErasure(ctx context.Context, e *Erasure, archivedJobs int64) error {
	row, err := s.queries.FinishErasure(ctx, dbsqlc.FinishErasureParams{
		ID: e.ID, Archived: e.Archived, Archives: e.Archives, Archive: e.Archive, Jobs: archivedJobs,
	})
	e.Jobs, e.FinishedAt = row.Jobs, row.FinishedAt
	return err
}

// CheckErased runs ANALYZE on the tables that an erasure changed, because the planner's statistics contain values from
// these tables. It then lists in e the rows that may still name the person.
func (s *Store) CheckErased(ctx context.Context, e *Erasure) (err error) {
	ctx, cancel := context.WithTimeout(ctx, eraseTimeout) // without a deadline, a statement is cancelled after a minute
	defer cancel()
	if e.Unanalyzed, err = s.queries.EraseStatistics(ctx, e.ID); err != nil {
		return fmt.Errorf("erasure %s: ANALYZE failed, and statistics may still have erased values: %w", e.ID, err)
	}
	rows, err := s.db.Query(ctx, "SELECT table_name, columns, row_count, query FROM dlq.erase_leaves($1)", e.ID)
	if err == nil {
		e.Leaves, err = pgx.CollectRows(rows, pgx.RowToStructByName[Leaves])
	}
	if err != nil {
		return fmt.Errorf("erasure %s: looking for rows that may still name the person failed; "+
			"dlq.erase_leaves lists them: %w", e.ID, err)
	}
	return nil
}

// EraseArchived erases what the database still stores about archived entries, which [Store.EraseRows] returned. It
// returns the number of erased jobs.
func (s *Store) EraseArchived(ctx context.Context, entries []json.RawMessage) (jobs int, err error) {
	raw, err := json.Marshal(entries)
	if err != nil {
		return 0, err
	}
	n, err := s.queries.EraseArchived(ctx, raw)
	return int(n), AsMoveError(err)
}

// WereErased returns the ids whose entries were erased in the database.
func (s *Store) WereErased(ctx context.Context, ids []uuid.UUID) ([]uuid.UUID, error) {
	return s.queries.WereErased(ctx, ids)
}

// Erasures returns up to most records of erasures, newest first.
func (s *Store) Erasures(ctx context.Context, most int) ([]Erasure, error) {
	rows, err := s.db.Query(ctx, "SELECT "+erasureColumns+" FROM dlq.erasures ORDER BY id DESC LIMIT $1", most)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[Erasure])
}

// EraseRows removes the personal data from the given archived entries, if a filter selects them, and returns the
// changed entries by id. It changes no table; the caller writes the entries to the archive.
func (s *Store) EraseRows(ctx context.Context, entries []json.RawMessage,
	filter json.RawMessage,
) (map[uuid.UUID]json.RawMessage, error) {
	raw, err := json.Marshal(entries)
	if err != nil {
		return nil, err
	}
	rows, err := s.queries.EraseRows(ctx, dbsqlc.EraseRowsParams{Entries: raw, Filter: filter})
	erased := make(map[uuid.UUID]json.RawMessage, len(rows))
	for _, row := range rows {
		erased[row.ID] = json.RawMessage(row.Line)
	}
	return erased, AsMoveError(err)
}
