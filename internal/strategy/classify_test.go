package strategy_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
)

// Common names of errors are recognized in every field that may contain them: 65 samples.
func TestClassify_RecognizesCommonNames(t *testing.T) {
	t.Parallel()
	samples := 0
	check := func(want riverdlq.Class, f strategy.Facts) {
		samples++
		class, rule := strategy.Classify(f)
		require.Equal(t, want, class, "%+v: by rule %s", f, rule)
	}
	for _, word := range []struct {
		name  string
		class riverdlq.Class
	}{
		{"NetworkError", riverdlq.ClassTransient},
		{"TooManyRequests", riverdlq.ClassRateLimited},
		{"429 TooManyRequests", riverdlq.ClassRateLimited},
		{"quota exhausted", riverdlq.ClassRateLimited},
		{"ServiceUnavailable", riverdlq.ClassOutage},
		{"ServiceUnavailableError", riverdlq.ClassOutage},
		{"ModuleUnavailableException", riverdlq.ClassOutage},
		{"Database connection error", riverdlq.ClassOutage},
		{"InsufficientStock", riverdlq.ClassBusiness},
		{"BusinessRuleViolation", riverdlq.ClassBusiness},
		{"ReferenceError", riverdlq.ClassCodeBug},
		{"null pointer", riverdlq.ClassCodeBug},
		{"BadRequestException", riverdlq.ClassValidation},
		{"AuthorizationError", riverdlq.ClassUnauthorized},
	} {
		check(word.class, strategy.Facts{Type: word.name, Message: "order 81 failed"})
		check(word.class, strategy.Facts{Type: "Error", Code: word.name, Message: "order 81 failed"})
		check(word.class, strategy.Facts{Message: word.name})
		check(word.class, strategy.Facts{Message: word.name + ": order 81 of module billing"})
	}
	check(riverdlq.ClassTransient, strategy.Facts{Message: "the worker of order 81 failed with NetworkError"})
	check(riverdlq.ClassRateLimited, strategy.Facts{Message: "the worker of order 81 failed with 429 TooManyRequests"})
	check(riverdlq.ClassOutage, strategy.Facts{Message: "the worker of order 81 failed with ServiceUnavailable"})
	check(riverdlq.ClassBusiness, strategy.Facts{Message: "the worker of order 81 failed with InsufficientStock"})
	for status, class := range map[int]riverdlq.Class{
		402: riverdlq.ClassBusiness, 405: riverdlq.ClassValidation, 413: riverdlq.ClassValidation,
		423: riverdlq.ClassTransient, 425: riverdlq.ClassTransient,
	} {
		check(class, strategy.Facts{Context: fmt.Appendf(nil, `{"status": %d}`, status), Message: "order 81 failed"})
	}
	require.Equal(t, 65, samples)
}

func TestClassify_MatchesWholeWordsOnly(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		want  riverdlq.Class
		facts strategy.Facts
	}{
		{riverdlq.ClassNotFound, strategy.Facts{Type: "FileNotFoundError", Message: "[Errno 2] /srv/in/81.csv"}},
		{riverdlq.ClassNotFound, strategy.Facts{Message: "FileNotFoundError: /srv/in/81.csv"}},
		{riverdlq.ClassNotFound, strategy.Facts{Type: "com.amazonaws.ResourceNotFoundException", Message: "order 81"}},
		{riverdlq.ClassNotFound, strategy.Facts{Message: "jinja2.exceptions.TemplateNotFound: mail.html"}},
		{riverdlq.ClassTransient, strategy.Facts{Message: "getaddrinfo ENOTFOUND api.example"}},
		{riverdlq.ClassValidation, strategy.Facts{Message: "ValidationError: timeout must be positive"}},
		{riverdlq.ClassValidation, strategy.Facts{Type: "ValidationError", Message: "timeout must be positive"}},
		{riverdlq.ClassValidation, strategy.Facts{Message: "the request timeout must be at least 1 s"}},
		{riverdlq.ClassValidation, strategy.Facts{Type: "UnsupportedContentTypeError", Message: "text/csv"}},
		{riverdlq.ClassValidation, strategy.Facts{Message: "UnsupportedContentTypeError: text/csv"}},
		{riverdlq.ClassCodeBug, strategy.Facts{Type: "TypeError", Message: "x is not a function"}},
		{riverdlq.ClassTransient, strategy.Facts{Type: "TypeError", Message: "fetch failed"}},
		{riverdlq.ClassUnknown, strategy.Facts{Message: "the timeouttable of module connectionreset is odd"}},
	} {
		class, rule := strategy.Classify(test.facts)
		require.Equal(t, test.want, class, "%+v: by rule %s", test.facts, rule)
	}
}

