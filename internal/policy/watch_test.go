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

// Watch detects a change that happens while a policy is read, and a change between the first read and the first check.
func TestWatch_DetectsChangesDuringRead(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(queue string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "retry-policies.yaml"),
			[]byte("queues: {"+queue+": {destination: d}}\ndestinations: {d: {url: 'http://localhost:1', secretFile: key}}\n"),
			0o600))
	}
	write("first")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "key"), []byte("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"), 0o600))
	source := policy.Source{Dir: dir}
	loaded, err := policy.Load(source)
	require.NoError(t, err)
	var inForce atomic.Pointer[policy.Policy]
	inForce.Store(loaded)
	has := func(queue string) bool { _, ok := inForce.Load().Queues[queue]; return ok }

	write("second") // after the first read, before the first check
	seen := make(chan struct{})
	var checks atomic.Int64
	loop := policy.Watch(source, func() *policy.Policy { checks.Add(1); return inForce.Load() }, func(context.Context) {
		next, err := policy.Load(source)
		require.NoError(t, err)
		if _, ok := next.Queues["second"]; ok {
			write("third") // after the second read
		}
		if _, ok := next.Queues["third"]; ok {
			defer close(seen) // another read would panic: it would close the channel twice
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
	case <-time.After(time.Minute):
		require.FailNow(t, "the change was never detected")
	}
	require.Eventually(t, func() bool { return has("third") }, 5*time.Minute, time.Millisecond)
	three := checks.Load() + 3
	require.Eventually(t, func() bool { return checks.Load() >= three }, 5*time.Minute, time.Millisecond)
}

// A secret file was missing at first, and a reload outside of Watch then read it. Watch checks that file from then on.
func TestWatch_ChecksSecretFilesAddedLater(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600))
	}
	write("retry-policies.yaml", "queues: {one: {destination: d}}\ndestinations: {d: {url: 'http://localhost:1'}}\n")
	source := policy.Source{Dir: dir}
	var inForce atomic.Pointer[policy.Policy]
	var refused, secrets, checks atomic.Int64
	load := func() {
		next, err := policy.Load(source)
		if err != nil {
			refused.Add(1)
			return
		}
		if old := inForce.Swap(next); old != nil &&
			string(old.Destinations["d"].Secret) != string(next.Destinations["d"].Secret) {
			secrets.Add(1)
		}
	}
	load()
	group := &background.Group{Logger: slog.New(slog.DiscardHandler)}
	current := func() *policy.Policy { checks.Add(1); return inForce.Load() }
	group.Add(policy.Watch(source, current, func(context.Context) { load() }))
	group.Start()
	t.Cleanup(func() { require.NoError(t, group.Stop(context.WithoutCancel(t.Context()))) })
	write("retry-policies.yaml", "queues: {one: {destination: d}}\ndestinations: {d: {url: 'http://localhost:1', "+
		"secretFile: key}}\n")
	require.Eventually(t, func() bool { return refused.Load() == 1 }, 5*time.Minute, 50*time.Millisecond)
	write("key", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	load() // SIGHUP
	require.EqualValues(t, 1, secrets.Load())
	again := checks.Load() + 3
	require.Eventually(t, func() bool { return checks.Load() >= again }, 5*time.Minute, time.Millisecond)
	write("key", "whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA")
	require.Eventually(t, func() bool { return secrets.Load() == 2 }, 5*time.Minute, 50*time.Millisecond,
		"the rotated secret was not read")
}
