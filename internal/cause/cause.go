// Package cause extracts the cause of a failure from a receiver's HTTP response: problem documents
// and other JSON, XML and SOAP faults, HTML pages, and plain text.
package cause

import (
	"bytes"
	"cmp"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// MaxBytes is the maximum number of bytes of a response that are read.
	MaxBytes = 64 << 10
	// MaxShown limits [Cause.String], and the title and the message of a cause, in bytes.
	MaxShown = 300
	// maxName limits a type or a code, in bytes.
	maxName = 200
)

// Cause is the cause of a failure as a response states it. A part that the response does not state
// is empty.
type Cause struct {
	Type    string
	Code    string
	Title   string // a text that is the same for each failure of this type
	Message string // may contain data of this one failure
}

// Paths has the paths of the parts of a cause in JSON and XML documents. A path consists of keys joined by dots. Case
// does not matter, and _ and - are ignored. Elements of an array have the path of the array. The root element of an XML
// document is not part of a path.
type Paths struct {
	Type    []string
	Code    []string
	Title   []string
	Message []string
}

// Answer is a response that reports a failure.
type Answer struct {
	Status      int
	ContentType string // the Content-Type header
	Type, Code  string // from headers; they take precedence over values in the body
	Body        []byte // only the first MaxBytes are read
	Paths       Paths  // tried before the built-in ones
	// Hide, if not nil, removes what must not be shown. Texts are passed to it before they are cut, so that it sees
	// whole secrets.
	Hide func(text string) string
}

// Cause returns the cause that the response states.
func (a *Answer) Cause() Cause {
	body := text(a.Body[:min(len(a.Body), MaxBytes)], a.ContentType)
	var c Cause
	switch {
	case body == "":
	case isHTML(body):
		c = a.ofHTML(body)
	case body[0] == '<':
		c = a.ofFields(readXML(body), body)
	case strings.ContainsRune(`{["`, rune(body[0])):
		c = a.ofFields(readJSON(body), body)
	case strings.Count(body, "\uFFFD") <= utf8.RuneCountInString(body)/4: // otherwise the body is binary
		c.Message = body
	}
	status := strconv.Itoa(a.Status)
	if a.Code != status {
		c.Code = cmp.Or(a.Code, c.Code)
	}
	c.Type, c.Code = shorten(a.hide(cmp.Or(a.Type, c.Type)), maxName), shorten(a.hide(c.Code), maxName)
	c.Title, c.Message = shorten(a.hide(c.Title), MaxShown), shorten(a.hide(c.Message), MaxShown)
	if c.Code == status {
		c.Code = ""
	}
	if a.isStatus(c.Title) {
		c.Title = ""
	}
	if a.isStatus(c.Message) || c.Message == c.Title {
		c.Message = ""
	}
	return c
}

// String returns title, message and code in at most MaxShown bytes.
func (c *Cause) String() string {
	parts := slices.DeleteFunc([]string{c.Title, c.Message}, func(part string) bool { return part == "" })
	value := strings.Join(parts, ": ")
	switch short := cut(value, MaxShown); {
	case c.Code == "" || containsWord(short, c.Code):
		return short
	case value == "":
		return c.Code
	}
	code := " (" + c.Code + ")"
	return cut(value, MaxShown-len(code)) + code
}

// containsWord reports whether text contains word with no letter, digit or _ next to it.
func containsWord(text, word string) bool {
	for from := 0; ; {
		at := strings.Index(text[from:], word)
		if at < 0 {
			return false
		}
		begin, end := from+at, from+at+len(word)
		before, _ := utf8.DecodeLastRuneInString(text[:begin])
		after, _ := utf8.DecodeRuneInString(text[end:])
		if !isWordRune(before) && !isWordRune(after) {
			return true
		}
		from = end
	}
}

func isWordRune(r rune) bool { return r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r) }

// builtInPaths lists the paths that receivers use, the most specific first: problem documents (RFC 9457),
// OAuth, JSON:API, JSON-RPC, GraphQL, SOAP 1.1 and 1.2, and the errors of Google, AWS, Stripe,
// PayPal, Salesforce, Adyen, Twilio, Spring, ASP.NET, FastAPI, Kubernetes and Elasticsearch. Keys
// are normalized by [key].
var builtInPaths = Paths{
	Type: []string{
		"error.type", "errors.type", "fault.type", "detail.type", "type", "errortype", "exceptiontype",
		"exception", "exception.type", "exception.class", "error.name", "error.class", "error.exception",
		"name",
	},
	Code: []string{
		"error.declinecode", "error.details.reason", "error.errors.reason", "details.issue",
		"errors.extensions.code", "error.extensions.code", "fault.detail.errorcode",
		"body.fault.code.subcode.value", "body.fault.detail.code", "body.fault.detail.errorcode", "code",
		"error.code", "errorcode", "error.errorcode", "errors.code", "errors.errorcode", "errcode",
		"err.code", "error.status", "fault.code", "body.fault.faultcode", "body.fault.code.value",
		"faultcode", "resultcode", "result.code", "status.code", "responsecode", "response.code",
		"messagecode", "reasoncode", "error.reason", "errors.reason", "reason", "error.error", "error",
		"status",
	},
	Title: []string{"title", "error.title", "errors.title", "problem.title", "summary", "error.summary"},
	Message: []string{
		"message", "error.message", "errors.message", "detail", "error.detail", "errors.detail",
		"errormessage", "errordescription", "error.errormessage", "error.description",
		"errors.description", "error.msg", "errors.msg", "detail.msg", "msg", "errmsg", "err.message",
		"body.fault.faultstring", "body.fault.reason.text", "faultstring", "fault.faultstring",
		"fault.message", "exception.message", "details.description", "details.message", "description",
		"error.reason", "reason", "result.message", "response.message", "usermessage", "error.usermessage",
		"developermessage", "statusmessage", "statustext", "error", "errors", "err", "messages", "details",
		"fault", "detail.message",
	},
}

