// Command pipeline demonstrates sources with a pipeline of three gRPC nodes on topics of Kafka: "make demo-kafka".
//
// Each node has a consumer group that reads the topics in.NODE and retry.NODE. It calls the node for each document, and
// publishes the answer to the topic of the next node. If a document fails, it goes to dlq.demo.NODE as a DlqMessage in
// Protobuf. dlqd reads these topics. When an operator replays a document, dlqd publishes it to retry.NODE, which only
// the node reads. Another consumer group, audit, reads the input of the node that breaks.
//
// The topics belong to kfake, which implements Kafka's protocol in this process and is no real broker. With -brokers,
// the topics belong to a cluster. Their names are unique to the run, and they are deleted at the end: "make
// trial-kafka".
package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"google.golang.org/protobuf/proto"

	"github.com/dlqd/dlqd/internal/kafka"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/source"
)

const (
	environment = "demo"
	broken      = "chunker" // the node that breaks
	auditor     = "audit"   // consumer group that also reads the input of the broken node
	customers   = 12
	partitions  = 3
	// stepTimeout bounds the wait for a step. stopTimeout bounds the stop of dlqd.
	stepTimeout = 3 * time.Minute
	stopTimeout = 10 * time.Second
	// lookInterval is the time between two checks whether a step has ended.
	lookInterval = 50 * time.Millisecond
)

// nodeNames are the nodes, in the order of the pipeline.
var nodeNames = []string{"parser", broken, "embedder"}

// errAccount means that a document is lost, was processed twice, or arrived out of order.
var errAccount = errors.New("the account does not add up")

// options configure a demo.
type options struct {
	documents   int
	brokers     string // host:port, separated by commas; empty: kfake
	databaseURL string // empty: an embedded Postgres
	postgresBin string // directory of the Postgres programs; if empty, they are searched for
}

func main() {
	var o options
	flag.IntVar(&o.documents, "documents", 300, "number of documents; a third of them dies")
	flag.StringVar(&o.brokers, "brokers", "", "brokers of a cluster without TLS and login, as host:port,host:port")
	flag.StringVar(&o.postgresBin, "postgres-bin", "", "directory of the Postgres programs")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := run(ctx, o, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "demo-kafka:", err)
		cancel()
		os.Exit(1) //nolint:gocritic // cancel was called
	}
}

// demo is one run.
type demo struct {
	out     io.Writer
	began   time.Time
	schema  *schema
	brokers []string
	prefix  string // of topics and consumer groups
	nodes   map[string]*node
	client  *kgo.Client // produces documents
	pool    *pgxpool.Pool
	api     string

	work   sync.WaitGroup
	failed chan error // error of a consumer

	mu      sync.Mutex
	records map[string][]*kgo.Record // records that the observers have read, by consumer group and topic
}

func run(ctx context.Context, o options, out io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "dlqd-pipeline-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// The server may run as another user, who must be able to pass through this directory to the server's data.
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // it can be entered, not read
		return err
	}
	d := &demo{
		out: out, began: time.Now(), nodes: map[string]*node{}, failed: make(chan error, 1),
		records: map[string][]*kgo.Record{},
	}
	if d.schema, err = parseSchema(); err != nil {
		return err
	}
	if o.brokers != "" {
		d.prefix = "dlqd-trial-" + strings.ToLower(rand.Text()[:10]) + "."
	}
	topics := []string{d.finished()}
	for i, name := range nodeNames {
		n := &node{prefix: d.prefix, name: name, next: d.finished(), schema: d.schema}
		if i+1 < len(nodeNames) {
			n.next = (&node{prefix: d.prefix, name: nodeNames[i+1]}).input()
		}
		d.nodes[name] = n
		topics = append(topics, n.input(), n.retryTopic(), n.deadTopic())
	}
	closeCluster, err := d.openCluster(ctx, o.brokers, topics)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, closeCluster()) }()

	consuming, stopConsuming := context.WithCancel(ctx)
	defer func() {
		stopConsuming()
		d.work.Wait()
		for _, n := range d.nodes {
			n.close()
		}
	}()
	if err := d.startPipeline(consuming); err != nil {
		return err
	}
	defer d.client.Close()
	stop, err := d.startServer(ctx, o, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	return d.show(ctx, o.documents)
}

