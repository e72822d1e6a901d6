package strategy_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/stretchr/testify/require"

	"github.com/dlqd/dlqd/internal/delivery"
	"github.com/dlqd/dlqd/internal/message"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/policy/policytest"
	"github.com/dlqd/dlqd/internal/riverdlq"
	"github.com/dlqd/dlqd/internal/strategy"
)

// realError is a line of testdata/errors.jsonl, with the labels of two readers.
type realError struct {
	ID     string `json:"id"`
	How    string `json:"how"`
	Error  string `json:"error"`
	Type   string `json:"type"`
	Code   string `json:"code"`
	Status int    `json:"status"`

	classes [2]riverdlq.Class
	facts   strategy.Facts
}

// heldOut reports whether an error is reserved for measuring. The table must not be fitted to such errors.
func (e *realError) heldOut() bool { return sha256.Sum256([]byte(e.ID))[0] < 85 }

// answer parses the text of the error as an HTTP response: a status line, headers, an empty line and a body.
func (e *realError) answer() *delivery.Answer {
	head, body, _ := strings.Cut(e.Error, "\n\n")
	_, lines, _ := strings.Cut(head, "\n")
	headers := map[string]string{}
	for line := range strings.Lines(lines) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		headers[name] = strings.TrimSpace(value)
	}
	return &delivery.Answer{Status: e.Status, Headers: headers, Body: body}
}

func jsonLines[T any](tb testing.TB, name string) []T {
	tb.Helper()
	raw, err := os.ReadFile(filepath.Join("testdata", name))
	require.NoError(tb, err)
	var rows []T
	for decoder := json.NewDecoder(bytes.NewReader(raw)); decoder.More(); {
		var row T
		require.NoError(tb, decoder.Decode(&row))
		rows = append(rows, row)
	}
	return rows
}

// realErrors reads the corpus. Each error has the facts that rules would get. For an HTTP response, these are the facts
// of a delivery.
func realErrors(tb testing.TB) []realError {
	tb.Helper()
	labels := map[string][2]riverdlq.Class{}
	for _, l := range jsonLines[struct {
		ID   string         `json:"id"`
		A, B riverdlq.Class //nolint:tagliatelle // read without regard to case
	}](tb, "errors.labels.jsonl") {
		labels[l.ID] = [2]riverdlq.Class{l.A, l.B}
	}
	p := policytest.Load(tb, nil)
	destination := &policy.Destination{Name: "receiver", URL: "https://receiver.example/hook"}
	errors := jsonLines[realError](tb, "errors.jsonl")
	for i := range errors {
		e := &errors[i]
		e.classes = labels[e.ID]
		require.NotEmpty(tb, e.classes[0], e.ID)
		// If the body of a successful response has an error, the worker of an application reports it.
		if e.How == "http" && e.Status >= 300 {
			m := &message.Message{MessageID: e.ID}
			facts, err := delivery.FailureOf(tb.Context(), &p.Data, &p.Defaults, destination, m, e.answer())
			require.NoError(tb, err, e.ID)
			e.facts = facts
			continue
		}
		e.facts = strategy.Facts{Type: e.Type, Code: e.Code, Message: e.Error}
		if e.Status > 0 {
			e.facts.Context = fmt.Appendf(nil, `{"status": %d}`, e.Status)
		}
	}
	return errors
}

// isRedelivered reports whether entries of a class are redelivered without an operator.
func isRedelivered(class riverdlq.Class) bool {
	return class == riverdlq.ClassTransient || class == riverdlq.ClassRateLimited || class == riverdlq.ClassOutage
}

// score counts how well errors are classified. If the labels of the two readers differ, both count as right: a
// redelivery is correct if one label allows it, and required only if both labels do.
type score struct {
	all, unknown, right     int
	sent, sentCorrectly     int
	mustBeSent, mustAndSent int
	classes                 map[riverdlq.Class]*classScore
}

type classScore struct{ labelled, judged, right int }

