// Package protocol is a model of how a failed job becomes one dead letter, and of everything that moves the two afterwards: River,
// capture, filing, facts, the reconciler, redelivery, and people. An explorer goes through all that can happen within bounds and checks
// the invariants; a walk carries the model's steps out on a real Postgres and compares. See docs/protocol.md.
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

// none stands for no job, no entry and no failure.
const none int8 = -1

// JobState is a state of River's, as far as the protocol tells them apart.
type JobState uint8

// The states of a job. Gone: River has no such row; retryable stands for scheduled and pending, too.
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

// Job is a row of river_job, identified by id and created_at, with what dlqd remembers of it.
type Job struct {
	ID        int8 // River's id: another job may have it once this one is gone
	State     JobState
	Of        int8 // the entry that it was made from; none for an application's job
	Mark      int8 // metadata dlq:entry_id
	DoneOf    int8 // metadata dlq:done: the entry with which dlqd completed it
	Done      bool // and it has not run since
	Cancel    bool // metadata cancel_attempted_at
	Keyed     bool // it has the unique key (there is one key in the model)
	Errors    int8 // up to 2
	Failure   int8 // which failure its last one was; of a job that an operator cancelled, that end
	Finalized Time // finalized_at

	Entry      int8 // entry_jobs
	Remembered bool // retired_jobs has a failure of it

	Overtaken bool // for the invariants: its entry was closed while it ran, or a person has retried it
}

// Status is a status of an entry.
type Status uint8

// The states of an entry. Unfiled: there is no such entry, or it is in the inbox; Deleted: it was there once.
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

// Entry is a dead letter that is filed. Its id is that of the failure that it was made of.
type Entry struct {
	Status    Status
	Job       int8          // river_job_id and job_created_at
	Last      int8          // last_failed_at: whose time that is
	Closed    Time          // closed_at
	Waits     int8          // redelivery_job_id, an id
	ByRiver   bool          // locked_by: a retry outside dlqd
	ByPerson  bool          // resolution_strategy: a person closed it
	Decided   bool          // strategy is set
	DoneTwice bool          // rule is done-twice
	Tries     int8          // dlq_retry_count
	Completed [maxJobs]Time // replay_attempts: when a job, by id, completed it
	LastTry   int8          // replay_attempts: the last one's job, an id
	Known     uint8         // transitions.failed_at: which failures it has taken in
	Op        int8          // the operation of a person that moved it last
	Still     bool          // and it is where that put it
	Bare      bool          // original_event: there is no payload

	Acted Time // for the invariants: when a person last closed or reopened it
}

// Failure is an end of a job that is a failure, or an operator's cancellation.
type Failure struct {
	Job     int8
	At      Time  // finalized_at
	Cancel  bool  // it is no failure to file
	Keyed   bool  // its job had the unique key: its entry has it
	TakenBy int8  // retired_jobs.entry_id: which entry took it in, where the entry's own id does not say so
	In      uint8 // for the invariants: which entries ever took it in
	Noted   bool  // for the invariants: an entry's trail says that it happened
	Closed  bool  // for the invariants: a person has closed its entry, and nothing has been said since
}

// FactKind is what a fact says.
type FactKind uint8

// What facts say.
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
	Failure int8 // of an end that is no success
	At      Time
}

// Row is a row of the inbox: a failure, and who found it.
type Row struct {
	Failure    int8
	Reconciler bool
}

// Doing is what a worker is in the middle of: what it has read in an earlier transaction.
type Doing uint8

// What a worker is doing.
const (
	Idle Doing = iota
	Files
	Decides
)

// Worker is a DLQ worker between two transactions.
type Worker struct {
	Doing Doing
	Of    uint8             // inbox rows (by failure) that it read, or undecided entries
	As    [maxFailures]int8 // of these: which failure was their last
}

// State is all that the protocol remembers. It is comparable, and without pointers.
type State struct {
	Jobs      [maxJobs]Job
	NJobs     int8
	IDs       int8
	Entries   [maxFailures]Entry
	Failures  [maxFailures]Failure
	NFailures int8
	Inbox     [maxInbox]Row
	NInbox    int8
	Facts     [maxFacts]Fact // in the order in which they lie in the table
	NFacts    int8
	Workers   [maxWorkers]Worker
	Scanning  bool  // the reconciler has read, and locked nothing yet
	Scanned   uint8 // which jobs it found to be failures without an entry
	Rest      bool  // they were cancelled: a page of discarded ones is still to be read, in the same transaction

	// What is used up of the bounds.
	Inserted, Moves, Retries, Misses, Deletes, Attempts, Sent, Isolated, Lost int8
}

// Start is the state before anything has happened.
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

// times calls fn with each time of the state.
func (s *State) times(fn func(*Time)) {
	for i := range s.NJobs {
		fn(&s.Jobs[i].Finalized)
	}
	for i := range s.NFailures {
		fn(&s.Failures[i].At)
		e := &s.Entries[i]
		fn(&e.Closed)
		fn(&e.Acted)
		for j := range s.IDs {
			fn(&e.Completed[j])
		}
	}
	for i := range s.NFacts {
		fn(&s.Facts[i].At)
	}
}

// now is a time after all others.
func (s *State) now() Time {
	last := Time(0)
	s.times(func(t *Time) { last = max(last, *t) })
	return last + 1
}

// normalize gives states that differ in nothing that counts one form: times become ranks, and workers are interchangeable.
func (s *State) normalize() {
	for i := range s.NJobs {
		j := &s.Jobs[i]
		if j.State == Gone {
			*j = Job{ID: j.ID, Of: j.Of, Failure: none, Mark: none, DoneOf: none, Entry: j.Entry, Remembered: j.Remembered}
		}
	}
	var used [4]uint64
	s.times(func(t *Time) {
		if *t > 0 {
			used[*t>>6] |= 1 << (*t & 63)
		}
	})
	s.times(func(t *Time) {
		if *t == 0 {
			return
		}
		rank := bits.OnesCount64(used[*t>>6] & (1<<(*t&63) - 1))
		for w := range *t >> 6 {
			rank += bits.OnesCount64(used[w])
		}
		*t = Time(rank + 1)
	})
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
