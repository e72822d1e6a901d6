package replay

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
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
	Redelivered int64     `json:"redelivered" doc:"Number of redeliveries of the queue in the last hour. 0 also for callers who are limited to some kinds of the queue."`
	Failures    int64     `json:"failures" doc:"Number of failures of the queue in the last hour, redeliveries included. dlqd does not count jobs that succeed. 0 also for callers who are limited to some kinds of the queue."`
}

// DestinationLoad compares what a run sends to a destination with the destination's last hour.
type DestinationLoad struct {
	Destination string           `json:"destination" doc:"Name of the destination in the policy."`
	Entries     int64            `json:"entries" doc:"Number of entries that go there, of all queues."`
	PerSecond   []float64        `json:"perSecond" doc:"Redeliveries per second in each tenth of the run: the sum of those of its queues."`
	LastHour    *DestinationHour `json:"lastHour,omitempty" doc:"What dlqd delivered there in the last hour. Absent if that is not known: dlqd has counted no delivery, the caller is limited to some queues or kinds, or it is not one of the 20 destinations with the most entries."`
}

// DestinationHour counts the deliveries to a destination in an hour.
type DestinationHour struct {
	Deliveries    int64   `json:"deliveries" doc:"Number of deliveries, redeliveries included."`
	Failures      int64   `json:"failures" doc:"Number of these that failed. A message that the destination refuses does not count as failed."`
	MostPerSecond float64 `json:"mostPerSecond" doc:"Deliveries per second in the busiest ten seconds."`
}

// Text describes the load.
func (l *DestinationLoad) Text(w Words) string {
	rate, hour := "", "; its last hour is not known"
	if !w.Unlimited {
		rate = fmt.Sprintf(", at most %s per second", w.rate(slices.Max(l.PerSecond)))
	}
	if h := l.LastHour; h != nil {
		hour = fmt.Sprintf("; in the last hour, it got %s, at most %s per second, and %s failed", w.Number(h.Deliveries),
			w.rate(h.MostPerSecond), w.Number(h.Failures))
	}
	return fmt.Sprintf("destination %s gets %s%s%s", l.Destination, w.Number(l.Entries), rate, hour)
}

// Text describes the load.
func (l *Load) Text(w Words) string {
	where, rate, others := "queue "+l.Queue, "", "; how many succeeded is not known"
	if l.Destination != "" {
		where, others = where+" of destination "+l.Destination, "" // the load of the destination says what it got
	}
	if !w.Unlimited {
		rate = fmt.Sprintf(", at most %s per second", w.rate(slices.Max(l.PerSecond)))
	}
	return fmt.Sprintf("%s gets %s%s; in the last hour, %s were redelivered and %s failed%s", where, w.Number(l.Entries),
		rate, w.Number(l.Redelivered), w.Number(l.Failures), others)
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

// addLoad adds how many redeliveries a run at this rate sends to each queue over time: in loadParts parts of the run,
// in the order in which it sends, estimated from the sample. It also adds the redeliveries and failures of each queue
// in the last hour.
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
	slices.SortFunc(sample, func(a, b sampled) int { return byID(a.id, b.id) })
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
	return p.addDestinations(ctx, tx)
}

// addDestinations adds up the load of the queues by destination.
func (p *Preview) addDestinations(ctx context.Context, tx transaction) error {
	at := map[string]int{}
	for i := range p.Load {
		of := &p.Load[i]
		if of.Destination == "" {
			continue
		}
		k, ok := at[of.Destination]
		if !ok {
			k = len(p.Destinations)
			at[of.Destination] = k
			p.Destinations = append(p.Destinations, DestinationLoad{
				Destination: of.Destination, PerSecond: make([]float64, loadParts),
			})
		}
		p.Destinations[k].Entries += of.Entries
		for part, rate := range of.PerSecond {
			p.Destinations[k].PerSecond[part] += rate
		}
	}
	slices.SortStableFunc(p.Destinations, func(a, b DestinationLoad) int { return cmp.Compare(b.Entries, a.Entries) })
	first := p.Destinations[:min(len(p.Destinations), shownGroups)]
	names := make([]string, len(first))
	for i := range first {
		names[i] = first[i].Destination
	}
	hours, err := tx.DestinationHours(ctx, names)
	for i := range hours {
		first[slices.Index(names, hours[i].Destination)].LastHour = &DestinationHour{
			Deliveries: hours[i].Deliveries, Failures: hours[i].Failures, MostPerSecond: hours[i].MostPerSecond,
		}
	}
	return err
}

