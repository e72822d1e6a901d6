package deadletter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// A search reads entries in slices, so that each statement is short even if the filter matches few entries.
const (
	// firstSlice is the number of entries that the first slice reads from each [Part]. Later slices have as many entries
	// as can be read in about sliceTime.
	firstSlice = 1000
	maxSlice   = 100_000
	sliceTime  = 50 * time.Millisecond
	// firstSliceTimeout limits an attempt to read the first slice, which gets smaller after each timeout. The first slice
	// is read even if no budget is left, so that every search makes progress.
	firstSliceTimeout = 2 * time.Second
	// oneEntryTimeout limits the last such attempt of [Store.Search], which reads one entry of each part. It takes that
	// long only on a very busy server.
	oneEntryTimeout = 30 * time.Second
)

// Found is the result of a search: a page of entries.
type Found struct {
	Entries []Summary
	// Next is the cursor of the next page ([Page.Cursor]), or [uuid.Nil] if this is the last page.
	Next uuid.UUID
	// SearchedTo is set if the budget ended the search: the search has read all entries up to that time of capture, in
	// page order.
	SearchedTo time.Time
}

// Search is [Store.List] within a time budget. Unless the filter reads error messages or payloads, it first tries a
// plain list with half of the budget. If there is no plain list, or it takes too long, Search reads slice by slice in
// page order. If the budget ends the search, Found says where to continue.
func (s *Store) Search(ctx context.Context, p Page, budget time.Duration) (*Found, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	deadline := time.Now().Add(budget)
	condition, err := s.Where(ctx, &p.Filter)
	if err != nil {
		return nil, err
	}
	found := &Found{Entries: []Summary{}}
	if half := budget / 2; half >= time.Millisecond && !isSearch(&p.Filter) {
		if found.Entries, err = s.list(ctx, p, condition, time.Now().Add(half)); !postgres.IsCancelled(err) {
			if err == nil && len(found.Entries) == p.Limit {
				found.Next = found.Entries[p.Limit-1].ID
			}
			return found, err
		}
	}
	page := []Summary{}
	at, err := s.searchSlices(ctx, p, deadline, func(slice Page, parts []Part, until time.Time) (bool, error) {
		var of []Summary
		for _, part := range parts {
			more, err := s.listPart(ctx, slice, condition, part, until)
			if err != nil {
				return false, err
			}
			of = append(of, more...)
		}
		page = p.merge(page, of)
		return len(page) == p.Limit, nil
	}, oneEntryTimeout)
	if err != nil {
		return nil, err
	}
	found.Entries = page
	switch {
	case len(page) == p.Limit:
		found.Next = page[p.Limit-1].ID
	case at != uuid.Nil:
		found.Next, found.SearchedTo = at, capturedAt(at)
	}
	return found, nil
}

// isSearch reports whether a filter reads error messages or payloads, for which there is no index. Other filters can be
// as slow, for example if they combine fields and match few entries. For those, Search tries a plain list first.
func isSearch(f *filter.Filter) bool {
	return len(f.ErrorMessage) > 0 || f.Payload != nil || len(f.PayloadAt) > 0
}

// fewCounted is the number of entries of each part that [Store.CountWithin] counts before the others.
const fewCounted = 1000

// CountWithin counts the entries that a filter selects, up to most, within a time budget. more is true if there are
// further entries, or if there may be some because the budget ended the count.
func (s *Store) CountWithin(ctx context.Context, f filter.Filter, most int,
	budget time.Duration,
) (n int, more bool, err error) {
	deadline := time.Now().Add(budget)
	condition, err := s.Where(ctx, &f)
	if err != nil {
		return 0, false, err
	}
	if half := budget / 2; half >= time.Millisecond && !isSearch(&f) {
		parts, err := s.partsOf(ctx, &f)
		if err != nil {
			return 0, false, err
		}
		n, err = s.countParts(ctx, Page{Filter: f}, condition, parts, most, time.Now().Add(half))
		if !postgres.IsCancelled(err) {
			return min(n, most), n > most, err
		}
		if n >= fewCounted {
			return min(n, most), true, nil
		}
	}
	n = 0
	count := func(slice Page, parts []Part, until time.Time) (bool, error) {
		counted, err := s.countParts(ctx, slice, condition, parts, most-n, until)
		if err == nil {
			n += counted
		}
		return n > most, err
	}
	at, err := s.searchSlices(ctx, Page{Filter: f}, deadline, count, firstSliceTimeout)
	return min(n, most), n > most || at != uuid.Nil, err
}

