package postgres

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"slices"

	"github.com/jackc/pgx/v5/pgconn"
)

// passing lists the classes of SQLSTATE that do not depend on a statement's data: until their cause is gone, all
// statements of the kind fail, and afterwards the statement may succeed. The classes are connections (08, 28, 3D),
// transactions (25, 40), resources and locks (53, 55), intervention by an operator or the system (57, 58, F0, HV, XX),
// and dlqd's own tables, functions and rights, which an upgrade or an administrator restores (0A for an outdated plan;
// 3F, 42). dlq.may_pass has the same list.
var passing = []string{"08", "0A", "25", "28", "3D", "3F", "40", "42", "53", "55", "57", "58", "F0", "HV", "XX"}

// dataCorrupted is in class XX, but concerns a single row.
const dataCorrupted = "XX001"

// IsRefusal reports whether an error is caused by a statement's data, so that every retry fails:
// bad data, a constraint, an application's trigger with any SQLSTATE, or a value that cannot be
// encoded as JSON. Errors that may pass, such as a deadlock or a lost connection, are not refusals.
func IsRefusal(err error) bool {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return pgErr.Code == dataCorrupted || !IsNotifyQueueFull(err) && !slices.Contains(passing, pgErr.Code[:2])
	}
	var marshaler *json.MarshalerError
	var value *json.UnsupportedValueError
	return errors.As(err, &marshaler) || errors.As(err, &value)
}

// IsNotifyQueueFull reports whether a commit failed because the server's notification queue is full, which happens if a
// listening session does not end its transaction. The SQLSTATE is 54000, the same as for a value that is too large for
// an index. Only the name of the function in Postgres, which no language setting translates, distinguishes the two
// errors. dlq.may_pass has no such check, because an SQL function cannot catch an error of the commit.
func IsNotifyQueueFull(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "54000" && pgErr.Routine == "PreCommit_Notify"
}

// IsCollision reports whether a transaction failed because of a concurrent one: by a deadlock, or with "tuple to be
// locked was already moved to another partition". The transaction can succeed when it is retried.
func IsCollision(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

// IsLocked reports whether a statement failed because it waited longer than lock_timeout for another session's lock, or
// found that lock with NOWAIT.
func IsLocked(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "55P03"
}

// IsCancelled reports whether Postgres cancelled a statement: it reached statement_timeout, or an operator cancelled
// it.
func IsCancelled(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "57014"
}

// away lists the SQLSTATEs with which a server refuses a connection that it may accept later: the server is starting,
// stopping or recovering, or all its connections are in use.
var away = []string{"53300", "57P01", "57P02", "57P03"}

// IsAway reports whether a connection failed because no server answers, or because no server accepts connections or
// writes yet. It returns false if a server refuses the user, the password or the database.
func IsAway(err error) bool {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return slices.Contains(away, pgErr.Code)
	}
	// Do not test for net.Error: the error of a missing file implements it, too.
	_, network := errors.AsType[*net.OpError](err)
	_, unresolved := errors.AsType[*net.DNSError](err)
	return network || unresolved || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errStandby)
}

// IsUnanswered reports whether a statement failed because the server is away ([IsAway]), because Postgres cancelled the
// statement ([IsCancelled]), or because another session held a lock ([IsLocked]).
func IsUnanswered(err error) bool {
	return IsAway(err) || IsLocked(err) || IsCancelled(err)
}
