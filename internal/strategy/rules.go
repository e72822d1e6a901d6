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
	"github.com/dlqd/dlqd/internal/riverdlq"
)

// Limits on rules, which operators write, and on the untrusted texts that rules read. The time of a pattern is
// proportional to the number of its instructions times the length of the text (measured: 10 ns for each instruction and
// byte). That is at most 80 ms for one pattern.
const (
	maxRules        = 500
	maxContextBytes = 64 << 10 // a larger context or payload is empty for expressions
	maxNodes        = 200      // nodes in the syntax tree of an expression
	maxMemory       = 100_000  // values in the memory of an expression's run
	maxPattern      = 2000     // bytes of a pattern, whose instructions are not known before it is compiled
	maxInstructions = 1000     // instructions of a compiled pattern
	maxCost         = 25_000   // instructions of all patterns of a policy
)

// DefaultBudget limits the time of all rules for one error. Rules usually take microseconds. The budget is for
// combinations of patterns and errors that the other limits do not prevent.
const DefaultBudget = 250 * time.Millisecond

// rule is a compiled rule of the policy.
type rule struct {
	*policy.Rule

	words   []words
	code    policy.Words // alternatives for the code; one of them may also be the HTTP status
	message *regexp.Regexp
	status  []string
	when    *expression
}

// words is a condition: one text of the facts matches one of the alternatives.
type words struct {
	text func(*Facts) string
	any  policy.Words
}

// environment has the data that an expression can read.
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
	Call    string         `expr:"-"` // the gRPC status, which only the condition code reads
}

var statusPattern = regexp.MustCompile(`^[1-5]([0-9]{2}|xx)$`)

// compileRules compiles a policy's rules. Its error names every invalid rule, with file and line. It refuses more than
// maxRules rules, and patterns that need more than maxCost instructions together.
func compileRules(p *policy.Policy) ([]rule, error) {
	const file = "dlq-routing"
	var problems []error
	bad := func(path, format string, args ...any) {
		problems = append(problems, fmt.Errorf("%s: %s: %w", p.Where(file, path), path, fmt.Errorf(format, args...)))
	}
	if n := len(p.Routing.Rules); n > maxRules {
		bad("rules", "has %d rules; at most %d are allowed", n, maxRules)
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
			text func(*Facts) string
		}{
			{r.Match.Type, func(f *Facts) string { return f.Type }},
			{r.Match.Kind, func(f *Facts) string { return f.Kind }},
			{r.Match.Queue, func(f *Facts) string { return f.Queue }},
			{r.Match.Source, func(f *Facts) string { return f.Source }},
		} {
			if len(w.list) > 0 {
				r.words = append(r.words, words{w.text, w.list})
			}
		}
		r.code = r.Match.Code
		for _, status := range r.Match.Status {
			if !statusPattern.MatchString(status) {
				bad(at+".status", "%q is not an HTTP status such as 503 or 5xx", status)
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
			bad(at, "matches every error; set type, code, message, status, kind, queue, source or when")
		}
	}
	if cost > maxCost {
		bad("rules", "have patterns of %d instructions in total; at most %d are allowed: avoid repetitions such as {100}",
			cost, maxCost)
	}
	return rules, errors.Join(problems...)
}

// compilePattern compiles a pattern for untrusted texts, and returns the number of its instructions. It rejects a
// pattern that is too slow.
func compilePattern(text string) (*regexp.Regexp, int, error) {
	if n := len(text); n > maxPattern {
		return nil, 0, fmt.Errorf("the pattern is too slow: it has %d bytes; at most %d are allowed", n, maxPattern)
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
		return nil, 0, fmt.Errorf("the pattern is too slow: it has %d instructions; at most %d are allowed: avoid "+
			"repetitions such as {100}", n, maxInstructions)
	}
	return pattern, len(program.Inst), nil
}

// expression is a compiled expression.
type expression struct {
	*vm.Program

	patterns     []*regexp.Regexp // the patterns of its matches operators
	instructions int              // the instructions of all patterns
	readsMessage bool             // whether the expression reads the payload or the headers
}

// findFunction is the name of the function that replaces the operator matches, so that dlqd cuts a text before a
// pattern reads it. Because the name has a blank, an expression cannot call the function directly.
const findFunction = "find pattern"

func compileExpression(text string) (*expression, error) {
	var e expression
	b := bounds{expression: &e}
	find := func(params ...any) (any, error) {
		// A value that is not a string counts as an empty text.
		text, _ := params[0].(string)
		return params[0] != nil && e.patterns[params[1].(int)].MatchString(bounded(text)), nil //nolint:forcetypeassert // bounds wrote it
	}
	program, err := expr.Compile(text, expr.Patch(&b), expr.Env(environment{}), expr.AsBool(), expr.MaxNodes(maxNodes),
		expr.DisableAllBuiltins(),
		expr.EnableBuiltin("len"), expr.EnableBuiltin("lower"), expr.EnableBuiltin("upper"), expr.EnableBuiltin("trim"),
		expr.EnableBuiltin("int"), expr.EnableBuiltin("float"), expr.EnableBuiltin("string"),
		expr.Function(findFunction, find, new(func(any, int) bool)))
	if err = cmp.Or(b.err, err); err != nil {
		return nil, err
	}
	e.Program = program
	return &e, nil
}

