package db_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// tables maps each table to the packages of internal whose queries (db/queries) may name it (docs/decisions.md, "Each
// room has its own queries"). Any other package calls the package that owns the table, or a function of db/code.
var tables = map[string][]string{
	// deadletter contains the operations of users on entries. Each of the other packages uses only the entries that it
	// processes.
	"dead_letter_queue": {"deadletter", "automatic", "group", "ingest", "metrics", "replay", "worker"},

	// metrics reads counts and ages, each from one row of a rollup or from a bounded range of an index.
	"acts":                    {"archive", "replay"}, // replay reads the decisions of a run
	"approvals":               {"approval", "metrics"},
	"automatic_changes":       {"automatic"},
	"automatic_switches":      {"automatic"},
	"circuit_breakers":        {"breaker"},
	"dead_letter_transitions": {"analytics"}, // for viewers who are limited to queues and kinds
	"counters":                {"metrics"},
	"entry_jobs":              {"worker"}, // counts of other jobs leave out the jobs of the entry
	"destination_traffic":     {"delivery"},
	"erasures":                {"deadletter"},
	"feed_records":            {"source"},
	"gates":                   {"worker", "metrics"},
	"failure_groups":          {"group"},
	"group_aliases":           {"group"},
	"group_marks":             {"group", "worker"}, // decided entries are assigned to the owner of their group
	"job_facts":               {"facts"},
	"last_acts":               {"replica"},
	"metrics_sample":          {"metrics"},
	"ordered_jobs":            {"ingest"},
	"paces":                   {"metrics", "replay"},
	"processes":               {"process", "metrics"},
	"reconcile_findings":      {"reconcile"},
	"replay_run_entries":      {"replay"},
	"replay_run_groups":       {"replay"},
	"replay_runs":             {"replay", "metrics"},
	"rollup_backlog":          {"metrics", "deadletter"}, // the open entries, if counting them takes long
	"rollup_flow":             {"analytics", "replay"},   // the load of the last hour
	"rollup_state":            {"analytics", "metrics", "deadletter"},
	"saved_views":             {"deadletter"},
	"sessions":                {"access"},
	"settings":                {"automatic", "deadletter", "replica", "retention"},
	"source_positions":        {"source"},
	"source_progress":         {"source"},
	"sources":                 {"source"},
	"tokens":                  {"access"},
	"river.river_job":         {"breaker", "delivery", "ingest", "worker", "metrics", "replay"},
}

var (
	createTable = regexp.MustCompile(`CREATE (?:UNLOGGED )?TABLE (?:IF NOT EXISTS )?dlq\.(\w+)`)
	named       = regexp.MustCompile(`\b(?:dlq\.|(river\.))(\w+)`)
)

func TestQueries_UseTablesOfTheirPackage(t *testing.T) {
	t.Parallel()
	known := map[string]bool{"river.river_job": true}
	migrations, err := filepath.Glob("migrations/*.sql")
	require.NoError(t, err)
	for _, name := range migrations {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for _, table := range createTable.FindAllStringSubmatch(string(text), -1) {
			known[table[1]] = true
		}
	}
	files, err := filepath.Glob("queries/*.sql")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, name := range files {
		room := strings.TrimSuffix(filepath.Base(name), ".sql")
		require.DirExists(t, "../internal/"+room, "queries belong to a package of internal/")
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for _, match := range named.FindAllStringSubmatch(string(text), -1) {
			table := match[1] + match[2]
			if !known[table] {
				continue // a function, a type, or the name of a lock
			}
			if table == "dead_letter_open" || table == "dead_letter_inbox" || table == "dead_letter_returned" { // partitions
				table = "dead_letter_queue"
			}
			require.Contains(t, tables[table], room, "%s uses table %s: call the package that owns it, or add it to tables",
				name, table)
		}
	}
}

// texts are the folders and files of Go code that may contain the text of SQL statements.
var texts = []string{
	"internal/postgres/",           // catalogs, sessions, migrations
	"internal/doctor/",             // its checks are data; surveys databases without dlqd
	"internal/demo/",               // not part of the server
	"internal/deadletter/store.go", // filters; columns by the fields of a type; settings of the transaction
	"internal/deadletter/audit.go",
	"internal/deadletter/search.go", // filters
	"internal/deadletter/erase.go",
	"internal/archive/database.go",    // names of partitions
	"internal/analytics/analytics.go", // columns by the fields of a type
	"internal/group/group.go",
}

