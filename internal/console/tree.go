package console

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
)

const (
	// maxNodes is the number of payload nodes that the tree shows. The raw text has all of them.
	maxNodes = 1500
	// openDepth is the depth to which the tree is expanded at first.
	openDepth = 2
	// maxLeaf is the maximum length of a value in the tree, in bytes.
	maxLeaf = 4000
)

// node is a value in a payload. Numbers are shown as written.
type node struct {
	Key      string
	Type     string // object, array, string, number or literal
	Value    string
	Query    string // a filter for entries with this value at this path; "" if the filter language has none
	Children []*node
	Left     int // number of children that are not shown
	Open     bool
}

// Summary returns the number of children in brackets.
func (n *node) Summary() string {
	if n.Type == "array" {
		return "[" + number(len(n.Children)+n.Left) + "]"
	}
	return "{" + number(len(n.Children)+n.Left) + "}"
}

// treeOf parses a payload. It returns nil for payloads that are empty, too large, too deep, neither
// object nor array, or not JSON.
func treeOf(payload json.RawMessage) *node {
	if len(payload) > maxShown || depthOf(payload) > maxDepth {
		return nil
	}
	decoder := json.NewDecoder(bytes.NewReader(payload))
	decoder.UseNumber()
	t := &tree{decoder: decoder, left: maxNodes}
	root := t.read("", nil, 0)
	if t.err != nil || root == nil || len(root.Children) == 0 {
		return nil
	}
	return root
}

type tree struct {
	decoder *json.Decoder
	left    int
	err     error
}

func (t *tree) read(key string, path []string, depth int) *node {
	token, err := t.decoder.Token()
	if err != nil {
		t.err = err
		return nil
	}
	n := &node{Key: key, Open: depth < openDepth}
	switch v := token.(type) {
	case json.Delim:
		n.Type = map[json.Delim]string{'{': "object", '[': "array"}[v]
		for i := 0; t.err == nil && t.decoder.More(); i++ {
			name, place := strconv.Itoa(i), path
			if v == '{' {
				token, err := t.decoder.Token()
				if err != nil {
					t.err = err
					return nil
				}
				name, _ = token.(string)
				place = append(slices.Clip(path), name)
			}
			t.left--
			shown := t.left >= 0
			if child := t.read(name, place, depth+1); child != nil && shown {
				n.Children = append(n.Children, child)
			} else {
				n.Left++
			}
		}
		if t.err == nil {
			_, t.err = t.decoder.Token()
		}
		if len(n.Children) == 0 {
			n.Type, n.Value = "literal", map[json.Delim]string{'{': "{}", '[': "[]"}[v]
		}
		return n
	case string:
		n.Type, n.Value = "string", v
	case json.Number:
		n.Type, n.Value = "number", v.String()
	case bool:
		n.Type, n.Value = "literal", strconv.FormatBool(v)
	default:
		n.Type, n.Value = "literal", "null"
	}
	if len(path) > 0 && n.Value != "" && len(n.Value) < 200 && n.Value != "***" {
		words := make([]string, len(path))
		for i, word := range path {
			words[i] = quotedKey(word)
		}
		n.Query = "payload." + strings.Join(words, ".") + ":" + quoted(n.Value)
	}
	if len(n.Value) > maxLeaf {
		n.Value = strings.ToValidUTF8(n.Value[:maxLeaf], "") + "…"
	}
	return n
}

// quotedKey returns a key as the filter language expects it in a path, in quotes if necessary.
func quotedKey(key string) string {
	if key != "" && !strings.ContainsAny(key, ".\":, \t\n\\") {
		return key
	}
	return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
}
