package redact_test

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/redact"
)

func TestPatterns_MatchTheDatabase(t *testing.T) {
	t.Parallel()
	const prefix = "https://bank.example/?x="
	for text, want := range map[string]string{
		"card 4111111111111111 declined":                 "card *** declined",
		"card 4111 1111 1111 1111 declined":              "card *** declined",
		"card 4111-1111-1111-1111.":                      "card ***.",
		"amex 3782 822463 10005":                         "amex ***",
		"order 4111111111111112 has no such digit":       "order 4111111111111112 has no such digit",
		"14111111111111111 is longer":                    "14111111111111111 is longer",
		"0.4111111111111111":                             "0.4111111111111111",
		"41111111111111111111 is longer":                 "41111111111111111111 is longer",
		"two: 4111111111111111, 5500005555555559":        "two: ***, ***",
		"Authorization: Bearer abcdefgh12345678":         "Authorization: ***",
		"key sk_live_abcdefgh1234":                       "key ***",
		"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-x": "***",
		"to <Ann.Lee+x@mail.example.co.uk>.":             "to <***>.",
		"GET /users?email=ann%40example.com&x=1":         "GET /users?email=***&x=1",
		"4111111111111111@example.com":                   "***",
		"a@b.co":                                         "***",
		"pkg@1.2.3, root@localhost, @kim":                "pkg@1.2.3, root@localhost, @kim",
		"nothing":                                        "nothing",
	} {
		require.Equal(t, want, redact.CardNumbers(redact.Tokens(redact.Emails(text))))
	}
	require.Equal(t, prefix, redact.Tokens(prefix))
	sql, err := os.ReadFile("../../db/code/14_masking.sql")
	require.NoError(t, err)
	text := strings.ReplaceAll(strings.ReplaceAll(string(sql), "'\n        || '", ""), "''", "'")
	for _, pattern := range redact.Patterns() {
		require.Contains(t, text, pattern, "dlq.pattern has a different pattern")
	}
}
