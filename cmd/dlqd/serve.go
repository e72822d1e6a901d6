package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/door"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/telemetry"
	"github.com/dlqd/dlqd/internal/worker"
)

func newServe(hard context.Context) *cobra.Command { //nolint:gocognit // one flag after the other
	var database databaseFlags
	config := server.Config{OpenSources: openSources}
	var source policyFlags
	var archive archiveFlag
	var replica replicaFlags
	var logLevel, logFormat, rateLimit string
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve the API, deliver messages and process dead letters",
		Long: "Serve runs the API, the processing workers and the DLQ workers in one process. With any of --api, --process\n" +
			"and --dlq-workers it runs only those parts, so that several processes can share the work on one database.\n\n" +
			"SIGTERM or SIGINT stops serve cleanly: it accepts no more requests, writes what it accepted and waits for\n" +
			"running jobs. A second signal stops it immediately. SIGHUP, and a change of the policy's files, reload the\n" +
			"policy. Exit codes: 0 stopped cleanly, 1 failed, 2 invalid command line, 3 the schema is too old or too new,\n" +
			"4 another dlqd uses the data directory, 5 stopped before running jobs had finished, 6 no Postgres installed.",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if archive.value == "" {
				database.allowedWithURL = []string{"data-dir"} // the archive is in this directory
			}
			if err := errors.Join(database.check(cmd), replica.check(cmd)); err != nil {
				return err
			}
			ignoreClosedPipes()
			config.LogLevel = new(slog.LevelVar)
			if err := config.LogLevel.UnmarshalText([]byte(logLevel)); err != nil {
				return &usageError{err}
			}
			switch logFormat {
			case "text":
				config.Logger = newLogger(config.LogLevel)
			case "json":
				config.Logger = slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: config.LogLevel}))
			default:
				return &usageError{fmt.Errorf("--log-format %s: must be text or json", logFormat)}
			}
			if !cmd.Flags().Changed("max-conns") {
				config.MaxConns = 0 // the URL may have a limit
			}
			config.DatabaseURL, config.DataDir, config.PostgresBin, config.Schemas = database.url, database.dataDir,
				database.postgresBin, database.schemas
			config.Archive, config.ReplicaURL = archive.location(&database), replica.url
			if !config.API && !config.Process && !config.DLQWorkers {
				config.API, config.Process, config.DLQWorkers = true, true, true
			}
			listens := config.API || cmd.Flags().Changed("listen")
			config.Listens = cmd.Flags().Changed("poll-only") && !config.PollOnly
			if !listens {
				config.Listen = nil
			}
			for _, part := range []struct {
				runs    bool
				missing string
				flags   []string
			}{
				{config.API, "without --api", []string{"max-body-bytes", "replica-url", "replica-url-file"}},
				{listens, "without --api or --listen", []string{
					"insecure", "allowed-host", "allowed-origin", "rate-limit",
					"max-requests", "max-connections", "tls-cert", "tls-key", "tls-client-ca",
				}},
				{config.DatabaseURL != "", "with an embedded Postgres", []string{
					"database-wait", "replica-url", "replica-url-file",
				}},
				{config.DLQWorkers, "without --dlq-workers", []string{"poll-interval"}},
				{config.Process || config.DLQWorkers, "without --process and --dlq-workers", []string{"poll-only"}},
			} {
				if !part.runs {
					if err := rejectFlags(cmd, part.missing, part.flags...); err != nil {
						return err
					}
				}
			}
			var err error
			if config.Door.Rate, err = door.ParseRate(rateLimit); err != nil {
				return &usageError{fmt.Errorf("--rate-limit %q: %w", rateLimit, err)}
			}
			if err := errors.Join(config.Door.Check(), config.TLS.Check()); err != nil {
				return &usageError{err}
			}
			if err := telemetry.CheckEndpoint(config.OTLPEndpoint); err != nil {
				return &usageError{fmt.Errorf("--otlp-endpoint: %w", err)}
			}
			if err := checkRiverUI(config.RiverUI); err != nil {
				return err
			}
			for _, address := range config.Listen { // before Postgres starts
				if err := api.CheckListen(cmd.Context(), address); err != nil {
					return &usageError{err}
				}
			}
			config.Source = source.source()
			if config.Policy, err = policy.Load(config.Source); err != nil {
				return err
			}
			if err := source.check(cmd, config.Policy); err != nil {
				return err
			}
			if err := config.CheckSources(config.Policy); err != nil { // before Postgres starts
				return err
			}
			systemd := newSupervisor(config.Logger)
			s, err := server.Start(cmd.Context(), config)
			if err != nil {
				return err
			}
			stopReloads := reloadOnHangup(cmd.Context(), s)
			defer stopReloads()
			config.Logger.Info("dlqd started",
				"api", s.Addresses(), "queues", config.Policy.QueueNames(), "policy", config.Policy.Version())
			defer systemd.watch(cmd.Context(), s.Ready)()
			err = s.Wait(cmd.Context(), hard)
			config.Logger.Info("dlqd stopped", "clean", err == nil)
			return err
		},
	}
	database.register(cmd)
	replica.register(cmd)
	flags := cmd.Flags()
	flags.BoolVar(&config.API, "api", false, "serve the API")
	flags.BoolVar(&config.Process, "process", false, "deliver messages")
	flags.BoolVar(&config.DLQWorkers, "dlq-workers", false, "process dead letters")
	flags.StringArrayVar(&config.Listen, "listen", []string{server.DefaultListen},
		"address of the API: host:port or unix:PATH; repeatable. Without --api, serves only /metrics and health checks")
	flags.BoolVar(&config.Insecure, "insecure", false, "allow listening beyond this machine without authentication: "+
		"every caller may do everything")
	flags.StringArrayVar(&config.Door.Hosts, "allowed-host", nil, "host name that requests may use, besides localhost, "+
		"loopback addresses, those of --listen and the connection's own address; repeatable")
	flags.StringArrayVar(&config.Door.Origins, "allowed-origin", nil, "origin of other web pages that may use the API, "+
		"such as https://console.example; repeatable")
	flags.StringVar(&config.TLS.Cert, "tls-cert", "", "PEM file with the certificate and its intermediates; enables "+
		"HTTPS on TCP addresses. Reloaded when it changes")
	flags.StringVar(&config.TLS.Key, "tls-key", "", "PEM file with the certificate's key")
	flags.StringVar(&config.TLS.ClientCA, "tls-client-ca", "", "PEM file with the CAs that sign client certificates")
	flags.StringVar(&rateLimit, "rate-limit", "", "maximum request rate of each client, such as 100/s or 600/m; no "+
		"limit if empty")
	flags.IntVar(&config.Door.MaxRequests, "max-requests", door.DefaultMaxRequests,
		"maximum number of concurrent requests; one client may use half of them")
	flags.Int64Var(&config.MaxConnections, "max-connections", door.DefaultMaxConnections,
		"maximum number of concurrent TCP connections; one address may use half of them")
	source.register(cmd)
	archive.register(cmd)
	flags.Int64Var(&config.MaxBodyBytes, "max-body-bytes", api.DefaultMaxBodyBytes, "maximum size of a message in bytes")
	flags.DurationVar(&config.PollInterval, "poll-interval", worker.DefaultPollInterval,
		"how often DLQ workers poll for due entries if no notification wakes them")
	flags.BoolVar(&config.PollOnly, "poll-only", false, "poll instead of using LISTEN/NOTIFY. Default behind a pooler; "+
		"--poll-only=false is for a pooler in session mode")
	flags.DurationVar(&config.StopTimeout, "stop-timeout", server.DefaultStopTimeout, "maximum time for a clean stop; "+
		"its last quarter (at most 5 s) is for cancelling requests and jobs that have not finished")
	flags.DurationVar(&config.DatabaseWait, "database-wait", server.DefaultDatabaseWait,
		"how long to wait at the start for a database that does not answer")
	flags.Int32Var(&config.MaxConns, "max-conns", postgres.DefaultMaxConns,
		"maximum number of database connections; defaults to pool_max_conns of the URL if set")
	flags.StringVar(&logLevel, "log-level", "info", "debug, info, warn or error; \"dlqd log-level\" changes it while "+
		"serve runs")
	flags.StringVar(&logFormat, "log-format", "text", "text, or json (one object per line)")
	flags.StringVar(&config.RiverUI, "river-ui", "", "URL of River UI; the console links jobs to it")
	flags.StringVar(&config.OTLPEndpoint, "otlp-endpoint", telemetry.EndpointOfEnvironment(),
		"URL of an OpenTelemetry collector (OTLP over HTTP, such as http://localhost:4318) for traces, metrics and logs; "+
			"none if empty")
	flags.Lookup("otlp-endpoint").DefValue = "$OTEL_EXPORTER_OTLP_ENDPOINT"
	return cmd
}

// ignoreClosedPipes lets the process continue after the program that reads the log has ended (dlqd serve 2>&1 | head).
// By default, SIGPIPE would end the process when it writes the next line.
func ignoreClosedPipes() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }

// reloadOnHangup reloads the server's policy at each SIGHUP, until stop is called.
func reloadOnHangup(ctx context.Context, s *server.Server) (stop func()) {
	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	done := make(chan struct{})
	go func() {
		for {
			select {
			case <-done:
				return
			case <-hangups:
				_ = s.Reload(ctx) // Reload logs its errors
			}
		}
	}()
	return func() {
		signal.Stop(hangups)
		close(done)
	}
}

// apiTimeout is the limit of a request for commands that set no limit.
const apiTimeout = 30 * time.Second

// checkRiverUI rejects an address that is not the http or https URL of a host, and an address with a user or password.
// It accepts "".
func checkRiverUI(address string) error {
	u, err := url.Parse(address)
	if address != "" && (err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") || u.User != nil) {
		return &usageError{errors.New("--river-ui: must be the http or https URL of River UI in a browser, without a " +
			"password")}
	}
	return nil
}
