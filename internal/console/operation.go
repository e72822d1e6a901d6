package console

import (
	"cmp"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/filter"
)

// operation is the page of a bulk operation: its filter, the entries that it changed, and the entries that it left
// unchanged.
type operation struct {
	api.OperationDetail

	Sentence string
	Words    string                            // the filter in the filter language
	Letters  map[uuid.UUID]*deadletter.Summary // summaries of the Entries that the viewer may see
	CanUndo  bool
	NextPage string
	Copies   []copyText
}

func (c *Console) operation(in *request) (*view, error) {
	input := api.GetOperationInput{OperationInput: api.OperationInput{ID: in.PathValue("id")}}
	curl := in.curl(address(api.GetOperation, input))
	input.Cursor = in.URL.Query().Get("cursor")
	detail, err := call(in, api.GetOperation, input)
	if err != nil {
		return nil, err
	}
	o := &operation{OperationDetail: *detail}
	ids := make([]string, len(o.Entries))
	for i := range o.Entries {
		ids[i] = o.Entries[i].ID.String()
	}
	o.Letters = in.summaries(ids)
	if f, err := filter.FromJSON(o.Filter); err == nil {
		o.Words = f.Print()
	}
	if o.Next != "" {
		o.NextPage = in.with("cursor", o.Next)
	}
	verb := cmp.Or(operationVerbs[o.Action], o.Action)
	if o.Action == "assign" { // or unassigned
		verb = "changed the owner of"
	}
	o.Sentence = o.Actor + " " + verb + " " + plural(o.Changed, "dead letter")
	if left := o.Looked - o.Changed; left > 0 {
		o.Sentence += "; " + number(left) + " unchanged"
	}
	o.CanUndo = o.Action != "undo" && o.Action != "purge" && o.Action != "reopen" && in.me().May(access.Operator)
	id := o.ID.String()
	o.Copies = copies("dlqd operation "+id, "SELECT * FROM dlq.operation('"+id+"'); SELECT * FROM dlq.operation_entries('"+id+"');", curl) //nolint:unqueryvet // for people
	return &view{Template: "operation", Title: "Bulk operation", Data: o, Section: "/audit"}, nil
}
