package registry

import (
	"bytes"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// The JSON of a value in Avro is that of the specification
// (https://avro.apache.org/docs/1.12.0/specification/#json-encoding), with these exceptions:
//
//   - Bytes and fixed are in base64: the specification's form may have NUL characters, which jsonb cannot hold.
//   - A decimal is a number.
//   - A union of null and one other type has no tag, so that the path of a field stays the same if the field becomes
//     optional. Masks name such paths.
//   - NaN and the infinities are the texts of Java's toString, as in the specification's implementations.

const (
	// maxDecimalBytes and maxScale limit decimals: the time to write out a number grows faster than its length.
	maxDecimalBytes = 512
	maxScale        = 1000
)

var (
	errShort   = errors.New("the value ends early")
	errTooDeep = fmt.Errorf("nested deeper than %d levels", maxDepth)
)

// avroType is a type of an Avro schema.
type avroType struct {
	kind     string // such as long or record
	name     string // full name of a record, enum or fixed; otherwise the kind. It is the tag in a union
	fields   []avroField
	items    *avroType // of an array or map
	branches []*avroType
	optional bool // a union of null and one other type
	symbols  []string
	size     int // of a fixed

	decimal          bool
	precision, scale int
}

type avroField struct {
	name string
	key  []byte // the name in JSON, with a colon
	of   *avroType
}

// avroPrimitives are the types that have no further parts.
var avroPrimitives = []string{"null", "boolean", "int", "long", "float", "double", "bytes", "string"}

// newAvro returns the type that the last text defines. The others define types by name.
func newAvro(texts []schemaText) (*avroType, error) {
	p := avroParser{names: map[string]*avroType{}}
	var last *avroType
	for _, text := range texts {
		decoder := json.NewDecoder(strings.NewReader(text.text))
		decoder.UseNumber()
		var raw any
		if err := decoder.Decode(&raw); err != nil {
			return nil, err
		}
		if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
			return nil, errors.New("there is more text after the schema")
		}
		var err error
		if last, err = p.parse(raw, "", 0); err != nil {
			return nil, err
		}
	}
	return last, nil
}

// avroParser parses schemas that share names.
type avroParser struct{ names map[string]*avroType }

// parse returns the type of a part of a schema, within a namespace.
func (p *avroParser) parse(raw any, namespace string, depth int) (*avroType, error) {
	if depth > maxDepth {
		return nil, errTooDeep
	}
	switch raw := raw.(type) {
	case string:
		return p.named(raw, namespace)
	case []any:
		return p.union(raw, namespace, depth)
	case map[string]any:
		return p.complex(raw, namespace, depth)
	}
	return nil, errors.New("a type must be a name, an array or an object")
}

// named returns a primitive type, or a type that was defined before.
func (p *avroParser) named(name, namespace string) (*avroType, error) {
	if slices.Contains(avroPrimitives, name) {
		return &avroType{kind: name, name: name}, nil
	}
	if namespace != "" && !strings.Contains(name, ".") {
		if t := p.names[namespace+"."+name]; t != nil {
			return t, nil
		}
	}
	if t := p.names[name]; t != nil {
		return t, nil
	}
	return nil, fmt.Errorf("unknown type %q", name)
}

func (p *avroParser) union(raw []any, namespace string, depth int) (*avroType, error) {
	t := &avroType{kind: "union", name: "union"}
	tags := map[string]bool{}
	for _, one := range raw {
		branch, err := p.parse(one, namespace, depth+1)
		if err != nil {
			return nil, err
		}
		if branch.kind == "union" || tags[branch.name] {
			return nil, fmt.Errorf("a union has %s twice, or a union", branch.name)
		}
		tags[branch.name] = true
		t.branches = append(t.branches, branch)
	}
	t.optional = len(raw) == 2 && tags["null"]
	return t, nil
}

