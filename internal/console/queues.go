package console

import (
	"cmp"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/breaker"
)

// queuesInterval is the render interval of an open page of queues.
const queuesInterval = 5 * time.Second

type queues struct {
	Sentence     string
	Queues       []queueRow
	Breakers     []breakerRow
	Destinations int
	Window       window
	Windows      []choice
	Copies       []copyText
}

type queueRow struct {
	api.Queue

	Why    string  // why the viewer cannot pause or resume the queue; "" if the viewer can
	Holds  string  // what keeps the queue's jobs from running; "" if nothing does
	Trend  []int64 // jobs that became dead letters
	Failed int64   // the sum of Trend
}

// Waiting returns the number of jobs that a pause would hold.
func (q *queueRow) Waiting() int64 { return q.Available + q.Retryable + q.Scheduled }

type breakerRow struct {
	breaker.Status

	Why string // why the viewer cannot open or reset it; "" if they can
}

// Label returns the name of the destination or queue.
func (b breakerRow) Label() string {
	_, name, _ := strings.Cut(b.Name, ":")
	return name
}

// Of returns the type of the breaker: destination or queue.
func (b breakerRow) Of() string {
	of, _, _ := strings.Cut(b.Name, ":")
	return of
}

// Word describes the state of a breaker.
func (b breakerRow) Word() mark {
	switch {
	case b.State == breaker.Open && b.Forced:
		return mark{"open", "opened by " + b.ChangedBy, "■", "bad"}
	case b.State == breaker.Open:
		return mark{"open", "open: no deliveries", "■", "bad"}
	case b.State == breaker.HalfOpen:
		return mark{"half_open", "half-open: probing", "◧", "warn"}
	}
	return mark{"closed", "closed", "✓", "ok"}
}

func (c *Console) queues(in *request) (*view, error) {
	q := &queues{Copies: copies("dlqd queues; dlqd breakers", "SELECT * FROM dlq.count_jobs() ORDER BY queue, state; SELECT * FROM dlq.paused_queues(); SELECT * FROM dlq.circuit_breakers;", //nolint:unqueryvet // for people
		in.curl(api.ListQueues.Path, api.ListBreakers.Path))}
	q.Window = in.window("1h")
	q.Windows = in.windowChoices(q.Window)
	var list *api.QueuesOutputBody
	var breakers *api.BreakersOutputBody
	var flow api.Report[analytics.Series]
	if err := inParallel(
		func() (err error) { list, err = call(in, api.ListQueues, api.QueuesInput{}); return err },
		func() (err error) { breakers, err = call(in, api.ListBreakers, api.None{}); return err },
		readIfAllowed(in, api.GetFlow,
			api.FlowInput{WindowInput: api.WindowInput{Over: q.Window.Over}, By: "queue", Step: q.Window.Step}, &flow),
	); err != nil {
		return nil, err
	}
	for i := range list.Queues {
		q.Queues = append(q.Queues, queueRow{
			Queue: list.Queues[i], Why: missingRoleIn(in.me(), access.Operator, list.Queues[i].Name),
		})
	}
	for i := range q.Queues {
		row := &q.Queues[i]
		row.Holds = holdsQueue(row, breakers.Breakers, in.now)
		if at := slices.IndexFunc(flow.Rows, func(s analytics.Series) bool { return s.Name == row.Name }); at >= 0 {
			for _, b := range merged(flow.Rows[at].Buckets, q.Window.Every) {
				row.Trend = append(row.Trend, b.Captured)
				row.Failed += b.Captured
			}
		}
	}
	for _, b := range breakers.Breakers {
		queue, _ := strings.CutPrefix(b.Name, breaker.QueuePrefix)
		if queue == b.Name {
			queue = ""
			q.Destinations++
		}
		q.Breakers = append(q.Breakers, breakerRow{b, missingRoleIn(in.me(), access.Operator, queue)})
	}
	slices.SortStableFunc(q.Breakers,
		func(a, b breakerRow) int { return cmp.Compare(stateOrder(a.State), stateOrder(b.State)) })
	q.Sentence = q.summary(in)
	return &view{Template: "queues", Title: "Queues and breakers", Data: q, Interval: queuesInterval}, nil
}

// unworkedAfter: if a job has been ready for this long and no job of its queue runs, no client works the queue.
const unworkedAfter = time.Minute

// holdsQueue says what keeps the jobs of a queue from running, or "".
func holdsQueue(q *queueRow, breakers []breaker.Status, now time.Time) string {
	if q.PausedAt != nil {
		return "paused"
	}
	for i := range breakers {
		name := breakers[i].Name
		if breakers[i].State != breaker.Closed && (name == breaker.QueuePrefix+q.Name ||
			q.Destination != "" && name == breaker.DestinationPrefix+q.Destination) {
			return "breaker of " + breakerRow{Status: breakers[i]}.Label() + " is " + strings.ReplaceAll(
				string(breakers[i].State), "_", "-")
		}
	}
	switch {
	case q.Held > 0:
		return plural(q.Held, "message waits", "messages wait") + " for an earlier one"
	case q.OldestReady != nil && q.Running == 0 && now.Sub(*q.OldestReady) > unworkedAfter:
		return "no River client works it"
	}
	return ""
}

