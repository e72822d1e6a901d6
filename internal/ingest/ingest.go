// Package ingest stores submitted messages. It joins concurrent submissions of single messages into one insert and one
// commit (group commit) and answers each after that commit. A batch has a transaction of its own.
package ingest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/ingest/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process"
)

// Limits of the submissions that wait for their commit. They bound the memory of submissions.
const (
	DefaultMaxPending      = 10_000   // messages
	DefaultMaxPendingBytes = 64 << 20 // bytes of payloads

	// DefaultMaxGroup is the maximum number of messages in one insert. Larger groups are not faster (measured: 34,000 to
	// 37,000 jobs/s from 100 to 5,000 messages) and make the first message wait for the last.
	DefaultMaxGroup = 500

	// DefaultFlushers is the number of concurrent inserts: while one insert waits until its commit is on disk, the next
	// is prepared.
	DefaultFlushers = 2

	// notifyCooldown is the shortest time between two notifications of a queue's workers by this process. With River's
	// cooldown of 100 ms, messages of steady traffic would wait a median of 50 ms.
	notifyCooldown = 5 * time.Millisecond

	// inboxInterval is how long the result of InboxIsOld is reused. The statement takes 80 µs, too long for each insert.
	inboxInterval = time.Minute

	// flushTimeout bounds one insert. It does not depend on the client's context: a client that
	// hangs up must not cancel an insert that other clients share.
	flushTimeout = 15 * time.Second

	// awayRetryAfter is the time after which the client should retry if the dlqd process that delivers the queue is away:
	// a restart takes seconds.
	awayRetryAfter = 10 * time.Second

	// maxAttempts limits how often an insert is executed if it fails for a temporary reason. A repeat is safe because the
	// messageId is unique.
	maxAttempts = 4
)

// Errors of submissions.
var (
	// ErrFull means that the limits of waiting submissions are reached. Nothing of the submission
	// is stored; the client can send it again.
	ErrFull = errors.New("too many messages wait for their commit")
	// ErrStopped means that the program is stopping. Nothing of the submission is stored.
	ErrStopped = errors.New("dlqd is stopping and accepts no messages")
	// ErrUncertain means that the message may or may not be stored: the database did not answer, or the job or entry of
	// an earlier submission disappeared before dlqd could compare the messages. Sending the message again with the same
	// messageId resolves this.
	ErrUncertain = errors.New("the database did not answer; send the message again with the same messageId")
)

// argsSeparator separates the args in the statement InsertMessages. JSON cannot contain it.
const argsSeparator = "\x1e"

// errChangedKey means that a trigger of the application changed a job's unique key. The insert is not repeated: the job
// may be committed, and a repeat would store another one.
var errChangedKey = errors.New("the job has another unique key than its message")

// UnknownQueueError reports a message for a queue that the policy does not have.
type UnknownQueueError struct {
	Index int // index in the batch
	Queue string
	Known []string
}

func (e *UnknownQueueError) Error() string {
	return fmt.Sprintf("there is no queue %q (there are: %s)", e.Queue, strings.Join(e.Known, ", "))
}

// UnworkedQueueError reports a message for a queue that no dlqd process delivers, if an application owns River. The
// application's clients would fetch the message and fail, because they do not know its kind.
type UnworkedQueueError struct {
	Index  int // index in the batch
	Queue  string
	Worked []string // queues of the policy that dlqd processes deliver
}

func (e *UnworkedQueueError) Error() string {
	const format = "no dlqd process delivers the messages of queue %q, and the application's clients cannot (%s)"
	if len(e.Worked) == 0 {
		return fmt.Sprintf(format, e.Queue, "no queue is delivered; run dlqd serve --process")
	}
	return fmt.Sprintf(format, e.Queue, "delivered queues: "+strings.Join(e.Worked, ", "))
}

// AwayError reports a message for a queue whose dlqd process is temporarily away or could not be looked up, if an
// application owns River. Nothing of the submission is stored; the client can send it again.
type AwayError struct {
	Queue      string
	RetryAfter time.Duration
	Err        error // error of the lookup, or nil if the process is away
}

