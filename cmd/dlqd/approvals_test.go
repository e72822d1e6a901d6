package main_test

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// runInTerminal runs dlqd on a pseudo-terminal and types line. It returns what the terminal shows, and the exit code.
func runInTerminal(t *testing.T, line string, args ...string) (output string, code int) {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	require.NoError(t, err)
	defer master.Close()
	require.NoError(t, unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0))
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	terminal, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	defer terminal.Close()
	_, err = master.WriteString(line + "\n")
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), program, args...)
	var out bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = terminal, &out, &out
	_ = cmd.Run()
	return out.String(), cmd.ProcessState.ExitCode()
}

// TestApprovals requests and approves an action with the command line. An action on many entries requires the number of
// the entries.
func TestApprovals(t *testing.T) {
	t.Parallel()
	url, config := postgrestest.URL(t), t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(config, "access.yaml"),
		[]byte("authentication: [tokens]\nexpectAbove: 2\napprovals:\n  rules:\n    - {operations: [discard], above: 3}\n"),
		0o600))
	receiver := startReceiver(t,
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnprocessableEntity) })
	s := serve(t, "--database-url", url, "--config-dir", config, "--destination", receiver)
	as := func(name string) []string {
		return []string{
			"--api-url", s.api, "--token-file",
			writeFile(t, ok(t, "tokens", "create", "--name", name, "--role", "operator", "--database-url", url)),
		}
	}
	kim, lee := as("kim"), as("lee")
	with := func(who []string, args ...string) []string { return append(args, who...) }
	for range 4 {
		ok(t, with(kim, "send", "--kind", "order.placed", `{}`)...)
	}
	manual := func() int {
		return strings.Count(ok(t, with(kim, "list", "--status", "dlq_manual")...), "order.placed")
	}
	require.Eventually(t, func() bool { return manual() == 4 }, 5*time.Minute, 50*time.Millisecond)

	// A script passes the number; a user at a terminal types it.
	_, output, code := run(t, with(kim, "discard", "--all")...)
	require.Equal(t, 2, code)
	require.Contains(t, output, "4 dead letters match; nothing was changed: confirm with --expect 4")
	_, output, code = run(t, with(kim, "discard", "--all", "--expect", "3")...)
	require.Equal(t, 1, code)
	require.Contains(t, output, "the filter selects 4 dead letters, not 3")
	output, code = runInTerminal(t, "5", with(kim, "discard", "--all")...)
	require.Equal(t, 2, code, output)
	require.Contains(t, output, "Type this number to continue: ")
	output, code = runInTerminal(t, "4", with(kim, "unpark", "--all")...)
	require.Equal(t, 0, code, output)
	require.Contains(t, output, "unpark: 4 of 4 dead letters")
	require.Eventually(t, func() bool { return manual() == 4 }, 5*time.Minute, 50*time.Millisecond)

	// The action needs approval. The exit code says that the API did not carry out the action, and the message has the
	// command that approves it.
	_, output, code = run(t, with(kim, "discard", "--all", "--expect", "4", "--note", "ticket 7")...)
	require.Equal(t, 7, code, output)
	approve := regexp.MustCompile(`dlqd (approvals approve (\S+) --expect 4)`).FindStringSubmatch(output)
	require.NotNil(t, approve, output)
	id := approve[2]
	require.Regexp(t, id+` +requested +discard +4 +kim`, ok(t, with(lee, "approvals")...))
	require.Contains(t, ok(t, with(lee, "approvals", "list", "--state", "requested", "--json")...), `"note":"ticket 7"`)
	require.NotContains(t, ok(t, with(lee, "approvals", "list", "--state", "done")...), id)
	require.Contains(t, ok(t, with(lee, "approvals", "show", id)...), `"do":"discard"`)
	_, output, code = run(t, with(kim, strings.Fields(approve[1])...)...)
	require.Equal(t, 1, code)
	require.Contains(t, output, "second person")
	_, output, code = run(t, with(lee, "approvals", "approve", id)...)
	require.Equal(t, 2, code)
	require.Contains(t, output, "--expect 4")
	output, code = runInTerminal(t, "4", with(lee, "approvals", "approve", id)...)
	require.Equal(t, 0, code, output)
	require.Contains(t, output, "4 dead letters; dlqd carries it out")
	require.Eventually(t, func() bool {
		return regexp.MustCompile(`state +done`).MatchString(ok(t, with(kim, "approvals", "show", id)...))
	}, 5*time.Minute, 50*time.Millisecond)
	require.Zero(t, manual())

	stdout, output, code := run(t, with(kim, "discard", "--status", "dlq_archived", "--expect", "4", "--json")...)
	require.Equal(t, 7, code, output)
	require.Contains(t, stdout, `{"approval":`)
	id = regexp.MustCompile(`approve (\S+)`).FindStringSubmatch(output)[1]
	require.Contains(t, ok(t, with(kim, "approvals", "withdraw", id, "--note", "a slip")...), "is withdrawn")
	_, output, code = run(t, with(lee, "approvals", "refuse", id)...)
	require.Equal(t, 1, code)
	require.Contains(t, output, "is withdrawn")
}
