package protocol

import "fmt"

// Rules selects the rules of db/code. A field that is true restores an earlier rule, to show why it was changed.
type Rules struct {
	// Forgetful: dlqd forgets the failures that an entry receives in addition to its first one (dlq.take_failure does
	// nothing).
	Forgetful bool
	// PlaceFirst: before an ordered message's job ends, a separate transaction removes the message's place
	// (dlq.order_done, now replaced by dlq.complete_ordered).
	PlaceFirst bool
	// ComesBackAtOnce: a record that came back is applied to its entry before the end of its redelivery. dlq.apply_fact
	// holds such a fact.
	ComesBackAtOnce bool
	// KeepsConsumed: if a record is published again, the consumer group counts as past it, because it was past the first
	// copy (dlq.end_delivery did not reset consumed_at).
	KeepsConsumed bool
	// SettlesEarly: once a consumer group is past a record, its delivery is settled, even if the end of the redelivery is
	// not applied yet (dlq.resolve_returned did not look at entries in processing).
	SettlesEarly bool
}

// world is a [State] during a transaction that changes it.
type world struct {
	*State

	rules Rules
	tick  Time   // the transaction's time
	wrong string // invariant that the transaction breaks, with details
	full  bool   // the state would exceed the model's arrays, so the step is not taken
}

func begin(s *State, rules Rules) *world { return &world{State: s, rules: rules, tick: s.now()} }

func (w *world) violatef(invariant, format string, args ...any) {
	if w.wrong == "" {
		w.wrong = invariant + ": " + fmt.Sprintf(format, args...)
	}
}

// Capture is what the trigger does when a job ends or is retried.
type Capture int8

// Captures: capture records the end or the retry. Misses: capture is off or skips it. Serializable: capture cannot
// read, because the transaction is SERIALIZABLE.
const (
	Captures Capture = iota
	Misses
	Serializable
)

func (w *world) fact(f Fact) {
	if w.NFacts == maxFacts {
		w.full = true
		return
	}
	f.At = max(f.At, 1)
	w.Facts[w.NFacts] = f
	w.NFacts++
}

func (w *world) append(r Row) {
	if w.NInbox == maxInbox {
		w.full = true
		return
	}
	w.Inbox[w.NInbox] = r
	w.NInbox++
}

// insert adds a job and returns its index. If the state has no room for a job, insert sets full and returns 0.
func (w *world) insert(j Job) int8 {
	if w.NJobs == maxJobs {
		w.full = true
		return 0
	}
	if j.ID == none {
		j.ID = w.IDs
		w.IDs++
	}
	j.State = Available
	w.Jobs[w.NJobs] = j
	w.NJobs++
	return w.NJobs - 1
}

var noJob = Job{ID: none, Of: none, Mark: none, DoneOf: none, Failure: none, Entry: none}

// holder returns the job that holds the unique key, or none. The key applies in River's default states.
func (w *world) holder() int8 {
	for i := range w.NJobs {
		if j := &w.Jobs[i]; j.Keyed && (j.State.waits() || j.State == Running || j.State == Completed) {
			return i
		}
	}
	return none
}

// live returns the existing job with an id, or none.
func (w *world) live(id int8) int8 {
	for i := range w.NJobs {
		if w.Jobs[i].ID == id && w.Jobs[i].State != Gone {
			return i
		}
	}
	return none
}

// endJob models the statement with which River's completer, River's rescuer or an operator ends a job, and the row that
// dlq.capture appends.
func (w *world) endJob(i int8, to JobState, byOperator bool, capture Capture) {
	j := &w.Jobs[i]
	if to != Completed && !byOperator {
		j.Errors = min(2, j.Errors+1)
	}
	if byOperator {
		j.Cancel = true
	}
	j.State, j.Finalized = to, w.tick
	failure := none
	if to != Completed {
		if w.NFailures == maxFailures {
			w.full = true
			return
		}
		failure = w.NFailures
		w.Failures[failure] = Failure{Job: i, TakenBy: none, At: w.tick, Keyed: j.Keyed, Cancel: byOperator ||
			j.Cancel && to == Cancelled}
		w.NFailures++
		j.Failure = failure
	}
	if capture == Misses || to == Completed && j.Mark == none {
		return
	}
	known, entry := false, none
	if j.Mark != none || j.Errors > 1 {
		switch {
		case capture == Serializable:
			known = j.Mark != none
		case j.Entry != none:
			known, entry = true, j.Entry
		default:
			for f := range w.NFacts {
				known = known || w.Facts[f].Job == i && w.Facts[f].Kind == Retried
			}
		}
	}
	if known {
		w.fact(Fact{Kind: FactKind(to-Completed) + FactCompleted, Job: i, Entry: entry, Failure: failure, At: w.tick})
	} else if failure != none && !w.Failures[failure].Cancel {
		w.append(Row{Failure: failure})
	}
}

