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

// readsReplica lists the operations that read from the replica, if there is one. All other operations use the primary,
// for one of these reasons: they change something or precede a decision; their answers must be current (approvals,
// sessions, tokens, health); all viewers of a process share the answer (get-stats and list-replays, which are in the
// navigation); or the replica does not have the data (metrics).
var readsReplica = []string{
	"list-entries", "complete-filter", "export",
	"list-groups", "get-group", "list-jobs", "list-replay-entries", "search-audit", "get-operation",
	"get-analytics-flow", "get-analytics-queues", "get-analytics-times", "get-analytics-error-types",
	"get-analytics-groups", "get-analytics-heat-map", "get-analytics-replays", "get-analytics-oldest",
	"get-analytics-retry-cost", "get-analytics-sources", "get-analytics-policies", "get-analytics-rules",
}

// AsOfHeader is the header of an answer from the replica. Its value is a time (RFC 3339, UTC): the answer includes
// everything that was committed before. Answers from the primary do not have the header.
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

// WithViewers returns a context for requests whose answers several callers see. names are the names of these callers.
// An answer includes the last changes of each of them.
func WithViewers(ctx context.Context, names []string) context.Context {
	return context.WithValue(ctx, viewersKey{}, names)
}

// viewers returns the names of the callers who see an answer.
func viewers(ctx context.Context) []string {
	if names, ok := ctx.Value(viewersKey{}).([]string); ok {
		return names
	}
	return []string{access.From(ctx).Name}
}

type exchangeKey struct{}

// exchange is a request for an operation, with data about its answer.
type exchange struct {
	operation string
	// changes means that the request may change data that pages show.
	changes bool
	// actedFor are the persons on whose behalf the caller acts.
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

// markUnchanged records that the request of ctx changes nothing although its method is not GET, because it is a dry run
// or a preview. The console then does not render its open pages again.
func markUnchanged(ctx context.Context) { exchangeOf(ctx).changes = false }

// carryOut carries out the operation of ctx by calling run. If readsReplica lists the operation, run may read from the
// replica. If that fails, carryOut calls run again, for the primary.
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

// acted records, before a request is answered, that the caller has changed something. A request that failed counts,
// because it may have changed a part. A refused request does not count.
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

// actsFor records the persons on whose behalf the request of ctx acts. Like the caller, they see the changes of the
// request at once.
func actsFor(ctx context.Context, names ...*string) {
	x := exchangeOf(ctx)
	for _, name := range names {
		if name != nil && *name != "" {
			x.actedFor = append(x.actedFor, *name)
		}
	}
}
