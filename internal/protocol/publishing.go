package protocol

import (
	"fmt"
	"slices"
)

// Sources have a separate model: a record that died in a topic, its entry, redeliveries that publish it, a consumer
// group that reads what is published, and records that come back. Readers, workers and the consumer may stop between
// any two transactions. It models these functions of db/code: store_records, begin_delivery, end_delivery,
// return_record, mark_read, resolve_returned, and what apply_fact and resolve_by do with entries of records.

// The invariants of sources, as reports name them.
const (
	StoredOnce       = "each dead letter of a topic is stored once"
	SameEntry        = "a record that comes back belongs to the entry for which it was published"
	IntentFirst      = "nothing is published without a delivery that is committed"
	Acknowledged     = "an entry is returned only after the broker acknowledged its record"
	FailureStays     = "after a record came back, its entry is open or failed until a redelivery or an operator's action"
	PastIsPast       = "a consumer group resolves an entry only once it is past the entry's last record"
	ReturnedResolves = "a returned entry is resolved once its consumer group is past the record"
)

const (
	maxSends  = 2 // redeliveries
	maxCopies = 2 // published records
	maxDead   = maxCopies + 1
	readers   = 2
)

// Publishing is the state of a record and its entry.
type Publishing struct {
	Dead     [maxDead]int8 // the topic of dead letters: the delivery that failed, or none
	NDead    int8
	Position int8 // dlq.source_positions.next_offset
	Until    int8 // stored_until; above 0 once an operator has moved the position back, which is once at most
	Readers  [readers]Reading

	Status     Publication
	Entries    int8 // entries made from records
	Deliveries [maxSends]Sending
	NSent      int8
	Came       [maxDead]int8 // facts "returned" that are not applied yet: their deliveries
	NCame      int8

	Copies  [maxCopies]int8 // the input topic: the deliveries of the published records
	NCopies int8
	Next    int8 // the consumer group's committed offset

	Stored [maxDead]bool // for the invariants
	Due    bool          // for the invariants: the entry's last redelivery failed
}

// Publication is the status of the entry.
type Publication uint8

// The statuses. NotStored means that there is no entry yet. Closed means that an operator closed the entry.
const (
	NotStored Publication = iota
	Waiting               // pending, manual or failed
	Underway              // processing: it waits for its last delivery
	Returned
	Done   // resolved, without an operator
	Closed // by an operator
)

// Reading is a batch that a reader has fetched and not stored yet.
type Reading struct {
	Busy        bool
	First, Next int8
}

// Sending is a redelivery: its job, its worker and its row of dlq.source_deliveries.
type Sending struct {
	Job      JobState
	Phase    SendPhase
	Begun    bool // the row exists
	At       int8 // "offset": the last acknowledged copy, or none
	Consumed bool // consumed_at
	Settled  bool // settled_at
	Applied  bool // the end of the job is applied to the entry
}

// SendPhase is the progress of a worker that publishes.
type SendPhase uint8

// The phases. Each ends with a transaction, or with the broker's answer.
const (
	NotSending SendPhase = iota
	Intended             // the delivery is committed
	Published            // the broker has the record
	Noted                // the acknowledgement is committed
)

// StartPublishing returns the state after a consumer failed: its record is in the topic of dead letters.
func StartPublishing() Publishing {
	s := Publishing{NDead: 1}
	for i := range s.Dead {
		s.Dead[i], s.Came[i] = none, none
	}
	for i := range s.Copies {
		s.Copies[i] = none
	}
	for i := range s.Deliveries {
		s.Deliveries[i].At = none
	}
	return s
}

// PublishingStep is a step of the model. Bad steps are a death, a failure and an operator's action.
type PublishingStep = stepOf[Publishing]