// retryJob models a retry in River UI, or a rescue by hand, after which the job runs again. If the job had ended,
// dlq.follow appends a fact.
func (w *world) retryJob(i int8, capture Capture) {
	j := &w.Jobs[i]
	was := *j
	j.State, j.Cancel, j.Finalized = Available, false, 0
	j.Overtaken = true
	for f := range w.NFailures {
		if w.Failures[f].Job == i || j.Entry != none && w.in(j.Entry, f) {
			w.Failures[f].Closed = false // an operator wants the work done
		}
	}
	if !was.State.ended() || capture == Misses || was.State == Completed && was.DoneOf == none && was.Mark == none {
		return
	}
	entry := was.Failure
	if was.State == Completed {
		entry = was.DoneOf
		if entry == none {
			entry = was.Mark
		}
	}
	w.fact(Fact{Kind: Retried, Job: i, Entry: entry, Failure: none, At: w.tick})
}

// in reports whether an entry has ever had a failure.
func (w *world) in(entry, failure int8) bool {
	return w.Failures[failure].In&bit(entry) != 0
}

// openOf returns the open entry of a job, or none.
func (w *world) openOf(job int8) int8 {
	for e := range w.NFailures {
		if w.Entries[e].Status.open() && w.Entries[e].Job == job {
			return e
		}
	}
	return none
}

// move changes an entry's status, as the trigger dlq.on_move does.
func (w *world) move(e int8, to Status) {
	entry := &w.Entries[e]
	from := entry.Status
	if from != to {
		entry.Still = false
	}
	entry.Status = to
	if to.open() {
		entry.Closed, entry.ByPerson = 0, false
	} else if from != to {
		entry.Closed = w.tick
	}
	if to != Processing {
		entry.Waits, entry.ByRiver = none, false
	}
	if to != Pending {
		entry.Decided = true
	}
	if from == Processing && to != Processing {
		for i := range w.NJobs {
			if w.Jobs[i].Of == e && !w.Jobs[i].State.ended() {
				w.Jobs[i].Overtaken = true
			}
		}
	}
}

// Filing: dlq.file_as, dlq.file_repeats, dlq.failed_again, dlq.file.

// unfiled returns the set of failures in the inbox.
func (w *world) unfiled() (set uint8) {
	for i := range w.NInbox {
		set |= bit(w.Inbox[i].Failure)
	}
	return set
}

// takeOut deletes all rows of a failure from the inbox.
func (w *world) takeOut(failure int8) {
	n := int8(0)
	for i := range w.NInbox {
		if w.Inbox[i].Failure != failure {
			w.Inbox[n] = w.Inbox[i]
			n++
		}
	}
	for i := n; i < w.NInbox; i++ {
		w.Inbox[i] = Row{}
	}
	w.NInbox = n
}

// fileAs models dlq.file_as. It returns the failures that stay in the inbox: failures of redeliveries, failures whose
// job has an open entry, and failures that an entry already has (foundByReconciler describes the exception).
func (w *world) fileAs(failures uint8, to Status, decided bool) (left uint8) {
	before := w.Entries // a statement sees the state at its start, except for the unique index
	for f := range w.NFailures {
		if failures&w.unfiled()&bit(f) == 0 {
			continue
		}
		job := w.Failures[f].Job
		repeat := false
		if e := w.Jobs[job].Entry; e != none {
			repeat = before[e].Status.exists() && before[e].Job != job
			for o := range before {
				repeat = repeat || before[o].Status.open() && before[o].Job == job
			}
		}
		if repeat || w.isTaken(f) && (w.Jobs[job].Remembered || w.foundByReconciler(f)) || w.openOf(job) != none ||
			w.Entries[f].Status.open() {
			left |= bit(f)
			continue
		}
		if was := w.Entries[f].Status; was.exists() {
			w.violatef(FiledOnce, "failure %d has two entries with the same id", f)
		}
		w.recordIn(f, f)
		e := noEntry
		e.Status, e.Job, e.Last, e.Known, e.Decided = to, job, f, bit(f), decided
		w.Entries[f] = e
		w.takeOut(f)
	}
	return left
}

