package deadletter

import (
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/dlqd/dlqd/internal/riverdlq"
)

// Ways in which a replay treats a checkpoint.
const (
	Resume  = "resume"  // the new job continues at the step at which the last job stopped
	Discard = "discard" // the new job repeats all steps
)

// Checkpoint is the progress that a resumable River job made before it failed. A job with a checkpoint skips the steps
// that were completed.
type Checkpoint struct {
	Step    string   `json:"step,omitempty" doc:"The last completed step. If it is listed in cursors, the step was started but not completed."`
	Cursors []string `json:"cursors,omitempty" doc:"Steps that were started and have a cursor."`
}

// CheckpointOf returns the checkpoint in a job's metadata, or nil if there is none. It agrees with dlq.has_checkpoint.
func CheckpointOf(metadata json.RawMessage) *Checkpoint {
	var values map[string]json.RawMessage
	if json.Unmarshal(metadata, &values) != nil {
		return nil
	}
	var c Checkpoint
	_ = json.Unmarshal(values["river:resumable_step"], &c.Step) // River ignores a step that is not a string
	var cursors map[string]json.RawMessage
	if json.Unmarshal(values["river:resumable_cursor"], &cursors) == nil && len(cursors) > 0 {
		c.Cursors = slices.Sorted(maps.Keys(cursors))
	}
	if c.Step == "" && c.Cursors == nil {
		return nil
	}
	return &c
}

// reportedStage and reportedVersion match the stages and versions that [riverdlq.Stage] and
// [riverdlq.Middleware.Version] allow. dlqd ignores all others, because any client of River can write metadata, and
// receivers report versions, too. dlq.reported_stage and dlq.reported_version match the same texts.
var (
	reportedStage   = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z ./:_-]{0,99}$`)
	reportedVersion = regexp.MustCompile(`^[0-9A-Za-z][0-9A-Za-z.+_-]{0,99}$`)
)

// IsVersion reports whether dlqd accepts a text as a version.
func IsVersion(text string) bool { return reportedVersion.MatchString(text) }

// StageOf returns the last stage that a worker of the job reported in the job's metadata, or "" if there is none.
func StageOf(metadata json.RawMessage) string {
	return reportedOf(metadata, riverdlq.StageKey, reportedStage)
}

// VersionOf returns the version of the program that worked the job last, as its worker or its destination reported it.
// It returns "" if neither did.
func VersionOf(metadata json.RawMessage) string {
	return reportedOf(metadata, riverdlq.VersionKey, reportedVersion)
}

func reportedOf(metadata json.RawMessage, key string, pattern *regexp.Regexp) (name string) {
	var values map[string]json.RawMessage
	if json.Unmarshal(metadata, &values) != nil || json.Unmarshal(values[key], &name) != nil ||
		!pattern.MatchString(name) {
		return ""
	}
	return name
}

// String describes in which step, or after which step, a job with the checkpoint resumes.
func (c *Checkpoint) String() string {
	switch {
	case c.Step == "":
		return "resumes in step " + strings.Join(c.Cursors, ", ")
	case slices.Contains(c.Cursors, c.Step):
		return "resumes in step " + c.Step
	default:
		return "resumes after step " + c.Step
	}
}
