package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"github.com/dlqd/dlqd/internal/filter"
	"github.com/dlqd/dlqd/internal/metrics/metricstest"
	"github.com/dlqd/dlqd/internal/postgres/postgrestest"
)

// TestSurface compares every public name with the files in testdata/surface. SQL, scripts, dashboards, alerts, policy
// files, API clients and Go programs use these names, and a missing or changed name breaks one of them.
// DLQD_SURFACE=write rewrites the files, for a change that adds names.
func TestSurface(t *testing.T) {
	t.Parallel()
	for name, names := range map[string]func(*testing.T) []string{
		"sql":      sqlNames,
		"stored":   storedTexts,
		"metrics":  metricNames,
		"alerts":   alertNames,
		"api":      apiNames,
		"commands": commandNames,
		"policy":   policyNames,
		"settings": environmentNames,
		"logs":     logNames,
		"filter":   filterNames,
		"urls":     urlNames,
		"jobs":     jobNames,
		"riverdlq": riverdlqNames,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			found := names(t)
			slices.Sort(found)
			found = slices.Compact(found)
			require.NotEmpty(t, found)
			file := filepath.Join("testdata", "surface", name+".txt")
			text := strings.Join(found, "\n") + "\n"
			if os.Getenv("DLQD_SURFACE") == "write" {
				require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
			}
			want, err := os.ReadFile(file)
			require.NoError(t, err)
			require.Equal(t, string(want), text, "names in %s changed; DLQD_SURFACE=write accepts it", file)
		})
	}
}

// sqlNames lists functions with their arguments and results, tables and views with their columns, types with their
// labels, and the triggers on River's tables.
func sqlNames(t *testing.T) []string {
	t.Helper()
	rows, err := postgrestest.Pool(t).Query(t.Context(), `
		SELECT format('%s %s(%s) returns %s', CASE p.prokind WHEN 'p' THEN 'procedure' ELSE 'function' END, p.oid::regproc,
			pg_get_function_arguments(p.oid), pg_get_function_result(p.oid))
		FROM pg_proc p WHERE p.pronamespace = 'dlq'::regnamespace
		UNION ALL
		SELECT format('relation %s (%s).%s %s%s', c.oid::regclass, c.relkind, a.attname, format_type(a.atttypid, a.atttypmod),
			CASE WHEN a.attnotnull THEN ' not null' END)
		FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
		WHERE c.relnamespace = 'dlq'::regnamespace AND c.relkind IN ('r', 'p', 'v', 'm', 'c', 'S') AND a.attnum > 0
			AND NOT a.attisdropped
			AND (NOT c.relispartition OR EXISTS (SELECT FROM pg_partitioned_table p WHERE p.partrelid = c.oid))
		UNION ALL
		SELECT format('enum %s %s', e.enumtypid::regtype, e.enumlabel)
		FROM pg_enum e JOIN pg_type t ON t.oid = e.enumtypid WHERE t.typnamespace = 'dlq'::regnamespace
		UNION ALL
		SELECT format('trigger %s on %s', g.tgname, g.tgrelid::regclass)
		FROM pg_trigger g JOIN pg_class c ON c.oid = g.tgrelid
		WHERE NOT g.tgisinternal AND g.tgparentid = 0 AND c.relnamespace <> 'dlq'::regnamespace`)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	code := sqlCode(t)
	for _, state := range regexp.MustCompile(`ERRCODE = '(\w+)'`).FindAllStringSubmatch(code, -1) {
		names = append(names, "sqlstate "+state[1])
	}
	for _, channel := range regexp.MustCompile(`pg_notify\('([\w.]+)'`).FindAllStringSubmatch(code, -1) {
		names = append(names, "channel "+channel[1])
	}
	return names
}

// sqlCode returns the text of the files in db/code, without comments.
func sqlCode(t *testing.T) string {
	t.Helper()
	files, err := filepath.Glob("../../db/code/*.sql")
	require.NoError(t, err)
	var code strings.Builder
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		code.Write(regexp.MustCompile(`(?m)(^|\s)--.*$`).ReplaceAll(raw, nil))
	}
	return code.String()
}

