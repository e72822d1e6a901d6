package strategy

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/policy/policytest"
)

// complete is a policy with an element in every map and list.
var complete = policytest.Files{
	"retry-policies": "queues: {orders: {destination: shop}, payments: {destination: bank}}\ndestinations: {shop: " +
		"{url: \"http://s\"}, bank: {url: \"http://b\", secret: MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw}}\n",
	"circuit-breaker": "destinations: {shop: {openFor: 1m}}\nriverQueues: {emails: {openFor: 1m}}\n",
	"worker-pool":     "queues: {orders: {concurrency: 3}}\n",
	"monitoring":      "queues: {orders: {maxOpen: 3}}\n",
	"dlq-routing": `
rules: [{name: r, match: {type: a, code: b, message: c, status: 503, kind: d, queue: e, source: f, when: status == 1}, class: outage, tags: [tag], assignee: kim, priority: 2, plan: {delays: [1s], conditions: {breaker: false, probe: false}}}]
queues: {orders: {plan: {delays: [1s], conditions: {breaker: false, probe: false}}, classes: {transient: {delays: [2s], conditions: {breaker: false, probe: false}}}, maxRetries: 4, smartRetry: true}}
kinds: {"report.*": {plan: {delays: [1s], conditions: {breaker: false, probe: false}}, classes: {transient: {delays: [2s], conditions: {breaker: false, probe: false}}}, maxRetries: 4}}
automatic: {all: {enabled: true}, queues: {orders: {enabled: true}}, kinds: {k: {enabled: true}}, classes: {outage: {enabled: true}}}
`,
}

// leaf is a value of a policy that is not a struct, map or pointer.
type leaf struct {
	path string
	// change changes the value. It returns a function that restores the old value.
	change func() (undo func())
}

