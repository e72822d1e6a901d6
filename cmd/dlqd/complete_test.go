package main

import (
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/stretchr/testify/require"
)

// If two values begin alike, bash inserts the common beginning without quotes, and at the next completion cobra's
// script evaluates it. Receivers of messages choose values such as error types.
func TestCompletions_LeaveOutWhatAShellRuns(t *testing.T) {
	t.Parallel()
	values := []string{
		"CARD_DECLINED", "`touch x`a", "$(touch x)b", "a;touch x", "a|b", "a&b", "a>b", "a\\b",
		"\x1b]0;x\a", "a\tb", "timed out",
	}
	require.Equal(t, []cobra.Completion{"CARD_DECLINED\tan error\x20", "timed out\tan error\x20"},
		completions(values, func(value *string) (string, string) { return *value, "an error\n" }))
}

// A completion uses a stored sign-in without renewing it. So it does not wait for another process that holds the
// sign-in's lock.
func TestCompletions_DoNotRenewASignIn(t *testing.T) { //nolint:paralleltest // sets the environment
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	c := &client{base: "http://127.0.0.1:1", completing: true}
	path, err := loginPath(c.base)
	require.NoError(t, err)
	unlock, err := lockLogin(path)
	require.NoError(t, err)
	defer unlock()
	require.NoError(t, (&login{API: c.base, IDToken: "stored", Expiry: time.Now().Add(-time.Hour)}).write(path))
	token, err := c.loginToken(t.Context())
	require.NoError(t, err)
	require.Equal(t, "stored", token)
}
