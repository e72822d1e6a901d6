package main

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

// A command that shortens its tables can also print them with complete values.
func TestOutput_TablesHaveWide(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"stats", "oldest"}, {"stats", "sources"}, {"automatic"}, {"reclassify"}, {"list"}} {
		_, err := runWithFakeAPI(t, append(args, "-o", "wide")...)
		require.NoError(t, err, args)
	}
	_, err := runWithFakeAPI(t, "discard", testEntry, "-o", "wide")
	require.EqualError(t, err, "--output wide: must be json, yaml")
}

// With -o name, a script must learn that there are more names than the output has.
func TestOutput_NamesNoteTheNextPage(t *testing.T) {
	t.Parallel()
	const answer = `{"entries": [{"id": "a"}, {"id": "b"}], "next": "c"}`
	for format, more := range map[string]string{outputName: "more: --cursor c\n", outputJSON: "", outputYAML: ""} {
		var out, stderr bytes.Buffer
		c := client{output: &output{format: format, list: "entries", names: []string{"id"}}}
		require.NoError(t, c.printAnswer(&out, []byte(answer)))
		c.noteNextPage(&stderr, []byte(answer))
		require.Equal(t, more, stderr.String(), format)
		if format == outputName {
			require.Equal(t, "a\nb\n", out.String())
		}
	}
	var stderr bytes.Buffer
	(&client{output: &output{format: outputName, names: []string{"id"}}}).noteNextPage(&stderr,
		[]byte(`{"id": "a", "next": "redelivered at 12:00"}`))
	require.Empty(t, stderr.String(), "an entry's next step is no page")
}
