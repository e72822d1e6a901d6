package main

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/stretchr/testify/require"
)

// serviceUser is a user id in the range that systemd uses for DynamicUser.
const serviceUser = 61234

// trial has a release of this repository. It is built once for all subtests.
type trial struct {
	dir   string // directory of the release
	files map[string]string
}

// TestTrial builds a release of HEAD and uses it as users do. It requires root (for chroot), debootstrap, rpm, minisign
// and a Postgres server, so "make trial-release" runs it. $PLATFORMS limits the platforms. If $RELEASE is an existing
// release v0.2.0, the signature and a second build are not tested.
func TestTrial(t *testing.T) {
	if os.Getenv("DLQD_TRIAL") == "" {
		t.Skip("DLQD_TRIAL is not set: run \"make trial-release\"")
	}
	requirePackager(t)
	list := strings.Split(cmp.Or(os.Getenv("PLATFORMS"), platforms), ",")
	require.Contains(t, list, "linux/"+runtime.GOARCH)
	source, err := filepath.Abs("../..")
	require.NoError(t, err)
	public, key := minisignKey(t)
	commit := run(t, source, "git", "rev-parse", "HEAD")
	make := func(source, version string, platforms ...string) string {
		began := time.Now()
		r := &release{
			source: source, version: version, out: publicDir(t), platforms: platforms, key: key, password: keyPassword,
			draft: true,
		}
		require.NoError(t, r.run(t.Context()))
		t.Logf("release %s of %s took %s", version, strings.Join(platforms, " "), time.Since(began).Round(time.Second))
		return r.out
	}
	made := os.Getenv("RELEASE") == ""
	b := &trial{dir: os.Getenv("RELEASE")}
	if made {
		b.dir = make(source, "v0.2.0", list...)
	}
	b.files = contents(t, b.dir)
	for name, body := range b.files {
		if !strings.Contains(name, "/") {
			t.Logf("%9d %s", len(body), name)
		}
	}

	t.Run("signature", func(t *testing.T) {
		if !made {
			t.Skip("signed by another key")
		}
		t.Log(run(t, b.dir, "minisign", "-Vm", "SHA256SUMS", "-p", public))
		changed := filepath.Join(t.TempDir(), "SHA256SUMS")
		require.NoError(t, os.WriteFile(changed, []byte(b.files["SHA256SUMS"]+"\n"), 0o600))
		_, err := output(t.Context(), b.dir, nil, "minisign", "-Vm", changed, "-x", "SHA256SUMS.minisig", "-p", public)
		require.Error(t, err, "a file that was changed after it was signed")
		run(t, b.dir, "sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")
	})
	t.Run("debian", b.debian)
	t.Run("rpm", b.rpm)
	t.Run("image", b.image)
	t.Run("archive", b.archive)
	t.Run("modules", b.modules)
	t.Run("same bytes", func(t *testing.T) {
		if !made {
			t.Skip("perhaps made from another commit")
		}
		clone := filepath.Join(t.TempDir(), "another", "clone")
		run(t, source, "git", "clone", "--quiet", source, clone)
		run(t, clone, "git", "checkout", "--quiet", "--detach", commit)
		t.Setenv("GOCACHE", t.TempDir()) // so that nothing compiled by the first build is reused
		requireEqualFiles(t, b.files, contents(t, make(clone, "v0.2.0", list...)))
	})
}

// keyPassword is the password of the secret key of a trial.
const keyPassword = "correct horse"

// minisignKey creates a key with a password, by the command in docs/versions.md, and returns the paths of its files.
func minisignKey(t *testing.T) (public, secret string) {
	t.Helper()
	dir := t.TempDir()
	public, secret = filepath.Join(dir, "dlqd.pub"), filepath.Join(dir, "dlqd.key")
	cmd := exec.CommandContext(t.Context(), "minisign", "-G", "-p", public, "-s", secret)
	cmd.Stdin = strings.NewReader(keyPassword + "\n" + keyPassword + "\n")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	return public, secret
}

// publicDir makes a directory that every user can read.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dlqd-trial-")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	return dir
}

// inRoot runs a command in another root directory, as root or as another user.
func inRoot(t *testing.T, root string, user uint32, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: user, Gid: user}}
	cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", "HOME=/tmp"}
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s", strings.Join(args, " "), out)
	return string(out)
}

