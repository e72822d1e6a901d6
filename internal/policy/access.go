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
	Authentication []string `json:"authentication" jsonschema:"enum=tokens,enum=socket,enum=proxy,enum=oidc,enum=certificates,description=How callers are known: by tokens (dlqd tokens)\\, as operating system users on a Unix socket\\, by what a proxy says of them\\, by tokens of an OpenID Connect provider (dlqd login)\\, by certificates of clients (serve --tls-client-ca); none: nobody is asked\\, and dlqd listens where only the machine's own users are."`
	Proxy          Proxy    `json:"proxy"          jsonschema:"description=A proxy that has users sign in."`
	OIDC           OIDC     `json:"oidc"           jsonschema:"description=An OpenID Connect provider that has users sign in."`
	Grants         []Grant  `json:"grants"         jsonschema:"description=What users may do\\, of all grants that name them. Tokens have their own."`
	Sessions       Sessions `json:"sessions"       jsonschema:"description=How long people stay signed in with a browser."`
	// Approvals configures the operations that one person cannot do alone.
	Approvals   Approvals `json:"approvals"   jsonschema:"description=What needs a second person."`
	ExpectAbove int64     `json:"expectAbove" jsonschema:"minimum=0,description=Replays\\, bulk operations and erasures of more dead letters than this say how many they expect (expect in the API; the command line asks)."`
}

// Sessions configures how long users stay signed in with a browser.
type Sessions struct {
	Idle     time.Duration `json:"idle"     jsonschema:"description=Without asking for anything; 5m to 30d."`
	Absolute time.Duration `json:"absolute" jsonschema:"description=At all; 5m to 30d."`
}

// Approvals configures what needs a second person who also has the role for the operation.
type Approvals struct {
	Expire time.Duration  `json:"expire" jsonschema:"description=How long a request waits for one; 1m to 30d."`
	Rules  []ApprovalRule `json:"rules"  jsonschema:"description=What needs one; nothing where there are none."`
}

// ApprovalRule makes operations need an approval.
type ApprovalRule struct {
	Operations []string `json:"operations" jsonschema:"required,minItems=1,enum=replay,enum=patch,enum=redirect,enum=discard,enum=resolve,enum=purge,enum=erase,description=replay: also unparking\\, after which dlqd redelivers at once; patch: a replay with another payload; redirect: a replay to another queue or destination."`
	Queues     []string `json:"queues"     jsonschema:"description=Patterns of queues; * stands for any text; none: every queue."`
	Above      int64    `json:"above"      jsonschema:"minimum=0,description=For more dead letters of these queues than this; 0: for each."`
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
	From         []string `json:"from"         jsonschema:"description=Addresses of the proxy\\, or networks (10.0.0.0/8): from others the headers are not believed; unix for the Unix socket."`
	UserHeader   string   `json:"userHeader"   jsonschema:"minLength=1,description=Header with the user's name."`
	GroupsHeader string   `json:"groupsHeader" jsonschema:"minLength=1,description=Header with the user's groups\\, with commas between."`
}

// OIDC is an OpenID Connect provider that signs users in.
type OIDC struct {
	Issuer           string   `json:"issuer"        jsonschema:"description=The provider\\, as its tokens name it: an https URL\\, or http on this machine."`
	ClientID         string   `json:"clientID"      jsonschema:"description=Client as which dlqd asks: for dlqd login a public one (PKCE)\\, that may be sent back to http://127.0.0.1 on any port; for browsers to /sign-in/callback."`
	Audience         Words    `json:"audience"      jsonschema:"description=Whom tokens must be for\\, one or several of which one will do; the clientID unless said otherwise."`
	UsernameClaim    string   `json:"usernameClaim" jsonschema:"description=Claim by which users are known. Empty: their email if it is verified\\, else sub."`
	GroupsClaim      string   `json:"groupsClaim"   jsonschema:"minLength=1,description=Claim with their groups."`
	Scopes           []string `json:"scopes"        jsonschema:"description=Scopes for which dlqd asks; offline_access has dlqd login stay signed in."`
	ClientSecretFile string   `json:"clientSecretFile" jsonschema:"description=File with the client's secret\\, where the provider gives one\\, beside this file or by its whole path: for sign-in with a browser."`
	ClientSecret     Secret   `json:"-"` // content of ClientSecretFile
}

// Grant gives a role to users, within queues, kinds and sources.
type Grant struct {
	Users        []string `json:"users"   jsonschema:"description=Names by which the proxy\\, or the OpenID Connect provider\\, knows them."`
	Groups       []string `json:"groups"  jsonschema:"description=Groups of theirs\\, as it says."`
	OSUsers      []string `json:"osUsers" jsonschema:"description=Users of the operating system\\, on the Unix socket."`
	Certificates []string `json:"certificates" jsonschema:"description=Names in certificates of clients: the common name\\, or a subject alternative name (DNS\\, email or URI)."`
	Role         string   `json:"role"    jsonschema:"required,enum=reader,enum=operator,enum=admin,enum=sender,enum=metrics,description=What they may do: docs/security.md."`
	Queues       []string `json:"queues"  jsonschema:"description=Patterns of queues in which they may; * stands for any text; none: every queue."`
	Kinds        []string `json:"kinds"   jsonschema:"description=Patterns of kinds for which they may; none: every kind."`
	Sources      []string `json:"sources" jsonschema:"description=Patterns of sources as which senders may submit; none: every source."`
}

