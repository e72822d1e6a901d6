package console

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/dlqd/dlqd/internal/api"
)

// openAPI gets the OpenAPI document, which huma serves beside the operations.
var openAPI = api.Operation[api.None, apiDocument]{Method: http.MethodGet, Path: "/openapi.json"}

// apiDocument is the part of the OpenAPI document that the page shows.
type apiDocument struct {
	Info       struct{ Description, Version string }
	Tags       []struct{ Name, Description string }
	Paths      map[string]map[string]*apiOperation
	Components struct{ Schemas map[string]*apiSchema }
}

type apiOperation struct {
	ID          string `json:"operationId"`
	Summary     string
	Description string
	Tags        []string
	Parameters  []*apiParameter
	RequestBody *struct {
		Content map[string]apiContent
	}
	Responses map[string]struct {
		Description string
		Content     map[string]apiContent
	}

	Method, Path string    `json:"-"`
	Fields       []apiItem `json:"-"` // of the body
	Request      string    `json:"-"` // an example
	Answers      []apiItem `json:"-"`
	Answer       string    `json:"-"` // an example of a successful answer
	Curl         string    `json:"-"`
}

type apiParameter struct {
	Name, In, Description string
	Required              bool
	Schema                *apiSchema
}

type apiContent struct {
	Schema  *apiSchema
	Example json.RawMessage
}

type apiSchema struct {
	Ref         string `json:"$ref"`
	Type        any
	Format      string
	Description string
	Items       *apiSchema
	Properties  map[string]*apiSchema
	Required    []string
	Enum        []any
	Default     any
}

// apiItem is a field or an answer with its description.
type apiItem struct{ Name, Kind, Text string }

// kind returns the type of a schema, such as string, date-time, "list of string" or the name of an object's schema.
func (s *apiSchema) kind() string {
	switch {
	case s == nil:
		return ""
	case s.Ref != "":
		return s.Ref[strings.LastIndex(s.Ref, "/")+1:]
	}
	name := fmt.Sprint(s.Type)
	if list, ok := s.Type.([]any); ok {
		name = ""
		for _, t := range list {
			if t != "null" {
				name = fmt.Sprint(t)
			}
		}
	}
	if name == "array" {
		return "list of " + cmp.Or(s.Items.kind(), "any")
	}
	return cmp.Or(s.Format, strings.TrimPrefix(name, "<nil>"), "any")
}

// Choices returns the values of an enumeration, or nil.
func (s *apiSchema) Choices() []string {
	if s != nil && s.Items != nil {
		s = s.Items
	}
	var choices []string
	if s != nil {
		for _, e := range s.Enum {
			choices = append(choices, fmt.Sprint(e))
		}
	}
	return choices
}

// Shown returns the description of a parameter, with its choices and its default.
func (p *apiParameter) Shown() string {
	text := p.Description
	if choices := p.Schema.Choices(); len(choices) > 0 {
		text += " One of " + strings.Join(choices, ", ") + "."
	}
	if p.Schema != nil && p.Schema.Default != nil {
		text += " Default: " + fmt.Sprint(p.Schema.Default) + "."
	}
	return strings.TrimSpace(text)
}

// Kind returns the type of the parameter.
func (p *apiParameter) Kind() string { return p.Schema.kind() }

// apiTag is a group of operations.
type apiTag struct {
	Name, Description string
	Operations        []*apiOperation
}

// apiReference caches the parsed OpenAPI document, which does not change while the program runs.
type apiReference struct {
	sync.Mutex

	tags []apiTag
	info string
}

func (d *apiReference) read(in *request) ([]apiTag, string, error) {
	d.Lock()
	defer d.Unlock()
	if d.tags != nil {
		return d.tags, d.info, nil
	}
	document, err := call(in, openAPI, api.None{})
	if err != nil {
		return nil, "", err
	}
	tags := make([]apiTag, 0, len(document.Tags))
	for _, t := range document.Tags {
		tags = append(tags, apiTag{Name: t.Name, Description: t.Description})
	}
	for path, methods := range document.Paths {
		for method, o := range methods {
			o.Method, o.Path = strings.ToUpper(method), path
			o.complete(document.Components.Schemas)
			at := slices.IndexFunc(tags, func(t apiTag) bool { return slices.Contains(o.Tags, t.Name) })
			if at < 0 {
				at = len(tags)
				tags = append(tags, apiTag{Name: cmp.Or(slices.Concat(o.Tags, []string{"other"})...)})
			}
			tags[at].Operations = append(tags[at].Operations, o)
		}
	}
	tags = slices.DeleteFunc(tags, func(t apiTag) bool { return len(t.Operations) == 0 })
	for i := range tags {
		slices.SortFunc(tags[i].Operations, func(a, b *apiOperation) int {
			return cmp.Or(strings.Compare(a.Path, b.Path), strings.Compare(a.Method, b.Method))
		})
	}
	d.tags, d.info = tags, document.Info.Description
	return d.tags, d.info, nil
}

