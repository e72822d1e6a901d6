package console

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/html"
	"golang.org/x/net/html/atom"

	"github.com/dlqd/dlqd/internal/access"
)

// typed has the fields of a form that a user sent without being signed in. A cookie stores them during the sign-in.
// Afterwards, the page with the form is filled with them; nothing happens until the user sends the form again.
type typed struct {
	Action string     `json:"a"` // the path that the form was sent to
	Fields url.Values `json:"f"`
}

const (
	typedCookie = "-typed"
	// maxTyped limits the cookie, in bytes. A proxy such as nginx accepts 8 KiB of cookies in all.
	maxTyped = 2500
	// typedFor is how long the cookie is kept: a sign-in may take some minutes.
	typedFor = time.Hour
)

// setByPages are fields that pages set. They are not user input.
var setByPages = []string{"from", "next", "seen", "confirmed", "preview"}

// typedIn returns the fields of the form in a request. They are empty if the form cannot be read.
func typedIn(r *http.Request) *typed {
	t := &typed{Action: r.URL.EscapedPath(), Fields: url.Values{}}
	_ = r.ParseForm()
	for name, values := range r.PostForm {
		if !slices.Contains(setByPages, name) && strings.Join(values, "") != "" {
			t.Fields[name] = values
		}
	}
	return t
}

// keep sets the cookie. It returns false if the fields are too long for it.
func (t *typed) keep(w http.ResponseWriter, r *http.Request) bool {
	raw, err := json.Marshal(t)
	if err != nil || base64.RawURLEncoding.EncodedLen(len(raw)) > maxTyped {
		return false
	}
	access.SetCookie(w, r, typedCookie, base64.RawURLEncoding.EncodeToString(raw), typedFor)
	return true
}

// fillTyped looks for the form of the cookie's fields in a page. If the page has the form, fillTyped fills the
// fields in and deletes the cookie.
func fillTyped(w http.ResponseWriter, r *http.Request, page *bytes.Buffer) {
	var t typed
	raw, err := base64.RawURLEncoding.DecodeString(access.Cookie(r, typedCookie))
	if err != nil || json.Unmarshal(raw, &t) != nil {
		return // the usual case: there is no cookie
	}
	root, err := html.Parse(bytes.NewReader(page.Bytes()))
	if err != nil {
		return
	}
	form := t.formIn(root)
	if form == nil {
		return
	}
	t.fill(form)
	var filled bytes.Buffer
	if html.Render(&filled, root) != nil {
		return
	}
	*page = filled
	access.SetCookie(w, r, typedCookie, "", 0)
}

// formIn returns the form of a page to whose action the fields were sent, or nil. If several forms have this action, it
// returns the one with the most of the fields.
func (t *typed) formIn(root *html.Node) (form *html.Node) {
	most := -1
	for n := range root.Descendants() {
		action, _, _ := strings.Cut(attribute(n, "action"), "#")
		if n.DataAtom != atom.Form || action != t.Action {
			continue
		}
		fit := 0
		for field := range n.Descendants() {
			values := t.Fields[attribute(field, "name")]
			if len(values) > 0 && (isTextField(field) || slices.Contains(values, attribute(field, "value"))) {
				fit++
			}
		}
		if fit > most {
			form, most = n, fit
		}
	}
	return form
}

// fill sets the fields of a form, unfolds the form, and adds a line above it which says that nothing was done.
// The attribute data-typed keeps live updates from replacing a field.
func (t *typed) fill(form *html.Node) {
	for field := range form.Descendants() {
		values := t.Fields[attribute(field, "name")]
		if len(values) == 0 {
			continue
		}
		text := strings.ReplaceAll(values[0], "\r\n", "\n")
		kind := attribute(field, "type")
		switch {
		case field.DataAtom == atom.Textarea && field.FirstChild != nil:
			field.FirstChild.Data = text
		case field.DataAtom == atom.Textarea:
			field.AppendChild(&html.Node{Type: html.TextNode, Data: text})
		case isTextField(field):
			setAttribute(field, "value", text)
		case field.DataAtom == atom.Select:
			for option := range field.Descendants() {
				removeAttribute(option, "selected")
				if option.DataAtom == atom.Option && attribute(option, "value") == text {
					setAttribute(option, "selected", "")
				}
			}
		case (kind == "checkbox" || kind == "radio") && slices.Contains(values, attribute(field, "value")):
			setAttribute(field, "checked", "")
		default: // a button, or a field that the page sets
			continue
		}
		setAttribute(field, "data-typed", "")
	}
	for at := form; at != nil; at = at.Parent {
		if at.DataAtom == atom.Details {
			setAttribute(at, "open", "")
		}
	}
	note := &html.Node{Type: html.ElementNode, Data: "p", DataAtom: atom.P}
	setAttribute(note, "class", "warn")
	setAttribute(note, "role", "status")
	note.AppendChild(&html.Node{
		Type: html.TextNode, Data: "▲ You were signed out when you sent this form, so nothing was done. The form has what you typed.",
	})
	form.Parent.InsertBefore(note, form)
}

// isTextField reports whether users type into an element.
func isTextField(n *html.Node) bool {
	return n.DataAtom == atom.Textarea || n.DataAtom == atom.Input &&
		slices.Contains([]string{"", "text", "search", "number"}, attribute(n, "type"))
}

func attribute(n *html.Node, name string) string {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val
		}
	}
	return ""
}

func setAttribute(n *html.Node, name, value string) {
	removeAttribute(n, name)
	n.Attr = append(n.Attr, html.Attribute{Key: name, Val: value})
}

func removeAttribute(n *html.Node, name string) {
	n.Attr = slices.DeleteFunc(n.Attr, func(a html.Attribute) bool { return a.Key == name })
}
