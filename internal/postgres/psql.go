package postgres

import (
	"errors"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// onlyPgx lists connection parameters of pgx that libpq refuses.
var onlyPgx = []string{
	"default_query_exec_mode", "description_cache_capacity", "statement_cache_capacity",
	"min_read_buffer_size",
}

// keywordPassword matches the password in a connection string of keywords and values.
var keywordPassword = regexp.MustCompile(`(?:^|\s)password\s*=\s*('(?:[^'\\]|\\.)*'|(?:[^\s\\]|\\.)*)`)

// ForPsql returns the connection string without its password, in a form that libpq accepts, and the password. It
// returns an error if it cannot parse the string, because the password could then remain in the result.
func ForPsql(connString string) (clean, password string, err error) {
	if _, err := parse(connString); err != nil {
		return "", "", err
	}
	if !strings.HasPrefix(connString, "postgres://") && !strings.HasPrefix(connString, "postgresql://") {
		if match := keywordPassword.FindStringSubmatch(connString); match != nil {
			password = regexp.MustCompile(`\\(.)`).ReplaceAllString(strings.TrimSuffix(strings.TrimPrefix(match[1], "'"), "'"),
				"$1")
		}
		return strings.TrimSpace(keywordPassword.ReplaceAllString(connString, "")), password, nil
	}
	u, err := url.Parse(connString)
	if err != nil {
		return "", "", errors.New("database URL: cannot be parsed")
	}
	if u.User != nil {
		password, _ = u.User.Password()
		u.User = url.User(u.User.Username())
	}
	query := u.Query()
	if p := query.Get("password"); p != "" {
		password = p
	}
	for name := range query {
		if name == "password" || strings.HasPrefix(name, "pool_") || slices.Contains(onlyPgx, name) {
			query.Del(name)
		}
	}
	u.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20") // libpq does not decode + as a space
	return u.String(), password, nil
}
