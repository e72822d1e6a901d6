// Package redact hides secrets in URLs, and in texts that contain such secrets. Logs, pages and the database must not
// contain a text that grants access.
package redact

import (
	"cmp"
	"encoding/base64"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// Hidden is the text that replaces a secret.
const Hidden = "***"

// minSecretLength is the minimum length, in bytes, of a secret that is searched for in texts. A shorter secret would
// also match parts of ordinary words.
const minSecretLength = 4

// publicSegment matches a segment of a path, or the name of a parameter, that may be shown: lower-case words joined by
// -, _ or ., or a number of up to four digits, optionally after a v. A text that is longer or has upper-case letters
// may be a token.
var publicSegment = regexp.MustCompile(`^(v?[0-9]{1,4}|[a-z]{1,20}([-_.][a-z]{1,20}){0,4})$`)

// URL returns a URL in which these parts are hidden: user, password and fragment, the values of the query, and the
// segments of the path that may be tokens. It returns [Hidden] if raw is not a URL with a host.
func URL(raw string) string {
	u, err := url.Parse(raw)
	if err != nil || u.Host == "" {
		return Hidden
	}
	out := origin(u)
	segments := strings.Split(u.EscapedPath(), "/")
	for i, segment := range segments {
		if !isMethod(u) {
			segments[i] = maskSegment(segment)
		}
	}
	out += strings.Join(segments, "/")
	if u.RawQuery != "" {
		pairs := strings.Split(u.RawQuery, "&")
		for i, pair := range pairs {
			name, _, has := strings.Cut(pair, "=")
			pairs[i] = Hidden
			if has {
				pairs[i] = maskSegment(name) + "=" + Hidden
			}
		}
		out += "?" + strings.Join(pairs, "&")
	}
	if u.Fragment != "" {
		out += "#" + Hidden
	}
	return out
}

// Origin returns a URL with all parts hidden except scheme and host.
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

// isMethod reports whether the path of a URL is the name of a gRPC method, which is public.
func isMethod(u *url.URL) bool { return u.Scheme == "grpc" || u.Scheme == "grpcs" }

func maskSegment(segment string) string {
	if segment == "" || publicSegment.MatchString(segment) {
		return segment
	}
	return Hidden
}

var urls = regexp.MustCompile(`[a-zA-Z][a-zA-Z0-9+.-]*://[^\s"'<>` + "`" + `]+`)

// Text returns a text with [URL] applied to the URLs in it.
func Text(text string) string { return urls.ReplaceAllStringFunc(text, URL) }

// Secrets returns the parts of a URL that [URL] hides, both as written in the URL and decoded. If all is set, it also
// returns the path segments that [URL] shows.
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
		if all || maskSegment(segment) == Hidden && !isMethod(u) {
			decoded, _ := url.PathUnescape(segment)
			add(segment)
			add(decoded)
		}
	}
	for pair := range strings.SplitSeq(u.RawQuery, "&") {
		name, value, has := strings.Cut(pair, "=")
		if !has || maskSegment(name) == Hidden {
			add(name)
		}
		decoded, _ := url.QueryUnescape(value)
		add(value)
		add(decoded)
	}
	add(u.Fragment)
	return secrets
}

// Hide replaces secrets in a text.
func Hide(text string, secrets ...string) string {
	// Replace the longest secrets first, because one secret may be a part of another.
	slices.SortFunc(secrets, func(a, b string) int { return cmp.Compare(len(b), len(a)) })
	for _, secret := range secrets {
		if len(secret) >= minSecretLength {
			text = strings.ReplaceAll(text, secret, Hidden)
		}
	}
	return text
}
