package policy

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"sync"

	validator "github.com/santhosh-tekuri/jsonschema/v6"
	"github.com/santhosh-tekuri/jsonschema/v6/kind"
	"golang.org/x/text/language"
	"golang.org/x/text/message"

	"github.com/dlqd/dlqd/config/schemas"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy/strategies"
)

// durationPattern is the regular expression of a duration in a file.
const durationPattern = `^(\d+d(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))*|(\d+(\.\d+)?(ns|us|µs|ms|s|m|h))+)$`

// durationFormat is the JSON Schema format of durations. It rejects durations that overflow a time.Duration, which a
// regular expression cannot do.
const durationFormat = "dlqd-duration"

// ByClass maps classes of errors to values.
type ByClass[T any] map[string]T

func classNames() []string {
	names := make([]string, 0, len(riverdlq.Classes()))
	for _, class := range riverdlq.Classes() {
		names = append(names, string(class))
	}
	return names
}

// Schema returns the JSON Schema of a file, for editors and for validate. "make generate" generates the schema from the
// types in this package, so dlqd does not contain the library that generates schemas. Schema adds the strategies of
// extensions.
func Schema(name string) ([]byte, error) {
	raw, err := schemas.Files.ReadFile(name + ".schema.json")
	if err != nil || len(strategies.Added()) == 0 {
		return raw, err
	}
	schema, err := validator.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	addStrategies(schema)
	return json.MarshalIndent(schema, "", "  ")
}

// addStrategies adds the strategies of extensions wherever a schema lists the built-in strategies.
func addStrategies(schema any) {
	node, _ := schema.(map[string]any)
	for _, inner := range node {
		addStrategies(inner)
	}
	names, _ := node["enum"].([]any)
	plan, _ := node[strategies.Conditional].(map[string]any)
	for _, s := range strategies.Added() {
		if slices.Contains(names, any(strategies.Conditional)) {
			names = append(names, s.Name)
			node["enum"] = names
		}
		if plan != nil && s.Defaults != "" {
			node[s.Name] = maps.Clone(plan)
			node[s.Name].(map[string]any)["description"] = s.Defaults //nolint:forcetypeassert // as above
		}
	}
}

type problem struct{ path, text string }

var compiled sync.Map // of file name to *validator.Schema

// validate checks the content of one file, which may be an overlay, against its schema.
func validate(name string, content map[string]any) []problem {
	schema, err := compile(name)
	if err != nil {
		panic(err) // a test compiles every schema
	}
	// The validator accepts only the types that a JSON decoder returns.
	raw, err := json.Marshal(content)
	if err != nil {
		return []problem{{"", "cannot be converted to JSON: " + err.Error()}}
	}
	instance, err := validator.UnmarshalJSON(strings.NewReader(string(raw)))
	if err != nil {
		return []problem{{"", err.Error()}}
	}
	err = schema.Validate(instance)
	if err == nil {
		return nil
	}
	var problems []problem
	collect(name, content, err.(*validator.ValidationError), &problems) //nolint:errorlint,forcetypeassert // what Validate returns
	slices.SortFunc(problems, func(a, b problem) int {
		return cmp.Or(strings.Compare(a.path, b.path), strings.Compare(a.text, b.text))
	})
	return slices.Compact(problems)
}

func compile(name string) (*validator.Schema, error) {
	if s, ok := compiled.Load(name); ok {
		return s.(*validator.Schema), nil //nolint:forcetypeassert // only schemas are stored
	}
	compiler, err := newCompiler(name)
	if err != nil {
		return nil, err
	}
	schema, err := compiler.Compile(name)
	if err == nil {
		compiled.Store(name, schema)
	}
	return schema, err
}

