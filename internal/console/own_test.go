package console

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/approval"
)

// TestMayApprove_FollowsRightsAndPeople checks that a request waits only for users who may approve it.
func TestMayApprove_FollowsRightsAndPeople(t *testing.T) {
	t.Parallel()
	person := func(name string, grants ...access.Grant) *access.Principal {
		return &access.Principal{Name: name, Via: access.ViaToken, Grants: grants}
	}
	operator, admin := access.Grant{Role: access.Operator}, access.Grant{Role: access.Admin}
	of := func(grant access.Grant, queue string) access.Grant { grant.Queues = []string{queue}; return grant }
	request := func(operation, raw string) *approval.Approval {
		return &approval.Approval{
			Operation: operation, Request: json.RawMessage(raw), ByQueue: json.RawMessage(`{"payments": 2}`),
			State: approval.Requested, Actor: "pat", OnBehalfOf: new("ann"), TokenBy: new("root"),
			ExpiresAt: time.Now().Add(time.Hour),
		}
	}
	discard := request(approval.Bulk, `{"do": "discard", "filter": {}}`)
	purge := request(approval.Bulk, `{"do": "purge", "filter": {}}`)
	redirect := request(approval.Replay, `{"filter": {}, "toDestination": "other"}`)
	erase := request(approval.Erase, `{"filter": {}}`)
	expired := request(approval.Bulk, `{"do": "discard", "filter": {}}`)
	expired.ExpiresAt = time.Now()
	decided := request(approval.Bulk, `{"do": "discard", "filter": {}}`)
	decided.State = approval.Approved
	ofPat := person("x", operator)
	ofPat.TokenBy = "pat"
	for name, c := range map[string]struct {
		who  *access.Principal
		what *approval.Approval
		may  bool
	}{
		"another operator":                {person("lee", operator), discard, true},
		"an operator of the queue":        {person("lee", of(operator, "payments")), discard, true},
		"the requester":                   {person("PAT", admin), discard, false},
		"the person acted for":            {person("ann", operator), discard, false},
		"the creator of the token":        {person("root", operator), discard, false},
		"a token of the requester":        {ofPat, discard, false},
		"a purge, an operator":            {person("lee", operator), purge, false},
		"a purge, an admin":               {person("lee", admin), purge, true},
		"a purge, an admin of the queue":  {person("lee", of(admin, "pay*"), operator), purge, true},
		"a purge, an admin elsewhere":     {person("lee", of(admin, "mail"), operator), purge, false},
		"an erasure, an admin":            {person("lee", admin), erase, true},
		"an erasure, an admin of a queue": {person("lee", of(admin, "payments")), erase, false},
		"a redirect, an operator":         {person("lee", operator), redirect, true},
		"a redirect, a queue's operator":  {person("lee", of(operator, "payments")), redirect, false},
		"a request that expired":          {person("lee", operator), expired, false},
		"a request that was decided":      {person("lee", operator), decided, false},
	} {
		require.Equal(t, c.may, mayApprove(c.who, c.what), name)
	}
}
