package console

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy/policytest"
)

// The command that repeats a redelivery's request is of the type of the destination: curl or grpcurl.
func TestDeadLetter_CommandFitsDestination(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"https://shop.example/hook": "curl -X POST 'https://shop.example/hook' \\\n  -H 'Content-Type: application/json'",
		"grpc://shop.example:9000/shop.v1.Payments/Capture": "grpcurl -plaintext \\\n  -H 'Webhook-Id: msg-1' \\\n  " +
			"-H 'Dlqd-Kind: ' \\\n  -H 'Dlqd-Queue: default' \\\n  -H 'Dlqd-Entry-Id: 00000000-0000-0000-0000-000000000000' " +
			"\\\n  -d '{}' 'shop.example:9000' shop.v1.Payments/Capture",
		"grpc://shop;reboot;/shop.v1.Payments/Capture":  " -d '{}' 'shop;reboot;' shop.v1.Payments/Capture",
		"grpcs://shop.example/shop.v1.Payments/Capture": "grpcurl \\\n  -H 'Webhook-Id: msg-1'",
	} {
		p := policytest.Load(t, policytest.Files{
			"retry-policies": "queues: {default: {}}\ndestinations: {default: {url: '" + url + "'}}\n",
		})
		page := &deadLetterPage{Payload: json.RawMessage("{}")}
		id := "msg-1"
		page.JobKind, page.Queue, page.EventID = message.JobKind, "default", &id
		require.Contains(t, page.curl(p), want)
	}
}

// A gRPC status is shown like an HTTP answer.
func TestDeadLetter_ShowsGRPCStatus(t *testing.T) {
	t.Parallel()
	name, url, text := "payments", "grpc://shop.example:9000/shop.v1.Payments/Capture", "UNAVAILABLE: maintenance"
	page := &deadLetterPage{Payload: json.RawMessage("{}")}
	page.JobKind, page.Destination, page.DestinationURL = message.JobKind, &name, &url
	page.ErrorMessage = &text
	page.ErrorContext = json.RawMessage(`{"grpcStatus": "UNAVAILABLE", "body": "maintenance"}`)
	x := page.exchangeOf()
	require.Equal(t, "gRPC", x.Method)
	require.Equal(t, "UNAVAILABLE", x.Status)
	require.NotEmpty(t, x.Reply)
	for _, h := range x.Sent {
		require.NotEqual(t, "Content-Type", h.Name)
	}
}
