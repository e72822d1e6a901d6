package protocol

import (
	"fmt"
	"iter"
)

// Bounds limit the steps that could otherwise repeat without end.
type Bounds struct {
	Jobs       int8 // inserted by the application
	Failures   int8 // ends of jobs other than success
	Workers    int8
	Moves      int8 // actions of the operator
	Retries    int8 // of jobs, outside dlqd
	Misses     int8 // ends and retries of jobs that capture skips
	Deletes    int8 // of jobs; a reused id counts, too
	Attempts   int8 // attempts that fail and that River retries
	Sent       int8 // redeliveries
	Isolated   int8 // ends in SERIALIZABLE transactions
	Lost       int8 // marks that an application removes from a job's metadata
	Keys       bool // some of the application's jobs have a unique key, which is the same for all
	Sequential bool // no races: no other actor moves while the inbox has a row, a fact waits or dlqd is in a step
}

// Model is the protocol within bounds.
type Model struct {
	Rules  Rules
	Bounds Bounds
}

// Rule is a kind of step.
type Rule int8

// The rules: see docs/protocol.md.
const (
	Insert Rule = iota
	InsertKeyed
	InsertMarked
	StartJob
	Complete
	Fail
	FailCancel
	Attempt
	Schedule
	CancelJob
	RetryJob
	DeleteJob
	ReuseID
	RemoveMark
	ReadInbox
	File
	FileParked
	Claim
	ReadUndecided
	Decide
	Park
	ApplyFacts
	Scan
	Append
	FindSuccesses
	Sweep
	Discard
	ResolveEntry
	Replay
	Force
	Reopen
	Undo
	Delete
	CrashWorker
	CrashReconciler
	nRules
)

var ruleNames = [nRules]string{
	"insert", "insert with a unique key", "insert with a copied mark", "start", "complete", "fail",
	"cancel itself", "fail, to be retried", "schedule", "cancel by an operator", "retry outside dlqd",
	"delete job", "reuse id", "remove mark from metadata", "worker reads the inbox", "worker files",
	"worker files, parked", "worker redelivers", "worker reads undecided", "worker decides",
	"worker parks", "apply facts", "reconciler reads", "reconciler appends", "find successes",
	"sweep", "discard", "resolve", "replay", "replay with force", "reopen", "undo",
	"delete entry", "worker dies", "reconciler dies",
}

// AllRules returns all rules.
func AllRules() iter.Seq[Rule] {
	return func(yield func(Rule) bool) {
		for r := range nRules {
			if !yield(r) {
				return
			}
		}
	}
}

func (r Rule) String() string { return ruleNames[r] }

// Step is the application of a rule to a job, an entry or a worker.
type Step struct {
	Rule    Rule
	On      int8
	Capture Capture
}

func (s Step) String() string {
	text := s.Rule.String()
	switch {
	case s.Rule <= InsertKeyed || s.Rule == ReadInbox || s.Rule == ReadUndecided || s.Rule == ApplyFacts ||
		s.Rule >= Scan && s.Rule <= Sweep || s.Rule == CrashReconciler:
	case s.Rule == InsertMarked:
		text += fmt.Sprintf(" of entry %d", s.On)
	case s.Rule <= RemoveMark:
		text += fmt.Sprintf(", job %d", s.On)
	case s.Rule >= Discard && s.Rule <= Delete || s.Rule == Claim:
		text += fmt.Sprintf(", entry %d", s.On)
	default:
		text += fmt.Sprintf(", worker %d", s.On)
	}
	switch s.Capture {
	case Captures:
	case Misses:
		text += " (capture skips it)"
	case Serializable:
		text += " (in a SERIALIZABLE transaction)"
	}
	return text
}

