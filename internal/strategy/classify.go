// Package strategy goes from an error to its class, and from a class to what happens next and when.
package strategy

import (
	"encoding/json"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

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
	status, _, _ := f.answer()
	return status
}

// answer is the status, 0 for none, and whether the context has it, and says when to come back.
func (f *Facts) answer() (status int, inContext, retryAfter bool) {
	var context struct {
		Status     json.Number     `json:"status"`
		RetryAfter json.RawMessage `json:"retryAfterSeconds"`
	}
	if len(f.Context) > 0 {
		_ = json.Unmarshal(f.Context, &context) // a stranger's: what cannot be read says nothing
	}
	retryAfter = len(context.RetryAfter) > 0
	for i, text := range []string{context.Status.String(), f.Code} {
		if n, err := strconv.Atoi(text); err == nil && n >= 100 && n <= 599 {
			return n, i == 0, retryAfter
		}
	}
	return 0, false, retryAfter
}

// Failure returns what a fingerprint is made of.
func (f *Facts) Failure(trace string) *Failure {
	return &Failure{Type: f.Type, Code: f.Code, Title: f.Title, Message: f.Message, Trace: trace, Context: f.Context}
}

// maxMatchBytes bounds the text that is matched: messages come from strangers.
const maxMatchBytes = 8 << 10

// RescuedBy begins the error of an attempt that River's rescuer ended.
const RescuedBy = "Stuck job rescued by"

// Names of rules that are no line of the table.
const (
	panicRule     = "panic"
	workerRule    = "worker" // or the destination
	transportRule = "transport"
	statusRule    = "http-status"
	grpcRule      = "grpc-status"
	smtpRule      = "smtp-reply"
	noRule        = "none"
)

// Classify returns an error's class by the built-in table, and the name of the line that decided.
// An error that matches no line is unknown. The steps go from what says most of an error to what
// says least:
//  1. the class that the worker or the destination named; a stack trace
//  2. HTTP 429, 503 and 504, and answers with Retry-After
//  3. a reported type or code that the table knows
//  4. the status of gRPC, SQL or SMTP
//  5. other HTTP statuses
//  6. the words of the message
func Classify(f Facts) (riverdlq.Class, string) {
	if f.Class != "" && slices.Contains(riverdlq.Classes(), f.Class) {
		return f.Class, workerRule
	}
	if f.Panic {
		return riverdlq.ClassCodeBug, panicRule
	}
	status, inContext, retryAfter := f.answer()
	if status != 0 && !inContext && (f.repliesLikeMail() || f.isAMQP() || !isAssigned(status)) {
		status = 0 // a code of another protocol
	}
	ofStatus := ClassifyStatus(status)
	switch {
	case status == http.StatusTooManyRequests,
		status == http.StatusServiceUnavailable, status == http.StatusGatewayTimeout:
		return ofStatus, statusRule
	case retryAfter && status >= 400 && (ofStatus.Permanent() || ofStatus == riverdlq.ClassUnknown):
		return riverdlq.ClassRateLimited, statusRule // it may be sent again, but not at once
	case retryAfter && status >= 400:
		return ofStatus, statusRule
	}
	text := f.text()
	words := wordsOf(text)
	if l := f.reported(text, words, status); l != nil {
		return l.class, l.rule
	}
	if class, ok := ofGRPC(text); ok {
		l := unlessBarred(&line{rule: grpcRule, class: class}, words)
		return l.class, l.rule
	}
	if l, ok := f.ofSQL(text, status); ok {
		return l.class, l.rule
	}
	if class, ok := f.ofSMTP(words); ok {
		l := unlessBarred(&line{rule: smtpRule, class: class}, words)
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

// text is what the error says: its title and message, without the URL that earlier versions put
// before them. A type of several words is a text as well.
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

// reported is the line of the reported code or type, or of the name that the text begins with. A
// status of 500 says so little that a bug which the text names comes before it.
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
		l = nameBefore(text)
	}
	if l == nil && status == http.StatusInternalServerError {
		if l = known.ofText(words); l != nil && l.class != riverdlq.ClassCodeBug {
			l = nil
		}
	}
	for i := range disguises {
		if l != nil && l.rule == disguises[i].rule && disguises[i].texts.in(words) {
			return &disguises[i].is
		}
	}
	return unlessBarred(l, words)
}

