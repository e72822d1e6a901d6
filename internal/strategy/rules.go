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

// Limits on rules, which operators write, and on the untrusted texts that they read. The time of a
// pattern is proportional to its instructions times the length of the text (10 ns for each unit of
// the product, measured): 80 ms at most for one pattern.
const (
	maxRules        = 500
	maxContextBytes = 64 << 10 // bytes; expressions see a larger context or payload as empty
	maxNodes        = 200      // nodes of the syntax tree of an expression
	maxMemory       = 100_000  // of an expression's run, in values
	maxPattern      = 2000     // bytes of a pattern: its instructions are known only once it is compiled
	maxInstructions = 1000     // of a compiled pattern
	maxCost         = 25_000   // instructions of all patterns of a policy
)

// DefaultBudget limits the time of all rules for one error. Classifying takes microseconds; the
// budget guards against combinations of patterns and errors that the other limits do not foresee.
const DefaultBudget = 250 * time.Millisecond

// rule is a compiled rule of the policy.
type rule struct {
	*policy.Rule

	words   []words
	code    policy.Words // alternatives for the code, or for the HTTP status
	message *regexp.Regexp
	status  []string
	when    *expression
}

// words matches one text of the facts against alternatives.
type words struct {
	text func(*Facts) string
	any  policy.Words
}

// environment is the data that an expression reads.
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
	Call    string         `expr:"-"` // the gRPC status, which rules read as a code
}

var statusPattern = regexp.MustCompile(`^[1-5]([0-9]{2}|xx)$`)

// compileRules compiles a policy's rules. Its error names every invalid one, with file and line.
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

// compilePattern compiles a pattern for untrusted texts. It rejects one that is too costly.
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

	patterns     []*regexp.Regexp // of its matches operators
	instructions int              // of patterns
	readsMessage bool             // payload or headers
}

// findFunction replaces the operator matches, so that the text can be cut first. The blank keeps
// expressions from calling it by name.
const findFunction = "find pattern"

func compileExpression(text string) (*expression, error) {
	var e expression
	b := bounds{expression: &e}
	find := func(params ...any) (any, error) {
		// A value of another type counts as empty text.
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

// matches reports whether an error meets all conditions of the rule.
func (r *rule) matches(f *Facts, env *environment) bool {
	for _, w := range r.words {
		text := bounded(w.text(f))
		if !w.any.Match(text) {
			return false
		}
	}
	// If a receiver reports its own code, that code takes the place of the status. A rule may still
	// name the status as a code.
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
	return err == nil && ok && matched // an error from an untrusted context is no match
}

func bounded(text string) string { return text[:min(len(text), maxMatchBytes)] }

// tooSlow is the rule of an error for which the rules exceeded their budget: which of them would
// have matched is unknown.
var tooSlow = &policy.Rule{Name: policy.RuleTooSlow, Plan: policy.Plan{Strategy: Manual}}

// Classify returns an error's class, the name of the rule that decides what happens next, and that
// rule if it belongs to the policy.
//
// The policy's rules are tried first, in order, then the built-in table. The first match decides.
// If that rule sets no class, the class comes from the rules and lines after it. If the rules
// exceed their budget, the result is class unknown with a rule that parks the entry.
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

// environment returns the data that rules read of an error. Texts are cut to the length that
// patterns read.
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

// document decodes untrusted JSON for expressions: texts are cut, and integers stay integers.
// Invalid JSON, and JSON above maxContextBytes, becomes an empty object.
func document(raw json.RawMessage) any {
	var value any
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber() // a float64 would change an integer beyond 2^53
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
		n, _ := v.Float64() // out of range: infinity
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

// Ends reports whether a delivery must not be retried: its class is permanent, or its rule parks
// it.
func (*Planner) Ends(class riverdlq.Class, rule *policy.Rule) bool {
	return class.Permanent() || rule != nil && rule.Plan.Strategy == Manual
}

// ruleNamed returns the policy's rule of a name, or nil.
func (p *Planner) ruleNamed(name string) *policy.Rule {
	for i := range p.rules {
		if p.rules[i].Name == name {
			return p.rules[i].Rule
		}
	}
	return nil
}
