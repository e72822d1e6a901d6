package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

const (
	// maxSteps limits the work and the errors of a check: n references, each to two others, are 2^n steps. A step is a
	// part of the schema, or an item of the document, that is checked.
	maxSteps = 1 << 19
	// maxObjects limits the objects and arrays of a schema: the time to compile it grows faster than their number.
	maxObjects = 20_000
	// maxNumberDigits limits a number of a schema, which the compiler writes out: those of 64 bits are shorter.
	maxNumberDigits = 400
)

// jsonSchema is a JSON Schema with the schemas that it refers to. Its values are JSON after the header.
type jsonSchema struct{ texts []schemaText }

// decode implements codec.
func (s *jsonSchema) decode(body []byte) (json.RawMessage, error) {
	if !json.Valid(body) {
		return nil, errors.New("the value is not JSON")
	}
	return bytes.TrimSpace(body), nil
}

// encode implements codec. It refuses a document that the schema does not allow.
func (s *jsonSchema) encode(_ []byte, edited json.RawMessage) ([]byte, error) {
	compiler := jsonschema.NewCompiler()
	compiler.UseLoader(s)
	schema, err := compiler.Compile(mainSchema)
	if err != nil {
		return nil, fmt.Errorf("the schema cannot be used: %s", short(err))
	}
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(edited))
	if err == nil {
		err = validate(schema, document)
	}
	if refused, ok := errors.AsType[*jsonschema.ValidationError](err); ok {
		for len(refused.Causes) > 0 {
			refused = refused.Causes[0]
		}
		return nil, fmt.Errorf("the payload does not match its schema: /%s: %s",
			pointer(refused.InstanceLocation), pointer(refused.ErrorKind.KeywordPath()))
	}
	if err != nil {
		return nil, fmt.Errorf("the payload cannot be checked by its schema: %s", short(err))
	}
	return edited, nil
}

// mainSchema is the address of the schema that no other refers to.
const mainSchema = "dlqd:///"

// Load implements [jsonschema.URLLoader]. It loads no schema that the registry did not give. An address may be that of
// a reference within the address of the schema that refers to it.
func (s *jsonSchema) Load(address string) (any, error) {
	for i, text := range s.texts {
		isMain := i == len(s.texts)-1
		if isMain && address == mainSchema || !isMain && strings.HasSuffix("/"+address, "/"+text.name) {
			document, err := jsonschema.UnmarshalJSON(strings.NewReader(text.text))
			if left := maxObjects; err == nil {
				err = checkSchema(document, &left)
			}
			return document, err
		}
	}
	return nil, errors.New("the registry has no reference to it")
}

// checkSchema returns an error if a part of a schema would take the compiler too long. left is the number of objects
// and arrays that the part may have.
func checkSchema(part any, left *int) (err error) {
	*left--
	switch part := part.(type) {
	case json.Number:
		*left++
		if len(part) > maxNumberDigits || math.Abs(exponentOf(part.String())) > maxNumberDigits {
			return errors.New("a number is too long")
		}
	case []any:
		for i := 0; i < len(part) && err == nil; i++ {
			err = checkSchema(part[i], left)
		}
	case map[string]any:
		for _, value := range part {
			if err = checkSchema(value, left); err != nil {
				break
			}
		}
	default:
		*left++
	}
	if err == nil && *left < 0 {
		err = fmt.Errorf("more than %d objects and arrays", maxObjects)
	}
	return err
}

// exponentOf returns the exponent of a number, or 0 if it has none.
func exponentOf(number string) float64 {
	at := strings.IndexAny(number, "eE")
	exponent, _ := strconv.ParseFloat(number[at+1:], 64)
	if at < 0 {
		return 0
	}
	return exponent
}

// stepsError is the error of a check that took more than maxSteps.
type stepsError struct{}

func (stepsError) Error() string { return "the check takes too long" }

// validate checks a document by a schema that no other check uses.
func validate(schema *jsonschema.Schema, document any) (err error) {
	defer func() {
		switch p := recover().(type) {
		case nil:
		case stepsError:
			err = p
		default:
			panic(p)
		}
	}()
	steps, seen := 0, map[*jsonschema.Schema]bool{schema: true}
	for waiting := []*jsonschema.Schema{schema}; len(waiting) > 0; {
		s := waiting[0]
		waiting = waiting[1:]
		if s.DynamicRef != nil || s.RecursiveRef != nil {
			return errors.New("the schema has a reference whose target is not fixed")
		}
		parts := partsOf(s)
		count(s, len(parts), &steps)
		for _, part := range parts {
			if !seen[part] {
				seen[part], waiting = true, append(waiting, part)
			}
		}
	}
	return schema.Validate(document)
}

// count makes a schema add its steps to a counter before it checks a value. The format of a value is checked before
// all parts of the schema.
func count(s *jsonschema.Schema, parts int, steps *int) {
	format := jsonschema.Format{Validate: func(any) error { return nil }}
	if s.Format != nil {
		format = *s.Format
	}
	check := format.Validate
	format.Validate = func(value any) error {
		*steps += 1 + parts
		switch value := value.(type) {
		case []any:
			*steps += len(value)
		case map[string]any:
			*steps += len(value)
		}
		if *steps > maxSteps {
			panic(stepsError{}) // the library's errors do not end a check
		}
		return check(value)
	}
	s.Format = &format
}

// partsOf returns the schemas that a schema uses.
func partsOf(s *jsonschema.Schema) []*jsonschema.Schema {
	parts := slices.Concat(s.AllOf, s.AnyOf, s.OneOf, s.PrefixItems, []*jsonschema.Schema{
		s.Ref, s.Not, s.If, s.Then, s.Else, s.PropertyNames, s.UnevaluatedProperties, s.Contains, s.Items2020,
		s.UnevaluatedItems, s.ContentSchema,
	})
	for _, part := range s.Properties {
		parts = append(parts, part)
	}
	for _, part := range s.PatternProperties {
		parts = append(parts, part)
	}
	for _, part := range s.DependentSchemas {
		parts = append(parts, part)
	}
	others := make([]any, 0, 3+len(s.Dependencies))
	others = append(others, s.AdditionalProperties, s.Items, s.AdditionalItems)
	for _, part := range s.Dependencies {
		others = append(others, part)
	}
	for _, part := range others {
		switch part := part.(type) {
		case *jsonschema.Schema:
			parts = append(parts, part)
		case []*jsonschema.Schema:
			parts = append(parts, part...)
		}
	}
	return slices.DeleteFunc(parts, func(part *jsonschema.Schema) bool { return part == nil })
}

// pointer returns the place of a part of a document.
func pointer(path []string) string { return strings.Join(path, "/") }
