package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"gotest.tools/gotestsum/cmd"
)

// TestReport_AcceptsOnlyTestsThatPassAlone runs gotestsum, as "make test" does, on packages that fail in different
// ways.
func TestReport_AcceptsOnlyTestsThatPassAlone(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	write := func(name, text string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(name), 0o700))
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
	}
	write("go.mod", "module example\n\ngo 1.26\n")
	for name, code := range map[string]string{
		"passes":    `func TestA(*testing.T) {}`,
		"empty":     ``,
		"flaky":     `func TestA(t *testing.T) { if first() { t.Error() } }; func TestB(*testing.T) {}`,
		"subtest":   `func TestA(t *testing.T) { t.Run("1", func(t *testing.T) { if first() { t.Error() } }) }`,
		"fails":     `func TestA(t *testing.T) { t.Run("1", func(t *testing.T) { t.Error() }) }`,
		"exits":     `func TestA(*testing.T) { if first() { os.Exit(1) } }; func TestB(t *testing.T) { t.Error() }`,
		"testmain":  `func TestMain(m *testing.M) { m.Run(); if first() { os.Exit(1) } }; func TestA(*testing.T) {}`,
		"redundant": `func TestA(t *testing.T) { if first() { t.Error() } else { t.Skip() } }`,
		"broken":    `func TestA(t *testing.T) { undefined() }`,
		"cached":    `func TestA(t *testing.T) { if _, err := os.Stat(os.Getenv("DLQD_FAILS")); err == nil { t.Error() } }`,
	} {
		write(name+"/a_test.go", `package a

import ("os"; "testing")

var _ testing.TB

func first() bool { _, err := os.Stat("failed"); _ = os.WriteFile("failed", nil, 0o600); return err != nil }

`+code)
	}
	fails := filepath.Join(t.TempDir(), "fails") // outside of the module, so that go's test cache ignores the file
	t.Setenv("DLQD_FAILS", fails)
	require.NoError(t, exec.Command("go", "test", "-json", "-vet=off", "-test.run=^TestA$", "example/cached").Run())
	write(fails, "")
	for name, c := range map[string]struct{ packages, flaky, err string }{
		"passes":  {packages: "./passes ./empty"},
		"no test": {packages: "./empty", err: "no test ran"},
		"flaky": {
			packages: "./flaky ./subtest ./passes",
			flaky: "flaky: example/flaky TestA failed first, and passed alone\n" +
				"flaky: example/subtest TestA failed first, and passed alone\n",
		},
		"fails":            {packages: "./passes ./fails", err: "example/fails failed: TestA"},
		"ends early":       {packages: "./passes ./exits", err: "example/exits failed: its process ended early, after 0 tests"},
		"TestMain":         {packages: "./testmain", err: "example/testmain failed outside of its tests"},
		"skipped alone":    {packages: "./redundant", err: "example/redundant failed: TestA"},
		"passed before":    {packages: "./cached", err: "example/cached failed: TestA"},
		"does not compile": {packages: "./broken ./passes", err: "example/broken failed outside of its tests"},
	} {
		t.Run(name, func(t *testing.T) {
			events := filepath.Join(t.TempDir(), "events.json")
			failed := cmd.Run("gotestsum", []string{
				"--format=standard-quiet", "--jsonfile=" + events, "--rerun-fails=1", "--rerun-fails-run-root-test",
				"--packages=" + c.packages, "--", "-count=1", "-vet=off",
			})
			file, err := os.Open(events)
			require.NoError(t, err)
			defer file.Close()
			var out bytes.Buffer
			err = report(&out, file)
			require.Equal(t, c.flaky, out.String())
			if c.err != "" {
				require.EqualError(t, err, c.err)
				return
			}
			require.NoError(t, err)
			require.NoError(t, failed)
		})
	}
}