// foundByReconciler reports whether the reconciler, not capture, appended all rows of a failure. Rows from capture are
// not compared with known failures if dlqd has recorded nothing about the job.
func (w *world) foundByReconciler(f int8) bool {
	for i := range w.NInbox {
		if w.Inbox[i].Failure == f && !w.Inbox[i].Reconciler {
			return false
		}
	}
	return true
}

// recordIn records, for the invariants, that an entry has received a failure.
func (w *world) recordIn(f, e int8) { w.Failures[f].In |= bit(e) }

// take models dlq.take_failure.
func (w *world) take(f, e int8) {
	w.recordIn(f, e)
	if failure := &w.Failures[f]; !w.rules.Forgetful && failure.TakenBy == none {
		failure.TakenBy, w.Jobs[failure.Job].Remembered = e, true
	}
}

// isTaken models dlq.is_taken.
func (w *world) isTaken(f int8) bool {
	return w.Entries[f].Status.exists() || w.Failures[f].TakenBy != none
}

// failedAgain models dlq.failed_again.
func (w *world) failedAgain(e, f int8) {
	entry := &w.Entries[e]
	if entry.Known&bit(f) != 0 || !entry.Status.open() {
		return
	}
	w.recordIn(f, e)
	entry.Known |= bit(f)
	if w.Failures[entry.Last].At <= w.Failures[f].At {
		entry.Last = f
		if entry.Status == Pending {
			entry.Decided = false
		}
	}
}

// fileRepeats models dlq.file_repeats.
func (w *world) fileRepeats(failures uint8) {
	for f := range w.NFailures {
		for range w.NInbox {
			if failures&w.unfiled()&bit(f) == 0 {
				break
			}
			w.fileRepeat(f)
		}
	}
}

func (w *world) fileRepeat(f int8) {
	job := w.Failures[f].Job
	j := &w.Jobs[job]
	e := w.openOf(job)
	switch {
	case w.isTaken(f):
	case e == none:
		m := j.Entry
		if m == none || !w.Entries[m].Status.exists() || w.Entries[m].Job == job {
			return // the entry was closed just now; the next run files the failure
		}
		w.fact(Fact{Kind: FactDiscarded, Job: job, Entry: m, Failure: f, At: w.tick})
	case w.Entries[e].Status == Processing && w.Entries[e].Waits == j.ID:
		w.fact(Fact{Kind: FactDiscarded, Job: job, Entry: e, Failure: f, At: w.tick})
	default:
		w.take(f, e)
		w.failedAgain(e, f)
	}
	w.takeOut(f)
}

// file models dlq.file, which makes entries without a decision.
func (w *world) file(failures uint8) {
	if left := w.fileAs(failures, Pending, false); left != 0 {
		w.fileRepeats(left)
	}
}

// Facts: dlq.apply_facts, dlq.apply_fact and the functions that they call.

// drop models dlq.drop_redelivery.
func (w *world) drop(i int8) {
	if j := &w.Jobs[i]; j.State != Gone && j.State != Running && j.State != Completed {
		j.State = Gone
	}
}

