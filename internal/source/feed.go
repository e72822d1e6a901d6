package source

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source/internal/dbsqlc"
)

const (
	// feedsInterval is the time between two searches for filed entries.
	feedsInterval = time.Second
	// feedsTimeout limits one turn of the feeds. feedsLease is the duration of the reservation that keeps other processes
	// from publishing.
	feedsTimeout = 40 * time.Second
	feedsLease   = time.Minute
	// collectTimeout limits a feed's search for filed entries.
	collectTimeout = 10 * time.Second
	// feedTimeout limits the publication of a batch, and markTimeout the statement that records where the records are.
	feedTimeout = 15 * time.Second
	markTimeout = 2 * time.Second
	// firstFeedPause is the pause after a topic's first failure. It doubles with each further failure, up to
	// lastFeedPause.
	firstFeedPause = 5 * time.Second
	lastFeedPause  = 5 * time.Minute
	// feedTopics is the number of topics of a cluster to which feeds publish concurrently.
	feedTopics = 4
	// feedBatch is the maximum number of records in a batch for a topic. Their entries are read feedPart at a time, until
	// the values have feedBytes in total: an entry with its payload may have several MiB.
	feedBatch = 100
	feedPart  = 10
	feedBytes = 8 << 20
	// feedLanes is the number of records of a batch that are sent concurrently. Records with the same key are in the same
	// lane.
	feedLanes = 16
	// maxCollected is the number of entries that a feed reads from the audit trail at a time.
	maxCollected = 10_000
	// dutyFeeds is the name of the reservation that lets one process publish.
	dutyFeeds = "feeds"
)

// feeds is the state of [Client.FeedLoop].
type feeds struct {
	holder  uuid.UUID
	paused  map[feedTopic]pause
	reports map[string]string // the error reported last, by the name of the feed
	// encoders has the encoders of the feeds of policy. To make one, dlqd may read a descriptor.
	policy   *policy.Policy
	encoders map[string]encoder
}

// encoder returns the encoder of a feed of a policy.
func (f *feeds) encoder(p *policy.Policy, feed *policy.Feed) (encoder, error) {
	if f.policy != p {
		f.policy, f.encoders = p, map[string]encoder{}
	}
	if f.encoders[feed.Name] == nil {
		encode, err := encoderOf(feed)
		if err != nil {
			return nil, err
		}
		f.encoders[feed.Name] = encode
	}
	return f.encoders[feed.Name], nil
}

type feedTopic struct{ feed, topic string }

// pause has the last error of a topic, and the time of the next try. It is deleted once publishing succeeds.
type pause struct {
	until time.Time
	next  time.Duration // the pause after the next failure
	err   string
}

// FeedLoop returns the background loop that publishes filed entries to the topics of feeds. Only one process at a time
// runs this loop. The loop publishes nothing until the database has the masking rules of the current policy.
func (c *Client) FeedLoop() *background.Loop {
	f := &feeds{holder: uuid.New(), paused: map[feedTopic]pause{}, reports: map[string]string{}}
	return background.New(background.Config{
		Name: "feeds", Interval: feedsInterval, Timeout: feedsTimeout, Patience: feedsTimeout, OneProcess: true,
		Finish: true, Failing: "publishing dead letters to topics failed; they wait",
		Once: func(ctx context.Context) (time.Duration, error) {
			if len(c.Policy().Sources.Feeds) == 0 || c.Masked != nil && !c.Masked() { // published data cannot be masked later
				return 0, nil
			}
			queries := dbsqlc.New(c.Store.DB)
			taken, err := queries.TakeDuty(ctx, dbsqlc.TakeDutyParams{Name: dutyFeeds, Holder: f.holder, During: feedsLease})
			if err != nil || !taken { // another process publishes, so this process's state is out of date
				clear(f.paused)
				clear(f.reports)
				return 0, err
			}
			more, err := c.feed(ctx, f)
			if more && err == nil {
				return background.More, nil
			}
			return 0, err
		},
		End: func() {
			ctx, cancel := context.WithTimeout(context.Background(), feedsInterval)
			defer cancel()
			_ = dbsqlc.New(c.Store.DB).EndDuty(ctx, dbsqlc.EndDutyParams{Name: dutyFeeds, Holder: f.holder})
		},
	})
}

