package deploy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/alerting"
	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
	"github.com/dlqd/dlqd/internal/server"
)

func TestMain(m *testing.M) { postgrestest.Main(m) }

// waitTimeout bounds every wait. It is long, because the machine may be busy.
const waitTimeout = 10 * time.Minute

// monitored is a dlqd that a Prometheus and an Alertmanager monitor.
type monitored struct {
	*testing.T

	url       string
	pool      *pgxpool.Pool
	super     *pgx.Conn // connected to another database
	config    server.Config
	address   string
	dlqd      *server.Server
	stop      func()
	stack     *alerting.Stack
	receivers *alerting.Receivers
	started   time.Time

	receiver   atomic.Int32 // HTTP status that dlqd's receiver answers
	unmeasured atomic.Bool  // if set, measuring the machine's load fails
	fired      map[string]bool
}

func newMonitored(t *testing.T, files policytest.Files) *monitored {
	t.Helper()
	w := &monitored{T: t, url: postgrestest.URL(t), fired: map[string]bool{}, started: time.Now()}
	w.receiver.Store(http.StatusUnprocessableEntity)
	receiver := httptest.NewServer(
		http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(int(w.receiver.Load())) }))
	t.Cleanup(receiver.Close)
	for name, text := range files {
		files[name] = strings.ReplaceAll(text, "RECEIVER", receiver.URL)
	}
	source := policy.Source{Dir: policytest.Dir(t, files)}
	rules, err := policy.Load(source)
	require.NoError(t, err)
	w.pool = postgrestest.Open(t, w.url)
	w.super, err = pgx.Connect(t.Context(), postgrestest.WithDatabase(postgrestest.Superuser(t, w.url), "postgres"))
	require.NoError(t, err)
	t.Cleanup(func() { _ = w.super.Close(context.Background()) })
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	w.address = listener.Addr().String()
	require.NoError(t, listener.Close())
	w.config = server.Config{
		DatabaseURL: w.url, Schemas: postgres.DefaultSchemas(), API: true, Process: true, DLQWorkers: true,
		Listen: []string{w.address}, Policy: rules, Source: source,
		ReplicaURL: "postgres://absent@127.0.0.1:1/none?connect_timeout=1",
		Logger:     slog.New(slog.DiscardHandler), StopTimeout: 10 * time.Second,
		Measure: func(context.Context) (breaker.Load, error) {
			if w.unmeasured.Load() {
				return breaker.Load{}, errors.New("no load today")
			}
			return breaker.Load{}, nil
		},
	}
	w.serve()
	t.Cleanup(func() { w.stop() })

	w.receivers, err = alerting.NewReceivers(t.Context(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.receivers.Close()) })
	w.stack, err = alerting.Start(t.Context(), alerting.Config{
		Dir: t.TempDir(), Targets: []string{w.address}, Console: "http://" + w.address,
		Interval: time.Second, For: 500 * time.Millisecond, Receivers: w.receivers,
	})
	require.NoError(t, err)
	t.Cleanup(w.stack.Stop)
	return w
}

func (w *monitored) serve() {
	w.Helper()
	s, err := server.Start(w.Context(), w.config)
	require.NoError(w, err)
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- s.Wait(ctx, context.Background()) }()
	w.dlqd = s
	w.stop = func() {
		cancel()
		<-stopped
		w.stop = func() {}
	}
}

func (w *monitored) post(path string, body any) map[string]any {
	w.Helper()
	raw, err := json.Marshal(body)
	require.NoError(w, err)
	response, err := http.Post("http://"+w.address+path, "application/json", bytes.NewReader(raw))
	require.NoError(w, err)
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	require.NoError(w, err)
	require.Less(w, response.StatusCode, 300, "%s: %s", path, answer)
	var out map[string]any
	require.NoError(w, json.Unmarshal(answer, &out))
	return out
}

func (w *monitored) send(n int, queue string) {
	w.Helper()
	var messages []any
	for range n {
		messages = append(messages, map[string]any{"queue": queue, "kind": "order.placed", "payload": map[string]any{"n": 1}})
	}
	w.post("/api/messages/batch", map[string]any{"messages": messages})
}

