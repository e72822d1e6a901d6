package cause_test

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/cause"
)

func TestAnswer_Cause(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		status int
		body   string
		want   cause.Cause
	}{
		{
			402,
			`{"error": "card declined", "code": "INSUFFICIENT_FUNDS"}`,
			cause.Cause{Code: "INSUFFICIENT_FUNDS", Message: "card declined"},
		},
		{
			409,
			`{"type": "https://bank.example/declined", "title": "Declined", "status": 409, "detail": ` +
				`"balance is 30"}`,
			cause.Cause{Type: "https://bank.example/declined", Title: "Declined", Message: "balance is 30"},
		},
		{400, `{"type": "about:blank", "title": "Bad Request", "detail": "no amount"}`, cause.Cause{Message: "no amount"}},
		{
			402,
			`{"error": {"type": "card_error", "code": "card_declined", "decline_code": "lost_card", ` +
				`"message": "Your card was declined."}}`,
			cause.Cause{Type: "card_error", Code: "lost_card", Message: "Your card was declined."},
		},
		{
			403,
			`{"error": {"code": 403, "message": "API off", "status": "PERMISSION_DENIED", "details": ` +
				`[{"@type": "x", "reason": "SERVICE_DISABLED"}]}}`,
			cause.Cause{Code: "SERVICE_DISABLED", Message: "API off"},
		},
		{
			404,
			`{"error": {"code": 404, "message": "no such order", "status": "NOT_FOUND"}}`,
			cause.Cause{Code: "", Message: "no such order"},
		},
		{
			400,
			`{"error": "invalid_grant", "error_description": "Token expired."}`,
			cause.Cause{Code: "invalid_grant", Message: "Token expired."},
		},
		{
			400,
			`[{"message": "Required fields are missing: [Name]", "errorCode": "REQUIRED_FIELD_MISSING", ` +
				`"fields": ["Name"]}]`,
			cause.Cause{Code: "REQUIRED_FIELD_MISSING", Message: "Required fields are missing: [Name]"},
		},
		{
			422,
			`{"errors": [{"status": "422", "code": "7F-1", "title": "Too long", "detail": "name has 300 ` +
				`characters"}]}`,
			cause.Cause{Code: "7F-1", Title: "Too long", Message: "name has 300 characters"},
		},
		{
			422,
			`{"status": 422, "errorCode": "167", "message": "Required field 'reference'", "errorType": ` +
				`"validation_error"}`,
			cause.Cause{Type: "validation_error", Code: "167", Message: "Required field 'reference'"},
		},
		{
			500,
			`{"timestamp": "2026-11-23T08:00:00Z", "status": 500, "error": "Internal Server Error", ` +
				`"message": "stock is negative", "path": "/orders/81"}`,
			cause.Cause{Message: "stock is negative"},
		},
		{
			422,
			`{"name": "UNPROCESSABLE_ENTITY", "details": [{"issue": "INSTRUMENT_DECLINED", "description": ` +
				`"The card was refused."}], "message": "The action could not be performed.", "debug_id": "x81"}`,
			cause.Cause{Code: "INSTRUMENT_DECLINED", Message: "The action could not be performed."},
		},
		{
			404,
			`{"error": {"root_cause": [{"type": "x"}], "type": "index_not_found_exception", "reason": "no ` +
				`such index [orders]"}, "status": 404}`,
			cause.Cause{Type: "index_not_found_exception", Message: "no such index [orders]"},
		},
		{
			422,
			`{"detail": [{"loc": ["body", "email"], "msg": "field required", "type": "value_error.missing"}]}`,
			cause.Cause{Type: "value_error.missing", Message: "field required"},
		},
		{400, `{"email": ["This field is required."]}`, cause.Cause{Message: "email: This field is required."}},
		{
			400,
			`{"jsonrpc": "2.0", "error": {"code": -32601, "message": "Method not found"}, "id": 1}`,
			cause.Cause{Code: "-32601", Message: "Method not found"},
		},
		{400, `"no amount"`, cause.Cause{Message: "no amount"}},
		{
			502,
			`{"errorMessage": "{\"message\": \"no stock\", \"code\": \"NO_STOCK\"}"}`,
			cause.Cause{Code: "NO_STOCK", Message: "no stock"},
		},
		{500, `{"code": "11112222-3333-4444-5555-666677778888", "message": "broken"}`, cause.Cause{Message: "broken"}},
		{500, `{"error": "Error", "type": "error", "message": "broken"}`, cause.Cause{Message: "broken"}},
		{502, `{"error": true}`, cause.Cause{}},
		{
			500,
			`<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>` +
				`<s:Fault><faultcode>s:Client.NoFunds</faultcode><faultstring>No funds</faultstring></s:Fault>` +
				`</s:Body></s:Envelope>`,
			cause.Cause{Code: "s:Client.NoFunds", Message: "No funds"},
		},
		{
			500,
			`<s:Envelope xmlns:s="http://www.w3.org/2003/05/soap-envelope"><s:Body><s:Fault><s:Code>` +
				`<s:Value>s:Sender</s:Value><s:Subcode><s:Value>m:NoFunds</s:Value></s:Subcode></s:Code>` +
				`<s:Reason><s:Text xml:lang="en">No funds</s:Text></s:Reason></s:Fault></s:Body></s:Envelope>`,
			cause.Cause{Code: "m:NoFunds", Message: "No funds"},
		},
		{
			404,
			`<?xml version="1.0" encoding="UTF-8"?><Error><Code>NoSuchKey</Code><Message>The key does not ` +
				`exist.</Message><RequestId>4442587FB7D0A2F9</RequestId></Error>`,
			cause.Cause{Code: "NoSuchKey", Message: "The key does not exist."},
		},
		{
			400,
			`<ErrorResponse xmlns="http://sns.amazonaws.com/doc/"><Error><Type>Sender</Type><Code>Throttling` +
				`</Code><Message>Rate exceeded</Message></Error><RequestId>x</RequestId></ErrorResponse>`,
			cause.Cause{Code: "Throttling", Message: "Rate exceeded"},
		},
		{400, `<error code="E_7" message="no amount"/>`, cause.Cause{Code: "E_7", Message: "no amount"}},
		{
			500,
			`<!DOCTYPE html><html><head><title>OrderNotFound at /orders/81</title></head><body><h1>x</h1>` +
				`</body></html>`,
			cause.Cause{Title: "OrderNotFound at /orders/81"},
		},
		{
			502,
			"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n" +
				"<body><center><h1>502 Bad Gateway</h1></center><hr><center>nginx/1.25</center></body></html>",
			cause.Cause{},
		},
		{
			500,
			`<html><head><title>Error</title><style>p {}</style></head><body><h1>The pool is ` +
				`&quot;exhausted&quot;</h1><script>x</script></body></html>`,
			cause.Cause{Title: `The pool is "exhausted"`},
		},
		{503, "  upstream\n\tis  down ", cause.Cause{Message: "upstream is down"}},
		{500, "Internal Server Error", cause.Cause{}},
		{500, "", cause.Cause{}},
		{500, "\xEF\xBB\xBF{\"message\": \"broken\"}", cause.Cause{Message: "broken"}},
		{500, "{\"message\": \"a\\u0000b \xff\"}", cause.Cause{Message: "a\uFFFDb \uFFFD"}},
		{500, `{"code": "NO_STOCK", "message": "cut o`, cause.Cause{Code: "NO_STOCK"}},
		{500, `<Error><Code>NoStock</Code><Message>cut o`, cause.Cause{Code: "NoStock", Message: "cut o"}},
	} {
		answer := cause.Answer{Status: test.status, Body: []byte(test.body)}
		if got := answer.Cause(); got != test.want {
			t.Errorf("%s\n got %#v\nwant %#v", test.body, got, test.want)
		}
	}
}

