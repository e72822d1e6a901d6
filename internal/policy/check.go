package policy

import (
	"errors"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dlqd/dlqd/internal/grpc"
	"github.com/dlqd/dlqd/internal/message"
)

// Limits of durations, rates and names that the JSON Schemas of the files do not express.
const (
	maxBackoff = 24 * time.Hour
	maxTimeout = time.Hour
	maxDelay   = 30 * 24 * time.Hour
	// minRetention prevents that a typing error deletes entries that have just been closed.
	minRetention = time.Hour
	maxRetention = 100 * 365 * 24 * time.Hour
	// maxSmartOver is the longest smartRetry.over. By default, River deletes completed jobs after that time.
	maxSmartOver = 24 * time.Hour
	// minPace is the lowest rate other than 0: about one redelivery in 17 minutes.
	minPace = 0.001
	// maxQueueName is River's limit for the names of queues that a client works, in bytes.
	maxQueueName = 64
)

var queueName = regexp.MustCompile(`^[a-z0-9]+([_-][a-z0-9]+)*$`)

// check validates what a schema of one file cannot express, such as references between names, ranges of durations, and
// secrets.
func (l *loader) check() {
	p := l.policy
	for _, name := range slices.Sorted(maps.Keys(p.Destinations)) {
		l.checkDestination(name, p.Destinations[name])
	}
	l.checkSources()
	l.checkFeeds()
	for _, name := range p.QueueNames() {
		q := p.Queues[name]
		q.Name = name
		at := "queues." + name
		if !queueName.MatchString(name) {
			l.addf("retry-policies", at, "a queue's name must be lower-case letters and digits, in words joined by - or _")
		} else if len(name) > maxQueueName {
			l.addf("retry-policies", at, "a queue's name has at most %d characters; this one has %d", maxQueueName, len(name))
		}
		l.checkRange("retry-policies", at+".backoff.delay", q.Backoff.Delay, time.Millisecond, maxBackoff)
		l.checkRange("retry-policies", at+".timeout", q.Timeout, time.Millisecond, maxTimeout)
		for _, retention := range []struct {
			field  string
			period time.Duration
		}{{"resolved", q.Retention.Resolved}, {"failed", q.Retention.Failed}, {"archived", q.Retention.Archived}} {
			l.checkRange("retry-policies", at+".retention."+retention.field, retention.period, minRetention, maxRetention)
		}
		if p.Destinations[q.Destination] == nil {
			l.addf("retry-policies", at+".destination", "unknown destination %q (known: %s)", q.Destination,
				sortedKeys(p.Destinations))
		}
	}
	l.checkRange("retry-policies", "data.auditRetention", p.Data.AuditRetention, 24*time.Hour, maxRetention)
	l.checkSensitive()
	for name := range p.Breakers.Destinations {
		if p.Destinations[name] == nil {
			l.addf("circuit-breaker", "destinations."+name, "unknown destination (known: %s)", sortedKeys(p.Destinations))
		}
	}
	breakers := map[string]*Breaker{"defaults": &p.Breakers.Defaults}
	for name, b := range p.Breakers.Destinations {
		breakers["destinations."+name] = b
	}
	for name, b := range p.Breakers.RiverQueues {
		breakers["riverQueues."+name] = b
		if p.Queues[name] != nil {
			l.addf("circuit-breaker", "riverQueues."+name, "dlqd delivers this queue; the breaker of its destination applies")
		}
	}
	for _, at := range slices.Sorted(maps.Keys(breakers)) {
		l.checkRange("circuit-breaker", at+".window", breakers[at].Window, time.Second, time.Hour)
		l.checkRange("circuit-breaker", at+".openFor", breakers[at].OpenFor, time.Millisecond, time.Hour)
	}
	for name := range p.Workers.Queues {
		if p.Queues[name] == nil {
			l.addf("worker-pool", "queues."+name, "unknown queue (known: %s)", sortedKeys(p.Queues))
		}
	}
	// dlqd knows the age of a replica's data to about two seconds: see replica.Interval.
	l.checkRange("monitoring", "replica.maxLag", p.Monitoring.Replica.MaxLag, 2*time.Second, time.Hour)
	l.checkRouting()
	l.checkAccess()
	l.checkNames()
}

