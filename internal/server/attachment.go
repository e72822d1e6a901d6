package server

import (
	"context"
	"errors"
	"time"

	"github.com/dlqd/dlqd/internal/background"
)

// attachmentInterval is how often to check that dlqd is still attached to the database.
const attachmentInterval = 2 * time.Second

var errDetached = errors.New("dlqd was detached from this database: it captures and processes nothing; " +
	"run \"dlqd attach\", or stop this process")

// attachmentLoop checks whether dlqd was detached from the database. While dlqd is detached, this process works no
// queue and answers requests with 503. All loops are idle, except this one, the loops that read the policy's files or
// the certificates, and the loop that adds and removes the worked queues. Once dlqd is attached again, everything
// continues.
func (s *Server) attachmentLoop() *background.Loop {
	return background.New(background.Config{
		Name: "attachment", Interval: attachmentInterval, WhenIdle: true, Failing: "checking whether dlqd is attached failed",
		Once: background.Each(func(ctx context.Context) error {
			installed, err := s.migrator().Installed(ctx)
			if err != nil {
				return err
			}
			was := s.detached.Load()
			// After "dlqd attach" the tables may be new and have no policy, or the last publication of the policy failed.
			if installed && (was != nil || s.unpublished.Load()) {
				s.publishPolicy(ctx)
			}
			switch {
			case installed && was != nil:
				if s.worker != nil {
					s.worker.RepublishSwitches()
				}
				s.detached.Store(nil)
				s.logger.Info("dlqd is attached again and continues")
			case !installed && was == nil:
				s.detached.Store(&errDetached)
				s.logger.Warn("idle: " + errDetached.Error())
			default:
				return nil
			}
			if s.queues != nil {
				s.queues.Wake()
			}
			return nil
		}),
	})
}

// idle returns the reason why loops and requests must not work now, or nil if they may.
func (s *Server) idle() error {
	if err := s.detached.Load(); err != nil {
		return *err
	}
	return nil
}
