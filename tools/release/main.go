// Command release builds the files of a release from a commit: programs, packages for Debian and for RPM, container
// images, bills of materials, licences, the modules as a GOPROXY tree, and signed checksums. The same commit and
// version give the same bytes, in whichever directory the command runs. See docs/versions.md.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/semver"
)

// platforms are the platforms of a release's programs. The programs for Darwin are for use on the command line.
const platforms = "linux/amd64,linux/arm64,darwin/amd64,darwin/arm64"

// release makes one release.
type release struct {
	source    string // directory of a work tree of the repository; its HEAD is released
	version   string // with a leading v, as Go writes versions
	out       string // directory for the files; it must not exist, or be empty
	platforms []string
	key       string // file with minisign's secret key; empty for no signature
	draft     bool   // the commit need not be prepared for a release
	password  string // of key

	work   string // directory of the clone that is built, and of temporary files
	commit string
	time   time.Time // of the commit
}

func main() {
	var r release
	var list string
	flag.StringVar(&r.source, "source", "..", "work tree of the repository; its HEAD is released")
	flag.StringVar(&r.version, "version", "", "version to release, such as v0.2.0")
	flag.StringVar(&r.out, "out", "", "directory for the files; default dist/VERSION in the work tree")
	flag.StringVar(&list, "platforms", platforms, "platforms, separated by commas")
	flag.StringVar(&r.key, "key", "", "file of minisign's secret key; its password is in $MINISIGN_PASSWORD")
	flag.BoolVar(&r.draft, "draft", false, "for a trial: the commit need not be frozen, and the changelog need not name the version")
	flag.Parse()
	r.platforms, r.password = strings.Split(list, ","), os.Getenv("MINISIGN_PASSWORD")
	if err := r.run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func (r *release) run(ctx context.Context) (err error) {
	r.version = "v" + strings.TrimPrefix(r.version, "v")
	if semver.Canonical(r.version) != r.version {
		return fmt.Errorf("version %q must be a semantic version, such as v0.2.0 or v0.2.0-rc.1", r.version)
	}
	if r.source, err = filepath.Abs(r.source); err != nil {
		return err
	}
	if r.out == "" {
		r.out = filepath.Join(r.source, "dist", r.version)
	}
	if r.out, err = filepath.Abs(r.out); err != nil {
		return err
	}
	if files, err := os.ReadDir(r.out); err == nil && len(files) > 0 {
		return fmt.Errorf("%s is not empty: remove it, so that no file of another release is signed", r.out)
	}
	if r.work, err = os.MkdirTemp("", "dlqd-release-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.work)) }()
	if err := r.clone(ctx); err != nil {
		return err
	}
	if !r.draft {
		if err := r.checkPrepared(); err != nil {
			return fmt.Errorf("%w (docs/versions.md, \"Make a release\"; -draft for a trial)", err)
		}
	}
	if err := os.MkdirAll(r.out, 0o755); err != nil { //nolint:gosec // for everyone to read
		return err
	}
	for _, step := range []func(context.Context) error{r.writeModules, r.writePrograms, r.writeSums} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// number returns the version without the leading v.
func (r *release) number() string { return strings.TrimPrefix(r.version, "v") }

// src returns the directory of the clone.
func (r *release) src() string { return filepath.Join(r.work, "src") }

// clone clones the commit and tags it in the clone, so that Go records the version in the programs. If the repository
// already has the tag, the tag must point to this commit.
func (r *release) clone(ctx context.Context) error {
	changed, err := output(ctx, r.source, nil, "git", "status", "--porcelain", "--untracked-files=no")
	if err != nil {
		return err
	}
	if changed != "" {
		return fmt.Errorf("files differ from the commit, which would be released without the changes:\n%s", changed)
	}
	if r.commit, err = output(ctx, r.source, nil, "git", "rev-parse", "HEAD"); err != nil {
		return err
	}
	seconds, err := output(ctx, r.source, nil, "git", "show", "--no-patch", "--format=%ct", "HEAD")
	if err != nil {
		return err
	}
	unix, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return err
	}
	r.time = time.Unix(unix, 0).UTC()
	// Clone no tags: Go would record the highest tag of the commit.
	if _, err := output(ctx, r.work, nil, "git", "clone", "--quiet", "--no-tags", "--no-checkout", r.source,
		"src"); err != nil {
		return err
	}
	if _, err := output(ctx, r.src(), nil, "git", "checkout", "--quiet", "--detach", r.commit); err != nil {
		return err
	}
	for _, m := range modules {
		tag := m.tag(r.version)
		tagged, err := output(ctx, r.source, nil, "git", "rev-parse", "--quiet", "--verify", "refs/tags/"+tag+"^{commit}")
		if err == nil && tagged != r.commit {
			return fmt.Errorf("the tag %s is of commit %s, and HEAD is %s", tag, tagged, r.commit)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "release: there is no tag %s yet: publish nothing before it is pushed\n", tag)
		}
		if _, err := output(ctx, r.src(), nil, "git", "tag", tag); err != nil {
			return err
		}
	}
	return nil
}

// output runs a command in a directory and returns the command's output without the last newline. env is the command's
// environment; nil means the environment of this process.
func output(ctx context.Context, dir string, env []string, name string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = dir, env, &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, stderr.Bytes())
	}
	return strings.TrimSuffix(stdout.String(), "\n"), nil
}
