// Package replica runs requests that only read on a streaming standby of the database. It knows up to which point the
// standby has replayed the WAL, which users have made changes that the standby may lack, and when the primary has to
// answer instead.
package replica

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/dlqd/dlqd/internal/background"
	"github.com/dlqd/dlqd/internal/postgres"
	"github.com/dlqd/dlqd/internal/replica/internal/dbsqlc"
)

const (
	// Interval is how often a process compares the positions of the primary and the standby.
	Interval = time.Second
	// answerTimeout bounds each statement that compares the positions. If the standby does not answer within that time,
	// reads that wait for it are repeated on the primary. So a page waits at most Interval plus answerTimeout for a
	// standby that hangs.
	answerTimeout = 2 * time.Second
	// actTimeout bounds the statement that records a change.
	actTimeout = 2 * time.Second
	// maxSamples is the maximum number of remembered positions of the primary that the standby has not replayed yet. They
	// cover ten minutes.
	maxSamples = 600
	// forgetAfter is how long a change is remembered. After that time, the standby has replayed the change, or lags too
	// much to be read.
	forgetAfter    = 24 * time.Hour
	forgetInterval = time.Hour
)

// Outcomes of a read: the standby answered, or the reason why the primary did.
const (
	// Served means that the standby answered.
	Served = "replica"
	// OwnAct means that the standby may lack a change that the viewer made.
	OwnAct = "own_act"
	// Masking means that the standby may lack a change of the policy's masking rules.
	Masking = "masking"
	// Lag means that the standby lags more than the policy allows.
	Lag = "lag"
	// Away means that the standby does not answer, or does not follow the database's primary.
	Away = "away"
	// Repeated means that the read failed on the standby and the primary answered it. "Not found" counts as such a
	// failure, because the primary may have data that the standby has not replayed yet.
	Repeated = "repeated"
)

// Outcomes returns all outcomes of a read.
func Outcomes() []string { return []string{Served, OwnAct, Masking, Lag, Away, Repeated} }

// Config configures a [Replica].
type Config struct {
	Primary *pgxpool.Pool
	Schemas postgres.Schemas
	URL     string               // of the standby
	MaxLag  func() time.Duration // by the policy in force
	Logger  *slog.Logger
	Observe func(outcome string) // called after each read; may be nil
}

// Replica reads from a standby.
type Replica struct {
	config  Config
	queries *dbsqlc.Queries
	state   atomic.Pointer[state]
	started atomic.Pointer[string] // start time of the server whose position is known: postgres.Server.Started

	// The fields below are used only by the loop's goroutine.
	primary   postgres.Server
	positions *postgres.Standby // one connection, which reads the standby's position
	reads     *postgres.Standby // nil until the standby has answered
	samples   []sample          // positions of the primary, oldest first; the standby has replayed only the first
	forgotten time.Time         // when records of old changes were last deleted
	up        context.Context   //nolint:containedctx // ends when the standby stops answering
	down      context.CancelFunc
}

// sample is a position of the primary and its time.
type sample struct {
	postgres.Position

	at time.Time
}

// state is the result of the last comparison of the positions.
type state struct {
	reads    *postgres.Standby // nil if the standby cannot be read
	up       context.Context   //nolint:containedctx // of reads: ends when the standby stops answering
	position postgres.Position // what the standby has replayed
	// asOf is a time: the standby has everything that was committed before. It is zero if unknown.
	asOf    time.Time
	masking string // see dbsqlc.Masking
	problem error  // why the standby cannot be read
}

// Open returns a Replica. It returns a [postgres.ErrOtherDatabase] if the server at the URL has another database. It
// returns no error if that server does not answer or was promoted: the loop tries again.
func Open(ctx context.Context, config Config) (*Replica, error) {
	r := &Replica{config: config, queries: dbsqlc.New(config.Schemas.Rendered(config.Primary)), down: func() {}}
	var err error
	if r.primary, err = postgres.ServerOf(ctx, config.Primary); err != nil {
		return nil, fmt.Errorf("replica: reading the system identifier of the database: %w", err)
	}
	if err = r.once(ctx); errors.Is(err, postgres.ErrOtherDatabase) {
		r.Close()
		return nil, err
	}
	if err != nil {
		config.Logger.WarnContext(ctx, "the replica cannot be read; the primary answers its reads", "error", err)
	}
	return r, nil
}

