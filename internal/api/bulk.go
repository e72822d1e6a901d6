package api

import (
	"bufio"
	"cmp"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/danielgtaylor/huma/v2"
	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/approval"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/message"
)

// BulkRequest is a request for one action on many entries.
type BulkRequest struct {
	Action

	Do       string      `json:"do" enum:"discard,expire,resolve,park,unpark,reopen,assign,tag,note,purge" doc:"The action. purge deletes closed entries."`
	Filter   EntryFilter `json:"filter" doc:"Entries to act on."`
	All      bool        `json:"all,omitempty" doc:"Confirms that an empty filter selects every entry."`
	DryRun   bool        `json:"dryRun,omitempty" doc:"Only count the entries that the filter selects."`
	Assignee string      `json:"assignee,omitempty" maxLength:"255" doc:"assign: the new assignee; no assignee if absent."`
	Tags     []string    `json:"tags,omitempty" maxItems:"32" doc:"tag: tags to add."`
	Force    bool        `json:"force,omitempty" doc:"purge: also delete open and failed entries, but none whose redelivery is under way."`
	Expect   *int64      `json:"expect,omitempty" minimum:"0" doc:"Expected number of entries: required above the policy's expectAbove, except for assign, tag and note. A different number answers 409."`
}

// BulkAnswer is the result of a bulk action.
type BulkAnswer struct {
	DryRun  bool             `json:"dryRun" doc:"Whether this was a dry run, which changes nothing."`
	Chosen  int64            `json:"chosen" doc:"Entries that the filter selects."`
	Changed int64            `json:"changed" doc:"Entries that were changed. The state of the others does not allow the action."`
	Undo    *uuid.UUID       `json:"undo,omitempty" doc:"Id of the operation, for POST /api/dlq/undo/{id} and GET /api/dlq/operations/{id}; absent if the action cannot be undone."`
	ByQueue map[string]int64 `json:"byQueue,omitempty" doc:"Dry run: selected entries by queue."`
	ByType  map[string]int64 `json:"byErrorType,omitempty" doc:"Dry run: selected entries by error type."`
}

// BulkInput is a bulk action.
type BulkInput struct{ Body BulkRequest }

// ExportInputBody selects the entries and the form of an export.
type ExportInputBody struct {
	Filter EntryFilter `json:"filter" doc:"Entries to export."`
	Format string      `json:"format,omitempty" enum:"ndjson,csv" doc:"ndjson: every field of each entry; csv: one line for each entry, with the fields of a list and the place of its record. ndjson if absent."`
	Reveal bool        `json:"reveal,omitempty" doc:"Include masked data. Needs a note, which the audit trail records, with the filter and the number of entries, before the first entry is sent."`
	Actor  string      `json:"actor,omitempty" maxLength:"255" doc:"reveal, without authentication: the viewer, \"api\" if absent. With authentication: the person on whose behalf the caller acts."`
	Note   string      `json:"note,omitempty" maxLength:"10000" doc:"reveal: the reason. Also the reason of a request for approval."`
	// Approval names an approved request.
	Approval *uuid.UUID `json:"approval,omitempty" doc:"An approved request for this export: its reveal is used, and exactly the entries that matched at the approval are exported. Only the requester, within a day of the approval."`
}

// ExportInput is a request for an export.
type ExportInput struct{ Body ExportInputBody }

// Operations on many dead letters. The answer of Export is a stream of text.
var (
	Bulk   = Operation[BulkInput, BulkAnswer]{"bulk", http.MethodPost, "/api/dlq/bulk"}
	Export = Operation[ExportInput, None]{"export", http.MethodPost, "/api/dlq/export"}
)

func (s *service) registerBulk(api huma.API) {
	tags := []string{"dead letters"}
	bulk := huma.Operation{
		Tags:    tags,
		Summary: "Apply one action to many dead letters",
		Description: "Discards, expires, resolves, parks, unparks, reopens, assigns, tags, notes or purges the dead letters " +
			"that a filter selects. Answers when all are done; an interrupted request has changed part of them. Entries whose " +
			"state does not allow the action are skipped. purge needs the role admin.",
		Errors: []int{400, 409, 422, 503},
	}
	example(&bulk, http.StatusOK, BulkAnswer{Chosen: 812, Changed: 810})
	register(s, api, Bulk, bulk, s.bulk)

	export := huma.Operation{
		Tags:    tags,
		Summary: "Export dead letters as NDJSON or CSV",
		Description: "Streams the entries in order of capture, without a limit. Each export is in the audit trail. Once a " +
			"request for approval is approved, its requester sends its id in approval.",
		Errors: []int{400, 422, 503},
	}
	export.Responses = map[string]*huma.Response{"200": {Description: "The entries", Content: map[string]*huma.MediaType{
		"application/x-ndjson": {Schema: &huma.Schema{Type: "string"}, Example: `{"id":"` + entryExample +
			`","status":"dlq_manual"}` + "\n"},
		"text/csv": {Schema: &huma.Schema{Type: "string"}},
	}}}
	huma.Register(api, Export.describe(export), s.export)
}

