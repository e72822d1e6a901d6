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

// Errors of moves. They wrap what the database said, which names the entry and what is allowed.
var (
	ErrNotFound   = errors.New("not found")
	ErrNotAllowed = errors.New("move not allowed")
	ErrLiveJob    = errors.New("an equal job is live")
	ErrInvalid    = errors.New("invalid request")
	ErrUnhealthy  = errors.New("not now")
	ErrForbidden  = errors.New("not for who asks")
	ErrApproval   = errors.New("needs a second person")
)

// SQLSTATEs that dlqd's functions raise.
var sqlStates = map[string]error{"DLQ01": ErrNotAllowed, "DLQ02": ErrNotFound, "DLQ03": ErrLiveJob, "DLQ04": ErrInvalid, "DLQ05": ErrUnhealthy, "DLQ06": ErrForbidden, "DLQ07": ErrApproval}

// MoveError is a move that the database refused.
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

// Store is what people and programs do with dead letters, over one pool: find them, move them, erase them. What a DLQ worker
// does with those that it claims, a replay run with its own, and retention with what is over, is in those rooms.
type Store struct {
	pool *pgxpool.Pool
	// statements is the pool for statements that have the schemas' names in them.
	statements postgres.DB
	schemas    postgres.Schemas
	db         postgres.DB // the pool
	queries    *dbsqlc.Queries
}

// NewStore returns a store on a pool.
func NewStore(pool *pgxpool.Pool, schemas postgres.Schemas) *Store {
	db := schemas.Rendered(pool)
	return &Store{pool: pool, statements: postgres.Statements(pool), schemas: schemas, db: db, queries: dbsqlc.New(db)}
}

// DB is the store's pool, for the queries of other rooms. Schemas have their names in it.
func (s *Store) DB() postgres.DB { return s.db }

// InTx runs fn in a transaction whose plans use indexes alone: a plan that a session makes while the open partition is
// small, and keeps while it grows, would read all of it every time.
func (s *Store) InTx(ctx context.Context, fn func(tx postgres.DB) error) error {
	// One round trip for all.
	// A transaction may hold jobs, for which an application waits: it waits for nobody for long.
	options := pgx.TxOptions{BeginQuery: postgres.BeginQuery("enable_seqscan = off", "lock_timeout = '2s'")}
	return pgx.BeginTxFunc(ctx, s.pool, options, func(tx pgx.Tx) error {
		if err := s.setOrigin(ctx, tx); err != nil {
			return err
		}
		return fn(s.schemas.Rendered(tx))
	})
}

// Page is a page of a list.
type Page struct {
	Filter filter.Filter
	Oldest bool      // oldest first; newest first otherwise
	Cursor uuid.UUID // the last entry of the page before; it begins after it
	Limit  int

	last uuid.UUID // the last that it may have
}

const summaryColumns = `id, status, queue, kind, event_id, river_job_id, source, subscriber_id, priority, error_class, error_type,
	error_code, error_message, strategy, next_retry_at, waiting_for,
	dlq.next_step(status, strategy, rule, next_retry_at, waiting_for, error_class, parked_by, queue, kind, job_kind) AS next, dlq_retry_count, first_failed_at,
	last_failed_at, created_at, updated_at, closed_at, fingerprint, assigned_to,
	error_title, destination, destination_url`

// listColumns are the columns of a list, of an entry e, as the mask m lets see them. What is cut off cannot be seen, nor make a
// part of a secret of the rest.
var listColumns = strings.NewReplacer(
	"subscriber_id,", "CASE WHEN m.mask -> 'hidden' ? 'subscriber_id' THEN NULL WHEN m.mask IS NULL OR subscriber_id IS NULL THEN subscriber_id ELSE dlq.masked_text(subscriber_id, m.mask, "+listValues+") END AS subscriber_id,",
	"error_message,", `CASE WHEN m.mask -> 'hidden' ? 'error_message' THEN NULL WHEN m.mask IS NULL THEN left(error_message, 500)
		ELSE left(dlq.masked_text(left(error_message, 10000), m.mask, `+listValues+"), 500) END AS error_message,",
	"error_title,", "CASE WHEN m.mask -> 'hidden' ? 'error_message' THEN NULL WHEN m.mask IS NULL "+
		"OR error_title IS NULL THEN error_title ELSE dlq.masked_text(error_title, m.mask, "+
		listValues+") END AS error_title,",
	"destination_url", "CASE WHEN m.mask IS NULL OR destination_url IS NULL THEN destination_url "+
		"ELSE dlq.masked_text(destination_url, m.mask, "+listValues+") END AS destination_url",
).Replace(summaryColumns)

