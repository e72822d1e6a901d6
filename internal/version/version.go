// Package version describes a dlqd program by the data that the go command recorded in it.
package version

import (
	_ "embed"
	"runtime/debug"
	"strings"
	"sync"
)

// Unknown is the version and the commit of a program that was built without git, from a directory or an archive.
const Unknown = "unknown"

// river is the library of River.
const river = "github.com/riverqueue/river"

// tested lists the versions of River with which "make riverdlq-matrix" last tested riverdlq, one on each line.
//
//go:embed river.txt
var tested string

// Build describes a program: the data that the go command recorded in it, and the versions of River with which riverdlq
// was tested.
type Build struct {
	// Version is the semantic version without "v". It is the tag of the commit or, without a tag, the version after the
	// last tag with time and commit (0.2.1-0.20261125093000-3d5ebe1c5944). It ends with +dirty if files were changed.
	Version string `json:"version"`
	Commit  string `json:"commit"`
	Go      string `json:"go"`
	River   River  `json:"river"`
}

// River has the version of River in a program, and the versions with which riverdlq was tested.
type River struct {
	// Library is the version of River's library in the program.
	Library string `json:"library"`
	// Tested lists the versions of an application's River with which riverdlq was tested.
	Tested []string `json:"tested"`
}

// String returns the version of this program.
func String() string { return Read().Version }

// Read returns the description of this program.
var Read = sync.OnceValue(func() Build {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	return of(info)
})

func of(info *debug.BuildInfo) Build {
	build := Build{
		Version: Unknown, Commit: Unknown, Go: info.GoVersion, River: River{Library: Unknown, Tested: strings.Fields(tested)},
	}
	if v := info.Main.Version; v != "" && v != "(devel)" {
		build.Version = strings.TrimPrefix(v, "v")
	}
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" {
			build.Commit = setting.Value
		}
	}
	for _, module := range info.Deps {
		if module.Path == river {
			build.River.Library = strings.TrimPrefix(module.Version, "v")
		}
	}
	return build
}
