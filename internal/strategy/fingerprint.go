package strategy

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
)

// What differs between two errors that are the same error, the longest forms first.
var variable = regexp.MustCompile(
	`"[^"]*"|'[^']*'|` + "`[^`]*`" + // quoted values
		`|[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}` + // UUIDs
		`|\bhttps?://\S+` + // addresses
		`|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b` +
		`|\b0x[0-9a-fA-F]+\b` +
		`|\b[A-Za-z]+[_-]?\d[\w-]*\b` + // ids such as ord_81, cus-4f
		`|\b[0-9a-f]{12,}\b` +
		`|\d+(?:\.\d+)?`)

// Fingerprint groups entries that failed for the same reason: it is a hash of the error's type, its message with
// numbers, ids, addresses and quoted values taken out, and the first frame of the application's own code where there is
// a trace. 16 hexadecimal digits.
func Fingerprint(errorType, message, trace string) string {
	message = message[:min(len(message), maxMatchBytes)]
	sum := sha256.Sum256([]byte(errorType + "\x00" + variable.ReplaceAllString(message, "?") + "\x00" + ownFrame(trace)))
	return hex.EncodeToString(sum[:8])
}

// ownFrame is the first function of a Go stack trace that belongs neither to the runtime nor to River.
func ownFrame(trace string) string {
	for line := range strings.Lines(trace) {
		if line == "" || line[0] == '\t' {
			continue
		}
		if strings.HasPrefix(line, "runtime.") || strings.HasPrefix(line, "panic") || strings.Contains(line, "riverqueue/river") {
			continue
		}
		return trimPackage(strings.TrimSpace(line))
	}
	return ""
}