// complex returns the type of an object.
func (p *avroParser) complex(raw map[string]any, namespace string, depth int) (*avroType, error) {
	kind, isName := raw["type"].(string)
	if !isName { // such as {"type": ["null", "string"]}
		return p.parse(raw["type"], namespace, depth+1)
	}
	var err error
	t := &avroType{kind: kind, name: kind}
	switch kind {
	case "error":
		t.kind = "record"
		fallthrough
	case "record", "enum", "fixed":
		name, _ := raw["name"].(string)
		own, _ := raw["namespace"].(string)
		if dot := strings.LastIndexByte(name, '.'); dot >= 0 {
			own, name = name[:dot], name[dot+1:]
		} else if raw["namespace"] == nil {
			own = namespace
		}
		t.name = strings.TrimPrefix(own+"."+name, ".")
		if name == "" || p.names[t.name] != nil || slices.Contains(avroPrimitives, t.name) {
			return nil, fmt.Errorf("the name %q is empty, defined twice or that of a primitive type", t.name)
		}
		p.names[t.name] = t
		err = p.define(t, raw, own, depth)
	case "array":
		t.items, err = p.parse(raw["items"], namespace, depth+1)
	case "map":
		t.items, err = p.parse(raw["values"], namespace, depth+1)
	default:
		t, err = p.named(kind, namespace)
	}
	if err != nil || raw["logicalType"] != "decimal" || kind != "bytes" && kind != "fixed" {
		return t, err
	}
	t.precision, t.scale = number(raw["precision"]), max(number(raw["scale"]), 0)
	// A logical type that is not valid counts as its type.
	t.decimal = t.precision > 0 && t.scale <= t.precision && t.scale <= maxScale && t.size <= maxDecimalBytes
	return t, nil
}

// define reads the parts of a named type.
func (p *avroParser) define(t *avroType, raw map[string]any, namespace string, depth int) error {
	switch t.kind {
	case "fixed":
		if t.size = number(raw["size"]); t.size < 0 {
			return fmt.Errorf("%s has no size", t.name)
		}
	case "enum":
		symbols, _ := raw["symbols"].([]any)
		for _, one := range symbols {
			symbol, ok := one.(string)
			if !ok {
				return fmt.Errorf("%s has a symbol that is not a text", t.name)
			}
			t.symbols = append(t.symbols, symbol)
		}
	case "record":
		fields, ok := raw["fields"].([]any)
		if !ok {
			return fmt.Errorf("%s has no fields", t.name)
		}
		names := map[string]bool{}
		for _, one := range fields {
			field, _ := one.(map[string]any)
			name, _ := field["name"].(string)
			if name == "" || names[name] {
				return fmt.Errorf("%s has a field without a name, or %q twice", t.name, name)
			}
			names[name] = true
			of, err := p.parse(field["type"], namespace, depth+1)
			if err != nil {
				return err
			}
			t.fields = append(t.fields, avroField{name, append(appendText(nil, name), ':'), of})
		}
	}
	return nil
}

// number returns a number of a schema that is not negative, or -1.
func number(raw any) int {
	text, _ := raw.(json.Number)
	n, err := strconv.Atoi(text.String())
	if err != nil || n < 0 || n > math.MaxInt32 {
		return -1
	}
	return n
}

// decode implements codec.
func (t *avroType) decode(body []byte) (json.RawMessage, error) {
	d := avroDecoder{in: body, most: maxJSON(len(body))}
	if err := d.value(t, 0); err != nil {
		return nil, err
	}
	if len(d.in) > 0 {
		return nil, errors.New("the value has more bytes than its schema describes")
	}
	return d.out, nil
}

// avroDecoder writes the JSON of a value.
type avroDecoder struct {
	in   []byte // the rest of the value
	out  []byte
	most int // limit of the length of out
}

func (d *avroDecoder) value(t *avroType, depth int) error {
	switch {
	case depth > maxDepth:
		return errTooDeep
	case len(d.out) > d.most:
		return errTooLarge
	}
	switch t.kind {
	case "record":
		return d.record(t, depth)
	case "array", "map":
		return d.blocks(t, depth)
	case "union":
		return d.union(t, depth)
	case "bytes", "string", "fixed":
		return d.bytes(t)
	}
	return d.scalar(t)
}

func (d *avroDecoder) record(t *avroType, depth int) error {
	d.out = append(d.out, '{')
	for i, field := range t.fields {
		if i > 0 {
			d.out = append(d.out, ',')
		}
		d.out = append(d.out, field.key...)
		if err := d.value(field.of, depth+1); err != nil {
			return err
		}
	}
	d.out = append(d.out, '}')
	return nil
}

