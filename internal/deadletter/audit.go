package deadletter

import (
	"context"
	"encoding/json"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
)

// AuditFilter selects audit rows. A field that is not set matches every row.
type AuditFilter struct {
	Actor         string     `json:"actor,omitempty"`
	People        bool       `json:"people,omitempty"`
	DBUser        string     `json:"dbUser,omitempty"`
	Origin        string     `json:"origin,omitempty"`
	EntryID       string     `json:"entryId,omitempty"`
	Queue         string     `json:"queue,omitempty"`
	Kind          string     `json:"kind,omitempty"`
	From          string     `json:"from,omitempty"`
	To            string     `json:"to,omitempty"`
	Text          string     `json:"text,omitempty"`
	ConfigVersion string     `json:"configVersion,omitempty"`
	Operation     string     `json:"operation,omitempty"`
	Grouped       bool       `json:"grouped,omitempty"`
	After         *time.Time `json:"after,omitempty"`
	Before        *time.Time `json:"before,omitempty"`
}

// AuditRow is a row of the audit trail: a move of an entry, or an action on something else.
type AuditRow struct {
	ID            int64           `json:"id" doc:"Identifies the row. Rows are ordered by at, then by id." db:"id"`
	At            time.Time       `json:"at" doc:"Time of the action." db:"at"`
	Actor         string          `json:"actor" doc:"User, worker or part of dlqd that acted." db:"actor"`
	DBUser        string          `json:"dbUser" doc:"Database user of the session." db:"db_user"`
	Origin        *string         `json:"origin,omitempty" doc:"Interface and address that the action came from; absent for automatic actions." db:"origin"`
	EntryID       *uuid.UUID      `json:"entryId,omitempty" doc:"The entry; absent for actions on something else, which reason names." db:"entry_id"`
	FromStatus    *Status         `json:"fromStatus,omitempty" doc:"Absent for a capture." db:"from_status"`
	ToStatus      *Status         `json:"toStatus,omitempty" doc:"Status after the move." db:"to_status"`
	Reason        *string         `json:"reason,omitempty" doc:"Description of the action." db:"reason"`
	Note          *string         `json:"note,omitempty" doc:"Note of the operator." db:"note"`
	Queue         *string         `json:"queue,omitempty" doc:"Queue of the entry." db:"queue"`
	Kind          *string         `json:"kind,omitempty" doc:"Kind of the entry." db:"kind"`
	ErrorClass    *string         `json:"errorClass,omitempty" doc:"Class of the entry after the move." db:"error_class"`
	RiverJobID    *int64          `json:"jobId,omitempty" doc:"The job that caused the move." db:"river_job_id"`
	ConfigVersion *string         `json:"configVersion,omitempty" doc:"Version of the policy that last decided the entry; for actions of operators, the version active at the time." db:"config_version"`
	Detail        json.RawMessage `json:"detail,omitempty" doc:"Further data, such as the payload after an edit." db:"detail"`
	Operation     *uuid.UUID      `json:"operation,omitempty" doc:"Operation that the action is part of." db:"operation"`
}

// AuditCursor identifies the last audit row of a page; the next page begins after that row. The zero cursor selects the
// first page.
type AuditCursor struct {
	At time.Time
	ID int64
}

// Audit returns up to most audit rows that match a filter, newest first. It begins after the row of cursor, or with the
// newest row if cursor is zero.
func (s *Store) Audit(ctx context.Context, f AuditFilter, most int, cursor AuditCursor) ([]AuditRow, error) {
	filter, err := json.Marshal(f)
	if err != nil {
		return nil, err
	}
	rows, err := s.db.Query(ctx, `SELECT id, at, actor, db_user, origin, entry_id, from_status, to_status, reason, note,
		queue, kind, error_class, river_job_id, config_version, detail, operation
		FROM dlq.audit($1, $2, $3, $4)`, json.RawMessage(filter), most,
		pgtype.Timestamptz{Time: cursor.At, Valid: !cursor.At.IsZero()}, cursor.ID)
	if err != nil {
		return nil, AsMoveError(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowToStructByName[AuditRow])
	return got, AsMoveError(err)
}