// supersede models dlq.supersede of one entry. by is the id of the job that did the work, or none if an operator
// resolved the entry.
func (w *world) supersede(e, by int8, operator bool) {
	entry := &w.Entries[e]
	if entry.Status != Resolved {
		return
	}
	overtaken := func(s JobState) bool { return s == Discarded || s == Cancelled || !operator && s.waits() }
	waits := false
	if o := &w.Jobs[entry.Job]; overtaken(o.State) && o.ID != by {
		o.Keyed = o.Keyed && o.State.waits() // the job may have lost the key to another job while it was discarded
		o.State, o.Finalized, o.Mark, o.DoneOf, o.Done = Completed, w.tick, none, e, true
	}
	for i := range w.NJobs {
		if j := &w.Jobs[i]; j.Entry == e && j.ID != by && i != entry.Job && overtaken(j.State) {
			w.drop(i)
		}
	}
	for i := range w.NJobs {
		waits = waits || (i == entry.Job || w.Jobs[i].Entry == e) && w.Jobs[i].State.waits()
	}
	if operator && waits {
		w.fact(Fact{Kind: FactClosed, Job: entry.Job, Entry: e, Failure: none, At: w.tick})
	}
}

// resolveBy models dlq.resolve_by of one entry. job is the id, and by the index, of the job that did the entry's work.
func (w *world) resolveBy(e, job, by int8, ended Time, operator bool) {
	entry := &w.Entries[e]
	if entry.Status.open() || entry.Status == Failed {
		if entry.Job != by && w.Jobs[by].Entry != e {
			w.violatef(ClosesOwnEntry, "job %d resolves entry %d, to which it does not belong", by, e)
		}
		entry.Completed[job], entry.ByPerson = max(entry.Completed[job], ended), false
		entry.LastTry = job
		w.move(e, Resolved)
	}
	w.supersede(e, job, operator)
}

// recordEnd models dlq.record_end. failure is none for a success. recordEnd returns false if the entry does not wait
// for the job.
func (w *world) recordEnd(e, i, failure int8, ended Time) bool {
	entry := &w.Entries[e]
	j := &w.Jobs[i]
	if entry.Status != Processing || entry.Waits != j.ID {
		return false
	}
	if failure == none {
		w.resolveBy(e, j.ID, i, ended, false)
		return true
	}
	if f := &w.Failures[failure]; i == entry.Job && (w.Entries[failure].Status.exists() && failure != e ||
		f.TakenBy != none && f.TakenBy != e) {
		w.move(e, Manual)
		return true
	}
	to := Pending
	if entry.Tries >= MaxTries {
		to = Failed
	}
	if i == entry.Job && w.hasFailure(e, failure) {
		w.move(e, to)
		entry.Decided = false
		return true
	}
	w.recordIn(failure, e)
	if i == entry.Job || w.unfiled()&bit(failure) != 0 {
		w.take(failure, e)
	}
	entry.Known |= bit(failure)
	entry.Last, entry.LastTry = failure, j.ID
	w.move(e, to)
	entry.Decided = false
	if i != entry.Job {
		w.drop(i)
	}
	return true
}

func (j *Job) failed() bool { return j.State == Discarded || j.State == Cancelled }

// hasFailure models dlq.has_failure.
func (w *world) hasFailure(e, failure int8) bool {
	by := w.Failures[failure].TakenBy
	return w.isTaken(failure) && (by == e || by == none && failure == e)
}

// MaxTries is dlq_max_retries of each entry.
const MaxTries = 2

// followJob models dlq.follow_job.
func (w *world) followJob(e, i int8, river bool) {
	entry := &w.Entries[e]
	if s := entry.Status; s == Pending || s == Manual || s == Failed {
		w.move(e, Processing)
		entry.Waits, entry.ByRiver, entry.Tries = w.Jobs[i].ID, river, entry.Tries+1
	}
	w.Jobs[i].Entry = e
}

// watchJob models dlq.watch_job.
func (w *world) watchJob(e, i int8) bool {
	j := &w.Jobs[i]
	switch {
	case j.State.waits():
		j.Mark = e
		return true
	case j.State == Gone:
		if entry := &w.Entries[e]; entry.Status == Processing && entry.Waits == j.ID {
			w.move(e, Manual)
		}
		return true
	case !j.State.ended():
		return j.Mark == e
	}
	if !w.endWaits(i) {
		w.endOf(e, i, true)
	}
	return true
}

// endWaits reports whether there is a fact, not applied yet, about an end of a job.
func (w *world) endWaits(i int8) bool {
	for f := range w.NFacts {
		if w.Facts[f].Job == i && w.Facts[f].Kind.end() {
			return true
		}
	}
	return false
}