func TestAnswer_PathsExtendBuiltInPaths(t *testing.T) {
	t.Parallel()
	answer := cause.Answer{
		Status: 422,
		Body: []byte(`{"code": "GENERAL", "outcome": {"reason_text": "no stock", "kinds": [{"Number": 7}]}, ` +
			`"message": "see outcome"}`),
		Paths: cause.Paths{Code: []string{"outcome.kinds[].number"}, Message: []string{"absent", "$.outcome.reasonText"}},
	}
	require.Equal(t, cause.Cause{Code: "7", Message: "no stock"}, answer.Cause())
	answer.Body = []byte(`<answer><outcome><reasonText>no stock</reasonText>` +
		`<kinds><number>8</number></kinds></outcome></answer>`)
	require.Equal(t, cause.Cause{Code: "8", Message: "no stock"}, answer.Cause())
}

// Secrets are hidden before a text is cut, because a cut could leave half a secret, which Hide would not recognize.
func TestAnswer_HidesBeforeTruncating(t *testing.T) {
	t.Parallel()
	secret := "4111111111111111"
	for at := cause.MaxShown - 20; at < cause.MaxShown; at++ {
		text := strings.Repeat("x", at) + secret
		for _, body := range []string{
			text, `{"message": "` + text + `"}`, `{"title": "` + text + `"}`,
			`<e><message>` + text + `</message></e>`, `<html><title>` + text,
		} {
			answer := cause.Answer{Status: 500, Body: []byte(body), Hide: func(text string) string {
				return strings.ReplaceAll(text, secret, "***")
			}}
			got := answer.Cause()
			require.NotContains(t, got.String(), "411")
			require.LessOrEqual(t, len(got.String()), cause.MaxShown)
		}
	}
}