// feed adds filed entries to the records of all feeds, and publishes a batch for each topic. It returns true if more
// may be left. A slow cluster does not delay the others. A topic that fails is left out for a time, which doubles from
// firstFeedPause to lastFeedPause.
func (c *Client) feed(ctx context.Context, f *feeds) (more bool, err error) {
	queries := dbsqlc.New(c.Store.DB)
	p := c.Policy()
	var waiting []*batchOfFeed
	for _, name := range p.FeedNames() {
		feed := p.Sources.Feeds[name]
		encode, unable := f.encoder(p, feed)
		collected, failed := c.collect(ctx, queries, feed)
		more = more || collected >= maxCollected
		topics, alsoFailed := queries.FeedTopics(ctx, name)
		err = errors.Join(err, failed, alsoFailed)
		for _, topic := range topics {
			if time.Now().After(f.paused[feedTopic{name, topic}].until) {
				waiting = append(waiting, &batchOfFeed{feed: feed, topic: topic, encode: encode, err: unable})
			}
		}
	}
	clusters := map[string][]*batchOfFeed{}
	for _, b := range waiting {
		clusters[b.feed.Cluster] = append(clusters[b.feed.Cluster], b)
	}
	var running sync.WaitGroup
	for _, batches := range clusters {
		slots := make(chan struct{}, feedTopics)
		for _, b := range batches {
			running.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				if err := background.Guard(func() error { b.publish(ctx, c); return nil }); err != nil {
					b.panicked(ctx, c, err)
				}
				b.broken = b.err != nil && ctx.Err() == nil // an error because the turn ended does not count
			})
		}
	}
	running.Wait()
	for _, b := range waiting {
		more = more || b.full && b.err == nil
		switch at := (feedTopic{b.feed.Name, b.topic}); {
		case b.broken:
			now := max(f.paused[at].next, firstFeedPause)
			f.paused[at] = pause{time.Now().Add(now), min(2*now, lastFeedPause), withoutStack(b.err)}
		case b.err == nil:
			delete(f.paused, at)
		}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), markTimeout) // also after the turn has ended
	defer cancel()
	return more, errors.Join(err, f.report(ctx, queries, p))
}

// collect adds filed entries to the records of a feed.
func (c *Client) collect(ctx context.Context, queries *dbsqlc.Queries, feed *policy.Feed) (int32, error) {
	ctx, cancel := context.WithTimeout(ctx, collectTimeout)
	defer cancel()
	return queries.CollectFeed(ctx, dbsqlc.CollectFeedParams{Feed: feed.Name, Queues: feed.Queues, Most: maxCollected})
}

// report writes the errors of feeds that have changed since the last report.
func (f *feeds) report(ctx context.Context, queries *dbsqlc.Queries, p *policy.Policy) (err error) {
	errs := map[string]string{}
	for _, at := range slices.SortedFunc(maps.Keys(f.paused), func(a, b feedTopic) int {
		return strings.Compare(b.topic, a.topic)
	}) {
		errs[at.feed] = f.paused[at].err // if several topics failed, the error of the first
	}
	for _, name := range p.FeedNames() {
		if before, ok := f.reports[name]; ok && before == errs[name] {
			continue
		}
		failed := queries.ReportFeed(ctx, dbsqlc.ReportFeedParams{Feed: name, Error: storable(errs[name])})
		if err = errors.Join(err, failed); failed == nil {
			f.reports[name] = errs[name]
		}
	}
	return err
}

// batchOfFeed is a batch of records of a feed for one topic.
type batchOfFeed struct {
	feed   *policy.Feed
	topic  string
	encode encoder
	rows   []feedRow
	full   bool  // there may be more records
	err    error // why publishing stopped before the end of the batch

	broken bool // err has another cause than the end of the turn
}

// feedRow is one record of a batch.
type feedRow struct {
	dbsqlc.FeedBatchRow

	message Message
	ended   bool // the broker acknowledged the record, or it cannot be published
	stored  Acknowledgement
	failure string
}

