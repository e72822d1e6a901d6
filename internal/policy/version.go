package policy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os/exec"
	"strings"
	"time"
)

// gitTimeout bounds what Git is asked.
const gitTimeout = 5 * time.Second

// dirty marks the version of files that were changed since a commit; a hash of what is in force follows.
const dirty = "-dirty-"

// Committed reports whether the files of a policy that were changed when it was loaded have been committed since.
func (p *Policy) Committed() bool {
	return strings.Contains(p.version, dirty) && version(p.dir, p.settings) != p.version
}

// version is the Git commit that a directory is at, or a hash of what is in force.
func version(dir string, settings []Setting) string {
	if dir != "" {
		if commit, err := git(dir, "rev-parse", "--short=12", "HEAD"); err == nil && commit != "" {
			// A directory that Git ignores or does not know yet is no part of the commit.
			if tracked, err := git(dir, "ls-files", "--", "."); err == nil && tracked != "" {
				// (Somebody may be committing: what is clean must be so at the commit that was there before.)
				changed, err := git(dir, "status", "--porcelain", "--", ".")
				after, afterErr := git(dir, "rev-parse", "--short=12", "HEAD")
				if err != nil || afterErr != nil || changed != "" || after != commit {
					commit += dirty + hashOf(settings)[:6]
				}
				return commit
			}
		}
	}
	return hashOf(settings)
}

func hashOf(settings []Setting) string {
	hash := sha256.New()
	for _, s := range settings {
		_, _ = fmt.Fprintln(hash, s)
	}
	return hex.EncodeToString(hash.Sum(nil))[:12]
}

func git(dir string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), gitTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "git", append([]string{"-C", dir}, args...)...).Output() //nolint:gosec // constant words, and the operator's own directory
	return strings.TrimSpace(string(out)), err
}