// Subscribers counts the subscribers whom the messages of a run concern.
type Subscribers struct {
	Subscribers int64        `json:"subscribers" doc:"Number of different subscribers in the sample. Of more entries than the sample has, there may be more."`
	Entries     int64        `json:"entries" doc:"Estimated number of entries whose message names a subscriber."`
	Low         int64        `json:"low" doc:"Lower end of its 95 % interval."`
	High        int64        `json:"high" doc:"Upper end of its 95 % interval."`
	Sampled     int64        `json:"sampled" doc:"Number of entries looked at, at random."`
	Largest     []Subscriber `json:"largest,omitempty" doc:"The five with the most entries; absent if the caller may not see subscribers."`
}

// Subscriber is a subscriber of messages.
type Subscriber struct {
	ID      string `json:"subscriberId" doc:"The subscriber."`
	Entries int64  `json:"entries" doc:"Estimated number of entries."`
}

// addSubscribers adds the subscribers of the sampled entries.
func (p *Preview) addSubscribers(ctx context.Context, tx transaction, ids []uuid.UUID) error {
	row, err := tx.ConcernedSubscribers(ctx, ids)
	if err != nil || row.Entries == 0 {
		return err
	}
	n := int64(len(ids))
	e := estimate("", row.Entries, n, p.Total)
	p.Subscribers = &Subscribers{
		Subscribers: row.Subscribers, Entries: e.Entries, Low: e.Low, High: e.High, Sampled: n,
	}
	if err := json.Unmarshal(row.Largest, &p.Subscribers.Largest); err != nil {
		return err
	}
	for i := range p.Subscribers.Largest {
		s := &p.Subscribers.Largest[i]
		s.Entries = estimate("", s.Entries, n, p.Total).Entries
	}
	return nil
}

// text describes the subscribers of total entries.
func (s *Subscribers) text(w Words, total int64) string {
	subscribers := "1 subscriber"
	if s.Subscribers != 1 {
		subscribers = w.Number(s.Subscribers) + " subscribers"
	}
	most := make([]string, 0, len(s.Largest))
	for _, one := range s.Largest {
		most = append(most, fmt.Sprintf("%s (%s)", one.ID, w.Number(one.Entries)))
	}
	list := ""
	if len(most) > 0 {
		list = "; the most: " + strings.Join(most, ", ")
	}
	if s.Sampled >= total {
		return fmt.Sprintf("%s of %s concern %s%s", w.Number(s.Entries), w.Number(total), subscribers, list)
	}
	return fmt.Sprintf("about %s (%s to %s) of %s concern at least %s%s; estimated from %s at random",
		w.Number(s.Entries), w.Number(s.Low), w.Number(s.High), w.Number(total), subscribers, list, w.Number(s.Sampled))
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
// groups that read the topics of records, the subscribers, the expected recoveries, and the load of the destinations
// and queues that get most entries.
func (p *Preview) Notes(w Words) []string {
	expect := p.Expect.Texts(w)
	notes := make([]string, 0, 4+len(p.Unworked)+len(p.Readers)+len(expect)+len(p.Destinations)+len(p.Load))
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
	if p.Subscribers != nil {
		notes = append(notes, p.Subscribers.text(w, p.Total))
	}
	notes = append(notes, expect...)
	for i := range p.Destinations[:min(len(p.Destinations), toldGroups)] {
		notes = append(notes, p.Destinations[i].Text(w))
	}
	for i := range p.Load[:min(len(p.Load), toldGroups)] {
		notes = append(notes, p.Load[i].Text(w))
	}
	return notes
}
