// Package protocol is a model of how a failed job becomes one dead letter, and of everything that
// changes the two afterwards: River, capture, filing, facts, the reconciler, redelivery and
// operators. An explorer visits all states within bounds and checks the invariants. A walk executes
// the model's steps on a real Postgres and compares. See docs/protocol.md.
package protocol

import "math/bits"

const (
	maxJobs     = 6
	maxFailures = 6
	maxInbox    = 6
	maxFacts    = 8
	maxWorkers  = 2
)

// Time is a rank: only the order of times counts. 0 is never.
type Time uint8

// none stands for no job, no entry and no failure, and in Entry.Op for no status.
const none int8 = -1

// JobState is the state of a River job, as far as the protocol distinguishes states.
type JobState uint8

// The states of a job. Gone: River has no such row. Retryable also stands for scheduled and
// pending.
const (
	Gone JobState = iota
	Available
	Running
	Retryable
	Completed
	Discarded
	Cancelled
)

func (s JobState) String() string {
	return [...]string{"gone", "available", "running", "retryable", "completed", "discarded", "cancelled"}[s]
}

func (s JobState) waits() bool { return s == Available || s == Retryable }
func (s JobState) ended() bool { return s >= Completed }

// Job is a row of river_job, identified by id and created_at, with what dlqd stores about it.
type Job struct {
	ID        int8 // River's id; another job may reuse it once this one is gone
	State     JobState
	Of        int8 // entry that it redelivers; none for an application's job
	Mark      int8 // metadata dlq:entry_id
	DoneOf    int8 // metadata dlq:done: the entry with which dlqd completed it
	Done      bool // dlqd completed it, and it has not run since
	Cancel    bool // metadata cancel_attempted_at
	Keyed     bool // has the unique key, of which the model has one
	Errors    int8 // at most 2
	Failure   int8 // its last failure, or the end by which an operator cancelled it
	Finalized Time // finalized_at

	Entry      int8 // in entry_jobs
	Remembered bool // retired_jobs has a failure of it

	Overtaken bool // for the invariants: its entry was closed while it ran, or an operator retried it
}

// Status is the status of an entry.
type Status uint8

// The statuses of an entry. Unfiled: there is no such entry, or it is in the inbox. Deleted: it was
// deleted.
const (
	Unfiled Status = iota
	Pending
	Processing
	Manual
	Failed
	Resolved
	Archived
	Deleted
)

func (s Status) String() string {
	return [...]string{"unfiled", "pending", "processing", "manual", "failed", "resolved", "archived", "deleted"}[s]
}

func (s Status) open() bool   { return s >= Pending && s <= Manual }
func (s Status) exists() bool { return s >= Pending && s <= Archived }
func (s Status) closed() bool { return s >= Failed && s <= Archived }

// Entry is a dead letter. Its id is that of the failure that it was made from.
type Entry struct {
	Status    Status
	Job       int8          // river_job_id and job_created_at
	Last      int8          // last_failed_at: the failure with that time
	Closed    Time          // closed_at
	Waits     int8          // redelivery_job_id, a job's id
	ByRiver   bool          // locked_by: a retry outside dlqd
	ByPerson  bool          // resolution_strategy: an operator closed it
	Decided   bool          // strategy is set
	DoneTwice bool          // rule is done-twice
	Tries     int8          // dlq_retry_count
	Completed [maxJobs]Time // replay_attempts: by job id, the time when that job completed it
	LastTry   int8          // replay_attempts: the id of the last job
	Known     uint8         // transitions.failed_at: the set of failures that it took in
	Op        int8          // the status that the operator's last operation gave it
	Still     bool          // it still has the status Op
	Bare      bool          // original_event: there is no payload

	Acted Time // for the invariants: when an operator last closed or reopened it
}

// Failure is an end of a job other than success: a failure, or an operator's cancellation.
type Failure struct {
	Job     int8
	At      Time  // finalized_at
	Cancel  bool  // an operator's cancellation, which is not filed
	Keyed   bool  // its job had the unique key, so its entry has it
	TakenBy int8  // retired_jobs.entry_id: the entry that took it in, if that entry's id does not show it
	In      uint8 // for the invariants: the set of entries that ever took it in
	Noted   bool  // for the invariants: an entry's trail mentions it
	Closed  bool  // for the invariants: an operator closed its entry, and nothing has asked for its work since
}

// FactKind is the kind of a fact.
type FactKind uint8

// The kinds of facts.
const (
	Retried FactKind = iota
	FactCompleted
	FactDiscarded
	FactCancelled
	FactClosed
	Following
)

func (f FactKind) String() string {
	return [...]string{"retried", "completed", "discarded", "cancelled", "closed", "following"}[f]
}

