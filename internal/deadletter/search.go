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
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres"
)

// What little matches is looked for in slices: so many entries that none takes long, whatever is asked of them.
const (
	// firstSlice is how many entries of each part the first slice has; the next ones have as many as sliceTime lets them.
	firstSlice = 1000
	mostSlice  = 100_000
	sliceTime  = 50 * time.Millisecond
	// firstSliceTimeout bounds the first slice, which is looked at whatever the budget: a search comes to an end.
	firstSliceTimeout = 2 * time.Second
)

// Found is a page of a search.
type Found struct {
	Entries []Summary
	// Next is where the page after it begins (as [Page.Cursor]); nil where there is none.
	Next uuid.UUID
	// SearchedTo is until when (of capture) it has looked, where it ended for want of time; zero where it did not.
	SearchedTo time.Time
}

// Search is List within a budget of time. Texts, and what that does not find within half of it, are looked for in slices, in the order of
// the page; a search that has used its budget up says how far it has come, and goes on from there.
func (s *Store) Search(ctx context.Context, p Page, budget time.Duration) (*Found, error) {
	deadline := time.Now().Add(budget)
	chosen, err := s.Where(ctx, &p.Filter)
	if err != nil {
		return nil, err
	}
	found := &Found{Entries: []Summary{}}
	if half := budget / 2; half >= time.Millisecond && !isSearch(&p.Filter) {
		if found.Entries, err = s.list(ctx, p, chosen, time.Now().Add(half)); !isStatementTimeout(err) {
			if err == nil && len(found.Entries) == p.Limit {
				found.Next = found.Entries[p.Limit-1].ID
			}
			return found, err
		}
	}
	page := []Summary{}
	at, err := s.inSlices(ctx, p, deadline, func(slice Page, parts []Part, until time.Time) (bool, error) {
		var of []Summary
		for _, part := range parts {
			more, err := s.listPart(ctx, slice, chosen, part, until)
			if err != nil {
				return false, err
			}
			of = append(of, more...)
		}
		page = p.merge(page, of)
		return len(page) == p.Limit, nil
	})
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

// isSearch reports whether no index answers a filter: what an index does answer may be combined with others so that little is left, too,
// which shows when it is tried.
func isSearch(f *filter.Filter) bool {
	return len(f.ErrorMessage) > 0 || f.Payload != nil || len(f.PayloadAt) > 0
}

// CountWithin counts up to most of the entries that a filter chooses, within a budget of time. more: there are others, or there may be.
func (s *Store) CountWithin(ctx context.Context, f filter.Filter, most int, budget time.Duration) (n int, more bool, err error) {
	deadline := time.Now().Add(budget)
	chosen, err := s.Where(ctx, &f)
	if err != nil {
		return 0, false, err
	}
	count := func(slice Page, parts []Part, until time.Time) (bool, error) {
		of := n
		for _, part := range parts {
			where, args := part.where(nil, []any{pgx.QueryExecModeCacheDescribe, slice.Filter.JSON()})
			where, args = slice.where(where, args)
			args = append(args, most+1-of)
			sql := s.schemas.Render("SELECT count(*) FROM (SELECT FROM dlq.dead_letter_queue e WHERE $1::jsonb IS NOT NULL AND " + strings.Join(where, " AND "))
			sql = fmt.Sprintf("%s AND (%s) LIMIT $%d) l", sql, chosen, len(args)-1)
			counted := 0
			if err := s.read(ctx, until, func(db postgres.DB) error { return db.QueryRow(ctx, sql, args...).Scan(&counted) }); err != nil {
				return false, err
			}
			if of += counted; of > most {
				break
			}
		}
		n = of
		return n > most, nil
	}
	if half := budget / 2; half >= time.Millisecond && !isSearch(&f) {
		parts, err := s.partsOf(ctx, &f)
		if err != nil {
			return 0, false, err
		}
		if _, err = count(Page{Filter: f}, parts, time.Now().Add(half)); !isStatementTimeout(err) {
			return min(n, most), n > most, err
		}
	}
	at, err := s.inSlices(ctx, Page{Filter: f}, deadline, count)
	return min(n, most), n > most || at != uuid.Nil, err
}

// partsOf are the parts that what a filter chooses can be in: that of open entries, and those of closed ones, the latest first.
func (s *Store) partsOf(ctx context.Context, f *filter.Filter) ([]Part, error) {
	closed, err := s.ClosedParts(ctx)
	if err != nil {
		return nil, err
	}
	stages := stagesOf(f.Status)
	return slices.DeleteFunc(append([]Part{OpenPart()}, closed...), func(p Part) bool { return !slices.ContainsFunc(stages, p.holds) }), nil
}

// inSlices looks at the entries of a page's filter, slice by slice in its order, until look says that it is full, there are no more, or
// the deadline has passed. It returns how far it came, as a cursor; nil where it came to the end, or is full.
func (s *Store) inSlices(ctx context.Context, p Page, deadline time.Time, look func(slice Page, parts []Part, until time.Time) (full bool, err error)) (uuid.UUID, error) {
	bounds, err := s.queries.FilterBounds(ctx, p.Filter.JSON())
	if err != nil {
		return uuid.Nil, Named(err)
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
		} else if !began.Before(deadline) {
			return slice.Cursor, nil
		}
		among, err := s.nextSlice(ctx, &slice, parts, end, entries, until)
		full := false
		if err == nil {
			full, err = look(slice, among, until)
		}
		switch {
		case isStatementTimeout(err) && looked:
			return slice.Cursor, nil
		case isStatementTimeout(err) && entries > 1:
			entries /= 10
			continue
		case err != nil:
			return uuid.Nil, err
		case full || slice.last == end:
			return uuid.Nil, nil
		}
		slice.Cursor, looked = slice.last, true
		// (What a slice that is ended has found is lost.)
		faster := min(float64(min(sliceTime, max(time.Until(deadline)/2, 0)))/float64(max(time.Since(began), time.Millisecond)), 4)
		entries = min(max(int(float64(entries)*faster), firstSlice), mostSlice) // (fewer take no less time: each is several statements)
	}
}

