// Package policy is the configuration that teams keep in Git: which queues there are, where their messages go, how they
// are retried, what errors mean and what happens to dead letters. It is a directory of six files, each of which may be
// absent, with overlays for each environment; docs/policy.md describes it.
package policy

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/redact"
)

// DefaultQueue is the one queue of a policy that names none.
const DefaultQueue = "default"

// Policy is the whole configuration: what six files say, on top of the built-in defaults.
type Policy struct {
	RetryPolicies

	Breakers   CircuitBreakers
	Routing    Routing
	Workers    WorkerPool
	Monitoring Monitoring
	Access     Access

	settings    []Setting
	origins     map[string]map[string]string // file and line, by file and path
	version     string
	dir         string
	files       []string // that it was read from, without their endings
	secretFiles []string
	secrets     map[string]string // by the place that names a file, and the file
	looked      string            // what Watch would have found when it was read
}

// RetryPolicies is retry-policies.yaml: queues, and the destinations of their messages.
type RetryPolicies struct {
	Defaults            Queue                   `json:"defaults"     jsonschema:"description=What every queue has that does not say otherwise."`
	Queues              map[string]*Queue       `json:"queues"       jsonschema:"description=Queues by name: lower-case letters and digits in words joined by - or _."`
	Destinations        map[string]*Destination `json:"destinations" jsonschema:"description=Where messages are delivered\\, by name."`
	DestinationDefaults Destination             `json:"destinationDefaults" jsonschema:"description=What every destination has that does not say otherwise."`
	Data                Data                    `json:"data"         jsonschema:"description=The audit trail\\, and who sees what."`
}

// Data says how long the audit trail is kept, and who sees what.
type Data struct { //nolint:recvcheck // Mask is of the data in force, wherever they are
	AuditRetention    time.Duration `json:"auditRetention"   jsonschema:"description=How long the audit trail is kept\\, by whole months."`
	SensitiveColumns  []string      `json:"sensitiveColumns" jsonschema:"enum=original_event,enum=edited_event,enum=error_message,enum=error_stack_trace,enum=error_context,enum=retry_history,enum=replay_attempts,enum=metadata,enum=subscriber_id,enum=tags,enum=notes,description=Columns of dead letters that dlq_reader cannot read; with edited_event\\, what edits changed in the audit trail too."`
	SensitivePaths    []string      `json:"sensitivePaths"   jsonschema:"description=What is shown as *** of payloads\\, headers and metadata\\, to everybody who has not said why they look: payload.card.number\\, payload..email at any depth\\, headers.authorization\\, payload.*.iban. Case does not count\\, and arrays are looked through. What is there is hidden in error texts as well."`
	SensitivePatterns []string      `json:"sensitivePatterns" jsonschema:"enum=cardNumbers,enum=tokens,description=What is shown as *** wherever it is: numbers of payment cards\\, and tokens (bearer tokens\\, JWTs\\, keys of well-known issuers)."`
}

// Queue says how the messages of a queue are delivered, and how long their dead letters are kept.
type Queue struct {
	Name        string        `json:"-"`
	MaxAttempts int           `json:"maxAttempts" jsonschema:"minimum=1,maximum=1000,description=Attempts of the job before it is a dead letter."`
	Backoff     Backoff       `json:"backoff"     jsonschema:"description=Between the attempts."`
	Timeout     time.Duration `json:"timeout"     jsonschema:"description=Of one delivery\\, connection and answer together; 1ms to 1h."`
	Destination string        `json:"destination" jsonschema:"description=Name of the destination."`
	WhenOpen    string        `json:"whenOpen"    jsonschema:"enum=reject,enum=accept,description=New messages while the destination's breaker is open: answered 503 (reject) or taken and held (accept)."`
	Ordering    bool          `json:"ordering"    jsonschema:"description=Messages with an orderingKey are delivered in order; later ones wait behind an open dead letter."`
	Payload     string        `json:"payload"     jsonschema:"enum=parsed,enum=exact,description=What is delivered: the payload as the database writes it (parsed) or byte for byte as it was submitted (exact)\\, for receivers that sign or hash bodies."`
	// DeadLetterLogicalFailures makes a dead letter of a message whose receiver answers 200 with {"success": false}.
	DeadLetterLogicalFailures bool      `json:"deadLetterLogicalFailures" jsonschema:"description=An answer of 200 with success: false becomes a dead letter."`
	Retention                 Retention `json:"retention"                 jsonschema:"description=How long closed dead letters are kept."`
}

