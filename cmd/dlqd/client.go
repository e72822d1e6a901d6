package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/user"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/deadletter"
	"github.com/dlqd/dlqd/internal/redact"
	"github.com/dlqd/dlqd/internal/server"
	"github.com/dlqd/dlqd/internal/version"
)

// client calls the API of a running dlqd.
type client struct {
	base    string
	asJSON  bool          // print the API's answer instead of a text, in the format of output
	output  *output       // the flag --output; nil if it was not given
	timeout time.Duration // of one request; 0 stands for apiTimeout
	// tokenFile is a file with a token. There is no flag with a token as its value, because other users of the machine
	// can read the arguments of a process.
	tokenFile string
	secret    string // a token obtained by this command
	noToken   bool   // send no token, because the operation needs none
	plainHTTP bool   // allow sending a token unencrypted over the network
	// completing is set while a shell waits for values. The client then uses a stored sign-in without renewing it,
	// because a renewal waits for other processes and for the provider.
	completing bool
}

func (c *client) register(cmd *cobra.Command) {
	c.registerURL(cmd)
	(&output{client: c}).register(cmd)
}

// registerTable adds the flags of a client to a command that prints a table.
func (c *client) registerTable(cmd *cobra.Command) { c.registerNamed(cmd, "") }

// registerNamed adds the flags of a client to a command that prints a table of things with names. list and names are
// for -o name: see the fields of [output].
func (c *client) registerNamed(cmd *cobra.Command, list string, names ...string) {
	c.registerURL(cmd)
	(&output{client: c, list: list, names: names, table: true}).register(cmd)
}

func (c *client) registerURL(cmd *cobra.Command) {
	c.registerAddress(cmd)
	cmd.Flags().StringVar(&c.tokenFile, "token-file", os.Getenv("DLQD_TOKEN_FILE"),
		"file with the API token; used if $DLQD_TOKEN is empty ($DLQD_TOKEN_FILE)")
	cmd.Flags().BoolVar(&c.plainHTTP, "plain-http", os.Getenv("DLQD_PLAIN_HTTP") == "true",
		"send the token unencrypted over http to another machine ($DLQD_PLAIN_HTTP)")
}

func (c *client) registerAddress(cmd *cobra.Command) {
	defaultURL := "http://" + server.DefaultListen
	if v := os.Getenv("DLQD_API"); v != "" {
		defaultURL = v
	}
	cmd.Flags().StringVar(&c.base, "api-url", defaultURL, "address of the API, or unix:PATH ($DLQD_API)")
	cmd.Flags().Lookup("api-url").DefValue = redact.Text(defaultURL)
}

// call calls an operation and returns the answer. With --json, or --output with another format than wide, call also
// prints the answer as the API sent it, or as YAML or names. If the API answers with an error, call returns that error.
func call[In, Out any](cmd *cobra.Command, c *client, operation api.Operation[In, Out], input In) (*Out, error) {
	out, raw, err := fetch(cmd, c, operation, input)
	return out, c.printIfAsked(cmd, raw, err)
}

// printIfAsked prints the answer of a call if the flags ask for the answer itself. It returns err, the error of the
// call, or the error of printing.
func (c *client) printIfAsked(cmd *cobra.Command, answer []byte, err error) error {
	_, requested := errors.AsType[*approvalRequestedError](err)
	if c.asJSON && (err == nil || requested) {
		err = cmp.Or(err, c.printAnswer(cmd.OutOrStdout(), answer))
		c.noteNextPage(cmd.ErrOrStderr(), answer)
	}
	return err
}

// printAnswer prints an answer of the API in the format that --output names, or as JSON without --output.
func (c *client) printAnswer(w io.Writer, answer []byte) error {
	if c.output != nil {
		return c.output.print(w, answer)
	}
	_, err := w.Write(append(bytes.TrimSpace(answer), '\n'))
	return err
}

// fetch calls an operation. It returns the answer both decoded and as received.
func fetch[In, Out any](cmd *cobra.Command, c *client, operation api.Operation[In, Out],
	input In,
) (*Out, []byte, error) {
	r, err := operation.Request(&input)
	status, header, raw, err := c.exchange(cmd, r, err)
	if err != nil {
		return nil, nil, err
	}
	out, err := operation.Answer(status, header, raw)
	return out, raw, commandError(err)
}

