package delivery

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/delivery/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// trafficSlot is the length of a slot. Deliveries are counted by slot, and the times of a comparison are rounded to
	// slots.
	trafficSlot = 10 * time.Second
	// trafficBefore is the length of the period before a run. Deliveries of this period are compared with deliveries
	// during the run.
	trafficBefore = time.Hour
	// trafficDuring limits a comparison to the last deliveries during a run, so that the first ones do not hide a later
	// change.
	trafficDuring = 2 * time.Minute
	// trafficInterval is the time between two writes of counts, and trafficTimeout the time limit of one write.
	trafficInterval = 5 * time.Second
	trafficTimeout  = 30 * time.Second
	// clockInterval is the time between two comparisons of the clock of this process with the clock of the database.
	clockInterval = time.Minute
	// jobsTimeout is the time limit of reading a sample of jobs. Without River's index on finalized_at, or while another
	// session locks River's table, the sample would take much longer.
	jobsTimeout = 2 * time.Second
	// trafficLeast is the number of deliveries that each of the two periods needs for a comparison.
	trafficLeast = 30
	// trafficShare is the share of the deliveries of the hour before the run that are slower than that hour's 95th
	// percentile.
	trafficShare = 0.05
	// trafficError is the significance level: the probability with which one comparison reports a difference that arose
	// by chance. It is lower than usual, because a run compares about once a second.
	trafficError = 0.001
	// trafficLevels is the number of classes of durations. Their bounds are powers of the square root of 2, from 1 ms on.
	// Failures count in the last class.
	trafficLevels = 48
	// trafficLimited is the index at which the counts have the number of answers that asked for fewer requests. Each of
	// these answers also counts in its class of durations. Rows of earlier versions do not have this number.
	trafficLimited = trafficLevels
	// trafficSlower is the number of classes of durations that make a factor of two.
	trafficSlower = 2
)

// Traffic counts deliveries by destination, so that a replay run sees whether it harms other deliveries, or strains the
// destination. Each process adds its counts to dlq.destination_traffic, and a comparison reads the counts of all
// processes.
type Traffic struct {
	db postgres.DB

	mu       sync.Mutex
	new      map[trafficSlotOf]*trafficCounts // not written yet
	ahead    time.Duration                    // how far the clock of this process is ahead of the database's
	measured time.Time                        // when ahead was measured
	now      func() time.Time                 // the clock of this process

	jobsMu   sync.Mutex
	jobs     map[jobTrafficOf]*jobTraffic
	jobsLate time.Time // when a sample last took longer than jobsTimeout; zero if none did
}

// jobTraffic has two samples of jobs by kind: one of the hour before a run, and one of the time during the run.
type jobTraffic struct {
	read           time.Time
	before, during map[string]*trafficLevelsOf
}

type jobTrafficOf struct {
	run  uuid.UUID
	from time.Time
}

// trafficLevelsOf has the number of deliveries in each class of durations. trafficCounts also has the number at
// trafficLimited.
type (
	trafficLevelsOf [trafficLevels]int
	trafficCounts   [trafficLevels + 1]int
)

type trafficSlotOf struct {
	destination string
	run         uuid.UUID // uuid.Nil: the delivery does not belong to a replay run
	slot        int64
}

// NewTraffic returns a Traffic that writes its counts to a database.
func NewTraffic(db postgres.DB) *Traffic {
	return &Traffic{
		db: db, new: map[trafficSlotOf]*trafficCounts{}, now: time.Now, jobs: map[jobTrafficOf]*jobTraffic{},
	}
}

func slotOf(at time.Time) int64 { return at.Unix() / int64(trafficSlot/time.Second) }

func slotTime(slot int64) time.Time { return time.Unix(slot*int64(trafficSlot/time.Second), 0).UTC() }

// Observe counts a delivery that ended at the given time of this process, unless it was held or had no destination. It
// is for [Config.Observe].
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
	key := trafficSlotOf{d.Destination, d.Run, slotOf(at.Add(-t.ahead))}
	if t.new[key] == nil {
		t.new[key] = &trafficCounts{}
	}
	t.new[key][level]++
	if d.Limited {
		t.new[key][trafficLimited]++
	}
}

