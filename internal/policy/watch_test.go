package policy_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
)

// What changes while the policy is read is seen afterwards, and so is what changed between the first reading and the first look.
func TestWatch_changesWhileItIsRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(queue string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "retry-policies.yaml"), []byte("queues: {"+queue+": {destination: d}}\ndestinations: {d: {url: 'http://localhost:1', secretFile: key}}\n"), 0o600))
	}
	write("first")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "key"), []byte("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"), 0o600))
	source := policy.Source{Dir: dir}
	loaded, err := policy.Load(source)
	require.NoError(t, err)
	var inForce atomic.Pointer[policy.Policy]
	inForce.Store(loaded)
	has := func(queue string) bool { _, ok := inForce.Load().Queues[queue]; return ok }

	write("second") // after it was read, before anybody looks
	seen := make(chan struct{})
	loop := policy.Watch(source, inForce.Load, func(context.Context) {
		next, err := policy.Load(source)
		require.NoError(t, err)
		if _, ok := next.Queues["second"]; ok {
			write("third") // after it was read again
		}
		if _, ok := next.Queues["third"]; ok {
			defer close(seen) // and not read once more: that would close it twice
		}
		inForce.Store(next)
	})
	require.True(t, has("first"))
	group := &background.Group{Logger: slog.New(slog.DiscardHandler)}
	group.Add(loop)
	group.Start()
	t.Cleanup(func() { require.NoError(t, group.Stop(context.WithoutCancel(t.Context()))) })
	select {
	case <-seen:
	case <-time.After(20 * time.Second):
	}
	require.Eventually(t, func() bool { return has("third") }, time.Second, time.Millisecond, "it is passed over for ever")
	time.Sleep(time.Second) // three looks
}
