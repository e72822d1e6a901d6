package api

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/policy"
)

// TokensPath is the path of tokens.
const TokensPath = "/api/tokens"

// defaultTokenLife is how long a token is valid by default.
const defaultTokenLife = 90 * 24 * time.Hour

// maxTokenLife is the maximum lifetime of a token.
const maxTokenLife = 10 * 365 * 24 * time.Hour

// Token is a key to the API, without its secret.
type Token struct {
	access.Token

	State string `json:"state" doc:"active, revoked, expired, or until when one that was rotated is good."`
}

// NewToken describes a token to create.
type NewToken struct {
	Name    string   `json:"name" minLength:"1" maxLength:"255" doc:"Who holds it: the actor in the audit trail." example:"ci"`
	Role    string   `json:"role" enum:"reader,operator,admin,sender,metrics" doc:"What they may do."`
	Queues  []string `json:"queues,omitempty" maxItems:"100" doc:"Only in queues that match; * stands for any text."`
	Kinds   []string `json:"kinds,omitempty" maxItems:"100" doc:"Only for kinds that match."`
	Sources []string `json:"sources,omitempty" maxItems:"100" doc:"A sender: only as sources that match."`
	Note    string   `json:"note,omitempty" maxLength:"10000" doc:"What it is for."`
	Expires string   `json:"expires,omitempty" doc:"How long it is good, such as 30d, at most ten years; 90 days if absent." example:"30d"`
}

// MadeToken is a token with its secret.
type MadeToken struct {
	Token

	Secret string `json:"secret" doc:"What is sent as \"Authorization: Bearer …\": this is the only time that anybody sees it."`
}

type tokensOutput struct {
	Body struct {
		Tokens []Token `json:"tokens" doc:"The oldest first, those included that are good no more."`
	}
}

type newTokenInput struct{ Body NewToken }

type madeTokenOutput struct{ Body MadeToken }

type revokeTokenInput struct {
	ID   string `path:"id" format:"uuid" doc:"The token's id."`
	Note string `query:"note" maxLength:"10000" doc:"Why; kept in the audit trail."`
}

type revokedOutput struct {
	Body struct {
		Revoked string `json:"revoked" doc:"The id of the token."`
	}
}

func (s *service) registerTokens(api huma.API) {
	tags := []string{"tokens"}
	at := time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC)
	shown := Token{Token: access.Token{ID: entryExample, Name: "ci", Role: access.Sender, Queues: []string{"payments*"}, CreatedBy: "kim", CreatedAt: at, ExpiresAt: new(at.Add(defaultTokenLife))}, State: "active"}
	list := huma.Operation{OperationID: "list-tokens", Method: http.MethodGet, Path: TokensPath, Tags: tags, Summary: "List tokens, without their secrets", Errors: []int{503}}
	example(&list, http.StatusOK, map[string]any{"tokens": []Token{shown}})
	huma.Register(api, list, func(ctx context.Context, _ *struct{}) (*tokensOutput, error) {
		tokens, err := s.Access.Tokens.List(ctx)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		out := &tokensOutput{}
		out.Body.Tokens = make([]Token, len(tokens))
		for i := range tokens {
			out.Body.Tokens[i] = Token{tokens[i], tokens[i].State(time.Now())}
		}
		return out, nil
	})

	create := huma.Operation{
		OperationID: "create-token", Method: http.MethodPost, Path: TokensPath, Tags: tags, Summary: "Make a token", DefaultStatus: http.StatusCreated,
		Description: "The secret is in this answer, and nowhere else: the database has a hash of it. Who makes a token cannot approve what its holder asks for; where some things need a second person, those of operators and admins are made by \"dlqd tokens create\" alone (403).", Errors: []int{400, 403, 422, 503},
	}
	example(&create, http.StatusCreated, MadeToken{shown, "dlqd_…"})
	huma.Register(api, create, s.createToken)

	revoke := huma.Operation{
		OperationID: "revoke-token", Method: http.MethodDelete, Path: TokensPath + "/{id}", Tags: tags, Summary: "Revoke a token",
		Description: "Every process refuses it within five seconds.", Errors: []int{404, 422, 503},
	}
	example(&revoke, http.StatusOK, map[string]string{"revoked": entryExample})
	huma.Register(api, revoke, func(ctx context.Context, in *revokeTokenInput) (*revokedOutput, error) {
		err := s.Access.Tokens.From(deadletter.Origin(ctx)).Revoke(ctx, in.ID, (*Action)(nil).person(ctx).Actor, in.Note)
		if errors.Is(err, access.ErrNoToken) {
			return nil, huma.Error404NotFound(err.Error())
		}
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		out := &revokedOutput{}
		out.Body.Revoked = in.ID
		return out, nil
	})
}

func (s *service) createToken(ctx context.Context, in *newTokenInput) (*madeTokenOutput, error) {
	b, life := in.Body, defaultTokenLife
	if access.Role(b.Role).Includes(access.Operator) && len(s.Planner().Policy().Access.Approvals.Rules) > 0 {
		return nil, huma.Error403Forbidden(`some things need a second person here (access.yaml: approvals), and who made two tokens could be both: "dlqd tokens create" makes those of operators and admins, in the database`)
	}
	if b.Expires != "" {
		var err error
		if life, err = policy.ParseDuration(b.Expires); err != nil || life <= 0 || life > maxTokenLife {
			return nil, huma.Error422UnprocessableEntity("invalid duration", &huma.ErrorDetail{Location: "body.expires", Message: "must be a duration such as 12h or 30d, at most ten years", Value: b.Expires})
		}
	}
	token := access.Token{Name: b.Name, Role: access.Role(b.Role), Queues: b.Queues, Kinds: b.Kinds, Sources: b.Sources, Note: b.Note, ExpiresAt: new(time.Now().Add(life))}
	if err := token.Check(); err != nil {
		return nil, huma.Error422UnprocessableEntity(err.Error())
	}
	secret, err := s.Access.Tokens.From(deadletter.Origin(ctx)).Create(ctx, &token, (*Action)(nil).person(ctx).Actor)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &madeTokenOutput{Body: MadeToken{Token{token, token.State(time.Now())}, secret}}, nil
}