// publish publishes the next records of a topic, and records where the broker stored them. If that is not recorded, for
// example because the process died, the records are published again with the same ids.
func (b *batchOfFeed) publish(ctx context.Context, c *Client) {
	if b.err != nil {
		return
	}
	queries := dbsqlc.New(c.Store.DB)
	if b.err = b.read(ctx, c, queries); b.err != nil {
		return
	}
	b.err = b.send(ctx, c)
	mark := dbsqlc.MarkFeedParams{Feed: b.feed.Name}
	for i := range b.rows {
		r := &b.rows[i]
		if !r.ended {
			continue
		}
		mark.Ids = append(mark.Ids, r.ID)
		mark.Partitions = append(mark.Partitions, r.stored.Partition)
		mark.Offsets = append(mark.Offsets, r.stored.Offset)
		mark.Failures = append(mark.Failures, storable(r.failure))
	}
	if len(mark.Ids) > 0 {
		// Record acknowledged records even if the turn has ended, or they would be sent again.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), markTimeout)
		defer cancel()
		b.err = errors.Join(b.err, queries.MarkFeed(ctx, mark))
	}
}

// panicked logs a panic while publishing the batch, and records it as the error of the batch.
func (b *batchOfFeed) panicked(ctx context.Context, c *Client, err error) {
	c.Logger.ErrorContext(ctx, "publishing to a topic of a feed panicked", "feed", b.feed.Name, "topic", b.topic,
		"error", err)
	b.err = err
}

// read reads the entries of the next feedBatch records, masked as the feed's settings say. It stops once their values
// exceed feedBytes. If Kafka does not permit the topic's name, it ends the records with a failure.
func (b *batchOfFeed) read(ctx context.Context, c *Client, queries *dbsqlc.Queries) error {
	rows, err := queries.FeedBatch(ctx, dbsqlc.FeedBatchParams{Feed: b.feed.Name, Topic: b.topic, Most: feedBatch})
	if err != nil || len(rows) == 0 {
		return err
	}
	b.full = len(rows) == feedBatch
	data := c.Policy().Data
	plain := len(data.SensitivePaths)+len(data.SensitivePatterns) == 0
	if b.feed.View != policy.ViewOperator {
		ctx = postgres.AsReader(ctx)
	}
	if len(b.topic) > policy.MaxTopicLength {
		for i := range rows {
			b.rows = append(b.rows, feedRow{FeedBatchRow: rows[i], ended: true, failure: fmt.Sprintf(
				"the name of the topic has %d characters; Kafka permits %d", len(b.topic), policy.MaxTopicLength)})
		}
		return nil
	}
	size := 0
	for part := range slices.Chunk(rows, feedPart) {
		if size > feedBytes {
			b.full = true
			break
		}
		bytes, err := b.readPart(ctx, c, part, plain)
		if err != nil {
			return err
		}
		size += bytes
	}
	return nil
}

// readPart reads the entries of some of the next records, and returns the number of bytes in their values. plain means
// that the policy masks no data. Otherwise the key of every record is a hash of the ordering key, also if the entry has
// no masked value, so that records of one ordering key have the same key.
func (b *batchOfFeed) readPart(ctx context.Context, c *Client, rows []dbsqlc.FeedBatchRow, plain bool) (
	bytes int, err error,
) {
	ids := make([]uuid.UUID, len(rows))
	for i := range rows {
		ids[i] = rows[i].EntryID
	}
	filter, err := json.Marshal(map[string]any{"ids": ids})
	if err != nil {
		return 0, err
	}
	found, err := c.Entries.FindEntries(ctx, filter, nil)
	if err != nil {
		return 0, err
	}
	entries := make(map[uuid.UUID]*deadletter.Entry, len(found))
	for i := range found {
		entries[found[i].ID] = &found[i]
	}
	for i := range rows {
		r := feedRow{FeedBatchRow: rows[i]}
		entry := entries[r.EntryID]
		if entry == nil { // the entry was deleted, or it moved between partitions during the read
			entry, _, err = c.Entries.Get(ctx, r.EntryID)
		}
		switch {
		case errors.Is(err, deadletter.ErrNotFound):
			r.ended, r.failure = true, "the entry is deleted"
		case err != nil:
			return 0, err
		default:
			b.describe(&r, entry, plain)
		}
		bytes += len(r.message.Value)
		b.rows, err = append(b.rows, r), nil
	}
	return bytes, nil
}