func TestCode_RunsStatementsOnlyFromQueries(t *testing.T) {
	t.Parallel()
	runs := []string{"Exec", "Query", "QueryRow", "SendBatch", "CopyFrom", "Queue"}
	used := map[string]bool{}
	for _, root := range []string{"../internal", "../cmd", "../riverdlq"} {
		require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") ||
				strings.Contains(path, "/dbsqlc/") {
				return err
			}
			path = filepath.ToSlash(path)
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			may := slices.IndexFunc(texts, func(place string) bool { return strings.HasPrefix(path, "../"+place) })
			ast.Inspect(file, func(node ast.Node) bool {
				call, ok := node.(*ast.CallExpr)
				if !ok || len(call.Args) < 2 { // url.URL's Query takes no arguments
					return true
				}
				if method, ok := call.Fun.(*ast.SelectorExpr); ok && slices.Contains(runs, method.Sel.Name) {
					require.GreaterOrEqual(t, may, 0, "%s runs a statement: move it to db/queries", set.Position(call.Pos()))
					used[texts[may]] = true
				}
				return true
			})
			return nil
		}))
	}
	for _, place := range texts {
		require.True(t, used[place], "%s runs no statement: remove it from texts", place)
	}
}

// TestDocs_NameExistingTests checks that each test that the docs name exists.
func TestDocs_NameExistingTests(t *testing.T) {
	t.Parallel()
	exists := map[string]bool{}
	require.NoError(t, filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range testFunction.FindAllStringSubmatch(string(text), -1) {
			exists[match[1]] = true
		}
		return err
	}))
	docs, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	named := 0
	for _, doc := range docs {
		text, err := os.ReadFile(doc)
		require.NoError(t, err)
		for _, match := range testNamed.FindAllStringSubmatch(string(text), -1) {
			named++
			require.True(t, exists[match[1]], "%s names %s", doc, match[1])
		}
	}
	require.Greater(t, named, 40)
}

// TestDocs_AreListedOnce checks that docs/README.md lists each document once.
func TestDocs_AreListedOnce(t *testing.T) {
	t.Parallel()
	index, err := os.ReadFile("../docs/README.md")
	require.NoError(t, err)
	listed := map[string]int{}
	for _, match := range listedDoc.FindAllStringSubmatch(string(index), -1) {
		listed[match[1]]++
	}
	docs, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	for _, doc := range docs {
		if name := filepath.Base(doc); name != "README.md" {
			require.Equal(t, 1, listed[name], "%s belongs in docs/README.md once", name)
			delete(listed, name)
		}
	}
	require.Empty(t, listed, "docs/README.md lists what does not exist")
}

// TestDocs_NameWhatExists checks the files, SQL functions and links that documents name.
func TestDocs_NameWhatExists(t *testing.T) {
	t.Parallel()
	var sql strings.Builder
	for _, pattern := range []string{"code/*.sql", "migrations/*.sql"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, file := range files {
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			sql.Write(text)
		}
	}
	known := map[string]bool{}
	for _, match := range ofSchema.FindAllStringSubmatch(sql.String(), -1) {
		known[match[1]] = true
	}
	var docs []string
	for _, pattern := range []string{"../*.md", "../docs/*.md"} {
		found, err := filepath.Glob(pattern)
		require.NoError(t, err)
		docs = append(docs, found...)
	}
	for _, doc := range docs {
		raw, err := os.ReadFile(doc)
		require.NoError(t, err)
		text := codeBlock.ReplaceAllString(string(raw), "")
		for _, match := range fileNamed.FindAllStringSubmatch(text, -1) {
			require.FileExists(t, filepath.Join("..", match[1]), "%s names it", doc)
		}
		for _, match := range sqlNamed.FindAllStringSubmatch(text, -1) {
			require.True(t, known[match[1]], "%s names dlq.%s", doc, match[1])
		}
		for _, match := range linkTo.FindAllStringSubmatch(text, -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(doc), match[1]))
			require.NoError(t, err, "%s links to it", doc)
		}
	}
}

var (
	testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	testNamed    = regexp.MustCompile("`(Test[A-Z]\\w+)`")

	listedDoc = regexp.MustCompile(`\]\(([a-z_]+\.md)\)`)
	codeBlock = regexp.MustCompile("(?ms)^\\s*```.*?^\\s*```")
	ofSchema  = regexp.MustCompile(`\bdlq\.(\w+)`)
	sqlNamed  = regexp.MustCompile("`dlq\\.(\\w+)(?:\\([^`]*\\))?`")
	fileNamed = regexp.MustCompile("`((?:internal|db|docs|cmd|deploy|riverdlq|scripts)/[\\w./-]+\\.\\w+)`")
	linkTo    = regexp.MustCompile(`\]\(([^):#]+)(?:#[^)]*)?\)`)
)
