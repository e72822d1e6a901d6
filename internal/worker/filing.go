package worker

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
	"github.com/dlqd/dlqd/internal/worker/internal/dbsqlc"
)

const (
	// fileInterval is between looks at the inbox. Capture tells nobody that a job failed: a NOTIFY takes a lock at commit that
	// all transactions of the server share which notify.
	fileInterval = 50 * time.Millisecond
	// fileRetry is between turns that fail, at most.
	fileRetry = 5 * time.Second
	// fileBatch is how many entries one transaction files.
	fileBatch = 500
	// lookBack is how far before the last failure that was filed a look begins which does not look at the whole inbox: jobs'
	// transactions do not commit in the order in which the jobs failed.
	lookBack = 5 * time.Second
	// maxUnlooked is between two looks at the whole inbox. Each may have to step over every row that was filed since the oldest
	// transaction of the server began: looks take a twentieth of the time at most, and the inbox is never left alone for longer.
	maxUnlooked = 10 * time.Second
	// wholeShare is how much longer than a look at the whole inbox the pause after it is.
	wholeShare = 20
	// refusedFor is how long an entry is left alone that the database does not let go.
	refusedFor = time.Minute
	// maxRefused is how many of those there may be before filing as a whole counts as failing.
	maxRefused = 100
)

// inbox is where a worker is in the inbox.
type inbox struct {
	mu      sync.Mutex
	after   uuid.UUID // where the next look begins
	last    uuid.UUID // the latest failure that was filed
	whole   time.Time // when the next look is at all of it
	refused map[uuid.UUID]time.Time
}

// look is one look at the inbox.
type look struct {
	after   uuid.UUID
	refused []uuid.UUID
}

// next says where to look now.
func (i *inbox) next(now time.Time) look {
	i.mu.Lock()
	defer i.mu.Unlock()
	l := look{after: i.after, refused: []uuid.UUID{}}
	if !now.Before(i.whole) {
		l.after = uuid.Nil
	}
	for id, since := range i.refused {
		if now.Sub(since) > refusedFor {
			delete(i.refused, id)
			continue
		}
		l.refused = append(l.refused, id)
	}
	return l
}

// saw notes what a look found, how long that took, and whether there is more behind it.
func (i *inbox) saw(l look, rows []dbsqlc.ClaimDueRow, took time.Duration, full bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if len(rows) > 0 {
		if last := rows[len(rows)-1].ID; slices.Compare(last[:], i.last[:]) > 0 {
			i.last = last
		}
	}
	switch {
	case full:
		i.after = rows[len(rows)-1].ID
	default:
		i.after = before(i.last, lookBack)
	}
	if l.after == uuid.Nil {
		i.whole = time.Now().Add(min(wholeShare*took, maxUnlooked))
	}
}

// before is the least id of a time that much before another id's; before none there is none.
func before(id uuid.UUID, by time.Duration) uuid.UUID {
	if id == uuid.Nil {
		return id
	}
	ms := binary.BigEndian.Uint64(id[:8]) >> 16
	return deadletter.FirstID(time.UnixMilli(int64(ms)).Add(-by))
}

// refuse has an entry left alone for a while. It reports whether there are too many of those.
func (i *inbox) refuse(id uuid.UUID) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.refused == nil {
		i.refused = map[uuid.UUID]time.Time{}
	}
	i.refused[id] = time.Now()
	return len(i.refused) > maxRefused
}

func (w *Worker) beforeFiling(ctx context.Context) {
	if w.config.BeforeFiling == nil {
		return
	}
	if err := w.config.BeforeFiling(ctx); err != nil {
		w.config.Logger.WarnContext(ctx, "DLQ worker: filing begins without what was to be done before", "error", err)
	}
}

// File files one batch of what applications' transactions left in the inbox: judged, in one transaction. It reports whether
// there may be more.
func (w *Worker) File(ctx context.Context) (bool, error) {
	w.prepare.Do(func() { w.beforeFiling(ctx) })
	size := cmp.Or(w.config.BatchSize, fileBatch)
	at := w.inbox.next(time.Now())
	rows, err := w.file(ctx, at, size)
	if errors.Is(err, errSwitching) {
		return false, nil
	}
	if postgres.IsRefusal(err) && len(rows) > 0 {
		err = w.fileOneByOne(ctx, at, len(rows))
	}
	if err != nil {
		return false, err
	}
	return len(rows) == size, nil
}

// fileOneByOne files the entries of a batch that the database refused, each in a transaction of its own. One that it refuses
// alone is filed as a person's, and where that is refused, too, left alone for a while: it must not hold up the others.
func (w *Worker) fileOneByOne(ctx context.Context, at look, entries int) error {
	for range entries {
		rows, err := w.file(ctx, at, 1)
		if postgres.IsRefusal(err) && len(rows) == 1 {
			id := rows[0].ID
			w.config.Logger.Error("DLQ worker: entry refused by the database; filing it for a person", "entry", id, "error", err)
			refused := reserved{ID: id, Reason: "the database refused what was decided of it", Refusal: storable(err)}
			if err = w.fileForAPerson(ctx, refused); postgres.IsRefusal(err) {
				w.config.Logger.Error("DLQ worker: entry refused by the database; it stays in the inbox", "entry", id, "error", err)
				at.refused = append(at.refused, id)
				if !w.inbox.refuse(id) {
					err = nil
				}
			}
		}
		if err != nil || len(rows) == 0 {
			return err
		}
	}
	return nil
}