// blocks reads an array or a map: blocks of a number of items, until a block of none. Each item writes some JSON, so
// the limit of the JSON limits the items, too.
func (d *avroDecoder) blocks(t *avroType, depth int) error {
	isMap := t.kind == "map"
	begin, end := byte('['), byte(']')
	if isMap {
		begin, end = '{', '}'
	}
	d.out = append(d.out, begin)
	for first := true; ; {
		count, err := d.long()
		if err == nil && count < 0 { // the length of the block in bytes follows
			_, err = d.long()
		}
		if err != nil {
			return err
		}
		if count == 0 {
			d.out = append(d.out, end)
			return nil
		}
		for ; count != 0; count -= sign(count) {
			if !first {
				d.out = append(d.out, ',')
			}
			first = false
			if isMap {
				key, err := d.take()
				if err != nil {
					return err
				}
				if !utf8.Valid(key) {
					return errNotText
				}
				d.out = append(appendText(d.out, string(key)), ':')
			}
			if err := d.value(t.items, depth+1); err != nil {
				return err
			}
		}
	}
}

func sign(n int64) int64 {
	if n < 0 {
		return -1
	}
	return 1
}

func (d *avroDecoder) union(t *avroType, depth int) error {
	index, err := d.long()
	if err != nil {
		return err
	}
	if index < 0 || index >= int64(len(t.branches)) {
		return errors.New("a union has no such branch")
	}
	branch := t.branches[index]
	if t.optional || branch.kind == "null" {
		return d.value(branch, depth+1)
	}
	d.out = append(appendText(append(d.out, '{'), branch.name), ':')
	if err := d.value(branch, depth+1); err != nil {
		return err
	}
	d.out = append(d.out, '}')
	return nil
}

var errNotText = errors.New("a text is not UTF-8")

func (d *avroDecoder) bytes(t *avroType) (err error) {
	var raw []byte
	if t.kind == "fixed" {
		raw, err = d.next(int64(t.size))
	} else {
		raw, err = d.take()
	}
	switch {
	case err != nil:
		return err
	case t.decimal && len(raw) > maxDecimalBytes:
		return fmt.Errorf("a decimal has more than %d bytes", maxDecimalBytes)
	case t.decimal:
		d.out = appendDecimal(d.out, raw, t.scale)
	case t.kind != "string":
		d.out = append(base64.StdEncoding.AppendEncode(append(d.out, '"'), raw), '"')
	case !utf8.Valid(raw):
		return errNotText
	default:
		d.out = appendText(d.out, string(raw))
	}
	return nil
}

func (d *avroDecoder) scalar(t *avroType) error {
	switch t.kind {
	case "null":
		d.out = append(d.out, "null"...)
	case "boolean":
		raw, err := d.next(1)
		if err != nil {
			return err
		}
		if raw[0] > 1 {
			return errors.New("a boolean is neither 0 nor 1")
		}
		d.out = strconv.AppendBool(d.out, raw[0] == 1)
	case "int", "long":
		n, err := d.long()
		if err != nil {
			return err
		}
		if t.kind == "int" && n != int64(int32(n)) {
			return errors.New("an int has more than 32 bits")
		}
		d.out = strconv.AppendInt(d.out, n, 10)
	case "float":
		raw, err := d.next(4)
		if err != nil {
			return err
		}
		d.out = appendFloat(d.out, float64(math.Float32frombits(binary.LittleEndian.Uint32(raw))), 32)
	case "double":
		raw, err := d.next(8)
		if err != nil {
			return err
		}
		d.out = appendFloat(d.out, math.Float64frombits(binary.LittleEndian.Uint64(raw)), 64)
	case "enum":
		index, err := d.long()
		if err != nil {
			return err
		}
		if index < 0 || index >= int64(len(t.symbols)) {
			return errors.New("an enum has no such symbol")
		}
		d.out = appendText(d.out, t.symbols[index])
	}
	return nil
}

// long reads a number in zigzag encoding with variable length.
func (d *avroDecoder) long() (int64, error) {
	n, size := binary.Varint(d.in)
	if size <= 0 {
		return 0, errShort
	}
	d.in = d.in[size:]
	return n, nil
}

// take reads bytes after their length.
func (d *avroDecoder) take() ([]byte, error) {
	size, err := d.long()
	if err != nil {
		return nil, err
	}
	return d.next(size)
}

func (d *avroDecoder) next(size int64) ([]byte, error) {
	if size < 0 || size > int64(len(d.in)) {
		return nil, errShort
	}
	raw := d.in[:size]
	d.in = d.in[size:]
	return raw, nil
}

// appendText appends a JSON string.
func appendText(out []byte, text string) []byte {
	raw, err := json.Marshal(text)
	if err != nil { // impossible for a text
		return append(out, `""`...)
	}
	return append(out, raw...)
}

