package postgres

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gofrs/flock"
	"github.com/jackc/pgx/v5"
)

const (
	embeddedDatabase = "dlqd"
	embeddedUser     = "dlqd"

	// embeddedStartTimeout bounds the time until the server accepts connections. After a crash, the server first replays
	// at most max_wal_size of WAL.
	embeddedStartTimeout = 2 * time.Minute
	// embeddedStopTimeout bounds a stop. Half of it is for the server's shutdown checkpoint.
	embeddedStopTimeout = time.Minute
	// killedTimeout is the least time that a killed server has to exit.
	killedTimeout = time.Second

	// orphanTries and orphanWait bound the attempts to start while children of a killed server still run.
	orphanTries = 20
	orphanWait  = 500 * time.Millisecond

	// maxLogBytes is the size above which the next start renames the log. The renamed log replaces the previous renamed
	// one.
	maxLogBytes = 16 << 20

	// maxSocketDir follows from the kernel's limit of 107 bytes for socket paths (sun_path); the
	// file is .s.PGSQL.5432.
	maxSocketDir = 107 - len("/.s.PGSQL.5432")
)

// EmbeddedConfig configures an embedded server.
type EmbeddedConfig struct {
	// DataDir holds the server's files, socket and log, and a lock file that only one dlqd can lock.
	DataDir string
	// BinDir is the directory of the server's programs. If it is empty, [FindBinaries] searches for
	// them.
	BinDir string
	// Throwaway makes the server faster and not durable, for tests.
	Throwaway bool
	Logger    *slog.Logger
}

// Embedded is a Postgres server that runs as a child of this process. The server listens only on a socket in a
// directory that only the server's user and root can enter.
type Embedded struct {
	config EmbeddedConfig
	bin    Binaries
	owner  owner
	lock   *flock.Flock
	server *exec.Cmd
	exited chan struct{}
	socket string // directory
}

// HeldError is returned by [StartEmbedded] if another dlqd uses the data directory.
type HeldError struct{ DataDir, Holder string }

func (e *HeldError) Error() string {
	return fmt.Sprintf("data directory %s is in use by %s; stop it, or choose another with --data-dir",
		e.DataDir, e.Holder)
}

// DefaultDataDir returns the user's data directory. For root it is /var/lib/dlqd, because the
// server does not run as root and could not reach a directory in root's home.
func DefaultDataDir() (string, error) {
	if os.Geteuid() == 0 {
		return "/var/lib/dlqd", nil
	}
	if dir := os.Getenv("XDG_DATA_HOME"); filepath.IsAbs(dir) {
		return filepath.Join(dir, "dlqd"), nil
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return "", fmt.Errorf("no default data directory: %w; choose one with --data-dir", err)
	}
	return filepath.Join(home, ".local", "share", "dlqd"), nil
}

// StartEmbedded starts the server of a data directory. It creates the directory if needed. If a killed dlqd left the
// server running, StartEmbedded first shuts that server down.
func StartEmbedded(ctx context.Context, config EmbeddedConfig) (*Embedded, error) {
	dir, err := filepath.Abs(config.DataDir)
	if err != nil {
		return nil, err
	}
	config.DataDir = dir
	ignoreDeadlySignals()
	e := &Embedded{config: config}
	if e.owner, err = serverOwner(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("data directory: %w", err)
	}
	if err := e.acquire(); err != nil {
		return nil, err
	}
	if err := e.start(ctx); err != nil {
		_ = e.lock.Unlock()
		return nil, err
	}
	return e, nil
}

// ignoreDeadlySignals keeps SIGPIPE and SIGHUP from ending this process before it has stopped its server. The process
// gets SIGPIPE if the reader of its output has ended, and SIGHUP if its terminal has closed. Code of this process can
// still react to both signals ([signal.Notify]). Unlike with [signal.Ignore], programs that this process starts receive
// both signals as usual.
func ignoreDeadlySignals() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE, syscall.SIGHUP) }

