package delivery_test

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/riverqueue/river/rivertype"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/dlqd/dlqd/internal/breaker"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/grpc/grpctest"
	"github.com/dlqd/dlqd/internal/ingest"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/strategy"
)

// calling starts a gRPC server with reflection and returns the URL of its method.
func calling(t *testing.T, capture func(context.Context, *dynamicpb.Message) (string, error)) string {
	t.Helper()
	return "grpc://" + grpctest.Start(t, grpctest.Config{Reflection: "v1", Capture: capture}).Address + "/" +
		grpctest.Method
}

func TestCall_SendsMessageWithMetadata(t *testing.T) {
	t.Parallel()
	var got *dynamicpb.Message
	var md metadata.MD
	var left time.Duration
	url := calling(t, func(ctx context.Context, request *dynamicpb.Message) (string, error) {
		got = request
		md, _ = metadata.FromIncomingContext(ctx)
		deadline, _ := ctx.Deadline()
		left = time.Until(deadline)
		return "success: true", nil
	})
	b := setup(t, url, "timeout: 10m")
	b.deliver(`, "headers": {"X-Tenant": "7", "Grpc-Encoding": "gzip"}`, rivertype.JobStateCompleted)
	require.Equal(t, "ok", <-b.outcomes)
	require.EqualValues(t, 4200, got.Get(got.Descriptor().Fields().ByName("amount")).Int())
	for name, want := range map[string]string{
		"webhook-id": "msg-1", "x-tenant": "7", "dlqd-attempt": "1", "dlqd-kind": "payment.captured",
		"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "vendor=1",
	} {
		require.Equal(t, []string{want}, md.Get(name), name)
	}
	require.Greater(t, left, time.Duration(0))
	require.LessOrEqual(t, left, 10*time.Minute)
	webhook, err := standardwebhooks.NewWebhook(secret)
	require.NoError(t, err)
	message, err := proto.MarshalOptions{Deterministic: true}.Marshal(got)
	require.NoError(t, err)
	headers := http.Header{}
	for _, name := range []string{"webhook-id", "webhook-timestamp", "webhook-signature"} {
		headers.Set(name, md.Get(name)[0])
	}
	require.NoError(t, webhook.Verify(message, headers), "the signature is of the request's bytes")
}

// The gRPC status decides whether the job is retried, and which class the error has.
func TestCall_StatusDecidesRetry(t *testing.T) {
	t.Parallel()
	for code, want := range map[codes.Code]struct {
		name, class string
		retried     bool
	}{
		codes.Unavailable:        {"UNAVAILABLE", "outage", true},
		codes.DeadlineExceeded:   {"DEADLINE_EXCEEDED", "transient", true},
		codes.ResourceExhausted:  {"RESOURCE_EXHAUSTED", "rate_limited", true},
		codes.Internal:           {"INTERNAL", "transient", true},
		codes.Aborted:            {"ABORTED", "transient", true},
		codes.Unknown:            {"UNKNOWN", "unknown", true},
		codes.InvalidArgument:    {"INVALID_ARGUMENT", "validation", false},
		codes.OutOfRange:         {"OUT_OF_RANGE", "validation", false},
		codes.NotFound:           {"NOT_FOUND", "not_found", false},
		codes.Unauthenticated:    {"UNAUTHENTICATED", "unauthorized", false},
		codes.PermissionDenied:   {"PERMISSION_DENIED", "unauthorized", false},
		codes.AlreadyExists:      {"ALREADY_EXISTS", "business", false},
		codes.FailedPrecondition: {"FAILED_PRECONDITION", "business", false},
		codes.Unimplemented:      {"UNIMPLEMENTED", "code_bug", false},
	} {
		t.Run(want.name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, calling(t, func(context.Context, *dynamicpb.Message) (string, error) {
				return "", status.Error(code, "order 7: 50% too much")
			}), "maxAttempts: 2, backoff: {delay: 1h}")
			job := b.deliver("", rivertype.JobStateRetryable, rivertype.JobStateCancelled, rivertype.JobStateDiscarded)
			require.Equal(t, want.retried, job.State == rivertype.JobStateRetryable, job.State)
			require.Equal(t, want.class, <-b.outcomes)
			s := structuredOf(t, job)
			require.Equal(t, "GRPC_"+want.name, s.Type)
			require.Equal(t, want.name, s.Code)
			require.Equal(t, want.name, s.Context["grpcStatus"])
			require.Contains(t, s.Message, want.name+": order 7: 50% too much")
			require.Contains(t, s.Context["url"], "/"+grpctest.Method, "the method is no secret")
		})
	}
}

