package policy

import (
	"cmp"
	"fmt"
	"maps"
	"net"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/dlqd/dlqd/internal/grpc"
)

// Sources is sources.yaml: topics whose records become dead letters, and topics to which dead letters are published.
type Sources struct {
	Clusters   map[string]*Cluster     `json:"clusters" jsonschema:"description=Kafka clusters\\, by name."`
	Registries map[string]*Registry    `json:"registries" jsonschema:"description=Schema registries\\, by name."`
	Defaults   TopicSource             `json:"defaults" jsonschema:"description=Defaults for every source."`
	Sources    map[string]*TopicSource `json:"sources"  jsonschema:"description=Topics of dead letters that dlqd reads\\, by the name of the source."`
	Feeds      map[string]*Feed        `json:"feeds"    jsonschema:"description=Topics that dlqd publishes dead letters to\\, by the name of the feed."`
}

// Feed publishes the dead letters of queues to a topic.
type Feed struct {
	Name           string `json:"-"`
	Cluster        string `json:"cluster"        jsonschema:"description=Name of the cluster."`
	Queues         Words  `json:"queues"         jsonschema:"description=Queues whose dead letters are published; * matches any text."`
	Topic          string `json:"topic"          jsonschema:"description=Topic. {queue} is the queue of the dead letter\\, {env} the environment of the policy."`
	Form           string `json:"form"           jsonschema:"enum=json,enum=cloudevents,enum=protobuf,description=Form of the value: the dead letter as JSON (default)\\, a CloudEvent in JSON with it\\, or a Protobuf message with what failed."`
	View           string `json:"view"           jsonschema:"enum=reader,enum=operator,description=What the value shows: what readers see (default)\\, or also the columns that only operators see. Values that the policy masks are masked in both."`
	DescriptorFile string `json:"descriptorFile" jsonschema:"description=For the form protobuf: file with the descriptor of the value (protoc --include_imports --descriptor_set_out)."`
	MessageType    string `json:"messageType"    jsonschema:"description=For the form protobuf: full name of the value's type."`

	// Descriptor is the content of DescriptorFile.
	Descriptor []byte `json:"-"`
}

// The values of Feed.Form.
const (
	FormJSON        = "json"
	FormCloudEvents = "cloudevents"
	FormProtobuf    = "protobuf"
)

// The values of Feed.View.
const (
	ViewReader   = "reader"
	ViewOperator = "operator"
)

// FeedNames returns the names of the feeds, in order.
func (p *Policy) FeedNames() []string { return slices.Sorted(maps.Keys(p.Sources.Feeds)) }

// Cluster is a Kafka cluster.
type Cluster struct {
	Name    string   `json:"-"`
	Brokers []string `json:"brokers" jsonschema:"description=Addresses of brokers: host:port."`
	TLS     TLS      `json:"tls"     jsonschema:"description=Encryption of the connection."`
	SASL    SASL     `json:"sasl"    jsonschema:"description=Login."`
}

// TLS configures the connection to a cluster or a registry.
type TLS struct {
	Enabled  bool   `json:"enabled"  jsonschema:"description=Connect by TLS."`
	CAFile   string `json:"caFile"   jsonschema:"description=File with the certificates (PEM) that sign the servers' certificates\\, and\\, beside those of the system\\, that of tokenURL. Empty: those of the system."`
	CertFile string `json:"certFile" jsonschema:"description=File with the client's certificate (PEM)."`
	KeyFile  string `json:"keyFile"  jsonschema:"description=File with the client's key (PEM)."`

	// The files' contents.
	CA   Secret `json:"-"`
	Cert Secret `json:"-"`
	Key  Secret `json:"-"`
}

