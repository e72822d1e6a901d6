package postgres

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// Postgres versions that dlqd is tested on.
const (
	OldestVersion = 15
	NewestVersion = 18
)

// Binaries is a directory with a Postgres server's programs.
type Binaries struct {
	Dir   string
	Major int
}

// Path returns the path of one of the server's programs.
func (b Binaries) Path(program string) string { return filepath.Join(b.Dir, program) }

// ErrNoBinaries is returned by [FindBinaries], wrapped with an installation command, if no usable
// server is found.
var ErrNoBinaries = errors.New("no Postgres server found")

var versionOutput = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

// FindBinaries returns the newest supported server in dir. If dir is empty, it searches PATH and the directories in
// which Debian, Red Hat and Homebrew install servers. If major is not 0, FindBinaries considers only servers of that
// version. If it finds none, it returns an ErrNoBinaries.
func FindBinaries(ctx context.Context, dir string, major int) (Binaries, error) {
	dirs := []string{dir}
	if dir == "" {
		dirs = nil
		for _, d := range filepath.SplitList(os.Getenv("PATH")) {
			if _, err := os.Stat(filepath.Join(d, "postgres")); err == nil {
				dirs = append(dirs, d)
			}
		}
		for _, pattern := range []string{
			"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin",
			"/usr/local/opt/postgresql@*/bin", "/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
		} {
			found, _ := filepath.Glob(pattern) // the only error is a bad pattern
			dirs = append(dirs, found...)
		}
	}

	var usable []Binaries
	var seen []string
	for _, d := range dirs {
		b, err := inspect(ctx, d)
		switch {
		case err != nil:
			seen = append(seen, fmt.Sprintf("%s: %v", d, err))
		case b.Major < OldestVersion || b.Major > NewestVersion || (major != 0 && b.Major != major):
			seen = append(seen, fmt.Sprintf("%s: version %d", d, b.Major))
		default:
			usable = append(usable, b)
		}
	}
	if len(usable) == 0 {
		want := fmt.Sprintf("version %d to %d", OldestVersion, NewestVersion)
		if major != 0 {
			want = fmt.Sprintf("version %d, which created this data directory", major)
		}
		msg := "searched PATH and the usual places"
		if dir != "" {
			msg = "searched " + dir
		}
		if len(seen) > 0 {
			msg += " (" + strings.Join(seen, "; ") + ")"
		}
		return Binaries{}, fmt.Errorf("%w: wanted %s, %s. Install it with: %s; or name its directory with --postgres-bin, "+
			"or a running server with --database-url",
			ErrNoBinaries, want, msg, installCommand())
	}
	return slices.MaxFunc(usable, func(a, b Binaries) int { return a.Major - b.Major }), nil
}

// inspect returns the server in dir and its version. It follows symbolic links, because initdb looks for other programs
// and files in the directory of its own file.
func inspect(ctx context.Context, dir string) (Binaries, error) {
	path, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres"))
	if err != nil {
		return Binaries{}, err
	}
	dir = filepath.Dir(path)
	if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
		return Binaries{}, errors.New("has no initdb")
	}
	out, err := exec.CommandContext(ctx, path, "--version").Output() //nolint:gosec // the program the user has installed
	if err != nil {
		return Binaries{}, err
	}
	match := versionOutput.FindSubmatch(out)
	if match == nil {
		return Binaries{}, fmt.Errorf("cannot read version from %q", strings.TrimSpace(string(out)))
	}
	major, err := strconv.Atoi(string(match[1]))
	return Binaries{Dir: dir, Major: major}, err
}

func installCommand() string {
	if runtime.GOOS == "darwin" {
		return "brew install postgresql@17"
	}
	for _, m := range []struct{ program, command string }{
		{"apt-get", "apt-get install postgresql"},
		{"dnf", "dnf install postgresql-server"},
		{"apk", "apk add postgresql"},
		{"pacman", "pacman -S postgresql"},
	} {
		if _, err := exec.LookPath(m.program); err == nil {
			return m.command
		}
	}
	return "your package manager (package postgresql)"
}
