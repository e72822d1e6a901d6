package strategy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/vm"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/riverdlq"
)

// Limits on rules, which come from operators, and on what they read, which comes from strangers. Patterns are RE2 and
// expressions have no loops, so the time of one classification is bounded by their product.
const (
	maxRules        = 500
	maxContextBytes = 64 << 10 // a larger context is empty to expressions
	maxNodes        = 200      // of an expression
	maxMemory       = 100_000  // of an expression's run, in values
)

// rule is a rule of the policy, compiled.
type rule struct {
	*policy.Rule

	words   []words
	message *regexp.Regexp
	status  []string
	when    *vm.Program
}

// words are alternatives for one text.
type words struct {
	of  func(*Facts) string
	any policy.Words
}

// environment is what an expression reads.
type environment struct {
	Context map[string]any `expr:"context"`
	Type    string         `expr:"type"`
	Code    string         `expr:"code"`
	Message string         `expr:"message"`
	Status  int            `expr:"status"`
	Kind    string         `expr:"kind"`
	Queue   string         `expr:"queue"`
	Source  string         `expr:"source"`
}

var statusPattern = regexp.MustCompile(`^[1-5]([0-9]{2}|xx)$`)

// compileRules prepares a policy's rules. Its error names every one that is wrong, with file and line.
func compileRules(p *policy.Policy) ([]rule, error) {
	const file = "dlq-routing"
	var problems []error
	bad := func(path, format string, args ...any) {
		problems = append(problems, fmt.Errorf("%s: %s: %w", p.Where(file, path), path, fmt.Errorf(format, args...)))
	}
	if n := len(p.Routing.Rules); n > maxRules {
		bad("rules", "has %d rules; at most %d", n, maxRules)
	}
	rules := make([]rule, len(p.Routing.Rules))
	for i := range rules {
		r := &rules[i]
		r.Rule = &p.Routing.Rules[i]
		at := "rules[" + strconv.Itoa(i) + "].match"
		for _, w := range []struct {
			list policy.Words
			of   func(*Facts) string
		}{
			{r.Match.Type, func(f *Facts) string { return f.Type }},
			{r.Match.Code, func(f *Facts) string { return f.Code }},
			{r.Match.Kind, func(f *Facts) string { return f.Kind }},
			{r.Match.Queue, func(f *Facts) string { return f.Queue }},
			{r.Match.Source, func(f *Facts) string { return f.Source }},
		} {
			if len(w.list) > 0 {
				r.words = append(r.words, words{w.of, w.list})
			}
		}
		for _, status := range r.Match.Status {
			if !statusPattern.MatchString(status) {
				bad(at+".status", "%q is no HTTP status such as 503 or 5xx", status)
			}
			r.status = append(r.status, strings.TrimRight(status, "x"))
		}
		var err error
		if r.Match.Message != "" {
			if r.message, err = regexp.Compile(r.Match.Message); err != nil {
				bad(at+".message", "%w", err)
			}
		}
		if r.Match.When != "" {
			if r.when, err = compileExpression(r.Match.When); err != nil {
				bad(at+".when", "%w", err)
			}
		}
		if len(r.words) == 0 && len(r.Match.Status) == 0 && r.Match.Message == "" && r.Match.When == "" {
			bad(at, "matches every error; name what it is for (type, code, message, status, kind, queue, source or when)")
		}
	}
	return rules, errors.Join(problems...)
}

func compileExpression(text string) (*vm.Program, error) {
	var b bounds
	program, err := expr.Compile(text, expr.Patch(&b), expr.Env(environment{}), expr.AsBool(), expr.MaxNodes(maxNodes), expr.DisableAllBuiltins(),
		expr.EnableBuiltin("len"), expr.EnableBuiltin("lower"), expr.EnableBuiltin("upper"), expr.EnableBuiltin("trim"),
		expr.EnableBuiltin("int"), expr.EnableBuiltin("float"), expr.EnableBuiltin("string"))
	return program, cmp.Or(b.err, err)
}