// SASL configures the login to a cluster.
type SASL struct {
	Mechanism    string `json:"mechanism"    jsonschema:"enum=PLAIN,enum=SCRAM-SHA-256,enum=SCRAM-SHA-512,enum=OAUTHBEARER,description=Mechanism. Empty: no login."`
	Username     string `json:"username"     jsonschema:"description=User of PLAIN and SCRAM\\, or the client id at tokenURL."`
	PasswordFile string `json:"passwordFile" jsonschema:"description=File with the password\\, with the client's secret at tokenURL\\, or with the token of OAUTHBEARER. The file is read again when it changes."`
	TokenURL     string `json:"tokenURL"     jsonschema:"description=For OAUTHBEARER: URL at which an identity provider issues tokens for client credentials (RFC 6749\\, section 4.4). Empty: the token is in passwordFile."`
	Scopes       Words  `json:"scopes"       jsonschema:"description=Scopes of the tokens of tokenURL."`

	Password Secret `json:"-"` // the file's content
}

// Registry is a schema registry with the REST API of Confluent's Schema Registry.
type Registry struct {
	Name         string `json:"-"`
	URL          string `json:"url"          jsonschema:"description=URL (http or https)."`
	TLS          TLS    `json:"tls"          jsonschema:"description=Certificates\\, for https."`
	Username     string `json:"username"     jsonschema:"description=User. Empty: passwordFile has a bearer token."`
	PasswordFile string `json:"passwordFile" jsonschema:"description=File with the password\\, or with a bearer token. The file is read again when it changes."`

	Password Secret `json:"-"` // the file's content
}

// TopicSource is a set of topics of one cluster that are read with the same settings.
type TopicSource struct {
	Name           string     `json:"-"`
	Cluster        string     `json:"cluster"      jsonschema:"description=Name of the cluster."`
	Topics         Words      `json:"topics"       jsonschema:"description=Names of topics; * matches any text."`
	Envelope       string     `json:"envelope"     jsonschema:"enum=none,enum=spring,enum=connect,enum=streams,enum=share,enum=json,enum=protobuf,description=Where the error is: in headers of Spring Kafka\\, Kafka Connect\\, Kafka Streams or a share group; in the value (json\\, protobuf); none."`
	ErrorPaths     ErrorPaths `json:"errorPaths" jsonschema:"description=For the envelope json: paths in the value that describe the error."`
	DescriptorFile string     `json:"descriptorFile" jsonschema:"description=For the envelope protobuf: file with the descriptor of the value (protoc --include_imports --descriptor_set_out)."`
	MessageType    string     `json:"messageType"  jsonschema:"description=For the envelope protobuf: full name of the value's type."`
	Registry       string     `json:"registry"     jsonschema:"description=Name of the schema registry with the schemas of values that begin with the id of a schema. Empty: none."`
	Queue          string     `json:"queue"        jsonschema:"description=Queue of the entries\\, which only dlqd works; each source has its own. Empty: the name of the source."`
	Kind           string     `json:"kind"         jsonschema:"description=Kind of the entries. {topic} is the topic that the record failed in."`
	ReplayTo       string     `json:"replayTo"     jsonschema:"description=Topic that a redelivery is published to. {original} is the topic that the record failed in\\, as its envelope says; {*} is the text that the * of topics stands for."`
	Group          string     `json:"group"        jsonschema:"description=Consumer group that failed\\, if the envelope does not say it. {*} is the text that the * of topics stands for."`
	ConsumerGroup  string     `json:"consumerGroup" jsonschema:"description=dlqd's own consumer group: its offsets are a copy of the positions in the database. Empty: no group."`
	From           string     `json:"from"         jsonschema:"enum=earliest,enum=latest,description=Where reading begins in a partition that dlqd has not read before."`
	MaxRecordBytes int        `json:"maxRecordBytes" jsonschema:"minimum=1024,maximum=10485760,description=Above this size\\, dlqd stores a record without its value."`

	RedeliveriesPerSecond float64 `json:"redeliveriesPerSecond" jsonschema:"minimum=0,description=Maximum records per second that DLQ workers publish\\, over all processes; 0 for no limit."`

	Quiet       time.Duration `json:"quiet"       jsonschema:"description=A returned entry is resolved this long after its consumer group is past the record: longer than the consumers' retry topics take. Without a known group\\, returnedFor counts."`
	ReturnedFor time.Duration `json:"returnedFor" jsonschema:"description=A returned entry is resolved after this time\\, whether or not its consumer group is past the record; 0: never."`

	// Descriptor is the content of DescriptorFile.
	Descriptor []byte `json:"-"`
}