func (e *Embedded) start(ctx context.Context) error {
	if err := e.owner.chown(e.config.DataDir); err != nil {
		return err
	}
	if err := e.owner.canReach(ctx, e.config.DataDir); err != nil {
		return err
	}

	major, err := dataVersion(e.pgdata())
	if err != nil {
		return err
	}
	if e.bin, err = FindBinaries(ctx, e.config.BinDir, major); err != nil {
		return err
	}
	if major == 0 {
		if err := e.initdb(ctx); err != nil {
			return err
		}
	}
	if e.socket, err = e.socketDir(); err != nil {
		return err
	}
	if err := e.stopLeftover(ctx); err != nil {
		return err
	}
	for try := 1; ; try++ {
		if err := e.launch(); err != nil {
			return err
		}
		err := e.awaitReady(ctx)
		if err == nil {
			return nil
		}
		_ = e.terminate(embeddedStopTimeout)
		// A killed server's children hold its shared memory until they notice that the server is gone.
		if try == orphanTries || !strings.Contains(e.logTail(), "pre-existing shared memory block") {
			return err
		}
		time.Sleep(orphanWait)
	}
}

// URL returns the connection string of the server's database.
func (e *Embedded) URL() string { return embeddedURL(e.socket) }

func embeddedURL(socket string) string {
	return (&url.URL{
		Scheme: "postgres", User: url.User(embeddedUser), Path: "/" + embeddedDatabase,
		RawQuery: "host=" + strings.ReplaceAll(url.QueryEscape(socket), "+", "%20"), // libpq does not decode + as a space
	}).String()
}

// Exited returns a channel that is closed when the server has exited for any reason.
func (e *Embedded) Exited() <-chan struct{} { return e.exited }

// Stop shuts the server down and releases the data directory.
func (e *Embedded) Stop() error { return e.StopWithin(embeddedStopTimeout) }

// StopWithin is [Embedded.Stop] with a limit. A server that takes longer is killed, and runs crash recovery at its next
// start.
func (e *Embedded) StopWithin(limit time.Duration) error {
	err := e.terminate(limit)
	if filepath.Dir(e.socket) != e.config.DataDir { // a temporary directory
		err = errors.Join(err, os.RemoveAll(e.socket))
	}
	return errors.Join(err, e.lock.Unlock())
}

// SetHolder records this process, followed by the text about, as the holder of the data directory. The error of a
// second dlqd shows that record.
func (e *Embedded) SetHolder(about string) error {
	return os.WriteFile(e.holderPath(), fmt.Appendf(nil, "dlqd with process id %d%s", os.Getpid(), about), 0o600)
}

// EmbeddedURL returns the connection string of the running server of a data directory, for "dlqd psql", or an error if
// none runs.
func EmbeddedURL(dataDir string) (string, error) {
	dir, err := filepath.Abs(dataDir)
	if err != nil {
		return "", err
	}
	raw, err := os.ReadFile(filepath.Join(dir, "pgdata", "postmaster.pid"))
	if errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("no server runs on data directory %s: start it with \"dlqd serve\", or name a database with "+
			"--database-url", dir)
	}
	if err != nil {
		return "", err
	}
	// Line 5 of postmaster.pid is the first socket directory (utils/pidfile.h).
	lines := strings.Split(string(raw), "\n")
	if len(lines) < 5 {
		return "", fmt.Errorf("the server on data directory %s is still starting; try again", dir)
	}
	return embeddedURL(lines[4]), nil
}

func (e *Embedded) pgdata() string     { return filepath.Join(e.config.DataDir, "pgdata") }
func (e *Embedded) holderPath() string { return filepath.Join(e.config.DataDir, "dlqd.holder") }

// LogPath returns the path of the server's log.
func (e *Embedded) LogPath() string { return filepath.Join(e.config.DataDir, "postgres.log") }

func (e *Embedded) acquire() error {
	e.lock = flock.New(filepath.Join(e.config.DataDir, "dlqd.lock"), flock.SetPermissions(0o600))
	locked, err := e.lock.TryLock()
	if err != nil {
		return fmt.Errorf("lock data directory: %w", err)
	}
	if !locked {
		holder := "another dlqd"
		if raw, err := os.ReadFile(e.holderPath()); err == nil && len(raw) > 0 {
			holder = string(raw)
		}
		return &HeldError{DataDir: e.config.DataDir, Holder: holder}
	}
	return e.SetHolder("")
}

