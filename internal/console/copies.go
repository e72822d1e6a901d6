package console

import (
	"encoding/json"
	"net/url"
	"strconv"
	"strings"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/filter"
)

// copyText is what one copies to see the same elsewhere: a command, SQL, or curl.
type copyText struct{ Name, Text string }

// copies are the ways in which a page is seen elsewhere; "" for one that there is none of.
func copies(command, sql, curl string) []copyText {
	var list []copyText
	for _, c := range []copyText{{"a command", command}, {"SQL", sql}, {"curl", curl}} {
		if c.Text != "" {
			list = append(list, c)
		}
	}
	return list
}

// curl asks the API, as a command, for paths with their queries.
func (in *request) curl(addresses ...string) string {
	commands := make([]string, len(addresses))
	for i, address := range addresses {
		commands[i] = "curl -s " + in.bearer() + `"$DLQD_API"` + shellQuoted(address)
	}
	return strings.Join(commands, "; ")
}

// curlPost is curl of an operation that takes a body.
func (in *request) curlPost(path string, body any) string {
	return "curl -s " + in.bearer() + `-H 'Content-Type: application/json' "$DLQD_API"` + shellQuoted(path) + " -d " + shellQuoted(jsonOf(body))
}

// bearer is the header with which curl says who asks, where a token is what says so.
func (in *request) bearer() string {
	if via := in.me().Via; via == access.ViaToken || via == access.ViaOIDC {
		return `-H "Authorization: Bearer $DLQD_TOKEN" `
	}
	return ""
}

// filterJSON is a filter of the language as SQL takes it.
func (in *request) filterJSON(text string) string {
	f, err := filter.Parse(text, in.me().Name)
	if err != nil {
		return "{}" // the API has understood it
	}
	return string(f.JSON())
}

// listCopies are those of a list of dead letters.
func (in *request) listCopies(text string, oldest bool, limit string) []copyText {
	command, sql, query := "dlqd list", "SELECT * FROM dlq.find("+sqlQuoted(in.filterJSON(text))+", "+limit, url.Values{"limit": {limit}} //nolint:unqueryvet // for people
	if text != "" {
		command += " " + shellQuoted(text)
		query.Set("q", text)
	}
	if command += " --limit " + limit; oldest {
		command, sql = command+" --order oldest", sql+", p_newest_first => false"
		query.Set("order", "oldest")
	}
	return copies(command, sql+");", in.curl("/api/dlq/entries?"+query.Encode()))
}

// jsonOf is a value as JSON.
func jsonOf(value any) string {
	raw, err := json.Marshal(value)
	if err != nil {
		return "null" // of our own making
	}
	return string(raw)
}

// sqlQuoted is a text as a literal of SQL.
func sqlQuoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

// shellQuoted is a text as a shell takes it for one word.
func shellQuoted(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// flagged is a command with one flag more.
func flagged(command, flag, value string) string {
	return command + " --" + flag + " " + shellQuoted(value)
}

// groupCopies are those of a list of failure groups, as the API is asked for it.
func (in *request) groupCopies(query url.Values) []copyText {
	chosen, flags := map[string]any{}, ""
	for _, name := range []string{"queue", "status", "owner", "hasOpen"} {
		value := query.Get(name)
		if value == "" {
			continue
		}
		flag := name
		switch {
		case name == "owner" && value == "nobody":
			chosen[name] = ""
		case name == "status":
			chosen[name] = strings.Split(value, ",")
		case name == "hasOpen":
			flag, chosen[name] = "has-open", value == "true"
		default:
			chosen[name] = value
		}
		flags = flagged(flags, flag, value)
	}
	sql := "SELECT * FROM dlq.groups(" + sqlQuoted(jsonOf(chosen)) + ", " + query.Get("limit") //nolint:unqueryvet // for people
	if order := query.Get("order"); order != "" {
		flags, sql = flagged(flags, "order", order), sql+", p_order => "+sqlQuoted(order)
	}
	if over := query.Get("over"); over != "" {
		flags = flagged(flags, "over", over)
		if n, err := strconv.Atoi(over[:len(over)-1]); err == nil {
			sql += ", p_over => " + sqlQuoted(strconv.Itoa(n)+map[byte]string{'m': " minutes", 'h': " hours", 'd': " days", 'w': " weeks"}[over[len(over)-1]])
		}
	}
	return copies("dlqd groups"+flags+" --limit "+query.Get("limit"), sql+");", in.curl("/api/dlq/groups?"+query.Encode()))
}
