package replay

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
	"gonum.org/v1/gonum/mathext"

	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

const (
	// expectGroups is the number of failure groups, the largest first, whose earlier outcomes a preview reads.
	expectGroups = 200
	// shownGroups limits the groups in an [Expectation], and toldGroups the groups in its text.
	shownGroups, toldGroups = 20, 5
	// fewOutcomes: if a group has fewer outcomes in its last run, the outcomes of earlier runs count, too.
	fewOutcomes = 5
	// beyond is the probability that the number of recoveries is below its interval, and the probability that it is
	// above: 0.1 makes an 80 % interval.
	beyond = 0.1
)

// Expectation estimates how many entries will recover, from earlier replay runs of the same failure groups.
type Expectation struct {
	Tried   int64              `json:"tried" doc:"Number of entries that go and whose failure group has outcomes of earlier replay runs. Where some do not go, it is estimated from the sample."`
	Untried int64              `json:"untried" doc:"Number of other entries that go: no earlier replay run has tried their failure groups, or these are not among the 200 largest."`
	Recover int64              `json:"recover" doc:"Expected number of tried entries that recover."`
	Low     int64              `json:"low" doc:"Lower end of its 80 % interval."`
	High    int64              `json:"high" doc:"Upper end of its 80 % interval."`
	Groups  []GroupExpectation `json:"groups,omitempty" doc:"The 20 largest of the tried failure groups."`
}

// GroupExpectation is the expectation for a failure group. Its last run is the run with the latest outcome. Of the
// outcomes in all runs, the last 100 count.
type GroupExpectation struct {
	Queue           string    `json:"queue" doc:"Queue of the group."`
	Fingerprint     string    `json:"fingerprint" doc:"The failure group."`
	Entries         int64     `json:"entries" doc:"Number of its entries that go."`
	Version         string    `json:"version,omitempty" doc:"Version with which these outcomes were made: that of the latest one, as its worker or destination reported it."`
	Since           time.Time `json:"since" doc:"Time of the first outcome of the last run that redelivered entries of the group, with its last version."`
	Recovered       int64     `json:"recovered" doc:"Number of entries that recovered in that run, with that version."`
	Failed          int64     `json:"failed" doc:"Number of entries that failed in that run, with that version."`
	RecoveredBefore int64     `json:"recoveredBefore" doc:"Number of entries that recovered before."`
	FailedBefore    int64     `json:"failedBefore" doc:"Number of entries that failed before."`
	Recover         int64     `json:"recover" doc:"Expected number of its entries that recover."`
	Low             int64     `json:"low" doc:"Lower end of its 80 % interval."`
	High            int64     `json:"high" doc:"Upper end of its 80 % interval."`
}

// prediction returns the mean and the variance of the number of entries that will recover (beta-binomial, with
// Jeffreys' prior). It uses the outcomes of the last run with its last version (see [GroupExpectation]), because a
// repair or a new fault makes earlier outcomes out of date. If these are fewer than fewOutcomes, it adds the earlier
// ones.
func (g *GroupExpectation) prediction() (mean, variance float64) {
	recovered, failed := g.Recovered, g.Failed
	if recovered+failed < fewOutcomes {
		recovered, failed = recovered+g.RecoveredBefore, failed+g.FailedBefore
	}
	a, b, n := float64(recovered)+0.5, float64(failed)+0.5, float64(g.Entries)
	return n * a / (a + b), n * a * b * (a + b + n) / ((a + b) * (a + b) * (a + b + 1))
}

// Text describes the expectation.
func (g *GroupExpectation) Text(w Words) string {
	before, with := "", ""
	if g.Version != "" {
		with = " with " + g.Version
	}
	if n := g.RecoveredBefore + g.FailedBefore; n > 0 {
		before = fmt.Sprintf(", %s of %s before", w.Number(g.RecoveredBefore), w.Number(n))
	}
	return fmt.Sprintf("%s in %s: %s of %s recovered%s since %s%s; of %s, about %s (%s to %s) will",
		w.Group(g.Fingerprint), g.Queue, w.Number(g.Recovered), w.Number(g.Recovered+g.Failed), with, w.Time(g.Since),
		before, w.Number(g.Entries), w.Number(g.Recover), w.Number(g.Low), w.Number(g.High))
}

// Texts describes the expectation: first as a whole, then its largest groups, then the groups without earlier replays.
func (e *Expectation) Texts(w Words) []string {
	if e == nil { // an older server
		return nil
	}
	var texts []string
	if e.Tried > 0 {
		texts = append(texts, e.Summary(w)+", as far as earlier replay runs of the same failure groups tell")
	}
	for i := range e.Groups[:min(len(e.Groups), toldGroups)] {
		texts = append(texts, e.Groups[i].Text(w))
	}
	if e.Untried > 0 {
		texts = append(texts,
			"no earlier replay run has outcomes of the failure groups of "+w.Number(e.Untried)+": they were never tried")
	}
	return texts
}

