package api

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/policy/policytest"
)

func TestPolicy_ShowsOnlyWhatConcernsTheScope(t *testing.T) {
	t.Parallel()
	p := policytest.Load(t, policytest.Files{
		"retry-policies": `queues:
  pay_eu: {destination: bank}
  pay_us: {destination: bank}
  mailqueue: {destination: mailer}
destinations: {bank: {url: "http://bank.example"}, mailer: {url: "http://mailer.example"}}
data: {sensitivePaths: [payload.hidden]}
`,
		"dlq-routing": `rules:
- {name: everywhere, match: {status: 503}, class: outage}
- {name: both, match: {queue: [pay_eu, mailqueue]}, tags: [test]}
- {name: other, match: {queue: mailqueue}, tags: [test]}
queues: {pay_eu: {smartRetry: true}, mailqueue: {smartRetry: true}}
kinds: {user.mail: {maxRetries: 1}}
`,
		"monitoring": "queues: {pay_eu: {maxOpen: 7}, mailqueue: {maxOpen: 7}}\n",
		"access":     "sessions: {idle: 1h}\n",
	})
	for name, test := range map[string]struct {
		scope         access.Scope
		rules         []string
		shown, hidden []string // texts that the answer must contain, and must not contain
	}{
		"everywhere": {
			nil,
			[]string{"everywhere", "both", "other"},
			[]string{
				"queues.mailqueue.timeout", "destinations.mailer.url", "kinds.user.mail", "sessions.idle",
				"payload.hidden",
			},
			nil,
		},
		"queues that share a destination": {
			access.Scope{{Queues: []string{"pay*"}}},
			[]string{"everywhere", "both"},
			[]string{
				"queues.pay_eu.timeout", "queues.pay_us.timeout", "queues.pay_eu.maxOpen", "queues.pay_eu.smartRetry",
				"http://bank.example", "classes.outage.strategy",
			},
			[]string{"mail", "sessions", "payload.hidden"},
		},
		"one of them": {
			access.Scope{{Queues: []string{"pay_us"}}},
			[]string{"everywhere"},
			[]string{"queues.pay_us.timeout"},
			[]string{"mail", "pay_eu", "bank.example", "sessions", "payload.hidden"},
		},
		"some kinds": {
			access.Scope{{Queues: []string{"mailqueue"}, Kinds: []string{"order.*"}}},
			[]string{"everywhere"},
			[]string{"classes.outage.strategy"},
			[]string{"mail", "pay_", "bank.example", "sessions", "payload.hidden"},
		},
	} {
		out := policyInForce(p, test.scope)
		var rules []string
		for _, rule := range out.Rules {
			rules = append(rules, rule.Name)
		}
		require.Equal(t, test.rules, rules, name)
		raw, err := json.Marshal(out)
		require.NoError(t, err)
		for _, text := range test.shown {
			require.Contains(t, string(raw), text, name)
		}
		for _, text := range test.hidden {
			require.NotContains(t, string(raw), text, name)
		}
	}
}
