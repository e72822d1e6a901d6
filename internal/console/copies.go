package console

import (
	"encoding/json"
	"net/url"
	"strconv"
	"strings"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/filter"
)

// copyText is a text to copy that shows the same data elsewhere: a command, SQL or curl.
type copyText struct{ Name, Text string }

// copies returns the texts that are not "".
func copies(command, sql, curl string) []copyText {
	var list []copyText
	for _, c := range []copyText{{"command", command}, {"SQL", sql}, {"curl", curl}} {
		if c.Text != "" {
			list = append(list, c)
		}
	}
	return list
}

// curl returns a shell command that gets the given paths from the API.
func (in *request) curl(addresses ...string) string {
	commands := make([]string, len(addresses))
	for i, address := range addresses {
		commands[i] = "curl -s " + in.bearer() + `"$DLQD_API"` + shellQuoted(address)
	}
	return strings.Join(commands, "; ")
}

// curlPost returns a curl command that posts a JSON body.
func (in *request) curlPost(path string, body any) string {
	return "curl -s " + in.bearer() + `-H 'Content-Type: application/json' "$DLQD_API"` + shellQuoted(path) + " -d " +
		shellQuoted(jsonOf(body))
}

// bearer returns curl's option for the Authorization header, or "" if the viewer did not
// authenticate by a bearer token.
func (in *request) bearer() string {
	if via := in.me().Via; via == access.ViaToken || via == access.ViaOIDC {
		return `-H "Authorization: Bearer $DLQD_TOKEN" `
	}
	return ""
}

// filterJSON converts a filter to the JSON form that SQL functions take.
func (in *request) filterJSON(text string) string {
	f, err := filter.Parse(text, in.me().Name)
	if err != nil {
		return "{}" // unreachable: the API has parsed it
	}
	return string(f.JSON())
}

// listCopies returns the copy texts of a list of dead letters.
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

// jsonOf encodes a value as JSON.
func jsonOf(value any) string {
	raw, err := json.Marshal(value)
	if err != nil {
		return "null" // unreachable: values are our own
	}
	return string(raw)
}

// sqlQuoted returns text as an SQL literal.
func sqlQuoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }

// shellQuoted returns text as one word for a shell.
func shellQuoted(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// flagged adds a flag to a command.
func flagged(command, flag, value string) string {
	return command + " --" + flag + " " + shellQuoted(value)
}

// groupCopies returns the copy texts of a list of failure groups, for the query sent to the API.
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
			sql += ", p_over => " + sqlQuoted(strconv.Itoa(n)+map[byte]string{
				'm': " minutes", 'h': " hours", 'd': " days", 'w': " weeks",
			}[over[len(over)-1]])
		}
	}
	return copies("dlqd groups"+flags+" --limit "+query.Get("limit"), sql+");", in.curl("/api/dlq/groups?"+query.Encode()))
}
