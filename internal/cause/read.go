package cause

import (
	"cmp"
	"encoding/json"
	"encoding/xml"
	"io"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"
)

const (
	// maxFields limits the fields that are read from a document. Further fields are ignored.
	maxFields = 1000
	// maxDepth is the largest number of keys in a path. Deeper values are skipped.
	maxDepth = 8
)

// fields holds the texts and numbers of a document by path. The first value at a path counts.
type fields struct {
	at    map[string]string
	first []string // paths of texts, in the document's order
	root  string   // text of a document that is a single string
}

func (f *fields) add(path []string, value string, isText bool) {
	if len(path) > maxDepth {
		return
	}
	if value = strings.TrimSpace(value); value == "" {
		return
	}
	if len(path) == 0 {
		if f.root == "" && isText {
			f.root = value
		}
		return
	}
	name := strings.Join(path, ".")
	if _, there := f.at[name]; there {
		return
	}
	f.at[name] = value
	if isText {
		f.first = append(f.first, name)
	}
}

// key normalizes a key for use in paths: lower case, without _, -, . and blanks.
func key(name string) string {
	name = strings.ToLower(name)
	if strings.ContainsAny(name, "_-. ") {
		name = strings.NewReplacer("_", "", "-", "", ".", "", " ", "").Replace(name)
	}
	return name
}

// readJSON reads a document up to its first mistake or its end. It returns the fields before that point.
func readJSON(body string) fields {
	f := fields{at: map[string]string{}}
	decoder := json.NewDecoder(strings.NewReader(body))
	decoder.UseNumber()
	type level struct{ object, value bool } // value: in an object, the next token is a value, not a key
	var levels []level
	var path []string
	for len(f.at) < maxFields {
		token, err := decoder.Token()
		if err != nil {
			return f
		}
		top := len(levels) - 1
		if top >= 0 && levels[top].object && !levels[top].value {
			if name, ok := token.(string); ok {
				path = append(path, key(name))
				levels[top].value = true
				continue
			}
		}
		switch t := token.(type) {
		case json.Delim:
			if t == '{' || t == '[' {
				levels = append(levels, level{object: t == '{'})
				continue
			}
			levels = levels[:top]
			top--
		case string:
			f.add(path, t, true)
		case json.Number:
			f.add(path, t.String(), false)
		}
		if top < 0 {
			return f
		}
		if levels[top].object { // the value of a key has ended
			levels[top].value = false
			path = path[:len(path)-1]
		}
	}
	return f
}

// readXML reads a document up to its first mistake or its end. Attributes are fields of their element.
func readXML(body string) fields {
	f := fields{at: map[string]string{}}
	decoder := xml.NewDecoder(strings.NewReader(body))
	decoder.Strict = false
	decoder.Entity = xml.HTMLEntity
	decoder.CharsetReader = func(_ string, input io.Reader) (io.Reader, error) {
		return input, nil // text has already converted the body to UTF-8
	}
	var path []string // starts with the root element
	var content strings.Builder
	leaf := false
	for len(f.at) < maxFields {
		token, err := decoder.Token()
		if err != nil {
			break
		}
		switch t := token.(type) {
		case xml.StartElement:
			leaf = true
			content.Reset()
			path = append(path, key(t.Name.Local))
			for _, attribute := range t.Attr {
				if !isXMLAttribute(attribute.Name) {
					f.add(slices.Concat(path[1:], []string{key(attribute.Name.Local)}), attribute.Value, false)
				}
			}
		case xml.CharData:
			if leaf && len(path) > 0 {
				content.Write(t)
			}
		case xml.EndElement:
			if leaf && len(path) > 0 {
				f.add(path[1:], content.String(), true)
			}
			leaf = false
			path = path[:max(len(path)-1, 0)]
		}
	}
	if leaf && len(path) > 0 { // the document is cut off within a text
		f.add(path[1:], content.String(), true)
	}
	return f
}

// isXMLAttribute reports whether an attribute belongs to XML itself, and not to the error.
func isXMLAttribute(name xml.Name) bool {
	return name.Space == "xmlns" || name.Local == "xmlns" || name.Space == "xml" ||
		strings.HasSuffix(name.Space, "XMLSchema-instance")
}