func (d *demo) printf(format string, args ...any) {
	_, _ = fmt.Fprintf(d.out, "%5.1f s  "+format+"\n", append([]any{time.Since(d.began).Seconds()}, args...)...)
}

// finished returns the topic of documents that all nodes have processed.
func (d *demo) finished() string { return d.prefix + "indexed" }

// openCluster creates the topics. The function that it returns deletes the topics and the consumer groups, or ends
// kfake.
func (d *demo) openCluster(ctx context.Context, brokers string, topics []string) (closing func() error, err error) {
	if brokers == "" {
		cluster, err := kfake.NewCluster(kfake.NumBrokers(2), kfake.SeedTopics(partitions, topics...))
		if err != nil {
			return nil, err
		}
		d.brokers = cluster.ListenAddrs()
		d.printf("topics by kfake, which speaks Kafka's protocol in this process and is no broker")
		return func() error { cluster.Close(); return nil }, nil
	}
	d.brokers = strings.Split(brokers, ",")
	client, err := kgo.NewClient(kgo.SeedBrokers(d.brokers...))
	if err != nil {
		return nil, err
	}
	admin := kadm.NewClient(client)
	if made, err := admin.CreateTopics(ctx, partitions, -1, nil, topics...); err != nil || made.Error() != nil {
		client.Close()
		return nil, errors.Join(err, made.Error())
	}
	d.printf("topics %s* of %s", d.prefix, brokers)
	return func() error {
		defer client.Close()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		groups := make([]string, 0, 2+len(d.nodes))
		groups = append(groups, d.prefix+auditor, d.prefix+"dlqd")
		for _, n := range d.nodes {
			groups = append(groups, n.group())
		}
		_, err := admin.DeleteTopics(ctx, topics...)
		_, groupErr := admin.DeleteGroups(ctx, groups...)
		return errors.Join(err, groupErr)
	}, nil
}

// startPipeline starts the nodes, their consumers, and the observers.
func (d *demo) startPipeline(ctx context.Context) (err error) {
	if d.client, err = kgo.NewClient(kgo.SeedBrokers(d.brokers...), kgo.ProducerLinger(0)); err != nil {
		return err
	}
	for _, name := range nodeNames {
		n := d.nodes[name]
		if err := n.start(ctx); err != nil {
			return err
		}
		if err := n.connect(d.brokers); err != nil {
			return err
		}
		d.consume(func() error { return n.run(ctx) })
	}
	if err := d.observe(ctx, d.prefix+auditor, d.nodes[broken].input()); err != nil {
		return err
	}
	return d.observe(ctx, "", d.finished(), d.nodes[broken].retryTopic(), d.nodes[broken].deadTopic())
}

// consume runs a consumer. The first error of a consumer ends the demo.
func (d *demo) consume(consumer func() error) {
	d.work.Go(func() {
		if err := consumer(); err != nil {
			select {
			case d.failed <- err:
			default:
			}
		}
	})
}

// observe collects the records of topics. It is a member of a consumer group, unless group is empty.
func (d *demo) observe(ctx context.Context, group string, topics ...string) error {
	opts := []kgo.Opt{kgo.SeedBrokers(d.brokers...), kgo.ConsumeTopics(topics...)}
	if group != "" {
		opts = append(opts, kgo.ConsumerGroup(group))
	}
	client, err := kgo.NewClient(opts...)
	if err != nil {
		return err
	}
	d.consume(func() error {
		defer client.Close()
		for {
			fetched := client.PollFetches(ctx)
			if ctx.Err() != nil {
				return nil
			}
			if err := fetched.Err(); err != nil {
				return fmt.Errorf("consumer %s: %w", group, err)
			}
			d.mu.Lock()
			for _, record := range fetched.Records() {
				key := group + " " + record.Topic
				d.records[key] = append(d.records[key], record)
			}
			d.mu.Unlock()
		}
	})
	return nil
}

