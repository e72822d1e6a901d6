package api

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/deadletter"
)

// SessionsPath is the path of sessions.
const SessionsPath = "/api/sessions"

// Session is a user's session in a browser.
type Session struct {
	access.Session

	Current bool `json:"current" doc:"Whether it is the session of this request."`
}

// EndSessions selects the sessions to end.
type EndSessions struct {
	Name string `json:"name,omitempty" maxLength:"255" doc:"User whose sessions end; the caller if absent. Ending the sessions of another user needs the role admin."`
	Note string `json:"note,omitempty" maxLength:"10000" doc:"Reason, for the audit trail."`
}

// EndedSessions is the number of ended sessions.
type EndedSessions struct {
	Ended int `json:"ended" doc:"Number of ended sessions."`
}

// SessionsInput selects sessions.
type SessionsInput struct {
	Name string `query:"name" doc:"Only sessions of this user."`
}

// SessionsOutputBody lists sessions.
type SessionsOutputBody struct {
	Sessions []Session `json:"sessions" doc:"Sessions, latest sign-in first."`
}

// EndSessionInput is a request to end a session.
type EndSessionInput struct {
	ID   string `path:"id" format:"uuid" doc:"Id of the session."`
	Note string `query:"note" maxLength:"10000" doc:"Reason, for the audit trail."`
}

// EndAllSessionsInput is a request to end the sessions of a user.
type EndAllSessionsInput struct{ Body *EndSessions }

// Operations on sessions.
var (
	ListSessions   = Operation[SessionsInput, SessionsOutputBody]{"list-sessions", http.MethodGet, SessionsPath}
	EndSession     = Operation[EndSessionInput, EndedSessions]{"end-session", http.MethodDelete, SessionsPath + "/{id}"}
	EndAllSessions = Operation[EndAllSessionsInput, EndedSessions]{
		"end-sessions", http.MethodPost, SessionsPath + "/end",
	}
)

func (s *service) registerSessions(api huma.API) {
	tags := []string{"sessions"}
	list := huma.Operation{
		Tags: tags, Summary: "List browser sessions",
		Description: "Returns the caller's sessions. An admin of all queues and kinds sees the sessions of all users.",
		Errors:      []int{503},
	}
	at := time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC)
	shown := &SessionsOutputBody{[]Session{{Current: true, Session: access.Session{
		ID: "0198a0b0-0000-7000-8000-000000000000", Name: "kim@example.com", Via: access.ViaOIDC, Address: "192.0.2.7",
		Agent: "Mozilla/5.0", CreatedAt: at, SeenAt: at.Add(time.Hour), ExpiresAt: at.Add(13 * time.Hour),
	}}}}
	example(&list, http.StatusOK, shown)
	register(s, api, ListSessions, list, s.listSessions)

	end := huma.Operation{
		Tags: tags, Summary: "End a session",
		Description: "Every process rejects the session within five seconds. Callers end their own sessions; an admin " +
			"of all queues and kinds ends any session.",
		Errors: []int{404, 422, 503},
	}
	example(&end, http.StatusOK, EndedSessions{1})
	register(s, api, EndSession, end, func(ctx context.Context, in *EndSessionInput) (*EndedSessions, error) {
		e := access.Ending{ID: in.ID, Note: in.Note}
		if p := access.From(ctx); !p.MayEverywhere(access.Admin) {
			e.Name = p.Name
		}
		n, err := s.endSessions(ctx, e)
		if err == nil && n == 0 {
			err = huma.Error404NotFound("session " + in.ID + " does not exist, or belongs to another user")
		}
		if err != nil {
			return nil, err
		}
		return &EndedSessions{n}, nil
	})

	endAll := huma.Operation{
		Tags: tags, Summary: "End all sessions of a user",
		Description: "Ends all sessions of the caller. An admin of all queues and kinds can name another user.",
		Errors:      []int{400, 403, 422, 503},
	}
	example(&endAll, http.StatusOK, EndedSessions{3})
	register(s, api, EndAllSessions, endAll, func(ctx context.Context, in *EndAllSessionsInput) (*EndedSessions, error) {
		p := access.From(ctx)
		e := access.Ending{Name: p.Name}
		if in.Body != nil {
			e.Note = in.Body.Note
			if in.Body.Name != "" {
				e.Name = in.Body.Name
			}
		}
		switch {
		case e.Name == "":
			return nil, huma.Error422UnprocessableEntity(
				"authentication is off (access.yaml: authentication): name the user whose sessions end",
				&huma.ErrorDetail{Location: "body.name", Message: "is required"})
		case e.Name != p.Name && !p.MayEverywhere(access.Admin):
			return nil, huma.Error403Forbidden(forbidden(p, need{role: access.Admin}) + ". Omit name to end your own sessions")
		}
		n, err := s.endSessions(ctx, e)
		if err != nil {
			return nil, err
		}
		return &EndedSessions{n}, nil
	})
}

func (s *service) listSessions(ctx context.Context, in *SessionsInput) (*SessionsOutputBody, error) {
	p, out := access.From(ctx), &SessionsOutputBody{[]Session{}}
	if s.Access == nil {
		return out, nil
	}
	name := in.Name
	if !p.MayEverywhere(access.Admin) {
		if name != "" && name != p.Name {
			return out, nil
		}
		name = p.Name
	}
	sessions, err := s.Access.Tokens.Sessions(ctx, name, s.Access.Rules().Sessions)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	for _, one := range sessions {
		out.Sessions = append(out.Sessions, Session{Session: one, Current: one.ID == p.Session})
	}
	return out, nil
}

// endSessions ends sessions and returns their number, which is 0 if there is no such session.
func (s *service) endSessions(ctx context.Context, e access.Ending) (int, error) {
	if s.Access == nil {
		return 0, nil
	}
	e.By, e.Origin = access.From(ctx).Name, deadletter.Origin(ctx)
	if e.By == "" {
		e.By = "api"
	}
	n, err := s.Access.EndSessions(ctx, e)
	if err != nil && !errors.Is(err, access.ErrNoSession) {
		return 0, s.problem(ctx, err)
	}
	return n, nil
}
