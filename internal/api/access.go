package api

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/postgres"
)

// need is what an operation needs of who calls.
type need struct {
	role access.Role // "" for anybody who is known
	// scoped operations keep to the queues and kinds of who calls; others need the role in all of them.
	scoped bool
}

// open is of what anybody may ask: whether the process lives, how one signs in, and how the API is used.
var open = []string{"/livez", "/readyz", "/api/login", access.SignInPath, access.ProviderPath, access.CallbackPath, access.SignOutPath, docsPath, "/openapi.json", "/openapi.yaml", "/openapi-3.0.json", "/openapi-3.0.yaml"}

// StaticPath is where the console's style sheet and script are, which a sign-in page needs.
const StaticPath = "/static/"

// needs has every operation, so that a new one cannot be forgotten: the API is not built without it.
var needs = map[string]need{
	"submit-message": {access.Sender, true}, "submit-batch": {access.Sender, true}, "get-message": {access.Reader, true},

	"list-entries": {access.Reader, true}, "complete-filter": {access.Reader, true}, "get-entry": {access.Reader, true}, "get-stats": {access.Reader, true},
	"reveal-entry": {access.Operator, true}, "export": {access.Operator, true}, "bulk": {access.Operator, true}, "replay-entry": {access.Operator, true},
	"discard-entry": {access.Operator, true}, "resolve-entry": {access.Operator, true}, "park-entry": {access.Operator, true},
	"unpark-entry": {access.Operator, true}, "reopen-entry": {access.Operator, true},

	"get-operation": {access.Reader, true}, "undo": {access.Operator, true},

	// Counted by queue, as analytics: those who are limited to kinds are refused.
	"list-groups": {access.Reader, true}, "get-group": {access.Reader, true}, "set-group": {access.Operator, true},

	// To share one takes an operator, to delete what somebody else shares an admin.
	"list-views": {access.Reader, true}, "get-view": {access.Reader, true}, "save-view": {access.Reader, true}, "delete-view": {access.Reader, true},

	"list-replays": {access.Reader, true}, "get-replay": {access.Reader, true}, "follow-replay": {access.Reader, true}, "list-replay-entries": {access.Reader, true},
	"start-replay": {access.Operator, true}, "pause-replay": {access.Operator, true}, "resume-replay": {access.Operator, true},
	"cancel-replay": {access.Operator, true}, "set-replay-rate": {access.Operator, true},

	// To approve what takes an admin takes one, too: see decide.
	"list-approvals": {access.Operator, true}, "get-approval": {access.Operator, true}, "approve": {access.Operator, true}, "refuse": {access.Operator, true},
	"withdraw": {access.Operator, true},

	"list-tokens": {access.Admin, false}, "create-token": {access.Admin, false}, "revoke-token": {access.Admin, false},
	"get-policy": {access.Reader, false}, "test-policy": {access.Reader, false}, "preview-policy": {access.Operator, false},

	"search-audit": {access.Reader, true}, "list-erasures": {access.Reader, false}, "erase": {access.Admin, false},
	"list-queues": {access.Reader, true}, "pause-queue": {access.Operator, true}, "resume-queue": {access.Operator, true},
	"list-circuit-breakers": {access.Reader, true}, "open-circuit-breaker": {access.Operator, true}, "reset-circuit-breaker": {access.Operator, true},
	"get-automatic": {access.Reader, false}, "stop-automatic": {access.Operator, false}, "resume-automatic": {access.Operator, false},
	"get-restored": {access.Operator, false}, "resume-restored": {access.Operator, false},
	"set-automatic": {access.Operator, false}, "reset-automatic": {access.Operator, false},
	"get-capture": {access.Reader, false}, "set-capture": {access.Admin, false}, "reclassify": {access.Operator, false},

	// Analytics count by queue: those who are limited to kinds are refused, but for the oldest entries. Sources are of all queues.
	"get-analytics-flow": {access.Reader, true}, "get-analytics-queues": {access.Reader, true}, "get-analytics-times": {access.Reader, true},
	"get-analytics-error-types": {access.Reader, true}, "get-analytics-groups": {access.Reader, true}, "get-analytics-heat-map": {access.Reader, true},
	"get-analytics-replays": {access.Reader, true}, "get-analytics-oldest": {access.Reader, true}, "get-analytics-retry-cost": {access.Reader, true},
	"get-analytics-sources": {access.Reader, false}, "get-analytics-policies": {access.Reader, true}, "get-analytics-rules": {access.Reader, true},

	// One's own; others' take an admin of everything.
	"list-sessions": {"", true}, "end-session": {"", true}, "end-sessions": {"", true},

	"whoami": {"", true}, "get-login": {"", true}, "get-health": {access.Metrics, false}, "examine": {access.Admin, false},
	"get-log-level": {access.Metrics, false}, "set-log-level": {access.Admin, false}, "livez": {"", true}, "readyz": {"", true},
}

