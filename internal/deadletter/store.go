package deadletter

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/deadletter/internal/dbsqlc"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/telemetry"
)

// Errors of moves. A [MoveError] wraps one of them. Its detail says what was rejected and, for a move, from which
// states the move is allowed.
var (
	ErrNotFound   = errors.New("not found")
	ErrNotAllowed = errors.New("move not allowed")
	ErrLiveJob    = errors.New("an equal job is live")
	ErrInvalid    = errors.New("invalid request")
	ErrUnhealthy  = errors.New("not possible now")
	ErrForbidden  = errors.New("not permitted")
	ErrApproval   = errors.New("approval required")
)

// sqlStates maps the SQLSTATEs that dlqd's functions raise to errors.
var sqlStates = map[string]error{
	"DLQ01": ErrNotAllowed, "DLQ02": ErrNotFound, "DLQ03": ErrLiveJob, "DLQ04": ErrInvalid,
	"DLQ05": ErrUnhealthy, "DLQ06": ErrForbidden, "DLQ07": ErrApproval,
}

// MoveError is a move or another request that dlqd rejected, with a detail and a hint for the caller. Functions of the
// database reject with the SQLSTATEs of sqlStates.
type MoveError struct {
	Kind   error // ErrNotFound, ErrNotAllowed, ErrLiveJob, ErrInvalid, ErrUnhealthy, ErrForbidden or ErrApproval
	Detail string
	Hint   string
}

func (e *MoveError) Error() string {
	if e.Hint == "" {
		return e.Detail
	}
	return e.Detail + ". " + e.Hint
}

func (e *MoveError) Unwrap() error { return e.Kind }

// Store reads, moves and erases dead letters for operators and callers of the API. The packages of the DLQ worker,
// replay runs and retention have most of their queries themselves.
type Store struct {
	pool *pgxpool.Pool
	// statements is the pool for SQL text in which the schema names are rendered already.
	statements postgres.DB
	schemas    postgres.Schemas
	db         postgres.DB // the same pool, but it renders schema names in statements
	queries    *dbsqlc.Queries
	closed     atomic.Pointer[closedParts]
}

// NewStore returns a store on a pool.
func NewStore(pool *pgxpool.Pool, schemas postgres.Schemas) *Store {
	db := schemas.Rendered(pool)
	return &Store{pool: pool, statements: postgres.Statements(pool), schemas: schemas, db: db, queries: dbsqlc.New(db)}
}

// DB returns the store's pool for queries of other packages. The pool renders schema names in statements.
func (s *Store) DB() postgres.DB { return s.db }

// In returns tx as a DB that renders schema names in statements.
func (s *Store) In(tx pgx.Tx) postgres.DB { return s.schemas.Rendered(tx) }

// InTx runs fn in a transaction with the scope and the origin of ctx, which waits at most 2 s for a lock, and in which
// sequential scans are disabled. Otherwise a session could plan a query while the open partition is small, and the plan
// would scan the whole partition each time after the partition has grown.
func (s *Store) InTx(ctx context.Context, fn func(tx postgres.DB) error) error {
	// The settings are part of the BEGIN statement, which saves a round trip. The transaction may lock jobs for which an
	// application waits, so it waits at most 2 s for a lock.
	options := pgx.TxOptions{BeginQuery: postgres.BeginQuery("enable_seqscan = off", "lock_timeout = '2s'")}
	return pgx.BeginTxFunc(ctx, s.pool, options, func(tx pgx.Tx) error {
		if err := s.setOrigin(ctx, tx); err != nil {
			return err
		}
		return fn(s.schemas.Rendered(tx))
	})
}

// Page selects a page of a list.
type Page struct {
	Filter filter.Filter
	Oldest bool      // whether the oldest entries come first; otherwise the newest do
	Cursor uuid.UUID // the page begins after this entry, the last one of the previous page
	Limit  int       // at least 1

	last uuid.UUID // the last entry that the page may contain
}

const summaryColumns = `id, status, queue, kind, event_id, river_job_id, source, subscriber_id, priority, error_class, error_type,
	error_code, error_message, strategy, next_retry_at, waiting_for,
	dlq.next_step(status, strategy, rule, next_retry_at, waiting_for, error_class, parked_by, queue, kind, job_kind) AS next, dlq_retry_count, first_failed_at,
	last_failed_at, created_at, updated_at, closed_at, fingerprint, assigned_to,
	error_title, destination, destination_url`

// listColumns are the columns of a list for an entry e, masked by m. An error message is cut to 10,000 characters,
// masked, and then cut to 500. The first cut may split a secret, which the mask then misses; the second cut removes the
// end of the text, where that secret would be.
var listColumns = strings.NewReplacer(
	"subscriber_id,", "CASE WHEN m.mask -> 'hidden' ? 'subscriber_id' THEN NULL WHEN m.mask IS NULL OR subscriber_id IS "+
		"NULL THEN subscriber_id ELSE dlq.masked_text(subscriber_id, m.mask, "+listValues+") END AS subscriber_id,",
	"error_message,", `CASE WHEN m.mask -> 'hidden' ? 'error_message' THEN NULL
		WHEN m.mask IS NULL THEN left(error_message, 500)
		ELSE left(dlq.masked_text(left(error_message, 10000), m.mask, `+listValues+"), 500) END AS error_message,",
	"error_title,", "CASE WHEN m.mask -> 'hidden' ? 'error_message' THEN NULL WHEN m.mask IS NULL "+
		"OR error_title IS NULL THEN error_title ELSE dlq.masked_text(error_title, m.mask, "+
		listValues+") END AS error_title,",
	"destination_url", "CASE WHEN m.mask IS NULL OR destination_url IS NULL THEN destination_url "+
		"ELSE dlq.masked_text(destination_url, m.mask, "+listValues+") END AS destination_url",
).Replace(summaryColumns) + `, CASE WHEN river_job_id < 0 AND (m.mask -> 'hidden' ? 'record') IS NOT TRUE THEN (
	SELECT ` + recordColumn + " FROM (SELECT dlq.without_bytes(e.record) AS record OFFSET 0) r) END AS record"

