package console

import (
	"errors"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
)

// found is one result of a search.
type found struct {
	Of, Name, Detail, Path string

	exact bool // the searched text is the id of the result
}

type search struct {
	Query string
	Found []found
	Tries []found // searches for the text in other lists
}

var (
	messageID   = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:~@+=-]{0,127}$`)
	fingerprint = regexp.MustCompile(`^[0-9a-f]{4,64}$`)
	personName  = regexp.MustCompile(`^[\pL][\pL\pN._@+-]{0,254}$`)
)

// errorAs404 returns the problem in err if the API answered 404.
func errorAs404(err error) (*api.Problem, bool) {
	problem, ok := errors.AsType[*api.Problem](err)
	return problem, ok && problem.Status == http.StatusNotFound
}

// lookUp is like callIfAllowed, for an id that a user typed: a text that cannot be an id counts as not found.
func lookUp[In, Out any](in *request, operation api.Operation[In, Out], input In) (*Out, bool, error) {
	out, ok, err := callIfAllowed(in, operation, input)
	if problem, is := errors.AsType[*api.Problem](err); is && problem.Status == http.StatusUnprocessableEntity {
		return out, false, nil
	}
	return out, ok, err
}

// search finds entries, jobs and other objects by their id or by a part of their name. If the text is the id of exactly
// one object, search shows that object at once, unless the address asks for the list.
func (c *Console) search(in *request) (*view, error) {
	if !in.me().May(access.Reader) {
		return nil, &api.Problem{Status: http.StatusForbidden, Detail: "this needs the role reader"}
	}
	params := in.URL.Query()
	s := &search{Query: strings.TrimSpace(params.Get("q"))}
	v := &view{Template: "search", Title: "Look up", Data: s}
	if s.Query == "" {
		return v, nil
	}
	if err := s.find(in); err != nil {
		return nil, err
	}
	var exact []found
	for _, f := range s.Found {
		if f.exact {
			exact = append(exact, f)
		}
	}
	if len(exact) == 1 && params.Get("list") == "" {
		return &view{To: exact[0].Path}, nil
	}
	return v, nil
}

// find runs all searches, several at a time, and sets Found and Tries.
func (s *search) find(in *request) error {
	text := s.Query
	lower := strings.ToLower(text)
	var mu sync.Mutex
	add := func(f found) {
		mu.Lock()
		defer mu.Unlock()
		s.Found = append(s.Found, f)
	}
	looks := findByName(in, lower, add)
	if id, err := uuid.Parse(text); err == nil {
		looks = append(looks, s.findByID(in, id.String(), add)...)
	}
	if id, err := strconv.ParseInt(digitsOf(text), 10, 64); err == nil && id > 0 {
		looks = append(looks, func() error {
			job, ok, err := lookUp(in, api.GetJob, api.JobInput{ID: id})
			if ok {
				add(found{
					Of: "job", Name: strconv.FormatInt(id, 10), Detail: jobMark(job.State).Word, Path: (&jobRow{job.Job}).Path(),
					exact: true,
				})
			}
			return err
		}, func() error { return s.findEntries(in, "job", digitsOf(text), add) })
	}
	if messageID.MatchString(text) {
		looks = append(looks, func() error {
			message, ok, err := lookUp(in, api.GetMessage, api.MessageInput{MessageID: text})
			if ok {
				add(found{
					Of: "message", Name: text, Detail: string(message.State), Path: "/messages/" + url.PathEscape(text), exact: true,
				})
			}
			return err
		})
	}
	if fingerprint.MatchString(lower) {
		looks = append(looks, func() error {
			page, ok, err := lookUp(in, api.ListEntries, api.ListInput{Q: query("group", lower), Limit: 1})
			if ok && len(page.Entries) > 0 && page.Entries[0].Fingerprint != nil {
				e := &page.Entries[0]
				add(found{
					Of: "group", Name: *e.Fingerprint, Detail: clip(120, firstLine(e.ErrorMessage)),
					Path: "/groups/" + url.PathEscape(e.Queue) + "/" + url.PathEscape(*e.Fingerprint), exact: *e.Fingerprint == lower,
				})
			}
			return err
		})
	}
	if personName.MatchString(text) {
		looks = append(looks, func() error {
			page, ok, err := lookUp(in, api.ListEntries, api.ListInput{Q: query("assigned", text), Limit: 1})
			if ok && len(page.Entries) > 0 {
				add(found{
					Of: "person", Name: text, Detail: "dead letters assigned to " + text,
					Path: "/dead-letters?q=" + url.QueryEscape(query("assigned", text)),
				})
			}
			return err
		})
	}
	if err := inParallel(looks...); err != nil {
		return err
	}
	for _, section := range sections() {
		if strings.Contains(strings.ToLower(section.Name), lower) && (section.Role == "" || in.me().May(section.Role)) {
			add(found{Of: "page", Name: section.Name, Path: section.Path})
		}
	}
	order := []string{
		"dead letter", "message", "job", "replay run", "operation", "approval", "group", "page", "dead letters", "queue",
		"destination",
		"source", "feed", "person", "view",
	}
	slices.SortStableFunc(s.Found, func(a, b found) int {
		if a.Of != b.Of {
			return slices.Index(order, a.Of) - slices.Index(order, b.Of)
		}
		return strings.Compare(a.Name, b.Name)
	})
	s.Found = slices.Compact(s.Found)
	s.Tries = []found{{
		Of: "errors", Name: "Dead letters whose error contains “" + text + "”",
		Path: "/dead-letters?q=" + url.QueryEscape(quoted(text)),
	}}
	if personName.MatchString(text) {
		s.Tries = append(s.Tries,
			found{Of: "audit", Name: "Actions by " + text, Path: "/audit?actor=" + url.QueryEscape(text)})
	}
	s.Tries = append(s.Tries, found{
		Of: "audit", Name: "Notes and reasons that contain “" + text + "”", Path: "/audit?text=" + url.QueryEscape(text),
	})
	return nil
}

// findByName returns functions that look for queues, destinations, sources and views whose name contains a text in
// lower case, and call add with each. They may run at the same time.
func findByName(in *request, lower string, add func(found)) []func() error {
	return []func() error{
		func() error {
			queues, _, err := callIfAllowed(in, api.ListQueues, api.QueuesInput{WithoutJobs: true})
			for _, q := range queues.Queues {
				if strings.Contains(strings.ToLower(q.Name), lower) {
					add(found{
						Of: "queue", Name: q.Name, Detail: plural(q.DeadLetters, "dead letter"),
						Path: "/queues#" + url.PathEscape(q.Name),
					})
					if q.DeadLetters > 0 {
						add(found{
							Of: "dead letters", Name: q.Name, Detail: "open in this queue",
							Path: "/dead-letters?q=" + url.QueryEscape(query("queue", q.Name, "status", "open")),
						})
					}
				}
				if q.Destination != "" && strings.Contains(strings.ToLower(q.Destination), lower) {
					add(found{
						Of: "destination", Name: q.Destination, Detail: "its dead letters",
						Path: "/dead-letters?q=" + url.QueryEscape(query("destination", q.Destination)),
					})
				}
			}
			return err
		},
		func() error {
			list, _, err := callIfAllowed(in, api.ListSources, api.None{})
			for i := range list.Sources {
				s := &list.Sources[i]
				if strings.Contains(strings.ToLower(s.Name), lower) {
					add(found{
						Of: "source", Name: s.Name, Detail: sourceMark(s.State).Word, Path: "/sources#" + url.PathEscape(s.Name),
					})
				}
			}
			for i := range list.Feeds {
				f := &feedRow{FeedStatus: list.Feeds[i]}
				if strings.Contains(strings.ToLower(f.Name), lower) {
					add(found{Of: "feed", Name: f.Name, Detail: f.Word().Word, Path: "/sources#feed-" + url.PathEscape(f.Name)})
				}
			}
			return err
		},
		func() error {
			views, _, err := callIfAllowed(in, api.ListViews, api.ViewsInput{})
			for _, v := range views.Views {
				if strings.Contains(strings.ToLower(v.Name), lower) {
					add(found{Of: "view", Name: v.Name, Detail: v.Query, Path: (&list{}).ViewPath(v)})
				}
			}
			return err
		},
	}
}

// findByID returns functions that look for a dead letter, a replay run, an operation and, for an operator, an approval
// with the id, and call add with each. They may run at the same time.
func (s *search) findByID(in *request, id string, add func(found)) []func() error {
	looks := []func() error{
		func() error {
			entry, ok, err := lookUp(in, api.GetEntry, api.EntryInput{ID: id})
			if ok {
				add(found{
					Of: "dead letter", Name: id, Detail: statusOf(entry.Status).Word + ", " + entry.Queue,
					Path: "/dead-letters/" + id, exact: true,
				})
			}
			return err
		},
		func() error {
			run, ok, err := lookUp(in, api.GetReplay, api.RunInput{ID: id})
			if ok {
				add(found{Of: "replay run", Name: id, Detail: run.Status, Path: "/replays/" + id, exact: true})
			}
			return err
		},
		func() error {
			operation, ok, err := lookUp(in, api.GetOperation, api.GetOperationInput{OperationInput: api.OperationInput{ID: id}})
			if ok {
				add(found{
					Of: "operation", Name: id, Detail: operation.Action + " by " + operation.Actor, Path: "/operations/" + id,
					exact: true,
				})
			}
			return err
		},
	}
	if in.me().May(access.Operator) {
		looks = append(looks, func() error {
			approval, ok, err := lookUp(in, api.GetApproval, api.GetApprovalInput{ApprovalInput: api.ApprovalInput{ID: id}})
			if ok {
				add(found{Of: "approval", Name: id, Detail: approval.State, Path: "/approvals/" + id, exact: true})
			}
			return err
		})
	}
	return looks
}

// findEntries adds the dead letters of a job.
func (s *search) findEntries(in *request, field, value string, add func(found)) error {
	page, ok, err := lookUp(in, api.ListEntries, api.ListInput{Q: query(field, value), Limit: 5})
	if ok {
		for i := range page.Entries {
			e := &page.Entries[i]
			add(found{
				Of: "dead letter", Name: e.ID.String(), Detail: statusOf(e.Status).Word + ", " + e.Queue,
				Path: "/dead-letters/" + e.ID.String(),
			})
		}
	}
	return err
}
