package kafka

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/sasl/scram"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

func (b *bundle) broker(t *testing.T) source.Broker {
	t.Helper()
	broker, err := Open(b.policy)
	require.NoError(t, err)
	t.Cleanup(broker.Close)
	return broker
}

// consume returns the first n records of a topic.
func (b *bundle) consume(t *testing.T, topic string, n int) []*kgo.Record {
	t.Helper()
	client := b.producer(t, kgo.ConsumeTopics(topic))
	var records []*kgo.Record
	for len(records) < n {
		fetched := client.PollFetches(t.Context())
		require.NoError(t, fetched.Err())
		records = append(records, fetched.Records()...)
	}
	return records
}

// A record is published with its key, its partition and its own headers, without the headers of envelopes.
func TestPublisher_PublishesARecordBack(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 5, "orders")
	died := time.UnixMilli(1_700_000_000_123)
	acknowledged, err := b.broker(t).Publish(t.Context(),
		source.Target{Source: "orders", Cluster: "main", Topic: "orders", Partition: 3},
		source.Message{Key: []byte("customer"), Value: []byte{}, Time: died, Headers: []source.Header{
			{Key: "traceparent", Value: []byte("00-1")},
			{Key: "null"},
			{Key: "kafka_dlt-original-topic", Value: []byte("orders")},
			{Key: "kafka_exception-fqcn"},
			{Key: "retry_topic-attempts"},
			{Key: "__connect.errors.topic"},
			{Key: "__streams.errors.topic"},
			{Key: HeaderTimestamp, Value: []byte("1")},
			{Key: "kafka_correlationId"},
			{Key: source.HeaderEntry, Value: []byte("e")},
			{Key: source.HeaderDelivery, Value: []byte("d")},
		}})
	require.NoError(t, err)
	require.Equal(t, source.Acknowledgement{
		TopicID: b.partition(t, "orders", 0).TopicID, Partition: 3, Offset: 0,
	}, acknowledged)
	record := b.consume(t, "orders", 1)[0]
	require.Equal(t, "customer", string(record.Key))
	require.True(t, record.Value != nil && len(record.Value) == 0, "empty became null")
	require.Equal(t, int32(3), record.Partition)
	require.WithinDuration(t, time.Now(), record.Timestamp, generous)
	require.Equal(t, []kgo.RecordHeader{
		{Key: "traceparent", Value: []byte("00-1")},
		{Key: "null"},
		{Key: "kafka_correlationId"},
		{Key: source.HeaderEntry, Value: []byte("e")},
		{Key: source.HeaderDelivery, Value: []byte("d")},
		{Key: HeaderTimestamp, Value: []byte("1700000000123")},
	}, record.Headers)
}

// A record whose partition does not exist goes to the partition that Kafka's producers would choose for its key.
func TestPublisher_ChoosesThePartitionByKey(t *testing.T) {
	t.Parallel()
	b := setupTopics(t, 5, "orders")
	broker := b.broker(t)
	byKey := kgo.StickyKeyPartitioner(nil).ForTopic("orders").Partition(&kgo.Record{Key: []byte("customer")}, 5)
	for offset, partition := range []int32{source.Unknown, 5} {
		acknowledged, err := broker.Publish(t.Context(),
			source.Target{Cluster: "main", Topic: "orders", Partition: partition}, source.Message{Key: []byte("customer")})
		require.NoError(t, err)
		require.Equal(t, int32(byKey), acknowledged.Partition)
		require.Equal(t, int64(offset), acknowledged.Offset)
	}
	record := b.consume(t, "orders", 1)[0]
	require.Nil(t, record.Value, "null became empty")
	require.Empty(t, record.Headers)
}