// exchange sends the request of an operation and returns the answer. invalid is the error of building the request, or
// nil.
func (c *client) exchange(cmd *cobra.Command, r *api.Request, invalid error) (int, http.Header, []byte, error) {
	response, err := c.start(cmd, r, invalid)
	if err != nil {
		return 0, nil, nil, err
	}
	defer func() { _ = response.Body.Close() }()
	raw, err := io.ReadAll(response.Body)
	return response.StatusCode, response.Header, raw, err
}

// commandError turns an error of the API into the error that a command prints.
func commandError(err error) error {
	if problem, ok := errors.AsType[*api.Problem](err); ok {
		return &apiError{problem}
	}
	if requested, ok := errors.AsType[*api.ApprovalRequestedError](err); ok {
		return &approvalRequestedError{requested.Asked}
	}
	return err
}

// apiError is an error answer of the API. Its text names the fields of the request as the API names them, except for
// the field "all", which appears as --all.
type apiError struct{ *api.Problem }

func (e *apiError) Error() string {
	var parts []string
	if e.Detail != "validation failed" || len(e.Errors) == 0 { // these are huma's words; the mistakes follow
		parts = append(parts, e.Detail)
	}
	for _, mistake := range e.Errors {
		if strings.Contains(e.Detail, mistake.Message) {
			continue // the detail contains this message already
		}
		message := mistake.Message
		var id string
		if message == "expected length >= 1" {
			message = "is required"
		}
		if strings.HasPrefix(message, "expected string to be RFC 4122 uuid") && json.Unmarshal(mistake.Value, &id) == nil {
			message = id + " is not an id, such as " + exampleID
		}
		parts = append(parts, mistake.Location+": "+message)
	}
	return strings.ReplaceAll(strings.Join(parts, "; "), `"all": true`, "--all")
}

// exampleID is an id to show in messages and help.
const exampleID = "0199f2b1-1c7a-7d06-8a51-0a4f3f1f2b3c"

// cause returns the reason why a request got no answer. net/http and net add the request and the operation before the
// reason; cause removes both.
func cause(err error) error {
	if request, ok := errors.AsType[*url.Error](err); ok {
		err = request.Err
	}
	if operation, ok := errors.AsType[*net.OpError](err); ok {
		err = operation.Err
	}
	if call, ok := errors.AsType[*os.SyscallError](err); ok {
		err = call.Err
	}
	return err
}

// token returns the token to send, or "" for none.
func (c *client) token(ctx context.Context) (string, error) {
	if c.secret != "" || c.noToken {
		return c.secret, nil
	}
	if token := os.Getenv("DLQD_TOKEN"); token != "" {
		return token, nil
	}
	if c.tokenFile == "" {
		return c.loginToken(ctx)
	}
	raw, err := os.ReadFile(c.tokenFile)
	if err != nil {
		return "", &usageError{fmt.Errorf("--token-file: %w", err)}
	}
	return strings.TrimSpace(string(raw)), nil
}

// redirectError is returned if the server at --api-url answers with a redirect.
type redirectError struct{ to string }

func (e *redirectError) Error() string {
	return "--api-url redirects to " + e.to + "; dlqd does not follow redirects with a token. If that is the API, use " +
		"it as --api-url"
}

// refuseRedirect rejects redirects. Tokens and request bodies are therefore sent only to the address that the user
// named. The API does not redirect.
func refuseRedirect(next *http.Request, _ []*http.Request) error {
	return &redirectError{to: next.URL.Scheme + "://" + next.URL.Host}
}

// do sends the request of an operation; the caller reads the answer.
func do[In, Out any](cmd *cobra.Command, c *client, operation api.Operation[In, Out],
	input In,
) (*http.Response, error) {
	r, err := operation.Request(&input)
	return c.start(cmd, r, err)
}

// start sends the request of an operation. invalid is the error of building the request, or nil.
func (c *client) start(cmd *cobra.Command, r *api.Request, invalid error) (*http.Response, error) {
	if err := checkCommonFlags(cmd); err != nil {
		return nil, err
	}
	if invalid != nil {
		return nil, commandError(invalid)
	}
	return c.send(cmd, r)
}

