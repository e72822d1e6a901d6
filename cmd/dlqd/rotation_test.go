package main_test

import (
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestRotation_RefusesNoMessage rotates a destination's secret while messages are delivered. At any time, the receiver
// knows only one secret.
func TestRotation_RefusesNoMessage(t *testing.T) {
	t.Parallel()
	const former, current = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
	knowing := func(secret string) *standardwebhooks.Webhook {
		webhook, err := standardwebhooks.NewWebhook(secret)
		require.NoError(t, err)
		return webhook
	}
	var verifier atomic.Pointer[standardwebhooks.Webhook]
	verifier.Store(knowing(former))
	var submitted, accepted, refused, signatures atomic.Int64
	receiver := startReceiver(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if err := verifier.Load().Verify(body, r.Header); err != nil {
			refused.Add(1)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		accepted.Add(1)
		signatures.Store(int64(len(strings.Fields(r.Header.Get("Webhook-Signature")))))
	})
	// Only one delivery runs at a time. So after a delivery with two signatures, no delivery with one signature is
	// running.
	dir := policytest.Dir(t, policytest.Files{
		"retry-policies": "queues: {default: {destination: d, maxAttempts: 1}}\ndestinations: {d: {url: \"" + receiver +
			"\", secretFile: d.secret}}\n",
		"worker-pool": "queues: {default: {concurrency: 1}}\n",
	})
	write := func(secrets ...string) {
		path := filepath.Join(dir, "d.secret")
		require.NoError(t, os.WriteFile(path+".new", []byte(strings.Join(secrets, "\n")+"\n"), 0o600))
		require.NoError(t, os.Rename(path+".new", path))
	}
	write(former)
	s := serve(t, "--database-url", postgrestest.URL(t), "--config-dir", dir)
	// sendUntil submits messages until the log contains text and the last delivery had count signatures.
	sendUntil := func(text string, count int64) {
		t.Helper()
		require.Eventually(t, func() bool {
			response, err := http.Post(s.api+"/api/messages", "application/json",
				strings.NewReader(`{"queue": "default", "kind": "k", "payload": 1}`))
			if err != nil {
				return false
			}
			_ = response.Body.Close()
			if response.StatusCode == http.StatusAccepted {
				submitted.Add(1)
			}
			return strings.Contains(s.log.String(), text) && signatures.Load() == count
		}, 5*time.Minute, 50*time.Millisecond)
	}
	sendUntil("", 1)
	write(current, former)
	sendUntil(`msg="new signing secret in force" destination=d secrets=2 added=1 path=d.secret`, 2)
	write(current, former, former) // a mistake: the secrets in force do not change
	_, problem, code := run(t, "config", "check", dir)
	require.Equal(t, 1, code)
	require.Contains(t, problem, "retry-policies.yaml:2: destinations.d.secretFile: ")
	require.Contains(t, problem, "has 3 lines")
	sendUntil("reloading the policy failed; the old one stays in force", 2)
	verifier.Store(knowing(current))
	write(current)
	sendUntil(`msg="signing secrets changed" destination=d secrets=1 added=0 path=d.secret`, 1)
	require.Eventually(t, func() bool { return accepted.Load()+refused.Load() == submitted.Load() }, time.Minute,
		50*time.Millisecond)
	require.Zero(t, refused.Load())
	log := s.log.String()
	require.Equal(t, 1, strings.Count(log, "new signing secret in force"))
	for _, secret := range []string{former, current} {
		require.NotContains(t, log+problem, strings.TrimPrefix(secret, "whsec_"))
	}
}
