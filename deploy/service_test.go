package deploy_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// maxExposure is the maximum exposure of the unit, of 10, as "systemd-analyze security" computes it.
const maxExposure = 3.0

func TestService_IsValidAndConfined(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		t.Skip("systemd is not installed")
	}
	// The program need not be installed on this machine.
	self, err := os.Executable()
	require.NoError(t, err)
	unit := strings.Replace(read(t, "dlqd.service"), "ExecStart=/usr/bin/dlqd ", "ExecStart="+self+" ", 1)
	path := filepath.Join(t.TempDir(), "dlqd.service")
	require.NoError(t, os.WriteFile(path, []byte(unit), 0o600))
	require.Empty(t, run(t, "systemd-analyze", "verify", "--man=no", path))
	report := run(t, "systemd-analyze", "security", "--offline=yes", path)
	found := regexp.MustCompile(`Overall exposure level for dlqd.service: ([0-9.]+)`).FindStringSubmatch(report)
	require.NotNil(t, found, report)
	exposure, err := strconv.ParseFloat(found[1], 64)
	require.NoError(t, err)
	require.LessOrEqual(t, exposure, maxExposure, report)
}
