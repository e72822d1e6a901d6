package protocol

import (
	"fmt"
	"slices"
)

// Ordering keys have a separate model: two messages of one key, two workers that deliver, processes that die, and
// messages that are rescued. It models these functions of db/code/08_flow.sql: order_predecessor, complete_ordered,
// order_done, wake_first, rescue_messages.

// The invariants of ordering keys, as reports name them.
const (
	InOrder   = "first successes are in order"
	NotBehind = "after a message's first success no older message is sent"
	NoneLost  = "no message is lost"
)

// Ordering is the state of the messages of one key.
type Ordering struct {
	Messages   [2]Message // the older first
	Deliveries [2]Delivery
}

// Message is a message and its job.
type Message struct {
	Job       JobState // Retryable means that the message is held behind another one
	Place     bool     // dlq.ordered_jobs
	Delivered bool     // for the invariants: the receiver has answered the message with success
}

// Delivery is an attempt at a message by a worker.
type Delivery struct {
	Phase Phase
	Of    int
	Late  bool // the job was rescued during the attempt, because the process was silent
}

// Phase is the progress of a delivery.
type Phase uint8

// Each phase ends with a transaction, or with the receiver's answer.
const (
	NoDelivery    Phase = iota
	Fetched             // River has given the job to the worker
	MaySend             // no other message comes first
	Answered            // the receiver has answered with success
	PlaceReleased       // with [Rules.PlaceFirst]: the place is removed, and the job is still running
)

// StartOrdering returns the state after both messages were submitted.
func StartOrdering() Ordering {
	m := Message{Job: Available, Place: true}
	return Ordering{Messages: [2]Message{m, m}}
}

// OrderingStep is a step of the model. Bad steps are a death, a refusal and the end of a hold time.
type OrderingStep = stepOf[Ordering]

// Steps returns the steps that are possible in the state.
func (s *Ordering) Steps(rules Rules) (steps []OrderingStep) {
	can := func(bad bool, change func(*Ordering) (wrong string), format string, args ...any) {
		after := *s
		wrong := change(&after)
		for m := range after.Messages {
			if after.Messages[m].Job == Completed && !after.Messages[m].Delivered {
				wrong = NoneLost
			}
		}
		steps = append(steps, OrderingStep{fmt.Sprintf(format, args...), after, wrong, bad})
	}
	idle := slices.IndexFunc(s.Deliveries[:], func(d Delivery) bool { return d.Phase == NoDelivery })
	for m := range s.Messages {
		switch s.Messages[m].Job { //nolint:exhaustive // the others are left
		case Available:
			if idle >= 0 {
				can(false, func(o *Ordering) string {
					o.Messages[m].Job, o.Deliveries[idle] = Running, Delivery{Phase: Fetched, Of: m}
					return ""
				}, "worker %d fetches message %d", idle, m)
			}
		case Retryable:
			// Messages must be able to arrive without the end of a hold time, which may be minutes away.
			can(true, func(o *Ordering) string {
				o.Messages[m].Job = Available
				return ""
			}, "the hold time of message %d ends", m)
			can(false, func(o *Ordering) string { o.wakeFirst(); return "" }, "the releaser looks at the key")
		case Running:
			// A message whose request is about to be sent is not rescued. The model leaves out a process that is frozen
			// at that moment: see docs/protocol.md.
			if !slices.Contains(s.Deliveries[:], Delivery{Phase: MaySend, Of: m}) {
				can(false, func(o *Ordering) string { o.rescue(m); return "" }, "message %d is rescued", m)
			}
		}
	}
	for w, d := range s.Deliveries {
		endDelivery := func(bad bool, change func(*Ordering) string, format string, args ...any) {
			can(bad, func(o *Ordering) string {
				o.Deliveries[w] = Delivery{}
				return change(o)
			}, format, args...)
		}
		advance := func(to Phase, change func(*Ordering) string, text string) {
			can(false, func(o *Ordering) string { o.Deliveries[w].Phase = to; return change(o) }, text+", worker %d", w)
		}
		switch d.Phase {
		case NoDelivery:
			continue
		case Fetched:
			after := *s
			switch {
			case d.Late:
				endDelivery(false, func(*Ordering) string { return "" }, "worker %d finds that its attempt is over", w)
			case after.first(d.Of):
				advance(MaySend, func(o *Ordering) string { o.first(d.Of); return "" }, "no message comes before")
			default:
				endDelivery(false, func(o *Ordering) string {
					o.Messages[d.Of].Job = Retryable
					return ""
				}, "message %d is held", d.Of)
			}
		case MaySend:
			advance(Answered, func(o *Ordering) string { return o.sent(d.Of, true) },
				fmt.Sprintf("message %d is delivered", d.Of))
			endDelivery(true, func(o *Ordering) string {
				o.Messages[d.Of].Job = Available
				return o.sent(d.Of, false)
			}, "the receiver refuses message %d", d.Of)
		case Answered:
			if rules.PlaceFirst {
				advance(PlaceReleased, func(o *Ordering) string { o.done(d.Of); return "" }, "the place is released")
				break
			}
			endDelivery(false, func(o *Ordering) string { // dlq.complete_ordered
				if o.complete(d) {
					o.done(d.Of)
				}
				return ""
			}, "message %d is completed, and its place is released", d.Of)
			endDelivery(false, func(o *Ordering) string {
				o.complete(d)
				return ""
			}, "releasing the place fails, and River completes message %d", d.Of)
		case PlaceReleased:
			endDelivery(false, func(o *Ordering) string { o.complete(d); return "" }, "River completes message %d", d.Of)
		}
		endDelivery(true, func(*Ordering) string { return "" }, "worker %d dies", w)
	}
	return steps
}

