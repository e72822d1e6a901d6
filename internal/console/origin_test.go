package console

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAudit_NamesBrowsers(t *testing.T) {
	t.Parallel()
	for origin, words := range map[string]string{
		"API, from 10.0.0.7 (console, Mozilla/5.0 [Macintosh; Intel Mac OS X 10_15_7] AppleWebKit/537.36 [KHTML, like " +
			"Gecko] Chrome/131.0.0.0 Safari/537.36)": "Chrome on Mac, 10.0.0.7",
		"API, from 10.0.0.7 (console, Mozilla/5.0 [X11; Linux x86_64; rv:132.0] Gecko/20100101 " +
			"Firefox/132.0)": "Firefox on Linux, 10.0.0.7",
		"API, from ::1 (console, Mozilla/5.0 [iPhone; CPU iPhone OS 18_1 like Mac OS X] AppleWebKit/605.1.15 [KHTML, like " +
			"Gecko] Version/18.1 Mobile/15E148 Safari/604.1), on behalf of lee": "Safari on iPhone, ::1, on behalf of lee",
		"API, from 10.0.0.7 (console, )":            "a browser, 10.0.0.7",
		"API, from 10.0.0.7 (curl/8.14.1)":          "curl/8.14.1 from 10.0.0.7",
		"API, from a local socket":                  "API, from a local socket",
		"SQL, from a local socket (psql)":           "SQL, from a local socket (psql)",
		"<script>alert(1)</script>":                 "<script>alert(1)</script>",
		"API, from 10.0.0.7 (dlqd/0.1.0 [go], x y)": "dlqd/0.1.0 from 10.0.0.7",
	} {
		require.Equal(t, words, originInWords(origin))
	}
}