// unlessBarred returns a line. Where it is one of errors that pass, such as a ConnectionError, and
// the text names what will not, such as a wrong password, it returns the line of that.
func unlessBarred(l *line, words *wording) *line {
	if l == nil || l.class.Permanent() {
		return l
	}
	if i := known.inText(words); i < firstPassing && known.lines[i].class.Permanent() {
		return known.line(i)
	}
	return l
}

// maxNamesBefore is how many names may stand before a message: that of an error, and those of the
// errors behind it.
const maxNamesBefore = 4

// nameBefore is the line of the name that a text begins with: "Uncaught TypeError: …",
// "java.io.IOException: …", "TooManyRequests", "502 Bad Gateway: UpstreamFailed: …".
func nameBefore(text string) *line {
	for range maxNamesBefore {
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
			// A word in small letters is no name.
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

// beforeGRPC stands before the name of a gRPC status in the texts of the libraries of Go, Rust,
// Python and .NET.
var beforeGRPC = []string{"rpc error: code = ", "status: ", "StatusCode.", `StatusCode="`}

// ofGRPC is the class of a gRPC status in a text.
func ofGRPC(text string) (riverdlq.Class, bool) {
	for _, before := range beforeGRPC {
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

// ofSQL is the line of a SQLSTATE: of the code, or of what stands in the text behind that word, or
// at its beginning.
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

// repliesLikeMail reports whether the error's code is a reply of SMTP or FTP, whose numbers mean
// the same, and no HTTP status.
func (f *Facts) repliesLikeMail() bool {
	name := strings.ToLower(bounded(f.Type))
	return slices.ContainsFunc([]string{"smtp", "mail", "ftp", "swift_"}, func(word string) bool {
		return strings.Contains(name, word)
	})
}

// isAMQP reports whether the error's code is one of AMQP, and no HTTP status; its text says more.
func (f *Facts) isAMQP() bool {
	text := strings.ToLower(bounded(f.Type) + " " + bounded(f.Message))
	for _, word := range []string{"amqp", "rabbit", "bunny", "lapin", "reply-code", "channel closed by server"} {
		if strings.Contains(text, word) {
			return true
		}
	}
	return false
}

// ofSMTP returns the class of a mail server's reply: of the code of a mail client's error, or of a
// reply in the text with its enhanced status (RFC 3463), which begins with the same digit: 550
// 5.1.1.
func (f *Facts) ofSMTP(words *wording) (riverdlq.Class, bool) {
	reply := ""
	if f.repliesLikeMail() && isFailure([]byte(f.Code)) {
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

// maxWordsToStatus is how many words may stand between what announces an HTTP status in a text, and
// the status.
const maxWordsToStatus = 6

// statusIn is the HTTP status that a text names, 0 for none: at its beginning, or behind a word
// that announces it.
func statusIn(words *wording) int {
	announced := -1 // the last such word
	for i := range words.list {
		switch word := words.at(i); {
		case isFailure(word) && (i == 0 || announced >= 0 && i-announced <= maxWordsToStatus):
			n, _ := strconv.Atoi(string(word)) // three digits
			if http.StatusText(n) != "" || i > 0 && isAssigned(n) {
				return n
			}
		case len(word) > 2 && isNumber(word):
			announced = -1 // another number
		default:
			switch string(word) {
			case "http", "status", "code", "returned", "response", "responded":
				announced = i
			}
		}
	}
	return 0
}

// isFailure reports whether a word is the number of a failure, in HTTP or SMTP: 400 to 599.
func isFailure(word []byte) bool {
	return len(word) == 3 && (word[0] == '4' || word[0] == '5') && isNumber(word)
}

func isNumber(word []byte) bool {
	return !slices.ContainsFunc(word, func(c byte) bool { return c < '0' || c > '9' })
}