// observed returns the records of a topic that an observer has read.
func (d *demo) observed(group, topic string) []*kgo.Record {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clip(d.records[group+" "+topic])
}

// startServer starts dlqd. The function that it returns stops dlqd.
func (d *demo) startServer(ctx context.Context, o options, dir string) (stop func() error, err error) {
	config := filepath.Join(dir, "config")
	if err := os.MkdirAll(config, 0o750); err != nil {
		return nil, err
	}
	for name, content := range map[string]string{
		"sources.yaml": fmt.Sprintf(`clusters:
  demo: {brokers: [%[1]s]}
sources:
  nodes:
    cluster: demo
    topics: [%[2]sdlq.%[3]s.*]
    envelope: protobuf
    descriptorFile: pipeline.desc
    messageType: pipeline.v1.DlqMessage
    group: %[2]snode-{*}
    replayTo: %[2]sretry.{*}
    consumerGroup: %[2]sdlqd
    quiet: 1s
`, strings.Join(d.brokers, ", "), d.prefix, environment),
		"retry-policies.yaml": "queues: {nodes: {ordering: true}}\n",
		"pipeline.desc":       string(d.schema.descriptors),
	} {
		if err := os.WriteFile(filepath.Join(config, name), []byte(content), 0o600); err != nil {
			return nil, err
		}
	}
	rules, err := policy.Load(policy.Source{Dir: config})
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "dlqd.log"))
	if err != nil {
		return nil, err
	}
	s, err := server.Start(ctx, server.Config{
		DatabaseURL: o.databaseURL, DataDir: filepath.Join(dir, "data"), PostgresBin: o.postgresBin,
		Schemas: postgres.DefaultSchemas(), API: true, Process: true, DLQWorkers: true,
		Listen: []string{"127.0.0.1:0"}, Policy: rules, StopTimeout: stopTimeout, OpenSources: kafka.Open,
		Logger: slog.New(slog.NewTextHandler(log, nil)),
	})
	if err != nil {
		_ = log.Close()
		return nil, err
	}
	running, cancel := context.WithCancel(ctx)
	stopped := make(chan error, 1)
	go func() { stopped <- s.Wait(running, ctx) }()
	d.pool, d.api = s.Pool(), s.Addresses()[0]
	d.printf("dlqd serves at %s; it reads %sdlq.%s.* and publishes to %sretry.{*}", d.api, d.prefix, environment, d.prefix)
	return func() error {
		cancel()
		return errors.Join(<-stopped, log.Close())
	}, nil
}

