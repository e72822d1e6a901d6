package main

import (
	"context"
	"log/slog"
	"net"
	"os"
	"strconv"
	"time"
)

// readyInterval is the time between two checks whether a service is ready.
const readyInterval = 200 * time.Millisecond

// supervisor reports the state of the process to systemd, for a unit of Type=notify.
type supervisor struct {
	socket   string        // empty if systemd does not run the process
	watchdog time.Duration // how often systemd expects a keep-alive; 0 if it expects none
	logger   *slog.Logger
}

// newSupervisor reads systemd's variables in the environment and removes them from the environment. Otherwise an
// embedded Postgres would inherit them and report to systemd that the service is ready.
func newSupervisor(logger *slog.Logger) *supervisor {
	v := &supervisor{socket: os.Getenv("NOTIFY_SOCKET"), logger: logger}
	if micros, err := strconv.ParseInt(os.Getenv("WATCHDOG_USEC"), 10, 64); err == nil && micros > 0 {
		v.watchdog = time.Duration(micros) * time.Microsecond
	}
	for _, name := range []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"} {
		_ = os.Unsetenv(name) // fails only for invalid names
	}
	return v
}

// watch tells systemd that the service is ready as soon as ready returns no error. From then on, watch sends the
// keep-alives of systemd's watchdog (WatchdogSec) until end is called. If ctx ends before end is called, watch tells
// systemd that the service is stopping. Keep-alives do not depend on the database, because restarting dlqd would not
// repair a database.
func (v *supervisor) watch(ctx context.Context, ready func(context.Context) error) (end func()) {
	if v.socket == "" {
		return func() {}
	}
	ended := make(chan struct{})
	stopped := context.AfterFunc(ctx, func() { v.send("STOPPING=1") })
	go func() {
		for ready(ctx) != nil {
			select {
			case <-ended:
				return
			case <-time.After(readyInterval):
			}
		}
		if ctx.Err() != nil {
			return // do not send READY after STOPPING
		}
		v.send("READY=1")
		for v.watchdog > 0 {
			v.send("WATCHDOG=1")
			select {
			case <-ended:
				return
			case <-time.After(v.watchdog / 2):
			}
		}
	}()
	return func() {
		stopped()
		close(ended)
	}
}

func (v *supervisor) send(state string) {
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: v.socket, Net: "unixgram"})
	if err == nil {
		_, err = conn.Write([]byte(state))
		_ = conn.Close()
	}
	if err != nil {
		v.logger.Warn("systemd was not notified", "reason", state, "error", err)
	}
}
