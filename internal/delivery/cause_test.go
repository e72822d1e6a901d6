package delivery_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
)

func TestDeliver_RecordsTheCause(t *testing.T) {
	t.Parallel()
	url := answering(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusPaymentRequired)
		_, _ = io.WriteString(w, `{"error": "card declined", "code": "INSUFFICIENT_FUNDS"}`)
	})
	job := setup(t, url, "maxAttempts: 1").deliver("", rivertype.JobStateCancelled, rivertype.JobStateDiscarded)
	s := structuredOf(t, job)
	require.Equal(t, "402 Payment Required: card declined (INSUFFICIENT_FUNDS)", s.Message, "the message has no URL")
	require.Equal(t, "INSUFFICIENT_FUNDS", s.Code)
	require.Equal(t, "HTTP_402", s.Type)
	require.Equal(t, "default", s.Context["destination"])
	require.Contains(t, s.Context["url"], "http://127.0.0.1:")
}

// An answer whose body never ends or breaks off is still a failure by its status. The cause is read from the part of
// the body that arrived.
func TestDeliver_RecordsCauseOfTruncatedAnswer(t *testing.T) {
	t.Parallel()
	for name, write := range map[string]func(w http.ResponseWriter, r *http.Request){
		"endless": func(w http.ResponseWriter, r *http.Request) {
			for r.Context().Err() == nil {
				if _, err := io.WriteString(w, strings.Repeat("x", 4096)); err != nil {
					return
				}
			}
		},
		"stalled": func(w http.ResponseWriter, r *http.Request) {
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		},
		"aborted": func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := answering(t, func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(http.StatusUnprocessableEntity)
				_, _ = io.WriteString(w, `{"code": "NO_STOCK", "message": "no stock", "more": "`)
				w.(http.Flusher).Flush()
				write(w, r)
			})
			s := structuredOf(t, setup(t, url, "timeout: 1s").deliver("", rivertype.JobStateCancelled))
			require.Equal(t, "422 Unprocessable Entity: no stock (NO_STOCK)", s.Message)
			require.EqualValues(t, 422, s.Context["status"])
		})
	}
}

// Headers of an answer are truncated as its body is. If the code is the status, the message does not repeat it.
func TestFailureOf_TruncatesErrorHeaders(t *testing.T) {
	t.Parallel()
	const body = `{"title": "Card declined", "detail": "insufficient funds"}`
	long := strings.Repeat("x", 100_000)
	for _, test := range []struct {
		errorType, code, body      string
		wantType, wantCode, wanted string
	}{
		{"", "409", body, "HTTP_409", "409", "409 Conflict: Card declined: insufficient funds"},
		{"", "409", `{"code": "NO_FUNDS"}`, "HTTP_409", "NO_FUNDS", "409 Conflict: NO_FUNDS"},
		{"CardDeclined", "51", body, "CardDeclined", "51", "409 Conflict: Card declined: insufficient funds (51)"},
		{long, long, "", long[:197] + "…", long[:197] + "…", "409 Conflict: " + long[:197] + "…"},
	} {
		headers := map[string]string{"X-Error-Type": test.errorType, "X-Error-Code": test.code}
		facts, err := delivery.FailureOf(t.Context(), &policy.Data{}, &policy.Queue{Timeout: time.Second},
			&policy.Destination{URL: "https://bank.example/"}, &message.Message{MessageID: "m"},
			&delivery.Answer{Status: 409, Headers: headers, Body: test.body})
		require.NoError(t, err)
		require.Equal(t, test.wantType, facts.Type)
		require.Equal(t, test.wantCode, facts.Code)
		require.Equal(t, test.wanted, facts.Message)
	}
}

// A receiver repeats a value with the escaping of its own encoder. Values are masked although dlqd does not decode the
// answer's body.
func TestFailureOf_MasksEscapedValues(t *testing.T) {
	t.Parallel()
	data := &policy.Data{SensitivePaths: []string{"payload.name"}}
	m := &message.Message{MessageID: "m", Payload: json.RawMessage(`{"name": "Zoë \"O'Neill\" <z>"}`)}
	for _, text := range []string{
		`Zoë \"O'Neill\" <z>`,                 // in JSON
		`Zo\u00eb \"O'Neill\" <z>`,            // in JSON by Python
		`Zo\u00EB \"O'Neill\" <z>`,            // the same with upper-case digits
		`Zoë \"O'Neill\" \u003cz\u003e`,       // in JSON by Go
		`Zoë &#34;O&#39;Neill&#34; &lt;z&gt;`, // in HTML
	} {
		answer := &delivery.Answer{Status: 402, Body: "{\"error\": \"" + text + " is unknown\"}"}
		queue, destination := &policy.Queue{Timeout: time.Second}, &policy.Destination{URL: "https://bank.example/"}
		facts, err := delivery.FailureOf(t.Context(), data, queue, destination, m, answer)
		require.NoError(t, err)
		recorded := facts.Message + string(facts.Context)
		require.Contains(t, recorded, "is unknown")
		require.NotContains(t, recorded, "Neill", text)
	}
}

// No recorded text contains a value that the policy masks, or a part of it, wherever the text is truncated.
func TestFailureOf_MasksBeforeTruncating(t *testing.T) {
	t.Parallel()
	const card, name, token = "4111111111111111", "Ann Smith", "sk_live_abcdefgh1234"
	data := &policy.Data{
		SensitivePaths:    []string{"payload..name", "headers.x-key"},
		SensitivePatterns: []string{policy.PatternCardNumbers, policy.PatternTokens},
	}
	m := &message.Message{
		MessageID: "m", Queue: "default", Headers: map[string]string{"X-Key": "open sesame"},
		Payload: json.RawMessage(`{"customer": {"name": "` + name + `"}}`),
	}
	destination := &policy.Destination{Name: "bank", URL: "https://user:passw0rd@bank.example/T0ken81/x"}
	for _, before := range []int{0, 270, 280, 290, 295, 2030, 2040} {
		secrets := []string{card, name, token, "open sesame", "passw0rd", "T0ken81"}
		text := strings.Repeat("x", before) + " " + strings.Join(secrets, " ")
		for contentType, body := range map[string]string{
			"text/plain":               text,
			"application/json":         fmt.Sprintf(`{"message": %q, "code": "NO", "title": %q}`, text, name+" declined"),
			"application/problem+json": fmt.Sprintf(`{"title": %q, "detail": %q}`, text, text),
			"text/xml":                 "<e><code>NO</code><message>" + text + "</message></e>",
			"text/html":                "<html><title>" + text + "</title></html>",
		} {
			headers := map[string]string{"Content-Type": contentType, "X-Error-Type": "T0ken81"}
			answer := &delivery.Answer{Status: 402, Headers: headers, Body: body}
			facts, err := delivery.FailureOf(t.Context(), data, &policy.Queue{Timeout: time.Second}, destination, m, answer)
			require.NoError(t, err)
			recorded := strings.Join([]string{facts.Type, facts.Code, facts.Title, facts.Message, string(facts.Context)}, "\n")
			for _, secret := range append(secrets, "4111", "Ann", "sk_live", "open", "passw", "T0k") {
				require.NotContains(t, recorded, secret, contentType)
			}
			require.LessOrEqual(t, len(facts.Message), 300+len("402 Payment Required: "))
		}
	}
}
