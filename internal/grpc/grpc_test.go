package grpc_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	reflection "google.golang.org/grpc/reflection/grpc_reflection_v1"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/grpc/grpctest"
)

// target returns the method of a server on this machine.
func target(t *testing.T, url string) *grpc.Target {
	t.Helper()
	target, err := grpc.ParseURL(url)
	require.NoError(t, err)
	return target
}

// newClient returns a client that trusts the certificates of pool.
func newClient(pool *x509.CertPool) *http.Client {
	return &http.Client{Transport: grpc.Transport(&http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool},
	})}
}

// call calls a method with a JSON document. It returns the answer as JSON, and the status.
func call(t *testing.T, client *http.Client, target *grpc.Target, method *grpc.Method,
	document string,
) (answer string, status *grpc.StatusError) {
	t.Helper()
	message, err := method.Request([]byte(document))
	require.NoError(t, err)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, target.URL(), nil)
	require.NoError(t, err)
	grpc.Prepare(request, message)
	response, err := client.Do(request)
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	require.True(t, grpc.IsAnswer(response))
	answers, status, err := grpc.ReadAnswer(response, 1<<10)
	require.NoError(t, err)
	if len(answers) == 1 && answers[0] != nil {
		answer = string(method.Answer(answers[0]))
	}
	return answer, status
}

func TestParseURL(t *testing.T) {
	t.Parallel()
	for raw, want := range map[string]string{
		"grpc://h:9000/shop.v1.Payments/Capture":    "http://h:9000/shop.v1.Payments/Capture",
		"grpcs://u:p@h/Payments/Capture":            "https://u:p@h/Payments/Capture",
		"grpc://h:9000/shop.v1.Payments":            "",
		"grpc://h:9000/shop.v1.Payments/Capture/":   "",
		"grpc://h:9000/shop.v1.Payments/Capture?x":  "",
		"grpc://h:9000/shop.v1.Payments/../Capture": "",
		"grpc:///shop.v1.Payments/Capture":          "",
		"http://h/shop.v1.Payments/Capture":         "",
	} {
		target, err := grpc.ParseURL(raw)
		if want == "" {
			require.ErrorContains(t, err, "must be grpc://host:port/package.Service/Method", raw)
			continue
		}
		require.NoError(t, err, raw)
		require.Equal(t, want, target.URL())
	}
}

// Both versions of the reflection service describe the method with its imports. The descriptors are reused for a while.
func TestReflected_DescribesMethodWithImports(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"v1", "v1alpha"} {
		var got *dynamicpb.Message
		server := grpctest.Start(t, grpctest.Config{Reflection: version, Capture: func(_ context.Context,
			request *dynamicpb.Message,
		) (string, error) {
			got = request
			return `success: true reason: "done"`, nil
		}})
		to, client := target(t, "grpc://"+server.Address+"/"+grpctest.Method), newClient(nil)
		var reflected grpc.Reflected
		method, kept, err := reflected.Method(t.Context(), client, to, false)
		require.NoError(t, err)
		require.False(t, kept)
		answer, status := call(t, client, to, method,
			`{"orderId": "o-1", "total": {"currency": "EUR", "cents": "42"}, "at": "2026-01-02T03:04:05Z", "amount": 7}`)
		require.True(t, status.OK())
		require.JSONEq(t, `{"success": true, "reason": "done"}`, answer)
		require.Contains(t, got.String(), `EUR`)
		require.Contains(t, got.String(), `seconds`)
		calls := server.Reflections.Load()
		_, kept, err = reflected.Method(t.Context(), client, to, false)
		require.NoError(t, err)
		require.True(t, kept)
		require.Equal(t, calls, server.Reflections.Load())
		_, kept, err = reflected.Method(t.Context(), client, to, true)
		require.NoError(t, err)
		require.False(t, kept)
	}
}