// debian installs the package into a bare Debian, upgrades, runs and removes it.
func (b *trial) debian(t *testing.T) {
	root := publicDir(t)
	run(t, root, "debootstrap", "--variant=minbase", "bookworm", root)
	newer := filepath.Join(b.dir, "dlqd_0.2.0_"+runtime.GOARCH+".deb")
	run(t, root, "cp", newer, filepath.Join(root, "tmp/0.2.0.deb"))
	older := filepath.Join(t.TempDir(), "older")
	run(t, root, "dpkg-deb", "--raw-extract", newer, older)
	for name, change := range map[string]func(string) string{
		"DEBIAN/control":       func(s string) string { return strings.Replace(s, "Version: 0.2.0", "Version: 0.1.9", 1) },
		"usr/bin/dlqd":         func(string) string { return "#!/bin/sh\necho older\n" },
		"etc/dlqd/environment": func(s string) string { return s + "#another line\n" },
		"DEBIAN/md5sums":       func(string) string { return "" },
	} {
		body, err := os.ReadFile(filepath.Join(older, name))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(older, name), []byte(change(string(body))), 0o600))
	}
	run(t, root, "dpkg-deb", "--root-owner-group", "-Znone", "--build", older, filepath.Join(root, "tmp/0.1.9.deb"))
	dpkg := func(args ...string) string { return inRoot(t, root, 0, append([]string{"dpkg"}, args...)...) }
	began := time.Now()
	t.Log(dpkg("--install", "/tmp/0.1.9.deb"))
	t.Logf("installed in %s", time.Since(began).Round(100*time.Millisecond))
	require.Equal(t, "older\n", inRoot(t, root, serviceUser, "/usr/bin/dlqd"))

	// These are files of the administrator.
	secret, environment := filepath.Join(root, "etc/dlqd/database-url"), filepath.Join(root, "etc/dlqd/environment")
	policy := filepath.Join(root, "etc/dlqd/retry-policies.yaml")
	require.NoError(t, os.WriteFile(secret, []byte("postgres://db.example/app"), 0o600))
	require.NoError(t, os.WriteFile(environment, []byte("TZ=Europe/Berlin\n"), 0o600))
	require.NoError(t, os.WriteFile(policy, []byte("destinations:\n  default: {url: \"http://127.0.0.1:9/\"}\n"), 0o644))

	// The administrator and the package have both changed the file environment, so dpkg would ask which version to keep.
	// An unattended apt keeps the administrator's version, as this option does.
	t.Log(dpkg("--force-confold", "--install", "/tmp/0.2.0.deb"))
	require.Contains(t, inRoot(t, root, serviceUser, "/usr/bin/dlqd", "--version"), "0.2.0")
	kept, err := os.ReadFile(environment)
	require.NoError(t, err)
	require.Equal(t, "TZ=Europe/Berlin\n", string(kept))
	require.Contains(t, dpkg("--status", "dlqd"), "Status: install ok installed")
	changed := dpkg("--verify", "dlqd")
	require.Regexp(t, `^(.*c /etc/dlqd/(environment|database-url)\n){2}$`, changed)
	b.requireManPages(t, root)
	b.runService(t, root)
	began = time.Now()
	dpkg("--force-confold", "--install", "/tmp/0.2.0.deb")
	firstDeadLetter(t, "deb", began, filepath.Join(root, "usr/bin/dlqd"))

	dpkg("--remove", "dlqd")
	require.NoFileExists(t, filepath.Join(root, "usr/bin/dlqd"))
	require.FileExists(t, secret, "removing keeps what the administrator wrote")
	dpkg("--purge", "dlqd")
	require.NoFileExists(t, secret)
	require.FileExists(t, policy, "it is no file of the package")
}