const listValues = "dlq.sensitive_values(original_event, edited_event, metadata, job_kind, m.mask)"

// ListSQL is the query behind [Store.List] of a part of the queue, and its parameters, for EXPLAIN; chosen is the condition of the
// page's filter ([Store.Where]). The page is cut by id, which sorts by time: each filter's index is in id order, so a page costs the
// same wherever it is.
func (s *Store) ListSQL(ctx context.Context, p Page, chosen string, part Part) (string, []any) {
	where, args := part.where(nil, []any{pgx.QueryExecModeCacheDescribe, p.Filter.JSON()})
	where, args = p.where(where, args)
	args = append(args, postgres.IsReader(ctx), p.Limit)
	list := s.schemas.Render(fmt.Sprintf("SELECT %s FROM dlq.dead_letter_queue e CROSS JOIN (SELECT dlq.mask($%d) AS mask OFFSET 0) m WHERE $1::jsonb IS NOT NULL AND %s", listColumns, len(args)-2,
		strings.Join(where, " AND ")))
	return fmt.Sprintf("%s AND (%s) ORDER BY id %s LIMIT $%d", list, chosen, p.order(), len(args)-1), args
}

func (p *Page) order() string {
	if p.Oldest {
		return "ASC"
	}
	return "DESC"
}

// where adds the conditions of a page to those of a part.
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
	// What no DLQ worker has filed yet is pending; a job's further failure is none of the list.
	return append(where, "(stage <> 'inbox' OR NOT dlq.is_repeat(river_job_id, job_created_at))"), args
}

// Where is the condition of a filter (dlq.filter_where), for who asks.
func (s *Store) Where(ctx context.Context, f *filter.Filter) (string, error) {
	where, err := s.queries.FilterWhere(ctx, f.JSON())
	return where, Named(err)
}

// FilterValue is a value with which a field of a filter may be completed.
type FilterValue = dbsqlc.FilterValuesRow

// FilterValues are up to most values of a field (of a filter's JSON) of open entries that have a text in them, likely ones first.
func (s *Store) FilterValues(ctx context.Context, field, text string, most int) ([]FilterValue, error) {
	rows, err := s.queries.FilterValues(ctx, dbsqlc.FilterValuesParams{Field: field, Prefix: text, Most: int32(min(most, math.MaxInt32))})
	return rows, Named(err)
}

// stagesOf names the partitions that hold entries of these states, where none is named of all.
func stagesOf(statuses []string) (stages []string) {
	if len(statuses) == 0 {
		return []string{"inbox", "open", "resolved", "failed", "archived"}
	}
	for _, status := range statuses {
		switch Status(status) {
		case Pending:
			stages = append(stages, "inbox", "open")
		case Processing, Manual:
			stages = append(stages, "open")
		case Resolved, Failed, Archived:
			stages = append(stages, strings.TrimPrefix(status, "dlq_"))
		}
	}
	return stages
}

// FirstID is the least id that an entry captured at a time can have: 48 bits of milliseconds since 1970.
func FirstID(at time.Time) uuid.UUID {
	var id uuid.UUID
	ms := min(max(at.UnixMilli(), 0), 1<<48-1)
	for i := range 6 {
		id[i] = byte(ms >> (8 * (5 - i)))
	}
	return id
}

// List returns one page of entries, part by part (see [Part]), however long that takes: see [Store.Search].
func (s *Store) List(ctx context.Context, p Page) ([]Summary, error) {
	chosen, err := s.Where(ctx, &p.Filter)
	if err != nil {
		return nil, err
	}
	return s.list(ctx, p, chosen, time.Time{})
}

