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

	State string `json:"state" doc:"active, revoked, expired, or \"until\" and the time at which a rotated token becomes invalid."`
}

// NewToken describes a token to create.
type NewToken struct {
	Name    string   `json:"name" minLength:"1" maxLength:"255" doc:"Name of the holder: the actor in the audit trail." example:"ci"`
	Role    string   `json:"role" enum:"reader,operator,admin,sender,metrics" doc:"Role of the holder."`
	Queues  []string `json:"queues,omitempty" maxItems:"100" doc:"Only queues that match; * stands for any text."`
	Kinds   []string `json:"kinds,omitempty" maxItems:"100" doc:"Only kinds that match."`
	Sources []string `json:"sources,omitempty" maxItems:"100" doc:"Role sender: only sources that match."`
	Note    string   `json:"note,omitempty" maxLength:"10000" doc:"Purpose of the token."`
	Expires string   `json:"expires,omitempty" doc:"How long the token is valid, such as 30d, at most ten years; 90 days if absent." example:"30d"`
}

// MadeToken is a token with its secret.
type MadeToken struct {
	Token

	Secret string `json:"secret" doc:"The token, to be sent as \"Authorization: Bearer …\". It is shown only in this response."`
}

// TokensOutputBody lists tokens.
type TokensOutputBody struct {
	Tokens []Token `json:"tokens" doc:"Tokens, oldest first, including expired and revoked ones."`
}

// NewTokenInput is a request to create a token.
type NewTokenInput struct{ Body NewToken }

// RevokeTokenInput is a request to revoke a token.
type RevokeTokenInput struct {
	ID   string `path:"id" format:"uuid" doc:"Id of the token."`
	Note string `query:"note" maxLength:"10000" doc:"Reason, for the audit trail."`
}

// RevokedOutputBody names the revoked token.
type RevokedOutputBody struct {
	Revoked string `json:"revoked" doc:"Id of the revoked token."`
}

// Operations on tokens.
var (
	ListTokens  = Operation[None, TokensOutputBody]{"list-tokens", http.MethodGet, TokensPath}
	CreateToken = Operation[NewTokenInput, MadeToken]{"create-token", http.MethodPost, TokensPath}
	RevokeToken = Operation[RevokeTokenInput, RevokedOutputBody]{
		"revoke-token", http.MethodDelete, TokensPath + "/{id}",
	}
)

func (s *service) registerTokens(api huma.API) {
	tags := []string{"tokens"}
	at := time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC)
	shown := Token{Token: access.Token{
		ID: entryExample, Name: "ci", Role: access.Sender, Queues: []string{"payments*"},
		CreatedBy: "kim", CreatedAt: at, ExpiresAt: new(at.Add(defaultTokenLife)),
	}, State: "active"}
	list := huma.Operation{
		Tags: tags, Summary: "List tokens, without their secrets", Errors: []int{503},
	}
	example(&list, http.StatusOK, map[string]any{"tokens": []Token{shown}})
	register(s, api, ListTokens, list, func(ctx context.Context, _ *None) (*TokensOutputBody, error) {
		tokens, err := s.Access.Tokens.List(ctx)
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		out := &TokensOutputBody{make([]Token, len(tokens))}
		for i := range tokens {
			out.Tokens[i] = Token{tokens[i], tokens[i].State(time.Now())}
		}
		return out, nil
	})

	create := huma.Operation{
		Tags: tags, Summary: "Create a token", DefaultStatus: http.StatusCreated,
		Description: "The secret is only in this response: the database stores a hash. The creator of a token cannot " +
			"approve requests of its holder. If the policy requires approvals, only \"dlqd tokens create\" creates tokens " +
			"of operators and admins; this answers 403.",
		Errors: []int{400, 403, 422, 503},
	}
	example(&create, http.StatusCreated, MadeToken{shown, "dlqd_…"})
	register(s, api, CreateToken, create, s.createToken)

	revoke := huma.Operation{
		Tags: tags, Summary: "Revoke a token",
		Description: "Every process rejects the token within five seconds.", Errors: []int{404, 422, 503},
	}
	example(&revoke, http.StatusOK, map[string]string{"revoked": entryExample})
	register(s, api, RevokeToken, revoke, func(ctx context.Context, in *RevokeTokenInput) (*RevokedOutputBody, error) {
		err := s.Access.Tokens.From(deadletter.Origin(ctx)).Revoke(ctx, in.ID, (*Action)(nil).person(ctx).Actor, in.Note)
		if errors.Is(err, access.ErrNoToken) {
			return nil, huma.Error404NotFound(err.Error())
		}
		if err != nil {
			return nil, s.problem(ctx, err)
		}
		return &RevokedOutputBody{in.ID}, nil
	})
}

func (s *service) createToken(ctx context.Context, in *NewTokenInput) (*MadeToken, error) {
	b, life := in.Body, defaultTokenLife
	if access.Role(b.Role).Includes(access.Operator) && len(s.Planner().Policy().Access.Approvals.Rules) > 0 {
		return nil, huma.Error403Forbidden("the policy requires approvals (access.yaml: approvals), and the creator of two " +
			"tokens could request and approve: create tokens of operators and admins with \"dlqd tokens create\", " +
			"which writes to the database directly")
	}
	if b.Expires != "" {
		var err error
		if life, err = policy.ParseDuration(b.Expires); err != nil || life <= 0 || life > maxTokenLife {
			return nil, huma.Error422UnprocessableEntity("invalid duration", &huma.ErrorDetail{
				Location: "body.expires", Message: "must be a duration such as 12h or 30d, at most ten years", Value: b.Expires,
			})
		}
	}
	token := access.Token{
		Name: b.Name, Role: access.Role(b.Role), Queues: b.Queues, Kinds: b.Kinds,
		Sources: b.Sources, Note: b.Note, ExpiresAt: new(time.Now().Add(life)),
	}
	if err := token.Check(); err != nil {
		return nil, huma.Error422UnprocessableEntity(err.Error())
	}
	secret, err := s.Access.Tokens.From(deadletter.Origin(ctx)).Create(ctx, &token, (*Action)(nil).person(ctx).Actor)
	if err != nil {
		return nil, s.problem(ctx, err)
	}
	return &MadeToken{Token{token, token.State(time.Now())}, secret}, nil
}