// submitRefused submits a message and requires that dlqd answers with a 5xx status.
func (w *monitored) submitRefused() {
	w.Helper()
	response, err := http.Post("http://"+w.address+"/api/messages", "application/json",
		strings.NewReader(`{"queue": "payments", "kind": "k", "payload": 1}`))
	require.NoError(w, err)
	defer response.Body.Close()
	require.GreaterOrEqual(w, response.StatusCode, 500)
}

func (w *monitored) exec(sql string, args ...any) {
	w.Helper()
	_, err := w.pool.Exec(w.Context(), sql, args...)
	require.NoError(w, err, sql)
}

// asSuperuser runs statements with triggers disabled, on one connection.
func (w *monitored) asSuperuser(statements ...string) {
	w.Helper()
	conn, err := pgx.Connect(w.Context(), postgrestest.Superuser(w, w.url))
	require.NoError(w, err)
	defer conn.Close(context.Background())
	for _, sql := range append([]string{"SET session_replication_role = replica"}, statements...) {
		_, err := conn.Exec(w.Context(), sql)
		require.NoError(w, err, sql)
	}
}

// waitFor waits until the function missing returns "".
func (w *monitored) waitFor(missing func() string) {
	w.Helper()
	for started := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		what := missing()
		if what == "" {
			return
		}
		if time.Since(started) > waitTimeout {
			require.Fail(w, "timed out", what)
		}
	}
}

func (w *monitored) await(want, sql string) {
	w.Helper()
	w.waitFor(func() string {
		var got string
		require.NoError(w, w.pool.QueryRow(w.Context(), "SELECT coalesce(("+sql+")::text, '')").Scan(&got))
		if got == want {
			return ""
		}
		return sql + " is " + got + ", not " + want
	})
}

// reconcile runs the reconciler until it has found two failures that capture missed for the reason why.
func (w *monitored) reconcile(why string) {
	w.Helper()
	w.waitFor(func() string {
		var found int
		require.NoError(w, w.pool.QueryRow(w.Context(), `SELECT coalesce((SELECT sum(entries) FROM dlq.reconcile_findings
			WHERE why = $1), 0) FROM dlq.reconcile(20000)`, why).Scan(&found))
		if found == 2 {
			return ""
		}
		return fmt.Sprintf("%d found, for %s", found, why)
	})
}

// awaitSeries waits until a query returns series in Prometheus.
func (w *monitored) awaitSeries(query string) {
	w.Helper()
	w.waitFor(func() string {
		n, err := w.stack.Series(w.Context(), query, 10*time.Second, 500*time.Millisecond)
		require.NoError(w, err, query)
		if n > 0 {
			return ""
		}
		return query
	})
}

// awaitAlerts waits until each of the alerts has fired. An alert is given by its name, or by its name and queue
// ("DLQQueueSize payments").
func (w *monitored) awaitAlerts(names ...string) {
	w.Helper()
	w.waitFor(func() string {
		alerts, err := w.stack.Alerts(w.Context())
		require.NoError(w, err)
		for _, a := range alerts {
			if a.State == "firing" {
				w.fired[a.Labels["alertname"]] = true
				w.fired[a.Labels["alertname"]+" "+a.Labels["queue"]] = true
			}
		}
		return strings.Join(slices.DeleteFunc(slices.Clone(names), func(name string) bool { return w.fired[name] }), ", ")
	})
	w.Logf("%5.1f s: %s", time.Since(w.started).Seconds(), strings.Join(names, ", "))
}

// awaitFiring waits until an alert is firing.
func (w *monitored) awaitFiring(name string) {
	w.Helper()
	w.waitFor(func() string {
		alerts, err := w.stack.Alerts(w.Context())
		require.NoError(w, err)
		for _, a := range alerts {
			if a.Labels["alertname"] == name && a.State == "firing" {
				return ""
			}
		}
		return name
	})
}

// runningJobs returns SQL that inserts n running jobs of an application. The statement failJobs then makes them fail.
func (w *monitored) runningJobs(n int, queue string) string {
	return fmt.Sprintf(`INSERT INTO river_job (kind, queue, args, max_attempts, attempt, state, metadata, attempted_at)
		SELECT 'app', '%s', '{}', 1, 1, 'running', '{}', now() FROM generate_series(1, %d)`, queue, n)
}

