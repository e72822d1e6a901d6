// Package process registers each dlqd process of a database, with the queues whose messages it
// delivers. It also rescues the messages of dead processes.
package process

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/process/internal/dbsqlc"
)

const (
	// Interval is how often a process registers that it is alive.
	Interval = 5 * time.Second
	// LiveFor is how long a process counts as live after its last heartbeat. Several heartbeats may fail in that time.
	LiveFor = time.Minute
	// awayFor is how long after its last heartbeat a process is expected to return from a restart or a deploy. Until then
	// its queues count as Away, and afterwards as Unworked.
	awayFor = 15 * time.Minute
	// forgetAfter is how long a process that is gone stays in dlq.processes.
	forgetAfter = 24 * time.Hour
)

// Config configures a [Process].
type Config struct {
	DB      postgres.DB // with schema names rendered into statements
	Name    string      // host and process id
	Version string      // of the program
	Parts   []string    // parts of dlqd that the process runs
	// Queues returns the queues whose messages the process currently delivers. If Queues is nil, it delivers none.
	Queues func() []string
	Logger *slog.Logger // logs each batch that Rescue rescues
}

// Process is the registration of this process, which other processes read.
type Process struct {
	config Config
	id     uuid.UUID

	mu         sync.Mutex // guards the rest
	heartbeats heartbeats
}

// New returns a process that is not registered yet.
func New(config Config) *Process { return &Process{config: config, id: uuid.New()} }

// ID returns the process's id in dlq.processes and in its River client.
func (p *Process) ID() uuid.UUID { return p.id }

// Loop returns the loop that registers the process as long as it runs. The caller wakes the loop when the process's
// queues change.
func (p *Process) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "presence", Interval: Interval, Timeout: Interval, Once: background.Each(p.Once),
		Failing: "registering this process failed",
	})
}

// Once registers that the process is alive, and the queues that it works.
func (p *Process) Once(ctx context.Context) error {
	queues := []string{} // not nil, which would be NULL
	if p.config.Queues != nil {
		queues = append(queues, p.config.Queues()...)
	}
	began := time.Now()
	seenAt, err := dbsqlc.New(p.config.DB).RecordHeartbeat(ctx, dbsqlc.RecordHeartbeatParams{
		ID: p.id, Name: p.config.Name, Version: p.config.Version,
		Parts: p.config.Parts, Queues: queues, ForgetAfter: forgetAfter,
	})
	if err != nil {
		return fmt.Errorf("register process %s: %w", p.id, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heartbeats.record(began, seenAt)
	return nil
}

// Stop records that the process works no queue any more. It keeps the process registered, because its jobs may still be
// running.
func (p *Process) Stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Interval)
	defer cancel()
	if err := dbsqlc.New(p.config.DB).StopProcess(ctx, p.id); err != nil {
		return fmt.Errorf("record that process %s works no queue: %w", p.id, err)
	}
	return nil
}
