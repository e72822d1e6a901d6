package api

import (
	"bytes"
	"encoding/json"
	"html/template"
	"net/http"
	"sort"

	"github.com/danielgtaylor/huma/v2"
)

var docsTemplate = template.Must(template.New("docs").Funcs(template.FuncMap{
	"pretty": func(v any) string {
		raw, err := json.MarshalIndent(v, "", "  ")
		if err != nil {
			return ""
		}
		return string(raw)
	},
	"choices": func(s *huma.Schema) []any {
		if s != nil && s.Items != nil {
			s = s.Items // of a list
		}
		if s == nil {
			return nil
		}
		return s.Enum
	},
}).Parse(`<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>dlqd API</title>
<style>
:root { color-scheme: light dark; --line: color-mix(in srgb, currentColor 18%, transparent); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .75rem 1rem; border: 1px solid var(--line); border-radius: 6px; }
section { border-top: 1px solid var(--line); margin-top: 2rem; }
h3 code { font-size: 15px; } h3 { margin-bottom: .25rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .3rem .8rem .3rem 0; vertical-align: top; border-bottom: 1px solid var(--line); }
.method { display: inline-block; min-width: 3.5rem; font-weight: 700; }
</style>
</head>
<body>
<h1>dlqd API</h1>
<p>{{.Info.Description}} The whole description is in <a href="/openapi.yaml">/openapi.yaml</a> and <a href="/openapi.json">/openapi.json</a> (OpenAPI {{.Version}}).</p>
<nav><ul>{{range .Operations}}<li><a href="#{{.OperationID}}"><code>{{.Method}} {{.Path}}</code></a> {{.Summary}}</li>{{end}}</ul></nav>
{{range .Operations}}
<section id="{{.OperationID}}">
<h3><code><span class="method">{{.Method}}</span> {{.Path}}</code></h3>
<p><strong>{{.Summary}}.</strong> {{.Description}}</p>
{{if .Parameters}}<table><tr><th>parameter</th><th>in</th><th></th></tr>
{{range .Parameters}}<tr><td><code>{{.Name}}</code></td><td>{{.In}}</td><td>{{.Description}}{{with choices .Schema}} One of {{range $i, $e := .}}{{if $i}}, {{end}}<code>{{$e}}</code>{{end}}.{{end}}</td></tr>{{end}}</table>{{end}}
{{with .RequestBody}}{{range .Content}}{{with .Example}}<p>Request</p><pre>{{pretty .}}</pre>{{end}}{{end}}{{end}}
{{range $status, $r := .Responses}}{{range $r.Content}}{{with .Example}}<p>Answer {{$status}}</p><pre>{{pretty .}}</pre>{{end}}{{end}}{{end}}
<p>Answers: {{range $status, $r := .Responses}}<code>{{$status}}</code> {{$r.Description}}; {{end}}errors are problem details (RFC 9457).</p>
</section>
{{end}}
</body>
</html>
`))

// docsPage is the API's description for people. It loads nothing from anywhere else.
func docsPage(api huma.API) http.Handler {
	var operations []*huma.Operation
	for _, path := range api.OpenAPI().Paths {
		for _, op := range []*huma.Operation{path.Get, path.Post, path.Put, path.Patch, path.Delete} {
			if op != nil {
				operations = append(operations, op)
			}
		}
	}
	sort.Slice(operations, func(i, j int) bool {
		a, b := operations[i], operations[j]
		return a.Path < b.Path || a.Path == b.Path && a.Method < b.Method
	})
	var page bytes.Buffer
	if err := docsTemplate.Execute(&page, map[string]any{
		"Info": api.OpenAPI().Info, "Version": api.OpenAPI().OpenAPI, "Operations": operations,
	}); err != nil {
		panic(err) // the template and the operations are both constant
	}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html; charset=utf-8")
		w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
		_, _ = w.Write(page.Bytes())
	})
}
