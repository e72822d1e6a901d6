package strategy

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dlqd/dlqd/internal/cause"
)

// answers has answers of receivers by form, with five causes for each form. {n} stands for a name, {a} for an amount,
// {i} for an id.
var answers = map[string][5]string{
	"plain JSON": {
		`{"error": "card of {n} declined", "code": "INSUFFICIENT_FUNDS"}`,
		`{"error": "card of {n} declined", "code": "LOST_CARD"}`,
		`{"message": "{n} may not pay {a}", "code": 4711}`,
		`{"message": "{n} may not pay {a}", "code": "LIMIT_EXCEEDED", "requestId": "{i}"}`,
		`{"error": {"message": "order {i} of {n} is closed", "code": "ORDER_CLOSED"}}`,
	},
	"problem documents": {
		`{"type": "https://bank.example/declined", "title": "Declined", "detail": "{n} has {a}"}`,
		`{"type": "https://bank.example/limit", "title": "Declined", "detail": "{n} has {a}"}`,
		`{"title": "Account is closed", "detail": "{i} of {n}"}`,
		`{"title": "Account is blocked", "detail": "{i} of {n}"}`,
		`{"type": "about:blank", "detail": "order {i} is too late by {a}"}`,
	},
	"faults": {
		`<s:Envelope><s:Body><s:Fault><faultcode>m:NoFunds</faultcode><faultstring>{n} has {a}` +
			`</faultstring></s:Fault></s:Body></s:Envelope>`,
		`<s:Envelope><s:Body><s:Fault><faultcode>m:Blocked</faultcode><faultstring>{n} has {a}` +
			`</faultstring></s:Fault></s:Body></s:Envelope>`,
		`<Error><Code>NoSuchOrder</Code><Message>{i}</Message></Error>`,
		`<s:Envelope><s:Body><s:Fault><faultcode>s:Server</faultcode><faultstring>no stock for {i}` +
			`</faultstring></s:Fault></s:Body></s:Envelope>`,
		`<error><message>"{n}" is unknown</message></error>`,
	},
	"pages": {
		`<html><title>OrderNotFound at /orders/{i}</title><p>{n}`,
		`<html><title>NoStock at /orders/{i}</title><p>{n}`,
		`<html><title>Error</title><h1>The pool is exhausted</h1>{i}`,
		`<html><title>500 Internal Server Error</title><h1>Internal Server Error</h1><p>{a} could not be ` +
			`booked, dear {n}, sorry`,
		`<html><title>Maintenance until {i}</title>`,
	},
	"text": {
		`order {i} is closed`,
		`order {i} is unknown`,
		`no more than {a} a day: user {n}`,
		`Payment of {a} for {n} was declined: no funds`,
		`Payment of {a} for {n} was declined: lost card`,
	},
}

var (
	people = []string{
		"Ann Smith", "Bob Müller", "Jean-Luc Picard", "Zoë O'Neill", "Ada van der Berg", "X. Y. Zed", "Li Wei",
	}
	currencies = []string{"EUR", "USD", "GBP", "CHF"}
)

