package api

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// Listen opens an address of --listen: TCP, or a Unix socket. If a process left the file of a Unix socket when it
// ended, Listen removes that file.
func Listen(ctx context.Context, address string) (net.Listener, error) {
	path, unix := strings.CutPrefix(address, "unix:")
	if !unix {
		listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
		if err != nil {
			return nil, fmt.Errorf("--listen %s: %w", address, err)
		}
		return listener, nil
	}
	path, err := filepath.Abs(path)
	if err != nil {
		return nil, err
	}
	if conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path); err == nil {
		_ = conn.Close()
		return nil, fmt.Errorf("--listen %s: another process listens there", address)
	}
	if info, err := os.Lstat(path); err == nil && info.Mode()&os.ModeSocket != 0 {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("--listen %s: %w", address, err)
		}
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("--listen %s: %w", address, err)
	}
	return listener, os.Chmod(path, 0o660) //nolint:gosec // the group may submit
}

// CheckListen returns an error if an address of --listen is invalid. An address on which another process listens is
// valid. CheckListen leaves no listener open.
func CheckListen(ctx context.Context, address string) error {
	if path, unix := strings.CutPrefix(address, "unix:"); unix {
		if info, err := os.Stat(filepath.Dir(path)); path == "" || err != nil || !info.IsDir() {
			return fmt.Errorf("--listen %s: must be unix: and the path of a socket in a directory that exists", address)
		}
		return nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return fmt.Errorf("--listen %s: must be host:port or unix:PATH, such as 127.0.0.1:7353", address)
	}
	if _, err := net.DefaultResolver.LookupPort(ctx, "tcp", port); err != nil {
		return fmt.Errorf("--listen %s: port %s is neither a number up to 65535 nor the name of a service", address, port)
	}
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	switch operation, ok := errors.AsType[*net.OpError](err); {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil
	case isUnknownHost(err):
		return fmt.Errorf("--listen %s: there is no host %s", address, host)
	case ok:
		return fmt.Errorf("--listen %s: %w", address, operation.Err)
	case err != nil:
		return fmt.Errorf("--listen %s: %w", address, err)
	}
	return listener.Close()
}

func isUnknownHost(err error) bool {
	dns, ok := errors.AsType[*net.DNSError](err)
	return ok && dns.IsNotFound
}

// URL returns the address of a listener of [Listen]: a URL, or "unix:" and a path. encrypted does not matter for Unix
// sockets, which are never encrypted.
func URL(listener net.Listener, encrypted bool) string {
	if listener.Addr().Network() == "unix" {
		return "unix:" + listener.Addr().String()
	}
	if encrypted {
		return "https://" + listener.Addr().String()
	}
	return "http://" + listener.Addr().String()
}
