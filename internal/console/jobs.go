package console

import (
	"encoding/json"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/ingest"
)

// jobsInterval is the render interval of an open list of jobs, and of a job's page.
const jobsInterval = 5 * time.Second

// jobStates are the states of River's jobs for which the list has tabs, with the word and the sign of each.
var jobStates = []mark{
	{"available", "ready", "◷", "neutral"},
	{"running", "running", "◐", "info"},
	{"retryable", "retrying", "↻", "warn"},
	{"scheduled", "scheduled", "◷", "neutral"},
	{"completed", "completed", "✓", "ok"},
	{"cancelled", "cancelled", "▢", "faint"},
	{"discarded", "failed for good", "✕", "bad"},
	{"pending", "pending", "◷", "neutral"},
}

func jobMark(state string) mark {
	if i := slices.IndexFunc(jobStates, func(m mark) bool { return m.Name == state }); i >= 0 {
		return jobStates[i]
	}
	return mark{state, state, "·", "neutral"}
}

// jobRow is a job in a list.
type jobRow struct{ delivery.Job }

// Mark returns how the state is shown.
func (j *jobRow) Mark() mark {
	if j.HeldFor != "" {
		return mark{"held", "held", "‖", "warn"}
	}
	return jobMark(j.State)
}

// Path returns the address of the job's page.
func (j *jobRow) Path() string { return "/jobs/" + strconv.FormatInt(j.ID, 10) }

// At returns a time near the one by which the list of the job's state is ordered.
func (j *jobRow) At() time.Time {
	switch {
	case j.FinalizedAt != nil:
		return *j.FinalizedAt
	case j.State == "running" && j.AttemptedAt != nil:
		return *j.AttemptedAt
	}
	return j.ScheduledAt
}

type jobsTab struct {
	mark

	Path    string
	Count   string // "" if it is not counted
	Current bool
}

type jobs struct {
	Sentence, Queue string
	State           mark
	Tabs            []jobsTab
	Queues          []api.Queue
	Jobs            []jobRow
	Next, First     string
	Dead            int64 // open dead letters of the queue
	Copies          []copyText
}

// jobs shows the jobs of a queue in a state: by default of the queue with the most live jobs, in the first state that
// has jobs.
func (c *Console) jobs(in *request) (*view, error) {
	params := in.URL.Query()
	began := time.Now()
	list, err := call(in, api.ListQueues, api.QueuesInput{})
	if err != nil {
		return nil, err
	}
	counting := time.Since(began)
	j := &jobs{Queue: params.Get("queue"), Queues: list.Queues}
	j.State = jobMark(params.Get("state"))
	if j.Queue == "" && len(j.Queues) > 0 {
		busiest := slices.MaxFunc(j.Queues, func(a, b api.Queue) int {
			return int(a.Available + a.Running + a.Retryable + a.Scheduled - b.Available - b.Running - b.Retryable - b.Scheduled)
		})
		j.Queue = busiest.Name
	}
	queue := api.Queue{Name: j.Queue}
	if i := slices.IndexFunc(j.Queues, func(q api.Queue) bool { return q.Name == j.Queue }); i >= 0 {
		queue = j.Queues[i]
	}
	counts := map[string]int64{
		"available": queue.Available, "running": queue.Running, "retryable": queue.Retryable,
		"scheduled": queue.Scheduled - queue.Pending, "pending": queue.Pending,
	}
	if params.Get("state") == "" {
		j.State = jobMark("available")
		for _, m := range jobStates {
			if counts[m.Name] > 0 {
				j.State = m
				break
			}
		}
	}
	for _, m := range jobStates {
		tab := jobsTab{mark: m, Path: "/jobs?" + jobsQuery(j.Queue, m.Name), Current: m.Name == j.State.Name}
		if n, counted := counts[m.Name]; counted {
			tab.Count = number(n)
		}
		j.Tabs = append(j.Tabs, tab)
	}
	j.Dead = queue.DeadLetters
	v := &view{
		Template: "jobs", Title: "Jobs and messages", Data: j, Interval: max(jobsInterval, countingShare*counting),
		Section: "/queues",
	}
	if j.Queue == "" {
		j.Sentence = "No queues yet."
		return v, nil
	}
	input := api.JobsInput{Queue: j.Queue, State: j.State.Name, Limit: listPage, Cursor: params.Get("cursor")}
	page, err := call(in, api.ListJobs, input)
	if err != nil {
		return nil, err
	}
	for _, job := range page.Jobs {
		j.Jobs = append(j.Jobs, jobRow{job})
	}
	if page.Next != "" {
		j.Next = "/jobs?" + jobsQuery(j.Queue, j.State.Name) + "&cursor=" + page.Next
	}
	if input.Cursor != "" {
		j.First, v.Interval = "/jobs?"+jobsQuery(j.Queue, j.State.Name), 0
	}
	j.Sentence = j.summary(&queue, counts)
	input.Cursor = ""
	j.Copies = copies("", "SELECT * FROM dlq.jobs("+sqlQuoted(jsonOf(map[string]string{"queue": j.Queue, "state": j.State.Name}))+", "+strconv.Itoa(listPage)+");", in.curl(address(api.ListJobs, input))) //nolint:unqueryvet // for people
	return v, nil
}

