// Package restored detects that the database was restored to an earlier time, and holds everything
// that dlqd might then send a second time, until an operator resumes it.
package restored

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/restored/internal/dbsqlc"
)

const (
	// interval is how often a process checks the server and writes its mark.
	interval = 2 * time.Second
	// checkTimeout bounds one check: it exceeds the 5 s that a check waits for sending transactions.
	checkTimeout = 10 * time.Second
)

// Verdicts of dlq.may_send and dlq.watch_server.
const (
	verdictYes       = "yes"
	verdictSwitching = "switching"
	verdictUnknown   = "unknown"
	verdictPromoted  = "promoted"
	verdictUnsettled = "unsettled"
)

// Hold says since when, and why, dlqd holds what it would send.
type Hold struct {
	At   time.Time
	Note string
}

// Config configures a [Guard].
type Config struct {
	Schemas postgres.Schemas
	Process uuid.UUID // its row in dlq.processes
	Name    string    // host and process id
	Logger  *slog.Logger
}

// Guard knows on which server this process has run, and decides whether a transaction may send. mark and timeline are
// those of the last committed check. A server that lacks that mark has lost committed data.
type Guard struct {
	config Config
	loop   *background.Loop

	mu       sync.Mutex // guards mark and timeline, which belong together
	mark     int64
	timeline int64

	held atomic.Pointer[Hold]
}

// New returns a guard that has not checked yet. Its loop checks on db.
func New(config Config, db postgres.DB) *Guard {
	g := &Guard{config: config}
	g.loop = background.New(background.Config{
		Name: "server", Interval: interval, Timeout: checkTimeout,
		Failing: "checking whether the database was restored failed",
		Once:    background.Each(func(ctx context.Context) error { return g.Check(ctx, db) }),
	})
	return g
}

// Loop returns the loop that calls [Guard.Check].
func (g *Guard) Loop() *background.Loop { return g.loop }

func (g *Guard) lastCheck() (mark, timeline int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mark, g.timeline
}

// Check compares the server behind db with the known one, and holds what dlqd sends if it was
// restored. It runs before a process begins to work, before a new connection is used, and every interval.
func (g *Guard) Check(ctx context.Context, db postgres.DB) error {
	mark, timeline := g.lastCheck()
	found, err := dbsqlc.New(g.config.Schemas.Rendered(db)).WatchServer(ctx, dbsqlc.WatchServerParams{
		Process: g.config.Process, Name: g.config.Name, Mark: mark, Timeline: timeline,
	})
	if err != nil {
		return err
	}
	var hold *Hold
	if found.Held {
		hold = &Hold{At: found.HeldAt, Note: found.Note}
	}
	g.mu.Lock()
	previous := hold
	if found.Mark > g.mark { // otherwise a later check on another connection has ended first
		g.mark, g.timeline = found.Mark, found.Timeline
		previous = g.held.Swap(hold)
	}
	g.mu.Unlock()
	switch {
	case hold != nil && previous == nil:
		g.config.Logger.ErrorContext(ctx, "the database was restored: earlier replay runs, redeliveries and messages are "+
			"held until "+
			"an operator resumes them (dlqd restored)", "reason", hold.Note)
	case hold == nil && previous != nil:
		g.config.Logger.InfoContext(ctx, "the hold after the restore has ended")
	}
	switch found.Verdict {
	case verdictPromoted:
		g.config.Logger.WarnContext(ctx, "a standby was promoted without losing the last write of this process: nothing "+
			"is held", "to", fmt.Sprint("timeline ", found.Timeline))
	case verdictUnknown:
		g.config.Logger.InfoContext(ctx, "the database server was recorded as known")
	}
	return nil
}

// Held returns why nothing is sent automatically, or nil.
func (g *Guard) Held() *Hold { return g.held.Load() }

// Holds reports whether a job with the given creation time is held: a job that the restored
// database already had. Later jobs cannot have been sent before.
func (g *Guard) Holds(createdAt time.Time) bool {
	hold := g.held.Load()
	return hold != nil && createdAt.Before(hold.At)
}

// TryLock reports whether a transaction may decide what is sent automatically, and locks the
// switches of automatic redelivery until it ends. It returns false while a switch is changing, or
// if the server has just changed.
func (g *Guard) TryLock(ctx context.Context, tx postgres.DB) (bool, error) {
	verdict, err := g.sendVerdict(ctx, tx)
	return verdict != verdictSwitching && verdict != verdictUnsettled, err
}

// MaySend reports whether a transaction may send something that no switch controls, such as a batch of a replay
// run. It takes the same lock as TryLock, and also returns false while work is held because the database was
// restored.
func (g *Guard) MaySend(ctx context.Context, tx postgres.DB) (bool, error) {
	verdict, err := g.sendVerdict(ctx, tx)
	return verdict == verdictYes, err
}

func (g *Guard) sendVerdict(ctx context.Context, tx postgres.DB) (string, error) {
	mark, _ := g.lastCheck()
	verdict, err := dbsqlc.New(tx).MaySend(ctx, dbsqlc.MaySendParams{Process: g.config.Process, Mark: mark})
	if err == nil && verdict == verdictUnsettled {
		g.loop.Wake()
	}
	return verdict, err
}

// Repeat is work that may be done a second time.
type Repeat struct {
	What   string `json:"what" doc:"Kind of work: a replay run, redeliveries in progress, automatic redeliveries, messages in River's queues, or approved requests."`
	Held   bool   `json:"held" doc:"Whether dlqd holds the work until an operator resumes. Jobs of an application run on the application's workers and are not held."`
	Items  int64  `json:"items" doc:"Number of items, counted up to 100,000."`
	Detail string `json:"detail,omitempty" doc:"Details."`
}

// Preview returns the work that may be done a second time.
func Preview(ctx context.Context, db postgres.DB) ([]Repeat, error) {
	rows, err := dbsqlc.New(db).Restored(ctx)
	if err != nil {
		return nil, err
	}
	repeats := make([]Repeat, len(rows))
	for i, r := range rows {
		repeats[i] = Repeat(r)
	}
	return repeats, nil
}

// Resume releases everything that is held, and records this server as the known one. It reports
// whether anything was held.
func Resume(ctx context.Context, db postgres.DB, actor, note string) (bool, error) {
	return dbsqlc.New(db).ResumeRestored(ctx, dbsqlc.ResumeRestoredParams{Actor: actor, Note: note})
}
