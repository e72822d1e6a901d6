package redact

// Patterns returns the patterns of tokens, e-mail addresses and payment card numbers.
func Patterns() []string { return []string{tokenPattern, emailPattern, cardPattern} }
