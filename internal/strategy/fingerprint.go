package strategy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/dlqd/dlqd/internal/cause"
)

// GroupingMethod is the version of [Fingerprint]. It must be increased if Fingerprint changes so that it returns
// another value for a stored entry.
const GroupingMethod = 2

// The lengths of the fingerprints of each method, in hexadecimal digits. They differ, so that [MethodOf] can tell the
// method from the length.
const (
	digits1 = 16
	digits2 = 20
)

// MethodOf returns the grouping method of a fingerprint, or 0 if the text is not a fingerprint.
func MethodOf(fingerprint string) int {
	switch len(fingerprint) {
	case digits1:
		return 1
	case digits2:
		return GroupingMethod
	}
	return 0
}

// Failure is the input of a fingerprint: the columns of an entry's last failure.
type Failure struct {
	Type    string          // error_type
	Code    string          // error_code
	Title   string          // error_title
	Message string          // error_message; the first 8 KiB count
	Trace   string          // error_stack_trace
	Context json.RawMessage // error_context
}

// Fingerprint returns the same value for failures that have the same cause: 20 hexadecimal digits. It is a hash of the
// first of the following that names the cause: the code with the type, or the type that a receiver reported; the title;
// the message.
//
// Numbers, ids, dates, names of people and quoted values are removed from the title and the message before. If there is
// a stack trace, the hash includes the innermost frame of the application.
func Fingerprint(f *Failure) string {
	f = f.read()
	errorType, code, answered := f.Type, f.Code, f.answered()
	if cause.IsGeneric(errorType) {
		errorType = ""
	}
	if cause.IsGeneric(code) || cause.IsStatus(code) {
		code = ""
	}
	// A SQLSTATE or a gRPC status from a worker does not name a cause, because errors with different causes have the same
	// code. A code from a receiver names a cause.
	named := code != "" && (answered || !sqlState.MatchString(code) && !isGRPC(code)) ||
		answered && errorType != "" && !ownType.MatchString(errorType)
	message, frame := f.Message, ""
	if f.Trace != "" {
		frame = ownFrame(f.Trace)
	}
	if frame == "" {
		message, frame = splitTrace(message)
	}
	var reason []string //nolint:prealloc // one of these
	switch {
	case named && ownType.MatchString(errorType):
		reason = []string{"code", "", code}
	case named:
		reason = []string{"code", errorType, code}
	case f.Title != "":
		reason = []string{"title", errorType, code, normalize(f.Title)}
	default:
		reason = []string{"message", errorType, code, normalize(message)}
	}
	sum := sha256.Sum256([]byte(strings.Join(append(reason, frame), "\x00")))
	return hex.EncodeToString(sum[:digits2/2])
}

var (
	// ownType matches the types that dlqd itself sets. They do not name a cause.
	ownType = regexp.MustCompile(`^(HTTP_[0-9]{3}|LOGICAL_FAILURE|TIMEOUT_ERROR|` +
		`CONNECTION_(REFUSED|RESET|ERROR)|DNS_ERROR|TLS_ERROR|panic)$`)
	// oldPrefix matches the beginning of the messages of deliveries before error_title existed. It contains the
	// destination's URL.
	oldPrefix = regexp.MustCompile(`^POST \S+: ([1-5][0-9]{2}\b)?`)
)

func isGRPC(code string) bool {
	_, ok := grpcClasses[strings.ToLower(strings.ReplaceAll(code, "_", ""))]
	return ok
}

// answered reports whether the failure was an answer with an HTTP status.
func (f *Failure) answered() bool { return f.status() != 0 }

func (f *Failure) status() int {
	var context struct {
		Status json.Number `json:"status"`
	}
	_ = json.Unmarshal(f.Context, &context)
	status, err := strconv.Atoi(context.Status.String())
	if err != nil {
		return 0
	}
	return status
}

// read returns the failure as this version of dlqd records it. If an earlier version recorded the failure of a
// delivery, read takes the cause from the body of the answer.
func (f *Failure) read() *Failure {
	if f.Title != "" || !strings.HasPrefix(f.Message, "POST ") {
		return f
	}
	match := oldPrefix.FindStringSubmatch(f.Message)
	if match == nil {
		return f
	}
	now := *f
	now.Message = strings.TrimPrefix(f.Message, match[0][:len(match[0])-len(match[1])])
	var context struct {
		Status  int             `json:"status"`
		Body    string          `json:"body"`
		Problem json.RawMessage `json:"problem"`
	}
	if match[1] == "" || json.Unmarshal(f.Context, &context) != nil || context.Status == 0 {
		return &now
	}
	answer := cause.Answer{Status: context.Status, Body: []byte(context.Body)}
	if context.Body == "" {
		answer.Body = context.Problem
	}
	found := answer.Cause()
	now.Title = found.Title
	if found.Type != "" && ownType.MatchString(f.Type) {
		now.Type = found.Type
	}
	if found.Code != "" && cause.IsStatus(f.Code) {
		now.Code = found.Code
	}
	if text := found.String(); text != "" && len(context.Problem) == 0 {
		now.Message += ": " + text
	}
	return &now
}

// Headline returns the failure's message as this version of dlqd records it: the cause, without the destination's URL.
func (f *Failure) Headline() string { return f.read().Message }