func TestReflected_SaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	with := grpctest.Start(t, grpctest.Config{Reflection: "v1"})
	without := grpctest.Start(t, grpctest.Config{})
	var reflected grpc.Reflected
	for url, want := range map[string]string{
		"grpc://" + without.Address + "/shop.v1.Payments/Capture": "the server at " + without.Address +
			" has no reflection: set descriptorFile",
		"grpc://" + with.Address + "/shop.v1.Refunds/Capture": "shop.v1.Refunds",
		"grpc://" + with.Address + "/shop.v1.Payments/Refund": "the service shop.v1.Payments has no method Refund",
		"grpc://" + with.Address + "/shop.v1.Payments/Watch":  "is a stream; must be unary",
	} {
		_, _, err := reflected.Method(t.Context(), newClient(nil), target(t, url), false)
		var problem *grpc.DescriptorError
		require.ErrorAs(t, err, &problem, url)
		require.ErrorContains(t, err, want)
	}
}

// A call over TLS requires a certificate that the client trusts.
func TestCall_OverTLS(t *testing.T) {
	t.Parallel()
	certified := httptest.NewTLSServer(http.NotFoundHandler()) // for its certificate for 127.0.0.1
	t.Cleanup(certified.Close)
	server := grpctest.Start(t, grpctest.Config{
		Reflection: "v1", TLS: &tls.Config{Certificates: certified.TLS.Certificates},
		Capture: func(context.Context, *dynamicpb.Message) (string, error) { return "success: true", nil },
	})
	pool := x509.NewCertPool()
	pool.AddCert(certified.Certificate())
	to, client := target(t, "grpcs://"+server.Address+"/"+grpctest.Method), newClient(pool)
	var reflected grpc.Reflected
	method, _, err := reflected.Method(t.Context(), client, to, false)
	require.NoError(t, err)
	answer, status := call(t, client, to, method, `{}`)
	require.True(t, status.OK())
	require.JSONEq(t, `{"success": true}`, answer)
	_, _, err = reflected.Method(t.Context(), newClient(x509.NewCertPool()), to, true)
	require.ErrorContains(t, err, "x509: certificate signed by unknown authority")
}

// The status of a large answer is returned, although the answer's message is not.
func TestReadAnswer_SkipsLargeMessage(t *testing.T) {
	t.Parallel()
	server := grpctest.Start(t, grpctest.Config{Capture: func(context.Context, *dynamicpb.Message) (string, error) {
		return `reason: "` + strings.Repeat("x", 1<<20) + `"`, nil
	}})
	to := target(t, "grpc://"+server.Address+"/"+grpctest.Method)
	method, err := grpc.MethodOf(to, grpctest.Descriptors(t))
	require.NoError(t, err)
	answer, status := call(t, newClient(nil), to, method, `{}`)
	require.True(t, status.OK())
	require.Empty(t, answer)
}

// A call sends its deadline to the server.
func TestPrepare_SendsDeadline(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://h/", nil)
	require.NoError(t, err)
	request.Header.Set("Grpc-Encoding", "gzip")
	grpc.Prepare(request, []byte("abc"))
	require.Regexp(t, `^(5\d\d\d\d|60000)m$`, request.Header.Get("Grpc-Timeout"))
	require.Empty(t, request.Header.Get("Grpc-Encoding"), "the protocol's own header")
	require.EqualValues(t, 8, request.ContentLength)
}

func TestMethod_RefusesOtherDocuments(t *testing.T) {
	t.Parallel()
	method, err := grpc.MethodOf(target(t, "grpc://h/"+grpctest.Method), grpctest.Descriptors(t))
	require.NoError(t, err)
	for document, want := range map[string]string{
		`{"order": 1}`:      `the payload is not a shop.v1.CaptureRequest: (line 1:2): unknown field "order"`,
		`{"amount": "x"}`:   `invalid value for int64 field amount: "x"`,
		`[1]`:               "the payload is not a shop.v1.CaptureRequest",
		`{"at": "Tuesday"}`: "invalid google.protobuf.Timestamp",
	} {
		_, err := method.Request([]byte(document))
		var problem *grpc.MappingError
		require.ErrorAs(t, err, &problem, document)
		require.ErrorContains(t, err, want, document)
	}
	require.JSONEq(t, `{"success": false}`, string(method.Answer(nil)), "proto3 does not send false")
	require.Nil(t, method.Answer([]byte{0xff}))
}