func TestCause_String(t *testing.T) {
	t.Parallel()
	for want, got := range map[string]cause.Cause{
		"":                        {},
		"NO":                      {Code: "NO"},
		"Declined: no funds (51)": {Code: "51", Title: "Declined", Message: "no funds"},
		"code 51":                 {Code: "51", Message: "code 51"},
		"balance of 510 (51)":     {Code: "51", Message: "balance of 510"},
		"NO_STOCK (NO)":           {Code: "NO", Message: "NO_STOCK"},
	} {
		require.Equal(t, want, got.String())
	}
	got := cause.Cause{Code: "NO_FUNDS", Message: strings.Repeat("x", 400) + " NO_FUNDS"}
	require.True(t, strings.HasSuffix(got.String(), "… (NO_FUNDS)"), "the code follows a truncated message")
	got = cause.Cause{
		Code: strings.Repeat("C", 200), Title: strings.Repeat("ä", 150), Message: strings.Repeat("ö", 150),
	}
	require.LessOrEqual(t, len(got.String()), cause.MaxShown)
	require.True(t, utf8.ValidString(got.String()))
}

// hostile lists bodies that are broken, or expensive to read.
func hostile() map[string]string {
	const size = cause.MaxBytes
	return map[string]string{
		"deep arrays":  strings.Repeat("[", size),
		"deep objects": strings.Repeat(`{"a":`, size/5),
		"many keys":    "{" + strings.Repeat(`"a":1,`, size/6),
		"different keys": func() string {
			var b strings.Builder
			for i := range 6000 {
				fmt.Fprintf(&b, `"k%d":"v",`, i)
			}
			return "{" + b.String()
		}(),
		"endless text": `{"message": "` + strings.Repeat("x", size),
		"deep XML":     strings.Repeat("<a>", size/3),
		"entities": `<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]><x>` +
			strings.Repeat("&b;", size/3),
		"attributes":    "<a " + strings.Repeat(`b="c" `, size/6),
		"deep HTML":     "<html>" + strings.Repeat("<div>", size/5),
		"endless title": "<html><title>" + strings.Repeat("x ", size/2),
		"NUL":           strings.Repeat("\x00", size),
		"not UTF-8":     strings.Repeat("\xff\xc0", size/2),
		"blanks":        strings.Repeat(" ", size),
		"escapes":       `{"message":"` + strings.Repeat(`\ud800`, size/6),
	}
}

func TestAnswer_AcceptsHostileBodies(t *testing.T) {
	t.Parallel()
	for _, body := range hostile() {
		answer := cause.Answer{Status: 500, Body: []byte(body)}
		check(t, answer.Cause())
	}
}

func BenchmarkAnswer_HostileBodies(b *testing.B) {
	for name, body := range hostile() {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			answer := cause.Answer{Status: 500, Body: []byte(body)}
			for b.Loop() {
				answer.Cause()
			}
		})
	}
}

func check(t *testing.T, got cause.Cause) {
	t.Helper()
	for _, text := range []string{got.Type, got.Code, got.Title, got.Message, got.String()} {
		require.LessOrEqual(t, len(text), cause.MaxShown)
		require.True(t, utf8.ValidString(text), "%q", text)
		require.NotContains(t, text, "\x00")
		require.NotContains(t, text, "\n")
	}
}

func FuzzAnswer(f *testing.F) {
	for _, body := range hostile() {
		f.Add(500, body[:min(len(body), 2000)])
	}
	f.Add(402, `{"error": {"code": 7, "errors": [{"reason": "x"}]}}`)
	f.Add(404, `<a b="c"><d>e</d></a>`)
	f.Add(500, `<html><title>x</title>`)
	f.Fuzz(func(t *testing.T, status int, body string) {
		answer := cause.Answer{Status: status, Body: []byte(body), Paths: cause.Paths{Code: []string{"a.b"}}}
		check(t, answer.Cause())
	})
}
