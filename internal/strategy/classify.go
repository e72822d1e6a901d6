// Package strategy goes from an error to its class, and from a class to what happens next and when.
package strategy

import (
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/dlqd/dlqd/riverdlq"
)

// Facts are what is known of an error, from whatever recorded it.
type Facts struct {
	Type    string
	Code    string
	Message string
	Class   riverdlq.Class // what the worker that failed called it; empty if it did not say
	Panic   bool           // there is a stack trace
}

// maxMatchBytes bounds the text that patterns are matched against: messages come from strangers.
const maxMatchBytes = 8 << 10

// statusRule is the name of the rule that goes by HTTP status.
const statusRule = "http-status"

// ClassifyStatus returns the class of an HTTP status that is not a success.
func ClassifyStatus(status int) riverdlq.Class {
	switch status {
	case 408, 500, 502:
		return riverdlq.ClassTransient
	case 429:
		return riverdlq.ClassRateLimited
	case 503, 504:
		return riverdlq.ClassOutage
	case 400, 422:
		return riverdlq.ClassValidation
	case 401, 403:
		return riverdlq.ClassUnauthorized
	case 404, 410:
		return riverdlq.ClassNotFound
	case 409:
		return riverdlq.ClassBusiness
	default:
		return riverdlq.ClassUnknown
	}
}

// pattern is a rule of the built-in table that goes by text. RE2 matches in time linear in the text.
type pattern struct {
	name  string
	class riverdlq.Class
	text  *regexp.Regexp
}

// The first match wins, so what is particular comes before what is general.
var patterns = []pattern{
	{"stuck-job", riverdlq.ClassTransient, regexp.MustCompile(`^Stuck job rescued by`)},
	{"unknown-job-kind", riverdlq.ClassCodeBug, regexp.MustCompile(`job kind is not registered`)},
	{"rate-limit", riverdlq.ClassRateLimited, regexp.MustCompile(`(?i)rate.?limit|too many requests|quota exceeded|throttl|resource.?exhausted`)},
	{"circuit-open", riverdlq.ClassOutage, regexp.MustCompile(`(?i)circuit( breaker)?( is)? open|service unavailable|gateway time-?out`)},
	{"database-down", riverdlq.ClassOutage, regexp.MustCompile(`(?i)the database system is (starting up|shutting down|in recovery)|too many (clients|connections)|SQLSTATE (08|53|57P)`)},
	{"nil-dereference", riverdlq.ClassCodeBug, regexp.MustCompile(`(?i)nil pointer dereference|invalid memory address|NullPointerException|TypeError|AttributeError|undefined is not|cannot read propert|index out of range`)},
	{"timeout", riverdlq.ClassTransient, regexp.MustCompile(`(?i)time-?d?.?out|deadline exceeded|ETIMEDOUT|ESOCKETTIMEDOUT`)},
	{"connection", riverdlq.ClassTransient, regexp.MustCompile(`(?i)connection (was )?(reset|refused|closed|aborted)|broken pipe|ECONN(RESET|REFUSED|ABORTED)|unexpected EOF|no such host|ENOTFOUND|EAI_AGAIN|network is unreachable|socket hang up`)},
	{"serialization", riverdlq.ClassTransient, regexp.MustCompile(`SQLSTATE (40001|40P01|55P03)|could not serialize access|deadlock detected`)},
	{"decode", riverdlq.ClassMalformed, regexp.MustCompile(`(?i)cannot (unmarshal|decode|parse)|invalid character|unexpected token|JSONDecodeError|JsonParseException|malformed`)},
	{"unauthorized", riverdlq.ClassUnauthorized, regexp.MustCompile(`(?i)unauthori[sz]ed|forbidden|permission denied|access denied|invalid (token|credentials|api key)`)},
	{"validation", riverdlq.ClassValidation, regexp.MustCompile(`(?i)validation|invalid (argument|value|input)|is required|SQLSTATE 2[23]`)},
	{"business", riverdlq.ClassBusiness, regexp.MustCompile(`(?i)declined|insufficient funds|out of stock|already exists`)},
	{"not-found", riverdlq.ClassNotFound, regexp.MustCompile(`(?i)not found|does not exist|no rows in result set`)},
}

var httpStatus = regexp.MustCompile(`(?i)\b(?:http|status|code)[ :=/.0-9]*?\b([45]\d\d)\b`)

// Classify returns an error's class and the name of the rule that chose it. It always answers: what nothing matches is
// unknown.
func Classify(f Facts) (riverdlq.Class, string) {
	if f.Panic {
		return riverdlq.ClassCodeBug, "panic"
	}
	if f.Class != "" && slices.Contains(riverdlq.Classes(), f.Class) {
		return f.Class, "worker"
	}
	if status, err := strconv.Atoi(f.Code); err == nil && status >= 400 && status <= 599 {
		if class := ClassifyStatus(status); class != riverdlq.ClassUnknown {
			return class, statusRule
		}
	}
	text := f.Message[:min(len(f.Message), maxMatchBytes)]
	if f.Type != "" {
		text = f.Type + ": " + text
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

// trimPackage keeps the function of a stack frame readable.
func trimPackage(frame string) string {
	if i := strings.LastIndexByte(frame, '/'); i >= 0 {
		return frame[i+1:]
	}
	return frame
}