// storedTexts lists the literals that SQL stores as reasons, actors and acts. Functions compare stored values with
// these literals, and operators search for them.
func storedTexts(t *testing.T) []string {
	t.Helper()
	stores := regexp.MustCompile(`(?:jsonb_build_object\('actor'|record_act\(|_reason text DEFAULT|\breason = |` +
		`'reason', |note_on\(|_reason\(\) RETURNS text)(?:'(?:[^']|'')*'|[^';])*`)
	literal := regexp.MustCompile(`'((?:[^']|'')*)'`)
	texts := regexp.MustCompile(`\{"actor": "\w+", "reason":[^']*\}`).FindAllString(sqlCode(t), -1)
	for _, statement := range stores.FindAllString(sqlCode(t), -1) {
		for _, match := range literal.FindAllStringSubmatch(statement, -1) {
			texts = append(texts, strconv.Quote(match[1]))
		}
	}
	return texts
}

func metricNames(t *testing.T) (names []string) {
	t.Helper()
	for _, metric := range metricstest.Served(t) {
		names = append(names, metric.Name+"{"+metric.LabelsInText+"}")
	}
	return names
}

// alertNames lists alerts with their labels, and recording rules.
func alertNames(t *testing.T) []string {
	t.Helper()
	raw, err := os.ReadFile("../../deploy/prometheus/rules.yaml")
	require.NoError(t, err)
	var file struct {
		Groups []struct {
			Name  string `yaml:"name"`
			Rules []struct {
				Alert  string            `yaml:"alert"`
				Record string            `yaml:"record"`
				Labels map[string]string `yaml:"labels"`
			} `yaml:"rules"`
		} `yaml:"groups"`
	}
	require.NoError(t, yaml.Unmarshal(raw, &file))
	var names []string
	for _, group := range file.Groups {
		for _, rule := range group.Rules {
			names = append(names, fmt.Sprintf("%s: %s%s %v", group.Name, rule.Alert, rule.Record, rule.Labels))
		}
	}
	return names
}

// describing are the keys of a schema whose values are only text for readers.
var describing = []string{
	"description", "summary", "title", "example", "examples", "externalDocs", "markdownDescription",
}

// flatten lists the leaves of a JSON document with their paths. It leaves out everything below a describing key.
func flatten(at string, value any) (leaves []string) {
	switch value := value.(type) {
	case map[string]any:
		for key, inner := range value {
			_, isObject := inner.(map[string]any)
			isProperty := isObject && strings.HasSuffix(at, "properties") // key is a field that has such a name
			if slices.Contains(describing, key) && !isProperty {
				continue
			}
			leaves = append(leaves, flatten(at+"/"+key, inner)...)
		}
	case []any:
		for i, inner := range value {
			if text, ok := inner.(string); ok {
				leaves = append(leaves, at+" has "+text)
			} else {
				leaves = append(leaves, flatten(at+"/"+strconv.Itoa(i), inner)...)
			}
		}
	default:
		leaves = append(leaves, fmt.Sprintf("%s = %v", at, value))
	}
	return leaves
}

func flattenFile(t *testing.T, at, path string) []string {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var document any
	require.NoError(t, decoder.Decode(&document))
	return flatten(at, document)
}

// apiNames lists the paths, operations, parameters, fields, statuses and media types of the OpenAPI document.
func apiNames(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(flattenFile(t, "", "../../openapi/openapi.json"), func(line string) bool {
		return strings.HasPrefix(line, "/info/") || strings.HasPrefix(line, "/tags/")
	})
}

// policyNames lists the keys of the policy's files, with their types and bounds.
func policyNames(t *testing.T) (names []string) {
	t.Helper()
	files, err := filepath.Glob("../../config/schemas/*.json")
	require.NoError(t, err)
	for _, file := range files {
		names = append(names, flattenFile(t, strings.TrimSuffix(filepath.Base(file), ".schema.json"), file)...)
	}
	return names
}

// commandNames lists the commands with their aliases, arguments and flags, and the exit codes.
func commandNames(t *testing.T) (names []string) {
	t.Helper()
	var walk func(*cobra.Command)
	walk = func(c *cobra.Command) {
		names = append(names, strings.TrimSpace(c.CommandPath()+" "+strings.Join(c.Aliases, " ")))
		c.Flags().VisitAll(func(f *pflag.Flag) {
			names = append(names, fmt.Sprintf("%s --%s -%s %s = %q",
				c.CommandPath(), f.Name, f.Shorthand, f.Value.Type(), f.DefValue))
		})
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot(t.Context()))
	for i := range names {
		names[i] = strings.ReplaceAll(names[i], os.Getenv("HOME")+"/", "~/")
	}
	for _, code := range []struct {
		name string
		code int
	}{
		{"failed", exitFailed},
		{"usage", exitUsage},
		{"schema", exitSchema},
		{"held", exitHeld},
		{"stopped", exitStopped},
		{"no server", exitNoServer},
		{"approval requested", exitApproval},
	} {
		names = append(names, fmt.Sprintf("exit %d: %s", code.code, code.name))
	}
	return names
}