const failJobs = `UPDATE river_job SET state = 'discarded', finalized_at = now(),
	errors = ARRAY['{"error": "no", "attempt": 1, "at": "2026-01-01T00:00:00Z"}'::jsonb] WHERE state = 'running'
		AND kind = 'app'`

// TestAlerts makes every alert fire, with an installed Prometheus and Alertmanager. Each alert must reach a receiver,
// with a text that says what is wrong, since when, and what to do. Every query of the dashboard must return data.
func TestAlerts(t *testing.T) { //nolint:paralleltest // it needs the whole machine
	w := newMonitored(t, policytest.Files{
		"retry-policies": `queues:
  payments: {destination: shop}
  near: {destination: shop}
  over: {destination: shop}
  orders: {destination: shop}
  idle: {destination: bank}
  late: {destination: shop}
destinations: {shop: {url: RECEIVER}, bank: {url: RECEIVER}}
`,
		"monitoring": "defaults: {maxOpen: 100000, maxAge: 1000h}\nqueues: {near: {maxOpen: 11, maxAge: 1h}, over: " +
			"{maxOpen: 10, maxAge: 1h}, app-near: {maxOpen: 11, maxAge: 1h}, app-over: {maxOpen: 10, maxAge: 1h}}\n",
	})
	open := func(queue string) string {
		return "SELECT count(*) FROM dlq.dead_letter_open WHERE status = 'dlq_manual' AND queue = '" + queue + "'"
	}

	// Create the state before the alerts, because Prometheus does not count a new series as an increase. The queues
	// "fresh", "stuck" and "forgotten" exist only in River. The queues app-near and app-over are known only by their
	// limits.
	w.exec("INSERT INTO river_queue (name, updated_at) VALUES ('fresh', now()), ('stuck', now()), ('forgotten', now())")
	w.exec(w.runningJobs(1, "app"))
	w.exec(failJobs)
	w.send(30, "payments")
	w.await("30", open("payments"))
	w.await("1", open("app"))
	w.exec("SELECT dlq.discard(id, 'kim', 'test') FROM dlq.find('{\"queue\": \"payments\"}', 1)")
	w.exec("SELECT dlq.replay(id) FROM dlq.find('{\"queue\": \"payments\", \"status\": \"dlq_manual\"}', 1)")
	w.await("1", open("payments")+" AND dlq_retry_count = 1")
	w.receiver.Store(http.StatusOK)
	w.send(1, "late")
	w.await("1", "SELECT count(*) FROM river_job WHERE queue = 'late' AND state = 'completed'")
	w.send(1, "orders")
	w.await("1", "SELECT count(*) FROM river_job WHERE queue = 'orders' AND state = 'completed'")
	w.receiver.Store(http.StatusUnprocessableEntity)
	w.send(3, "orders")
	w.await("3", open("orders"))
	w.receiver.Store(http.StatusOK)
	w.exec("SELECT dlq.replay(id) FROM dlq.find('{\"queue\": \"orders\", \"status\": \"dlq_manual\"}', 1)")
	w.await("2", open("orders"))
	w.exec("SELECT dlq.open_breaker('destination:shop', p_reason => 'a try'), dlq.reset_breaker('destination:shop', " +
		"p_reason => 'a try')")
	w.awaitSeries(`dlqd_dead_letters_closed_total{outcome="archived"} and on () dlqd_dead_letters_closed_total{outcome="resolved"} and on () dlqd_redeliveries_ended_total{outcome="failed"} and on () dlqd_redeliveries_ended_total{outcome="succeeded"} and on () dlqd_circuit_breaker_changes_total and on () dlq_size{queue="fresh"} == 0`)
	w.awaitSeries(`dlqd_delivery_wait_seconds_count{queue="late"} == 1`)
	w.Logf("%5.1f s: before", time.Since(w.started).Seconds())

	// Many jobs fail, some of them in application queues without earlier failures.
	w.exec(w.runningJobs(25, "fresh"))
	w.exec(w.runningJobs(10, "app-near"))
	w.exec(w.runningJobs(12, "app-over"))
	w.exec(failJobs)
	// These replays succeed.
	w.exec("SELECT dlq.replay(id) FROM dlq.find('{\"queue\": \"orders\", \"status\": \"dlq_manual\"}', 10)")
	w.await("0", open("orders"))
	w.receiver.Store(http.StatusUnprocessableEntity)
	w.send(120, "payments")
	w.send(10, "near")
	w.send(12, "over")
	w.await("149", open("payments"))
	w.await("10", open("near"))
	w.await("12", open("over"))
	w.await("10", open("app-near"))
	w.await("12", open("app-over"))
	w.exec("SELECT dlq.discard(id, 'kim', 'test') FROM dlq.find('{\"queue\": \"payments\", \"status\": " +
		"\"dlq_manual\"}', 15)")
	w.post("/api/dlq/replay", map[string]any{
		"filter": map[string]any{"queue": []string{"payments"}}, "force": true, "rate": 20, "stopAt": 100, "note": "test",
	})
	w.exec("SELECT dlq.replay_start('{\"queue\": [\"over\"]}', p_note => 'a long run', p_rate => 0.01)")
	w.exec(w.runningJobs(10_050, "app"))
	w.exec(failJobs)
	w.asSuperuser("UPDATE dlq.dead_letter_open SET updated_at = now() - interval '20 minutes' WHERE queue = 'near'",
		"UPDATE dlq.dead_letter_open SET created_at = now() - interval '50 minutes' WHERE queue IN ('near', 'app-near')",
		"UPDATE dlq.dead_letter_open SET created_at = now() - interval '2 hours' WHERE queue IN ('over', 'app-over')")
	w.exec("SELECT dlq.open_breaker('destination:bank', p_reason => 'their maintenance', p_for => interval '1 hour')")
	w.unmeasured.Store(true)

	// Jobs wait in a queue without workers, a queue stays paused, and messages are delivered late.
	w.exec(`INSERT INTO river_job (kind, queue, args, max_attempts, scheduled_at)
		VALUES ('app', 'stuck', '{}', 1, now() - interval '10 minutes')`)
	w.exec("UPDATE river_queue SET paused_at = now() WHERE name = 'forgotten'")
	w.post("/api/queues/late/pause", map[string]any{})
	w.send(20, "late")
	w.exec(`UPDATE river_job SET scheduled_at = now() - interval '10 minutes'
		WHERE queue = 'late' AND state = 'available'`)
	w.post("/api/queues/late/resume", map[string]any{})

	// The jobs of redeliveries are deleted. Wait only for some of the dead letters: the others are in the inbox, and the
	// alerts count these, too.
	w.await("true", "SELECT count(*) >= 100 FROM dlq.dead_letter_open WHERE queue = 'app'")
	w.exec("SELECT dlq.replay(id) FROM dlq.find('{\"queue\": \"app\"}', 8)")
	w.exec("DELETE FROM river_job WHERE queue = 'app' AND state = 'available'")
	w.exec("SELECT dlq.sweep_redeliveries()")

	// Jobs fail without capture.
	w.exec(w.runningJobs(2, "app"))
	w.asSuperuser(failJobs)
	w.reconcile("missed")
	w.exec("SELECT dlq.set_capture('off', p_note => 'test')")
	w.exec(w.runningJobs(2, "app"))
	w.exec(failJobs)
	w.reconcile("capture_off")

	// Actions of operators, a restore, a missing partition and an invalid policy.
	w.exec("SELECT dlq.stop_automatic('kim', 'test')")
	// This is the identifier of another server, as after a restore of another server's backup.
	w.exec("UPDATE dlq.settings SET value = jsonb_set(value::jsonb, '{system}', '\"1\"') WHERE key = 'server'")
	postgrestest.ExecUndisturbed(w, w.pool, "DO $$ BEGIN EXECUTE "+
		"format('DROP TABLE dlq.dead_letter_archived_%s', to_char(now() AT TIME ZONE 'UTC', 'YYYYMM')); END $$")
	require.NoError(t, os.WriteFile(filepath.Join(w.config.Source.Dir, "worker-pool.yaml"),
		[]byte("defaults: {concurrency: many}\n"), 0o600))
	require.Error(t, w.dlqd.Reload(t.Context()))

	w.awaitAlerts("HighDLQIngestionRate", "DLQBacklogGrowing", "LowResolutionRate", "LowReplaySuccess", "DLQQueueSize",
		"DLQQueueGrowing", "DLQQueueNearSizeLimit", "DLQQueueOverSizeLimit",
		"DLQOldestNearAgeLimit", "DLQOldestEntry", "CircuitBreakerOpen", "AutomaticRedeliveryStopped",
		"DatabaseRestored", "CaptureMissing", "CaptureFallingBack", "ReconcilerFindsFailures", "LeasesExpiring",
		"DlqdLoopFailing", "DlqdReplicaUnavailable", "PartitionsRunningOut", "PolicyReloadFailed", "DLQQueueFilling",
		"DLQNeedsPerson near", "JobsWaitLong stuck", "DeliveryWaitLong late", "QueuePausedLong forgotten",
		"DLQQueueGrowing fresh", "DLQQueueNearSizeLimit app-near", "DLQQueueOverSizeLimit app-over",
		"DLQOldestNearAgeLimit app-near", "DLQOldestEntry app-over")

	// No process reads a source, its records will soon be deleted by the topic's retention, and records are lost.
	w.exec(`INSERT INTO dlq.sources (name, cluster, queue) VALUES ('topics', 'main', 'topics')`)
	w.exec(`INSERT INTO dlq.source_positions (cluster, topic_id, partition, topic, source, queue, first_offset, next_offset)
		VALUES ('main', gen_random_uuid(), 0, 'dlt', 'topics', 'topics', 0, 100000)`)
	w.exec(`INSERT INTO dlq.source_progress (source, cluster, topic, partition, queue, state, next_offset, end_offset, start_offset)
		VALUES ('topics', 'main', 'dlt', 0, 'topics', 'reading', 100000, 200000, 0)`)
	w.awaitSeries(`dlqd_source_margin{source="topics"} == 100000`)
	w.exec("UPDATE dlq.source_progress SET start_offset = 50000 WHERE source = 'topics'")
	w.exec("UPDATE dlq.source_positions SET lost = 10 WHERE source = 'topics'")
	// No process publishes a feed.
	w.exec(`INSERT INTO dlq.feeds (name, cluster, topic, at) VALUES ('deaths', 'main', 'dead', now() - interval '1 hour')`)
	w.awaitAlerts("SourceStandsStill", "SourceRetentionNear", "SourceLostRecords", "FeedStandsStill")

	// The rollups are not refreshed.
	holder, err := w.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtextextended('dlq.refresh_rollups', 0))")
	require.NoError(t, err)
	w.asSuperuser("UPDATE dlq.rollup_state SET at = at - interval '10 minutes'")
	w.awaitAlerts("RollupsLagging")
	require.NoError(t, holder.Rollback(t.Context()))
	w.checkQueries()

	// The sample of the metrics becomes stale.
	holder, err = w.pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = holder.Exec(t.Context(), "SELECT pg_advisory_xact_lock(hashtextextended('dlq.metrics_sample', 0))")
	require.NoError(t, err)
	w.exec("UPDATE dlq.metrics_sample SET at = at - interval '2 minutes'")
	w.awaitAlerts("DLQMetricsStale")
	require.NoError(t, holder.Rollback(t.Context()))

	// dlqd stops, and starts again with the API only.
	w.stop()
	w.awaitAlerts("DlqdDown")
	require.NoError(t, os.Remove(filepath.Join(w.config.Source.Dir, "worker-pool.yaml")))
	w.config.Process, w.config.DLQWorkers = false, false
	w.serve()
	w.exec("SELECT dlq.set_capture('on', p_note => 'test')")
	w.exec(w.runningJobs(1, "app"))
	w.exec(failJobs)
	w.asSuperuser("UPDATE dlq.dead_letter_inbox SET created_at = now() - interval '10 minutes'")
	w.awaitAlerts("DLQNotFiled")
	// The database refuses further messages.
	w.exec(`CREATE FUNCTION no_room() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = '53100'; END $$`)
	w.exec("CREATE TRIGGER no_room BEFORE INSERT ON river_job EXECUTE FUNCTION no_room()")
	w.submitRefused()
	w.awaitSeries(`dlqd_messages_submitted_total{outcome="error"} > 0`)
	for range 20 {
		w.submitRefused()
	}
	w.awaitAlerts("IntakeRefused")
	// The new process must serve the backlog, too. Until the next refresh of the rollups, its numbers lack the entries
	// that were filed since the last refresh.
	w.awaitFiring("DLQBacklogGrowing")

	// The database refuses connections.
	database := w.pool.Config().ConnConfig.Database
	_, err = w.super.Exec(t.Context(), "ALTER DATABASE "+pgx.Identifier{database}.Sanitize()+" ALLOW_CONNECTIONS false")
	require.NoError(t, err)
	_, err = w.super.Exec(t.Context(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1",
		database)
	require.NoError(t, err)
	w.awaitAlerts("DlqdDatabaseDown")
	w.awaitFiring("DLQBacklogGrowing") // alerts on the content of the database continue to fire
	_, err = w.super.Exec(t.Context(), "ALTER DATABASE "+pgx.Identifier{database}.Sanitize()+" ALLOW_CONNECTIONS true")
	require.NoError(t, err)

	w.checkNotifications()
}

