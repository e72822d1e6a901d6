package policy_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
)

func TestSources_ReportMistakesWithLines(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{"sources": `clusters:
  main:
    brokers: [kafka]
    sasl: {mechanism: PLAIN, tokenURL: "http://idp.example/token"}
sources:
  a: {cluster: main, topics: [dlq.*]}
  b: {cluster: main, topics: [dlq.pay], queue: a}
  c: {cluster: other, topics: ["*.*"], replayTo: dlq.x}
  d: {cluster: main, topics: [d], replayTo: dlq.x, envelope: protobuf}
  default: {cluster: main, topics: [e]}
  f: {cluster: main, topics: [f], registry: other}
  g: {cluster: main, topics: [g], registry: b, envelope: protobuf}
registries:
  a: {url: "ftp://x"}
  b: {url: "http://user:hunter2@x"}
  c: {url: "http://registry:8081", passwordFile: sources.yaml}
  d: {url: "http://registry:8081", tls: {caFile: sources.yaml}}
  e: {url: "https://registry", username: kim, tls: {certFile: sources.yaml}}
`})
	_, err := policy.Load(policy.Source{Dir: dir, Destination: policytest.Destination})
	require.Error(t, err)
	text := strings.ReplaceAll(err.Error(), filepath.Join(dir, "sources.yaml"), "sources.yaml")
	for _, want := range []string{
		`sources.yaml:3: clusters.main.brokers[0]: "kafka" is not host:port`,
		"sources.yaml:4: clusters.main.sasl.passwordFile: is required for PLAIN",
		"sources.yaml:4: clusters.main.sasl.username: is required for PLAIN",
		"sources.yaml:4: clusters.main.sasl.tokenURL: is for OAUTHBEARER alone",
		"sources.yaml:4: clusters.main.sasl.tokenURL: must be an https URL without user and password",
		`sources.yaml:7: sources.b.topics: source a reads topics that match "dlq.pay", too`,
		`sources.yaml:7: sources.b.queue: queue "a" is that of source a; each source has its own`,
		`sources.yaml:8: sources.c.cluster: unknown cluster "other" (known: main)`,
		`sources.yaml:8: sources.c.topics: "*.*" is not the name of a topic, with one * at most`,
		"sources.yaml:9: sources.d.replayTo: source a reads this topic: records would come back at once",
		"sources.yaml:9: sources.d: descriptorFile and messageType are required for the envelope protobuf",
		`sources.yaml:11: sources.f.registry: unknown registry "other" (known: a, b, c, d, e)`,
		"sources.yaml:12: sources.g.registry: the envelope protobuf has its type from descriptorFile",
		"sources.yaml:14: registries.a.url: must be an http or https URL without user, password and query",
		"sources.yaml:15: registries.b.url: must be an http or https URL without user, password and query",
		"sources.yaml:16: registries.c.url: must be an https URL: a password would be sent in clear text",
		"sources.yaml:17: registries.d.url: must be an https URL: tls is set",
		"sources.yaml:18: registries.e.passwordFile: is required for a user",
		"sources.yaml:18: registries.e.tls: certFile and keyFile belong together",
		"sources.yaml:10: sources.default: the policy has a destination of this name; a source has its own",
	} {
		require.Contains(t, text, want)
	}
}

func TestSources_NeedNoOtherDestination(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{
		"sources":        "clusters: {main: {brokers: ['kafka:9092']}}\nsources: {nodes: {cluster: main, topics: [dlt]}}\n",
		"retry-policies": "queues: {nodes: {ordering: true}}\n",
	})
	p, err := policy.Load(policy.Source{Dir: dir})
	require.NoError(t, err)
	require.True(t, p.Queues["nodes"].Ordering)
	require.NotNil(t, p.DestinationOf("nodes"))
}

