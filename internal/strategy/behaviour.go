package strategy

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/redact"
	"github.com/dlqd/dlqd/internal/riverdlq"
)

// place is a scope for which the policy has values, such as a queue, a destination, or a class of errors in a queue.
type place struct{ sort, name string }

func (p place) String() string { return strings.TrimSpace(p.sort + " " + p.name) }

// field is one effective value at a place.
type field struct{ path, value string }

// behaviour has the effective values of a policy by place, including defaults.
type behaviour struct {
	places []place
	fields map[place][]field
}

// resolved lists the fields of a policy that [Planner.behaviour] does not compare field by field. Instead, it compares
// the results of the policy's lookups for each queue, destination, class and kind, which include defaults.
var resolved = []string{
	"RetryPolicies.Defaults", "RetryPolicies.Queues", "RetryPolicies.Destinations", "RetryPolicies.DestinationDefaults",
	"Breakers.Defaults", "Breakers.Destinations", "Breakers.RiverQueues",
	"Routing.Rules", "Routing.Strategies", "Routing.Classes", "Routing.Queues", "Routing.Kinds",
	"Workers.Defaults", "Workers.Queues", "Monitoring.Defaults", "Monitoring.Queues",
}

// Sorts of places to which plans apply.
const (
	everyQueue = "every queue, class"
	ofClass    = ", class" // suffix for one queue or kind
)

// behaviour returns the effective values of the policy. It finds the fields by the policy's Go types, so it also
// compares a field that is added later.
func (p *Planner) behaviour(names *queuesAndKinds) *behaviour {
	b := &behaviour{fields: map[place][]field{}}
	rules, everywhere := p.policy, place{"everywhere", ""}
	whole := reflect.ValueOf(rules).Elem()
	for _, section := range reflect.VisibleFields(whole.Type()) {
		if !section.IsExported() || len(section.Index) > 1 {
			continue
		}
		for _, f := range reflect.VisibleFields(section.Type) {
			if !slices.Contains(resolved, section.Name+"."+f.Name) {
				b.add(everywhere, fieldName(f), whole.FieldByIndex(section.Index).FieldByIndex(f.Index))
			}
		}
	}
	other := place{"other queues", ""}
	b.add(other, "", reflect.ValueOf(rules.Defaults))
	b.add(other, "", reflect.ValueOf(rules.Pool("")))
	b.add(other, "", reflect.ValueOf(rules.Alert("")))
	for _, name := range names.queues {
		at := place{"queue", name}
		if queue := rules.Queues[name]; queue != nil {
			b.add(at, "", reflect.ValueOf(queue))
			b.add(at, "", reflect.ValueOf(rules.Pool(name)))
		}
		b.add(at, "", reflect.ValueOf(rules.Alert(name)))
		b.add(at, "smartRetry", reflect.ValueOf(rules.SmartRetryOn(name)))
		age, _ := rules.StaleAfter(name, "")
		b.add(at, "staleAfter", reflect.ValueOf(age))
		b.add(at, "expireStale", reflect.ValueOf(rules.Expires(name, "")))
		skips := rules.Skips()
		b.add(at, "skipStale", reflect.ValueOf(skips.Stale.Of(name, "")))
		b.add(at, "skipSuperseded", reflect.ValueOf(skips.Superseded.Of(name, "")))
		b.add(at, "orderingKey", reflect.ValueOf(strings.Join(rules.OrderingKeys().Queues[name], ".")))
		b.add(at, "replayWhenFixed", reflect.ValueOf(slices.Contains(rules.ReplaysWhenFixed(), name)))
	}
	for _, name := range names.kinds {
		age, _ := rules.StaleAfter("", name)
		b.add(place{"kind", name}, "staleAfter", reflect.ValueOf(age))
		b.add(place{"kind", name}, "expireStale", reflect.ValueOf(rules.Expires("", name)))
		if kind := rules.Routing.Kinds[name]; kind != nil { // false and absent differ: if absent, the queue's value applies
			b.add(place{"kind", name}, "skipStale", reflect.ValueOf(kind.SkipStale))
			b.add(place{"kind", name}, "skipSuperseded", reflect.ValueOf(kind.SkipSuperseded))
			b.add(place{"kind", name}, "orderingKey", reflect.ValueOf(kind.OrderingKey))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rules.Destinations)) {
		b.add(place{"destination", name}, "", reflect.ValueOf(rules.Destinations[name]))
		b.add(place{"destination", name}, "breaker", reflect.ValueOf(rules.Breaker(name)))
	}
	for _, name := range slices.Sorted(maps.Keys(rules.Breakers.RiverQueues)) {
		b.add(place{"River queue", name}, "breaker", reflect.ValueOf(rules.Breakers.RiverQueues[name]))
	}
	for _, class := range riverdlq.Classes() {
		b.add(place{everyQueue, string(class)}, "", reflect.ValueOf(p.Plan(class, "", "", nil)))
		for _, name := range names.queues {
			b.add(place{"queue " + name + ofClass, string(class)}, "", reflect.ValueOf(p.Plan(class, name, "", nil)))
		}
		for _, name := range names.kinds {
			b.add(place{"kind " + name + ofClass, string(class)}, "", reflect.ValueOf(p.Plan(class, "", name, nil)))
		}
	}
	order := make([]string, len(rules.Routing.Rules))
	for i, rule := range rules.Routing.Rules {
		order[i] = rule.Name
		if rule.Class != "" {
			rule.Plan = p.Plan(riverdlq.Class(rule.Class), "", "", &rule)
		}
		b.add(place{"rule", rule.Name}, "", reflect.ValueOf(rule))
	}
	b.add(place{"rules", ""}, "order", reflect.ValueOf(order))
	return b
}

