package api

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/postgres"
)

// need says what an operation requires of its caller.
type need struct {
	role access.Role // "" for any authenticated caller
	// scoped means that the operation is limited to the queues and kinds for which the caller has the role. If scoped is
	// false, the caller needs the role for all queues and kinds.
	scoped bool
}

// publicPaths lists paths that require no authentication: probes, sign-in, and the API's documentation. Paths below
// StaticPath and runbooksPath require none, too.
var publicPaths = []string{
	"/livez", "/readyz", "/api/login", access.SignInPath, access.ProviderPath,
	access.CallbackPath, access.SignOutPath, docsPath, "/openapi.json", "/openapi.yaml", "/openapi-3.0.json",
	"/openapi-3.0.yaml",
}

// StaticPath is the path of the console's style sheet and script. It requires no authentication, because the sign-in
// page uses them.
const StaticPath = "/static/"

// needs says for every operation what it requires. The API cannot be built with an operation that is missing here.
var needs = map[string]need{
	"submit-message": {access.Sender, true}, "submit-batch": {access.Sender, true}, "get-message": {access.Reader, true},

	"list-entries": {access.Reader, true}, "complete-filter": {access.Reader, true},
	"get-entry": {access.Reader, true}, "get-stats": {access.Reader, true},
	"reveal-entry": {access.Operator, true}, "get-revealed-entry": {access.Operator, true},
	"export": {access.Operator, true},
	"bulk":   {access.Operator, true}, "replay-entry": {access.Operator, true},
	"discard-entry": {access.Operator, true}, "expire-entry": {access.Operator, true},
	"resolve-entry": {access.Operator, true}, "park-entry": {access.Operator, true},
	"unpark-entry": {access.Operator, true}, "reopen-entry": {access.Operator, true},

	"get-operation": {access.Reader, true}, "undo": {access.Operator, true},
	"review-next": {access.Operator, true},

	// Groups are counted by queue, as in analytics, so callers who are limited to kinds are refused.
	"list-groups": {access.Reader, true}, "get-group": {access.Reader, true}, "set-group": {access.Operator, true},
	"record-deploy": {access.Operator, true},

	// Sharing a view requires operator; deleting another user's shared view requires admin.
	"list-views": {access.Reader, true}, "get-view": {access.Reader, true},
	"save-view": {access.Reader, true}, "delete-view": {access.Reader, true},
	"order-views": {access.Operator, true},

	"list-replays": {access.Reader, true}, "get-replay": {access.Reader, true},
	"follow-replay": {access.Reader, true}, "list-replay-entries": {access.Reader, true},
	"start-replay": {access.Operator, true}, "pause-replay": {access.Operator, true},
	"resume-replay": {access.Operator, true},
	"cancel-replay": {access.Operator, true}, "set-replay-rate": {access.Operator, true},
	"go-on-replay": {access.Operator, true}, "back-replay": {access.Operator, true},
	"end-replay":        {access.Operator, true},
	"get-replay-report": {access.Reader, true}, "diff-replays": {access.Reader, true},
	"get-replay-calibration": {access.Reader, true},

	// The approval of an operation that requires admin requires admin, too; see decide.
	"list-approvals": {access.Operator, true}, "get-approval": {access.Operator, true},
	"approve": {access.Operator, true}, "refuse": {access.Operator, true},
	"withdraw": {access.Operator, true},

	"list-tokens": {access.Admin, false}, "create-token": {access.Admin, false}, "revoke-token": {access.Admin, false},
	"get-policy": {access.Reader, true}, "test-policy": {access.Reader, false},
	"preview-policy": {access.Operator, false},

	"search-audit": {access.Reader, true}, "list-erasures": {access.Reader, false}, "erase": {access.Admin, false},
	"list-queues": {access.Reader, true}, "pause-queue": {access.Operator, true}, "resume-queue": {access.Operator, true},
	"list-jobs": {access.Reader, true}, "get-job": {access.Reader, true},
	"cancel-job": {access.Operator, true}, "retry-job": {access.Operator, true},
	"list-circuit-breakers": {access.Reader, true}, "open-circuit-breaker": {access.Operator, true},
	"reset-circuit-breaker": {access.Operator, true},
	"list-sources":          {access.Reader, true}, "get-source": {access.Reader, true},
	"pause-source": {access.Operator, true}, "resume-source": {access.Operator, true},
	"rewind-source": {access.Operator, true},
	"pause-feed":    {access.Operator, false}, "resume-feed": {access.Operator, false},
	"rewind-feed":    {access.Operator, false},
	"get-automatic":  {access.Reader, false},
	"stop-automatic": {access.Operator, false}, "resume-automatic": {access.Operator, false},
	"get-restored": {access.Operator, false}, "resume-restored": {access.Operator, false},
	"set-automatic": {access.Operator, false}, "reset-automatic": {access.Operator, false},
	"get-capture": {access.Reader, false}, "set-capture": {access.Admin, false}, "reclassify": {access.Operator, false},

	// Analytics are counted by queue, so callers who are limited to kinds are refused, except for the oldest entries, the
	// policies and the rules. Sources are counted over all queues, so callers who are limited to queues are refused, too.
	"get-analytics-flow": {access.Reader, true}, "get-analytics-queues": {access.Reader, true},
	"get-analytics-times":       {access.Reader, true},
	"get-analytics-error-types": {access.Reader, true},
	"get-analytics-groups":      {access.Reader, true}, "get-analytics-heat-map": {access.Reader, true},
	"get-analytics-replays": {access.Reader, true}, "get-analytics-oldest": {access.Reader, true},
	"get-analytics-retry-cost": {access.Reader, true},
	"get-analytics-sources":    {access.Reader, false},
	"get-analytics-policies":   {access.Reader, true}, "get-analytics-rules": {access.Reader, true},

	// All callers see and end their own sessions. To see or end another user's sessions, the handlers require admin for
	// all queues and kinds.
	"list-sessions": {"", true}, "end-session": {"", true}, "end-sessions": {"", true},

	"whoami": {"", true}, "get-login": {"", true}, "get-health": {access.Metrics, false}, "examine": {access.Admin, false},
	"get-log-level": {access.Metrics, false}, "set-log-level": {access.Admin, false},
	"livez": {"", true}, "readyz": {"", true},
}