func newCompiler(name string) (*validator.Compiler, error) {
	raw, err := Schema(name)
	if err != nil {
		return nil, err
	}
	document, err := validator.UnmarshalJSON(strings.NewReader(string(raw)))
	if err != nil {
		return nil, err
	}
	compiler := validator.NewCompiler()
	compiler.AssertFormat()
	compiler.RegisterFormat(&validator.Format{Name: durationFormat, Validate: func(v any) error {
		text, ok := v.(string)
		if !ok || !regexp.MustCompile(durationPattern).MatchString(text) {
			return nil // type and pattern report the error
		}
		_, err := ParseDuration(text)
		return err
	}})
	return compiler, compiler.AddResource(name, document)
}

// collect converts the validator's errors into problems, which name the allowed values.
func collect(name string, content map[string]any, err *validator.ValidationError, into *[]problem) {
	names, isNames := err.ErrorKind.(*kind.PropertyNames)
	if len(err.Causes) > 0 && !isNames {
		for _, cause := range err.Causes {
			collect(name, content, cause, into)
		}
		return
	}
	path := ""
	for _, part := range err.InstanceLocation {
		switch {
		case strings.Trim(part, "0123456789") == "" && part != "":
			path += "[" + part + "]"
		case path == "":
			path = part
		default:
			path += "." + part
		}
	}
	add := func(format string, args ...any) {
		*into = append(*into, problem{path, fmt.Sprintf(format, args...)})
	}
	if isNames { // the location in err is where the validator was last, not the location of the name
		for _, path = range classPaths(content, names.Property) {
			add("unknown class (known: %s)", strings.Join(classNames(), ", "))
		}
		return
	}
	switch k := err.ErrorKind.(type) {
	case *kind.AdditionalProperties:
		base := path
		for _, property := range k.Properties {
			path = strings.TrimPrefix(base+"."+property, ".")
			add("unknown field (known: %s)", strings.Join(properties(name, err.SchemaURL), ", "))
		}
	case *kind.Enum:
		want := make([]string, len(k.Want))
		for i, w := range k.Want {
			want[i] = fmt.Sprint(w)
		}
		add("is %v; must be one of %s", k.Got, strings.Join(want, ", "))
	case *kind.Minimum:
		got, _ := k.Got.Float64()
		want, _ := k.Want.Float64()
		add("is %v; must be at least %v", got, want)
	case *kind.Maximum:
		got, _ := k.Got.Float64()
		want, _ := k.Want.Float64()
		add("is %v; must be at most %v", got, want)
	case *kind.Type:
		add("is of type %s; must be %s", k.Got, strings.Join(k.Want, " or "))
	case *kind.MinLength:
		add("has %d characters; must have at least %d", k.Got, k.Want)
	case *kind.MaxLength:
		add("has %d characters; must have at most %d", k.Got, k.Want)
	case *kind.Format:
		add("%q is too long; a duration has at most 100000d", k.Got)
	case *kind.Pattern:
		if k.Want == durationPattern {
			add("%q is not a duration, such as 30s, 5m, 2h or 30d", k.Got)
		} else { // ConsoleLook.Color, the only other pattern
			add("%q is not a colour, such as \"#b91c1c\" (in quotes: # begins a comment)", k.Got)
		}
	case *kind.Required:
		add("%s is required", strings.Join(k.Missing, " and "))
	default:
		add("%s", k.LocalizedString(message.NewPrinter(language.English)))
	}
}

// classPaths returns the paths at which content names a class.
func classPaths(content map[string]any, class string) []string {
	var paths []string
	for key, value := range content {
		inner, ok := value.(map[string]any)
		if _, has := inner[class]; has && key == "classes" {
			paths = append(paths, key+"."+class)
		}
		if ok {
			for _, path := range classPaths(inner, class) {
				paths = append(paths, key+"."+path)
			}
		}
	}
	return paths
}

// properties returns the names of the fields that the schema at url allows.
func properties(name, url string) []string {
	compiler, err := newCompiler(name)
	if err != nil {
		return nil
	}
	schema, err := compiler.Compile(url)
	if err != nil {
		return nil
	}
	return slices.DeleteFunc(slices.Sorted(maps.Keys(schema.Properties)), func(p string) bool { return p == "$schema" })
}
