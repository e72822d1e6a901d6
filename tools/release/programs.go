package main

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/dlqd/dlqd/tools/internal/bom"
)

// variants are the programs of a release, with the build tags of each. The first is built for every platform, and the
// other only for Linux. dlqd-full also contains the libraries for object stores and Kafka, which are a quarter of the
// program. It has a separate archive and image.
var variants = []struct{ name, tags string }{{"dlqd", "nos3,nokafka"}, {"dlqd-full", ""}}

// program is a variant of dlqd for a platform.
type program struct {
	variant  string
	os, arch string
	body     []byte
	licences []byte // licences of the modules in the program
	notice   []byte
}

// writePrograms builds dlqd for each platform and writes archives, packages and images.
func (r *release) writePrograms(ctx context.Context) error {
	docs, err := r.generateDocs(ctx)
	if err != nil {
		return err
	}
	for i, variant := range variants {
		var linux []*program
		for _, platform := range r.platforms {
			system, arch, found := strings.Cut(platform, "/")
			if !found {
				return fmt.Errorf("platform %q must be an operating system and an architecture, such as linux/amd64", platform)
			}
			if i > 0 && system != "linux" {
				continue
			}
			p := &program{variant: variant.name, os: system, arch: arch}
			if err := r.build(ctx, p, variant.tags); err != nil {
				return err
			}
			if err := r.writeArchive(p, docs); err != nil {
				return err
			}
			if system != "linux" {
				continue
			}
			linux = append(linux, p)
			if i == 0 {
				if err := r.writePackages(ctx, p, docs); err != nil {
					return err
				}
			}
		}
		if len(linux) > 0 {
			if err := r.writeImage(linux); err != nil {
				return err
			}
		}
	}
	return nil
}

// writePackages writes the packages of a program for Linux.
func (r *release) writePackages(ctx context.Context, p *program, d *docs) error {
	files, err := r.packageFiles(p, d)
	if err != nil {
		return err
	}
	if err := r.writeDeb(ctx, p, files); err != nil {
		return err
	}
	return r.writeRPM(p, files)
}

// build builds a program, checks that Go recorded the version and the commit, and writes the program's bill of
// materials.
func (r *release) build(ctx context.Context, p *program, tags string) error {
	path := filepath.Join(r.work, r.name(p), "dlqd")
	if err := r.goBuild(ctx, path, tags, "GOOS="+p.os, "GOARCH="+p.arch); err != nil {
		return err
	}
	info, err := buildinfo.ReadFile(path)
	if err != nil {
		return err
	}
	settings := map[string]string{}
	for _, s := range info.Settings {
		settings[s.Key] = s.Value
	}
	if info.Main.Version != r.version || settings["vcs.revision"] != r.commit || settings["vcs.modified"] != "false" {
		return fmt.Errorf("%s: Go recorded version %s of commit %s (changed: %s) instead of %s of %s", r.name(p),
			info.Main.Version, settings["vcs.revision"], settings["vcs.modified"], r.version, r.commit)
	}
	if p.licences, p.notice, err = r.licences(ctx, info); err != nil {
		return err
	}
	var parts bytes.Buffer
	if err := bom.Write(&parts, path); err != nil {
		return err
	}
	if err := write(filepath.Join(r.out, r.name(p)+".cdx.json"), parts.Bytes()); err != nil {
		return err
	}
	p.body, err = os.ReadFile(path)
	return err
}

// name returns the name of a platform's files, without the extension.
func (r *release) name(p *program) string {
	return p.variant + "_" + r.number() + "_" + p.os + "_" + p.arch
}

// notInlined are packages that are compiled without inlining, which makes the program 1.1 MB smaller. The packages api,
// console and main contain huma's generic code once for each operation. The other packages do only a small part of the
// work on a message.
var notInlined = []string{
	"github.com/dlqd/dlqd/cmd/dlqd",
	"github.com/dlqd/dlqd/internal/alerting",
	"github.com/dlqd/dlqd/internal/analytics",
	"github.com/dlqd/dlqd/internal/api",
	"github.com/dlqd/dlqd/internal/approval",
	"github.com/dlqd/dlqd/internal/archive",
	"github.com/dlqd/dlqd/internal/console",
	"github.com/dlqd/dlqd/internal/doctor",
	"github.com/dlqd/dlqd/internal/group",
	"github.com/dlqd/dlqd/internal/host",
	"github.com/dlqd/dlqd/internal/metrics",
	"github.com/dlqd/dlqd/internal/policy",
	"github.com/dlqd/dlqd/internal/postgres",
	"github.com/dlqd/dlqd/internal/replay",
	"github.com/dlqd/dlqd/internal/retention",
	"github.com/dlqd/dlqd/internal/server",
	"github.com/dlqd/dlqd/internal/source",
	"crypto/x509",
	"database/sql",
	"encoding/xml",
	"github.com/evanphx/json-patch/v5",
	"github.com/evanphx/json-patch/v5/internal/json",
	"github.com/expr-lang/expr/checker",
	"github.com/expr-lang/expr/compiler",
	"github.com/expr-lang/expr/optimizer",
	"github.com/expr-lang/expr/parser",
	"github.com/go-jose/go-jose/v4",
	"github.com/go-jose/go-jose/v4/json",
	"github.com/go-viper/mapstructure/v2",
	"github.com/pressly/goose/v3",
	"github.com/prometheus/common/expfmt",
	"github.com/riverqueue/river/internal/maintenance",
	"github.com/santhosh-tekuri/jsonschema/v6",
	"github.com/spf13/cobra",
	"github.com/spf13/pflag",
	"github.com/vbauerster/mpb/v8",
	"go.yaml.in/yaml/v3",
	"golang.org/x/net/html",
	"google.golang.org/protobuf/reflect/protodesc",
	"html/template",
	"regexp/syntax",
	"text/template",
	"text/template/parse",
}

