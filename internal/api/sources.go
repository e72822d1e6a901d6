package api

import (
	"context"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/source"
)

// SourcesOutputBody lists sources, the partitions that they read, and feeds.
type SourcesOutputBody struct {
	Sources    []source.Reading         `json:"sources" doc:"The sources, by name."`
	Partitions []source.PartitionStatus `json:"partitions" doc:"What the readers of sources reported last, by source, topic and partition. A source that has reported nothing has one row without a topic."`
	Feeds      []source.FeedStatus      `json:"feeds" doc:"The feeds, by name; none for a caller who does not see all queues."`
}

// SourceInput names a source.
type SourceInput struct {
	Name string `path:"name" maxLength:"255" doc:"Name of the source in the policy." example:"orders"`
}

// SourceActionInput is a request to pause or resume a source.
type SourceActionInput struct {
	SourceInput

	Body *Action
}

// RewindAction moves the position of a partition.
type RewindAction struct {
	Action

	Topic     string    `json:"topic" minLength:"1" maxLength:"249" doc:"Name of the topic." example:"dlq.prod.payments"`
	Partition int32     `json:"partition" minimum:"0" doc:"Partition of the topic."`
	Offset    *int64    `json:"offset,omitempty" minimum:"0" doc:"The offset to read next. Set either offset or time." example:"700"`
	Time      time.Time `json:"time,omitzero" doc:"The time of the record to read next; this needs a process that reads the source. Set either time or offset."`
	Skip      bool      `json:"skip,omitempty" doc:"Allow an offset above the position: the records between are skipped, and counted as lost."`
}

// RewindInput is a request to move the position of a partition of a source.
type RewindInput struct {
	SourceInput

	Body RewindAction
}

// SourceOutputBody is one source.
type SourceOutputBody struct {
	source.Reading

	Topics []source.PartitionStatus `json:"topics" doc:"What its readers reported last, by topic and partition."`
}

// FeedInput names a feed.
type FeedInput struct {
	Name string `path:"name" maxLength:"255" doc:"Name of the feed in the policy." example:"deaths"`
}

// FeedActionInput is a request to pause or resume a feed.
type FeedActionInput struct {
	FeedInput

	Body *Action
}

// FeedRewindAction publishes the records of a feed again.
type FeedRewindAction struct {
	Action

	Since time.Time `json:"since" doc:"Records of entries that the feed found at this time or later."`
}

// FeedRewindInput is a request to publish the records of a feed again.
type FeedRewindInput struct {
	FeedInput

	Body FeedRewindAction
}

// FeedRewound is the number of records that a feed publishes again.
type FeedRewound struct {
	Records int64 `json:"records" doc:"Records that are published again."`
}

// OffsetAt returns the offset of the first record of a partition at or after a time, as source.Broker does.
type OffsetAt func(ctx context.Context, of *policy.TopicSource, topic string, partition int32, at time.Time) (
	int64, error)

// Operations on sources.
var (
	ListSources = Operation[None, SourcesOutputBody]{"list-sources", http.MethodGet, "/api/sources"}
	GetSource   = Operation[SourceInput, SourceOutputBody]{"get-source", http.MethodGet, "/api/sources/{name}"}
	PauseSource = Operation[SourceActionInput, SourceOutputBody]{
		"pause-source", http.MethodPost, "/api/sources/{name}/pause",
	}
	ResumeSource = Operation[SourceActionInput, SourceOutputBody]{
		"resume-source", http.MethodPost, "/api/sources/{name}/resume",
	}
	RewindSource = Operation[RewindInput, source.Rewound]{
		"rewind-source", http.MethodPost, "/api/sources/{name}/rewind",
	}
	PauseFeed  = Operation[FeedActionInput, source.FeedStatus]{"pause-feed", http.MethodPost, "/api/feeds/{name}/pause"}
	ResumeFeed = Operation[FeedActionInput, source.FeedStatus]{"resume-feed", http.MethodPost, "/api/feeds/{name}/resume"}
	RewindFeed = Operation[FeedRewindInput, FeedRewound]{"rewind-feed", http.MethodPost, "/api/feeds/{name}/rewind"}
)

