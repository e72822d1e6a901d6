package riverdlq_test

import (
	"errors"
	"fmt"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/riverdlq"
)

// A worker returns an Error of a permanent class when running the job again cannot help.
func ExampleError() {
	err := &riverdlq.Error{
		Type: "CardDeclined", Code: "51", Class: riverdlq.ClassBusiness,
		Message: "insufficient funds",
		Context: map[string]any{"paymentId": "pay_81"},
		Err:     errors.New("bank answered 51"),
	}
	fmt.Println(err)
	fmt.Println("permanent:", err.Class.Permanent())
	// Output:
	// CardDeclined: insufficient funds
	// permanent: true
}

// A client records structured errors once its configuration has the middleware.
func ExampleNewMiddleware() {
	config := &river.Config{
		Middleware: []rivertype.Middleware{riverdlq.NewMiddleware()},
	}
	fmt.Println(len(config.Middleware))
	// Output: 1
}