// Backoff is the wait between attempts.
type Backoff struct {
	Kind  string        `json:"kind"  jsonschema:"enum=exponential,enum=fixed,description=exponential doubles the delay after each attempt."`
	Delay time.Duration `json:"delay" jsonschema:"description=Before the second attempt; 1ms to 24h. Actual waits are up to 20 % longer or shorter."`
}

// Kinds of backoff.
const (
	BackoffExponential = "exponential"
	BackoffFixed       = "fixed"
)

// What a queue does with new messages while its destination's breaker is open.
const (
	WhenOpenReject = "reject"
	WhenOpenAccept = "accept"
)

// What is delivered of a payload.
const (
	PayloadParsed = "parsed"
	PayloadExact  = "exact"
)

// Retention is how long dead letters are kept after they closed.
type Retention struct {
	Resolved time.Duration `json:"resolved" jsonschema:"description=dlq_resolved."`
	Failed   time.Duration `json:"failed"   jsonschema:"description=dlq_failed."`
	Archived time.Duration `json:"archived" jsonschema:"description=dlq_archived."`
}

// Destination is where messages are delivered.
type Destination struct {
	Name       string `json:"-"`
	URL        string `json:"url"        jsonschema:"description=http or https. One that holds a secret is better kept in urlFile."`
	URLFile    string `json:"urlFile"    jsonschema:"description=File with the URL\\, beside this file or by its whole path; nothing but its host is shown then."`
	Secret     Secret `json:"secret"     jsonschema:"description=Standard Webhooks secret (whsec_…); deliveries are signed if there is one. Better kept in secretFile."`
	SecretFile string `json:"secretFile" jsonschema:"description=File with the secret\\, beside this file or by its whole path."`
	// RedeliveriesPerSecond paces what dlqd itself sends back: redeliveries of DLQ workers, and messages that were held.
	RedeliveriesPerSecond float64    `json:"redeliveriesPerSecond" jsonschema:"minimum=0,description=Most redeliveries a second by DLQ workers\\, and releases of held messages\\, over all processes; 0 is no limit."`
	ErrorPaths            ErrorPaths `json:"errorPaths"         jsonschema:"description=Places in its answers other than 2xx (JSON and XML) that say what went wrong\\, before those that dlqd knows (docs/delivery.md)."`
	Probe                 Probe      `json:"probe"                 jsonschema:"description=A request that says whether the destination is well; asked before conditional redeliveries."`
}

// ShownURL is the destination's URL as people may see it.
func (d *Destination) ShownURL() string {
	if d.URLFile != "" {
		return redact.Origin(d.URL)
	}
	return redact.URL(d.URL)
}

// Hide takes the destination's secrets out of a text: receivers, and errors, repeat what they were sent to.
func (d *Destination) Hide(text string) string {
	return redact.Hide(text, append(append(redact.Secrets(d.URL, d.URLFile != ""), redact.Secrets(d.Probe.URL, false)...), string(d.Secret))...)
}

// ErrorPaths are places in answers: keys with dots between them, such as result.reasonCode. Case, _
// and - do not count, and elements of arrays have the path of the array. The first place that has a
// value counts.
type ErrorPaths struct {
	Type    []string `json:"type"    jsonschema:"description=Type of the error."`
	Code    []string `json:"code"    jsonschema:"description=Its code."`
	Title   []string `json:"title"   jsonschema:"description=What went wrong\\, the same text each time."`
	Message []string `json:"message" jsonschema:"description=What went wrong this time."`
}