// bounds is an AST visitor. It rejects constructs that can make the time of an expression grow faster than its text and
// its input, and replaces the operator matches by a call that limits how much text a pattern reads.
type bounds struct {
	expression *expression
	err        error
}

// Visit implements ast.Visitor.
func (b *bounds) Visit(node *ast.Node) {
	switch n := (*node).(type) {
	case *ast.PredicateNode:
		b.err = errors.New("loops (any, all, map, filter and similar functions) are not allowed")
	case *ast.IdentifierNode:
		b.expression.readsMessage = b.expression.readsMessage || n.Value == "payload" || n.Value == "headers"
	case *ast.BinaryNode:
		switch n.Operator {
		case "..":
			b.err = errors.New("ranges (..) are not allowed")
		case "matches":
			constant, ok := n.Right.(*ast.StringNode)
			if !ok {
				b.err = errors.New("the pattern of matches must be a literal")
				return
			}
			pattern, instructions, err := compilePattern(constant.Value)
			if err != nil {
				b.err = err
				return
			}
			ast.Patch(node, &ast.CallNode{
				Callee:    &ast.IdentifierNode{Value: findFunction},
				Arguments: []ast.Node{n.Left, &ast.IntegerNode{Value: len(b.expression.patterns)}},
			})
			b.expression.patterns = append(b.expression.patterns, pattern)
			b.expression.instructions += instructions
		}
	}
}

// matches reports whether an error meets all conditions of the rule. If the expression fails, it returns false.
func (r *rule) matches(f *Facts, env *environment) bool {
	for _, w := range r.words {
		text := bounded(w.text(f))
		if !w.any.Match(text) {
			return false
		}
	}
	// If a receiver reports a code of its own, that code replaces the HTTP status as the code. The condition code may
	// still name the HTTP status.
	if len(r.code) > 0 && !r.code.Match(env.Code) && (env.Status == 0 || !r.code.Match(strconv.Itoa(env.Status))) {
		if env.Call == "" || !r.code.Match(env.Call) {
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
	out, err := machine.Run(r.when.Program, *env)
	matched, ok := out.(bool)
	return err == nil && ok && matched // an error, for example from an untrusted context, is no match
}

func bounded(text string) string { return text[:min(len(text), maxMatchBytes)] }

// tooSlow is the rule for an error for which the rules exceeded their budget. It is not known which of these rules
// would have matched.
var tooSlow = &policy.Rule{Name: policy.RuleTooSlow, Plan: policy.Plan{Strategy: Manual}}

// Classify returns the class of an error, and the name of the rule that decides what happens next. first is that rule
// if it belongs to the policy, and nil otherwise.
//
// The policy's rules are tried first, in order, and then the lines of the built-in table. The first match decides. If
// that rule sets no class, the class comes from the rules and lines after it. If the rules exceed their budget, the
// class is unknown and first is a rule that parks the entry.
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

// environment returns the data of an error that rules read. Texts are cut to the length that patterns read.
func (p *Planner) environment(f *Facts) *environment {
	env := &environment{
		Type: bounded(f.Type), Code: bounded(f.Code), Message: bounded(f.Message), Status: f.status(),
		Kind: bounded(f.Kind), Queue: bounded(f.Queue), Source: bounded(f.Source), Call: bounded(f.grpcStatus()),
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
	return slices.ContainsFunc(p.rules, func(r rule) bool { return r.when != nil && r.when.readsMessage })
}

// document decodes untrusted JSON for expressions. Texts are cut, and integers stay integers. If the JSON is invalid or
// larger than maxContextBytes, document returns an empty object.
func document(raw json.RawMessage) any {
	var value any
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber() // a float64 would round an integer beyond 2^53
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
			return bounded(v.String()) // an integer that does not fit an int stays text
		}
		n, _ := v.Float64() // infinity if it is out of range
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

// Ends reports whether a delivery must not be retried, because the class is permanent or the rule parks the entry.
func (*Planner) Ends(class riverdlq.Class, rule *policy.Rule) bool {
	return class.Permanent() || rule != nil && rule.Plan.Strategy == Manual
}

// ruleNamed returns the rule of the policy with a name, or nil.
func (p *Planner) ruleNamed(name string) *policy.Rule {
	for i := range p.rules {
		if p.rules[i].Name == name {
			return p.rules[i].Rule
		}
	}
	return nil
}
