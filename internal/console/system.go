package console

import (
	"net/http"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/automatic"
	"github.com/dlqd/dlqd/internal/reconcile"
)

// systemInterval is the render interval of an open system page.
const systemInterval = 10 * time.Second

type system struct {
	Sentence     string
	Health       *api.Health
	Parts        []part
	Automatic    *automatic.Overview
	WhyAutomatic string        // why the viewer cannot stop it; "" if the viewer can
	Restored     *api.Restored // nil if the database was not restored, or if the viewer may not see what may be sent again
	Capture      *reconcile.Capture
	Checks       *api.Examination // nil if the checks were not run
	WhyChecks    string           // why the viewer cannot run the checks; "" if they can
	Wrong        int              // number of failed checks
	Hidden       bool             // the viewer may not see the health report
	Copies       []copyText
}

// part is a part of the program. The time of its last success is removed from its detail.
type part struct {
	api.Part

	Last *time.Time
}

func newPart(p api.Part) part {
	p.Detail = inTime.Replace(p.Detail)
	text, rest, _ := strings.Cut(p.Detail, "; ")
	if stamp, is := strings.CutPrefix(text, "last success "); is {
		if at, err := time.Parse(time.RFC3339, stamp); err == nil {
			p.Detail = rest
			return part{p, &at}
		}
	}
	return part{p, nil}
}

// CaptureLimit returns how long capture may work in one statement, as a duration.
func (s *system) CaptureLimit() string {
	parts := strings.Split(s.Capture.Limit, ":")
	if len(parts) != 3 {
		return s.Capture.Limit // an interval with days
	}
	limit, err := time.ParseDuration(parts[0] + "h" + parts[1] + "m" + parts[2] + "s")
	switch {
	case err != nil:
		return s.Capture.Limit
	case limit > time.Second && limit%time.Second != 0:
		return limit.String()
	}
	return lasted(limit)
}

func (c *Console) system(in *request) (*view, error) {
	s := &system{
		WhyAutomatic: missingRoleIn(in.me(), access.Operator, ""), WhyChecks: missingRoleIn(in.me(), access.Admin, ""),
		Copies: append(copies("dlqd automatic; dlqd capture", "SELECT * FROM dlq.automatic; SELECT * FROM dlq.capture_status();", //nolint:unqueryvet // for people
			in.curl(api.GetHealth.Path, api.GetAutomatic.Path, api.GetCapture.Path)), copyText{"checks", "dlqd doctor"}),
	}
	if !in.me().May(access.Metrics) {
		return nil, &api.Problem{Status: http.StatusForbidden, Detail: "this page requires the role reader"}
	}
	health, ok, err := callIfAllowed(in, api.GetHealth, api.None{})
	if err != nil {
		return nil, err
	}
	if s.Hidden = !ok; ok {
		s.Health = health
		for _, p := range health.Parts {
			s.Parts = append(s.Parts, newPart(p))
		}
	}
	overview, ok, err := callIfAllowed(in, api.GetAutomatic, api.None{})
	if err != nil {
		return nil, err
	}
	if ok {
		s.Automatic = overview
	}
	if s.Automatic != nil && s.Automatic.Stopped != nil && s.Automatic.Stopped.Restored {
		restored, ok, err := callIfAllowed(in, api.GetRestored, api.None{})
		if err != nil {
			return nil, err
		}
		if ok {
			s.Restored = restored
		}
	}
	capture, ok, err := callIfAllowed(in, api.GetCapture, api.None{})
	if err != nil {
		return nil, err
	}
	if ok {
		s.Capture = capture
	}
	s.Sentence = s.summary()
	return &view{Template: "system", Title: "System", Data: s, Interval: systemInterval, Section: "/system"}, nil
}

// Failing returns the parts that do not work.
func (s *system) Failing() []part { return s.partsThat(false) }

// Working returns the parts that work.
func (s *system) Working() []part { return s.partsThat(true) }

func (s *system) partsThat(work bool) (list []part) {
	for _, p := range s.Parts {
		if p.OK == work {
			list = append(list, p)
		}
	}
	return list
}

