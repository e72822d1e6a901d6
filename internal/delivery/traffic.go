package delivery

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// trafficSlot is the length of a slot. The times of a comparison are rounded to slots.
	trafficSlot = 10 * time.Second
	// trafficBefore is the period before a run whose deliveries are compared with those during the run.
	trafficBefore = time.Hour
	// trafficDuring limits a comparison to the last deliveries during a run, so that the first ones do not hide a later
	// change.
	trafficDuring = 2 * time.Minute
	// trafficInterval is the time between two writes of counts, trafficTimeout the limit of one.
	trafficInterval = 5 * time.Second
	trafficTimeout  = 30 * time.Second
	// trafficLeast is the number of deliveries below which a comparison says nothing.
	trafficLeast = 30
	// trafficShare is the share of the deliveries of the hour before that are slower than its 95th percentile.
	trafficShare = 0.05
	// trafficError is the significance level: a difference that arises by chance is reported with this probability. It
	// is lower than for a single comparison, because a run compares about once a second.
	trafficError = 0.001
	// trafficLevels is the number of classes of durations: powers of the square root of 2, from 1 ms on. Failures count
	// in the last class.
	trafficLevels = 48
)

// Traffic counts deliveries by destination, so that a replay run sees whether it harms other traffic. Each process adds
// its counts to dlq.destination_traffic, and a comparison reads the counts of all processes.
type Traffic struct {
	db postgres.DB

	mu  sync.Mutex
	new map[trafficSlotOf]*trafficLevelsOf // not written yet
}

type trafficLevelsOf [trafficLevels]int

type trafficSlotOf struct {
	destination string
	run         uuid.UUID // uuid.Nil: of no replay run
	slot        int64
}

// NewTraffic returns counts that are written to a database.
func NewTraffic(db postgres.DB) *Traffic {
	return &Traffic{db: db, new: map[trafficSlotOf]*trafficLevelsOf{}}
}

func slotOf(at time.Time) int64 { return at.Unix() / int64(trafficSlot/time.Second) }

func slotTime(slot int64) time.Time { return time.Unix(slot*int64(trafficSlot/time.Second), 0).UTC() }

// Observe counts a delivery that ended at a time. It is for [Config.Observe].
func (t *Traffic) Observe(d *Delivered, at time.Time) {
	if d.Destination == "" || d.Outcome == OutcomeHeld {
		return
	}
	level := trafficLevels - 1
	if d.Available {
		level = min(int(2*math.Log2(max(d.Took.Seconds()*1000, 1))), trafficLevels-2)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	key := trafficSlotOf{d.Destination, d.Run, slotOf(at)}
	if t.new[key] == nil {
		t.new[key] = &trafficLevelsOf{}
	}
	t.new[key][level]++
}

// Loop returns the loop that writes the counts.
func (t *Traffic) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "traffic", Interval: trafficInterval, Timeout: trafficTimeout, Patience: trafficTimeout,
		Failing: "writing counts of deliveries failed: replay runs do not see whether they harm other deliveries",
		Once:    background.Each(t.Write),
	})
}

// Write adds the counts since the last call to those of all processes. Counts that it cannot write are lost. A
// comparison then has fewer deliveries to compare: it finds less, but reports nothing wrong.
func (t *Traffic) Write(ctx context.Context) error {
	type row struct {
		Destination string           `json:"destination"`
		At          time.Time        `json:"at"`
		Run         uuid.UUID        `json:"run"`
		Deliveries  *trafficLevelsOf `json:"deliveries"`
	}
	t.mu.Lock()
	rows := make([]row, 0, len(t.new))
	for key, levels := range t.new {
		rows = append(rows, row{key.destination, slotTime(key.slot), key.run, levels})
	}
	clear(t.new)
	t.mu.Unlock()
	if len(rows) == 0 {
		return nil
	}
	counts, err := json.Marshal(rows)
	if err != nil {
		return err
	}
	return dbsqlc.New(t.db).AddTraffic(ctx, counts)
}

// Worse returns how the deliveries to a destination that are not of a run have become worse since it began, compared
// with the hour before: a greater share fails, or is slower than the 95th percentile of that hour, by Fisher's exact
// test. It looks at those from a time on. It returns "" if they have not, or if there are too few to tell.
func (t *Traffic) Worse(ctx context.Context, destination string, run uuid.UUID, began, from, now time.Time) (
	string, error,
) {
	if from.Before(now.Add(-trafficDuring)) {
		from = now.Add(-trafficDuring)
	}
	rows, err := dbsqlc.New(t.db).TrafficOf(ctx, dbsqlc.TrafficOfParams{
		Destination: destination, Run: run, Since: slotTime(slotOf(began.Add(-trafficBefore))),
		Began: slotTime(slotOf(began)), After: slotTime(slotOf(from) + 1), Until: slotTime(slotOf(now) + 1),
	})
	if err != nil {
		return "", err
	}
	var before, during trafficLevelsOf
	for _, row := range rows {
		if level := int(row.Level) - 1; level < trafficLevels {
			before[level], during[level] = int(row.Before), int(row.During)
		}
	}
	total, totalBefore := sum(during[:]), sum(before[:])
	if total < trafficLeast || totalBefore < trafficLeast {
		return "", nil
	}
	// Failures are worse than any time, also if more than one in twenty failed before.
	slow := trafficLevels - 1
	for slow > 0 && float64(sum(before[slow-1:])) <= trafficShare*float64(totalBefore) {
		slow--
	}
	bad, badBefore := sum(during[slow:]), sum(before[slow:])
	if fisher(bad, total, badBefore, totalBefore) > trafficError {
		return "", nil
	}
	return fmt.Sprintf("%d of %d other deliveries to %s failed or were slower than the 95th percentile of the hour "+
		"before the run; in that hour, %d of %d", bad, total, destination, badBefore, totalBefore), nil
}

func sum(counts []int) (total int) {
	for _, n := range counts {
		total += n
	}
	return total
}

// fisher returns the probability that at least bad of total are bad, if the bad ones of both samples are spread at
// random (Fisher's exact test, one-sided); 1 if their share is not larger than in the other sample.
func fisher(bad, total, otherBad, otherTotal int) float64 {
	all, allBad := total+otherTotal, bad+otherBad
	if bad*otherTotal <= otherBad*total {
		return 1 // not worse
	}
	p := 0.0
	for k := bad; k <= min(total, allBad); k++ { // bad is above the expected number, so the terms decrease
		term := math.Exp(logChoose(allBad, k) + logChoose(all-allBad, total-k) - logChoose(all, total))
		if p += term; term < p/1e9 {
			break
		}
	}
	return min(p, 1)
}

// logChoose returns the logarithm of the number of ways to choose k of n.
func logChoose(n, k int) float64 {
	if k < 0 || k > n {
		return math.Inf(-1)
	}
	a, _ := math.Lgamma(float64(n + 1))
	b, _ := math.Lgamma(float64(k + 1))
	c, _ := math.Lgamma(float64(n - k + 1))
	return a - b - c
}
