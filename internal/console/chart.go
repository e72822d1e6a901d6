package console

import (
	"fmt"
	"html/template"
	"math"
	"slices"
	"strings"
	"time"
)

// band is one series of a stacked chart.
type band struct {
	Name   string
	Values []int64
}

// marker is an event shown on a chart.
type marker struct {
	At         time.Time
	Kind, Text string // Kind is policy, replay or breaker
}

// Sign returns the character of the marker's kind.
func (m marker) Sign() string {
	return map[string]string{"policy": "▲", "replay": "◇", "breaker": "■"}[m.Kind]
}

// markerShapes are SVG paths of the signs, centred on the origin.
var markerShapes = map[string]string{
	"policy": "M0-5 5 4H-5Z", "replay": "M0-5.5 5.5 0 0 5.5-5.5 0Z", "breaker": "M-4-4H4V4H-4Z",
}

// chart is a chart over time, of stacked areas or bars. The page also shows its data as a table.
type chart struct {
	Title   string
	Starts  []time.Time
	Step    time.Duration
	Bands   []band
	Markers []marker
	File    string         // address of the chart as CSV; "" if there is none
	Image   string         // address of the chart as an SVG image; "" if there is none
	Zone    *time.Location // time zone of the chart's times; nil means UTC
	// Bars means that each value counts the events in its bucket, which the chart draws as a bar. Otherwise a value is
	// the level at the start of its bucket, and the area below the values is filled.
	Bars bool
	// Filter, if not nil, is the filter of the dead letters in the chart. A time range that the viewer chooses in the
	// chart or types is added to it.
	Filter *string
}

// From returns the beginning of the chart.
func (c *chart) From() time.Time { return c.Starts[0] }

// To returns the end of the chart.
func (c *chart) To() time.Time {
	end := c.Starts[len(c.Starts)-1]
	if c.Bars {
		end = end.Add(c.Step)
	}
	return end
}

// StepSeconds returns Step for the script.
func (c *chart) StepSeconds() int { return int(c.Step.Seconds()) }

// Field formats a time for a field.
func (c *chart) Field(at time.Time) string { return at.In(c.zone()).Format(fieldLayout) }

// zone returns Zone; UTC if it is nil.
func (c *chart) zone() *time.Location {
	if c.Zone == nil {
		return time.UTC
	}
	return c.Zone
}

func (c *chart) clock(at time.Time) string { return at.In(c.zone()).Format(clockLayout) }

// maxNamedMarkers is the maximum number of markers in a chart's summary, or in the title of one sign. The table has all
// markers.
const maxNamedMarkers = 6

// The chart fills the width of its container. Heights are in pixels; hour labels are drawn below
// plotBottom.
const (
	chartHeight = 176.0
	plotTop     = 14.0
	plotBottom  = 152.0
)

// Words describes an event with its time.
func (c *chart) Words(m marker) string { return m.Sign() + " " + m.Text + ", " + c.clock(m.At) }