const listValues = "dlq.sensitive_values(original_event, edited_event, metadata, job_kind, m.mask)"

// ListSQL returns the query of [Store.List] for a part of the queue, and its parameters, for EXPLAIN. condition is the
// condition of the page's filter ([Store.Where]). A page begins at an id: ids sort by time, and every filter index is
// in the order of ids, so all pages cost the same.
func (s *Store) ListSQL(ctx context.Context, p Page, condition string, part Part) (string, []any) {
	where, args := part.where(nil, []any{pgx.QueryExecModeCacheDescribe, p.Filter.JSON()})
	where, args = p.where(where, args)
	args = append(args, postgres.IsReader(ctx), p.Limit)
	list := s.schemas.Render(fmt.Sprintf(`SELECT %s FROM dlq.dead_letter_queue e CROSS
		JOIN (SELECT dlq.mask($%d) AS mask OFFSET 0) m WHERE $1::jsonb IS NOT NULL AND %s`, listColumns, len(args)-2,
		strings.Join(where, " AND ")))
	return fmt.Sprintf("%s AND (%s) ORDER BY id %s LIMIT $%d", list, condition, p.order(), len(args)-1), args
}

func (p *Page) order() string {
	if p.Oldest {
		return "ASC"
	}
	return "DESC"
}

// where adds the conditions of the page to where and args.
func (p *Page) where(where []string, args []any) ([]string, []any) {
	beyond, until := "id < $%d", "id >= $%d"
	if p.Oldest {
		beyond, until = "id > $%d", "id <= $%d"
	}
	if p.Cursor != uuid.Nil {
		args = append(args, p.Cursor)
		where = append(where, fmt.Sprintf(beyond, len(args)-1))
	}
	if p.last != uuid.Nil {
		args = append(args, p.last)
		where = append(where, fmt.Sprintf(until, len(args)-1))
	}
	// Failures in the inbox are listed as pending entries, except further failures of a job that has an open entry.
	return append(where, "(stage <> 'inbox' OR NOT dlq.is_repeat(river_job_id, job_created_at))"), args
}

// Where returns the SQL condition of a filter (dlq.filter_where), which includes the scope of ctx.
func (s *Store) Where(ctx context.Context, f *filter.Filter) (string, error) {
	where, err := s.queries.FilterWhere(ctx, f.JSON())
	return where, AsMoveError(err)
}

// FilterValue is a suggested value for a field of a filter.
type FilterValue = dbsqlc.FilterValuesRow

// FilterValues suggests up to most values for a JSON field of the filter: values of open entries that contain text, or
// fingerprints of failure groups that begin with it. It looks at the first 500 values or at the newest 2,000 entries.
// Likely values come first.
func (s *Store) FilterValues(ctx context.Context, field, text string, most int) ([]FilterValue, error) {
	rows, err := s.queries.FilterValues(ctx, dbsqlc.FilterValuesParams{
		Field: field, Prefix: text, Most: int32(min(most, math.MaxInt32)),
	})
	return rows, AsMoveError(err)
}

// stagesOf returns the partitions that contain entries with these states. Without a state it returns all partitions.
func stagesOf(statuses []string) (stages []string) {
	if len(statuses) == 0 {
		return []string{"inbox", "open", "returned", "resolved", "failed", "archived"}
	}
	for _, status := range statuses {
		switch Status(status) {
		case Pending:
			stages = append(stages, "inbox", "open")
		case Processing, Manual:
			stages = append(stages, "open")
		case Returned, Resolved, Failed, Archived:
			stages = append(stages, strings.TrimPrefix(status, "dlq_"))
		}
	}
	return stages
}

// FirstID returns the smallest id of an entry that was captured at the given time. An id begins with 48 bits: the
// milliseconds since 1970.
func FirstID(at time.Time) uuid.UUID {
	var id uuid.UUID
	ms := min(max(at.UnixMilli(), 0), 1<<48-1)
	for i := range 6 {
		id[i] = byte(ms >> (8 * (5 - i)))
	}
	return id
}

// List returns one page of entries. It reads part by part (see [Part]) and has no time limit. [Store.Search] has a time
// limit.
func (s *Store) List(ctx context.Context, p Page) ([]Summary, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	condition, err := s.Where(ctx, &p.Filter)
	if err != nil {
		return nil, err
	}
	return s.list(ctx, p, condition, time.Time{})
}

// list is [Store.List] with the deadline until; the zero time means no deadline.
func (s *Store) list(ctx context.Context, p Page, condition string, until time.Time) ([]Summary, error) {
	stages := stagesOf(p.Filter.Status)
	page := []Summary{}
	// Read the open part first. An entry that closes between the statements is then found twice, and merge removes the
	// duplicate. In the other order, the entry could be missed.
	if open := OpenPart(); slices.ContainsFunc(stages, open.holds) {
		var err error
		if page, err = s.listPart(ctx, p, condition, open, until); err != nil {
			return nil, err
		}
	}
	if !slices.ContainsFunc(stages, Part{Stages: []string{"returned", "resolved", "failed", "archived"}}.holds) {
		return page, nil
	}
	parts, err := s.ClosedParts(ctx)
	if err != nil {
		return nil, err
	}
	since, _ := time.Parse(time.RFC3339, p.Filter.After) // zero, which means no bound, if the filter has no such time
	for _, part := range parts {
		if !p.Oldest && len(page) == p.Limit {
			// An entry closes after it fails. So entries that closed before the failure of the page's last entry also failed
			// before it, and come after it in the list.
			since = ClosedSince(page[len(page)-1].ID)
		}
		if !slices.ContainsFunc(stages, part.holds) || (!since.IsZero() && part.endsBefore(since.Add(-24*time.Hour))) {
			continue
		}
		if from := since.Add(-24 * time.Hour); part.From.Before(from) {
			part.From = from // excludes older months of the part
		}
		more, err := s.listPart(ctx, p, condition, part, until)
		if err != nil {
			return nil, err
		}
		page = p.merge(page, more)
	}
	return page, nil
}