// checkNotifications checks that there was a notification for every alert in the rules, and that the last notification
// to each receiver has a complete text and links.
func (w *monitored) checkNotifications() {
	w.Helper()
	w.waitFor(func() string {
		var missing []string
		for _, r := range rules(w.T) {
			if !slices.ContainsFunc(w.receivers.Notifications(), func(n alerting.Notification) bool {
				return strings.Contains(
					n.Text, "("+r.Alert+")")
			}) {
				missing = append(missing, r.Alert)
			}
		}
		return strings.Join(missing, ", ")
	})
	by := map[string]alerting.Notification{}
	for _, n := range w.receivers.Notifications() {
		if !strings.HasPrefix(n.Title, "Resolved: ") {
			by[n.Receiver] = n
		}
	}
	require.ElementsMatch(w, []string{"pagerduty", "opsgenie", "slack", "email"}, slices.Collect(maps.Keys(by)))
	for name, n := range by {
		require.NotEmpty(w, n.Title, name)
		require.Regexp(w, `(warning|critical), since 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC`, n.Text, name)
		require.Regexp(w, `(?m)^1\. .+\n2\. .+\n3\. `, n.Text, name)
		require.Contains(w, n.Text, "Page: http://"+w.address+"/", name)
		require.Contains(w, n.Text, "Runbook: http://"+w.address+"/runbooks/", name)
		if name != "email" {
			require.True(w, strings.HasPrefix(n.Link, "http://"+w.address+"/"), "%s: %s", name, n.Link)
		}
	}
	w.Logf("%5.1f s: %d notifications", time.Since(w.started).Seconds(), len(w.receivers.Notifications()))
}