// Observing reports whether dlqd is attached to an application's River with all automatic
// redelivery off.
func (s *system) Observing() bool { return s.Automatic.Attached && !anyOn(s.Automatic.Switches) }

func (s *system) summary() string {
	var sentences []string
	if s.Health != nil {
		var wrong []string
		for _, p := range s.Parts {
			if !p.OK {
				wrong = append(wrong, p.Name)
			}
		}
		switch {
		case len(wrong) == 0:
			sentences = append(sentences, "All "+number(len(s.Parts))+" parts of this process work.")
		default:
			sentences = append(sentences, plural(len(wrong), "part fails", "parts fail")+": "+strings.Join(wrong, ", ")+".")
		}
	}
	if s.Automatic != nil {
		switch {
		case s.Automatic.Stopped != nil && s.Automatic.Stopped.Restored:
			sentences = append(sentences, "The database was restored. dlqd holds what it might send a second time.")
		case s.Automatic.Stopped != nil:
			sentences = append(sentences, s.Automatic.Stopped.Actor+" has stopped all automatic redelivery.")
		case s.Observing():
			sentences = append(sentences, "dlqd only observes: automatic redelivery is off.")
		default:
			sentences = append(sentences, "Automatic redelivery is on.")
		}
	}
	if c := s.Capture; c != nil {
		switch {
		case c.Mode == reconcile.ModeOff:
			sentences = append(sentences, "Capture is off: only the reconciler finds failures.")
		case c.Missed > 0:
			sentences = append(sentences, "Capture is "+c.Mode+"; the reconciler filed "+plural(c.Missed, "missed failure")+
				" in the last 24 hours.")
		default:
			sentences = append(sentences, "Capture is "+c.Mode+" and missed no failure in the last 24 hours.")
		}
	}
	if len(sentences) == 0 {
		return "The state of dlqd requires access to every queue."
	}
	return strings.Join(sentences, " ")
}

// checks runs the checks of "dlqd doctor" and shows the results.
func (c *Console) checks(in *request) (*done, error) {
	v, err := c.system(in)
	if err != nil {
		return nil, err
	}
	s, ok := v.Data.(*system)
	if !ok {
		return nil, &api.Problem{
			Status: http.StatusInternalServerError, Title: "Internal error",
			Detail: "loading this page failed; see the log of dlqd",
		}
	}
	if s.Checks, err = call(in, api.Examine, api.None{}); err != nil {
		return nil, err
	}
	for _, f := range s.Checks.Findings {
		if !f.OK {
			s.Wrong++
		}
	}
	v.Interval = 0 // a rendering would remove the results from the page
	return &done{View: v}, nil
}

// automaticInput returns the note of a form as the input of an operation on automatic redelivery.
func automaticInput(in *request) api.AutomaticInput {
	return api.AutomaticInput{Body: &api.AutomaticAction{Action: api.Action{Note: in.PostFormValue("note")}}}
}

// resumeRestored lets dlqd send again after the database was restored.
func (c *Console) resumeRestored(in *request) (*done, error) {
	if _, err := call(in, api.ResumeRestored, automaticInput(in)); err != nil {
		return nil, err
	}
	return &done{To: "/system#automatic", Flash: flash{Text: "Sending resumed: dlqd sends what was held."}}, nil
}

// switchAutomatic stops all automatic redelivery, or lifts the stop.
func (c *Console) switchAutomatic(in *request) (*done, error) {
	verb := in.PostFormValue("do")
	text := map[string]string{
		"stop":   "All automatic redelivery is stopped. Replays by operators continue.",
		"resume": "The stop is lifted. The switches apply again.",
	}[verb]
	if text == "" {
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown action", Detail: "choose stop or resume",
		}
	}
	operation := api.StopAutomatic
	if verb == "resume" {
		operation = api.ResumeAutomatic
	}
	if _, err := call(in, operation, automaticInput(in)); err != nil {
		return nil, err
	}
	return &done{To: "/system#automatic", Flash: flash{Text: text}}, nil
}