func jobsQuery(queue, state string) string {
	r, err := api.ListJobs.Request(&api.JobsInput{Queue: queue, State: state})
	if err != nil {
		return "" // unreachable: ListJobs has no path parameters
	}
	_, text, _ := strings.Cut(r.Path, "?")
	return text
}

func (j *jobs) summary(queue *api.Queue, counts map[string]int64) string {
	var text string
	count, counted := counts[j.State.Name]
	switch {
	case counted && count > 0:
		text = plural(count, "job of "+j.Queue+" is "+j.State.Word, "jobs of "+j.Queue+" are "+j.State.Word) + "."
		if j.State.Name == "retryable" {
			text = plural(count, "job of "+j.Queue+" waits", "jobs of "+j.Queue+" wait") + " for the next attempt."
		}
	case len(j.Jobs) == 0 && j.State.Name == "discarded":
		text = "River keeps no job of " + j.Queue + " that failed for good."
	case len(j.Jobs) == 0 && !counted:
		text = "River keeps no job of " + j.Queue + " that is " + j.State.Word + "."
	case len(j.Jobs) == 0:
		text = "No job of " + j.Queue + " is " + j.State.Word + "."
	case j.State.Name == "discarded":
		text = "Jobs of " + j.Queue + " that failed for good. Each has a dead letter."
	default:
		text = "Jobs of " + j.Queue + " that are " + j.State.Word + ", the latest first."
	}
	if j.State.Name == "scheduled" && queue.Held > 0 {
		text += " " + plural(queue.Held, "message waits", "messages wait") + " for a breaker or for an earlier message of " +
			"the same ordering key."
	}
	if queue.PausedAt != nil {
		text += " The queue is paused: no job starts."
	}
	switch j.State.Name {
	case "completed", "cancelled":
		text += " River deletes them after a day, unless the application has set another time."
	case "discarded":
		text += " River deletes the jobs after seven days, unless the application has set another time."
	}
	return text
}

// jobPage is the data of the page of a job, or of the message that the job delivers.
type jobPage struct {
	api.JobDetail

	Mark             mark
	Sentence         string
	Payload, Headers json.RawMessage
	Tree             *node
	Hidden           bool
	RiverUI          string
	Actions          []jobAction
	Copies           []copyText
	Operator         bool
}

// Path returns the address of the job's page.
func (j *jobPage) Path() string { return (&jobRow{j.Job}).Path() }

// Waits reports whether the job waits for the time of its next attempt.
func (j *jobPage) Waits() bool { return j.State == "retryable" || j.State == "scheduled" }

type jobAction struct {
	Name, Label, Consequence string
	Why                      string // why the action is not possible now; "" if it is
}