// The first step of Classify that recognizes an error decides.
func TestClassify_FirstMatchingStepDecides(t *testing.T) {
	t.Parallel()
	p, err := strategy.NewPlanner(policytest.Load(t, policytest.Files{"dlq-routing": `
rules: [{name: ours, match: {kind: ruled}, class: unknown}]
`}), nil)
	require.NoError(t, err)
	context := func(text string) []byte { return []byte(text) }
	for _, test := range []struct {
		want, rule string
		facts      strategy.Facts
	}{
		{"unknown", "ours", strategy.Facts{Kind: "ruled", Class: "business", Context: context(`{"status": 429}`)}},
		{"business", "worker", strategy.Facts{Class: "business", Context: context(`{"status": 429}`)}},
		{"rate_limited", "http-status", strategy.Facts{Type: "TypeError", Context: context(`{"status": 429}`)}},
		{"outage", "http-status", strategy.Facts{Type: "TypeError", Context: context(`{"status": 503}`)}},
		{"outage", "http-status", strategy.Facts{Type: "TypeError", Context: context(`{"status": 504}`)}},
		{"transient", "http-status", strategy.Facts{
			Type: "TypeError", Context: context(`{"status": 500, "retryAfterSeconds": 5}`),
		}},
		{"rate_limited", "http-status", strategy.Facts{Context: context(`{"status": 403, "retryAfterSeconds": 5}`)}},
		{"rate_limited", "http-status", strategy.Facts{Context: context(`{"status": 400, "retryAfterSeconds": 5}`)}},
		{"transient", "http-status", strategy.Facts{Context: context(`{"status": 500}`), Message: "the card was declined"}},
		{"rate_limited", "http-status", strategy.Facts{Context: context(`{"status": 418, "retryAfterSeconds": 0}`)}},
		{"code_bug", "nil-dereference", strategy.Facts{Type: "TypeError", Context: context(`{"status": 500}`)}},
		{"serialization", "", strategy.Facts{Code: "UNABLE_TO_LOCK_ROW", Context: context(`{"status": 400}`)}},
		{"business", "business", strategy.Facts{Code: "charge_already_refunded", Context: context(`{"status": 400}`)}},
		{"validation", "http-status", strategy.Facts{Type: "Error", Code: "400", Message: "timed out"}},
		{"validation", "http-status", strategy.Facts{Type: "RuntimeError", Code: "422", Message: "connection refused"}},
		{"unauthorized", "grpc-status", strategy.Facts{Message: "rpc error: code = Unauthenticated desc = timed out"}},
		{"outage", "database-down", strategy.Facts{Type: "Error", Code: "57P01", Message: "not found"}},
		{"rate_limited", "rate-limit", strategy.Facts{
			Context: context(`{"status": 403}`), Message: "exceeded quota: staging",
		}},
		{"unknown", "none", strategy.Facts{Type: "Error", Message: "something else"}},
		{"unknown", "none", strategy.Facts{Type: "java.lang.RuntimeException", Message: "something else"}},
		{"unknown", "none", strategy.Facts{Type: "java.lang.Exception"}},
	} {
		class, rule, _ := p.Classify(test.facts)
		if test.rule == "" {
			require.Equal(t, test.want, rule, "%+v", test.facts)
			continue
		}
		require.Equal(t, []string{test.want, test.rule}, []string{string(class), rule}, "%+v", test.facts)
	}
}

// The status 500 says only that a request failed. If the answer names a bug, the message is not sent again.
func TestClassify_Status500ThatNamesABugIsCodeBug(t *testing.T) {
	t.Parallel()
	p := policytest.Load(t, nil)
	planner, err := strategy.NewPlanner(p, nil)
	require.NoError(t, err)
	for _, answer := range []delivery.Answer{
		{Status: 500, Headers: map[string]string{"X-Error-Type": "TypeError"}},
		{Status: 500, Headers: map[string]string{"X-Error-Type": "java.lang.NullPointerException"}, Body: "try again later"},
		{Status: 500, Headers: map[string]string{"X-Error-Code": "ReferenceError"}},
	} {
		destination, m := &policy.Destination{URL: "https://receiver.example/"}, &message.Message{MessageID: "m"}
		facts, err := delivery.FailureOf(t.Context(), &p.Data, &p.Defaults, destination, m, &answer)
		require.NoError(t, err)
		class, _, rule := planner.Classify(facts)
		require.Equal(t, riverdlq.ClassCodeBug, class, "%+v", answer)
		require.True(t, planner.Ends(class, rule), "the job is not run again")
	}
}

// These errors have a transient type, but their text names a rejected certificate or password. So they are
// unauthorized.
func TestClassify_RejectedCredentialsAreUnauthorized(t *testing.T) {
	t.Parallel()
	for _, facts := range []strategy.Facts{
		{Type: "requests.exceptions.ConnectionError", Message: "SSLError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]')"},
		{Type: "PG::ConnectionBad", Message: `FATAL:  password authentication failed for user "app"`},
		{Type: "tonic::Status", Code: "Unavailable", Message: "invalid peer certificate: certificate has expired"},
		{Message: "rpc error: code = Unavailable desc = x509: certificate signed by unknown authority"},
	} {
		class, rule := strategy.Classify(facts)
		require.Equal(t, riverdlq.ClassUnauthorized, class, "%+v: by rule %s", facts, rule)
	}
}

// Codes of other protocols are not HTTP statuses.
func TestClassify_CodesOfOtherProtocolsAreNotHTTPStatuses(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		want  riverdlq.Class
		facts strategy.Facts
	}{
		{riverdlq.ClassNotFound, strategy.Facts{Type: "Net::SMTPFatalError", Code: "550", Message: "mailbox gone"}},
		{riverdlq.ClassUnauthorized, strategy.Facts{
			Type: "smtplib.SMTPSenderRefused", Code: "530", Message: "STARTTLS first",
		}},
		{riverdlq.ClassUnauthorized, strategy.Facts{Type: "Net::FTPPermError", Code: "530", Message: "Login incorrect."}},
		{riverdlq.ClassTransient, strategy.Facts{Message: "450 4.2.0 greylisted"}},
		{riverdlq.ClassUnknown, strategy.Facts{
			Type: "pika.exceptions.ChannelClosedByBroker", Code: "504", Message: "AMQP: 81",
		}},
		{riverdlq.ClassUnknown, strategy.Facts{Code: "550", Message: "81"}},
		{riverdlq.ClassValidation, strategy.Facts{Code: "22001"}},
		{riverdlq.ClassUnknown, strategy.Facts{Code: "21610"}}, // Twilio's
	} {
		class, rule := strategy.Classify(test.facts)
		require.Equal(t, test.want, class, "%+v: by rule %s", test.facts, rule)
	}
}
