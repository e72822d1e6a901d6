package doctor

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"unicode"

	"github.com/dlqd/dlqd/internal/postgres"
)

const (
	// maxKinds is the maximum number of printed lines about jobs.
	maxKinds   = 30
	timeLayout = "2006-01-02 15:04 MST"
)

// Print prints the survey.
func (s *Survey) Print(w io.Writer) error {
	out := &printer{w: w}
	if s.Total == 0 {
		out.linef("River in schema %s has no jobs", s.Schema)
		return out.err
	}
	if s.MoreJobs {
		out.linef("River in schema %s has more than %s. The latest:", s.Schema, count(s.Total, "job"))
	} else {
		out.linef("River in schema %s has %s:", s.Schema, count(s.Total, "job"))
	}
	s.printJobs(out)
	s.printFailures(out)
	return out.err
}

func (s *Survey) printJobs(out *printer) {
	var seen []string // states that occur
	for _, state := range states {
		for i := range s.Jobs {
			if s.Jobs[i].States[state] > 0 {
				seen = append(seen, state)
				break
			}
		}
	}
	shown := s.Jobs[:min(len(s.Jobs), maxKinds)]
	rows := make([][]any, 1+len(shown))
	rows[0] = []any{"QUEUE", "KIND"}
	for i := range shown {
		rows[1+i] = []any{shown[i].Queue, shown[i].Kind}
	}
	for _, state := range seen {
		rows[0] = append(rows[0], strings.ToUpper(state))
		for i := range shown {
			rows[1+i] = append(rows[1+i], shown[i].States[state])
		}
	}
	out.table(rows)
	if more := len(s.Jobs) - len(shown); more > 0 {
		out.linef("  and %s", count(more, "more kind"))
	}
}

func (s *Survey) printFailures(out *printer) {
	all := &s.Failures
	if all.Count == 0 {
		out.linef("No failed job lacks a dead letter.")
		return
	}
	out.linef("%s without a dead letter, from %s to %s; %d of them had one attempt. Groups of similar failures:",
		all.count(), all.Since.UTC().Format(timeLayout), all.Until.UTC().Format(timeLayout), all.SingleAttempt)
	rows := [][]any{{"JOBS", "QUEUE", "KIND", "CLASS", "STRATEGY", "LAST", "ERROR"}}
	left := all.Count
	for _, g := range all.Groups[:min(len(all.Groups), topGroups)] {
		rows = append(rows, []any{g.Count, g.Queue, g.Kind, g.Class, g.Strategy, g.Last.UTC().Format(timeLayout), g.Message})
		left -= g.Count
	}
	out.table(rows)
	if left > 0 {
		out.linef("  and %d in %s", left, count(len(all.Groups)-topGroups, "smaller group"))
	}
}

// count returns the number of failures as text.
func (all *Failures) count() string {
	if all.More {
		return "the latest " + count(all.Count, "failure") // older jobs were not examined
	}
	return count(all.Count, "failure")
}

// Next says what follows after dlqd is attached.
type Next struct {
	Schemas postgres.Schemas
	// Observes means that River belongs to an application. dlqd then redelivers nothing automatically until an operator
	// enables it.
	Observes bool
	// Found is the survey from before the attach, or nil if there was none.
	Found *Survey
	// Backfilled is the number of failures that the backfill recorded, or nil if no backfill was requested.
	Backfilled *int
}

// Print prints what happens from now on and which command to run next.
func (n *Next) Print(w io.Writer) error {
	out := &printer{w: w}
	const backfill = "\"dlqd attach%s --backfill\" files them as entries that need manual handling (dlq_manual)."
	flags := ""
	if standard := postgres.DefaultSchemas(); n.Schemas.DLQ != standard.DLQ {
		flags += " --schema " + n.Schemas.DLQ
	}
	if n.Schemas.River != postgres.DefaultRiverSchema {
		flags += " --river-schema " + n.Schemas.River
	}
	out.linef("")
	out.linef("Next steps:")
	out.linef("- Capture is on: each job that fails from now on becomes a dead letter, " +
		"in the transaction in which it fails.")
	if n.Observes {
		out.linef("- dlqd observes: it classifies dead letters and shows what it would do with them. It redelivers none " +
			"automatically until an operator runs \"dlqd automatic on\". Operators can replay dead letters at any time.")
	} else {
		out.linef("- This River belongs to dlqd: dead letters are redelivered by their strategies.")
	}
	switch {
	case n.Backfilled != nil:
		out.linef("- Filed: %s from River's jobs. They need manual handling (dlq_manual): "+
			"dlqd redelivers none automatically.",
			count(*n.Backfilled, "failure"))
	case n.Found == nil:
		out.linef("- Not filed: failures among River's jobs. "+backfill, flags)
	case n.Found.Failures.Count > 0:
		out.linef("- Not filed: %s among River's jobs. "+backfill, n.Found.Failures.count(), flags)
	}
	out.linef("- Run next, on the same database: dlqd serve --dlq-workers --api%s", flags)
	out.linef("  It files and classifies the captured failures. \"dlqd list\" and \"dlqd show ID\" show what it would do " +
		"with each dead letter.")
	return out.err
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// printer writes until the first error and keeps that error.
type printer struct {
	w   io.Writer
	err error
}

func (p *printer) linef(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format+"\n", args...)
	}
}

// table prints rows in columns. It shortens texts of the application to one short line of printable characters, so that
// they cannot control the terminal.
func (p *printer) table(rows [][]any) {
	if p.err != nil {
		return
	}
	tabs := tabwriter.NewWriter(p.w, 0, 0, 2, ' ', 0)
	for _, row := range rows {
		cells := make([]string, len(row))
		for i, cell := range row {
			cells[i] = oneLine(fmt.Sprint(cell))
		}
		_, _ = fmt.Fprintln(tabs, "  "+strings.Join(cells, "\t"))
	}
	p.err = tabs.Flush()
}

func oneLine(text string) string {
	text, _, _ = strings.Cut(strings.TrimSpace(text), "\n")
	runes := []rune(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text))
	if len(runes) > maxMessage {
		runes = append(runes[:maxMessage-1], '…')
	}
	return string(runes)
}