// endOf models dlq.apply_end for the current state of a job.
func (w *world) endOf(e, i int8, own bool) {
	failure := w.Jobs[i].Failure
	if w.Jobs[i].State == Completed {
		failure = none
	}
	w.applyEnd(e, i, failure, w.Jobs[i].Finalized, own)
}

// applyEnd models dlq.apply_end.
func (w *world) applyEnd(e, i, failure int8, ended Time, own bool) {
	if w.recordEnd(e, i, failure, ended) {
		return
	}
	entry := &w.Entries[e]
	if failure == none {
		switch {
		case entry.Status == Resolved || entry.Status == Archived || entry.DoneTwice: // the entry's trail gets a note
		case entry.Status == Failed || entry.Status.open():
			w.resolveBy(e, w.Jobs[i].ID, i, ended, false)
		}
		return
	}
	first := i == entry.Job
	if first && w.isTaken(failure) {
		return
	}
	if own && !first {
		w.Failures[failure].Noted = true
	}
	if first && entry.Status.open() {
		w.take(failure, e)
	} else if first {
		w.fileEnd(i, failure, e)
	}
	if entry.Status.open() && (!own || entry.Status != Processing) {
		w.failedAgain(e, failure)
	}
	if own && !first {
		w.drop(i)
	}
}

// fileEnd models dlq.file_end. e is the job's entry, which may have been deleted.
func (w *world) fileEnd(i, f, e int8) {
	failure := &w.Failures[f]
	there := e != none && w.Entries[e].Status.exists() && w.Entries[e].Job == i
	switch {
	case failure.Cancel || w.isTaken(f):
	case there || w.Jobs[i].State != Gone:
		failure.Keyed = failure.Keyed || there && w.Failures[e].Keyed
		w.append(Row{Failure: f})
	case e == none || w.hadEntry(i):
		w.append(Row{Failure: f})
		w.file(bit(f))
		w.move(f, Archived)
		w.Entries[f].ByPerson, w.Entries[f].Bare = true, true
	}
}

// hadEntry reports whether a deleted entry was made from a failure of the job.
func (w *world) hadEntry(i int8) bool {
	for f := range w.NFailures {
		if w.Failures[f].Job == i && w.Failures[f].TakenBy == f {
			return true
		}
	}
	return false
}

// applied is the result of dlq.apply_fact. The model has no locks, so it has no held.
type applied int8

const (
	done applied = iota
	following
)