func (e *AwayError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("queue %s: cannot determine whether a dlqd process delivers its messages; send the message "+
			"again later", e.Queue)
	}
	return fmt.Sprintf("queue %s: the dlqd process that delivers its messages is not running; send the message "+
		"again later", e.Queue)
}

func (e *AwayError) Unwrap() error { return e.Err }

// ConflictError reports a message whose messageId belongs to an earlier message with other content.
type ConflictError struct {
	Index     int // index in the batch
	MessageID string
	JobID     int64 // 0 if unknown
}

func (e *ConflictError) Error() string {
	text := fmt.Sprintf("message %s: an earlier message with this messageId has other content", e.MessageID)
	if e.JobID != 0 {
		text += fmt.Sprintf(" (job %d)", e.JobID)
	}
	return text
}

// RefusedError reports a message that the database refuses or that cannot be encoded.
type RefusedError struct {
	MessageID string
	Reason    string
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("message %s cannot be stored: %s", e.MessageID, e.Reason)
}

// OpenError reports a message whose destination's circuit breaker is open.
type OpenError struct {
	Queue, Destination string
	RetryAfter         time.Duration
}

func (e *OpenError) Error() string {
	return fmt.Sprintf("queue %s: the circuit breaker of its destination %s is open", e.Queue, e.Destination)
}

// Receipt is the result of a submission.
type Receipt struct {
	MessageID string
	JobID     int64
	Duplicate bool      // the same message was submitted before; nothing was stored
	EntryID   uuid.UUID // the open dead letter of a duplicate; River may have deleted its job

	createdAt time.Time // of the new job
}

// Trace is the W3C trace context of a submission.
type Trace struct {
	Parent string `json:"traceparent,omitempty"`
	State  string `json:"tracestate,omitempty"`
}

// jobMetadata is the metadata of a message's job.
type jobMetadata struct {
	Trace

	Held string `json:"dlq:held,omitempty"` // why the message is held; see the delivery package
}

// Observer is called after each insert with its number of messages, the longest wait of a message,
// and the duration and error of the insert.
type Observer func(messages int, waited, took time.Duration, err error)

// Config configures an [Ingester].
type Config struct {
	Pool     *pgxpool.Pool
	Schemas  postgres.Schemas
	Policy   func() *policy.Policy
	Breakers *breaker.Breakers // breakers of destinations; nil means that they are not checked
	// Worked knows which queues dlqd processes deliver. It is nil if dlqd owns River: a message then waits for the next
	// process, and no other client fetches it.
	Worked          *process.Queues
	Logger          *slog.Logger
	MaxPending      int // 0 means DefaultMaxPending
	MaxPendingBytes int // 0 means DefaultMaxPendingBytes
	MaxGroup        int // messages in one insert; 0 means DefaultMaxGroup
	Flushers        int // concurrent inserts; 0 means DefaultFlushers
	Observe         Observer
}

// Ingester collects concurrent submissions and inserts each group of them with one statement.
type Ingester struct {
	config Config

	inbox atomic.Pointer[inboxAge] // nil: never read

	notifyMu sync.Mutex
	notified map[string]time.Time // when the workers of a queue were notified last

	pending      atomic.Int64
	pendingBytes atomic.Int64

	inserts       context.Context // parent of every insert's context
	cancelInserts context.CancelFunc

	mu      sync.RWMutex // read-locked to send on queue; locked to close it
	queue   chan *submission
	stopped bool
	running sync.WaitGroup
}

type submission struct {
	message *message.Message
	job     job
	at      time.Time // time of the submission
	done    chan outcome
}

// job has the columns of a message's job, as River's client would fill them.
type job struct {
	args        string
	metadata    string
	maxAttempts int16
	priority    int16
	scheduledAt time.Time // zero means as soon as possible
	uniqueKey   []byte
}

type outcome struct {
	receipt Receipt
	err     error
}