// The texts of numbers that JSON does not have.
const (
	textNaN         = "NaN"
	textInfinity    = "Infinity"
	textNegInfinity = "-Infinity"
)

// appendFloat appends the shortest text that has the same value.
func appendFloat(out []byte, f float64, bits int) []byte {
	switch {
	case math.IsNaN(f):
		return appendText(out, textNaN)
	case math.IsInf(f, 1):
		return appendText(out, textInfinity)
	case math.IsInf(f, -1):
		return appendText(out, textNegInfinity)
	}
	return strconv.AppendFloat(out, f, 'g', -1, bits)
}

// appendDecimal appends the number of a two's complement with scale digits after the point.
func appendDecimal(out, raw []byte, scale int) []byte {
	n := new(big.Int).SetBytes(raw)
	if len(raw) > 0 && raw[0]&0x80 != 0 {
		n.Sub(n, new(big.Int).Lsh(big.NewInt(1), uint(8*len(raw))))
	}
	if n.Sign() < 0 {
		out = append(out, '-')
	}
	digits := n.Abs(n).String()
	if missing := scale + 1 - len(digits); missing > 0 {
		digits = strings.Repeat("0", missing) + digits
	}
	point := len(digits) - scale
	out = append(out, digits[:point]...)
	if scale > 0 {
		out = append(append(out, '.'), digits[point:]...)
	}
	return out
}

// encode implements codec.
func (t *avroType) encode(_ []byte, edited json.RawMessage) ([]byte, error) {
	decoder := json.NewDecoder(bytes.NewReader(edited))
	decoder.UseNumber()
	var value any
	if err := decoder.Decode(&value); err != nil {
		return nil, err
	}
	e := avroEncoder{out: []byte{}}
	if err := e.value(t, value, "payload", 0); err != nil {
		return nil, err
	}
	return e.out, nil
}

// avroEncoder writes the value of a JSON document. Its errors have no data of the document.
type avroEncoder struct{ out []byte }

// value writes a value. path is its place in the document.
func (e *avroEncoder) value(t *avroType, value any, path string, depth int) error {
	if depth > maxDepth {
		return errTooDeep
	}
	ok := false
	switch t.kind {
	case "null":
		ok = value == nil
	case "boolean":
		var is bool
		if is, ok = value.(bool); is {
			e.out = append(e.out, 1)
		} else {
			e.out = append(e.out, 0)
		}
	case "int", "long", "float", "double":
		ok = e.number(t, value)
	case "bytes", "fixed", "string":
		ok = e.bytes(t, value)
	case "enum":
		symbol, _ := value.(string)
		index := slices.Index(t.symbols, symbol)
		ok = index >= 0
		e.out = binary.AppendVarint(e.out, int64(index))
	case "array":
		var items []any
		if items, ok = value.([]any); ok {
			return e.array(t, items, path, depth)
		}
	case "map":
		var items map[string]any
		if items, ok = value.(map[string]any); ok {
			return e.mapping(t, items, path, depth)
		}
	case "record":
		var fields map[string]any
		if fields, ok = value.(map[string]any); ok {
			return e.record(t, fields, path, depth)
		}
	case "union":
		return e.union(t, value, path, depth)
	}
	if ok {
		return nil
	}
	if t.decimal {
		return fmt.Errorf("%s must be a number without exponent, of at most %d digits, %d of them after the point",
			path, t.precision, t.scale)
	}
	return fmt.Errorf("%s is not a value of type %s", path, t.name)
}

func (e *avroEncoder) record(t *avroType, fields map[string]any, path string, depth int) error {
	for _, field := range t.fields {
		value, ok := fields[field.name]
		if !ok {
			return fmt.Errorf("%s.%s is missing", path, field.name)
		}
		if err := e.value(field.of, value, path+"."+field.name, depth+1); err != nil {
			return err
		}
	}
	if len(fields) > len(t.fields) {
		return fmt.Errorf("%s has a field that the type %s does not have", path, t.name)
	}
	return nil
}

func (e *avroEncoder) array(t *avroType, items []any, path string, depth int) error {
	if len(items) > 0 {
		e.out = binary.AppendVarint(e.out, int64(len(items)))
	}
	for i, item := range items {
		if err := e.value(t.items, item, fmt.Sprintf("%s[%d]", path, i), depth+1); err != nil {
			return err
		}
	}
	e.out = append(e.out, 0)
	return nil
}