// MethodOf refuses descriptors that redefine messages that protojson knows, have very long names, or do not define the
// method.
func TestMethodOf_ChecksDescriptors(t *testing.T) {
	t.Parallel()
	to := target(t, "grpc://h/"+grpctest.Method)
	for text, want := range map[string]string{
		`file {name: "a.proto" message_type {name: "M" field {name: "` + strings.Repeat("f", 201) + `"}}}`: "a.proto: " +
			"a name is longer than 200 bytes",
		`file {name: "a.proto" enum_type {name: "E" value {name: "` + strings.Repeat("v", 201) + `"}}}`: "a.proto: " +
			"a name is longer than 200 bytes",
		`file {name: "a.proto" package: "` + strings.Repeat("p.", 1000) + `p" message_type {name: "M"}}`: "a.proto: " +
			"a scope's name is longer than 1000 bytes",
		`file {name: "a.proto" package: "` + strings.Repeat("p", 900) + `" ` +
			strings.Repeat(`message_type {name: "M"} `, 75_000) + `}`: "full names of more than",
		diamonds(20): "more than 100000 paths of public imports",
		`file {name: "a.proto" package: "google" message_type {name: "protobuf"}}`: "google.protobuf is a package",
		`file {name: "a.proto" dependency: "b.proto"}`:                             `could not resolve import "b.proto"`,
		`file {name: "a.proto"}`:                                                   "the descriptors have no service shop.v1.Payments",
	} {
		set := &descriptorpb.FileDescriptorSet{}
		require.NoError(t, prototext.Unmarshal([]byte(text), set))
		raw, err := proto.Marshal(set)
		require.NoError(t, err)
		_, err = grpc.MethodOf(to, raw)
		require.ErrorContains(t, err, want)
	}
	_, err := grpc.MethodOf(to, []byte("no descriptors"))
	require.ErrorContains(t, err, "must be a FileDescriptorSet")
	_, err = grpc.MethodOf(to, make([]byte, 5<<20))
	require.ErrorContains(t, err, "at most 4194304")

	set := &descriptorpb.FileDescriptorSet{}
	require.NoError(t, proto.Unmarshal(grpctest.Descriptors(t), set))
	forged := protodesc.ToFileDescriptorProto(timestamppb.File_google_protobuf_timestamp_proto)
	forged.MessageType[0].Field = nil
	set.GetFile()[len(set.GetFile())-1] = forged
	raw, err := proto.Marshal(set)
	require.NoError(t, err)
	method, err := grpc.MethodOf(to, raw)
	require.NoError(t, err)
	_, err = method.Request([]byte(`{"at": "2026-01-02T03:04:05Z"}`))
	require.NoError(t, err, "the Timestamp is protojson's")
}

// diamonds returns descriptors with 2^depth paths of public imports.
func diamonds(depth int) string {
	text := `file {name: "0.proto"}`
	for i := range depth {
		for _, side := range []string{"a", "b"} {
			text += fmt.Sprintf(` file {name: "%d%s.proto" dependency: "%d.proto" public_dependency: 0}`, i, side, i)
		}
		text += fmt.Sprintf(` file {name: "%d.proto" dependency: ["%da.proto", "%db.proto"] public_dependency: [0, 1]}`,
			i+1, i, i)
	}
	return text
}

