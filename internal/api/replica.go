package api

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
)

// readsReplica lists the operations that read from the replica, if there is one. All others use the primary: they
// change something or precede a decision, their answers must be current (approvals, sessions, tokens, health), the
// viewers of a process share them (get-stats and list-replays, which are in the navigation), or they read what a
// replica does not have (metrics).
var readsReplica = []string{
	"list-entries", "complete-filter", "export",
	"list-groups", "get-group", "list-jobs", "list-replay-entries", "search-audit", "get-operation",
	"get-analytics-flow", "get-analytics-queues", "get-analytics-times", "get-analytics-error-types",
	"get-analytics-groups", "get-analytics-heat-map", "get-analytics-replays", "get-analytics-oldest",
	"get-analytics-retry-cost", "get-analytics-sources", "get-analytics-policies", "get-analytics-rules",
}

// AsOfHeader is the header of an answer from the replica: the time of its data (RFC 3339, UTC). Everything that was
// committed before is in the answer. Answers from the primary do not have the header.
const AsOfHeader = "Dlqd-As-Of"

// describeReads adds the header AsOfHeader to the OpenAPI document.
func describeReads(api huma.API) {
	for _, item := range api.OpenAPI().Paths {
		for _, operation := range []*huma.Operation{item.Get, item.Post} {
			if operation == nil || !slices.Contains(readsReplica, operation.OperationID) {
				continue
			}
			response := operation.Responses["200"]
			if response.Headers == nil {
				response.Headers = map[string]*huma.Param{}
			}
			response.Headers[AsOfHeader] = &huma.Param{
				Description: "Set if the read replica answered: everything that was committed before this time is in the answer.",
				Schema:      &huma.Schema{Type: huma.TypeString, Format: "date-time"},
			}
		}
	}
}

type viewersKey struct{}

// WithViewers returns a context for requests whose answers several callers see. names are those of the callers: an
// answer has the last changes of each of them.
func WithViewers(ctx context.Context, names []string) context.Context {
	return context.WithValue(ctx, viewersKey{}, names)
}

// viewers returns the names of those who see an answer.
func viewers(ctx context.Context) []string {
	if names, ok := ctx.Value(viewersKey{}).([]string); ok {
		return names
	}
	return []string{access.From(ctx).Name}
}

type exchangeKey struct{}

// exchange is a request to an operation, and its answer.
type exchange struct {
	operation string
	// changes says that the request may change data that pages show.
	changes bool
	// actedFor are the persons for whom the caller acts.
	actedFor  []string
	setHeader func(name, value string)
}

func exchangeOf(ctx context.Context) *exchange {
	x, ok := ctx.Value(exchangeKey{}).(*exchange)
	if !ok {
		return &exchange{}
	}
	return x
}

// markUnchanged notes that the request of ctx changes nothing although it is no GET: it is a dry run or
// a preview. Open pages of the console are not rendered again for it.
func markUnchanged(ctx context.Context) { exchangeOf(ctx).changes = false }

// carryOut carries out the operation of ctx. If readsReplica lists the operation, run may read from the replica, and
// is called again for the primary if it fails.
func (s *service) carryOut(ctx context.Context, run func(context.Context) error) error {
	if s.Replica == nil {
		return run(ctx)
	}
	x := exchangeOf(ctx)
	if !slices.Contains(readsReplica, x.operation) {
		err := run(ctx)
		s.acted(ctx, err)
		return err
	}
	asOf, err := s.Replica.Read(ctx, viewers(ctx), run)
	if !asOf.IsZero() && x.setHeader != nil {
		x.setHeader(AsOfHeader, asOf.UTC().Format(time.RFC3339Nano))
	}
	return err
}

// acted records, before a request is answered, that the caller has changed something. A request that failed may have
// changed a part; one that was refused has not.
func (s *service) acted(ctx context.Context, err error) {
	if s.Replica == nil || !exchangeOf(ctx).changes {
		return
	}
	if refused, ok := errors.AsType[huma.StatusError](err); ok && refused.GetStatus() < statusClientClosedRequest &&
		refused.GetStatus() >= http.StatusBadRequest {
		return
	}
	caller := access.From(ctx)
	actors := append([]string{caller.Name}, exchangeOf(ctx).actedFor...)
	if caller.TokenBy != "" {
		actors = append(actors, caller.TokenBy)
	}
	s.Replica.Acted(ctx, actors...)
}

// actsFor records the persons on whose behalf the request of ctx acts. Like the caller, they see its changes at once.
func actsFor(ctx context.Context, names ...*string) {
	x := exchangeOf(ctx)
	for _, name := range names {
		if name != nil && *name != "" {
			x.actedFor = append(x.actedFor, *name)
		}
	}
}
