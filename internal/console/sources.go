package console

import (
	"cmp"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/source"
)

// maxPartitions is the number of partitions on the page of sources. Failing partitions come first, then the partitions
// with the most records left to read.
const maxPartitions = 100

type sources struct {
	Sentence   string
	Sources    []sourceRow
	Partitions []source.PartitionStatus
	More       int // partitions that are not shown
	Feeds      []feedRow
	Copies     []copyText
}

type sourceRow struct {
	source.Reading

	Why string // why the viewer cannot pause or resume it; "" if they can
}

type feedRow struct {
	source.FeedStatus

	Why string // why the viewer cannot pause or resume it; "" if they can
}

// Word describes the state of a feed.
func (f *feedRow) Word() mark {
	switch f.State {
	case source.StateCaughtUp:
		return mark{f.State, "all published", "✓", "ok"}
	case source.StatePublishing:
		return mark{f.State, "publishing", "▸", "ok"}
	case source.StateWaiting:
		return mark{f.State, "no process publishes it", "■", "bad"}
	}
	return sourceMark(f.State)
}

// Paused reports whether an operator paused the feed.
func (f *feedRow) Paused() bool { return f.PausedAt != nil }

// Word describes the state of a source.
func (s *sourceRow) Word() mark { return sourceMark(s.State) }

// Paused reports whether an operator paused the source.
func (s *sourceRow) Paused() bool { return s.PausedAt != nil }

// sourceMark describes the state of a source or of a partition.
func sourceMark(state string) mark {
	switch state {
	case source.StateCaughtUp:
		return mark{state, "all read", "✓", "ok"}
	case source.StateReading:
		return mark{state, "reading", "▸", "ok"}
	case source.StateFailing:
		return mark{state, "failing", "■", "bad"}
	case source.StateWaiting:
		return mark{state, "no process reads it", "■", "bad"}
	case source.StatePaused:
		return mark{state, "paused", "‖", "warn"}
	}
	return mark{state, "not in the policy", "–", "warn"}
}

func (c *Console) sources(in *request) (*view, error) {
	out, err := call(in, api.ListSources, api.None{})
	if err != nil {
		return nil, err
	}
	s := &sources{Copies: copies("dlqd sources list", "SELECT * FROM dlq.sources; SELECT * FROM dlq.source_progress ORDER BY source, topic, partition;", //nolint:unqueryvet // for people
		in.curl(api.ListSources.Path))}
	for i := range out.Sources {
		s.Sources = append(s.Sources, sourceRow{
			out.Sources[i], missingRoleIn(in.me(), access.Operator, out.Sources[i].Queue),
		})
	}
	s.Partitions = slices.DeleteFunc(out.Partitions, func(p source.PartitionStatus) bool {
		return p.Topic == "" && p.Error == ""
	})
	slices.SortStableFunc(s.Partitions, func(a, b source.PartitionStatus) int {
		return cmp.Or(compareFailing(a, b), cmp.Compare(lagOf(b), lagOf(a)))
	})
	if s.More = len(s.Partitions) - maxPartitions; s.More > 0 {
		s.Partitions = s.Partitions[:maxPartitions]
	}
	for i := range out.Feeds {
		s.Feeds = append(s.Feeds, feedRow{out.Feeds[i], missingRoleIn(in.me(), access.Operator, "")})
	}
	s.Sentence = s.summary()
	return &view{Template: "sources", Title: "Sources", Data: s, Interval: queuesInterval}, nil
}

func compareFailing(a, b source.PartitionStatus) int {
	failing := func(p source.PartitionStatus) int { return map[bool]int{true: 0, false: 1}[p.Error != ""] }
	return cmp.Compare(failing(a), failing(b))
}

func lagOf(p source.PartitionStatus) int64 {
	if p.Lag == nil {
		return 0
	}
	return *p.Lag
}

// summary describes the state of the sources and of the feeds.
func (s *sources) summary() string {
	var lag, lost int64
	var bad, paused, unpublished []string
	for i := range s.Sources {
		row := &s.Sources[i]
		lag, lost = lag+row.Lag, lost+row.Lost
		switch row.State {
		case source.StateFailing, source.StateWaiting:
			bad = append(bad, row.Name)
		case source.StatePaused:
			paused = append(paused, row.Name)
		}
	}
	for i := range s.Feeds {
		switch row := &s.Feeds[i]; row.State {
		case source.StateFailing, source.StateWaiting:
			unpublished = append(unpublished, row.Name)
		case source.StatePaused:
			paused = append(paused, row.Name)
		}
	}
	var sentences []string
	switch {
	case len(s.Sources) == 0:
		sentences = append(sentences, "No sources: dlqd reads no topics.")
	case lag > 0:
		sentences = append(sentences, plural(lag, "record is", "records are")+" not read yet.")
	case len(bad) == 0 && len(paused) == 0:
		sentences = append(sentences, "All records are read.")
	}
	if len(bad) > 0 {
		sentences = append(sentences, "Reading fails: "+strings.Join(bad, ", ")+".")
	}
	if len(unpublished) > 0 {
		sentences = append(sentences, "Publishing fails: "+strings.Join(unpublished, ", ")+".")
	}
	if len(paused) > 0 {
		sentences = append(sentences, "Paused: "+strings.Join(paused, ", ")+".")
	}
	if lost > 0 {
		sentences = append(sentences, "The brokers did not have "+plural(lost, "offset")+" any more.")
	}
	return strings.Join(sentences, " ")
}

// actOnSource pauses or resumes a source.
func (c *Console) actOnSource(in *request) (*done, error) {
	name := in.PostFormValue("name")
	action := api.SourceActionInput{
		SourceInput: api.SourceInput{Name: name}, Body: &api.Action{Note: in.PostFormValue("note")},
	}
	var text string
	var err error
	switch in.PostFormValue("do") {
	case "pause":
		text = "Source " + name + " is paused: its records stay in their topics."
		_, err = call(in, api.PauseSource, action)
	case "resume":
		text = "Source " + name + " is resumed."
		_, err = call(in, api.ResumeSource, action)
	default:
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action", Detail: "choose pause or resume",
		}
	}
	if err != nil {
		return nil, err
	}
	return &done{To: "/sources#" + url.PathEscape(name), Flash: flash{Text: text}}, nil
}

// actOnFeed pauses or resumes a feed.
func (c *Console) actOnFeed(in *request) (*done, error) {
	name := in.PostFormValue("name")
	action := api.FeedActionInput{
		FeedInput: api.FeedInput{Name: name}, Body: &api.Action{Note: in.PostFormValue("note")},
	}
	var text string
	var err error
	switch in.PostFormValue("do") {
	case "pause":
		text = "Feed " + name + " is paused: its entries wait."
		_, err = call(in, api.PauseFeed, action)
	case "resume":
		text = "Feed " + name + " is resumed."
		_, err = call(in, api.ResumeFeed, action)
	default:
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action", Detail: "choose pause or resume",
		}
	}
	if err != nil {
		return nil, err
	}
	return &done{To: "/sources#feed-" + url.PathEscape(name), Flash: flash{Text: text}}, nil
}
