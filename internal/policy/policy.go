// Package policy reads and checks the configuration that teams keep in Git: queues and the destinations of their
// messages, retries, classes of errors, the handling of dead letters, and access rights. A policy is a directory of
// seven optional files, with overlays for each environment; see docs/policy.md.
package policy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/access"
	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/redact"
)

// DefaultQueue is the name of the only queue of a policy that defines no queues.
const DefaultQueue = "default"

// Policy is the whole configuration: the seven files on top of the built-in defaults.
type Policy struct {
	RetryPolicies

	Breakers   CircuitBreakers
	Routing    Routing
	Workers    WorkerPool
	Monitoring Monitoring
	Access     Access
	Sources    Sources

	settings    []Setting
	origins     map[string]map[string]string // file:line, by file and path
	version     string
	unanswered  bool // whether Git did not answer in time when the version was read
	dir         string
	files       []string // names of the files that were read, without extension
	secretFiles []string
	secrets     map[string]string // by the path of the field and the name of the file in it
	filesHash   string            // hash of the files when they were read, for Watch
	warnings    []string
}

// RetryPolicies is retry-policies.yaml: queues, the destinations of their messages, the retention of
// the audit trail, and sensitive data.
type RetryPolicies struct {
	Defaults            Queue                   `json:"defaults"     jsonschema:"description=Defaults for every queue."`
	Queues              map[string]*Queue       `json:"queues"       jsonschema:"description=Queues by name: lower-case letters and digits\\, in words joined by - or _."`
	Destinations        map[string]*Destination `json:"destinations" jsonschema:"description=Destinations of messages\\, by name."`
	DestinationDefaults Destination             `json:"destinationDefaults" jsonschema:"description=Defaults for every destination."`
	Data                Data                    `json:"data"         jsonschema:"description=Retention of the audit trail\\, and sensitive data."`
}

// Data configures how long the audit trail is kept and which data is masked.
type Data struct { //nolint:recvcheck // Masked is also called on values without an address
	AuditRetention    time.Duration `json:"auditRetention"   jsonschema:"description=Retention of the audit trail\\, in whole months."`
	SensitiveColumns  []string      `json:"sensitiveColumns" jsonschema:"enum=original_event,enum=edited_event,enum=error_message,enum=error_stack_trace,enum=error_context,enum=retry_history,enum=replay_attempts,enum=metadata,enum=subscriber_id,enum=tags,enum=notes,description=Columns of dead letters that dlq_reader cannot read. edited_event also hides the changes of edits in the audit trail."`
	SensitivePaths    []string      `json:"sensitivePaths"   jsonschema:"description=Paths in payloads\\, headers and metadata that are shown as *** unless the viewer gives a reason: payload.card.number\\, payload..email at any depth\\, headers.authorization\\, payload.*.iban. Case does not matter\\, and paths match inside arrays. Error texts hide the values too."`
	SensitivePatterns []string      `json:"sensitivePatterns" jsonschema:"enum=cardNumbers,enum=emails,enum=tokens,description=Patterns that are shown as *** everywhere: payment card numbers\\, e-mail addresses\\, and tokens (bearer tokens\\, JWTs\\, keys of well-known issuers)."`
}

// Queue configures how the messages of a queue are delivered, and how long their dead letters are
// kept.
type Queue struct {
	Name        string        `json:"-"`
	MaxAttempts int           `json:"maxAttempts" jsonschema:"minimum=1,maximum=1000,description=Attempts before the job becomes a dead letter."`
	Backoff     Backoff       `json:"backoff"     jsonschema:"description=Wait between attempts."`
	Timeout     time.Duration `json:"timeout"     jsonschema:"description=Time limit of one delivery\\, including connection and response; 1ms to 1h."`
	Destination string        `json:"destination" jsonschema:"description=Name of the destination."`
	WhenOpen    string        `json:"whenOpen"    jsonschema:"enum=reject,enum=accept,description=New messages while the destination's breaker is open: rejected with 503 (reject)\\, or accepted and held (accept)."`
	Ordering    bool          `json:"ordering"    jsonschema:"description=Messages with the same orderingKey are delivered in order; later ones wait behind an open dead letter."`
	Payload     string        `json:"payload"     jsonschema:"enum=parsed,enum=exact,description=Form of the delivered payload: as the database formats it (parsed)\\, or byte for byte as submitted (exact)\\, for receivers that sign or hash bodies."`
	// DeadLetterLogicalFailures makes a message a dead letter if the receiver answers with a 2xx status and {"success":
	// false}.
	DeadLetterLogicalFailures bool      `json:"deadLetterLogicalFailures" jsonschema:"description=A 200 response with success: false becomes a dead letter."`
	Retention                 Retention `json:"retention"                 jsonschema:"description=Retention of closed dead letters."`
}

