package background

import (
	"fmt"
	"runtime/debug"

	"golang.org/x/sync/errgroup"
)

// Together does several things at once, so many at a time, and returns the first error when all have ended. One that panics ends with an error,
// and not the process: what is begun in a goroutine of its own has no server around it that would catch that.
func Together(most int, does ...func() error) error {
	var all errgroup.Group
	all.SetLimit(most)
	for _, do := range does {
		all.Go(func() (err error) {
			defer func() {
				if p := recover(); p != nil {
					err = Panicked(p)
				}
			}()
			return do()
		})
	}
	return all.Wait()
}

// Panicked is the error of what was recovered, with its stack.
func Panicked(p any) error { return fmt.Errorf("panicked: %v\n%s", p, debug.Stack()) }
