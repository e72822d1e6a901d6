package background

import (
	"fmt"
	"runtime/debug"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
)

// Together runs functions concurrently, up to limit at a time. It returns the first error, after all functions have
// ended. A panic of a function becomes an error. Otherwise it would end the process, because no HTTP server recovers
// panics of these goroutines.
func Together(limit int, fns ...func() error) error {
	var all errgroup.Group
	all.SetLimit(limit)
	for _, fn := range fns {
		all.Go(func() error { return Guard(fn) })
	}
	return all.Wait()
}

// Guard runs a function. If the function panics, Guard returns the panic as an error, so that the rest of the process
// continues.
func Guard(fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = Panicked(p)
		}
	}()
	return fn()
}

// Panicked returns a recovered panic as an error with its stack. It counts the panic for [Panics].
func Panicked(p any) *PanicError {
	panics.Add(1)
	return &PanicError{Value: p, Stack: string(debug.Stack())}
}

// PanicError is a recovered panic.
type PanicError struct {
	Value any
	Stack string
}

func (e *PanicError) Error() string { return fmt.Sprintf("panicked: %v\n%s", e.Value, e.Stack) }

var panics atomic.Int64

// Panics returns the number of panics that this process has recovered.
func Panics() int64 { return panics.Load() }
