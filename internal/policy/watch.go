package policy

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/background"
)

const (
	// checkInterval is the time between two checks of the files. A change is reported once two consecutive checks find
	// the same content, because a checkout writes files one after another.
	checkInterval = 300 * time.Millisecond
	// checkTimeout bounds one check. It is long, for machines under load.
	checkTimeout = 10 * time.Second
)

// watch detects changes of a policy's files by hashing them. File notifications would miss some changes: they do not
// follow a directory that is replaced (by a checkout, a switched symbolic link or a ConfigMap), and network file
// systems send none.
type watch struct {
	source  Source
	inForce func() *Policy
	changed func(context.Context)
	secrets []string // the secret files to check
	last    string   // result of the previous check
	loaded  string   // state of the files before the policy was last read
}

// Watch returns a loop. The loop calls changed when files of the source, or secret files of the policy in force, differ
// from the files that were last read.
func Watch(source Source, inForce func() *Policy, changed func(context.Context)) *background.Loop {
	w := &watch{
		source: source, inForce: inForce, changed: changed, secrets: inForce().secretFiles, loaded: inForce().filesHash,
	}
	return background.New(background.Config{
		Name: "policy-files", Interval: checkInterval, Timeout: checkTimeout,
		Patience: checkTimeout, Once: background.Each(w.once), WhenIdle: true,
		Failing: "policy: checking the files for changes failed; SIGHUP reloads them",
	})
}

func (w *watch) once(ctx context.Context) error {
	if secrets := w.inForce().secretFiles; !slices.Equal(secrets, w.secrets) { // a reload (SIGHUP) changed the list
		w.secrets, w.loaded = secrets, "" // never hashed before: report one change, so that they are read
	}
	found := w.source.hash() + hashFiles(w.secrets)
	settled := found == w.last
	w.last = found
	if !settled || found == w.loaded {
		return nil
	}
	w.loaded = found // not a newer hash: the policy may not have read later changes
	w.changed(ctx)
	return nil
}

// hash returns a listing and a hash of the source's files. Errors of unreadable files are part of it.
func (s Source) hash() string {
	var paths []string
	var listings strings.Builder
	for _, dir := range s.dirs() {
		items, err := os.ReadDir(dir)
		_, _ = fmt.Fprintln(&listings, dir, err)
		for _, item := range items {
			if slices.Contains(extensions, filepath.Ext(item.Name())) && !item.IsDir() {
				paths = append(paths, filepath.Join(dir, item.Name()))
			}
		}
	}
	return listings.String() + hashFiles(paths)
}

// hashFiles returns a hash of files.
func hashFiles(paths []string) string {
	hash := sha256.New()
	for _, path := range paths {
		_, _ = fmt.Fprintf(hash, "\n%s\n", path)
		file, err := os.Open(path)
		if err == nil {
			_, err = io.Copy(hash, io.LimitReader(file, maxFileBytes+1))
			_ = file.Close()
		}
		if err != nil {
			_, _ = fmt.Fprint(hash, err)
		}
	}
	return hex.EncodeToString(hash.Sum(nil))
}

// extensions are the extensions of a policy's files.
var extensions = []string{".yaml", ".yml", ".json"}

// dirs returns the directories of the source: the configuration directory, then the environment's, which is merged over
// it.
func (s Source) dirs() []string {
	switch {
	case s.Dir == "":
		return nil
	case s.Env == "":
		return []string{s.Dir}
	}
	return []string{s.Dir, filepath.Join(s.Dir, EnvironmentsDir, s.Env)}
}

// Gone returns the names of the files from which p was read and which next lacks, or "" if there are none. Without such
// a file, the built-in defaults would apply: other queues and other destinations.
func (p *Policy) Gone(next *Policy) string {
	var gone []string
	for _, file := range p.files {
		if !slices.Contains(next.files, file) {
			gone = append(gone, file)
		}
	}
	return strings.Join(gone, ", ")
}
