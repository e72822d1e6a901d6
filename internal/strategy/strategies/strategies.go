// Package strategies lists the strategies. It imports nothing, so that the policy's schema and the filter
// language, which cannot import internal/strategy, read the same list.
package strategies

import "slices"

// The built-in strategies, as the enum dlq.strategy names them. An operator decides about an entry
// whose strategy is Manual.
const (
	Immediate   = "immediate"
	Scheduled   = "scheduled"
	Conditional = "conditional"
	Manual      = "manual"
)

// Strategy has the name of a strategy, and the description of its defaults in the policy's schema, which is "" if the
// strategy has no defaults.
type Strategy struct{ Name, Defaults string }

var all = []Strategy{
	{Immediate, "Redelivers after each of the delays in turn."},
	{Scheduled, "Redelivers in the next off-peak hour."},
	{Conditional, "Redelivers when the conditions hold."},
	{Manual, ""},
}

// Add adds a strategy. Only strategy.Add, which also adds the implementation, may call it.
func Add(s Strategy) { all = append(all, s) }

var builtIn = len(all)

// Added returns the strategies that are not built in.
func Added() []Strategy { return slices.Clone(all[builtIn:]) }

// All returns the strategies.
func All() []Strategy { return slices.Clone(all) }

// Names returns the names of the strategies.
func Names() []string {
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	return names
}