// checkNames warns of queue names in routing, limits and rights that are not queues of the policy. Such a name is a
// mistake unless an application works the queue. checkNames does not warn if the policy defines no queues.
func (l *loader) checkNames() {
	p := l.policy
	if p.Where("retry-policies", "queues") == "retry-policies" {
		return
	}
	known := slices.Concat(p.QueueNames(), slices.Collect(maps.Keys(p.Breakers.RiverQueues)))
	slices.Sort(known)
	check := func(file, at string, patterns ...string) {
		for _, pattern := range patterns {
			if !slices.ContainsFunc(known, func(name string) bool { return MatchPattern(pattern, name) }) {
				l.warnf(file, at, "no queue of this policy has the name %q (its queues: %s); right only for a queue that an "+
					"application works", pattern, strings.Join(known, ", "))
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.Routing.Queues)) {
		check("dlq-routing", "queues."+name, name)
	}
	for _, name := range slices.Sorted(maps.Keys(p.Routing.Automatic.Queues)) {
		check("dlq-routing", "automatic.queues."+name, name)
	}
	for i := range p.Routing.Rules {
		check("dlq-routing", "rules["+strconv.Itoa(i)+"].match.queue", p.Routing.Rules[i].Match.Queue...)
	}
	for _, name := range slices.Sorted(maps.Keys(p.Monitoring.Queues)) {
		check("monitoring", "queues."+name, name)
	}
	for i := range p.Access.Grants {
		check("access", "grants["+strconv.Itoa(i)+"].queues", p.Access.Grants[i].Queues...)
	}
	for i := range p.Access.Approvals.Rules {
		check("access", "approvals.rules["+strconv.Itoa(i)+"].queues", p.Access.Approvals.Rules[i].Queues...)
	}
}

func (l *loader) checkDestination(name string, d *Destination) {
	const file = "retry-policies"
	d.Name = name
	at := "destinations." + name
	switch {
	case d.URL == "" && d.URLFile == "":
		l.addf(file, at, "url is required")
	case d.URL != "" && d.URLFile != "":
		l.addf(file, at, "has url and urlFile; remove one")
	case d.URL != "":
		l.checkTarget(at, ".url", d)
	default:
		if d.URL = l.readSecret("retry-policies", at+".urlFile", d.URLFile); d.URL != "" {
			l.checkTarget(at, ".urlFile", d)
		}
		if l.source.SecretsElsewhere {
			d.URL = ""
		}
	}
	if d.Probe.URL != "" {
		l.checkURL(at+".probe.url", d.Probe.URL)
	}
	l.checkPace(file, at+".redeliveriesPerSecond", d.RedeliveriesPerSecond)
	l.checkRange(file, at+".probe.every", d.Probe.Every, 100*time.Millisecond, time.Hour)
	l.checkRange(file, at+".probe.timeout", d.Probe.Timeout, time.Millisecond, time.Minute)
	at, place := at+".secret", ""
	if d.SecretFile != "" {
		at, place = at+"File", l.secretPath(d.SecretFile)+": "
		d.Secret = Secret(l.readSecret(file, at, d.SecretFile))
	}
	if _, err := newSigners(d.Secret); err != nil {
		l.addf(file, at, "%s%w", place, err)
	}
	if d.SecretFile != "" && l.source.SecretsElsewhere {
		d.Secret = ""
	}
}

// checkTarget checks the URL in a field of a destination, and reads the descriptors if the URL is a gRPC method.
func (l *loader) checkTarget(at, field string, d *Destination) {
	const file = "retry-policies"
	if !grpc.IsURL(d.URL) {
		l.checkURL(at+field, d.URL)
		if d.DescriptorFile != "" {
			l.addf(file, at+".descriptorFile", "is for gRPC methods (grpc:// and grpcs:// URLs)")
		}
		return
	}
	target, err := grpc.ParseURL(d.URL)
	if err != nil {
		l.addf(file, at+field, "%w", err)
		return
	}
	if d.DescriptorFile == "" {
		return
	}
	at += ".descriptorFile"
	if set := l.readFile(file, at, d.DescriptorFile); set != "" {
		if d.Method, err = grpc.MethodOf(target, []byte(set)); err != nil {
			l.addf(file, at, "%s: %w", l.secretPath(d.DescriptorFile), err)
		}
	}
}

// readSecret reads a file that contains a secret.
func (l *loader) readSecret(file, at, path string) (secret string) {
	return strings.TrimSpace(l.readFile(file, at, path))
}

// readFile reads a file that the policy names, and adds the file to those that Watch checks. A missing or empty file is
// a problem or, if the secrets are on another machine, a missing file is a warning. For a draft, readFile reads no file
// and returns the content that the policy in force has.
func (l *loader) readFile(file, at, path string) (content string) {
	key := at + " " + path
	if l.draft != nil { // the author of a draft may lack the right to read the file
		return l.draft.inForce.secrets[key]
	}
	defer func() { l.policy.secrets[key] = content }()
	path = l.secretPath(path)
	l.policy.secretFiles = append(l.policy.secretFiles, path)
	raw, err := os.ReadFile(path)
	content = string(raw)
	switch {
	case errors.Is(err, fs.ErrNotExist) && l.source.SecretsElsewhere:
		l.warnf(file, at, "%s is missing here; dlqd serve needs it", path)
	case err != nil:
		l.addf(file, at, "%w", err)
	case strings.TrimSpace(content) == "":
		l.addf(file, at, "%s is empty", path)
	}
	return content
}

// secretPath returns the path of a file that the policy names, such as a secret or a descriptor. A relative path is
// relative to the directory of the policy.
func (l *loader) secretPath(path string) string {
	if filepath.IsAbs(path) {
		return path
	}
	return filepath.Join(l.source.Dir, path)
}

func (l *loader) checkURL(at, text string) {
	if u, err := url.Parse(text); err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		l.addf("retry-policies", at, "must be an http or https URL")
	}
}

