// Package ingest stores submitted messages. It joins concurrent submissions into one insert and one
// commit (group commit) and answers each after that commit.
package ingest

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
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

// Limits of the submissions that wait for their commit. Together they bound the memory of
// submissions.
const (
	DefaultMaxPending      = 10_000   // messages
	DefaultMaxPendingBytes = 64 << 20 // bytes of payloads

	// DefaultMaxGroup is how many messages one insert has at most. More gains nothing (measured:
	// 34,000 to 37,000 jobs/s from 100 to 5,000) and makes the first message wait for the last.
	DefaultMaxGroup = 500

	// DefaultFlushers is how many inserts run concurrently: while one waits for its commit to reach
	// the disk, the next is prepared.
	DefaultFlushers = 2

	// notifyCooldown is the shortest time between two notifications of a queue's workers. With
	// River's default of 100 ms, messages of steady traffic would wait a median of 50 ms.
	notifyCooldown = 5 * time.Millisecond

	// flushTimeout bounds one insert. It does not depend on the client's context: a client that
	// hangs up must not cancel an insert that other clients share.
	flushTimeout = 15 * time.Second

	// awayRetryAfter is when the client should retry while the queue's process is away: a restart
	// takes seconds.
	awayRetryAfter = 10 * time.Second

	// maxAttempts is how often an insert is executed if it fails for a temporary reason. Repeats are
	// safe because the messageId is unique.
	maxAttempts = 4
)

// Errors of submissions.
var (
	// ErrFull means that the limits of waiting submissions are reached. Nothing of the submission
	// is stored; the client can send it again.
	ErrFull = errors.New("too many messages wait for their commit")
	// ErrStopped means that the program is stopping. Nothing of the submission is stored.
	ErrStopped = errors.New("dlqd is stopping and accepts no messages")
	// ErrUncertain means that the database did not answer, so the message may or may not be stored.
	// Sending it again with the same messageId resolves this.
	ErrUncertain = errors.New("the database did not answer; send the message again with the same messageId")
)

// UnknownQueueError reports a message for a queue that the policy does not have.
type UnknownQueueError struct {
	Index int // in the batch
	Queue string
	Known []string
}

func (e *UnknownQueueError) Error() string {
	return fmt.Sprintf("there is no queue %q (there are: %s)", e.Queue, strings.Join(e.Known, ", "))
}

