package console

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/policy"
)

// accessInterval is the render interval of an open access page.
const accessInterval = 30 * time.Second

type accessPage struct {
	Sentence string
	Me       api.Caller
	Sessions []api.Session
	Admin    bool           // whether the viewer manages tokens and sees the sessions of all users
	Why      string         // why the viewer may not see tokens and grants; "" if Admin is true
	Grants   []policy.Grant // of the policy
	Ways     []string       // ways of authentication that the policy permits
	Tokens   []api.Token
	Made     *madeToken // the token that the previous request created; its secret is shown once; nil if there is none
	Roles    []roleWords
	Copies   []copyText
}

// roleWords describes what a role may do.
type roleWords struct{ Role, May string }

func rolesInWords() []roleWords {
	return []roleWords{
		{"reader", "sees dead letters without sensitive data, the audit trail and analytics"},
		{"operator", "also sees payloads, moves and replays dead letters, and controls replay runs, breakers and queues"},
		{"admin", "also erases data, switches capture, manages tokens and runs the checks"},
		{"sender", "only submits messages"},
		{"metrics", "only reads metrics and health"},
	}
}

// whereInWords describes the scope of a grant.
func whereInWords(queues, kinds, sources []string) string {
	var parts []string
	for _, w := range []struct {
		what     string
		patterns []string
	}{{"queues", queues}, {"kinds", kinds}, {"sources", sources}} {
		if len(w.patterns) > 0 {
			parts = append(parts, w.what+" "+strings.Join(w.patterns, ", "))
		}
	}
	if len(parts) == 0 {
		return "everywhere"
	}
	return "in " + strings.Join(parts, "; ")
}

// noRole is the page for a caller without a role that may read dead letters.
type noRole struct {
	*access.Principal

	From  string   // what sends the caller's groups: a provider or a proxy; "" if this caller can have no groups
	Shown []string // the first maxGroups groups
	More  int      // number of groups that are not shown
}

// maxGroups limits the groups on the page: a provider may send hundreds.
const maxGroups = 50

func (c *Console) noRole(in *request, v *view) *view {
	p := in.me()
	n := &noRole{Principal: p, Shown: p.Groups[:min(len(p.Groups), maxGroups)]}
	n.More = len(p.Groups) - len(n.Shown)
	rules := c.Policy().Access
	switch p.Via {
	case access.ViaOIDC:
		n.From = "the OpenID Connect provider (claim " + rules.OIDC.GroupsClaim + ")"
	case access.ViaProxy:
		n.From = "the proxy (header " + rules.Proxy.GroupsHeader + ")"
	}
	v.Template, v.Data = "norole", n
	return v
}

func (c *Console) access(in *request) (*view, error) {
	a := &accessPage{
		Admin: in.me().MayEverywhere(access.Admin), Why: missingRoleIn(in.me(), access.Admin, ""), Roles: rolesInWords(),
		Copies: copies("dlqd whoami; dlqd sessions", "", in.curl(api.Whoami.Path, api.ListSessions.Path)),
	}
	if a.Admin {
		a.Copies = copies("dlqd whoami; dlqd sessions; dlqd tokens list", "",
			in.curl(api.Whoami.Path, api.ListSessions.Path, api.ListTokens.Path))
	}
	me, err := call(in, api.Whoami, api.None{})
	if err != nil {
		return nil, err
	}
	sessions, _, err := callIfAllowed(in, api.ListSessions, api.SessionsInput{})
	if err != nil {
		return nil, err
	}
	a.Me, a.Sessions = *me, sessions.Sessions
	if a.Admin {
		tokens, _, err := callIfAllowed(in, api.ListTokens, api.None{})
		if err != nil {
			return nil, err
		}
		a.Tokens = tokens.Tokens
		rules := c.Policy().Access
		a.Grants, a.Ways = rules.Grants, rules.Authentication
	}
	a.Sentence = a.summary()
	v := &view{Template: "access", Title: "Access", Data: a, Interval: accessInterval}
	if a.Made = a.made(in.Request); a.Made != nil {
		v.Secret = true
		v.Interval = 0 // not live: the next rendering would remove the secret from the page
	}
	return v, nil
}

