package console

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/replay"
	"github.com/dlqd/dlqd/riverdlq"
)

// letterEvery is the render interval of an open dead letter.
const letterEvery = 5 * time.Second

type letter struct {
	api.EntryDetail

	Sentence string
	Payload  json.RawMessage // shown and edited: the message's payload, or the job's args
	Headers  []header        // of the message
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
	Revealed bool   // shown unmasked by this request
	Hidden   bool   // the viewer may not see payloads
	RiverUI  string // address of River UI; "" if not configured
}

// IsMessage reports whether the job was created for a message.
func (l *letter) IsMessage() bool { return l.JobKind == message.JobKind }

// CanEdit reports whether the form to edit the payload is shown. A payload with masked parts cannot
// be edited, because *** would be sent.
func (l *letter) CanEdit() bool {
	return l.Editable() && (l.Revealed || !bytes.Contains(l.Payload, []byte("***")))
}

// TooLong reports whether the payload exceeds maxShown.
func (l *letter) TooLong() bool { return len(l.Payload) > maxShown }

// Editable reports whether the viewer may replay with another payload once the payload is unmasked.
func (l *letter) Editable() bool {
	return l.Operator && !l.Hidden && !l.TooLong() && slices.Contains(movesFrom("replay"), l.Status)
}

// header is a header of the message. Deliveries send it unchanged.
type header struct{ Name, Value string }

// attempt is one attempt of the work. The list is newest first; an attempt that is due comes before
// them.
type attempt struct {
	At     time.Time
	Title  string
	By     string // who started it
	Detail string // strategy, duration and load of the machine; "" if unknown
	Error  string
	OK     bool
	Due    bool
}

// verb is a move of an entry.
type verb struct {
	Name, Label, Consequence string
	Why                      string // why it is not possible now; "" if it is
	Key                      string
}

func (c *Console) deadLetter(in *request) (*view, error) {
	var detail api.EntryDetail
	if err := in.get("/api/dlq/entries/"+url.PathEscape(in.PathValue("id")), nil, &detail); err != nil {
		return nil, err
	}
	l := newLetter(in, &detail)
	return &view{Template: "deadletter", Title: firstLine(detail.Kind) + " " + short(detail.ID), Data: l, Every: letterEvery, Section: "/dead-letters"}, nil
}

func newLetter(in *request, detail *api.EntryDetail) *letter {
	l := &letter{EntryDetail: *detail, Operator: in.me().May(access.Operator)}
	l.Payload, l.Headers = payloadOf(detail)
	l.askPolicy(in.console.Policy())
	l.Sentence = sentenceOf(&detail.Entry)
	if l.Checkpoint != nil && slices.Contains(movesFrom("replay"), l.Status) {
		l.Sentence += " Sent again, it " + l.Checkpoint.String() + "."
	}
	l.Attempts = attemptsOf(&detail.Entry)
	l.Actions = verbsOf(detail.Status, mayNot(in.me(), access.Operator))
	if detail.ErrorStackTrace != nil {
		l.Frames = framesOf(*detail.ErrorStackTrace)
	}
	l.Hidden = len(detail.OriginalEvent) == 0 || string(detail.OriginalEvent) == "null"
	l.Tree = treeOf(l.Payload)
	l.Masked = bytes.Contains(detail.OriginalEvent, []byte("***")) || bytes.Contains(detail.EditedEvent, []byte("***")) || strings.Contains(fmt.Sprint(deref(detail.ErrorMessage)), "***")
	l.Curl = l.curl(in.console.Policy())
	l.RiverUI = in.console.RiverUI
	id := detail.ID.String()
	l.Copies = copies("dlqd show "+id, fmt.Sprintf(`SELECT * FROM dlq.find('{"ids": [%[1]q]}'); SELECT * FROM dlq.audit('{"entryId": %[1]q}');`, id), in.curl("/api/dlq/entries/"+id)) //nolint:unqueryvet // for people
	return l
}