// needOf is what an operation needs.
func needOf(operation string) need {
	n, ok := needs[operation]
	if !ok {
		panic("api: what does " + operation + " need? see needs")
	}
	return n
}

// describeNeeds says in the document what each operation needs.
func describeNeeds(api huma.API) {
	document := api.OpenAPI()
	document.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"token":   {Type: "http", Scheme: "bearer", Description: "A token of \"dlqd tokens create\", or an ID token or access token (JWT) of the OpenID Connect provider (GET /api/login). Whether one is needed, and what else will do, the policy says (access.yaml)."},
		"session": {Type: "apiKey", In: "cookie", Name: "__Host-dlqd", Description: "The cookie of who has signed in with a browser: for dlqd's own pages (by http on loopback it is called dlqd)."},
	}
	for path, item := range document.Paths {
		for _, operation := range []*huma.Operation{item.Get, item.Post, item.Put, item.Patch, item.Delete} {
			if operation == nil || slices.Contains(open, path) {
				continue
			}
			n, says := needOf(operation.OperationID), "Needs no role."
			if n.role != "" {
				says = "Needs the role " + string(n.role)
				if n.scoped {
					says += ", and keeps to the queues and kinds for which the caller has it."
				} else {
					says += ", in every queue and for every kind."
				}
			}
			operation.Security = []map[string][]string{{"token": {}}, {"session": {}}}
			operation.Description = strings.TrimSpace(operation.Description + " " + says)
			for status, description := range map[string]string{"401": "Who calls is not known", "403": "Who calls may not do this"} {
				operation.Responses[status] = &huma.Response{Description: description, Content: map[string]*huma.MediaType{"application/problem+json": {Schema: &huma.Schema{Ref: "#/components/schemas/ErrorModel"}}}}
			}
		}
	}
}

// docsPath is of the page that describes the API, to those too who have not signed in.
const docsPath = "/docs"

// signIn finds out who makes a request.
func (s *service) signIn(next http.Handler) http.Handler {
	if s.Access == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == docsPath {
			p, err := s.Access.Authenticate(r)
			if err != nil {
				p = &access.Principal{} // nobody, who may do nothing
			}
			next.ServeHTTP(w, r.WithContext(access.With(r.Context(), p)))
			return
		}
		if slices.Contains(open, r.URL.Path) || strings.HasPrefix(r.URL.Path, StaticPath) || strings.HasPrefix(r.URL.Path, runbooksPath) {
			next.ServeHTTP(w, r)
			return
		}
		p, err := s.Access.Authenticate(r)
		if err != nil {
			s.refuseSignIn(w, r, err)
			return
		}
		if r.URL.Path == "/metrics" && !p.MayEverywhere(access.Metrics) {
			door.Problem(w, http.StatusForbidden, mayNot(p, need{role: access.Metrics}))
			return
		}
		s.Access.Renew(w, r, p)
		ctx := access.WithAgain(r.Context(), func() (*access.Principal, error) { return s.Access.Again(r, p) })
		next.ServeHTTP(w, r.WithContext(access.With(ctx, p)))
	})
}

