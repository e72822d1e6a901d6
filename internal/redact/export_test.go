package redact

// Patterns returns the patterns of tokens and of payment card numbers.
func Patterns() []string { return []string{tokenPattern, cardPattern} }
