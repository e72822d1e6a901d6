package registry

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
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
		err = schema.Validate(document)
	}
	if refused, ok := errors.AsType[*jsonschema.ValidationError](err); ok {
		for len(refused.Causes) > 0 {
			refused = refused.Causes[0]
		}
		return nil, fmt.Errorf("the payload does not match its schema: /%s: %s",
			pointer(refused.InstanceLocation), pointer(refused.ErrorKind.KeywordPath()))
	}
	if err != nil {
		return nil, fmt.Errorf("the payload does not match its schema: %s", short(err))
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
			return jsonschema.UnmarshalJSON(strings.NewReader(text.text))
		}
	}
	return nil, errors.New("the registry has no reference to it")
}

// pointer returns the place of a part of a document.
func pointer(path []string) string { return strings.Join(path, "/") }
