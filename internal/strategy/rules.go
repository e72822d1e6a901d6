package strategy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/vm"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/riverdlq"
)

// Limits on rules, which come from operators, and on what they read, which comes from strangers. A pattern takes time in
// proportion to its instructions and to the text (10 ns for each of their product, measured): one alone 80 ms at most.
const (
	maxRules        = 500
	maxContextBytes = 64 << 10 // a larger context or payload is empty to expressions
	maxNodes        = 200      // of an expression
	maxMemory       = 100_000  // of an expression's run, in values
	maxPattern      = 2000     // bytes of a pattern: it is compiled before its instructions are known
	maxInstructions = 1000     // of a pattern, compiled
	maxCost         = 25_000   // instructions of all patterns of a policy
)

// DefaultBudget is how long the rules may take over one error. It is for patterns and errors that together are worse than
// anybody thought of: classifying takes microseconds.
const DefaultBudget = 250 * time.Millisecond

// rule is a rule of the policy, compiled.
type rule struct {
	*policy.Rule

	words   []words
	code    policy.Words // of the code, or of the HTTP status
	message *regexp.Regexp
	status  []string
	when    *expression
}

// words are alternatives for one text.
type words struct {
	of  func(*Facts) string
	any policy.Words
}

// environment is what an expression reads.
type environment struct {
	Context any            `expr:"context"`
	Payload any            `expr:"payload"`
	Headers map[string]any `expr:"headers"`
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
		return nil, errors.Join(problems...)
	}
	rules := make([]rule, len(p.Routing.Rules))
	cost := 0
	for i := range rules {
		r := &rules[i]
		r.Rule = &p.Routing.Rules[i]
		at := "rules[" + strconv.Itoa(i) + "].match"
		for _, w := range []struct {
			list policy.Words
			of   func(*Facts) string
		}{
			{r.Match.Type, func(f *Facts) string { return f.Type }},
			{r.Match.Kind, func(f *Facts) string { return f.Kind }},
			{r.Match.Queue, func(f *Facts) string { return f.Queue }},
			{r.Match.Source, func(f *Facts) string { return f.Source }},
		} {
			if len(w.list) > 0 {
				r.words = append(r.words, words{w.of, w.list})
			}
		}
		r.code = r.Match.Code
		for _, status := range r.Match.Status {
			if !statusPattern.MatchString(status) {
				bad(at+".status", "%q is no HTTP status such as 503 or 5xx", status)
			}
			r.status = append(r.status, strings.TrimRight(status, "x"))
		}
		var err error
		if r.Match.Message != "" {
			var instructions int
			if r.message, instructions, err = compilePattern(r.Match.Message); err != nil {
				bad(at+".message", "%w", err)
			}
			cost += instructions
		}
		if r.Match.When != "" {
			if r.when, err = compileExpression(r.Match.When); err != nil {
				bad(at+".when", "%w", err)
			} else {
				cost += r.when.instructions
			}
		}
		if len(r.words) == 0 && len(r.code) == 0 && len(r.Match.Status) == 0 && r.Match.Message == "" && r.Match.When == "" {
			bad(at, "matches every error; name what it is for (type, code, message, status, kind, queue, source or when)")
		}
	}
	if cost > maxCost {
		bad("rules", "have patterns of %d instructions together; at most %d: leave out repetitions such as {100}", cost, maxCost)
	}
	return rules, errors.Join(problems...)
}

// compilePattern compiles a pattern that strangers' texts are matched against, unless it is too costly.
func compilePattern(text string) (*regexp.Regexp, int, error) {
	if n := len(text); n > maxPattern {
		return nil, 0, fmt.Errorf("takes too long: the pattern has %d bytes; at most %d", n, maxPattern)
	}
	pattern, err := regexp.Compile(text)
	if err != nil {
		return nil, 0, err
	}
	parsed, err := syntax.Parse(text, syntax.Perl)
	if err != nil {
		return nil, 0, err
	}
	program, err := syntax.Compile(parsed.Simplify())
	if err != nil {
		return nil, 0, err
	}
	if n := len(program.Inst); n > maxInstructions {
		return nil, 0, fmt.Errorf("takes too long: the pattern has %d instructions; at most %d: leave out repetitions such as {100}", n, maxInstructions)
	}
	return pattern, len(program.Inst), nil
}

// expression is an expression, compiled.
type expression struct {
	*vm.Program

	patterns        []*regexp.Regexp // of its matches
	instructions    int              // of those
	readsTheMessage bool             // payload or headers
}

// findFunction stands for the operator matches, whose text it cuts. No expression can name it.
const findFunction = "find pattern"

func compileExpression(text string) (*expression, error) {
	var e expression
	b := bounds{expression: &e}
	find := func(params ...any) (any, error) {
		text, _ := params[0].(string)                                                          // nothing, or no text, has no match
		return params[0] != nil && e.patterns[params[1].(int)].MatchString(bounded(text)), nil //nolint:forcetypeassert // bounds wrote it
	}
	program, err := expr.Compile(text, expr.Patch(&b), expr.Env(environment{}), expr.AsBool(), expr.MaxNodes(maxNodes), expr.DisableAllBuiltins(),
		expr.EnableBuiltin("len"), expr.EnableBuiltin("lower"), expr.EnableBuiltin("upper"), expr.EnableBuiltin("trim"),
		expr.EnableBuiltin("int"), expr.EnableBuiltin("float"), expr.EnableBuiltin("string"),
		expr.Function(findFunction, find, new(func(any, int) bool)))
	if err = cmp.Or(b.err, err); err != nil {
		return nil, err
	}
	e.Program = program
	return &e, nil
}