func TestSources_HaveQueueAndDestination(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{"sources": `
clusters:
  main: {brokers: ["kafka:9092"], tls: {enabled: true}, sasl: {mechanism: PLAIN, username: dlqd, passwordFile: secret}}
sources:
  nodes: {cluster: main, topics: [other, dlq.prod.*], replayTo: "in.{*}", group: "node-{*}", redeliveriesPerSecond: 5}
  plain: {cluster: main, topics: [plain.dlt], queue: orders, kind: "order.{topic}"}
`})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "secret"), []byte("hunter2\n"), 0o600))
	p, err := policy.Load(policy.Source{Dir: dir, Destination: policytest.Destination})
	require.NoError(t, err)
	require.Equal(t, policy.Secret("hunter2"), p.Sources.Clusters["main"].SASL.Password)
	for _, s := range p.Settings() {
		require.NotContains(t, s.String(), "hunter2")
	}
	nodes, plain := p.Sources.Sources["nodes"], p.Sources.Sources["plain"]
	require.Same(t, nodes, p.DestinationOf("nodes").Source)
	require.Equal(t, policy.Pace{Name: "destination:nodes", PerSecond: 5}, p.PaceOf("nodes"))
	require.Equal(t, "kafka://main", p.DestinationOf("orders").ShownURL())
	require.False(t, p.Routing.Automatic.Queues["orders"].Enabled)
	require.Equal(t, "order.o", plain.KindOf("plain.dlt", "o"))

	require.Equal(t, "node-pay", nodes.GroupOf("dlq.prod.pay"))
	require.Empty(t, plain.GroupOf("plain.dlt"))
	topic, ok := p.TargetOf(nodes, "dlq.prod.pay", "")
	require.True(t, ok)
	require.Equal(t, "in.pay", topic)
	topic, ok = p.TargetOf(plain, "plain.dlt", "orders.v1")
	require.True(t, ok)
	require.Equal(t, "orders.v1", topic)
	for _, original := range []string{"", "plain.dlt", "dlq.prod.x"} {
		_, ok = p.TargetOf(plain, "plain.dlt", original)
		require.False(t, ok, original)
	}
}

func TestFeeds_ReportMistakesWithLines(t *testing.T) {
	t.Parallel()
	dir := policytest.Dir(t, policytest.Files{"sources": `clusters:
  main: {brokers: ["kafka:9092"]}
feeds:
  a: {cluster: other, queues: [orders], topic: "dlq.{env}.{queue}"}
  b: {cluster: main, topic: "dlq {queue}"}
  c: {cluster: main, queues: ["*"], topic: x, form: protobuf}
  d: {cluster: main, queues: ["*"], topic: x, form: protobuf, descriptorFile: sources.yaml, messageType: M}
`, "environments/prod/monitoring": "{}\n"})
	load := func(env string) string {
		_, err := policy.Load(policy.Source{Dir: dir, Env: env, Destination: policytest.Destination})
		require.Error(t, err)
		return strings.ReplaceAll(err.Error(), filepath.Join(dir, "sources.yaml"), "sources.yaml")
	}
	text := load("")
	for _, want := range []string{
		`sources.yaml:4: feeds.a.cluster: unknown cluster "other" (known: main)`,
		"sources.yaml:4: feeds.a.topic: {env} needs an environment (--env)",
		"sources.yaml:5: feeds.b.queues: is required",
		`sources.yaml:5: feeds.b.topic: "dlq {queue}" is not the name of a topic, {queue} and {env}`,
		"sources.yaml:6: feeds.c: descriptorFile and messageType are required for the form protobuf",
		"sources.yaml:7: feeds.d.descriptorFile: ",
	} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, load("prod"), "{env} needs")
}

// Kafka refuses longer topic names, including names that contain the name of a queue.
func TestSources_RefuseLongNamesOfTopics(t *testing.T) {
	t.Parallel()
	long, most := strings.Repeat("x", 250), strings.Repeat("x", 249)
	dir := policytest.Dir(t, policytest.Files{"sources": fmt.Sprintf(`clusters:
  main: {brokers: ["kafka:9092"]}
sources:
  a: {cluster: main, topics: [%[1]s]}
  b: {cluster: main, topics: [%[2]s, "%[2]s*"], replayTo: "{original}%[1]s"}
feeds:
  c: {cluster: main, queues: [q], topic: "%[1]s"}
  d: {cluster: main, queues: [q, "r*"], topic: "%[2]s{queue}"}
  e: {cluster: main, queues: ["r*"], topic: "%[2]s{queue}"}
`, long, most)})
	_, err := policy.Load(policy.Source{Dir: dir, Destination: policytest.Destination})
	require.Error(t, err)
	for _, want := range []string{
		"sources.yaml:4: sources.a.topics: has 250 characters; the name of a topic has 249 at most",
		"sources.yaml:5: sources.b.replayTo: has 250 characters; the name of a topic has 249 at most",
		"sources.yaml:7: feeds.c.topic: has 250 characters; the name of a topic has 249 at most",
		`sources.yaml:8: feeds.d.topic: for the queue "q" it has 250 characters; the name of a topic has 249 at most`,
	} {
		require.Contains(t, err.Error(), want)
	}
	require.NotContains(t, err.Error(), "sources.b.topics: has")
	require.NotContains(t, err.Error(), "feeds.e")

	p := policytest.Load(t, policytest.Files{"sources": `
clusters: {main: {brokers: ["kafka:9092"]}}
sources: {a: {cluster: main, topics: [a], replayTo: "retry.{original}"}}
`})
	_, ok := p.TargetOf(p.Sources.Sources["a"], "a", most[:243])
	require.True(t, ok)
	_, ok = p.TargetOf(p.Sources.Sources["a"], "a", most[:244])
	require.False(t, ok)
}
