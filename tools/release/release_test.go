package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"aead.dev/minisign"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/require"
)

// repository creates a repository with the files that a release requires, and with a small program that builds in a
// second.
func repository(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":           "module github.com/dlqd/dlqd\n\ngo 1.25\n",
		"LICENSE":          "MIT License",
		"README.md":        "# dlqd",
		"CHANGELOG.md":     "# Changelog\n\n## 0.2.0 - 2026-12-01\n\n### Breaking\n\nNothing.\n",
		"docs/versions.md": "| 0.2.0 | 7 | 0.1.0 |",
		"db/frozen.sum":    "00  migrations/00007_last.sql",

		"db/migrations/00007_last.sql":                          "SELECT 1;",
		"internal/postgres/testdata/frozen/00007.sql.gz":        "",
		"internal/postgres/testdata/frozen/00007.statements.gz": "",
		"deploy/dlqd.service":                                   "[Service]\nExecStart=/usr/bin/dlqd serve\n",
		"riverdlq/go.mod":                                       "module github.com/dlqd/dlqd/riverdlq\n\ngo 1.25\n",
		"riverdlq/riverdlq.go":                                  "package riverdlq\n",
		"riverdlq/testdata/a.b":                                 "c",
		"cmd/dlqd/main.go": `package main

import "os"

func main() {
	if len(os.Args) == 3 && os.Args[1] == "man" {
		_ = os.MkdirAll(os.Args[2], 0o700)
		_ = os.WriteFile(os.Args[2]+"/dlqd.1", []byte(os.Getenv("HOME")), 0o600)
	}
}
`,
	} {
		path := filepath.Join(dir, name)
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o750))
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	run(t, dir, "git", "init", "--quiet", "--initial-branch=main")
	run(t, dir, "git", "add", "--all")
	run(t, dir, "git", "-c", "user.name=dlqd", "-c", "user.email=dlqd@localhost", "commit", "--quiet", "-m", "all")
	return dir
}

func run(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	out, err := output(t.Context(), dir, nil, name, args...)
	require.NoError(t, err)
	return out
}

// newKey writes a secret key without a password, and returns the public key and the path of the secret key.
func newKey(t *testing.T) (minisign.PublicKey, string) {
	t.Helper()
	public, key, err := minisign.GenerateKey(rand.Reader)
	require.NoError(t, err)
	text, err := key.MarshalText()
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "dlqd.key")
	require.NoError(t, os.WriteFile(path, text, 0o600))
	return public, path
}

// contents returns the contents of the files below a directory, by name.
func contents(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	require.NoError(t, filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		body, err := os.ReadFile(path)
		all[strings.TrimPrefix(path, dir+"/")] = string(body)
		return err
	}))
	return all
}

// requireEqualFiles requires that two releases are equal. It does not print their bytes.
func requireEqualFiles(t *testing.T, want, got map[string]string) {
	t.Helper()
	for name := range want {
		require.Contains(t, got, name)
	}
	for name, body := range got {
		require.Contains(t, want, name)
		require.Truef(t, want[name] == body, "%s has other bytes", name)
	}
}

// images returns the images in an archive with an image layout.
func images(t *testing.T, archive string) map[string]v1.Image {
	t.Helper()
	dir := t.TempDir()
	unpack(t, strings.NewReader(archive), dir)
	at, err := layout.FromPath(dir)
	require.NoError(t, err)
	top, err := at.ImageIndex()
	require.NoError(t, err)
	manifest, err := top.IndexManifest()
	require.NoError(t, err)
	require.Len(t, manifest.Manifests, 1, "podman and skopeo want one reference")
	index, err := top.ImageIndex(manifest.Manifests[0].Digest)
	require.NoError(t, err)
	manifest, err = index.IndexManifest()
	require.NoError(t, err)
	all := map[string]v1.Image{}
	for _, m := range manifest.Manifests {
		all[m.Platform.String()], err = index.Image(m.Digest)
		require.NoError(t, err)
	}
	return all
}

func unpack(t *testing.T, from io.Reader, dir string) {
	t.Helper()
	archive := tar.NewReader(from)
	for {
		header, err := archive.Next()
		if err == io.EOF {
			return
		}
		require.NoError(t, err)
		path := filepath.Join(dir, header.Name)
		if header.Typeflag == tar.TypeDir {
			require.NoError(t, os.MkdirAll(path, header.FileInfo().Mode().Perm()))
			continue
		}
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY, header.FileInfo().Mode().Perm())
		require.NoError(t, err)
		_, err = io.Copy(file, archive)
		require.NoError(t, err)
		require.NoError(t, file.Close())
	}
}

func requirePackager(t *testing.T) {
	t.Helper()
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("dpkg-deb is not installed")
	}
}

