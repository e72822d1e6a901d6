// Package protocol is a model of how a failed job becomes one dead letter, and of everything that changes the job and
// the dead letter afterwards: River, capture, filing, facts, the reconciler, redelivery and operators. An explorer
// visits all states within bounds and checks the invariants. A walk executes the model's steps on a real Postgres and
// compares the states. See docs/protocol.md.
package protocol

import "math/bits"

const (
	maxJobs     = 6
	maxFailures = 6
	maxInbox    = 6
	maxFacts    = 8
	maxWorkers  = 2
)

// Time is the rank of a time among all times of a state: only their order counts. 0 means never.
type Time uint8

// none stands for no job, no entry and no failure, and in Entry.Op for no status.
const none int8 = -1

// JobState is the state of a River job, as far as the protocol distinguishes states.
type JobState uint8

// The states of a job. Gone means that River has no such row. Retryable also stands for scheduled and pending.
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
	ID        int8 // River's id; after this job is gone, another job may get the same id
	State     JobState
	Of        int8 // entry of which this job is a redelivery; none for an application's job
	Mark      int8 // metadata dlq:entry_id
	DoneOf    int8 // metadata dlq:done: the entry with which dlqd completed the job
	Done      bool // dlqd completed the job, and the job has not run since
	Cancel    bool // metadata cancel_attempted_at
	Keyed     bool // whether the job has the model's only unique key
	Errors    int8 // at most 2
	Failure   int8 // the job's last failure, or its cancellation by an operator
	Finalized Time // finalized_at

	Entry      int8 // the job's entry in entry_jobs
	Remembered bool // retired_jobs has a failure of the job

	Overtaken bool // for the invariants: the job's entry was closed while the job ran, or an operator retried the job
}

// Status is the status of an entry.
type Status uint8

// The statuses of an entry. Unfiled means that the entry does not exist; its failure may be in the inbox. Deleted means
// that the entry was deleted.
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

// Entry is a dead letter. Its id is the number of the failure from which it was made.
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
	Completed [maxJobs]Time // replay_attempts: by job id, the time when that job completed the entry's work
	LastTry   int8          // replay_attempts: the id of the last job
	Known     uint8         // transitions.failed_at: the set of failures that the entry has received
	Op        int8          // the status that the last operation of an operator gave the entry
	Still     bool          // whether the entry still has the status Op
	Bare      bool          // original_event: the entry has no payload

	Acted Time // for the invariants: when an operator last closed or reopened the entry
}

// Failure is an end of a job other than a success: a failure, or a cancellation by an operator.
type Failure struct {
	Job     int8
	At      Time  // finalized_at
	Cancel  bool  // a cancellation by an operator, which is not filed
	Keyed   bool  // the failed job had the unique key, so its entry has the key, too
	TakenBy int8  // retired_jobs.entry_id: the entry that has the failure, unless the entry was made from it and exists
	In      uint8 // for the invariants: the set of entries that ever had the failure
	Noted   bool  // for the invariants: an entry's audit trail mentions the failure
	Closed  bool  // for the invariants: an operator closed the failure's entry, and its work was not requested since
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

// Row is a row of the inbox: a failure, and whether the reconciler appended it.
type Row struct {
	Failure    int8
	Reconciler bool
}

// Doing says what a worker has read in one transaction and will use in its next transaction.
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
	Of    uint8             // the inbox rows (by failure) or undecided entries that the worker has read
	As    [maxFailures]int8 // for each of these entries, its last failure
}

// State is everything that the protocol stores. A State is comparable and has no pointers.
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
	Scanned   uint8 // the jobs that the reconciler found to be failures without an entry
	Rest      bool  // Scanned has cancelled jobs; a page of discarded jobs follows in the same transaction

	// How much of each of the [Bounds] is used.
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

// maxTimes is the maximum number of times in a state.
const maxTimes = maxJobs + maxFailures*(3+maxJobs) + maxFacts

// times returns pointers to the state's times, and their number. It calls no function for each time: with the race
// detector, such calls would be most of the duration of an exploration.
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

// now returns a time after all others in the state.
func (s *State) now() Time {
	last := Time(0)
	at, n := s.times()
	for _, t := range at[:n] {
		last = max(last, *t)
	}
	return last + 1
}

// normalize maps equivalent states to the same value: it replaces times by their ranks and sorts the workers.
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
