package console

import (
	"cmp"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/breaker"
)

// queuesEvery is the render interval of an open page of queues.
const queuesEvery = 5 * time.Second

type queues struct {
	Sentence     string
	Queues       []queueRow
	Breakers     []breakerRow
	Destinations int
	Copies       []copyText
}

type queueRow struct {
	api.Queue

	Why string // why the viewer cannot pause or resume it; "" if they can
}

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
		return mark{"open", "open: nothing is delivered", "■", "bad"}
	case b.State == breaker.HalfOpen:
		return mark{"half_open", "half open: a few are tried", "◧", "warn"}
	}
	return mark{"closed", "closed: all goes through", "✓", "ok"}
}

func (c *Console) queues(in *request) (*view, error) {
	q := &queues{Copies: copies("dlqd queues; dlqd breakers", "SELECT * FROM dlq.count_jobs() ORDER BY queue, state; SELECT * FROM dlq.paused_queues(); SELECT * FROM dlq.circuit_breakers;", //nolint:unqueryvet // for people
		in.curl("/api/queues", "/api/circuit-breakers"))}
	var list struct {
		Queues []api.Queue `json:"queues"`
	}
	if err := in.get("/api/queues", nil, &list); err != nil {
		return nil, err
	}
	for i := range list.Queues {
		q.Queues = append(q.Queues, queueRow{list.Queues[i], whyNot(in.me(), access.Operator, list.Queues[i].Name)})
	}
	var breakers struct {
		Breakers []breaker.Status `json:"breakers"`
	}
	if err := in.get("/api/circuit-breakers", nil, &breakers); err != nil {
		return nil, err
	}
	for _, b := range breakers.Breakers {
		queue, _ := strings.CutPrefix(b.Name, breaker.QueuePrefix)
		if queue == b.Name {
			queue = ""
			q.Destinations++
		}
		q.Breakers = append(q.Breakers, breakerRow{b, whyNot(in.me(), access.Operator, queue)})
	}
	slices.SortStableFunc(q.Breakers, func(a, b breakerRow) int { return cmp.Compare(stateOrder(a.State), stateOrder(b.State)) })
	q.Sentence = q.say()
	return &view{Template: "queues", Title: "Queues and breakers", Data: q, Every: queuesEvery}, nil
}

// stateOrder sorts open breakers first, then half-open ones.
func stateOrder(s breaker.State) int {
	return map[breaker.State]int{breaker.Open: 0, breaker.HalfOpen: 1}[s] + map[bool]int{true: 2}[s == breaker.Closed]
}

// whyNot says why the viewer may not use a role in a queue ("" for all queues), or returns "". The
// API decides; pages show this beforehand.
func whyNot(p *access.Principal, role access.Role, queue string) string {
	scope := p.Scope(role)
	switch {
	case !p.May(role):
		return mayNot(p, role)
	case queue == "" && scope != nil:
		return "this takes the role " + string(role) + " in every queue and for every kind"
	case queue != "" && !scope.HasQueue(queue):
		return "this takes the role " + string(role) + " in all of queue " + queue
	}
	return ""
}

// breakerInWords describes a breaker that is not closed, and what dlqd does about it.
func breakerInWords(name string, b *breaker.Status) string {
	trouble := name + " is in trouble"
	if b.Since != nil {
		trouble = name + " has been in trouble since " + b.Since.UTC().Format("15:04 UTC")
	}
	if b.LastTried != nil {
		trouble += ", last tried at " + b.LastTried.UTC().Format("15:04 UTC")
	}
	switch {
	case b.Forced:
		return name + " is closed off by " + b.ChangedBy + "."
	case b.State == breaker.HalfOpen:
		return trouble + ". It is tried again with the next that is sent there."
	}
	return trouble + ": dlqd waits for it."
}

// say summarizes the state of queues and breakers.
func (q *queues) say() string {
	var said []string
	var paused []string
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
			said = append(said, breakerInWords(b.Label(), &b.Status))
		}
	}
	if len(said) == 0 && len(q.Breakers) > 0 {
		said = append(said, "Every breaker is closed: all deliveries go through.")
	}
	switch n := len(paused); {
	case n == 1:
		said = append(said, "Queue "+paused[0]+" is paused.")
	case n > 1:
		said = append(said, number(n)+" queues are paused: "+strings.Join(paused, ", ")+".")
	}
	if held > 0 {
		said = append(said, plural(held, "message waits", "messages wait")+" for a breaker or for another of the same ordering key.")
	}
	if dead > 0 {
		said = append(said, plural(dead, "dead letter is", "dead letters are")+" open.")
	}
	if len(said) == 0 {
		return "No queues yet: one appears here with its first job."
	}
	return strings.Join(said, " ")
}

// actOnQueue pauses or resumes a queue, or opens or resets a breaker.
func (c *Console) actOnQueue(in *request) (*done, error) {
	name, verb := in.PostFormValue("name"), in.PostFormValue("do")
	body := map[string]any{"note": in.PostFormValue("note")}
	var path, said string
	switch verb {
	case "pause", "resume":
		path = "/api/queues/" + url.PathEscape(name) + "/" + verb
		said = map[string]string{"pause": "Queue " + name + " is paused: what runs ends, and nothing new begins.", "resume": "Queue " + name + " goes on."}[verb]
	case "open":
		said = name + " is open: nothing is delivered until somebody resets it."
		if during := strings.TrimSpace(in.PostFormValue("for")); during != "" {
			body["for"] = during
			said = name + " is open for " + during + ": nothing is delivered meanwhile."
		}
		path = "/api/circuit-breakers/" + url.PathEscape(name) + "/open"
	case "reset":
		path, said = "/api/circuit-breakers/"+url.PathEscape(name)+"/reset", name+" is closed: all goes through again."
	default:
		return nil, &Problem{Status: http.StatusUnprocessableEntity, Title: "No such action", Detail: "a queue can be paused and resumed, a breaker opened and reset"}
	}
	if err := in.post(path, body, nil); err != nil {
		return nil, err
	}
	return &done{To: "/queues#" + url.PathEscape(name), Flash: flash{Text: said}}, nil
}