// stateOrder sorts open breakers first, then half-open ones.
func stateOrder(s breaker.State) int {
	return map[breaker.State]int{breaker.Open: 0, breaker.HalfOpen: 1}[s] + map[bool]int{true: 2}[s == breaker.Closed]
}

// missingRoleIn says why the viewer may not use a role in a queue ("" stands for all queues), or returns "". The API
// makes the decision; pages only predict it.
func missingRoleIn(p *access.Principal, role access.Role, queue string) string {
	scope := p.Scope(role)
	switch {
	case !p.May(role):
		return missingRole(p, role)
	case queue == "" && scope != nil:
		return "requires the role " + string(role) + " for every queue and kind"
	case queue != "" && !scope.HasQueue(queue):
		return "requires the role " + string(role) + " for every kind in queue " + queue
	}
	return ""
}

// breakerInWords describes a breaker that is not closed, and the effect on deliveries.
func (in *request) breakerInWords(name string, b *breaker.Status) string {
	text := name + " is failing"
	if b.Since != nil {
		text = name + " has been failing since " + in.clock(*b.Since)
	}
	if b.LastTried != nil {
		text += ", last probe at " + in.clock(*b.LastTried)
	}
	switch {
	case b.Forced:
		return b.ChangedBy + " opened the breaker of " + name + "."
	case b.State == breaker.HalfOpen:
		return text + ". Its breaker is half-open: the next deliveries are probes."
	}
	return text + ". Its breaker is open: no deliveries."
}

// summary describes the state of queues and breakers.
func (q *queues) summary(in *request) string {
	var sentences, paused []string
	var held, dead int64
	for i := range q.Queues {
		if q.Queues[i].PausedAt != nil {
			paused = append(paused, q.Queues[i].Name)
		}
		held += q.Queues[i].Held
		dead += q.Queues[i].DeadLetters
	}
	for i := range q.Breakers {
		b := &q.Breakers[i]
		if b.State != breaker.Closed {
			sentences = append(sentences, in.breakerInWords(b.Label(), &b.Status))
		}
	}
	if len(sentences) == 0 && len(q.Breakers) > 0 {
		sentences = append(sentences, "All breakers are closed.")
	}
	switch n := len(paused); {
	case n == 1:
		sentences = append(sentences, "Queue "+paused[0]+" is paused.")
	case n > 1:
		sentences = append(sentences, number(n)+" queues are paused: "+strings.Join(paused, ", ")+".")
	}
	if held > 0 {
		sentences = append(sentences, plural(held, "message waits", "messages wait")+" for a breaker or for earlier "+
			"messages of the same ordering key.")
	}
	if dead > 0 {
		sentences = append(sentences, plural(dead, "dead letter is", "dead letters are")+" open.")
	}
	if len(sentences) == 0 {
		return "No queues yet."
	}
	return strings.Join(sentences, " ")
}

// actOnQueue pauses or resumes a queue, or opens or resets a breaker.
func (c *Console) actOnQueue(in *request) (*done, error) {
	name, verb := in.PostFormValue("name"), in.PostFormValue("do")
	note := api.Action{Note: in.PostFormValue("note")}
	queue := api.QueueActionInput{QueueInput: api.QueueInput{Name: name}, Body: &note}
	var text string
	var err error
	switch verb {
	case "pause":
		text = "Queue " + name + " is paused: running jobs finish, no job starts."
		_, err = call(in, api.PauseQueue, queue)
	case "resume":
		text = "Queue " + name + " is resumed."
		_, err = call(in, api.ResumeQueue, queue)
	case "open":
		text = name + " is open: no deliveries until an operator resets it."
		action := api.OpenAction{Action: note, For: strings.TrimSpace(in.PostFormValue("for"))}
		if action.For != "" {
			text = name + " is open for " + action.For + ": no deliveries meanwhile."
		}
		_, err = call(in, api.OpenBreaker, api.OpenBreakerInput{BreakerInput: api.BreakerInput{Name: name}, Body: &action})
	case "reset":
		text = name + " is closed: deliveries resume."
		_, err = call(in, api.ResetBreaker, api.ResetBreakerInput{BreakerInput: api.BreakerInput{Name: name}, Body: &note})
	default:
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action",
			Detail: "choose pause or resume for a queue, open or reset for a breaker",
		}
	}
	if err != nil {
		return nil, err
	}
	return &done{To: "/queues#" + url.PathEscape(name), Flash: flash{Text: text}}, nil
}