// Backoff is the wait between attempts.
type Backoff struct {
	Kind  string        `json:"kind"  jsonschema:"enum=exponential,enum=fixed,description=exponential doubles the delay after each attempt; fixed does not change it."`
	Delay time.Duration `json:"delay" jsonschema:"description=Delay before the second attempt; 1ms to 24h. Actual delays are up to 20 % longer or shorter."`
}

// The values of Backoff.Kind.
const (
	BackoffExponential = "exponential"
	BackoffFixed       = "fixed"
)

// The values of Queue.WhenOpen, which says whether new messages are accepted while the destination's breaker is open.
const (
	WhenOpenReject = "reject"
	WhenOpenAccept = "accept"
)

// The values of Queue.Payload: the form in which a payload is delivered.
const (
	PayloadParsed = "parsed"
	PayloadExact  = "exact"
)

// Retention is how long closed dead letters are kept, by status.
type Retention struct {
	Resolved time.Duration `json:"resolved" jsonschema:"description=Retention of dead letters in dlq_resolved."`
	Failed   time.Duration `json:"failed"   jsonschema:"description=Retention of dead letters in dlq_failed."`
	Archived time.Duration `json:"archived" jsonschema:"description=Retention of dead letters in dlq_archived."`
}

// Destination is where messages are delivered.
type Destination struct {
	Name       string `json:"-"`
	URL        string `json:"url"        jsonschema:"description=http or https URL\\, or a gRPC method: grpc://host:port/package.Service/Method\\, or grpcs for TLS. Use urlFile for a URL that contains a secret."`
	URLFile    string `json:"urlFile"    jsonschema:"description=File with the URL: an absolute path\\, or relative to the policy's directory. dlqd then shows only the URL's host."`
	Secret     Secret `json:"secret"     jsonschema:"description=Standard Webhooks secret (whsec_…) that signs deliveries. During a rotation\\, two lines: the new secret\\, then the former one. Prefer secretFile."`
	SecretFile string `json:"secretFile" jsonschema:"description=File with the secret: an absolute path\\, or relative to the policy's directory."`
	// DescriptorFile is the path of a FileDescriptorSet with imports. Method is the gRPC method of URL, as that file
	// describes it.
	DescriptorFile string       `json:"descriptorFile" jsonschema:"description=For a gRPC method: file with its descriptors (protoc --include_imports --descriptor_set_out): an absolute path\\, or relative to the policy's directory. Empty: dlqd asks the server (reflection)."`
	Method         *grpc.Method `json:"-"`
	// Source is not nil for the destination of a source. Such a destination publishes records to topics of the source's
	// cluster.
	Source *TopicSource `json:"-"`
	// RedeliveriesPerSecond limits redeliveries by DLQ workers, and the release of messages that were held.
	RedeliveriesPerSecond float64    `json:"redeliveriesPerSecond" jsonschema:"minimum=0,description=Maximum redeliveries by DLQ workers and releases of held messages per second\\, over all processes; 0 for no limit."`
	ErrorPaths            ErrorPaths `json:"errorPaths"         jsonschema:"description=Paths in its responses other than 2xx (JSON and XML) that describe the error. They precede the paths that dlqd knows (docs/delivery.md)."`
	Probe                 Probe      `json:"probe"                 jsonschema:"description=A request that checks whether the destination is available\\, before conditional redeliveries."`
}

// ShownURL returns the destination's URL without its secrets.
func (d *Destination) ShownURL() string {
	if d.URLFile != "" {
		return redact.Origin(d.URL)
	}
	return redact.URL(d.URL)
}

// Hide replaces the destination's secrets in a text. Responses and errors may contain them.
func (d *Destination) Hide(text string) string {
	secrets := append(redact.Secrets(d.URL, d.URLFile != ""), redact.Secrets(d.Probe.URL, false)...)
	for _, line := range d.Secret.lines() {
		secrets = append(secrets, strings.TrimPrefix(line, secretPrefix))
	}
	return redact.Hide(text, secrets...)
}

// ErrorPaths are paths of fields in responses and in values of records: keys joined by dots, such as result.reasonCode.
// Upper and lower case are the same, and _ and - are ignored. Elements of an array have the path of the array. The
// first path in a list at which there is a value is used.
type ErrorPaths struct {
	Type    []string `json:"type"    jsonschema:"description=Paths of the error's type."`
	Code    []string `json:"code"    jsonschema:"description=Paths of the error's code."`
	Title   []string `json:"title"   jsonschema:"description=Paths of a text that is the same for each error of this type."`
	Message []string `json:"message" jsonschema:"description=Paths of the message of this error."`
}

// Probe is an HTTP request that a destination answers with 2xx if it is available.
type Probe struct {
	URL     string        `json:"url"     jsonschema:"description=URL that the probe requests with GET. Empty: no probe."`
	Every   time.Duration `json:"every"   jsonschema:"description=Time between two probes."`
	Timeout time.Duration `json:"timeout" jsonschema:"description=Time limit of one probe."`
}