func (e *avroEncoder) mapping(t *avroType, items map[string]any, path string, depth int) error {
	if len(items) > 0 {
		e.out = binary.AppendVarint(e.out, int64(len(items)))
	}
	for _, key := range slices.Sorted(maps.Keys(items)) {
		e.text([]byte(key))
		if err := e.value(t.items, items[key], path+"[…]", depth+1); err != nil {
			return err
		}
	}
	e.out = append(e.out, 0)
	return nil
}

func (e *avroEncoder) union(t *avroType, value any, path string, depth int) error {
	tagged, isObject := value.(map[string]any)
	for i, branch := range t.branches {
		inner, ok := value, false
		switch {
		case branch.kind == "null" || value == nil:
			ok = branch.kind == "null" && value == nil
		case t.optional:
			ok = true
		case isObject && len(tagged) == 1:
			inner, ok = tagged[branch.name]
		}
		if ok {
			e.out = binary.AppendVarint(e.out, int64(i))
			return e.value(branch, inner, path, depth+1)
		}
	}
	if t.optional {
		return fmt.Errorf("%s is not null", path)
	}
	return fmt.Errorf("%s must be null or an object with the name of one type of the union", path)
}

func (e *avroEncoder) number(t *avroType, value any) bool {
	isFloat := t.kind == "float" || t.kind == "double"
	text, isText := value.(string)
	n, isNumber := value.(json.Number)
	switch {
	case isNumber:
		text = n.String()
	case !isFloat || !isText || text != textNaN && text != textInfinity && text != textNegInfinity:
		return false
	}
	switch t.kind {
	case "int", "long":
		bits := 64
		if t.kind == "int" {
			bits = 32
		}
		i, err := strconv.ParseInt(text, 10, bits)
		e.out = binary.AppendVarint(e.out, i)
		return err == nil
	case "float":
		f, err := strconv.ParseFloat(text, 32)
		bits := math.Float32bits(float32(f))
		if text == textNaN {
			bits = 0x7fc00000 // Java's
		}
		e.out = binary.LittleEndian.AppendUint32(e.out, bits)
		return err == nil
	default:
		f, err := strconv.ParseFloat(text, 64)
		bits := math.Float64bits(f)
		if text == textNaN {
			bits = 0x7ff8000000000000 // Java's
		}
		e.out = binary.LittleEndian.AppendUint64(e.out, bits)
		return err == nil
	}
}

func (e *avroEncoder) bytes(t *avroType, value any) bool {
	if t.decimal {
		n, _ := value.(json.Number)
		raw := decimal(n.String(), t)
		if t.kind == "fixed" {
			e.out = append(e.out, raw...)
		} else {
			e.text(raw)
		}
		return raw != nil
	}
	text, ok := value.(string)
	if t.kind == "string" {
		e.text([]byte(text))
		return ok
	}
	raw, err := base64.StdEncoding.DecodeString(text)
	if t.kind == "fixed" {
		e.out = append(e.out, raw...)
		return ok && err == nil && len(raw) == t.size
	}
	e.text(raw)
	return ok && err == nil
}

// text writes bytes after their length.
func (e *avroEncoder) text(raw []byte) {
	e.out = append(binary.AppendVarint(e.out, int64(len(raw))), raw...)
}

// decimal returns the two's complement of a number, or nil if the type cannot hold it.
func decimal(text string, t *avroType) []byte {
	unsigned := strings.TrimPrefix(text, "-")
	whole, fraction, _ := strings.Cut(unsigned, ".")
	fraction = strings.TrimRight(fraction, "0")
	whole = strings.TrimLeft(whole, "0")
	if strings.ContainsAny(text, "eE") || text == "" || len(fraction) > t.scale ||
		len(whole)+t.scale > t.precision && whole != "" || len(whole) > 3*maxDecimalBytes {
		return nil
	}
	n, ok := new(big.Int).SetString("0"+whole+fraction+strings.Repeat("0", t.scale-len(fraction)), 10)
	if !ok {
		return nil
	}
	if text != unsigned {
		n.Neg(n)
	}
	size := n.BitLen()/8 + 1
	if n.Sign() < 0 { // -128 needs one byte
		size = new(big.Int).Not(n).BitLen()/8 + 1
	}
	if t.kind == "fixed" {
		if size > t.size {
			return nil
		}
		size = t.size
	}
	if n.Sign() < 0 {
		n.Add(n, new(big.Int).Lsh(big.NewInt(1), uint(8*size)))
	}
	return n.FillBytes(make([]byte, size))
}
