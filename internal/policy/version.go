package policy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// gitTimeout limits one run of Git.
const gitTimeout = 5 * time.Second

// dirty follows the commit in the version of a policy whose files differ from the commit. A hash of the effective
// values follows dirty.
const dirty = "-dirty-"

// Committed reports whether the policy would now have another version. It returns false unless files differed from the
// commit when the policy was loaded, or Git did not answer in time during the load. So it finds out when those files
// are committed, or when Git answers again.
func (p *Policy) Committed() bool {
	if !p.unanswered && !strings.Contains(p.version, dirty) {
		return false
	}
	now, unanswered := version(p.dir, p.settings)
	return now != p.version && !unanswered
}

// Committed reports whether Git tracks the source's directory and the files in it equal those of the commit.
func (s Source) Committed() bool {
	commit, clean, _ := commitOf(s.Dir)
	return commit != "" && clean
}

// version returns the Git commit of a directory. If files differ from the commit, dirty and a hash of the effective
// values follow. Without a commit, version returns that hash alone. unanswered reports whether Git did not answer in
// time.
func version(dir string, settings []Setting) (version string, unanswered bool) {
	switch commit, clean, unanswered := commitOf(dir); {
	case commit == "":
		return hashSettings(settings), unanswered
	case clean:
		return commit, false
	default:
		return commit + dirty + hashSettings(settings)[:6], unanswered
	}
}

// commitOf returns the Git commit of a directory, and whether the directory's files equal those of the commit. The
// commit is "" if there is none or if Git does not track the directory. If Git did not answer in time, unanswered is
// true, clean is false, and the commit may be "".
func commitOf(dir string) (commit string, clean, unanswered bool) {
	if dir == "" {
		return "", false, false
	}
	dir, at := filepath.Clean(dir), "."
	for parent := filepath.Dir(dir); parent != dir; parent = filepath.Dir(dir) {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			break
		}
		// When a commit removes the last file of a directory, Git removes the directory, and its parents if they are empty.
		// So run Git in the nearest parent that exists.
		dir, at = parent, filepath.Join(filepath.Base(dir), at)
	}
	commit, err := git(dir, "rev-parse", "--short=12", "HEAD")
	if err != nil {
		return "", false, isUnanswered(err)
	}
	tracked, err := git(dir, "ls-files", "--", at)
	if err == nil && tracked == "" && !hasFiles(filepath.Join(dir, at)) {
		// The commit may have removed the last file, for example by reverting the commit that added the file.
		tracked, err = git(dir, "rev-list", "-1", "HEAD", "--", at)
	}
	if err != nil || tracked == "" {
		return "", false, isUnanswered(err)
	}
	// Another commit may happen during the check. So the files are clean only if HEAD is the same before and after the
	// check.
	changed, err := git(dir, "status", "--porcelain", "--", at)
	after, afterErr := git(dir, "rev-parse", "--short=12", "HEAD")
	return commit, err == nil && afterErr == nil && changed == "" && after == commit, isUnanswered(err)
}

// hasFiles reports whether a directory has files with an extension of policy files.
func hasFiles(dir string) bool {
	for _, extension := range extensions {
		if found, _ := filepath.Glob(filepath.Join(dir, "*"+extension)); len(found) > 0 {
			return true
		}
	}
	return false
}

func hashSettings(settings []Setting) string {
	hash := sha256.New()
	for _, s := range settings {
		_, _ = fmt.Fprintln(hash, s)
	}
	return hex.EncodeToString(hash.Sum(nil))[:12]
}

// git runs a read-only Git command. The command takes no lock, because a lock would make an operator's Git commands in
// the same directory fail.
func git(dir string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), gitTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "git", append([]string{"--no-optional-locks", "-C", dir}, args...)...).Output() //nolint:gosec // constant words, and the operator's own directory
	return strings.TrimSpace(string(out)), errors.Join(err, ctx.Err())
}

func isUnanswered(err error) bool { return errors.Is(err, context.DeadlineExceeded) }