func (s *service) registerSources(api huma.API) {
	tags := []string{"sources"}
	next, lag := int64(812), int64(3)
	at := time.Date(2026, 11, 28, 9, 30, 0, 0, time.UTC)
	status := source.Reading{
		Name: "orders", Cluster: "main", Queue: "orders", State: source.StateReading, Partitions: 1, Lag: 3, Records: 810,
		Holes: 2, MovedAt: &at,
	}
	partitions := []source.PartitionStatus{{
		Source: "orders", Cluster: "main", Topic: "dlq.prod.payments", Queue: "orders", State: source.StateReading,
		Next: &next, Lag: &lag, Records: 810, Holes: 2, At: at, MovedAt: &at,
	}}
	one := SourceOutputBody{status, partitions}
	feed := source.FeedStatus{
		Name: "deaths", Cluster: "main", Topic: "dlq.prod.{queue}", State: source.StateCaughtUp, Published: 512,
	}
	feeds := []source.FeedStatus{feed}
	list := huma.Operation{
		Tags:    tags,
		Summary: "List the sources, the partitions that they read, and the feeds", Errors: []int{503},
	}
	example(&list, http.StatusOK, SourcesOutputBody{[]source.Reading{status}, partitions, feeds})
	register(s, api, ListSources, list, func(ctx context.Context, _ *None) (*SourcesOutputBody, error) {
		sources, err := s.Sources.List(ctx)
		if err != nil {
			return nil, err
		}
		read, err := s.Sources.Partitions(ctx, "")
		if err != nil {
			return nil, err
		}
		feeds, err := s.Sources.Feeds(ctx)
		return &SourcesOutputBody{sources, read, feeds}, err
	})

	get := huma.Operation{Tags: tags, Summary: "Get a source, and the partitions that it reads", Errors: []int{404, 503}}
	example(&get, http.StatusOK, one)
	register(s, api, GetSource, get, func(ctx context.Context, in *SourceInput) (*SourceOutputBody, error) {
		return s.source(ctx, in.Name)
	})

	pause := huma.Operation{
		Tags: tags, Summary: "Pause a source",
		Description: "Stops reading the source in all processes, within seconds. Its records stay in their topics, and " +
			"redeliveries continue. The change is recorded in the audit trail.",
		Errors: []int{400, 404, 422, 503},
	}
	paused := one
	paused.State, paused.PausedAt, paused.PausedBy = source.StatePaused, &at, "kim"
	example(&pause, http.StatusOK, paused)
	register(s, api, PauseSource, pause, func(ctx context.Context, in *SourceActionInput) (*SourceOutputBody, error) {
		return s.changeSource(ctx, in, s.Sources.Pause)
	})
	resume := huma.Operation{
		Tags: tags, Summary: "Resume a source",
		Description: "Reading continues where it stopped. The change is recorded in the audit trail.",
		Errors:      []int{400, 404, 422, 503},
	}
	example(&resume, http.StatusOK, one)
	register(s, api, ResumeSource, resume, func(ctx context.Context, in *SourceActionInput) (*SourceOutputBody, error) {
		return s.changeSource(ctx, in, s.Sources.Resume)
	})
	rewind := huma.Operation{
		Tags: tags, Summary: "Read the records of a partition again",
		Description: "Moves the position back. A record that has an entry does not become a second one; a record whose " +
			"entry was deleted becomes an entry again. The change is recorded in the audit trail.",
		Errors: []int{400, 404, 422, 503},
	}
	example(&rewind, http.StatusOK, source.Rewound{Before: 812, Next: 700})
	register(s, api, RewindSource, rewind, s.rewindSource)
	s.registerFeeds(api, feed, at)
}

