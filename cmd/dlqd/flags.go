package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A flag that a command does not act on is an error: whoever gave --dry-run, or a filter, must not find the thing done, or done
// to everything.

// actsOn refuses all flags but these, in a form of a command that acts on these alone.
func actsOn(cmd *cobra.Command, form string, names ...string) error {
	var idle []string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(names, f.Name) {
			idle = append(idle, "--"+f.Name)
		}
	})
	return refuse(form, idle)
}

// ignores refuses these flags, in a form of a command that does not act on them.
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

// explainGroups has a command that only holds others refuse what is none of them, where cobra would print help and succeed.
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

// asList has a command without a verb do what its list does.
func asList(cmd, list *cobra.Command, c *client) {
	cmd.RunE = list.RunE
	c.register(cmd)
	c.register(list)
	cmd.AddCommand(list)
}