// The values of TopicSource.Envelope.
const (
	EnvelopeNone     = "none"
	EnvelopeSpring   = "spring"
	EnvelopeConnect  = "connect"
	EnvelopeStreams  = "streams"
	EnvelopeShare    = "share"
	EnvelopeJSON     = "json"
	EnvelopeProtobuf = "protobuf"
)

// The values of TopicSource.From.
const (
	FromEarliest = "earliest"
	FromLatest   = "latest"
)

// KindOf returns the kind of the entry of a record. original is the topic in which the record failed, according to the
// record's envelope, or "" if unknown.
func (s *TopicSource) KindOf(topic, original string) string {
	return strings.ReplaceAll(s.Kind, "{topic}", cmp.Or(original, topic))
}

// GroupOf returns the consumer group that failed to handle a record of a topic, for records whose envelope does not
// name the group. It returns "" if the group is unknown.
func (s *TopicSource) GroupOf(topic string) string {
	return strings.ReplaceAll(s.Group, "{*}", s.star(topic))
}

// TargetOf returns the topic to which a record of a topic is published again. original is the topic in which the record
// failed, according to the record's envelope, or "" if unknown. TargetOf returns false in these cases: the policy needs
// the original topic and it is unknown; the name is too long; or a source reads the target, so that the record would
// come back at once.
func (p *Policy) TargetOf(s *TopicSource, topic, original string) (string, bool) {
	target := strings.ReplaceAll(s.ReplayTo, "{*}", s.star(topic))
	if strings.Contains(target, "{original}") && original == "" {
		return "", false
	}
	target = strings.ReplaceAll(target, "{original}", original)
	return target, target != "" && len(target) <= MaxTopicLength && p.readerOf(s.Cluster, target) == nil
}

// readerOf returns the source that reads a topic, or nil.
func (p *Policy) readerOf(cluster, topic string) *TopicSource {
	for _, s := range p.Sources.Sources {
		if s.Cluster == cluster && s.Topics.Match(topic) {
			return s
		}
	}
	return nil
}

// star returns the text for which the * stands in the pattern that matches a topic.
func (s *TopicSource) star(topic string) string {
	for _, pattern := range s.Topics {
		before, after, ok := strings.Cut(pattern, "*")
		if ok && MatchPattern(pattern, topic) {
			return topic[len(before) : len(topic)-len(after)]
		}
	}
	return ""
}

// SourceNames returns the names of the sources, in order.
func (p *Policy) SourceNames() []string { return slices.Sorted(maps.Keys(p.Sources.Sources)) }

// MaxTopicLength is the maximum length of a topic's name (org.apache.kafka.common.internals.Topic).
const MaxTopicLength = 249

// tooLong returns an error text if a topic's name is longer than Kafka permits, and "" otherwise.
func tooLong(name string) string {
	if len(name) <= MaxTopicLength {
		return ""
	}
	return fmt.Sprintf("has %d characters; the name of a topic has %d at most", len(name), MaxTopicLength)
}

// withoutPlaces removes placeholders from the name of a topic.
var withoutPlaces = strings.NewReplacer("{queue}", "", "{original}", "", "{*}", "", "*", "")

// TopicOf returns the topic to which a feed publishes the dead letters of a queue. dlq.collect_feed has the same rule.
func (f *Feed) TopicOf(queue string) string {
	return strings.ReplaceAll(f.Topic, "{queue}", notInTopic.ReplaceAllString(queue, "_"))
}

var notInTopic = regexp.MustCompile(`[^a-zA-Z0-9._-]`)

var topicPattern = regexp.MustCompile(`^[a-zA-Z0-9._-]*\*?[a-zA-Z0-9._-]*$`)

