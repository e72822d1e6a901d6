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
	ID        string    `json:"id" format:"uuid" doc:"By what it is ended. It signs nobody in."`
	Name      string    `json:"name" doc:"Who signed in."`
	Via       string    `json:"via" enum:"token,oidc" doc:"How."`
	Address   string    `json:"address" doc:"From where they signed in."`
	Agent     string    `json:"agent" doc:"What their browser calls itself."`
	CreatedAt time.Time `json:"createdAt" doc:"When they signed in."`
	SeenAt    time.Time `json:"seenAt" doc:"When they were last there, within a minute or so."`
	ExpiresAt time.Time `json:"expiresAt" doc:"When it ends if they are not seen again."`
	Current   bool      `json:"current" doc:"It is the one with which this is asked."`
}

// EndSessions selects the sessions to end.
type EndSessions struct {
	Name string `json:"name,omitempty" maxLength:"255" doc:"Whose; one's own if absent. Others' take an admin."`
	Note string `json:"note,omitempty" maxLength:"10000" doc:"Why; kept in the audit trail."`
}

// EndedSessions is the number of ended sessions.
type EndedSessions struct {
	Ended int `json:"ended" doc:"How many."`
}

type sessionsInput struct {
	Name string `query:"name" doc:"Only of this person."`
}

type sessionsOutput struct {
	Body struct {
		Sessions []Session `json:"sessions" doc:"The latest sign-in first."`
	}
}

type endSessionInput struct {
	ID   string `path:"id" format:"uuid" doc:"The session's id."`
	Note string `query:"note" maxLength:"10000" doc:"Why; kept in the audit trail."`
}

type endSessionsInput struct {
	Body *EndSessions
}

type endedOutput struct{ Body EndedSessions }

func (s *service) registerSessions(api huma.API) {
	tags := []string{"sessions"}
	list := huma.Operation{
		OperationID: "list-sessions", Method: http.MethodGet, Path: SessionsPath, Tags: tags, Summary: "List who is signed in with a browser",
		Description: "One's own sessions; an admin of everything sees all.", Errors: []int{503},
	}
	at := time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC)
	shown := &sessionsOutput{}
	shown.Body.Sessions = []Session{{
		ID: "0198a0b0-0000-7000-8000-000000000000", Name: "kim@example.com", Via: access.ViaOIDC, Address: "192.0.2.7", Agent: "Mozilla/5.0", CreatedAt: at, SeenAt: at.Add(time.Hour), ExpiresAt: at.Add(13 * time.Hour), Current: true,
	}}
	example(&list, http.StatusOK, shown.Body)
	huma.Register(api, list, s.listSessions)

	end := huma.Operation{
		OperationID: "end-session", Method: http.MethodDelete, Path: SessionsPath + "/{id}", Tags: tags, Summary: "End a session",
		Description: "Every process refuses it within five seconds. One's own; an admin of everything ends anybody's.", Errors: []int{404, 422, 503},
	}
	example(&end, http.StatusOK, EndedSessions{1})
	huma.Register(api, end, func(ctx context.Context, in *endSessionInput) (*endedOutput, error) {
		e := access.Ending{ID: in.ID, Note: in.Note}
		if p := access.From(ctx); !p.MayEverywhere(access.Admin) {
			e.Name = p.Name
		}
		n, err := s.endSessions(ctx, e)
		if err == nil && n == 0 {
			err = huma.Error404NotFound("there is no session " + in.ID + " that you could end")
		}
		if err != nil {
			return nil, err
		}
		return &endedOutput{EndedSessions{n}}, nil
	})

	endAll := huma.Operation{
		OperationID: "end-sessions", Method: http.MethodPost, Path: SessionsPath + "/end", Tags: tags, Summary: "Sign out everywhere",
		Description: "Ends all of one's own sessions or, by an admin of everything, somebody's.", Errors: []int{400, 403, 422, 503},
	}
	example(&endAll, http.StatusOK, EndedSessions{3})
	huma.Register(api, endAll, func(ctx context.Context, in *endSessionsInput) (*endedOutput, error) {
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
			return nil, huma.Error422UnprocessableEntity("nobody is asked who they are here, so say whose sessions end", &huma.ErrorDetail{Location: "body.name", Message: "must name somebody"})
		case e.Name != p.Name && !p.MayEverywhere(access.Admin):
			return nil, huma.Error403Forbidden(mayNot(p, need{role: access.Admin}) + ". Your own sessions you end without a name")
		}
		n, err := s.endSessions(ctx, e)
		if err != nil {
			return nil, err
		}
		return &endedOutput{EndedSessions{n}}, nil
	})
}

func (s *service) listSessions(ctx context.Context, in *sessionsInput) (*sessionsOutput, error) {
	p, out := access.From(ctx), &sessionsOutput{}
	out.Body.Sessions = []Session{}
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
		out.Body.Sessions = append(out.Body.Sessions, Session{
			ID: one.ID, Name: one.Name, Via: one.Via, Address: one.Address, Agent: one.Agent, CreatedAt: one.CreatedAt, SeenAt: one.SeenAt, ExpiresAt: one.ExpiresAt, Current: one.ID == p.Session,
		})
	}
	return out, nil
}

// endSessions ends sessions and returns their number.
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
