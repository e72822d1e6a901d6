package deadletter

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

// What a replay makes of a checkpoint.
const (
	Resume  = "resume"  // the job goes on where the last one stopped
	Discard = "discard" // it does all steps again
)

// Checkpoint is how far a resumable job of River's came before it failed: a job with it skips the steps that are done.
type Checkpoint struct {
	Step    string   `json:"step,omitempty" doc:"The last step that was done, or that was begun where it is in cursors."`
	Cursors []string `json:"cursors,omitempty" doc:"Steps that were begun, and have a cursor."`
}

// CheckpointOf reads the checkpoint in a job's metadata; nil where there is none. (dlq.has_checkpoint says the same.)
func CheckpointOf(metadata json.RawMessage) *Checkpoint {
	var kept map[string]json.RawMessage
	if json.Unmarshal(metadata, &kept) != nil {
		return nil
	}
	var c Checkpoint
	_ = json.Unmarshal(kept["river:resumable_step"], &c.Step) // what is no text, River takes for none
	var cursors map[string]json.RawMessage
	if json.Unmarshal(kept["river:resumable_cursor"], &cursors) == nil && len(cursors) > 0 {
		c.Cursors = slices.Sorted(maps.Keys(cursors))
	}
	if c.Step == "" && c.Cursors == nil {
		return nil
	}
	return &c
}

// String says where a job with the checkpoint goes on.
func (c *Checkpoint) String() string {
	switch {
	case c.Step == "":
		return "goes on in step " + strings.Join(c.Cursors, ", ")
	case slices.Contains(c.Cursors, c.Step):
		return "goes on in step " + c.Step
	default:
		return "goes on after step " + c.Step
	}
}