// Close closes the connections. The loop must have ended.
func (r *Replica) Close() {
	r.down()
	for _, standby := range []*postgres.Standby{r.reads, r.positions} {
		if standby != nil {
			standby.Pool.Close()
		}
	}
}

// Loop returns the loop that compares the positions of the primary and the standby.
func (r *Replica) Loop() *background.Loop {
	return background.New(background.Config{
		Name: "replica", Interval: Interval, Timeout: 3 * answerTimeout,
		Failing: "the replica cannot be read; the primary answers its reads",
		Once:    background.Each(r.once),
	})
}

// once compares the positions. It does not return errors of the primary, which other loops report. Meanwhile the data
// of the standby counts as getting older.
func (r *Replica) once(ctx context.Context) error {
	if err := r.sample(ctx); err != nil && ctx.Err() != nil {
		return err
	}
	position, masking, err := r.standing(ctx)
	if err == nil && len(r.samples) > 0 {
		err = position.CheckFollows(r.samples[len(r.samples)-1].Position)
	}
	if err != nil {
		r.down()
		r.up, r.down = nil, func() {}
		if r.reads != nil {
			r.reads.Pool.Reset() // idle connections probably hang, too
		}
		r.state.Store(&state{problem: err})
		return err
	}
	for len(r.samples) > 1 && r.samples[1].Bytes <= position.Bytes {
		r.samples = r.samples[1:]
	}
	if r.up == nil {
		r.up, r.down = context.WithCancel(context.WithoutCancel(ctx))
	}
	s := &state{reads: r.reads, up: r.up, position: position, masking: masking}
	if len(r.samples) > 0 && r.samples[0].Bytes <= position.Bytes {
		s.asOf = r.samples[0].at
	}
	r.state.Store(s)
	return nil
}

// sample records the position of the primary.
func (r *Replica) sample(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if time.Since(r.forgotten) > forgetInterval {
		if err := r.queries.ForgetActs(ctx, forgetAfter); err != nil {
			return err
		}
		r.forgotten = time.Now()
	}
	at := time.Now()
	position, err := postgres.PositionOf(ctx, r.config.Primary)
	if err == nil && len(r.samples) > 0 && r.samples[0].Timeline != position.Timeline { // after a failover
		r.samples = nil
	}
	if err == nil && len(r.samples) < maxSamples { // otherwise the standby lags too much to be read
		r.samples = append(r.samples, sample{position, at})
	}
	return err
}

// standing returns the position of the standby and the masking rules in force there. It connects to the standby if
// necessary.
func (r *Replica) standing(ctx context.Context) (p postgres.Position, masking string, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if r.positions == nil {
		if r.positions, err = postgres.OpenStandby(ctx, r.config.URL, 1, r.identify); err != nil {
			return p, "", err
		}
	}
	if r.reads == nil {
		if r.reads, err = postgres.OpenStandby(ctx, r.config.URL, 0, r.admit); err != nil {
			return p, "", err
		}
	}
	if p, err = r.positions.Position(ctx); err != nil {
		return p, "", err
	}
	err = r.positions.Read(ctx, func(ctx context.Context) (err error) {
		masking, err = r.queries.Masking(ctx)
		return err
	})
	return p, masking, err
}

// identify checks that a connection leads to a standby of the primary, and remembers the server's start time.
func (r *Replica) identify(ctx context.Context, conn *pgx.Conn) error {
	server, err := postgres.ServerOf(ctx, conn)
	if err == nil {
		err = server.CheckStandbyOf(r.primary)
	}
	if err == nil {
		r.started.Store(&server.Started)
	}
	return err
}

