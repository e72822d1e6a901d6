package postgres

import (
	"errors"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"
)

// IsRefusal recognises errors that the data of a statement brings on, so that it fails however often it is tried: bad
// data (SQLSTATE class 22), a broken constraint (23), a limit of the server's (54), a trigger that raises (P0). Anything
// else, such as a deadlock or a lost connection, may pass.
func IsRefusal(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && slices.Contains([]string{"22", "23", "54", "P0"}, pgErr.Code[:2])
}

// IsCollision recognises that another transaction was in the way: "tuple to be locked was already moved to another partition",
// and deadlocks. The same transaction succeeds when it is tried again.
func IsCollision(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}
