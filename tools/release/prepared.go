package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// checkPrepared returns an error unless the commit was prepared for this release: its migrations are frozen, the
// changelog begins with the version and its breaking changes, and the table of versions has the version of the schema.
func (r *release) checkPrepared() error {
	migrations, err := filepath.Glob(filepath.Join(r.src(), "db", "migrations", "*.sql"))
	if err != nil {
		return err
	}
	if len(migrations) == 0 {
		return errors.New("db/migrations has no migration")
	}
	last := filepath.Base(migrations[len(migrations)-1]) // the list is sorted
	number, _, _ := strings.Cut(last, "_")
	sums, err := os.ReadFile(filepath.Join(r.src(), "db", "frozen.sum"))
	if err != nil {
		return err
	}
	for _, suffix := range []string{".sql.gz", ".statements.gz"} {
		path := filepath.Join(r.src(), "internal", "postgres", "testdata", "frozen", number+suffix)
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) || !strings.Contains(string(sums), "migrations/"+last) {
			return fmt.Errorf("migration %s is not frozen: run \"make freeze\" and commit", last)
		}
	}
	changes, err := os.ReadFile(filepath.Join(r.src(), "CHANGELOG.md"))
	if err != nil {
		return err
	}
	if err := checkChangelog(string(changes), r.number()); err != nil {
		return fmt.Errorf("CHANGELOG.md: %w", err)
	}
	versions, err := os.ReadFile(filepath.Join(r.src(), "docs", "versions.md"))
	if err != nil {
		return err
	}
	row := fmt.Sprintf("| %s | %s |", r.number(), strings.TrimLeft(number, "0"))
	if !strings.Contains(string(versions), row) {
		return fmt.Errorf("docs/versions.md has no row that begins with %q, the version and its schema", row)
	}
	return nil
}

var (
	sectionPattern = regexp.MustCompile(`(?m)^## (?:\[)?([^\]\s]+)(?:\])?(?: - \d{4}-\d{2}-\d{2})?$`)
	headingPattern = regexp.MustCompile(`(?m)^### (.+)$`)
)

// checkChangelog returns an error unless the first section of the changelog belongs to the version, has a date, and
// begins with the breaking changes.
func checkChangelog(text, version string) error {
	sections := sectionPattern.FindAllStringSubmatchIndex(text, -1)
	if len(sections) == 0 || text[sections[0][2]:sections[0][3]] != version ||
		!strings.Contains(text[sections[0][0]:sections[0][1]], " - ") {
		return fmt.Errorf("the first section must be \"## %s - YYYY-MM-DD\"", version)
	}
	section := text[sections[0][1]:]
	if len(sections) > 1 {
		section = text[sections[0][1]:sections[1][0]]
	}
	if heading := headingPattern.FindStringSubmatch(section); heading == nil || heading[1] != "Breaking" {
		return errors.New("the section must begin with \"### Breaking\", even if nothing breaks")
	}
	return nil
}