// Summary describes how many of the entries with earlier outcomes will recover.
func (e *Expectation) Summary(w Words) string {
	return fmt.Sprintf("about %s of %s (%s to %s, 80 %% interval) will recover", w.Number(e.Recover), w.Number(e.Tried),
		w.Number(e.Low), w.Number(e.High))
}

// likelyRange returns the 80 % interval of a number from 0 to n with this mean and variance: the interval of a beta
// distribution scaled to this range, widened to whole numbers.
func likelyRange(mean, variance float64, n int64) (low, high int64) {
	all := float64(n)
	size := mean*(all-mean)/variance - 1
	if size <= 0 { // one entry: it recovers or not
		return 0, n
	}
	a, b := size*mean/all, size*(all-mean)/all
	low = int64(all * mathext.InvRegIncBeta(a, b, beyond))
	high = int64(math.Ceil(all * mathext.InvRegIncBeta(a, b, 1-beyond)))
	return low, min(high, n)
}

// groupKey names a failure group; the fingerprint is empty for entries without one.
type groupKey struct{ queue, fingerprint string }

// going estimates how many entries of each failure group the run sends: the group's entries times the share of its
// sampled entries that go. For a group without sampled entries in goes, it uses the share of the whole sample. It also
// returns the sum of all groups, rounded once: with many small groups, every share could be rounded in the same
// direction.
func going(cells []dbsqlc.CountGroupsRow, goes map[uuid.UUID]bool) (entries map[groupKey]int64, all int64) {
	type counts struct{ entries, sampled, goes int64 }
	groups, sample := map[groupKey]counts{}, counts{}
	for i := range cells {
		k := groupKey{cells[i].Queue, cells[i].Fingerprint}
		c := groups[k]
		c.entries += cells[i].Entries
		for _, id := range cells[i].Sample {
			if _, isKnown := goes[id]; !isKnown {
				continue
			}
			c.sampled, sample.sampled = c.sampled+1, sample.sampled+1
			if goes[id] {
				c.goes, sample.goes = c.goes+1, sample.goes+1
			}
		}
		groups[k] = c
	}
	entries = make(map[groupKey]int64, len(groups))
	sum := 0.0
	for k, c := range groups {
		of := c
		if of.sampled == 0 {
			of = sample
		}
		n := float64(c.entries) * float64(of.goes) / float64(max(of.sampled, 1))
		entries[k], sum = int64(math.Round(n)), sum+n
	}
	return entries, int64(math.Round(sum))
}

// expect estimates from earlier replay runs how many entries of a preview will recover. goes has sampled entries and
// whether the run sends them. It looks up the expectGroups largest failure groups, and counts the others as untried. It
// returns the shownGroups largest.
func expect(ctx context.Context, tx transaction, cells []dbsqlc.CountGroupsRow, goes map[uuid.UUID]bool) (
	*Expectation, error,
) {
	entries, all := going(cells, goes)
	var keys []groupKey
	e := &Expectation{Untried: all}
	for k, n := range entries {
		if k.fingerprint != "" && n > 0 {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b groupKey) int {
		return cmp.Or(cmp.Compare(entries[b], entries[a]), cmp.Compare(a.queue, b.queue),
			cmp.Compare(a.fingerprint, b.fingerprint))
	})
	var in dbsqlc.GroupOutcomesParams
	for _, k := range keys[:min(len(keys), expectGroups)] {
		in.Queues, in.Fingerprints = append(in.Queues, k.queue), append(in.Fingerprints, k.fingerprint)
	}
	rows, err := tx.GroupOutcomes(ctx, in)
	if err != nil {
		return nil, err
	}
	mean, variance := 0.0, 0.0
	for i := range rows {
		row := &rows[i]
		g := GroupExpectation{
			Queue: row.Queue, Fingerprint: row.Fingerprint, Entries: entries[groupKey{row.Queue, row.Fingerprint}],
			Since: row.Since, Recovered: row.Recovered, Failed: row.Failed, RecoveredBefore: row.RecoveredBefore,
			FailedBefore: row.FailedBefore, Version: row.Version,
		}
		m, v := g.prediction()
		g.Recover = int64(math.Round(m))
		g.Low, g.High = likelyRange(m, v, g.Entries)
		mean, variance = mean+m, variance+v
		e.Tried, e.Untried = e.Tried+g.Entries, e.Untried-g.Entries
		e.Groups = append(e.Groups, g)
	}
	if e.Tried > 0 {
		e.Recover = int64(math.Round(mean))
		e.Low, e.High = likelyRange(mean, variance, e.Tried)
	}
	slices.SortStableFunc(e.Groups, func(a, b GroupExpectation) int { return cmp.Compare(b.Entries, a.Entries) })
	e.Groups = e.Groups[:min(len(e.Groups), shownGroups)]
	return e, nil
}