func (l *loader) checkRouting() {
	const file = "dlq-routing"
	r := &l.policy.Routing
	l.checkPace(file, "redeliveriesPerSecond", r.RedeliveriesPerSecond)
	for _, name := range slices.Sorted(maps.Keys(r.Strategies)) {
		l.checkPlan("strategies."+name, r.Strategies[name])
	}
	l.checkClasses("classes", r.Classes)
	for _, name := range slices.Sorted(maps.Keys(r.Queues)) {
		at := "queues." + name
		l.checkClasses(at+".classes", r.Queues[name].Classes)
		l.checkPlan(at+".plan", r.Queues[name].Plan)
		l.checkRange(file, at+".staleAfter", r.Queues[name].StaleAfter, 0, maxRetention)
		l.checkKeyPath(file, at+".orderingKey", r.Queues[name].OrderingKey)
	}
	for _, name := range slices.Sorted(maps.Keys(r.Kinds)) {
		at := "kinds." + name
		if strings.ContainsRune(name, 0) { // the database reads the names of kinds, and cannot read this one
			l.addf(file, "kinds", "%q has a NUL character, which no kind has", name)
		}
		l.checkClasses(at+".classes", r.Kinds[name].Classes)
		l.checkPlan(at+".plan", r.Kinds[name].Plan)
		l.checkRange(file, at+".staleAfter", r.Kinds[name].StaleAfter, 0, maxRetention)
		l.checkKeyPath(file, at+".orderingKey", r.Kinds[name].OrderingKey)
	}
	l.checkRange(file, "smartRetry.over", r.SmartRetry.Over, time.Second, maxSmartOver)
	seen := map[string]bool{}
	for i := range r.Rules {
		rule := &r.Rules[i]
		at := "rules[" + strconv.Itoa(i) + "]"
		if slices.Contains(ReservedRules(), rule.Name) {
			l.addf(file, at+".name", "%q is reserved by dlqd", rule.Name)
		}
		if rule.Class == "" && rule.Priority == 0 && len(rule.Tags) == 0 && rule.Assignee == "" &&
			reflect.ValueOf(rule.Plan).IsZero() {
			l.addf(file, at, "has no effect: set a class, a plan, a priority, tags or an assignee")
		}
		if seen[rule.Name] {
			l.addf(file, at+".name", "%q is also the name of another rule", rule.Name)
		}
		seen[rule.Name] = true
		for n, tag := range rule.Tags {
			if problem := message.TagProblem(tag); problem != "" {
				l.addf(file, at+".tags["+strconv.Itoa(n)+"]", "%q %s", tag, problem)
			}
		}
		l.checkPlan(at+".plan", &rule.Plan)
	}
}

func (l *loader) checkClasses(at string, classes ByClass[*Plan]) {
	for _, class := range slices.Sorted(maps.Keys(classes)) {
		l.checkPlan(at+"."+class, classes[class])
	}
}

func (l *loader) checkPlan(at string, p *Plan) {
	const file = "dlq-routing"
	if p == nil {
		return
	}
	for i, delay := range p.Delays {
		l.checkRange(file, at+".delays["+strconv.Itoa(i)+"]", delay, time.Millisecond, maxDelay)
	}
	for i, hour := range p.Hours {
		if hour < 0 || hour > 23 {
			l.addf(file, at+".hours["+strconv.Itoa(i)+"]", "is %d; must be 0 to 23", hour)
		}
	}
	if p.TimeZone != "" {
		if _, err := time.LoadLocation(p.TimeZone); err != nil {
			l.addf(file, at+".timeZone", "%q is not a time zone, such as UTC or Europe/Berlin", p.TimeZone)
		}
	}
}

func (l *loader) checkRange(file, at string, value, least, most time.Duration) {
	if value < least || value > most {
		l.addf(file, at, "is %s; must be %s to %s", value, least, most)
	}
}

// checkKeyPath reports a path with an empty key, or with a NUL character, which Postgres cannot read.
func (l *loader) checkKeyPath(file, at, path string) {
	if slices.Contains(keyPath(path), "") {
		l.addf(file, at, "%q has an empty key; a path is keys joined by dots, such as customer.id", path)
	}
	if strings.ContainsRune(path, 0) {
		l.addf(file, at, "%q has a NUL character, which no key has", path)
	}
}

// checkPace reports a rate that is so low that redeliveries would practically stop.
func (l *loader) checkPace(file, at string, perSecond float64) {
	if perSecond > 0 && perSecond < minPace {
		l.addf(file, at, "is %g; must be 0 (no limit), or %g or more", perSecond, minPace)
	}
}

func sortedKeys[T any](m map[string]T) string { return strings.Join(slices.Sorted(maps.Keys(m)), ", ") }
