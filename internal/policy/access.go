package policy

import (
	"fmt"
	"net/netip"

	"github.com/dlqd/dlqd/internal/access"
)

// Access is access.yaml: how callers of the API are known, and what they may do.
type Access struct {
	Authentication []string `json:"authentication" jsonschema:"enum=tokens,enum=socket,enum=proxy,description=How callers are known: by tokens (dlqd tokens)\\, as operating system users on a Unix socket\\, by what a proxy says of them; none: nobody is asked\\, and dlqd listens where only the machine's own users are."`
	Proxy          Proxy    `json:"proxy"          jsonschema:"description=A proxy that has users sign in."`
	Grants         []Grant  `json:"grants"         jsonschema:"description=What users may do\\, of all grants that name them. Tokens have their own."`
}

// Proxy is a proxy before dlqd that has users sign in.
type Proxy struct {
	From         []string `json:"from"         jsonschema:"description=Addresses of the proxy\\, or networks (10.0.0.0/8): from others the headers are not believed; unix for the Unix socket."`
	UserHeader   string   `json:"userHeader"   jsonschema:"minLength=1,description=Header with the user's name."`
	GroupsHeader string   `json:"groupsHeader" jsonschema:"minLength=1,description=Header with the user's groups\\, with commas between."`
}

// Grant is what users may do.
type Grant struct {
	Users   []string `json:"users"   jsonschema:"description=Names by which the proxy knows them."`
	Groups  []string `json:"groups"  jsonschema:"description=Groups of theirs\\, as the proxy says."`
	OSUsers []string `json:"osUsers" jsonschema:"description=Users of the operating system\\, on the Unix socket."`
	Role    string   `json:"role"    jsonschema:"required,enum=reader,enum=operator,enum=admin,enum=sender,enum=metrics,description=What they may do: docs/security.md."`
	Queues  []string `json:"queues"  jsonschema:"description=Patterns of queues in which they may; * stands for any text; none: every queue."`
	Kinds   []string `json:"kinds"   jsonschema:"description=Patterns of kinds for which they may; none: every kind."`
	Sources []string `json:"sources" jsonschema:"description=Patterns of sources as which senders may submit; none: every source."`
}

// Access is the grant as package access has it.
func (g Grant) Access() access.Grant {
	return access.Grant{Role: access.Role(g.Role), Queues: g.Queues, Kinds: g.Kinds, Sources: g.Sources}
}

// Networks are where the proxy is.
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

func (l *loader) checkAccess() {
	const file = "access"
	a := &l.policy.Access
	if _, _, err := a.Proxy.Networks(); err != nil {
		l.badf(file, "proxy.from", "%w", err)
	}
	for _, way := range a.Authentication {
		if way == "proxy" && len(a.Proxy.From) == 0 {
			l.badf(file, "authentication", "say in proxy.from where the proxy is: its headers are believed from there alone")
		}
	}
	for i, g := range a.Grants {
		at := fmt.Sprintf("grants[%d]", i)
		if len(g.Users)+len(g.Groups)+len(g.OSUsers) == 0 {
			l.badf(file, at, "names nobody: users, groups or osUsers")
		}
		if err := access.CheckGrant(g.Access()); err != nil {
			l.badf(file, at, "%w", err)
		}
	}
}

// Rules are what is in force, as package access has it.
func (a *Access) Rules() access.Rules {
	networks, socket, _ := a.Proxy.Networks() // checked
	rules := access.Rules{Ways: a.Authentication, Proxy: access.Proxy{From: networks, Socket: socket, UserHeader: a.Proxy.UserHeader, GroupsHeader: a.Proxy.GroupsHeader}}
	for _, g := range a.Grants {
		rules.Grants = append(rules.Grants, access.UserGrant{Grant: g.Access(), Users: g.Users, Groups: g.Groups, OSUsers: g.OSUsers})
	}
	return rules
}