// Steps returns the steps that are possible in the state.
func (s *Publishing) Steps(rules Rules) (steps []PublishingStep) {
	can := func(bad bool, change func(*Publishing) (wrong string), format string, args ...any) {
		after := *s
		wrong := change(&after)
		switch {
		case wrong != "":
		case after.Entries > 1:
			wrong = SameEntry
		case after.Due && (after.Status == Returned || after.Status == Done):
			wrong = FailureStays
		}
		steps = append(steps, PublishingStep{fmt.Sprintf(format, args...), after, wrong, bad})
	}
	for r, reading := range s.Readers {
		if !reading.Busy {
			if s.Position < s.NDead && (r == 0 || s.Readers[r-1].Busy) {
				can(false, func(o *Publishing) string {
					o.Readers[r] = Reading{true, o.Position, o.NDead}
					return ""
				}, "reader %d fetches a batch", r)
			}
			continue
		}
		can(false, func(o *Publishing) string {
			o.Readers[r] = Reading{}
			return o.store(reading)
		}, "reader %d stores its batch", r)
		can(true, func(o *Publishing) string { o.Readers[r] = Reading{}; return "" }, "reader %d dies", r)
	}
	if s.Position > 0 && s.Until == 0 {
		can(true, func(o *Publishing) string {
			o.Until, o.Position = o.Position, 0
			return ""
		}, "an operator moves the position back")
	}
	if s.NSent < maxSends {
		switch s.Status { //nolint:exhaustive // the others are not redelivered
		case Waiting, Returned:
			can(s.Status == Returned, func(o *Publishing) string {
				if o.NSent > 0 { // nothing depends on the row of the last delivery any more, except that it exists
					last := &o.Deliveries[o.NSent-1]
					*last = Sending{Job: Completed, Begun: last.Begun, At: none, Settled: true, Applied: true}
				}
				o.Deliveries[o.NSent].Job = Available
				o.NSent++
				o.Status, o.Due = Underway, false
				return ""
			}, "the entry is redelivered")
		}
	}
	for d := range s.NSent {
		s.sendSteps(rules, d, can)
	}
	if s.Next < s.NCopies {
		can(false, func(o *Publishing) string { o.Next++; return "" }, "the consumer succeeds")
		can(true, func(o *Publishing) string {
			o.Dead[o.NDead] = o.Copies[o.Next]
			o.NDead, o.Next = o.NDead+1, o.Next+1
			return ""
		}, "the consumer fails, and its framework sends the record to the topic of dead letters")
	}
	if s.NCame > 0 {
		d := s.Came[0]
		held := s.Status == Underway && d == s.NSent-1 && !rules.ComesBackAtOnce
		if !held {
			can(false, func(o *Publishing) string { o.comeBack(d); return "" }, "the return of delivery %d is applied", d)
		}
	}
	if slices.ContainsFunc(s.Deliveries[:s.NSent], func(d Sending) bool {
		return d.At != none && d.At < s.Next && !d.Consumed && !d.Settled
	}) {
		can(false, func(o *Publishing) string {
			for i := range o.NSent {
				d := &o.Deliveries[i]
				d.Consumed = d.Consumed || d.At != none && d.At < o.Next && !d.Settled
			}
			return ""
		}, "the group's offsets are read")
	}
	if slices.ContainsFunc(s.Deliveries[:s.NSent], func(d Sending) bool { return d.Consumed && !d.Settled }) {
		can(false, func(o *Publishing) string { return o.settle(rules) }, "the quiet time is over")
	}
	if s.Status == Returned {
		can(true, func(o *Publishing) string { o.Status = Done; return "" }, "returnedFor is over")
	}
	if s.Status == Returned || s.Status == Waiting {
		can(true, func(o *Publishing) string { o.Status, o.Due = Closed, false; return "" }, "an operator closes the entry")
	}
	return steps
}

