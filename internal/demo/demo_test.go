package demo

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestDemo_NamesAReceiverForReplays checks that the printed commands start a receiver at the address to which the
// demo's destinations point.
func TestDemo_NamesAReceiverForReplays(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	(&demo{out: &out, program: "dlqd", dir: "/tmp/demo"}).printNextSteps("http://127.0.0.1:4711")
	require.Contains(t, out.String(), "dlqd receiver --listen 127.0.0.1:4711 --troubles 0s\n")
}
