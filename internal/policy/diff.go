package policy

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
)

// Change is a value that differs between two policies.
type Change struct {
	File, Path string
	Old, New   string // "" if absent
}

// String returns the change on one line.
func (c Change) String() string {
	switch {
	case c.Old == "":
		return fmt.Sprintf("%s %s = %s (new)", c.File, c.Path, c.New)
	case c.New == "":
		return fmt.Sprintf("%s %s = %s (removed)", c.File, c.Path, c.Old)
	case c.Old == c.New:
		return fmt.Sprintf("%s %s: %s, in its hidden part", c.File, c.Path, c.New)
	default:
		return fmt.Sprintf("%s %s: %s -> %s", c.File, c.Path, c.Old, c.New)
	}
}

// Diff returns the values in which two policies differ, in order. A changed secret in a file is not a change; an added
// or a removed secret is. A changed secret in a URL is a change, but the change does not show the secret's text.
func Diff(old, next *Policy) []Change {
	type key struct{ file, path string }
	changes := map[key]*Change{}
	was := map[key]any{}
	for _, s := range old.settings {
		was[key{s.File, s.Path}] = s.Value
		changes[key{s.File, s.Path}] = &Change{File: s.File, Path: s.Path, Old: displayValue(s.Value)}
	}
	for _, s := range next.settings {
		k := key{s.File, s.Path}
		if value, ok := was[k]; ok && reflect.DeepEqual(value, s.Value) {
			delete(changes, k)
			continue
		}
		if changes[k] == nil {
			changes[k] = &Change{File: s.File, Path: s.Path}
		}
		changes[k].New = displayValue(s.Value)
	}
	list := make([]Change, 0, len(changes))
	for _, c := range changes {
		list = append(list, *c)
	}
	slices.SortFunc(list, func(a, b Change) int {
		return strings.Compare(a.File+" "+a.Path, b.File+" "+b.Path)
	})
	return list
}