func TestRelease_HasTheSameBytesInEveryDirectory(t *testing.T) {
	t.Parallel()
	requirePackager(t)
	source := repository(t)
	public, key := newKey(t)
	platform := "linux/" + runtime.GOARCH
	var releases []map[string]string
	for range 2 {
		clone := filepath.Join(t.TempDir(), "clone")
		run(t, source, "git", "clone", "--quiet", source, clone)
		r := &release{
			source: clone, version: "0.2.0", out: filepath.Join(clone, "dist"), platforms: []string{platform}, key: key,
		}
		require.NoError(t, r.run(t.Context()))
		releases = append(releases, contents(t, r.out))
	}
	requireEqualFiles(t, releases[0], releases[1])

	files := releases[0]
	sums := files["SHA256SUMS"]
	require.Len(t, strings.Split(strings.TrimSpace(sums), "\n"), len(files)-2, "it names all but itself and its signature")
	require.True(t, minisign.Verify(public, []byte(sums), []byte(files["SHA256SUMS.minisig"])))
	for _, m := range []string{"github.com/dlqd/dlqd", "github.com/dlqd/dlqd/riverdlq"} {
		require.Equal(t, "v0.2.0\n", files["goproxy/"+m+"/@v/list"])
	}
	require.NotContains(t, files["goproxy/github.com/dlqd/dlqd/@v/v0.2.0.zip"], "riverdlq.go", "it is another module")

	all := images(t, files["dlqd_0.2.0_oci.tar"])
	image := all[platform]
	require.NotNil(t, image)
	config, err := image.ConfigFile()
	require.NoError(t, err)
	require.Equal(t, "65532:65532", config.Config.User)
	require.Equal(t, []string{"/usr/bin/dlqd"}, config.Config.Entrypoint)
	root := t.TempDir()
	unpack(t, mutate.Extract(image), root)
	require.FileExists(t, filepath.Join(root, "usr/bin/dlqd"))
	require.FileExists(t, filepath.Join(root, "usr/share/doc/dlqd/LICENSES"))
	roots, err := os.ReadFile(filepath.Join(root, "etc/ssl/certs/ca-certificates.crt"))
	require.NoError(t, err)
	require.True(t, x509.NewCertPool().AppendCertsFromPEM(roots))
}

func TestRelease_IsOfACommitAndItsTag(t *testing.T) {
	t.Parallel()
	source := repository(t)
	try := func(version, out string) error {
		return (&release{source: source, version: version, out: out}).run(context.WithoutCancel(t.Context()))
	}
	require.ErrorContains(t, try("0.2", t.TempDir()), "must be a semantic version")

	used := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(used, "dlqd_0.1.0_linux_amd64.tar.gz"), nil, 0o600))
	require.ErrorContains(t, try("0.2.0", used), "is not empty")

	run(t, source, "git", "tag", "riverdlq/v0.1.0")
	run(t, source, "git", "-c", "user.name=dlqd", "-c", "user.email=dlqd@localhost", "commit", "--quiet", "--allow-empty",
		"-m", "later")
	require.ErrorContains(t, try("0.1.0", t.TempDir()), "the tag riverdlq/v0.1.0 is of commit")

	require.NoError(t, os.WriteFile(filepath.Join(source, "README.md"), []byte("changed"), 0o600))
	require.ErrorContains(t, try("0.2.0", t.TempDir()), "files differ from the commit")
}

// TestRelease_IsPrepared takes a commit that is prepared for a release and changes one file at a time. Each change must
// be refused.
func TestRelease_IsPrepared(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ path, text, want string }{
		{"CHANGELOG.md", "## Unreleased\n\n## 0.2.0 - 2026-12-01\n\n### Breaking\n", "the first section must be"},
		{"CHANGELOG.md", "# Changelog\n\n## 0.2.0\n\n### Breaking\n", "the first section must be"},
		{"CHANGELOG.md", "# Changelog\n\n## 0.2.0 - 2026-12-01\n\n### Added\n", `must begin with "### Breaking"`},
		{"docs/versions.md", "| 0.2.0 | 6 | 0.1.0 |", `no row that begins with "| 0.2.0 | 7 |"`},
		{"db/frozen.sum", "", "00007_last.sql is not frozen"},
		{"db/migrations/00008_more.sql", "SELECT 1;", "00008_more.sql is not frozen"},
	} {
		source := repository(t)
		require.NoError(t, os.WriteFile(filepath.Join(source, c.path), []byte(c.text), 0o600))
		run(t, source, "git", "add", "--all")
		run(t, source, "git", "-c", "user.name=dlqd", "-c", "user.email=dlqd@localhost", "commit", "--quiet", "-m", "change")
		err := (&release{source: source, version: "0.2.0", out: t.TempDir()}).run(t.Context())
		require.ErrorContains(t, err, c.want)
	}
}

func TestRelease_OrdersPreReleases(t *testing.T) {
	t.Parallel()
	require.Equal(t, "0.2.0~rc.1", (&release{version: "v0.2.0-rc.1"}).packageVersion())
	require.Equal(t, "0.2.0", (&release{version: "v0.2.0"}).packageVersion())
}

func TestTar_HasParentsAndNoTimesOfItsOwn(t *testing.T) {
	t.Parallel()
	var first, second bytes.Buffer
	files := []file{{path: "/b/c/d", body: []byte("x")}, {path: "/a", mode: 0o755}, {path: "/b/", mode: 0o700}}
	at := (&release{}).time
	require.NoError(t, tarOf(&first, files, at))
	require.NoError(t, tarOf(&second, []file{files[2], files[0], files[1]}, at))
	require.Equal(t, first.Bytes(), second.Bytes())
	var names []string
	for archive := tar.NewReader(&first); ; {
		header, err := archive.Next()
		if err != nil {
			break
		}
		names = append(names, fmt.Sprintf("%s %o", header.Name, header.Mode))
	}
	require.Equal(t, []string{"a 755", "b/ 700", "b/c/ 755", "b/c/d 644"}, names)
}
