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
	// fileInterval is the pause after a scan that found less than a batch in the inbox. The inbox is polled because
	// capture sends no NOTIFY for a failed job: at commit, NOTIFY takes a lock that all notifying transactions of the
	// server share.
	fileInterval = 50 * time.Millisecond
	// fileRetry is the longest pause after scans that returned an error.
	fileRetry = 5 * time.Second
	// fileBatch is the maximum number of entries that one transaction files, unless Config.BatchSize is set.
	fileBatch = 500
	// scanOverlap: after a scan that found less than a batch, the next scan begins this long before the latest failure
	// found, because transactions do not commit in the order of the failures.
	scanOverlap = 5 * time.Second
	// maxFullScanGap is the longest pause between two scans of the whole inbox.
	maxFullScanGap = 10 * time.Second
	// fullScanShare times the duration of a scan of the whole inbox is the pause after the scan, at most maxFullScanGap.
	// A scan of the whole inbox can be slow: it may have to step over the dead rows of all failures that were filed since
	// the server's oldest transaction began.
	fullScanShare = 20
	// refusedTime is the time after which the worker tries again to file an entry that the database refused.
	refusedTime = time.Minute
	// maxRefused is the number of refused entries above which filing as a whole counts as failing.
	maxRefused = 100
)

// inbox is a worker's position in the inbox.
type inbox struct {
	mu      sync.Mutex
	after   uuid.UUID               // the next scan begins after this id, unless a scan of the whole inbox is due
	last    uuid.UUID               // the latest failure that any scan found
	full    time.Time               // time at which the next scan of the whole inbox is due
	refused map[uuid.UUID]time.Time // entries that the database refused to file, and when
}

// scan is the range of one scan of the inbox.
type scan struct {
	after   uuid.UUID
	refused []uuid.UUID
}

// next returns the range of the next scan.
func (i *inbox) next(now time.Time) scan {
	i.mu.Lock()
	defer i.mu.Unlock()
	s := scan{after: i.after, refused: []uuid.UUID{}}
	if !now.Before(i.full) {
		s.after = uuid.Nil
	}
	for id, since := range i.refused {
		if now.Sub(since) > refusedTime {
			delete(i.refused, id)
			continue
		}
		s.refused = append(s.refused, id)
	}
	return s
}

// record stores the result of a scan and its duration. full means that the scan found a whole batch: the next scan
// continues after the last failure found.
func (i *inbox) record(s scan, rows []dbsqlc.ClaimDueRow, took time.Duration, full bool) {
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
		i.after = idBefore(i.last, scanOverlap)
	}
	if s.after == uuid.Nil {
		i.full = time.Now().Add(min(fullScanShare*took, maxFullScanGap))
	}
}

// idBefore returns the smallest id whose time is earlier than the time in id by the given duration; uuid.Nil
// for uuid.Nil.
func idBefore(id uuid.UUID, by time.Duration) uuid.UUID {
	if id == uuid.Nil {
		return id
	}
	ms := binary.BigEndian.Uint64(id[:8]) >> 16
	return deadletter.FirstID(time.UnixMilli(int64(ms)).Add(-by))
}

// exclude excludes an entry from filing for refusedTime. It reports whether more than maxRefused entries are
// excluded.
func (i *inbox) exclude(id uuid.UUID) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.refused == nil {
		i.refused = map[uuid.UUID]time.Time{}
	}
	i.refused[id] = time.Now()
	return len(i.refused) > maxRefused
}

func (w *Worker) callBeforeFiling(ctx context.Context) {
	if w.config.BeforeFiling == nil {
		return
	}
	if err := w.config.BeforeFiling(ctx); err != nil {
		w.config.Logger.WarnContext(ctx, "DLQ worker: preparing for filing failed; filing starts anyway", "error", err)
	}
}

