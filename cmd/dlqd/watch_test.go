package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSupervisor_WaitsUntilReady(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "dlqd-watch-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = systemd.Close() })
	require.NoError(t, systemd.SetReadDeadline(time.Now().Add(time.Minute)))

	var asked atomic.Int32
	v := &supervisor{socket: socket, watchdog: time.Minute, logger: slog.New(slog.DiscardHandler)}
	end := v.watch(t.Context(), func(context.Context) error {
		if asked.Add(1) < 3 {
			return errors.New("the database does not answer")
		}
		return nil
	})
	defer end()
	message := make([]byte, 100)
	n, err := systemd.Read(message)
	require.NoError(t, err)
	require.Equal(t, "READY=1", string(message[:n]))
	require.EqualValues(t, 3, asked.Load())
}
