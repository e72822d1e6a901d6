package policy

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"github.com/dlqd/dlqd/internal/background"
)

const (
	// settleTime gathers the changes of one checkout: files are written one after another, and are read once for so long
	// none was.
	settleTime = 300 * time.Millisecond
	// watchPatience is how long a machine under load may take to look.
	watchPatience = 10 * time.Second
)

// watch sees changes of a source's files.
type watch struct {
	source  Source
	changed func(context.Context)
	watcher *fsnotify.Watcher // nil while nothing is watched
	dirty   bool              // files have changed
}

// Watch calls changed when files of a source have changed. A file system that tells nothing (some network ones) leaves it
// to SIGHUP.
func Watch(source Source, changed func(context.Context)) (*background.Loop, error) {
	w := &watch{source: source, changed: changed}
	if err := w.open(); err != nil {
		w.close()
		return nil, fmt.Errorf("policy: %w", err)
	}
	return background.New(background.Config{
		Name: "policy-files", Interval: settleTime, Timeout: watchPatience, Retry: watchPatience / 2, Patience: watchPatience,
		Once: background.Each(w.once), End: w.close, WhenIdle: true, Failing: "policy: files are not watched; SIGHUP has them read again",
	}), nil
}

// once takes in what has changed since the last time.
func (w *watch) once(ctx context.Context) error {
	if w.watcher == nil {
		if err := w.open(); err != nil {
			w.close()
			return err
		}
		w.dirty = true // what changed while nobody watched
	}
	for settled := true; ; settled = false {
		select {
		case event, ok := <-w.watcher.Events:
			if !ok {
				w.close()
				return errors.New("the watch of the files has ended")
			}
			w.dirty = w.dirty || event.Op != fsnotify.Chmod
		case err := <-w.watcher.Errors: // events may be lost
			w.close()
			return err
		default:
			if settled && w.dirty {
				w.dirty = false
				w.changed(ctx)
			}
			return nil
		}
	}
}

func (w *watch) open() (err error) {
	if w.watcher, err = fsnotify.NewWatcher(); err != nil {
		return fmt.Errorf("cannot watch files: %w", err)
	}
	dirs := []string{w.source.Dir}
	if w.source.Env != "" {
		dirs = append(dirs, filepath.Join(w.source.Dir, EnvironmentsDir, w.source.Env))
	}
	for _, dir := range dirs {
		if err := w.watcher.Add(dir); err != nil {
			return fmt.Errorf("cannot watch %s: %w", dir, err)
		}
	}
	return nil
}

func (w *watch) close() {
	if w.watcher != nil {
		_ = w.watcher.Close()
		w.watcher = nil
	}
}
