// Package strategy goes from an error to its class, and from a class to what happens next and when.
package strategy

import (
	"encoding/json"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/dlqd/dlqd/riverdlq"
)

// Facts are what is known of an error and of the work that met it, from whatever recorded them.
type Facts struct {
	Type    string
	Code    string
	Title   string // what went wrong, the same text each time
	Message string
	Class   riverdlq.Class  // what the worker that failed called it; empty if it did not say
	Panic   bool            // there is a stack trace
	Context json.RawMessage // what the worker recorded beside the error; an object, if anything

	Kind   string // of the message or job
	Queue  string
	Source string // of the message

	Payload json.RawMessage   // of the message, or the job's args; where [Planner.ReadsMessages]
	Headers map[string]string // of the message
}

// status is the HTTP status of the answer that was the error: in the context, where deliveries put it, or the code.
func (f *Facts) status() int {
	var context struct {
		Status json.Number `json:"status"`
	}
	_ = json.Unmarshal(f.Context, &context) // a stranger's: what cannot be read says nothing
	for _, text := range []string{context.Status.String(), f.Code} {
		if n, err := strconv.Atoi(text); err == nil && n >= 100 && n <= 599 {
			return n
		}
	}
	return 0
}

// Failure returns what a fingerprint is made of.
func (f *Facts) Failure(trace string) *Failure {
	return &Failure{Type: f.Type, Code: f.Code, Title: f.Title, Message: f.Message, Trace: trace, Context: f.Context}
}

// maxMatchBytes bounds the text that patterns are matched against: messages come from strangers.
const maxMatchBytes = 8 << 10

// RescuedBy begins the error of an attempt that River's rescuer ended.
const RescuedBy = "Stuck job rescued by"

// stuckJob is the rule of jobs that River's rescuer ended: their worker died, or hung.
const stuckJob = "stuck-job"

// statusRule is the name of the rule that goes by HTTP status.
const statusRule = "http-status"

// ClassifyStatus returns the class of an HTTP status that is not a success. The codes above 511 are those of CDNs whose
// origin is down or overloaded (Cloudflare 520 to 527 and 530, others 529); a 5xx that nobody knows is a 500 (RFC 9110, 15).
func ClassifyStatus(status int) riverdlq.Class {
	switch status {
	case 408:
		return riverdlq.ClassTransient
	case 429:
		return riverdlq.ClassRateLimited
	case 503, 504, 507, 520, 521, 522, 523, 524, 525, 526, 527, 529, 530:
		return riverdlq.ClassOutage
	case 400, 422:
		return riverdlq.ClassValidation
	case 401, 403:
		return riverdlq.ClassUnauthorized
	case 404, 410:
		return riverdlq.ClassNotFound
	case 409:
		return riverdlq.ClassBusiness
	}
	if status >= 500 && status <= 599 {
		return riverdlq.ClassTransient
	}
	return riverdlq.ClassUnknown
}

// pattern is a rule of the built-in table that goes by text. RE2 matches in time linear in the text.
type pattern struct {
	name  string
	class riverdlq.Class
	text  *regexp.Regexp
}

// The first match wins, so what is particular comes before what is general.
var patterns = []pattern{
	{"transport", riverdlq.ClassTransient, regexp.MustCompile(`^(TIMEOUT_ERROR|CONNECTION_(REFUSED|RESET|ERROR)|DNS_ERROR|TLS_ERROR)\b`)},
	{stuckJob, riverdlq.ClassTransient, regexp.MustCompile(`^` + RescuedBy)},
	{"unknown-job-kind", riverdlq.ClassCodeBug, regexp.MustCompile(`job kind is not registered`)},
	{"rate-limit", riverdlq.ClassRateLimited, regexp.MustCompile(`(?i)rate.?limit|too many requests|quota exceeded|throttl|resource.?exhausted`)},
	{"circuit-open", riverdlq.ClassOutage, regexp.MustCompile(`(?i)circuit.?(breaker)?.{0,80}\bopen\b|CallNotPermitted|service unavailable|gateway time-?out`)},
	{"database-down", riverdlq.ClassOutage, regexp.MustCompile(`(?i)the database system is (starting up|shutting down|in recovery)|too many (clients|connections)|SQLSTATE (08|53|57P)`)},
	{"nil-dereference", riverdlq.ClassCodeBug, regexp.MustCompile(`(?i)nil pointer dereference|invalid memory address|NullPointerException|TypeError|AttributeError|undefined is not|cannot read propert|index out of range`)},
	{"sql-bug", riverdlq.ClassCodeBug, regexp.MustCompile(`SQLSTATE 42[^5]`)}, // undefined column and its like; 42501 is a missing right
	{"timeout", riverdlq.ClassTransient, regexp.MustCompile(`(?i)time-?d?.?out|deadline exceeded|ETIMEDOUT|ESOCKETTIMEDOUT`)},
	{"connection", riverdlq.ClassTransient, regexp.MustCompile(`(?i)connection (was )?(reset|refused|closed|aborted)|broken pipe|ECONN(RESET|REFUSED|ABORTED)|unexpected EOF|no such host|ENOTFOUND|EAI_AGAIN|network is unreachable|socket hang up`)},
	{"serialization", riverdlq.ClassTransient, regexp.MustCompile(`SQLSTATE (40001|40P01|55P03)|could not serialize access|deadlock detected`)},
	{"decode", riverdlq.ClassMalformed, regexp.MustCompile(`(?i)cannot (unmarshal|decode|parse)|invalid character|unexpected token|JSONDecodeError|JsonParseException|malformed`)},
	{"unauthorized", riverdlq.ClassUnauthorized, regexp.MustCompile(`(?i)unauthori[sz]ed|forbidden|permission denied|access.?denied|invalid (token|credentials|api key)`)},
	{"validation", riverdlq.ClassValidation, regexp.MustCompile(`(?i)validation|invalid (argument|value|input)|is required|SQLSTATE 2[23]`)},
	{"business", riverdlq.ClassBusiness, regexp.MustCompile(`(?i)declined|insufficient funds|out of stock|already exists`)},
	{"not-found", riverdlq.ClassNotFound, regexp.MustCompile(`(?i)not found|does not exist|no rows in result set`)},
}

