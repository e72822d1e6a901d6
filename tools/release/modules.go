package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/mod/module"
	"golang.org/x/mod/zip"
)

// goModule is a module of the repository.
type goModule struct{ path, dir string }

// modules are the modules that a release publishes.
var modules = []goModule{
	{"github.com/dlqd/dlqd", ""},
	{"github.com/dlqd/dlqd/riverdlq", "riverdlq"},
}

// tag returns the name of the tag by which Go finds a version of the module in the repository.
func (m goModule) tag(version string) string {
	if m.dir == "" {
		return version
	}
	return m.dir + "/" + version
}

// writeModules writes the modules as a tree for GOPROXY=file://…/goproxy.
func (r *release) writeModules(context.Context) error {
	for _, m := range modules {
		escaped, err := module.EscapePath(m.path)
		if err != nil {
			return err
		}
		dir := filepath.Join(r.out, "goproxy", filepath.FromSlash(escaped), "@v")
		if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // for everyone to read
			return err
		}
		mod, err := os.ReadFile(filepath.Join(r.src(), m.dir, "go.mod"))
		if err != nil {
			return err
		}
		info, err := json.Marshal(struct {
			Version string
			Time    time.Time
		}{r.version, r.time})
		if err != nil {
			return err
		}
		for name, body := range map[string][]byte{
			"list": []byte(r.version + "\n"), r.version + ".mod": mod, r.version + ".info": info,
		} {
			if err := write(filepath.Join(dir, name), body); err != nil {
				return err
			}
		}
		archive, err := os.Create(filepath.Join(dir, r.version+".zip"))
		if err != nil {
			return err
		}
		err = zip.CreateFromVCS(archive, module.Version{Path: m.path, Version: r.version}, r.src(), "HEAD", m.dir)
		if closeErr := archive.Close(); err == nil {
			err = closeErr
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func write(path string, body []byte) error {
	return os.WriteFile(path, body, 0o644) //nolint:gosec // for everyone to read
}