const (
	particles = `(?: (?:van|von|der|den|ten|de|la|le|di|da|del|bin|al))*`
	month     = `(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]{0,6}`
	day       = `(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]{0,6}`
	// nameWord is one word of a name: Ann, Müller, O'Neill, Anne-Marie, J.
	nameWord = `\p{Lu}(?:\.|['’]\p{Lu}\p{Ll}+|\p{Ll}+(?:['’-]\p{Lu}?\p{Ll}+)*)`
)

// variables matches the parts that differ between two failures with the same cause. The longest forms are first.
var variables = regexp.MustCompile(strings.Join([]string{
	// Quoted values. An apostrophe within a word is not a quote.
	`"[^"]*"|“[^”]*”|«[^»]*»|` + "`[^`]*`" + `|\B'[^']*'\B`,
	`[a-zA-Z][a-zA-Z0-9+.-]*://\S+|[\pL\pN._%+-]+@[\pL\pN-]+(?:\.[\pL\pN-]+)+`, // URLs, addresses of mail
	`[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b`,
	`\b(?:` + day + `,? )?(?:[0-9]{1,2} ` + month + `|` + month + ` [0-9]{1,2})\b(?:,? [0-9]{4})?`, // dates
	`[$€£¥] ?[0-9][0-9.,]*|[0-9][0-9.,]* ?(?:[$€£¥%]|[A-Z]{3}\b)`,                                  // amounts
	`\*{3}`, // masked values
}, "|"))

// names matches the name of a person after a word that announces it: "of Ann Smith", "customer Ann", "Dear Mr Smith".
var names = regexp.MustCompile(`\b([Oo]f|[Ff]or|[Bb]y) (` + nameWord + particles + `(?: ` + nameWord + `){1,2})` +
	`|\b((?i:user|customer|client|member|holder|cardholder|owner|patient|employee|recipient|payer|payee|subscriber|` +
	`tenant|merchant|dear|mr|mrs|ms|dr)\.?:?) (` +
	nameWord + particles + `(?: ` + nameWord + `){0,2})`)

// technicalWord matches words that are not part of a person's name, as in "for Payment Gateway".
var technicalWord = regexp.MustCompile(`^(Api|App|Application|Account|Address|Amount|Authentication|Authorization|` +
	`Balance|Bank|Billing|Broker|Card|Catalog|Checkout|Cluster|Code|Connection|Credit|Credits|Customer|Data|Database|` +
	`Declined|Delivery|Email|Engine|Error|Event|Exception|Failed|Failure|Field|File|Found|Funds|Gateway|Host|Id|` +
	`Inventory|Invalid|Invoice|Is|Item|Job|Key|Ledger|Limit|Management|Message|Missing|Name|Network|Not|Notification|` +
	`Order|Orders|Page|Password|Payload|Payment|Payments|Platform|Policy|Pool|Price|Pricing|Product|Provider|Proxy|` +
	`Queue|Rate|Record|Refund|Registry|Request|Required|Resource|Response|Schema|Search|Server|Service|Services|` +
	`Session|Shipping|Signature|State|Status|Stock|Storage|Store|Subscription|System|Table|Tax|Template|Tenant|Time|` +
	`Timeout|Token|Transaction|Type|Unauthorized|Unknown|Upload|User|Value|Version|Webhook|Worker)$`)

// normalize returns a text without the parts that differ between two failures with the same cause.
func normalize(text string) string {
	text = strings.ToValidUTF8(bounded(text), "?")
	text = withoutIDs(variables.ReplaceAllString(text, "?"))
	if !capitalLetter.MatchString(text) {
		return strings.Join(strings.Fields(lists.ReplaceAllString(text, "?")), " ")
	}
	text = names.ReplaceAllStringFunc(text, func(found string) string {
		match := names.FindStringSubmatch(found)
		before, name := match[1]+match[3], match[2]+match[4]
		if slices.ContainsFunc(strings.Fields(name), technicalWord.MatchString) {
			return found
		}
		return before + " ?"
	})
	return strings.Join(strings.Fields(lists.ReplaceAllString(text, "?")), " ")
}

// withoutIDs replaces each word that contains a digit by "?". An underscore joins two parts to one word. A hyphen does
// so only if the word already contains a digit.
func withoutIDs(text string) string {
	var out strings.Builder
	word, hasDigit := 0, false // the start of the current word, and whether it has a digit
	flush := func(end int) {
		if hasDigit {
			out.WriteByte('?')
		} else {
			out.WriteString(text[word:end])
		}
		hasDigit = false
	}
	for i, r := range text {
		switch {
		case r >= '0' && r <= '9':
			hasDigit = true
		case r == '_' || r == '-' && hasDigit || unicode.IsLetter(r):
		default:
			flush(i)
			out.WriteRune(r)
			word = i + utf8.RuneLen(r)
		}
	}
	flush(len(text))
	return out.String()
}

// capitalLetter matches the beginning of a possible name.
var capitalLetter = regexp.MustCompile(` \p{Lu}[\p{Ll}.'’]`)

// lists matches several removed values, or the parts of one: "?, ? and ?", "?-?".
var lists = regexp.MustCompile(`\?(?:(?:[ .,:;/+-]+|,? (?:and|or) )?\?)+`)
