package riverdlq_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"github.com/dlqd/dlqd/riverdlq"
)

type ChargeArgs struct {
	PaymentID string `json:"paymentId"`
	Amount    int    `json:"amount"`
}

func (ChargeArgs) Kind() string { return "charge" }

type ChargeWorker struct {
	river.WorkerDefaults[ChargeArgs]
}

func (w *ChargeWorker) Work(ctx context.Context, job *river.Job[ChargeArgs]) error {
	err := charge(ctx, job.Args.PaymentID, job.Args.Amount)
	switch {
	case errors.Is(err, errDeclined):
		return &riverdlq.Error{
			Type: "CardDeclined", Code: "51", Class: riverdlq.ClassBusiness,
			Context: map[string]any{"paymentId": job.Args.PaymentID},
			Err:     err,
		}
	case errors.Is(err, errBusy):
		return &riverdlq.Error{Type: "BankBusy", Class: riverdlq.ClassRateLimited, Err: err}
	}
	return err
}

var (
	errDeclined = errors.New("insufficient funds")
	errBusy     = errors.New("too many requests")
)

// charge stands for a request to a bank.
func charge(_ context.Context, _ string, amount int) error {
	if amount > 1000 {
		return errDeclined
	}
	return errBusy
}

// A worker returns structured errors. The class of the first error is permanent, so the middleware would cancel that
// job. River would retry the second job.
func Example() {
	worker := &ChargeWorker{}
	for _, amount := range []int{5000, 100} {
		err := worker.Work(context.Background(), &river.Job[ChargeArgs]{
			Args: ChargeArgs{PaymentID: "pay_81", Amount: amount},
		})
		var structured *riverdlq.Error
		errors.As(err, &structured)
		fmt.Printf("%v (permanent: %v)\n", err, structured.Class.Permanent())
	}
	// Output:
	// CardDeclined: insufficient funds (permanent: true)
	// BankBusy: too many requests (permanent: false)
}

// A worker returns an Error of a permanent class if running the job again cannot help.
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

// Another attempt cannot help with an error of a permanent class.
func ExampleClass_Permanent() {
	for _, class := range riverdlq.Classes() {
		if class.Permanent() {
			fmt.Println(class)
		}
	}
	// Output:
	// validation
	// malformed
	// unauthorized
	// not_found
	// business
	// code_bug
}

// A client records structured errors if its configuration has the middleware.
func ExampleNewMiddleware() {
	config := &river.Config{
		Middleware: []rivertype.Middleware{riverdlq.NewMiddleware()},
	}
	fmt.Println(len(config.Middleware))
	// Output: 1
}

// If the application measures the load of the machine, the load is recorded with each failed attempt.
func ExampleMiddleware() {
	middleware := &riverdlq.Middleware{SystemState: latestLoad}
	state, known := middleware.SystemState()
	fmt.Printf("%+v %v\n", state, known)
	// Output: {CPU:41.5 Memory:63} true
}

// latestLoad stands for a measurement that the application makes from time to time.
func latestLoad() (riverdlq.SystemState, bool) {
	return riverdlq.SystemState{CPU: 41.5, Memory: 63}, true
}

// A hook or a middleware of the application records an error that the worker does not return.
// Outside of a job, Record returns an error.
func ExampleRecord() {
	err := riverdlq.Record(context.Background(), &rivertype.JobRow{}, &riverdlq.Error{Message: "no"})
	fmt.Println(err != nil)
	// Output: true
}

type ReceiptWorker struct {
	river.WorkerDefaults[ChargeArgs]
}

func (w *ReceiptWorker) Work(ctx context.Context, job *river.Job[ChargeArgs]) error {
	if err := charge(ctx, job.Args.PaymentID, job.Args.Amount); err != nil {
		return err
	}
	_ = riverdlq.Stage(ctx, "charged") // if the receipt fails, dlqd says that the job had reached this stage
	return sendReceipt(ctx, job.Args.PaymentID)
}

// sendReceipt stands for a request to a mail server.
func sendReceipt(context.Context, string) error { return nil }

// A worker records the work that it has completed, and the middleware records the version of the program.
func ExampleStage() {
	worker := &ReceiptWorker{}
	middleware := riverdlq.NewMiddleware()
	middleware.Version = "4.2.0"
	fmt.Println(worker.Work(context.Background(), &river.Job[ChargeArgs]{Args: ChargeArgs{PaymentID: "pay_81"}}))
	// Output: too many requests
}