// requireManPages checks that each command has a manual page. No page may contain a path of the machine that built it.
func (b *trial) requireManPages(t *testing.T, root string) {
	t.Helper()
	home, err := os.UserHomeDir()
	require.NoError(t, err)
	commands := regexp.MustCompile(`(?m)^  ([a-z-]+) {2,}\S`).FindAllStringSubmatch(
		inRoot(t, root, serviceUser, "/usr/bin/dlqd", "help"), -1)
	require.Greater(t, len(commands), 30)
	for _, command := range commands {
		if command[1] == "help" {
			continue
		}
		packed, err := os.Open(filepath.Join(root, "usr/share/man/man1/dlqd-"+command[1]+".1.gz"))
		require.NoError(t, err)
		text, err := gzip.NewReader(packed)
		require.NoError(t, err)
		page, err := io.ReadAll(text)
		require.NoError(t, err)
		require.NoError(t, packed.Close())
		require.Contains(t, string(page), ".SH SYNOPSIS")
		require.NotContains(t, string(page), home+"/")
	}
	for _, path := range []string{
		"usr/share/bash-completion/completions/dlqd", "usr/share/zsh/vendor-completions/_dlqd",
		"usr/share/fish/vendor_completions.d/dlqd.fish",
	} {
		script, err := os.ReadFile(filepath.Join(root, path))
		require.NoError(t, err)
		require.Contains(t, string(script), "__complete")
	}
}

// runService runs the command of the installed unit, as an unprivileged user, until the program reports that it is
// ready.
func (b *trial) runService(t *testing.T, root string) {
	t.Helper()
	unit, err := os.ReadFile(filepath.Join(root, "usr/lib/systemd/system/dlqd.service"))
	require.NoError(t, err)
	line := regexp.MustCompile(`(?m)^ExecStart=(\S+) (.*)$`).FindStringSubmatch(string(unit))
	require.NotNil(t, line)
	args := strings.Fields(strings.ReplaceAll(line[2], "/etc/dlqd", root+"/etc/dlqd"))
	database := relay(t, os.Getenv("DLQD_TEST_DATABASE_URL"))
	run(t, root, filepath.Join(root, line[1]), "migrate", "up", "--own-river", "--database-url", database)

	dir := publicDir(t)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "database-url"), []byte(database), 0o600))
	require.NoError(t, os.Chown(filepath.Join(dir, "database-url"), serviceUser, serviceUser))
	socket := filepath.Join(dir, "notify")
	systemd, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	require.NoError(t, err)
	defer func() { _ = systemd.Close() }()
	require.NoError(t, os.Chmod(socket, 0o777))
	require.NoError(t, systemd.SetReadDeadline(time.Now().Add(2*time.Minute)))

	var log bytes.Buffer
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), filepath.Join(root, line[1]),
		append(args, "--listen", "127.0.0.1:0", "--archive", "none")...)
	cmd.Dir, cmd.Stderr = dir, &log
	cmd.Env = []string{"NOTIFY_SOCKET=" + socket, "CREDENTIALS_DIRECTORY=" + dir, "XDG_DATA_HOME=" + dir, "HOME=" + dir}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: serviceUser, Gid: serviceUser}}
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	state := make([]byte, 100)
	n, err := systemd.Read(state)
	require.NoError(t, err, "%s", log.String())
	require.Equal(t, "READY=1", string(state[:n]))
	require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
	require.NoError(t, cmd.Wait(), log.String())
}

// firstDeadLetter runs an installed program until a page shows a dead letter. It logs the time since the installation
// began.
func firstDeadLetter(t *testing.T, way string, began time.Time, program string) {
	t.Helper()
	base := os.Getenv("DLQD_TEST_DATABASE_URL")
	database, err := url.Parse(base)
	require.NoError(t, err)
	name := "trial_" + strings.ToLower(strings.ReplaceAll(way, " ", "_"))
	run(t, ".", "psql", base, "-q", "-c", "CREATE DATABASE "+name)
	database.Path = "/" + name
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusUnprocessableEntity)
	}))
	defer receiver.Close()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := listener.Addr().String()
	require.NoError(t, listener.Close())

	run(t, ".", program, "migrate", "up", "--database-url", database.String())
	var log bytes.Buffer
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), program, "serve", "--database-url", database.String(),
		"--listen", address, "--archive", "none", "--destination", receiver.URL)
	cmd.Stderr = &log
	require.NoError(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	sent := false
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(20 * time.Millisecond) {
		require.True(t, time.Now().Before(deadline), "no page shows a dead letter")
		if !sent {
			response, err := http.Post("http://"+address+"/api/messages", "application/json", strings.NewReader(
				`{"messageId": "first-1", "queue": "default", "kind": "payment.captured", "payload": {"amount": 4200}}`))
			sent = err == nil && response.Body.Close() == nil && response.StatusCode == http.StatusAccepted
			continue
		}
		response, err := http.Get("http://" + address + "/dead-letters")
		if err != nil {
			continue
		}
		page, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		if bytes.Contains(page, []byte("422")) && bytes.Contains(page, []byte("payment.captured")) {
			break
		}
	}
	t.Logf("%s: %s from the command to the first dead letter on a page", way,
		time.Since(began).Round(100*time.Millisecond))
}