func TestFingerprint_OneGroupPerCause(t *testing.T) {
	t.Parallel()
	for form, causes := range answers {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			groups := map[string]int{}
			n := 0
			ids := rapid.OneOf(
				rapid.StringMatching(`ord_[0-9a-z]{4}[0-9]`),
				rapid.StringMatching(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`),
				rapid.StringMatching(`[1-9][0-9]{2,8}`),
			)
			made := rapid.Custom(func(t *rapid.T) Failure {
				of := n % len(causes)
				n++
				amount, cents := rapid.IntRange(0, 99999).Draw(t, "amount"), rapid.IntRange(0, 99).Draw(t, "cents")
				body := strings.NewReplacer(
					"{n}", rapid.SampledFrom(people).Draw(t, "name"),
					"{a}", fmt.Sprintf("%d.%02d %s", amount, cents, rapid.SampledFrom(currencies).Draw(t, "currency")),
					"{i}", ids.Draw(t, "id"),
				).Replace(causes[of])
				return failureOf(422, body)
			})
			for i := range 1000 {
				f := made.Example(i)
				of := (n - 1) % len(causes)
				group := Fingerprint(&f)
				require.Len(t, group, digits2)
				before, known := groups[group]
				if known {
					require.Equal(t, before, of, "two causes in one group: %s", f.Message)
				}
				groups[group] = of
				require.LessOrEqual(t, len(groups), len(causes), "one cause in two groups: %q, %q", f.Title, f.Message)
			}
			require.Len(t, groups, len(causes))
		})
	}
}

// failureOf returns the failure that a delivery records for an answer.
func failureOf(status int, body string) Failure {
	answer := cause.Answer{Status: status, Body: []byte(body)}
	found := answer.Cause()
	f := Failure{
		Type: found.Type, Code: found.Code, Title: found.Title,
		Message: fmt.Sprintf("%d Unprocessable Entity: %s", status, found.String()),
	}
	if f.Type == "" {
		f.Type = fmt.Sprintf("HTTP_%d", status)
	}
	if f.Code == "" {
		f.Code = fmt.Sprint(status)
	}
	context, err := json.Marshal(map[string]any{"status": status, "body": body})
	if err != nil {
		panic(err) // strings always marshal
	}
	f.Context = context
	return f
}

// A failure that an earlier version of dlqd recorded is in the same group as one that this version records.
func TestFingerprint_GroupsFailuresOfEarlierVersions(t *testing.T) {
	t.Parallel()
	for form, causes := range answers {
		for _, body := range causes {
			body = strings.NewReplacer("{n}", "Ann Smith", "{a}", "3 EUR", "{i}", "ord_81").Replace(body)
			now := failureOf(422, body)
			context, err := json.Marshal(map[string]any{
				"status": 422, "body": body, "destination": "bank", "url": "https://bank.example/",
			})
			require.NoError(t, err)
			before := Failure{
				Type: "HTTP_422", Code: "422", Context: context,
				Message: "POST https://bank.example/: 422 Unprocessable Entity",
			}
			require.Equal(t, Fingerprint(&now), Fingerprint(&before), "%s: %s", form, body)
		}
	}
	transport := Failure{
		Type: "CONNECTION_REFUSED", Context: json.RawMessage(`{"destination": "bank"}`),
		Message: "dial tcp 10.0.0.1:80: connect: connection refused",
	}
	before := transport
	before.Message = "POST https://bank.example/: " + transport.Message
	require.Equal(t, Fingerprint(&transport), Fingerprint(&before))
}

func TestFingerprint_DistinguishesCauses(t *testing.T) {
	t.Parallel()
	answered := json.RawMessage(`{"status": 402}`)
	for name, test := range map[string]struct {
		a, b Failure
		same bool
	}{
		"same code, messages differ": {
			Failure{Code: "A", Message: "x"},
			Failure{Code: "A", Message: "y"},
			true,
		},
		"codes differ": {
			Failure{Code: "A", Message: "x"},
			Failure{Code: "B", Message: "x"},
			false,
		},
		"same code, types differ": {Failure{Type: "T", Code: "A"}, Failure{Type: "U", Code: "A"}, false},
		"a status is not a code": {
			Failure{Type: "HTTP_402", Code: "402", Message: "x", Context: answered},
			Failure{Type: "HTTP_402", Code: "402", Message: "y", Context: answered},
			false,
		},
		"same type of a receiver, messages differ": {
			Failure{Type: "T", Code: "402", Message: "x", Context: answered},
			Failure{Type: "T", Code: "402", Message: "y", Context: answered},
			true,
		},
		"same type of a worker, messages differ": {
			Failure{Type: "T", Message: "x failed"},
			Failure{Type: "T", Message: "y failed"},
			false,
		},
		"type Error does not name a cause": {
			Failure{Type: "Error", Code: "402", Message: "x", Context: answered},
			Failure{Type: "Error", Code: "402", Message: "y", Context: answered},
			false,
		},
		"same title, details differ": {
			Failure{Title: "Closed", Message: "Closed: x"},
			Failure{Title: "Closed", Message: "Closed: y"},
			true,
		},
		"titles differ": {
			Failure{Title: "Closed", Message: "x"},
			Failure{Title: "Blocked", Message: "x"},
			false,
		},
		"same code of a receiver that looks like a SQLSTATE": {
			Failure{Code: "21211", Message: "x", Context: answered},
			Failure{Code: "21211", Message: "y", Context: answered},
			true,
		},
		"same SQLSTATE of a worker, messages differ": {
			Failure{Code: "P0001", Message: "x failed"},
			Failure{Code: "P0001", Message: "y failed"},
			false,
		},
		"same gRPC status of a worker, messages differ": {
			Failure{Code: "Internal", Message: "x failed"},
			Failure{Code: "Internal", Message: "y failed"},
			false,
		},
		"an apostrophe is not a quote": {
			Failure{Message: "can't read x, won't try"},
			Failure{Message: "can't read y, won't try"},
			false,
		},
		"the name of a service is not a person's": {
			Failure{Message: "no answer: call for Payment Gateway failed"},
			Failure{Message: "no answer: call for Inventory Service failed"},
			false,
		},
		"a trace within a message, frames differ": {
			Failure{Message: "Error: x\n    at a (/app/a.js:1:2)"},
			Failure{Message: "Error: x\n    at b (/app/a.js:1:2)"},
			false,
		},
		"a trace within a message, line numbers differ": {
			Failure{Message: "Error: x\n    at a (/app/a.js:1:2)"},
			Failure{Message: "Error: x\n    at a (/app/a.js:7:2)\n    at c (/app/c.js:7:2)"},
			true,
		},
		"lists differ in length": {
			Failure{Message: "items 1, 2 and 3 are missing"},
			Failure{Message: "items 7 are missing"},
			true,
		},
		"dates differ": {
			Failure{Message: "closed since Mon, 23 Nov 2026 08:00:00 GMT"},
			Failure{Message: "closed since Tue, 1 Dec 2026 10:30:00 GMT"},
			true,
		},
	} {
		require.Equal(t, test.same, Fingerprint(&test.a) == Fingerprint(&test.b),
			"%s: %s | %s", name, normalize(test.a.Message), normalize(test.b.Message))
	}
}

func TestMethodOf(t *testing.T) {
	t.Parallel()
	require.Equal(t, 1, MethodOf(FingerprintByMessage("", "x", "")))
	require.Equal(t, GroupingMethod, MethodOf(Fingerprint(&Failure{})))
	require.Zero(t, MethodOf("other"))
}

func BenchmarkFingerprint(b *testing.B) {
	f := Failure{
		Type: "HTTP_402", Code: "402",
		Message: "402 Payment Required: order ord_81 of Ann Smith (7f8d1e2a-0000-4000-8000-123456789abc) " +
			"failed after 3.5 s",
		Context: json.RawMessage(
			`{"status": 402, "destination": "bank", "url": "https://bank.example/", "body": "order ord_81"}`),
	}
	b.Run("method 2", func(b *testing.B) {
		for b.Loop() {
			Fingerprint(&f)
		}
	})
	b.Run("method 1", func(b *testing.B) {
		for b.Loop() {
			FingerprintByMessage(f.Type, f.Message, "")
		}
	})
	coded := f
	coded.Code = "INSUFFICIENT_FUNDS"
	b.Run("method 2, a code", func(b *testing.B) {
		for b.Loop() {
			Fingerprint(&coded)
		}
	})
}