// checkSources checks sources.yaml. It adds a destination and a queue for each source, with the source's name.
// Automatic redelivery of that queue is off unless the policy has a switch for it.
func (l *loader) checkSources() {
	const file = "sources"
	p := l.policy
	for name, c := range p.Sources.Clusters {
		l.checkCluster(name, c)
	}
	for name, r := range p.Sources.Registries {
		l.checkRegistry(name, r)
	}
	queues := map[string]string{}
	for _, name := range p.SourceNames() {
		s := p.Sources.Sources[name]
		at := "sources." + name
		s.Name = name
		s.Queue = cmp.Or(s.Queue, name)
		if p.Sources.Clusters[s.Cluster] == nil {
			l.addf(file, at+".cluster", "unknown cluster %q (known: %s)", s.Cluster, sortedKeys(p.Sources.Clusters))
		}
		if s.Registry != "" && p.Sources.Registries[s.Registry] == nil {
			l.addf(file, at+".registry", "unknown registry %q (known: %s)", s.Registry, sortedKeys(p.Sources.Registries))
		}
		if s.Registry != "" && s.Envelope == EnvelopeProtobuf {
			l.addf(file, at+".registry", "the envelope protobuf has its type from descriptorFile: it needs no registry")
		}
		l.checkTopics(at, s)
		if s.Envelope == EnvelopeProtobuf {
			if s.DescriptorFile == "" || s.MessageType == "" {
				l.addf(file, at, "descriptorFile and messageType are required for the envelope protobuf")
			} else {
				s.Descriptor, _ = l.descriptor(file, at+".descriptorFile", s.DescriptorFile, s.MessageType)
			}
		}
		if p.Destinations[name] != nil {
			l.addf(file, at, "the policy has a destination of this name; a source has its own")
			continue
		}
		if other := queues[s.Queue]; other != "" {
			l.addf(file, at+".queue", "queue %q is that of source %s; each source has its own", s.Queue, other)
			continue
		}
		queues[s.Queue] = name
		l.checkPace(file, at+".redeliveriesPerSecond", s.RedeliveriesPerSecond)
		if s.Quiet < 0 || s.ReturnedFor < 0 {
			l.addf(file, at, "quiet and returnedFor must not be negative")
		}
		destination := p.DestinationDefaults
		destination.Name, destination.URL, destination.Source = name, "kafka://"+s.Cluster, s
		destination.Probe, destination.Secret, destination.SecretFile = Probe{}, "", ""
		destination.RedeliveriesPerSecond = s.RedeliveriesPerSecond
		queue := p.Queues[s.Queue]
		if queue == nil {
			defaults := p.Defaults
			queue = &defaults
		}
		queue.Destination = name
		if p.Destinations == nil {
			p.Destinations = map[string]*Destination{}
		}
		p.Destinations[name], p.Queues[s.Queue] = &destination, queue
		if p.Routing.Automatic.Queues == nil {
			p.Routing.Automatic.Queues = map[string]*Switch{}
		}
		if p.Routing.Automatic.Queues[s.Queue] == nil {
			p.Routing.Automatic.Queues[s.Queue] = &Switch{}
		}
	}
}

// checkFeeds checks the feeds, which publish dead letters to topics.
func (l *loader) checkFeeds() {
	const file = "sources"
	p := l.policy
	for _, name := range p.FeedNames() {
		f := p.Sources.Feeds[name]
		at := "feeds." + name
		f.Name, f.Form, f.View = name, cmp.Or(f.Form, FormJSON), cmp.Or(f.View, ViewReader)
		if p.Sources.Clusters[f.Cluster] == nil {
			l.addf(file, at+".cluster", "unknown cluster %q (known: %s)", f.Cluster, sortedKeys(p.Sources.Clusters))
		}
		if len(f.Queues) == 0 {
			l.addf(file, at+".queues", "is required")
		}
		if strings.Contains(f.Topic, "{env}") && l.source.Env == "" {
			l.addf(file, at+".topic", "{env} needs an environment (--env)")
		}
		f.Topic = strings.ReplaceAll(f.Topic, "{env}", l.source.Env)
		example := strings.ReplaceAll(f.Topic, "{queue}", "x")
		if example == "" || strings.Contains(example, "*") || !topicPattern.MatchString(example) {
			l.addf(file, at+".topic", "%q is not the name of a topic, {queue} and {env}", f.Topic)
		}
		l.checkFeedTopic(at, f)
		if f.Form != FormProtobuf {
			continue
		}
		if f.DescriptorFile == "" || f.MessageType == "" {
			l.addf(file, at, "descriptorFile and messageType are required for the form protobuf")
			continue
		}
		var of protoreflect.MessageDescriptor
		if f.Descriptor, of = l.descriptor(file, at+".descriptorFile", f.DescriptorFile, f.MessageType); of != nil &&
			of.RequiredNumbers().Len() > 0 {
			l.addf(file, at+".messageType",
				"%s has required fields (proto2): use a type without them, because a dead letter may lack any field",
				f.MessageType)
		}
	}
}

