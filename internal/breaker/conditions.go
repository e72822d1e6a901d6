package breaker

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/shirou/gopsutil/v4/cpu"
	"github.com/shirou/gopsutil/v4/mem"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/policy"
	"github.com/dlqd/dlqd/internal/postgres"
)

// DefaultConditionsInterval is how often the load of the machine and the database is measured.
const DefaultConditionsInterval = 2 * time.Second

// maxProbeDelay limits one round of measuring and probing, so that slow probes delay the next measurement by at most
// this time.
const maxProbeDelay = time.Minute

// Load is how much of the processors, the memory and the database's connections is in use, in percent.
type Load struct{ CPU, Memory, Connections float64 }

// ConditionsConfig configures [Conditions].
type ConditionsConfig struct {
	DB       postgres.DB
	Policy   func() *policy.Policy
	Breakers *Breakers
	Interval time.Duration // 0 means DefaultConditionsInterval
	// Measure returns the load of the machine and the database. If it is nil, [Conditions] measures the load itself.
	Measure func(ctx context.Context) (Load, error)
}

// Conditions knows whether dead letters can be redelivered now. Its conditions are: the destination's breaker allows a
// delivery or a probe, the destination's last health probe succeeded, and this machine and the database had capacity at
// the last measurement.
type Conditions struct {
	config ConditionsConfig
	client *http.Client

	mu     sync.Mutex
	load   *Load            // nil before the first measurement
	probes map[string]probe // by destination
}

// probe is the result of the last health probe of a destination.
type probe struct {
	at      time.Time
	problem string // "" if the probe succeeded
}

// NewConditions returns conditions without measurements. A redelivery does not wait for a condition that is not
// measured yet.
func NewConditions(config ConditionsConfig) *Conditions {
	config.Interval = cmp.Or(config.Interval, DefaultConditionsInterval)
	c := &Conditions{config: config, client: &http.Client{}, probes: map[string]probe{}}
	if config.Measure == nil {
		c.config.Measure = c.measure
	}
	return c
}

// Loop returns the loop that calls [Conditions.Update].
func (c *Conditions) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "conditions", Interval: c.config.Interval, Timeout: maxProbeDelay,
		Patience: maxProbeDelay, Once: background.Each(c.Update),
		End: c.client.CloseIdleConnections, Failing: "conditions: measuring the load failed; the last measurement applies",
	})
}

// Update measures the load once and runs the probes that are due.
func (c *Conditions) Update(ctx context.Context) error {
	load, err := c.config.Measure(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.load = &load
	c.mu.Unlock()
	var probing sync.WaitGroup
	for name, d := range c.config.Policy().Destinations {
		c.mu.Lock()
		last := c.probes[name]
		c.mu.Unlock()
		if d.Probe.URL == "" || time.Since(last.at) < d.Probe.Every {
			continue
		}
		probing.Go(func() {
			result := probe{at: time.Now(), problem: c.probeProblem(ctx, &d.Probe)}
			c.mu.Lock()
			defer c.mu.Unlock()
			c.probes[name] = result
		})
	}
	probing.Wait()
	return nil
}

// probeProblem runs a destination's health probe and returns a description of the problem, or "" if the probe
// succeeded.
func (c *Conditions) probeProblem(ctx context.Context, p *policy.Probe) string {
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, p.URL, nil)
	if err != nil {
		return "has an invalid URL"
	}
	response, err := c.client.Do(request)
	if err != nil {
		return "does not answer"
	}
	_ = response.Body.Close()
	if response.StatusCode < 200 || response.StatusCode > 299 {
		return fmt.Sprintf("answers %d", response.StatusCode)
	}
	return ""
}

// Load returns the last measured load, or false if this process has measured none.
func (c *Conditions) Load() (Load, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.load == nil {
		return Load{}, false
	}
	return *c.load, true
}

func (c *Conditions) measure(ctx context.Context) (Load, error) {
	var load Load
	used, err := cpu.PercentWithContext(ctx, 0, false) // the average since the last call
	if err != nil {
		return load, fmt.Errorf("processors: %w", err)
	}
	load.CPU = used[0]
	memory, err := mem.VirtualMemoryWithContext(ctx)
	if err != nil {
		return load, fmt.Errorf("memory: %w", err)
	}
	load.Memory = memory.UsedPercent
	load.Connections, err = postgres.ConnectionsUsed(ctx, c.config.DB)
	return load, err
}

// Unmet implements strategy.Conditions.
func (c *Conditions) Unmet(queue, to string, want *policy.Conditions) string {
	destination := c.config.Policy().DestinationOf(queue)
	if to != "" {
		destination = c.config.Policy().Destinations[to]
	}
	if isSet(want.Breaker) {
		name := QueuePrefix + queue
		if destination != nil {
			name = DestinationPrefix + destination.Name
		}
		if state, wait := c.config.Breakers.State(name); state == Open && wait > 0 {
			return "circuit breaker " + name + " is open"
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if isSet(want.Probe) && destination != nil && destination.Probe.URL != "" {
		if problem := c.probes[destination.Name].problem; problem != "" {
			return "the probe of destination " + destination.Name + " " + problem
		}
	}
	if c.load == nil {
		return ""
	}
	for _, limit := range []struct {
		what  string
		used  float64
		below *float64
	}{
		{"of this machine's processors are", c.load.CPU, want.CPUBelow},
		{"of this machine's memory is", c.load.Memory, want.MemoryBelow},
		{"of the database's connections are", c.load.Connections, want.ConnectionsBelow},
	} {
		if limit.below != nil && *limit.below > 0 && limit.used >= *limit.below {
			return fmt.Sprintf("%.0f %% %s in use (must be below %g %%)", limit.used, limit.what, *limit.below)
		}
	}
	return ""
}

func isSet(b *bool) bool { return b != nil && *b }