func (s *service) refuseSignIn(w http.ResponseWriter, r *http.Request, err error) {
	var retry *access.RetryError
	switch page := s.console != nil && isPage(r); {
	case page && access.IsRefusal(err):
		http.Redirect(w, r, access.SignInURL(r), http.StatusSeeOther) //nolint:gosec // a path of ours
	case page && errors.Is(err, access.ErrProvider):
		w.Header().Set("Retry-After", "5")
		s.console.SignInFailed(w, r, http.StatusServiceUnavailable, access.ErrProvider.Error())
	case errors.As(err, &retry):
		w.Header().Set("Retry-After", door.Seconds(retry.After))
		door.Problem(w, http.StatusTooManyRequests, err.Error())
	case errors.Is(err, access.ErrProvider):
		w.Header().Set("Retry-After", "5") // it is not asked more often
		door.Problem(w, http.StatusServiceUnavailable, access.ErrProvider.Error()+": who calls cannot be known now; tokens of dlqd go on")
	case access.IsRefusal(err):
		w.Header().Set("WWW-Authenticate", `Bearer realm="dlqd"`)
		door.Problem(w, http.StatusUnauthorized, err.Error()+": send a token as \"Authorization: Bearer dlqd_…\" (dlqd tokens create makes one; dlqd's own commands take $DLQD_TOKEN, or what dlqd login got)")
	default:
		if status, ok := errors.AsType[huma.StatusError](s.problem(r.Context(), err)); ok {
			w.Header().Set("Retry-After", retryAfterSeconds)
			door.Problem(w, status.GetStatus(), status.Error())
		}
	}
}

// isPage reports whether a browser asks for a page.
func isPage(r *http.Request) bool {
	return r.Method == http.MethodGet && !strings.HasPrefix(r.URL.Path, "/api/") && r.URL.Path != "/metrics" && strings.Contains(r.Header.Get("Accept"), "text/html")
}

// authorize refuses operations that are not for who calls, and limits the others to their queues and kinds.
func (s *service) authorize(api huma.API) func(huma.Context, func(huma.Context)) {
	return func(ctx huma.Context, next func(huma.Context)) {
		limited, err := s.limitTo(ctx.Context(), needOf(ctx.Operation().OperationID))
		if refused, ok := errors.AsType[huma.StatusError](err); ok {
			_ = huma.WriteErr(api, ctx, refused.GetStatus(), refused.Error())
			return
		}
		next(huma.WithContext(ctx, limited))
	}
}

// limitTo refuses who has not what something needs, and limits what is done in ctx to where they have it.
func (s *service) limitTo(ctx context.Context, n need) (context.Context, error) {
	p := access.From(ctx)
	if n.role != "" && !p.May(n.role) || !n.scoped && !p.MayEverywhere(n.role) {
		return nil, huma.Error403Forbidden(mayNot(p, n))
	}
	limited, err := access.Limit(ctx, p.Scope(n.role))
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	if !p.SeesPayloads(n.role) {
		limited = postgres.AsReader(limited)
	}
	return limited, nil
}

func mayNot(p *access.Principal, n need) string {
	says := "this needs the role " + string(n.role)
	if p.May(n.role) {
		return says + " in every queue and for every kind; " + p.Name + " has it in some"
	}
	if role := p.RoleName(); role != "" {
		return says + "; " + p.Name + " has the role " + string(role)
	}
	return says + "; " + p.Name + " has none (grants in access.yaml)"
}

// act is the move of a request, whose body is optional. Who signed in is who acts; whom they name beside themselves is kept with
// where they come from.
func (a *Action) act(ctx context.Context) deadletter.Act {
	by := a.person(ctx)
	if by.OnBehalfOf != "" {
		deadletter.OnBehalfOf(ctx, by.OnBehalfOf)
	}
	return by.Act
}

