package background

import (
	"fmt"
	"runtime/debug"
	"sync/atomic"

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

// Panicked returns the error of what was recovered, with its stack, and counts it.
func Panicked(p any) *PanicError {
	panics.Add(1)
	return &PanicError{Value: p, Stack: string(debug.Stack())}
}

// PanicError is a panic that was recovered.
type PanicError struct {
	Value any
	Stack string
}

func (e *PanicError) Error() string { return fmt.Sprintf("panicked: %v\n%s", e.Value, e.Stack) }

var panics atomic.Int64

// Panics is how many panics this process has recovered.
func Panics() int64 { return panics.Load() }