// bounds finds what would let an expression run longer than its text and its input are.
type bounds struct{ err error }

// Visit implements ast.Visitor.
func (b *bounds) Visit(node *ast.Node) {
	switch n := (*node).(type) {
	case *ast.PredicateNode:
		b.err = errors.New("loops (any, all, map, filter and their like) are not allowed")
	case *ast.BinaryNode:
		if n.Operator == ".." {
			b.err = errors.New("ranges (..) are not allowed")
		}
		if _, constant := n.Right.(*ast.StringNode); n.Operator == "matches" && !constant {
			b.err = errors.New("the pattern of matches must be written out")
		}
	}
}

// matches reports whether everything that the rule asks for holds.
func (r *rule) matches(f *Facts, env *environment) bool {
	for _, w := range r.words {
		text := bounded(w.of(f))
		if !slices.ContainsFunc(w.any, func(pattern string) bool { return policy.MatchPattern(pattern, text) }) {
			return false
		}
	}
	if len(r.status) > 0 {
		status := strconv.Itoa(env.Status)
		if env.Status == 0 || !slices.ContainsFunc(r.status, func(s string) bool { return strings.HasPrefix(status, s) }) {
			return false
		}
	}
	if r.message != nil && !r.message.MatchString(env.Message) {
		return false
	}
	if r.when == nil {
		return true
	}
	machine := vm.VM{MemoryBudget: maxMemory}
	out, err := machine.Run(r.when, *env)
	yes, ok := out.(bool)
	return err == nil && ok && yes // what a stranger's context makes of it is no reason to stop
}

// decodeContext decodes JSON whose integers stay what they are: a rule about account 9007199254740993 is not about …992, which
// is what a float64 makes of it. One that no int holds is the text of its digits.
func decodeContext(raw json.RawMessage) any {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var tree any
	if decoder.Decode(&tree) != nil {
		return nil
	}
	return exactNumbers(tree)
}

func exactNumbers(tree any) any {
	switch node := tree.(type) {
	case json.Number:
		if n, err := strconv.Atoi(node.String()); err == nil {
			return n
		}
		if !strings.ContainsAny(node.String(), ".eE") {
			return node.String()
		}
		size, _ := node.Float64()
		return size
	case []any:
		for i := range node {
			node[i] = exactNumbers(node[i])
		}
	case map[string]any:
		for key := range node {
			node[key] = exactNumbers(node[key])
		}
	}
	return tree
}

func bounded(text string) string { return text[:min(len(text), maxMatchBytes)] }

// Classify returns an error's class, the name of the rule that chose what happens next, and that rule where it is one of
// the policy's: those are asked first, in order, and then the built-in table. The first rule that matches is the one; where
// it names no class, the class comes from those that follow.
func (p *Planner) Classify(f Facts) (class riverdlq.Class, name string, first *policy.Rule) {
	if len(p.rules) > 0 {
		env := environment{
			Type: bounded(f.Type), Code: bounded(f.Code), Message: bounded(f.Message), Status: f.status(),
			Kind: f.Kind, Queue: f.Queue, Source: f.Source,
		}
		if len(f.Context) <= maxContextBytes {
			env.Context, _ = decodeContext(f.Context).(map[string]any) // what is no object stays empty
		}
		for i := range p.rules {
			r := &p.rules[i]
			if first != nil && r.Class == "" || !r.matches(&f, &env) {
				continue
			}
			if first == nil {
				first = r.Rule
			}
			if r.Class != "" {
				return riverdlq.Class(r.Class), first.Name, first
			}
		}
	}
	class, name = Classify(f)
	if first != nil {
		name = first.Name
	}
	return class, name, first
}

// ruleNamed finds a rule of the policy.
func (p *Planner) ruleNamed(name string) *policy.Rule {
	for i := range p.rules {
		if p.rules[i].Name == name {
			return p.rules[i].Rule
		}
	}
	return nil
}
