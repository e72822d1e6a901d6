// Package strategy classifies errors. For a dead letter of a class, it decides which strategy applies and when the
// entry is redelivered.
package strategy

import (
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

// Facts describe an error, and the job or message that failed with it.
type Facts struct {
	Type    string
	Code    string
	Title   string // the problem, in the same text each time
	Message string
	Class   riverdlq.Class  // the class that the worker reported; empty if it reported none
	Panic   bool            // see [IsPanic]
	Context json.RawMessage // data that the worker recorded with the error; an object, or empty

	Kind   string // of the message or job
	Queue  string
	Source string // of the message

	Payload json.RawMessage   // of the message, or the job's args; set only if [Planner.ReadsMessages]
	Headers map[string]string // of the message
}

// IsPanic reports whether a failure with a stack trace is a panic. The error of a River job has a trace only if the
// worker panicked; its type is then panic, unless the worker reported another type. With most frameworks, the error of
// a record of a source has a trace anyway, so such an error counts only if its type is panic.
func IsPanic(trace, errorType string, ofRecord bool) bool {
	return trace != "" && (!ofRecord || errorType == "panic")
}

// ReadMessage sets Payload and Headers from a message. For a job that is not a message of dlqd, it sets Payload to the
// job's args.
func (f *Facts) ReadMessage(jobKind string, event json.RawMessage) {
	if jobKind != message.JobKind {
		f.Payload = event
		return
	}
	var content struct {
		Payload json.RawMessage   `json:"payload"`
		Headers map[string]string `json:"headers"`
	}
	_ = json.Unmarshal(event, &content) // the error is ignored: an operator may have changed the form of the message
	f.Payload, f.Headers = content.Payload, content.Headers
}

// status returns the HTTP status of the response that failed, or 0. Deliveries record the status in the context; other
// workers may report it as the code.
func (f *Facts) status() int {
	status, _, _ := f.answer()
	return status
}

// answer returns the HTTP status (0 for none), whether the status is in the context, and whether the context has a
// Retry-After.
func (f *Facts) answer() (status int, inContext, retryAfter bool) {
	var context struct {
		Status     json.Number     `json:"status"`
		RetryAfter json.RawMessage `json:"retryAfterSeconds"`
	}
	if len(f.Context) > 0 {
		_ = json.Unmarshal(f.Context, &context) // untrusted: fields that cannot be decoded stay empty
	}
	retryAfter = len(context.RetryAfter) > 0
	for i, text := range []string{context.Status.String(), f.Code} {
		if n, err := strconv.Atoi(text); err == nil && n >= 100 && n <= 599 {
			return n, i == 0, retryAfter
		}
	}
	return 0, false, retryAfter
}

// grpcStatus returns the name of the gRPC status in a destination's answer, or "".
func (f *Facts) grpcStatus() string {
	var context struct {
		Status string `json:"grpcStatus"`
	}
	if len(f.Context) > 0 {
		_ = json.Unmarshal(f.Context, &context) // untrusted, as in answer
	}
	return context.Status
}

// Failure returns the input of [Fingerprint].
func (f *Facts) Failure(trace string) *Failure {
	return &Failure{Type: f.Type, Code: f.Code, Title: f.Title, Message: f.Message, Trace: trace, Context: f.Context}
}

// maxMatchBytes is the maximum number of bytes of a text that is matched, because texts of messages are untrusted.
const maxMatchBytes = 8 << 10

// RescuedBy is the beginning of the error with which River's rescuer ends an attempt.
const RescuedBy = "Stuck job rescued by"

// Names of rules that are not lines of the built-in table.
const (
	panicRule     = "panic"
	workerRule    = "worker" // the worker or the destination reported the class
	transportRule = "transport"
	statusRule    = "http-status"
	grpcRule      = "grpc-status"
	smtpRule      = "smtp-reply"
	noRule        = "none"
)

// Classify returns the class of an error by the built-in table, and the name of the rule or line that decided. An error
// that matches nothing has the class unknown. The steps go from the most specific information to the least specific:
//  1. the class that the worker or the destination reported; a stack trace
//  2. HTTP 429, 503 and 504, and responses with Retry-After; gRPC's UNAVAILABLE, RESOURCE_EXHAUSTED and RetryInfo
//  3. a type, a code or a name at the beginning of the text that the table knows; in a response with the status 500,
//     a bug that the text names
//  4. the status of gRPC, SQL or SMTP
//  5. other HTTP statuses
//  6. the words of the message; an HTTP status in it
func Classify(f Facts) (riverdlq.Class, string) {
	if f.Class != "" && slices.Contains(riverdlq.Classes(), f.Class) {
		return f.Class, workerRule
	}
	if f.Panic {
		return riverdlq.ClassCodeBug, panicRule
	}
	status, inContext, retryAfter := f.answer()
	ofCall, isCall := grpcClass(f.grpcStatus())
	if status != 0 && !inContext && (f.isMailReply() || f.isAMQP() || !isAssigned(status)) {
		status = 0 // the code belongs to another protocol, so it is not an HTTP status
	}
	ofStatus := ClassifyStatus(status)
	switch {
	case status == http.StatusTooManyRequests,
		status == http.StatusServiceUnavailable, status == http.StatusGatewayTimeout:
		return ofStatus, statusRule
	case retryAfter && status >= 400 && (ofStatus.Permanent() || ofStatus == riverdlq.ClassUnknown):
		return riverdlq.ClassRateLimited, statusRule // the receiver says when to send the message again
	case retryAfter && status >= 400:
		return ofStatus, statusRule
	case isCall && (ofCall == riverdlq.ClassOutage || ofCall == riverdlq.ClassRateLimited):
		return ofCall, grpcRule
	case isCall && retryAfter && ofCall.Permanent():
		return riverdlq.ClassRateLimited, grpcRule
	}
	text := f.text()
	words := wordsOf(text)
	if l := f.reported(text, words, status); l != nil {
		return l.class, l.rule
	}
	if isCall {
		return ofCall, grpcRule
	}
	if class, ok := ofGRPC(text); ok {
		l := preferPermanent(&line{rule: grpcRule, class: class}, words)
		return l.class, l.rule
	}
	if l, ok := f.ofSQL(text, status); ok {
		return l.class, l.rule
	}
	if class, ok := f.ofSMTP(words); ok {
		l := preferPermanent(&line{rule: smtpRule, class: class}, words)
		return l.class, l.rule
	}
	if status == http.StatusForbidden && rateLimits.in(words) {
		return riverdlq.ClassRateLimited, rateLimit // as GitHub, Google and Kubernetes answer
	}
	if ofStatus != riverdlq.ClassUnknown {
		return ofStatus, statusRule
	}
	if l := known.ofText(words); l != nil {
		return l.class, l.rule
	}
	if class := ClassifyStatus(statusIn(words)); class != riverdlq.ClassUnknown {
		return class, statusRule
	}
	if l := lastResort.ofName(f.Type); l != nil {
		return l.class, l.rule
	}
	if l := lastResort.ofText(words); l != nil {
		return l.class, l.rule
	}
	return riverdlq.ClassUnknown, noRule
}

// text returns the text to classify: the title and the message, without the URL that earlier versions of dlqd wrote
// before the message. If the type has several words, it precedes the text.
func (f *Facts) text() string {
	text := bounded(f.Message)
	if rest, ok := strings.CutPrefix(text, "POST "); ok {
		if _, after, ok := strings.Cut(rest, ": "); ok {
			text = after
		}
	}
	if f.Title != "" && !strings.Contains(text, f.Title) {
		text = bounded(f.Title) + ": " + text
	}
	if strings.Contains(f.Type, " ") {
		text = bounded(f.Type) + ": " + text
	}
	return text
}

// reported returns the line of the reported code or type or, if no line has these, of the name at the beginning of the
// text. If there is none either, and the status is 500, which says little about the cause, it returns the line of a bug
// that the text names. Otherwise it returns nil. The text can replace the line that was found: see typeExceptions and
// preferPermanent.
func (f *Facts) reported(text string, words *wording, status int) *line {
	var l *line
	head, _, _ := strings.Cut(text, ":")
	if slices.Contains(transportTypes, f.Type) || slices.Contains(transportTypes, head) {
		return &line{rule: transportRule, class: riverdlq.ClassTransient}
	} else if class, ok := grpcClass(f.Code); ok {
		l = &line{rule: grpcRule, class: class}
	} else if l = known.ofName(f.Code); l == nil {
		l = known.ofName(f.Type)
	}
	if l == nil {
		l = lineOfFirstName(text)
	}
	if l == nil && status == http.StatusInternalServerError {
		if l = known.ofText(words); l != nil && l.class != riverdlq.ClassCodeBug {
			l = nil
		}
	}
	for i := range typeExceptions {
		if l != nil && l.rule == typeExceptions[i].rule && typeExceptions[i].texts.in(words) {
			return &typeExceptions[i].is
		}
	}
	return preferPermanent(l, words)
}

// preferPermanent returns l, with one exception. If l is a temporary error, such as a ConnectionError, and the text
// names a permanent one, such as a wrong password, preferPermanent returns the line of the permanent error.
func preferPermanent(l *line, words *wording) *line {
	if l == nil || l.class.Permanent() {
		return l
	}
	if i := known.inText(words); i < firstTransient && known.lines[i].class.Permanent() {
		return known.line(i)
	}
	return l
}

// maxFirstNames is the maximum number of names before a message: the name of the error, and the names of the errors
// that it wraps.
const maxFirstNames = 4

// lineOfFirstName returns the line of the name at the beginning of a text, or nil. Examples of such texts are "Uncaught
// TypeError: …", "java.io.IOException: …", "TooManyRequests" and "502 Bad Gateway: UpstreamFailed: …".
func lineOfFirstName(text string) *line {
	for range maxFirstNames {
		head, rest, more := strings.Cut(text[:min(len(text), maxNameBytes)], ": ")
		if i := strings.IndexByte(head, '\n'); i >= 0 {
			head, more = head[:i], false
		}
		isStatusLine := len(head) > 3 && isFailure([]byte(head[:3])) && head[3] == ' ' && more
		if fields := strings.Fields(head); !isStatusLine {
			if len(fields) == 0 || len(fields) > 3 {
				return nil
			}
			name := fields[len(fields)-1]
			// A single word counts as a name only if it is in capitals.
			if n := len(wordsOf(name).list); n == 0 || n == 1 && strings.ToUpper(name) != name {
				return nil
			}
			if l := known.ofName(name); l != nil {
				return l
			}
		}
		if !more {
			return nil
		}
		text = rest
	}
	return nil
}

// grpcPrefixes lists the texts that precede a gRPC status in messages of the Go, Rust, Python and
// .NET libraries.
var grpcPrefixes = []string{"rpc error: code = ", "status: ", "StatusCode.", `StatusCode="`}

// ofGRPC returns the class of the gRPC status in a text, or false if there is none.
func ofGRPC(text string) (riverdlq.Class, bool) {
	for _, before := range grpcPrefixes {
		if _, name, ok := strings.Cut(text, before); ok {
			name = name[:min(len(name), maxNameBytes)]
			if i := strings.IndexFunc(name, func(c rune) bool { return c != '_' && !unicode.IsLetter(c) }); i >= 0 {
				name = name[:i]
			}
			if class, ok := grpcClass(name); ok {
				return class, true
			}
		}
	}
	return riverdlq.ClassUnknown, false
}

func grpcClass(name string) (riverdlq.Class, bool) {
	if len(name) > maxNameBytes {
		return "", false
	}
	class, ok := grpcClasses[strings.ToLower(strings.ReplaceAll(name, "_", ""))]
	return class, ok
}

var sqlState = regexp.MustCompile(`^[0-9A-Z]{5}$`)

// ofSQL returns the line of a SQLSTATE: the error's code, the state after the word SQLSTATE in the text, or a state at
// the beginning of the text. It returns false if there is none.
func (f *Facts) ofSQL(text string, status int) (line, bool) {
	state := ""
	if len(f.Code) == 5 && status == 0 {
		state = f.Code
	} else if _, after, ok := strings.Cut(text, "SQLSTATE"); ok {
		state = strings.TrimLeft(after[:min(len(after), 20)], " :=[")
	} else if len(text) > 5 && text[5] == ':' {
		state = text
	}
	if len(state) < 5 || !sqlState.MatchString(state[:5]) {
		return line{}, false
	}
	for _, n := range []int{5, 3, 2} {
		if l, ok := sqlStates[state[:n]]; ok {
			return l, true
		}
	}
	return line{}, false
}

// isMailReply reports whether the error's code is an SMTP or FTP reply and not an HTTP status. Replies of SMTP and FTP
// have the same meaning.
func (f *Facts) isMailReply() bool {
	name := strings.ToLower(bounded(f.Type))
	return slices.ContainsFunc([]string{"smtp", "mail", "ftp", "swift_"}, func(word string) bool {
		return strings.Contains(name, word)
	})
}

// isAMQP reports whether the error's code is an AMQP reply code, whose text says more than the code.
func (f *Facts) isAMQP() bool {
	text := strings.ToLower(bounded(f.Type) + " " + bounded(f.Message))
	for _, word := range []string{"amqp", "rabbit", "bunny", "lapin", "reply-code", "channel closed by server"} {
		if strings.Contains(text, word) {
			return true
		}
	}
	return false
}

// ofSMTP returns the class of a mail server's reply, or false if there is none. The reply is the code of a mail
// client's error. It can also be in the text, before its enhanced status (RFC 3463), which begins with the same digit:
// 550 5.1.1.
func (f *Facts) ofSMTP(words *wording) (riverdlq.Class, bool) {
	reply := ""
	if f.isMailReply() && isFailure([]byte(f.Code)) {
		reply = f.Code
	}
	for i := 0; reply == "" && i+3 < len(words.list); i++ {
		if w, next := words.at(i), words.at(i+1); isFailure(w) && len(next) == 1 && next[0] == w[0] &&
			isNumber(words.at(i+2)) && isNumber(words.at(i+3)) {
			reply = string(w)
		}
	}
	if reply == "" {
		return "", false
	}
	class, ok := smtpClasses[reply]
	if !ok {
		class = smtpClasses[reply[:1]]
	}
	return class, true
}

// maxWordsToStatus is the largest distance, in words, from a word such as "status" to the HTTP status that it
// announces.
const maxWordsToStatus = 6

// statusIn returns the HTTP status at the beginning of a text, or after a word that announces a status. It returns 0 if
// there is none.
func statusIn(words *wording) int {
	announced := -1 // index of the last word that announces a status
	for i := range words.list {
		switch word := words.at(i); {
		case isFailure(word) && (i == 0 || announced >= 0 && i-announced <= maxWordsToStatus):
			n, _ := strconv.Atoi(string(word)) // cannot fail: the word has three digits
			if http.StatusText(n) != "" || i > 0 && isAssigned(n) {
				return n
			}
		case len(word) > 2 && isNumber(word):
			announced = -1 // a number that is not a status
		default:
			switch string(word) {
			case "http", "status", "code", "returned", "response", "responded":
				announced = i
			}
		}
	}
	return 0
}

// isFailure reports whether a word is the status of a failure in HTTP or SMTP: 400 to 599.
func isFailure(word []byte) bool {
	return len(word) == 3 && (word[0] == '4' || word[0] == '5') && isNumber(word)
}

func isNumber(word []byte) bool {
	return !slices.ContainsFunc(word, func(c byte) bool { return c < '0' || c > '9' })
}