// The class of an error says whether publishing the record again can succeed.
func TestPublisher_ClassifiesErrors(t *testing.T) {
	t.Parallel()
	write := kfake.ACL{
		Resource: kmsg.ACLResourceTypeTopic, Pattern: kmsg.ACLResourcePatternTypeLiteral, Name: "orders",
		Operation: kmsg.ACLOperationWrite, Allow: true,
	}
	describe := write
	describe.Name, describe.Operation = "secret", kmsg.ACLOperationDescribe
	b := setup(t, kfake.SeedTopics(1, "orders", "secret"), kfake.EnableSASL(), kfake.EnableACLs(),
		kfake.Superuser("SCRAM-SHA-256", "root", "r"), kfake.User("PLAIN", "dlqd", "p", write, describe))
	b.policy.Sources.Clusters["main"].SASL = policy.SASL{Mechanism: "PLAIN", Username: "dlqd", Password: "p"}
	publish := func(topic string, value []byte) *riverdlq.Error {
		_, err := b.broker(t).Publish(t.Context(), source.Target{Cluster: "main", Topic: topic}, source.Message{Value: value})
		var failure *riverdlq.Error
		require.ErrorAs(t, err, &failure)
		return failure
	}
	_, err := b.broker(t).Publish(t.Context(), source.Target{Cluster: "main", Topic: "orders"}, source.Message{})
	require.NoError(t, err)
	random := make([]byte, 2<<20) // cannot be compressed
	_, err = rand.Read(random)
	require.NoError(t, err)
	large := publish("orders", random)
	require.ErrorIs(t, large, source.ErrUnpublishable)
	require.Equal(t, riverdlq.ClassValidation, large.Class)
	require.Equal(t, "MESSAGE_TOO_LARGE", large.Type)
	refused := publish("secret", nil)
	require.NotErrorIs(t, refused, source.ErrUnpublishable)
	require.Equal(t, riverdlq.ClassUnauthorized, refused.Class)
	require.Equal(t, "TOPIC_AUTHORIZATION_FAILED", refused.Type)
	b.policy.Sources.Clusters["main"].SASL.Password = "wrong-password"
	login := publish("orders", nil)
	require.Equal(t, riverdlq.ClassOutage, login.Class, "kfake closes the connection; Kafka says why")
	require.NotContains(t, login.Message, "wrong-password")
}

// A topic that does not exist is not created.
func TestPublisher_CreatesNoTopic(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.AllowAutoTopicCreation())
	_, err := b.broker(t).Publish(t.Context(), source.Target{Cluster: "main", Topic: "missing"}, source.Message{})
	require.ErrorIs(t, err, source.ErrUnpublishable)
	var failure *riverdlq.Error
	require.ErrorAs(t, err, &failure)
	require.Equal(t, riverdlq.ClassNotFound, failure.Class)
}

// If the cluster does not answer, the publication ends with its context.
func TestPublisher_WaitsNoLongerThanItsContext(t *testing.T) {
	t.Parallel()
	b := setup(t, kfake.SeedTopics(1, "orders"))
	listener, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and never answers
	require.NoError(t, err)
	defer listener.Close()
	publish := func(broker source.Broker) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := broker.Publish(ctx, source.Target{Cluster: "main", Topic: "orders"}, source.Message{})
		var failure *riverdlq.Error
		require.ErrorAs(t, err, &failure)
		require.Equal(t, riverdlq.ClassOutage, failure.Class)
	}
	produce := b.broker(t)
	_, err = produce.Publish(t.Context(), source.Target{Cluster: "main", Topic: "orders"}, source.Message{})
	require.NoError(t, err)
	b.cluster.ControlKey(0, func(kmsg.Request) (kmsg.Response, error, bool) { // takes the record and never answers
		b.cluster.KeepControl()
		return nil, nil, true
	})
	publish(produce)
	b.policy.Sources.Clusters["main"].Brokers = []string{listener.Addr().String()}
	publish(b.broker(t))
}

