// Package grpc calls unary gRPC methods whose message types are known only at run time. It maps JSON to a method's
// request, and the method's answer to JSON. The descriptors come from a file or from the server (reflection).
//
// A call is a request of net/http: gRPC is HTTP/2 with messages in frames and the status in the trailer. So proxies,
// time limits and network errors work as they do for other deliveries.
package grpc

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const (
	contentType = "application/grpc"
	// prefixBytes is the length of the prefix of a message. The prefix says whether the message is compressed, and how
	// long it is.
	prefixBytes = 5
	// maxMessages is the maximum number of messages of an answer that are kept.
	maxMessages = maxDescriptorFiles
	// maxStatusBytes is the maximum number of bytes that are read of a status' message, and of its details.
	maxStatusBytes = 64 << 10
	// deadlineSlack is how much earlier than the client a server may reach the deadline.
	deadlineSlack = time.Second
	// Names of statuses. An answer without a status counts as statusUnknown.
	statusOK            = "OK"
	statusUnknown       = "UNKNOWN"
	statusUnimplemented = "UNIMPLEMENTED"
	statusUnavailable   = "UNAVAILABLE"
)

// IsURL reports whether a URL has the scheme of a gRPC method.
func IsURL(raw string) bool {
	return strings.HasPrefix(raw, "grpc://") || strings.HasPrefix(raw, "grpcs://")
}

// Target is a method of a server.
type Target struct {
	Service protoreflect.FullName
	Method  protoreflect.Name

	base url.URL // of the server, with http or https
}

// ParseURL parses grpc://host:port/package.Service/Method. The scheme grpcs is gRPC over TLS.
func ParseURL(raw string) (*Target, error) {
	const form = "must be grpc://host:port/package.Service/Method, or grpcs for TLS"
	u, err := url.Parse(raw)
	if err != nil || !IsURL(raw) || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New(form)
	}
	service, method, _ := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	t := &Target{
		Service: protoreflect.FullName(service), Method: protoreflect.Name(method),
		base: url.URL{Scheme: "http", User: u.User, Host: u.Host},
	}
	if !t.Service.IsValid() || !t.Method.IsValid() {
		return nil, errors.New(form)
	}
	if u.Scheme == "grpcs" {
		t.base.Scheme = "https"
	}
	return t, nil
}

// Host returns the server's host and port.
func (t *Target) Host() string { return t.base.Host }

// URL returns the http or https URL of the method.
func (t *Target) URL() string { return t.url(t.Service, t.Method) }

func (t *Target) url(service protoreflect.FullName, method protoreflect.Name) string {
	return t.base.JoinPath(string(service), string(method)).String()
}

// Transport returns a transport for calls. It uses HTTP/2 with and without TLS, and has the other settings of base.
// Calls without TLS use no proxy, because the proxy would have to support HTTP/2 without TLS.
func Transport(base *http.Transport) *http.Transport {
	t := base.Clone()
	t.Protocols = &http.Protocols{}
	t.Protocols.SetHTTP2(true)
	t.Protocols.SetUnencryptedHTTP2(true)
	t.DisableCompression = true // gRPC compresses messages, not bodies
	if proxy := base.Proxy; proxy != nil {
		t.Proxy = func(request *http.Request) (*url.URL, error) {
			if request.URL.Scheme == "http" {
				return nil, nil
			}
			return proxy(request)
		}
	}
	return t
}

// Prepare turns a POST request to a method's URL into a gRPC call with the given messages. It sends the deadline of the
// request's context to the server.
func Prepare(request *http.Request, messages ...[]byte) {
	var body []byte
	for _, message := range messages {
		body = append(body, 0) // not compressed
		body = binary.BigEndian.AppendUint32(body, uint32(len(message)))
		body = append(body, message...)
	}
	request.ContentLength = int64(len(body))
	request.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(body)), nil }
	request.Body, _ = request.GetBody()
	for name := range request.Header {
		if strings.HasPrefix(name, "Grpc-") { // reserved for the protocol
			delete(request.Header, name)
		}
	}
	request.Header.Set("Content-Type", contentType)
	request.Header.Set("Te", "trailers") //nolint:canonicalheader // net/http has this form
	if deadline, limited := request.Context().Deadline(); limited {
		// At most eight digits; a delivery's timeout is at most an hour.
		left := min(max(time.Until(deadline).Milliseconds(), 1), 99_999_999)
		request.Header.Set("Grpc-Timeout", strconv.FormatInt(left, 10)+"m")
	}
}

// DeadlineError returns the error of a call. It also returns context.DeadlineExceeded if the server ended the call at
// the deadline: some servers reset the stream a moment before the deadline of the context.
func DeadlineError(ctx context.Context, err error) error {
	deadline, limited := ctx.Deadline()
	if limited && ctx.Err() == nil && time.Until(deadline) < deadlineSlack && strings.Contains(err.Error(), "CANCEL") {
		return context.DeadlineExceeded
	}
	return err
}

// IsAnswer reports whether a response comes from a gRPC server. Responses of proxies and other HTTP servers do not have
// this form.
func IsAnswer(response *http.Response) bool {
	return response.StatusCode == http.StatusOK && strings.HasPrefix(response.Header.Get("Content-Type"), contentType)
}

