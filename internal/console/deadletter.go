package console

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

// deadLetterInterval is the render interval of an open dead letter.
const deadLetterInterval = 5 * time.Second

type deadLetterPage struct {
	api.EntryDetail

	Sentence string
	Payload  json.RawMessage // the payload that the page shows and edits: that of the message, or the args of the job
	Headers  []header        // headers of the message
	RuleAt   string          // file and line of the rule in the policy in force; "" if it has no such rule
	Earlier  bool            // another version of the policy chose the rule
	Attempts []attempt
	Actions  []verb
	Frames   []stackFrame
	Copies   []copyText
	Tree     *node
	Curl     string // the request of a redelivery; "" for a job of an application
	Operator bool
	Masked   bool   // a part of the entry is shown as ***
	Revealed bool   // this request shows the entry unmasked
	Hidden   bool   // the viewer may not see payloads
	RiverUI  string // address of River UI; "" if not configured
	Asked    askedFor
	Cause    headline
	Exchange *exchange // nil if the job sent nothing
	Like     *likeness // nil if the group is unknown, and in live renderings: the page keeps the first one
}

// IsMessage reports whether the job delivers a message.
func (l *deadLetterPage) IsMessage() bool { return l.JobKind == message.JobKind }

// CanEdit reports whether the form to edit the payload is shown. A payload with masked parts cannot
// be edited, because *** would be sent.
func (l *deadLetterPage) CanEdit() bool {
	return l.Editable() && (l.Revealed || !bytes.Contains(l.Payload, []byte("***")))
}

// TooLong reports whether the payload exceeds maxShown.
func (l *deadLetterPage) TooLong() bool { return len(l.Payload) > maxShown }

// Editable reports whether the viewer may replay the entry with another payload. If the payload is masked, the viewer
// has to reveal it first.
func (l *deadLetterPage) Editable() bool {
	return l.Operator && !l.Hidden && !l.TooLong() && slices.Contains(movesFrom("replay"), l.Status)
}

// header is a header of the message. Deliveries send it unchanged.
type header struct{ Name, Value string }

// attempt is an attempt of the job, or a redelivery. In a list, the next step comes first, if its time is known; then
// the attempts, newest first.
type attempt struct {
	At     time.Time
	Title  string
	By     string // who started the redelivery
	Detail string // strategy, duration and load of the machine; "" if unknown
	Error  string
	OK     bool
	Due    bool
	Wait   time.Duration // time since the previous attempt; 0 for the first attempt, and below a second
}

// verb is a move of an entry.
type verb struct {
	Name, Label, Consequence string
	Why                      string // why the move is not possible now; "" if it is
	Key                      string
}

func (c *Console) deadLetter(in *request) (*view, error) {
	detail, err := call(in, api.GetEntry, api.EntryInput{ID: in.PathValue("id")})
	if err != nil {
		return nil, err
	}
	l := newDeadLetterPage(in, detail)
	if _, live := isLive(in.Context()); !live {
		if l.Like, err = in.likeOf(detail); err != nil {
			return nil, err
		}
	}
	return &view{
		Template: "deadletter", Title: clip(80, cmp.Or(l.Cause.String(), firstLine(detail.Kind))) + " · " + short(detail.ID),
		Data: l, Interval: deadLetterInterval, Section: "/dead-letters",
	}, nil
}

