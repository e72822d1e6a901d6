package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strings"
)

// swaps are the replacements of Go's binary operators and branch statements.
var swaps = map[token.Token]string{
	token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">", token.EQL: "!=", token.NEQ: "==",
	token.LAND: "||", token.LOR: "&&", token.ADD: "-", token.SUB: "+", token.MUL: "/", token.QUO: "*",
	token.BREAK: "continue", token.CONTINUE: "break",
}

// mutateGo returns the mutants of a Go file: other operators; continue for break; conditions that are always or never
// true (of loops: only never); a negation removed; true for false; calls and assignments removed. Each replacement is
// made in both directions. Log messages and constants (limits, intervals) stay unchanged, because few tests compare
// them.
func mutateGo(file string, source []byte) (all []Mutant, err error) {
	files := token.NewFileSet()
	tree, err := parser.ParseFile(files, file, source, parser.SkipObjectResolution|parser.ParseComments)
	if err != nil || ast.IsGenerated(tree) {
		return nil, err
	}
	at := func(pos token.Pos) int { return files.Position(pos).Offset }
	add := func(start, end token.Pos, replacement string) {
		all = append(all, newMutant(file, source, at(start), at(end), replacement))
	}
	// always adds mutants whose condition is constant. They still use the condition's variables, so that they compile.
	always := func(condition ast.Expr, operators ...string) {
		for _, operator := range operators {
			text := string(source[at(condition.Pos()):at(condition.End())])
			add(condition.Pos(), condition.End(), "("+text+") "+operator)
		}
	}
	leaveOut := func(statements []ast.Stmt) {
		for _, s := range statements {
			assign, isAssign := s.(*ast.AssignStmt)
			_, isCall := s.(*ast.ExprStmt)
			_, isStep := s.(*ast.IncDecStmt)
			if isCall && !isLog(s, source, at) || isStep || isAssign && assign.Tok != token.DEFINE {
				add(s.Pos(), s.End(), "")
			}
		}
	}
	ast.Inspect(tree, func(node ast.Node) bool {
		switch n := node.(type) {
		case *ast.GenDecl:
			return n.Tok != token.CONST
		case *ast.ExprStmt:
			return !isLog(n, source, at)
		case *ast.BinaryExpr:
			if swap := swaps[n.Op]; swap != "" {
				add(n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), swap)
			}
		case *ast.BranchStmt:
			if swap := swaps[n.Tok]; swap != "" && n.Label == nil {
				add(n.Pos(), n.End(), swap)
			}
		case *ast.UnaryExpr:
			if n.Op == token.NOT {
				add(n.Pos(), n.X.Pos(), "")
			}
		case *ast.Ident:
			if swap := map[string]string{"true": "false", "false": "true"}[n.Name]; swap != "" {
				add(n.Pos(), n.End(), swap)
			}
		case *ast.IfStmt:
			always(n.Cond, "&& false", "|| true")
		case *ast.ForStmt:
			if n.Cond != nil {
				always(n.Cond, "&& false") // an endless loop would only wait for the time limit
			}
		case *ast.SwitchStmt:
			for _, clause := range n.Body.List {
				if list := clause.(*ast.CaseClause).List; n.Tag == nil && len(list) == 1 {
					always(list[0], "&& false", "|| true")
				}
			}
		case *ast.BlockStmt:
			leaveOut(n.List)
		case *ast.CaseClause:
			leaveOut(n.Body)
		}
		return true
	})
	return all, nil
}

// isLog reports whether a statement writes a log message.
func isLog(s ast.Node, source []byte, at func(token.Pos) int) bool {
	text, _, _ := strings.Cut(string(source[at(s.Pos()):at(s.End())]), "(")
	return strings.Contains(text, "ogger.") || strings.HasPrefix(text, "slog.") || strings.HasSuffix(text, ".log")
}
