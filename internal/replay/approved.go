package replay

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
)

// maxForecastChange is the relative change of a figure, since the request for approval, above which a run lists the
// change.
const maxForecastChange = 0.1

// ForecastChange is a figure of a forecast that has changed since the request for approval.
type ForecastChange struct {
	What   string `json:"what" doc:"The figure: entries, seconds, recover (expected to recover), queue: and a queue, or estimate: and what is counted." example:"entries"`
	Before int64  `json:"before" doc:"Its value when the run was requested."`
	Now    int64  `json:"now" doc:"Its value when the run started."`
}

// String describes the change.
func (c ForecastChange) String() string {
	return fmt.Sprintf("%s %d, before %d", c.What, c.Now, c.Before)
}

// compare sets f.Changes if the transaction carries out a request for approval that has a forecast.
func (f *Forecast) compare(ctx context.Context, tx transaction) error {
	raw, err := tx.ApprovedForecast(ctx)
	if err != nil {
		return err
	}
	var requested *Forecast
	if err := json.Unmarshal(raw, &requested); err != nil || requested == nil {
		return err
	}
	f.Changes = changesSince(requested, f)
	return nil
}

// changesSince returns the figures that differ by more than maxForecastChange. It omits estimates whose intervals
// overlap, because they may be equal.
func changesSince(before, now *Forecast) []ForecastChange {
	var changes []ForecastChange
	add := func(what string, before, now int64) {
		if math.Abs(float64(now-before)) > maxForecastChange*float64(before) {
			changes = append(changes, ForecastChange{What: what, Before: before, Now: now})
		}
	}
	add("entries", before.Entries, now.Entries)
	queues := slices.Collect(maps.Keys(before.ByQueue))
	queues = slices.AppendSeq(queues, maps.Keys(now.ByQueue))
	slices.Sort(queues)
	for _, queue := range slices.Compact(queues) {
		add("queue:"+queue, before.ByQueue[queue], now.ByQueue[queue])
	}
	if before.Seconds > 0 {
		add("seconds", int64(math.Ceil(before.Seconds)), int64(math.Ceil(now.Seconds)))
	}
	if before.Estimates != nil { // a run requested by SQL has no estimates
		was, is := estimatesOf(before), estimatesOf(now)
		names := slices.AppendSeq(slices.Collect(maps.Keys(was)), maps.Keys(is))
		slices.Sort(names)
		for _, what := range slices.Compact(names) {
			if was, is := was[what], is[what]; is.Low > was.High || is.High < was.Low {
				add("estimate:"+what, was.Entries, is.Entries)
			}
		}
	}
	if b, n := before.Expect, now.Expect; b != nil && n != nil && (n.Low > b.High || n.High < b.Low) {
		add("recover", b.Recover, n.Recover)
	}
	return changes
}

// estimatesOf returns the estimates of a forecast by name ([Estimate].What). An estimate of zero entries may be absent.
func estimatesOf(f *Forecast) map[string]Estimate {
	estimates := map[string]Estimate{}
	for _, e := range f.Estimates {
		estimates[strings.TrimSpace(e.What+" "+e.Stage)] = e
	}
	return estimates
}