// describe sets the record to publish for an entry, or the reason why there is none.
func (b *batchOfFeed) describe(r *feedRow, entry *deadletter.Entry, plain bool) {
	value, form, err := b.encode(r.ID, entry)
	if err != nil {
		r.ended, r.failure = true, err.Error()
		return
	}
	r.message = Message{Value: value, Headers: []Header{
		{Key: "content-type", Value: []byte(form)},
		{Key: HeaderEntry, Value: []byte(r.EntryID.String())},
		{Key: HeaderDelivery, Value: []byte(r.ID.String())},
		{Key: HeaderFeed, Value: []byte(b.feed.Name)},
	}}
	switch {
	case r.OrderingKey == "":
	case plain:
		r.message.Key = []byte(r.OrderingKey)
	default:
		r.message.Key = []byte(r.HiddenKey)
	}
}

// send publishes the records. It sends records with the same key one after another, so that a record that is sent again
// is not overtaken. A refused record is sent again alone; if it is refused again, it ends with a failure. Other errors
// end the lane, and send returns one of them.
func (b *batchOfFeed) send(ctx context.Context, c *Client) error {
	ctx, cancel := context.WithTimeout(ctx, feedTimeout)
	defer cancel()
	var lanes [feedLanes][]*feedRow
	for i := range b.rows {
		lane := i % feedLanes
		if key := b.rows[i].OrderingKey; key != "" {
			hash := fnv.New32a()
			_, _ = hash.Write([]byte(key))
			lane = int(hash.Sum32() % feedLanes)
		}
		lanes[lane] = append(lanes[lane], &b.rows[i])
	}
	var running sync.WaitGroup
	var errs [feedLanes]error
	var refused [feedLanes]*feedRow
	for i, lane := range lanes {
		running.Go(func() {
			for _, r := range lane {
				if r.ended {
					continue
				}
				if errs[i] = background.Guard(func() error { return b.sendOne(ctx, c, r) }); errs[i] == nil {
					continue
				}
				if isRefused(errs[i]) {
					refused[i] = r
				}
				return
			}
		})
	}
	running.Wait()
	for _, err := range errs {
		if _, ok := errors.AsType[*background.PanicError](err); ok {
			b.panicked(ctx, c, err)
		}
	}
	for i, r := range refused {
		if r == nil {
			continue
		}
		// The client may have sent the record in one batch with others, and the batch was too large. Send the record alone.
		if errs[i] = b.sendOne(ctx, c, r); isRefused(errs[i]) {
			r.ended, r.failure, errs[i] = true, errs[i].Error(), nil
		}
		b.full = true // records of the lane are left
	}
	for _, err := range errs {
		if err != nil { // return one error: all are about the same topic
			return err
		}
	}
	return nil
}

func (b *batchOfFeed) sendOne(ctx context.Context, c *Client, r *feedRow) error {
	stored, err := c.Publish(ctx, Target{Cluster: b.feed.Cluster, Topic: b.topic, Partition: Unknown}, r.message)
	if err == nil {
		r.ended, r.stored = true, stored
	}
	return err
}

// isRefused reports whether the broker refuses a record because of its content or size. A missing topic does not count,
// because it may be created later.
func isRefused(err error) bool {
	structured, ok := errors.AsType[*riverdlq.Error](err)
	return ok && structured.Class == riverdlq.ClassValidation && errors.Is(err, ErrUnpublishable)
}

// FeedStatus is the state of a feed.
type FeedStatus struct {
	Name         string     `json:"name" doc:"Name of the feed in the policy."`
	Cluster      string     `json:"cluster" doc:"Name of the cluster in the policy."`
	Topic        string     `json:"topic" doc:"The topic, with {queue} for the queue of the entry."`
	State        string     `json:"state" enum:"publishing,caught_up,failing,waiting,paused" doc:"What is done. waiting: no process looks for its entries."`
	Published    int64      `json:"published" doc:"Entries that the broker has acknowledged."`
	Failed       int64      `json:"failed" doc:"Entries that could not be published: too large for the topic, or deleted before."`
	Waiting      int64      `json:"waiting" doc:"Entries that are not published yet."`
	WaitingSince *time.Time `json:"waitingSince,omitempty" doc:"When the feed found the first of them."`
	Error        string     `json:"error,omitempty" doc:"The last error; absent once publishing works again."`
	ErrorAt      *time.Time `json:"errorAt,omitempty" doc:"When that error occurred first."`
	PausedAt     *time.Time `json:"pausedAt,omitempty" doc:"When it was paused."`
	PausedBy     string     `json:"pausedBy,omitempty" doc:"Who paused it."`
}

