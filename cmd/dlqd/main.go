// Command dlqd is a dead-letter office for Postgres. "dlqd help" lists its commands.
package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	_ "time/tzdata" // off-peak hours have time zones, and the machine may have no zone files

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/redact"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/version"
)

// Exit codes, for systemd units and scripts.
const (
	exitFailed   = 1 // another failure; standard error has the reason
	exitUsage    = 2 // wrong command line
	exitSchema   = 3 // the database's schema is too old or too new: the message has the command to run
	exitHeld     = 4 // another dlqd holds the data directory
	exitStopped  = 5 // dlqd stopped before running jobs had finished; the jobs run again
	exitNoServer = 6 // no Postgres is installed
	exitApproval = 7 // the operation needs approval, which was requested
)

// hardStopLimit is the time after the second signal at which the process exits at the latest.
const hardStopLimit = 15 * time.Second

func main() {
	ctx, hard := signals()
	root := newRoot(hard)
	started := false // an error before a command starts is a mistake in the command line
	root.PersistentPreRun = func(*cobra.Command, []string) { started = true }
	err := root.ExecuteContext(ctx)
	if err == nil {
		return
	}
	if !started {
		err = &usageError{err}
	}
	if child, ok := errors.AsType[*childError](err); ok { // the other program has printed the reason
		os.Exit(child.code)
	}
	if _, ok := errors.AsType[*usageError](err); ok {
		err = &usageError{errors.New(redact.Text(err.Error()))} // the message may quote the command line
	}
	printSafef(os.Stderr, "dlqd: %s\n", err)
	os.Exit(exitCode(err))
}

func exitCode(err error) int {
	var held *postgres.HeldError
	var usage *usageError
	var requested *approvalRequestedError
	switch {
	case errors.As(err, &requested):
		return exitApproval
	case errors.As(err, &usage):
		return exitUsage
	case errors.Is(err, postgres.ErrSchemaOld), errors.Is(err, postgres.ErrSchemaNew):
		return exitSchema
	case errors.As(err, &held):
		return exitHeld
	case errors.Is(err, postgres.ErrNoBinaries):
		return exitNoServer
	case errors.Is(err, server.ErrStoppedAtOnce):
		return exitStopped
	}
	return exitFailed
}

// usageError is an error in the command line.
type usageError struct{ error }

// childError is the failure of another program, such as psql, that a command runs as its own last step.
type childError struct{ code int }

func (e *childError) Error() string { return fmt.Sprintf("exit status %d", e.code) }

// signals returns two contexts. ctx ends at the first SIGINT or SIGTERM, hard at the second. At hardStopLimit after the
// second signal, the process exits.
func signals() (ctx, hard context.Context) {
	ctx, cancel := context.WithCancel(context.Background())
	hard, cancelHard := context.WithCancel(context.Background())
	received := make(chan os.Signal, 2)
	signal.Notify(received, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-received
		cancel()
		<-received
		cancelHard()
		time.Sleep(hardStopLimit)
		os.Exit(exitStopped)
	}()
	return ctx, hard
}

// taggedCommands return the commands that only builds with a certain build tag have.
var taggedCommands []func() *cobra.Command