// list is List, until a time; zero for none.
func (s *Store) list(ctx context.Context, p Page, chosen string, until time.Time) ([]Summary, error) {
	stages := stagesOf(p.Filter.Status)
	page := []Summary{}
	// (An entry that closes meanwhile is found twice, rather than not at all.)
	if open := OpenPart(); slices.ContainsFunc(stages, open.holds) {
		var err error
		if page, err = s.listPart(ctx, p, chosen, open, until); err != nil {
			return nil, err
		}
	}
	if !slices.ContainsFunc(stages, Part{Stages: []string{"resolved", "failed", "archived"}}.holds) {
		return page, nil
	}
	parts, err := s.ClosedParts(ctx)
	if err != nil {
		return nil, err
	}
	since, _ := time.Parse(time.RFC3339, p.Filter.After) // zero where it is none, for no bound
	for _, part := range parts {
		if !p.Oldest && len(page) == p.Limit {
			// What closed before the last of the page had failed cannot come before it.
			since = ClosedSince(page[len(page)-1].ID)
		}
		if !slices.ContainsFunc(stages, part.holds) || (!since.IsZero() && part.endsBefore(since.Add(-24*time.Hour))) {
			continue
		}
		more, err := s.listPart(ctx, p, chosen, part, until)
		if err != nil {
			return nil, err
		}
		page = p.merge(page, more)
	}
	return page, nil
}

// merge is a page of those of two.
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

func (s *Store) listPart(ctx context.Context, p Page, chosen string, part Part, until time.Time) (found []Summary, err error) {
	sql, args := s.ListSQL(ctx, p, chosen, part)
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

// Summaries returns entries by their ids, as lists show them, the latest first. None of them closed before since.
func (s *Store) Summaries(ctx context.Context, ids []uuid.UUID, since time.Time) ([]Summary, error) {
	sql := s.schemas.Render("SELECT " + listColumns + ` FROM dlq.dead_letter_queue e CROSS JOIN (SELECT dlq.mask($1) AS mask OFFSET 0) m
		WHERE id = ANY ($2) AND (closed_at IS NULL OR closed_at >= $3) AND dlq.in_scope(queue, kind, nullif($4, '')::jsonb) ORDER BY id DESC`)
	rows, err := s.statements.Query(ctx, sql, pgx.QueryExecModeCacheDescribe, postgres.IsReader(ctx), ids, since,
		postgres.Scope(ctx))
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByName[Summary])
}

// Part is what one statement reads of the queue. Each month of closed entries is a table with nine indexes, and a statement locks those
// of all months that its plan cannot leave out, in a table of locks that all databases of the server share: so what looks at all of the
// history does so in parts, one after the other.
type Part struct {
	Stages   []string
	From, To time.Time // of closed_at; zero for no bound
}

// partMonths is how many months of closed entries a part has.
const partMonths = 4

// OpenPart is that of open entries.
func OpenPart() Part { return Part{Stages: []string{"inbox", "open"}} }

func (p Part) holds(stage string) bool { return slices.Contains(p.Stages, stage) }

func (p Part) endsBefore(t time.Time) bool { return !p.To.IsZero() && p.To.Before(t) }

// where adds the conditions of a part to those of a statement, whose first argument is the mode in which pgx runs it: parameters must
// be known to the plan.
func (p Part) where(where []string, args []any) ([]string, []any) {
	where = append(where, "stage IN ('"+strings.Join(p.Stages, "', '")+"')")
	if !p.From.IsZero() {
		args = append(args, p.From)
		where = append(where, fmt.Sprintf("closed_at >= $%d", len(args)-1))
	}
	if !p.To.IsZero() {
		args = append(args, p.To)
		where = append(where, fmt.Sprintf("closed_at < $%d", len(args)-1))
	}
	return where, args
}