// Reading and publishing log in with every mechanism, over TLS.
func TestReader_LogsIn(t *testing.T) {
	t.Parallel()
	certificate, authority := certificate(t)
	for _, mechanism := range []string{"PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"} {
		b := setup(t, kfake.SeedTopics(1, "dlq.a", "orders"), kfake.EnableSASL(),
			kfake.Superuser(mechanism, "dlqd", "secret"), kfake.Superuser("SCRAM-SHA-256", "tests", "tests"),
			kfake.TLS(&tls.Config{Certificates: []tls.Certificate{certificate}, MinVersion: tls.VersionTLS12}))
		main := b.policy.Sources.Clusters["main"]
		main.SASL = policy.SASL{Mechanism: mechanism, Username: "dlqd", Password: "secret"}
		main.TLS = policy.TLS{Enabled: true, CA: policy.Secret(authority)}
		config, err := tlsConfig(main.TLS)
		require.NoError(t, err)
		producer := b.producer(t, kgo.DialTLSConfig(config),
			kgo.SASL(scram.Auth{User: "tests", Pass: "tests"}.AsSha256Mechanism()))
		produce(t, producer, numbered("dlq.a", 0, 0, 3)...)
		b.read(t)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 0)) == 3 }, "records are missing")
		_, err = b.broker(t).Publish(t.Context(), source.Target{Cluster: "main", Topic: "orders"}, source.Message{})
		require.NoError(t, err)
	}
}

// A topic that dlqd may not read does not delay others, and is read as soon as dlqd may read it.
func TestReader_ReadsBesideATopicThatIsRefused(t *testing.T) {
	t.Parallel()
	allow := func(resource kmsg.ACLResourceType, name string, operation kmsg.ACLOperation) kfake.ACL {
		return kfake.ACL{
			Resource: resource, Name: name, Pattern: kmsg.ACLResourcePatternTypeLiteral, Operation: operation, Allow: true,
		}
	}
	for _, group := range []string{"", "dlqd"} {
		b := setup(t, kfake.SeedTopics(2, "dlq.a", "dlq.b", "dlq.hidden"), kfake.EnableSASL(), kfake.EnableACLs(),
			kfake.Superuser("SCRAM-SHA-256", "tests", "tests"), kfake.User("PLAIN", "dlqd", "p",
				allow(kmsg.ACLResourceTypeTopic, "dlq.a", kmsg.ACLOperationRead),
				allow(kmsg.ACLResourceTypeTopic, "dlq.b", kmsg.ACLOperationDescribe),
				allow(kmsg.ACLResourceTypeGroup, "dlqd", kmsg.ACLOperationRead)))
		b.source.ConsumerGroup, b.source.Topics = group, policy.Words{"dlq.a", "dlq.b", "dlq.hidden"}
		b.policy.Sources.Clusters["main"].SASL = policy.SASL{Mechanism: "PLAIN", Username: "dlqd", Password: "p"}
		producer := b.producer(t, kgo.SASL(scram.Auth{User: "tests", Pass: "tests"}.AsSha256Mechanism()))
		produce(t, producer, numbered("dlq.a", 1, 0, 3)...)
		produce(t, producer, numbered("dlq.b", 1, 0, 3)...)
		b.read(t)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.a", 1)) == 3 }, "the other topic is held up")
		eventually(t, func() bool { return b.ledger.failure("dlq.b", 1) != "" }, "no error is reported")
		require.Contains(t, b.ledger.failure("dlq.b", 1), "TOPIC_AUTHORIZATION_FAILED")
		eventually(t, func() bool { return b.ledger.failure("dlq.hidden", source.Unknown) != "" }, "no error is reported")
		acl := kmsg.NewCreateACLsRequestCreation()
		acl.ResourceType, acl.ResourcePatternType = kmsg.ACLResourceTypeTopic, kmsg.ACLResourcePatternTypeLiteral
		acl.ResourceName = "dlq.b"
		acl.Principal, acl.Host = "User:dlqd", "*"
		acl.Operation, acl.PermissionType = kmsg.ACLOperationRead, kmsg.ACLPermissionTypeAllow
		request := kmsg.NewPtrCreateACLsRequest()
		request.Creations = append(request.Creations, acl)
		_, err := request.RequestWith(t.Context(), producer)
		require.NoError(t, err)
		eventually(t, func() bool { return len(b.ledger.offsets("dlq.b", 1)) == 3 }, "the topic is not read")
		eventually(t, func() bool { return b.ledger.failure("dlq.b", 1) == "" }, "the error stays")
	}
}

// certificate returns a certificate for 127.0.0.1, also in PEM.
func certificate(t *testing.T) (tls.Certificate, string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key},
		string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}
