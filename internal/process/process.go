// Package process knows which dlqd processes serve on a database, and which queues they deliver the messages of.
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
	// Interval is how often a process says that it is there.
	Interval = 5 * time.Second
	// LiveFor is how long a process that says nothing more counts as there: many rounds may fail meanwhile.
	LiveFor = time.Minute
	// awayFor is how long a process that stopped, or died, is expected back: a restart, a deploy.
	awayFor = 15 * time.Minute
	// forgetAfter is how long people can see in dlq.processes what was there.
	forgetAfter = 24 * time.Hour
)

// Config is what a [Process] needs.
type Config struct {
	DB      postgres.DB // with the schemas' names put into queries
	Name    string      // host and process id
	Version string      // of the program
	Parts   []string    // that it runs
	// Queues are those whose messages it delivers at the moment; nil for none.
	Queues func() []string
	Logger *slog.Logger // gets a line for each batch that Rescue puts back
}

// Process is this process, in the eyes of the others.
type Process struct {
	config Config
	id     uuid.UUID

	mu    sync.Mutex // guards the rest
	beats beats
}

// New returns a process that the others do not know yet.
func New(config Config) *Process { return &Process{config: config, id: uuid.New()} }

// ID is the process's id in dlq.processes, and that of its River client.
func (p *Process) ID() uuid.UUID { return p.id }

// Loop says so for as long as the process runs. Wake it when its queues change.
func (p *Process) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "presence", Interval: Interval, Timeout: Interval, Once: background.Each(p.Once), Failing: "other processes are not told that this one is there",
	})
}

// Once says that the process is there, and which queues it works.
func (p *Process) Once(ctx context.Context) error {
	queues := []string{} // a null is no array
	if p.config.Queues != nil {
		queues = append(queues, p.config.Queues()...)
	}
	began := time.Now()
	seenAt, err := dbsqlc.New(p.config.DB).SeeProcess(ctx, dbsqlc.SeeProcessParams{
		ID: p.id, Name: p.config.Name, Version: p.config.Version, Parts: p.config.Parts, Queues: queues, ForgetAfter: forgetAfter,
	})
	if err != nil {
		return fmt.Errorf("processes: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.beats.add(began, seenAt)
	return nil
}

// Stop says that the process works no queue any more, until it comes back as another. It is still seen while it runs:
// its jobs may.
func (p *Process) Stop(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Interval)
	defer cancel()
	if err := dbsqlc.New(p.config.DB).StopProcess(ctx, p.id); err != nil {
		return fmt.Errorf("processes: %w", err)
	}
	return nil
}