// identifier matches a word without blanks, as programs write names.
var identifier = regexp.MustCompile(`^[\pL\pN$*][\pL\pN$#*]*(?:[_.:/\\#+-]+[\pL\pN$#*%]+)*[/()]*$`)

// isIdentifier reports whether a text looks like a name in a program: HTTP_ERROR, CardDeclined,
// invalid_grant. Values at paths that do not always hold names must pass it.
func isIdentifier(text string) bool {
	if len(text) > maxName || !identifier.MatchString(text) {
		return false
	}
	inner := strings.IndexFunc(text[1:], unicode.IsUpper) >= 0 || strings.ContainsAny(text, "_.:/-")
	return inner && strings.IndexFunc(text, unicode.IsLetter) >= 0
}

// genericNames lists names that say only that something failed.
var genericNames = func() map[string]bool {
	names := map[string]bool{}
	for name := range strings.FieldsSeq(`
		error errors err exception runtimeerror runtimeexception fail failed failure fault unknown unknownerror
		undefined null none nil true false n/a na about:blank blank sender receiver client server mustunderstand
		versionmismatch httperror httpexception apierror apiexception applicationerror genericerror servererror
		exceptioninfo panic throwable object string errorstring wraperror joinerror standarderror baseexception
		system.exception java.lang.exception java.lang.runtimeexception java.lang.error java.lang.throwable
		*errors.errorstring *fmt.wraperror *errors.joinerror builtins.exception ok status 0 -1`) {
		names[name] = true
	}
	return names
}()

// IsGeneric reports whether a type or code says only that something failed: Error, Exception,
// RuntimeError, soap:Server.
func IsGeneric(name string) bool {
	name = strings.ToLower(strings.TrimSpace(name))
	if _, local, ok := strings.Cut(name, ":"); ok && !strings.Contains(local, "/") && genericNames[local] { // soap:Server
		return true
	}
	return name == "" || genericNames[name] || genericNames[plain.Replace(name)]
}

var plain = strings.NewReplacer("_", "", "-", "")

// IsStatus reports whether a text is an HTTP status.
func IsStatus(text string) bool {
	n, err := strconv.Atoi(text)
	return err == nil && len(text) == 3 && (http.StatusText(n) != "" || n >= 500 && n <= 599)
}

var words = regexp.MustCompile(`[\pL]+`)

// isStatus reports whether a text says no more than the response's status: "502 Bad Gateway", "HTTP
// Status 404 – Not Found", "Error".
func (a *Answer) isStatus(value string) bool {
	if value == "" || len(value) > 100 {
		return false
	}
	left, status := lettersOf(value), lettersOf(http.StatusText(a.Status))
	for _, prefix := range []string{"http ", "status ", "error "} {
		left = strings.TrimPrefix(left, prefix)
	}
	left = strings.TrimSuffix(left, " error")
	switch {
	case left == status, left == strings.TrimSuffix(status, " error"), genericNames[left]:
		return true
	case left == "" && !strings.ContainsFunc(value, unicode.IsDigit):
		return true
	}
	return (left == "" || left == "code") && strings.Contains(value, strconv.Itoa(a.Status))
}

// lettersOf returns the words of a text in lower case, without digits and punctuation.
func lettersOf(text string) string {
	return strings.ToLower(strings.Join(words.FindAllString(strings.ReplaceAll(text, "'", ""), -1), " "))
}

// hide calls Hide, if set, with a text, and again with the result on one line.
func (a *Answer) hide(value string) string {
	if value == "" || a.Hide == nil {
		return value
	}
	return a.Hide(line(a.Hide(value)))
}

// text returns a body as text that the database can store, without blanks at its ends. It reads a body that is not
// UTF-8 as Latin-1 if contentType or the body's beginning says so.
func text(body []byte, contentType string) string {
	body = bytes.TrimPrefix(body, []byte("\uFEFF"))
	var out string
	switch latin := latin1.MatchString(contentType) || latin1.Match(body[:min(len(body), 200)]); {
	case utf8.Valid(body):
		out = string(body)
	case latin:
		runes := make([]rune, len(body))
		for i, b := range body {
			runes[i] = rune(b)
		}
		out = string(runes)
	default:
		out = strings.ToValidUTF8(string(body), "\uFFFD")
	}
	return strings.TrimSpace(strings.ReplaceAll(out, "\x00", "\uFFFD"))
}

var latin1 = regexp.MustCompile(`(?i)(?:charset|encoding)\s*=\s*["']?(?:iso-?8859-1|windows-1252|latin-?1)\b`)

// line puts a text on one line, without control characters.
func line(value string) string {
	var out strings.Builder
	blank := false
	for _, r := range value {
		if r == 0 {
			r = '\uFFFD'
		}
		switch {
		case unicode.IsSpace(r) || unicode.IsControl(r):
			blank = true
			continue
		case blank && out.Len() > 0:
			out.WriteByte(' ')
		}
		blank = false
		out.WriteRune(r)
	}
	return out.String()
}

// shorten returns a text on one line, in at most limit bytes.
func shorten(value string, limit int) string { return cut(line(value), limit) }

// cut returns at most limit bytes of a text. If the text is longer, the result ends with ….
func cut(value string, limit int) string {
	const more = "…"
	if len(value) <= limit {
		return value
	}
	end := max(limit-len(more), 0)
	for end > 0 && !utf8.RuneStart(value[end]) {
		end--
	}
	return strings.TrimRight(value[:end], " ") + more
}
