package main

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/approval"
)

// approvalRequestedError is returned for an operation that the API did not carry out because the operation needs
// approval. Either the API made a request for approval, or an equal request waits already.
type approvalRequestedError struct{ api.Asked }

func (e *approvalRequestedError) Error() string {
	a := e.Approval
	already := ""
	if e.Existing {
		already = fmt.Sprintf("%s requested the same at %s, and no second request was made. ", a.Actor,
			stamp(a.RequestedAt))
	}
	return fmt.Sprintf("approval requires a second person; nothing was changed yet. %sRequest %s for %s "+
		"expires at %s. "+
		"To approve, another person runs: dlqd approvals approve %s --expect %d", already, a.ID, affected(a, a.Entries),
		stamp(a.ExpiresAt), a.ID, a.Entries)
}

// affected names the job or the n dead letters that a request for approval asks to change.
func affected(a *approval.Approval, n int64) string {
	switch {
	case a.Job() != 0:
		return fmt.Sprintf("job %d", a.Job())
	case n == 1:
		return "1 dead letter"
	}
	return fmt.Sprintf("%d dead letters", n)
}

// countFlag is an optional flag for a number of dead letters. If the flag is not given, the variable that it sets stays
// nil.
type countFlag struct{ into **int64 }

func (c countFlag) String() string { return "" }
func (c countFlag) Type() string   { return "int" }
func (c countFlag) Set(text string) error {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return errors.New("must be a number of dead letters")
	}
	*c.into = &n
	return nil
}

func registerExpect(cmd *cobra.Command, into **int64) {
	cmd.Flags().Var(countFlag{into}, "expect",
		"expected number of matching dead letters: rejected if it differs. Required for many (at a terminal, the "+
			"command asks)")
}

// callConfirmed calls an operation that may affect many dead letters. expect is the field of input with the expected
// number. If the API requires that number and the user gave none, callConfirmed asks the user at the terminal to type
// it, stores it in expect, and calls the operation again.
func callConfirmed[In, Out any](cmd *cobra.Command, c *client, operation api.Operation[In, Out], input *In,
	expect **int64,
) (*Out, error) {
	out, err := call(cmd, c, operation, *input)
	refused, ok := errors.AsType[*apiError](err)
	if !ok || refused.Status != http.StatusUnprocessableEntity || *expect != nil {
		return out, err
	}
	for _, e := range refused.Errors {
		n, notNumber := strconv.ParseInt(string(e.Value), 10, 64)
		if e.Location != "body.expect" || notNumber != nil {
			continue
		}
		if *expect, err = askNumber(cmd, n); err != nil {
			return nil, err
		}
		return call(cmd, c, operation, *input)
	}
	return out, err
}

// askNumber asks the user at the terminal to type the number of dead letters. It returns a usage error if standard
// input is not a terminal or the user types another number.
func askNumber(cmd *cobra.Command, n int64) (*int64, error) {
	refusal := &usageError{fmt.Errorf("%d dead letters match; nothing was changed: confirm with --expect %d", n, n)}
	in, ok := cmd.InOrStdin().(*os.File)
	if !ok {
		return nil, refusal
	}
	if info, err := in.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return nil, refusal
	}
	printSafef(cmd.ErrOrStderr(), "%d dead letters match. Type this number to continue: ", n)
	line, _ := bufio.NewReader(in).ReadString('\n')
	if strings.TrimSpace(line) != strconv.FormatInt(n, 10) {
		return nil, refusal
	}
	return &n, nil
}

func newApprovals() *cobra.Command {
	cmd := &cobra.Command{
		Use: "approvals", Short: "List requests for approval; approve, refuse or withdraw them", Args: cobra.NoArgs,
	}
	var c client
	var state string
	list := &cobra.Command{
		Use: "list", Short: "List requests for approval, newest first", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			out, err := call(cmd, &c, api.ListApprovals, api.ApprovalsInput{State: state, Limit: 200})
			if err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "ID\tSTATE\tACTION\tENTRIES\tREQUESTED BY\tON BEHALF OF\tREQUESTED\tEXPIRES\tDECIDED BY\tNOTE")
			for _, a := range out.Approvals {
				row(a.ID, a.State, a.Do(), a.Entries, a.Actor, text(a.OnBehalfOf), stamp(a.RequestedAt), stamp(a.ExpiresAt),
					text(a.DecidedBy), a.Note)
			}
			return w.Flush()
		},
	}
	addDefaultList(cmd, list, &c, "approvals", "id")
	for _, f := range []*cobra.Command{cmd, list} {
		f.Flags().StringVar(&state, "state", "", "only in this state: requested, approved, done, failed, refused, expired "+
			"or withdrawn")
	}
	cmd.AddCommand(newDecision("show", "Show a request for approval and its outcome"),
		newDecision("approve", "Approve another person's request"), newDecision("refuse", "Refuse a request"),
		newDecision("withdraw", "Withdraw your own request"))
	return cmd
}

