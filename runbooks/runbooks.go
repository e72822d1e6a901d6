// Package runbooks has the runbooks, so that a dlqd serves those of its own version.
package runbooks

import "embed"

// Files are the runbooks, and README.md, which lists them.
//
//go:embed *.md
var Files embed.FS