// ReadAnswer reads a gRPC server's response to the end. limit is the maximum total length, in bytes, of the returned
// messages. Instead of a compressed message, ReadAnswer returns nil. It does so, too, for the first message that
// exceeds the limit and for all messages after that one. Messages after the first maxMessages are not returned. The
// status is returned in any case, because the server may have done the work.
func ReadAnswer(response *http.Response, limit int64) (messages [][]byte, status *StatusError, err error) {
	left := limit
	for {
		var prefix [prefixBytes]byte
		if _, err := io.ReadFull(response.Body, prefix[:]); errors.Is(err, io.EOF) {
			return messages, statusOf(response), nil
		} else if err != nil {
			return nil, nil, err
		}
		length, full := int64(binary.BigEndian.Uint32(prefix[1:])), len(messages) == maxMessages
		if prefix[0] != 0 || length > left || full {
			if _, err := io.CopyN(io.Discard, response.Body, length); err != nil {
				return nil, nil, unexpected(err)
			}
			if left = 0; !full {
				messages = append(messages, nil)
			}
			continue
		}
		left -= length
		message := make([]byte, length)
		if _, err := io.ReadFull(response.Body, message); err != nil {
			return nil, nil, unexpected(err)
		}
		messages = append(messages, message)
	}
}

// unexpected returns the error for a message that was cut off.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// StatusError is the status with which a call ended.
type StatusError struct {
	Name    string // such as UNAVAILABLE
	Message string
	// Reason is the reason in the status' ErrorInfo, such as CARD_DECLINED; empty if the status has none.
	Reason string
	// RetryDelay is the delay in the status' RetryInfo; nil if the status has none.
	RetryDelay *time.Duration
}

// OK reports whether the call succeeded.
func (s *StatusError) OK() bool { return s.Name == statusOK }

// Error implements error.
func (s *StatusError) Error() string { return s.Name + ": " + s.Message }

// names are the names of the statuses, by their numbers.
var names = []string{
	statusOK, "CANCELLED", statusUnknown, "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", statusUnimplemented,
	"INTERNAL", statusUnavailable, "DATA_LOSS", "UNAUTHENTICATED",
}

// Metadata returns a value that the server sent with the status or, if there is none, with the answer's header.
func Metadata(response *http.Response, name string) string {
	if value := response.Trailer.Get(name); value != "" {
		return value
	}
	return response.Header.Get(name)
}

// statusOf returns the status of a response, which must have been read to the end.
func statusOf(response *http.Response) *StatusError {
	number := Metadata(response, "Grpc-Status")
	if number == "" {
		return &StatusError{Name: statusUnknown, Message: "the answer has no status"}
	}
	text := Metadata(response, "Grpc-Message")
	s := &StatusError{Name: statusUnknown, Message: percentDecoded(text[:min(len(text), maxStatusBytes)])}
	if code, err := strconv.Atoi(number); err == nil && code >= 0 && code < len(names) {
		s.Name = names[code]
	}
	s.readDetails(Metadata(response, "Grpc-Status-Details-Bin"))
	return s
}

// readDetails reads the details of the status. It ignores details that cannot be read or are longer than
// maxStatusBytes.
func (s *StatusError) readDetails(encoded string) {
	if len(encoded) > maxStatusBytes {
		return
	}
	raw, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(encoded, "="))
	var details rpcstatus.Status
	if err != nil || proto.Unmarshal(raw, &details) != nil {
		return
	}
	for _, detail := range details.GetDetails() {
		var reason errdetails.ErrorInfo
		var retry errdetails.RetryInfo
		switch {
		case detail.MessageIs(&reason) && detail.UnmarshalTo(&reason) == nil:
			s.Reason = printable(reason.GetReason())
		case detail.MessageIs(&retry) && detail.UnmarshalTo(&retry) == nil && retry.GetRetryDelay().IsValid():
			delay := max(retry.GetRetryDelay().AsDuration(), 0)
			s.RetryDelay = &delay
		}
	}
}

// printable returns a text without characters that are not printable, such as those that the database cannot store.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return -1
	}, strings.ToValidUTF8(text, ""))
}

// percentDecoded decodes the message of a status. Unlike in a URL, a % may appear that does not begin an escape.
func percentDecoded(text string) string {
	var out strings.Builder
	for i := 0; i < len(text); i++ {
		if text[i] == '%' && i+2 < len(text) {
			if c, err := strconv.ParseUint(text[i+1:i+3], 16, 8); err == nil {
				out.WriteByte(byte(c))
				i += 2
				continue
			}
		}
		out.WriteByte(text[i])
	}
	return out.String()
}

// invoke calls a method with several messages and returns the messages of the answer.
func invoke(ctx context.Context, client *http.Client, address string, limit int64,
	messages ...[]byte,
) ([][]byte, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, address, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("User-Agent", "dlqd")
	Prepare(request, messages...)
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	if !IsAnswer(response) {
		name := statusUnknown
		switch response.StatusCode { // from a proxy; the mapping is gRPC's
		case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
			name = statusUnavailable
		}
		return nil, &StatusError{Name: name, Message: "the answer is not gRPC (" + response.Status + ")"}
	}
	answers, status, err := ReadAnswer(response, limit)
	switch {
	case err != nil:
		return nil, err
	case !status.OK():
		return nil, status
	}
	return answers, nil
}