func (p *Page) check() error {
	if p.Limit < 1 {
		return &MoveError{Kind: ErrInvalid, Detail: fmt.Sprintf("dead letters: the limit %d is not at least 1", p.Limit)}
	}
	return nil
}

// merge returns the first page of the entries of page and more, in page order and without duplicates.
func (p *Page) merge(page, more []Summary) []Summary {
	page = append(page, more...)
	slices.SortStableFunc(page, func(a, b Summary) int {
		if p.Oldest {
			a, b = b, a
		}
		return bytes.Compare(b.ID[:], a.ID[:])
	})
	page = slices.CompactFunc(page, func(a, b Summary) bool { return a.ID == b.ID })
	return page[:min(len(page), p.Limit)]
}

func (s *Store) listPart(ctx context.Context, p Page, condition string, part Part,
	until time.Time,
) (found []Summary, err error) {
	sql, args := s.ListSQL(ctx, p, condition, part)
	err = s.read(ctx, until, func(db postgres.DB) error {
		rows, err := db.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		found, err = pgx.CollectRows(rows, pgx.RowToStructByName[Summary])
		return err
	})
	return found, err
}

// Summaries returns the entries with the given ids as lists show them, newest first. It omits entries that closed
// before since, and entries outside of the caller's scope.
func (s *Store) Summaries(ctx context.Context, ids []uuid.UUID, since time.Time) ([]Summary, error) {
	sql := s.schemas.Render("SELECT " + listColumns + ` FROM dlq.dead_letter_queue e CROSS
		JOIN (SELECT dlq.mask($1) AS mask OFFSET 0) m
		WHERE id = ANY ($2) AND (closed_at IS NULL OR closed_at >= $3 AND closed_at < $5)
			AND dlq.in_scope(queue, kind, nullif($4, '')::jsonb)
		ORDER BY id DESC`)
	rows, err := s.statements.Query(ctx, sql, pgx.QueryExecModeCacheDescribe, postgres.IsReader(ctx), ids, since,
		postgres.Scope(ctx), time.Now().Add(24*time.Hour)) // excludes the partitions of later months
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[Summary])
}

// Part is a part of all entries, which one statement reads. Each month of closed entries is a table with a dozen
// indexes. A statement locks the tables and indexes of every month that its plan cannot exclude, and all databases of
// the server share one lock table. So queries over the whole history read one part after another.
type Part struct {
	Stages   []string
	From, To time.Time // bounds of closed_at; zero means no bound
	ahead    time.Time // start of the part's earliest month in the future without entries; zero if there is none
}

// partMonths is the number of months of closed entries in a part.
const partMonths = 4

// OpenPart returns the part that contains all open entries and the inbox.
func OpenPart() Part { return Part{Stages: []string{"inbox", "open"}} }

func (p Part) holds(stage string) bool { return slices.Contains(p.Stages, stage) }

func (p Part) endsBefore(t time.Time) bool { return !p.To.IsZero() && p.To.Before(t) }

// where adds the conditions of the part to where and args. args[0] must be a query mode of pgx in which the planner
// knows the parameters, because otherwise the planner cannot exclude months.
func (p Part) where(where []string, args []any) ([]string, []any) {
	where = append(where, "stage IN ('"+strings.Join(p.Stages, "', '")+"')")
	if !p.From.IsZero() {
		args = append(args, p.From)
		where = append(where, fmt.Sprintf("closed_at >= $%d", len(args)-1))
	}
	if !p.To.IsZero() {
		args = append(args, p.To)
		where = append(where, fmt.Sprintf("closed_at < $%d", len(args)-1))
	} else if !p.ahead.IsZero() {
		args = append(args, p.ahead)
		where = append(where, fmt.Sprintf("closed_at < $%d", len(args)-1))
	}
	return where, args
}

// partsAge is the time after which the months of closed entries are read again. Parts that were read earlier also cover
// every entry that closes within a day after they were read.
const partsAge = time.Minute

// closedParts has the parts of closed entries, and the time at which they were read.
type closedParts struct {
	parts []Part
	at    time.Time
}

// ClosedParts returns the parts of closed entries, in the order of their ends: the latest end is first. They were read
// at most partsAge ago.
func (s *Store) ClosedParts(ctx context.Context) ([]Part, error) {
	if known := s.closed.Load(); known != nil && time.Since(known.at) < partsAge {
		return slices.Clone(known.parts), nil
	}
	at := time.Now()
	parts, err := s.readClosedParts(ctx)
	if err == nil {
		s.closed.Store(&closedParts{slices.Clone(parts), at})
	}
	return parts, err
}