// askPolicy finds the rule that chose the strategy in the policy in force.
func (l *letter) askPolicy(p *policy.Policy) {
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

// payloadOf returns what pages show as the payload, and the headers. For a message that is the
// submitted payload; for other jobs, the args without headers.
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
	_ = json.Unmarshal(event, &message) // replay.Payload has parsed it
	if !json.Valid(payload) {           // a payload kept as text is masked as a whole
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

func sentenceOf(e *deadletter.Entry) string {
	var said []string
	switch e.Status {
	case deadletter.Manual:
		who := "it needs a person"
		if e.ParkedBy != nil {
			who = *e.ParkedBy + " parked it"
		}
		said = append(said, "Nothing happens by itself: "+who+because(e)+".")
	case deadletter.Pending:
		if e.Next != nil {
			next := *e.Next
			if e.Rule != nil { // because adds it below
				next = strings.TrimSuffix(strings.Replace(next, " by rule "+*e.Rule, "", 1), ",")
			}
			said = append(said, upper(next)+because(e)+".")
		}
	case deadletter.Processing:
		job := ""
		if e.RedeliveryJobID != nil {
			job = fmt.Sprintf(" as job %d", *e.RedeliveryJobID)
		}
		said = append(said, "It is being redelivered"+job+".")
	case deadletter.Resolved:
		how := map[string]string{"automatic_retry": "a redelivery of dlqd's succeeded", "manual_retry": "a replay succeeded", "manual_resolution": "a person did its work elsewhere"}[fmt.Sprint(deref(e.ResolutionStrategy))]
		if how == "" {
			how = "its work is done"
		}
		said = append(said, "Resolved: "+how+".")
	case deadletter.Failed:
		said = append(said, fmt.Sprintf("Failed: all %d redeliveries are spent.", e.DLQRetryCount))
	case deadletter.Archived:
		said = append(said, "Archived: "+map[bool]string{true: "a person discarded it", false: "it aged out"}[fmt.Sprint(deref(e.ResolutionStrategy)) == "discard"]+".")
	}
	if e.DLQRetryCount > 0 && e.Status.Open() {
		said = append(said, fmt.Sprintf("%s of %d made.", plural(e.DLQRetryCount, "redelivery", "redeliveries"), e.DLQMaxRetries))
	}
	return strings.Join(said, " ")
}

// because says which rule chose the class, and what the class means.
func because(e *deadletter.Entry) string {
	class := fmt.Sprint(deref(e.ErrorClass))
	if means := classOf(class)["Means"]; class != "" && means != "" {
		class += " (" + means + ")"
	}
	switch rule := fmt.Sprint(deref(e.Rule)); {
	case rule == "unparked": // the next step in the sentence says so
		return ""
	case rule == "single-attempt":
		return ", because its job had one attempt"
	case rule == policy.RuleWorkerLost:
		return ", because its worker died, or it never ended, twice or more; it may be what kills the worker"
	case rule == "backfilled":
		return ", because its job failed before dlqd was there"
	case rule != "" && class != "":
		return ", because rule " + rule + " puts it in class " + class
	case class != "":
		return ", because its error is of class " + class
	}
	return ""
}

func upper(text string) string {
	if text == "" {
		return text
	}
	return strings.ToUpper(text[:1]) + text[1:]
}

// attemptsOf lists the attempts: the next one, then the newest first.
func attemptsOf(e *deadletter.Entry) []attempt {
	var before, after []keptAttempt
	_ = json.Unmarshal(e.RetryHistory, &before)
	_ = json.Unmarshal(e.ReplayAttempts, &after)
	var list []attempt
	for _, k := range before {
		title := fmt.Sprintf("attempt %d of job %d", k.Attempt, e.RiverJobID)
		list = append(list, attempt{At: k.At, Title: title, Detail: k.detail(), Error: k.Error})
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
	if len(list) == 0 { // River writes a job's errors a moment after its state
		list = append(list, attempt{At: e.LastFailedAt, Title: fmt.Sprintf("attempt %d of job %d", e.RetryCount, e.RiverJobID), Error: fmt.Sprint(deref(e.ErrorMessage))})
	}
	if e.Status == deadletter.Pending && e.NextRetryAt != nil {
		list = append([]attempt{{At: *e.NextRetryAt, Title: dueOf(e), Due: true}}, list...)
	}
	return list
}

// keptAttempt is an attempt or a redelivery as stored in an entry.
type keptAttempt struct {
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
func (k *keptAttempt) detail() string {
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

// dueOf describes the next step of an entry that waits for a time: a redelivery, or a look if the
// redelivery also depends on a condition or an order.
func dueOf(e *deadletter.Entry) string {
	what := fmt.Sprintf("redelivery %d of %d", e.DLQRetryCount+1, e.DLQMaxRetries)
	switch {
	case e.Strategy == nil:
		return "first look: its class and strategy are decided"
	case e.WaitingFor != nil && *e.WaitingFor == "automatic":
		return what + ", if automatic redelivery is on by then"
	case e.WaitingFor != nil && *e.WaitingFor == "order":
		return "next look for " + what + ", which waits for those before it"
	case e.WaitingFor != nil && *e.WaitingFor != "pace" || *e.Strategy == "conditional":
		return "next look for " + what + ", once its conditions hold"
	}
	return what
}

// movesFrom returns the statuses from which an operator may make a move. The API decides; pages use
// this to explain why a move is not possible.
func movesFrom(name string) []deadletter.Status {
	open := []deadletter.Status{deadletter.Pending, deadletter.Manual, deadletter.Failed}
	return map[string][]deadletter.Status{
		"replay": open, "discard": open,
		"resolve": {deadletter.Manual}, "unpark": {deadletter.Manual}, "park": {deadletter.Pending},
		"reopen": {deadletter.Resolved, deadletter.Archived},
	}[name]
}

// verbsOf returns all moves. Why is set for those that are not possible now.
func verbsOf(status deadletter.Status, mayNot string) []verb {
	verbs := []verb{
		{Name: "replay", Label: "Replay", Consequence: "sends it back now, as a new job", Key: "r"},
		{Name: "resolve", Label: "Resolve", Consequence: "closes it: its work was done elsewhere", Key: "s"},
		{Name: "unpark", Label: "Back to automatic", Consequence: "dlqd decides what happens next", Key: "b"},
		{Name: "park", Label: "Park", Consequence: "nothing happens to it by itself any more", Key: "p"},
		{Name: "discard", Label: "Discard", Consequence: "closes it: its work is not wanted any more", Key: "d"},
		{Name: "reopen", Label: "Reopen", Consequence: "puts it in front of a person again", Key: "o"},
	}
	for i := range verbs {
		v := &verbs[i]
		switch {
		case mayNot != "":
			v.Why = mayNot
		case !slices.Contains(movesFrom(v.Name), status):
			from := movesFrom(v.Name)
			words := make([]string, len(from))
			for i, s := range from {
				words[i] = statusOf(s).Word
			}
			v.Why = "it is " + statusOf(status).Word + "; this is for what " + strings.Join(words, ", or ")
		}
	}
	return verbs
}

// stackFrame is a call of a stack trace.
type stackFrame struct {
	Call, Where string
	Own         bool // of the application, not of a library or of Go
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
		f.Own = f.Where != "" && !strings.Contains(f.Where, "/pkg/mod/") && !strings.Contains(f.Where, "/go/src/") && !strings.Contains(f.Where, "/usr/local/go") && !strings.Contains(f.Where, "/vendor/") &&
			!strings.HasPrefix(f.Call, "runtime.") && !strings.HasPrefix(f.Call, "runtime/") && !strings.HasPrefix(f.Call, "panic(") && !strings.Contains(f.Call, "riverqueue/river")
		frames = append(frames, f)
	}
	return frames
}

// curl returns a command that sends what a redelivery sends, except for the signature, which
// depends on the time and a secret.
func (l *letter) curl(p *policy.Policy) string {
	if !l.IsMessage() || l.Hidden || l.TooLong() {
		return ""
	}
	destination := p.DestinationOf(l.Queue)
	if destination == nil {
		return ""
	}
	headers := []header{{"Content-Type", "application/json"}, {"Webhook-Id", fmt.Sprint(deref(l.EventID))}, {"Dlqd-Kind", l.Kind}, {"Dlqd-Queue", l.Queue}, {"Dlqd-Entry-Id", l.ID.String()}}
	lines := []string{"curl -X POST " + shellQuoted(destination.ShownURL())}
	for _, h := range slices.Concat(l.Headers, headers) {
		lines = append(lines, "-H "+shellQuoted(h.Name+": "+h.Value))
	}
	return strings.Join(append(lines, "--data-binary "+shellQuoted(string(l.Payload))), " \\\n  ")
}