// SVG draws the chart, or returns "" if there are fewer than two times or no bands. Colours come from the style sheet:
// bands have the classes series-1, series-2, ...
func (c *chart) SVG() template.HTML {
	n := len(c.Starts)
	if n < 2 || len(c.Bands) == 0 {
		return ""
	}
	totals := make([]int64, n)
	for _, b := range c.Bands {
		for i := range n {
			totals[i] += b.Values[i]
		}
	}
	top := niceTop(maxOf(totals))
	y := func(v float64) float64 { return plotTop + (plotBottom-plotTop)*(1-v/float64(top)) }
	var svg strings.Builder
	printf := func(format string, values ...any) { fmt.Fprintf(&svg, format, values...) }
	escape := template.HTMLEscapeString
	printf(`<svg class="chart" width="100%%" height="%g" role="img" aria-label="%s">`, chartHeight, escape(c.Summary()))
	for _, line := range []float64{0, 0.5, 1} {
		printf(`<line class="grid" x1="0" x2="100%%" y1="%.1f" y2="%.1f"/>`, y(line*float64(top)), y(line*float64(top)))
	}
	wide := n - 1
	if c.Bars {
		wide = n
	}
	printf(`<svg x="0" y="0" width="100%%" height="%g" viewBox="0 0 %d %g" preserveAspectRatio="none">`,
		chartHeight, wide, chartHeight)
	base := make([]float64, n)
	for k, b := range c.Bands {
		var up, down strings.Builder
		for i := range n {
			switch above := y(base[i] + float64(b.Values[i])); {
			case c.Bars && b.Values[i] > 0:
				fmt.Fprintf(&up, "M%.2f %.1fH%.2fV%.1fH%.2fZ", float64(i)+0.08, above, float64(i)+0.92, y(base[i]), float64(i)+0.08)
			case !c.Bars:
				fmt.Fprintf(&up, "%s%d %.1f", map[bool]string{true: "M", false: "L"}[i == 0], i, above)
				fmt.Fprintf(&down, "L%d %.1f", n-1-i, y(base[n-1-i]))
			}
		}
		for i := range n {
			base[i] += float64(b.Values[i])
		}
		if !c.Bars {
			down.WriteString("Z")
		}
		printf(`<path class="band series-%d" d="%s%s"><title>%s</title></path>`, k+1, up.String(),
			down.String(), escape(b.Name))
	}
	printf(`</svg>`)
	for _, line := range []float64{0.5, 1} {
		printf(`<text class="axis" x="2" y="%.1f">%s</text>`, y(line*float64(top))-3, escape(number(line*float64(top))))
	}
	layout := "15:04"
	switch {
	case c.Step >= day:
		layout = "2 Jan"
	case c.To().Sub(c.From()) > 2*day:
		layout = "2 Jan 15:04"
	}
	for k, anchor := range []string{"start", "middle", "middle", "middle", "end"} {
		printf(`<text class="axis" x="%d%%" y="%g" text-anchor="%s">%s</text>`, 25*k, chartHeight-6, anchor,
			c.Starts[k*(n-1)/4].In(c.zone()).Format(layout))
	}
	for _, m := range c.signs() {
		printf(`<svg class="marker marker-%s" x="%.2f%%" overflow="visible"><title>%s</title><line y1="%g" y2="%g"/><path d="%s" transform="translate(0 %g)"/></svg>`,
			m.kind, m.at, escape(m.words), plotTop-6, plotBottom, markerShapes[m.kind], plotTop-6)
	}
	printf(`</svg>`)
	return template.HTML(svg.String()) //nolint:gosec // numbers, and texts that were escaped
}

// Summary describes the chart in words.
func (c *chart) Summary() string {
	first, last, most := int64(0), int64(0), int64(0)
	n := len(c.Starts)
	if n == 0 {
		return c.Title + ": no data"
	}
	for i := range n {
		total := int64(0)
		for _, b := range c.Bands {
			total += b.Values[i]
		}
		if i == 0 {
			first = total
		}
		last, most = total, max(most, total)
	}
	texts := []string{fmt.Sprintf("%s, from %s to %s: first %s, maximum %s, now %s", c.Title,
		c.clock(c.Starts[0]), c.clock(c.To()), number(first),
		number(most), number(last))}
	marks := c.Marks()
	for _, m := range marks[max(len(marks)-maxNamedMarkers, 0):] {
		texts = append(texts, m.Text+" at "+c.clock(m.At))
	}
	return strings.Join(texts, "; ")
}

// Marks returns the markers within the chart's time range, sorted by time.
func (c *chart) Marks() (marks []marker) {
	for _, m := range c.Markers {
		if len(c.Starts) > 0 && !m.At.Before(c.Starts[0]) {
			marks = append(marks, m)
		}
	}
	slices.SortStableFunc(marks, func(a, b marker) int { return a.At.Compare(b.At) })
	return marks
}