// Probe is an HTTP request that a destination answers with 2xx when it is well.
type Probe struct {
	URL     string        `json:"url"     jsonschema:"description=Asked with GET; empty for no probe."`
	Every   time.Duration `json:"every"   jsonschema:"description=Between two probes."`
	Timeout time.Duration `json:"timeout" jsonschema:"description=Of one probe."`
}

// CircuitBreakers is circuit-breaker.yaml.
type CircuitBreakers struct {
	Defaults     Breaker             `json:"defaults"     jsonschema:"description=What every breaker has that does not say otherwise."`
	Destinations map[string]*Breaker `json:"destinations" jsonschema:"description=Breakers of destinations by their name; each destination has one."`
	RiverQueues  map[string]*Breaker `json:"riverQueues"  jsonschema:"description=Breakers of River queues that an application works: one that opens pauses the queue. Only queues that are named here have one."`
}

// Breaker says when a circuit breaker opens and closes.
type Breaker struct {
	Enabled             bool          `json:"enabled"             jsonschema:"description=false for a breaker that never opens by itself."`
	FailureRate         float64       `json:"failureRate"         jsonschema:"minimum=1,maximum=100,description=Percent of deliveries in the window that fail and so open the breaker."`
	Window              time.Duration `json:"window"              jsonschema:"description=What failureRate is measured over."`
	MinimumCount        uint          `json:"minimumCount"        jsonschema:"minimum=1,description=Deliveries that the window must hold before the rate counts."`
	ConsecutiveFailures uint          `json:"consecutiveFailures" jsonschema:"minimum=0,description=So many failures without a success between them open the breaker at once; 0 for the rate alone."`
	OpenFor             time.Duration `json:"openFor"             jsonschema:"description=From opening to half-open."`
	Probes              int           `json:"probes"              jsonschema:"minimum=1,description=Deliveries that half-open lets through\\, over all processes."`
	SuccessRate         float64       `json:"successRate"         jsonschema:"minimum=1,maximum=100,description=Percent of the probes that must succeed to close the breaker."`
}

// Routing is dlq-routing.yaml: what errors mean, and what happens next.
type Routing struct {
	Rules      []Rule                   `json:"rules"      jsonschema:"description=Asked in order before the built-in table; the first that matches wins."`
	Strategies Strategies               `json:"strategies" jsonschema:"description=What each strategy does where a class\\, queue or rule does not say otherwise."`
	Classes    ByClass[*Plan]           `json:"classes"    jsonschema:"description=Plan of each class of errors."`
	Queues     map[string]*QueueRouting `json:"queues"     jsonschema:"description=Exceptions for queues\\, dlqd's or an application's."`
	Kinds      map[string]*KindRouting  `json:"kinds"      jsonschema:"description=Exceptions for kinds of messages or jobs; * stands for any text. Of several patterns that match\\, the longest counts."`
	Automatic  Automatic                `json:"automatic"  jsonschema:"description=For what dlqd redelivers by itself. Elsewhere it observes: dead letters are judged\\, shown\\, and left."`
	SmartRetry SmartRetry               `json:"smartRetry" jsonschema:"description=Try entries again that a deploy has probably fixed."`
	// RedeliveriesPerSecond paces redeliveries to queues that have no destination: an application's own.
	RedeliveriesPerSecond float64 `json:"redeliveriesPerSecond" jsonschema:"minimum=0,description=Most redeliveries a second into each queue of an application; 0 is no limit."`
}

