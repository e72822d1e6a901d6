package deadletter

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/dlqd/dlqd/internal/deadletter/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Places are consecutive time slots in a rate-limited stream of redeliveries that all processes share. The first slot
// is at First.
type Places struct {
	First   time.Time
	Granted int
}

// ReservePlaces reserves up to count slots in the named stream, which has perSecond slots a second, from now on. If
// within is nil, it reserves all count slots. Otherwise it reserves only slots that are at most within ahead of now.
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
