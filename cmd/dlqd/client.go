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
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/danielgtaylor/huma/v2"
	"github.com/spf13/cobra"

	"github.com/dlqd/dlqd/internal/api"
	"github.com/dlqd/dlqd/internal/redact"
	"github.com/dlqd/dlqd/internal/server"
)

// client calls the API of a running dlqd.
type client struct {
	base    string
	asJSON  bool
	timeout time.Duration // of one request; 0 means apiTimeout
	// tokenFile is a file with a token. There is no flag for the token itself, because other users of
	// the machine can read arguments.
	tokenFile string
	secret    string // a token obtained by this command
	noToken   bool   // send no token: the operation needs none
	plainHTTP bool   // allow sending a token unencrypted over the network
}

func (c *client) register(cmd *cobra.Command) {
	c.registerURL(cmd)
	cmd.Flags().BoolVar(&c.asJSON, "json", false, "print the API's response as JSON")
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

// call sends a request and decodes the answer into out, or prints the answer unchanged with --json.
// An error answer becomes the error.
func (c *client) call(cmd *cobra.Command, method, path string, in, out any) error {
	raw, err := c.raw(cmd, method, path, in)
	if err != nil {
		return err
	}
	if c.asJSON {
		_, err := cmd.OutOrStdout().Write(append(bytes.TrimSpace(raw), '\n'))
		return err
	}
	return json.Unmarshal(raw, out)
}

// raw sends a request and returns the answer.
func (c *client) raw(cmd *cobra.Command, method, path string, in any) ([]byte, error) {
	var body io.Reader
	if in != nil {
		raw, asTyped := in.([]byte)
		if !asTyped {
			var err error
			if raw, err = json.Marshal(in); err != nil {
				return nil, err
			}
		}
		body = bytes.NewReader(raw)
	}
	response, err := c.do(cmd, method, path, body)
	if err != nil {
		return nil, err
	}
	defer func() { _ = response.Body.Close() }()
	answer, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusAccepted || !strings.HasPrefix(response.Header.Get("Location"),
		api.ApprovalsPath) {
		return answer, err
	}
	var requested api.Asked
	if err := json.Unmarshal(answer, &requested); err != nil || requested.Approval == nil {
		return nil, fmt.Errorf("approval is needed, but the API's response names no request for approval: %w", err)
	}
	if c.asJSON {
		_, _ = cmd.OutOrStdout().Write(append(bytes.TrimSpace(answer), '\n'))
	}
	return nil, &approvalRequestedError{requested.Approval}
}

// apiError is an error answer of the API.
type apiError struct {
	status  int
	problem huma.ErrorModel
}

func (e *apiError) Error() string {
	parts := make([]string, 1, 1+len(e.problem.Errors))
	parts[0] = e.problem.Detail
	for _, detail := range e.problem.Errors {
		parts = append(parts, detail.Location+": "+detail.Message)
	}
	return strings.ReplaceAll(strings.Join(parts, "; "), `"all": true`, "--all")
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

// withPayload encodes a request together with a payload exactly as it was typed, which
// encoding/json would reformat. The request must encode to an object with at least one field.
func withPayload(request any, payload json.RawMessage) ([]byte, error) {
	raw, err := json.Marshal(request)
	if err != nil || payload == nil {
		return raw, err
	}
	return slices.Concat(raw[:len(raw)-1], []byte(`,"payload":`), payload, []byte(`}`)), nil
}

// redirectError is returned if the API's address redirects.
type redirectError struct{ to string }

func (e *redirectError) Error() string {
	return "--api-url redirects to " + e.to + "; dlqd does not follow redirects with a token. If that is the API, use " +
		"it as --api-url"
}

// refuseRedirect rejects redirects, so that tokens and request bodies are sent only to the address
// that the user named. The API itself does not redirect.
func refuseRedirect(next *http.Request, _ []*http.Request) error {
	return &redirectError{to: next.URL.Scheme + "://" + next.URL.Host}
}

// do sends a request; the caller reads the answer. An error answer becomes the error.
func (c *client) do(cmd *cobra.Command, method, path string, body io.Reader) (*http.Response, error) {
	transport := &http.Transport{}
	base := strings.TrimSuffix(c.base, "/")
	if socket, ok := strings.CutPrefix(base, "unix:"); ok {
		base = "http://dlqd"
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}
	}
	request, err := http.NewRequestWithContext(cmd.Context(), method, base+path, body)
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
	request.Header.Set("User-Agent", "dlqd/"+api.Version)
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
		return nil, fmt.Errorf("%w (is \"dlqd serve\" running there? --api-url sets another address)", err)
	}
	if response.StatusCode < 400 {
		return response, nil
	}
	defer func() { _ = response.Body.Close() }()
	raw, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, err
	}
	refused := &apiError{status: response.StatusCode}
	if json.Unmarshal(raw, &refused.problem) != nil || refused.problem.Detail == "" {
		return nil, fmt.Errorf("the API answered %s", response.Status)
	}
	return nil, refused
}