// ofFields chooses the parts of a cause. The answer's own paths take precedence over the built-in
// ones.
func (a *Answer) ofFields(f fields, body string) Cause {
	always := func(string, string) bool { return true }
	isSpecific := func(value string) bool { return !IsGeneric(value) && !IsStatus(value) && !a.isStatus(value) }
	c := Cause{
		Type: f.at[f.find(a.Paths.Type, always)], Code: f.at[f.find(a.Paths.Code, always)],
		Title: f.at[cmp.Or(f.find(a.Paths.Title, always), f.find(builtInPaths.Title, always))],
	}
	codeAt := ""
	if c.Type == "" {
		c.Type = f.at[f.find(builtInPaths.Type, func(path, value string) bool {
			return isSpecific(value) && isIdentifier(value) && (path != "name" || isErrorName(value))
		})]
	}
	if c.Code == "" {
		codeAt = f.find(builtInPaths.Code, func(path, value string) bool {
			if !isSpecific(value) || value == c.Type || len(value) > maxName || uniqueValue.MatchString(value) {
				return false
			}
			named := strings.HasSuffix(path, "code") || strings.HasSuffix(path, "value") || path == "details.issue"
			return isIdentifier(value) || named && (identifier.MatchString(value) || isNumber(value))
		})
		c.Code = f.at[codeAt]
	}
	isMessage := func(path, value string) bool {
		return path != codeAt && value != c.Title && value != c.Type && !a.isStatus(value)
	}
	if c.Message = f.at[f.find(a.Paths.Message, isMessage)]; c.Message == "" {
		c.Message = f.at[f.find(builtInPaths.Message, isMessage)]
	}
	switch {
	case c.Message != "" && c.Message[0] == '{' && strings.HasSuffix(c.Message, "}"): // JSON inside JSON, one level
		inner := (&Answer{Status: a.Status, Paths: a.Paths}).ofFields(readJSON(c.Message), "")
		if inner != (Cause{}) {
			inner.Type, inner.Code = cmp.Or(c.Type, inner.Type), cmp.Or(c.Code, inner.Code)
			inner.Title = cmp.Or(c.Title, inner.Title)
			return inner
		}
	case c.Message == "" && f.root != "":
		c.Message = f.root
	case c.Message == "" && c.Title == "" && c.Code == "":
		// The first text, after the last key of its path: {"email": ["is required"]}.
		for _, path := range f.first {
			value := f.at[path]
			if value != c.Type && !IsStatus(value) && !a.isStatus(value) && strings.Contains(value, " ") {
				c.Message = path[strings.LastIndexByte(path, '.')+1:] + ": " + value
				break
			}
		}
		if c == (Cause{}) && body != "" && body[0] != '<' {
			c.Message = body
		}
	}
	return c
}

// find returns the first of paths whose value ok accepts, or "".
func (f *fields) find(paths []string, ok func(path, value string) bool) string {
	for _, path := range paths {
		name := path
		if _, there := f.at[name]; !there {
			keys := strings.Split(strings.TrimPrefix(strings.ReplaceAll(path, "[]", ""), "$."), ".")
			for i := range keys {
				keys[i] = key(keys[i])
			}
			name = strings.Join(keys, ".")
		}
		if value, there := f.at[name]; there && ok(name, value) {
			return name
		}
	}
	return ""
}

// uniqueValue matches values that identify one failure rather than a kind of failure.
var uniqueValue = regexp.MustCompile(`[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-|[0-9]{8}|[0-9a-fA-F]{16}`)

// isErrorName reports whether a name is an error's: ValidationError, UNPROCESSABLE_ENTITY.
func isErrorName(value string) bool {
	if strings.Contains(value, "_") && value == strings.ToUpper(value) {
		return true
	}
	value = strings.ToLower(value)
	return strings.HasSuffix(value, "error") || strings.HasSuffix(value, "exception") || strings.HasSuffix(value, "fault")
}

func isNumber(value string) bool {
	return strings.Trim(strings.TrimPrefix(value, "-"), "0123456789") == ""
}

// isHTML reports whether a body is an HTML page.
func isHTML(body string) bool {
	if body[0] != '<' {
		return false
	}
	begin := strings.ToLower(body[:min(len(body), 2048)])
	if strings.Contains(begin, "<!doctype html") || strings.Contains(begin, "<html") {
		return true
	}
	return slices.ContainsFunc([]string{"<head", "<body", "<title", "<h1", "<p>", "<center", "<pre"},
		func(tag string) bool { return strings.HasPrefix(begin, tag) })
}

// ofHTML reads the cause from a page: from its title or, if it has none, its first heading or its text.
func (a *Answer) ofHTML(body string) Cause {
	tokens := html.NewTokenizer(strings.NewReader(body))
	tokens.SetMaxBuf(MaxBytes)
	var title, heading, content strings.Builder
	into := &content
	skip := atom.Atom(0) // the open element whose text is not part of the page
	for content.Len() < 4*MaxShown {
		switch tokens.Next() { //nolint:exhaustive // others have no text
		case html.ErrorToken:
			return a.ofPage(title.String(), heading.String(), content.String())
		case html.StartTagToken:
			name, _ := tokens.TagName()
			switch tag := atom.Lookup(name); tag { //nolint:exhaustive // others are transparent
			case atom.Title:
				into = &title
			case atom.H1:
				into = &heading
			case atom.Script, atom.Style, atom.Noscript, atom.Svg:
				skip = tag
			default:
				content.WriteByte(' ')
			}
		case html.EndTagToken:
			name, _ := tokens.TagName()
			switch tag := atom.Lookup(name); tag { //nolint:exhaustive // others are transparent
			case atom.Title, atom.H1:
				into = &content
			case skip:
				skip = 0
			}
		case html.TextToken:
			if skip == 0 && (into == &content || into.Len() < 4*MaxShown) {
				into.Write(tokens.Text())
			}
		}
	}
	return a.ofPage(title.String(), heading.String(), content.String())
}

func (a *Answer) ofPage(title, heading, content string) Cause {
	var c Cause
	for _, text := range []string{title, heading} {
		if text = line(text); text != "" && !a.isStatus(text) {
			c.Title = text
			break
		}
	}
	// A text of fewer than four words names the server, not the failure.
	if content = line(content); c.Title == "" && len(words.FindAllString(content, 4)) == 4 {
		c.Message = content
	}
	return c
}