func (c *client) send(cmd *cobra.Command, r *api.Request) (*http.Response, error) {
	transport := &http.Transport{}
	base := strings.TrimSuffix(c.base, "/")
	if socket, ok := strings.CutPrefix(base, "unix:"); ok {
		base = "http://dlqd"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}
	}
	var body io.Reader
	if r.Body != nil {
		body = bytes.NewReader(r.Body)
	}
	request, err := http.NewRequestWithContext(cmd.Context(), r.Method, base+r.Path, body)
	if err != nil {
		return nil, &usageError{err}
	}
	token, err := c.token(cmd.Context())
	if err != nil {
		return nil, err
	}
	if token != "" {
		if err := checkEncrypted(c.base); err != nil && !c.plainHTTP {
			return nil, &usageError{fmt.Errorf("%w (--plain-http allows it)", err)}
		}
		request.Header.Set("Authorization", "Bearer "+token)
	}
	request.Header.Set("User-Agent", "dlqd/"+version.String())
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	response, err := (&http.Client{
		Transport: transport, Timeout: cmp.Or(c.timeout, apiTimeout), CheckRedirect: refuseRedirect,
	}).Do(request)
	if redirect, ok := errors.AsType[*redirectError](err); ok {
		return nil, redirect
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w (is \"dlqd serve\" running there? --api-url sets another address)",
			redact.Text(c.base), cause(err))
	}
	return response, nil
}

// printable makes untrusted text safe for a terminal. It replaces control characters by blanks. It escapes characters
// that are invisible or change the direction of text.
func printable(text string) string {
	text = strings.ToValidUTF8(text, "\uFFFD")
	if !strings.ContainsFunc(text, isUnsafe) {
		return text
	}
	var out strings.Builder
	for _, r := range text {
		switch {
		case !isUnsafe(r):
			out.WriteRune(r)
		case unicode.Is(unicode.Cf, r) || r == '\u2028' || r == '\u2029':
			_, _ = fmt.Fprintf(&out, "\\u%04x", r)
		default:
			out.WriteByte(' ')
		}
	}
	return out.String()
}

// isUnsafe reports whether a character can control a terminal or hide text.
func isUnsafe(r rune) bool {
	return unicode.IsControl(r) || unicode.Is(unicode.Cf, r) || r == '\u2028' || r == '\u2029'
}

// printLines applies printable to each line of a text.
func printLines(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = printable(lines[i])
	}
	return strings.Join(lines, "\n")
}

// printSafef prints text that may contain untrusted parts.
func printSafef(w io.Writer, format string, args ...any) {
	_, _ = io.WriteString(w, printLines(fmt.Sprintf(format, args...)))
}

func text[T any](v *T) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v)
}

// stamp formats a time for output, in UTC.
func stamp(t time.Time) string { return t.UTC().Format(time.RFC3339) }

func stampOrNone(t *time.Time) string {
	if t == nil {
		return "-"
	}
	return stamp(*t)
}

func ago(t time.Time) string { return time.Since(t).Truncate(time.Second).String() }

func shorten(s string, most int) string {
	if runes := []rune(s); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return s
}

// actor returns the name of the user who runs the command, or "cli" if the name is unknown. The audit trail records it.
func actor() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return "cli"
}

// addActor adds the flags --actor and --note to cmd.
func addActor(cmd *cobra.Command, name, note *string) {
	cmd.Flags().StringVar(name, "actor", actor(), "name recorded as the actor")
	cmd.Flags().StringVar(note, "note", "", "reason")
}