// goBuild builds cmd/dlqd of the clone. Of this machine's settings, it uses only the caches.
func (r *release) goBuild(ctx context.Context, path, tags string, settings ...string) error {
	// -s and -w omit the tables for debuggers; panics still name file and line. On amd64, the linker would align each of
	// the 40,000 functions to 32 bytes. With 8 bytes, the program is 0.5 MB smaller.
	args := []string{"build", "-trimpath", "-buildvcs=true", "-tags=" + tags, "-ldflags=-s -w -funcalign=8"}
	for _, pkg := range notInlined {
		args = append(args, "-gcflags="+pkg+"=-l")
	}
	_, err := output(ctx, r.src(), append(os.Environ(), append([]string{
		"CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "GOAMD64=v1", "GOARM64=v8.0", "GOEXPERIMENT=", "GODEBUG=",
	}, settings...)...), "go", append(args, "-o", path, "./cmd/dlqd")...)
	return err
}

// docs has the files that dlqd generates from its commands.
type docs struct{ man, completion []file }

// generateDocs builds a dlqd for this machine with the command man, and runs that command.
func (r *release) generateDocs(ctx context.Context) (*docs, error) {
	path := filepath.Join(r.work, "docs", "dlqd")
	if _, err := output(ctx, r.src(), append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off"),
		"go", "build", "-trimpath", "-tags=man", "-o", path, "./cmd/dlqd"); err != nil {
		return nil, err
	}
	// Some flags take their defaults from the environment, so the environment is fixed.
	env := []string{"HOME=~", "TZ=UTC", fmt.Sprintf("SOURCE_DATE_EPOCH=%d", r.time.Unix())}
	dir := filepath.Join(r.work, "man")
	if _, err := output(ctx, r.work, env, path, "man", dir); err != nil {
		return nil, err
	}
	var d docs
	pages, err := readTree(dir, "/")
	if err != nil {
		return nil, err
	}
	for _, page := range pages {
		if page.body, err = gzipped(page.body); err != nil {
			return nil, err
		}
		page.path += ".gz"
		d.man = append(d.man, page)
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		script, err := output(ctx, r.work, env, path, "completion", shell)
		if err != nil {
			return nil, err
		}
		d.completion = append(d.completion, file{path: "/" + shell, body: []byte(script + "\n")})
	}
	return &d, nil
}

// sourceFile returns a file of the commit as a file of a package.
func (r *release) sourceFile(path, name string, mode fs.FileMode) (file, error) {
	body, err := os.ReadFile(filepath.Join(r.src(), filepath.FromSlash(name)))
	return file{path: path, body: body, mode: mode}, err
}

// writeArchive writes the archive for machines without a package manager.
func (r *release) writeArchive(p *program, d *docs) error {
	root := "/" + r.name(p)
	files := []file{
		{path: root + "/dlqd", body: p.body, mode: 0o755},
		{path: root + "/LICENSES", body: p.licences},
		{path: root + "/NOTICE", body: p.notice},
	}
	for _, name := range []string{"LICENSE", "README.md", "CHANGELOG.md"} {
		f, err := r.sourceFile(root+"/"+name, name, 0)
		if err != nil {
			return err
		}
		files = append(files, f)
	}
	if p.os == "linux" {
		unit, err := r.sourceFile(root+"/dlqd.service", "deploy/dlqd.service", 0)
		if err != nil {
			return err
		}
		files = append(files, unit)
	}
	for _, page := range d.man {
		files = append(files, file{path: root + "/man" + page.path, body: page.body})
	}
	for _, script := range d.completion {
		files = append(files, file{path: root + "/completion" + script.path, body: script.body})
	}
	var archive bytes.Buffer
	if err := tarOf(&archive, files, r.time); err != nil {
		return err
	}
	packed, err := gzipped(archive.Bytes())
	if err != nil {
		return err
	}
	return write(filepath.Join(r.out, r.name(p)+".tar.gz"), packed)
}
