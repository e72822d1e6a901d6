// Package policy is the configuration that teams keep in Git: which queues there are, where their messages go, and how
// they are retried.
package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-viper/mapstructure/v2"
	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
)

// FileName is the file of a configuration directory that this package reads.
const FileName = "retry-policies.yaml"

// Defaults of a queue.
const (
	DefaultQueue       = "default"
	DefaultMaxAttempts = 3
	DefaultBackoff     = time.Second // then doubled each time: 1 s, 2 s, 4 s
	DefaultTimeout     = 30 * time.Second
	DefaultConcurrency = 100
)

// Bounds of a queue's values: River's attempts are smallint, its workers at most 10,000.
const (
	maxAttempts    = 1000
	maxConcurrency = 10_000
	maxBackoff     = 24 * time.Hour
	maxTimeout     = time.Hour
)

// Policy is the whole configuration.
type Policy struct {
	Queues       map[string]*Queue       `koanf:"queues"`
	Destinations map[string]*Destination `koanf:"destinations"`
}

// Queue says how the messages of a queue are delivered.
type Queue struct {
	Name        string        `koanf:"-"`
	MaxAttempts int           `koanf:"maxAttempts"` // attempts of the job before it is a dead letter
	Backoff     time.Duration `koanf:"backoff"`     // before the second attempt; doubles for each one after
	Timeout     time.Duration `koanf:"timeout"`     // of one delivery, connection and answer together
	Concurrency int           `koanf:"concurrency"` // deliveries at once, in one process
	Destination string        `koanf:"destination"` // name of a destination
	// DeadLetterLogicalFailures makes a dead letter of a message whose receiver answers 200 with {"success": false}.
	DeadLetterLogicalFailures bool `koanf:"deadLetterLogicalFailures"`
}

// Destination is where messages are delivered.
type Destination struct {
	Name       string `koanf:"-"`
	URL        string `koanf:"url"`
	Secret     Secret `koanf:"secret"`     // Standard Webhooks secret (whsec_…); deliveries are signed if set
	SecretFile string `koanf:"secretFile"` // file to read Secret from
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

var queueName = regexp.MustCompile(`^[a-z0-9]+([_-][a-z0-9]+)*$`)

// Default is the policy where no configuration is given: one queue, which delivers to destinationURL.
func Default(destinationURL string) (*Policy, error) {
	p := &Policy{
		Queues:       map[string]*Queue{DefaultQueue: {Destination: "default"}},
		Destinations: map[string]*Destination{"default": {URL: destinationURL}},
	}
	return p, p.complete("")
}

// Load reads the policy of a configuration directory.
func Load(dir string) (*Policy, error) {
	path := filepath.Join(dir, FileName)
	k := koanf.New("\x00") // no delimiter: names may have dots
	if err := k.Load(file.Provider(path), yaml.Parser()); err != nil {
		return nil, fmt.Errorf("policy %s: %w", path, err)
	}
	p := &Policy{}
	if err := k.UnmarshalWithConf("", p, koanf.UnmarshalConf{DecoderConfig: &mapstructure.DecoderConfig{
		TagName: "koanf", ErrorUnused: true,
		DecodeHook: mapstructure.StringToTimeDurationHookFunc(),
	}}); err != nil {
		return nil, fmt.Errorf("policy %s: %w", path, err)
	}
	if err := p.complete(dir); err != nil {
		return nil, fmt.Errorf("policy %s: %w", path, err)
	}
	return p, nil
}

// complete fills in defaults and checks everything.
func (p *Policy) complete(dir string) error {
	var problems []error
	bad := func(format string, args ...any) { problems = append(problems, fmt.Errorf(format, args...)) }

	if len(p.Queues) == 0 {
		bad("queues: there is none")
	}
	for _, name := range slices.Sorted(maps.Keys(p.Destinations)) {
		d := p.Destinations[name]
		if d == nil {
			bad("destinations.%s: is empty", name)
			continue
		}
		d.Name = name
		u, err := url.Parse(d.URL)
		switch {
		case d.URL == "":
			bad("destinations.%s.url: is required", name)
		case err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https"):
			bad("destinations.%s.url: must be an http or https URL", name)
		}
		if d.SecretFile != "" {
			path := d.SecretFile
			if !filepath.IsAbs(path) {
				path = filepath.Join(dir, path)
			}
			raw, err := os.ReadFile(path)
			if err != nil {
				bad("destinations.%s.secretFile: %w", name, err)
			}
			d.Secret = Secret(strings.TrimSpace(string(raw)))
		}
		if d.Secret != "" {
			if _, err := newSigner(d.Secret); err != nil {
				bad("destinations.%s.secret: must be base64, with or without whsec_ before it", name)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(p.Queues)) {
		q := p.Queues[name]
		if q == nil {
			q = &Queue{}
			p.Queues[name] = q
		}
		q.Name = name
		if !queueName.MatchString(name) || len(name) > 127 {
			bad("queues.%s: a queue's name is lower-case letters and digits, in words joined by - or _", name)
		}
		setDefault(&q.MaxAttempts, DefaultMaxAttempts)
		setDefault(&q.Backoff, DefaultBackoff)
		setDefault(&q.Timeout, DefaultTimeout)
		setDefault(&q.Concurrency, DefaultConcurrency)
		setDefault(&q.Destination, "default")
		checkRange(bad, name, "maxAttempts", q.MaxAttempts, 1, maxAttempts)
		checkRange(bad, name, "concurrency", q.Concurrency, 1, maxConcurrency)
		checkRange(bad, name, "backoff", q.Backoff, time.Millisecond, maxBackoff)
		checkRange(bad, name, "timeout", q.Timeout, time.Millisecond, maxTimeout)
		if p.Destinations[q.Destination] == nil {
			bad("queues.%s.destination: there is no destination %q (there are: %s)", name, q.Destination,
				strings.Join(slices.Sorted(maps.Keys(p.Destinations)), ", "))
		}
	}
	return errors.Join(problems...)
}

// QueueNames lists the queues in order.
func (p *Policy) QueueNames() []string { return slices.Sorted(maps.Keys(p.Queues)) }

// MaxTimeout is the longest timeout of any queue.
func (p *Policy) MaxTimeout() time.Duration {
	longest := time.Duration(0)
	for _, q := range p.Queues {
		longest = max(longest, q.Timeout)
	}
	return longest
}

func setDefault[T comparable](value *T, standard T) {
	var zero T
	if *value == zero {
		*value = standard
	}
}

func checkRange[T int | time.Duration](bad func(string, ...any), queue, field string, value, least, most T) {
	if value < least || value > most {
		bad("queues.%s.%s: is %v; must be %v to %v", queue, field, value, least, most)
	}
}

// Version identifies the policy: a hash of its content, without its secrets.
func (p *Policy) Version() string {
	hash := sha256.New()
	for _, name := range p.QueueNames() {
		_, _ = fmt.Fprintf(hash, "%+v\n", *p.Queues[name])
	}
	for _, name := range slices.Sorted(maps.Keys(p.Destinations)) {
		_, _ = fmt.Fprintf(hash, "%+v\n", *p.Destinations[name])
	}
	return hex.EncodeToString(hash.Sum(nil))[:12]
}
