package postgres

import (
	"encoding/json"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"
)

// passing lists the classes of SQLSTATE that say nothing about a statement's data: the statement
// may succeed later, and until then all statements of its kind fail. They are connections (08, 28,
// 3D), transactions (25, 40), resources and locks (53, 55), an operator or the system (57, 58, F0,
// HV, XX), and dlqd's own tables, functions and rights, which an upgrade or an administrator
// restores (0A for an outdated plan; 3F, 42). dlq.may_pass has the same list.
var passing = []string{"08", "0A", "25", "28", "3D", "3F", "40", "42", "53", "55", "57", "58", "F0", "HV", "XX"}

// dataCorrupted is in class XX, but is about one row.
const dataCorrupted = "XX001"

// IsRefusal reports whether an error is caused by a statement's data, so that every retry fails:
// bad data, a constraint, an application's trigger with any SQLSTATE, or a value that cannot be
// encoded as JSON. Errors that may pass, such as a deadlock or a lost connection, are not refusals.
func IsRefusal(err error) bool {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code == dataCorrupted || !slices.Contains(passing, pgErr.Code[:2])
	}
	var marshaler *json.MarshalerError
	var value *json.UnsupportedValueError
	return errors.As(err, &marshaler) || errors.As(err, &value)
}

// IsCollision reports whether another transaction prevented this one: by a deadlock, or with "tuple to be locked was
// already moved to another partition". The transaction succeeds when it is retried.
func IsCollision(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

// IsLocked reports whether a statement waited for another session's lock for longer than it may.
func IsLocked(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "55P03"
}