// New returns a running ingester.
func New(config Config) (*Ingester, error) {
	config.MaxPending = cmp.Or(config.MaxPending, DefaultMaxPending)
	config.MaxPendingBytes = cmp.Or(config.MaxPendingBytes, DefaultMaxPendingBytes)
	config.MaxGroup = cmp.Or(config.MaxGroup, DefaultMaxGroup)
	config.Flushers = cmp.Or(config.Flushers, DefaultFlushers)
	if config.Observe == nil {
		config.Observe = func(int, time.Duration, time.Duration, error) {}
	}
	i := &Ingester{
		config: config, queue: make(chan *submission, config.MaxPending), notified: make(map[string]time.Time),
	}
	i.inserts, i.cancelInserts = context.WithCancel(context.Background())
	for range config.Flushers {
		i.running.Go(i.run)
	}
	return i, nil
}

// Pending returns the number of messages that wait for their commit, and the bytes of their
// payloads.
func (i *Ingester) Pending() (messages, bytes int64) { return i.pending.Load(), i.pendingBytes.Load() }

// Stop refuses new submissions and waits until the accepted ones are answered. When ctx is done, it answers the
// remaining ones with ErrUncertain, so that their clients send them again.
func (i *Ingester) Stop(ctx context.Context) {
	defer i.cancelInserts()
	defer context.AfterFunc(ctx, i.cancelInserts)()
	i.mu.Lock()
	if !i.stopped {
		i.stopped = true
		close(i.queue)
	}
	i.mu.Unlock()
	i.running.Wait()
}

// Submit stores one message, together with concurrent submissions. It returns after the commit, or when ctx is done; in
// the latter case the message may still be stored.
func (i *Ingester) Submit(ctx context.Context, msg *message.Message, trace Trace) (Receipt, error) {
	job, size, err := i.job(ctx, msg, trace)
	if err != nil {
		return Receipt{}, err
	}
	s := &submission{message: msg, job: job, at: time.Now(), done: make(chan outcome, 1)}
	release, err := i.accept(1, size, func() {
		i.queue <- s // never blocks: accept admits no more messages than the channel holds
	})
	if err != nil {
		return Receipt{}, err
	}
	select {
	case out := <-s.done:
		release()
		return out.receipt, out.err
	case <-ctx.Done():
		// The message may still be stored. The client can look its state up by its messageId.
		go func() { <-s.done; release() }()
		return Receipt{}, ctx.Err()
	}
}

// SubmitBatch stores all messages in one transaction, or none of them. It returns their receipts in the order of
// messages. It fails with [ErrFull], [ErrStopped] or the first message's error that [Ingester.job] returns; of these,
// [*UnknownQueueError] and [*UnworkedQueueError] have the message's index.
func (i *Ingester) SubmitBatch(ctx context.Context, messages []*message.Message, trace Trace) ([]Receipt, error) {
	batch := make([]*submission, len(messages))
	size := 0
	for n, msg := range messages {
		job, bytes, err := i.job(ctx, msg, trace)
		if unknown, ok := errors.AsType[*UnknownQueueError](err); ok {
			unknown.Index = n
		}
		if unworked, ok := errors.AsType[*UnworkedQueueError](err); ok {
			unworked.Index = n
		}
		if err != nil {
			return nil, err
		}
		batch[n] = &submission{message: msg, job: job, at: time.Now()}
		size += bytes
	}
	release, err := i.accept(len(messages), size, func() { i.running.Add(1) })
	if err != nil {
		return nil, err
	}
	defer release()
	defer i.running.Done()

	outcomes, err := i.insertWithRetries(batch, true)
	if err != nil {
		return nil, publicError(err, "")
	}
	receipts := make([]Receipt, len(outcomes))
	for n, out := range outcomes {
		receipts[n] = out.receipt
	}
	return receipts, nil
}

// accept reserves the room that a submission needs, and calls enqueue before Stop can close the queue. It returns
// ErrFull if there is no room, and ErrStopped after Stop.
func (i *Ingester) accept(messages, bytes int, enqueue func()) (release func(), err error) {
	i.mu.RLock()
	defer i.mu.RUnlock()
	if i.stopped {
		return nil, ErrStopped
	}
	release = func() {
		i.pending.Add(int64(-messages))
		i.pendingBytes.Add(int64(-bytes))
	}
	n, size := i.pending.Add(int64(messages)), i.pendingBytes.Add(int64(bytes))
	// A submission that exceeds the whole budget is accepted if nothing else waits.
	if n > int64(max(i.config.MaxPending, messages)) || size > int64(max(i.config.MaxPendingBytes, bytes)) {
		release()
		return nil, ErrFull
	}
	enqueue()
	return release, nil
}