// applyFact models dlq.apply_fact.
func (w *world) applyFact(f Fact) applied { //nolint:gocognit // as dlq.apply_fact
	id, own := f.Entry, true
	if f.Kind != FactClosed {
		id = w.Jobs[f.Job].Entry
		own = id != none
	}
	if f.Kind != FactClosed && (id == none || !w.Entries[id].Status.open()) {
		open := w.openOf(f.Job)
		own = own && open == none
		switch {
		case open != none:
			id = open
		case id == none:
			id = f.Entry
			if f.Kind == Retried && id != none && w.Failures[id].TakenBy != none && w.Failures[id].Job == f.Job {
				id = w.Failures[id].TakenBy
			}
		}
	}
	if id == none || !w.Entries[id].Status.exists() && w.unfiled()&bit(id) == 0 {
		if f.Kind == FactDiscarded || f.Kind == FactCancelled {
			w.fileEnd(f.Job, f.Failure, id)
		}
		return done
	}
	entry := &w.Entries[id]
	inbox := !entry.Status.exists()
	job, status, closed := entry.Job, entry.Status, entry.Closed
	if inbox {
		job, status = w.Failures[id].Job, Pending
	}
	if f.Kind == Retried && !own && job != f.Job {
		return done
	}
	if inbox {
		w.file(bit(id))
	}
	before, acted, byPerson := w.Entries[id].Status, w.Entries[id].Acted, w.Entries[id].ByPerson
	defer func() {
		// An operator may reopen an entry after its job succeeded and before a fact recorded the success. The success then
		// resolves the entry again, because the work is done.
		after := w.Entries[id].Status
		if byPerson && acted > f.At && before.closed() && after.open() {
			w.violatef(NotUndone, "an operator made entry %d %s, and an older fact (%s of job %d) makes it %s", id, before,
				f.Kind, f.Job, after)
		}
	}()
	if f.Kind == Retried {
		defer w.assignEnds(id, f.Job)
	}
	switch f.Kind { //nolint:exhaustive // the others are ends
	case FactClosed:
		if status == Resolved {
			by := none
			for _, t := range entry.Completed {
				if t > 0 {
					by = entry.LastTry
				}
			}
			w.supersede(id, by, false)
		}
	case Following:
		if !w.watchJob(id, f.Job) {
			return following
		}
	case Retried:
		switch {
		case status.closed() && w.openOf(job) != none: // the entry's trail gets a note
		case status != Resolved && status != Archived && w.Jobs[f.Job].failed() &&
			w.hasFailure(id, w.Jobs[f.Job].Failure): // the entry's trail gets a note, too
		case status != Resolved && status != Archived:
			w.followJob(id, f.Job, true)
			if !w.watchJob(id, f.Job) {
				return following
			}
		case entry.Completed[w.Jobs[f.Job].ID] < f.At || entry.Completed[w.Jobs[f.Job].ID] == 0:
			dropped := false
			if f.At <= closed && status == Resolved {
				w.supersede(id, entry.LastTry, false)
				dropped = f.Job != job && w.Jobs[f.Job].State == Gone && !w.endWaits(f.Job)
			}
			if j := &w.Jobs[f.Job]; (f.At > closed || !entry.ByPerson) && (j.State != Completed || !j.Done) &&
				!dropped {
				w.move(id, Manual)
				entry.DoneTwice, entry.Acted = true, 0
			}
		}
	default:
		ended := f.At
		w.applyEnd(id, f.Job, f.Failure, ended, own)
	}
	return done
}

// assignEnds assigns to entry e the facts about a job's failures that have no entry.
func (w *world) assignEnds(e, job int8) {
	facts := w.Facts
	for _, f := range facts[:w.NFacts] {
		if f.Job == job && f.Entry == none && (f.Kind == FactDiscarded || f.Kind == FactCancelled) {
			w.deleteFact(f)
			f.Entry = e
			w.fact(f)
		}
	}
}

// applyFacts models dlq.apply_facts.
func (w *world) applyFacts() {
	first := func(n int8) bool {
		for m := range w.NFacts {
			if o := &w.Facts[m]; o.Job == w.Facts[n].Job && o.Kind != Following && (o.At < w.Facts[n].At) {
				return false
			}
		}
		return true
	}
	// dlq.apply_facts handles two common cases with one statement each: the job that an entry waits for has completed,
	// and a job was retried whose entry waits for no job.
	var quick, others []Fact
	for n := range w.NFacts {
		f := w.Facts[n]
		if f.Kind == FactCompleted && f.Entry != none && first(n) {
			if e := &w.Entries[f.Entry]; e.Status == Processing && e.Waits == w.Jobs[f.Job].ID {
				quick = append(quick, f)
			}
		}
	}
	for _, f := range quick {
		w.deleteFact(f)
		w.resolveBy(f.Entry, w.Jobs[f.Job].ID, f.Job, f.At, false)
	}
	apply := func(f Fact) {
		switch w.applyFact(f) {
		case done:
			w.deleteFact(f)
		case following:
			if f.Kind != Following {
				w.deleteFact(f)
				f.Kind = Following
				w.fact(f)
			}
		}
	}
	quick = nil
	for n := range w.NFacts {
		if f := w.Facts[n]; f.Kind == Retried && first(n) && w.isSimpleRetry(f) {
			quick = append(quick, f)
		}
	}
	for _, f := range quick {
		apply(f)
	}
	for n := range w.NFacts {
		f := w.Facts[n]
		if f.Kind == Following && w.Jobs[f.Job].State != Running || f.Kind != Following && first(n) {
			others = append(others, f)
		}
	}
	for _, f := range others {
		apply(f)
	}
}