// Calibration counts how often the 80 % intervals of forecasts contained the actual number.
type Calibration struct {
	Runs      int64               `json:"runs" doc:"Number of ended runs whose forecast had failure groups."`
	Groups    int64               `json:"groups" doc:"Number of failure groups in their forecasts."`
	Judged    int64               `json:"judged" doc:"Number of these groups of which each entry has recovered or failed. Of the others, some were skipped or not sent."`
	Held      int64               `json:"held" doc:"Number of judged groups whose recoveries were in the 80 % interval."`
	Expected  int64               `json:"expected" doc:"Expected recoveries of the judged groups."`
	Recovered int64               `json:"recovered" doc:"Their recoveries."`
	Figures   []FigureCalibration `json:"figures" doc:"How far off each figure of the forecasts was."`
	Latest    []CalibrationGroup  `json:"latest" doc:"The groups of the latest runs, at most 100."`
}

// FigureCalibration is the accuracy of one figure of forecasts. Estimates have 95 % intervals; recover has an 80 %
// interval.
type FigureCalibration struct {
	What     string  `json:"what" doc:"The figure: see figures of the report of a run."`
	Runs     int64   `json:"runs" doc:"Number of runs in which it was measured."`
	Held     int64   `json:"held" doc:"Number of these runs in which it was in its interval."`
	Forecast float64 `json:"forecast" doc:"Sum of the forecasts."`
	Actual   float64 `json:"actual" doc:"Sum of what happened."`
	Off      float64 `json:"off" doc:"Mean difference between forecast and what happened."`
}

// Words describes what the figure counts.
func (f FigureCalibration) Words() string { return figureWords(f.What) }

// CalibrationGroup compares the forecast of a failure group in a run with the outcome.
type CalibrationGroup struct {
	Run         uuid.UUID `json:"runId" doc:"The run."`
	Queue       string    `json:"queue" doc:"Queue of the group."`
	Fingerprint string    `json:"fingerprint" doc:"The failure group."`
	Entries     int64     `json:"entries" doc:"Number of its entries that were expected to go."`
	Expected    int64     `json:"expected" doc:"Expected number of recoveries."`
	Low         int64     `json:"low" doc:"Lower end of the 80 % interval."`
	High        int64     `json:"high" doc:"Upper end of the 80 % interval."`
	Recovered   int64     `json:"recovered" doc:"Number of entries that recovered."`
	Failed      int64     `json:"failed" doc:"Number of entries that failed."`
	Judged      bool      `json:"judged" doc:"Whether each entry has recovered or failed."`
	Held        bool      `json:"held" doc:"Whether the recoveries are in the interval."`
}

// maxCalibrationGroups limits the groups in a [Calibration].
const maxCalibrationGroups = 100

// Text describes the calibration. It is "" if no group has been judged.
func (c *Calibration) Text(w Words) string {
	if c.Judged == 0 {
		return ""
	}
	return fmt.Sprintf("%s of %s forecasts of a failure group held their 80 %% interval (%.0f %%): %s expected to "+
		"recover, %s did", w.Number(c.Held), w.Number(c.Judged), 100*float64(c.Held)/float64(c.Judged),
		w.Number(c.Expected), w.Number(c.Recovered))
}

// Calibration compares the forecasts of ended runs with their outcomes. Its counts are of all groups; it lists the
// latest maxCalibrationGroups.
func (r *Replayer) Calibration(ctx context.Context) (*Calibration, error) {
	rows, err := dbsqlc.New(r.Store.DB()).Calibration(ctx)
	if err != nil {
		return nil, err
	}
	figures, err := dbsqlc.New(r.Store.DB()).FigureCalibration(ctx)
	if err != nil {
		return nil, err
	}
	c := &Calibration{Groups: int64(len(rows)), Latest: []CalibrationGroup{}, Figures: []FigureCalibration{}}
	for i := range figures {
		c.Figures = append(c.Figures, FigureCalibration(figures[i]))
	}
	for i := range rows {
		row := &rows[i]
		if i == 0 || rows[i-1].RunID != row.RunID {
			c.Runs++
		}
		if row.Judged {
			c.Judged, c.Expected, c.Recovered = c.Judged+1, c.Expected+row.Recover, c.Recovered+row.Recovered
			if row.Held {
				c.Held++
			}
		}
		if i < maxCalibrationGroups {
			c.Latest = append(c.Latest, CalibrationGroup{
				Run: row.RunID, Queue: row.Queue, Fingerprint: row.Fingerprint, Entries: row.Entries, Expected: row.Recover,
				Low: row.Low, High: row.High, Recovered: row.Recovered, Failed: row.Failed, Judged: row.Judged,
				Held: row.Held,
			})
		}
	}
	return c, nil
}
