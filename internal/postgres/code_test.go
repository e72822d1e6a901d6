package postgres

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestCodeVersion_IgnoresComments(t *testing.T) {
	t.Parallel()
	version := func(sql string) string { return newCodePart(DefaultSchemas(), codeFile{"a.sql", sql}).version }
	code := "-- It's f.\nCREATE FUNCTION dlq.f() RETURNS text\n    SELECT 'a -- b' || 'c--d'; -- why\nCOMMENT ON " +
		"FUNCTION dlq.f IS 'It;\nis f.';\n"
	require.Equal(t, version(code), version("\nCREATE FUNCTION dlq.f() RETURNS text\n\n\tSELECT 'a -- b' || "+
		"'c--d';\n--\n-- Other words.\nCOMMENT ON FUNCTION dlq.f IS 'Other words, '\n    'in two lines.';\n"))
	for _, other := range []string{
		"-- It's f.\nCREATE FUNCTION dlq.f() RETURNS text SELECT 'a -- b' || 'c--e';",
		"-- It's f.\nCREATE FUNCTION dlq.f() RETURNS text SELECT 'a' || 'c--d';",
		"-- It's f.\nCREATE FUNCTION dlq.f() RETURNS text SELECT 'a  -- b' || 'c--d';",
	} {
		require.NotEqual(t, version(code), version(other), other)
	}
}

func TestSchemas_RenderReplacesWholeNames(t *testing.T) {
	t.Parallel()
	require.Equal(t, "office.a jobs.b xdlq.c _river.d office.dead.jobs.e 'office.f' dlq",
		Schemas{DLQ: "office", River: "jobs"}.Render("dlq.a river.b xdlq.c _river.d dlq.dead.river.e 'dlq.f' dlq"))
}