// isSimpleRetry reports whether dlq.apply_facts applies a retry in the statement that handles many retries at once.
func (w *world) isSimpleRetry(f Fact) bool {
	e, entry := w.openOf(f.Job), w.Jobs[f.Job].Entry
	if e == none || w.Entries[e].Status == Processing || entry != none && entry != e ||
		w.Jobs[f.Job].failed() && w.hasFailure(e, w.Jobs[f.Job].Failure) {
		return false
	}
	for n := range w.NFacts {
		if job := w.Facts[n].Job; job != f.Job && w.Jobs[job].Entry == e {
			return false
		}
	}
	return true
}

// deleteFact deletes a fact.
func (w *world) deleteFact(f Fact) {
	n, gone := int8(0), false
	for i := range w.NFacts {
		if !gone && w.Facts[i] == f {
			gone = true
			continue
		}
		w.Facts[n] = w.Facts[i]
		n++
	}
	for i := n; i < w.NFacts; i++ {
		w.Facts[i] = Fact{}
	}
	w.NFacts = n
}

// The reconciler.

// isUnknown reports whether dlq.look_for_failures would append a job's failure to the inbox.
func (w *world) isUnknown(i int8) bool {
	j := &w.Jobs[i]
	if j.State != Discarded && j.State != Cancelled || w.Failures[j.Failure].Cancel {
		return false
	}
	return !w.isKnown(i, j.Failure)
}

// isKnown models dlq.known_failure.
func (w *world) isKnown(i, f int8) bool {
	j := &w.Jobs[i]
	if w.isTaken(f) || w.unfiled()&bit(f) != 0 {
		return true
	}
	if j.Entry != none && (!w.Entries[j.Entry].Status.exists() || w.Entries[j.Entry].Job != i) {
		return true // the failure belongs to a redelivery
	}
	for n := range w.NFacts {
		if w.Facts[n].Job == i && w.Facts[n].Failure == f {
			return true
		}
	}
	e := w.openOf(i)
	return e != none && w.Entries[e].Status == Processing && w.Entries[e].Waits == j.ID
}

func (w *world) unknown() (set uint8) {
	for i := range w.NJobs {
		if w.isUnknown(i) {
			set |= bit(i)
		}
	}
	return set
}

// scan is the first half of a scan by the reconciler. It reads a page of cancelled jobs or, if there are none, of
// discarded jobs.
func (w *world) scan() {
	w.Scanning, w.Scanned = true, w.unknown()
	if page := w.Scanned & w.cancelled(); page != 0 {
		w.Scanned, w.Rest = page, true
	}
}

func (w *world) cancelled() (set uint8) {
	for i := range w.NJobs {
		if w.Jobs[i].State == Cancelled {
			set |= bit(i)
		}
	}
	return set
}

// appendUnknown is the second half of a scan. It locks the jobs that scan found, checks them again, and appends their
// failures.
func (w *world) appendUnknown(jobs uint8) {
	for i := range w.NJobs {
		if jobs&bit(i) != 0 && w.isUnknown(i) {
			w.append(Row{Failure: w.Jobs[i].Failure, Reconciler: true})
		}
	}
}

// findSuccesses models dlq.find_successes.
func (w *world) findSuccesses() {
	for e := range w.NFailures {
		entry := &w.Entries[e]
		if entry.Status != Pending && entry.Status != Manual || entry.DoneTwice {
			continue
		}
		j := &w.Jobs[entry.Job]
		hasFact := false
		for f := range w.NFacts {
			hasFact = hasFact || w.Facts[f].Job == entry.Job
		}
		if j.State == Completed && !j.Done && entry.Completed[j.ID] == 0 && !hasFact && !w.reopenedAfterSuccess(e) {
			w.fact(Fact{Kind: FactCompleted, Job: entry.Job, Entry: e, Failure: none, At: j.Finalized})
		}
	}
}

// reopenedAfterSuccess reports whether an operator reopened an entry after the success of its job had resolved another
// entry of the same job.
func (w *world) reopenedAfterSuccess(e int8) bool {
	job, acted := w.Entries[e].Job, w.Entries[e].Acted
	for o := range w.NFailures {
		if other := &w.Entries[o]; o != e && other.Status.exists() && other.Job == job && acted >= w.Jobs[job].Finalized &&
			other.Completed[w.Jobs[job].ID] >= w.Jobs[job].Finalized {
			return true
		}
	}
	return false
}

