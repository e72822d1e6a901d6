package postgrestest

import (
	"testing"
	"testing/fstest"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/db"
)

func TestMain(m *testing.M) { Main(m) }

// A change of any source changes the name of the template database.
func TestSourceHash_ChangesWithSources(t *testing.T) {
	t.Parallel()
	files := func(text string) fstest.MapFS { return fstest.MapFS{"code/01.sql": {Data: []byte(text)}} }
	name := func(migrations, code string, more ...string) string {
		name, err := sourceHash(files(migrations), files(code), more...)
		require.NoError(t, err)
		return name
	}
	same := name("m", "c", "river 1", "trigger")
	require.Equal(t, same, name("m", "c", "river 1", "trigger"))
	seen := map[string]bool{same: true}
	for _, other := range []string{
		name("n", "c", "river 1", "trigger"), name("m", "d", "river 1", "trigger"),
		name("m", "c", "river 2", "trigger"), name("m", "c", "river 1", "triggers"),
		name("m", "c", "river 1trigger", ""), name("c", "m", "river 1", "trigger"),
	} {
		require.False(t, seen[other], other)
		seen[other] = true
	}
	rivers, err := riverMigrations()
	require.NoError(t, err)
	require.Greater(t, len(rivers), 5)
	hash, err := sourceHash(db.Migrations, db.Code, append(rivers, db.Triggers, db.RiverTriggers)...)
	require.NoError(t, err)
	require.Equal(t, "template_"+hash, migrated(t))
}