// checkQueries waits until every query of the dashboard has returned series.
func (w *monitored) checkQueries() {
	w.Helper()
	var dashboard struct {
		Annotations struct {
			List []struct{ Name, Expr string }
		}
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	require.NoError(w, json.Unmarshal([]byte(read(w.T, "grafana/dlqd.json")), &dashboard))
	of := map[string]string{}
	for _, a := range dashboard.Annotations.List {
		of[a.Expr] = a.Name
	}
	for _, p := range dashboard.Panels {
		for _, target := range p.Targets {
			of[target.Expr] = p.Title
		}
	}
	require.Greater(w, len(of), 60)
	variables := strings.NewReplacer("$job", "dlqd", "$queue", ".*", "$class", ".*", "$__rate_interval",
		"30s", "$__range", "2m")
	w.waitFor(func() string {
		var empty []string
		for query, title := range of {
			n, err := w.stack.Series(w.Context(), variables.Replace(query), time.Since(w.started)+time.Second, time.Second)
			require.NoError(w, err, "%s: %s", title, query)
			if n == 0 {
				empty = append(empty, title+": "+query)
			}
		}
		slices.Sort(empty)
		return strings.Join(empty, "\n")
	})
	w.Logf("%5.1f s: %d queries of the dashboard", time.Since(w.started).Seconds(), len(of))
}