// job returns the job of a message, and the size in bytes of its payload and of the payload text stored with it. It
// returns an UnknownQueueError, an UnworkedQueueError or, if the destination's breaker is open and the queue accepts no
// messages then, an OpenError; and a RefusedError if the message cannot be stored.
func (i *Ingester) job(ctx context.Context, msg *message.Message, trace Trace) (job, int, error) {
	rules := i.config.Policy()
	queue, ok := rules.Queues[msg.Queue]
	if !ok || rules.Destinations[queue.Destination].Source != nil { // the queue of a source accepts only records
		return job{}, 0, &UnknownQueueError{Queue: msg.Queue, Known: rules.QueueNames()}
	}
	if err := i.checkWorked(ctx, rules, msg.Queue); err != nil {
		return job{}, 0, err
	}
	extra := jobMetadata{Trace: trace}
	var heldUntil time.Time
	if i.config.Breakers != nil {
		state, wait := i.config.Breakers.State(breaker.DestinationPrefix + queue.Destination)
		if state == breaker.Open && wait > 0 {
			if queue.WhenOpen != policy.WhenOpenAccept {
				return job{}, 0, &OpenError{Queue: msg.Queue, Destination: queue.Destination, RetryAfter: wait}
			}
			heldUntil, extra.Held = time.Now().Add(delivery.HoldTime()), delivery.HeldForBreaker
		}
	}
	out := job{
		metadata:    "{}",
		maxAttempts: int16(min(cmp.Or(queue.MaxAttempts, river.MaxAttemptsDefault), math.MaxInt16)),
		priority:    message.DefaultPriority,
		uniqueKey:   message.UniqueKey(msg.MessageID),
	}
	if msg.Priority > 0 {
		out.priority = int16(msg.Priority) // 1 to 4
	}
	if msg.ScheduledAt != nil {
		out.scheduledAt = *msg.ScheduledAt
	}
	if out.scheduledAt.Before(heldUntil) {
		out.scheduledAt = heldUntil
	}
	if extra != (jobMetadata{}) {
		metadata, err := json.Marshal(extra)
		if err != nil {
			return job{}, 0, err
		}
		out.metadata = string(metadata)
	}
	stored := *msg
	if queue.Payload == policy.PayloadExact {
		stored = stored.Exact()
	}
	var err error
	if out.args, err = stored.Args(); err == nil && strings.Contains(out.args, argsSeparator) {
		err = errors.New("it is not JSON")
	}
	if err != nil {
		return job{}, 0, &RefusedError{MessageID: msg.MessageID, Reason: err.Error()}
	}
	return out, len(stored.Payload) + len(stored.PayloadText), nil
}

// checkWorked refuses a message for a queue that no dlqd process delivers now, because an application's client would
// fetch it. It also refuses the message if the processes cannot be looked up.
func (i *Ingester) checkWorked(ctx context.Context, rules *policy.Policy, queue string) error {
	if i.config.Worked == nil {
		return nil
	}
	work, worked, err := i.config.Worked.Lookup(ctx, queue)
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return &AwayError{Queue: queue, RetryAfter: awayRetryAfter, Err: err}
	case work == process.Away:
		return &AwayError{Queue: queue, RetryAfter: awayRetryAfter}
	case work == process.Unworked:
		worked = slices.DeleteFunc(worked, func(name string) bool { return rules.Queues[name] == nil })
		return &UnworkedQueueError{Queue: queue, Worked: worked}
	}
	return nil
}

