// Command withpostgres starts a throwaway Postgres and runs a command with its URL in
// DLQD_TEST_DATABASE_URL.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

func main() { os.Exit(run()) }

func run() int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	url, err := postgrestest.Start(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "withpostgres:", err)
		return 1
	}
	cmd := exec.CommandContext(ctx, os.Args[1], os.Args[2:]...)           //nolint:gosec // the caller's command
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // the command stops before the server
	cmd.Env = append(os.Environ(), postgrestest.URLVariable+"="+url)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = cmd.Run()
	postgrestest.Stop()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		return exit.ExitCode()
	case err != nil:
		fmt.Fprintln(os.Stderr, "withpostgres:", err)
		return 1
	}
	return 0
}
