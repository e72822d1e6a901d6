package server_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestLogs_FieldsAreDocumented checks every call that logs: its fields are literals that
// docs/operations.md lists, and each listed field is used.
func TestLogs_FieldsAreDocumented(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	_, section, found := strings.Cut(string(raw), "\n## Logs\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	known := map[string]bool{}
	for line := range strings.Lines(section) {
		if cells := strings.Split(line, "|"); len(cells) == 4 {
			for _, name := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(cells[1], -1) {
				known[name[1]] = false
			}
		}
	}
	require.Greater(t, len(known), 30)
	// before has, for each method of a logger, the number of arguments before the fields.
	before := map[string]int{
		"Debug": 1, "Info": 1, "Warn": 1, "Error": 1, "DebugContext": 2,
		"InfoContext": 2, "WarnContext": 2, "ErrorContext": 2, "Log": 3, "With": 0,
	}
	calls := 0
	for _, root := range []string{"../../internal", "../../cmd/dlqd", "../../riverdlq"} {
		require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			set := token.NewFileSet()
			file, err := parser.ParseFile(set, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				method, ok := call.Fun.(*ast.SelectorExpr)
				if !ok || !isLogger(method.X) {
					return true
				}
				skip, logs := before[method.Sel.Name]
				if !logs {
					return true
				}
				calls++
				for i := skip; i < len(call.Args); i += 2 {
					literal, ok := call.Args[i].(*ast.BasicLit)
					require.True(t, ok, "%s: a field's name is not a literal", set.Position(call.Pos()))
					name, err := strconv.Unquote(literal.Value)
					require.NoError(t, err)
					_, listed := known[name]
					require.True(t, listed, "%s: docs/operations.md lists no field %q", set.Position(literal.Pos()), name)
					known[name] = true
				}
				require.Zero(t, (len(call.Args)-skip)%2, "%s: a field without a value", set.Position(call.Pos()))
				return true
			})
			return nil
		}))
	}
	require.Greater(t, calls, 50)
	for name, used := range known {
		// These fields are set by the context and by River.
		elsewhere := slices.Contains([]string{"trace_id", "span_id", "kind", "client"}, name)
		require.True(t, used || elsewhere, "nothing logs %q", name)
	}
}

// isLogger reports whether x has a name that the code uses for loggers.
func isLogger(x ast.Expr) bool {
	switch x := x.(type) {
	case *ast.Ident:
		return x.Name == "logger" || x.Name == "slog"
	case *ast.SelectorExpr:
		return x.Sel.Name == "logger" || x.Sel.Name == "Logger"
	}
	return false
}
