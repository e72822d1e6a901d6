package redact

// Patterns are those of tokens and of payment cards' numbers.
func Patterns() []string { return []string{tokenPattern, cardPattern} }
