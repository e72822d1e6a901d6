// Package riverdlq adds structure to the errors of a River application: the type and code of an
// error, its class, and context for the operator. dlqd uses them to decide what happens to a job
// that failed for good.
//
//	workers := river.NewWorkers()
//	client, err := river.NewClient(driver, &river.Config{
//		Middleware: []rivertype.Middleware{riverdlq.NewMiddleware()},
//		...
//	})
//
//	func (w *ChargeWorker) Work(ctx context.Context, job *river.Job[ChargeArgs]) error {
//		if declined {
//			return &riverdlq.Error{
//				Type: "CardDeclined", Code: "51", Class: riverdlq.ClassBusiness, Message: "insufficient funds",
//			}
//		}
//
// The package is optional: dlqd also captures jobs that fail with a plain error, and classifies
// them by its message.
package riverdlq

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// MetadataKey is the key in a job's metadata that holds its structured error.
const MetadataKey = "dlq:error"

// AttemptsKey is the key in a job's metadata that holds its failed attempts by number: the duration of each and, if
// [Middleware.SystemState] returns it, the load of the worker's machine.
const AttemptsKey = "dlq:attempts"

// StageKey is the key in a job's metadata that holds the last stage that [Stage] recorded, as a string.
const StageKey = "dlq:stage"

// VersionKey is the key in a job's metadata that holds the version of the program that last worked the job, as a string
// ([Middleware.Version]).
const VersionKey = "dlq:version"

// maxNameBytes limits a recorded stage or version. A longer name is cut.
const maxNameBytes = 100

// maxAttempts is the number of failed attempts that a job's metadata keeps. Older attempts are dropped.
const maxAttempts = 100

// maxMessageBytes limits each recorded text (message, type, code, title, keys and strings of the context), because each
// failed attempt stores these texts in the job. A longer text is cut.
const maxMessageBytes = 64 << 10

// maxContextBytes limits the size of the context as JSON. A larger context is dropped.
const maxContextBytes = 256 << 10

// Class is the kind of an error. It says whether running the job again can help. By the class, dlqd chooses what
// happens to the job, unless a rule of the policy matches.
type Class string

// The classes, with examples. For the first three classes, running the job again can help. Errors of the others need an
// operator or a change of the program.
const (
	ClassTransient    Class = "transient"    // connection reset or refused, timeout, HTTP 408, 423, 425, 500, 502
	ClassRateLimited  Class = "rate_limited" // HTTP 429, quota exceeded
	ClassOutage       Class = "outage"       // HTTP 503, 504, circuit open, a downstream or database is down
	ClassValidation   Class = "validation"   // HTTP 400, 405, 406, 411, 413, 414, 415, 422, 431
	ClassMalformed    Class = "malformed"    // cannot be decoded
	ClassUnauthorized Class = "unauthorized" // HTTP 401, 403
	ClassNotFound     Class = "not_found"    // HTTP 404, 410
	ClassBusiness     Class = "business"     // payment declined, out of stock, HTTP 402, 409
	ClassCodeBug      Class = "code_bug"     // panic, nil dereference, type error
	ClassUnknown      Class = "unknown"      // no rule matched: River retries, then the entry is parked
)

// Classes returns all classes.
func Classes() []Class {
	return []Class{
		ClassTransient, ClassRateLimited, ClassOutage, ClassValidation, ClassMalformed, ClassUnauthorized,
		ClassNotFound, ClassBusiness, ClassCodeBug, ClassUnknown,
	}
}

// Permanent reports whether running the same job again cannot help.
func (c Class) Permanent() bool {
	return slices.Contains([]Class{
		ClassValidation, ClassMalformed, ClassUnauthorized, ClassNotFound, ClassBusiness,
		ClassCodeBug,
	}, c)
}

// Error is an error with the fields by which dlqd classifies and groups it. All fields are
// optional, but Message or Err should be set.
type Error struct {
	Type    string         // name of the error, such as "CardDeclined"
	Code    string         // code within the type, such as an HTTP status or a SQLSTATE
	Class   Class          // if empty, dlqd classifies the error by the other fields
	Title   string         // what went wrong; the same text each time, by which dlqd groups errors without a Code
	Message string         // for people; if empty, the text of Err is used
	Context map[string]any // values that can be marshaled to JSON; up to 256 KiB as JSON
	Err     error          // the underlying error, for errors.Is and errors.As
}

// Error returns the type and the message as text that River can store, cut to 64 KiB. A NUL character in the text would
// make the database refuse the completion of this job, and of every job that River completes in the same batch.
func (e *Error) Error() string {
	message := e.Message
	if message == "" && e.Err != nil {
		message = e.Err.Error()
	}
	if e.Type != "" {
		message = e.Type + ": " + message
	}
	return clean(message)
}

// Unwrap returns the underlying error.
func (e *Error) Unwrap() error { return e.Err }

// record is the value stored under [MetadataKey].
type record struct {
	Attempt int             `json:"attempt"`
	Type    string          `json:"type,omitempty"`
	Code    string          `json:"code,omitempty"`
	Class   Class           `json:"class,omitempty"`
	Title   string          `json:"title,omitempty"`
	Message string          `json:"message"`
	Context json.RawMessage `json:"context,omitempty"`
}

// Record stores the structured error in err's chain in the job's metadata. If the chain has no structured error, Record
// does nothing. ctx must be a context that River passes to a worker, a middleware or a hook; with any other context,
// Record returns an error.
func Record(ctx context.Context, job *rivertype.JobRow, err error) error {
	var structured *Error
	if !errors.As(err, &structured) {
		return nil
	}
	message := structured.Message
	if message == "" {
		message = err.Error()
	}
	r := record{
		Attempt: job.Attempt,
		Type:    clean(structured.Type),
		Code:    clean(structured.Code),
		Class:   structured.Class,
		Title:   clean(structured.Title),
		Message: clean(message),
	}
	if structured.Context != nil {
		r.Context = storable(structured.Context)
	}
	return river.MetadataSet(ctx, MetadataKey, r)
}

// Stage records how far the worker has come: the last completed work that another attempt would repeat, such as
// "charged". The last recorded stage counts, even if an earlier attempt recorded it. stage is a name that the program
// defines, never data. It has letters, digits, spaces and ". / : _ -", and up to 100 bytes.
//
// River stores the stage in the job's row when the attempt ends, so if the worker dies, no stage is recorded. ctx must
// be a context that River passes to a worker, a middleware or a hook; with any other context, Stage returns an error.
// Several goroutines of an attempt must not call Stage at once.
func Stage(ctx context.Context, stage string) error {
	return river.MetadataSet(ctx, StageKey, name(stage))
}

// name cuts the name of a stage or a version to maxNameBytes.
func name(s string) string {
	return clean(s[:min(len(s), maxNameBytes)])
}

// storable returns context as JSON that jsonb can hold. It returns nil if the context cannot be stored. In that case
// the rest of the error is still recorded, and the job still completes.
//
// Decoding replaces invalid Unicode (half of a surrogate pair). Numbers keep their digits, because an id beyond 2^53
// does not fit a float64. A context is dropped if it has a number outside the range of a float64, or a number that is
// longer than maxNumberLength.
func storable(context map[string]any) json.RawMessage {
	raw, err := json.Marshal(context)
	if err != nil || len(raw) > maxContextBytes {
		return nil
	}
	var tree any
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	if decoder.Decode(&tree) != nil {
		return nil
	}
	tree, ok := cleanTree(tree)
	if !ok {
		return nil
	}
	raw, err = json.Marshal(tree)
	if err != nil {
		return nil
	}
	return raw
}

// maxNumberLength limits the characters of a number, because jsonb writes all digits of a number. It is more than the
// 309 digits of the largest float64.
const maxNumberLength = 400

// cleanTree makes all texts in tree storable. It reports whether all numbers in tree can be stored.
func cleanTree(tree any) (any, bool) {
	ok := true
	each := func(node any) any {
		node, fine := cleanTree(node)
		ok = ok && fine
		return node
	}
	switch node := tree.(type) {
	case string:
		return clean(node), true
	case json.Number:
		size, err := node.Float64()
		return node, err == nil && len(node) <= maxNumberLength && (size != 0 || strings.Trim(string(node), "-0.") == "")
	case []any:
		for i := range node {
			node[i] = each(node[i])
		}
	case map[string]any:
		cleaned := make(map[string]any, len(node))
		for key, value := range node {
			cleaned[clean(key)] = each(value)
		}
		return cleaned, ok
	}
	return tree, ok
}

