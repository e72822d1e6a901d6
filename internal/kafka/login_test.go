package kafka

import (
	"context"
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/dlqd/dlqd/internal/policy"
)

// first returns the first message of a login.
func first(t *testing.T, s policy.SASL) (string, error) {
	t.Helper()
	mechanism, err := login(s, policy.TLS{})
	require.NoError(t, err)
	require.Equal(t, "OAUTHBEARER", mechanism.Name())
	_, message, err := mechanism.Authenticate(t.Context(), "kafka")
	return string(message), err
}

// kfake does not support OAUTHBEARER, so this test checks only the message that is sent (RFC 7628, section 3.1).
func TestLogin_SendsTokens(t *testing.T) {
	t.Parallel()
	s := policy.SASL{Mechanism: "OAUTHBEARER", Password: "token-of-a-file"}
	sent, err := first(t, s)
	require.NoError(t, err)
	require.Equal(t, "n,,\x01auth=Bearer token-of-a-file\x01\x01", sent)

	issued := 0
	idp := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id, secret, _ := r.BasicAuth()
		w.Header().Set("Content-Type", "application/json")
		if secret != "s3cret" {
			w.WriteHeader(http.StatusUnauthorized)
			_ = json.NewEncoder(w).Encode(map[string]string{
				"error": "invalid_client", "error_description": "no client has the secret " + secret,
			})
			return
		}
		issued++
		_ = json.NewEncoder(w).Encode(map[string]any{
			"access_token": strings.Join([]string{id, r.FormValue("grant_type"), r.FormValue("scope")}, "/"),
			"token_type":   "Bearer", "expires_in": 3600,
		})
	}))
	t.Cleanup(idp.Close)
	s = policy.SASL{
		Mechanism: "OAUTHBEARER", TokenURL: idp.URL, Username: "dlqd", Password: "s3cret",
		Scopes: policy.Words{"kafka", "dlq"},
	}
	mechanism, err := login(s, policy.TLS{})
	require.NoError(t, err)
	for range 3 {
		_, message, err := mechanism.Authenticate(t.Context(), "kafka")
		require.NoError(t, err)
		require.Equal(t, "n,,\x01auth=Bearer dlqd/client_credentials/kafka dlq\x01\x01", string(message))
	}
	require.Equal(t, 1, issued, "a token is used until it expires")

	s.Password = "wr0ng"
	_, err = first(t, s)
	require.ErrorContains(t, err, "issues no token: 401 Unauthorized invalid_client")
	require.NotContains(t, err.Error(), "wr0ng")

	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Location", idp.URL)
		w.WriteHeader(http.StatusTemporaryRedirect)
	}))
	t.Cleanup(elsewhere.Close)
	s.Password, s.TokenURL = "s3cret", elsewhere.URL
	_, err = first(t, s)
	require.ErrorContains(t, err, "307")
}

// An identity provider is trusted if its certificate is signed by the authority of the brokers, and not if it is signed
// by an unknown authority.
func TestLogin_TrustsTheAuthorityOfTheCluster(t *testing.T) {
	t.Parallel()
	idp := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"access_token": "t", "token_type": "Bearer"})
	}))
	t.Cleanup(idp.Close)
	idp.Config.ErrorLog = log.New(io.Discard, "", 0)
	s := policy.SASL{Mechanism: "OAUTHBEARER", TokenURL: idp.URL, Username: "dlqd", Password: "s3cret"}
	_, err := first(t, s)
	require.ErrorContains(t, err, "certificate")
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: idp.Certificate().Raw})
	mechanism, err := login(s, policy.TLS{Enabled: true, CA: policy.Secret(ca)})
	require.NoError(t, err)
	_, message, err := mechanism.Authenticate(t.Context(), "kafka")
	require.NoError(t, err)
	require.Equal(t, "n,,\x01auth=Bearer t\x01\x01", string(message))
	_, err = login(s, policy.TLS{CA: "none"})
	require.ErrorIs(t, err, errNoCertificate)
}

// A cluster that does not know the mechanism refuses the login. The error does not contain the token.
func TestLogin_HidesTokens(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(1, "dlq.a"), kfake.EnableSASL(), kfake.Superuser("PLAIN", "root", "r"))
	b.policy.Sources.Clusters["main"].SASL = policy.SASL{Mechanism: "OAUTHBEARER", Password: "token-of-a-file"}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err := b.broker(t).Groups(ctx, "main", []string{"dlq.a"})
	require.Error(t, err)
	require.NotContains(t, err.Error(), "token-of-a-file")
}