// The details of the status have the cause, and the time after which to send the message again.
func TestCall_ReadsDetails(t *testing.T) {
	t.Parallel()
	answer, err := status.New(codes.FailedPrecondition, "declined").WithDetails(
		&errdetails.ErrorInfo{Reason: "CARD_DECLINED"})
	require.NoError(t, err)
	rules := "rules: [{name: declined, match: {code: FAILED_PRECONDITION}, class: transient}]"
	b := setupWithRules(t, calling(t, func(context.Context, *dynamicpb.Message) (string, error) {
		return "", answer.Err()
	}), "maxAttempts: 2, backoff: {delay: 1h}", rules)
	job := b.deliver("", rivertype.JobStateRetryable, rivertype.JobStateCancelled)
	require.Equal(t, "CARD_DECLINED", structuredOf(t, job).Code)
	require.Equal(t, "transient", <-b.outcomes, "a rule may name the status")

	answer, err = status.New(codes.ResourceExhausted, "quota").WithDetails(
		&errdetails.RetryInfo{RetryDelay: durationpb.New(15 * time.Minute)})
	require.NoError(t, err)
	job = setup(t, calling(t, func(context.Context, *dynamicpb.Message) (string, error) {
		return "", answer.Err()
	}), "backoff: {delay: 10s}").deliver("", rivertype.JobStateRetryable)
	require.WithinDuration(t, time.Now().Add(15*time.Minute), job.ScheduledAt, time.Minute)
	real := structuredOf(t, job)
	require.EqualValues(t, 900, real.Context["retryAfterSeconds"])

	sample := delivery.Answer{Status: http.StatusOK, Headers: map[string]string{
		"Content-Type": "application/grpc", "Grpc-Status": "8", "Grpc-Message": "quota",
	}}
	facts, err := delivery.FailureOf(t.Context(), &policy.Data{}, &policy.Queue{Timeout: time.Minute},
		&policy.Destination{Name: "default", URL: "grpc://h/" + grpctest.Method},
		&message.Message{MessageID: "m", Queue: "default", Payload: []byte(`{"other": 1}`)}, &sample)
	require.NoError(t, err)
	require.Equal(t, []string{real.Type, real.Code, real.Message}, []string{facts.Type, facts.Code, facts.Message})
}

func TestCall_RecordsLogicalFailure(t *testing.T) {
	t.Parallel()
	url := calling(t, func(context.Context, *dynamicpb.Message) (string, error) { return `reason: "closed"`, nil })
	job := setup(t, url, "").deliver("", rivertype.JobStateCompleted)
	require.Contains(t, string(job.Metadata), delivery.LogicalFailureKey)
	require.Contains(t, string(job.Metadata), `closed`)

	b := setup(t, url, "deadLetterLogicalFailures: true")
	job = b.deliver("", rivertype.JobStateCancelled)
	require.Equal(t, "LOGICAL_FAILURE", structuredOf(t, job).Type)
	require.Equal(t, "business", <-b.outcomes)
}

// A message whose payload is not a request of the method is not sent and not retried, and its failure does not count
// for the destination's breaker.
func TestCall_PayloadThatIsNoRequestEndsJob(t *testing.T) {
	t.Parallel()
	var calls atomic.Int64
	server := grpctest.Start(t, grpctest.Config{Capture: func(context.Context, *dynamicpb.Message) (string, error) {
		calls.Add(1)
		return "success: true", nil
	}})
	file := filepath.Join(t.TempDir(), "shop.binpb")
	require.NoError(t, os.WriteFile(file, grpctest.Descriptors(t), 0o600))
	planner := func(descriptors string) func(c *delivery.Config) {
		return func(c *delivery.Config) {
			p, err := strategy.NewPlanner(policytest.Load(t, policytest.Files{"retry-policies": fmt.Sprintf(
				"queues: {default: {backoff: {delay: 1h}}}\ndestinations: {default: {url: %q%s}}\n",
				"grpc://"+server.Address+"/"+grpctest.Method, descriptors)}), nil)
			require.NoError(t, err)
			c.Planner = func() *strategy.Planner { return p }
			c.Breakers = breaker.New(breaker.Config{
				DB: c.DB, Policy: p.Policy, Actor: "test", Logger: c.Logger,
			})
		}
	}
	b := setupWithRules(t, "http://unused", "", "", planner(fmt.Sprintf(", descriptorFile: %q", file)))
	b.deliver("", rivertype.JobStateCompleted)
	require.EqualValues(t, 1, calls.Load(), "the file describes the method")
	require.Zero(t, server.Reflections.Load())
	require.Equal(t, "ok", <-b.outcomes)
	msg, err := message.Parse([]byte(`{"queue": "default", "kind": "payment.captured", "payload": {"amount": "much"}}`))
	require.NoError(t, err)
	receipt, err := b.ingester.Submit(t.Context(), msg, ingest.Trace{})
	require.NoError(t, err)
	require.Equal(t, "malformed", <-b.outcomes)
	var job *rivertype.JobRow
	require.Eventually(t, func() bool {
		job, err = b.client.JobGet(t.Context(), receipt.JobID)
		require.NoError(t, err)
		return job.State == rivertype.JobStateCancelled
	}, 5*time.Minute, 5*time.Millisecond)
	s := structuredOf(t, job)
	require.Equal(t, delivery.TypeRequest, s.Type)
	require.Contains(t, s.Message, "the payload is not a shop.v1.CaptureRequest")
	require.EqualValues(t, 1, calls.Load())

	job = setupWithRules(t, "http://unused", "", "", planner("")).deliver("", rivertype.JobStateCancelled)
	s = structuredOf(t, job)
	require.Equal(t, delivery.TypeDescriptor, s.Type)
	require.Contains(t, s.Message, "has no reflection: set descriptorFile")
	require.EqualValues(t, 1, calls.Load())
}