// CircuitBreakers is circuit-breaker.yaml.
type CircuitBreakers struct {
	Defaults     Breaker             `json:"defaults"     jsonschema:"description=Defaults for every breaker."`
	Destinations map[string]*Breaker `json:"destinations" jsonschema:"description=Breakers of destinations\\, by name; each destination has one."`
	RiverQueues  map[string]*Breaker `json:"riverQueues"  jsonschema:"description=Breakers of River queues that an application works. A breaker that opens pauses its queue. Only queues that are listed here have one."`
}

// Breaker configures when a circuit breaker opens and closes.
type Breaker struct {
	Enabled             bool          `json:"enabled"             jsonschema:"description=false: the breaker never opens automatically."`
	FailureRate         float64       `json:"failureRate"         jsonschema:"minimum=1,maximum=100,description=Percentage of failed deliveries in the window that opens the breaker."`
	Window              time.Duration `json:"window"              jsonschema:"description=Period over which failureRate is measured."`
	MinimumCount        uint          `json:"minimumCount"        jsonschema:"minimum=1,description=Minimum number of deliveries in the window before failureRate applies."`
	ConsecutiveFailures uint          `json:"consecutiveFailures" jsonschema:"minimum=0,description=Number of consecutive failures that open the breaker immediately. 0: only failureRate applies."`
	OpenFor             time.Duration `json:"openFor"             jsonschema:"description=Time from open to half-open."`
	Probes              int           `json:"probes"              jsonschema:"minimum=1,description=Deliveries that a half-open breaker lets through\\, over all processes."`
	SuccessRate         float64       `json:"successRate"         jsonschema:"minimum=1,maximum=100,description=Percentage of probes that must succeed to close the breaker."`
}

// Routing is dlq-routing.yaml: rules for the classes of errors, and plans for the entries of each class.
type Routing struct {
	Rules      []Rule                   `json:"rules"      jsonschema:"description=Rules\\, evaluated in order before the built-in table; the first that matches applies."`
	Strategies Strategies               `json:"strategies" jsonschema:"description=Defaults of each strategy\\, which classes\\, queues\\, kinds and rules override."`
	Classes    ByClass[*Plan]           `json:"classes"    jsonschema:"description=Plan of each error class."`
	Queues     map[string]*QueueRouting `json:"queues"     jsonschema:"description=Overrides for queues of dlqd or of an application."`
	Kinds      map[string]*KindRouting  `json:"kinds"      jsonschema:"description=Overrides for kinds of messages or jobs; * matches any text. If several patterns match\\, the longest applies."`
	Automatic  Automatic                `json:"automatic"  jsonschema:"description=Which dead letters dlqd redelivers automatically. It only observes the others: it classifies and lists them."`
	SmartRetry SmartRetry               `json:"smartRetry" jsonschema:"description=Retry entries whose cause a deploy has probably fixed."`
	// RedeliveriesPerSecond limits redeliveries into each queue without a destination, which is a queue of an
	// application.
	RedeliveriesPerSecond float64 `json:"redeliveriesPerSecond" jsonschema:"minimum=0,description=Maximum redeliveries per second into each queue of an application; 0 for no limit."`
}

// Rule matches errors. It sets their class, and what happens to their entries.
type Rule struct {
	Name     string `json:"name"     jsonschema:"required,minLength=1,maxLength=100,description=Name\\, stored with every entry that the rule matched."`
	Match    Match  `json:"match"    jsonschema:"required,description=Conditions of the rule; all must match."`
	Class    string `json:"class"    jsonschema:"enum=transient,enum=rate_limited,enum=outage,enum=validation,enum=malformed,enum=unauthorized,enum=not_found,enum=business,enum=code_bug,enum=unknown,description=Class of the error. Without a class\\, later rules and the built-in table choose it."`
	Plan     Plan   `json:"plan"     jsonschema:"description=What happens to the entry; overrides the plans of its kind\\, queue and class."`
	Priority int    `json:"priority" jsonschema:"minimum=0,maximum=4,description=The entry's new priority: 1 is the most urgent; 0 does not change it."`
	// Tags are added to the tags of the entry and so of its redeliveries.
	Tags     []string `json:"tags"     jsonschema:"description=Tags to add to the entry."`
	Assignee string   `json:"assignee" jsonschema:"description=User to assign the entry to\\, if it has no assignee."`
}

// Names that stand in place of a rule's name, for entries whose strategy no rule chose.
const (
	// RuleBackfilled and RuleSingleAttempt mark entries that wait for an operator although the strategy of their class
	// would redeliver them. RuleBackfilled: the job failed before capture was installed. RuleSingleAttempt: the job was
	// limited to one attempt.
	RuleBackfilled    = "backfilled"
	RuleSingleAttempt = "single-attempt"
	// RuleUnparked marks entries that an operator unparked. The SQL function dlq.act_on sets it.
	RuleUnparked = "unparked"
	// RuleWorkerLost marks entries of an application's jobs of which River's rescuer ended at least two attempts, because
	// the worker died or the attempt did not end. Such entries need manual handling in every class.
	RuleWorkerLost = "worker-lost"
	// RuleTooSlow marks entries for which the evaluation of the rules exceeded its time limit.
	RuleTooSlow = "rules-too-slow"
)