// grpcStatus is the rule that goes by gRPC's status codes.
const grpcStatus = "grpc-status"

// grpcClasses are the classes of gRPC's status codes, by their names without _ and in lower case.
var grpcClasses = map[string]riverdlq.Class{
	"deadlineexceeded":   riverdlq.ClassTransient,
	"aborted":            riverdlq.ClassTransient,
	"internal":           riverdlq.ClassTransient,
	"resourceexhausted":  riverdlq.ClassRateLimited,
	"unavailable":        riverdlq.ClassOutage,
	"invalidargument":    riverdlq.ClassValidation,
	"outofrange":         riverdlq.ClassValidation,
	"unauthenticated":    riverdlq.ClassUnauthorized,
	"permissiondenied":   riverdlq.ClassUnauthorized,
	"notfound":           riverdlq.ClassNotFound,
	"alreadyexists":      riverdlq.ClassBusiness,
	"failedprecondition": riverdlq.ClassBusiness,
	"unimplemented":      riverdlq.ClassCodeBug,
}

var (
	grpcText = regexp.MustCompile(`rpc error: code = (\w+)`)
	grpcCode = regexp.MustCompile(`^[A-Z][a-zA-Z_]+$`)
	sqlState = regexp.MustCompile(`^[0-9A-Z]{5}$`)
)

// ofGRPC is the class of a gRPC status, in the code or in the text of Go's library.
func (f *Facts) ofGRPC() (riverdlq.Class, bool) {
	name := ""
	if grpcCode.MatchString(f.Code) {
		name = f.Code
	} else if match := grpcText.FindStringSubmatch(bounded(f.Message)); match != nil {
		name = match[1]
	}
	class, ok := grpcClasses[strings.ToLower(strings.ReplaceAll(name, "_", ""))]
	return class, ok
}

var httpStatus = regexp.MustCompile(`(?i)\b(?:http|status|code)[ :=/.0-9]*?\b([45]\d\d)\b`)

// Classify returns an error's class by the built-in table, and the name of its line. It always answers: what nothing
// matches is unknown.
func Classify(f Facts) (riverdlq.Class, string) {
	if f.Panic {
		return riverdlq.ClassCodeBug, "panic"
	}
	if f.Class != "" && slices.Contains(riverdlq.Classes(), f.Class) {
		return f.Class, "worker"
	}
	if status := f.status(); status >= 400 {
		if class := ClassifyStatus(status); class != riverdlq.ClassUnknown {
			return class, statusRule
		}
	}
	if class, ok := f.ofGRPC(); ok {
		return class, grpcStatus
	}
	text := bounded(f.Message)
	if f.Type != "" {
		text = bounded(f.Type) + ": " + text
	}
	if sqlState.MatchString(f.Code) {
		text += " (SQLSTATE " + f.Code + ")"
	} else if f.Code != "" {
		text += " (" + bounded(f.Code) + ")"
	}
	for _, p := range patterns {
		if p.text.MatchString(text) {
			return p.class, p.name
		}
	}
	if match := httpStatus.FindStringSubmatch(text); match != nil {
		status, _ := strconv.Atoi(match[1]) // three digits
		if class := ClassifyStatus(status); class != riverdlq.ClassUnknown {
			return class, statusRule
		}
	}
	return riverdlq.ClassUnknown, "none"
}