func (w *Worker) fileForAPerson(ctx context.Context, refused reserved) error {
	return w.observed(ctx, func(tx transaction, counts map[string]int) error {
		if _, err := tx.FileUndecided(ctx, []uuid.UUID{refused.ID}); err != nil {
			return err
		}
		counts["filed"]++
		counts["parked"]++
		return park(ctx, tx, w.actor, []reserved{refused})
	})
}

// file files at most size entries. It returns what it claimed, also where it failed.
func (w *Worker) file(ctx context.Context, at look, size int) (rows []dbsqlc.ClaimDueRow, err error) {
	began, params := time.Now(), dbsqlc.UnfiledParams{ReadMessages: w.config.Planner().ReadsMessages(), After: at.after, Refused: at.refused, MaxEntries: int32(size)}
	_, err = inTx(ctx, w.config.Store, func(tx transaction) error {
		unfiled, err := tx.Unfiled(ctx, params)
		rows = column(unfiled, func(r *dbsqlc.UnfiledRow) dbsqlc.ClaimDueRow { return dbsqlc.ClaimDueRow(*r) })
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look at the inbox: %w", err)
	}
	found, took := rows, time.Since(began)
	if len(rows) > 0 {
		once := slices.CompactFunc(slices.Clone(rows), func(a, b dbsqlc.ClaimDueRow) bool { return a.ID == b.ID }) // a failure may be there twice
		if rows, err = w.fileJudged(ctx, once); err != nil {
			return rows, err
		}
	}
	w.inbox.saw(at, found, took, len(found) == size)
	return found, nil
}

// fileJudged files those entries of the inbox that no other worker files, as the planner decides. It returns which.
func (w *Worker) fileJudged(ctx context.Context, rows []dbsqlc.ClaimDueRow) (claimed []dbsqlc.ClaimDueRow, err error) {
	start := time.Now()
	defer func() { w.step(ctx, StageDecision, start, err) }()
	made, err := w.judgements(ctx, rows)
	if err != nil {
		return nil, err
	}
	var soonest time.Time
	err = w.observed(ctx, func(tx transaction, counts map[string]int) error {
		ids, err := tx.ClaimUnfiled(ctx, column(rows, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID }))
		if err != nil {
			return err
		}
		claimed = slices.DeleteFunc(slices.Clone(rows), func(row dbsqlc.ClaimDueRow) bool {
			_, mine := slices.BinarySearchFunc(ids, row.ID, func(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) })
			return !mine
		})
		if len(claimed) == 0 {
			return nil
		}
		soonest, err = w.fileDecided(ctx, tx, claimed, made, counts)
		return err
	})
	if err != nil {
		return claimed, err
	}
	w.traceFiling(ctx, claimed, made, start)
	if !soonest.IsZero() && soonest.Before(w.now().Add(w.config.PollInterval)) {
		w.batches.Wake() // it may sleep for longer
	}
	return claimed, nil
}

// traceFiling makes a span of the filing of each entry, from start until now, in the trace that its
// message was submitted in.
func (w *Worker) traceFiling(ctx context.Context, filed []dbsqlc.ClaimDueRow, made *judgements, start time.Time) {
	if len(filed) == 0 || !telemetry.Sends(w.config.Tracer) {
		return
	}
	traces, err := w.queries.TracesOf(ctx, column(filed, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID }))
	if err != nil {
		w.config.Logger.WarnContext(ctx, "the spans of filing are not sent", "error", err)
		return
	}
	of := make(map[uuid.UUID]dbsqlc.TracesOfRow, len(traces))
	for _, t := range traces {
		of[t.ID] = t
	}
	end := time.Now()
	for i := range filed {
		row := &filed[i]
		submitted, ok := of[row.ID]
		if !ok {
			continue
		}
		d := made.of[row.ID]
		_, span := w.config.Tracer.Start(telemetry.With(ctx, submitted.Parent, submitted.State), "file "+row.Queue,
			trace.WithTimestamp(start), trace.WithAttributes(
				attribute.String("dlqd.entry_id", row.ID.String()), attribute.String("dlqd.kind", row.Kind),
				attribute.String("dlqd.error_class", string(d.Class)),
				attribute.String("dlqd.strategy", d.Strategy), attribute.String("dlqd.rule", d.Rule),
			))
		span.End(trace.WithTimestamp(end))
	}
}

// fileDecided files claimed entries. It returns when the first is due that is no person's.
func (w *Worker) fileDecided(ctx context.Context, tx transaction, rows []dbsqlc.ClaimDueRow, made *judgements, counts map[string]int) (soonest time.Time, err error) {
	by, err := w.judge(ctx, tx, made.planner)
	if err != nil {
		return soonest, err
	}
	decide := decisions{}
	actions := map[uuid.UUID]string{}
	for i := range rows {
		row := &rows[i]
		d := by.decide(row, made.of[row.ID])
		actions[row.ID] = decide.add(row, &d)
		if d.Strategy != strategy.Manual && (soonest.IsZero() || d.Next.Before(soonest)) {
			soonest = d.Next
		}
	}
	filed, err := decide.file(ctx, tx, w.actor, by.version())
	if err != nil {
		return soonest, fmt.Errorf("file: %w", err)
	}
	counts["filed"] += len(filed)
	for _, id := range filed {
		counts[actions[id]]++
	}
	if len(filed) < len(rows) { // jobs that failed again
		ids := column(rows, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID })
		repeats, err := tx.FileRepeats(ctx, ids)
		if err != nil {
			return soonest, fmt.Errorf("file further failures: %w", err)
		}
		counts["repeated"] += len(repeats)
	}
	return soonest, nil
}
