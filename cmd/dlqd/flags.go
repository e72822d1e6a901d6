package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A command rejects flags that have no effect. If a command ignored --dry-run, it would carry out the action. If it
// ignored a filter, it would apply the action to all entries.

// allowOnlyFlags returns a usage error if flags are set other than names and the flags of the connection and the
// output. condition says when the other flags have no effect; the error contains it.
func allowOnlyFlags(cmd *cobra.Command, condition string, names ...string) error {
	var unused []string
	names = append(names, "api-url", "token-file", "plain-http", "json", "output")
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(names, f.Name) {
			unused = append(unused, "--"+f.Name)
		}
	})
	return unusedFlagsError(condition, unused)
}

// rejectFlags returns a usage error if one of the named flags is set. condition says when the flags have no effect; the
// error contains it.
func rejectFlags(cmd *cobra.Command, condition string, names ...string) error {
	var unused []string
	for _, name := range names {
		if cmd.Flags().Changed(name) {
			unused = append(unused, "--"+name)
		}
	}
	return unusedFlagsError(condition, unused)
}

// checkCommonFlags checks the flags that many of the commands that call the API have in common.
func checkCommonFlags(cmd *cobra.Command) error {
	if limit := cmd.Flags().Lookup("limit"); limit != nil && limit.Value.String() == "0" {
		return &usageError{errors.New("--limit 0: must be at least 1")} // Operation.Request would leave out a 0
	}
	if cmd.Flags().Changed("json") {
		return rejectFlags(cmd, "with --json", "output")
	}
	return nil
}

func unusedFlagsError(condition string, unused []string) error {
	if len(unused) == 0 {
		return nil
	}
	verb := map[bool]string{true: "has", false: "have"}[len(unused) == 1]
	return &usageError{fmt.Errorf("%s %s no effect %s", strings.Join(unused, ", "), verb, condition)}
}

// explainArguments changes cmd and its subcommands: if the number of arguments is wrong, the error names the arguments.
func explainArguments(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		explainArguments(sub)
	}
	check := cmd.Args
	if check == nil {
		return
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		err := check(cmd, args)
		if err != nil && strings.Contains(err.Error(), "arg(s)") {
			return &usageError{fmt.Errorf("wrong number of arguments: %d; usage: %s", len(args), cmd.UseLine())}
		}
		return err
	}
}

// rejectUnknownSubcommands makes groups of commands reject unknown subcommands. By default, cobra prints the help for
// an unknown subcommand and succeeds.
func rejectUnknownSubcommands(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		rejectUnknownSubcommands(sub)
	}
	if cmd.Runnable() || !cmd.HasParent() {
		return
	}
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		var names []string
		for _, sub := range cmd.Commands() {
			names = append(names, sub.Name())
		}
		return &usageError{fmt.Errorf("%s %s: unknown command (available: %s)",
			cmd.CommandPath(), args[0], strings.Join(names, ", "))}
	}
}

// mistakes has, for each type of flag, the condition that a value must meet.
var mistakes = map[string]string{
	"int": "must be a whole number", "int32": "must be a whole number", "int64": "must be a whole number",
	"float64": "must be a number", "bool": "must be true or false",
	"duration": "must be a duration, such as 30s, 5m or 2h",
}

// flagError returns the error for an invalid value of a flag, without the words of the packages strconv and time.
func flagError(_ *cobra.Command, err error) error {
	invalid, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return &usageError{err}
	}
	mistake, known := mistakes[invalid.GetFlag().Value.Type()]
	if !known {
		mistake = cause(invalid.Unwrap()).Error()
	}
	return &usageError{fmt.Errorf("--%s %s: %s", invalid.GetFlag().Name, invalid.GetValue(), mistake)}
}

// addDefaultList adds the command list to cmd. Without a subcommand, cmd runs list. field and names are the fields list
// and names of [output].
func addDefaultList(cmd, list *cobra.Command, c *client, field string, names ...string) {
	cmd.RunE = list.RunE
	c.registerNamed(cmd, field, names...)
	c.registerNamed(list, field, names...)
	cmd.AddCommand(list)
}