// dataVersion returns the major version of the server that created a data directory, or 0 if the directory has no
// database.
func dataVersion(pgdata string) (int, error) {
	raw, err := os.ReadFile(filepath.Join(pgdata, "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(raw)))
}

// initdb creates the server's files in a directory with a temporary name and renames that directory at the end. So an
// interrupted initdb leaves no incomplete database.
func (e *Embedded) initdb(ctx context.Context) error {
	unfinished := e.pgdata() + ".new"
	if err := os.RemoveAll(unfinished); err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, e.bin.Path("initdb"), "-D", unfinished, "-U", embeddedUser, //nolint:gosec // the program the user has installed
		"--auth=trust", "--encoding=UTF8", "--locale=C", "--data-checksums", "--no-instructions")
	if e.config.Throwaway {
		cmd.Args = append(cmd.Args, "--no-sync")
	}
	e.owner.runAs(cmd)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("initdb: %w: %s", err, strings.TrimSpace(string(out)))
	}
	return os.Rename(unfinished, e.pgdata())
}

// socketDir returns a directory for the socket, in the data directory if possible. It returns a temporary directory if
// the path is too long for a socket, or contains a comma, which separates hosts in a connection string.
func (e *Embedded) socketDir() (string, error) {
	dir := filepath.Join(e.config.DataDir, "socket")
	if len(dir) > maxSocketDir || strings.Contains(dir, ",") {
		var err error
		if dir, err = os.MkdirTemp("", "dlqd-"); err != nil {
			return "", err
		}
	} else if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	return dir, e.owner.chown(dir)
}

// stopLeftover shuts down a server that still runs although its dlqd was killed. The server is then started anew, at
// the cost of a checkpoint, to be a child of this process.
func (e *Embedded) stopLeftover(ctx context.Context) error {
	status := exec.CommandContext(ctx, e.bin.Path("pg_ctl"), "status", "-D", e.pgdata()) //nolint:gosec // as above
	e.owner.runAs(status)
	if status.Run() != nil {
		return nil //nolint:nilerr // pg_ctl answers 3 where no server runs
	}
	e.config.Logger.Warn("stopping a Postgres server that an earlier dlqd left running", "data_dir", e.config.DataDir)
	stop := exec.CommandContext(ctx, e.bin.Path("pg_ctl"), "stop", "-D", e.pgdata(), "-m", "fast", "-w", //nolint:gosec // as above
		"-t", strconv.Itoa(int(embeddedStopTimeout.Seconds()/2)))
	e.owner.runAs(stop)
	if out, err := stop.CombinedOutput(); err != nil {
		return fmt.Errorf("stop the Postgres server that an earlier dlqd left running in %s: %w: %s", e.config.DataDir, err,
			strings.TrimSpace(string(out)))
	}
	return nil
}

