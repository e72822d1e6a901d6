package registry

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"math"
	"math/big"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/twmb/avro"

	"github.com/dlqd/dlqd/internal/message"
)

func parsed(tb testing.TB, texts ...string) *avroType {
	tb.Helper()
	var all []schemaText
	for _, text := range texts {
		all = append(all, schemaText{text: text})
	}
	t, err := newAvro(all)
	require.NoError(tb, err)
	return t
}

// The bytes are the examples of the specification
// (https://avro.apache.org/docs/1.12.0/specification/#binary-encoding), and the two's complements of its section on
// decimals.
func TestAvro_ExamplesOfTheSpecification(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ schema, raw, document string }{
		{`"string"`, "06666f6f", `"foo"`},
		{
			`{"type":"record","name":"test","fields":[{"name":"a","type":"long"},{"name":"b","type":"string"}]}`,
			"3606666f6f", `{"a":27,"b":"foo"}`,
		},
		{`{"type":"array","items":"long"}`, "04063600", `[3,27]`},
		{`{"type":"enum","name":"Foo","symbols":["A","B","C","D"]}`, "06", `"D"`},
		{`["null","string"]`, "00", `null`},
		{`["null","string"]`, "020261", `"a"`},
		{`"long"`, "01", `-1`},
		{`"long"`, "7f", `-64`},
		{`"long"`, "8001", `64`},
		{`"long"`, "feffffffffffffffff01", `9223372036854775807`},
		{`"long"`, "ffffffffffffffffff01", `-9223372036854775808`},
		{`"null"`, "", `null`},
		{`"boolean"`, "01", `true`},
		{`"boolean"`, "00", `false`},
		{`"bytes"`, "0400ff", `"AP8="`},
		{`{"type":"fixed","name":"f","size":2}`, "00ff", `"AP8="`},
		{`"float"`, "cdcccc3d", `0.1`},
		{`"double"`, "9a9999999999b93f", `0.1`},
		{`"double"`, "000000000000f87f", `"NaN"`},
		{`"double"`, "000000000000f0ff", `"-Infinity"`},
		{`["int","string",{"type":"record","name":"a.b","fields":[]}]`, "04", `{"a.b":{}}`},
		{`["int","string"]`, "0001", `{"int":-1}`},
		{`{"type":"map","values":"int"}`, "0202610200", `{"a":1}`},
		{`{"type":"bytes","logicalType":"decimal","precision":4,"scale":2}`, "0404d2", `12.34`},
		{`{"type":"bytes","logicalType":"decimal","precision":4,"scale":2}`, "04fb2e", `-12.34`},
		{`{"type":"bytes","logicalType":"decimal","precision":4,"scale":2}`, "0200", `0.00`},
		{`{"type":"bytes","logicalType":"decimal","precision":3}`, "0280", `-128`},
		{`{"type":"bytes","logicalType":"decimal","precision":3}`, "040080", `128`},
		{`{"type":"fixed","name":"d","size":4,"logicalType":"decimal","precision":9,"scale":3}`, "ffffffff", `-0.001`},
		{`{"type":"int","logicalType":"date"}`, "02", `1`},
	} {
		of := parsed(t, c.schema)
		raw, err := hex.DecodeString(c.raw)
		require.NoError(t, err)
		document, err := of.decode(raw)
		require.NoError(t, err, c.schema)
		require.Equal(t, c.document, string(document), c.schema)
		encoded, err := of.encode(nil, document)
		require.NoError(t, err, c.schema)
		require.Equal(t, c.raw, hex.EncodeToString(encoded), c.schema)
	}
	// A block of an array may have its length in bytes; then its count is negative.
	document, err := parsed(t, `{"type":"array","items":"long"}`).decode([]byte{3, 4, 6, 0x36, 2, 2, 0})
	require.NoError(t, err)
	require.Equal(t, `[3,27,1]`, string(document))
}

// order has every type, a name in a namespace, and a type that contains itself.
const order = `{"type":"record","name":"Order","namespace":"shop","fields":[
	{"name":"id","type":"long"},
	{"name":"small","type":"int"},
	{"name":"ok","type":"boolean"},
	{"name":"ratio","type":"float"},
	{"name":"weight","type":"double"},
	{"name":"note","type":["null","string"],"default":null},
	{"name":"raw","type":"bytes"},
	{"name":"hash","type":{"type":"fixed","name":"Hash","size":3}},
	{"name":"state","type":{"type":"enum","name":"State","symbols":["NEW","PAID"]}},
	{"name":"earlier","type":{"type":"array","items":"State"}},
	{"name":"tags","type":{"type":"map","values":"string"}},
	{"name":"amount","type":{"type":"bytes","logicalType":"decimal","precision":30,"scale":2}},
	{"name":"either","type":["int","string","shop.State"]},
	{"name":"at","type":{"type":"long","logicalType":"timestamp-millis"}},
	{"name":"parent","type":["Order","null"]}]}`

