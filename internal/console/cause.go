package console

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/cause"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/group"
	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/replay"
)

// headline is the cause of a failure in one line: "402 Payment Required · INSUFFICIENT_FUNDS: card declined".
type headline struct {
	Status string // status of an HTTP answer; "" for other failures
	Name   string // code or type; "" if Text contains it, or if it only says that something failed
	Text   string
}

func (h headline) String() string {
	text := h.Text
	switch {
	case h.Name != "" && text != "":
		text = h.Name + ": " + text
	case h.Name != "":
		text = h.Name
	}
	if h.Status != "" && text != "" {
		return h.Status + " · " + text
	}
	return h.Status + text
}

var (
	// codeAtEnd matches the end of a delivery's error if the answer has a code: "card declined
	// (INSUFFICIENT_FUNDS)".
	codeAtEnd = regexp.MustCompile(`^(?:(.*) )?\(([^()\s]+)\)$`)
	// urlAtStart matches the URL at the beginning of a delivery's error. Versions of dlqd that did not store the
	// destination wrote it.
	urlAtStart = regexp.MustCompile(`^POST \S+: `)
	statusType = regexp.MustCompile(`^HTTP_([1-5][0-9]{2})$`)
)

// headlineOf returns the headline of an error. The message is nil or "" if the viewer may not see it.
func headlineOf(message, errorType, code any) headline {
	h := headline{Text: urlAtStart.ReplaceAllString(strings.TrimPrefix(firstLine(message), "JobCancelError: "), "")}
	kind, name := fmt.Sprint(deref(errorType)), fmt.Sprint(deref(code))
	text := h.Text
	if status, rest, ok := cutStatus(text); ok {
		h.Status, h.Text = status, rest
	} else if before, after, _ := strings.Cut(text, ": "); !strings.Contains(before, " ") {
		// The text of a riverdlq.Error, which River stores, begins with the error's type.
		if status, rest, ok := cutStatus(after); ok {
			h.Status, h.Text = status, rest
		}
	}
	if of := statusType.FindStringSubmatch(kind); of != nil && h.Text == "" && h.Status == "" {
		status, _ := strconv.Atoi(of[1])
		h.Status = strings.TrimSpace(of[1] + " " + http.StatusText(status))
	}
	if h.Status != "" {
		if found := codeAtEnd.FindStringSubmatch(h.Text); found != nil {
			h.Text, h.Name = found[1], found[2]
			return h
		}
		if !cause.IsGeneric(name) && !cause.IsStatus(name) && !strings.Contains(h.Text, name) {
			h.Name = name
		}
		return h
	}
	if !cause.IsGeneric(kind) && !statusType.MatchString(kind) && !strings.HasPrefix(h.Text, kind) {
		h.Name = kind
	}
	return h
}

// typeInWords returns an error type in words: "HTTP_402" is "402 Payment Required".
func typeInWords(errorType string) string {
	if statusType.MatchString(errorType) {
		return headlineOf("", errorType, nil).Status
	}
	return errorType
}

// cutStatus splits a text that begins with the status line of an HTTP answer: "402 Payment Required: card declined".
func cutStatus(text string) (status, rest string, ok bool) {
	digits := text[:min(3, len(text))]
	if !cause.IsStatus(digits) {
		return "", "", false
	}
	status = digits
	if code, _ := strconv.Atoi(digits); http.StatusText(code) != "" {
		status += " " + http.StatusText(code)
	}
	rest, ok = strings.CutPrefix(text, status)
	return status, strings.TrimPrefix(rest, ": "), ok && (rest == "" || strings.HasPrefix(rest, ": "))
}

// exchange is the request of a failed delivery and its answer.
type exchange struct {
	Method, URL string
	Sent        []header
	Body        string // body of the request; "" if the viewer may not see it
	BodyHidden  bool
	Status      string // status of the answer; "" if there was none
	Received    []header
	Reply       []piecePart // body of the answer
	Cut         bool        // only the beginning of the answer's body is stored or shown
	Problem     string      // why there was no answer
}

// piecePart is a part of an answer's body. Marked is set for the part that states the cause.
type piecePart struct {
	Text   string
	Marked bool
}

// maxReply limits how much of a body the exchange shows, in bytes. The payload and the error's context show the whole
// body.
const maxReply = 4 << 10

// exchangeOf returns the exchange of the last failed delivery; nil for a job that sent nothing. Without an answer of
// the destination, it has a Problem and no reply.
func (l *deadLetterPage) exchangeOf() *exchange {
	if !l.IsMessage() || l.Destination == nil {
		return nil
	}
	x := &exchange{Method: http.MethodPost, URL: fmt.Sprint(deref(l.DestinationURL)), BodyHidden: l.Hidden}
	own := l.deliveryHeaders()
	if grpc.IsURL(x.URL) {
		x.Method, own = "gRPC", own[1:] // omit the Content-Type header
	}
	x.Sent = slices.Concat(own, l.Headers)
	if !l.Hidden {
		x.Body = clipBytes(pretty(l.Payload), maxReply)
	}
	var context struct {
		Status     json.Number       `json:"status"`
		GRPCStatus string            `json:"grpcStatus"`
		Body       *string           `json:"body"`
		Problem    json.RawMessage   `json:"problem"`
		RetryAfter json.Number       `json:"retryAfterSeconds"`
		Headers    map[string]string `json:"headers"`
	}
	_ = json.Unmarshal(l.ErrorContext, &context) // if the context is masked as a whole, context stays empty
	cause := headlineOf(l.ErrorMessage, l.ErrorType, l.ErrorCode)
	if x.Status = cause.Status; x.Status == "" && context.Status != "" {
		x.Status = context.Status.String()
	}
	x.Status = cmp.Or(x.Status, context.GRPCStatus)
	if x.Status == "" {
		x.Problem = cause.String()
		return x
	}
	for _, name := range slices.Sorted(maps.Keys(context.Headers)) {
		x.Received = append(x.Received, header{name, context.Headers[name]})
	}
	if context.RetryAfter != "" && context.Headers["Retry-After"] == "" {
		x.Received = append(x.Received, header{"Retry-After", context.RetryAfter.String()})
	}
	reply := ""
	switch {
	case len(context.Problem) > 0:
		reply = pretty(context.Problem)
	case context.Body != nil && json.Valid([]byte(*context.Body)):
		reply = pretty(json.RawMessage(*context.Body))
	case context.Body != nil:
		reply = *context.Body
	}
	shown := clipBytes(reply, maxReply)
	x.Cut = len(shown) < len(reply)
	x.Reply = markReason(shown, cause)
	return x
}