// ClosedParts returns the parts of closed entries, those that closed last first.
func (s *Store) ClosedParts(ctx context.Context) ([]Part, error) {
	months, err := s.queries.ClosedMonths(ctx)
	if err != nil {
		return nil, err
	}
	var parts []Part
	for _, stage := range []string{"resolved", "failed", "archived"} {
		part := Part{Stages: []string{stage}}
		n := 0
		for _, month := range months { // the last first
			if month.Stage != stage {
				continue
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

// entryColumns are those of [Entry]. Tags of what nobody has filed yet are as SQL took them: with NULL, or of several dimensions.
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
	job_kind, ARRAY(SELECT t FROM unnest(tags) t WHERE t IS NOT NULL) AS tags, original_event, edited_event, error_stack_trace, error_context, retry_history, retry_count,
		max_retries, dlq_max_retries, replay_attempts, rule, reported_class, ordering_key, parked_by, redelivery_job_id, locked_by, locked_at,
		notes, resolution_strategy, resolved_by, resolution_notes, resolution_timestamp, config_version, metadata`

// exportPage is how many entries an export reads at once.
const exportPage = 200

// FindEntries returns a page of what a filter chooses, whole, in order of capture, after the last entry of the page before.
func (s *Store) FindEntries(ctx context.Context, filter json.RawMessage, after *uuid.UUID) ([]Entry, error) {
	mask := "(SELECT dlq.mask())"
	if isRevealed(ctx) {
		mask = "NULL"
	}
	rows, err := s.db.Query(ctx, fmt.Sprintf(maskedEntries+" ORDER BY id", "id = ANY (ARRAY(SELECT dlq.find_ids($1, $2, $3)))", mask), filter, exportPage, after)
	if err != nil {
		return nil, Named(err)
	}
	entries, err := pgx.CollectRows(rows, pgx.RowToStructByName[Entry])
	return entries, Named(err)
}

// Get returns an entry and its audit trail, oldest move first.
func (s *Store) Get(ctx context.Context, id uuid.UUID) (*Entry, []Transition, error) {
	entry, err := s.find(ctx, id)
	if errors.Is(err, pgx.ErrNoRows) {
		// While an entry moves between partitions, a reader may see neither row.
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
	// maxTrail is how many moves of an entry are shown.
	maxTrail = 1000
	// trailMonths is how many months of the trail one statement reads: see [Part]. Each is a table with four indexes.
	trailMonths = 10
)

// trail returns the audit rows of an entry, in order: those since it was captured.
func (s *Store) trail(ctx context.Context, entry *Entry) ([]Transition, error) {
	var trail []Transition
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
		if from.AddDate(0, trailMonths, 0).After(time.Now().Add(24 * time.Hour)) { // (clocks differ)
			break
		}
	}
	return trail, nil
}

// TrailSQL is the query behind the trail of [Store.Get] for some months, and its parameters, for EXPLAIN.
func (s *Store) TrailSQL(ctx context.Context, id uuid.UUID, from time.Time, limit int) (string, []any) {
	return s.schemas.Render(`SELECT at, from_status, to_status, actor, db_user, reason, dlq.masked_text(note, m.mask) AS note, strategy, rule, next_retry_at, river_job_id, config_version, origin, operation,
			CASE WHEN m.mask -> 'hidden' ? 'edited_event' THEN NULL ELSE dlq.masked_detail(detail, m.mask) END AS detail
		FROM dlq.dead_letter_transitions CROSS JOIN (SELECT CASE WHEN NOT $6 THEN dlq.mask($5) END AS mask OFFSET 0) m
		WHERE entry_id = $1 AND at >= $2 AND at < $3 ORDER BY at, id LIMIT $4`),
		[]any{pgx.QueryExecModeCacheDescribe, id, from, from.AddDate(0, trailMonths, 0), limit, postgres.IsReader(ctx), isRevealed(ctx)}
}

// find looks for an entry among open ones, and then among closed ones, from the time on when it failed, and before that.
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

// GetSQL is the query behind [Store.Get] of a part of the queue, and its parameters, for EXPLAIN.
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

// maskedEntries selects entries for which a condition holds, masked.
const maskedEntries = "SELECT " + entryColumns + ` FROM (SELECT q AS entry FROM dlq.dead_letter_queue q WHERE %s) w CROSS JOIN LATERAL dlq.masked(w.entry, %s) e`

type revealKey struct{}

// isRevealed reports whether who asks has said why they look, and sees all.
func isRevealed(ctx context.Context) bool { return ctx.Value(revealKey{}) != nil }

// Reveal returns an entry whole, and leaves an audit row of who looked, and why. Nothing is returned without it.
func (s *Store) Reveal(ctx context.Context, id uuid.UUID, act Act) (*Entry, []Transition, error) {
	if err := s.move(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).RecordReveal(ctx, dbsqlc.RecordRevealParams{ID: id, Note: act.Note, Actor: act.Actor})
	}); err != nil {
		return nil, nil, err
	}
	return s.Get(context.WithValue(ctx, revealKey{}, true), id)
}

// RevealMany leaves an audit row of who takes the entries that a filter chooses, whole, and why. What is done in the context that
// it returns sees all of them.
func (s *Store) RevealMany(ctx context.Context, filter json.RawMessage, act Act) (context.Context, error) {
	if strings.TrimSpace(act.Note) == "" {
		return nil, &MoveError{Kind: ErrInvalid, Detail: "export: say why what is masked is to be shown", Hint: "The note is in the audit trail."}
	}
	err := s.move(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).RecordExport(ctx, dbsqlc.RecordExportParams{Actor: act.Actor, Note: act.Note, Filter: filter})
	})
	return context.WithValue(ctx, revealKey{}, true), err
}

// ClosedSince is the time before which an entry cannot have closed: when its job failed, which its id says, less a day for
// clocks that differ. (dlq.closed_since says the same.)
func ClosedSince(id uuid.UUID) time.Time {
	failed := capturedAt(id)
	if now := time.Now(); failed.After(now) {
		failed = now
	}
	return failed.Add(-24 * time.Hour)
}

// Act is a person's move: who, and what they say about it.
type Act struct {
	Actor string
	Note  string
	// Operation is the id of what they do in one go, for [Store.Undo]; made where it is none.
	Operation uuid.UUID
}

// operation returns the id of what a person does in one go.
func (a Act) operation() uuid.UUID {
	if a.Operation != uuid.Nil {
		return a.Operation
	}
	return NewOperation()
}

// NewOperation returns an id for what a person does in one go.
func NewOperation() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// Replay redelivers an entry now, with payload in place of its own if that is not nil, and returns the new job's id.
func (s *Store) Replay(ctx context.Context, id uuid.UUID, act Act, payload json.RawMessage, force bool) (int64, error) {
	return s.ReplayTo(ctx, id, act, payload, "", "", force)
}

// ReplayTo is Replay to a destination instead of the one of the entry's queue, and as its [Checkpoint] says ([Resume] or [Discard]), where
// these are not "".
func (s *Store) ReplayTo(ctx context.Context, id uuid.UUID, act Act, payload json.RawMessage, destination, checkpoint string, force bool) (int64, error) {
	var job int64
	err := s.move(ctx, func(tx postgres.DB) (err error) {
		params := dbsqlc.ReplayParams{ID: id, Actor: act.Actor, Note: act.Note, Payload: string(payload), Force: force, Destination: destination, Checkpoint: checkpoint}
		job, err = dbsqlc.New(tx).Replay(ctx, params)
		return err
	})
	return job, err
}

// Discard archives an entry whose work is not wanted any more.
func (s *Store) Discard(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "discard", id, act)
}

// Resolve closes a parked entry whose work a person has done outside dlqd.
func (s *Store) Resolve(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "resolve", id, act)
}

// Park takes a pending entry out of the automatic path.
func (s *Store) Park(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "park", id, act)
}

// Unpark returns a parked entry to the automatic path.
func (s *Store) Unpark(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "unpark", id, act)
}

// Reopen puts a closed entry in front of a person again.
func (s *Store) Reopen(ctx context.Context, id uuid.UUID, act Act) error {
	return s.call(ctx, "reopen", id, act)
}

func (s *Store) call(ctx context.Context, verb string, id uuid.UUID, act Act) error {
	operation := act.operation()
	return s.move(ctx, func(tx postgres.DB) error {
		return dbsqlc.New(tx).Move(ctx, dbsqlc.MoveParams{Verb: verb, ID: id, Actor: act.Actor, Note: act.Note, Operation: operation})
	})
}

// Bulk does one thing to every entry that a filter chooses now. As JSON it is what a request for approval is of.
type Bulk struct {
	Action   string          `json:"do"`            // discard, resolve, park, unpark, reopen, assign, tag, note or purge
	Filter   json.RawMessage `json:"filter"`        // see dlq.find
	All      bool            `json:"all,omitempty"` // an empty filter is meant
	Assignee string          `json:"assignee,omitempty"`
	Tags     []string        `json:"tags,omitempty"`
	Force    bool            `json:"force,omitempty"` // purge: open and failed ones too
	Act      Act             `json:"-"`
}

// bulkBatch is how many entries one transaction of a bulk action takes.
const bulkBatch = 500

// Bulk carries a bulk action out, in batches of a transaction each: one that is cut short has done a part. It returns how
// many entries the filter chose, and how many of them the action changed.
func (s *Store) Bulk(ctx context.Context, b Bulk) (looked, changed int, err error) {
	below, err := s.queries.NewID(ctx)
	if err != nil {
		return 0, 0, err
	}
	args, err := json.Marshal(map[string]any{"assignee": b.Assignee, "tags": b.Tags, "force": b.Force, "operation": b.Act.operation()})
	if err != nil {
		return 0, 0, err
	}
	params := dbsqlc.ActWhereParams{
		Action: b.Action, Filter: b.Filter, Actor: b.Act.Actor, Note: b.Act.Note, Args: args, AllEntries: b.All, MaxEntries: bulkBatch, Below: below,
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

// RestoreEntries brings archived entries back, and has retention leave them until a time. It returns how many it brought.
func (s *Store) RestoreEntries(ctx context.Context, entries json.RawMessage, until time.Time, act Act) (int, error) {
	var n int32
	err := s.move(ctx, func(tx postgres.DB) (err error) {
		n, err = dbsqlc.New(tx).RestoreEntries(ctx, dbsqlc.RestoreEntriesParams{Entries: entries, Until: until, Actor: act.Actor, Note: act.Note})
		return err
	})
	return int(n), err
}

// Protect hides columns from the role dlq_reader, and what is masked (see dlq.mask) from everybody, if that is otherwise now.
func (s *Store) Protect(ctx context.Context, columns []string, masked json.RawMessage) error {
	return s.queries.Protect(ctx, dbsqlc.ProtectParams{Columns: columns, Masked: masked})
}

// SchemaVersion is the version of the database schema: the number of its last migration.
func (s *Store) SchemaVersion(ctx context.Context) (int64, error) {
	return postgres.SchemaVersion(ctx, s.db)
}

// maxMoveTries bounds how often a move is tried again that met another one of the same row.
const maxMoveTries = 5

type originKey struct{}

// WithOrigin says from where a person acts, for the audit trail: what is done in ctx is done from there.
func WithOrigin(ctx context.Context, origin string) context.Context {
	return context.WithValue(ctx, originKey{}, &origin)
}

// OnBehalfOf adds to the origin in ctx for whom a person acts.
func OnBehalfOf(ctx context.Context, who string) {
	if origin, ok := ctx.Value(originKey{}).(*string); ok {
		*origin += ", on behalf of " + who
	}
}

type approvalKey struct{}

// WithApproval has what is done in ctx be that which an approval is for: it touches no entry that this did not freeze.
func WithApproval(ctx context.Context, id uuid.UUID) context.Context {
	return context.WithValue(ctx, approvalKey{}, id)
}

// Origin is from where a person acts; empty where nobody said so.
func Origin(ctx context.Context) string {
	if origin, ok := ctx.Value(originKey{}).(*string); ok {
		return *origin
	}
	return ""
}

// setOrigin tells the database from where a person acts, and to what they are limited, for the rest of a transaction.
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
	parent, state := telemetry.Of(ctx)
	_, err := tx.Exec(ctx,
		s.schemas.Render("SELECT set_config('dlq.origin', $1, true), set_config('dlq.trace', $2, true)"), origin,
		strings.TrimSpace(parent+" "+state))
	return err
}

// move runs a move in a transaction, again where another one moved the row to another partition meanwhile, and gives its
// errors their names.
func (s *Store) move(ctx context.Context, run func(tx postgres.DB) error) error {
	var err error
	for range maxMoveTries {
		err = s.InTx(ctx, run)
		if !postgres.IsCollision(err) || ctx.Err() != nil {
			break
		}
	}
	return Named(err)
}

// Named gives an error that dlqd's own functions raised its name.
func Named(err error) error {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) && sqlStates[pgErr.Code] != nil {
		return &MoveError{Kind: sqlStates[pgErr.Code], Detail: pgErr.Message, Hint: pgErr.Hint}
	}
	return err
}

// Redelivery is what became of an entry that was to be redelivered: see dlq.redeliver.
type Redelivery = dbsqlc.RedeliverRow

// Verdicts of [Redelivery].
const (
	VerdictSent     = "sent"     // JobID was made
	VerdictFollows  = "follows"  // the entry's own job JobID runs again, and the entry waits for it
	VerdictResolved = "resolved" // the entry's own job JobID has completed
	VerdictBusy     = "busy"     // another transaction holds JobID this moment: try again
	VerdictLive     = "live"     // JobID, which is live, has the unique key
	VerdictDone     = "done"     // JobID, which has ended, has the unique key
	VerdictOpen     = "open"     // the entry has failed, and another of its job JobID is open
	VerdictAlone    = "alone"    // its job was rescued twice or more, and another such redelivery is under way in its queue
)

// Redeliver makes jobs of entries that tx has claimed, by a version of the policy.
func (s *Store) Redeliver(ctx context.Context, tx postgres.DB, ids []uuid.UUID, actor, reason, configVersion string) ([]Redelivery, error) {
	return dbsqlc.New(tx).Redeliver(ctx, dbsqlc.RedeliverParams{Ids: ids, Actor: actor, Reason: reason, ConfigVersion: configVersion})
}

// Sweep is what a look at the jobs of entries in dlq_processing found.
type Sweep = dbsqlc.SweepRedeliveriesRow

// SweepRedeliveries looks at the jobs of entries in dlq_processing, after one of them: uuid.Nil for the first, and where Last is that,
// there are no more.
func (s *Store) SweepRedeliveries(ctx context.Context, after uuid.UUID) (Sweep, error) {
	return s.queries.SweepRedeliveries(ctx, after)
}

// OldestOpen is when the oldest open entry was captured, nil where none is open.
func (s *Store) OldestOpen(ctx context.Context) (*time.Time, error) {
	at, err := s.queries.OldestOpen(ctx)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &at, err
}

// Backlog are the open entries of a status, a queue and a class.
type Backlog = dbsqlc.BacklogRow

// BacklogSQL is the query behind [Store.Backlog], for EXPLAIN.
const BacklogSQL = dbsqlc.Backlog

// Backlog counts the open entries.
func (s *Store) Backlog(ctx context.Context) ([]Backlog, error) { return s.queries.Backlog(ctx) }

// Chosen are the entries of a queue, a type of error and an age that a filter chooses.
type Chosen = dbsqlc.PreviewRow

// Preview counts what a filter chooses.
func (s *Store) Preview(ctx context.Context, filter json.RawMessage) ([]Chosen, error) {
	rows, err := s.queries.Preview(ctx, filter)
	return rows, Named(err)
}

// CountUpTo counts up to so many of the entries that a filter chooses, or of those that a replay run takes.
func (s *Store) CountUpTo(ctx context.Context, filter json.RawMessage, replay bool, most int64) (int64, error) {
	n, err := s.queries.CountUpTo(ctx, dbsqlc.CountUpToParams{Filter: filter, Replayable: replay, Most: int32(min(most, math.MaxInt32))})
	return n, Named(err)
}

// Count counts the entries that a filter chooses, or those that a replay run takes.
func (s *Store) Count(ctx context.Context, filter json.RawMessage, replay bool) (int64, error) {
	n, err := s.queries.Count(ctx, dbsqlc.CountParams{Filter: filter, Replayable: replay})
	return n, Named(err)
}

// ChoosesAll reports whether a filter leaves no entry out: such a one is meant, or a mistake.
func (s *Store) ChoosesAll(ctx context.Context, filter json.RawMessage) (bool, error) {
	return s.queries.ChoosesAll(ctx, filter)
}

// PublishPolicy tells the database which version of the policy is in force, and what needs a second person.
func (s *Store) PublishPolicy(ctx context.Context, version string, approvals json.RawMessage) error {
	return s.queries.PublishPolicy(ctx, dbsqlc.PublishPolicyParams{Version: version, Approvals: string(approvals), Actor: "worker:" + postgres.ProcessName()})
}

// Record leaves an audit row of what a person does to something that is no entry, in the transaction that do runs in.
func (s *Store) Record(ctx context.Context, subject, what string, act Act, do func(tx pgx.Tx) error) error {
	return postgres.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		if err := s.setOrigin(ctx, tx); err != nil {
			return err
		}
		if err := dbsqlc.New(s.schemas.Rendered(tx)).RecordAct(ctx, dbsqlc.RecordActParams{Subject: subject, Act: what, Actor: act.Actor, Note: act.Note}); err != nil {
			return err
		}
		return do(tx)
	})
}