// first models dlq.order_predecessor: it reports whether no other message must be delivered before m. It removes the
// places of completed messages.
func (s *Ordering) first(m int) bool {
	if !s.Messages[m].Place {
		return true
	}
	for before := range m {
		if s.Messages[before].Place && s.Messages[before].Job != Completed {
			return false
		}
		s.Messages[before].Place = false
	}
	return true
}

// done models dlq.order_done: it removes the message's place and makes the next message available.
func (s *Ordering) done(m int) {
	s.Messages[m].Place = false
	s.wakeFirst()
}

// wakeFirst models dlq.wake_first. The first message that is not done becomes available, and the messages before it
// lose their places.
func (s *Ordering) wakeFirst() {
	for n := range s.Messages {
		m := &s.Messages[n]
		switch {
		case !m.Place:
		case m.Job == Completed:
			m.Place = false
		default:
			if m.Job == Retryable {
				m.Job = Available
			}
			return
		}
	}
}

// complete models dlq.complete_ordered: it completes the job, or returns false if the job's attempt is already over.
func (s *Ordering) complete(d Delivery) bool {
	if d.Late {
		return false
	}
	s.Messages[d.Of].Job = Completed
	return true
}

// rescue models dlq.rescue_messages for a message whose process died or was silent for too long.
func (s *Ordering) rescue(m int) {
	s.Messages[m].Job = Available
	for w := range s.Deliveries {
		if d := &s.Deliveries[w]; d.Phase != NoDelivery && d.Of == m {
			d.Late = true
		}
	}
}

// sent models a request for a message and the receiver's answer. It returns the invariant that the request breaks, or
// "".
func (s *Ordering) sent(m int, success bool) string {
	wrong := ""
	for n := range s.Messages {
		switch {
		case n > m && s.Messages[n].Delivered:
			wrong = NotBehind
		case n < m && success && !s.Messages[n].Delivered:
			wrong = InOrder
		}
	}
	s.Messages[m].Delivered = s.Messages[m].Delivered || success
	return wrong
}

// ExploreOrdering visits all states (explore). From every state, both messages must be able to arrive.
func ExploreOrdering(rules Rules) (states int, wrong string, trace []string) {
	return explore(StartOrdering(), func(s *Ordering) []OrderingStep { return s.Steps(rules) }, func(s *Ordering) bool {
		return s.Messages[0].Job == Completed && s.Messages[1].Job == Completed
	}, NoneLost)
}