// job shows a job of River: its state, its attempts, and the possible actions.
func (c *Console) job(in *request) (*view, error) {
	id, err := strconv.ParseInt(in.PathValue("id"), 10, 64)
	if err != nil {
		return nil, &api.Problem{
			Status: http.StatusNotFound,
			Detail: "there is no job " + in.PathValue("id") + ": the id of a job is a number",
		}
	}
	return c.showJob(in, id, api.GetJob.Path)
}

// message shows the job of a message. If the job no longer exists, it redirects to the message's dead letter.
func (c *Console) message(in *request) (*view, error) {
	position, err := call(in, api.GetMessage, api.MessageInput{MessageID: in.PathValue("id")})
	if err != nil {
		return nil, forgotten(err)
	}
	if position.State == ingest.DeadLettered && position.DeadLetter != nil || position.JobID == 0 {
		return &view{To: "/dead-letters/" + position.DeadLetter.ID.String()}, nil
	}
	return c.showJob(in, position.JobID, in.URL.Path)
}

// forgotten adds to a 404 error why a message or job may not be found.
func forgotten(err error) error {
	if problem, ok := errorAs404(err); ok {
		problem.Detail += ". By default, River deletes jobs a day after they completed or were cancelled. If it failed, it " +
			"has a dead letter, which dlqd keeps longer"
		return problem
	}
	return err
}

func (c *Console) showJob(in *request, id int64, live string) (*view, error) {
	input := api.JobInput{ID: id}
	detail, err := call(in, api.GetJob, input)
	if err != nil {
		return nil, forgotten(err)
	}
	j := &jobPage{JobDetail: *detail, RiverUI: c.RiverUI, Operator: in.me().May(access.Operator)}
	j.Mark = (&jobRow{j.Job}).Mark()
	j.Payload, j.Hidden = j.Args, len(j.Args) == 0
	if j.MessageID != "" {
		var message struct {
			Payload json.RawMessage `json:"payload"`
			Headers json.RawMessage `json:"headers"`
		}
		if json.Unmarshal(j.Args, &message) == nil {
			j.Payload, j.Headers = message.Payload, message.Headers
		}
	}
	j.Tree = treeOf(j.Payload)
	paused := false
	if !j.HasEnded() {
		queues, _, err := callIfAllowed(in, api.ListQueues, api.QueuesInput{WithoutJobs: true})
		if err != nil {
			return nil, err
		}
		paused = slices.ContainsFunc(queues.Queues, func(q api.Queue) bool { return q.Name == j.Queue && q.PausedAt != nil })
	}
	j.Sentence = j.summary(paused)
	j.Actions = j.actions(in.me())
	text := strconv.FormatInt(id, 10)
	j.Copies = copies("", "SELECT * FROM dlq.jobs('{\"ids\": ["+text+"]}');", in.curl(address(api.GetJob, input))) //nolint:unqueryvet // for people
	title := "Job " + text
	if j.MessageID != "" {
		title = "Message " + j.MessageID
	}
	v := &view{Template: "job", Title: title, Data: j, Interval: jobsInterval, Section: "/queues"}
	if live == in.URL.Path {
		v.Live = j.Path()
	}
	return v, nil
}

func (j *jobPage) noun() string {
	if j.MessageID != "" {
		return "message"
	}
	return "job"
}

// summary describes the state of the job and what happens next.
func (j *jobPage) summary(paused bool) string {
	text := j.state()
	switch {
	case j.Cancelling && !j.HasEnded():
		text += " Its cancellation was requested."
	case paused && j.State != "running":
		text += " Queue " + j.Queue + " is paused, so it waits until an operator resumes the queue."
	}
	return text
}

