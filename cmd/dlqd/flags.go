package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A command rejects flags that it does not act on. Otherwise a command that ignores --dry-run or a
// filter would carry out the action, or apply it to all entries.

// actsOn rejects all flags except names. form describes the form of the command.
func actsOn(cmd *cobra.Command, form string, names ...string) error {
	var idle []string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(names, f.Name) {
			idle = append(idle, "--"+f.Name)
		}
	})
	return refuse(form, idle)
}

// ignores rejects the named flags. form describes the form of the command.
func ignores(cmd *cobra.Command, form string, names ...string) error {
	var idle []string
	for _, name := range names {
		if cmd.Flags().Changed(name) {
			idle = append(idle, "--"+name)
		}
	}
	return refuse(form, idle)
}

func refuse(form string, idle []string) error {
	if len(idle) == 0 {
		return nil
	}
	return &usageError{fmt.Errorf("%s %s nothing %s", strings.Join(idle, ", "), map[bool]string{true: "does", false: "do"}[len(idle) == 1], form)}
}

// explainGroups makes command groups reject unknown subcommands. By default cobra prints the help
// and succeeds.
func explainGroups(cmd *cobra.Command) {
	for _, sub := range cmd.Commands() {
		explainGroups(sub)
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
		return &usageError{fmt.Errorf("%s %s: there is no such command (there are: %s)", cmd.CommandPath(), args[0], strings.Join(names, ", "))}
	}
}

// asList makes cmd without a subcommand run list.
func asList(cmd, list *cobra.Command, c *client) {
	cmd.RunE = list.RunE
	c.register(cmd)
	c.register(list)
	cmd.AddCommand(list)
}