func (a *accessPage) summary() string {
	if a.Me.Via == access.ViaNothing {
		return "Authentication is off: only users of this machine can connect, and they may do everything. To turn it on, " +
			"set authentication in access.yaml."
	}
	via := map[string]string{
		"token": "by a token", "socket": "as a user of this machine", "proxy": "by the proxy",
		"oidc": "by the OpenID Connect provider", "certificate": "by a certificate",
	}[a.Me.Via]
	if len(a.Me.Grants) == 0 {
		return "You are " + a.Me.Name + ", authenticated " + via + ", and have no role."
	}
	var roles []string
	for _, g := range a.Me.Grants {
		roles = append(roles, string(g.Role)+" "+whereInWords(g.Queues, g.Kinds, g.Sources))
	}
	return "You are " + a.Me.Name + ", authenticated " + via + ": " + strings.Join(roles, "; ") + "."
}

// endSessions ends the session with the given id, or all sessions of the viewer if the form has no
// id.
func (c *Console) endSessions(in *request) (*done, error) {
	note := in.PostFormValue("note")
	if id := in.PostFormValue("id"); id != "" {
		if _, err := call(in, api.EndSession, api.EndSessionInput{ID: id, Note: note}); err != nil {
			return nil, err
		}
		return &done{
			To: "/access#sessions", Flash: flash{Text: "The session has ended. Every process refuses it within five seconds."},
		}, nil
	}
	ended, err := call(in, api.EndAllSessions, api.EndAllSessionsInput{Body: &api.EndSessions{Note: note}})
	if err != nil {
		return nil, err
	}
	return &done{
		To: "/access#sessions", Flash: flash{Text: plural(ended.Ended, "session has", "sessions have") + " ended."},
	}, nil
}

// changeTokens creates a token and shows its secret once, or revokes a token.
func (c *Console) changeTokens(in *request) (*done, error) {
	if id := in.PostFormValue("revoke"); id != "" {
		if _, err := call(in, api.RevokeToken, api.RevokeTokenInput{ID: id, Note: in.PostFormValue("note")}); err != nil {
			return nil, err
		}
		return &done{
			To: "/access#tokens", Flash: flash{Text: "The token is revoked. Every process refuses it within five seconds."},
		}, nil
	}
	patterns := func(name string) []string {
		return strings.FieldsFunc(in.PostFormValue(name), func(r rune) bool { return r == ',' || r == ' ' || r == '\n' })
	}
	made, err := call(in, api.CreateToken, api.NewTokenInput{Body: api.NewToken{
		Name: in.PostFormValue("name"), Role: in.PostFormValue("role"), Note: in.PostFormValue("note"),
		Queues: patterns("queues"), Kinds: patterns("kinds"), Sources: patterns("sources"),
		Expires: strings.TrimSpace(in.PostFormValue("expires")),
	}})
	if err != nil {
		return nil, err
	}
	return &done{To: "/access", Made: &madeToken{ID: made.ID, Secret: made.Secret}}, nil
}

// madeToken is a new token. A cookie takes the secret to the page that shows it. That page deletes the cookie, so that
// a reload neither shows the secret nor creates another token. A cookie is used because another process than the one
// that created the token may serve the page.
type madeToken struct {
	ID     string `json:"i"`
	Secret string `json:"s"`

	Token api.Token `json:"-"`
}

const (
	madeCookie = "-made"
	// madeFor limits how long the cookie stays if the browser does not load the page.
	madeFor = time.Minute
)

func (m *madeToken) keep(w http.ResponseWriter, r *http.Request) {
	raw, err := json.Marshal(m) //nolint:gosec // its user sees the secret
	if err == nil {             // always nil
		access.SetCookie(w, r, madeCookie, base64.RawURLEncoding.EncodeToString(raw), madeFor)
	}
}

// made returns the new token whose cookie the request has. It returns nil if there is no such cookie, or if the list of
// tokens lacks that token.
func (a *accessPage) made(r *http.Request) *madeToken {
	var m madeToken
	raw, err := base64.RawURLEncoding.DecodeString(access.Cookie(r, madeCookie))
	if err != nil || json.Unmarshal(raw, &m) != nil {
		return nil
	}
	for i := range a.Tokens {
		if m.Token = a.Tokens[i]; m.Token.ID == m.ID {
			return &m
		}
	}
	return nil
}
