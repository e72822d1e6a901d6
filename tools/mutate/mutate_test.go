package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func changes(mutants []Mutant) (all []string) {
	for _, m := range mutants {
		all = append(all, m.Change)
	}
	return all
}

func TestMutateGo_ChangesOnePlaceEach(t *testing.T) {
	t.Parallel()
	const source = `package p

func f(a, b int) int {
	if !(a < b) {
		logger.Logger.Info("left as it is", "sum", a+b)
		g()
	}
	return a
}
`
	mutants, err := mutateGo("p.go", []byte(source))
	require.NoError(t, err)
	require.ElementsMatch(t, []string{
		"if [-!(a < b)-]{+(!(a < b)) && false+} {",
		"if [-!(a < b)-]{+(!(a < b)) || true+} {",
		"if [-!-]{++}(a < b) {",
		"if !(a [-<-]{+<=+} b) {",
		"[-g()-]{++}",
	}, changes(mutants))
	require.Equal(t, 4, mutants[0].Line)
	require.Equal(t, strings.Replace(source, "!(a < b)", "(!(a < b)) && false", 1), string(mutants[0].Source))
}

func TestMutateSQL_ChangesOnePlaceEach(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		sql  string
		want []string
	}{
		{"WHERE a AND b IN (1, 2) OR c;", []string{
			"WHERE [-a-]{+true+} AND b IN (1, 2) OR c;",
			"WHERE a AND [-b IN (1, 2)-]{+true+} OR c;",
			"WHERE a AND b IN (1, 2) OR [-c-]{+false+};",
		}},
		{"AND a BETWEEN 1 AND 2 GROUP BY a;", []string{"AND [-a BETWEEN 1 AND 2-]{+true+} GROUP BY a;"}},
		{"AND a IS NOT DISTINCT FROM b ) ;", []string{
			"AND [-a IS NOT DISTINCT FROM b-]{+true+} ) ;",
			"AND a IS [-NOT-]{++} DISTINCT FROM b ) ;",
			"AND a [-IS NOT DISTINCT FROM-]{+=+} b ) ;",
		}},
		{"a < b -- a < b\n'a < b' ;", []string{"a [-<-]{+<=+} b -- a < b"}},
		{"x := coalesce(f(a, b), c);", []string{"x := coalesce(f(a, b)[-, c-]{++});"}},
		{"BEGIN IF a THEN END IF; EXIT WHEN b; END", []string{
			"BEGIN IF [-a-]{+true+} THEN END IF; EXIT WHEN b; END",
			"BEGIN IF [-a-]{+false+} THEN END IF; EXIT WHEN b; END",
			"BEGIN IF a THEN END IF; EXIT WHEN [-b-]{+true+}; END",
			"BEGIN IF a THEN END IF; EXIT WHEN [-b-]{+false+}; END",
		}},
		{"(CASE a WHEN b THEN c END, CASE WHEN d THEN e END)", []string{
			"(CASE a WHEN b THEN c END, CASE WHEN [-d-]{+true+} THEN e END)",
			"(CASE a WHEN b THEN c END, CASE WHEN [-d-]{+false+} THEN e END)",
		}},
		{"$$ SELECT a ORDER BY a, b DESC LIMIT 1 FOR UPDATE SKIP LOCKED $$ ; ;", []string{
			"$$ SELECT a ORDER BY a[--]{+ DESC+}, b DESC LIMIT 1 FOR UPDATE SKIP LOCKED $$ ; ;",
			"$$ SELECT a ORDER BY a, b [-DESC-]{+ASC+} LIMIT 1 FOR UPDATE SKIP LOCKED $$ ; ;",
			"$$ SELECT a ORDER BY a, b DESC LIMIT 1 [-FOR UPDATE SKIP LOCKED-]{++} $$ ; ;",
			"$$ SELECT a ORDER BY a, b DESC LIMIT 1 FOR UPDATE [-SKIP LOCKED-]{++} $$ ; ;",
		}},
	} {
		require.ElementsMatch(t, test.want, changes(mutateSQL("a.sql", []byte(";\n"+test.sql+"\n; ;"))), test.sql)
	}
}

func TestShuffled_IsTheSameForASeed(t *testing.T) {
	t.Parallel()
	mutants := func() (all []Mutant) {
		for line := range 20 {
			all = append(all, Mutant{Line: line})
		}
		return all
	}
	require.Equal(t, shuffled(mutants(), 1, "a"), shuffled(mutants(), 1, "a"))
	require.NotEqual(t, shuffled(mutants(), 1, "a"), shuffled(mutants(), 2, "a"))
}

func TestSample_RunsNoMutantTwice(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "results")
	require.NoError(t, os.WriteFile(file, []byte(`{"Sum":"a","Verdict":"survived"}
{"Sum":"b","Verdict":"killed"}
{"Sum":"c","Verdict":"invalid"}
{"Sum":"a","Verdict":"killed"}
`), 0o600))
	known, err := readResults(file)
	require.NoError(t, err)
	s := sample{known: known, equivalent: "x.go\td\treason", mutants: []Mutant{
		{Sum: "c"}, {File: "x.go", Change: "d"}, {Sum: "a"}, {Sum: "b"}, {Sum: "beyond the count"},
	}}
	require.NoError(t, s.take(t.Context(), "none", 2)) // a run would fail, because the room does not exist
	require.Equal(t, "none: score 1.00 (90 % interval 0.43 to 1.00): 2 of 2 mutants killed; "+
		"not counted: 1 invalid, 1 equivalent; 5 places to change\n", s.report("none"))
}

func TestWilson_ReturnsTheIntervalOf90Percent(t *testing.T) {
	t.Parallel()
	low, high := wilson(48, 60)
	require.InDelta(t, 0.703, low, 0.0005)
	require.InDelta(t, 0.871, high, 0.0005)
}
