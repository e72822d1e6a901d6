package postgres_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/postgres"
)

func TestForPsql_RemovesPassword(t *testing.T) {
	t.Parallel()
	for in, want := range map[string][2]string{
		"postgres://ann:s%40e@db:5432/x?sslmode=require&pool_max_conns=9": {
			"postgres://ann@db:5432/x?sslmode=require",
			"s@e",
		},
		"postgresql://db/x?password=secret&application_name=a%20b": {"postgresql://db/x?application_name=a%20b", "secret"},
		"postgres://dlqd@/dlqd?host=%2Fa%20b%2Fsocket":             {"postgres://dlqd@/dlqd?host=%2Fa%20b%2Fsocket", ""},
		"host=db user=ann password=secret dbname=x":                {"host=db user=ann dbname=x", "secret"},
		`host=db password = 'it\'s' dbname=x`:                      {"host=db dbname=x", "it's"},
	} {
		clean, password, err := postgres.ForPsql(in)
		require.NoError(t, err, in)
		require.Equal(t, want, [2]string{clean, password}, in)
	}
	for _, in := range []string{
		"postgres://ann:hush%zz@db/x", "postgres://ann:hush@db:port/x",
		"host=db password='hush dbname=x", "host=db password=hush=", "password", "postgres://ann:hush@[db/x",
	} {
		clean, password, err := postgres.ForPsql(in)
		if in == "host=db password=hush=" { // unusual, but valid
			require.Equal(t, "hush=", password)
			continue
		}
		require.ErrorContains(t, err, "database URL", in)
		require.NotContains(t, err.Error(), "hush", in)
		require.Empty(t, clean+password)
	}
}