// run inserts all waiting submissions, up to MaxGroup, and does not wait for more. So an idle program delays no
// submission, and a busy program collects submissions while it commits.
func (i *Ingester) run() {
	for s := range i.queue {
		group := []*submission{s}
		var sameID []*submission // submissions with a messageId that the group already has
		seen := map[string]bool{s.message.MessageID: true}
	gather:
		for len(group) < i.config.MaxGroup {
			select {
			case next, ok := <-i.queue:
				if !ok {
					break gather
				}
				if seen[next.message.MessageID] {
					sameID = append(sameID, next)
					continue
				}
				seen[next.message.MessageID] = true
				group = append(group, next)
			default:
				break gather
			}
		}
		i.flush(group)
		for _, s := range sameID {
			i.flush([]*submission{s})
		}
	}
}

// flush inserts a group and answers its submissions. If the database refuses the group, flush halves it until only the
// refused message fails.
func (i *Ingester) flush(group []*submission) {
	outcomes, err := i.insertWithRetries(group, false)
	switch {
	case err == nil:
		for n, s := range group {
			s.done <- outcomes[n]
		}
	case postgres.IsRefusal(err) && len(group) > 1:
		half := len(group) / 2
		i.flush(group[:half])
		i.flush(group[half:])
	default:
		for _, s := range group {
			s.done <- outcome{err: publicError(err, s.message.MessageID)}
		}
	}
}

// insertWithRetries inserts a group, up to maxAttempts times if the insert fails for a temporary reason. It continues
// when a client hangs up, because other clients may share the insert.
func (i *Ingester) insertWithRetries(group []*submission, allOrNone bool) ([]outcome, error) {
	for attempt := 1; ; attempt++ {
		start := time.Now()
		ctx, cancel := context.WithTimeout(i.inserts, flushTimeout)
		outcomes, err := i.insert(ctx, group, allOrNone)
		cancel()
		i.config.Observe(len(group), start.Sub(group[0].at), time.Since(start), err)
		var conflict *ConflictError
		if err == nil || postgres.IsRefusal(err) || errors.As(err, &conflict) || errors.Is(err, errChangedKey) ||
			attempt == maxAttempts || i.inserts.Err() != nil {
			return outcomes, err
		}
		i.config.Logger.Warn("inserting messages failed; retrying", "messages", len(group), "try", attempt, "error", err)
		time.Sleep(time.Duration(attempt*attempt) * 50 * time.Millisecond)
	}
}

// insert stores a group. The error of an outcome concerns one message. If insert itself returns a refusal, nothing was
// stored; after any other error, messages may be stored.
func (i *Ingester) insert(ctx context.Context, group []*submission, allOrNone bool) ([]outcome, error) {
	outcomes := make([]outcome, len(group))
	var noticed notices
	if !allOrNone && !i.hasOrder(group) { // one statement, which commits itself
		err := i.store(ctx, i.config.Pool, group, outcomes, &noticed)
		i.settle(noticed, err)
		return outcomes, err
	}
	err := postgres.BeginFunc(ctx, i.config.Pool, func(tx pgx.Tx) error {
		if err := i.store(ctx, tx, group, outcomes, &noticed); err != nil {
			return err
		}
		if allOrNone {
			for n, out := range outcomes {
				if conflict, ok := errors.AsType[*ConflictError](out.err); ok {
					conflict.Index = n
				}
				if out.err != nil {
					return out.err
				}
			}
		}
		return i.insertOrdered(ctx, tx, group, outcomes)
	})
	i.settle(noticed, err)
	return outcomes, err
}