func newList() *cobra.Command {
	var c client
	var in api.ListInput
	var view string
	cmd := &cobra.Command{
		Use:     "list [FILTER]",
		Short:   "List dead letters",
		Example: "  dlqd list 'status:manual queue:payments kind:order.* age:>2d \"timed out\"'",
		RunE: func(cmd *cobra.Command, args []string) error {
			var err error
			if in.Q, err = filterText(args); err != nil {
				return err
			}
			if view != "" {
				v, _, err := fetch(cmd, &c, api.GetView, getViewInput(view))
				if err != nil {
					return err
				}
				in.Q, in.Order = strings.TrimSpace(v.Query+" "+in.Q), cmp.Or(in.Order, v.Order)
			}
			page, err := call(cmd, &c, api.ListEntries, in)
			if err != nil || c.asJSON {
				return err
			}
			// Only entries of a source have a record.
			records := slices.ContainsFunc(page.Entries, func(e deadletter.Summary) bool { return e.Record != nil })
			header := "ID\tSTATUS\tQUEUE\tKIND\tCLASS\tTYPE\tFAILED\tERROR\tNEXT"
			if records {
				header = "ID\tSTATUS\tQUEUE\tKIND\tTOPIC\tPARTITION\tOFFSET\tNODE\tCLASS\tTYPE\tFAILED\tERROR\tNEXT"
			}
			w, row := table(cmd, header)
			for _, e := range page.Entries {
				cells := []any{e.ID, strings.TrimPrefix(string(e.Status), "dlq_"), e.Queue, e.Kind}
				switch {
				case e.Record != nil:
					cells = append(cells, e.Record.Topic, e.Record.Partition, e.Record.Offset, cmp.Or(e.Record.Node, "-"))
				case records:
					cells = append(cells, "-", "-", "-", "-")
				}
				row(append(cells, text(e.ErrorClass), text(e.ErrorType), ago(e.LastFailedAt)+" ago", text(e.ErrorMessage),
					text(e.Next))...)
			}
			printStop(cmd.ErrOrStderr(), page.AutomaticStopped)
			if err := w.Flush(); err != nil {
				return err
			}
			if len(page.Entries) == 0 {
				c.noteUnknownQueues(cmd, in.Q, in.Queue)
			}
			if page.Count != nil {
				printSafef(cmd.ErrOrStderr(), "%s%d dead letters\n", map[bool]string{true: "at least "}[page.Count.AtLeast],
					page.Count.Entries)
			}
			if page.Next == "" {
				return nil
			}
			if page.SearchedTo != nil {
				printSafef(cmd.ErrOrStderr(), "searched failures back to %s\n", stamp(*page.SearchedTo))
			}
			_, err = fmt.Fprintln(cmd.ErrOrStderr(), "more: --cursor", page.Next)
			return err
		},
	}
	c.registerNamed(cmd, "entries", "id")
	cmd.Flags().StringSliceVar(&in.Status, "status", nil, "only these states: dlq_pending, dlq_processing, dlq_manual, "+
		"dlq_returned, dlq_resolved, dlq_failed, dlq_archived")
	for _, f := range []struct {
		into       *string
		flag, help string
	}{
		{&in.Queue, "queue", "only this queue"},
		{&in.Kind, "kind", "only this kind"},
		{&in.ErrorType, "error-type", "only this error type"},
		{&in.ErrorClass, "error-class", "only this error class"},
		{&in.Source, "source", "only messages from this source"},
		{&in.After, "after", "only captured at or after this time (RFC 3339)"},
		{&in.Before, "before", "only captured before this time (RFC 3339)"},
		{&in.Order, "order", "newest or oldest, for which entries come first"},
		{&in.Cursor, "cursor", "cursor that the previous page printed"},
	} {
		cmd.Flags().StringVar(f.into, f.flag, "", f.help)
	}
	cmd.Flags().IntVar(&in.Limit, "limit", 50, "entries per page, at most 500")
	cmd.Flags().BoolVar(&in.Count, "count", false, "print the number of matching entries, up to 10,000")
	cmd.Flags().StringVar(&view, "view", "", "apply a saved view (see dlqd views)")
	return cmd
}