// sendSteps adds the steps of the worker of a delivery.
func (s *Publishing) sendSteps(rules Rules, d int8, can func(bool, func(*Publishing) string, string, ...any)) {
	sending := &s.Deliveries[d]
	phase := func(bad bool, to SendPhase, change func(*Publishing, *Sending) string, text string) {
		can(bad, func(o *Publishing) string {
			o.Deliveries[d].Phase = to
			return change(o, &o.Deliveries[d])
		}, "%s, delivery %d", text, d)
	}
	publish := func(o *Publishing) string {
		if !o.Deliveries[d].Begun {
			return IntentFirst
		}
		o.Copies[o.NCopies] = d
		o.NCopies++
		return ""
	}
	fail := func(o *Publishing, sending *Sending) string { sending.Job = Discarded; return "" }
	switch sending.Phase {
	case NotSending:
		switch sending.Job { //nolint:exhaustive // the others have no step
		case Available:
			phase(false, Intended, func(_ *Publishing, sending *Sending) string {
				sending.Job, sending.Begun = Running, true
				return ""
			}, "a worker commits its intent")
		case Running: // its worker died
			phase(false, NotSending, func(_ *Publishing, sending *Sending) string {
				sending.Job = Available
				return ""
			}, "the job is rescued")
		case Completed, Discarded:
			if !sending.Applied {
				can(false, func(o *Publishing) string { return o.end(d) }, "the end of delivery %d is applied", d)
			}
		}
		return
	case Intended:
		if s.NCopies < maxCopies {
			phase(false, Published, func(o *Publishing, _ *Sending) string { return publish(o) }, "the broker stores the record")
			phase(true, NotSending, func(o *Publishing, sending *Sending) string {
				fail(o, sending)
				return publish(o)
			}, "the publication times out, and the broker has the record")
		}
		phase(true, NotSending, fail, "the publication fails")
	case Published:
		phase(false, Noted, func(o *Publishing, sending *Sending) string {
			sending.At = int8(lastOf(o.Copies[:o.NCopies], d))
			if !rules.KeepsConsumed {
				sending.Consumed, sending.Settled = false, false
			}
			return ""
		}, "the acknowledgement is committed")
	case Noted:
		phase(false, NotSending, func(_ *Publishing, sending *Sending) string {
			sending.Job = Completed
			return ""
		}, "the job is completed")
	}
	phase(true, NotSending, func(*Publishing, *Sending) string { return "" }, "the worker dies")
}

// lastOf returns the index of the last element with a value.
func lastOf(values []int8, value int8) int {
	for i, found := range slices.Backward(values) {
		if found == value {
			return i
		}
	}
	return int(none)
}

// store models dlq.store_records.
func (s *Publishing) store(batch Reading) string {
	if batch.First > s.Position {
		return "" // the reader reads again from the position
	}
	for at := s.Position; at < batch.Next; at++ {
		if at < s.Until { // dlq.is_stored
			continue
		}
		if s.Stored[at] {
			return StoredOnce
		}
		s.Stored[at] = true
		if d := s.Dead[at]; d != none && s.Deliveries[d].Begun {
			s.Deliveries[d].Settled = true
			s.Came[s.NCame] = d
			s.NCame++
			continue
		}
		s.Entries++
		s.Status, s.Due = Waiting, true
	}
	s.Position = max(s.Position, batch.Next)
	return ""
}

// end models dlq.record_end and dlq.resolve_by for the end of a delivery's job.
func (s *Publishing) end(d int8) string {
	s.Deliveries[d].Applied = true
	switch {
	case s.Status != Underway || d != s.NSent-1:
	case s.Deliveries[d].Job == Discarded:
		s.Status, s.Due = Waiting, true
	case s.Deliveries[d].At == none: // dlq.is_published
		return Acknowledged
	default:
		s.Status = Returned
	}
	return ""
}

// comeBack models dlq.return_record for the first fact. The failure of an earlier delivery does not count if the entry
// was redelivered since.
func (s *Publishing) comeBack(d int8) {
	copy(s.Came[:], s.Came[1:])
	s.Came[maxDead-1] = none
	s.NCame--
	if s.Status != Underway {
		s.Status = Waiting
	}
	s.Due = s.Due || d == s.NSent-1
}

// settle models dlq.resolve_returned for deliveries that the consumer group is past.
func (s *Publishing) settle(rules Rules) string {
	for i := range s.NSent {
		d := &s.Deliveries[i]
		last := i == s.NSent-1
		switch {
		case !d.Consumed || d.Settled:
		case last && s.Status == Returned:
			s.Status, d.Settled = Done, true
			if d.At >= s.Next {
				return PastIsPast
			}
		case last && s.Status == Underway && !rules.SettlesEarly: // the entry is about to be returned
		default:
			d.Settled = true
		}
	}
	return ""
}

// ExplorePublishing visits all states (explore). Each returned entry must be able to leave this state without
// returnedFor, a failure or an operator.
func ExplorePublishing(rules Rules) (states int, wrong string, trace []string) {
	return explore(StartPublishing(), func(s *Publishing) []PublishingStep { return s.Steps(rules) },
		func(s *Publishing) bool { return s.Status != Returned }, ReturnedResolves)
}