// markReason splits the body of an answer around the texts that the headline took from it.
func markReason(body string, cause headline) []piecePart {
	if body == "" {
		return nil
	}
	var reasons []string
	for _, text := range append([]string{cause.Name, cause.Text}, strings.Split(cause.Text, ": ")...) {
		if text = strings.TrimSuffix(text, "…"); len(text) > 2 && text != "***" {
			reasons = append(reasons, regexp.QuoteMeta(text))
		}
	}
	if reasons == nil {
		return []piecePart{{Text: body}}
	}
	var parts []piecePart
	from := 0
	for _, at := range regexp.MustCompile(strings.Join(reasons, "|")).FindAllStringIndex(body, -1) {
		parts = append(parts, piecePart{Text: body[from:at[0]]}, piecePart{Text: body[at[0]:at[1]], Marked: true})
		from = at[1]
	}
	return append(parts, piecePart{Text: body[from:]})
}

// clipBytes returns at most limit bytes of a text, without cutting a character.
func clipBytes(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	return strings.ToValidUTF8(text[:limit], "") + "…"
}

// likeness describes the failure group of an entry, from rollups and replay runs.
type likeness struct {
	Group  *group.Group
	Window window   // of the group's trend
	Runs   []string // newest first
}

// likeOf reads the failure group of an entry, and the replay runs that selected the group. It returns nil if the entry
// is not classified, or if there is neither a group nor a run that the viewer may see.
func (in *request) likeOf(e *api.EntryDetail) (*likeness, error) {
	if e.Fingerprint == nil || *e.Fingerprint == "" {
		return nil, nil //nolint:nilnil // an entry that is not classified has no group
	}
	like := &likeness{}
	err := inParallel(
		func() error {
			input := api.GroupsInput{Queue: e.Queue, Fingerprint: *e.Fingerprint, Over: "7d", Limit: 1}
			week := windowOf(input.Over, "")
			like.Window = week
			page, _, err := callIfAllowed(in, api.ListGroups, input)
			if err != nil || len(page.Groups) == 0 {
				return err
			}
			if fit := fitting(in.now.Sub(page.Groups[0].FirstSeen), week); fit != week {
				like.Window, input.Over = fit, fit.Over
				if page, _, err = callIfAllowed(in, api.ListGroups, input); err != nil || len(page.Groups) == 0 {
					return err
				}
			}
			like.Group = &page.Groups[0]
			return nil
		},
		func() error {
			runs, _, err := callIfAllowed(in, api.ListReplays, api.None{})
			if err == nil {
				like.Runs = runsOfGroup(runs.Runs, e.Queue, *e.Fingerprint, in.zone())
			}
			return err
		},
	)
	if err != nil || like.Group == nil && like.Runs == nil {
		return nil, err
	}
	return like, nil
}

// maxRunsShown limits the replay runs of a group that an entry's page shows.
const maxRunsShown = 3

// runsOfGroup describes the latest maxRunsShown runs whose filter names a failure group and that have outcomes. The
// numbers of a run count all its entries. They are the numbers of the group only if the filter selects no other group.
func runsOfGroup(runs []*replay.Run, queue, fingerprint string, zone *time.Location) (list []string) {
	for _, run := range runs {
		var chosen filter.Filter
		if json.Unmarshal(run.Filter, &chosen) != nil || run.Succeeded+run.Failed == 0 || len(list) == maxRunsShown {
			continue
		}
		names := false
		for _, of := range chosen.Fingerprint {
			names = names || of != "" && strings.HasPrefix(fingerprint, of)
		}
		if len(chosen.Queue) > 0 {
			names = names && slices.ContainsFunc(chosen.Queue, func(of string) bool { return access.MatchPattern(of, queue) })
		}
		if !names {
			continue
		}
		what := number(run.Replayed) + " of this group"
		if len(chosen.Fingerprint) > 1 || len(chosen.Queue) != 1 || chosen.Queue[0] != queue {
			what = plural(run.Replayed, "dead letter") + " of this and perhaps of other groups"
		}
		list = append(list, fmt.Sprintf("%s replayed %s on %s: %s recovered, %s failed again.", run.Actor, what,
			weekdayOf(run.CreatedAt, zone), number(run.Succeeded), number(run.Failed)))
	}
	return list
}

// weekdayOf names a time: by weekday and time of day if it is within the last six days, otherwise by date.
func weekdayOf(at time.Time, zone *time.Location) string {
	if time.Since(at) < 6*24*time.Hour {
		return at.In(zone).Format("Monday, 15:04 MST")
	}
	return at.In(zone).Format("2 Jan 2006")
}
