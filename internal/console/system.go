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
	Restored     *api.Restored // nil: not restored, or the viewer may not see what may be sent again
	Capture      *reconcile.Capture
	Checks       *api.Examination // nil: not run
	WhyChecks    string           // why the viewer cannot run the checks; "" if they can
	Wrong        int              // number of failed checks
	Hidden       bool             // the viewer may not see the health report
	Copies       []copyText
}

// part is a component of the program, with the time of its last success taken out of its detail.
type part struct {
	api.Part

	Last *time.Time
}

func newPart(p api.Part) part {
	text, rest, _ := strings.Cut(p.Detail, "; ")
	if stamp, is := strings.CutPrefix(text, "last success "); is {
		if at, err := time.Parse(time.RFC3339, stamp); err == nil {
			p.Detail = rest
			return part{p, &at}
		}
	}
	return part{p, nil}
}

func (c *Console) system(in *request) (*view, error) {
	s := &system{
		WhyAutomatic: missingRoleIn(in.me(), access.Operator, ""), WhyChecks: missingRoleIn(in.me(), access.Admin, ""),
		Copies: append(copies("dlqd automatic; dlqd capture", "SELECT * FROM dlq.automatic; SELECT * FROM dlq.capture_status();", //nolint:unqueryvet // for people
			in.curl("/api/health", "/api/dlq/automatic", "/api/dlq/capture")), copyText{"checks", "dlqd doctor"}),
	}
	if !in.me().May(access.Metrics) {
		return nil, &Problem{Status: http.StatusForbidden, Detail: "this page requires the role reader"}
	}
	var health api.Health
	ok, err := in.getIfAllowed("/api/health", nil, &health)
	if err != nil {
		return nil, err
	}
	if s.Hidden = !ok; ok {
		s.Health = &health
		for _, p := range health.Parts {
			s.Parts = append(s.Parts, newPart(p))
		}
	}
	var overview automatic.Overview
	if ok, err = in.getIfAllowed("/api/dlq/automatic", nil, &overview); err != nil {
		return nil, err
	} else if ok {
		s.Automatic = &overview
	}
	if s.Automatic != nil && s.Automatic.Stopped != nil && s.Automatic.Stopped.Restored {
		var restored api.Restored
		if ok, err = in.getIfAllowed("/api/dlq/restored", nil, &restored); err != nil {
			return nil, err
		} else if ok {
			s.Restored = &restored
		}
	}
	var capture reconcile.Capture
	if ok, err = in.getIfAllowed("/api/dlq/capture", nil, &capture); err != nil {
		return nil, err
	} else if ok {
		s.Capture = &capture
	}
	s.Sentence = s.summary()
	return &view{Template: "system", Title: "System", Data: s, Interval: systemInterval, Section: "/system"}, nil
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
		return nil, &Problem{
			Status: http.StatusInternalServerError, Title: "Internal error",
			Detail: "loading this page failed; see the log of dlqd",
		}
	}
	s.Checks = &api.Examination{}
	if err := in.post("/api/doctor", nil, s.Checks); err != nil {
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

// resumeRestored lets a restored database send again.
func (c *Console) resumeRestored(in *request) (*done, error) {
	if err := in.post("/api/dlq/restored/resume", map[string]any{"note": in.PostFormValue("note")}, nil); err != nil {
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
		return nil, &Problem{Status: http.StatusUnprocessableEntity, Title: "Unknown action", Detail: "choose stop or resume"}
	}
	if err := in.post("/api/dlq/automatic/"+verb, map[string]any{"note": in.PostFormValue("note")}, nil); err != nil {
		return nil, err
	}
	return &done{To: "/system#automatic", Flash: flash{Text: text}}, nil
}