func table(cmd *cobra.Command, header string) (w *tabwriter.Writer, row func(cells ...any)) {
	w = tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, header)
	return w, func(cells ...any) {
		texts := make([]string, len(cells))
		for i, cell := range cells {
			texts[i] = printable(fmt.Sprint(cell))
		}
		_, _ = fmt.Fprintln(w, strings.Join(texts, "\t"))
	}
}

// printable makes untrusted text safe for a terminal. Control characters become blanks; characters
// that are invisible or change the direction of text become escapes.
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

// stamp formats times in output.
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

// actor returns the name of the user who runs the command, for the audit trail.
func actor() string {
	if u, err := user.Current(); err == nil {
		return u.Username
	}
	return "cli"
}

func newList() *cobra.Command {
	var c client
	query := url.Values{}
	var status []string
	filters := map[string]*string{}
	var limit int
	var count bool
	var view string
	cmd := &cobra.Command{
		Use:     "list [FILTER]",
		Short:   "List dead letters",
		Example: "  dlqd list 'status:manual queue:payments kind:order.* age:>2d \"timed out\"'",
		RunE: func(cmd *cobra.Command, args []string) error {
			q, err := filterText(args)
			if err != nil {
				return err
			}
			if view != "" {
				if err := c.applyView(cmd, view, query); err != nil {
					return err
				}
				q = strings.TrimSpace(query.Get("q") + " " + q)
			}
			if q != "" {
				query.Set("q", q)
			}
			if len(status) > 0 {
				query.Set("status", strings.Join(status, ","))
			}
			for name, value := range filters {
				if *value != "" {
					query.Set(name, *value)
				}
			}
			query.Set("limit", strconv.Itoa(limit))
			if count {
				query.Set("count", "true")
			}
			var page api.EntryPage
			if err := c.call(cmd, http.MethodGet, "/api/dlq/entries?"+query.Encode(), nil, &page); err != nil || c.asJSON {
				return err
			}
			w, row := table(cmd, "ID\tSTATUS\tQUEUE\tKIND\tCLASS\tTYPE\tFAILED\tERROR\tNEXT")
			for _, e := range page.Entries {
				row(e.ID, strings.TrimPrefix(string(e.Status), "dlq_"), e.Queue, e.Kind, text(e.ErrorClass), text(e.ErrorType),
					ago(e.LastFailedAt)+" ago", shorten(text(e.ErrorMessage), 60), text(e.Next))
			}
			printStop(cmd.ErrOrStderr(), page.AutomaticStopped)
			if err := w.Flush(); err != nil {
				return err
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
	c.register(cmd)
	cmd.Flags().StringSliceVar(&status, "status", nil, "only these states: dlq_pending, dlq_processing, dlq_manual, "+
		"dlq_resolved, dlq_failed, dlq_archived")
	for _, f := range []struct{ flag, name, help string }{
		{"queue", "queue", "only this queue"},
		{"kind", "kind", "only this kind"},
		{"error-type", "errorType", "only this error type"},
		{"error-class", "errorClass", "only this error class"},
		{"source", "source", "only messages from this source"},
		{"after", "after", "only captured at or after this time (RFC 3339)"},
		{"before", "before", "only captured before this time (RFC 3339)"},
		{"order", "order", "newest or oldest, for which entries come first"},
		{"cursor", "cursor", "cursor that the previous page printed"},
	} {
		filters[f.name] = cmd.Flags().String(f.flag, "", f.help)
	}
	cmd.Flags().IntVar(&limit, "limit", 50, "entries per page, at most 500")
	cmd.Flags().BoolVar(&count, "count", false, "print the number of matching entries, up to 10,000")
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
			var e api.EntryDetail
			method, path, body := http.MethodGet, "/api/dlq/entries/"+url.PathEscape(args[0]), any(nil)
			if cmd.Flags().Changed("reveal") {
				method, path, body = http.MethodPost, path+"/reveal", api.RevealAction{Actor: actor(), Note: reveal}
			}
			if err := c.call(cmd, method, path, body, &e); err != nil || c.asJSON {
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
	c.register(cmd)
	cmd.Flags().StringVar(&reveal, "reveal", "", "show masked values unmasked; REASON goes to the audit trail")
	return cmd
}

func (c *client) move(cmd *cobra.Command, id, name string, action any) error {
	var moved api.Moved
	if err := c.call(cmd, http.MethodPost, "/api/dlq/entries/"+url.PathEscape(id)+"/"+name, action, &moved); err != nil ||
		c.asJSON {
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
			body, err := withPayload(struct {
				api.Submission

				Payload json.RawMessage `json:"payload,omitempty"` // as it was typed
			}{Submission: s}, raw)
			if err != nil {
				return err
			}
			var accepted api.Accepted
			if err := c.call(cmd, http.MethodPost, "/api/messages", body, &accepted); err != nil || c.asJSON {
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
	return cmd
}