// add counts an error, and reports whether its class is right.
func (s *score) add(labels [2]riverdlq.Class, judged riverdlq.Class) bool {
	label := labels[0]
	if labels[1] == judged {
		label = judged
	}
	s.all++
	s.classes[label].labelled++
	s.classes[judged].judged++
	if label == judged {
		s.right++
		s.classes[judged].right++
	}
	if judged == riverdlq.ClassUnknown {
		s.unknown++
	}
	if isRedelivered(judged) {
		s.sent++
		if isRedelivered(labels[0]) || isRedelivered(labels[1]) {
			s.sentCorrectly++
		}
	}
	if isRedelivered(labels[0]) && isRedelivered(labels[1]) {
		s.mustBeSent++
		if isRedelivered(judged) {
			s.mustAndSent++
		}
	}
	return label == judged
}

func share(part, of int) float64 { return float64(part) / float64(max(of, 1)) }

func (s *score) precision() float64    { return share(s.sentCorrectly, s.sent) }
func (s *score) recall() float64       { return share(s.mustAndSent, s.mustBeSent) }
func (s *score) unknownShare() float64 { return share(s.unknown, s.all) }

func (s *score) String() string {
	var out strings.Builder
	_, _ = fmt.Fprintf(&out, "%d errors, %d in the right class (%.3f)\n", s.all, s.right, share(s.right, s.all))
	_, _ = fmt.Fprintf(&out, "redelivered automatically: correctly %d of %d (precision %.3f), ",
		s.sentCorrectly, s.sent, s.precision())
	_, _ = fmt.Fprintf(&out, "found %d of %d (recall %.3f)\n", s.mustAndSent, s.mustBeSent, s.recall())
	_, _ = fmt.Fprintf(&out, "unknown: %d (%.3f)\n", s.unknown, s.unknownShare())
	w := tabwriter.NewWriter(&out, 0, 8, 2, ' ', tabwriter.AlignRight)
	_, _ = fmt.Fprintln(w, "class\tlabelled\tjudged\tright\tprecision\trecall\t")
	for _, name := range riverdlq.Classes() {
		c := s.classes[name]
		_, _ = fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%.3f\t%.3f\t\n",
			name, c.labelled, c.judged, c.right, share(c.right, c.judged), share(c.right, c.labelled))
	}
	_ = w.Flush()
	return out.String()
}

// The built-in table is fitted to two thirds of the corpus. For the other third, the test prints only numbers and no
// errors. If the table was fitted to these errors, too, the test could no longer measure how well the table classifies
// new errors.
func TestCorpus_PrecisionAndRecall(t *testing.T) {
	t.Parallel()
	for name, heldOut := range map[string]bool{"fitted": false, "heldOut": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := score{classes: map[riverdlq.Class]*classScore{}}
			for _, class := range riverdlq.Classes() {
				s.classes[class] = &classScore{}
			}
			for _, e := range realErrors(t) {
				if e.heldOut() != heldOut {
					continue
				}
				class, rule := strategy.Classify(e.facts)
				if right := s.add(e.classes, class); !right && !heldOut {
					t.Logf("%s, labelled %v, is %s (%s)", e.ID, e.classes, class, rule)
				}
			}
			t.Log("\n" + s.String())
			require.GreaterOrEqual(t, s.precision(), 0.98, "share of redelivered errors that may be redelivered")
			require.GreaterOrEqual(t, s.recall(), 0.90, "share of errors to redeliver that are redelivered")
			require.LessOrEqual(t, s.unknownShare(), 0.15)
		})
	}
}

func BenchmarkClassify(b *testing.B) {
	errors := realErrors(b)
	b.Run("corpus", func(b *testing.B) {
		for i := 0; b.Loop(); i++ {
			strategy.Classify(errors[i%len(errors)].facts)
		}
	})
	for name, facts := range map[string]strategy.Facts{
		"status": {
			Context: json.RawMessage(`{"status": 503}`), Code: "503", Type: "HTTP_503",
			Message: "503 Service Unavailable",
		},
		"unknown": {Message: "the moon is in the wrong house"},
		"8KiB":    {Message: strings.Repeat("the moon is in the wrong house: ", 256)},
		"hostile": {
			Type: strings.Repeat("aB", 120), Code: strings.Repeat("a_", 120),
			Message: strings.Repeat("circuit breaker ", 512),
		},
		"names": {Message: strings.Repeat("aBcDeFgHiError ", 512)},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				strategy.Classify(facts)
			}
		})
	}
}
