package registry

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const money = `syntax = "proto3"; package shop; message Money { string currency = 1; sint64 cents = 2; }`

// orderProto has a type of another file, one of google.protobuf, an enum, a map, an optional field and options.
const orderProto = `
syntax = "proto3"; // { a comment
package shop.orders;
import "shop/money.proto";
import "google/protobuf/timestamp.proto";
import "confluent/meta.proto";
option java_package = "com.shop";
enum State { option allow_alias = true; NEW = 0; PAID = 1; DONE = 1; }
message Order {
  option (confluent.message_meta).doc = "an order {";
  uint64 id = 1;
  Money price = 2 [(confluent.field_meta) = { doc: "price" }];
  State state = 3;
  map<string, int32> tags = 4;
  optional bool gift = 5;
  google.protobuf.Timestamp at = 6;
  repeated int32 counts = 7 [packed = true];
  oneof how { string card = 8; bytes token = 9; }
  message Line { Line next = 1; }
  Line first = 10;
}`

// The parts of orderBytes are written by hand (https://protobuf.dev/programming-guides/encoding/).
const (
	orderBytes = "\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01" + // id: the greatest uint64
		"\x12\x08\x0a\x03EUR\x10\xc7\x01" + // price: EUR, -100 in zigzag
		"\x18\x01" + // state: PAID
		"\x22\x05\x0a\x01a\x10\x07" + // tags: a, 7
		"\x28\x00" + // gift: false
		"\x32\x02\x08\x3c" + // at: 60 seconds
		"\x3a\x03\x01\x96\x01" + // counts: 1, 150
		"\x4a\x02\x00\xff" + // token
		"\x52\x02\x0a\x00" // first, with an empty next
	orderJSON = `{"id":"18446744073709551615","price":{"currency":"EUR","cents":"-100"},"state":"PAID","tags":{"a":7},` +
		`"gift":false,"at":"1970-01-01T00:01:00Z","counts":[1,150],"token":"AP8=","first":{"next":{}}}`
)

// events has the types of the example in Confluent's description of the wire format: Other.Nested is at 1, 0.
const events = `syntax = "proto3"; message First { string s = 1; } message Other { message Nested { int32 n = 1; } }`

func file(tb testing.TB, texts ...string) *protobufSchema {
	tb.Helper()
	var all []schemaText
	for _, text := range texts {
		all = append(all, schemaText{name: "shop/money.proto", text: text})
	}
	s, err := newProtobuf(all)
	require.NoError(tb, err)
	return s
}

func TestProtobuf_FindsTheTypeOfAValue(t *testing.T) {
	t.Parallel()
	s := file(t, events)
	for raw, want := range map[string]string{
		"00" + "0a0161":        `{"s":"a"}`,    // the short form of 0
		"0200" + "0a0161":      `{"s":"a"}`,    // one index, 0
		"040200" + "089601":    `{"n":150}`,    // two indexes, 1 and 0
		"0202":                 `{}`,           // Other
		"":                     "names no",     // no indexes
		"0204":                 "names no",     // 2
		"04":                   "names no",     // two indexes, none of which follows
		"0201":                 "names no",     // -1
		"01":                   "names no",     // -1 indexes
		"fefeffff0f":           "names no",     // too many
		"00" + "ff":            "is not a Fir", // not a message
		"00" + "0a02" + "ff61": "is not a Fir", // a text that is not UTF-8
	} {
		body, err := hex.DecodeString(raw)
		require.NoError(t, err)
		document, err := s.decode(body)
		if strings.HasPrefix(want, "{") {
			require.NoError(t, err, raw)
			require.Equal(t, want, string(document), raw)
		} else {
			require.ErrorContains(t, err, want, raw)
		}
	}
}

func TestProtobuf_EncodesWhatItDecodes(t *testing.T) {
	t.Parallel()
	s := file(t, money, orderProto)
	body := []byte("\x00" + orderBytes)
	document, err := s.decode(body)
	require.NoError(t, err)
	require.Equal(t, orderJSON, string(document)) //nolint:testifylint // JSONEq would compare numbers as floats
	encoded, err := s.encode(body, document)
	require.NoError(t, err)
	again, err := s.decode(encoded)
	require.NoError(t, err)
	require.Equal(t, orderJSON, string(again)) //nolint:testifylint // as above
	require.Len(t, encoded, len(body))

	edited := strings.Replace(orderJSON, "18446744073709551615", "9007199254740993", 1)
	encoded, err = s.encode(body, json.RawMessage(edited))
	require.NoError(t, err)
	require.Equal(t, "\x00\x08\x81\x80\x80\x80\x80\x80\x80\x10", string(encoded[:10]))
	for document, says := range map[string]string{
		`{"id": "x"}`: "is not a shop.orders.Order", `{"unknown": 1}`: `unknown field "unknown"`, `[]`: "unexpected token",
	} {
		_, err = s.encode(body, json.RawMessage(document))
		require.ErrorContains(t, err, says)
	}
	// A field that the type does not have would be lost.
	_, err = s.encode(append(body, "\xa2\x06\x01x"...), json.RawMessage(`{}`))
	require.ErrorContains(t, err, "which an edit would lose")
}