// checkFeedTopic checks the lengths of the topic names of a feed, for all queues that the policy names.
func (l *loader) checkFeedTopic(at string, f *Feed) {
	if problem := tooLong(withoutPlaces.Replace(f.Topic)); problem != "" {
		l.addf("sources", at+".topic", "%s", problem)
		return
	}
	queues := slices.Concat(slices.Sorted(maps.Keys(l.policy.Queues)), f.Queues)
	for _, queue := range queues {
		if strings.Contains(queue, "*") || !f.Queues.Match(queue) {
			continue
		}
		if problem := tooLong(f.TopicOf(queue)); problem != "" {
			l.addf("sources", at+".topic", "for the queue %q it %s", queue, problem)
			return
		}
	}
}

// descriptor reads the descriptor file of a Protobuf message, and returns its content and the message's descriptor,
// which is nil if the file does not describe the message.
func (l *loader) descriptor(file, at, name, message string) (set []byte, of protoreflect.MessageDescriptor) {
	set = []byte(l.readFile(file, at, name))
	of, err := grpc.MessageOf(message, set)
	if err != nil && len(set) > 0 {
		l.addf(file, at, "%s: %w", l.secretPath(name), err)
	}
	return set, of
}

// secretOf returns the content of a secret file of sources.yaml.
func (l *loader) secretOf(at, path string) (secret Secret) {
	if path != "" {
		secret = Secret(l.readSecret("sources", at, path))
	}
	if l.source.SecretsElsewhere {
		return ""
	}
	return secret
}

// readTLS reads the files of a connection by TLS.
func (l *loader) readTLS(at string, t *TLS) {
	t.CA = l.secretOf(at+".tls.caFile", t.CAFile)
	t.Cert = l.secretOf(at+".tls.certFile", t.CertFile)
	t.Key = l.secretOf(at+".tls.keyFile", t.KeyFile)
	if (t.CertFile == "") != (t.KeyFile == "") {
		l.addf("sources", at+".tls", "certFile and keyFile belong together")
	}
}

// checkRegistry checks the settings of a schema registry, and reads its secrets.
func (l *loader) checkRegistry(name string, r *Registry) {
	const file = "sources"
	r.Name = name
	at := "registries." + name
	l.readTLS(at, &r.TLS)
	r.Password = l.secretOf(at+".passwordFile", r.PasswordFile)
	u, err := url.Parse(r.URL)
	if err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" ||
		u.Scheme != "https" && u.Scheme != "http" {
		l.addf(file, at+".url", "must be an http or https URL without user, password and query")
		return
	}
	secure := u.Scheme == "https"
	if !secure && (r.TLS.Enabled || r.TLS.CAFile != "" || r.TLS.CertFile != "") {
		l.addf(file, at+".url", "must be an https URL: tls is set")
	}
	if !secure && r.PasswordFile != "" && !net.ParseIP(u.Hostname()).IsLoopback() {
		l.addf(file, at+".url", "must be an https URL: a password would be sent in clear text")
	}
	if r.Username != "" && r.PasswordFile == "" {
		l.addf(file, at+".passwordFile", "is required for a user")
	}
}