func (s *service) registerFeeds(api huma.API, feed source.FeedStatus, at time.Time) {
	tags := []string{"sources"}
	pause := huma.Operation{
		Tags: tags, Summary: "Pause a feed",
		Description: "Stops publishing, within seconds. Its entries wait in the database. The change is recorded in the " +
			"audit trail.",
		Errors: []int{400, 404, 422, 503},
	}
	paused := feed
	paused.State, paused.PausedAt, paused.PausedBy = source.StatePaused, &at, "kim"
	example(&pause, http.StatusOK, paused)
	register(s, api, PauseFeed, pause, func(ctx context.Context, in *FeedActionInput) (*source.FeedStatus, error) {
		return s.changeFeed(ctx, in, s.Sources.PauseFeed)
	})
	resume := huma.Operation{
		Tags: tags, Summary: "Resume a feed",
		Description: "Publishing continues where it stopped. The change is recorded in the audit trail.",
		Errors:      []int{400, 404, 422, 503},
	}
	example(&resume, http.StatusOK, feed)
	register(s, api, ResumeFeed, resume, func(ctx context.Context, in *FeedActionInput) (*source.FeedStatus, error) {
		return s.changeFeed(ctx, in, s.Sources.ResumeFeed)
	})
	rewind := huma.Operation{
		Tags: tags, Summary: "Publish the records of a feed again",
		Description: "Publishes the records of the entries that the feed found since a time, up to 100,000, with the same " +
			"ids; also those that could not be published. The change is recorded in the audit trail.",
		Errors: []int{400, 404, 422, 503},
	}
	example(&rewind, http.StatusOK, FeedRewound{Records: 512})
	register(s, api, RewindFeed, rewind, func(ctx context.Context, in *FeedRewindInput) (*FeedRewound, error) {
		act := in.Body.act(ctx)
		records, err := s.Sources.RewindFeed(ctx, in.Name, in.Body.Since, act.Actor, act.Note)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &FeedRewound{records}, nil
	})
}

// changeFeed pauses or resumes a feed.
func (s *service) changeFeed(ctx context.Context, in *FeedActionInput,
	change func(ctx context.Context, feed, actor, note string) (bool, error),
) (*source.FeedStatus, error) {
	if err := s.pauseOrResume(ctx, in.Name, in.Body, change); err != nil {
		return nil, err
	}
	feeds, err := s.Sources.Feeds(ctx)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	for i := range feeds {
		if feeds[i].Name == in.Name {
			return &feeds[i], nil
		}
	}
	return nil, huma.Error404NotFound("there is no feed " + in.Name)
}

// source returns a source in the caller's scope.
func (s *service) source(ctx context.Context, name string) (*SourceOutputBody, error) {
	sources, err := s.Sources.List(ctx)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	for i := range sources {
		if sources[i].Name != name {
			continue
		}
		topics, err := s.Sources.Partitions(ctx, name)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &SourceOutputBody{sources[i], topics}, nil
	}
	return nil, huma.Error404NotFound("there is no source " + name)
}

// changeSource pauses or resumes a source.
func (s *service) changeSource(ctx context.Context, in *SourceActionInput,
	change func(ctx context.Context, source, actor, note string) (bool, error),
) (*SourceOutputBody, error) {
	if err := s.pauseOrResume(ctx, in.Name, in.Body, change); err != nil {
		return nil, err
	}
	return s.source(ctx, in.Name)
}

// pauseOrResume calls change, which pauses or resumes a source or a feed, with the actor and the note of an operator.
// body may be nil.
func (s *service) pauseOrResume(ctx context.Context, name string, body *Action,
	change func(ctx context.Context, name, actor, note string) (bool, error),
) error {
	if body == nil {
		body = &Action{}
	}
	act := body.act(ctx)
	if _, err := change(ctx, name, act.Actor, act.Note); err != nil {
		return s.problem(ctx, err)
	}
	return nil
}

func (s *service) rewindSource(ctx context.Context, in *RewindInput) (*source.Rewound, error) {
	b := &in.Body
	if (b.Offset == nil) == b.Time.IsZero() {
		return nil, huma.Error422UnprocessableEntity("pass either offset or time", &huma.ErrorDetail{
			Location: "body.offset", Message: "exactly one of offset and time is needed",
		})
	}
	if _, err := s.source(ctx, in.Name); err != nil {
		return nil, err
	}
	if b.Offset == nil {
		of := s.Planner().Policy().Sources.Sources[in.Name]
		if of == nil || s.OffsetAt == nil {
			return nil, huma.Error422UnprocessableEntity("this process does not read the source, and cannot look a time up: pass an offset")
		}
		offset, err := s.OffsetAt(ctx, of, b.Topic, b.Partition, b.Time)
		if err != nil {
			s.Logger.WarnContext(ctx, "asking the broker for the offset of a time failed", "source", in.Name, "error", err)
			return nil, huma.Error422UnprocessableEntity("the broker did not return the offset of that time: pass an offset")
		}
		b.Offset = &offset
	}
	act := b.act(ctx)
	rewound, err := s.Sources.Rewind(ctx, in.Name, b.Topic, b.Partition, *b.Offset, b.Skip, act.Actor, act.Note)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return rewound, nil
}