func newRoot(hard context.Context) *cobra.Command {
	root := &cobra.Command{
		Use:           "dlqd",
		Short:         "A dead-letter office for Postgres",
		Version:       version.String(),
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.AddGroup(
		&cobra.Group{ID: "run", Title: "Run dlqd:"},
		&cobra.Group{ID: "use", Title: "Use a running dlqd, through its API:"},
		&cobra.Group{ID: "policy", Title: "Policy and alerts:"},
		&cobra.Group{ID: "database", Title: "Database:"},
	)
	add := func(group string, commands ...*cobra.Command) {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("run", newServe(hard), newDemo(hard), newReceiver())
	add("use", newSend(), newList(), newShow(), newReplay(), newReplays(),
		newMove("discard", "Archive a dead letter that is not wanted"),
		newMove("expire", "Archive a dead letter whose work is out of date"),
		newMove("resolve", "Close a parked dead letter as done outside dlqd"),
		newMove("park", "Move a pending dead letter to manual handling"),
		newMove("unpark", "Return a parked dead letter to automatic handling"),
		newMove("reopen", "Return a closed dead letter to manual handling"), newGroups(), newDeployed(), newViews(),
		newReclassify(), newAutomatic(), newRestored(), newBreakers(), newTopicSources(), newFeeds(), newQueues(), newStats(),
		newLogLevel(), newUndo(), newOperation(),
		newAudit(), newErase(), newErasures(), newApprovals(), newSessions(), newLogin(), newLogout(), newWhoami())
	add("use", newBulks()...)
	add("policy", newConfig(), newAlerts())
	add("database", newMigrate(), newGrants(), newAttach(), newDetach(), newArchive(), newCapture(), newTokens(),
		newDoctor(), newPsql(), newOpenAPI())
	root.AddCommand(newVersion())
	for _, newCommand := range taggedCommands {
		root.AddCommand(newCommand())
	}
	rejectUnknownSubcommands(root)
	explainArguments(root)
	root.SetFlagErrorFunc(flagError)
	addCompletions(root)
	return root
}

// databaseFlags are the flags that name a database. The database is on a Postgres server, or on the embedded server of
// a data directory.
type databaseFlags struct {
	url, dataDir, postgresBin string
	schemas                   postgres.Schemas
	ownRiver                  bool
	createDataDir             bool     // create a missing data directory
	allowedWithURL            []string // flags of the embedded server that are also allowed with a URL
}

func (f *databaseFlags) register(cmd *cobra.Command) {
	f.registerURL(cmd)
	f.registerDataDir(cmd)
	cmd.Flags().StringVar(&f.postgresBin, "postgres-bin", "", "directory of the Postgres programs for the embedded "+
		"server; searched for if empty")
	f.registerSchemas(cmd)
}

func (f *databaseFlags) registerURL(cmd *cobra.Command) {
	registerURL(cmd, &f.url, "database-url", cmp.Or(os.Getenv("DLQD_DATABASE_URL"), os.Getenv("DATABASE_URL")),
		"URL of the Postgres database; if empty, dlqd starts an embedded server. Other users of this machine can read a "+
			"password in this flag, but not in $DLQD_DATABASE_URL, --database-url-file, $PGPASSWORD or ~/.pgpass",
		"$DLQD_DATABASE_URL or $DATABASE_URL", "URL of the Postgres database")
}

// registerURL registers a flag for the URL of a database, and a flag for a file with the URL. Without these flags, url
// is fromEnvironment, or else a credential of systemd.
func registerURL(cmd *cobra.Command, url *string, name, fromEnvironment, usage, shown, content string) {
	flags := cmd.Flags()
	flags.StringVar(url, name, cmp.Or(fromEnvironment, credential(name)), usage)
	flags.Lookup(name).DefValue = shown // help must not print a password
	flags.Func(name+"-file", "file with the "+content, func(path string) error {
		raw, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if *url = strings.TrimSpace(string(raw)); *url == "" {
			return errors.New("is empty")
		}
		return nil
	})
}

// checkURL rejects the URL of a database if both the flag and the flag for a file are given. It warns of a password in
// the flag. environment names the variable in which the password is safe.
func checkURL(cmd *cobra.Command, url, name, environment string) error {
	if !cmd.Flags().Changed(name) {
		return nil
	}
	if err := rejectFlags(cmd, "with --"+name, name+"-file"); err != nil {
		return err
	}
	if _, password, err := postgres.ForPsql(url); err != nil || password != "" {
		_, _ = fmt.Fprintf(cmd.ErrOrStderr(), "dlqd: warning: other users of this machine can read the password in --%[1]s "+
			"(ps shows it); use %[2]s or --%[1]s-file instead\n", name, environment)
	}
	return nil
}

// replicaFlags are the flags that name a read replica.
type replicaFlags struct{ url string }

func (f *replicaFlags) register(cmd *cobra.Command) {
	registerURL(cmd, &f.url, "replica-url", os.Getenv("DLQD_REPLICA_URL"),
		"URL of a streaming standby of the database, which answers lists, searches, analytics and exports; none if empty",
		"$DLQD_REPLICA_URL", "URL of the standby")
}

func (f *replicaFlags) check(cmd *cobra.Command) error {
	return checkURL(cmd, f.url, "replica-url", "DLQD_REPLICA_URL")
}

// credential returns a credential that systemd passes to the service (LoadCredential=), or "" if there is none.
func credential(name string) string {
	dir := os.Getenv("CREDENTIALS_DIRECTORY")
	if dir == "" {
		return ""
	}
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return "" // the unit may pass only other credentials
	}
	return strings.TrimSpace(string(raw))
}

func (f *databaseFlags) registerSchemas(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.schemas.DLQ, "schema", postgres.DefaultSchema, "schema of dlqd's tables")
	cmd.Flags().StringVar(&f.schemas.River, "river-schema", postgres.DefaultRiverSchema, "schema of River's tables")
}

