package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"
)

// The values of --output.
const (
	outputJSON = "json"
	outputYAML = "yaml"
	outputWide = "wide" // tables with complete values, not limited to the width of the terminal
	outputName = "name" // only the values that other commands take: ids, or names
)

// output is the flag --output of a command.
type output struct {
	client *client
	format string
	// list is the field of the API's response that has the items whose names -o name prints. If list is "", the response
	// is the only item. names are the fields of an item that -o name prints. If names is empty, the command has no -o
	// name.
	list  string
	names []string
	table bool // the command prints a table; -o wide prints it with complete values
}

// formats returns the values that --output takes for this command.
func (o *output) formats() []string {
	formats := []string{outputJSON, outputYAML}
	if o.table {
		formats = append(formats, outputWide)
	}
	if len(o.names) > 0 {
		formats = append(formats, outputName)
	}
	return formats
}

// String implements pflag.Value.
func (o *output) String() string { return o.format }

// Type implements pflag.Value.
func (*output) Type() string { return "format" }

// Set implements pflag.Value.
func (o *output) Set(format string) error {
	if !slices.Contains(o.formats(), format) {
		return errors.New("must be " + strings.Join(o.formats(), ", "))
	}
	o.format, o.client.output, o.client.asJSON = format, o, format != outputWide
	return nil
}

// register adds the flag --output, and the flag --json, which is short for --output json.
func (o *output) register(cmd *cobra.Command) {
	help := map[string]string{
		outputJSON: "json", outputYAML: "yaml", outputWide: "wide (a table with complete values)",
		outputName: "name (only ids or names)",
	}
	formats := o.formats()
	texts := make([]string, len(formats))
	for i, format := range formats {
		texts[i] = help[format]
	}
	cmd.Flags().VarP(o, "output", "o", "format: "+strings.Join(texts, ", "))
	cmd.Flags().BoolVar(&o.client.asJSON, "json", false, "print the API's response as JSON; the same as -o json")
}

// print prints an answer of the API in the format of the flag.
func (o *output) print(w io.Writer, answer []byte) error {
	switch o.format {
	case outputYAML:
		node, err := yamlOf(json.NewDecoder(bytes.NewReader(answer)))
		if err != nil {
			return err
		}
		encoder := yaml.NewEncoder(w)
		encoder.SetIndent(2)
		return errors.Join(encoder.Encode(node), encoder.Close())
	case outputName:
		return o.printNames(w, answer)
	default:
		_, err := w.Write(append(bytes.TrimSpace(answer), '\n'))
		return err
	}
}

// With -o name, noteNextPage prints the cursor of the next page, because the list of names does not contain it. JSON
// and YAML contain the cursor.
func (c *client) noteNextPage(w io.Writer, answer []byte) {
	if c.output == nil || c.output.format != outputName || c.output.list == "" {
		return
	}
	var page struct {
		Next string `json:"next"`
	}
	if json.Unmarshal(answer, &page) == nil && page.Next != "" {
		printSafef(w, "more: --cursor %s\n", page.Next)
	}
}

func (o *output) printNames(w io.Writer, answer []byte) error {
	items := []map[string]any{{}}
	if o.list == "" {
		if err := json.Unmarshal(answer, &items[0]); err != nil {
			return err
		}
	} else {
		var lists map[string]json.RawMessage
		if err := json.Unmarshal(answer, &lists); err != nil {
			return err
		}
		if items = nil; lists[o.list] != nil {
			if err := json.Unmarshal(lists[o.list], &items); err != nil {
				return err
			}
		}
	}
	for _, item := range items {
		var names []string
		for _, name := range o.names {
			if value, ok := item[name].(string); ok {
				names = append(names, printable(value))
			}
		}
		if len(names) < len(o.names) {
			continue // the response is a request for approval, not the answer
		}
		if _, err := fmt.Fprintln(w, strings.Join(names, " ")); err != nil {
			return err
		}
	}
	return nil
}

// yamlOf reads a JSON value as YAML. It keeps the order of the value's fields and the digits of its numbers.
func yamlOf(decoder *json.Decoder) (*yaml.Node, error) {
	decoder.UseNumber()
	token, err := decoder.Token()
	if err != nil {
		return nil, err
	}
	switch token := token.(type) {
	case json.Delim:
		node := &yaml.Node{Kind: yaml.MappingNode}
		if token == '[' {
			node.Kind = yaml.SequenceNode
		}
		for decoder.More() { // the names and values of an object, or the items of an array
			item, err := yamlOf(decoder)
			if err != nil {
				return nil, err
			}
			node.Content = append(node.Content, item)
		}
		_, err := decoder.Token() // the closing bracket
		return node, err
	case json.Number:
		return &yaml.Node{Kind: yaml.ScalarNode, Value: token.String()}, nil
	default:
		node := &yaml.Node{}
		return node, node.Encode(token)
	}
}
