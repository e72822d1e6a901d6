package policy_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
)

func load(t *testing.T, text string) (*policy.Policy, error) {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, policy.FileName), []byte(text), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "bank.secret"), []byte("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n"), 0o600))
	return policy.Load(dir)
}

func TestLoad(t *testing.T) {
	t.Parallel()
	p, err := load(t, `
queues:
  payments: {maxAttempts: 5, backoff: 3s, timeout: 2m, concurrency: 7, destination: bank, deadLetterLogicalFailures: true}
  orders: {destination: bank}
destinations:
  bank: {url: "https://bank.example/hook", secretFile: bank.secret}
`)
	require.NoError(t, err)
	require.Equal(t, []string{"orders", "payments"}, p.QueueNames())
	q := p.Queues["payments"]
	require.Equal(t, policy.Queue{Name: "payments", MaxAttempts: 5, Backoff: 3 * time.Second, Timeout: 2 * time.Minute, Concurrency: 7, Destination: "bank", DeadLetterLogicalFailures: true}, *q)
	require.Equal(t, policy.DefaultMaxAttempts, p.Queues["orders"].MaxAttempts)
	require.Equal(t, 2*time.Minute, p.MaxTimeout())
	require.NotNil(t, p.Destinations["bank"].Signer())
	for _, format := range []string{"%v", "%+v", "%#v", "%s"} {
		require.NotContains(t, fmt.Sprintf(format, *p.Destinations["bank"]), "MfKQ", "a secret does not print")
	}
}

func TestLoad_bad(t *testing.T) {
	t.Parallel()
	for text, says := range map[string]string{
		"queues: [":                                              "retry-policies.yaml",
		"{}":                                                     "queues: there is none",
		"queues: {a: {attempts: 3}}":                             "attempts",
		"queues: {a: {maxAttempts: many}}":                       "maxAttempts",
		"queues: {a: {maxAttempts: 5000}}":                       "queues.a.maxAttempts: is 5000; must be 1 to 1000",
		"queues: {a: {timeout: 2h}}":                             "queues.a.timeout: is 2h0m0s; must be 1ms to 1h0m0s",
		"queues: {a: {backoff: soon}}":                           "backoff",
		"queues: {a: {destination: b}}":                          `queues.a.destination: there is no destination "b"`,
		"queues: {'A b': {}}":                                    "queues.A b: a queue's name",
		"destinations: {d: {url: 'ftp://x'}}":                    "destinations.d.url: must be an http or https URL",
		"destinations: {d: {}}":                                  "destinations.d.url: is required",
		"destinations: {d: {url: 'http://x', secret: '!'}}":      "destinations.d.secret: must be base64",
		"destinations: {d: {url: 'http://x', secretFile: gone}}": "destinations.d.secretFile:",
	} {
		_, err := load(t, text)
		require.ErrorContains(t, err, says, text)
	}
	_, err := policy.Load(t.TempDir())
	require.ErrorContains(t, err, policy.FileName)
}

func TestVersion_changesWithThePolicy(t *testing.T) {
	t.Parallel()
	a, err := policy.Default("http://a/")
	require.NoError(t, err)
	again, err := policy.Default("http://a/")
	require.NoError(t, err)
	b, err := policy.Default("http://b/")
	require.NoError(t, err)
	require.Equal(t, a.Version(), again.Version())
	require.NotEqual(t, a.Version(), b.Version())
}
