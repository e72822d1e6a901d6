package strategy

import (
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy/strategies"
)

func TestClassifyStatus_ClassOfEachStatus(t *testing.T) {
	t.Parallel()
	for class, statuses := range map[riverdlq.Class][]int{
		riverdlq.ClassTransient:    {408, 500, 501, 502, 505, 511, 599},
		riverdlq.ClassRateLimited:  {429},
		riverdlq.ClassOutage:       {503, 504, 507, 520, 521, 522, 523, 524, 525, 526, 529, 530},
		riverdlq.ClassValidation:   {400, 422},
		riverdlq.ClassUnauthorized: {401, 403},
		riverdlq.ClassNotFound:     {404, 410},
		riverdlq.ClassBusiness:     {409},
		riverdlq.ClassUnknown:      {302, 418, 600},
	} {
		for _, status := range statuses {
			require.Equal(t, class, ClassifyStatus(status), status)
		}
	}
}

func TestClassify(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		facts Facts
		class riverdlq.Class
		rule  string
	}{
		{Facts{Panic: true, Message: "timeout"}, riverdlq.ClassCodeBug, "panic"},
		{Facts{Class: riverdlq.ClassBusiness, Code: "503"}, riverdlq.ClassBusiness, "worker"},
		{Facts{Class: "nonsense", Code: "503"}, riverdlq.ClassOutage, "http-status"},
		{Facts{Code: "429"}, riverdlq.ClassRateLimited, "http-status"},
		{Facts{Message: "POST http://x: HTTP 502"}, riverdlq.ClassTransient, "http-status"},
		{Facts{Message: "Request failed with status code 404"}, riverdlq.ClassNotFound, "http-status"},
		{Facts{Message: "dial tcp 10.0.0.1:80: connect: connection refused"}, riverdlq.ClassTransient, "connection"},
		{Facts{Message: "read ECONNRESET"}, riverdlq.ClassTransient, "connection"},
		{Facts{Message: "context deadline exceeded"}, riverdlq.ClassTransient, "timeout"},
		{Facts{Type: "TIMEOUT_ERROR"}, riverdlq.ClassTransient, "transport"},
		{Facts{Message: "rpc error: code = ResourceExhausted desc = quota"}, riverdlq.ClassRateLimited, "grpc-status"},
		{Facts{Code: "ERR_INVALID_URL", Message: "order 81"}, riverdlq.ClassMalformed, "decode"},
		{Facts{Message: "circuit breaker is open"}, riverdlq.ClassOutage, "circuit-open"},
		{
			Facts{Message: "FATAL: the database system is shutting down (SQLSTATE 57P03)"},
			riverdlq.ClassOutage,
			"database-down",
		},
		{Facts{Message: "ERROR: deadlock detected (SQLSTATE 40P01)"}, riverdlq.ClassTransient, "serialization"},
		{Facts{Message: "TypeError: Cannot read properties of undefined"}, riverdlq.ClassCodeBug, "nil-dereference"},
		{Facts{Message: "json: cannot unmarshal string into Go value"}, riverdlq.ClassMalformed, "decode"},
		{Facts{Message: "card was declined"}, riverdlq.ClassBusiness, "business"},
		{Facts{Message: "permission denied for table x"}, riverdlq.ClassUnauthorized, "unauthorized"},
		{Facts{Message: "Stuck job rescued by JobRescuer"}, riverdlq.ClassTransient, "stuck-job"},
		{
			Facts{Message: "job kind is not registered in the client's Workers bundle: x"},
			riverdlq.ClassCodeBug,
			"unknown-job-kind",
		},
		{Facts{Message: "no rows in result set"}, riverdlq.ClassNotFound, "not-found"},
		{Facts{Message: "something else entirely"}, riverdlq.ClassUnknown, "none"},
		{Facts{}, riverdlq.ClassUnknown, "none"},
	} {
		class, rule := Classify(test.facts)
		require.Equal(t, test.class, class, "%+v", test.facts)
		require.Equal(t, test.rule, rule, "%+v", test.facts)
	}
}