// github.com/twmb/avro is another implementation.
func TestAvro_AgreesWithAnotherImplementation(t *testing.T) {
	t.Parallel()
	other := avro.MustParse(order)
	amount, _ := new(big.Rat).SetString("-1234567890123456789012345678.90")
	value := map[string]any{
		"id": int64(math.MaxInt64), "small": int32(math.MinInt32), "ok": true, "ratio": float32(1.1), "weight": 1e-7,
		"note": "a <b> \u0000\U0001F600", "raw": []byte{0, 255}, "hash": [3]byte{1, 2, 3}, "state": "PAID",
		"earlier": []string{"NEW", "PAID"}, "tags": map[string]string{"k": "v"}, "amount": amount,
		"either": map[string]any{"shop.State": "NEW"}, "at": int64(1_700_000_000_123), "parent": nil,
	}
	raw, err := other.Encode(value)
	require.NoError(t, err)
	of := parsed(t, order)
	document, err := of.decode(raw)
	require.NoError(t, err)
	require.Equal(t, `{"id":9223372036854775807,"small":-2147483648,"ok":true,"ratio":1.1,"weight":1e-07,`+
		`"note":"a \u003cb\u003e \u0000😀","raw":"AP8=","hash":"AQID","state":"PAID","earlier":["NEW","PAID"],`+
		`"tags":{"k":"v"},"amount":-1234567890123456789012345678.90,"either":{"shop.State":"NEW"},"at":1700000000123,`+
		`"parent":null}`, string(document))
	encoded, err := of.encode(raw, document)
	require.NoError(t, err)
	require.Equal(t, raw, encoded)
}

func TestAvro_ResolvesReferences(t *testing.T) {
	t.Parallel()
	of := parsed(t, `{"type":"record","name":"a.Money","fields":[{"name":"cents","type":"long"}]}`,
		`{"type":"record","name":"a.Order","fields":[{"name":"price","type":"Money"},{"name":"tax","type":"a.Money"}]}`)
	document, err := of.decode([]byte{2, 4})
	require.NoError(t, err)
	require.JSONEq(t, `{"price":{"cents":1},"tax":{"cents":2}}`, string(document))
}

