// Command words checks the text of the repository for words that docs/writing.md excludes, and for lines that are too
// wide.
package main

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path"
	"regexp"
	"strings"
	"unicode/utf8"
)

// maxColumns is the maximum width of a line of Go, SQL or templates. A tab counts as one column.
const maxColumns = 120

var (
	excluded = regexp.MustCompile(`(?i)\b(somebody|whoever|whatever|everybody|anybody)\b|` +
		`\bnobody (is|are|was|has|had|may|can|could|will|would|must|else|[a-z]+s)\b|` + // "nobody" alone is a filter's value
		`\b(is|are) told\b|\bgives? way\b|\bits own matter\b|\bto be had\b|\bis at it\b`)
	text = regexp.MustCompile(`\.(go|sql|md|html|js|css|ya?ml|json|sh|tmpl)$|^(Makefile|LICENSE)$`)
	// skipped matches files that are not checked: generated files, test data, frozen migrations, tests that quote frozen
	// migrations, and texts that quote excluded words.
	skipped = regexp.MustCompile(`/dbsqlc/|/testdata/|^openapi/|^tools/(go\.|words/)|^docs/writing\.md$|^config/schemas/|^db/migrations/|` +
		`^internal/postgres/(frozen|migrate)_test\.go$`)
	code    = regexp.MustCompile(`\.(go|sql|html)$`)
	aligned = regexp.MustCompile(`: {2,}`) // by gofmt, in a map
	// A line may be wide if it has a struct tag, an address or a directive (unbroken), or a literal that reaches the
	// margin.
	unbroken = regexp.MustCompile("`[a-z]+:\"|https?://|//(nolint|go:)")
	literal  = regexp.MustCompile(`'(?:[^']|''){60,}|"(?:[^"\\]|\\.){60,}|` + "`[^`]{60,}")
)

func main() {
	files, err := exec.Command("git", "ls-files").Output()
	if err != nil {
		fmt.Fprintln(os.Stderr, "words: git ls-files:", err)
		os.Exit(1)
	}
	frozen, err := os.ReadFile("db/frozen.sum")
	if err != nil {
		fmt.Fprintln(os.Stderr, "words:", err)
		os.Exit(1)
	}
	found := 0
	for name := range strings.Lines(string(files)) {
		name = strings.TrimSuffix(name, "\n")
		if !text.MatchString(path.Base(name)) || skipped.MatchString(name) ||
			bytes.Contains(frozen, []byte(strings.TrimPrefix(name, "db/"))) {
			continue
		}
		found += check(name)
	}
	if found > 0 {
		fmt.Fprintf(os.Stderr, "words: %d lines to mend; docs/writing.md says how\n", found)
		os.Exit(1)
	}
}

// check prints the lines of a file that have an excluded word or are too wide, and returns the number of findings.
func check(name string) (found int) {
	raw, err := os.ReadFile(name)
	if err != nil {
		return 0 // the file was deleted, but Git still lists it
	}
	lines := bufio.NewScanner(bytes.NewReader(raw))
	lines.Buffer(nil, len(raw)+1)
	inString := false // whether the line is in a raw string of Go
	for n := 1; lines.Scan(); n++ {
		line := lines.Text()
		if n == 1 && strings.HasSuffix(line, "DO NOT EDIT.") {
			return 0
		}
		if word := excluded.FindString(line); word != "" {
			fmt.Printf("%s:%d: %q\n", name, n, word)
			found++
		}
		inRaw := inString
		if strings.HasSuffix(name, ".go") && strings.Count(line, "`")%2 == 1 {
			inString = !inString
		}
		width := utf8.RuneCountInString(aligned.ReplaceAllString(line, ": "))
		if code.MatchString(name) && width > maxColumns && !inRaw && !isUnbroken(line) {
			fmt.Printf("%s:%d: %d columns\n", name, n, width)
			found++
		}
	}
	return found
}

// isUnbroken reports whether a line may be wide: it has a struct tag, an address, a directive, or a literal of 60
// characters or more that reaches the margin.
func isUnbroken(line string) bool {
	if unbroken.MatchString(line) {
		return true
	}
	for _, at := range literal.FindAllStringIndex(line, -1) {
		if utf8.RuneCountInString(line[:at[0]]) < maxColumns && utf8.RuneCountInString(line[:at[1]]) >= maxColumns-len(` +`) {
			return true
		}
	}
	return false
}