func (j *jobPage) state() string {
	attempt := "Attempt " + strconv.Itoa(j.Attempt) + " of " + strconv.Itoa(j.MaxAttempts)
	switch j.State {
	case "available":
		return "Ready: a worker of queue " + j.Queue + " takes it next."
	case "running":
		if j.AttemptedAt == nil {
			return attempt + " is running."
		}
		return attempt + " has been running for " + lasted(time.Since(*j.AttemptedAt)) + "."
	case "retryable":
		return attempt + " failed. The next one begins " + until(j.ScheduledAt) + "."
	case "scheduled":
		switch j.HeldFor {
		case "breaker":
			return "Held: the circuit breaker of its destination is open."
		case "redirected":
			return "Held: the circuit breaker of the destination to which an operator sent it is open."
		case "restored":
			return "Held: the database was restored from a backup."
		case "order":
			return "Held: an earlier message with its ordering key is not done."
		}
		return "Scheduled: the attempt begins " + until(j.ScheduledAt) + "."
	case "completed":
		return "Completed " + ago(j.FinalizedAt) + ", after " + plural(j.Attempt, "attempt") + ". River deletes completed " +
			"jobs after a day, unless the application has set another time; then this page is gone."
	case "cancelled":
		if j.DeadLetter != nil {
			return "Its worker gave it up " + ago(j.FinalizedAt) + "; it has a dead letter."
		}
		return "Cancelled " + ago(j.FinalizedAt) + ". It has no dead letter, and River deletes it after a day, unless the " +
			"application has set another time."
	case "discarded":
		return "Failed for good " + ago(j.FinalizedAt) + ", after " + plural(j.Attempt, "attempt") + "."
	}
	return "The " + j.noun() + " is " + j.State + "."
}

// actions returns the actions on the job. For an action that is not possible, Why says why.
func (j *jobPage) actions(me *access.Principal) []jobAction {
	role := ""
	if !me.MayFor(access.Operator, j.Queue, j.Kind, "") {
		role = "requires the role operator for this queue and kind"
	}
	retry := jobAction{"retry", "Try now", "the next attempt begins as soon as a worker is free", role}
	stop := jobAction{"cancel", "Cancel", "no attempt follows, and the " + j.noun() + " gets no dead letter", role}
	if j.EntryID != nil {
		stop.Consequence = "the redelivery ends as failed, and the policy decides about its dead letter again"
	}
	switch {
	case role != "":
	case j.State == "cancelled" && j.DeadLetter == nil:
		retry.Label, retry.Consequence = "Undo cancel", "the cancellation is reverted, and the next attempt begins"
	case j.State == "retryable" || j.State == "scheduled":
	case j.DeadLetter != nil && j.HasEnded():
		retry.Why = "only before it fails for good; its dead letter can be replayed"
	case j.State == "available":
		retry.Why = "it is ready already"
	default:
		retry.Why = "it is " + j.Mark.Word
	}
	if role == "" && j.HasEnded() {
		stop.Why = "it has ended"
	}
	if j.State == "running" {
		stop.Consequence = "the running attempt is asked to end, and no other follows"
	}
	return []jobAction{retry, stop}
}

// actOnJob cancels a job, or runs it now.
func (c *Console) actOnJob(in *request) (*done, error) {
	id, err := strconv.ParseInt(in.PathValue("id"), 10, 64)
	operation, known := map[string]api.Operation[api.JobActionInput, api.JobDetail]{
		"retry": api.RetryJob, "cancel": api.CancelJob,
	}[in.PostFormValue("do")]
	if err != nil || !known {
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action", Detail: "choose retry or cancel for a job",
		}
	}
	after, err := call(in, operation, api.JobActionInput{
		JobInput: api.JobInput{ID: id}, Body: &api.Action{Note: in.PostFormValue("note")},
	})
	if d, ok := approvalRedirect(err); ok {
		return d, nil
	}
	if err != nil {
		return nil, err
	}
	text := "The job is ready: a worker takes it next."
	switch {
	case in.PostFormValue("do") == "retry":
	case after.State == "running":
		text = "The running attempt was asked to end."
	default:
		text = "The job is cancelled."
	}
	return &done{To: (&jobRow{after.Job}).Path(), Flash: flash{Text: text}}, nil
}
