package postgres

import (
	"encoding/json"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"
)

// passing are the classes of SQLSTATE that say nothing about the data of a statement: the same statement may succeed later, and
// until then every other one of its kind fails, too. Connections (08, 28, 3D), transactions (25, 40), resources and locks (53, 55), an
// operator or the system (57, 58, F0, HV, XX), and dlqd's own tables, functions and rights, which an upgrade replaces and an
// administrator gives back (0A: a plan of before that; 3F, 42). dlq.may_pass has the same list.
var passing = []string{"08", "0A", "25", "28", "3D", "3F", "40", "42", "53", "55", "57", "58", "F0", "HV", "XX"}

// dataCorrupted is of the class XX, and says something about one row.
const dataCorrupted = "XX001"

// IsRefusal recognises errors that what a statement is about brings on, so that it fails however often it is tried: bad data, a
// constraint, a trigger of an application's, with whatever SQLSTATE it raises; and what never comes to the database, since it
// is nothing that JSON can have. What may pass, such as a deadlock or a lost connection, is none.
func IsRefusal(err error) bool {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code == dataCorrupted || !slices.Contains(passing, pgErr.Code[:2])
	}
	var marshaler *json.MarshalerError
	var value *json.UnsupportedValueError
	return errors.As(err, &marshaler) || errors.As(err, &value)
}

// IsCollision recognises that another transaction was in the way: "tuple to be locked was already moved to another partition",
// and deadlocks. The same transaction succeeds when it is tried again.
func IsCollision(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

// IsLocked recognises that what a statement needs is locked by somebody for longer than it may wait.
func IsLocked(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "55P03"
}