// needOf returns what an operation requires.
func needOf(operation string) need {
	n, ok := needs[operation]
	if !ok {
		panic("api: operation " + operation + " is missing in needs")
	}
	return n
}

// describeNeeds adds the requirements of each operation to the OpenAPI document.
func describeNeeds(api huma.API) {
	document := api.OpenAPI()
	document.Components.SecuritySchemes = map[string]*huma.SecurityScheme{
		"token": {
			Type: "http", Scheme: "bearer",
			Description: "A token of \"dlqd tokens create\", or an ID token or access token (JWT) of the OpenID Connect " +
				"provider " +
				"(GET /api/login). The policy (access.yaml: authentication) configures whether a token is needed and which " +
				"other credentials are accepted.",
		},
		"session": {
			Type: "apiKey", In: "cookie", Name: "__Host-dlqd",
			Description: "The cookie of a browser session, for dlqd's own pages. Over http on loopback its name is dlqd.",
		},
	}
	for path, item := range document.Paths {
		for _, operation := range []*huma.Operation{item.Get, item.Post, item.Put, item.Patch, item.Delete} {
			if operation == nil {
				continue
			}
			if slices.Contains(publicPaths, path) {
				operation.Security = []map[string][]string{} // an empty list in OpenAPI means: no authentication
				continue
			}
			n, text := needOf(operation.OperationID), "Needs no role."
			if n.role != "" {
				text = "Needs the role " + string(n.role)
				if n.scoped {
					text += ". Limited to the queues and kinds for which the caller has it."
				} else {
					text += " for all queues and kinds."
				}
			}
			operation.Security = []map[string][]string{{"token": {}}, {"session": {}}}
			operation.Description = strings.TrimSpace(operation.Description + " " + text)
			for status, description := range map[string]string{
				"401": "Authentication required", "403": "The caller may not do this",
			} {
				operation.Responses[status] = &huma.Response{
					Description: description,
					Content: map[string]*huma.MediaType{"application/problem+json": {
						Schema: &huma.Schema{Ref: "#/components/schemas/ErrorModel"},
					}},
				}
			}
		}
	}
}

