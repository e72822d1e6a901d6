package policy

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/invopop/jsonschema"
	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/strategy/strategies"
)

// JSONSchemaExtend adds the names of the classes, so that editors complete them.
func (ByClass[T]) JSONSchemaExtend(schema *jsonschema.Schema) {
	schema.PropertyNames = &jsonschema.Schema{}
	for _, class := range classNames() {
		schema.PropertyNames.Enum = append(schema.PropertyNames.Enum, class)
	}
}

// JSONSchemaExtend adds the names of the strategies that have defaults.
func (Strategies) JSONSchemaExtend(schema *jsonschema.Schema) {
	schema.Properties = jsonschema.NewProperties()
	for _, s := range strategies.All() {
		if s.Defaults != "" {
			plan := *schema.AdditionalProperties
			plan.Description = s.Defaults
			schema.Properties.Set(s.Name, &plan)
		}
	}
	schema.AdditionalProperties = jsonschema.FalseSchema
}

// JSONSchemaExtend adds the names of the strategies.
func (Plan) JSONSchemaExtend(schema *jsonschema.Schema) {
	strategy, _ := schema.Properties.Get("strategy")
	for _, name := range strategies.Names() {
		strategy.Enum = append(strategy.Enum, name)
	}
}

// schemaOf returns the JSON Schema of a file, made from the types in this package.
func schemaOf(name string) ([]byte, error) {
	reflector := &jsonschema.Reflector{
		Anonymous: true, DoNotReference: true, RequiredFromJSONSchemaTags: true,
		Mapper: func(t reflect.Type) *jsonschema.Schema {
			switch t {
			case reflect.TypeFor[time.Duration]():
				return &jsonschema.Schema{Type: "string", Pattern: durationPattern, Format: durationFormat}
			case reflect.TypeFor[Words]():
				return &jsonschema.Schema{Extras: map[string]any{"type": []string{"string", "integer", "array"}}}
			}
			return nil
		},
	}
	schema := reflector.Reflect((&Policy{}).section(name))
	schema.Title = name
	schema.Properties.Set("$schema", &jsonschema.Schema{Type: "string"})
	raw, err := json.MarshalIndent(schema, "", "  ")
	return append(raw, '\n'), err
}

// The committed schemas, which editors and dlqd use, equal the schemas of the types. With DLQD_SCHEMAS=write the test
// writes them.
func TestSchema_MatchesTypes(t *testing.T) {
	t.Parallel()
	for _, name := range Files() {
		raw, err := schemaOf(name)
		require.NoError(t, err)
		require.True(t, json.Valid(raw))
		path := "../../config/schemas/" + name + ".schema.json"
		if os.Getenv("DLQD_SCHEMAS") == "write" {
			require.NoError(t, os.WriteFile(path, raw, 0o644))
		}
		committed, err := os.ReadFile(path)
		require.NoError(t, err)
		require.Equal(t, string(committed), string(raw), `run "make generate"`)
		if name == "dlq-routing" {
			require.Equal(t, 4, strings.Count(string(raw), `"propertyNames"`),
				"classes of all queues, of a queue, of a kind and of switches have names that editors complete")
		}
		if os.Getenv("DLQD_SCHEMAS") != "write" { // dlqd has the files from the time of its build
			embedded, err := Schema(name)
			require.NoError(t, err)
			require.Equal(t, string(committed), string(embedded))
		}
	}
}
