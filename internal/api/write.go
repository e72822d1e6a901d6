package api

import (
	"net/http"
	"time"
)

// DefaultWriteTimeout is how long a client may leave a part of a response unread.
const DefaultWriteTimeout = 30 * time.Second

// withWriteTimeout disconnects clients that do not read their response. Otherwise an export or a progress stream would
// wait for such a client forever.
func withWriteTimeout(next http.Handler, timeout time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		timed := &timedWriter{ResponseWriter: w, control: http.NewResponseController(w), timeout: timeout}
		timed.extend()
		next.ServeHTTP(timed, r)
		timed.extend() // after this call, net/http writes the rest of its buffer
	})
}

// timedWriter moves the write deadline with each write, so that a whole response may take any time.
type timedWriter struct {
	http.ResponseWriter

	control  *http.ResponseController
	timeout  time.Duration
	extended time.Time // when the deadline was set
	begun    bool      // part of the response was written
}

// extend sets the deadline of the next write. It keeps a deadline that was set very recently, because otherwise a short
// response would set it four times. extend ignores the error: response recorders of tests have no deadline.
func (w *timedWriter) extend() {
	if now := time.Now(); now.Sub(w.extended) > w.timeout/16 {
		w.extended = now
		_ = w.control.SetWriteDeadline(now.Add(w.timeout))
	}
}

func (w *timedWriter) WriteHeader(status int) {
	w.extend()
	w.begun = w.begun || status >= http.StatusOK
	w.ResponseWriter.WriteHeader(status)
}

func (w *timedWriter) Write(p []byte) (int, error) {
	w.extend()
	w.begun = true
	return w.ResponseWriter.Write(p)
}

// Flush implements http.Flusher, for streams of events.
func (w *timedWriter) Flush() {
	w.extend()
	w.begun = true
	_ = w.control.Flush()
}

// hasBegun reports whether part of a response may have been sent.
func hasBegun(w http.ResponseWriter) bool {
	for w != nil {
		if timed, ok := w.(*timedWriter); ok {
			return timed.begun
		}
		wrapper, ok := w.(interface{ Unwrap() http.ResponseWriter })
		if !ok {
			return false
		}
		w = wrapper.Unwrap()
	}
	return false
}

// Unwrap returns the wrapped writer, for http.ResponseController.
func (w *timedWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }
