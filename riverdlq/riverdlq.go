// Package riverdlq lets a River application say more about its errors than a string, so that dlqd can tell what to do
// with a job that died: the type and code of the error, its class, and whatever context helps a person.
//
//	workers := river.NewWorkers()
//	client, err := river.NewClient(driver, &river.Config{
//		Middleware: []rivertype.Middleware{riverdlq.NewMiddleware()},
//		...
//	})
//
//	func (w *ChargeWorker) Work(ctx context.Context, job *river.Job[ChargeArgs]) error {
//		if declined {
//			return &riverdlq.Error{Type: "CardDeclined", Code: "51", Class: riverdlq.ClassBusiness, Message: "insufficient funds"}
//		}
//
// It is optional: a job that fails with a plain error is captured all the same, and classified by its message.
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

// MetadataKey is the key of a job's metadata under which its structured error is.
const MetadataKey = "dlq:error"

// AttemptsKey is the key of a job's metadata under which its failed attempts are, by their numbers:
// how long each took, and how busy the worker's machine was.
const AttemptsKey = "dlq:attempts"

// maxAttempts bounds how many of a job's attempts are kept: the last ones.
const maxAttempts = 100

// maxMessageBytes bounds what is recorded of an error's message: it is stored with the job at every attempt.
const maxMessageBytes = 64 << 10

// maxContextBytes bounds what is recorded beside it.
const maxContextBytes = 256 << 10

// Class says what kind of trouble an error is, and so what helps against it.
type Class string

// The classes. Retrying helps against the first three; the others need a person, or another program.
const (
	ClassTransient    Class = "transient"    // connection reset or refused, timeout, HTTP 408, 423, 425, 500, 502
	ClassRateLimited  Class = "rate_limited" // HTTP 429, quota exceeded
	ClassOutage       Class = "outage"       // HTTP 503, 504, circuit open, a downstream or database is down
	ClassValidation   Class = "validation"   // HTTP 400, 405, 413, 422
	ClassMalformed    Class = "malformed"    // cannot be decoded
	ClassUnauthorized Class = "unauthorized" // HTTP 401, 403
	ClassNotFound     Class = "not_found"    // HTTP 404, 410
	ClassBusiness     Class = "business"     // payment declined, out of stock, HTTP 402, 409
	ClassCodeBug      Class = "code_bug"     // panic, nil dereference, type error
	ClassUnknown      Class = "unknown"      // nothing matched: retried as a job, and then a person's
)

// Classes lists all classes.
func Classes() []Class {
	return []Class{
		ClassTransient, ClassRateLimited, ClassOutage, ClassValidation, ClassMalformed, ClassUnauthorized,
		ClassNotFound, ClassBusiness, ClassCodeBug, ClassUnknown,
	}
}

// Permanent reports whether running the same job again cannot help.
func (c Class) Permanent() bool {
	return slices.Contains([]Class{ClassValidation, ClassMalformed, ClassUnauthorized, ClassNotFound, ClassBusiness, ClassCodeBug}, c)
}

// Error is an error with what dlqd needs to judge it. All fields but Message may be empty.
type Error struct {
	Type    string         // name of the error, such as "CardDeclined"
	Code    string         // code within the type, such as an HTTP status or a SQLSTATE
	Class   Class          // empty: dlqd classifies it by the other fields
	Title   string         // what went wrong, the same text each time: dlqd groups by it where there is no Code
	Message string         // for people
	Context map[string]any // anything that can be marshalled to JSON
	Err     error          // the error behind it, for errors.Is and errors.As
}

// Error returns the type and the message, as text that River can store: a NUL character in it would make the database
// refuse the end of this job, and of every job whose completion River writes in the same batch.
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

// Unwrap returns the error behind it.
func (e *Error) Unwrap() error { return e.Err }

// record is what is kept under [MetadataKey].
type record struct {
	Attempt int             `json:"attempt"`
	Type    string          `json:"type,omitempty"`
	Code    string          `json:"code,omitempty"`
	Class   Class           `json:"class,omitempty"`
	Title   string          `json:"title,omitempty"`
	Message string          `json:"message"`
	Context json.RawMessage `json:"context,omitempty"`
}

// Record keeps the structured error in err's chain, if there is one, with the job whose worker's context ctx is. It
// fails outside a worker, middleware or hook.
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

// storable is context as JSON that jsonb can hold, nil where there is no such thing: context that cannot be stored must
// cost neither the rest of the error nor the job's own end. Decoding replaces what is not Unicode (half a surrogate
// pair). Numbers stay as they are written: an id beyond 2^53 is no float64. Those that are out of a float64's range are refused.
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

// maxNumberLength bounds the digits of one number, which jsonb writes out: those of the largest float64 fit.
const maxNumberLength = 400

// cleanTree makes all texts storable, and reports whether all numbers are.
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

// clean makes text that jsonb can hold.
func clean(s string) string {
	if len(s) > maxMessageBytes {
		s = s[:maxMessageBytes]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// Middleware records structured errors, and ends a job at once whose error's class is permanent.
type Middleware struct {
	river.MiddlewareDefaults

	// SystemState, if not nil, says how busy this machine is. It is called after each failed
	// attempt, and must not block; false means that nothing is known.
	SystemState func() (SystemState, bool)
}

// SystemState is how busy a machine is.
type SystemState struct {
	CPU    float64 `json:"cpu"`    // percent of all processors in use
	Memory float64 `json:"memory"` // percent in use
}

// NewMiddleware returns a middleware for river.Config.
func NewMiddleware() *Middleware { return &Middleware{} }

// Work implements rivertype.WorkerMiddleware.
func (m *Middleware) Work(ctx context.Context, job *rivertype.JobRow, doInner func(context.Context) error) error {
	start, returned := time.Now(), false
	defer func() {
		if !returned { // a panic, which River recovers
			_ = m.recordAttempt(ctx, job, time.Since(start))
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

// attempt is what is kept of one attempt under [AttemptsKey].
type attempt struct {
	Seconds float64      `json:"seconds"`
	System  *SystemState `json:"system,omitempty"`
}

// recordAttempt adds an attempt to those that earlier ones left in the job's metadata.
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
	if err != nil { // a number that JSON has not
		return nil //nolint:nilerr // the attempt failed for another reason
	}
	metadata.Attempts[job.Attempt] = raw
	numbers := slices.Sorted(maps.Keys(metadata.Attempts))
	for _, number := range numbers[:max(len(numbers)-maxAttempts, 0)] {
		delete(metadata.Attempts, number)
	}
	return river.MetadataSet(ctx, AttemptsKey, metadata.Attempts)
}
