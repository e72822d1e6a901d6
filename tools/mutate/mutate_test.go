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

func TestRunner_RunsTheTestsOfAMutantsBlock(t *testing.T) {
	t.Parallel()
	const source = `package p

func f(a bool) int {
	switch {
	case !a:
		g()
	}
	return 1
}

var b = !true
`
	r := runner{
		room: "internal/p", kills: map[string]int{"TestKiller": 1},
		blocks: []string{"p.go:3.20,4.9", "p.go:6.3,6.6", "p.go:8.2,8.10", "q.go:1.1,99.1"},
		tests: []covered{
			{Test: "TestOther", Code: []string{"q.go:1.1,99.1"}},
			{Test: "TestBegin", Code: []string{"p.go:3.20,4.9", "q.go:1.1,99.1"}},
			{Test: "TestCall", Code: []string{"p.go:6.3,6.6"}},
			{Test: "TestKiller", Code: []string{"p.go:3.20,4.9", "p.go:6.3,6.6", "q.go:1.1,99.1"}},
			{Test: "TestFails", Failed: true, Code: []string{"p.go:6.3,6.6"}},
		},
	}
	mutants, err := mutateGo("internal/p/p.go", []byte(source))
	require.NoError(t, err)
	tests := map[string][]string{}
	for _, m := range mutants {
		for _, c := range r.covering(m) {
			tests[m.Change] = append(tests[m.Change], c.Test)
		}
	}
	require.Equal(t, []string{"TestKiller", "TestCall"}, tests["[-g()-]{++}"])
	require.Equal(t, []string{"TestKiller", "TestCall", "TestBegin"}, tests["case [-!-]{++}a:"], "the condition of a case")
	require.Len(t, tests["var b = [-!-]{++}true"], 4, "outside of functions")
}

func TestRunner_RunsTheTestsOfAMutantsFunction(t *testing.T) {
	t.Parallel()
	const source = `CREATE OR REPLACE FUNCTION dlq.a() RETURNS bool AS $$ SELECT 1 < 2 $$;
DO $install$ SELECT 3 < 4;
CREATE OR REPLACE FUNCTION dlq.b() RETURNS bool AS $$
SELECT 5 < 6 $$ $install$;
CREATE OR REPLACE VIEW dlq.c AS SELECT 7 < 8; ; ;
`
	r := runner{
		room: codeRoom, files: map[string][]string{"internal/p": {`func TestC(t) { "dlq.c" }`}},
		tests: []covered{
			{Package: "internal/q", Test: "TestBoth", Code: []string{"dlq.a", "dlq.b"}},
			{Package: "internal/q", Test: "TestA", Code: []string{"dlq.a"}},
			{Package: "internal/p", Test: "TestC", Code: []string{"dlq.z"}},
			{Package: "internal/p", Test: "TestWithoutDatabase"},
		},
	}
	tests := map[string][]string{}
	for _, m := range mutateSQL("a.sql", []byte(source)) {
		for _, c := range r.covering(m) {
			tests[m.Change] = append(tests[m.Change], c.Test)
		}
	}
	require.Equal(t, map[string][]string{
		"CREATE OR REPLACE FUNCTION dlq.a() RETURNS bool AS $$ SELECT 1 [-<-]{+<=+} 2 $$;": {"TestA", "TestBoth"},
		"DO $install$ SELECT 3 [-<-]{+<=+} 4;":                                             {"TestBoth"},
		"SELECT 5 [-<-]{+<=+} 6 $$ $install$;":                                             {"TestBoth"},
		"CREATE OR REPLACE VIEW dlq.c AS SELECT 7 [-<-]{+<=+} 8; ; ;":                      {"TestC"},
	}, tests)
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
