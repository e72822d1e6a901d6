package strategy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
)

// GroupingMethod is the version of [Fingerprint]. A change of what it returns for a stored entry is a new version.
const GroupingMethod = 2

// digits are those of a fingerprint of each method, so that a fingerprint says which method made it.
const (
	digits1 = 16
	digits2 = 20
)

// MethodOf returns the grouping method that made a fingerprint; 0 for a text that is none.
func MethodOf(fingerprint string) int {
	switch len(fingerprint) {
	case digits1:
		return 1
	case digits2:
		return GroupingMethod
	}
	return 0
}

// Failure is what a fingerprint is made of: what an entry stores of its last failure.
type Failure struct {
	Type    string          // error_type
	Code    string          // error_code
	Title   string          // error_title
	Message string          // error_message; the first 8 KiB count
	Trace   string          // error_stack_trace; the first 8 KiB count
	Context json.RawMessage // error_context
}

// Fingerprint groups entries that failed for the same reason. 20 hexadecimal digits.
func Fingerprint(f *Failure) string {
	sum := sha256.Sum256([]byte(f.Type + "\x00" + f.Code + "\x00" + f.Title + "\x00" + f.Message + "\x00" + ownFrame(f.Trace)))
	return hex.EncodeToString(sum[:digits2/2])
}

// ownFrame is the first frame of a stack trace that belongs to the application.
func ownFrame(trace string) string { return ownFrame1(trace) }
