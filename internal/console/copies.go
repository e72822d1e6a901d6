package console

import (
	"encoding/json"
	"strconv"
	"strings"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
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

// curlPost returns a curl command that posts the body of an operation.
func curlPost[In, Out any](in *request, operation api.Operation[In, Out], input In) string {
	r, err := operation.Request(&input)
	if err != nil {
		return "" // unreachable: the page has called the operation
	}
	return "curl -s " + in.bearer() + `-H 'Content-Type: application/json' "$DLQD_API"` + shellQuoted(r.Path) + " -d " +
		shellQuoted(string(r.Body))
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
func (in *request) listCopies(text string, oldest bool, limit int) []copyText {
	command, sql := "dlqd list", "SELECT * FROM dlq.find("+sqlQuoted(in.filterJSON(text))+", "+strconv.Itoa(limit) //nolint:unqueryvet // for people
	input := api.ListInput{Q: text, Limit: limit}
	if text != "" {
		command += " " + shellQuoted(text)
	}
	if command += " --limit " + strconv.Itoa(limit); oldest {
		command, sql = command+" --order oldest", sql+", p_newest_first => false"
		input.Order = "oldest"
	}
	return copies(command, sql+");", in.curl(address(api.ListEntries, input)))
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

// groupCopies returns the copy texts of a list of failure groups.
func (in *request) groupCopies(input api.GroupsInput) []copyText {
	chosen, flags := map[string]any{}, ""
	add := func(name, flag, value string, chosenValue any) {
		if value != "" {
			chosen[name], flags = chosenValue, flagged(flags, flag, value)
		}
	}
	owner := input.Owner
	if owner == "nobody" {
		owner = ""
	}
	add("queue", "queue", input.Queue, input.Queue)
	add("status", "status", strings.Join(input.Status, ","), input.Status)
	add("owner", "owner", input.Owner, owner)
	add("hasOpen", "has-open", input.HasOpen, input.HasOpen == "true")
	limit := strconv.Itoa(input.Limit)
	sql := "SELECT * FROM dlq.groups(" + sqlQuoted(jsonOf(chosen)) + ", " + limit //nolint:unqueryvet // for people
	if input.Order != "" {
		flags, sql = flagged(flags, "order", input.Order), sql+", p_order => "+sqlQuoted(input.Order)
	}
	if over := input.Over; over != "" {
		flags = flagged(flags, "over", over)
		if n, err := strconv.Atoi(over[:len(over)-1]); err == nil {
			sql += ", p_over => " + sqlQuoted(strconv.Itoa(n)+map[byte]string{
				'm': " minutes", 'h': " hours", 'd': " days", 'w': " weeks",
			}[over[len(over)-1]])
		}
	}
	return copies("dlqd groups"+flags+" --limit "+limit, sql+");", in.curl(address(api.ListGroups, input)))
}
