// Package strategy goes from an error to its class, and from a class to what happens next and when.
package strategy

import (
	"encoding/json"
	"net/http"
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

// maxMatchBytes bounds the text that patterns are matched against: messages come from strangers.
const maxMatchBytes = 8 << 10

// RescuedBy begins the error of an attempt that River's rescuer ended.
const RescuedBy = "Stuck job rescued by"

// statusRule is the name of the rule that goes by HTTP status.
const statusRule = "http-status"

// ClassifyStatus returns the class of an HTTP status that is not a success. The codes above 511 are those of CDNs whose
// origin is down or overloaded (Cloudflare 520 to 527 and 530, others 529); a 5xx that nobody knows is a 500 (RFC 9110, 15).
func ClassifyStatus(status int) riverdlq.Class {
	switch status {
	case 408, 423, 425:
		return riverdlq.ClassTransient
	case 429:
		return riverdlq.ClassRateLimited
	case 503, 504, 507, 520, 521, 522, 523, 524, 525, 526, 527, 529, 530:
		return riverdlq.ClassOutage
	case 400, 405, 406, 411, 413, 414, 415, 422, 431:
		return riverdlq.ClassValidation
	case 401, 403:
		return riverdlq.ClassUnauthorized
	case 404, 410:
		return riverdlq.ClassNotFound
	case 402, 409, 412:
		return riverdlq.ClassBusiness
	}
	if status >= 500 && status <= 599 {
		return riverdlq.ClassTransient
	}
	return riverdlq.ClassUnknown
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

// sqlClasses are the lines of SQLSTATEs, by their first five, three or two characters.
var sqlClasses = map[string]line{
	"08":    {rule: "database-down", class: riverdlq.ClassOutage},
	"08P01": {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"0A":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"21000": {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"22":    {rule: "validation", class: riverdlq.ClassValidation},
	"23":    {rule: "validation", class: riverdlq.ClassValidation},
	"25":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"25006": {rule: "database-down", class: riverdlq.ClassOutage}, // read-only: a standby, after a failover
	"25P03": {rule: "timeout", class: riverdlq.ClassTransient},
	"26":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"28":    {rule: "unauthorized", class: riverdlq.ClassUnauthorized},
	"34":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"3D":    {rule: "not-found", class: riverdlq.ClassNotFound},
	"3F":    {rule: "not-found", class: riverdlq.ClassNotFound},
	"40":    {rule: "serialization", class: riverdlq.ClassTransient},
	"42":    {rule: "sql-bug", class: riverdlq.ClassCodeBug},
	"42501": {rule: "unauthorized", class: riverdlq.ClassUnauthorized},
	"53":    {rule: "database-down", class: riverdlq.ClassOutage},
	"54":    {rule: "validation", class: riverdlq.ClassValidation},
	"55006": {rule: "serialization", class: riverdlq.ClassTransient},
	"55P03": {rule: "serialization", class: riverdlq.ClassTransient},
	"57014": {rule: "timeout", class: riverdlq.ClassTransient},
	"57P":   {rule: "database-down", class: riverdlq.ClassOutage},
	"58":    {rule: "database-down", class: riverdlq.ClassOutage},
	"P0001": {rule: "business", class: riverdlq.ClassBusiness},
	"P0002": {rule: "not-found", class: riverdlq.ClassNotFound},
}

// smtpClasses are the classes of an SMTP server's replies (RFC 5321, 4.2.3), by all their digits or the first.
var smtpClasses = map[string]riverdlq.Class{
	"4":   riverdlq.ClassTransient,
	"421": riverdlq.ClassOutage,
	"5":   riverdlq.ClassBusiness,
	"500": riverdlq.ClassValidation,
	"501": riverdlq.ClassValidation,
	"502": riverdlq.ClassValidation,
	"503": riverdlq.ClassValidation,
	"504": riverdlq.ClassValidation,
	"530": riverdlq.ClassUnauthorized,
	"534": riverdlq.ClassUnauthorized,
	"535": riverdlq.ClassUnauthorized,
	"538": riverdlq.ClassUnauthorized,
	"550": riverdlq.ClassNotFound,
	"551": riverdlq.ClassNotFound,
	"552": riverdlq.ClassValidation,
	"553": riverdlq.ClassValidation,
	"555": riverdlq.ClassValidation,
}

// ofSMTP is the class of a mail server's reply: in the code of an SMTP error, or in the text with its enhanced status (RFC
// 3463), which begins with the same digit: 550 5.1.1.
func (f *Facts) ofSMTP(w *wording) (riverdlq.Class, bool) {
	reply := ""
	if f.mails() && isFailure([]byte(f.Code)) {
		reply = f.Code
	}
	for i := 0; reply == "" && i+3 < len(w.list); i++ {
		if isFailure(w.at(i)) && len(w.at(i+1)) == 1 && w.at(i)[0] == w.at(i + 1)[0] && isNumber(w.at(i+2)) && isNumber(w.at(i+3)) {
			reply = string(w.at(i))
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

// isFailure reports whether a word is the number of a failure, in HTTP or SMTP: 400 to 599.
func isFailure(word []byte) bool {
	return len(word) == 3 && (word[0] == '4' || word[0] == '5') && isNumber(word)
}

func isNumber(word []byte) bool {
	return !slices.ContainsFunc(word, func(c byte) bool { return kindOf(c) != digitByte })
}

// mails reports whether the error is one of a mail client's, whose codes are no HTTP statuses.
func (f *Facts) mails() bool {
	name := strings.ToLower(bounded(f.Type))
	return strings.Contains(name, "smtp") || strings.Contains(name, "mail")
}

// index is the table, as it is asked.
type index struct {
	lines   []line
	names   names
	phrases phrases
}

func newIndex(lines []line) *index {
	t := &index{lines: lines, names: names{}, phrases: phrases{line: none}}
	for i, l := range lines {
		for pattern := range strings.SplitSeq(l.names, ",") {
			if pattern = strings.Join(strings.Fields(pattern), " "); pattern != "" {
				t.names.add(pattern, i)
			}
		}
		for phrase := range strings.SplitSeq(l.texts, ",") {
			if phrase = strings.TrimSpace(phrase); phrase != "" {
				t.phrases.add(phrase, i)
			}
		}
	}
	return t
}

var known, last = newIndex(table), newIndex(weak)

// rates are the texts of rate limits alone.
var rates = newIndex(slices.DeleteFunc(slices.Clone(table), func(l line) bool { return l.rule != "rate-limit" })).phrases

// inText returns the first line of what a text says, in its own words or with the name of an error.
func (t *index) inText(w *wording) int {
	best := t.namesIn(w)
	for i := range w.list {
		best = min(best, t.phrases.find(w, i))
	}
	return best
}

// namesIn returns the first line of the names of errors in a text, such as FileNotFoundError.
func (t *index) namesIn(w *wording) int {
	best := none
	for i := range w.list {
		if from := w.list[i].name; w.list[i].last && i > from && i-from <= maxNameWords && isGeneric(w.at(i)) {
			best = min(best, t.names.ofWords(w, from, i+1))
		}
	}
	return best
}

// Classify returns an error's class by the built-in table, and the name of its line. It always answers: what nothing
// matches is unknown.
func Classify(f Facts) (riverdlq.Class, string) {
	if f.Class != "" && slices.Contains(riverdlq.Classes(), f.Class) {
		return f.Class, "worker"
	}
	if f.Panic {
		return riverdlq.ClassCodeBug, "panic"
	}
	status, inContext, retryAfter := f.answer()
	if !inContext && (f.mails() || http.StatusText(status) == "" && ClassifyStatus(status) != riverdlq.ClassOutage) {
		status = 0 // a code of another sort
	}
	of := ClassifyStatus(status)
	switch {
	case status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable || status == http.StatusGatewayTimeout:
		return of, statusRule
	case retryAfter && status >= 400:
		if of.Permanent() || of == riverdlq.ClassUnknown {
			of = riverdlq.ClassRateLimited // it asks to be sent again, but not at once
		}
		return of, statusRule
	}
	if class, ok := transportClasses[f.Type]; ok {
		return class, "transport"
	}
	message := f.said()
	w := wordsOf(message)
	if l := f.reported(message, w, status); l != nil {
		return l.class, l.rule
	}
	if class, ok := ofGRPC(message); ok {
		return class, grpcStatus
	}
	if l, ok := f.ofSQL(message, status); ok {
		return l.class, l.rule
	}
	if class, ok := f.ofSMTP(w); ok {
		return class, "smtp-reply"
	}
	if status == http.StatusForbidden && rates.in(w) {
		return riverdlq.ClassRateLimited, "rate-limit" // GitHub, Google and Kubernetes answer so
	}
	if status >= 400 && of != riverdlq.ClassUnknown {
		return of, statusRule
	}
	if strings.Contains(f.Type, " ") { // it is a text
		w = wordsOf(bounded(f.Type) + ": " + message)
	}
	if i := known.inText(w); i != none {
		return table[i].class, table[i].rule
	}
	if of := ClassifyStatus(statusIn(w)); of != riverdlq.ClassUnknown {
		return of, statusRule
	}
	for _, i := range []int{last.names.ofName(f.Type), last.inText(w)} {
		if i != none {
			return weak[i].class, weak[i].rule
		}
	}
	return riverdlq.ClassUnknown, "none"
}

// transportClasses are the classes of deliveries without an answer, by the types that deliveries give them.
var transportClasses = map[string]riverdlq.Class{
	"TIMEOUT_ERROR":      riverdlq.ClassTransient,
	"CONNECTION_REFUSED": riverdlq.ClassTransient,
	"CONNECTION_RESET":   riverdlq.ClassTransient,
	"CONNECTION_ERROR":   riverdlq.ClassTransient,
	"DNS_ERROR":          riverdlq.ClassTransient,
	"TLS_ERROR":          riverdlq.ClassTransient,
}

// said is what the message says of the error, without where a delivery was sent.
func (f *Facts) said() string {
	text := bounded(f.Message)
	if rest, ok := strings.CutPrefix(text, "POST "); ok {
		if _, after, ok := strings.Cut(rest, ": "); ok {
			return after
		}
	}
	return text
}

// reported is the line of a type or code that was reported: by the worker or destination, or at the head of the message,
// where most languages put it.
func (f *Facts) reported(message string, w *wording, status int) *line {
	if class, ok := grpcClass(bounded(f.Code)); ok {
		return &line{rule: grpcStatus, class: class}
	}
	i := known.names.ofName(f.Code)
	if i == none {
		i = known.names.ofName(f.Type)
	}
	if i == none {
		i = headOf(message)
	}
	if i == none && status == http.StatusInternalServerError {
		if i = known.inText(w); i != none && table[i].class != riverdlq.ClassCodeBug {
			i = known.namesIn(w)
		}
	}
	if i == none {
		return nil
	}
	for _, d := range disguises {
		if table[i].rule == d.rule && d.phrases.in(w) {
			return &d.as
		}
	}
	return &table[i]
}

// disguises are errors that their types do not say: a failed fetch is a TypeError, a topic that does not exist takes time to
// be found missing, and so is a record that a job's arguments name.
var disguises = []struct {
	rule    string
	phrases *phrases
	as      line
}{
	{"nil-dereference", phrasesOf("fetch failed", "failed to fetch", "load failed", "networkerror when attempting"), line{rule: "connection", class: riverdlq.ClassTransient}},
	{"decode", phrasesOf("trying to deserialize arguments"), line{rule: "not-found", class: riverdlq.ClassNotFound}},
	{"timeout", phrasesOf("not present in metadata"), line{rule: "not-found", class: riverdlq.ClassNotFound}},
}

func phrasesOf(texts ...string) *phrases {
	p := &phrases{line: none}
	for i, text := range texts {
		p.add(text, i)
	}
	return p
}

func (p *phrases) in(w *wording) bool {
	for i := range w.list {
		if p.find(w, i) != none {
			return true
		}
	}
	return false
}

// maxHeads is how many names of errors may stand at the head of a message, the outer before the inner.
const maxHeads = 4

// headOf is the line of the name that a message begins with: "Uncaught TypeError: …", "java.io.IOException: …", "TooManyRequests".
func headOf(message string) int {
	for range maxHeads {
		head, rest, more := strings.Cut(message[:min(len(message), maxNameBytes)], ": ")
		if i := strings.IndexByte(head, '\n'); i >= 0 {
			head, more = head[:i], false
		}
		if more && isFailure([]byte(head[:min(len(head), 3)])) { // a status line
			message = rest
			continue
		}
		fields := strings.Fields(head)
		if len(fields) == 0 || len(fields) > 3 {
			return none
		}
		name := fields[len(fields)-1]
		w := wordsOf(name)
		if n := len(w.list); n == 0 || n == 1 && strings.ToUpper(name) != name {
			return none
		}
		if i := known.names.ofName(name); i != none || !more {
			return i
		}
		message = rest
	}
	return none
}

// ofSQL is the line of a SQLSTATE: the code, or what stands in the text behind that word, or at its beginning.
func (f *Facts) ofSQL(text string, status int) (line, bool) {
	state := ""
	if len(f.Code) == 5 && status == 0 {
		state = f.Code
	} else if _, after, ok := strings.Cut(text, "SQLSTATE"); ok {
		state = strings.TrimLeft(after[:min(len(after), 20)], " :=[")
	} else if len(text) > 5 && text[5] == ':' {
		state = text
	}
	if len(state) < 5 || strings.ContainsFunc(state[:5], func(c rune) bool { return (c < '0' || c > '9') && (c < 'A' || c > 'Z') }) {
		return line{}, false
	}
	for _, n := range []int{5, 3, 2} {
		if l, ok := sqlClasses[state[:n]]; ok {
			return l, true
		}
	}
	return line{}, false
}

// statusIn is the HTTP status that a text names, 0 for none: at its beginning, or a few words after what tells of one.
func statusIn(w *wording) int {
	told := -1 // the last word that tells of a status
	for i := range w.list {
		switch word := w.at(i); {
		case isFailure(word) && (i == 0 || told >= 0 && i-told <= maxGapWords):
			n, _ := strconv.Atoi(string(word)) // three digits
			return n
		case len(word) > 2 && isNumber(word):
			told = -1 // another number
		default:
			switch string(word) {
			case "http", "status", "code", "returned", "response", "responded":
				told = i
			}
		}
	}
	return 0
}

// grpcLeads stand before the name of a gRPC status in the texts of Go's, Rust's and Python's libraries.
var grpcLeads = []string{"rpc error: code = ", "status: ", "StatusCode."}

// ofGRPC is the class of a gRPC status in a text.
func ofGRPC(text string) (riverdlq.Class, bool) {
	for _, lead := range grpcLeads {
		if _, after, ok := strings.Cut(text, lead); ok {
			name := after[:min(len(after), maxNameBytes)]
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
	class, ok := grpcClasses[strings.ToLower(strings.ReplaceAll(name, "_", ""))]
	return class, ok
}

// trimPackage keeps the function of a stack frame readable.
func trimPackage(frame string) string {
	if i := strings.LastIndexByte(frame, '/'); i >= 0 {
		return frame[i+1:]
	}
	return frame
}