func TestAvro_RefusesEditsThatDoNotFit(t *testing.T) {
	t.Parallel()
	decimal := `{"type":"bytes","logicalType":"decimal","precision":4,"scale":2}`
	for _, c := range []struct{ schema, document, says string }{
		{`"long"`, `9223372036854775808`, "payload is not a value of type long"},
		{`"long"`, `1.0`, "type long"},
		{`"long"`, `"1"`, "type long"},
		{`"int"`, `2147483648`, "type int"},
		{`"double"`, `1e999`, "type double"},
		{`"double"`, `"x"`, "type double"},
		{`"string"`, `1`, "type string"},
		{`"bytes"`, `"?"`, "type bytes"},
		{`"null"`, `1`, "type null"},
		{`{"type":"fixed","name":"f","size":2}`, `"AP8A"`, "type f"},
		{`{"type":"enum","name":"e","symbols":["A"]}`, `"B"`, "type e"},
		{decimal, `123.45`, "of at most 4 digits, 2 of them after the point"},
		{decimal, `1.234`, "2 of them"},
		{decimal, `1e1`, "without exponent"},
		{decimal, `"1"`, "must be a number"},
		{`{"type":"fixed","name":"d","size":1,"logicalType":"decimal","precision":9}`, `128`, "must be a number"},
		{`["null","string"]`, `1`, "payload is not a value of type string"},
		{`["string","int"]`, `"a"`, "name of one type"},
		{`["string","int"]`, `null`, "name of one type"},
		{`["string","int"]`, `{"long":1}`, "name of one type"},
		{`["string","int"]`, `{"int":1,"string":"a"}`, "one type"},
		{`{"type":"record","name":"r","fields":[{"name":"a","type":"int"}]}`, `{}`, "payload.a is missing"},
		{`{"type":"record","name":"r","fields":[{"name":"a","type":"int"}]}`, `{"a":1,"b":2}`, "a field that the type r"},
		{
			`{"type":"record","name":"r","fields":[{"name":"a","type":{"type":"array","items":"int"}}]}`, `{"a":[1,"secret"]}`,
			"payload.a[1] is not a value of type int",
		},
		{`{"type":"map","values":"int"}`, `{"secret":"x"}`, "payload[…] is not"},
	} {
		_, err := parsed(t, c.schema).encode(nil, json.RawMessage(c.document))
		require.ErrorContains(t, err, c.says, c.schema+" "+c.document)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestAvro_LimitsHostileSchemasAndValues(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ schema, raw, says string }{
		// each level has the next one twice, and no level has a byte
		{nested(60), "", "too large"},
		{`{"type":"record","name":"A","fields":[{"name":"a","type":"A"}]}`, "", "deeper than 100"},
		{
			`{"type":"record","name":"A","fields":[{"name":"a","type":["A","null"]}]}`, strings.Repeat("00", 500),
			"deeper than",
		},
		{`{"type":"array","items":"null"}`, "feffffffffffffffff01", "too large"},
		{`{"type":"array","items":"null"}`, "ffffffffffffffffff01" + "00", "too large"}, // the count is the least long
		{`{"type":"array","items":{"type":"record","name":"E","fields":[]}}`, "feffffffffffffffff01", "too large"},
		{`"bytes"`, "feffffffffffffffff01", "ends early"},
		{`"string"`, "03", "ends early"},
		{`"string"`, "", "ends early"},
		{`"string"`, "02ff", "not UTF-8"},
		{`{"type":"map","values":"int"}`, "0202ff0000", "not UTF-8"},
		{`"int"`, "808080808001", "more than 32 bits"},
		{`"boolean"`, "02", "neither 0 nor 1"},
		{`"long"`, "ffffffffffffffffffff01", "ends early"},
		{`"long"`, "0000", "more bytes"},
		{`["null"]`, "02", "no such branch"},
		{`["null"]`, "01", "no such branch"},
		{`{"type":"enum","name":"e","symbols":["A"]}`, "02", "no such symbol"},
		{`{"type":"bytes","logicalType":"decimal","precision":9}`, "8208" + strings.Repeat("7f", 513), "more than 512 bytes"},
	} {
		raw, err := hex.DecodeString(c.raw)
		require.NoError(t, err)
		_, err = parsed(t, c.schema).decode(raw)
		require.ErrorContains(t, err, c.says, c.schema)
	}
	for _, c := range []struct{ schema, says string }{
		{strings.Repeat(`{"type":"array","items":`, 200) + `"int"` + strings.Repeat("}", 200), "deeper than 100"},
		{strings.Repeat(`[`, 20_000), "exceeded max depth"},
		{`"Unknown"`, "unknown type"},
		{`{"type":"record","name":"long","fields":[]}`, "that of a primitive type"},
		{`{"type":"record","name":"A","fields":[{"name":"a"}]}`, "a type must be"},
		{`{"type":"record","name":"A"}`, "has no fields"},
		{`{"type":"fixed","name":"A","size":-1}`, "has no size"},
		{`{"type":"fixed","name":"A","size":99999999999}`, "has no size"},
		{`["null","null"]`, "twice"},
		{`[["null"]]`, "a union"},
		{`1`, "a type must be"},
		{`"int" "int"`, "more text"},
		{`{"type":"array"}`, "a type must be"},
		{`[{"type":"enum","name":"A"},{"type":"enum","name":"A"}]`, "defined twice"},
		{`{"type":"enum","name":"A","symbols":[1]}`, "not a text"},
		{`{"type":"record","name":"A","fields":[{"name":"","type":"int"}]}`, "without a name"},
	} {
		_, err := newAvro([]schemaText{{text: c.schema}})
		require.ErrorContains(t, err, c.says, c.schema[:min(len(c.schema), 80)])
	}
}

// nested returns a schema in which each record has the next one twice.
func nested(levels int) string {
	text := `"null"`
	for level := range levels {
		name := base64.RawURLEncoding.EncodeToString([]byte{byte(level), 1})
		text = `{"type":"record","name":"r` + strings.ReplaceAll(name, "-", "_") + `","fields":[{"name":"a","type":` + text +
			`},{"name":"b","type":"r` + "NEXT" + `"}]}`
		if level == 0 {
			text = strings.ReplaceAll(text, `"rNEXT"`, `"null"`)
			continue
		}
		before := base64.RawURLEncoding.EncodeToString([]byte{byte(level - 1), 1})
		text = strings.ReplaceAll(text, "rNEXT", "r"+strings.ReplaceAll(before, "-", "_"))
	}
	return text
}

// The JSON of a value is encoded to a value with the same JSON.
func FuzzAvro(f *testing.F) {
	for _, schema := range []string{
		order, `"string"`, `["null","double"]`, nested(3), `{"type":"map","values":["int","string"]}`,
	} {
		f.Add(schema, []byte{2, 4, 6, 8, 0, 0})
	}
	f.Fuzz(func(t *testing.T, schema string, raw []byte) {
		of, err := newAvro([]schemaText{{text: schema}})
		if err != nil {
			return
		}
		document, err := of.decode(raw)
		if err != nil {
			return
		}
		require.True(t, json.Valid(document))
		if message.CheckJSON(document) != nil { // such as a key twice: the database cannot hold it
			return
		}
		encoded, err := of.encode(raw, document)
		require.NoError(t, err)
		again, err := of.decode(encoded)
		require.NoError(t, err)
		require.Len(t, again, len(document))
	})
}