// store inserts jobs for the messages that have none, and fills the outcomes of the group. If db is the pool, the
// insert is committed before the duplicates are looked up. After maxAttempts, the messages without an outcome get
// ErrUncertain.
func (i *Ingester) store(ctx context.Context, db postgres.DB, group []*submission, outcomes []outcome,
	noticed *notices,
) error {
	queries := dbsqlc.New(i.config.Schemas.Rendered(db))
	_, committed := db.(*pgxpool.Pool)
	waiting := make([]int, len(group)) // indexes in group
	for n := range group {
		waiting[n] = n
	}
	// All inserts take their unique keys in the same order, so that two inserts cannot deadlock.
	slices.SortFunc(waiting, func(a, b int) int {
		return strings.Compare(group[a].message.MessageID, group[b].message.MessageID)
	})
	for attempt := 1; len(waiting) > 0; attempt++ {
		entries, missing, err := i.storeOnce(ctx, queries, group, waiting, outcomes, noticed)
		if err != nil && (!committed || attempt == 1 || errors.Is(err, errChangedKey)) {
			return err
		}
		if err == nil {
			err = findDuplicates(ctx, queries, group, entries, missing, outcomes)
		}
		if err != nil && !committed {
			return err
		}
		waiting = slices.DeleteFunc(waiting, func(n int) bool { return outcomes[n] != (outcome{}) })
		// Only the messages without an outcome fail; their clients learn the outcome when they submit again. If there was
		// no error, the jobs were deleted before they could be compared, or a trigger of the application drops them.
		if attempt == maxAttempts || ctx.Err() != nil {
			for _, n := range waiting {
				outcomes[n].err = ErrUncertain
				if err != nil {
					outcomes[n].err = fmt.Errorf("%w (%w)", ErrUncertain, err)
				}
			}
			return nil
		}
		if err != nil {
			i.config.Logger.Warn("looking up duplicates failed; retrying", "messages", len(waiting), "try", attempt,
				"error", err)
			time.Sleep(time.Duration(attempt*attempt) * 50 * time.Millisecond)
		}
	}
	return nil
}

// storeOnce executes the insert for the messages at these indexes. It sets the outcomes of the messages whose jobs it
// inserts. It returns the open entries of messages by index, and the indexes of the messages that already have a job.
func (i *Ingester) storeOnce(ctx context.Context, queries *dbsqlc.Queries, group []*submission, indexes []int,
	outcomes []outcome, noticed *notices,
) (entries map[int]uuid.UUID, missing []int, err error) {
	now := time.Now().UTC() // this program's clock, as in River's client
	count := len(indexes)
	params := dbsqlc.InsertMessagesParams{
		CreatedAt: now, Kind: message.JobKind, Notifications: []string{},
		EventIds: make([]string, 0, count), MaxAttempts: make([]int16, 0, count), Metadata: make([]string, 0, count),
		Priorities: make([]int16, 0, count), Queues: make([]string, 0, count), ScheduledAt: make([]time.Time, 0, count),
		States: make([]string, 0, count), Tags: make([]string, 0, count), UniqueKeys: make([][]byte, 0, count),
	}
	args := make([]string, 0, count)
	index := make(map[string]int, count) // index in group, by unique key
	byID := make(map[string]int, count)
	var due []string // queues of jobs that can be worked now
	for _, n := range indexes {
		msg, job := group[n].message, group[n].job
		index[string(job.uniqueKey)] = n
		id := ""
		if !msg.HasGeneratedID() {
			id = msg.MessageID
			byID[id] = n
		}
		state, at := rivertype.JobStateAvailable, now
		if !job.scheduledAt.IsZero() {
			state, at = rivertype.JobStateScheduled, job.scheduledAt
		} else if !slices.Contains(due, msg.Queue) {
			due = append(due, msg.Queue)
		}
		params.EventIds = append(params.EventIds, id)
		args = append(args, job.args)
		params.MaxAttempts = append(params.MaxAttempts, job.maxAttempts)
		params.Metadata = append(params.Metadata, job.metadata)
		params.Priorities = append(params.Priorities, job.priority)
		params.Queues = append(params.Queues, msg.Queue)
		params.ScheduledAt = append(params.ScheduledAt, at)
		params.States = append(params.States, string(state))
		params.Tags = append(params.Tags, strings.Join(msg.Tags, ","))
		params.UniqueKeys = append(params.UniqueKeys, job.uniqueKey)
	}
	for _, queue := range due {
		if i.shouldNotify(queue) {
			params.Notifications = append(params.Notifications, notification(queue))
			noticed.sent = append(noticed.sent, queue)
		} else {
			noticed.held = append(noticed.held, queue)
		}
	}
	params.Args = strings.Join(args, argsSeparator)
	if params.WithInbox, err = i.readsInbox(ctx, queries); err != nil {
		return nil, nil, err
	}
	rows, err := queries.InsertMessages(ctx, params)
	if err != nil {
		return nil, nil, err
	}
	entries = map[int]uuid.UUID{}
	for _, row := range rows {
		switch {
		case row.EntryID != nil:
			n := byID[row.EventID]
			entries[n] = *row.EntryID
			delete(index, string(group[n].job.uniqueKey))
		case row.JobID != 0:
			n, ok := index[string(row.UniqueKey)]
			if !ok {
				return nil, nil, fmt.Errorf("job %d: %w", row.JobID, errChangedKey)
			}
			delete(index, string(row.UniqueKey))
			outcomes[n] = outcome{receipt: Receipt{
				MessageID: group[n].message.MessageID, JobID: row.JobID, createdAt: now,
			}}
		}
	}
	for _, n := range indexes {
		if _, ok := index[string(group[n].job.uniqueKey)]; ok {
			missing = append(missing, n)
		}
	}
	return entries, missing, nil
}