func (e *Embedded) launch() error {
	if info, err := os.Stat(e.LogPath()); err == nil && info.Size() > maxLogBytes {
		if err := os.Rename(e.LogPath(), e.LogPath()+".1"); err != nil {
			return err
		}
	}
	log, err := os.OpenFile(e.LogPath(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	settings := map[string]string{
		"listen_addresses":        "",
		"unix_socket_directories": `"` + strings.ReplaceAll(e.socket, `"`, `""`) + `"`, // quoted as an element of a list
		"unix_socket_permissions": "0700",
		"max_connections":         "200",
		"shared_buffers":          "256MB",
		"max_wal_size":            "2GB",
		"logging_collector":       "off",
		"log_line_prefix":         "%m [%p] ",
	}
	if e.config.Throwaway {
		settings["fsync"] = "off"
		settings["full_page_writes"] = "off"
		settings["max_wal_size"] = "512MB"
		settings["max_prepared_transactions"] = "20"
		settings["max_connections"] = "400"
	}
	e.server = exec.Command(e.bin.Path("postgres"), "-D", e.pgdata()) //nolint:gosec,noctx // lives as long as this process
	for name, value := range settings {
		e.server.Args = append(e.server.Args, "-c", name+"="+value)
	}
	e.server.Stdout, e.server.Stderr = log, log
	e.owner.runAs(e.server)
	// The server has its own process group, so that Ctrl-C in a terminal reaches only dlqd, which stops the server after
	// everything else.
	e.server.SysProcAttr.Setpgid = true
	if err := e.server.Start(); err != nil {
		return fmt.Errorf("start Postgres: %w", err)
	}
	server, exited := e.server, make(chan struct{})
	e.exited = exited
	go func() {
		_ = server.Wait()
		close(exited)
	}()
	return nil
}

func (e *Embedded) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, embeddedStartTimeout)
	defer cancel()
	maintenance := strings.Replace(e.URL(), "/"+embeddedDatabase+"?", "/postgres?", 1)
	for {
		err := ensureDatabase(ctx, maintenance)
		if err == nil {
			return nil
		}
		select {
		case <-e.exited:
			return fmt.Errorf("embedded Postgres did not start; its log %s ends with: %s", e.LogPath(), e.logTail())
		case <-ctx.Done():
			return fmt.Errorf("embedded Postgres did not accept connections: %w (log: %s)", err, e.LogPath())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func ensureDatabase(ctx context.Context, maintenanceURL string) error {
	conn, err := pgx.Connect(ctx, maintenanceURL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close(ctx) }()
	var has bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", embeddedDatabase).Scan(
		&has); err != nil || has {
		return err
	}
	_, err = conn.Exec(ctx, "CREATE DATABASE "+embeddedDatabase)
	return err
}

func (e *Embedded) logTail() string {
	const most = 1000
	raw, err := os.ReadFile(e.LogPath())
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(raw[max(0, len(raw)-most):]))
}

// terminate requests a fast shutdown (SIGINT). After half of the limit it requests an immediate shutdown (SIGQUIT).
// After a further quarter it kills the server.
func (e *Embedded) terminate(limit time.Duration) error {
	for _, step := range []struct {
		signal syscall.Signal
		wait   time.Duration
	}{{syscall.SIGINT, limit / 2}, {syscall.SIGQUIT, limit / 4}, {syscall.SIGKILL, max(limit/4, killedTimeout)}} {
		if err := e.server.Process.Signal(step.signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		select {
		case <-e.exited:
			return nil
		case <-time.After(step.wait):
		}
	}
	return errors.New("embedded Postgres did not stop")
}

// owner is the user that the server runs as: the current user or, for root, an unprivileged one,
// because Postgres refuses to run as root.
type owner struct {
	credential *syscall.Credential // nil for the current user
	name       string
}

func serverOwner() (owner, error) {
	if os.Geteuid() != 0 {
		return owner{}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err1 := strconv.ParseUint(u.Uid, 10, 32)
		gid, err2 := strconv.ParseUint(u.Gid, 10, 32)
		if err := errors.Join(err1, err2); err != nil {
			return owner{}, err
		}
		return owner{credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, name: name}, nil
	}
	return owner{}, errors.New("cannot run Postgres as root: there is no user postgres or nobody to run it as; start " +
		"dlqd as another user")
}

func (o owner) runAs(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: o.credential}
	cmd.Dir = "/" // the owner may not be allowed into the current directory
}

func (o owner) chown(path string) error {
	if o.credential == nil {
		return nil
	}
	return os.Chown(path, int(o.credential.Uid), int(o.credential.Gid))
}

// canReach checks that the owner can enter and write dir. It can fail because a parent directory is closed to other
// users.
func (o owner) canReach(ctx context.Context, dir string) error {
	if o.credential == nil {
		return nil
	}
	cmd := exec.CommandContext(ctx, "test", "-x", dir+"/.", "-a", "-w", dir) //nolint:gosec // no shell
	o.runAs(cmd)
	cmd.Stdout, cmd.Stderr = io.Discard, io.Discard
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("started as root, dlqd runs Postgres as user %s, who cannot enter %s: allow it on the parent "+
			"directories (chmod o+x), or choose another directory with --data-dir", o.name, dir)
	}
	return nil
}
