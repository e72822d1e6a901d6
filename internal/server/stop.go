package server

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// maxReserve is the maximum of [Server.reserve].
const maxReserve = 5 * time.Second

// ErrStoppedAtOnce means that a second signal or the time limit ended the stop early. No accepted message is lost;
// interrupted jobs run again.
var ErrStoppedAtOnce = errors.New("stopped before all jobs finished; interrupted jobs will run again")

// reserve returns the length of the last part of a stop, in which the server cuts off everything that still runs.
func (s *Server) reserve() time.Duration { return min(s.config.StopTimeout/4, maxReserve) }

// Wait waits until ctx is done or a part fails, and then stops the server within StopTimeout. Requests, accepted
// messages and running jobs finish first, and the database stops last. Once hard is done, the rest of the stop takes at
// most [Server.reserve]. Wait returns the error of a part that failed, and the errors of the stop.
func (s *Server) Wait(ctx, hard context.Context) error {
	var exited <-chan struct{}
	if s.embedded != nil {
		exited = s.embedded.Exited()
	}
	var failed error
	select {
	case <-ctx.Done():
	case failed = <-s.failed:
	case <-exited:
		failed = fmt.Errorf("embedded Postgres exited; see its log %s", s.embedded.LogPath())
	}
	if failed != nil {
		s.logger.Error("stopping because a part failed", "error", failed)
	}
	return errors.Join(failed, s.stop(hard))
}

// stop stops all started parts. One deadline covers everything, even if the database hangs. Requests, accepted messages
// and running jobs have all of that time except the reserve. In the reserve, the server cuts off those that still run.
func (s *Server) stop(hard context.Context) error {
	s.stopping.Store(true)
	deadline := time.Now().Add(s.config.StopTimeout)
	finish, cancel := context.WithDeadline(hard, deadline.Add(-s.reserve()))
	defer cancel()
	var intake, jobs error
	inParallel(
		func() { intake = s.stopIntake(finish) },
		func() { jobs = s.stopJobs(finish) },
		func() { s.unregister(finish) },
	)

	if hard.Err() != nil && time.Until(deadline) > s.reserve() { // a second signal leaves only the reserve
		deadline = time.Now().Add(s.reserve())
	}
	half := func() (context.Context, context.CancelFunc) { // of the remaining time
		return context.WithTimeout(context.WithoutCancel(hard), time.Until(deadline)/2)
	}
	cut, cancelCut := half()
	defer cancelCut()
	var loops error
	inParallel(
		func() {
			if jobs != nil {
				_ = s.river.StopAndCancel(cut)
			}
		},
		func() { loops = s.loops.Stop(cut) },
	)
	errs := []error{intake, jobs, loops}
	if s.delivery != nil {
		s.delivery.Close()
	}
	sending, cancelSending := half()
	defer cancelSending()
	s.telemetry.Stop(sending)
	if s.archive != nil {
		errs = append(errs, s.archive.Close())
	}
	if s.pool != nil {
		closing, cancelClosing := half()
		defer cancelClosing()
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			if s.presencePool != nil {
				s.presencePool.Close()
			}
			if s.replica != nil {
				s.replica.Close()
			}
			// Close waits until connections in use are returned and the database server has closed its connections.
			s.pool.Close()
		}()
		select {
		case <-closed:
		case <-closing.Done():
			s.logger.Warn("closing the connections to the database timed out")
		}
	}
	if s.embedded != nil {
		errs = append(errs, s.embedded.StopWithin(time.Until(deadline)))
	}
	return errors.Join(errs...)
}

// stopIntake waits for requests and accepted messages until ctx is done, and then cuts them off.
func (s *Server) stopIntake(ctx context.Context) (err error) {
	if s.http != nil {
		if err = s.http.Shutdown(ctx); err != nil {
			_ = s.http.Close()
			err = fmt.Errorf("API: %w", err)
		}
	}
	if s.ingester != nil {
		s.ingester.Stop(ctx)
	}
	return err
}

// unregister announces that this process works no queue any more.
func (s *Server) unregister(ctx context.Context) {
	if s.process == nil || s.idle() != nil {
		return
	}
	if err := s.process.Stop(ctx); err != nil {
		s.logger.Warn("unregistering this process failed; "+
			"other processes consider it running for another minute", "error", err)
	}
}

// stopJobs waits for running jobs until ctx is done. It returns ErrStoppedAtOnce if jobs still run then.
func (s *Server) stopJobs(ctx context.Context) error {
	if s.river == nil {
		return nil
	}
	if err := s.river.Stop(ctx); err != nil {
		s.logger.Warn("running jobs did not finish in time; they will run again", "error", err)
		return ErrStoppedAtOnce
	}
	return nil
}

func inParallel(fns ...func()) {
	var wg sync.WaitGroup
	for _, fn := range fns {
		wg.Go(fn)
	}
	wg.Wait()
}