// inboxAge is an answer of InboxIsOld.
type inboxAge struct {
	read  time.Time
	isOld bool
}

// readsInbox reports whether inserts must read the inbox. It holds no lock during the statement: an insert in a
// transaction would wait with its connection for one that waits for a connection.
func (i *Ingester) readsInbox(ctx context.Context, queries *dbsqlc.Queries) (bool, error) {
	if last := i.inbox.Load(); last != nil && time.Since(last.read) < inboxInterval {
		return last.isOld, nil
	}
	isOld, err := queries.InboxIsOld(ctx)
	if err != nil {
		return false, err
	}
	i.inbox.Store(&inboxAge{time.Now(), isOld})
	return isOld, nil
}

// shouldNotify reports whether the workers of a queue may be notified now, and starts the cooldown.
func (i *Ingester) shouldNotify(queue string) bool {
	i.notifyMu.Lock()
	defer i.notifyMu.Unlock()
	now := time.Now()
	if now.Sub(i.notified[queue]) <= notifyCooldown {
		return false
	}
	i.notified[queue] = now
	return true
}

// notices are the queues whose workers an insert notified (sent), and the queues that it did not notify because of the
// cooldown (held).
type notices struct{ sent, held []string }

func notification(queue string) string { return fmt.Sprintf(`{"queue": %q}`, queue) }

// settle ends the notifications of an insert. If the insert failed, its notifications were not sent, so they start no
// cooldown. Queues in held are notified after the cooldown, because their workers may have looked before the commit,
// unless an insert that began after this commit notifies them earlier.
func (i *Ingester) settle(noticed notices, err error) {
	ended := time.Now()
	if err != nil {
		i.notifyMu.Lock()
		for _, queue := range noticed.sent {
			delete(i.notified, queue)
		}
		i.notifyMu.Unlock()
	}
	if len(noticed.held) == 0 {
		return
	}
	time.AfterFunc(notifyCooldown, func() {
		var late []string
		i.notifyMu.Lock()
		for _, queue := range noticed.held {
			if i.notified[queue].Before(ended) {
				i.notified[queue] = time.Now()
				late = append(late, notification(queue))
			}
		}
		i.notifyMu.Unlock()
		if len(late) == 0 {
			return
		}
		ctx, cancel := context.WithTimeout(i.inserts, flushTimeout)
		defer cancel()
		// If this fails, the workers find the messages with their next poll.
		_ = dbsqlc.New(i.config.Schemas.Rendered(i.config.Pool)).NotifyWorkers(ctx, late)
	})
}