// relay returns a URL with which every user of this machine can reach a server that otherwise only root can reach.
func relay(t *testing.T, at string) string {
	t.Helper()
	u, err := url.Parse(at)
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	socket := filepath.Join(u.Query().Get("host"), ".s.PGSQL.5432")
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("unix", socket)
			if err != nil {
				_ = client.Close()
				continue
			}
			go func() { _, _ = io.Copy(server, client); _ = server.Close() }()
			go func() { _, _ = io.Copy(client, server); _ = client.Close() }()
		}
	}()
	return (&url.URL{
		Scheme: u.Scheme, User: u.User, Host: listener.Addr().String(), Path: u.Path, RawQuery: "sslmode=disable",
	}).String()
}

// rpm reads the package, and installs it into an empty root directory.
func (b *trial) rpm(t *testing.T) {
	arch := map[string]string{"amd64": "x86_64", "arm64": "aarch64"}[runtime.GOARCH]
	path := filepath.Join(b.dir, "dlqd-0.2.0-1."+arch+".rpm")
	info := run(t, b.dir, "rpm", "--query", "--info", "--package", path)
	for _, part := range []string{
		`Name +: dlqd`, `Version +: 0\.2\.0`, `Release +: 1`, `License +: MIT`, `Architecture: ` + arch,
	} {
		require.Regexp(t, "(?m)^"+part+"$", info)
	}
	require.Contains(t, run(t, b.dir, "rpm", "--checksig", "--nosignature", path), "digests OK")
	require.Equal(t, "/etc/dlqd/database-url\n/etc/dlqd/environment",
		run(t, b.dir, "rpm", "--query", "--configfiles", "--package", path))
	require.Contains(t, run(t, b.dir, "rpm", "--query", "--scripts", "--package", path), "systemctl enable --now dlqd")

	root := publicDir(t)
	run(t, root, "rpm", "--root", root, "--initdb")
	run(t, root, "rpm", "--root", root, "--install", "--noscripts", "--ignorearch", path) // the root has no shell
	require.Contains(t, inRoot(t, root, serviceUser, "/usr/bin/dlqd", "--version"), "0.2.0")
	require.FileExists(t, filepath.Join(root, "usr/share/zsh/site-functions/_dlqd"))
	run(t, root, "rpm", "--root", root, "--verify", "dlqd")
	run(t, root, "rpm", "--root", root, "--erase", "--noscripts", "dlqd")
	require.NoFileExists(t, filepath.Join(root, "usr/bin/dlqd"))
}

// image runs the program of each image in a root directory that contains only the image.
func (b *trial) image(t *testing.T) {
	for _, variant := range []string{"dlqd", "dlqd-full"} {
		all := images(t, b.files[variant+"_0.2.0_oci.tar"])
		image := all["linux/"+runtime.GOARCH]
		require.NotNil(t, image, variant)
		root := publicDir(t)
		unpack(t, mutate.Extract(image), root)
		config, err := image.ConfigFile()
		require.NoError(t, err)
		version := inRoot(t, root, 65532, config.Config.Entrypoint[0], "version")
		require.Contains(t, version, "0.2.0")
		t.Logf("%s: %d platforms\n%s", variant, len(all), version)
		list := exec.CommandContext(t.Context(), config.Config.Entrypoint[0], "archive", "list", "--archive",
			"s3://bucket?region=eu-central-1&endpoint=http://127.0.0.1:1")
		list.SysProcAttr = &syscall.SysProcAttr{Chroot: root, Credential: &syscall.Credential{Uid: 65532, Gid: 65532}}
		list.Dir, list.Env = "/", append(slices.Clone(config.Config.Env), "AWS_ACCESS_KEY_ID=a", "AWS_SECRET_ACCESS_KEY=b",
			"AWS_MAX_ATTEMPTS=1")
		out, err := list.CombinedOutput()
		require.Error(t, err)
		require.Equal(t, variant == "dlqd", strings.Contains(string(out), "use dlqd-full of the same release"), "%s", out)
	}
}

