package delivery

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/source"
)

// Statuses 423 (Locked) and 425 (Too Early) are about one request: the destination is available.
func TestIsAvailable_StatusesAboutOneRequest(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]bool{
		402: true, 408: false, 423: true, 425: true, 429: true, 500: false, 503: false,
	} {
		require.Equal(t, want, isAvailable(&riverdlq.Error{Context: map[string]any{"status": status}}), status)
	}
}

func TestIsLimited_ForAnswersThatAskForFewerRequests(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		context map[string]any
		want    bool
	}{
		{map[string]any{"status": 429}, true},
		{map[string]any{"status": 503, "retryAfterSeconds": 0}, true},
		{map[string]any{"status": 503}, false},
		{map[string]any{"status": 423, "retryAfterSeconds": 5}, false}, // about one request
		{map[string]any{"grpcStatus": "RESOURCE_EXHAUSTED"}, true},
		{map[string]any{"grpcStatus": "UNAVAILABLE", "retryAfterSeconds": 1}, true},
		{map[string]any{"grpcStatus": "UNAVAILABLE"}, false},
	} {
		err := &riverdlq.Error{Context: test.context}
		require.Equal(t, test.want, isLimited(err, isAvailable(err)), test.context)
	}
	require.False(t, isLimited(nil, true))
	require.False(t, isLimited(errors.New("other"), false))
}

// The error of an answer that is not HTTP quotes the answer.
func TestTransportError_IsMasked(t *testing.T) {
	t.Parallel()
	hide := func(text string) string { return strings.ReplaceAll(text, "4111111111111111", "***") }
	err := errors.New(`net/http: HTTP/1.x transport connection broken: malformed HTTP response "card 4111111111111111"`)
	require.NotContains(t, transportError(t.Context(), &policy.Destination{}, err, hide).Error(), "4111")
}

// A cluster that refuses a record is available, so its breaker stays closed for other records.
func TestAvailable_FollowsTheClassOfAPublishError(t *testing.T) {
	t.Parallel()
	destination := &policy.Destination{Name: "orders", URL: "kafka://main"}
	for class, want := range map[riverdlq.Class]bool{
		riverdlq.ClassValidation: true, riverdlq.ClassNotFound: true, riverdlq.ClassUnauthorized: true,
		riverdlq.ClassOutage: false, riverdlq.ClassTransient: false, "": false,
	} {
		err := publishError(t.Context(), destination, "in", &riverdlq.Error{Class: class, Message: "secret text"},
			func(text string) string { return strings.ReplaceAll(text, "secret", "***") })
		require.Equal(t, want, isAvailable(err), class)
		require.EqualError(t, err, "*** text")
		failure, ok := errors.AsType[*riverdlq.Error](err)
		require.True(t, ok)
		require.Equal(t, "in", failure.Context["topic"])
		require.Equal(t, "orders", failure.Context["destination"])
	}
	none := func(text string) string { return text }
	require.False(t, isAvailable(publishError(t.Context(), destination, "in", errNoClient, none)))
	require.True(t, isAvailable(publishError(t.Context(), destination, "in", source.ErrUnpublishable, none)))
}