func (f *databaseFlags) registerDataDir(cmd *cobra.Command) {
	dataDir, err := postgres.DefaultDataDir()
	if err != nil {
		dataDir = ""
	}
	cmd.Flags().StringVar(&f.dataDir, "data-dir", dataDir, "data directory of the embedded Postgres")
}

// withMigrator runs fn on the database that the flags name. If the database is on an embedded server that does not run,
// withMigrator starts the server and stops it after fn.
func (f *databaseFlags) withMigrator(cmd *cobra.Command, fn func(*postgres.Migrator) error) error {
	if err := f.check(cmd); err != nil {
		return err
	}
	ctx, logger := cmd.Context(), newLogger(slog.LevelWarn)
	url, stop, err := f.ensureRunning(ctx, logger)
	if err != nil {
		return err
	}
	return errors.Join(func() error {
		pool, err := postgres.Open(ctx, url, 4)
		if err != nil {
			return err
		}
		defer pool.Close()
		return fn(&postgres.Migrator{Pool: pool, Schemas: f.schemas, Logger: logger, OwnRiver: f.ownRiver || f.url == ""})
	}(), stop())
}

// check rejects invalid schema names. If a URL names the database, check also rejects flags of the embedded server.
func (f *databaseFlags) check(cmd *cobra.Command) error {
	if err := f.schemas.Validate(); err != nil {
		return &usageError{err}
	}
	if f.url == "" {
		return nil
	}
	if err := checkURL(cmd, f.url, "database-url", "DLQD_DATABASE_URL"); err != nil {
		return err
	}
	for _, name := range []string{"data-dir", "postgres-bin"} {
		if slices.Contains(f.allowedWithURL, name) {
			continue
		}
		const condition = "if --database-url (or its file, DLQD_DATABASE_URL or DATABASE_URL) names the database"
		if err := rejectFlags(cmd, condition, name); err != nil {
			return err
		}
	}
	return nil
}

// ensureRunning returns the database's URL. It starts the embedded server if the server does not run; stop then stops
// the server. If the data directory has no database, it creates one only if createDataDir is set.
func (f *databaseFlags) ensureRunning(ctx context.Context, logger *slog.Logger) (url string, stop func() error,
	err error,
) {
	if f.url != "" {
		return f.url, func() error { return nil }, nil
	}
	if _, err := os.Stat(filepath.Join(f.dataDir, "pgdata")); errors.Is(err, fs.ErrNotExist) && !f.createDataDir {
		return "", nil, &usageError{fmt.Errorf(
			"--data-dir %s: there is no database; \"dlqd serve\" or \"dlqd migrate up\" creates one", f.dataDir)}
	}
	embedded, err := postgres.StartEmbedded(ctx, postgres.EmbeddedConfig{
		DataDir: f.dataDir, BinDir: f.postgresBin, Logger: logger,
	})
	if _, ok := errors.AsType[*postgres.HeldError](err); ok { // a running dlqd has started the server: use it
		url, err := postgres.EmbeddedURL(f.dataDir)
		return url, func() error { return nil }, err
	}
	if err != nil {
		return "", nil, err
	}
	return embedded.URL(), embedded.Stop, nil
}

func newLogger(level slog.Leveler) *slog.Logger {
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}