// UnworkedQueueError reports a message for a queue that no dlqd process delivers, on a River that
// an application owns. The application's clients would fetch the message and fail, because they do
// not know its kind.
type UnworkedQueueError struct {
	Index  int // in the batch
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

// AwayError reports a message for a queue whose dlqd process is temporarily away, or for which that
// could not be determined, on a River that an application owns. Nothing of the submission is
// stored; the client can send it again.
type AwayError struct {
	Queue      string
	RetryAfter time.Duration
	Err        error // why it could not be determined, or nil
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
	Index     int // in the batch
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
	Duplicate bool // the same message was submitted before; nothing was stored
	Job       *rivertype.JobRow
	EntryID   uuid.UUID // the open dead letter of a duplicate whose job River has deleted
}

// Trace is the W3C trace context of a submission.
type Trace struct {
	Parent string `json:"traceparent,omitempty"`
	State  string `json:"tracestate,omitempty"`
}

// jobMetadata is the metadata of a message's job.
type jobMetadata struct {
	Trace

	Held string `json:"dlq:held,omitempty"` // reason; see the delivery package
}

// Observer is called after each insert with its number of messages, the longest wait of a message,
// and the duration and error of the insert.
type Observer func(messages int, waited, took time.Duration, err error)

// Config configures an [Ingester].
type Config struct {
	Pool     *pgxpool.Pool
	Schemas  postgres.Schemas
	Policy   func() *policy.Policy
	Breakers *breaker.Breakers // of destinations; nil: not checked
	// Worked knows which queues dlqd processes work. It is nil on dlqd's own River, where a message
	// waits for the next process and no other client fetches it.
	Worked          *process.Queues
	Logger          *slog.Logger
	MaxPending      int // 0 means DefaultMaxPending
	MaxPendingBytes int // 0 means DefaultMaxPendingBytes
	MaxGroup        int // messages in one insert; 0 means DefaultMaxGroup
	Flushers        int // concurrent inserts; 0 means DefaultFlushers
	Observe         Observer
}

// Ingester accepts submissions.
type Ingester struct {
	config Config
	client *river.Client[pgx.Tx]

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
	params  river.InsertManyParams
	at      time.Time // when it was submitted
	done    chan outcome
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
	client, err := river.NewClient(postgres.NewDriver(config.Pool), &river.Config{
		Schema: config.Schemas.River, Logger: slog.New(delivery.RiverLog(config.Logger.Handler())),
		FetchCooldown: notifyCooldown,
	})
	if err != nil {
		return nil, err
	}
	i := &Ingester{config: config, client: client, queue: make(chan *submission, config.MaxPending)}
	i.inserts, i.cancelInserts = context.WithCancel(context.Background())
	for range config.Flushers {
		i.running.Go(i.run)
	}
	return i, nil
}

// Pending returns the number of messages that wait for their commit, and the bytes of their
// payloads.
func (i *Ingester) Pending() (messages, bytes int64) { return i.pending.Load(), i.pendingBytes.Load() }

// Stop refuses new submissions and waits until accepted ones are answered. When ctx is done, the
// remaining ones are answered with ErrUncertain, and their clients send them again.
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

// Submit stores one message, together with concurrent submissions. It returns after the commit.
func (i *Ingester) Submit(ctx context.Context, msg *message.Message, trace Trace) (Receipt, error) {
	params, err := i.params(ctx, msg, trace)
	if err != nil {
		return Receipt{}, err
	}
	s := &submission{message: msg, params: params, at: time.Now(), done: make(chan outcome, 1)}
	release, err := i.accept(1, sizeOf(params), func() {
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
		// The message may still be stored. The client can look it up by its messageId.
		go func() { <-s.done; release() }()
		return Receipt{}, ctx.Err()
	}
}

// SubmitBatch stores all messages in one transaction, or none of them.
func (i *Ingester) SubmitBatch(ctx context.Context, messages []*message.Message, trace Trace) ([]Receipt, error) {
	batch := make([]*submission, len(messages))
	size := 0
	for n, msg := range messages {
		params, err := i.params(ctx, msg, trace)
		if unknown, ok := errors.AsType[*UnknownQueueError](err); ok {
			unknown.Index = n
		}
		if unworked, ok := errors.AsType[*UnworkedQueueError](err); ok {
			unworked.Index = n
		}
		if err != nil {
			return nil, err
		}
		batch[n] = &submission{message: msg, params: params, at: time.Now()}
		size += sizeOf(params)
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

// sizeOf returns the bytes of a submission's payload and of the payload text stored with it.
func sizeOf(params river.InsertManyParams) int {
	args, ok := params.Args.(message.Message)
	if !ok {
		return 0
	}
	return len(args.Payload) + len(args.PayloadText)
}

// accept reserves the room that a submission needs, and calls enqueue before Stop can close the
// queue.
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

func (i *Ingester) params(ctx context.Context, msg *message.Message, trace Trace) (river.InsertManyParams, error) {
	rules := i.config.Policy()
	queue, ok := rules.Queues[msg.Queue]
	if !ok {
		return river.InsertManyParams{}, &UnknownQueueError{Queue: msg.Queue, Known: rules.QueueNames()}
	}
	if err := i.checkWorked(ctx, rules, msg.Queue); err != nil {
		return river.InsertManyParams{}, err
	}
	extra := jobMetadata{Trace: trace}
	var heldUntil time.Time
	if i.config.Breakers != nil {
		state, wait := i.config.Breakers.State(breaker.DestinationPrefix + queue.Destination)
		if state == breaker.Open && wait > 0 {
			if queue.WhenOpen != policy.WhenOpenAccept {
				return river.InsertManyParams{}, &OpenError{Queue: msg.Queue, Destination: queue.Destination, RetryAfter: wait}
			}
			heldUntil, extra.Held = time.Now().Add(delivery.HoldTime()), delivery.HeldForBreaker
		}
	}
	opts := &river.InsertOpts{
		MaxAttempts: queue.MaxAttempts,
		Priority:    max(msg.Priority, 0),
		Queue:       msg.Queue,
		Tags:        msg.Tags,
		// The messageId is taken as long as River keeps the job, in any state.
		UniqueOpts: river.UniqueOpts{ByArgs: true, ByState: rivertype.JobStates()},
	}
	if opts.Priority == 0 {
		opts.Priority = message.DefaultPriority
	}
	if msg.ScheduledAt != nil {
		opts.ScheduledAt = *msg.ScheduledAt
	}
	if opts.ScheduledAt.Before(heldUntil) {
		opts.ScheduledAt = heldUntil
	}
	if extra != (jobMetadata{}) {
		metadata, err := json.Marshal(extra)
		if err != nil {
			return river.InsertManyParams{}, err
		}
		opts.Metadata = metadata
	}
	args := *msg
	if queue.Payload == policy.PayloadExact {
		args = args.Exact()
	}
	return river.InsertManyParams{Args: args, InsertOpts: opts}, nil
}

// checkWorked refuses a message that no dlqd process would deliver and another client would fetch.
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

// run inserts all submissions that wait, up to MaxGroup, without waiting for more: submissions to
// an idle program are not delayed, and a busy program collects them while it commits.
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

// flush inserts a group and answers its submissions. If the database refuses the group, flush
// halves it, so that only the refused message fails.
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

// insertWithRetries does not stop when a client hangs up: other clients share the insert.
func (i *Ingester) insertWithRetries(group []*submission, allOrNone bool) ([]outcome, error) {
	for attempt := 1; ; attempt++ {
		start := time.Now()
		ctx, cancel := context.WithTimeout(i.inserts, flushTimeout)
		outcomes, err := i.insert(ctx, group, allOrNone)
		cancel()
		i.config.Observe(len(group), start.Sub(group[0].at), time.Since(start), err)
		var conflict *ConflictError
		if err == nil || postgres.IsRefusal(err) || errors.As(err, &conflict) || attempt == maxAttempts ||
			i.inserts.Err() != nil {
			return outcomes, err
		}
		i.config.Logger.Warn("inserting messages failed; retrying", "messages", len(group), "try", attempt, "error", err)
		time.Sleep(time.Duration(attempt*attempt) * 50 * time.Millisecond)
	}
}

// insert runs one transaction. An outcome's error concerns one message; if insert returns an error,
// nothing was stored.
func (i *Ingester) insert(ctx context.Context, group []*submission, allOrNone bool) ([]outcome, error) {
	outcomes := make([]outcome, len(group))
	err := postgres.BeginFunc(ctx, i.config.Pool, func(tx pgx.Tx) error {
		queries := dbsqlc.New(i.config.Schemas.Rendered(tx))
		open, err := openEntries(ctx, queries, group)
		if err != nil {
			return err
		}
		index := make(map[string]int, len(group)) // index in group, by unique key
		params := make([]river.InsertManyParams, 0, len(group))
		order := make([]int, 0, len(group))
		for n, s := range group {
			if entry, ok := open[s.message.MessageID]; ok {
				outcomes[n], err = duplicateOfEntry(ctx, queries, s, entry)
				if err != nil {
					return err
				}
				continue
			}
			order = append(order, n)
		}
		// All inserts take their unique keys in the same order, so that two inserts cannot
		// deadlock.
		slices.SortFunc(order, func(a, b int) int {
			return strings.Compare(group[a].message.MessageID,
				group[b].message.MessageID)
		})
		for _, n := range order {
			index[string(message.UniqueKey(group[n].message.MessageID))] = n
			params = append(params, group[n].params)
		}
		if len(params) > 0 {
			if err := i.insertJobs(ctx, tx, queries, group, params, index, outcomes); err != nil {
				return err
			}
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
		return nil
	})
	return outcomes, err
}

func (i *Ingester) insertJobs(ctx context.Context, tx pgx.Tx, queries *dbsqlc.Queries, group []*submission,
	params []river.InsertManyParams, index map[string]int, outcomes []outcome,
) error {
	results, err := i.client.InsertManyTx(ctx, tx, params)
	if err != nil {
		return err
	}
	duplicates := dbsqlc.CompareJobsParams{}
	for _, result := range results {
		n, ok := index[string(result.Job.UniqueKey)]
		if !ok {
			return fmt.Errorf("job %d has an unexpected unique key", result.Job.ID)
		}
		outcomes[n].receipt = Receipt{
			MessageID: group[n].message.MessageID, JobID: result.Job.ID,
			Job: result.Job, Duplicate: result.UniqueSkippedAsDuplicate,
		}
		if result.UniqueSkippedAsDuplicate {
			args, err := json.Marshal(group[n].message)
			if err != nil {
				return err
			}
			duplicates.Ids = append(duplicates.Ids, result.Job.ID)
			duplicates.Args = append(duplicates.Args, args)
		}
	}
	if err := i.insertOrdered(ctx, queries, group, index, results); err != nil {
		return err
	}
	if len(duplicates.Ids) == 0 {
		return nil
	}
	rows, err := queries.CompareJobs(ctx, duplicates)
	if err != nil {
		return err
	}
	same := make(map[int64]bool, len(rows))
	for _, row := range rows {
		same[row.ID] = row.Same
	}
	for n := range outcomes {
		if r := outcomes[n].receipt; r.Duplicate && r.Job != nil && !same[r.JobID] {
			outcomes[n].err = &ConflictError{MessageID: r.MessageID, JobID: r.JobID}
		}
	}
	return nil
}

// insertOrdered stores the order of messages with an ordering key, in queues that keep the order.
func (i *Ingester) insertOrdered(ctx context.Context, queries *dbsqlc.Queries, group []*submission,
	index map[string]int, results []*rivertype.JobInsertResult,
) error {
	rules := i.config.Policy()
	jobs := make(map[int]*rivertype.JobRow, len(results)) // by index in group, which is the order of submission
	for _, result := range results {
		if !result.UniqueSkippedAsDuplicate {
			jobs[index[string(result.Job.UniqueKey)]] = result.Job
		}
	}
	ordered := dbsqlc.InsertOrderedParams{}
	for n, s := range group {
		job, inserted := jobs[n]
		if queue := rules.Queues[s.message.Queue]; inserted && s.message.OrderingKey != "" && queue != nil && queue.Ordering {
			ordered.Queues = append(ordered.Queues, s.message.Queue)
			ordered.Keys = append(ordered.Keys, s.message.OrderingKey)
			ordered.Jobs = append(ordered.Jobs, job.ID)
			ordered.CreatedAts = append(ordered.CreatedAts, job.CreatedAt)
		}
	}
	if len(ordered.Jobs) == 0 {
		return nil
	}
	return queries.InsertOrdered(ctx, ordered)
}

// openEntries returns the open dead letters of messages whose clients chose the messageId: River
// may have deleted their jobs.
func openEntries(ctx context.Context, queries *dbsqlc.Queries, group []*submission) (map[string]uuid.UUID, error) {
	var ids []string
	for _, s := range group {
		if !s.message.HasGeneratedID() {
			ids = append(ids, s.message.MessageID)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	rows, err := queries.OpenEvents(ctx, ids)
	if err != nil {
		return nil, err
	}
	open := make(map[string]uuid.UUID, len(rows))
	for _, row := range rows {
		open[row.EventID] = row.ID
	}
	return open, nil
}

func duplicateOfEntry(ctx context.Context, queries *dbsqlc.Queries, s *submission, entry uuid.UUID) (outcome, error) {
	args, err := json.Marshal(s.message)
	if err != nil {
		return outcome{}, err
	}
	row, err := queries.CompareEntry(ctx, dbsqlc.CompareEntryParams{Args: args, ID: entry})
	if errors.Is(err, pgx.ErrNoRows) {
		return outcome{err: ErrUncertain}, nil // the entry was just closed; the next submission sees its outcome
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
	case postgres.IsRefusal(err): // it was not sent to the database
		return &RefusedError{MessageID: messageID, Reason: err.Error()}
	default:
		return fmt.Errorf("%w (%w)", ErrUncertain, err)
	}
}