// nextSlice sets the end of a slice that begins at its cursor, and has up to so many entries of each part. It returns the parts that they
// can be in.
func (s *Store) nextSlice(ctx context.Context, slice *Page, parts []Part, end uuid.UUID, entries int, until time.Time) (among []Part, err error) {
	slice.last = end
	for _, part := range parts {
		// An entry closes after it was captured (a day for clocks that differ).
		after := uuid.Max
		if !part.To.IsZero() {
			after = FirstID(part.To.Add(24*time.Hour + time.Millisecond))
		}
		switch {
		case slice.Oldest && !less(slice.Cursor, after): // all of it is before
		case slice.Oldest || part.To.IsZero() || slice.Cursor != uuid.Nil && !less(after, slice.Cursor):
			among = append(among, part)
		case less(slice.last, after): // its turn comes then
			slice.last = after
		}
	}
	for _, part := range among {
		at, err := s.nth(ctx, slice, part, entries, until)
		if err != nil {
			return nil, err
		}
		if at != uuid.Nil && less(at, slice.last) == slice.Oldest {
			slice.last = at
		}
	}
	return among, nil
}

// nth is the id of a part's nth entry after a page's cursor; nil where it has fewer.
func (s *Store) nth(ctx context.Context, p *Page, part Part, n int, until time.Time) (id uuid.UUID, err error) {
	where, args := part.where(nil, []any{pgx.QueryExecModeCacheDescribe})
	if p.Cursor != uuid.Nil {
		args = append(args, p.Cursor)
		where = append(where, fmt.Sprintf(map[bool]string{true: "id > $%d", false: "id < $%d"}[p.Oldest], len(args)-1))
	}
	args = append(args, n-1)
	sql := s.schemas.Render(fmt.Sprintf("SELECT id FROM dlq.dead_letter_queue WHERE %s ORDER BY id %s OFFSET $%d LIMIT 1", strings.Join(where, " AND "), p.order(), len(args)-1))
	err = s.read(ctx, until, func(db postgres.DB) error { return db.QueryRow(ctx, sql, args...).Scan(&id) })
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil
	}
	return id, err
}

// read runs a statement that reads, and that the server ends at a time; zero for none.
func (s *Store) read(ctx context.Context, until time.Time, run func(db postgres.DB) error) error {
	if until.IsZero() {
		return run(s.statements)
	}
	left := max(time.Until(until).Milliseconds(), 1)
	begin := postgres.BeginReadOnlyQuery(fmt.Sprintf("statement_timeout = %d", left), "enable_seqscan = off")
	return pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{BeginQuery: begin}, func(tx pgx.Tx) error { return run(tx) })
}

// isStatementTimeout recognises a statement that the server ended because its time was over.
func isStatementTimeout(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "57014"
}

func less(a, b uuid.UUID) bool { return bytes.Compare(a[:], b[:]) < 0 }

// before is the greatest id that is less than another.
func before(id uuid.UUID) uuid.UUID {
	for i := len(id) - 1; i >= 0; i-- {
		id[i]--
		if id[i] != 0xff {
			break
		}
	}
	return id
}

// capturedAt is when the job of an entry failed, as its id says.
func capturedAt(id uuid.UUID) time.Time {
	var ms int64
	for _, b := range id[:6] {
		ms = ms<<8 | int64(b)
	}
	return time.UnixMilli(ms).UTC()
}
