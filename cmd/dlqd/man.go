//go:build man

package main

import (
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/dlqd/dlqd/internal/version"
)

// Only builds with the tag man have the command man. "make release" runs the command; dlqd does not contain its
// libraries.
func init() { taggedCommands = append(taggedCommands, newMan) } //nolint:gochecknoinits // there is no other hook

func newMan() *cobra.Command {
	return &cobra.Command{
		Use:    "man DIR",
		Short:  "Write the man pages of all commands",
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o750); err != nil {
				return err
			}
			// The date of the page is that in $SOURCE_DATE_EPOCH, or today if the variable is not set.
			header := &doc.GenManHeader{Section: "1", Source: "dlqd " + version.String(), Manual: "dlqd"}
			cmd.Root().DisableAutoGenTag = true // the line would contain the date of the build
			return doc.GenManTree(cmd.Root(), header, args[0])
		},
	}
}