// docsPath is the path of the page with the API's documentation. It requires no authentication.
const docsPath = "/docs"

// signIn authenticates requests, except those for public paths, before next handles them. It answers a refused request
// itself. A caller of docsPath need not be authenticated; /metrics requires the role metrics.
func (s *service) signIn(next http.Handler) http.Handler {
	if s.Access == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == docsPath {
			p, err := s.Access.Authenticate(r)
			if err != nil {
				p = &access.Principal{} // a caller without any role
			}
			next.ServeHTTP(w, r.WithContext(access.With(r.Context(), p)))
			return
		}
		if slices.Contains(publicPaths, r.URL.Path) || strings.HasPrefix(r.URL.Path, StaticPath) ||
			strings.HasPrefix(r.URL.Path, runbooksPath) {
			next.ServeHTTP(w, r)
			return
		}
		p, err := s.Access.Authenticate(r)
		if err != nil {
			s.refuseSignIn(w, r, err)
			return
		}
		if r.URL.Path == "/metrics" && !p.MayEverywhere(access.Metrics) {
			door.Problem(w, http.StatusForbidden, forbidden(p, need{role: access.Metrics}))
			return
		}
		s.Access.Renew(w, r, p)
		ctx := access.WithReauthentication(r.Context(),
			func() (*access.Principal, error) { return s.Access.Reauthenticate(r, p) }, s.Access.SessionsEnded)
		next.ServeHTTP(w, r.WithContext(access.With(ctx, p)))
	})
}

func (s *service) refuseSignIn(w http.ResponseWriter, r *http.Request, err error) {
	var retry *access.RetryError
	switch page := s.console != nil && isPage(r); {
	case page && access.IsRefusal(err):
		http.Redirect(w, r, access.SignInURL(r), http.StatusSeeOther) //nolint:gosec // a path of dlqd
	case s.console != nil && isForm(r) && (errors.Is(err, access.ErrUnknown) || errors.Is(err, access.ErrRefused)):
		s.refuseForm(w, r)
	case page && errors.Is(err, access.ErrProvider):
		w.Header().Set("Retry-After", "5")
		s.console.SignInFailed(w, r, http.StatusServiceUnavailable, access.ErrProvider.Error())
	case errors.As(err, &retry):
		w.Header().Set("Retry-After", door.Seconds(retry.After))
		s.unavailable(w, r, http.StatusTooManyRequests, err.Error())
	case errors.Is(err, access.ErrProvider):
		w.Header().Set("Retry-After", "5") // access.providerInterval: dlqd contacts the provider at most once in that time
		s.unavailable(w, r, http.StatusServiceUnavailable,
			access.ErrProvider.Error()+": the token cannot be verified now; tokens of dlqd still work")
	case access.IsRefusal(err):
		w.Header().Set("WWW-Authenticate", `Bearer realm="dlqd"`)
		door.Problem(w, http.StatusUnauthorized, err.Error()+": send \"Authorization: Bearer <token>\" "+
			"(\"dlqd tokens create\" creates a token; commands use $DLQD_TOKEN, or the token of \"dlqd login\")")
	default:
		if status, ok := errors.AsType[huma.StatusError](s.problem(r.Context(), err)); ok {
			w.Header().Set("Retry-After", retryAfterSeconds)
			s.unavailable(w, r, status.GetStatus(), status.Error())
		}
	}
}

// isPage reports whether a browser requests a page.
func isPage(r *http.Request) bool {
	return r.Method == http.MethodGet && !strings.HasPrefix(r.URL.Path, "/api/") && r.URL.Path != "/metrics" &&
		strings.Contains(r.Header.Get("Accept"), "text/html")
}

