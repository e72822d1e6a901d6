package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// file is a file of a package, with an absolute path. If the path ends with a slash, the file is a directory.
type file struct {
	path   string
	mode   fs.FileMode // 0 means 0644, or 0755 for a directory
	body   []byte
	config bool // a configuration file, which an upgrade does not overwrite
	owner  int  // id of the user and of the group
}

func (f *file) isDir() bool { return strings.HasSuffix(f.path, "/") }

func (f *file) perm() fs.FileMode {
	switch {
	case f.mode != 0:
		return f.mode
	case f.isDir():
		return 0o755
	default:
		return 0o644
	}
}

// sorted returns the files, with their parent directories, in the order in which archives contain them.
func sorted(files []file) []file {
	all := map[string]file{}
	for _, f := range files {
		for dir := path.Dir(strings.TrimSuffix(f.path, "/")); dir != "/" && dir != "."; dir = path.Dir(dir) {
			if _, has := all[dir+"/"]; !has {
				all[dir+"/"] = file{path: dir + "/"}
			}
		}
		all[f.path] = f
	}
	list := make([]file, 0, len(all))
	for _, f := range all {
		list = append(list, f)
	}
	slices.SortFunc(list, func(a, b file) int { return strings.Compare(a.path, b.path) })
	return list
}

// tarOf writes files to an archive. The bytes of the archive depend only on the files and the time.
func tarOf(w io.Writer, files []file, at time.Time) error {
	archive := tar.NewWriter(w)
	for _, f := range sorted(files) {
		header := &tar.Header{
			Name: strings.TrimPrefix(f.path, "/"), Mode: int64(f.perm()), Uid: f.owner, Gid: f.owner,
			Size: int64(len(f.body)), ModTime: at, Typeflag: tar.TypeReg, Format: tar.FormatPAX,
		}
		if f.isDir() {
			header.Typeflag = tar.TypeDir
		}
		if err := archive.WriteHeader(header); err != nil {
			return err
		}
		if _, err := archive.Write(f.body); err != nil {
			return err
		}
	}
	return archive.Close()
}

// gzipped returns body compressed. The result contains neither a time nor a name.
func gzipped(body []byte) ([]byte, error) {
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(body); err != nil {
		return nil, err
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return packed.Bytes(), nil
}

// stage writes files below a directory, with their modes and the given time.
func stage(dir string, files []file, at time.Time) error {
	list := sorted(files)
	for _, f := range list {
		name := filepath.Join(dir, filepath.FromSlash(f.path))
		if f.isDir() {
			if err := os.MkdirAll(name, 0o755); err != nil { //nolint:gosec // its mode follows
				return err
			}
		} else if err := write(name, f.body); err != nil {
			return err
		}
		if err := os.Chmod(name, f.perm()); err != nil {
			return err
		}
	}
	for _, f := range slices.Backward(list) { // writing a file changes the time of its directory
		if err := os.Chtimes(filepath.Join(dir, filepath.FromSlash(f.path)), at, at); err != nil {
			return err
		}
	}
	return nil
}

// readTree returns the files below a directory, with paths below another directory.
func readTree(dir, below string) (files []file, err error) {
	return files, filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		relative, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		body, err := os.ReadFile(name)
		files = append(files, file{path: path.Join(below, filepath.ToSlash(relative)), body: body})
		return err
	})
}
