package policy

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/dlqd/dlqd/internal/access"
)

// Access is access.yaml: how callers of the API are identified, and what they may do.
type Access struct {
	Authentication []string `json:"authentication" jsonschema:"enum=tokens,enum=socket,enum=proxy,enum=oidc,enum=certificates,description=How the API identifies callers: tokens (dlqd tokens)\\, socket (operating system users on a Unix socket)\\, proxy (headers of a proxy)\\, oidc (tokens of an OpenID Connect provider\\, see dlqd login)\\, certificates (client certificates\\, see serve --tls-client-ca). Empty: no authentication\\, and dlqd listens only on this machine."`
	Proxy          Proxy    `json:"proxy"          jsonschema:"description=A proxy that authenticates users."`
	OIDC           OIDC     `json:"oidc"           jsonschema:"description=An OpenID Connect provider that authenticates users."`
	Grants         []Grant  `json:"grants"         jsonschema:"description=Roles of users. A user has every grant that names them. Tokens have their own roles."`
	Sessions       Sessions `json:"sessions"       jsonschema:"description=How long users stay signed in with a browser."`
	// Approvals configures the operations that require a second person.
	Approvals   Approvals `json:"approvals"   jsonschema:"description=Operations that require a second person's approval."`
	ExpectAbove int64     `json:"expectAbove" jsonschema:"minimum=0,description=Replays\\, bulk operations and erasures of more dead letters than this must state the expected number (expect in the API; the command line asks for it)."`
}

// Sessions configures how long users stay signed in with a browser.
type Sessions struct {
	Idle     time.Duration `json:"idle"     jsonschema:"description=Maximum time without a request; 5m to 30d."`
	Absolute time.Duration `json:"absolute" jsonschema:"description=Maximum time since the sign-in; 5m to 30d."`
}

// Approvals configures the operations that require approval by a second person, who must also have the role for the
// operation.
type Approvals struct {
	Expire time.Duration  `json:"expire" jsonschema:"description=How long a request waits for approval; 1m to 30d."`
	Rules  []ApprovalRule `json:"rules"  jsonschema:"description=Operations that require approval. Empty: none."`
}

// ApprovalRule says which operations require an approval.
type ApprovalRule struct {
	Operations []string `json:"operations" jsonschema:"required,minItems=1,enum=replay,enum=patch,enum=redirect,enum=discard,enum=resolve,enum=purge,enum=erase,enum=export,description=Operations that the rule applies to. replay includes unpark\\, after which dlqd redelivers immediately. discard includes expire. patch is a replay with another payload. redirect is a replay to another queue or destination."`
	Queues     []string `json:"queues"     jsonschema:"description=Patterns of queue names; * matches any text. Empty: every queue."`
	Above      int64    `json:"above"      jsonschema:"minimum=0,description=The rule applies to operations on more dead letters of these queues than this. 0: to every operation."`
}

// Published returns the approval rules as JSON for dlq.require_approval in the database.
func (a Approvals) Published() (json.RawMessage, error) {
	type rule struct {
		Operations []string `json:"operations"`
		Queues     []string `json:"queues,omitempty"`
		Above      int64    `json:"above"`
	}
	rules := make([]rule, len(a.Rules))
	for i, r := range a.Rules {
		rules[i] = rule(r)
	}
	return json.Marshal(map[string]any{"rules": rules, "seconds": a.Expire.Seconds()})
}

// Proxy is a proxy in front of dlqd that signs users in.
type Proxy struct {
	From         []string `json:"from"         jsonschema:"description=Addresses or networks (10.0.0.0/8) of the proxy\\, or unix for the Unix socket. dlqd ignores the headers of requests from elsewhere."`
	UserHeader   string   `json:"userHeader"   jsonschema:"minLength=1,description=Header with the user's name."`
	GroupsHeader string   `json:"groupsHeader" jsonschema:"minLength=1,description=Header with the user's groups\\, separated by commas."`
}

// OIDC is an OpenID Connect provider that signs users in.
type OIDC struct {
	Issuer           string   `json:"issuer"        jsonschema:"description=URL of the provider\\, as in the tokens' iss claim: https\\, or http on this machine."`
	ClientID         string   `json:"clientID"      jsonschema:"description=Client id of dlqd at the provider. For dlqd login\\, a public client (PKCE) that may redirect to http://127.0.0.1 on any port; for browsers\\, to /sign-in/callback."`
	Audience         Words    `json:"audience"      jsonschema:"description=Accepted audiences of tokens: one or a list\\, of which a token must have one. Empty: the clientID."`
	UsernameClaim    string   `json:"usernameClaim" jsonschema:"description=Claim with the user's name. Empty: the email if it is verified\\, otherwise sub."`
	GroupsClaim      string   `json:"groupsClaim"   jsonschema:"minLength=1,description=Claim with the user's groups."`
	Scopes           []string `json:"scopes"        jsonschema:"description=Scopes that dlqd requests. With offline_access\\, dlqd login can renew its tokens."`
	ClientSecretFile string   `json:"clientSecretFile" jsonschema:"description=File with the client secret for sign-in with a browser\\, if the provider requires one: an absolute path\\, or relative to the policy's directory."`
	ClientSecret     Secret   `json:"-"` // content of ClientSecretFile
}

