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
	// lookInterval is between two looks at the files. What has changed is read once two looks found the same: the files of one
	// checkout are written one after another.
	lookInterval = 300 * time.Millisecond
	// watchPatience is how long a machine under load may take to look.
	watchPatience = 10 * time.Second
)

// watch sees changes of a policy's files, by looking at what is in them. To be told of changes would not do: a directory that is
// replaced (a checkout, a symbolic link that is turned, a ConfigMap) takes its watch along, and network file systems tell nothing.
type watch struct {
	source  Source
	inForce func() *Policy
	changed func(context.Context)
	secrets []string // that are looked at
	last    string   // what the look before found
	loaded  string   // what was there before the policy was read last
}

// Watch calls changed when files of a source, or of secrets of the policy in force, have changed since they were read.
func Watch(source Source, inForce func() *Policy, changed func(context.Context)) *background.Loop {
	w := &watch{source: source, inForce: inForce, changed: changed, secrets: inForce().secretFiles, loaded: inForce().looked}
	return background.New(background.Config{
		Name: "policy-files", Interval: lookInterval, Timeout: watchPatience, Patience: watchPatience, Once: background.Each(w.once), WhenIdle: true,
		Failing: "policy: files are not watched; SIGHUP has them read again",
	})
}

func (w *watch) once(ctx context.Context) error {
	if secrets := w.inForce().secretFiles; !slices.Equal(secrets, w.secrets) { // somebody else had them read
		w.secrets, w.loaded = secrets, "" // and nobody has looked at these before they were read: once more
	}
	found := w.source.look() + look(w.secrets)
	settled := found == w.last
	w.last = found
	if !settled || found == w.loaded {
		return nil
	}
	w.loaded = found // what changes from here on has perhaps not been read
	w.changed(ctx)
	return nil
}

// look says what a source's files are now, and which cannot be read.
func (s Source) look() string {
	var paths []string
	var listings strings.Builder
	for _, dir := range s.dirs() {
		items, err := os.ReadDir(dir)
		_, _ = fmt.Fprintln(&listings, dir, err)
		for _, item := range items {
			if slices.Contains(endings, filepath.Ext(item.Name())) && !item.IsDir() {
				paths = append(paths, filepath.Join(dir, item.Name()))
			}
		}
	}
	return listings.String() + look(paths)
}

// look is a hash of files.
func look(paths []string) string {
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

// endings of a policy's files.
var endings = []string{".yaml", ".yml", ".json"}

// dirs are the directories of a source's files, the one that is merged over the other last.
func (s Source) dirs() []string {
	switch {
	case s.Dir == "":
		return nil
	case s.Env == "":
		return []string{s.Dir}
	}
	return []string{s.Dir, filepath.Join(s.Dir, EnvironmentsDir, s.Env)}
}

// Gone says which files that p was read from next was not, "" if none. A file that is gone would leave the built-in defaults: other
// queues, and other destinations.
func (p *Policy) Gone(next *Policy) string {
	var gone []string
	for _, file := range p.files {
		if !slices.Contains(next.files, file) {
			gone = append(gone, file)
		}
	}
	return strings.Join(gone, ", ")
}