// leaves returns the leaves below v, including leaves behind nil pointers.
func leaves(v reflect.Value, path string) (found []leaf) {
	switch v.Kind() { //nolint:exhaustive // all others are leaves
	case reflect.Pointer:
		if !v.IsNil() {
			return leaves(v.Elem(), path)
		}
		element := reflect.New(v.Type().Elem())
		if v.Type().Elem().Kind() == reflect.Bool { // false, because the defaults are true
			return []leaf{{path, func() func() { v.Set(element); return v.SetZero }}}
		}
		for _, l := range leaves(element.Elem(), path) {
			found = append(found, leaf{l.path, func() func() {
				undo := l.change()
				v.Set(element)
				return func() { undo(); v.SetZero() }
			}})
		}
	case reflect.Struct:
		for _, f := range reflect.VisibleFields(v.Type()) {
			if f.IsExported() && len(f.Index) == 1 && f.Tag.Get("json") != "-" {
				found = append(found, leaves(v.FieldByIndex(f.Index), path+"."+f.Name)...)
			}
		}
	case reflect.Map:
		for _, key := range v.MapKeys() {
			found = append(found, leaves(v.MapIndex(key), path+"."+key.String())...)
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Struct {
			for i := range v.Len() {
				found = append(found, leaves(v.Index(i), fmt.Sprintf("%s[%d]", path, i))...)
			}
			return found
		}
		fallthrough
	default:
		return []leaf{{path, func() func() {
			was := reflect.New(v.Type()).Elem()
			was.Set(v)
			change(v)
			return func() { v.Set(was) }
		}}}
	}
	return found
}

func change(v reflect.Value) {
	switch v.Kind() { //nolint:exhaustive // a policy has no others
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int, reflect.Int64:
		v.SetInt(v.Int() + int64(time.Minute)) // for a duration, one minute more
	case reflect.Uint:
		v.SetUint(v.Uint() + 1)
	case reflect.Float64:
		v.SetFloat(v.Float() + 1)
	case reflect.Slice:
		item := reflect.New(v.Type().Elem()).Elem()
		change(item)
		v.Set(reflect.Append(v, item))
	default:
		panic(v.Kind())
	}
}

// The test reads the fields from the policy's types. So it fails if BehaviourDiff does not compare a new field.
func TestBehaviourDiff_ComparesEveryField(t *testing.T) {
	t.Parallel()
	old, next := &Planner{policy: policytest.Load(t, complete)}, &Planner{policy: policytest.Load(t, complete)}
	require.Empty(t, BehaviourDiff(old, next))
	all := leaves(reflect.ValueOf(next.policy).Elem(), "")
	require.Greater(t, len(all), 150)
	for _, l := range all {
		if strings.HasPrefix(l.path, ".RetryPolicies.DestinationDefaults.") || // copied into each destination on load
			strings.HasPrefix(l.path, ".Routing.Strategies.") && strings.HasSuffix(l.path, ".Strategy") { // has no effect
			continue
		}
		undo := l.change()
		require.NotEmpty(t, BehaviourDiff(old, next), l.path)
		require.NotEmpty(t, BehaviourDiff(next, old), l.path)
		undo()
		require.Empty(t, BehaviourDiff(old, next), l.path)
	}
}

func TestBehaviourDiff_DescribesChanges(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name      string
		old, next policytest.Files
		want      []string
	}{
		{
			"a queue's attempts, timeout and whenOpen",
			policytest.Files{"retry-policies": "queues: {a: {destination: d}, b: {destination: d}, c: {destination: " +
				"d}}\ndestinations: {d: {url: \"http://d\"}}\n"},
			policytest.Files{"retry-policies": "defaults: {timeout: 90s}\nqueues: {a: {destination: d}, b: {destination: d}, " +
				"c: {destination: d, timeout: 30s, maxAttempts: 9, whenOpen: accept}}\ndestinations: {d: {url: \"http://d\"}}\n"},
			[]string{
				"other queues: timeout 30s -> 1m30s", "queue a, b: timeout 30s -> 1m30s",
				"queue c: maxAttempts 3 -> 9, whenOpen reject -> accept",
			},
		},
		{
			"defaults of breakers", nil,
			policytest.Files{"circuit-breaker": "defaults: {openFor: 45s}\n"},
			[]string{"destination default: breaker.openFor 30s -> 45s"},
		},
		{
			"defaults of queues' limits", nil,
			policytest.Files{"monitoring": "defaults: {maxOpen: 7}\n"},
			[]string{"other queues: maxOpen 1000 -> 7", "queue default: maxOpen 1000 -> 7"},
		},
		{
			"conditions", nil,
			policytest.Files{"dlq-routing": "strategies: {conditional: {conditions: {cpuBelow: 50}}}\n"},
			[]string{"every queue, class outage: conditions.cpuBelow 80 -> 50"},
		},
		{
			"the order of rules",
			policytest.Files{"dlq-routing": "rules: [{name: a, match: {kind: x}, tags: [tag]}, {name: b, match: {queue: y}, tags: [tag]}]\n"},
			policytest.Files{"dlq-routing": "rules: [{name: b, match: {queue: y}, tags: [tag]}, {name: a, match: {kind: x}, tags: [tag]}]\n"},
			[]string{"rules: order [a, b] -> [b, a]"},
		},
		{
			"smart retry", nil,
			policytest.Files{"dlq-routing": "smartRetry: {enabled: true}\nqueues: {jobs: {smartRetry: false}}\n"},
			[]string{"everywhere: smartRetry.enabled false -> true", "queue default: smartRetry false -> true"},
		},
		{
			"a destination's secret is masked",
			policytest.Files{"retry-policies": "queues: {a: {destination: d}}\ndestinations: {d: {url: \"http://d\", secret: " +
				"MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw}}\n"},
			policytest.Files{"retry-policies": "queues: {a: {destination: d}}\ndestinations: {d: {url: \"http://d\", secret: " +
				"MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSx}}\n"},
			[]string{"destination d: secret (hidden) -> (hidden)"},
		},
		{
			"a default that is overridden everywhere changes nothing", nil,
			policytest.Files{"dlq-routing": "strategies: {immediate: {strategy: manual}}\n"},
			nil,
		},
	} {
		old, err := NewPlanner(policytest.Load(t, test.old), nil)
		require.NoError(t, err)
		next, err := NewPlanner(policytest.Load(t, test.next), nil)
		require.NoError(t, err)
		require.Equal(t, test.want, BehaviourDiff(old, next), test.name)
	}
}
