// Package redact hides secrets in URLs, and in texts that repeat them: what is logged, shown or kept must not let anybody in.
package redact

import (
	"cmp"
	"encoding/base64"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// Hidden stands for what is not shown.
const Hidden = "***"

// shortest is the length of the shortest secret that is looked for in texts, in bytes: shorter ones are parts of words.
const shortest = 4

// plain is a segment of a path, or the name of a parameter, that is shown: lower-case words, joined by - _ or ., or a number of up to
// four digits, with or without a v before it. What is longer, mixed or in capitals may be a token.
var plain = regexp.MustCompile(`^(v?[0-9]{1,4}|[a-z]{1,20}([-_.][a-z]{1,20}){0,4})$`)

// URL is a URL as people may see it: without user, password and fragment, without the values of its query, and without the segments
// of its path that may be tokens.
func URL(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" {
		return Hidden
	}
	out := origin(u)
	segments := strings.Split(u.EscapedPath(), "/")
	for i, segment := range segments {
		segments[i] = shown(segment)
	}
	out += strings.Join(segments, "/")
	if u.RawQuery != "" {
		pairs := strings.Split(u.RawQuery, "&")
		for i, pair := range pairs {
			name, _, has := strings.Cut(pair, "=")
			pairs[i] = Hidden
			if has {
				pairs[i] = shown(name) + "=" + Hidden
			}
		}
		out += "?" + strings.Join(pairs, "&")
	}
	if u.Fragment != "" {
		out += "#" + Hidden
	}
	return out
}

// Origin is a URL of which all is secret but where it leads.
func Origin(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" {
		return Hidden
	}
	return origin(u) + "/" + Hidden
}

func origin(u *url.URL) string {
	if u.User != nil {
		return u.Scheme + "://" + Hidden + "@" + u.Host
	}
	return u.Scheme + "://" + u.Host
}

func shown(segment string) string {
	if segment == "" || plain.MatchString(segment) {
		return segment
	}
	return Hidden
}

var urls = regexp.MustCompile(`[a-zA-Z][a-zA-Z0-9+.-]*://[^\s"'<>` + "`" + `]+`)

// Text is a text with the URLs in it as people may see them.
func Text(text string) string { return urls.ReplaceAllStringFunc(text, URL) }

// Secrets are the parts of a URL that [URL] does not show, as they are written there and as they are meant; with all, those of its
// path that are shown, too.
func Secrets(raw string, all bool) []string {
	u, err := url.Parse(raw)
	if err != nil {
		return nil
	}
	var secrets []string
	add := func(text string) { secrets = append(secrets, text) }
	if u.User != nil {
		password, _ := u.User.Password()
		add(u.User.String())
		add(u.User.Username())
		add(password)
		add(url.QueryEscape(password))
		add(base64.StdEncoding.EncodeToString([]byte(u.User.Username() + ":" + password)))
	}
	for segment := range strings.SplitSeq(u.EscapedPath(), "/") {
		if all || shown(segment) == Hidden {
			meant, _ := url.PathUnescape(segment)
			add(segment)
			add(meant)
		}
	}
	for pair := range strings.SplitSeq(u.RawQuery, "&") {
		name, value, has := strings.Cut(pair, "=")
		if !has || shown(name) == Hidden {
			add(name)
		}
		meant, _ := url.QueryUnescape(value)
		add(value)
		add(meant)
	}
	add(u.Fragment)
	return secrets
}

// Hide takes secrets out of a text.
func Hide(text string, secrets ...string) string {
	slices.SortFunc(secrets, func(a, b string) int { return cmp.Compare(len(b), len(a)) }) // one may be part of another
	for _, secret := range secrets {
		if len(secret) >= shortest {
			text = strings.ReplaceAll(text, secret, Hidden)
		}
	}
	return text
}
