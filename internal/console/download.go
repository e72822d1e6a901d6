package console

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/analytics"
	"github.com/dlqd/dlqd/internal/api"
)

// exportPage is the page of a download of dead letters.
type exportPage struct {
	Query   string
	Count   *api.Count
	Problem *api.Problem
	Why     string // why the viewer may not download; "" if the viewer may
	Copies  []copyText
}

// chosenQuery returns the filter that a page's parameters select: the selected ids or, without ids, the filter.
func chosenQuery(values map[string][]string) string {
	if ids := values["id"]; len(ids) > 0 {
		return "id:" + strings.Join(ids, ",")
	}
	return strings.Join(values["q"], " ")
}

// exportForm shows what a download would contain.
func (c *Console) exportForm(in *request) (*view, error) {
	e := &exportPage{Query: chosenQuery(in.URL.Query()), Why: missingRole(in.me(), access.Operator)}
	if e.Why != "" {
		return nil, &api.Problem{Status: http.StatusForbidden, Detail: "a download " + e.Why}
	}
	v := &view{Template: "export", Title: "Download", Data: e, Section: "/dead-letters"}
	page, err := call(in, api.ListEntries, api.ListInput{Q: e.Query, CountOnly: true})
	if problem, ok := errors.AsType[*api.Problem](err); ok && problem.Status == http.StatusUnprocessableEntity {
		e.Problem, v.Status = problem, problem.Status
		return v, nil
	}
	if err != nil {
		return nil, err
	}
	e.Count = page.Count
	command := "dlqd export"
	if e.Query != "" {
		command += " " + shellQuoted(e.Query)
	}
	e.Copies = copies(command, "SELECT * FROM dlq.find("+sqlQuoted(in.filterJSON(e.Query))+");", //nolint:unqueryvet // for people
		curlPost(in, api.Export,
			api.ExportInput{Body: api.ExportInputBody{Filter: api.EntryFilter{Q: e.Query}, Format: "csv"}}))
	return v, nil
}

// export streams dead letters to the browser. As in any answer of the API, data is masked, and the export is recorded
// in the audit trail. If the export needs approval, export redirects to the request.
func (c *Console) export(w http.ResponseWriter, r *http.Request) {
	in := c.request(r)
	r.Body = http.MaxBytesReader(w, r.Body, maxFormBytes)
	if err := r.ParseForm(); err != nil {
		c.answer(w, in, nil, &api.Problem{
			Status: http.StatusRequestEntityTooLarge, Title: "Invalid form",
			Detail: "the form is malformed, or larger than 4 MiB",
		})
		return
	}
	body := api.ExportInputBody{Filter: api.EntryFilter{Q: chosenQuery(r.PostForm)}, Format: r.PostFormValue("format")}
	if r.PostFormValue("reveal") != "" {
		body.Reveal, body.Note = true, r.PostFormValue("note")
	}
	if id, err := uuid.Parse(r.PostFormValue("approval")); err == nil {
		body = api.ExportInputBody{Approval: &id, Format: body.Format}
	}
	sent, err := api.Export.Request(&api.ExportInput{Body: body})
	if err == nil {
		name := "dead-letters.ndjson"
		if body.Format == "csv" {
			name = "dead-letters.csv"
		}
		answer := &download{ResponseWriter: w, name: name}
		err = c.serve(r.Context(), r, sent, answer)
		if err == nil && answer.status == 0 {
			answer.WriteHeader(http.StatusOK) // the file is empty
		}
		if err == nil && answer.status == http.StatusOK {
			return
		}
		if err == nil {
			_, err = api.Export.Answer(answer.status, answer.Header(), answer.refused.Bytes())
		}
	}
	if asked, is := errors.AsType[*api.ApprovalRequestedError](err); is {
		setFlash(w, r, flash{Text: "A second person must approve this download. Once it is approved, download it here."})
		http.Redirect(w, r, "/approvals/"+asked.Approval.ID.String(), http.StatusSeeOther)
		return
	}
	if problem, is := errors.AsType[*api.Problem](err); is && access.LocalPath(r.PostFormValue("from")) {
		setFlash(w, r, flash{Bad: true, Text: problem.Error()})
		http.Redirect(w, r, r.PostFormValue("from"), http.StatusSeeOther) //nolint:gosec // access.LocalPath has checked it
		return
	}
	c.answer(w, in, nil, err)
}

// download passes an answer of the API on to the browser as a file. It buffers a refusal or a request for approval,
// from which the caller makes a page.
type download struct {
	http.ResponseWriter

	name    string
	status  int
	refused bytes.Buffer
	dropped http.Header // headers of a refusal
}

// Header implements http.ResponseWriter. Headers are buffered until the status is known.
func (d *download) Header() http.Header {
	if d.dropped == nil {
		d.dropped = http.Header{}
	}
	return d.dropped
}