// checkCluster checks the connection settings of a cluster, and reads its secrets.
func (l *loader) checkCluster(name string, c *Cluster) {
	const file = "sources"
	c.Name = name
	at := "clusters." + name
	if len(c.Brokers) == 0 {
		l.addf(file, at+".brokers", "is required")
	}
	for i, address := range c.Brokers {
		if host, port, err := net.SplitHostPort(address); err != nil || host == "" || port == "" {
			l.addf(file, fmt.Sprintf("%s.brokers[%d]", at, i), "%q is not host:port", address)
		}
	}
	l.readTLS(at, &c.TLS)
	c.SASL.Password = l.secretOf(at+".sasl.passwordFile", c.SASL.PasswordFile)
	if !c.TLS.Enabled && (c.TLS.CAFile != "" || c.TLS.CertFile != "") {
		l.addf(file, at+".tls.enabled", "must be true: files for TLS are named")
	}
	if c.SASL.Mechanism != "" && c.SASL.PasswordFile == "" {
		l.addf(file, at+".sasl.passwordFile", "is required for %s", c.SASL.Mechanism)
	}
	if c.SASL.Mechanism != "" && (c.SASL.Mechanism != "OAUTHBEARER" || c.SASL.TokenURL != "") && c.SASL.Username == "" {
		l.addf(file, at+".sasl.username", "is required for %s", c.SASL.Mechanism)
	}
	if c.SASL.TokenURL != "" {
		if c.SASL.Mechanism != "OAUTHBEARER" {
			l.addf(file, at+".sasl.tokenURL", "is for OAUTHBEARER alone")
		}
		u, err := url.Parse(c.SASL.TokenURL)
		if err != nil || u.Host == "" || u.User != nil ||
			u.Scheme != "https" && (u.Scheme != "http" || !net.ParseIP(u.Hostname()).IsLoopback()) {
			l.addf(file, at+".sasl.tokenURL", "must be an https URL without user and password")
		}
	}
}

// checkTopics checks the topics that a source reads, and the topics to which its records are published again.
func (l *loader) checkTopics(at string, s *TopicSource) {
	const file = "sources"
	p := l.policy
	if len(s.Topics) == 0 {
		l.addf(file, at+".topics", "is required")
	}
	for _, pattern := range s.Topics {
		if !topicPattern.MatchString(pattern) {
			l.addf(file, at+".topics", "%q is not the name of a topic, with one * at most", pattern)
		}
		if problem := tooLong(withoutPlaces.Replace(pattern)); problem != "" {
			l.addf(file, at+".topics", "%s", problem)
		}
		for _, name := range p.SourceNames() {
			other := p.Sources.Sources[name]
			if name < s.Name && other.Cluster == s.Cluster &&
				slices.ContainsFunc(other.Topics, func(o string) bool { return overlap(o, pattern) }) {
				l.addf(file, at+".topics", "source %s reads topics that match %q, too", name, pattern)
			}
		}
	}
	target := strings.NewReplacer("{original}", "x", "{*}", "x").Replace(s.ReplayTo)
	if target == "" || strings.Contains(target, "*") || !topicPattern.MatchString(target) {
		l.addf(file, at+".replayTo", "%q is not the name of a topic, {original} and {*}", s.ReplayTo)
	} else if reader := p.readerOf(s.Cluster, s.ReplayTo); reader != nil {
		l.addf(file, at+".replayTo", "source %s reads this topic: records would come back at once", reader.Name)
	}
	if problem := tooLong(withoutPlaces.Replace(s.ReplayTo)); problem != "" {
		l.addf(file, at+".replayTo", "%s", problem)
	}
}

// overlap reports whether a text exists that matches both patterns. Each pattern has at most one *.
func overlap(a, b string) bool {
	switch {
	case a == "" && b == "":
		return true
	case strings.HasPrefix(a, "*"):
		return overlap(a[1:], b) || b != "" && overlap(a, b[1:])
	case strings.HasPrefix(b, "*"):
		return overlap(b, a)
	}
	return a != "" && b != "" && a[0] == b[0] && overlap(a[1:], b[1:])
}