// complete fills in the example command, the fields and the answers of an operation.
func (o *apiOperation) complete(schemas map[string]*apiSchema) {
	o.Curl = "curl -s"
	if o.Method != http.MethodGet {
		o.Curl += " -X " + o.Method
	}
	o.Curl += ` -H "Authorization: Bearer $DLQD_TOKEN" "$DLQD_API` + strings.NewReplacer("{", "$", "}",
		"").Replace(o.Path) + `"`
	if o.RequestBody != nil {
		content := o.RequestBody.Content["application/json"]
		o.Fields = fieldsOf(content.Schema, schemas)
		o.Request = pretty(content.Example)
		o.Curl += " -H 'Content-Type: application/json' -d " + shellQuoted(cmp.Or(string(content.Example), "{}"))
	}
	statuses := make([]string, 0, len(o.Responses))
	for status := range o.Responses {
		statuses = append(statuses, status)
	}
	slices.Sort(statuses)
	for _, status := range statuses {
		r := o.Responses[status]
		o.Answers = append(o.Answers, apiItem{Name: status, Text: r.Description})
		if content, ok := r.Content["application/json"]; ok && status < "300" && o.Answer == "" {
			o.Answer = pretty(content.Example)
		}
	}
}

// fieldsOf returns the fields of an object, required ones first.
func fieldsOf(s *apiSchema, schemas map[string]*apiSchema) []apiItem {
	if s != nil && s.Ref != "" {
		s = schemas[s.kind()]
	}
	if s == nil {
		return nil
	}
	var items []apiItem
	for name, p := range s.Properties {
		text := p.Description
		if choices := p.Choices(); len(choices) > 0 {
			text += " One of " + strings.Join(choices, ", ") + "."
		}
		kind := p.kind()
		if slices.Contains(s.Required, name) {
			kind += ", required"
		}
		items = append(items, apiItem{Name: name, Kind: kind, Text: text})
	}
	slices.SortFunc(items, func(a, b apiItem) int {
		return cmp.Or(-compareBool(strings.HasSuffix(a.Kind, "required"), strings.HasSuffix(b.Kind, "required")),
			strings.Compare(a.Name, b.Name))
	})
	return items
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

type docs struct {
	Info     string
	Query    string
	Tags     []apiTag
	Count    int
	SignedIn bool
	Copies   []copyText
}

// docs shows the API reference. It needs no authentication and shows no data; a visitor who is not
// signed in gets no navigation.
func (c *Console) docs(in *request) (*view, error) {
	me := in.me()
	d := &docs{
		Query: strings.TrimSpace(in.URL.Query().Get("q")), SignedIn: me.Name != "" || len(me.Grants) > 0,
		Copies: copies("dlqd openapi", "", in.curl("/openapi.yaml")),
	}
	in.frame.Bare = !d.SignedIn
	tags, info, err := c.reference.read(in)
	if err != nil {
		return nil, err
	}
	d.Info = info
	words := strings.Fields(strings.ToLower(d.Query))
	for _, t := range tags {
		found := apiTag{Name: t.Name, Description: t.Description}
		for _, o := range t.Operations {
			text := strings.ToLower(o.Method + " " + o.Path + " " + o.ID + " " + o.Summary + " " + o.Description + " " + t.Name)
			if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(text, word) }) {
				found.Operations = append(found.Operations, o)
			}
		}
		if len(found.Operations) > 0 {
			d.Tags = append(d.Tags, found)
			d.Count += len(found.Operations)
		}
	}
	return &view{Template: "docs", Title: "API", Data: d, Section: "/docs"}, nil
}

// tryOperation redirects a browser to a GET operation with the parameters of the form. It answers 404 for another
// operation.
func (c *Console) tryOperation(w http.ResponseWriter, r *http.Request) {
	in := c.request(r)
	tags, _, err := c.reference.read(in)
	if err != nil {
		c.answer(w, in, nil, err)
		return
	}
	params := r.URL.Query()
	for _, t := range tags {
		for _, o := range t.Operations {
			if o.ID != params.Get("operation") || o.Method != http.MethodGet {
				continue
			}
			path, query := o.Path, url.Values{}
			for _, p := range o.Parameters {
				value := params.Get("p-" + p.Name)
				switch {
				case p.In == "path":
					path = strings.ReplaceAll(path, "{"+p.Name+"}", url.PathEscape(cmp.Or(value, "-")))
				case p.In == "query" && value != "":
					query.Set(p.Name, value)
				}
			}
			if len(query) > 0 {
				path += "?" + query.Encode()
			}
			http.Redirect(w, r, path, http.StatusSeeOther)
			return
		}
	}
	c.answer(w, in, nil, &api.Problem{Status: http.StatusNotFound, Detail: "no GET operation has this name"})
}