func newDeadLetterPage(in *request, detail *api.EntryDetail) *deadLetterPage {
	l := &deadLetterPage{EntryDetail: *detail, Operator: in.me().May(access.Operator)}
	l.Payload, l.Headers = payloadOf(detail)
	l.findRule(in.console.Policy())
	l.Sentence = sentenceOf(&detail.Entry)
	if l.Checkpoint != nil && slices.Contains(movesFrom("replay"), l.Status) {
		l.Sentence += " When redelivered, it " + l.Checkpoint.String() + "."
	}
	if l.StageReached != "" {
		l.Sentence += " It had reached stage " + l.StageReached + "."
	}
	l.Attempts = attemptsOf(&detail.Entry)
	l.Actions = verbsOf(detail.Status, missingRole(in.me(), access.Operator))
	if detail.ErrorStackTrace != nil {
		l.Frames = framesOf(*detail.ErrorStackTrace)
	}
	l.Hidden = len(detail.OriginalEvent) == 0 || string(detail.OriginalEvent) == "null"
	l.Tree = treeOf(l.Payload)
	l.Masked = bytes.Contains(detail.OriginalEvent, []byte("***")) || bytes.Contains(detail.EditedEvent, []byte("***")) ||
		strings.Contains(fmt.Sprint(deref(detail.ErrorMessage)), "***")
	l.Curl = l.curl(in.console.Policy())
	l.Cause = headlineOf(detail.ErrorMessage, detail.ErrorType, detail.ErrorCode)
	l.Exchange = l.exchangeOf()
	l.RiverUI = in.console.RiverUI
	l.Asked = in.askedFor(detail.ID)
	id := detail.ID.String()
	l.Copies = copies("dlqd show "+id, fmt.Sprintf(`SELECT * FROM dlq.find('{"ids": [%[1]q]}'); SELECT * FROM dlq.audit('{"entryId": %[1]q}');`, id), in.curl(address(api.GetEntry, api.EntryInput{ID: id}))) //nolint:unqueryvet // for people
	l.Copies = append(l.Copies, recordCopies(in.console.Policy(), detail.Record)...)
	return l
}

// findRule finds the rule that chose the strategy in the policy in force.
func (l *deadLetterPage) findRule(p *policy.Policy) {
	if l.Rule == nil {
		return
	}
	l.Earlier = l.ConfigVersion != nil && *l.ConfigVersion != p.Version()
	for i := range p.Routing.Rules {
		if p.Routing.Rules[i].Name == *l.Rule {
			l.RuleAt = p.Place(p.Where("dlq-routing", fmt.Sprintf("rules[%d]", i)))
		}
	}
}

// payloadOf returns the payload and the headers that pages show: from the edited event, if there is one, otherwise from
// the original event. For a job of an application, the payload is the job's args, and there are no headers.
func payloadOf(e *api.EntryDetail) (json.RawMessage, []header) {
	event := e.OriginalEvent
	if len(e.EditedEvent) > 0 && string(e.EditedEvent) != "null" {
		event = e.EditedEvent
	}
	payload, err := replay.Payload(e.JobKind, event)
	if err != nil || e.JobKind != message.JobKind {
		return event, nil
	}
	var message struct {
		Payload json.RawMessage `json:"payload"`
		Headers json.RawMessage `json:"headers"`
	}
	_ = json.Unmarshal(event, &message) // cannot fail: replay.Payload has parsed it
	if !json.Valid(payload) {           // masking replaces a payload that is stored as text as a whole
		payload = json.RawMessage(cmp.Or(string(message.Payload), string(event)))
	}
	return payload, headersOf(message.Headers)
}

// headersOf reads headers. Values that are not strings are shown as JSON.
func headersOf(raw json.RawMessage) []header {
	var of map[string]json.RawMessage
	if json.Unmarshal(raw, &of) != nil {
		return nil
	}
	list := make([]header, 0, len(of))
	for _, name := range slices.Sorted(maps.Keys(of)) {
		var value string
		if json.Unmarshal(of[name], &value) != nil {
			value = string(of[name])
		}
		list = append(list, header{name, value})
	}
	return list
}