// Steps calls fn with each step that is possible in s.
func (m *Model) Steps(s *State, fn func(Step)) { //nolint:gocognit,maintidx // one table of the possible steps
	b := &m.Bounds
	if b.Sequential && (s.NInbox > 0 || s.NFacts > 0 || s.Workers[0].Doing != Idle || s.Scanning) {
		take := fn
		fn = func(step Step) {
			if step.Rule >= ReadInbox && step.Rule <= Append {
				take(step)
			}
		}
	}
	w := &world{State: s, rules: m.Rules}
	holder := w.holder()
	captured := func(rule Rule, on int8, reads bool) {
		fn(Step{rule, on, Captures})
		if s.Misses < b.Misses {
			fn(Step{rule, on, Misses})
		}
		if reads && s.Isolated < b.Isolated {
			fn(Step{rule, on, Serializable})
		}
	}
	room := s.NFailures < b.Failures
	if s.Inserted < b.Jobs && s.NJobs < maxJobs {
		fn(Step{Rule: Insert})
		if b.Keys && holder == none {
			fn(Step{Rule: InsertKeyed})
		}
		for e := range s.NFailures {
			if s.Entries[e].Status.exists() {
				fn(Step{Rule: InsertMarked, On: e})
			}
		}
	}
	for i := range s.NJobs {
		j := &s.Jobs[i]
		switch j.State { //nolint:exhaustive // the others are left
		case Available:
			fn(Step{Rule: StartJob, On: i})
		case Running:
			captured(Complete, i, j.Mark != none)
			if room {
				reads := j.Mark != none || j.Errors > 0
				captured(Fail, i, reads)
				captured(FailCancel, i, false)
			}
			if s.Attempts < b.Attempts {
				fn(Step{Rule: Attempt, On: i})
			}
		case Retryable:
			fn(Step{Rule: Schedule, On: i})
		}
		if j.Mark != none && s.Lost < b.Lost && !j.State.ended() {
			fn(Step{Rule: RemoveMark, On: i})
		}
		if j.State.waits() && room && s.Moves < b.Moves {
			captured(CancelJob, i, false)
		}
		if j.State.ended() && s.Retries < b.Retries && (!j.Keyed || holder == none || holder == i) {
			captured(RetryJob, i, false)
		}
		if j.State != Gone && j.State != Running && s.Deletes < b.Deletes {
			fn(Step{Rule: DeleteJob, On: i})
		}
		if j.State == Gone && j.Of == none && s.Deletes < b.Deletes && s.NJobs < maxJobs && w.live(j.ID) == none {
			fn(Step{Rule: ReuseID, On: i})
		}
	}
	for n := range b.Workers {
		switch s.Workers[n].Doing {
		case Idle:
			if n > 0 && s.Workers[n-1].Doing == Idle {
				break // idle workers are interchangeable
			}
			if s.NInbox > 0 {
				fn(Step{Rule: ReadInbox, On: n})
			}
			for e := range s.NFailures {
				if s.Entries[e].Status == Pending && s.Entries[e].Decided && s.Sent < b.Sent {
					fn(Step{Rule: Claim, On: e})
				}
			}
			if w.undecided() != 0 {
				fn(Step{Rule: ReadUndecided, On: n})
			}
		case Files:
			fn(Step{Rule: File, On: n})
			fn(Step{Rule: FileParked, On: n})
			fn(Step{Rule: CrashWorker, On: n})
		case Decides:
			fn(Step{Rule: Decide, On: n})
			fn(Step{Rule: Park, On: n})
			fn(Step{Rule: CrashWorker, On: n})
		}
	}
	if s.NFacts > 0 {
		fn(Step{Rule: ApplyFacts})
	}
	if s.Scanning {
		fn(Step{Rule: Append})
		fn(Step{Rule: CrashReconciler})
	} else if w.unknown() != 0 {
		fn(Step{Rule: Scan})
	}
	fn(Step{Rule: FindSuccesses})
	fn(Step{Rule: Sweep})
	if s.Moves >= b.Moves {
		return
	}
	for e := range s.NFailures {
		switch entry := &s.Entries[e]; {
		case entry.Status == Unfiled && w.unfiled()&bit(e) != 0, entry.Status == Pending, entry.Status == Manual,
			entry.Status == Failed:
			fn(Step{Rule: Discard, On: e})
			if entry.Status == Manual {
				fn(Step{Rule: ResolveEntry, On: e})
			}
			if s.Sent < b.Sent {
				fn(Step{Rule: Replay, On: e})
				fn(Step{Rule: Force, On: e})
			}
		case entry.Status == Resolved, entry.Status == Archived:
			fn(Step{Rule: Reopen, On: e})
			fn(Step{Rule: Delete, On: e})
		}
		if s.Entries[e].Op != none {
			fn(Step{Rule: Undo, On: e})
		}
	}
}

