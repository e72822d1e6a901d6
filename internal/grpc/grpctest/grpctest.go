// Package grpctest runs a gRPC server for tests. Its message types are known only at run time, as the types of
// receivers are.
package grpctest

import (
	"context"
	"crypto/tls"
	"net"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/reflection"
	reflectionv1 "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

// Method is the path of the server's method.
const Method = "shop.v1.Payments/Capture"

// files are the descriptors of the server's files, without the file of Timestamp.
const files = `
file {
  name: "shop/v1/payments.proto" package: "shop.v1" syntax: "proto3"
  dependency: ["shop/v1/money.proto", "google/protobuf/timestamp.proto"]
  message_type {
    name: "CaptureRequest"
    field {name: "order_id" json_name: "orderId" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL}
    field {
      name: "total" json_name: "total" number: 2 type: TYPE_MESSAGE type_name: ".shop.v1.Money" label: LABEL_OPTIONAL
    }
    field {
      name: "at" json_name: "at" number: 3 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp"
      label: LABEL_OPTIONAL
    }
    field {name: "amount" json_name: "amount" number: 4 type: TYPE_INT64 label: LABEL_OPTIONAL}
  }
  message_type {
    name: "CaptureResponse"
    field {name: "success" json_name: "success" number: 1 type: TYPE_BOOL label: LABEL_OPTIONAL}
    field {name: "reason" json_name: "reason" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL}
  }
  service {
    name: "Payments"
    method {name: "Capture" input_type: ".shop.v1.CaptureRequest" output_type: ".shop.v1.CaptureResponse"}
    method {
      name: "Watch" input_type: ".shop.v1.CaptureRequest" output_type: ".shop.v1.CaptureResponse"
      server_streaming: true
    }
  }
}
file {
  name: "shop/v1/money.proto" package: "shop.v1" syntax: "proto3"
  message_type {
    name: "Money"
    field {name: "currency" json_name: "currency" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL}
    field {name: "cents" json_name: "cents" number: 2 type: TYPE_INT64 label: LABEL_OPTIONAL}
  }
}`

// Config configures a server.
type Config struct {
	Address    string // to listen on; empty means a free port
	TLS        *tls.Config
	Reflection string // v1, v1alpha, or empty for no reflection
	// Capture answers calls. Its answer is the text format of a CaptureResponse; "" is an empty response.
	Capture func(ctx context.Context, request *dynamicpb.Message) (answer string, err error)
}

// Server is a running server.
type Server struct {
	Address string
	// Reflections counts the calls of the reflection service.
	Reflections atomic.Int64

	server *grpc.Server
}

// Stop ends the server and cuts its connections.
func (s *Server) Stop() { s.server.Stop() }

// Descriptors returns the server's descriptors with their imports, in the form that protoc writes.
func Descriptors(tb testing.TB) []byte {
	tb.Helper()
	raw, err := proto.Marshal(set(tb))
	require.NoError(tb, err)
	return raw
}

func set(tb testing.TB) *descriptorpb.FileDescriptorSet {
	tb.Helper()
	set := &descriptorpb.FileDescriptorSet{}
	require.NoError(tb, prototext.Unmarshal([]byte(files), set))
	set.File = append(set.File, protodesc.ToFileDescriptorProto(timestamppb.File_google_protobuf_timestamp_proto))
	return set
}

// Start starts a server, which stops at the end of the test.
func Start(tb testing.TB, config Config) *Server {
	tb.Helper()
	registry, err := protodesc.NewFiles(set(tb))
	require.NoError(tb, err)
	found, err := registry.FindDescriptorByName("shop.v1.Payments")
	require.NoError(tb, err)
	method := found.(protoreflect.ServiceDescriptor).Methods().ByName("Capture") //nolint:forcetypeassert // a service
	s := &Server{}
	options := []grpc.ServerOption{grpc.ChainStreamInterceptor(func(srv any, stream grpc.ServerStream,
		_ *grpc.StreamServerInfo, handler grpc.StreamHandler,
	) error {
		s.Reflections.Add(1)
		return handler(srv, stream)
	})}
	if config.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(config.TLS)))
	}
	s.server = grpc.NewServer(options...)
	s.server.RegisterService(&grpc.ServiceDesc{
		ServiceName: "shop.v1.Payments", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Capture", Handler: func(_ any, ctx context.Context,
			decode func(any) error, _ grpc.UnaryServerInterceptor,
		) (any, error) {
			request, answer := dynamicpb.NewMessage(method.Input()), dynamicpb.NewMessage(method.Output())
			if err := decode(request); err != nil {
				return nil, err
			}
			text, err := config.Capture(ctx, request)
			if err != nil {
				return nil, err
			}
			return answer, prototext.Unmarshal([]byte(text), answer)
		}}},
	}, struct{}{})
	reflected := reflection.ServerOptions{Services: s.server, DescriptorResolver: registry}
	switch config.Reflection {
	case "v1":
		reflectionv1.RegisterServerReflectionServer(s.server, reflection.NewServerV1(reflected))
	case "v1alpha":
		grpc_reflection_v1alpha.RegisterServerReflectionServer(s.server, reflection.NewServer(reflected))
	}
	if config.Address == "" {
		config.Address = "127.0.0.1:0"
	}
	listener, err := new(net.ListenConfig).Listen(tb.Context(), "tcp", config.Address)
	require.NoError(tb, err)
	s.Address = listener.Addr().String()
	go func() { _ = s.server.Serve(listener) }()
	tb.Cleanup(s.server.Stop)
	return s
}