func newShow() *cobra.Command {
	var c client
	var reveal string
	cmd := &cobra.Command{
		Use:   "show ID",
		Short: "Show everything about a dead letter",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkID(args[0]); err != nil {
				return err
			}
			var e *api.EntryDetail
			var err error
			if entry := (api.EntryInput{ID: args[0]}); cmd.Flags().Changed("reveal") {
				e, err = call(cmd, &c, api.RevealEntry, api.RevealInput{
					EntryInput: entry, Body: api.RevealAction{Actor: actor(), Note: reveal},
				})
			} else {
				e, err = call(cmd, &c, api.GetEntry, entry)
			}
			if err != nil || c.asJSON {
				return err
			}
			printStop(cmd.ErrOrStderr(), e.AutomaticStopped)
			w, row := table(cmd, "dead letter\t"+e.ID.String())
			row("status", e.Status)
			row("queue, kind", e.Queue+", "+e.Kind)
			row("message", text(e.EventID))
			row("job", e.RiverJobID)
			row("class, rule", text(e.ErrorClass)+", "+text(e.Rule))
			row("error", text(e.ErrorType)+" "+text(e.ErrorCode))
			row("", text(e.ErrorMessage))
			if e.Destination != nil {
				row("destination", text(e.Destination)+" "+text(e.DestinationURL))
			}
			for i := range e.Published {
				row("published", e.Published[i].Place())
			}
			row("failed", stamp(e.FirstFailedAt)+" to "+stamp(e.LastFailedAt))
			row("attempts", fmt.Sprintf("%d of %d, then %d redeliveries of %d", e.RetryCount, e.MaxRetries, e.DLQRetryCount,
				e.DLQMaxRetries))
			row("strategy", text(e.Strategy))
			row("next", text(e.Next))
			row("next check", stampOrNone(e.NextRetryAt))
			row("waiting for", text(e.WaitingFor))
			if e.Checkpoint != nil {
				row("checkpoint", e.Checkpoint.String())
			}
			if e.StageReached != "" {
				row("stage reached", e.StageReached)
			}
			if e.WorkerVersion != "" {
				row("worker version", e.WorkerVersion)
			}
			row("assignee", text(e.AssignedTo))
			row("notes", text(e.Notes))
			row("event", string(e.OriginalEvent))
			if len(e.EditedEvent) > 0 {
				row("edited", string(e.EditedEvent))
			}
			if err := w.Flush(); err != nil {
				return err
			}
			w, row = table(cmd, "\nAT\tFROM\tTO\tACTOR\tREASON\tNOTE")
			for _, t := range e.Transitions {
				row(stamp(t.At), text(t.FromStatus), t.ToStatus, t.Actor, text(t.Reason), text(t.Note))
			}
			return w.Flush()
		},
	}
	c.registerNamed(cmd, "", "id")
	cmd.Flags().StringVar(&reveal, "reveal", "", "show masked values unmasked; REASON goes to the audit trail")
	return cmd
}

func (c *client) move(cmd *cobra.Command, id, name string, action *api.Action) error {
	moved, err := call(cmd, c, api.MoveEntry(name), api.EntryActionInput{EntryInput: api.EntryInput{ID: id}, Body: action})
	if err != nil || c.asJSON {
		return err
	}
	printSafef(cmd.OutOrStdout(), "%s is %s\n", moved.ID, moved.Status)
	printUndo(cmd, moved.Undo)
	return nil
}

func newSend() *cobra.Command {
	var c client
	var s api.Submission
	cmd := &cobra.Command{
		Use:     "send PAYLOAD",
		Short:   "Submit a message; - reads the payload from standard input",
		Example: `  dlqd send --queue default --kind payment.captured '{"amount": 4200}'`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if s.Kind == "" {
				return &usageError{errors.New("--kind is required, such as payment.captured")}
			}
			raw := []byte(args[0])
			if args[0] == "-" {
				var err error
				if raw, err = io.ReadAll(cmd.InOrStdin()); err != nil {
					return err
				}
			}
			if !json.Valid(raw) {
				return &usageError{errors.New("the payload is not valid JSON")}
			}
			s.Payload = raw
			body, err := s.Encode()
			if err != nil {
				return err
			}
			accepted, err := call(cmd, &c, api.SubmitMessage, api.SubmitInput{RawBody: body})
			if err != nil || c.asJSON {
				return err
			}
			verb := "accepted"
			if accepted.Duplicate {
				verb = "a duplicate"
			}
			printSafef(cmd.OutOrStdout(), "message %s is %s, as job %d\n", accepted.MessageID, verb, accepted.JobID)
			return nil
		},
	}
	c.register(cmd)
	flags := cmd.Flags()
	flags.StringVar(&s.MessageID, "message-id", "", "message id; generated if empty")
	flags.StringVar(&s.Queue, "queue", "default", "queue of the message")
	flags.StringVar(&s.Kind, "kind", "", "kind of message, such as payment.captured")
	flags.StringVar(&s.Source, "source", "", "source of the message")
	flags.StringVar(&s.SubscriberID, "subscriber", "", "subscriber that the message concerns")
	flags.IntVar(&s.Priority, "priority", 0, "priority, 1 (most urgent) to 4")
	flags.StringSliceVar(&s.Tags, "tag", nil, "tags of the message")
	flags.StringVar(&s.ScheduledAt, "at", "", "earliest delivery time (RFC 3339)")
	flags.StringVar(&s.ExpiresAt, "expires-at", "", "time after which the message is out of date (RFC 3339)")
	return cmd
}