// Grant gives a role to users, within queues, kinds and sources.
type Grant struct {
	Users        []string `json:"users"   jsonschema:"description=User names at the proxy or the OpenID Connect provider."`
	Groups       []string `json:"groups"  jsonschema:"description=Groups at the proxy or the OpenID Connect provider."`
	OSUsers      []string `json:"osUsers" jsonschema:"description=Operating system users on the Unix socket."`
	Certificates []string `json:"certificates" jsonschema:"description=Names in client certificates: the common name\\, or a subject alternative name (DNS\\, email or URI)."`
	Role         string   `json:"role"    jsonschema:"required,enum=reader,enum=operator,enum=admin,enum=sender,enum=metrics,description=Role that the grant gives; see docs/security.md."`
	Queues       []string `json:"queues"  jsonschema:"description=Patterns of queues that the role applies to; * matches any text. Empty: every queue."`
	Kinds        []string `json:"kinds"   jsonschema:"description=Patterns of kinds that the role applies to. Empty: every kind."`
	Sources      []string `json:"sources" jsonschema:"description=Patterns of sources that a sender may submit as. Empty: every source."`
}

// Access converts the grant to package access.
func (g Grant) Access() access.Grant {
	return access.Grant{Role: access.Role(g.Role), Queues: g.Queues, Kinds: g.Kinds, Sources: g.Sources}
}

// Networks returns the addresses from which the proxy connects, and whether it connects by the Unix socket.
func (p Proxy) Networks() (networks []netip.Prefix, socket bool, err error) {
	for _, from := range p.From {
		if from == "unix" {
			socket = true
			continue
		}
		network, err := netip.ParsePrefix(from)
		if err != nil {
			address, err := netip.ParseAddr(from)
			if err != nil {
				return nil, false, fmt.Errorf("%q is not an address, a network (such as 10.0.0.0/8) or unix", from)
			}
			network = netip.PrefixFrom(address, address.BitLen())
		}
		networks = append(networks, network.Masked())
	}
	return networks, socket, nil
}

// minSession is the shortest permitted session limit. dlqd records the last use of a session only once a minute.
const minSession = 5 * time.Minute

func (l *loader) checkAccess() {
	const file = "access"
	a := &l.policy.Access
	if _, _, err := a.Proxy.Networks(); err != nil {
		l.addf(file, "proxy.from", "%w", err)
	}
	for _, method := range a.Authentication {
		switch {
		case method == access.ViaProxy && len(a.Proxy.From) == 0:
			l.addf(file, "authentication", "proxy requires proxy.from: dlqd trusts headers only from these addresses")
		case method == access.ViaOIDC && (a.OIDC.Issuer == "" || a.OIDC.ClientID == ""):
			l.addf(file, "authentication", "oidc requires oidc.issuer, the provider's URL, and oidc.clientID, dlqd's client "+
				"id there")
		}
	}
	if a.OIDC.Issuer != "" {
		if err := access.CheckProviderURL(a.OIDC.Issuer); err != nil {
			l.addf(file, "oidc.issuer", "%w", err)
		}
	}
	if slices.Contains(a.OIDC.Audience, "") {
		l.addf(file, "oidc.audience", "contains an empty audience")
	}
	if !slices.Contains(a.OIDC.Scopes, "openid") {
		l.addf(file, "oidc.scopes", "must contain openid; without it the provider returns no ID token")
	}
	if a.OIDC.ClientSecretFile != "" {
		a.OIDC.ClientSecret = Secret(l.readSecret(file, "oidc.clientSecretFile", a.OIDC.ClientSecretFile))
	}
	l.checkRange(file, "sessions.idle", a.Sessions.Idle, minSession, maxDelay)
	l.checkRange(file, "sessions.absolute", a.Sessions.Absolute, minSession, maxDelay)
	l.checkRange(file, "approvals.expire", a.Approvals.Expire, time.Minute, maxDelay)
	if len(a.Approvals.Rules) > 0 && len(a.Authentication) == 0 {
		l.addf(file, "approvals.rules", "approvals require authentication, which identifies the second person")
	}
	for i, r := range a.Approvals.Rules {
		for _, pattern := range r.Queues {
			if pattern == "" || len(pattern) > 255 {
				l.addf(file, fmt.Sprintf("approvals.rules[%d].queues", i),
					"%q is not a pattern (1 to 255 characters; * matches any text)", pattern)
			}
		}
	}
	for i, g := range a.Grants {
		at := fmt.Sprintf("grants[%d]", i)
		if len(g.Users)+len(g.Groups)+len(g.OSUsers)+len(g.Certificates) == 0 {
			l.addf(file, at, "names no users: set users, groups, osUsers or certificates")
		}
		if err := access.CheckGrant(g.Access()); err != nil {
			l.addf(file, at, "%w", err)
		}
	}
}

// Rules converts the effective configuration to package access.
func (a *Access) Rules() access.Rules {
	networks, socket, _ := a.Proxy.Networks() // checked when the policy was loaded
	rules := access.Rules{
		Ways: a.Authentication,
		Proxy: access.Proxy{
			From: networks, Socket: socket, UserHeader: a.Proxy.UserHeader, GroupsHeader: a.Proxy.GroupsHeader,
		},
		OIDC: access.OIDC{
			Issuer: a.OIDC.Issuer, ClientID: a.OIDC.ClientID, Audiences: a.OIDC.Audience,
			UsernameClaim: a.OIDC.UsernameClaim, GroupsClaim: a.OIDC.GroupsClaim, Scopes: a.OIDC.Scopes,
			ClientSecret: string(a.OIDC.ClientSecret),
		},
		Sessions: access.SessionLimits{Idle: a.Sessions.Idle, Absolute: a.Sessions.Absolute},
	}
	if len(rules.OIDC.Audiences) == 0 {
		rules.OIDC.Audiences = []string{a.OIDC.ClientID}
	}
	for _, g := range a.Grants {
		rules.Grants = append(rules.Grants, access.UserGrant{
			Grant: g.Access(), Users: g.Users, Groups: g.Groups, OSUsers: g.OSUsers, Certificates: g.Certificates,
		})
	}
	return rules
}
