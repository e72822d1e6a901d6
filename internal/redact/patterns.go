package redact

import (
	"regexp"
	"strings"
)

// dlq.pattern (db/code/14_masking.sql) has the same patterns. A test compares both.
const (
	tokenPattern = `eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?` +
		`|(?:[Bb]earer|BEARER|[Bb]asic|BASIC)[ :]+[A-Za-z0-9._~+/=-]{8,}` +
		`|(?:dlqds?|npm|github_pat|gh[oprsu])_[A-Za-z0-9_]{16,}` +
		`|(?:sk|pk|rk)_(?:live|test)_[A-Za-z0-9]{8,}|whsec_[A-Za-z0-9+/=]{16,}|sk-[A-Za-z0-9_-]{20,}` +
		`|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{35}|xox[a-z]-[A-Za-z0-9-]{10,}|glpat-[A-Za-z0-9_-]{16,}` +
		`|-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----[A-Za-z0-9+/=\s]*`
	emailPattern = `[A-Za-z0-9._%+-]+(?:@|%40)(?:[A-Za-z0-9-]+\.)+[A-Za-z][A-Za-z0-9-]*[A-Za-z0-9]`
	cardPattern  = `[2-6][0-9]{12,18}|[2-6][0-9]{3}(?:[ -][0-9]{4}){3}|3[47][0-9]{2}[ -][0-9]{6}[ -][0-9]{5}`
)

var (
	tokens = regexp.MustCompile(tokenPattern)
	emails = regexp.MustCompile(emailPattern)
	cards  = regexp.MustCompile(cardPattern)
)

// Tokens hides tokens in a text. It recognizes a token by the format of its issuer.
func Tokens(text string) string { return tokens.ReplaceAllString(text, Hidden) }

// Emails hides e-mail addresses in a text, including addresses in URLs.
func Emails(text string) string { return emails.ReplaceAllString(text, Hidden) }

// CardNumbers hides payment card numbers in a text. It hides only numbers with a correct check digit (ISO/IEC 7812,
// Luhn).
func CardNumbers(text string) string {
	var out strings.Builder
	done := 0
	for from := 0; from < len(text); {
		at := cards.FindStringIndex(text[from:])
		if at == nil {
			break
		}
		begin, end := from+at[0], from+at[1]
		switch before := begin > 0 && (isDigit(text[begin-1]) || text[begin-1] == '.'); {
		case before:
			for from = begin; from < len(text) && isDigit(text[from]); { // skip the rest of that number
				from++
			}
		case end < len(text) && isDigit(text[end]) || !isLuhn(text[begin:end]):
			for from = begin + 1; from < len(text) && isDigit(text[from]); {
				from++
			}
		default:
			out.WriteString(text[done:begin] + Hidden)
			done, from = end, end
		}
	}
	return out.String() + text[done:]
}

func isDigit(b byte) bool { return b >= '0' && b <= '9' }

func isLuhn(number string) bool {
	sum, place := 0, 0
	for i := len(number) - 1; i >= 0; i-- {
		if !isDigit(number[i]) {
			continue
		}
		digit := int(number[i] - '0')
		if place++; place%2 == 0 {
			if digit *= 2; digit > 9 {
				digit -= 9
			}
		}
		sum += digit
	}
	return sum%10 == 0
}
