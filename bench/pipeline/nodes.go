package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// attempts is how often a node is called for a document before the document counts as failed, with a pause of
	// attemptPause between the calls.
	attempts     = 2
	attemptPause = 10 * time.Millisecond
	callTimeout  = 5 * time.Second
	// connectPause is the pause before the client of a node connects again.
	connectPause = 200 * time.Millisecond
)

const protos = `
file {
  name: "pipeline/v1/pipeline.proto" package: "pipeline.v1" syntax: "proto3"
  dependency: "google/protobuf/timestamp.proto"
  message_type {
    name: "Document"
    field {name: "customer" json_name: "customer" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL}
    field {name: "number" json_name: "number" number: 2 type: TYPE_INT32 label: LABEL_OPTIONAL}
    field {name: "passed" json_name: "passed" number: 3 type: TYPE_STRING label: LABEL_REPEATED}
  }
  message_type {
    name: "DlqMessage"
    field {
      name: "stream" json_name: "stream" number: 1 type: TYPE_MESSAGE type_name: ".pipeline.v1.Document"
      label: LABEL_OPTIONAL
    }
    field {name: "error_type" json_name: "errorType" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL}
    field {name: "error_message" json_name: "errorMessage" number: 3 type: TYPE_STRING label: LABEL_OPTIONAL}
    field {
      name: "failed_at" json_name: "failedAt" number: 4 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp"
      label: LABEL_OPTIONAL
    }
    field {name: "failed_node_id" json_name: "failedNodeId" number: 5 type: TYPE_STRING label: LABEL_OPTIONAL}
    field {name: "original_topic" json_name: "originalTopic" number: 6 type: TYPE_STRING label: LABEL_OPTIONAL}
  }
  service {name: "Node" method {name: "Process" input_type: ".pipeline.v1.Document" output_type: ".pipeline.v1.Document"}}
}`

// schema has the parsed protos.
type schema struct {
	descriptors []byte // as protoc writes them
	document    protoreflect.MessageDescriptor
	dead        protoreflect.MessageDescriptor
}

func parseSchema() (*schema, error) {
	set := &descriptorpb.FileDescriptorSet{}
	if err := prototext.Unmarshal([]byte(protos), set); err != nil {
		return nil, err
	}
	set.File = append(set.File, protodesc.ToFileDescriptorProto(timestamppb.File_google_protobuf_timestamp_proto))
	files, err := protodesc.NewFiles(set)
	if err != nil {
		return nil, err
	}
	file, err := files.FindFileByPath("pipeline/v1/pipeline.proto")
	if err != nil {
		return nil, err
	}
	descriptors, err := proto.Marshal(set)
	if err != nil {
		return nil, err
	}
	return &schema{
		descriptors: descriptors,
		document:    file.Messages().ByName("Document"), dead: file.Messages().ByName("DlqMessage"),
	}, nil
}

// document identifies a document. Its number counts the documents of the customer.
type document struct {
	customer string
	number   int32
}

func (s *schema) message(d document) *dynamicpb.Message {
	m := dynamicpb.NewMessage(s.document)
	m.Set(s.document.Fields().ByName("customer"), protoreflect.ValueOfString(d.customer))
	m.Set(s.document.Fields().ByName("number"), protoreflect.ValueOfInt32(d.number))
	return m
}

func (s *schema) parse(value []byte) (*dynamicpb.Message, document, error) {
	m := dynamicpb.NewMessage(s.document)
	if err := proto.Unmarshal(value, m); err != nil {
		return nil, document{}, err
	}
	return m, s.documentOf(m), nil
}

func (s *schema) documentOf(m *dynamicpb.Message) document {
	fields := s.document.Fields()
	return document{
		customer: m.Get(fields.ByName("customer")).String(), number: int32(m.Get(fields.ByName("number")).Int()),
	}
}

// node is a node of the pipeline. It has a gRPC server, and a consumer group that calls the server for each document in
// the node's topics and publishes the answer to the next topic.
type node struct {
	prefix string // of topics and of the group
	name   string
	next   string // topic for the documents that the node has processed
	schema *schema

	address string
	server  *grpc.Server // nil while the node is broken
	conn    *grpc.ClientConn
	client  *kgo.Client

	mu    sync.Mutex
	calls []document // documents that the server has processed
}

func (n *node) group() string      { return n.prefix + "node-" + n.name }
func (n *node) input() string      { return n.prefix + "in." + n.name }
func (n *node) retryTopic() string { return n.prefix + "retry." + n.name }
func (n *node) deadTopic() string  { return n.prefix + "dlq." + environment + "." + n.name }

// start starts the node's server, at the same address as before.
func (n *node) start(ctx context.Context) error {
	if n.address == "" {
		n.address = "127.0.0.1:0"
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", n.address)
	if err != nil {
		return err
	}
	n.address = listener.Addr().String()
	n.server = grpc.NewServer()
	n.server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "pipeline.v1.Node", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Process", Handler: n.process}},
	}, struct{}{})
	server := n.server
	go func() { _ = server.Serve(listener) }()
	return nil
}

