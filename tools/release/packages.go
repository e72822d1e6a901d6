package main

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // dpkg's list of checksums has no other
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/rpmpack"
)

// scripts run when a package is installed or removed, and environment is a file of settings for the service.
//
//go:embed package
var scripts embed.FS

const (
	summary     = "dead-letter office for Postgres and River"
	description = `When a job of River fails for good, the transaction that discards it also writes a dead letter. dlqd
classifies the error, redelivers the work if that can help, and leaves the rest to an operator, in a
console, an API, a command line and SQL. It needs one Postgres database and nothing else.`
	homepage   = "https://github.com/dlqd/dlqd"
	maintainer = "The dlqd authors <noreply@dlqd.invalid>"
)

// packageFiles returns the files that are in both the Debian package and the RPM package.
func (r *release) packageFiles(p *program, d *docs) ([]file, error) {
	const doc = "/usr/share/doc/dlqd/"
	environment, err := scripts.ReadFile("package/environment")
	if err != nil {
		return nil, err
	}
	files := []file{
		{path: "/usr/bin/dlqd", body: p.body, mode: 0o755},
		{path: "/etc/dlqd/environment", body: environment, mode: 0o600, config: true},
		{path: "/etc/dlqd/database-url", mode: 0o600, config: true},
		{path: "/etc/dlqd/secrets/", mode: 0o700},
		{path: doc + "LICENSES", body: p.licences},
		{path: doc + "NOTICE", body: p.notice},
	}
	for path, name := range map[string]string{
		"/usr/lib/systemd/system/dlqd.service": "deploy/dlqd.service",
		doc + "copyright":                      "LICENSE",
		doc + "CHANGELOG.md":                   "CHANGELOG.md",
	} {
		f, err := r.sourceFile(path, name, 0)
		if err != nil {
			return nil, err
		}
		files = append(files, f)
	}
	for _, page := range d.man {
		files = append(files, file{path: "/usr/share/man/man1" + page.path, body: page.body})
	}
	for _, script := range d.completion {
		path := map[string]string{
			"/bash": "/usr/share/bash-completion/completions/dlqd",
			"/zsh":  "/usr/share/zsh/vendor-completions/_dlqd",
			"/fish": "/usr/share/fish/vendor_completions.d/dlqd.fish",
		}[script.path]
		files = append(files, file{path: path, body: script.body})
	}
	return files, nil
}

// packageVersion returns the version in a form that dpkg and rpm order correctly: 0.2.0~rc.1 comes before 0.2.0.
func (r *release) packageVersion() string { return strings.Replace(r.number(), "-", "~", 1) }

// writeDeb writes a Debian package.
func (r *release) writeDeb(ctx context.Context, p *program, files []file) error {
	root := filepath.Join(r.work, "deb_"+p.arch)
	var sums, conffiles strings.Builder
	size := 0
	for _, f := range sorted(files) {
		switch {
		case f.isDir():
		case f.config:
			_, _ = fmt.Fprintln(&conffiles, f.path)
		default:
			_, _ = fmt.Fprintf(&sums, "%x  %s\n", md5.Sum(f.body), strings.TrimPrefix(f.path, "/")) //nolint:gosec // for dpkg
		}
		size += len(f.body)
	}
	control := fmt.Sprintf("Package: dlqd\nVersion: %s\nArchitecture: %s\nMaintainer: %s\nInstalled-Size: %d\nSection: database\n"+
		"Priority: optional\nHomepage: %s\nRecommends: ca-certificates\nSuggests: postgresql\nDescription: %s\n %s\n",
		r.packageVersion(), p.arch, maintainer, (size+1023)/1024, homepage, summary,
		strings.ReplaceAll(description, "\n", "\n "))
	files = append(files, file{path: "/DEBIAN/control", body: []byte(control)},
		file{path: "/DEBIAN/conffiles", body: []byte(conffiles.String())},
		file{path: "/DEBIAN/md5sums", body: []byte(sums.String())})
	for _, name := range []string{"postinst", "prerm", "postrm"} {
		script, err := scripts.ReadFile("package/" + name)
		if err != nil {
			return err
		}
		files = append(files, file{path: "/DEBIAN/" + name, body: script, mode: 0o755})
	}
	if err := stage(root, files, r.time); err != nil {
		return err
	}
	// Use one thread, so that the bytes do not depend on the number of processors.
	_, err := output(ctx, r.work, append(os.Environ(), fmt.Sprintf("SOURCE_DATE_EPOCH=%d", r.time.Unix())), "dpkg-deb",
		"--root-owner-group", "--threads-max=1", "-Zxz", "--build", root,
		filepath.Join(r.out, "dlqd_"+r.packageVersion()+"_"+p.arch+".deb"))
	return err
}

// writeRPM writes an RPM package.
func (r *release) writeRPM(p *program, files []file) error {
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[p.arch]
	if arch == "" {
		return fmt.Errorf("the name of RPM for the architecture %s is not known", p.arch)
	}
	pkg, err := rpmpack.NewRPM(rpmpack.RPMMetaData{
		Name: "dlqd", Version: r.packageVersion(), Release: "1", Arch: arch, Epoch: rpmpack.NoEpoch,
		Summary: summary, Description: description, URL: homepage, Packager: maintainer, Licence: "MIT",
		BuildHost: "localhost", BuildTime: r.time, Compressor: "gzip",
	})
	if err != nil {
		return err
	}
	for _, f := range files {
		entry := rpmpack.RPMFile{
			Name: f.path, Body: f.body, Mode: uint(f.perm()), Owner: "root", Group: "root", MTime: uint32(r.time.Unix()),
		}
		if f.isDir() {
			entry.Name, entry.Mode = strings.TrimSuffix(f.path, "/"), entry.Mode|0o40000
		}
		if f.config {
			entry.Type = rpmpack.ConfigFile | rpmpack.NoReplaceFile
		}
		entry.Name = strings.Replace(entry.Name, "/zsh/vendor-completions/", "/zsh/site-functions/", 1)
		pkg.AddFile(entry)
	}
	pkg.AddFile(rpmpack.RPMFile{
		Name: "/etc/dlqd", Mode: 0o40755, Owner: "root", Group: "root", MTime: uint32(r.time.Unix()),
	})
	for name, add := range map[string]func(string){
		"postin": pkg.AddPostin, "preun": pkg.AddPreun, "postun": pkg.AddPostun,
	} {
		script, err := scripts.ReadFile("package/" + name)
		if err != nil {
			return err
		}
		add(string(script))
	}
	var out bytes.Buffer
	if err := pkg.Write(&out); err != nil {
		return err
	}
	return write(filepath.Join(r.out, fmt.Sprintf("dlqd-%s-1.%s.rpm", r.packageVersion(), arch)), out.Bytes())
}