// Feeds returns the state of the policy's feeds. For a caller whose scope does not have all queues, it returns none.
func (s *Store) Feeds(ctx context.Context) ([]FeedStatus, error) {
	rows, err := dbsqlc.New(s.DB).ListFeeds(ctx)
	list := make([]FeedStatus, len(rows))
	for i := range rows {
		r := &rows[i]
		list[i] = FeedStatus{
			Name: r.Feed, Cluster: r.Cluster, Topic: r.Topic, Published: r.Published, Failed: r.Failed, Waiting: r.Waiting,
			WaitingSince: timeOf(r.WaitingSince), Error: r.Error, ErrorAt: timeOf(r.ErrorAt), State: StateCaughtUp,
			PausedAt: timeOf(r.PausedAt), PausedBy: r.PausedBy,
		}
		switch {
		case list[i].PausedAt != nil:
			list[i].State = StatePaused
		case !r.Running:
			list[i].State = StateWaiting
		case r.Error != "":
			list[i].State = StateFailing
		case r.Waiting > 0:
			list[i].State = StatePublishing
		}
	}
	return list, err
}

// PauseFeed stops the publication of a feed. It returns false if it is paused already.
func (s *Store) PauseFeed(ctx context.Context, feed, actor, note string) (changed bool, err error) {
	changed, err = dbsqlc.New(s.DB).PauseFeed(ctx, dbsqlc.PauseFeedParams{
		Feed: feed, Actor: actor, Note: note, Origin: deadletter.Origin(ctx),
	})
	return changed, deadletter.AsMoveError(err)
}

// ResumeFeed resumes the publication of a feed. It returns false if it is not paused.
func (s *Store) ResumeFeed(ctx context.Context, feed, actor, note string) (changed bool, err error) {
	changed, err = dbsqlc.New(s.DB).ResumeFeed(ctx, dbsqlc.ResumeFeedParams{
		Feed: feed, Actor: actor, Note: note, Origin: deadletter.Origin(ctx),
	})
	return changed, deadletter.AsMoveError(err)
}

// RewindFeed publishes the records again that a feed collected since a time. It returns the number of records.
func (s *Store) RewindFeed(ctx context.Context, feed string, since time.Time, actor, note string) (int64, error) {
	records, err := dbsqlc.New(s.DB).RewindFeed(ctx, dbsqlc.RewindFeedParams{
		Feed: feed, Since: since, Actor: actor, Note: note, Origin: deadletter.Origin(ctx),
	})
	return records, deadletter.AsMoveError(err)
}

// Published is a record that a feed publishes for an entry.
type Published struct {
	Feed      string     `json:"feed" doc:"Name of the feed in the policy."`
	Cluster   string     `json:"cluster" doc:"Name of the cluster in the policy."`
	Topic     string     `json:"topic" doc:"The topic."`
	Partition *int32     `json:"partition,omitempty" doc:"Partition of the topic; absent until the broker has acknowledged the record."`
	Offset    *int64     `json:"offset,omitempty" doc:"Offset in the partition; absent until then."`
	At        *time.Time `json:"at,omitempty" doc:"When the broker acknowledged it; absent until then."`
	Failure   string     `json:"failure,omitempty" doc:"Why it cannot be published."`
}

// Place returns the topic, partition and offset of the record, or why the record has none.
func (p *Published) Place() string {
	switch {
	case p.Failure != "":
		return fmt.Sprintf("%s: not published: %s", p.Topic, p.Failure)
	case p.Offset == nil:
		return p.Topic + ": not published yet"
	}
	return fmt.Sprintf("%s/%d at offset %d", p.Topic, *p.Partition, *p.Offset)
}

// PublishedTo returns the records that feeds publish for an entry.
func (s *Store) PublishedTo(ctx context.Context, entry uuid.UUID) ([]Published, error) {
	rows, err := dbsqlc.New(s.DB).PublishedTo(ctx, entry)
	list := make([]Published, len(rows))
	for i := range rows {
		r := &rows[i]
		list[i] = Published{
			Feed: r.Feed, Cluster: r.Cluster, Topic: r.Topic, At: timeOf(r.AcknowledgedAt), Failure: r.Failure,
		}
		if r.AtOffset >= 0 {
			list[i].Partition, list[i].Offset = &r.Partition, &r.AtOffset
		}
	}
	return list, err
}
