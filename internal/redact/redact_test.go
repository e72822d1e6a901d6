package redact_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/redact"
)

func TestURL(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		"http://127.0.0.1:9090/payments":                                "http://127.0.0.1:9090/payments",
		"https://shop.example.com/api/v2/order_events/2024/hook.json":   "https://shop.example.com/api/v2/order_events/2024/hook.json",
		"https://ann:hunter2@shop.example/hook":                         "https://***@shop.example/hook",
		"https://s3cr3ttoken@shop.example/":                             "https://***@shop.example/",
		"https://h/hook?token=abc&x=1&bare":                             "https://h/hook?token=***&x=***&***",
		"https://h/hook#frag":                                           "https://h/hook#***",
		"https://hooks.slack.com/services/T0000/B0000/XXXXXXXXXXXXXXXX": "https://hooks.slack.com/services/***/***/***",
		"https://h/bot123:AbC/sendMessage":                              "https://h/***/***",
		"https://h/hooks/s3cr3t-path":                                   "https://h/hooks/***",
		"https://h/hooks/SECRETPATH/x":                                  "https://h/hooks/***/x",
		"https://h/a%2Fb/abcdefghijklmnopqrstuvwxyz":                    "https://h/***/***",
		"https://h/0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c/":               "https://h/***/",
		"grpcs://u:p@h:8443/shop.v1.Payments/Capture":                   "grpcs://***@h:8443/shop.v1.Payments/Capture",
		"postgres://u:p@h:5432/db?password=x":                           "postgres://***@h:5432/db?password=***",
		"http://h/%zz":                                                  "***",
		"nonsense":                                                      "***",
	} {
		require.Equal(t, want, redact.URL(raw), raw)
	}
	require.Equal(t, "https://***@h:8443/***", redact.Origin("https://u:p@h:8443/hook"))
	require.Equal(t, `POST "https://***@h/x": no, and http://h/*** too`,
		redact.Text(`POST "https://u:p@h/x": no, and http://h/T0K3N too`))
}

func TestHide(t *testing.T) {
	t.Parallel()
	const raw = "https://ann:hun%2Fter2@h/hooks/s3cr3t-path/plain?key=quer%20yval&id=1"
	text := "Cannot POST /hooks/s3cr3t-path/plain?key=quer%20yval for ann:hun%2Fter2 (hun/ter2, query val, quer yval), " +
		"Basic YW5uOmh1bi90ZXIy, hun%2Fter2; id 1"
	require.Equal(t, "Cannot POST /hooks/***/plain?key=*** for *** (***, query val, ***), Basic ***, ***; id 1",
		redact.Hide(text, redact.Secrets(raw, false)...))
	require.Equal(t, "/***/***/*** h", redact.Hide("/hooks/s3cr3t-path/plain h", redact.Secrets(raw, true)...))
}
