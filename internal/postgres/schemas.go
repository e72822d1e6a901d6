// Package postgres opens databases, installs dlqd's schema in them, and runs an embedded server for
// installations that have no database.
package postgres

import (
	"fmt"
	"regexp"
	"strings"
)

// Default schema names.
const (
	DefaultSchema      = "dlq"
	DefaultRiverSchema = "public"
)

// maxSchemaLength leaves room for River's notification topics: Postgres allows 63 bytes for the schema, a "." and the
// longest topic.
const maxSchemaLength = 46

// Schemas has the names of the schemas of dlqd's and River's tables. SQL in this project uses the placeholders dlq and
// river, which Render replaces before the SQL runs.
type Schemas struct {
	DLQ   string // dlqd's own schema
	River string // schema of river_job
}

var schemaName = regexp.MustCompile(`^[a-z_][a-z0-9_]*$`)

// DefaultSchemas returns dlq and public.
func DefaultSchemas() Schemas { return Schemas{DLQ: DefaultSchema, River: DefaultRiverSchema} }

// Validate checks that the names differ and can be used unquoted, as rendered SQL does.
func (s Schemas) Validate() error {
	for _, n := range []struct{ flag, name string }{{"--schema", s.DLQ}, {"--river-schema", s.River}} {
		if !schemaName.MatchString(n.name) || len(n.name) > maxSchemaLength {
			return fmt.Errorf("%s %q: a schema name has 1 to %d lower-case letters, digits and underscores, and does not "+
				"start with a digit",
				n.flag, n.name, maxSchemaLength)
		}
	}
	if s.DLQ == s.River {
		return fmt.Errorf("--schema and --river-schema are both %q: dlqd needs a separate schema", s.DLQ)
	}
	return nil
}

// Render replaces the placeholders "dlq." and "river." with the schema names. It does not use a regular expression,
// which would take 0.4 s for all functions with the race detector.
func (s Schemas) Render(sql string) string {
	var out strings.Builder
	out.Grow(len(sql) + len(sql)/16)
	for {
		word, rest, found := strings.Cut(sql, ".")
		if !found {
			out.WriteString(sql)
			return out.String()
		}
		if before, is := strings.CutSuffix(word, "dlq"); is && !endsInWord(before) {
			word = before + s.DLQ
		} else if before, is := strings.CutSuffix(word, "river"); is && !endsInWord(before) {
			word = before + s.River
		}
		out.WriteString(word)
		out.WriteByte('.')
		sql = rest
	}
}

// endsInWord reports whether text ends with a letter, a digit or an underscore, so that a placeholder after it would be
// part of a longer word.
func endsInWord(text string) bool {
	if text == "" {
		return false
	}
	c := text[len(text)-1]
	return c == '_' || '0' <= c && c <= '9' || 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z'
}

// WakeTopic returns the NOTIFY channel that wakes DLQ workers.
func (s Schemas) WakeTopic() string { return s.DLQ + ".wake" }
