package console

import (
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/policy"
)

// window is a time range of charts that ends now.
type window struct {
	Name, Over string
	// Step is the step for which the API is asked, and Every the step of the chart.
	Step  string
	Every time.Duration
	// Trend is the time that one number of a failure group's trend covers (see dlq.group_trend).
	Trend time.Duration
}

const day = 24 * time.Hour

// windows are the time ranges of charts.
var windows = []window{
	{"1 h", "1h", "minute", time.Minute, time.Minute},
	{"6 h", "6h", "minute", 5 * time.Minute, 5 * time.Minute},
	{"24 h", "24h", "hour", time.Hour, time.Hour},
	{"7 d", "7d", "hour", 3 * time.Hour, day},
	{"30 d", "30d", "day", day, day},
}

// windowOf returns the window with this length, or the fallback if there is none.
func windowOf(over, fallback string) window {
	for _, name := range []string{over, fallback} {
		if i := slices.IndexFunc(windows, func(w window) bool { return w.Over == name }); i >= 0 {
			return windows[i]
		}
	}
	return windows[0] // unreachable: fallback is one of windows
}

// window returns the window that the page's address has.
func (in *request) window(fallback string) window {
	return windowOf(in.URL.Query().Get("over"), fallback)
}

// choice is a link to a page with another setting.
type choice struct {
	Name, Path string
	Current    bool
}

// windowChoices returns links to the page with each of the windows.
func (in *request) windowChoices(current window) []choice {
	list := make([]choice, len(windows))
	for i, w := range windows {
		list[i] = choice{w.Name, in.with("cursor", "", "over", w.Over), w.Over == current.Over}
	}
	return list
}

// merged joins buckets into longer ones. It adds up Captured and Failures and takes Open from the last bucket. The
// other counts are 0.
func merged(buckets []analytics.Bucket, every time.Duration) (list []analytics.Bucket) {
	for _, b := range buckets {
		start := b.Start.UTC().Truncate(every)
		if n := len(list); n == 0 || !list[n-1].Start.Equal(start) {
			list = append(list, analytics.Bucket{Start: start})
		}
		last := &list[len(list)-1]
		last.Captured += b.Captured
		last.Failures += b.Failures
		last.Open = b.Open
	}
	return list
}

// trendStarts returns when the n buckets of a failure group's trend begin.
func (w window) trendStarts(now time.Time, n int) []time.Time {
	list := make([]time.Time, n)
	for i := range list {
		list[i] = now.UTC().Truncate(w.Trend).Add(-time.Duration(n-1-i) * w.Trend)
	}
	return list
}

// fitting returns the shortest window, up to longest, that shows all failures of a group of this age. In a longer
// window, the failures of a young group would be a single bar.
func fitting(age time.Duration, longest window) window {
	for _, w := range windows {
		length, err := policy.ParseDuration(w.Over)
		if w == longest || err == nil && age < length {
			return w
		}
	}
	return longest
}

// isYoung reports whether a failure group is younger than an hour: in a longer window its trend would be a single bar.
func isYoung(firstSeen, now time.Time) bool { return now.Sub(firstSeen) < time.Hour }

// timeFields are the fields of a filter that select a time.
var timeFields = []string{"after", "before", "failed", "age"}

// withoutTimes returns a filter without its fields for times.
func withoutTimes(query string) string {
	_, terms := filter.Read(query, "")
	var kept []string
	text := []rune(query) // terms have positions in runes, and each invalid byte counts as one
	for _, t := range terms {
		if t.Problem != "" || !slices.Contains(timeFields, t.Field) {
			kept = append(kept, string(text[t.From:t.To]))
		}
	}
	return strings.Join(kept, " ")
}

// timeLayouts are the layouts in which a viewer may type a time. A time without a zone is in the viewer's zone.
var timeLayouts = []string{
	time.RFC3339, "2006-01-02T15:04Z07:00", "2006-01-02T15:04", "2006-01-02T15:04:05", "2006-01-02 15:04", time.DateTime,
	time.DateOnly,
}

// parseTime returns a time that the viewer typed.
func (in *request) parseTime(text string) (at time.Time, ok bool) {
	for _, layout := range timeLayouts {
		if at, err := time.ParseInLocation(layout, strings.TrimSpace(text), in.zone()); err == nil {
			return at, true
		}
	}
	return at, false
}

// ranged returns a filter whose time range is replaced by the parameters from and to of the page's address. If both are
// absent, it returns the filter unchanged; if a time is invalid, it also returns the problem.
func (in *request) ranged(query string) (string, *api.Problem) {
	ends := map[string]string{}
	for _, name := range []string{"from", "to"} {
		text := in.URL.Query().Get(name)
		if text == "" {
			continue
		}
		at, ok := in.parseTime(text)
		if !ok || at.Year() < 1 || at.Year() > 9999 {
			return query, &api.Problem{
				Status: http.StatusUnprocessableEntity, Title: "Invalid time",
				Detail: "invalid time " + text + ": must be like 2026-11-20T08:00",
			}
		}
		layout := "2006-01-02T15:04Z"
		if at.Second() != 0 {
			layout = "2006-01-02T15:04:05Z"
		}
		ends[name] = at.UTC().Format(layout)
	}
	if len(ends) == 0 {
		return query, nil
	}
	return strings.TrimSpace(withoutTimes(query) + " failed:" + ends["from"] + ".." + ends["to"]), nil
}

// timeRange is the time range of a list, for its menu.
type timeRange struct {
	Words    string
	From, To string // values of datetime-local fields
	Choices  []choice
	Query    string // the filter without its times
}

const fieldLayout = "2006-01-02T15:04"

// timeRange returns the time range of a filter.
func (in *request) timeRange(query, path string) *timeRange {
	rest := withoutTimes(query)
	r := &timeRange{Words: "Any time", Query: rest}
	link := func(name, q string, current bool) {
		r.Choices = append(r.Choices, choice{name, path + "?" + url.Values{"q": {q}}.Encode(), current})
	}
	f, err := filter.Parse(query, in.actor())
	set := err == nil && (f.After != "" || f.Before != "" || f.MinAge != "" || f.MaxAge != "")
	for _, w := range windows {
		q := strings.TrimSpace(rest + " age:<" + w.Over)
		link(w.Name, q, strings.TrimSpace(query) == q)
		if strings.TrimSpace(query) == q {
			r.Words, set = "Last "+w.Name, false
		}
	}
	link("any", rest, r.Words == "Any time" && !set)
	if !set {
		return r
	}
	r.Words = "Some time"
	ends := [2]string{"…", "…"}
	for i, text := range []string{f.After, f.Before} {
		if at, err := time.Parse(time.RFC3339Nano, text); err == nil {
			ends[i] = in.clock(at)
			*[]*string{&r.From, &r.To}[i] = at.In(in.zone()).Format(fieldLayout)
		}
	}
	if f.After != "" || f.Before != "" {
		r.Words = ends[0] + " – " + ends[1]
	}
	return r
}