// add adds the fields of v under path to a place.
func (b *behaviour) add(at place, path string, v reflect.Value) {
	leaf := func(text string) {
		if b.fields[at] == nil {
			b.places = append(b.places, at)
		}
		b.fields[at] = append(b.fields[at], field{path, text})
	}
	under := func(name string) string { return strings.TrimPrefix(path+"."+name, ".") }
	switch v.Kind() { //nolint:exhaustive // all others are leaves
	case reflect.Pointer:
		if !v.IsNil() {
			b.add(at, path, v.Elem())
		}
	case reflect.Struct:
		for _, f := range reflect.VisibleFields(v.Type()) {
			if name := fieldName(f); name != "-" && f.IsExported() {
				b.add(at, under(name), v.FieldByIndex(f.Index))
			}
		}
	case reflect.Map:
		for _, name := range slices.Sorted(maps.Keys(keysOf(v))) {
			b.add(at, under(name), v.MapIndex(reflect.ValueOf(name)))
		}
	default:
		leaf(valueText(v))
	}
}

// keysOf returns the keys of a map with string keys.
func keysOf(v reflect.Value) map[string]bool {
	keys := map[string]bool{}
	for _, key := range v.MapKeys() {
		keys[key.String()] = true
	}
	return keys
}

// fieldName returns the name of a field in the policy's files.
func fieldName(f reflect.StructField) string {
	name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
	return name
}

// valueText returns a value as it is written in a file. It does not mask a secret, so that two secrets compare as
// different; fieldsDiff masks them.
func valueText(v reflect.Value) string {
	switch value := v.Interface().(type) {
	case time.Duration:
		return shortDuration(value)
	case policy.Secret:
		return string(value)
	}
	if v.Kind() == reflect.Slice {
		items := make([]string, v.Len())
		for i := range items {
			items[i] = valueText(v.Index(i))
		}
		return "[" + strings.Join(items, ", ") + "]"
	}
	return fmt.Sprint(v.Interface())
}

// shortDuration returns a duration without zero seconds and minutes: 30m for 30m0s.
func shortDuration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// queuesAndKinds has the names of two policies: the queues that at least one of the policies delivers, routes or
// limits, and the kinds that at least one of them routes.
type queuesAndKinds struct{ queues, kinds []string }