func (s *Store) readClosedParts(ctx context.Context) ([]Part, error) {
	months, err := s.queries.ClosedMonths(ctx)
	if err != nil {
		return nil, err
	}
	parts := []Part{{Stages: []string{"returned"}}}
	for _, stage := range []string{"resolved", "failed", "archived"} {
		part := Part{Stages: []string{stage}}
		n := 0
		for _, month := range months { // newest first
			if month.Stage != stage {
				continue
			}
			if month.Ahead {
				part.ahead = month.BeginsAt
			}
			if n++; n%partMonths == 0 {
				part.From = month.BeginsAt
				parts = append(parts, part)
				part = Part{Stages: part.Stages, To: month.BeginsAt}
			}
		}
		parts = append(parts, part)
	}
	slices.SortStableFunc(parts, func(a, b Part) int {
		switch {
		case a.To.IsZero() && b.To.IsZero():
			return 0
		case a.To.IsZero():
			return -1
		case b.To.IsZero():
			return 1
		}
		return b.To.Compare(a.To)
	})
	return parts, nil
}

// entryColumns are the columns of [Entry]. An unfiled entry has the tags that the application wrote to its job, which
// may have NULL elements or several dimensions.
const entryColumns = summaryColumns + `,
	CASE job_kind WHEN 'dlqd_message' THEN original_event ->> 'sourceType' END AS source_type,
	CASE job_kind WHEN 'dlqd_message' THEN original_event ->> 'sourceId' END AS source_id,
	CASE job_kind WHEN 'dlqd_message' THEN original_event ->> 'sourceName' END AS source_name,
	CASE job_kind WHEN 'dlqd_message' THEN original_event ->> 'version' END AS event_version,
	(SELECT l.attempt -> 'systemState'
		FROM (SELECT retry_history -> -1 AS attempt, retry_history #>> '{-1,at}' AS at
			UNION ALL SELECT replay_attempts -> -1, replay_attempts #>> '{-1,at}') l
		WHERE l.attempt ->> 'outcome' IS DISTINCT FROM 'completed' ORDER BY l.at DESC NULLS LAST
		LIMIT 1) AS system_state,
	job_kind, ARRAY(SELECT t FROM unnest(tags) t WHERE t IS NOT NULL) AS tags, original_event, edited_event,
		error_stack_trace, error_context, retry_history, retry_count,
		max_retries, dlq_max_retries, replay_attempts, rule, reported_class, ordering_key, parked_by, redelivery_job_id,
			locked_by, locked_at,
		notes, resolution_strategy, resolved_by, resolution_notes, resolution_timestamp, config_version, metadata,
	` + recordColumn + " AS record"

// recordColumn is the value of [Summary.Record]. The field record must have no bytes, because Postgres would read them
// once for each field.
const recordColumn = `CASE WHEN (record).topic IS NOT NULL THEN jsonb_strip_nulls(jsonb_build_object(
		'cluster', (record).cluster, 'topic', (record).topic, 'partition', (record).partition,
		'offset', (record)."offset", 'at', (record).at, 'group', (record).consumer_group, 'node', (record).node, 'originalTopic', (record).original_topic,
		'originalPartition', (record).original_partition, 'originalOffset', (record).original_offset,
		'form', (record).form, 'bytes', (record).size)) END`

// exportPage is the number of entries that an export reads with one statement.
const exportPage = 200

// FindEntries returns the next [exportPage] entries that a filter selects, with all their data, in the order of
// capture. It begins after the entry after, or with the first entry if after is nil.
func (s *Store) FindEntries(ctx context.Context, filter json.RawMessage, after *uuid.UUID) ([]Entry, error) {
	mask := "(SELECT dlq.mask())"
	if isRevealed(ctx) {
		mask = "NULL"
	}
	var entries []Entry
	read := func(db postgres.DB) error {
		rows, err := db.Query(ctx, fmt.Sprintf(maskedEntries+" ORDER BY id",
			"id = ANY (ARRAY(SELECT dlq.find_ids($1, $2, $3)))", mask), filter, exportPage, after)
		if err == nil {
			entries, err = pgx.CollectRows(rows, pgx.RowToStructByName[Entry])
		}
		return err
	}
	var err error
	if ctx.Value(approvalKey{}) == nil {
		err = read(s.db)
	} else {
		err = s.InTx(ctx, read) // InTx restricts the filter to the entries of the approval
	}
	return entries, AsMoveError(err)
}

// Get returns an entry and its audit trail, the oldest move first. It returns [ErrNotFound] if there is no such entry
// in the caller's scope.
func (s *Store) Get(ctx context.Context, id uuid.UUID) (*Entry, []Transition, error) {
	entry, err := s.find(ctx, id)
	if errors.Is(err, pgx.ErrNoRows) {
		// While an entry moves between partitions, one statement may find neither the old nor the new row.
		entry, err = s.find(ctx, id)
	}
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil, &MoveError{Kind: ErrNotFound, Detail: fmt.Sprintf("dead letter %s: there is no such entry", id)}
	}
	if err != nil {
		return nil, nil, err
	}
	trail, err := s.trail(ctx, entry)
	return entry, trail, err
}

const (
	// maxTrail is the maximum number of moves of an entry that are shown.
	maxTrail = 1000
	// trailMonths is the number of months of the audit trail that one statement reads (see [Part]). Each month is a table
	// with four indexes.
	trailMonths = 10
)

// trail returns up to [maxTrail] audit rows of an entry since its capture, the oldest first.
func (s *Store) trail(ctx context.Context, entry *Entry) ([]Transition, error) {
	trail := []Transition{}
	for from := entry.CreatedAt.Add(-time.Hour); len(trail) < maxTrail; from = from.AddDate(0, trailMonths, 0) {
		sql, args := s.TrailSQL(ctx, entry.ID, from, maxTrail-len(trail))
		rows, err := s.statements.Query(ctx, sql, args...)
		if err != nil {
			return nil, err
		}
		more, err := pgx.CollectRows(rows, pgx.RowToStructByName[Transition])
		if err != nil {
			return nil, err
		}
		trail = append(trail, more...)
		if from.AddDate(0, trailMonths, 0).After(time.Now().Add(24 * time.Hour)) { // one day more, because clocks may differ
			break
		}
	}
	return trail, nil
}