// hostile starts a server that speaks HTTP/2 without TLS, and returns its address.
func hostile(t *testing.T, handler http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewUnstartedServer(handler)
	server.Config.Protocols = &http.Protocols{}
	server.Config.Protocols.SetUnencryptedHTTP2(true)
	server.Start()
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// An answer with many messages is read up to its status. Only a few of its messages are kept.
func TestReadAnswer_KeepsFewMessages(t *testing.T) {
	t.Parallel()
	to := target(t, "grpc://"+hostile(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/grpc")
		_, _ = w.Write(make([]byte, 5*10_000)) // empty messages
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "3")
		w.Header().Set(http.TrailerPrefix+"Grpc-Message", strings.Repeat("x", 100_000))
	})+"/"+grpctest.Method)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, to.URL(), nil)
	require.NoError(t, err)
	grpc.Prepare(request, nil)
	response, err := newClient(nil).Do(request)
	require.NoError(t, err)
	defer func() { _ = response.Body.Close() }()
	messages, status, err := grpc.ReadAnswer(response, 1<<10)
	require.NoError(t, err)
	require.LessOrEqual(t, len(messages), 1000)
	require.Equal(t, "INVALID_ARGUMENT", status.Name)
	require.LessOrEqual(t, len(status.Message), 64<<10)
}

// If a proxy cannot reach the server, the error says that the server is unavailable, not that its descriptors are
// wrong.
func TestReflected_ServerBehindProxyIsAway(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]string{
		http.StatusBadGateway: "UNAVAILABLE", http.StatusServiceUnavailable: "UNAVAILABLE", http.StatusNotFound: "UNKNOWN",
	} {
		to := target(t, "grpc://"+hostile(t, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
		})+"/"+grpctest.Method)
		var reflected grpc.Reflected
		_, _, err := reflected.Method(t.Context(), newClient(nil), to, false)
		var problem *grpc.StatusError
		require.ErrorAs(t, err, &problem)
		require.Equal(t, want, problem.Name)
		require.Contains(t, problem.Message, "the answer is not gRPC")
	}
}

// dlqd limits its requests for descriptors, even if a server's descriptors have many imports.
func TestReflected_LimitsImports(t *testing.T) {
	t.Parallel()
	file := &descriptorpb.FileDescriptorProto{Name: new("a.proto")}
	for i := range 1001 {
		file.Dependency = append(file.Dependency, strconv.Itoa(i))
	}
	raw, err := proto.Marshal(file)
	require.NoError(t, err)
	answer, err := proto.Marshal(&reflection.ServerReflectionResponse{
		MessageResponse: &reflection.ServerReflectionResponse_FileDescriptorResponse{
			FileDescriptorResponse: &reflection.FileDescriptorResponse{FileDescriptorProto: [][]byte{raw}},
		},
	})
	require.NoError(t, err)
	var calls atomic.Int64
	to := target(t, "grpc://"+hostile(t, func(w http.ResponseWriter, _ *http.Request) {
		calls.Add(1)
		w.Header().Set("Content-Type", "application/grpc")
		_, _ = w.Write(append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(answer))), answer...))
		w.Header().Set(http.TrailerPrefix+"Grpc-Status", "0")
	})+"/"+grpctest.Method)
	var reflected grpc.Reflected
	_, _, err = reflected.Method(t.Context(), newClient(nil), to, false)
	require.ErrorContains(t, err, "more than 1000 imports; set descriptorFile")
	require.EqualValues(t, 1, calls.Load())
}

// Many deliveries that need the same descriptors at once cause a single request to the server.
func TestReflected_AsksOnceForMany(t *testing.T) {
	t.Parallel()
	server := grpctest.Start(t, grpctest.Config{Reflection: "v1"})
	to, client := target(t, "grpc://"+server.Address+"/"+grpctest.Method), newClient(nil)
	var first, reflected grpc.Reflected
	_, _, err := first.Method(t.Context(), client, to, false)
	require.NoError(t, err)
	once := server.Reflections.Load()
	var all errgroup.Group
	for range 50 {
		all.Go(func() error {
			_, _, err := reflected.Method(t.Context(), client, to, false)
			return err
		})
	}
	require.NoError(t, all.Wait())
	require.Equal(t, once, server.Reflections.Load()-once)
}