// sources calls fn for the Go files of the program, without tests and generated code.
func sources(t *testing.T, fn func(path string, file *ast.File)) {
	t.Helper()
	for _, root := range []string{"../../internal", "../../cmd/dlqd", "../../riverdlq"} {
		require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err == nil && !ast.IsGenerated(file) {
				fn(path, file)
			}
			return err
		}))
	}
}

// literals calls fn for each string literal of the program.
func literals(t *testing.T, fn func(text string)) {
	t.Helper()
	sources(t, func(_ string, file *ast.File) {
		ast.Inspect(file, func(n ast.Node) bool {
			if literal, ok := n.(*ast.BasicLit); ok && literal.Kind == token.STRING {
				if text, err := strconv.Unquote(literal.Value); err == nil {
					fn(text)
				}
			}
			return true
		})
	})
}

// environmentNames lists the environment variables that the program reads.
func environmentNames(t *testing.T) (names []string) {
	t.Helper()
	variable := regexp.MustCompile(`^(DLQD|OTEL|XDG|DATABASE)_[A-Z_]+$|^PATH$`)
	literals(t, func(text string) {
		if variable.MatchString(text) {
			names = append(names, text)
		}
	})
	return names
}

// logNames lists the fields of log lines that docs/operations.md names. Tests of package server compare that list with
// the code.
func logNames(t *testing.T) (names []string) {
	t.Helper()
	raw, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(raw), "\n## Logs\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(section) {
		if cells := strings.Split(line, "|"); len(cells) == 4 {
			for _, name := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(cells[1], -1) {
				names = append(names, name[1])
			}
		}
	}
	return names
}

// filterNames lists the fields of the filter language. For an enumeration, it also lists the values.
func filterNames(*testing.T) (names []string) {
	for _, field := range filter.Fields() {
		names = append(names, fmt.Sprintf("%s: %v", field.Name, field.Values))
	}
	return names
}

// urlNames lists the addresses of pages, the addresses of server endpoints that are not in the OpenAPI document, and
// the runbooks.
func urlNames(t *testing.T) (names []string) {
	t.Helper()
	standIn := regexp.MustCompile(`internal/alerting|test/`) // these packages replace other programs in tests
	sources(t, func(path string, file *ast.File) {
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) < 2 {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains([]string{"page", "action", "Handle", "HandleFunc"}, method.Sel.Name) {
				return true
			}
			var pattern bytes.Buffer
			require.NoError(t, printer.Fprint(&pattern, token.NewFileSet(), call.Args[0]))
			if strings.Contains(pattern.String(), `"`) && !standIn.MatchString(path) {
				names = append(names, method.Sel.Name+" "+pattern.String())
			}
			return true
		})
	})
	books, err := filepath.Glob("../../runbooks/*.md")
	require.NoError(t, err)
	for _, book := range books {
		names = append(names, "runbook "+filepath.Base(book))
	}
	return names
}

// jobNames lists metadata keys of jobs, headers of deliveries, and literals such as dlqd_message. These literals are
// the kind of dlqd's jobs and some names of metrics and labels.
func jobNames(t *testing.T) (names []string) {
	t.Helper()
	key := regexp.MustCompile(`\b(?:dlqd?|river):[a-z_]+\b`)
	header := regexp.MustCompile(`^(?:X-Error|Dlqd|Webhook)-[A-Za-z-]*$|^dlqd_[a-z]+$`)
	names = key.FindAllString(sqlCode(t), -1)
	literals(t, func(text string) {
		names = append(names, key.FindAllString(text, -1)...)
		if header.MatchString(text) {
			names = append(names, text)
		}
	})
	return names
}

// riverdlqNames lists the exported declarations of package riverdlq.
func riverdlqNames(t *testing.T) (names []string) {
	t.Helper()
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, "../../riverdlq/riverdlq.go", nil, parser.SkipObjectResolution) // without comments
	require.NoError(t, err)
	require.True(t, ast.FileExports(file))
	for _, declared := range file.Decls {
		if function, ok := declared.(*ast.FuncDecl); ok {
			function.Body = nil
		}
		var text bytes.Buffer
		require.NoError(t, (&printer.Config{}).Fprint(&text, set, declared))
		names = append(names, strings.Join(strings.Fields(text.String()), " "))
	}
	return names
}