// TrailSQL returns the query with which [Store.Get] reads [trailMonths] months of the audit trail, and its parameters,
// for EXPLAIN.
func (s *Store) TrailSQL(ctx context.Context, id uuid.UUID, from time.Time, limit int) (string, []any) {
	return s.schemas.Render(`SELECT at, from_status, to_status, actor, db_user, reason,
		CASE WHEN m.mask -> 'hidden' ? 'notes' THEN NULL ELSE dlq.masked_text(note, m.mask) END AS note, strategy,
		rule, next_retry_at, river_job_id, config_version, origin, operation,
			CASE WHEN m.mask -> 'hidden' ? 'edited_event' THEN NULL ELSE dlq.masked_detail(detail, m.mask) END AS detail
		FROM dlq.dead_letter_transitions CROSS JOIN (SELECT CASE WHEN NOT $6 THEN dlq.mask($5) END AS mask OFFSET 0) m
		WHERE entry_id = $1 AND at >= $2 AND at < $3 ORDER BY at, id LIMIT $4`),
		[]any{
			pgx.QueryExecModeCacheDescribe, id, from, from.AddDate(0, trailMonths, 0), limit, postgres.IsReader(ctx),
			isRevealed(ctx),
		}
}

// find looks for an entry among the open entries, then among those that closed after the entry's job failed, and last
// among older ones. It returns pgx.ErrNoRows if there is no such entry.
func (s *Store) find(ctx context.Context, id uuid.UUID) (*Entry, error) {
	entry, err := s.findIn(ctx, id, OpenPart())
	if !errors.Is(err, pgx.ErrNoRows) {
		return entry, err
	}
	parts, err := s.ClosedParts(ctx)
	if err != nil {
		return nil, err
	}
	slices.Reverse(parts)
	since := ClosedSince(id)
	slices.SortStableFunc(parts, func(a, b Part) int {
		switch before := [2]bool{a.endsBefore(since), b.endsBefore(since)}; before {
		case [2]bool{true, false}:
			return 1
		case [2]bool{false, true}:
			return -1
		}
		return 0
	})
	for _, part := range parts {
		if entry, err := s.findIn(ctx, id, part); !errors.Is(err, pgx.ErrNoRows) {
			return entry, err
		}
	}
	return nil, pgx.ErrNoRows
}

func (s *Store) findIn(ctx context.Context, id uuid.UUID, part Part) (*Entry, error) {
	sql, args := s.GetSQL(ctx, id, part)
	rows, err := s.statements.Query(ctx, sql, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToAddrOfStructByName[Entry])
}

// GetSQL returns the query of [Store.Get] for a part of the queue, and its parameters, for EXPLAIN.
func (s *Store) GetSQL(ctx context.Context, id uuid.UUID, part Part) (string, []any) {
	where, args := part.where([]string{"id = $1"}, []any{pgx.QueryExecModeCacheDescribe, id})
	add := func(condition string, value any) string {
		args = append(args, value)
		return fmt.Sprintf(condition, len(args)-1)
	}
	if scope := postgres.Scope(ctx); scope != "" {
		where = append(where, add("dlq.in_scope(queue, kind, $%d::jsonb)", scope))
	}
	mask := "NULL"
	if !isRevealed(ctx) {
		mask = add("(SELECT dlq.mask($%d))", postgres.IsReader(ctx))
	}
	return s.schemas.Render(fmt.Sprintf(maskedEntries, strings.Join(where, " AND "), mask)), args
}

// maskedEntries is a format of the query for the masked entries that match a condition. Its verbs are the condition and
// the mask.
const maskedEntries = "SELECT " + entryColumns + ` FROM (SELECT q AS entry FROM dlq.dead_letter_queue q
	WHERE %s) w CROSS JOIN LATERAL dlq.masked(w.entry, %s) e`

type revealKey struct{}

// isRevealed reports whether reads with ctx return unmasked data, because the caller has recorded a reason.
func isRevealed(ctx context.Context) bool { return ctx.Value(revealKey{}) != nil }

// Reveal returns an entry unmasked, and its audit trail. It first writes an audit row with the actor and the reason. If
// that fails, it returns only the error.
func (s *Store) Reveal(ctx context.Context, id uuid.UUID, act Act) (*Entry, []Transition, error) {
	if err := s.move(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).RecordReveal(ctx, dbsqlc.RecordRevealParams{ID: id, Note: act.Note, Actor: act.Actor})
	}); err != nil {
		return nil, nil, err
	}
	return s.Get(context.WithValue(ctx, revealKey{}, true), id)
}

// RevealFor is how long [Store.Revealed] shows an entry unmasked after a reveal.
const RevealFor = 10 * time.Minute

// Revealed returns the same as [Store.Get]. If the actor has revealed the entry within the last [RevealFor], the entry
// is unmasked, and until is the end of that time by the clock of this process; otherwise until is zero. Revealed writes
// no audit row, because the row of the reveal covers this time.
func (s *Store) Revealed(ctx context.Context, id uuid.UUID, actor string) (entry *Entry, trail []Transition,
	until time.Time, err error,
) {
	var now time.Time // the database's clock, by which the trail's times were set
	if err := s.statements.QueryRow(ctx, "SELECT clock_timestamp()").Scan(&now); err != nil {
		return nil, nil, until, err
	}
	sql, args := s.TrailSQL(ctx, id, now.Add(-RevealFor), maxTrail)
	rows, err := s.statements.Query(ctx, sql, args...)
	if err != nil {
		return nil, nil, until, err
	}
	recent, err := pgx.CollectRows(rows, pgx.RowToStructByName[Transition])
	if err != nil {
		return nil, nil, until, err
	}
	for i := range recent {
		if t := &recent[i]; t.Actor == actor && t.Reason != nil && *t.Reason == revealedReason {
			until = time.Now().Add(RevealFor - now.Sub(t.At))
		}
	}
	if !until.IsZero() {
		ctx = context.WithValue(ctx, revealKey{}, true)
	}
	entry, trail, err = s.Get(ctx, id)
	return entry, trail, until, err
}