func (s *service) bulk(ctx context.Context, in *BulkInput) (*BulkAnswer, error) {
	body := &in.Body
	filter, err := body.Filter.resolve(ctx)
	if err != nil {
		return nil, err
	}
	if body.Do == "purge" {
		if ctx, err = s.limitTo(ctx, need{access.Admin, true}); err != nil {
			return nil, err
		}
	}
	for _, field := range []struct {
		name, of string
		given    bool
	}{{"assignee", "assign", body.Assignee != ""}, {"tags", "tag", len(body.Tags) > 0}, {"force", "purge", body.Force}} {
		if field.given && body.Do != field.of {
			return nil, huma.Error422UnprocessableEntity(body.Do+" does not take "+field.name,
				&huma.ErrorDetail{Location: "body." + field.name, Message: "is only for " + field.of})
		}
	}
	if body.Do == "tag" && len(body.Tags) == 0 {
		return nil, huma.Error422UnprocessableEntity("tag needs tags",
			&huma.ErrorDetail{Location: "body.tags", Message: "is required"})
	}
	for i, tag := range body.Tags {
		if problem := message.TagProblem(tag); problem != "" { // River would refuse the redelivery
			return nil, huma.Error422UnprocessableEntity("invalid tag",
				&huma.ErrorDetail{Location: fmt.Sprintf("body.tags[%d]", i), Message: problem, Value: tag})
		}
	}
	if body.DryRun {
		markUnchanged(ctx)
		rows, err := s.Store.Preview(ctx, filter)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		out := &BulkAnswer{DryRun: true, ByQueue: map[string]int64{}, ByType: map[string]int64{}}
		for _, row := range rows {
			out.Chosen += row.Entries
			out.ByQueue[row.Queue] += row.Entries
			out.ByType[row.ErrorType] += row.Entries
		}
		return out, nil
	}
	switch body.Do {
	case "assign", "tag", "note":
	default:
		if err := s.checkExpected(ctx, filter, false, body.Expect); err != nil {
			return nil, err
		}
	}
	request := deadletter.Bulk{
		Action: body.Do, Filter: filter, All: body.All, Assignee: body.Assignee,
		Tags: body.Tags, Force: body.Force, Act: body.act(ctx),
	}
	request.Act.Operation = deadletter.NewOperation()
	examined, changed, err := s.Store.Bulk(ctx, request)
	if err != nil {
		return nil, s.approvalOrProblem(ctx, err, approval.Bulk, request, &body.Action)
	}
	out := &BulkAnswer{Chosen: int64(examined), Changed: int64(changed)}
	if changed > 0 && body.Do != "purge" && body.Do != "reopen" {
		out.Undo = &request.Act.Operation
	}
	return out, nil
}

func (s *service) export(ctx context.Context, in *ExportInput) (*huma.StreamResponse, error) {
	filter, err := in.Body.Filter.resolve(ctx)
	if err != nil {
		return nil, err
	}
	if id := in.Body.Approval; id != nil {
		if string(filter) != "{}" || in.Body.Reveal {
			return nil, huma.Error422UnprocessableEntity("the approved request has the filter and reveal",
				&huma.ErrorDetail{Location: "body.approval", Message: "cannot be sent with filter or reveal", Value: id})
		}
		approved, err := s.approvedExport(ctx, *id)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		filter, in.Body.Reveal = json.RawMessage("{}"), approved.Reveal // the approval determines the entries
		in.Body.Note = strings.TrimSuffix("approval "+id.String()+": "+in.Body.Note, ": ")
		ctx = deadletter.WithApproval(ctx, *id)
	}
	if !in.Body.Reveal && in.Body.Approval == nil && (in.Body.Note != "" || in.Body.Actor != "") {
		return nil, huma.Error422UnprocessableEntity("note and actor are only for reveal",
			&huma.ErrorDetail{Location: "body.reveal", Message: "is required with a note or an actor"})
	}
	recorded, err := s.Store.RecordExport(ctx, filter, in.Body.Reveal,
		(&Action{Actor: in.Body.Actor, Note: in.Body.Note}).act(ctx))
	if err != nil {
		return nil, s.approvalOrProblem(ctx, err, approval.Export,
			approval.Exporting{Filter: filter, Reveal: in.Body.Reveal, All: true},
			&Action{Actor: in.Body.Actor, Note: in.Body.Note})
	}
	ctx = recorded
	find := func(after *uuid.UUID) (page []deadletter.Entry, err error) {
		read := func(ctx context.Context) (err error) {
			page, err = s.Store.FindEntries(ctx, filter, after)
			return err
		}
		if in.Body.Reveal || in.Body.Approval != nil {
			err = read(ctx)
		} else {
			err = s.carryOut(ctx, read)
		}
		return page, err
	}
	format := cmp.Or(in.Body.Format, "ndjson")
	// Read the first page now: after the stream has begun, an invalid filter could not be reported.
	first, err := find(nil)
	if err != nil {
		s.acted(ctx, nil)
		return nil, s.problem(ctx, err)
	}
	return &huma.StreamResponse{Body: func(out huma.Context) {
		defer s.acted(ctx, nil) // the record in the audit trail; the client sees the end of the stream afterwards
		out.SetHeader("Content-Type", map[string]string{
			"ndjson": "application/x-ndjson", "csv": "text/csv; charset=utf-8",
		}[format])
		buffered := bufio.NewWriter(out.BodyWriter())
		write := writeNDJSON(buffered)
		if format == "csv" {
			write = writeCSV(buffered)
		}
		for page := first; len(page) > 0; {
			for i := range page {
				if err := write(&page[i]); err != nil {
					return // the client disconnected
				}
			}
			if page, err = find(&page[len(page)-1].ID); err != nil {
				if ctx.Err() == nil { // otherwise the client disconnected
					s.Logger.Error("export failed", "error", err)
				}
				panic(http.ErrAbortHandler) // tells the client that the export is incomplete
			}
		}
		_ = buffered.Flush()
	}}, nil
}

