package strategy

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
)

// variable1 matches the parts that method 1 removes from messages. The longest forms are first.
var variable1 = regexp.MustCompile(
	`"[^"]*"|'[^']*'|` + "`[^`]*`" + // quoted values
		`|[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}` + // UUIDs
		`|\bhttps?://\S+` + // addresses
		`|\b(?:\d{1,3}\.){3}\d{1,3}(?::\d+)?\b` +
		`|\b0x[0-9a-fA-F]+\b` +
		`|\b[A-Za-z]+[_-]?\d[\w-]*\b` + // ids such as ord_81, cus-4f
		`|\b[0-9a-f]{12,}\b` +
		`|\d+(?:\.\d+)?`)

// FingerprintByMessage is grouping method 1, which dlqd used before method 2 ([GroupingMethod]). It returns 16
// hexadecimal digits: a hash of the error's type, of its message without numbers, ids, addresses and quoted values, and
// of the first frame of a Go stack trace. It must not change, because stored entries, links and saved views contain its
// values.
func FingerprintByMessage(errorType, message, trace string) string {
	message = message[:min(len(message), maxMatchBytes)]
	sum := sha256.Sum256([]byte(errorType + "\x00" + variable1.ReplaceAllString(message, "?") + "\x00" + ownFrame1(trace)))
	return hex.EncodeToString(sum[:8])
}

// ownFrame1 returns the first function in a Go stack trace that belongs neither to the runtime nor to River.
func ownFrame1(trace string) string {
	for line := range strings.Lines(trace) {
		if line == "" || line[0] == '\t' {
			continue
		}
		if hasAnyPrefix(line, []string{"runtime.", "panic"}) || strings.Contains(line, "riverqueue/river") {
			continue
		}
		return trimPackage(strings.TrimSpace(line))
	}
	return ""
}

// trimPackage removes the path of the package from the function of a stack frame.
func trimPackage(frame string) string {
	if i := strings.LastIndexByte(frame, '/'); i >= 0 {
		return frame[i+1:]
	}
	return frame
}