// ReservedRules returns the names that rules of a policy must not have.
func ReservedRules() []string {
	return []string{RuleBackfilled, RuleSingleAttempt, RuleUnparked, RuleWorkerLost, RuleTooSlow}
}

// Match selects errors. An empty field matches all.
type Match struct {
	Type    Words  `json:"type,omitempty" jsonschema:"description=Type of the error; * matches any text."`
	Code    Words  `json:"code,omitempty" jsonschema:"description=Code of the error; * matches any text."`
	Message string `json:"message,omitempty" jsonschema:"maxLength=1000,description=Regular expression (RE2)\\, searched in the first 8 KiB of the message."`
	Status  Words  `json:"status,omitempty" jsonschema:"description=HTTP status: 503\\, or 5xx."`
	Kind    Words  `json:"kind,omitempty" jsonschema:"description=Kind of the message or job; * matches any text."`
	Queue   Words  `json:"queue,omitempty" jsonschema:"description=Queue; * matches any text."`
	Source  Words  `json:"source,omitempty" jsonschema:"description=Source of the message; * matches any text."`
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

// Words is a list of alternatives. A file may also give a single text.
type Words []string

// Match reports whether text matches one of the alternatives.
func (w Words) Match(text string) bool {
	return slices.ContainsFunc(w, func(pattern string) bool { return MatchPattern(pattern, text) })
}

// Strategies has the defaults of each strategy, by the strategy's name.
type Strategies map[string]*Plan

// Plan says what happens to an entry. A field that a plan does not set comes from the first of these that sets it: the
// rule, the kind's plan for the class, the kind's plan, the queue's plan for the class, the queue's plan, the class's
// plan, the strategy's defaults. MaxRetries can also come from the maxRetries of the kind or the queue, which follow
// their plans.
type Plan struct {
	Strategy   string          `json:"strategy,omitempty"`
	Delays     []time.Duration `json:"delays,omitempty"     jsonschema:"description=Delays from the last failure to each redelivery; the last one repeats."`
	Jitter     *float64        `json:"jitter,omitempty"     jsonschema:"minimum=0,maximum=1,description=Maximum random increase of a delay\\, as a share of the delay."`
	MaxRetries int             `json:"maxRetries,omitempty" jsonschema:"minimum=0,maximum=1000,description=Redeliveries after which a failure closes the entry as dlq_failed; 0 uses the next wider setting."`
	Hours      []int           `json:"hours,omitempty"      jsonschema:"description=scheduled: the off-peak hours\\, 0 to 23."`
	TimeZone   string          `json:"timeZone,omitempty"   jsonschema:"description=scheduled: time zone of the hours\\, such as Europe/Berlin."`
	Conditions *Conditions     `json:"conditions,omitempty" jsonschema:"description=conditional: conditions that must hold."`
}

// Conditions must all hold before an entry is redelivered. A limit of 0 is not checked.
type Conditions struct {
	Breaker          *bool    `json:"breaker,omitempty"          jsonschema:"description=The destination's breaker must be closed\\, or let probes through."`
	Probe            *bool    `json:"probe,omitempty"            jsonschema:"description=The destination's probe must succeed\\, if it has one."`
	CPUBelow         *float64 `json:"cpuBelow,omitempty"         jsonschema:"minimum=0,maximum=100,description=Maximum CPU use of this machine\\, in percent."`
	MemoryBelow      *float64 `json:"memoryBelow,omitempty"      jsonschema:"minimum=0,maximum=100,description=Maximum memory use of this machine\\, in percent."`
	ConnectionsBelow *float64 `json:"connectionsBelow,omitempty" jsonschema:"minimum=0,maximum=100,description=Maximum share of the database's connections in use\\, in percent."`
	Probes           int      `json:"probes,omitempty"           jsonschema:"minimum=1,description=Entries that are redelivered first when the conditions hold again; the others follow if these succeed."`
}

// QueueRouting is the routing of one queue, in so far as it differs from the default.
type QueueRouting struct {
	Plan       *Plan          `json:"plan"       jsonschema:"description=Plan for every class."`
	Classes    ByClass[*Plan] `json:"classes"    jsonschema:"description=Plans by class."`
	MaxRetries int            `json:"maxRetries" jsonschema:"minimum=0,maximum=1000,description=Maximum redeliveries for every class of this queue; 0 keeps the value of the plan."`
	SmartRetry *bool          `json:"smartRetry" jsonschema:"description=Overrides smartRetry.enabled."`
	StaleAfter time.Duration  `json:"staleAfter" jsonschema:"description=Age from which the work of a dead letter is out of date. A replay run that skips stale work skips it; 0: never."`
	// ExpireStale is on for an entry if it is on for its queue or its kind.
	ExpireStale bool `json:"expireStale" jsonschema:"description=dlqd expires dead letters whose work is out of date\\, in place of redelivering them. Default: false."`
	// SkipStale and SkipSuperseded apply to replay runs whose request does not set them: see [Skips].
	SkipStale      bool `json:"skipStale"      jsonschema:"description=Replay runs skip work that is out of date\\, unless their request says otherwise. Default: false."`
	SkipSuperseded bool `json:"skipSuperseded" jsonschema:"description=Replay runs skip work that a later job has done\\, unless their request says otherwise. Default: false."`
	// OrderingKey is a path: see [OrderingKeys].
	OrderingKey string `json:"orderingKey" jsonschema:"maxLength=1000,description=Path of the ordering key in the args of an application's jobs: keys joined by dots\\, such as customer.id. A replay run sends its jobs of the queue with the same key in the order in which they were inserted\\, each after the success of the previous one. Live jobs of the key pass them\\, and sequences of River Pro are left to River. Empty: no order."`
	// ReplayWhenFixed lets dlqd start replay runs; see [Policy.ReplaysWhenFixed].
	ReplayWhenFixed bool `json:"replayWhenFixed" jsonschema:"description=dlqd starts a progressive replay run of a failure group that is fixed in a version\\, once that version is deployed. It takes no dead letter that an operator has\\, and none that dlqd only observes. Default: false."`
}

// KindRouting is the routing of one kind, or of all kinds that match a pattern.
type KindRouting struct {
	Plan       *Plan          `json:"plan"       jsonschema:"description=Plan for every class."`
	Classes    ByClass[*Plan] `json:"classes"    jsonschema:"description=Plans by class."`
	MaxRetries int            `json:"maxRetries" jsonschema:"minimum=0,maximum=1000,description=Maximum redeliveries for every class of this kind; 0 keeps the value of the plan."`
	StaleAfter time.Duration  `json:"staleAfter" jsonschema:"description=Age from which the work of a dead letter is out of date\\, in place of the queue's; 0 keeps the queue's."`
	// ExpireStale is on for an entry if it is on for its queue or its kind.
	ExpireStale bool  `json:"expireStale" jsonschema:"description=dlqd expires dead letters whose work is out of date\\, in place of redelivering them\\, also if the queue does not say so. Default: false."`
	SkipStale   *bool `json:"skipStale"      jsonschema:"description=Whether replay runs skip work that is out of date\\, in place of the queue's setting."`
	// SkipSuperseded and SkipStale override the queue's setting, unless they are nil.
	SkipSuperseded *bool `json:"skipSuperseded" jsonschema:"description=Whether replay runs skip work that a later job has done\\, in place of the queue's setting."`
	// OrderingKey is a path: see [OrderingKeys].
	OrderingKey string `json:"orderingKey" jsonschema:"maxLength=1000,description=Path of the ordering key in the args of an application's jobs of this kind\\, in place of the queue's; empty keeps the queue's."`
}

// Automatic configures what dlqd redelivers without an operator. If several switches match an entry and one of them is
// off, automatic redelivery is off. All applies if no other switch matches.
type Automatic struct {
	All     *Switch            `json:"all"     jsonschema:"description=Applies if no other switch matches. Default: on if dlqd owns River\\, off if an application owns it."`
	Queues  map[string]*Switch `json:"queues"  jsonschema:"description=Switches by queue."`
	Kinds   map[string]*Switch `json:"kinds"   jsonschema:"description=Switches by kind of message or job; * matches any text."`
	Classes ByClass[*Switch]   `json:"classes" jsonschema:"description=Switches by error class."`
}

// Switch turns automatic redelivery on or off.
type Switch struct {
	Enabled bool `json:"enabled" jsonschema:"required,description=Whether dlqd redelivers matching dead letters automatically."`
	// Include lists groups of entries that are redelivered although they would otherwise need manual handling.
	Include []string `json:"include,omitempty" jsonschema:"enum=backfilled,enum=single-attempt,description=Dead letters that otherwise wait for an operator: backfilled ones\\, and those of jobs with a single attempt (single-attempt)."`
}

// SmartRetry configures the automatic retry of parked and failed entries whose cause is probably gone.
type SmartRetry struct {
	Enabled   bool          `json:"enabled"   jsonschema:"description=Whether smart retry is on; off by default."`
	ErrorRate float64       `json:"errorRate" jsonschema:"minimum=0,maximum=100,description=Percentage of a queue's jobs that fail with an entry's fingerprint. Below it\\, the cause is probably fixed."`
	Over      time.Duration `json:"over"      jsonschema:"description=How long the rate must have been below errorRate."`
	MinJobs   int           `json:"minJobs"   jsonschema:"minimum=1,description=Minimum number of jobs that must have ended in that time."`
	Probes    int           `json:"probes"    jsonschema:"minimum=1,description=Entries that are redelivered first."`
	Classes   []string      `json:"classes"   jsonschema:"enum=transient,enum=rate_limited,enum=outage,enum=validation,enum=malformed,enum=unauthorized,enum=not_found,enum=business,enum=code_bug,enum=unknown,description=Classes of parked entries that smart retry redelivers."`
}

// WorkerPool is worker-pool.yaml.
type WorkerPool struct {
	Defaults   Pool             `json:"defaults"   jsonschema:"description=Defaults for every queue."`
	Queues     map[string]*Pool `json:"queues"     jsonschema:"description=Settings by queue."`
	DLQWorkers DLQWorkers       `json:"dlqWorkers" jsonschema:"description=Workers that process dead letters."`
}

// Pool limits the concurrent deliveries of a queue in one process.
type Pool struct {
	Concurrency int `json:"concurrency" jsonschema:"minimum=1,maximum=10000,description=Maximum concurrent deliveries in one process."`
}

// DLQWorkers configures the workers that handle dead letters.
type DLQWorkers struct {
	BatchSize int `json:"batchSize" jsonschema:"minimum=1,maximum=10000,description=Entries per transaction."`
}

// Monitoring is monitoring.yaml: limits for alerts, limits of the read replica, and the look of the console. dlqd
// publishes the limits for alerts as metrics, with which alerting rules compare.
type Monitoring struct {
	Defaults Alert             `json:"defaults" jsonschema:"description=Defaults for every queue."`
	Queues   map[string]*Alert `json:"queues"   jsonschema:"description=Limits by queue."`
	Replica  Replica           `json:"replica"  jsonschema:"description=Limits of the read replica (serve --replica-url)."`
	Console  ConsoleLook       `json:"console"  jsonschema:"description=How the console shows which environment it is."`
}

// ConsoleLook configures how the console shows in which environment it runs.
type ConsoleLook struct {
	Color string `json:"color" jsonschema:"pattern=^(#[0-9a-fA-F]{6})?$,description=Colour of the environment\\, as #rrggbb: a band with the environment's name on each page and on the sign-in page. Its text is black or white\\, whichever has more contrast. If empty\\, there is no band."`
}

// Replica has the limits of the read replica.
type Replica struct {
	MaxLag time.Duration `json:"maxLag" jsonschema:"description=How old the replica's data may be; beyond that the primary answers its reads. 2s to 1h."`
}

// Alert has the limits of a queue.
type Alert struct {
	MaxOpen int           `json:"maxOpen" jsonschema:"minimum=0,description=Maximum number of open dead letters."`
	MaxAge  time.Duration `json:"maxAge"  jsonschema:"description=Maximum age of the oldest open dead letter."`
	// NeedsPersonAfter applies to entries that only an operator can move: entries that are manual or failed.
	NeedsPersonAfter time.Duration `json:"needsPersonAfter" jsonschema:"description=How long a dead letter may wait for an operator (manual or failed) before the alert DLQNeedsPerson fires."`
}

// warnShare is the share of a limit at which Judge begins to warn.
const warnShare = 0.8

// Judge returns the limits that a queue exceeds as problems, and the limits of which it has reached 80 % or more as
// warnings.
func (a Alert) Judge(open int64, oldest time.Duration) (problems, warnings []string) {
	switch most := int64(a.MaxOpen); {
	case open > most:
		problems = append(problems, fmt.Sprintf("size %d exceeds %d", open, most))
	case most > 0 && float64(open) >= warnShare*float64(most):
		warnings = append(warnings, fmt.Sprintf("size %d is %d %% of %d", open, 100*open/most, most))
	}
	switch most := a.MaxAge; {
	case most > 0 && oldest > most:
		problems = append(problems, fmt.Sprintf("the oldest is open for %s, which exceeds %s",
			oldest.Round(time.Second), most))
	case most > 0 && oldest.Seconds() >= warnShare*most.Seconds():
		warnings = append(warnings, fmt.Sprintf("the oldest is open for %s, %.0f %% of %s", oldest.Round(time.Second),
			100*oldest.Seconds()/most.Seconds(), most))
	}
	return problems, warnings
}

// Secret is a text that is printed as "(hidden)".
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

// QueueNames returns the sorted names of the queues.
func (p *Policy) QueueNames() []string { return slices.Sorted(maps.Keys(p.Queues)) }

// Concurrency returns the maximum number of deliveries of a queue that run at once in one process.
func (p *Policy) Concurrency(queue string) int { return p.Pool(queue).Concurrency }

// Pool returns the pool of a queue.
func (p *Policy) Pool(queue string) Pool {
	if pool := p.Workers.Queues[queue]; pool != nil {
		return *pool
	}
	return p.Workers.Defaults
}

// Breaker returns the breaker configuration of a destination.
func (p *Policy) Breaker(destination string) Breaker {
	if b := p.Breakers.Destinations[destination]; b != nil {
		return *b
	}
	return p.Breakers.Defaults
}

// Alert returns the limits of a queue.
func (p *Policy) Alert(queue string) Alert {
	if a := p.Monitoring.Queues[queue]; a != nil {
		return *a
	}
	return p.Monitoring.Defaults
}

// DestinationOf returns the destination of a queue's messages. It returns nil if the policy does not define the queue,
// as for the queues of an application.
func (p *Policy) DestinationOf(queue string) *Destination {
	q := p.Queues[queue]
	if q == nil {
		return nil
	}
	return p.Destinations[q.Destination]
}

// QueuesOf returns the queues that deliver to a destination.
func (p *Policy) QueuesOf(destination string) []string {
	var names []string
	for _, name := range p.QueueNames() {
		if p.Queues[name].Destination == destination {
			names = append(names, name)
		}
	}
	return names
}

// Pace is a rate limit that several redeliveries share: all redeliveries to one destination, or all into one queue of
// an application.
type Pace struct {
	Name      string
	PerSecond float64 // 0 is no limit
}

// PaceOf returns the rate limit of redeliveries into a queue.
func (p *Policy) PaceOf(queue string) Pace {
	if d := p.DestinationOf(queue); d != nil {
		return Pace{"destination:" + d.Name, d.RedeliveriesPerSecond}
	}
	return Pace{"queue:" + queue, p.Routing.RedeliveriesPerSecond}
}

// KindRouting returns the routing of the longest pattern that matches a kind, or nil if no pattern matches.
func (p *Policy) KindRouting(kind string) *KindRouting { return ofKind(p.Routing.Kinds, kind) }

// ofKind returns the value of the longest pattern that matches a kind, or nil if no pattern matches.
func ofKind[V any](patterns map[string]*V, kind string) *V {
	longest, found, matches := "", (*V)(nil), false
	for pattern, v := range patterns {
		longer := len(pattern) > len(longest) || len(pattern) == len(longest) && pattern < longest
		if (!matches || longer) && MatchPattern(pattern, kind) {
			longest, found, matches = pattern, v, true
		}
	}
	return found
}

// StaleAfter returns the age at which the work of a dead letter becomes out of date, and the name of the setting with
// that age. The age is 0 if no setting applies.
func (p *Policy) StaleAfter(queue, kind string) (age time.Duration, setting string) {
	if k := p.KindRouting(kind); k != nil && k.StaleAfter > 0 {
		return k.StaleAfter, "kind " + kind
	}
	if q := p.Routing.Queues[queue]; q != nil {
		return q.StaleAfter, "queue " + queue
	}
	return 0, ""
}

// OutOfDate returns the reason why the work of a dead letter is out of date, or "" if it is not. expiresAt is the
// expiry time that the message or job has set. A text in another form than RFC 3339 is ignored, because any client can
// write it. The age of the work counts from dueAt.
func (p *Policy) OutOfDate(queue, kind, expiresAt string, dueAt, now time.Time) string {
	if expires, err := time.Parse(time.RFC3339, expiresAt); err == nil && !now.Before(expires) {
		return "it expired at " + expires.UTC().Format(time.RFC3339)
	}
	if after, setting := p.StaleAfter(queue, kind); after > 0 && now.Sub(dueAt) >= after {
		return "it is older than staleAfter of " + setting + ", " + after.String()
	}
	return ""
}

// Expires reports whether dlqd expires the dead letters of a queue and kind once their work is out of date.
func (p *Policy) Expires(queue, kind string) bool {
	q, k := p.Routing.Queues[queue], p.KindRouting(kind)
	return q != nil && q.ExpireStale || k != nil && k.ExpireStale
}

// Skips says which work replay runs skip unless their request says otherwise: work that is out of date, and work that a
// later job has done. A run keeps the skips that were in force at its start or, if it needed an approval, at the
// request for approval.
type Skips struct {
	Stale      *Skip `json:"stale,omitempty"`
	Superseded *Skip `json:"superseded,omitempty"`
}

// Skip says for which queues and kinds replay runs skip work. A kind's value overrides the queue's; nil keeps the
// queue's.
type Skip struct {
	Queues []string         `json:"queues,omitempty"`
	Kinds  map[string]*bool `json:"kinds,omitempty"`
}

// Of reports whether work of a queue and kind is skipped. It returns false for a nil Skip.
func (s *Skip) Of(queue, kind string) bool {
	if s == nil {
		return false
	}
	if is := ofKind(s.Kinds, kind); is != nil {
		return *is
	}
	return slices.Contains(s.Queues, queue)
}

// Text lists the queues and kinds of s for people, such as "queues a, b; kinds c.*; not kinds d".
func (s *Skip) Text() string {
	var parts, kinds, not []string
	for _, pattern := range slices.Sorted(maps.Keys(s.Kinds)) {
		switch is := s.Kinds[pattern]; {
		case is == nil:
		case *is:
			kinds = append(kinds, pattern)
		default:
			not = append(not, pattern)
		}
	}
	for _, part := range []struct {
		name string
		of   []string
	}{{"queues ", s.Queues}, {"kinds ", kinds}, {"not kinds ", not}} {
		if len(part.of) > 0 {
			parts = append(parts, part.name+strings.Join(part.of, ", "))
		}
	}
	return strings.Join(parts, "; ")
}

func (s *Skip) setKind(pattern string, is *bool) {
	if s.Kinds == nil {
		s.Kinds = map[string]*bool{}
	}
	s.Kinds[pattern] = is
}

// ifAny returns s, or nil if s skips no queue and no kind.
func (s *Skip) ifAny() *Skip {
	if len(s.Queues) > 0 {
		return s
	}
	for _, is := range s.Kinds {
		if is != nil && *is {
			return s
		}
	}
	return nil
}

// Skips returns the work that replay runs skip by default. A field is nil if no queue and no kind switches the skip on.
func (p *Policy) Skips() Skips {
	skip := func(queue func(*QueueRouting) bool, kind func(*KindRouting) *bool) *Skip {
		s := &Skip{}
		for _, name := range slices.Sorted(maps.Keys(p.Routing.Queues)) {
			if queue(p.Routing.Queues[name]) {
				s.Queues = append(s.Queues, name)
			}
		}
		for pattern, k := range p.Routing.Kinds {
			s.setKind(pattern, kind(k))
		}
		return s.ifAny()
	}
	return Skips{
		Stale: skip(func(q *QueueRouting) bool { return q.SkipStale },
			func(k *KindRouting) *bool { return k.SkipStale }),
		Superseded: skip(func(q *QueueRouting) bool { return q.SkipSuperseded },
			func(k *KindRouting) *bool { return k.SkipSuperseded }),
	}
}

// OrderingKeys says where the args of applications' jobs have their ordering keys. Replay runs keep the order of their
// entries with the same key in the same queue. A kind's path overrides the queue's.
type OrderingKeys struct {
	Kinds  []KindKey           `json:"kinds,omitempty"` // the longest pattern first
	Queues map[string][]string `json:"queues,omitempty"`
}

// KindKey is the path of a kind, or of all kinds that match a pattern. Without a path, the queue's applies.
type KindKey struct {
	Kind string   `json:"kind"`
	Path []string `json:"path,omitempty"`
}

// OrderingKeys returns the paths of all queues and kinds.
func (p *Policy) OrderingKeys() OrderingKeys {
	keys := OrderingKeys{Queues: map[string][]string{}}
	for name, q := range p.Routing.Queues {
		if path := keyPath(q.OrderingKey); path != nil {
			keys.Queues[name] = path
		}
	}
	for pattern, k := range p.Routing.Kinds {
		keys.Kinds = append(keys.Kinds, KindKey{pattern, keyPath(k.OrderingKey)})
	}
	slices.SortFunc(keys.Kinds, func(a, b KindKey) int { // as ofKind
		return cmp.Or(cmp.Compare(len(b.Kind), len(a.Kind)), cmp.Compare(a.Kind, b.Kind))
	})
	if !slices.ContainsFunc(keys.Kinds, func(k KindKey) bool { return k.Path != nil }) {
		keys.Kinds = nil
	}
	return keys
}

// keyPath returns the keys of a path, or nil if it is empty.
func keyPath(path string) []string {
	if path == "" {
		return nil
	}
	return strings.Split(path, ".")
}

// ReplaysWhenFixed returns the queues with ReplayWhenFixed: dlqd starts a replay run of a failure group of such a queue
// once a version in which the group is fixed is deployed (see replay.Fixes).
func (p *Policy) ReplaysWhenFixed() []string {
	var queues []string
	for _, name := range slices.Sorted(maps.Keys(p.Routing.Queues)) {
		if p.Routing.Queues[name].ReplayWhenFixed {
			queues = append(queues, name)
		}
	}
	return queues
}

// ExpiresAny reports whether Expires holds for any queue or kind.
func (p *Policy) ExpiresAny() bool {
	for _, q := range p.Routing.Queues {
		if q.ExpireStale {
			return true
		}
	}
	for _, k := range p.Routing.Kinds {
		if k.ExpireStale {
			return true
		}
	}
	return false
}

// MatchPattern reports whether text matches a pattern in which * stands for any text. The patterns of
// queues, kinds and grants all follow this rule.
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

// MaxTimeout returns the longest timeout of any queue.
func (p *Policy) MaxTimeout() time.Duration {
	longest := time.Duration(0)
	for _, q := range p.Queues {
		longest = max(longest, q.Timeout)
	}
	return longest
}

// Version identifies the policy. It is the Git commit of the policy's directory. If files differ from that commit,
// -dirty- and a hash of the effective values follow. If Git does not track the directory, the version is that hash
// alone.
func (p *Policy) Version() string { return p.version }