// clean cuts a text to maxMessageBytes, and replaces characters that jsonb cannot hold: invalid UTF-8 and NUL.
func clean(s string) string {
	if len(s) > maxMessageBytes {
		s = s[:maxMessageBytes]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// Middleware records structured errors that a worker returns or panics with. If the class of a returned error is
// permanent, the middleware cancels the job, so that River does not retry it.
type Middleware struct {
	river.MiddlewareDefaults

	// Version, if not empty, is the version of this program, such as "4.2.0": letters, digits and ". + _ -", up to 100
	// bytes. Each job gets the version when an attempt ends, so that dlqd learns which version works a queue.
	Version string

	// SystemState, if not nil, returns the load of this machine, or false if the load is unknown. It is called after each
	// failed attempt, and must not block.
	SystemState func() (SystemState, bool)
}

// SystemState is the load of a machine.
type SystemState struct {
	CPU    float64 `json:"cpu"`    // percent used, of all processors
	Memory float64 `json:"memory"` // percent used
}

// NewMiddleware returns a middleware for river.Config.
func NewMiddleware() *Middleware { return &Middleware{} }

// Work implements rivertype.WorkerMiddleware.
func (m *Middleware) Work(ctx context.Context, job *rivertype.JobRow, doInner func(context.Context) error) error {
	if m.Version != "" {
		_ = river.MetadataSet(ctx, VersionKey, name(m.Version)) // fails only if recordAttempt below fails, too
	}
	start, returned := time.Now(), false
	defer func() {
		if returned {
			return
		}
		_ = m.recordAttempt(ctx, job, time.Since(start))
		if value := recover(); value != nil { // nil if runtime.Goexit ends the goroutine
			if err, ok := value.(error); ok {
				_ = Record(ctx, job, err)
			}
			panic(value) // River recovers this panic, and its trace has the frames of the first panic
		}
	}()
	err := doInner(ctx)
	returned = true
	var snoozed *river.JobSnoozeError
	if err == nil || errors.As(err, &snoozed) {
		return err
	}
	if recordErr := m.recordAttempt(ctx, job, time.Since(start)); recordErr != nil {
		return errors.Join(err, recordErr)
	}
	if recordErr := Record(ctx, job, err); recordErr != nil {
		return errors.Join(err, recordErr)
	}
	var structured *Error
	var cancelled *river.JobCancelError
	if errors.As(err, &structured) && structured.Class.Permanent() && !errors.As(err, &cancelled) {
		return river.JobCancel(err)
	}
	return err
}

// attempt is the record of one failed attempt under [AttemptsKey].
type attempt struct {
	Seconds float64      `json:"seconds"`
	System  *SystemState `json:"system,omitempty"`
}

// recordAttempt adds this attempt to the earlier attempts in the job's metadata. It keeps the last maxAttempts.
func (m *Middleware) recordAttempt(ctx context.Context, job *rivertype.JobRow, took time.Duration) error {
	var metadata struct {
		Attempts map[int]json.RawMessage `json:"dlq:attempts"`
	}
	if json.Unmarshal(job.Metadata, &metadata) != nil || metadata.Attempts == nil {
		metadata.Attempts = map[int]json.RawMessage{}
	}
	last := attempt{Seconds: took.Round(time.Microsecond).Seconds()}
	if m.SystemState != nil {
		if state, known := m.SystemState(); known {
			last.System = &state
		}
	}
	raw, err := json.Marshal(last)
	if err != nil { // NaN or infinity, which JSON cannot represent
		return nil //nolint:nilerr // the attempt failed for another reason
	}
	metadata.Attempts[job.Attempt] = raw
	numbers := slices.Sorted(maps.Keys(metadata.Attempts))
	for _, number := range numbers[:max(len(numbers)-maxAttempts, 0)] {
		delete(metadata.Attempts, number)
	}
	return river.MetadataSet(ctx, AttemptsKey, metadata.Attempts)
}