// sign is the drawing of one marker, or of several markers of a kind that are close together.
type sign struct {
	kind, words string
	at          float64 // percent of the width
	many        int
}

// signs places the markers. Markers of one kind that are closer than apart become one sign. Signs of different kinds
// that are closer than apart are moved apart.
func (c *chart) signs() (signs []*sign) {
	const apart = 1.5 // minimum distance, in percent of the width
	span := c.To().Sub(c.From())
	last := map[string]*sign{}
	for _, m := range c.Marks() {
		at := 100 * math.Min(float64(m.At.Sub(c.Starts[0]))/float64(span), 1)
		if of := last[m.Kind]; of != nil && at < of.at+apart {
			if of.many++; of.many <= maxNamedMarkers {
				of.words += "\n" + c.Words(m)
			}
			continue
		}
		if len(signs) > 0 {
			at = max(at, signs[len(signs)-1].at+apart)
		}
		last[m.Kind] = &sign{m.Kind, c.Words(m), at, 1}
		signs = append(signs, last[m.Kind])
	}
	most := 100.0 // keep signs within the chart
	for _, s := range slices.Backward(signs) {
		s.at = max(min(s.at, most), 0)
		most = s.at - apart
	}
	for _, s := range signs {
		if s.many > maxNamedMarkers {
			s.words += fmt.Sprintf("\nand %d more; see the table", s.many-maxNamedMarkers)
		}
	}
	return signs
}

// Happened returns one marker for each kind in the chart, for the legend.
func (c *chart) Happened() (kinds []marker) {
	for _, m := range c.Marks() {
		if !slices.ContainsFunc(kinds, func(k marker) bool { return k.Kind == m.Kind }) {
			kinds = append(kinds, m)
		}
	}
	return kinds
}

// Rows returns the data of the chart as table rows.
func (c *chart) Rows() [][]string {
	rows := make([][]string, 0, len(c.Starts))
	for i, start := range c.Starts {
		row := make([]string, 0, 1+len(c.Bands))
		row = append(row, c.clock(start))
		for _, b := range c.Bands {
			row = append(row, number(b.Values[i]))
		}
		rows = append(rows, row)
	}
	return rows
}

// spark returns a small bar chart.
func spark(values []int64) template.HTML {
	if len(values) == 0 {
		return ""
	}
	const width, height = 96.0, 20.0
	most := float64(max(maxOf(values), 1))
	step := width / float64(len(values))
	var svg strings.Builder
	words := make([]string, len(values))
	for i, v := range values {
		words[i] = number(v)
	}
	fmt.Fprintf(&svg, `<svg class="spark" viewBox="0 0 %g %g" role="img" aria-label="failures over time: %s" preserveAspectRatio="none">`, width, height, strings.Join(words, ", "))
	// Use one path for all bars: a page of 50 groups has 3,000 bars.
	var bars, none strings.Builder
	for i, v := range values {
		path, h := &none, 0.75
		if v > 0 {
			path, h = &bars, math.Max(height*float64(v)/most, 1.5)
		}
		fmt.Fprintf(path, "M%.1f %gv-%.1fh%.1fv%.1fz", float64(i)*step, height, h, math.Max(step-1, 0.5), h)
	}
	fmt.Fprintf(&svg, `<path d="%s"/><path class="none" d="%s"/></svg>`, &bars, &none)
	return template.HTML(svg.String()) //nolint:gosec // numbers alone
}

func maxOf(values []int64) (most int64) {
	for _, v := range values {
		most = max(most, v)
	}
	return most
}

// niceTop returns the smallest number of the form 2, 4, 6 or 10 times a power of ten that is at least v. Half of it,
// the label in the middle of the axis, is a whole number.
func niceTop(v int64) int64 {
	for power := int64(1); ; power *= 10 {
		for _, d := range []int64{2, 4, 6, 10} {
			if d*power >= v {
				return d * power
			}
		}
	}
}