// WriteHeader implements http.ResponseWriter.
func (d *download) WriteHeader(status int) {
	if d.status != 0 {
		return
	}
	if d.status = status; status != http.StatusOK {
		return
	}
	header := d.ResponseWriter.Header()
	header.Set("Content-Type", d.Header().Get("Content-Type"))
	header.Set("Content-Disposition", `attachment; filename="`+d.name+`"`)
	d.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (d *download) Write(p []byte) (int, error) {
	d.WriteHeader(http.StatusOK)
	if d.status != http.StatusOK {
		return d.refused.Write(p)
	}
	return d.ResponseWriter.Write(p)
}

// Unwrap returns the wrapped writer, for http.ResponseController.
func (d *download) Unwrap() http.ResponseWriter { return d.ResponseWriter }

// backlogFile serves the chart of the overview as a file.
func (c *Console) backlogFile(w http.ResponseWriter, r *http.Request) {
	c.chartFile(w, r, "backlog", func(in *request) (*chart, error) {
		var flow api.Report[analytics.Series]
		chosen := in.window("24h")
		err := readIfAllowed(in, api.GetFlow,
			api.FlowInput{WindowInput: api.WindowInput{Over: chosen.Over}, By: "class", Step: chosen.Step}, &flow)()
		if err != nil || len(flow.Rows) == 0 {
			return nil, err
		}
		if drawn := in.backlogChart(flow.Rows, chosen); len(drawn.Bands) > 0 {
			return drawn, nil
		}
		return nil, nil
	})
}

// failuresFile serves the chart of a failure group as a file.
func (c *Console) failuresFile(w http.ResponseWriter, r *http.Request) {
	c.chartFile(w, r, "failures", func(in *request) (*chart, error) {
		chosen := in.window("7d")
		detail, err := call(in, api.GetGroup, api.GetGroupInput{GroupInput: groupInput(in), Over: chosen.Over})
		if err != nil {
			return nil, err
		}
		return in.failuresChart(&detail.Group, chosen), nil
	})
}

// chartFile serves a chart with this name as CSV or as an SVG image. read reads the data as the chart's page does, with
// the viewer's rights. It returns nil if there is no such chart.
func (c *Console) chartFile(w http.ResponseWriter, r *http.Request, name string, read func(*request) (*chart, error)) {
	in := c.request(r)
	file := r.PathValue("file")
	var drawn *chart
	var err error
	if file == name+".csv" || file == name+".svg" {
		drawn, err = read(in)
	}
	if err == nil && drawn == nil {
		err = &api.Problem{Status: http.StatusNotFound, Detail: "there is no chart " + file + " to download"}
	}
	if err != nil {
		c.answer(w, in, nil, err)
		return
	}
	kind, raw := "text/csv; charset=utf-8", drawn.csv()
	if file == name+".svg" {
		kind, raw = "image/svg+xml", []byte(drawn.file())
	}
	header := w.Header()
	header.Set("Content-Type", kind)
	header.Set("Content-Security-Policy", contentSecurityPolicy)
	header.Set("Content-Disposition", fmt.Sprintf("attachment; filename=%q", file))
	_, _ = w.Write(raw)
}

// csv returns the data of the chart, a row for each time.
func (c *chart) csv() []byte {
	var out bytes.Buffer
	w := csv.NewWriter(&out)
	row := make([]string, 0, 1+len(c.Bands))
	row = append(row, "from")
	for _, b := range c.Bands {
		row = append(row, b.Name)
	}
	_ = w.Write(row) // a bytes.Buffer returns no error
	for i, start := range c.Starts {
		row = append(row[:0], start.UTC().Format(time.RFC3339))
		for _, b := range c.Bands {
			row = append(row, strconv.FormatInt(b.Values[i], 10))
		}
		_ = w.Write(row)
	}
	w.Flush()
	return out.Bytes()
}

// chartStyle has the colours of a chart outside of the console: the colours of the light theme.
const chartStyle = `<style>text{font:11px sans-serif;fill:#4b5468}.grid{stroke:#dfe3ea}.series-1{fill:#3f77d1}` +
	`.series-2{fill:#27b1bd}.series-3{fill:#d8a63a}.series-4{fill:#d75f2f}.series-5{fill:#a04fa3}.series-6{fill:#a3a9b4}` +
	`.marker line,.marker path{stroke:#4b5468;fill:#fff}</style><rect width="100%" height="100%" fill="#fff"/>`

// file returns the chart as an image that does not need the console's style sheet.
func (c *chart) file() string {
	image := string(c.SVG())
	head, rest, _ := strings.Cut(image, ">")
	head = strings.Replace(head, `width="100%"`, `width="960"`, 1)
	head = strings.Replace(head, "<svg", `<svg xmlns="http://www.w3.org/2000/svg"`, 1)
	var legend strings.Builder
	fmt.Fprintf(&legend, `<g transform="translate(0 %g)">`, chartHeight)
	for i, b := range c.Bands {
		fmt.Fprintf(&legend, `<rect class="series-%d" x="%d" y="6" width="10" height="10"/><text x="%d" y="15">%s</text>`,
			i+1, 150*i, 150*i+15, template.HTMLEscapeString(b.Name))
	}
	head = strings.Replace(head, fmt.Sprintf(`height="%g"`, chartHeight), fmt.Sprintf(`height="%g"`, chartHeight+24), 1)
	return head + ">" + chartStyle + strings.TrimSuffix(rest, "</svg>") + legend.String() + "</g></svg>"
}