// sweep models dlq.sweep_redeliveries.
func (w *world) sweep() {
	for e := range w.NFailures {
		entry := &w.Entries[e]
		if entry.Status != Processing {
			continue
		}
		i := none
		for n := range w.NJobs {
			if w.Jobs[n].ID == entry.Waits && w.Jobs[n].State != Gone && w.Jobs[n].Entry == e {
				i = n
			}
		}
		if i != none && !w.Jobs[i].State.ended() {
			continue
		}
		hasFact := false
		for f := range w.NFacts {
			hasFact = hasFact || w.Jobs[w.Facts[f].Job].ID == entry.Waits && w.Facts[f].Kind != Following
		}
		switch {
		case hasFact:
		case i != none:
			failure := w.Jobs[i].Failure
			if w.Jobs[i].State == Completed {
				failure = none
			}
			w.recordEnd(e, i, failure, w.Jobs[i].Finalized)
		case entry.ByRiver:
			w.move(e, Manual)
		default:
			w.move(e, Pending)
			entry.Decided = false
		}
	}
}

// Redelivery: dlq.redeliver.

// Verdict is the result of dlq.redeliver for an entry.
type Verdict int8

// The verdicts. Refused means that the status of the entry does not allow a redelivery.
const (
	Refused Verdict = iota
	Sent
	Follows
	ResolvedAlready
	Live
	DoneBy
	OpenElsewhere
)

// redeliver models dlq.redeliver of one entry.
func (w *world) redeliver(e int8, operator, force bool) Verdict {
	w.file(bit(e))
	entry := &w.Entries[e]
	if s := entry.Status; s != Pending && s != Manual && s != Failed {
		return Refused
	}
	o := &w.Jobs[entry.Job]
	keyed := w.Failures[e].Keyed
	h := w.holder()
	if h != none && !keyed {
		h = none
	}
	var v Verdict
	switch {
	case entry.Status == Failed && w.openOf(entry.Job) != none:
		v = OpenElsewhere
	case force:
		v = Sent
	case o.State != Gone && !o.State.ended():
		v = Follows
	case o.State == Completed && !o.Done:
		v = ResolvedAlready
	case h == none || h == entry.Job:
		v = Sent
	case !w.Jobs[h].State.ended():
		v = Live
	case w.Jobs[h].Entry != e:
		v = DoneBy
	case !w.Jobs[h].Done:
		v = ResolvedAlready
	default:
		v = Sent
	}
	switch v { //nolint:exhaustive // it stays where it is otherwise
	case Sent:
		if !operator && !w.wanted(e) {
			w.violatef(ClosedStaysClosed, "entry %d is redelivered automatically, but an operator closed all its failures", e)
		}
		for i := range w.NJobs {
			if j := &w.Jobs[i]; j.Of == e && !j.Overtaken && (j.State.waits() || j.State == Running) {
				w.violatef(OneRedelivery, "entry %d has redelivery job %d in progress, and gets another", e, i)
			}
		}
		j := noJob
		j.Of, j.Mark, j.Entry, j.Keyed = e, e, e, keyed && h == none && !force
		w.Sent++
		i := w.insert(j)
		w.move(e, Processing)
		entry.Waits, entry.Tries = w.Jobs[i].ID, entry.Tries+1
	case Follows:
		w.followJob(e, entry.Job, false)
		w.fact(Fact{Kind: Following, Job: entry.Job, Entry: e, Failure: none, At: w.tick})
	case ResolvedAlready:
		by := entry.Job
		if o.State != Completed || o.Done {
			by = h
		}
		w.resolveBy(e, w.Jobs[by].ID, by, w.tick, operator)
	}
	if operator {
		w.markWanted(e)
	}
	return v
}

// wanted reports whether an entry has a failure that no operator has closed, or whose work was requested again after an
// operator had closed it.
func (w *world) wanted(e int8) bool {
	for f := range w.NFailures {
		if w.in(e, f) && !w.Failures[f].Closed {
			return true
		}
	}
	return false
}

// markWanted records that an operator wants an entry's work done.
func (w *world) markWanted(e int8) {
	for f := range w.NFailures {
		if w.in(e, f) {
			w.Failures[f].Closed = false
		}
	}
}