// Loop returns the loop that writes the counts.
func (t *Traffic) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "traffic", Interval: trafficInterval, Timeout: trafficTimeout, Patience: trafficTimeout,
		Failing: "writing counts of deliveries failed: replay runs do not see whether they harm other deliveries",
		Once:    background.Each(t.Write),
	})
}

// Write adds the counts since the last call to the counts of all processes in the database. Counts that it cannot write
// are lost. A comparison then has fewer deliveries: it may miss a difference, but it does not report a false one.
func (t *Traffic) Write(ctx context.Context) error {
	type row struct {
		Destination string         `json:"destination"`
		At          time.Time      `json:"at"`
		Run         uuid.UUID      `json:"run"`
		Deliveries  *trafficCounts `json:"deliveries"`
	}
	if err := t.measure(ctx); err != nil {
		return err
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

// measure compares the clock of this process with the clock of the database once in clockInterval. All processes count
// in the slots of the database: otherwise a process whose clock is ahead would count in a slot that has not begun, and
// a run would slow down again and again because of the same deliveries. measure rounds to seconds, because slots are
// long, and the answer of the database takes some time.
func (t *Traffic) measure(ctx context.Context) error {
	t.mu.Lock()
	now, measured := t.now(), t.measured
	t.mu.Unlock()
	if !measured.IsZero() && now.Sub(measured) < clockInterval {
		return nil
	}
	database, err := dbsqlc.New(t.db).Clock(ctx)
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.ahead, t.measured = now.Add(t.now().Sub(now)/2).Sub(database).Round(time.Second), now
	return nil
}

// Worse compares the deliveries to a destination that do not belong to the run with the deliveries of the hour before
// the run began. It counts only deliveries after the time from and within the last trafficDuring. If a greater share of
// these failed, or was slower than the 95th percentile of that hour, by Fisher's exact test, worse describes that;
// otherwise worse is "". If one of the two periods has fewer deliveries than trafficLeast, unknown says so.
func (t *Traffic) Worse(ctx context.Context, destination string, run uuid.UUID, began, from, now time.Time) (
	worse, unknown string, err error,
) {
	rows, err := dbsqlc.New(t.db).TrafficOf(ctx, dbsqlc.TrafficOfParams{
		Destination: destination, Run: run, Since: slotTime(slotOf(began.Add(-trafficBefore))),
		Began: slotTime(slotOf(began)), After: slotTime(slotOf(duringFrom(from, now)) + 1), Until: slotTime(slotOf(now) + 1),
	})
	if err != nil {
		return "", "", err
	}
	var before, during trafficLevelsOf
	for _, row := range rows {
		if level := int(row.Level) - 1; level < trafficLevels {
			before[level], during[level] = int(row.Before), int(row.During)
		}
	}
	worse, unknown = compare(&before, &during, "other deliveries to "+destination)
	return worse, unknown, nil
}

// JobsWorse does the same as [Traffic.Worse] for the jobs of a kind. It reads a sample of the jobs that River still
// keeps: completed jobs by duration, and jobs that failed for good. The sample during the run is up to ten seconds old.
// If River's table does not answer within jobsTimeout, the result is unknown, and JobsWorse reads no sample for
// trafficDuring.
func (t *Traffic) JobsWorse(ctx context.Context, kind string, run uuid.UUID, began, from, now time.Time) (
	worse, unknown string, err error,
) {
	t.jobsMu.Lock()
	defer t.jobsMu.Unlock()
	others := "other jobs of kind " + kind + " (sampled)"
	late := fmt.Sprintf("not known whether %s are worse: River's table did not answer within %s", others, jobsTimeout)
	if !t.jobsLate.IsZero() && now.Sub(t.jobsLate) < trafficDuring {
		return "", late, nil
	}
	inTime, cancel := context.WithTimeout(ctx, jobsTimeout)
	defer cancel()
	defer func() {
		if err != nil && ctx.Err() == nil && inTime.Err() != nil {
			t.jobsLate = now
			worse, unknown, err = "", late, nil
		}
	}()
	key := jobTrafficOf{run, from}
	jobs := t.jobs[key]
	if jobs == nil || now.Sub(jobs.read) >= trafficSlot {
		fresh := jobTraffic{read: now, before: t.jobsBefore(run)} // all comparisons of a run have the same hour
		if fresh.before == nil {
			if fresh.before, err = t.readJobs(inTime, run, began.Add(-trafficBefore), began); err != nil {
				return "", "", err
			}
		}
		if fresh.during, err = t.readJobs(inTime, run, duringFrom(from, now), now); err != nil {
			return "", "", err
		}
		maps.DeleteFunc(t.jobs, func(_ jobTrafficOf, j *jobTraffic) bool { return now.Sub(j.read) > trafficDuring })
		jobs = &fresh
		t.jobs[key] = jobs
	}
	before, during := jobs.before[kind], jobs.during[kind]
	worse, unknown = compare(cmp.Or(before, &trafficLevelsOf{}), cmp.Or(during, &trafficLevelsOf{}), others)
	return worse, unknown, nil
}

// jobsBefore returns the sample of the hour before a run, or nil if it has not been read.
func (t *Traffic) jobsBefore(run uuid.UUID) map[string]*trafficLevelsOf {
	for of, jobs := range t.jobs {
		if of.run == run {
			return jobs.before
		}
	}
	return nil
}

// readJobs returns, by kind, a sample of the jobs of a period that do not belong to the run.
func (t *Traffic) readJobs(ctx context.Context, run uuid.UUID, from, until time.Time) (
	map[string]*trafficLevelsOf, error,
) {
	rows, err := dbsqlc.New(t.db).JobTraffic(ctx, dbsqlc.JobTrafficParams{Run: run, FromTime: from, Until: until})
	if err != nil {
		return nil, err
	}
	kinds := map[string]*trafficLevelsOf{}
	for _, row := range rows {
		if kinds[row.Kind] == nil {
			kinds[row.Kind] = &trafficLevelsOf{}
		}
		kinds[row.Kind][row.Level-1] = int(row.Jobs)
	}
	return kinds, nil
}

// duringFrom returns the time from which a comparison counts the deliveries during a run: from, or the beginning of the
// last trafficDuring if that is later.
func duringFrom(from, now time.Time) time.Time {
	if last := now.Add(-trafficDuring); from.Before(last) {
		return last
	}
	return from
}

// compare compares the deliveries or jobs that do not belong to a run: those during the run with those before it. worse
// describes how they have become worse, or is "". unknown says that there are too few to compare, or is "". others
// names them in the texts.
func compare(before, during *trafficLevelsOf, others string) (worse, unknown string) {
	total, totalBefore := sum(during[:]), sum(before[:])
	if total < trafficLeast || totalBefore < trafficLeast {
		return "", fmt.Sprintf("not known whether %s are worse: %d since, %d in the hour before the run, at least %d of each "+
			"needed", others, total, totalBefore, trafficLeast)
	}
	slow := before.slow()
	bad, badBefore := sum(during[slow:]), sum(before[slow:])
	if fisher(bad, total, badBefore, totalBefore) > trafficError {
		return "", ""
	}
	return fmt.Sprintf("%d of %d %s failed or were slower than the 95th percentile of the hour "+
		"before the run; in that hour, %d of %d", bad, total, others, badBefore, totalBefore), ""
}

// slow returns the lowest class such that at most trafficShare of the deliveries are in it or above. The last class,
// which has the failures, is always slow, even if more than trafficShare fail.
func (l *trafficLevelsOf) slow() int {
	slow := trafficLevels - 1
	for slow > 0 && float64(sum(l[slow-1:])) <= trafficShare*float64(sum(l[:])) {
		slow--
	}
	return slow
}

// Reached returns the destinations that had deliveries of a run within the last trafficDuring. It first writes the
// counts of this process.
func (t *Traffic) Reached(ctx context.Context, run uuid.UUID, now time.Time) ([]string, error) {
	if err := t.Write(ctx); err != nil {
		return nil, err
	}
	return dbsqlc.New(t.db).DestinationsOfRun(ctx, dbsqlc.DestinationsOfRunParams{
		Run: run, Since: now.Add(-trafficDuring),
	})
}

// Strain returns how a run strains a destination. It counts the run's deliveries in the slots that begin at from or
// later, but only those of the last trafficDuring. The run strains the destination if an answer asks for fewer
// requests. It also does if more than one in twenty deliveries fails or takes at least twice the 95th percentile of the
// hour before the run, and if that share is greater than in that hour by Fisher's exact test. This comparison needs
// trafficLeast deliveries in both periods. Without deliveries, s is zero.
func (t *Traffic) Strain(ctx context.Context, destination string, run uuid.UUID, began, from, now time.Time) (
	s breaker.Strain, err error,
) {
	if from.Before(now.Add(-trafficDuring)) {
		from = now.Add(-trafficDuring)
	}
	rows, err := dbsqlc.New(t.db).TrafficOfRun(ctx, dbsqlc.TrafficOfRunParams{
		Destination: destination, Run: run, Since: from,
	})
	if err != nil || len(rows) == 0 {
		return s, err
	}
	var during trafficLevelsOf
	limited := 0
	for _, row := range rows {
		for level, n := range row.Deliveries {
			if level < trafficLevels {
				during[level] += int(n)
			} else if level == trafficLimited {
				limited += int(n)
			}
		}
		if ends := row.At.Add(trafficSlot); !ends.Add(trafficInterval).After(now) { // all processes have written the slot
			s.Closed, s.Taken = ends, float64(deliveries(row.Deliveries))/trafficSlot.Seconds()
		}
	}
	total := sum(during[:])
	s.PerSecond = float64(total) / max(now.Sub(rows[0].At).Seconds(), 1)
	if limited > 0 {
		s.Reason = fmt.Sprintf("%d of %d answers were 429 or had a Retry-After", limited, total)
		return s, nil
	}
	if total < trafficLeast {
		return s, nil
	}
	before, err := t.before(ctx, destination, run, began)
	if err != nil {
		return s, err
	}
	totalBefore, slow := sum(before[:]), min(before.slow()+trafficSlower, trafficLevels-1)
	bad, badBefore := sum(during[slow:]), sum(before[slow:])
	if totalBefore >= trafficLeast && float64(bad) > trafficShare*float64(total) &&
		fisher(bad, total, badBefore, totalBefore) <= trafficError {
		s.Reason = fmt.Sprintf("%d of %d deliveries failed or took at least twice the 95th percentile of the hour before "+
			"the run; in that hour, %d of %d", bad, total, badBefore, totalBefore)
	}
	return s, nil
}

// before returns the deliveries to a destination in the hour before a run.
func (t *Traffic) before(ctx context.Context, destination string, run uuid.UUID, began time.Time) (
	before trafficLevelsOf, err error,
) {
	until := slotTime(slotOf(began))
	rows, err := dbsqlc.New(t.db).TrafficOf(ctx, dbsqlc.TrafficOfParams{
		Destination: destination, Run: run, Since: slotTime(slotOf(began.Add(-trafficBefore))),
		Began: until, After: until, Until: until,
	})
	for _, row := range rows {
		if level := int(row.Level) - 1; level < trafficLevels {
			before[level] = int(row.Before)
		}
	}
	return before, err
}

// deliveries returns the number of deliveries of a row.
func deliveries(counts []int32) (total int) {
	for _, n := range counts[:min(len(counts), trafficLevels)] {
		total += int(n)
	}
	return total
}

func sum(counts []int) (total int) {
	for _, n := range counts {
		total += n
	}
	return total
}

// fisher returns the probability, by Fisher's one-sided exact test, that at least bad of total are bad if the bad ones
// of both samples are spread at random. It returns 1 if the share of bad ones is not larger than in the other sample.
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

// logChoose returns the natural logarithm of the number of ways to choose k of n.
func logChoose(n, k int) float64 {
	if k < 0 || k > n {
		return math.Inf(-1)
	}
	a, _ := math.Lgamma(float64(n + 1))
	b, _ := math.Lgamma(float64(k + 1))
	c, _ := math.Lgamma(float64(n - k + 1))
	return a - b - c
}
