package console_test

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestEmpty_PagesTeach checks that a page without data has an example to copy, and a link.
func TestEmpty_PagesTeach(t *testing.T) {
	t.Parallel()
	o := open(t, withTokens)
	b := o.tab()
	b.signIn(o.token("kim", "admin"))
	for _, path := range []string{
		"/dead-letters", "/groups", "/replays", "/jobs", "/audit?actor=lee", "/approvals", "/review", "/policy",
	} {
		b.open(path)
		require.NotEmpty(t, b.texts(".empty .example"), path)
		require.NotEmpty(t, b.texts(".empty a"), path)
	}
}