// sentenceOf summarizes the state of an entry: what happens next, and why.
func sentenceOf(e *deadletter.Entry) string {
	var sentences []string
	add := func(text string) { sentences = append(sentences, upper(text)+".") }
	switch e.Status {
	case deadletter.Manual:
		reason := reasonOf(e, true)
		switch {
		case e.ParkedBy != nil:
			add("parked by " + *e.ParkedBy)
			if reason != "" {
				add(reason)
			}
		case reason != "":
			add("waiting for a person: " + reason)
		default:
			add("waiting for a person")
		}
	case deadletter.Pending:
		if e.Next != nil {
			add(*e.Next)
			if reason := reasonOf(e, !nextNamesRule(e)); reason != "" {
				add(reason)
			}
		}
	case deadletter.Processing:
		text := "redelivery under way"
		if e.RedeliveryJobID != nil {
			text += fmt.Sprintf(" as job %d", *e.RedeliveryJobID)
		}
		add(text)
	case deadletter.Returned:
		add("returned: its record is published again, and waits for its consumer group")
	case deadletter.Resolved:
		how := map[string]string{
			"automatic_retry": "an automatic redelivery succeeded", "manual_retry": "a replay succeeded",
			"manual_resolution": "an operator closed it as done elsewhere",
		}[fmt.Sprint(deref(e.ResolutionStrategy))]
		add("resolved: " + cmp.Or(how, "its work is done"))
	case deadletter.Failed:
		add("failed: dlqd made " + plural(e.DLQRetryCount, "redelivery", "redeliveries") + ", the maximum")
	case deadletter.Archived:
		how := "its retention ended"
		switch fmt.Sprint(deref(e.ResolutionStrategy)) {
		case "discard":
			how = "an operator discarded it"
		case "expired":
			how = "its work was out of date"
		}
		add("archived: " + how)
	}
	if e.DLQRetryCount > 0 && e.Status.Open() {
		add(fmt.Sprintf("%s of %d made", plural(e.DLQRetryCount, "redelivery", "redeliveries"), e.DLQMaxRetries))
	}
	return strings.Join(sentences, " ")
}

// nextNamesRule reports whether the next step of a pending entry (dlq.next_step) names the entry's rule while automatic
// redelivery is on. It does so if the entry waits for a time, for its place in the pace, or for automatic redelivery.
// It does not if the entry is undecided, or waits for a condition or its ordering key.
func nextNamesRule(e *deadletter.Entry) bool {
	return e.Strategy != nil && (e.WaitingFor == nil || *e.WaitingFor == "pace" || *e.WaitingFor == "automatic")
}

// reasonOf returns which rule chose the class and what the class means, or "" if neither is known.
// It omits the name of the rule unless withRule is set.
func reasonOf(e *deadletter.Entry, withRule bool) string {
	class := fmt.Sprint(deref(e.ErrorClass))
	if means := classOf(class)["Means"]; class != "" && means != "" {
		class += " (" + means + ")"
	}
	switch rule := fmt.Sprint(deref(e.Rule)); {
	case rule == "unparked": // the next step already says so
		return ""
	case rule == "single-attempt":
		return "its job had one attempt"
	case rule == policy.RuleWorkerLost:
		return "its worker died, or the job never ended, twice or more; the job may kill its worker"
	case rule == "backfilled":
		return "its job failed before dlqd was attached"
	case rule != "" && class != "" && withRule:
		return "rule " + rule + " classifies its error as " + class
	case class != "":
		return "the class of its error is " + class
	}
	return ""
}