func namesOf(planners ...*Planner) *queuesAndKinds {
	queues, kinds := map[string]bool{}, map[string]bool{}
	for _, p := range planners {
		for name := range p.policy.Queues {
			queues[name] = true
		}
		for name := range p.policy.Routing.Queues {
			queues[name] = true
		}
		for name := range p.policy.Monitoring.Queues {
			queues[name] = true
		}
		for name := range p.policy.Routing.Kinds {
			kinds[name] = true
		}
	}
	return &queuesAndKinds{slices.Sorted(maps.Keys(queues)), slices.Sorted(maps.Keys(kinds))}
}

// BehaviourDiff returns the changes from one policy to another: for each place one line with the fields that differ
// there, in the order of the files. Places of the same kind (field sort) with the same changes share a line. If a
// change of a class is the same in every queue, it is not repeated for single queues and kinds.
func BehaviourDiff(old, next *Planner) []string {
	names := namesOf(old, next)
	was, is := old.behaviour(names), next.behaviour(names)
	places := slices.Clone(was.places)
	for _, at := range is.places {
		if was.fields[at] == nil {
			places = append(places, at)
		}
	}
	type line struct{ sort, changes string }
	var lines []line
	at := map[line][]string{}
	everywhere := map[string]string{} // changes of a class that apply in every queue
	for _, p := range places {
		changes := fieldsDiff(was.fields[p], is.fields[p])
		switch {
		case changes == "", strings.HasSuffix(p.sort, ofClass) && p.sort != everyQueue && everywhere[p.name] == changes:
			continue
		case p.sort == everyQueue:
			everywhere[p.name] = changes
		}
		l := line{p.sort, changes}
		if at[l] == nil {
			lines = append(lines, l)
		}
		at[l] = append(at[l], p.name)
	}
	var diff []string //nolint:prealloc // nil where nothing changes
	for _, l := range lines {
		diff = append(diff, place{l.sort, strings.Join(at[l], ", ")}.String()+": "+l.changes)
	}
	return diff
}

// fieldsDiff lists the fields that differ between two places, with secrets masked, or returns "" if none does. Either
// place may be absent (nil): the text then says that the place is new or removed.
func fieldsDiff(old, next []field) string {
	was, is := map[string]string{}, map[string]string{}
	var paths []string
	for _, f := range old {
		was[f.path] = f.value
		paths = append(paths, f.path)
	}
	for _, f := range next {
		is[f.path] = f.value
		if _, known := was[f.path]; !known {
			paths = append(paths, f.path)
		}
	}
	var changes []string
	for _, path := range paths {
		before, had := was[path]
		after, has := is[path]
		if had == has && before == after {
			continue
		}
		if path == "secret" || strings.HasSuffix(path, ".secret") {
			before, after = policy.Secret(before).String(), policy.Secret(after).String()
		} else {
			before, after = maskedValue(was, path), maskedValue(is, path)
		}
		switch {
		case old == nil && slices.Contains([]string{"", "0", "false", "[]"}, after), !had && after == "",
			!has && before == "":
		case !had:
			changes = append(changes, path+" "+after)
		case !has:
			changes = append(changes, path+" "+before+" -> (none)")
		case before == after && path != "secret":
			changes = append(changes, path+" "+after+" (a masked part changes)")
		default:
			changes = append(changes, path+" "+orNone(before)+" -> "+orNone(after))
		}
	}
	text := strings.Join(changes, ", ")
	switch {
	case text == "":
		return ""
	case old == nil:
		return "new: " + text
	case next == nil:
		return "removed"
	}
	return text
}

// maskedValue returns the value at path of a place, with secrets masked.
func maskedValue(values map[string]string, path string) string {
	if path == "url" && values["urlFile"] != "" {
		return redact.Origin(values[path])
	}
	return redact.Text(values[path])
}

// orNone returns value, or "(none)" if it is empty.
func orNone(value string) string {
	if value == "" {
		return "(none)"
	}
	return value
}