// isForm reports whether a browser sends a form of a page.
func isForm(r *http.Request) bool {
	return r.Method == http.MethodPost && !strings.HasPrefix(r.URL.Path, "/api/") &&
		strings.HasPrefix(r.Header.Get("Content-Type"), "application/x-www-form-urlencoded") &&
		strings.Contains(r.Header.Get("Accept"), "text/html")
}

// maxRefusedForm is the maximum size, in bytes, of a form that dlqd did not handle and whose fields a page repeats. The
// limit is small, because callers who are not signed in may send such forms.
const maxRefusedForm = 64 << 10

// refuseForm answers a form with the sign-in page if the user is not signed in, or is no longer signed in. The page
// repeats the form's fields, so that the user's input is not lost.
func (s *service) refuseForm(w http.ResponseWriter, r *http.Request) {
	why := "you are signed out, so nothing was done"
	kept, done := s.keepForm(w, r)
	defer done()
	if !kept {
		why += "; the form is too large to keep"
	}
	w.Header().Set("WWW-Authenticate", `Bearer realm="dlqd"`)
	s.console.SignInFailed(w, r, http.StatusUnauthorized, why)
}

// keepForm reads a form that dlqd did not handle, so that a page can repeat its fields. If the form is too large, slow
// or incomplete, keepForm returns false and the page has no fields. The caller must call done.
func (s *service) keepForm(w http.ResponseWriter, r *http.Request) (kept bool, done func()) {
	var form bytes.Buffer
	done, err := s.bodies.Read(w, r, door.Peer(r), maxRefusedForm+1, &form)
	kept = err == nil && form.Len() <= maxRefusedForm
	if !kept {
		form.Reset()
	}
	r.Body = io.NopCloser(&form)
	return kept, done
}

// unavailable answers a request that dlqd did not handle. It answers with a page if a browser requested a page or sent
// a form, and otherwise with a problem. The page for a form repeats the form's fields, so that the user's input is not
// lost.
func (s *service) unavailable(w http.ResponseWriter, r *http.Request, status int, why string) {
	switch {
	case s.console != nil && isForm(r):
		kept, done := s.keepForm(w, r)
		defer done()
		why += "; nothing was done"
		if !kept {
			why += ", and the form is too large to keep: go back in the browser, which may have it"
		}
		s.console.Unavailable(w, r, status, why)
	case s.console != nil && isPage(r):
		s.console.Unavailable(w, r, status, why)
	default:
		door.Problem(w, status, why)
	}
}

// authorize refuses operations that the caller may not call. It limits the other operations to the caller's queues and
// kinds.
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

