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

// systemEvery is the render interval of an open system page.
const systemEvery = 10 * time.Second

type system struct {
	Sentence     string
	Health       *api.Health
	Parts        []part
	Automatic    *automatic.Overview
	WhyAutomatic string        // why the viewer cannot stop it; "" if they can
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
		WhyAutomatic: whyNot(in.me(), access.Operator, ""), WhyChecks: whyNot(in.me(), access.Admin, ""),
		Copies: append(copies("dlqd automatic; dlqd capture", "SELECT * FROM dlq.automatic; SELECT * FROM dlq.capture_status();", //nolint:unqueryvet // for people
			in.curl("/api/health", "/api/dlq/automatic", "/api/dlq/capture")), copyText{"the checks", "dlqd doctor"}),
	}
	if !in.me().May(access.Metrics) {
		return nil, &Problem{Status: http.StatusForbidden, Title: "Not for your role", Detail: "this page takes the role reader"}
	}
	var health api.Health
	ok, err := in.may("/api/health", nil, &health)
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
	if ok, err = in.may("/api/dlq/automatic", nil, &overview); err != nil {
		return nil, err
	} else if ok {
		s.Automatic = &overview
	}
	if s.Automatic != nil && s.Automatic.Stopped != nil && s.Automatic.Stopped.Restored {
		var said api.Restored
		if ok, err = in.may("/api/dlq/restored", nil, &said); err != nil {
			return nil, err
		} else if ok {
			s.Restored = &said
		}
	}
	var capture reconcile.Capture
	if ok, err = in.may("/api/dlq/capture", nil, &capture); err != nil {
		return nil, err
	} else if ok {
		s.Capture = &capture
	}
	s.Sentence = s.say()
	return &view{Template: "system", Title: "System", Data: s, Every: systemEvery, Section: "/system"}, nil
}

// Observing reports whether dlqd is attached to an application's River with all automatic
// redelivery off.
func (s *system) Observing() bool { return s.Automatic.Attached && !anyOn(s.Automatic.Switches) }

func (s *system) say() string {
	var said []string
	if s.Health != nil {
		var wrong []string
		for _, p := range s.Parts {
			if !p.OK {
				wrong = append(wrong, p.Name)
			}
		}
		switch {
		case len(wrong) == 0:
			said = append(said, "All "+number(len(s.Parts))+" parts of this process work.")
		default:
			said = append(said, plural(len(wrong), "part does", "parts do")+" not work: "+strings.Join(wrong, ", ")+".")
		}
	}
	if s.Automatic != nil {
		switch {
		case s.Automatic.Stopped != nil && s.Automatic.Stopped.Restored:
			said = append(said, "The database was restored, and dlqd holds what it would send a second time.")
		case s.Automatic.Stopped != nil:
			said = append(said, s.Automatic.Stopped.Actor+" has stopped all automatic redelivery.")
		case s.Observing():
			said = append(said, "dlqd only observes: it redelivers nothing by itself here.")
		default:
			said = append(said, "Dead letters are redelivered by themselves.")
		}
	}
	if c := s.Capture; c != nil {
		switch {
		case c.Mode == reconcile.ModeOff:
			said = append(said, "Capture is off: failures are found by the reconciler alone.")
		case c.Missed > 0:
			said = append(said, "Capture is "+c.Mode+"; "+plural(c.Missed, "failure that it missed was", "failures that it missed were")+" filed within 24 hours.")
		default:
			said = append(said, "Capture is "+c.Mode+", and missed nothing within 24 hours.")
		}
	}
	if len(said) == 0 {
		return "How the program is shown to those who may read every queue."
	}
	return strings.Join(said, " ")
}

// checks runs the checks of "dlqd doctor" and shows the results.
func (c *Console) checks(in *request) (*done, error) {
	v, err := c.system(in)
	if err != nil {
		return nil, err
	}
	s, ok := v.Data.(*system)
	if !ok {
		return nil, &Problem{Status: http.StatusInternalServerError, Title: "Something is wrong in dlqd", Detail: "its log says what"}
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
	v.Every = 0 // a rendering would remove the results from the page
	return &done{View: v}, nil
}

// resumeRestored lets a restored database send again.
func (c *Console) resumeRestored(in *request) (*done, error) {
	if err := in.post("/api/dlq/restored/resume", map[string]any{"note": in.PostFormValue("note")}, nil); err != nil {
		return nil, err
	}
	return &done{To: "/system#automatic", Flash: flash{Text: "The restored database goes on: what was held is sent."}}, nil
}

// steerAutomatic stops all automatic redelivery, or lifts the stop.
func (c *Console) steerAutomatic(in *request) (*done, error) {
	verb := in.PostFormValue("do")
	said := map[string]string{"stop": "All automatic redelivery is stopped: what a person replays goes on.", "resume": "The stop is lifted: the switches count again."}[verb]
	if said == "" {
		return nil, &Problem{Status: http.StatusUnprocessableEntity, Title: "No such action", Detail: "automatic redelivery can be stopped and resumed"}
	}
	if err := in.post("/api/dlq/automatic/"+verb, map[string]any{"note": in.PostFormValue("note")}, nil); err != nil {
		return nil, err
	}
	return &done{To: "/system#automatic", Flash: flash{Text: said}}, nil
}