// Rule says what errors it matches, and what they are.
type Rule struct {
	Name     string `json:"name"     jsonschema:"required,minLength=1,maxLength=100,description=Kept with every entry that the rule chose."`
	Match    Match  `json:"match"    jsonschema:"required,description=All that is given must match."`
	Class    string `json:"class"    jsonschema:"enum=transient,enum=rate_limited,enum=outage,enum=validation,enum=malformed,enum=unauthorized,enum=not_found,enum=business,enum=code_bug,enum=unknown,description=What kind of error it is. Without a class\\, the rules that follow and the built-in table choose it."`
	Plan     Plan   `json:"plan"     jsonschema:"description=What happens next\\, where it is not what the kind\\, queue or class has."`
	Priority int    `json:"priority" jsonschema:"minimum=0,maximum=4,description=The entry's priority from now on: 1 is the most urgent; 0 leaves it."`
	// Tags are added to the entry's, and are those of its redeliveries.
	Tags     []string `json:"tags"     jsonschema:"description=Added to the entry's tags."`
	Assignee string   `json:"assignee" jsonschema:"description=Who looks after the entry\\, if nobody does yet."`
}

// Names in place of a rule's, of entries whose strategy no rule chose.
const (
	// RuleBackfilled and RuleSingleAttempt are of entries that are a person's although their class is not.
	RuleBackfilled    = "backfilled"
	RuleSingleAttempt = "single-attempt"
	// RuleUnparked is of entries that a person returned to the automatic path. (dlq.act_on writes it.)
	RuleUnparked = "unparked"
	// RuleWorkerLost is of entries of an application's whose attempts River's rescuer ended twice or more: each time their worker
	// had died, or they did not end. They need a person in every class.
	RuleWorkerLost = "worker-lost"
	// RuleTooSlow is of entries over which the rules took longer than they may.
	RuleTooSlow = "rules-too-slow"
)

// ReservedRules are names that no rule of a policy may have.
func ReservedRules() []string {
	return []string{RuleBackfilled, RuleSingleAttempt, RuleUnparked, RuleWorkerLost, RuleTooSlow}
}

// Match chooses errors. An empty field matches all.
type Match struct {
	Type    Words  `json:"type,omitempty" jsonschema:"description=Type of the error; * stands for any text."`
	Code    Words  `json:"code,omitempty" jsonschema:"description=Code of the error; * stands for any text."`
	Message string `json:"message,omitempty" jsonschema:"maxLength=1000,description=Pattern (RE2) found in the first 8 KiB of the message."`
	Status  Words  `json:"status,omitempty" jsonschema:"description=HTTP status: 503\\, or 5xx."`
	Kind    Words  `json:"kind,omitempty" jsonschema:"description=Kind of the message or job; * stands for any text."`
	Queue   Words  `json:"queue,omitempty" jsonschema:"description=Queue; * stands for any text."`
	Source  Words  `json:"source,omitempty" jsonschema:"description=Source of the message; * stands for any text."`
	When    string `json:"when,omitempty" jsonschema:"maxLength=1000,description=Expression (expr-lang) over the error's context\\, the message's payload and its headers: payload.amount > 10000"`
}