// undecided returns the set of pending entries without a decision.
func (w *world) undecided() (set uint8) {
	for e := range w.NFailures {
		if w.Entries[e].Status == Pending && !w.Entries[e].Decided {
			set |= bit(e)
		}
	}
	return set
}

// Apply takes a step from s. It returns the state after the step, and the invariant that the step breaks, or "". It
// returns false if the new state exceeds the model's arrays.
func (m *Model) Apply(s State, step Step) (State, string, bool) {
	w := begin(&s, m.Rules)
	m.take(w, step)
	if w.full {
		return s, "", false
	}
	s.normalize()
	return s, w.wrong, true
}

func (m *Model) take(w *world, step Step) {
	on := step.On
	switch step.Capture {
	case Captures:
	case Misses:
		w.Misses++
	case Serializable:
		w.Isolated++
	}
	switch step.Rule { //nolint:exhaustive // the others are actions of an operator
	case Insert:
		w.Inserted++
		w.insert(noJob)
	case InsertKeyed:
		w.Inserted++
		j := noJob
		j.Keyed = true
		w.insert(j)
	case InsertMarked:
		w.Inserted++
		j := noJob
		j.Mark = on
		w.insert(j)
	case StartJob:
		w.Jobs[on].State, w.Jobs[on].Done = Running, false
	case Complete:
		w.endJob(on, Completed, false, step.Capture)
	case Fail:
		w.endJob(on, Discarded, false, step.Capture)
	case FailCancel:
		w.endJob(on, Cancelled, false, step.Capture)
	case Attempt:
		w.Attempts++
		w.Jobs[on].State, w.Jobs[on].Errors = Retryable, min(2, w.Jobs[on].Errors+1)
	case Schedule:
		w.Jobs[on].State = Available
	case CancelJob:
		w.Moves++
		w.endJob(on, Cancelled, true, step.Capture)
	case RetryJob:
		w.Retries++
		w.retryJob(on, step.Capture)
	case DeleteJob:
		w.Deletes++
		w.Jobs[on].State = Gone
	case ReuseID:
		w.Deletes++
		j := noJob
		j.ID = w.Jobs[on].ID
		w.insert(j)
	case RemoveMark:
		w.Lost++
		w.Jobs[on].Mark = none
	case ReadInbox:
		w.Workers[on] = idle
		w.Workers[on].Doing, w.Workers[on].Of = Files, w.unfiled()
	case File, FileParked:
		to := Pending
		if step.Rule == FileParked {
			to = Manual
		}
		if left := w.fileAs(w.Workers[on].Of, to, true); left != 0 {
			w.fileRepeats(w.Workers[on].Of)
		}
		w.Workers[on] = idle
	case Claim:
		if v := w.redeliver(on, false, false); v == Live || v == DoneBy {
			w.move(on, Manual)
		}
	case ReadUndecided:
		w.Workers[on] = idle
		w.Workers[on].Doing, w.Workers[on].Of = Decides, w.undecided()
		for e := range w.NFailures {
			if w.Workers[on].Of&bit(e) != 0 {
				w.Workers[on].As[e] = w.Entries[e].Last
			}
		}
	case Decide, Park:
		for e := range w.NFailures {
			entry := &w.Entries[e]
			if w.Workers[on].Of&w.undecided()&bit(e) == 0 || entry.Last != w.Workers[on].As[e] {
				continue
			}
			entry.Decided, entry.DoneTwice = true, false
			if step.Rule == Park {
				w.move(e, Manual)
			}
		}
		w.Workers[on] = idle
	case ApplyFacts:
		w.applyFacts()
	case Scan:
		w.scan()
	case Append:
		w.appendUnknown(w.Scanned)
		if w.Rest {
			w.appendUnknown(w.unknown() &^ w.cancelled())
		}
		w.Scanning, w.Scanned, w.Rest = false, 0, false
	case FindSuccesses:
		w.findSuccesses()
	case Sweep:
		w.sweep()
	case CrashWorker:
		w.Workers[on] = idle
	case CrashReconciler:
		w.Scanning, w.Scanned, w.Rest = false, 0, false
	default:
		w.Moves++
		w.act(step.Rule, on)
	}
}