func TestFingerprintByMessage_DoesNotChange(t *testing.T) {
	t.Parallel()
	require.Equal(t, "14b12c1272869cb6",
		FingerprintByMessage("HTTP_402", "POST http://10.0.0.1/x: 402 Payment Required", ""))
	require.Equal(t, "0ee7138b2d3037b8",
		FingerprintByMessage("panic", "boom 7", "goroutine 12 [running]:\nmain.f()\n\t/x.go:1\n"))
	same := []string{
		`POST http://10.0.0.1:80/x: order ord_81 of "Ann" (7f8d1e2a-0000-4000-8000-123456789abc) failed after 3.5 s`,
		`POST https://10.0.0.2/y: order ord_9999 of "Bob" (00000000-0000-4000-8000-000000000000) failed after 12 s`,
	}
	require.Equal(t, FingerprintByMessage("T", same[0], ""), FingerprintByMessage("T", same[1], ""))
	require.NotEqual(t, FingerprintByMessage("T", same[0], ""), FingerprintByMessage("U", same[0], ""))
	require.NotEqual(t, FingerprintByMessage("T", "a failed", ""), FingerprintByMessage("T", "b failed", ""))
	trace := "runtime.gopanic\n\t/go/src/panic.go:1\ngithub.com/riverqueue/river.x\n\tx.go:1\nexample.com/app/orders.Place\n\torders.go:7\n"
	require.Equal(t, "orders.Place", ownFrame1(trace))
	// runtime/debug writes a panic in this way. This frame is in the trace of every panic, and would group all panics
	// together.
	require.Equal(t, "orders.Place",
		ownFrame1("panic({0xa1b2c3, 0xc000012345})\n\t/go/src/runtime/panic.go:783 +0x132\n"+trace))
	require.NotEqual(t, FingerprintByMessage("T", "a", trace), FingerprintByMessage("T", "a", ""))
}

// An attempt is due one planned delay after the failure, or up to 20 % of the delay later because of the jitter. If
// that time is past, the attempt is due now.
func TestImmediate_DelaysGrowWithinJitter(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		s := &immediate{random: func(*Entry) float64 { return rapid.Float64Range(0, 0.9999).Draw(t, "jitter") }}
		share := 0.2
		plan := &policy.Plan{Delays: []time.Duration{time.Minute, 5 * time.Minute, time.Hour}, Jitter: &share}
		now := time.Unix(1_800_000_000, 0)
		age := time.Duration(rapid.Int64Range(0, int64(3*time.Hour)).Draw(t, "age"))
		n := rapid.IntRange(0, 20).Draw(t, "retries")
		at, waitingFor := s.First(&Entry{RetryCount: n, LastFailedAt: now.Add(-age)}, plan, now)
		if waitingFor != "" {
			t.Fatalf("waits for %s", waitingFor)
		}
		delay := plan.Delays[min(n, len(plan.Delays)-1)]
		if at.Before(now) {
			t.Fatalf("in the past: %s", at)
		}
		if after := at.Sub(now.Add(-age)); at != now && (after < delay || after > delay*6/5) {
			t.Fatalf("%s after the failure; must be %s to %s", after, delay, delay*6/5)
		}
	})
}

func TestPlanner_PermanentClassesNeedManualHandling(t *testing.T) {
	t.Parallel()
	p, err := NewPlanner(policytest.Load(t, nil), nil)
	require.NoError(t, err)
	now := time.Now()
	for _, class := range riverdlq.Classes() {
		d := p.Decide(&Entry{Facts: Facts{Class: class}, LastFailedAt: now}, now)
		manual := class.Permanent() || class == riverdlq.ClassUnknown
		require.Equal(t, manual, d.Strategy == Manual, class)
		require.Equal(t, manual, d.Next.IsZero(), class)
		require.NotEmpty(t, d.Reason)
	}
}

func TestStrategies_EachButManualHasImplementation(t *testing.T) {
	t.Parallel()
	require.ElementsMatch(t, strategies.Names(), append(slices.Collect(maps.Keys(implementations)), Manual))
}

func TestPlanner_ReturnsTheUnmetCondition(t *testing.T) {
	t.Parallel()
	p, err := NewPlanner(policytest.Load(t, nil), fakeConditions("the machine is busy"))
	require.NoError(t, err)
	require.Equal(t, "the machine is busy", p.UnmetBy("orders", "", &policy.Conditions{}))
	require.Empty(t, p.UnmetBy("orders", "", nil), "a plan without conditions")
}
