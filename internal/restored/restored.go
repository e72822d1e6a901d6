// Package restored notices that the database was restored to an earlier moment, and holds what dlqd would then
// send a second time, until a person lets it go on.
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
	// interval is how often a process compares the server, and writes its mark.
	interval = 2 * time.Second
	// lookTimeout bounds one comparison: longer than the 5 s for which it waits for transactions that send.
	lookTimeout = 10 * time.Second
)

// What dlq.may_send and dlq.watch_server answer.
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

// Config is what a [Guard] needs.
type Config struct {
	Schemas postgres.Schemas
	Process uuid.UUID // its row in dlq.processes
	Name    string    // host and process id
	Logger  *slog.Logger
}

// Guard knows which server this process has run on, and asks before anything is sent. The mark and the timeline
// are of the last comparison that was committed: what proves that nothing is lost.
type Guard struct {
	config Config
	loop   *background.Loop

	mu       sync.Mutex // of mark and timeline, which belong together
	mark     int64
	timeline int64

	held atomic.Pointer[Hold]
}

// New returns a guard that has not looked yet. db is where its loop looks.
func New(config Config, db postgres.DB) *Guard {
	g := &Guard{config: config}
	g.loop = background.New(background.Config{
		Name: "server", Interval: interval, Timeout: lookTimeout, Failing: "whether the database was restored is not known",
		Once: background.Each(func(ctx context.Context) error { return g.Look(ctx, db) }),
	})
	return g
}

// Loop keeps looking.
func (g *Guard) Loop() *background.Loop { return g.loop }

func (g *Guard) last() (mark, timeline int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.mark, g.timeline
}

// Look compares the server with what is known of it, on db, and holds what dlqd sends where it was restored. It
// comes before a process begins to work, and before a new connection is used.
func (g *Guard) Look(ctx context.Context, db postgres.DB) error {
	mark, timeline := g.last()
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
	was := hold
	if found.Mark > g.mark { // else another connection has looked since
		g.mark, g.timeline = found.Mark, found.Timeline
		was = g.held.Swap(hold)
	}
	g.mu.Unlock()
	switch {
	case hold != nil && was == nil:
		g.config.Logger.ErrorContext(ctx, "the database was restored: replay runs, redeliveries and messages from before are held until a person lets them go on (dlqd restored)",
			"reason", hold.Note)
	case hold == nil && was != nil:
		g.config.Logger.InfoContext(ctx, "the restored database goes on: nothing is held any more")
	}
	switch found.Verdict {
	case verdictPromoted:
		g.config.Logger.WarnContext(ctx, "a standby was promoted, and what this process wrote last is there: dlqd goes on", "to", fmt.Sprint("timeline ", found.Timeline))
	case verdictUnknown:
		g.config.Logger.InfoContext(ctx, "dlqd knows this server from now on")
	}
	return nil
}

// Held says why nothing is sent by itself; nil where it is.
func (g *Guard) Held() *Hold { return g.held.Load() }

// Holds reports whether a job that was made at a time is held: one that the restored database had already. What
// came later cannot have been sent before.
func (g *Guard) Holds(createdAt time.Time) bool {
	hold := g.held.Load()
	return hold != nil && createdAt.Before(hold.At)
}

// TryLock reports whether a transaction may judge what is sent by itself, and keeps the switches of automatic
// redelivery as they are until it ends. It reports false where a switch is being changed, or the server was
// switched this moment.
func (g *Guard) TryLock(ctx context.Context, tx postgres.DB) (bool, error) {
	verdict, err := g.ask(ctx, tx)
	return verdict != verdictSwitching && verdict != verdictUnsettled, err
}

// MaySend is TryLock for what knows no switches: it also reports false where the database was restored.
func (g *Guard) MaySend(ctx context.Context, tx postgres.DB) (bool, error) {
	verdict, err := g.ask(ctx, tx)
	return verdict == verdictYes, err
}

func (g *Guard) ask(ctx context.Context, tx postgres.DB) (string, error) {
	mark, _ := g.last()
	verdict, err := dbsqlc.New(tx).MaySend(ctx, dbsqlc.MaySendParams{Process: g.config.Process, Mark: mark})
	if err == nil && verdict == verdictUnsettled {
		g.loop.Wake()
	}
	return verdict, err
}

// Repeat is something that may be done a second time.
type Repeat struct {
	What   string `json:"what" doc:"What: a replay run, redeliveries under way, dead letters that go by themselves, messages in River's queues, or approved requests."`
	Held   bool   `json:"held" doc:"dlqd holds it while the database counts as restored. Jobs of an application run on the application's workers, and are not held."`
	Items  int64  `json:"items" doc:"How many; counted to 100,000."`
	Detail string `json:"detail,omitempty" doc:"Which."`
}

// Preview says what may be done a second time.
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

// Resume lets go on what is held, and takes this server for dlqd's own from now on. It reports whether something
// was held.
func Resume(ctx context.Context, db postgres.DB, actor, note string) (bool, error) {
	return dbsqlc.New(db).ResumeRestored(ctx, dbsqlc.ResumeRestoredParams{Actor: actor, Note: note})
}
