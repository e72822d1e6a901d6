// Package schemas has the JSON Schemas of the policy's files, for editors and for dlqd.
package schemas

import "embed"

// Files has NAME.schema.json for each file of a policy. "make generate" writes them.
//
//go:embed *.schema.json
var Files embed.FS