// String returns the match as JSON.
func (m *Match) String() string {
	raw, err := json.Marshal(m)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// Words is one text or several, of which any may match.
type Words []string

// Match reports whether a text matches one of them.
func (w Words) Match(text string) bool {
	return slices.ContainsFunc(w, func(pattern string) bool { return MatchPattern(pattern, text) })
}

// Strategies are what each strategy does by default.
type Strategies struct {
	Immediate   Plan `json:"immediate"   jsonschema:"description=Retried after each of the delays in turn."`
	Scheduled   Plan `json:"scheduled"   jsonschema:"description=Retried in the next off-peak hour."`
	Conditional Plan `json:"conditional" jsonschema:"description=Retried when its conditions hold."`
}

// Plan is what happens to an entry. What is not given comes from the next wider place: from a rule to its kind's plan for
// the class, the kind's, the queue's plan for the class, the queue's, the plan of the class, and that of the strategy.
type Plan struct {
	Strategy   string          `json:"strategy,omitempty"   jsonschema:"enum=immediate,enum=scheduled,enum=conditional,enum=manual"`
	Delays     []time.Duration `json:"delays,omitempty"     jsonschema:"description=Before each redelivery\\, from the last failure; the last one repeats."`
	Jitter     *float64        `json:"jitter,omitempty"     jsonschema:"minimum=0,maximum=1,description=A delay is longer by up to this share of itself."`
	MaxRetries int             `json:"maxRetries,omitempty" jsonschema:"minimum=0,maximum=1000,description=Redeliveries after which a failure closes the entry as dlq_failed; 0 leaves it."`
	Hours      []int           `json:"hours,omitempty"      jsonschema:"description=scheduled: the off-peak hours\\, 0 to 23."`
	TimeZone   string          `json:"timeZone,omitempty"   jsonschema:"description=scheduled: where the hours are counted\\, such as Europe/Berlin."`
	Conditions *Conditions     `json:"conditions,omitempty" jsonschema:"description=conditional: what must hold."`
}

// Conditions must all hold before an entry is redelivered. A limit of 0 is not looked at.
type Conditions struct {
	Breaker          *bool    `json:"breaker,omitempty"          jsonschema:"description=The destination's breaker is closed\\, or lets probes through."`
	Probe            *bool    `json:"probe,omitempty"            jsonschema:"description=The destination's probe answers\\, if it has one."`
	CPUBelow         *float64 `json:"cpuBelow,omitempty"         jsonschema:"minimum=0,maximum=100,description=Percent of this machine's processors."`
	MemoryBelow      *float64 `json:"memoryBelow,omitempty"      jsonschema:"minimum=0,maximum=100,description=Percent of this machine's memory."`
	ConnectionsBelow *float64 `json:"connectionsBelow,omitempty" jsonschema:"minimum=0,maximum=100,description=Percent of the database's connections."`
	Probes           int      `json:"probes,omitempty"           jsonschema:"minimum=1,description=Entries that are tried first when the conditions hold again; the rest follow if they succeed."`
}

// QueueRouting are a queue's exceptions.
type QueueRouting struct {
	Plan       *Plan          `json:"plan"       jsonschema:"description=What happens next\\, whatever the class."`
	Classes    ByClass[*Plan] `json:"classes"    jsonschema:"description=Plans by class."`
	MaxRetries int            `json:"maxRetries" jsonschema:"minimum=0,maximum=1000,description=Of all classes of this queue; 0 leaves it."`
	SmartRetry *bool          `json:"smartRetry" jsonschema:"description=Overrides smartRetry.enabled."`
}

// KindRouting are the exceptions of a kind, or of several by a pattern.
type KindRouting struct {
	Plan       *Plan          `json:"plan"       jsonschema:"description=What happens next\\, whatever the class."`
	Classes    ByClass[*Plan] `json:"classes"    jsonschema:"description=Plans by class."`
	MaxRetries int            `json:"maxRetries" jsonschema:"minimum=0,maximum=1000,description=Of all classes of this kind; 0 leaves it."`
}

// Automatic says for what dlqd redelivers by itself. Where several switches match, one that is off wins; the one for all
// counts where no other matches.
type Automatic struct {
	All     *Switch            `json:"all"     jsonschema:"description=For what no other switch matches. Without it: on where River is dlqd's own\\, off where an application owns it."`
	Queues  map[string]*Switch `json:"queues"  jsonschema:"description=By queue."`
	Kinds   map[string]*Switch `json:"kinds"   jsonschema:"description=By kind of message or job; * stands for any text."`
	Classes ByClass[*Switch]   `json:"classes" jsonschema:"description=By class of error."`
}

// Switch switches automatic redelivery on or off.
type Switch struct {
	Enabled bool `json:"enabled" jsonschema:"required,description=Whether matching dead letters are redelivered by themselves."`
	// Include names what else goes: it is a person's otherwise.
	Include []string `json:"include,omitempty" jsonschema:"enum=backfilled,enum=single-attempt,description=Dead letters that stay a person's unless they are named: backfilled\\, or of a job that had one attempt (single-attempt)."`
}

// SmartRetry tries closed and parked entries again whose cause has probably gone.
type SmartRetry struct {
	Enabled   bool          `json:"enabled"   jsonschema:"description=Off by default."`
	ErrorRate float64       `json:"errorRate" jsonschema:"minimum=0,maximum=100,description=Percent of a queue's jobs that fail with an entry's fingerprint; below it\\, the cause has probably gone."`
	Over      time.Duration `json:"over"      jsonschema:"description=How long the rate must have been below."`
	MinJobs   int           `json:"minJobs"   jsonschema:"minimum=1,description=Jobs that must have ended in that time for the rate to mean something."`
	Probes    int           `json:"probes"    jsonschema:"minimum=1,description=Entries tried first."`
	Classes   []string      `json:"classes"   jsonschema:"enum=transient,enum=rate_limited,enum=outage,enum=validation,enum=malformed,enum=unauthorized,enum=not_found,enum=business,enum=code_bug,enum=unknown,description=Classes of the parked entries that a deploy can fix."`
}

// WorkerPool is worker-pool.yaml.
type WorkerPool struct {
	Defaults   Pool             `json:"defaults"   jsonschema:"description=What every queue has that does not say otherwise."`
	Queues     map[string]*Pool `json:"queues"     jsonschema:"description=By queue."`
	DLQWorkers DLQWorkers       `json:"dlqWorkers" jsonschema:"description=Workers on dead letters."`
}

// Pool is how much of a queue is worked at once.
type Pool struct {
	Concurrency int `json:"concurrency" jsonschema:"minimum=1,maximum=10000,description=Deliveries at once\\, in one process."`
}

// DLQWorkers are settings of the workers on dead letters.
type DLQWorkers struct {
	BatchSize int `json:"batchSize" jsonschema:"minimum=1,maximum=10000,description=Entries in one transaction."`
}

// Monitoring is monitoring.yaml: limits beyond which people want to be told. They are published as metrics, for rules
// to compare with.
type Monitoring struct {
	Defaults Alert             `json:"defaults" jsonschema:"description=What every queue has that does not say otherwise."`
	Queues   map[string]*Alert `json:"queues"   jsonschema:"description=By queue."`
}

// Alert are a queue's limits.
type Alert struct {
	MaxOpen int           `json:"maxOpen" jsonschema:"minimum=0,description=Open dead letters."`
	MaxAge  time.Duration `json:"maxAge"  jsonschema:"description=Age of the oldest open dead letter."`
	// NeedsPersonAfter is for those that nothing but a person moves.
	NeedsPersonAfter time.Duration `json:"needsPersonAfter" jsonschema:"description=How long a dead letter waits for a person (manual or failed) before people are told."`
}

// warnShare is the share of a limit from which on people are warned that it will be passed.
const warnShare = 0.8

// Judge says which limits a queue has passed, and of which it has used 80 %.
func (a Alert) Judge(open int64, oldest time.Duration) (problems, warnings []string) {
	switch most := int64(a.MaxOpen); {
	case open > most:
		problems = append(problems, fmt.Sprintf("size %d exceeds %d", open, most))
	case most > 0 && float64(open) >= warnShare*float64(most):
		warnings = append(warnings, fmt.Sprintf("size %d is %d %% of %d", open, 100*open/most, most))
	}
	switch most := a.MaxAge; {
	case most > 0 && oldest > most:
		problems = append(problems, fmt.Sprintf("the oldest is open for %s, which exceeds %s", oldest.Round(time.Second), most))
	case most > 0 && oldest.Seconds() >= warnShare*most.Seconds():
		warnings = append(warnings, fmt.Sprintf("the oldest is open for %s, %.0f %% of %s", oldest.Round(time.Second), 100*oldest.Seconds()/most.Seconds(), most))
	}
	return problems, warnings
}

// Secret is text that does not print.
type Secret string

// String hides the secret.
func (s Secret) String() string {
	if s == "" {
		return ""
	}
	return "(hidden)"
}

// GoString hides the secret.
func (s Secret) GoString() string { return s.String() }

// MarshalText hides the secret.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// QueueNames lists the queues in order.
func (p *Policy) QueueNames() []string { return slices.Sorted(maps.Keys(p.Queues)) }

// Concurrency is how many deliveries of a queue run at once in one process.
func (p *Policy) Concurrency(queue string) int { return p.Pool(queue).Concurrency }

// Pool is how much of a queue is worked at once.
func (p *Policy) Pool(queue string) Pool {
	if pool := p.Workers.Queues[queue]; pool != nil {
		return *pool
	}
	return p.Workers.Defaults
}

// Breaker is the breaker of a destination.
func (p *Policy) Breaker(destination string) Breaker {
	if b := p.Breakers.Destinations[destination]; b != nil {
		return *b
	}
	return p.Breakers.Defaults
}

// Alert are the limits of a queue.
func (p *Policy) Alert(queue string) Alert {
	if a := p.Monitoring.Queues[queue]; a != nil {
		return *a
	}
	return p.Monitoring.Defaults
}

// DestinationOf is the destination of a queue's messages, nil for a queue of an application's.
func (p *Policy) DestinationOf(queue string) *Destination {
	q := p.Queues[queue]
	if q == nil {
		return nil
	}
	return p.Destinations[q.Destination]
}

// QueuesOf lists the queues that deliver to a destination.
func (p *Policy) QueuesOf(destination string) []string {
	var names []string
	for _, name := range p.QueueNames() {
		if p.Queues[name].Destination == destination {
			names = append(names, name)
		}
	}
	return names
}

// Pace is a stream of redeliveries that share one limit: those to a destination, or into one queue of an application.
type Pace struct {
	Name      string
	PerSecond float64 // 0 is no limit
}

// PaceOf is the pace that redeliveries into a queue share.
func (p *Policy) PaceOf(queue string) Pace {
	if d := p.DestinationOf(queue); d != nil {
		return Pace{"destination:" + d.Name, d.RedeliveriesPerSecond}
	}
	return Pace{"queue:" + queue, p.Routing.RedeliveriesPerSecond}
}

// KindRouting are the exceptions of a kind: those of the longest pattern that matches it, nil where none does.
func (p *Policy) KindRouting(kind string) *KindRouting {
	longest, found := "", (*KindRouting)(nil)
	for pattern, k := range p.Routing.Kinds {
		longer := len(pattern) > len(longest) || len(pattern) == len(longest) && pattern < longest
		if (found == nil || longer) && MatchPattern(pattern, kind) {
			longest, found = pattern, k
		}
	}
	return found
}

// MatchPattern reports whether a text matches a pattern in which * stands for any text: one meaning, for queues, kinds and grants.
func MatchPattern(pattern, text string) bool { return access.MatchPattern(pattern, text) }

// SmartRetryOn reports whether smart retry is on for a queue.
func (p *Policy) SmartRetryOn(queue string) bool {
	if q := p.Routing.Queues[queue]; q != nil && q.SmartRetry != nil {
		return *q.SmartRetry
	}
	return p.Routing.SmartRetry.Enabled
}

// SmartRetryAnywhere reports whether smart retry is on for any queue.
func (p *Policy) SmartRetryAnywhere() bool {
	for name := range p.Routing.Queues {
		if p.SmartRetryOn(name) {
			return true
		}
	}
	return p.Routing.SmartRetry.Enabled
}

// MaxTimeout is the longest timeout of any queue.
func (p *Policy) MaxTimeout() time.Duration {
	longest := time.Duration(0)
	for _, q := range p.Queues {
		longest = max(longest, q.Timeout)
	}
	return longest
}

// Version identifies the policy: the Git commit of its directory, with -dirty- and a hash where files were changed since, or a hash
// of its content where there is no Git.
func (p *Policy) Version() string { return p.version }