// await waits until done returns true.
func (d *demo) await(ctx context.Context, what string, done func() (bool, error)) error {
	timeout := time.NewTimer(stepTimeout)
	defer timeout.Stop()
	ticker := time.NewTicker(lookInterval)
	defer ticker.Stop()
	for {
		ok, err := done()
		if ok || err != nil {
			return err
		}
		select {
		case <-ticker.C:
		case err := <-d.failed:
			return err
		case <-timeout.C:
			return fmt.Errorf("%w: after %s, %s is not reached", errAccount, stepTimeout, what)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (d *demo) awaitRecords(ctx context.Context, topic string, n int) error {
	return d.await(ctx, fmt.Sprintf("%d records in %s", n, topic),
		func() (bool, error) { return len(d.observed("", topic)) >= n, nil })
}

// produce publishes documents to the first node: those with the numbers from, from+1 … to-1. Document i belongs to
// customer i modulo the number of customers.
func (d *demo) produce(ctx context.Context, from, to int) error {
	var records []*kgo.Record
	for i := from; i < to; i++ {
		doc := document{customer: fmt.Sprintf("cus_%02d", i%customers), number: int32(i / customers)}
		value, err := proto.Marshal(d.schema.message(doc))
		if err != nil {
			return err
		}
		records = append(records, &kgo.Record{
			Topic: d.nodes[nodeNames[0]].input(), Key: []byte(doc.customer), Value: value,
		})
	}
	return d.client.ProduceSync(ctx, records...).FirstErr()
}

// show breaks a node, repairs it, and replays the documents that failed.
func (d *demo) show(ctx context.Context, documents int) error {
	third, died := documents/3, documents/3
	node := d.nodes[broken]
	if err := d.produce(ctx, 0, third); err != nil {
		return err
	}
	if err := d.awaitRecords(ctx, d.finished(), third); err != nil {
		return err
	}
	d.printf("%d documents of %d customers have passed %s", third, customers, strings.Join(nodeNames, ", "))

	node.server.Stop()
	node.server = nil
	d.printf("%s breaks: nothing listens at %s", broken, node.address)
	if err := d.produce(ctx, third, third+died); err != nil {
		return err
	}
	if err := d.awaitRecords(ctx, node.deadTopic(), died); err != nil {
		return err
	}
	d.printf("%d documents have died into %s", died, node.deadTopic())
	if err := d.awaitEntries(ctx, "entries of "+broken, died, ""); err != nil {
		return err
	}
	var errs string
	if err := d.pool.QueryRow(ctx, `SELECT string_agg(DISTINCT (record).node || ': ' || error_type || ', class '
		|| error_class || ', status ' || status, '; ') FROM dlq.dead_letter_queue`).Scan(&errs); err != nil {
		return err
	}
	d.printf("dlqd has an entry of each, by node: %s", errs)

	if err := errors.Join(node.start(ctx), node.reconnect(ctx)); err != nil {
		return err
	}
	if err := d.produce(ctx, third+died, documents); err != nil {
		return err
	}
	if err := d.awaitRecords(ctx, d.finished(), documents-died); err != nil {
		return err
	}
	d.printf("%s is mended; %d later documents have passed, while the dead ones wait", broken, documents-died-third)
	if err := d.replay(ctx, died); err != nil {
		return err
	}
	if err := d.awaitRecords(ctx, d.finished(), documents); err != nil {
		return err
	}
	d.printf("the replayed documents have passed, too")
	if err := d.awaitEntries(ctx, "resolved entries", died, "dlq_resolved"); err != nil {
		return err
	}
	d.printf("the group %s is past its records for a second (quiet): the entries are resolved", node.group())
	return d.account(ctx, documents, died)
}

// awaitEntries waits until the broken node has n entries in a state, or in any state if status is empty.
func (d *demo) awaitEntries(ctx context.Context, what string, n int, status string) error {
	return d.await(ctx, fmt.Sprintf("%d %s", n, what), func() (bool, error) {
		var count int
		err := d.pool.QueryRow(ctx, `SELECT count(*) FROM dlq.dead_letter_queue WHERE (record).node = $1
			AND ($2 = '' OR status::text = $2)`, broken, status).Scan(&count)
		return count >= n, err
	})
}

// replay replays the entries of the broken node, as an operator does with a filter by the node's name.
func (d *demo) replay(ctx context.Context, died int) error {
	request := map[string]any{"filter": map[string]any{"node": []string{broken}}, "note": "mended", "expect": died}
	var answer struct {
		Preview struct {
			Total   int
			Readers []struct {
				Topic          string
				Failed, Groups []string
			}
		}
		Run struct{ ID string }
	}
	request["dryRun"] = true
	if err := d.call(ctx, "/api/dlq/replay", request, &answer); err != nil {
		return err
	}
	for _, readers := range answer.Preview.Readers {
		d.printf("preview of node:%s: %d entries to %s; groups that read it: %s; failed: %s", broken, answer.Preview.Total,
			readers.Topic, strings.Join(readers.Groups, ", "), strings.Join(readers.Failed, ", "))
	}
	if answer.Preview.Total != died {
		return fmt.Errorf("%w: the preview has %d entries instead of %d", errAccount, answer.Preview.Total, died)
	}
	delete(request, "dryRun")
	if err := d.call(ctx, "/api/dlq/replay", request, &answer); err != nil {
		return err
	}
	d.printf("replay run %s", answer.Run.ID)
	return nil
}

// call posts to dlqd's API.
func (d *demo) call(ctx context.Context, path string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, d.api+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode >= http.StatusMultipleChoices {
		text, _ := io.ReadAll(response.Body)
		return fmt.Errorf("%s: %s: %s", path, response.Status, text)
	}
	return json.NewDecoder(response.Body).Decode(out)
}

// account compares the documents that were submitted, failed for good, were published again and arrived. It prints
// every line before it returns an error.
func (d *demo) account(ctx context.Context, documents, died int) error {
	var entries, published, resolved int
	if err := d.pool.QueryRow(ctx, `SELECT count(*), count(*) FILTER (WHERE status = 'dlq_resolved'),
			(SELECT count(*) FROM dlq.source_deliveries WHERE acknowledged_at IS NOT NULL)
		FROM dlq.dead_letter_queue`).Scan(&entries, &resolved, &published); err != nil {
		return err
	}
	node := d.nodes[broken]
	audited, replayed := d.observed(d.prefix+auditor, node.input()), d.observed("", node.retryTopic())
	arrived := d.observed("", d.finished())
	ok := true
	line := func(right bool, format string, args ...any) {
		verdict := "right"
		if !right {
			verdict, ok = "WRONG", false
		}
		_, _ = fmt.Fprintf(d.out, "  %s  %s\n", verdict, fmt.Sprintf(format, args...))
	}
	_, _ = fmt.Fprintln(d.out, "\nThe account:")
	line(len(d.observed("", node.deadTopic())) == died && entries == died && resolved == died,
		"%d records in %s = %d entries = %d resolved", len(d.observed("", node.deadTopic())), node.deadTopic(), entries,
		resolved)
	ids := map[string]int{}
	for _, record := range replayed {
		ids[header(record, source.HeaderDelivery)]++
	}
	line(len(replayed) == died && published == died && len(ids) == died && ids[""] == 0,
		"%d records in %s = %d acknowledged, with %d different delivery ids", len(replayed), node.retryTopic(), published,
		len(ids))
	line(len(arrived) == documents && d.once(arrived), "%d documents produced = %d at the end, each once (%d at once + %d "+
		"replayed)", documents, len(arrived), documents-died, died)
	fromDLQD := 0
	for _, record := range audited {
		if header(record, source.HeaderDelivery) != "" {
			fromDLQD++
		}
	}
	line(len(audited) == documents && d.once(audited) && fromDLQD == 0,
		"the group %s has read %d records of %s, each once, %d of them from dlqd", auditor, len(audited), node.input(),
		fromDLQD)
	for _, name := range nodeNames {
		calls := d.nodes[name].processed()
		seen := map[document]bool{}
		for _, doc := range calls {
			seen[doc] = true
		}
		line(len(calls) == documents && len(seen) == documents, "%s has processed %d documents, each once", name, len(calls))
	}
	inOrder, last := 0, map[string]int32{}
	for _, doc := range node.processed() {
		i := int(doc.number)*customers + customerOf(doc)
		if i < documents/3 || i >= documents/3+died {
			continue
		}
		if before, found := last[doc.customer]; !found || before < doc.number {
			inOrder++
		}
		last[doc.customer] = doc.number
	}
	line(inOrder == died, "%d replayed documents came to %s in the order of their customer", inOrder, broken)
	if !ok {
		return errAccount
	}
	d.printf("everything adds up")
	return nil
}

// once reports whether no document occurs twice in records.
func (d *demo) once(records []*kgo.Record) bool {
	seen := map[document]bool{}
	for _, record := range records {
		_, doc, err := d.schema.parse(record.Value)
		if err != nil || seen[doc] {
			return false
		}
		seen[doc] = true
	}
	return true
}

func customerOf(d document) int {
	var number int
	_, _ = fmt.Sscanf(d.customer, "cus_%d", &number)
	return number
}

func header(record *kgo.Record, key string) string {
	for _, h := range record.Headers {
		if h.Key == key {
			return string(h.Value)
		}
	}
	return ""
}
