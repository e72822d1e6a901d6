package protocol

import "fmt"

// The invariants, as reports name them.
const (
	InOneEntry        = "each failure that River can still show is in exactly one entry or waits to be filed"
	FiledOnce         = "no failure is filed twice"
	ClosedStaysClosed = "after an operator closed an entry, only an operator, an undo or a newer failure redelivers " +
		"its work"
	OneRedelivery  = "at most one redelivery of an entry is in progress"
	ClosesOwnEntry = "a success closes exactly its entry"
	NotUndone      = "an operator's action that succeeded is not undone by an older fact"
	ComesToRest    = "once all other actors stop, inbox and facts become empty"
)

// Check returns the invariant that a state breaks, with details, or "" if it breaks none. It checks [FiledOnce] and
// [InOneEntry]. [Model.Apply] checks what concerns a step, and [Model.CheckQuiet] checks [ComesToRest] and that each
// success has closed its entry.
func (m *Model) Check(s *State) string {
	for _, check := range []func(*State) string{m.checkFiledOnce, m.checkInOneEntry} {
		if wrong := check(s); wrong != "" {
			return wrong
		}
	}
	return ""
}

// checkFiledOnce checks [FiledOnce].
func (m *Model) checkFiledOnce(s *State) string {
	for f := range s.NFailures {
		if in := s.Failures[f].In; in&(in-1) != 0 {
			return fmt.Sprintf("%s: failure %d of job %d is in two entries (%03b)", FiledOnce, f, s.Failures[f].Job, in)
		}
	}
	return ""
}

// checkInOneEntry checks [InOneEntry].
func (m *Model) checkInOneEntry(s *State) string {
	w := &world{State: s, rules: m.Rules}
	for i := range s.NJobs {
		j := &s.Jobs[i]
		if j.State != Discarded && j.State != Cancelled || s.Failures[j.Failure].Cancel {
			continue
		}
		f := j.Failure
		waits := w.unfiled()&bit(f) != 0 || w.isUnknown(i)
		for n := range s.NFacts {
			waits = waits || s.Facts[n].Failure == f || s.Facts[n].Job == i &&
				(s.Facts[n].Kind == Following || s.Facts[n].Kind == Retried)
		}
		// If an entry waits for the job, the sweep moves the entry.
		for e := range s.NFailures {
			waits = waits || s.Entries[e].Status == Processing && s.Entries[e].Waits == j.ID && j.Entry == e
		}
		// A redelivery's failure belongs to the entry that was redelivered.
		waits = waits || j.Entry != none && s.Entries[j.Entry].Status.exists() && s.Entries[j.Entry].Job != i
		if !waits && s.Failures[f].In == 0 && s.Failures[f].TakenBy == none && !s.Failures[f].Noted {
			return fmt.Sprintf("%s: failure %d of job %d is in no entry, and will not be filed", InOneEntry, f, i)
		}
	}
	return ""
}

// CheckQuiet starts from a state and runs facts, filing, sweep and reconciler without any other actor, until nothing
// changes. It returns the invariant that breaks on the way or at the end, or "".
func (m *Model) CheckQuiet(s State) string {
	for range 12 {
		before := s
		for _, step := range []func(*world){
			func(w *world) { w.applyFacts() },
			func(w *world) { w.file(w.unfiled()) },
			func(w *world) { w.sweep() },
			func(w *world) { w.appendUnknown(w.unknown()) },
			func(w *world) { w.findSuccesses() },
		} {
			w := begin(&s, m.Rules)
			step(w)
			if w.full {
				return ""
			}
			if w.wrong != "" {
				return w.wrong + " (after all other actors stopped)"
			}
		}
		s.normalize()
		if s == before {
			break
		}
	}
	if wrong := m.Check(&s); wrong != "" {
		return wrong + " (after all other actors stopped)"
	}
	left := 0
	for n := range s.NFacts {
		if f := &s.Facts[n]; f.Kind != Following || s.Jobs[f.Job].State != Running {
			left++
		}
	}
	if s.NInbox > 0 || left > 0 {
		return fmt.Sprintf("%s: %d inbox rows and %d facts remain", ComesToRest, s.NInbox, left)
	}
	for e := range s.NFailures {
		entry := &s.Entries[e]
		if entry.Status != Pending && entry.Status != Manual || entry.DoneTwice || entry.Acted > 0 {
			continue
		}
		// If the job resolved the entry before, it is no error that the entry is open: an operator may have replayed the
		// entry by force since then.
		if j := &s.Jobs[entry.Job]; j.State == Completed && !j.Done && entry.Completed[j.ID] == 0 {
			return fmt.Sprintf("%s: job %d has completed, but its entry %d stays open", ClosesOwnEntry, entry.Job, e)
		}
	}
	return ""
}