// findDuplicates fills the outcomes of messages that already have an open entry or a job. A message that differs from
// the job or entry with its id gets a ConflictError. findDuplicates skips messages whose job was deleted meanwhile.
func findDuplicates(ctx context.Context, queries *dbsqlc.Queries, group []*submission, entries map[int]uuid.UUID,
	indexes []int, outcomes []outcome,
) (err error) {
	for n, entry := range entries {
		if outcomes[n], err = duplicateOfEntry(ctx, queries, group[n], entry); err != nil {
			return err
		}
	}
	if len(indexes) == 0 {
		return nil
	}
	params := dbsqlc.CompareJobsParams{}
	for _, n := range indexes {
		args, err := json.Marshal(group[n].message)
		if err != nil {
			return err
		}
		params.UniqueKeys = append(params.UniqueKeys, group[n].job.uniqueKey)
		params.Args = append(params.Args, args)
	}
	rows, err := queries.CompareJobs(ctx, params)
	if err != nil {
		return err
	}
	found := make(map[string]dbsqlc.CompareJobsRow, len(rows))
	for _, row := range rows {
		found[string(row.UniqueKey)] = row
	}
	for _, n := range indexes {
		row, ok := found[string(group[n].job.uniqueKey)]
		if !ok {
			continue
		}
		id := group[n].message.MessageID
		outcomes[n] = outcome{receipt: Receipt{MessageID: id, JobID: row.ID, Duplicate: true}}
		if !row.Same {
			outcomes[n].err = &ConflictError{MessageID: id, JobID: row.ID}
		}
	}
	return nil
}

// hasOrder reports whether a group has messages whose order is stored.
func (i *Ingester) hasOrder(group []*submission) bool {
	rules := i.config.Policy()
	return slices.ContainsFunc(group, func(s *submission) bool { return isOrdered(rules, s.message) })
}

// isOrdered reports whether a message has an ordering key and its queue keeps the order.
func isOrdered(rules *policy.Policy, msg *message.Message) bool {
	queue := rules.Queues[msg.Queue]
	return msg.OrderingKey != "" && queue != nil && queue.Ordering
}

// insertOrdered stores the order of the new messages with an ordering key, in queues that keep the order. The group is
// in the order of submission.
func (i *Ingester) insertOrdered(ctx context.Context, tx pgx.Tx, group []*submission, outcomes []outcome) error {
	rules := i.config.Policy()
	ordered := dbsqlc.InsertOrderedParams{}
	for n, s := range group {
		if r := outcomes[n].receipt; outcomes[n].err == nil && !r.Duplicate && isOrdered(rules, s.message) {
			ordered.Queues = append(ordered.Queues, s.message.Queue)
			ordered.Keys = append(ordered.Keys, s.message.OrderingKey)
			ordered.Jobs = append(ordered.Jobs, r.JobID)
			ordered.CreatedAts = append(ordered.CreatedAts, r.createdAt)
		}
	}
	if len(ordered.Jobs) == 0 {
		return nil
	}
	return dbsqlc.New(i.config.Schemas.Rendered(tx)).InsertOrdered(ctx, ordered)
}

func duplicateOfEntry(ctx context.Context, queries *dbsqlc.Queries, s *submission, entry uuid.UUID) (outcome, error) {
	args, err := json.Marshal(s.message)
	if err != nil {
		return outcome{}, err
	}
	row, err := queries.CompareEntry(ctx, dbsqlc.CompareEntryParams{Args: args, ID: entry})
	if errors.Is(err, pgx.ErrNoRows) {
		return outcome{err: ErrUncertain}, nil // the entry was just closed; a further submission sees its outcome
	}
	if err != nil {
		return outcome{}, err
	}
	out := outcome{receipt: Receipt{
		MessageID: s.message.MessageID, JobID: row.RiverJobID, Duplicate: true, EntryID: entry,
	}}
	if !row.Same {
		out.err = &ConflictError{MessageID: s.message.MessageID, JobID: row.RiverJobID}
	}
	return out, nil
}

func publicError(err error, messageID string) error {
	var pgErr *pgconn.PgError
	var conflict *ConflictError
	switch {
	case errors.As(err, &conflict):
		return conflict
	case postgres.IsRefusal(err) && errors.As(err, &pgErr):
		return &RefusedError{MessageID: messageID, Reason: pgErr.Message}
	case postgres.IsRefusal(err): // the message was not sent to the database
		return &RefusedError{MessageID: messageID, Reason: err.Error()}
	default:
		return fmt.Errorf("%w (%w)", ErrUncertain, err)
	}
}
