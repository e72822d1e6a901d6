package policy_test

import (
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
)

const (
	currentSecret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
	formerSecret  = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
)

// withSecretFile loads a policy whose destination d has a secret file with the given content.
func withSecretFile(t *testing.T, content string) (*policy.Policy, error) {
	t.Helper()
	dir := policytest.Dir(t, policytest.Files{
		"retry-policies": "queues: {a: {destination: d}}\ndestinations:\n  d: {url: 'http://d.example', " +
			"secretFile: d.secret}\n",
	})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "d.secret"), []byte(content), 0o600))
	return policy.Load(policy.Source{Dir: dir})
}

// accepts reports whether a receiver that knows only the given secret accepts a delivery with the signature.
func accepts(t *testing.T, secret, signature string, at time.Time, body []byte) bool {
	t.Helper()
	webhook, err := standardwebhooks.NewWebhook(secret)
	require.NoError(t, err)
	headers := http.Header{}
	headers.Set(standardwebhooks.HeaderWebhookID, "msg-1")
	headers.Set(standardwebhooks.HeaderWebhookTimestamp, strconv.FormatInt(at.Unix(), 10))
	headers.Set(standardwebhooks.HeaderWebhookSignature, signature)
	return webhook.Verify(body, headers) == nil
}

func TestSigner_SignsWithEachSecret(t *testing.T) {
	t.Parallel()
	body, at := []byte(`{"amount": 4200}`), time.Now()
	for name, test := range map[string]struct {
		content         string
		current, former bool
	}{
		"the former alone":        {formerSecret + "\n", false, true},
		"both":                    {currentSecret + "\n" + formerSecret + "\n", true, true},
		"both, as Windows writes": {currentSecret + "\r\n" + formerSecret + "\r\n", true, true},
		"the current alone":       {currentSecret, true, false},
		"without a prefix":        {strings.TrimPrefix(currentSecret, "whsec_"), true, false},
	} {
		p, err := withSecretFile(t, test.content)
		require.NoError(t, err, name)
		signature, err := p.Destinations["d"].Signer()("msg-1", at, body)
		require.NoError(t, err, name)
		require.Equal(t, test.current, accepts(t, currentSecret, signature, at, body), name)
		require.Equal(t, test.former, accepts(t, formerSecret, signature, at, body), name)
	}
}

func TestSecrets_OfAFileAreChecked(t *testing.T) {
	t.Parallel()
	const wrapped = "c2lnbmluZy1rZXktb2YtNDgtYnl0ZXMtdGhhdC1vcGVuc3NsLXdyYXBwZWQtaW50\n" +
		"c2lnbmluZy1rZXktb2YtNDgtYnl0ZXMtdGhhdC1vcGVuc3NsLXdyYXBwZWQtaW50"
	for name, test := range map[string]struct{ content, problem string }{
		"three": {
			currentSecret + "\n" + formerSecret + "\n" + currentSecret,
			"has 3 lines; must have one secret, or two during a rotation: the new one, then the former one",
		},
		"an empty line": {currentSecret + "\n\n" + formerSecret, "line 2 is empty; remove it"},
		"too short":     {currentSecret + "\nwhsec_QUFBQQ==", "line 2 has 4 bytes; must have at least 24"},
		"not base64":    {currentSecret + "\nwhsec_!!", "line 2 must be base64"},
		"a wrapped key": {wrapped, "line 1 must begin with whsec_, as each of two secrets does"},
	} {
		_, err := withSecretFile(t, test.content)
		require.ErrorContains(t, err, "retry-policies.yaml:3: destinations.d.secretFile: ", name)
		require.ErrorContains(t, err, "d.secret: "+test.problem, name)
		for line := range strings.Lines(test.content) {
			if line = strings.TrimSpace(line); line != "" {
				require.NotContains(t, err.Error(), line, name)
			}
		}
	}
}

func TestDestination_HidesEachSecret(t *testing.T) {
	t.Parallel()
	p, err := withSecretFile(t, currentSecret+"\n"+formerSecret+"\n")
	require.NoError(t, err)
	hidden := p.Destinations["d"].Hide("signed with " + currentSecret + " and " +
		strings.TrimPrefix(formerSecret, "whsec_"))
	require.Equal(t, "signed with whsec_*** and ***", hidden)
}