func TestCall_TypesOfTransportErrors(t *testing.T) {
	t.Parallel()
	gone, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, gone.Close())
	plain := answering(t, func(http.ResponseWriter, *http.Request) {})
	for name, test := range map[string]struct {
		url, timeout string
		want         []string
	}{
		"connection refused": {
			"grpc://" + gone.Addr().String() + "/" + grpctest.Method, "1m", []string{delivery.TypeConnectionRefused},
		},
		"no answer": {calling(t, func(ctx context.Context, _ *dynamicpb.Message) (string, error) {
			<-ctx.Done()
			return "", ctx.Err()
		}), "2s", []string{delivery.TypeTimeout, "GRPC_DEADLINE_EXCEEDED"}}, // dlqd's timeout, or the server's
		"no gRPC": {
			"grpc" + strings.TrimPrefix(plain, "http") + "/" + grpctest.Method, "1m",
			[]string{delivery.TypeConnection, delivery.TypeConnectionReset},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := setup(t, test.url, "timeout: "+test.timeout+", backoff: {delay: 1h}")
			s := structuredOf(t, b.deliver("", rivertype.JobStateRetryable))
			require.Contains(t, test.want, s.Type, s.Message)
			require.Equal(t, "transient", <-b.outcomes)
		})
	}
}

// The breaker opens while the server is away, and closes once it is back.
func TestCall_BreakerFollowsServer(t *testing.T) {
	t.Parallel()
	answer := func(context.Context, *dynamicpb.Message) (string, error) { return "success: true", nil }
	server := grpctest.Start(t, grpctest.Config{Reflection: "v1", Capture: answer})
	p := policytest.Load(t, policytest.Files{
		"retry-policies": fmt.Sprintf("queues: {default: {maxAttempts: 1000, backoff: {kind: fixed, delay: 10ms}, "+
			"whenOpen: accept}}\ndestinations: {default: {url: %q}}\n", "grpc://"+server.Address+"/"+grpctest.Method),
		"circuit-breaker": "defaults: {consecutiveFailures: 2, openFor: 3s, probes: 1}",
	})
	planner, err := strategy.NewPlanner(p, nil)
	require.NoError(t, err)
	var breakers *breaker.Breakers
	b := setupWithRules(t, "http://unused", "", "", func(c *delivery.Config) {
		c.Planner = func() *strategy.Planner { return planner }
		breakers = breaker.New(breaker.Config{
			DB: c.DB, Policy: func() *policy.Policy { return p }, Actor: "test", Logger: c.Logger,
		})
		c.Breakers = breakers
	})
	b.deliver("", rivertype.JobStateCompleted)
	server.Stop()
	b.deliver(`, "messageId": "msg-2"`, rivertype.JobStateScheduled)
	state, _ := breakers.State(breaker.DestinationPrefix + "default")
	require.NotEqual(t, breaker.Closed, state)
	grpctest.Start(t, grpctest.Config{Address: server.Address, Reflection: "v1", Capture: answer})
	for i := 3; state != breaker.Closed; i++ {
		require.Eventually(t, func() bool { // until the breaker lets a message through
			_, wait := breakers.State(breaker.DestinationPrefix + "default")
			return wait == 0
		}, 5*time.Minute, 10*time.Millisecond)
		b.deliver(fmt.Sprintf(`, "messageId": "msg-%d"`, i), rivertype.JobStateCompleted, rivertype.JobStateScheduled)
		state, _ = breakers.State(breaker.DestinationPrefix + "default")
	}
	b.deliver(`, "messageId": "last"`, rivertype.JobStateCompleted)
}