// archive checks the size of dlqd, and that each archive contains its licences and its manual page.
func (b *trial) archive(t *testing.T) {
	const maxSize = 40_000_000
	for _, variant := range []string{"dlqd", "dlqd-full"} {
		name := variant + "_0.2.0_linux_" + runtime.GOARCH
		began := time.Now()
		packed, err := gzip.NewReader(strings.NewReader(b.files[name+".tar.gz"]))
		require.NoError(t, err)
		dir := publicDir(t)
		unpack(t, packed, dir)
		firstDeadLetter(t, "tar "+strings.TrimPrefix(variant, "dlqd-"), began, filepath.Join(dir, name, "dlqd"))
		program, err := os.ReadFile(filepath.Join(dir, name, "dlqd"))
		require.NoError(t, err)
		t.Logf("%s: %d bytes", name, len(program))
		if variant == "dlqd" {
			require.LessOrEqual(t, len(program), maxSize)
			policy := t.TempDir()
			require.NoError(t, os.WriteFile(filepath.Join(policy, "sources.yaml"), []byte(
				"clusters: {main: {brokers: ['127.0.0.1:1']}}\nsources: {orders: {cluster: main, topics: [dead]}}\n"), 0o600))
			_, err := output(t.Context(), dir, nil, filepath.Join(dir, name, "dlqd"), "serve", "--config-dir", policy)
			require.ErrorContains(t, err, "this program has no Kafka: use dlqd-full of the same release")
		}
		here, err := os.Getwd()
		require.NoError(t, err)
		require.False(t, bytes.Contains(program, []byte(here)), "the program names the directory of its source")
		require.FileExists(t, filepath.Join(dir, name, "LICENSES"))
		require.FileExists(t, filepath.Join(dir, name, "man/dlqd.1.gz"))
	}
}

// modules installs dlqd with the go command, and makes a module require riverdlq. Both must come from the release's
// tree.
func (b *trial) modules(t *testing.T) {
	cache := run(t, b.dir, "go", "env", "GOMODCACHE")
	bin, modules := t.TempDir(), t.TempDir()
	env := append(os.Environ(),
		// Modules that are not in the release come from this machine's module cache, and otherwise from the configured
		// proxy.
		"GOPROXY=file://"+b.dir+"/goproxy,file://"+cache+"/cache/download,"+run(t, b.dir, "go", "env", "GOPROXY"),
		"GOSUMDB=off", "GOFLAGS=-modcacherw", "GOWORK=off", "GOBIN="+bin, "GOMODCACHE="+modules)
	began := time.Now()
	_, err := output(t.Context(), bin, env, "go", "install", "-trimpath", "github.com/dlqd/dlqd/cmd/dlqd@v0.2.0")
	require.NoError(t, err)
	require.Equal(t, "dlqd version 0.2.0", run(t, bin, filepath.Join(bin, "dlqd"), "--version"))

	firstDeadLetter(t, "go install", began, filepath.Join(bin, "dlqd"))

	application := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(application, "main.go"), []byte(`package main

import (
	"fmt"

	"github.com/dlqd/dlqd/riverdlq"
)

func main() { fmt.Println((&riverdlq.Error{Type: "CardDeclined"}).Type) }
`), 0o600))
	for _, args := range [][]string{
		{"mod", "init", "example.com/application"},
		{"get", "github.com/dlqd/dlqd/riverdlq@v0.2.0"},
		{"build", "-o", "application", "."},
	} {
		_, err := output(t.Context(), application, env, "go", args...)
		require.NoError(t, err)
	}
	require.Equal(t, "CardDeclined", run(t, application, "./application"))
	list, err := output(t.Context(), application, env, "go", "list", "-m", "all")
	require.NoError(t, err)
	required := strings.Split(list, "\n")[1:]
	require.NotContains(t, required, "github.com/dlqd/dlqd v0.2.0", "riverdlq requires River alone")
	t.Log(fmt.Sprintf("an application that requires riverdlq alone has %d modules", len(required)))
}
