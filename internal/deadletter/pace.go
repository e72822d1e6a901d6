package deadletter

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/dlqd/dlqd/internal/deadletter/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Places are consecutive time slots in a rate-limited stream of redeliveries, which all processes share. First is the
// time of the first slot.
type Places struct {
	First   time.Time
	Granted int
}

// ReservePlaces reserves count slots in the named stream, which has perSecond slots a second. The first slot is at now
// or, if earlier calls have reserved later slots, after these. If within is not nil, ReservePlaces reserves only slots
// that are at most within after now, perhaps none.
func ReservePlaces(ctx context.Context, db postgres.DB, name string, perSecond float64, count int, now time.Time,
	within *time.Duration,
) (Places, error) {
	row, err := dbsqlc.New(db).ReservePace(ctx, dbsqlc.ReservePaceParams{
		Name: name, Rate: perSecond, Count: int32(min(count, math.MaxInt32)), Now: now, Within: within,
	})
	if err != nil {
		return Places{}, fmt.Errorf("reserve places in pace %s: %w", name, err)
	}
	return Places{First: row.FirstAt, Granted: int(row.Granted)}, nil
}
