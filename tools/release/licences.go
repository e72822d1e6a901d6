package main

import (
	"bytes"
	"cmp"
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/mod/module"
)

var (
	licenceName = regexp.MustCompile(`(?i)^(un)?licen[cs]es?([-._].*)?$|^copying([-._].*)?$|^copyright([-._].*)?$`)
	noticeName  = regexp.MustCompile(`(?i)^notice([-._].*)?$`)
)

// licences returns the licence texts of all modules in a program, each text once, and the notices that the licences
// require. It returns an error for a module without a licence, because that module may not be distributed.
func (r *release) licences(ctx context.Context, info *buildinfo.BuildInfo) (licences, notice []byte, err error) {
	env, err := output(ctx, r.src(), nil, "go", "env", "GOMODCACHE", "GOROOT")
	if err != nil {
		return nil, nil, err
	}
	cache, goroot, _ := strings.Cut(env, "\n")
	type part struct{ name, dir string }
	parts := []part{{"Go's runtime and standard library " + info.GoVersion, goroot}}
	for _, m := range info.Deps {
		m = cmp.Or(m.Replace, m)
		path, err := module.EscapePath(m.Path)
		if err != nil {
			return nil, nil, err
		}
		parts = append(parts, part{m.Path + " " + m.Version, filepath.Join(cache, filepath.FromSlash(path)+"@"+m.Version)})
	}
	names, texts := map[string][]string{}, []string{}
	var notices bytes.Buffer
	_, _ = fmt.Fprintf(&notices, "dlqd %s\nCopyright (c) 2026 The dlqd authors\n\nIt is under the MIT licence. The program contains "+
		"the modules whose licences are in LICENSES.\nTheir notices:\n", r.number())
	for _, p := range parts {
		found, err := matching(p.dir, licenceName)
		if err != nil {
			return nil, nil, err
		}
		if len(found) == 0 {
			return nil, nil, fmt.Errorf("%s has no licence in %s", p.name, p.dir)
		}
		for _, text := range found {
			if names[text] == nil {
				texts = append(texts, text)
			}
			names[text] = append(names[text], p.name)
		}
		if found, err = matching(p.dir, noticeName); err != nil {
			return nil, nil, err
		}
		for _, text := range found {
			_, _ = fmt.Fprintf(&notices, "\n%s\n%s\n\n%s\n", p.name, strings.Repeat("-", len(p.name)), text)
		}
	}
	var all bytes.Buffer
	for _, text := range texts {
		rule := strings.Repeat("=", 100)
		_, _ = fmt.Fprintf(&all, "%s\n%s\n%s\n\n%s\n\n", rule, strings.Join(names[text], "\n"), rule, text)
	}
	return all.Bytes(), notices.Bytes(), nil
}

// matching returns the contents of the files in a directory whose names match.
func matching(dir string, name *regexp.Regexp) (texts []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if entry.IsDir() || !name.MatchString(entry.Name()) || strings.HasSuffix(entry.Name(), ".go") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, entry.Name()))
		if err != nil {
			return nil, err
		}
		if t := strings.TrimSpace(string(text)); !slices.Contains(texts, t) {
			texts = append(texts, t)
		}
	}
	return texts, nil
}