// newDecision returns the command that shows, approves, refuses or withdraws a request for approval. The command does
// not send the user's name: the API knows from the authentication who decides.
func newDecision(verb, short string) *cobra.Command {
	var c client
	var expect *int64
	var note string
	cmd := &cobra.Command{
		Use: verb + " ID", Short: short, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			in, action := api.ApprovalInput{ID: args[0]}, api.Action{Note: note}
			switch verb {
			case "show":
				a, err := call(cmd, &c, api.GetApproval, api.GetApprovalInput{ApprovalInput: in})
				if err != nil || c.asJSON {
					return err
				}
				return printApproval(cmd, a)
			case "approve":
				return approve(cmd, &c, in, action, expect)
			default:
				operation := api.Refuse
				if verb == "withdraw" {
					operation = api.Withdraw
				}
				a, err := call(cmd, &c, operation, api.DecisionInput{ApprovalInput: in, Body: &action})
				if err != nil || c.asJSON {
					return err
				}
				printSafef(cmd.OutOrStdout(), "approval %s is %s\n", a.ID, a.State)
				return nil
			}
		},
	}
	if verb == "show" {
		c.registerNamed(cmd, "", "id")
	} else {
		c.register(cmd)
	}
	if verb == "approve" {
		cmd.Flags().Var(countFlag{&expect}, "expect",
			"number of dead letters that you approve: rejected if more match now (at a terminal, the command asks)")
	}
	if verb != "show" {
		cmd.Flags().StringVar(&note, "note", "", "reason")
	}
	return cmd
}

// approve approves a request that changes at most expect dead letters. If the request would change more dead letters
// now, the API refuses the approval. If expect is nil, approve asks the user for the number.
func approve(cmd *cobra.Command, c *client, in api.ApprovalInput, action api.Action, expect *int64) error {
	if expect == nil {
		a, _, err := fetch(cmd, c, api.GetApproval, api.GetApprovalInput{ApprovalInput: in})
		if err != nil {
			return err
		}
		if !c.asJSON {
			if err := printApproval(cmd, a); err != nil {
				return err
			}
		}
		if expect, err = askNumber(cmd, a.Entries); err != nil {
			return err
		}
	}
	a, err := call(cmd, c, api.Approve, api.ApproveInput{
		ApprovalInput: in, Body: api.ApproveAction{Action: action, Expect: *expect},
	})
	if err != nil || c.asJSON {
		return err
	}
	printSafef(cmd.OutOrStdout(), "approved %s: %s; dlqd carries it out. To see the outcome: dlqd "+
		"approvals show %s\n", a.ID, affected(a, *cmp.Or(a.Frozen, expect)), a.ID)
	return nil
}

func printApproval(cmd *cobra.Command, a *approval.Approval) error {
	w, row := table(cmd, "approval\t"+a.ID.String())
	row("state", a.State)
	row("action", a.Do())
	row("request", string(a.Request))
	if a.Job() != 0 {
		row("job", a.Job())
	} else {
		row("dead letters", a.Entries)
	}
	row("by queue", string(a.ByQueue))
	for _, text := range a.SkipTexts() {
		row("skips", text)
	}
	row("requested by", a.Actor)
	row("on behalf of", text(a.OnBehalfOf))
	row("note", a.Note)
	row("requested", stamp(a.RequestedAt)+", expires "+stamp(a.ExpiresAt))
	if a.DecidedBy != nil {
		row("decided by", *a.DecidedBy+", "+stampOrNone(a.DecidedAt)+", "+a.Decision)
	}
	if a.Frozen != nil {
		row("frozen, changed", fmt.Sprintf("%d, %s", *a.Frozen, text(a.Changed)))
	}
	if a.Outcome != nil {
		row(map[string]string{approval.Replay: "replay run", approval.Erase: "erasure"}[a.Operation], *a.Outcome)
	}
	if a.Problem != "" {
		row("problem", a.Problem)
	}
	return w.Flush()
}