// act applies an operator's action: dlq.act_on, dlq.redeliver, dlq.undo, dlq.delete_entries.
func (w *world) act(rule Rule, e int8) {
	entry := &w.Entries[e]
	switch rule { //nolint:exhaustive // the others are not an operator's
	case Discard:
		w.file(bit(e))
		if s := entry.Status; s != Pending && s != Manual && s != Failed {
			return
		}
		w.move(e, Archived)
		w.recordOperation(e, Archived)
	case ResolveEntry:
		if entry.Status != Manual {
			return
		}
		w.move(e, Resolved)
		w.recordOperation(e, Resolved)
		w.supersede(e, none, true)
	case Replay, Force:
		w.redeliver(e, true, rule == Force)
	case Reopen:
		w.reopen(e)
	case Undo:
		w.file(bit(e))
		if entry.Op != none && entry.Still {
			w.reopen(e)
		}
	case Delete:
		w.delete(e)
	}
}

// recordOperation records that an operator's operation closed an entry.
func (w *world) recordOperation(e int8, to Status) {
	entry := &w.Entries[e]
	entry.Op, entry.Still, entry.ByPerson, entry.Acted = int8(to), true, true, w.tick
	for f := range w.NFailures {
		if w.in(e, f) {
			w.Failures[f].Closed = true
		}
	}
}

// reopen models dlq.act_on('reopen').
func (w *world) reopen(e int8) {
	entry := &w.Entries[e]
	if entry.Status != Resolved && entry.Status != Archived || w.openOf(entry.Job) != none || entry.Bare {
		return
	}
	w.move(e, Manual)
	entry.Acted = w.tick
	w.markWanted(e)
}

// retire models dlq.retire for one failure.
func (w *world) retire(f, e int8) {
	w.Jobs[w.Failures[f].Job].Remembered = true
	if w.Failures[f].TakenBy == none {
		w.Failures[f].TakenBy = e
	}
}

// delete models dlq.delete_entries, with dlq.retire.
func (w *world) delete(e int8) {
	entry := &w.Entries[e]
	if entry.Status != Resolved && entry.Status != Archived {
		return
	}
	waiting := w.Facts // a fact of a failure needs its entry, so without the entry the failure moves to the inbox
	for _, f := range waiting[:w.NFacts] {
		if f.Job == entry.Job && (f.Kind == FactDiscarded || f.Kind == FactCancelled) {
			w.fileEnd(f.Job, f.Failure, e)
			w.deleteFact(f)
		}
	}
	for i := range w.NJobs {
		j := &w.Jobs[i]
		if i == entry.Job || j.Entry == e {
			if i == entry.Job && j.State != Gone {
				w.retire(e, e)
			} else if i != entry.Job && j.State.ended() {
				j.Remembered = true
				if j.State != Completed {
					w.retire(j.Failure, e)
				}
			}
			if j.Entry == e {
				j.Entry = none
			}
		}
	}
	gone := noEntry
	gone.Status, gone.Job, gone.Last, gone.Known = Deleted, entry.Job, entry.Last, entry.Known
	w.Entries[e] = gone
}
