package protocol

import "slices"

// stepOf is a step of a model with the states S.
type stepOf[S comparable] struct {
	Text  string
	After S
	Wrong string // the invariant that the step breaks, or ""
	Bad   bool   // a fault, or an action that the model must not need to come to an end
}

// explore visits all states, in the order of their distance from the start. From each state, steps that are not Bad
// must be able to lead to an end; otherwise the invariant endless is broken. explore returns the number of states and,
// if an invariant breaks, the invariant and a shortest trace to it.
func explore[S comparable](start S, steps func(*S) []stepOf[S], isEnd func(*S) bool, endless string,
) (states int, wrong string, trace []string) {
	type origin struct {
		from S
		text string
	}
	seen := map[S]origin{start: {}}
	level := []S{start}
	cameFrom := map[S][]S{} // predecessors of each state, by steps that are not Bad
	way := func(to S, last ...string) []string {
		for to != start {
			last = append(last, seen[to].text)
			to = seen[to].from
		}
		slices.Reverse(last)
		return last
	}
	for at := 0; at < len(level); at++ {
		for _, step := range steps(&level[at]) {
			if step.Wrong != "" {
				return len(seen), step.Wrong, way(level[at], step.Text)
			}
			if _, known := seen[step.After]; !known {
				seen[step.After] = origin{level[at], step.Text}
				level = append(level, step.After)
			}
			if !step.Bad {
				cameFrom[step.After] = append(cameFrom[step.After], level[at])
			}
		}
	}
	ends := map[S]bool{}
	var back []S
	for _, s := range level {
		if isEnd(&s) {
			ends[s], back = true, append(back, s)
		}
	}
	for len(back) > 0 {
		last := back[len(back)-1]
		back = back[:len(back)-1]
		for _, s := range cameFrom[last] {
			if !ends[s] {
				ends[s], back = true, append(back, s)
			}
		}
	}
	for _, s := range level {
		if !ends[s] {
			return len(seen), endless, way(s)
		}
	}
	return len(seen), "", nil
}
