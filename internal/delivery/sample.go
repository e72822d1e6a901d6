package delivery

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
)

// Answer is a destination's answer to a sample message.
type Answer struct {
	Status  int               `yaml:"status"`
	Headers map[string]string `yaml:"headers"`
	Body    string            `yaml:"body"`
	// Failure, if not empty, is the error type of a delivery without an answer.
	Failure string `yaml:"failure"`
}

// failures are errors that a transport returns if there is no answer, by error type.
var failures = map[string]error{
	TypeTimeout:           context.DeadlineExceeded,
	TypeConnectionRefused: syscall.ECONNREFUSED,
	TypeConnectionReset:   syscall.ECONNRESET,
	TypeConnection:        errors.New("network is unreachable"),
	TypeDNS:               &net.DNSError{Err: "no such host", Name: "destination.example", IsNotFound: true},
	TypeTLS:               x509.UnknownAuthorityError{},
}

// RoundTrip implements http.RoundTripper.
func (a *Answer) RoundTrip(request *http.Request) (*http.Response, error) {
	if a.Failure != "" {
		return nil, failures[a.Failure]
	}
	response := &http.Response{
		StatusCode: a.Status, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader([]byte(a.Body))), Request: request,
	}
	for name, value := range a.Headers {
		response.Header.Set(name, value)
	}
	return response, nil
}

// FailureOf delivers a message as a [Worker] does, with answer in place of the network, and returns the facts of the
// failure that rules match. It returns an error if the answer is not a failure, or if answer.Failure is unknown.
func FailureOf(
	ctx context.Context, data *policy.Data, queue *policy.Queue, destination *policy.Destination,
	m *message.Message, answer *Answer,
) (strategy.Facts, error) {
	if answer.Failure != "" && failures[answer.Failure] == nil {
		return strategy.Facts{}, fmt.Errorf("unknown failure %q (known: %s)", answer.Failure,
			strings.Join(slices.Sorted(maps.Keys(failures)), ", "))
	}
	w := &Worker{
		client: &http.Client{Transport: answer}, calls: callsOver(answer), config: Config{Tracer: telemetry.Tracer(nil)},
	}
	if grpc.IsURL(destination.URL) { // the payload of a sample need not fit the method's request
		called := *destination
		called.Method = &grpc.Method{}
		destination = &called
	}
	job := &river.Job[Args]{JobRow: &rivertype.JobRow{Queue: m.Queue, Attempt: 1}, Args: Args{Message: *m}}
	err := w.deliver(ctx, data, destination, queue, job, &metadata{})
	failure, ok := errors.AsType[*riverdlq.Error](err)
	if !ok {
		return strategy.Facts{}, errors.New("the answer is not a failure")
	}
	return factsOf(failure, job), nil
}