// File files one batch of failures from the inbox, with the planner's decisions, in one transaction. If the database
// rejects the batch, File files its entries one by one. It files nothing while a switch is being changed. It reports
// whether the inbox may have more failures.
func (w *Worker) File(ctx context.Context) (bool, error) {
	w.prepare.Do(func() { w.callBeforeFiling(ctx) })
	size := cmp.Or(w.config.BatchSize, fileBatch)
	at := w.inbox.next(time.Now())
	rows, err := w.file(ctx, at, size)
	if errors.Is(err, errSwitchChanging) {
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

// fileOneByOne retries a rejected batch with one transaction per entry. If an entry is rejected again, it is filed as
// manual. If the database rejects this, too, the entry stays in the inbox and is skipped for refusedTime, so that it
// does not block the others.
func (w *Worker) fileOneByOne(ctx context.Context, at scan, entries int) error {
	for range entries {
		rows, err := w.file(ctx, at, 1)
		if postgres.IsRefusal(err) && len(rows) == 1 {
			id := rows[0].ID
			w.config.Logger.Error("DLQ worker: the database refused the decision on an entry; filing it as manual",
				"entry", id, "error", err)
			refused := manualEntry{
				ID: id, Reason: "the database refused the worker's decision on it", Refusal: storableText(err),
			}
			if err = w.fileAsManual(ctx, refused); postgres.IsRefusal(err) {
				w.config.Logger.Error("DLQ worker: the database refused an entry; it stays in the inbox", "entry", id, "error", err)
				at.refused = append(at.refused, id)
				if !w.inbox.exclude(id) {
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

func (w *Worker) fileAsManual(ctx context.Context, refused manualEntry) error {
	return w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
		if _, err := tx.FileUndecided(ctx, []uuid.UUID{refused.ID}); err != nil {
			return err
		}
		counts["filed"]++
		counts["parked"]++
		return park(ctx, tx, w.actor, []manualEntry{refused})
	})
}

// file files at most size failures of the inbox. It returns the failures that it found or, after an error, the failures
// that it had claimed.
func (w *Worker) file(ctx context.Context, at scan, size int) (rows []dbsqlc.ClaimDueRow, err error) {
	began, params := time.Now(), dbsqlc.UnfiledParams{
		ReadMessages: w.config.Planner().ReadsMessages(), After: at.after, Refused: at.refused, MaxEntries: int32(size),
	}
	has, err := w.queries.HasUnfiled(ctx, at.after) // usually false: then one statement replaces a transaction
	if has && err == nil {
		_, err = inTx(ctx, w.config.Store, func(tx transaction) error {
			unfiled, err := tx.Unfiled(ctx, params)
			rows = column(unfiled, func(r *dbsqlc.UnfiledRow) dbsqlc.ClaimDueRow { return dbsqlc.ClaimDueRow(*r) })
			return err
		})
	}
	if err != nil {
		return nil, fmt.Errorf("read the inbox: %w", err)
	}
	found, took := rows, time.Since(began)
	if len(rows) > 0 {
		// A failure may be in the inbox twice.
		unique := slices.CompactFunc(slices.Clone(rows), func(a, b dbsqlc.ClaimDueRow) bool { return a.ID == b.ID })
		if rows, err = w.fileJudged(ctx, unique); err != nil {
			return rows, err
		}
	}
	w.inbox.record(at, found, took, len(found) == size)
	return found, nil
}

// fileJudged judges failures outside of a transaction, claims the failures that no other worker is filing, and files
// them. It returns the claimed failures, also with an error. If an entry is due before the next poll, it wakes the loop
// of the batches.
func (w *Worker) fileJudged(ctx context.Context, rows []dbsqlc.ClaimDueRow) (claimed []dbsqlc.ClaimDueRow, err error) {
	start := time.Now()
	defer func() { w.recordStage(ctx, StageDecision, start, err) }()
	judged, err := w.judge(ctx, rows)
	if err != nil {
		return nil, err
	}
	var soonest time.Time
	err = w.inObservedTx(ctx, func(tx transaction, counts map[string]int) error {
		ids, err := tx.ClaimUnfiled(ctx, column(rows, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID }))
		if err != nil {
			return err
		}
		claimed = slices.DeleteFunc(slices.Clone(rows), func(row dbsqlc.ClaimDueRow) bool {
			_, locked := slices.BinarySearchFunc(ids, row.ID, func(a, b uuid.UUID) int { return slices.Compare(a[:], b[:]) })
			return !locked
		})
		if len(claimed) == 0 {
			return nil
		}
		soonest, err = w.fileDecided(ctx, tx, claimed, judged, counts)
		return err
	})
	if err != nil {
		return claimed, err
	}
	w.traceFiling(ctx, claimed, judged, start)
	if !soonest.IsZero() && soonest.Before(w.now().Add(w.config.PollInterval)) {
		w.batches.Wake() // the loop may be sleeping until a later time
	}
	return claimed, nil
}

// traceFiling sends a span, from start until now, for each filed entry whose message was submitted
// in a trace.
func (w *Worker) traceFiling(ctx context.Context, filed []dbsqlc.ClaimDueRow, judged *judgements, start time.Time) {
	if len(filed) == 0 || !telemetry.Exports(w.config.Tracer) {
		return
	}
	traces, err := w.queries.EntryTraces(ctx, column(filed, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID }))
	if err != nil {
		w.config.Logger.WarnContext(ctx, "DLQ worker: reading traces failed; filing sends no spans", "error", err)
		return
	}
	byID := make(map[uuid.UUID]dbsqlc.EntryTracesRow, len(traces))
	for _, t := range traces {
		byID[t.ID] = t
	}
	end := time.Now()
	for i := range filed {
		row := &filed[i]
		submitted, ok := byID[row.ID]
		if !ok {
			continue
		}
		d := judged.byID[row.ID]
		_, span := w.config.Tracer.Start(telemetry.Extract(ctx, submitted.Parent, submitted.State), "file "+row.Queue,
			trace.WithTimestamp(start), trace.WithAttributes(
				attribute.String("dlqd.entry_id", row.ID.String()), attribute.String("dlqd.kind", row.Kind),
				attribute.String("dlqd.error_class", string(d.Class)),
				attribute.String("dlqd.strategy", d.Strategy), attribute.String("dlqd.rule", d.Rule),
			))
		span.End(trace.WithTimestamp(end))
	}
}

// fileDecided files claimed entries, and adds further failures of jobs to their open entries. It returns the earliest
// time at which an entry that is not manual is due, or zero if all are manual.
func (w *Worker) fileDecided(ctx context.Context, tx transaction, rows []dbsqlc.ClaimDueRow, judged *judgements,
	counts map[string]int,
) (soonest time.Time, err error) {
	decider, err := w.readSwitches(ctx, tx, judged.planner)
	if err != nil {
		return soonest, err
	}
	decided := decisions{}
	actions := map[uuid.UUID]string{}
	for i := range rows {
		row := &rows[i]
		d := decider.decide(row, judged.byID[row.ID])
		actions[row.ID] = decided.add(row, &d)
		if d.Strategy != strategy.Manual && (soonest.IsZero() || d.Next.Before(soonest)) {
			soonest = d.Next
		}
	}
	filed, err := decided.file(ctx, tx, w.actor, decider.version())
	if err != nil {
		return soonest, fmt.Errorf("file: %w", err)
	}
	counts["filed"] += len(filed)
	for _, id := range filed {
		counts[actions[id]]++
	}
	if len(filed) < len(rows) { // the others are further failures of jobs with an open entry
		ids := column(rows, func(r *dbsqlc.ClaimDueRow) uuid.UUID { return r.ID })
		repeats, err := tx.FileRepeats(ctx, ids)
		if err != nil {
			return soonest, fmt.Errorf("file further failures: %w", err)
		}
		counts["repeated"] += len(repeats)
	}
	return soonest, nil
}
