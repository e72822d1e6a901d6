package policy

import "strings"

// Sources is sources.yaml: topics whose records are dead letters.
type Sources struct {
	Clusters map[string]*Cluster     `json:"clusters" jsonschema:"description=Kafka clusters\\, by name."`
	Defaults TopicSource             `json:"defaults" jsonschema:"description=Defaults for every source."`
	Sources  map[string]*TopicSource `json:"sources"  jsonschema:"description=Topics of dead letters that dlqd reads\\, by the name of the source."`
}

// Cluster is a Kafka cluster.
type Cluster struct {
	Name    string   `json:"-"`
	Brokers []string `json:"brokers" jsonschema:"description=Addresses of brokers: host:port."`
	TLS     TLS      `json:"tls"     jsonschema:"description=Encryption of the connection."`
	SASL    SASL     `json:"sasl"    jsonschema:"description=Login."`
}

// TLS configures the connection to a cluster.
type TLS struct {
	Enabled  bool   `json:"enabled"  jsonschema:"description=Connect by TLS."`
	CAFile   string `json:"caFile"   jsonschema:"description=File with the certificates (PEM) that sign the brokers' certificates. Empty: those of the system."`
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
	Username     string `json:"username"     jsonschema:"description=User of PLAIN and SCRAM."`
	PasswordFile string `json:"passwordFile" jsonschema:"description=File with the password\\, or with the token of OAUTHBEARER."`

	Password Secret `json:"-"` // the file's content
}

// TopicSource is a set of topics of one cluster that are read in one way.
type TopicSource struct {
	Name           string     `json:"-"`
	Cluster        string     `json:"cluster"      jsonschema:"description=Name of the cluster."`
	Topics         Words      `json:"topics"       jsonschema:"description=Names of topics; * matches any text."`
	Envelope       string     `json:"envelope"     jsonschema:"enum=none,enum=spring,enum=connect,enum=streams,enum=json,enum=protobuf,description=Where the error is: in headers of Spring Kafka\\, Kafka Connect or Kafka Streams; in the value (json\\, protobuf); none."`
	ErrorPaths     ErrorPaths `json:"errorPaths" jsonschema:"description=For the envelope json: paths in the value that describe the error."`
	DescriptorFile string     `json:"descriptorFile" jsonschema:"description=For the envelope protobuf: file with the descriptor of the value (protoc --include_imports --descriptor_set_out)."`
	MessageType    string     `json:"messageType"  jsonschema:"description=For the envelope protobuf: full name of the value's type."`
	Queue          string     `json:"queue"        jsonschema:"description=Queue of the entries. Only dlqd works it."`
	Kind           string     `json:"kind"         jsonschema:"description=Kind of the entries. {topic} is the topic that the record failed in."`
	ReplayTo       string     `json:"replayTo"     jsonschema:"description=Topic that a redelivery is published to. {original} is the topic that the record failed in\\, as its envelope says; {*} is the text that the * of topics stands for."`
	Group          string     `json:"group"        jsonschema:"description=Consumer group that failed\\, if the envelope does not say it."`
	ConsumerGroup  string     `json:"consumerGroup" jsonschema:"description=dlqd's own consumer group: its offsets are a copy of the positions in the database. Empty: no group."`
	From           string     `json:"from"         jsonschema:"enum=earliest,enum=latest,description=Where reading begins in a partition that dlqd has not read before."`
	MaxRecordBytes int        `json:"maxRecordBytes" jsonschema:"minimum=1024,maximum=10485760,description=Above this size\\, dlqd stores a record without its value."`

	// Descriptor is the content of DescriptorFile.
	Descriptor []byte `json:"-"`
}

// The values of TopicSource.Envelope.
const (
	EnvelopeNone     = "none"
	EnvelopeSpring   = "spring"
	EnvelopeConnect  = "connect"
	EnvelopeStreams  = "streams"
	EnvelopeJSON     = "json"
	EnvelopeProtobuf = "protobuf"
)

// The values of TopicSource.From.
const (
	FromEarliest = "earliest"
	FromLatest   = "latest"
)

// TargetOf returns the topic that a record of a topic is published to again. original is the topic
// that it failed in, as its envelope says. It returns false if the envelope does not say it and the
// policy needs it.
func (s *TopicSource) TargetOf(topic, original string) (string, bool) {
	target := s.ReplayTo
	if strings.Contains(target, "{*}") {
		target = strings.ReplaceAll(target, "{*}", s.star(topic))
	}
	if strings.Contains(target, "{original}") {
		if original == "" {
			return "", false
		}
		target = strings.ReplaceAll(target, "{original}", original)
	}
	return target, target != ""
}

// star returns the text that the * of the pattern that matches a topic stands for.
func (s *TopicSource) star(topic string) string {
	for _, pattern := range s.Topics {
		before, after, ok := strings.Cut(pattern, "*")
		if ok && MatchPattern(pattern, topic) && len(topic) >= len(before)+len(after) {
			return topic[len(before) : len(topic)-len(after)]
		}
	}
	return ""
}