// mayNotSubmit is the answer to a message that is not for who sends it; nil where it is.
func mayNotSubmit(ctx context.Context, queue, kind, source string) error {
	p := access.From(ctx)
	if p.MayFor(access.Sender, queue, kind, source) {
		return nil
	}
	as := ""
	if source != "" {
		as = " as " + cut(source, maxEcho)
	}
	return huma.Error403Forbidden(p.Name + " may not submit " + cut(kind, maxEcho) + " to " + cut(queue, maxEcho) + as + "; nothing was stored")
}

// Caller is who calls, and what they may do.
type Caller struct {
	Name   string        `json:"name" doc:"Who calls: the actor in the audit trail."`
	Via    string        `json:"via,omitempty" enum:"token,socket,proxy,oidc,certificate" doc:"How they are known; absent where nobody is asked."`
	Grants []CallerGrant `json:"grants" doc:"What they may do."`
}

// CallerGrant is a role, and where.
type CallerGrant struct {
	Role    string   `json:"role" enum:"reader,operator,admin,sender,metrics" doc:"The role."`
	Queues  []string `json:"queues,omitempty" doc:"Patterns of queues; absent: every queue."`
	Kinds   []string `json:"kinds,omitempty" doc:"Patterns of kinds; absent: every kind."`
	Sources []string `json:"sources,omitempty" doc:"Patterns of sources as which they may submit; absent: every source."`
}

type whoamiOutput struct{ Body Caller }

// Login says how one signs in.
type Login struct {
	Issuer   string   `json:"issuer" doc:"The OpenID Connect provider that has users sign in."`
	ClientID string   `json:"clientId" doc:"The client as which it is asked: a public one."`
	Scopes   []string `json:"scopes" doc:"What it is asked for."`
}

type loginOutput struct{ Body Login }

func (s *service) registerAccess(api huma.API) {
	whoami := huma.Operation{
		OperationID: "whoami", Method: http.MethodGet, Path: "/api/whoami", Tags: []string{operationsTag},
		Summary: "Who calls, and what they may do",
	}
	example(&whoami, http.StatusOK, Caller{Name: "kim", Via: access.ViaToken, Grants: []CallerGrant{{Role: string(access.Operator), Queues: []string{"payments*"}}}})
	huma.Register(api, whoami, func(ctx context.Context, _ *struct{}) (*whoamiOutput, error) {
		p := access.From(ctx)
		out := &whoamiOutput{Body: Caller{Name: p.Name, Via: p.Via, Grants: []CallerGrant{}}}
		for _, g := range p.Grants {
			out.Body.Grants = append(out.Body.Grants, CallerGrant{Role: string(g.Role), Queues: g.Queues, Kinds: g.Kinds, Sources: g.Sources})
		}
		return out, nil
	})

	login := huma.Operation{
		OperationID: "get-login", Method: http.MethodGet, Path: "/api/login", Tags: []string{operationsTag},
		Summary:     "How one signs in",
		Description: "What \"dlqd login\" asks before anybody has signed in; nothing of it is secret. 404 where users do not sign in by an OpenID Connect provider.",
		Errors:      []int{http.StatusNotFound},
	}
	example(&login, http.StatusOK, Login{Issuer: "https://login.example.com", ClientID: "dlqd", Scopes: []string{"openid", "profile", "email", "offline_access"}})
	huma.Register(api, login, func(context.Context, *struct{}) (*loginOutput, error) {
		if s.Access != nil {
			if rules := s.Access.Rules(); slices.Contains(rules.Ways, access.ViaOIDC) {
				return &loginOutput{Body: Login{Issuer: rules.OIDC.Issuer, ClientID: rules.OIDC.ClientID, Scopes: rules.OIDC.Scopes}}, nil
			}
		}
		return nil, huma.Error404NotFound("nobody signs in here by an OpenID Connect provider (access.yaml: authentication)")
	})
}
