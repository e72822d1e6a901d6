package console

import (
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
)

const (
	zoneCookie = "dlqd-zone"
	zonePeriod = 365 * 24 * time.Hour
	// clockLayout is the layout of times on pages, and exactLayout the layout of their titles. If a zone has no
	// abbreviation, its offset is shown.
	clockLayout = "2 Jan 15:04 MST"
	exactLayout = "Mon 2 Jan 2006 15:04:05 MST"
)

// zones caches time zones by their names in the time zone database.
var zones sync.Map

// zoneName matches names in the time zone database. Other spellings of a path ("Europe//Paris") would also load, and
// would fill the cache.
var zoneName = regexp.MustCompile(`^[A-Z][A-Za-z0-9_+-]{0,30}(/[A-Z][A-Za-z0-9_+-]{0,30}){0,2}$`)

// zoneNamed returns a time zone by its name in the time zone database; nil if there is none.
func zoneNamed(name string) *time.Location {
	if name == "Local" || !zoneName.MatchString(name) {
		return nil
	}
	if known, ok := zones.Load(name); ok {
		zone, _ := known.(*time.Location)
		return zone
	}
	zone, err := time.LoadLocation(name)
	if err != nil {
		return nil
	}
	zones.Store(name, zone)
	return zone
}

// zoneOf returns the time zone that the viewer of a request has chosen, or UTC.
func zoneOf(r *http.Request) *time.Location {
	if cookie, err := r.Cookie(zoneCookie); err == nil {
		if zone := zoneNamed(cookie.Value); zone != nil {
			return zone
		}
	}
	return time.UTC
}

// zone returns the time zone in which the viewer sees times.
func (in *request) zone() *time.Location { return zoneOf(in.Request) }

// clock formats a time for the viewer.
func (in *request) clock(at time.Time) string { return at.In(in.zone()).Format(clockLayout) }

// today returns the beginning of the viewer's day.
func (in *request) today() time.Time { return dayOf(in.now, in.zone()) }

// dayOf returns the beginning of the day of a time in a zone.
func dayOf(at time.Time, zone *time.Location) time.Time {
	year, month, date := at.In(zone).Date()
	return time.Date(year, month, date, 0, 0, 0, 0, zone)
}

// setZone stores the time zone that the viewer chooses, in a cookie of the browser.
func (c *Console) setZone(in *request) (*done, error) {
	name := strings.TrimSpace(in.PostFormValue("zone"))
	zone := zoneNamed(name)
	if zone == nil {
		return nil, &api.Problem{
			Status: http.StatusUnprocessableEntity, Title: "Unknown time zone",
			Detail: "unknown time zone " + name + ": must be a name such as Europe/Paris, or UTC",
		}
	}
	d := &done{To: "/access#zone", Flash: flash{Text: "Times are shown in " + zone.String() + "."}}
	if from := in.PostFormValue("from"); access.LocalPath(from) {
		d.To = from
	}
	d.Cookie = &http.Cookie{ //nolint:gosec // Secure wherever the browser uses TLS
		Name: zoneCookie, Value: zone.String(), Path: "/", MaxAge: int(zonePeriod.Seconds()), Secure: in.TLS != nil,
		HttpOnly: true, SameSite: http.SameSiteStrictMode,
	}
	return d, nil
}