// limitTo returns an error if the caller does not have what n requires. Otherwise it returns a context that is limited
// to the queues and kinds for which the caller has the role. In this context payloads are masked, unless SeesPayloads
// allows the caller to see them.
func (s *service) limitTo(ctx context.Context, n need) (context.Context, error) {
	p := access.From(ctx)
	if n.role != "" && !p.May(n.role) || !n.scoped && !p.MayEverywhere(n.role) {
		return nil, huma.Error403Forbidden(forbidden(p, n))
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

func forbidden(p *access.Principal, n need) string {
	detail := "this needs the role " + string(n.role)
	if p.May(n.role) {
		return detail + " for all queues and kinds; " + p.Name + " has it for some"
	}
	if role := p.RoleName(); role != "" {
		return detail + "; " + p.Name + " has the role " + string(role)
	}
	return detail + "; " + p.Name + " has no role (access.yaml: grants)"
}

// act returns the actor and the note of a request. a is nil if the request has no body. With authentication, the actor
// is the caller; a different name in the body is recorded in the request's origin. Without authentication, the actor is
// the name in the body, or "api".
func (a *Action) act(ctx context.Context) deadletter.Act {
	by := a.person(ctx)
	if by.OnBehalfOf != "" {
		deadletter.OnBehalfOf(ctx, by.OnBehalfOf)
	}
	return by.Act
}

// checkSubmit returns an error if the caller may not submit a message with this queue, kind and source, and nil
// otherwise.
func checkSubmit(ctx context.Context, queue, kind, source string) error {
	p := access.From(ctx)
	if p.MayFor(access.Sender, queue, kind, source) {
		return nil
	}
	as := ""
	if source != "" {
		as = " as " + truncate(source, maxEcho)
	}
	return huma.Error403Forbidden(p.Name + " may not submit " + truncate(kind, maxEcho) + " to " + truncate(queue,
		maxEcho) + as + "; nothing was stored")
}

// Caller is the authenticated caller, with the caller's grants.
type Caller struct {
	Name   string        `json:"name" doc:"Name of the caller: the actor in the audit trail."`
	Via    string        `json:"via,omitempty" enum:"token,socket,proxy,oidc,certificate" doc:"How the caller was authenticated; absent if authentication is off."`
	Grants []CallerGrant `json:"grants" doc:"Roles of the caller, with their scopes."`
}

// CallerGrant is a role and its scope.
type CallerGrant struct {
	Role    access.Role `json:"role" enum:"reader,operator,admin,sender,metrics" doc:"The role."`
	Queues  []string    `json:"queues,omitempty" doc:"Patterns of queues; absent: every queue."`
	Kinds   []string    `json:"kinds,omitempty" doc:"Patterns of kinds; absent: every kind."`
	Sources []string    `json:"sources,omitempty" doc:"Patterns of sources that the caller may submit as; absent: every source."`
}

// Login has the settings with which a client signs in at the OpenID Connect provider.
type Login struct {
	Issuer   string   `json:"issuer" doc:"URL of the OpenID Connect provider."`
	ClientID string   `json:"clientId" doc:"Client id for the sign-in: that of a public client."`
	Scopes   []string `json:"scopes" doc:"Scopes to request."`
}

// Operations on the caller.
var (
	Whoami   = Operation[None, Caller]{"whoami", http.MethodGet, "/api/whoami"}
	GetLogin = Operation[None, Login]{"get-login", http.MethodGet, "/api/login"}
)

func (s *service) registerAccess(api huma.API) {
	whoami := huma.Operation{
		Tags:    []string{operationsTag},
		Summary: "Get the caller and its grants",
	}
	example(&whoami, http.StatusOK, Caller{
		Name: "kim", Via: access.ViaToken,
		Grants: []CallerGrant{{Role: access.Operator, Queues: []string{"payments*"}}},
	})
	register(s, api, Whoami, whoami, func(ctx context.Context, _ *None) (*Caller, error) {
		p := access.From(ctx)
		out := &Caller{Name: p.Name, Via: p.Via, Grants: []CallerGrant{}}
		for _, g := range p.Grants {
			out.Grants = append(out.Grants, CallerGrant(g))
		}
		return out, nil
	})

	login := huma.Operation{
		Tags:    []string{operationsTag},
		Summary: "Get the sign-in settings",
		Description: "\"dlqd login\" needs these settings before the user has signed in. They are not secret. Answers " +
			"404 if users do not sign in with an OpenID Connect provider.",
		Errors: []int{http.StatusNotFound},
	}
	example(&login, http.StatusOK, Login{
		Issuer: "https://login.example.com", ClientID: "dlqd",
		Scopes: []string{"openid", "profile", "email", "offline_access"},
	})
	register(s, api, GetLogin, login, func(context.Context, *None) (*Login, error) {
		if s.Access != nil {
			if rules := s.Access.Rules(); slices.Contains(rules.Ways, access.ViaOIDC) {
				return &Login{
					Issuer: rules.OIDC.Issuer, ClientID: rules.OIDC.ClientID, Scopes: rules.OIDC.Scopes,
				}, nil
			}
		}
		return nil, huma.Error404NotFound("sign-in with an OpenID Connect provider is off (access.yaml: authentication)")
	})
}
