package replay

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/replay/internal/dbsqlc"
)

// loadParts is the number of parts of equal size into which a preview divides a run.
const loadParts = 10

// Load compares what a run sends to a queue with the queue's last hour.
type Load struct {
	Queue       string    `json:"queue" doc:"Queue of the redeliveries."`
	Destination string    `json:"destination,omitempty" doc:"Destination to which it delivers messages; absent for a queue of an application."`
	Entries     int64     `json:"entries" doc:"Number of entries that go there."`
	PerSecond   []float64 `json:"perSecond" doc:"Redeliveries per second in each tenth of the run at its rate (10,000 without one), estimated from the sample. Concurrency and slow destinations make it less."`
	Redelivered int64     `json:"redelivered" doc:"Number of redeliveries of the queue in the last hour."`
	Failures    int64     `json:"failures" doc:"Number of failures of the queue in the last hour, redeliveries included. dlqd does not count jobs that succeed."`
}

// Text describes the load.
func (l *Load) Text(w Words) string {
	where, rate := "queue "+l.Queue, ""
	if l.Destination != "" {
		where += " of destination " + l.Destination
	}
	if !w.Unlimited {
		rate = fmt.Sprintf(", at most %s per second", w.rate(slices.Max(l.PerSecond)))
	}
	return fmt.Sprintf("%s gets %s%s; in the last hour, %s were redelivered and %s failed", where, w.Number(l.Entries),
		rate, w.Number(l.Redelivered), w.Number(l.Failures))
}

// Words formats the values in the texts of a preview, for a page or a terminal.
type Words struct {
	// Number formats an int64 or a float64.
	Number func(any) string
	Time   func(time.Time) string
	// Group names a failure group by its fingerprint.
	Group func(fingerprint string) string
	// Unlimited is set for a run without a rate: the texts of its load then name no rate.
	Unlimited bool
}

// rate formats a number per second. Numbers below 100 keep two significant digits.
func (w *Words) rate(perSecond float64) string {
	if perSecond >= 100 {
		return w.Number(math.Round(perSecond))
	}
	return strconv.FormatFloat(perSecond, 'g', 3, 64)
}

// PlainWords returns the formats for texts at a terminal.
func PlainWords() Words {
	return Words{
		Number: func(n any) string {
			if f, ok := n.(float64); ok {
				return strconv.FormatFloat(f, 'f', -1, 64)
			}
			return fmt.Sprint(n)
		},
		Time:  func(at time.Time) string { return at.UTC().Format("2006-01-02 15:04 UTC") },
		Group: func(fingerprint string) string { return fingerprint },
	}
}

// addLoad adds how many redeliveries a run at this rate sends to each queue over time, in the order of capture.
func (p *Preview) addLoad(ctx context.Context, tx transaction, in *Request, rate float64, known *policy.Policy,
	cells []dbsqlc.CountGroupsRow,
) error {
	type sampled struct {
		id    uuid.UUID
		queue string
	}
	var sample []sampled
	loads := map[string]*Load{}
	var queues []string
	for i := range cells {
		queue := cmp.Or(in.Queue, cells[i].Queue)
		if loads[queue] == nil {
			loads[queue] = &Load{Queue: queue, Destination: in.Destination, PerSecond: make([]float64, loadParts)}
			if q := known.Queues[queue]; in.Destination == "" && q != nil {
				loads[queue].Destination = q.Destination
			}
			queues = append(queues, queue)
		}
		loads[queue].Entries += cells[i].Entries
		for _, id := range cells[i].Sample {
			sample = append(sample, sampled{id, queue})
		}
	}
	slices.SortFunc(sample, func(a, b sampled) int { return slices.Compare(a.id[:], b.id[:]) })
	if in.NewestFirst {
		slices.Reverse(sample)
	}
	for part := range loadParts {
		from, to := part*len(sample)/loadParts, (part+1)*len(sample)/loadParts
		if from == to { // fewer entries than parts
			to = min(from+1, len(sample))
		}
		for _, s := range sample[from:to] {
			loads[s.queue].PerSecond[part] += rate / float64(to-from)
		}
	}
	rows, err := tx.LastHour(ctx, queues)
	if err != nil {
		return err
	}
	for i := range rows {
		loads[rows[i].Queue].Redelivered, loads[rows[i].Queue].Failures = rows[i].Redelivered, rows[i].Failures
	}
	for _, queue := range queues {
		p.Load = append(p.Load, *loads[queue])
	}
	slices.SortStableFunc(p.Load, func(a, b Load) int { return cmp.Compare(b.Entries, a.Entries) })
	return nil
}

// SkipTexts describes which work a run skips: where stale or superseded is not nil, as the request says, otherwise as
// the policy says.
func SkipTexts(s policy.Skips, stale, superseded *bool) []string {
	var texts []string
	for _, skip := range []struct {
		what      string
		of        *policy.Skip
		requested *bool
	}{{"work that is out of date", s.Stale, stale}, {"work that a later job has done", s.Superseded, superseded}} {
		switch {
		case skip.requested != nil && *skip.requested:
			texts = append(texts, "the run skips "+skip.what)
		case skip.requested != nil:
			texts = append(texts, "the run sends "+skip.what)
		case skip.of != nil:
			texts = append(texts, "the policy skips "+skip.what+", of "+skip.of.Text())
		}
	}
	return texts
}

// KeyedText describes the order of a run's application jobs, or returns "" if none has an ordering key.
func KeyedText(keyed int64, w Words) string {
	jobs := "jobs have"
	switch keyed {
	case 0:
		return ""
	case 1:
		jobs = "job has"
	}
	return fmt.Sprintf("%s application %s an ordering key in the args, whose order the run keeps; live jobs of the key "+
		"pass, and sequences of River Pro are left to River", w.Number(keyed), jobs)
}

// Notes describes the expected end of the run, what the policy skips, kinds that no worker seems to know, the consumer
// groups that read the topics of records, the expected recoveries, and the load of the queues that get most entries.
func (p *Preview) Notes(w Words) []string {
	expect := p.Expect.Texts(w)
	notes := make([]string, 0, 3+len(p.Unworked)+len(p.Readers)+len(expect)+len(p.Load))
	if text := p.endText(w); text != "" {
		notes = append(notes, text)
	}
	notes = append(notes, SkipTexts(p.Skips, nil, nil)...)
	for i := range p.Unworked[:min(len(p.Unworked), toldGroups)] {
		notes = append(notes, p.Unworked[i].text(w))
	}
	for i := range p.Readers[:min(len(p.Readers), toldGroups)] {
		notes = append(notes, p.Readers[i].Text())
	}
	notes = append(notes, expect...)
	for i := range p.Load[:min(len(p.Load), toldGroups)] {
		notes = append(notes, p.Load[i].Text(w))
	}
	return notes
}