// approvedExport returns the export that an approved request permits to the caller.
func (s *service) approvedExport(ctx context.Context, id uuid.UUID) (*approval.Exporting, error) {
	a, err := s.Approvals.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	return a.MayExport((*Action)(nil).person(ctx).Actor)
}

func writeNDJSON(out *bufio.Writer) func(*deadletter.Entry) error {
	encoder := json.NewEncoder(out)
	return func(e *deadletter.Entry) error { return encoder.Encode(e) }
}

func writeCSV(out *bufio.Writer) func(*deadletter.Entry) error {
	w := csv.NewWriter(out)
	_ = w.Write([]string{
		"id", "status", "queue", "kind", "messageId", "jobId", "source", "subscriberId",
		"priority", "errorClass", "errorType", "errorCode", "errorMessage",
		"strategy", "dlqRetryCount", "firstFailedAt", "lastFailedAt", "createdAt", "closedAt", "assignedTo", "tags", "notes",
		"errorTitle", "destination", "destinationUrl", "topic", "partition", "offset", "node",
	}) // buffered
	return func(e *deadletter.Entry) error {
		tags, err := json.Marshal(e.Tags)
		if err != nil {
			return err
		}
		closed := ""
		if e.ClosedAt != nil {
			closed = e.ClosedAt.Format(timeFormat)
		}
		var topic, partition, offset, node string
		if r := e.Record; r != nil {
			topic, node = cell(&r.Topic), cell(&r.Node)
			partition, offset = strconv.Itoa(int(r.Partition)), strconv.FormatInt(r.Offset, 10)
		}
		if err := w.Write([]string{
			e.ID.String(), string(e.Status), cell(&e.Queue), cell(&e.Kind), cell(e.EventID),
			strconv.FormatInt(e.RiverJobID, 10), cell(e.Source), cell(e.SubscriberID),
			strconv.Itoa(int(e.Priority)), cell(e.ErrorClass), cell(e.ErrorType),
			cell(e.ErrorCode), cell(e.ErrorMessage), cell(e.Strategy),
			strconv.Itoa(int(e.DLQRetryCount)), e.FirstFailedAt.Format(timeFormat),
			e.LastFailedAt.Format(timeFormat), e.CreatedAt.Format(timeFormat), closed,
			cell(e.AssignedTo), string(tags), cell(e.Notes), cell(e.ErrorTitle), cell(e.Destination), cell(e.DestinationURL),
			topic, partition, offset, node,
		}); err != nil {
			return err
		}
		w.Flush()
		return w.Error()
	}
}

const timeFormat = "2006-01-02T15:04:05.000Z07:00"

// cell returns a text in a form that no spreadsheet evaluates as a formula, because clients choose the texts. Some
// spreadsheets also evaluate formulas after blanks, and formulas in full-width characters.
func cell(text *string) string {
	if text == nil || *text == "" {
		return ""
	}
	visible := strings.TrimLeftFunc(*text, func(r rune) bool {
		return unicode.IsSpace(r) || unicode.IsControl(r) ||
			unicode.Is(unicode.Cf, r)
	})
	if first, _ := utf8.DecodeRuneInString(visible); strings.ContainsRune("=+-@＝＋－＠", first) || (*text)[0] == '\t' ||
		(*text)[0] == '\r' {
		return "'" + *text
	}
	return *text
}
