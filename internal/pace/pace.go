// Package pace gives redeliveries their places in a stream that all processes share.
package pace

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/dlqd/dlqd/internal/pace/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

// Places are places that follow one another in a stream.
type Places struct {
	First   time.Time
	Granted int
}

// Reserve takes up to count places in the stream of a name, at so many a second, from now on: all of them, or, where within
// is not nil, those that are no further ahead than that.
func Reserve(ctx context.Context, db postgres.DB, name string, perSecond float64, count int, now time.Time, within *time.Duration) (Places, error) {
	row, err := dbsqlc.New(db).ReservePace(ctx, dbsqlc.ReservePaceParams{Name: name, Rate: perSecond, Count: int32(min(count, math.MaxInt32)), Now: now, Within: within})
	if err != nil {
		return Places{}, fmt.Errorf("pace of %s: %w", name, err)
	}
	return Places{First: row.FirstAt, Granted: int(row.Granted)}, nil
}