// revealedReason is the result of the SQL function dlq.revealed_reason.
const revealedReason = "revealed"

// RecordExport writes an audit row for an export of the entries that a filter selects. If reveal is set, reads with the
// returned context are unmasked; then act needs a note.
func (s *Store) RecordExport(ctx context.Context, filter json.RawMessage, reveal bool, act Act,
) (context.Context, error) {
	if reveal && strings.TrimSpace(act.Note) == "" {
		return nil, &MoveError{
			Kind: ErrInvalid, Detail: "export: an unmasked export requires a note",
			Hint: "Give the reason in the note; it is written to the audit trail.",
		}
	}
	err := s.move(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).RecordExport(ctx, dbsqlc.RecordExportParams{
			Revealed: reveal, Actor: act.Actor, Note: act.Note, Filter: filter,
		})
	})
	if reveal {
		ctx = context.WithValue(ctx, revealKey{}, true)
	}
	return ctx, err
}

// ClosedSince returns the earliest time at which an entry can have closed: the time in its id (or now, if that is
// earlier) less one day, because clocks may differ. dlq.closed_since computes the same.
func ClosedSince(id uuid.UUID) time.Time {
	failed := capturedAt(id)
	if now := time.Now(); failed.After(now) {
		failed = now
	}
	return failed.Add(-24 * time.Hour)
}

// Act is the actor and the note of an operator's action.
type Act struct {
	Actor string
	Note  string
	// Operation groups the moves of one action for [Store.Undo]; uuid.Nil means a new operation.
	Operation uuid.UUID
}

// operation returns the id of a's operation, or a new id if a has none.
func (a Act) operation() uuid.UUID {
	if a.Operation != uuid.Nil {
		return a.Operation
	}
	return NewOperation()
}

// NewOperation returns an id for an operation.
func NewOperation() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// Replay describes the replay of one entry.
type Replay struct {
	Payload     json.RawMessage // replaces the entry's payload; nil leaves it unchanged
	Destination string          // replaces the destination of the entry's queue; "" leaves it unchanged
	// Checkpoint is [Resume] or [Discard]. It is required if Payload is set and the entry has a [Checkpoint].
	Checkpoint string
	Force      bool // replay even if the entry's own job, or another job with its unique key, is live or has done the work
	// OtherGroups accepts that consumer groups that did not fail read a record again. replay.Replayer checks it.
	OtherGroups bool
	Act         Act
}

// Replay redelivers an entry now. It returns the id of the new job. If the entry's own job already runs again or has
// completed, it returns the id of that job instead.
func (s *Store) Replay(ctx context.Context, id uuid.UUID, in Replay) (int64, error) {
	var job int64
	err := s.move(ctx, func(tx postgres.DB) (err error) {
		params := dbsqlc.ReplayParams{
			ID: id, Actor: in.Act.Actor, Note: in.Act.Note, Payload: string(in.Payload),
			Force: in.Force, Destination: in.Destination, Checkpoint: in.Checkpoint,
		}
		job, err = dbsqlc.New(tx).Replay(ctx, params)
		return err
	})
	return job, err
}

// Discard archives an entry whose work is no longer wanted.
func (s *Store) Discard(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "discard", id, act)
}

// Expire archives an entry whose work is out of date.
func (s *Store) Expire(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "expire", id, act)
}

// Resolve closes a parked entry whose work was done outside dlqd.
func (s *Store) Resolve(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "resolve", id, act)
}

// Park moves a pending entry to manual.
func (s *Store) Park(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "park", id, act)
}

// Unpark returns a parked entry to pending.
func (s *Store) Unpark(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "unpark", id, act)
}

// Reopen moves a resolved, archived or returned entry to manual.
func (s *Store) Reopen(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "reopen", id, act)
}

func (s *Store) call(ctx context.Context, verb string, id uuid.UUID, act Act) error {
	operation := act.operation()
	return s.move(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).Move(ctx, dbsqlc.MoveParams{
			Verb: verb, ID: id, Actor: act.Actor, Note: act.Note, Operation: operation,
		})
	})
}

// Bulk is an action on every entry that a filter selects. An approval covers its JSON.
type Bulk struct {
	// Action is discard, expire, resolve, park, unpark, reopen, assign, tag, note or purge.
	Action   string          `json:"do"`
	Filter   json.RawMessage `json:"filter"`        // see dlq.find
	All      bool            `json:"all,omitempty"` // required if the filter selects every entry
	Assignee string          `json:"assignee,omitempty"`
	Tags     []string        `json:"tags,omitempty"`
	Force    bool            `json:"force,omitempty"` // with purge: also purge pending, manual and failed entries
	Act      Act             `json:"-"`
}

// bulkBatch is the number of entries in one transaction of a bulk action.
const bulkBatch = 500