func (f FactKind) end() bool { return f == FactCompleted || f == FactDiscarded || f == FactCancelled }

// Fact is a row of job_facts.
type Fact struct {
	Kind    FactKind
	Job     int8
	Entry   int8
	Failure int8 // none for a success
	At      Time
}

// Row is a row of the inbox: a failure, and whether the reconciler found it.
type Row struct {
	Failure    int8
	Reconciler bool
}

// Doing is what a worker has read in one transaction, to use in its next.
type Doing uint8

// The values of Doing.
const (
	Idle Doing = iota
	Files
	Decides
)

// Worker is a DLQ worker between two transactions.
type Worker struct {
	Doing Doing
	Of    uint8             // the inbox rows (by failure) or undecided entries that it read
	As    [maxFailures]int8 // for each of these entries, its last failure
}

// State is everything that the protocol stores. It is comparable and has no pointers.
type State struct {
	Jobs      [maxJobs]Job
	NJobs     int8
	IDs       int8
	Entries   [maxFailures]Entry
	Failures  [maxFailures]Failure
	NFailures int8
	Inbox     [maxInbox]Row
	NInbox    int8
	Facts     [maxFacts]Fact // in the table's order
	NFacts    int8
	Workers   [maxWorkers]Worker
	Scanning  bool  // the reconciler has read, and has not locked anything yet
	Scanned   uint8 // the jobs that it found to be failures without an entry
	Rest      bool  // those were cancelled jobs; a page of discarded ones follows in the same transaction

	// How much of each bound is used.
	Inserted, Moves, Retries, Misses, Deletes, Attempts, Sent, Isolated, Lost int8
}

// Start returns the initial state.
func Start() State {
	var s State
	for i := range s.Jobs {
		s.Jobs[i] = Job{ID: none, Of: none, Mark: none, DoneOf: none, Failure: none, Entry: none}
	}
	for i := range s.Entries {
		s.Entries[i] = noEntry
		s.Failures[i].Job, s.Failures[i].TakenBy = none, none
	}
	for i := range s.Workers {
		s.Workers[i] = idle
	}
	return s
}

var (
	noEntry = Entry{Job: none, Last: none, Waits: none, LastTry: none, Op: none}
	idle    = func() (w Worker) {
		for i := range w.As {
			w.As[i] = none
		}
		return w
	}()
)

// maxTimes is the number of times that a state can have.
const maxTimes = maxJobs + maxFailures*(3+maxJobs) + maxFacts

// times returns where the state's times are. It calls no function for each: most of an exploration's
// time with the race detector would be calls.
func (s *State) times() (at [maxTimes]*Time, n int) {
	for i := range s.NJobs {
		at[n] = &s.Jobs[i].Finalized
		n++
	}
	for i := range s.NFailures {
		e := &s.Entries[i]
		at[n], at[n+1], at[n+2] = &s.Failures[i].At, &e.Closed, &e.Acted
		n += 3
		for j := range s.IDs {
			at[n] = &e.Completed[j]
			n++
		}
	}
	for i := range s.NFacts {
		at[n] = &s.Facts[i].At
		n++
	}
	return at, n
}

// now returns a time after all others.
func (s *State) now() Time {
	last := Time(0)
	at, n := s.times()
	for _, t := range at[:n] {
		last = max(last, *t)
	}
	return last + 1
}

// normalize maps equivalent states to the same value: times become ranks, and the order of the
// workers is fixed.
func (s *State) normalize() {
	for i := range s.NJobs {
		j := &s.Jobs[i]
		if j.State == Gone {
			*j = Job{ID: j.ID, Of: j.Of, Failure: none, Mark: none, DoneOf: none, Entry: j.Entry, Remembered: j.Remembered}
		}
	}
	var used [4]uint64
	at, n := s.times()
	for _, t := range at[:n] {
		if *t > 0 {
			used[*t>>6] |= 1 << (*t & 63)
		}
	}
	for _, t := range at[:n] {
		if *t == 0 {
			continue
		}
		rank := bits.OnesCount64(used[*t>>6] & (1<<(*t&63) - 1))
		for w := range *t >> 6 {
			rank += bits.OnesCount64(used[w])
		}
		*t = Time(rank + 1)
	}
	if less(s.Workers[1], s.Workers[0]) {
		s.Workers[0], s.Workers[1] = s.Workers[1], s.Workers[0]
	}
}

func less(a, b Worker) bool {
	if a.Doing != b.Doing {
		return a.Doing > b.Doing
	}
	if a.Of != b.Of {
		return a.Of < b.Of
	}
	for i := range a.As {
		if a.As[i] != b.As[i] {
			return a.As[i] < b.As[i]
		}
	}
	return false
}

func bit(i int8) uint8 { return 1 << i }