// process handles a call.
func (n *node) process(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	m := dynamicpb.NewMessage(n.schema.document)
	if err := decode(m); err != nil {
		return nil, err
	}
	m.Mutable(n.schema.document.Fields().ByName("passed")).List().Append(protoreflect.ValueOfString(n.name))
	n.mu.Lock()
	n.calls = append(n.calls, n.schema.documentOf(m))
	n.mu.Unlock()
	return m, nil
}

// processed returns the documents that the node's server has processed, in order.
func (n *node) processed() []document {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clip(n.calls)
}

func (n *node) connect(brokers []string) (err error) {
	n.conn, err = grpc.NewClient(n.address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{
			BaseDelay: connectPause, Multiplier: 1, MaxDelay: connectPause,
		}}))
	if err != nil {
		return err
	}
	n.client, err = kgo.NewClient(kgo.SeedBrokers(brokers...), kgo.ConsumerGroup(n.group()),
		kgo.ConsumeTopics(n.input(), n.retryTopic()), kgo.DisableAutoCommit(), kgo.ProducerLinger(0))
	return err
}

// reconnect waits until the client is connected to the node's server again.
func (n *node) reconnect(ctx context.Context) error {
	n.conn.ResetConnectBackoff()
	for {
		n.conn.Connect()
		state := n.conn.GetState()
		if state == connectivity.Ready {
			return nil
		}
		if !n.conn.WaitForStateChange(ctx, state) {
			return ctx.Err()
		}
	}
}

func (n *node) close() {
	if n.server != nil {
		n.server.Stop()
	}
	if n.conn != nil {
		_ = n.conn.Close()
	}
	if n.client != nil {
		n.client.Close()
	}
}

// run consumes the node's topics until ctx is done.
func (n *node) run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := n.runOnce(ctx); err != nil && ctx.Err() == nil {
			return fmt.Errorf("node %s: %w", n.name, err)
		}
	}
	return nil
}

// runOnce handles the next records, and commits their offsets.
func (n *node) runOnce(ctx context.Context) error {
	fetched := n.client.PollFetches(ctx)
	if err := fetched.Err(); err != nil {
		return err
	}
	for _, record := range fetched.Records() {
		if err := n.handle(ctx, record); err != nil {
			return err
		}
	}
	return n.client.CommitRecords(ctx, fetched.Records()...)
}

// handle calls the node for a record. It publishes the answer or, if the call fails, the dead document.
func (n *node) handle(ctx context.Context, record *kgo.Record) error {
	m, _, err := n.schema.parse(record.Value)
	if err != nil {
		return err
	}
	answer, err := n.call(ctx, m)
	to := &kgo.Record{Topic: n.next, Key: record.Key}
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		to.Topic, answer = n.deadTopic(), n.dead(m, record.Topic, err)
		to.Headers = record.Headers // if dlqd published the record, the dead document has the same dlqd-delivery-id
	}
	if to.Value, err = proto.Marshal(answer); err != nil {
		return err
	}
	return n.client.ProduceSync(ctx, to).FirstErr()
}

func (n *node) call(ctx context.Context, m *dynamicpb.Message) (*dynamicpb.Message, error) {
	var err error
	for range attempts {
		answer := dynamicpb.NewMessage(n.schema.document)
		err = func() error {
			ctx, cancel := context.WithTimeout(ctx, callTimeout)
			defer cancel()
			return n.conn.Invoke(ctx, "/pipeline.v1.Node/Process", m, answer)
		}()
		if err == nil {
			return answer, nil
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(attemptPause):
		}
	}
	return nil, err
}

// dead returns the message for a document that failed.
func (n *node) dead(m *dynamicpb.Message, topic string, failure error) *dynamicpb.Message {
	kind, text := status.Code(failure).String(), status.Convert(failure).Message()
	switch {
	case strings.Contains(text, "connection refused"):
		kind = "CONNECTION_REFUSED"
	case errors.Is(failure, context.DeadlineExceeded), status.Code(failure) == codes.DeadlineExceeded:
		kind = "TIMEOUT"
	}
	d := dynamicpb.NewMessage(n.schema.dead)
	set := func(name protoreflect.Name, value protoreflect.Value) {
		d.Set(n.schema.dead.Fields().ByName(name), value)
	}
	set("stream", protoreflect.ValueOfMessage(m))
	set("error_type", protoreflect.ValueOfString(kind))
	set("error_message", protoreflect.ValueOfString(text))
	at := d.Mutable(n.schema.dead.Fields().ByName("failed_at")).Message()
	now := time.Now()
	at.Set(at.Descriptor().Fields().ByName("seconds"), protoreflect.ValueOfInt64(now.Unix()))
	at.Set(at.Descriptor().Fields().ByName("nanos"), protoreflect.ValueOfInt32(int32(now.Nanosecond())))
	set("failed_node_id", protoreflect.ValueOfString(n.name))
	set("original_topic", protoreflect.ValueOfString(topic))
	return d
}