// Access converts the grant to package access.
func (g Grant) Access() access.Grant {
	return access.Grant{Role: access.Role(g.Role), Queues: g.Queues, Kinds: g.Kinds, Sources: g.Sources}
}

// Networks returns the addresses of the proxy, and whether it connects by the Unix socket.
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
				return nil, false, fmt.Errorf("%q is no address, no network (10.0.0.0/8) and not unix", from)
			}
			network = netip.PrefixFrom(address, address.BitLen())
		}
		networks = append(networks, network.Masked())
	}
	return networks, socket, nil
}

// minSession is the shortest session limit: the last use of a session is recorded once a minute.
const minSession = 5 * time.Minute

func (l *loader) checkAccess() {
	const file = "access"
	a := &l.policy.Access
	if _, _, err := a.Proxy.Networks(); err != nil {
		l.badf(file, "proxy.from", "%w", err)
	}
	for _, way := range a.Authentication {
		switch {
		case way == access.ViaProxy && len(a.Proxy.From) == 0:
			l.badf(file, "authentication", "say in proxy.from where the proxy is: its headers are believed from there alone")
		case way == access.ViaOIDC && (a.OIDC.Issuer == "" || a.OIDC.ClientID == ""):
			l.badf(file, "authentication", "say in oidc.issuer who the provider is, and in oidc.clientID as whom dlqd login asks it")
		}
	}
	if a.OIDC.Issuer != "" {
		if err := access.CheckProviderURL(a.OIDC.Issuer); err != nil {
			l.badf(file, "oidc.issuer", "%w", err)
		}
	}
	if slices.Contains(a.OIDC.Audience, "") {
		l.badf(file, "oidc.audience", "holds an empty one")
	}
	if !slices.Contains(a.OIDC.Scopes, "openid") {
		l.badf(file, "oidc.scopes", "must hold openid: without it there is no token that says who signed in")
	}
	if a.OIDC.ClientSecretFile != "" {
		a.OIDC.ClientSecret = Secret(l.readSecret(file, "oidc.clientSecretFile", a.OIDC.ClientSecretFile))
	}
	l.checkRange(file, "sessions.idle", a.Sessions.Idle, minSession, maxDelay)
	l.checkRange(file, "sessions.absolute", a.Sessions.Absolute, minSession, maxDelay)
	l.checkRange(file, "approvals.expire", a.Approvals.Expire, time.Minute, maxDelay)
	if len(a.Approvals.Rules) > 0 && len(a.Authentication) == 0 {
		l.badf(file, "approvals.rules", "a second person cannot be told from the first where nobody is asked who they are: say how in authentication")
	}
	for i, r := range a.Approvals.Rules {
		for _, pattern := range r.Queues {
			if pattern == "" || len(pattern) > 255 {
				l.badf(file, fmt.Sprintf("approvals.rules[%d].queues", i), "%q is no pattern: 1 to 255 characters, * stands for any text", pattern)
			}
		}
	}
	for i, g := range a.Grants {
		at := fmt.Sprintf("grants[%d]", i)
		if len(g.Users)+len(g.Groups)+len(g.OSUsers)+len(g.Certificates) == 0 {
			l.badf(file, at, "names nobody: users, groups, osUsers or certificates")
		}
		if err := access.CheckGrant(g.Access()); err != nil {
			l.badf(file, at, "%w", err)
		}
	}
}

// Rules converts the effective configuration to package access.
func (a *Access) Rules() access.Rules {
	networks, socket, _ := a.Proxy.Networks() // checked when the policy was loaded
	rules := access.Rules{
		Ways:  a.Authentication,
		Proxy: access.Proxy{From: networks, Socket: socket, UserHeader: a.Proxy.UserHeader, GroupsHeader: a.Proxy.GroupsHeader},
		OIDC: access.OIDC{
			Issuer: a.OIDC.Issuer, ClientID: a.OIDC.ClientID, Audiences: a.OIDC.Audience, UsernameClaim: a.OIDC.UsernameClaim, GroupsClaim: a.OIDC.GroupsClaim, Scopes: a.OIDC.Scopes,
			ClientSecret: string(a.OIDC.ClientSecret),
		},
		Sessions: access.SessionLimits{Idle: a.Sessions.Idle, Absolute: a.Sessions.Absolute},
	}
	if len(rules.OIDC.Audiences) == 0 {
		rules.OIDC.Audiences = []string{a.OIDC.ClientID}
	}
	for _, g := range a.Grants {
		rules.Grants = append(rules.Grants, access.UserGrant{Grant: g.Access(), Users: g.Users, Groups: g.Groups, OSUsers: g.OSUsers, Certificates: g.Certificates})
	}
	return rules
}