// countParts counts the entries of a page in some parts, up to one more than most. On an error, it returns the number
// of entries that it has counted. It counts the first entries of a part with a statement of their own. If a deadline
// ends the count of the others, the number of the first entries is not lost.
func (s *Store) countParts(ctx context.Context, p Page, condition string, parts []Part, most int,
	until time.Time,
) (n int, err error) {
	for _, part := range parts {
		limit := min(fewCounted, most-n) + 1
		counted, err := s.countPart(ctx, p, condition, part, limit, until)
		if err == nil && counted == limit && n+limit <= most {
			if counted, err = s.countPart(ctx, p, condition, part, most-n+1, until); err != nil {
				return n + limit - 1, err
			}
		}
		if n += counted; err != nil || n > most {
			return n, err
		}
	}
	return n, nil
}

// countPart counts the entries of a page in a part, up to limit.
func (s *Store) countPart(ctx context.Context, p Page, condition string, part Part, limit int,
	until time.Time,
) (n int, err error) {
	where, args := part.where(nil, []any{pgx.QueryExecModeCacheDescribe, p.Filter.JSON()})
	where, args = p.where(where, args)
	args = append(args, limit)
	sql := s.schemas.Render("SELECT count(*) FROM (SELECT FROM dlq.dead_letter_queue e " +
		"WHERE $1::jsonb IS NOT NULL AND " + strings.Join(where, " AND "))
	sql = fmt.Sprintf("%s AND (%s) LIMIT $%d) l", sql, condition, len(args)-1)
	err = s.read(ctx, until, func(db postgres.DB) error { return db.QueryRow(ctx, sql, args...).Scan(&n) })
	return n, err
}

// partsOf returns the parts that can contain entries of a filter: the open entries first, then the parts of closed
// entries, newest first.
func (s *Store) partsOf(ctx context.Context, f *filter.Filter) ([]Part, error) {
	closed, err := s.ClosedParts(ctx)
	if err != nil {
		return nil, err
	}
	stages := stagesOf(f.Status)
	return slices.DeleteFunc(append([]Part{OpenPart()}, closed...),
		func(p Part) bool { return !slices.ContainsFunc(stages, p.holds) }), nil
}

// searchSlices calls look for each slice of the page's filter, in page order. It stops when look reports that the page
// is full, when no entries are left, or when the deadline has passed. Only if the deadline has passed, it returns a
// cursor from which to continue. lastTry limits the last attempt to read the first slice.
func (s *Store) searchSlices(ctx context.Context, p Page, deadline time.Time,
	look func(slice Page, parts []Part, until time.Time) (full bool, err error), lastTry time.Duration,
) (uuid.UUID, error) {
	bounds, err := s.queries.FilterBounds(ctx, p.Filter.JSON())
	if err != nil {
		return uuid.Nil, AsMoveError(err)
	}
	parts, err := s.partsOf(ctx, &p.Filter)
	if err != nil {
		return uuid.Nil, err
	}
	slice, end := p, bounds.First
	switch {
	case p.Oldest:
		if end = bounds.Below; end == uuid.Nil {
			end = uuid.Max
		}
		if less(slice.Cursor, bounds.First) {
			slice.Cursor = before(bounds.First)
		}
	case bounds.Below != uuid.Nil && (slice.Cursor == uuid.Nil || less(bounds.Below, slice.Cursor)):
		slice.Cursor = bounds.Below
	}
	entries, looked := firstSlice, false
	for {
		began := time.Now()
		until := deadline
		if !looked {
			until = began.Add(firstSliceTimeout)
			if entries == 1 {
				until = began.Add(lastTry)
			}
		} else if !began.Before(deadline) {
			return slice.Cursor, nil
		}
		among, err := s.nextSlice(ctx, &slice, parts, end, entries, until)
		full := false
		if err == nil {
			full, err = look(slice, among, until)
		}
		switch {
		case postgres.IsCancelled(err) && looked:
			return slice.Cursor, nil
		case postgres.IsCancelled(err) && entries > 1:
			entries /= 10
			continue
		case err != nil:
			return uuid.Nil, err
		case full || slice.last == end:
			return uuid.Nil, nil
		}
		slice.Cursor, looked = slice.last, true
		// If the deadline cuts off a slice, its results are lost, so slices get smaller toward the deadline. They have at
		// least firstSlice entries, because each slice costs several statements, which take no less time for fewer entries.
		faster := min(float64(min(sliceTime, max(time.Until(deadline)/2, 0)))/float64(
			max(time.Since(began), time.Millisecond)), 4)
		entries = min(max(int(float64(entries)*faster), firstSlice), maxSlice)
	}
}

