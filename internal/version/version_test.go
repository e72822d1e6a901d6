package version

import (
	"runtime/debug"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestBuild_NamesTheVersionThatGoRecorded(t *testing.T) {
	t.Parallel()
	for recorded, want := range map[string]string{
		"":        Unknown,
		"(devel)": Unknown,
		"v0.2.0":  "0.2.0",
		"v0.2.1-0.20261125093000-3d5ebe1c5944+dirty": "0.2.1-0.20261125093000-3d5ebe1c5944+dirty",
	} {
		build := of(&debug.BuildInfo{Main: debug.Module{Version: recorded}})
		require.Equal(t, want, build.Version)
		require.Equal(t, Unknown, build.Commit)
		require.Equal(t, Unknown, build.River.Library)
	}
	build := of(&debug.BuildInfo{
		GoVersion: "go1.26.8",
		Main:      debug.Module{Version: "v0.2.0"},
		Deps:      []*debug.Module{{Path: river + "/rivertype", Version: "v0.50.0"}, {Path: river, Version: "v0.51.0"}},
		Settings:  []debug.BuildSetting{{Key: "vcs", Value: "git"}, {Key: "vcs.revision", Value: "3d5ebe1c5944"}},
	})
	require.Equal(t, "go1.26.8", build.Go)
	require.Equal(t, "3d5ebe1c5944", build.Commit)
	require.Equal(t, "0.51.0", build.River.Library)
	require.Contains(t, build.River.Tested, "0.39.0", "the oldest that riverdlq requires")
}