// bounds finds what would let an expression run longer than its text and its input are, and bounds what its patterns read.
type bounds struct {
	expression *expression
	err        error
}

// Visit implements ast.Visitor.
func (b *bounds) Visit(node *ast.Node) {
	switch n := (*node).(type) {
	case *ast.PredicateNode:
		b.err = errors.New("loops (any, all, map, filter and their like) are not allowed")
	case *ast.IdentifierNode:
		b.expression.readsTheMessage = b.expression.readsTheMessage || n.Value == "payload" || n.Value == "headers"
	case *ast.BinaryNode:
		switch n.Operator {
		case "..":
			b.err = errors.New("ranges (..) are not allowed")
		case "matches":
			constant, ok := n.Right.(*ast.StringNode)
			if !ok {
				b.err = errors.New("the pattern of matches must be written out")
				return
			}
			pattern, instructions, err := compilePattern(constant.Value)
			if err != nil {
				b.err = err
				return
			}
			ast.Patch(node, &ast.CallNode{Callee: &ast.IdentifierNode{Value: findFunction}, Arguments: []ast.Node{n.Left, &ast.IntegerNode{Value: len(b.expression.patterns)}}})
			b.expression.patterns = append(b.expression.patterns, pattern)
			b.expression.instructions += instructions
		}
	}
}

// matches reports whether everything that the rule asks for holds.
func (r *rule) matches(f *Facts, env *environment) bool {
	for _, w := range r.words {
		text := bounded(w.of(f))
		if !w.any.Match(text) {
			return false
		}
	}
	// A receiver's own code is in the place of the status, which a rule may ask for as a code all
	// the same.
	if len(r.code) > 0 && !r.code.Match(env.Code) && (env.Status == 0 || !r.code.Match(strconv.Itoa(env.Status))) {
		return false
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
	out, err := machine.Run(r.when.Program, *env)
	yes, ok := out.(bool)
	return err == nil && ok && yes // what a stranger's context makes of it is no reason to stop
}

func bounded(text string) string { return text[:min(len(text), maxMatchBytes)] }

// tooSlow is what an error comes to over which the rules took too long: which of them would have been the one, nobody knows.
var tooSlow = &policy.Rule{Name: policy.RuleTooSlow, Plan: policy.Plan{Strategy: Manual}}

// Classify returns an error's class, the name of the rule that chose what happens next, and that rule where it is one of
// the policy's: those are asked first, in order, and then the built-in table. The first rule that matches is the one; where
// it names no class, the class comes from those that follow. Where the rules take longer than their budget, it is a person's.
func (p *Planner) Classify(f Facts) (class riverdlq.Class, name string, first *policy.Rule) {
	if len(p.rules) > 0 {
		start := time.Now()
		env := p.environment(&f)
		for i := range p.rules {
			r := &p.rules[i]
			if first != nil && r.Class == "" {
				continue
			}
			if (r.message != nil || r.when != nil) && time.Since(start) >= p.budget {
				return riverdlq.ClassUnknown, tooSlow.Name, tooSlow
			}
			if !r.matches(&f, env) {
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

// environment is what the expressions of the rules read of an error, of which they see no text longer than patterns do.
func (p *Planner) environment(f *Facts) *environment {
	env := &environment{
		Type: bounded(f.Type), Code: bounded(f.Code), Message: bounded(f.Message), Status: f.status(),
		Kind: bounded(f.Kind), Queue: bounded(f.Queue), Source: bounded(f.Source),
		Context: document(nil), Payload: document(nil), Headers: map[string]any{},
	}
	if !slices.ContainsFunc(p.rules, func(r rule) bool { return r.when != nil }) {
		return env
	}
	env.Context = document(f.Context)
	if p.ReadsMessages() {
		env.Payload = document(f.Payload)
		for name, value := range f.Headers {
			env.Headers[strings.ToLower(name)] = bounded(value)
		}
	}
	return env
}

// ReadsMessages reports whether a rule reads payloads or headers.
func (p *Planner) ReadsMessages() bool {
	return slices.ContainsFunc(p.rules, func(r rule) bool { return r.when != nil && r.when.readsTheMessage })
}

// document is a stranger's JSON as expressions see it: texts cut, and integers as such. What is too large, or no JSON, is an
// empty object.
func document(raw json.RawMessage) any {
	var value any
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber() // an integer beyond 2^53 would be another one
	if len(raw) > maxContextBytes || decoder.Decode(&value) != nil || value == nil {
		return map[string]any{}
	}
	return cut(value)
}

func cut(value any) any {
	switch v := value.(type) {
	case string:
		return bounded(v)
	case json.Number:
		if n, err := strconv.Atoi(v.String()); err == nil {
			return n
		}
		if !strings.ContainsAny(v.String(), ".eE") {
			return bounded(v.String()) // an integer that no int holds is the text of its digits
		}
		n, _ := v.Float64() // what is too large is infinite
		return n
	case []any:
		for i := range v {
			v[i] = cut(v[i])
		}
	case map[string]any:
		for key := range v {
			v[key] = cut(v[key])
		}
	}
	return value
}

// Ends reports whether a job that failed so is not to be run again: its class says that it would fail again, or the rule
// that a person is to look before.
func (*Planner) Ends(class riverdlq.Class, rule *policy.Rule) bool {
	return class.Permanent() || rule != nil && rule.Plan.Strategy == Manual
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