// nextSlice sets the end of a slice, at most at end, so that the slice has at most the given number of entries of each
// part. It returns the parts that can contain entries of the slice.
func (s *Store) nextSlice(ctx context.Context, slice *Page, parts []Part, end uuid.UUID, entries int,
	until time.Time,
) (among []Part, err error) {
	slice.last = end
	for _, part := range parts {
		// An entry closes after its capture, so a closed part contains no entry that was captured after the part's end. One
		// day is added, because the clocks of machines may differ.
		after := uuid.Max
		if !part.To.IsZero() {
			after = FirstID(part.To.Add(24*time.Hour + time.Millisecond))
		}
		switch {
		case slice.Oldest && !less(slice.Cursor, after): // every id in the part comes before the slice
		case slice.Oldest || part.To.IsZero() || slice.Cursor != uuid.Nil && !less(after, slice.Cursor):
			among = append(among, part)
		case less(slice.last, after): // the part begins later: end the slice there
			slice.last = after
		}
	}
	for _, part := range among {
		at, err := s.nthID(ctx, slice, part, entries, until)
		if err != nil {
			return nil, err
		}
		if at != uuid.Nil && less(at, slice.last) == slice.Oldest {
			slice.last = at
		}
	}
	return among, nil
}

// nthID returns the id of the nth entry of a part after the page's cursor, or uuid.Nil if the part has fewer.
func (s *Store) nthID(ctx context.Context, p *Page, part Part, n int, until time.Time) (id uuid.UUID, err error) {
	where, args := part.where(nil, []any{pgx.QueryExecModeCacheDescribe})
	if p.Cursor != uuid.Nil {
		args = append(args, p.Cursor)
		where = append(where, fmt.Sprintf(map[bool]string{true: "id > $%d", false: "id < $%d"}[p.Oldest], len(args)-1))
	}
	args = append(args, n-1)
	sql := s.schemas.Render(fmt.Sprintf("SELECT id FROM dlq.dead_letter_queue WHERE %s ORDER BY id %s OFFSET $%d LIMIT 1",
		strings.Join(where, " AND "), p.order(), len(args)-1))
	err = s.read(ctx, until, func(db postgres.DB) error { return db.QueryRow(ctx, sql, args...).Scan(&id) })
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return id, err
}

// read runs a read-only statement. The server cancels the statement at until; a zero until means no limit.
func (s *Store) read(ctx context.Context, until time.Time, run func(db postgres.DB) error) error {
	if until.IsZero() {
		return run(s.statements)
	}
	left := max(time.Until(until).Milliseconds(), 1)
	begin := postgres.BeginReadOnlyQuery(fmt.Sprintf("statement_timeout = %d", left), "enable_seqscan = off")
	return pgx.BeginTxFunc(ctx, postgres.ReadPool(ctx, s.pool), pgx.TxOptions{BeginQuery: begin},
		func(tx pgx.Tx) error { return run(tx) })
}

func less(a, b uuid.UUID) bool { return bytes.Compare(a[:], b[:]) < 0 }

// before returns the greatest id that is less than id.
func before(id uuid.UUID) uuid.UUID {
	for i := len(id) - 1; i >= 0; i-- {
		id[i]--
		if id[i] != 0xff {
			break
		}
	}
	return id
}

// capturedAt returns the time that an entry's id contains: the time at which the entry's job failed or, if that id was
// taken, the time of filing.
func capturedAt(id uuid.UUID) time.Time {
	var ms int64
	for _, b := range id[:6] {
		ms = ms<<8 | int64(b)
	}
	return time.UnixMilli(ms).UTC()
}