func upper(text string) string {
	if text == "" {
		return text
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

// attemptTitle returns the title of an attempt before the entry.
func attemptTitle(e *deadletter.Entry, number int) string {
	if e.Record != nil {
		return fmt.Sprintf("attempt %d, outside dlqd", number)
	}
	return fmt.Sprintf("attempt %d of job %d", number, e.RiverJobID)
}

// attemptsOf lists the attempts: the next one, then the newest first.
func attemptsOf(e *deadletter.Entry) []attempt {
	var before, after []storedAttempt
	_ = json.Unmarshal(e.RetryHistory, &before)
	_ = json.Unmarshal(e.ReplayAttempts, &after)
	var list []attempt
	for _, k := range before {
		list = append(list, attempt{At: k.At, Title: attemptTitle(e, k.Attempt), Detail: k.detail(), Error: k.Error})
	}
	for i, k := range after {
		at := k.EndedAt
		if at.IsZero() {
			at = k.At
		}
		title := fmt.Sprintf("redelivery %d, job %d: %s", i+1, k.JobID, k.Outcome)
		ok := k.Outcome == "completed"
		list = append(list, attempt{At: at, Title: title, By: k.Actor, Detail: k.detail(), Error: k.Error, OK: ok})
	}
	slices.Reverse(list)
	if len(list) == 0 { // River writes a job's errors a moment after its state, so they may be missing
		list = append(list, attempt{
			At: e.LastFailedAt, Title: attemptTitle(e, int(e.RetryCount)), Error: fmt.Sprint(deref(e.ErrorMessage)),
		})
	}
	if e.Status == deadletter.Pending && e.NextRetryAt != nil {
		list = append([]attempt{{At: *e.NextRetryAt, Title: nextStepTitle(e), Due: true}}, list...)
	}
	for i := range list[1:] {
		if wait := list[i].At.Sub(list[i+1].At); wait >= time.Second {
			list[i].Wait = wait
		}
	}
	return list
}

// storedAttempt is an attempt or a redelivery as stored in an entry.
type storedAttempt struct {
	At      time.Time `json:"at"`
	EndedAt time.Time `json:"endedAt"`
	Attempt int       `json:"attempt"`
	Error   string    `json:"error"`
	Outcome string    `json:"outcome"`
	JobID   int64     `json:"jobId"`
	Actor   string    `json:"actor"`

	Strategy           string                `json:"strategy"`           // of a redelivery
	ProcessingDuration *float64              `json:"processingDuration"` // in seconds
	SystemState        *riverdlq.SystemState `json:"systemState"`
}

// detail describes the strategy, duration and load of an attempt.
func (k *storedAttempt) detail() string {
	var known []string
	if k.Strategy != "" {
		known = append(known, "strategy "+k.Strategy)
	}
	if k.ProcessingDuration != nil {
		known = append(known, "took "+lasted(*k.ProcessingDuration))
	}
	if s := k.SystemState; s != nil {
		known = append(known, fmt.Sprintf("CPU %g %%, memory %g %%", s.CPU, s.Memory))
	}
	return strings.Join(known, " · ")
}

// nextStepTitle describes the next step of an entry that waits for a time: a redelivery, or a check if
// the redelivery also depends on a condition or an order.
func nextStepTitle(e *deadletter.Entry) string {
	redelivery := fmt.Sprintf("redelivery %d of %d", e.DLQRetryCount+1, e.DLQMaxRetries)
	switch {
	case e.Strategy == nil:
		return "first decision on its class and strategy"
	case e.WaitingFor != nil && *e.WaitingFor == "automatic":
		return redelivery + ", if automatic redelivery is on by then"
	case e.WaitingFor != nil && *e.WaitingFor == "run":
		return "next check for " + redelivery + ", which waits for the end of a replay run that has it"
	case e.WaitingFor != nil && *e.WaitingFor == "order":
		return "next check for " + redelivery + ", which waits for earlier work of its ordering key"
	case e.WaitingFor != nil && *e.WaitingFor != "pace" || *e.Strategy == "conditional":
		return "next check for " + redelivery + ", which waits for its conditions"
	}
	return redelivery
}

// movesFrom returns the statuses from which an operator may make a move. The API decides; pages use
// this to explain why a move is not possible.
func movesFrom(name string) []deadletter.Status {
	open := []deadletter.Status{deadletter.Pending, deadletter.Manual, deadletter.Failed}
	andReturned := append(slices.Clone(open), deadletter.Returned)
	return map[string][]deadletter.Status{
		"replay": andReturned, "discard": andReturned, "expire": open,
		"resolve": {deadletter.Manual, deadletter.Returned}, "unpark": {deadletter.Manual}, "park": {deadletter.Pending},
		"reopen": {deadletter.Resolved, deadletter.Archived, deadletter.Returned},
	}[name]
}

// verbsOf returns all moves. Why is set for moves that are not possible now.
func verbsOf(status deadletter.Status, missingRole string) []verb {
	verbs := []verb{
		{Name: "replay", Label: "Replay", Consequence: "redelivers it now, as a new job", Key: "r"},
		{Name: "resolve", Label: "Resolve", Consequence: "closes it as done elsewhere", Key: "s"},
		{
			Name: "unpark", Label: "Back to automatic", Consequence: "returns it to dlqd, which decides what happens next",
			Key: "b",
		},
		{Name: "park", Label: "Park", Consequence: "moves it to manual: dlqd does not redeliver it automatically", Key: "p"},
		{Name: "discard", Label: "Discard", Consequence: "closes it as not wanted", Key: "d"},
		{Name: "expire", Label: "Expire", Consequence: "closes it as out of date"},
		{Name: "reopen", Label: "Reopen", Consequence: "moves it to manual again", Key: "o"},
	}
	for i := range verbs {
		v := &verbs[i]
		switch {
		case missingRole != "":
			v.Why = missingRole
		case !slices.Contains(movesFrom(v.Name), status):
			from := movesFrom(v.Name)
			names := make([]string, len(from))
			for i, s := range from {
				names[i] = statusOf(s).Name
			}
			last := len(names) - 1
			text := names[last]
			if last > 0 {
				text = strings.Join(names[:last], ", ") + " or " + text
			}
			v.Why = "only for " + text + " dead letters"
		}
	}
	return verbs
}

// stackFrame is a call of a stack trace.
type stackFrame struct {
	Call, Where string
	Own         bool // a call in the application's code, not in a library or in Go
}

// framesOf parses the stack trace of a Go panic: one line with the call, one with the file and
// line.
func framesOf(trace string) []stackFrame {
	var frames []stackFrame
	lines := strings.Split(trace, "\n")
	for i := 0; i < len(lines); i++ {
		line := lines[i]
		if strings.TrimSpace(line) == "" || strings.HasPrefix(line, "goroutine ") {
			continue
		}
		f := stackFrame{Call: strings.TrimSpace(line)}
		if i+1 < len(lines) && strings.HasPrefix(lines[i+1], "\t") {
			i++
			f.Where, _, _ = strings.Cut(strings.TrimSpace(lines[i]), " +0x")
		}
		f.Own = f.Where != "" && !strings.Contains(f.Where, "/pkg/mod/") && !strings.Contains(f.Where, "/go/src/") &&
			!strings.Contains(f.Where, "/usr/local/go") && !strings.Contains(f.Where, "/vendor/") &&
			!strings.HasPrefix(f.Call, "runtime.") && !strings.HasPrefix(f.Call, "runtime/") &&
			!strings.HasPrefix(f.Call, "panic(") && !strings.Contains(f.Call, "riverqueue/river")
		frames = append(frames, f)
	}
	return frames
}

// curl returns a command that sends the same request as a redelivery, except for the signature, which depends on the
// time and a secret. It returns "" for a job of an application, if the payload is hidden or too long, and if the
// destination is unknown.
func (l *deadLetterPage) curl(p *policy.Policy) string {
	if !l.IsMessage() || l.Hidden || l.TooLong() {
		return ""
	}
	destination := p.DestinationOf(l.Queue)
	if destination == nil {
		return ""
	}
	lines := []string{"curl -X POST " + shellQuoted(destination.ShownURL())}
	own, data, last := l.deliveryHeaders(), "--data-binary ", ""
	if grpc.IsURL(destination.URL) {
		target, err := grpc.ParseURL(destination.ShownURL())
		if err != nil { // hidden
			return ""
		}
		lines, data = []string{"grpcurl"}, "-d "
		own = own[1:] // omit the Content-Type header, which grpcurl sets
		last = " " + shellQuoted(target.Host()) + " " + string(target.Service) + "/" + string(target.Method)
		if strings.HasPrefix(destination.URL, "grpc://") {
			lines[0] += " -plaintext"
		}
	}
	for _, h := range slices.Concat(l.Headers, own, []header{{"Dlqd-Entry-Id", l.ID.String()}}) {
		lines = append(lines, "-H "+shellQuoted(h.Name+": "+h.Value))
	}
	return strings.Join(append(lines, data+shellQuoted(string(l.Payload))+last), " \\\n  ")
}

// deliveryHeaders returns the headers that dlqd adds to a delivery.
func (l *deadLetterPage) deliveryHeaders() []header {
	return []header{
		{"Content-Type", "application/json"},
		{"Webhook-Id", fmt.Sprint(deref(l.EventID))},
		{"Dlqd-Kind", l.Kind},
		{"Dlqd-Queue", l.Queue},
	}
}