func TestProtobuf_LimitsHostileSchemasAndValues(t *testing.T) {
	t.Parallel()
	const head = `syntax = "proto3"; `
	for schema, says := range map[string]string{
		"message A {":                        "syntax error",
		head + `import "other.proto";`:       "other.proto",
		head + `import "dlqd/schema.proto";`: "dlqd/schema.proto",
		head + `message A { B b = 1; }`:      "not found",
		head + strings.Repeat("message A {", 40) + strings.Repeat("}", 40):          "depth must be less than 32",
		head + strings.Repeat("}", 1000) + strings.Repeat("message A {", 200):       "deeper than 100",
		head + `option (x) = ` + strings.Repeat("{ a < ", 200):                      "deeper than 100",
		head + "message A { string " + strings.Repeat("x", 300) + " = 1; }":         "longer than 200",
		head + `package google; message protobuf { message Any { string a = 1; } }`: "is a package",
		head + `message A { string a = 1; string b = 1; }`:                          "",
		head + "/* { " + "message A {":                                              "",
		head + `message A { string a = 1 [default = "\`:                             "",
	} {
		_, err := newProtobuf([]schemaText{{text: schema}})
		require.ErrorContains(t, err, says, schema[:min(len(schema), 80)])
	}
	_, err := newProtobuf([]schemaText{{name: "a.proto", text: head + `import "a.proto"; message A {}`}, {text: head}})
	require.Error(t, err, "a file that imports itself")
	_, err = newProtobuf([]schemaText{
		{name: "a.proto", text: head + `import "b.proto"; message A {}`},
		{name: "b.proto", text: head + `import "a.proto"; message B {}`},
		{text: head + `import "a.proto";`},
	})
	require.Error(t, err, "files that import each other")

	names := head + "enum E { " + strings.Repeat("x", 190) + " = 0; } message A { repeated E e = 1; A a = 2; " +
		"repeated A as = 3; } "
	s := file(t, names)
	many := make([]byte, 1000_000)
	for raw, says := range map[string]string{
		"\x0a\xc0\x84\x3d" + string(many):        "too large",
		strings.Repeat("\x12\x80\x08", 200):      "is not a A",
		string(make([]byte, maxProtobufBytes+1)): "more than 1048576 bytes",
	} {
		_, err := s.decode([]byte("\x00" + raw))
		require.ErrorContains(t, err, says)
	}
	deep := []byte{}
	for range 200 {
		deep = append(append([]byte{0x12}, fmt.Appendf(nil, "%c", 0)...), deep...)
		deep = append([]byte{0x12, byte(len(deep)%128 | 0x80), byte(len(deep) / 128)}, deep...)
	}
	_, err = s.decode(append([]byte{0}, deep...))
	require.ErrorContains(t, err, "is not a A")

	anything := file(t, head+`import "google/protobuf/any.proto"; message A { google.protobuf.Any a = 1; }`)
	_, err = anything.decode([]byte("\x00\x0a\x05\x0a\x03a/b"))
	require.ErrorContains(t, err, "an Any is not decoded")
}

func FuzzProtobuf(f *testing.F) {
	f.Add(events, []byte("\x04\x02\x00\x08\x96\x01"))
	f.Add(orderProto, []byte("\x00"+orderBytes))
	f.Add(strings.ReplaceAll(orderProto, `import "shop/money.proto";`, money[len(`syntax = "proto3"; package shop;`):]),
		[]byte("\x00"+orderBytes))
	f.Fuzz(func(t *testing.T, schema string, body []byte) {
		s, err := newProtobuf([]schemaText{{text: schema}})
		if err != nil {
			return
		}
		document, err := s.decode(body)
		if err != nil {
			return
		}
		require.True(t, json.Valid(document))
		encoded, err := s.encode(body, document)
		if err != nil { // a field that the type does not have
			return
		}
		again, err := s.decode(encoded)
		require.NoError(t, err)
		require.JSONEq(t, string(document), string(again))
	})
}

// The time to link imports and to compare the names of fields grows with the square of their number.
func TestProtobuf_LimitsTheTimeOfASchema(t *testing.T) {
	t.Parallel()
	var imports strings.Builder
	for i := range maxImports + 1 {
		fmt.Fprintf(&imports, `import "a%d";`, i)
	}
	for says, text := range map[string]string{
		"imports": imports.String(),
		"bytes":   `message A { int32 a = 1; }` + strings.Repeat(" ", maxProtoBytes),
	} {
		_, err := newProtobuf([]schemaText{{text: `syntax = "proto3"; ` + text}})
		require.ErrorContains(t, err, says)
	}
}