// Bulk applies an action in batches, each in its own transaction. It returns how many entries the filter selected and
// how many of them the action changed. If Bulk is interrupted, the changes of finished batches stay.
func (s *Store) Bulk(ctx context.Context, b Bulk) (looked, changed int, err error) {
	below, err := s.queries.NewID(ctx)
	if err != nil {
		return 0, 0, err
	}
	args, err := json.Marshal(map[string]any{
		"assignee": b.Assignee, "tags": b.Tags, "force": b.Force, "operation": b.Act.operation(),
	})
	if err != nil {
		return 0, 0, err
	}
	params := dbsqlc.ActWhereParams{
		Action: b.Action, Filter: b.Filter, Actor: b.Act.Actor, Note: b.Act.Note,
		Args: args, AllEntries: b.All, MaxEntries: bulkBatch, Below: below,
	}
	for {
		var row dbsqlc.ActWhereRow
		if err := s.move(ctx, func(tx postgres.DB) (err error) {
			row, err = dbsqlc.New(tx).ActWhere(ctx, params)
			return err
		}); err != nil {
			return looked, changed, err
		}
		looked, changed = looked+int(row.Looked), changed+int(row.Changed)
		if row.Looked < bulkBatch {
			return looked, changed, nil
		}
		params.After = &row.Last
	}
}

// EnsureMonth creates the partition for entries that closed with a status in a month. It locks the table of the status
// only during the call. It fails if another session holds that table.
func (s *Store) EnsureMonth(ctx context.Context, status string, month time.Time) error {
	exists, err := s.queries.EnsureMonth(ctx, dbsqlc.EnsureMonthParams{Status: status, Month: month})
	if err == nil && !exists {
		err = fmt.Errorf("partition of %s for %s: another session holds its table; try again", status,
			month.Format("2006-01"))
	}
	return err
}

// RestoreEntries restores archived entries, all or none, and prevents retention from dropping their months before
// until. batches calls restore with the entries, batch by batch. If the transaction collides with another one,
// RestoreEntries calls batches again. It skips entries that are present, and returns how many it restored.
func (s *Store) RestoreEntries(ctx context.Context, until time.Time, act Act,
	batches func(restore func(entries json.RawMessage) error) error,
) (restored int, err error) {
	err = s.move(ctx, func(tx postgres.DB) error {
		restored = 0
		return batches(func(entries json.RawMessage) error {
			n, err := dbsqlc.New(tx).RestoreEntries(ctx, dbsqlc.RestoreEntriesParams{
				Entries: entries, Until: until, Actor: act.Actor, Note: act.Note,
			})
			restored += int(n)
			return err
		})
	})
	if err != nil {
		return 0, err
	}
	return restored, nil
}

// Protect sets the columns that are hidden from the role dlq_reader, and the masking rules for all callers (see
// dlq.mask). It writes only changes.
func (s *Store) Protect(ctx context.Context, columns []string, masked json.RawMessage) error {
	return s.queries.Protect(ctx, dbsqlc.ProtectParams{Columns: columns, Masked: masked})
}

// SchemaVersion returns the version of the database schema: the number of its last migration.
func (s *Store) SchemaVersion(ctx context.Context) (int64, error) {
	return postgres.SchemaVersion(ctx, s.db)
}

// maxMoveTries is how often a move is run at most, if concurrent moves of the same row collide with it.
const maxMoveTries = 5

type originKey struct{}

// WithOrigin returns a context with the origin of an action, which the audit trail records.
func WithOrigin(ctx context.Context, origin string) context.Context {
	return context.WithValue(ctx, originKey{}, &origin)
}

// OnBehalfOf adds to the origin in ctx the person for whom the caller acts. It changes nothing if ctx has no origin.
func OnBehalfOf(ctx context.Context, person string) {
	if origin, ok := ctx.Value(originKey{}).(*string); ok {
		*origin += ", on behalf of " + person
	}
}

type approvalKey struct{}

// WithApproval returns a context bound to an approval. Actions with that context touch only the entries that the
// approval froze.
func WithApproval(ctx context.Context, id uuid.UUID) context.Context {
	return context.WithValue(ctx, approvalKey{}, id)
}

// Origin returns the origin of an action, or "" if ctx has none.
func Origin(ctx context.Context) string {
	if origin, ok := ctx.Value(originKey{}).(*string); ok {
		return *origin
	}
	return ""
}

// setOrigin passes the scope, the approval, the origin and the trace in ctx to the database, for the rest of the
// transaction.
func (s *Store) setOrigin(ctx context.Context, tx pgx.Tx) error {
	if err := s.schemas.SetScope(ctx, tx); err != nil {
		return err
	}
	if id, ok := ctx.Value(approvalKey{}).(uuid.UUID); ok {
		if _, err := tx.Exec(ctx, s.schemas.Render("SELECT set_config('dlq.approved', $1, true)"), id.String()); err != nil {
			return err
		}
	}
	origin := Origin(ctx)
	if origin == "" {
		return nil
	}
	parent, state := telemetry.Inject(ctx)
	_, err := tx.Exec(ctx,
		s.schemas.Render("SELECT set_config('dlq.origin', $1, true), set_config('dlq.trace', $2, true)"), origin,
		strings.TrimSpace(parent+" "+state))
	return err
}

// move runs a move in a transaction. It runs the move again, up to maxMoveTries times, if the transaction collides with
// another one: in a deadlock, or because the other one moved the row to another partition. Errors of dlqd's functions
// are returned as [MoveError].
func (s *Store) move(ctx context.Context, run func(tx postgres.DB) error) error {
	var err error
	for range maxMoveTries {
		err = s.InTx(ctx, run)
		if !postgres.IsCollision(err) || ctx.Err() != nil {
			break
		}
	}
	return AsMoveError(err)
}

// AsMoveError turns an error that one of dlqd's functions raised into a [MoveError]. It returns other errors unchanged.
func AsMoveError(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && sqlStates[pgErr.Code] != nil {
		return &MoveError{Kind: sqlStates[pgErr.Code], Detail: pgErr.Message, Hint: pgErr.Hint}
	}
	return err
}