// admit checks that a connection for reads leads to the same server as the connection that reads the position.
func (r *Replica) admit(ctx context.Context, conn *pgx.Conn) error {
	server, err := postgres.ServerOf(ctx, conn)
	if err == nil {
		err = server.CheckStandbyOf(r.primary)
	}
	if known := r.started.Load(); err == nil && (known == nil || server.Started != *known) {
		err = errors.New("the URL of the replica leads to several servers, or the server has just started: name one server")
	}
	return err
}

// Read calls run with a context in which statements use the standby, if the standby may answer: it follows the primary,
// its lag is within the policy's limit, it masks the same data as the primary, and it has the last changes of the
// actors, who see the answer. asOf is the time of the data, or zero if the primary answered. If run fails on the
// standby and ctx is not done, Read calls run again with a context for the primary.
func (r *Replica) Read(ctx context.Context, actors []string,
	run func(context.Context) error,
) (asOf time.Time, err error) {
	s := r.state.Load()
	outcome := r.decide(s)
	if outcome == Served {
		outcome = r.compare(ctx, s, actors)
	}
	if outcome == Served {
		reading, cancel := context.WithCancel(ctx)
		stop := context.AfterFunc(s.up, cancel)
		err = s.reads.Read(reading, run)
		stop()
		cancel()
		if err == nil || ctx.Err() != nil {
			r.observe(Served)
			return s.asOf, err
		}
		if failed, ok := errors.AsType[*postgres.StandbyError](err); ok {
			r.config.Logger.WarnContext(ctx, "the replica failed to answer a read; the primary answers it", "error", failed)
		}
		outcome = Repeated
	}
	r.observe(outcome)
	return time.Time{}, run(ctx)
}

// decide returns Served, or the reason why the standby may answer no read at all.
func (r *Replica) decide(s *state) string {
	switch {
	case s.problem != nil:
		return Away
	case s.asOf.IsZero() || time.Since(s.asOf) > r.config.MaxLag():
		return Lag
	}
	return Served
}

// compare returns Served, or the reason why the standby may not answer these actors. It queries the primary, which may
// be another server than at the last comparison of the positions.
func (r *Replica) compare(ctx context.Context, s *state, actors []string) string {
	ctx, _ = postgres.Counting(ctx) // this statement does not count as one of the page
	needed, err := r.queries.Needed(ctx, actors)
	switch {
	case err != nil || needed.Position > s.position.Bytes:
		return OwnAct // an unknown change counts as one
	case needed.Timeline != s.position.Timeline:
		return Away
	case needed.Masking != s.masking:
		return Masking
	}
	return Served
}

func (r *Replica) observe(outcome string) {
	if r.config.Observe != nil {
		r.config.Observe(outcome)
	}
}

// Acted records that the actors have made a change. The actors are the user who made it and the users on whose behalf
// it was made. The caller must call Acted after the commit and before the user gets the answer.
func (r *Replica) Acted(ctx context.Context, actors ...string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), actTimeout) // a client that disconnected may return
	defer cancel()
	if err := r.queries.RecordLastAct(ctx, actors); err != nil {
		r.config.Logger.WarnContext(ctx, "recording a change failed; the actors' next pages from the replica may lack it",
			"actor", strings.Join(actors, ", "), "error", err)
	}
}

// AsOf returns the time of the standby's data, or zero if the standby cannot be read.
func (r *Replica) AsOf() time.Time { return r.state.Load().asOf }

// Status reports whether the standby may answer reads. detail is the age of its data, or the reason why it may not
// answer.
func (r *Replica) Status() (ok bool, detail string) {
	s := r.state.Load()
	lag := time.Since(s.asOf).Round(100 * time.Millisecond)
	switch r.decide(s) {
	case Away:
		detail = "does not answer"
		if errors.Is(s.problem, postgres.ErrNotStandby) {
			detail = s.problem.Error()
		}
	case Lag:
		detail = "its data is of an unknown time"
		if !s.asOf.IsZero() {
			detail = fmt.Sprintf("lags %s, and the policy allows %s", lag, r.config.MaxLag())
		}
	default:
		return true, fmt.Sprintf("its data is at most %s old", lag)
	}
	return false, detail + "; the primary answers its reads"
}
