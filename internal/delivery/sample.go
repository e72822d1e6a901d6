package delivery

import (
	"bytes"
	"context"
	"crypto/x509"
	"errors"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/strategy"
	"github.com/dlqd/dlqd/internal/telemetry"
	"github.com/dlqd/dlqd/riverdlq"
)

// Answer is what a destination does with a sample of a message.
type Answer struct {
	Status  int               `yaml:"status"`
	Headers map[string]string `yaml:"headers"`
	Body    string            `yaml:"body"`
	// Failure is why there is no answer: the type of the error.
	Failure string `yaml:"failure"`
}

// failures are errors of the kinds that a transport returns where there is no answer.
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
	response := &http.Response{StatusCode: a.Status, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader([]byte(a.Body))), Request: request}
	for name, value := range a.Headers {
		response.Header.Set(name, value)
	}
	return response, nil
}

// FailureOf delivers a message as a [Worker] does, but to an answer in place of a network, and returns what rules go by.
func FailureOf(
	ctx context.Context, data *policy.Data, queue *policy.Queue, destination *policy.Destination,
	m *message.Message, answer *Answer,
) (strategy.Facts, error) {
	if answer.Failure != "" && failures[answer.Failure] == nil {
		return strategy.Facts{}, errors.New("there is no failure " + answer.Failure + " (there are: " + strings.Join(slices.Sorted(maps.Keys(failures)), ", ") + ")")
	}
	w := &Worker{client: &http.Client{Transport: answer}, config: Config{Tracer: telemetry.Tracer(nil)}}
	job := &river.Job[Args]{JobRow: &rivertype.JobRow{Queue: m.Queue, Attempt: 1}, Args: Args{Message: *m}}
	err := w.deliver(ctx, data, destination, queue, job, &metadata{})
	failure, ok := errors.AsType[*riverdlq.Error](err)
	if !ok {
		return strategy.Facts{}, errors.New("this answer is no failure")
	}
	return factsOf(failure, job), nil
}