// Redelivery is the result of the redelivery of one entry: see dlq.redeliver.
type Redelivery = dbsqlc.RedeliverRow

// Verdicts of [Redelivery].
const (
	VerdictSent     = "sent"     // job JobID was created
	VerdictFollows  = "follows"  // the entry's own job JobID was started again outside dlqd, and the entry waits for it
	VerdictResolved = "resolved" // the entry's own job or a redelivery, JobID, has completed: the entry is resolved
	VerdictBusy     = "busy"     // another transaction has locked JobID or its unique key; try again
	VerdictLive     = "live"     // JobID, which is live, holds the unique key
	VerdictDone     = "done"     // JobID, which has ended, holds the unique key
	VerdictOpen     = "open"     // the entry has failed, and another entry of its job JobID is open
	VerdictAlone    = "alone"    // the job was rescued twice or more, and another such job of its queue goes first
)

// Redeliver creates jobs for entries that tx has claimed, and records the version of the policy that decided to
// redeliver them.
func (s *Store) Redeliver(ctx context.Context, tx postgres.DB, ids []uuid.UUID, actor, reason,
	configVersion string,
) ([]Redelivery, error) {
	return dbsqlc.New(tx).Redeliver(ctx, dbsqlc.RedeliverParams{
		Ids: ids, Actor: actor, Reason: reason, ConfigVersion: configVersion,
	})
}

// Sweep is the result of a check of the jobs of entries in dlq_processing.
type Sweep = dbsqlc.SweepRedeliveriesRow

// SweepRedeliveries checks the jobs of a batch of entries in dlq_processing, in the order of ids. The batch begins
// after the entry after, which is uuid.Nil for the first batch and then Sweep.Last of the previous batch. If Sweep.Last
// is uuid.Nil, no entry is left.
func (s *Store) SweepRedeliveries(ctx context.Context, after uuid.UUID) (Sweep, error) {
	return s.queries.SweepRedeliveries(ctx, after)
}

// OldestOpen returns the time at which the oldest open entry was captured, or nil if no entry is open.
func (s *Store) OldestOpen(ctx context.Context) (*time.Time, error) {
	at, err := s.queries.OldestOpen(ctx)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &at, err
}

// Backlog has the number of open entries with the same status, queue and class.
type Backlog = dbsqlc.BacklogRow

// BacklogSQL is the query of [Store.Backlog], for EXPLAIN.
const BacklogSQL = dbsqlc.Backlog

// Backlog returns the numbers of open entries by status, queue and class.
func (s *Store) Backlog(ctx context.Context) ([]Backlog, error) { return s.queries.Backlog(ctx) }

// PreviewCount has the number of entries with the same queue, error type and age that a filter selects.
type PreviewCount = dbsqlc.PreviewRow

// Preview counts the entries that a filter selects, by queue, error type and age.
func (s *Store) Preview(ctx context.Context, filter json.RawMessage) ([]PreviewCount, error) {
	rows, err := s.queries.Preview(ctx, filter)
	return rows, AsMoveError(err)
}

// CountUpTo counts the entries that a filter selects, up to most. If replay is set, it counts only those that a replay
// run would redeliver.
func (s *Store) CountUpTo(ctx context.Context, filter json.RawMessage, replay bool, most int64) (int64, error) {
	n, err := s.queries.CountUpTo(ctx, dbsqlc.CountUpToParams{
		Filter: filter, Replayable: replay, Most: int32(min(most, math.MaxInt32)),
	})
	return n, AsMoveError(err)
}

// Count counts the entries that a filter selects. If replay is set, it counts only those that a replay run would
// redeliver.
func (s *Store) Count(ctx context.Context, filter json.RawMessage, replay bool) (int64, error) {
	n, err := s.queries.Count(ctx, dbsqlc.CountParams{Filter: filter, Replayable: replay})
	return n, AsMoveError(err)
}

// SelectsAll reports whether a filter selects every entry. If so, the caller must confirm the action.
func (s *Store) SelectsAll(ctx context.Context, filter json.RawMessage) (bool, error) {
	return s.queries.ChoosesAll(ctx, filter)
}

// PublishPolicy writes to the database the version of the active policy, the actions that require an approval, the work
// that replay runs skip by default, and where the args of jobs have ordering keys.
func (s *Store) PublishPolicy(ctx context.Context, version string, approvals, skips, keys json.RawMessage) error {
	return s.queries.PublishPolicy(ctx, dbsqlc.PublishPolicyParams{
		Version: version, Approvals: string(approvals), Skips: string(skips), Keys: string(keys),
		Actor: "worker:" + postgres.ProcessName(),
	})
}

// Record runs do in a transaction, and writes an audit row in the same transaction. The row has subject, which is not
// an entry, and what, the change to subject.
func (s *Store) Record(ctx context.Context, subject, what string, act Act, do func(tx pgx.Tx) error) error {
	return s.RecordDone(ctx, subject, act, func(tx pgx.Tx) (string, error) { return what, do(tx) })
}

// RecordDone does the same as [Store.Record], but do returns the description of the change.
func (s *Store) RecordDone(ctx context.Context, subject string, act Act,
	do func(tx pgx.Tx) (what string, err error),
) error {
	return postgres.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if err := s.setOrigin(ctx, tx); err != nil {
			return err
		}
		what, err := do(tx)
		if err != nil {
			return err
		}
		return dbsqlc.New(s.schemas.Rendered(tx)).RecordAct(ctx, dbsqlc.RecordActParams{
			Subject: subject, Act: what, Actor: act.Actor, Note: act.Note,
		})
	})
}
