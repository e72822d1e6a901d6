package main_test

import (
	"context"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestServe_NotifiesSystemd runs dlqd as systemd runs a unit of Type=notify with a watchdog and the URL as a
// credential.
func TestServe_NotifiesSystemd(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "dlqd-notify-") // the path of a socket has at most 107 bytes
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	socket := filepath.Join(dir, "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	require.NoError(t, err)
	t.Cleanup(func() { _ = systemd.Close() })
	require.NoError(t, systemd.SetReadDeadline(time.Now().Add(time.Minute)))
	next := func() string {
		message := make([]byte, 100)
		n, err := systemd.Read(message)
		require.NoError(t, err)
		return string(message[:n])
	}

	require.NoError(t, os.WriteFile(filepath.Join(dir, "database-url"), []byte(postgrestest.URL(t)+"\n"), 0o600))
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program, "serve", "--listen", "127.0.0.1:0",
		"--archive", "none")
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+socket, "WATCHDOG_USEC=20000", "CREDENTIALS_DIRECTORY="+dir)
	log := &syncBuffer{}
	cmd.Stderr = log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })

	require.Equal(t, "READY=1", next())
	var address []string // dlqd has logged the address, but the test may not have read it yet
	require.Eventually(t, func() bool {
		address = servesAt.FindStringSubmatch(log.String())
		return address != nil
	}, 5*time.Minute, time.Millisecond)
	answer, err := http.Get(address[1] + "/readyz")
	require.NoError(t, err)
	require.NoError(t, answer.Body.Close())
	require.Equal(t, http.StatusOK, answer.StatusCode, "ready too early")
	for range 3 {
		require.Equal(t, "WATCHDOG=1", next())
	}
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	state := next()
	for state == "WATCHDOG=1" {
		state = next()
	}
	require.Equal(t, "STOPPING=1", state)
	require.NoError(t, cmd.Wait(), log.String())
}
